"""Systems of many engines: options of `kvsim.replay` about them, and what must hold whatever they are."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.config import EngineConfig, FixedTiming, SglangConfig
from kvsim.layout import FailReason, Pool, RequestStatus
from kvsim.replay.run import Run
from kvsim.workload import workload_from_requests

EXAMPLES = int(os.environ.get("KVSIM_EXAMPLES", "60"))
CONFIG = EngineConfig(block_size=16, num_gpu_blocks=256, timing_model=FixedTiming(prefill_ms=20.0, decode_ms=5.0))


def items(n: int, gap: float = 5.0, tokens: int = 64, outputs: int = 4) -> list[dict[str, Any]]:
    return [{"arrival_time_ms": gap * k, "input_tokens": tokens, "output_tokens": outputs} for k in range(n)]


def pools(config: EngineConfig = CONFIG, prefill: int = 1, decode: int = 1, **transfer: Any) -> dict[str, Any]:
    return {
        "prefill": kvsim.PoolSpec(config.replace(**transfer), prefill),
        "decode": kvsim.PoolSpec(config, decode),
    }


# ---------------------------------------------------------------- options


def test_two_pools_hand_over() -> None:
    result = kvsim.replay(items(6), **pools(prefill=2, decode=3))
    halves = result.handoffs
    assert result.summary["completed_requests"] == 6
    assert halves["prefill_worker"].tolist() == [0, 1, 0, 1, 0, 1]
    assert result.requests["worker"].tolist() == [0, 1, 2, 0, 1, 2]
    assert (result.requests["first_token_ms"] >= halves["decode_admit_ms"] + 5.0).all()
    assert result.routing["pool"].tolist().count(Pool.PREFILL) == 6


def test_the_latency_stands_in_for_a_missing_bandwidth() -> None:
    slow = kvsim.replay(items(1), **pools(), handoff_latency_ms=7.0).handoffs[0]
    assert slow["destination_activated_ms"] - slow["source_held_ms"] == 7.0
    timed = pools(kv_transfer_bytes_per_token=1_000_000, kv_transfer_bandwidth=1.0)
    wired = kvsim.replay(items(1), **timed, handoff_latency_ms=7.0).handoffs[0]
    assert wired["destination_activated_ms"] - wired["source_held_ms"] == 64.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": kvsim.PoolSpec(CONFIG)}, "decode: prefill and decode pools come together"),
        ({**pools(), "workers": 2}, "workers: belongs into prefill and decode"),
        ({**pools(), "startup_ms": 5.0}, "startup_ms: belongs into prefill and decode"),
        ({"prefill_placement": "kv_router"}, "prefill_placement: needs the pools"),
        ({"handoff_latency_ms": 1.0}, "handoff_latency_ms: needs the pools"),
        ({"handoff_latency_ms": float("nan")}, "handoff_latency_ms: must be finite"),
        ({"startup_ms": -1.0}, "startup_ms: must be finite and >= 0"),
        ({"placement": "nearest"}, "placement: must be one of"),
        ({"router": {"router_queue_threshold": 1}}, "router_config: needs placement kv_router"),
        ({"scaling": object()}, "scaling: must have a method initial_tick_ms"),
        ({**pools(), "placement": kvsim.RoundRobin()}, "placement: each pool needs one of its own"),
        (
            {"prefill": kvsim.PoolSpec(CONFIG), "decode": kvsim.PoolSpec(CONFIG.replace(backend="trtllm"))},
            "decode.backend: must be that of prefill",
        ),
    ],
)
def test_options_that_are_not_allowed_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(kvsim.ConfigError, match=message):
        kvsim.replay(items(2), **{"config": None if "prefill" in options else CONFIG} | options)


def test_each_pool_may_have_a_placement_of_its_own() -> None:
    given_one = kvsim.replay(items(6), **pools(prefill=2), prefill_placement="kv_router")
    routes = given_one.routing
    assert np.isfinite(routes["cost"][routes["pool"] == Pool.PREFILL]).all()
    assert np.isnan(routes["cost"][routes["pool"] == Pool.DECODE]).all()


class Last(kvsim.Placement):
    """Everything goes to the highest worker."""

    def start(self, pool: kvsim.PoolInfo) -> None:
        self.worker = max(pool.workers)

    def place(self, request: kvsim.PlacedRequest, now_ms: float) -> kvsim.Route | None:
        return kvsim.Route(self.worker, 0)


class Keeper(Last):
    """Keeps every other request for ever."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def place(self, request: kvsim.PlacedRequest, now_ms: float) -> kvsim.Route | None:
        if request.row % 2:
            self.kept.append(request.row)
            return None
        return super().place(request, now_ms)

    def pending_count(self) -> int:
        return len(self.kept)


def test_a_placement_of_ones_own() -> None:
    assert set(kvsim.replay(items(5), CONFIG, workers=3, placement=Last).requests["worker"]) == {2}


@pytest.mark.parametrize("options", [{"config": CONFIG}, pools()])
def test_what_a_placement_keeps_for_ever_fails_and_is_listed(options: dict[str, Any]) -> None:
    result = kvsim.replay(items(4), **options, placement=Keeper)
    assert result.requests["status"].tolist() == [RequestStatus.COMPLETED, RequestStatus.FAILED] * 2
    assert result.requests["reason"].tolist() == [FailReason.NONE, FailReason.STALLED] * 2
    assert [entry["row"] for entry in result.stalled] == [1, 3]


class Generous(Last):
    """Keeps all but the first, and hands out the rest when one of them is cancelled."""

    def __init__(self) -> None:
        self.kept: list[kvsim.PlacedRequest] = []

    def place(self, request: kvsim.PlacedRequest, now_ms: float) -> kvsim.Route | None:
        if request.row:
            self.kept.append(request)
            return None
        return super().place(request, now_ms)

    def cancel(self, row: int, now_ms: float) -> list[tuple[kvsim.PlacedRequest, kvsim.Route]]:
        left = [(request, kvsim.Route(self.worker, 0)) for request in self.kept if request.row != row]
        self.kept.clear()
        return left


# With two pools the second one keeps again what the first has handed out.
@pytest.mark.parametrize(("options", "stalled"), [({"config": CONFIG}, [1]), (pools(), [1, 2])])
def test_what_a_cancellation_hands_out_goes_on(options: dict[str, Any], stalled: list[int]) -> None:
    result = kvsim.replay(items(4), **options, placement=Generous)
    assert [entry["row"] for entry in result.stalled] == stalled
    assert np.flatnonzero(result.requests["status"] == RequestStatus.FAILED).tolist() == stalled
    assert result.summary["completed_requests"] == 4 - len(stalled)


def test_what_the_removal_of_a_worker_hands_out_starts_at_once() -> None:
    class AfterRemoval(Last):
        def place(self, request: kvsim.PlacedRequest, now_ms: float) -> kvsim.Route | None:
            if not request.row:
                return super().place(request, now_ms)
            self.kept = request
            return None

        def worker_removed(self, worker: int, now_ms: float) -> list[tuple[kvsim.PlacedRequest, kvsim.Route]]:
            return [(self.kept, kvsim.Route(0, 0))]

    made = items(2, gap=0.0, outputs=1)
    result = kvsim.replay(made, CONFIG, workers=2, placement=AfterRemoval, scaling=Script(1))
    assert result.requests["first_token_ms"].tolist() == [20.0, 40.0]
    assert result.lifecycle[-1]["topology_released_rows"] == [1]


def test_the_decode_pool_may_have_a_placement_of_its_own_too() -> None:
    result = kvsim.replay(items(6), **pools(prefill=2, decode=3), decode_placement=Last)
    assert set(result.requests["worker"]) == {2}
    assert set(result.handoffs["prefill_worker"]) == {0, 1}


def test_a_threshold_of_the_router_keeps_requests_until_a_prompt_is_computed() -> None:
    options: dict[str, Any] = {"config": CONFIG.replace(max_num_batched_tokens=64), "placement": "kv_router"}
    made = items(4, gap=1.0)
    plain = kvsim.replay(made, **options)
    queued = kvsim.replay(made, **options, router=kvsim.KvRouterConfig(router_queue_threshold=0.5))
    assert np.isnan(plain.routing["queue_entered_ms"]).all()
    assert queued.routing["queue_entered_ms"][1:].tolist() == [1.0, 2.0, 3.0]
    assert queued.routing["released_ms"][1:].tolist() == queued.requests["first_token_ms"][:3].tolist()
    assert queued.summary["completed_requests"] == 4


def test_a_placement_that_names_a_worker_that_is_gone_is_an_error() -> None:
    with pytest.raises(kvsim.PolicyError, match=r"was sent to worker 1, rank 0; active workers are \[0\]"):
        kvsim.replay(items(10), CONFIG, workers=2, placement=Last, scaling=Script(1))


def test_a_placement_that_names_no_worker_is_an_error() -> None:
    class Wrong(kvsim.Placement):
        def place(self, request: kvsim.PlacedRequest, now_ms: float) -> kvsim.Route | None:
            return kvsim.Route(9, 0)

    with pytest.raises(kvsim.PolicyError, match=r"placement Wrong: request 0 was sent to worker 9, rank 0"):
        kvsim.replay(items(1), CONFIG, placement=Wrong)


class Script(kvsim.ScalingPolicy):
    """Targets at given ticks, 10 ms apart."""

    def __init__(self, *targets: int | None) -> None:
        super().__init__(10.0)
        self.targets = list(targets)

    def on_tick(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        target = self.targets.pop(0) if self.targets else None
        following = snapshot["now_ms"] + 10.0 if self.targets else None
        return {"target_decode": target, "target_prefill": None, "next_tick_ms": following}


def test_workers_come_after_their_startup_and_leave_when_they_are_empty() -> None:
    result = kvsim.replay(items(30), CONFIG, scaling=Script(3, None, None, 1), startup_ms=15.0)
    assert result.summary["completed_requests"] == 30
    ready = [op for op in result.lifecycle if op["cause"] == "worker_ready_event"]
    assert [op["at_ms"] for op in ready] == [25.0, 25.0]
    assert result.lifecycle[-1]["cause"] == "drain_settlement"
    late = result.requests["arrival_ms"] > 40.0
    assert set(result.requests["worker"][late]) == {0}


def test_requests_that_no_worker_is_left_for_fail() -> None:
    result = kvsim.replay(items(10), CONFIG, scaling=Script(0))
    reasons = result.requests["reason"][result.requests["status"] == RequestStatus.FAILED]
    assert len(reasons) > 0
    assert set(reasons) == {FailReason.NO_WORKER}
    assert (result.requests["status"] != RequestStatus.UNFINISHED).all()


def test_requests_wait_for_a_worker_that_is_starting() -> None:
    result = kvsim.replay(items(10), CONFIG, scaling=Script(0, 1), startup_ms=50.0)
    assert result.summary["completed_requests"] == 10
    later = result.requests[result.requests["arrival_ms"] > 10.0]
    assert set(later["worker"]) == {1}
    assert (later["first_token_ms"] >= 20.0 + 50.0 + 20.0).all()


@pytest.mark.parametrize("options", [{"config": CONFIG, "workers": 2}, pools(prefill=2)])
def test_a_worker_stays_for_what_still_is_in_its_tokenization_pool(options: dict[str, Any]) -> None:
    class Fewer(Script):
        def on_tick(self, snapshot: dict[str, Any]) -> dict[str, Any]:
            decision = super().on_tick(snapshot)
            return decision | ({"target_prefill": decision["target_decode"]} if "prefill" in options else {})

    slow = {"workers": 1, "base_ms": 30.0, "per_input_token_ms": 0.0}
    result = kvsim.replay(items(2), **options, tokenization=slow, scaling=Fewer(1))
    assert result.summary["completed_requests"] == 2
    front = result.handoffs["prefill_worker"] if "prefill" in options else result.requests["worker"]
    assert front.tolist() == [0, 1]
    removed = [op["at_ms"] for op in result.lifecycle if op["cause"] == "drain_settlement"]
    assert removed[0] >= 5.0 + 30.0 + 20.0


def test_telemetry_reaches_the_result_and_changes_nothing() -> None:
    plain = kvsim.replay(items(10), CONFIG, workers=2)
    watched = kvsim.replay(items(10), CONFIG, workers=2, telemetry=kvsim.TelemetryOptions(sample_interval_ms=10.0))
    assert [s["kind"] for s in watched.telemetry["samples"]][:2] == ["baseline", "periodic"]
    assert watched.to_json() == plain.to_json()


def test_sixty_four_workers() -> None:
    result = kvsim.replay(items(640, gap=1.0), **pools(prefill=64, decode=64), placement="kv_router")
    assert result.summary["completed_requests"] == 640
    assert len(set(result.requests["worker"])) > 8


# ---------------------------------------------------------------- whatever the system is


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    backend = draw(st.sampled_from(["vllm", "sglang", "trtllm"]))
    page = draw(st.sampled_from([4, 2]))
    return EngineConfig(
        backend=backend,
        num_gpu_blocks=draw(st.sampled_from([8, 12, 30])),
        block_size=page,
        max_num_seqs=draw(st.sampled_from([2, 4, None])),
        max_num_batched_tokens=draw(st.sampled_from([16, 64])),
        max_model_len=draw(st.sampled_from([None, None, 40])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        preemption_mode=draw(st.sampled_from(["lifo", "fifo"])),
        kv_transfer_bytes_per_token=1000,
        kv_transfer_bandwidth=draw(st.sampled_from([None, 0.0, 0.001, 1.0])),
        kv_transfer_timing_mode=draw(st.sampled_from(["full_prompt", "destination_missing"])),
        timing_model=FixedTiming(
            prefill_ms=draw(st.sampled_from([0.0, 7.0])), decode_ms=draw(st.sampled_from([1.0, 3.5]))
        ),
        sglang=SglangConfig(chunked_prefill_size=page * draw(st.sampled_from([4, 100]))),
    )


@st.composite
def requests(draw: st.DrawFn) -> list[dict[str, Any]]:
    made, at = [], 0.0
    for k in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from([0.0, 0.0, 1.0, 7.0]))
        shared = draw(st.integers(0, 1))
        tokens = [shared + 10] * draw(st.integers(1, 30)) + [100 + k] * draw(st.integers(0, 6))
        made.append(
            {
                "arrival_time_ms": at,
                "input_tokens": len(tokens),
                "input_token_ids": tokens,
                "output_tokens": draw(st.sampled_from([0, 1, 2, 5, 12])),
            }
        )
    return made


class Whim(kvsim.Placement):
    """Sends requests anywhere, keeps some of them, hands them out at any occasion, and checks what it is told."""

    wants_first_tokens = wants_terminals = wants_kv_events = True

    def start(self, pool: kvsim.PoolInfo) -> None:
        self.random = random.Random(int(pool.role))
        self.dp_size = pool.dp_size
        self.active = list(pool.workers)
        self.kept: list[kvsim.PlacedRequest] = []
        self.live: set[int] = set()

    def send(self, request: kvsim.PlacedRequest) -> kvsim.Route:
        self.live.add(request.row)
        return kvsim.Route(self.random.choice(self.active), self.random.randrange(self.dp_size))

    def place(self, request: kvsim.PlacedRequest, now_ms: float) -> kvsim.Route | None:
        assert request.row not in self.live
        if self.random.random() < 0.4:
            self.kept.append(request)
            return None
        return self.send(request)

    def some(self) -> list[tuple[kvsim.PlacedRequest, kvsim.Route]]:
        left = []
        while self.kept and self.active and self.random.random() < 0.7:
            request = self.kept.pop(self.random.randrange(len(self.kept)))
            left.append((request, self.send(request)))
        return left

    def prefill_completed(self, row: int, now_ms: float) -> list[tuple[kvsim.PlacedRequest, kvsim.Route]]:
        assert row in self.live
        return self.some()

    def request_terminal(self, row: int, now_ms: float) -> list[tuple[kvsim.PlacedRequest, kvsim.Route]]:
        self.live.remove(row)
        return self.some()

    def cancel(self, row: int, now_ms: float) -> list[tuple[kvsim.PlacedRequest, kvsim.Route]]:
        self.kept = [request for request in self.kept if request.row != row]
        self.live.discard(row)
        return self.some()

    def worker_ready(self, worker: int, now_ms: float) -> tuple[()]:
        self.active.append(worker)
        return ()

    def worker_draining(self, worker: int, now_ms: float) -> tuple[()]:
        self.active.remove(worker)
        return ()

    def topology_settled(self, now_ms: float) -> list[tuple[kvsim.PlacedRequest, kvsim.Route]]:
        return self.some()

    def pending_count(self) -> int:
        return len(self.kept)


class Random(kvsim.ScalingPolicy):
    def __init__(self, moves: list[tuple[int | None, int | None]]) -> None:
        super().__init__(6.0)
        self.moves = list(moves)

    def on_tick(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        prefill, decode = self.moves.pop(0) if self.moves else (None, None)
        if not snapshot["total_prefill_count"] and prefill is not None:
            prefill = None
        following = snapshot["now_ms"] + 6.0 if self.moves else None
        return {"target_prefill": prefill, "target_decode": decode, "next_tick_ms": following}


TARGETS = st.one_of(st.none(), st.integers(0, 3))


@st.composite
def systems(draw: st.DrawFn) -> dict[str, Any]:
    config = draw(configs())
    options: dict[str, Any] = {"concurrency": draw(st.sampled_from([None, None, 1, 3]))}
    size = draw(st.sampled_from([1, 1, 2]))
    if draw(st.booleans()):
        options["prefill"] = kvsim.PoolSpec(config, draw(st.integers(1, 2)), size)
        options["decode"] = kvsim.PoolSpec(config, draw(st.integers(1, 2)), draw(st.sampled_from([1, 2])), 4.0)
        options["handoff_latency_ms"] = draw(st.sampled_from([0.0, 2.5]))
    else:
        options |= {"config": config, "workers": draw(st.integers(1, 3)), "dp_size": size}
    placement = draw(st.sampled_from(["round_robin", "kv_router", Whim]))
    options["placement"] = placement
    if placement == "kv_router":
        options["router"] = {"router_queue_threshold": draw(st.sampled_from([None, 0.0, 0.5]))}
    if draw(st.booleans()):
        options["scaling"] = draw(st.lists(st.tuples(TARGETS, TARGETS), min_size=1, max_size=6))
    if draw(st.integers(0, 3)) == 0:
        options["tokenization"] = {"workers": 1, "base_ms": draw(st.sampled_from([0.0, 9.0]))}
    options["max_sim_time_ms"] = draw(st.sampled_from([None, None, None, 20.0]))
    return options


def executed(made: list[dict[str, Any]], options: dict[str, Any]) -> Run:
    if "scaling" in options:
        options = options | {"scaling": Random(options["scaling"])}
    run = Run(workload_from_requests(made), capture_admissions=True, capture_routing=True, **options)
    run.execute()
    return run


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
@given(requests(), systems())
def test_a_run_ends_forgets_nobody_and_loses_no_block(made: list[dict[str, Any]], options: dict[str, Any]) -> None:
    run = executed(made, options)
    result = run.result()
    ranks = [rank for pool in run._pools for rank in pool.ranks.values()]
    for rank in ranks:
        rank.check_integrity()
    rows = result.requests
    if options["max_sim_time_ms"] is None:
        assert (rows["status"] != RequestStatus.UNFINISHED).all()
        # No half of a handoff is left either: not a row of any rank is in use.
        assert [int(rank.header["num_live"][0]) for rank in ranks] == [0] * len(ranks)
    if run.handoffs is not None:
        done = rows["status"] == RequestStatus.COMPLETED
        halves, ended = run.handoffs[done], rows[done]
        order = [
            ended["arrival_ms"],
            halves["prefill_admit_ms"],
            halves["source_held_ms"],
            halves["destination_activated_ms"],
            halves["decode_admit_ms"],
            np.where(ended["output_tokens"] > 0, ended["first_token_ms"], ended["terminal_ms"]),
            ended["terminal_ms"],
        ]
        for before, after in itertools.pairwise(order):
            assert (before <= after).all()
        assert (halves["destination_reserved_ms"] <= halves["destination_activated_ms"]).all()
        # A cap may come between the end of a transfer and that of the pass that delays the release.
        released = np.isfinite(halves["source_released_ms"])
        assert released.all() or options["max_sim_time_ms"] is not None
        assert (halves["destination_activated_ms"] <= halves["source_released_ms"])[released].all()
    again = executed(made, options)
    assert again.records.tobytes() == run.records.tobytes()
    assert again.result().to_json() == result.to_json()
    routing = [None if result.routing is None else result.routing.tobytes() for result in (result, again.result())]
    assert routing[0] == routing[1]
    if run.handoffs is not None:
        assert again.handoffs.tobytes() == run.handoffs.tobytes()
