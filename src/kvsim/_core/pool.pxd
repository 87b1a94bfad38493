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
from kvsim._core.types cimport CHECK, NO_BLOCK, NO_SLOT, REMOVED, block_t, prefetch, rank_t, unlikely


cdef inline int64_t pool_active(const rank_t* r) noexcept nogil:
    """Blocks in use, those promised to a reservation included."""
    return r.config.num_blocks - r.header.num_inactive - (r.header.num_free - r.header.num_reserved)


cdef inline void pool_hold(rank_t* r, int32_t b) noexcept nogil:
    """One more reference to a findable block; leaves the inactive list if it was there."""
    cdef block_t* block = &r.blocks[b]
    if block.refs == 0:
        r.blocks[block.prev].next = block.next
        r.blocks[block.next].prev = block.prev
        block.prev = NO_BLOCK
        block.next = NO_BLOCK
        r.header.num_inactive -= 1
    block.refs += 1


cdef inline int32_t pool_take(rank_t* r) noexcept nogil:
    """An empty block with one reference. There must be one."""
    cdef int32_t b
    CHECK(r.header.num_free > 0)
    r.header.num_free -= 1
    b = r.free_stack[r.header.num_free]
    CHECK(r.blocks[b].refs == 0 and r.blocks[b].hashed == 0)
    r.blocks[b].refs = 1
    return b


cdef inline void pool_drop(rank_t* r, int32_t b) noexcept nogil:
    """One reference less; an unused block becomes inactive (findable) or empty."""
    cdef block_t* block = &r.blocks[b]
    cdef int32_t sentinel
    CHECK(block.refs > 0)
    block.refs -= 1
    if block.refs > 0:
        return
    if block.hashed:
        sentinel = <int32_t>r.config.num_blocks
        block.prev = r.blocks[sentinel].prev
        block.next = sentinel
        r.blocks[block.prev].next = b
        r.blocks[sentinel].prev = b
        r.header.num_inactive += 1
        r.ahead[r.recent[r.recent_at & 3]] = b
        r.recent[r.recent_at & 3] = b
        r.recent_at += 1
    else:
        r.free_stack[r.header.num_free] = b
        r.header.num_free += 1


cdef inline void pool_evict(rank_t* r, int64_t count) noexcept nogil:
    """Empty the `count` oldest inactive blocks; one Removed event names the hashes that are gone.

    The blocks go on top of the stack: they are handed out before those that
    were empty already, the last evicted first (spec/kv-cache.md section 3).

    Rows of old blocks are cold, and a list cannot be walked ahead without
    waiting for each row. `ahead` remembers who followed four places behind when
    a block joined the list; a hit in between makes it stale, which costs a
    useless prefetch and nothing else.
    """
    cdef int32_t sentinel = <int32_t>r.config.num_blocks
    cdef int32_t b
    cdef int32_t after
    cdef int32_t later
    cdef uint64_t hash
    cdef bint opened = False
    CHECK(count <= r.header.num_inactive)
    while count > 0:
        b = r.blocks[sentinel].next
        after = r.blocks[b].next
        later = r.ahead[b]
        prefetch(&r.slots[<int64_t>r.blocks[later].hash & r.mask_slots])
        prefetch(&r.blocks[r.ahead[later]])
        r.blocks[sentinel].next = after
        r.blocks[after].prev = sentinel
        hash = r.blocks[b].hash
        r.blocks[b].prev = NO_BLOCK
        r.blocks[b].next = NO_BLOCK
        r.header.num_inactive -= 1
        if prefix_unregister(r, b) and r.config.emit_events:
            if not opened:
                event_open(r, REMOVED, 0, 0)
                opened = True
            event_add(r, hash, 0, NO_SLOT, 0)
        r.free_stack[r.header.num_free] = b
        r.header.num_free += 1
        count -= 1


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
        return r.make_room(r, fresh)
    pool_evict(r, missing)
    return True
