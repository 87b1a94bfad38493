"""Sweeps: one workload under many configurations, and a table of what came out.

A sweep is a list of runs, in an order that the arguments fix. Where a run
executes is the executor's business; its row depends on the run alone. So the
table is the same, byte for byte, on threads, processes or machines.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import multiprocessing.synchronize
import os
import pickle
import signal
import threading
import time
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvsim.config import (
    EngineConfig,
    ExternalTiming,
    FixedTiming,
    KvbmTiers,
    NativeHostOffload,
    NpzTiming,
    SglangConfig,
    TrtllmConfig,
    apply_overrides,
    load_config,
    parse_config,
)
from kvsim.errors import ConfigError, KvsimError, WorkloadError
from kvsim.layout import REQUEST_RECORD
from kvsim.offload.totals import TransferTotals
from kvsim.replay import WorkloadLike, replay
from kvsim.report import GapHistogram, RunTotals, Sla
from kvsim.report.summary import summarize
from kvsim.workload import Workload, load_workload, workload_from_requests

__all__ = ["RandomParameter", "SweepResult", "sweep"]

Grid: TypeAlias = "Mapping[str | tuple[str, ...], Iterable[Any] | RandomParameter]"

#: Options of a replay that may differ from point to point, as ``replay.NAME``.
REPLAY_PARAMETERS = ("workers", "concurrency", "speedup", "dp_size", "max_sim_time_ms")

_LOADING = ("trace_format", "trace_block_size", "strict")
_REPLAY_OPTIONS = (*REPLAY_PARAMETERS, "sla", "timing", "tokenization", "policy", *_LOADING)

_GROUPS: dict[str, frozenset[str]] = {
    "sglang": frozenset(SglangConfig.__struct_fields__),
    "trtllm": frozenset(TrtllmConfig.__struct_fields__),
    "native_host_offload": frozenset(NativeHostOffload.__struct_fields__),
    "kvbm_tiers": frozenset(KvbmTiers.__struct_fields__),
    "timing_model": frozenset(
        ("type", *(name for kind in (FixedTiming, NpzTiming, ExternalTiming) for name in kind.__struct_fields__))
    ),
}
#: Fields that give an engine lower KV tiers.
_TIERS = ("native_host_offload", "kvbm_tiers")
_INT64_MAX = 2**63 - 1


# ---------------------------------------------------------------- what is swept


@dataclasses.dataclass(frozen=True, slots=True)
class RandomParameter:
    """Values drawn at random; a function of its fields and of the parameter's name.

    Parameters
    ----------
    low, high : float
        Bounds, finite, ``low <= high``. Integers include both.
    log : bool
        Uniform in the logarithm; needs ``low > 0``.
    integer : bool
        Whole numbers; the bounds must be whole too.
    samples : int
        How many values, at least 1. The random parameters of a grid are drawn
        together, sample by sample, so all must have the same number.
    seed : int
        >= 0.

    Raises
    ------
    ConfigError
        Naming the field.
    """

    low: float
    high: float
    log: bool = False
    integer: bool = False
    samples: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(name, f"must be a finite number, got {value!r}")
            if self.integer and value != int(value):
                raise ConfigError(name, f"must be a whole number with integer=True, got {value!r}")
        if self.high < self.low:
            raise ConfigError("high", f"must be >= low ({self.low}), got {self.high}")
        if self.log and self.low <= 0:
            raise ConfigError("low", f"must be > 0 with log=True, got {self.low}")
        for name, least in (("samples", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(name, f"must be an int >= {least}, got {value!r}")

    def values(self, name: str) -> list[float] | list[int]:
        """The values of the parameter `name`: `samples` ints or floats."""
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        low, high = float(self.low), float(self.high)
        share = rng.random(self.samples)
        top = high + 1 if self.integer else high
        if self.log:
            drawn = np.exp(math.log(low) + share * (math.log(top) - math.log(low)))
        else:
            drawn = low + share * (top - low)
        if self.integer:
            whole: list[int] = np.clip(np.floor(drawn), low, high).astype(np.int64).tolist()
            return whole
        real: list[float] = np.clip(drawn, low, high).tolist()
        return real


def _plain(name: str, value: Any) -> Any:
    """Value of a parameter as JSON holds it; the same value whatever type it came in."""
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(name, inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(name, f"expected a plain value (number, text, mapping, None), got {value!r}")


def _check_name(name: Any) -> None:
    """Whether `name` is something that can be swept."""
    if not isinstance(name, str):
        raise ConfigError("grid", f"expected the name of a parameter, got {name!r}")
    head, _, rest = name.partition(".")
    if head == "replay":
        if rest not in REPLAY_PARAMETERS:
            allowed = ", ".join(f"replay.{option}" for option in REPLAY_PARAMETERS)
            raise ConfigError(name, f"unknown parameter; of a replay there are {allowed}")
        return
    if head not in EngineConfig.__struct_fields__:
        raise ConfigError(name, "unknown parameter; expected a field of EngineConfig, or replay.NAME")
    if not rest and not name.endswith("."):
        return
    if head not in _GROUPS:
        raise ConfigError(name, f"unknown parameter; {head} has no fields of its own")
    field, _, inner = rest.partition(".")
    if field not in _GROUPS[head] or (inner and field != "config") or name.endswith("."):
        raise ConfigError(name, f"unknown parameter; {head} has the fields {', '.join(sorted(_GROUPS[head]))}")


class _Plan(NamedTuple):
    """Parameters of a sweep, and their values at every point."""

    names: tuple[str, ...]
    points: list[tuple[Any, ...]]


def _plan(grid: Any, points: Any) -> _Plan:
    """Points of a grid: axes in the order given, the last one fastest."""
    if not isinstance(grid, Mapping):
        raise ConfigError("grid", f"expected a mapping of parameters to values, got {grid!r}")
    axes: list[tuple[tuple[str, ...], list[tuple[Any, ...]]]] = []
    if points is not None:
        axes.append(_given_points(points))
    drawn: dict[str, RandomParameter] = {}
    for key, values in grid.items():
        names = key if isinstance(key, tuple) else (key,)
        for name in names:
            _check_name(name)
        label = ",".join(names)
        if not names:
            raise ConfigError("grid", "linked parameters need at least one name, got ()")
        if isinstance(values, RandomParameter):
            if isinstance(key, tuple):
                raise ConfigError(label, "linked parameters need a list of tuples, not a RandomParameter")
            drawn[key] = values
            continue
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise ConfigError(label, f"expected a list of values, got {values!r}")
        rows = list(values)
        if not rows:
            raise ConfigError(label, "has no values, at least one is needed")
        if isinstance(key, tuple):
            for row in rows:
                if not isinstance(row, (list, tuple)) or len(row) != len(names):
                    raise ConfigError(label, f"expected tuples of {len(names)} values, got {row!r}")
        else:
            rows = [(value,) for value in rows]
        axes.append((names, [_plain_row(names, row) for row in rows]))
    if drawn:
        counts = {parameter.samples for parameter in drawn.values()}
        if len(counts) > 1:
            raise ConfigError(
                next(iter(drawn)),
                f"random parameters are drawn together and need equal samples, got {sorted(counts)}",
            )
        columns = [parameter.values(name) for name, parameter in drawn.items()]
        axes.append((tuple(drawn), list(zip(*columns, strict=True))))
    names = tuple(itertools.chain.from_iterable(names for names, _ in axes))
    _check_distinct(names)
    rows = [tuple(itertools.chain.from_iterable(parts)) for parts in itertools.product(*(rows for _, rows in axes))]
    return _Plan(names, rows)


def _plain_row(names: Sequence[str], row: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(_plain(name, value) for name, value in zip(names, row, strict=True))


def _given_points(points: Any) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Points that the caller spelled out, as one axis."""
    if isinstance(points, (str, bytes, Mapping)) or not isinstance(points, Iterable):
        raise ConfigError("points", f"expected a list of mappings, got {points!r}")
    given = list(points)
    for row in given:
        if not isinstance(row, Mapping):
            raise ConfigError("points", f"expected a list of mappings, got {row!r} in it")
    if not given:
        raise ConfigError("points", "is empty, at least one point is needed")
    names = tuple(given[0])
    for name in names:
        _check_name(name)
    for number, row in enumerate(given):
        if set(row) != set(names):
            odd = sorted(set(row) ^ set(names), key=str)[0]
            raise ConfigError("points", f"all points need the same parameters; point {number} differs in {odd!r}")
    return names, [_plain_row(names, [row[name] for name in names]) for row in given]


def _check_distinct(names: tuple[str, ...]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(name, "is given more than once")
        for other in names:
            if name.startswith(other + "."):
                raise ConfigError(name, f"is part of {other}, which is a parameter too")


# ---------------------------------------------------------------- one run


class _Outcome(NamedTuple):
    """What a run came to: the numbers of its summary, or why there are none."""

    values: dict[str, float | int | None] | None
    error: str | None


class _Task(NamedTuple):
    """One run: its place in the table, its parameters, its seed."""

    row: int
    values: tuple[Any, ...]
    seed: int


class _Stopped(BaseException):
    """The sweep was given up while this run was on its way."""


class _Watch:
    """Progress callback of a run that gives it up once `stop` is set.

    Asked at every event of some runs, so it looks at most every tenth of a
    second: an event between processes costs a system call.
    """

    def __init__(self, stop: threading.Event | multiprocessing.synchronize.Event) -> None:
        self._stop = stop
        self._due = 0.0

    def __call__(self, _: int, __: int) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + 0.1
            self.look()

    def look(self) -> None:
        """Raise `_Stopped` if the sweep was given up."""
        if self._stop.is_set():
            raise _Stopped


@dataclasses.dataclass(frozen=True, slots=True)
class _Context:
    """What all runs share; read only."""

    workload: Workload
    base: dict[str, Any]
    names: tuple[str, ...]
    options: dict[str, Any]

    def resolve(self, values: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Plain configuration and options of a point."""
        options = dict(self.options)
        fields = {}
        for name, value in zip(self.names, values, strict=True):
            if name.startswith("replay."):
                options[name.removeprefix("replay.")] = value
            else:
                fields[name] = value
        return apply_overrides(self.base, fields), options

    def run(self, task: _Task, watch: _Watch | None = None) -> tuple[int, _Outcome]:
        """Execute a run; whatever it raises becomes its outcome."""
        if watch is not None:
            watch.look()
        try:
            fields, options = self.resolve(task.values)
            result = replay(self.workload, parse_config(fields), seed=task.seed, progress=watch, **options)
        except KvsimError as error:
            return task.row, _Outcome(None, " ".join(str(error).split()) or type(error).__name__)
        except Exception as error:
            return task.row, _Outcome(None, " ".join(f"{type(error).__name__}: {error}".split()))
        return task.row, _Outcome(_numbers(result.summary), None)


def _numbers(summary: Mapping[str, Any]) -> dict[str, float | int | None]:
    """The entries of a summary that are numbers; None is the statistic of an empty sample."""
    return {name: value for name, value in summary.items() if not isinstance(value, (bool, str))}


# ---------------------------------------------------------------- where runs execute

#: Finished runs, in the order in which they end.
_Finished: TypeAlias = Generator[tuple[int, _Outcome], None, None]

# The shared part of a worker process, set once by its initializer: a task then is a few hundred bytes.
_adopted: list[tuple[_Context, _Watch]] = []


def _adopt(blob: bytes, stop: multiprocessing.synchronize.Event) -> None:
    # Ctrl-C reaches every process of the terminal; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _adopted[:] = [(pickle.loads(blob), _Watch(stop))]


def _run_adopted(task: _Task) -> tuple[int, _Outcome]:
    context, watch = _adopted[0]
    return context.run(task, watch)


class _Parcel:
    """A pickled context for executors of which only `submit` is known; unpacked once per process."""

    __slots__ = ("blob", "key")

    def __init__(self, blob: bytes) -> None:
        self.blob = blob
        self.key = hashlib.blake2b(blob, digest_size=16).digest()

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Parcel) and other.key == self.key


@lru_cache(maxsize=1)
def _unpacked(parcel: _Parcel) -> _Context:
    context: _Context = pickle.loads(parcel.blob)
    return context


def _run_parcel(parcel: _Parcel, task: _Task) -> tuple[int, _Outcome]:
    return _unpacked(parcel).run(task)


def _run_shared(context: _Context, task: _Task) -> tuple[int, _Outcome]:
    return context.run(task)


def _pickled(context: _Context, executor: str) -> bytes:
    try:
        return pickle.dumps(context, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError("executor", f"{executor} needs options that can be pickled: {error}") from None


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def _in_pool(submit: Callable[[_Task], Future[tuple[int, _Outcome]]], tasks: Iterable[_Task], window: int) -> _Finished:
    """Results of a futures executor; at most `window` runs are handed out, however many there are."""
    pending: set[Future[tuple[int, _Outcome]]] = set()
    try:
        for task in tasks:
            pending.add(submit(task))
            if len(pending) >= window:
                done, pending = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
                yield from (future.result() for future in done)
        for future in concurrent.futures.as_completed(tuple(pending)):
            yield future.result()
    except concurrent.futures.BrokenExecutor as error:
        raise KvsimError(f"a worker of the executor died, the sweep cannot go on: {error}") from error
    finally:
        for future in pending:
            future.cancel()


def _in_threads(context: _Context, tasks: Iterable[_Task], workers: int) -> _Finished:
    """Threads of this process; kernels run outside the interpreter lock."""
    stop = threading.Event()
    pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="kvsim-sweep")
    try:
        yield from _in_pool(lambda task: pool.submit(context.run, task, _Watch(stop)), tasks, 2 * workers)
    finally:
        # Reached early on an interrupt: runs on their way give up at their next look at `stop`.
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _in_processes(context: _Context, tasks: Iterable[_Task], workers: int) -> _Finished:
    """Processes started afresh: forking would copy whatever threads and locks the caller has."""
    blob = _pickled(context, "processes")
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    pool = concurrent.futures.ProcessPoolExecutor(workers, spawn, initializer=_adopt, initargs=(blob, stop))
    try:
        yield from _in_pool(lambda task: pool.submit(_run_adopted, task), tasks, 2 * workers)
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _in_executor(context: _Context, tasks: Iterable[_Task], pool: Executor, workers: int | None) -> _Finished:
    """The caller's executor, which stays open."""
    window = workers or 2 * (getattr(pool, "_max_workers", None) or _cpus())
    if isinstance(pool, concurrent.futures.ThreadPoolExecutor):
        return _in_pool(lambda task: pool.submit(context.run, task), tasks, window)
    parcel = _Parcel(_pickled(context, type(pool).__name__))
    return _in_pool(lambda task: pool.submit(_run_parcel, parcel, task), tasks, window)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("executor", "'ray' needs the extra: pip install 'kvsim[ray]'") from None
    return ray


def _in_ray(context: _Context, tasks: Iterable[_Task], workers: int | None) -> _Finished:
    """Tasks of Ray; the context goes into the object store once, and its arrays are read there in place."""
    ray = _import_ray()
    started = not ray.is_initialized()
    if started:
        # Of a cluster that the environment names, the size is not ours to say.
        local = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": workers, "include_dashboard": False}
        ray.init(log_to_driver=False, **local)
    pending: list[Any] = []
    try:
        shared = ray.put(context)
        window = workers if workers is not None else 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        remote = ray.remote(num_cpus=1)(_run_shared)
        for task in tasks:
            pending.append(remote.remote(shared, task))
            if len(pending) >= window:
                done, pending = ray.wait(pending)
                yield from ray.get(done)
        while pending:
            done, pending = ray.wait(pending)
            yield from ray.get(done)
    except ray.exceptions.RayError as error:
        raise KvsimError(f"Ray cannot go on with the sweep: {error}") from error
    finally:
        for reference in pending:
            ray.cancel(reference)
        if started:
            ray.shutdown()


def _nothing() -> _Finished:
    yield from ()


def _execute(context: _Context, tasks: Sequence[_Task], executor: Any, max_workers: int | None) -> _Finished:
    """Outcomes of all tasks, each as it comes."""
    if not tasks:
        return _nothing()
    if executor == "threads":
        return _in_threads(context, tasks, max_workers or _cpus())
    if executor == "processes":
        return _in_processes(context, tasks, max_workers or _cpus())
    if executor == "ray":
        return _in_ray(context, tasks, max_workers)
    return _in_executor(context, tasks, executor, max_workers)


# ---------------------------------------------------------------- resuming


def _digest(*parts: Any) -> str:
    encoded = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(encoded.encode(), digest_size=16).hexdigest()


def _workload_digest(workload: Workload) -> str:
    """Digest of all of a workload that a run can see."""
    state = hashlib.blake2b(digest_size=16)
    arrays: list[npt.NDArray[Any]] = [
        *(array[name] for array in (workload.specs, workload.segments) for name in array.dtype.names or ()),
        *(workload.tokens, workload.planned, workload.delay_ms, workload.first_turn),
    ]
    if workload.prefill_dp_ranks is not None:
        arrays.append(workload.prefill_dp_ranks)
    for array in arrays:
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).tobytes())
    state.update(f"{workload.cumulative}{workload.rebase_arrivals}".encode())
    return state.hexdigest()


def _option_identity(name: str, value: Any) -> Any:
    """Something that is equal for equal options and goes into a digest."""
    if isinstance(value, Sla):
        return dataclasses.asdict(value)
    try:
        return _plain(name, value)
    except ConfigError:
        pass
    try:
        return hashlib.blake2b(pickle.dumps(value, protocol=5), digest_size=16).hexdigest()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError("resume", f"needs options that can be pickled, {name} cannot: {error}") from None


class _Journal:
    """File of finished runs: one JSON line each, appended as they end.

    Parameters
    ----------
    path : Path
    workload : str
        Digest of the workload.
    runs : dict of str to list of int
        Digest of a run -> its rows of the table.
    columns : collection of str
        What a successful run has a value of.

    Attributes
    ----------
    finished : dict of int to _Outcome
        By row. Runs that failed are not finished: they are tried again.
    """

    def __init__(self, path: Path, workload: str, runs: Mapping[str, list[int]], columns: Collection[str]) -> None:
        self.path = path
        self._columns = frozenset(columns)
        self.workload = workload
        self.finished: dict[int, _Outcome] = {}
        self._digest_of = {row: digest for digest, rows in runs.items() for row in rows}
        self._file: IO[bytes] | None = None
        try:
            kept = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise ConfigError("resume", f"{path} cannot be read: {error.strerror or error}") from None
        # A line that has no end was being written when the sweep was stopped.
        self._length = kept.rfind(b"\n") + 1
        for number, line in enumerate(kept[: self._length].splitlines(), 1):
            self._read(number, line, runs)
        torn, head = kept[self._length :], b'{"kvsim":"'
        if torn[: len(head)] != head[: len(torn)]:
            lines = kept.count(b"\n")
            raise ConfigError("resume", f"{path}:{lines + 1}: not a line of a sweep")

    def _read(self, number: int, line: bytes, runs: Mapping[str, list[int]]) -> None:
        from kvsim import __version__

        where = f"{self.path}:{number}"
        try:
            entry = json.loads(line)
            version, workload, digest = entry["kvsim"], entry["workload"], entry["run"]
            outcome = _Outcome(entry["values"], entry["error"])
        except (ValueError, TypeError, KeyError):
            raise ConfigError("resume", f"{where}: not a line of a sweep") from None
        if version != __version__:
            raise ConfigError("resume", f"{where}: written by kvsim {version}, this is {__version__}; use another file")
        if workload != self.workload:
            raise ConfigError("resume", f"{where}: belongs to a sweep of another workload; use another file")
        if digest not in runs:
            raise ConfigError(
                "resume",
                f"{where}: is a run that is not part of this sweep (another grid, base, option or seed); "
                "use another file",
            )
        if outcome.error is None:
            if not isinstance(outcome.values, dict) or set(outcome.values) != self._columns:
                raise ConfigError("resume", f"{where}: not a line of a sweep")
            for row in runs[digest]:
                self.finished[row] = outcome

    def __enter__(self) -> _Journal:
        try:
            self._file = self.path.open("r+b" if self.path.exists() else "xb")
        except OSError as error:
            raise ConfigError("resume", f"{self.path} cannot be written: {error.strerror or error}") from None
        self._file.truncate(self._length)
        self._file.seek(self._length)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, row: int, parameters: Mapping[str, Any], outcome: _Outcome) -> None:
        """Append a finished run; it is in the hands of the system when this returns."""
        from kvsim import __version__

        assert self._file is not None
        entry = {
            "kvsim": __version__,
            "workload": self.workload,
            "run": self._digest_of[row],
            "parameters": parameters,
            "values": outcome.values,
            "error": outcome.error,
        }
        self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        self._file.flush()


# ---------------------------------------------------------------- the result


class SweepResult:
    """Table of a sweep: a row per run, points in grid order, then seeds, then repeats.

    Attributes
    ----------
    table : struct array, shape (n_runs,), read-only
        Columns: ``point``, ``seed``, ``repeat`` (int64); every parameter by its
        dotted name; every number of the summary (float64, nan where there is
        none); ``status`` ("ok" or "error"); ``error`` (text, empty if ok).
        A parameter is bool, int64, float64 (None is nan) or text, after its
        values; mixed or nested values are JSON text.
    parameters : tuple of str
        Names of the swept parameters.
    metrics : tuple of str
        Names of the summary columns.
    """

    __slots__ = ("_counts", "metrics", "parameters", "table")

    def __init__(
        self, table: npt.NDArray[Any], parameters: tuple[str, ...], metrics: tuple[str, ...], counts: frozenset[str]
    ) -> None:
        table.flags.writeable = False
        self.table = table
        self.parameters = parameters
        self.metrics = metrics
        self._counts = counts

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        """One column of the table, read-only."""
        if column not in self.columns:
            raise KeyError(f"{column!r} is not a column; there are {', '.join(self.columns)}")
        return self.table[column]

    def __repr__(self) -> str:
        failed = self.num_errors
        return f"<SweepResult: {len(self)} runs, {failed} failed, parameters {', '.join(self.parameters) or 'none'}>"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, in order."""
        return self.table.dtype.names or ()

    @property
    def num_errors(self) -> int:
        """Runs that failed."""
        return int(np.count_nonzero(self.table["status"] == "error"))

    def best(self, metric: str, *, highest: bool = False, where: npt.NDArray[np.bool_] | None = None) -> np.void:
        """Row with the best value of a metric; the first of equal ones.

        Parameters
        ----------
        metric : str
            A name of `metrics`.
        highest : bool
            Look for the highest value; else for the lowest.
        where : ndarray of bool, shape (n_runs,), optional
            Rows that count, for example those that keep a bound on another metric.

        Raises
        ------
        ConfigError
            The metric is not in the table.
        ValueError
            No row counts: all failed, have no value, or are left out by `where`.
        """
        if metric not in self.metrics:
            raise ConfigError("metric", f"must be one of {', '.join(self.metrics)}, got {metric!r}")
        values = self.table[metric]
        counts = ~np.isnan(values)
        if where is not None:
            counts = counts & np.asarray(where, np.bool_)
        rows = np.flatnonzero(counts)
        if not len(rows):
            raise ValueError(f"no row has a value of {metric} and counts")
        chosen = values[rows]
        row: np.void = self.table[rows[chosen.argmax() if highest else chosen.argmin()]]
        return row

    def to_dicts(self) -> list[dict[str, Any]]:
        """Rows as plain mappings: numbers, text, and None for what is missing."""
        columns = []
        for name in self.columns:
            values = self.table[name].tolist()
            if self.table.dtype[name].kind == "f":
                whole = name in self._counts
                values = [None if value != value else int(value) if whole else value for value in values]
            columns.append(values)
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*columns, strict=True)]

    def to_json(self, indent: int | None = 2) -> str:
        """Rows as a JSON list, a newline at the end."""
        return json.dumps(self.to_dicts(), indent=indent, allow_nan=False) + "\n"

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Rows as CSV with a header; missing values are empty, lines end in a newline.

        Parameters
        ----------
        path : path, optional
            Also written there.
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.to_dicts():
            writer.writerow(["" if value is None else value for value in row.values()])
        text = out.getvalue()
        if path is not None:
            Path(path).write_text(text, encoding="utf-8", newline="")
        return text

    def to_arrow(self) -> Any:
        """Table of pyarrow (extra ``arrow``): counts are int64, what is missing is null.

        Raises
        ------
        KvsimError
            pyarrow is not installed.
        """
        try:
            import pyarrow
        except ImportError:
            raise KvsimError("to_arrow needs the extra: pip install 'kvsim[arrow]'") from None
        arrays = {}
        for name in self.columns:
            column = self.table[name]
            kind: Any = {"b": pyarrow.bool_(), "i": pyarrow.int64(), "U": pyarrow.string()}.get(column.dtype.kind)
            if column.dtype.kind == "f":
                kind = pyarrow.int64() if name in self._counts else pyarrow.float64()
            values = column.tolist()
            if column.dtype.kind == "f":
                values = [None if value != value else value for value in values]
            arrays[name] = pyarrow.array(values, kind)
        return pyarrow.table(arrays)


def _summary_columns(sla: Any, fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, bool]:
    """Numbers of a summary -> whether each is a count: those of an empty run, so no run is needed to know."""
    tiers = any(name.partition(".")[0] in _TIERS for name in [*names, *(key for key in fields if fields[key])])
    totals = RunTotals(transfers=TransferTotals() if tiers else None)
    empty = summarize(np.zeros(0, REQUEST_RECORD), GapHistogram(), totals, sla)
    return {name: isinstance(value, int) for name, value in _numbers(empty).items()}


def _parameter_column(values: Sequence[Any]) -> tuple[str, list[Any]]:
    """Format of a parameter's column, and its values in it."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return "?", list(values)
    if kinds <= {int} and all(abs(value) <= _INT64_MAX for value in values):
        return "<i8", list(values)
    numeric = kinds <= {int, float, type(None)} and kinds != {type(None)}
    if numeric and all(abs(value) <= 2**53 for value in values if type(value) is int):
        return "<f8", [math.nan if value is None else value for value in values]
    texts = list(values) if kinds == {str} else [json.dumps(value, sort_keys=True) for value in values]
    return f"<U{max(1, *map(len, texts))}", texts


def _build(
    plan: _Plan, seeds: Sequence[int], repeats: int, outcomes: list[_Outcome], chosen: dict[str, bool]
) -> SweepResult:
    """The table; its bytes depend on the runs alone."""
    runs = len(seeds) * repeats
    texts = [outcome.error or "" for outcome in outcomes]
    parameters = {name: _parameter_column([point[k] for point in plan.points]) for k, name in enumerate(plan.names)}
    dtype = np.dtype(
        [
            *((name, "<i8") for name in ("point", "seed", "repeat")),
            *((name, form) for name, (form, _) in parameters.items()),
            *((name, "<f8") for name in chosen),
            ("status", "<U5"),
            ("error", f"<U{max((len(text) for text in texts), default=0) or 1}"),
        ]
    )
    table = np.zeros(len(outcomes), dtype)
    table["point"] = np.repeat(np.arange(len(plan.points)), runs)
    table["seed"] = np.tile(np.repeat(np.array(seeds, np.int64), repeats), len(plan.points))
    table["repeat"] = np.tile(np.arange(repeats), len(plan.points) * len(seeds))
    for name, (form, values) in parameters.items():
        table[name] = np.repeat(np.array(values, form), runs)
    for name in chosen:
        # Runs without lower tiers have no entries about them.
        table[name] = [
            math.nan if outcome.values is None or (value := outcome.values.get(name)) is None else value
            for outcome in outcomes
        ]
    table["status"] = ["ok" if outcome.error is None else "error" for outcome in outcomes]
    table["error"] = texts
    counts = frozenset(name for name, whole in chosen.items() if whole)
    return SweepResult(table, plan.names, tuple(chosen), counts)


# ---------------------------------------------------------------- the function


def sweep(
    workload: WorkloadLike,
    grid: Grid,
    *,
    points: Iterable[Mapping[str, Any]] | None = None,
    base: EngineConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    replay_options: Mapping[str, Any] | None = None,
    seeds: Iterable[int] = (0,),
    repeats: int = 1,
    executor: str | Executor = "threads",
    max_workers: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    metrics: Iterable[str] | None = None,
) -> SweepResult:
    """Replay one workload under many configurations.

    Parameters
    ----------
    workload : path, Workload or iterable of mappings
        As for `kvsim.replay`. Loaded once.
    grid : mapping
        Parameter -> list of values; every combination is a point, the last
        parameter changing fastest. A parameter is the dotted path of a field of
        `EngineConfig`, or ``replay.`` and one of workers, concurrency, speedup,
        dp_size, max_sim_time_ms. A tuple of parameters -> list of tuples: their
        values go together. A `RandomParameter` -> its samples; several are
        drawn together.
    points : list of mappings, optional
        Points spelled out, all with the same parameters; combined with the grid.
    base : EngineConfig, mapping, or path of a YAML or JSON file, optional
        What the parameters are set in; must be valid by itself. A mapping
        leaves unset what it does not name (`block_size` then is the backend's).
    replay_options : mapping, optional
        Options of `kvsim.replay` for all runs: those above, and sla, timing,
        tokenization, policy, trace_format, trace_block_size, strict.
    seeds : list of int
        Each point is run with each.
    repeats : int
        Runs of equal point and seed, at least 1. They differ only if a timing
        model or a policy of yours does.
    executor : {"threads", "processes", "ray"} or concurrent.futures.Executor
        Threads share the workload. Processes (spawned, so scripts need the
        usual ``if __name__ == "__main__"``) get it once each; Ray (extra
        ``ray``; a running connection is used, else a local cluster is started)
        once per machine; another executor with each run, unless it is a
        ThreadPoolExecutor. An executor you pass stays open.
    max_workers : int, optional
        Runs at a time; by default one per CPU.
    resume : path, optional
        File to which every finished run is appended. A later call with the same
        file does only what is missing or failed; more values, points or seeds
        may have been added.
    progress : callable, optional
        Called with (runs done, runs in all) after each.
    metrics : list of str, optional
        Numbers of the summary to keep in the table; all by default.

    Returns
    -------
    SweepResult
        The same bytes for every executor. A run that failed is a row with
        status "error" and the message.

    Raises
    ------
    ConfigError
        A parameter is unknown or given twice, an argument is not allowed, or
        the resume file belongs to another workload or grid.
    WorkloadError
        The workload cannot be read.
    KvsimError
        A worker process died.
    KeyboardInterrupt
        Interrupted; what is in the resume file stays there.
    """
    plan = _plan(grid, points)
    seeds = _checked_seeds(seeds)
    for name, number in (("repeats", repeats), ("max_workers", max_workers)):
        optional = name == "max_workers" and number is None
        if not optional and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ConfigError(name, f"must be an int >= 1, got {number!r}")
    if not isinstance(executor, Executor) and executor not in ("threads", "processes", "ray"):
        raise ConfigError("executor", f"must be threads, processes, ray or an Executor, got {executor!r}")
    if progress is not None and not callable(progress):
        raise ConfigError("progress", f"must be callable, got {progress!r}")
    options = _checked_options(replay_options)
    fields = _base_fields(base)
    columns = _summary_columns(options.get("sla"), fields, plan.names)
    chosen = columns if metrics is None else _chosen(metrics, columns)
    if executor == "ray":
        _import_ray()

    loading = {name: options.pop(name) for name in _LOADING if name in options}
    context = _Context(_loaded(workload, loading), fields, plan.names, options)
    runs = len(seeds) * repeats
    tasks = [
        _Task(row, plan.points[row // runs], seeds[row % runs // repeats]) for row in range(len(plan.points) * runs)
    ]
    outcomes: dict[int, _Outcome] = {}

    def take(finished: _Finished, journal: _Journal | None) -> None:
        if progress is not None and outcomes:
            progress(len(outcomes), len(tasks))
        # Closed at once when something is raised here, not when the traceback is forgotten.
        with contextlib.closing(finished):
            for row, outcome in finished:
                outcomes[row] = outcome
                if journal is not None:
                    parameters = dict(zip(plan.names, tasks[row].values, strict=True))
                    journal.add(row, {**parameters, "seed": tasks[row].seed}, outcome)
                if progress is not None:
                    progress(len(outcomes), len(tasks))

    if resume is None:
        take(_execute(context, tasks, executor, max_workers), None)
    else:
        digests = _run_digests(context, tasks, repeats)
        journal = _Journal(Path(resume), _workload_digest(context.workload), digests, columns)
        outcomes.update(journal.finished)
        missing = [task for task in tasks if task.row not in outcomes]
        with journal:
            take(_execute(context, missing, executor, max_workers), journal)
    return _build(plan, seeds, repeats, [outcomes[row] for row in range(len(tasks))], chosen)


def _run_digests(context: _Context, tasks: Sequence[_Task], repeats: int) -> dict[str, list[int]]:
    """Rows of each distinct run: configuration, options, seed and repeat."""
    shared = {name: _option_identity(name, value) for name, value in context.options.items()}
    runs: dict[str, list[int]] = {}
    for task in tasks:
        fields, options = context.resolve(task.values)
        options = {
            name: shared[name] if value is context.options.get(name) else value for name, value in options.items()
        }
        digest = _digest(fields, options, task.seed, task.row % repeats)
        runs.setdefault(digest, []).append(task.row)
    return runs


def _checked_seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, (str, bytes)) or not isinstance(seeds, Iterable):
        raise ConfigError("seeds", f"expected a list of ints, got {seeds!r}")
    result = [seed.item() if isinstance(seed, np.integer) else seed for seed in seeds]
    if not result:
        raise ConfigError("seeds", "is empty, at least one seed is needed")
    for seed in result:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _INT64_MAX:
            raise ConfigError("seeds", f"must be ints in 0 <= seed < 2**63, got {seed!r}")
    if len(set(result)) != len(result):
        raise ConfigError("seeds", f"must differ, got {result}; use repeats to run a seed again")
    return result


def _checked_options(replay_options: Any) -> dict[str, Any]:
    if replay_options is None:
        return {}
    if not isinstance(replay_options, Mapping):
        raise ConfigError("replay_options", f"expected a mapping, got {replay_options!r}")
    for name in replay_options:
        if name not in _REPLAY_OPTIONS:
            hint = "; use seeds" if name == "seed" else ""
            raise ConfigError(f"replay_options.{name}", f"must be one of {', '.join(_REPLAY_OPTIONS)}{hint}")
    sla = replay_options.get("sla")
    if sla is not None and not isinstance(sla, Sla):
        raise ConfigError("replay_options.sla", f"expected None or a Sla, got {sla!r}")
    return dict(replay_options)


def _base_fields(base: Any) -> dict[str, Any]:
    if base is None:
        return {}
    if isinstance(base, (str, os.PathLike)):
        base = load_config(Path(base))
    if isinstance(base, EngineConfig):
        return base.to_dict()
    if not isinstance(base, Mapping):
        raise ConfigError("base", f"expected an EngineConfig, a mapping or a path, got {base!r}")
    fields: dict[str, Any] = _plain("base", base)
    parse_config(fields)
    return fields


def _chosen(metrics: Any, columns: Mapping[str, bool]) -> dict[str, bool]:
    if isinstance(metrics, (str, bytes)) or not isinstance(metrics, Iterable):
        raise ConfigError("metrics", f"expected a list of names, got {metrics!r}")
    chosen = {}
    for name in metrics:
        if name not in columns:
            raise ConfigError("metrics", f"must be among {', '.join(columns)}, got {name!r}")
        chosen[name] = columns[name]
    return chosen


def _loaded(workload: Any, loading: Mapping[str, Any]) -> Workload:
    if isinstance(workload, Workload):
        return workload
    if isinstance(workload, (str, os.PathLike)):
        return load_workload(
            workload,
            format=loading.get("trace_format", "mooncake"),
            block_size=loading.get("trace_block_size", 512),
            strict=loading.get("strict", False),
        )
    if not isinstance(workload, Iterable):
        raise WorkloadError(f"expected a path, a Workload or an iterable of requests, got {workload!r}")
    return workload_from_requests(workload)
