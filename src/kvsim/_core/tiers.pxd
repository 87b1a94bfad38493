# The KVBM tiers of a paged rank: G2 (host), G3 (disk) and G4 (object store) below the device, which is G1.
#
# spec/host-offload.md part B. Blocks go down when they are evicted and come
# back before a prompt that needs them is admitted. A rank without tiers owns
# one empty row of each table here.
#
#   evicted   quarantined --link--> in G2, the slot is free   (copied on to G3 and G4 behind the scenes)
#   swap-in   request parked; G3 or G4 --link--> G2 --link--> findable on the device, request at the front
#
# A slot whose block is on its way out counts as active; whoever needed it
# *depends* on the offload: it is passed over until no offload is left. Nothing
# that waits here waits for anything but a transfer on a link, and a transfer
# on a link ends by itself.
#
# All N transfers of a link progress at an Nth of its rate (offload/links.py has
# the same rule in Python). The tables of G3, G4 and their links lie in the
# arena of `rank_t.deep`: the rank's own, unless several ranks share them. Then
# `deep` is a rank that does nothing but own them. Whoever lets time pass lets
# all transfers of shared links progress, but an end is settled by the rank
# whose transfer it was, when that rank is ticked.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.types cimport DEPENDENT, G2_TO_G3, NO_SLOT, NUM_LINKS, rank_t

cdef enum swap:  # of a prompt that was let in
    SWAP_MISS = 0
    SWAP_PARKED = 1
    SWAP_BLOCKED = 2  # its destination has to be offloaded first

cdef bint tiers_make_room(rank_t* r, int64_t fresh, int64_t kept) noexcept nogil
cdef int tiers_swap(rank_t* r, int32_t slot, int64_t skip) noexcept nogil
cdef bint tiers_tick(rank_t* r, double now_ms) noexcept nogil
cdef void tiers_drop(rank_t* r, int32_t slot) noexcept nogil
cdef void tiers_ready(rank_t* r) noexcept nogil
cdef void tiers_reset(rank_t* r) noexcept nogil
cdef void tiers_reindex(rank_t* r) noexcept nogil
cdef void tier_put(rank_t* d, int32_t tier, uint64_t hash) noexcept nogil
cdef int32_t tier_find(const rank_t* d, int32_t tier, uint64_t hash) noexcept nogil


cdef inline double tiers_deadline(const rank_t* r) noexcept nogil:
    """When the next transfer on any link ends, or has ended without being settled; infinity if there is none.

    Transfers of others on shared links count, since theirs end all the sooner then.
    """
    cdef double deadline = r.tiers.ended_ms if r.tiers.ended_ms < r.tiers.below_ms else r.tiers.below_ms
    cdef double next_ms
    cdef int link
    for link in range(NUM_LINKS):
        next_ms = r.tiers.link_next_ms[link] if link < G2_TO_G3 else r.deep.tiers.link_next_ms[link]
        if next_ms < deadline:
            deadline = next_ms
    return deadline


cdef inline void tiers_open(rank_t* r, int32_t slot) noexcept nogil:
    """The row of a new request."""
    r.offloads[slot].progress = -1
    r.offloads[slot].latest_store = NO_SLOT
    r.offloads[slot].load = NO_SLOT
    r.offloads[slot].device_blocks = -1


cdef inline bint tiers_depend(rank_t* r, int32_t slot) noexcept nogil:
    """Whether a request still waits for offloads; if not, it does so no longer."""
    if not r.requests[slot].host & DEPENDENT:
        return False
    if r.tiers.num_offloads > 0:
        return True
    r.requests[slot].host &= <unsigned char>~DEPENDENT
    return False


cdef inline bint tiers_refused(rank_t* r, int32_t slot) noexcept nogil:
    """After a request got no blocks: whether they are on their way out, so that it waits for them."""
    if not r.p.offloading:
        return False
    r.p.offloading = 0
    r.requests[slot].host |= DEPENDENT
    return True
