# The frame of a pass, common to both engines: its scratch, signals, pressure events, counting.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memmove, memset

from kvsim._core.content cimport synthetic_token
from kvsim._core.metrics cimport welford_add
from kvsim._core.types cimport (
    COMPLETED, FAILED, GROW_PRESSURES, GROW_SIGNALS, HANDOFF, HAS_CACHED, HAS_TOKEN, HELD, NO_REASON, REJECTED,
    SIGNALLED, SOURCE_REGISTERED, content_t, header_t, pass_t, pressure_t, rank_t, request_t, signal_t, unlikely,
)


cdef inline void pass_open(rank_t* r, double now_ms) noexcept nogil:
    """Clear what lives for one pass."""
    memset(&r.p, 0, sizeof(pass_t))
    r.num_signals = 0
    r.num_rejected = 0
    r.num_admissions = 0
    r.num_pressures = 0
    r.p.start_ms = now_ms
    r.p.budget = r.config.budget


cdef inline pressure_t* pressure(rank_t* r, int32_t slot) noexcept nogil:
    """Append a pressure event of a running request about to lose everything; the caller fills the occupancy."""
    cdef const request_t* q = &r.requests[slot]
    cdef pressure_t* e
    if unlikely(r.num_pressures == r.cap_pressures):
        r.grow(r, GROW_PRESSURES, r.num_pressures + 1)
    e = &r.pressures[r.num_pressures]
    r.num_pressures += 1
    e.id_hi = q.id_hi
    e.id_lo = q.id_lo
    e.slot = slot
    e.computed = q.computed
    e.running_before = <int32_t>r.header.num_running
    return e


cdef inline signal_t* signal(rank_t* r, int32_t slot, int32_t flags, int32_t reason, int64_t needed) noexcept nogil:
    """Append an output signal of a request; the first one carries its cached tokens."""
    cdef request_t* q = &r.requests[slot]
    cdef signal_t* s
    if unlikely(r.num_signals == r.cap_signals):
        r.grow(r, GROW_SIGNALS, r.num_signals + 1)
    s = &r.signals[r.num_signals]
    r.num_signals += 1
    s.id_hi = q.id_hi
    s.id_lo = q.id_lo
    s.slot = slot
    s.token = 0
    s.flags = flags
    s.cached = q.cached_prefix
    s.reason = reason
    s.num_input = q.num_input
    s.needed = needed
    s.generated = q.generated
    s.preemptions = q.preemptions
    if (unlikely(q.flags & HANDOFF) and flags & COMPLETED and not flags & (REJECTED | FAILED)
            and r.handoffs[slot].role == SOURCE_REGISTERED):
        s.flags |= HELD
    if not q.flags & SIGNALLED:
        q.flags |= SIGNALLED
        if q.cached_prefix >= 0:
            s.flags |= HAS_CACHED
    return s


cdef inline uint32_t output_token(const rank_t* r, int32_t slot, int32_t ordinal) noexcept nogil:
    cdef const content_t* content = &r.contents[slot]
    if content.planned != NULL:
        return content.planned[ordinal]
    return synthetic_token(r.requests[slot].id_hi, r.requests[slot].id_lo, <uint64_t>ordinal)


cdef inline void emit_token(rank_t* r, int32_t slot) noexcept nogil:
    """One token of a request, which may be its last; nobody listening, only ends are told."""
    cdef request_t* q = &r.requests[slot]
    cdef signal_t* s
    cdef bint done
    q.length += 1
    q.generated += 1
    done = q.length >= q.limit
    r.p.visible += 1
    if r.want_signals or done or (r.want_firsts and not q.flags & SIGNALLED):
        s = signal(r, slot, HAS_TOKEN | COMPLETED if done else HAS_TOKEN, NO_REASON, 0)
        if r.want_signals:
            s.token = output_token(r, slot, q.generated - 1)
    else:
        q.flags |= SIGNALLED


cdef inline void rejected_last(rank_t* r, int64_t n) noexcept nogil:
    """Move the `n` signals of rejected requests, written first, behind all others."""
    cdef int64_t i
    if n == 0:
        return
    for i in range(n):
        if unlikely(r.num_signals == r.cap_signals):
            r.grow(r, GROW_SIGNALS, r.num_signals + 1)
        r.signals[r.num_signals] = r.signals[i]
        r.num_signals += 1
    r.num_signals -= n
    memmove(r.signals, r.signals + n, <size_t>r.num_signals * sizeof(signal_t))


cdef inline bint progressed(const rank_t* r) noexcept nogil:
    """Whether the pass changed anything an observer could see (spec/engine-contract.md section 7)."""
    return (r.num_admissions > 0 or r.p.num_ready > 0 or r.p.coasting > 0 or r.p.num_terminal > 0 or r.num_rejected > 0
            or r.num_pressures > 0 or r.p.scheduled > 0 or r.p.num_retracted > 0 or r.p.deferrals > 0)


cdef inline void count_pass(rank_t* r) noexcept nogil:
    """Count the pass; one that changed nothing leaves no trace."""
    cdef header_t* h = r.header
    if not progressed(r):
        # With KVBM tiers it may have let time pass, or shown what had ended.
        h.effect_free = not (r.config.tiers and (r.p.ticked or r.p.end_ms > r.p.start_ms))
        return
    h.effect_free = 0
    h.passes += 1
    h.committed_prefill_tokens += r.p.prefill_tokens
    welford_add(&h.duration_count, &h.duration_sum, &h.duration_mean, &h.duration_m2, r.p.end_ms - r.p.start_ms)
