# The token rule that other kernels share.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kvsim._core.xxh3 cimport XXH3_SECRET, bswap64, xxh3_avalanche, xxh3_mix16


cdef inline uint32_t synthetic_token(uint64_t id_hi, uint64_t id_lo, uint64_t ordinal) noexcept nogil:
    """Output token `ordinal` of a request without planned ids (vllm.md section 2).

    Lower half of the XXH3-64, seed 0, of 24 bytes: the id, big-endian, then the
    ordinal, little-endian.
    """
    cdef const uint8_t* secret = <const uint8_t*> &XXH3_SECRET[0]
    cdef uint64_t first = bswap64(id_hi)
    cdef uint64_t second = bswap64(id_lo)
    cdef uint64_t h = <uint64_t> 24 * 0x9E3779B185EBCA87ULL
    # The second 16 bytes overlap the first: they are the last 16 of 24.
    h += xxh3_mix16(first, second, secret, 0) + xxh3_mix16(second, ordinal, secret + 16, 0)
    return <uint32_t> xxh3_avalanche(h)
