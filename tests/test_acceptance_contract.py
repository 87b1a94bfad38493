"""Scenarios A and D of the contract's acceptance list that one rank of the paged engines can show."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvsim.config import FixedTiming
from kvsim.contract import (
    Applied,
    CancelRequest,
    CommandContext,
    Noop,
    PressureState,
    RankIdentity,
)
from kvsim.errors import ConfigError, TimingError
from kvsim.timing import modelled_ms
from support import Engine

BOTH = pytest.mark.parametrize("ruleset", ["dynamo", "dynamo-1.3"])


def fixture_r(**fields: Any) -> Engine:
    fields = {
        "num_gpu_blocks": 8,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "timing_model": FixedTiming(prefill_ms=10, decode_ms=10),
        **fields,
    }
    return Engine(RankIdentity(1, 0, 1), **fields)


@BOTH
@pytest.mark.parametrize(
    ("planned", "discard", "result", "suppressed", "left"),
    [([5, 6], False, Applied(), True, 0), ([5], False, Noop(), False, 1), ([5], True, Noop(), True, 0)],
    ids=["a1_ordinary_cancel", "a2_finished_keeps_output", "a3_explicit_discard"],
)
def test_cancel_mid_pass(
    ruleset: str, planned: list[int], discard: bool, result: Any, suppressed: bool, left: int
) -> None:
    engine = fixture_r(ruleset=ruleset)
    engine.submit(90001, [1, 2, 3, 4], planned=planned)
    outcome = engine.rank.execute_pass(0.0)
    assert [output.request_id for output in outcome.pending.effects.outputs] == [90001]
    context = CommandContext(1.0, pass_in_flight=True)
    effects = engine.rank.apply_command(CancelRequest(90001, discard), context, outcome.pending)
    assert (effects.result, effects.suppressed_pending_output) == (result, suppressed)
    assert len(outcome.pending.effects.outputs) == left
    # KV events, metrics of the work and admissions of the pass are never withdrawn.
    shown = engine.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert shown.forward_pass_metrics.num_prefill_requests == 1
    assert shown.metrics.running_requests == 0


def test_cancelling_leaves_the_outputs_of_others_in_the_pending_pass() -> None:
    engine = fixture_r()
    for request_id in (1, 2):
        engine.submit(request_id, [request_id] * 4, planned=[request_id])
    outcome = engine.rank.execute_pass(0.0)
    context = CommandContext(1.0, pass_in_flight=True)
    engine.rank.apply_command(CancelRequest(1, True), context, outcome.pending)
    shown = engine.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert [output.request_id for output in shown.outputs] == [2]


@BOTH
def test_a10_preemption_evidence(ruleset: str) -> None:
    config = {"num_gpu_blocks": 6, "enable_prefix_caching": False, "ruleset": ruleset}
    engine = fixture_r(**config)
    engine.submit(92001, range(8), 8)
    engine.submit(92002, range(100, 108), 8)
    events = []
    while not events:
        step = engine.step()
        events = list(step.start.pressure_events)
        engine.now = max(step.end_ms, step.start_ms + 1)
    [event] = events
    assert (event.at_ms, event.kind, event.request_id) == (step.start_ms, "vllm_preemption", 92002)
    assert (event.state_before.running_requests, event.state_before.waiting_requests) == (2, 0)
    assert (event.state_after.running_requests, event.state_after.waiting_requests) == (1, 1)
    assert event.request_active_blocks_before > 0
    assert event.state_after.active_blocks < event.state_before.active_blocks
    assert event.logical_available_blocks_before is None
    assert event.required_blocks_before is None
    assert isinstance(event.state_before, PressureState)


def test_the_seed_offset_is_worker_times_size_plus_rank() -> None:
    assert RankIdentity(3, 2, 4).seed_offset == 14


def test_a_seed_offset_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="worker_id: seed offset overflow"):
        RankIdentity(2**64 - 1, 0, 2)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (0, 0), (-1, 1)])
def test_a_rank_outside_its_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ConfigError):
        RankIdentity(0, rank, size)


def test_ranks_with_different_offsets_draw_different_bursts() -> None:
    def bursts(identity: RankIdentity) -> list[int]:
        engine = Engine(
            identity,
            num_gpu_blocks=500,
            aic_nextn=2,
            aic_nextn_accept_rates="0.5,0.5",
            timing_model=FixedTiming(prefill_ms=1, decode_ms=1),
        )
        engine.submit(1, range(4), 100)
        return [len(step.outputs) for step in engine.drain()]

    assert bursts(RankIdentity(0)) == bursts(RankIdentity(0))
    assert bursts(RankIdentity(0)) != bursts(RankIdentity(1))
    # Only the offset counts: worker 1 of single ranks draws like rank 1 of worker 0.
    assert bursts(RankIdentity(1)) == bursts(RankIdentity(0, 1, 2))


# ---------------------------------------------------------------- D


@pytest.mark.parametrize(
    ("raw", "ratio", "ms"),
    [
        (12.0, 3.0, 4.0),
        (12.0, 0.0, 12.0),
        (0.0, 3.0, 0.0),
        (1 / 3, 1.0, 0.333333),  # whole nanoseconds
        (1e-7, 1.0, 0.0),  # 0.1 ns
        (10.0, 3.0, 3.333333),
    ],
)
def test_d1_durations_are_scaled_and_rounded_to_nanoseconds(raw: float, ratio: float, ms: float) -> None:
    assert modelled_ms(raw, ratio) == pytest.approx(ms, abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_d1_what_is_no_duration_or_ratio_is_refused(bad: float) -> None:
    word = "negative" if bad == -1.0 else "non-finite"
    with pytest.raises(TimingError, match=f"{word} duration"):
        modelled_ms(bad, 1.0)
    with pytest.raises(TimingError, match=f"{word} ratio"):
        modelled_ms(1.0, bad)


@BOTH
def test_d2_fixed_times_do_not_depend_on_the_batch_and_nothing_costs_nothing(ruleset: str) -> None:
    engine = Engine(ruleset=ruleset, num_gpu_blocks=16, timing_model=FixedTiming(prefill_ms=7, decode_ms=3))
    assert engine.step().end_ms == 0.0
    engine.submit(1, range(4), 3)
    engine.submit(2, range(50, 54), 3)
    # The first tokens cost a decode under 1.3 only.
    first = {"dynamo": 7.0, "dynamo-1.3": 10.0}[ruleset]
    assert [step.end_ms for step in engine.drain()] == [first, first + 3, first + 6]


def prefill_ms(tokens: int) -> float:
    engine = Engine(worker_type="prefill", num_gpu_blocks=1000, enable_prefix_caching=False)
    engine.submit(1, [0] * tokens)
    return engine.step().end_ms


@pytest.mark.parametrize(
    ("tokens", "ms"), [(4, 16.5621604959824), (8, 16.6229144639), (1000, 32.1058589), (1024, 32.49071190)]
)
def test_d3_the_polynomial_prefill(tokens: int, ms: float) -> None:
    assert prefill_ms(tokens) == pytest.approx(ms, abs=1e-6)


# One sequence of 32, 64 tokens in a pool of 64; 8 tokens of 2**20 are u = 8e-6.
@pytest.mark.parametrize(
    ("blocks", "length", "ms"), [(16, 32, 26.31), (16, 16, 17.63375), (16, 64, 34.01), (2**18, 8, 5.74041)]
)
def test_d3_the_polynomial_decode(blocks: int, length: int, ms: float) -> None:
    engine = Engine(num_gpu_blocks=blocks, enable_prefix_caching=False)
    engine.submit(1, [0] * (length - 1), 2)
    start = engine.step().end_ms
    assert engine.step().end_ms - start == pytest.approx(ms, abs=2e-5)


def test_d3_shared_prompts_count_once_per_sequence_and_usage_ends_at_one() -> None:
    engine = Engine(num_gpu_blocks=16, max_num_seqs=4)
    for request_id in range(3):
        engine.submit(request_id, list(range(40)), 2)
    start = engine.step().end_ms
    # 3 sequences of 41 tokens are 123 > 64: u = 1.
    assert engine.step().end_ms - start == pytest.approx(34.01, abs=1e-6)


@pytest.mark.parametrize(("worker", "out", "delay"), [("prefill", 1, 128.0), ("prefill", 2, None), ("decode", 1, None)])
def test_d5_only_a_finished_prefill_worker_tells_a_delay(worker: str, out: int, delay: float | None) -> None:
    engine = Engine(
        worker_type=worker,
        num_gpu_blocks=64,
        kv_transfer_bandwidth=1.0,
        kv_transfer_bytes_per_token=1_000_000,
    )
    engine.submit(1, range(128), out)
    [output] = engine.step().outputs
    assert output.handoff_delay_ms == delay


@pytest.mark.parametrize(("bandwidth", "size"), [(None, 1000), (0.0, 1000), (1.0, None)])
def test_d4_without_bytes_or_bandwidth_there_is_no_delay(bandwidth: float | None, size: int | None) -> None:
    engine = Engine(
        worker_type="prefill", num_gpu_blocks=64, kv_transfer_bandwidth=bandwidth, kv_transfer_bytes_per_token=size
    )
    engine.submit(1, range(100))
    assert engine.step().outputs[0].handoff_delay_ms is None


@BOTH
def test_d21_a_burst_is_several_outputs_of_one_pass_and_rejections_are_not_samples(ruleset: str) -> None:
    engine = Engine(
        ruleset=ruleset,
        num_gpu_blocks=8,
        max_num_batched_tokens=64,
        aic_nextn=1,
        aic_nextn_accept_rates="1",
        max_model_len=20,
    )
    engine.submit(1, range(4), 10)
    engine.submit(2, range(50, 54), 10)
    engine.step()
    engine.submit(3, range(20))  # rejected
    step = engine.step()
    assert [(output.request_id, output.rejected) for output in step.outputs] == [
        (1, False),
        (1, False),
        (2, False),
        (2, False),
        (3, True),
    ]
    assert step.effects.decode_acceptance == (4, 2)


@pytest.mark.parametrize(("rates", "mean"), [("0.7,0.5,0.2", 2.12), ("1,1,1", 4.0), ("0,1,1", 1.0), ("1,0,1", 2.0)])
def test_the_mean_burst_is_the_sum_of_the_products_of_the_rates(rates: str, mean: float) -> None:
    """vllm.md section 7: 1 + 0.7 + 0.7 * 0.5 + 0.7 * 0.5 * 0.2 = 2.12 tokens per pass."""
    engine = Engine(
        block_size=64,
        num_gpu_blocks=4096,
        max_num_batched_tokens=None,
        enable_prefix_caching=False,
        aic_nextn=3,
        aic_nextn_accept_rates=rates,
        timing_model=FixedTiming(prefill_ms=1, decode_ms=1),
    )
    for request_id in range(100):
        engine.submit(request_id, [1], 100_000)
    engine.step()
    counts = []
    for _ in range(250):
        outcome = engine.rank.execute_pass(engine.now)
        counts.append(outcome.pending.effects.decode_acceptance)
        engine.now = outcome.end_ms
    visible, forwards = np.sum(counts, axis=0)
    assert forwards == 25_000
    exact = rates != "0.7,0.5,0.2"
    assert visible / forwards == pytest.approx(mean, abs=1e-12 if exact else 0.02)
