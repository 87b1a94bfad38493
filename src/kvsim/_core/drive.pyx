# Many passes of many ranks until something needs Python, without the GIL.
#
# The order of one instant is spec/replay.md sections 4 and 5: pass completions
# by pool and worker, then what Python decides (workers that are ready, transfers,
# arrivals), then idle workers start passes. A worker is a group of ranks with one
# barrier: its pass lasts as long as its slowest rank. Nothing that arrives during
# a pass is seen before it ends.
#
# What Python must see is put down in notes, in order: requests that ended, first
# tokens if a placement wants them, prompts held for a transfer, destinations that
# got their blocks, workers with a deferred command. `run` returns at the instant
# of a note, before new passes start.
#
# What a run remembers of a request is not scheduler state: it stands here, in
# one track row per live request and in the record that becomes the result.
#
# Token times are not stored one by one. Each rank keeps the ends of the passes
# in which its requests went on; a request keeps the passes between which it
# emitted without a break. When it completes, a difference array over the passes
# gets +1 where its run of gaps starts and -1 where it ends, so the multiset of
# all gaps between tokens is the times between passes weighted by the sums of
# that array: exact, and O(1) per request. Passes older than every live request
# are folded into the histogram and forgotten. Where prefill passes run alone
# (SGLang) they are not in the log, so they break nobody's run: the token that
# one gives is a run of its own.
#
# Requests that coast emit in every pass of the log and are not looked at. Their
# tracks are brought up to date by the number of tokens they have. A rank whose
# requests all coast runs ahead: up to the next last token, and to the first
# instant at which anything could reach it (`stretch`). Of all these passes the
# newest is in flight, so whatever comes meanwhile finds what it would have found.

cimport numpy as cnp
from libc.math cimport INFINITY, NAN, llrint
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove, memset

import numpy as np

from kvsim import layout
from kvsim.errors import ConfigError
from kvsim._core.engine cimport (
    engine_activate, engine_active, engine_boundary, engine_cancel_destination, engine_cancel_source, engine_deadline,
    engine_drained, engine_emit, engine_events_shown, engine_fail, engine_fail_stuck,
    engine_internal_work, engine_quiet, engine_register_source, engine_release_source, engine_runnable,
    engine_reserve, engine_reserve_error, engine_retries, engine_retry, engine_schedule, engine_stretch, engine_stuck,
    engine_submit,
    engine_sync, engine_transport, engine_unblock, engine_visible_events, engine_waiting,
)
from kvsim._core.signals cimport progressed
from kvsim._core.state cimport RankState
from kvsim._core.types cimport (
    COMPLETED, FAILED, FREE, HAS_TOKEN, HELD, HELD_SOURCE, NOT_ADMITTED, NO_REASON, NO_SLOT, PASS_OK, POOL_DECODE, POOL_PREFILL, RADIX,
    REJECTED, RUN_CANCELLED, RUN_COMPLETED, RUN_FAILED, RUN_REJECTED, RUN_UNFINISHED, STALLED, admission_t, content_t, event_block_t, event_t, handoff_record_t, header_t, likely, rank_t,
    request_record_t, request_spec_t, run_t, signal_t, unlikely,
)

cnp.import_array()

cdef enum stop_reason:
    STOP_UNTIL = 0     # the next event lies at or after `until`
    STOP_NOTED = 1     # something of this instant is for Python
    STOP_SLICE = 2     # enough passes for one call
    STOP_CAP = 3       # the next event lies beyond the cap of simulated time
    STOP_FAILED = 4    # a callback raised
    STOP_STUCK = 6     # `lead`: requests are left, but nothing happens any more
    STOP_STARTING = 5  # a pass without duration left something for Python, others have not started yet

cdef enum note_kind:
    NOTE_ENDED = 0     # a request ended; in a prefill pool without a hold
    NOTE_HELD = 1      # a prefill rank computed a prompt and holds it
    NOTE_RESERVED = 2  # a decode rank owns the blocks for a prompt; value: tokens to transfer
    NOTE_FIRST = 3     # first token of a request that goes on
    NOTE_WOKEN = 4     # the pass of a worker that was watched ended

cdef struct note_t:
    int64_t row                   # of the workload, -1: of no request
    int64_t value
    int32_t kind                  # note_kind
    int32_t worker                # index of the worker
    int32_t status                # run_status
    int32_t pool                  # pool_kind of the worker

cdef struct track_t:  # a live request of a run, by its row in the rank
    int64_t row                   # index in the records
    int64_t first_pass            # first logged pass in which it emitted, -1: none
    int64_t start                 # first pass of the unbroken run of emissions that is open
    int64_t last                  # last pass in which it emitted; UNLOGGED: the run is one token of a prefill pass
    double start_ms               # end of the first pass of that run
    int64_t emitted               # tokens
    int64_t recomputed            # tokens whose KV was computed again
    int32_t lost                  # tokens whose KV its last preemption took
    int32_t burst                 # tokens it emitted in pass `last`
    int32_t zero_gaps             # tokens that share the time of the one before
    int32_t spans                 # head of its list of closed runs, -1: none
    int32_t begun                 # its first token was noted
    int32_t unused

cdef struct span_t:  # a closed run of emissions
    int64_t start
    int64_t last
    double start_ms
    int32_t next
    int32_t unused

cdef struct end_t:  # what a pass that is still in flight did to a request
    track_t track
    int32_t status                # run_status
    int32_t reason
    int32_t preemptions
    int32_t kind                  # note_kind
    int64_t needed
    int64_t rank

cdef struct log_t:  # passes of a rank in which requests went on
    int64_t base                  # number of the first that is kept
    int64_t count
    int64_t cap
    double* ends
    int64_t* weights              # difference array: requests whose gap to the pass before counts

cdef struct worker_t:
    double busy_until
    int64_t order                 # pool, then number in it
    int64_t first_rank
    int64_t num_ranks
    int64_t num_ends              # of the pass in flight
    int64_t prefill_tokens        # of the pass in flight
    int64_t num_ranks_run         # of the pass in flight
    int64_t barren                # passes that preempted somebody since its last token
    int32_t busy
    int32_t deferred              # did nothing at this instant
    int32_t queued                # in the list of workers to start
    int32_t live
    int32_t pool                  # pool_kind
    int32_t number                # in its pool
    int32_t watched               # Python wants to know when its pass ends
    int32_t listed                # in the list of workers that did nothing at this instant

cdef struct chunk_t:  # content of CHUNK neighbouring rows of the workload, made when the first of them enters
    const uint64_t* hashes        # paged engines
    const uint64_t* locals
    const run_t* runs             # radix engine
    const uint64_t* heads
    const int64_t* offsets        # of each row, in hashes or in runs
    int64_t left                  # rows that have not ended; at 0 the content is forgotten
    int32_t loaded
    int32_t unused

cdef struct gauge_t:  # a rank as it stood after its last completion or command
    int64_t active
    int64_t inactive
    int64_t running
    int64_t waiting
    int64_t preemptions
    int64_t hit_tokens            # sums over its passes
    int64_t total_tokens

cdef enum lead_fact:  # replay.coordinator.Fact
    FACT_HELD = 0
    FACT_RESERVED = 1
    FACT_TRANSFERRED = 2
    FACT_FAILED = 3
    NUM_FACTS = 6

cdef enum lead_action:  # replay.coordinator.Action
    ACT_SUBMIT = 0
    ACT_RESERVE = 1
    ACT_TRANSFER = 2
    ACT_ACTIVATE = 3
    ACT_RELEASE = 4
    ACT_CANCEL_SOURCE = 5
    ACT_CANCEL_DESTINATION = 6
    ACT_COMPLETE = 7
    ACT_COMPLETE_CANCELED = 8
    NUM_ACTIONS = 9

cdef enum lead_outcome:  # replay.coordinator.Outcome
    OUT_SUBMITTED = 0
    OUT_ACCEPTED = 1
    OUT_SCHEDULED = 2
    OUT_APPLIED = 3
    OUT_NOOP = 4
    OUT_FAILED = 5
    NUM_OUTCOMES = 6

cdef enum lead_step:  # replay.coordinator.kernel_tables
    STEP_REFUSED = -1
    STEP_IGNORED = -2

cdef enum lead_state:  # replay.coordinator.State
    LEAD_DONE = 9
    LEAD_ABANDONED = 15

cdef struct lead_t:  # a request of a disaggregated run that the kernel leads
    int32_t prefill_rank          # -1: not submitted
    int32_t prefill_slot          # -1: the rank does not have it (any more)
    int32_t decode_rank
    int32_t decode_slot
    int32_t state                 # replay.coordinator.State
    int32_t live                  # released and not retired
    int32_t ended                 # its decode half is over, or it was given up
    int32_t unused
    int64_t tokens                # that the destination lacks

cdef struct act_t:  # an action to carry out, in a list
    int64_t row
    int32_t action                # lead_action
    int32_t next                  # -1: the last

cdef struct queue_t:  # list of actions
    int32_t head                  # -1: empty
    int32_t tail

cdef struct transfer_t:  # KV on its way
    double end_ms
    int64_t row

cdef struct turn_t:  # the round robin over all ranks of a pool
    int64_t first_rank
    int64_t num_workers
    int64_t dp_size
    int64_t turn

cdef enum:
    CHUNK = 256
    # Rounds of passes without duration that one instant may contain.
    MOST_ROUNDS = 1_000_000
    # Preempting passes without a token in between, after which requests are held to preempt each other for ever.
    MOST_BARREN = 1000
    UNLOGGED = -2

# Passes kept per rank before they are folded, and the growth of that window.
DEF WINDOW = 16384


cdef inline bint lands_before(double end_ms, int64_t row, const transfer_t* other) noexcept nogil:
    """Order of transfers in their heap."""
    return end_ms < other.end_ms or (end_ms == other.end_ms and row < other.row)


cdef inline bint counts_down(const rank_t* r) noexcept nogil:
    """Whether a prefill interval is not over (spec/sglang.md section 6.7)."""
    return r.config.engine == RADIX and r.radix.countdown > 0


cdef inline void catch_up(track_t* t, int64_t generated) noexcept nogil:
    """A request coasted: behind the last pass that was followed it emitted a token in each logged one, up to `generated`."""
    cdef int64_t missed = generated - t.emitted
    # A burst of speculative decoding is followed as it happens, and never coasts.
    if missed > 0 and t.last >= 0:
        t.last += missed
        t.emitted = generated
        t.burst = 1


cdef int64_t merge_gaps(
    const double* ends, const int64_t* weights, int64_t count, double* before, int64_t* weight,
    int64_t* gaps, int64_t* sums
) noexcept nogil:
    """Gaps between the ends of passes in nanoseconds, and how many tokens waited each; equal neighbours as one.

    `before` and `weight` carry the last end and the running sum of `weights` from piece to piece.
    """
    cdef int64_t n = 0
    cdef int64_t i
    cdef int64_t gap
    for i in range(count):
        weight[0] += weights[i]
        if weight[0] > 0:
            gap = llrint((ends[i] - before[0]) * 1e6)
            if n > 0 and gaps[n - 1] == gap:
                sums[n - 1] += weight[0]
            else:
                gaps[n] = gap
                sums[n] = weight[0]
                n += 1
        before[0] = ends[i]
    return n


cdef class Fleet:
    """Workers of one or two pools driven together on one clock.

    Parameters
    ----------
    records : ndarray of layout.REQUEST_RECORD, shape (n,)
        Filled in place.
    histogram : object with ``add(gap_ns, weight)``
        Takes the gaps between tokens of completed requests.
    handoffs : ndarray of layout.HANDOFF_RECORD, shape (n,), optional
        Filled in place; needed for prefill and decode pools.
    capture_admissions, capture_outputs, record_passes, capture_offload : bool
        Logs to keep; they grow with the run. The last is kept by the ranks.
    watch_gauges : bool
        Keep `gauges` and count decoded tokens.
    watch_passes : bool
        Keep the newest forward-pass metrics of each rank for `take_fpm`, too.
    coast : bool
        Let plain decodes stand still in their rows (see `coast.pxd`). Without, every pass goes through
        every request; tests compare the two.

    Notes
    -----
    Ranks are numbered in the order in which they were added, over all workers;
    so are workers. A pool has numbers of its own, which decide the order inside
    one instant.
    """

    cdef list _states
    cdef list _tier_owners        # (what lies below G2, RankState whose tables hold it)
    cdef dict _pool_tiers         # what lies below G2, by pool
    cdef object _rank_memory
    cdef rank_t** ranks
    cdef int64_t num_ranks
    cdef object _rank_workers
    cdef int32_t* rank_workers
    cdef int64_t num_workers
    cdef object _records
    cdef request_record_t* records
    cdef object _handoffs
    cdef handoff_record_t* handoffs
    cdef int64_t num_records
    cdef object _histogram
    cdef object _worker_memory
    cdef worker_t* workers
    cdef int64_t worker_cap
    cdef int64_t rank_cap
    cdef object _heap
    cdef int32_t* heap            # busy workers, the next end first
    cdef int64_t heap_count
    cdef object _todo
    cdef int32_t* todo            # heap: workers that may start a pass, lowest first
    cdef int64_t todo_count
    cdef object _idle
    cdef int32_t* idle            # workers whose pass at this instant did nothing
    cdef int64_t idle_count
    cdef list _tracks
    cdef object _track_pointers
    cdef track_t** tracks
    cdef object _track_caps
    cdef int64_t* track_caps
    cdef list _log_memory
    cdef list _log_weights
    cdef object _log_rows
    cdef log_t* logs              # by rank
    cdef list _carry
    cdef list _end_memory
    cdef object _end_pointers
    cdef end_t** ends
    cdef object _end_caps
    cdef int64_t* end_caps
    cdef object _span_memory
    cdef span_t* spans
    cdef int64_t span_cap
    cdef int64_t span_used
    cdef int32_t span_free
    cdef object _odd
    cdef int64_t* odd
    cdef int64_t odd_cap
    cdef int64_t odd_count
    cdef int64_t zero_gaps
    cdef object _notes
    cdef note_t* notes
    cdef int64_t note_cap
    cdef int64_t note_count
    cdef bint note_ends
    cdef bint note_firsts
    cdef bint ended               # a request ended since the feed was last asked
    cdef bint capture_admissions
    cdef bint capture_outputs
    cdef bint record_passes
    cdef bint capture_offload
    cdef bint has_offload         # some worker has a lower tier
    cdef bint watch_gauges
    cdef bint watch_passes
    cdef bint coast
    cdef bint led                 # what happens in a worker may come to matter to others
    cdef double stop_ms           # until when the present call lets time pass
    cdef double ahead_ms          # latest start of a pass that ran ahead of the clock
    cdef int64_t num_stretched    # passes of the last drive
    cdef object _gauges
    cdef gauge_t* gauge_rows
    cdef dict _fpm_open
    cdef dict _fpm
    cdef object _admissions
    cdef int64_t admission_count
    cdef object _outputs
    cdef int64_t output_count
    cdef object _passes
    cdef int64_t pass_count
    # the feed: requests whose release needs no Python
    cdef object _feed_rows
    cdef object _feed_times
    cdef object _feed_ranks
    cdef int64_t* feed_rows
    cdef double* feed_times
    cdef int32_t* feed_ranks
    cdef int64_t feed_count
    cdef int64_t feed_at
    cdef int64_t feed_cap
    # handoffs that the kernel leads
    cdef object _leads
    cdef lead_t* leads
    cdef object _lead_rows
    cdef int64_t* lead_rows       # in order of release
    cdef object _lead_times
    cdef double* lead_times
    cdef int64_t lead_count
    cdef int64_t lead_at
    cdef int64_t lead_cap         # of requests inside, 0: open loop
    cdef int64_t inside
    cdef object _lead_facts
    cdef int32_t* lead_facts      # [state][fact]
    cdef object _lead_outcomes
    cdef int32_t* lead_outcomes   # [state][action][outcome]
    cdef object _acts
    cdef act_t* acts
    cdef int32_t act_cap
    cdef int32_t act_free         # list of unused entries
    cdef queue_t actions          # to carry out at this instant
    cdef queue_t arrived          # behind the passes of this instant
    cdef object _deferred
    cdef queue_t* deferred        # by rank, until the pass in flight ends
    cdef object _transfers
    cdef transfer_t* transfers    # heap
    cdef int64_t transfer_cap
    cdef int64_t transfer_count
    cdef turn_t lead_turns[2]
    cdef object _hints
    cdef int32_t* hints[2]        # ranks that requests ask for
    cdef object _routes
    cdef int64_t* routes          # row, worker, rank, pool of each placement, NULL: not kept
    cdef int64_t route_cap
    cdef int64_t route_count
    cdef bint by_missing          # a transfer is of what the destination lacks
    cdef int64_t transfer_bytes   # of a token, -1: not known
    cdef double transfer_gbps
    cdef double transfer_ms       # where bytes or bandwidth are not known
    cdef str lead_error
    cdef object _specs
    cdef object _planned
    cdef list _sources            # by pool
    cdef list _content
    cdef list _chunk_memory
    cdef chunk_t* chunks[3]
    cdef int64_t spent_count[3]
    cdef request_spec_t* specs
    cdef const uint32_t* planned
    cdef readonly double now_ms
    cdef readonly int64_t in_flight
    cdef readonly int64_t passes
    cdef readonly int64_t committed_prefill_tokens
    cdef readonly int64_t done
    cdef readonly int64_t accepted_tokens
    cdef readonly int64_t decode_forwards
    cdef object error

    def __init__(self, records, histogram, *, handoffs=None, capture_admissions=False, capture_outputs=False,
                 record_passes=False, capture_offload=False, watch_gauges=False, watch_passes=False, coast=True):
        self._states = []
        self._records = records
        self.records = <request_record_t*>cnp.PyArray_DATA(<cnp.ndarray>records)
        self.num_records = len(records)
        self._handoffs = handoffs
        if handoffs is not None:
            self.handoffs = <handoff_record_t*>cnp.PyArray_DATA(<cnp.ndarray>handoffs)
        self._histogram = histogram
        self.capture_admissions = capture_admissions
        self.capture_outputs = capture_outputs
        self.record_passes = record_passes
        self.capture_offload = capture_offload
        self.watch_gauges = watch_gauges or watch_passes
        self.watch_passes = watch_passes
        # A captured output tells each token.
        self.coast = coast and not capture_outputs
        self.led = False
        self.stop_ms = self.ahead_ms = -INFINITY
        self._fpm_open, self._fpm = {}, {}
        self._tier_owners, self._pool_tiers = [], {}
        self._tracks, self._end_memory, self._log_memory, self._log_weights = [], [], [], []
        # Per rank: weight that runs on into the window, and the end of the pass before it.
        self._carry = []
        self._rank_memory = self._rank_workers = self._track_pointers = self._track_caps = self._gauges = None
        self._worker_memory = self._heap = self._todo = self._idle = None
        self._end_pointers = self._end_caps = self._log_rows = None
        self._reserve_workers(4)
        self._reserve_ranks(4)
        self.span_free = -1
        self._grow_spans()
        self._odd = np.zeros(1024, np.int64)
        self.odd = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>self._odd)
        self.odd_cap = 1024
        self._notes = None
        self.grow_notes()
        self._sources, self._content, self._chunk_memory = [None] * 3, [{}, {}, {}], [None] * 3
        self._admissions = np.zeros(0, layout.ADMISSION_LOG)
        self._outputs = np.zeros(0, layout.OUTPUT_RECORD)
        self._passes = np.zeros(0, layout.PASS_RECORD)

    # ------------------------------------------------------------ workers

    def add_worker(self, states, int64_t pool=0, int64_t number=-1):
        """Let a worker take part from now on.

        Parameters
        ----------
        states : list of RankState
            One per attention-DP rank.
        pool : int
            layout.Pool.
        number : int
            In its pool; by default the number it has among all workers.

        Returns
        -------
        (int, int)
            Its number among all workers, and that of its first rank.
        """
        cdef int64_t w = self.num_workers
        cdef int64_t first = self.num_ranks
        cdef int64_t i
        cdef worker_t* worker
        self._share_tiers(states, pool)
        if w == self.worker_cap:
            self._reserve_workers(2 * w)
        if first + len(states) > self.rank_cap:
            self._reserve_ranks(2 * (first + len(states)))
        worker = &self.workers[w]
        memset(worker, 0, sizeof(worker_t))
        worker.live = 1
        worker.pool = pool
        worker.number = w if number < 0 else number
        worker.order = (pool << 40) | worker.number
        worker.first_rank = first
        worker.num_ranks = len(states)
        for i, state in enumerate(states):
            self._states.append(state)
            self._tracks.append(None)
            self.tracks[first + i] = NULL
            self.track_caps[first + i] = 0
            self.ranks[first + i] = (<RankState>state).bind()
            self.ranks[first + i].grouped = len(states) > 1
            self.ranks[first + i].want_firsts = self.note_firsts
            self.ranks[first + i].coast.wanted = self.coast
            self.ranks[first + i].want_offload = self.capture_offload
            self.has_offload |= self.ranks[first + i].config.offload != 0
            # Others are tried again whenever something ends.
            self.led |= pool != 0 or self.ranks[first + i].config.ask_admission != 0
            self.rank_workers[first + i] = w
            memset(&self.gauge_rows[first + i], 0, sizeof(gauge_t))
            self._log_memory.append(None)
            self._log_weights.append(None)
            self._carry.append((0, 0.0))
            memset(&self.logs[first + i], 0, sizeof(log_t))
            self._grow_log(first + i, 1024)
        self.num_ranks += len(states)
        self._end_memory.append(None)
        self.ends[w] = NULL
        self.end_caps[w] = 0
        self.num_workers += 1
        return w, first

    def _share_tiers(self, states, int64_t pool):
        """Let ranks that are about to take part use the G3 and G4 of all that have the same below G2."""
        states = [state for state in states if state.tiers_below() is not None]
        for state in states:
            shape = state.tiers_below()
            expected = self._pool_tiers.get(pool, shape)
            for name, value in shape.items():
                if value != expected[name]:
                    raise ConfigError(name, f"workers of a pool share it: it is {expected[name]} already, got {value}")
            if state.deep() is not state or not state.is_untouched_below():
                raise ValueError("a rank whose G3 or G4 is in use already cannot share those of a run")
        for state in states:
            shape = state.tiers_below()
            self._pool_tiers[pool] = shape
            for known, owner in self._tier_owners:
                if known == shape:
                    break
            else:
                owner = state.make_owner()
                self._tier_owners.append((shape, owner))
            state.share_tiers(owner)

    def remove_worker(self, int64_t w):
        """Forget a worker that is idle and has no request; its numbers are not used again.

        What it brought to tiers that it shares stays there. It must have no transfer
        under way.
        """
        cdef worker_t* worker = &self.workers[w]
        cdef int64_t i
        if not worker.live or worker.busy:
            raise ValueError(f"worker {w} is busy or already removed")
        for i in range(worker.first_rank, worker.first_rank + worker.num_ranks):
            if self.ranks[i].config.tiers and self.ranks[i].header.num_transfers > 0:
                raise ValueError(f"worker {w} has transfers between its tiers under way")
        worker.live = 0
        for i in range(worker.first_rank, worker.first_rank + worker.num_ranks):
            self._states[i].leave_tiers()
            self.fold(i)
            self._log_memory[i] = self._log_weights[i] = None
            self._states[i] = None
            self._tracks[i] = None
            self.ranks[i] = NULL
            self.tracks[i] = NULL
            self.track_caps[i] = 0
        self._end_memory[w] = None

    def note(self, bint ends, bint firsts):
        """Whether to return at the instants at which requests end, and emit their first token."""
        cdef int64_t i
        self.note_ends = ends
        self.note_firsts = firsts
        for i in range(self.num_ranks):
            if self.ranks[i] != NULL:
                self.ranks[i].want_firsts = firsts

    def is_busy(self, int64_t w):
        """Whether a pass of the worker is in flight."""
        return self.workers[w].busy != 0

    def is_drained(self, int64_t w):
        """Whether an idle worker has nothing left: no request, hold or reservation."""
        cdef int64_t i
        if self.workers[w].busy:
            return False
        for i in range(self.workers[w].first_rank, self.workers[w].first_rank + self.workers[w].num_ranks):
            if not engine_drained(self.ranks[i]):
                return False
        return True

    def watch(self, int64_t rank):
        """If a pass of a rank's worker is in flight, note its end, before what it did.

        Returns
        -------
        int
            The worker; -1 if it is idle.
        """
        cdef int64_t w = self.rank_workers[rank]
        if not self.workers[w].busy:
            return -1
        self.workers[w].watched = 1
        return w

    def touch(self, int64_t rank):
        """After a command to a rank: what it changed is seen, and its worker may start a pass."""
        cdef int64_t w = self.rank_workers[rank]
        if not self.workers[w].busy:
            self.show_events(rank, self.now_ms)
        if self.watch_gauges:
            self.read_gauge(rank, False)
        self.queue(w)

    @property
    def gauges(self):
        """Each rank as it stood after its last completion or command: int64, shape (ranks, 7).

        Active, inactive blocks, running, waiting requests, preemptions, and
        prompt tokens found and looked up so far (SGLang).
        """
        return self._gauges[:self.num_ranks]

    def take_fpm(self):
        """Newest forward-pass metrics per rank since the last call: {rank: (end_ms, duration_ms, metrics)}.

        Metrics as `RankState.fpm` gives them.
        """
        fpm, self._fpm = self._fpm, {}
        return fpm

    # ------------------------------------------------------------ memory

    def _reserve_workers(self, int64_t cap):
        self._worker_memory = _longer(self._worker_memory, cap * sizeof(worker_t), np.uint8)
        self._heap = _longer(self._heap, cap, np.int32)
        self._todo = _longer(self._todo, cap, np.int32)
        self._idle = _longer(self._idle, cap, np.int32)
        self._end_pointers = _longer(self._end_pointers, cap, np.uintp)
        self._end_caps = _longer(self._end_caps, cap, np.int64)
        self.workers = <worker_t*>cnp.PyArray_DATA(<cnp.ndarray>self._worker_memory)
        self.heap = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>self._heap)
        self.todo = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>self._todo)
        self.idle = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>self._idle)
        self.ends = <end_t**>cnp.PyArray_DATA(<cnp.ndarray>self._end_pointers)
        self.end_caps = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>self._end_caps)
        self.worker_cap = cap

    def _reserve_ranks(self, int64_t cap):
        self._rank_memory = _longer(self._rank_memory, cap, np.uintp)
        self._rank_workers = _longer(self._rank_workers, cap, np.int32)
        self._track_pointers = _longer(self._track_pointers, cap, np.uintp)
        self._track_caps = _longer(self._track_caps, cap, np.int64)
        self._log_rows = _longer(self._log_rows, cap * sizeof(log_t), np.uint8)
        self.logs = <log_t*>cnp.PyArray_DATA(<cnp.ndarray>self._log_rows)
        gauges = np.zeros((cap, sizeof(gauge_t) // 8), np.int64)
        if self._gauges is not None:
            gauges[:len(self._gauges)] = self._gauges
        self._gauges = gauges
        self.ranks = <rank_t**>cnp.PyArray_DATA(<cnp.ndarray>self._rank_memory)
        self.rank_workers = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>self._rank_workers)
        self.tracks = <track_t**>cnp.PyArray_DATA(<cnp.ndarray>self._track_pointers)
        self.track_caps = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>self._track_caps)
        self.gauge_rows = <gauge_t*>cnp.PyArray_DATA(<cnp.ndarray>gauges)
        self.rank_cap = cap

    cdef int grow_notes(self) except -1:
        self.note_cap = max(256, 2 * self.note_cap)
        self._notes = _longer(self._notes, self.note_cap * sizeof(note_t), np.uint8)
        self.notes = <note_t*>cnp.PyArray_DATA(<cnp.ndarray>self._notes)
        return 0

    def _grow_log(self, int64_t rank, int64_t cap):
        """Room for `cap` passes in the window of a rank."""
        ends = np.zeros(cap, np.float64)
        weights = np.zeros(cap + 2, np.int64)
        if self._log_memory[rank] is not None:
            ends[:len(self._log_memory[rank])] = self._log_memory[rank]
            weights[:len(self._log_weights[rank])] = self._log_weights[rank]
        self._log_memory[rank], self._log_weights[rank] = ends, weights
        self.logs[rank].ends = <double*>cnp.PyArray_DATA(<cnp.ndarray>ends)
        self.logs[rank].weights = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>weights)
        self.logs[rank].cap = cap

    def _grow_spans(self):
        cap = max(1024, 2 * self.span_cap)
        self._span_memory = _longer(self._span_memory, cap * sizeof(span_t), np.uint8)
        self.spans = <span_t*>cnp.PyArray_DATA(<cnp.ndarray>self._span_memory)
        self.span_cap = cap

    cdef int reserve_track(self, int64_t rank, int64_t cap) except -1:
        self._tracks[rank] = _longer(self._tracks[rank], cap * sizeof(track_t), np.uint8)
        self.tracks[rank] = <track_t*>cnp.PyArray_DATA(<cnp.ndarray>self._tracks[rank])
        self.track_caps[rank] = cap
        return 0

    cdef int reserve_ends(self, int64_t w, int64_t cap) except -1:
        self._end_memory[w] = _longer(self._end_memory[w], cap * sizeof(end_t), np.uint8)
        self.ends[w] = <end_t*>cnp.PyArray_DATA(<cnp.ndarray>self._end_memory[w])
        self.end_caps[w] = cap
        return 0

    cdef int64_t live_requests(self, int64_t w) noexcept nogil:
        cdef int64_t live = 0
        cdef int64_t i
        for i in range(self.workers[w].first_rank, self.workers[w].first_rank + self.workers[w].num_ranks):
            live += self.ranks[i].header.num_live
        return live

    cdef int make_room(self, int64_t w) except -1:
        """Before a pass of worker `w`: room for all it can end, begin, log and break up."""
        cdef int64_t live = self.live_requests(w)
        cdef int64_t rank
        if self.end_caps[w] < self.workers[w].num_ends + 2 * live:
            self.reserve_ends(w, 2 * (self.workers[w].num_ends + 2 * live))
        for rank in range(self.workers[w].first_rank, self.workers[w].first_rank + self.workers[w].num_ranks):
            if self.logs[rank].count >= self.logs[rank].cap:
                self.fold(rank)
        while self.span_cap - self.span_used < live:
            self._grow_spans()
        if self.odd_cap - self.odd_count < self.span_used + live:
            self.flush_odd()
            if self.odd_cap < self.span_used + live:
                self._odd = np.zeros(2 * (self.span_used + live), np.int64)
                self.odd = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>self._odd)
                self.odd_cap = len(self._odd)
        return 0

    cdef bint has_room(self, int64_t w) noexcept nogil:
        cdef int64_t live = self.live_requests(w)
        cdef int64_t rank
        for rank in range(self.workers[w].first_rank, self.workers[w].first_rank + self.workers[w].num_ranks):
            if self.logs[rank].count >= self.logs[rank].cap:
                return False
        return (self.end_caps[w] >= self.workers[w].num_ends + 2 * live
                and self.span_cap - self.span_used >= live
                and self.odd_cap - self.odd_count >= self.span_used + live)

    cdef note_t* put_note(self, int kind, int64_t w, int64_t row) noexcept nogil:
        cdef note_t* n
        if unlikely(self.note_count == self.note_cap):
            with gil:
                self.grow_notes()
        n = &self.notes[self.note_count]
        self.note_count += 1
        n.kind = kind
        n.worker = <int32_t>w
        n.row = row
        n.value = 0
        n.status = 0
        n.pool = self.workers[w].pool
        return n

    def take_notes(self):
        """What happened since the last call, in order: [(kind, row, worker, status, pool, value)].

        Kinds: 0 a request ended (`status`; in a prefill pool one without a hold),
        1 its prompt is held by a prefill rank, 2 a decode rank reserved its
        blocks (`value`: tokens to transfer), 3 its first token, 4 the pass of a
        watched worker ended.
        """
        cdef int64_t i
        cdef const note_t* n
        notes = []
        for i in range(self.note_count):
            n = &self.notes[i]
            notes.append((n.kind, n.row, n.worker, n.status, n.pool, n.value))
        self.note_count = 0
        return notes

    cdef int flush_odd(self) except -1:
        if self.odd_count:
            self._histogram.add(self._odd[:self.odd_count].copy(), np.ones(self.odd_count, np.int64))
            self.odd_count = 0
        return 0

    cdef int fold(self, int64_t rank) except -1:
        """Move passes that no live request refers to from the window of a rank into the histogram."""
        cdef int64_t w = self.rank_workers[rank]
        cdef log_t* log = &self.logs[rank]
        cdef int64_t oldest = log.base + log.count
        cdef int64_t i
        cdef int64_t slot
        cdef int64_t count
        cdef int64_t weight
        cdef int64_t first
        cdef double before
        cdef const track_t* t
        for slot in range(min(self.ranks[rank].header.high_water, self.track_caps[rank])):
            if self.ranks[rank].requests[slot].status != 0:
                t = &self.tracks[rank][slot]
                if t.first_pass >= 0 and t.first_pass < oldest:
                    oldest = t.first_pass
        for i in range(self.workers[w].num_ends):
            t = &self.ends[w][i].track
            if self.ends[w][i].rank == rank and t.first_pass >= 0 and t.first_pass < oldest:
                oldest = t.first_pass
        count = oldest - log.base
        if count > 0:
            weight, before = self._carry[rank]
            ends = self._log_memory[rank]
            weights = self._log_weights[rank]
            # Piece by piece: the temporary arrays stay small however long the window is.
            gaps, sums = np.empty(min(count, WINDOW), np.int64), np.empty(min(count, WINDOW), np.int64)
            for first in range(0, count, WINDOW):
                i = min(first + WINDOW, count) - first
                i = merge_gaps(
                    log.ends + first, log.weights + first, i, &before, &weight,
                    <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>gaps), <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>sums))
                if i > 0:
                    self._histogram.add(gaps[:i].copy(), sums[:i].copy())
            self._carry[rank] = (weight, before)
            left = log.count - count
            ends[:left] = ends[count:log.count].copy()
            weights[:left + 2] = weights[count:log.count + 2].copy()
            weights[left + 2:] = 0
            log.base += count
            log.count = left
        if 2 * log.count > log.cap or log.cap < WINDOW:
            self._grow_log(rank, max(WINDOW, 2 * log.cap))
        return 0

    # ------------------------------------------------------------ what enters

    def set_content(self, specs, planned, source, int64_t pool=0):
        """Where the content of the requests of a pool comes from.

        Parameters
        ----------
        specs : ndarray of layout.REQUEST_SPEC, shape (n,)
        planned : ndarray of uint32 or None
            Output ids; None if nobody will look at them.
        source : callable
            ``source(first, last)`` gives the content of rows first .. last-1:
            (hashes or None, local hashes or None, runs or None, heads or None,
            offsets). Asked for a chunk of rows when the first of them enters;
            the answer is kept while one of them lives, so the memory of a run
            does not grow with its workload.
        pool : int
            layout.Pool.
        """
        cdef int64_t n = len(specs)
        cdef int64_t i
        self._specs, self._planned = specs, planned
        self._sources[pool] = source
        self.specs = <request_spec_t*>cnp.PyArray_DATA(<cnp.ndarray>specs)
        self.planned = NULL
        if planned is not None:
            self.planned = <const uint32_t*>cnp.PyArray_DATA(<cnp.ndarray>planned)
        self._content[pool] = {}
        self._chunk_memory[pool] = np.zeros((n + CHUNK - 1) // CHUNK * sizeof(chunk_t), np.uint8)
        self.chunks[pool] = <chunk_t*>cnp.PyArray_DATA(<cnp.ndarray>self._chunk_memory[pool])
        for i in range(n):
            self.chunks[pool][i // CHUNK].left += 1

    cdef int load(self, int64_t pool, int64_t c) except -1:
        """Have the content of chunk `c`, forgetting that of chunks nobody needs any more."""
        cdef chunk_t* chunk = &self.chunks[pool][c]
        if self.spent_count[pool]:
            for spent in [k for k in self._content[pool] if self.chunks[pool][<int64_t>k].left == 0]:
                del self._content[pool][spent]
            self.spent_count[pool] = 0
        content = self._sources[pool](c * CHUNK, min((c + 1) * CHUNK, len(self._specs)))
        hashes, local, runs, heads, offsets = content
        if hashes is not None:
            chunk.hashes = <const uint64_t*>cnp.PyArray_DATA(<cnp.ndarray>hashes)
        if local is not None:
            chunk.locals = <const uint64_t*>cnp.PyArray_DATA(<cnp.ndarray>local)
        if runs is not None:
            chunk.runs = <const run_t*>cnp.PyArray_DATA(<cnp.ndarray>runs)
            chunk.heads = <const uint64_t*>cnp.PyArray_DATA(<cnp.ndarray>heads)
        chunk.offsets = <const int64_t*>cnp.PyArray_DATA(<cnp.ndarray>offsets)
        chunk.loaded = 1
        self._content[pool][c] = content
        return 0

    cdef inline void forget(self, int64_t pool, int64_t row) noexcept nogil:
        """A request has left its pool: nobody looks at its content again."""
        self.chunks[pool][row // CHUNK].left -= 1
        self.spent_count[pool] += self.chunks[pool][row // CHUNK].left == 0

    def forget_halves(self, int64_t row):
        """Both halves of a request of a disaggregated run are gone."""
        self.forget(POOL_PREFILL, row)
        self.forget(POOL_DECODE, row)

    def set_feed(self, rows, times, ranks, int64_t concurrency=0):
        """Requests to release without asking: in this order, at `times` or, with `concurrency`, as room appears.

        Parameters
        ----------
        rows : ndarray of int64
        times : ndarray of float64
            Ascending; ignored with `concurrency`.
        ranks : ndarray of int32
            Rank of each, counted over all workers.
        concurrency : int
            0: open loop.
        """
        self._feed_rows, self._feed_times, self._feed_ranks = rows, times, ranks
        self.feed_rows = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>rows)
        self.feed_times = <double*>cnp.PyArray_DATA(<cnp.ndarray>times)
        self.feed_ranks = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>ranks)
        self.feed_count = len(rows)
        self.feed_at = 0
        self.feed_cap = concurrency

    cdef RankState state_of(self, int64_t rank):
        """State of a rank that takes part."""
        if not 0 <= rank < self.num_ranks or self._states[rank] is None:
            raise ValueError(f"rank {rank} is unknown or its worker was removed")
        return self._states[rank]

    cdef void enter(self, int64_t rank, int32_t slot, int64_t row, double arrival_ms) noexcept nogil:
        """Start to follow the request that was submitted in `slot`."""
        cdef track_t* t
        cdef request_record_t* record = &self.records[row]
        cdef worker_t* worker = &self.workers[self.rank_workers[rank]]
        if unlikely(slot >= self.track_caps[rank]):
            with gil:
                self.reserve_track(rank, self.ranks[rank].cap_requests)
        t = &self.tracks[rank][slot]
        memset(t, 0, sizeof(track_t))
        t.row = row
        t.first_pass = -1
        t.last = -1
        t.spans = -1
        record.arrival_ms = arrival_ms
        if worker.pool == POOL_PREFILL:
            self.handoffs[row].prefill_worker = worker.number
            self.handoffs[row].prefill_dp_rank = <int32_t>(rank - worker.first_rank)
        else:
            record.worker = worker.number
            record.dp_rank = <int32_t>(rank - worker.first_rank)
        self.in_flight += 1
        if self.watch_gauges:
            self.read_gauge(rank, False)
        self.queue(self.rank_workers[rank])

    cdef void find_content(self, int64_t rank, int64_t row, content_t* content) noexcept nogil:
        """Content of a row of the flat inputs, for a rank."""
        cdef int64_t pool = self.workers[self.rank_workers[rank]].pool
        cdef const request_spec_t* spec = &self.specs[row]
        cdef chunk_t* chunk = &self.chunks[pool][row // CHUNK]
        cdef int64_t at = row % CHUNK
        cdef int64_t first
        if unlikely(not chunk.loaded):
            with gil:
                self.load(pool, row // CHUNK)
        first = chunk.offsets[at]
        memset(content, 0, sizeof(content_t))
        if chunk.runs != NULL:
            content.runs = chunk.runs + first
            content.num_runs = chunk.offsets[at + 1] - first
            content.head = chunk.heads[at]
        else:
            content.hashes = chunk.hashes + first
            content.num_hashes = chunk.offsets[at + 1] - first
            if chunk.locals != NULL:
                content.locals = chunk.locals + first
        if spec.planned_offset >= 0 and self.planned != NULL:
            content.planned = self.planned + spec.planned_offset

    cdef void ingest(self, int64_t rank, int64_t row, double arrival_ms) noexcept nogil:
        """Submit a row of the flat inputs."""
        cdef const request_spec_t* spec = &self.specs[row]
        cdef content_t content
        cdef int32_t slot
        self.find_content(rank, row, &content)
        slot = engine_submit(
            self.ranks[rank], spec.id_hi, spec.id_lo, spec.input_tokens, spec.max_output_tokens, &content)
        self.enter(rank, slot, row, arrival_ms)

    def submit(self, int64_t rank, int64_t row, double arrival_ms, num_input=None, content=None):
        """Submit row `row` to a rank now; its prompt is the flat one unless `content` is given as to `RankState.submit`."""
        cdef RankState state = self.state_of(rank)
        cdef const request_spec_t* spec = &self.specs[row]
        if content is None:
            self.ingest(rank, row, arrival_ms)
        else:
            self.records[row].input_tokens = num_input
            slot = state.submit(spec.id_hi, spec.id_lo, num_input, spec.max_output_tokens, content)
            self.enter(rank, slot, row, arrival_ms)
        if state.error is not None:
            raise state.take_error()

    cdef int32_t enter_prefill(self, int64_t rank, int64_t row, double arrival_ms) noexcept nogil:
        """Submit the prefill half of a row of the flat inputs, its KV to be held; its row in the rank."""
        cdef const request_spec_t* spec = &self.specs[row]
        cdef content_t flat
        cdef int32_t slot
        self.find_content(rank, row, &flat)
        slot = engine_submit(
            self.ranks[rank], spec.id_hi, spec.id_lo, spec.input_tokens, min(<int64_t>1, spec.max_output_tokens), &flat)
        engine_register_source(self.ranks[rank], slot, 0, row)
        self.enter(rank, slot, row, arrival_ms)
        return slot

    cdef int32_t enter_reservation(self, int64_t rank, int64_t row, double arrival_ms) noexcept nogil:
        """Queue the reservation of the decode half of a row of the flat inputs; -1 if it can never fit."""
        cdef const request_spec_t* spec = &self.specs[row]
        cdef content_t flat
        cdef int32_t slot
        if self.misfits(rank, row, spec.input_tokens):
            return -1
        self.find_content(rank, row, &flat)
        slot = engine_reserve(
            self.ranks[rank], spec.id_hi, spec.id_lo, spec.input_tokens, spec.max_output_tokens, &flat, 0, row)
        self.enter(rank, slot, row, arrival_ms)
        return slot

    cdef bint misfits(self, int64_t rank, int64_t row, int64_t length) noexcept nogil:
        """Whether a prompt can never fit into a decode rank; its record says why then."""
        cdef int64_t needed = 0
        cdef int reason = engine_reserve_error(self.ranks[rank], length, self.specs[row].max_output_tokens, &needed)
        if reason != NO_REASON:
            self.records[row].reason = reason
            self.records[row].needed = needed
        return reason != NO_REASON

    def submit_prefill(self, int64_t rank, int64_t row, double arrival_ms, num_input=None, content=None):
        """Submit the prefill half of a row, its KV to be held; returns its row in the rank. The handoff id is the row."""
        cdef RankState state = self.state_of(rank)
        cdef const request_spec_t* spec = &self.specs[row]
        cdef int32_t slot
        if content is None:
            slot = self.enter_prefill(rank, row, arrival_ms)
        else:
            self.records[row].input_tokens = num_input
            slot = state.submit(spec.id_hi, spec.id_lo, num_input, min(1, spec.max_output_tokens), content)
            engine_register_source(self.ranks[rank], slot, 0, row)
            self.enter(rank, slot, row, arrival_ms)
        if state.error is not None:
            raise state.take_error()
        return slot

    def reserve(self, int64_t rank, int64_t row, double arrival_ms, num_input=None, content=None):
        """Queue the reservation of the decode half of a row, without trying it; returns its row in the rank.

        A prompt that can never fit is refused: -1, and its record says why.
        """
        cdef RankState state = self.state_of(rank)
        cdef const request_spec_t* spec = &self.specs[row]
        cdef int32_t slot
        if content is None:
            slot = self.enter_reservation(rank, row, arrival_ms)
        else:
            if self.misfits(rank, row, num_input):
                return -1
            slot = state.reserve(spec.id_hi, spec.id_lo, num_input, spec.max_output_tokens, content, 0, row)
            self.enter(rank, slot, row, arrival_ms)
        if state.error is not None:
            raise state.take_error()
        return slot

    def show_reservation(self, int64_t rank, int32_t slot):
        """A command to an idle rank was followed by a reservation: (row of the workload, tokens to transfer)."""
        if self.watch_gauges:
            self.read_gauge(rank, False)
        return self.reserved(rank, slot), self.ranks[rank].handoffs[slot].transferable

    cdef int64_t reserved(self, int64_t rank, int32_t slot) noexcept nogil:
        cdef int64_t row = self.tracks[rank][slot].row
        self.handoffs[row].destination_reserved_ms = self.now_ms
        return row

    def worker_of(self, int64_t rank):
        """Worker of a rank, by their numbers in the fleet."""
        return self.rank_workers[rank]

    def take_events(self, int64_t rank):
        """KV events of a rank that became visible since the last call: (events, blocks) copies, or None."""
        cdef rank_t* r = self.ranks[rank]
        cdef header_t* h = r.header
        cdef int64_t n = 0
        cdef int64_t blocks
        cdef int64_t i
        while n < h.num_events and r.events[n].at_ms >= 0.0:
            n += 1
        if n == 0:
            return None
        blocks = r.events[n].first if n < h.num_events else h.num_event_blocks
        rows = np.empty(n, layout.EVENT)
        memcpy(cnp.PyArray_DATA(<cnp.ndarray>rows), r.events, <size_t>n * sizeof(event_t))
        of = np.empty(blocks, layout.EVENT_BLOCK)
        memcpy(cnp.PyArray_DATA(<cnp.ndarray>of), r.event_blocks, <size_t>blocks * sizeof(event_block_t))
        memmove(r.events, r.events + n, <size_t>(h.num_events - n) * sizeof(event_t))
        memmove(r.event_blocks, r.event_blocks + blocks, <size_t>(h.num_event_blocks - blocks) * sizeof(event_block_t))
        h.num_events -= n
        h.num_event_blocks -= blocks
        for i in range(h.num_events):
            r.events[i].first -= <int32_t>blocks
        # Bytes behind the buffer are zero, so that equal states have equal bytes.
        memset(r.events + h.num_events, 0, <size_t>n * sizeof(event_t))
        memset(r.event_blocks + h.num_event_blocks, 0, <size_t>blocks * sizeof(event_block_t))
        if r.config.engine == RADIX:
            r.radix.flushed -= <int32_t>n
        return rows, of

    # ------------------------------------------------------------ one pass

    cdef inline int64_t log_end(self, int64_t rank, double end_ms) noexcept nogil:
        """Log the pass of a rank if requests went on in it: its number, UNLOGGED if none did."""
        cdef const rank_t* r = self.ranks[rank]
        cdef log_t* log = &self.logs[rank]
        if r.p.num_ready + r.p.coasting == 0 or (
                r.config.engine == RADIX and not r.config.legacy and r.p.admitted > 0):
            return UNLOGGED
        log.ends[log.count] = end_ms
        log.count += 1
        return log.base + log.count - 1

    cdef void follow(self, int64_t w, int64_t rank, double now_ms, double end_ms) noexcept nogil:
        """After a rank of worker `w` emitted: admissions, token times, ends."""
        cdef rank_t* r = self.ranks[rank]
        cdef worker_t* worker = &self.workers[w]
        cdef bint hidden = worker.pool == POOL_PREFILL
        cdef int64_t number = UNLOGGED if hidden else self.log_end(rank, end_ms)
        cdef track_t* tracks = self.tracks[rank]
        cdef track_t* t
        cdef request_record_t* record
        cdef const admission_t* a
        cdef const signal_t* s
        cdef end_t* e
        cdef span_t* span
        cdef handoff_record_t* halves
        cdef int64_t i
        cdef int64_t n
        cdef int32_t at
        for i in range(r.num_pressures):
            tracks[r.pressures[i].slot].lost = r.pressures[i].computed
        for i in range(r.num_admissions):
            a = &r.admissions[i]
            t = &tracks[a.slot]
            record = &self.records[t.row]
            if t.lost > a.reused:
                t.recomputed += t.lost - a.reused
            t.lost = 0
            if record.admissions == 0:
                record.first_admit_ms = now_ms
                record.first_reused_tokens = a.reused
            record.admissions += 1
            if a.reused > record.reused_tokens:
                record.reused_tokens = a.reused
            if unlikely(self.handoffs != NULL):
                halves = &self.handoffs[t.row]
                if hidden:
                    if not halves.prefill_admit_ms >= 0.0:
                        halves.prefill_admit_ms = now_ms
                else:
                    if not halves.decode_admit_ms >= 0.0:
                        halves.decode_admit_ms = now_ms
                    if a.reused > halves.decode_reused_tokens:
                        halves.decode_reused_tokens = a.reused
        # The token of a prefill half is never shown: its request goes on elsewhere.
        if self.coast and not hidden and r.config.nextn == 0:
            # Rows of requests that ended are gone, so their signals say how many tokens they had.
            for i in range(r.num_signals):
                s = &r.signals[i]
                if s.flags & COMPLETED:
                    catch_up(&tracks[s.slot], s.generated - (s.flags & HAS_TOKEN != 0))
        for i in range(0 if hidden else r.p.num_ready):
            n = r.burst[i]
            if n == 0:
                continue
            t = &tracks[r.ready[i]]
            if self.coast:
                catch_up(t, r.requests[r.ready[i]].generated - n)
            if likely(t.last == number - 1 and t.emitted > 1 and n == 1):
                t.last = number
                t.emitted += 1
                t.burst = 1
                continue
            if t.emitted == 0:
                t.start = number
                t.start_ms = end_ms
            elif t.last != number - 1 or number < 0:
                if self.span_free >= 0:
                    at = self.span_free
                    self.span_free = self.spans[at].next
                else:
                    at = <int32_t>self.span_used
                    self.span_used += 1
                span = &self.spans[at]
                span.start = t.start
                span.last = t.last
                span.start_ms = t.start_ms
                span.next = t.spans
                t.spans = at
                t.start = number
                t.start_ms = end_ms
            if t.first_pass < 0 and number >= 0:
                t.first_pass = number
            t.last = number
            t.burst = <int32_t>n
            t.zero_gaps += <int32_t>(n - 1)
            record = &self.records[t.row]
            if t.emitted == 0:
                record.first_token_ms = end_ms
                if n > 1:
                    record.second_token_ms = end_ms
            elif t.emitted == 1:
                record.second_token_ms = end_ms
            t.emitted += n
        for i in range(r.num_signals):
            s = &r.signals[i]
            t = &tracks[s.slot]
            if s.flags & COMPLETED:
                e = &self.ends[w][worker.num_ends]
                e.kind = NOTE_HELD if s.flags & HELD else NOTE_ENDED
                e.status = RUN_REJECTED if s.flags & REJECTED else (RUN_FAILED if s.flags & FAILED else RUN_COMPLETED)
                e.reason = s.reason
                e.needed = s.needed
                e.preemptions = s.preemptions
            elif self.note_firsts and not t.begun:
                t.begun = 1
                e = &self.ends[w][worker.num_ends]
                e.kind = NOTE_FIRST
            else:
                continue
            e.track = t[0]
            e.rank = rank
            worker.num_ends += 1

    cdef inline double run_end(self, int64_t rank, int64_t last, double start_ms) noexcept nogil:
        """When the last token of a run of emissions came."""
        return start_ms if last < 0 else self.logs[rank].ends[last - self.logs[rank].base]

    cdef inline void weigh(self, int64_t rank, int64_t start, int64_t last) noexcept nogil:
        """The gaps of passes start+1 .. last count once more."""
        cdef log_t* log = &self.logs[rank]
        if last > start:
            log.weights[start + 1 - log.base] += 1
            log.weights[last + 1 - log.base] -= 1

    cdef void settle_end(self, int64_t w, const end_t* e, double end_ms) noexcept nogil:
        """Write the record of a request that ended, and count its gaps if it completed."""
        cdef const track_t* t = &e.track
        cdef request_record_t* record = &self.records[t.row]
        cdef int32_t at = t.spans
        cdef int32_t after
        cdef double start_ms = t.start_ms
        cdef const span_t* span
        cdef note_t* n
        record.terminal_ms = end_ms
        record.status = e.status
        record.reason = e.reason
        record.needed = e.needed
        record.preemptions += e.preemptions
        record.output_tokens = t.emitted
        record.recomputed_tokens += t.recomputed
        if t.emitted > 0:
            record.last_token_ms = self.run_end(e.rank, t.last, t.start_ms)
            if e.status == RUN_COMPLETED:
                self.weigh(e.rank, t.start, t.last)
                self.zero_gaps += t.zero_gaps
        while at >= 0:
            span = &self.spans[at]
            if e.status == RUN_COMPLETED:
                self.weigh(e.rank, span.start, span.last)
                self.odd[self.odd_count] = llrint(
                    (start_ms - self.run_end(e.rank, span.last, span.start_ms)) * 1e6)
                self.odd_count += 1
            start_ms = span.start_ms
            after = span.next
            self.spans[at].next = self.span_free
            self.span_free = at
            at = after
        if self.workers[w].pool != POOL_DECODE:
            self.forget(self.workers[w].pool, t.row)
        self.in_flight -= 1
        self.done += 1
        self.ended = True
        if self.note_ends:
            n = self.put_note(NOTE_ENDED, w, t.row)
            n.status = e.status

    cdef void settle(self, int64_t w, const end_t* e, double end_ms) noexcept nogil:
        """What a pass did to a request becomes visible."""
        cdef note_t* n
        cdef request_record_t* record
        if e.kind == NOTE_FIRST:
            self.put_note(NOTE_FIRST, w, e.track.row)
        elif e.kind == NOTE_HELD:
            self.handoffs[e.track.row].source_held_ms = end_ms
            self.records[e.track.row].preemptions += e.preemptions
            self.records[e.track.row].recomputed_tokens += e.track.recomputed
            self.put_note(NOTE_HELD, w, e.track.row)
        elif self.workers[w].pool == POOL_PREFILL:
            # The end of a request that is not handed over: what becomes of it is the coordinator's to say.
            record = &self.records[e.track.row]
            record.reason = e.reason
            record.needed = e.needed
            record.preemptions += e.preemptions
            n = self.put_note(NOTE_ENDED, w, e.track.row)
            n.status = e.status
        else:
            self.settle_end(w, e, end_ms)

    cdef void complete(self, int64_t w) noexcept nogil:
        """The pass in flight of worker `w` ends: what it did becomes visible."""
        cdef worker_t* worker = &self.workers[w]
        cdef int64_t i
        worker.busy = 0
        if unlikely(worker.watched):
            worker.watched = 0
            self.put_note(NOTE_WOKEN, w, -1)
        self.passes += worker.num_ranks_run
        self.committed_prefill_tokens += worker.prefill_tokens
        for i in range(worker.num_ends):
            self.settle(w, &self.ends[w][i], worker.busy_until)
        worker.num_ends = 0
        for i in range(worker.first_rank, worker.first_rank + worker.num_ranks):
            self.cross_boundary(w, i)
            self.show_events(i, worker.busy_until)
            if self.watch_gauges:
                self.read_gauge(i, True)
        if self.watch_passes:
            with gil:
                self.publish_fpm(w)
        self.queue(w)

    cdef inline void cross_boundary(self, int64_t w, int64_t rank) noexcept nogil:
        """A rank is between two passes: its transfers go on, its first pending destination is tried.

        Spec/host-offload.md section 6, spec/handoff.md section 3.
        """
        engine_boundary(self.ranks[rank], self.workers[w].busy_until)
        self.retry_pending(w, rank)

    cdef inline void retry_pending(self, int64_t w, int64_t rank) noexcept nogil:
        cdef int32_t slot
        cdef note_t* n
        if likely(self.ranks[rank].header.num_pending == 0):
            return
        slot = engine_retry(self.ranks[rank])
        if slot >= 0:
            n = self.put_note(NOTE_RESERVED, w, self.reserved(rank, slot))
            n.value = self.ranks[rank].handoffs[slot].transferable

    cdef inline void show_events(self, int64_t rank, double at_ms) noexcept nogil:
        """Stamp the events that became visible."""
        cdef rank_t* r = self.ranks[rank]
        cdef int64_t k = engine_visible_events(r) - 1
        while k >= 0 and r.events[k].at_ms < 0.0:
            r.events[k].at_ms = at_ms
            k -= 1
        if engine_visible_events(r) > 0:
            engine_events_shown(r)

    cdef void read_gauge(self, int64_t rank, bint after_pass) noexcept nogil:
        cdef const rank_t* r = self.ranks[rank]
        cdef gauge_t* g = &self.gauge_rows[rank]
        g.active = engine_active(r)
        g.inactive = 0 if r.config.engine == RADIX else r.header.num_inactive
        g.running = r.header.num_running
        g.waiting = engine_waiting(r)
        g.preemptions = r.header.preemptions_total
        if after_pass:
            if r.p.num_ready >= 0:
                if r.config.engine == RADIX:
                    g.hit_tokens += r.radix.hit_tokens
                    g.total_tokens += r.radix.total_tokens
                if self.workers[self.rank_workers[rank]].pool != POOL_PREFILL:
                    # A request that completes its prompt emits its first token without decoding.
                    self.accepted_tokens += r.p.visible - (r.p.visible_requests - r.p.decode.count)
                    self.decode_forwards += r.p.decode.count

    cdef int keep_fpm(self, int64_t w, double now_ms, double end_ms) except -1:
        """Hold the metrics of the pass that starts until it ends."""
        cdef int64_t i
        rows = []
        for i in range(self.workers[w].first_rank, self.workers[w].first_rank + self.workers[w].num_ranks):
            ran = self.ranks[i].p.num_ready >= 0
            if ran or end_ms > now_ms:
                fpm = (<RankState>self._states[i]).fpm() if ran else (0, 0, 0.0, 0, 0, 0, 0.0, 0, 0, 0.0, 0, 0, 0.0)
                rows.append((i, end_ms - now_ms, fpm))
        self._fpm_open[w] = rows
        return 0

    cdef int publish_fpm(self, int64_t w) except -1:
        for rank, duration_ms, fpm in self._fpm_open.pop(w, ()):
            self._fpm[rank] = (self.workers[w].busy_until, duration_ms, fpm)
        return 0

    cdef double horizon(self) noexcept nogil:
        """The first instant at which something could reach a worker that is about to start a pass."""
        cdef double next_ms = self.stop_ms
        if self.watch_gauges or self.record_passes or self.idle_count > 0:
            return -INFINITY
        if self.feed_at < self.feed_count and self.feed_cap == 0 and self.feed_times[self.feed_at] < next_ms:
            next_ms = self.feed_times[self.feed_at]
        if self.feed_at < self.feed_count and self.in_flight < self.feed_cap:
            # Something ended at this instant, in a pass without duration; its successor enters behind this pass.
            return -INFINITY
        if self.led or self.note_ends or self.note_firsts or self.feed_cap > 0:
            # What ends elsewhere may send something here.
            if self.todo_count > 0:
                return -INFINITY
            if self.heap_count > 0 and self.workers[self.heap[0]].busy_until < next_ms:
                next_ms = self.workers[self.heap[0]].busy_until
            if self.has_offload:
                next_ms = min(next_ms, self.next_deadline())
        return next_ms

    cdef bint stretch(self, int64_t w, double now_ms) noexcept nogil:
        """Passes of a quiet worker of one rank, the newest of which is in flight; false if it has to go step by step."""
        cdef worker_t* worker = &self.workers[w]
        cdef log_t* log = &self.logs[worker.first_rank]
        cdef int64_t n
        if not engine_quiet(self.ranks[worker.first_rank]) or worker.pool == POOL_PREFILL:
            return False
        n = engine_stretch(
            self.ranks[worker.first_rank], now_ms, self.horizon(), log.ends + log.count, log.cap - log.count)
        if n == 0:
            return False
        log.count += n
        if n > 1 and log.ends[log.count - 2] > self.ahead_ms:
            self.ahead_ms = log.ends[log.count - 2]
        self.passes += n - 1
        self.num_stretched = n
        worker.busy_until = log.ends[log.count - 1]
        worker.busy = 1
        worker.barren = 0
        worker.num_ranks_run = 1
        worker.prefill_tokens = 0
        return True

    cdef int drive(self, int64_t w, double now_ms) noexcept nogil:
        """Start a pass of an idle worker.

        0: did nothing, 1: busy, 2: over at once, 3: try again at once, 4: had nothing to do, -1: a callback raised.
        """
        cdef worker_t* worker = &self.workers[w]
        cdef rank_t* r
        cdef double end_ms = now_ms
        cdef bint progress = False
        cdef bint ran = False
        cdef bint work = False
        cdef int64_t i
        cdef int64_t needed
        cdef int32_t slot
        cdef int reason
        cdef int64_t first = worker.first_rank
        cdef int64_t last = first + worker.num_ranks
        if unlikely(worker.barren > MOST_BARREN) and self.break_livelock(w, now_ms):
            return 2
        if worker.num_ranks == 1 and self.stretch(w, now_ms):
            return 1
        self.num_stretched = 1
        for i in range(first, last):
            work |= engine_runnable(self.ranks[i])
        for i in range(first, last):
            r = self.ranks[i]
            r.want_signals = self.capture_outputs
            # A prefill interval is counted in passes; without any request they follow at once.
            if not engine_runnable(r) and (work or not counts_down(r)):
                r.num_signals = 0
                r.num_admissions = 0
                r.p.num_ready = -1
                continue
            ran = True
            if engine_schedule(r, now_ms) != PASS_OK:
                return -1
            if r.p.end_ms > end_ms:
                end_ms = r.p.end_ms
        if not ran:
            return 4
        worker.prefill_tokens = 0
        worker.num_ranks_run = 0
        for i in range(first, last):
            r = self.ranks[i]
            if r.p.num_ready < 0:
                continue
            engine_emit(r)
            if r.p.visible > 0:
                worker.barren = 0
            elif unlikely(r.num_pressures > 0):
                worker.barren += 1
            if progressed(r):
                progress = True
                worker.num_ranks_run += 1
                worker.prefill_tokens += r.p.prefill_tokens
            self.follow(w, i, now_ms, end_ms)
            if self.capture_admissions or self.capture_outputs or self.record_passes:
                with gil:
                    self.log_pass(i, now_ms, end_ms, progressed(r))
        if worker.num_ranks > 1 and self.ranks[first].config.prefill_interval > 0:
            self.share_interval(w)
        worker.busy_until = end_ms
        if self.watch_passes and (end_ms > now_ms or progress):
            with gil:
                self.keep_fpm(w, now_ms, end_ms)
        if end_ms > now_ms:
            worker.busy = 1
            return 1
        if progress:
            return 2
        # A pass without effect ends like any other for the ranks that ran, not for their idle siblings.
        for i in range(first, last):
            if self.ranks[i].p.num_ready >= 0:
                self.cross_boundary(w, i)
                self.show_events(i, now_ms)
        # The group tries again as long as any rank asks for it.
        for i in range(first, last):
            if self.ranks[i].p.num_ready >= 0 and engine_retries(self.ranks[i]):
                return 3
        # An idle rank whose head can never progress: end it here, so that those behind it run.
        for i in range(first, last):
            r = self.ranks[i]
            if r.p.num_ready < 0:
                continue
            reason = engine_stuck(r, &slot, &needed)
            if reason != NO_REASON and reason != NOT_ADMITTED:
                self.fail_head(w, i, now_ms)
                return 2
        return 0

    cdef void share_interval(self, int64_t w) noexcept nogil:
        """The prefill interval counts rounds of the group, not of a rank (spec/sglang.md section 6.7)."""
        cdef rank_t* r
        cdef bint prefilled = False
        cdef bint worked = False
        cdef int64_t i
        cdef int64_t first = self.workers[w].first_rank
        cdef int64_t last = first + self.workers[w].num_ranks
        for i in range(first, last):
            r = self.ranks[i]
            if r.p.num_ready >= 0:
                prefilled |= r.p.prefill_tokens > 0
                worked |= r.p.prefill_tokens > 0 or r.p.decode_ms > 0.0
        for i in range(first, last):
            r = self.ranks[i]
            if prefilled:
                r.radix.countdown = r.config.prefill_interval
            elif r.p.num_ready < 0 and r.radix.countdown > 0:
                r.radix.countdown -= 1
            if not worked and r.p.num_ready >= 0 and r.p.deferred:
                r.radix.new_token_ratio = r.config.init_ratio

    cdef bint break_livelock(self, int64_t w, double now_ms) noexcept nogil:
        """Requests that preempt each other for ever: the one that waits first ends; false if nobody waits."""
        cdef worker_t* worker = &self.workers[w]
        cdef rank_t* r
        cdef int32_t slot
        cdef int64_t i
        worker.barren = 0
        for i in range(worker.first_rank, worker.first_rank + worker.num_ranks):
            r = self.ranks[i]
            slot = r.header.waiting_head
            if slot == NO_SLOT or r.requests[slot].preemptions == 0:
                continue
            engine_fail(r, slot, STALLED)
            self.show_end(w, i, now_ms)
            return True
        return False

    cdef void fail_head(self, int64_t w, int64_t rank, double now_ms) noexcept nogil:
        engine_fail_stuck(self.ranks[rank])
        self.show_end(w, rank, now_ms)

    cdef void show_end(self, int64_t w, int64_t rank, double now_ms) noexcept nogil:
        """A request of an idle rank was ended by the driver: a pass at this instant that did nothing else."""
        cdef worker_t* worker = &self.workers[w]
        worker.busy_until = now_ms
        worker.num_ranks_run = 0
        worker.prefill_tokens = 0
        self.follow(w, rank, now_ms, now_ms)
        if self.capture_outputs:
            with gil:
                self.log_pass(rank, now_ms, now_ms, False)

    # ------------------------------------------------------------ logs

    cdef int log_pass(self, int64_t rank, double now_ms, double end_ms, bint worked) except -1:
        """Append what the captures asked for; the GIL is taken only when there is a capture."""
        cdef rank_t* r = self.ranks[rank]
        cdef RankState state = self._states[rank]
        cdef header_t* h = r.header
        cdef int64_t tokens = 0
        cdef int64_t i
        at = self.workers[self.rank_workers[rank]]
        pool, worker, dp_rank = at.pool, at.number, rank - at.first_rank
        if self.capture_admissions and r.num_admissions:
            rows = state.admissions()
            n = len(rows)
            if self.admission_count + n > len(self._admissions):
                self._admissions = _enlarged(self._admissions, self.admission_count + n)
            out = self._admissions[self.admission_count:self.admission_count + n]
            out["row"] = self.track_rows(rank, rows["slot"])
            out["at_ms"] = now_ms
            out["reused_tokens"] = rows["reused"]
            out["worker"] = worker
            out["dp_rank"] = dp_rank
            out["pool"] = pool
            out["device_tokens"] = rows["device"]
            self.admission_count += n
        if self.capture_outputs and r.num_signals and pool != POOL_PREFILL:
            rows = state.signals()
            n = len(rows)
            if self.output_count + n > len(self._outputs):
                self._outputs = _enlarged(self._outputs, self.output_count + n)
            out = self._outputs[self.output_count:self.output_count + n]
            out["row"] = self.track_rows(rank, rows["slot"])
            out["at_ms"] = end_ms
            for name in ("token", "flags", "cached"):
                out[name] = rows[name]
            out["worker"] = worker
            self.output_count += n
        if self.record_passes and worked:
            if self.pass_count == len(self._passes):
                self._passes = _enlarged(self._passes, self.pass_count + 1)
            for i in range(r.p.num_ready):
                tokens += r.burst[i]
            tokens += r.p.coasting
            self._passes[self.pass_count] = (
                now_ms, end_ms, worker, dp_rank, *state.fpm(), engine_active(r), h.num_inactive, h.num_running,
                h.num_waiting, tokens)
            self.pass_count += 1
        return 0

    def track_rows(self, int64_t rank, slots):
        """Record index of each of the rank's request rows."""
        cdef int64_t i
        rows = np.empty(len(slots), np.int64)
        for i in range(len(slots)):
            rows[i] = self.tracks[rank][<int64_t>slots[i]].row
        return rows

    # ------------------------------------------------------------ the clock

    cdef bint feed(self) noexcept nogil:
        """Release what the feed owes at this instant."""
        cdef bint any = False
        while self.feed_at < self.feed_count:
            if self.feed_cap > 0:
                if self.in_flight >= self.feed_cap:
                    break
                self.ingest(self.feed_ranks[self.feed_at], self.feed_rows[self.feed_at], self.now_ms)
            else:
                if self.feed_times[self.feed_at] > self.now_ms:
                    break
                self.ingest(
                    self.feed_ranks[self.feed_at], self.feed_rows[self.feed_at], self.feed_times[self.feed_at])
            self.feed_at += 1
            any = True
        return any

    # Binary heaps of workers: `heap` by (end of pass, order), `todo` by order.

    cdef inline bint ends_before(self, int32_t a, int32_t b) noexcept nogil:
        if self.workers[a].busy_until != self.workers[b].busy_until:
            return self.workers[a].busy_until < self.workers[b].busy_until
        return self.workers[a].order < self.workers[b].order

    cdef void heap_push(self, int32_t w) noexcept nogil:
        cdef int64_t at = self.heap_count
        cdef int64_t above
        self.heap_count += 1
        while at > 0:
            above = (at - 1) >> 1
            if not self.ends_before(w, self.heap[above]):
                break
            self.heap[at] = self.heap[above]
            at = above
        self.heap[at] = w

    cdef int32_t heap_pop(self) noexcept nogil:
        cdef int32_t top = self.heap[0]
        cdef int32_t w
        cdef int64_t at = 0
        cdef int64_t below
        self.heap_count -= 1
        w = self.heap[self.heap_count]
        while True:
            below = 2 * at + 1
            if below >= self.heap_count:
                break
            if below + 1 < self.heap_count and self.ends_before(self.heap[below + 1], self.heap[below]):
                below += 1
            if not self.ends_before(self.heap[below], w):
                break
            self.heap[at] = self.heap[below]
            at = below
        self.heap[at] = w
        return top

    cdef void queue(self, int64_t w) noexcept nogil:
        """Let an idle worker start a pass at this instant."""
        cdef int64_t at = self.todo_count
        cdef int64_t above
        cdef int64_t order = self.workers[w].order
        self.workers[w].deferred = 0
        if self.workers[w].busy or self.workers[w].queued:
            return
        self.workers[w].queued = 1
        self.todo_count += 1
        while at > 0:
            above = (at - 1) >> 1
            if order >= self.workers[self.todo[above]].order:
                break
            self.todo[at] = self.todo[above]
            at = above
        self.todo[at] = <int32_t>w

    cdef int32_t next_todo(self) noexcept nogil:
        cdef int32_t top = self.todo[0]
        cdef int32_t w
        cdef int64_t at = 0
        cdef int64_t below
        self.todo_count -= 1
        w = self.todo[self.todo_count]
        while True:
            below = 2 * at + 1
            if below >= self.todo_count:
                break
            if (below + 1 < self.todo_count
                    and self.workers[self.todo[below + 1]].order < self.workers[self.todo[below]].order):
                below += 1
            if self.workers[self.todo[below]].order >= self.workers[w].order:
                break
            self.todo[at] = self.todo[below]
            at = below
        self.todo[at] = w
        self.workers[top].queued = 0
        return top

    cdef double next_event(self) noexcept nogil:
        cdef double next_ms = INFINITY
        if self.heap_count > 0:
            next_ms = self.workers[self.heap[0]].busy_until
        if self.feed_at < self.feed_count and self.feed_cap == 0 and self.feed_times[self.feed_at] < next_ms:
            next_ms = self.feed_times[self.feed_at]
        if self.has_offload:
            next_ms = min(next_ms, self.next_deadline())
        return next_ms

    cdef double next_deadline(self) noexcept nogil:
        """When the next transfer of an idle worker ends; a busy one looks at its own when its pass ends.

        The transfers of KVBM tiers go on while their worker is busy.
        """
        cdef double next_ms = INFINITY
        cdef int64_t w
        cdef int64_t rank
        for w in range(self.num_workers):
            if not self.workers[w].live:
                continue
            for rank in range(self.workers[w].first_rank, self.workers[w].first_rank + self.workers[w].num_ranks):
                if not self.workers[w].busy or self.ranks[rank].config.tiers:
                    next_ms = min(next_ms, engine_deadline(self.ranks[rank]))
        return next_ms

    cdef void settle_transfers(self) noexcept nogil:
        """Transfers that are over at this instant, of idle workers and with KVBM tiers of busy ones."""
        cdef int64_t w
        cdef int64_t rank
        cdef rank_t* r
        for w in range(self.num_workers):
            if not self.workers[w].live:
                continue
            for rank in range(self.workers[w].first_rank, self.workers[w].first_rank + self.workers[w].num_ranks):
                r = self.ranks[rank]
                # Commands of this instant that follow.
                r.command_ms = self.now_ms
                if engine_deadline(r) > self.now_ms or (self.workers[w].busy and not r.config.tiers):
                    continue
                if self.workers[w].busy:
                    # No destination is let in, and what it shows waits for the events of the pass.
                    engine_transport(r, self.now_ms)
                    continue
                if not engine_internal_work(r, self.now_ms):
                    continue
                if r.config.tiers:
                    self.retry_pending(w, rank)
                self.show_events(rank, self.now_ms)
                if self.watch_gauges:
                    self.read_gauge(rank, False)
                self.queue(w)

    cdef void advance(self, double now_ms) noexcept nogil:
        """Go to an instant and end the passes that end at it, by pool and worker."""
        self.now_ms = now_ms
        self.wake_idle()
        if self.has_offload:
            self.settle_transfers()
        while self.heap_count > 0 and self.workers[self.heap[0]].busy_until <= now_ms:
            self.complete(self.heap_pop())

    cdef void wake_idle(self) noexcept nogil:
        """Let workers whose pass did nothing try again."""
        cdef int64_t i
        for i in range(self.idle_count):
            self.workers[self.idle[i]].listed = 0
            if self.workers[self.idle[i]].deferred and self.workers[self.idle[i]].live:
                self.queue(self.idle[i])
        self.idle_count = 0

    cdef int start_passes(self, int64_t* budget) noexcept nogil:
        """Idle workers start passes, lowest first, until none does anything or something was noted."""
        cdef int32_t w
        cdef int result
        while self.todo_count > 0 and self.note_count == 0:
            w = self.next_todo()
            if self.workers[w].busy or not self.workers[w].live:
                continue
            if unlikely(not self.has_room(w)):
                with gil:
                    self.make_room(w)
            result = self.drive(w, self.now_ms)
            if result < 0:
                return -1
            if result == 1:
                self.heap_push(w)
                budget[0] -= self.num_stretched
            elif result == 2:
                self.complete(w)
                budget[0] -= 1
            elif result == 3:
                self.queue(w)
                budget[0] -= 1
            elif result == 0:
                self.workers[w].deferred = 1
                if not self.workers[w].listed:
                    self.workers[w].listed = 1
                    self.idle[self.idle_count] = w
                    self.idle_count += 1
        return 0

    cdef void catch_clock(self) noexcept nogil:
        """Nothing is left before the end of a call: passes that ran ahead of the clock are the last that happened."""
        if self.ahead_ms > self.now_ms:
            self.now_ms = self.ahead_ms

    cdef int loop(self, double until_ms, double cap_ms, bint hold, int64_t slice_passes) noexcept nogil:
        cdef double next_ms
        cdef int64_t budget = slice_passes
        cdef int result
        while self.now_ms < until_ms:
            self.feed()
            self.ended = False
            self.stop_ms = min(until_ms, cap_ms)
            result = self.start_passes(&budget)
            self.stop_ms = -INFINITY
            if result < 0:
                return STOP_FAILED
            if self.note_count > 0:
                return STOP_STARTING
            if self.ended and self.feed():
                continue
            next_ms = self.next_event()
            if next_ms > cap_ms and until_ms > cap_ms and (next_ms < INFINITY or until_ms < INFINITY):
                self.catch_clock()
                return STOP_CAP
            if next_ms > until_ms or next_ms == INFINITY:
                self.catch_clock()
                if until_ms < INFINITY and not hold:
                    self.advance(until_ms)
                return STOP_UNTIL
            if next_ms == until_ms and hold:
                self.catch_clock()
                return STOP_UNTIL
            if budget <= 0:
                return STOP_SLICE
            self.advance(next_ms)
            if self.note_count > 0:
                return STOP_NOTED
        return STOP_UNTIL

    def run(self, double until_ms=INFINITY, double cap_ms=INFINITY, bint hold=False, int64_t slice_passes=1 << 40):
        """Let time pass: idle workers start passes at this instant, then the next event happens, and so on.

        Parameters
        ----------
        until_ms : float
            Stop at this instant, with its completions applied and no pass started.
        cap_ms : float
            Events later than this never happen.
        hold : bool
            Do not let the clock reach `until_ms`: stop after the last event before it, its passes started.
        slice_passes : int
            Return after about this many passes.

        Returns
        -------
        int
            0: nothing is left before `until_ms`; 1: something was noted, at an instant whose completions are applied
            and whose passes have not started; 2: the slice is used up; 3: the cap is reached; 5: passes without
            duration left notes, `start` goes on.
        """
        cdef int result
        self._begin_call()
        with nogil:
            result = self.loop(until_ms, cap_ms, hold, slice_passes)
        self._end_call()
        return result

    def start(self, bint again=False):
        """Start passes at this instant without letting time pass; true if something was noted meanwhile.

        Workers whose pass at this instant did nothing try once more with `again`.
        """
        cdef int64_t budget = 0
        if again:
            self.wake_idle()
        self._begin_call()
        with nogil:
            self.start_passes(&budget)
        self._end_call()
        return self.note_count > 0

    def _begin_call(self):
        for state in self._states:
            if state is not None:
                (<RankState>state)._outgrown.clear()
        for _, owner in self._tier_owners:
            (<RankState>owner)._outgrown.clear()

    def _end_call(self):
        # A submission cannot stop the loop: what a policy raised there is found here.
        for state in self._states:
            if state is not None and (<RankState>state).error is not None:
                raise (<RankState>state).take_error()

    def next_event_ms(self):
        """When the next pass or transfer ends or the feed releases something; infinity if never."""
        return self.next_event()

    def fail_stuck(self):
        """Unblock one rank; false if none is blocked. For when nothing else can happen.

        A request whose prompt came with a handoff passes the head that waits for
        its blocks; if there is none, a head that its policy never admits ends.
        """
        cdef int64_t needed
        cdef int64_t rank
        cdef int64_t w
        cdef int32_t slot
        for rank in range(self.num_ranks):
            w = self.rank_workers[rank]
            if self.workers[w].live and not self.workers[w].busy and engine_unblock(self.ranks[rank]):
                self.queue(w)
                return True
        for rank in range(self.num_ranks):
            w = self.rank_workers[rank]
            if (self.workers[w].live and not self.workers[w].busy
                    and engine_stuck(self.ranks[rank], &slot, &needed) != NO_REASON):
                self.make_room(w)
                self.fail_head(w, rank, self.now_ms)
                self.complete(w)
                return True
        return False

    # ------------------------------------------------------------ handoffs without Python
    #
    # What `kvsim.replay.system.System` does in a disaggregated run with its default options, in the same order: round
    # robin over all ranks of a pool, one transfer time, nobody who looks on. The tables are the coordinator's.

    def set_leads(self, rows, times, int64_t concurrency, facts, outcomes, turns, hints, transfer, bint capture_routes):
        """Lead the handoffs of a run; `lead` then takes the place of `run`.

        Parameters
        ----------
        rows : ndarray of int64
            In order of release.
        times : ndarray of float64
            When; ignored with `concurrency`.
        concurrency : int
            0: open loop.
        facts, outcomes : ndarray of int32
            Of `replay.coordinator.kernel_tables`.
        turns : sequence of (int, int, int)
            Of the prefill and the decode pool: workers, ranks of each, the turn.
        hints : sequence of ndarray of int32
            Of both pools: the rank that each row asks for, -1: any.
        transfer : (bool, int, float, float)
            Whether only what the destination lacks is sent; bytes of a token, -1: not known; GB/s; ms where bytes are
            not known.
        capture_routes : bool
            Keep the placements.
        """
        cdef int64_t i
        cdef int64_t first = 0
        self._leads = np.zeros(self.num_records * sizeof(lead_t), np.uint8)
        self.leads = <lead_t*>cnp.PyArray_DATA(<cnp.ndarray>self._leads)
        self._lead_rows, self._lead_times = rows, times
        self.lead_rows = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>rows)
        self.lead_times = <double*>cnp.PyArray_DATA(<cnp.ndarray>times)
        self.lead_count, self.lead_at, self.lead_cap, self.inside = len(rows), 0, concurrency, 0
        self._lead_facts, self._lead_outcomes = facts, outcomes
        self.lead_facts = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>facts)
        self.lead_outcomes = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>outcomes)
        self._hints = tuple(hints)
        for i in range(2):
            self.hints[i] = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>self._hints[i])
            self.lead_turns[i].first_rank = first
            self.lead_turns[i].num_workers, self.lead_turns[i].dp_size, self.lead_turns[i].turn = turns[i]
            first += self.lead_turns[i].num_workers * self.lead_turns[i].dp_size
        self.by_missing, self.transfer_bytes, self.transfer_gbps, self.transfer_ms = transfer
        self._acts = self._transfers = self._routes = None
        self.act_cap, self.act_free = 0, -1
        self.grow_acts()
        self.transfer_cap = self.transfer_count = 0
        self.grow_transfers()
        self.route_cap = self.route_count = 0
        if capture_routes:
            self.grow_routes()
        self.actions.head = self.arrived.head = -1
        self._deferred = np.full(2 * self.num_ranks, -1, np.int32)
        self.deferred = <queue_t*>cnp.PyArray_DATA(<cnp.ndarray>self._deferred)
        self.lead_error = None

    def lead(self, double cap_ms=INFINITY, int64_t slice_passes=1 << 40):
        """Let time pass until all requests have ended.

        Returns
        -------
        int
            0: all is over; 2: about `slice_passes` passes were made; 3: the cap is reached; 6: requests are left, but
            nothing happens any more.
        """
        cdef int result
        self._begin_call()
        with nogil:
            result = self.lead_loop(cap_ms, slice_passes)
        self._end_call()
        self._check_lead()
        return result

    def settle_leads(self):
        """All that happens at this instant."""
        self._begin_call()
        with nogil:
            self.lead_settle(False)
        self._end_call()
        self._check_lead()

    def stuck_lead(self):
        """The first request that waits for ever: (row, state of its handoff), or None."""
        cdef int64_t row
        for row in range(self.num_records):
            if self.leads[row].live and not self.lead_over(row) and self.records[row].status == RUN_UNFINISHED:
                return row, self.leads[row].state
        return None

    def fail_lead(self, int64_t row):
        """A handoff is given up; `settle_leads` cleans up."""
        self.lead_fact(row, FACT_FAILED)
        self._check_lead()

    def take_routes(self):
        """Placements so far, in order: int64 (row, worker, rank of the worker, pool), shape (n, 4)."""
        return self._routes[:4 * self.route_count].reshape(-1, 4).copy()

    def _check_lead(self):
        if self.lead_error is not None:
            raise RuntimeError(self.lead_error)

    cdef int grow_acts(self) except -1:
        cdef int32_t i
        cdef int32_t before = self.act_cap
        self.act_cap = max(1024, 2 * before)
        self._acts = _longer(self._acts, self.act_cap * sizeof(act_t), np.uint8)
        self.acts = <act_t*>cnp.PyArray_DATA(<cnp.ndarray>self._acts)
        for i in range(before, self.act_cap):
            self.acts[i].next = self.act_free
            self.act_free = i
        return 0

    cdef int grow_transfers(self) except -1:
        self.transfer_cap = max(256, 2 * self.transfer_cap)
        self._transfers = _longer(self._transfers, self.transfer_cap * sizeof(transfer_t), np.uint8)
        self.transfers = <transfer_t*>cnp.PyArray_DATA(<cnp.ndarray>self._transfers)
        return 0

    cdef int grow_routes(self) except -1:
        self.route_cap = max(1024, 2 * self.route_cap)
        self._routes = _longer(self._routes, 4 * self.route_cap, np.int64)
        self.routes = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>self._routes)
        return 0

    cdef int refuse_lead(self, int64_t row, what) except -1:
        if self.lead_error is None:
            self.lead_error = f"handoff {row}: {what} comes in state {self.leads[row].state}"
        return 0

    cdef void push_act(self, queue_t* queue, int64_t row, int32_t action) noexcept nogil:
        cdef int32_t at
        if unlikely(self.act_free < 0):
            with gil:
                self.grow_acts()
        at = self.act_free
        self.act_free = self.acts[at].next
        self.acts[at].row = row
        self.acts[at].action = action
        self.acts[at].next = -1
        if queue.head < 0:
            queue.head = at
        else:
            self.acts[queue.tail].next = at
        queue.tail = at

    cdef void move_acts(self, queue_t* queue) noexcept nogil:
        """Append a list to the actions to carry out; it is empty then."""
        if queue.head < 0:
            return
        if self.actions.head < 0:
            self.actions.head = queue.head
        else:
            self.acts[self.actions.tail].next = queue.head
        self.actions.tail = queue.tail
        queue.head = -1

    cdef inline bint lead_over(self, int64_t row) noexcept nogil:
        """Nothing is to be done any more for a handoff."""
        return self.leads[row].state == LEAD_DONE or self.leads[row].state == LEAD_ABANDONED

    cdef void take_step(self, queue_t* queue, int64_t row, int32_t step) noexcept nogil:
        """A step of a handoff: its next state, and the actions that follow."""
        self.leads[row].state = step & 255
        if (step >> 8) & 255 > 0:
            self.push_act(queue, row, (step >> 16) & 15)
        if (step >> 8) & 255 > 1:
            self.push_act(queue, row, (step >> 20) & 15)

    cdef void lead_fact(self, int64_t row, int32_t fact) noexcept nogil:
        cdef int32_t step = self.lead_facts[self.leads[row].state * NUM_FACTS + fact]
        if step >= 0:
            self.take_step(&self.actions, row, step)
        elif step == STEP_REFUSED:
            with gil:
                self.refuse_lead(row, f"fact {fact}")

    cdef void lead_outcome(self, int64_t row, int32_t action, int32_t outcome) noexcept nogil:
        cdef int32_t step = self.lead_outcomes[(self.leads[row].state * NUM_ACTIONS + action) * NUM_OUTCOMES + outcome]
        if step >= 0:
            self.take_step(&self.actions, row, step)
        elif step == STEP_REFUSED:
            with gil:
                self.refuse_lead(row, f"outcome {outcome} of action {action}")

    cdef int64_t lead_place(self, int64_t pool, int64_t row) noexcept nogil:
        """Rank of a half: the next in turn, or the next with the number that the request asks for."""
        cdef turn_t* turn = &self.lead_turns[pool]
        cdef int64_t hint = self.hints[pool][row]
        cdef int64_t ranks = turn.dp_size if hint < 0 else 1
        cdef int64_t at = turn.turn % (turn.num_workers * ranks)
        cdef int64_t worker = at // ranks
        cdef int64_t dp_rank = at % ranks if hint < 0 else hint
        turn.turn = at + 1
        if self.routes != NULL:
            if unlikely(self.route_count == self.route_cap):
                with gil:
                    self.grow_routes()
            self.routes[4 * self.route_count] = row
            self.routes[4 * self.route_count + 1] = worker
            self.routes[4 * self.route_count + 2] = dp_rank
            self.routes[4 * self.route_count + 3] = POOL_PREFILL if pool == 0 else POOL_DECODE
            self.route_count += 1
        return turn.first_rank + worker * turn.dp_size + dp_rank

    cdef void lead_end_early(self, int64_t row, int32_t status) noexcept nogil:
        """A request ends before its decode half has run."""
        if self.records[row].status == RUN_UNFINISHED:
            self.records[row].status = status
            self.records[row].terminal_ms = self.now_ms

    cdef void lead_retire(self, int64_t row) noexcept nogil:
        if self.leads[row].ended and self.leads[row].live and self.lead_over(row):
            self.leads[row].live = 0
            self.forget(POOL_PREFILL, row)
            self.forget(POOL_DECODE, row)

    cdef void lead_reserved(self, int64_t rank, int32_t slot) noexcept nogil:
        """A command made room for the first pending destination of its rank; NO_SLOT: it did not."""
        cdef int64_t row
        if slot >= 0:
            row = self.reserved(rank, slot)
            self.leads[row].tokens = self.ranks[rank].handoffs[slot].transferable
            self.lead_fact(row, FACT_RESERVED)

    cdef void lead_notes(self) noexcept nogil:
        """Deal with what the engines showed, in order."""
        cdef int64_t i
        cdef int64_t k
        cdef const note_t* n
        cdef const worker_t* worker
        cdef lead_t* lead
        for i in range(self.note_count):
            n = &self.notes[i]
            if n.kind == NOTE_WOKEN:
                worker = &self.workers[n.worker]
                for k in range(worker.first_rank, worker.first_rank + worker.num_ranks):
                    self.move_acts(&self.deferred[k])
                continue
            lead = &self.leads[n.row]
            if not lead.live or n.kind == NOTE_FIRST:
                continue
            if n.kind == NOTE_HELD:
                self.lead_fact(n.row, FACT_HELD)
            elif n.kind == NOTE_RESERVED:
                lead.tokens = n.value
                self.lead_fact(n.row, FACT_RESERVED)
            elif n.pool == POOL_DECODE:
                lead.decode_slot = -1
                lead.ended = 1
                self.inside -= 1
                self.lead_retire(n.row)
            else:
                # The prefill half ended without being held.
                lead.prefill_slot = -1
                self.lead_end_early(n.row, n.status)
                self.lead_fact(n.row, FACT_FAILED)
        self.note_count = 0

    cdef void lead_enter(self, int64_t row, int32_t action) noexcept nogil:
        """Place a half and hand it to its rank."""
        cdef lead_t* lead = &self.leads[row]
        cdef double arrival_ms = self.records[row].arrival_ms
        cdef int64_t rank
        cdef int32_t slot
        if action == ACT_SUBMIT:
            rank = self.lead_place(0, row)
            lead.prefill_rank = <int32_t>rank
            lead.prefill_slot = self.enter_prefill(rank, row, arrival_ms)
            self.lead_outcome(row, action, OUT_SUBMITTED)
            return
        rank = self.lead_place(1, row)
        slot = self.enter_reservation(rank, row, arrival_ms)
        if slot < 0:
            self.lead_end_early(row, RUN_FAILED)
            self.lead_outcome(row, action, OUT_FAILED)
            return
        lead.decode_rank = <int32_t>rank
        lead.decode_slot = slot
        self.lead_outcome(row, action, OUT_ACCEPTED)
        if not self.workers[self.rank_workers[rank]].busy:
            self.lead_reserved(rank, engine_retry(self.ranks[rank]))

    cdef double lead_delay(self, int64_t row) noexcept nogil:
        """How long the KV of a prompt is on the wire."""
        cdef int64_t tokens = self.leads[row].tokens if self.by_missing else self.records[row].input_tokens
        if self.transfer_bytes < 0:
            return self.transfer_ms
        return <double>(tokens * self.transfer_bytes) / (self.transfer_gbps * 1e9) * 1000.0

    cdef void lead_transfer(self, int64_t row) noexcept nogil:
        """Start a transfer; one that takes no time is over."""
        cdef double delay = self.lead_delay(row)
        cdef double end_ms = self.now_ms + delay
        cdef int64_t at = self.transfer_count
        cdef int64_t above
        self.lead_outcome(row, ACT_TRANSFER, OUT_SCHEDULED)
        if not delay > 0.0:
            self.lead_fact(row, FACT_TRANSFERRED)
            return
        if unlikely(at == self.transfer_cap):
            with gil:
                self.grow_transfers()
        self.transfer_count += 1
        while at > 0:
            above = (at - 1) >> 1
            if not lands_before(end_ms, row, &self.transfers[above]):
                break
            self.transfers[at] = self.transfers[above]
            at = above
        self.transfers[at].end_ms = end_ms
        self.transfers[at].row = row

    cdef int64_t pop_transfer(self) noexcept nogil:
        cdef int64_t row = self.transfers[0].row
        cdef transfer_t last
        cdef int64_t at = 0
        cdef int64_t below
        self.transfer_count -= 1
        last = self.transfers[self.transfer_count]
        while True:
            below = 2 * at + 1
            if below >= self.transfer_count:
                break
            if below + 1 < self.transfer_count and lands_before(
                    self.transfers[below + 1].end_ms, self.transfers[below + 1].row, &self.transfers[below]):
                below += 1
            if not lands_before(self.transfers[below].end_ms, self.transfers[below].row, &last):
                break
            self.transfers[at] = self.transfers[below]
            at = below
        self.transfers[at] = last
        return row

    cdef void lead_command(self, int64_t row, int32_t action) noexcept nogil:
        """A command to the rank that has a half; deferred while its worker is in a pass."""
        cdef lead_t* lead = &self.leads[row]
        cdef bint source = action == ACT_RELEASE or action == ACT_CANCEL_SOURCE
        cdef int64_t rank = lead.prefill_rank if source else lead.decode_rank
        cdef int32_t slot = lead.prefill_slot if source else lead.decode_slot
        cdef rank_t* r
        cdef int64_t w
        if slot < 0:
            self.lead_outcome(row, action, OUT_NOOP)
            return
        w = self.rank_workers[rank]
        if self.workers[w].busy:
            self.workers[w].watched = 1
            self.push_act(&self.deferred[rank], row, action)
            return
        r = self.ranks[rank]
        if action == ACT_ACTIVATE:
            engine_activate(r, slot)
            self.handoffs[row].destination_activated_ms = self.now_ms
        elif action == ACT_RELEASE:
            engine_release_source(r, slot)
            self.handoffs[row].source_released_ms = self.now_ms
        elif action == ACT_CANCEL_SOURCE:
            engine_cancel_source(r, slot)
        else:
            engine_cancel_destination(r, slot)
        if source:
            lead.prefill_slot = -1
        elif action == ACT_CANCEL_DESTINATION:
            lead.decode_slot = -1
        slot = engine_retry(r)
        self.show_events(rank, self.now_ms)
        self.queue(w)
        self.lead_outcome(row, action, OUT_APPLIED)
        self.lead_reserved(rank, slot)

    cdef void lead_act(self) noexcept nogil:
        """Carry out actions, first come first served."""
        cdef int32_t at
        cdef int32_t action
        cdef int64_t row
        while self.actions.head >= 0:
            at = self.actions.head
            row = self.acts[at].row
            action = self.acts[at].action
            self.actions.head = self.acts[at].next
            self.acts[at].next = self.act_free
            self.act_free = at
            if action <= ACT_RESERVE:
                self.lead_enter(row, action)
            elif action == ACT_TRANSFER:
                self.lead_transfer(row)
            elif action == ACT_COMPLETE:
                self.lead_retire(row)
            elif action == ACT_COMPLETE_CANCELED:
                if not self.leads[row].ended:
                    self.lead_end_early(row, RUN_CANCELLED)
                    self.leads[row].ended = 1
                    self.inside -= 1
                    self.lead_retire(row)
            else:
                self.lead_command(row, action)

    cdef void lead_arrivals(self) noexcept nogil:
        """Release what arrives now; it acts last of all: the passes of this instant do not contain it."""
        cdef int64_t row
        cdef lead_t* lead
        while self.lead_at < self.lead_count:
            if self.lead_cap > 0:
                if self.inside >= self.lead_cap:
                    return
            elif self.lead_times[self.lead_at] > self.now_ms:
                return
            row = self.lead_rows[self.lead_at]
            self.records[row].arrival_ms = self.now_ms if self.lead_cap > 0 else self.lead_times[self.lead_at]
            self.lead_at += 1
            self.inside += 1
            lead = &self.leads[row]
            lead.live = 1
            lead.prefill_rank = lead.prefill_slot = lead.decode_rank = lead.decode_slot = -1
            # The first step stands where the first fact of a new handoff would.
            self.take_step(&self.arrived, row, self.lead_facts[0])

    cdef int lead_start(self) noexcept nogil:
        """Idle workers start passes until none does anything; 1 if one was over at once and showed something."""
        cdef int64_t budget = 0
        cdef int64_t rounds = 0
        cdef int showed = self.note_count > 0
        self.lead_notes()
        self.wake_idle()
        while True:
            if self.start_passes(&budget) < 0:
                return -1
            if self.note_count == 0:
                return showed
            showed = 1
            self.lead_notes()
            rounds += 1
            if rounds > MOST_ROUNDS:
                with gil:
                    self.lead_error = f"the run does not leave {self.now_ms} ms: passes without duration follow each other"
                return -1

    cdef int lead_settle(self, bint starting) noexcept nogil:
        """Everything that happens at this instant, until nothing changes; as `System._settle`."""
        cdef int changed
        while True:
            if not starting:
                self.lead_notes()
                while self.transfer_count > 0 and self.transfers[0].end_ms <= self.now_ms:
                    self.lead_fact(self.pop_transfer(), FACT_TRANSFERRED)
                self.lead_act()
                self.lead_arrivals()
            starting = False
            changed = self.lead_start()
            if changed < 0 or self.lead_error is not None:
                return -1
            if self.arrived.head >= 0:
                self.move_acts(&self.arrived)
                changed = 1
            if not changed:
                return 0

    cdef int lead_loop(self, double cap_ms, int64_t slice_passes) noexcept nogil:
        cdef int64_t before = self.passes
        cdef double until_ms
        cdef double next_ms
        cdef int status
        while self.inside > 0 or self.lead_at < self.lead_count:
            until_ms = INFINITY
            if self.lead_cap == 0 and self.lead_at < self.lead_count:
                until_ms = self.lead_times[self.lead_at]
            if self.transfer_count > 0:
                until_ms = min(until_ms, self.transfers[0].end_ms)
            next_ms = min(until_ms, self.next_event())
            if next_ms == INFINITY:
                return STOP_STUCK
            if next_ms > cap_ms:
                self.catch_clock()
                return STOP_CAP
            status = self.loop(until_ms, cap_ms, False, slice_passes)
            if status == STOP_FAILED or status == STOP_CAP:
                return status
            if status != STOP_SLICE and self.lead_settle(status == STOP_STARTING) < 0:
                return STOP_FAILED
            if self.passes - before >= slice_passes:
                return STOP_SLICE
        return STOP_UNTIL

    def finish(self):
        """Fold what is left and clean the records of requests that did not end.

        Returns
        -------
        (admissions, outputs, passes)
            Logs up to now.
        """
        cdef int64_t w
        cdef int64_t i
        cdef int64_t slot
        cdef track_t* t
        cdef request_record_t* record
        now = self.now_ms
        for w in range(self.num_workers):
            if not self.workers[w].live:
                continue
            for i in range(self.workers[w].num_ends):
                if self.ends[w][i].kind != NOTE_FIRST:
                    # Of a pass that never ended: what it showed is not there.
                    self.records[self.ends[w][i].track.row].preemptions += self.ends[w][i].preemptions
                    self.leave(w, self.ends[w][i].rank, &self.ends[w][i].track, now)
            self.workers[w].num_ends = 0
            for i in range(self.workers[w].first_rank, self.workers[w].first_rank + self.workers[w].num_ranks):
                engine_sync(self.ranks[i])
                for slot in range(min(self.ranks[i].header.high_water, self.track_caps[i])):
                    # What a held source did was written when it was held.
                    if self.ranks[i].requests[slot].status not in (FREE, HELD_SOURCE):
                        t = &self.tracks[i][slot]
                        if self.coast and self.workers[w].pool != POOL_PREFILL:
                            catch_up(t, self.ranks[i].requests[slot].generated)
                        self.records[t.row].preemptions += self.ranks[i].requests[slot].preemptions
                        self.leave(w, i, t, now)
                        t.first_pass = -1
                self.fold(i)
        self.flush_odd()
        if self.zero_gaps:
            self._histogram.add(np.zeros(1, np.int64), np.array([self.zero_gaps], np.int64))
            self.zero_gaps = 0
        admissions = self._admissions[:self.admission_count]
        outputs = self._outputs[:self.output_count]
        passes = self._passes[:self.pass_count]
        outputs = outputs[outputs["at_ms"] <= now]
        if self.num_workers > 1:
            # Logged when a pass starts, visible when it ends.
            outputs = outputs[np.argsort(outputs["at_ms"], kind="stable")]
        return admissions, outputs, passes[passes["end_ms"] <= now]

    cdef void leave(self, int64_t w, int64_t rank, const track_t* t, double now_ms) noexcept:
        """Write the record of a request that did not end, without what lies beyond the end of the run."""
        cdef request_record_t* record = &self.records[t.row]
        cdef double last_ms = self.run_end(rank, t.last, t.start_ms)
        cdef const span_t* span
        record.recomputed_tokens += t.recomputed
        if self.workers[w].pool == POOL_PREFILL:
            return
        record.output_tokens = t.emitted
        if t.emitted == 0:
            return
        if last_ms > now_ms:
            # Only the newest pass can be in flight: the emission before it, if any, is visible.
            record.output_tokens -= t.burst
            if t.start < t.last:
                last_ms = self.run_end(rank, t.last - 1, t.start_ms)
            elif t.spans >= 0:
                span = &self.spans[t.spans]
                last_ms = self.run_end(rank, span.last, span.start_ms)
            if record.first_token_ms > now_ms:
                record.first_token_ms = NAN
            if record.second_token_ms > now_ms:
                record.second_token_ms = NAN
        if record.output_tokens > 0:
            record.last_token_ms = last_ms


def _longer(array, n, dtype):
    """Zeroed array of `n` entries that starts with those of `array`, which may be None."""
    longer = np.zeros(n, dtype)
    if array is not None:
        longer[:len(array)] = array
    return longer


def _enlarged(array, need):
    """Copy of a log with at least `need` rows, its capacity doubled."""
    larger = np.zeros(max(1024, 2 * len(array), need), array.dtype)
    larger[:len(array)] = array
    return larger


def check_layout():
    """Compare the C structs of the result rows with their dtypes; see `state.check_layout`."""
    cdef dict fields
    for name, size in (("REQUEST_RECORD", sizeof(request_record_t)), ("HANDOFF_RECORD", sizeof(handoff_record_t))):
        dtype = getattr(layout, name)
        row = ((np.arange(dtype.itemsize) * 37 + 11) % 61 + 1).astype(np.uint8)
        if name == "REQUEST_RECORD":
            fields = (<request_record_t*>cnp.PyArray_DATA(<cnp.ndarray>row))[0]
        else:
            fields = (<handoff_record_t*>cnp.PyArray_DATA(<cnp.ndarray>row))[0]
        if dtype.itemsize != size:
            raise ImportError(f"kvsim.layout.{name} and the compiled struct differ in size")
        if tuple(fields) != dtype.names or any(fields[key] != row.view(dtype)[0][key] for key in dtype.names):
            raise ImportError(f"kvsim.layout.{name} and the compiled struct differ in their fields")


check_layout()
