# The pass of the paged engines: vLLM, and TensorRT-LLM with its policy switches.
#
# spec/vllm.md sections 4 to 9. One pass is `paged_schedule` (running first,
# then waiting; durations), `paged_emit` (tokens) and `paged_settle`
# (bookkeeping); a driver that knows the end of a group calls emit with it
# between the two.

from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.coast cimport (
    MOST_TICKS, NEVER, coast_clear, coast_count_out, coast_delete, coast_due, coast_join, coast_set_due, coast_step,
)
from kvsim._core.handoff cimport materialised_leave, source_hold
from kvsim._core.host cimport (
    LOOKUP_DEFERRED, host_admitted, host_begin, host_candidate, host_deadline, host_drop, host_fence, host_headroom, host_load,
    host_lookup, host_observe, host_open, host_preempted, host_sleep, queue_leave,
)
from kvsim._core.lease cimport (
    blocks_of, lease_close, lease_find, lease_grow, lease_seal, lease_take, prefix_cost,
)
from kvsim._core.metrics cimport moments_add, moments_undo, welford_add
from kvsim._core.pool cimport pool_active, pool_make_room
from kvsim._core.requests cimport (
    completion_blocks, row_open, row_release, running_append, running_delete, running_index, running_leave,
    waiting_link, waiting_push_back, waiting_remove,
)
from kvsim._core.rng cimport rng_accept
from kvsim._core.signals cimport count_pass, emit_token, pass_open, pressure, rejected_last, signal
from kvsim._core.tiers cimport (
    SWAP_BLOCKED, SWAP_PARKED, tiers_deadline, tiers_depend, tiers_drop, tiers_open, tiers_ready, tiers_refused,
    tiers_swap, tiers_tick,
)
from kvsim._core.timing cimport timing_decode, timing_prefill
from kvsim._core.types cimport (
    ASK_VICTIM, BUDGET_TOO_SMALL, BY_SCORE, CALLABLE, CHECK, COMPLETED, CONNECTOR, CROWDED, DECODE, DEPENDENT, FIXED,
    MATERIALISED, MODEL_LENGTH, NEWEST, NOT_ADMITTED, NO_REASON, NO_SLOT, OUTGREW_POOL, OUTGROWN, PARKED, PASS_FAILED,
    PASS_OK, POOL_TOO_SMALL,
    PREEMPTED, PREFILL, REJECTED, RUNNING, SCORED, SIGNALLED, TO_COMPLETION, UNSTORED, WAITING, admission_t, coast_t, config_t,
    content_t, header_t, likely, pass_t, prefetch, pressure_t, rank_t, request_t, unlikely,
)

cdef enum verdict:  # of scheduling one request
    SCHEDULED = 0
    BLOCKED = 1
    PREEMPTED_ITSELF = 2
    SCHEDULE_FAILED = 3
    DEPENDS = 4  # with KVBM tiers: its blocks are on their way out

cdef enum answer:  # of a policy's admission hook
    WAIT = 0
    ADMIT = 1
    REJECT = 2
    SLEEP = 3   # with a lower tier: the request waits for a transfer


# ---------------------------------------------------------------- entering and leaving

cdef inline int64_t clamped_output(const rank_t* r, int64_t num_input, int64_t max_output) noexcept nogil:
    """Output tokens of a request; where all of them are reserved, cut to what can be."""
    cdef const config_t* c = r.config
    if c.gate == TO_COMPLETION:
        if num_input < c.total_kv_tokens and max_output > c.total_kv_tokens - num_input:
            max_output = c.total_kv_tokens - num_input
        if c.max_model_len > num_input and max_output > c.max_model_len - num_input:
            max_output = c.max_model_len - num_input
    return max_output


cdef int32_t paged_open(
    rank_t* r, uint64_t id_hi, uint64_t id_lo, int64_t num_input, int64_t max_output, const content_t* content
) noexcept nogil:
    """A row for a request that is in no queue yet. The caller has checked that the id is not active."""
    cdef const config_t* c
    cdef int32_t slot
    cdef request_t* q
    slot = row_open(r, id_hi, id_lo, num_input, clamped_output(r, num_input, max_output), content)
    c = r.config
    q = &r.requests[slot]
    r.found_of = NO_SLOT
    if c.max_model_len > 0 and q.limit > c.max_model_len:
        q.limit = <int32_t>c.max_model_len
    q.next_seal = <int32_t>c.block_size
    # A prompt longer than the pool has hashes only as far as the pool goes; it is rejected.
    if c.caching:
        q.hashed = <int32_t>(num_input // c.block_size)
        if q.hashed > content.num_hashes:
            q.hashed = <int32_t>content.num_hashes
    if unlikely(c.offload):
        if c.host:
            host_open(r, slot)
        else:
            tiers_open(r, slot)
    return slot


cdef inline void finish(rank_t* r, int32_t slot) noexcept nogil:
    """A running request is complete: its KV goes back to the pool, or is held. Its entry in `running` is swept later."""
    r.header.capacity_generation += 1
    r.p.completed += 1
    if source_hold(r, slot):
        return
    lease_close(r, slot)
    running_leave(r, slot)
    row_release(r, slot)


cdef inline void drop_waiting(rank_t* r, int32_t slot) noexcept nogil:
    if unlikely(r.requests[slot].host & CONNECTOR):
        host_drop(r, slot)
    elif unlikely(r.requests[slot].host & PARKED):
        tiers_drop(r, slot)
    else:
        waiting_remove(r, slot)
    row_release(r, slot)


cdef void paged_cancel(rank_t* r, int32_t slot) noexcept nogil:
    """Drop a live request wherever it is (spec/vllm.md section 9)."""
    cdef request_t* q = &r.requests[slot]
    r.header.effect_free = 0
    if q.status == RUNNING:
        paged_land(r)
        lease_close(r, slot)
        running_leave(r, slot)
        running_delete(r, running_index(r, slot))
        r.header.capacity_generation += 1
        row_release(r, slot)
        return
    if unlikely(q.flags & MATERIALISED):
        waiting_remove(r, slot)
        materialised_leave(r, slot)
        lease_close(r, slot)
        r.header.capacity_generation += 1
        row_release(r, slot)
        return
    drop_waiting(r, slot)


# ---------------------------------------------------------------- halves of handoffs

cdef int64_t paged_reserve(rank_t* r, int32_t slot) noexcept nogil:
    """Take the blocks of a pending destination's prompt: the tokens of the new ones, -1 and nothing changed if it cannot.

    vLLM shares the longest prefix that is here (spec/kv-cache.md section 7) and
    wants a place in the running set; TensorRT-LLM takes new blocks and reserves
    those of all outputs.
    """
    cdef const request_t* q = &r.requests[slot]
    cdef int64_t cached = 0
    cdef int64_t active
    if r.config.gate == TO_COMPLETION:
        if completion_blocks(r, q) > uncommitted_blocks(r):
            return -1
    else:
        prefix_cost(r, slot, &cached, &active)
    if not lease_grow(r, slot, q.num_input, cached):
        return -1
    return (r.requests[slot].n_blocks - cached) * r.config.block_size


cdef void paged_activate(rank_t* r, int32_t slot) noexcept nogil:
    """The prompt of a held destination is there: its full blocks are findable, it may run.

    `destination_activate` has been called. Its place in the queue is that of its
    arrival, or the end, by the ruleset.
    """
    cdef request_t* q = &r.requests[slot]
    cdef int32_t before = NO_SLOT
    q.computed = q.num_input
    lease_seal(r, slot, 0, q.num_input)
    q = &r.requests[slot]
    if r.config.order == BY_SCORE:
        q.score = r.score(r, slot)
        q.flags |= SCORED
        waiting_push_back(r, slot)
        return
    if r.config.keeps_place:
        before = r.header.waiting_head
        while before != NO_SLOT and r.requests[before].waiting_order < q.waiting_order:
            before = r.requests[before].next
    waiting_link(r, slot, before)


cdef void paged_free(rank_t* r, int32_t slot) noexcept nogil:
    """Give back the blocks of a held source, or of a held destination whose prompt never came."""
    lease_close(r, slot)


cdef int paged_misfit(const rank_t* r, int64_t num_input, int64_t max_output, int64_t* needed) noexcept nogil:
    """Why a destination for this prompt could never be reserved, or NO_REASON."""
    needed[0] = blocks_of(r, num_input)
    if r.config.gate == TO_COMPLETION:
        needed[0] = blocks_of(r, num_input + clamped_output(r, num_input, max_output))
    return POOL_TOO_SMALL if needed[0] > r.config.num_blocks else NO_REASON


# ---------------------------------------------------------------- preemption

cdef inline int64_t burst_of(const rank_t* r, const request_t* q) noexcept nogil:
    """Most tokens a ready request may emit in this pass."""
    cdef int64_t most = 1
    if r.config.worker != PREFILL:
        most += r.config.nextn if r.config.always_draft else q.sched_drafts
    if most > q.limit - q.length:
        most = q.limit - q.length
    return most


cdef inline int64_t pick_victim(rank_t* r, int32_t slot) noexcept nogil:
    """Index in `running` of the request to preempt, -1 if there is none, -2 if the policy failed."""
    cdef int32_t victim
    if not r.config.may_preempt or r.header.num_running == 0:
        return -1
    if unlikely(r.config.tiers):
        return pick_independent(r, slot)
    if r.config.victim == NEWEST:
        return r.header.num_running - 1
    if r.config.victim == ASK_VICTIM:
        victim = r.ask_victim(r, slot)
        if victim < 0:
            return victim
        return running_index(r, victim)
    return 0


cdef int64_t pick_independent(rank_t* r, int32_t slot) noexcept nogil:
    """As `pick_victim`; with KVBM tiers requests that depend on an offload are passed over."""
    cdef int32_t victim
    cdef int64_t i
    cdef int64_t n = r.header.num_running
    if r.config.victim == ASK_VICTIM:
        victim = r.ask_victim(r, slot)
        return victim if victim < 0 else running_index(r, victim)
    for i in range(n):
        victim = r.running[n - 1 - i if r.config.victim == NEWEST else i]
        if not tiers_depend(r, victim):
            return n - 1 - i if r.config.victim == NEWEST else i
    return -1


cdef void preempt(rank_t* r, int64_t index) noexcept nogil:
    """Take everything from a running request and put it in front of the queue; its tokens are kept."""
    cdef int32_t slot = r.running[index]
    cdef request_t* q = &r.requests[slot]
    cdef header_t* h = r.header
    cdef pass_t* p = &r.p
    cdef pressure_t* e = pressure(r, slot)
    cdef int64_t before
    e.waiting_before = <int32_t>h.num_waiting
    e.active_before = pool_active(r)
    e.request_blocks = blocks_of(r, q.allocated)
    if q.stamp == h.passes:
        # Scheduled in this very pass: nothing of it was scheduled after all.
        p.budget += q.sched_total + q.sched_drafts
        before = q.computed - q.sched_total
        e.computed = <int32_t>before
        p.scheduled -= 1
        if q.sched_prompt > 0:
            if before > q.num_input:
                before = q.num_input
            moments_undo(&p.prefill, q.num_input)
            p.prefill_tokens -= q.sched_total
            p.prefill_kv_tokens -= before
            if r.config.worker != DECODE:
                p.prefill_count -= 1
                p.prefill_isl -= before + q.sched_prompt
                p.prefill_prefix -= before
        elif q.length < q.limit:
            moments_undo(&p.decode, q.length)
        q.stamp = -1
    if unlikely(r.config.host):
        host_preempted(r, slot)
    lease_close(r, slot)
    running_leave(r, slot)
    running_delete(r, index)
    q.computed = 0
    q.next_seal = <int32_t>r.config.block_size
    q.drafts = 0
    q.sched_drafts = 0
    q.status = PREEMPTED
    q.preemptions += 1
    h.preemptions_total += 1
    h.capacity_generation += 1
    waiting_link(r, slot, h.waiting_head)
    e.running_after = <int32_t>h.num_running
    e.waiting_after = <int32_t>h.num_waiting
    e.active_after = pool_active(r)


cdef void preempt_for_sample(rank_t* r, int64_t index) noexcept nogil:
    """Preempt a running request because a sample finds no block; what it computed in this pass stays counted.

    Had it the whole pool to itself and still the pool is too small for what it
    emits when it comes back, then coming back would end here again. If handoffs
    hold the rest and no time passes, it would do so for ever at this instant;
    for ever even if time passes, if who holds it waits further back.
    """
    cdef int32_t slot = r.running[index]
    cdef request_t* q = &r.requests[slot]
    q.stamp = -1
    preempt(r, index)
    # Preempted, it has no drafts but those that every pass makes.
    if r.header.num_running > 0:
        return
    if pool_active(r) == 0:
        if blocks_of(r, q.length + burst_of(r, q)) > r.config.num_blocks:
            q.flags |= OUTGROWN
    elif r.p.prefill_ms + r.p.decode_ms == 0.0 or r.header.num_held_destinations + r.header.num_materialised > 0:
        q.flags |= CROWDED


# ---------------------------------------------------------------- coasting: see coast.pxd

cdef inline bint coasts(const config_t* c) noexcept nogil:
    """Whether decodes of this engine are ever plain.

    Not with drafts, nor where samples take their blocks as they are emitted, nor for a policy that looks at all rows
    when it picks a victim; nor with KVBM tiers, which let requests wait while they run.
    """
    return (c.nextn == 0 and not c.eager_samples and c.victim != ASK_VICTIM and not c.ask_admission and not c.ask_order
            and not c.tiers)


cdef inline int64_t settle_row(rank_t* r, int32_t slot) noexcept nogil:
    """Write the row of a coasting request as it stands before the pass of `tick`; returns its length."""
    cdef request_t* q = &r.requests[slot]
    cdef int32_t gone = r.coast.tick - r.since[slot]
    if gone == 0:
        return q.length
    q.length += gone
    q.generated += gone
    q.computed = q.length - 1
    if q.allocated < q.computed:
        q.allocated = q.computed
    q.stamp = r.header.passes - 1
    q.sched_total = 1
    q.sched_prompt = 0
    if not r.config.caching:
        # Nothing is sealed, so nobody is due when a block is full.
        q.next_seal = <int32_t>((q.computed // r.config.block_size + 1) * r.config.block_size)
    r.since[slot] = r.coast.tick
    return q.length


cdef inline void step_row(rank_t* r, int32_t slot) noexcept nogil:
    """Write a settled row as it stands after this pass scheduled it."""
    cdef request_t* q = &r.requests[slot]
    q.computed = q.length
    if q.allocated < q.length:
        q.allocated = q.length
    q.stamp = r.header.passes
    q.sched_total = 1
    q.sched_prompt = 0
    if not r.config.caching:
        q.next_seal = <int32_t>((q.computed // r.config.block_size + 1) * r.config.block_size)


cdef inline int32_t due_tick(const rank_t* r, const request_t* q) noexcept nogil:
    """When a settled row needs something: a block, a full one made findable, or its last token."""
    cdef int64_t ahead = q.limit - 1 - q.length
    if ahead > q.capacity + 1 - q.length:
        ahead = q.capacity + 1 - q.length
    if r.config.caching and ahead > q.next_seal - q.length:
        ahead = q.next_seal - q.length
    # Far ones are looked at again before ticks overflow.
    return r.coast.tick + <int32_t>(ahead if ahead < MOST_TICKS else MOST_TICKS)


cdef void paged_land(rank_t* r) noexcept nogil:
    """Between two passes: write the rows of all who coast; nobody does any more."""
    cdef int64_t i
    for i in range(r.coast.count):
        settle_row(r, r.running[i])
    coast_clear(r)


cdef void land_scheduled(rank_t* r) noexcept nogil:
    """As `paged_land`, inside a pass that has scheduled and counted all who coast."""
    cdef int64_t i
    for i in range(r.coast.count):
        settle_row(r, r.running[i])
        step_row(r, r.running[i])
    coast_clear(r)
    r.p.coasting = 0
    r.p.num_ending = 0


cdef int64_t land_at(rank_t* r, int64_t index) noexcept nogil:
    """As `paged_land`, inside a pass that has come to entry `index` and finds no block for it: those before are scheduled."""
    cdef pass_t* p = &r.p
    cdef int64_t i
    for i in range(r.coast.count):
        settle_row(r, r.running[i])
    p.decode.count = 0
    p.decode.sum = 0
    p.decode.squares = 0
    for i in range(index):
        step_row(r, r.running[i])
        moments_add(&p.decode, r.requests[r.running[i]].length)
    p.budget = r.config.budget - index
    p.scheduled = index
    p.num_ending = 0
    coast_clear(r)
    return index


cdef inline int64_t find_due(rank_t* r) noexcept nogil:
    """Entries of `running` that are due in this pass, in `hits`: their number; their rows are on the way to the cache."""
    cdef int64_t found = coast_due(r)
    cdef int64_t k
    for k in range(found):
        prefetch(&r.requests[r.running[r.hits[k]]])
    return found


cdef inline bint serve(rank_t* r, int32_t slot) noexcept nogil:
    """A coasting request, its row settled, gets the block it lacks, or one that is full becomes findable.

    False, and nothing changed, if the pool has no block.
    """
    cdef request_t* q = &r.requests[slot]
    cdef int64_t length = q.length
    cdef int64_t owned = q.n_blocks
    if length > q.capacity:
        if not lease_grow(r, slot, length, 0):
            return False
        if unlikely(r.config.host):
            host_fence(r, slot, owned)
        q = &r.requests[slot]
    if length >= q.next_seal:
        lease_seal(r, slot, length - 1, length)
    return True


cdef int64_t coast_schedule(rank_t* r) noexcept nogil:
    """Schedule all who coast; returns the entry of `running` at which the ordinary scan goes on."""
    cdef pass_t* p = &r.p
    cdef coast_t* c = &r.coast
    cdef int64_t found
    cdef int64_t length
    cdef int64_t k
    cdef int64_t i
    cdef int32_t slot
    if c.count > p.budget or c.tick >= MOST_TICKS:
        paged_land(r)
        return 0
    if c.tick >= c.next_due:
        found = find_due(r)
        for k in range(found):
            i = r.hits[k]
            slot = r.running[i]
            length = settle_row(r, slot)
            if not serve(r, slot):
                return land_at(r, i)
            if length + 1 < r.requests[slot].limit:
                coast_set_due(r, i, due_tick(r, &r.requests[slot]))
                continue
            step_row(r, slot)
            r.due[i] = NEVER
            r.hits[p.num_ending] = <int32_t>i
            p.num_ending += 1
            coast_count_out(r, length)
            moments_add(&p.decode, length)
    p.coasting = c.count - p.num_ending
    p.decode.count += p.coasting
    p.decode.sum += c.sum
    p.decode.squares += c.squares
    p.budget -= c.count
    p.scheduled += c.count
    return c.count


cdef void coast_gather(rank_t* r) noexcept nogil:
    """After the tokens of a pass: requests that emitted, and behind which nobody stands who does not coast, do from now on."""
    cdef request_t* q
    cdef int32_t slot
    cdef int32_t k = 0
    while r.coast.count < r.header.num_running:
        slot = r.running[r.coast.count]
        q = &r.requests[slot]
        while k < r.p.num_ready and r.ready[k] != slot:
            k += 1
        # Its first two tokens are looked at one by one.
        if k == r.p.num_ready or q.generated < 2 or unlikely(q.host & UNSTORED):
            return
        CHECK(q.computed == q.length - 1 and q.length < q.limit and q.sched_drafts == 0)
        coast_join(r, q.length, due_tick(r, q))


# ---------------------------------------------------------------- scheduling one request

cdef inline void recompute(const rank_t* r, int32_t slot, int64_t* cached, int64_t* active) noexcept nogil:
    """Give back blocks of a prefix cost that are computed again (spec/kv-cache.md section 5)."""
    cdef const request_t* q = &r.requests[slot]
    cdef const config_t* c = r.config
    cdef int64_t most
    if cached[0] == 0 or q.length >= q.limit:
        return
    if c.recompute_last:
        most = (q.length - 1) // c.block_size
        if cached[0] > most:
            cached[0] = most
    if c.giveback and cached[0] >= c.giveback:
        cached[0] -= c.giveback
    if active[0] > cached[0]:
        active[0] = cached[0]


cdef void adjusted_cost(rank_t* r, int32_t slot, int64_t* cached, int64_t* active) noexcept nogil:
    """Prefix cost in blocks after the recompute adjustment."""
    prefix_cost(r, slot, cached, active)
    recompute(r, slot, cached, active)


cdef int schedule(rank_t* r, int32_t slot, bint from_waiting, int64_t cached_blocks) noexcept nogil:
    """Spec/vllm.md section 6: tokens of this pass, blocks for them, what becomes findable."""
    cdef request_t* q = &r.requests[slot]
    cdef const config_t* c = r.config
    cdef pass_t* p = &r.p
    cdef int64_t cached = cached_blocks * c.block_size if q.computed == 0 else 0
    cdef int64_t before = q.computed + cached
    cdef int64_t prompt_before = before if before < q.num_input else q.num_input
    cdef int64_t remaining = q.length - before
    cdef int64_t want = remaining if remaining < p.budget else p.budget
    cdef int64_t after
    cdef int64_t index
    cdef int64_t room
    cdef int64_t owned
    cdef int64_t found
    cdef bint himself
    if not c.chunked and q.num_input - prompt_before > p.budget:
        return BLOCKED
    if want <= 0 and remaining > 0:
        return BLOCKED
    after = before + want
    if after > q.capacity or after > q.allocated:
        owned = q.n_blocks
        # What a load has brought is owned already.
        found = cached_blocks if q.computed == 0 and owned == 0 else 0
        while not lease_grow(r, slot, after, found):
            if unlikely(tiers_refused(r, slot)):
                return DEPENDS
            index = pick_victim(r, slot)
            if index == -2:
                return SCHEDULE_FAILED
            if index < 0:
                after = before
                break
            if index < r.coast.count:
                land_scheduled(r)
            himself = r.running[index] == slot
            preempt(r, index)
            p.preempted_any = 1
            if himself:
                return PREEMPTED_ITSELF
        q = &r.requests[slot]
        if unlikely(r.config.host):
            host_fence(r, slot, owned + found)
    if after == before and before < q.length:
        return BLOCKED
    if cached > 0:
        q.next_seal = <int32_t>(cached + c.block_size)
    q.computed = <int32_t>after
    if after >= q.next_seal:
        lease_seal(r, slot, before, after)
        q = &r.requests[slot]
    q.stamp = r.header.passes
    q.sched_total = <int32_t>(after - before)
    q.sched_prompt = <int32_t>((after if after < q.num_input else q.num_input) - prompt_before)
    q.sched_drafts = 0
    p.budget -= after - before
    p.scheduled += 1
    if q.sched_prompt > 0:
        moments_add(&p.prefill, q.num_input)
        p.prefill_tokens += after - before
        p.prefill_kv_tokens += prompt_before
        if c.worker != DECODE:
            p.prefill_count += 1
            p.prefill_isl += prompt_before + q.sched_prompt
            p.prefill_prefix += prompt_before
    elif q.length < q.limit:
        moments_add(&p.decode, q.length)
    if c.nextn > 0 and q.drafts > 0 and after == q.length and not c.always_draft:
        room = q.drafts if q.drafts < p.budget else p.budget
        if c.max_model_len > 0 and room > c.max_model_len - 1 - q.length:
            room = c.max_model_len - 1 - q.length
        if room > 0:
            q.sched_drafts = <int32_t>room
            p.budget -= room
    if from_waiting:
        q.reused = <int32_t>cached
        if q.cached_prefix < 0:
            q.cached_prefix = <int32_t>cached
    return SCHEDULED


cdef int schedule_running(rank_t* r) noexcept nogil:
    """Running requests in order while there is budget (spec/vllm.md section 4.2).

    The index is not corrected when an earlier request was preempted: everything
    moved up by one, so the next one is passed over in this pass.
    """
    cdef pass_t* p = &r.p
    cdef header_t* h = r.header
    cdef request_t* q
    cdef int64_t index = 0
    cdef int64_t cached
    cdef int64_t active
    cdef int64_t length
    cdef int32_t slot
    cdef int result
    cdef bint plain = r.config.nextn == 0
    if r.coast.count > 0:
        index = coast_schedule(r)
        h = r.header
    while index < h.num_running and p.budget > 0:
        slot = r.running[index]
        q = &r.requests[slot]
        if index + 2 < h.num_running:
            prefetch(&r.requests[r.running[index + 2]])
        length = q.length
        # A decode step inside its last block, by far the most frequent case, in place.
        if likely(plain and length - q.computed == 1 and length <= q.capacity and length < q.next_seal
                  and q.computed >= q.num_input and length < q.limit):
            q.computed = <int32_t>length
            if q.allocated < length:
                q.allocated = <int32_t>length
            q.stamp = h.passes
            q.sched_total = 1
            q.sched_prompt = 0
            p.budget -= 1
            p.scheduled += 1
            moments_add(&p.decode, length)
            index += 1
            continue
        if unlikely(q.host & DEPENDENT) and tiers_depend(r, slot):
            index += 1
            continue
        cached = 0
        if q.computed == 0 and q.n_blocks == 0:
            adjusted_cost(r, slot, &cached, &active)
        result = schedule(r, slot, False, cached)
        h = r.header
        if result == SCHEDULED or result == DEPENDS:
            index += 1
        elif result == SCHEDULE_FAILED:
            return PASS_FAILED
        elif result == BLOCKED:
            break
    return PASS_OK


# ---------------------------------------------------------------- admission

cdef void reject(rank_t* r, int32_t slot, int32_t reason, int64_t needed) noexcept nogil:
    signal(r, slot, COMPLETED | REJECTED, reason, needed)
    r.num_rejected += 1
    drop_waiting(r, slot)
    r.p.completed += 1


cdef inline int64_t known_blocks(const rank_t* r, const request_t* q) noexcept nogil:
    """Blocks that a request must find to enter."""
    return blocks_of(r, q.length + burst_of(r, q) if unlikely(q.flags & CROWDED) else q.length)


cdef inline int64_t uncommitted_blocks(const rank_t* r) noexcept nogil:
    """Blocks not in use and not reserved for outputs of what runs or came with a handoff (spec/vllm.md section 11)."""
    return (r.config.num_blocks - pool_active(r) - (r.header.running_completion - r.header.running_blocks)
            - r.header.promised_blocks)


cdef inline int32_t first_materialised(const rank_t* r) noexcept nogil:
    """First waiting request whose prompt came with a handoff, or NO_SLOT."""
    cdef int32_t slot = r.header.waiting_head
    if r.header.num_materialised == 0:
        return NO_SLOT
    while not r.requests[slot].flags & MATERIALISED:
        slot = r.requests[slot].next
    return slot


cdef int gate(rank_t* r, int32_t slot, int64_t active_hits, int64_t* needed) noexcept nogil:
    """Spec/vllm.md sections 5 and 11: may the request at the head enter?"""
    cdef const request_t* q = &r.requests[slot]
    cdef const config_t* c = r.config
    cdef int64_t available
    if c.gate == TO_COMPLETION:
        needed[0] = completion_blocks(r, q)
        if needed[0] > c.num_blocks and q.status == WAITING:
            return REJECT
        available = uncommitted_blocks(r)
    else:
        needed[0] = known_blocks(r, q)
        if needed[0] > c.num_blocks and q.status == WAITING:
            return REJECT
        available = c.num_blocks - pool_active(r)
    if q.flags & OUTGROWN or needed[0] - active_hits > available:
        return WAIT
    return ADMIT


cdef int host_gate(rank_t* r, int32_t slot, int64_t* cached, int64_t* needed) noexcept nogil:
    """As `gate`, after a look into the host: what can be loaded from there is, before the request may enter.

    A policy is asked when it enters. What a load has brought is used as it was
    reserved, whatever became findable meanwhile.
    """
    cdef const request_t* q = &r.requests[slot]
    cdef int64_t active
    cdef int64_t base
    cdef int64_t load
    cdef int decision
    if q.n_blocks > 0:
        cached[0] = q.n_blocks
        active = q.n_blocks
    else:
        prefix_cost(r, slot, cached, &active)
    base = cached[0]
    if host_lookup(r, slot, base, &load) == LOOKUP_DEFERRED:
        host_sleep(r, slot)
        return SLEEP
    recompute(r, slot, cached, &active)
    if active < q.n_blocks:
        active = q.n_blocks
    if load == 0:
        return gate(r, slot, active, needed)
    # A load may not take what prefills under way and other loads still need.
    decision = gate(r, slot, active - host_headroom(r), needed)
    if decision == ADMIT:
        decision = SLEEP if host_load(r, slot, base, load) else WAIT
    return decision


cdef int tiers_gate(rank_t* r, int32_t slot, int64_t* cached, int64_t* needed) noexcept nogil:
    """As `gate`; who is let in and finds blocks of its prompt below is parked until they have come."""
    cdef const request_t* q
    cdef int64_t active
    cdef int64_t base
    cdef int decision
    if tiers_depend(r, slot):
        needed[0] = 0
        return WAIT
    prefix_cost(r, slot, cached, &active)
    base = cached[0]
    recompute(r, slot, cached, &active)
    decision = gate(r, slot, active, needed)
    q = &r.requests[slot]
    if decision != ADMIT or q.status != WAITING or base >= q.hashed:
        return decision
    decision = tiers_swap(r, slot, base)
    if decision == SWAP_BLOCKED:
        tiers_refused(r, slot)
        return WAIT
    return SLEEP if decision == SWAP_PARKED else ADMIT


cdef int schedule_waiting(rank_t* r) noexcept nogil:
    """Admissions in queue order; a blocked head blocks all behind it (spec/vllm.md section 4.3).

    A destination without capacity has a claim to what becomes free: while there
    is one, only requests that own their blocks already may enter.
    """
    cdef pass_t* p = &r.p
    cdef header_t* h = r.header
    cdef const config_t* c = r.config
    cdef admission_t* a
    cdef int64_t cached
    cdef int64_t active
    cdef int64_t needed
    cdef int32_t slot
    cdef int decision
    cdef int result
    if c.ask_order and not p.preempted_any and h.num_running < c.max_running and h.num_waiting > 1:
        if r.ask_order(r, NO_SLOT) < 0:
            return PASS_FAILED
    while not p.preempted_any and h.num_running < c.max_running:
        slot = host_candidate(r) if unlikely(c.host) else h.waiting_head
        if slot == NO_SLOT:
            break
        if unlikely(h.num_pending > 0):
            slot = first_materialised(r)
            if slot == NO_SLOT:
                break
        cached = 0
        if likely(not r.requests[slot].flags & MATERIALISED):
            if c.max_model_len > 0 and r.requests[slot].num_input >= c.max_model_len:
                reject(r, slot, MODEL_LENGTH, r.requests[slot].num_input)
                continue
            if unlikely(c.offload):
                if c.host:
                    decision = host_gate(r, slot, &cached, &needed)
                else:
                    decision = tiers_gate(r, slot, &cached, &needed)
                h = r.header
                c = r.config
                if decision == SLEEP:
                    continue
            else:
                adjusted_cost(r, slot, &cached, &active)
                decision = gate(r, slot, active, &needed)
            # What can never run is not the policy's to decide: it would come and go for ever.
            if (c.ask_admission and decision != REJECT and needed <= c.num_blocks
                    and not r.requests[slot].flags & OUTGROWN):
                decision = r.ask_admission(r, slot)
                if decision < 0:
                    return PASS_FAILED
            if decision == REJECT:
                reject(r, slot, POOL_TOO_SMALL, needed)
                continue
            if decision == WAIT:
                break
        result = schedule(r, slot, True, cached)
        h = r.header
        c = r.config
        if result == SCHEDULE_FAILED:
            return PASS_FAILED
        if result != SCHEDULED:
            break
        queue_leave(r, slot)
        if unlikely(r.requests[slot].flags & (MATERIALISED | CROWDED)):
            if r.requests[slot].flags & MATERIALISED:
                materialised_leave(r, slot)
            r.requests[slot].flags &= <unsigned char>~CROWDED
        running_append(r, slot)
        a = &r.admissions[r.num_admissions]
        r.num_admissions += 1
        a.id_hi = r.requests[slot].id_hi
        a.id_lo = r.requests[slot].id_lo
        a.slot = slot
        a.reused = r.requests[slot].reused
        a.device = <int32_t>host_admitted(r, slot) if unlikely(c.offload) else -1
        if r.requests[slot].sched_total == 0 and p.budget == 0:
            break
    return PASS_OK


# ---------------------------------------------------------------- emission

cdef void collect_ready(rank_t* r) noexcept nogil:
    """Requests that emit, in running order. Those complete already end here, before anything is emitted."""
    cdef header_t* h = r.header
    cdef pass_t* p = &r.p
    cdef request_t* q
    cdef int64_t i
    cdef int32_t slot
    cdef bint ended = False
    p.num_ready = p.num_ending
    for i in range(p.num_ending):
        r.ready[i] = r.running[r.hits[i]]
    for i in range(r.coast.count, h.num_running):
        slot = r.running[i]
        q = &r.requests[slot]
        if q.computed != q.length:
            continue
        if q.length < q.limit:
            r.ready[p.num_ready] = slot
            p.num_ready += 1
            continue
        signal(r, slot, COMPLETED, NO_REASON, 0)
        p.visible += 1
        p.visible_requests += 1
        finish(r, slot)
        ended = True
    if ended:
        sweep(r)
    if unlikely(r.config.tiers):
        tiers_ready(r)


cdef int reserve_bursts(rank_t* r) noexcept nogil:
    """Blocks for every ready request's burst, preempting until they fit (spec/vllm.md section 7, MTP).

    The blocks stay on the stack, promised by `num_reserved`.
    """
    cdef const request_t* q
    cdef int64_t total
    cdef int64_t i
    cdef int64_t index
    while r.p.num_ready > 0:
        total = 0
        for i in range(r.p.num_ready):
            q = &r.requests[r.ready[i]]
            total += blocks_of(r, q.length + burst_of(r, q)) - blocks_of(r, q.length)
        if pool_make_room(r, total, 0):
            r.header.num_reserved = total
            return PASS_OK
        if unlikely(r.p.offloading):
            for i in range(r.p.num_ready):
                r.p.offloading = 1
                tiers_refused(r, r.ready[i])
            r.p.num_ready = 0
            return PASS_OK
        index = pick_victim(r, r.ready[0])
        if index == -2:
            return PASS_FAILED
        if index < 0:
            r.p.num_ready = 0
            return PASS_OK
        preempt_for_sample(r, index)
        collect_ready(r)
    return PASS_OK


cdef int predict_decode(rank_t* r) noexcept nogil:
    """Duration of the decode part, from the ready requests that decode (spec/timing-and-fpm.md section 1)."""
    cdef const config_t* c = r.config
    cdef pass_t* p = &r.p
    cdef const request_t* q
    cdef int64_t count = p.coasting
    cdef int64_t tokens = r.coast.sum
    cdef int64_t i
    if c.worker == PREFILL:
        return PASS_OK
    for i in range(p.num_ready):
        q = &r.requests[r.ready[i]]
        if q.generated == 0 and not c.first_token_is_decode and q.sched_prompt > 0 and q.stamp == r.header.passes:
            continue
        count += 1
        tokens += q.length
    if count == 0:
        return PASS_OK
    return timing_decode(
        r, count, pool_active(r) * c.block_size if c.decode_from_blocks else tokens, tokens // count, &p.decode_ms)


cdef void offload_begin(rank_t* r) noexcept nogil:
    """A pass of a rank with a lower tier starts."""
    if r.config.host:
        host_begin(r)
        return
    tiers_tick(r, r.p.start_ms)
    # So that `paged_schedule` asks `stall_end`, and nobody else has to.
    r.p.not_before_ms = INFINITY


cdef double stall_end(const rank_t* r, double start_ms) noexcept nogil:
    """End of a pass of a rank with KVBM tiers: one without duration lasts until the next transfer ends."""
    cdef double end_ms = (start_ms + r.p.prefill_ms) + r.p.decode_ms
    cdef double deadline
    # Transfers of others on links that it shares are not what it waits for.
    if end_ms <= start_ms and r.header.num_transfers > 0:
        deadline = tiers_deadline(r)
        if deadline < INFINITY and deadline > end_ms:
            return deadline
    return end_ms


cdef int paged_schedule(rank_t* r, double now_ms) noexcept nogil:
    """All of a pass but its tokens: after this `r.p.end_ms` is known.

    Status: PASS_OK, or PASS_FAILED if a Python callback raised.
    """
    cdef pass_t* p = &r.p
    cdef int64_t count
    pass_open(r, now_ms)
    if unlikely(r.config.offload):
        offload_begin(r)
    if schedule_running(r) != PASS_OK or schedule_waiting(r) != PASS_OK:
        return PASS_FAILED
    if unlikely(r.config.host):
        host_observe(r)
    count = p.prefill_count
    if count > 0 and timing_prefill(r, count, p.prefill_isl // count, p.prefill_prefix // count, &p.prefill_ms) < 0:
        return PASS_FAILED
    collect_ready(r)
    if r.config.nextn > 0 and reserve_bursts(r) != PASS_OK:
        return PASS_FAILED
    if p.num_ready + p.coasting > 0 and predict_decode(r) < 0:
        return PASS_FAILED
    if unlikely(p.not_before_ms > now_ms):
        if r.config.tiers:
            if r.config.eager_samples and r.config.nextn == 0:
                # Blocks for tokens may be on their way out, too, which decides when the pass ends.
                emit_eager(r)
                p.emitted = 1
            p.end_ms = stall_end(r, now_ms)
            return PASS_OK
        r.host.fence_wait_ms += p.not_before_ms - now_ms
        now_ms = p.not_before_ms
    p.end_ms = (now_ms + p.prefill_ms) + p.decode_ms
    return PASS_OK


cdef void emit_plain(rank_t* r) noexcept nogil:
    cdef request_t* q
    cdef int64_t i
    cdef int32_t slot
    for i in range(r.p.num_ready):
        slot = r.ready[i]
        if i + 2 < r.p.num_ready:
            prefetch(&r.requests[r.ready[i + 2]])
        q = &r.requests[slot]
        r.burst[i] = 1
        if likely(q.length + 1 < q.limit and not r.want_signals and (not r.want_firsts or q.flags & SIGNALLED)):
            q.length += 1
            q.generated += 1
            q.flags |= SIGNALLED
            r.p.visible += 1
            continue
        emit_token(r, slot)
        if q.length >= q.limit:
            finish(r, slot)


cdef void emit_eager(rank_t* r) noexcept nogil:
    """Generation `dynamo-1.3`: the block of the sampled token is taken here, preempting if there is none."""
    cdef int64_t i
    cdef int64_t index
    cdef int32_t slot
    cdef bint grown
    for i in range(r.p.num_ready):
        r.burst[i] = 0
    for i in range(r.p.num_ready):
        slot = r.ready[i]
        grown = False
        while r.requests[slot].status == RUNNING:
            grown = lease_grow(r, slot, r.requests[slot].length + 1, 0)
            if grown or tiers_refused(r, slot):
                break
            index = pick_victim(r, slot)
            if index < 0:
                break
            preempt_for_sample(r, index)
        if not grown:
            continue
        r.burst[i] = 1
        emit_token(r, slot)
        if r.requests[slot].length >= r.requests[slot].limit:
            # At once: a victim is picked from `running`.
            finish(r, slot)
            running_delete(r, running_index(r, slot))


cdef void emit_bursts(rank_t* r) noexcept nogil:
    """Speculative decoding: draw all bursts, then emit request by request (spec/vllm.md section 7)."""
    cdef const config_t* c = r.config
    cdef request_t* q
    cdef int64_t i
    cdef int64_t k
    cdef int64_t most
    cdef int64_t drafts
    cdef int32_t slot
    cdef int32_t accepted
    for i in range(r.p.num_ready):
        q = &r.requests[r.ready[i]]
        accepted = 1
        if c.worker != PREFILL:
            drafts = c.nextn if c.always_draft else q.sched_drafts
            k = 0
            while k < drafts and rng_accept(&r.header.rng, c.accept_rates[k]):
                accepted += 1
                k += 1
        most = q.limit - q.length
        r.burst[i] = accepted if accepted < most else <int32_t>most
    for i in range(r.p.num_ready):
        slot = r.ready[i]
        for k in range(r.burst[i]):
            q = &r.requests[slot]
            if q.length >= q.next_seal:
                lease_seal(r, slot, q.computed, q.length)
                q = &r.requests[slot]
            q.computed = q.length
            emit_token(r, slot)
            if q.length > q.capacity:
                lease_take(r, q, 1)
                r.header.num_reserved -= 1
            q.allocated = q.length
        q = &r.requests[slot]
        if q.length >= q.limit:
            finish(r, slot)
        else:
            q.computed = q.length - 1
            q.next_seal = <int32_t>((q.computed // c.block_size + 1) * c.block_size)
            q.drafts = <int32_t>c.nextn if c.worker != PREFILL else 0
            q.sched_drafts = 0
    r.header.num_reserved = 0


cdef void paged_emit(rank_t* r) noexcept nogil:
    """Tokens and ends of the pass; `r.signals` holds them, rejected requests last."""
    cdef pass_t* p = &r.p
    cdef int64_t i
    cdef int64_t n
    if r.config.nextn > 0:
        emit_bursts(r)
    elif r.config.eager_samples:
        if not p.emitted:
            emit_eager(r)
    else:
        emit_plain(r)
    for i in range(p.num_ready):
        p.visible_requests += r.burst[i] > 0
    p.visible += p.coasting
    p.visible_requests += p.coasting
    rejected_last(r, r.num_rejected)
    coast_delete(r, r.hits, p.num_ending)
    sweep(r)
    coast_step(r)
    if r.coast.wanted and coasts(r.config):
        coast_gather(r)


cdef void sweep(rank_t* r) noexcept nogil:
    """Close the gaps that finished requests left in `running` behind those that coast."""
    cdef int64_t i
    cdef int64_t kept = r.coast.count
    if r.p.completed == r.num_rejected:
        return
    for i in range(r.coast.count, r.header.num_running):
        if r.requests[r.running[i]].status == RUNNING:
            r.running[kept] = r.running[i]
            kept += 1
    r.header.num_running = kept


cdef void paged_settle(rank_t* r) noexcept nogil:
    """Count the pass."""
    count_pass(r)


# ---------------------------------------------------------------- many passes at once

cdef bint paged_quiet(rank_t* r) noexcept nogil:
    """Whether the next passes only give a token each to requests that all coast, as long as none of them ends.

    A head that waits for room goes on waiting: blocks come back only when somebody ends, and those that are taken
    or evicted meanwhile do not help it. What may help is the next block of its prefix, see `calls_head`.
    """
    cdef const header_t* h = r.header
    cdef const config_t* c = r.config
    cdef const request_t* q
    cdef int64_t cached
    cdef int64_t active
    cdef int64_t needed
    if (r.coast.count < h.num_running or r.coast.count == 0 or r.coast.count > c.budget
            or c.timing == CALLABLE or c.worker == PREFILL):
        return False
    if h.num_pending > 0:
        # Nobody enters before a destination without capacity but who came with a handoff.
        return h.num_materialised == 0 and r.handoffs[h.pending_head].attempted == h.capacity_generation
    if h.num_running >= c.max_running or h.num_waiting + h.num_connector == 0:
        return True
    if c.host or h.num_waiting == 0:
        return False
    q = &r.requests[h.waiting_head]
    if q.flags & MATERIALISED or (c.max_model_len > 0 and q.num_input >= c.max_model_len):
        return False
    adjusted_cost(r, h.waiting_head, &cached, &active)
    return gate(r, h.waiting_head, active, &needed) == WAIT


cdef inline bint calls_head(rank_t* r, int32_t slot, uint64_t missing) noexcept nogil:
    """Whether a request that is due in this pass completes the block whose hash is the first that the head misses."""
    cdef const request_t* q = &r.requests[slot]
    cdef int64_t length = q.length + (r.coast.tick - r.since[slot])
    return length >= q.next_seal and r.contents[slot].hashes[length // r.config.block_size - 1] == missing


cdef bint serve_due(rank_t* r, int32_t head) noexcept nogil:
    """Serve who is due in this pass of a quiet rank; false, and nothing changed, if the pass needs a closer look.

    It does if somebody ends, if the pool might run out, or if `head`, the first in the queue, might enter.
    """
    cdef int64_t found = find_due(r)
    cdef int64_t k
    cdef int32_t slot
    cdef const request_t* q
    cdef bint simple = found <= r.header.num_free + r.header.num_inactive
    cdef bint watches = False
    cdef uint64_t missing = 0
    # Blocks of stores under way may come back late.
    if unlikely(r.header.num_transfers > 0):
        simple = False
    if head != NO_SLOT and r.config.caching:
        lease_find(r, head)
        watches = r.num_found < r.requests[head].hashed
        if watches:
            missing = r.contents[head].hashes[r.num_found]
    for k in range(found if simple else 0):
        slot = r.running[r.hits[k]]
        q = &r.requests[slot]
        if (q.length + (r.coast.tick - r.since[slot]) + 1 >= q.limit
                or (watches and calls_head(r, slot, missing))):
            simple = False
            break
    if not simple:
        # The pass finds them again.
        r.coast.next_due = r.coast.tick
        return False
    for k in range(found):
        slot = r.running[r.hits[k]]
        settle_row(r, slot)
        serve(r, slot)
        coast_set_due(r, r.hits[k], due_tick(r, &r.requests[slot]))
    return True


cdef inline void show(rank_t* r, double at_ms) noexcept nogil:
    """A pass has ended: stamp its events."""
    cdef int64_t k = r.header.num_events - 1
    while k >= 0 and r.events[k].at_ms < 0.0:
        r.events[k].at_ms = at_ms
        k -= 1


cdef int64_t paged_stretch(rank_t* r, double now_ms, double horizon_ms, double* ends, int64_t room) noexcept nogil:
    """Passes of a quiet rank, the first at `now_ms`, each of the others where one ends, before `horizon_ms`.

    At most `room`; their ends go to `ends`. Stops before a pass that gives somebody the last token, has no
    duration, or may find no block. Everything is as if each pass had been scheduled and emitted; how many it were.
    """
    cdef coast_t* c = &r.coast
    cdef header_t* h = r.header
    cdef pass_t* p = &r.p
    cdef int64_t n = c.count
    cdef int64_t done = 0
    cdef int64_t more
    cdef int32_t head = NO_SLOT
    cdef bint served = True       # events may have been buffered that no pass has shown
    cdef bint fresh = False       # ... up to the newest pass
    cdef double decode_ms = 0.0
    if h.num_running < r.config.max_running and h.num_pending == 0:
        head = h.waiting_head
    if h.num_transfers > 0 and host_deadline(r) < horizon_ms:
        # One that is over is settled between two passes.
        horizon_ms = host_deadline(r)
        if r.host.prepared_head != NO_SLOT:
            return 0
    if c.tick >= MOST_TICKS:
        return 0
    while done < room and now_ms < horizon_ms:
        if c.tick >= c.next_due:
            if fresh:
                show(r, now_ms)
                fresh = False
            if not serve_due(r, head):
                break
            h = r.header
            served = True
        more = c.next_due - c.tick
        if more > room - done:
            more = room - done
        while more > 0 and now_ms < horizon_ms:
            if fresh:
                # Of the newest pass they are shown when it ends.
                show(r, now_ms)
                fresh = False
            if r.config.timing != FIXED or done == 0:
                timing_decode(r, n, pool_active(r) * r.config.block_size if r.config.decode_from_blocks else c.sum,
                              c.sum // n, &decode_ms)
            ends[done] = now_ms + decode_ms
            if not ends[done] > now_ms:
                # `serve_due` is not done twice: who was due is due later.
                room = done
                break
            if done == 0:
                pass_open(r, now_ms)
            p.start_ms = now_ms
            now_ms = ends[done]
            welford_add(&h.duration_count, &h.duration_sum, &h.duration_mean, &h.duration_m2, now_ms - p.start_ms)
            coast_step(r)
            fresh = served
            served = False
            done += 1
            more -= 1
    if done == 0:
        return 0
    h.passes += done
    h.effect_free = 0
    p.budget -= n
    p.scheduled = n
    p.decode.count = n
    p.decode.sum = c.sum - n
    p.decode.squares = c.squares - 2 * p.decode.sum - n
    p.coasting = n
    p.visible = n
    p.visible_requests = n
    p.decode_ms = decode_ms
    p.end_ms = now_ms
    return done


# ---------------------------------------------------------------- liveness

cdef int paged_stuck(const rank_t* r, int32_t* slot, int64_t* needed) noexcept nogil:
    """Why the head of the queue can never progress although nothing runs, or NO_REASON.

    Only after an effect-free pass: nothing overtakes the head, so nothing can
    change what blocks it. A running request that does nothing, the first one,
    waits for a victim that its policy does not name.
    """
    cdef const request_t* q
    cdef const config_t* c = r.config
    needed[0] = 0
    slot[0] = r.header.waiting_head
    # A transfer under way ends, and whoever waits for it looks again.
    if not r.header.effect_free or r.header.num_transfers > 0:
        return NO_REASON
    if unlikely(r.header.num_connector > 0):
        slot[0] = r.host.connector_head
    if r.header.num_running > 0:
        slot[0] = r.running[0]
        needed[0] = blocks_of(r, r.requests[slot[0]].length)
        return NOT_ADMITTED
    if slot[0] == NO_SLOT:
        return NO_REASON
    q = &r.requests[slot[0]]
    needed[0] = known_blocks(r, q)
    if q.flags & OUTGROWN and needed[0] <= c.num_blocks:
        needed[0] = c.num_blocks + 1
    if needed[0] > c.num_blocks:
        return OUTGREW_POOL
    # Blocks of a handoff come back, and a destination without capacity gets some, when a command says so; blocks
    # of somebody further back, when `paged_unblock` lets it pass.
    if (r.header.num_pending + r.header.num_held_destinations + r.header.num_held_sources
            + r.header.num_materialised > 0):
        return NO_REASON
    if not c.chunked and q.num_input > c.budget:
        needed[0] = q.num_input
        return BUDGET_TOO_SMALL
    return NOT_ADMITTED


cdef bint paged_unblock(rank_t* r) noexcept nogil:
    """Let the first request whose prompt came with a handoff pass a head that waits for its blocks.

    For when nothing else can happen: a later handoff could still free the head.
    """
    cdef header_t* h = r.header
    cdef int32_t slot
    if not h.effect_free or h.num_running > 0 or h.num_pending > 0 or h.num_materialised == 0:
        return False
    slot = first_materialised(r)
    if slot == h.waiting_head:
        return False
    waiting_remove(r, slot)
    waiting_link(r, slot, h.waiting_head)
    h.effect_free = False
    return True
