# Many passes of many ranks until something needs Python, without the GIL.
#
# The order of one instant is spec/replay.md section 4: pass completions by
# worker, then arrivals, then idle workers start passes. A worker is a group of
# ranks with one barrier: its pass lasts as long as its slowest rank. Nothing
# that arrives during a pass is seen before it ends.
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
from libc.string cimport memset

import numpy as np

from kvsim import layout
from kvsim._core.engine cimport (
    engine_active, engine_emit, engine_fail_stuck, engine_retries, engine_schedule, engine_stuck, engine_submit,
    engine_events_shown, engine_visible_events,
)
from kvsim._core.signals cimport progressed
from kvsim._core.state cimport RankState
from kvsim._core.types cimport (
    COMPLETED, FAILED, NOT_ADMITTED, NO_REASON, PASS_OK, RADIX, REJECTED, RUN_COMPLETED, RUN_FAILED, RUN_REJECTED,
    admission_t, content_t, header_t, likely, rank_t, request_record_t, request_spec_t, run_t, signal_t, unlikely,
)

cnp.import_array()

cdef enum stop_reason:
    STOP_UNTIL = 0     # the next event lies at or after `until`
    STOP_ENDED = 1     # requests ended at this instant
    STOP_SLICE = 2     # enough passes for one call
    STOP_CAP = 3       # the next event lies beyond the cap of simulated time
    STOP_FAILED = 4    # a callback raised

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

cdef struct span_t:  # a closed run of emissions
    int64_t start
    int64_t last
    int32_t next
    int32_t unused

cdef struct end_t:  # a request that ended in a pass which is still in flight
    track_t track
    int32_t status                # run_status
    int32_t reason
    int32_t preemptions
    int32_t unused
    int64_t needed

cdef struct worker_t:
    double busy_until
    int64_t log_base              # number of the first pass in the log
    int64_t log_count
    int64_t num_ends              # of the pass in flight
    int64_t prefill_tokens        # of the pass in flight
    int64_t num_ranks_run         # of the pass in flight
    int32_t busy
    int32_t deferred              # did nothing at this instant

cdef struct chunk_t:  # content of CHUNK neighbouring rows of the workload, made when the first of them enters
    const uint64_t* hashes        # paged engines
    const uint64_t* locals
    const run_t* runs             # radix engine
    const uint64_t* heads
    const int64_t* offsets        # of each row, in hashes or in runs
    int64_t left                  # rows that have not ended; at 0 the content is forgotten
    int32_t loaded
    int32_t unused

cdef enum:
    CHUNK = 256

# Passes kept per worker before they are folded, and the growth of that window.
DEF WINDOW = 16384


cdef inline bint counts_down(const rank_t* r) noexcept nogil:
    """Whether a prefill interval is not over (spec/sglang.md section 6.7)."""
    return r.config.engine == RADIX and r.radix.countdown > 0


cdef class Fleet:
    """Workers driven together on one clock.

    Parameters
    ----------
    states : list of RankState
        Worker by worker, `dp_size` ranks each.
    dp_size : int
    records : ndarray of layout.REQUEST_RECORD, shape (n,)
        Filled in place.
    histogram : object with ``add(gap_ns, weight)``
        Takes the gaps between tokens of completed requests.
    capture_admissions, capture_outputs, record_passes : bool
        Logs to keep; they grow with the run.
    """

    cdef list _states
    cdef object _rank_memory
    cdef rank_t** ranks
    cdef int64_t num_workers
    cdef int64_t dp_size
    cdef object _records
    cdef request_record_t* records
    cdef int64_t num_records
    cdef object _histogram
    cdef object _worker_memory
    cdef worker_t* workers
    cdef list _tracks
    cdef object _track_pointers
    cdef track_t** tracks
    cdef object _track_caps
    cdef int64_t* track_caps
    cdef object _log_memory
    cdef object _log_weights
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
    cdef object _ended
    cdef int64_t* ended
    cdef int64_t ended_cap
    cdef int64_t ended_count
    cdef bint capture_admissions
    cdef bint capture_outputs
    cdef bint record_passes
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
    cdef object _source
    cdef dict _content
    cdef list _spent
    cdef object _chunk_memory
    cdef chunk_t* chunks
    cdef int64_t spent_count
    cdef request_spec_t* specs
    cdef const uint32_t* planned
    cdef readonly double now_ms
    cdef readonly int64_t in_flight
    cdef readonly int64_t passes
    cdef readonly int64_t committed_prefill_tokens
    cdef readonly int64_t done
    cdef object error

    def __init__(self, states, dp_size, records, histogram, *, capture_admissions=False, capture_outputs=False,
                 record_passes=False):
        cdef int64_t i
        cdef int64_t n = len(states)
        self._states = list(states)
        self.dp_size = dp_size
        self.num_workers = n // dp_size
        self._rank_memory = np.zeros(n, np.uintp)
        self.ranks = <rank_t**>cnp.PyArray_DATA(<cnp.ndarray>self._rank_memory)
        for i in range(n):
            self.ranks[i] = (<RankState>states[i]).bind()
            self.ranks[i].grouped = dp_size > 1
        self._records = records
        self.records = <request_record_t*>cnp.PyArray_DATA(<cnp.ndarray>records)
        self.num_records = len(records)
        self._histogram = histogram
        self.capture_admissions = capture_admissions
        self.capture_outputs = capture_outputs
        self.record_passes = record_passes
        w = self.num_workers
        self._worker_memory = np.zeros(w * sizeof(worker_t), np.uint8)
        self.workers = <worker_t*>cnp.PyArray_DATA(<cnp.ndarray>self._worker_memory)
        self._tracks, self._end_memory, self._log_memory, self._log_weights = [None] * n, [None] * w, [None] * w, [None] * w
        self._track_pointers, self._track_caps = np.zeros(n, np.uintp), np.zeros(n, np.int64)
        self._end_pointers, self._end_caps = np.zeros(w, np.uintp), np.zeros(w, np.int64)
        self._log_pointers, self._weight_pointers = np.zeros(w, np.uintp), np.zeros(w, np.uintp)
        self._log_caps = np.zeros(w, np.int64)
        self.tracks = <track_t**>cnp.PyArray_DATA(<cnp.ndarray>self._track_pointers)
        self.track_caps = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>self._track_caps)
        self.ends = <end_t**>cnp.PyArray_DATA(<cnp.ndarray>self._end_pointers)
        self.end_caps = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>self._end_caps)
        self.log_ends = <double**>cnp.PyArray_DATA(<cnp.ndarray>self._log_pointers)
        self.log_weights = <int64_t**>cnp.PyArray_DATA(<cnp.ndarray>self._weight_pointers)
        self.log_caps = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>self._log_caps)
        # Per worker: weight that runs on into the window, and the end of the pass before it.
        self._carry = [(0, 0.0)] * w
        for i in range(w):
            self._grow_log(i, 1024)
        self.span_free = -1
        self._grow_spans()
        self._odd = np.zeros(1024, np.int64)
        self.odd = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>self._odd)
        self.odd_cap = 1024
        self._ended = np.zeros(256, np.int64)
        self.ended = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>self._ended)
        self.ended_cap = 256
        self._admissions = np.zeros(0, layout.ADMISSION_LOG)
        self._outputs = np.zeros(0, layout.OUTPUT_RECORD)
        self._passes = np.zeros(0, layout.PASS_RECORD)

    # ------------------------------------------------------------ memory

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
        memory = np.zeros(cap * sizeof(span_t), np.uint8)
        if self._span_memory is not None:
            memory[:len(self._span_memory)] = self._span_memory
        self._span_memory = memory
        self.spans = <span_t*>cnp.PyArray_DATA(<cnp.ndarray>memory)
        self.span_cap = cap

    cdef int reserve_track(self, int64_t rank, int64_t cap) except -1:
        memory = np.zeros(cap * sizeof(track_t), np.uint8)
        if self._tracks[rank] is not None:
            memory[:len(self._tracks[rank])] = self._tracks[rank]
        self._tracks[rank] = memory
        self.tracks[rank] = <track_t*>cnp.PyArray_DATA(<cnp.ndarray>memory)
        self.track_caps[rank] = cap
        return 0

    cdef int reserve_ends(self, int64_t w, int64_t cap) except -1:
        memory = np.zeros(cap * sizeof(end_t), np.uint8)
        if self._end_memory[w] is not None:
            memory[:len(self._end_memory[w])] = self._end_memory[w]
        self._end_memory[w] = memory
        self.ends[w] = <end_t*>cnp.PyArray_DATA(<cnp.ndarray>memory)
        self.end_caps[w] = cap
        return 0

    cdef int make_room(self, int64_t w) except -1:
        """Before a pass of worker `w`: room for all it can end, log and break up."""
        cdef int64_t live = 0
        cdef int64_t i
        for i in range(w * self.dp_size, (w + 1) * self.dp_size):
            live += self.ranks[i].header.num_live
        if self.end_caps[w] < self.workers[w].num_ends + live:
            self.reserve_ends(w, 2 * (self.workers[w].num_ends + live))
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
        if self.ended_cap - self.ended_count < live:
            ended = np.zeros(2 * (self.ended_count + live), np.int64)
            ended[:self.ended_count] = self._ended[:self.ended_count]
            self._ended = ended
            self.ended = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>ended)
            self.ended_cap = len(ended)
        return 0

    cdef bint has_room(self, int64_t w) noexcept nogil:
        cdef int64_t live = 0
        cdef int64_t i
        for i in range(w * self.dp_size, (w + 1) * self.dp_size):
            live += self.ranks[i].header.num_live
        return (self.end_caps[w] >= self.workers[w].num_ends + live
                and self.workers[w].log_count < self.log_caps[w]
                and self.span_cap - self.span_used >= live
                and self.odd_cap - self.odd_count >= self.span_used + live
                and self.ended_cap - self.ended_count >= live)

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
        for i in range(w * self.dp_size, (w + 1) * self.dp_size):
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

    def set_content(self, specs, planned, source):
        """Where the requests' content comes from.

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
        """
        cdef int64_t n = len(specs)
        cdef int64_t i
        self._specs, self._planned, self._source = specs, planned, source
        self.specs = <request_spec_t*>cnp.PyArray_DATA(<cnp.ndarray>specs)
        self.planned = <const uint32_t*>cnp.PyArray_DATA(<cnp.ndarray>planned)
        self._content, self._spent = {}, []
        self._chunk_memory = np.zeros((n + CHUNK - 1) // CHUNK * sizeof(chunk_t), np.uint8)
        self.chunks = <chunk_t*>cnp.PyArray_DATA(<cnp.ndarray>self._chunk_memory)
        for i in range(n):
            self.chunks[i // CHUNK].left += 1

    cdef int load(self, int64_t c) except -1:
        """Have the content of chunk `c`, forgetting that of chunks nobody needs any more."""
        cdef chunk_t* chunk = &self.chunks[c]
        if self.spent_count:
            for spent in [k for k in self._content if self.chunks[<int64_t>k].left == 0]:
                del self._content[spent]
            self.spent_count = 0
        content = self._source(c * CHUNK, min((c + 1) * CHUNK, len(self._specs)))
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
        self._content[c] = content
        return 0

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

    cdef void enter(self, int64_t rank, int32_t slot, int64_t row, double arrival_ms) noexcept nogil:
        """Start to follow the request that was submitted in `slot`."""
        cdef track_t* t
        cdef request_record_t* record = &self.records[row]
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
        record.worker = <int32_t>(rank // self.dp_size)
        record.dp_rank = <int32_t>(rank % self.dp_size)
        self.in_flight += 1
        self.workers[record.worker].deferred = 0

    cdef void ingest(self, int64_t rank, int64_t row, double arrival_ms) noexcept nogil:
        """Submit a row of the flat inputs."""
        cdef const request_spec_t* spec = &self.specs[row]
        cdef chunk_t* chunk = &self.chunks[row // CHUNK]
        cdef int64_t at = row % CHUNK
        cdef int64_t first
        cdef content_t content
        cdef int32_t slot
        if unlikely(not chunk.loaded):
            with gil:
                self.load(row // CHUNK)
        first = chunk.offsets[at]
        memset(&content, 0, sizeof(content_t))
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
        slot = engine_submit(
            self.ranks[rank], spec.id_hi, spec.id_lo, spec.input_tokens, spec.max_output_tokens, &content)
        self.enter(rank, slot, row, arrival_ms)

    def submit(self, int64_t rank, int64_t row, double arrival_ms, num_input=None, content=None):
        """Submit row `row` to a rank now; its prompt is the flat one unless `content` is given as to `RankState.submit`."""
        cdef RankState state = self._states[rank]
        cdef const request_spec_t* spec = &self.specs[row]
        if content is None:
            self.ingest(rank, row, arrival_ms)
        else:
            self.records[row].input_tokens = num_input
            slot = state.submit(spec.id_hi, spec.id_lo, num_input, spec.max_output_tokens, content)
            self.enter(rank, slot, row, arrival_ms)
        if state.error is not None:
            raise state.take_error()

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
        for i in range(r.p.num_ready):
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
            if not s.flags & COMPLETED:
                continue
            e = &self.ends[w][worker.num_ends]
            worker.num_ends += 1
            e.track = tracks[s.slot]
            e.status = RUN_REJECTED if s.flags & REJECTED else (RUN_FAILED if s.flags & FAILED else RUN_COMPLETED)
            e.reason = s.reason
            e.needed = s.needed
            e.preemptions = s.preemptions

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
        record.terminal_ms = end_ms
        record.status = e.status
        record.reason = e.reason
        record.needed = e.needed
        record.preemptions = e.preemptions
        record.output_tokens = t.emitted
        record.recomputed_tokens = t.recomputed
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
        self.ended[self.ended_count] = t.row
        self.ended_count += 1
        self.chunks[t.row // CHUNK].left -= 1
        self.spent_count += self.chunks[t.row // CHUNK].left == 0
        self.in_flight -= 1
        self.done += 1

    cdef void complete(self, int64_t w) noexcept nogil:
        """The pass in flight of worker `w` ends: what it did becomes visible."""
        cdef worker_t* worker = &self.workers[w]
        cdef int64_t i
        cdef rank_t* r
        cdef int64_t k
        worker.busy = 0
        self.passes += worker.num_ranks_run
        self.committed_prefill_tokens += worker.prefill_tokens
        for i in range(worker.num_ends):
            self.settle_end(w, &self.ends[w][i], worker.busy_until)
        worker.num_ends = 0
        for i in range(w * self.dp_size, (w + 1) * self.dp_size):
            r = self.ranks[i]
            k = engine_visible_events(r) - 1
            while k >= 0 and r.events[k].at_ms < 0.0:
                r.events[k].at_ms = worker.busy_until
                k -= 1
            if engine_visible_events(r) > 0:
                engine_events_shown(r)

    cdef int drive(self, int64_t w, double now_ms) noexcept nogil:
        """Start a pass of an idle worker. 0: did nothing, 1: busy, 2: over at once, 3: try again at once, -1: a callback raised."""
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
        for i in range(w * self.dp_size, (w + 1) * self.dp_size):
            work |= self.ranks[i].header.num_running + self.ranks[i].header.num_waiting > 0
        for i in range(w * self.dp_size, (w + 1) * self.dp_size):
            r = self.ranks[i]
            r.want_signals = self.capture_outputs
            # A prefill interval is counted in passes; without any request they follow at once.
            if r.header.num_running + r.header.num_waiting == 0 and (work or not counts_down(r)):
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
            return 0
        self.log_ends[w][worker.log_count] = end_ms
        worker.log_count += 1
        worker.prefill_tokens = 0
        worker.num_ranks_run = 0
        for i in range(w * self.dp_size, (w + 1) * self.dp_size):
            r = self.ranks[i]
            if r.p.num_ready < 0:
                continue
            engine_emit(r)
            if progressed(r):
                progress = True
                worker.num_ranks_run += 1
                worker.prefill_tokens += r.p.prefill_tokens
            self.follow(w, i, now_ms, end_ms)
            if self.capture_admissions or self.capture_outputs or self.record_passes:
                with gil:
                    self.log_pass(i, now_ms, end_ms, progressed(r))
        if self.dp_size > 1 and self.ranks[w * self.dp_size].config.prefill_interval > 0:
            self.share_interval(w)
        worker.busy_until = end_ms
        if end_ms > now_ms:
            worker.busy = 1
            return 1
        if progress:
            return 2
        worker.log_count -= 1
        # The group tries again as long as any rank asks for it.
        for i in range(w * self.dp_size, (w + 1) * self.dp_size):
            if self.ranks[i].p.num_ready >= 0 and engine_retries(self.ranks[i]):
                return 3
        # An idle rank whose head can never progress: end it here, so that those behind it run.
        for i in range(w * self.dp_size, (w + 1) * self.dp_size):
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
        for i in range(w * self.dp_size, (w + 1) * self.dp_size):
            r = self.ranks[i]
            if r.p.num_ready >= 0:
                prefilled |= r.p.prefill_tokens > 0
                worked |= r.p.prefill_tokens > 0 or r.p.decode_ms > 0.0
        for i in range(w * self.dp_size, (w + 1) * self.dp_size):
            r = self.ranks[i]
            if prefilled:
                r.radix.countdown = r.config.prefill_interval
            elif r.p.num_ready < 0 and r.radix.countdown > 0:
                r.radix.countdown -= 1
            if not worked and r.p.num_ready >= 0 and r.p.deferred:
                r.radix.new_token_ratio = r.config.init_ratio

    cdef void fail_head(self, int64_t w, int64_t rank, double now_ms) noexcept nogil:
        cdef worker_t* worker = &self.workers[w]
        cdef rank_t* r = self.ranks[rank]
        worker.busy_until = now_ms
        worker.num_ranks_run = 0
        worker.prefill_tokens = 0
        engine_fail_stuck(r)
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
        worker, dp_rank = rank // self.dp_size, rank % self.dp_size
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
            self.admission_count += n
        if self.capture_outputs and r.num_signals:
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

    cdef double next_event(self) noexcept nogil:
        cdef double next_ms = INFINITY
        cdef int64_t w
        for w in range(self.num_workers):
            if self.workers[w].busy and self.workers[w].busy_until < next_ms:
                next_ms = self.workers[w].busy_until
        if self.feed_at < self.feed_count and self.feed_cap == 0 and self.feed_times[self.feed_at] < next_ms:
            next_ms = self.feed_times[self.feed_at]
        return next_ms

    cdef int loop(self, double until_ms, double cap_ms, bint stop_on_end, int64_t slice_passes) noexcept nogil:
        cdef int64_t w
        cdef int64_t before
        cdef double next_ms
        cdef int result
        cdef bint again
        cdef int64_t budget = slice_passes
        while True:
            # Completions of this instant, by worker.
            before = self.ended_count
            for w in range(self.num_workers):
                if self.workers[w].busy and self.workers[w].busy_until <= self.now_ms:
                    self.complete(w)
                    self.workers[w].deferred = 0
            self.feed()
            if stop_on_end and self.ended_count > before:
                return STOP_ENDED
            if self.now_ms < until_ms:
                # Idle workers, lowest first, until none does anything.
                again = True
                while again:
                    again = False
                    for w in range(self.num_workers):
                        if self.workers[w].busy or self.workers[w].deferred:
                            continue
                        if unlikely(not self.has_room(w)):
                            with gil:
                                self.make_room(w)
                        result = self.drive(w, self.now_ms)
                        if result < 0:
                            return STOP_FAILED
                        if result == 0:
                            self.workers[w].deferred = 1
                        else:
                            budget -= 1
                            if result == 2:
                                self.complete(w)
                            if result >= 2:
                                again = True
                if self.ended_count > before:
                    if stop_on_end:
                        return STOP_ENDED
                    if self.feed():
                        continue
            next_ms = self.next_event()
            if next_ms > cap_ms and until_ms > cap_ms and (next_ms < INFINITY or until_ms < INFINITY):
                return STOP_CAP
            if next_ms >= until_ms:
                if until_ms < INFINITY:
                    if until_ms > self.now_ms:
                        self.advance(until_ms)
                        if next_ms == until_ms:
                            continue
                    return STOP_UNTIL
                if next_ms == INFINITY:
                    return STOP_UNTIL
            if budget <= 0:
                return STOP_SLICE
            self.advance(next_ms)

    cdef void advance(self, double now_ms) noexcept nogil:
        cdef int64_t w
        self.now_ms = now_ms
        for w in range(self.num_workers):
            self.workers[w].deferred = 0

    def run(self, double until_ms=INFINITY, double cap_ms=INFINITY, bint stop_on_end=False, int64_t slice_passes=1 << 40):
        """Let time pass.

        Parameters
        ----------
        until_ms : float
            Stop at this instant, with its completions applied and no pass started.
        cap_ms : float
            Events later than this never happen.
        stop_on_end : bool
            Return at each instant at which requests ended, before new passes start.
        slice_passes : int
            Return after about this many passes.

        Returns
        -------
        int
            0: nothing is left before `until_ms`; 1: requests ended; 2: the slice is used up; 3: the cap is reached.
        """
        cdef int result
        if self.num_workers == 0:
            return STOP_UNTIL
        for state in self._states:
            (<RankState>state)._outgrown.clear()
        with nogil:
            result = self.loop(until_ms, cap_ms, stop_on_end, slice_passes)
        # A submission cannot stop the loop: what a policy raised there is found here.
        for state in self._states:
            error = (<RankState>state).take_error()
            if error is not None:
                raise error
        return result

    def take_ended(self):
        """Rows that ended since the last call, in order of their ends."""
        rows = self._ended[:self.ended_count].tolist()
        self.ended_count = 0
        return rows

    def fail_stuck(self):
        """End one head that its policy never admits; false if there is none. For when nothing else can happen."""
        cdef int64_t needed
        cdef int64_t rank
        cdef int32_t slot
        for rank in range(self.num_workers * self.dp_size):
            if (not self.workers[rank // self.dp_size].busy
                    and engine_stuck(self.ranks[rank], &slot, &needed) != NO_REASON):
                self.make_room(rank // self.dp_size)
                self.fail_head(rank // self.dp_size, rank, self.now_ms)
                self.complete(rank // self.dp_size)
                self.workers[rank // self.dp_size].deferred = 0
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
            for i in range(self.workers[w].num_ends):
                # Of a pass that never ended: what it showed is not there.
                self.records[self.ends[w][i].track.row].preemptions = self.ends[w][i].preemptions
                self.leave(&self.ends[w][i].track, now)
            self.workers[w].num_ends = 0
            for i in range(w * self.dp_size, (w + 1) * self.dp_size):
                for slot in range(min(self.ranks[i].header.high_water, self.track_caps[i])):
                    if self.ranks[i].requests[slot].status != 0:
                        t = &self.tracks[i][slot]
                        self.records[t.row].preemptions = self.ranks[i].requests[slot].preemptions
                        self.leave(t, now)
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

    cdef void leave(self, const track_t* t, double now_ms) noexcept:
        """Write the record of a request that did not end, without what lies beyond the end of the run."""
        cdef request_record_t* record = &self.records[t.row]
        cdef int64_t w = record.worker
        cdef int64_t last = t.last
        record.recomputed_tokens = t.recomputed
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


def _enlarged(array, need):
    """Copy of a log with at least `need` rows, its capacity doubled."""
    larger = np.zeros(max(1024, 2 * len(array), need), array.dtype)
    larger[:len(array)] = array
    return larger


def check_layout():
    """Compare the C struct of the result rows with its dtype; see `state.check_layout`."""
    cdef request_record_t* record
    cdef dict fields
    dtype = layout.REQUEST_RECORD
    if dtype.itemsize != sizeof(request_record_t):
        raise ImportError("kvsim.layout.REQUEST_RECORD and the compiled struct differ in size")
    row = ((np.arange(dtype.itemsize) * 37 + 11) % 61 + 1).astype(np.uint8)
    record = <request_record_t*>cnp.PyArray_DATA(<cnp.ndarray>row)
    fields = record[0]
    if tuple(fields) != dtype.names or any(fields[name] != row.view(dtype)[0][name] for name in dtype.names):
        raise ImportError("kvsim.layout.REQUEST_RECORD and the compiled struct differ in their fields")


check_layout()
