"""The radix tree against its twin, against known scenarios, and under the integrity checker.

Names carry the number of a scenario of the acceptance list where there is one. Page ids are not modelled:
nothing a user can see depends on them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsim.errors import CommandError, IntegrityError
from kvsim.integrity import check_rank
from radix_pair import TreePair, kernel_nodes, random_runs, run_rows

#: Operations between two runs of the integrity checker, and between two comparisons of the whole structure.
CHECK_EVERY, COMPARE_EVERY = 10, 50


@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_random_operations_keep_every_invariant(seed: int) -> None:
    """Answers and sums are compared at every operation, all invariants are checked at every tenth."""
    rng = random.Random(seed)
    pages, page_size = ((24, 1), (60, 4), (40, 16), (200, 1))[seed % 4]
    longest = (4, 9, 3, 40)[seed % 4]
    pair = TreePair(pages, page_size)
    for step in range(1, 10_001):
        pair.random_operation(rng, longest)
        if step % CHECK_EVERY == 0:
            pair.check()
        if step % COMPARE_EVERY == 0:
            pair.compare()
    assert pair.radix["clock"] > 5_000
    assert pair.radix["next_ordinal"] > 1_000


RUNS = st.lists(st.tuples(st.sampled_from([11, 22, 33]), st.sampled_from([1, 1, 2, 3, 20])), min_size=1, max_size=5)


class TreeMachine(RuleBasedStateMachine):
    """Any order of operations; everything is compared and checked after each."""

    @initialize(pages=st.sampled_from([8, 30, 100]), page_size=st.sampled_from([1, 2, 16]))
    def build(self, pages: int, page_size: int) -> None:
        self.pair = TreePair(pages, page_size)

    def limit(self, runs: list[tuple[int, int]], share: float) -> int:
        return max(1, round(share * sum(pages for _, pages in runs)))

    @rule(runs=RUNS, share=st.floats(0, 1))
    def match(self, runs: list[tuple[int, int]], share: float) -> None:
        length = self.pair.match_length(runs, self.limit(runs, share))
        assert self.pair.match(runs, self.limit(runs, share))[0] == length

    @rule(runs=RUNS, share=st.floats(0, 1))
    def match_and_lock(self, runs: list[tuple[int, int]], share: float) -> None:
        self.pair.match(runs, self.limit(runs, share), lock=True)

    @rule(runs=RUNS, share=st.floats(0, 1))
    def match_length_changes_nothing(self, runs: list[tuple[int, int]], share: float) -> None:
        before = self.pair.state.digest()
        self.pair.match_length(runs, self.limit(runs, share))
        assert self.pair.state.digest() == before

    @rule(runs=RUNS, share=st.floats(0, 1))
    def insert_at_the_root(self, runs: list[tuple[int, int]], share: float) -> None:
        limit = self.limit(runs, share)
        if limit > self.pair.radix["available"]:
            before = self.pair.state.digest()
            with pytest.raises(CommandError, match="pages: the pool has"):
                self.pair.state.tree_insert(0, run_rows(runs), limit)
            assert self.pair.state.digest() == before
            return
        self.pair.insert(runs, limit)
        assert self.pair.match_length(runs, limit) == limit

    @precondition(lambda self: self.pair.locks)
    @rule(data=st.data(), runs=RUNS, share=st.floats(0, 1), move=st.booleans())
    def insert_below_a_locked_node(
        self, data: st.DataObject, runs: list[tuple[int, int]], share: float, move: bool
    ) -> None:
        below = data.draw(st.sampled_from(range(len(self.pair.locks))))
        limit = min(self.limit(runs, share), int(self.pair.radix["available"]))
        place = self.pair.insert(runs, limit, below=self.pair.locks[below])
        if move:
            old = self.pair.locks[below]
            self.pair.lock(place)
            self.pair.unlock(old)

    @precondition(lambda self: self.pair.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        self.pair.unlock(self.pair.locks[data.draw(st.sampled_from(range(len(self.pair.locks))))])

    @rule(pages=st.sampled_from([0, 1, 2, 7, 1000]))
    def evict(self, pages: int) -> None:
        possible = int(self.pair.radix["evictable"])
        assert self.pair.evict(pages) == min(pages, possible)

    @invariant()
    def both_agree_and_every_invariant_holds(self) -> None:
        if hasattr(self, "pair"):
            self.pair.compare()
            self.pair.check()

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        while self.pair.locks:
            self.pair.unlock(self.pair.locks[-1])
        self.pair.evict(self.pair.pages)
        assert self.pair.available == self.pair.pages * self.pair.page_size
        assert self.pair.num_nodes == 1
        self.pair.check()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# ---------------------------------------------------------------- scenarios


class Scenario(TreePair):
    """Contents are written as page keys, one per page; page 4 scenarios count tokens."""

    def cache(self, *keys: int, below: tuple[int, Any] | None = None) -> tuple[int, Any]:
        place = self.insert([(key, 1) for key in keys], below=below)
        self.compare()
        self.check()
        return place

    def found(self, *keys: int) -> int:
        """Pages matched, splitting and touching."""
        matched = self.match([(key, 1) for key in keys])[0]
        self.compare()
        self.check()
        return matched

    def find(self, *keys: int) -> tuple[int, Any]:
        place = self.match([(key, 1) for key in keys])[1]
        self.check()
        return place

    def edge(self, place: tuple[int, Any]) -> list[int]:
        keys: list[int] = place[1].keys
        return keys


def test_j25_a_match_ends_at_the_node_of_what_is_common() -> None:
    tree = Scenario(100, 1)
    tree.cache(1, 2, 3, 4, 5)
    tree.cache(1, 2, 3, 4, 5, 6, 7)
    # The seven pages are one edge: the leaf was extended in place. The match cuts it behind the fifth.
    assert tree.num_nodes == 2
    matched, place = tree.match([(key, 1) for key in (1, 2, 3, 4, 5, 9, 9)])
    assert matched == 5
    assert tree.edge(place) == [1, 2, 3, 4, 5]
    assert [child.keys for child in place[1].children.values()] == [[6, 7]]
    tree.compare()


def test_j26_branches_share_their_beginning_and_inserting_again_changes_nothing() -> None:
    tree = Scenario(100, 1)
    for _ in range(2):
        tree.cache(1, 2, 3, 4, 5)
        tree.cache(1, 2, 3, 6, 7)
        assert tree.found(1, 2, 3, 4, 5) == 5
        assert tree.found(1, 2, 3, 6, 7) == 5
        assert tree.found(1, 2, 3, 9) == 3
        assert tree.num_nodes == 4
        assert tree.available == 100 - 7


def test_j27_a_leaf_that_only_its_lease_locks_is_extended_in_place() -> None:
    tree = Scenario(100, 4)
    tree.cache(1)
    place = tree.find(1)
    tree.lock(place)
    nodes = tree.num_nodes
    end = tree.cache(2, below=place)
    assert end == place
    assert tree.num_nodes == nodes
    assert tree.protected == 8


def test_j28_a_leaf_that_others_lock_too_gets_a_child() -> None:
    tree = Scenario(100, 4)
    tree.cache(1)
    place = tree.find(1)
    tree.lock(place)
    tree.lock(place)
    nodes = tree.num_nodes
    end = tree.cache(2, below=place)
    assert end != place
    assert tree.num_nodes == nodes + 1
    assert tree.edge(place) == [1]
    assert (tree.protected, tree.evictable) == (4, 4)


def test_j29_pages_that_differ_in_one_token_are_strangers() -> None:
    # Page 4: [1,2,3,4] and [1,2,3,5] are two keys.
    tree = Scenario(100, 4)
    tree.cache(1234)
    tree.cache(1235)
    assert tree.num_nodes == 3
    assert tree.found(1236) == 0


def test_j30_what_two_locks_share_is_protected_until_both_are_gone() -> None:
    tree = Scenario(100, 1)
    tree.cache(1, 2, 3, 4, 5)
    tree.cache(1, 2, 3, 6, 7)
    first, second = tree.find(1, 2, 3, 4, 5), tree.find(1, 2, 3, 6, 7)
    tree.lock(first)
    tree.lock(second)
    assert (tree.protected, tree.evictable) == (7, 0)
    assert tree.evict(7) == 0
    tree.unlock(first)
    assert tree.protected == 5
    assert tree.evict(7) == 2
    tree.unlock(second)
    assert (tree.protected, tree.evictable) == (0, 5)
    tree.check()


def test_j31_the_older_branch_is_evicted_unless_it_is_locked() -> None:
    tree = Scenario(100, 1)
    tree.cache(1, 2, 3)
    tree.cache(4, 5, 6)
    fork = tree.state.fork()
    assert tree.evict(3) == 3
    assert tree.found(1, 2, 3) == 0
    assert tree.found(4, 5, 6) == 3
    older = fork.tree_match(run_rows([(1, 1), (2, 1), (3, 1)]), 3, True)
    assert older[0] == 3
    assert fork.tree_evict(6) == 3
    check_rank(fork, [older[1]])
    assert fork.tree_match_length(run_rows([(1, 1), (2, 1), (3, 1)]), 3) == 3


def test_j32_extending_a_leaf_makes_it_recent() -> None:
    tree = Scenario(100, 1)
    place = tree.cache(1, 2, 3)
    tree.cache(4, 5, 6)
    tree.cache(7, below=place)
    assert tree.evict(3) == 3
    assert tree.found(4, 5, 6) == 0
    assert tree.found(1, 2, 3, 7) == 4


def test_j33_unlocking_keeps_the_time_of_access() -> None:
    tree = Scenario(100, 1)
    tree.cache(1, 2, 3)
    tree.cache(4, 5, 6)
    older, newer = tree.find(1, 2, 3), tree.find(4, 5, 6)
    tree.lock(older)
    tree.lock(newer)
    tree.unlock(newer)
    tree.unlock(older)
    assert tree.evict(3) == 3
    assert tree.found(1, 2, 3) == 0
    assert tree.found(4, 5, 6) == 3


def test_j34_tails_go_first_and_a_parent_without_children_is_next() -> None:
    tree = Scenario(100, 1)
    tree.cache(1, 2, 3, 4)
    tree.cache(5, 6, 7)
    assert tree.evict(2) == 2
    tree.compare()
    tree.check()
    assert tree.match_length([(key, 1) for key in (1, 2, 3, 4)]) == 2
    assert tree.evict(2) == 2
    assert tree.match_length([(key, 1) for key in (1, 2, 3, 4)]) == 0
    assert tree.match_length([(key, 1) for key in (5, 6, 7)]) == 3
    tree = Scenario(100, 1)
    tree.cache(10, 11, 12)
    tree.cache(10, 11, 13)
    tree.cache(20, 21)
    assert tree.num_nodes == 5
    assert tree.evict(2) == 2
    assert tree.num_nodes == 3
    assert tree.match_length([(10, 1), (11, 1)]) == 2
    assert tree.evict(2) == 2
    assert tree.match_length([(10, 1), (11, 1)]) == 0
    assert tree.match_length([(20, 1), (21, 1)]) == 2
    tree.check()


def test_j35_an_inner_prefix_counts_as_evictable() -> None:
    tree = Scenario(4, 4)
    tree.cache(1, 2)
    tree.cache(1, 3)
    assert tree.evictable == 12
    assert tree.evict(3) == 3
    assert tree.available == 16
    assert tree.num_nodes == 1
    tree.check()


# ---------------------------------------------------------------- runs


def test_a_run_longer_than_a_page_is_cut_where_the_match_ends() -> None:
    tree = Scenario(1000, 1)
    tree.insert([(7, 500), (8, 100)])
    assert tree.state.view("runs")["pages"].tolist()[:2] == [500, 100]
    matched, place = tree.match([(7, 300), (9, 1)])
    assert matched == 300
    assert place[1].keys == [7] * 300
    tree.compare()
    tree.check()
    # The same content, cut at other places, is found all the same.
    assert tree.match_length([(7, 299), (7, 201), (8, 50), (8, 50)]) == 600
    assert tree.evict(150) == 150
    assert tree.match_length([(7, 500), (8, 100)]) == 450
    tree.compare()
    tree.check()


def test_equal_runs_that_meet_become_one() -> None:
    tree = Scenario(1000, 1)
    place = tree.insert([(7, 10)])
    tree.insert([(7, 10), (8, 1)], below=place)
    [(_, _, keys, _, _)] = kernel_nodes(tree.state)
    assert keys == [7] * 20 + [8]
    assert tree.state.view("nodes")[place[0]]["num_runs"] == 2
    tree.check()


def test_tables_grow_with_the_tree_and_nothing_is_lost() -> None:
    tree = Scenario(5000, 1)
    contents = [[(1, 1), (2 + i % 3, 2), (100 + i, 1), (7, 1 + i % 5)] for i in range(600)]
    for runs in contents:
        tree.insert(runs)
    assert tree.num_nodes > 600
    tree.compare()
    tree.check()
    for runs in contents:
        assert tree.match_length(runs) == sum(pages for _, pages in runs)
    cached = 5000 - tree.available
    assert tree.evict(5000) == cached
    assert tree.num_nodes == 1
    tree.check()


def test_a_fork_of_the_tree_goes_its_own_way() -> None:
    rng = random.Random(5)
    pair = TreePair(80, 4)
    for _ in range(300):
        pair.random_operation(rng, 6)
    before = pair.state.digest()
    fork = pair.state.fork()
    for _ in range(50):
        runs = random_runs(rng, 6)
        fork.tree_match(run_rows(runs), 1)
        fork.tree_evict(1)
    assert pair.state.digest() == before
    pair.check()
    pair.compare()


# ---------------------------------------------------------------- the checker itself


def damaged() -> TreePair:
    """A tree with branches, a lock, unlocked leaves and a hole in its table of nodes."""
    pair = TreePair(100, 4)
    for runs in ([(1, 3), (2, 2)], [(1, 3), (3, 2)], [(4, 5)], [(5, 1), (6, 1)], [(9, 1)]):
        pair.insert(runs)
    pair.match([(1, 3), (2, 2)], lock=True)
    pair.match([(4, 5)], 2)
    pair.match([(9, 1)], lock=True)
    pair.evict(2)
    pair.check()
    return pair


@pytest.mark.parametrize(
    ("section", "field", "row"),
    [
        # A row of None is the first one that is in use.
        ("radix", "available", 0),
        ("radix", "evictable", 0),
        ("radix", "protected", 0),
        ("radix", "live_nodes", 0),
        ("radix", "runs_used", 0),
        ("radix", "new_token_ratio", 0),
        ("radix", "countdown", 0),
        ("radix", "flushed", 0),
        ("radix", "late_requests", 0),
        ("nodes", "pages", 1),
        ("nodes", "parent", 1),
        ("nodes", "children", 0),
        ("nodes", "lock_refs", 1),
        ("nodes", "keys", 1),
        ("nodes", "num_runs", 1),
        ("nodes", "span", 1),
        ("nodes", "span_class", 1),
        ("nodes", "heap_at", 3),
        ("nodes", "ordinal", 1),
        ("nodes", "live", 1),
        ("nodes", "last_access", 1),
        ("runs", "key", None),
        ("runs", "pages", None),
        ("evict_heap", None, 0),
        ("node_index", None, None),
    ],
)
def test_the_checker_sees_every_damaged_field(section: str, field: str | None, row: int | None) -> None:
    pair = damaged()
    table = pair.state.view(section, writable=True)
    if row is None:
        row = int(pair.state.view("nodes")[1]["keys"] if section == "runs" else (table >= 0).argmax())
    if field is None:
        table[row] = 2 if table[row] != 2 else 1
    elif field == "live":
        table[row][field] = 0
    elif field == "last_access":
        table[row][field] += 1000
    else:
        table[row][field] += 1 if field != "heap_at" else 5
    with pytest.raises(IntegrityError):
        pair.check()


def test_the_checker_sees_a_lock_that_nobody_holds() -> None:
    pair = damaged()
    with pytest.raises(IntegrityError, match="lock_refs"):
        check_rank(pair.state)


def test_the_checker_sees_leaves_out_of_order() -> None:
    pair = damaged()
    nodes, heap = pair.state.view("nodes", writable=True), pair.state.view("evict_heap")
    assert len(heap) > 1
    nodes[heap[0]]["last_access"] = pair.radix["clock"]
    with pytest.raises(IntegrityError, match="out of order"):
        pair.check()
