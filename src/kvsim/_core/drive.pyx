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
# Token times are not stored one by one. Each worker keeps the end of each of
# its passes; a request keeps the passes between which it emitted without a
# break. When it completes, a difference array over the passes gets +1 where
# its run of gaps starts and -1 where it ends, so the multiset of all gaps
# between tokens is the pass lengths weighted by the sums of that array: exact,
# and O(1) per request. Passes older than every live request are folded into
# the histogram and forgotten.

cimport numpy as cnp
from libc.math cimport INFINITY, NAN, llrint
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove, memset

import numpy as np

from kvsim import layout
from kvsim._core.engine cimport (
    engine_active, engine_boundary, engine_deadline, engine_drained, engine_emit, engine_events_shown, engine_fail, engine_fail_stuck,
    engine_internal_work, engine_register_source, engine_runnable,
    engine_reserve, engine_reserve_error, engine_retries, engine_retry, engine_schedule, engine_stuck, engine_submit,
    engine_transport, engine_unblock, engine_visible_events, engine_waiting,
)
from kvsim._core.signals cimport progressed
from kvsim._core.state cimport RankState
from kvsim._core.types cimport (
    COMPLETED, FAILED, FREE, HELD, HELD_SOURCE, NOT_ADMITTED, NO_REASON, NO_SLOT, PASS_OK, POOL_DECODE, POOL_PREFILL, RADIX,
    REJECTED, RUN_COMPLETED, RUN_FAILED, RUN_REJECTED, STALLED, admission_t, content_t, event_block_t, event_t, handoff_record_t, header_t, likely, rank_t,
    request_record_t, request_spec_t, run_t, signal_t, unlikely,
)

cnp.import_array()

cdef enum stop_reason:
    STOP_UNTIL = 0     # the next event lies at or after `until`
    STOP_NOTED = 1     # something of this instant is for Python
    STOP_SLICE = 2     # enough passes for one call
    STOP_CAP = 3       # the next event lies beyond the cap of simulated time
    STOP_FAILED = 4    # a callback raised
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
    int64_t first_pass            # first pass in which it emitted, -1: none
    int64_t start                 # first pass of the unbroken run of emissions that is open
    int64_t last                  # last pass in which it emitted
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
    int32_t next
    int32_t unused

cdef struct end_t:  # what a pass that is still in flight did to a request
    track_t track
    int32_t status                # run_status
    int32_t reason
    int32_t preemptions
    int32_t kind                  # note_kind
    int64_t needed

cdef struct worker_t:
    double busy_until
    int64_t order                 # pool, then number in it
    int64_t first_rank
    int64_t num_ranks
    int64_t log_base              # number of the first pass in the log
    int64_t log_count
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

cdef enum:
    CHUNK = 256
    # Preempting passes without a token in between, after which requests are held to preempt each other for ever.
    MOST_BARREN = 1000

# Passes kept per worker before they are folded, and the growth of that window.
DEF WINDOW = 16384


cdef inline bint counts_down(const rank_t* r) noexcept nogil:
    """Whether a prefill interval is not over (spec/sglang.md section 6.7)."""
    return r.config.engine == RADIX and r.radix.countdown > 0


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

    Notes
    -----
    Ranks are numbered in the order in which they were added, over all workers;
    so are workers. A pool has numbers of its own, which decide the order inside
    one instant.
    """

    cdef list _states
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
    cdef double** log_ends
    cdef int64_t** log_weights
    cdef object _log_pointers
    cdef object _weight_pointers
    cdef object _log_caps
    cdef int64_t* log_caps
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
                 record_passes=False, capture_offload=False, watch_gauges=False, watch_passes=False):
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
        self._fpm_open, self._fpm = {}, {}
        self._tracks, self._end_memory, self._log_memory, self._log_weights = [], [], [], []
        # Per worker: weight that runs on into the window, and the end of the pass before it.
        self._carry = []
        self._rank_memory = self._rank_workers = self._track_pointers = self._track_caps = self._gauges = None
        self._worker_memory = self._heap = self._todo = self._idle = None
        self._end_pointers = self._end_caps = self._log_pointers = self._weight_pointers = self._log_caps = None
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
            self.ranks[first + i].want_offload = self.capture_offload
            self.has_offload |= self.ranks[first + i].config.offload != 0
            self.rank_workers[first + i] = w
            memset(&self.gauge_rows[first + i], 0, sizeof(gauge_t))
        self.num_ranks += len(states)
        self._end_memory.append(None)
        self.ends[w] = NULL
        self.end_caps[w] = 0
        self._log_memory.append(None)
        self._log_weights.append(None)
        self._carry.append((0, 0.0))
        self.num_workers += 1
        self._grow_log(w, 1024)
        return w, first

    def remove_worker(self, int64_t w):
        """Forget a worker that is idle and has no request; its numbers are not used again."""
        cdef worker_t* worker = &self.workers[w]
        cdef int64_t i
        if not worker.live or worker.busy:
            raise ValueError(f"worker {w} is busy or already removed")
        self.fold(w)
        worker.live = 0
        for i in range(worker.first_rank, worker.first_rank + worker.num_ranks):
            self._states[i] = None
            self._tracks[i] = None
            self.ranks[i] = NULL
            self.tracks[i] = NULL
            self.track_caps[i] = 0
        self._log_memory[w] = self._log_weights[w] = self._end_memory[w] = None

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
        self._log_pointers = _longer(self._log_pointers, cap, np.uintp)
        self._weight_pointers = _longer(self._weight_pointers, cap, np.uintp)
        self._log_caps = _longer(self._log_caps, cap, np.int64)
        self.workers = <worker_t*>cnp.PyArray_DATA(<cnp.ndarray>self._worker_memory)
        self.heap = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>self._heap)
        self.todo = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>self._todo)
        self.idle = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>self._idle)
        self.ends = <end_t**>cnp.PyArray_DATA(<cnp.ndarray>self._end_pointers)
        self.end_caps = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>self._end_caps)
        self.log_ends = <double**>cnp.PyArray_DATA(<cnp.ndarray>self._log_pointers)
        self.log_weights = <int64_t**>cnp.PyArray_DATA(<cnp.ndarray>self._weight_pointers)
        self.log_caps = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>self._log_caps)
        self.worker_cap = cap

    def _reserve_ranks(self, int64_t cap):
        self._rank_memory = _longer(self._rank_memory, cap, np.uintp)
        self._rank_workers = _longer(self._rank_workers, cap, np.int32)
        self._track_pointers = _longer(self._track_pointers, cap, np.uintp)
        self._track_caps = _longer(self._track_caps, cap, np.int64)
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

    def _grow_log(self, int64_t w, int64_t cap):
        """Room for `cap` passes in the window of worker `w`."""
        ends = np.zeros(cap, np.float64)
        weights = np.zeros(cap + 2, np.int64)
        if self._log_memory[w] is not None:
            ends[:len(self._log_memory[w])] = self._log_memory[w]
            weights[:len(self._log_weights[w])] = self._log_weights[w]
        self._log_memory[w], self._log_weights[w] = ends, weights
        self.log_ends[w] = <double*>cnp.PyArray_DATA(<cnp.ndarray>ends)
        self.log_weights[w] = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>weights)
        self.log_caps[w] = cap

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
        if self.end_caps[w] < self.workers[w].num_ends + 2 * live:
            self.reserve_ends(w, 2 * (self.workers[w].num_ends + 2 * live))
        if self.workers[w].log_count >= self.log_caps[w]:
            self.fold(w)
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
        return (self.end_caps[w] >= self.workers[w].num_ends + 2 * live
                and self.workers[w].log_count < self.log_caps[w]
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

    cdef int fold(self, int64_t w) except -1:
        """Move passes that no live request refers to from the window of `w` into the histogram."""
        cdef worker_t* worker = &self.workers[w]
        cdef int64_t oldest = worker.log_base + worker.log_count
        cdef int64_t i
        cdef int64_t slot
        cdef int64_t count
        cdef const track_t* t
        for i in range(worker.first_rank, worker.first_rank + worker.num_ranks):
            for slot in range(min(self.ranks[i].header.high_water, self.track_caps[i])):
                if self.ranks[i].requests[slot].status != 0:
                    t = &self.tracks[i][slot]
                    if t.first_pass >= 0 and t.first_pass < oldest:
                        oldest = t.first_pass
        for i in range(worker.num_ends):
            t = &self.ends[w][i].track
            if t.first_pass >= 0 and t.first_pass < oldest:
                oldest = t.first_pass
        count = oldest - worker.log_base
        if count > 0:
            weight, before = self._carry[w]
            ends = self._log_memory[w]
            weights = self._log_weights[w]
            # Piece by piece: the temporary arrays stay small however long the window is.
            for first in range(0, count, WINDOW):
                last = min(first + WINDOW, count)
                running = weight + np.cumsum(weights[first:last])
                gaps = np.diff(ends[first:last], prepend=before)
                used = running > 0
                if used.any():
                    self._histogram.add(np.rint(gaps[used] * 1e6).astype(np.int64), running[used])
                weight, before = int(running[len(running) - 1]), float(ends[last - 1])
            self._carry[w] = (weight, before)
            left = worker.log_count - count
            ends[:left] = ends[count:worker.log_count].copy()
            weights[:left + 2] = weights[count:worker.log_count + 2].copy()
            weights[left + 2:] = 0
            worker.log_base += count
            worker.log_count = left
        if 2 * worker.log_count > self.log_caps[w] or self.log_caps[w] < WINDOW:
            self._grow_log(w, max(WINDOW, 2 * self.log_caps[w]))
        return 0

    # ------------------------------------------------------------ what enters

    def set_content(self, specs, planned, source, int64_t pool=0):
        """Where the content of the requests of a pool comes from.

        Parameters
        ----------
        specs : ndarray of layout.REQUEST_SPEC, shape (n,)
        planned : ndarray of uint32
            Output ids.
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
        if spec.planned_offset >= 0:
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

    def submit_prefill(self, int64_t rank, int64_t row, double arrival_ms, num_input=None, content=None):
        """Submit the prefill half of a row, its KV to be held; returns its row in the rank. The handoff id is the row."""
        cdef RankState state = self.state_of(rank)
        cdef const request_spec_t* spec = &self.specs[row]
        cdef int64_t count = min(1, spec.max_output_tokens)
        cdef content_t flat
        cdef int32_t slot
        if content is None:
            self.find_content(rank, row, &flat)
            slot = engine_submit(self.ranks[rank], spec.id_hi, spec.id_lo, spec.input_tokens, count, &flat)
        else:
            self.records[row].input_tokens = num_input
            slot = state.submit(spec.id_hi, spec.id_lo, num_input, count, content)
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
        cdef content_t flat
        cdef int32_t slot
        cdef int64_t length = spec.input_tokens if num_input is None else num_input
        cdef int64_t needed = 0
        cdef int reason = engine_reserve_error(self.ranks[rank], length, spec.max_output_tokens, &needed)
        if reason != NO_REASON:
            self.records[row].reason = reason
            self.records[row].needed = needed
            return -1
        if content is None:
            self.find_content(rank, row, &flat)
            slot = engine_reserve(
                self.ranks[rank], spec.id_hi, spec.id_lo, length, spec.max_output_tokens, &flat, 0, row)
        else:
            slot = state.reserve(spec.id_hi, spec.id_lo, length, spec.max_output_tokens, content, 0, row)
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

    cdef void follow(self, int64_t w, int64_t rank, double now_ms, double end_ms) noexcept nogil:
        """After a rank emitted in the newest logged pass of worker `w`: admissions, token times, ends."""
        cdef rank_t* r = self.ranks[rank]
        cdef worker_t* worker = &self.workers[w]
        cdef int64_t number = worker.log_base + worker.log_count - 1
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
        cdef bint hidden = worker.pool == POOL_PREFILL
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
        for i in range(0 if hidden else r.p.num_ready):
            n = r.burst[i]
            if n == 0:
                continue
            t = &tracks[r.ready[i]]
            if likely(t.last == number - 1 and t.emitted > 1 and n == 1):
                t.last = number
                t.emitted += 1
                t.burst = 1
                continue
            if t.last < 0:
                t.first_pass = number
                t.start = number
            elif t.last != number - 1:
                if self.span_free >= 0:
                    at = self.span_free
                    self.span_free = self.spans[at].next
                else:
                    at = <int32_t>self.span_used
                    self.span_used += 1
                span = &self.spans[at]
                span.start = t.start
                span.last = t.last
                span.next = t.spans
                t.spans = at
                t.start = number
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
            worker.num_ends += 1

    cdef inline double pass_end(self, int64_t w, int64_t number) noexcept nogil:
        return self.log_ends[w][number - self.workers[w].log_base]

    cdef inline void weigh(self, int64_t w, int64_t start, int64_t last) noexcept nogil:
        """The gaps of passes start+1 .. last count once more."""
        cdef int64_t base = self.workers[w].log_base
        if last > start:
            self.log_weights[w][start + 1 - base] += 1
            self.log_weights[w][last + 1 - base] -= 1

    cdef void settle_end(self, int64_t w, const end_t* e, double end_ms) noexcept nogil:
        """Write the record of a request that ended, and count its gaps if it completed."""
        cdef const track_t* t = &e.track
        cdef request_record_t* record = &self.records[t.row]
        cdef int32_t at = t.spans
        cdef int32_t after
        cdef int64_t start = t.start
        cdef note_t* n
        record.terminal_ms = end_ms
        record.status = e.status
        record.reason = e.reason
        record.needed = e.needed
        record.preemptions += e.preemptions
        record.output_tokens = t.emitted
        record.recomputed_tokens += t.recomputed
        if t.emitted > 0:
            record.last_token_ms = self.pass_end(w, t.last)
            if e.status == RUN_COMPLETED:
                self.weigh(w, t.start, t.last)
                self.zero_gaps += t.zero_gaps
        while at >= 0:
            if e.status == RUN_COMPLETED:
                self.weigh(w, self.spans[at].start, self.spans[at].last)
                self.odd[self.odd_count] = llrint((self.pass_end(w, start) - self.pass_end(w, self.spans[at].last)) * 1e6)
                self.odd_count += 1
            start = self.spans[at].start
            after = self.spans[at].next
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
        self.log_ends[w][worker.log_count] = end_ms
        worker.log_count += 1
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
        worker.log_count -= 1
        # A pass without effect ends like any other for the ranks that ran, not for their idle siblings.
        for i in range(first, last):
            if self.ranks[i].p.num_ready >= 0:
                self.cross_boundary(w, i)
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
                engine_internal_work(r, self.now_ms)
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
                budget[0] -= 1
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

    cdef int loop(self, double until_ms, double cap_ms, bint hold, int64_t slice_passes) noexcept nogil:
        cdef double next_ms
        cdef int64_t budget = slice_passes
        while self.now_ms < until_ms:
            self.feed()
            self.ended = False
            if self.start_passes(&budget) < 0:
                return STOP_FAILED
            if self.note_count > 0:
                return STOP_STARTING
            if self.ended and self.feed():
                continue
            next_ms = self.next_event()
            if next_ms > cap_ms and until_ms > cap_ms and (next_ms < INFINITY or until_ms < INFINITY):
                return STOP_CAP
            if next_ms > until_ms or next_ms == INFINITY:
                if until_ms < INFINITY and not hold:
                    self.advance(until_ms)
                return STOP_UNTIL
            if next_ms == until_ms and hold:
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
        cdef const track_t* t
        cdef request_record_t* record
        now = self.now_ms
        for w in range(self.num_workers):
            if not self.workers[w].live:
                continue
            for i in range(self.workers[w].num_ends):
                if self.ends[w][i].kind != NOTE_FIRST:
                    # Of a pass that never ended: what it showed is not there.
                    self.records[self.ends[w][i].track.row].preemptions += self.ends[w][i].preemptions
                    self.leave(w, &self.ends[w][i].track, now)
            self.workers[w].num_ends = 0
            for i in range(self.workers[w].first_rank, self.workers[w].first_rank + self.workers[w].num_ranks):
                for slot in range(min(self.ranks[i].header.high_water, self.track_caps[i])):
                    # What a held source did was written when it was held.
                    if self.ranks[i].requests[slot].status not in (FREE, HELD_SOURCE):
                        t = &self.tracks[i][slot]
                        self.records[t.row].preemptions += self.ranks[i].requests[slot].preemptions
                        self.leave(w, t, now)
                        self.tracks[i][slot].first_pass = -1
            self.fold(w)
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

    cdef void leave(self, int64_t w, const track_t* t, double now_ms) noexcept:
        """Write the record of a request that did not end, without what lies beyond the end of the run."""
        cdef request_record_t* record = &self.records[t.row]
        cdef int64_t last = t.last
        record.recomputed_tokens += t.recomputed
        if self.workers[w].pool == POOL_PREFILL:
            return
        record.output_tokens = t.emitted
        if t.emitted == 0:
            return
        if self.pass_end(w, last) > now_ms:
            # Only the newest pass can be in flight: the emission before it, if any, is visible.
            record.output_tokens -= t.burst
            if t.start < last:
                last -= 1
            elif t.spans >= 0:
                last = self.spans[t.spans].last
            if record.first_token_ms > now_ms:
                record.first_token_ms = NAN
            if record.second_token_ms > now_ms:
                record.second_token_ms = NAN
        if record.output_tokens > 0:
            record.last_token_ms = self.pass_end(w, last)


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
