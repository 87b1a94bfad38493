"""Pieces that several commands share."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvsim.errors import ConfigError, WorkloadError

if TYPE_CHECKING:
    from kvsim.config import EngineConfig
    from kvsim.report import Sla

__all__ = [
    "DEFAULT_TRACE_BLOCK_SIZE",
    "DEFAULT_TRACE_FORMAT",
    "Progress",
    "add_engine_options",
    "add_load_options",
    "add_offload_options",
    "add_sla_options",
    "check_can_write",
    "check_readable",
    "config_of",
    "drop_output",
    "milliseconds",
    "non_negative_int",
    "override",
    "positive_float",
    "positive_int",
    "sla_of",
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


#: How traces are read unless told otherwise; the example has no other way.
DEFAULT_TRACE_FORMAT = "mooncake"
DEFAULT_TRACE_BLOCK_SIZE = 512


def add_engine_options(parser: argparse.ArgumentParser, *, workers: bool = True) -> None:
    """Add the options that make an engine configuration and, if asked for, its workers."""
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
    if workers:
        engine.add_argument("--workers", type=positive_int, default=1, metavar="N", help="number of workers (1)")
    engine.add_argument(
        "--dp-size", type=positive_int, default=1, metavar="N", help="attention-DP ranks of each worker (1)"
    )


def config_of(arguments: argparse.Namespace) -> EngineConfig:
    """Configuration of the engine that `add_engine_options` asked for."""
    from kvsim.config import apply_overrides, load_config, parse_config

    overrides = dict(arguments.overrides)
    if arguments.config is not None:
        return load_config(arguments.config, overrides=overrides)
    return parse_config(apply_overrides({}, overrides))


class _Sets(argparse.Action):
    """An option that sets a field of the configuration, as ``--set`` does; the later one of both wins."""

    def __init__(self, option_strings: list[str], dest: str, *, path: str, **options: Any) -> None:
        super().__init__(option_strings, "overrides", **options)
        self.path = path

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = True if self.nargs == 0 else values
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), (self.path, value)])


def add_offload_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of lower KV tiers; each sets a field of the configuration."""
    tiers = parser.add_argument_group(
        "lower KV tiers", "native host offload (--host-blocks) or KVBM tiers (--g2-blocks); both need --kv-cache-bytes"
    )
    host, kvbm = "native_host_offload", "kvbm_tiers"
    for option, path, kind, metavar, text in (
        ("--kv-cache-bytes", "kv_cache_bytes_per_token", positive_int, "N", "bytes of KV per token"),
        (
            "--host-blocks",
            f"{host}.num_host_blocks",
            positive_int,
            "N",
            "write finished prompt blocks through to so many",
        ),
        (
            "--d2h-gbps",
            f"{host}.d2h_bandwidth_gbps",
            milliseconds,
            "X",
            "device to host, GB/s (32); 0 is instantaneous",
        ),
        (
            "--h2d-gbps",
            f"{host}.h2d_bandwidth_gbps",
            milliseconds,
            "X",
            "host to device, GB/s (32); 0 is instantaneous",
        ),
        ("--g2-blocks", f"{kvbm}.num_g2_blocks", positive_int, "N", "keep what the device evicts in host memory"),
        ("--g3-blocks", f"{kvbm}.num_g3_blocks", non_negative_int, "N", "copy it on to a disk of so many blocks"),
    ):
        tiers.add_argument(option, action=_Sets, path=path, type=kind, default=[], metavar=metavar, help=text)
    tiers.add_argument(
        "--g4", action=_Sets, path=f"{kvbm}.g4_storage", nargs=0, default=[], help="copy it on to an object store, too"
    )


def add_load_options(parser: argparse.ArgumentParser, strict: str) -> argparse._ArgumentGroup:
    """Add the options of the load and of reading it; `strict` says what --strict does. Returns their group."""
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=positive_int, metavar="N", help="closed loop: at most N requests at once")
    load.add_argument("--speedup", type=positive_float, default=1.0, metavar="X", help="divide arrival times by X (1)")
    load.add_argument("--max-sim-time", type=milliseconds, metavar="MS", help="stop at this virtual time, milliseconds")
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
    load.add_argument("--strict", action="store_true", help=strict)
    return load


def add_sla_options(parser: argparse.ArgumentParser) -> None:
    """Add the bounds of goodput."""
    sla = parser.add_argument_group("service level", "bounds that a request must keep to count as goodput")
    sla.add_argument("--sla-ttft-ms", type=positive_float, metavar="MS", help="time to first token")
    sla.add_argument("--sla-itl-ms", type=positive_float, metavar="MS", help="mean time between tokens")
    sla.add_argument("--sla-e2e-ms", type=positive_float, metavar="MS", help="time to last token; stands alone")


def sla_of(arguments: argparse.Namespace) -> Sla | None:
    """Bounds that were given, None if none was."""
    from kvsim.report import Sla

    sla = Sla(ttft_ms=arguments.sla_ttft_ms, itl_ms=arguments.sla_itl_ms, e2e_ms=arguments.sla_e2e_ms)
    return sla if sla.is_set else None


class Progress:
    """A bar on standard error that grows with what is finished; nothing when disabled.

    Parameters
    ----------
    enabled : bool
    unit : str
        What is counted.
    """

    def __init__(self, *, enabled: bool, unit: str) -> None:
        self._enabled = enabled
        self._unit = unit
        self._bar: Any = None

    @property
    def callback(self) -> Callable[[int, int], None] | None:
        """Function of (done, total), None when disabled."""
        return self._update if self._enabled else None

    def _update(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit=self._unit, file=sys.stderr, leave=False)
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
