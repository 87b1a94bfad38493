"""Which request is released when: open loop, closed loop, sessions (spec/replay.md 3.1, 3.2).

The driver knows the workload and the clock and nothing about engines. It asks
to be told when a request ends and answers who comes next.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim._core import content
from kvsim.errors import ConfigError, WorkloadError
from kvsim.layout import RequestStatus
from kvsim.workload.base import NO_PLAN, Workload

__all__ = ["ArrivalDriver"]

_NEVER = -math.inf


class ArrivalDriver:
    """Releases the requests of one run.

    Open loop (`concurrency` None): a first turn is released at its arrival, a
    follow-up turn its think time after the turn before it ended, and the stamp
    of a request is that scheduled time. Closed loop: at most `concurrency`
    sessions are active; a session keeps its slot through think times until its
    last turn ends, then the next one in row order starts. The stamp is the
    moment of release, the arrivals of the workload give only the order.

    Parameters
    ----------
    workload : Workload
        Shared and never changed.
    concurrency : int, optional
        Cap of the closed loop, at least 1.
    speedup : float, default 1.0
        Divides arrivals and think times; finite, > 0.
    scale_think_times : bool, default True
        Whether `speedup` divides think times too.

    Raises
    ------
    ConfigError
        If `concurrency` or `speedup` is out of range.
    """

    def __init__(
        self,
        workload: Workload,
        concurrency: int | None = None,
        speedup: float = 1.0,
        scale_think_times: bool = True,
    ) -> None:
        if concurrency is not None and (
            isinstance(concurrency, bool) or not isinstance(concurrency, (int, np.integer)) or concurrency < 1
        ):
            raise ConfigError("concurrency", f"must be None or an int >= 1, got {concurrency!r}")
        if isinstance(speedup, bool) or not isinstance(speedup, (int, float)) or not 0 < speedup < math.inf:
            raise ConfigError("speedup", f"must be finite and > 0, got {speedup!r}")
        self.workload = workload
        self.concurrency = None if concurrency is None else int(concurrency)
        self.speedup = float(speedup)
        self._first_rows: list[int] = np.flatnonzero(workload.first_turn).tolist()
        self._has_next: list[bool] = [*(~workload.first_turn[1:]).tolist(), False]
        delays = workload.delay_ms / speedup if scale_think_times else workload.delay_ms
        self._delay_ms: list[float] = delays.tolist()
        self._arrivals = self._scaled_arrivals()
        self._ready: list[tuple[float, int]] = []  # heap of (ready time, row); rows are in (session, turn) order
        self._next_session = 0  # into _first_rows: sessions not started yet
        self._active = 0  # closed loop: sessions that hold a slot
        self._in_flight: set[int] = set()
        self._emitted: dict[int, int] = {}  # row -> output tokens a later prompt contains
        self._now = _NEVER
        rows = np.where(workload.first_turn, np.arange(len(workload)), 0)
        self._start: list[int] = np.maximum.accumulate(rows).tolist()  # first row of the session of each row
        if self.concurrency is None:
            times = self._arrivals[self._first_rows].tolist()
            self._ready = list(zip(times, self._first_rows, strict=True))
            heapq.heapify(self._ready)
            self._next_session = len(self._first_rows)
        else:
            self._start_sessions(0.0)

    def _scaled_arrivals(self) -> npt.NDArray[np.float64]:
        arrivals = self.workload.specs["arrival_ms"]
        if self.workload.rebase_arrivals:
            arrivals = arrivals - np.nanmin(arrivals)
        return np.asarray(arrivals / self.speedup, dtype=np.float64)

    def _start_sessions(self, now_ms: float) -> None:
        """Give free slots to the next sessions (closed loop)."""
        assert self.concurrency is not None
        while self._active < self.concurrency and self._next_session < len(self._first_rows):
            heapq.heappush(self._ready, (now_ms, self._first_rows[self._next_session]))
            self._next_session += 1
            self._active += 1

    # ------------------------------------------------------------ all known ahead

    @property
    def is_static(self) -> bool:
        """Whether every release time is known before the run: no cap, no follow-up turns."""
        return self.concurrency is None and not self.workload.has_sessions

    def static_order(self) -> npt.NDArray[np.int64]:
        """Row of each release, in release order: by time, ties in row order, shape (n,).

        Raises
        ------
        WorkloadError
            If some release waits for an event of the run.
        """
        if not self.is_static:
            raise WorkloadError("release times depend on the run: it has a concurrency cap or follow-up turns")
        return np.argsort(self._arrivals, kind="stable")

    def static_arrivals(self) -> npt.NDArray[np.float64]:
        """Release times (ms) in release order, shape (n,): those of the rows of :meth:`static_order`.

        Raises
        ------
        WorkloadError
            If some release waits for an event of the run.
        """
        return self._arrivals[self.static_order()]

    # ------------------------------------------------------------ event by event

    def next_ready_ms(self) -> float | None:
        """Time of the next release that needs no other event, or None.

        In the closed loop a request that is ready already only waits for room,
        which the end of another one gives: no time is reported for it.
        """
        if not self._ready:
            return None
        ready = self._ready[0][0]
        return ready if self.concurrency is None or ready > self._now else None

    def release(self, now_ms: float, in_flight: int = 0) -> list[tuple[int, float]]:
        """Take out what is ready at `now_ms`.

        Parameters
        ----------
        now_ms : float
            Time of the run, never before an earlier call.
        in_flight : int
            Requests inside the deployment; the closed loop releases at most
            ``concurrency - in_flight``. The open loop does not read it.

        Returns
        -------
        list of (int, float)
            Row and arrival stamp (ms) of each released request, in order.
        """
        self._now = now_ms
        ready, released = self._ready, []
        room = len(ready) if self.concurrency is None else self.concurrency - in_flight
        while room > 0 and ready and ready[0][0] <= now_ms:
            at_ms, row = heapq.heappop(ready)
            released.append((row, at_ms if self.concurrency is None else now_ms))
            self._in_flight.add(row)
            room -= 1
        return released

    def resolve(self, row: int, now_ms: float, status: RequestStatus, emitted_tokens: int = 0) -> None:
        """Learn that a released request has ended.

        Parameters
        ----------
        row : int
            As returned by :meth:`release`.
        now_ms : float
            When it ended.
        status : RequestStatus
            Completed, rejected and failed requests start the think time of
            the next turn; a cancelled one ends its session.
        emitted_tokens : int
            Output tokens it produced. Those of a completed turn become part of
            later prompts of a cumulative session.

        Raises
        ------
        WorkloadError
            If the row is not in flight (a cancellation of such a row does
            nothing), if the status is not an end, or if the tokens exceed what
            was asked for or come from a rejected request.
        """
        self._now = max(self._now, now_ms)
        if row not in self._in_flight:
            if status is RequestStatus.CANCELLED:
                return
            raise WorkloadError(f"row {row} is not in flight, so it cannot end")
        asked = int(self.workload.specs["max_output_tokens"][row])
        if status is RequestStatus.UNFINISHED:
            raise WorkloadError(f"row {row} cannot end as UNFINISHED")
        if status is RequestStatus.REJECTED and emitted_tokens:
            raise WorkloadError(f"row {row} is rejected but has emitted {emitted_tokens} tokens")
        if not 0 <= emitted_tokens <= asked:
            raise WorkloadError(f"row {row} must emit 0 <= emitted_tokens <= {asked}, got {emitted_tokens}")
        self._in_flight.remove(row)
        if self._has_next[row] and status is not RequestStatus.CANCELLED:
            if status is RequestStatus.COMPLETED:
                self._emitted[row] = emitted_tokens
            heapq.heappush(self._ready, (now_ms + self._delay_ms[row + 1], row + 1))
        elif self.concurrency is not None:
            self._active -= 1
            self._start_sessions(now_ms)

    @property
    def drained(self) -> bool:
        """Nothing is in flight and every session is at its end."""
        return not self._in_flight and not self._ready and self._next_session == len(self._first_rows)

    # ------------------------------------------------------------ prompts

    def prompt_parts(self, row: int) -> list[npt.NDArray[Any]]:
        """Whole prompt of a request as it stands now, in pieces.

        In a cumulative session: the new tokens of each earlier turn, each
        followed by what that turn emitted, then the new tokens of this one.
        Known once the turn before has been resolved.

        Returns
        -------
        list of ndarray of `kvsim.layout.SEGMENT` or uint32
            Read-only views, never empty ones.
        """
        work = self.workload
        if not work.cumulative:
            return [work.prompt(row)]
        parts: list[npt.NDArray[Any]] = []
        for earlier in range(self._start[row], row):
            parts.append(work.prompt(earlier))
            emitted = self._emitted.get(earlier, 0)
            if emitted:
                parts.append(self._outputs(earlier, emitted))
        parts.append(work.prompt(row))
        return parts

    def prompt_tokens(self, row: int) -> int:
        """Length of :meth:`prompt_parts` in tokens."""
        inputs = self.workload.specs["input_tokens"]
        if not self.workload.cumulative:
            return int(inputs[row])
        start = self._start[row]
        return int(inputs[start : row + 1].sum()) + sum(self._emitted.get(k, 0) for k in range(start, row))

    def _outputs(self, row: int, count: int) -> npt.NDArray[np.uint32]:
        spec = self.workload.specs[row]
        offset = int(spec["planned_offset"])
        if offset == NO_PLAN:
            return content.synthetic_tokens(int(spec["id_hi"]), int(spec["id_lo"]), count)
        return self.workload.planned[offset : offset + count]
