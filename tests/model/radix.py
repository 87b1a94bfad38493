"""Twin of SGLang's KV memory: page pool, radix tree, leases and KV events.

Written from spec/sglang.md sections 3 and 4 and from no kernel. Everything is
searched by walking; nothing is kept that can be counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvsim.contract import KvEvent, RankIdentity, Removed, Stored, StoredBlock
from model.hashing import lineage_hash, local_hash


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class PagePool:
    """Physical pages: a stack of returned ones and a counter of those never used (section 3)."""

    def __init__(self, total_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.total_pages = total_tokens // page_size
        self.stack: list[int] = []
        self.next_fresh = 0

    @property
    def total_tokens(self) -> int:
        return self.total_pages * self.page_size

    @property
    def available_tokens(self) -> int:
        return (len(self.stack) + self.total_pages - self.next_fresh) * self.page_size

    def need(self, before: int, after: int) -> int:
        """Tokens that must be available to own `after` tokens of a sequence instead of `before`."""
        return (ceil_div(after, self.page_size) - ceil_div(before, self.page_size)) * self.page_size

    def grow(self, pages: list[int], before: int, after: int) -> None:
        """Add to `pages` what `need` said."""
        count = self.need(before, after) // self.page_size
        old = min(count, len(self.stack))
        pages += self.stack[len(self.stack) - old :]
        del self.stack[len(self.stack) - old :]
        pages += range(self.next_fresh, self.next_fresh + count - old)
        self.next_fresh += count - old
        assert self.next_fresh <= self.total_pages

    def trim(self, pages: Sequence[int], tokens: int) -> None:
        """The owner of `pages` uses `tokens` of them: nothing, pages are owned whole."""

    def reserve(self, tokens: int) -> list[int] | None:
        """Pages for a decode step, None if there are not so many."""
        if tokens > self.available_tokens:
            return None
        pages: list[int] = []
        self.grow(pages, 0, tokens)
        return pages

    def grow_reserved(self, pages: list[int], before: int, reserved: list[int]) -> None:
        """One more token, in a reserved page if it opens one."""
        if before % self.page_size == 0:
            pages.append(reserved.pop(0))

    def free(self, pages: Sequence[int]) -> None:
        self.stack += pages

    def check(self, owned: Sequence[int]) -> None:
        """`owned` are the pages of the tree and of the leases."""
        assert set(owned).isdisjoint(self.stack)
        assert len(set(self.stack)) == len(self.stack)
        assert len(owned) + len(self.stack) == self.next_fresh <= self.total_pages


class TokenPool:
    """Slots for single tokens, as in ruleset ``dynamo-1.3``; a page is only a name for up to `page_size` of them."""

    def __init__(self, total_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.total_tokens = total_tokens
        #: tokens in every page in use
        self.fill: dict[int, int] = {}
        self.next_page = 0

    @property
    def available_tokens(self) -> int:
        return self.total_tokens - sum(self.fill.values())

    def need(self, before: int, after: int) -> int:
        return after - before

    def grow(self, pages: list[int], before: int, after: int) -> None:
        for position in range(before, after):
            if position % self.page_size == 0:
                pages.append(self.next_page)
                self.fill[self.next_page] = 0
                self.next_page += 1
            self.fill[pages[-1]] += 1
        assert self.available_tokens >= 0

    def trim(self, pages: Sequence[int], tokens: int) -> None:
        """The owner of `pages` uses `tokens` of them: the rest of the last one is free."""
        self.fill[pages[-1]] = tokens - (len(pages) - 1) * self.page_size

    def reserve(self, tokens: int) -> list[int] | None:
        return None if tokens > self.available_tokens else []

    def grow_reserved(self, pages: list[int], before: int, reserved: list[int]) -> None:
        self.grow(pages, before, before + 1)

    def free(self, pages: Sequence[int]) -> None:
        for page in pages:
            del self.fill[page]

    def check(self, owned: Sequence[int]) -> None:
        assert set(owned) == set(self.fill)
        assert all(0 < tokens <= self.page_size for tokens in self.fill.values())


@dataclass(eq=False)
class Node:
    """An edge of whole pages and what hangs below it; the root has no edge."""

    parent: Node | None
    keys: list[int]
    pages: list[int]
    last_access: int
    ordinal: int
    lock_ref: int = 0
    children: dict[int, Node] = field(default_factory=dict)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


class RadixTree:
    """Section 4.1. Keys are local page hashes; access times are ticks of a logical clock."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.clock = 0
        self.created = 0
        self.root = self._new(None, [], [], 0)

    def _new(self, parent: Node | None, keys: list[int], pages: list[int], last_access: int) -> Node:
        node = Node(parent, keys, pages, last_access, self.created)
        self.created += 1
        if parent is not None:
            parent.children[keys[0]] = node
        return node

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def nodes(self) -> Iterator[Node]:
        """Every node below the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def path(self, node: Node) -> list[Node]:
        """From the root, which is left out, to `node`."""
        found = []
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def path_pages(self, node: Node) -> list[int]:
        return [page for step in self.path(node) for page in step.pages]

    @property
    def evictable_size(self) -> int:
        return sum(len(node.keys) for node in self.nodes() if node.lock_ref == 0) * self.page_size

    @property
    def protected_size(self) -> int:
        return sum(len(node.keys) for node in self.nodes() if node.lock_ref > 0) * self.page_size

    def match(self, keys: Sequence[int]) -> tuple[int, Node]:
        """(pages found, last node); splits an edge that is left in its middle."""
        now = self.tick()
        node, position = self.root, 0
        node.last_access = now
        while position < len(keys) and keys[position] in node.children:
            child = node.children[keys[position]]
            child.last_access = now
            same = common_prefix(child.keys, keys[position:])
            position += same
            if same < len(child.keys):
                return position, self.split(child, same)
            node = child
        return position, node

    def match_len(self, keys: Sequence[int]) -> int:
        """Pages found; nothing is touched."""
        node, position = self.root, 0
        while position < len(keys) and keys[position] in node.children:
            child = node.children[keys[position]]
            same = common_prefix(child.keys, keys[position:])
            position += same
            if same < len(child.keys):
                break
            node = child
        return position

    def split(self, child: Node, count: int) -> Node:
        """The new upper node with the first `count` pages; `child` stays the lower half."""
        parent = child.parent
        assert parent is not None
        assert 0 < count < len(child.keys)
        upper = self._new(parent, child.keys[:count], child.pages[:count], child.last_access)
        upper.lock_ref = child.lock_ref
        child.keys, child.pages, child.parent = child.keys[count:], child.pages[count:], upper
        upper.children[child.keys[0]] = child
        return upper

    def insert(self, start: Node, keys: Sequence[int], pages: Sequence[int]) -> Node:
        """Continue below `start`; the node that now ends the path. Pages already there stay."""
        now = self.tick()
        self.root.last_access = now
        for step in self.path(start):
            step.last_access = now
        keys, pages = list(keys), list(pages)
        node = start
        while keys:
            extendable = node.lock_ref == 0 or (node is start and node.lock_ref == 1)
            if node is not self.root and not node.children and extendable:
                node.keys += keys
                node.pages += pages
                node.last_access = now
                return node
            child = node.children.get(keys[0])
            if child is None:
                return self._new(node, keys, pages, self.tick())
            child.last_access = now
            same = common_prefix(child.keys, keys)
            node = child if same == len(child.keys) else self.split(child, same)
            keys, pages = keys[same:], pages[same:]
            if keys and node is not child:
                return self._new(node, keys, pages, self.tick())
        return node

    def lock(self, node: Node) -> None:
        for step in self.path(node):
            step.lock_ref += 1

    def unlock(self, node: Node) -> None:
        for step in self.path(node):
            assert step.lock_ref > 0
            step.lock_ref -= 1

    def eviction_order(self) -> list[Node]:
        """Unlocked leaves, the next victim first."""
        leaves = [node for node in self.nodes() if not node.children and node.lock_ref == 0]
        return sorted(leaves, key=lambda node: (node.last_access, node.ordinal))

    def evict(self, tokens: int) -> list[int]:
        """Take at least `tokens` tokens out, if there are so many; their pages in the order of removal."""
        freed: list[int] = []
        while len(freed) * self.page_size < tokens and (leaves := self.eviction_order()):
            node = leaves[0]
            count = min(ceil_div(tokens - len(freed) * self.page_size, self.page_size), len(node.pages))
            keep = len(node.pages) - count
            freed += node.pages[keep:]
            if keep == 0:
                assert node.parent is not None
                del node.parent.children[node.keys[0]]
            del node.keys[keep:], node.pages[keep:]
        return freed

    def check(self) -> None:
        assert self.root.lock_ref == 0
        assert not self.root.keys
        seen: set[int] = set()
        for node in [self.root, *self.nodes()]:
            assert len(node.keys) == len(node.pages)
            assert node.last_access <= self.clock
            for key, child in node.children.items():
                assert child.parent is node
                assert child.keys
                assert child.keys[0] == key
                if node is not self.root:
                    assert child.lock_ref <= node.lock_ref
            assert seen.isdisjoint(node.pages)
            seen.update(node.pages)

    def describe(self, node: Node | None = None) -> list[dict[str, object]]:
        """Canonical nested description of what is below `node`; no page ids, no times."""
        node = self.root if node is None else node
        return [
            {"hashes": list(child.keys), "lock_ref": child.lock_ref, "children": self.describe(child)}
            for _, child in sorted(node.children.items())
        ]


@dataclass(eq=False)
class Lease:
    """KV that a request owns (section 4.2). Pages before `cached` belong to the tree."""

    pages: list[int] = field(default_factory=list)
    materialized: int = 0
    cached: int = 0
    admission_reused: int = 0
    page_hashes: list[int] = field(default_factory=list)
    last_node: Node | None = None

    @property
    def active(self) -> bool:
        return self.last_node is not None

    def forget(self) -> None:
        """Back to inactive; the hashes of the sequence stay true."""
        self.pages = []
        self.materialized = self.cached = self.admission_reused = 0
        self.last_node = None


class EventLog:
    """Who advertises what, and the buffer of what nobody has seen yet (section 4.7)."""

    def __init__(self, identity: RankIdentity, enabled: bool, token_ids: bool, merging: bool) -> None:
        self.identity = identity
        self.enabled = enabled
        self.token_ids = token_ids
        self.merging = merging
        self.next_event_id = 0
        self.buffer: list[KvEvent] = []
        #: block hash of every published page
        self.published: dict[int, int] = {}
        #: pages that advertise a block hash
        self.copies: dict[int, int] = {}

    def _emit(self, data: Stored | Removed) -> None:
        last = self.buffer[-1] if self.buffer and self.merging else None
        merged: Stored | Removed | None = None
        if last is not None and isinstance(last.data, Removed) and isinstance(data, Removed):
            merged = Removed(last.data.block_hashes + data.block_hashes)
        elif (
            last is not None
            and isinstance(last.data, Stored)
            and isinstance(data, Stored)
            and data.parent_hash == last.data.blocks[-1].block_hash
        ):
            merged = Stored(last.data.parent_hash, last.data.blocks + data.blocks)
        if last is not None and merged is not None:
            self.buffer[-1] = KvEvent(last.event_id, last.worker_id, last.dp_rank, merged)
            return
        self.buffer.append(KvEvent(self.next_event_id, self.identity.worker_id, self.identity.dp_rank, data))
        self.next_event_id += 1

    def publish(self, pages: Sequence[int], hashes: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        """Pages `start` and later of a sequence are complete; `pages` and `hashes` are those of all of it."""
        if not self.enabled:
            return
        listed: list[StoredBlock] = []
        parent_of_first: int | None = None
        size = len(tokens) // len(hashes) if hashes else 0
        for position in range(start, len(hashes)):
            page = pages[position]
            if page in self.published:
                continue
            parent = self.published.get(pages[position - 1]) if position else None
            block_hash = lineage_hash(parent, hashes[position])
            self.published[page] = block_hash
            self.copies[block_hash] = self.copies.get(block_hash, 0) + 1
            if listed or self.copies[block_hash] == 1:
                if not listed:
                    parent_of_first = parent
                ids = tuple(tokens[position * size : (position + 1) * size]) if self.token_ids else None
                listed.append(StoredBlock(block_hash, hashes[position], ids))
        if listed:
            self._emit(Stored(parent_of_first, tuple(listed)))

    def withdraw(self, pages: Sequence[int]) -> None:
        """These pages are free."""
        gone = []
        for page in pages:
            block_hash = self.published.pop(page, None)
            if block_hash is None:
                continue
            self.copies[block_hash] -= 1
            if self.copies[block_hash] == 0:
                del self.copies[block_hash]
                gone.append(block_hash)
        if gone:
            self._emit(Removed(tuple(gone)))

    def drain(self) -> list[KvEvent]:
        events, self.buffer = self.buffer, []
        return events


class KvManager:
    """Leases over the pool and the tree (sections 4.3 to 4.6)."""

    def __init__(self, pool: PagePool | TokenPool, caching: bool, events: EventLog) -> None:
        self.pool = pool
        self.page_size = page_size = pool.page_size
        self.caching = caching
        self.tree = RadixTree(page_size)
        self.events = events

    @property
    def available(self) -> int:
        return self.pool.available_tokens

    @property
    def reachable(self) -> int:
        """Tokens that are free or can be freed by eviction."""
        return self.pool.available_tokens + self.tree.evictable_size

    def floor(self, tokens: int) -> int:
        return tokens // self.page_size * self.page_size

    def ceil(self, tokens: int) -> int:
        return ceil_div(tokens, self.page_size) * self.page_size

    def hashes(self, lease: Lease, tokens: Sequence[int], count: int) -> list[int]:
        """The first `count` page hashes of the sequence of a lease, computed as needed."""
        size = self.page_size
        while len(lease.page_hashes) < count:
            start = len(lease.page_hashes) * size
            lease.page_hashes.append(local_hash(tokens[start : start + size]))
        return lease.page_hashes[:count]

    def match_len(self, lease: Lease, tokens: Sequence[int], limit: int) -> int:
        """Cached tokens of the whole pages within the first `limit` tokens."""
        if not self.caching:
            return 0
        return self.tree.match_len(self.hashes(lease, tokens, limit // self.page_size)) * self.page_size

    def evict(self, tokens: int) -> None:
        """Free at least `tokens` cached tokens, as far as there are so many."""
        if tokens > 0:
            self._free(self.tree.evict(tokens))

    def _free(self, pages: Sequence[int]) -> None:
        self.events.withdraw(pages)
        self.pool.free(pages)

    def _grow(self, pages: list[int], before: int, after: int) -> bool:
        """Own `after` tokens, by eviction if need be; False and nothing evicted if there cannot be so many."""
        need = self.pool.need(before, after)
        if need > self.reachable:
            return False
        self.evict(need - self.available)
        self.pool.grow(pages, before, after)
        return True

    def allocate(self, lease: Lease, tokens: Sequence[int], cap: int, *, whole_pages: bool = False) -> int | None:
        """First pages of a request for `tokens`; the matched prefix, None if there is no room.

        `whole_pages` takes all of the last page, whatever is needed of it.
        """
        assert not lease.active
        pages_found, node = 0, self.tree.root
        if self.caching:
            keys = self.hashes(lease, tokens, min(cap, len(tokens)) // self.page_size)
            pages_found, node = self.tree.match(keys)
            self.tree.lock(node)
        pages = self.tree.path_pages(node)
        prefix = pages_found * self.page_size
        if not self._grow(pages, prefix, self.ceil(len(tokens)) if whole_pages else len(tokens)):
            self.tree.unlock(node)
            return None
        lease.pages = pages
        lease.materialized = len(tokens)
        lease.cached = lease.admission_reused = prefix
        lease.last_node = node
        return lease.cached

    def extend(self, lease: Lease, length: int) -> int | None:
        """Own `length` tokens of a sequence that is under way; what was owned before, None if there is no room."""
        assert lease.active
        before = lease.materialized
        if not self._grow(lease.pages, before, length):
            return None
        lease.materialized = length
        return before

    def _publish(self, lease: Lease, tokens: Sequence[int], length: int) -> list[int]:
        """Announce the pages between the cached part and `length`; hashes of all of them."""
        keys = self.hashes(lease, tokens, length // self.page_size)
        self.events.publish(lease.pages, keys, lease.cached // self.page_size, tokens[:length])
        return keys

    def cache_prefix(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Put the whole computed pages of a live request into the tree."""
        length = self.floor(lease.materialized)
        if not self.caching or length <= lease.cached:
            return
        assert lease.last_node is not None
        first = lease.cached // self.page_size
        keys = self._publish(lease, tokens, length)
        node = self.tree.insert(lease.last_node, keys[first:], lease.pages[first : len(keys)])
        if node is not lease.last_node:
            self.tree.lock(node)
        canonical = self.tree.path_pages(node)
        assert len(canonical) == len(keys)
        duplicates = [mine for mine, kept in zip(lease.pages, canonical, strict=False) if mine != kept]
        lease.pages[: len(keys)] = canonical
        self._free(duplicates)
        if node is not lease.last_node:
            self.tree.unlock(lease.last_node)
        lease.last_node, lease.cached = node, length

    def finish(self, lease: Lease, tokens: Sequence[int]) -> None:
        """The request is done: its whole pages stay cached, the rest is freed."""
        if lease.last_node is None:
            return
        if not self.caching:
            self._free(lease.pages)
            lease.forget()
            return
        length = self.floor(min(len(tokens), lease.materialized))
        self._free(lease.pages[length // self.page_size :])
        if length > 0:
            first = lease.cached // self.page_size
            keys = self._publish(lease, tokens, length)
            mine = lease.pages[first : len(keys)]
            node = self.tree.insert(lease.last_node, keys[first:], mine)
            kept = self.tree.path_pages(node)[first:]
            self._free([page for page, canonical in zip(mine, kept, strict=True) if page != canonical])
        self.tree.unlock(lease.last_node)
        lease.forget()

    def release(self, lease: Lease) -> bool:
        """Give up everything that is not in the tree; whether others can now have more."""
        if lease.last_node is None:
            return False
        private = lease.pages[lease.cached // self.page_size :]
        improved = bool(private) or lease.last_node is not self.tree.root
        self._free(private)
        self.tree.unlock(lease.last_node)
        lease.forget()
        return improved

    def grow(self, lease: Lease, reserved: list[int]) -> None:
        """One more token, from a reservation of the pool."""
        self.pool.grow_reserved(lease.pages, lease.materialized, reserved)
        lease.materialized += 1

    def check(self, leases: Sequence[Lease]) -> None:
        """Every page has one owner, every lock one lease, every advertised page an owner."""
        self.tree.check()
        size = self.page_size
        cached = [page for node in self.tree.nodes() for page in node.pages]
        private = [page for lease in leases for page in lease.pages[lease.cached // size :]]
        owned = cached + private
        assert len(set(owned)) == len(owned)
        self.pool.check(owned)
        assert self.tree.evictable_size + self.tree.protected_size == len(cached) * size
        locks: dict[int, int] = {}
        for lease in leases:
            assert lease.active == (lease.materialized > 0)
            assert lease.cached % size == 0
            assert lease.cached <= lease.materialized
            assert len(lease.pages) == ceil_div(lease.materialized, size)
            if lease.last_node is None:
                continue
            assert self.tree.path_pages(lease.last_node) == lease.pages[: lease.cached // size]
            keys = [key for step in self.tree.path(lease.last_node) for key in step.keys]
            assert keys == lease.page_hashes[: len(keys)]
            for step in self.tree.path(lease.last_node):
                locks[id(step)] = locks.get(id(step), 0) + 1
        assert all(node.lock_ref == locks.get(id(node), 0) for node in self.tree.nodes())
        assert set(self.events.published) <= set(owned)
        counted: dict[int, int] = {}
        for block_hash in self.events.published.values():
            counted[block_hash] = counted.get(block_hash, 0) + 1
        assert counted == self.events.copies
        if not self.caching:
            assert not cached
        if self.events.enabled:
            assert set(cached) <= set(self.events.published)
