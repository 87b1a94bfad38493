# The host tier of a paged rank (spec/host-offload.md part A); see host.pxd.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvsim._core.events cimport event_add, event_open
from kvsim._core.host cimport (
    LOOKUP_DEFERRED, LOOKUP_HIT, LOOKUP_MISS, connector_asleep, connector_remove, connector_wake, host_deadline,
    queue_leave,
)
from kvsim._core.lease cimport blocks_of, lease_close, lease_grow, lease_seal
from kvsim._core.requests cimport waiting_count
from kvsim._core.types cimport (
    CAPACITY_RETRY, CHECK, CONNECTOR, EVICTED, GROW_HOST_ENTRIES, GROW_OFFLOAD_BLOCKS, GROW_OFFLOAD_EVENTS,
    GROW_TRANSFER_BLOCKS, GROW_TRANSFERS, HAS_PARENT, HOST_PINNED, LOAD, LOAD_CANCELLED, LOAD_COMPLETED, LOAD_QUEUED,
    NO_SLOT, NO_TRANSFER, REMOVED, STORE, STORED, STORE_BLOCK_MAPPINGS, STORE_COMPLETED, STORE_PREPARED,
    STORE_SUBMITTED, UNFITTABLE, UNSTORED, content_t, header_t, host_entry_t, host_t, offload_event_t, offload_t,
    prefetch, rank_t, request_t, transfer_block_t, transfer_t, unlikely,
)

cdef enum:
    MOST_SORTED = 1024  # entries that are sorted beside their list
    MOST_IN_BUCKET = 32
    AHEAD = 8  # places by which the hints of entries lead

cdef uint64_t EMPTY = 0xFFFFFFFFFFFFFFFFULL
cdef double NOT_TOLD = float("nan")


cdef inline int64_t prompt_blocks(const rank_t* r, int32_t slot) noexcept nogil:
    """Complete blocks of the prompt, as far as their hashes are known."""
    cdef int64_t n = r.requests[slot].num_input // r.config.block_size
    return n if n < r.contents[slot].num_hashes else r.contents[slot].num_hashes


# ---------------------------------------------------------------- observations

cdef offload_event_t* observe(
    rank_t* r, int32_t kind, double at_ms, uint64_t id_hi, uint64_t id_lo, int64_t transfer_id
) noexcept nogil:
    """Append an observation, which somebody wants; blocks are added to the newest one."""
    cdef offload_event_t* e
    cdef host_t* t = r.host
    if unlikely(t.num_events == r.cap_offload_events):
        r.grow(r, GROW_OFFLOAD_EVENTS, r.cap_offload_events + 1)
        t = r.host
    e = &r.offload_events[t.num_events]
    t.num_events += 1
    e.at_ms = at_ms
    e.completes_at_ms = NOT_TOLD
    e.id_hi = id_hi
    e.id_lo = id_lo
    e.transfer_id = transfer_id
    e.kind = kind
    e.flags = 0
    e.first = <int32_t>t.num_event_blocks
    e.count = 0
    return e


cdef void observe_block(rank_t* r, uint64_t hash, int64_t index) noexcept nogil:
    cdef host_t* t = r.host
    if unlikely(t.num_event_blocks == r.cap_offload_blocks):
        r.grow(r, GROW_OFFLOAD_BLOCKS, r.cap_offload_blocks + 1)
        t = r.host
    r.offload_blocks[t.num_event_blocks].hash = hash
    r.offload_blocks[t.num_event_blocks].index = <int32_t>index
    r.offload_blocks[t.num_event_blocks].unused = 0
    t.num_event_blocks += 1
    r.offload_events[t.num_events - 1].count += 1


cdef void observe_transfer(rank_t* r, int32_t kind, double at_ms, int32_t row, bint completes) noexcept nogil:
    """An observation about all blocks of a transfer."""
    cdef const transfer_t* t = &r.transfers[row]
    cdef int64_t i
    cdef offload_event_t* e
    if not r.want_offload:
        return
    e = observe(r, kind, at_ms, t.id_hi, t.id_lo, t.id)
    t = &r.transfers[row]
    if completes:
        e.completes_at_ms = t.deadline_ms
    for i in range(t.first, t.first + t.count):
        observe_block(r, r.transfer_blocks[i].hash, r.transfer_blocks[i].index)
        t = &r.transfers[row]


# ---------------------------------------------------------------- entries

# The index holds the lower half of a hash beside its row: that tells nearly all others from it, and is its home, so
# neither a search nor a deletion looks at the entries it passes.

cdef inline int64_t entry_home(const rank_t* r, uint64_t hash) noexcept nogil:
    return <int64_t>hash & r.mask_host


cdef inline uint64_t index_word(uint64_t hash, int32_t row) noexcept nogil:
    return (hash << 32) | <uint64_t><uint32_t>row


cdef inline int32_t row_in(uint64_t word) noexcept nogil:
    return <int32_t><uint32_t>word


cdef int32_t host_find(const rank_t* r, uint64_t hash) noexcept nogil:
    """Row of a block in the host, pending or resident, or NO_SLOT. Changes nothing."""
    cdef int64_t i = entry_home(r, hash)
    cdef uint64_t word = r.host_index[i]
    while word != EMPTY:
        if word >> 32 == <uint32_t>hash and r.host_entries[row_in(word)].hash == hash:
            return row_in(word)
        i = (i + 1) & r.mask_host
        word = r.host_index[i]
    return NO_SLOT


cdef inline void entry_prefetch(const rank_t* r, uint64_t hash) noexcept nogil:
    prefetch(&r.host_index[entry_home(r, hash)])


cdef inline void entry_prefetch_row(const rank_t* r, uint64_t hash) noexcept nogil:
    """Once the index is there, the entry it names at the hash's home."""
    cdef uint64_t word = r.host_index[entry_home(r, hash)]
    if word != EMPTY:
        prefetch(&r.host_entries[row_in(word)])


cdef void entry_index(rank_t* r, int32_t row) noexcept nogil:
    cdef int64_t i = entry_home(r, r.host_entries[row].hash)
    while r.host_index[i] != EMPTY:
        i = (i + 1) & r.mask_host
    r.host_index[i] = index_word(r.host_entries[row].hash, row)


cdef void host_reindex(rank_t* r) noexcept nogil:
    """Fill the index anew, after it was enlarged or restored."""
    cdef int64_t i
    for i in range(r.mask_host + 1):
        r.host_index[i] = EMPTY
    for i in range(r.host.entries_used):
        if r.host_entries[i].pins >= 0:
            entry_index(r, <int32_t>i)


cdef int32_t entry_open(rank_t* r, uint64_t hash, int32_t transfer) noexcept nogil:
    """A new block, pending until the store `transfer` is settled."""
    cdef host_t* t = r.host
    cdef host_entry_t* e
    cdef int32_t row
    if t.free_entry != NO_SLOT:
        row = t.free_entry
        t.free_entry = r.host_entries[row].next
    else:
        if unlikely(t.entries_used == r.cap_host_entries):
            r.grow(r, GROW_HOST_ENTRIES, r.cap_host_entries + 1)
            t = r.host
        row = <int32_t>t.entries_used
        t.entries_used += 1
    e = &r.host_entries[row]
    e.hash = hash
    e.epoch = 0
    e.cohort = 0
    e.transfer = transfer
    e.pins = 0
    e.prev = NO_SLOT
    e.next = NO_SLOT
    e.ahead = NO_SLOT
    t.num_entries += 1
    t.num_pending += 1
    entry_index(r, row)
    return row


cdef void lru_unlink(rank_t* r, int32_t row) noexcept nogil:
    cdef host_entry_t* e = &r.host_entries[row]
    cdef host_t* t = r.host
    if e.prev == NO_SLOT:
        t.lru_head = e.next
    else:
        r.host_entries[e.prev].next = e.next
    if e.next == NO_SLOT:
        t.lru_tail = e.prev
    else:
        r.host_entries[e.next].prev = e.prev
    e.prev = NO_SLOT
    e.next = NO_SLOT
    t.num_evictable -= 1


cdef void lru_append(rank_t* r, int32_t row) noexcept nogil:
    cdef host_entry_t* e = &r.host_entries[row]
    cdef host_t* t = r.host
    e.next = NO_SLOT
    e.prev = t.lru_tail
    if e.prev == NO_SLOT:
        t.lru_head = row
    else:
        r.host_entries[e.prev].next = row
    t.lru_tail = row
    t.num_evictable += 1


cdef void entry_evict(rank_t* r, int32_t row) noexcept nogil:
    """Forget a resident block that no load reads. The index has no tombstones: its cluster is shifted back."""
    cdef host_entry_t* e = &r.host_entries[row]
    cdef int64_t mask = r.mask_host
    cdef int64_t i = entry_home(r, e.hash)
    cdef int64_t j
    cdef int64_t home
    CHECK(e.pins == 0 and e.transfer == NO_SLOT)
    lru_unlink(r, row)
    while r.host_index[i] != index_word(e.hash, row):
        i = (i + 1) & mask
    j = i
    while True:
        j = (j + 1) & mask
        if r.host_index[j] == EMPTY:
            break
        home = <int64_t>(r.host_index[j] >> 32) & mask
        if ((j - home) & mask) >= ((j - i) & mask):
            r.host_index[i] = r.host_index[j]
            i = j
    r.host_index[i] = EMPTY
    e.hash = 0
    e.epoch = 0
    e.cohort = 0
    e.pins = -1
    e.ahead = NO_SLOT
    e.next = r.host.free_entry
    r.host.free_entry = row
    r.host.num_entries -= 1


cdef void lru_move_back(rank_t* r, int32_t first, int32_t last) noexcept nogil:
    """Move neighbours of the list, in their order, to its end."""
    cdef host_entry_t* e = r.host_entries
    cdef host_t* t = r.host
    cdef int32_t before = e[first].prev
    cdef int32_t after = e[last].next
    if after == NO_SLOT:
        return
    e[after].prev = before
    if before == NO_SLOT:
        t.lru_head = after
    else:
        e[before].next = after
    e[first].prev = t.lru_tail
    e[t.lru_tail].next = first
    e[last].next = NO_SLOT
    t.lru_tail = last


cdef void touch_prompt(rank_t* r, int32_t slot, int64_t upto, int64_t own_first, int64_t own_end) noexcept nogil:
    """All prompt blocks of a request that are in the host become recent, the first one most.

    None from block `upto` on is there, and those from `own_first` to `own_end` are pending. Blocks of a prompt that
    were touched together mostly are neighbours in the list still, in the order of the walk: those are found without
    the index, and moved as one.
    """
    cdef const uint64_t* hashes = r.contents[slot].hashes
    cdef offload_t* o = &r.offloads[slot]
    cdef host_entry_t* e
    cdef int32_t recent[AHEAD]
    cdef int32_t first = NO_SLOT  # neighbours that are to move
    cdef int32_t last = NO_SLOT
    cdef int32_t row
    cdef int64_t count = 0
    cdef int64_t absent_from = own_end
    cdef int64_t i = upto - 1
    cdef int64_t epoch = r.host.epoch
    while i >= 0:
        if own_first <= i < own_end:
            i = own_first - 1
            continue
        row = NO_SLOT if last == NO_SLOT else r.host_entries[last].next
        if row != NO_SLOT and r.host_entries[row].hash == hashes[i]:
            # In the list: neither pending nor read.
            epoch += 1
            r.host_entries[row].epoch = epoch
            last = row
            i -= 1
            continue
        if i >= 16:
            entry_prefetch(r, hashes[i - 16])
        if i >= 8:
            entry_prefetch_row(r, hashes[i - 8])
        row = host_find(r, hashes[i])
        if row != NO_SLOT:
            absent_from = i + 1 if i >= absent_from else absent_from
            e = &r.host_entries[row]
            if e.transfer == NO_SLOT and e.pins == 0:
                epoch += 1
                e.epoch = epoch
                if count >= AHEAD:
                    r.host_entries[recent[count % AHEAD]].ahead = row
                recent[count % AHEAD] = row
                count += 1
                if first != NO_SLOT:
                    lru_move_back(r, first, last)
                first = row
                last = row
        i -= 1
    if first != NO_SLOT:
        lru_move_back(r, first, last)
    r.host.epoch = epoch
    o.looked = r.host.next_transfer
    o.absent_from = <int32_t>absent_from


# Cohorts are chained through `next`. Short ones are sorted in an array by the upper bits of their hashes, which nearly
# sorts them; long ones, and those whose hashes are alike, where they are.

cdef int32_t merge_chains(rank_t* r, int32_t a, int32_t b) noexcept nogil:
    cdef host_entry_t* e = r.host_entries
    cdef int32_t head = NO_SLOT
    cdef int32_t tail = NO_SLOT
    cdef int32_t least
    while a != NO_SLOT or b != NO_SLOT:
        if b == NO_SLOT or (a != NO_SLOT and e[a].hash < e[b].hash):
            least = a
            a = e[a].next
        else:
            least = b
            b = e[b].next
        if tail == NO_SLOT:
            head = least
        else:
            e[tail].next = least
        tail = least
    if tail != NO_SLOT:
        e[tail].next = NO_SLOT
    return head


cdef bint sort_beside(rank_t* r, int32_t* head) noexcept nogil:
    """Sort a chain of entries by hash; false if it is too long or its hashes are too much alike."""
    cdef uint64_t hashes[MOST_SORTED]
    cdef int32_t rows[MOST_SORTED]
    cdef uint64_t placed[MOST_SORTED]
    cdef int32_t at[MOST_SORTED]
    cdef int32_t starts[MOST_SORTED + 1]
    cdef int32_t row = head[0]
    cdef int64_t n = 0
    cdef int64_t buckets = 2
    cdef int shift = 63
    cdef int64_t i
    cdef int64_t k
    cdef uint64_t hash
    while row != NO_SLOT:
        if n == MOST_SORTED:
            return False
        hashes[n] = r.host_entries[row].hash
        rows[n] = row
        n += 1
        row = r.host_entries[row].next
    if n < 2:
        return True
    while buckets < n:
        buckets *= 2
        shift -= 1
    for k in range(buckets + 1):
        starts[k] = 0
    for i in range(n):
        starts[(hashes[i] >> shift) + 1] += 1
    for k in range(1, buckets + 1):
        if starts[k] > MOST_IN_BUCKET:
            return False
        starts[k] += starts[k - 1]
    for i in range(n):
        k = <int64_t>(hashes[i] >> shift)
        placed[starts[k]] = hashes[i]
        at[starts[k]] = rows[i]
        starts[k] += 1
    for i in range(1, n):
        hash = placed[i]
        row = at[i]
        k = i
        while k > 0 and placed[k - 1] > hash:
            placed[k] = placed[k - 1]
            at[k] = at[k - 1]
            k -= 1
        placed[k] = hash
        at[k] = row
    head[0] = at[0]
    for i in range(n - 1):
        r.host_entries[at[i]].next = at[i + 1]
        r.host_entries[at[i]].ahead = at[i + AHEAD] if i + AHEAD < n else NO_SLOT
    r.host_entries[at[n - 1]].next = NO_SLOT
    return True


cdef int32_t sort_chain(rank_t* r, int32_t head) noexcept nogil:
    """Sort a chain of entries by hash; chain k of `parts` is empty or holds 2**k of them."""
    cdef int32_t parts[32]
    cdef int32_t chain
    cdef int32_t after
    cdef int k
    if sort_beside(r, &head):
        return head
    for k in range(32):
        parts[k] = NO_SLOT
    while head != NO_SLOT:
        after = r.host_entries[head].next
        r.host_entries[head].next = NO_SLOT
        chain = head
        k = 0
        while parts[k] != NO_SLOT:
            chain = merge_chains(r, parts[k], chain)
            parts[k] = NO_SLOT
            k += 1
        parts[k] = chain
        head = after
    chain = NO_SLOT
    for k in range(32):
        chain = merge_chains(r, parts[k], chain)
    return chain


cdef void touch_cohort(rank_t* r, int32_t head) noexcept nogil:
    """A chain of entries that just became evictable enters the LRU list with one epoch."""
    cdef int32_t row = sort_chain(r, head)
    cdef int32_t after
    if row == NO_SLOT:
        return
    r.host.epoch += 1
    while row != NO_SLOT:
        after = r.host_entries[row].next
        r.host_entries[row].epoch = r.host.epoch
        lru_append(r, row)
        row = after


# ---------------------------------------------------------------- transfers

cdef int32_t transfer_open(rank_t* r, int32_t slot, int32_t kind, int64_t count) noexcept nogil:
    """A transfer of `count` blocks with a fresh id, in no list yet; its blocks are for the caller to fill."""
    cdef host_t* h = r.host
    cdef transfer_t* t
    cdef int64_t span = 1
    cdef int32_t span_class = 0
    cdef int32_t row
    if h.free_transfer != NO_SLOT:
        row = h.free_transfer
        h.free_transfer = r.transfers[row].next
    else:
        if unlikely(h.transfers_used == r.cap_transfers):
            r.grow(r, GROW_TRANSFERS, r.cap_transfers + 1)
            h = r.host
        row = <int32_t>h.transfers_used
        h.transfers_used += 1
    while span < count:
        span <<= 1
        span_class += 1
    if h.span_free[span_class] == NO_SLOT and h.blocks_used + span > r.cap_transfer_blocks:
        r.grow(r, GROW_TRANSFER_BLOCKS, h.blocks_used + span)
        h = r.host
    t = &r.transfers[row]
    if h.span_free[span_class] != NO_SLOT:
        t.first = h.span_free[span_class]
        h.span_free[span_class] = r.transfer_blocks[t.first].entry
    else:
        t.first = <int32_t>h.blocks_used
        h.blocks_used += span
    t.id = h.next_transfer
    t.deadline_ms = 0.0
    t.id_hi = r.requests[slot].id_hi
    t.id_lo = r.requests[slot].id_lo
    t.count = <int32_t>count
    t.kind = kind
    t.on_link = 0
    t.slot = slot
    t.span_class = span_class
    t.prev = NO_SLOT
    t.next = NO_SLOT
    h.next_transfer += 1
    r.header.num_transfers += 1
    return row


cdef void transfer_close(rank_t* r, int32_t row) noexcept nogil:
    """Give back the row of a transfer that is in no list."""
    cdef host_t* h = r.host
    cdef transfer_t* t = &r.transfers[row]
    r.transfer_blocks[t.first].entry = h.span_free[t.span_class]
    h.span_free[t.span_class] = t.first
    t.kind = NO_TRANSFER
    t.slot = NO_SLOT
    t.next = h.free_transfer
    h.free_transfer = row
    r.header.num_transfers -= 1


cdef void list_push(rank_t* r, int32_t* head, int32_t* tail, int32_t row) noexcept nogil:
    r.transfers[row].next = NO_SLOT
    r.transfers[row].prev = tail[0]
    if tail[0] == NO_SLOT:
        head[0] = row
    else:
        r.transfers[tail[0]].next = row
    tail[0] = row


cdef void list_remove(rank_t* r, int32_t* head, int32_t* tail, int32_t row) noexcept nogil:
    cdef transfer_t* t = &r.transfers[row]
    if t.prev == NO_SLOT:
        head[0] = t.next
    else:
        r.transfers[t.prev].next = t.next
    if t.next == NO_SLOT:
        tail[0] = t.prev
    else:
        r.transfers[t.next].prev = t.prev
    t.prev = NO_SLOT
    t.next = NO_SLOT


cdef inline double lane_end(const rank_t* r, double tail_ms, double from_ms, double rate, int64_t count) noexcept nogil:
    """When a transfer ends that is put behind all others of its lane."""
    cdef double start = tail_ms if tail_ms > from_ms else from_ms
    if rate == 0.0:
        return start
    return start + <double>(<uint64_t>count * r.config.block_bytes) / rate


# ---------------------------------------------------------------- stores

cdef void store_request(rank_t* r, int32_t slot, double now_ms) noexcept nogil:
    """Prepare a store of the prompt blocks of a running request that were completed since the last one."""
    cdef offload_t* o = &r.offloads[slot]
    cdef request_t* q = &r.requests[slot]
    cdef const content_t* content = &r.contents[slot]
    cdef const uint64_t* hashes = content.hashes
    cdef host_t* h = r.host
    cdef transfer_block_t* block
    cdef int64_t first = o.next_store
    cdef int64_t end = (q.computed if q.computed < q.num_input else q.num_input) // r.config.block_size
    cdef int64_t whole = prompt_blocks(r, slot)
    cdef int64_t missing = 0
    cdef int64_t held_back = 0
    cdef int64_t victims
    cdef int64_t looked_end
    cdef int64_t i
    cdef int32_t row
    cdef int32_t entry
    cdef int32_t after
    cdef bint all_missing
    cdef bint opened = False
    cdef bint fits
    if end > whole:
        end = whole
    if end <= first:
        return
    fits = end - first <= r.config.host_blocks
    if not fits and not r.want_offload:
        return
    h.cohort += fits
    for i in range(first, end):
        if i + 16 < end:
            entry_prefetch(r, hashes[i + 16])
        if i + 8 < end:
            entry_prefetch_row(r, hashes[i + 8])
        entry = host_find(r, hashes[i])
        if entry == NO_SLOT:
            # A copy whose slot is still read for its former content may not be read again.
            if r.sources[r.tables[q.table + i]] != NO_SLOT:
                return
            missing += 1
            continue
        if fits:
            r.host_entries[entry].cohort = h.cohort
        if r.host_entries[entry].transfer == NO_SLOT and r.host_entries[entry].pins == 0:
            held_back += 1
    if missing == 0:
        stored_up_to(r, slot, end)
        return
    victims = missing - (r.config.host_blocks - h.num_entries)
    if not fits or victims > h.num_evictable - held_back:
        if r.want_offload:
            observe(r, CAPACITY_RETRY, now_ms, q.id_hi, q.id_lo, -1)
            r.offload_events[r.host.num_events - 1].flags = 0 if fits else UNFITTABLE
            for i in range(first, end):
                if host_find(r, hashes[i]) == NO_SLOT:
                    observe_block(r, hashes[i], i)
        return
    entry = h.lru_head
    while victims > 0:
        after = r.host_entries[entry].next
        if r.host_entries[entry].ahead != NO_SLOT:
            prefetch(&r.host_entries[r.host_entries[entry].ahead])
        if after != NO_SLOT:
            entry_prefetch(r, r.host_entries[after].hash)
        if r.host_entries[entry].cohort != r.host.cohort:
            if r.config.emit_events:
                if not opened:
                    event_open(r, REMOVED, 0, 0)
                    r.events[r.header.num_events - 1].tier = HOST_PINNED
                    opened = True
                event_add(r, r.host_entries[entry].hash, 0, NO_SLOT, 0)
            if r.want_offload:
                observe(r, EVICTED, now_ms, r.requests[slot].id_hi, r.requests[slot].id_lo, -1)
                observe_block(r, r.host_entries[entry].hash, 0)
            entry_evict(r, entry)
            r.host.evicted_blocks += 1
            victims -= 1
        entry = after
    # Only stores bring blocks: without one in between, what was absent is.
    looked_end = whole if o.looked != h.next_transfer else o.absent_from
    all_missing = missing == end - first
    row = transfer_open(r, slot, STORE, missing)
    content = &r.contents[slot]
    missing = r.transfers[row].first
    for i in range(first, end):
        if not all_missing and host_find(r, hashes[i]) != NO_SLOT:
            continue
        entry = entry_open(r, hashes[i], row)
        block = &r.transfer_blocks[missing]
        missing += 1
        block.hash = hashes[i]
        block.tokens_hash = content.locals[i] if content.locals != NULL else 0
        block.parent_hash = hashes[i - 1] if i > 0 else 0
        block.entry = entry
        block.index = <int32_t>i
        block.block = r.tables[r.requests[slot].table + i]
        block.unused = 0
        r.sources[block.block] = row
    h = r.host
    list_push(r, &h.prepared_head, &h.prepared_tail, row)
    r.offloads[slot].latest_store = row
    stored_up_to(r, slot, end)
    observe_transfer(r, STORE_PREPARED, now_ms, row, False)
    observe_transfer(r, STORE_BLOCK_MAPPINGS, now_ms, row, False)
    if looked_end < end:
        looked_end = end
    if all_missing:
        touch_prompt(r, slot, looked_end, first, end)
    else:
        touch_prompt(r, slot, looked_end, 0, 0)


cdef void stored_up_to(rank_t* r, int32_t slot, int64_t end) noexcept nogil:
    """The host has, or was asked to take, the first `end` prompt blocks."""
    r.offloads[slot].next_store = <int32_t>end
    if end < prompt_blocks(r, slot):
        r.requests[slot].host |= UNSTORED
    else:
        r.requests[slot].host &= <unsigned char>~UNSTORED


cdef void host_observe(rank_t* r) noexcept nogil:
    """After scheduling: prepare stores for the requests of this pass, in running order."""
    cdef const request_t* q
    cdef int64_t i
    # Who coasts has nothing left to store.
    for i in range(r.coast.count, r.header.num_running):
        q = &r.requests[r.running[i]]
        if unlikely(q.host & UNSTORED) and q.stamp == r.header.passes:
            store_request(r, r.running[i], r.p.start_ms)


# ---------------------------------------------------------------- loads

cdef int host_lookup(rank_t* r, int32_t slot, int64_t base, int64_t* count) noexcept nogil:
    """Prompt blocks in the host behind the `base` that are on the device: how many, if they can be loaded now."""
    cdef const offload_t* o = &r.offloads[slot]
    cdef const uint64_t* hashes = r.contents[slot].hashes
    cdef int64_t whole
    cdef int64_t i
    cdef int32_t row
    cdef bint deferred = False
    count[0] = 0
    if o.load != NO_SLOT or (o.latest_store != NO_SLOT and o.device_blocks < 0):
        return LOOKUP_DEFERRED
    if o.device_blocks >= 0:
        return LOOKUP_MISS
    whole = prompt_blocks(r, slot)
    for i in range(base, whole):
        row = host_find(r, hashes[i])
        if row == NO_SLOT:
            break
        if r.host_entries[row].transfer != NO_SLOT or r.host_entries[row].pins > 0:
            deferred = True
        count[0] += 1
    touch_prompt(r, slot, whole, 0, 0)
    if count[0] == 0:
        return LOOKUP_MISS
    return LOOKUP_DEFERRED if deferred else LOOKUP_HIT


cdef int64_t host_headroom(const rank_t* r) noexcept nogil:
    """Blocks that prefills under way and loaded requests will need beyond those they own."""
    cdef const request_t* q
    cdef int64_t total = 0
    cdef int64_t i
    cdef int32_t slot
    # Who coasts owns what it needs.
    for i in range(r.coast.count, r.header.num_running):
        q = &r.requests[r.running[i]]
        total += blocks_of(r, q.length) - q.n_blocks
    slot = r.host.connector_head
    while slot != NO_SLOT:
        q = &r.requests[slot]
        if q.n_blocks > 0:
            total += blocks_of(r, q.length) - q.n_blocks
        slot = q.next
    return total


cdef bint host_load(rank_t* r, int32_t slot, int64_t base, int64_t count) noexcept nogil:
    """Take blocks for the prefix on the device and what is loaded behind it, and put the load on the link.

    False and nothing changed if the pool cannot give the blocks.
    """
    cdef const uint64_t* hashes = r.contents[slot].hashes
    cdef host_t* h
    cdef transfer_t* t
    cdef transfer_block_t* block
    cdef double from_ms = r.p.start_ms
    cdef int64_t i
    cdef int32_t row
    cdef int32_t entry
    cdef int32_t source
    if not lease_grow(r, slot, (base + count) * r.config.block_size, base):
        return False
    row = transfer_open(r, slot, LOAD, count)
    t = &r.transfers[row]
    for i in range(count):
        source = r.sources[r.tables[r.requests[slot].table + base + i]]
        if source != NO_SLOT and r.transfers[source].deadline_ms > from_ms:
            from_ms = r.transfers[source].deadline_ms
        entry = host_find(r, hashes[base + i])
        CHECK(r.host_entries[entry].transfer == NO_SLOT and r.host_entries[entry].pins == 0)
        lru_unlink(r, entry)
        r.host_entries[entry].pins = 1
        block = &r.transfer_blocks[t.first + i]
        block.hash = hashes[base + i]
        block.tokens_hash = 0
        block.parent_hash = 0
        block.entry = entry
        block.index = <int32_t>(base + i)
        block.block = NO_SLOT
        block.unused = 0
    h = r.host
    t.on_link = 1
    t.deadline_ms = lane_end(r, h.load_tail_ms, from_ms, r.config.load_rate, count)
    h.load_tail_ms = t.deadline_ms
    h.load_wait_ms += t.deadline_ms - r.p.start_ms
    list_push(r, &h.load_head, &h.load_tail, row)
    r.offloads[slot].load = row
    r.offloads[slot].device_blocks = <int32_t>base
    observe_transfer(r, LOAD_QUEUED, r.p.start_ms, row, True)
    host_sleep(r, slot)
    return True


cdef void host_sleep(rank_t* r, int32_t slot) noexcept nogil:
    """A waiting request does not look again before a transfer ends; its place in the connector queue is kept."""
    cdef request_t* q = &r.requests[slot]
    cdef host_t* t = r.host
    cdef header_t* h = r.header
    r.p.deferrals += 1
    if not q.host & CONNECTOR:
        queue_leave(r, slot)
        q.host |= CONNECTOR
        q.next = NO_SLOT
        q.prev = t.connector_tail
        if q.prev == NO_SLOT:
            t.connector_head = slot
        else:
            r.requests[q.prev].next = slot
        t.connector_tail = slot
        h.num_connector += 1
        waiting_count(r, q, 1)
        h.num_waiting -= 1
    r.offloads[slot].progress = t.progress
    h.num_asleep += 1


cdef void unpin(rank_t* r, const transfer_t* t) noexcept nogil:
    """A load reads its blocks no longer: those nobody else reads become recent, as a cohort."""
    cdef host_entry_t* e
    cdef int32_t chain = NO_SLOT
    cdef int64_t i
    for i in range(t.first, t.first + t.count):
        if i + 8 < t.first + t.count:
            prefetch(&r.host_entries[r.transfer_blocks[i + 8].entry])
        e = &r.host_entries[r.transfer_blocks[i].entry]
        CHECK(e.pins > 0)
        e.pins -= 1
        if e.pins == 0:
            e.next = chain
            chain = r.transfer_blocks[i].entry
    touch_cohort(r, chain)


cdef void cancel_load(rank_t* r, int32_t slot) noexcept nogil:
    """Take the load of a request off the link; the lane gets no shorter."""
    cdef host_t* h = r.host
    cdef int32_t row = r.offloads[slot].load
    list_remove(r, &h.load_head, &h.load_tail, row)
    unpin(r, &r.transfers[row])
    if r.transfers[row].deadline_ms > r.command_ms:
        h.load_wait_ms -= r.transfers[row].deadline_ms - r.command_ms
    observe_transfer(r, LOAD_CANCELLED, r.command_ms, row, False)
    transfer_close(r, row)
    r.offloads[slot].load = NO_SLOT
    connector_wake(r)


cdef void host_drop(rank_t* r, int32_t slot) noexcept nogil:
    """A request leaves the connector queue for good, with its load and what it has reserved."""
    connector_remove(r, slot)
    if r.offloads[slot].load != NO_SLOT:
        cancel_load(r, slot)
    if r.requests[slot].n_blocks > 0:
        lease_close(r, slot)
        r.header.capacity_generation += 1


# ---------------------------------------------------------------- what ends

cdef bint tick(rank_t* r, double now_ms) noexcept nogil:
    """Settle what is due, by (time, stores before loads, id); true if anything was."""
    cdef host_t* h = r.host
    cdef transfer_t* t
    cdef int32_t row
    cdef int32_t chain
    cdef int64_t i
    cdef bint any = False
    while host_deadline(r) <= now_ms:
        any = True
        h = r.host
        row = h.store_head
        if row == NO_SLOT or (h.load_head != NO_SLOT
                              and r.transfers[h.load_head].deadline_ms < r.transfers[row].deadline_ms):
            row = h.load_head
            t = &r.transfers[row]
            list_remove(r, &h.load_head, &h.load_tail, row)
            unpin(r, t)
            h.loaded_blocks += t.count
            observe_transfer(r, LOAD_COMPLETED, t.deadline_ms, row, False)
        else:
            t = &r.transfers[row]
            list_remove(r, &h.store_head, &h.store_tail, row)
            chain = NO_SLOT
            for i in range(t.first, t.first + t.count):
                if i + 8 < t.first + t.count:
                    prefetch(&r.host_entries[r.transfer_blocks[i + 8].entry])
                r.host_entries[r.transfer_blocks[i].entry].transfer = NO_SLOT
                r.host_entries[r.transfer_blocks[i].entry].next = chain
                chain = r.transfer_blocks[i].entry
            h.num_pending -= t.count
            h.stored_blocks += t.count
            touch_cohort(r, chain)
            observe_transfer(r, STORE_COMPLETED, t.deadline_ms, row, False)
        h = r.host
        list_push(r, &h.settled_head, &h.settled_tail, row)
    return any


cdef void show_store(rank_t* r, int32_t row) noexcept nogil:
    """The blocks of a settled store are free to be written again; the KV events of what the host has now."""
    cdef const transfer_t* t = &r.transfers[row]
    cdef transfer_block_t* block
    cdef int64_t i
    cdef int32_t before = -2
    if r.requests[t.slot].status != 0 and r.offloads[t.slot].latest_store == row:
        r.offloads[t.slot].latest_store = NO_SLOT
    for i in range(t.first, t.first + t.count):
        block = &r.transfer_blocks[i]
        CHECK(r.sources[block.block] == row)
        r.sources[block.block] = NO_SLOT
        if r.config.emit_events:
            if block.index != before + 1:
                event_open(r, STORED, block.parent_hash, HAS_PARENT if block.index > 0 else 0)
                block = &r.transfer_blocks[i]
                r.events[r.header.num_events - 1].tier = HOST_PINNED
                r.events[r.header.num_events - 1].start = block.index
            before = block.index
            event_add(r, block.hash, block.tokens_hash, NO_SLOT, block.index)
            t = &r.transfers[row]


cdef void show_load(rank_t* r, int32_t row) noexcept nogil:
    """The blocks of a settled load are findable on the device, and its request may be admitted."""
    cdef int32_t slot = r.transfers[row].slot
    cdef offload_t* o = &r.offloads[slot]
    cdef int64_t size = r.config.block_size
    cdef int64_t blocks = r.requests[slot].n_blocks
    CHECK(o.load == row and o.device_blocks + r.transfers[row].count == blocks)
    o.load = NO_SLOT
    lease_seal(r, slot, o.device_blocks * size, blocks * size)
    r.requests[slot].next_seal = <int32_t>size
    stored_up_to(r, slot, blocks)


cdef void show_settled(rank_t* r) noexcept nogil:
    """All stores that were settled, then all loads; everybody who waits for transfers looks again."""
    cdef host_t* h = r.host
    cdef int32_t row = h.settled_head
    cdef int32_t after
    if row == NO_SLOT:
        return
    while row != NO_SLOT:
        if r.transfers[row].kind == STORE:
            show_store(r, row)
        row = r.transfers[row].next
    row = r.host.settled_head
    while row != NO_SLOT:
        after = r.transfers[row].next
        if r.transfers[row].kind == LOAD:
            show_load(r, row)
        transfer_close(r, row)
        row = after
    r.host.settled_head = NO_SLOT
    r.host.settled_tail = NO_SLOT
    connector_wake(r)


cdef void host_work(rank_t* r, double now_ms) noexcept nogil:
    """Settle what is due while no pass is in flight."""
    tick(r, now_ms)
    show_settled(r)


cdef void host_boundary(rank_t* r, double end_ms) noexcept nogil:
    """A pass ends: what is due is settled, prepared stores go on the link, and what takes no time is settled, too."""
    cdef host_t* h
    cdef transfer_t* t
    cdef int32_t row
    tick(r, end_ms)
    h = r.host
    while h.prepared_head != NO_SLOT:
        row = h.prepared_head
        list_remove(r, &h.prepared_head, &h.prepared_tail, row)
        t = &r.transfers[row]
        t.on_link = 1
        t.deadline_ms = lane_end(r, h.store_tail_ms, end_ms, r.config.store_rate, t.count)
        h.store_tail_ms = t.deadline_ms
        list_push(r, &h.store_head, &h.store_tail, row)
        observe_transfer(r, STORE_SUBMITTED, end_ms, row, True)
        h = r.host
    tick(r, end_ms)
    show_settled(r)


# ---------------------------------------------------------------- what a pass asks

cdef void host_open(rank_t* r, int32_t slot) noexcept nogil:
    """The row of a new request."""
    cdef offload_t* o = &r.offloads[slot]
    o.progress = -1
    o.next_store = 0
    o.latest_store = NO_SLOT
    o.load = NO_SLOT
    o.device_blocks = -1
    o.looked = -1
    o.absent_from = 0
    stored_up_to(r, slot, 0)


cdef void host_begin(rank_t* r) noexcept nogil:
    r.p.connector = r.host.connector_head


cdef void host_fence(rank_t* r, int32_t slot, int64_t first) noexcept nogil:
    """Blocks from `first` on are new: the pass computes when their former content has been read."""
    cdef const request_t* q = &r.requests[slot]
    cdef int64_t i
    cdef int32_t source
    for i in range(first, q.n_blocks):
        source = r.sources[r.tables[q.table + i]]
        if unlikely(source != NO_SLOT) and r.transfers[source].deadline_ms > r.p.not_before_ms:
            r.p.not_before_ms = r.transfers[source].deadline_ms


cdef void host_preempted(rank_t* r, int32_t slot) noexcept nogil:
    """A request is about to lose its blocks: the pass waits for its newest store."""
    cdef int32_t row = r.offloads[slot].latest_store
    if row != NO_SLOT and r.transfers[row].on_link and r.transfers[row].deadline_ms > r.p.not_before_ms:
        r.p.not_before_ms = r.transfers[row].deadline_ms


cdef int64_t host_admitted(rank_t* r, int32_t slot) noexcept nogil:
    """Reused tokens that were on the device, of a first admission; -1 of a later one."""
    cdef const request_t* q = &r.requests[slot]
    cdef int64_t device = q.reused
    if r.offloads[slot].device_blocks >= 0:
        if r.offloads[slot].device_blocks * r.config.block_size < device:
            device = r.offloads[slot].device_blocks * r.config.block_size
        r.offloads[slot].device_blocks = -1
    if q.preemptions > 0:
        return -1
    r.host.device_hit_tokens += device
    r.host.lower_hit_tokens += q.reused - device
    return device


cdef void host_reset(rank_t* r) noexcept nogil:
    """An empty host."""
    cdef host_t* h = r.host
    cdef int k
    cdef int64_t i
    h.lru_head = NO_SLOT
    h.lru_tail = NO_SLOT
    h.free_entry = NO_SLOT
    h.free_transfer = NO_SLOT
    h.prepared_head = NO_SLOT
    h.prepared_tail = NO_SLOT
    h.store_head = NO_SLOT
    h.store_tail = NO_SLOT
    h.load_head = NO_SLOT
    h.load_tail = NO_SLOT
    h.settled_head = NO_SLOT
    h.settled_tail = NO_SLOT
    h.connector_head = NO_SLOT
    h.connector_tail = NO_SLOT
    for k in range(32):
        h.span_free[k] = NO_SLOT
    host_reindex(r)
    if r.config.host:
        for i in range(r.config.num_blocks):
            r.sources[i] = NO_SLOT
