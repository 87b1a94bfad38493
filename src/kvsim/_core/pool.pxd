# The block pool: references, the stack of empty blocks, the inactive list.
#
# A block is in exactly one place (spec/kv-cache.md section 2):
#
#   free_stack   no content; the top is handed out next
#   in use       refs > 0
#   inactive     findable, refs = 0: in a queue of ids, the next victim first,
#
#       .. - - 17 - 4 5 - - - 23 - -         - : a gap that a hit has left
#              ^head           ^tail
#
# A block knows its place in the queue, because a hit takes it out of the
# middle. A list through the rows would do without gaps; but ids of neighbours
# in the queue have nothing to do with each other, so each step of an eviction
# would wait for a cold row to learn which is next. Here rows are fetched ahead.
# The queue is a ring of at least twice the blocks; when its end has come round
# to its head, the gaps are squeezed out.
#
# Owners release their blocks from the last to the first, so a suffix is older
# than its parent and leaves are evicted before roots.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.events cimport event_add, event_open
from kvsim._core.prefix cimport prefix_unregister
from kvsim._core.types cimport CHECK, FINDABLE, NO_BLOCK, NO_SLOT, REMOVED, block_t, prefetch, rank_t, unlikely

cdef enum:
    AHEAD = 12  # rows are asked for so many blocks before they are needed


cdef inline int64_t pool_active(const rank_t* r) noexcept nogil:
    """Blocks in use, those promised to a reservation included."""
    return r.config.num_blocks - r.header.num_inactive - (r.header.num_free - r.header.num_reserved)


cdef inline void pool_hold(rank_t* r, const int32_t* held, int64_t count) noexcept nogil:
    """One more reference to each of these findable blocks; they leave the queue of inactive ones if they were there."""
    cdef block_t* block
    cdef int64_t inactive = 0
    cdef int64_t i
    r.uses += 1
    for i in range(count):
        block = &r.blocks[held[i]]
        CHECK(block.hashed & FINDABLE)
        if block.refs == 0:
            r.inactive[block.place] = NO_BLOCK
            block.place = NO_BLOCK
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


cdef inline void pool_squeeze(rank_t* r) noexcept nogil:
    """Close the gaps in the queue of inactive blocks."""
    cdef int32_t* queue = r.inactive
    cdef int64_t mask = r.mask_inactive
    cdef int64_t kept = r.header.inactive_head
    cdef int64_t at
    cdef int32_t b
    for at in range(r.header.inactive_head, r.header.inactive_tail):
        b = queue[at & mask]
        if b == NO_BLOCK:
            continue
        queue[at & mask] = NO_BLOCK
        queue[kept & mask] = b
        r.blocks[b].place = <int32_t>(kept & mask)
        kept += 1
    r.header.inactive_tail = kept


cdef inline void pool_drop(rank_t* r, const int32_t* dropped, int64_t count) noexcept nogil:
    """One reference less to each of these blocks, the last one first; unused ones become inactive (findable) or empty."""
    cdef block_t* blocks = r.blocks
    cdef int64_t mask = r.mask_inactive
    cdef int64_t tail
    cdef int64_t empty = r.header.num_free
    cdef block_t* block
    cdef int32_t b
    r.uses += 1
    if unlikely(r.header.inactive_tail + count - r.header.inactive_head > mask + 1):
        pool_squeeze(r)
    tail = r.header.inactive_tail
    while count > 0:
        count -= 1
        if count >= AHEAD:
            prefetch(&blocks[dropped[count - AHEAD]])
        b = dropped[count]
        block = &blocks[b]
        CHECK(block.refs > 0)
        block.refs -= 1
        if block.refs > 0:
            continue
        if block.hashed:
            block.place = <int32_t>(tail & mask)
            r.inactive[tail & mask] = b
            tail += 1
        else:
            r.free_stack[empty] = b
            empty += 1
    r.header.num_inactive += tail - r.header.inactive_tail
    r.header.inactive_tail = tail
    r.header.num_free = empty


cdef inline void pool_evict(rank_t* r, int64_t count) noexcept nogil:
    """Empty the `count` oldest inactive blocks; one Removed event names the hashes that are gone.

    The blocks go on top of the stack: they are handed out before those that
    were empty already, the last evicted first (spec/kv-cache.md section 3).
    """
    cdef int64_t mask = r.mask_inactive
    cdef int64_t at = r.header.inactive_head
    cdef int64_t empty = r.header.num_free
    cdef int64_t last = empty + count
    cdef int32_t b
    cdef bint opened = False
    CHECK(count <= r.header.num_inactive)
    r.header.num_inactive -= count
    while empty < last:
        b = r.inactive[at & mask]
        r.inactive[at & mask] = NO_BLOCK
        prefetch(&r.blocks[r.inactive[(at + AHEAD) & mask]])
        at += 1
        if b == NO_BLOCK:
            continue
        r.blocks[b].place = NO_BLOCK
        r.free_stack[empty] = b
        empty += 1
        if prefix_unregister(r, b) and r.config.emit_events:
            # Events may move the arena, and only the stack in use is moved.
            r.header.num_free = empty
            if not opened:
                event_open(r, REMOVED, 0, 0)
                opened = True
            event_add(r, r.blocks[b].hash, 0, NO_SLOT, 0)
    r.header.num_free = empty
    r.header.inactive_head = at


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
