# The pass of the radix engine: SGLang (spec/sglang.md sections 6 to 12).
#
# A pass is either prefill or decode. `radix_schedule` admits or, when nothing
# was admitted, retracts and times a decode step; `radix_emit` gives tokens and
# ends requests; `radix_settle` does the bookkeeping of the new-token ratio and
# of the buffered events.
#
# Decodes coast (coast.pxd) in decode passes; prefill passes leave them alone. A
# page has no id, so how many of them open one in a pass is all that matters: it
# stands in a wheel with an entry for each token of a page, and only last tokens
# are due. Rows can be written at any time without an end to the coasting.

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memset

from kvsim._core.coast cimport (
    MOST_TICKS, coast_clear, coast_count_out, coast_delete, coast_due, coast_join, coast_step,
)
from kvsim._core.events cimport event_add, event_open
from kvsim._core.handoff cimport materialised_leave, prebuilt_push, prebuilt_remove, source_hold
from kvsim._core.metrics cimport moments_add, welford_add
from kvsim._core.radix cimport (
    cursor_advance, cursor_t, radix_evict, radix_insert, radix_lock, radix_match, radix_match_length, radix_unlock,
)
from kvsim._core.requests cimport (
    row_open, row_release, running_append, running_delete, running_index, running_leave, waiting_link,
    waiting_remove,
)
from kvsim._core.rng cimport rng_accept
from kvsim._core.signals cimport count_pass, emit_token, pass_open, pressure, rejected_last, signal
from kvsim._core.timing cimport timing_decode, timing_prefill
from kvsim._core.types cimport (
    ASK_VICTIM, BUDGET_TOO_SMALL, CALLABLE, COMPLETED, DECODE, HAS_PARENT, HAS_TOKEN, MATERIALISED, MODEL_LENGTH, NOT_ADMITTED, NO_REASON, NO_SLOT,
    OUTGREW_POOL, PASS_FAILED, PASS_OK, POOL_TOO_SMALL, PREEMPTED, PREFILL, REJECTED, RETRY_COUNTDOWN, RETRY_RATIO,
    ROOT, RUNNING, STORED, WAITING, admission_t, coast_t, config_t, content_t, event_t, header_t, lease_t, pass_t,
    pressure_t, radix_t, rank_t, request_t,
)

cdef enum:
    LPM_LIMIT = 128         # longer queues are served in order
    DUPLICATE_TOKENS = 32   # in-batch prefix check, spec/sglang.md section 1.4
    LOOK_AHEAD = 20         # decode steps that a retraction makes room for
    FLUSH_PASSES = 40       # decode passes between two flushes of the event buffer
    RETRIES = 1024          # effect-free passes in a row after which the peer gives a run up
    MANY_RETRIES = 1048576


cdef inline int64_t pages_of(const rank_t* r, int64_t tokens) noexcept nogil:
    return (tokens + r.config.block_size - 1) // r.config.block_size


cdef inline int64_t page_ceil(const rank_t* r, int64_t tokens) noexcept nogil:
    return pages_of(r, tokens) * r.config.block_size


cdef inline cursor_t content_start(const rank_t* r, int32_t slot) noexcept nogil:
    cdef cursor_t at
    at.run = r.contents[slot].runs
    at.offset = 0
    return at


# ---------------------------------------------------------------- the lease of a request

cdef inline void set_pages(rank_t* r, int32_t slot, int64_t pages) noexcept nogil:
    cdef request_t* q = &r.requests[slot]
    r.leases[slot].pages = <int32_t>pages
    if q.status == RUNNING:
        r.header.running_blocks += pages - q.n_blocks
    q.n_blocks = <int32_t>pages
    q.allocated = <int32_t>(pages * r.config.block_size)


cdef inline bint take_pages(rank_t* r, int64_t pages) noexcept nogil:
    """Own `pages` more pages, evicting if need be; false and nothing taken if there are not enough."""
    if pages > r.radix.available + r.radix.evictable:
        return False
    if pages > r.radix.available:
        radix_evict(r, pages - r.radix.available)
    r.radix.available -= pages
    return True


cdef bint lease_fresh(rank_t* r, int32_t slot, int64_t tokens, int64_t cap) noexcept nogil:
    """Cover `tokens` tokens of a request that owns nothing, matching at most `cap` of them (section 4.3)."""
    cdef lease_t* l
    cdef int64_t most = (cap if cap < tokens else tokens) // r.config.block_size
    cdef int64_t prefix = 0
    cdef int32_t node = ROOT
    cdef cursor_t at = content_start(r, slot)
    if r.config.caching:
        prefix = radix_match(r, at, most, &node)
        radix_lock(r, node)
    if not take_pages(r, pages_of(r, tokens) - prefix):
        radix_unlock(r, node)
        return False
    if prefix > 0:
        cursor_advance(&at, prefix)
    l = &r.leases[slot]
    l.node = node
    l.cached = <int32_t>prefix
    l.run = <int32_t>(at.run - r.contents[slot].runs)
    l.run_offset = at.offset
    set_pages(r, slot, pages_of(r, tokens))
    return True


cdef bint lease_extend(rank_t* r, int32_t slot, int64_t tokens) noexcept nogil:
    """Cover `tokens` tokens of a request that owns a part of them already (section 4.4)."""
    cdef int64_t fresh = pages_of(r, tokens) - r.leases[slot].pages
    if fresh > 0:
        if not take_pages(r, fresh):
            return False
        set_pages(r, slot, r.leases[slot].pages + fresh)
    return True


cdef void tell_stored(rank_t* r, int32_t slot, int64_t first, int64_t last) noexcept nogil:
    """Stored event of pages first .. last-1 of a request; with events a run is one page.

    It continues the event before it in the buffer when that one ends at its parent.
    """
    cdef const content_t* content = &r.contents[slot]
    cdef uint64_t parent = content.runs[first - 1].seq if first > 0 else 0
    cdef event_t* before
    cdef int64_t i
    cdef bint joined = False
    if r.header.num_events > r.radix.flushed and first > 0:
        before = &r.events[r.header.num_events - 1]
        joined = before.kind == STORED and before.count > 0 and (
            r.event_blocks[before.first + before.count - 1].block_hash == parent)
    if not joined:
        event_open(r, STORED, parent, HAS_PARENT if first > 0 else 0)
    for i in range(first, last):
        event_add(r, content.runs[i].seq, content.runs[i].key, slot, <int32_t>i)


cdef int32_t put_in_tree(rank_t* r, int32_t slot, int64_t pages) noexcept nogil:
    """Have the first `pages` pages of a request in the tree; the node they end at.

    Pages that lay there already were owned twice: the request gives its copies
    back and uses those of the tree. The arena may move.
    """
    cdef const lease_t* l = &r.leases[slot]
    cdef int64_t first = l.cached
    cdef int64_t found
    cdef cursor_t at
    cdef int32_t node
    at.run = r.contents[slot].runs + l.run
    at.offset = l.run_offset
    node = radix_insert(
        r, l.node, at, pages - first, r.contents[slot].runs + r.contents[slot].num_runs, &found)
    if r.config.emit_events and found < pages - first:
        tell_stored(r, slot, first + found, pages)
    r.radix.available += found
    return node


cdef void commit(rank_t* r, int32_t slot, int64_t pages) noexcept nogil:
    """Put the pages behind `cached`, up to `pages`, into the tree and go on from there (section 4.5)."""
    cdef lease_t* l = &r.leases[slot]
    cdef int64_t more = pages - l.cached
    cdef cursor_t at
    cdef int32_t node
    if not r.config.caching or more <= 0:
        return
    node = put_in_tree(r, slot, pages)
    l = &r.leases[slot]
    if node != l.node:
        radix_lock(r, node)
        radix_unlock(r, l.node)
    at.run = r.contents[slot].runs + l.run
    at.offset = l.run_offset
    cursor_advance(&at, more)
    l.node = node
    l.cached = <int32_t>pages
    l.run = <int32_t>(at.run - r.contents[slot].runs)
    l.run_offset = at.offset


cdef inline void commit_computed(rank_t* r, int32_t slot) noexcept nogil:
    commit(r, slot, r.requests[slot].computed // r.config.block_size)


cdef void lease_finish(rank_t* r, int32_t slot) noexcept nogil:
    """The request is done: its whole pages become cache, the rest is free."""
    cdef const lease_t* l = &r.leases[slot]
    cdef int64_t whole = r.requests[slot].computed // r.config.block_size
    if not r.config.caching or whole == 0:
        r.radix.available += l.pages - l.cached
    else:
        r.radix.available += l.pages - whole
        # Also with nothing to add: it makes the whole path recent.
        put_in_tree(r, slot, whole)
    radix_unlock(r, r.leases[slot].node)
    set_pages(r, slot, 0)
    memset(&r.leases[slot], 0, sizeof(lease_t))


cdef bint lease_release(rank_t* r, int32_t slot) noexcept nogil:
    """Give up everything without caching more; true if capacity may have grown."""
    cdef lease_t* l = &r.leases[slot]
    cdef bint improved = l.pages > l.cached or l.node != ROOT
    r.radix.available += l.pages - l.cached
    radix_unlock(r, l.node)
    set_pages(r, slot, 0)
    memset(l, 0, sizeof(lease_t))
    return improved


# ---------------------------------------------------------------- coasting: see coast.pxd

cdef inline void coast_write(rank_t* r, int32_t slot) noexcept nogil:
    """Bring the row of a coasting request up to the tick. Sums over the rank are there already."""
    cdef request_t* q = &r.requests[slot]
    cdef int32_t more = r.coast.tick - r.since[slot]
    if more == 0:
        return
    r.since[slot] = r.coast.tick
    q.length += more
    q.generated += more
    q.computed += more
    if q.computed > q.allocated:
        q.n_blocks = <int32_t>pages_of(r, q.computed)
        q.allocated = <int32_t>(q.n_blocks * r.config.block_size)
        r.leases[slot].pages = q.n_blocks


cdef inline int32_t* coast_wheel(const rank_t* r, const request_t* q) noexcept nogil:
    """Entry of the wheel that counts a request whose row is up to date."""
    cdef int64_t at = r.coast.wheel_at + q.allocated - q.length
    return &r.wheel[at if at < r.config.block_size else at - r.config.block_size]


cdef inline int64_t coast_growth(const rank_t* r) noexcept nogil:
    """Pages that coasting requests open in their next step."""
    return r.wheel[r.coast.wheel_at] if r.coast.count > 0 else 0


cdef void radix_sync(rank_t* r) noexcept nogil:
    """Write the rows of coasting requests, as if every pass had gone through them."""
    cdef int64_t i
    for i in range(r.coast.count):
        coast_write(r, r.running[i])


cdef void radix_land(rank_t* r) noexcept nogil:
    """Nobody coasts any more."""
    cdef int64_t i
    radix_sync(r)
    for i in range(r.coast.count):
        coast_wheel(r, &r.requests[r.running[i]])[0] -= 1
    coast_clear(r)


cdef void coast_gather(rank_t* r) noexcept nogil:
    """After a decode pass: those that emitted in it, up to the first that is not an ordinary one, coast from now on."""
    cdef const request_t* q
    while r.coast.count < r.header.num_running:
        q = &r.requests[r.running[r.coast.count]]
        # Its first two tokens are told by the passes that give them.
        if (q.generated < 2 or q.computed != q.length or q.allocated - q.length >= r.config.block_size
                or q.limit - q.length >= MOST_TICKS):
            return
        coast_wheel(r, q)[0] += 1
        coast_join(r, q.length, r.coast.tick + q.limit - 1 - q.length)


cdef void coast_emit(rank_t* r) noexcept nogil:
    """A token for each coasting request. Those that end with it go to the end of `ready`, behind `num_ready`."""
    cdef coast_t* c = &r.coast
    cdef pass_t* p = &r.p
    cdef int64_t k
    cdef int32_t slot
    if c.tick >= c.next_due:
        p.num_ending = <int32_t>coast_due(r)
    p.visible += c.count
    p.visible_requests += c.count
    coast_step(r)
    c.wheel_at = c.wheel_at + 1 if c.wheel_at + 1 < r.config.block_size else 0
    for k in range(p.num_ending):
        slot = r.running[r.hits[k]]
        coast_write(r, slot)
        coast_wheel(r, &r.requests[slot])[0] -= 1
        coast_count_out(r, r.requests[slot].length)
        signal(r, slot, HAS_TOKEN | COMPLETED, NO_REASON, 0)
        r.ready[p.num_ready + k] = slot
        r.burst[p.num_ready + k] = 1


# ---------------------------------------------------------------- entering and leaving

cdef int32_t radix_open(
    rank_t* r, uint64_t id_hi, uint64_t id_lo, int64_t num_input, int64_t max_output, const content_t* content
) noexcept nogil:
    """A row for a request that is in no queue yet. The caller has checked that the id is not active."""
    cdef int64_t limit = r.config.max_model_len
    cdef bint late = limit > 0 and num_input >= limit
    cdef int32_t slot
    if limit > 0 and not late and max_output > limit - num_input:
        max_output = limit - num_input
    slot = row_open(r, id_hi, id_lo, num_input, max_output, content)
    memset(&r.leases[slot], 0, sizeof(lease_t))
    r.leases[slot].late = late
    r.radix.late_requests += late
    return slot


cdef void drop_waiting(rank_t* r, int32_t slot) noexcept nogil:
    r.radix.late_requests -= r.leases[slot].late
    waiting_remove(r, slot)
    row_release(r, slot)


cdef void radix_cancel(rank_t* r, int32_t slot) noexcept nogil:
    """Drop a live request wherever it is."""
    cdef request_t* q = &r.requests[slot]
    cdef bint prebuilt = q.flags & MATERIALISED != 0
    if q.status == RUNNING:
        radix_land(r)
    r.radix.late_requests -= r.leases[slot].late
    if prebuilt:
        prebuilt_remove(r, slot)
        materialised_leave(r, slot)
    if lease_release(r, slot):
        r.header.capacity_generation += 1
    if prebuilt:
        row_release(r, slot)
    elif q.status == RUNNING:
        running_leave(r, slot)
        running_delete(r, running_index(r, slot))
        row_release(r, slot)
    else:
        drop_waiting(r, slot)


cdef void reject_late(rank_t* r) noexcept nogil:
    """Prompts that reach the model's limit leave before anything else (section 6.7)."""
    cdef int32_t slot = r.header.waiting_head
    cdef int32_t after
    while slot != NO_SLOT and r.radix.late_requests > 0:
        after = r.requests[slot].next
        if r.leases[slot].late:
            signal(r, slot, COMPLETED | REJECTED, MODEL_LENGTH, r.requests[slot].num_input)
            r.num_rejected += 1
            r.p.completed += 1
            drop_waiting(r, slot)
        slot = after


# ---------------------------------------------------------------- handoff (section 12)

cdef inline void tell_with_command(rank_t* r, int64_t before) noexcept nogil:
    """Events that a command made are handed out with it, not by the next pass that flushes.

    Told by the number of blocks in the buffer: a removal may have joined the event before it.
    """
    if r.header.num_event_blocks > before:
        r.radix.flush = 1


cdef inline int64_t transferable(const rank_t* r, int32_t slot) noexcept nogil:
    """Tokens of the pages that a reservation did not find in the tree."""
    return <int64_t>(r.leases[slot].pages - r.leases[slot].cached) * r.config.block_size


cdef int64_t radix_reserve(rank_t* r, int32_t slot) noexcept nogil:
    """Own pages for the whole prompt of a pending destination; tokens of those not found here, -1 if too few are free.

    Nothing of the prompt is computed here, so even its last token may be found.
    """
    cdef int64_t tokens = r.requests[slot].num_input
    cdef int64_t events = r.header.num_event_blocks
    cdef bint owned = lease_fresh(r, slot, tokens, tokens)
    tell_with_command(r, events)
    if not owned:
        return -1
    r.requests[slot].computed = <int32_t>tokens
    return transferable(r, slot)


cdef void radix_activate(rank_t* r, int32_t slot) noexcept nogil:
    """The prompt of a destination has arrived: it runs as soon as a pass has room.

    Until then its pages are its own: they cannot be found, and no capacity is won.
    """
    prebuilt_push(r, slot)


cdef void radix_free_source(rank_t* r, int32_t slot) noexcept nogil:
    """A held source is not needed any more: it leaves its pages as any completed request does."""
    lease_finish(r, slot)


cdef void radix_free_destination(rank_t* r, int32_t slot) noexcept nogil:
    """Nothing will arrive for a held destination: its pages are empty."""
    lease_release(r, slot)


cdef int radix_misfit(const rank_t* r, int64_t num_input, int64_t max_output, int64_t* needed) noexcept nogil:
    """Why a destination can never be reserved, and the pages it would need; outputs play no role."""
    needed[0] = pages_of(r, num_input)
    return POOL_TOO_SMALL if needed[0] > r.config.num_blocks else NO_REASON


cdef void promote(rank_t* r) noexcept nogil:
    """Activated destinations start to run, before anything else."""
    cdef int32_t slot
    cdef admission_t* a
    cdef request_t* q
    while r.header.prebuilt_head != NO_SLOT and r.header.num_running < r.config.max_running:
        slot = r.header.prebuilt_head
        prebuilt_remove(r, slot)
        materialised_leave(r, slot)
        running_append(r, slot)
        q = &r.requests[slot]
        q.stamp = r.header.passes
        a = &r.admissions[r.num_admissions]
        r.num_admissions += 1
        a.device = -1
        a.id_hi = q.id_hi
        a.id_lo = q.id_lo
        a.slot = slot
        a.reused = 0
        if not r.config.legacy:
            # What it brought can be found from now on; duplicates of cached pages are free again.
            commit_computed(r, slot)
            r.header.capacity_generation += 1


cdef inline bint gated(const rank_t* r) noexcept nogil:
    """Whether prompts have to wait for destinations: activated ones without a slot, or ones without capacity."""
    return r.header.prebuilt_head != NO_SLOT or r.header.num_pending > 0


# ---------------------------------------------------------------- order of the queue

cdef void order_by_prefix(rank_t* r) noexcept nogil:
    """Longest cached prefix first; all but the first of a group of equal beginnings go last (section 6.3)."""
    cdef int64_t n = r.header.num_waiting
    cdef int64_t duplicate_pages = pages_of(r, DUPLICATE_TOKENS)
    cdef int64_t i
    cdef int64_t j
    cdef int64_t prefix
    cdef int64_t length
    cdef int32_t slot = r.header.waiting_head
    cdef int64_t[LPM_LIMIT] keys
    cdef int32_t[LPM_LIMIT] slots
    cdef uint64_t[LPM_LIMIT] heads
    cdef int64_t num_heads = 0
    cdef int64_t key
    if not r.config.caching or n > LPM_LIMIT or n < 2:
        return
    for i in range(n):
        length = r.requests[slot].length
        prefix = radix_match_length(r, content_start(r, slot), length // r.config.block_size) * r.config.block_size
        key = -prefix
        if prefix <= DUPLICATE_TOKENS and length >= duplicate_pages * r.config.block_size:
            for j in range(num_heads):
                if heads[j] == r.contents[slot].head:
                    key += <int64_t>1 << 40
                    break
            heads[num_heads] = r.contents[slot].head
            num_heads += 1
        # Insertion sort: stable, and the queue is short and nearly in order.
        j = i
        while j > 0 and keys[j - 1] > key:
            keys[j] = keys[j - 1]
            slots[j] = slots[j - 1]
            j -= 1
        keys[j] = key
        slots[j] = slot
        slot = r.requests[slot].next
    for i in range(n):
        waiting_remove(r, slots[i])
        waiting_link(r, slots[i], NO_SLOT)


cdef int order_waiting(rank_t* r) noexcept nogil:
    """Put the queue in the order of this pass."""
    if r.config.ask_order:
        if r.header.num_waiting > 1 and r.ask_order(r, NO_SLOT) < 0:
            return PASS_FAILED
    elif r.config.lpm:
        order_by_prefix(r)
    return PASS_OK


# ---------------------------------------------------------------- prefill admission

cdef void running_reserve(const rank_t* r, double* tokens) noexcept nogil:
    """Output tokens that running requests are expected to need."""
    cdef int64_t i
    cdef int64_t left
    cdef const request_t* q
    tokens[0] = 0.0
    # One after the other in running order: a sum of reals.
    for i in range(r.coast.count):
        left = r.due[i] + 1 - r.coast.tick
        if left > r.config.clip:
            left = r.config.clip
        tokens[0] += <double>left * r.radix.new_token_ratio
    for i in range(r.coast.count, r.header.num_running):
        q = &r.requests[r.running[i]]
        left = q.limit - q.length
        if left > r.config.clip:
            left = r.config.clip
        tokens[0] += <double>left * r.radix.new_token_ratio


cdef int admit(rank_t* r) noexcept nogil:
    """Section 6.4: prompts of this pass, in `ready`; unfinished chunks return to the front of the queue."""
    cdef const config_t* c = r.config
    cdef pass_t* p = &r.p
    cdef header_t* h = r.header
    cdef int64_t ps = c.block_size
    cdef double rem_total
    cdef double reserved
    cdef int64_t rem_input = c.max_prefill
    cdef int64_t rem_chunk = c.chunk
    cdef int64_t slots = c.max_running - h.num_running
    cdef int64_t admitted = 0
    cdef int64_t start
    cdef int64_t extend
    cdef int64_t chunk
    cdef int64_t charge
    cdef int64_t reserve
    cdef int64_t known
    cdef int64_t prefix
    cdef int32_t slot
    cdef request_t* q
    cdef admission_t* a
    cdef bint first
    cdef int decision
    if h.waiting_head == NO_SLOT or slots <= 0:
        return PASS_OK
    running_reserve(r, &reserved)
    rem_total = <double>((r.radix.available + r.radix.evictable) * ps) - reserved
    while admitted < slots and h.waiting_head != NO_SLOT:
        slot = h.waiting_head
        q = &r.requests[slot]
        start = q.computed
        if start == 0 and c.caching:
            known = q.length if q.max_output == 0 else q.length - 1
            start = radix_match_length(r, content_start(r, slot), known // ps) * ps
        extend = q.length - start
        if extend == 0 and q.computed > 0:
            break
        chunk = extend
        if page_ceil(r, extend) > rem_chunk:
            chunk = rem_chunk // ps * ps
            if chunk > extend:
                chunk = extend
            if chunk == 0:
                break
        charge = page_ceil(r, chunk)
        reserve = 0
        if chunk == extend:
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
        first = q.computed == 0
        prefix = q.computed
        if first:
            if not lease_fresh(r, slot, start + chunk, start):
                break
            prefix = <int64_t>r.leases[slot].cached * ps
        elif not lease_extend(r, slot, start + chunk):
            break
        q = &r.requests[slot]
        c = r.config
        h = r.header
        waiting_remove(r, slot)
        q.computed = <int32_t>(start + chunk)
        q.stamp = h.passes
        if first:
            a = &r.admissions[r.num_admissions]
            r.num_admissions += 1
            a.device = -1
            a.id_hi = q.id_hi
            a.id_lo = q.id_lo
            a.slot = slot
            a.reused = <int32_t>prefix
            r.radix.hit_tokens += prefix
            r.radix.total_tokens += prefix
        r.radix.total_tokens += q.computed - prefix
        p.scheduled += 1
        if q.computed > prefix:
            # A prompt found whole in the cache takes part in the pass, not in its time.
            moments_add(&p.prefill, q.num_input)
            p.prefill_tokens += q.computed - prefix
            p.prefill_kv_tokens += prefix
            p.prefill_count += 1
            p.prefill_isl += q.computed
            p.prefill_prefix += prefix
        r.ready[admitted] = slot
        admitted += 1
        rem_total -= <double>(charge + reserve)
        rem_input -= charge
        rem_chunk -= charge
        if rem_chunk <= 0:
            break
    p.admitted = admitted
    return PASS_OK


cdef void disperse(rank_t* r) noexcept nogil:
    """Section 6.2 step 6: finished prompts start to run, chunks go back to the front."""
    cdef int64_t i
    cdef int32_t slot
    cdef int64_t kept = 0
    for i in range(r.p.admitted):
        slot = r.ready[i]
        if r.requests[slot].computed < r.requests[slot].length:
            commit_computed(r, slot)
            waiting_link(r, slot, r.header.waiting_head)
        else:
            running_append(r, slot)
            r.ready[kept] = slot
            kept += 1
    r.p.num_ready = <int32_t>kept


# ---------------------------------------------------------------- retraction

cdef inline int64_t burst_of(const rank_t* r, const request_t* q) noexcept nogil:
    cdef int64_t most = 1
    if r.config.worker != PREFILL:
        most += r.config.nextn
    if most > q.limit - q.length:
        most = q.limit - q.length
    return most


cdef int64_t growth_pages(const rank_t* r) noexcept nogil:
    """Pages that the next decode step of all running requests may need, those that are done excepted."""
    cdef int64_t total = coast_growth(r)
    cdef int64_t more
    cdef int64_t i
    cdef const request_t* q
    for i in range(r.coast.count, r.header.num_running):
        q = &r.requests[r.running[i]]
        if q.length >= q.limit:
            continue
        more = q.length + burst_of(r, q)
        if more > q.allocated:
            # One token opens at most one page: no division for the usual step.
            total += 1 if r.config.nextn == 0 else pages_of(r, more) - q.n_blocks
    return total


cdef void sort_running(rank_t* r) noexcept nogil:
    """Most generated first, then shortest prompt; stable."""
    cdef int64_t i
    cdef int64_t j
    cdef int32_t slot
    cdef const request_t* q
    cdef const request_t* o
    for i in range(1, r.header.num_running):
        slot = r.running[i]
        q = &r.requests[slot]
        j = i
        while j > 0:
            o = &r.requests[r.running[j - 1]]
            if o.generated > q.generated or (o.generated == q.generated and o.num_input <= q.num_input):
                break
            r.running[j] = r.running[j - 1]
            j -= 1
        r.running[j] = slot


cdef inline bint complete(const rank_t* r, int32_t slot) noexcept nogil:
    """Whether a running request has all its tokens: it has had none to generate."""
    return r.requests[slot].length >= r.requests[slot].limit


cdef int64_t choose_victim(rank_t* r) noexcept nogil:
    """Index in `running` of the request to retract, -1 if there is none; -2 if the policy failed.

    A request that ends in this pass is no victim.
    """
    cdef int64_t i = r.header.num_running - 1
    cdef int32_t victim
    if r.config.victim == ASK_VICTIM:
        victim = r.ask_victim(r, NO_SLOT)
        i = victim if victim < 0 else running_index(r, victim)
        return -1 if i >= 0 and complete(r, r.running[i]) else i
    while i >= 0 and complete(r, r.running[i]):
        i -= 1
    return i


cdef void retract(rank_t* r, int64_t index, int64_t growth, int64_t live, double now_ms) noexcept nogil:
    """Take everything from one of the `live` requests that still generate; it is computed again later (section 7.2)."""
    cdef int32_t slot = r.running[index]
    cdef request_t* q = &r.requests[slot]
    cdef pressure_t* e = pressure(r, slot)
    # Those that are complete have left before.
    e.running_before = <int32_t>live
    e.waiting_before = -1
    e.active_before = r.config.num_blocks - r.radix.available
    e.request_blocks = q.n_blocks
    e.logical_available = r.radix.available + r.radix.evictable
    e.required = growth
    lease_release(r, slot)
    running_leave(r, slot)
    running_delete(r, index)
    q.computed = 0
    q.allocated = 0
    q.status = PREEMPTED if q.generated > 0 else WAITING
    q.preemptions += 1
    e.running_after = <int32_t>(live - 1)
    e.waiting_after = -1
    e.active_after = r.config.num_blocks - r.radix.available


cdef int make_memory(rank_t* r, double now_ms, int64_t growth) noexcept nogil:
    """Retract until the next step, which needs `growth` pages, fits; retracted rows are listed in order."""
    cdef int64_t live = 0
    cdef int64_t index
    cdef int64_t wanted
    cdef int64_t i
    cdef int32_t slot
    cdef bint sorted_once = False
    if r.radix.available + r.radix.evictable < growth:
        radix_land(r)
        for i in range(r.header.num_running):
            slot = r.running[i]
            live += r.requests[slot].length < r.requests[slot].limit
    while r.radix.available + r.radix.evictable < growth and live > 1:
        if not sorted_once:
            sort_running(r)
            sorted_once = True
        index = choose_victim(r)
        if index == -2:
            return PASS_FAILED
        if index < 0:
            break
        r.retracted[r.p.num_retracted] = r.running[index]
        r.p.num_retracted += 1
        retract(r, index, growth, live, now_ms)
        live -= 1
        wanted = LOOK_AHEAD * live - r.radix.available * r.config.block_size
        if wanted > 0:
            radix_evict(r, pages_of(r, wanted))
        growth = growth_pages(r)
    if growth > r.radix.available:
        radix_evict(r, growth - r.radix.available)
    return PASS_OK


cdef void estimate_ratio(rank_t* r) noexcept nogil:
    """Section 7.3, from the survivors."""
    cdef int64_t i
    cdef int64_t out = 0
    cdef int64_t most = 0
    cdef int64_t n = 0
    cdef const request_t* q
    cdef double ratio
    for i in range(r.header.num_running):
        q = &r.requests[r.running[i]]
        if q.length >= q.limit:
            continue
        out += q.generated
        most += q.max_output
        n += 1
    ratio = <double>(out + LOOK_AHEAD * n) / <double>(most + 1)
    r.radix.new_token_ratio = ratio if ratio < 1.0 else 1.0


# ---------------------------------------------------------------- the pass

cdef int schedule_decode(rank_t* r, double now_ms) noexcept nogil:
    """Section 7.1 steps 1 to 6: who decodes, in `ready`; pages for them; the time."""
    cdef pass_t* p = &r.p
    cdef const request_t* q
    cdef int64_t i
    cdef int64_t context
    cdef int64_t growth
    cdef int64_t count
    cdef int32_t slot
    if r.coast.tick >= MOST_TICKS:
        radix_land(r)
    p.decode.count = r.coast.count
    p.decode.sum = r.coast.sum
    p.decode.squares = r.coast.squares
    for i in range(r.coast.count, r.header.num_running):
        q = &r.requests[r.running[i]]
        if q.length >= q.limit:
            # Done before: it ends without a token, holding its pages until the end of the pass.
            r.terminal[p.num_terminal] = r.running[i]
            p.num_terminal += 1
        else:
            moments_add(&p.decode, q.length)
    if p.decode.count > 0:
        r.radix.decode_passes += 1
        if make_memory(r, now_ms, growth_pages(r)) != PASS_OK:
            return PASS_FAILED
        if p.num_retracted > 0:
            estimate_ratio(r)
    p.coasting = r.coast.count
    context = r.coast.sum
    for i in range(p.coasting, r.header.num_running):
        slot = r.running[i]
        q = &r.requests[slot]
        if q.length >= q.limit:
            continue
        r.ready[p.num_ready] = slot
        p.num_ready += 1
        context += q.length
    count = p.coasting + p.num_ready
    if count == 0:
        return PASS_OK
    growth = growth_pages(r)
    if growth > r.radix.available:
        # Nobody coasts: what would not fit has landed.
        p.num_ready = 0
        return PASS_OK
    if timing_decode(r, count, context, context // count, &p.decode_ms) < 0:
        return PASS_FAILED
    r.radix.available -= growth
    p.reserved = growth - coast_growth(r)
    r.header.running_blocks += coast_growth(r)
    return PASS_OK


cdef int open_radix_pass(rank_t* r, double now_ms) noexcept nogil:
    """Begin a pass: prompts too long leave, activated destinations run, the queue is ordered, the interval counts."""
    cdef radix_t* x = r.radix
    pass_open(r, now_ms)
    r.p.ratio_before = x.new_token_ratio
    x.hit_tokens = 0
    x.total_tokens = 0
    if x.late_requests > 0:
        reject_late(r)
    promote(r)
    if order_waiting(r) != PASS_OK:
        return PASS_FAILED
    if r.radix.countdown > 0:
        r.p.deferred = 1
        r.radix.countdown -= 1
    return PASS_OK


cdef int radix_schedule(rank_t* r, double now_ms) noexcept nogil:
    """All of a pass but its tokens: after this `r.p.end_ms` is known."""
    cdef pass_t* p = &r.p
    cdef int64_t count
    if open_radix_pass(r, now_ms) != PASS_OK:
        return PASS_FAILED
    if not p.deferred and not gated(r) and admit(r) != PASS_OK:
        return PASS_FAILED
    count = p.prefill_count
    if p.admitted > 0:
        if r.config.worker != DECODE and count > 0 and timing_prefill(
                r, count, p.prefill_isl // count, p.prefill_prefix // count, &p.prefill_ms) < 0:
            return PASS_FAILED
        disperse(r)
        if p.prefill_tokens > 0:
            r.radix.countdown = r.config.prefill_interval
    elif schedule_decode(r, now_ms) != PASS_OK:
        return PASS_FAILED
    p.end_ms = (now_ms + p.prefill_ms) + p.decode_ms
    return PASS_OK


# ---------------------------------------------------------------- tokens

cdef inline void end_request(rank_t* r, int32_t slot) noexcept nogil:
    """Cache what a completed request computed and forget it, unless it is a source; `running` is swept later."""
    r.p.completed += 1
    if source_hold(r, slot):
        # Its whole pages can be matched from now on, and stay locked.
        commit_computed(r, slot)
        return
    lease_finish(r, slot)
    running_leave(r, slot)
    r.header.capacity_generation += 1
    row_release(r, slot)


cdef int64_t first_growth(const rank_t* r) noexcept nogil:
    """Pages for the first tokens of prompts that go on (section 6.5, group 3)."""
    cdef int64_t total = 0
    cdef int64_t i
    cdef int64_t more
    cdef const request_t* q
    for i in range(r.p.num_ready):
        q = &r.requests[r.ready[i]]
        if q.limit - q.length >= 2:
            more = pages_of(r, q.length + 1) - q.n_blocks
            if more > 0:
                total += more
    return total


cdef bint reserve_first(rank_t* r, int64_t growth) noexcept nogil:
    """Pages for first tokens; evicts cached pages even when that is not enough."""
    if growth > r.radix.available:
        radix_evict(r, growth - r.radix.available)
    if growth > r.radix.available:
        return False
    r.radix.available -= growth
    return True


cdef enum first_kind:  # what a finished prompt gets, in `burst` while it is decided
    TOKENLESS = -1
    LATER = 0     # no page for its token: it decodes in a later pass
    FIRST = 1     # a token, and goes on
    ONLY = 2      # its last token


cdef void emit_first_tokens(rank_t* r) noexcept nogil:
    """Section 6.5: the prefill forward gives each finished prompt one token."""
    cdef int64_t n = r.p.num_ready
    cdef int64_t i
    cdef int64_t left
    cdef int64_t growth
    cdef int32_t slot
    cdef request_t* q
    for i in range(n):
        slot = r.ready[i]
        left = r.requests[slot].limit - r.requests[slot].length
        r.burst[i] = TOKENLESS if left == 0 else (ONLY if left == 1 else FIRST)
        if left == 0:
            signal(r, slot, COMPLETED, NO_REASON, 0)
            r.p.visible += 1
            r.p.visible_requests += 1
    for i in range(n):
        if r.burst[i] == ONLY:
            # The last token needs no KV slot: nothing will attend to it.
            emit_token(r, r.ready[i])
    growth = first_growth(r)
    if not reserve_first(r, growth):
        # Commits give back duplicates, which may make room.
        for i in range(n):
            if r.burst[i] == FIRST:
                commit_computed(r, r.ready[i])
        for i in range(n):
            if r.burst[i] == ONLY:
                commit_computed(r, r.ready[i])
        if not reserve_first(r, growth):
            for i in range(n):
                if r.burst[i] == FIRST:
                    r.burst[i] = LATER
    for i in range(n):
        if r.burst[i] != FIRST:
            continue
        slot = r.ready[i]
        commit_computed(r, slot)
        q = &r.requests[slot]
        if q.length + 1 > q.allocated:
            set_pages(r, slot, q.n_blocks + 1)
        q.computed += 1
        emit_token(r, slot)
    for i in range(n):
        if r.burst[i] == ONLY:
            commit_computed(r, r.ready[i])
    for i in range(n):
        if r.burst[i] == TOKENLESS:
            end_request(r, r.ready[i])
    for i in range(n):
        if r.burst[i] == ONLY:
            end_request(r, r.ready[i])
    for i in range(n):
        r.burst[i] = 1 if r.burst[i] > 0 else 0
        r.p.visible_requests += r.burst[i]


cdef inline int64_t draw_burst(rank_t* r, const request_t* q) noexcept nogil:
    """Tokens that a decode step yields: drafts are drawn to the first rejection, then cut to what is left."""
    cdef const config_t* c = r.config
    cdef int64_t accepted = 1
    if c.nextn > 0 and c.worker != PREFILL:
        while accepted <= c.nextn and rng_accept(&r.header.rng, c.accept_rates[accepted - 1]):
            accepted += 1
    return accepted if accepted < q.limit - q.length else q.limit - q.length


cdef void signal_terminals(rank_t* r) noexcept nogil:
    """Requests that were done before this pass: their ends, without tokens."""
    cdef int64_t i
    for i in range(r.p.num_terminal):
        signal(r, r.terminal[i], COMPLETED, NO_REASON, 0)
        r.p.visible += 1
        r.p.visible_requests += 1


cdef void emit_decode(rank_t* r) noexcept nogil:
    """Section 7.1: requests that are done, then a burst of each of the others."""
    cdef int64_t i
    cdef int64_t k
    cdef int32_t slot
    cdef request_t* q
    signal_terminals(r)
    if r.p.coasting > 0:
        coast_emit(r)
    for i in range(r.p.num_ready):
        slot = r.ready[i]
        q = &r.requests[slot]
        r.burst[i] = <int32_t>draw_burst(r, q)
        for k in range(r.burst[i]):
            if q.computed == q.allocated:
                set_pages(r, slot, q.n_blocks + 1)
                r.p.reserved -= 1
            q.computed += 1
            emit_token(r, slot)
        r.p.visible_requests += 1
    r.radix.available += r.p.reserved
    r.p.reserved = 0
    for i in range(r.p.num_terminal):
        end_request(r, r.terminal[i])
    coast_delete(r, r.hits, r.p.num_ending)
    for i in range(r.p.num_ending):
        end_request(r, r.ready[r.p.num_ready + i])
    for i in range(r.p.num_ready):
        slot = r.ready[i]
        if r.requests[slot].length >= r.requests[slot].limit:
            end_request(r, slot)
    # Whoever follows requests hears of these as of all others that end.
    r.p.num_ready += r.p.num_ending
    r.p.coasting -= r.p.num_ending


cdef void sweep_running(rank_t* r) noexcept nogil:
    """Take the rows of ended requests out of `running`."""
    cdef int64_t i
    cdef int64_t kept = r.coast.count
    for i in range(r.coast.count, r.header.num_running):
        if r.requests[r.running[i]].status == RUNNING:
            r.running[kept] = r.running[i]
            kept += 1
    r.header.num_running = kept


cdef void radix_emit(rank_t* r) noexcept nogil:
    """Tokens and ends of the pass; retracted requests go to the back of the queue."""
    cdef int64_t i
    cdef int64_t late = r.num_rejected
    if r.p.admitted > 0:
        emit_first_tokens(r)
    else:
        emit_decode(r)
    rejected_last(r, late)
    if r.p.completed > late:
        sweep_running(r)
    if r.coast.wanted and r.p.num_ready > 0 and r.p.admitted == 0 and r.config.nextn == 0:
        coast_gather(r)
    for i in range(r.p.num_retracted):
        waiting_link(r, r.retracted[i], NO_SLOT)


cdef bint hopeless(const rank_t* r) noexcept nogil:
    """Whether passes at this instant could only wear down the new-token ratio, for longer than anyone would wait.

    An estimate after a retraction may lie far above a small initial ratio, whose
    steps are small, too. With nobody running the ratio counts for nothing, with
    no page to be had nothing is admitted at any ratio.
    """
    cdef const radix_t* x = r.radix
    cdef double steps
    if r.header.num_running + r.header.num_waiting == 0 or r.config.ratio_decay <= 0.0:
        return False
    steps = (x.new_token_ratio - r.config.min_ratio) / r.config.ratio_decay
    return steps > MANY_RETRIES or (
        steps > RETRIES and (r.header.num_running == 0 or x.available + x.evictable == 0))


cdef void radix_settle(rank_t* r) noexcept nogil:
    """New-token ratio, event buffer, pass count (section 6.2 steps 12 and 13)."""
    cdef radix_t* x = r.radix
    cdef pass_t* p = &r.p
    cdef double ratio
    if p.num_retracted > 0:
        r.header.capacity_generation += 1
    elif p.admitted == 0 and not (p.deferred and p.decode.count == 0):
        ratio = x.new_token_ratio - r.config.ratio_decay
        x.new_token_ratio = ratio if ratio > r.config.min_ratio else r.config.min_ratio
    if p.deferred and p.decode.count == 0 and p.admitted == 0 and not r.grouped:
        x.new_token_ratio = r.config.init_ratio
    count_pass(r)
    if r.header.effect_free and not p.deferred and hopeless(r):
        x.new_token_ratio = r.config.min_ratio
    x.retry = RETRY_COUNTDOWN if p.deferred else (RETRY_RATIO if x.new_token_ratio != p.ratio_before else 0)
    x.flush = p.prefill_tokens > 0 or r.header.num_running == 0 or (
        p.decode.count > 0 and x.decode_passes % FLUSH_PASSES == 0)


# ---------------------------------------------------------------- many passes at once

cdef bint radix_quiet(const rank_t* r) noexcept nogil:
    """Whether the next passes only give a token each to requests that all coast, as long as none of them ends."""
    cdef const header_t* h = r.header
    cdef const config_t* c = r.config
    # A queue is looked at when there is a seat, and sorted in any case.
    return (r.coast.count > 0 and r.coast.count == h.num_running
            and (h.waiting_head == NO_SLOT or (h.num_running >= c.max_running and not c.lpm and not c.ask_order))
            and h.prebuilt_head == NO_SLOT and h.num_pending == 0
            and r.radix.countdown == 0 and r.radix.late_requests == 0
            and not c.emit_events and c.timing != CALLABLE)


cdef int64_t radix_stretch(rank_t* r, double now_ms, double horizon_ms, double* ends, int64_t room) noexcept nogil:
    """Passes of a quiet rank, the first at `now_ms`, each of the others where one ends, before `horizon_ms`.

    At most `room`; their ends go to `ends`. Stops before a pass that gives somebody the last token, has no
    duration, or finds too few pages. Everything is as if each pass had been scheduled and emitted; how many it were.
    """
    cdef coast_t* c = &r.coast
    cdef radix_t* x = r.radix
    cdef pass_t* p = &r.p
    cdef int64_t n = c.count
    cdef int64_t ps = r.config.block_size
    cdef int64_t done = 0
    cdef int64_t growth
    cdef int64_t last_tick = c.next_due if c.next_due < MOST_TICKS else MOST_TICKS
    cdef double decode_ms = 0.0
    cdef double end_ms
    cdef double ratio
    if last_tick - c.tick < room:
        room = last_tick - c.tick
    while done < room and now_ms < horizon_ms:
        growth = r.wheel[c.wheel_at]
        if growth > x.available + x.evictable:
            break
        timing_decode(r, n, c.sum, c.sum // n, &decode_ms)
        end_ms = now_ms + decode_ms
        if end_ms <= now_ms:
            break
        if growth > x.available:
            radix_evict(r, growth - x.available)
        if done == 0:
            pass_open(r, now_ms)
        x.available -= growth
        r.header.running_blocks += growth
        p.start_ms = now_ms
        p.ratio_before = x.new_token_ratio
        ratio = x.new_token_ratio - r.config.ratio_decay
        x.new_token_ratio = ratio if ratio > r.config.min_ratio else r.config.min_ratio
        welford_add(&r.header.duration_count, &r.header.duration_sum, &r.header.duration_mean, &r.header.duration_m2,
                    end_ms - now_ms)
        coast_step(r)
        c.wheel_at = c.wheel_at + 1 if c.wheel_at + 1 < ps else 0
        ends[done] = end_ms
        now_ms = end_ms
        done += 1
    if done == 0:
        return 0
    x.hit_tokens = 0
    x.total_tokens = 0
    x.decode_passes += done
    x.retry = RETRY_RATIO if x.new_token_ratio != p.ratio_before else 0
    x.flush = x.decode_passes % FLUSH_PASSES == 0
    r.header.passes += done
    r.header.effect_free = 0
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

cdef int radix_stuck(const rank_t* r, int32_t* slot, int64_t* needed) noexcept nogil:
    """Which request blocks an idle rank for ever, and why; NO_REASON if none.

    Only after an effect-free pass whose ratio could not change any more.
    """
    cdef const request_t* q
    slot[0] = NO_SLOT
    needed[0] = 0
    if not r.header.effect_free or r.radix.retry != 0:
        return NO_REASON
    if r.header.num_held_sources + r.header.num_held_destinations > 0:
        # A command will free what they own, or let it run.
        return NO_REASON
    if r.header.num_pending > 0 and r.handoffs[r.header.pending_head].attempted != r.header.capacity_generation:
        return NO_REASON
    if r.header.num_running > 0:
        if r.header.num_running > 1:
            return NO_REASON
        slot[0] = r.running[0]
        needed[0] = max(growth_pages(r) + r.requests[slot[0]].n_blocks, r.config.num_blocks + 1)
        return OUTGREW_POOL
    slot[0] = r.header.waiting_head
    if r.header.num_pending > 0:
        # Prompts wait for the destination, that for the pages of one of them.
        while slot[0] != NO_SLOT and r.leases[slot[0]].pages == 0:
            slot[0] = r.requests[slot[0]].next
    if slot[0] == NO_SLOT:
        return NO_REASON
    if r.config.ask_admission and r.header.num_pending == 0:
        return NOT_ADMITTED
    q = &r.requests[slot[0]]
    needed[0] = page_ceil(r, q.length - q.computed)
    if needed[0] > r.config.chunk:
        needed[0] = r.config.chunk // r.config.block_size * r.config.block_size
    if needed[0] > r.config.max_prefill:
        return BUDGET_TOO_SMALL
    needed[0] = q.limit - q.length
    if needed[0] > r.config.clip:
        needed[0] = r.config.clip
    # Admission leaves room to spare, so a request may need just what there is and not fit.
    needed[0] = max(pages_of(r, q.length + needed[0] + 1), r.config.num_blocks + 1)
    return POOL_TOO_SMALL
