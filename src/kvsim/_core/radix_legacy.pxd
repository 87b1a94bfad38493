# The pass of the radix engine under ruleset `dynamo-1.3`, for `engine.pxd`.

from libc.stdint cimport int32_t, int64_t

from kvsim._core.types cimport rank_t

cdef int64_t legacy_reserve(rank_t* r, int32_t slot) noexcept nogil
cdef void legacy_activate(rank_t* r, int32_t slot) noexcept nogil
cdef int legacy_schedule(rank_t* r, double now_ms) noexcept nogil
cdef void legacy_emit(rank_t* r) noexcept nogil
cdef void legacy_settle(rank_t* r) noexcept nogil
