"""Every run ends, and every request of it in a named state with a reason.

What aborts or hangs other simulators (a prompt that never fits, a decode that
outgrows the pool, a pass that takes no time) costs here the request it concerns.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import kvsim
from kvsim.config import EngineConfig, FixedTiming, SglangConfig
from kvsim.layout import FailReason, RequestStatus
from kvsim.policies import VllmPolicy
from kvsim.rank import describe_reason
from kvsim.report import ReplayResult
from replay_ways import CONCURRENCY, CONFIGS, RANKS, WORKERS, request_lists

FIXED = FixedTiming(prefill_ms=20.0, decode_ms=10.0)
NO_TIME = FixedTiming(prefill_ms=0.0, decode_ms=0.0)
BACKENDS = pytest.mark.parametrize("backend", ["vllm", "trtllm", "sglang"])
LOOPS = pytest.mark.parametrize("concurrency", [None, 1, 3])

STATUS = {
    RequestStatus.COMPLETED: "completed",
    RequestStatus.REJECTED: "rejected",
    RequestStatus.FAILED: "failed",
    RequestStatus.CANCELLED: "cancelled",
    RequestStatus.UNFINISHED: "unfinished",
}


def engine_config(backend: Any = "vllm", **fields: Any) -> EngineConfig:
    given_fields = {"num_gpu_blocks": 64, "block_size": 16, "timing_model": FIXED, **fields}
    if backend == "sglang" and "sglang" not in given_fields:
        # Nothing is reserved for outputs, so that growth is met while decoding.
        given_fields["sglang"] = SglangConfig(
            chunked_prefill_size=16 * given_fields["block_size"], clip_max_new_tokens=0
        )
    return EngineConfig(backend=backend, **given_fields)


def item(length: int, output: int = 1, at: float = 0.0) -> dict[str, Any]:
    return {"input_tokens": length, "output_tokens": output, "arrival_time_ms": at}


def replayed(
    items: list[dict[str, Any]], config: EngineConfig, *, unfinished: bool = False, **options: Any
) -> ReplayResult:
    """The result of a run whose books balance; without `unfinished`, every request must have ended."""
    result = kvsim.replay(items, config, **options)
    summary, requests = result.summary, result.requests
    kinds = [f"{name}_requests" for name in STATUS.values()]
    assert summary["num_requests"] == sum(summary[kind] for kind in kinds)
    assert summary["num_requests"] + summary["unreleased_requests"] == len(items)
    for kind, name in STATUS.items():
        if kind is not RequestStatus.UNFINISHED:
            assert summary[f"{name}_requests"] == np.count_nonzero(requests["status"] == kind)
    for row in requests:
        bad = row["status"] in (RequestStatus.REJECTED, RequestStatus.FAILED)
        assert bool(describe_reason(int(row["reason"]), int(row["needed"]), config)) == bad
        assert math.isnan(row["terminal_ms"]) == (row["status"] == RequestStatus.UNFINISHED)
        assert row["status"] != RequestStatus.REJECTED or row["output_tokens"] == 0
        assert row["status"] != RequestStatus.COMPLETED or row["output_tokens"] <= row["requested_output_tokens"]
    if not unfinished:
        assert summary["unfinished_requests"] == summary["unreleased_requests"] == 0
    return result


def states(result: ReplayResult) -> list[str]:
    return [STATUS[RequestStatus(status)] for status in result.requests["status"]]


def reasons(result: ReplayResult) -> list[str]:
    rows = result.requests
    return [describe_reason(int(row["reason"]), int(row["needed"]), result.config) for row in rows]


# ---------------------------------------------------------------- a head that can never run


def test_the_reported_prompt_that_never_fits_is_rejected_and_the_next_one_runs() -> None:
    result = replayed([item(2048), item(16, at=1.0)], engine_config())
    assert states(result) == ["rejected", "completed"]
    assert reasons(result) == ["needs 128 > 64 blocks", ""]
    assert result.summary["rejected_requests"] == 1
    assert next(result.rows())["fail_needed"] == 128


@BACKENDS
@LOOPS
@pytest.mark.parametrize("behind", [0, 1, 5])
def test_a_prompt_that_never_fits_costs_nobody_else(backend: str, concurrency: int | None, behind: int) -> None:
    items = [item(16 * 64 + 1), *(item(10, 3, at=float(k)) for k in range(behind))]
    result = replayed(items, engine_config(backend), concurrency=concurrency)
    assert states(result)[0] in ("rejected", "failed")
    assert states(result)[1:] == ["completed"] * behind
    alone = replayed(items[1:], engine_config(backend), concurrency=concurrency) if behind else None
    assert alone is None or alone.summary["total_output_tokens"] == result.summary["total_output_tokens"]


@LOOPS
@pytest.mark.parametrize(("budget", "length"), [(2048, 3000), (2048, 2049), (16, 17)])
def test_an_unchunked_prompt_over_the_budget_ends_and_the_next_one_runs(
    budget: int, length: int, concurrency: int | None
) -> None:
    config = engine_config(num_gpu_blocks=1000, enable_chunked_prefill=False, max_num_batched_tokens=budget)
    result = replayed([item(length), item(budget, 3), item(5, 2, at=7.0)], config, concurrency=concurrency)
    assert states(result) == ["rejected", "completed", "completed"]
    assert f"{length} tokens exceeds max_num_batched_tokens {budget}" in reasons(result)[0]


@BACKENDS
def test_a_workload_without_a_single_possible_request_ends_with_empty_samples(backend: str) -> None:
    result = replayed([item(5000, 4, at=3.0 * k) for k in range(6)], engine_config(backend))
    assert set(states(result)) <= {"rejected", "failed"}
    summary = result.summary
    assert summary["completed_requests"] == summary["total_output_tokens"] == summary["duration_ms"] == 0
    for name in ("ttft_ms", "ttst_ms", "tpot_ms", "itl_ms", "e2e_latency_ms", "output_token_throughput_per_user"):
        assert summary[f"mean_{name}"] is summary[f"p99_{name}"] is summary[f"std_{name}"] is None


@pytest.mark.parametrize("cap", [None, 1e6])
@LOOPS
def test_a_policy_that_never_admits_rejects_all_in_the_end(concurrency: int | None, cap: float | None) -> None:
    class Never(VllmPolicy):
        def admit(self, request: np.void, pool: tuple[int, int, int, int]) -> bool:
            return False

    items = [item(16, 3, at=5.0 * k) for k in range(4)]
    result = replayed(items, engine_config(), policy=Never(), concurrency=concurrency, max_sim_time_ms=cap)
    assert states(result) == ["rejected"] * 4
    assert reasons(result) == ["the policy never lets it run"] * 4


def test_a_policy_that_admits_later_is_waited_for() -> None:
    class Pairs(VllmPolicy):
        """Admits when two are there."""

        def __init__(self) -> None:
            self.seen: set[int] = set()

        def admit(self, request: np.void, pool: tuple[int, int, int, int]) -> bool:
            self.seen.add(int(request["id_lo"]))
            return len(self.seen) > 1

        def order(self, waiting: Any) -> Any:
            self.seen |= set(waiting["id_lo"].tolist())
            return np.arange(len(waiting))

    result = replayed([item(16, 2), item(16, 2, at=50.0)], engine_config(), policy=Pairs())
    assert states(result) == ["completed", "completed"]
    assert result.requests["first_admit_ms"].tolist() == [50.0, 50.0]


def test_a_policy_that_refuses_to_preempt_loses_the_requests_that_cannot_grow() -> None:
    class Mild(VllmPolicy):
        def victims(self, running: Any) -> Any:
            return []

    items = [item(30, 100), item(30, 100)]
    result = replayed(items, engine_config(num_gpu_blocks=4), policy=Mild())
    assert states(result) == ["failed", "failed"]
    assert reasons(result) == ["the policy never lets it run"] * 2
    # 2 of 4 blocks each, then all 4 for the second: 32 - 30 + 1 and 64 - 30 + 1 tokens.
    assert result.requests["output_tokens"].tolist() == [3, 35]


# ---------------------------------------------------------------- growth beyond the pool


@BACKENDS
@LOOPS
def test_a_decode_that_outgrows_the_pool_fails_alone(backend: str, concurrency: int | None) -> None:
    result = replayed([item(30, 5000)], engine_config(backend, num_gpu_blocks=4), concurrency=concurrency)
    if backend == "trtllm":
        # Admission clamps the output to what the pool can hold.
        assert states(result) == ["completed"]
    else:
        assert states(result) == ["failed"]
        assert result.requests["reason"].tolist() == [FailReason.OUTGREW_POOL]
        assert result.requests["needed"][0] > 4
    assert 0 < result.requests["output_tokens"][0] <= 4 * 16 - 30 + 1


@BACKENDS
@pytest.mark.parametrize("others", [1, 6])
def test_a_decode_that_outgrows_the_pool_fails_and_those_beside_it_complete(backend: str, others: int) -> None:
    items = [item(30, 5000), *(item(20, 30, at=15.0 * k) for k in range(others))]
    result = replayed(items, engine_config(backend, num_gpu_blocks=8))
    assert states(result)[1:] == ["completed"] * others
    assert states(result)[0] == ("completed" if backend == "trtllm" else "failed")
    assert result.requests["output_tokens"][1:].tolist() == [30] * others


@pytest.mark.parametrize("ruleset", ["dynamo", "dynamo-1.3"])
@pytest.mark.parametrize("nextn", [1, 3])
@pytest.mark.parametrize("prompt", [23, 24, 25])
def test_speculation_on_a_prompt_that_fills_the_pool_ends(ruleset: str, nextn: int, prompt: int) -> None:
    config = engine_config(
        num_gpu_blocks=6, block_size=4, aic_nextn=nextn, aic_nextn_accept_rates="1,1,1", ruleset=ruleset
    )
    result = replayed([item(prompt, 5), item(5, 4, at=1.0), item(prompt, 0, at=2.0)], config)
    assert states(result) == [
        "rejected" if prompt > 24 else "failed",
        "completed",
        "rejected" if prompt > 24 else "completed",
    ]


@pytest.mark.parametrize(
    ("prompt", "state"), [(62, "completed"), (63, "completed"), (64, "rejected"), (65, "rejected")]
)
def test_trtllm_rejects_a_prompt_that_leaves_no_room_for_an_output(prompt: int, state: str) -> None:
    result = replayed([item(prompt, 9), item(8, 2, at=1.0)], engine_config("trtllm", num_gpu_blocks=4))
    assert states(result) == [state, "completed"]
    assert result.requests["output_tokens"][0] == (64 - prompt if state == "completed" else 0)


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("over", [-1, 0, 1, 500])
def test_sglang_ends_what_does_not_fit_and_goes_on(page: int, over: int) -> None:
    config = engine_config("sglang", num_gpu_blocks=64 // page, block_size=page)
    result = replayed([item(64 + over, 2), item(20, 5, at=1.0), item(7, 3, at=2.0)], config)
    assert states(result)[1:] == ["completed", "completed"]
    assert states(result)[0] != "completed"


# ---------------------------------------------------------------- no time, no output, no room


@BACKENDS
@LOOPS
@pytest.mark.parametrize("output", [0, 1, 5])
def test_passes_that_take_no_time_end_at_the_instant_of_arrival(
    backend: str, concurrency: int | None, output: int
) -> None:
    items = [item(40, output, at=2.0 * (k // 4)) for k in range(12)]
    result = replayed(items, engine_config(backend, timing_model=NO_TIME, max_num_seqs=3), concurrency=concurrency)
    assert states(result) == ["completed"] * 12
    assert result.requests["output_tokens"].tolist() == [output] * 12
    assert (result.requests["terminal_ms"] == result.requests["arrival_ms"]).all()
    assert result.summary["duration_ms"] == (0.0 if concurrency else 4.0)
    assert result.summary["mean_itl_ms"] == (0.0 if output > 1 else None)


@BACKENDS
def test_a_workload_of_requests_without_output_completes(backend: str) -> None:
    result = replayed([item(40, 0, at=100.0 * k) for k in range(5)], engine_config(backend))
    assert states(result) == ["completed"] * 5
    assert (result.requests["terminal_ms"] - result.requests["arrival_ms"] == 20.0).all()
    summary = result.summary
    assert summary["total_output_tokens"] == summary["num_ttft_samples"] == 0
    assert summary["mean_ttft_ms"] is None
    assert summary["mean_e2e_latency_ms"] == 20.0


@BACKENDS
@LOOPS
def test_a_pool_of_one_block_serves_one_after_the_other(backend: str, concurrency: int | None) -> None:
    items = [item(length, output) for length, output in ((3, 4), (8, 1), (1, 1), (5, 2), (9, 1), (2, 30))]
    result = replayed(items, engine_config(backend, num_gpu_blocks=1, block_size=8), concurrency=concurrency)
    done, rejected, failed = "completed", "rejected", "failed"
    expected = {
        "vllm": [done, done, done, done, rejected, failed],
        # Reserves the output, cut to what the pool holds.
        "trtllm": [done, rejected, done, done, rejected, done],
        # Admits only what leaves room to spare, which a single page never does.
        "sglang": [rejected] * 6,
    }
    assert states(result) == expected[backend]
    assert all(text.endswith("> 1 blocks") for text in reasons(result) if text)


@BACKENDS
@pytest.mark.parametrize(("length", "output"), [(1, 0), (1, 1), (1, 2), (16, 1), (17, 40)])
def test_one_request_alone_completes(backend: str, length: int, output: int) -> None:
    result = replayed([item(length, output, at=12.5)], engine_config(backend))
    assert states(result) == ["completed"]
    assert result.requests["terminal_ms"].tolist() == [12.5 + 20.0 + 10.0 * max(output - 1, 0)]


# ---------------------------------------------------------------- a cap on time


@BACKENDS
@LOOPS
def test_a_cap_of_zero_leaves_what_arrived_at_zero_unfinished(backend: str, concurrency: int | None) -> None:
    items = [item(10, 3), item(10, 3), item(10, 3, at=5.0)]
    result = replayed(items, engine_config(backend), unfinished=True, concurrency=concurrency, max_sim_time_ms=0.0)
    released = concurrency or 2
    assert result.summary["num_requests"] == result.summary["unfinished_requests"] == released
    assert result.summary["unreleased_requests"] == 3 - released
    assert result.summary["passes"] == result.summary["total_output_tokens"] == 0
    assert np.isnan(result.requests["first_token_ms"]).all()
    assert np.isnan(result.requests["arrival_ms"]).tolist() == [False] * released + [True] * (3 - released)


@BACKENDS
@pytest.mark.parametrize("cap", [19.0, 20.0, 25.0, 29.5, 30.0, 45.0, 60.0, 1e9])
def test_a_pass_that_ends_beyond_the_cap_did_not_happen(backend: str, cap: float) -> None:
    result = replayed([item(10, 4)], engine_config(backend), unfinished=True, max_sim_time_ms=cap)
    times = [end for end in (20.0, 30.0, 40.0, 50.0) if end <= cap]
    row = result.requests[0]
    assert row["output_tokens"] == len(times)
    assert result.summary["passes"] == len(times)
    for name, k in (("first_token_ms", 0), ("second_token_ms", 1), ("last_token_ms", -1)):
        if len(times) > max(k, 0):
            assert row[name] == times[k]
        else:
            assert math.isnan(row[name])
    assert states(result) == ["completed" if cap >= 50 else "unfinished"]


@pytest.mark.parametrize(
    ("cap", "tokens"), [(15.0, 0), (20.0, 1), (29.0, 1), (30.0, 5), (39.0, 5), (40.0, 9), (50.0, 12)]
)
def test_no_token_of_a_burst_beyond_the_cap_counts(cap: float, tokens: int) -> None:
    config = engine_config(aic_nextn=3, aic_nextn_accept_rates="1,1,1")
    result = replayed(
        [item(16, 12)], config, unfinished=True, max_sim_time_ms=cap, capture_outputs=True, record_passes=True
    )
    assert result.outputs is not None
    assert result.passes is not None
    assert result.requests["output_tokens"][0] == len(result.outputs) == result.passes["output_tokens"].sum() == tokens


def test_preemptions_before_the_cap_stay_in_the_books() -> None:
    items = [item(30, 60) for _ in range(3)]
    whole = replayed(items, engine_config(num_gpu_blocks=8), capture_outputs=True)
    assert whole.summary["preemptions"] > 0
    last = 0
    for cap in np.unique(whole.requests["first_admit_ms"].tolist() + list(range(0, 2000, 5))):
        part = replayed(items, engine_config(num_gpu_blocks=8), unfinished=True, max_sim_time_ms=float(cap))
        assert last <= part.summary["preemptions"] <= whole.summary["preemptions"]
        assert part.summary["recomputed_tokens"] <= whole.summary["recomputed_tokens"]
        last = part.summary["preemptions"]
    assert last == whole.summary["preemptions"]


@pytest.mark.parametrize(
    ("cap", "arrived", "seconds"), [(49.0, 1, 0.045), (50.0, 2, 0.05), (79.0, 2, 0.05), (200.0, 3, 0.2)]
)
def test_requests_in_the_tokenization_pool_have_arrived_when_the_cap_comes(
    cap: float, arrived: int, seconds: float
) -> None:
    items = [item(10, 2), item(10, 2, at=50.0), item(10, 2, at=200.0)]
    config = engine_config(timing_model=FixedTiming(prefill_ms=10, decode_ms=5))
    result = replayed(items, config, unfinished=True, max_sim_time_ms=cap, tokenization={"workers": 1, "base_ms": 30.0})
    assert result.summary["num_requests"] == arrived
    assert result.summary["decode_worker_seconds"] == pytest.approx(seconds)


# ---------------------------------------------------------------- sessions


def test_a_turn_that_fails_lets_the_next_one_run(tmp_path: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        '{"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}',
        '{"session_id": "a", "delay": 25, "input_length": 40, "output_length": 3, "hash_ids": [3]}',
        '{"session_id": "b", "timestamp": 0, "input_length": 30, "output_length": 3, "hash_ids": [4]}',
    ]
    trace.write_text("\n".join(rows) + "\n")
    result = kvsim.replay(trace, engine_config(num_gpu_blocks=16))
    by_session = {(int(row["session"]), int(row["turn"])): row for row in result.requests}
    assert RequestStatus(by_session[0, 0]["status"]) is RequestStatus.REJECTED
    assert RequestStatus(by_session[0, 1]["status"]) is RequestStatus.COMPLETED
    assert by_session[0, 1]["arrival_ms"] == by_session[0, 0]["terminal_ms"] + 25.0
    assert RequestStatus(by_session[1, 0]["status"]) is RequestStatus.COMPLETED


# ---------------------------------------------------------------- anything


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(items=request_lists(), config=CONFIGS, workers=WORKERS, dp_size=RANKS, concurrency=CONCURRENCY)
def test_every_request_of_any_run_ends_in_a_named_state(
    items: list[dict[str, Any]], config: EngineConfig, workers: int, dp_size: int, concurrency: int | None
) -> None:
    replayed(items, config, workers=workers, dp_size=dp_size, concurrency=concurrency)


def test_two_requests_that_preempt_each_other_for_ever_end() -> None:
    config = kvsim.EngineConfig(
        num_gpu_blocks=6,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        aic_nextn=2,
        aic_nextn_accept_rates="0.25,1,0.75",
        preemption_mode="fifo",
        aic_mtp_seed=2**64 - 1,
        timing_model=kvsim.FixedTiming(prefill_ms=10.0, decode_ms=3.0),
    )
    prompts = {4: ([0, 1], list(range(2, 22))), 18: ([99, 98, 97], [0] * 8), 5: ([100], [101, 102])}
    prompts |= {2: (list(range(12)), [12]), 1: (list(range(8)), [0] * 4)}
    requests = [
        {"id": f"r{k}", "arrival_time_ms": 0.0, "input_token_ids": tokens, "output_token_ids": outputs}
        for k, (tokens, outputs) in prompts.items()
    ]
    ended = kvsim.replay(requests, config).requests
    failed = ended[ended["status"] != RequestStatus.COMPLETED]
    assert [(row["status"], row["reason"]) for row in failed] == [(RequestStatus.FAILED, FailReason.STALLED)]
