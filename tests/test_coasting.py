"""Requests that coast, and a rank whose passes all go through every request, leave the same behind.

``KVSIM_EXAMPLES`` sets the number of random workloads per test (default 150), for long runs.
"""

from __future__ import annotations

import os
import random
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim._core.drive import Fleet
from kvsim.config import EngineConfig, FixedTiming, NativeHostOffload, PolynomialTiming, SglangConfig
from kvsim.errors import KvsimError
from kvsim.replay.pool import PoolSpec
from kvsim.replay.run import Run
from kvsim.workload import workload_from_requests
from replay_ways import everything

EXAMPLES = int(os.environ.get("KVSIM_EXAMPLES", "150"))
FIRST = int(os.environ.get("KVSIM_SEED", "0"))


def requests(rng: random.Random) -> list[dict[str, Any]]:
    """Requests with shared prefixes, most of whose time is decoding."""
    items = []
    at = 0.0
    longest = rng.choice([20, 60, 200])
    pause = rng.choice([0.0, 5.0, 40.0, 300.0])
    for index in range(rng.choice([3, 8, 20, 40])):
        at += rng.choice([0.0, 0.0, rng.random(), 1.0]) * pause
        length = rng.randint(1, rng.choice([8, 40, 120]))
        output = rng.choice([0, 1, 2, 3, *[rng.randint(1, longest)] * 6])
        item: dict[str, Any] = {"arrival_time_ms": at, "output_tokens": output}
        if rng.random() < 0.3:
            item["input_tokens"] = length
        else:
            start = rng.choice([0, 1000])
            common = min(length, rng.choice([200, 16, 5]))
            own = [2**31 + 1000 * index + j for j in range(length - common)]
            item["input_token_ids"] = [*range(start, start + common), *own]
            if rng.random() < 0.5:
                # What one request computes another finds.
                item["output_token_ids"] = [start + length + j for j in range(output)]
        items.append(item)
    return items


TIMINGS = [
    PolynomialTiming(),
    FixedTiming(prefill_ms=10.0, decode_ms=3.0),
    FixedTiming(prefill_ms=0, decode_ms=2.5),
    FixedTiming(prefill_ms=0, decode_ms=0),
]


def paged(rng: random.Random) -> EngineConfig:
    block = rng.choice([2, 3, 4, 8, 16])
    caching = rng.random() < 0.75
    backend = rng.choice(["vllm", "vllm", "trtllm"])
    ruleset = rng.choice(["dynamo", "dynamo", "dynamo-1.3"])
    # Most workloads of `requests` want 1,000 to 4,000 tokens at once.
    tokens = rng.choice([300, 600, 1500, 6000])
    drafts = rng.choice([None, None, None, None, 2])
    host = None
    if backend == "vllm" and ruleset == "dynamo" and caching and rng.random() < 0.25:
        host = NativeHostOffload(
            num_host_blocks=rng.choice([8, 100, 1000]), d2h_bandwidth_gbps=0.01, h2d_bandwidth_gbps=0.02
        )
    return EngineConfig(
        backend=backend,
        ruleset=ruleset,
        num_gpu_blocks=max(2, tokens // block),
        block_size=block,
        max_model_len=rng.choice([None, None, None, 150]),
        max_num_seqs=rng.choice([None, 32, 6, 2]),
        max_num_batched_tokens=rng.choice([None, 256, 64, 16, 5]),
        enable_prefix_caching=caching,
        enable_chunked_prefill=rng.random() < 0.8,
        preemption_mode=rng.choice(["lifo", "lifo", "fifo"]),
        aic_nextn=drafts if host is None else None,
        aic_nextn_accept_rates="0.7,0.4" if drafts and host is None else None,
        kv_cache_bytes_per_token=None if host is None else 1000,
        native_host_offload=host,
        speedup_ratio=rng.choice([0.0, 1.0, 1.7]),
        timing_model=rng.choice(TIMINGS),
    )


def radix(rng: random.Random) -> EngineConfig:
    page = rng.choice([1, 2, 4, 4, 16, 64])
    # Small pools retract, and outputs that are not reserved in full make them.
    tokens = rng.choice([150, 300, 600, 1500, 6000])
    drafts = rng.choice([None, None, None, None, None, 2])
    return EngineConfig(
        backend="sglang",
        ruleset=rng.choice(["dynamo", "dynamo", "dynamo", "dynamo-1.3"]),
        num_gpu_blocks=max(2, tokens // page),
        block_size=page,
        max_model_len=rng.choice([None, None, None, 150]),
        max_num_seqs=rng.choice([None, 32, 6, 2]),
        enable_prefix_caching=rng.random() < 0.75,
        prefill_decode_interval=rng.choice([0, 0, 1, 3]),
        aic_nextn=drafts,
        aic_nextn_accept_rates="0.7,0.4" if drafts else None,
        speedup_ratio=rng.choice([0.0, 1.0, 1.7]),
        timing_model=rng.choice(TIMINGS),
        sglang=SglangConfig(
            schedule_policy=rng.choice(["fifo", "lpm"]),
            max_prefill_tokens=page * rng.choice([1000, 100, 16]),
            chunked_prefill_size=page * rng.choice([500, 100, 8]),
            clip_max_new_tokens=rng.choice([4096, 20, 4]),
            schedule_conservativeness=rng.choice([1.0, 0.3, 0.0]),
        ),
    )


def left_behind(items: list[dict[str, Any]], options: dict[str, Any], *, coast: bool) -> Any:
    """All that a run leaves behind, or its error."""
    module: Any = sys.modules[Run.__module__]
    module.Fleet = partial(Fleet, coast=coast)
    try:
        run = Run(workload_from_requests(items), **options)
        run.execute()
    except KvsimError as error:
        return str(error)
    finally:
        module.Fleet = Fleet
    for rank in run.ranks:
        rank.check_integrity()
    left = everything(run)
    left["handoffs"] = None if run.handoffs is None else run.handoffs.tobytes()
    left["offload"] = [list(run.offload_events(worker)) for worker in range(len(run.ranks))]
    left["events"] = [[rows.tobytes() for rows in rank._state.drain_events()] for rank in run.ranks]
    return left


def same_either_way(items: list[dict[str, Any]], options: dict[str, Any], about: Any) -> None:
    fast = left_behind(items, options, coast=True)
    slow = left_behind(items, options, coast=False)
    if fast != slow and not isinstance(fast, str):
        raise AssertionError(f"{about}: {[key for key in slow if fast[key] != slow[key]]} differ under {options}")
    assert fast == slow, about


def options_of(rng: random.Random, config: EngineConfig) -> dict[str, Any]:
    return {
        "config": config,
        "workers": rng.choice([1, 1, 2, 3]),
        "dp_size": rng.choice([1, 1, 1, 2]) if config.native_host_offload is None else 1,
        "concurrency": rng.choice([None, None, 1, 3, 16]),
        "max_sim_time_ms": rng.choice([None, None, 50.0, 333.3, 2000.0]),
        "record_passes": rng.random() < 0.5,
        "capture_admissions": rng.random() < 0.2,
        "capture_kv_events": rng.random() < 0.5,
        "capture_offload": config.native_host_offload is not None,
    }


@pytest.mark.parametrize("engine", [paged, radix])
def test_coasting_changes_nothing(engine: Any) -> None:
    for seed in range(FIRST, FIRST + EXAMPLES):
        rng = random.Random(f"{engine.__name__} {seed}")
        items = requests(rng)
        same_either_way(items, options_of(rng, engine(rng)), seed)


def side(rng: random.Random, config: EngineConfig) -> PoolSpec:
    return PoolSpec(config, workers=rng.choice([1, 2]), dp_size=rng.choice([1, 1, 2]))


def test_whoever_succeeds_at_this_instant_is_not_overtaken() -> None:
    """A request that ends in a pass without duration makes room for one that enters behind the next pass, not later."""
    config = EngineConfig(
        backend="sglang", num_gpu_blocks=300, block_size=4, timing_model=FixedTiming(prefill_ms=0, decode_ms=2.5)
    )
    items = [{"arrival_time_ms": 0.0, "input_tokens": 8, "output_tokens": n} for n in (100, 100, 6, 1, 9, 1, 7, 50)]
    for concurrency in (2, 3, 4):
        same_either_way(items, {"config": config, "concurrency": concurrency}, concurrency)


@pytest.mark.parametrize("engine", [paged, radix])
def test_coasting_changes_nothing_in_systems(engine: Any) -> None:
    """Sessions of placements, handoffs between pools, samples of a run: whatever Python leads."""
    for seed in range(FIRST, FIRST + EXAMPLES):
        rng = random.Random(f"system {engine.__name__} {seed}")
        items = requests(rng)
        config = engine(rng).replace(native_host_offload=None)
        options = options_of(rng, config)
        if rng.random() < 0.5:
            config = config.replace(ruleset="dynamo")
            for name in ("config", "workers", "dp_size", "capture_kv_events"):
                options.pop(name)
            options |= {"prefill": side(rng, config), "decode": side(rng, config)}
            options["handoff_latency_ms"] = rng.choice([0.0, 7.0])
        else:
            options["placement"] = rng.choice(["kv_router", "round_robin"])
        if rng.random() < 0.5:
            options["telemetry"] = kvsim.TelemetryOptions(sample_interval_ms=rng.choice([3.0, 50.0]))
        same_either_way(items, options, seed)


def test_whoever_looks_sees_every_token() -> None:
    """Views of a rank that coasts are exact, and looking changes nothing."""
    items = [{"arrival_time_ms": 0.0, "input_tokens": 10 + i, "output_tokens": 90 + i} for i in range(6)]
    config = EngineConfig(num_gpu_blocks=200, block_size=4, timing_model=FixedTiming(prefill_ms=10.0, decode_ms=3.0))
    seen = {}
    for looks in (False, True):
        run = Run(workload_from_requests(items), config)
        state = run.ranks[0]._state
        fleet = run._fleet
        n = len(items)
        fleet.set_feed(np.arange(n), np.zeros(n), np.zeros(n, np.int32))
        fleet.run(until_ms=10.0)
        for step in range(1, 120):
            fleet.run(until_ms=10.0 + 3.0 * step - 1.0)
            if looks:
                running = state.running_rows()
                assert set(running["generated"]) <= {step + 1}
                assert (running["length"] == running["num_input"] + running["generated"]).all()
                assert (running["computed"] == running["length"] - 1).all()
                state.fork().digest()
        seen[looks] = (run.ranks[0].digest(), run.records.tobytes())
    assert seen[False] == seen[True]


def test_a_head_that_waits_enters_as_soon_as_a_request_that_coasts_completes_its_next_block() -> None:
    """Its prompt is what the running request emits: with each block that becomes findable it needs one less."""
    config = EngineConfig(num_gpu_blocks=20, block_size=4, timing_model=FixedTiming(prefill_ms=10.0, decode_ms=3.0))
    waited = 0
    for at in range(12, 60):
        first = {"arrival_time_ms": 0.0, "input_token_ids": [*range(16)], "output_token_ids": [*range(16, 60)]}
        second = {"arrival_time_ms": float(at), "input_token_ids": [*range(80)], "output_tokens": 1}
        items = [{"output_tokens": 44, **first}, second]
        same_either_way(items, {"config": config}, at)
        run = Run(workload_from_requests(items), config)
        run.execute()
        ended, admitted = run.records["terminal_ms"][0], run.records["first_admit_ms"][1]
        assert admitted < ended
        waited += admitted > at + 3.0
    assert waited > 10
