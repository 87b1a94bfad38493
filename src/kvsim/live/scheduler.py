"""One worker against a clock: the task that drives it, and what its clients call."""

from __future__ import annotations

import asyncio
import math
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any

from kvsim.config import EngineConfig
from kvsim.contract import (
    CancelRequest,
    Command,
    CommandContext,
    CommandEffects,
    DestinationAccepted,
    HostOffloadObserver,
    Metrics,
    Noop,
    Output,
    PendingPass,
    RankIdentity,
    RankPass,
    Request,
    RequestId,
    ReserveDestination,
    Rows,
    SameTimestampRetry,
    Submit,
    SubmitHandoffPrefill,
    Submitted,
    id_to_int,
)
from kvsim.errors import CommandError, ConfigError, PoisonedError, StoppedError
from kvsim.group import Health, command_rank, execute_ranks, merge_retries, runnable_ranks
from kvsim.layout import FailReason
from kvsim.live.clock import PASS_END, Bell, Clock, Timer, WallClock
from kvsim.live.publication import AttachedSink, Publisher, SinkSource, attach
from kvsim.live.streams import LifecycleStream, Mailbox, MetricsWatch, OutputReceiver, OutputStream, together
from kvsim.policies import Policy
from kvsim.rank import SchedulerRank

__all__ = ["LiveScheduler"]

_TRY_AGAIN = (SameTimestampRetry.RETRY, SameTimestampRetry.COUNTDOWN)
_STARTERS = (Submit, SubmitHandoffPrefill, ReserveDestination)
_COMPLETED = 2
#: Preempting passes without a token in between, after which requests are held to preempt each other for ever.
_MOST_BARREN = 1000
#: Passes without duration in a row after which others run all the same. SGLang tries a head up to 600 times before
#: it is stuck, and nobody who could ask for something must run in between: a replay ends the head first.
_MOST_AT_ONCE = 1024
#: Requests that ended and whose outputs nobody has asked for: the newest of them are kept.
_MOST_UNCLAIMED = 65536


class _Live:
    """A request inside the engine."""

    __slots__ = ("box", "dp_rank", "request_id", "slot")

    def __init__(self, request_id: int, dp_rank: int, slot: int, box: Mailbox | None) -> None:
        self.request_id = request_id
        self.dp_rank = dp_rank
        self.slot = slot
        self.box = box


class _Entry:
    """A command in the queue of the engine. Without a rank it goes to that of its request."""

    __slots__ = ("box", "command", "dp_rank", "reply", "seat")

    def __init__(
        self, command: Command, seat: _Seat, dp_rank: int | None, box: Mailbox | None, reply: asyncio.Future[Any]
    ) -> None:
        self.command = command
        self.seat = seat  # whose room in the queue it takes
        self.dp_rank = dp_rank
        self.box = box
        self.reply = reply


class _Seat:
    """A rank and what the driver remembers of it."""

    __slots__ = ("boxes", "by_slot", "ending", "lifecycle", "pending", "publisher", "rank", "room", "watch")

    def __init__(
        self, rank: SchedulerRank, publisher: Publisher, lifecycle: LifecycleStream, watch: MetricsWatch, room: int
    ) -> None:
        self.rank = rank
        self.publisher = publisher
        self.lifecycle = lifecycle
        self.watch = watch
        #: Places in the command queue.
        self.room = asyncio.Semaphore(room)
        self.pending: PendingPass | None = None
        #: Live requests by row.
        self.by_slot: dict[int, _Live] = {}
        #: Those that end in the pass in flight: their rows may be used anew before it is over.
        self.ending: dict[int, _Live] = {}
        #: Who listens, and to how many live requests.
        self.boxes: dict[Mailbox, int] = {}


class LiveScheduler:
    """A mock engine: one worker that runs against a clock and serves its clients.

    Use it with ``async with``, which starts it and, at the end, lets the requests
    inside finish (`shutdown`). All methods are for the event loop it was started in.

    Parameters
    ----------
    config : EngineConfig, optional
        Of the worker; defaults if omitted.
    dp_size : int
        Attention-DP ranks: they share a barrier, so a pass lasts as long as its slowest rank.
    worker_id : int
    clock : Clock, optional
        A `WallClock` if omitted. Engines may share one.
    sinks : iterable of Sink
        Who else is told, in this order; see `kvsim.live.Sink`.
    seed : int
        Added to the seeds of the configuration, as in `kvsim.replay`.
    timing : TimingModel, optional
        In place of the configuration's timing model.
    policy : Policy or str, optional
        Scheduling policy of every rank; the backend's own if omitted.
    observer : HostOffloadObserver, optional
        Hooks around the transfers of `native_host_offload`.
    sink_timeout_s : float
        Real seconds that a sink has at the end for what still waits; then it is given up.

    Raises
    ------
    ConfigError
        An option, a sink or the configuration is not allowed; names it.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        dp_size: int = 1,
        worker_id: int = 0,
        clock: Clock | None = None,
        sinks: Iterable[Any] = (),
        seed: int = 0,
        timing: Any = None,
        policy: Policy | str | None = None,
        observer: HostOffloadObserver | None = None,
        sink_timeout_s: float = 5.0,
    ) -> None:
        if config is None:
            config = EngineConfig()
        elif not isinstance(config, EngineConfig):
            raise ConfigError("config", f"expected None or an EngineConfig, got {config!r}")
        for name, value, least in (("dp_size", dp_size, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(name, f"must be an int >= {least}, got {value!r}")
        if not isinstance(sink_timeout_s, (int, float)) or not 0 <= sink_timeout_s < math.inf:
            raise ConfigError("sink_timeout_s", f"must be finite and >= 0, got {sink_timeout_s!r}")
        config = config.replace(aic_mtp_seed=(config.aic_mtp_seed + seed) % (1 << 64))
        #: Of each rank.
        self.config = config.for_attention_dp(dp_size)
        self.dp_size = dp_size
        self.worker_id = worker_id
        self.clock: Clock = WallClock() if clock is None else clock
        #: What became of the calls of each sink, in their order.
        self.sinks: tuple[AttachedSink, ...] = tuple(attach(sink) for sink in sinks)
        #: Passes that were started, those without effect included.
        self.passes = 0
        #: Outputs of ended requests that nobody had asked for and that were thrown away.
        self.unclaimed_dropped = 0
        self._sink_timeout_s = sink_timeout_s
        self._slow_sinks = [sink for sink in self.sinks if sink._on_full == "wait"]
        self._health = Health()
        self._failure: BaseException | None = None
        capacity = 2 * max(self.config.max_num_seqs or self.config.num_gpu_blocks, 1)
        tiers = self.config.native_host_offload is not None or self.config.tiers_attached is not None
        self._seats: list[_Seat] = []
        for dp_rank in range(dp_size):
            identity = RankIdentity(worker_id, dp_rank, dp_size)
            rank = SchedulerRank(identity, self.config, timing=timing, policy=policy, observer=observer)
            lifecycle = LifecycleStream(capacity, self._ring)
            watch = MetricsWatch(rank.metrics())
            publisher = Publisher(dp_rank, self.sinks, self._deliver, lifecycle, watch, tiers)
            self._seats.append(_Seat(rank, publisher, lifecycle, watch, capacity))
        self._ranks = [seat.rank for seat in self._seats]
        self._tiers = tiers
        #: Transfers of these go on in the middle of a pass.
        self._kvbm = self.config.tiers_attached is not None
        self._bell = Bell()
        self._inbox: deque[_Entry] = deque()
        self._lives: dict[int, _Live] = {}
        self._unclaimed: dict[int, Mailbox] = {}
        self._ended: deque[tuple[int, Mailbox]] = deque()
        #: Those of `receiver`, which last as long as the engine.
        self._receivers: dict[Mailbox, None] = {}
        self._gone: list[int] = []
        self._drained: list[asyncio.Future[None]] = []
        self._next_rank = 0
        self._wave_step = 0
        self._barren = 0
        self._blocked = False
        #: Passes without duration in a row, and when they happened.
        self._at_once = 0
        self._now_ms = 0.0
        self._in_flight_until: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._draining = False
        self._over = False

    # ------------------------------------------------------------ its life

    async def __aenter__(self) -> LiveScheduler:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown(drain=error is None)
        if error is None:
            self._check_failure()

    async def start(self) -> None:
        """Start the sinks and the task of the worker.

        Raises
        ------
        StoppedError
            It was started before.
        Exception
            What the `open` of a sink raised; nothing runs then.
        """
        if self._task is not None or self._over:
            raise StoppedError("start: this engine was started before, make another one")
        self.clock.start()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        source = SinkSource(self.worker_id, self.dp_size, self.config)
        started: list[AttachedSink] = []
        try:
            for sink in self.sinks:
                started.append(sink)
                await sink.start(source)
        except BaseException:
            self._over = True
            for sink in started:
                await sink.stop(self._sink_timeout_s)
            raise
        self._task = self._loop.create_task(self._main(), name=f"kvsim-worker-{self.worker_id}")

    async def shutdown(self, drain: bool = True) -> None:
        """Stop, and wait until nothing of the engine runs any more. Again: does nothing.

        Parameters
        ----------
        drain : bool
            Let the requests inside finish; new ones are refused. What can never
            finish ends as rejected or failed, as at the end of a replay; halves of
            handoffs that only a command would move are left. False: stop at once,
            also in the middle of a pass, of which nothing more is shown.

        Notes
        -----
        Requests that have not ended then fail with `StoppedError` where somebody
        waits for them. Sinks get what was shown before, each in
        `sink_timeout_s` at most. If this call is cancelled, it stops at once.
        """
        task = self._task
        if task is None:
            self._over = True
            return
        self._draining = True
        self._bell.ring()
        try:
            if drain and not task.done():
                await asyncio.wait([task])
        finally:
            if not task.done():
                task.cancel()
            await _finish(task, self.sinks, self._sink_timeout_s)

    async def drained(self) -> None:
        """Wait until no request, half of a handoff or transfer is inside.

        Raises
        ------
        StoppedError, PoisonedError
            The engine stopped or broke first.
        """
        self._check_running("drained")
        assert self._loop is not None
        future = self._loop.create_future()
        self._drained.append(future)
        self._bell.ring()
        try:
            await future
        finally:
            if future in self._drained:
                self._drained.remove(future)

    async def flush_sinks(self) -> None:
        """Wait until the sinks took all that was shown so far."""
        with self._hold():
            for sink in self.sinks:
                await sink.drain()

    # ------------------------------------------------------------ requests

    async def submit(
        self,
        request: Request,
        dp_rank: int | None = None,
        *,
        receiver: OutputReceiver | None = None,
        listen: bool = True,
    ) -> Submitted:
        """Queue a request. Waits as long as the command queue is full.

        Parameters
        ----------
        request : Request
        dp_rank : int, optional
            Otherwise the ranks take turns.
        receiver : OutputReceiver, optional
            Gets its outputs; otherwise they are kept for `outputs`.
        listen : bool
            False: nobody but sinks wants its outputs.

        Raises
        ------
        CommandError
            The request is invalid, as offline. Nothing changed.
        StoppedError, PoisonedError
            The engine is stopping, or broke.

        Notes
        -----
        If this call is cancelled, the request does not run; if it has begun to, it is dropped.
        """
        if dp_rank is None:
            dp_rank = self._next_rank
            self._next_rank = (dp_rank + 1) % self.dp_size
        effects = await self._post(Submit(request), dp_rank, receiver, listen)
        assert isinstance(effects.result, Submitted)
        return effects.result

    def outputs(self, request_id: RequestId) -> OutputStream:
        """Outputs of a request from its first on; may be asked for once, also after it has ended.

        Whoever drops the stream has gone away: the engine drops the request.

        Raises
        ------
        CommandError
            There is no such request, its outputs go elsewhere, or were taken.
        """
        number = id_to_int(request_id)
        box = self._unclaimed.pop(number, None)
        if box is None:
            raise CommandError(f"request_id: there are no outputs of request {number} to take")
        return OutputStream(box, number)

    def receiver(self) -> OutputReceiver:
        """A receiver for any number of requests, to hand to `submit` or `command`."""
        box = Mailbox(self._client_gone)
        if self._over:
            box.close()
        else:
            self._receivers[box] = None
        return OutputReceiver(box)

    async def cancel(self, request_id: RequestId) -> bool:
        """Drop a request, its outputs end; false if it is not inside any more."""
        effects = await self._post(CancelRequest(id_to_int(request_id)), None, None, False)
        return not isinstance(effects.result, Noop) or effects.suppressed_pending_output

    async def command(
        self,
        command: Command,
        dp_rank: int = 0,
        *,
        receiver: OutputReceiver | None = None,
        listen: bool = False,
    ) -> CommandEffects:
        """Apply a command to a rank. Waits as long as its command queue is full.

        Parameters
        ----------
        command : Command
        dp_rank : int
        receiver : OutputReceiver, optional
            Gets the outputs of the request that the command brings, if any.
        listen : bool
            Keep those outputs for `outputs`.

        Returns
        -------
        CommandEffects
            Between passes, all that it changed, which is shown as well. In the
            middle of a pass the acknowledgement; what it changed is shown at the end.

        Raises
        ------
        CommandError
            The command is invalid, as offline. Nothing changed.
        StoppedError, PoisonedError
            The engine is stopping, or broke.

        Notes
        -----
        If this call is cancelled before the command was applied, it will not be;
        otherwise it stays applied, but for a request that it brought, which is dropped.
        """
        return await self._post(command, dp_rank, receiver, listen)

    @property
    def in_flight(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._lives)

    # ------------------------------------------------------------ what it tells

    def lifecycle(self, dp_rank: int = 0) -> LifecycleStream:
        """Lifecycle events of handoffs at a rank; may be taken once.

        Raises
        ------
        CommandError
            There is no such rank, or it was taken.
        """
        stream = self._seat(dp_rank).lifecycle
        if stream.taken:
            raise CommandError(f"lifecycle: that of rank {dp_rank} was taken before")
        stream.taken = True
        return stream

    def metrics(self, dp_rank: int = 0) -> Metrics:
        """Occupancy of a rank as it was shown last."""
        return self._seat(dp_rank).watch.latest

    def watch(self, dp_rank: int = 0) -> MetricsWatch:
        """The metrics of a rank with their version, to miss none."""
        return self._seat(dp_rank).watch

    async def metrics_changed(self, dp_rank: int = 0) -> Metrics:
        """Wait until metrics are shown that differ from those of now, and return them."""
        return await self._seat(dp_rank).watch.changed()

    @property
    def failure(self) -> BaseException | None:
        """What broke the engine, None if nothing did."""
        return self._failure

    @property
    def ranks(self) -> tuple[SchedulerRank, ...]:
        """The ranks themselves, to look into between two awaits; never change them."""
        return tuple(self._ranks)

    # ------------------------------------------------------------ the queue of commands

    async def _post(
        self, command: Command, dp_rank: int | None, receiver: OutputReceiver | None, listen: bool
    ) -> CommandEffects:
        seat = self._seat(0 if dp_rank is None else dp_rank)
        box = None
        if isinstance(command, _STARTERS):
            if not isinstance(command.request, Request):
                raise CommandError(f"request: expected a Request, got {command.request!r}")
            if receiver is not None:
                if not isinstance(receiver, OutputReceiver):
                    raise CommandError(f"receiver: expected an OutputReceiver, got {receiver!r}")
                box = receiver._box
            elif listen:
                box = Mailbox(self._client_gone, single=True)
        self._check_open(command)
        await seat.room.acquire()
        try:
            self._check_open(command)
        except BaseException:
            seat.room.release()
            raise
        assert self._loop is not None
        reply: asyncio.Future[CommandEffects] = self._loop.create_future()
        self._inbox.append(_Entry(command, seat, dp_rank, box, reply))
        self._bell.ring()
        try:
            return await reply
        except asyncio.CancelledError:
            if reply.done() and not reply.cancelled() and reply.exception() is None:
                self._withdraw(reply.result())
            raise

    def _withdraw(self, effects: CommandEffects) -> None:
        """The caller did not live to hear that his request was accepted."""
        if isinstance(effects.result, (Submitted, DestinationAccepted)):
            self._unclaimed.pop(effects.result.request_id, None)
            if effects.result.request_id in self._lives:
                self._gone.append(effects.result.request_id)
                self._bell.ring()

    def _serve(self, now_ms: float) -> None:
        """Apply what is queued."""
        in_flight = self._in_flight_until is not None
        while self._inbox:
            entry = self._inbox.popleft()
            entry.seat.room.release()
            if entry.reply.cancelled():
                continue
            seat = entry.seat if entry.dp_rank is not None else self._seat_of(entry)
            try:
                self._check_id(entry.command)
                effects = command_rank(
                    seat.rank, entry.command, CommandContext(now_ms, in_flight), seat.pending, self._health
                )
            except CommandError as error:
                entry.reply.set_exception(error)
                continue
            except BaseException:
                entry.reply.set_exception(self._broken())
                raise
            self._follow(seat, entry, effects)
            if in_flight:
                entry.reply.set_result(effects)
            else:
                self._blocked = False
                seat.publisher.idle_command(now_ms, effects, entry.reply.set_result)
        if not in_flight:
            self._settle_wave()

    def _check_id(self, command: Command) -> None:
        if isinstance(command, _STARTERS):
            request_id = id_to_int(command.request.request_id)
            if request_id in self._lives:
                raise CommandError(f"request_id: {request_id} is already active")

    def _seat_of(self, entry: _Entry) -> _Seat:
        """The rank that has the request, or held its prompt."""
        assert isinstance(entry.command, CancelRequest)
        request_id = id_to_int(entry.command.request_id)
        live = self._lives.get(request_id)
        if live is not None:
            return self._seats[live.dp_rank]
        return next((seat for seat in self._seats if seat.rank.request_row(request_id) is not None), self._seats[0])

    def _follow(self, seat: _Seat, entry: _Entry, effects: CommandEffects) -> None:
        """Remember who is inside."""
        result = effects.result
        if isinstance(result, (Submitted, DestinationAccepted)):
            slot = seat.rank.find_slot(result.request_id)
            live = _Live(result.request_id, seat.rank.identity.dp_rank, slot, entry.box)
            self._lives[live.request_id] = seat.by_slot[slot] = live
            box = entry.box
            if box is not None:
                seat.boxes[box] = seat.boxes.get(box, 0) + 1
                if box.single:
                    self._unclaimed[live.request_id] = box
                box.requests.add(live.request_id)
                if box.gone:
                    self._gone.append(live.request_id)
        for request_id in effects.retired_requests:
            self._end(request_id)
        if effects.suppressed_pending_output and isinstance(entry.command, CancelRequest):
            # It had ended in the pass in flight; nobody will see that end.
            self._end(id_to_int(entry.command.request_id))

    def _end(self, request_id: int) -> None:
        """A request has ended for its client."""
        live = self._lives.pop(request_id, None)
        if live is None:
            return
        seat = self._seats[live.dp_rank]
        for rows in (seat.by_slot, seat.ending):
            if rows.get(live.slot) is live:
                del rows[live.slot]
        box = live.box
        if box is None:
            return
        left = seat.boxes[box] - 1
        if left:
            seat.boxes[box] = left
        else:
            del seat.boxes[box]
        box.requests.discard(request_id)
        if box.single:
            box.close()
            if self._unclaimed.get(request_id) is box:
                self._keep_ended(request_id, box)

    def _keep_ended(self, request_id: int, box: Mailbox) -> None:
        self._ended.append((request_id, box))
        if len(self._ended) > _MOST_UNCLAIMED:
            oldest, box = self._ended.popleft()
            if self._unclaimed.get(oldest) is box:
                del self._unclaimed[oldest]
                self.unclaimed_dropped += 1
                if self.unclaimed_dropped == 1 and self._loop is not None:
                    self._loop.call_soon(
                        warnings.warn,
                        f"outputs of request {oldest} were never asked for and are thrown away: "
                        "submit with listen=False what nobody listens to",
                        RuntimeWarning,
                    )

    # ------------------------------------------------------------ outputs and their receivers

    def _deliver(self, dp_rank: int, outputs: Sequence[Output]) -> None:
        """Hand the outputs of a pass to the receivers of their requests."""
        seat = self._seats[dp_rank]
        if not isinstance(outputs, Rows):
            for index, output in enumerate(outputs):
                live = self._lives.get(output.request_id)
                if live is not None and live.box is not None:
                    _put(live.box, outputs, index)
                if output.completed:
                    self._end(output.request_id)
            return
        ending = seat.ending
        by_slot, box = seat.by_slot, next(iter(seat.boxes), None)
        if box is not None and not box.single and seat.boxes[box] == len(by_slot) + len(ending):
            # One receiver has all requests of the rank: nothing to sort.
            if not box.gone:
                box.put(outputs, -1)
        elif seat.boxes:
            batches: dict[Mailbox, list[int]] = {}
            for index, slot in enumerate(outputs.array["slot"].tolist()):
                live = ending.get(slot) or by_slot.get(slot)
                if live is None or live.box is None:
                    continue
                box = live.box
                if box.single:
                    if not box.gone:
                        box.put(outputs, index)
                elif box in batches:
                    batches[box].append(index)
                else:
                    batches[box] = [index]
            for box, indices in batches.items():
                if not box.gone:
                    box.put(together(outputs, indices), -1)
        if ending:
            for live in list(ending.values()):
                self._end(live.request_id)

    def _client_gone(self, box: Mailbox) -> None:
        """A receiver was dropped; garbage may be collected by any thread."""
        if self._over or self._loop is None:
            self._receivers.pop(box, None)
        elif threading.get_ident() == self._thread:
            self._forget_client(box)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._forget_client, box)

    def _forget_client(self, box: Mailbox) -> None:
        self._receivers.pop(box, None)
        if box.requests:
            self._gone.extend(sorted(box.requests))
            self._bell.ring()

    def _clean_up(self, dp_rank: int) -> CommandEffects | None:
        """Drop the requests of a rank whose receiver is gone."""
        if not self._gone:
            return None
        seat = self._seats[dp_rank]
        found: CommandEffects | None = None
        left = []
        for request_id in self._gone:
            live = self._lives.get(request_id)
            if live is None:
                continue
            if live.dp_rank != dp_rank:
                left.append(request_id)
                continue
            context = CommandContext(self._command_time())
            effects = command_rank(seat.rank, CancelRequest(request_id), context, None, self._health)
            self._end(request_id)
            self._blocked = False
            if found is not None:
                effects.kv_events = [*found.kv_events, *effects.kv_events]
                effects.lifecycle_events = found.lifecycle_events + effects.lifecycle_events
            found = effects
        self._gone = left
        return found

    # ------------------------------------------------------------ the task

    async def _main(self) -> None:
        try:
            await self._run()
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = error
            if self._health.reason is None:
                self._health.reason, self._health._cause = str(error), error
            if not isinstance(error, Exception):
                raise
        finally:
            self._over = True
            self._close()

    async def _run(self) -> None:
        """Until everything is drained, pass after pass.

        At the top of the loop no pass is in flight. What was asked for at this
        instant is applied before the next pass starts, whoever asked; but a pass
        that took no time is followed by the next at once, as in a replay.
        """
        clock, seats = self.clock, self._seats
        while True:
            if 0 < self._at_once <= _MOST_AT_ONCE:
                now_ms = self._now_ms
            else:
                self._at_once = 0
                if not clock.settled():
                    await clock.settle()
                self._now_ms = now_ms = clock.now()
                if self._tiers:
                    self._internal_work(now_ms)
                if self._inbox:
                    self._serve(now_ms)
                    continue
                if self._gone:
                    for seat in seats:
                        cleaned = self._clean_up(seat.rank.identity.dp_rank)
                        if cleaned is not None:
                            seat.publisher.cleanup(now_ms, cleaned)
                    self._settle_wave()
                    continue
            if self._slow_sinks:
                await self._wait_for_sinks()
            runnable = [] if self._blocked or self._held_up() else self._runnable()
            if runnable:
                if self._barren > _MOST_BARREN and self._break_livelock(now_ms):
                    continue
                await self._pass(now_ms, runnable)
            elif self._at_once:
                self._at_once = 0
            elif self._held_up() or not self._draining:
                await self._idle()
            elif not self._release_stuck(now_ms):
                if not self._tiers or self._deadline() == math.inf:
                    return
                await self._idle()

    def _runnable(self) -> list[int]:
        if self.dp_size > 1:
            return runnable_ranks(self._ranks)
        rank = self._ranks[0]
        return [0] if rank.is_ready() and not rank.waiting_for_external_command() else []

    def _held_up(self) -> bool:
        """Whether a coordinator has to take lifecycle events first."""
        return any(seat.lifecycle.full for seat in self._seats)

    async def _idle(self) -> None:
        """Wait for whatever comes next: a command, a client that goes, a transfer that ends."""
        if self._drained and all(rank.is_drained() for rank in self._ranks):
            for future in self._drained:
                if not future.done():
                    future.set_result(None)
            self._drained.clear()
        deadline = self._deadline() if self._tiers else math.inf
        if deadline == math.inf:
            await self._bell.wait()
            return
        timer = self.clock.ring_at(deadline, self._bell, PASS_END)
        try:
            await self._bell.wait()
        finally:
            timer.cancel()

    async def _pass(self, now_ms: float, runnable: list[int]) -> None:
        """A pass of the worker, from its start to its end."""
        passes = self._execute(now_ms, runnable)
        end_ms = now_ms
        for i, executed in passes.items():
            self._seats[i].publisher.pass_start(now_ms, executed.start_effects)
            end_ms = max(end_ms, executed.end_ms)
        if end_ms == now_ms:
            self._end_at_once(now_ms, passes)
            return
        self._in_flight_until = end_ms
        if (self._kvbm and self._deadline() <= end_ms) or not self.clock.reached(end_ms):
            await self._until(end_ms)
        self._at_once = 0
        effects = []
        for i, seat in enumerate(self._seats):
            with self._health.step(i):
                if seat.pending is not None:
                    effects.append(seat.rank.complete_pass(seat.pending, end_ms))
                else:
                    effects.append(seat.rank.complete_idle_group_pass(now_ms, end_ms))
            seat.pending = None
        for seat, shown in zip(self._seats, effects, strict=True):
            seat.publisher.pass_end(end_ms, shown, self._clean_up)
        self._in_flight_until = None
        self._settle_wave()

    def _execute(self, now_ms: float, runnable: list[int]) -> dict[int, RankPass]:
        self.passes += 1
        self._wave_step += 1
        if self.dp_size == 1:
            with self._health.step(0):
                passes = {0: self._ranks[0].execute_pass(now_ms)}
        else:
            passes = execute_ranks(self._ranks, runnable, self._wave_step - 1, now_ms, self._health)
        for i, executed in passes.items():
            seat = self._seats[i]
            seat.pending = executed.pending
            outputs = executed.pending.effects.outputs
            if outputs:
                self._barren = 0
                if seat.rank.completions:
                    rows = outputs.array  # type: ignore[attr-defined]
                    for slot in rows["slot"][(rows["flags"] & _COMPLETED) != 0].tolist():
                        live = seat.by_slot.pop(slot, None)
                        if live is not None:
                            seat.ending[slot] = live
            elif executed.start_effects.pressure_events:
                self._barren += 1
        return passes

    async def _until(self, end_ms: float) -> None:
        """The pass runs; commands are acknowledged and transfers of KVBM tiers go on meanwhile."""
        timer = self.clock.ring_at(end_ms, self._bell, PASS_END)
        transfer: Timer | None = None
        try:
            while True:
                if self._kvbm:
                    due = self._deadline()
                    if transfer is not None and transfer.at_ms != due:
                        transfer.cancel()
                        transfer = None
                    if transfer is None and due < end_ms:
                        transfer = self.clock.ring_at(due, self._bell, PASS_END)
                await self._bell.wait()
                now_ms = self._command_time() if timer.alive else end_ms
                if self._kvbm:
                    self._transport(now_ms)
                if not timer.alive:
                    return
                if self._inbox:
                    self._serve(now_ms)
        finally:
            timer.cancel()
            if transfer is not None:
                transfer.cancel()

    def _command_time(self) -> float:
        now_ms = self.clock.now()
        # A wall clock may be late; the pass ends when the model says.
        return now_ms if self._in_flight_until is None else min(now_ms, self._in_flight_until)

    def _end_at_once(self, now_ms: float, passes: dict[int, RankPass]) -> None:
        """A pass that took no time: go on if it did anything, else wait for something to happen.

        What a pass without effect evicted changes metrics, and is no reason to
        try again: a replay does not, either.
        """
        progress = False
        for i, executed in passes.items():
            seat = self._seats[i]
            moved = seat.rank.last_pass_progressed
            with self._health.step(i):
                effects = seat.rank.complete_pass(executed.pending, now_ms)
            seat.pending = None
            if moved or executed.start_effects.admissions or effects.outputs or _shows(effects):
                seat.publisher.pass_end(now_ms, effects, self._clean_up)
                progress = True
            else:
                seat.publisher.fruitless_pass(now_ms, effects.metrics)
        self._settle_wave()
        self._at_once += 1
        if progress or merge_retries([p.same_timestamp_retry for p in passes.values()]) in _TRY_AGAIN:
            return
        for seat in self._seats:
            head = seat.rank.stuck_head()
            if head is not None and head.reason is not FailReason.NOT_ADMITTED:
                self._fail_head(seat, now_ms)
                return
        self._at_once = 0
        self._blocked = True

    def _internal_work(self, now_ms: float) -> None:
        """Settle transfers that ended, each at its own time."""
        for i, seat in enumerate(self._seats):
            while (due := seat.rank.next_internal_deadline_ms()) is not None and due <= now_ms:
                with self._health.step(i):
                    effects = seat.rank.process_internal_work(due, False)
                self._blocked = False
                seat.publisher.internal_work(due, effects, seat.rank.metrics())
        self._settle_wave()

    def _transport(self, now_ms: float) -> None:
        """Settle transfers of KVBM tiers that ended in the middle of the pass, each at its own time."""
        for i, seat in enumerate(self._seats):
            while (due := seat.rank.next_internal_deadline_ms()) is not None and due <= now_ms:
                with self._health.step(i):
                    effects = seat.rank.tick_offload_transport_only(due)
                seat.publisher.mid_pass_transfer(due, effects)

    def _deadline(self) -> float:
        """When the next transfer of any rank ends; infinity if there is none."""
        deadline = math.inf
        for rank in self._ranks:
            due = rank.next_internal_deadline_ms()
            if due is not None:
                deadline = min(deadline, due)
        return deadline

    def _fail_head(self, seat: _Seat, now_ms: float) -> None:
        with self._health.step(seat.rank.identity.dp_rank):
            output = seat.rank.fail_head()
        assert output is not None
        seat.publisher.given_up(now_ms, output, seat.rank.metrics())
        self._blocked = False
        self._settle_wave()

    def _break_livelock(self, now_ms: float) -> bool:
        """End the first that waits of requests that preempt each other for ever; false if nobody waits."""
        self._barren = 0
        for seat in self._seats:
            waiting = seat.rank.waiting
            if not len(waiting):
                continue
            row = seat.rank.requests[waiting[0]]
            if row["preemptions"] == 0:
                continue
            request_id = int(row["id_hi"]) << 64 | int(row["id_lo"])
            effects = command_rank(seat.rank, CancelRequest(request_id), CommandContext(now_ms), None, self._health)
            output = Output(request_id, None, completed=True, rejected=False, cached_tokens=None, failed=True)
            seat.publisher.given_up(now_ms, output, effects.metrics or seat.rank.metrics())
            if effects.kv_events or effects.lifecycle_events:
                seat.publisher.cleanup(now_ms, effects)
            return True
        return False

    def _release_stuck(self, now_ms: float) -> bool:
        """At the end: let somebody pass a blocked head, or end one that its policy never admits."""
        if not self._blocked:
            return False
        for seat in self._seats:
            if seat.rank.unblock():
                self._blocked = False
                return True
        for seat in self._seats:
            if seat.rank.stuck_head() is not None:
                self._fail_head(seat, now_ms)
                return True
        return False

    def _settle_wave(self) -> None:
        if self._wave_step and self.dp_size > 1 and all(rank.is_drained() for rank in self._ranks):
            self._wave_step = 0

    async def _wait_for_sinks(self) -> None:
        """Sinks that want everything hold up the rank, and time."""
        for sink in self._slow_sinks:
            if sink.holds_up:
                with self._hold():
                    await sink.room()

    def _hold(self) -> Any:
        hold = getattr(self.clock, "hold", None)
        return nullcontext() if hold is None else hold()

    # ------------------------------------------------------------ the end

    def _close(self) -> None:
        """Tell everybody who waits that nothing more will come."""
        while self._inbox:
            entry = self._inbox.popleft()
            entry.seat.room.release()
            if not entry.reply.done():
                entry.reply.set_exception(self._end_error("before it applied the command"))
        for live in list(self._lives.values()):
            if live.box is not None:
                live.box.requests.discard(live.request_id)
                live.box.close(self._end_error(f"before request {live.request_id} had ended"))
        for box in self._receivers:
            box.close()
        self._receivers.clear()
        self._lives.clear()
        for seat in self._seats:
            seat.by_slot.clear()
            seat.ending.clear()
            seat.lifecycle.close(self._broken() if self._failure is not None else None)
            seat.watch.close(self._end_error("metrics will not change any more"))
        for future in self._drained:
            if not future.done():
                if self._failure is None and all(rank.is_drained() for rank in self._ranks):
                    future.set_result(None)
                else:
                    future.set_exception(self._end_error("before it was drained"))
        self._drained.clear()

    def _broken(self) -> PoisonedError:
        error = PoisonedError(f"an earlier step failed: {self._health.reason}")
        error.__cause__ = self._health._cause
        return error

    def _end_error(self, what: str) -> Exception:
        return StoppedError(f"the engine stopped: {what}") if self._failure is None else self._broken()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._broken()

    def _check_running(self, what: str) -> None:
        self._check_failure()
        if self._task is None:
            raise StoppedError(f"{what}: the engine was not started")
        if self._over:
            raise StoppedError(f"{what}: the engine has stopped")

    def _check_open(self, command: Command) -> None:
        self._check_running(type(command).__name__)
        if self._draining and isinstance(command, _STARTERS):
            raise StoppedError(f"{type(command).__name__}: the engine is shutting down and takes no more requests")

    def _ring(self) -> None:
        self._bell.ring()

    def _seat(self, dp_rank: int) -> _Seat:
        if isinstance(dp_rank, bool) or not isinstance(dp_rank, int) or not 0 <= dp_rank < self.dp_size:
            raise CommandError(f"dp_rank: must lie in 0 <= dp_rank < {self.dp_size}, got {dp_rank!r}")
        return self._seats[dp_rank]


def _put(box: Mailbox, outputs: Sequence[Output], index: int) -> None:
    if not box.gone:
        if box.single:
            box.put(outputs, index)
        else:
            box.put([outputs[index]], -1)


def _shows(effects: Any) -> bool:
    return bool(effects.lifecycle_events or effects.kv_events)


async def _finish(task: asyncio.Task[None], sinks: Sequence[AttachedSink], timeout_s: float) -> None:
    """Wait for the task of an engine, then for its sinks, also if the caller is cancelled meanwhile."""
    if not task.done():
        await asyncio.wait([task])
    await asyncio.gather(*(sink.stop(timeout_s) for sink in sinks))
