"""Live engines when something goes wrong: sinks, clients, clocks, and ends that come early."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import itertools
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from kv_index import IndexSink
from kvsim import CancelRequest, EngineConfig, FixedTiming, Request, Submit, SubmitHandoffPrefill
from kvsim.errors import CommandError, StoppedError
from kvsim.live import LiveScheduler, VirtualClock, WallClock
from kvsim.live.sinks import MemorySink
from kvsim.live.streams import Mailbox
from live_support import collect, run, within

SPEC = importlib.util.find_spec("kvsim.live")
assert SPEC is not None
SRC = str(Path(str(SPEC.origin)).parents[2])

SMALL = EngineConfig(
    block_size=4,
    num_gpu_blocks=40,
    max_num_batched_tokens=32,
    max_num_seqs=8,
    emit_kv_events=True,
    timing_model=FixedTiming(prefill_ms=3.0, decode_ms=1.0),
)
ENGINES = {
    "vllm": SMALL,
    "vllm-1.3": SMALL.replace(ruleset="dynamo-1.3"),
    "trtllm": SMALL.replace(backend="trtllm"),
    "sglang": SMALL.replace(backend="sglang"),
    "sglang-1.3": SMALL.replace(backend="sglang", ruleset="dynamo-1.3"),
}
EVERY = pytest.mark.parametrize("config", ENGINES.values(), ids=list(ENGINES))


def prompt(number: int, length: int = 13) -> list[int]:
    """Prompts of which every fourth begins alike."""
    return [*range(100 * (number % 4), 100 * (number % 4) + length - 1), number]


async def serve(engine: LiveScheduler, count: int, out: int = 3) -> None:
    for number in range(count):
        await engine.submit(Request(number, prompt(number), out), listen=False)


def reference(count: int) -> list[Any]:
    """What an engine without faults shows."""
    memory = MemorySink()

    async def play() -> None:
        async with LiveScheduler(SMALL, clock=VirtualClock(), sinks=[memory]) as engine:
            await serve(engine, count)

    run(play())
    return list(memory.shown)


def nothing_is_left(engine: LiveScheduler) -> None:
    assert engine.in_flight == 0
    for dp_rank, rank in enumerate(engine.ranks):
        rank.check_integrity()
        metrics = engine.metrics(dp_rank)
        assert (metrics.running_requests, metrics.waiting_requests) == (0, 0)
        assert metrics == rank.metrics()._replace(
            sglang_cache_hit_tokens=metrics.sglang_cache_hit_tokens,
            sglang_cache_total_tokens=metrics.sglang_cache_total_tokens,
        )
        assert rank.is_drained()
        if engine.config.backend != "sglang":
            # What SGLang keeps in its tree counts as active.
            assert (metrics.active_blocks, metrics.cache_usage) == (0, 0.0)


# ---------------------------------------------------------------- sinks


class Raising:
    """Fails at every call, or at every third."""

    def __init__(self, delivery: str, every: int = 1) -> None:
        self.delivery = delivery
        self.every = every
        self.taken: list[Any] = []
        self.calls = 0

    def _take(self, *call: Any) -> None:
        self.calls += 1
        if self.calls % self.every == 0:
            raise ValueError(f"call {self.calls}")
        self.taken.append(call)

    def outputs(self, *call: Any) -> None:
        self._take(*call)

    def fpm(self, *call: Any) -> None:
        self._take(*call)


class RaisingTask(Raising):
    def __init__(self, every: int = 1) -> None:
        super().__init__("task", every)

    async def outputs(self, *call: Any) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self._take(*call)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", ["inline", "task", "thread", "coroutine"])
def test_a_sink_that_raises_is_called_again_and_costs_nobody_else_anything(kind: str, every: int) -> None:
    bad = RaisingTask(every) if kind == "coroutine" else Raising(kind, every)
    memory = MemorySink()

    async def play() -> LiveScheduler:
        async with LiveScheduler(SMALL, clock=VirtualClock(), sinks=[bad, memory]) as engine:
            await serve(engine, 9)
        return engine

    with pytest.warns(RuntimeWarning, match="failed at .*: ValueError") as told:
        engine = run(play())
    assert len(told) == 1
    assert list(memory.shown) == reference(9)
    attached = engine.sinks[0]
    assert attached.published == bad.calls == sum(one.fact in ("outputs", "fpm") for one in memory.shown)
    assert (attached.failed, attached.dropped, attached.waiting) == (bad.calls // every, 0, 0)
    assert attached.delivered == len(bad.taken) == bad.calls - bad.calls // every
    assert str(attached.last_error) == f"call {bad.calls // every * every}"
    nothing_is_left(engine)


class Edge:
    """Fails when it is opened, or when it is closed."""

    def __init__(self, where: str, delivery: str) -> None:
        self.where = where
        self.delivery = delivery
        self.seen: list[str] = []

    def _at(self, what: str) -> None:
        self.seen.append(what)
        if what == self.where:
            raise OSError(f"at {what}")

    def open(self, source: Any) -> None:
        self._at("open")

    def close(self) -> None:
        self._at("close")

    def metrics(self, *call: Any) -> None:
        pass


@pytest.mark.parametrize("delivery", ["inline", "task", "thread"])
def test_an_engine_whose_sink_cannot_be_opened_does_not_start(delivery: str) -> None:
    before, bad, after = MemorySink(), Edge("open", delivery), MemorySink()
    engines = []

    async def play() -> None:
        engine = LiveScheduler(SMALL, clock=VirtualClock(), sinks=[before, bad, after])
        engines.append(engine)
        async with engine:
            raise AssertionError("it started")

    with pytest.raises(OSError, match="at open"):
        run(play())
    assert before.closed
    assert after.source is None

    async def again() -> None:
        await engines[0].start()

    with pytest.raises(StoppedError, match="was started before"):
        run(again())


@pytest.mark.parametrize("delivery", ["inline", "task", "thread"])
def test_a_sink_that_cannot_be_closed_does_not_keep_the_engine(delivery: str) -> None:
    bad, after = Edge("close", delivery), MemorySink()

    async def play() -> LiveScheduler:
        async with LiveScheduler(SMALL, clock=VirtualClock(), sinks=[bad, after]) as engine:
            await serve(engine, 3)
        await asyncio.sleep(0)
        return engine

    with pytest.warns(RuntimeWarning, match="Edge failed at close: OSError"):
        engine = run(play())
    assert bad.seen == ["open", "close"]
    assert after.closed
    nothing_is_left(engine)


class Gate:
    """Takes nothing while it is shut."""

    def __init__(self, queue_size: int = 4, on_full: str = "drop") -> None:
        self.queue_size = queue_size
        self.on_full = on_full
        self.taken: list[tuple[int, float, Any]] = []


class ThreadGate(Gate):
    delivery = "thread"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.open_gate = threading.Event()

    def metrics(self, *call: Any) -> None:
        self.open_gate.wait()
        self.taken.append(call)


class TaskGate(Gate):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.open_gate = asyncio.Event()

    async def metrics(self, *call: Any) -> None:
        await self.open_gate.wait()
        self.taken.append(call)


@pytest.mark.parametrize("kind", [ThreadGate, TaskGate])
def test_a_sink_that_hangs_holds_nobody_up_and_is_given_up_at_the_end(kind: Any) -> None:
    bad, memory = kind(), MemorySink()

    async def play() -> LiveScheduler:
        engine = LiveScheduler(SMALL, clock=VirtualClock(), sinks=[bad, memory], sink_timeout_s=0.05)
        async with engine:
            await serve(engine, 9)
        return engine

    with pytest.warns(RuntimeWarning) as told:
        engine = run(play())
    texts = [str(one.message) for one in told]
    assert any("is too slow: its queue of 4 calls is full, calls are dropped" in text for text in texts)
    assert any("did not take its last" in text and "is given up" in text for text in texts)
    assert list(memory.shown) == reference(9)
    attached = engine.sinks[0]
    assert attached.published == sum(one.fact == "metrics" for one in memory.shown)
    assert attached.published == attached.delivered + attached.dropped + attached.failed + attached.waiting
    assert attached.delivered == 0
    assert attached.dropped == attached.published
    bad.open_gate.set()


@pytest.mark.parametrize("kind", [ThreadGate, TaskGate])
def test_a_sink_that_falls_behind_loses_what_its_queue_cannot_hold_and_the_rest_is_in_order(kind: Any) -> None:
    bad, memory = kind(), MemorySink(["metrics"])

    async def play() -> LiveScheduler:
        engine = LiveScheduler(SMALL, clock=VirtualClock(), sinks=[bad, memory])
        async with engine:
            await serve(engine, 9)
            await engine.drained()
            behind = len(memory.shown)
            bad.open_gate.set()
            await engine.flush_sinks()
            assert engine.sinks[0].dropped == behind - len(bad.taken) > 0
            await engine.submit(Request(99, prompt(1)), listen=False)
        return engine

    with pytest.warns(RuntimeWarning, match="is too slow"):
        engine = run(play())
    want = [(one.dp_rank, one.at_ms, one.payload) for one in memory.shown]
    first, last = bad.taken[:4], bad.taken[-2:]
    assert first == want[:4]
    assert last == want[-2:]
    attached = engine.sinks[0]
    assert attached.delivered == len(bad.taken) == len(want) - attached.dropped


class Slow:
    """Takes its time for every call."""

    on_full = "wait"
    queue_size = 2

    def __init__(self) -> None:
        self.taken: list[Any] = []


class SlowThread(Slow):
    delivery = "thread"

    def metrics(self, *call: Any) -> None:
        time.sleep(0.002)
        self.taken.append(call)


class SlowTask(Slow):
    async def metrics(self, *call: Any) -> None:
        await asyncio.sleep(0.002)
        self.taken.append(call)


@pytest.mark.parametrize("kind", [SlowThread, SlowTask])
def test_a_slow_sink_that_wants_everything_gets_everything_and_changes_no_time(kind: Any) -> None:
    slow, memory = kind(), MemorySink()

    async def play() -> LiveScheduler:
        async with LiveScheduler(SMALL, clock=VirtualClock(), sinks=[slow, memory]) as engine:
            await serve(engine, 9)
        return engine

    engine = run(play())
    assert list(memory.shown) == reference(9)
    assert slow.taken == [(one.dp_rank, one.at_ms, one.payload) for one in memory.shown if one.fact == "metrics"]
    assert engine.sinks[0].dropped == 0


@pytest.mark.parametrize("kind", [ThreadGate, TaskGate])
def test_a_sink_that_wants_everything_and_hangs_keeps_the_engine_only_until_it_is_told_to_stop(kind: Any) -> None:
    bad = kind(2, "wait")

    async def play() -> LiveScheduler:
        engine = LiveScheduler(SMALL, clock=VirtualClock(), sinks=[bad], sink_timeout_s=0.05)
        async with engine:
            await serve(engine, 9)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await engine.drained()
            assert 0 < engine.in_flight <= 9
            await engine.shutdown(drain=False)
        return engine

    with pytest.warns(RuntimeWarning, match="is given up"):
        engine = run(play())
    bad.open_gate.set()
    assert engine.sinks[0].waiting == 0


# ---------------------------------------------------------------- clients that come and go


async def churn(engine: LiveScheduler, clients: int, seed: int) -> dict[str, int]:
    """Clients of every kind of patience, many at once."""
    rng = random.Random(seed)
    ends: dict[str, int] = dict.fromkeys(["read", "close", "forget", "cancel", "killed", "mute", "batch"], 0)

    async def client(number: int, how: str, patience: int) -> None:
        request = Request(number, prompt(number, rng.randrange(1, 40)), rng.randrange(1, 12))
        if how == "batch":
            receiver = engine.receiver()
            await engine.submit(request, receiver=receiver)
            await engine.submit(Request(number + clients, prompt(number), 5), receiver=receiver)
            async for outputs in receiver:
                patience -= len(outputs)
                if patience < 0 or not receiver.requests:
                    break
            return
        await engine.submit(request, listen=how != "mute")
        if how == "mute":
            return
        stream = engine.outputs(number)
        if how == "cancel":
            await engine.clock.sleep(patience)
            await engine.cancel(number)
        seen = 0
        async for _ in stream:
            seen += 1
            if how in ("close", "forget") and seen > patience:
                break
        if how == "close":
            await stream.aclose()

    async def killed(number: int, patience: int) -> None:
        task = asyncio.create_task(client(number, "read", 0))
        await engine.clock.sleep(patience)
        task.cancel()
        await asyncio.wait([task])

    tasks = set()
    for number in range(clients):
        how = rng.choice(list(ends))
        ends[how] += 1
        patience = rng.randrange(0, 8)
        work = killed(number, patience) if how == "killed" else client(number, how, patience)
        tasks.add(asyncio.create_task(work))
        await engine.clock.sleep(rng.choice([0.0, 0.0, 0.3, 2.0]))
        if len(tasks) > 40:
            _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*tasks)
    return ends


@EVERY
@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_thousand_clients_come_and_go_and_leave_nothing(config: EngineConfig, dp_size: int) -> None:
    index = IndexSink()
    gc.collect()
    before = len(mailboxes())

    async def play() -> LiveScheduler:
        engine = LiveScheduler(config, dp_size=dp_size, clock=VirtualClock(), sinks=[index])
        async with engine:
            ends = await churn(engine, 1000, seed=dp_size)
            assert min(ends.values()) > 50
            await engine.drained()
            nothing_is_left(engine)
        return engine

    engine = run(play())
    assert index.stores > 0
    nothing_is_left(engine)
    # Nor does anything of it stay in memory; outputs that somebody may still ask for would.
    del engine
    gc.collect()
    assert len(mailboxes()) <= before


def mailboxes() -> list[Any]:
    return [one for one in gc.get_objects() if type(one) is Mailbox]


def test_clients_come_and_go_on_the_wall_clock() -> None:
    index = IndexSink()

    async def play() -> LiveScheduler:
        async with LiveScheduler(SMALL, clock=WallClock(200.0), sinks=[index]) as engine:
            await churn(engine, 200, seed=5)
            await engine.drained()
            await within(5.0, lambda: engine.metrics().active_blocks == 0)
        return engine

    nothing_is_left(run(play()))


# ---------------------------------------------------------------- cancellation, at every await


class Interrupted:
    """Awaits a coroutine; where it waits for the n-th time, its task is cancelled."""

    def __init__(self, coroutine: Any, at: int) -> None:
        self.coroutine = coroutine
        self.at = at
        self.hit = False

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self.coroutine.__await__()
        step: Callable[[], Any] = lambda: inner.send(None)  # noqa: E731
        for number in itertools.count():
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            if number == self.at:
                self.hit = True
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                yield waits_for
            except BaseException as error:
                step = lambda error=error: inner.throw(error)  # noqa: E731
            else:
                step = lambda: inner.send(None)  # noqa: E731
        return None


async def reading(engine: LiveScheduler) -> None:
    await engine.submit(Request(500, prompt(1), 4))
    assert len(await collect(engine.outputs(500))) == 4


async def reading_many(engine: LiveScheduler) -> None:
    receiver = engine.receiver()
    for number in (500, 501):
        await engine.submit(Request(number, prompt(number), 4), receiver=receiver)
    async for _ in receiver:
        if not receiver.requests:
            break


async def cancelling(engine: LiveScheduler) -> None:
    await engine.submit(Request(500, prompt(1), 50))
    await engine.clock.sleep(4.5)
    await engine.cancel(500)


async def commanding(engine: LiveScheduler) -> None:
    await engine.command(Submit(Request(500, prompt(1), 6)))
    await engine.clock.sleep(1.0)
    await engine.command(CancelRequest(500, True))


async def refused(engine: LiveScheduler) -> None:
    with pytest.raises(CommandError):
        await engine.submit(Request(500, []))


async def waiting(engine: LiveScheduler) -> None:
    await engine.metrics_changed()
    await engine.flush_sinks()
    await engine.drained()


@EVERY
@pytest.mark.parametrize("scenario", [reading, reading_many, cancelling, commanding, refused, waiting])
def test_a_client_may_be_cancelled_wherever_it_waits(config: EngineConfig, scenario: Any) -> None:
    async def play(at: int) -> bool:
        index = IndexSink()
        async with LiveScheduler(config, clock=VirtualClock(), sinks=[index]) as engine:
            await serve(engine, 5)
            interrupted = Interrupted(scenario(engine), at)

            async def client() -> None:
                await interrupted

            task = asyncio.create_task(client())
            await asyncio.wait([task])
            assert task.cancelled() == interrupted.hit
            if not interrupted.hit:
                task.result()
            # The engine is as good as before, and the id can be used again.
            await engine.drained()
            nothing_is_left(engine)
            await engine.submit(Request(500, prompt(2), 2))
            assert len(await collect(engine.outputs(500))) == 2
        nothing_is_left(engine)
        return interrupted.hit

    assert sum(1 for _ in itertools.takewhile(lambda at: run(play(at)), itertools.count())) >= 1


@pytest.mark.parametrize("drain", [True, False])
def test_start_and_shutdown_may_be_cancelled_wherever_they_wait(drain: bool) -> None:
    async def play(at: int) -> bool:
        gate, memory = SlowTask(), MemorySink()
        engine = LiveScheduler(SMALL, clock=VirtualClock(), sinks=[gate, memory, SlowThread()], sink_timeout_s=0.5)

        async def whole() -> None:
            await engine.start()
            try:
                await serve(engine, 3)
            finally:
                await engine.shutdown(drain=drain)

        interrupted = Interrupted(whole(), at)

        async def client() -> None:
            await interrupted

        task = asyncio.create_task(client())
        await asyncio.wait([task])
        # A second cancellation, in the finally, could leave the rest to `shutdown`.
        await engine.shutdown(drain=False)
        with pytest.raises(StoppedError):
            await engine.submit(Request(1, [1]))
        assert memory.closed or memory.source is None
        return interrupted.hit

    hits = sum(1 for _ in itertools.takewhile(lambda at: run(play(at)), range(400)))
    assert 3 <= hits < 400


# ---------------------------------------------------------------- ends that come early


async def in_mid_pass(engine: LiveScheduler) -> None:
    """Return in the middle of the first pass of three requests."""
    await serve(engine, 2)
    await engine.submit(Request(7, prompt(7), 5))
    await engine.clock.sleep(1.5)


@EVERY
def test_a_shutdown_in_mid_pass_shows_nothing_more_of_it(config: EngineConfig) -> None:
    memory = MemorySink()

    async def play() -> None:
        engine = LiveScheduler(config, clock=VirtualClock(), sinks=[memory])
        async with engine:
            await in_mid_pass(engine)
            stream = engine.outputs(7)
            drained, changed = asyncio.create_task(engine.drained()), asyncio.create_task(engine.metrics_changed())
            await asyncio.sleep(0)
            assert engine.in_flight == 3
            await engine.shutdown(drain=False)
            assert engine.clock.now() == 1.5
            with pytest.raises(StoppedError, match="before request 7 had ended"):
                await anext(stream)
            for task in (drained, changed):
                with pytest.raises(StoppedError):
                    await task
            for call in (engine.submit(Request(8, [1])), engine.cancel(7), engine.drained()):
                with pytest.raises(StoppedError, match="the engine has stopped"):
                    await call
            await engine.shutdown()

    run(play())
    assert memory.closed
    assert not memory.of("outputs")
    assert not memory.of("fpm")


@EVERY
def test_a_draining_shutdown_takes_nobody_new_and_ends_with_the_last(config: EngineConfig) -> None:
    memory, index = MemorySink(), IndexSink()

    async def play() -> LiveScheduler:
        engine = LiveScheduler(config, clock=VirtualClock(), sinks=[memory, index])
        await engine.start()
        await in_mid_pass(engine)
        stream = engine.outputs(7)
        ends = [asyncio.create_task(engine.shutdown()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(StoppedError, match="takes no more requests"):
            await engine.submit(Request(8, [1]))
        assert len(await collect(stream)) == 5
        await asyncio.gather(*ends)
        return engine

    engine = run(play())
    nothing_is_left(engine)
    assert sum(output.completed for output in memory.items("outputs")) == 3


def test_an_error_in_the_body_stops_at_once() -> None:
    memory = MemorySink()

    async def play() -> None:
        async with LiveScheduler(SMALL, clock=VirtualClock(), sinks=[memory]) as engine:
            await in_mid_pass(engine)
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        run(play())
    assert memory.closed
    assert not memory.of("outputs")


def test_a_client_may_shut_the_engine_down() -> None:
    async def play() -> LiveScheduler:
        engine = LiveScheduler(SMALL, clock=VirtualClock())
        await engine.start()

        async def client() -> int:
            await engine.submit(Request(1, prompt(1), 9))
            async for _ in engine.outputs(1):
                await engine.shutdown()
            return engine.in_flight

        assert await asyncio.create_task(client()) == 0
        return engine

    nothing_is_left(run(play()))


# ---------------------------------------------------------------- queues that are full


def test_a_full_command_queue_pushes_back_and_keeps_the_order() -> None:
    longest = 0
    memory = MemorySink()
    config = SMALL.replace(max_num_seqs=2)

    async def play() -> LiveScheduler:
        nonlocal longest
        async with LiveScheduler(config, clock=VirtualClock(), sinks=[memory]) as engine:
            calls = {
                asyncio.create_task(engine.submit(Request(number, prompt(number), 2), listen=False))
                for number in range(100)
            }
            left = calls
            while left:
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                longest = max(longest, len(engine._inbox))
            await asyncio.gather(*calls)
        return engine

    nothing_is_left(run(play()))
    assert longest == 4
    assert [admission.request_id for admission in memory.items("admissions")] == list(range(100))


def test_lifecycle_events_that_nobody_reads_hold_up_the_rank_and_nothing_else() -> None:
    """Those that were taken: a coordinator that is slow must not lose one."""
    config = SMALL.replace(worker_type="prefill", max_num_seqs=2, num_gpu_blocks=400)

    async def play() -> None:
        async with LiveScheduler(config, clock=VirtualClock()) as engine:
            lifecycle = engine.lifecycle()
            for number in range(30):
                await engine.command(SubmitHandoffPrefill(1000 + number, Request(number, prompt(number), 1)))
            await engine.clock.sleep(1000.0)
            held = len(lifecycle)
            assert lifecycle.capacity <= held <= lifecycle.capacity + 2 < 30
            passes = engine.passes
            await engine.clock.sleep(1000.0)
            assert engine.passes == passes
            # Commands are still taken, and the coordinator gets every event.
            assert await engine.cancel(29)
            seen = [(await anext(lifecycle)).request_id for _ in range(29)]
            assert seen == list(range(29))
            assert lifecycle.dropped == 0
            await engine.shutdown(drain=False)

    run(play())


# ---------------------------------------------------------------- clocks


class Jumping:
    """A source of time that jumps at its n-th reading."""

    def __init__(self, jumps: dict[int, float]) -> None:
        self.jumps = jumps
        self.readings = 0
        self.offset = 0.0

    def __call__(self) -> float:
        self.readings += 1
        self.offset += self.jumps.get(self.readings, 0.0)
        return time.monotonic() + self.offset


@pytest.mark.parametrize("jump", [-3600.0, -0.002])
@pytest.mark.parametrize("at", [2, 5, 40, 41, 42, 43])
def test_a_clock_that_steps_back_loses_nothing_and_no_time_goes_back(at: int, jump: float) -> None:
    memory = MemorySink()
    source = Jumping({at: jump, at + 100: jump})
    clock = WallClock(20.0, source=source)

    async def play() -> LiveScheduler:
        async with LiveScheduler(SMALL, clock=clock, sinks=[memory]) as engine:
            await serve(engine, 12)
            async with asyncio.timeout(30.0):
                await engine.drained()
        return engine

    nothing_is_left(run(play()))
    assert clock.backward_steps == sum(source.readings >= reading for reading in (at, at + 100))
    times = [one.at_ms for one in memory.shown]
    assert times == sorted(times)
    assert len(memory.items("outputs")) == 36
    starts = [one.at_ms for one in memory.of("fpm")]
    for fpm, end_ms in zip([one.payload for one in memory.of("fpm")], starts, strict=True):
        assert fpm.duration_ms in (3.0, 1.0, 4.0), (fpm, end_ms)


def test_a_clock_that_jumps_ahead_ends_passes_when_the_model_says() -> None:
    memory = MemorySink()
    clock = WallClock(source=Jumping({30: 3600.0}))

    async def play() -> LiveScheduler:
        async with LiveScheduler(SMALL, clock=clock, sinks=[memory]) as engine:
            await serve(engine, 6)
            await engine.drained()
        return engine

    nothing_is_left(run(play()))
    # The pass in which it jumped ended in time, and the next one began an hour later.
    times = [one.at_ms for one in memory.of("fpm")]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times == sorted(times)
    assert len([gap for gap in gaps if gap > 3_000_000.0]) <= 1
    assert clock.backward_steps == 0


# ---------------------------------------------------------------- the end of the interpreter

HEAD = """
import asyncio, threading, time
import kvsim
from kvsim.live import LiveScheduler, VirtualClock, WallClock
from kvsim.live.sinks import JsonlSink, MemorySink

config = kvsim.EngineConfig(num_gpu_blocks=64, timing_model=kvsim.FixedTiming(prefill_ms=5.0, decode_ms=5.0))

class Thread:
    delivery = "thread"
    def metrics(self, *call):
        pass

class Task:
    async def metrics(self, *call):
        pass

class Hanging:
    delivery = "thread"
    def metrics(self, *call):
        threading.Event().wait()

def make(**options):
    return LiveScheduler(config, sinks=[Thread(), Task(), MemorySink(), JsonlSink("/dev/null")], **options)
"""

ENDS = {
    "an engine that was never started": """
engine = make()
""",
    "an engine that is left alone": """
async def main():
    engine = make(clock=CLOCK)
    await engine.start()
    await engine.submit(kvsim.Request(1, range(30), max_output_tokens=10_000))
    await asyncio.sleep(0.05)
asyncio.run(main())
""",
    "streams that are left alone": """
kept = []
async def main():
    async with make(clock=CLOCK) as engine:
        for number in range(5):
            await engine.submit(kvsim.Request(number, range(30), max_output_tokens=5))
        kept.extend(engine.outputs(number) for number in range(4))
        kept.append(engine.receiver())
        kept.append(engine.lifecycle())
        await anext(kept[0])
asyncio.run(main())
""",
    "clients that are left alone": """
async def main():
    engine = make(clock=CLOCK)
    await engine.start()
    async def client(number):
        await engine.submit(kvsim.Request(number, range(30), max_output_tokens=10_000))
        async for output in engine.outputs(number):
            pass
    tasks = [asyncio.create_task(client(number)) for number in range(5)]
    tasks.append(asyncio.create_task(engine.drained()))
    tasks.append(asyncio.create_task(engine.metrics_changed()))
    tasks.append(asyncio.create_task(anext(engine.lifecycle())))
    await asyncio.sleep(0.05)
asyncio.run(main())
""",
    "a client that raises": """
async def main():
    async with make(clock=CLOCK) as engine:
        await engine.submit(kvsim.Request(1, range(30), max_output_tokens=10_000))
        async for output in engine.outputs(1):
            raise KeyError(1)
try:
    asyncio.run(main())
except KeyError:
    pass
""",
    "a sink that hangs": """
import warnings
warnings.simplefilter("ignore", RuntimeWarning)
async def main():
    async with LiveScheduler(config, clock=CLOCK, sinks=[Hanging()], sink_timeout_s=0.05) as engine:
        await engine.submit(kvsim.Request(1, range(30), max_output_tokens=3), listen=False)
asyncio.run(main())
""",
}


@pytest.mark.parametrize("clock", ["VirtualClock()", "WallClock()"])
@pytest.mark.parametrize("case", ENDS)
def test_the_interpreter_ends_without_a_word(case: str, clock: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", HEAD + ENDS[case].replace("CLOCK", clock)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SRC},
        timeout=60,
        check=False,
    )
    # In development mode event loops say which steps were slow, as they are on a busy machine.
    said = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]
    assert (done.returncode, done.stdout, said) == (0, "", [])


def test_no_resource_is_left_to_the_collector() -> None:
    async def play() -> None:
        for _ in range(3):
            async with LiveScheduler(SMALL, clock=WallClock(100.0), sinks=[MemorySink(), SlowThread()]) as engine:
                await serve(engine, 3)

    before = threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(play(), debug=True)
        gc.collect()
    assert threading.active_count() <= before + 1  # that of asyncio.to_thread goes with its loop
