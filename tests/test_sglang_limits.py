"""SGLang at its limits: what can never run ends with a reason, what just fits completes, and the run goes on."""

from __future__ import annotations

from typing import Any

import pytest

import kvsim
from kvsim.config import EngineConfig, FixedTiming, SglangConfig
from kvsim.layout import FailReason, RequestStatus
from kvsim.rank import describe_reason

BOTH = pytest.mark.parametrize("ruleset", ["dynamo", "dynamo-1.3"])
PAGES = pytest.mark.parametrize("page", [1, 4, 16])
COMPLETED, REJECTED, FAILED = RequestStatus.COMPLETED, RequestStatus.REJECTED, RequestStatus.FAILED
POOL = 64


def config(ruleset: str, page: int, **options: Any) -> EngineConfig:
    """A pool of 64 tokens."""
    options = {"chunked_prefill_size": 128, **options}
    return EngineConfig(
        backend="sglang",
        ruleset=ruleset,
        num_gpu_blocks=POOL // page,
        block_size=page,
        timing_model=FixedTiming(prefill_ms=20.0, decode_ms=10.0),
        sglang=SglangConfig(**options),
    )


def run(engine: EngineConfig, *sizes: tuple[int, int]) -> list[tuple[RequestStatus, FailReason, str]]:
    """(state, reason, its text) of requests of (prompt, output) tokens that arrive a millisecond apart."""
    items = [
        {"input_tokens": prompt, "output_tokens": output, "arrival_time_ms": float(i)}
        for i, (prompt, output) in enumerate(sizes)
    ]
    result = kvsim.replay(items, engine)
    assert result.summary["unfinished_requests"] == 0
    return [
        (
            RequestStatus(row["status"]),
            FailReason(row["reason"]),
            describe_reason(int(row["reason"]), int(row["needed"]), engine),
        )
        for row in result.requests
    ]


def states(outcome: list[tuple[RequestStatus, FailReason, str]]) -> list[RequestStatus]:
    return [state for state, _, _ in outcome]


@BOTH
@PAGES
@pytest.mark.parametrize("prompt", [POOL + 1, POOL + 17, 1000])
def test_a_prompt_larger_than_the_pool_ends_with_a_reason(ruleset: str, page: int, prompt: int) -> None:
    outcome = run(config(ruleset, page), (prompt, 2), (20, 5), (7, 3))
    assert states(outcome)[1:] == [COMPLETED, COMPLETED]
    state, reason, text = outcome[0]
    # A prompt longer than a chunk is admitted in part before it turns out that the rest never fits.
    assert state is REJECTED or (state is FAILED and prompt > 128)
    assert reason is FailReason.POOL_TOO_SMALL
    assert text.endswith(f"> {POOL // page} blocks")


@BOTH
@PAGES
def test_admission_leaves_room_to_spare_and_no_more(ruleset: str, page: int) -> None:
    # Section 6.4 step 5: page-rounded prompt and outputs must stay below the pool, equality stops.
    for prompt in (POOL - page, POOL - 2 * page + 1):
        # Both are the same number of pages; the last page is left for outputs.
        assert states(run(config(ruleset, page), (prompt, page), (5, 2))) == [REJECTED, COMPLETED]
        assert states(run(config(ruleset, page), (prompt, page - 1), (5, 2))) == [COMPLETED, COMPLETED]
    assert states(run(config(ruleset, page), (POOL - 2 * page, page), (5, 2))) == [COMPLETED, COMPLETED]


@BOTH
@PAGES
def test_a_prompt_that_fills_the_pool_exactly_ends_with_a_reason(ruleset: str, page: int) -> None:
    outcome = run(config(ruleset, page, clip_max_new_tokens=0), (POOL, 1), (20, 5))
    assert states(outcome) == [REJECTED, COMPLETED]
    assert outcome[0][1] is FailReason.POOL_TOO_SMALL


@BOTH
@PAGES
def test_an_output_that_outgrows_the_pool_fails(ruleset: str, page: int) -> None:
    outcome = run(config(ruleset, page, clip_max_new_tokens=0), (20, 100), (7, 3))
    assert states(outcome) == [FAILED, COMPLETED]
    assert outcome[0][1] is FailReason.OUTGREW_POOL
    assert outcome[0][2].endswith(f"> {POOL // page} blocks")


@BOTH
@PAGES
def test_a_prefill_limit_below_a_prompt_rejects_it_unless_chunks_fit(ruleset: str, page: int) -> None:
    outcome = run(config(ruleset, page, max_prefill_tokens=16), (33, 2), (8, 2))
    assert states(outcome) == [REJECTED, COMPLETED]
    assert outcome[0][1] is FailReason.BUDGET_TOO_SMALL
    assert outcome[0][2]
    outcome = run(config(ruleset, page, max_prefill_tokens=16, chunked_prefill_size=16), (33, 2), (8, 2))
    assert states(outcome) == [COMPLETED, COMPLETED]


@BOTH
def test_a_workload_of_hopeless_requests_only_ends(ruleset: str) -> None:
    outcome = run(config(ruleset, 4), *[(65 + i, 2) for i in range(8)])
    assert states(outcome) == [REJECTED] * 8


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {"schedule_conservativeness": 0.0},
        {"schedule_conservativeness": 1e300},
        {"clip_max_new_tokens": 0},
        {"schedule_policy": "lpm", "schedule_conservativeness": 3.0, "clip_max_new_tokens": 1},
        {"chunked_prefill_size": 2**31 - 4, "max_prefill_tokens": 2**31 - 1},
    ],
)
def test_extreme_options_end_every_request(ruleset: str, options: dict[str, Any]) -> None:
    outcome = run(config(ruleset, 4, **options), (20, 5), (20, 5), (12, 30), (3, 1), (40, 1))
    assert states(outcome) == [COMPLETED] * 5


@BOTH
def test_a_request_that_half_computed_prompts_leave_no_room_ends_and_they_go_on(ruleset: str) -> None:
    # Chunks of other prompts are never taken back, so the one that decodes cannot grow.
    outcome = run(config(ruleset, 4, max_prefill_tokens=4, chunked_prefill_size=4), (12, 30), (40, 1))
    assert states(outcome) == [FAILED, COMPLETED]
    assert outcome[0][1] is FailReason.OUTGREW_POOL


@BOTH
@pytest.mark.parametrize("conservativeness", [0.001, 1e-9, 1e-300])
def test_a_small_ratio_far_below_its_estimate_does_not_spin(ruleset: str, conservativeness: float) -> None:
    # Retraction estimates a ratio near 1, which steps of a thousandth of this wear down in a million passes.
    engine = EngineConfig(
        backend="sglang",
        ruleset=ruleset,
        num_gpu_blocks=3,
        block_size=4,
        timing_model=FixedTiming(prefill_ms=1.0, decode_ms=1.0),
        sglang=SglangConfig(schedule_conservativeness=conservativeness, clip_max_new_tokens=0),
    )
    assert states(run(engine, (4, 4), (4, 4), (13, 4), (5, 2))) == [COMPLETED, COMPLETED, REJECTED, COMPLETED]


def test_the_ratio_of_a_hopeless_queue_falls_at_once_when_it_is_far_off() -> None:
    engine = EngineConfig(
        backend="sglang",
        num_gpu_blocks=3,
        block_size=4,
        sglang=SglangConfig(schedule_conservativeness=1e-6, clip_max_new_tokens=0),
    )
    rank = kvsim.SchedulerRank(kvsim.RankIdentity(), engine)
    for request_id, length in ((1, 4), (2, 4), (3, 13)):
        rank.apply_command(
            kvsim.contract.Submit(kvsim.contract.Request(request_id, [100 * request_id + i for i in range(length)], 4)),
            kvsim.contract.CommandContext(0.0),
        )
    passes, now = 0, 0.0
    while rank.stuck_head() is None:
        outcome = rank.execute_pass(now)
        now = outcome.end_ms
        rank.complete_pass(outcome.pending, now)
        passes += 1
        assert passes < 50
    assert rank.stuck_head().request_id == 3
