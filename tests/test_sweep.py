"""Sweeps: the same table wherever runs execute, resumed or not; and branches of one rank."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

import kvsim
from kvsim import (
    CancelRequest,
    CommandContext,
    ConfigError,
    EngineConfig,
    FixedTiming,
    KvsimError,
    RandomParameter,
    RankIdentity,
    Request,
    SchedulerRank,
    Sla,
    Submit,
    WorkloadError,
    branch,
    sweep,
)
from kvsim.cli import main
from kvsim.workload import TraceProfile, generate_trace, write_mooncake

SRC = str(Path(kvsim.__file__).parents[1])

GRID = {
    "num_gpu_blocks": [64, 96, 2048],
    ("block_size", "max_num_seqs"): [(16, 8), (32, None)],
    "replay.workers": [1, 2],
}


@pytest.fixture(scope="module")
def workload():
    return kvsim.workload.workload_from_requests(
        [
            {"arrival_time_ms": 7.0 * i, "input_tokens": 100 + 37 * i % 300, "output_tokens": 5 + i % 40}
            for i in range(60)
        ]
    )


class Inline(Executor):
    """Runs at once; counts."""

    def __init__(self):
        self.calls = 0
        self.open = True

    def submit(self, function, /, *args, **kwargs):
        self.calls += 1
        future = Future()
        future.set_result(function(*args, **kwargs))
        return future

    def shutdown(self, *_, **__):
        self.open = False


# ---------------------------------------------------------------- one table


def test_rows_are_those_of_single_runs_in_grid_order(workload):
    result = sweep(workload, GRID, base={"backend": "vllm"}, seeds=[3, 1], repeats=2)
    assert len(result) == 3 * 2 * 2 * 2 * 2
    assert result.parameters == ("num_gpu_blocks", "block_size", "max_num_seqs", "replay.workers")
    row = 0
    for point, (blocks, (size, seqs), workers) in enumerate(
        (a, b, c) for a in GRID["num_gpu_blocks"] for b in GRID["block_size", "max_num_seqs"] for c in (1, 2)
    ):
        config = EngineConfig(num_gpu_blocks=blocks, block_size=size, max_num_seqs=seqs)
        for seed in (3, 1):
            alone = kvsim.replay(workload, config, workers=workers, seed=seed).summary
            for repeat in (0, 1):
                got = result.table[row]
                assert (got["point"], got["seed"], got["repeat"], got["status"]) == (point, seed, repeat, "ok")
                assert (got["num_gpu_blocks"], got["block_size"], got["replay.workers"]) == (blocks, size, workers)
                assert got["max_num_seqs"] == seqs or (seqs is None and math.isnan(got["max_num_seqs"]))
                numbers = {name: value for name, value in alone.items() if not isinstance(value, bool)}
                assert set(numbers) == set(result.metrics)
                for name, value in numbers.items():
                    assert got[name] == value or (value is None and math.isnan(got[name])), name
                row += 1


def test_threads_processes_and_executors_give_the_same_bytes(workload):
    wanted = sweep(workload, GRID, max_workers=1).table.tobytes()
    assert sweep(workload, GRID, max_workers=2).table.tobytes() == wanted
    assert sweep(workload, GRID, executor="processes", max_workers=2).table.tobytes() == wanted
    inline = Inline()
    assert sweep(workload, GRID, executor=inline).table.tobytes() == wanted
    assert inline.calls == 12
    assert inline.open
    with ThreadPoolExecutor(3) as pool:
        assert sweep(workload, GRID, executor=pool).table.tobytes() == wanted
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert sweep(workload, GRID, executor=pool).table.tobytes() == wanted


def test_ray_gives_the_same_bytes_on_two_workers(workload, monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed (extra ray)")
    monkeypatch.setenv("PYTHONPATH", SRC)
    wanted = sweep(workload, GRID).table.tobytes()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        assert sweep(workload, GRID, executor="ray").table.tobytes() == wanted
        assert ray.is_initialized()
    finally:
        ray.shutdown()


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_ray_that_is_not_installed_is_named(workload):
    with pytest.raises(ConfigError, match=r"executor: 'ray' needs the extra: pip install 'kvsim\[ray\]'"):
        sweep(workload, {}, executor="ray")


def test_max_workers_bounds_what_runs_at_once(workload):
    lock = threading.Lock()
    running, most = 0, 0

    class Counting(ThreadPoolExecutor):
        def submit(self, function, /, *arguments):
            def counted():
                nonlocal running, most
                with lock:
                    running += 1
                    most = max(most, running)
                try:
                    return function(*arguments)
                finally:
                    with lock:
                        running -= 1

            return super().submit(counted)

    with Counting(4) as pool:
        sweep(workload, GRID, executor=pool, max_workers=2)
    assert running == 0
    assert 1 <= most <= 2


def test_sessions_and_closed_loops_are_swept_too():
    rows = [
        {"session_id": f"s{i % 4}", "arrival_time_ms": 3.0 * i, "input_tokens": 64, "output_tokens": 9}
        for i in range(12)
    ]
    grid = {"num_gpu_blocks": [64, 128], "replay.concurrency": [None, 2]}
    one, two = (sweep(rows, grid, base={"block_size": 16}, max_workers=n) for n in (1, 2))
    assert one.num_errors == 0
    assert one.table.tobytes() == two.table.tobytes()


def test_a_failing_point_is_a_row_and_no_more(workload):
    grid = {"block_size": [1, 16], "replay.workers": [0, 1]}
    for executor in ("threads", "processes"):
        result = sweep(workload, grid, executor=executor, max_workers=1)
        assert result["status"].tolist() == ["error", "error", "error", "ok"]
        assert result["error"].tolist() == [
            "block_size: must lie in 2 <= block_size <= 2147483647, got 1",
            "block_size: must lie in 2 <= block_size <= 2147483647, got 1",
            "workers: must be an int >= 1, got 0",
            "",
        ]
        assert np.isnan(result["mean_ttft_ms"]).tolist() == [True, True, True, False]
        assert result.num_errors == 3


def test_a_model_that_fails_is_a_row_too(workload):
    class Broken:
        def predict_prefill_ms(self, *_):
            raise ZeroDivisionError("by nothing")

        predict_decode_ms = predict_prefill_ms

    result = sweep(workload, {"block_size": [16]}, replay_options={"timing": Broken()})
    assert result["status"].tolist() == ["error"]
    assert "by nothing" in result["error"][0]


def test_options_that_cannot_be_pickled_are_named_before_any_run(workload):
    class Local:
        def predict_prefill_ms(self, *_):
            return 1.0

        predict_decode_ms = predict_prefill_ms

    for executor in ("processes", Inline()):
        with pytest.raises(ConfigError, match=r"executor: .* needs options that can be pickled"):
            sweep(workload, {}, replay_options={"timing": Local()}, executor=executor)


def test_a_worker_that_dies_ends_the_sweep_with_an_error(workload):
    class Dying(Inline):
        def submit(self, *_, **__):
            from concurrent.futures.process import BrokenProcessPool

            future = Future()
            future.set_exception(BrokenProcessPool("killed"))
            return future

    with pytest.raises(KvsimError, match=r"worker of the executor died.*killed"):
        sweep(workload, {}, executor=Dying())


def test_a_grid_without_parameters_is_one_point(workload):
    result = sweep(workload, {}, base=EngineConfig(block_size=16), metrics=["mean_ttft_ms"])
    assert result.columns == ("point", "seed", "repeat", "mean_ttft_ms", "status", "error")
    assert len(result) == 1


# ---------------------------------------------------------------- what is swept


def test_a_mapping_as_base_leaves_the_block_size_to_the_backend(workload):
    result = sweep(workload, {"backend": ["vllm", "sglang", "trtllm"]}, base={"num_gpu_blocks": 4096})
    for backend, got in zip(("vllm", "sglang", "trtllm"), result.table, strict=True):
        alone = kvsim.replay(workload, EngineConfig(backend=backend, num_gpu_blocks=4096)).summary
        assert (got["backend"], got["mean_ttft_ms"], got["passes"]) == (
            backend,
            alone["mean_ttft_ms"],
            alone["passes"],
        )


def test_nested_parameters_and_whole_groups_reach_the_configuration(workload):
    slow, fast = FixedTiming(prefill_ms=50, decode_ms=20), {"type": "fixed", "prefill_ms": 5, "decode_ms": 2}
    grid = {"sglang.schedule_policy": ["fifo", "lpm"], "timing_model": [slow, fast]}
    result = sweep(workload, grid, base={"backend": "sglang", "block_size": 16})
    assert result["sglang.schedule_policy"].tolist() == ["fifo", "fifo", "lpm", "lpm"]
    assert [json.loads(text)["decode_ms"] for text in result["timing_model"].tolist()] == [20, 2, 20, 2]
    assert result["mean_itl_ms"][0] > 5 * result["mean_itl_ms"][1]


def test_random_parameters_are_drawn_together_and_are_a_function_of_name_and_seed():
    wide = RandomParameter(1, 4096, log=True, integer=True, samples=500)
    values = wide.values("num_gpu_blocks")
    assert values == wide.values("num_gpu_blocks") != wide.values("max_num_seqs")
    assert values != RandomParameter(1, 4096, log=True, integer=True, samples=500, seed=1).values("num_gpu_blocks")
    assert all(isinstance(value, int) and 1 <= value <= 4096 for value in values)
    assert 0.35 < np.mean(np.array(values) < 64) < 0.65  # half of the logarithm
    flips = RandomParameter(0, 1, integer=True, samples=200).values("x")
    assert set(flips) == {0, 1}
    assert 60 < sum(flips) < 140
    real = RandomParameter(2.0, 3.0, samples=100).values("x")
    assert all(2.0 <= value <= 3.0 for value in real)
    assert len(set(real)) == 100


def test_random_points_are_combined_with_the_rest_of_the_grid(workload):
    grid = {
        "block_size": [16, 32],
        "num_gpu_blocks": RandomParameter(256, 512, integer=True, samples=3),
        "speedup_ratio": RandomParameter(0.5, 2.0, samples=3),
    }
    result = sweep(workload, grid)
    assert len(result) == 6
    assert result["num_gpu_blocks"][:3].tolist() == result["num_gpu_blocks"][3:].tolist()
    drawn = grid["num_gpu_blocks"].values("num_gpu_blocks")
    assert result["num_gpu_blocks"][:3].tolist() == drawn
    assert result["speedup_ratio"].dtype == np.float64


def test_points_can_be_spelled_out(workload):
    points = [{"num_gpu_blocks": 64, "block_size": 16}, {"block_size": 32, "num_gpu_blocks": np.int64(128)}]
    result = sweep(workload, {"replay.workers": [1, 2]}, points=points)
    assert result["num_gpu_blocks"].tolist() == [64, 64, 128, 128]
    assert result["block_size"].tolist() == [16, 16, 32, 32]
    assert result["replay.workers"].tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("values", "dtype", "shown"),
    [
        ([True, False], "?", [True, False]),
        ([1, 2.5], "<f8", [1.0, 2.5]),
        ([4, None], "<f8", [4.0, math.nan]),
        (["a", "bcd"], "<U3", ["a", "bcd"]),
        ([1, "a"], "<U3", ["1", '"a"']),
        ([None, None], "<U4", ["null", "null"]),
        ([2**64, 1], "<U20", ["18446744073709551616", "1"]),
    ],
)
def test_columns_take_the_type_of_their_values(workload, values, dtype, shown):
    column = sweep(workload, {"max_model_len": values}, metrics=[])["max_model_len"]
    assert column.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(column, np.array(shown, dtype))


@pytest.mark.parametrize(
    ("grid", "options", "text"),
    [
        ({"num_blocks": [1]}, {}, "num_blocks: unknown parameter; expected a field of EngineConfig"),
        ({"sglang.policy": [1]}, {}, "sglang.policy: unknown parameter; sglang has the fields chunked_prefill_size"),
        ({"num_gpu_blocks.x": [1]}, {}, "num_gpu_blocks.x: unknown parameter; num_gpu_blocks has no fields"),
        ({"sglang.": [1]}, {}, "sglang.: unknown parameter"),
        ({"replay.seed": [1]}, {}, "replay.seed: unknown parameter; of a replay there are replay.workers"),
        ({3: [1]}, {}, "grid: expected the name of a parameter, got 3"),
        ([1], {}, "grid: expected a mapping"),
        ({"num_gpu_blocks": []}, {}, "num_gpu_blocks: has no values"),
        ({"num_gpu_blocks": 5}, {}, "num_gpu_blocks: expected a list of values, got 5"),
        ({"backend": "vllm"}, {}, "backend: expected a list of values, got 'vllm'"),
        ({"num_gpu_blocks": [object]}, {}, "num_gpu_blocks: expected a plain value"),
        ({("num_gpu_blocks", "block_size"): [(1,)]}, {}, r"num_gpu_blocks,block_size: expected tuples of 2 values"),
        ({(): [()]}, {}, "grid: linked parameters need at least one name"),
        ({("block_size",): RandomParameter(1, 2)}, {}, "block_size: linked parameters need a list of tuples"),
        ({"block_size": [1], ("block_size", "backend"): [(1, "vllm")]}, {}, "block_size: is given more than once"),
        ({"sglang": [{}], "sglang.schedule_policy": ["lpm"]}, {}, "sglang.schedule_policy: is part of sglang"),
        (
            {"block_size": RandomParameter(1, 2, samples=2), "num_gpu_blocks": RandomParameter(1, 2, samples=3)},
            {},
            r"block_size: random parameters .* got \[2, 3\]",
        ),
        ({}, {"points": []}, "points: is empty"),
        ({}, {"points": [3]}, "points: expected a list of mappings, got 3"),
        ({}, {"points": {"block_size": 3}}, "points: expected a list of mappings"),
        ({}, {"points": [{"block_size": 16}, {"backend": "vllm"}]}, "points: .* point 1 differs in 'backend'"),
        ({}, {"base": {"num_gpu_blocks": 0}}, "num_gpu_blocks: must lie in"),
        ({}, {"base": 3}, "base: expected an EngineConfig"),
        ({}, {"replay_options": {"seed": 1}}, "replay_options.seed: must be one of .*; use seeds"),
        ({}, {"replay_options": {"record_passes": True}}, "replay_options.record_passes: must be one of"),
        ({}, {"replay_options": 3}, "replay_options: expected a mapping"),
        ({}, {"replay_options": {"sla": 3}}, "replay_options.sla: expected None or a Sla"),
        ({}, {"seeds": []}, "seeds: is empty"),
        ({}, {"seeds": 3}, "seeds: expected a list of ints, got 3"),
        ({}, {"seeds": [0, -1]}, "seeds: must be ints in 0 <= seed < 2\\*\\*63, got -1"),
        ({}, {"seeds": [1, 1]}, r"seeds: must differ, got \[1, 1\]"),
        ({}, {"repeats": 0}, "repeats: must be an int >= 1, got 0"),
        ({}, {"max_workers": 0}, "max_workers: must be an int >= 1, got 0"),
        ({}, {"executor": "threats"}, "executor: must be threads, processes, ray or an Executor, got 'threats'"),
        ({}, {"progress": 3}, "progress: must be callable"),
        ({}, {"metrics": ["ttft"]}, "metrics: must be among num_requests, .* got 'ttft'"),
        ({}, {"metrics": "ttft"}, "metrics: expected a list of names"),
        ({}, {"resume": "."}, r"resume: \. cannot be read: Is a directory"),
        ({}, {"resume": "no/where"}, "resume: no/where cannot be written: No such file"),
    ],
)
def test_what_is_wrong_is_named_before_any_run(workload, monkeypatch, tmp_path, grid, options, text):
    monkeypatch.chdir(tmp_path)
    inline = Inline()
    with pytest.raises(ConfigError, match=text):
        sweep(workload, grid, **{"executor": inline, **options})
    assert inline.calls == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"low": 2, "high": 1}, "high: must be >= low"),
        ({"low": 0, "high": 1, "log": True}, "low: must be > 0 with log=True"),
        ({"low": 0.5, "high": 1, "integer": True}, "low: must be a whole number"),
        ({"low": 0, "high": math.inf}, "high: must be a finite number"),
        ({"low": "a", "high": 1}, "low: must be a finite number"),
        ({"low": 0, "high": 1, "samples": 0}, "samples: must be an int >= 1"),
        ({"low": 0, "high": 1, "seed": -1}, "seed: must be an int >= 0"),
    ],
)
def test_a_random_parameter_checks_itself(options, text):
    with pytest.raises(ConfigError, match=text):
        RandomParameter(**options)


def test_a_workload_that_is_none_is_refused():
    with pytest.raises(WorkloadError, match="expected a path, a Workload"):
        sweep(3, {})


# ---------------------------------------------------------------- the result


def test_csv_json_and_dicts_hold_the_table(workload, tmp_path):
    result = sweep(
        workload, {"block_size": [1, 16], "max_num_seqs": [8, None]}, replay_options={"sla": Sla(ttft_ms=50)}
    )
    rows = result.to_dicts()
    assert json.loads(result.to_json()) == rows
    text = result.to_csv(tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_bytes() == text.encode()
    read = list(csv.DictReader(io.StringIO(text)))
    assert list(read[0]) == list(result.columns)
    for line, row in zip(read, rows, strict=True):
        assert line == {name: "" if value is None else str(value) for name, value in row.items()}
    assert rows[0]["completed_requests"] is None
    assert rows[2]["completed_requests"] == 60
    assert isinstance(rows[2]["completed_requests"], int)
    assert isinstance(rows[2]["goodput_completed_requests"], int)
    assert rows[3]["max_num_seqs"] is None
    assert "4 runs, 2 failed" in repr(result)


def test_arrow_holds_the_table(workload):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra arrow)")
    result = sweep(workload, {"block_size": [1, 16], "max_num_seqs": [8, None]})
    table = result.to_arrow()
    assert table.column_names == list(result.columns)
    expected = result.to_dicts()
    for row in expected:
        row["max_num_seqs"] = None if row["max_num_seqs"] is None else float(row["max_num_seqs"])
    assert table.to_pylist() == expected
    assert str(table.schema.field("completed_requests").type) == "int64"
    assert str(table.schema.field("error").type) == "string"


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_arrow_that_is_not_installed_is_named(workload):
    with pytest.raises(KvsimError, match=r"to_arrow needs the extra: pip install 'kvsim\[arrow\]'"):
        sweep(workload, {}).to_arrow()


def test_best_is_the_first_of_the_best_rows_that_count(workload):
    result = sweep(workload, {"block_size": [1, 16], "num_gpu_blocks": [64, 512, 2048]}, repeats=2)
    values = result["mean_e2e_latency_ms"]
    assert result.best("mean_e2e_latency_ms")["mean_e2e_latency_ms"] == np.nanmin(values)
    assert result.best("mean_e2e_latency_ms")["repeat"] == 0
    assert result.best("mean_e2e_latency_ms", highest=True)["num_gpu_blocks"] == 64
    small = result["num_gpu_blocks"] == 64
    assert result.best("mean_e2e_latency_ms", where=small)["num_gpu_blocks"] == 64
    with pytest.raises(ConfigError, match=r"metric: must be one of .* got 'latency'"):
        result.best("latency")
    with pytest.raises(ValueError, match="no row has a value of mean_ttft_ms"):
        result.best("mean_ttft_ms", where=result["block_size"] == 1)


def test_the_table_is_read_only_and_unknown_columns_are_named(workload):
    result = sweep(workload, {})
    with pytest.raises(ValueError, match="read-only"):
        result.table["seed"] = 1
    with pytest.raises(KeyError, match="'ttft' is not a column"):
        _ = result["ttft"]


# ---------------------------------------------------------------- resuming


def interrupted(workload, path, after, **options):
    """Stop a sweep after some runs, as Ctrl-C would."""

    def progress(done, _):
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(workload, GRID, resume=path, progress=progress, **options)


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_an_interrupted_sweep_goes_on_where_it_was(workload, tmp_path, executor):
    path = tmp_path / "runs.jsonl"
    wanted = sweep(workload, GRID).table.tobytes()
    interrupted(workload, path, 5, executor=executor, max_workers=1)
    assert path.read_bytes().count(b"\n") == 5
    seen = []
    inline = Inline()
    result = sweep(workload, GRID, resume=path, executor=inline, progress=lambda *at: seen.append(at))
    assert result.table.tobytes() == wanted
    assert inline.calls == 7
    assert seen == [(done, 12) for done in range(5, 13)]
    again = Inline()
    assert sweep(workload, GRID, resume=path, executor=again).table.tobytes() == wanted
    assert again.calls == 0


def test_a_line_that_was_being_written_is_written_again(workload, tmp_path):
    path = tmp_path / "runs.jsonl"
    wanted = sweep(workload, GRID, resume=path).table.tobytes()
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    inline = Inline()
    assert sweep(workload, GRID, resume=path, executor=inline).table.tobytes() == wanted
    assert inline.calls == 1
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_more_values_and_seeds_reuse_what_is_there_in_any_order(workload, tmp_path):
    path = tmp_path / "runs.jsonl"
    sweep(workload, {"num_gpu_blocks": [64, 128]}, resume=path, base={"block_size": 16})
    grid = {"num_gpu_blocks": [256, 128, 64]}
    inline = Inline()
    result = sweep(workload, grid, resume=path, base={"block_size": 16}, seeds=[1, 0], executor=inline)
    assert inline.calls == 4
    assert result.table.tobytes() == sweep(workload, grid, base={"block_size": 16}, seeds=[1, 0]).table.tobytes()


def test_failed_runs_are_tried_again(workload, tmp_path):
    path = tmp_path / "runs.jsonl"
    grid = {"block_size": [1, 16]}
    first = sweep(workload, grid, resume=path)
    inline = Inline()
    assert sweep(workload, grid, resume=path, executor=inline).table.tobytes() == first.table.tobytes()
    assert inline.calls == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"grid": {"num_gpu_blocks": [64]}}, "runs.jsonl:1: is a run that is not part of this sweep"),
        ({"base": {"block_size": 16, "max_num_seqs": 7}}, "not part of this sweep"),
        ({"seeds": [1]}, "not part of this sweep"),
        ({"replay_options": {"speedup": 2.0}}, "not part of this sweep"),
        ({"replay_options": {"sla": Sla(ttft_ms=5.0)}}, "not part of this sweep"),
        ({"workload": [{"input_tokens": 8}]}, "runs.jsonl:1: belongs to a sweep of another workload"),
    ],
)
def test_a_file_of_another_sweep_is_refused_and_left_alone(workload, tmp_path, change, text):
    path = tmp_path / "runs.jsonl"
    call = {"workload": workload, "grid": {"num_gpu_blocks": [128, 256]}, "base": {"block_size": 16}}
    sweep(**call, resume=path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=text):
        sweep(**{**call, **change}, resume=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["hello", "hello\n", '{"x": 1}', "{}\n", "[]\n", '{"kvsim": 1, "workload": 2}\n'])
def test_a_file_that_is_something_else_is_refused_and_left_alone(workload, tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"resume: .*notes.txt:1: not a line of a sweep"):
        sweep(workload, {}, resume=path)
    assert path.read_text() == text


def test_a_file_of_another_version_is_refused(workload, tmp_path):
    path = tmp_path / "runs.jsonl"
    sweep(workload, {}, resume=path)
    path.write_text(path.read_text().replace(kvsim.__version__, "0.0.1"))
    with pytest.raises(ConfigError, match=f"written by kvsim 0.0.1, this is {kvsim.__version__}"):
        sweep(workload, {}, resume=path)


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "trace.jsonl"
    write_mooncake(path, generate_trace(TraceProfile(requests=40, turns=1.0)))
    return str(path)


COMMAND = [
    "--set", "max_num_seqs=16", "--grid", "num_gpu_blocks=1024,4096", "--linked", "block_size,replay.workers=64:1,128:2"
]  # fmt: skip


def test_command_prints_and_writes_what_the_function_returns(trace, tmp_path, capsys):
    grid = {"num_gpu_blocks": [1024, 4096], ("block_size", "replay.workers"): [(64, 1), (128, 2)]}
    result = sweep(trace, grid, base={"max_num_seqs": 16}, seeds=[0, 1], replay_options={"sla": Sla(ttft_ms=900.0)})
    options = [*COMMAND, "--seeds", "0,1", "--sla-ttft-ms", "900", "--jobs", "2"]
    for suffix in ("json", "csv"):
        out = tmp_path / f"rows.{suffix}"
        resume = str(tmp_path / "runs.jsonl")
        code = main(["sweep", trace, *options, "--format", suffix, "--out", str(out), "--resume", resume])
        assert code == 0
        wanted = result.to_json() if suffix == "json" else result.to_csv()
        assert capsys.readouterr() == (wanted, "")
        assert out.read_text() == wanted
    assert (tmp_path / "runs.jsonl").read_text().count("\n") == 8


def test_table_shows_parameters_and_metrics_and_errors(trace, capsys):
    assert main(["sweep", trace, "--grid", "block_size=1,64", "--metrics", "passes,completed_requests"]) == 0
    head, broken, good = capsys.readouterr().out.splitlines()
    assert head.split() == ["block_size", "passes", "completed_requests", "error"]
    assert broken.split()[:3] == ["1", "N/A", "N/A"]
    assert broken.endswith("block_size: must lie in 2 <= block_size <= 2147483647, got 1")
    assert good.split()[0] == "64"
    assert good.split()[2] == "40"
    assert main(["sweep", trace, "--grid", "block_size=32,64", "--seeds", "0,4"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["block_size", "seed", "completed_requests", "mean_ttft_ms"]
    assert [row.split()[:2] for row in rows] == [["32", "0"], ["32", "4"], ["64", "0"], ["64", "4"]]


def test_exit_code_tells_whether_runs_failed(trace, capsys):
    assert main(["sweep", trace, "--grid", "block_size=1,64"]) == 0
    assert main(["sweep", trace, "--grid", "block_size=1,64", "--strict"]) == 1
    assert main(["sweep", trace, "--grid", "block_size=1"]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give either a TRACE or --example"),
        (["TRACE", "--grid", "block_size"], "argument --grid: expected path=value,value,..., got 'block_size'"),
        (["TRACE", "--grid", "block_size=["], "argument --grid: the values of block_size are not YAML"),
        (["TRACE", "--grid", "blocks=1"], "blocks: unknown parameter"),
        (["TRACE", "--grid", "block_size=1", "--grid", "block_size=2"], "block_size: is given more than once"),
        (["TRACE", "--linked", "a,b=1:2,3"], "argument --linked: expected 2 values joined by ':' for a,b, got '3'"),
        (["TRACE", "--linked", "a,b"], "argument --linked: expected a,b=1:2,3:4, got 'a,b'"),
        (["TRACE", "--seeds", "0,x"], "argument --seeds: expected an integer, got 'x'"),
        (["TRACE", "--seeds", "1,1"], "seeds: must differ"),
        (["TRACE", "--jobs", "0"], "argument --jobs: must be >= 1, got 0"),
        (["TRACE", "--executor", "cloud"], "argument --executor: invalid choice: 'cloud'"),
        (["TRACE", "--metrics", "speed"], "metrics: must be among"),
        (["TRACE", "--set", "num_gpu_blocks=0"], "num_gpu_blocks: must lie in"),
        (["TRACE", "--out", "no/where.csv"], "--out: the directory no does not exist"),
        (["TRACE", "--resume", "."], "--resume: . is a directory"),
        (["missing.jsonl"], "missing.jsonl: cannot be read"),
        (["TRACE", "-c", "missing.yaml"], "missing.yaml: cannot be read"),
    ],
)
def test_wrong_use_is_one_line(trace, capsys, monkeypatch, tmp_path, arguments, text):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *(trace if argument == "TRACE" else argument for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvsim: error: ")
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_ctrl_c_ends_the_command_and_the_file_goes_on(trace, tmp_path, capsys, executor):
    path = tmp_path / "runs.jsonl"
    values = ",".join(str(2000 + 5 * i) for i in range(400))
    arguments = ["sweep", trace, "--grid", f"num_gpu_blocks={values}", "--format", "csv", "--resume", str(path)]
    program = f"import sys; sys.path.insert(0, {SRC!r}); from kvsim.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, *arguments, "--executor", executor, "--jobs", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": SRC},
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"kvsim: error: interrupted\n")
    kept = path.read_bytes().splitlines()
    assert 3 <= len(kept) < 400
    assert main(arguments) == 0
    resumed = capsys.readouterr().out
    assert path.read_bytes().splitlines()[: len(kept) - 1] == kept[:-1]
    assert main(arguments[:-2]) == 0
    assert capsys.readouterr().out == resumed


# ---------------------------------------------------------------- branches


def loaded_rank():
    config = EngineConfig(block_size=16, num_gpu_blocks=64, timing_model=FixedTiming(prefill_ms=30.0, decode_ms=10.0))
    rank = SchedulerRank(RankIdentity(), config)
    for number in range(3):
        rank.apply_command(Submit(Request(number, range(100), max_output_tokens=5)), CommandContext(0.0))
    first = rank.execute_pass(0.0)
    rank.complete_pass(first.pending, first.end_ms)
    return rank, first.end_ms


def test_branches_leave_the_rank_alone_and_differ_by_their_commands():
    rank, now = loaded_rank()
    before = rank.digest()

    def drop(fork, at):
        fork.apply_command(CancelRequest(2), CommandContext(at))

    newcomer = Submit(Request(9, range(50), max_output_tokens=1))
    nothing, dropped, later = branch(rank, [[], drop, [(45.0, newcomer)]], 1000.0, now_ms=now)
    assert rank.digest() == before
    assert [at for at, _ in nothing.outputs] == [40.0] * 3 + [50.0] * 3 + [60.0] * 3 + [70.0] * 3
    assert (nothing.completed, nothing.tokens, nothing.passes, nothing.now_ms) == ((0, 1, 2), 12, 4, 70.0)
    assert (dropped.completed, dropped.tokens) == ((0, 1), 8)
    # The newcomer arrives during the pass 40..50 and is admitted with the next.
    assert later.first_token_ms(9) == 90.0
    assert later.first_token_ms(77) is None
    assert nothing.rank.is_drained()
    assert nothing.in_flight is None
    assert nothing.metrics == nothing.rank.metrics()


def test_the_horizon_cuts_a_pass_and_its_outputs():
    rank, now = loaded_rank()
    (cut,) = branch(rank, [[]], 25.0, now_ms=now)
    assert (cut.passes, cut.now_ms, cut.tokens) == (2, 55.0, 6)
    assert cut.in_flight.end_ms == 60.0
    (exact,) = branch(rank, [[]], 20.0, now_ms=now)
    assert (exact.passes, exact.now_ms, exact.tokens) == (2, 50.0, 6)
    shown = cut.rank.complete_pass(cut.in_flight.pending, cut.in_flight.end_ms)
    assert len(shown.outputs) == 3


def test_a_branch_equals_the_rank_driven_by_hand():
    rank, now = loaded_rank()
    (made,) = branch(rank, [[(now, CancelRequest(0))]], 500.0, now_ms=now)
    rank.apply_command(CancelRequest(0), CommandContext(now))
    seen = []
    while rank.is_ready():
        started = rank.execute_pass(now)
        now = started.end_ms
        seen += [(now, output) for output in rank.complete_pass(started.pending, now).outputs]
    assert list(made.outputs) == seen
    assert made.rank.digest() == rank.digest()


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_branch_with_a_request_that_never_fits_ends(backend):
    config = EngineConfig(backend=backend, block_size=16, num_gpu_blocks=8)
    rank = SchedulerRank(RankIdentity(), config)
    commands = [(float(i), Submit(Request(i, range(40), max_output_tokens=400))) for i in range(4)]
    (made,) = branch(rank, [commands], 1e6)
    ended = [output.request_id for _, output in made.outputs if output.completed]
    assert sorted(ended) == [0, 1, 2, 3]
    assert made.rank.is_drained()
    made.rank.check_integrity()


@pytest.mark.parametrize(
    ("variants", "options", "text"),
    [
        ([[(5.0, CancelRequest(1))]], {"now_ms": 6.0}, r"variants\[0\]: times must be finite and >= now_ms \(6.0\)"),
        ([[], [CancelRequest(1)]], {}, r"variants\[1\]: expected pairs of time and command"),
        ([], {"now_ms": -1.0}, "now_ms: must be finite and >= 0, got -1.0"),
        ([], {"horizon_ms": math.inf}, "horizon_ms: must be finite and >= 0, got inf"),
    ],
)
def test_wrong_branches_are_named(variants, options, text):
    rank, _ = loaded_rank()
    with pytest.raises(ConfigError, match=text):
        branch(rank, variants, **{"horizon_ms": 10.0, **options})
