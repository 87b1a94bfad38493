# XXH3-64 for every length and seed, as inline functions (little-endian machines).
#
# The variant is the one with a 64-bit seed. Inputs of at most 240 bytes use the default
# secret and add the seed word by word; longer ones use a 192-byte secret derived from the
# seed, which a caller that hashes often derives once with `xxh3_derive_secret`.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "kvsim needs a little-endian machine"
    #endif
    #include <stdint.h>
    typedef unsigned __int128 kvsim_u128;
    /* The default secret, 192 bytes, written as little-endian words. */
    static const uint64_t KVSIM_XXH3_SECRET[24] = {
        0xbe4ba423396cfeb8ULL, 0x1cad21f72c81017cULL, 0xdb979083e96dd4deULL, 0x1f67b3b7a4a44072ULL,
        0x78e5c0cc4ee679cbULL, 0x2172ffcc7dd05a82ULL, 0x8e2443f7744608b8ULL, 0x4c263a81e69035e0ULL,
        0xcb00c391bb52283cULL, 0xa32e531b8b65d088ULL, 0x4ef90da297486471ULL, 0xd8acdea946ef1938ULL,
        0x3f349ce33f76faa8ULL, 0x1d4f0bc7c7bbdcf9ULL, 0x3159b4cd4be0518aULL, 0x647378d9c97e9fc8ULL,
        0xc3ebd33483acc5eaULL, 0xeb6313faffa081c5ULL, 0x49daf0b751dd0d17ULL, 0x9e68d429265516d3ULL,
        0xfca1477d58be162bULL, 0xce31d07ad1b8f88fULL, 0x280416958f3acb45ULL, 0x7e404bbbcafbd7afULL,
    };
    """
    ctypedef unsigned long long uint128_t "kvsim_u128"
    const uint64_t XXH3_SECRET "KVSIM_XXH3_SECRET"[24]
    uint32_t bswap32 "__builtin_bswap32"(uint32_t x) noexcept nogil
    uint64_t bswap64 "__builtin_bswap64"(uint64_t x) noexcept nogil

cdef enum:
    XXH3_SECRET_BYTES = 192
    XXH3_STRIPE_BYTES = 64
    XXH3_STRIPES_PER_BLOCK = 16  # (secret - stripe) bytes / 8
    XXH3_SHORT_BYTES = 240  # longest input that needs no derived secret
    BLOCK_HASH_SEED = 1337  # kv-cache.md section 1


cdef inline uint32_t xxh3_read32(const uint8_t* data) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, data, 4)
    return value


cdef inline uint64_t xxh3_read64(const uint8_t* data) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, data, 8)
    return value


cdef inline uint64_t xxh3_fold(uint64_t a, uint64_t b) noexcept nogil:
    """Upper xor lower half of the 128-bit product."""
    cdef uint128_t product = <uint128_t> a * b
    return <uint64_t> product ^ <uint64_t> (product >> 64)


cdef inline uint64_t xxh3_avalanche(uint64_t h) noexcept nogil:
    h ^= h >> 37
    h *= 0x165667919E3779F9ULL
    return h ^ (h >> 32)


cdef inline uint64_t xxh64_avalanche(uint64_t h) noexcept nogil:
    h ^= h >> 33
    h *= 0xC2B2AE3D27D4EB4FULL
    h ^= h >> 29
    h *= 0x165667B19E3779F9ULL
    return h ^ (h >> 32)


cdef inline uint64_t xxh3_mix16(uint64_t lo, uint64_t hi, const uint8_t* secret, uint64_t seed) noexcept nogil:
    return xxh3_fold(lo ^ (xxh3_read64(secret) + seed), hi ^ (xxh3_read64(secret + 8) - seed))


cdef inline uint64_t xxh3_mix16_at(const uint8_t* data, const uint8_t* secret, uint64_t seed) noexcept nogil:
    return xxh3_mix16(xxh3_read64(data), xxh3_read64(data + 8), secret, seed)


cdef inline uint64_t xxh3_9to16(uint64_t first, uint64_t last, uint64_t n, uint64_t seed) noexcept nogil:
    """`n` in 9..16 bytes, given as their first and their last eight."""
    cdef uint64_t lo = first ^ ((XXH3_SECRET[3] ^ XXH3_SECRET[4]) + seed)
    cdef uint64_t hi = last ^ ((XXH3_SECRET[5] ^ XXH3_SECRET[6]) - seed)
    return xxh3_avalanche(n + bswap64(lo) + hi + xxh3_fold(lo, hi))


cdef inline uint64_t xxh3_short(const uint8_t* data, size_t n, uint64_t seed) noexcept nogil:
    """Hash of `n` <= 240 bytes."""
    cdef const uint8_t* secret = <const uint8_t*> &XXH3_SECRET[0]
    cdef uint64_t h, tail
    cdef size_t i
    if n > 128:
        h = n * 0x9E3779B185EBCA87ULL
        for i in range(8):
            h += xxh3_mix16_at(data + 16 * i, secret + 16 * i, seed)
        h = xxh3_avalanche(h)
        tail = xxh3_mix16_at(data + n - 16, secret + 136 - 17, seed)
        for i in range(8, n // 16):
            tail += xxh3_mix16_at(data + 16 * i, secret + 16 * (i - 8) + 3, seed)
        return xxh3_avalanche(h + tail)
    if n > 16:
        h = n * 0x9E3779B185EBCA87ULL
        h += xxh3_mix16_at(data, secret, seed) + xxh3_mix16_at(data + n - 16, secret + 16, seed)
        if n > 32:
            h += xxh3_mix16_at(data + 16, secret + 32, seed) + xxh3_mix16_at(data + n - 32, secret + 48, seed)
        if n > 64:
            h += xxh3_mix16_at(data + 32, secret + 64, seed) + xxh3_mix16_at(data + n - 48, secret + 80, seed)
        if n > 96:
            h += xxh3_mix16_at(data + 48, secret + 96, seed) + xxh3_mix16_at(data + n - 64, secret + 112, seed)
        return xxh3_avalanche(h)
    if n > 8:
        return xxh3_9to16(xxh3_read64(data), xxh3_read64(data + n - 8), n, seed)
    if n >= 4:
        seed ^= <uint64_t> bswap32(<uint32_t> seed) << 32
        h = (<uint64_t> xxh3_read32(data) << 32) + xxh3_read32(data + n - 4)
        h ^= (XXH3_SECRET[1] ^ XXH3_SECRET[2]) - seed
        h ^= ((h << 49) | (h >> 15)) ^ ((h << 24) | (h >> 40))
        h *= 0x9FB21C651E98DF25ULL
        h ^= (h >> 35) + n
        h *= 0x9FB21C651E98DF25ULL
        return h ^ (h >> 28)
    if n > 0:
        h = (<uint32_t> data[0] << 16) | (<uint32_t> data[n >> 1] << 24) | data[n - 1] | (n << 8)
        return xxh64_avalanche(h ^ ((xxh3_read32(secret) ^ xxh3_read32(secret + 4)) + seed))
    return xxh64_avalanche(seed ^ XXH3_SECRET[7] ^ XXH3_SECRET[8])


cdef inline void xxh3_derive_secret(uint64_t* secret, uint64_t seed) noexcept nogil:
    """Fill `secret`, 24 words, with the secret that inputs above 240 bytes use for `seed`."""
    cdef size_t i
    for i in range(12):
        secret[2 * i] = XXH3_SECRET[2 * i] + seed
        secret[2 * i + 1] = XXH3_SECRET[2 * i + 1] - seed


cdef inline void xxh3_accumulate(uint64_t* acc, const uint8_t* data, const uint8_t* secret) noexcept nogil:
    """Add one 64-byte stripe to the eight lanes."""
    cdef uint64_t left, right, left_key, right_key
    cdef size_t i
    for i in range(4):
        left = xxh3_read64(data + 16 * i)
        right = xxh3_read64(data + 16 * i + 8)
        left_key = left ^ xxh3_read64(secret + 16 * i)
        right_key = right ^ xxh3_read64(secret + 16 * i + 8)
        acc[2 * i] += right + <uint64_t> <uint32_t> left_key * (left_key >> 32)
        acc[2 * i + 1] += left + <uint64_t> <uint32_t> right_key * (right_key >> 32)


cdef inline uint64_t xxh3_stripes(
    const uint8_t* data, size_t n, size_t stride, const uint64_t* derived
) noexcept nogil:
    """Hash of `n` > 240 bytes whose stripes lie `stride` bytes apart.

    A stride of 64 is an ordinary input; with 0 the one stripe at `data` stands for
    all of them, which is an input that repeats every 4 or 8 bytes.
    """
    cdef const uint8_t* secret = <const uint8_t*> derived
    cdef uint64_t[8] acc
    cdef uint64_t h
    cdef size_t stripes = (n - 1) // XXH3_STRIPE_BYTES
    cdef size_t done = 0
    cdef size_t i, end
    acc[0] = 0xC2B2AE3DULL
    acc[1] = 0x9E3779B185EBCA87ULL
    acc[2] = 0xC2B2AE3D27D4EB4FULL
    acc[3] = 0x165667B19E3779F9ULL
    acc[4] = 0x85EBCA77C2B2AE63ULL
    acc[5] = 0x85EBCA77ULL
    acc[6] = 0x27D4EB2F165667C5ULL
    acc[7] = 0x9E3779B1ULL
    while True:
        end = stripes if stripes - done < XXH3_STRIPES_PER_BLOCK else done + XXH3_STRIPES_PER_BLOCK
        for i in range(end - done):
            xxh3_accumulate(acc, data + (done + i) * stride, secret + 8 * i)
        # (n - 1) // 1024 blocks are scrambled: never the one that holds the last byte.
        if end - done < XXH3_STRIPES_PER_BLOCK:
            break
        done = end
        for i in range(8):
            h = acc[i]
            acc[i] = (h ^ (h >> 47) ^ derived[16 + i]) * 0x9E3779B1ULL
    xxh3_accumulate(
        acc, data + n - XXH3_STRIPE_BYTES if stride else data, secret + XXH3_SECRET_BYTES - XXH3_STRIPE_BYTES - 7
    )
    h = n * 0x9E3779B185EBCA87ULL
    for i in range(4):
        h += xxh3_fold(
            acc[2 * i] ^ xxh3_read64(secret + 11 + 16 * i), acc[2 * i + 1] ^ xxh3_read64(secret + 19 + 16 * i)
        )
    return xxh3_avalanche(h)


cdef inline uint64_t xxh3_64_long(const uint8_t* data, size_t n, const uint64_t* derived) noexcept nogil:
    """Hash of `n` > 240 bytes; `derived` is the secret of the seed (24 words)."""
    return xxh3_stripes(data, n, XXH3_STRIPE_BYTES, derived)


cdef inline uint64_t xxh3_64(const uint8_t* data, size_t n, uint64_t seed) noexcept nogil:
    """Hash of `n` >= 0 bytes. Derives the secret anew when `n` > 240."""
    cdef uint64_t[24] derived
    if n <= XXH3_SHORT_BYTES:
        return xxh3_short(data, n, seed)
    xxh3_derive_secret(derived, seed)
    return xxh3_64_long(data, n, derived)


cdef inline uint64_t xxh3_pair(uint64_t parent, uint64_t local, uint64_t seed=BLOCK_HASH_SEED) noexcept nogil:
    """Hash of the 16 bytes of two words: the sequence hash of a block that has a parent."""
    return xxh3_9to16(parent, local, 16, seed)


cdef inline uint64_t xxh3_tokens(const uint32_t* tokens, int64_t n, const uint64_t* derived) noexcept nogil:
    """Local hash of `n` >= 0 tokens; `derived` is the secret of BLOCK_HASH_SEED."""
    cdef size_t n_bytes = 4 * <size_t> n
    if n_bytes <= XXH3_SHORT_BYTES:
        return xxh3_short(<const uint8_t*> tokens, n_bytes, BLOCK_HASH_SEED)
    return xxh3_64_long(<const uint8_t*> tokens, n_bytes, derived)


cdef inline uint64_t xxh3_equal_words(uint64_t word, size_t n) noexcept nogil:
    """As `xxh3_short` of 17..128 bytes, with BLOCK_HASH_SEED, of which any eight at a multiple of four are `word`."""
    cdef const uint8_t* secret = <const uint8_t*> &XXH3_SECRET[0]
    cdef uint64_t h = n * 0x9E3779B185EBCA87ULL
    h += xxh3_mix16(word, word, secret, BLOCK_HASH_SEED) + xxh3_mix16(word, word, secret + 16, BLOCK_HASH_SEED)
    if n > 32:
        h += xxh3_mix16(word, word, secret + 32, BLOCK_HASH_SEED) + xxh3_mix16(word, word, secret + 48, BLOCK_HASH_SEED)
    if n > 64:
        h += xxh3_mix16(word, word, secret + 64, BLOCK_HASH_SEED) + xxh3_mix16(word, word, secret + 80, BLOCK_HASH_SEED)
    if n > 96:
        h += xxh3_mix16(word, word, secret + 96, BLOCK_HASH_SEED) + xxh3_mix16(word, word, secret + 112, BLOCK_HASH_SEED)
    return xxh3_avalanche(h)


cdef inline uint64_t xxh3_equal_tokens(uint32_t token, int64_t n, const uint64_t* derived) noexcept nogil:
    """Local hash of `token` repeated `n` >= 0 times; `derived` as for `xxh3_tokens`."""
    cdef uint32_t[60] repeated
    cdef size_t n_bytes = 4 * <size_t> n
    if 16 < n_bytes <= 128:
        return xxh3_equal_words(<uint64_t> token << 32 | token, n_bytes)
    cdef bint is_short = n_bytes <= XXH3_SHORT_BYTES
    cdef int64_t i
    for i in range(n if is_short else XXH3_STRIPE_BYTES // 4):
        repeated[i] = token
    if is_short:
        return xxh3_short(<const uint8_t*> repeated, n_bytes, BLOCK_HASH_SEED)
    return xxh3_stripes(<const uint8_t*> repeated, n_bytes, 0, derived)
