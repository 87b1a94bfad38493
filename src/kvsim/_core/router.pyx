"""What a KV router knows of its ranks: blocks present, blocks in use, load; and the cost of each rank.

Rules: replay.md section 6. A rank has a number here, its bit in the words of a row of two tables of blocks:
`present`, what the caches hold, and `tracked`, what live requests use. A row is a block hash and the ranks that
have the block, so that one walk over a prompt serves all ranks. There are two tables because all blocks of a
request come and go in the second one, which stays small enough for the processor's caches.

Hashes are chained, so a rank that lacks a block of a prompt as tracked lacks the rest too, and what counts
as overlap are leading blocks anyway: a walk ends at the first block that no rank has.
"""

cimport cython
cimport numpy as cnp
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

from kvsim._core.types cimport DEVICE, STORED, event_block_t, event_t

import numpy as np

from kvsim import layout

__all__ = ["RouterState"]

cnp.import_array()

_UINT64 = np.dtype(np.uint64)
_INT32 = np.dtype(np.int32)

cdef enum:
    MIN_SHIFT = 54  # a table starts with 2**(64 - MIN_SHIFT) rows
    RANKS_PER_WORD = 64

cdef enum tracking_t:  # which blocks of a request count as in use
    TRACK_NONE = 0
    TRACK_UNIQUE = 1  # as many as it has, shared with nobody
    TRACK_HASHES = 2


cdef struct load_t:  # layout.ROUTER_LOAD
    double prefill_tokens
    int64_t blocks
    int64_t requests
    int32_t worker
    int32_t dp_rank


cdef struct share_t:  # layout.ROUTER_SHARE
    uint64_t hash
    int32_t rank
    int32_t extra


cdef inline void* address(object array) noexcept:
    return cnp.PyArray_DATA(<cnp.ndarray> array)


cdef inline uint64_t home_of(uint64_t key, int shift) noexcept nogil:
    return (key * 0x9E3779B97F4A7C15ULL) >> shift


cdef inline int64_t count_trailing_zeros(uint64_t word) noexcept nogil:
    return __builtin_ctzll(word)


cdef extern from *:
    int __builtin_ctzll(unsigned long long) noexcept nogil


# ---------------------------------------------------------------- tables of blocks


cdef struct blocks_t:  # open addressing, linear probing; a row without a bit is empty, so that every hash is legal
    uint64_t* rows
    int64_t stride  # words of a row: the hash, and a bit for each rank
    int shift       # 2**(64 - shift) rows
    int64_t used


cdef inline bint row_is_empty(const uint64_t* row, int64_t stride) noexcept nogil:
    cdef int64_t i
    for i in range(1, stride):
        if row[i]:
            return False
    return True


cdef inline uint64_t* block_find(const blocks_t* t, uint64_t hash) noexcept nogil:
    """Row of `hash`, or the empty one where it belongs."""
    cdef uint64_t mask = (<uint64_t> 0xFFFFFFFFFFFFFFFFULL) >> t.shift
    cdef uint64_t at = home_of(hash, t.shift)
    cdef uint64_t* row = t.rows + at * t.stride
    while not row_is_empty(row, t.stride) and row[0] != hash:
        at = (at + 1) & mask
        row = t.rows + at * t.stride
    return row


cdef inline void block_set(blocks_t* t, uint64_t* row, uint64_t hash, int64_t word, uint64_t bit) noexcept nogil:
    """Set a bit of a row that `block_find` gave; there is room."""
    if row_is_empty(row, t.stride):
        row[0] = hash
        t.used += 1
    row[word] |= bit


cdef void block_clear(blocks_t* t, uint64_t* row, int64_t word, uint64_t bit) noexcept nogil:
    """Clear a bit; a row that loses its last one goes, and those behind it move up."""
    cdef uint64_t mask = (<uint64_t> 0xFFFFFFFFFFFFFFFFULL) >> t.shift
    cdef uint64_t hole, at, home
    row[word] &= ~bit
    if not row_is_empty(row, t.stride):
        return
    t.used -= 1
    hole = <uint64_t> ((row - t.rows) // t.stride)
    at = hole
    while True:
        at = (at + 1) & mask
        row = t.rows + at * t.stride
        if row_is_empty(row, t.stride):
            break
        home = home_of(row[0], t.shift)
        # A row stays if its home lies behind the hole, in the circle from the hole to itself.
        if ((at - home) & mask) < ((at - hole) & mask):
            continue
        memcpy(t.rows + hole * t.stride, row, <size_t> t.stride * sizeof(uint64_t))
        memset(row + 1, 0, <size_t> (t.stride - 1) * sizeof(uint64_t))
        hole = at


cdef inline void settle_lost(uint64_t lost, int64_t word, int32_t length, int32_t* out) noexcept nogil:
    """Write `length` for every rank whose bit is in `lost`."""
    while lost:
        out[word * RANKS_PER_WORD + count_trailing_zeros(lost)] = length
        lost &= lost - 1


cdef void walk(const blocks_t* t, const uint64_t* hashes, int64_t n, uint64_t* ranks, int32_t* out) noexcept nogil:
    """Leading blocks of a prompt that each of `ranks` has; the set is used up."""
    cdef int64_t i, w
    cdef uint64_t alive
    cdef const uint64_t* row
    for i in range(n):
        row = block_find(t, hashes[i])
        alive = 0
        for w in range(t.stride - 1):
            settle_lost(ranks[w] & ~row[1 + w], w, <int32_t> i, out)
            ranks[w] &= row[1 + w]
            alive |= ranks[w]
        if not alive:
            return
    for w in range(t.stride - 1):
        settle_lost(ranks[w], w, <int32_t> n, out)


cdef new_blocks(blocks_t* t, int64_t stride, int shift):
    """Make `t` an empty table; returns its memory, which the caller keeps alive."""
    rows = np.zeros((1 << (64 - shift), stride), np.uint64)
    t.rows = <uint64_t*> address(rows)
    t.stride = stride
    t.shift = shift
    t.used = 0
    return rows


cdef grown(blocks_t* t, rows, int64_t stride, int64_t n):
    """Move all rows of `t`, whose memory is `rows`, to a table with room for `n` more, of `stride` words.

    It is at most half full with them. Returns its memory.
    """
    cdef blocks_t before = t[0]
    cdef int64_t size = (<int64_t> 1) << (64 - before.shift)
    cdef int shift = before.shift
    cdef int64_t i
    cdef const uint64_t* row
    while 2 * (before.used + n) > (<int64_t> 1) << (64 - shift):
        shift -= 1
    made = new_blocks(t, stride, shift)
    with nogil:
        for i in range(size):
            row = before.rows + i * before.stride
            if not row_is_empty(row, before.stride):
                memcpy(block_find(t, row[0]), row, <size_t> before.stride * sizeof(uint64_t))
                t.used += 1
    return made


# ---------------------------------------------------------------- table of shared blocks


cdef struct shares_t:  # live requests beyond the first of a tracked block of a rank; extra 0: empty
    share_t* rows
    int shift
    int64_t used


cdef inline uint64_t share_key(uint64_t hash, int32_t rank) noexcept nogil:
    return hash ^ (<uint64_t> (rank + 1) * 0xC2B2AE3D27D4EB4FULL)


cdef inline share_t* share_find(const shares_t* t, uint64_t hash, int32_t rank) noexcept nogil:
    cdef uint64_t mask = (<uint64_t> 0xFFFFFFFFFFFFFFFFULL) >> t.shift
    cdef uint64_t at = home_of(share_key(hash, rank), t.shift)
    while t.rows[at].extra and (t.rows[at].hash != hash or t.rows[at].rank != rank):
        at = (at + 1) & mask
    return &t.rows[at]


cdef inline void share_add(shares_t* t, uint64_t hash, int32_t rank) noexcept nogil:
    cdef share_t* share = share_find(t, hash, rank)
    if not share.extra:
        share.hash = hash
        share.rank = rank
        t.used += 1
    share.extra += 1


cdef bint share_take(shares_t* t, uint64_t hash, int32_t rank) noexcept nogil:
    """Whether somebody else still has the block; counts one less if so."""
    cdef uint64_t mask = (<uint64_t> 0xFFFFFFFFFFFFFFFFULL) >> t.shift
    cdef share_t* share = share_find(t, hash, rank)
    cdef uint64_t hole, at, home
    if not share.extra:
        return False
    share.extra -= 1
    if share.extra:
        return True
    t.used -= 1
    hole = <uint64_t> (share - t.rows)
    at = hole
    while True:
        at = (at + 1) & mask
        if not t.rows[at].extra:
            return True
        home = home_of(share_key(t.rows[at].hash, t.rows[at].rank), t.shift)
        if ((at - home) & mask) < ((at - hole) & mask):
            continue
        t.rows[hole] = t.rows[at]
        t.rows[at].extra = 0
        hole = at


# ---------------------------------------------------------------- state


@cython.final
cdef class RouterState:
    """Index of the blocks of all ranks, and their load as the router sees it.

    Ranks are numbered by `add_rank`; a number is free again after `remove_rank`.

    Parameters
    ----------
    block_size : int
        Tokens per block, >= 1.
    tracking : int
        Blocks in use: 0 none, 1 each request its own, 2 shared by hash.
    track_prefill : bool
        Whether prompts not yet computed are a load.
    credit, credit_decay, prefill_scale, request_weight : float
        Of the cost, see `choose`.
    """

    cdef object present_array, tracked_array, shares_array, loads_array, overlap_array, held_array, scratch_array
    cdef object candidates_array, costs_array
    cdef blocks_t present
    cdef blocks_t tracked
    cdef shares_t shares
    cdef load_t* load_of
    cdef int32_t* overlap_of
    cdef int32_t* held_of
    cdef uint64_t* scratch  # a set of ranks
    cdef int64_t num_ranks  # numbers ever used
    cdef int64_t num_candidates
    cdef list free
    cdef double block_size
    cdef int tracking
    cdef bint track_prefill
    cdef double credit, credit_decay, prefill_scale, request_weight

    def __init__(
        self,
        block_size,
        *,
        tracking=TRACK_HASHES,
        track_prefill=True,
        credit=1.0,
        credit_decay=0.0,
        prefill_scale=1.0,
        request_weight=0.0,
    ):
        if block_size < 1:
            raise ValueError(f"block_size: must be >= 1, got {block_size}")
        if not TRACK_NONE <= tracking <= TRACK_HASHES:
            raise ValueError(f"tracking: must be 0, 1 or 2, got {tracking}")
        self.block_size = block_size
        self.tracking = tracking
        self.track_prefill = track_prefill
        self.credit = credit
        self.credit_decay = credit_decay
        self.prefill_scale = prefill_scale
        self.request_weight = request_weight
        self.num_ranks = 0
        self.num_candidates = 0
        self.free = []
        self.present_array = new_blocks(&self.present, 2, MIN_SHIFT)
        self.tracked_array = new_blocks(&self.tracked, 2, MIN_SHIFT)
        self._new_shares(MIN_SHIFT)
        self._widen_ranks(RANKS_PER_WORD)
        self.set_candidates(())

    # ------------------------------------------------------------ memory

    def _new_shares(self, shift):
        self.shares_array = np.zeros(1 << (64 - shift), layout.ROUTER_SHARE)
        self.shares.rows = <share_t*> address(self.shares_array)
        self.shares.shift = shift
        self.shares.used = 0

    cdef int make_room_present(self, int64_t n) except -1:
        """Have room for `n` more rows of `present`, which is at most half full then."""
        if 2 * (self.present.used + n) > (<int64_t> 1) << (64 - self.present.shift):
            self.present_array = grown(&self.present, self.present_array, self.present.stride, n)
        return 0

    cdef int make_room_tracked(self, int64_t n) except -1:
        """Have room for `n` more rows of `tracked`, and as many shared ones."""
        cdef share_t* before
        cdef int64_t i
        cdef int64_t size = (<int64_t> 1) << (64 - self.shares.shift)
        cdef int shift = self.shares.shift
        if 2 * (self.tracked.used + n) > (<int64_t> 1) << (64 - self.tracked.shift):
            self.tracked_array = grown(&self.tracked, self.tracked_array, self.tracked.stride, n)
        while 2 * (self.shares.used + n) > (<int64_t> 1) << (64 - shift):
            shift -= 1
        if shift != self.shares.shift:
            old = self.shares_array
            before = self.shares.rows
            self._new_shares(shift)
            for i in range(size):
                if before[i].extra:
                    share_find(&self.shares, before[i].hash, before[i].rank)[0] = before[i]
                    self.shares.used += 1
        return 0

    def _widen_ranks(self, capacity):
        loads = np.zeros(capacity, layout.ROUTER_LOAD)
        loads["worker"] = loads["dp_rank"] = -1
        if self.loads_array is not None:
            loads[: len(self.loads_array)] = self.loads_array
        self.loads_array = loads
        self.overlap_array = np.zeros(capacity, np.int32)
        self.held_array = np.zeros(capacity, np.int32)
        self.scratch_array = np.zeros(capacity // RANKS_PER_WORD, np.uint64)
        self.load_of = <load_t*> address(self.loads_array)
        self.overlap_of = <int32_t*> address(self.overlap_array)
        self.held_of = <int32_t*> address(self.held_array)
        self.scratch = <uint64_t*> address(self.scratch_array)
        stride = 1 + capacity // RANKS_PER_WORD
        if stride != self.present.stride:
            self.present_array = grown(&self.present, self.present_array, stride, 0)
            self.tracked_array = grown(&self.tracked, self.tracked_array, stride, 0)

    # ------------------------------------------------------------ views

    @property
    def loads(self):
        """Load of each rank number, layout.ROUTER_LOAD, shape (>= ranks,); -1 as worker: no such rank.

        `prefill_tokens` may be written, by whoever lets them decay. Valid until the next `add_rank`.
        """
        return self.loads_array

    @property
    def overlap(self):
        """Leading blocks in the cache of each rank number, int32: result of the last `match`."""
        return self.overlap_array

    @property
    def held(self):
        """Leading blocks in use on each rank number, int32: result of the last `match`."""
        return self.held_array

    @property
    def candidates(self):
        """Rank numbers that may be chosen, int32, in order of preference at equal cost."""
        return self.candidates_array

    @property
    def costs(self):
        """Cost of each candidate, float64, inf for those not asked for: result of the last `choose`."""
        return self.costs_array

    @property
    def num_present(self):
        """Different blocks that some rank has in its cache."""
        return self.present.used

    @property
    def num_tracked(self):
        """Different blocks that some rank has in use."""
        return self.tracked.used

    @property
    def num_shared(self):
        """Blocks of a rank that more than one live request has in use."""
        return self.shares.used

    # ------------------------------------------------------------ ranks

    def add_rank(self, worker, dp_rank):
        """Number a new rank, without blocks and load.

        Returns
        -------
        int
            The lowest free number.
        """
        if self.free:
            rank = self.free.pop()
        else:
            rank = self.num_ranks
            if rank == len(self.loads_array):
                self._widen_ranks(2 * rank)
            self.num_ranks += 1
        load = self.loads_array[rank]
        load["worker"], load["dp_rank"] = worker, dp_rank
        return rank

    def remove_rank(self, rank):
        """Forget a rank with its blocks and load; O(size of the tables). It must not be a candidate."""
        cdef int64_t at = self.check_rank(rank)
        cdef int64_t word = 1 + at // RANKS_PER_WORD
        cdef uint64_t bit = (<uint64_t> 1) << (at % RANKS_PER_WORD)
        if rank in self.candidates_array:
            raise ValueError(f"rank: {rank} is a candidate")
        # Rows move when one goes, so they are looked up again by hash.
        for hash in self.present_array[(self.present_array[:, word] & np.uint64(bit)) != 0, 0]:
            block_clear(&self.present, block_find(&self.present, hash), word, bit)
        for hash in self.tracked_array[(self.tracked_array[:, word] & np.uint64(bit)) != 0, 0]:
            block_clear(&self.tracked, block_find(&self.tracked, hash), word, bit)
        for hash in self.shares_array["hash"][(self.shares_array["extra"] > 0) & (self.shares_array["rank"] == rank)]:
            while share_take(&self.shares, hash, <int32_t> at):
                pass
        load = self.loads_array[rank]
        load["worker"] = load["dp_rank"] = -1
        load["prefill_tokens"] = load["blocks"] = load["requests"] = 0
        self.overlap_array[rank] = self.held_array[rank] = 0
        self.free.append(rank)
        self.free.sort(reverse=True)

    cdef int64_t check_rank(self, rank) except -1:
        cdef int64_t at = rank
        if not 0 <= at < self.num_ranks or self.load_of[at].worker < 0:
            raise ValueError(f"rank: there is no rank {rank}")
        return at

    def set_candidates(self, ranks):
        """Say which ranks may be chosen.

        Parameters
        ----------
        ranks : sequence of int
            In order of preference at equal cost.
        """
        for rank in ranks:
            self.check_rank(rank)
        self.candidates_array = np.array(ranks, np.int32)
        self.costs_array = np.zeros(len(ranks), np.float64)
        self.num_candidates = len(ranks)

    # ------------------------------------------------------------ blocks

    def apply(self, rank, events, blocks):
        """Follow KV events of a rank; a block that is stored twice and removed once is gone.

        Only those of the device: what lies in a lower tier is not there for the next prompt at once.

        Parameters
        ----------
        rank : int
        events : ndarray of layout.EVENT
        blocks : ndarray of layout.EVENT_BLOCK
            `first` of an event counts from its beginning.
        """
        cdef int64_t at = self.check_rank(rank)
        _check("events", events, layout.EVENT)
        _check("blocks", blocks, layout.EVENT_BLOCK)
        cdef const event_t* event = <const event_t*> address(events)
        cdef const event_block_t* block = <const event_block_t*> address(blocks)
        cdef int64_t n = events.shape[0]
        cdef int64_t n_blocks = blocks.shape[0]
        cdef int64_t word = 1 + at // RANKS_PER_WORD
        cdef uint64_t bit = (<uint64_t> 1) << (at % RANKS_PER_WORD)
        cdef int64_t stored = 0
        cdef int64_t i, k
        cdef uint64_t* row
        for i in range(n):
            if event[i].first < 0 or event[i].count < 0 or event[i].first > n_blocks - event[i].count:
                raise ValueError(f"events[{i}]: its blocks must lie within the {n_blocks} rows of blocks")
            if event[i].kind == STORED:
                stored += event[i].count
        self.make_room_present(stored)
        with nogil:
            for i in range(n):
                if event[i].tier != DEVICE:
                    continue
                for k in range(event[i].first, event[i].first + event[i].count):
                    row = block_find(&self.present, block[k].block_hash)
                    if event[i].kind == STORED:
                        block_set(&self.present, row, block[k].block_hash, word, bit)
                    elif row[word] & bit:
                        block_clear(&self.present, row, word, bit)

    def match(self, hashes):
        """Look a prompt up on all ranks; fills `overlap` and `held`.

        Parameters
        ----------
        hashes : ndarray of uint64, shape (n_blocks,)
            Sequence hashes of its complete blocks.

        Returns
        -------
        int
            Most leading blocks that a candidate has in its cache, 0 without candidates.
        """
        _check("hashes", hashes, _UINT64)
        cdef const uint64_t* first = <const uint64_t*> address(hashes)
        cdef const int32_t* candidate = <const int32_t*> address(self.candidates_array)
        cdef int32_t best = 0
        cdef int64_t n = hashes.shape[0]
        cdef int64_t i
        with nogil:
            self.all_ranks(self.overlap_of)
            walk(&self.present, first, n, self.scratch, self.overlap_of)
            self.all_ranks(self.held_of)
            walk(&self.tracked, first, n, self.scratch, self.held_of)
            for i in range(self.num_candidates):
                if self.overlap_of[candidate[i]] > best:
                    best = self.overlap_of[candidate[i]]
        return best

    cdef void all_ranks(self, int32_t* counts) noexcept nogil:
        """Put the set of all ranks into `scratch`, and 0 for each into `counts`."""
        cdef int64_t i
        for i in range(self.present.stride - 1):
            self.scratch[i] = 0
        for i in range(self.num_ranks):
            counts[i] = 0
            if self.load_of[i].worker >= 0:
                self.scratch[i // RANKS_PER_WORD] |= (<uint64_t> 1) << (i % RANKS_PER_WORD)

    # ------------------------------------------------------------ load

    def all_busy(self, double limit):
        """Whether every candidate has more than `limit` prompt tokens to compute; True without candidates."""
        cdef const int32_t* candidate = <const int32_t*> address(self.candidates_array)
        cdef int64_t i
        for i in range(self.num_candidates):
            if self.load_of[candidate[i]].prefill_tokens <= limit:
                return False
        return True

    def choose(self, int64_t input_tokens, overlap, int32_t dp_rank=-1):
        """Cost of each candidate, in blocks; fills `costs`.

        ``prefill_scale * max(0, prefill - credit * decay * overlap) + in_use + request_weight * requests``, where
        `prefill` counts the prompt tokens of the rank and of this request in blocks (0 if they are not tracked),
        `in_use` the blocks of the rank and of this request after the last `match`, and
        ``decay = 1 / (1 + credit_decay * excess / ceil(input_tokens / block_size))`` with the blocks of prompt that
        the rank has to compute in excess of the least loaded candidate.

        Parameters
        ----------
        input_tokens : int
        overlap : ndarray of int32, shape (>= ranks,)
            By rank number; `RouterState.overlap`, or a copy of it from an earlier `match`.
        dp_rank : int
            Only candidates with this rank within their worker; -1: all.

        Returns
        -------
        int
            Position of the first candidate of lowest cost, -1 if there is none.
        """
        _check("overlap", overlap, _INT32)
        if overlap.shape[0] < self.num_ranks:
            raise ValueError(f"overlap: must have {self.num_ranks} entries, got {overlap.shape[0]}")
        cdef const int32_t* matched = <const int32_t*> address(overlap)
        cdef const int32_t* candidate = <const int32_t*> address(self.candidates_array)
        cdef double* costs = <double*> address(self.costs_array)
        cdef int64_t whole_blocks = input_tokens // <int64_t> self.block_size
        cdef double request_blocks = (input_tokens + <int64_t> self.block_size - 1) // <int64_t> self.block_size
        cdef double least = INFINITY
        cdef double lowest = INFINITY
        cdef double decay, prefill, cost
        cdef int64_t best = -1
        cdef int64_t i
        cdef int32_t rank
        cdef const load_t* load
        with nogil:
            for i in range(self.num_candidates):
                load = &self.load_of[candidate[i]]
                if (dp_rank < 0 or load.dp_rank == dp_rank) and load.prefill_tokens < least:
                    least = load.prefill_tokens
            for i in range(self.num_candidates):
                rank = candidate[i]
                load = &self.load_of[rank]
                costs[i] = INFINITY
                if dp_rank >= 0 and load.dp_rank != dp_rank:
                    continue
                prefill = 0.0
                if self.track_prefill:
                    prefill = (load.prefill_tokens + <double> input_tokens) / self.block_size
                decay = 1.0
                if self.credit_decay > 0.0 and request_blocks > 0.0:
                    decay = 1.0 / (
                        1.0
                        + self.credit_decay * ((load.prefill_tokens - least) / self.block_size) / request_blocks
                    )
                prefill -= self.credit * decay * matched[rank]
                cost = self.prefill_scale * (prefill if prefill > 0.0 else 0.0)
                if self.tracking == TRACK_UNIQUE:
                    cost += <double> (load.blocks + whole_blocks)
                elif self.tracking == TRACK_HASHES:
                    cost += <double> (load.blocks + whole_blocks - self.held_of[rank])
                cost += self.request_weight * <double> load.requests
                costs[i] = cost
                if cost < lowest:
                    lowest = cost
                    best = i
        return best

    def begin(self, rank, hashes, int64_t num_blocks, int64_t prefill_tokens):
        """A request goes to a rank.

        Parameters
        ----------
        rank : int
        hashes : ndarray of uint64, or None
            Its blocks, needed when they are tracked by hash.
        num_blocks : int
            How many it has.
        prefill_tokens : int
            Prompt tokens it has to compute; counted if they are tracked.
        """
        cdef int64_t at = self.check_rank(rank)
        cdef load_t* load
        cdef const uint64_t* first
        cdef int64_t n, i, word
        cdef uint64_t bit
        cdef uint64_t* row
        if self.tracking == TRACK_HASHES:
            _check("hashes", hashes, _UINT64)
            first = <const uint64_t*> address(hashes)
            n = hashes.shape[0]
            self.make_room_tracked(n)
            word = 1 + at // RANKS_PER_WORD
            bit = (<uint64_t> 1) << (at % RANKS_PER_WORD)
            load = &self.load_of[at]
            with nogil:
                for i in range(n):
                    row = block_find(&self.tracked, first[i])
                    if row[word] & bit:
                        share_add(&self.shares, first[i], <int32_t> at)
                    else:
                        block_set(&self.tracked, row, first[i], word, bit)
                        load.blocks += 1
        elif self.tracking == TRACK_UNIQUE:
            self.load_of[at].blocks += num_blocks
        self.load_of[at].requests += 1
        if self.track_prefill:
            self.load_of[at].prefill_tokens += <double> prefill_tokens

    def computed(self, rank, int64_t prefill_tokens):
        """A prompt is computed: its tokens, as given to `begin`, are no load any more."""
        cdef int64_t at = self.check_rank(rank)
        if self.track_prefill:
            self.load_of[at].prefill_tokens -= <double> prefill_tokens

    def end(self, rank, hashes, int64_t num_blocks, int64_t prefill_tokens):
        """A request leaves its rank; arguments as for `begin`, 0 `prefill_tokens` after `computed`."""
        cdef int64_t at = self.check_rank(rank)
        cdef load_t* load
        cdef const uint64_t* first
        cdef int64_t n, i, word
        cdef uint64_t bit
        cdef uint64_t* row
        if self.tracking == TRACK_HASHES:
            _check("hashes", hashes, _UINT64)
            first = <const uint64_t*> address(hashes)
            n = hashes.shape[0]
            word = 1 + at // RANKS_PER_WORD
            bit = (<uint64_t> 1) << (at % RANKS_PER_WORD)
            load = &self.load_of[at]
            with nogil:
                i = 0
                # What others have in use too are leading blocks.
                while i < n and share_take(&self.shares, first[i], <int32_t> at):
                    i += 1
                for i in range(i, n):
                    row = block_find(&self.tracked, first[i])
                    if row[word] & bit:
                        block_clear(&self.tracked, row, word, bit)
                        load.blocks -= 1
        elif self.tracking == TRACK_UNIQUE:
            self.load_of[at].blocks -= num_blocks
        self.load_of[at].requests -= 1
        if self.track_prefill:
            self.load_of[at].prefill_tokens -= <double> prefill_tokens


def _check(name, array, dtype):
    """Raise ValueError unless `array` is a one-dimensional, contiguous array of `dtype`."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise ValueError(f"{name}: must be an array of {dtype}, got {array!r}")
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"{name}: must be one-dimensional and contiguous, got shape {array.shape}")


def _check_layout():
    """Raise ImportError unless the structs above are the dtypes of `kvsim.layout`."""
    cdef load_t load
    cdef share_t share
    cdef char* load_at = <char*> &load
    cdef char* share_at = <char*> &share
    offsets = {
        layout.ROUTER_LOAD: (
            sizeof(load_t),
            {
                "prefill_tokens": <char*> &load.prefill_tokens - load_at,
                "blocks": <char*> &load.blocks - load_at,
                "requests": <char*> &load.requests - load_at,
                "worker": <char*> &load.worker - load_at,
                "dp_rank": <char*> &load.dp_rank - load_at,
            },
        ),
        layout.ROUTER_SHARE: (
            sizeof(share_t),
            {
                "hash": <char*> &share.hash - share_at,
                "rank": <char*> &share.rank - share_at,
                "extra": <char*> &share.extra - share_at,
            },
        ),
    }
    for dtype, (size, fields) in offsets.items():
        if dtype.itemsize != size or {name: dtype.fields[name][1] for name in dtype.names} != fields:
            raise ImportError(f"kvsim.layout and kvsim._core.router disagree about {dtype}")


_check_layout()
