# The pass of the radix engine under ruleset `dynamo-1.3`, for `engine.pxd`.

from kvsim._core.types cimport rank_t

cdef int legacy_schedule(rank_t* r, double now_ms) noexcept nogil
cdef void legacy_emit(rank_t* r) noexcept nogil
cdef void legacy_settle(rank_t* r) noexcept nogil
