"""Clocks of live engines: the wall clock, faster or slower, and a virtual one.

Times are milliseconds of simulated time. A clock starts at 0 when the first
engine that uses it starts; engines may share one.

Whoever waits for a time hands in a :class:`Bell`, which others may ring earlier:
the one thing that a task of an engine ever waits for.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from kvsim.errors import ConfigError

__all__ = ["PASS_END", "PASS_START", "SLEEPERS", "Bell", "Clock", "Timer", "VirtualClock", "WallClock"]

#: Who goes first among those that wait for one instant: as in a replay, passes
#: end, then whatever was asked to happen happens, then passes start.
PASS_END, SLEEPERS, PASS_START = 0, 1, 2

#: The selectors of the standard library sleep whole milliseconds; what is shorter is polled.
_SHORTEST_SLEEP_S = 0.001
#: An engine that is never ahead of its clock lets others run at least so often.
_LONGEST_RUN_S = 0.001
#: Turns of the event loop between two passes, at most, in which others react to the first.
_MOST_TURNS = 8
#: Passes after which the virtual clock looks at sockets, too.
_LONGEST_RUN = 256


class Bell:
    """Wakes the one task that waits for it. A ring that nobody waits for is kept for the next wait."""

    __slots__ = ("_future", "_rung")

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self._rung = False

    def ring(self) -> None:
        """Wake the waiting task, or the next that comes."""
        self._rung = True
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self) -> None:
        """Until the next ring; at once if it rang since the last wait."""
        if not self._rung:
            self._future = asyncio.get_running_loop().create_future()
            try:
                await self._future
            finally:
                self._future = None
        self._rung = False


class Timer:
    """A bell that rings at a time, unless cancelled."""

    __slots__ = ("_bell", "_handle", "at_ms")

    def __init__(self, at_ms: float, bell: Bell) -> None:
        self.at_ms = at_ms
        self._bell: Bell | None = bell
        self._handle: asyncio.Handle | None = None

    @property
    def alive(self) -> bool:
        """Whether it will ring."""
        return self._bell is not None

    def cancel(self) -> None:
        """Do not ring any more."""
        self._bell = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def fire(self) -> None:
        """Ring now."""
        bell, self._bell, self._handle = self._bell, None, None
        if bell is not None:
            bell.ring()


class Clock(Protocol):
    """What an engine asks of a clock.

    `reached` and `settled` are the ways around a task switch: both may say no
    although they could say yes, and then the task waits in the ordinary way.
    """

    def start(self) -> None:
        """Let time begin at 0; later calls change nothing."""
        ...

    def now(self) -> float:
        """Milliseconds since the start; never goes back."""
        ...

    def ring_at(self, at_ms: float, bell: Bell, order: int = SLEEPERS) -> Timer:
        """Ring a bell at a time, infinity being never; `order` is that among the bells of one instant."""
        ...

    def reached(self, at_ms: float) -> bool:
        """Whether it is `at_ms`, and nobody else has anything to do before."""
        ...

    def settled(self) -> bool:
        """Whether nobody else has anything to do at this instant."""
        ...

    async def settle(self) -> None:
        """Let everybody else do what is to be done at this instant."""
        ...

    async def sleep(self, duration_ms: float) -> None:
        """Wait so many milliseconds of this clock."""
        ...

    async def sleep_until(self, at_ms: float) -> None:
        """Wait until it is `at_ms`; a time that has passed is now."""
        ...


class _Sleeping:
    """What clients of both clocks use."""

    __slots__ = ()

    async def sleep(self: Clock, duration_ms: float) -> None:
        """Wait so many milliseconds of this clock."""
        await self.sleep_until(self.now() + duration_ms)

    async def sleep_until(self: Clock, at_ms: float) -> None:
        """Wait until it is `at_ms`; a time that has passed is now."""
        if math.isnan(at_ms):
            raise ConfigError("at_ms", "must be a time, got nan")
        self.start()
        bell = Bell()
        timer = self.ring_at(at_ms, bell)
        try:
            await bell.wait()
        finally:
            timer.cancel()


class WallClock(_Sleeping):
    """Simulated time passes with real time.

    Parameters
    ----------
    speedup : float
        Simulated milliseconds per real one; finite, > 0.
    spin_ms : float
        Real milliseconds before the end of a pass from which on the clock polls
        instead of sleeping. Event loops sleep whole milliseconds and wake up to
        one late; 1.0 makes the ends of passes exact to some 0.05 ms, and burns
        the processor for that long in every pass.
    source : callable
        Seconds of real time, from any start.

    Attributes
    ----------
    backward_steps : int
        How often `source` went back. Time stands still in such a step, and goes
        on from there: no pass becomes longer.
    """

    __slots__ = (
        "_behind_s",
        "_last_s",
        "_loop",
        "_ready",
        "_run_s",
        "_source",
        "_spin_s",
        "_start_s",
        "backward_steps",
        "speedup",
    )

    def __init__(
        self, speedup: float = 1.0, *, spin_ms: float = 0.0, source: Callable[[], float] = time.monotonic
    ) -> None:
        for name, value, least in (("speedup", speedup, "> 0"), ("spin_ms", spin_ms, ">= 0")):
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not good or value < 0 or (least == "> 0" and value == 0):
                hint = "; VirtualClock is the clock that never waits" if value == math.inf else ""
                raise ConfigError(name, f"must be a finite number {least}, got {value!r}{hint}")
        self.speedup = float(speedup)
        self.backward_steps = 0
        self._spin_s = spin_ms / 1000.0
        self._source = source
        self._start_s: float | None = None
        self._last_s = 0.0
        self._behind_s = 0.0
        self._run_s = 0.0
        self._loop: Any = None
        self._ready: Any = None

    def start(self) -> None:
        """Let time begin at 0; later calls change nothing."""
        self._loop = asyncio.get_running_loop()
        self._ready = getattr(self._loop, "_ready", None)
        if self._start_s is None:
            self._start_s = self._last_s = self._run_s = self._source()

    def _elapsed_s(self) -> float:
        raw = self._source()
        if raw < self._last_s:
            self.backward_steps += 1
            self._behind_s += self._last_s - raw
            self._run_s = min(self._run_s, raw)
        self._last_s = raw
        return raw + self._behind_s - self._start_s if self._start_s is not None else 0.0

    def now(self) -> float:
        """Milliseconds since the start; never goes back."""
        return self._elapsed_s() * 1000.0 * self.speedup

    def ring_at(self, at_ms: float, bell: Bell, order: int = SLEEPERS) -> Timer:
        """Ring a bell at a time, infinity being never."""
        timer = Timer(at_ms, bell)
        if at_ms < math.inf:
            self._wait(timer)
        return timer

    def _wait(self, timer: Timer) -> None:
        if not timer.alive:
            return
        left_s = (timer.at_ms - self.now()) / 1000.0 / self.speedup
        if left_s <= 0.0:
            self._run_s = self._last_s
            timer.fire()
        elif left_s - self._spin_s >= _SHORTEST_SLEEP_S:
            timer._handle = self._loop.call_later(left_s - self._spin_s, self._wait, timer)
        else:
            timer._handle = self._loop.call_soon(self._wait, timer)

    def reached(self, at_ms: float) -> bool:
        """Whether it is `at_ms`, and nobody else waited too long."""
        return self.now() >= at_ms and self._last_s - self._run_s < _LONGEST_RUN_S

    def settled(self) -> bool:
        """Whether nobody else is ready to run, or waited too long."""
        # An event loop that does not say who is ready is asked to run them every time.
        return self._ready is not None and not self._ready and self._last_s - self._run_s < _LONGEST_RUN_S

    async def settle(self) -> None:
        """Let everybody else run, so that who got an output may ask for something before the next pass starts."""
        for _ in range(_MOST_TURNS):
            await asyncio.sleep(0)
            if not self._ready:
                break
        self._elapsed_s()
        self._run_s = self._last_s


class VirtualClock(_Sleeping):
    """Time passes only when all tasks of the event loop wait, and then at once.

    A task that is ready to run holds time, whatever it does; one that waits for
    this clock, for an engine, for a lock or a queue does not. So programs that
    wait for nothing outside the event loop repeat exactly. Real timers, sockets
    and threads are outside: time does not wait for them, unless you `hold` it.

    Needs an event loop of asyncio itself, whose queue of ready callbacks it reads.
    """

    __slots__ = ("_heap", "_holds", "_loop", "_now", "_pumping", "_run", "_seq")

    def __init__(self) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, int, Timer]] = []
        self._seq = 0
        self._loop: Any = None
        self._pumping = False
        self._holds = 0
        self._run = 0

    def start(self) -> None:
        """Use the running event loop; time begins at 0 and does not begin anew."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if not hasattr(loop, "_ready"):
            raise ConfigError("clock", f"VirtualClock needs an event loop of asyncio, got {type(loop).__name__}")
        self._loop = loop
        self._heap.clear()
        self._pumping = False

    def now(self) -> float:
        """Milliseconds since the start."""
        return self._now

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Time stands still inside: around waits for what is outside the event loop, as a thread."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._pump_soon()

    def ring_at(self, at_ms: float, bell: Bell, order: int = SLEEPERS) -> Timer:
        """Ring a bell at a time, infinity being never; `order` is that among the bells of one instant."""
        timer = Timer(at_ms, bell)
        if at_ms < math.inf:
            heapq.heappush(self._heap, (max(at_ms, self._now), order, self._seq, timer))
            self._seq += 1
            self._pump_soon()
        return timer

    def reached(self, at_ms: float) -> bool:
        """Go to `at_ms` if everybody waits, and for later; whether it is that time."""
        first = self._first()
        if self._busy() or (first is not None and first[:2] <= (at_ms, PASS_END)):
            return False
        self._now = max(self._now, at_ms)
        return True

    def settled(self) -> bool:
        """Whether everybody waits, and for later instants."""
        first = self._first()
        return not self._busy() and (first is None or first[0] > self._now)

    async def settle(self) -> None:
        """Let everybody else do what is to be done at this instant."""
        bell = Bell()
        timer = self.ring_at(self._now, bell, PASS_START)
        try:
            await bell.wait()
        finally:
            timer.cancel()

    def _busy(self) -> bool:
        """Whether somebody is ready to run; now and then, to look at sockets, too."""
        self._run += 1
        if self._run >= _LONGEST_RUN:
            self._run = 0
            return True
        return bool(self._holds or self._loop._ready)

    def _first(self) -> tuple[float, int, int, Timer] | None:
        heap = self._heap
        while heap and not heap[0][3].alive:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _pump_soon(self) -> None:
        if not self._pumping and self._heap and not self._holds:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Once nobody is ready to run, ring the next bell.

        What a selector found is put behind this call, so it is seen, too.
        """
        self._pumping = False
        first = self._first()
        if first is None or self._holds:
            return
        if all(_is_pump(handle) for handle in self._loop._ready):
            heapq.heappop(self._heap)
            self._now = first[0]
            first[3].fire()
        self._pump_soon()


def _is_pump(handle: Any) -> bool:
    """Whether a ready callback is that of another virtual clock, which waits for the others as this one does."""
    return getattr(handle._callback, "__func__", None) is VirtualClock._pump
