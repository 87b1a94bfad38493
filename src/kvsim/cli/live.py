"""``kvsim live``: a mock engine that runs against the clock until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import select
import signal
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from kvsim.cli.options import (
    DEFAULT_TRACE_BLOCK_SIZE,
    DEFAULT_TRACE_FORMAT,
    add_engine_options,
    check_can_write,
    check_readable,
    config_of,
    milliseconds,
    positive_float,
    positive_int,
    write_out,
)
from kvsim.errors import ConfigError, PoisonedError, StoppedError, WorkloadError

if TYPE_CHECKING:
    from kvsim.config import EngineConfig
    from kvsim.contract import Request
    from kvsim.live import LiveScheduler
    from kvsim.workload import Workload

__all__ = ["Feeder", "LiveCounts", "add_parser", "feed_lines", "feed_workload", "run_live"]

#: Talks to the engine while it runs; when it returns, the run is over.
Feeder: TypeAlias = "Callable[[LiveScheduler], Awaitable[None]]"

#: Lines that were read and not yet submitted.
_LINES_AHEAD = 1024
_HAS_TOKEN, _COMPLETED = 1, 2

_DESCRIPTION = """\
Run a mock engine against the clock, and print its metrics once a second. It takes
requests from a trace, a file, standard input, or a Python function, which may talk
to it in any way; what it does goes to files and to subscribers. It ends with the
last request, or when it gets SIGINT or SIGTERM."""

_EPILOG = """\
examples:
  kvsim live -c engine.yaml --requests - --out facts.jsonl
  kvsim live -c engine.yaml --feed mypackage.load:clients --zmq tcp://127.0.0.1:5557

A function for --feed is a coroutine function of one argument, the
kvsim.live.LiveScheduler.

exit codes:
  0  it ended, or was told to
  1  it failed
  2  usage, configuration or input"""


class LiveCounts:
    """A sink that counts what an engine showed: tokens and ended requests, over all ranks."""

    delivery = "inline"

    def __init__(self) -> None:
        self.output_tokens = 0
        self.ended_requests = 0

    def outputs(self, dp_rank: int, at_ms: float, outputs: Sequence[Any]) -> None:
        """Count the outputs of a pass."""
        import numpy as np

        del dp_rank, at_ms
        array = getattr(outputs, "array", None)
        if array is not None:
            flags = array["flags"]
            self.output_tokens += int(np.count_nonzero(flags & _HAS_TOKEN))
            self.ended_requests += int(np.count_nonzero(flags & _COMPLETED))
            return
        for output in outputs:
            self.output_tokens += output.token_id is not None
            self.ended_requests += output.completed


# ---------------------------------------------------------------- a run


async def run_live(
    config: EngineConfig | None = None,
    feeder: Feeder | None = None,
    *,
    show: Callable[[LiveScheduler, LiveCounts], None] | None = None,
    every_s: float = 1.0,
    for_s: float = math.inf,
    drain_s: float = 0.0,
    sinks: Iterable[Any] = (),
    signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM),
    **options: Any,
) -> LiveScheduler:
    """Run an engine until its feeder returns, the time is over, or a signal comes.

    Parameters
    ----------
    config : EngineConfig, optional
    feeder : coroutine function, optional
        Called with the `LiveScheduler`. When it returns, requests that are inside
        finish; when it raises, the run ends and raises the same.
    show : callable, optional
        Called with the engine and its counts at the start, every `every_s` seconds, and at the end.
    every_s, for_s : float
        Real seconds.
    drain_s : float
        Real seconds that requests inside have to finish after a signal or the end of
        `for_s`; then, and at the next signal, the engine stops in the middle of its pass.
    sinks : iterable of Sink
    signals : sequence of int
        Handled while it runs; an empty one where the event loop is not that of the main thread.
    options
        As for `kvsim.live.LiveScheduler`.

    Returns
    -------
    LiveScheduler
        Stopped.

    Raises
    ------
    PoisonedError
        The engine broke.
    Exception
        What `feeder`, or the `open` of a sink, raised.
    """
    from kvsim.live import LiveScheduler

    counts = LiveCounts()
    engine = LiveScheduler(config, sinks=[counts, *sinks], **options)
    loop = asyncio.get_running_loop()
    told = _Told()
    for number in signals:
        loop.add_signal_handler(number, told.tell)
    feeding: asyncio.Task[None] | None = None
    showing: asyncio.Task[None] | None = None
    try:
        await engine.start()
        if feeder is not None:
            feeding = asyncio.create_task(_feed(feeder, engine), name="kvsim-feeder")
        showing = asyncio.create_task(_show(engine, counts, show, every_s), name="kvsim-metrics")
        stopped = await told.or_first_of([task for task in (feeding, showing) if task is not None], for_s)
        fed = feeding is not None and feeding.done() and not feeding.cancelled() and feeding.exception() is None
        if not showing.done() and (fed or feeding is None or not feeding.done()):
            # Who feeds may still read what is coming while the engine drains.
            await _drain(engine, told, [math.inf, drain_s] if fed and not stopped else [drain_s])
    finally:
        for task in (feeding, showing):
            if task is not None:
                task.cancel()
        await engine.shutdown(drain=False)
        results = await asyncio.gather(*(task for task in (feeding, showing) if task), return_exceptions=True)
        for number in signals:
            loop.remove_signal_handler(number)
    if engine.failure is not None:
        raise PoisonedError(f"the engine broke: {engine.failure}") from engine.failure
    for error in results:
        if isinstance(error, BaseException) and not _is_the_end(error):
            raise error
    if show is not None:
        show(engine, counts)
    return engine


async def _feed(feeder: Feeder, engine: LiveScheduler) -> None:
    await feeder(engine)


async def _show(
    engine: LiveScheduler, counts: LiveCounts, show: Callable[[LiveScheduler, LiveCounts], None] | None, every_s: float
) -> None:
    """Until the engine breaks."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while engine.failure is None:
        if show is not None:
            show(engine, counts)
        due = max(due + every_s, loop.time())
        await asyncio.sleep(due - loop.time())


class _Told:
    """Signals: each is waited for once."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self) -> None:
        """A signal has come."""
        if not self._next.done():
            self._next.set_result(None)

    async def or_first_of(self, tasks: Iterable[asyncio.Task[None]], limit_s: float) -> bool:
        """Wait for a signal, the end of a task or that of time; whether it was a signal."""
        timeout = None if limit_s == math.inf else limit_s
        await asyncio.wait({self._next, *tasks}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not self._next.done():
            return False
        self._next = asyncio.get_running_loop().create_future()
        return True


def _is_the_end(error: BaseException) -> bool:
    """Whether this is how a feeder that was busy when the engine stopped saw the end of it."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_the_end(one) for one in error.exceptions)
    return isinstance(error, (asyncio.CancelledError, StoppedError))


async def _drain(engine: LiveScheduler, told: _Told, limits_s: Sequence[float]) -> None:
    """Let requests finish; each signal moves on to the next limit, and the end of the last one stops the engine."""
    draining = asyncio.create_task(engine.shutdown(), name="kvsim-drain")
    try:
        for limit_s in limits_s:
            if limit_s == 0 or not await told.or_first_of([draining], limit_s):
                break
    finally:
        draining.cancel()
        with suppress(asyncio.CancelledError):
            await draining


# ---------------------------------------------------------------- what feeds it


def feed_workload(workload: Workload) -> Feeder:
    """Feeder that submits the requests of a workload at their times, by the clock of the engine.

    Raises
    ------
    ConfigError
        Some of its requests wait for others.
    """
    if workload.has_sessions:
        raise ConfigError("trace", "turns that wait for earlier ones cannot be fed; write a function for --feed")
    order = workload.specs["arrival_ms"].argsort(kind="stable").tolist()
    first_ms = float(workload.specs["arrival_ms"][order[0]]) if order and workload.rebase_arrivals else 0.0

    async def feed(engine: LiveScheduler) -> None:
        start_ms = engine.clock.now() - first_ms
        for row in order:
            spec = workload.specs[row]
            await engine.clock.sleep_until(start_ms + float(spec["arrival_ms"]))
            request_id = int(spec["id_hi"]) << 64 | int(spec["id_lo"])
            hint = int(spec["dp_rank"])
            await engine.submit(_request_of(workload, row, request_id), hint if hint >= 0 else None, listen=False)

    return feed


def _request_of(workload: Workload, row: int, request_id: int) -> Request:
    from kvsim.contract import Request

    spec, prompt, planned = workload.specs[row], workload.prompt(row), workload.planned_token_ids(row)
    if spec["prompt_is_tokens"]:
        return Request(request_id, prompt, int(spec["max_output_tokens"]), planned)
    return Request.from_segments(request_id, prompt, int(spec["max_output_tokens"]), planned)


def feed_lines(path: str) -> Feeder:
    """Feeder that submits the requests of a file of JSON lines as they come.

    A line has the keys of a request as in `kvsim.replay`: ``input_tokens`` or
    ``input_token_ids``, ``output_tokens`` or ``output_token_ids``, ``dp_rank``, and
    ``arrival_time_ms`` by the clock of the engine, at once if there is none. ``id``
    is an int or a UUID; otherwise requests are numbered from 1.

    Parameters
    ----------
    path : str
        A file, a named pipe, or ``-`` for standard input.
    """

    async def feed(engine: LiveScheduler) -> None:
        number = 0
        async for line in _lines(path):
            number += 1
            if not line.strip():
                continue
            request, arrival_ms, dp_rank = _parse_line(line, path, number)
            await engine.clock.sleep_until(arrival_ms)
            await engine.submit(request, dp_rank, listen=False)

    return feed


def _parse_line(line: bytes, path: str, number: int) -> tuple[Request, float, int | None]:
    import msgspec
    import numpy as np

    from kvsim.contract import Request
    from kvsim.layout import SEGMENT
    from kvsim.workload.requests import CONTENT_STRIDE, workload_from_requests

    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise WorkloadError(f"is not JSON: {error}", path=path, line=number) from None
    if not isinstance(row, dict):
        raise WorkloadError(f"must be an object, got {row!r}", path=path, line=number)
    request_id = number
    if row.get("id") is not None:
        try:
            name = row["id"]
            request_id = name if isinstance(name, int) and not isinstance(name, bool) else uuid.UUID(name).int
        except (ValueError, AttributeError, TypeError):
            raise WorkloadError(f"must be an int or a UUID, got {name!r}", path=path, line=number, field="id") from None
    try:
        one = workload_from_requests([row])
    except WorkloadError as error:
        raise WorkloadError(str(error).removeprefix("requests[0]."), path=path, line=number) from None
    request = _request_of(one, 0, request_id)
    if not one.specs[0]["prompt_is_tokens"]:
        # Made-up prompts differ from line to line, as they do in a list.
        start = (number - 1) * CONTENT_STRIDE % (1 << 32)
        content = np.array([(start, 1, int(one.specs[0]["input_tokens"]))], SEGMENT)
        request = Request.from_segments(request_id, content, request.max_output_tokens, request.output_token_ids)
    hint = int(one.specs[0]["dp_rank"])
    return request, float(one.specs[0]["arrival_ms"]), hint if hint >= 0 else None


async def _lines(path: str) -> AsyncIterator[bytes]:
    """Lines of a file that may block; a thread reads, a bounded number of lines ahead."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError | None] = asyncio.Queue()
    room = threading.Semaphore(_LINES_AHEAD)

    def read() -> None:
        # By descriptor: a buffered reader that blocks would keep the interpreter from ending.
        def give(item: bytes | OSError | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        with suppress(RuntimeError):  # the loop is closed, nobody listens any more
            try:
                descriptor = os.dup(sys.stdin.fileno()) if path == "-" else os.open(path, os.O_RDONLY)
            except OSError as error:
                return give(error)
            try:
                rest = b""
                while data := os.read(descriptor, 1 << 16):
                    *whole, rest = (rest + data).split(b"\n")
                    for line in whole:
                        room.acquire()
                        give(line)
                if rest:
                    give(rest)
                give(None)
            except OSError as error:
                give(error)
            finally:
                os.close(descriptor)
        return None

    threading.Thread(target=read, name="kvsim-lines", daemon=True).start()
    while True:
        item = await queue.get()
        if item is None:
            return
        if isinstance(item, OSError):
            raise WorkloadError(f"cannot be read: {item.strerror or item}", path=path)
        room.release()
        yield item


def _feed_function(name: str) -> Feeder:
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ConfigError("--feed", f"expected MODULE:FUNCTION, got {name!r}")
    # As `python -m` does: what stands in the working directory can be named.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module_name)
        for part in function_name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError("--feed", f"there is no module {error.name}") from None
    except AttributeError:
        raise ConfigError("--feed", f"module {module_name} has no {function_name}") from None
    if not callable(found):
        raise ConfigError("--feed", f"{name} must be a coroutine function of the engine, got {found!r}")
    feeder: Feeder = found
    return feeder


# ---------------------------------------------------------------- the command


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser of ``kvsim``."""
    parser = commands.add_parser(
        "live",
        help="run a mock engine against the clock",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    load = parser.add_argument_group("load, at most one")
    load.add_argument("trace", nargs="?", metavar="TRACE", help="trace file, plain or gzip, fed at its times")
    load.add_argument("--example", action="store_true", help="feed the built-in trace")
    load.add_argument("--requests", metavar="FILE", help="requests as JSON lines, as they come; - for standard input")
    load.add_argument("--feed", metavar="MODULE:FUNCTION", help="coroutine function that is called with the engine")
    load.add_argument(
        "--trace-format", default=DEFAULT_TRACE_FORMAT, metavar="NAME", help="format of the trace (mooncake)"
    )
    load.add_argument(
        "--trace-block-size",
        type=positive_int,
        default=DEFAULT_TRACE_BLOCK_SIZE,
        metavar="N",
        help="tokens per hash id of the trace (512)",
    )
    add_engine_options(parser, workers=False)
    clock = parser.add_argument_group("clock")
    clock.add_argument(
        "--speedup", type=positive_float, default=1.0, metavar="X", help="simulated seconds per real second (1)"
    )
    clock.add_argument("--for-s", type=positive_float, default=math.inf, metavar="S", help="stop after S real seconds")
    clock.add_argument(
        "--drain-s",
        type=milliseconds,
        default=0.0,
        metavar="S",
        help="when told to stop, let requests finish for up to S real seconds (0: they are dropped)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--every-s", type=positive_float, default=1.0, metavar="S", help="seconds between metrics (1)")
    output.add_argument("--format", choices=("table", "json"), default="table", help="what to print (table)")
    output.add_argument("--out", metavar="FILE", help="write what the engine shows as JSON lines")
    output.add_argument("--facts", metavar="LIST", help="which facts --out gets, with commas between (all)")
    output.add_argument(
        "--zmq",
        metavar="ENDPOINT",
        help="publish KV events, e.g. at tcp://127.0.0.1:5557; turns on emit_kv_events and emit_kv_token_ids",
    )
    output.add_argument("--zmq-replay", metavar="ENDPOINT", help="repeat missed KV events to those who ask here")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from kvsim.live import WallClock

    feeder = _feeder(arguments)
    if arguments.facts is not None and arguments.out is None:
        raise ConfigError("--facts", "needs --out, the facts are written there")
    if arguments.zmq_replay is not None and arguments.zmq is None:
        raise ConfigError("--zmq-replay", "needs --zmq, whose events it repeats")
    config = config_of(arguments)
    sinks: list[Any] = []
    if arguments.out is not None:
        from kvsim.live.sinks import JsonlSink

        check_can_write("--out", arguments.out)
        sinks.append(JsonlSink(arguments.out, None if arguments.facts is None else arguments.facts.split(",")))
    if arguments.zmq is not None:
        from kvsim.live.sinks import ZmqSink

        sinks.append(ZmqSink(arguments.zmq, arguments.zmq_replay))
        config = config.replace(emit_kv_events=True, emit_kv_token_ids=True)
    engine = asyncio.run(
        run_live(
            config,
            feeder,
            show=_print_json if arguments.format == "json" else _print_table,
            every_s=arguments.every_s,
            for_s=arguments.for_s,
            drain_s=arguments.drain_s,
            sinks=sinks,
            dp_size=arguments.dp_size,
            clock=WallClock(arguments.speedup),
        )
    )
    for sink in engine.sinks[1:]:
        if sink.dropped or sink.failed:
            print(
                f"kvsim: {type(sink.sink).__name__}: {sink.dropped} calls dropped, {sink.failed} failed"
                + (f", the last with {sink.last_error!r}" if sink.last_error is not None else ""),
                file=sys.stderr,
            )
    return 0


def _feeder(arguments: argparse.Namespace) -> Feeder | None:
    given = [
        name
        for name, value in (
            ("TRACE", arguments.trace),
            ("--example", arguments.example),
            ("--requests", arguments.requests),
            ("--feed", arguments.feed),
        )
        if value
    ]
    if len(given) > 1:
        raise ConfigError("", f"give at most one of TRACE, --example, --requests and --feed, got {' and '.join(given)}")
    if arguments.feed:
        return _feed_function(arguments.feed)
    if arguments.requests:
        if arguments.requests != "-" and not os.path.exists(arguments.requests):
            check_readable(arguments.requests)
        return feed_lines(arguments.requests)
    if not given:
        return None
    from kvsim.workload import example_trace_path, load_workload

    if arguments.example:
        return feed_workload(load_workload(example_trace_path()))
    check_readable(arguments.trace)
    return feed_workload(load_workload(arguments.trace, arguments.trace_format, arguments.trace_block_size))


def _print_table(engine: LiveScheduler, counts: LiveCounts) -> None:
    for rank in range(engine.dp_size):
        metrics = engine.metrics(rank)
        _print(
            f"{engine.clock.now() / 1000.0:10.3f} s"
            + (f"  rank {rank}" if engine.dp_size > 1 else "")
            + f"  running {metrics.running_requests:>5}  waiting {metrics.waiting_requests:>5}"
            f"  blocks {metrics.active_blocks:>7} of {metrics.total_blocks} ({100.0 * metrics.cache_usage:5.1f} %)"
            f"  passes {engine.passes:>8}  tokens {counts.output_tokens:>9}  ended {counts.ended_requests:>7}\n"
        )


def _print_json(engine: LiveScheduler, counts: LiveCounts) -> None:
    import msgspec

    for rank in range(engine.dp_size):
        row = {
            "at_ms": engine.clock.now(),
            **engine.metrics(rank)._asdict(),
            "passes": engine.passes,
            "output_tokens": counts.output_tokens,
            "ended_requests": counts.ended_requests,
        }
        _print(msgspec.json.encode(row).decode() + "\n")


def _print(line: str) -> None:
    """Print a line, unless nobody reads: a full pipe must not hold up the engine."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        write_out(line)
        return
    if select.select([], [descriptor], [], 0)[1]:
        write_out(line)
