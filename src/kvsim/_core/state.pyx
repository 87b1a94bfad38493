# The arena of one rank: who owns it, what lies where, and how Python looks at it.
#
# All state lives in one uint8 array. The struct arrays are sections of it,
# links are indices, and nothing in it depends on where it lies, so fork,
# snapshot, restore and digest are operations on bytes. Beside the arena stand
# what is read-only (request content, timing profile) and what lives for one
# pass (signals, admissions, pressure, scratch).
#
# A section that is full is enlarged by making a larger arena. Kernels may hold
# pointers into the smaller one while this happens, so it is kept until the
# next call from Python; they only read constants through such pointers.

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport abort
from libc.string cimport memcpy, memset

import numpy as np

from kvsim import layout
from kvsim.errors import CommandError, SnapshotError, TimingError
from kvsim._core.metrics cimport kvsim_variance, moments_variance
from kvsim._core.engine cimport (
    engine_activate, engine_active, engine_at, engine_boundary, engine_cancel, engine_cancel_destination,
    engine_cancel_source, engine_deadline, engine_drained, engine_emit, engine_empty, engine_events_shown,
    engine_fail_stuck, engine_internal_work, engine_land, engine_register_source, engine_release_source,
    engine_reserve, engine_reserve_error, engine_retry, engine_runnable, engine_schedule, engine_stuck, engine_submit,
    engine_sync, engine_unblock, engine_visible_events, engine_waiting,
)
from kvsim._core.host cimport host_find, host_reindex, host_reset
from kvsim._core.lease cimport lease_remembers
from kvsim._core.pool cimport pool_active
from kvsim._core.prefix cimport prefix_find
from kvsim._core.radix cimport (
    cursor_t, radix_evict, radix_insert, radix_lock, radix_match, radix_match_length, radix_reindex, radix_reset,
    radix_unlock,
)
from kvsim._core.requests cimport id_find, id_insert, waiting_link, waiting_remove
from kvsim._core.rng cimport rng_seed
from kvsim._core.signals cimport progressed
from kvsim._core.tiers cimport tier_find, tier_put, tiers_depend, tiers_make_room, tiers_reindex, tiers_reset, tiers_tick
from kvsim._core.timing cimport kvsim_modelled_ms
from kvsim._core.types cimport (
    DESTINATION_PENDING, G1_TO_G2, G2, G2_TO_G3, G2_TO_G4, G3, G3_TO_G2, G4, G4_TO_G2, GROW_EVENT_BLOCKS, GROW_EVENTS, GROW_HOST_ENTRIES, GROW_NODES,
    GROW_OFFLOAD_BLOCKS, GROW_OFFLOAD_EVENTS, GROW_PRESSURES, GROW_REQUESTS, GROW_RUNS, GROW_SIGNALS, GROW_TABLES, GROW_TIER_BLOCKS,
    GROW_TIER_ENTRIES, GROW_TIER_JOBS, GROW_TRANSFER_BLOCKS, GROW_TRANSFERS, NO_BLOCK, NO_ROLE, NO_SLOT, PASS_OK, RADIX, admission_t, block_t, config_t, content_t, copy_t,
    event_block_t, event_t, handoff_t, header_t, host_entry_t, host_t, lease_t, node_t, offload_block_t,
    offload_event_t, offload_t, origin_t, pressure_t, profile_t, radix_t, rank_t, request_t, run_t, signal_t,
    tier_block_t, tier_entry_t, tier_job_t, tiers_t, transfer_block_t, transfer_t,
)
from kvsim._core.xxh3 cimport xxh3_64

cnp.import_array()

#: Section name -> row dtype, in arena order.
_SECTIONS = {
    "config": layout.CONFIG,
    "header": layout.HEADER,
    "running": np.dtype("<i4"),
    "requests": layout.REQUEST,
    "handoffs": layout.HANDOFF,
    "ids": np.dtype("<i4"),
    "free_stack": np.dtype("<i4"),
    "inactive": np.dtype("<i4"),
    "blocks": layout.BLOCK,
    "copies": layout.COPY,
    "heads": np.dtype("<i4"),
    "tables": np.dtype("<i4"),
    "events": layout.EVENT,
    "event_blocks": layout.EVENT_BLOCK,
    "radix": layout.RADIX,
    "leases": layout.LEASE,
    "nodes": layout.NODE,
    "node_index": np.dtype("<i4"),
    "evict_heap": np.dtype("<i4"),
    "runs": layout.RUN,
    "host": layout.HOST,
    "host_entries": layout.HOST_ENTRY,
    "host_index": np.dtype("<u8"),
    "transfers": layout.TRANSFER,
    "transfer_blocks": layout.TRANSFER_BLOCK,
    "offloads": layout.OFFLOAD,
    "sources": np.dtype("<i4"),
    "offload_events": layout.OFFLOAD_EVENT,
    "offload_blocks": layout.OFFLOAD_BLOCK,
    "tiers": layout.TIERS,
    "tier_entries": layout.TIER_ENTRY,
    "tier_index": np.dtype("<i4"),
    "tier_jobs": layout.TIER_JOB,
    "tier_blocks": layout.TIER_BLOCK,
    "origins": layout.ORIGIN,
}

#: Sections that only the paged engines use, and only the radix engine: the others hold one row of them.
_PAGED_SECTIONS = ("free_stack", "inactive", "blocks", "copies", "heads", "tables")
_RADIX_SECTIONS = ("radix", "leases", "nodes", "node_index", "evict_heap", "runs")

#: Sections of the host tier; a rank without one holds one row of each.
_HOST_SECTIONS = (
    "host", "host_entries", "host_index", "transfers", "transfer_blocks", "offloads", "sources", "offload_events",
    "offload_blocks",
)

#: Sections of the KVBM tiers, which use `offloads` too.
_TIER_SECTIONS = ("tiers", "tier_entries", "tier_index", "tier_jobs", "tier_blocks", "origins")


cdef int64_t power_of_two(int64_t n) noexcept:
    cdef int64_t p = 1
    while p < n:
        p <<= 1
    return p


cdef void* address(object array) except? NULL:
    return cnp.PyArray_DATA(<cnp.ndarray>array)


# ---------------------------------------------------------------- callbacks, rare by design

cdef int grow_state(rank_t* r, int what, int64_t need) noexcept nogil:
    with gil:
        try:
            (<RankState>r.owner)._enlarge(what, need)
        except BaseException:
            # Out of memory inside a kernel: there is no consistent state to return to.
            abort()
    return 0


cdef int predict_by_model(
    rank_t* r, int kind, int64_t count, int64_t first, int64_t second, int64_t total, double* out
) noexcept nogil:
    with gil:
        return (<RankState>r.owner)._predict(kind, count, first, second, total, out)


cdef int32_t victim_by_policy(rank_t* r, int32_t slot) noexcept nogil:
    with gil:
        return (<RankState>r.owner)._ask_victim()


cdef int32_t admission_by_policy(rank_t* r, int32_t slot) noexcept nogil:
    with gil:
        return (<RankState>r.owner)._ask_admission(slot)


cdef int32_t order_by_policy(rank_t* r, int32_t slot) noexcept nogil:
    with gil:
        return (<RankState>r.owner)._ask_order()


cdef double score_by_policy(rank_t* r, int32_t slot) noexcept nogil:
    with gil:
        return (<RankState>r.owner)._ask_score(slot)


cdef class RankState:
    """The arena of one rank and the operations on it.

    Parameters
    ----------
    config : ndarray of layout.CONFIG, shape (1,)
        Constants; copied.
    seed : int
        Of the acceptance draws, 64 bits.
    policy : object, optional
        Asked for what `config` says must be asked.
    timing : object, optional
        Callable model, for timing CALLABLE.
    profile : dict of str to ndarray of float64, optional
        Arrays of an NPZ profile, for timing PROFILE.
    """

    def __cinit__(self):
        memset(&self.r, 0, sizeof(rank_t))
        self.r.owner = <void*>self
        self.r.grow = grow_state
        self.r.predict = predict_by_model
        self.r.ask_victim = victim_by_policy
        self.r.ask_admission = admission_by_policy
        self.r.ask_order = order_by_policy
        self.r.score = score_by_policy
        self.r.make_room = tiers_make_room
        self.r.deep = &self.r
        self._outgrown = []

    def __init__(self, config, seed, policy=None, timing=None, profile=None, int64_t requests=64):
        cdef int64_t blocks = config["num_blocks"][0]
        cdef bint radix = config["engine"][0] == RADIX
        self._policy = policy
        self._timing = timing
        self._set_profile(profile)
        requests = power_of_two(max(64, requests))
        # The spans of block tables are powers of two, and prefixes stand in several.
        sizes = {
            "config": 1, "header": 1, "running": requests, "requests": requests, "handoffs": requests,
            "ids": 2 * requests, "free_stack": blocks,
            "blocks": blocks, "copies": blocks if config["caching"][0] else 1,
            "heads": power_of_two(blocks) if config["caching"][0] else 1,
            "inactive": power_of_two(2 * blocks) if config["caching"][0] else 1,
            "tables": 4096 if requests == 64 else power_of_two(max(4096, 2 * blocks)), "events": 64 if config["emit_events"][0] else 1,
            "event_blocks": 256 if config["emit_events"][0] else 1,
            "radix": 1, "leases": requests, "nodes": requests, "node_index": 2 * requests, "evict_heap": requests,
            "runs": power_of_two(max(1024, min(blocks // 2, 1 << 20))),
        }
        for name in _PAGED_SECTIONS if radix else _RADIX_SECTIONS:
            sizes[name] = 1
        sizes.update(dict.fromkeys(_HOST_SECTIONS, 1))
        if config["host"][0]:
            entries = power_of_two(min(int(config["host_blocks"][0]), 1024))
            sizes.update({
                "host_entries": entries, "host_index": 2 * entries, "transfers": 64, "transfer_blocks": 1024,
                "offloads": requests, "sources": blocks, "offload_events": 64, "offload_blocks": 1024,
            })
        sizes.update(dict.fromkeys(_TIER_SECTIONS, 1))
        if config["tiers"][0]:
            entries = power_of_two(min(int(config["tier_blocks"][0][0]), 1024))
            sizes.update({
                "tier_entries": entries, "tier_index": 2 * entries, "tier_jobs": 64, "tier_blocks": 1024, "offloads": requests,
                "origins": blocks if config["emit_events"][0] else 1,
            })
        self.arena = np.zeros(self._plan(sizes), np.uint8)
        self._bind_arena()
        self._alloc_scratch(requests)
        memcpy(self.r.config, address(np.ascontiguousarray(config)), sizeof(config_t))
        self._alloc_wheel()
        self._reset(<uint64_t>seed)

    def _plan(self, sizes):
        """Offsets of all sections, 64-byte aligned; returns the size of the arena, bytes."""
        cdef int64_t at = 0
        offsets = {}
        for name, dtype in _SECTIONS.items():
            offsets[name] = (at, sizes[name])
            at += (sizes[name] * dtype.itemsize + 63) & ~63
        self._offsets = offsets
        return at

    cdef object _section(self, str name, object dtype, int64_t count):
        offset, size = self._offsets[name]
        return self.arena[offset:offset + count * dtype.itemsize].view(dtype)

    cdef void _bind_arena(self):
        cdef uint8_t* base = <uint8_t*>address(self.arena)
        cdef rank_t* r = &self.r
        o = self._offsets
        r.config = <config_t*>(base + <int64_t>o["config"][0])
        r.header = <header_t*>(base + <int64_t>o["header"][0])
        r.running = <int32_t*>(base + <int64_t>o["running"][0])
        r.requests = <request_t*>(base + <int64_t>o["requests"][0])
        r.handoffs = <handoff_t*>(base + <int64_t>o["handoffs"][0])
        r.ids = <int32_t*>(base + <int64_t>o["ids"][0])
        r.free_stack = <int32_t*>(base + <int64_t>o["free_stack"][0])
        r.inactive = <int32_t*>(base + <int64_t>o["inactive"][0])
        r.blocks = <block_t*>(base + <int64_t>o["blocks"][0])
        r.copies = <copy_t*>(base + <int64_t>o["copies"][0])
        r.heads = <int32_t*>(base + <int64_t>o["heads"][0])
        r.tables = <int32_t*>(base + <int64_t>o["tables"][0])
        r.events = <event_t*>(base + <int64_t>o["events"][0])
        r.event_blocks = <event_block_t*>(base + <int64_t>o["event_blocks"][0])
        r.radix = <radix_t*>(base + <int64_t>o["radix"][0])
        r.leases = <lease_t*>(base + <int64_t>o["leases"][0])
        r.nodes = <node_t*>(base + <int64_t>o["nodes"][0])
        r.node_index = <int32_t*>(base + <int64_t>o["node_index"][0])
        r.evict_heap = <int32_t*>(base + <int64_t>o["evict_heap"][0])
        r.runs = <run_t*>(base + <int64_t>o["runs"][0])
        r.host = <host_t*>(base + <int64_t>o["host"][0])
        r.host_entries = <host_entry_t*>(base + <int64_t>o["host_entries"][0])
        r.host_index = <uint64_t*>(base + <int64_t>o["host_index"][0])
        r.transfers = <transfer_t*>(base + <int64_t>o["transfers"][0])
        r.transfer_blocks = <transfer_block_t*>(base + <int64_t>o["transfer_blocks"][0])
        r.offloads = <offload_t*>(base + <int64_t>o["offloads"][0])
        r.sources = <int32_t*>(base + <int64_t>o["sources"][0])
        r.offload_events = <offload_event_t*>(base + <int64_t>o["offload_events"][0])
        r.offload_blocks = <offload_block_t*>(base + <int64_t>o["offload_blocks"][0])
        r.tiers = <tiers_t*>(base + <int64_t>o["tiers"][0])
        r.tier_entries = <tier_entry_t*>(base + <int64_t>o["tier_entries"][0])
        r.tier_index = <int32_t*>(base + <int64_t>o["tier_index"][0])
        r.tier_jobs = <tier_job_t*>(base + <int64_t>o["tier_jobs"][0])
        r.tier_blocks = <tier_block_t*>(base + <int64_t>o["tier_blocks"][0])
        r.origins = <origin_t*>(base + <int64_t>o["origins"][0])
        r.cap_tier_entries = o["tier_entries"][1]
        r.mask_tiers = <int64_t>o["tier_index"][1] - 1
        r.cap_tier_jobs = o["tier_jobs"][1]
        r.cap_tier_blocks = o["tier_blocks"][1]
        r.cap_host_entries = o["host_entries"][1]
        r.mask_host = <int64_t>o["host_index"][1] - 1
        r.cap_transfers = o["transfers"][1]
        r.cap_transfer_blocks = o["transfer_blocks"][1]
        r.cap_offload_events = o["offload_events"][1]
        r.cap_offload_blocks = o["offload_blocks"][1]
        r.cap_nodes = o["nodes"][1]
        r.mask_nodes = <int64_t>o["node_index"][1] - 1
        r.cap_runs = o["runs"][1]
        r.cap_requests = o["requests"][1]
        r.mask_ids = <int64_t>o["ids"][1] - 1
        r.cap_tables = o["tables"][1]
        r.mask_inactive = <int64_t>o["inactive"][1] - 1
        r.mask_heads = <int64_t>o["heads"][1] - 1
        r.cap_events = o["events"][1]
        r.cap_event_blocks = o["event_blocks"][1]

    cdef rank_t* bind(self) noexcept:
        return &self.r

    def _alloc_scratch(self, int64_t requests):
        """What lives beside the arena, for `requests` rows."""
        cdef rank_t* r = &self.r
        contents = np.zeros(requests * sizeof(content_t), np.uint8)
        if self._contents_memory is not None:
            contents[:len(self._contents_memory)] = self._contents_memory
        self._contents_memory = contents
        r.contents = <content_t*>address(contents)
        if self._contents is None:
            self._contents = []
        self._contents += [None] * (requests - len(self._contents))
        admissions = np.zeros(requests, layout.ADMISSION)
        if self._admissions is not None:
            admissions[:len(self._admissions)] = self._admissions
        self._admissions = admissions
        r.admissions = <admission_t*>address(admissions)
        # Lists of rows that live for one pass, and those of who coasts.
        lists = np.zeros((7, requests + 1), np.int32)
        if self._lists is not None:
            lists[:, :self._lists.shape[1]] = self._lists
        self._lists = lists
        r.ready = <int32_t*>address(lists)
        r.burst = r.ready + requests + 1
        r.terminal = r.burst + requests + 1
        r.retracted = r.terminal + requests + 1
        r.due = r.retracted + requests + 1
        r.since = r.due + requests + 1
        r.hits = r.since + requests + 1
        r.found_of = NO_SLOT
        if self._found is None:
            self._found = np.zeros(self._offsets["blocks"][1], np.int32)
            r.found = <int32_t*>address(self._found)
        if self._signals is None:
            self._signals = np.zeros(requests, layout.SIGNAL)
            self._pressures = np.zeros(16, layout.PRESSURE)
            r.signals = <signal_t*>address(self._signals)
            r.cap_signals = requests
            r.pressures = <pressure_t*>address(self._pressures)
            r.cap_pressures = 16

    def _alloc_wheel(self):
        """The wheel of coasting requests, which depends on the configuration alone."""
        if self.r.config.engine == RADIX:
            self._wheel = np.zeros(self.r.config.block_size, np.int32)
            self.r.wheel = <int32_t*>address(self._wheel)

    def _reset(self, uint64_t seed):
        cdef rank_t* r = &self.r
        cdef int64_t i
        cdef int64_t blocks = r.config.num_blocks
        for i in range(r.mask_ids + 1):
            r.ids[i] = NO_SLOT
        if r.config.engine == RADIX:
            radix_reset(r)
            blocks = 0
        # The top of the stack is handed out first: block 0.
        for i in range(blocks):
            r.free_stack[i] = <int32_t>(blocks - 1 - i)
            r.blocks[i].place = NO_BLOCK
            r.blocks[i].link = NO_BLOCK
            r.blocks[i].follow = NO_BLOCK
        r.header.num_free = blocks
        for i in range(r.mask_heads + 1 if r.config.engine != RADIX else 0):
            r.heads[i] = NO_BLOCK
        for i in range(r.mask_inactive + 1 if r.config.engine != RADIX else 0):
            r.inactive[i] = NO_BLOCK
        host_reset(r)
        tiers_reset(r)
        r.header.waiting_head = NO_SLOT
        r.header.waiting_tail = NO_SLOT
        r.header.free_request = NO_SLOT
        r.header.pending_head = NO_SLOT
        r.header.pending_tail = NO_SLOT
        r.header.prebuilt_head = NO_SLOT
        r.header.prebuilt_tail = NO_SLOT
        for i in range(32):
            r.header.table_free[i] = NO_BLOCK
        rng_seed(&r.header.rng, seed)

    cdef int _enlarge(self, int what, int64_t need) except -1:
        """Make room for at least `need` rows of a table, doubling it."""
        cdef rank_t* r = &self.r
        cdef int64_t i
        if what == GROW_SIGNALS:
            signals = np.zeros(power_of_two(need), layout.SIGNAL)
            signals[:len(self._signals)] = self._signals
            self._outgrown.append(self._signals)
            self._signals = signals
            r.signals = <signal_t*>address(signals)
            r.cap_signals = len(signals)
            return 0
        if what == GROW_PRESSURES:
            pressures = np.zeros(power_of_two(need), layout.PRESSURE)
            pressures[:len(self._pressures)] = self._pressures
            self._outgrown.append(self._pressures)
            self._pressures = pressures
            r.pressures = <pressure_t*>address(pressures)
            r.cap_pressures = len(pressures)
            return 0
        sizes = {name: size for name, (_, size) in self._offsets.items()}
        if what == GROW_REQUESTS:
            sizes["requests"] = sizes["handoffs"] = sizes["running"] = power_of_two(need)
            sizes["ids"] = 2 * sizes["requests"]
            if r.config.engine == RADIX:
                sizes["leases"] = sizes["requests"]
            if r.config.offload:
                sizes["offloads"] = sizes["requests"]
        elif what == GROW_NODES:
            sizes["nodes"] = sizes["evict_heap"] = power_of_two(need)
            sizes["node_index"] = 2 * sizes["nodes"]
        elif what == GROW_HOST_ENTRIES:
            sizes["host_entries"] = power_of_two(need)
            sizes["host_index"] = 2 * sizes["host_entries"]
        elif what == GROW_TIER_ENTRIES:
            sizes["tier_entries"] = power_of_two(need)
            sizes["tier_index"] = 2 * sizes["tier_entries"]
        else:
            sizes[{GROW_TABLES: "tables", GROW_EVENTS: "events", GROW_EVENT_BLOCKS: "event_blocks",
                   GROW_RUNS: "runs", GROW_TRANSFERS: "transfers", GROW_TRANSFER_BLOCKS: "transfer_blocks",
                   GROW_OFFLOAD_EVENTS: "offload_events", GROW_OFFLOAD_BLOCKS: "offload_blocks",
                   GROW_TIER_JOBS: "tier_jobs", GROW_TIER_BLOCKS: "tier_blocks"}[what]] = power_of_two(need)
        old, old_offsets, used = self.arena, self._offsets, self._rows()
        total = self._plan(sizes)
        self.arena = np.zeros(total, np.uint8)
        _copy_rows(old, old_offsets, self.arena, self._offsets, used)
        self._outgrown.append(old)
        self._bind_arena()
        if what == GROW_REQUESTS:
            self._outgrown.extend([self._lists, self._admissions, self._contents_memory])
            self._alloc_scratch(sizes["requests"])
            for i in range(r.mask_ids + 1):
                r.ids[i] = NO_SLOT
            for i in range(r.header.high_water):
                if r.requests[i].status != 0:
                    id_insert(r, <int32_t>i)
        elif what == GROW_NODES:
            radix_reindex(r)
        elif what == GROW_HOST_ENTRIES:
            host_reindex(r)
        elif what == GROW_TIER_ENTRIES:
            tiers_reindex(r)
        return 0

    def _set_profile(self, profile):
        cdef profile_t* p
        if profile is None:
            return
        memory = np.zeros(sizeof(profile_t), np.uint8)
        p = <profile_t*>address(memory)
        p.decode_kv = <const double*>address(profile["decode_active_kv_tokens"])
        p.decode_context = <const double*>address(profile["decode_context_length"])
        p.decode_itl = <const double*>address(profile["decode_itl"])
        p.num_kv = len(profile["decode_active_kv_tokens"])
        p.num_context = len(profile["decode_context_length"])
        if "prefill_batch_size" in profile:
            p.prefill_x = <const double*>address(profile["prefill_batch_size"])
            p.prefill_tokens = <const double*>address(profile["prefill_new_tokens_per_request"])
            p.prefill_read = <const double*>address(profile["prefill_kv_read_tokens_per_request"])
            p.prefill_time = <const double*>address(profile["prefill_time_ms"])
            p.num_x = len(profile["prefill_batch_size"])
            p.num_tokens = len(profile["prefill_new_tokens_per_request"])
            p.num_read = len(profile["prefill_kv_read_tokens_per_request"])
        else:
            p.prefill_x = <const double*>address(profile["prefill_isl"])
            p.prefill_time = <const double*>address(profile["prefill_ttft_ms"])
            p.num_x = len(profile["prefill_isl"])
        self._profile = (memory, profile)
        self.r.profile = p

    # ------------------------------------------------------------ asking Python

    cdef int _predict(self, int kind, int64_t count, int64_t first, int64_t second, int64_t total, double* out) noexcept:
        name = "decode" if kind else "prefill"
        try:
            if kind:
                value = self._timing.predict_decode_ms(count, first, second, total)
            else:
                value = self._timing.predict_prefill_ms(count, first, second)
        except BaseException as error:
            self.error = TimingError(f"external {name} prediction failed: {error}")
            self.error.__cause__ = error
            return -1
        try:
            out[0] = float(value)
        except (TypeError, ValueError):
            self.error = TimingError(f"external {name} prediction must be a number of milliseconds, got {value!r}")
            return -1
        if not (out[0] - out[0] == 0.0):
            self.error = TimingError(f"external {name} prediction returned a non-finite duration, got {value!r}")
            return -1
        if kind and out[0] < 0.0:
            self.error = TimingError(f"external {name} prediction returned a negative duration, got {value!r}")
            return -1
        return 0

    cdef int32_t _ask_victim(self) noexcept:
        try:
            order = self._policy.victims(self.running_rows())
            if order is None or len(order) == 0:
                return -1
            for position in order:
                index = int(position)
                if not 0 <= index < self.r.header.num_running:
                    raise IndexError(
                        f"victims() must return positions 0 <= i < {self.r.header.num_running} of its argument, got {index}")
                # With KVBM tiers: what waits for blocks on their way out is no victim.
                if not tiers_depend(&self.r, self.r.running[index]):
                    return self.r.running[index]
            return -1
        except BaseException as error:
            self.error = error
            return -2

    cdef int32_t _ask_admission(self, int32_t slot) noexcept:
        try:
            return 1 if self._policy.admit(self.request_row(slot), self.pool()) else 0
        except BaseException as error:
            self.error = error
            return -2

    cdef int32_t _ask_order(self) noexcept:
        try:
            slots, rows = self.waiting_rows()
            order = np.asarray(self._policy.order(rows), dtype=np.int64)
            if len(order) != len(slots) or not np.array_equal(np.sort(order), np.arange(len(slots))):
                raise ValueError(f"order() must return a permutation of 0..{len(slots) - 1}, got {order!r}")
            self.reorder(slots[order])
            return 0
        except BaseException as error:
            self.error = error
            return -2

    cdef double _ask_score(self, int32_t slot) noexcept:
        try:
            score = float(self._policy.score(self.request_row(slot)))
            if score != score:
                raise ValueError("score() must return a number that can be ordered, got nan")
            return score
        except BaseException as error:
            self.error = error
            return 0.0

    def take_error(self):
        """The exception a callback left behind, or None; forgotten afterwards."""
        error, self.error = self.error, None
        return error

    # ------------------------------------------------------------ commands

    def submit(self, uint64_t id_hi, uint64_t id_lo, int64_t num_input, int64_t max_output, content):
        """Queue a request.

        `content` is (hashes, locals or None, planned or None, anything to keep
        alive) for the paged engines, (runs, head, planned or None, anything)
        for the radix engine.
        """
        cdef content_t c
        cdef int32_t slot
        self._outgrown.clear()
        self._fill_content(&c, content)
        slot = engine_submit(&self.r, id_hi, id_lo, num_input, max_output, &c)
        self._contents[slot] = content
        return slot

    cdef int _fill_content(self, content_t* c, content) except -1:
        first, second, planned, _ = content
        memset(c, 0, sizeof(content_t))
        if self.r.config.engine == RADIX:
            c.runs = <const run_t*>address(first)
            c.num_runs = len(first)
            c.head = second
        else:
            c.hashes = <const uint64_t*>address(first)
            c.num_hashes = len(first)
            if second is not None:
                c.locals = <const uint64_t*>address(second)
        if planned is not None:
            c.planned = <const uint32_t*>address(planned)
        return 0

    def find(self, uint64_t id_hi, uint64_t id_lo):
        """Row of a live request, -1 if there is none of that id."""
        return id_find(&self.r, id_hi, id_lo)

    def cancel(self, int32_t slot):
        """Drop the request in row `slot`."""
        engine_cancel(&self.r, slot)
        self._contents[slot] = None

    # ------------------------------------------------------------ handoff

    def register_source(self, int32_t slot, uint64_t hi, uint64_t lo):
        """The request just submitted is the source of handoff (hi, lo): held when it completes."""
        engine_register_source(&self.r, slot, hi, lo)

    def release_source(self, int32_t slot):
        """A source need not be held, or no longer; true if its row is gone."""
        cdef bint gone = engine_release_source(&self.r, slot)
        if gone:
            self._contents[slot] = None
        return gone

    def cancel_source(self, int32_t slot):
        """Give up a source, registered or held."""
        engine_cancel_source(&self.r, slot)
        self._contents[slot] = None

    def reserve_error(self, int64_t num_input, int64_t max_output):
        """(FailReason value, blocks or tokens needed) of a destination that could never be reserved; reason 0: none."""
        cdef int64_t needed = 0
        cdef int reason = engine_reserve_error(&self.r, num_input, max_output, &needed)
        return reason, needed

    def reserve(
        self, uint64_t id_hi, uint64_t id_lo, int64_t num_input, int64_t max_output, content, uint64_t hi, uint64_t lo
    ):
        """Register the destination of handoff (hi, lo), which waits for capacity; returns its row. `content` as for `submit`."""
        cdef content_t c
        cdef int32_t slot
        self._outgrown.clear()
        self._fill_content(&c, content)
        slot = engine_reserve(&self.r, id_hi, id_lo, num_input, max_output, &c, hi, lo)
        self._contents[slot] = content
        return slot

    def retry(self):
        """Try to reserve for the first pending destination: its row, -1 if none was reserved."""
        if self.r.header.num_pending == 0:
            return NO_SLOT
        self._outgrown.clear()
        return engine_retry(&self.r)

    def activate(self, int32_t slot):
        """The prompt of a held destination has arrived."""
        self._outgrown.clear()
        engine_activate(&self.r, slot)

    def cancel_destination(self, int32_t slot):
        """Give up a destination, pending, held or active."""
        engine_cancel_destination(&self.r, slot)
        self._contents[slot] = None

    def find_handoff(self, uint64_t hi, uint64_t lo, bint destination):
        """Row of the source or destination half of a handoff, -1 if there is none. O(rows)."""
        cdef const handoff_t* half
        cdef int32_t slot
        for slot in range(<int32_t>self.r.header.high_water):
            half = &self.r.handoffs[slot]
            if (half.handoff_lo == lo and half.handoff_hi == hi and half.role != NO_ROLE
                    and (half.role >= DESTINATION_PENDING) == destination):
                return slot
        return NO_SLOT

    def role(self, int32_t slot):
        """`HandoffRole` value of a row."""
        return self.r.handoffs[slot].role

    def handoff(self, int32_t slot):
        """(handoff id, request id, prompt tokens, transferable tokens) of a half of a handoff; ids as (upper, lower)."""
        cdef const handoff_t* half = &self.r.handoffs[slot]
        cdef const request_t* q = &self.r.requests[slot]
        return (half.handoff_hi, half.handoff_lo), (q.id_hi, q.id_lo), q.num_input, half.transferable

    def empty(self):
        """Whether no request waits or runs."""
        return engine_empty(&self.r)

    def drained(self):
        """Whether there is no request, no half of a handoff and no transfer."""
        return engine_drained(&self.r)

    def runnable(self):
        """Whether a pass has a request to look at."""
        return engine_runnable(&self.r)

    # ------------------------------------------------------------ the host tier

    def at(self, double now_ms):
        """When the next command is applied, for the transfer it may cancel."""
        engine_at(&self.r, now_ms)

    def deadline(self):
        """When the next transfer ends, ms; infinity if none is on a link."""
        return engine_deadline(&self.r)

    def internal_work(self, double now_ms):
        """Settle transfers that are due; not while a pass is in flight."""
        self._outgrown.clear()
        engine_internal_work(&self.r, now_ms)

    def transport(self, double now_ms):
        """Let the transfers of the KVBM tiers go on to `now_ms`, also while a pass is in flight."""
        self._outgrown.clear()
        tiers_tick(&self.r, now_ms)

    def depends(self, int32_t slot):
        """Whether a request waits for an offload."""
        return bool(tiers_depend(&self.r, slot))

    def offload_deadline(self):
        """When the next offload from the device ends, ms; infinity if none is on the link."""
        return self.r.tiers.link_next_ms[G1_TO_G2]

    def tier_find(self, int32_t tier, uint64_t block_hash):
        """Row of a block in `tier_entries`, of its own G2 or of the G3 and G4 it uses, -1 if it is not in that tier."""
        return tier_find(&self.r if tier == G2 else self.r.deep, tier, block_hash)

    def deep(self):
        """The state whose tables hold G3, G4 and their links: this one, unless it shares them."""
        return <RankState>self.r.deep.owner

    def tiers_below(self):
        """Field names and values that ranks must agree in to share G3 and G4; None without these tiers."""
        cdef const config_t* c = self.r.config
        if not c.tiers or (c.tier_blocks[G3] == 0 and c.tier_blocks[G4] == 0):
            return None
        return {
            "block_size": c.block_size,
            "kv_cache_bytes_per_token": c.block_bytes // <uint64_t>c.block_size,
            "kvbm_tiers.num_g3_blocks": c.tier_blocks[G3],
            "kvbm_tiers.g4_storage": c.tier_blocks[G4] != 0,
            # Rates are per millisecond.
            "kvbm_tiers.g2_to_g3_gbps": c.link_rates[G2_TO_G3] / 1e6,
            "kvbm_tiers.g3_to_g2_gbps": c.link_rates[G3_TO_G2] / 1e6,
            "kvbm_tiers.g2_to_g4_gbps": c.link_rates[G2_TO_G4] / 1e6,
            "kvbm_tiers.g4_to_g2_gbps": c.link_rates[G4_TO_G2] / 1e6,
        }

    def is_untouched_below(self):
        """Whether nothing lies in its own G3 and G4, and nothing moves."""
        cdef const tiers_t* t = self.r.tiers
        return self.r.header.num_transfers == 0 and t.num_entries[G3] + t.num_entries[G4] == 0

    def make_owner(self):
        """A state that runs nothing, for `share_tiers` of this rank and of others that have the same below G2."""
        config = self.view("config").copy()
        config["num_blocks"] = 1
        config["emit_events"] = 0
        return RankState(config, 0)

    def share_tiers(self, RankState owner):
        """Use G3, G4 and their links of `owner` from now on, as others do; its own must be untouched."""
        cdef int64_t number = owner.r.num_sharers
        if owner._sharers is None:
            owner._sharers = []
        if number == len(owner._sharers):
            memory = np.zeros(max(4, 2 * number), np.uintp)
            memory[:number] = owner._sharer_memory if number else 0
            owner._sharer_memory = memory
            owner._sharers += [None] * (len(memory) - number)
            owner.r.sharers = <rank_t**>address(memory)
        owner._sharers[number] = self
        owner.r.sharers[number] = &self.r
        owner.r.num_sharers = number + 1
        self._lower = owner
        self.r.deep = &owner.r
        self.r.sharer = <int32_t>number

    def leave_tiers(self):
        """Share no longer; what it brought there stays. No transfer may be under way."""
        cdef RankState owner = self._lower
        if owner is None:
            return
        owner._sharers[self.r.sharer] = None
        owner.r.sharers[self.r.sharer] = NULL
        self.r.deep = &self.r
        self.r.sharer = 0
        self._lower = None

    def _check_private(self, what):
        if self._lower is not None:
            raise SnapshotError(f"a rank that shares G3 or G4 with the workers of its run cannot be {what} alone")

    @property
    def sharer(self):
        """Number of this rank among those that share G3 and G4."""
        return self.r.sharer

    def tier_put(self, int32_t tier, block_hashes):
        """Blocks appear in a tier, oldest first, for tests and benchmarks."""
        cdef uint64_t block_hash
        self._outgrown.clear()
        for block_hash in block_hashes:
            tier_put(&self.r if tier == G2 else self.r.deep, tier, block_hash)

    def parked_slots(self):
        """Row numbers of the parked requests, in order of parking."""
        cdef int32_t slot = self.r.tiers.parked_head
        slots = []
        while slot != NO_SLOT:
            slots.append(slot)
            slot = self.r.requests[slot].next
        return np.array(slots, np.int64)

    def boundary(self, double end_ms):
        """A pass ends: settle what is due, put prepared stores on the link."""
        self._outgrown.clear()
        engine_boundary(&self.r, end_ms)

    @property
    def observed(self):
        """Whether observations of transfers are kept for `drain_offload`."""
        return bool(self.r.want_offload)

    @observed.setter
    def observed(self, bint value):
        self.r.want_offload = value

    def drain_offload(self):
        """Observations since the last drain: (events, blocks) struct arrays, copies."""
        cdef host_t* h = self.r.host
        events = self._section("offload_events", layout.OFFLOAD_EVENT, h.num_events).copy()
        blocks = self._section("offload_blocks", layout.OFFLOAD_BLOCK, h.num_event_blocks).copy()
        memset(self.r.offload_events, 0, <size_t>h.num_events * sizeof(offload_event_t))
        memset(self.r.offload_blocks, 0, <size_t>h.num_event_blocks * sizeof(offload_block_t))
        h.num_events = 0
        h.num_event_blocks = 0
        return events, blocks

    def host_find(self, uint64_t block_hash):
        """Row of a block in `host_entries`, -1 if it is not in the host."""
        return host_find(&self.r, block_hash)

    def reorder(self, slots):
        """Put the waiting requests in the order of `slots`, which must name each of them once."""
        cdef int32_t slot
        for slot in slots:
            waiting_remove(&self.r, slot)
            waiting_link(&self.r, slot, NO_SLOT)

    # ------------------------------------------------------------ the pass

    def execute(self, double now_ms):
        """One whole pass; returns its end, ms. Raises what a callback raised."""
        cdef rank_t* r = &self.r
        cdef int status
        self._outgrown.clear()
        cdef int32_t wanted = r.coast.wanted
        r.want_signals = 1
        r.coast.wanted = 0
        engine_land(r)
        with nogil:
            status = engine_schedule(r, now_ms)
            if status == PASS_OK:
                engine_emit(r)
        r.coast.wanted = wanted
        if self.error is not None:
            raise self.take_error()
        return r.p.end_ms

    def progressed(self):
        """Whether the last pass did anything."""
        return progressed(&self.r)

    def stuck(self):
        """(row, FailReason value, blocks or tokens needed) of a request that can never progress; reason 0: none."""
        cdef int64_t needed = 0
        cdef int32_t slot = NO_SLOT
        cdef int reason = engine_stuck(&self.r, &slot, &needed)
        return slot, reason, needed

    def fail_stuck(self):
        """End a stuck request; its signal is what `signals` returns next. Returns the reason."""
        return engine_fail_stuck(&self.r)

    def unblock(self):
        """Let a transferred prompt pass a head that waits for its blocks; false if that is not what blocks the rank."""
        return bool(engine_unblock(&self.r))

    def retries(self):
        """`retry_kind` of the last pass of the radix engine; None where there are no hints."""
        if self.r.config.engine != RADIX or (self.r.config.legacy and self.r.radix.retry == 0):
            return None
        return self.r.radix.retry

    def cache_counters(self):
        """Prompt tokens that the last pass found in the cache, and looked up (radix engine)."""
        if self.r.config.engine != RADIX:
            return 0, 0
        return self.r.radix.hit_tokens, self.r.radix.total_tokens

    def signals(self):
        """Copy of the output signals of the last pass."""
        return self._signals[:self.r.num_signals].copy()

    def admissions(self):
        """Copy of the admissions of the last pass."""
        return self._admissions[:self.r.num_admissions].copy()

    def pressures(self):
        """Copy of the preemptions of the last pass."""
        return self._pressures[:self.r.num_pressures].copy()

    def release_contents(self, slots):
        """Forget the content of requests that ended."""
        for slot in slots:
            if self.r.requests[<int32_t>slot].status == 0:
                self._contents[slot] = None

    def content(self, slot):
        """What `submit` was given for the request in `slot`, or None."""
        return self._contents[slot]

    def content_runs(self, int32_t slot):
        """Page runs of a live request of the radix engine: a copy, layout.RUN."""
        cdef const content_t* content = &self.r.contents[slot]
        runs = np.empty(content.num_runs, layout.RUN)
        if content.num_runs > 0:
            memcpy(address(runs), content.runs, <size_t>content.num_runs * sizeof(run_t))
        return runs

    def content_hashes(self, int32_t slot):
        """Block hashes of a live request of the paged engines: a copy."""
        cdef const content_t* content = &self.r.contents[slot]
        hashes = np.empty(content.num_hashes, np.uint64)
        if content.num_hashes > 0:
            memcpy(address(hashes), content.hashes, <size_t>content.num_hashes * sizeof(uint64_t))
        return hashes

    def inactive_blocks(self):
        """Ids of the inactive blocks, the next victim first."""
        cdef header_t* h = self.r.header
        cdef int64_t at
        return np.array([
            self.r.inactive[at & self.r.mask_inactive] for at in range(h.inactive_head, h.inactive_tail)
            if self.r.inactive[at & self.r.mask_inactive] != NO_BLOCK
        ], np.int32)

    def lookup(self, int32_t slot):
        """Leading blocks of a live request that are findable, in the order of its prompt."""
        cdef int64_t i
        cdef int32_t b = NO_BLOCK
        found = []
        for i in range(self.r.requests[slot].hashed):
            b = prefix_find(&self.r, b, self.r.contents[slot].hashes[i])
            if b == NO_BLOCK:
                break
            found.append(b)
        return np.array(found, np.int32)

    def remembered(self, int32_t slot):
        """(blocks, how many are in use) that the next lookup of a live request would not look up again."""
        cdef int64_t i
        if not lease_remembers(&self.r, slot):
            return np.empty(0, np.int32), 0
        return np.array([self.r.found[i] for i in range(self.r.num_found)], np.int32), self.r.found_active

    @property
    def num_signals(self):
        return self.r.num_signals

    @property
    def num_admissions(self):
        return self.r.num_admissions

    @property
    def num_pressures(self):
        return self.r.num_pressures

    @property
    def num_events(self):
        return engine_visible_events(&self.r)

    @property
    def completed(self):
        """Requests that ended in the last pass."""
        return self.r.p.completed

    @property
    def grouped(self):
        """Whether the rank has siblings, so that its driver does what depends on all of them."""
        return bool(self.r.grouped)

    @grouped.setter
    def grouped(self, bint value):
        self.r.grouped = value

    @property
    def acceptance(self):
        """(non-rejected signals, distinct requests among them) of the last pass."""
        return (self.r.p.visible, self.r.p.visible_requests)

    def drain_events(self):
        """KV events since the last drain: (events, blocks) struct arrays, copies."""
        cdef header_t* h = self.r.header
        events = self._section("events", layout.EVENT, h.num_events).copy()
        blocks = self._section("event_blocks", layout.EVENT_BLOCK, h.num_event_blocks).copy()
        # Drained rows are cleared so that the bytes of two equal states are equal.
        memset(self.r.events, 0, <size_t>h.num_events * sizeof(event_t))
        memset(self.r.event_blocks, 0, <size_t>h.num_event_blocks * sizeof(event_block_t))
        h.num_events = 0
        h.num_event_blocks = 0
        engine_events_shown(&self.r)
        return events, blocks

    def metrics(self):
        """Occupancy: (active, inactive, total, running, waiting, preemptions)."""
        cdef header_t* h = self.r.header
        return (engine_active(&self.r), h.num_inactive, self.r.config.num_blocks, h.num_running,
                engine_waiting(&self.r), h.preemptions_total)

    def fpm(self):
        """Forward-pass metrics of the last pass without its duration, in contract order."""
        cdef rank_t* r = &self.r
        cdef header_t* h = r.header
        cdef int64_t count = h.requeued_count + h.num_pending + h.num_held_destinations
        cdef int64_t sum = h.requeued_sum + h.expected_sum
        return (
            r.p.prefill.count, r.p.prefill_tokens, moments_variance(&r.p.prefill), r.p.prefill_kv_tokens,
            r.p.decode.count, r.p.decode.sum, moments_variance(&r.p.decode),
            h.queued_count, h.queued_sum, kvsim_variance(h.queued_count, h.queued_sum, h.queued_squares),
            count, sum, kvsim_variance(count, sum, h.requeued_squares + h.expected_squares),
        )

    # ------------------------------------------------------------ looking in

    def _used(self):
        """Rows in use of each section, for whoever looks from outside: those of who coasts are written first."""
        engine_sync(&self.r)
        return self._rows()

    def _rows(self):
        """Rows in use of each section; what lies beyond them means nothing."""
        cdef header_t* h = self.r.header
        used = {
            "config": 1, "header": 1, "running": h.num_running, "requests": h.high_water,
            "handoffs": h.high_water, "ids": self.r.mask_ids + 1, "free_stack": h.num_free, "blocks": self.r.config.num_blocks,
            "copies": self.r.config.num_blocks if self.r.config.caching else 1, "heads": self.r.mask_heads + 1,
            "inactive": self.r.mask_inactive + 1,
            "tables": h.table_used, "events": h.num_events, "event_blocks": h.num_event_blocks,
            "radix": 0, "leases": 0, "nodes": 0, "runs": 0, "node_index": 0, "evict_heap": 0,
        }
        used.update(dict.fromkeys(_HOST_SECTIONS, 0))
        used["host"] = 1
        if self.r.config.host:
            used.update({
                "host_entries": self.r.host.entries_used, "host_index": self.r.mask_host + 1,
                "transfers": self.r.host.transfers_used, "transfer_blocks": self.r.host.blocks_used,
                "offloads": h.high_water, "sources": self.r.config.num_blocks,
                "offload_events": self.r.host.num_events, "offload_blocks": self.r.host.num_event_blocks,
            })
        used.update(dict.fromkeys(_TIER_SECTIONS, 0))
        used["tiers"] = 1
        if self.r.config.tiers:
            used.update({
                "offloads": h.high_water, "tier_entries": self.r.tiers.entries_used, "tier_index": self.r.mask_tiers + 1,
                "tier_jobs": self.r.tiers.jobs_used, "tier_blocks": self.r.tiers.blocks_used,
                "origins": self.r.config.num_blocks if self.r.config.emit_events else 0,
            })
        if self.r.config.engine == RADIX:
            used.update({
                "radix": 1, "leases": h.high_water, "nodes": self.r.radix.num_nodes, "runs": self.r.radix.runs_used,
                "node_index": self.r.mask_nodes + 1, "evict_heap": self.r.radix.heap_size, "free_stack": 0, "blocks": 0,
                "inactive": 0, "copies": 0, "heads": 0, "tables": 0,
            })
        return used

    def view(self, name, writable=False):
        """Rows in use of one section, no copy. Read-only unless a test asks otherwise."""
        used = self._used()
        array = self._section(name, _SECTIONS[name], used[name])
        array.flags.writeable = writable
        return array

    def request_row(self, int32_t slot):
        """Copy of one request row."""
        return self.view("requests")[slot].copy()

    def running_rows(self):
        """Copies of the running rows in running order."""
        return self.view("requests")[self.view("running")]

    def waiting_slots(self):
        """Row numbers of the waiting requests in queue order."""
        cdef int32_t slot = self.r.header.waiting_head
        cdef int64_t i
        slots = np.empty(self.r.header.num_waiting, np.int64)
        for i in range(self.r.header.num_waiting):
            slots[i] = slot
            slot = self.r.requests[slot].next
        return slots

    def connector_slots(self):
        """Row numbers of the requests that wait for transfers, in the order of their queue."""
        cdef int32_t slot = self.r.host.connector_head if self.r.config.host else NO_SLOT
        slots = []
        while slot != NO_SLOT:
            slots.append(slot)
            slot = self.r.requests[slot].next
        return np.array(slots, np.int64)

    def waiting_rows(self):
        """(row numbers, copies of the rows) of the waiting requests in queue order."""
        slots = self.waiting_slots()
        return slots, self.view("requests")[slots]

    def pool(self):
        """(active, inactive, free, total) blocks."""
        cdef header_t* h = self.r.header
        if self.r.config.engine == RADIX:
            return (self.r.config.num_blocks - self.r.radix.available - self.r.radix.evictable,
                    self.r.radix.evictable, self.r.radix.available, self.r.config.num_blocks)
        return (pool_active(&self.r), h.num_inactive, h.num_free, self.r.config.num_blocks)

    # ------------------------------------------------------------ the radix tree, for tests and benchmarks

    def tree_match(self, runs, int64_t pages, bint lock=False):
        """Longest prefix of `runs` (layout.RUN), at most `pages` pages: (pages matched, node)."""
        cdef cursor_t at
        cdef int32_t node = 0
        self._outgrown.clear()
        at.run = <const run_t*>address(runs)
        at.offset = 0
        matched = radix_match(&self.r, at, pages, &node)
        if lock:
            radix_lock(&self.r, node)
        return matched, node

    def tree_match_length(self, runs, int64_t pages):
        """As `tree_match`, changing nothing: pages matched."""
        cdef cursor_t at
        at.run = <const run_t*>address(runs)
        at.offset = 0
        return radix_match_length(&self.r, at, pages)

    def tree_insert(self, int32_t node, runs, int64_t pages):
        """Put `pages` pages below a node, taking those that are new from the pool: (pages found there, last node)."""
        cdef cursor_t at
        cdef int64_t found = 0
        self._outgrown.clear()
        at.run = <const run_t*>address(runs)
        at.offset = 0
        if pages > self.r.radix.available:
            raise CommandError(f"pages: the pool has {self.r.radix.available} free, got {pages}")
        last = radix_insert(&self.r, node, at, pages, at.run + len(runs), &found)
        self.r.radix.available -= pages - found
        return found, last

    def tree_lock(self, int32_t node):
        """Protect a node and what is above it."""
        radix_lock(&self.r, node)

    def tree_unlock(self, int32_t node):
        """Undo one `tree_lock`."""
        radix_unlock(&self.r, node)

    def tree_evict(self, int64_t pages):
        """Free at least `pages` pages of unlocked leaves; returns how many."""
        return radix_evict(&self.r, pages)

    # ------------------------------------------------------------ whole state

    def fork(self):
        """An independent copy; request content is shared, it is read-only."""
        self._check_private("forked")
        cdef RankState other = RankState.__new__(RankState)
        other._policy = self._policy
        other._timing = self._timing
        other._profile = self._profile
        other.r.profile = self.r.profile
        other.r.grouped = self.r.grouped
        other.r.want_offload = self.r.want_offload
        other._offsets = self._offsets
        # Zeroed: the ends of spans are never written, and the digest covers whole spans.
        other.arena = np.zeros(len(self.arena), np.uint8)
        _copy_rows(self.arena, self._offsets, other.arena, self._offsets, self._used())
        other._bind_arena()
        other._contents_memory = self._contents_memory
        other._contents = list(self._contents)
        other._alloc_scratch(self._offsets["requests"][1])
        other._alloc_wheel()
        return other

    def save(self):
        """(arena bytes, section sizes, contents): enough for `load`."""
        self._check_private("saved")
        arena = np.zeros(len(self.arena), np.uint8)
        _copy_rows(self.arena, self._offsets, arena, self._offsets, self._used())
        return arena, {name: size for name, (_, size) in self._offsets.items()}, list(self._contents)

    def load(self, arena, sizes, contents):
        """Become the state that `save` returned."""
        cdef int64_t i
        self._check_private("restored")
        if set(sizes) != set(_SECTIONS):
            raise SnapshotError("the snapshot has other tables than this version of kvsim")
        old = self._offsets
        total = self._plan(sizes)
        if total != len(arena):
            self._offsets = old
            raise SnapshotError(f"the snapshot holds {len(arena)} bytes where its tables need {total}")
        config = arena[:layout.CONFIG.itemsize].tobytes()
        if config != self.view("config").tobytes():
            self._offsets = old
            raise SnapshotError("the snapshot was taken under another configuration")
        engine_land(&self.r)
        self.arena = np.array(arena, np.uint8, copy=True)
        self._bind_arena()
        self._contents = list(contents)
        self._contents_memory = None
        self._admissions = None
        self._lists = None
        self._alloc_scratch(sizes["requests"])
        for i, content in enumerate(self._contents):
            if content is None:
                continue
            self._fill_content(&self.r.contents[i], content)

    def digest(self):
        """64-bit hash of the state in use; equal states have equal digests, whatever their capacities."""
        cdef uint64_t h = 0
        names = ["config", "header", "running", "requests", "handoffs", "events", "event_blocks"]
        if self.r.config.engine == RADIX:
            names += ["radix", "leases", "nodes", "evict_heap", "runs"]
        else:
            names += ["free_stack", "inactive", "blocks", "tables"] + (["copies", "heads"] if self.r.config.caching else [])
        if self.r.config.host:
            names += [name for name in _HOST_SECTIONS if name != "host_index"]
        if self.r.config.tiers:
            names += ["offloads"] + [name for name in _TIER_SECTIONS if name != "tier_index"]
        for name in names:
            data = self.view(name).view(np.uint8)
            if len(data):
                h = xxh3_64(<const uint8_t*>address(data), len(data), h)
        return h


def _copy_rows(source, source_offsets, target, target_offsets, used):
    """Copy the rows in use of every section from one arena to another."""
    for name, dtype in _SECTIONS.items():
        count = used[name] * dtype.itemsize
        if not count:
            continue
        start, where = source_offsets[name][0], target_offsets[name][0]
        target[where:where + count] = source[start:start + count]


# ---------------------------------------------------------------- layout self-check

def check_layout():
    """Compare each C struct with the dtype of kvsim.layout: size, and every field by reading a patterned row.

    Raises
    ------
    ImportError
        If they differ: the extension was built for another version.
    """
    cdef config_t config
    cdef header_t header
    cdef request_t request
    cdef handoff_t handoff
    cdef block_t block
    cdef copy_t copy
    cdef event_t event
    cdef event_block_t event_block
    cdef signal_t signal
    cdef admission_t admission
    cdef pressure_t pressure
    cdef radix_t radix
    cdef lease_t lease
    cdef node_t node
    cdef run_t run
    cdef host_t host
    cdef host_entry_t host_entry
    cdef transfer_t transfer
    cdef transfer_block_t transfer_block
    cdef offload_t offload
    cdef offload_event_t offload_event
    cdef offload_block_t offload_block
    cdef tiers_t tiers
    cdef tier_entry_t tier_entry
    cdef tier_job_t tier_job
    cdef tier_block_t tier_block
    cdef origin_t origin
    sizes = {
        "CONFIG": sizeof(config_t), "HEADER": sizeof(header_t), "REQUEST": sizeof(request_t),
        "HANDOFF": sizeof(handoff_t), "BLOCK": sizeof(block_t), "COPY": sizeof(copy_t), "EVENT": sizeof(event_t), "EVENT_BLOCK": sizeof(event_block_t),
        "SIGNAL": sizeof(signal_t), "ADMISSION": sizeof(admission_t), "PRESSURE": sizeof(pressure_t),
        "RADIX": sizeof(radix_t), "LEASE": sizeof(lease_t), "NODE": sizeof(node_t), "RUN": sizeof(run_t),
        "HOST": sizeof(host_t), "HOST_ENTRY": sizeof(host_entry_t), "TRANSFER": sizeof(transfer_t),
        "TRANSFER_BLOCK": sizeof(transfer_block_t), "OFFLOAD": sizeof(offload_t),
        "OFFLOAD_EVENT": sizeof(offload_event_t), "OFFLOAD_BLOCK": sizeof(offload_block_t),
        "TIERS": sizeof(tiers_t), "TIER_ENTRY": sizeof(tier_entry_t), "TIER_JOB": sizeof(tier_job_t),
        "TIER_BLOCK": sizeof(tier_block_t), "ORIGIN": sizeof(origin_t),
    }
    for name, size in sizes.items():
        dtype = getattr(layout, name)
        if dtype.itemsize != size:
            raise ImportError(f"kvsim.layout.{name} has {dtype.itemsize} bytes, the compiled struct {size}")
        row = ((np.arange(size) * 37 + 11) % 61 + 1).astype(np.uint8)
        data = address(row)
        if name == "CONFIG":
            memcpy(&config, data, size)
            fields = config
        elif name == "HEADER":
            memcpy(&header, data, size)
            fields = header
        elif name == "REQUEST":
            memcpy(&request, data, size)
            fields = request
        elif name == "HANDOFF":
            memcpy(&handoff, data, size)
            fields = handoff
        elif name == "BLOCK":
            memcpy(&block, data, size)
            fields = block
        elif name == "COPY":
            memcpy(&copy, data, size)
            fields = copy
        elif name == "EVENT":
            memcpy(&event, data, size)
            fields = event
        elif name == "EVENT_BLOCK":
            memcpy(&event_block, data, size)
            fields = event_block
        elif name == "SIGNAL":
            memcpy(&signal, data, size)
            fields = signal
        elif name == "RADIX":
            memcpy(&radix, data, size)
            fields = radix
        elif name == "LEASE":
            memcpy(&lease, data, size)
            fields = lease
        elif name == "NODE":
            memcpy(&node, data, size)
            fields = node
        elif name == "RUN":
            memcpy(&run, data, size)
            fields = run
        elif name == "HOST":
            memcpy(&host, data, size)
            fields = host
        elif name == "HOST_ENTRY":
            memcpy(&host_entry, data, size)
            fields = host_entry
        elif name == "TRANSFER":
            memcpy(&transfer, data, size)
            fields = transfer
        elif name == "TRANSFER_BLOCK":
            memcpy(&transfer_block, data, size)
            fields = transfer_block
        elif name == "OFFLOAD":
            memcpy(&offload, data, size)
            fields = offload
        elif name == "OFFLOAD_EVENT":
            memcpy(&offload_event, data, size)
            fields = offload_event
        elif name == "OFFLOAD_BLOCK":
            memcpy(&offload_block, data, size)
            fields = offload_block
        elif name == "TIERS":
            memcpy(&tiers, data, size)
            fields = tiers
        elif name == "TIER_ENTRY":
            memcpy(&tier_entry, data, size)
            fields = tier_entry
        elif name == "TIER_JOB":
            memcpy(&tier_job, data, size)
            fields = tier_job
        elif name == "TIER_BLOCK":
            memcpy(&tier_block, data, size)
            fields = tier_block
        elif name == "ORIGIN":
            memcpy(&origin, data, size)
            fields = origin
        elif name == "ADMISSION":
            memcpy(&admission, data, size)
            fields = admission
        else:
            memcpy(&pressure, data, size)
            fields = pressure
        _compare(name, fields, row.view(dtype)[0])


def _compare(name, fields, row):
    if tuple(fields) != row.dtype.names:
        raise ImportError(f"kvsim.layout.{name} has the fields {row.dtype.names}, the compiled struct {tuple(fields)}")
    for field in row.dtype.names:
        value, expected = fields[field], row[field]
        if isinstance(value, dict):
            _compare(f"{name}.{field}", value, expected)
        elif not np.array_equal(np.asarray(value, dtype=expected.dtype), expected):
            raise ImportError(f"kvsim.layout.{name}.{field} lies elsewhere in the compiled struct")


def modelled_ms(double raw_ms, double ratio):
    """A raw duration after the two roundings and the division of timing-and-fpm.md section 3.

    Parameters
    ----------
    raw_ms : float
        Finite, >= 0.
    ratio : float
        Speed-up, finite, >= 0; 0 does not scale.

    Returns
    -------
    float
        Milliseconds.

    Raises
    ------
    TimingError
        If either is not.
    """
    for name, value in (("duration", raw_ms), ("ratio", ratio)):
        if not value - value == 0.0:
            raise TimingError(f"non-finite {name} {value}")
        if value < 0.0:
            raise TimingError(f"negative {name} {value}")
    return kvsim_modelled_ms(raw_ms, ratio)


check_layout()
