"""The radix engine: tree operations, decode passes, whole runs. Read `extra_info` for the operations per round."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

import kvsim
from kvsim._core import content
from kvsim._core.state import RankState
from kvsim.config import SglangConfig
from kvsim.workload import example_trace_path, flat_workload
from ranks import UNLIMITED, config, decoding, step

Prompt: TypeAlias = tuple[npt.NDArray[Any], int]  # layout.RUN rows, pages

PROMPTS = 2000
PASSES = 64

#: All prompts in one pass, and next to nothing reserved for outputs: the decode is what is measured.
ALL_AT_ONCE = SglangConfig(max_prefill_tokens=UNLIMITED, chunked_prefill_size=UNLIMITED, clip_max_new_tokens=64)


def prompts(page: int) -> list[Prompt]:
    """Prompts of 512 to 1024 token ids that share one of 50 beginnings of 256."""
    rng = np.random.default_rng(1)
    heads = rng.integers(0, 2**32, (50, 256), dtype=np.uint32)
    made = []
    for _ in range(PROMPTS):
        tail = rng.integers(0, 2**32, int(rng.integers(256, 769)), dtype=np.uint32)
        tokens = np.concatenate([heads[int(rng.integers(50))], tail])
        runs, _ = content.runs_parts([tokens], None, 0, 1, 0, page, UNLIMITED, False)
        made.append((np.ascontiguousarray(runs), len(tokens) // page))
    return made


def empty_tree(page: int) -> RankState:
    """A rank with an empty tree and room for all prompts."""
    identity = kvsim.RankIdentity()
    return kvsim.SchedulerRank(identity, config(page, backend="sglang", num_gpu_blocks=2_500_000 // page))._state


@pytest.mark.parametrize("page", [1, 16])
def test_match_and_insert(benchmark: Any, page: int) -> None:
    work = prompts(page)

    def pairs(state: RankState) -> None:
        for runs, pages in work:
            state.tree_match(runs, pages)
            state.tree_insert(0, runs, pages)

    benchmark.extra_info.update(pairs=PROMPTS, pages=sum(pages for _, pages in work))
    benchmark.pedantic(pairs, setup=lambda: ((empty_tree(page),), {}), rounds=10)


@pytest.mark.parametrize("page", [1, 16])
def test_evict_256_tokens_of_2000_leaves(benchmark: Any, page: int) -> None:
    state = empty_tree(page)
    for runs, pages in prompts(page):
        state.tree_insert(0, runs, pages)
    benchmark.extra_info.update(tokens=256, pages=256 // page, leaves=PROMPTS)
    benchmark.pedantic(
        lambda fork: fork.tree_evict(256 // page), setup=lambda: ((state.fork(),), {}), rounds=200, warmup_rounds=5
    )


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("n", [64, 256])
def test_decode_pass_through_the_contract(benchmark: Any, n: int, page: int) -> None:
    rank = decoding(n, page, backend="sglang", sglang=ALL_AT_ONCE)

    def passes(fork: kvsim.SchedulerRank) -> None:
        now = 0.0
        for _ in range(PASSES):
            now = step(fork, now)

    benchmark.extra_info.update(passes=PASSES, tokens=PASSES * n)
    benchmark.pedantic(passes, setup=lambda: ((rank.fork(),), {}), rounds=30)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("n", [64, 256])
def test_decode_pass_in_the_kernel(benchmark: Any, n: int, page: int) -> None:
    rank = decoding(n, page, backend="sglang", sglang=ALL_AT_ONCE)

    def passes(fork: kvsim.SchedulerRank) -> None:
        execute = fork._state.execute
        now = 0.0
        for _ in range(PASSES):
            now = execute(now)

    benchmark.extra_info.update(passes=PASSES, tokens=PASSES * n)
    benchmark.pedantic(passes, setup=lambda: ((rank.fork(),), {}), rounds=30)


@pytest.mark.parametrize("page", [1, 64])
def test_replay_of_the_example_trace(benchmark: Any, page: int) -> None:
    workload = kvsim.load_workload(example_trace_path())
    result = benchmark.pedantic(kvsim.replay, (workload, config(page, backend="sglang")), rounds=5)
    summary = result.summary
    benchmark.extra_info.update(requests=len(workload), passes=summary["passes"], tokens=summary["total_output_tokens"])


@pytest.mark.parametrize("pages", [32_768, 16_384], ids=["roomy", "tight"])
def test_replay_of_a_closed_loop(benchmark: Any, pages: int) -> None:
    workload = flat_workload(requests=2000, input_tokens=1024, output_tokens=128)
    engine = config(16, backend="sglang", num_gpu_blocks=pages)
    result = benchmark.pedantic(kvsim.replay, (workload, engine), {"concurrency": 256}, rounds=5)
    summary = result.summary
    benchmark.extra_info.update(
        requests=len(workload),
        passes=summary["passes"],
        tokens=summary["total_output_tokens"],
        preemptions=summary["preemptions"],
    )
