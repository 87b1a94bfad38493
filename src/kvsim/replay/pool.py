"""The workers of one pool, by stable id (spec/engine-contract.md section 7, "Scaling").

A worker is starting, active or draining; then it is a tombstone. Ids count up
and are never used again, and a draining worker never comes back: scaling up
while others drain adds new ids. Every change is logged as one operation.
"""

from __future__ import annotations

import bisect
import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvsim.config import EngineConfig
from kvsim.errors import ConfigError
from kvsim.layout import Pool
from kvsim.report.records import POOL_NAMES

__all__ = ["LifecycleLog", "PoolSpec", "ScaleChange", "WorkerPool", "WorkerState", "startup_delay_ms"]


def startup_delay_ms(startup_s: float | None) -> float | None:
    """Startup time in seconds as a delay in milliseconds; None if there is none.

    Raises
    ------
    ConfigError
        If it is not a finite number.
    """
    if startup_s is None:
        return None
    if isinstance(startup_s, bool) or not isinstance(startup_s, (int, float)) or not math.isfinite(startup_s):
        raise ConfigError("startup_time", f"must be a finite number of seconds, got {startup_s!r}")
    return startup_s * 1000.0 if startup_s > 0 else None


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One pool of a disaggregated run.

    Parameters
    ----------
    config : EngineConfig
        Of every worker.
    workers : int
        At the start, at least 1.
    dp_size : int
        Attention-DP ranks of each worker, at least 1.
    startup_ms : float
        Time from the decision to add a worker until it takes requests; finite, >= 0.
        Those of the start are ready at 0.

    Raises
    ------
    ConfigError
        Naming the field.
    """

    config: EngineConfig
    workers: int = 1
    dp_size: int = 1
    startup_ms: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.config, EngineConfig):
            raise ConfigError("config", f"expected an EngineConfig, got {self.config!r}")
        for name in ("workers", "dp_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, f"must be an int >= 1, got {value!r}")
        value = self.startup_ms
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ConfigError("startup_ms", f"must be finite and >= 0, got {value!r}")


class WorkerState(enum.Enum):
    """Where a worker is in its life; the values are the words of the log."""

    STARTING = "starting"
    ACTIVE = "active"
    DRAINING = "draining"
    REMOVED = "removed"


class LifecycleLog:
    """The changes of all pools of a run, in order.

    Attributes
    ----------
    operations : list of dict
        One per batch of changes that happened together: ``operation_ordinal``,
        ``at_ms``, ``pool``, ``cause`` (``planner_scale``, ``worker_ready_event``
        or ``drain_settlement``), ``planner_tick_ordinal``,
        ``origin_operation_ordinal``, ``transitions``, ``state_after_batch`` and
        ``topology_released_rows``, the workload rows that were placed because
        of it, which the run appends.
    """

    __slots__ = ("operations",)

    def __init__(self) -> None:
        self.operations: list[dict[str, Any]] = []


class ScaleChange(NamedTuple):
    """What `WorkerPool.apply_target_count` did."""

    #: New ids, ascending; starting if the pool has a startup delay, else active.
    added: tuple[int, ...]
    #: Active workers that drain from now on, highest id first.
    newly_marked: tuple[int, ...]
    #: Marked workers that had nothing left to do and are gone, ascending.
    removed: tuple[int, ...]
    #: Starting workers that are gone without having been active, highest id first.
    cancelled: tuple[int, ...]
    #: Entry of the log, None if nothing changed.
    operation: dict[str, Any] | None
    #: Requests that waited in cancelled workers, ascending; the pool knows of none, `EngineComponent` adds them.
    retired_requests: tuple[int, ...] = ()


@dataclass(slots=True)
class _Worker:
    state: WorkerState
    #: Operation that last started or drained it, -1: there from the start.
    origin: int = -1
    #: When it will be ready, inf if it is not starting.
    ready_ms: float = math.inf
    #: Since when it takes requests.
    active_ms: float = math.inf


class WorkerPool:
    """Ids and states of the workers of one pool.

    Parameters
    ----------
    pool : Pool
    workers : int
        Active at time 0, ids 0 .. workers-1.
    startup_ms : float or None
        Delay of workers added later; None and 0 are no delay.
    log : LifecycleLog, optional
        Shared by the pools of a run; its own if omitted.

    Notes
    -----
    Nothing here knows the engines. Whoever owns them says whether a worker has
    anything left to do, as a callable ``drained(worker) -> bool``: all its ranks
    idle and empty, pending and reserved destinations included.
    """

    __slots__ = ("_counts", "_ids", "_times", "_workers", "log", "pool", "startup_ms")

    def __init__(
        self, pool: Pool, workers: int, *, startup_ms: float | None = None, log: LifecycleLog | None = None
    ) -> None:
        self.pool = pool
        self.startup_ms = startup_ms or None
        self.log = LifecycleLog() if log is None else log
        # One entry per id ever given out; ids that are gone stay as tombstones.
        self._workers = [_Worker(WorkerState.ACTIVE, active_ms=0.0) for _ in range(workers)]
        # Live ids by state, each ascending.
        self._ids: dict[WorkerState, list[int]] = {
            WorkerState.ACTIVE: list(range(workers)),
            WorkerState.STARTING: [],
            WorkerState.DRAINING: [],
        }
        # Live workers as a step function of time.
        self._times, self._counts = [0.0], [workers]

    # ------------------------------------------------------------ reading

    def state(self, worker: int) -> WorkerState | None:
        """State of an id; None if it was never given out."""
        return self._workers[worker].state if 0 <= worker < len(self._workers) else None

    def active_since_ms(self, worker: int) -> float:
        """When a worker became ready, inf if it never was."""
        return self._workers[worker].active_ms

    @property
    def live_ids(self) -> list[int]:
        """Starting, active and draining workers, ascending."""
        return sorted(worker for ids in self._ids.values() for worker in ids)

    @property
    def active_ids(self) -> list[int]:
        """Workers that take requests, ascending."""
        return list(self._ids[WorkerState.ACTIVE])

    @property
    def starting_ids(self) -> list[int]:
        """Workers that are not ready yet, ascending."""
        return list(self._ids[WorkerState.STARTING])

    @property
    def draining_ids(self) -> list[int]:
        """Workers that only finish what they have, ascending."""
        return list(self._ids[WorkerState.DRAINING])

    @property
    def non_draining_count(self) -> int:
        """Active and starting workers, what a target is compared with."""
        return self.worker_count - len(self._ids[WorkerState.DRAINING])

    @property
    def worker_count(self) -> int:
        """All live workers."""
        return sum(map(len, self._ids.values()))

    @property
    def capacity(self) -> int:
        """Ids given out so far, tombstones included; also the next id."""
        return len(self._workers)

    @property
    def next_ready_ms(self) -> float:
        """When the next starting worker becomes ready, inf if there is none."""
        return min((self._workers[worker].ready_ms for worker in self._ids[WorkerState.STARTING]), default=math.inf)

    def due(self, now_ms: float) -> list[int]:
        """Starting workers whose delay is over, ascending."""
        return [worker for worker in self._ids[WorkerState.STARTING] if self._workers[worker].ready_ms <= now_ms]

    def worker_seconds(self, until_ms: float) -> float:
        """Integral of `worker_count` from 0 to `until_ms`, in seconds."""
        total = 0.0
        for k, (start, count) in enumerate(zip(self._times, self._counts, strict=True)):
            if start >= until_ms:
                break
            end = self._times[k + 1] if k + 1 < len(self._times) else until_ms
            total += count * (min(end, until_ms) - start)
        return total / 1000.0

    # ------------------------------------------------------------ changing

    def apply_target_count(
        self, target: int, now_ms: float, *, drained: Callable[[int], bool], tick: int | None = None
    ) -> ScaleChange:
        """Go towards `target` active and starting workers.

        Up: adds new ids. Down: cancels starting workers, the highest id first,
        then marks the highest active ids. Either way, marked workers that have
        nothing left to do leave at once.

        Parameters
        ----------
        target : int
            At least 0.
        now_ms : float
        drained : callable
            See the class.
        tick : int, optional
            Ordinal of the tick that asked for it, for the log.

        Raises
        ------
        ConfigError
            If `target` is not an int >= 0; nothing has changed then.
        """
        if isinstance(target, bool) or not isinstance(target, int) or target < 0:
            name = f"target_{'prefill' if self.pool is Pool.PREFILL else 'decode'}"
            raise ConfigError(name, f"must be an int >= 0, got {target!r}")
        ordinal = len(self.log.operations)
        transitions: list[dict[str, Any]] = []
        added, cancelled, marked = [], [], []
        surplus = self.non_draining_count - target
        for _ in range(-surplus):
            worker = len(self._workers)
            state = WorkerState.ACTIVE if self.startup_ms is None else WorkerState.STARTING
            if self.startup_ms is None:
                self._workers.append(_Worker(state, ordinal, active_ms=now_ms))
            else:
                self._workers.append(_Worker(state, ordinal, ready_ms=now_ms + self.startup_ms))
            self._ids[state].append(worker)
            name = "worker_ready" if self.startup_ms is None else "worker_starting"
            transitions.append(_transition(worker, name, None, state, ordinal))
            added.append(worker)
        if surplus > 0:
            for worker in reversed(self.starting_ids[-surplus:]):
                transitions.append(
                    self._move(worker, "worker_removed", WorkerState.REMOVED) | {"reason": "startup_cancelled"}
                )
                cancelled.append(worker)
            surplus -= len(cancelled)
        if surplus > 0:
            for worker in reversed(self.active_ids[-surplus:]):
                self._workers[worker].origin = ordinal
                transitions.append(self._move(worker, "worker_draining", WorkerState.DRAINING))
                marked.append(worker)
        removed = [worker for worker in self.draining_ids if drained(worker)]
        transitions += [self._move(worker, "worker_removed", WorkerState.REMOVED) for worker in removed]
        operation = self._write(transitions, now_ms, "planner_scale", tick=tick)
        return ScaleChange(tuple(added), tuple(marked), tuple(removed), tuple(cancelled), operation)

    def mark_worker_ready(self, worker: int, now_ms: float) -> dict[str, Any] | None:
        """A starting worker takes requests from now on.

        Returns
        -------
        dict or None
            Entry of the log; None if the worker is not starting: cancelled
            meanwhile, ready already, or unknown.
        """
        if self.state(worker) is not WorkerState.STARTING:
            return None
        change = self._move(worker, "worker_ready", WorkerState.ACTIVE)
        self._workers[worker].active_ms = now_ms
        return self._write([change], now_ms, "worker_ready_event", origin=self._workers[worker].origin)

    def settle(self, now_ms: float, *, drained: Callable[[int], bool]) -> tuple[tuple[int, ...], list[dict[str, Any]]]:
        """Remove draining workers that have nothing left to do.

        Returns
        -------
        removed : tuple of int
            Ids, ascending.
        operations : list of dict
            Entries of the log, one for all workers that were marked together.
        """
        removed = [worker for worker in self.draining_ids if drained(worker)]
        operations = []
        for origin in sorted({self._workers[worker].origin for worker in removed}):
            group = [worker for worker in removed if self._workers[worker].origin == origin]
            gone = [self._move(worker, "worker_removed", WorkerState.REMOVED) for worker in group]
            operation = self._write(gone, now_ms, "drain_settlement", origin=origin)
            assert operation is not None
            operations.append(operation)
        return tuple(removed), operations

    def _move(self, worker: int, name: str, state: WorkerState) -> dict[str, Any]:
        """Give a live worker another state; the transition as the log has it."""
        entry = self._workers[worker]
        before = entry.state
        self._ids[before].remove(worker)
        if state is not WorkerState.REMOVED:
            bisect.insort(self._ids[state], worker)
        entry.state, entry.ready_ms = state, math.inf
        return _transition(worker, name, before, state, entry.origin)

    def _write(
        self,
        transitions: list[dict[str, Any]],
        now_ms: float,
        cause: str,
        *,
        tick: int | None = None,
        origin: int | None = None,
    ) -> dict[str, Any] | None:
        if not transitions:
            return None
        if self._counts[-1] != self.worker_count:
            self._times.append(now_ms)
            self._counts.append(self.worker_count)
        operation = {
            "operation_ordinal": len(self.log.operations),
            "at_ms": now_ms,
            "pool": POOL_NAMES[self.pool],
            "cause": cause,
            "planner_tick_ordinal": tick,
            "origin_operation_ordinal": origin,
            "transitions": transitions,
            "state_after_batch": {
                "active": self.active_ids,
                "starting": self.starting_ids,
                "draining": self.draining_ids,
            },
            "topology_released_rows": [],
        }
        self.log.operations.append(operation)
        return operation


def _transition(worker: int, name: str, before: WorkerState | None, after: WorkerState, origin: int) -> dict[str, Any]:
    return {
        "worker_id": worker,
        "transition": name,
        "prior_state": None if before is None else before.value,
        "state": after.value,
        "origin_operation_ordinal": origin,
    }
