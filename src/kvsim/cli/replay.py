"""``kvsim replay``: run a trace through simulated engines and report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvsim.cli.options import (
    check_can_write,
    check_readable,
    milliseconds,
    non_negative_int,
    override,
    positive_float,
    positive_int,
    write_out,
)
from kvsim.errors import ConfigError

if TYPE_CHECKING:
    from kvsim.config import EngineConfig
    from kvsim.report import ReplayResult, Sla

__all__ = ["add_parser"]

_DESCRIPTION = """\
Run a request trace through simulated serving engines and report latencies,
throughput and cache reuse. Equal runs print equal bytes."""

_EPILOG = """\
example:
  kvsim replay trace.jsonl -c engine.yaml --set num_gpu_blocks=4096 --workers 4 --format json

exit codes:
  0  the run ended
  1  it failed; with --strict also: a request was rejected, failed or never ended
  2  usage, configuration or trace"""

_DEFAULT_FORMAT = "mooncake"
_DEFAULT_BLOCK_SIZE = 512


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser of ``kvsim``."""
    parser = commands.add_parser(
        "replay",
        help="run a trace through simulated engines",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="trace file, plain or gzip")
    parser.add_argument("--example", action="store_true", help="run the built-in trace")

    engine = parser.add_argument_group("engine")
    engine.add_argument("-c", "--config", metavar="FILE", help="engine configuration, YAML or JSON")
    engine.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        type=override,
        metavar="PATH=VALUE",
        help="set a field of the configuration, e.g. sglang.schedule_policy=lpm; may be repeated",
    )
    engine.add_argument("--workers", type=positive_int, default=1, metavar="N", help="number of workers (1)")

    engine.add_argument(
        "--dp-size", type=positive_int, default=1, metavar="N", help="attention-DP ranks of each worker (1)"
    )

    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=positive_int, metavar="N", help="closed loop: at most N requests at once")
    load.add_argument("--speedup", type=positive_float, default=1.0, metavar="X", help="divide arrival times by X (1)")
    load.add_argument("--max-sim-time", type=milliseconds, metavar="MS", help="stop at this virtual time, milliseconds")
    load.add_argument("--seed", type=non_negative_int, default=0, metavar="N", help="seed of everything random (0)")
    load.add_argument("--trace-format", default=_DEFAULT_FORMAT, metavar="NAME", help="format of the trace (mooncake)")
    load.add_argument(
        "--trace-block-size",
        type=positive_int,
        default=_DEFAULT_BLOCK_SIZE,
        metavar="N",
        help="tokens per hash id of the trace (512)",
    )
    load.add_argument(
        "--strict",
        action="store_true",
        help="refuse doubtful traces; exit 1 if a request is rejected, fails or never ends",
    )

    sla = parser.add_argument_group("service level", "bounds that a request must keep to count as goodput")
    sla.add_argument("--sla-ttft-ms", type=positive_float, metavar="MS", help="time to first token")
    sla.add_argument("--sla-itl-ms", type=positive_float, metavar="MS", help="mean time between tokens")
    sla.add_argument("--sla-e2e-ms", type=positive_float, metavar="MS", help="time to last token; stands alone")

    output = parser.add_argument_group("output")
    output.add_argument("--format", choices=("table", "json"), default="table", help="what to print (table)")
    output.add_argument("--out", metavar="DIR", help="write summary.json, requests.jsonl, table.txt, passes.npy")
    output.add_argument("--per-request", metavar="FILE", help="write one JSON line per request")
    output.add_argument("--record-passes", action="store_true", help="record every pass, for passes.npy")
    output.add_argument("--no-progress", action="store_true", help="no progress bar on the terminal")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if (arguments.trace is None) == (not arguments.example):
        raise ConfigError("", "give either a TRACE or --example")
    if arguments.record_passes and arguments.out is None:
        raise ConfigError("--record-passes", "needs --out, the passes are written there")
    config = _config(arguments)
    sla = _sla(arguments)
    trace = arguments.trace
    if arguments.example:
        if (arguments.trace_format, arguments.trace_block_size) != (_DEFAULT_FORMAT, _DEFAULT_BLOCK_SIZE):
            raise ConfigError("--example", "has its own format and block size")
        from kvsim.workload import example_trace_path

        trace = str(example_trace_path())
    check_readable(trace)
    if arguments.out is not None:
        check_can_write("--out", arguments.out, directory=True)
    if arguments.per_request is not None:
        check_can_write("--per-request", arguments.per_request)

    import kvsim

    watched = not arguments.no_progress and sys.stderr.isatty()
    with _Progress(enabled=watched) as progress:
        result: ReplayResult = kvsim.replay(
            trace,
            config,
            workers=arguments.workers,
            dp_size=arguments.dp_size,
            concurrency=arguments.concurrency,
            speedup=arguments.speedup,
            max_sim_time_ms=arguments.max_sim_time,
            seed=arguments.seed,
            sla=sla,
            trace_format=arguments.trace_format,
            trace_block_size=arguments.trace_block_size,
            strict=arguments.strict,
            record_passes=arguments.record_passes,
            progress=progress.callback,
        )
    if watched:
        # The one figure that differs from run to run stays off standard output.
        print(f"wall time {result.wall['wall_time_ms']:,.2f} ms", file=sys.stderr)
    if arguments.out is not None:
        result.write(arguments.out)
    if arguments.per_request is not None:
        Path(arguments.per_request).write_text(result.to_jsonl(), encoding="utf-8", newline="\n")
    write_out(result.to_json() if arguments.format == "json" else result.table(wall=False))
    return 1 if arguments.strict and _lost(result.summary, capped=arguments.max_sim_time is not None) else 0


def _config(arguments: argparse.Namespace) -> EngineConfig:
    from kvsim.config import apply_overrides, load_config, parse_config

    overrides = dict(arguments.overrides)
    if arguments.config is not None:
        return load_config(arguments.config, overrides=overrides)
    return parse_config(apply_overrides({}, overrides))


def _sla(arguments: argparse.Namespace) -> Sla | None:
    from kvsim.report import Sla

    sla = Sla(ttft_ms=arguments.sla_ttft_ms, itl_ms=arguments.sla_itl_ms, e2e_ms=arguments.sla_e2e_ms)
    return sla if sla.is_set else None


def _lost(summary: dict[str, Any], *, capped: bool) -> int:
    """Count the requests that ended badly, or never although nothing stopped the run."""
    lost = summary["rejected_requests"] + summary["failed_requests"]
    if not capped:
        lost += summary["unfinished_requests"] + summary["unreleased_requests"]
    return int(lost)


class _Progress:
    """A bar on standard error that grows with finished requests; nothing when disabled."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._bar: Any = None

    @property
    def callback(self) -> Callable[[int, int], None] | None:
        return self._update if self._enabled else None

    def _update(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="req", file=sys.stderr, leave=False)
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
