# The lease of a request: which blocks it owns, in order, and how many tokens they cover.
#
# The blocks of a request stand in one span of the table heap, a power of two
# long, taken when it is first scheduled and given back with its blocks. Spans
# of equal size are kept in lists (the first entry of a free span links to the
# next), so the heap never fragments into odd sizes.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from kvsim._core.events cimport event_add, event_open
from kvsim._core.pool cimport pool_drop, pool_hold, pool_make_room, pool_take
from kvsim._core.prefix cimport prefix_find, prefix_prefetch, prefix_register
from kvsim._core.types cimport (
    CHECK, GROW_TABLES, HAS_PARENT, NO_BLOCK, RUNNING, STORED, config_t, content_t, origin_t, rank_t, request_t,
    unlikely,
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


cdef inline void lease_append(rank_t* r, request_t* q, int32_t b) noexcept nogil:
    r.tables[q.table + q.n_blocks] = b
    q.n_blocks += 1
    q.capacity += <int32_t>r.config.block_size
    if q.status == RUNNING:
        r.header.running_blocks += 1


cdef inline void lease_close(rank_t* r, int32_t slot) noexcept nogil:
    """Give everything back, the last block first; tokens and hashes are kept."""
    cdef request_t* q = &r.requests[slot]
    cdef int64_t i = q.n_blocks - 1
    while i >= 0:
        pool_drop(r, r.tables[q.table + i])
        i -= 1
    if q.status == RUNNING:
        r.header.running_blocks -= q.n_blocks
    if q.table != NO_BLOCK:
        r.tables[q.table] = r.header.table_free[q.table_class]
        r.header.table_free[q.table_class] = q.table
        q.table = NO_BLOCK
    q.n_blocks = 0
    q.capacity = 0
    q.allocated = 0


cdef inline bint lease_grow(rank_t* r, int32_t slot, int64_t tokens, int64_t reused) noexcept nogil:
    """Cover `tokens` tokens; the first `reused` blocks are found by hash if the lease is still empty.

    False, and nothing changed, if the pool cannot give the blocks; what may have
    changed with KVBM tiers is the order of inactive blocks. The request must own
    nothing when `reused` > 0.
    """
    cdef request_t* q = &r.requests[slot]
    cdef int64_t target = blocks_of(r, tokens)
    cdef int64_t fresh
    cdef int64_t inactive_hits = 0
    cdef int64_t i
    cdef int32_t b
    cdef const uint64_t* hashes
    if target > q.n_blocks:
        fresh = target - q.n_blocks - reused
        CHECK(fresh >= 0 and (reused == 0 or q.n_blocks == 0))
        if reused > 0:
            hashes = r.contents[slot].hashes
            for i in range(reused):
                if r.blocks[prefix_find(r, hashes[i])].refs == 0:
                    inactive_hits += 1
        if fresh > r.header.num_free - r.header.num_reserved + r.header.num_inactive - inactive_hits:
            return False
        if q.table == NO_BLOCK:
            lease_open(r, slot)
            q = &r.requests[slot]
        for i in range(reused):
            b = prefix_find(r, hashes[i])
            pool_hold(r, b)
            lease_append(r, q, b)
        if unlikely(not pool_make_room(r, fresh, 0)):
            # KVBM tiers: the blocks are on their way out.
            if r.requests[slot].n_blocks == reused:
                lease_close(r, slot)
            return False
        q = &r.requests[slot]
        for i in range(fresh):
            lease_append(r, q, pool_take(r))
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
    cdef bint visible
    cdef origin_t* origin
    q.next_seal = <int32_t>((last + 1) * c.block_size)
    if not c.caching:
        return
    CHECK(last <= content.num_hashes and last <= q.n_blocks)
    if q.hashed < last:
        q.hashed = <int32_t>last
    while i < last:
        if i + 8 < last:
            prefix_prefetch(r, content.hashes[i + 8])
        if r.blocks[r.tables[q.table + i]].hashed:
            # Computed before by this request: a block given back keeps its content.
            i += 1
            continue
        visible = prefix_register(r, r.tables[q.table + i], content.hashes[i])
        if c.emit_events:
            if unlikely(c.tiers):
                origin = &r.origins[r.tables[q.table + i]]
                origin.tokens_hash = content.locals[i] if content.locals != NULL else 0
                origin.parent_hash = content.hashes[i - 1] if i > 0 else 0
                origin.flags = HAS_PARENT if i > 0 else 0
            if not visible:
                opened = False
            else:
                if not opened:
                    event_open(r, STORED, content.hashes[i - 1] if i > 0 else 0, HAS_PARENT if i > 0 else 0)
                    opened = True
                event_add(r, content.hashes[i], content.locals[i] if content.locals != NULL else 0, slot, <int32_t>i)
        i += 1


cdef inline void prefix_cost(const rank_t* r, int32_t slot, int64_t* cached, int64_t* active) noexcept nogil:
    """Leading blocks of the request that are findable, and how many of them are in use.

    Walks the known hashes; changes nothing, not even recency (spec/kv-cache.md section 5).
    """
    cdef const request_t* q = &r.requests[slot]
    cdef const uint64_t* hashes = r.contents[slot].hashes
    cdef int64_t n = q.hashed
    cdef int64_t i
    cdef int32_t b
    cached[0] = 0
    active[0] = 0
    if not r.config.caching:
        return
    for i in range(n):
        if i + 8 < n:
            prefix_prefetch(r, hashes[i + 8])
        b = prefix_find(r, hashes[i])
        if b == NO_BLOCK:
            return
        cached[0] += 1
        if r.blocks[b].refs > 0:
            active[0] += 1
