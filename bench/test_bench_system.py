"""What runs of many engines cost: handoffs, routing, host memory, numbers of workers."""

from __future__ import annotations

from typing import Any

import pytest

import kvsim
from kvsim.contract import TransferTiming
from kvsim.replay.coordinator import Coordinator, Fact, Outcome
from kvsim.workload import example_trace_path
from ranks import FIXED

ENGINE = kvsim.EngineConfig(block_size=64, num_gpu_blocks=16_384, timing_model=FIXED)
WIRED = ENGINE.replace(kv_transfer_bytes_per_token=131_072, kv_transfer_bandwidth=50.0)


def pools(config: kvsim.EngineConfig) -> dict[str, Any]:
    return {"prefill": kvsim.PoolSpec(config, 2), "decode": kvsim.PoolSpec(config, 2)}


def measured(benchmark: Any, workload: kvsim.Workload, **options: Any) -> None:
    result = benchmark.pedantic(kvsim.replay, (workload,), options, rounds=5)
    benchmark.extra_info.update(requests=len(workload), passes=result.summary["passes"])


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_prefill_and_decode_pools(benchmark: Any, backend: str) -> None:
    workload = kvsim.load_workload(example_trace_path())
    measured(benchmark, workload, **pools(WIRED.replace(backend=backend)))


@pytest.mark.parametrize("placement", ["round_robin", "kv_router"])
def test_eight_workers(benchmark: Any, placement: str) -> None:
    measured(benchmark, kvsim.load_workload(example_trace_path()), config=ENGINE, workers=8, placement=placement)


@pytest.mark.parametrize("workers", [1, 8, 64])
def test_number_of_workers(benchmark: Any, workers: int) -> None:
    measured(benchmark, kvsim.load_workload(example_trace_path()), config=ENGINE, workers=workers)


def test_host_memory(benchmark: Any) -> None:
    config = ENGINE.replace(
        num_gpu_blocks=2048,
        kv_cache_bytes_per_token=131_072,
        native_host_offload=kvsim.NativeHostOffload(num_host_blocks=16_384),
    )
    measured(benchmark, kvsim.load_workload(example_trace_path()), config=config)


def test_coordinator(benchmark: Any) -> None:
    """One handoff from start to end, with nobody carrying it out."""
    timing = TransferTiming("full_prompt", 1000, 131_072, 50.0)

    def life() -> Coordinator:
        one = Coordinator(True, 1)
        one.start()
        one.outcome(1, Outcome.SUBMITTED)
        one.fact(Fact.SOURCE_HELD, timing)
        one.outcome(2, Outcome.ACCEPTED)
        one.fact(Fact.DESTINATION_RESERVED, 1024)
        one.outcome(3, Outcome.SCHEDULED)
        one.fact(Fact.TRANSFER_COMPLETED)
        one.outcome(4, Outcome.APPLIED)
        one.outcome(5, Outcome.APPLIED)
        return one

    assert benchmark(life).ended
