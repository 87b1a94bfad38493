"""Acceptance examples of the replay engine, part B of the contract, through `kvsim.replay` and `SchedulerRank`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvsim
from kvsim.config import EngineConfig, FixedTiming
from kvsim.contract import SameTimestampRetry
from kvsim.layout import FailReason, RequestStatus
from support import Engine


class TimingL:
    """A prefill takes a millisecond per token that is computed, a decode one millisecond."""

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        return float(mean_isl - mean_prefix)

    def predict_decode_ms(self, *_: int) -> float:
        return 1.0


def replay_d(items: list[dict[str, Any]], ruleset: str, **options: Any) -> Any:
    """One worker, 64 blocks of 4, one request at a time, no caching."""
    config = EngineConfig(
        ruleset=ruleset,
        num_gpu_blocks=64,
        block_size=4,
        max_num_batched_tokens=64,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    return kvsim.replay(items, config, timing=TimingL(), record_passes=True, **options)


def equal_tokens(count: int, **fields: Any) -> dict[str, Any]:
    return {"input_token_ids": [7] * count, "output_tokens": 1, **fields}


#: The first token costs a decode under the older rules, so the pass is longer by one millisecond.
RULES = pytest.mark.parametrize(("ruleset", "decode_ms"), [("dynamo-1.3", 1.0), ("dynamo", 0.0)])


@RULES
def test_b1_the_slowest_rank_ends_the_group(ruleset: str, decode_ms: float) -> None:
    result = replay_d([equal_tokens(4, dp_rank=0), equal_tokens(8, dp_rank=1)], ruleset, dp_size=2)
    assert result.requests["first_token_ms"].tolist() == [8.0 + decode_ms] * 2
    assert (result.passes["end_ms"] - result.passes["start_ms"]).tolist() == [8.0 + decode_ms] * 2


@RULES
def test_b2_an_empty_rank_holds_back_what_arrives_during_a_pass_of_its_group(ruleset: str, decode_ms: float) -> None:
    late = equal_tokens(4, dp_rank=1, arrival_time_ms=4.0)
    rows = replay_d([equal_tokens(8, dp_rank=0), late], ruleset, dp_size=2).requests
    assert rows["first_token_ms"].tolist() == [8.0 + decode_ms, 8.0 + decode_ms + 4.0 + decode_ms]
    assert rows["first_admit_ms"].tolist() == [0.0, 8.0 + decode_ms]


@RULES
def test_b3_a_single_rank_takes_its_own_time(ruleset: str, decode_ms: float) -> None:
    result = replay_d([equal_tokens(4)], ruleset)
    assert len(result.passes) == 1
    assert result.requests["first_token_ms"].tolist() == [4.0 + decode_ms]
    assert result.summary["mean_ttft_ms"] == 4.0 + decode_ms


def test_b4_workers_start_lowest_id_first_each_with_its_own_request() -> None:
    result = kvsim.replay([equal_tokens(4), equal_tokens(4)], EngineConfig(), workers=2, record_passes=True)
    assert result.requests["worker"].tolist() == [0, 1]
    assert result.passes["worker"].tolist() == [0, 1]
    assert result.passes["start_ms"].tolist() == [0.0, 0.0]
    assert result.admissions["worker"].tolist() == [0, 1]


@pytest.mark.parametrize("ruleset", ["dynamo-1.3", "dynamo"])
def test_b12_passes_that_take_no_time_are_productive(ruleset: str) -> None:
    fields: dict[str, Any] = {
        "ruleset": ruleset,
        "worker_type": "decode",
        "num_gpu_blocks": 16,
        "max_num_batched_tokens": 4,
        "max_num_seqs": 1,
        "timing_model": FixedTiming(prefill_ms=10.0, decode_ms=1.0),
    }
    engine = Engine(**fields)
    engine.submit(1, [7] * 12)
    first, second = engine.step(), engine.step()
    assert (first.end_ms, second.end_ms) == (0.0, 0.0)
    assert list(first.admitted) == [1]
    assert (first.outputs, second.outputs) == ([], [])
    assert second.admitted == {}
    assert second.fpm.num_prefill_requests == 1
    assert second.effects.lifecycle_events == []
    third = engine.step()
    assert third.ended == [(1, False)]
    assert engine.rank.is_drained()

    config = EngineConfig(block_size=4, **fields)
    result = kvsim.replay([equal_tokens(12)], config, record_passes=True)
    assert result.summary["completed_requests"] == 1
    assert result.passes["start_ms"].tolist() == [0.0, 0.0, 0.0]
    assert result.passes["end_ms"].tolist() == [0.0, 0.0, third.end_ms]
    assert result.passes["num_prefill_requests"].tolist() == [1, 1, 1]
    assert result.passes["output_tokens"].tolist() == [0, 0, 1]


def test_b13_a_pass_that_only_queues_is_no_progress_and_its_request_is_ended_by_the_run() -> None:
    fields: dict[str, Any] = {
        "worker_type": "decode",
        "num_gpu_blocks": 16,
        "max_num_batched_tokens": 4,
        "max_num_seqs": 1,
        "enable_chunked_prefill": False,
    }
    engine = Engine(**fields)
    engine.submit(1, [7] * 8)
    for _ in range(2):
        step = engine.step()
        assert step.end_ms == 0.0
        assert (step.outputs, step.admitted, step.events) == ([], {}, [])
        assert engine.rank.header["effect_free"][0]
        assert engine.rank.is_ready()
        assert not engine.rank.is_drained()
        assert engine.rank.metrics().waiting_requests == 1
    assert engine.rank.execute_pass(0.0).same_timestamp_retry is SameTimestampRetry.NOT_APPLICABLE

    result = kvsim.replay([equal_tokens(8)], EngineConfig(block_size=4, **fields), record_passes=True)
    assert result.requests["status"].tolist() == [RequestStatus.REJECTED]
    assert result.requests["reason"].tolist() == [FailReason.BUDGET_TOO_SMALL]
    assert result.summary["passes"] == len(result.passes) == 0


def test_d7_traces_start_at_zero_and_lists_keep_their_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": at, "input_length": 10, "output_length": 1, "hash_ids": [at]} for at in (100, 200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert kvsim.replay(path, speedup=10).requests["arrival_ms"].tolist() == [0.0, 10.0]
    listed = [equal_tokens(10, arrival_time_ms=at) for at in (100.0, 200.0)]
    assert kvsim.replay(listed, speedup=10).requests["arrival_ms"].tolist() == [10.0, 20.0]


def test_d11_a_session_keeps_the_only_slot_through_its_think_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]},
        {"session_id": "a", "delay": 5, "input_length": 10, "output_length": 1, "hash_ids": [2]},
        {"session_id": "b", "timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [3]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EngineConfig(timing_model=FixedTiming(prefill_ms=10.0, decode_ms=1.0))
    result = kvsim.replay(path, config, concurrency=1)
    assert result.requests["arrival_ms"].tolist() == [0.0, 15.0, 25.0]
    assert result.requests["terminal_ms"].tolist() == [10.0, 25.0, 35.0]


def test_d17_a_completion_without_output_counts_its_input_and_its_time() -> None:
    config = EngineConfig(timing_model=FixedTiming(prefill_ms=20.0, decode_ms=10.0))
    summary = kvsim.replay([{"input_tokens": 32, "output_tokens": 0, "arrival_time_ms": 5.0}], config).summary
    assert (summary["completed_requests"], summary["total_input_tokens"], summary["total_output_tokens"]) == (1, 32, 0)
    assert summary["duration_ms"] == 25.0
    assert summary["decode_worker_seconds"] == 0.025
    assert summary["gpu_hours"] == 0.025 / 3600
