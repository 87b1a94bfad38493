"""What live engines cost: passes with clients and sinks, how exactly passes end, many requests inside."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import pytest

from kvsim import CommandContext, EngineConfig, FixedTiming, RankIdentity, Request, SchedulerRank, Submit
from kvsim.cli.live import LiveCounts
from kvsim.live import LiveScheduler, VirtualClock, WallClock
from kvsim.live.sinks import JsonlSink, MemorySink

RUNNING = 64
TOKENS = 2000
CONFIG = EngineConfig(
    block_size=16,
    num_gpu_blocks=16_384,
    max_num_seqs=256,
    max_num_batched_tokens=65_536,
    emit_kv_events=True,
    timing_model=FixedTiming(prefill_ms=30.0, decode_ms=10.0),
)


class Thread:
    """Passes a fact to another thread, which forgets it."""

    delivery = "thread"

    def kv_events(self, *call: Any) -> None: ...

    def fpm(self, *call: Any) -> None: ...

    def outputs(self, *call: Any) -> None: ...

    def metrics(self, *call: Any) -> None: ...


def sinks_of(name: str) -> list[Any]:
    if name == "none":
        return []
    if name == "all inline":
        return [LiveCounts(), MemorySink(most=10_000)]
    if name == "inline and thread":
        return [LiveCounts(), MemorySink(most=10_000), Thread()]
    if name == "jsonl":
        return [JsonlSink("/dev/null", ["admissions", "kv_events", "fpm", "metrics"], on_full="wait")]
    assert name == "zmq"
    pytest.importorskip("zmq", reason="needs the extra kvsim[zmq]")
    from kvsim.live.sinks import ZmqSink

    return [ZmqSink("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", on_full="wait")]


def prompt(number: int, length: int = 256) -> range:
    return range(number * 1000, number * 1000 + length)


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
@pytest.mark.parametrize("sinks", ["none", "all inline", "inline and thread", "jsonl", "zmq"])
def test_passes_at_speedup_1000(benchmark: Any, sinks: str, backend: str) -> None:
    """Requests of one client, whose outputs it reads, on a wall clock that is too fast to be kept up with."""
    config = CONFIG.replace(backend=backend)

    rates: list[float] = []

    async def play() -> None:
        async with LiveScheduler(config, clock=WallClock(1000.0), sinks=sinks_of(sinks)) as engine:
            receiver = engine.receiver()
            for number in range(RUNNING):
                await engine.submit(Request(number, prompt(number), TOKENS), receiver=receiver)
            begun: tuple[int, float] | None = None
            async for outputs in receiver:
                if begun is None and len(outputs) == RUNNING:
                    begun = engine.passes, time.process_time()
                elif begun is not None and engine.in_flight < RUNNING:
                    # Threads of sinks included.
                    rates.append((engine.passes - begun[0]) / (time.process_time() - begun[1]))
                    break

    benchmark.pedantic(lambda: asyncio.run(play()), rounds=5)
    benchmark.extra_info.update(running=RUNNING, passes_per_cpu_second=round(statistics.median(rates)))


@pytest.mark.parametrize("spin_ms", [0.0, 1.0])
def test_how_late_passes_end(benchmark: Any, spin_ms: float) -> None:
    """Real time, 10 ms per pass: what is measured is how late its end is shown."""
    late: list[float] = []

    class Late:
        delivery = "inline"

        def fpm(self, dp_rank: int, at_ms: float, fpm: Any) -> None:
            late.append(clock.now() - at_ms)

    clock = WallClock(spin_ms=spin_ms)

    async def play() -> None:
        nonlocal clock
        clock = WallClock(spin_ms=spin_ms)
        async with LiveScheduler(CONFIG, clock=clock, sinks=[Late()]) as engine:
            for number in range(RUNNING):
                await engine.submit(Request(number, prompt(number), 100), listen=False)

    benchmark.pedantic(lambda: asyncio.run(play()), rounds=3)
    cuts = statistics.quantiles(late, n=100)
    benchmark.extra_info.update(passes=len(late), late_ms_median=round(cuts[49], 3), late_ms_p99=round(cuts[98], 3))


async def by_hand(in_flight: int, passes: int) -> float:
    """The scheduler alone."""
    rank = SchedulerRank(RankIdentity(), CONFIG)
    for number in range(in_flight):
        rank.apply_command(Submit(Request(number, prompt(number), TOKENS)), CommandContext(0.0))
    begun, now_ms = time.process_time(), 0.0
    for _ in range(passes):
        executed = rank.execute_pass(now_ms)
        now_ms = executed.end_ms
        rank.complete_pass(executed.pending, now_ms)
    return time.process_time() - begun


async def live(in_flight: int, passes: int) -> float:
    """The same with a client that reads each output of each request, under a clock that never waits."""

    async def client(number: int) -> None:
        async for _ in engine.outputs(number):
            pass

    engine = LiveScheduler(CONFIG, clock=VirtualClock())
    async with engine:
        for number in range(in_flight):
            await engine.submit(Request(number, prompt(number), TOKENS))
        clients = [asyncio.create_task(client(number)) for number in range(in_flight)]
        begun, first = time.process_time(), engine.passes
        await engine.clock.sleep(20.0 + 10.0 * passes)
        spent = (time.process_time() - begun) * passes / (engine.passes - first)
        await engine.shutdown(drain=False)
        await asyncio.gather(*clients, return_exceptions=True)
    return spent


@pytest.mark.parametrize("driver", [by_hand, live])
@pytest.mark.parametrize("in_flight", [256, 10_000])
def test_many_requests_inside(benchmark: Any, driver: Any, in_flight: int) -> None:
    """256 run, the others wait."""
    spent: list[float] = []
    benchmark.pedantic(lambda: spent.append(asyncio.run(driver(in_flight, 1000))), rounds=3)
    benchmark.extra_info.update(cpu_us_per_pass=round(statistics.median(spent) * 1000.0))
