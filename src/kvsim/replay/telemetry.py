"""Samples of a running system at a fixed interval of virtual time (spec/replay.md section 8).

Telemetry only reads. It wakes no engine and lengthens no run; with the same
input a run gives the same result with and without it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from kvsim.errors import ConfigError
from kvsim.layout import Pool
from kvsim.replay.pool import WorkerPool
from kvsim.replay.traffic import Traffic, TrafficWindow

__all__ = ["PoolCounters", "RankGauges", "Telemetry", "TelemetryOptions", "TelemetryView"]

_ROLES = ((Pool.PREFILL, "prefill"), (Pool.DECODE, "decode"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """How often to sample, and where the samples go.

    Parameters
    ----------
    sample_interval_ms : float
        Virtual time between samples; finite, > 0.
    capture_in_memory : bool, optional
        Keep the samples in the result. By default if there is no other sink.
    callback : callable, optional
        Called with each sample, a dict of its own.
    jsonl_path : path, optional
        File that gets each sample as one line of JSON; replaced if it exists.

    Raises
    ------
    ConfigError
        Naming the field; also if there is no sink at all.

    Notes
    -----
    A sink that raises is given up, which the result says and a warning after the
    run; the run and the other sinks are as without it.
    """

    sample_interval_ms: float = 1000.0
    capture_in_memory: bool | None = None
    callback: Callable[[dict[str, Any]], object] | None = None
    jsonl_path: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        value = self.sample_interval_ms
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError("telemetry.sample_interval_ms", f"must be finite and > 0, got {value!r}")
        if self.capture_in_memory is not None and not isinstance(self.capture_in_memory, bool):
            raise ConfigError(
                "telemetry.capture_in_memory", f"expected None, true or false, got {self.capture_in_memory!r}"
            )
        if self.callback is not None and not callable(self.callback):
            raise ConfigError("telemetry.callback", f"must be callable, got {self.callback!r}")
        if self.jsonl_path is not None and not isinstance(self.jsonl_path, (str, os.PathLike)):
            raise ConfigError("telemetry.jsonl_path", f"expected a path, got {self.jsonl_path!r}")
        if self.capture_in_memory is False and self.callback is None and self.jsonl_path is None:
            raise ConfigError("telemetry.capture_in_memory", "must not be false without callback and jsonl_path")

    @property
    def in_memory(self) -> bool:
        """Whether the result keeps the samples."""
        if self.capture_in_memory is None:
            return self.callback is None and self.jsonl_path is None
        return self.capture_in_memory


class RankGauges(NamedTuple):
    """One rank as its last command or completed pass left it. A starting worker shows zeros but for `total_blocks`."""

    worker: int
    dp_rank: int
    active_blocks: int
    inactive_blocks: int
    total_blocks: int
    running_requests: int
    waiting_requests: int


class PoolCounters(NamedTuple):
    """What the completed passes of a pool have counted since the start of the run."""

    cache_hit_tokens: int = 0
    cache_total_tokens: int = 0
    preemptions: int = 0


class TelemetryView(Protocol):
    """What a sample reads of the run."""

    def worker_pool(self, role: Pool) -> WorkerPool | None:
        """Workers of `Pool.PREFILL` (None in an aggregated run), and of `Pool.DECODE` or all."""
        ...

    def gauges(self, role: Pool) -> Iterable[RankGauges]:
        """Every rank of every live worker, by (worker, rank)."""
        ...

    def counters(self, role: Pool) -> PoolCounters:
        """Counters of a pool, removed workers included."""
        ...

    def pending_requests(self, role: Pool) -> int:
        """Requests in the queue of the pool's placement."""
        ...


class Telemetry:
    """Takes the samples of a run.

    Parameters
    ----------
    options : TelemetryOptions

    Attributes
    ----------
    traffic : TrafficWindow
        The run reports arrivals, placements and ends to it.
    samples : list of dict
        Those kept in memory.
    sink_errors : list of str
        Why sinks were given up.

    Raises
    ------
    ConfigError
        If the file of `jsonl_path` cannot be opened.

    Notes
    -----
    The run calls `baseline` once time 0 is settled; `advance` before its clock
    jumps, with the time of its next event; `settle` at the end of each
    instant; `finish` at its last event; and `close` whatever happens.
    """

    __slots__ = (
        "_callback_failed",
        "_counted",
        "_file",
        "_last_ms",
        "_ordinal",
        "_tick",
        "_warned",
        "options",
        "samples",
        "sink_errors",
        "traffic",
    )

    def __init__(self, options: TelemetryOptions) -> None:
        self.options = options
        self.traffic = TrafficWindow()
        self.samples: list[dict[str, Any]] = []
        self.sink_errors: list[str] = []
        self._ordinal = 0
        self._tick = 1
        self._last_ms = 0.0
        self._counted = {role: PoolCounters() for role, _ in _ROLES}
        self._callback_failed = False
        self._warned = 0
        self._file: IO[str] | None = None
        if options.jsonl_path is not None:
            try:
                self._file = Path(options.jsonl_path).open("w", encoding="utf-8", newline="\n")  # noqa: SIM115
            except OSError as error:
                raise ConfigError(
                    "telemetry.jsonl_path", f"{options.jsonl_path} cannot be written: {error.strerror or error}"
                ) from error

    @property
    def next_sample_ms(self) -> float:
        """When the next periodic sample is due."""
        # A multiple, not a sum: a long run does not drift.
        return self._tick * self.options.sample_interval_ms

    def baseline(self, now_ms: float, view: TelemetryView) -> None:
        """Take the first sample: gauges only, whatever arrived at 0 belongs to the next window."""
        self._take("baseline", now_ms, view)

    def advance(self, until_ms: float, view: TelemetryView) -> None:
        """Take the samples before `until_ms`, the time of the next event: the system stays as it is until then."""
        while self.next_sample_ms < until_ms:
            self._periodic(view)

    def settle(self, now_ms: float, view: TelemetryView) -> None:
        """Take the samples up to `now_ms`, once everything at this instant is done."""
        while self.next_sample_ms <= now_ms:
            self._periodic(view)

    def finish(self, end_ms: float, view: TelemetryView) -> None:
        """Take the last sample, at the last event of the run, unless nothing is left to show."""
        if end_ms > self._last_ms or not self.traffic.is_empty:
            self._take("final", end_ms, view)

    def close(self) -> None:
        """Close the file and warn about sinks that were given up; harmless when called again."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._give_up("jsonl_path", error)
        for text in self.sink_errors[self._warned :]:
            self._warned += 1
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def result(self) -> dict[str, Any]:
        """What the report shows: ``sample_interval_ms``, ``samples``, and ``sink_errors`` if there were any."""
        result: dict[str, Any] = {
            "sample_interval_ms": float(self.options.sample_interval_ms),
            "samples": self.samples,
        }
        if self.sink_errors:
            result["sink_errors"] = list(self.sink_errors)
        return result

    def _periodic(self, view: TelemetryView) -> None:
        at_ms = self.next_sample_ms
        self._tick += 1
        self._take("periodic", at_ms, view)

    def _take(self, kind: str, at_ms: float, view: TelemetryView) -> None:
        traffic = Traffic() if kind == "baseline" else self.traffic.drain(at_ms)
        sample: dict[str, Any] = {
            "sample_ordinal": self._ordinal,
            "kind": kind,
            "interval_start_ms": self._last_ms,
            "sampled_at_ms": at_ms,
            "traffic": traffic.telemetry_row(),
        }
        pools = {role: view.worker_pool(role) for role, _ in _ROLES}
        for role, name in _ROLES:
            rows = [] if pools[role] is None else [_gauge_row(gauges) for gauges in view.gauges(role)]
            sample[f"{name}_scheduler_metrics"] = rows
        for role, name in _ROLES:
            counted = PoolCounters() if pools[role] is None else view.counters(role)
            before = counted if kind == "baseline" else self._counted[role]
            sample[f"{name}_interval_metrics"] = {
                field: value - start for field, value, start in zip(PoolCounters._fields, counted, before, strict=True)
            }
            if kind != "baseline":
                self._counted[role] = counted
        for role, name in _ROLES:
            sample[f"router_pending_{name}_requests"] = 0 if pools[role] is None else view.pending_requests(role)
        for state in ("active", "starting", "draining"):
            for role, name in _ROLES:
                pool = pools[role]
                sample[f"{state}_{name}_ids"] = [] if pool is None else getattr(pool, f"{state}_ids")
        self._ordinal += 1
        self._last_ms = at_ms
        self._emit(sample)

    def _emit(self, sample: dict[str, Any]) -> None:
        if self.options.in_memory:
            self.samples.append(sample)
        if self._file is not None:
            try:
                self._file.write(json.dumps(sample, separators=(",", ":"), allow_nan=False) + "\n")
            except OSError as error:
                self._give_up("jsonl_path", error)
                # What is left in its buffer fails once more.
                with contextlib.suppress(OSError):
                    self._file.close()
                self._file = None
        if self.options.callback is not None and not self._callback_failed:
            try:
                self.options.callback(copy.deepcopy(sample))
            except Exception as error:
                self._callback_failed = True
                self._give_up("callback", error)

    def _give_up(self, sink: str, error: Exception) -> None:
        self.sink_errors.append(
            f"telemetry.{sink} failed at sample {self._ordinal - 1}: {type(error).__name__}: {error}"
        )


def _gauge_row(gauges: RankGauges) -> dict[str, Any]:
    total = gauges.total_blocks
    return {
        "worker_id": gauges.worker,
        "dp_rank": gauges.dp_rank,
        "active_blocks": gauges.active_blocks,
        "inactive_blocks": gauges.inactive_blocks,
        "total_blocks": total,
        "active_cache_usage": gauges.active_blocks / total if total else 0.0,
        "physical_cache_usage": (gauges.active_blocks + gauges.inactive_blocks) / total if total else 0.0,
        "running_requests": gauges.running_requests,
        "waiting_requests": gauges.waiting_requests,
    }
