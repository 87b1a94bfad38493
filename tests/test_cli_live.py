"""``kvsim live`` and `run_live`: what feeds the engine, what is printed, and every way to stop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim import EngineConfig, FixedTiming, Request
from kvsim.cli import main
from kvsim.cli.live import LiveCounts, _print, feed_lines, feed_workload, run_live
from kvsim.contract import Output
from kvsim.errors import CommandError, ConfigError, PoisonedError, WorkloadError
from kvsim.live import LiveScheduler, VirtualClock, WallClock
from kvsim.live.sinks import MemorySink
from kvsim.workload import example_trace_path, load_workload, workload_from_requests

SPEC = importlib.util.find_spec("kvsim.cli")
assert SPEC is not None
SRC = str(Path(str(SPEC.origin)).parents[2])
FAST = EngineConfig(block_size=4, num_gpu_blocks=64, timing_model=FixedTiming(prefill_ms=2.0, decode_ms=1.0))
#: Whatever a warning or a pending task at the end would say goes to standard error.
STRICT = [sys.executable, "-X", "dev", "-W", "error", "-W", "ignore::ImportWarning"]
MAIN = "import sys; from kvsim.cli import main; sys.exit(main(sys.argv[1:]))"


class Process:
    """A program of which the output is read line by line."""

    def __init__(self, program: str, *arguments: str, cwd: Path) -> None:
        self.process = subprocess.Popen(
            [*STRICT, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": SRC},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """(exit code, what was printed since, standard error), after its own end."""
        out, err = self.process.communicate(timeout=60)
        # In development mode event loops say which steps were slow, as they are on a busy machine.
        err = "".join(line for line in err.splitlines(keepends=True) if not line.startswith("Executing <"))
        return self.process.returncode, out, err


@contextlib.contextmanager
def started(program: str, *arguments: str, cwd: Path) -> Iterator[Process]:
    made = Process(program, *arguments, cwd=cwd)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def live(*arguments: str, cwd: Path) -> Any:
    return started(MAIN, "live", *arguments, cwd=cwd)


def facts_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_virtual(feeder: Any, config: EngineConfig = FAST, **options: Any) -> tuple[LiveScheduler, MemorySink]:
    memory = MemorySink()
    engine = asyncio.run(
        run_live(config, feeder, clock=VirtualClock(), sinks=[memory], signals=(), every_s=3600.0, **options)
    )
    return engine, memory


# ---------------------------------------------------------------- stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_engine_stops_cleanly_when_told_to(tmp_path: Path, number: int) -> None:
    with live("--format", "json", "--set", "num_gpu_blocks=100", cwd=tmp_path) as process:
        assert json.loads(process.line())["total_blocks"] == 100
        process.process.send_signal(number)
        code, out, err = process.end()
    assert (code, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["running_requests"] == 0


CLIENTS = """
import asyncio
import kvsim

async def clients(engine):
    async def client(number):
        await engine.submit(kvsim.Request(number, range(20), max_output_tokens=OUTPUT))
        async for output in engine.outputs(number):
            pass
    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(client(number))
    {after}

async def refused(engine):
    await engine.submit(kvsim.Request(-1, range(20)))

async def broken(engine):
    raise RuntimeError("out of ideas")

number = 7
"""


def write_clients(tmp_path: Path, output: int, after: str = "") -> None:
    text = CLIENTS.replace("OUTPUT", str(output)).replace("{after}", after)
    (tmp_path / "load_of_mine.py").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("drain", [False, True])
def test_requests_inside_finish_or_are_dropped_as_told(tmp_path: Path, number: int, drain: bool) -> None:
    # At 100 passes per second these last three seconds; the signal comes after the first.
    write_clients(tmp_path, 300)
    timing = '{"type": "fixed", "prefill_ms": 10, "decode_ms": 10}'
    options = ["--feed", "load_of_mine:clients", "--set", f"timing_model={timing}", "--out", "facts.jsonl"]
    options += ["--facts", "outputs,kv_events_with_tier", "--set", "emit_kv_events=true", "--every-s", "0.2"]
    with live(*options, *(["--drain-s", "60"] if drain else []), cwd=tmp_path) as process:
        while "running     5" not in process.line():
            assert process.process.poll() is None, process.end()
        process.process.send_signal(number)
        code, out, err = process.end()
    assert (code, err) == (0, "")
    ended = [fact for fact in facts_of(tmp_path / "facts.jsonl") if fact["fact"] == "output" and fact["completed"]]
    assert len(ended) == (5 if drain else 0)
    assert f"ended {len(ended):>7}\n" in out.splitlines(keepends=True)[-1]


def test_a_second_signal_ends_the_draining(tmp_path: Path) -> None:
    write_clients(tmp_path, 1_000_000)
    options = ["--feed", "load_of_mine:clients", "--drain-s", "600", "--every-s", "0.1"]
    with live(*options, "--set", "max_model_len=10000000", "--set", "num_gpu_blocks=100000", cwd=tmp_path) as process:
        while "running     5" not in process.line():
            assert process.process.poll() is None, process.end()
        process.process.send_signal(signal.SIGTERM)
        for _ in range(3):
            assert "running     5" in process.line()
        process.process.send_signal(signal.SIGTERM)
        code, _, err = process.end()
    assert (code, err) == (0, "")


def test_the_command_ends_with_the_last_request_of_its_feeder(tmp_path: Path) -> None:
    write_clients(tmp_path, 3, "await engine.submit(kvsim.Request(99, range(20), max_output_tokens=40), listen=False)")
    with live("--feed", "load_of_mine:clients", "--speedup", "10", cwd=tmp_path) as process:
        code, out, err = process.end()
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith("tokens        55  ended       6")


def test_an_engine_runs_for_as_long_as_asked(tmp_path: Path) -> None:
    with live("--for-s", "0.3", "--every-s", "0.1", cwd=tmp_path) as process:
        code, out, err = process.end()
    assert (code, err) == (0, "")
    assert 2 <= len(out.splitlines()) <= 5


SCRIPT = """
import asyncio, os, signal, sys
import kvsim
from kvsim.cli.live import run_live

done = []

async def clients(engine):
    for number in range(20):
        await engine.submit(kvsim.Request(number, range(30), max_output_tokens=5))
        done.append([output.token_id async for output in engine.outputs(number)])
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()

async def program():
    config = kvsim.EngineConfig(num_gpu_blocks=64, timing_model=kvsim.FixedTiming(prefill_ms=1.0, decode_ms=1.0))
    running = asyncio.create_task(run_live(config, clients))
    return await running

engine = asyncio.run(program())
print(len(done), {len(tokens) for tokens in done}, engine.metrics().active_blocks, engine.in_flight)
"""


def test_a_script_feeds_the_engine_from_another_task_and_is_stopped_by_sigterm(tmp_path: Path) -> None:
    with started(SCRIPT, cwd=tmp_path) as process:
        code, out, err = process.end()
    assert (code, out, err) == (0, "20 {5} 0 0\n", "")


# ---------------------------------------------------------------- failing


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        ("refused", 1, "kvsim: error: request_id: must lie in 0 <= id < 2**128, got -1\n"),
        ("broken", 1, "RuntimeError: out of ideas\n"),
    ],
)
def test_what_a_feeder_raises_ends_the_command(tmp_path: Path, function: str, code: int, said: str) -> None:
    write_clients(tmp_path, 3)
    with live("--feed", f"load_of_mine:{function}", cwd=tmp_path) as process:
        got, _, err = process.end()
    assert got == code
    assert err.endswith(said)


class Failing:
    """A timing model that breaks at the third pass."""

    def __init__(self) -> None:
        self.passes = 0

    def predict_prefill_ms(self, *_: Any) -> float:
        return 1.0

    def predict_decode_ms(self, *_: Any) -> float:
        self.passes += 1
        if self.passes == 3:
            raise ValueError("no more time")
        return 1.0


async def one_request(engine: LiveScheduler) -> None:
    await engine.submit(Request(1, range(10), max_output_tokens=10))
    async for _ in engine.outputs(1):
        pass


async def nothing_more(engine: LiveScheduler) -> None:
    await engine.submit(Request(1, range(10), max_output_tokens=10), listen=False)
    await asyncio.Event().wait()


@pytest.mark.parametrize("feeder", [one_request, nothing_more])
def test_an_engine_that_breaks_ends_the_run(feeder: Any) -> None:
    async def run() -> None:
        await run_live(FAST, feeder, timing=Failing(), clock=VirtualClock(), signals=(), every_s=0.01)

    with pytest.raises(PoisonedError, match="no more time"):
        asyncio.run(run())


@pytest.mark.parametrize("error", [CommandError("no"), RuntimeError("no"), KeyError("no")])
def test_what_a_feeder_raises_is_raised_and_nothing_runs_on(error: Exception) -> None:
    async def feed(engine: LiveScheduler) -> None:
        await engine.submit(Request(1, range(10), max_output_tokens=10))
        raise error

    async def run() -> int:
        with pytest.raises(type(error)):
            await run_live(FAST, feed, clock=VirtualClock(), signals=())
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


def test_a_cancelled_run_stops_its_engine_and_its_feeder() -> None:
    seen: list[LiveScheduler] = []

    async def feed(engine: LiveScheduler) -> None:
        seen.append(engine)
        await asyncio.Event().wait()

    async def run() -> int:
        running = asyncio.create_task(run_live(FAST, feed, signals=()))
        while not seen:
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


def test_signals_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def feed(engine: LiveScheduler) -> None:
        assert signal.getsignal(signal.SIGTERM) is not before

    asyncio.run(run_live(FAST, feed))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["TRACE", "--example"], "give at most one of TRACE, --example, --requests and --feed, got TRACE and --exa"),
        (["--requests", "nowhere.jsonl"], "nowhere.jsonl: cannot be read: No such file or directory"),
        (["nowhere.jsonl"], "nowhere.jsonl: cannot be read: No such file or directory"),
        (["--feed", "load_of_mine"], "--feed: expected MODULE:FUNCTION, got 'load_of_mine'"),
        (["--feed", "no_such_module_of_mine:f"], "--feed: there is no module no_such_module_of_mine"),
        (["--feed", "kvsim.nothing:f"], "--feed: there is no module kvsim.nothing"),
        (["--feed", "kvsim:nothing"], "--feed: module kvsim has no nothing"),
        (["--feed", "kvsim.layout:__doc__"], "--feed: kvsim.layout:__doc__ must be a coroutine function of the engine"),
        (["--facts", "outputs"], "--facts: needs --out, the facts are written there"),
        (["--out", "x", "--facts", "tokens"], "facts: must be out of admissions, "),
        (["--out", "nowhere/x"], "--out: the directory nowhere does not exist"),
        (["--zmq-replay", "tcp://127.0.0.1:1"], "--zmq-replay: needs --zmq, whose events it repeats"),
        (["--set", "block_size=1"], "block_size: "),
        (["--speedup", "0"], "argument --speedup: must be > 0, got 0"),
        (["--drain-s", "-1"], "argument --drain-s: must be >= 0, got -1"),
        (["--workers", "2"], "unrecognized arguments: --workers"),
    ],
)
def test_usage_errors_are_one_line(
    arguments: list[str], said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["live", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvsim: error: {said}")
    assert err.count("\n") == 1


# ---------------------------------------------------------------- feeding


def test_a_trace_is_fed_at_its_times() -> None:
    config = EngineConfig(num_gpu_blocks=4096)
    engine, memory = run_virtual(feed_workload(load_workload(example_trace_path())), config)
    want = kvsim.replay(example_trace_path(), config)
    ended = [output.completed for output in memory.items("outputs")]
    assert sum(ended) == want.summary["completed_requests"] == 2000
    assert engine.clock.now() == pytest.approx(
        want.summary["end_ms"] if "end_ms" in want.summary else engine.clock.now()
    )
    reused = sum(admission.reused_input_tokens for admission in memory.items("admissions"))
    assert reused > 0


def test_a_trace_of_sessions_is_refused(tmp_path: Path) -> None:
    rows = [{"session_id": "a", "input_length": 8, "output_length": 1, "hash_ids": [i]} for i in range(2)]
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(ConfigError, match="turns that wait for earlier ones cannot be fed"):
        feed_workload(load_workload(path))


ROWS = [
    {"input_tokens": 10, "output_tokens": 2},
    {"input_token_ids": [5, 6, 7], "output_token_ids": [8, 9], "id": 77},
    {"input_tokens": 10, "output_tokens": 2, "arrival_time_ms": 50.0, "id": "00000000-0000-0000-0000-0000000000ff"},
]


def test_requests_come_as_lines_and_mean_what_they_mean_in_a_list(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    # A blank line, and no end of the last.
    path.write_text("\n\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    config = FAST.replace(emit_kv_events=True)
    _, memory = run_virtual(feed_lines(str(path)), config)
    admitted = [(one.at_ms, [a.request_id for a in one.payload]) for one in memory.of("admissions")]
    assert [number for _, numbers in admitted for number in numbers] == [1, 77, 255]
    assert admitted[-1][0] == 50.0
    tokens = {number: [] for number in (1, 77, 255)}  # type: ignore[var-annotated]
    for output in memory.items("outputs"):
        tokens[output.request_id].append(output.token_id)
    assert tokens[77] == [8, 9]
    # Made-up prompts are those of the same place in a list: the blank lines have theirs.
    blank = {"input_tokens": 10}
    listed = workload_from_requests([ROWS[0], blank, blank, blank, ROWS[2]])
    prompts = [listed.prompt_token_ids(row).tolist() for row in (0, 4)]
    assert prompts[0] != prompts[1]
    stored = [block.block_hash for event in memory.items("kv_events_with_tier") for block in event.data.blocks]
    _, again = run_virtual(feeding([Request(1, prompts[0]), Request(2, prompts[1])]), config)
    wanted = [block.block_hash for event in again.items("kv_events_with_tier") for block in event.data.blocks]
    assert set(wanted) <= set(stored)


def feeding(requests: list[Request]) -> Any:
    async def feed(engine: LiveScheduler) -> None:
        for request in requests:
            await engine.submit(request, listen=False)

    return feed


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"2: is not JSON: "),
        ("[1]", r"2: must be an object, got \[1\]"),
        ('{"output_tokens": 1}', r"2: .*input_tokens"),
        ('{"input_tokens": "x"}', r"2: input_tokens: must be an int with "),
        ('{"input_tokens": 1, "id": "me"}', r"2: id: must be an int or a UUID, got 'me'"),
        ('{"input_tokens": 1, "id": true}', r"2: id: must be an int or a UUID, got True"),
        ('{"input_tokens": 1, "tokens": 2}', r"2: tokens: is not a key of a request"),
    ],
)
def test_a_line_that_is_no_request_is_named_and_ends_the_run(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"input_tokens": 10}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match=f"requests.jsonl:{said}"):
        run_virtual(feed_lines(str(path)))


def test_lines_from_standard_input_are_served_as_they_come_and_an_open_pipe_does_not_hold_up_the_end(
    tmp_path: Path,
) -> None:
    with live("--requests", "-", "--out", "facts.jsonl", "--facts", "outputs", "--every-s", "0.05", cwd=tmp_path) as p:
        p.write('{"input_tokens": 10, "output_tokens": 2}\n{"input_tok')
        while "ended       1" not in p.line():
            assert p.process.poll() is None, p.end()
        p.write('ens": 20, "output_tokens": 3}\n')
        while "ended       2" not in p.line():
            assert p.process.poll() is None, p.end()
        p.process.send_signal(signal.SIGTERM)
        assert p.process.wait(timeout=60) == 0
        assert p.end()[::2] == (0, "")
    assert len(facts_of(tmp_path / "facts.jsonl")) == 5


def test_events_are_published_and_repeated(tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq", reason="needs the extra kvsim[zmq]")
    from test_live_sinks import Subscriber

    where = [f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"]
    options = ["--requests", "-", "--zmq", where[0], "--zmq-replay", where[1], "--every-s", "0.05"]
    with live(*options, "--set", "block_size=4", cwd=tmp_path) as process:
        process.write('{"input_token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9], "output_tokens": 2}\n')
        while "ended       1" not in process.line():
            assert process.process.poll() is None, process.end()
        subscriber = Subscriber(zmq, *where)
        [(number, payload)] = subscriber.missed(0)
        subscriber.close()
        process.process.send_signal(signal.SIGTERM)
        assert process.end()[::2] == (0, "")
    assert number == 0
    [event] = payload[1]
    assert event[0] == "BlockStored"
    assert event[3] == [1, 2, 3, 4, 5, 6, 7, 8]


# ---------------------------------------------------------------- printing


def test_counts_are_the_same_from_rows_and_from_objects() -> None:
    counts, memory = LiveCounts(), MemorySink(["outputs"])
    feeder = feeding([Request(i, range(10), 3) for i in range(4)] + [Request(9, range(10**4), 3)])
    asyncio.run(run_live(FAST, feeder, clock=VirtualClock(), sinks=[memory], signals=()))
    rows, objects = LiveCounts(), LiveCounts()
    for one in memory.shown:
        rows.outputs(0, 0.0, one.payload)
        objects.outputs(0, 0.0, list(one.payload))
    assert vars(rows) == vars(objects) == {"output_tokens": 12, "ended_requests": 5}
    counts.outputs(0, 0.0, [Output(1, None, True, True, None)])
    assert vars(counts) == {"output_tokens": 0, "ended_requests": 1}


def test_it_shows_at_the_start_every_so_often_and_at_the_end() -> None:
    shown: list[float] = []

    async def run() -> None:
        await run_live(
            FAST, show=lambda engine, _: shown.append(engine.clock.now()), every_s=0.01, for_s=0.1, signals=()
        )

    asyncio.run(run())
    assert 3 <= len(shown) <= 13
    assert shown == sorted(shown)
    assert not math.isnan(shown[-1])


def test_ranks_have_lines_of_their_own(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"input_tokens": 10, "output_tokens": 2, "dp_rank": 1}\n', encoding="utf-8")
    arguments = ["live", "--requests", str(tmp_path / "r.jsonl"), "--dp-size", "2", "--speedup", "100"]
    assert main([*arguments, "--format", "json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["dp_rank"] for row in rows[-2:]] == [0, 1]
    assert [row["inactive_blocks"] for row in rows[-2:]] == [0, 0]
    assert rows[-1]["output_tokens"] == 2
    assert main(arguments) == 0
    assert [line.split()[2:4] for line in capsys.readouterr().out.splitlines()[-2:]] == [["rank", "0"], ["rank", "1"]]


def test_nobody_who_reads_does_not_hold_up_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stdout, open(reader, "rb") as other:
        monkeypatch.setattr(sys, "stdout", stdout)
        for _ in range(5000):
            _print("x" * 99 + "\n")
        monkeypatch.undo()
        stdout.close()
        taken = other.read()
    assert len(taken) < 500_000
    assert set(np.frombuffer(taken, np.uint8)) == {ord("x"), ord("\n")}
    assert len(taken) % 100 == 0


def test_lost_lines_are_told_at_the_end(capfd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "r.jsonl").write_text('{"input_tokens": 10, "output_tokens": 2}\n', encoding="utf-8")
    arguments = ["live", "--requests", str(tmp_path / "r.jsonl"), "--out", "/dev/full", "--facts", "outputs"]
    with pytest.warns(RuntimeWarning, match="JsonlSink failed at outputs"):
        assert main(arguments) == 0
    assert capfd.readouterr().err.startswith("kvsim: JsonlSink: 0 calls dropped, 2 failed, the last with OSError(28")


def test_the_clock_is_that_of_the_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clocks = []
    original = WallClock.__init__
    monkeypatch.setattr(
        WallClock, "__init__", lambda clock, *args, **more: (clocks.append(args), original(clock, *args, **more))[1]
    )
    assert main(["live", "--for-s", "0.01", "--speedup", "50"]) == 0
    assert clocks == [(50.0,)]
