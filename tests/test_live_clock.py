"""Clocks: a virtual one that is exact and repeats, a wall clock that never goes back."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from kvsim.config import EngineConfig, FixedTiming
from kvsim.contract import Admission, Request
from kvsim.errors import ConfigError
from kvsim.live import Clock, LiveScheduler, VirtualClock, WallClock
from kvsim.live.clock import PASS_END, PASS_START, SLEEPERS, Bell
from live_support import collect, run, together

CONFIG = EngineConfig(num_gpu_blocks=64, block_size=16, timing_model=FixedTiming(prefill_ms=30.0, decode_ms=10.0))


# ---------------------------------------------------------------- the virtual clock


def test_sleepers_wake_in_order_of_their_times_and_of_their_calls() -> None:
    async def main() -> list[tuple[float, int]]:
        clock = VirtualClock()
        woken: list[tuple[float, int]] = []

        async def sleeper(number: int, at: float) -> None:
            await clock.sleep_until(at)
            woken.append((clock.now(), number))

        times = [5.0, 3.0, 5.0, 0.0, 4.0, 3.0]
        await together(*(sleeper(number, at) for number, at in enumerate(times)))
        return woken

    assert run(main()) == [(0.0, 3), (3.0, 1), (3.0, 5), (4.0, 4), (5.0, 0), (5.0, 2)]


def test_time_stands_still_as_long_as_anybody_can_run() -> None:
    async def main() -> None:
        clock = VirtualClock()
        seen = []

        async def busy() -> None:
            for _ in range(500):
                await asyncio.sleep(0)
                seen.append(clock.now())

        task = asyncio.create_task(busy())
        await clock.sleep(10.0)
        assert clock.now() == 10.0
        assert seen == [0.0] * 500
        await task

    run(main())


def test_locks_and_queues_hold_time_only_while_somebody_runs() -> None:
    async def main() -> list[tuple[float, int]]:
        clock, queue = VirtualClock(), asyncio.Queue[int](1)
        taken = []

        async def producer() -> None:
            for number in range(4):
                await queue.put(number)
                await clock.sleep(2.0)

        async def consumer() -> None:
            for _ in range(4):
                number = await queue.get()
                taken.append((clock.now(), number))

        await together(producer(), consumer())
        return taken

    assert run(main()) == [(0.0, 0), (2.0, 1), (4.0, 2), (6.0, 3)]


def test_at_one_instant_passes_end_then_clients_act_then_passes_start() -> None:
    async def main() -> list[str]:
        clock, order = VirtualClock(), []
        clock.start()

        async def waiter(name: str, rank: int) -> None:
            bell = Bell()
            clock.ring_at(7.0, bell, rank)
            await bell.wait()
            order.append(name)
            await asyncio.sleep(0)
            order.append(f"{name} again")

        await together(waiter("start", PASS_START), waiter("sleeper", SLEEPERS), waiter("end", PASS_END))
        return order

    assert run(main()) == ["end", "end again", "sleeper", "sleeper again", "start", "start again"]


def test_a_request_that_comes_as_a_pass_ends_is_in_the_next() -> None:
    async def main() -> list[float]:
        clock = VirtualClock()
        async with LiveScheduler(CONFIG, clock=clock) as engine:
            await engine.submit(Request(1, range(20), 2), listen=False)
            await clock.sleep_until(30.0)
            await engine.submit(Request(2, range(100, 120), 1))
            times = []
            async for _ in engine.outputs(2):
                times.append(clock.now())
        return times

    # One pass for the prompt and the other's second token.
    assert run(main()) == [70.0]


def test_a_thread_is_waited_for_only_if_the_clock_is_held() -> None:
    async def main() -> None:
        clock = VirtualClock()
        task = asyncio.create_task(clock.sleep(1000.0))
        with clock.hold():
            await asyncio.sleep(0.02)
            assert clock.now() == 0.0
        await task
        assert clock.now() == 1000.0

    run(main())


def test_a_cancelled_sleeper_leaves_nothing() -> None:
    async def main() -> None:
        clock = VirtualClock()
        task = asyncio.create_task(clock.sleep(5.0))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await clock.sleep(1.0)
        assert clock.now() == 1.0
        await clock.sleep(100.0)
        assert clock.now() == 101.0

    run(main())


def test_a_program_under_the_virtual_clock_repeats_exactly() -> None:
    async def main() -> list[tuple[float, int, int | None]]:
        clock, rng, told = VirtualClock(), random.Random(5), []

        async def client(engine: LiveScheduler, number: int) -> None:
            await clock.sleep(rng.choice([0.0, 3.0, 7.5, 40.0]))
            await engine.submit(Request(number, range(number % 3, 20), rng.randrange(1, 9)))
            async for output in engine.outputs(number):
                told.append((clock.now(), number, output.token_id))
                if rng.random() < 0.1:
                    await engine.cancel(number)

        async with LiveScheduler(CONFIG, clock=clock, dp_size=2) as engine:
            await together(*(client(engine, number) for number in range(40)))
        return told

    first = run(main())
    assert first == run(main())
    assert len(first) > 40


def test_a_loop_that_hides_what_is_ready_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        class Other:
            pass

        monkeypatch.setattr(asyncio, "get_running_loop", Other)
        with pytest.raises(ConfigError, match="clock: VirtualClock needs an event loop of asyncio, got Other"):
            VirtualClock().start()

    asyncio.run(main())


# ---------------------------------------------------------------- the wall clock


class Source:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_is_that_since_the_start_times_the_speedup() -> None:
    async def main() -> None:
        source = Source()
        clock = WallClock(10.0, source=source)
        source.now = 200.0
        clock.start()
        assert clock.now() == 0.0
        source.now = 200.5
        clock.start()
        assert clock.now() == 5000.0

    run(main())


def test_a_clock_that_steps_back_stands_still_and_goes_on() -> None:
    async def main() -> None:
        source = Source()
        clock = WallClock(source=source)
        clock.start()
        source.now += 1.0
        assert clock.now() == 1000.0
        source.now -= 50.0
        assert clock.now() == 1000.0
        assert clock.backward_steps == 1
        source.now += 0.5
        assert clock.now() == 1500.0
        assert clock.backward_steps == 1

    run(main())


def test_an_engine_runs_on_through_a_step_back() -> None:
    loop_time: list[float] = []

    async def main() -> None:
        loop, behind = asyncio.get_running_loop(), [0.0]
        clock = WallClock(10.0, source=lambda: loop.time() - behind[0])
        config = CONFIG.replace(speedup_ratio=10.0)
        async with LiveScheduler(config, clock=clock) as engine:
            await engine.submit(Request(1, range(20), 20))
            stream = engine.outputs(1)
            await anext(stream)
            before = clock.now()
            behind[0] = 3600.0
            loop_time.append(loop.time())
            async with asyncio.timeout(5.0):
                assert len(await collect(stream)) == 19
            assert clock.now() >= before
            assert clock.backward_steps == 1

    run(main())


@pytest.mark.parametrize("speedup", [0, -1.0, math.inf, math.nan, True, "1"])
def test_a_speedup_that_is_none_is_refused(speedup: float) -> None:
    with pytest.raises(ConfigError, match="speedup: must be a finite number > 0, got"):
        WallClock(speedup)


def test_the_clock_that_never_waits_is_named() -> None:
    with pytest.raises(ConfigError, match="VirtualClock is the clock that never waits"):
        WallClock(math.inf)


@pytest.mark.parametrize("spin_ms", [0.0, 1.0])
def test_a_pass_never_ends_before_its_time(spin_ms: float) -> None:
    async def main() -> list[float]:
        clock, early = WallClock(spin_ms=spin_ms), []
        config = CONFIG.replace(timing_model=FixedTiming(prefill_ms=4.0, decode_ms=2.5))

        class Ends:
            delivery = "inline"

            def fpm(self, dp_rank: int, at_ms: float, fpm: object) -> None:
                early.append(clock.now() - at_ms)

        async with LiveScheduler(config, clock=clock, sinks=[Ends()]) as engine:
            await engine.submit(Request(1, range(20), 10), listen=False)
        return early

    late = run(main())
    assert len(late) == 10
    assert all(lateness >= 0.0 for lateness in late)


def test_who_gets_an_output_can_ask_for_more_before_the_next_pass_starts() -> None:
    """As under the virtual clock: the follow-up is admitted with the pass that starts where the other ended."""

    class Starts:
        delivery = "inline"

        def __init__(self) -> None:
            self.admitted: list[tuple[int, int]] = []
            self.passes = 0

        def fpm(self, dp_rank: int, at_ms: float, fpm: object) -> None:
            self.passes += 1

        def admissions(self, dp_rank: int, at_ms: float, admissions: list[Admission]) -> None:
            self.admitted += [(admission.request_id, self.passes) for admission in admissions]

    async def main(clock: Clock) -> list[tuple[int, int]]:
        sink, queue = Starts(), asyncio.Queue[int]()
        config = CONFIG.replace(timing_model=FixedTiming(prefill_ms=3.0, decode_ms=3.0))

        async with LiveScheduler(config, clock=clock, sinks=[sink]) as engine:

            async def follow() -> None:
                await queue.get()
                await engine.submit(Request(2, range(100, 120), 2), listen=False)

            await engine.submit(Request(1, range(20), 5))
            task = asyncio.create_task(follow())
            async for _ in engine.outputs(1):
                queue.put_nowait(1)
            await task
        return sink.admitted

    assert run(main(VirtualClock())) == [(1, 0), (2, 1)]
    assert run(main(WallClock())) == [(1, 0), (2, 1)]
