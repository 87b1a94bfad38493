"""What a live rank shows, to whom, and in which order (spec/engine-contract.md sections 5.4 and 8).

A :class:`Publisher` speaks for one rank. Its methods are the transactions of
`ORDER`, one for each moment at which something becomes visible; each shows its
facts in the order of the table, without a task switch in between, and shows
nothing that is empty. Facts go to sinks; outputs also to the receivers of their
requests, lifecycle events to the coordinator, metrics to those who watch.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvsim.config import EngineConfig
from kvsim.contract import (
    Admission,
    CommandEffects,
    DestinationReserved,
    ForwardPassMetrics,
    InternalEffects,
    KvEvent,
    Metrics,
    Output,
    PassCompletionEffects,
    PassStartEffects,
    PressureEvent,
    SourceHeld,
)
from kvsim.errors import ConfigError
from kvsim.live.streams import LifecycleStream, MetricsWatch
from kvsim.rank import KvEvents

__all__ = ["METHODS", "ORDER", "AttachedSink", "Fact", "Moment", "Publisher", "Sink", "SinkSource", "attach"]

Lifecycle = Sequence["SourceHeld | DestinationReserved"]


# ---------------------------------------------------------------- the order


class Moment(enum.Enum):
    """When something becomes visible."""

    PASS_START = "pass_start"
    PASS_END = "pass_end"
    IDLE_COMMAND = "idle_command"
    MID_PASS_COMMAND = "mid_pass_command"
    REFUSED_COMMAND = "refused_command"
    INTERNAL_WORK = "internal_work"
    MID_PASS_TRANSFER = "mid_pass_transfer"
    CLEANUP = "cleanup"
    GIVEN_UP = "given_up"


class Fact(enum.Enum):
    """What becomes visible."""

    ADMISSIONS = "admissions"
    PRESSURE = "pressure"
    KV_EVENTS = "kv_events"
    FPM = "fpm"
    ACCEPTANCE = "acceptance"
    OUTPUTS = "outputs"
    CLEANUP_KV_EVENTS = "cleanup_kv_events"
    REPLY = "reply"
    LIFECYCLE = "lifecycle"
    METRICS = "metrics"


#: Which facts each moment shows, in order.
#:
#: A pass of no duration shows its start and its end at once. One that did
#: nothing, too, shows at most metrics that changed.
ORDER: dict[Moment, tuple[Fact, ...]] = {
    # KV events only where the ruleset has them at the start; the others wait.
    Moment.PASS_START: (Fact.ADMISSIONS, Fact.PRESSURE, Fact.KV_EVENTS),
    # KV events of the pass, then those of commands that came in the middle of it. Requests whose receiver is
    # gone are dropped at this boundary: their KV events come after the outputs, and metrics are taken last.
    Moment.PASS_END: (
        Fact.KV_EVENTS,
        Fact.FPM,
        Fact.ACCEPTANCE,
        Fact.OUTPUTS,
        Fact.CLEANUP_KV_EVENTS,
        Fact.LIFECYCLE,
        Fact.METRICS,
    ),
    Moment.IDLE_COMMAND: (Fact.KV_EVENTS, Fact.REPLY, Fact.LIFECYCLE, Fact.METRICS),
    # All else of a command in the middle of a pass is shown at its end.
    Moment.MID_PASS_COMMAND: (Fact.REPLY,),
    Moment.REFUSED_COMMAND: (Fact.REPLY,),
    # Transfers to and from lower tiers that ended while no pass was in flight.
    Moment.INTERNAL_WORK: (Fact.KV_EVENTS, Fact.LIFECYCLE, Fact.METRICS),
    # Those of KVBM tiers in the middle of a pass, where the ruleset has KV events at the start; the others wait.
    Moment.MID_PASS_TRANSFER: (Fact.KV_EVENTS,),
    # Receivers that went away while no pass was in flight.
    Moment.CLEANUP: (Fact.CLEANUP_KV_EVENTS, Fact.LIFECYCLE, Fact.METRICS),
    # A request that can never run, ended by the driver.
    Moment.GIVEN_UP: (Fact.OUTPUTS, Fact.METRICS),
}


# ---------------------------------------------------------------- sinks


@dataclass(frozen=True, slots=True)
class SinkSource:
    """Whose facts a sink will get.

    Attributes
    ----------
    worker_id, dp_size : int
    config : EngineConfig
        Of each rank.
    """

    worker_id: int
    dp_size: int
    config: EngineConfig


class Sink(Protocol):
    """What a sink may offer: any of these methods, at least one that takes facts.

    Sinks need not inherit from this. Facts of a rank come in the order in which
    they became visible, whatever their kinds. `at_ms` is the time of the engine's
    clock at which that was; the end of a pass is that of the model, even if a wall
    clock was late. Sequences are never empty, are built lazily over arrays
    (`Rows.array`, `KvEvents.events`, `KvEvents.blocks`), and must not be changed.

    Three attributes say how a sink is to be called, all optional:

    ``delivery``
        ``"thread"``: from a thread of its own, through a bounded queue. ``"task"``:
        the same from an asyncio task; the default if any method is a coroutine
        function, which the others need not be. Otherwise the default is
        ``"thread"``. ``"inline"``: at once, by the engine itself, which is for sinks
        that return at once, like ``list.append``.
    ``queue_size``
        Calls that may wait; default 16384.
    ``on_full``
        ``"drop"`` (default): further calls are dropped and counted, the engine goes
        on. ``"wait"``: the engine waits, between passes, for sinks that record all.

    A sink that raises is called again for the next fact. What was dropped or
    failed is counted in `AttachedSink`, and the first time there is a warning.
    """

    def open(self, source: SinkSource) -> None:
        """Called before everything else. If it fails, so does the start of the engine, in the caller's ``await``."""
        ...

    def admissions(self, dp_rank: int, at_ms: float, admissions: Sequence[Admission]) -> None:
        """Requests entered the running set."""
        ...

    def pressure(self, dp_rank: int, at_ms: float, events: Sequence[PressureEvent]) -> None:
        """Requests were preempted or retracted."""
        ...

    def kv_events(self, dp_rank: int, at_ms: float, events: Sequence[KvEvent]) -> None:
        """Blocks of the device became findable, or are no longer. Needs `emit_kv_events`.

        With `emit_kv_token_ids` every stored block has its ``token_ids``.
        """
        ...

    def kv_events_with_tier(self, dp_rank: int, at_ms: float, events: Sequence[KvEvent]) -> None:
        """The same for all tiers, told apart by ``storage_tier``; a sink that has this gets no `kv_events`."""
        ...

    def fpm(self, dp_rank: int, at_ms: float, fpm: ForwardPassMetrics) -> None:
        """A pass ended."""
        ...

    def acceptance(self, dp_rank: int, at_ms: float, sample: tuple[int, int]) -> None:
        """Accept length of a pass that ended: (non-rejected output signals shown, requests among them), or (0, 0)."""
        ...

    def outputs(self, dp_rank: int, at_ms: float, outputs: Sequence[Output]) -> None:
        """Output signals of a pass, of all requests."""
        ...

    def lifecycle(self, dp_rank: int, at_ms: float, events: Lifecycle) -> None:
        """Halves of handoffs changed."""
        ...

    def metrics(self, dp_rank: int, at_ms: float, metrics: Metrics) -> None:
        """Occupancy, whenever it was looked at, changed or not."""
        ...

    def close(self) -> None:
        """Called after everything else, once, also if something failed."""
        ...


#: Methods of a sink that take facts.
METHODS = (
    "admissions",
    "pressure",
    "kv_events",
    "kv_events_with_tier",
    "fpm",
    "acceptance",
    "outputs",
    "lifecycle",
    "metrics",
)
_DELIVERIES = ("inline", "task", "thread")
_STOP = ("", 0, 0.0, None)
#: Fields of `Metrics` before those of a pass.
_NUM_OCCUPANCY = Metrics._fields.index("sglang_cache_hit_tokens")

_Call = tuple[str, int, float, Any]


class AttachedSink:
    """A sink of a running engine, and what became of its calls.

    ``published == delivered + dropped + failed + waiting`` at every moment.

    Attributes
    ----------
    sink : Sink
    published : int
        Calls that were due.
    dropped : int
        Calls for which the queue had no room, or that were left when the engine gave the sink up.
    failed : int
        Calls that raised.
    last_error : BaseException or None
        What the last of those raised.
    """

    __slots__ = (
        "_delivered",
        "_loop",
        "_methods",
        "_on_full",
        "_queue_size",
        "_warned",
        "dropped",
        "failed",
        "last_error",
        "published",
        "sink",
    )

    def __init__(self, sink: Any, methods: dict[str, Callable[..., Any]], queue_size: int, on_full: str) -> None:
        self.sink = sink
        self.published = 0
        self.dropped = 0
        self.failed = 0
        self.last_error: BaseException | None = None
        self._delivered = 0
        self._methods = methods
        self._queue_size = queue_size
        self._on_full = on_full
        self._warned: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def delivered(self) -> int:
        """Calls that returned."""
        return self._delivered

    @property
    def waiting(self) -> int:
        """Calls that wait, or are being made."""
        return self.published - self._delivered - self.dropped - self.failed

    @property
    def holds_up(self) -> bool:
        """Whether the engine has to wait until there is room."""
        return self._on_full == "wait" and self.waiting >= self._queue_size

    def takes(self, method: str) -> bool:
        """Whether the sink has that method."""
        return method in self._methods

    # What follows is the engine's; each delivery has its own.

    async def start(self, source: SinkSource) -> None:
        """Call `open`."""
        self._loop = asyncio.get_running_loop()
        opener = getattr(self.sink, "open", None)
        if opener is not None:
            await self._call_outside(opener, source)

    def put(self, call: _Call) -> None:
        """Make a call, or have it made soon."""
        raise NotImplementedError

    def flush(self) -> None:
        """What was put belongs together and is complete."""

    async def drain(self) -> None:
        """Wait until no call waits."""
        while self.waiting > 0:
            await asyncio.sleep(0.001)

    async def room(self) -> None:
        """Wait until there is room for another call."""
        while self.waiting >= self._queue_size:
            await asyncio.sleep(0.001)

    async def stop(self, timeout_s: float) -> None:
        """Make the calls that wait, at most for so long, and call `close`; a sink that hangs is given up."""
        raise NotImplementedError

    async def _call_outside(self, function: Callable[..., Any], *args: Any) -> None:
        done = function(*args)
        if inspect.isawaitable(done):
            await done

    def _has_room(self) -> bool:
        self.published += 1
        # One that waits has its room from `holds_up`, but for what one pass brings at once.
        if self._on_full == "drop" and self.waiting > self._queue_size:
            self.dropped += 1
            self._warn("dropped", f"is too slow: its queue of {self._queue_size} calls is full, calls are dropped")
            return False
        return True

    def _fail(self, call: _Call, error: BaseException) -> None:
        self.last_error = error
        self.failed += 1
        self._warn("failed", f"failed at {call[0]} of rank {call[1]} at {call[2]} ms: {error!r}")

    def _give_up(self, timeout_s: float) -> None:
        left = self.waiting
        self.dropped += left
        self._warn("hangs", f"did not take its last {left} calls within {timeout_s} s and is given up")

    def _warn(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            # Not from here: a warning may be an error, and the engine has to go on.
            loop = self._loop
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(_warn, f"sink {type(self.sink).__name__} {message}")


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


class _InlineSink(AttachedSink):
    __slots__ = ()

    def put(self, call: _Call) -> None:
        self.published += 1
        try:
            self._methods[call[0]](*call[1:])
        except Exception as error:
            self._fail(call, error)
        else:
            self._delivered += 1

    async def stop(self, timeout_s: float) -> None:
        await _close(self)


class _ThreadSink(AttachedSink):
    """Calls from a thread; the queue hands over what belongs together as one list."""

    __slots__ = ("_abandoned", "_batch", "_closed", "_queue", "_thread")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._queue: queue.SimpleQueue[list[_Call]] = queue.SimpleQueue()
        self._batch: list[_Call] = []
        self._abandoned = False
        # A daemon: one that hangs must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"kvsim-sink-{type(self.sink).__name__}", daemon=True)
        self._closed = False

    async def start(self, source: SinkSource) -> None:
        await super().start(source)
        self._thread.start()

    async def _call_outside(self, function: Callable[..., Any], *args: Any) -> None:
        # `open` may take its time, too.
        await asyncio.to_thread(function, *args)

    def put(self, call: _Call) -> None:
        if self._has_room():
            self._batch.append(call)

    def flush(self) -> None:
        if self._batch:
            self._queue.put(self._batch)
            self._batch = []

    def _work(self) -> None:
        methods = self._methods
        while True:
            for call in self._queue.get():
                if self._abandoned:
                    return
                if call is _STOP:
                    self._close_sink()
                    return
                try:
                    methods[call[0]](call[1], call[2], call[3])
                except Exception as error:
                    self._fail(call, error)
                else:
                    self._delivered += 1

    def _close_sink(self) -> None:
        closer = getattr(self.sink, "close", None)
        if closer is None:
            return
        try:
            closer()
        except Exception as error:
            self.last_error = error
            self._warn("close", f"failed at close: {error!r}")

    async def stop(self, timeout_s: float) -> None:
        if not self._thread.is_alive():
            return
        self.flush()
        self._queue.put([_STOP])
        end = time.monotonic() + timeout_s
        while self._thread.is_alive():
            if time.monotonic() > end:
                self._abandoned = True
                self._give_up(timeout_s)
                return
            await asyncio.sleep(0.001)


class _TaskSink(AttachedSink):
    __slots__ = ("_calls", "_task", "_wake")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._calls: deque[_Call] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, source: SinkSource) -> None:
        await super().start(source)
        self._task = asyncio.create_task(self._work(), name=f"kvsim-sink-{type(self.sink).__name__}")

    def put(self, call: _Call) -> None:
        if self._has_room():
            self._calls.append(call)

    def flush(self) -> None:
        if self._calls and self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._calls:
                call = self._calls.popleft()
                if call is _STOP:
                    return
                try:
                    done = self._methods[call[0]](*call[1:])
                    if inspect.isawaitable(done):
                        await done
                except Exception as error:
                    self._fail(call, error)
                else:
                    self._delivered += 1
            self._wake = loop.create_future()
            await self._wake

    async def stop(self, timeout_s: float) -> None:
        task = self._task
        if task is None or task.done():
            await _close(self)
            return
        self._calls.append(_STOP)
        self.flush()
        _, left = await asyncio.wait([task], timeout=timeout_s)
        if left:
            self._give_up(timeout_s)
            task.cancel()
            # Whoever swallows this cancellation cannot be helped.
            await asyncio.wait([task], timeout=timeout_s)
        await _close(self)


async def _close(attached: AttachedSink) -> None:
    closer = getattr(attached.sink, "close", None)
    if closer is not None:
        try:
            await attached._call_outside(closer)
        except Exception as error:
            attached.last_error = error
            attached._warn("close", f"failed at close: {error!r}")


def attach(sink: Any) -> AttachedSink:
    """A sink ready to be started.

    Raises
    ------
    ConfigError
        It takes no facts, or says something else than is allowed about its delivery.
    """
    name = type(sink).__name__
    methods = {method: getattr(sink, method) for method in METHODS if callable(getattr(sink, method, None))}
    if isinstance(sink, type) or not methods:
        raise ConfigError("sinks", f"expected an object with one of the methods {', '.join(METHODS)}, got {sink!r}")
    waits = any(inspect.iscoroutinefunction(method) for method in methods.values())
    delivery = getattr(sink, "delivery", "task" if waits else "thread")
    if delivery not in _DELIVERIES:
        raise ConfigError("sinks", f"delivery of {name} must be one of {', '.join(_DELIVERIES)}, got {delivery!r}")
    if waits and delivery != "task":
        raise ConfigError("sinks", f"delivery of {name} must be task, it has coroutine functions; got {delivery!r}")
    queue_size = getattr(sink, "queue_size", 16384)
    if isinstance(queue_size, bool) or not isinstance(queue_size, int) or queue_size < 1:
        raise ConfigError("sinks", f"queue_size of {name} must be an int >= 1, got {queue_size!r}")
    on_full = getattr(sink, "on_full", "drop")
    if on_full not in ("drop", "wait"):
        raise ConfigError("sinks", f"on_full of {name} must be drop or wait, got {on_full!r}")
    kinds: dict[str, type[AttachedSink]] = {"inline": _InlineSink, "task": _TaskSink, "thread": _ThreadSink}
    return kinds[delivery](sink, methods, queue_size, on_full)


# ---------------------------------------------------------------- transactions


class Publisher:
    """Shows the facts of one rank; the transactions of `ORDER`.

    Parameters
    ----------
    dp_rank : int
    sinks : sequence of AttachedSink
    deliver : callable
        Takes (dp rank, outputs): hands them to the receivers of their requests.
    lifecycle : LifecycleStream
    watch : MetricsWatch
    tiers : bool
        Whether there are KV events of other tiers than the device.
    """

    __slots__ = ("_by_fact", "_deliver", "_dp_rank", "_lifecycle", "_queued", "_tiers", "_watch")

    def __init__(
        self,
        dp_rank: int,
        sinks: Sequence[AttachedSink],
        deliver: Callable[[int, Sequence[Output]], None],
        lifecycle: LifecycleStream,
        watch: MetricsWatch,
        tiers: bool,
    ) -> None:
        self._dp_rank = dp_rank
        self._deliver = deliver
        self._lifecycle = lifecycle
        self._watch = watch
        self._tiers = tiers
        self._by_fact = {method: [sink for sink in sinks if sink.takes(method)] for method in METHODS}
        self._by_fact["kv_events"] = [s for s in self._by_fact["kv_events"] if not s.takes("kv_events_with_tier")]
        self._queued = [sink for sink in sinks if type(sink).flush is not AttachedSink.flush]

    def pass_start(self, at_ms: float, effects: PassStartEffects) -> None:
        """A pass begins."""
        if effects.admissions:
            self._show("admissions", at_ms, effects.admissions)
        if effects.pressure_events:
            self._show("pressure", at_ms, effects.pressure_events)
        if effects.kv_events:
            self._kv_events(at_ms, effects.kv_events)
        self._flush()

    def pass_end(
        self,
        at_ms: float,
        effects: PassCompletionEffects,
        clean_up: Callable[[int], CommandEffects | None],
    ) -> None:
        """A pass ends.

        Parameters
        ----------
        at_ms : float
        effects : PassCompletionEffects
            KV events include those of commands that came in the middle.
        clean_up : callable
            Drops the requests of the rank whose receiver is gone, and says what
            that showed; None if there are none.
        """
        if effects.kv_events:
            self._kv_events(at_ms, effects.kv_events)
        self._show("fpm", at_ms, effects.forward_pass_metrics)
        self._show("acceptance", at_ms, effects.decode_acceptance)
        if effects.outputs:
            self._outputs(at_ms, effects.outputs)
        lifecycle, metrics = effects.lifecycle_events, effects.metrics
        cleaned = clean_up(self._dp_rank)
        if cleaned is not None:
            if cleaned.kv_events:
                self._kv_events(at_ms, cleaned.kv_events)
            lifecycle = lifecycle + cleaned.lifecycle_events
            metrics = _with_counters(cleaned.metrics or metrics, metrics)
        if lifecycle:
            self._lifecycle_events(at_ms, lifecycle)
        self._metrics(at_ms, metrics)
        self._flush()

    def fruitless_pass(self, at_ms: float, metrics: Metrics) -> None:
        """A pass did nothing: no more is shown of it than occupancy that changed."""
        if metrics[:_NUM_OCCUPANCY] != self._watch.latest[:_NUM_OCCUPANCY]:
            self._metrics(at_ms, metrics)
            self._flush()

    def idle_command(self, at_ms: float, effects: CommandEffects, reply: Callable[[CommandEffects], None]) -> None:
        """A command was applied between passes."""
        if effects.kv_events:
            self._kv_events(at_ms, effects.kv_events)
        reply(effects)
        if effects.lifecycle_events:
            self._lifecycle_events(at_ms, effects.lifecycle_events)
        if effects.metrics is not None:
            self._metrics(at_ms, effects.metrics)
        self._flush()

    def internal_work(self, at_ms: float, effects: InternalEffects, metrics: Metrics) -> None:
        """Transfers ended between passes."""
        if effects.kv_events:
            self._kv_events(at_ms, effects.kv_events)
        if effects.lifecycle_events:
            self._lifecycle_events(at_ms, effects.lifecycle_events)
        self._metrics(at_ms, metrics)
        self._flush()

    def mid_pass_transfer(self, at_ms: float, effects: InternalEffects) -> None:
        """Transfers ended in the middle of a pass."""
        if effects.kv_events:
            self._kv_events(at_ms, effects.kv_events)
            self._flush()

    def cleanup(self, at_ms: float, effects: CommandEffects) -> None:
        """Requests whose receiver is gone were dropped between passes."""
        if effects.kv_events:
            self._kv_events(at_ms, effects.kv_events)
        if effects.lifecycle_events:
            self._lifecycle_events(at_ms, effects.lifecycle_events)
        if effects.metrics is not None:
            self._metrics(at_ms, effects.metrics)
        self._flush()

    def given_up(self, at_ms: float, output: Output, metrics: Metrics) -> None:
        """A request that can never run was ended."""
        self._outputs(at_ms, [output])
        self._metrics(at_ms, metrics)
        self._flush()

    # ------------------------------------------------------------ single facts

    def _show(self, method: str, at_ms: float, payload: Any) -> None:
        for sink in self._by_fact[method]:
            sink.put((method, self._dp_rank, at_ms, payload))

    def _kv_events(self, at_ms: float, events: Sequence[KvEvent]) -> None:
        self._show("kv_events_with_tier", at_ms, events)
        if self._by_fact["kv_events"]:
            device = _of_device(events) if self._tiers else events
            if device:
                self._show("kv_events", at_ms, device)

    def _outputs(self, at_ms: float, outputs: Sequence[Output]) -> None:
        self._show("outputs", at_ms, outputs)
        self._deliver(self._dp_rank, outputs)

    def _lifecycle_events(self, at_ms: float, events: Lifecycle) -> None:
        self._show("lifecycle", at_ms, events)
        self._lifecycle.push(events)

    def _metrics(self, at_ms: float, metrics: Metrics) -> None:
        self._show("metrics", at_ms, metrics)
        self._watch.publish(metrics)

    def _flush(self) -> None:
        for sink in self._queued:
            sink.flush()


def _of_device(events: Sequence[KvEvent]) -> Sequence[KvEvent]:
    if isinstance(events, KvEvents):
        mine = events.events["tier"] == 0
        return events if mine.all() else events.selected(mine)
    return [event for event in events if event.storage_tier == "device"]


def _with_counters(metrics: Metrics, of_pass: Metrics) -> Metrics:
    """Metrics of now with what the pass observed of the cache."""
    return metrics._replace(
        sglang_cache_hit_tokens=of_pass.sglang_cache_hit_tokens,
        sglang_cache_total_tokens=of_pass.sglang_cache_total_tokens,
    )
