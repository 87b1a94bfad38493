# The lease of a request: which blocks it owns, in order, and how many tokens they cover.
#
# The blocks of a request stand in one span of the table heap, a power of two
# long, taken when it is first scheduled and given back with its blocks. Spans
# of equal size are kept in lists (the first entry of a free span links to the
# next), so the heap never fragments into odd sizes.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy

from kvsim._core.events cimport event_add, event_open
from kvsim._core.pool cimport AHEAD, pool_drop, pool_hold, pool_make_room, pool_take
from kvsim._core.prefix cimport prefix_find, prefix_oldest, prefix_register
from kvsim._core.types cimport (
    CHECK, GROW_TABLES, HAS_PARENT, NO_BLOCK, RUNNING, STORED, config_t, content_t, origin_t,
    prefetch, rank_t, request_t, unlikely,
)


cdef inline int64_t blocks_of(const rank_t* r, int64_t tokens) noexcept nogil:
    """Blocks that `tokens` tokens need."""
    return (tokens + r.config.block_size - 1) // r.config.block_size


cdef inline void lease_open(rank_t* r, int32_t slot) noexcept nogil:
    """Take a table span long enough for all the request can ever own."""
    cdef request_t* q = &r.requests[slot]
    cdef int64_t entries = blocks_of(r, q.limit if q.limit > q.length else q.length) + 1
    cdef uint8_t size = 0
    cdef int64_t span
    if entries > r.config.num_blocks:
        entries = r.config.num_blocks
    while (<int64_t>1 << size) < entries:
        size += 1
    q.table_class = size
    if r.header.table_free[size] != NO_BLOCK:
        q.table = r.header.table_free[size]
        r.header.table_free[size] = r.tables[q.table]
        return
    span = <int64_t>1 << size
    if unlikely(r.header.table_used + span > r.cap_tables):
        r.grow(r, GROW_TABLES, r.header.table_used + span)
        q = &r.requests[slot]
    q.table = <int32_t>r.header.table_used
    r.header.table_used += span


cdef inline void lease_take(rank_t* r, request_t* q, int64_t count) noexcept nogil:
    """Append `count` empty blocks, which there must be, to a lease with a table."""
    pool_take(r, &r.tables[q.table + q.n_blocks], count)
    lease_count(r, q, count)


cdef inline void lease_count(rank_t* r, request_t* q, int64_t count) noexcept nogil:
    """The next `count` entries of its table are blocks of the request."""
    q.n_blocks += <int32_t>count
    q.capacity += <int32_t>(count * r.config.block_size)
    if q.status == RUNNING:
        r.header.running_blocks += count


cdef inline bint lease_grow(rank_t* r, int32_t slot, int64_t tokens, int64_t reused) noexcept nogil:
    """Cover `tokens` tokens; the first `reused` blocks are found by hash if the lease is still empty.

    False, and nothing changed, if the pool cannot give the blocks; with KVBM tiers
    they may be on their way out, which `pass_t.offloading` says. The request
    must own nothing when `reused` > 0, and `prefix_cost` have found as many.
    """
    cdef request_t* q = &r.requests[slot]
    cdef int64_t target = blocks_of(r, tokens)
    cdef int64_t fresh
    cdef int64_t room
    cdef int64_t i
    if target > q.n_blocks:
        fresh = target - q.n_blocks - reused
        CHECK(fresh >= 0 and (reused == 0 or q.n_blocks == 0))
        if reused > 0:
            lease_find(r, slot)
            CHECK(reused <= r.num_found)
        if fresh > r.header.num_free - r.header.num_reserved:
            room = r.header.num_free - r.header.num_reserved + r.header.num_inactive
            # Inactive blocks that are reused cannot be evicted; they are counted where it matters.
            if fresh > room - reused:
                for i in range(reused):
                    room -= r.blocks[r.found[i]].refs == 0
            if fresh > room:
                return False
            if unlikely(r.config.tiers) and not r.make_room(r, fresh, reused):
                return False
            q = &r.requests[slot]
        if q.table == NO_BLOCK:
            lease_open(r, slot)
            q = &r.requests[slot]
        if reused > 0:
            pool_hold(r, r.found, reused)
            memcpy(&r.tables[q.table], r.found, <size_t>reused * sizeof(int32_t))
            lease_count(r, q, reused)
        pool_make_room(r, fresh, 0)
        q = &r.requests[slot]
        lease_take(r, q, fresh)
    if tokens > q.allocated:
        q.allocated = <int32_t>tokens
    return True


cdef inline void lease_seal(rank_t* r, int32_t slot, int64_t before, int64_t after) noexcept nogil:
    """Blocks whose last token lies in (before, after] are computed: make them findable.

    One Stored event per run of blocks that were not findable before
    (spec/kv-cache.md sections 4 and 6).
    """
    cdef request_t* q = &r.requests[slot]
    cdef const config_t* c = r.config
    cdef int64_t i = before // c.block_size
    cdef int64_t last = after // c.block_size
    cdef const content_t* content = &r.contents[slot]
    cdef bint opened = False
    cdef int32_t before_it = NO_BLOCK
    cdef int32_t oldest
    cdef int32_t b
    cdef origin_t* origin
    q.next_seal = <int32_t>((last + 1) * c.block_size)
    if not c.caching:
        return
    CHECK(last <= content.num_hashes and last <= q.n_blocks)
    if q.hashed < last:
        q.hashed = <int32_t>last
    # The index is closed under prefixes.
    while i > 0 and unlikely(not r.blocks[r.tables[q.table + i - 1]].hashed):
        i -= 1
    if i < last and i > 0:
        before_it = prefix_oldest(r, r.tables[q.table + i - 1], content.hashes, i - 1)
    while i < last:
        b = r.tables[q.table + i]
        if r.blocks[b].hashed:
            # Computed before by this request: a block given back keeps its content.
            before_it = prefix_oldest(r, b, content.hashes, i)
            i += 1
            continue
        before_it = prefix_register(r, b, before_it, content.hashes[i])
        if c.emit_events:
            if unlikely(c.tiers):
                origin = &r.origins[b]
                origin.tokens_hash = content.locals[i] if content.locals != NULL else 0
                origin.parent_hash = content.hashes[i - 1] if i > 0 else 0
                origin.flags = HAS_PARENT if i > 0 else 0
            if before_it != b:
                opened = False
            else:
                if not opened:
                    event_open(r, STORED, content.hashes[i - 1] if i > 0 else 0, HAS_PARENT if i > 0 else 0)
                    opened = True
                event_add(r, content.hashes[i], content.locals[i] if content.locals != NULL else 0, slot, <int32_t>i)
        i += 1


cdef inline void lease_close(rank_t* r, int32_t slot) noexcept nogil:
    """Give everything back, the last block first; tokens and hashes are kept."""
    cdef request_t* q = &r.requests[slot]
    pool_drop(r, &r.tables[q.table], q.n_blocks)
    if q.status == RUNNING:
        r.header.running_blocks -= q.n_blocks
    if q.table != NO_BLOCK:
        r.tables[q.table] = r.header.table_free[q.table_class]
        r.header.table_free[q.table_class] = q.table
        q.table = NO_BLOCK
    q.n_blocks = 0
    q.capacity = 0
    q.allocated = 0


cdef inline bint lease_remembers(const rank_t* r, int32_t slot) noexcept nogil:
    """Whether `found` still holds leading blocks of the request: none was evicted, held or dropped since."""
    return r.found_of == slot and r.found_uses == r.uses and r.header.inactive_head <= r.found_first


cdef inline void lease_find(rank_t* r, int32_t slot) noexcept nogil:
    """Put the leading blocks of the request that are findable into `found`, by its known hashes.

    The head of a blocked queue is looked up in every pass. So the lookup goes
    on where the last one ended, if that was for the same request and nothing
    has happened to what it found.
    """
    cdef const uint64_t* hashes = r.contents[slot].hashes
    cdef int64_t n = r.requests[slot].hashed
    cdef int64_t head = r.header.inactive_head
    cdef int64_t i
    cdef int64_t place
    cdef int32_t b
    if not lease_remembers(r, slot):
        r.found_of = slot
        r.found_uses = r.uses
        r.found_first = head + r.mask_inactive + 1
        r.found_active = 0
        r.num_found = 0
    i = r.num_found
    b = r.found[i - 1] if i > 0 else NO_BLOCK
    while i < n:
        b = prefix_find(r, b, hashes[i])
        if b == NO_BLOCK:
            break
        r.found[i] = b
        i += 1
        if r.blocks[b].refs > 0:
            r.found_active += 1
            continue
        place = r.blocks[b].place
        # Blocks that became inactive together lie in the queue from the last to the first.
        prefetch(&r.blocks[r.inactive[(place - AHEAD) & r.mask_inactive]])
        place = head + ((place - head) & r.mask_inactive)
        if place < r.found_first:
            r.found_first = place
    r.num_found = i


cdef inline void prefix_cost(rank_t* r, int32_t slot, int64_t* cached, int64_t* active) noexcept nogil:
    """Leading blocks of the request that are findable, and how many of them are in use.

    Changes nothing, not even recency (spec/kv-cache.md section 5).
    """
    cached[0] = 0
    active[0] = 0
    if not r.config.caching:
        return
    lease_find(r, slot)
    cached[0] = r.num_found
    active[0] = r.found_active
