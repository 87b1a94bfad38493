"""Content of requests: token ids, local block hashes and chained sequence hashes.

Rules: kv-cache.md section 1 (block hashes), vllm.md sections 2 and 7 (output ids and
the planned stream), workloads-and-report.md section 1.2 (segments). A prompt given as
segments is never spelled out: a whole block inside a run of one token costs one local
hash per token value, and only blocks across a border are put together in a scratch row.
The pages of a radix tree (sglang.md section 4) are blocks too; runs of equal ones are one row.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from kvsim._core.rng cimport rng_accept, rng_block, rng_seed, rng_t
from kvsim._core.types cimport request_spec_t, run_t
from kvsim._core.xxh3 cimport (
    BLOCK_HASH_SEED,
    XXH3_SHORT_BYTES,
    xxh3_64 as hash_bytes,
    xxh3_derive_secret,
    xxh3_equal_tokens,
    xxh3_equal_words,
    xxh3_pair,
    xxh3_tokens,
)

import numpy as np

from kvsim.layout import REQUEST_SPEC, RUN, SEGMENT

__all__ = [
    "AcceptanceSampler",
    "block_segments",
    "equal_block_hashes",
    "expand_parts",
    "hash_parts",
    "hash_workload",
    "intern_ids",
    "parse_id_lists",
    "planned_tokens",
    "prompt_lengths",
    "runs_parts",
    "runs_workload",
    "synthetic_tokens",
    "xxh3_64",
]

cnp.import_array()

_UINT32 = np.dtype(np.uint32)
_UINT64 = np.dtype(np.uint64)
_INT64 = np.dtype(np.int64)

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    /* Largest count of tokens: three of them can be added without overflow. */
    #define KVSIM_MAX_TOKENS ((int64_t)1 << 61)

    /* Blocks of the random stream (rng.pxd), one in each lane of a vector. A lane does what `rng_block` does. */
    #define KVSIM_ROTATE(x, n) (((x) << (n)) | ((x) >> (32 - (n))))
    #define KVSIM_QUARTER(a, b, c, d) \
        a += b; d ^= a; d = KVSIM_ROTATE(d, 16); c += d; b ^= c; b = KVSIM_ROTATE(b, 12); \
        a += b; d ^= a; d = KVSIM_ROTATE(d, 8); c += d; b ^= c; b = KVSIM_ROTATE(b, 7);
    #define KVSIM_STREAM(NAME, LANES, TARGET) \
    typedef uint32_t NAME##_lanes __attribute__((vector_size(4 * LANES))); \
    TARGET static void NAME(const uint32_t* key, uint64_t block, int64_t groups, uint32_t* words) { \
        NAME##_lanes x[16], number; \
        uint32_t start[16] = {0x61707865, 0x3320646E, 0x79622D32, 0x6B206574}; \
        int i, k; \
        for (i = 0; i < 8; i++) start[4 + i] = key[i]; \
        for (; groups > 0; groups--, block += LANES, words += 16 * LANES) { \
            start[12] = (uint32_t)block; \
            start[13] = (uint32_t)(block >> 32); \
            for (i = 0; i < 16; i++) \
                for (k = 0; k < LANES; k++) x[i][k] = start[i]; \
            for (k = 0; k < LANES; k++) { \
                x[12][k] = (uint32_t)(block + k); \
                x[13][k] = (uint32_t)((block + k) >> 32); \
            } \
            for (i = 0; i < 6; i++) { \
                KVSIM_QUARTER(x[0], x[4], x[8], x[12]) KVSIM_QUARTER(x[1], x[5], x[9], x[13]) \
                KVSIM_QUARTER(x[2], x[6], x[10], x[14]) KVSIM_QUARTER(x[3], x[7], x[11], x[15]) \
                KVSIM_QUARTER(x[0], x[5], x[10], x[15]) KVSIM_QUARTER(x[1], x[6], x[11], x[12]) \
                KVSIM_QUARTER(x[2], x[7], x[8], x[13]) KVSIM_QUARTER(x[3], x[4], x[9], x[14]) \
            } \
            for (i = 0; i < 16; i++) { \
                number = x[i] + start[i]; \
                if (i == 12 || i == 13) \
                    for (k = 0; k < LANES; k++) \
                        number[k] = x[i][k] + (uint32_t)((block + k) >> (i == 12 ? 0 : 32)); \
                for (k = 0; k < LANES; k++) words[16 * k + i] = number[k]; \
            } \
        } \
    }
    KVSIM_STREAM(kvsim_stream, 8, )
    #if defined(__x86_64__)
    KVSIM_STREAM(kvsim_stream_avx2, 8, __attribute__((target("avx2"))))
    KVSIM_STREAM(kvsim_stream_avx512, 16, __attribute__((target("avx512f"))))
    #endif
    /* Blocks block, block + 1, ... of a stream; returns how many were made, as many as fill whole vectors. */
    static int64_t kvsim_stream_blocks(const uint32_t* key, uint64_t block, int64_t n, uint32_t* words) {
    #if defined(__x86_64__)
        if (__builtin_cpu_supports("avx512f")) {
            kvsim_stream_avx512(key, block, n / 16, words);
            return n / 16 * 16;
        }
        if (__builtin_cpu_supports("avx2")) {
            kvsim_stream_avx2(key, block, n / 8, words);
            return n / 8 * 8;
        }
    #endif
        kvsim_stream(key, block, n / 8, words);
        return n / 8 * 8;
    }

    /* Hashes of blocks of the tokens token, token + 1, ... only, of more than 240 bytes: `xxh3_stripes` of stride 0
       with its eight lanes in vectors. `secret` is the derived one. Returns how many were made: all or none. */
    static inline uint64_t kvsim_equal_merge(const uint64_t* acc, int64_t n_bytes, const uint64_t* secret) {
        uint64_t h = (uint64_t)n_bytes * 0x9E3779B185EBCA87ULL, key[8];
        int i;
        memcpy(key, (const char*)secret + 11, sizeof(key));
        for (i = 0; i < 4; i++) {
            kvsim_u128 product = (kvsim_u128)(acc[2 * i] ^ key[2 * i]) * (acc[2 * i + 1] ^ key[2 * i + 1]);
            h += (uint64_t)product ^ (uint64_t)(product >> 64);
        }
        h ^= h >> 37;
        h *= 0x165667919E3779F9ULL;
        return h ^ (h >> 32);
    }
    #if defined(__x86_64__)
    #include <immintrin.h>
    static const uint64_t KVSIM_EQUAL_START[8] = {
        0xC2B2AE3DULL, 0x9E3779B185EBCA87ULL, 0xC2B2AE3D27D4EB4FULL, 0x165667B19E3779F9ULL,
        0x85EBCA77C2B2AE63ULL, 0x85EBCA77ULL, 0x27D4EB2F165667C5ULL, 0x9E3779B1ULL,
    };
    #define KVSIM_EQUAL_LONG(NAME, TARGET, VECTOR, N, P, S) \
    TARGET static void NAME(uint32_t token, int64_t n, int64_t n_bytes, const uint64_t* secret, uint64_t* out) { \
        const int64_t stripes = (n_bytes - 1) / 64; \
        const VECTOR prime = P##_set1_epi64x(0x9E3779B1LL); \
        uint64_t lanes[8]; \
        VECTOR acc[N], word, key; \
        int64_t i; \
        int k; \
        for (; n > 0; n--, token++, out++) { \
            word = P##_set1_epi32((int)token); \
            for (k = 0; k < N; k++) acc[k] = P##_loadu_si##S((const void*)(KVSIM_EQUAL_START + 8 / N * k)); \
            for (i = 0; i <= stripes; i++) { \
                const char* at = (const char*)secret + (i < stripes ? 8 * (i % 16) : 192 - 64 - 7); \
                for (k = 0; k < N; k++) { \
                    key = P##_xor_si##S(word, P##_loadu_si##S((const void*)(at + 64 / N * k))); \
                    key = P##_mul_epu32(key, P##_srli_epi64(key, 32)); \
                    acc[k] = P##_add_epi64(acc[k], P##_add_epi64(word, key)); \
                } \
                if (i % 16 == 15 && i < stripes) \
                    for (k = 0; k < N; k++) { \
                        key = P##_loadu_si##S((const void*)(secret + 16 + 8 / N * k)); \
                        key = P##_xor_si##S(key, P##_xor_si##S(acc[k], P##_srli_epi64(acc[k], 47))); \
                        acc[k] = P##_slli_epi64(P##_mul_epu32(P##_srli_epi64(key, 32), prime), 32); \
                        acc[k] = P##_add_epi64(acc[k], P##_mul_epu32(key, prime)); \
                    } \
            } \
            for (k = 0; k < N; k++) P##_storeu_si##S((void*)(lanes + 8 / N * k), acc[k]); \
            *out = kvsim_equal_merge(lanes, n_bytes, secret); \
        } \
    }
    #define _mm512_set1_epi64x _mm512_set1_epi64
    KVSIM_EQUAL_LONG(kvsim_equal_long_avx2, __attribute__((target("avx2"))), __m256i, 2, _mm256, 256)
    KVSIM_EQUAL_LONG(kvsim_equal_long_avx512, __attribute__((target("avx512f"))), __m512i, 1, _mm512, 512)
    #undef _mm512_set1_epi64x
    #endif
    static int64_t kvsim_equal_long_blocks(
        uint32_t token, int64_t n, int64_t n_bytes, const uint64_t* secret, uint64_t* out) {
    #if defined(__x86_64__)
        if (__builtin_cpu_supports("avx512f")) {
            kvsim_equal_long_avx512(token, n, n_bytes, secret, out);
            return n;
        }
        if (__builtin_cpu_supports("avx2")) {
            kvsim_equal_long_avx2(token, n, n_bytes, secret, out);
            return n;
        }
    #endif
        return 0;
    }
    """
    const int64_t MAX_TOKENS "KVSIM_MAX_TOKENS"
    int64_t equal_long_blocks "kvsim_equal_long_blocks"(
        uint32_t token, int64_t n, int64_t n_bytes, const uint64_t* secret, uint64_t* out
    ) noexcept nogil
    int64_t stream_blocks "kvsim_stream_blocks"(
        const uint32_t* key, uint64_t block, int64_t n, uint32_t* words
    ) noexcept nogil

cdef enum:
    MAX_RUN_HASHES = 65536  # rows of the table of local hashes of runs: 1 MB
    DRAWN = 4096  # words of the stream of plans that are made at a time
    NUMBERED = 64  # hashes of numbered blocks that are made at a time
    LINK_LANES = 4  # chains of hashes that are made at a time
    HEAD_TOKENS = 32  # least tokens that the head of a request stands for (sglang.md section 1.4)


cdef struct segment_t:  # layout.SEGMENT
    uint32_t start
    uint32_t step
    int64_t length


cdef struct run_hash_t:  # local hash of a block of equal tokens, at index token modulo the table size
    uint64_t local
    uint32_t token
    uint32_t is_set


cdef struct chain_t:  # one request's content on its way through the hash functions
    int64_t block_size
    int64_t left  # tokens still to come, up to the end of the last full block
    int64_t filled  # tokens of the block under way in `scratch`, < block_size
    uint32_t* scratch  # block_size tokens
    uint64_t parent  # with `runs`: sequence hash of the last block of the head so far
    int64_t n_blocks  # finished blocks
    uint64_t* hashes  # where the next local hash goes; `link_chains` makes sequence hashes of them
    uint64_t* local  # where it goes to stay, or NULL
    int64_t stride  # words from one hash to the next
    run_t* runs  # where the next run goes; NULL: hashes are written, not runs
    int64_t head_blocks  # with `runs`: leading blocks whose sequence hash is needed
    uint64_t[24] secret  # of BLOCK_HASH_SEED
    const uint64_t* equal  # local hashes of blocks of token 0, 1, ... only
    uint64_t n_equal
    run_hash_t* run_hashes  # NULL: only the last run is remembered
    uint32_t run_mask
    run_hash_t last_run


cdef inline void chain_start(chain_t* chain, int64_t n_tokens) noexcept nogil:
    """Begin a request of `n_tokens`; the outputs point at its first block."""
    chain.left = n_tokens - n_tokens % chain.block_size
    chain.filled = 0
    chain.n_blocks = 0


cdef inline uint64_t chain_link(uint64_t parent, uint64_t local, int64_t index) noexcept nogil:
    """Sequence hash of the block at `index`; the first has no parent."""
    return local if index == 0 else xxh3_pair(parent, local)


cdef inline void chain_push_run(chain_t* chain, uint64_t local, int64_t n) noexcept nogil:
    """Append `n` >= 1 finished blocks with this local hash to the run under way, or as a new one."""
    cdef int64_t i = chain.n_blocks
    cdef run_t* last = chain.runs - 1
    if i > 0 and last.key == local:
        last.pages += n
    else:
        chain.runs.key = local
        chain.runs.seq = 0
        chain.runs.pages = n
        chain.runs += 1
    chain.n_blocks += n
    while i < chain.n_blocks and i < chain.head_blocks:
        chain.parent = chain_link(chain.parent, local, i)
        i += 1


cdef inline void chain_push(chain_t* chain, uint64_t local, int64_t n) noexcept nogil:
    """Append `n` >= 1 finished blocks with this local hash."""
    cdef int64_t i
    if chain.runs != NULL:
        chain_push_run(chain, local, n)
        return
    for i in range(n):
        chain.hashes[i * chain.stride] = local
    chain.hashes += n * chain.stride
    if chain.local != NULL:
        for i in range(n):
            chain.local[i * chain.stride] = local
        chain.local += n * chain.stride
    chain.n_blocks += n


cdef inline int64_t next_chain(
    uint64_t** at, int64_t* left, uint64_t* hashes, int64_t stride, const int64_t* offset, int64_t i, int64_t n
) noexcept nogil:
    """Point `at` and `left` at the blocks of the first request from `i` on that has a second one; the one after it."""
    left[0] = 0
    while i < n and left[0] == 0:
        if offset[i + 1] - offset[i] > 1:
            at[0] = hashes + (offset[i] + 1) * stride
            left[0] = offset[i + 1] - offset[i] - 1
        i += 1
    return i


cdef void link_chains(uint64_t* hashes, int64_t stride, const int64_t* offset, int64_t n) noexcept nogil:
    """Make sequence hashes of the local hashes of `n` requests, in place.

    A hash needs the one before it, so four requests are linked at a time: the processor works on all of them.
    """
    cdef uint64_t* at[LINK_LANES]
    cdef int64_t[LINK_LANES] left
    cdef uint64_t h0, h1, h2, h3
    cdef int64_t next_one = 0
    cdef int64_t i, steps, lane
    for lane in range(LINK_LANES):
        next_one = next_chain(&at[lane], &left[lane], hashes, stride, offset, next_one, n)
    while left[0] and left[1] and left[2] and left[3]:
        steps = min(min(left[0], left[1]), min(left[2], left[3]))
        h0, h1, h2, h3 = at[0][-stride], at[1][-stride], at[2][-stride], at[3][-stride]
        for i in range(steps):
            h0 = xxh3_pair(h0, at[0][i * stride])
            h1 = xxh3_pair(h1, at[1][i * stride])
            h2 = xxh3_pair(h2, at[2][i * stride])
            h3 = xxh3_pair(h3, at[3][i * stride])
            at[0][i * stride] = h0
            at[1][i * stride] = h1
            at[2][i * stride] = h2
            at[3][i * stride] = h3
        for lane in range(LINK_LANES):
            at[lane] += steps * stride
            left[lane] -= steps
            if left[lane] == 0:
                next_one = next_chain(&at[lane], &left[lane], hashes, stride, offset, next_one, n)
    for lane in range(LINK_LANES):
        for i in range(left[lane]):
            at[lane][i * stride] = xxh3_pair(at[lane][(i - 1) * stride], at[lane][i * stride])


cdef inline void chain_close_scratch(chain_t* chain) noexcept nogil:
    """Hash the scratch row if it is full."""
    if chain.filled == chain.block_size:
        chain_push(chain, xxh3_tokens(chain.scratch, chain.block_size, chain.secret), 1)
        chain.filled = 0


cdef inline uint64_t chain_run_hash(chain_t* chain, uint32_t token) noexcept nogil:
    """Local hash of a block of `token` only."""
    cdef run_hash_t* entry = &chain.last_run
    if token < chain.n_equal:
        return chain.equal[token]
    if chain.run_hashes != NULL:
        entry = &chain.run_hashes[token & chain.run_mask]
    if not entry.is_set or entry.token != token:
        entry.local = xxh3_equal_tokens(token, chain.block_size, chain.secret)
        entry.token = token
        entry.is_set = 1
    return entry.local


cdef void equal_blocks(uint32_t token, int64_t n, int64_t size, const uint64_t* secret, uint64_t* out) noexcept nogil:
    """Local hashes of `n` blocks, each of one token only: token, token + 1, ..."""
    cdef int64_t done = 0
    cdef int64_t i
    cdef uint64_t word
    if 4 * size > XXH3_SHORT_BYTES:
        done = equal_long_blocks(token, n, 4 * size, secret, out)
    elif size == 16:  # with the count known, nothing is left to decide for each block
        for i in range(n):
            word = token + <uint32_t> i
            out[i] = xxh3_equal_words(word << 32 | word, 64)
        return
    for i in range(done, n):
        out[i] = xxh3_equal_tokens(token + <uint32_t> i, size, secret)


cdef inline void fill_tokens(uint32_t* out, uint32_t start, uint32_t step, int64_t n) noexcept nogil:
    """Write tokens start, start + step, ... modulo 2**32."""
    cdef int64_t i
    for i in range(n):
        out[i] = start + step * <uint32_t> i


cdef void chain_segment(chain_t* chain, const segment_t* segment) noexcept nogil:
    """Feed a segment, as far as the request still needs it."""
    cdef int64_t size = chain.block_size
    cdef int64_t n = segment.length if segment.length < chain.left else chain.left
    cdef uint32_t start = segment.start
    cdef uint32_t step = segment.step
    cdef int64_t i, take, n_whole
    chain.left -= n
    if chain.filled:
        take = n if n < size - chain.filled else size - chain.filled
        fill_tokens(chain.scratch + chain.filled, start, step, take)
        chain.filled += take
        n -= take
        start += step * <uint32_t> take
        chain_close_scratch(chain)
    # Many segments are one block: no division for those.
    n_whole = 1 if n == size else (n // size if n > size else 0)
    if n_whole and step == 0:
        chain_push(chain, chain_run_hash(chain, start), n_whole)
    elif n_whole:
        for i in range(n_whole):
            fill_tokens(chain.scratch, start, step, size)
            chain_push(chain, xxh3_tokens(chain.scratch, size, chain.secret), 1)
            start += step * <uint32_t> size
    n -= n_whole * size
    if n:
        fill_tokens(chain.scratch, start, step, n)
        chain.filled = n


cdef void chain_numbered(chain_t* chain, uint32_t number, int64_t length, int64_t n) noexcept nogil:
    """Feed the first `n` tokens of the runs of number, number + 1, ..., each of `length` tokens, as far as needed."""
    cdef uint64_t[NUMBERED] local
    cdef segment_t segment
    cdef int64_t i, take
    n = n if n < chain.left else chain.left
    if length == chain.block_size:
        while n >= length:  # nothing is under way: it is the beginning of a request
            take = min(n // length, <int64_t> NUMBERED)
            equal_blocks(number, take, length, chain.secret, local)
            for i in range(take):
                chain_push(chain, local[i], 1)
            number += <uint32_t> take
            n -= take * length
            chain.left -= take * length
    segment.step = 0
    while n > 0:
        segment.start = number
        segment.length = length if length < n else n
        chain_segment(chain, &segment)
        n -= segment.length
        number += 1


cdef void chain_tokens(chain_t* chain, const uint32_t* tokens, int64_t n) noexcept nogil:
    """Feed `n` spelled-out tokens, as far as the request still needs them."""
    cdef int64_t size = chain.block_size
    cdef int64_t take
    n = n if n < chain.left else chain.left
    chain.left -= n
    if chain.filled and n:
        take = n if n < size - chain.filled else size - chain.filled
        memcpy(chain.scratch + chain.filled, tokens, <size_t> take * 4)
        chain.filled += take
        tokens += take
        n -= take
        chain_close_scratch(chain)
    while n >= size:
        chain_push(chain, xxh3_tokens(tokens, size, chain.secret), 1)
        tokens += size
        n -= size
    if n:
        memcpy(chain.scratch, tokens, <size_t> n * 4)
        chain.filled = n


cdef void chain_synthetic(chain_t* chain, uint64_t id_hi, uint64_t id_lo, int64_t n) noexcept nogil:
    """Feed the first `n` outputs of a request without planned ids, as far as needed."""
    cdef int64_t i
    n = n if n < chain.left else chain.left
    chain.left -= n
    for i in range(n):
        chain.scratch[chain.filled] = synthetic_token(id_hi, id_lo, <uint64_t> i)
        chain.filled += 1
        chain_close_scratch(chain)


cdef inline int64_t content_tokens(int64_t n_input, int64_t n_output, int64_t max_tokens) noexcept nogil:
    """Tokens a request can come to: prompt and outputs, cut to `max_tokens`."""
    return n_input + n_output if n_input + n_output < max_tokens else max_tokens


cdef struct workload_t:  # the requests and their tables; rows that have passed `check_request`
    const request_spec_t* specs
    const segment_t* segments  # NULL: numbered runs, each of `run_tokens` tokens that are its own number
    int64_t run_tokens
    const uint32_t* tokens
    const uint32_t* planned  # NULL: the words of a random stream
    uint32_t[8] plan_key  # of that stream
    uint32_t* words  # DRAWN of its words, from number `first_word` on
    int64_t first_word
    int64_t n
    int64_t n_segments
    int64_t n_tokens
    int64_t n_planned


cdef void chain_drawn(chain_t* chain, workload_t* work, int64_t position, int64_t n) noexcept nogil:
    """Feed words position, position + 1, ... of the stream of plans, as far as needed."""
    cdef int64_t take
    cdef int64_t made
    n = n if n < chain.left else chain.left
    while n > 0:
        if not work.first_word <= position < work.first_word + DRAWN:
            work.first_word = position - position % 16
            made = stream_blocks(work.plan_key, <uint64_t> work.first_word // 16, DRAWN // 16, work.words)
            while made < DRAWN // 16:
                rng_block(work.plan_key, <uint64_t> (work.first_word // 16 + made), work.words + 16 * made)
                made += 1
        take = work.first_word + DRAWN - position
        take = take if take < n else n
        chain_tokens(chain, work.words + (position - work.first_word), take)
        position += take
        n -= take


cdef void chain_request(chain_t* chain, workload_t* work, int64_t index, int64_t max_tokens) noexcept nogil:
    """Append the blocks of one request."""
    cdef const request_spec_t* spec = &work.specs[index]
    cdef int64_t left_input = spec.input_tokens
    cdef int64_t row = spec.prompt_offset
    cdef segment_t segment
    chain_start(chain, content_tokens(spec.input_tokens, spec.max_output_tokens, max_tokens))
    if spec.prompt_is_tokens:
        chain_tokens(chain, work.tokens + row, left_input)
    elif work.segments == NULL:
        chain_numbered(chain, <uint32_t> row, work.run_tokens, left_input)
    else:
        while left_input > 0 and chain.left > 0:
            segment = work.segments[row]
            segment.length = segment.length if segment.length < left_input else left_input
            chain_segment(chain, &segment)
            left_input -= segment.length
            row += 1
    if spec.planned_offset >= 0 and work.planned == NULL:
        chain_drawn(chain, work, spec.planned_offset, spec.max_output_tokens)
    elif spec.planned_offset >= 0:
        chain_tokens(chain, work.planned + spec.planned_offset, spec.max_output_tokens)
    else:
        chain_synthetic(chain, spec.id_hi, spec.id_lo, spec.max_output_tokens)


cdef inline int64_t most_runs(int64_t n_tokens, bint are_equal, int64_t block_size) noexcept nogil:
    """Most runs that a piece of content adds: those of its whole blocks, and the block across its end."""
    return 2 if are_equal else n_tokens // block_size + 1


cdef int64_t most_runs_request(
    const workload_t* work, int64_t index, int64_t block_size, int64_t max_tokens
) noexcept nogil:
    """Most runs that a request can have."""
    cdef const request_spec_t* spec = &work.specs[index]
    cdef int64_t n = content_tokens(spec.input_tokens, spec.max_output_tokens, max_tokens)
    cdef int64_t left = spec.input_tokens if spec.input_tokens < n else n
    cdef int64_t most = most_runs(n - left, False, block_size)
    cdef const segment_t* segment
    if spec.prompt_is_tokens:
        most += most_runs(left, False, block_size)
    elif work.segments == NULL:
        most += ((left - 1) // work.run_tokens + 1) * most_runs(0, True, block_size) if left else 0
    else:
        segment = work.segments + spec.prompt_offset
        while left > 0:
            most += most_runs(segment.length if segment.length < left else left, segment.step == 0, block_size)
            left -= segment.length
            segment += 1
    return most if most < n // block_size else n // block_size


cdef enum check_t:  # what `check_request` found wrong
    CHECK_OK
    CHECK_INPUT
    CHECK_OUTPUT
    CHECK_PROMPT_FLAG
    CHECK_PROMPT_ROWS
    CHECK_STEP
    CHECK_LENGTH
    CHECK_PROMPT_SHORT
    CHECK_PLANNED


cdef check_t check_request(const request_spec_t* spec, const workload_t* work) noexcept nogil:
    """Whether the row can be hashed without leaving any table."""
    cdef int64_t n_rows = work.n_tokens if spec.prompt_is_tokens else work.n_segments
    cdef int64_t covered = 0
    cdef int64_t i
    if not 0 <= spec.input_tokens <= MAX_TOKENS:
        return CHECK_INPUT
    if not 0 <= spec.max_output_tokens <= MAX_TOKENS:
        return CHECK_OUTPUT
    if not 0 <= spec.prompt_is_tokens <= 1:
        return CHECK_PROMPT_FLAG
    if spec.prompt_offset < 0 or spec.prompt_count < 0 or spec.prompt_offset > n_rows - spec.prompt_count:
        return CHECK_PROMPT_ROWS
    if spec.prompt_is_tokens:
        covered = spec.prompt_count
    elif work.segments == NULL:
        covered = work.run_tokens * spec.prompt_count  # both are below 2**31
    else:
        for i in range(spec.prompt_offset, spec.prompt_offset + spec.prompt_count):
            if work.segments[i].step > 1:
                return CHECK_STEP
            if not 0 <= work.segments[i].length <= MAX_TOKENS:
                return CHECK_LENGTH
            # Saturates, so that no sum of lengths can overflow.
            covered = covered + work.segments[i].length if covered < spec.input_tokens else covered
    if covered < spec.input_tokens:
        return CHECK_PROMPT_SHORT
    if spec.planned_offset < -1 or (
        spec.planned_offset >= 0 and spec.planned_offset > work.n_planned - spec.max_output_tokens
    ):
        return CHECK_PLANNED
    return CHECK_OK


cdef _reject_request(check_t found, int64_t row, specs, const workload_t* work):
    """Raise the ValueError for what `check_request` found in `row`."""
    spec = specs[row]
    table = "tokens" if spec["prompt_is_tokens"] else "segments"
    n_rows = work.n_tokens if spec["prompt_is_tokens"] else work.n_segments
    messages = {
        CHECK_INPUT: f"input_tokens: must lie in 0..2**61, got {spec['input_tokens']}",
        CHECK_OUTPUT: f"max_output_tokens: must lie in 0..2**61, got {spec['max_output_tokens']}",
        CHECK_PROMPT_FLAG: f"prompt_is_tokens: must be 0 or 1, got {spec['prompt_is_tokens']}",
        CHECK_PROMPT_ROWS: f"prompt_offset, prompt_count: must lie within the {n_rows} rows of {table}, "
        f"got {spec['prompt_offset']}, {spec['prompt_count']}",
        CHECK_STEP: "prompt: the step of a segment must be 0 or 1",
        CHECK_LENGTH: "prompt: the length of a segment must lie in 0..2**61",
        CHECK_PROMPT_SHORT: f"prompt: its {table} must hold at least input_tokens = {spec['input_tokens']} tokens",
        CHECK_PLANNED: f"planned_offset: must be -1 or leave room for max_output_tokens = "
        f"{spec['max_output_tokens']} ids in a table of {work.n_planned}, got {spec['planned_offset']}",
    }
    raise ValueError(f"specs[{row}].{messages[found]}")


cdef inline void* data_of(object array) noexcept:
    """First byte of a NumPy array that the caller has checked and keeps alive."""
    return cnp.PyArray_DATA(<cnp.ndarray> array)


def _check_array(name, array, dtype):
    """Raise ValueError unless `array` is a one-dimensional, contiguous array of `dtype`."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name}: must be an array of {dtype}, got {type(array).__name__}")
    if array.dtype != dtype:
        raise ValueError(f"{name}: must have dtype {dtype}, got {array.dtype}")
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"{name}: must be one-dimensional and contiguous, got shape {array.shape}")
    if <uintptr_t> data_of(array) % (4 if dtype.itemsize == 4 else 8):
        raise ValueError(f"{name}: must be aligned in memory; a copy is")


def _check_int(name, value, low, high):
    """`value` as int; ValueError unless it is a whole number in low..high."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise ValueError(f"{name}: must be a whole number in {low}..{high}, got {value!r}")
    return int(value)


cdef int64_t count_parts(object parts) except -1:
    """Number of tokens of `parts`; ValueError unless each is a uint32 or SEGMENT array that can be read."""
    cdef int64_t total = 0
    cdef int64_t i, n
    cdef const segment_t* rows
    for index, part in enumerate(parts):
        if isinstance(part, np.ndarray) and part.dtype == SEGMENT:
            _check_array(f"parts[{index}]", part, SEGMENT)
            rows = <const segment_t*> data_of(part)
            for i in range(part.size):
                if rows[i].step > 1:
                    raise ValueError(f"parts[{index}][{i}].step: must be 0 or 1, got {rows[i].step}")
                if not 0 <= rows[i].length <= MAX_TOKENS - total:
                    raise ValueError(
                        f"parts[{index}][{i}].length: must be >= 0 and come to at most 2**61 in all, "
                        f"got {rows[i].length}"
                    )
                total += rows[i].length
        else:
            _check_array(f"parts[{index}]", part, _UINT32)
            n = part.size
            if n > MAX_TOKENS - total:
                raise ValueError(f"parts[{index}]: all parts must come to at most 2**61 tokens")
            total += n
    return total


cdef open_workload(
    workload_t* work, specs, segments, tokens, planned, int64_t block_size, int64_t max_tokens
):
    """Fill `work`; ValueError if an array has the wrong form or a row points outside a table.

    Returns the first block of each request, and of the end, as an int64 array, and memory to keep alive.
    """
    cdef rng_t rng
    _check_array("specs", specs, REQUEST_SPEC)
    _check_array("tokens", tokens, _UINT32)
    if isinstance(segments, tuple):
        work.segments = NULL
        work.n_segments = _check_int("segments[0]", segments[0], 0, 2**31 - 1)
        work.run_tokens = _check_int("segments[1]", segments[1], 1, 2**31 - 1)
    else:
        _check_array("segments", segments, SEGMENT)
        work.segments = <const segment_t*> data_of(segments)
        work.n_segments = segments.size
    words = None
    if isinstance(planned, tuple):
        rng_seed(&rng, <uint64_t> _check_int("planned", planned[0], 0, 2**64 - 1))
        memcpy(work.plan_key, rng.key, sizeof(work.plan_key))
        words = np.empty(DRAWN, dtype=np.uint32)
        work.planned = NULL
        work.words = <uint32_t*> data_of(words)
        work.first_word = -DRAWN
        work.n_planned = _check_int("planned", planned[1], 0, MAX_TOKENS)
    else:
        _check_array("planned", planned, _UINT32)
        work.planned = <const uint32_t*> data_of(planned)
        work.n_planned = planned.size
    work.specs = <const request_spec_t*> data_of(specs)
    work.tokens = <const uint32_t*> data_of(tokens)
    work.n = specs.size
    work.n_tokens = tokens.size
    offsets = np.empty(work.n + 1, dtype=np.int64)
    cdef int64_t* offset = <int64_t*> data_of(offsets)
    cdef check_t found = CHECK_OK
    cdef int64_t i, blocks
    cdef int64_t total = 0
    with nogil:
        offset[0] = 0
        for i in range(work.n):
            found = check_request(&work.specs[i], work)
            if found != CHECK_OK:
                break
            blocks = content_tokens(
                work.specs[i].input_tokens, work.specs[i].max_output_tokens, max_tokens
            ) // block_size
            if total > MAX_TOKENS - blocks:
                found = CHECK_OUTPUT
                break
            total += blocks
            offset[i + 1] = total
    if found != CHECK_OK:
        _reject_request(found, i, specs, work)
    return offsets, words


cdef chain_open(chain_t* chain, int64_t block_size, bint has_blocks, int64_t n_segments, equal_hashes):
    """Prepare `chain` for content whose prompts have `n_segments` segments in all; the caller sets its outputs.

    Returns the memory it works in, which the caller keeps alive, as `equal_hashes`.
    """
    chain.equal, chain.n_equal = NULL, 0
    if equal_hashes is not None:
        _check_array("equal_hashes", equal_hashes, _UINT64)
        chain.equal, chain.n_equal = <const uint64_t*> data_of(equal_hashes), equal_hashes.size
        n_segments = 0
    scratch = np.empty(block_size if has_blocks else 0, dtype=np.uint32)
    # Short blocks are hashed as fast as the table is read; one segment needs no table.
    cdef int64_t n_hashes = 0
    if 4 * block_size > XXH3_SHORT_BYTES and n_segments > 1:
        n_hashes = 1
        while n_hashes < n_segments and n_hashes < MAX_RUN_HASHES:
            n_hashes *= 2
    run_hashes = np.zeros(2 * n_hashes, dtype=np.uint64)
    xxh3_derive_secret(chain.secret, BLOCK_HASH_SEED)
    chain.block_size = block_size
    chain.scratch = <uint32_t*> data_of(scratch)
    chain.stride = 1
    chain.runs = NULL
    chain.run_hashes = <run_hash_t*> data_of(run_hashes) if n_hashes else NULL
    chain.run_mask = <uint32_t> (n_hashes - 1)
    chain.last_run.is_set = 0
    return scratch, run_hashes


cdef chain_open_runs(chain_t* chain, int64_t most, bint with_hashes):
    """Direct the output of a prepared chain to RUN rows, which are returned; there are at most `most`.

    With hashes a row is a block, whose hashes are written between the other columns.
    """
    runs = np.empty(most, dtype=RUN)
    cdef run_t* first = <run_t*> data_of(runs)
    if with_hashes:
        runs["pages"] = 1
        chain.hashes = &first.seq
        chain.local = &first.key
        chain.stride = sizeof(run_t) // sizeof(uint64_t)
    else:
        chain.runs = first
        chain.head_blocks = head_length(chain.block_size)
    return runs


cdef int64_t count_segments(const workload_t* work) noexcept nogil:
    """Rows of all prompts given as segments; 0 of numbered runs, none of which has the token of another."""
    cdef int64_t n = 0
    cdef int64_t i
    if work.segments == NULL:
        return 0
    for i in range(work.n):
        n += 0 if work.specs[i].prompt_is_tokens else work.specs[i].prompt_count
    return n


cdef inline int64_t head_length(int64_t block_size) noexcept nogil:
    """Blocks that the head of a request stands for."""
    return (HEAD_TOKENS - 1) // block_size + 1


cdef inline uint64_t page_head(const run_t* first, int64_t n_pages, int64_t page_size) noexcept nogil:
    """Head of a request whose rows are its pages; 0 when it is shorter."""
    cdef int64_t length = head_length(page_size)
    return first[length - 1].seq if n_pages >= length else 0


cdef int chain_parts(chain_t* chain, parts, outputs, uint64_t id_hi, uint64_t id_lo, int64_t n_output) except -1:
    """Append the blocks of one request, given by arrays that have been checked."""
    cdef const segment_t* rows
    cdef int64_t i
    for part in parts:
        if part.dtype == SEGMENT:
            rows = <const segment_t*> data_of(part)
            for i in range(part.size):
                chain_segment(chain, &rows[i])
        else:
            chain_tokens(chain, <const uint32_t*> data_of(part), part.size)
    if outputs is not None:
        chain_tokens(chain, <const uint32_t*> data_of(outputs), n_output)
    else:
        chain_synthetic(chain, id_hi, id_lo, n_output)
    return 0


cdef int64_t check_parts(parts, outputs, id_hi, id_lo, num_output, max_tokens) except -1:
    """Tokens of one request's content; ValueError unless everything can be read."""
    cdef int64_t n_input = count_parts(parts)
    cdef int64_t n_output = _check_int("num_output", num_output, 0, MAX_TOKENS)
    _check_int("id_hi", id_hi, 0, 2**64 - 1)
    _check_int("id_lo", id_lo, 0, 2**64 - 1)
    if outputs is not None:
        _check_array("outputs", outputs, _UINT32)
        if outputs.size < n_output:
            raise ValueError(f"outputs: must hold num_output = {n_output} ids, got {outputs.size}")
    return content_tokens(n_input, n_output, _check_int("max_tokens", max_tokens, 0, 2**63 - 1))


def xxh3_64(const uint8_t[::1] data not None, seed=0):
    """XXH3-64 of bytes.

    Parameters
    ----------
    data : bytes-like
        Any length.
    seed : int
        0..2**64 - 1.

    Returns
    -------
    int
        0..2**64 - 1.

    Raises
    ------
    ValueError
        If `data` is not contiguous bytes or `seed` is out of range.
    """
    cdef uint64_t start = _check_int("seed", seed, 0, 2**64 - 1)
    cdef size_t n = data.shape[0]
    cdef const uint8_t* first = &data[0] if n else NULL
    cdef uint64_t h
    with nogil:
        h = hash_bytes(first, n, start)
    return h


def hash_workload(specs, segments, tokens, planned, block_size, max_tokens, want_local, equal_hashes=None):
    """Block hashes of all requests of a workload.

    The content of a request is its prompt, then its outputs (planned ids, or the
    made-up ones of vllm.md section 2), cut to `max_tokens`. Only full blocks are hashed.

    Parameters
    ----------
    specs : ndarray of REQUEST_SPEC, shape (n_requests,)
        A prompt may have more tokens than `input_tokens`; the surplus is left out.
    segments : ndarray of SEGMENT, shape (n_segments,), or (int, int)
        Prompts as runs of tokens; or how many runs and the length of each: run ``i`` repeats token ``i``.
    tokens : ndarray of uint32, shape (n_tokens,)
        Prompts as token ids.
    planned : ndarray of uint32, shape (n_planned,), or (int, int)
        Planned output ids; or a seed and how many: the words of its random stream (`planned_tokens`).
    block_size : int
        Tokens per block, >= 1.
    max_tokens : int
        Longest content of a request, >= 0.
    want_local : bool
        Whether local hashes are wanted too.
    equal_hashes : ndarray of uint64, optional
        `equal_block_hashes` for blocks of this size, for some of the tokens of the runs.

    Returns
    -------
    hashes : ndarray of uint64, shape (n_blocks,)
        Sequence hashes, request after request.
    local : ndarray of uint64, shape (n_blocks,), or None
        Local hashes.
    offsets : ndarray of int64, shape (n_requests + 1,)
        Request ``i`` has the blocks ``offsets[i]:offsets[i + 1]``.

    Raises
    ------
    ValueError
        If an array has the wrong dtype or form, or a row points outside a table.
    """
    cdef int64_t size = _check_int("block_size", block_size, 1, MAX_TOKENS)
    cdef int64_t limit = _check_int("max_tokens", max_tokens, 0, 2**63 - 1)
    cdef workload_t work
    cdef chain_t chain
    cdef int64_t i
    offsets, words = open_workload(&work, specs, segments, tokens, planned, size, limit)
    total = offsets[work.n]
    hashes = np.empty(total, dtype=np.uint64)
    local = np.empty(total, dtype=np.uint64) if want_local else None
    memory = chain_open(&chain, size, total > 0, count_segments(&work), equal_hashes)
    cdef uint64_t* first = <uint64_t*> data_of(hashes)
    cdef const int64_t* offset = <const int64_t*> data_of(offsets)
    chain.hashes = first
    chain.local = <uint64_t*> data_of(local) if want_local else NULL
    with nogil:
        for i in range(work.n):
            chain_request(&chain, &work, i, limit)
        link_chains(first, 1, offset, work.n)
    return hashes, local, offsets


def hash_parts(parts, outputs, id_hi, id_lo, num_output, block_size, max_tokens, want_local):
    """Block hashes of one request.

    Parameters
    ----------
    parts : list of ndarray
        The prompt: uint32 token ids or SEGMENT rows, one after the other.
    outputs : ndarray of uint32, shape (>= num_output,), or None
        Output ids; None makes them up by the rule of vllm.md section 2.
    id_hi, id_lo : int
        Upper and lower 64 bits of the request id, 0..2**64 - 1; only read when `outputs` is None.
    num_output : int
        Outputs that count, >= 0.
    block_size, max_tokens, want_local
        As for `hash_workload`.

    Returns
    -------
    hashes : ndarray of uint64, shape (n_blocks,)
        Sequence hashes of the full blocks.
    local : ndarray of uint64, shape (n_blocks,), or None
        Local hashes.

    Raises
    ------
    ValueError
        If an array has the wrong dtype or form, `outputs` is too short or a number out of range.
    """
    cdef int64_t size = _check_int("block_size", block_size, 1, MAX_TOKENS)
    cdef int64_t n = check_parts(parts, outputs, id_hi, id_lo, num_output, max_tokens)
    cdef chain_t chain
    hashes = np.empty(n // size, dtype=np.uint64)
    local = np.empty(n // size, dtype=np.uint64) if want_local else None
    memory = chain_open(&chain, size, n >= size, 0, None)
    chain.hashes = <uint64_t*> data_of(hashes)
    chain.local = <uint64_t*> data_of(local) if want_local else NULL
    chain_start(&chain, n)
    chain_parts(&chain, parts, outputs, id_hi, id_lo, num_output)
    link_chains(<uint64_t*> data_of(hashes), 1, [0, chain.n_blocks], 1)
    return hashes, local


def runs_workload(specs, segments, tokens, planned, page_size, max_tokens, with_hashes, equal_hashes=None):
    """Full pages of all requests of a workload, as runs of equal ones (sglang.md section 4).

    The content of a request is the one of `hash_workload`.

    Parameters
    ----------
    specs, segments, tokens, planned, max_tokens, equal_hashes
        As for `hash_workload`.
    page_size : int
        Tokens per page, >= 1.
    with_hashes : bool
        Whether sequence hashes are wanted: a row is then one page. Otherwise it is as many
        equal pages as follow each other, and costs the same for any number of them.

    Returns
    -------
    runs : ndarray of RUN, shape (n_runs,)
        Request after request.
    offsets : ndarray of int64, shape (n_requests + 1,)
        Request ``i`` has the rows ``offsets[i]:offsets[i + 1]``.
    heads : ndarray of uint64, shape (n_requests,)
        Sequence hash of the first pages that come to 32 tokens or more: equal for requests
        that begin with the same tokens. 0: the content is shorter.

    Raises
    ------
    ValueError
        If an array has the wrong dtype or form, or a row points outside a table.
    """
    cdef int64_t size = _check_int("page_size", page_size, 1, MAX_TOKENS)
    cdef int64_t limit = _check_int("max_tokens", max_tokens, 0, 2**63 - 1)
    cdef workload_t work
    cdef chain_t chain
    cdef int64_t i
    cdef int64_t most = 0
    cdef bint merged = not with_hashes
    offsets, words = open_workload(&work, specs, segments, tokens, planned, size, limit)
    cdef int64_t* offset = <int64_t*> data_of(offsets)
    if merged:
        with nogil:
            for i in range(work.n):
                most += most_runs_request(&work, i, size, limit)
    else:
        most = offset[work.n]
    heads = np.empty(work.n, dtype=np.uint64)
    cdef uint64_t* head = <uint64_t*> data_of(heads)
    memory = chain_open(&chain, size, offset[work.n] > 0, count_segments(&work), equal_hashes)
    runs = chain_open_runs(&chain, most, with_hashes)
    cdef run_t* rows = <run_t*> data_of(runs)
    with nogil:
        for i in range(work.n):
            chain_request(&chain, &work, i, limit)
            if merged:
                head[i] = chain.parent if chain.n_blocks >= head_length(size) else 0
                offset[i + 1] = chain.runs - rows
        if not merged:
            link_chains(&rows.seq, chain.stride, offset, work.n)
            for i in range(work.n):
                head[i] = page_head(&rows[offset[i]], offset[i + 1] - offset[i], size)
    # Gives back what was reserved in vain, without a copy.
    runs.resize(offset[work.n], refcheck=False)
    return runs, offsets, heads


def runs_parts(parts, outputs, id_hi, id_lo, num_output, page_size, max_tokens, with_hashes):
    """Full pages of one request, as runs of equal ones.

    Parameters
    ----------
    parts, outputs, id_hi, id_lo, num_output, max_tokens
        As for `hash_parts`.
    page_size, with_hashes
        As for `runs_workload`.

    Returns
    -------
    runs : ndarray of RUN, shape (n_runs,)
    head : int
        As an entry of the heads of `runs_workload`.

    Raises
    ------
    ValueError
        If an array has the wrong dtype or form, `outputs` is too short or a number out of range.
    """
    cdef int64_t size = _check_int("page_size", page_size, 1, MAX_TOKENS)
    cdef int64_t n = check_parts(parts, outputs, id_hi, id_lo, num_output, max_tokens)
    cdef int64_t most = n // size
    cdef int64_t pieces
    cdef chain_t chain
    if not with_hashes:
        pieces = most_runs(num_output, False, size)
        for part in parts:
            if part.dtype == SEGMENT:
                counting = part["length"][part["step"] == 1]
                pieces += most_runs(0, True, size) * <int64_t> part.size + <int64_t> (counting // size).sum()
            else:
                pieces += most_runs(part.size, False, size)
        most = pieces if pieces < most else most
    memory = chain_open(&chain, size, n >= size, 0, None)
    runs = chain_open_runs(&chain, most, with_hashes)
    cdef run_t* rows = <run_t*> data_of(runs)
    chain_start(&chain, n)
    chain_parts(&chain, parts, outputs, id_hi, id_lo, num_output)
    if with_hashes:
        link_chains(&rows.seq, chain.stride, [0, chain.n_blocks], 1)
        return runs, page_head(rows, chain.n_blocks, size)
    head = chain.parent if chain.n_blocks >= head_length(size) else 0
    runs.resize(chain.runs - rows, refcheck=False)
    return runs, head


def equal_block_hashes(count, block_size):
    """Local hashes of blocks of one token only, for the tokens 0, 1, ...

    Parameters
    ----------
    count : int
        How many tokens, 0..2**32.
    block_size : int
        Tokens per block, >= 1.

    Returns
    -------
    ndarray of uint64, shape (count,)

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    cdef int64_t n = _check_int("count", count, 0, 2**32)
    cdef int64_t size = _check_int("block_size", block_size, 1, MAX_TOKENS)
    cdef uint64_t[24] secret
    out = np.empty(n, dtype=np.uint64)
    cdef uint64_t* hashes = <uint64_t*> data_of(out)
    with nogil:
        xxh3_derive_secret(secret, BLOCK_HASH_SEED)
        equal_blocks(0, n, size, secret, hashes)
    return out


def expand_parts(parts):
    """Token ids of a prompt, spelled out.

    Parameters
    ----------
    parts : list of ndarray
        uint32 token ids or SEGMENT rows, one after the other.

    Returns
    -------
    ndarray of uint32, shape (n_tokens,)

    Raises
    ------
    ValueError
        If an array has the wrong dtype or form.
    """
    out = np.empty(count_parts(parts), dtype=np.uint32)
    cdef uint32_t* at = <uint32_t*> data_of(out)
    cdef const segment_t* rows
    cdef int64_t i
    for part in parts:
        if part.dtype == SEGMENT:
            rows = <const segment_t*> data_of(part)
            for i in range(part.size):
                fill_tokens(at, rows[i].start, rows[i].step, rows[i].length)
                at += rows[i].length
        else:
            memcpy(at, data_of(part), <size_t> part.nbytes)
            at += <int64_t> part.size
    return out


def synthetic_tokens(id_hi, id_lo, count):
    """First `count` output ids of a request without planned ids (vllm.md section 2).

    Parameters
    ----------
    id_hi, id_lo : int
        Upper and lower 64 bits of the request id, 0..2**64 - 1.
    count : int
        >= 0.

    Returns
    -------
    ndarray of uint32, shape (count,)

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    cdef uint64_t hi = _check_int("id_hi", id_hi, 0, 2**64 - 1)
    cdef uint64_t lo = _check_int("id_lo", id_lo, 0, 2**64 - 1)
    cdef int64_t n = _check_int("count", count, 0, MAX_TOKENS)
    out = np.empty(n, dtype=np.uint32)
    cdef uint32_t* ids = <uint32_t*> data_of(out)
    cdef int64_t i
    with nogil:
        for i in range(n):
            ids[i] = synthetic_token(hi, lo, <uint64_t> i)
    return out


def planned_tokens(seed, count, skip=0):
    """Words ``skip:skip + count`` of the random stream of `seed` (replay.md section 3.2).

    Parameters
    ----------
    seed : int
        0..2**64 - 1.
    count, skip : int
        >= 0. Skipping costs nothing.

    Returns
    -------
    ndarray of uint32, shape (count,)

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    cdef uint64_t start = _check_int("seed", seed, 0, 2**64 - 1)
    cdef int64_t n = _check_int("count", count, 0, MAX_TOKENS)
    cdef int64_t position = _check_int("skip", skip, 0, MAX_TOKENS)
    out = np.empty(n, dtype=np.uint32)
    cdef uint32_t* ids = <uint32_t*> data_of(out)
    cdef rng_t rng
    cdef uint32_t[16] words
    cdef int64_t end = position + n
    cdef int64_t take
    with nogil:
        rng_seed(&rng, start)
        while position < end:
            if position % 16 == 0 and end - position >= 16:
                take = 16 * stream_blocks(rng.key, <uint64_t> position // 16, (end - position) // 16, ids)
                if take == 0:
                    rng_block(rng.key, <uint64_t> position // 16, ids)
                    take = 16
            else:
                rng_block(rng.key, <uint64_t> position // 16, words)
                take = 16 - position % 16
                take = take if take < end - position else end - position
                memcpy(ids, words + position % 16, <size_t> take * 4)
            ids += take
            position += take
    return out


cdef struct intern_t:  # slot of an open-addressing table; every id is legal, hence the flag
    uint64_t id
    uint32_t number
    uint32_t is_set


cdef inline intern_t* intern_find(intern_t* table, int shift, uint64_t wanted) noexcept nogil:
    """Slot of `wanted`, or the free one where it belongs; 2**(64 - shift) slots, not all set."""
    cdef uint64_t mask = (<uint64_t> 0xFFFFFFFFFFFFFFFFULL) >> shift
    cdef uint64_t at = (wanted * 0x9E3779B97F4A7C15ULL) >> shift
    while table[at].is_set and table[at].id != wanted:
        at = (at + 1) & mask
    return &table[at]


def intern_ids(ids):
    """Number ids 0, 1, 2, ... by first appearance (workloads-and-report.md section 1.2).

    Parameters
    ----------
    ids : ndarray of uint64, shape (n,)

    Returns
    -------
    ndarray of uint32, shape (n,)

    Raises
    ------
    ValueError
        If the array has the wrong dtype or form, or more than 2**32 ids differ.
    """
    _check_array("ids", ids, _UINT64)
    cdef int64_t n = ids.size
    out = np.empty(n, dtype=np.uint32)
    cdef const uint64_t* given = <const uint64_t*> data_of(ids)
    cdef uint32_t* numbers = <uint32_t*> data_of(out)
    cdef uint32_t* known
    cdef uint32_t fresh = 0
    cdef uint64_t largest = 0
    cdef int64_t i
    with nogil:
        for i in range(n):
            largest = given[i] if given[i] > largest else largest
    if largest < <uint64_t> (2 * n) and n < 0xFFFFFFFF:
        # Numbered densely already: a table by id, of numbers counted from 1.
        dense = np.zeros(largest + 1, dtype=np.uint32)
        known = <uint32_t*> data_of(dense)
        with nogil:
            for i in range(n):
                if known[given[i]] == 0:
                    fresh += 1
                    known[given[i]] = fresh
                numbers[i] = known[given[i]] - 1
        return out
    cdef int shift = 64 - 12
    cdef int64_t n_distinct = 0
    cdef int64_t n_slots = 1 << 12
    cdef int64_t done = 0
    cdef intern_t* slot
    cdef intern_t* bigger
    table = np.zeros(2 * n_slots, dtype=np.uint64)
    cdef intern_t* slots = <intern_t*> data_of(table)
    while done < n:
        with nogil:
            while done < n and 2 * n_distinct < n_slots:
                slot = intern_find(slots, shift, given[done])
                if not slot.is_set:
                    if n_distinct == (<int64_t> 1) << 32:
                        break
                    slot.id = given[done]
                    slot.number = <uint32_t> n_distinct
                    slot.is_set = 1
                    n_distinct += 1
                numbers[done] = slot.number
                done += 1
        if done == n:
            break
        if 2 * n_distinct < n_slots:
            raise ValueError("ids: at most 2**32 of them may differ")
        grown = np.zeros(8 * n_slots, dtype=np.uint64)
        bigger = <intern_t*> data_of(grown)
        shift -= 2
        with nogil:
            for i in range(n_slots):
                if slots[i].is_set:
                    intern_find(bigger, shift, slots[i].id)[0] = slots[i]
        table = grown
        slots = bigger
        n_slots *= 4
    return out


def parse_id_lists(const uint8_t[::1] text not None, num_lists):
    """Read lists of ids, ``[1, 2][3]``, written one after the other as JSON that has been found valid.

    Parameters
    ----------
    text : bytes-like
    num_lists : int

    Returns
    -------
    ids : ndarray of uint64, shape (n_ids,)
        List after list.
    counts : ndarray of int64, shape (num_lists,)
        Ids of each list.

    None if `text` holds anything but `num_lists` lists of ids below 10**19.
    """
    cdef int64_t lists = _check_int("num_lists", num_lists, 0, MAX_TOKENS)
    cdef int64_t n = text.shape[0]
    cdef const uint8_t* at = &text[0] if n else NULL
    cdef const uint8_t* end = at + n
    counts = np.empty(lists, dtype=np.int64)
    ids = np.empty(n // 2 + 1, dtype=np.uint64)  # an id and what ends it have two characters
    cdef int64_t* count = <int64_t*> data_of(counts)
    cdef uint64_t* out = <uint64_t*> data_of(ids)
    cdef uint64_t* first = out
    cdef uint64_t value
    cdef int64_t done = 0
    cdef int digits
    cdef bint inside = False
    cdef bint good = True
    with nogil:
        while at < end:
            if 48 <= at[0] <= 57:
                if not inside:
                    good = False
                    break
                value = at[0] - 48
                digits = 1
                at += 1
                while at < end and 48 <= at[0] <= 57:
                    value = 10 * value + at[0] - 48
                    digits += 1
                    at += 1
                if digits > 19:
                    good = False
                    break
                out[0] = value
                out += 1
                continue
            if at[0] == 91 and not inside and done < lists:  # [
                inside = True
                first = out
            elif at[0] == 93 and inside:  # ]
                inside = False
                count[done] = out - first
                done += 1
            elif not (inside and (at[0] == 44 or at[0] == 32)):
                good = False
                break
            at += 1
    if not good or inside or done != lists:
        return None
    # Gives back what was reserved in vain, without a copy.
    ids.resize(out - <uint64_t*> data_of(ids), refcheck=False)
    return ids, counts


def block_segments(ids, ids_per_row, input_tokens, block_size):
    """Prompts of block ids as runs of tokens: a block is `block_size` copies of its id (spec 1.2).

    Parameters
    ----------
    ids : ndarray of uint32, shape (ids_per_row.sum(),), or None
        Ids of all rows, one after the other; None: 0, 1, 2, ...
    ids_per_row : ndarray of int64, shape (n,)
        Ids of each row, at least ``ceil(input_tokens / block_size)``; more are left unused.
    input_tokens : ndarray of int64, shape (n,)
        Tokens of each row, positive: the last needed block is cut to fit.
    block_size : int
        Tokens per block, >= 1.

    Returns
    -------
    segments : ndarray of SEGMENT
        Neighbouring equal ids of a row make one segment.
    offset, count : ndarray of int64, shape (n,)
        First segment of each row and how many.

    Raises
    ------
    ValueError
        If an array has the wrong dtype or form, a row has too few ids, or the ids are not as many as the rows say.
    """
    cdef int64_t size = _check_int("block_size", block_size, 1, MAX_TOKENS)
    _check_array("ids_per_row", ids_per_row, _INT64)
    _check_array("input_tokens", input_tokens, _INT64)
    cdef int64_t n = ids_per_row.size
    if input_tokens.size != n:
        raise ValueError(f"input_tokens: must have {n} entries, got {input_tokens.size}")
    cdef const int64_t* per_row = <const int64_t*> data_of(ids_per_row)
    cdef const int64_t* tokens = <const int64_t*> data_of(input_tokens)
    cdef int64_t total = 0
    cdef int64_t most = 0
    cdef int64_t i, k, needed, left
    cdef uint32_t token
    for i in range(n):
        if not 0 < tokens[i] <= MAX_TOKENS or not 0 < per_row[i] <= MAX_TOKENS - total:
            raise ValueError(f"input_tokens[{i}]: it and the ids of the row must be positive and below 2**61")
        needed = (tokens[i] - 1) // size + 1
        if needed > per_row[i]:
            raise ValueError(f"ids_per_row[{i}]: {tokens[i]} tokens need {needed} ids, got {per_row[i]}")
        total += per_row[i]
        most += needed
    cdef const uint32_t* id_at = NULL
    if ids is not None:
        _check_array("ids", ids, _UINT32)
        if ids.size != total:
            raise ValueError(f"ids: must have {total} entries, got {ids.size}")
        id_at = <const uint32_t*> data_of(ids)
    segments = np.empty(most, dtype=SEGMENT)
    offset, count = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    cdef segment_t* first = <segment_t*> data_of(segments)
    cdef segment_t* out = first
    cdef segment_t* row
    cdef int64_t* offsets = <int64_t*> data_of(offset)
    cdef int64_t* counts = <int64_t*> data_of(count)
    cdef int64_t start = 0
    with nogil:
        for i in range(n):
            row = out
            left = tokens[i]
            k = start
            while left > 0:
                token = id_at[k] if id_at != NULL else <uint32_t> k
                k += 1
                if out > row and out[-1].start == token:
                    out[-1].length += size if size < left else left
                else:
                    out.start = token
                    out.step = 0
                    out.length = size if size < left else left
                    out += 1
                left -= size
            offsets[i] = row - first
            counts[i] = out - row
            start += per_row[i]
    segments.resize(out - first, refcheck=False)
    return segments, offset, count


def prompt_lengths(specs, segments):
    """Tokens that the rows of each prompt hold.

    Parameters
    ----------
    specs : ndarray of REQUEST_SPEC, shape (n,)
    segments : ndarray of SEGMENT

    Returns
    -------
    ndarray of int64, shape (n,)
        For a prompt given by tokens `prompt_count`; -1 for one whose rows lie outside `segments`, or one of them is
        not positive.

    Raises
    ------
    ValueError
        If an array has the wrong dtype or form.
    """
    _check_array("specs", specs, REQUEST_SPEC)
    _check_array("segments", segments, SEGMENT)
    cdef const request_spec_t* spec = <const request_spec_t*> data_of(specs)
    cdef const segment_t* rows = <const segment_t*> data_of(segments)
    cdef int64_t n = specs.size
    cdef int64_t n_rows = segments.size
    out = np.empty(n, dtype=np.int64)
    cdef int64_t* lengths = <int64_t*> data_of(out)
    cdef int64_t i, k, length
    with nogil:
        for i in range(n):
            if spec[i].prompt_is_tokens:
                lengths[i] = spec[i].prompt_count
                continue
            length = -1
            if 0 <= spec[i].prompt_offset and 0 <= spec[i].prompt_count <= n_rows - spec[i].prompt_offset:
                length = 0
                for k in range(spec[i].prompt_offset, spec[i].prompt_offset + spec[i].prompt_count):
                    if not 0 < rows[k].length <= MAX_TOKENS - length:
                        length = -1
                        break
                    length += rows[k].length
            lengths[i] = length
    return out


@cython.final
cdef class AcceptanceSampler:
    """Trials of the draft acceptance stream, one after the other (vllm.md section 7).

    Parameters
    ----------
    seed : int
        0..2**64 - 1. Equal seeds give equal streams.
    """

    cdef rng_t rng

    def __cinit__(self, seed):
        rng_seed(&self.rng, <uint64_t> _check_int("seed", seed, 0, 2**64 - 1))

    def accept(self, double p):
        """Whether the next trial succeeds; changes the state unless `p` is 1.

        Parameters
        ----------
        p : float
            Probability, 0..1.

        Returns
        -------
        bool

        Raises
        ------
        ValueError
            If `p` is not a number in [0, 1].
        """
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p: must lie in [0, 1], got {p}")
        return rng_accept(&self.rng, p)


def _check_layout():
    """Raise ImportError unless the structs above are the dtypes of `kvsim.layout`."""
    cdef request_spec_t spec
    cdef segment_t segment
    cdef char* spec_at = <char*> &spec
    cdef char* segment_at = <char*> &segment
    offsets = {
        SEGMENT: (
            sizeof(segment_t),
            {
                "start": <char*> &segment.start - segment_at,
                "step": <char*> &segment.step - segment_at,
                "length": <char*> &segment.length - segment_at,
            },
        ),
        REQUEST_SPEC: (
            sizeof(request_spec_t),
            {
                "id_hi": <char*> &spec.id_hi - spec_at,
                "id_lo": <char*> &spec.id_lo - spec_at,
                "arrival_ms": <char*> &spec.arrival_ms - spec_at,
                "input_tokens": <char*> &spec.input_tokens - spec_at,
                "max_output_tokens": <char*> &spec.max_output_tokens - spec_at,
                "prompt_offset": <char*> &spec.prompt_offset - spec_at,
                "prompt_count": <char*> &spec.prompt_count - spec_at,
                "planned_offset": <char*> &spec.planned_offset - spec_at,
                "session": <char*> &spec.session - spec_at,
                "turn": <char*> &spec.turn - spec_at,
                "dp_rank": <char*> &spec.dp_rank - spec_at,
                "prompt_is_tokens": <char*> &spec.prompt_is_tokens - spec_at,
                "priority": <char*> &spec.priority - spec_at,
                "strict_priority": <char*> &spec.strict_priority - spec_at,
            },
        ),
    }
    for dtype, (size, fields) in offsets.items():
        if dtype.itemsize != size or {name: dtype.fields[name][1] for name in dtype.names} != fields:
            raise ImportError(f"kvsim.layout and kvsim._core.content disagree about {dtype}")


_check_layout()
