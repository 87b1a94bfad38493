"""Traffic windows, idle metrics and the ticks of a scaling policy, against what the peer's policies were given."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import dynamo_cases as cases
from kvsim.contract import ForwardPassMetrics
from kvsim.errors import ConfigError, PolicyError
from kvsim.layout import Pool, RequestStatus
from kvsim.replay.pool import WorkerPool
from kvsim.replay.scaling import FpmBuffer, Scaling, ScalingPolicy, Targets, forward_row
from kvsim.replay.traffic import Traffic, TrafficWindow
from report_cases import completed, record, table_of

SCALED = cases.with_part("scaling")


def placements(name: str) -> list[tuple[float, int, int]]:
    """Time, overlap and prompt blocks of each placement by a router that looks at caches."""
    kwargs = cases.load(name)["input"]["kwargs"]
    engine = (kwargs.get("extra_engine_args") or kwargs["prefill_engine_args"])["engine"]
    found = []
    for row in cases.rows(name):
        for route in row["routing_history"]:
            if route["pool"] != "decode" and route["selected_overlap_blocks"] is not None:
                at = row["arrival_time_ms"] if route["released_at_ms"] is None else route["released_at_ms"]
                blocks = math.ceil(row["input_length"] / engine["block_size"])
                found.append((at, route["selected_overlap_blocks"], blocks))
    return found


def feed(window: TrafficWindow, name: str, start: float, end: float) -> None:
    """Everything in (start, end] that the rows tell; the first window includes 0."""

    def inside(at: float) -> bool:
        return start < at <= end or (at == start == 0.0)

    window.arrived(sum(inside(row["arrival_time_ms"]) for row in cases.rows(name)))
    for at, overlap, blocks in placements(name):
        if inside(at):
            window.placed(overlap, blocks)
    table = cases.records(name)
    window.ended(table[[inside(at) for at in table["terminal_ms"].tolist()]])


# ---------------------------------------------------------------- traffic


def is_told_by_rows(name: str) -> bool:
    """Parked requests are placed later than their rows tell."""
    return "zero" not in cases.load(name)["tags"]


@pytest.mark.parametrize("name", [name for name in SCALED if is_told_by_rows(name)])
def test_recorded_traffic_of_ticks(name):
    window, before = TrafficWindow(), 0.0
    for tick in cases.load(name)["expected"]["scaling"]:
        now, wanted = tick["snapshot"]["now_ms"], tick["snapshot"]["traffic"]
        feed(window, name, before, now)
        # Passes are not in the rows; without speculation a decoding request emits one token.
        window.decoded(wanted["accept_length_forward_count"], wanted["accept_length_forward_count"])
        got = window.drain(now).scaling_row()
        assert cases.same(wanted, got) == []
        before = now


def test_an_empty_window_has_no_accept_length_and_zero_means():
    window = TrafficWindow(5.0)
    assert window.is_empty
    traffic = window.drain(25.0)
    assert traffic == Traffic(duration_s=0.02)
    assert traffic.mean_accept_length is None
    assert (window.start_ms, window.drain(25.0).duration_s) == (25.0, 0.0)


def test_only_completed_requests_count():
    window = TrafficWindow()
    window.ended(
        table_of(
            completed(tokens=[10.0, 14.0], input_tokens=8),
            record(status=RequestStatus.REJECTED, terminal_ms=3.0, input_tokens=99),
            record(status=RequestStatus.FAILED, terminal_ms=3.0, input_tokens=99, tokens=[2.0]),
        )
    )
    traffic = window.drain(20.0)
    assert (traffic.completed, traffic.mean_input_tokens, traffic.mean_output_tokens) == (1, 8.0, 2.0)
    assert (traffic.mean_ttft_ms, traffic.mean_gap_ms) == (10.0, 4.0)


def test_one_token_has_no_gap_and_no_token_has_neither():
    window = TrafficWindow()
    window.ended(table_of(completed(tokens=[10.0]), completed(terminal_ms=4.0)))
    traffic = window.drain(20.0)
    assert (traffic.completed, traffic.ttft_count, traffic.gap_count) == (2, 1, 0)
    assert (traffic.mean_ttft_ms, traffic.mean_gap_ms, traffic.mean_output_tokens) == (10.0, 0.0, 0.5)


def test_accept_length_is_tokens_per_decoding_request():
    window = TrafficWindow()
    window.decoded(3, 2)
    window.decoded(4, 2)
    traffic = window.drain(1.0)
    assert (traffic.mean_accept_length, traffic.forward_count) == (1.75, 4)


def test_a_prompt_without_blocks_is_no_placement():
    window = TrafficWindow()
    window.placed(0, 0)
    assert window.is_empty
    window.placed(1, 4)
    window.placed(2, 4)
    assert window.drain(1.0).mean_hit_rate == 0.375


# ---------------------------------------------------------------- metrics of passes


def test_d15_a_rank_is_idle_after_a_full_second():
    buffer = FpmBuffer()
    buffer.activate(4, 2, 100.0)
    assert buffer.drain(1099.0, [4]) == []
    rows = buffer.drain(1100.0, [4])
    assert [(row["worker_id"], row["dp_rank"]) for row in rows] == [(4, 0), (4, 1)]
    assert {value for row in rows for key, value in row.items() if key not in ("worker_id", "dp_rank")} == {0}


def test_the_phase_of_idle_seconds_is_kept():
    buffer = FpmBuffer()
    buffer.activate(0, 1, 0.0)
    found = [bool(buffer.drain(float(now), [0])) for now in range(700, 5600, 700)]
    #        700    1400  2100  2800   3500  4200  4900   5600 is not asked
    assert found == [False, True, True, False, True, True, False]


def test_the_newest_pass_wins_and_other_workers_are_dropped():
    buffer = FpmBuffer()
    buffer.record(1, 0, 10.0, {"worker_id": 1, "dp_rank": 0, "wall_time": 0.01})
    buffer.record(1, 0, 30.0, {"worker_id": 1, "dp_rank": 0, "wall_time": 0.02})
    buffer.record(0, 0, 20.0, {"worker_id": 0, "dp_rank": 0, "wall_time": 0.03})
    assert buffer.drain(50.0, [1]) == [{"worker_id": 1, "dp_rank": 0, "wall_time": 0.02}]
    assert buffer.drain(51.0, [1]) == []
    # A worker that left has no idle seconds either.
    assert buffer.drain(3000.0, []) == []


def test_a_pass_as_a_row():
    metrics = ForwardPassMetrics(0, 0, 0.0, 0, 5, 0, 2.5, 0, 0, 0.0, 0, 0, 0.0, 40.0)
    row = forward_row(3, 1, metrics.duration_ms, metrics[:-1])
    assert set(row) == set(cases.load("scale_rr_down")["expected"]["scaling"][0]["snapshot"]["decode_fpm_snapshots"][0])
    assert (row["worker_id"], row["dp_rank"], row["wall_time"]) == (3, 1, 0.04)
    assert (row["num_decode_requests"], row["var_decode_kv_tokens"]) == (5, 2.5)


# ---------------------------------------------------------------- ticks


class Scripted:
    """Answers from a list and remembers what it saw."""

    def __init__(self, first: Any, *answers: Any) -> None:
        self.first, self.answers, self.seen = first, list(answers), []

    def initial_tick_ms(self):
        return self.first

    def on_tick(self, snapshot):
        self.seen.append(snapshot)
        return self.answers.pop(0)


class View:
    """A system that does nothing but have workers, and passes that were recorded."""

    def __init__(self, pools: dict[Pool, WorkerPool]) -> None:
        self.pools = pools
        self.passes: dict[Pool, list[Any]] = {Pool.PREFILL: [], Pool.DECODE: []}

    def worker_pool(self, role):
        return self.pools.get(role)

    def newest_passes(self, role):
        taken, self.passes[role] = self.passes[role], []
        return taken


def aggregated(workers: int = 2) -> View:
    return View({Pool.DECODE: WorkerPool(Pool.AGGREGATED, workers)})


def last_pass_ms(name: str, worker: int, now: float) -> float:
    """About when a worker computed last: now, unless its requests have all ended."""
    mine = [row for row in cases.rows(name) if row["decode_worker_idx"] == worker and row["first_admit_ms"] < now]
    ended = [row["terminal_time_ms"] for row in mine]
    return min(max(ended, default=now), now)


@pytest.mark.parametrize("name", SCALED)
def test_recorded_snapshots_of_ticks(name):
    """The passes come from the snapshots themselves, all but the idle ones."""
    case = cases.load(name)
    expected, pools = case["expected"], cases.pools(name)
    sides = (
        {Pool.PREFILL: "prefill", Pool.DECODE: "decode"} if cases.is_disaggregated(name) else {Pool.DECODE: "decode"}
    )
    view = View({role: pools.get(side) or pools["agg"] for role, side in sides.items()})
    ticks = expected["scaling"]
    script = Scripted(case["input"]["scaling_policy"]["initial_tick_ms"], *(tick["decision"] for tick in ticks))
    dp_size, prefill_dp_size = cases.dp_sizes(name)
    scaling = Scaling(script, dp_size=dp_size, prefill_dp_size=prefill_dp_size)
    changes = list(expected["lifecycle_operations"])
    for tick in ticks:
        wanted, now = tick["snapshot"], tick["snapshot"]["now_ms"]
        assert scaling.next_tick_ms == now
        while changes and (changes[0]["at_ms"], changes[0]["cause"] == "planner_scale") < (now, True):
            cases.repeat_change(name, pools, changes.pop(0))
        for role, side in sides.items():
            for row in wanted[f"{side}_fpm_snapshots"]:
                if row["wall_time"] > 0:
                    end_ms = last_pass_ms(name, row["worker_id"], now)
                    view.passes[role].append((row["worker_id"], row["dp_rank"], end_ms, row))
        scaling.traffic.arrived(wanted["traffic"]["num_req"])
        decision = tick["decision"]
        assert scaling.tick(now, view) == Targets(decision["target_prefill"], decision["target_decode"])
        got = {key: value for key, value in script.seen[-1].items() if key != "traffic"}
        assert cases.same({key: value for key, value in wanted.items() if key != "traffic"}, got) == []
        assert script.seen[-1]["traffic"]["num_req"] == wanted["traffic"]["num_req"]
    assert [entry["decision"] for entry in scaling.history] == [
        {key: tick["decision"][key] for key in ("target_prefill", "target_decode", "next_tick_ms")} for tick in ticks
    ]


@pytest.mark.parametrize(
    ("first", "at"), [(50.0, 50.0), (-3.0, 0.0), (0, 0.0), (math.inf, math.inf), (math.nan, math.inf)]
)
def test_first_tick(first, at):
    scaling = Scaling(Scripted(first))
    assert scaling.next_tick_ms == at
    assert scaling.is_ticking is (at < math.inf)


@pytest.mark.parametrize("first", [None, "soon", True])
def test_a_first_tick_that_is_no_number_is_refused(first):
    with pytest.raises(ConfigError, match="initial_tick_ms: must be a number of milliseconds"):
        Scaling(Scripted(first))


@pytest.mark.parametrize(
    ("answer", "at"),
    [
        ({"next_tick_ms": 80.0}, 80.0),
        ({"next_tick_ms": np.float64(80.0)}, 80.0),
        ({"next_tick_ms": 50.0}, math.inf),
        ({"next_tick_ms": 49.0}, math.inf),
        ({"next_tick_ms": math.nan}, math.inf),
        ({"next_tick_ms": math.inf}, math.inf),
        ({"next_tick_ms": None}, math.inf),
        ({}, math.inf),
    ],
)
def test_when_the_next_tick_is(answer, at):
    scaling = Scaling(Scripted(50.0, answer))
    assert scaling.tick(50.0, aggregated()) == Targets(None, None)
    assert scaling.next_tick_ms == at


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"target_decode": -1}, "scaling.target_decode: must be None or an int >= 0, got -1 at tick 0"),
        ({"target_decode": 1.5}, "target_decode: must be None or an int"),
        ({"target_decode": True}, "target_decode: must be None or an int"),
        ({"target_prefill": "2"}, "target_prefill: must be None or an int"),
        ({"next_tick_ms": "2"}, "next_tick_ms: must be a number of milliseconds"),
        ({"target": 2}, "on_tick may return target_prefill, target_decode, next_tick_ms, got 'target' at tick 0"),
        (None, "on_tick must return a mapping"),
    ],
)
def test_decisions_that_are_refused(answer, message):
    scaling = Scaling(Scripted(50.0, answer))
    with pytest.raises(ConfigError, match=message):
        scaling.tick(50.0, aggregated())
    assert scaling.history == []


def test_whole_numbers_of_numpy_are_targets():
    scaling = Scaling(Scripted(50.0, {"target_decode": np.int64(3)}))
    targets = scaling.tick(50.0, aggregated())
    assert targets.decode == 3
    assert type(targets.decode) is int


def test_a_prefill_target_of_an_aggregated_run_warns_once():
    scaling = Scaling(Scripted(1.0, *({"target_prefill": 3, "next_tick_ms": at} for at in (2.0, None))))
    view = aggregated()
    with pytest.warns(UserWarning, match="target_prefill has no effect in an aggregated run, tick 0 asked for 3"):
        assert scaling.tick(1.0, view) == Targets(None, None)
    assert scaling.tick(2.0, view) == Targets(None, None)


def test_a_policy_that_fails_is_named_with_its_tick():
    class Broken(ScalingPolicy):
        def on_tick(self, snapshot):
            raise ValueError("no idea")

    scaling = Scaling(Broken(30.0))
    with pytest.raises(PolicyError, match=r"Broken.on_tick failed at tick 0: ValueError: no idea") as caught:
        scaling.tick(30.0, aggregated())
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_base_class_ticks_at_its_interval_and_wants_on_tick():
    scaling = Scaling(ScalingPolicy(30.0))
    assert scaling.next_tick_ms == 30.0
    with pytest.raises(PolicyError, match=r"ScalingPolicy.on_tick failed at tick 0: NotImplementedError"):
        scaling.tick(30.0, aggregated())


@pytest.mark.parametrize("policy", [object(), None])
def test_something_that_is_no_policy_is_refused(policy):
    with pytest.raises(ConfigError, match="scaling: must have a method initial_tick_ms"):
        Scaling(policy)


def test_what_a_policy_does_to_its_snapshot_stays_with_it():
    class Vandal(ScalingPolicy):
        def on_tick(self, snapshot):
            snapshot["active_decode_ids"].clear()
            snapshot["traffic"] = None
            return {}

    scaling, view = Scaling(Vandal(5.0)), aggregated()
    scaling.tick(5.0, view)
    assert scaling.history[0]["snapshot"]["active_decode_ids"] == [0, 1]
    assert scaling.history[0]["snapshot"]["traffic"]["num_req"] == 0
    assert view.pools[Pool.DECODE].active_ids == [0, 1]
