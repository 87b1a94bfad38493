"""What one operation of a rank costs. Read `extra_info` for the operations per round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvsim import CommandContext, RankIdentity, Request, SchedulerRank, Submit
from kvsim._core import content
from kvsim.layout import SEGMENT
from ranks import UNLIMITED, config, decoding, step, submit

SIZES = [64, 256, 1024]
BLOCKS = [16, 64]
PASSES = 64


def fresh(rank: SchedulerRank) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Set-up of a round: a fork, so that every round starts in the same state."""
    return lambda: ((rank.fork(),), {})


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("n", SIZES)
def test_decode_pass_through_the_contract(benchmark: Any, n: int, block_size: int) -> None:
    rank = decoding(n, block_size)

    def passes(fork: SchedulerRank) -> None:
        now = 0.0
        for _ in range(PASSES):
            now = step(fork, now)

    benchmark.extra_info.update(passes=PASSES, tokens=PASSES * n)
    benchmark.pedantic(passes, setup=fresh(rank), rounds=30)


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("n", SIZES)
def test_decode_pass_in_the_kernel(benchmark: Any, n: int, block_size: int) -> None:
    rank = decoding(n, block_size)

    def passes(fork: SchedulerRank) -> None:
        execute = fork._state.execute
        now = 0.0
        for _ in range(PASSES):
            now = execute(now)

    benchmark.extra_info.update(passes=PASSES, tokens=PASSES * n)
    benchmark.pedantic(passes, setup=fresh(rank), rounds=30)


@pytest.mark.parametrize("block_size", BLOCKS)
def test_prefill_pass(benchmark: Any, block_size: int) -> None:
    rank = SchedulerRank(RankIdentity(), config(block_size, max_num_batched_tokens=UNLIMITED))
    for number in range(8):
        submit(rank, number, 4096, 16)
    benchmark.extra_info.update(passes=1, tokens=8 * 4096, blocks=8 * 4096 // block_size)
    benchmark.pedantic(lambda fork: step(fork, 0.0), setup=fresh(rank), rounds=50)


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("kind", ["tokens", "segments"])
def test_submit(benchmark: Any, kind: str, block_size: int) -> None:
    rank = SchedulerRank(RankIdentity(), config(block_size))
    requests = []
    for number in range(256):
        if kind == "tokens":
            prompt = np.arange(number << 16, (number << 16) + 1024, dtype=np.uint32)
            requests.append(Request(number, prompt, 128))
        else:
            segments = np.array([(2 * number, 0, 512), (2 * number + 1, 0, 512)], SEGMENT)
            requests.append(Request.from_segments(number, segments, 128))
    context = CommandContext(0.0)

    def submits(fork: SchedulerRank) -> None:
        for request in requests:
            fork.apply_command(Submit(request), context)

    benchmark.extra_info.update(requests=len(requests), tokens=len(requests) * 1024)
    benchmark.pedantic(submits, setup=fresh(rank), rounds=30)


@pytest.mark.parametrize("operation", ["fork", "snapshot", "digest"])
def test_whole_state(benchmark: Any, operation: str) -> None:
    rank = decoding(256, 64)
    benchmark.extra_info.update(blocks=rank.config.num_gpu_blocks, bytes=len(rank._state.arena))
    benchmark(getattr(rank, operation))


def test_restore(benchmark: Any) -> None:
    rank = decoding(256, 64)
    saved = rank.snapshot()
    benchmark.extra_info.update(blocks=rank.config.num_gpu_blocks, bytes=len(rank._state.arena))
    benchmark(rank.restore, saved)


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("kind", ["tokens", "repeated"])
def test_block_hashes(benchmark: Any, kind: str, block_size: int) -> None:
    tokens = 65_536
    if kind == "tokens":
        parts = [np.arange(tokens, dtype=np.uint32)]
    else:
        # As a trace gives it: one hash id stands for 512 equal tokens.
        parts = [np.array([(number, 0, 512) for number in range(tokens // 512)], SEGMENT)]
    benchmark.extra_info.update(tokens=tokens, blocks=tokens // block_size)
    benchmark(content.hash_parts, parts, None, 0, 1, 0, block_size, tokens, False)


@pytest.mark.parametrize("how", ["arrays", "objects"])
def test_drain_of_kv_events(benchmark: Any, how: str) -> None:
    rank = SchedulerRank(RankIdentity(), config(16, max_num_batched_tokens=UNLIMITED, emit_kv_events=True))
    for number in range(64):
        submit(rank, number, 1024, 16)
    blocks = 64 * 1024 // 16

    def executed() -> tuple[tuple[Any, ...], dict[str, Any]]:
        fork = rank.fork()
        if how == "objects":
            return (fork.execute_pass(0.0).pending.effects.kv_events,), {}
        fork._state.execute(0.0)
        return (fork._state,), {}

    benchmark.extra_info.update(events=64, blocks=blocks)
    if how == "arrays":
        benchmark.pedantic(lambda state: state.drain_events(), setup=executed, rounds=30)
    else:
        benchmark.pedantic(list, setup=executed, rounds=10)
