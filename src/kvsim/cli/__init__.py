"""The command line: ``kvsim replay``, ``kvsim sweep``, ``kvsim synth``, ``kvsim live``.

Standard output carries the result and nothing else. Exit codes: 0 success, 1 the
run failed (under ``--strict`` also: a request was rejected, failed or never
ended), 2 usage, configuration or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from kvsim.cli import live, replay, sweep, synth
from kvsim.cli.options import drop_output
from kvsim.errors import ConfigError, KvsimError, WorkloadError

__all__ = ["FAILURE", "INTERRUPTED", "SUCCESS", "USAGE", "main"]

SUCCESS = 0
FAILURE = 1
USAGE = 2
INTERRUPTED = 130


class _UsageError(Exception):
    """The arguments do not parse."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all errors of kvsim."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message} (see '{self.prog} --help')")


class _Version(argparse.Action):
    """Prints the version; looks it up only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        print(f"kvsim {_version()}")
        parser.exit()


def _version() -> str:
    try:
        return metadata.version("kvsim")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def build_parser() -> argparse.ArgumentParser:
    """Parser of the whole command line; each command sets `run` to its function."""
    parser = _Parser(prog="kvsim", description="A fast, step-exact simulator of LLM serving engines.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for command in (replay, sweep, synth, live):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process by default.

    Returns
    -------
    int
        The exit code. Errors of kvsim and of the system become one line on
        standard error; anything else is a bug and is raised.
    """
    try:
        try:
            arguments = build_parser().parse_args(argv)
        except SystemExit as stop:  # --help and --version
            code = stop.code if isinstance(stop.code, int) else SUCCESS
        else:
            code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        drop_output()
        return SUCCESS
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except (_UsageError, ConfigError, WorkloadError) as error:
        return _complain(str(error), USAGE)
    except (KvsimError, OSError, MemoryError) as error:
        return _complain(str(error) or type(error).__name__, FAILURE)


def _complain(message: str, code: int) -> int:
    print(f"kvsim: error: {' '.join(message.split())}", file=sys.stderr)
    return code
