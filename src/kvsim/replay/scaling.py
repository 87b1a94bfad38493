"""Autoscaling: ticks of a policy that the user writes (spec/replay.md section 7).

At each tick the policy gets a snapshot as a plain dictionary and answers how
many workers it wants and when it wants to be asked again. What workers then
do is in `kvsim.replay.pool`.
"""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kvsim.contract import ForwardPassMetrics
from kvsim.errors import ConfigError, PolicyError
from kvsim.layout import Pool
from kvsim.replay.pool import WorkerPool
from kvsim.replay.traffic import TrafficWindow

__all__ = ["FpmBuffer", "Scaling", "ScalingLike", "ScalingPolicy", "ScalingView", "Targets", "forward_row"]

#: A rank that is silent for so long counts as idle.
IDLE_MS = 1000.0

#: Metrics of a pass; its duration is told as wall time.
_FORWARD_COLUMNS = ForwardPassMetrics._fields[:-1]
_DECISION_KEYS = ("target_prefill", "target_decode", "next_tick_ms")


@runtime_checkable
class ScalingLike(Protocol):
    """What a scaling policy must offer; deriving from `ScalingPolicy` is not needed."""

    def initial_tick_ms(self) -> float:
        """When to tick first."""
        ...

    def on_tick(self, snapshot: dict[str, Any]) -> Mapping[str, Any]:
        """Decide."""
        ...


class ScalingPolicy:
    """Base class of scaling policies.

    Override `on_tick`, and `initial_tick_ms` if the first tick shall not be at
    `interval_ms`. A policy may keep state; an object belongs to one run.

    Parameters
    ----------
    interval_ms : float
        Time between two ticks.
    """

    def __init__(self, interval_ms: float = 1000.0) -> None:
        self.interval_ms = interval_ms

    def initial_tick_ms(self) -> float:
        """When to tick first.

        Returns
        -------
        float
            Virtual time; negative is 0, and what is not finite is never.
        """
        return self.interval_ms

    def on_tick(self, snapshot: dict[str, Any]) -> Mapping[str, Any]:
        """Look and decide.

        Parameters
        ----------
        snapshot : dict
            ``tick_ordinal``, ``now_ms``; per role ``prefill`` and ``decode`` the
            lists ``active_<role>_ids``, ``starting_``, ``draining_`` and the
            counts ``active_<role>_count``, ``starting_``, ``draining_``,
            ``non_draining_``, ``total_``; ``<role>_fpm_snapshots``, the newest
            pass of each active rank since the last tick (a row of zeros for a
            rank that was silent for a second); ``traffic`` since the last tick.
            In aggregated runs all workers are in the lists of ``decode``.

        Returns
        -------
        mapping
            ``target_prefill``, ``target_decode``: active and starting workers
            wanted, None or absent leaves them; ``next_tick_ms``: when to be
            asked again. None, absent, not finite or not later than now: never.
        """
        raise NotImplementedError(f"{type(self).__name__}.on_tick")


class Targets(NamedTuple):
    """Workers that a policy wants; None: as they are."""

    prefill: int | None
    decode: int | None


class ScalingView(Protocol):
    """What a tick reads of the run."""

    def worker_pool(self, role: Pool) -> WorkerPool | None:
        """Workers of `Pool.PREFILL` (None in an aggregated run), and of `Pool.DECODE` or all."""
        ...

    def newest_passes(self, role: Pool) -> Iterable[tuple[int, int, float, Mapping[str, Any]]]:
        """Take the newest completed pass of each rank since the last call.

        Yields
        ------
        worker, dp_rank : int
        end_ms : float
        row : mapping
            See `forward_row`.
        """
        ...


def forward_row(worker: int, dp_rank: int, duration_ms: float, metrics: Iterable[Any]) -> dict[str, Any]:
    """Metrics of a pass as snapshots show them.

    Parameters
    ----------
    worker, dp_rank : int
    duration_ms : float
        Of the whole group.
    metrics : iterable
        Fields of `ForwardPassMetrics` in order, without the last, `duration_ms`.

    Returns
    -------
    dict
        ``worker_id``, ``dp_rank``, ``wall_time`` in seconds, and what the pass
        computed and what was queued when it began.
    """
    row: dict[str, Any] = {"worker_id": worker, "dp_rank": dp_rank, "wall_time": max(duration_ms, 0.0) / 1000.0}
    row.update(zip(_FORWARD_COLUMNS, metrics, strict=True))
    return row


def _idle_row(worker: int, dp_rank: int) -> dict[str, Any]:
    return forward_row(worker, dp_rank, 0.0, [0.0 if name.startswith("var_") else 0 for name in _FORWARD_COLUMNS])


class FpmBuffer:
    """The newest forward-pass metrics of each active rank of one pool.

    A rank without any for a full second gets a row of zeros, and another one
    for each further full second: the seconds are counted from its last pass.
    """

    __slots__ = ("_rows", "_since")

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], dict[str, Any]] = {}
        # When each active rank was last heard of.
        self._since: dict[tuple[int, int], float] = {}

    def activate(self, worker: int, dp_size: int, now_ms: float) -> None:
        """The ranks of a worker take requests since `now_ms`; nothing changes for ranks that are known."""
        for rank in range(dp_size):
            self._since.setdefault((worker, rank), now_ms)

    def record(self, worker: int, dp_rank: int, end_ms: float, row: Mapping[str, Any]) -> None:
        """A pass of a rank completed; a newer one replaces it."""
        self._rows[worker, dp_rank] = dict(row)
        self._since[worker, dp_rank] = end_ms

    def drain(self, now_ms: float, active: Iterable[int]) -> list[dict[str, Any]]:
        """Rows of the active workers by (worker, rank); those of others are dropped."""
        keep = set(active)
        self._since = {key: at for key, at in self._since.items() if key[0] in keep}
        rows, self._rows = self._rows, {}
        for (worker, rank), since in self._since.items():
            silent = math.floor((now_ms - since) / IDLE_MS)
            if silent >= 1:
                rows[worker, rank] = _idle_row(worker, rank)
                self._since[worker, rank] = since + silent * IDLE_MS
        return [rows[key] for key in sorted(rows) if key[0] in keep]


class Scaling:
    """Asks the policy of a run at its ticks.

    Parameters
    ----------
    policy : object
        With `initial_tick_ms` and `on_tick`, see `ScalingPolicy`.
    dp_size, prefill_dp_size : int
        Ranks per aggregated or decode worker, and per prefill worker.

    Attributes
    ----------
    next_tick_ms : float
        When the next tick is due, inf: never. The run ticks last of all at an
        instant, and not any more once its work is done.
    traffic : TrafficWindow
        The run reports arrivals, placements and ends to it.
    history : list of dict
        ``{"snapshot": ..., "decision": ...}`` of every tick.

    Raises
    ------
    ConfigError
        If the policy lacks a method, or its first tick is no number.
    PolicyError
        If the policy raises.
    """

    __slots__ = ("_buffers", "_dp_size", "_warned", "history", "next_tick_ms", "policy", "traffic")

    def __init__(self, policy: ScalingLike, *, dp_size: int = 1, prefill_dp_size: int = 1) -> None:
        for name in ("initial_tick_ms", "on_tick"):
            if not callable(getattr(policy, name, None)):
                raise ConfigError("scaling", f"must have a method {name}, got {policy!r}")
        self.policy = policy
        self.traffic = TrafficWindow()
        self.history: list[dict[str, Any]] = []
        self._buffers = {Pool.PREFILL: FpmBuffer(), Pool.DECODE: FpmBuffer()}
        self._dp_size = {Pool.PREFILL: prefill_dp_size, Pool.DECODE: dp_size}
        self._warned = False
        first = _call(policy, "initial_tick_ms")
        at = _time("initial_tick_ms", first)
        self.next_tick_ms = max(at, 0.0) if at is not None and math.isfinite(at) else math.inf

    @property
    def is_ticking(self) -> bool:
        """Whether another tick may come; otherwise nobody reads metrics any more."""
        return self.next_tick_ms < math.inf

    def tick(self, now_ms: float, view: ScalingView) -> Targets:
        """Ask the policy and arm the next tick.

        Returns
        -------
        Targets
            For `WorkerPool.apply_target_count`.

        Raises
        ------
        PolicyError
            If the policy raises.
        ConfigError
            If its decision is not allowed; names the key and the tick.
        """
        ordinal = len(self.history)
        snapshot = self._snapshot(ordinal, now_ms, view)
        # The policy may do with its snapshot what it likes; the history keeps its own.
        answer = _call(self.policy, "on_tick", copy.deepcopy(snapshot))
        targets, next_ms = _decision(answer, ordinal)
        if targets.prefill is not None and view.worker_pool(Pool.PREFILL) is None:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"target_prefill has no effect in an aggregated run, tick {ordinal} asked for {targets.prefill}",
                    stacklevel=2,
                )
            targets = Targets(None, targets.decode)
        self.history.append(
            {
                "snapshot": snapshot,
                "decision": {
                    "target_prefill": targets.prefill,
                    "target_decode": targets.decode,
                    "next_tick_ms": next_ms if next_ms is not None and math.isfinite(next_ms) else None,
                },
            }
        )
        armed = next_ms is not None and math.isfinite(next_ms) and next_ms > now_ms
        self.next_tick_ms = next_ms if armed and next_ms is not None else math.inf
        return targets

    def _snapshot(self, ordinal: int, now_ms: float, view: ScalingView) -> dict[str, Any]:
        snapshot: dict[str, Any] = {"tick_ordinal": ordinal, "now_ms": now_ms}
        ids: dict[str, list[int]] = {}
        counts: dict[str, int] = {}
        for role, name in ((Pool.PREFILL, "prefill"), (Pool.DECODE, "decode")):
            pool = view.worker_pool(role)
            active: list[int] = []
            starting: list[int] = []
            draining: list[int] = []
            buffer = self._buffers[role]
            if pool is not None:
                active, starting, draining = pool.active_ids, pool.starting_ids, pool.draining_ids
                for worker in active:
                    buffer.activate(worker, self._dp_size[role], pool.active_since_ms(worker))
                for worker, rank, end_ms, row in view.newest_passes(role):
                    buffer.record(worker, rank, end_ms, row)
            snapshot[f"{name}_fpm_snapshots"] = buffer.drain(now_ms, active)
            ids |= {f"active_{name}": active, f"starting_{name}": starting, f"draining_{name}": draining}
            counts |= {
                f"non_draining_{name}": len(active) + len(starting),
                f"total_{name}": len(active) + len(starting) + len(draining),
            }
        for state in ("active", "starting", "draining"):
            for name in ("prefill", "decode"):
                snapshot[f"{state}_{name}_count"] = len(ids[f"{state}_{name}"])
            for name in ("prefill", "decode"):
                snapshot[f"{state}_{name}_ids"] = ids[f"{state}_{name}"]
        for kind in ("non_draining", "total"):
            for name in ("prefill", "decode"):
                snapshot[f"{kind}_{name}_count"] = counts[f"{kind}_{name}"]
        snapshot["traffic"] = self.traffic.drain(now_ms).scaling_row()
        return snapshot


def _call(policy: ScalingLike, name: str, *arguments: Any) -> Any:
    try:
        return getattr(policy, name)(*arguments)
    except Exception as error:
        where = f" at tick {arguments[0]['tick_ordinal']}" if arguments else ""
        raise PolicyError(
            f"scaling policy {type(policy).__name__}.{name} failed{where}: {type(error).__name__}: {error}"
        ) from error


def _decision(answer: Any, ordinal: int) -> tuple[Targets, float | None]:
    if not isinstance(answer, Mapping):
        raise ConfigError("scaling", f"on_tick must return a mapping with {', '.join(_DECISION_KEYS)}, got {answer!r}")
    unknown = [key for key in answer if key not in _DECISION_KEYS]
    if unknown:
        allowed = ", ".join(_DECISION_KEYS)
        raise ConfigError("scaling", f"on_tick may return {allowed}, got {unknown[0]!r} at tick {ordinal}")
    targets = Targets(*(_target(name, answer.get(name), ordinal) for name in ("target_prefill", "target_decode")))
    return targets, _time("next_tick_ms", answer.get("next_tick_ms"))


def _target(name: str, value: Any, ordinal: int) -> int | None:
    if value is None:
        return None
    try:
        number = -1 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"scaling.{name}", f"must be None or an int >= 0, got {value!r} at tick {ordinal}")
    return number


def _time(name: str, value: Any) -> float | None:
    """A time of the policy; nan and inf are allowed, they mean never."""
    if value is None and name == "next_tick_ms":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ConfigError(f"scaling.{name}", f"must be a number of milliseconds, got {value!r}")
    return float(value)
