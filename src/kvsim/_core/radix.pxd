# SGLang's radix tree over pages (spec/sglang.md section 4).
#
# A node stands for the edge that leads to it. An edge is a list of runs: equal
# pages in a row are one row of it, however small a page is, so a prompt of
# 512-token segments costs the same at page 1 as at page 64. Pages have no ids:
# nothing a user can see depends on which page is used, so the pool is a count,
# and a duplicate page is one that goes back to that count.
#
# Every whole page of a lineage lies in the tree at most once, and a node is
# found from its parent and the first page of its edge.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.types cimport rank_t, run_t

cdef struct cursor_t:  # a place in the content of a request
    const run_t* run
    int64_t offset                # pages of `run` before the place

cdef int64_t radix_match(rank_t* r, cursor_t at, int64_t limit, int32_t* node) noexcept nogil
cdef int64_t radix_match_length(const rank_t* r, cursor_t at, int64_t limit) noexcept nogil
cdef int32_t radix_insert(
    rank_t* r, int32_t start, cursor_t at, int64_t pages, const run_t* end, int64_t* found
) noexcept nogil
cdef void radix_lock(rank_t* r, int32_t node) noexcept nogil
cdef void radix_unlock(rank_t* r, int32_t node) noexcept nogil
cdef int64_t radix_evict(rank_t* r, int64_t pages) noexcept nogil
cdef void radix_reset(rank_t* r) noexcept nogil
cdef void radix_reindex(rank_t* r) noexcept nogil


cdef inline void cursor_advance(cursor_t* at, int64_t pages) noexcept nogil:
    while pages > 0:
        if at.run.pages - at.offset > pages:
            at.offset += pages
            return
        pages -= at.run.pages - at.offset
        at.run += 1
        at.offset = 0
