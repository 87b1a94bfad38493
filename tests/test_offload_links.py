"""The two kinds of links between KV tiers, with the numbers of the specification."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from kvsim.errors import ConfigError
from kvsim.offload.links import FifoLink, SharedLink

MB = 1_000_000


def test_a_fifo_link_carries_one_after_the_other() -> None:
    stores, loads = FifoLink(1.0), FifoLink(1.0)
    assert [stores.submit(0.0, MB) for _ in range(2)] == [1.0, 2.0]
    assert [loads.submit(2.0, MB) for _ in range(2)] == [3.0, 4.0]
    # A gap is not made up for.
    assert stores.submit(10.0, 2 * MB) == 12.0
    assert stores.tail_ms == 12.0


def test_recorded_completions_of_a_fifo_link() -> None:
    link = FifoLink(16.0)
    block = 16 * 131072
    assert link.submit(12.5, 10 * block) == 13.81072
    assert link.submit(37.75, 12 * block) == 39.322864
    assert link.submit(37.75, 7 * block) == 40.240368000000004


@pytest.mark.parametrize("bandwidth", [0.0, -1.0])
def test_no_bandwidth_is_no_time(bandwidth: float) -> None:
    assert FifoLink(bandwidth).submit(3.0, MB) == 3.0
    shared = SharedLink(bandwidth)
    first, second = shared.start(3.0, MB), shared.start(3.0, 5 * MB)
    assert shared.next_deadline_ms() == 3.0
    assert shared.advance(2.0) == []
    assert shared.advance(3.0) == [(first, 3.0), (second, 3.0)]
    assert shared.next_deadline_ms() is None


def test_an_instantaneous_transfer_still_waits_for_its_place() -> None:
    link = FifoLink(0.0)
    assert link.submit(5.0, MB) == 5.0
    assert link.submit(4.0, MB) == 5.0


def completions(link: SharedLink, starts: list[tuple[float, float]], until: float) -> dict[int, float]:
    found: dict[int, float] = {}
    for when, size in starts:
        found.update(link.advance(when))
        link.start(when, size)
    found.update(link.advance(until))
    return found


@pytest.mark.parametrize(
    ("starts", "want"),
    [
        ([(0.0, MB)], [1.0]),
        ([(0.0, MB)] * 2, [2.0, 2.0]),
        ([(0.0, MB), (0.5, MB)], [1.5, 2.0]),
        ([(0.0, MB)] * 10, [10.0] * 10),
        ([(0.0, MB), (0.0, 3 * MB)], [2.0, 4.0]),
    ],
)
def test_a_shared_link_splits_its_bandwidth(starts: list[tuple[float, float]], want: list[float]) -> None:
    found = completions(SharedLink(1.0), starts, 100.0)
    assert [found[number] for number in sorted(found)] == pytest.approx(want, abs=1e-9)


def test_deadlines_are_those_if_nothing_else_starts() -> None:
    link = SharedLink(1.0)
    short, long = link.start(0.0, MB), link.start(0.0, 3 * MB)
    assert link.deadline_ms(short) == pytest.approx(2.0)
    assert link.deadline_ms(long) == pytest.approx(4.0)
    assert link.next_deadline_ms() == pytest.approx(2.0)
    assert link.advance(1.0) == []
    third = link.start(1.0, MB)
    assert link.deadline_ms(short) == pytest.approx(1.0 + 1.5)
    assert link.deadline_ms(third) == pytest.approx(1.0 + 2.5)
    assert link.advance(2.5) == [(short, pytest.approx(2.5))]
    with pytest.raises(KeyError):
        link.deadline_ms(short)


def test_the_past_changes_nothing() -> None:
    link = SharedLink(1.0)
    number = link.start(5.0, MB)
    assert link.advance(4.0) == []
    assert link.now_ms == 5.0
    # A start in the past counts from the last time the link has seen.
    other = link.start(1.0, MB)
    assert link.advance(7.0) == [(number, 7.0), (other, 7.0)]


def test_a_start_does_not_swallow_a_completion() -> None:
    link = SharedLink(1.0)
    link.start(0.0, MB)
    with pytest.raises(ValueError, match="advance first"):
        link.start(3.0, MB)


def test_ids_may_be_shared_by_links() -> None:
    ids = itertools.count(7)
    one, other = SharedLink(1.0, ids), SharedLink(2.0, ids)
    assert [one.start(0.0, 1), other.start(0.0, 1), one.start(0.0, 1)] == [7, 8, 9]


@pytest.mark.parametrize("link", [FifoLink, SharedLink])
def test_what_a_link_refuses(link: type[FifoLink] | type[SharedLink]) -> None:
    for bandwidth in (math.inf, math.nan):
        with pytest.raises(ConfigError, match="bandwidth_gbps"):
            link(bandwidth)
    made = link(1.0)
    for size in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="num_bytes"):
            made.submit(0.0, size) if isinstance(made, FifoLink) else made.start(0.0, size)


@pytest.mark.parametrize("seed", range(20))
def test_both_links_carry_the_same_work_in_the_same_time(seed: int) -> None:
    """Neither rests while there is something to carry: both are done with everything at the same time."""
    rng = random.Random(seed)
    when, starts = 0.0, []
    for _ in range(rng.randint(1, 30)):
        when += rng.choice([0.0, rng.random() * 3])
        starts.append((when, float(rng.randint(1, 3 * MB))))
    fifo = FifoLink(1.0)
    last = max(fifo.submit(*one) for one in starts)
    # However often it is looked at in between.
    for step in (1000.0, 0.37):
        link, found, now = SharedLink(1.0), {}, 0.0
        for start, size in starts:
            while now + step < start:
                now += step
                found.update(link.advance(now))
            now = start
            found.update(link.advance(start))
            link.start(start, size)
        while link.active:
            deadline = link.next_deadline_ms()
            assert deadline is not None
            found.update(link.advance(deadline))
        assert sorted(found) == list(range(len(starts)))
        assert max(found.values()) == pytest.approx(last, rel=1e-9)
