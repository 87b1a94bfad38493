# One set of verbs over both engines: what drivers of ranks call.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.handoff cimport (
    destination_activate, destination_drop, destination_hold, handoff_open, pending_push, pending_remove,
    source_forget,
)
from kvsim._core.host cimport host_boundary, host_deadline, host_work
from kvsim._core.paged_pass cimport (
    paged_activate, paged_cancel, paged_emit, paged_free, paged_land, paged_misfit, paged_open, paged_quiet,
    paged_reserve, paged_schedule, paged_settle, paged_stretch, paged_stuck, paged_unblock,
)
from kvsim._core.pool cimport pool_active
from kvsim._core.radix_legacy cimport legacy_activate, legacy_emit, legacy_reserve, legacy_schedule, legacy_settle
from kvsim._core.radix_pass cimport (
    radix_activate, radix_cancel, radix_emit, radix_free_destination, radix_free_source, radix_land, radix_misfit,
    radix_open, radix_quiet, radix_reserve, radix_schedule, radix_settle, radix_stretch, radix_stuck, radix_sync,
)
from kvsim._core.requests cimport id_insert, row_queue, row_release
from kvsim._core.signals cimport pass_open, signal
from kvsim._core.tiers cimport tiers_deadline, tiers_depend, tiers_refused, tiers_tick
from kvsim._core.types cimport (
    CHECK, COMPLETED, DESTINATION_ACTIVE, DESTINATION_PENDING, FAILED, HELD_SOURCE, MODEL_LENGTH, NO_REASON, NO_SLOT,
    PAGED, RADIX, REJECTED, SOURCE_REGISTERED, content_t, header_t, likely, rank_t, unlikely,
)


cdef inline int32_t engine_open(
    rank_t* r, uint64_t id_hi, uint64_t id_lo, int64_t num_input, int64_t max_output, const content_t* content
) noexcept nogil:
    if r.config.engine == RADIX:
        return radix_open(r, id_hi, id_lo, num_input, max_output, content)
    return paged_open(r, id_hi, id_lo, num_input, max_output, content)


cdef inline int32_t engine_submit(
    rank_t* r, uint64_t id_hi, uint64_t id_lo, int64_t num_input, int64_t max_output, const content_t* content
) noexcept nogil:
    """Queue a request and return its row; its id must not be active."""
    cdef int32_t slot = engine_open(r, id_hi, id_lo, num_input, max_output, content)
    row_queue(r, slot)
    return slot


cdef inline void engine_cancel(rank_t* r, int32_t slot) noexcept nogil:
    """Drop a live request. Whatever blocked the queue may be gone, so the rank is not known to be stuck."""
    if r.config.engine == RADIX:
        radix_cancel(r, slot)
    else:
        paged_cancel(r, slot)
    r.header.effect_free = 0


# ---------------------------------------------------------------- handoff: the source half

cdef inline void engine_register_source(rank_t* r, int32_t slot, uint64_t hi, uint64_t lo) noexcept nogil:
    """A request just submitted will be held when it completes."""
    handoff_open(r, slot, hi, lo, SOURCE_REGISTERED)


cdef inline bint engine_release_source(rank_t* r, int32_t slot) noexcept nogil:
    """The source need not be held (any longer); true if its row is gone."""
    r.header.effect_free = 0
    if r.handoffs[slot].role == SOURCE_REGISTERED:
        source_forget(r, slot)
        return False
    CHECK(r.requests[slot].status == HELD_SOURCE)
    r.header.num_held_sources -= 1
    if r.config.engine == RADIX:
        radix_free_source(r, slot)
    else:
        paged_free(r, slot)
    r.header.capacity_generation += 1
    row_release(r, slot)
    return True


cdef inline void engine_cancel_source(rank_t* r, int32_t slot) noexcept nogil:
    """Give a source up, wherever it is; its row is gone."""
    if r.handoffs[slot].role == SOURCE_REGISTERED:
        engine_cancel(r, slot)
    else:
        engine_release_source(r, slot)


# ---------------------------------------------------------------- handoff: the destination half

cdef inline int engine_reserve_error(
    const rank_t* r, int64_t num_input, int64_t max_output, int64_t* needed
) noexcept nogil:
    """Why a destination for such a request could never be reserved (FailReason) and what is too many, or NO_REASON."""
    needed[0] = num_input
    if r.config.max_model_len > 0 and num_input >= r.config.max_model_len:
        return MODEL_LENGTH
    if r.config.engine == RADIX:
        return radix_misfit(r, num_input, max_output, needed)
    return paged_misfit(r, num_input, max_output, needed)


cdef inline int32_t engine_reserve(
    rank_t* r, uint64_t id_hi, uint64_t id_lo, int64_t num_input, int64_t max_output, const content_t* content,
    uint64_t hi, uint64_t lo
) noexcept nogil:
    """Register a destination that waits for capacity and return its row; nothing is attempted yet."""
    cdef int32_t slot = engine_open(r, id_hi, id_lo, num_input, max_output, content)
    id_insert(r, slot)
    handoff_open(r, slot, hi, lo, DESTINATION_PENDING)
    pending_push(r, slot)
    r.header.effect_free = 0
    return slot


cdef inline int32_t engine_retry(rank_t* r) noexcept nogil:
    """Try to reserve for the first pending destination (spec/handoff.md section 3): its row, NO_SLOT if it still waits.

    At most one attempt, and none if nothing that it could have waited for has
    changed since the last one.
    """
    cdef header_t* h = r.header
    cdef int32_t slot = h.pending_head
    cdef int64_t transferable
    if likely(slot == NO_SLOT):
        return NO_SLOT
    if r.config.engine == PAGED and h.num_running >= r.config.max_running:
        r.handoffs[slot].attempted = h.capacity_generation
        return NO_SLOT
    if unlikely(r.config.tiers):
        if tiers_depend(r, slot):
            return NO_SLOT
    if r.handoffs[slot].attempted == h.capacity_generation:
        return NO_SLOT
    r.handoffs[slot].attempted = h.capacity_generation
    h.reserve_attempts += 1
    if r.config.engine == RADIX:
        transferable = legacy_reserve(r, slot) if r.config.legacy else radix_reserve(r, slot)
    else:
        transferable = paged_reserve(r, slot)
    if transferable < 0:
        tiers_refused(r, slot)
        return NO_SLOT
    destination_hold(r, slot, transferable)
    r.header.effect_free = 0
    return slot


cdef inline void engine_activate(rank_t* r, int32_t slot) noexcept nogil:
    """The prompt of a held destination has arrived: the request may run."""
    destination_activate(r, slot)
    if r.config.engine == RADIX and r.config.legacy:
        legacy_activate(r, slot)
    elif r.config.engine == RADIX:
        radix_activate(r, slot)
    else:
        paged_activate(r, slot)
    r.header.effect_free = 0


cdef inline void engine_cancel_destination(rank_t* r, int32_t slot) noexcept nogil:
    """Give a destination up, wherever it is; its row is gone."""
    cdef int32_t role = r.handoffs[slot].role
    if role == DESTINATION_ACTIVE:
        engine_cancel(r, slot)
        return
    if role == DESTINATION_PENDING:
        pending_remove(r, slot)
    else:
        destination_drop(r, slot)
        if r.config.engine == RADIX:
            radix_free_destination(r, slot)
        else:
            paged_free(r, slot)
    r.header.capacity_generation += 1
    r.header.effect_free = 0
    row_release(r, slot)


# ---------------------------------------------------------------- passes

cdef inline void engine_land(rank_t* r) noexcept nogil:
    """Write the rows of requests that coast, between two passes; nobody does any more."""
    if likely(r.coast.count == 0):
        return
    if r.config.engine == RADIX:
        radix_land(r)
    else:
        paged_land(r)


cdef inline void engine_sync(rank_t* r) noexcept nogil:
    """As `engine_land`, for somebody who only looks."""
    if likely(r.coast.count == 0):
        return
    if r.config.engine == RADIX:
        radix_sync(r)
    else:
        paged_land(r)


cdef inline bint engine_quiet(rank_t* r) noexcept nogil:
    """Whether `engine_stretch` has something to do."""
    if r.coast.count == 0:
        return False
    return radix_quiet(r) if r.config.engine == RADIX else paged_quiet(r)


cdef inline int64_t engine_stretch(
    rank_t* r, double now_ms, double horizon_ms, double* ends, int64_t room
) noexcept nogil:
    """Whole passes of a quiet rank that begin before `horizon_ms`, at most `room`: their number, their ends in `ends`."""
    if r.config.engine == RADIX:
        return radix_stretch(r, now_ms, horizon_ms, ends, room)
    return paged_stretch(r, now_ms, horizon_ms, ends, room)


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


cdef inline int64_t engine_waiting(const rank_t* r) noexcept nogil:
    """Waiting requests as metrics count them: destinations too, from the start."""
    cdef const header_t* h = r.header
    cdef int64_t prebuilt = h.num_materialised if r.config.engine == RADIX else 0
    # Parked requests are not counted anywhere.
    cdef int64_t connector = 0 if r.config.tiers else h.num_connector
    return h.num_waiting + connector + prebuilt + h.num_pending + h.num_held_destinations


cdef inline bint engine_empty(const rank_t* r) noexcept nogil:
    """Whether no request waits or runs; halves of handoffs that a command has to move do not count."""
    return r.header.num_running + r.header.num_waiting + r.header.num_connector == 0 and (
        r.config.engine != RADIX or r.header.num_materialised == 0)


cdef inline bint engine_drained(const rank_t* r) noexcept nogil:
    """Whether the rank owns nothing: no request, no half of a handoff and no transfer."""
    return r.header.num_live + r.header.num_transfers == 0


cdef inline bint engine_runnable(const rank_t* r) noexcept nogil:
    """Whether a pass has somebody to look at: not if all who are left wait for transfers."""
    return not engine_empty(r) and (
        r.header.num_asleep == 0 or r.header.num_running + r.header.num_waiting + r.header.num_connector
        > r.header.num_asleep)


# ---------------------------------------------------------------- transfers of lower tiers

cdef inline void engine_at(rank_t* r, double now_ms) noexcept nogil:
    """Before a command: when it is applied, for the transfers it cancels."""
    r.command_ms = now_ms


cdef inline double engine_deadline(const rank_t* r) noexcept nogil:
    """When the next transfer ends, infinity if there is none. While a pass is in flight nothing happens then."""
    if likely(r.header.num_transfers == 0):
        return 1e999
    return tiers_deadline(r) if r.config.tiers else host_deadline(r)


cdef inline bint engine_internal_work(rank_t* r, double now_ms) noexcept nogil:
    """Settle transfers due at `now_ms`, not while a pass is in flight; false if only others had any on shared links."""
    if r.config.tiers:
        return tiers_tick(r, now_ms)
    if r.header.num_transfers > 0:
        host_work(r, now_ms)
    return True


cdef inline void engine_transport(rank_t* r, double now_ms) noexcept nogil:
    """Let the transfers of the KVBM tiers go on to `now_ms`, also while a pass is in flight."""
    tiers_tick(r, now_ms)


cdef inline void engine_boundary(rank_t* r, double end_ms) noexcept nogil:
    """The pass of the rank, or of its group, ends: after `engine_emit`, before `engine_retry`."""
    if unlikely(r.config.offload):
        r.command_ms = end_ms
        # KVBM tiers settle when a pass starts and when they are ticked.
        if r.config.host and r.header.num_transfers > 0:
            host_boundary(r, end_ms)


cdef inline bint engine_retries(const rank_t* r) noexcept nogil:
    """Whether an effect-free pass changed something that lets the next one at this instant differ."""
    return r.config.engine == RADIX and r.radix.retry != 0


cdef inline int engine_stuck(const rank_t* r, int32_t* slot, int64_t* needed) noexcept nogil:
    """Which request of an idle rank can never progress, and why; NO_REASON if there is none."""
    if r.config.engine == RADIX:
        return radix_stuck(r, slot, needed)
    return paged_stuck(r, slot, needed)


cdef inline void engine_fail(rank_t* r, int32_t slot, int reason) noexcept nogil:
    """End a live request that ran. Its signal is the only one."""
    pass_open(r, 0.0)
    signal(r, slot, COMPLETED | FAILED, reason, 0)
    engine_cancel(r, slot)


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


cdef inline bint engine_unblock(rank_t* r) noexcept nogil:
    """For a rank to which nothing else can happen: let somebody pass the head that waits for the other's blocks."""
    return r.config.engine != RADIX and paged_unblock(r)


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
