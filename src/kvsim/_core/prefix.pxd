# Hash -> block: which blocks are findable, and under which hash.
#
# Linear probing over 16-byte slots; a deletion shifts the rest of its cluster
# back, so there are no tombstones and no rehash. An empty slot is marked in
# `first`, so every 64-bit hash is legal. The capacity is fixed when the arena
# is planned, at least twice the blocks.
#
# A hash may have several physical copies: two requests computed the same block
# at the same time, and ids in block tables must never change. Copies hang in a
# list, oldest first; lookups take the oldest (spec/kv-cache.md section 2).

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.types cimport CHECK, NO_BLOCK, block_t, prefetch, rank_t, slot_t


cdef inline void prefix_prefetch(const rank_t* r, uint64_t hash) noexcept nogil:
    prefetch(&r.slots[<int64_t>hash & r.mask_slots])


cdef inline int32_t prefix_find(const rank_t* r, uint64_t hash) noexcept nogil:
    """Oldest copy of `hash`, or NO_BLOCK. Changes nothing."""
    cdef int64_t i = <int64_t>hash & r.mask_slots
    while r.slots[i].first != NO_BLOCK:
        if r.slots[i].hash == hash:
            return r.slots[i].first
        i = (i + 1) & r.mask_slots
    return NO_BLOCK


cdef inline bint prefix_register(rank_t* r, int32_t b, uint64_t hash) noexcept nogil:
    """Make block `b` findable as the newest copy of `hash`; true if it is the only one."""
    cdef int64_t i = <int64_t>hash & r.mask_slots
    cdef slot_t* slot
    cdef block_t* block = &r.blocks[b]
    CHECK(block.hashed == 0)
    block.hash = hash
    block.hashed = 1
    block.copy_next = NO_BLOCK
    while True:
        slot = &r.slots[i]
        if slot.first == NO_BLOCK:
            slot.hash = hash
            slot.first = b
            slot.last = b
            block.copy_prev = NO_BLOCK
            return True
        if slot.hash == hash:
            block.copy_prev = slot.last
            r.blocks[slot.last].copy_next = b
            slot.last = b
            return False
        i = (i + 1) & r.mask_slots


cdef inline bint prefix_unregister(rank_t* r, int32_t b) noexcept nogil:
    """Take block `b` out of the index; true if its hash is gone with it."""
    cdef block_t* block = &r.blocks[b]
    cdef int64_t mask = r.mask_slots
    cdef int64_t i = <int64_t>block.hash & mask
    cdef int64_t j
    cdef int64_t home
    CHECK(block.hashed == 1)
    block.hashed = 0
    while r.slots[i].hash != block.hash or r.slots[i].first == NO_BLOCK:
        i = (i + 1) & mask
    if r.slots[i].first != r.slots[i].last:
        if block.copy_prev == NO_BLOCK:
            r.slots[i].first = block.copy_next
        else:
            r.blocks[block.copy_prev].copy_next = block.copy_next
        if block.copy_next == NO_BLOCK:
            r.slots[i].last = block.copy_prev
        else:
            r.blocks[block.copy_next].copy_prev = block.copy_prev
        return False
    CHECK(r.slots[i].first == b)
    j = i
    while True:
        j = (j + 1) & mask
        if r.slots[j].first == NO_BLOCK:
            break
        home = <int64_t>r.slots[j].hash & mask
        # Slot j may fill the hole at i unless its home lies cyclically in (i, j].
        if ((j - home) & mask) >= ((j - i) & mask):
            r.slots[i] = r.slots[j]
            i = j
    r.slots[i].first = NO_BLOCK
    r.slots[i].last = NO_BLOCK
    r.slots[i].hash = 0
    return True
