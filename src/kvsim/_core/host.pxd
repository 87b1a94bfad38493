# The host tier of a paged rank: who is in host memory, transfers both ways, who waits for them.
#
# spec/host-offload.md part A. Finished prompt blocks are written through to
# host memory; a prompt whose blocks are there and no longer on the device is
# loaded before it is admitted. A rank without a host tier owns one empty row of
# each table here and asks `config.host` where it could have mattered.
#
#   store   prepared (in the pass) --boundary--> on the link --deadline--> settled
#   load    on the link (in the pass) --deadline--> settled | cancelled
#
# Nothing settles inside a pass: what is due is settled at its end, or by
# `host_work` while the rank is idle. Then what settled is shown: KV events,
# loaded blocks become findable, sleepers wake.
#
# The LRU list holds resident entries that no load reads, in order of (epoch,
# hash). A touch takes a fresh epoch, so it appends; a cohort is sorted by hash
# and appended with one epoch. The order of the list is therefore the order of
# eviction, and no search is needed.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.requests cimport waiting_count, waiting_remove
from kvsim._core.types cimport CONNECTOR, NO_SLOT, header_t, host_t, rank_t, request_t, unlikely

cdef enum lookup:  # of a prompt in the host
    LOOKUP_MISS = 0
    LOOKUP_HIT = 1
    LOOKUP_DEFERRED = 2

cdef void host_open(rank_t* r, int32_t slot) noexcept nogil
cdef void host_begin(rank_t* r) noexcept nogil
cdef int host_lookup(rank_t* r, int32_t slot, int64_t base, int64_t* count) noexcept nogil
cdef int64_t host_headroom(const rank_t* r) noexcept nogil
cdef bint host_load(rank_t* r, int32_t slot, int64_t base, int64_t count) noexcept nogil
cdef void host_sleep(rank_t* r, int32_t slot) noexcept nogil
cdef void host_fence(rank_t* r, int32_t slot, int64_t first) noexcept nogil
cdef void host_preempted(rank_t* r, int32_t slot) noexcept nogil
cdef int64_t host_admitted(rank_t* r, int32_t slot) noexcept nogil
cdef void host_observe(rank_t* r) noexcept nogil
cdef void host_drop(rank_t* r, int32_t slot) noexcept nogil
cdef void host_boundary(rank_t* r, double end_ms) noexcept nogil
cdef void host_work(rank_t* r, double now_ms) noexcept nogil
cdef void host_reset(rank_t* r) noexcept nogil
cdef void host_reindex(rank_t* r) noexcept nogil
cdef int32_t host_find(const rank_t* r, uint64_t hash) noexcept nogil


cdef inline double host_deadline(const rank_t* r) noexcept nogil:
    """When the next transfer on a link ends, infinity if there is none."""
    cdef const host_t* t = r.host
    cdef double deadline = 1e999
    if t.store_head != NO_SLOT:
        deadline = r.transfers[t.store_head].deadline_ms
    if t.load_head != NO_SLOT and r.transfers[t.load_head].deadline_ms < deadline:
        deadline = r.transfers[t.load_head].deadline_ms
    return deadline


# ---------------------------------------------------------------- the connector queue

cdef inline bint connector_asleep(const rank_t* r, int32_t slot) noexcept nogil:
    return r.offloads[slot].progress == r.host.progress


cdef inline void connector_wake(rank_t* r) noexcept nogil:
    """All sleepers look again: a transfer has ended."""
    r.host.progress += 1
    r.header.num_asleep = 0
    r.header.effect_free = 0


cdef inline void connector_remove(rank_t* r, int32_t slot) noexcept nogil:
    """Take a request out of the connector queue; it is in no queue then."""
    cdef request_t* q = &r.requests[slot]
    cdef host_t* t = r.host
    cdef header_t* h = r.header
    if connector_asleep(r, slot):
        h.num_asleep -= 1
    if r.p.connector == slot:
        r.p.connector = q.next
    if q.prev == NO_SLOT:
        t.connector_head = q.next
    else:
        r.requests[q.prev].next = q.next
    if q.next == NO_SLOT:
        t.connector_tail = q.prev
    else:
        r.requests[q.next].prev = q.prev
    q.next = NO_SLOT
    q.prev = NO_SLOT
    q.host &= <unsigned char>~CONNECTOR
    r.offloads[slot].progress = -1
    h.num_connector -= 1
    waiting_count(r, q, -1)
    h.num_waiting += 1


cdef inline void queue_leave(rank_t* r, int32_t slot) noexcept nogil:
    """Take a waiting request out of the queue it is in."""
    if unlikely(r.requests[slot].host & CONNECTOR):
        connector_remove(r, slot)
    else:
        waiting_remove(r, slot)


cdef inline int32_t host_candidate(rank_t* r) noexcept nogil:
    """Who is looked at next: the first of the connector queue that is awake, else the head of the waiting list.

    NO_SLOT without token budget: a lookup changes what is recent in the host.
    """
    cdef int32_t slot
    if r.p.budget <= 0:
        return NO_SLOT
    if r.header.num_connector > r.header.num_asleep:
        # Those before were looked at and sleep, or left.
        slot = r.p.connector
        while slot != NO_SLOT and connector_asleep(r, slot):
            slot = r.requests[slot].next
        r.p.connector = slot
        if slot != NO_SLOT:
            return slot
    return r.header.waiting_head
