"""Pieces that several commands share."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

from kvsim.errors import ConfigError, WorkloadError

__all__ = [
    "check_can_write",
    "check_readable",
    "drop_output",
    "milliseconds",
    "non_negative_int",
    "override",
    "positive_float",
    "positive_int",
    "write_out",
]


def positive_int(text: str) -> int:
    """Parse an integer >= 1, for argparse."""
    return _integer(text, 1)


def non_negative_int(text: str) -> int:
    """Parse an integer >= 0, for argparse."""
    return _integer(text, 0)


def _integer(text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
    if value < low:
        raise argparse.ArgumentTypeError(f"must be >= {low}, got {value}")
    return value


def positive_float(text: str) -> float:
    """Parse a finite number > 0, for argparse."""
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be > 0, got {text}")
    return value


def milliseconds(text: str) -> float:
    """Parse a finite number >= 0, for argparse."""
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be >= 0, got {text}")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be finite, got {text}")
    return value


def override(text: str) -> tuple[str, Any]:
    """Parse ``path=value`` with a YAML value, for argparse."""
    import msgspec

    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path or not all(path.split(".")):
        raise argparse.ArgumentTypeError(f"expected path=value with a dotted path, got {text!r}")
    try:
        return path, msgspec.yaml.decode(value)
    except msgspec.DecodeError:
        raise argparse.ArgumentTypeError(f"the value of {path} is not YAML: {value!r}") from None


def check_readable(path: str) -> None:
    """Find out before a run whether its input can be opened.

    Raises
    ------
    WorkloadError
        Naming the file and the reason.
    """
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise WorkloadError(f"cannot be read: {error.strerror or error}", path=path) from None


def check_can_write(option: str, path: str, *, directory: bool = False) -> None:
    """Find out before a run whether its result has a place to go.

    Parameters
    ----------
    option : str
        Named in the error.
    path : str
        File, or directory (made if missing).
    directory : bool

    Raises
    ------
    ConfigError
        Naming the option and the path.
    """
    target = Path(path)
    try:
        if directory:
            target.mkdir(parents=True, exist_ok=True)
        elif target.is_dir():
            raise ConfigError(option, f"{path} is a directory, expected a file")
        elif not target.parent.is_dir():
            raise ConfigError(option, f"the directory {target.parent} does not exist")
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be made: {error.strerror or error}") from None


def write_out(text: str) -> None:
    """Write to standard output; a reader that went away has seen enough and is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Send standard output nowhere, so that the flush at exit does not meet the closed pipe again."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
