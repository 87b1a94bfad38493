"""Rules of an attention-DP group (spec/engine-contract.md section 6), and that it is a worker of the compiled loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.config import EngineConfig, FixedTiming, SglangConfig
from kvsim.contract import (
    Applied,
    CancelRequest,
    CommandContext,
    InternalEffects,
    RankIdentity,
    Request,
    SameTimestampRetry,
    Submit,
)
from kvsim.errors import CommandError, ConfigError, InternalWorkDueError, PoisonedError, TimingError
from kvsim.group import EngineGroup, merge_retries, runnable_ranks
from kvsim.rank import SchedulerRank
from kvsim.replay.component import TokenTimes
from replay_ways import request_lists, requests_of, run_kernel

CONFIG = EngineConfig(
    num_gpu_blocks=64,
    block_size=4,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    timing_model=FixedTiming(prefill_ms=10.0, decode_ms=4.0),
)


class Lengths:
    """A prefill takes a millisecond per token, a decode one millisecond."""

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        return float(mean_isl - mean_prefix)

    def predict_decode_ms(self, *_: int) -> float:
        return 1.0


def submit(group: EngineGroup, dp_rank: int, request_id: int, count: int, out: int = 1, at: float = 0.0) -> Any:
    return group.apply_command(dp_rank, Submit(Request(request_id, [7] * count, out)), at)


def digests(group: EngineGroup) -> list[str]:
    return [rank.digest() for rank in group.ranks]


def refused(group: EngineGroup, call: Callable[[], Any], match: str) -> None:
    before = digests(group), group.pass_in_flight, group.wave_step
    with pytest.raises(CommandError, match=match):
        call()
    assert before == (digests(group), group.pass_in_flight, group.wave_step)
    assert group.poison_reason is None


# ---------------------------------------------------------------- a rank that can do what the engines here cannot


class Fake:
    """A rank with settable answers; what it is told is in `calls`."""

    def __init__(self, identity: RankIdentity) -> None:
        self.identity = identity
        self.calls: list[tuple[Any, ...]] = []
        self.deadline: float | None = None
        self.ready = self.waiting = False
        self.drained = True
        self.early = 0.0
        self.fails: str | None = None

    prefill_countdown = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, *arguments, *named.values()))
            if self.fails == name:
                raise ZeroDivisionError("of the rank")
            return InternalEffects(kv_events=("event",)) if name == "process_internal_work" else name  # type: ignore[arg-type]

        return call

    def next_internal_deadline_ms(self) -> float | None:
        return self.deadline

    def is_ready(self) -> bool:
        return self.ready

    def waiting_for_external_command(self) -> bool:
        return self.waiting

    def is_drained(self) -> bool:
        return self.drained

    def execute_pass(self, now_ms: float) -> Any:
        rank = SchedulerRank(self.identity, CONFIG)
        rank.apply_command(Submit(Request(1, [1], 1)), CommandContext(now_ms))
        done = rank.execute_pass(now_ms)
        done.end_ms -= self.early
        return done


def fakes(dp_size: int = 2) -> tuple[EngineGroup, list[Any]]:
    group = EngineGroup(5, dp_size, Fake)  # type: ignore[arg-type]
    return group, list(group.ranks)


# ---------------------------------------------------------------- construction


def test_ranks_come_from_the_factory_in_order() -> None:
    group = EngineGroup(3, 4, lambda identity: SchedulerRank(identity, CONFIG))
    assert [rank.identity for rank in group.ranks] == [RankIdentity(3, rank, 4) for rank in range(4)]
    assert group.ranks[2].identity.seed_offset == 14
    assert (group.is_ready(), group.is_drained(), group.wave_step) == (False, True, 0)


def test_a_rank_that_cannot_be_made_is_named() -> None:
    def factory(identity: RankIdentity) -> SchedulerRank:
        if identity.dp_rank == 2:
            raise ZeroDivisionError("no rank today")
        return SchedulerRank(identity, CONFIG)

    with pytest.raises(ConfigError, match="rank 2: no rank today"):
        EngineGroup(0, 3, factory)
    with pytest.raises(ConfigError, match=r"rank 0: worker_id: seed offset overflow"):
        EngineGroup.from_config(CONFIG, worker_id=2**64 - 1, dp_size=2)


@pytest.mark.parametrize("dp_size", [0, -1, True, 1.5])
def test_a_group_has_at_least_one_rank(dp_size: Any) -> None:
    with pytest.raises(ConfigError, match="dp_size: must be an int >= 1"):
        EngineGroup(0, dp_size, lambda identity: SchedulerRank(identity, CONFIG))


def test_each_rank_gets_its_share_of_an_sglang_chunk() -> None:
    whole = EngineConfig.for_backend(
        "sglang", block_size=16, sglang=SglangConfig(chunked_prefill_size=112, schedule_conservativeness=1.5)
    )
    share = EngineGroup.from_config(whole, dp_size=2).ranks[1].config.sglang
    assert (share.chunked_prefill_size, share.schedule_conservativeness) == (48, 1.5 * 0.3)
    assert whole.for_attention_dp(16).sglang.chunked_prefill_size == 16
    assert whole.for_attention_dp(1) is whole
    assert CONFIG.for_attention_dp(4) is CONFIG


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("now", [-0.5, math.inf, math.nan, None, True])
def test_a_time_that_is_none_is_refused(now: Any) -> None:
    group = EngineGroup.from_config(CONFIG, dp_size=2)
    refused(group, lambda: submit(group, 0, 1, 4, at=now), "now_ms: must be finite and >= 0, got")
    refused(group, lambda: group.execute_pass(now), "now_ms: must be finite and >= 0, got")
    refused(group, lambda: group.process_internal_work(now), "now_ms: must be finite and >= 0, got")


@pytest.mark.parametrize("dp_rank", [-1, 2, True, None])
def test_a_rank_that_does_not_exist_is_refused(dp_rank: Any) -> None:
    group = EngineGroup.from_config(CONFIG, dp_size=2)
    refused(group, lambda: submit(group, dp_rank, 1, 4), "dp_rank: must lie in 0 <= dp_rank < 2, got")


def test_a_refused_command_does_not_poison() -> None:
    group = EngineGroup.from_config(CONFIG, dp_size=2)
    submit(group, 1, 1, 4)
    refused(group, lambda: submit(group, 1, 1, 4), "already active")
    assert submit(group, 0, 1, 4).result.request_id == 1  # another rank knows nothing of it


def test_a_command_while_internal_work_is_due_has_to_be_repeated() -> None:
    group, ranks = fakes()
    ranks[1].deadline = 7.0
    command = CancelRequest(1)
    assert group.apply_command(0, command, 6.9) == "apply_command"
    with pytest.raises(InternalWorkDueError, match=r"internal work of 7\.0 is due at 7\.0"):
        group.apply_command(0, command, 7.0)
    assert isinstance(InternalWorkDueError(""), CommandError)
    assert group.poison_reason is None
    assert [name for name, *_ in ranks[0].calls] == ["apply_command"]
    assert group.process_internal_work(7.0) == (InternalEffects(), InternalEffects(kv_events=("event",)))  # type: ignore[arg-type]
    ranks[1].deadline = None
    assert group.apply_command(0, command, 7.0) == "apply_command"


def test_a_command_to_an_idle_rank_knows_that_its_sibling_is_executing() -> None:
    group, ranks = fakes()
    ranks[0].ready = True
    group.execute_pass(0.0)
    for dp_rank in (0, 1):
        group.apply_command(dp_rank, CancelRequest(1), 1.0)
    (_, _, _, mine), (_, _, context, none) = ranks[0].calls[-1], ranks[1].calls[-1]
    assert context == CommandContext(1.0, True)
    assert mine is not None
    assert none is None


def test_what_is_cancelled_during_a_pass_is_withdrawn_from_it() -> None:
    group = EngineGroup.from_config(CONFIG, dp_size=2)
    submit(group, 0, 1, 4, 2)
    submit(group, 1, 2, 4, 2)
    executed = group.execute_pass(0.0)
    assert executed is not None
    effects = group.apply_command(0, CancelRequest(1), 1.0)
    assert (effects.result, effects.suppressed_pending_output) == (Applied(), True)
    first, second = group.complete_pass(executed.pass_id, executed.end_ms)
    assert (list(first.outputs), [output.request_id for output in second.outputs]) == ([], [2])


# ---------------------------------------------------------------- the pass


def test_the_slowest_rank_ends_the_group() -> None:
    group = EngineGroup.from_config(CONFIG, dp_size=3, timing=Lengths())
    submit(group, 0, 1, 4)
    submit(group, 2, 2, 8)
    executed = group.execute_pass(0.5)
    assert executed is not None
    assert (executed.start_ms, executed.end_ms) == (0.5, 8.5)
    assert (executed.participating, executed.executed) == (3, (0, 2))
    assert [len(effects.admissions) for effects in executed.start_effects] == [1, 0, 1]
    assert group.pass_in_flight is executed
    assert not group.is_ready()
    assert not group.is_drained()
    effects = group.complete_pass(executed.pass_id, executed.end_ms)
    metrics = [shown.forward_pass_metrics for shown in effects]
    assert [item.duration_ms for item in metrics] == [8.0, 8.0, 8.0]
    assert [item.num_prefill_requests for item in metrics] == [1, 0, 1]
    assert group.is_drained()


def test_without_a_runnable_rank_there_is_no_pass() -> None:
    group = EngineGroup.from_config(CONFIG, dp_size=2)
    assert group.execute_pass(0.0) is None
    assert group.wave_step == 0
    assert group.pass_in_flight is None


def test_one_pass_at_a_time() -> None:
    group = EngineGroup.from_config(CONFIG, dp_size=2)
    submit(group, 0, 1, 4, 3)
    executed = group.execute_pass(0.0)
    assert executed is not None
    refused(group, lambda: group.execute_pass(1.0), "execute_pass: pass 0 is in flight")


def test_the_end_of_a_pass_has_its_id_and_is_not_early() -> None:
    group = EngineGroup.from_config(CONFIG, dp_size=2)
    refused(group, lambda: group.complete_pass(0, 99.0), "pass 0 is not in flight, none is")
    submit(group, 0, 1, 4, 3)
    executed = group.execute_pass(1.0)
    assert executed is not None
    refused(group, lambda: group.complete_pass(1, 99.0), "pass 1 is not in flight, 0 is")
    for early in (10.9, math.nan, math.inf):
        refused(group, lambda end=early: group.complete_pass(0, end), "end_ms: must be finite and >= 11")
    group.complete_pass(0, 11.0)
    refused(group, lambda: group.complete_pass(0, 11.0), "pass 0 is not in flight, none is")


def test_a_late_wall_clock_changes_nothing_but_the_wall_clock() -> None:
    group = EngineGroup.from_config(CONFIG, dp_size=2)
    submit(group, 0, 1, 4, 3)
    executed = group.execute_pass(0.0)
    assert executed is not None
    effects = group.complete_pass(0, 1000.0)
    assert [shown.forward_pass_metrics.duration_ms for shown in effects] == [executed.end_ms] * 2


def test_what_arrives_during_a_pass_waits_for_every_rank() -> None:
    group = EngineGroup.from_config(CONFIG, dp_size=2, timing=Lengths())
    submit(group, 0, 1, 8)
    executed = group.execute_pass(0.0)
    assert executed is not None
    submit(group, 1, 2, 4, at=4.0)
    group.complete_pass(0, executed.end_ms)
    later = group.execute_pass(executed.end_ms)
    assert later is not None
    assert (later.executed, later.end_ms) == ((1,), 12.0)


def test_wave_steps_count_passes_until_every_rank_is_drained() -> None:
    group = EngineGroup.from_config(CONFIG, dp_size=2)
    submit(group, 0, 1, 4, 3)
    steps = []
    now = 0.0
    while (executed := group.execute_pass(now)) is not None:
        steps.append((executed.pass_id, group.wave_step))
        now = executed.end_ms
        group.complete_pass(executed.pass_id, now)
    assert steps == [(0, 1), (1, 2), (2, 3)]
    assert group.wave_step == 0
    submit(group, 0, 2, 4, 3, at=now)
    executed = group.execute_pass(now)
    assert executed is not None
    group.complete_pass(3, executed.end_ms)
    assert group.wave_step == 1
    group.apply_command(0, CancelRequest(2), executed.end_ms)
    assert group.wave_step == 0


def test_every_rank_is_told_of_the_wave_and_of_what_the_others_did() -> None:
    group, ranks = fakes(3)
    ranks[1].ready = True
    ranks[1].drained = False
    for step in (0, 1):
        executed = group.execute_pass(float(10 * step))
        assert executed is not None
        group.complete_pass(step, executed.end_ms)
        for dp_rank, rank in enumerate(ranks):
            told = [call for call in rank.calls if call[0] in ("prepare_group_pass", "observe_group_pass")]
            assert told[-2:] == [
                ("prepare_group_pass", step, 3),
                ("observe_group_pass", dp_rank == 1, True, True),
            ]
    ends = [[call[0] for call in rank.calls if call[0].startswith("complete")] for rank in ranks]
    assert ends == [["complete_idle_group_pass"] * 2, ["complete_pass"] * 2, ["complete_idle_group_pass"] * 2]


@pytest.mark.parametrize(
    ("hints", "merged"),
    [
        ("NCRE", "COUNTDOWN"),
        ("NER", "RETRY"),
        ("NE", "EXHAUSTED"),
        ("N", "NOT_APPLICABLE"),
        ("", "NOT_APPLICABLE"),
    ],
)
def test_hints_of_the_ranks_become_one(hints: str, merged: str) -> None:
    letters = {hint.name[0]: hint for hint in SameTimestampRetry}
    assert merge_retries([letters[letter] for letter in hints]) is SameTimestampRetry[merged]
    assert merge_retries([letters[letter] for letter in reversed(hints)]) is SameTimestampRetry[merged]


# ---------------------------------------------------------------- readiness and internal work


def test_a_group_waits_for_a_command_if_all_ready_ranks_do() -> None:
    group, ranks = fakes(3)
    assert not group.waiting_for_external_command()
    ranks[0].ready = ranks[0].waiting = True
    assert group.waiting_for_external_command()
    assert not group.is_ready()
    assert group.execute_pass(0.0) is None
    ranks[2].ready = True
    assert not group.waiting_for_external_command()
    assert group.is_ready()
    assert runnable_ranks(group.ranks) == [2]
    group.execute_pass(0.0)
    ranks[2].ready = False
    assert not group.waiting_for_external_command()


def test_internal_work_is_masked_while_a_pass_is_in_flight() -> None:
    group, ranks = fakes(3)
    ranks[0].deadline, ranks[1].deadline, ranks[2].deadline = 9.0, 5.0, 7.0
    assert group.next_internal_deadline_ms() == 5.0
    ranks[0].ready = True
    executed = group.execute_pass(0.0)
    assert executed is not None
    assert group.next_internal_deadline_ms() is None
    assert group.process_internal_work(8.0) == (InternalEffects(),) * 3
    group.complete_pass(0, executed.end_ms)
    group.process_internal_work(8.0)
    called = [[call for call in rank.calls if call[0] == "process_internal_work"] for rank in ranks]
    assert called == [[], [("process_internal_work", 8.0, False)], [("process_internal_work", 8.0, False)]]


# ---------------------------------------------------------------- poison


def poisoned(group: EngineGroup, reason: str) -> None:
    assert group.poison_reason == reason
    assert not group.is_ready()
    assert not group.is_drained()
    assert not group.waiting_for_external_command()
    calls: list[Callable[[], Any]] = [
        lambda: group.apply_command(0, CancelRequest(1), 1.0),
        lambda: group.execute_pass(1.0),
        lambda: group.complete_pass(0, 99.0),
        lambda: group.process_internal_work(1.0),
    ]
    for call in calls:
        with pytest.raises(PoisonedError) as caught:
            call()
        assert reason in str(caught.value)
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize("method", ["prepare_group_pass", "observe_group_pass"])
def test_a_failure_around_the_pass_poisons(method: str) -> None:
    group, ranks = fakes()
    ranks[0].ready = True
    ranks[1].fails = method
    with pytest.raises(ZeroDivisionError):
        group.execute_pass(0.0)
    poisoned(group, "rank 1: of the rank")


def test_a_failure_at_the_end_of_a_pass_poisons() -> None:
    group, ranks = fakes()
    ranks[0].ready = True
    ranks[1].fails = "complete_idle_group_pass"
    executed = group.execute_pass(0.0)
    assert executed is not None
    with pytest.raises(ZeroDivisionError):
        group.complete_pass(0, executed.end_ms)
    poisoned(group, "rank 1: of the rank")


def test_a_failure_of_internal_work_poisons() -> None:
    group, ranks = fakes()
    ranks[0].deadline = 1.0
    ranks[0].fails = "process_internal_work"
    with pytest.raises(ZeroDivisionError):
        group.process_internal_work(1.0)
    poisoned(group, "rank 0: of the rank")


def test_a_command_that_breaks_its_rank_poisons() -> None:
    group, ranks = fakes()
    ranks[1].fails = "apply_command"
    with pytest.raises(ZeroDivisionError):
        group.apply_command(1, CancelRequest(1), 0.0)
    ranks[0].fails = "process_internal_work"
    poisoned(group, "rank 1: of the rank")


def test_a_pass_that_ends_before_it_starts_poisons() -> None:
    group, ranks = fakes()
    ranks[0].ready = True
    ranks[0].early = 100.0
    with pytest.raises(TimingError, match="ended before it started"):
        group.execute_pass(5.0)
    assert group.poison_reason is not None
    assert group.poison_reason.startswith("rank 0: a pass of 5.0 ended before it started")


def test_a_timing_model_that_fails_poisons_and_its_error_comes_through() -> None:
    class Failing(Lengths):
        def predict_prefill_ms(self, *_: int) -> float:
            raise ValueError("out of range")

    group = EngineGroup.from_config(CONFIG, dp_size=2, timing=Failing())
    submit(group, 1, 1, 4)
    with pytest.raises(TimingError) as caught:
        group.execute_pass(0.0)
    assert isinstance(caught.value.__cause__, ValueError)
    poisoned(group, f"rank 1: {caught.value}")


# ---------------------------------------------------------------- the prefill interval of a group


def interval_group(interval: int, **fields: Any) -> EngineGroup:
    config = EngineConfig.for_backend(
        "sglang",
        num_gpu_blocks=400,
        block_size=4,
        prefill_decode_interval=interval,
        timing_model=FixedTiming(prefill_ms=10.0, decode_ms=4.0),
        **fields,
    )
    return EngineGroup.from_config(config, dp_size=2)


def countdowns(group: EngineGroup) -> list[int]:
    return [rank.prefill_countdown for rank in group.ranks]


def whole_pass(group: EngineGroup, now: float) -> Any:
    executed = group.execute_pass(now)
    assert executed is not None
    group.complete_pass(executed.pass_id, executed.end_ms)
    return executed


def test_a_prefill_of_one_rank_holds_back_all_and_idle_ranks_count_with_them() -> None:
    group = interval_group(3)
    submit(group, 0, 1, 8, 20)
    now = whole_pass(group, 0.0).end_ms
    assert countdowns(group) == [3, 3]
    now = whole_pass(group, now).end_ms
    assert countdowns(group) == [2, 2]
    submit(group, 1, 2, 8, 20, at=now)
    later = whole_pass(group, now)
    assert later.executed == (0, 1)
    assert [list(effects.admissions) for effects in later.start_effects] == [[], []]
    assert countdowns(group) == [1, 1]
    now = whole_pass(group, later.end_ms).end_ms
    assert countdowns(group) == [0, 0]
    assert len(whole_pass(group, now).start_effects[1].admissions) == 1
    assert countdowns(group) == [3, 3]


def test_the_countdown_of_a_group_is_in_the_result_of_its_pass() -> None:
    group = interval_group(3)
    submit(group, 0, 1, 8, 1)
    first = whole_pass(group, 0.0)
    assert (first.same_timestamp_retry is SameTimestampRetry.COUNTDOWN, first.countdown) == (False, 0)
    assert not group.is_drained()
    submit(group, 1, 2, 8, 1, at=first.end_ms)
    left = []
    while countdowns(group)[1]:
        waited = whole_pass(group, first.end_ms)
        assert waited.executed == (1,)  # a rank that only counts does not run beside one with work
        assert (waited.end_ms, waited.same_timestamp_retry) == (first.end_ms, SameTimestampRetry.COUNTDOWN)
        left.append(waited.countdown)
    assert left == [2, 1, 0]
    assert countdowns(group) == [0, 0]


def test_the_ratio_returns_to_its_start_only_after_a_round_without_any_work() -> None:
    def ratio(dp_rank: int) -> float:
        return float(group.ranks[dp_rank]._state.view("radix")[0]["new_token_ratio"])

    group = interval_group(2)
    start = ratio(1)
    submit(group, 0, 1, 8, 40)
    submit(group, 1, 2, 8, 4)
    now = 0.0
    for _ in range(4):
        now = whole_pass(group, now).end_ms
    lowered = ratio(1)
    assert lowered < start
    # Rank 0 prefills again, so that rank 1 has to wait beside it while it decodes.
    submit(group, 0, 3, 8, 40, at=now)
    now = whole_pass(group, now).end_ms
    submit(group, 1, 4, 8, 2, at=now)
    now = whole_pass(group, now).end_ms
    assert countdowns(group) == [1, 1]
    assert ratio(1) == lowered
    for request_id in (1, 3):
        group.apply_command(0, CancelRequest(request_id), now)
    whole_pass(group, now)
    assert ratio(1) == start


# ---------------------------------------------------------------- the compiled loop


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    items=request_lists(),
    backend=st.sampled_from(["vllm", "sglang"]),
    dp_size=st.sampled_from([1, 2, 3]),
    interval=st.sampled_from([0, 2]),
)
def test_a_group_driven_by_hand_is_a_worker_of_a_replay(
    items: list[dict[str, Any]], backend: Any, dp_size: int, interval: int
) -> None:
    config = EngineConfig.for_backend(
        backend,
        num_gpu_blocks=64,
        block_size=4,
        max_num_seqs=3,
        prefill_decode_interval=interval if backend == "sglang" else 0,
        sglang=SglangConfig(chunked_prefill_size=32),
        timing_model=FixedTiming(prefill_ms=10.0, decode_ms=3.0),
    )
    run = run_kernel(items, config, dp_size=dp_size)
    group = EngineGroup.from_config(config, dp_size=dp_size)
    tokens = TokenTimes()
    queue = sorted(enumerate(requests_of(run.workload)), key=lambda item: item[1].arrival_ms or 0.0)
    now, placed = 0.0, 0
    flying = None
    while True:
        if flying is not None and flying.end_ms == now:
            for effects in group.complete_pass(flying.pass_id, now):
                for output in effects.outputs:
                    if output.token_id is not None:
                        tokens.record_token(output.request_id, output.token_id, now)
            flying = None
        while queue and (queue[0][1].arrival_ms or 0.0) <= now:
            _, request = queue.pop(0)
            group.apply_command(placed % dp_size, Submit(request), now)
            placed += 1
        if flying is None and group.is_ready():
            flying = group.execute_pass(now)
            assert flying is not None
            if flying.end_ms == now:
                continue
        times = [request.arrival_ms or 0.0 for _, request in queue[:1]]
        times += [flying.end_ms] if flying is not None else []
        if not times:
            break
        now = min(times)
    assert group.is_drained()
    assert digests(group) == [rank.digest() for rank in run.ranks]
    for row in run.records:
        mine = tokens.times.get((int(row["id_hi"]) << 64) | int(row["id_lo"]), [])
        assert row["output_tokens"] == len(mine)
        assert np.array_equal(mine[:1] or [math.nan], [row["first_token_ms"]], equal_nan=True)
        assert np.array_equal(mine[-1:] or [math.nan], [row["last_token_ms"]], equal_nan=True)


def test_the_names_are_public() -> None:
    assert kvsim.EngineGroup is EngineGroup
