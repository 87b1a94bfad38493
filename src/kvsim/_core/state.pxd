# The owner of an arena, for kernels that drive many ranks.

from libc.stdint cimport int32_t, int64_t

from kvsim._core.types cimport content_t, rank_t


cdef class RankState:
    cdef rank_t r
    cdef readonly object arena
    cdef object _contents_memory
    cdef list _contents
    cdef object _signals
    cdef object _admissions
    cdef object _pressures
    cdef object _lists
    cdef object _found
    cdef object _wheel
    cdef list _outgrown
    cdef RankState _lower         # that whose G3 and G4 it shares
    cdef list _sharers
    cdef object _sharer_memory
    cdef dict _offsets
    cdef object _profile
    cdef object _policy
    cdef object _timing
    cdef object error

    cdef rank_t* bind(self) noexcept
    cdef void _bind_arena(self)
    cdef object _section(self, str name, object dtype, int64_t count)
    cdef int _fill_content(self, content_t* c, content) except -1
    cdef int _enlarge(self, int what, int64_t need) except -1
    cdef int _predict(self, int kind, int64_t count, int64_t first, int64_t second, int64_t total, double* out) noexcept
    cdef int32_t _ask_victim(self) noexcept
    cdef int32_t _ask_admission(self, int32_t slot) noexcept
    cdef int32_t _ask_order(self) noexcept
    cdef double _ask_score(self, int32_t slot) noexcept
