# The pass of the radix engine (SGLang), for `engine.pxd`, and its parts, for `radix_legacy.pyx`.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.radix cimport cursor_t
from kvsim._core.types cimport content_t, rank_t, request_t

cdef int32_t radix_open(
    rank_t* r, uint64_t id_hi, uint64_t id_lo, int64_t num_input, int64_t max_output, const content_t* content
) noexcept nogil
cdef void radix_cancel(rank_t* r, int32_t slot) noexcept nogil
cdef int radix_schedule(rank_t* r, double now_ms) noexcept nogil
cdef void radix_emit(rank_t* r) noexcept nogil
cdef void radix_settle(rank_t* r) noexcept nogil
cdef bint radix_quiet(const rank_t* r) noexcept nogil
cdef int64_t radix_stretch(rank_t* r, double now_ms, double horizon_ms, double* ends, int64_t room) noexcept nogil
cdef void radix_sync(rank_t* r) noexcept nogil
cdef void radix_land(rank_t* r) noexcept nogil
cdef int radix_stuck(const rank_t* r, int32_t* slot, int64_t* needed) noexcept nogil

cdef int64_t radix_reserve(rank_t* r, int32_t slot) noexcept nogil
cdef void radix_activate(rank_t* r, int32_t slot) noexcept nogil
cdef void radix_free_source(rank_t* r, int32_t slot) noexcept nogil
cdef void radix_free_destination(rank_t* r, int32_t slot) noexcept nogil
cdef int radix_misfit(const rank_t* r, int64_t num_input, int64_t max_output, int64_t* needed) noexcept nogil

cdef int64_t pages_of(const rank_t* r, int64_t tokens) noexcept nogil
cdef int64_t page_ceil(const rank_t* r, int64_t tokens) noexcept nogil
cdef cursor_t content_start(const rank_t* r, int32_t slot) noexcept nogil
cdef void set_pages(rank_t* r, int32_t slot, int64_t pages) noexcept nogil
cdef void commit_computed(rank_t* r, int32_t slot) noexcept nogil
cdef bint lease_release(rank_t* r, int32_t slot) noexcept nogil
cdef void tell_with_command(rank_t* r, int64_t before) noexcept nogil
cdef int64_t transferable(const rank_t* r, int32_t slot) noexcept nogil
cdef bint gated(const rank_t* r) noexcept nogil
cdef int open_radix_pass(rank_t* r, double now_ms) noexcept nogil
cdef void running_reserve(const rank_t* r, double* tokens) noexcept nogil
cdef int64_t burst_of(const rank_t* r, const request_t* q) noexcept nogil
cdef int64_t draw_burst(rank_t* r, const request_t* q) noexcept nogil
cdef void signal_terminals(rank_t* r) noexcept nogil
cdef void end_request(rank_t* r, int32_t slot) noexcept nogil
cdef void sweep_running(rank_t* r) noexcept nogil
