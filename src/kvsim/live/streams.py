"""What clients hold of a live engine: outputs of requests, lifecycle events, metrics.

An engine writes into these and never waits for a reader. A reader that is
dropped, by ``aclose`` or because nobody refers to it any more, has gone away:
the engine drops its requests at the next boundary.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvsim.contract import DestinationReserved, Metrics, Output, Rows, SourceHeld

__all__ = ["LifecycleStream", "MetricsWatch", "OutputReceiver", "OutputStream"]


class Mailbox:
    """Where outputs of requests wait for a reader; shared by the engine and the reader.

    The reader is told apart from this, so that the engine sees it go.

    Attributes
    ----------
    single : bool
        It is of one request, and ends with it.
    requests : set of int
        Live requests that deliver here.
    gone : bool
        The reader went away.
    """

    __slots__ = ("_error", "_items", "_on_gone", "_wake", "closed", "gone", "requests", "single")

    def __init__(self, on_gone: Callable[[Mailbox], None], *, single: bool = False) -> None:
        self.single = single
        self.requests: set[int] = set()
        self.gone = False
        self.closed = False
        self._items: deque[tuple[Sequence[Output], int]] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._on_gone = on_gone

    def put(self, outputs: Sequence[Output], index: int) -> None:
        """One output, `index` of those of a pass; -1: all of them."""
        self._items.append((outputs, index))
        self.wake()

    def wake(self) -> None:
        """Let the reader look again."""
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)

    def close(self, error: BaseException | None = None) -> None:
        """Nothing more will come; the reader ends after what is left, or fails then. Again: does nothing."""
        if self.closed:
            return
        self.closed = True
        self._error = error
        self.wake()

    async def get(self) -> tuple[Sequence[Output], int] | None:
        """The next item; None at the end."""
        while not self._items:
            if self.closed:
                if self._error is not None:
                    raise self._error
                return None
            if self._wake is not None and not self._wake.done():
                raise RuntimeError("two tasks wait for the same outputs")
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        return self._items.popleft()

    def abandon(self) -> None:
        """The reader goes away."""
        if not self.gone:
            self.gone = True
            self._items.clear()
            if self.requests or not self.single:
                self._on_gone(self)


class OutputStream:
    """Outputs of one request, one after the other, until it has ended.

    Raises `StoppedError` if the engine stops before the request does, and
    `PoisonedError` if it breaks.
    """

    __slots__ = ("_box", "request_id")

    def __init__(self, box: Mailbox, request_id: int) -> None:
        self._box = box
        self.request_id = request_id

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Output:
        if self._box.gone:
            raise StopAsyncIteration
        item = await self._box.get()
        if item is None:
            raise StopAsyncIteration
        return item[0][item[1]]

    async def aclose(self) -> None:
        """Go away: the engine drops the request, if it still lives."""
        self._box.abandon()

    def __del__(self) -> None:
        self._box.abandon()


class OutputReceiver:
    """Outputs of all requests that were submitted with it, as one list per pass.

    Attributes
    ----------
    requests : frozenset of int
        Those that still live.
    """

    __slots__ = ("_box",)

    def __init__(self, box: Mailbox) -> None:
        self._box = box

    @property
    def requests(self) -> frozenset[int]:
        """Live requests that deliver here."""
        return frozenset(self._box.requests)

    def __aiter__(self) -> OutputReceiver:
        return self

    async def __anext__(self) -> Sequence[Output]:
        if self._box.gone:
            raise StopAsyncIteration
        item = await self._box.get()
        if item is None:
            raise StopAsyncIteration
        return item[0]

    async def aclose(self) -> None:
        """Go away: the engine drops the requests that still live."""
        self._box.abandon()

    def __del__(self) -> None:
        self._box.abandon()


class LifecycleStream:
    """Lifecycle events of one rank, in order; one reader.

    Until somebody takes it, the newest events are kept, as many as its capacity.
    A reader that does not keep up makes the rank wait between passes.

    Attributes
    ----------
    capacity : int
    dropped : int
        Events that nobody read: those before the newest while nobody had taken
        the stream, and all after its reader went away.
    """

    __slots__ = ("_error", "_events", "_on_room", "_wake", "capacity", "closed", "dropped", "gone", "taken")

    def __init__(self, capacity: int, on_room: Callable[[], None]) -> None:
        self.capacity = capacity
        self.dropped = 0
        self.taken = False
        self.closed = False
        self.gone = False
        self._events: deque[SourceHeld | DestinationReserved] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._on_room = on_room

    def __len__(self) -> int:
        return len(self._events)

    @property
    def full(self) -> bool:
        """Whether the rank has to wait for the reader."""
        return self.taken and not self.gone and len(self._events) >= self.capacity

    def push(self, events: Sequence[SourceHeld | DestinationReserved]) -> None:
        """Add events; the engine sees to it that it waits when `full`."""
        if self.gone:
            self.dropped += len(events)
            return
        self._events.extend(events)
        while not self.taken and len(self._events) > self.capacity:
            self._events.popleft()
            self.dropped += 1
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def close(self, error: BaseException | None = None) -> None:
        """No more events will come."""
        self.closed = True
        self._error = error
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def __aiter__(self) -> LifecycleStream:
        return self

    async def __anext__(self) -> SourceHeld | DestinationReserved:
        while not self._events:
            if self.gone:
                raise StopAsyncIteration
            if self.closed:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            if self._wake is not None and not self._wake.done():
                raise RuntimeError("two tasks wait for the same lifecycle events")
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        full = self.full
        event = self._events.popleft()
        if full:
            self._on_room()
        return event

    async def aclose(self) -> None:
        """Read no more; what comes is counted in `dropped`."""
        full = self.full
        self.gone = True
        self.dropped += len(self._events)
        self._events.clear()
        if full:
            self._on_room()


class MetricsWatch:
    """The newest metrics of a rank, and whoever waits for others.

    Attributes
    ----------
    latest : Metrics
    version : int
        How often they have changed.
    """

    __slots__ = ("_error", "_waiting", "latest", "version")

    def __init__(self, first: Metrics) -> None:
        self.latest = first
        self.version = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._error: BaseException | None = None

    def publish(self, metrics: Metrics) -> None:
        """Set the newest metrics; equal ones wake nobody."""
        if metrics == self.latest:
            return
        self.latest = metrics
        self.version += 1
        if self._waiting:
            self._wake()

    def close(self, error: BaseException) -> None:
        """Metrics will not change any more."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def changed(self, since: int | None = None) -> Metrics:
        """Wait until `version` is not `since`, by default the one of now; the newest metrics then.

        Raises
        ------
        StoppedError
            The engine stopped first.
        """
        seen = self.version if since is None else since
        while self.version == seen:
            if self._error is not None:
                raise self._error
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                await future
            finally:
                if future in self._waiting:
                    self._waiting.remove(future)
        return self.latest


def together(outputs: Sequence[Output], indices: list[int]) -> Sequence[Output]:
    """Some outputs of a pass as a sequence of their own."""
    if len(indices) == len(outputs):
        return outputs
    if isinstance(outputs, Rows):
        rows: Any = outputs.array[indices]
        return Rows(rows, outputs._build)
    return [outputs[index] for index in indices]
