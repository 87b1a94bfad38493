# The tree itself: match, insert, split, lock, evict. See radix.pxd.

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

from kvsim._core.events cimport event_add, event_open
from kvsim._core.types cimport (
    CHECK, GROW_NODES, GROW_RUNS, NO_NODE, NO_SLOT, REMOVED, ROOT, TABLE_CLASSES, node_t, radix_t, rank_t, run_t,
    unlikely,
)


# ---------------------------------------------------------------- children: (parent, first key) -> node

cdef inline int64_t child_home(const rank_t* r, int32_t parent, uint64_t key) noexcept nogil:
    return <int64_t>((key ^ (<uint64_t>parent * <uint64_t>0x9E3779B97F4A7C15)) & <uint64_t>r.mask_nodes)


cdef inline int32_t child_find(const rank_t* r, int32_t parent, uint64_t key) noexcept nogil:
    cdef int64_t i = child_home(r, parent, key)
    cdef int32_t n
    while r.node_index[i] != NO_NODE:
        n = r.node_index[i]
        if r.nodes[n].parent == parent and r.runs[r.nodes[n].keys].key == key:
            return n
        i = (i + 1) & r.mask_nodes
    return NO_NODE


cdef inline int64_t child_place(const rank_t* r, int32_t n) noexcept nogil:
    """Index slot of a node that is listed."""
    cdef int64_t i = child_home(r, r.nodes[n].parent, r.runs[r.nodes[n].keys].key)
    while r.node_index[i] != n:
        i = (i + 1) & r.mask_nodes
    return i


cdef inline void child_insert(rank_t* r, int32_t n) noexcept nogil:
    cdef int64_t i = child_home(r, r.nodes[n].parent, r.runs[r.nodes[n].keys].key)
    while r.node_index[i] != NO_NODE:
        i = (i + 1) & r.mask_nodes
    r.node_index[i] = n


cdef inline void child_remove(rank_t* r, int32_t n) noexcept nogil:
    cdef int64_t i = child_place(r, n)
    cdef int64_t j = i
    cdef int64_t home
    cdef int32_t other
    while True:
        j = (j + 1) & r.mask_nodes
        other = r.node_index[j]
        if other == NO_NODE:
            break
        home = child_home(r, r.nodes[other].parent, r.runs[r.nodes[other].keys].key)
        if ((j - home) & r.mask_nodes) >= ((j - i) & r.mask_nodes):
            r.node_index[i] = other
            i = j
    r.node_index[i] = NO_NODE


# ---------------------------------------------------------------- the eviction heap

cdef inline bint older(const rank_t* r, int32_t a, int32_t b) noexcept nogil:
    cdef const node_t* x = &r.nodes[a]
    cdef const node_t* y = &r.nodes[b]
    return x.last_access < y.last_access or (x.last_access == y.last_access and x.ordinal < y.ordinal)


cdef inline void heap_set(rank_t* r, int64_t at, int32_t n) noexcept nogil:
    r.evict_heap[at] = n
    r.nodes[n].heap_at = <int32_t>at


cdef inline void heap_up(rank_t* r, int64_t at) noexcept nogil:
    cdef int32_t n = r.evict_heap[at]
    while at > 0 and older(r, n, r.evict_heap[(at - 1) >> 1]):
        heap_set(r, at, r.evict_heap[(at - 1) >> 1])
        at = (at - 1) >> 1
    heap_set(r, at, n)


cdef inline void heap_down(rank_t* r, int64_t at) noexcept nogil:
    cdef int32_t n = r.evict_heap[at]
    cdef int64_t size = r.radix.heap_size
    cdef int64_t child
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and older(r, r.evict_heap[child + 1], r.evict_heap[child]):
            child += 1
        if not older(r, r.evict_heap[child], n):
            break
        heap_set(r, at, r.evict_heap[child])
        at = child
    heap_set(r, at, n)


cdef inline void heap_push(rank_t* r, int32_t n) noexcept nogil:
    """List an unlocked leaf as a candidate of eviction."""
    r.evict_heap[r.radix.heap_size] = n
    r.radix.heap_size += 1
    heap_up(r, r.radix.heap_size - 1)


cdef inline void heap_delete(rank_t* r, int32_t n) noexcept nogil:
    cdef int64_t at = r.nodes[n].heap_at
    cdef int32_t last
    r.nodes[n].heap_at = -1
    r.radix.heap_size -= 1
    if at == r.radix.heap_size:
        return
    last = r.evict_heap[r.radix.heap_size]
    heap_set(r, at, last)
    heap_up(r, at)
    heap_down(r, r.nodes[last].heap_at)


cdef inline void touch(rank_t* r, int32_t n, int64_t tick) noexcept nogil:
    r.nodes[n].last_access = tick
    if r.nodes[n].heap_at >= 0:
        # The clock only grows, so a touched leaf can only move away from the top.
        heap_down(r, r.nodes[n].heap_at)


# ---------------------------------------------------------------- nodes and the runs of their edges

cdef inline int32_t span_take(rank_t* r, int64_t runs, int32_t* span_class) noexcept nogil:
    """A span of the run heap for `runs` runs."""
    cdef int32_t size = 0
    cdef int32_t span
    while (<int64_t>1 << size) < runs:
        size += 1
    span_class[0] = size
    span = r.radix.run_free[size]
    if span != -1:
        # A free span keeps the next one of its size in its first run.
        r.radix.run_free[size] = <int32_t>r.runs[span].pages
        return span
    if unlikely(r.radix.runs_used + (<int64_t>1 << size) > r.cap_runs):
        r.grow(r, GROW_RUNS, r.radix.runs_used + (<int64_t>1 << size))
    span = <int32_t>r.radix.runs_used
    r.radix.runs_used += <int64_t>1 << size
    return span


cdef inline void span_give(rank_t* r, int32_t span, int32_t span_class) noexcept nogil:
    r.runs[span].key = 0
    r.runs[span].seq = 0
    r.runs[span].pages = r.radix.run_free[span_class]
    r.radix.run_free[span_class] = span


cdef int32_t node_new(rank_t* r, int64_t runs) noexcept nogil:
    """A node with room for `runs` runs and no pages yet."""
    cdef radix_t* x = r.radix
    cdef int32_t n
    cdef int32_t span
    cdef int32_t span_class = 0
    cdef node_t* node
    if x.free_node != NO_NODE:
        n = x.free_node
        x.free_node = r.nodes[n].next
    else:
        if unlikely(x.num_nodes == r.cap_nodes):
            r.grow(r, GROW_NODES, x.num_nodes + 1)
        x = r.radix
        n = <int32_t>x.num_nodes
        x.num_nodes += 1
    span = span_take(r, runs, &span_class)
    x = r.radix
    node = &r.nodes[n]
    memset(node, 0, sizeof(node_t))
    node.ordinal = x.next_ordinal
    x.next_ordinal += 1
    x.live_nodes += 1
    node.parent = NO_NODE
    node.keys = span
    node.span = span
    node.span_class = span_class
    node.heap_at = -1
    node.next = NO_NODE
    node.live = 1
    return n


cdef void node_free(rank_t* r, int32_t n) noexcept nogil:
    span_give(r, r.nodes[n].span, r.nodes[n].span_class)
    memset(&r.nodes[n], 0, sizeof(node_t))
    r.nodes[n].parent = NO_NODE
    r.nodes[n].heap_at = -1
    r.nodes[n].next = r.radix.free_node
    r.radix.free_node = n
    r.radix.live_nodes -= 1


cdef int64_t runs_for(cursor_t at, int64_t pages) noexcept nogil:
    """How many runs `pages` pages from `at` are."""
    cdef int64_t count = 0
    while pages > 0:
        pages -= at.run.pages - at.offset
        at.run += 1
        at.offset = 0
        count += 1
    return count


cdef void edge_append(rank_t* r, int32_t n, cursor_t at, int64_t pages) noexcept nogil:
    """Put `pages` pages of content at the end of the edge of a node, which may move its runs."""
    cdef node_t* node = &r.nodes[n]
    cdef int64_t need = node.num_runs + runs_for(at, pages)
    cdef int32_t span
    cdef int32_t span_class = 0
    cdef int64_t take
    cdef run_t* last
    if node.keys - node.span + need > (<int64_t>1 << node.span_class):
        span = span_take(r, need, &span_class)
        node = &r.nodes[n]
        memcpy(&r.runs[span], &r.runs[node.keys], <size_t>node.num_runs * sizeof(run_t))
        span_give(r, node.span, node.span_class)
        node.span = span
        node.keys = span
        node.span_class = span_class
    node.pages += pages
    while pages > 0:
        take = at.run.pages - at.offset
        if take > pages:
            take = pages
        last = &r.runs[node.keys + node.num_runs - 1]
        if node.num_runs > 0 and last.key == at.run.key and at.run.seq == 0:
            last.pages += take
        else:
            last = &r.runs[node.keys + node.num_runs]
            last.key = at.run.key
            last.seq = at.run.seq
            last.pages = take
            node.num_runs += 1
        pages -= take
        at.run += 1
        at.offset = 0


cdef int64_t common_pages(const rank_t* r, int32_t n, cursor_t at, int64_t limit) noexcept nogil:
    """Pages that the edge of a node and the content at `at` have in common, at most `limit`."""
    cdef const node_t* node = &r.nodes[n]
    cdef const run_t* edge = &r.runs[node.keys]
    cdef int64_t left = node.pages if node.pages < limit else limit
    cdef int64_t same = 0
    cdef int64_t edge_offset = 0
    cdef int64_t step
    while same < left and edge.key == at.run.key:
        step = edge.pages - edge_offset
        if step > at.run.pages - at.offset:
            step = at.run.pages - at.offset
        if step > left - same:
            step = left - same
        same += step
        edge_offset += step
        at.offset += step
        if edge_offset == edge.pages:
            edge += 1
            edge_offset = 0
        if at.offset == at.run.pages and same < left:
            at.run += 1
            at.offset = 0
    return same


cdef int32_t split(rank_t* r, int32_t n, int64_t pages) noexcept nogil:
    """Cut the edge of a node behind `pages` pages: a new node above it takes the first part.

    The old node keeps its identity as the lower part, so leases that hold it stay valid.
    """
    cdef int64_t count = 0
    cdef int64_t left = pages
    cdef int32_t upper
    cdef node_t* high
    cdef node_t* low = &r.nodes[n]
    cdef int64_t place
    cdef run_t* run
    while left > 0:
        left -= r.runs[low.keys + count].pages
        count += 1
    upper = node_new(r, count)
    low = &r.nodes[n]
    high = &r.nodes[upper]
    place = child_place(r, n)
    memcpy(&r.runs[high.keys], &r.runs[low.keys], <size_t>count * sizeof(run_t))
    high.num_runs = <int32_t>count
    high.pages = pages
    high.parent = low.parent
    high.lock_refs = low.lock_refs
    high.last_access = low.last_access
    high.children = 1
    r.node_index[place] = upper
    # `left` is minus the pages of the last run that stay below.
    r.runs[high.keys + count - 1].pages += left
    low.keys += <int32_t>(count if left == 0 else count - 1)
    low.num_runs -= <int32_t>(count if left == 0 else count - 1)
    if left < 0:
        run = &r.runs[low.keys]
        run.pages = -left
    low.pages -= pages
    low.parent = upper
    child_insert(r, n)
    return upper


# ---------------------------------------------------------------- operations

cdef int64_t radix_match(rank_t* r, cursor_t at, int64_t limit, int32_t* node) noexcept nogil:
    """Longest prefix of the content in the tree, at most `limit` pages; the node it ends at.

    Touches what it passes and splits an edge it ends inside of.
    """
    cdef radix_t* x = r.radix
    cdef int32_t current = ROOT
    cdef int32_t child
    cdef int64_t matched = 0
    cdef int64_t k
    cdef int64_t tick
    x.clock += 1
    tick = x.clock
    r.nodes[ROOT].last_access = tick
    while matched < limit:
        child = child_find(r, current, at.run.key)
        if child == NO_NODE:
            break
        k = common_pages(r, child, at, limit - matched)
        touch(r, child, tick)
        matched += k
        if k < r.nodes[child].pages:
            current = split(r, child, k)
            break
        current = child
        if matched < limit:
            cursor_advance(&at, k)
    node[0] = current
    return matched


cdef int64_t radix_match_length(const rank_t* r, cursor_t at, int64_t limit) noexcept nogil:
    """As `radix_match`, changing nothing."""
    cdef int32_t current = ROOT
    cdef int64_t matched = 0
    cdef int64_t k
    while matched < limit:
        current = child_find(r, current, at.run.key)
        if current == NO_NODE:
            break
        k = common_pages(r, current, at, limit - matched)
        matched += k
        if k < r.nodes[current].pages:
            break
        if matched < limit:
            cursor_advance(&at, k)
    return matched


cdef inline void add_pages(rank_t* r, int32_t n, int64_t pages) noexcept nogil:
    """Account pages that were put on the edge of a node."""
    if r.nodes[n].lock_refs > 0:
        r.radix.protected += pages
    else:
        r.radix.evictable += pages


cdef int32_t new_child(rank_t* r, int32_t parent, cursor_t at, int64_t pages, const run_t* end) noexcept nogil:
    # Room for all that its request may come to: an edge that grows would have to move.
    cdef int32_t n = node_new(r, end - at.run)
    edge_append(r, n, at, pages)
    r.radix.clock += 1
    r.nodes[n].last_access = r.radix.clock
    r.nodes[n].parent = parent
    child_insert(r, n)
    r.nodes[parent].children += 1
    if r.nodes[parent].heap_at >= 0:
        heap_delete(r, parent)
    add_pages(r, n, pages)
    heap_push(r, n)
    return n


cdef int32_t radix_insert(
    rank_t* r, int32_t start, cursor_t at, int64_t pages, const run_t* end, int64_t* found
) noexcept nogil:
    """Have `pages` pages of content, whose last run is before `end`, below node `start`; returns the node they end at.

    `found` counts those that were there already: the copies of them that the
    caller owns are duplicates.
    """
    cdef int32_t current = start
    cdef int32_t child
    cdef int64_t left = pages
    cdef int64_t k
    cdef int64_t tick
    found[0] = 0
    r.radix.clock += 1
    tick = r.radix.clock
    child = start
    while child != NO_NODE:
        touch(r, child, tick)
        child = r.nodes[child].parent
    while left > 0:
        if current != ROOT and r.nodes[current].children == 0 and (
                r.nodes[current].lock_refs == 0 or (current == start and r.nodes[current].lock_refs == 1)):
            edge_append(r, current, at, left)
            touch(r, current, tick)
            add_pages(r, current, left)
            return current
        child = child_find(r, current, at.run.key)
        if child == NO_NODE:
            return new_child(r, current, at, left, end)
        k = common_pages(r, child, at, left)
        touch(r, child, tick)
        left -= k
        found[0] += k
        if k < r.nodes[child].pages:
            current = split(r, child, k)
            if left > 0:
                cursor_advance(&at, k)
                return new_child(r, current, at, left, end)
            return current
        current = child
        if left > 0:
            cursor_advance(&at, k)
    return current


cdef void radix_lock(rank_t* r, int32_t node) noexcept nogil:
    """Protect a node and all above it from eviction."""
    cdef node_t* n
    while node != ROOT:
        n = &r.nodes[node]
        if n.lock_refs == 0:
            r.radix.evictable -= n.pages
            r.radix.protected += n.pages
            if n.heap_at >= 0:
                heap_delete(r, node)
        n.lock_refs += 1
        node = n.parent


cdef void radix_unlock(rank_t* r, int32_t node) noexcept nogil:
    cdef node_t* n
    while node != ROOT:
        n = &r.nodes[node]
        CHECK(n.lock_refs > 0)
        n.lock_refs -= 1
        if n.lock_refs == 0:
            r.radix.protected -= n.pages
            r.radix.evictable += n.pages
            if n.children == 0:
                heap_push(r, node)
        node = n.parent


cdef void drop_tail(rank_t* r, int32_t n, int64_t pages) noexcept nogil:
    """Take the last `pages` pages off an edge."""
    cdef node_t* node = &r.nodes[n]
    cdef run_t* run
    node.pages -= pages
    if node.pages + pages == node.num_runs:
        # One page a run: the runs need not be read.
        node.num_runs -= <int32_t>pages
        return
    while pages > 0:
        run = &r.runs[node.keys + node.num_runs - 1]
        if run.pages > pages:
            run.pages -= pages
            return
        pages -= run.pages
        node.num_runs -= 1


cdef void tell_removed(rank_t* r, int32_t n, int64_t pages) noexcept nogil:
    """Removed event of the last `pages` pages of an edge; with events a run is one page.

    Neighbouring Removed events of the buffer are one (spec/sglang.md section 4.7).
    """
    cdef node_t* node = &r.nodes[n]
    cdef int64_t i
    if r.header.num_events == r.radix.flushed or r.events[r.header.num_events - 1].kind != REMOVED:
        event_open(r, REMOVED, 0, 0)
    node = &r.nodes[n]
    for i in range(node.num_runs - pages, node.num_runs):
        event_add(r, r.runs[r.nodes[n].keys + i].seq, 0, NO_SLOT, 0)


cdef int64_t radix_evict(rank_t* r, int64_t pages) noexcept nogil:
    """Free at least `pages` pages of unlocked leaves, least recently used first, tails first; returns how many."""
    cdef radix_t* x = r.radix
    cdef int64_t freed = 0
    cdef int64_t take
    cdef int32_t n
    cdef int32_t parent
    while freed < pages and r.radix.heap_size > 0:
        n = r.evict_heap[0]
        take = r.nodes[n].pages
        if take > pages - freed:
            take = pages - freed
        if r.config.emit_events:
            tell_removed(r, n, take)
        x = r.radix
        freed += take
        x.evictable -= take
        x.available += take
        if take < r.nodes[n].pages:
            drop_tail(r, n, take)
            break
        parent = r.nodes[n].parent
        heap_delete(r, n)
        child_remove(r, n)
        node_free(r, n)
        r.nodes[parent].children -= 1
        if parent != ROOT and r.nodes[parent].children == 0 and r.nodes[parent].lock_refs == 0:
            heap_push(r, parent)
    return freed


# ---------------------------------------------------------------- set-up

cdef void radix_reset(rank_t* r) noexcept nogil:
    """An empty tree in zeroed sections."""
    cdef radix_t* x = r.radix
    cdef int64_t i
    for i in range(r.mask_nodes + 1):
        r.node_index[i] = NO_NODE
    for i in range(TABLE_CLASSES):
        x.run_free[i] = -1
    x.free_node = NO_NODE
    x.available = r.config.num_blocks
    x.new_token_ratio = r.config.init_ratio
    memset(&r.nodes[ROOT], 0, sizeof(node_t))
    r.nodes[ROOT].parent = NO_NODE
    r.nodes[ROOT].heap_at = -1
    r.nodes[ROOT].next = NO_NODE
    r.nodes[ROOT].live = 1
    r.nodes[ROOT].span = -1
    x.num_nodes = 1
    x.live_nodes = 1
    x.next_ordinal = 1


cdef void radix_reindex(rank_t* r) noexcept nogil:
    """Rebuild the index of children after its table grew."""
    cdef int64_t i
    for i in range(r.mask_nodes + 1):
        r.node_index[i] = NO_NODE
    for i in range(1, r.radix.num_nodes):
        if r.nodes[i].live:
            child_insert(r, <int32_t>i)
