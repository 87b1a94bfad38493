"""``kvsim sweep``: one trace under many configurations."""

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
    non_negative_int,
    positive_int,
    sla_of,
    write_out,
)
from kvsim.errors import ConfigError

if TYPE_CHECKING:
    from kvsim.sweeps import SweepResult

__all__ = ["add_parser"]

_DESCRIPTION = """\
Run a request trace under every combination of the given values and report one
row per run. Equal sweeps print equal bytes, whatever the executor."""

_EPILOG = """\
examples:
  kvsim sweep trace.jsonl -c engine.yaml --grid num_gpu_blocks=4096,8192 --grid replay.workers=1,2
  kvsim sweep trace.jsonl --linked num_gpu_blocks,block_size=4096:64,16384:16 --jobs 2 --out results.csv

exit codes:
  0  the sweep ended
  1  it failed, or every run did; with --strict also: any run failed
  2  usage, configuration or trace"""


#: Columns of the printed table unless --metrics names others.
_SHOWN = (
    "completed_requests",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_itl_ms",
    "output_throughput_tok_s",
    "prefix_cache_reused_ratio",
)


def grid_option(text: str) -> tuple[str, list[Any]]:
    """Parse ``path=value,value`` with YAML values, for argparse."""
    import msgspec

    path, equals, values = text.partition("=")
    path = path.strip()
    if not equals or not path or not values.strip():
        raise argparse.ArgumentTypeError(f"expected path=value,value,..., got {text!r}")
    try:
        decoded = msgspec.yaml.decode(f"[{values}]")
    except msgspec.DecodeError:
        raise argparse.ArgumentTypeError(f"the values of {path} are not YAML: {values!r}") from None
    return path, decoded


def linked_option(text: str) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Parse ``a,b=1:2,3:4``, for argparse."""
    import msgspec

    left, equals, right = text.partition("=")
    names = tuple(name.strip() for name in left.split(","))
    if not equals or not all(names):
        raise argparse.ArgumentTypeError(f"expected a,b=1:2,3:4, got {text!r}")
    rows = []
    for group in right.split(","):
        parts = group.split(":")
        if len(parts) != len(names):
            raise argparse.ArgumentTypeError(f"expected {len(names)} values joined by ':' for {left}, got {group!r}")
        try:
            rows.append(tuple(msgspec.yaml.decode(part) for part in parts))
        except msgspec.DecodeError:
            raise argparse.ArgumentTypeError(f"the values of {left} are not YAML: {group!r}") from None
    return names, rows


def seeds_option(text: str) -> list[int]:
    """Parse a comma list of seeds, for argparse."""
    return [non_negative_int(part) for part in text.split(",")]


def names_option(text: str) -> list[str]:
    """Parse a comma list of names, for argparse."""
    return [part.strip() for part in text.split(",")]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser of ``kvsim``."""
    parser = commands.add_parser(
        "sweep",
        help="run a trace under many configurations",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="trace file, plain or gzip")
    parser.add_argument("--example", action="store_true", help="run the built-in trace")

    points = parser.add_argument_group(
        "points", "PATH is a field of the configuration, or replay. and one of the options below"
    )
    points.add_argument(
        "--grid",
        action="append",
        default=[],
        type=grid_option,
        metavar="PATH=V,V",
        help="values of a parameter; every combination is run; may be repeated",
    )
    points.add_argument(
        "--linked",
        action="append",
        default=[],
        type=linked_option,
        metavar="A,B=1:2,3:4",
        help="parameters whose values go together; may be repeated",
    )
    points.add_argument("--seeds", type=seeds_option, default=[0], metavar="N,N", help="run each point with each (0)")
    points.add_argument("--repeats", type=positive_int, default=1, metavar="N", help="runs of equal point and seed (1)")

    add_engine_options(parser)
    add_offload_options(parser)
    add_load_options(parser, "refuse doubtful traces; exit 1 if any run failed")
    add_sla_options(parser)

    how = parser.add_argument_group("execution")
    how.add_argument(
        "--executor", choices=("threads", "processes", "ray"), default="threads", help="where runs execute (threads)"
    )
    how.add_argument("--jobs", type=positive_int, metavar="N", help="runs at a time (one per CPU)")
    how.add_argument("--resume", metavar="FILE", help="keep finished runs here, and skip those that it holds")

    output = parser.add_argument_group("output")
    output.add_argument("--metrics", type=names_option, metavar="M,M", help="numbers of the summary to report")
    output.add_argument("--format", choices=("table", "json", "csv"), default="table", help="what to print (table)")
    output.add_argument("--out", metavar="FILE", help="write all columns as CSV, or JSON if the name ends so")
    output.add_argument("--no-progress", action="store_true", help="no progress bar on the terminal")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if (arguments.trace is None) == (not arguments.example):
        raise ConfigError("", "give either a TRACE or --example")
    trace, replay_options = arguments.trace, _replay_options(arguments)
    if arguments.example:
        if (arguments.trace_format, arguments.trace_block_size) != (DEFAULT_TRACE_FORMAT, DEFAULT_TRACE_BLOCK_SIZE):
            raise ConfigError("--example", "has its own format and block size")
        from kvsim.workload import example_trace_path

        trace = str(example_trace_path())
    grid: dict[Any, list[Any]] = {}
    for key, values in (*arguments.grid, *arguments.linked):
        if key in grid:
            raise ConfigError(key if isinstance(key, str) else ",".join(key), "is given more than once")
        grid[key] = values
    base = _base(arguments)
    check_readable(trace)
    for option, path in (("--out", arguments.out), ("--resume", arguments.resume)):
        if path is not None:
            check_can_write(option, path)

    import kvsim

    with Progress(enabled=not arguments.no_progress and sys.stderr.isatty(), unit="run") as progress:
        result = kvsim.sweep(
            trace,
            grid,
            base=base,
            replay_options=replay_options,
            seeds=arguments.seeds,
            repeats=arguments.repeats,
            executor=arguments.executor,
            max_workers=arguments.jobs,
            resume=arguments.resume,
            progress=progress.callback,
            metrics=arguments.metrics,
        )
    if arguments.out is not None:
        text = result.to_json() if arguments.out.endswith(".json") else result.to_csv()
        Path(arguments.out).write_text(text, encoding="utf-8", newline="\n")
    if arguments.format == "table":
        write_out(format_sweep(result))
    else:
        write_out(result.to_json() if arguments.format == "json" else result.to_csv())
    failed = result.num_errors
    return 1 if failed == len(result) or (arguments.strict and failed) else 0


def _base(arguments: argparse.Namespace) -> Any:
    from kvsim.config import apply_overrides, load_config

    overrides = dict(arguments.overrides)
    if arguments.config is not None:
        return load_config(arguments.config, overrides=overrides)
    return apply_overrides({}, overrides)


def _replay_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "workers": arguments.workers,
        "dp_size": arguments.dp_size,
        "concurrency": arguments.concurrency,
        "speedup": arguments.speedup,
        "max_sim_time_ms": arguments.max_sim_time,
        "sla": sla_of(arguments),
        "trace_format": arguments.trace_format,
        "trace_block_size": arguments.trace_block_size,
        "strict": arguments.strict,
    }


def format_sweep(result: SweepResult) -> str:
    """Table of a sweep for people: parameters, seed and repeat where they vary, a few metrics, errors.

    All metrics are shown when the sweep kept but some.
    """
    metrics = [name for name in _SHOWN if name in result.metrics]
    if not set(_SHOWN) < set(result.metrics):
        metrics = list(result.metrics)
    varied = [name for name in ("seed", "repeat") if len(set(result[name].tolist())) > 1]
    columns = [*result.parameters, *varied, *metrics]
    if result.num_errors:
        columns.append("error")
    rows = [columns, *([_text(row[name]) for name in columns] for row in result.to_dicts())]
    widths = [max(len(row[k]) for row in rows) for k in range(len(columns))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if name == "error" else cell.rjust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if value is None:
        return "N/A"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
