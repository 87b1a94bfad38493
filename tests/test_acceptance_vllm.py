"""Scenarios R, A, V and N of the acceptance list that need one rank of the paged engines.

Names carry the number of the scenario. Values without a mark hold under both rule sets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kv_index import KvIndex
from kvsim.config import FixedTiming
from kvsim.contract import (
    Applied,
    CancelRequest,
    CommandContext,
    Noop,
    PressureState,
    RankIdentity,
    Removed,
    Request,
    Submit,
)
from kvsim.metrics import Welford
from support import Engine

BOTH = pytest.mark.parametrize("ruleset", ["dynamo", "dynamo-1.3"])
OLD, NEW = "dynamo-1.3", "dynamo"

#: kv-cache.md section 1.
HASH_1234, LOCAL_5678, HASH_5678 = 14643705804678351452, 16777012769546811212, 4945711292740353085
HASH_0123, LOCAL_4567, HASH_4567 = 9143094415614847814, 12124091508212882195, 9510318385840434533


def default(**fields: Any) -> Engine:
    """The default arguments of the V scenarios."""
    fields = {
        "num_gpu_blocks": 6,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 3,
        "enable_prefix_caching": False,
        **fields,
    }
    return Engine(**fields)


def fixed(**fields: Any) -> Engine:
    """Config R."""
    fields = {
        "num_gpu_blocks": 8,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "timing_model": FixedTiming(prefill_ms=10, decode_ms=10),
        **fields,
    }
    return Engine(RankIdentity(1), **fields)


# ---------------------------------------------------------------- R


@BOTH
@pytest.mark.parametrize("discard", [False, True])
def test_r1_cancelling_an_unfinished_request_mid_pass_withdraws_its_output(ruleset: str, discard: bool) -> None:
    engine = fixed(ruleset=ruleset)
    engine.submit(90001, [1, 2, 3, 4], planned=[5, 6])
    outcome = engine.rank.execute_pass(0.0)
    assert [output.token_id for output in outcome.pending.effects.outputs] == [5]
    effects = engine.rank.apply_command(
        CancelRequest(90001, discard), CommandContext(1.0, pass_in_flight=True), outcome.pending
    )
    assert effects.result == Applied()
    assert effects.retired_requests == (90001,)
    assert effects.suppressed_pending_output
    assert list(outcome.pending.effects.outputs) == []
    assert engine.active == 0


@BOTH
@pytest.mark.parametrize(("discard", "kept"), [(False, [5]), (True, [])])
def test_r2_r3_cancelling_what_finished_in_the_pass_keeps_its_output_unless_discarded(
    ruleset: str, discard: bool, kept: list[int]
) -> None:
    engine = fixed(ruleset=ruleset)
    engine.submit(90002, [1, 2, 3, 4], planned=[5])
    outcome = engine.rank.execute_pass(0.0)
    effects = engine.rank.apply_command(
        CancelRequest(90002, discard), CommandContext(1.0, pass_in_flight=True), outcome.pending
    )
    assert effects.result == Noop()
    assert effects.retired_requests == ()
    assert effects.suppressed_pending_output is discard
    shown = engine.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert [output.token_id for output in shown.outputs] == kept


# The pass that computes both prompts costs 10 (prefill), under 1.3 20 (and their first tokens): 50 either way.
@pytest.mark.parametrize(("ruleset", "number", "blocks", "active"), [(OLD, 5, 3, (6, 3)), (NEW, 6, 3, (6, 3))])
def test_r10_a_preemption_is_shown_at_pass_start(
    ruleset: str, number: int, blocks: int, active: tuple[int, int]
) -> None:
    engine = fixed(ruleset=ruleset, num_gpu_blocks=6, enable_prefix_caching=False)
    engine.submit(1, range(8), 8)
    engine.submit(2, range(100, 108), 8)
    seen = []
    for index in range(1, 17):
        step = engine.step()
        seen += [(index, step.start_ms, event) for event in step.start.pressure_events]
        engine.now = max(step.end_ms, step.start_ms + 1)
        if engine.rank.is_drained():
            break
        if len(seen) == 1 and index > number:
            break
    [(index, at_ms, event)] = seen
    assert (index, at_ms) == (number, 50.0)
    assert event.at_ms == 50.0
    assert event.kind == "vllm_preemption"
    assert event.request_id == 2
    assert event.state_before == PressureState(2, 0, active[0])
    assert event.state_after == PressureState(1, 1, active[1])
    assert event.request_active_blocks_before == blocks
    assert event.logical_available_blocks_before is None
    assert event.required_blocks_before is None


# ---------------------------------------------------------------- A


@pytest.mark.parametrize(
    ("values", "total", "variance"),
    [([], 0, 0.0), ([42], 42, 0.0), ([2, 4, 4, 4, 5, 5, 7, 9], 40, 4.0), ([100, 200, 300], 600, 20000 / 3)],
    ids=["a1", "a2", "a3", "a4"],
)
def test_a1_to_a4_welford_gives_the_population_variance(values: list[int], total: int, variance: float) -> None:
    stats = Welford(values)
    assert (stats.count, stats.sum) == (len(values), total)
    assert stats.variance == pytest.approx(variance, abs=1e-9)


@BOTH
@pytest.mark.parametrize("lengths", [[42], [2, 4, 4, 4, 5, 5, 7, 9], [100, 200, 300]])
def test_a2_to_a4_the_kernel_gives_the_same_variance_of_prompt_lengths(ruleset: str, lengths: list[int]) -> None:
    engine = Engine(ruleset=ruleset, num_gpu_blocks=1000, max_num_batched_tokens=None)
    for request_id, length in enumerate(lengths):
        engine.submit(request_id, [request_id] * length)
    fpm = engine.step().fpm
    assert fpm.num_prefill_requests == len(lengths)
    assert fpm.sum_prefill_tokens == Welford(lengths).sum
    assert fpm.var_prefill_length == pytest.approx(Welford(lengths).variance, rel=1e-12)


# ---------------------------------------------------------------- V, core


@BOTH
def test_v11_planned_tokens_are_emitted_exactly(ruleset: str) -> None:
    engine = default(ruleset=ruleset)
    engine.submit(1, [1, 2], planned=[101, 202, 303])
    assert [engine.step(float(at)).tokens for at in range(3)] == [[(1, 101)], [(1, 202)], [(1, 303)]]
    assert engine.rank.is_drained()


@pytest.mark.parametrize(("ruleset", "active"), [(OLD, 4), (NEW, 3)])
def test_v12_a_budget_shared_by_two_prompts_leaves_the_second_half_computed(ruleset: str, active: int) -> None:
    engine = default(ruleset=ruleset, max_num_batched_tokens=12)
    engine.submit(1, range(8), 2)
    engine.submit(2, range(8), 2)
    step = engine.step()
    assert len(step.outputs) == 1
    metrics = step.effects.metrics
    assert (metrics.running_requests, metrics.waiting_requests, metrics.active_blocks) == (2, 0, active)
    assert engine.ids("running") == [1, 2]
    assert [engine.row(request_id)["computed"] for request_id in (1, 2)] == [8, 4]
    assert engine.row(1)["generated"] == 1
    assert engine.status(2) == "running"


@BOTH
def test_v13_the_first_prompt_is_finished_before_the_second_gets_budget(ruleset: str) -> None:
    engine = default(ruleset=ruleset, num_gpu_blocks=16, max_num_batched_tokens=4)
    engine.submit(1, range(8), 4)
    engine.submit(2, range(8), 4)
    assert engine.step(0.0).outputs == []
    assert [request_id for request_id, _ in engine.step(1.0).tokens] == [1]
    assert engine.row(2)["computed"] == 0


# prefill of 8 tokens 16.6229144639; under 1.3 the first tokens also decode over 2 blocks of 4 tokens in 64:
# -25.74 / 64 + 54.01 / 8 + 5.74 = 12.0890625, together 28.7119769639. Whole nanoseconds.
@pytest.mark.parametrize(("ruleset", "first_token_ms"), [(OLD, 28.7119769639), (NEW, 16.6229144639)])
def test_v14_requests_of_one_pass_share_admission_and_first_token_times(ruleset: str, first_token_ms: float) -> None:
    engine = default(ruleset=ruleset, num_gpu_blocks=16, max_num_seqs=4)
    engine.submit(1, range(4))
    engine.submit(2, range(50, 54))
    step = engine.step()
    assert step.admitted == {1: 0, 2: 0}
    assert [request_id for request_id, _ in step.tokens] == [1, 2]
    assert step.start_ms == 0.0
    assert step.end_ms == pytest.approx(first_token_ms, abs=1e-6)


@BOTH
def test_v15_a_finished_prefill_tells_its_handoff_delay(ruleset: str) -> None:
    engine = default(
        ruleset=ruleset,
        num_gpu_blocks=8,
        max_num_seqs=1,
        enable_prefix_caching=True,
        worker_type="prefill",
        kv_transfer_bandwidth=1.0,
        kv_transfer_bytes_per_token=1_000_000,
    )
    engine.submit(1, range(8))
    [output] = engine.step().outputs
    assert output.completed
    assert output.handoff_delay_ms == 8.0


@BOTH
def test_v16_a_prompt_emits_its_first_token_in_the_pass_that_completes_it(ruleset: str) -> None:
    engine = default(ruleset=ruleset)
    engine.submit(1, range(8), 2)
    [output] = engine.step().outputs
    assert not output.completed
    assert engine.row(1)["generated"] == 1


def preempting(ruleset: str, **fields: Any) -> tuple[Engine, list[Any]]:
    """The workload of V17, run to the pass that preempts; the steps so far."""
    engine = default(ruleset=ruleset, max_num_batched_tokens=16, max_num_seqs=2, **fields)
    engine.submit(1, range(8), 8)
    engine.submit(2, range(100, 108), 8)
    steps = []
    while engine.rank.metrics().preemptions_total == 0:
        assert len(steps) < 16, "no preemption within 16 passes"
        steps.append(engine.step())
    return engine, steps


@BOTH
def test_v17_the_newest_running_request_is_preempted(ruleset: str) -> None:
    engine, _ = preempting(ruleset)
    row = engine.row(2)
    assert (engine.status(2), row["computed"], row["preemptions"]) == ("preempted", 0, 1)
    assert engine.ids("waiting")[0] == 2
    assert engine.rank.metrics().preemptions_total == 1


@BOTH
def test_v17_fifo_preempts_the_oldest_instead(ruleset: str) -> None:
    engine, _ = preempting(ruleset, preemption_mode="fifo")
    assert (engine.status(1), engine.status(2)) == ("preempted", "running")


@BOTH
def test_v18_a_blocked_head_holds_back_a_follower_that_would_fit(ruleset: str) -> None:
    engine = default(ruleset=ruleset, max_num_batched_tokens=16)
    engine.submit(1, range(16))
    engine.submit(2, range(12))
    engine.submit(3, range(4))
    step = engine.step()
    assert step.ended == [(1, False)]
    assert set(step.admitted) == {1}
    assert engine.ids("waiting") == [2, 3]
    assert engine.row(2)["computed"] == 0
    step = engine.step(max(step.end_ms, 1.0))
    assert 2 in step.admitted
    assert step.effects.metrics.preemptions_total == 0


@BOTH
def test_v19_an_oversized_prompt_is_rejected_and_the_next_one_runs(ruleset: str) -> None:
    engine = default(ruleset=ruleset, num_gpu_blocks=4, max_num_batched_tokens=32, max_num_seqs=2)
    engine.submit(1, range(20))
    engine.submit(2, range(4))
    step = engine.step()
    assert step.ended == [(2, False), (1, True)]  # rejections come last
    assert step.outputs[-1].token_id is None
    assert set(step.admitted) == {2}
    assert step.effects.metrics.preemptions_total == 0


@pytest.mark.parametrize(("ruleset", "allocated", "active"), [(OLD, 13, 4), (NEW, 12, 3)])
def test_v20_a_request_computed_beyond_its_allocation_is_covered_when_it_is_scheduled(
    ruleset: str, allocated: int, active: int
) -> None:
    engine = default(ruleset=ruleset, num_gpu_blocks=8, max_num_seqs=1, enable_prefix_caching=True)
    engine.submit(1, range(6), 16)
    engine.step()
    row = engine.rank._state.view("requests", writable=True)[:1]
    for name, value in {"length": 12, "generated": 6, "allocated": 6, "computed": 9, "next_seal": 12}.items():
        row[name] = value
    assert engine.row(1)["n_blocks"] == 2
    step = engine.step()
    assert len(step.outputs) == 1
    assert engine.row(1)["computed"] == 12
    assert engine.row(1)["allocated"] == allocated
    assert engine.active == active


@BOTH
def test_v21_passes_at_one_instant_run_two_prompts_to_their_end(ruleset: str) -> None:
    engine = default(ruleset=ruleset)
    engine.submit(1, range(8), 2)
    engine.submit(2, range(8), 2)
    # 8 tokens of the first; its decode and 7 of the second; the last of the second; its decode.
    assert len(engine.drain(20, at=0.0)) == 4
    metrics = engine.rank.metrics()
    assert (metrics.running_requests, metrics.waiting_requests, metrics.active_blocks) == (0, 0, 0)


# Under `dynamo` the pass that completes a prompt has no drafts: 1 token each, then 3 and 3.
@pytest.mark.parametrize(
    ("ruleset", "first", "second", "generated"),
    [
        (OLD, [1, 1, 1, 2, 2, 2], [(1, False), (1, True), (2, False), (2, False), (2, False)], 6),
        (NEW, [1, 2], [(1, False)] * 3 + [(2, False)] * 3, 4),
    ],
)
def test_v22_bursts_are_emitted_request_by_request(
    ruleset: str, first: list[int], second: list[tuple[int, bool]], generated: int
) -> None:
    engine = default(
        ruleset=ruleset,
        num_gpu_blocks=16,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        aic_nextn=2,
        aic_nextn_accept_rates="1,1",
    )
    engine.submit(1, range(4), 5)
    engine.submit(2, range(50, 54), 8)
    assert [request_id for request_id, _ in engine.step().tokens] == first
    step = engine.step()
    assert [(output.request_id, output.completed) for output in step.outputs] == second
    assert engine.row(2)["generated"] == generated
    assert engine.row(2)["length"] - engine.row(2)["computed"] == 1
    assert step.fpm.num_decode_requests == 2
    assert step.effects.decode_acceptance == (len(second), 2)


@BOTH
def test_v23_a_rejected_first_draft_leaves_one_token_and_no_spare_block(ruleset: str) -> None:
    engine = default(
        ruleset=ruleset,
        block_size=2,
        num_gpu_blocks=8,
        max_num_seqs=2,
        aic_nextn=2,
        aic_nextn_accept_rates="0,1",
    )
    engine.submit(1, range(3), 5)
    step = engine.step()
    assert len(step.outputs) == 1
    assert engine.active == 2
    row = engine.row(1)
    assert (row["generated"], row["length"] - row["computed"]) == (1, 1)


# ---------------------------------------------------------------- V, router events


def router(**fields: Any) -> Engine:
    fields = {
        "num_gpu_blocks": 12,
        "max_num_batched_tokens": 12,
        "max_num_seqs": 3,
        "emit_kv_events": True,
        **fields,
    }
    return Engine(RankIdentity(23), **fields)


@pytest.mark.parametrize(("ruleset", "at_start"), [(OLD, True), (NEW, False)])
def test_v24_a_prompt_is_announced_once_with_its_hashes(ruleset: str, at_start: bool) -> None:
    engine = router(ruleset=ruleset)
    engine.submit(1, [1, 2, 3, 4, 5, 6, 7, 8], 2)
    step = engine.step()
    shown, hidden = step.start.kv_events, step.effects.kv_events
    if not at_start:
        shown, hidden = hidden, shown
    assert list(hidden) == []
    [event] = shown
    assert (event.worker_id, event.dp_rank, event.event_id, event.storage_tier) == (23, 0, 0, "device")
    assert event.data.parent_hash is None
    assert [(block.block_hash, block.tokens_hash) for block in event.data.blocks] == [
        (HASH_1234, HASH_1234),
        (HASH_5678, LOCAL_5678),
    ]


@BOTH
def test_v25_a_router_that_replays_the_events_finds_nothing_wrong(ruleset: str) -> None:
    engine, index = router(ruleset=ruleset), KvIndex()
    engine.submit(1, range(8), 4)
    for step in engine.drain():
        index.replay(step.events)
    # 8 prompt tokens and 4 of output, the last never computed: 2 blocks; 1.3 computes no more either.
    assert index.stores == 2
    assert index.present == {HASH_0123, HASH_4567}
    assert engine.active == 0


@BOTH
def test_v26_a_preempted_request_comes_back_and_finds_its_own_blocks(ruleset: str) -> None:
    engine, steps = preempting(ruleset, enable_prefix_caching=True, emit_kv_events=True)
    for _ in range(32):
        steps.append(engine.step())
        if 2 in steps[-1].admitted:
            break
    assert steps[-1].admitted == {2: 8}
    steps += engine.drain()
    index = KvIndex()
    for step in steps:
        index.replay(step.events)
    assert engine.rank.metrics().preemptions_total >= 1


@BOTH
def test_v27_speculation_under_pressure_ends_without_a_stale_event(ruleset: str) -> None:
    engine = router(ruleset=ruleset, num_gpu_blocks=6, aic_nextn=2, aic_nextn_accept_rates="0,1")
    for request_id, length in enumerate((8, 8, 12)):
        engine.submit(request_id, range(100 * request_id, 100 * request_id + length), 7)
    steps, index = engine.drain(200), KvIndex()
    for step in steps:
        index.replay(step.events)
    assert sum(len(step.outputs) for step in steps) == 21
    assert any(isinstance(event.data, Removed) for step in steps for event in step.events)
    assert engine.active == 0


# ---------------------------------------------------------------- V, forward-pass metrics


def measured(**fields: Any) -> Engine:
    fields = {
        "num_gpu_blocks": 16,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        **fields,
    }
    return Engine(**fields)


# prefill of 8 tokens; under 1.3 also the first token over 2 of 16 blocks, as in V14.
@pytest.mark.parametrize(("ruleset", "duration_ms"), [(OLD, 28.7119769639), (NEW, 16.6229144639)])
def test_v34_a_lone_prompt_is_one_prefill(ruleset: str, duration_ms: float) -> None:
    engine = measured(ruleset=ruleset)
    engine.submit(1, range(8))
    fpm = engine.step().fpm
    assert (fpm.num_prefill_requests, fpm.sum_prefill_tokens, fpm.sum_prefill_kv_tokens) == (1, 8, 0)
    assert (fpm.num_decode_requests, fpm.num_queued_prefill, fpm.num_queued_decode) == (0, 0, 0)
    assert fpm.duration_ms == pytest.approx(duration_ms, abs=1e-6)


@BOTH
def test_v35_a_mixed_pass_counts_prefill_and_decode_apart(ruleset: str) -> None:
    engine = measured(ruleset=ruleset)
    engine.submit(1, range(4), 3)
    first = engine.step(0.0).fpm
    assert (first.num_prefill_requests, first.sum_prefill_tokens) == (1, 4)
    engine.submit(2, range(4), 3)
    fpm = engine.step(1.0).fpm
    assert (fpm.num_prefill_requests, fpm.num_decode_requests) == (1, 1)
    assert (fpm.sum_prefill_tokens, fpm.sum_decode_kv_tokens) == (4, 5)


@BOTH
def test_v36_work_of_a_request_that_ends_in_the_pass_is_counted(ruleset: str) -> None:
    engine = measured(ruleset=ruleset)
    engine.submit(1, range(4))
    step = engine.step()
    assert (step.fpm.num_prefill_requests, step.fpm.sum_prefill_tokens) == (1, 4)
    assert step.ended == [(1, False)]


@BOTH
def test_v37_the_second_pass_is_a_decode_of_the_grown_length(ruleset: str) -> None:
    engine = measured(ruleset=ruleset)
    engine.submit(1, range(4), 2)
    engine.step()
    fpm = engine.step().fpm
    assert (fpm.num_prefill_requests, fpm.num_decode_requests, fpm.sum_decode_kv_tokens) == (0, 1, 5)


@BOTH
def test_v38_a_prompt_without_budget_is_queued(ruleset: str) -> None:
    engine = measured(ruleset=ruleset, num_gpu_blocks=4, max_num_batched_tokens=8, max_num_seqs=2)
    engine.submit(1, range(8))
    engine.submit(2, range(8))
    fpm = engine.step().fpm
    assert (fpm.num_prefill_requests, fpm.num_queued_prefill, fpm.sum_queued_prefill_tokens) == (1, 1, 8)


@BOTH
def test_v39_the_variance_is_that_of_prompt_lengths(ruleset: str) -> None:
    engine = measured(ruleset=ruleset, num_gpu_blocks=32, max_num_batched_tokens=32)
    engine.submit(1, range(4))
    engine.submit(2, range(12))
    fpm = engine.step().fpm
    assert (fpm.num_prefill_requests, fpm.var_prefill_length) == (2, 16.0)


@BOTH
def test_v40_chunks_count_their_tokens_and_the_whole_prompt_length(ruleset: str) -> None:
    engine = measured(ruleset=ruleset, max_num_batched_tokens=8)
    engine.submit(1, range(16), 2)
    chunks = [engine.step(0.0).fpm, engine.step(1.0).fpm]
    assert [chunk.num_prefill_requests for chunk in chunks] == [1, 1]
    assert [chunk.sum_prefill_tokens for chunk in chunks] == [8, 8]
    assert [chunk.sum_prefill_kv_tokens for chunk in chunks] == [0, 8]
    assert [chunk.var_prefill_length for chunk in chunks] == [0.0, 0.0]


# 1.3 takes the block of the sample at emission: the newcomer that just prefilled is preempted for it.
@pytest.mark.parametrize(("ruleset", "queued"), [(OLD, (1, 16)), (NEW, (0, 0))])
def test_v41_a_newcomer_preempted_at_emission_is_queued_with_its_prompt(ruleset: str, queued: tuple[int, int]) -> None:
    engine = measured(ruleset=ruleset, num_gpu_blocks=6, max_num_batched_tokens=32, max_num_seqs=3)
    engine.submit(1, range(4), 20)
    for at in (0.0, 1.0, 2.0):
        engine.step(at)
    engine.submit(2, range(16), 5)
    step = engine.step(3.0)
    assert (step.fpm.num_prefill_requests, step.fpm.num_decode_requests) == (1, 1)
    assert (step.fpm.num_queued_decode, step.fpm.sum_queued_decode_kv_tokens) == queued
    assert len(step.start.pressure_events) == queued[0]


@BOTH
def test_v42_the_first_snapshot_has_work_and_a_duration(ruleset: str) -> None:
    engine = measured(ruleset=ruleset)
    engine.submit(1, range(8), 2)
    fpm = engine.step().fpm
    assert (fpm.num_prefill_requests, fpm.sum_prefill_tokens) == (1, 8)
    assert fpm.duration_ms > 0


@BOTH
def test_v45_an_idle_rank_has_no_deadline(ruleset: str) -> None:
    engine = default(ruleset=ruleset, num_gpu_blocks=8)
    assert engine.rank.next_internal_deadline_ms() is None
    for at in (0.0, 10.0):
        step = engine.step(at)
        assert (step.end_ms, step.outputs, step.admitted) == (at, [], {})
        assert engine.rank.next_internal_deadline_ms() is None


# ---------------------------------------------------------------- N


def newest(**fields: Any) -> Engine:
    return Engine(**{"max_num_batched_tokens": 16, "max_num_seqs": 4, "emit_kv_events": True, **fields})


def test_n1_a_request_hits_blocks_computed_earlier_in_the_same_pass() -> None:
    engine = newest(num_gpu_blocks=8, max_num_seqs=2)
    engine.submit(1, range(8), 2)
    engine.submit(2, range(8), 2)
    step = engine.step()
    assert step.admitted == {1: 0, 2: 4}
    assert engine.active == 3
    [stored] = step.stored
    assert len(stored.blocks) == 2


def test_n2_a_half_computed_block_is_invisible() -> None:
    engine = newest(num_gpu_blocks=8, max_num_batched_tokens=2)
    engine.submit(1, range(8))
    step = engine.step()
    assert (engine.row(1)["computed"], step.stored) == (2, [])
    assert not engine.rank.blocks["hashed"].any()
    step = engine.step()
    assert engine.row(1)["computed"] == 4
    [stored] = step.stored
    assert [block.block_hash for block in stored.blocks] == [HASH_0123]
    assert np.count_nonzero(engine.rank.blocks["hashed"]) == 1


def test_n3_the_block_of_a_sample_is_taken_when_it_is_scheduled() -> None:
    engine = newest(num_gpu_blocks=4)
    engine.submit(1, range(4), planned=[7, 8, 9])
    engine.submit(2, range(50, 54), planned=[7, 8, 9])

    def state() -> list[tuple[int, ...]]:
        names = ("computed", "allocated", "length", "n_blocks")
        return [tuple(int(engine.row(request_id)[name]) for name in names) for request_id in (1, 2)]

    engine.step()
    assert state() == [(4, 4, 5, 1)] * 2
    assert engine.active == 2
    engine.step()
    assert state() == [(5, 5, 6, 2)] * 2
    assert engine.active == 4
    assert engine.rank.metrics().preemptions_total == 0


def test_n4_a_terminal_sample_takes_no_block_and_leaves_are_evicted_first() -> None:
    engine = newest(num_gpu_blocks=2)
    engine.submit(1, range(8), planned=[8])
    engine.step()
    assert engine.rank.is_drained()
    assert (engine.active, engine.inactive) == (0, 2)
    engine.submit(2, range(100, 104))
    assert engine.step().ended == [(2, False)]
    engine.submit(3, range(5))
    assert engine.step().admitted == {3: 4}


def test_n5_a_repeat_of_an_aligned_prompt_computes_its_last_block_again() -> None:
    engine = newest(num_gpu_blocks=8)
    engine.submit(1, range(8))
    engine.step()
    engine.submit(2, range(8))
    assert engine.step().admitted == {2: 4}
    assert (engine.active, engine.inactive) == (0, 3)


@BOTH
def test_n6_trtllm_reserves_to_completion_where_vllm_overcommits(ruleset: str) -> None:
    running = {}
    for backend in ("trtllm", "vllm"):
        engine = newest(backend=backend, ruleset=ruleset, num_gpu_blocks=6, max_num_batched_tokens=32)
        engine.submit(1, range(8), 8)
        engine.submit(2, range(100, 108), 8)
        engine.step()
        running[backend] = engine.ids("running")
    assert running == {"trtllm": [1], "vllm": [1, 2]}


@BOTH
def test_n6_trtllm_runs_what_fits_and_never_preempts(ruleset: str) -> None:
    engine = Engine(ruleset=ruleset, backend="trtllm", block_size=32, num_gpu_blocks=7319)
    for request_id in range(64):
        engine.submit(request_id, np.full(1096, request_id).tolist(), 7000)
    for _ in range(8):
        engine.step()
    metrics = engine.rank.metrics()
    assert (metrics.running_requests, metrics.waiting_requests, metrics.preemptions_total) == (28, 36, 0)


@BOTH
def test_n6_trtllm_cuts_outputs_to_the_pool(ruleset: str) -> None:
    engine = newest(ruleset=ruleset, backend="trtllm", num_gpu_blocks=4)
    engine.submit(1, range(4), 40)
    assert engine.row(1)["max_output"] == 12
    assert sum(len(step.outputs) for step in engine.drain()) == 12


@BOTH
def test_n6_trtllm_speculates_within_its_reservation(ruleset: str) -> None:
    engine = newest(ruleset=ruleset, backend="trtllm", num_gpu_blocks=4, aic_nextn=2, aic_nextn_accept_rates="1,1")
    engine.submit(1, range(4), 12)
    engine.submit(2, range(100, 104), 12)
    steps = engine.drain()
    assert [ended for step in steps for ended in step.ended] == [(1, False), (2, False)]
    assert sum(len(step.outputs) for step in steps) == 24
    assert engine.rank.metrics().preemptions_total == 0


@BOTH
def test_n6_trtllm_rejects_what_never_fits_and_runs_the_next(ruleset: str) -> None:
    engine = newest(ruleset=ruleset, backend="trtllm", num_gpu_blocks=4)
    engine.submit(1, range(20))
    engine.submit(2, range(4), 4)
    assert [ended for step in engine.drain() for ended in step.ended] == [(1, True), (2, False)]


@BOTH
def test_n7_a_prompt_over_the_model_length_is_rejected(ruleset: str) -> None:
    engine = newest(ruleset=ruleset, num_gpu_blocks=8, max_model_len=8)
    engine.submit(1, range(9), 4)
    assert engine.step().ended == [(1, True)]
    engine.submit(2, range(8), 4)  # at the limit there is nothing left to generate
    assert engine.step().ended == [(2, True)]


@BOTH
def test_n7_generation_stops_at_the_model_length(ruleset: str) -> None:
    engine = newest(ruleset=ruleset, num_gpu_blocks=8, max_model_len=8)
    engine.submit(1, range(7), 4)
    step = engine.step()
    assert [(output.completed, output.rejected) for output in step.outputs] == [(True, False)]


# Under `dynamo` the first pass has no drafts, and the next only 8 - 1 - 6 = 1: 1 and then 2 tokens.
@pytest.mark.parametrize(("ruleset", "bursts"), [(OLD, [3]), (NEW, [1, 2])])
def test_n7_a_burst_stops_at_the_model_length(ruleset: str, bursts: list[int]) -> None:
    engine = newest(ruleset=ruleset, num_gpu_blocks=8, max_model_len=8, aic_nextn=2, aic_nextn_accept_rates="1,1")
    engine.submit(1, range(5), 8)
    steps = engine.drain()
    assert [len(step.outputs) for step in steps] == bursts
    assert [output.completed for step in steps for output in step.outputs] == [False, False, True]


def test_n8_a_generated_token_completes_a_block_others_can_reuse() -> None:
    engine = newest(num_gpu_blocks=8)
    engine.submit(1, [0, 1, 2], planned=[3, 9])
    engine.step()
    assert (engine.row(1)["computed"], engine.row(1)["length"]) == (3, 4)
    engine.submit(2, [0, 1, 2, 3, 4])
    step = engine.step()
    assert step.admitted == {2: 4}
    assert len(step.stored) == 1


def test_submitting_an_active_id_changes_nothing() -> None:
    """V3 without its handoff half."""
    engine = default()
    engine.submit(1, range(8))
    before = engine.rank.digest()
    with pytest.raises(ValueError, match="already active"):
        engine.rank.apply_command(Submit(Request(1, [1])), CommandContext(0.0))
    assert engine.rank.digest() == before
    assert engine.rank.metrics().waiting_requests == 1
