"""What tests of live engines share: a sink that keeps everything, runs of workloads, a clock of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from kvsim.config import EngineConfig
from kvsim.contract import KvEvent, Output, Request
from kvsim.live import LiveScheduler, VirtualClock

T = TypeVar("T")


class Everything:
    """Keeps every fact in the order of its publication: (kind, rank, time, value)."""

    delivery = "inline"

    def __init__(self) -> None:
        self.facts: list[tuple[str, int, float, Any]] = []
        self.opened = self.closed = 0

    def open(self, source: Any) -> None:
        self.opened += 1

    def close(self) -> None:
        self.closed += 1

    def admissions(self, dp_rank: int, at_ms: float, admissions: Any) -> None:
        self.facts.append(("admissions", dp_rank, at_ms, list(admissions)))

    def pressure(self, dp_rank: int, at_ms: float, events: Any) -> None:
        self.facts.append(("pressure", dp_rank, at_ms, list(events)))

    def kv_events_with_tier(self, dp_rank: int, at_ms: float, events: Any) -> None:
        self.facts.append(("kv_events", dp_rank, at_ms, list(events)))

    def fpm(self, dp_rank: int, at_ms: float, fpm: Any) -> None:
        self.facts.append(("fpm", dp_rank, at_ms, fpm))

    def acceptance(self, dp_rank: int, at_ms: float, sample: Any) -> None:
        self.facts.append(("acceptance", dp_rank, at_ms, sample))

    def outputs(self, dp_rank: int, at_ms: float, outputs: Any) -> None:
        self.facts.append(("outputs", dp_rank, at_ms, list(outputs)))

    def lifecycle(self, dp_rank: int, at_ms: float, events: Any) -> None:
        self.facts.append(("lifecycle", dp_rank, at_ms, list(events)))

    def metrics(self, dp_rank: int, at_ms: float, metrics: Any) -> None:
        self.facts.append(("metrics", dp_rank, at_ms, metrics))

    # ------------------------------------------------------------ looking at it

    def kinds(self) -> list[str]:
        return [kind for kind, *_ in self.facts]

    def of(self, kind: str, dp_rank: int | None = None) -> list[tuple[float, Any]]:
        """(time, value) of every fact of a kind."""
        return [(at, value) for k, r, at, value in self.facts if k == kind and dp_rank in (None, r)]

    def all_outputs(self) -> list[tuple[float, Output]]:
        return [(at, output) for at, outputs in self.of("outputs") for output in outputs]

    def all_kv_events(self, dp_rank: int | None = None) -> list[KvEvent]:
        return [event for _, events in self.of("kv_events", dp_rank) for event in events]


def run(coroutine: Coroutine[Any, Any, T], *, debug: bool = False) -> T:
    """Run to the end, and find nothing left behind but the task that ran."""

    async def main() -> T:
        unhandled: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
        result = await coroutine
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        assert not unhandled, unhandled
        return result

    return asyncio.run(main(), debug=debug)


async def play(
    config: EngineConfig,
    requests: Sequence[tuple[float, Request, int | None]],
    *,
    listen: bool = False,
    clock: VirtualClock | None = None,
    **options: Any,
) -> tuple[Everything, LiveScheduler]:
    """Submit requests at their times, (arrival, request, rank or None), and let all finish."""
    clock = VirtualClock() if clock is None else clock
    sink = Everything()
    async with LiveScheduler(config, clock=clock, sinks=[sink], **options) as engine:
        for at, request, dp_rank in requests:
            if at > clock.now():
                await clock.sleep_until(at)
            await engine.submit(request, dp_rank, listen=listen)
    return sink, engine


async def collect(stream: Any) -> list[Any]:
    return [item async for item in stream]


async def within(seconds: float, condition: Callable[[], bool]) -> None:
    """Wait in real time until a condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def together(*awaitables: Awaitable[Any]) -> list[Any]:
    return list(await asyncio.gather(*awaitables))


def tokens_of(outputs: Iterable[Output]) -> list[int]:
    return [output.token_id for output in outputs if output.token_id is not None]
