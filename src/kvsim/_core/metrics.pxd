# Statistics: Welford for real values, integer sums for token counts.
#
# Token counts are integers, so their sums are exact, cost an addition, can be
# undone when a victim is taken back, and give the same population variance as
# Welford's update to the last bit that matters (spec/timing-and-fpm.md section 4).

from libc.stdint cimport int64_t

from kvsim._core.types cimport moments_t

cdef extern from *:
    """
    /* (n * squares - sum^2) / n^2 without losing the difference of two large numbers. */
    static inline double kvsim_variance(long long n, long long sum, long long squares) {
        __int128 scaled;
        if (n == 0) return 0.0;
        scaled = (__int128)n * squares - (__int128)sum * sum;
        return (double)scaled / ((double)n * (double)n);
    }
    """
    double kvsim_variance(int64_t n, int64_t sum, int64_t squares) noexcept nogil


cdef inline void moments_add(moments_t* m, int64_t value) noexcept nogil:
    m.count += 1
    m.sum += value
    m.squares += value * value


cdef inline void moments_undo(moments_t* m, int64_t value) noexcept nogil:
    m.count -= 1
    m.sum -= value
    m.squares -= value * value


cdef inline double moments_variance(const moments_t* m) noexcept nogil:
    """Population variance, 0 when empty."""
    return kvsim_variance(m.count, m.sum, m.squares)


cdef inline void welford_add(int64_t* count, double* sum, double* mean, double* m2, double value) noexcept nogil:
    cdef double delta = value - mean[0]
    count[0] += 1
    sum[0] += value
    mean[0] += delta / count[0]
    m2[0] += delta * (value - mean[0])
