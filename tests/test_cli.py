import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import kvsim
from kvsim.cli import main
from kvsim.cli.options import Progress
from kvsim.cli.synth import PROFILE_OPTIONS
from kvsim.errors import ConfigError, KvsimError, WorkloadError
from kvsim.layout import FailReason, RequestStatus
from kvsim.report import ReplayResult, RunTotals, Sla
from kvsim.workload import TraceProfile, example_trace_path, generate_trace, read_mooncake
from report_cases import completed, gaps_of, record, table_of

SRC = str(Path(importlib.util.find_spec("kvsim.cli").origin).parents[2])


def result_of(*rows, **options):
    times = [10.0, 20.0, 35.0]
    rows = rows or (completed(tokens=times, input_tokens=8),)
    totals = RunTotals(wall_time_ms=1.5, end_ms=100.0, decode_worker_seconds=0.1)
    return ReplayResult(table_of(*rows), gaps_of(times), totals, **options)


class FakeReplay:
    """Stands for `kvsim.replay`: remembers its call and gives a prepared answer."""

    def __init__(self):
        self.answer = result_of()
        self.calls = []

    def __call__(self, workload, config=None, **options):
        self.calls.append((workload, config, options))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def fake(monkeypatch):
    made = FakeReplay()
    monkeypatch.setattr(kvsim, "replay", made, raising=False)
    return made


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 8, "output_length": 3, "hash_ids": [1]}\n')
    return str(path)


def error_of(capsys):
    """Error line of a failed command, of which nothing else was printed."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvsim: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("kvsim: error: ").rstrip("\n")


# ---------------------------------------------------------------- what a run is given


def test_replay_passes_its_defaults_on(fake, trace):
    assert main(["replay", trace]) == 0
    ((workload, config, options),) = fake.calls
    assert workload == trace
    assert config.backend == "vllm"
    assert options == {
        "workers": 1,
        "dp_size": 1,
        "startup_ms": 0.0,
        "placement": "round_robin",
        "concurrency": None,
        "speedup": 1.0,
        "max_sim_time_ms": None,
        "seed": 0,
        "sla": None,
        "trace_format": "mooncake",
        "trace_block_size": 512,
        "strict": False,
        "record_passes": False,
        "progress": None,
    }


def test_replay_passes_every_option_on(fake, trace, tmp_path):
    options = "--workers 3 --dp-size 2 --concurrency 9 --speedup 2.5 --max-sim-time 150 --seed 7 --sla-ttft-ms 200"
    options += " --sla-itl-ms 20 --trace-format mooncake-delta --trace-block-size 64 --strict --record-passes"
    options += " --no-progress --placement kv_router --router router_queue_threshold=0.5 --startup-ms 7"
    samples = tmp_path / "samples.jsonl"
    options += f" --scaling kvsim:ScalingPolicy --telemetry {samples} --telemetry-interval-ms 20"
    assert main(["replay", trace, *options.split(), "--out", str(tmp_path / "out")]) == 0
    ((_, _, given),) = fake.calls
    assert isinstance(given.pop("scaling"), kvsim.ScalingPolicy)
    assert given == {
        "workers": 3,
        "dp_size": 2,
        "startup_ms": 7.0,
        "placement": "kv_router",
        "router": {"router_queue_threshold": 0.5},
        "telemetry": kvsim.TelemetryOptions(sample_interval_ms=20.0, jsonl_path=str(samples)),
        "concurrency": 9,
        "speedup": 2.5,
        "max_sim_time_ms": 150.0,
        "seed": 7,
        "sla": Sla(ttft_ms=200.0, itl_ms=20.0),
        "trace_format": "mooncake-delta",
        "trace_block_size": 64,
        "strict": True,
        "record_passes": True,
        "progress": None,
    }


def test_two_pools_share_the_configuration_but_for_what_is_set_for_one(fake, trace):
    options = "--set num_gpu_blocks=64 --prefill-workers 2 --decode-workers 3 --decode-dp-size 2 --startup-ms 5"
    options += " --set-prefill kv_transfer_bandwidth=50 --set-decode num_gpu_blocks=32 --handoff-latency-ms 1.5"
    assert main(["replay", trace, *options.split()]) == 0
    ((_, config, given),) = fake.calls
    assert config is None
    assert not {"workers", "dp_size", "startup_ms"} & set(given)
    assert given["handoff_latency_ms"] == 1.5
    prefill, decode = given["prefill"], given["decode"]
    assert (prefill.workers, prefill.dp_size, prefill.startup_ms) == (2, 1, 5.0)
    assert (decode.workers, decode.dp_size, decode.startup_ms) == (3, 2, 5.0)
    assert (prefill.config.num_gpu_blocks, prefill.config.kv_transfer_bandwidth) == (64, 50)
    assert (decode.config.num_gpu_blocks, decode.config.kv_transfer_bandwidth) == (32, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prefill-workers 2", "--decode-workers: prefill and decode workers come together"),
        ("--decode-dp-size 2", "--decode-workers: is needed for options of the decode pool"),
        ("--prefill-workers 1 --decode-workers 1 --workers 2", "--workers: use --prefill-workers and --decode-workers"),
        ("--handoff-latency-ms 3", "--handoff-latency-ms: needs --prefill-workers and --decode-workers"),
        ("--scaling nothing", "--scaling: expected MODULE:NAME, got 'nothing'"),
        ("--scaling kvsim:Nothing", "--scaling: kvsim:Nothing cannot be imported"),
        ("--placement nearest", "placement: must be one of round_robin, kv_router"),
        ("--router x=1", "router_config: needs placement kv_router"),
    ],
)
def test_options_of_a_system_that_do_not_go_together_are_named(trace, options, message, capsys):
    assert main(["replay", trace, *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_disaggregated_run_from_the_command_line(capsys):
    pools = ["--prefill-workers", "2", "--decode-workers", "2", "--handoff-latency-ms", "3"]
    assert main(["replay", "--example", *pools, "--placement", "kv_router", "--format", "json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["completed_requests"] == summary["num_requests"]
    assert summary["prefill_worker_seconds"] == summary["decode_worker_seconds"] > 0


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_overrides_are_yaml_and_win_over_the_file_the_last_one_first(fake, trace, tmp_path, suffix):
    path = tmp_path / f"engine{suffix}"
    path.write_text(json.dumps({"backend": "sglang", "block_size": 1, "num_gpu_blocks": 100}))
    sets = ["num_gpu_blocks=200", "num_gpu_blocks=300", "sglang.schedule_policy=lpm", "max_num_seqs=null"]
    assert main(["replay", trace, "-c", str(path), *(f"--set={text}" for text in sets)]) == 0
    ((_, config, _),) = fake.calls
    assert (config.backend, config.num_gpu_blocks, config.max_num_seqs) == ("sglang", 300, None)
    assert config.sglang.schedule_policy == "lpm"


def test_overrides_need_no_file_and_may_hold_a_whole_group(fake, trace):
    assert main(["replay", trace, "--set", "timing_model={type: fixed, prefill_ms: 20, decode_ms: 10}"]) == 0
    ((_, config, _),) = fake.calls
    assert (config.timing_model.prefill_ms, config.timing_model.decode_ms) == (20, 10)


# ---------------------------------------------------------------- what it prints and writes


def test_json_on_standard_output_is_the_summary_alone(fake, trace, capsys):
    assert main(["replay", trace, "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert out == fake.answer.to_json()
    assert err == ""


def test_table_on_standard_output_holds_nothing_that_changes_from_run_to_run(fake, trace, capsys):
    assert main(["replay", trace]) == 0
    assert capsys.readouterr() == (fake.answer.table(wall=False), "")


def test_results_are_written_where_asked(fake, trace, tmp_path, capsys):
    fake.answer = result_of(passes=np.zeros(3, [("end_ms", "<f8")]))
    folder, lines = tmp_path / "a" / "b", tmp_path / "lines.jsonl"
    command = ["replay", trace, "--out", str(folder), "--per-request", str(lines), "--record-passes"]
    assert main([*command, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == fake.answer.summary
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["passes.npy", "requests.jsonl", "summary.json", "table.txt"]
    assert (folder / "summary.json").read_text() == fake.answer.to_json()
    assert lines.read_text() == fake.answer.to_jsonl() == (folder / "requests.jsonl").read_text()


def test_progress_is_shown_on_a_terminal_only(fake, trace, monkeypatch, capsys):
    main(["replay", trace])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["replay", trace])
    main(["replay", trace, "--no-progress"])
    out, err = capsys.readouterr()
    assert out == fake.answer.table(wall=False) * 3
    assert err == "wall time 1.50 ms\n"
    shown = [options["progress"] for _, _, options in fake.calls]
    assert shown[0] is None
    assert callable(shown[1])
    assert shown[2] is None


def test_progress_follows_the_run_on_standard_error(capsys):
    with Progress(enabled=True, unit="req") as progress:
        progress.callback(3, 10)
        progress.callback(10, 10)
        assert (progress._bar.n, progress._bar.total) == (10, 10)
    out, err = capsys.readouterr()
    assert out == ""
    assert "/10 " in err


# ---------------------------------------------------------------- exit codes


LOST = {
    "rejected": record(status=RequestStatus.REJECTED, terminal_ms=1.0, reason=FailReason.POOL_TOO_SMALL, needed=9),
    "failed": record(status=RequestStatus.FAILED, terminal_ms=1.0),
    "unfinished": record(arrival_ms=0.0),
    "never released": record(arrival_ms=np.nan),
}


@pytest.mark.parametrize("kind", LOST)
def test_strict_fails_when_a_request_got_lost(fake, trace, capsys, kind):
    fake.answer = result_of(completed(tokens=[1.0]), LOST[kind])
    assert main(["replay", trace, "--format", "json"]) == 0
    assert main(["replay", trace, "--format", "json", "--strict"]) == 1
    assert capsys.readouterr() == (fake.answer.to_json() * 2, "")


def test_strict_accepts_what_a_cap_on_time_left_unfinished(fake, trace):
    fake.answer = result_of(completed(tokens=[1.0]), LOST["unfinished"], LOST["never released"])
    assert main(["replay", trace, "--strict", "--max-sim-time", "50"]) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("workers", "must be >= 1, got 0"), 2),
        (WorkloadError("must be positive, got 0", path="t.jsonl", line=3, field="input_length"), 2),
        (KvsimError("the run made\nno progress"), 1),
        (OSError(28, "No space left on device"), 1),
    ],
)
def test_errors_are_one_line_and_tell_input_from_failure(fake, trace, capsys, error, code):
    fake.answer = error
    assert main(["replay", trace]) == code
    assert error_of(capsys) == " ".join(str(error).split())


def test_an_unknown_error_is_a_bug_and_is_not_hidden(fake, trace):
    fake.answer = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        main(["replay", trace])


def test_interrupt_ends_with_130(fake, trace, capsys):
    fake.answer = KeyboardInterrupt()
    assert main(["replay", trace]) == 130
    assert error_of(capsys) == "interrupted"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["replay"], "give either a TRACE or --example"),
        (["replay", "TRACE", "--example"], "give either a TRACE or --example"),
        (["replay", "TRACE", "--workers", "0"], "argument --workers: must be >= 1, got 0"),
        (["replay", "TRACE", "--workers", "two"], "argument --workers: expected an integer, got 'two'"),
        (["replay", "TRACE", "--concurrency", "0"], "argument --concurrency: must be >= 1, got 0"),
        (["replay", "TRACE", "--speedup", "0"], "argument --speedup: must be > 0, got 0"),
        (["replay", "TRACE", "--speedup", "nan"], "argument --speedup: must be finite, got nan"),
        (["replay", "TRACE", "--max-sim-time", "-1"], "argument --max-sim-time: must be >= 0, got -1"),
        (["replay", "TRACE", "--seed", "-1"], "argument --seed: must be >= 0, got -1"),
        (["replay", "TRACE", "--sla-ttft-ms", "inf"], "argument --sla-ttft-ms: must be finite, got inf"),
        (["replay", "TRACE", "--sla-e2e-ms", "9", "--sla-itl-ms", "9"], "sla.e2e_ms: cannot be combined"),
        (["replay", "TRACE", "--format", "xml"], "argument --format: invalid choice: 'xml'"),
        (["replay", "TRACE", "--set", "num_gpu_blocks"], "argument --set: expected path=value"),
        (["replay", "TRACE", "--set", "=3"], "argument --set: expected path=value"),
        (["replay", "TRACE", "--set", "sglang..x=3"], "argument --set: expected path=value"),
        (["replay", "TRACE", "--set", "a=[1"], "argument --set: the value of a is not YAML"),
        (["replay", "TRACE", "--set", "num_blocks=3"], "num_blocks: unknown field"),
        (["replay", "TRACE", "--set", "num_gpu_blocks=0"], "num_gpu_blocks: must lie in 1 <= num_gpu_blocks"),
        (["replay", "TRACE", "--set", "backend.x=1"], "backend"),
        (["replay", "TRACE", "-c", "missing.yaml"], "missing.yaml: cannot be read"),
        (["replay", "missing.jsonl"], "missing.jsonl: cannot be read: No such file or directory"),
        (["replay", "."], ".: cannot be read: Is a directory"),
        (["replay", "TRACE", "--out", "TRACE"], "--out: "),
        (["replay", "TRACE", "--per-request", "."], "--per-request: . is a directory"),
        (["replay", "TRACE", "--per-request", "no/where.jsonl"], "--per-request: the directory no does not exist"),
        (["replay", "TRACE", "--record-passes"], "--record-passes: needs --out"),
    ],
)
def test_wrong_use_is_one_line_and_runs_nothing(fake, trace, capsys, monkeypatch, tmp_path, arguments, text):
    monkeypatch.chdir(tmp_path)
    arguments = [trace if argument == "TRACE" else argument for argument in arguments]
    assert main(arguments) == 2
    assert text in error_of(capsys)
    assert fake.calls == []


def test_help_and_version_succeed(capsys):
    assert main(["--help"]) == 0
    assert "replay" in capsys.readouterr().out
    assert main(["replay", "--help"]) == 0
    assert "--sla-ttft-ms" in capsys.readouterr().out
    assert main(["--version"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("kvsim ")
    assert err == ""
    try:
        assert out == f"kvsim {metadata.version('kvsim')}\n"
    except metadata.PackageNotFoundError:
        assert out == "kvsim (not installed)\n"


# ---------------------------------------------------------------- as a process

# Runs the command line in a process of its own on a prepared result.
_PROGRAM = """
import sys
sys.path[:0] = {paths!r}
import kvsim
from test_cli import result_of, LOST
def replay(*_, **__):
    return result_of(*[LOST["failed"]] * 5000)
kvsim.replay = replay
from kvsim.cli import main
sys.exit(main(sys.argv[1:]))
"""


def start(trace, *arguments, **pipes):
    program = _PROGRAM.format(paths=[SRC, str(Path(__file__).parent)])
    return subprocess.Popen([sys.executable, "-c", program, "replay", trace, *arguments], **pipes)


@pytest.mark.parametrize(("strict", "code"), [((), 0), (("--strict",), 1)])
def test_a_reader_that_goes_away_is_met_with_silence(trace, strict, code):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = start(trace, "--format", "json", *strict, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    _, err = process.communicate(timeout=60)
    assert err == b""
    assert process.returncode == code


def test_starting_the_command_line_imports_nothing_heavy():
    program = (
        f"import sys; sys.path.insert(0, {SRC!r}); before = set(sys.modules)\n"
        "import kvsim; package = set(sys.modules)\n"
        "from kvsim.cli import main; main(['--version'])\n"
        "print(sorted({'numpy', 'yaml', 'tqdm', 'msgspec'} & (set(sys.modules) - package)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---------------------------------------------------------------- built-in trace and made-up traces


def test_example_runs_the_built_in_trace(fake):
    assert main(["replay", "--example"]) == 0
    ((workload, _, options),) = fake.calls
    assert workload == str(example_trace_path())
    assert read_mooncake(workload, block_size=options["trace_block_size"], strict=True).num_requests > 0


def test_example_has_a_block_size_of_its_own(fake, capsys):
    assert main(["replay", "--example", "--trace-block-size", "16"]) == 2
    assert error_of(capsys) == "--example: has its own format and block size"


def test_synth_offers_the_whole_profile_and_shows_its_defaults(capsys):
    wanted = {field.name: field for field in fields(TraceProfile) if field.name != "session_ids"}
    assert {name: kind.__name__ for name, (kind, _) in PROFILE_OPTIONS.items()} == {
        name: field.type for name, field in wanted.items()
    }
    assert main(["synth", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in wanted.items():
        assert f"--{name.replace('_', '-')} {'N' if field.type == 'int' else 'X'}" in shown
        assert f"{PROFILE_OPTIONS[name][1]} ({field.default})" in shown


def test_synth_leaves_to_the_profile_what_is_not_given(tmp_path):
    path = tmp_path / "made.jsonl"
    assert main(["synth", "-o", str(path), "--requests", "30", "--turns", "1"]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == generate_trace(TraceProfile(requests=30, turns=1.0))


def test_synth_writes_a_trace_that_can_be_read_and_says_what_it_holds(tmp_path, capsys):
    path = tmp_path / "made.jsonl"
    assert main(["synth", "-o", str(path), "--requests", "40", "--seed", "3", "--block-size", "64"]) == 0
    made = read_mooncake(path, block_size=64, strict=True)
    out, err = capsys.readouterr()
    assert made.num_requests == 40
    assert out == (
        f"{path}: 40 requests, {made.total_input_tokens:,} input tokens, {made.total_output_tokens:,} output tokens, "
        f"{path.stat().st_size:,} bytes\n"
    )
    assert err == ""


def test_synth_is_a_function_of_its_options(tmp_path):
    def made(name, *options):
        path = tmp_path / name
        assert main(["synth", "-o", str(path), "--requests", "30", *options]) == 0
        return path.read_bytes()

    assert made("a.jsonl.gz") == made("b.jsonl.gz")
    assert made("c.jsonl") == made("d.jsonl") != made("e.jsonl", "--seed", "1")
    assert b"session_id" in made("f.jsonl", "--session-ids")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "required: -o/--output"),
        (["-o", "."], "--output: . is a directory"),
        (["-o", "no/where.jsonl"], "--output: the directory no does not exist"),
        (["-o", "x.jsonl", "--requests", "0"], "requests: must be >= 1, got 0"),
        (["-o", "x.jsonl", "--requests", "1.5"], "argument --requests: expected an integer, got '1.5'"),
        (["-o", "x.jsonl", "--rate", "nan"], "rate: must be a finite number, got nan"),
        (["-o", "x.jsonl", "--rate", "fast"], "argument --rate: expected a number, got 'fast'"),
    ],
)
def test_wrong_use_of_synth_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, text):
    monkeypatch.chdir(tmp_path)
    assert main(["synth", *arguments]) == 2
    assert text in error_of(capsys)
    assert list(tmp_path.iterdir()) == []
