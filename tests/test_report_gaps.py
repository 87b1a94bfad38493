import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.report.gaps import EXACT_VALUES, GapHistogram, _fold


def histogram(rows):
    made = GapHistogram()
    for gap, weight in rows:
        made.add([gap], [weight])
    return made


def contents(gaps):
    return dict(zip(*(column.tolist() for column in gaps.items()), strict=True))


def counted(rows):
    wanted = {}
    for gap, weight in rows:
        if weight:
            wanted[gap] = wanted.get(gap, 0) + weight
    return wanted


ROWS = st.lists(st.tuples(st.integers(0, 40) | st.integers(0, 2**62), st.integers(0, 9)), max_size=60)


def test_holds_nothing_at_first():
    gaps = GapHistogram()
    assert gaps.count == 0
    assert gaps.exact
    assert contents(gaps) == {}


def test_counts_equal_gaps_together_and_sorts_them():
    gaps = GapHistogram()
    gaps.add([30, 10, 30], [1, 2, 3])
    gaps.add(20)
    assert contents(gaps) == {10: 2, 20: 1, 30: 4}
    assert gaps.items()[0].tolist() == [10, 20, 30]
    assert gaps.count == 7


def test_keeps_zero_gaps_and_drops_zero_weights():
    gaps = GapHistogram()
    gaps.add([0, 5], [4, 0])
    assert contents(gaps) == {0: 4}


@given(ROWS, ROWS)
def test_holds_the_multiset_that_was_added_however_it_was_split(first, second):
    whole, left, right = histogram(first + second), histogram(first), histogram(second)
    left.merge(right)
    assert contents(whole) == contents(left) == counted(first + second)
    assert contents(right) == counted(second)
    assert left == whole


def test_copy_is_independent():
    gaps = histogram([(7, 1)])
    twin = gaps.copy()
    twin.add(7)
    gaps.add(9)
    assert contents(gaps) == {7: 1, 9: 1}
    assert contents(twin) == {7: 2}


def test_items_are_read_only_and_stay_when_more_is_added():
    gaps = histogram([(7, 1)])
    gap_ns, weight = gaps.items()
    gaps.add(7)
    assert (gap_ns.tolist(), weight.tolist()) == ([7], [1])
    with pytest.raises(ValueError, match="read-only"):
        weight[0] = 3


@pytest.mark.parametrize(
    ("gap", "weight", "error", "text"),
    [
        ([-1], [1], ValueError, "gap_ns: must be >= 0, got -1"),
        ([1], [-2], ValueError, "weight: must be >= 0, got -2"),
        ([1.5], [1], TypeError, "gap_ns: expected whole numbers, got float64"),
        ([1], [1.0], TypeError, "weight: expected whole numbers"),
    ],
)
def test_refuses_what_is_no_gap_and_stays_unchanged(gap, weight, error, text):
    gaps = histogram([(7, 1)])
    with pytest.raises(error, match=text):
        gaps.add(gap, weight)
    assert contents(gaps) == {7: 1}


def test_merges_a_buffer_that_fills_up():
    gaps = GapHistogram()
    block = np.arange(1000)
    for _ in range(200):
        gaps.add(block, np.ones(1000, np.int64))
    assert gaps.count == 200_000
    assert contents(gaps) == dict.fromkeys(range(1000), 200)


def test_is_exact_up_to_the_limit_and_folds_beyond():
    values = np.arange(EXACT_VALUES, dtype=np.int64) * 1009 + 10**7
    gaps = GapHistogram()
    gaps.add(values, 1)
    assert gaps.exact
    assert np.array_equal(gaps.items()[0], values)
    gaps.add(5)
    assert not gaps.exact
    assert gaps.count == EXACT_VALUES + 1
    assert gaps.items()[0].shape[0] < EXACT_VALUES
    assert gaps.items()[0][0] == 5


def test_folded_result_does_not_depend_on_order():
    values = np.random.default_rng(3).integers(0, 10**9, 2 * EXACT_VALUES)
    forward, backward, parts = GapHistogram(), GapHistogram(), GapHistogram()
    forward.add(values, 1)
    for chunk in np.array_split(values[::-1], 37):
        backward.add(chunk, 1)
    for chunk in np.array_split(values, 3):
        part = GapHistogram()
        part.add(chunk, 1)
        parts.merge(part)
    assert not forward.exact
    assert forward == backward == parts


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=50))
def test_folding_moves_a_gap_by_less_than_the_bound_and_only_once(values):
    gaps = np.array(values, np.int64)
    folded = _fold(gaps)
    for gap, moved in zip(gaps.tolist(), folded.tolist(), strict=True):
        assert abs(gap - moved) <= 4e-6 * gap
        assert moved == gap or gap >= 2**18
    assert np.array_equal(_fold(folded), folded)


@pytest.mark.parametrize("power", range(17, 63))
def test_bins_at_powers_of_two_are_no_wider_than_promised(power):
    edges = np.array([2**power - 1, 2**power, 2**power + 1], np.int64)
    folded = _fold(edges)
    assert np.all(np.abs(folded - edges) <= 4e-6 * edges)
    assert folded[0] < folded[1]
