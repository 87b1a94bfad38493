# Pass durations: models and their rounding (spec/timing-and-fpm.md sections 2 and 3).

from libc.math cimport isfinite
from libc.stdint cimport int64_t

from kvsim._core.types cimport FIXED, POLYNOMIAL, PROFILE, config_t, profile_t, rank_t

cdef extern from *:
    """
    #include <math.h>
    #include <stdint.h>
    #include <string.h>
    /* Nearest whole nanosecond of the exact value of a float in seconds, ties to even:
       what the reference's integer durations do. x * 1e9 in floating point would be off
       by one near ties, and the error would pile up pass by pass. */
    static inline int64_t kvsim_whole_ns(double seconds) {
        uint64_t bits, mantissa;
        int exponent;
        unsigned __int128 product, quotient, rest, half;
        memcpy(&bits, &seconds, 8);
        exponent = (int)((bits >> 52) & 0x7ff);
        mantissa = bits & 0xfffffffffffffULL;
        if (exponent == 0) return 0;
        mantissa |= 1ULL << 52;
        exponent -= 1075;
        product = (unsigned __int128)mantissa * 1000000000u;
        if (exponent >= 0) return exponent > 10 ? INT64_MAX : (int64_t)(product << exponent);
        if (exponent < -120) return 0;
        quotient = product >> -exponent;
        rest = product - (quotient << -exponent);
        half = (unsigned __int128)1 << (-exponent - 1);
        if (rest > half || (rest == half && (quotient & 1))) quotient += 1;
        return (int64_t)quotient;
    }
    static inline double kvsim_seconds(int64_t ns) {
        return (double)(ns / 1000000000) + (double)(ns % 1000000000) / 1e9;
    }
    /* A raw duration as the driver sees it: rounded, divided by the ratio, rounded again. Ratio 0 does not scale. */
    static inline double kvsim_modelled_ms(double raw_ms, double ratio) {
        int64_t ns = kvsim_whole_ns(raw_ms / 1000.0);
        if (ratio > 0.0 && ns > 0 && ratio != 1.0) ns = kvsim_whole_ns(kvsim_seconds(ns) / ratio);
        return kvsim_seconds(ns) * 1000.0;
    }
    """
    int64_t kvsim_whole_ns(double seconds) noexcept nogil
    double kvsim_modelled_ms(double raw_ms, double ratio) noexcept nogil


cdef inline int64_t profile_cell(const double* axis, int64_t n, double x) noexcept nogil:
    """Lower corner of the cell of `x`; the outermost cells extend to infinity."""
    cdef int64_t low = 0
    cdef int64_t high = n - 1
    cdef int64_t middle
    while high - low > 1:
        middle = (low + high) >> 1
        if x >= axis[middle]:
            low = middle
        else:
            high = middle
    return low


cdef inline double profile_weight(const double* axis, int64_t cell, double x) noexcept nogil:
    return (x - axis[cell]) / (axis[cell + 1] - axis[cell])


cdef inline double profile_prefill(const profile_t* p, double batch, double fresh, double cached) noexcept nogil:
    cdef int64_t i
    cdef int64_t j
    cdef int64_t k
    cdef int64_t corner
    cdef double x
    cdef double y
    cdef double z
    cdef double total = 0.0
    cdef double weight
    if p.num_read == 0:
        i = profile_cell(p.prefill_x, p.num_x, batch * fresh)
        x = profile_weight(p.prefill_x, i, batch * fresh)
        return p.prefill_time[i] * (1.0 - x) + p.prefill_time[i + 1] * x
    i = profile_cell(p.prefill_x, p.num_x, batch)
    j = profile_cell(p.prefill_tokens, p.num_tokens, fresh)
    k = profile_cell(p.prefill_read, p.num_read, cached)
    x = profile_weight(p.prefill_x, i, batch)
    y = profile_weight(p.prefill_tokens, j, fresh)
    z = profile_weight(p.prefill_read, k, cached)
    for corner in range(8):
        weight = x if corner & 4 else 1.0 - x
        weight *= y if corner & 2 else 1.0 - y
        weight *= z if corner & 1 else 1.0 - z
        total += weight * p.prefill_time[
            ((i + (corner >> 2)) * p.num_tokens + j + ((corner >> 1) & 1)) * p.num_read + k + (corner & 1)]
    return total


cdef inline double profile_decode(const profile_t* p, double active, double context) noexcept nogil:
    cdef int64_t i = profile_cell(p.decode_kv, p.num_kv, active)
    cdef int64_t j = profile_cell(p.decode_context, p.num_context, context)
    cdef double x = profile_weight(p.decode_kv, i, active)
    cdef double y = profile_weight(p.decode_context, j, context)
    cdef const double* row = p.decode_itl + i * p.num_context + j
    cdef const double* upper = row + p.num_context
    return (row[0] * (1.0 - y) + row[1] * y) * (1.0 - x) + (upper[0] * (1.0 - y) + upper[1] * y) * x


cdef inline int timing_prefill(rank_t* r, int64_t count, int64_t isl, int64_t prefix, double* out) noexcept nogil:
    """Modelled prefill duration of a batch of `count` prompts of mean `isl`, `prefix` of it there already.

    Status: 0, or negative if a callable model failed.
    """
    cdef const config_t* c = r.config
    cdef double tokens
    cdef double raw
    out[0] = 0.0
    if count == 0 or isl <= prefix:
        return 0
    if c.timing == FIXED:
        out[0] = c.prefill_ms
        return 0
    if c.timing == POLYNOMIAL:
        tokens = <double>(count * (isl - prefix))
        raw = 4.209989e-07 * (tokens * tokens) + 1.518344e-02 * tokens + 16.50142
    elif c.timing == PROFILE:
        raw = profile_prefill(r.profile, <double>count, <double>(isl - prefix), <double>prefix)
    elif r.predict(r, 0, count, isl, prefix, 0, &raw) < 0:
        return -1
    if not isfinite(raw) or raw < 0.0:
        raw = 0.0
    out[0] = kvsim_modelled_ms(raw, c.speedup)
    return 0


cdef inline int timing_decode(rank_t* r, int64_t count, int64_t active, int64_t context, double* out) noexcept nogil:
    """Modelled duration of one decode step of `count` sequences that hold `active` KV tokens."""
    cdef const config_t* c = r.config
    cdef double used
    cdef double raw
    out[0] = 0.0
    if count == 0:
        return 0
    if c.timing == FIXED:
        out[0] = c.decode_ms
        return 0
    if c.timing == POLYNOMIAL:
        used = 1.0
        if c.total_kv_tokens > 0 and active < c.total_kv_tokens:
            used = <double>active / <double>c.total_kv_tokens
        raw = -25.74 * (used * used) + 54.01 * used + 5.74
        if raw < 1.0:
            raw = 1.0
    elif c.timing == PROFILE:
        raw = profile_decode(r.profile, <double>active, <double>context)
    elif r.predict(r, 1, count, active, context, c.total_kv_tokens, &raw) < 0:
        return -1
    if not isfinite(raw) or raw < 0.0:
        raw = 0.0
    if c.floor_every_decode and raw < 1.0:
        raw = 1.0
    out[0] = kvsim_modelled_ms(raw, c.speedup * c.decode_speedup)
    return 0
