# One set of verbs over both engines: what drivers of ranks call.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.paged_pass cimport (
    paged_cancel, paged_emit, paged_schedule, paged_settle, paged_stuck, paged_submit,
)
from kvsim._core.pool cimport pool_active
from kvsim._core.radix_legacy cimport legacy_emit, legacy_schedule, legacy_settle
from kvsim._core.radix_pass cimport (
    radix_cancel, radix_emit, radix_schedule, radix_settle, radix_stuck, radix_submit,
)
from kvsim._core.signals cimport pass_open, signal
from kvsim._core.types cimport COMPLETED, FAILED, NO_REASON, RADIX, REJECTED, content_t, rank_t


cdef inline int32_t engine_submit(
    rank_t* r, uint64_t id_hi, uint64_t id_lo, int64_t num_input, int64_t max_output, const content_t* content
) noexcept nogil:
    """Queue a request and return its row; its id must not be active."""
    if r.config.engine == RADIX:
        return radix_submit(r, id_hi, id_lo, num_input, max_output, content)
    return paged_submit(r, id_hi, id_lo, num_input, max_output, content)


cdef inline void engine_cancel(rank_t* r, int32_t slot) noexcept nogil:
    """Drop a live request. Whatever blocked the queue may be gone, so the rank is not known to be stuck."""
    if r.config.engine == RADIX:
        radix_cancel(r, slot)
    else:
        paged_cancel(r, slot)
    r.header.effect_free = 0


cdef inline int engine_schedule(rank_t* r, double now_ms) noexcept nogil:
    """A pass up to its duration, `r.p.end_ms`; PASS_FAILED if a callback raised."""
    if r.config.engine == RADIX:
        return legacy_schedule(r, now_ms) if r.config.legacy else radix_schedule(r, now_ms)
    return paged_schedule(r, now_ms)


cdef inline void engine_emit(rank_t* r) noexcept nogil:
    """The tokens of the scheduled pass, then its bookkeeping."""
    if r.config.engine == RADIX and r.config.legacy:
        legacy_emit(r)
        legacy_settle(r)
    elif r.config.engine == RADIX:
        radix_emit(r)
        radix_settle(r)
    else:
        paged_emit(r)
        paged_settle(r)


cdef inline bint engine_retries(const rank_t* r) noexcept nogil:
    """Whether an effect-free pass changed something that lets the next one at this instant differ."""
    return r.config.engine == RADIX and r.radix.retry != 0


cdef inline int engine_stuck(const rank_t* r, int32_t* slot, int64_t* needed) noexcept nogil:
    """Which request of an idle rank can never progress, and why; NO_REASON if there is none."""
    if r.config.engine == RADIX:
        return radix_stuck(r, slot, needed)
    return paged_stuck(r, slot, needed)


cdef inline int engine_fail_stuck(rank_t* r) noexcept nogil:
    """End a stuck request: rejected if it never ran, else failed. Its signal is the only one."""
    cdef int32_t slot
    cdef int64_t needed
    cdef bint ran
    cdef int reason = engine_stuck(r, &slot, &needed)
    if reason == NO_REASON:
        return NO_REASON
    pass_open(r, 0.0)
    ran = r.requests[slot].generated > 0 or r.requests[slot].preemptions > 0
    if r.config.engine == RADIX:
        # A prompt that is stuck between two chunks ran, too.
        ran = r.requests[slot].stamp >= 0
    signal(r, slot, COMPLETED | (FAILED if ran else REJECTED), reason, needed)
    engine_cancel(r, slot)
    return reason


cdef inline int64_t engine_active(const rank_t* r) noexcept nogil:
    """Blocks in use; for the radix engine those of its cache too (spec/sglang.md section 11)."""
    if r.config.engine == RADIX:
        return r.config.num_blocks - r.radix.available
    return pool_active(r)


cdef inline int64_t engine_visible_events(const rank_t* r) noexcept nogil:
    """Buffered events that may be handed out now."""
    if r.config.engine == RADIX and not r.radix.flush:
        return 0
    return r.header.num_events


cdef inline void engine_events_shown(rank_t* r) noexcept nogil:
    """The buffered events were handed out and stay where they are: nothing may be added to them."""
    if r.config.engine == RADIX:
        r.radix.flush = 0
        r.radix.flushed = <int32_t>r.header.num_events
