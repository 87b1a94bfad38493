"""The KV router: placements of prompts of 190 blocks on 8 workers. Read `extra_info` for the operations per round."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvsim import layout
from kvsim.placement import KvRouter, PlacedRequest, PoolInfo
from kvsim.placement.prompts import PlacedRequests
from kvsim.workload import ArrivalDriver, example_trace_path, load_workload

WORKERS = 8
BLOCKS = 190
BLOCK_SIZE = 64
REQUESTS = 1000
IN_FLIGHT = 128


def prompts() -> list[npt.NDArray[np.uint64]]:
    """Hashes of prompts, every other of which begins with one of 50 heads of 100 blocks."""
    rng = np.random.default_rng(1)
    heads = rng.integers(0, 2**64, (50, 100), dtype=np.uint64)
    made = [rng.integers(0, 2**64, BLOCKS, dtype=np.uint64) for _ in range(2 * REQUESTS)]
    for i in range(0, len(made), 2):
        made[i][:100] = heads[i // 2 % 50]
    return made


def stored(hashes: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """One KV event that stores blocks."""
    event, blocks = np.zeros(1, layout.EVENT), np.zeros(len(hashes), layout.EVENT_BLOCK)
    event["count"], blocks["block_hash"] = len(hashes), hashes
    return event, blocks


def warm_router(known: list[npt.NDArray[np.uint64]]) -> KvRouter:
    """A router whose workers have the prompts in their caches, in turn."""
    router = KvRouter()
    router.start(PoolInfo(block_size=BLOCK_SIZE, workers=tuple(range(WORKERS))))
    for i, hashes in enumerate(known):
        router.observe(i % WORKERS, 0, *stored(hashes))
    return router


def test_place_and_let_go(benchmark: Any) -> None:
    work = prompts()
    fresh = [
        PlacedRequest(row, row, BLOCKS * BLOCK_SIZE + 5, hashes=hashes) for row, hashes in enumerate(work[REQUESTS:])
    ]

    def lives(router: KvRouter) -> None:
        for row, request in enumerate(fresh):
            router.place(request, float(row))
            router.prefill_completed(row - 1, float(row))
            router.request_terminal(row - IN_FLIGHT, float(row))

    benchmark.extra_info.update(requests=REQUESTS)
    benchmark.pedantic(lives, setup=lambda: ((warm_router(work[:REQUESTS]),), {}), rounds=10)


@pytest.mark.parametrize("step", ["match", "choose", "begin", "end"])
def test_steps_of_the_kernel(benchmark: Any, step: str) -> None:
    work = prompts()
    state = warm_router(work[:REQUESTS])._state
    fresh = work[REQUESTS:]

    def calls() -> None:
        for i, hashes in enumerate(fresh):
            if step == "match":
                state.match(hashes)
            elif step == "choose":
                state.choose(BLOCKS * BLOCK_SIZE, state.overlap)
            elif step == "begin":
                state.begin(i % WORKERS, hashes, BLOCKS, 0)
            else:
                state.end(i % WORKERS, hashes, BLOCKS, 0)

    def undo() -> tuple[tuple[()], dict[str, Any]]:
        for i, hashes in enumerate(fresh):
            if step == "end":
                state.begin(i % WORKERS, hashes, BLOCKS, 0)
            elif step == "begin" and state.loads["requests"].sum() > 0:
                state.end(i % WORKERS, hashes, BLOCKS, 0)
        return (), {}

    benchmark.extra_info.update(calls=REQUESTS, blocks=REQUESTS * BLOCKS)
    benchmark.pedantic(calls, setup=undo, rounds=10)


def test_events(benchmark: Any) -> None:
    work = [stored(hashes) for hashes in prompts()]

    def follow(router: KvRouter) -> None:
        for i, (events, blocks) in enumerate(work):
            router.observe(i % WORKERS, 0, events, blocks)

    benchmark.extra_info.update(events=len(work), blocks=len(work) * BLOCKS)
    benchmark.pedantic(follow, setup=lambda: ((warm_router([]),), {}), rounds=5)


def test_requests_of_a_trace_with_their_hashes(benchmark: Any) -> None:
    driver = ArrivalDriver(load_workload(example_trace_path()))
    requests = PlacedRequests(driver, BLOCK_SIZE)
    rows = range(min(REQUESTS, len(driver.workload)))

    def make() -> None:
        for row in rows:
            requests.make(row, 0.0).block_hashes.sum()

    benchmark.extra_info.update(
        requests=len(rows), blocks=int(driver.workload.specs["input_tokens"].sum()) // BLOCK_SIZE
    )
    benchmark.pedantic(make, rounds=10)
