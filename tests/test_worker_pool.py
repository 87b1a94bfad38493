"""Worker ids and states: the scaling scenarios of the contract, and every recorded change of a pool."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dynamo_cases as cases
from kvsim.config import EngineConfig
from kvsim.errors import ConfigError
from kvsim.layout import Pool
from kvsim.replay.pool import LifecycleLog, PoolSpec, WorkerPool, WorkerState, startup_delay_ms


def busy(worker: int) -> bool:
    return False


def idle(worker: int) -> bool:
    return True


def pool(workers: int, startup_s: float | None = None) -> WorkerPool:
    return WorkerPool(Pool.AGGREGATED, workers, startup_ms=startup_delay_ms(startup_s))


def test_b6_scaling_up_with_a_startup_delay():
    workers = pool(2, 5.0)
    change = workers.apply_target_count(4, 100.0, drained=idle)
    assert (len(change.added), change.newly_marked) == (2, ())
    assert (workers.active_ids, workers.worker_count) == ([0, 1], 4)
    assert workers.next_ready_ms == 5100.0
    assert workers.due(5099.0) == []
    assert workers.due(5100.0) == [2, 3]


def test_b7_scaling_up_without_one():
    workers = pool(2)
    change = workers.apply_target_count(4, 100.0, drained=idle)
    assert (len(change.added), change.newly_marked) == (2, ())
    assert (workers.active_ids, workers.worker_count) == ([0, 1, 2, 3], 4)
    assert (workers.active_since_ms(1), workers.active_since_ms(2)) == (0.0, 100.0)
    assert workers.next_ready_ms == math.inf


def test_b8_starting_workers_are_cancelled_first_and_ids_are_never_used_again():
    workers = pool(2, 5.0)
    workers.apply_target_count(4, 0.0, drained=idle)
    change = workers.apply_target_count(3, 1.0, drained=idle)
    assert (change.newly_marked, change.removed, change.cancelled) == ((), (), (3,))
    assert (len(workers.active_ids), workers.worker_count) == (2, 3)
    assert workers.state(3) is WorkerState.REMOVED
    change = workers.apply_target_count(2, 2.0, drained=idle)
    assert (change.newly_marked, change.cancelled) == ((), (2,))
    assert (len(workers.active_ids), workers.worker_count) == (2, 2)
    change = workers.apply_target_count(3, 3.0, drained=idle)
    assert (change.added, change.newly_marked, change.removed) == ((4,), (), ())
    assert workers.capacity == 5


def test_b9_then_active_ones_are_marked_the_highest_id_first():
    workers = pool(3, 5.0)
    workers.apply_target_count(5, 0.0, drained=busy)
    change = workers.apply_target_count(1, 0.0, drained=busy)
    assert (change.cancelled, change.newly_marked) == ((4, 3), (2, 1))
    assert workers.active_ids == [0]


def test_b10_a_draining_worker_never_comes_back():
    workers = pool(2)
    change = workers.apply_target_count(1, 0.0, drained=busy)
    assert change.newly_marked == (1,)
    assert (workers.active_ids, workers.draining_ids) == ([0], [1])
    change = workers.apply_target_count(2, 1.0, drained=busy)
    assert change.added == (2,)
    assert (workers.active_ids, workers.draining_ids) == ([0, 2], [1])
    assert (workers.non_draining_count, workers.worker_count) == (2, 3)


def test_b11_ready_makes_a_starting_worker_active():
    workers = pool(1, 5.0)
    workers.apply_target_count(2, 0.0, drained=busy)
    assert workers.active_ids == [0]
    assert workers.mark_worker_ready(1, 5000.0) is not None
    assert workers.active_ids == [0, 1]
    assert workers.active_since_ms(1) == 5000.0
    assert workers.mark_worker_ready(1, 5000.0) is None


def test_b14_a_stale_ready_does_nothing():
    workers = pool(1, 5.0)
    workers.apply_target_count(2, 0.0, drained=busy)
    workers.apply_target_count(1, 0.0, drained=busy)
    written = len(workers.log.operations)
    assert workers.mark_worker_ready(1, 5000.0) is None
    assert workers.mark_worker_ready(9, 5000.0) is None
    assert workers.state(9) is None
    assert len(workers.log.operations) == written


@pytest.mark.parametrize(("seconds", "ms"), [(5.0, 5000.0), (None, None), (0.0, None), (-1.0, None)])
def test_b15_startup_is_given_in_seconds(seconds, ms):
    assert startup_delay_ms(seconds) == ms


def test_b16_a_marked_worker_stays_until_it_has_nothing_left():
    workers = pool(1)
    busy_ids = {0}
    change = workers.apply_target_count(0, 0.0, drained=lambda worker: worker not in busy_ids)
    assert (change.newly_marked, workers.active_ids, workers.worker_count) == ((0,), [], 1)
    assert workers.settle(1.0, drained=lambda worker: worker not in busy_ids) == ((), [])
    busy_ids.clear()
    removed, operations = workers.settle(2.0, drained=lambda worker: worker not in busy_ids)
    assert (removed, len(operations), workers.worker_count) == ((0,), 1, 0)
    assert workers.live_ids == []


def test_an_idle_worker_is_marked_and_removed_in_one_operation():
    workers = pool(2)
    change = workers.apply_target_count(1, 10.0, drained=idle)
    assert (change.newly_marked, change.removed) == ((1,), (1,))
    assert [step["transition"] for step in change.operation["transitions"]] == ["worker_draining", "worker_removed"]


def test_workers_marked_together_leave_together_and_others_in_operations_of_their_own():
    workers = pool(4)
    workers.apply_target_count(2, 0.0, drained=busy)
    workers.apply_target_count(1, 1.0, drained=busy)
    removed, operations = workers.settle(5.0, drained=idle)
    assert removed == (1, 2, 3)
    assert [[step["worker_id"] for step in entry["transitions"]] for entry in operations] == [[2, 3], [1]]
    assert [entry["origin_operation_ordinal"] for entry in operations] == [0, 1]


def test_a_target_that_is_met_writes_nothing():
    workers = pool(2)
    assert workers.apply_target_count(2, 0.0, drained=idle).operation is None
    assert workers.log.operations == []


@pytest.mark.parametrize("target", [-1, 1.0, True, None])
def test_a_target_that_is_no_count_is_refused_and_changes_nothing(target):
    workers = pool(2)
    with pytest.raises(ConfigError, match="target_decode: must be an int >= 0"):
        workers.apply_target_count(target, 0.0, drained=idle)
    assert workers.active_ids == [0, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("workers", 0), ("workers", True), ("dp_size", 1.5), ("startup_ms", math.inf), ("startup_ms", -1), ("config", 3)],
)
def test_a_pool_description_is_checked(field, value):
    fields = {"config": EngineConfig(), field: value}
    with pytest.raises(ConfigError, match=field):
        PoolSpec(**fields)


@pytest.mark.parametrize("name", cases.with_part("lifecycle_operations"))
def test_recorded_changes_of_the_pools(name):
    expected = cases.load(name)["expected"]
    log = LifecycleLog()
    pools = cases.pools(name, log)
    for wanted in expected["lifecycle_operations"]:
        cases.repeat_change(name, pools, wanted)
    assert cases.same(expected["lifecycle_operations"], log.operations) == []
    end_ms = max(row["terminal_time_ms"] for row in expected["per_request"])
    for side, key in (("prefill", "prefill"), ("decode", "decode"), ("agg", "decode")):
        if side in pools:
            seconds = expected["summary"][f"{key}_worker_seconds"]
            assert pools[side].worker_seconds(end_ms) == pytest.approx(seconds, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    workers=st.integers(1, 4),
    startup=st.sampled_from([None, 7.0]),
    steps=st.lists(st.tuples(st.sampled_from("tsr"), st.integers(0, 5), st.integers(0, 15)), max_size=30),
)
def test_no_worker_is_lost_and_none_comes_back(workers, startup, steps):
    made = WorkerPool(Pool.DECODE, workers, startup_ms=startup)
    before = {worker: made.state(worker) for worker in made.live_ids}
    for now, (kind, number, mask) in enumerate(steps, 1):
        drained = lambda worker, mask=mask: bool(mask >> worker % 4 & 1)  # noqa: E731
        if kind == "t":
            made.apply_target_count(number, float(now), drained=drained)
            assert made.non_draining_count == number
        elif kind == "s":
            made.settle(float(now), drained=drained)
        else:
            for worker in made.due(float(now)):
                made.mark_worker_ready(worker, float(now))
        after = {worker: made.state(worker) for worker in range(made.capacity)}
        for worker, state in before.items():
            if state is WorkerState.REMOVED:
                assert after[worker] is WorkerState.REMOVED
            if state is WorkerState.DRAINING:
                assert after[worker] in (WorkerState.DRAINING, WorkerState.REMOVED)
        before = after
        live = [worker for worker, state in after.items() if state is not WorkerState.REMOVED]
        assert made.live_ids == live
        if made.log.operations:
            assert {worker for ids in made.log.operations[-1]["state_after_batch"].values() for worker in ids} == set(
                live
            )
    counts = [workers, *(sum(map(len, entry["state_after_batch"].values())) for entry in made.log.operations)]
    times = [0.0, *(entry["at_ms"] for entry in made.log.operations), len(steps) + 1.0]
    area = sum(count * (end - start) for count, start, end in zip(counts, times, times[1:], strict=False))
    assert made.worker_seconds(len(steps) + 1.0) == pytest.approx(area / 1000.0)
