# KV events: what became findable, what no longer is, in the order it happened.
#
# Two tables: one row per event, one row per block of it. They are filled by
# kernels and drained by whoever subscribed; when full they are enlarged, so
# nothing is dropped.

from libc.stdint cimport int32_t, uint64_t

from kvsim._core.types cimport DEVICE, GROW_EVENTS, GROW_EVENT_BLOCKS, event_block_t, event_t, rank_t, unlikely


cdef inline int event_open(rank_t* r, int32_t kind, uint64_t parent, int32_t flags) noexcept nogil:
    """Start an event; blocks are appended to the newest one."""
    cdef event_t* event
    if unlikely(r.header.num_events == r.cap_events):
        r.grow(r, GROW_EVENTS, r.cap_events + 1)
    event = &r.events[r.header.num_events]
    event.event_id = r.header.next_event_id
    event.parent_hash = parent
    event.at_ms = -1.0
    event.first = <int32_t>r.header.num_event_blocks
    event.count = 0
    event.kind = kind
    event.flags = flags
    event.tier = DEVICE
    event.start = -1
    r.header.next_event_id += 1
    r.header.num_events += 1
    return 0


cdef inline int event_add(rank_t* r, uint64_t hash, uint64_t tokens_hash, int32_t slot, int32_t index) noexcept nogil:
    cdef event_block_t* block
    if unlikely(r.header.num_event_blocks == r.cap_event_blocks):
        r.grow(r, GROW_EVENT_BLOCKS, r.cap_event_blocks + 1)
    block = &r.event_blocks[r.header.num_event_blocks]
    block.block_hash = hash
    block.tokens_hash = tokens_hash
    block.slot = slot
    block.index = index
    r.header.num_event_blocks += 1
    r.events[r.header.num_events - 1].count += 1
    return 0
