# Request rows: allocation, the id index, the waiting list and the running set.

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memmove, memset

from kvsim._core.types cimport (
    ACTIVATED, BY_SCORE, GROW_REQUESTS, HANDOFF, NO_BLOCK, NO_SLOT, PREEMPTED, RUNNING, SCORED, WAITING, content_t,
    handoff_t, header_t, offload_t, rank_t, request_t, unlikely,
)


cdef inline int64_t id_home(const rank_t* r, uint64_t hi, uint64_t lo) noexcept nogil:
    cdef uint64_t mixed = (lo ^ (hi * <uint64_t>0x9E3779B97F4A7C15)) * <uint64_t>0xBF58476D1CE4E5B9
    return <int64_t>(mixed >> 20) & r.mask_ids


cdef inline int32_t id_find(const rank_t* r, uint64_t hi, uint64_t lo) noexcept nogil:
    """Row of the live request with this id, or NO_SLOT."""
    cdef int64_t i = id_home(r, hi, lo)
    cdef int32_t slot
    while r.ids[i] != NO_SLOT:
        slot = r.ids[i]
        if r.requests[slot].id_lo == lo and r.requests[slot].id_hi == hi:
            return slot
        i = (i + 1) & r.mask_ids
    return NO_SLOT


cdef inline void id_insert(rank_t* r, int32_t slot) noexcept nogil:
    cdef int64_t i = id_home(r, r.requests[slot].id_hi, r.requests[slot].id_lo)
    while r.ids[i] != NO_SLOT:
        i = (i + 1) & r.mask_ids
    r.ids[i] = slot


cdef inline void id_remove(rank_t* r, int32_t slot) noexcept nogil:
    cdef int64_t i = id_home(r, r.requests[slot].id_hi, r.requests[slot].id_lo)
    cdef int64_t j
    cdef int64_t home
    while r.ids[i] != slot:
        i = (i + 1) & r.mask_ids
    j = i
    while True:
        j = (j + 1) & r.mask_ids
        if r.ids[j] == NO_SLOT:
            break
        home = id_home(r, r.requests[r.ids[j]].id_hi, r.requests[r.ids[j]].id_lo)
        if ((j - home) & r.mask_ids) >= ((j - i) & r.mask_ids):
            r.ids[i] = r.ids[j]
            i = j
    r.ids[i] = NO_SLOT


cdef inline int32_t row_take(rank_t* r) noexcept nogil:
    """A zeroed row, the table growing if all are in use."""
    cdef int32_t slot
    if r.header.free_request != NO_SLOT:
        slot = r.header.free_request
        r.header.free_request = r.requests[slot].next
    else:
        if unlikely(r.header.high_water == r.cap_requests):
            r.grow(r, GROW_REQUESTS, r.header.high_water + 1)
        slot = <int32_t>r.header.high_water
        r.header.high_water += 1
    memset(&r.requests[slot], 0, sizeof(request_t))
    r.header.num_live += 1
    return slot


cdef inline void row_release(rank_t* r, int32_t slot) noexcept nogil:
    id_remove(r, slot)
    if unlikely(r.requests[slot].flags & HANDOFF):
        memset(&r.handoffs[slot], 0, sizeof(handoff_t))
    if unlikely(r.config.offload):
        memset(&r.offloads[slot], 0, sizeof(offload_t))
    memset(&r.requests[slot], 0, sizeof(request_t))
    r.requests[slot].next = r.header.free_request
    r.header.free_request = slot
    r.header.num_live -= 1


# ---------------------------------------------------------------- waiting

cdef inline void requeued_count(rank_t* r, int64_t n, int64_t sign) noexcept nogil:
    """Account a waiting request of `n` tokens whose next step is a decode, as far as metrics are concerned."""
    cdef header_t* h = r.header
    h.requeued_count += sign
    h.requeued_sum += sign * n
    h.requeued_squares += sign * n * n


cdef inline void waiting_count(rank_t* r, const request_t* q, int64_t sign) noexcept nogil:
    """Account a waiting request in the sums behind the queue metrics."""
    cdef header_t* h = r.header
    cdef int64_t n
    h.num_waiting += sign
    if q.status == PREEMPTED or q.flags & ACTIVATED:
        requeued_count(r, q.length, sign)
    else:
        n = q.num_input
        h.queued_count += sign
        h.queued_sum += sign * n
        h.queued_squares += sign * n * n


cdef inline void waiting_link(rank_t* r, int32_t slot, int32_t before) noexcept nogil:
    """Insert in front of row `before`; NO_SLOT: at the end."""
    cdef request_t* q = &r.requests[slot]
    cdef header_t* h = r.header
    q.next = before
    q.prev = h.waiting_tail if before == NO_SLOT else r.requests[before].prev
    if q.prev == NO_SLOT:
        h.waiting_head = slot
    else:
        r.requests[q.prev].next = slot
    if before == NO_SLOT:
        h.waiting_tail = slot
    else:
        r.requests[before].prev = slot
    waiting_count(r, q, 1)


cdef inline void waiting_push_back(rank_t* r, int32_t slot) noexcept nogil:
    """Queue a request: at the end, or behind the last one of equal or smaller score; never before a preempted one."""
    cdef int32_t before = NO_SLOT
    cdef int32_t other
    if r.config.order == BY_SCORE:
        other = r.header.waiting_tail
        while (other != NO_SLOT and r.requests[other].status != PREEMPTED
               and r.requests[other].score > r.requests[slot].score):
            before = other
            other = r.requests[other].prev
    waiting_link(r, slot, before)


cdef inline void waiting_remove(rank_t* r, int32_t slot) noexcept nogil:
    cdef request_t* q = &r.requests[slot]
    cdef header_t* h = r.header
    if q.prev == NO_SLOT:
        h.waiting_head = q.next
    else:
        r.requests[q.prev].next = q.next
    if q.next == NO_SLOT:
        h.waiting_tail = q.prev
    else:
        r.requests[q.next].prev = q.prev
    q.next = NO_SLOT
    q.prev = NO_SLOT
    waiting_count(r, q, -1)


cdef inline int32_t row_open(
    rank_t* r, uint64_t id_hi, uint64_t id_lo, int64_t num_input, int64_t max_output, const content_t* content
) noexcept nogil:
    """A row for a new request, not queued yet. The id must not be active."""
    cdef int32_t slot = row_take(r)
    cdef request_t* q = &r.requests[slot]
    q.id_hi = id_hi
    q.id_lo = id_lo
    q.num_input = <int32_t>num_input
    q.length = <int32_t>num_input
    q.max_output = <int32_t>max_output
    q.limit = <int32_t>(num_input + max_output)
    q.table = NO_BLOCK
    q.stamp = -1
    q.status = WAITING
    q.next = NO_SLOT
    q.prev = NO_SLOT
    q.cached_prefix = -1
    q.waiting_order = r.header.arrivals
    r.header.arrivals += 1
    r.contents[slot] = content[0]
    return slot


cdef inline void row_queue(rank_t* r, int32_t slot) noexcept nogil:
    """Make an opened row findable by its id and let it wait."""
    cdef request_t* q = &r.requests[slot]
    id_insert(r, slot)
    if r.config.order == BY_SCORE:
        q.score = r.score(r, slot)
        q.flags |= SCORED
    waiting_push_back(r, slot)
    # The verdict of the last pass no longer holds.
    r.header.effect_free = 0


# ---------------------------------------------------------------- running

cdef inline int64_t completion_blocks(const rank_t* r, const request_t* q) noexcept nogil:
    """Blocks of prompt and all outputs."""
    return (<int64_t>q.num_input + q.max_output + r.config.block_size - 1) // r.config.block_size


cdef inline void running_append(rank_t* r, int32_t slot) noexcept nogil:
    cdef request_t* q = &r.requests[slot]
    q.status = RUNNING
    r.running[r.header.num_running] = slot
    r.header.num_running += 1
    r.header.running_blocks += q.n_blocks
    r.header.running_completion += completion_blocks(r, q)


cdef inline void running_leave(rank_t* r, int32_t slot) noexcept nogil:
    """Account a request that leaves the running set; its entry in `running` is removed by the caller."""
    cdef request_t* q = &r.requests[slot]
    r.header.running_blocks -= q.n_blocks
    r.header.running_completion -= completion_blocks(r, q)


cdef inline void running_delete(rank_t* r, int64_t index) noexcept nogil:
    r.header.num_running -= 1
    memmove(&r.running[index], &r.running[index + 1], <size_t>(r.header.num_running - index) * sizeof(int32_t))


cdef inline int64_t running_index(const rank_t* r, int32_t slot) noexcept nogil:
    """Position of a running request; scans from the end, where victims and newcomers are."""
    cdef int64_t i = r.header.num_running - 1
    while i >= 0 and r.running[i] != slot:
        i -= 1
    return i
