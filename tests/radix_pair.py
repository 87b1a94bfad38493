"""The tree of a rank and the twin tree driven as one; every operation compares what both answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsim.config import EngineConfig
from kvsim.contract import RankIdentity
from kvsim.integrity import check_rank
from kvsim.layout import RUN
from kvsim.rank import SchedulerRank
from model.radix import Node, RadixTree

#: (key, pages): equal pages in a row.
Runs = Sequence[tuple[int, int]]


def run_rows(runs: Runs) -> Any:
    rows = np.zeros(len(runs), RUN)
    rows["key"] = [key for key, _ in runs]
    rows["pages"] = [pages for _, pages in runs]
    return rows


def spelled(runs: Runs) -> list[int]:
    """One key per page."""
    return [key for key, pages in runs for _ in range(pages)]


def random_runs(rng: random.Random, longest: int) -> list[tuple[int, int]]:
    """Few keys, so that paths meet; the same key may follow itself, as pages of separate parts do."""
    return [(rng.choice((11, 22, 33)), rng.choice((1, 1, 2, longest))) for _ in range(rng.randint(1, 6))]


def kernel_nodes(state: Any) -> list[tuple[Any, ...]]:
    """Every node below the root: ordinal, ordinal of its parent, pages, locks, access time; by ordinal."""
    nodes, runs = state.view("nodes"), state.view("runs")
    found = []
    for row in nodes[nodes["live"] != 0]:
        if row["parent"] < 0:
            continue
        edge = runs[int(row["keys"]) : int(row["keys"]) + int(row["num_runs"])]
        keys = np.repeat(edge["key"], edge["pages"]).tolist()
        parent = int(nodes[row["parent"]]["ordinal"])
        found.append((int(row["ordinal"]), parent, keys, int(row["lock_refs"]), int(row["last_access"])))
    return sorted(found)


def twin_nodes(tree: RadixTree) -> list[tuple[Any, ...]]:
    return sorted(
        (node.ordinal, node.parent.ordinal if node.parent else -1, node.keys, node.lock_ref, node.last_access)
        for node in tree.nodes()
    )


class TreePair:
    """Both trees over one pool of `pages` pages of `page_size` tokens."""

    def __init__(self, pages: int, page_size: int) -> None:
        config = EngineConfig(backend="sglang", num_gpu_blocks=pages, block_size=page_size)
        self.state = SchedulerRank(RankIdentity(), config)._state
        self.tree = RadixTree(page_size)
        self.pages = pages
        self.page_size = page_size
        self.next_page = 0
        #: (kernel node, twin node) once per lock
        self.locks: list[tuple[int, Node]] = []

    @property
    def radix(self) -> Any:
        return self.state.view("radix")[0]

    @property
    def available(self) -> int:
        """Tokens that nobody owns."""
        return int(self.radix["available"]) * self.page_size

    @property
    def evictable(self) -> int:
        return int(self.radix["evictable"]) * self.page_size

    @property
    def protected(self) -> int:
        return int(self.radix["protected"]) * self.page_size

    @property
    def num_nodes(self) -> int:
        """The root included."""
        return int(self.radix["live_nodes"])

    def match(self, runs: Runs, limit: int | None = None, *, lock: bool = False) -> tuple[int, tuple[int, Node]]:
        keys = spelled(runs)
        limit = len(keys) if limit is None else limit
        matched, node = self.state.tree_match(run_rows(runs), limit, lock)
        expected, twin = self.tree.match(keys[:limit])
        assert matched == expected
        if lock:
            self.tree.lock(twin)
            self.locks.append((node, twin))
        self.compare_sums()
        return matched, (node, twin)

    def match_length(self, runs: Runs, limit: int | None = None) -> int:
        keys = spelled(runs)
        limit = len(keys) if limit is None else limit
        matched: int = self.state.tree_match_length(run_rows(runs), limit)
        assert matched == self.tree.match_len(keys[:limit])
        return matched

    def insert(
        self, runs: Runs, limit: int | None = None, *, below: tuple[int, Node] | None = None
    ) -> tuple[int, Node]:
        keys = spelled(runs)
        limit = len(keys) if limit is None else limit
        start, twin_start = below or (0, self.tree.root)
        before = sum(len(node.keys) for node in self.tree.nodes())
        found, node = self.state.tree_insert(start, run_rows(runs), limit)
        pages = list(range(self.next_page, self.next_page + limit))
        self.next_page += limit
        twin = self.tree.insert(twin_start, keys[:limit], pages)
        assert found == limit - (sum(len(node.keys) for node in self.tree.nodes()) - before)
        self.compare_sums()
        return node, twin

    def lock(self, place: tuple[int, Node]) -> None:
        self.state.tree_lock(place[0])
        self.tree.lock(place[1])
        self.locks.append(place)
        self.compare_sums()

    def unlock(self, place: tuple[int, Node]) -> None:
        self.locks.remove(place)
        self.state.tree_unlock(place[0])
        self.tree.unlock(place[1])
        self.compare_sums()

    def evict(self, pages: int) -> int:
        freed: int = self.state.tree_evict(pages)
        assert freed == len(self.tree.evict(pages * self.page_size))
        self.compare_sums()
        return freed

    def compare_sums(self) -> None:
        radix = self.radix
        sums, count = [0, 0], 1
        for node in self.tree.nodes():
            sums[node.lock_ref > 0] += len(node.keys)
            count += 1
        assert [radix["evictable"], radix["protected"]] == sums
        assert radix["available"] == self.pages - sum(sums)
        assert radix["live_nodes"] == count

    def compare(self) -> None:
        """The whole structure, node by node, and who is evicted when."""
        assert kernel_nodes(self.state) == twin_nodes(self.tree)
        nodes, heap = self.state.view("nodes"), self.state.view("evict_heap")
        order = sorted((int(nodes[node]["last_access"]), int(nodes[node]["ordinal"])) for node in heap)
        assert order == [(node.last_access, node.ordinal) for node in self.tree.eviction_order()]

    def check(self) -> None:
        check_rank(self.state, [node for node, _ in self.locks])

    def random_operation(self, rng: random.Random, longest: int) -> None:
        """One operation, with room made for it when the pool is short."""
        action = rng.choices(
            ("insert", "extend", "match", "lock", "match_length", "unlock", "evict"), (4, 2, 2, 2, 1, 3, 1)
        )[0]
        runs = random_runs(rng, longest)
        limit = rng.randint(1, len(spelled(runs)))
        if action in ("insert", "extend"):
            if limit > self.radix["available"]:
                self.evict(limit - int(self.radix["available"]))
            limit = min(limit, int(self.radix["available"]))
            below = rng.choice(self.locks) if action == "extend" and self.locks else None
            place = self.insert(runs, limit, below=below)
            if below is not None and rng.random() < 0.5:
                # What a commit of a longer prefix does: the new end is locked before the old one is let go.
                self.lock(place)
                self.unlock(below)
        elif action == "match":
            self.match(runs, limit)
        elif action == "lock":
            self.match(runs, limit, lock=True)
        elif action == "match_length":
            self.match_length(runs, limit)
        elif action == "unlock" and self.locks:
            self.unlock(rng.choice(self.locks))
        elif action == "evict":
            self.evict(rng.choice((1, 2, 5, 50)))
