# The KVBM tiers of a paged rank (spec/host-offload.md part B); see tiers.pxd.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.events cimport event_add, event_open
from kvsim._core.pool cimport pool_active, pool_drop, pool_hold, pool_take
from kvsim._core.prefix cimport prefix_find, prefix_register, prefix_unregister
from kvsim._core.requests cimport waiting_link, waiting_remove
from kvsim._core.tiers cimport SWAP_BLOCKED, SWAP_MISS, SWAP_PARKED, tiers_deadline, tiers_depend
from kvsim._core.types cimport (
    ARRIVING, BATCH_JOB, CHECK, COPY_JOB, G1_TO_G2, G2, G2_TO_G1, G2_TO_G3, G2_TO_G4, G3, G3_TO_G2, G4, G4_TO_G2,
    GROW_TIER_BLOCKS, GROW_TIER_ENTRIES, GROW_TIER_JOBS, HAS_PARENT, HOST_PINNED, NO_BLOCK, NO_JOB, NO_SLOT, NUM_LINKS,
    NUM_TIERS, OFFLOAD_JOB, PARKED, REMOVED, RESIDENT, STAGE_JOB, STORED, SWAP_JOB, content_t, header_t, origin_t,
    likely, rank_t, request_t, tier_block_t, tier_entry_t, tier_job_t, tiers_t, unlikely,
)

cdef enum:
    KEPT = -1  # in `block_t.refs`, while others are evicted

#: An end at most this much later than asked for counts as reached.
cdef double SLACK_MS = 1e-9
cdef double NEVER = 1e999


# ---------------------------------------------------------------- entries

cdef inline int64_t entry_home(const rank_t* d, int32_t tier, uint64_t hash) noexcept nogil:
    return <int64_t>(hash ^ (<uint64_t>tier * <uint64_t>0x9E3779B97F4A7C15)) & d.mask_tiers


cdef int32_t tier_find(const rank_t* d, int32_t tier, uint64_t hash) noexcept nogil:
    """Row of a block in a tier whose table `d` holds, whatever its state, or NO_SLOT. Changes nothing."""
    cdef int64_t i = entry_home(d, tier, hash)
    cdef const tier_entry_t* e
    while d.tier_index[i] != NO_SLOT:
        e = &d.tier_entries[d.tier_index[i]]
        if e.hash == hash and e.tier == tier:
            return d.tier_index[i]
        i = (i + 1) & d.mask_tiers
    return NO_SLOT


cdef inline bint is_resident(const rank_t* d, int32_t tier, uint64_t hash) noexcept nogil:
    cdef int32_t row = tier_find(d, tier, hash)
    return row != NO_SLOT and d.tier_entries[row].state == RESIDENT


cdef void entry_index(rank_t* d, int32_t row) noexcept nogil:
    cdef int64_t i = entry_home(d, d.tier_entries[row].tier, d.tier_entries[row].hash)
    while d.tier_index[i] != NO_SLOT:
        i = (i + 1) & d.mask_tiers
    d.tier_index[i] = row


cdef void tiers_reindex(rank_t* d) noexcept nogil:
    """Fill the index anew, after it was enlarged."""
    cdef int64_t i
    for i in range(d.mask_tiers + 1):
        d.tier_index[i] = NO_SLOT
    for i in range(d.tiers.entries_used):
        if d.tier_entries[i].tier >= 0:
            entry_index(d, <int32_t>i)


cdef int32_t entry_open(rank_t* d, int32_t tier, uint64_t hash, int32_t state) noexcept nogil:
    """A block that a tier does not have yet; there must be room."""
    cdef tiers_t* t = d.tiers
    cdef tier_entry_t* e
    cdef int32_t row
    if t.free_entry != NO_SLOT:
        row = t.free_entry
        t.free_entry = d.tier_entries[row].next
    else:
        if unlikely(t.entries_used == d.cap_tier_entries):
            d.grow(d, GROW_TIER_ENTRIES, d.cap_tier_entries + 1)
            t = d.tiers
        row = <int32_t>t.entries_used
        t.entries_used += 1
    e = &d.tier_entries[row]
    e.hash = hash
    e.tokens_hash = 0
    e.parent_hash = 0
    e.tier = tier
    e.state = state
    e.pins = 0
    e.flags = 0
    e.prev = NO_SLOT
    e.next = NO_SLOT
    t.num_entries[tier] += 1
    entry_index(d, row)
    return row


cdef void entry_close(rank_t* d, int32_t row) noexcept nogil:
    """Forget a block that is in no list. The index has no tombstones: its cluster is shifted back."""
    cdef tier_entry_t* e = &d.tier_entries[row]
    cdef int64_t mask = d.mask_tiers
    cdef int64_t i = entry_home(d, e.tier, e.hash)
    cdef int64_t j
    cdef int64_t home
    cdef const tier_entry_t* other
    CHECK(e.pins == 0)
    while d.tier_index[i] != row:
        i = (i + 1) & mask
    j = i
    while True:
        j = (j + 1) & mask
        if d.tier_index[j] == NO_SLOT:
            break
        other = &d.tier_entries[d.tier_index[j]]
        home = entry_home(d, other.tier, other.hash)
        if ((j - home) & mask) >= ((j - i) & mask):
            d.tier_index[i] = d.tier_index[j]
            i = j
    d.tier_index[i] = NO_SLOT
    d.tiers.num_entries[e.tier] -= 1
    e.hash = 0
    e.tokens_hash = 0
    e.parent_hash = 0
    e.tier = -1
    e.state = 0
    e.flags = 0
    e.prev = NO_SLOT
    e.next = d.tiers.free_entry
    d.tiers.free_entry = row


cdef void lru_append(rank_t* d, int32_t row) noexcept nogil:
    cdef tier_entry_t* e = &d.tier_entries[row]
    cdef tiers_t* t = d.tiers
    e.next = NO_SLOT
    e.prev = t.lru_tail[e.tier]
    if e.prev == NO_SLOT:
        t.lru_head[e.tier] = row
    else:
        d.tier_entries[e.prev].next = row
    t.lru_tail[e.tier] = row
    t.num_evictable[e.tier] += 1


cdef void lru_unlink(rank_t* d, int32_t row) noexcept nogil:
    cdef tier_entry_t* e = &d.tier_entries[row]
    cdef tiers_t* t = d.tiers
    if e.prev == NO_SLOT:
        t.lru_head[e.tier] = e.next
    else:
        d.tier_entries[e.prev].next = e.next
    if e.next == NO_SLOT:
        t.lru_tail[e.tier] = e.prev
    else:
        d.tier_entries[e.next].prev = e.prev
    e.prev = NO_SLOT
    e.next = NO_SLOT
    t.num_evictable[e.tier] -= 1


cdef inline void entry_pin(rank_t* d, int32_t row) noexcept nogil:
    """A resident block is being read: it may not be evicted."""
    if d.tier_entries[row].pins == 0:
        lru_unlink(d, row)
    d.tier_entries[row].pins += 1


cdef inline void entry_unpin(rank_t* d, int32_t row) noexcept nogil:
    """One reader less; without any the block is the most recent of its tier."""
    CHECK(d.tier_entries[row].pins > 0)
    d.tier_entries[row].pins -= 1
    if d.tier_entries[row].pins == 0:
        lru_append(d, row)


cdef inline int64_t room_of(const rank_t* d, int32_t tier) noexcept nogil:
    """Blocks that a tier can take, evicting what is not pinned."""
    return d.config.tier_blocks[tier] - d.tiers.num_entries[tier] + d.tiers.num_evictable[tier]


cdef void make_room_in(rank_t* r, rank_t* d, int32_t tier, int64_t need) noexcept nogil:
    """Evict the oldest blocks of a tier of `d` until `need` of `r` fit; there must be enough.

    What leaves G2 is announced.
    """
    cdef int32_t row
    cdef uint64_t hash
    while d.config.tier_blocks[tier] - d.tiers.num_entries[tier] < need:
        row = d.tiers.lru_head[tier]
        hash = d.tier_entries[row].hash
        r.tiers.evicted[tier] += 1
        lru_unlink(d, row)
        entry_close(d, row)
        if tier == G2 and d.config.emit_events:
            event_open(d, REMOVED, 0, 0)
            d.events[d.header.num_events - 1].tier = HOST_PINNED
            event_add(d, hash, 0, NO_SLOT, 0)


cdef void tier_put(rank_t* d, int32_t tier, uint64_t hash) noexcept nogil:
    """A block appears in a tier, for tests: nothing if it is there already or there is no room."""
    if tier_find(d, tier, hash) == NO_SLOT and room_of(d, tier) > 0:
        make_room_in(d, d, tier, 1)
        lru_append(d, entry_open(d, tier, hash, RESIDENT))


cdef void announce(rank_t* r, int32_t row) noexcept nogil:
    """A block is registered in G2."""
    cdef const tier_entry_t* e = &r.tier_entries[row]
    if not r.config.emit_events:
        return
    event_open(r, STORED, e.parent_hash, e.flags & HAS_PARENT)
    r.events[r.header.num_events - 1].tier = HOST_PINNED
    e = &r.tier_entries[row]
    event_add(r, e.hash, e.tokens_hash, NO_SLOT, 0)


# ---------------------------------------------------------------- jobs

cdef int32_t job_open(rank_t* d, int32_t kind, int64_t count) noexcept nogil:
    """A job with room for `count` blocks, none in use yet, on no link and in no list."""
    cdef tiers_t* t = d.tiers
    cdef tier_job_t* job
    cdef int32_t row
    cdef int32_t span_class = 0
    cdef int64_t span
    while (<int64_t>1 << span_class) < count:
        span_class += 1
    span = <int64_t>1 << span_class
    if t.free_job == NO_SLOT and unlikely(t.jobs_used == d.cap_tier_jobs):
        d.grow(d, GROW_TIER_JOBS, d.cap_tier_jobs + 1)
        t = d.tiers
    if t.span_free[span_class] == NO_SLOT and unlikely(t.blocks_used + span > d.cap_tier_blocks):
        d.grow(d, GROW_TIER_BLOCKS, t.blocks_used + span)
        t = d.tiers
    if t.free_job != NO_SLOT:
        row = t.free_job
        t.free_job = d.tier_jobs[row].next
    else:
        row = <int32_t>t.jobs_used
        t.jobs_used += 1
    job = &d.tier_jobs[row]
    if t.span_free[span_class] != NO_SLOT:
        job.first = t.span_free[span_class]
        t.span_free[span_class] = d.tier_blocks[job.first].entry
    else:
        job.first = <int32_t>t.blocks_used
        t.blocks_used += span
    job.id = t.next_job
    t.next_job += 1
    job.remaining = 0.0
    job.ended_ms = 0.0
    job.count = 0
    job.kind = kind
    job.link = -1
    job.slot = NO_SLOT
    job.rank = 0
    job.parent = NO_SLOT
    job.stages = 0
    job.prefix = 0
    job.span_class = span_class
    job.prev = NO_SLOT
    job.next = NO_SLOT
    return row


cdef void job_close(rank_t* d, int32_t row) noexcept nogil:
    """Give back the row of a job that is in no list."""
    cdef tiers_t* t = d.tiers
    cdef tier_job_t* job = &d.tier_jobs[row]
    d.tier_blocks[job.first].entry = t.span_free[job.span_class]
    t.span_free[job.span_class] = job.first
    job.kind = NO_JOB
    job.next = t.free_job
    t.free_job = row


cdef inline tier_block_t* job_add(rank_t* d, int32_t row, uint64_t hash) noexcept nogil:
    """Append a block to a job."""
    cdef tier_job_t* job = &d.tier_jobs[row]
    cdef tier_block_t* block = &d.tier_blocks[job.first + job.count]
    job.count += 1
    block.hash = hash
    block.entry = NO_SLOT
    block.below = NO_SLOT
    block.block = NO_BLOCK
    block.unused = 0
    return block


cdef void list_push(rank_t* d, int32_t* head, int32_t* tail, int32_t row) noexcept nogil:
    d.tier_jobs[row].next = NO_SLOT
    d.tier_jobs[row].prev = tail[0]
    if tail[0] == NO_SLOT:
        head[0] = row
    else:
        d.tier_jobs[tail[0]].next = row
    tail[0] = row


cdef void list_remove(rank_t* d, int32_t* head, int32_t* tail, int32_t row) noexcept nogil:
    cdef tier_job_t* job = &d.tier_jobs[row]
    if job.prev == NO_SLOT:
        head[0] = job.next
    else:
        d.tier_jobs[job.prev].next = job.next
    if job.next == NO_SLOT:
        tail[0] = job.prev
    else:
        d.tier_jobs[job.next].prev = job.prev
    job.prev = NO_SLOT
    job.next = NO_SLOT


# ---------------------------------------------------------------- links

cdef inline double share_ms(const rank_t* d, int link, double num_bytes, int64_t sharers) noexcept nogil:
    return num_bytes * sharers / d.config.link_rates[link] if d.config.link_rates[link] > 0.0 else 0.0


cdef double least_on(const rank_t* d, int link, int64_t* count) noexcept nogil:
    """Fewest bytes that a transfer of a link has left, and how many transfers there are."""
    cdef double least = NEVER
    cdef int32_t row = d.tiers.link_head[link]
    count[0] = 0
    while row != NO_SLOT:
        count[0] += 1
        if d.tier_jobs[row].remaining < least:
            least = d.tier_jobs[row].remaining
        row = d.tier_jobs[row].next
    return least


cdef void link_foresee(rank_t* d, int link) noexcept nogil:
    cdef int64_t count
    cdef double least = least_on(d, link, &count)
    d.tiers.link_next_ms[link] = NEVER if count == 0 else d.tiers.link_ms[link] + share_ms(d, link, least, count)


cdef void link_progress(rank_t* d, int link, double now_ms) noexcept nogil:
    """Account for the time up to `now_ms`, in which nothing ends."""
    cdef tiers_t* t = d.tiers
    cdef int64_t count
    cdef double carried
    cdef int32_t row = t.link_head[link]
    if row == NO_SLOT or now_ms <= t.link_ms[link]:
        return
    least_on(d, link, &count)
    if d.config.link_rates[link] > 0.0:
        carried = (now_ms - t.link_ms[link]) * d.config.link_rates[link] / count
        while row != NO_SLOT:
            d.tier_jobs[row].remaining = (
                d.tier_jobs[row].remaining - carried if d.tier_jobs[row].remaining > carried else 0.0)
            row = d.tier_jobs[row].next
    t.link_ms[link] = now_ms
    link_foresee(d, link)


cdef inline rank_t* user_of(rank_t* d, int32_t row) noexcept nogil:
    """The rank whose blocks a job below moves."""
    return d if d.num_sharers == 0 else d.sharers[d.tier_jobs[row].rank]


cdef void link_advance(rank_t* d, int link, double now_ms) noexcept nogil:
    """Let a link carry its transfers until `now_ms`; those that end wait until their rank settles them."""
    cdef tiers_t* t = d.tiers
    cdef tiers_t* own
    cdef int64_t count
    cdef double least
    cdef double at_ms
    cdef int32_t row
    cdef int32_t after
    while t.link_next_ms[link] <= now_ms + SLACK_MS:
        least = least_on(d, link, &count)
        at_ms = t.link_next_ms[link]
        t.link_ms[link] = at_ms
        row = t.link_head[link]
        while row != NO_SLOT:
            after = d.tier_jobs[row].next
            d.tier_jobs[row].remaining -= least
            if d.tier_jobs[row].remaining <= 0.0:
                d.tier_jobs[row].remaining = 0.0
                d.tier_jobs[row].ended_ms = at_ms
                list_remove(d, &t.link_head[link], &t.link_tail[link], row)
                if link < G2_TO_G3:
                    list_push(d, &t.ended_head, &t.ended_tail, row)
                    if at_ms < t.ended_ms:
                        t.ended_ms = at_ms
                else:
                    own = user_of(d, row).tiers
                    list_push(d, &own.below_head, &own.below_tail, row)
                    if at_ms < own.below_ms:
                        own.below_ms = at_ms
            row = after
        link_foresee(d, link)
    link_progress(d, link, now_ms)


cdef inline void carry_below(rank_t* d, double now_ms) noexcept nogil:
    """Let shared links carry on to a time that one rank has reached; what ends is not settled.

    So no rank takes what others had under way before for what comes next.
    """
    cdef int link
    if likely(d.num_sharers == 0):
        return
    for link in range(G2_TO_G3, NUM_LINKS):
        link_advance(d, link, now_ms)
    if d.tiers.clock_ms < now_ms:
        d.tiers.clock_ms = now_ms


cdef void link_start(rank_t* d, int link, int32_t row, int64_t blocks, double now_ms) noexcept nogil:
    """Put a job that moves `blocks` blocks on a link, not before the latest time that was looked at."""
    cdef tiers_t* t = d.tiers
    carry_below(d.deep, now_ms)
    if now_ms < t.clock_ms:
        now_ms = t.clock_ms
    t.clock_ms = now_ms
    if d.num_sharers == 0:
        link_advance(d, link, now_ms)
    if t.link_head[link] == NO_SLOT:
        t.link_ms[link] = now_ms
    d.tier_jobs[row].link = link
    d.tier_jobs[row].remaining = <double>(<uint64_t>blocks * d.config.block_bytes)
    list_push(d, &t.link_head[link], &t.link_tail[link], row)
    link_foresee(d, link)


# ---------------------------------------------------------------- G1 -> G2

cdef inline void release_slot(rank_t* r, int32_t b) noexcept nogil:
    """A quarantined slot is empty."""
    r.tiers.num_quarantined -= 1
    pool_drop(r, &b, 1)


cdef int32_t evict(rank_t* r, int64_t count, int64_t kept) noexcept nogil:
    """Evict the oldest inactive blocks, but not the first `kept` of `rank_t.found`; the job that holds their slots.

    `below` of its blocks tells whether the hash is gone with the block. One
    Removed event names those.
    """
    cdef int64_t mask = r.mask_inactive
    cdef int64_t at = r.header.inactive_head
    cdef int32_t job = job_open(r, OFFLOAD_JOB, count)
    cdef int32_t b
    cdef int64_t i
    cdef bint gone
    cdef bint opened = False
    cdef tier_block_t* held
    for i in range(kept):
        if r.blocks[r.found[i]].refs == 0:
            r.blocks[r.found[i]].refs = KEPT
    r.header.num_inactive -= count
    r.tiers.num_quarantined += count
    r.found_of = NO_SLOT
    r.uses += 1
    while count > 0:
        b = r.inactive[at & mask]
        if b != NO_BLOCK and r.blocks[b].refs != KEPT:
            r.inactive[at & mask] = NO_BLOCK
            r.blocks[b].place = NO_BLOCK
            r.blocks[b].refs = 1
            gone = prefix_unregister(r, b)
            held = job_add(r, job, r.blocks[b].hash)
            held.block = b
            held.below = gone
            if gone and r.config.emit_events:
                if not opened:
                    event_open(r, REMOVED, 0, 0)
                    opened = True
                event_add(r, r.blocks[b].hash, 0, NO_SLOT, 0)
            count -= 1
        at += 1
    # Those that were passed over are the next victims; nothing else is left in front of `at`.
    while r.header.inactive_head < at and r.inactive[r.header.inactive_head & mask] == NO_BLOCK:
        r.header.inactive_head += 1
    for i in range(kept):
        if r.blocks[r.found[i]].refs == KEPT:
            r.blocks[r.found[i]].refs = 0
    return job


cdef bint tiers_make_room(rank_t* r, int64_t fresh, int64_t kept) noexcept nogil:
    """Offload the oldest inactive blocks so that `fresh` blocks are empty; the caller knows that there are enough.

    The first `kept` blocks of `rank_t.found` stay. False if some blocks are on
    their way out now: `pass_t.offloading` says so, and the caller gets none.
    Blocks that need no transfer, since G2 has them or they are on their way
    there, since another copy is left or since G2 has no room for them, are empty
    when the others are; if all are of that kind, at once (spec/host-offload.md
    section 9).
    """
    cdef int64_t missing = fresh - (r.header.num_free - r.header.num_reserved)
    cdef int64_t i
    cdef int64_t spare = 0
    cdef int32_t job
    cdef int32_t batch = NO_SLOT
    cdef int32_t entry
    cdef tier_block_t block
    cdef tier_entry_t* e
    if missing <= 0:
        return True
    job = evict(r, missing, kept)
    for i in range(missing):
        block = r.tier_blocks[r.tier_jobs[job].first + i]
        if not block.below or tier_find(r, G2, block.hash) != NO_SLOT or room_of(r, G2) <= 0:
            r.tier_blocks[r.tier_jobs[job].first + spare] = block
            spare += 1
            continue
        make_room_in(r, r, G2, 1)
        entry = entry_open(r, G2, block.hash, ARRIVING)
        if r.config.emit_events:
            e = &r.tier_entries[entry]
            e.tokens_hash = r.origins[block.block].tokens_hash
            e.parent_hash = r.origins[block.block].parent_hash
            e.flags = r.origins[block.block].flags
        if batch == NO_SLOT or r.tier_jobs[batch].count == r.config.offload_batch:
            batch = job_open(
                r, BATCH_JOB, missing - i if missing - i < r.config.offload_batch else r.config.offload_batch)
            r.tier_jobs[batch].parent = job
            r.tier_jobs[job].stages += 1
            list_push(r, &r.tiers.wait_head[G2], &r.tiers.wait_tail[G2], batch)
            r.header.num_transfers += 1
        block.entry = entry
        block.below = NO_SLOT
        r.tier_blocks[r.tier_jobs[batch].first + r.tier_jobs[batch].count] = block
        r.tier_jobs[batch].count += 1
    r.tier_jobs[job].count = <int32_t>spare
    if r.tier_jobs[job].stages == 0:
        end_offload(r, job)
        return True
    r.tiers.num_offloads += 1
    start_batches(r, G2, r.command_ms)
    r.p.offloading = 1
    r.p.deferrals += 1
    return False


cdef void end_offload(rank_t* r, int32_t row) noexcept nogil:
    """All batches of an offload have ended: slots that needed no transfer are empty, too."""
    cdef int64_t first = r.tier_jobs[row].first
    cdef int64_t i
    for i in range(first, first + r.tier_jobs[row].count):
        release_slot(r, r.tier_blocks[i].block)
    job_close(r, row)


cdef void start_batches(rank_t* r, int32_t tier, double now_ms) noexcept nogil:
    """Put batches that wait for their turn towards a tier on its link, as far as they may run at a time."""
    cdef rank_t* d = r if tier == G2 else r.deep
    cdef tiers_t* t = r.tiers
    cdef int link = G1_TO_G2 if tier == G2 else G2_TO_G3 if tier == G3 else G2_TO_G4
    cdef int64_t most = 1 if tier == G3 else r.config.offload_batch
    cdef int32_t row
    while t.wait_head[tier] != NO_SLOT and t.num_running[tier] < most:
        row = t.wait_head[tier]
        list_remove(d, &t.wait_head[tier], &t.wait_tail[tier], row)
        t.num_running[tier] += 1
        link_start(d, link, row, d.tier_jobs[row].count, now_ms)


cdef void end_batch(rank_t* r, int32_t row) noexcept nogil:
    """A part of an offload has reached G2: its blocks are there, its slots are empty, copies go on."""
    cdef int64_t first = r.tier_jobs[row].first
    cdef int64_t count = r.tier_jobs[row].count
    cdef int32_t offload = r.tier_jobs[row].parent
    cdef double at_ms = r.tier_jobs[row].ended_ms
    cdef int64_t i
    cdef int32_t entry
    for i in range(first, first + count):
        entry = r.tier_blocks[i].entry
        r.tier_entries[entry].state = RESIDENT
        lru_append(r, entry)
        announce(r, entry)
    r.p.ticked = 1
    for i in range(first, first + count):
        release_slot(r, r.tier_blocks[i].block)
    r.tiers.num_running[G2] -= 1
    r.tiers.moved[G1_TO_G2] += count
    r.header.num_transfers -= 1
    r.tier_jobs[offload].stages -= 1
    if r.tier_jobs[offload].stages == 0:
        end_offload(r, offload)
        r.tiers.num_offloads -= 1
    copy_down(r, row, G3, at_ms)
    copy_down(r, row, G4, at_ms)
    job_close(r, row)
    start_batches(r, G2, at_ms)


# ---------------------------------------------------------------- G2 -> G3, G4

cdef void copy_down(rank_t* r, int32_t batch, int32_t tier, double now_ms) noexcept nogil:
    """Copy what a batch brought on to a tier that has neither the block nor no room for it."""
    cdef rank_t* d = r.deep
    cdef int64_t count = r.tier_jobs[batch].count
    cdef int64_t i
    cdef int32_t row = NO_SLOT
    cdef int32_t below
    cdef tier_block_t block
    cdef tier_entry_t* e
    if r.config.tier_blocks[tier] == 0:
        return
    for i in range(count):
        block = r.tier_blocks[r.tier_jobs[batch].first + i]
        if tier_find(d, tier, block.hash) != NO_SLOT or room_of(d, tier) <= 0:
            continue
        make_room_in(r, d, tier, 1)
        below = entry_open(d, tier, block.hash, ARRIVING)
        e = &r.tier_entries[block.entry]
        d.tier_entries[below].tokens_hash = e.tokens_hash
        d.tier_entries[below].parent_hash = e.parent_hash
        d.tier_entries[below].flags = e.flags
        entry_pin(r, block.entry)
        if row == NO_SLOT:
            row = job_open(d, COPY_JOB, count - i)
        block.below = below
        block.block = NO_BLOCK
        d.tier_blocks[d.tier_jobs[row].first + d.tier_jobs[row].count] = block
        d.tier_jobs[row].count += 1
    if row == NO_SLOT:
        return
    d.tier_jobs[row].rank = r.sharer
    list_push(d, &r.tiers.wait_head[tier], &r.tiers.wait_tail[tier], row)
    r.header.num_transfers += 1
    start_batches(r, tier, now_ms)


cdef void end_copy(rank_t* r, int32_t row) noexcept nogil:
    cdef rank_t* d = r.deep
    cdef tier_job_t* job = &d.tier_jobs[row]
    cdef int link = job.link
    cdef int32_t tier = G3 if link == G2_TO_G3 else G4
    cdef double at_ms = job.ended_ms
    cdef int64_t i
    for i in range(job.first, job.first + job.count):
        d.tier_entries[d.tier_blocks[i].below].state = RESIDENT
        lru_append(d, d.tier_blocks[i].below)
        entry_unpin(r, d.tier_blocks[i].entry)
    r.tiers.num_running[tier] -= 1
    r.tiers.moved[link] += job.count
    job_close(d, row)
    r.header.num_transfers -= 1
    start_batches(r, tier, at_ms)


# ---------------------------------------------------------------- back to the device

cdef inline int64_t run_in(const rank_t* r, int32_t tier, const uint64_t* hashes, int64_t first, int64_t end) noexcept nogil:
    """Blocks from `first` on that a tier has; below G2 those that G2 knows nothing of."""
    cdef int64_t i = first
    while i < end and is_resident(r if tier == G2 else r.deep, tier, hashes[i]):
        if tier != G2 and tier_find(r, G2, hashes[i]) != NO_SLOT:
            break
        i += 1
    return i - first


cdef void stage(rank_t* r, int32_t swap, int32_t tier, int64_t first, int64_t count, double now_ms) noexcept nogil:
    """Bring `count` blocks of a swap, from its row `first` on, into the room that G2 has for them."""
    cdef rank_t* d = r.deep
    cdef tier_entry_t* e
    cdef tier_block_t* block
    cdef uint64_t hash
    cdef int64_t i
    cdef int32_t row
    cdef int32_t entry
    cdef int32_t below
    if count == 0:
        return
    row = job_open(d, STAGE_JOB, count)
    for i in range(first, first + count):
        hash = r.tier_blocks[r.tier_jobs[swap].first + i].hash
        below = tier_find(d, tier, hash)
        entry_pin(d, below)
        entry = entry_open(r, G2, hash, ARRIVING)
        e = &r.tier_entries[entry]
        e.tokens_hash = d.tier_entries[below].tokens_hash
        e.parent_hash = d.tier_entries[below].parent_hash
        e.flags = d.tier_entries[below].flags
        r.tier_blocks[r.tier_jobs[swap].first + i].entry = entry
        block = job_add(d, row, hash)
        block.entry = entry
        block.below = below
    d.tier_jobs[row].rank = r.sharer
    d.tier_jobs[row].parent = swap
    r.tier_jobs[swap].stages += 1
    r.header.num_transfers += 1
    link_start(d, G3_TO_G2 if tier == G3 else G4_TO_G2, row, count, now_ms)


cdef void end_stage(rank_t* r, int32_t row) noexcept nogil:
    """A part of a swap has come to G2; with the last one all are there, and the way to the device begins."""
    cdef rank_t* d = r.deep
    cdef tier_job_t* job = &d.tier_jobs[row]
    cdef int32_t swap = job.parent
    cdef double at_ms = job.ended_ms
    cdef int64_t i = job.first + job.count - 1
    cdef int64_t last
    while i >= job.first:
        entry_unpin(d, d.tier_blocks[i].below)
        i -= 1
    r.tiers.moved[job.link] += job.count
    job_close(d, row)
    r.header.num_transfers -= 1
    r.tier_jobs[swap].stages -= 1
    if r.tier_jobs[swap].stages > 0:
        return
    last = r.tier_jobs[swap].first + r.tier_jobs[swap].count
    for i in range(r.tier_jobs[swap].first + r.tier_jobs[swap].prefix, last):
        if r.tier_entries[r.tier_blocks[i].entry].state == ARRIVING:
            r.tier_entries[r.tier_blocks[i].entry].state = RESIDENT
            r.tier_entries[r.tier_blocks[i].entry].pins = 1
            announce(r, r.tier_blocks[i].entry)
    r.p.ticked |= r.config.emit_events
    if r.tier_jobs[swap].slot == NO_SLOT:
        # Nobody waits for it any more.
        swap_done(r, swap)
    else:
        link_start(r, G2_TO_G1, swap, r.tier_jobs[swap].count - r.tier_jobs[swap].prefix, at_ms)


cdef int tiers_swap(rank_t* r, int32_t slot, int64_t skip) noexcept nogil:
    """Look below for the prompt blocks behind the `skip` that the device has; if some are there, fetch them.

    `rank_t.found` holds those of the device. The request is parked then. Prefix,
    sources and destinations are pinned until the transfer ends, whatever becomes
    of the request. The parts in G3 and G4 come by way of G2; without room for both
    there, only what G2 has is fetched.
    """
    cdef const uint64_t* hashes = r.contents[slot].hashes
    cdef header_t* h = r.header
    cdef request_t* q = &r.requests[slot]
    cdef tiers_t* t = r.tiers
    cdef tier_block_t* block
    cdef int64_t end = q.hashed
    cdef int64_t near = run_in(r, G2, hashes, skip, end)
    cdef int64_t third = run_in(r, G3, hashes, skip + near, end)
    cdef int64_t fourth = run_in(r, G4, hashes, skip + near + third, end)
    cdef int64_t missing
    cdef int64_t spare
    cdef int64_t i
    cdef int32_t row
    cdef int32_t b
    if near + third + fourth == 0:
        return SWAP_MISS
    CHECK(r.found_of == slot and r.num_found == skip)
    for i in range(skip, skip + near):
        entry_pin(r, tier_find(r, G2, hashes[i]))
    if third + fourth > room_of(r, G2):
        third = 0
        fourth = 0
    missing = near + third + fourth - (h.num_free - h.num_reserved)
    spare = h.num_inactive
    for i in range(skip):
        spare -= r.blocks[r.found[i]].refs == 0
    if near + third + fourth == 0 or missing > spare or not r.make_room(r, near + third + fourth, skip):
        i = skip + near - 1
        while i >= skip:
            entry_unpin(r, tier_find(r, G2, hashes[i]))
            i -= 1
        return SWAP_BLOCKED if r.p.offloading else SWAP_MISS
    pool_hold(r, r.found, skip)
    make_room_in(r, r, G2, third + fourth)
    row = job_open(r, SWAP_JOB, skip + near + third + fourth)
    for i in range(skip):
        job_add(r, row, hashes[i]).block = r.found[i]
    for i in range(skip, skip + near + third + fourth):
        pool_take(r, &b, 1)
        block = job_add(r, row, hashes[i])
        block.block = b
        if i < skip + near:
            block.entry = tier_find(r, G2, hashes[i])
    r.tier_jobs[row].prefix = <int32_t>skip
    r.tier_jobs[row].slot = slot
    r.header.num_transfers += 1
    stage(r, row, G3, skip + near, third, r.command_ms)
    stage(r, row, G4, skip + near + third, fourth, r.command_ms)
    if third + fourth == 0:
        link_start(r, G2_TO_G1, row, near, r.command_ms)
    r.offloads[slot].load = row
    if r.offloads[slot].device_blocks < 0:
        r.offloads[slot].device_blocks = <int32_t>skip
    waiting_remove(r, slot)
    h = r.header
    t = r.tiers
    q = &r.requests[slot]
    q.host |= PARKED
    q.prev = t.parked_tail
    if q.prev == NO_SLOT:
        t.parked_head = slot
    else:
        r.requests[q.prev].next = slot
    t.parked_tail = slot
    h.num_connector += 1
    h.num_asleep += 1
    r.p.deferrals += 1
    return SWAP_PARKED


cdef void swap_done(rank_t* r, int32_t row) noexcept nogil:
    """Put a swap that is over where `show_done` looks, in order of parking."""
    cdef tiers_t* t = r.tiers
    cdef int32_t after = t.done_tail
    while after != NO_SLOT and r.tier_jobs[after].id > r.tier_jobs[row].id:
        after = r.tier_jobs[after].prev
    r.tier_jobs[row].prev = after
    r.tier_jobs[row].next = t.done_head if after == NO_SLOT else r.tier_jobs[after].next
    if after == NO_SLOT:
        t.done_head = row
    else:
        r.tier_jobs[after].next = row
    if r.tier_jobs[row].next == NO_SLOT:
        t.done_tail = row
    else:
        r.tier_jobs[r.tier_jobs[row].next].prev = row


cdef void show_swap(rank_t* r, int32_t row) noexcept nogil:
    """The blocks of a swap are on the device: findable and inactive, unless the request was cancelled meanwhile."""
    cdef const content_t* content
    cdef origin_t* origin
    cdef int64_t first = r.tier_jobs[row].first
    cdef int64_t prefix = r.tier_jobs[row].prefix
    cdef int64_t count = r.tier_jobs[row].count
    cdef int32_t slot = r.tier_jobs[row].slot
    cdef int64_t i
    cdef int32_t b
    cdef int32_t before = NO_BLOCK
    cdef bint opened = False
    r.found_of = NO_SLOT
    r.p.ticked = 1
    if slot != NO_SLOT:
        content = &r.contents[slot]
        for i in range(count):
            b = prefix_find(r, before, content.hashes[i])
            if b != NO_BLOCK:
                # The prefix, or computed by somebody else meanwhile: the slot is not needed.
                before = b
                opened = False
                continue
            b = r.tier_blocks[first + i].block
            before = prefix_register(r, b, before, content.hashes[i])
            if r.config.emit_events:
                origin = &r.origins[b]
                origin.tokens_hash = content.locals[i] if content.locals != NULL else 0
                origin.parent_hash = content.hashes[i - 1] if i > 0 else 0
                origin.flags = HAS_PARENT if i > 0 else 0
                if not opened:
                    event_open(r, STORED, origin.parent_hash, origin.flags)
                    opened = True
                event_add(
                    r, content.hashes[i], content.locals[i] if content.locals != NULL else 0, slot, <int32_t>i)
    # The last block first: leaves are evicted before roots, here and in G2.
    for i in range(count):
        r.found[i] = r.tier_blocks[first + i].block
    pool_drop(r, r.found, count)
    i = first + count - 1
    while i >= first + prefix:
        entry_unpin(r, r.tier_blocks[i].entry)
        i -= 1
    job_close(r, row)
    r.header.num_transfers -= 1


cdef void show_done(rank_t* r) noexcept nogil:
    """Requests whose blocks have come go to the front of the queue, in the order in which they were parked."""
    cdef int32_t front = r.header.waiting_head
    cdef int32_t row
    cdef int32_t slot
    while r.tiers.done_head != NO_SLOT:
        row = r.tiers.done_head
        list_remove(r, &r.tiers.done_head, &r.tiers.done_tail, row)
        slot = r.tier_jobs[row].slot
        show_swap(r, row)
        if slot != NO_SLOT:
            unpark(r, slot)
            waiting_link(r, slot, front)


cdef void unpark(rank_t* r, int32_t slot) noexcept nogil:
    """A parked request is in no queue, and no swap is for it."""
    cdef request_t* q = &r.requests[slot]
    cdef tiers_t* t = r.tiers
    if q.prev == NO_SLOT:
        t.parked_head = q.next
    else:
        r.requests[q.prev].next = q.next
    if q.next == NO_SLOT:
        t.parked_tail = q.prev
    else:
        r.requests[q.next].prev = q.prev
    q.next = NO_SLOT
    q.prev = NO_SLOT
    q.host &= <unsigned char>~PARKED
    r.offloads[slot].load = NO_SLOT
    r.header.num_connector -= 1
    r.header.num_asleep -= 1


cdef inline void count_parked(rank_t* r, double now_ms) noexcept nogil:
    """Account for the time that requests are parked."""
    if now_ms > r.tiers.seen_ms:
        r.tiers.parked_ms += r.header.num_connector * (now_ms - r.tiers.seen_ms)
        r.tiers.seen_ms = now_ms


cdef void tiers_drop(rank_t* r, int32_t slot) noexcept nogil:
    """A parked request leaves for good; what its swap has pinned stays until the transfer under way ends."""
    count_parked(r, r.command_ms)
    r.tier_jobs[r.offloads[slot].load].slot = NO_SLOT
    unpark(r, slot)


# ---------------------------------------------------------------- time

cdef int32_t take_due(rank_t* d, int32_t* ended, int32_t* ended_tail, double* ended_ms, double by_ms) noexcept nogil:
    """Transfers of a list that ended by a time, chained by link and id; their rows are of `d`."""
    cdef tier_job_t* jobs = d.tier_jobs
    cdef int32_t row = ended[0]
    cdef int32_t head = NO_SLOT
    cdef int32_t after
    cdef int32_t at
    cdef int32_t before
    ended_ms[0] = NEVER
    while row != NO_SLOT:
        after = jobs[row].next
        if jobs[row].ended_ms > by_ms:
            if jobs[row].ended_ms < ended_ms[0]:
                ended_ms[0] = jobs[row].ended_ms
            row = after
            continue
        list_remove(d, ended, ended_tail, row)
        before = NO_SLOT
        at = head
        while at != NO_SLOT and (jobs[at].link < jobs[row].link
                                 or (jobs[at].link == jobs[row].link and jobs[at].id < jobs[row].id)):
            before = at
            at = jobs[at].next
        jobs[row].next = at
        if before == NO_SLOT:
            head = row
        else:
            jobs[before].next = row
        row = after
    return head


cdef void settle_due(rank_t* r, rank_t* d, int32_t row) noexcept nogil:
    """What a chain of `take_due` brings a rank."""
    cdef int32_t after
    cdef int link
    while row != NO_SLOT:
        after = d.tier_jobs[row].next
        link = d.tier_jobs[row].link
        d.tier_jobs[row].next = NO_SLOT
        if link == G1_TO_G2:
            end_batch(r, row)
        elif link == G2_TO_G1:
            r.tiers.moved[link] += r.tier_jobs[row].count - r.tier_jobs[row].prefix
            r.tier_jobs[row].link = -1
            swap_done(r, row)
        elif link == G3_TO_G2 or link == G4_TO_G2:
            end_stage(r, row)
        else:
            end_copy(r, row)
        row = after


cdef void carry(rank_t* r, double now_ms) noexcept nogil:
    """Let all links that a rank uses carry on to `now_ms`; nothing is settled."""
    cdef rank_t* d = r.deep
    cdef int link
    for link in range(NUM_LINKS):
        link_advance(r if link < G2_TO_G3 else d, link, now_ms)
    if r.tiers.clock_ms < now_ms:
        r.tiers.clock_ms = now_ms
    if d.tiers.clock_ms < now_ms:
        d.tiers.clock_ms = now_ms


cdef bint tiers_tick(rank_t* r, double now_ms) noexcept nogil:
    """Settle what has ended by `now_ms`, in order of time, as it goes on; whether anything had.

    An earlier time than before: nothing. What ends at one time is settled by link
    and id. Ends of others on shared links are left to them.
    """
    cdef tiers_t* t = r.tiers
    cdef int64_t active
    cdef double deadline
    cdef int32_t own
    cdef int32_t below
    cdef bint settled = False
    r.command_ms = now_ms
    count_parked(r, now_ms)
    if r.header.num_transfers == 0:
        carry_below(r.deep, now_ms)
        return False
    active = pool_active(r)
    while True:
        deadline = tiers_deadline(r)
        if deadline > now_ms + SLACK_MS or deadline == NEVER:
            break
        carry(r, deadline)
        # Settling may move the arena.
        t = r.tiers
        own = take_due(r, &t.ended_head, &t.ended_tail, &t.ended_ms, deadline + SLACK_MS)
        below = take_due(r.deep, &t.below_head, &t.below_tail, &t.below_ms, deadline + SLACK_MS)
        settled |= own != NO_SLOT or below != NO_SLOT
        settle_due(r, r, own)
        settle_due(r, r.deep, below)
    if settled:
        r.header.effect_free = 0
    carry(r, now_ms)
    show_done(r)
    if pool_active(r) < active:
        r.header.capacity_generation += 1
    return settled


cdef void tiers_ready(rank_t* r) noexcept nogil:
    """Requests that depend on an offload emit nothing in this pass."""
    cdef int64_t i
    cdef int64_t kept = 0
    for i in range(r.p.num_ready):
        if not tiers_depend(r, r.ready[i]):
            r.ready[kept] = r.ready[i]
            kept += 1
    r.p.num_ready = <int32_t>kept


cdef void tiers_reset(rank_t* r) noexcept nogil:
    """Empty tiers, idle links."""
    cdef tiers_t* t = r.tiers
    cdef int k
    for k in range(NUM_LINKS):
        t.link_next_ms[k] = NEVER
        t.link_head[k] = NO_SLOT
        t.link_tail[k] = NO_SLOT
    for k in range(NUM_TIERS):
        t.lru_head[k] = NO_SLOT
        t.lru_tail[k] = NO_SLOT
        t.wait_head[k] = NO_SLOT
        t.wait_tail[k] = NO_SLOT
    t.ended_ms = NEVER
    t.ended_head = NO_SLOT
    t.ended_tail = NO_SLOT
    t.below_ms = NEVER
    t.below_head = NO_SLOT
    t.below_tail = NO_SLOT
    t.done_head = NO_SLOT
    t.done_tail = NO_SLOT
    t.free_entry = NO_SLOT
    t.free_job = NO_SLOT
    t.parked_head = NO_SLOT
    t.parked_tail = NO_SLOT
    for k in range(32):
        t.span_free[k] = NO_SLOT
    tiers_reindex(r)
