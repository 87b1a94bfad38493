"""What whole runs cost."""

from __future__ import annotations

from typing import Any

import pytest

import kvsim
from kvsim.workload import example_trace_path, flat_workload
from ranks import FIXED


def test_load_of_the_example_trace(benchmark: Any) -> None:
    workload = benchmark(kvsim.load_workload, example_trace_path())
    benchmark.extra_info.update(requests=len(workload), tokens=workload.total_input_tokens)


@pytest.mark.parametrize("block_size", [16, 64])
def test_replay_of_the_example_trace(benchmark: Any, block_size: int) -> None:
    workload = kvsim.load_workload(example_trace_path())
    config = kvsim.EngineConfig(block_size=block_size, num_gpu_blocks=(1 << 20) // block_size, timing_model=FIXED)
    result = benchmark.pedantic(kvsim.replay, (workload, config), rounds=5)
    summary = result.summary
    benchmark.extra_info.update(requests=len(workload), passes=summary["passes"], tokens=summary["total_output_tokens"])


@pytest.mark.parametrize("blocks", [32_768, 16_384], ids=["roomy", "tight"])
def test_replay_of_a_closed_loop(benchmark: Any, blocks: int) -> None:
    workload = flat_workload(requests=2000, input_tokens=1024, output_tokens=128)
    config = kvsim.EngineConfig(block_size=16, num_gpu_blocks=blocks, timing_model=FIXED)
    result = benchmark.pedantic(kvsim.replay, (workload, config), {"concurrency": 256}, rounds=5)
    summary = result.summary
    benchmark.extra_info.update(
        requests=len(workload),
        passes=summary["passes"],
        tokens=summary["total_output_tokens"],
        preemptions=summary["preemptions"],
    )
