"""Ranks in known states, for the benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsim import (
    CommandContext,
    EngineConfig,
    FixedTiming,
    RankIdentity,
    Request,
    SchedulerRank,
    Submit,
)

#: Pass times that cost nothing to compute: the scheduler is measured, not the model of time.
FIXED = FixedTiming(prefill_ms=30.0, decode_ms=10.0)
UNLIMITED = 2**30


def config(block_size: int, **fields: Any) -> EngineConfig:
    """An engine whose pool holds a million tokens."""
    given: dict[str, Any] = {"num_gpu_blocks": (1 << 20) // block_size, "timing_model": FIXED} | fields
    return EngineConfig(block_size=block_size, **given)


def submit(rank: SchedulerRank, number: int, tokens: int, output_tokens: int) -> None:
    """One request whose content nobody shares."""
    prompt = np.arange(number << 16, (number << 16) + tokens, dtype=np.uint32)
    rank.apply_command(Submit(Request(number, prompt, output_tokens)), CommandContext(0.0))


def step(rank: SchedulerRank, now_ms: float) -> float:
    """Run one whole pass; returns its end."""
    executed = rank.execute_pass(now_ms)
    rank.complete_pass(executed.pending, executed.end_ms)
    return executed.end_ms


def decoding(n: int, block_size: int, prompt_tokens: int = 300, **fields: Any) -> SchedulerRank:
    """A rank with `n` requests in the middle of their decode, spread over the places of a block."""
    rank = SchedulerRank(
        RankIdentity(), config(block_size, max_num_seqs=n, max_num_batched_tokens=UNLIMITED, **fields), timing=None
    )
    for number in range(n):
        submit(rank, number, prompt_tokens + number % block_size, 100_000)
    now = 0.0
    for _ in range(4):
        now = step(rank, now)
    assert rank.metrics().running_requests == n
    return rank
