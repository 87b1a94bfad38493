# The pass of the paged engines (vLLM, TensorRT-LLM), for `engine.pxd`.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.types cimport content_t, rank_t

cdef int32_t paged_open(
    rank_t* r, uint64_t id_hi, uint64_t id_lo, int64_t num_input, int64_t max_output, const content_t* content
) noexcept nogil
cdef void paged_cancel(rank_t* r, int32_t slot) noexcept nogil
cdef void paged_land(rank_t* r) noexcept nogil
cdef int paged_schedule(rank_t* r, double now_ms) noexcept nogil
cdef void paged_emit(rank_t* r) noexcept nogil
cdef void paged_settle(rank_t* r) noexcept nogil
cdef int paged_stuck(const rank_t* r, int32_t* slot, int64_t* needed) noexcept nogil
cdef bint paged_unblock(rank_t* r) noexcept nogil
cdef int64_t paged_reserve(rank_t* r, int32_t slot) noexcept nogil
cdef void paged_activate(rank_t* r, int32_t slot) noexcept nogil
cdef void paged_free(rank_t* r, int32_t slot) noexcept nogil
cdef int paged_misfit(const rank_t* r, int64_t num_input, int64_t max_output, int64_t* needed) noexcept nogil
cdef bint paged_quiet(rank_t* r) noexcept nogil
cdef int64_t paged_stretch(rank_t* r, double now_ms, double horizon_ms, double* ends, int64_t room) noexcept nogil
