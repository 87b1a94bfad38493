"""``kvsim replay``: run a trace through simulated engines and report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.cli.options import (
    DEFAULT_TRACE_BLOCK_SIZE,
    DEFAULT_TRACE_FORMAT,
    Progress,
    add_engine_options,
    add_load_options,
    add_offload_options,
    add_sla_options,
    check_can_write,
    check_readable,
    config_of,
    non_negative_int,
    sla_of,
    write_out,
)
from kvsim.cli.system import add_system_options, system_of
from kvsim.errors import ConfigError

if TYPE_CHECKING:
    from kvsim.report import ReplayResult

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

    add_engine_options(parser)
    add_offload_options(parser)
    add_system_options(parser)
    load = add_load_options(parser, "refuse doubtful traces; exit 1 if a request is rejected, fails or never ends")
    load.add_argument("--seed", type=non_negative_int, default=0, metavar="N", help="seed of everything random (0)")
    add_sla_options(parser)

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
    config = config_of(arguments)
    sla = sla_of(arguments)
    trace = arguments.trace
    if arguments.example:
        if (arguments.trace_format, arguments.trace_block_size) != (DEFAULT_TRACE_FORMAT, DEFAULT_TRACE_BLOCK_SIZE):
            raise ConfigError("--example", "has its own format and block size")
        from kvsim.workload import example_trace_path

        trace = str(example_trace_path())
    check_readable(trace)
    if arguments.out is not None:
        check_can_write("--out", arguments.out, directory=True)
    if arguments.per_request is not None:
        check_can_write("--per-request", arguments.per_request)

    if arguments.telemetry is not None:
        check_can_write("--telemetry", arguments.telemetry)
    system = system_of(arguments, config)

    import kvsim

    watched = not arguments.no_progress and sys.stderr.isatty()
    with Progress(enabled=watched, unit="req") as progress:
        result: ReplayResult = kvsim.replay(
            trace,
            **system,
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


def _lost(summary: dict[str, Any], *, capped: bool) -> int:
    """Count the requests that ended badly, or never although nothing stopped the run."""
    lost = summary["rejected_requests"] + summary["failed_requests"]
    if not capped:
        lost += summary["unfinished_requests"] + summary["unreleased_requests"]
    return int(lost)
