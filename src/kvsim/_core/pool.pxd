# The block pool: references, the stack of empty blocks, the inactive list.
#
# A block is in exactly one place (spec/kv-cache.md section 2):
#
#   free_stack   no content; the top is handed out next
#   in use       refs > 0
#   inactive     findable, refs = 0: a doubly linked list through the rows,
#
#       sentinel.next -> oldest <-> ... <-> newest <- sentinel.prev
#
#     The list is ours because a hit takes a block out of the middle. Owners
#     release their blocks from the last to the first, so a suffix is older
#     than its parent and leaves are evicted before roots.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.events cimport event_add, event_open
from kvsim._core.prefix cimport prefix_unregister
from kvsim._core.types cimport CHECK, FINDABLE, NO_BLOCK, NO_SLOT, REMOVED, block_t, rank_t, unlikely


cdef inline int64_t pool_active(const rank_t* r) noexcept nogil:
    """Blocks in use, those promised to a reservation included."""
    return r.config.num_blocks - r.header.num_inactive - (r.header.num_free - r.header.num_reserved)


cdef inline void pool_hold(rank_t* r, const int32_t* held, int64_t count) noexcept nogil:
    """One more reference to each of these findable blocks; they leave the inactive list if they were there."""
    cdef block_t* blocks = r.blocks
    cdef block_t* block
    cdef int64_t inactive = 0
    cdef int64_t i
    for i in range(count):
        block = &blocks[held[i]]
        CHECK(block.hashed & FINDABLE)
        if block.refs == 0:
            blocks[block.prev].next = block.next
            blocks[block.next].prev = block.prev
            block.prev = NO_BLOCK
            block.next = NO_BLOCK
            inactive += 1
        block.refs += 1
    r.header.num_inactive -= inactive


cdef inline void pool_take(rank_t* r, int32_t* taken, int64_t count) noexcept nogil:
    """Put `count` empty blocks with one reference each into `taken`. There must be as many."""
    cdef block_t* blocks = r.blocks
    cdef const int32_t* top = r.free_stack + r.header.num_free - 1
    cdef int64_t i
    CHECK(r.header.num_free >= count)
    for i in range(count):
        CHECK(blocks[top[-i]].refs == 0 and blocks[top[-i]].hashed == 0)
        blocks[top[-i]].refs = 1
        taken[i] = top[-i]
    r.header.num_free -= count


cdef inline void pool_drop(rank_t* r, const int32_t* dropped, int64_t count) noexcept nogil:
    """One reference less to each of these blocks, the last one first; unused ones become inactive (findable) or empty."""
    cdef block_t* blocks = r.blocks
    cdef int32_t sentinel = <int32_t>r.config.num_blocks
    cdef int32_t newest = blocks[sentinel].prev
    cdef int64_t empty = r.header.num_free
    cdef int64_t inactive = 0
    cdef block_t* block
    cdef int32_t b
    while count > 0:
        count -= 1
        b = dropped[count]
        block = &blocks[b]
        CHECK(block.refs > 0)
        block.refs -= 1
        if block.refs > 0:
            continue
        if block.hashed:
            block.prev = newest
            blocks[newest].next = b
            newest = b
            inactive += 1
        else:
            r.free_stack[empty] = b
            empty += 1
    blocks[newest].next = sentinel
    blocks[sentinel].prev = newest
    r.header.num_inactive += inactive
    r.header.num_free = empty


cdef inline void pool_evict(rank_t* r, int64_t count) noexcept nogil:
    """Empty the `count` oldest inactive blocks; one Removed event names the hashes that are gone.

    The blocks go on top of the stack: they are handed out before those that
    were empty already, the last evicted first (spec/kv-cache.md section 3).
    """
    cdef block_t* blocks = r.blocks
    cdef int32_t sentinel = <int32_t>r.config.num_blocks
    cdef int32_t b = blocks[sentinel].next
    cdef int32_t after
    cdef int64_t empty = r.header.num_free
    cdef int64_t last = empty + count
    cdef bint opened = False
    CHECK(count <= r.header.num_inactive)
    r.found_of = NO_SLOT
    r.header.num_inactive -= count
    while empty < last:
        after = blocks[b].next
        blocks[b].prev = NO_BLOCK
        blocks[b].next = NO_BLOCK
        r.free_stack[empty] = b
        empty += 1
        if prefix_unregister(r, b) and r.config.emit_events:
            # Events may move the arena, and only the stack in use is moved.
            r.header.num_free = empty
            if not opened:
                event_open(r, REMOVED, 0, 0)
                opened = True
            event_add(r, r.blocks[b].hash, 0, NO_SLOT, 0)
            blocks = r.blocks
        b = after
    r.header.num_free = empty
    blocks[sentinel].next = b
    blocks[b].prev = sentinel


cdef inline bint pool_make_room(rank_t* r, int64_t fresh, int64_t held) noexcept nogil:
    """Have `fresh` empty blocks ready, evicting if need be; false and nothing changed if there are not enough.

    With KVBM tiers evicted blocks may be on their way out: false, too, but `pass_t.offloading` is set.

    `held` inactive blocks are about to be used and may not be counted as evictable.
    """
    cdef int64_t missing = fresh - (r.header.num_free - r.header.num_reserved)
    if missing <= 0:
        return True
    if missing > r.header.num_inactive - held:
        return False
    if unlikely(r.config.tiers):
        return r.make_room(r, fresh, 0)
    pool_evict(r, missing)
    return True
