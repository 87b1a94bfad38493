"""``kvsim synth``: make up a trace that looks like served traffic."""

from __future__ import annotations

import argparse
from typing import Any

from kvsim.cli.options import check_can_write, write_out

__all__ = ["PROFILE_OPTIONS", "add_parser"]

_DESCRIPTION = """\
Write a made-up request trace in the Mooncake format: lengths with heavy tails,
bursty arrivals, popular prompt prefixes, conversations. Equal options write
equal bytes."""

_EPILOG = """\
example:
  kvsim synth -o trace.jsonl --requests 5000 --seed 7 --rate 4"""


#: One option per number of `kvsim.workload.TraceProfile`, by field name: its type and
#: help. Defaults and ranges stay with the profile, which is loaded when needed.
PROFILE_OPTIONS: dict[str, tuple[type[int] | type[float], str]] = {
    "requests": (int, "rows of the trace"),
    "seed": (int, "equal seeds give equal traces"),
    "rate": (float, "mean requests per second"),
    "burstiness": (float, "squared variation of the gaps between conversations; 1 is Poisson"),
    "block_size": (int, "tokens per hash id"),
    "turns": (float, "mean turns of a conversation"),
    "think_s": (float, "median time to the next question, seconds"),
    "input_median": (float, "median of new prompt tokens per turn"),
    "input_sigma": (float, "their log deviation"),
    "document_share": (float, "share of conversations that open with a document"),
    "document_min": (float, "shortest document, tokens"),
    "document_tail": (float, "Pareto exponent of documents"),
    "output_median": (float, "median of output tokens"),
    "output_sigma": (float, "their log deviation"),
    "max_input": (int, "longest prompt, tokens"),
    "max_output": (int, "longest output, tokens"),
    "prefix_roots": (int, "roots of the tree of shared prefixes; 0 for none"),
    "prefix_depth": (int, "its levels"),
    "prefix_branching": (int, "its children per node"),
    "prefix_tokens": (float, "mean length of the piece of one node, tokens"),
    "prefix_skew": (float, "Zipf exponent of the popularity of prefixes"),
}


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the defaults of the profile."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.dest not in PROFILE_OPTIONS:
            return action.help
        from kvsim.workload.generate import TraceProfile

        return f"{action.help} ({getattr(TraceProfile(), action.dest)})"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser of ``kvsim``."""
    parser = commands.add_parser(
        "synth",
        help="make up a trace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="trace to write; compressed if it ends in .gz"
    )
    shape = parser.add_argument_group("shape of the trace")
    for name, (kind, text) in PROFILE_OPTIONS.items():
        shape.add_argument(
            f"--{name.replace('_', '-')}",
            type=_whole if kind is int else _number,
            default=argparse.SUPPRESS,
            metavar="N" if kind is int else "X",
            help=text,
        )
    shape.add_argument(
        "--session-ids",
        action="store_true",
        help="write conversations as sessions, whose turns wait for each other, instead of timestamps",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    check_can_write("--output", arguments.output)

    from kvsim.workload.generate import TraceProfile, generate_trace, write_mooncake

    values: dict[str, Any] = {name: value for name, value in vars(arguments).items() if name in PROFILE_OPTIONS}
    rows = generate_trace(TraceProfile(**values, session_ids=arguments.session_ids))
    size = write_mooncake(arguments.output, rows)
    prompts, outputs = (sum(row[key] for row in rows) for key in ("input_length", "output_length"))
    write_out(
        f"{arguments.output}: {len(rows):,} requests, {prompts:,} input tokens, {outputs:,} output tokens, "
        f"{size:,} bytes\n"
    )
    return 0


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
