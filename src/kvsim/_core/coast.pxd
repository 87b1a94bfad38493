# Coasting: decodes that stand still in their rows while passes go by.
#
# A plain decode needs nothing but its next token until a block is full, a
# block is missing, or its last token comes. Until then a pass changes the same
# few numbers of its row in the same way. So the leading `coast.count` entries
# of `running` are left as they are, and a tick per pass is counted instead:
#
#   running   [ c0  c1  c2  c3 | chunk  new ... ]     order of allocation and of signals
#   due       [ 17  12  40  12 ]                      tick at which each needs something
#   since     by row: the tick its row shows
#
# `due` lies densely beside `running`, so a pass in which somebody is due reads
# four bytes per request, in the order in which requests are served, and one in
# which nobody is reads nothing. Their number, the sum and the sum of squares of
# their lengths follow from the tick alone.
#
# Nothing of this is state. Whoever looks at rows of running requests lets them
# land first: rows are written as if every pass had gone through them. An engine
# owns what "land" and "due" mean; what is here is common to both. `tick` is the
# number of passes gone by; within a pass it still shows the state before it.

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memmove

from kvsim._core.types cimport CHECK, coast_t, rank_t

cdef extern from *:
    """
    #include <stdint.h>
    #define KVSIM_NEVER INT32_MAX
    /* Who is due at `tick`: indices in order; the earliest tick of all others in `next`. None is overdue. */
    static inline int64_t kvsim_who_is_due(const int32_t* due, int64_t n, int32_t tick, int32_t* hits, int32_t* next) {
        int64_t found = 0, i = 0, k;
        int32_t later = KVSIM_NEVER, least;
        for (; i + 16 <= n; i += 16) {
            least = due[i];
            for (k = 1; k < 16; k++) least = due[i + k] < least ? due[i + k] : least;
            if (least > tick) {
                later = least < later ? least : later;
                continue;
            }
            for (k = i; k < i + 16; k++) {
                hits[found] = (int32_t)k;
                found += due[k] == tick;
                least = due[k] == tick ? KVSIM_NEVER : due[k];
                later = least < later ? least : later;
            }
        }
        for (; i < n; i++) {
            hits[found] = (int32_t)i;
            found += due[i] == tick;
            least = due[i] == tick ? KVSIM_NEVER : due[i];
            later = least < later ? least : later;
        }
        *next = later;
        return found;
    }
    """
    int64_t kvsim_who_is_due(
        const int32_t* due, int64_t n, int32_t tick, int32_t* hits, int32_t* next) noexcept nogil
    int32_t NEVER "KVSIM_NEVER"

cdef enum:
    MOST_TICKS = 1 << 29          # then all land, and ticks start again


cdef inline int64_t coast_length(const rank_t* r, int32_t slot) noexcept nogil:
    """Length of a coasting request, whose row shows an older one."""
    return r.requests[slot].length + (r.coast.tick - r.since[slot])


cdef inline void coast_set_due(rank_t* r, int64_t i, int32_t due) noexcept nogil:
    """When entry `i` needs something next; NEVER: it ends in this pass."""
    r.due[i] = due
    if due < r.coast.next_due:
        r.coast.next_due = due


cdef inline void coast_join(rank_t* r, int64_t length, int32_t due) noexcept nogil:
    """The first entry of `running` that does not coast does from now on; its row shows the present."""
    cdef coast_t* c = &r.coast
    cdef int64_t i = c.count
    CHECK(i < r.header.num_running and due >= c.tick)
    if i == 0:
        c.next_due = NEVER
    r.since[r.running[i]] = c.tick
    c.count += 1
    c.sum += length
    c.squares += length * length
    coast_set_due(r, i, due)


cdef inline int64_t coast_due(rank_t* r) noexcept nogil:
    """Entries that are due now go to `hits`, in running order: their number. The caller sets when each is due next."""
    return kvsim_who_is_due(r.due, r.coast.count, r.coast.tick, r.hits, &r.coast.next_due)


cdef inline void coast_count_out(rank_t* r, int64_t length) noexcept nogil:
    """A request of `length` no longer counts in the sums; its entry is deleted later."""
    r.coast.sum -= length
    r.coast.squares -= length * length


cdef inline void coast_delete(rank_t* r, const int32_t* entries, int64_t n) noexcept nogil:
    """Close the gaps of `n` ascending entries of `running` that have left it and were counted out."""
    cdef int64_t k
    cdef int64_t first
    cdef int64_t last
    if n == 0:
        return
    for k in range(n):
        first = entries[k] + 1
        last = entries[k + 1] if k + 1 < n else r.coast.count
        memmove(r.due + first - 1 - k, r.due + first, <size_t>(last - first) * sizeof(int32_t))
        last = entries[k + 1] if k + 1 < n else r.header.num_running
        memmove(r.running + first - 1 - k, r.running + first, <size_t>(last - first) * sizeof(int32_t))
    r.coast.count -= n
    r.header.num_running -= n


cdef inline void coast_step(rank_t* r) noexcept nogil:
    """All who coast have emitted one token."""
    cdef coast_t* c = &r.coast
    if c.count == 0:
        c.tick = 0
        return
    c.squares += 2 * c.sum + c.count
    c.sum += c.count
    c.tick += 1


cdef inline void coast_clear(rank_t* r) noexcept nogil:
    """Nobody coasts any more; the rows were written."""
    r.coast.count = 0
    r.coast.sum = 0
    r.coast.squares = 0
    r.coast.tick = 0
    r.coast.next_due = NEVER
