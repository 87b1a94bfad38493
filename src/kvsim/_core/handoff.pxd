# Halves of handoffs inside a rank: which row is what, who waits for capacity, the sums behind metrics.
#
# spec/handoff.md sections 2 and 3. What both engines share lies here, physics
# (blocks, pages, the tree) in the passes, `engine.pxd` joins the two:
#
#   source        SOURCE_REGISTERED --- its request completes ---> SOURCE_HELD ---> gone
#   destination   DESTINATION_PENDING -> DESTINATION_HELD -> DESTINATION_ACTIVE ---> gone
#
# A row of `handoffs` belongs to the request row of the same index and is in
# use exactly when that has the flag HANDOFF. Pending destinations hang in one
# list through the links of their request rows, which no other list needs.

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memset

from kvsim._core.requests cimport completion_blocks, requeued_count, running_leave
from kvsim._core.types cimport (
    ACTIVATED, CHECK, DESTINATION_ACTIVE, DESTINATION_HELD, DESTINATION_PENDING, HANDOFF, HELD_DESTINATION,
    HELD_SOURCE, MATERIALISED, NO_SLOT, PENDING_DESTINATION, SOURCE_HELD, SOURCE_REGISTERED, WAITING, handoff_t,
    header_t, rank_t, request_t, unlikely,
)


cdef inline void handoff_open(rank_t* r, int32_t slot, uint64_t hi, uint64_t lo, int32_t role) noexcept nogil:
    """Make a live request one half of a handoff."""
    cdef handoff_t* half = &r.handoffs[slot]
    half.handoff_hi = hi
    half.handoff_lo = lo
    half.attempted = -1
    half.role = role
    half.transferable = 0
    r.requests[slot].flags |= HANDOFF


cdef inline void source_forget(rank_t* r, int32_t slot) noexcept nogil:
    """A registered source becomes an ordinary request."""
    memset(&r.handoffs[slot], 0, sizeof(handoff_t))
    r.requests[slot].flags &= <unsigned char>~HANDOFF


cdef inline bint source_hold(rank_t* r, int32_t slot) noexcept nogil:
    """Hold a running request that is complete, if it is a registered source; else false.

    Its lease and its row stay; its entry in `running` is swept later.
    """
    if not unlikely(r.requests[slot].flags & HANDOFF) or r.handoffs[slot].role != SOURCE_REGISTERED:
        return False
    running_leave(r, slot)
    r.handoffs[slot].role = SOURCE_HELD
    r.requests[slot].status = HELD_SOURCE
    r.header.num_held_sources += 1
    return True


cdef inline void expect(rank_t* r, int32_t slot, int64_t sign) noexcept nogil:
    """Account a pending or held destination in the sums behind the queue metrics."""
    cdef int64_t n = r.requests[slot].num_input
    r.header.expected_sum += sign * n
    r.header.expected_squares += sign * n * n


cdef inline void promise(rank_t* r, int32_t slot, int64_t sign) noexcept nogil:
    """Account the blocks that a held or materialised destination will need beyond those it owns."""
    cdef const request_t* q = &r.requests[slot]
    r.header.promised_blocks += sign * (completion_blocks(r, q) - q.n_blocks)


# ---------------------------------------------------------------- destinations without capacity

cdef inline void pending_push(rank_t* r, int32_t slot) noexcept nogil:
    cdef request_t* q = &r.requests[slot]
    cdef header_t* h = r.header
    q.status = PENDING_DESTINATION
    q.next = NO_SLOT
    q.prev = h.pending_tail
    if q.prev == NO_SLOT:
        h.pending_head = slot
    else:
        r.requests[q.prev].next = slot
    h.pending_tail = slot
    h.num_pending += 1
    expect(r, slot, 1)


cdef inline void pending_remove(rank_t* r, int32_t slot) noexcept nogil:
    cdef request_t* q = &r.requests[slot]
    cdef header_t* h = r.header
    if q.prev == NO_SLOT:
        h.pending_head = q.next
    else:
        r.requests[q.prev].next = q.next
    if q.next == NO_SLOT:
        h.pending_tail = q.prev
    else:
        r.requests[q.next].prev = q.prev
    q.next = NO_SLOT
    q.prev = NO_SLOT
    h.num_pending -= 1
    expect(r, slot, -1)


# ---------------------------------------------------------------- destinations with capacity

cdef inline void destination_hold(rank_t* r, int32_t slot, int64_t transferable) noexcept nogil:
    """The pending destination `slot` owns what its prompt needs."""
    pending_remove(r, slot)
    r.requests[slot].status = HELD_DESTINATION
    r.handoffs[slot].role = DESTINATION_HELD
    r.handoffs[slot].transferable = <int32_t>transferable
    r.header.num_held_destinations += 1
    expect(r, slot, 1)
    promise(r, slot, 1)


cdef inline void destination_drop(rank_t* r, int32_t slot) noexcept nogil:
    """Account a held destination that is given up; before its lease is."""
    CHECK(r.requests[slot].status == HELD_DESTINATION)
    r.header.num_held_destinations -= 1
    expect(r, slot, -1)
    promise(r, slot, -1)


cdef inline void destination_activate(rank_t* r, int32_t slot) noexcept nogil:
    """The prompt of a held destination has arrived: materialised, in no queue yet."""
    cdef request_t* q = &r.requests[slot]
    CHECK(q.status == HELD_DESTINATION)
    r.header.num_held_destinations -= 1
    expect(r, slot, -1)
    q.status = WAITING
    q.flags |= ACTIVATED | MATERIALISED
    r.handoffs[slot].role = DESTINATION_ACTIVE
    r.header.num_materialised += 1


cdef inline void materialised_leave(rank_t* r, int32_t slot) noexcept nogil:
    """Account a materialised request that is admitted or dropped; before its lease changes."""
    promise(r, slot, -1)
    r.requests[slot].flags &= <unsigned char>~MATERIALISED
    r.header.num_materialised -= 1


cdef inline void prebuilt_push(rank_t* r, int32_t slot) noexcept nogil:
    """Radix engine: materialised requests have a queue of their own."""
    cdef request_t* q = &r.requests[slot]
    cdef header_t* h = r.header
    q.next = NO_SLOT
    q.prev = h.prebuilt_tail
    if q.prev == NO_SLOT:
        h.prebuilt_head = slot
    else:
        r.requests[q.prev].next = slot
    h.prebuilt_tail = slot
    requeued_count(r, q.length, 1)


cdef inline void prebuilt_remove(rank_t* r, int32_t slot) noexcept nogil:
    cdef request_t* q = &r.requests[slot]
    cdef header_t* h = r.header
    if q.prev == NO_SLOT:
        h.prebuilt_head = q.next
    else:
        r.requests[q.prev].next = q.next
    if q.next == NO_SLOT:
        h.prebuilt_tail = q.prev
    else:
        r.requests[q.next].prev = q.prev
    q.next = NO_SLOT
    q.prev = NO_SLOT
    requeued_count(r, q.length, -1)
