"""Faults users reported on whole runs of simulators of this kind, each as a test of the whole kind.

Numbers are those of the list of reports; "fixed P/D" means that a pass with
prefill costs P ms and one with decode D ms.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim._core import content
from kvsim.compat import aisimulate
from kvsim.config import EngineConfig, FixedTiming, NativeHostOffload, SglangConfig
from kvsim.errors import ConfigError, WorkloadError
from kvsim.layout import RequestStatus
from kvsim.replay.run import Run
from kvsim.report import ReplayResult
from kvsim.workload import TraceProfile, generate_trace, load_workload, read_mooncake, session_workload, write_mooncake
from process_size import run_alone

BACKENDS = pytest.mark.parametrize("backend", ["vllm", "trtllm", "sglang"])


def engine_config(backend: Any = "vllm", prefill: float = 20.0, decode: float = 10.0, **fields: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "backend": backend,
            "num_gpu_blocks": 512,
            "block_size": 16,
            "timing_model": FixedTiming(prefill_ms=prefill, decode_ms=decode),
            **fields,
        }
    )


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------- 17


@BACKENDS
@pytest.mark.parametrize("length", [1, 32, 1000])
def test_17_a_row_without_output_ends_after_its_prefill_and_has_no_token_times(backend: str, length: int) -> None:
    result = kvsim.replay([{"input_tokens": length, "output_tokens": 0}], engine_config(backend))
    summary = result.summary
    assert summary["completed_requests"] == 1
    assert summary["mean_e2e_latency_ms"] == 20.0
    assert summary["num_ttft_samples"] == summary["num_tpot_samples"] == 0
    for name in ("ttft_ms", "ttst_ms", "tpot_ms", "itl_ms"):
        assert summary[f"mean_{name}"] is summary[f"median_{name}"] is None
    row = next(result.rows())
    assert (row["ttft_ms"], row["itl_ms"], row["e2e_latency_ms"]) == (None, None, 20.0)


@BACKENDS
@pytest.mark.parametrize("concurrency", [None, 1, 2])
def test_17_rows_without_output_free_their_slot_for_those_behind(backend: str, concurrency: int | None) -> None:
    items = [{"input_tokens": 32, "output_tokens": 3 * (k % 2)} for k in range(20)]
    result = kvsim.replay(items, engine_config(backend, max_num_seqs=1), concurrency=concurrency)
    assert result.summary["completed_requests"] == 20
    assert result.summary["num_ttft_samples"] == result.summary["num_tpot_samples"] == 10
    assert result.summary["num_e2e_latency_samples"] == 20


# ---------------------------------------------------------------- 18


@BACKENDS
@pytest.mark.parametrize(("outputs", "samples"), [((1, 3), 1), ((1, 1), 0), ((2, 7, 1, 1), 2)])
def test_18_a_single_token_has_no_gap_and_does_not_lower_the_mean(
    backend: str, outputs: tuple[int, ...], samples: int
) -> None:
    items = [{"input_tokens": 32, "output_tokens": k, "arrival_time_ms": 500.0 * i} for i, k in enumerate(outputs)]
    summary = kvsim.replay(items, engine_config(backend)).summary
    assert summary["num_tpot_samples"] == samples
    expected = 10.0 if samples else None
    assert summary["mean_tpot_ms"] == summary["mean_itl_ms"] == summary["p99_tpot_ms"] == expected


# ---------------------------------------------------------------- 20


@BACKENDS
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_20_the_first_token_comes_at_the_end_of_the_pass_that_completes_the_prompt(backend: str, chunks: int) -> None:
    size = 1008 // chunks // 16 * 16 + 16
    config = engine_config(
        backend, 120.0, 10.0, max_num_batched_tokens=size, sglang=SglangConfig(chunked_prefill_size=size)
    )
    row = next(kvsim.replay([{"input_tokens": 1000, "output_tokens": 3}], config).rows())
    passes = -(-1000 // size)
    assert row["ttft_ms"] == row["first_token_ms"] == 120.0 * passes
    assert row["ttst_ms"] == 10.0
    assert row["last_token_ms"] == 120.0 * passes + 20.0


# ---------------------------------------------------------------- 21


@pytest.mark.parametrize("mode", ["lifo", "fifo"])
@pytest.mark.parametrize("blocks", [12, 20])
def test_21_readmissions_do_not_count_as_hits_of_the_cache(mode: Any, blocks: int) -> None:
    items = [{"input_tokens": 60, "output_tokens": 90} for _ in range(6)]
    result = kvsim.replay(items, engine_config(num_gpu_blocks=blocks, preemption_mode=mode))
    summary, rows = result.summary, result.requests
    assert summary["preemptions"] > 0
    assert summary["first_admission_prefix_cache_reused_ratio"] == 0.0
    assert (rows["first_reused_tokens"] == 0).all()
    # What readmissions found is told apart, and is not counted as computed again.
    assert summary["prefix_cache_reused_ratio"] == rows["reused_tokens"].sum() / rows["input_tokens"].sum()
    # The newest token of a victim is computed for the first time when it comes back, often in its prefill.
    inputs = rows["input_tokens"].sum()
    most = inputs + summary["recomputed_tokens"] + summary["preemptions"]
    assert inputs < summary["committed_prefill_tokens"] <= most
    for row in result.rows():
        history = [entry["reused_input_tokens"] for entry in row["admission_history"]]
        assert row["first_admission_reused_input_tokens"] == history[0] == 0
        assert row["reused_input_tokens"] == max(history)


def test_21_the_rate_is_cached_over_prompt_tokens() -> None:
    items = [
        {
            "input_token_ids": [*range(64), *range(1000 * k, 1000 * k + 36)],
            "output_tokens": 2,
            "arrival_time_ms": 500.0 * k,
        }
        for k in range(1, 6)
    ]
    summary = kvsim.replay(items, engine_config()).summary
    assert summary["prefix_cache_reused_ratio"] == summary["first_admission_prefix_cache_reused_ratio"] == 4 * 64 / 500


# ---------------------------------------------------------------- 22


@pytest.mark.parametrize("concurrency", [None, 256])
def test_22_nothing_times_out_however_long_it_waits(concurrency: int | None) -> None:
    items = [{"input_tokens": 100, "output_tokens": 60} for _ in range(256)]
    config = engine_config(num_gpu_blocks=68 * 10, prefill=400.0, decode=2000.0)
    result = kvsim.replay(items, config, concurrency=concurrency)
    assert result.summary["completed_requests"] == 256
    assert result.summary["total_output_tokens"] == 256 * 60
    waited = result.requests["first_admit_ms"] - result.requests["arrival_ms"]
    assert waited.max() > 300_000


def test_22_what_a_cap_cuts_off_is_counted_and_its_tokens_are_not() -> None:
    items = [{"input_tokens": 100, "output_tokens": 60} for _ in range(256)]
    config = engine_config(num_gpu_blocks=68 * 10)
    whole = kvsim.replay(items, config)
    for share in (0.1, 0.5, 0.9):
        cap = whole.summary["duration_ms"] * share
        part = kvsim.replay(items, config, max_sim_time_ms=cap)
        done = part.requests["status"] == RequestStatus.COMPLETED
        assert 0 < part.summary["unfinished_requests"] == 256 - np.count_nonzero(done)
        assert part.summary["total_output_tokens"] == 60 * np.count_nonzero(done)
        assert part.requests["output_tokens"][~done].max() < 60
        # Throughput is over the time of the completed work, never over a time without the rest of it.
        assert part.summary["duration_ms"] <= cap


# ---------------------------------------------------------------- 28


@pytest.mark.parametrize(
    ("block", "rows", "line"),
    [
        (512, [{"input_length": 20, "hash_ids": [1, 2]}], 1),
        (64, [{"input_length": 64, "hash_ids": [1]}, {"input_length": 4096, "hash_ids": [1, 2]}], 2),
        (64, [{"input_length": 100, "hash_ids": [1, 2]}, {"input_length": 128, "hash_ids": [1, 2]}], 2),
    ],
    ids=["too many ids", "too few ids", "one id part and whole"],
)
def test_28_ids_that_do_not_cover_the_input_are_named_by_line_in_strict_mode(
    block: int, rows: list[dict[str, Any]], line: int, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "t.jsonl", [{"timestamp": k, "output_length": 2, **row} for k, row in enumerate(rows)])
    with pytest.raises(WorkloadError) as caught:
        kvsim.replay(path, engine_config(), strict=True, trace_block_size=block)
    assert caught.value.line == line
    assert str(path) in str(caught.value)
    # Otherwise what can be repaired is, and counted.
    workload = load_workload(path, block_size=block)
    assert kvsim.replay(workload, engine_config()).summary["completed_requests"] == len(rows)
    assert workload.clamped_rows == (1 if "too few" in str(caught.value) or rows[-1]["input_length"] == 4096 else 0)


# ---------------------------------------------------------------- 29


@pytest.mark.parametrize(
    ("stamps", "arrivals"),
    [
        ((1787267980083, 1787267980183), (0.0, 100.0)),
        ((500, 0), (500.0, 0.0)),
        ((..., 100), (0.0, 100.0)),
        ((7, 7, 3, 7), (4.0, 4.0, 0.0, 4.0)),
    ],
)
def test_29_a_trace_starts_at_its_first_arrival_and_completes_whatever_the_order(
    stamps: tuple[Any, ...], arrivals: tuple[float, ...], tmp_path: Path
) -> None:
    rows = [
        {"input_length": 20, "output_length": 2, "hash_ids": [k]} | ({} if at is ... else {"timestamp": at})
        for k, at in enumerate(stamps)
    ]
    result = kvsim.replay(write_rows(tmp_path / "t.jsonl", rows), engine_config(max_num_seqs=1))
    assert result.summary["completed_requests"] == len(stamps)
    assert result.requests["arrival_ms"].tolist() == list(arrivals)
    # Ties are served in the order of the file.
    order = np.argsort(result.requests["first_admit_ms"], kind="stable").tolist()
    assert order == sorted(range(len(stamps)), key=lambda k: arrivals[k])


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ([{"input_tokens": 4, "arrival_time_ms": -500.0}], "requests[0].arrival_time_ms"),
        ([{"input_tokens": 4}, {"input_tokens": 4, "arrival_time_ms": math.nan}], "requests[1].arrival_time_ms"),
        ([{"input_tokens": 4, "id": "a"}, {"input_tokens": 4, "id": "a"}], "requests[1].id"),
    ],
)
def test_29_impossible_times_and_repeated_ids_of_a_list_are_refused(items: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        kvsim.replay(items, engine_config())
    assert caught.value.field == field


@pytest.mark.parametrize(
    "rows",
    [
        [{"timestamp": 0}, {"timestamp": -500}],
        [{"timestamp": 0}, {"timestamp": "NaN"}],
        [{"timestamp": 0, "request_id": "a"}, {"timestamp": 1, "request_id": "a"}],
    ],
)
def test_29_impossible_times_and_repeated_ids_of_a_trace_are_named_by_line(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    good = {"input_length": 20, "output_length": 2, "hash_ids": [1]}
    with pytest.raises(WorkloadError) as caught:
        kvsim.replay(write_rows(tmp_path / "t.jsonl", [good | row for row in rows]), engine_config())
    assert caught.value.line == 2


# ---------------------------------------------------------------- 30


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("field", ["kv_transfer_bandwidth", "speedup_ratio", "decode_speedup_ratio"])
def test_30_bad_numbers_of_a_configuration_are_named(field: str, bad: float) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_config(**{field: bad})
    assert caught.value.field == field


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_30_bad_numbers_inside_a_group_of_the_configuration_are_named(bad: float) -> None:
    with pytest.raises(ConfigError, match=r"timing_model\.prefill_ms"):
        FixedTiming(prefill_ms=bad, decode_ms=1.0)
    with pytest.raises(ConfigError, match=r"native_host_offload\.d2h_bandwidth_gbps"):
        NativeHostOffload(num_host_blocks=1, d2h_bandwidth_gbps=bad)
    with pytest.raises(ConfigError, match=r"sglang\.schedule_conservativeness"):
        SglangConfig(schedule_conservativeness=bad)


@pytest.mark.parametrize("rate", [0, 0.0, -1.0])
@pytest.mark.parametrize(("load", "key"), [("poisson", "request_rate"), ("constant_rate", "request_rate")])
def test_30_a_rate_of_zero_is_refused_instead_of_looping_for_ever(rate: float, load: str, key: str) -> None:
    payload = {
        "spec": {"engine": {"rank": {"block_size": 16}}},
        "traffic": {"source_type": "synthetic", "load_type": load, "isl": 8, "osl": 2, "request_count": 3, key: rate},
    }
    with pytest.raises(ConfigError, match=f"traffic.{key}"):
        aisimulate.run_replay_json(json.dumps(payload))


def test_30_statistics_of_nothing_are_null_in_every_output(tmp_path: Path) -> None:
    result = kvsim.replay([{"input_tokens": 100_000, "output_tokens": 5}], engine_config())
    assert result.summary["rejected_requests"] == 1
    text = result.to_json()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["p99_ttft_ms"] is None
    assert "nan" not in result.table().lower()
    assert "NaN" not in result.to_jsonl()


# ---------------------------------------------------------------- 34


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("first", "output", "second"), [(4190, 592, 592), (100, 7, 20), (64, 64, 64)])
def test_34_the_prompt_of_a_delta_turn_is_the_whole_conversation_and_finds_the_outputs(
    block_size: int, first: int, output: int, second: int, tmp_path: Path
) -> None:
    rows = [
        {"session_id": "s", "timestamp": 0, "input_length": first, "output_length": output, "hash_ids": list(range(9))},
        {"session_id": "s", "delay": 10, "input_length": second, "output_length": 16, "hash_ids": list(range(20, 22))},
    ]
    path = write_rows(tmp_path / "t.jsonl", rows)
    config = engine_config(block_size=block_size, num_gpu_blocks=1000)
    result = kvsim.replay(path, config, trace_format="mooncake-delta")
    assert result.requests["input_tokens"].tolist() == [first, first + output + second]
    # All but the last output token were computed; what they fill is found again.
    assert result.requests["reused_tokens"][1] == (first + output - 1) // block_size * block_size
    assert [row["input_length"] for row in result.rows()] == [first, first + output + second]


# ---------------------------------------------------------------- 35


class Model:
    """Some latency model; `nap_s` is the real time it thinks."""

    def __init__(self, nap_s: float) -> None:
        self.nap_s = nap_s

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        time.sleep(self.nap_s)
        return 1.0 + 0.01 * batch_size * (mean_isl - mean_prefix)

    def predict_decode_ms(self, batch_size: int, active_kv_tokens: int, mean_context: int, total: int) -> float:
        time.sleep(self.nap_s)
        return 2.0 + 0.125 * batch_size


@pytest.mark.parametrize("concurrency", [None, 2])
def test_35_the_time_a_model_takes_to_answer_is_not_simulated_time(concurrency: int | None) -> None:
    items = [{"input_tokens": 100 + k, "output_tokens": 4, "arrival_time_ms": 3.0 * k} for k in range(4)]
    runs = [
        kvsim.replay(items, engine_config(), timing=Model(nap), concurrency=concurrency, record_passes=True)
        for nap in (0.0, 0.02)
    ]
    for result in runs:
        assert result.passes is not None
    assert runs[0].to_json() == runs[1].to_json()
    assert runs[0].to_jsonl() == runs[1].to_jsonl()
    assert runs[0].passes.tobytes() == runs[1].passes.tobytes()  # type: ignore[union-attr]
    assert runs[1].wall["wall_time_ms"] > 20.0


# ---------------------------------------------------------------- 36


def table_of(result: ReplayResult, name: str) -> dict[str, Any]:
    """Per-request table by one of its names, without all names."""
    names = {"uuid", "request_id", "session_id", "turn_index"}
    return {row[name]: {key: value for key, value in row.items() if key not in names} for row in result.rows()}


def exported(run: Run) -> list[dict[str, Any]]:
    """What a recorder in front of the engines would have seen of a run: when, and which tokens."""
    items = []
    for row, record in enumerate(run.records):
        items.append(
            {
                "id": uuid.UUID(int=int(record["id_lo"])),
                "arrival_time_ms": float(record["arrival_ms"]),
                "input_token_ids": content.expand_parts(run.driver.prompt_parts(row)),
                "output_token_ids": run.workload.planned_token_ids(row),
            }
        )
    return items


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
@pytest.mark.parametrize(("concurrency", "workers"), [(None, 1), (None, 3), (7, 2)])
@pytest.mark.parametrize("delta", [False, True])
def test_36_a_run_replayed_from_its_own_export_has_the_same_per_request_table(
    backend: str, concurrency: int | None, workers: int, delta: bool, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    profile = TraceProfile(requests=200, rate=20.0, block_size=16, session_ids=True, max_input=3000, max_output=60)
    write_mooncake(path, generate_trace(profile))
    config = engine_config(backend, block_size=16 if backend == "vllm" else 1)
    config = config.replace(num_gpu_blocks=8000 // config.tokens_per_block)
    workload = read_mooncake(path, block_size=16, delta=delta)
    run = Run(workload, config, workers=workers, concurrency=concurrency, capture_admissions=True)
    run.execute()
    first = run.result()
    assert first.summary["completed_requests"] >= 190
    assert first.summary["prefix_cache_reused_ratio"] > 0.01
    assert workload.has_sessions
    second = kvsim.replay(exported(run), config, workers=workers)
    assert table_of(second, "request_id") == table_of(first, "uuid")
    for key in ("passes", "committed_prefill_tokens", "preemptions", "duration_ms", "mean_itl_ms", "p99_itl_ms"):
        assert second.summary[key] == first.summary[key]


# ---------------------------------------------------------------- 37


def test_37_the_block_size_does_not_change_the_work_of_a_run_that_fits() -> None:
    """With room for all, small blocks give the passes of large ones: work is per pass, not per block."""
    items = [
        {"input_tokens": 1000 + 37 * k, "output_tokens": 100, "arrival_time_ms": 40.0 * (k // 4)} for k in range(60)
    ]
    runs = [
        kvsim.replay(
            items,
            engine_config(block_size=size, num_gpu_blocks=400_000 // size, enable_prefix_caching=False),
            record_passes=True,
        )
        for size in (16, 128, 512)
    ]
    first = runs[0].passes
    assert first is not None
    same = [name for name in first.dtype.names or () if name not in ("active_blocks", "inactive_blocks")]
    for other in runs[1:]:
        assert other.passes is not None
        assert other.passes[same].tolist() == first[same].tolist()
        assert other.requests.tobytes() == runs[0].requests.tobytes()


_MILLION = """
import kvsim
from process_size import peak_mb
from kvsim.config import EngineConfig, FixedTiming

config = EngineConfig(num_gpu_blocks=20000, block_size=16, timing_model=FixedTiming(prefill_ms=3.0, decode_ms=1.5))

def run(passes):
    items = [{"input_tokens": 16 + k, "output_tokens": passes // 4, "arrival_time_ms": 0.0} for k in range(4)]
    summary = kvsim.replay(items, config, concurrency=1).summary
    assert summary["completed_requests"] == 4
    assert summary["passes"] == 4 * (passes // 4), summary["passes"]
    return peak_mb()

before = run(2000)
print(run(1_000_000) - before)
"""


def test_37_a_million_passes_take_no_memory() -> None:
    """Long decodes without captures, in a process of its own: its greatest size hardly grows."""
    assert float(run_alone(_MILLION)) < 20.0


def test_37_a_sparse_trace_of_many_sessions_costs_one_pass_per_step() -> None:
    """Nothing is done for the time that passes between requests, nor for sessions that are not active."""
    count = 20_000
    workload = session_workload(
        sessions=count // 2,
        turns=2,
        input_tokens=20,
        output_tokens=2,
        block_size=16,
        arrivals_ms=1e6 * np.arange(count // 2),
        delay_ms=5000.0,
    )
    summary = kvsim.replay(workload, engine_config()).summary
    assert summary["completed_requests"] == count
    assert summary["passes"] == 2 * count
    assert summary["mean_ttft_ms"] == 20.0
