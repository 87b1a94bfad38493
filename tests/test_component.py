"""Acceptance examples of the replay engine component, part B of the contract, and the rules they leave open."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from kvsim.config import EngineConfig, FixedTiming, KvbmTiers, SglangConfig
from kvsim.contract import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    DestinationAccepted,
    DestinationReserved,
    Noop,
    ReleaseSource,
    Request,
    ReserveDestination,
    SourceHeld,
    Submit,
    SubmitHandoffPrefill,
)
from kvsim.errors import CommandError, ConfigError, IntegrityError, PoisonedError, TimingError
from kvsim.layout import FailReason, Pool
from kvsim.replay.component import Completion, DriveEffects, EngineComponent, TokenTimes

COUNTS = ("num_prefill_requests", "num_decode_requests", "num_queued_prefill", "num_queued_decode")


class TimingL:
    """A prefill takes a millisecond per token that is computed, a decode one millisecond."""

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        return float(mean_isl - mean_prefix)

    def predict_decode_ms(self, *_: int) -> float:
        return 1.0


class Driven:
    """A component with a collector, so that the scenarios read as their actions."""

    def __init__(self, config: EngineConfig, **options: Any) -> None:
        self.component = EngineComponent(config, **options)
        self.tokens = TokenTimes()

    def send(self, rank: int, request_id: int, count: int, out: int = 1, *, at: float = 0.0) -> None:
        self.component.dispatch(rank, Request(request_id, [7] * count, out), at)

    def drive(self, at: float) -> DriveEffects:
        return self.component.drive_ready(at, self.tokens)

    def deliver(self, effects: DriveEffects) -> None:
        for completion in effects.scheduled:
            self.component.on_scheduled_completion(completion)


def fixture_d(dp_size: int, **fields: Any) -> Driven:
    """One aggregated worker whose passes take what the acceptance table says: the older rules."""
    values: dict[str, Any] = {
        "ruleset": "dynamo-1.3",
        "num_gpu_blocks": 64,
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        **fields,
    }
    return Driven(EngineConfig(**values), dp_size=dp_size, timing=TimingL())


def fixture_s(workers: int, startup_s: float | None) -> Driven:
    return Driven(EngineConfig(), workers=workers, startup_s=startup_s)


def durations(effects: DriveEffects) -> list[float]:
    return [completion.effects.forward_pass_metrics.duration_ms for completion in effects.scheduled]


def ends(effects: DriveEffects) -> list[float]:
    return [completion.end_ms for completion in effects.scheduled]


# ---------------------------------------------------------------- passes


def test_b1_the_slowest_rank_ends_the_group() -> None:
    driven = fixture_d(2)
    driven.send(0, 1, 4)
    driven.send(1, 2, 8)
    effects = driven.drive(0.0)
    assert ends(effects) == [9.0, 9.0]
    assert durations(effects) == [9.0, 9.0]
    assert driven.tokens.times == {}
    driven.deliver(effects)
    assert driven.tokens.times == {1: [9.0], 2: [9.0]}


def test_b2_an_empty_rank_holds_back_what_arrives_during_the_pass() -> None:
    driven = fixture_d(2)
    driven.send(0, 1, 8)
    effects = driven.drive(0.0)
    assert len(effects.scheduled) == 2
    assert all(rank is not None and rank.busy for rank in driven.component.ranks)
    idle = effects.scheduled[1].effects.forward_pass_metrics
    assert [getattr(idle, name) for name in COUNTS] == [0, 0, 0, 0]
    assert idle.duration_ms == 9.0
    driven.send(1, 2, 4, at=4.0)
    assert not driven.drive(4.0)
    driven.deliver(effects)
    later = driven.drive(9.0)
    assert ends(later) == [14.0, 14.0]
    driven.deliver(later)
    assert driven.tokens.times[2] == [14.0]  # 10 ms after it came


def test_b3_a_single_rank_takes_its_own_time() -> None:
    driven = fixture_d(1)
    driven.send(0, 1, 4)
    effects = driven.drive(0.0)
    assert ends(effects) == [5.0]
    driven.deliver(effects)
    assert driven.tokens.times == {1: [5.0]}


def test_b4_each_drive_starts_the_pass_of_one_worker_lowest_first() -> None:
    driven = Driven(EngineConfig(), workers=2)
    driven.send(0, 1, 4)
    driven.send(1, 2, 4)
    first = driven.drive(0.0)
    assert first.worker_id == 0
    assert {completion.worker_id for completion in first.scheduled} == {0}
    assert driven.component.ready == {1}
    assert driven.drive(0.0).worker_id == 1
    assert driven.drive(0.0).worker_id == -1


@pytest.mark.parametrize(
    ("backend", "ruleset", "at_start"),
    [
        ("vllm", "dynamo-1.3", True),
        ("vllm", "dynamo", False),
        ("sglang", "dynamo-1.3", False),
        ("sglang", "dynamo", False),
    ],
)
def test_b5_kv_events_show_when_the_ruleset_says_and_metrics_at_the_end(
    backend: Any, ruleset: str, at_start: bool
) -> None:
    config = EngineConfig(
        backend=backend,
        ruleset=ruleset,
        num_gpu_blocks=8,
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        speedup_ratio=0.0,
        emit_kv_events=True,
        sglang=SglangConfig(chunked_prefill_size=16),
    )
    driven = Driven(config, role="decode")
    driven.send(0, 1, 8)
    effects = driven.drive(0.0)
    (completion,) = effects.scheduled or effects.immediate
    assert bool(effects.pass_start_events) is at_start
    assert bool(completion.effects.kv_events) is not at_start
    assert completion.effects.forward_pass_metrics.num_prefill_requests == 1
    driven.deliver(effects)
    assert bool(completion.effects.kv_events) is not at_start


@pytest.mark.parametrize("ruleset", ["dynamo-1.3", "dynamo"])
def test_b12_passes_that_take_no_time_are_productive(ruleset: str) -> None:
    config = EngineConfig(
        ruleset=ruleset,
        num_gpu_blocks=16,
        block_size=4,
        max_num_batched_tokens=4,
        max_num_seqs=1,
        timing_model=FixedTiming(prefill_ms=10.0, decode_ms=1.0),
    )
    driven = Driven(config, role="decode")
    driven.send(0, 1, 12)
    first = driven.drive(0.0)
    assert [admission.request_id for admission in first.admissions] == [1]
    assert [completion.completed_requests for completion in first.immediate] == [[]]
    second = driven.drive(0.0)
    assert second.admissions == []
    assert (len(second.immediate), len(second.scheduled)) == (1, 0)
    shown = second.immediate[0].effects
    assert shown.forward_pass_metrics.num_prefill_requests == 1
    assert list(shown.outputs) == shown.lifecycle_events == []
    assert driven.component.ready == {0}
    third = driven.drive(0.0)
    done = third.immediate or third.scheduled
    driven.deliver(third)
    assert [completion.completed_requests for completion in done] == [[1]]
    assert [output.completed for output in done[0].effects.outputs] == [True]
    assert driven.component.drained


def queued_only() -> Driven:
    config = EngineConfig(
        num_gpu_blocks=16, block_size=4, max_num_batched_tokens=4, max_num_seqs=1, enable_chunked_prefill=False
    )
    driven = Driven(config, role="decode")
    driven.send(0, 1, 8)
    return driven


def test_b13_a_pass_that_only_queues_is_no_progress() -> None:
    driven = queued_only()
    for _ in range(2):
        assert not driven.drive(0.0)
        assert driven.component.ready == set()
        assert driven.component.deferred == {0}
    rank = driven.component.ranks[0]
    assert rank is not None
    assert (rank.busy, rank.in_flight, rank.ready, rank.drained) == (False, 1, True, False)


def test_d21_the_tokens_of_a_burst_share_the_end_of_their_pass() -> None:
    config = EngineConfig(
        block_size=4,
        aic_nextn=1,
        aic_nextn_accept_rates="1",
        timing_model=FixedTiming(prefill_ms=40.0, decode_ms=2.0),
    )
    driven = Driven(config)
    driven.send(0, 1, 8, 3)
    driven.send(0, 2, 8, 1)
    first = driven.drive(0.0)
    driven.deliver(first)
    assert driven.tokens.times == {1: [40.0], 2: [40.0]}
    driven.deliver(driven.drive(40.0))
    assert driven.tokens.times == {1: [40.0, 42.0, 42.0], 2: [40.0]}


# ---------------------------------------------------------------- scaling


def test_b6_workers_that_are_added_with_a_startup_time_wait_for_it() -> None:
    component = fixture_s(2, 5.0).component
    change = component.apply_target_count(4)
    assert (change.added, change.newly_marked) == ((2, 3), ())
    assert component.workers.active_ids == [0, 1]
    assert component.workers.worker_count == 4


def test_b7_workers_that_are_added_without_one_are_there_at_once() -> None:
    component = fixture_s(2, None).component
    change = component.apply_target_count(4)
    assert (change.added, change.newly_marked) == ((2, 3), ())
    assert component.workers.active_ids == [0, 1, 2, 3]
    assert component.workers.worker_count == 4


def test_b8_starting_workers_are_cancelled_first_and_no_id_is_used_twice() -> None:
    component = fixture_s(2, 5.0).component
    component.apply_target_count(4)
    component.ready.add(3)
    component.deferred.add(3)
    change = component.apply_target_count(3)
    assert (change.newly_marked, change.removed, change.cancelled) == ((), (), (3,))
    assert component.workers.active_ids == [0, 1]
    assert component.workers.worker_count == 3
    assert 3 not in component.ready | component.deferred
    assert component.groups[3] is component.ranks[3] is None
    assert component.apply_target_count(2).newly_marked == ()
    assert component.workers.active_ids == [0, 1]
    assert component.workers.worker_count == 2
    change = component.apply_target_count(3)
    assert (change.added, change.newly_marked, change.removed) == ((4,), (), ())
    assert component.groups[4] == (4,)
    assert len(component.ranks) == 5


def test_b9_then_active_workers_are_marked() -> None:
    component = fixture_s(3, 5.0).component
    component.apply_target_count(5)
    assert len(component.apply_target_count(1).newly_marked) == 2
    assert component.workers.active_ids == [0]


def test_b10_scaling_up_while_a_worker_drains_adds_a_new_one() -> None:
    driven = fixture_s(2, None)
    component = driven.component
    driven.send(1, 1, 64, 8)
    assert len(driven.drive(0.0).scheduled) == 1
    assert component.apply_target_count(1).newly_marked == (1,)
    assert (component.workers.active_ids, component.workers.draining_ids) == ([0], [1])
    assert component.apply_target_count(2).added == (2,)
    assert (component.workers.active_ids, component.workers.draining_ids) == ([0, 2], [1])
    assert (component.workers.non_draining_count, component.workers.worker_count) == (2, 3)


def test_b11_a_worker_that_becomes_ready_runs_what_it_was_given() -> None:
    driven = fixture_s(1, 5.0)
    component = driven.component
    component.apply_target_count(2)
    driven.send(1, 1, 4)
    assert component.workers.active_ids == [0]
    assert 1 not in component.ready
    assert not driven.drive(0.0)
    assert component.mark_worker_ready(1)
    assert component.workers.active_ids == [0, 1]
    assert 1 in component.ready
    assert driven.drive(5000.0).worker_id == 1


def test_b14_a_cancelled_worker_does_not_become_ready() -> None:
    component = fixture_s(1, 5.0).component
    component.apply_target_count(2)
    component.apply_target_count(1)
    assert not component.mark_worker_ready(1)
    assert not component.mark_worker_ready(0)
    assert not component.mark_worker_ready(7)
    assert component.workers.active_ids == [0]


@pytest.mark.parametrize(("startup_s", "delay_ms"), [(5.0, 5000.0), (None, None), (0.0, None), (-1.0, None)])
def test_b15_startup_times_become_delays(startup_s: float | None, delay_ms: float | None) -> None:
    assert fixture_s(1, startup_s).component.workers.startup_ms == delay_ms


def test_b16_a_pending_destination_keeps_a_marked_worker() -> None:
    config = EngineConfig(
        ruleset="dynamo-1.3", num_gpu_blocks=64, block_size=4, max_num_batched_tokens=64, max_num_seqs=1
    )
    driven = Driven(config, role="decode", timing=TimingL())
    component = driven.component
    driven.send(0, 1, 4)
    effects = driven.drive(0.0)
    (completion,) = effects.scheduled
    reserved = component.apply_command(0, ReserveDestination(2, Request(2, [7] * 4, 1)), 0.5)
    assert reserved.result == DestinationAccepted(2)
    assert reserved.lifecycle_events == []
    assert component.apply_target_count(0).newly_marked == (0,)
    assert component.workers.active_ids == []
    assert component.workers.worker_count == 1
    shown = component.on_scheduled_completion(completion)
    assert [(event.handoff_id, event.request_id) for event in shown.lifecycle_events] == [(2, 2)]
    assert isinstance(shown.lifecycle_events[0], DestinationReserved)
    assert component.remove_drained() == ()
    assert component.workers.worker_count == 1
    assert component.apply_command(0, CancelDestination(2), completion.end_ms).result == Applied()
    component.ready.add(0)
    component.deferred.add(0)
    assert component.remove_drained() == (0,)
    assert component.workers.worker_count == 0
    assert component.ready | component.deferred == set()
    assert component.groups == component.ranks == [None]


def test_b17_transfers_go_on_while_a_worker_is_busy_and_let_no_destination_in() -> None:
    config = EngineConfig(
        ruleset="dynamo-1.3",
        num_gpu_blocks=1,
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        emit_kv_events=True,
        kv_cache_bytes_per_token=5_000_000,
        kvbm_tiers=KvbmTiers(num_g2_blocks=4, g1_to_g2_gbps=1.0),
    )
    driven = Driven(config, role="decode", timing=TimingL())
    component = driven.component
    driven.send(0, 1, 4)
    effects = driven.drive(0.0)
    assert {event.storage_tier for event in effects.pass_start_events} == {"device"}
    (completion,) = effects.scheduled
    rank = component.ranks[0]
    assert rank is not None
    # As if it were idle: the first destination is tried when the command comes.
    flying, rank.flying = rank.flying, None
    assert not component.apply_command(0, ReserveDestination(102, Request(103, [2] * 4, 1)), 0.0).lifecycle_events
    assert component.next_offload_deadline_ms() == pytest.approx(20.0, abs=0.01)
    rank.flying = flying
    due = component.next_offload_deadline_ms()
    assert due == pytest.approx(20.0, abs=0.01)
    ((rank_id, shown),) = component.tick_offload(due)
    assert rank_id == 0
    assert not shown.lifecycle_events
    assert [event.storage_tier for event in shown.kv_events] == ["host_pinned"]
    delivered = component.on_scheduled_completion(completion)
    assert [(type(event), event.handoff_id, event.request_id) for event in delivered.lifecycle_events] == [
        (DestinationReserved, 102, 103)
    ]


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
def test_a_request_is_handed_from_a_prefill_worker_to_a_decode_worker(backend: Any) -> None:
    config = EngineConfig(
        backend=backend, num_gpu_blocks=64, block_size=4, timing_model=FixedTiming(prefill_ms=10.0, decode_ms=4.0)
    )
    source = Driven(config, role="prefill", visible=False)
    target = Driven(config, role="decode", dp_size=2)
    prompt = list(range(10))
    source.component.apply_command(0, SubmitHandoffPrefill(5, Request(1, prompt, 1)), 0.0)
    effects = source.drive(0.0)
    source.deliver(effects)
    (shown,) = (completion.effects for completion in effects.scheduled)
    assert [type(event) for event in shown.lifecycle_events] == [SourceHeld]
    assert [output.completed for output in shown.outputs] == [True]
    assert source.component.in_flight == 0
    assert not source.component.drained
    assert source.component.apply_target_count(0).newly_marked == (0,)
    assert source.component.remove_drained() == ()

    reserved = target.component.apply_command(1, ReserveDestination(5, Request(1, prompt, 2)), 10.0)
    assert reserved.lifecycle_events == [DestinationReserved(5, 1, 12)]
    assert target.component.in_flight == 1
    assert not target.drive(10.0)
    assert target.component.ready | target.component.deferred == set()  # only a command can make it go on
    assert target.component.apply_command(1, ActivateDestination(5), 15.0).result == Applied()
    assert target.component.ready == {0}
    assert source.component.apply_command(0, ReleaseSource(5), 15.0).result == Applied()
    assert source.component.remove_drained() == (0,)

    now = 15.0
    while effects := target.drive(now):
        assert effects.admissions == [] or [admission.request_id for admission in effects.admissions] == [1]
        target.deliver(effects)
        now = effects.end_ms
    assert target.tokens.times == {1: [19.0, 23.0]}
    assert target.component.drained
    target.component.check_integrity()


def test_a_marked_worker_leaves_when_its_last_rank_has() -> None:
    driven = Driven(EngineConfig(block_size=4), workers=2, dp_size=2)
    component = driven.component
    driven.send(3, 1, 8, 2)
    first = driven.drive(0.0)
    assert component.apply_target_count(1).newly_marked == (1,)
    assert component.remove_drained() == ()
    driven.deliver(first)
    assert component.remove_drained() == ()
    second = driven.drive(first.end_ms)
    component.on_scheduled_completion(second.scheduled[0])
    assert component.remove_drained() == ()
    component.on_scheduled_completion(second.scheduled[1])
    assert component.remove_drained() == (1,)
    assert component.ranks[2:] == [None, None]
    with pytest.raises(CommandError, match=r"rank_id: there is no rank 3"):
        driven.send(3, 2, 8)
    with pytest.raises(CommandError, match=r"no rank 0 of worker 1"):
        component.rank_id(1, 0)
    assert component.rank_id(0, 1) == 1


# ---------------------------------------------------------------- stale and refused


def flying(role: str = "aggregated") -> tuple[Driven, Completion]:
    driven = Driven(EngineConfig(block_size=4), role=role)
    driven.send(0, 1, 8)
    (completion,) = driven.drive(0.0).scheduled
    return driven, completion


def refused(driven: Driven, call: Callable[[], Any], match: str) -> None:
    """`call` is an error and changes nothing."""
    before = [rank and (rank.core.digest(), rank.flying, set(rank.live)) for rank in driven.component.ranks]
    with pytest.raises(CommandError, match=match):
        call()
    assert before == [rank and (rank.core.digest(), rank.flying, set(rank.live)) for rank in driven.component.ranks]


def test_a_completion_is_delivered_once() -> None:
    driven, completion = flying()
    driven.component.on_scheduled_completion(completion)
    refused(driven, lambda: driven.component.on_scheduled_completion(completion), "not in flight at rank 0")


def test_a_completion_of_another_component_is_refused() -> None:
    driven, _ = flying()
    _, other = flying()
    refused(driven, lambda: driven.component.on_scheduled_completion(other), "not in flight")
    _, other = flying("decode")
    refused(
        driven, lambda: driven.component.on_scheduled_completion(other), "of role DECODE, the component of AGGREGATED"
    )


def test_a_completion_of_a_worker_that_is_gone_is_refused() -> None:
    driven, completion = flying()
    driven.component.on_scheduled_completion(completion)
    driven.component.apply_target_count(0)
    assert driven.component.groups == [None]
    refused(driven, lambda: driven.component.on_scheduled_completion(completion), "there is no rank 0")


@pytest.mark.parametrize("rank", [-1, 1, True, "0"])
def test_a_rank_that_does_not_exist_is_named(rank: Any) -> None:
    driven = fixture_s(1, None)
    refused(driven, lambda: driven.send(rank, 1, 4), f"rank_id: there is no rank {rank!r}")


@pytest.mark.parametrize("now", [-1.0, math.nan, math.inf, "now"])
def test_a_time_that_is_none_is_refused(now: Any) -> None:
    driven, _ = flying()
    refused(driven, lambda: driven.drive(now), "now_ms: must be finite and >= 0")
    refused(driven, lambda: driven.send(0, 2, 4, at=now), "now_ms: must be finite and >= 0")


def test_a_duplicate_is_refused_and_not_counted() -> None:
    driven, _ = flying()
    refused(driven, lambda: driven.send(0, 1, 4), "already active")
    assert driven.component.in_flight == 1


def test_a_visible_component_needs_a_collector_and_a_hidden_one_tells_it_nothing() -> None:
    driven = fixture_s(1, None)
    driven.send(0, 1, 4)
    refused(driven, lambda: driven.component.drive_ready(0.0), "collector: a visible component needs one")
    hidden = Driven(EngineConfig(), role="prefill", visible=False)
    hidden.send(0, 1, 4)
    effects = hidden.component.drive_ready(0.0)
    hidden.deliver(effects)
    assert effects.scheduled[0].completed_requests == [1]
    hidden.send(0, 2, 4, at=effects.end_ms)
    hidden.deliver(hidden.drive(effects.end_ms))
    assert hidden.tokens.times == {}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"workers": 0}, "workers"),
        ({"dp_size": 0}, "dp_size"),
        ({"dp_size": True}, "dp_size"),
        ({"role": "both"}, "role"),
    ],
)
def test_options_that_are_not_allowed_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineComponent(EngineConfig(), **options)
    assert caught.value.field == field


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_role_makes_the_worker_type(role: str) -> None:
    component = EngineComponent(EngineConfig(), role=role)
    assert component.config.worker_type == role
    assert component.role is Pool[role.upper()]


# ---------------------------------------------------------------- cancellation


def test_what_is_cancelled_during_a_pass_does_not_show_at_its_end() -> None:
    driven = Driven(EngineConfig(block_size=4))
    driven.send(0, 1, 8, 2)
    driven.send(0, 2, 8, 2)
    effects = driven.drive(0.0)
    cancelled = driven.component.apply_command(0, CancelRequest(1), 1.0)
    assert (cancelled.result, cancelled.suppressed_pending_output) == (Applied(), True)
    assert driven.component.in_flight == 1
    driven.deliver(effects)
    assert list(driven.tokens.times) == [2]


@pytest.mark.parametrize("discard", [False, True])
def test_an_end_that_is_in_flight_counts_until_it_shows_or_is_discarded(discard: bool) -> None:
    driven, completion = flying()
    assert driven.component.in_flight == 1
    cancelled = driven.component.apply_command(0, CancelRequest(1, discard), 1.0)
    assert (cancelled.result, cancelled.suppressed_pending_output) == (Noop(), discard)
    assert driven.component.in_flight == 1 - discard
    driven.component.on_scheduled_completion(completion)
    assert completion.completed_requests == ([] if discard else [1])
    assert driven.component.in_flight == 0
    assert driven.component.drained


# ---------------------------------------------------------------- the frontier and liveness


def test_a_deferred_worker_does_not_hide_those_behind_it_and_is_tried_once_per_drive() -> None:
    driven = Driven(
        EngineConfig(block_size=4, max_num_batched_tokens=4, enable_chunked_prefill=False, emit_kv_events=True),
        workers=2,
    )
    driven.send(0, 1, 8)
    driven.send(1, 2, 4)
    passes: list[int] = []
    for rank in driven.component.ranks:
        assert rank is not None
        spy(rank, passes)
    assert driven.drive(0.0).worker_id == 1
    assert passes == [0, 1]
    assert (driven.component.ready, driven.component.deferred) == (set(), {0})
    assert not driven.drive(0.0)
    assert passes == [0, 1, 0]


def spy(rank: Any, passes: list[int]) -> None:
    class Spy:
        def __init__(self, core: Any) -> None:
            self.core = core

        def __getattr__(self, name: str) -> Any:
            return getattr(self.core, name)

        def execute_pass(self, now_ms: float) -> Any:
            passes.append(rank.rank_id)
            return self.core.execute_pass(now_ms)

    rank.core = Spy(rank.core)


def test_a_head_that_can_never_run_is_ended_on_request() -> None:
    driven = queued_only()
    driven.send(0, 2, 4)
    assert driven.component.end_stuck_head(0.0) is None  # not before it was tried
    assert not driven.drive(0.0)
    given_up = driven.component.end_stuck_head(3.0, driven.tokens)
    assert given_up is not None
    assert given_up.stuck is not None
    assert given_up.stuck.reason is FailReason.BUDGET_TOO_SMALL
    assert [(output.request_id, output.rejected) for output in given_up.effects.outputs] == [(1, True)]
    assert driven.component.in_flight == 1
    assert driven.component.end_stuck_head(3.0) is None
    assert driven.drive(3.0).admissions[0].request_id == 2


def test_retries_of_sglang_end_within_one_drive() -> None:
    config = EngineConfig(
        backend="sglang",
        num_gpu_blocks=40,
        block_size=4,
        prefill_decode_interval=3,
        timing_model=FixedTiming(prefill_ms=10.0, decode_ms=0.0),
    )
    driven = Driven(config)
    driven.send(0, 1, 8, 1)
    first = driven.drive(0.0)
    driven.deliver(first)
    rank = driven.component.ranks[0]
    assert rank is not None
    assert (rank.core.prefill_countdown, rank.in_flight, rank.drained) == (3, 0, False)
    assert not driven.drive(10.0)
    assert rank.core.prefill_countdown == 0
    assert driven.component.drained
    driven.component.check_integrity()


def test_a_frontier_that_does_not_match_the_ranks_is_found() -> None:
    driven, _ = flying()
    driven.component.check_integrity()
    driven.component.ready.add(0)
    with pytest.raises(IntegrityError, match=r"ready \{0\}"):
        driven.component.check_integrity()


class Failing(TimingL):
    def predict_decode_ms(self, *_: int) -> float:
        raise ZeroDivisionError("no such model")


def test_a_pass_that_fails_poisons_the_component_with_the_first_reason() -> None:
    driven = Driven(EngineConfig(block_size=4), workers=2, dp_size=2, timing=Failing())
    driven.send(1, 1, 4, 3)
    driven.send(2, 2, 4, 3)
    first, second = driven.drive(0.0), driven.drive(0.0)
    driven.deliver(first)
    with pytest.raises(TimingError, match="no such model"):
        driven.drive(first.end_ms)
    assert driven.component.poison_reason is not None
    assert driven.component.poison_reason.startswith("rank 1: ")
    calls: list[Callable[[], Any]] = [
        lambda: driven.drive(9.0),
        lambda: driven.deliver(second),
        lambda: driven.send(3, 3, 4),
        lambda: driven.component.apply_command(0, Submit(Request(4, [1], 1)), 9.0),
        lambda: driven.component.apply_target_count(3),
        lambda: driven.component.mark_worker_ready(0),
        driven.component.remove_drained,
        lambda: driven.component.end_stuck_head(9.0),
    ]
    for call in calls:
        with pytest.raises(PoisonedError, match=r"rank 1: .*no such model"):
            call()
    assert driven.component.in_flight == 2
