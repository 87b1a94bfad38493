# The pass of SGLang's scheduler of generation 1.3 (spec/sglang.md section 13).
#
# What differs from radix_pass.pyx: prompts and running requests share a pass,
# which takes prefill plus decode time, and a prompt gets its first token from
# its decode step; a prompt is cut only when it is longer than a whole chunk
# budget, and the cached part is charged too; pages enter the tree after every
# step; the pool hands out slots of single tokens.
#
# The tree and `available` still count pages, for a page is all of one request.
# Tokens of its last page that a request does not use are free for others:
# `available`, which may fall below zero, plus these is what the pool has.

from libc.stdint cimport int32_t, int64_t

from kvsim._core.metrics cimport moments_add
from kvsim._core.radix cimport cursor_advance, cursor_t, radix_evict, radix_lock, radix_match, radix_unlock
from kvsim._core.radix_pass cimport (
    burst_of, commit_computed, content_start, draw_burst, end_request, gated, lease_release, open_radix_pass, page_ceil,
    pages_of, radix_activate, running_reserve, set_pages, signal_terminals, sweep_running, tell_with_command,
    transferable,
)
from kvsim._core.requests cimport running_append, running_delete, running_index, running_leave, waiting_link, waiting_remove
from kvsim._core.signals cimport count_pass, emit_token, rejected_last
from kvsim._core.timing cimport timing_decode, timing_prefill
from kvsim._core.types cimport (
    ASK_VICTIM, DECODE, HELD_DESTINATION, NO_SLOT, PASS_FAILED, PASS_OK, PREEMPTED, RETRY_COUNTDOWN, ROOT, WAITING, admission_t,
    config_t, header_t, lease_t, pass_t, radix_t, rank_t, request_t,
)

# ---------------------------------------------------------------- the pool of tokens

cdef int64_t free_tokens(const rank_t* r) noexcept nogil:
    """Tokens that nobody owns."""
    cdef int64_t total = r.radix.available * r.config.block_size
    cdef int64_t i
    cdef const request_t* q
    for i in range(r.header.high_water):
        # Unused rows are zero; what is reserved for a prompt is its own to the last token.
        q = &r.requests[i]
        if q.status != HELD_DESTINATION:
            total += q.allocated - q.computed
    return total


cdef inline void events_apart(rank_t* r) noexcept nogil:
    """Every operation has events of its own: nothing is added to those of the one before."""
    r.radix.flushed = <int32_t>r.header.num_events


cdef void evict_tokens(rank_t* r, int64_t tokens) noexcept nogil:
    if tokens > 0:
        events_apart(r)
        radix_evict(r, pages_of(r, tokens))


cdef bint own_tokens(rank_t* r, int32_t slot, int64_t before, int64_t after) noexcept nogil:
    """Let a request own `after` tokens, of which it has `before`, evicting if need be; false if there are too few."""
    cdef int64_t missing = after - before - free_tokens(r)
    cdef int64_t pages = pages_of(r, after)
    if missing > r.radix.evictable * r.config.block_size:
        return False
    evict_tokens(r, missing)
    r.radix.available -= pages - pages_of(r, before)
    set_pages(r, slot, pages)
    r.requests[slot].computed = <int32_t>after
    return True


cdef bint open_lease(rank_t* r, int32_t slot, int64_t tokens, int64_t known, int64_t* prefix) noexcept nogil:
    """First `tokens` tokens of a request that owns nothing; `prefix` of the first `known` are found in the tree."""
    cdef lease_t* l
    cdef cursor_t at = content_start(r, slot)
    cdef int64_t found = 0
    cdef int32_t node = ROOT
    if r.config.caching:
        found = radix_match(r, at, known // r.config.block_size, &node)
        radix_lock(r, node)
    prefix[0] = found * r.config.block_size
    if not own_tokens(r, slot, prefix[0], tokens):
        radix_unlock(r, node)
        return False
    if found > 0:
        cursor_advance(&at, found)
    l = &r.leases[slot]
    l.node = node
    l.cached = <int32_t>found
    l.run = <int32_t>(at.run - r.contents[slot].runs)
    l.run_offset = at.offset
    return True


cdef inline void commit_apart(rank_t* r, int32_t slot) noexcept nogil:
    events_apart(r)
    commit_computed(r, slot)


# ---------------------------------------------------------------- handoff

cdef int64_t legacy_reserve(rank_t* r, int32_t slot) noexcept nogil:
    """Own whole pages for the prompt of a pending destination; tokens not found here, -1 if too few are free."""
    cdef int64_t tokens = r.requests[slot].num_input
    cdef int64_t events = r.header.num_event_blocks
    cdef int64_t prefix
    cdef bint owned = open_lease(r, slot, page_ceil(r, tokens), tokens, &prefix)
    tell_with_command(r, events)
    if not owned:
        return -1
    r.requests[slot].computed = <int32_t>tokens
    return transferable(r, slot)


cdef void legacy_activate(rank_t* r, int32_t slot) noexcept nogil:
    """The prompt of a destination has arrived: it can be found now, and the tail of its last page is free."""
    cdef int64_t events = r.header.num_event_blocks
    cdef int64_t before = r.radix.available + r.radix.evictable
    radix_activate(r, slot)
    commit_apart(r, slot)
    tell_with_command(r, events)
    if (r.radix.available + r.radix.evictable > before
            or r.requests[slot].allocated > r.requests[slot].computed):
        r.header.capacity_generation += 1


# ---------------------------------------------------------------- admission

cdef int legacy_admit(rank_t* r) noexcept nogil:
    """Prompts and chunks of this pass, in `ready`."""
    cdef const config_t* c = r.config
    cdef pass_t* p = &r.p
    cdef header_t* h = r.header
    cdef double rem_total
    cdef double reserved
    cdef int64_t rem_input = c.max_prefill
    cdef int64_t rem_chunk = c.chunk
    cdef int64_t slots = c.max_running - h.num_running
    cdef int64_t start
    cdef int64_t chunk
    cdef int64_t charge
    cdef int64_t reserve
    cdef int64_t prefix
    cdef int32_t slot
    cdef request_t* q
    cdef admission_t* a
    cdef int decision
    running_reserve(r, &reserved)
    # Unused tokens of partial pages are not for new requests.
    rem_total = <double>((r.radix.available + r.radix.evictable) * c.block_size) - reserved
    while p.admitted < slots and h.waiting_head != NO_SLOT:
        slot = h.waiting_head
        q = &r.requests[slot]
        start = q.computed
        chunk = q.length - start
        if page_ceil(r, chunk) > c.chunk:
            chunk = c.chunk // c.block_size * c.block_size
        if chunk == 0:
            break
        charge = page_ceil(r, chunk)
        reserve = 0
        if start + chunk == q.length:
            reserve = q.limit - q.length
            if reserve > c.clip:
                reserve = c.clip
        if c.ask_admission:
            decision = r.ask_admission(r, slot)
            if decision < 0:
                return PASS_FAILED
            if decision == 0:
                break
        elif <double>(charge + reserve) >= rem_total:
            break
        if charge > rem_input or charge > rem_chunk:
            break
        prefix = start
        if not (own_tokens(r, slot, start, start + chunk) if start > 0 else open_lease(r, slot, chunk, chunk, &prefix)):
            p.out_of_pool = 1
            break
        q = &r.requests[slot]
        c = r.config
        h = r.header
        waiting_remove(r, slot)
        q.stamp = h.passes
        a = &r.admissions[r.num_admissions]
        r.num_admissions += 1
        a.device = -1
        a.id_hi = q.id_hi
        a.id_lo = q.id_lo
        a.slot = slot
        a.reused = <int32_t>prefix
        r.radix.hit_tokens += prefix
        r.radix.total_tokens += prefix + chunk
        p.scheduled += 1
        moments_add(&p.prefill, q.num_input)
        p.prefill_tokens += chunk
        p.prefill_kv_tokens += prefix
        p.prefill_count += 1
        p.prefill_isl += q.computed
        p.prefill_prefix += prefix
        r.ready[p.admitted] = slot
        p.admitted += 1
        rem_total -= <double>(charge + reserve)
        rem_input -= charge
        rem_chunk -= charge
        if rem_chunk <= 0:
            break
    return PASS_OK


cdef void legacy_disperse(rank_t* r) noexcept nogil:
    """Commit what was computed; finished prompts join the running ones, the others wait in front."""
    cdef int64_t i
    cdef int32_t slot
    for i in range(r.p.admitted):
        slot = r.ready[i]
        commit_apart(r, slot)
        if r.requests[slot].computed < r.requests[slot].length:
            waiting_link(r, slot, r.header.waiting_head)
        else:
            running_append(r, slot)


# ---------------------------------------------------------------- retraction

cdef int64_t growth_tokens(const rank_t* r) noexcept nogil:
    """Tokens that the next step of all running requests may need, those that are done excepted."""
    cdef int64_t total = 0
    cdef int64_t i
    cdef const request_t* q
    for i in range(r.header.num_running):
        q = &r.requests[r.running[i]]
        if q.length < q.limit:
            total += q.length + burst_of(r, q) - q.computed
    return total


cdef int64_t oldest_with_fewest(rank_t* r) noexcept nogil:
    """Index in `running` of the request to retract: fewest generated tokens, then the earliest; -2 if a policy failed."""
    cdef int64_t best = -1
    cdef int64_t i
    cdef int32_t victim
    cdef const request_t* q
    if r.config.victim == ASK_VICTIM:
        victim = r.ask_victim(r, NO_SLOT)
        return victim if victim < 0 else running_index(r, victim)
    for i in range(r.header.num_running):
        q = &r.requests[r.running[i]]
        if q.length < q.limit and (best < 0 or q.generated < r.requests[r.running[best]].generated):
            best = i
    return best


cdef int legacy_make_memory(rank_t* r, int64_t live) noexcept nogil:
    """Retract until the next step of `live` requests fits; retracted rows are listed in running order."""
    cdef int64_t index
    cdef int64_t i
    cdef int64_t j
    cdef int32_t slot
    cdef request_t* q
    for i in range(r.header.num_running):
        r.requests[r.running[i]].sched_total = <int32_t>i
    while live > 1 and free_tokens(r) + r.radix.evictable * r.config.block_size < growth_tokens(r):
        index = oldest_with_fewest(r)
        if index == -2:
            return PASS_FAILED
        if index < 0:
            break
        slot = r.running[index]
        q = &r.requests[slot]
        lease_release(r, slot)
        running_leave(r, slot)
        running_delete(r, index)
        q.computed = 0
        q.status = PREEMPTED if q.generated > 0 else WAITING
        q.preemptions += 1
        live -= 1
        j = r.p.num_retracted
        while j > 0 and r.requests[r.retracted[j - 1]].sched_total > q.sched_total:
            r.retracted[j] = r.retracted[j - 1]
            j -= 1
        r.retracted[j] = slot
        r.p.num_retracted += 1
    evict_tokens(r, growth_tokens(r) - free_tokens(r))
    return PASS_OK


# ---------------------------------------------------------------- the pass

cdef int legacy_decode(rank_t* r) noexcept nogil:
    """Who decodes, in `ready`, and the time it takes."""
    cdef pass_t* p = &r.p
    cdef const request_t* q
    cdef int64_t i
    cdef int64_t context = 0
    for i in range(r.header.num_running):
        q = &r.requests[r.running[i]]
        if q.length >= q.limit:
            # Done before: it ends without a token, holding what it owns until the end of the pass.
            r.terminal[p.num_terminal] = r.running[i]
            p.num_terminal += 1
        else:
            moments_add(&p.decode, q.length)
    if p.decode.count > 0:
        r.radix.decode_passes += 1
        if legacy_make_memory(r, p.decode.count) != PASS_OK:
            return PASS_FAILED
    for i in range(r.header.num_running):
        q = &r.requests[r.running[i]]
        if q.length < q.limit:
            r.ready[p.num_ready] = r.running[i]
            p.num_ready += 1
            context += q.length
    if growth_tokens(r) > free_tokens(r):
        p.num_ready = 0
    if p.num_ready == 0:
        return PASS_OK
    if context > r.config.total_kv_tokens:
        context = r.config.total_kv_tokens
    if timing_decode(r, p.num_ready, context, context // p.num_ready, &p.decode_ms) < 0:
        return PASS_FAILED
    return PASS_OK


cdef int legacy_schedule(rank_t* r, double now_ms) noexcept nogil:
    """All of a pass but its tokens: after this `r.p.end_ms` is known."""
    cdef pass_t* p = &r.p
    cdef int64_t count
    if open_radix_pass(r, now_ms) != PASS_OK:
        return PASS_FAILED
    if not p.deferred and not gated(r) and legacy_admit(r) != PASS_OK:
        return PASS_FAILED
    count = p.prefill_count
    if count > 0:
        if r.config.worker != DECODE and timing_prefill(
                r, count, p.prefill_isl // count, p.prefill_prefix // count, &p.prefill_ms) < 0:
            return PASS_FAILED
        legacy_disperse(r)
        r.radix.countdown = r.config.prefill_interval
    if legacy_decode(r) != PASS_OK:
        return PASS_FAILED
    p.end_ms = (now_ms + p.prefill_ms) + p.decode_ms
    return PASS_OK


cdef void legacy_emit(rank_t* r) noexcept nogil:
    """Bursts, commits and ends; retracted requests go to the front of the queue in running order."""
    cdef int64_t i
    cdef int64_t k
    cdef int64_t late = r.num_rejected
    cdef int32_t slot
    cdef request_t* q
    signal_terminals(r)
    for i in range(r.p.num_ready):
        slot = r.ready[i]
        q = &r.requests[slot]
        r.burst[i] = <int32_t>draw_burst(r, q)
        for k in range(r.burst[i]):
            if q.computed == q.allocated:
                set_pages(r, slot, q.n_blocks + 1)
                r.radix.available -= 1
            q.computed += 1
            emit_token(r, slot)
        r.p.visible_requests += 1
        if q.length < q.limit:
            commit_apart(r, slot)
    rejected_last(r, late)
    for i in range(r.p.num_terminal):
        events_apart(r)
        end_request(r, r.terminal[i])
    for i in range(r.p.num_ready):
        slot = r.ready[i]
        if r.requests[slot].length >= r.requests[slot].limit:
            events_apart(r)
            end_request(r, slot)
    if r.p.completed > late:
        sweep_running(r)
    i = r.p.num_retracted - 1
    while i >= 0:
        waiting_link(r, r.retracted[i], r.header.waiting_head)
        i -= 1


cdef void legacy_settle(rank_t* r) noexcept nogil:
    """New-token ratio, pass count; every pass hands out its events."""
    cdef radix_t* x = r.radix
    cdef pass_t* p = &r.p
    cdef double ratio = x.new_token_ratio - r.config.ratio_decay
    if p.num_retracted > 0:
        r.header.capacity_generation += 1
    if p.num_retracted > 0 or p.out_of_pool:
        x.new_token_ratio = r.config.init_ratio
    elif not p.deferred or p.decode.count > 0:
        x.new_token_ratio = ratio if ratio > r.config.min_ratio else r.config.min_ratio
    elif not r.grouped:
        x.new_token_ratio = r.config.init_ratio
    x.retry = RETRY_COUNTDOWN if p.deferred else 0
    x.flush = 1
    count_pass(r)
