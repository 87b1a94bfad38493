# The reproducible random stream of vllm.md section 7: ChaCha12, 64-bit block counter, stream 0.
#
# A generator is plain data, so that it can be a field of a state row that is copied
# and saved as bytes. All functions are inline; there is no module behind this header.

from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef struct rng_t:
    uint32_t[8] key
    uint64_t block  # counter of the block that is made when `words` runs out
    uint32_t[16] words  # the block in use
    int64_t used  # words of it already handed out, 0..16


cdef inline void rng_seed(rng_t* rng, uint64_t seed) noexcept nogil:
    """Set `rng` to the start of the stream of `seed`. Each key word is one PCG32 step."""
    cdef uint64_t state = seed
    cdef uint32_t word, turn
    cdef size_t i
    for i in range(8):
        state = state * 6364136223846793005ULL + 11634580027462260723ULL
        word = <uint32_t> (((state >> 18) ^ state) >> 27)
        turn = <uint32_t> (state >> 59)
        rng.key[i] = (word >> turn) | (word << ((32 - turn) & 31))
    rng.block = 0
    for i in range(16):
        rng.words[i] = 0
    rng.used = 16


cdef inline void rng_quarter(uint32_t* x, size_t a, size_t b, size_t c, size_t d) noexcept nogil:
    x[a] += x[b]
    x[d] ^= x[a]
    x[d] = (x[d] << 16) | (x[d] >> 16)
    x[c] += x[d]
    x[b] ^= x[c]
    x[b] = (x[b] << 12) | (x[b] >> 20)
    x[a] += x[b]
    x[d] ^= x[a]
    x[d] = (x[d] << 8) | (x[d] >> 24)
    x[c] += x[d]
    x[b] ^= x[c]
    x[b] = (x[b] << 7) | (x[b] >> 25)


cdef inline void rng_block(const uint32_t* key, uint64_t block, uint32_t* words) noexcept nogil:
    """Write the 16 words of block number `block` of the stream with `key` to `words`."""
    cdef uint32_t[16] start
    cdef uint32_t[16] x
    cdef size_t i
    start[0] = 0x61707865
    start[1] = 0x3320646E
    start[2] = 0x79622D32
    start[3] = 0x6B206574
    for i in range(8):
        start[4 + i] = key[i]
    start[12] = <uint32_t> block
    start[13] = <uint32_t> (block >> 32)
    start[14] = 0
    start[15] = 0
    for i in range(16):
        x[i] = start[i]
    for i in range(6):
        rng_quarter(x, 0, 4, 8, 12)
        rng_quarter(x, 1, 5, 9, 13)
        rng_quarter(x, 2, 6, 10, 14)
        rng_quarter(x, 3, 7, 11, 15)
        rng_quarter(x, 0, 5, 10, 15)
        rng_quarter(x, 1, 6, 11, 12)
        rng_quarter(x, 2, 7, 8, 13)
        rng_quarter(x, 3, 4, 9, 14)
    for i in range(16):
        words[i] = x[i] + start[i]


cdef inline uint32_t rng_u32(rng_t* rng) noexcept nogil:
    """Next word of the stream."""
    cdef uint32_t word
    if rng.used >= 16:
        rng_block(rng.key, rng.block, rng.words)
        rng.block += 1
        rng.used = 0
    word = rng.words[rng.used]
    rng.used += 1
    return word


cdef inline uint64_t rng_u64(rng_t* rng) noexcept nogil:
    """Next two words of the stream, the lower half first."""
    cdef uint64_t low = rng_u32(rng)
    return low | (<uint64_t> rng_u32(rng) << 32)


cdef inline bint rng_accept(rng_t* rng, double p) noexcept nogil:
    """One trial that succeeds with probability `p` in [0, 1].

    Reads one u64 and accepts below floor(p * 2**64); a certain trial reads nothing,
    an impossible one does.
    """
    if p >= 1.0:
        return True
    return rng_u64(rng) < <uint64_t> (p * 18446744073709551616.0)
