"""Whichever way a workload is run, the result is the same.

``KVSIM_EXAMPLES`` sets the number of random workloads of the first test (default 150), for long runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.config import EngineConfig, FixedTiming, SglangConfig
from kvsim.contract import ForwardPassMetrics
from kvsim.replay.run import Run
from kvsim.workload import Workload, session_workload, workload_from_requests
from replay_ways import (
    CAPS,
    CONCURRENCY,
    CONFIGS,
    RANKS,
    WORKERS,
    ContractRun,
    contract_run,
    digests,
    everything,
    request_lists,
    run_kernel,
    same_records,
    twin_run,
)

EXAMPLES = int(os.environ.get("KVSIM_EXAMPLES", "150"))


def examples(share: float = 1.0) -> Any:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=max(10, int(EXAMPLES * share)), deadline=None, suppress_health_check=quiet)


# ---------------------------------------------------------------- ways to run


@examples(2)
@given(items=request_lists(), config=CONFIGS, workers=WORKERS, concurrency=CONCURRENCY, cap=CAPS)
def test_the_kernel_pass_by_pass_and_the_model_agree(
    items: list[dict[str, Any]], config: EngineConfig, workers: int, concurrency: int | None, cap: float | None
) -> None:
    run = run_kernel(items, config, workers=workers, concurrency=concurrency, cap=cap)
    by_hand = contract_run(run, concurrency=concurrency, cap=cap)
    same_records(run, by_hand.records)
    same_digests(run, by_hand)
    same_passes(run, by_hand)
    same_records(run, twin_run(run, concurrency=concurrency, cap=cap))


@examples()
@given(items=request_lists(), config=CONFIGS, workers=WORKERS, dp_size=RANKS, concurrency=CONCURRENCY, cap=CAPS)
def test_releases_decided_one_by_one_change_nothing(
    items: list[dict[str, Any]],
    config: EngineConfig,
    workers: int,
    dp_size: int,
    concurrency: int | None,
    cap: float | None,
) -> None:
    options: dict[str, Any] = {"workers": workers, "dp_size": dp_size, "concurrency": concurrency, "cap": cap}
    assert everything(run_kernel(items, config, event_by_event=True, **options)) == everything(
        run_kernel(items, config, **options)
    )


@examples(0.5)
@given(
    items=request_lists(),
    config=CONFIGS,
    workers=WORKERS,
    cap=CAPS,
    pool=st.fixed_dictionaries(
        {"workers": st.integers(1, 2), "base_ms": st.sampled_from([0.0, 2.5]), "per_input_token_ms": st.just(0.125)}
    ),
)
def test_releases_decided_one_by_one_change_nothing_behind_a_tokenization_pool(
    items: list[dict[str, Any]], config: EngineConfig, workers: int, cap: float | None, pool: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"workers": workers, "cap": cap, "tokenization": pool}
    assert everything(run_kernel(items, config, event_by_event=True, **options)) == everything(
        run_kernel(items, config, **options)
    )


@examples(0.5)
@given(
    items=request_lists(),
    config=CONFIGS,
    workers=WORKERS,
    dp_size=RANKS,
    concurrency=CONCURRENCY,
    cap=CAPS,
    slice_passes=st.sampled_from([1, 2, 7]),
    event_by_event=st.booleans(),
)
def test_a_run_in_slices_is_the_whole_run(
    items: list[dict[str, Any]],
    config: EngineConfig,
    workers: int,
    dp_size: int,
    concurrency: int | None,
    cap: float | None,
    slice_passes: int,
    event_by_event: bool,
) -> None:
    options: dict[str, Any] = {"workers": workers, "dp_size": dp_size, "concurrency": concurrency, "cap": cap}
    sliced = run_kernel(items, config, slice_passes=slice_passes, event_by_event=event_by_event, **options)
    assert everything(sliced) == everything(run_kernel(items, config, **options))


@examples(0.5)
@given(items=request_lists(), config=CONFIGS, workers=WORKERS, concurrency=CONCURRENCY, cap=CAPS)
def test_what_is_captured_does_not_change_what_happens(
    items: list[dict[str, Any]], config: EngineConfig, workers: int, concurrency: int | None, cap: float | None
) -> None:
    options: dict[str, Any] = {"workers": workers, "concurrency": concurrency, "cap": cap}
    silent = run_kernel(items, config, capture=False, **options)
    loud = run_kernel(items, config, **options)
    assert silent.outputs is None
    assert silent.passes is None
    # The admission history is one of the captures.
    captured = {"admissions", "outputs", "passes", "rows"}
    mine, other = everything(silent), everything(loud)
    assert {key: mine[key] for key in mine.keys() - captured} == {key: other[key] for key in other.keys() - captured}
    assert loud.passes is not None
    assert len(loud.passes) == loud.result().totals.passes


@examples(0.5)
@given(items=request_lists(), config=CONFIGS, workers=WORKERS, concurrency=CONCURRENCY, data=st.data())
def test_other_request_ids_change_the_ids_and_nothing_else(
    items: list[dict[str, Any]], config: EngineConfig, workers: int, concurrency: int | None, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, 2**128 - 1), min_size=len(items), max_size=len(items), unique=True))
    workload = workload_from_requests(items)
    renamed = with_ids(workload, ids)
    one = run_kernel(workload, config, workers=workers, concurrency=concurrency)
    other = run_kernel(renamed, config, workers=workers, concurrency=concurrency)
    mine, theirs = everything(one), everything(other)
    for run in (one, other):
        run.records["id_hi"] = run.records["id_lo"] = 0
    assert one.records.tobytes() == other.records.tobytes()
    for key in ("gaps", "summary", "now", "admissions", "passes"):
        assert mine[key] == theirs[key], key


def same_digests(run: Run, by_hand: ContractRun) -> None:
    assert digests(run) == [seat.rank.digest() for seat in by_hand.seats]


def same_passes(run: Run, by_hand: ContractRun) -> None:
    """Forward-pass metrics of every pass that did something, worker by worker."""
    assert run.passes is not None
    names = [name for name in ForwardPassMetrics._fields if name != "duration_ms"]
    for worker in range(len(run.ranks)):
        rows = run.passes[run.passes["worker"] == worker]
        mine = [(*(row[name] for name in names), row["end_ms"] - row["start_ms"]) for row in rows]
        assert mine == [tuple(metrics) for metrics in by_hand.metrics[worker]]


def with_ids(workload: Workload, ids: list[int]) -> Workload:
    specs = workload.specs.copy()
    specs["id_hi"] = [number >> 64 for number in ids]
    specs["id_lo"] = [number & (2**64 - 1) for number in ids]
    return Workload(
        specs=specs,
        segments=workload.segments,
        tokens=workload.tokens,
        planned=workload.planned,
        delay_ms=workload.delay_ms,
        first_turn=workload.first_turn,
    )


@examples(0.5)
@given(items=request_lists(), config=CONFIGS, fork_after=st.integers(1, 12), concurrency=CONCURRENCY)
def test_a_rank_forked_in_the_middle_ends_like_the_rank_it_came_from(
    items: list[dict[str, Any]], config: EngineConfig, fork_after: int, concurrency: int | None
) -> None:
    run = run_kernel(items, config, concurrency=concurrency)
    forked = contract_run(run, concurrency=concurrency, cap=None, fork_after=fork_after)
    same_records(run, forked.records)
    same_digests(run, forked)
    for left, seat in zip(forked.left_behind, forked.seats, strict=False):
        left.check_integrity()
        assert forked.passes == fork_after or left.digest() != seat.rank.digest()


def test_a_prefill_interval_runs_out_while_nothing_is_there() -> None:
    """It is counted in passes, which take no time without work: who comes later does not wait for it."""
    config = EngineConfig(
        backend="sglang",
        num_gpu_blocks=30,
        block_size=1,
        max_model_len=9,
        prefill_decode_interval=1,
        timing_model=FixedTiming(prefill_ms=10.0, decode_ms=3.0),
    )
    first, late, long = ({"input_tokens": length, "output_tokens": 4} for length in (8, 8, 12))
    at = {"arrival_time_ms": 12.5}
    run = run_kernel([first, late | at, long | at], config)
    # The prompt that is too long is met by the pass that prefills the one before it, and told at its end.
    assert run.records["terminal_ms"].tolist() == [10.0, 22.5, 22.5]
    same_digests(run, contract_run(run, concurrency=None, cap=None))


# ---------------------------------------------------------------- the same bytes, everywhere

PAGED = EngineConfig(
    num_gpu_blocks=40, block_size=4, max_num_batched_tokens=64, aic_nextn=2, aic_nextn_accept_rates="0.7,0.4"
)
RADIX = EngineConfig(
    backend="sglang",
    num_gpu_blocks=60,
    block_size=2,
    sglang=SglangConfig(schedule_policy="lpm", chunked_prefill_size=32, schedule_conservativeness=0.1),
)
ENGINES = pytest.mark.parametrize("config", [PAGED, RADIX], ids=["paged", "radix"])


def mixed_list(count: int = 60) -> list[dict[str, Any]]:
    return [
        {
            "arrival_time_ms": 7.5 * (k // 3),
            "input_token_ids": [*range(4 * (k % 5)), *range(1000 * k, 1000 * k + 1 + 11 * k % 50)],
            "output_tokens": 5 * k % 23,
            "session_id": f"s{k % 4}",
        }
        for k in range(count)
    ]


def answer(config: EngineConfig) -> str:
    result = kvsim.replay(mixed_list(), config, workers=2, record_passes=True, capture_outputs=True, seed=3)
    assert result.passes is not None
    assert result.outputs is not None
    return result.to_json() + result.to_jsonl() + str(hash_of(result.passes)) + str(hash_of(result.outputs))


def hash_of(array: Any) -> str:
    return array.tobytes().hex()


@ENGINES
def test_two_runs_give_the_same_bytes(config: EngineConfig) -> None:
    first = answer(config)
    assert first == answer(config)
    assert json.loads(first.splitlines()[0] + "}") == {}
    assert kvsim.replay(mixed_list(), config, workers=2).summary["preemptions"] > 0


@ENGINES
@pytest.mark.parametrize("seed", ["0", "12345"])
def test_another_process_gives_the_same_bytes(config: EngineConfig, seed: str) -> None:
    name = "PAGED" if config is PAGED else "RADIX"
    code = f"import sys; import test_replay_equality as t; sys.stdout.write(t.answer(t.{name}))"
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [here, *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == answer(config)


def test_runs_in_threads_at_once_do_not_disturb_each_other() -> None:
    configs = [PAGED, RADIX, PAGED.replace(backend="trtllm"), PAGED.replace(num_gpu_blocks=25)] * 3
    alone = [answer(config) for config in configs[:4]] * 3
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, configs)) == alone


def test_long_runs_in_threads_at_once_do_not_disturb_each_other() -> None:
    """Each run spends its time in the kernel, without the lock of the interpreter."""
    workload = workload_from_requests([{"input_tokens": 100, "output_tokens": 3000} for _ in range(64)])
    configs = [
        EngineConfig(num_gpu_blocks=blocks, block_size=16, timing_model=FixedTiming(prefill_ms=3, decode_ms=1))
        for blocks in (400, 700, 1000, 13000)
    ]
    alone = [everything(run_kernel(workload, config, capture=False)) for config in configs]
    with ThreadPoolExecutor(4) as pool:
        together = pool.map(lambda config: everything(run_kernel(workload, config, capture=False)), configs)
        assert list(together) == alone


# ---------------------------------------------------------------- sessions


SESSION_ENGINES = pytest.mark.parametrize(
    "config",
    [
        PAGED.replace(num_gpu_blocks=90),
        RADIX.replace(num_gpu_blocks=400),
        PAGED.replace(num_gpu_blocks=90, enable_prefix_caching=False),
    ],
    ids=["paged", "radix", "no caching"],
)


def sessions() -> Workload:
    return session_workload(
        sessions=9,
        turns=3,
        input_tokens=30,
        output_tokens=7,
        block_size=4,
        arrivals_ms=np.repeat([0.0, 20.0, 33.0], 3),
        shared_prefix_ratio=0.5,
        prefix_groups=2,
        delay_ms=11.5,
    )


@SESSION_ENGINES
@pytest.mark.parametrize("concurrency", [None, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_sessions_run_the_same_whatever_is_captured_and_however_it_is_sliced(
    config: EngineConfig, concurrency: int | None, workers: int
) -> None:
    options: dict[str, Any] = {"concurrency": concurrency, "workers": workers}
    whole = run_kernel(sessions(), config, **options)
    assert whole.result().summary["completed_requests"] == 27
    expected = everything(whole)
    assert everything(run_kernel(sessions(), config, slice_passes=1, **options)) == expected
    silent = everything(run_kernel(sessions(), config, capture=False, **options))
    assert [silent[key] for key in ("records", "gaps", "summary", "digests")] == [
        expected[key] for key in ("records", "gaps", "summary", "digests")
    ]


@SESSION_ENGINES
@pytest.mark.parametrize("cap", [0.0, 25.0, 61.5, 100.0, 140.0])
def test_a_capped_run_is_the_beginning_of_the_whole_run(config: EngineConfig, cap: float) -> None:
    whole, part = run_kernel(sessions(), config), run_kernel(sessions(), config, cap=cap)
    assert part.now_ms <= cap
    assert whole.outputs is not None
    assert part.outputs is not None
    assert part.outputs.tolist() == whole.outputs[whole.outputs["at_ms"] <= cap].tolist()
    assert whole.passes is not None
    assert part.passes is not None
    assert part.passes.tolist() == whole.passes[whole.passes["end_ms"] <= cap].tolist()
    ended = whole.records["terminal_ms"] <= cap
    assert part.records[ended].tobytes() == whole.records[ended].tobytes()
    assert (part.records["status"][~ended] == 0).all()
    for name in ("arrival_ms", "first_token_ms", "second_token_ms"):
        seen = np.where(whole.records[name] <= cap, whole.records[name], np.nan)
        assert np.array_equal(part.records[name], seen, equal_nan=True), name
