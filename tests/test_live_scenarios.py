"""Live scenarios of the specification, under the virtual clock and against the wall clock.

C1-C9 of acceptance-contract-replay.md, A12-A14, V4, V28-V33, V42 and V46 of acceptance-vllm.md, F6 of
acceptance-sglang-handoff.md; where a scenario does not name the engine, for each of them. The wall clock is real: what
is said about times holds for the virtual one only.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kv_index import KvIndex
from kvsim.config import EngineConfig, FixedTiming, KvbmTiers
from kvsim.contract import (
    ActivateDestination,
    Applied,
    CancelDestination,
    DestinationAccepted,
    DestinationReserved,
    Output,
    ReleaseSource,
    Request,
    ReserveDestination,
    SourceHeld,
    Stored,
    SubmitHandoffPrefill,
)
from kvsim.live import Clock, LiveScheduler, VirtualClock, WallClock
from live_support import Everything, collect, run, together

CLOCKS = {"virtual": VirtualClock, "wall": WallClock}
BACKENDS = ["vllm", "sglang", "trtllm"]


@pytest.fixture(params=CLOCKS)
def clock(request: pytest.FixtureRequest) -> Clock:
    made: Clock = CLOCKS[request.param]()
    return made


backends = pytest.mark.parametrize("backend", BACKENDS)


def config_of(backend: str = "vllm", **fields: Any) -> EngineConfig:
    return EngineConfig.for_backend(backend, **fields)


def index(sink: Everything) -> KvIndex:
    """What a router makes of the events; fails on what it could not follow."""
    made = KvIndex()
    made.replay(sink.all_kv_events())
    return made


def is_idle(engine: LiveScheduler) -> bool:
    metrics = engine.metrics()
    return metrics.cache_usage == 0.0 and metrics.active_blocks == 0 and metrics.total_blocks > 0


# ---------------------------------------------------------------- C1, V28


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_c1_two_hundred_requests(clock: Clock, shared: bool, caching: bool, chunked: bool) -> None:
    rng = np.random.default_rng(1)
    common = rng.integers(0, 50_000, 500, np.uint32)
    prompts = []
    for _ in range(200):
        own = rng.integers(0, 50_000, 500 if shared else 1000, np.uint32)
        prompts.append(np.concatenate([common, own]) if shared else own)
    config = config_of(
        num_gpu_blocks=500,
        block_size=64,
        speedup_ratio=1000.0,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        emit_kv_events=True,
    )

    async def main() -> tuple[int, Everything]:
        sink = Everything()
        async with LiveScheduler(config, clock=clock, sinks=[sink]) as engine:
            receiver = engine.receiver()
            await together(*(engine.submit(Request(i, p, 100), receiver=receiver) for i, p in enumerate(prompts)))
            seen = 0
            async for outputs in receiver:
                seen += len(outputs)
                if seen == 20_000:
                    break
            await engine.drained()
            assert is_idle(engine)
        return seen, sink

    seen, sink = run(main())
    assert seen == 20_000
    made = index(sink)
    if caching:
        assert made.stores > 0
    else:
        assert (made.stores, made.removals) == (0, 0)


# ---------------------------------------------------------------- C2, V29


@backends
def test_c2_speculative_tokens(clock: Clock, backend: str) -> None:
    config = config_of(
        backend,
        num_gpu_blocks=128,
        block_size=4,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        enable_prefix_caching=False,
        aic_nextn=2,
        aic_nextn_accept_rates="1,1",
        speedup_ratio=1000.0,
    )

    async def main() -> None:
        async with LiveScheduler(config, clock=clock) as engine:
            requests = [Request(i, range(100 * i, 100 * i + 5), 7) for i in range(24)]
            await together(*(engine.submit(request) for request in requests))
            outputs = await together(*(collect(engine.outputs(i)) for i in range(24)))
            assert [len(mine) for mine in outputs] == [7] * 24
            assert all(mine[-1].completed and not mine[-2].completed for mine in outputs)
            await engine.drained()
            assert is_idle(engine)

    run(main())


# ---------------------------------------------------------------- C3, V30


@backends
def test_c3_requests_that_come_one_by_one(clock: Clock, backend: str) -> None:
    config = config_of(backend, num_gpu_blocks=100, block_size=64, speedup_ratio=10.0)
    # A tenth of the spacing where time is real.
    spacing = 100.0 if isinstance(clock, VirtualClock) else 10.0

    async def main() -> None:
        async with LiveScheduler(config, clock=clock) as engine:
            streams = []
            for i in range(10):
                await engine.submit(Request(i, [7] * 65, 10))
                streams.append(asyncio.create_task(collect(engine.outputs(i))))
                await clock.sleep(spacing)
            assert [len(outputs) for outputs in await together(*streams)] == [10] * 10
            await engine.drained()
            metrics = engine.metrics()
            if backend != "sglang":
                assert is_idle(engine)
            assert metrics.running_requests == metrics.waiting_requests == 0
            assert metrics.total_blocks == 100

    run(main())


# ---------------------------------------------------------------- C4, V31


@backends
@pytest.mark.parametrize("how", ["aclose", "garbage", "receiver"])
def test_c4_the_client_goes_away(clock: Clock, backend: str, how: str) -> None:
    config = config_of(
        backend, num_gpu_blocks=10, block_size=64, speedup_ratio=100.0, enable_prefix_caching=backend != "sglang"
    )

    async def main() -> None:
        async with LiveScheduler(config, clock=clock) as engine:
            stream: Any = None
            if how == "receiver":
                stream = engine.receiver()
                await engine.submit(Request(1, range(256), 200), receiver=stream)
            else:
                await engine.submit(Request(1, range(256), 200))
                stream = engine.outputs(1)
            for _ in range(129):
                await anext(stream)
            assert engine.metrics().active_blocks > 0
            if how == "aclose":
                await stream.aclose()
            del stream
            async with asyncio.timeout(5.0):
                while not is_idle(engine):
                    await engine.metrics_changed()
            assert engine.in_flight == 0
            await engine.drained()
            engine.ranks[0].check_integrity()

    run(main())


# ---------------------------------------------------------------- C5, V32


@backends
def test_c5_stores_carry_token_ids(clock: Clock, backend: str) -> None:
    config = config_of(
        backend,
        num_gpu_blocks=12,
        block_size=4,
        max_num_batched_tokens=8,
        max_num_seqs=1,
        speedup_ratio=1000.0,
        emit_kv_events=True,
        emit_kv_token_ids=True,
    )

    async def main() -> Everything:
        sink = Everything()
        async with LiveScheduler(config, clock=clock, sinks=[sink]) as engine:
            await engine.submit(Request(1, range(8), 1))
            first = await anext(engine.outputs(1))
            assert first.completed
            await engine.drained()
        return sink

    events = run(main()).all_kv_events()
    stored = [event.data for event in events if isinstance(event.data, Stored)]
    assert stored
    tokens = [block.token_ids for data in stored for block in data.blocks]
    assert tokens[:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert all(tokens)


# ---------------------------------------------------------------- C6, V33


@backends
def test_c6_identical_prompts_in_a_tight_pool(clock: Clock, backend: str) -> None:
    config = config_of(
        backend,
        num_gpu_blocks=6,
        block_size=4,
        max_num_batched_tokens=8,
        max_num_seqs=3,
        speedup_ratio=1000.0,
        emit_kv_events=True,
    )

    async def main() -> Everything:
        sink = Everything()
        async with LiveScheduler(config, clock=clock, sinks=[sink]) as engine:
            for i in range(8):
                await engine.submit(Request(i, [42] * 8, 4))
            async with asyncio.timeout(5.0):
                outputs = await together(*(collect(engine.outputs(i)) for i in range(8)))
            assert sum(map(len, outputs)) == 32
        return sink

    assert index(run(main())).stores > 0


# ---------------------------------------------------------------- C7, V42


@backends
def test_c7_the_first_output_comes_with_a_snapshot(clock: Clock, backend: str) -> None:
    config = config_of(
        backend,
        num_gpu_blocks=16,
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        enable_prefix_caching=False,
        speedup_ratio=0.0,
    )

    async def main() -> None:
        sink = Everything()
        async with LiveScheduler(config, clock=clock, sinks=[sink]) as engine:
            await engine.submit(Request(1, range(8), 2))
            await anext(engine.outputs(1))
            snapshots = [fpm for _, fpm in sink.of("fpm")]
            assert snapshots
            assert snapshots[0].num_prefill_requests == 1
            assert snapshots[0].sum_prefill_tokens > 0
            assert snapshots[0].duration_ms > 0

    run(main())


# ---------------------------------------------------------------- C8, V4


@backends
def test_c8_a_decode_worker_needs_no_further_wake(clock: Clock, backend: str) -> None:
    config = config_of(
        backend,
        worker_type="decode",
        num_gpu_blocks=4,
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        speedup_ratio=1000.0,
    )

    async def main() -> None:
        async with LiveScheduler(config, clock=clock) as engine:
            await engine.submit(Request(1, range(4), 1))
            async with asyncio.timeout(1.0):
                outputs = await collect(engine.outputs(1))
            assert [output.completed for output in outputs] == [True]

    run(main())


# ---------------------------------------------------------------- F6


@backends
def test_f6_a_blocked_rank_wakes_when_the_reservation_is_cancelled(clock: Clock, backend: str) -> None:
    config = config_of(
        backend,
        worker_type="decode",
        num_gpu_blocks=3 if backend == "trtllm" else 2,
        block_size=4,
        max_num_seqs=2,
        speedup_ratio=1000.0,
    )

    async def main() -> None:
        sink = Everything()
        async with LiveScheduler(config, clock=clock, sinks=[sink]) as engine:
            reserved = await engine.command(ReserveDestination(1, Request(2, [1] * 8, 1)))
            assert len(reserved.lifecycle_events) == 1
            await engine.submit(Request(3, [2] * 4, 1))
            stream = engine.outputs(3)
            # SGLang tries again while its new-token ratio falls, some six hundred times.
            await clock.sleep(200.0)
            passes, shown = engine.passes, len(sink.facts)
            await clock.sleep(20.0)
            assert (engine.passes, len(sink.facts)) == (passes, shown)
            assert not sink.of("outputs")
            assert (await engine.command(CancelDestination(1))).result == Applied()
            (output,) = await collect(stream)
            assert output.completed

    run(main())


# ---------------------------------------------------------------- what a pass shows does not depend on the clock


@backends
def test_what_the_clients_get_is_the_same_against_both_clocks(backend: str) -> None:
    """Two requests that are there from the start: whatever the wall clock does, their passes are those of the model."""
    config = config_of(
        backend,
        num_gpu_blocks=8,
        block_size=4,
        max_num_seqs=2,
        emit_kv_events=True,
        timing_model=FixedTiming(prefill_ms=2.0, decode_ms=1.0),
    )

    async def main(clock: Clock) -> list[Any]:
        sink = Everything()
        async with LiveScheduler(config, clock=clock, sinks=[sink]) as engine:
            await together(*(engine.submit(Request(i, range(i, i + 7), 6), listen=False) for i in range(2)))
        return [(kind, value) for kind, _, _, value in sink.facts if kind != "fpm"]

    assert run(main(VirtualClock())) == run(main(WallClock()))


@backends
def test_a_handoff_between_two_engines_on_one_clock(clock: Clock, backend: str) -> None:
    fields: dict[str, Any] = {"num_gpu_blocks": 32, "block_size": 4, "max_num_seqs": 4, "speedup_ratio": 100.0}

    async def main() -> list[Output]:
        prefill = LiveScheduler(config_of(backend, worker_type="prefill", **fields), clock=clock)
        decode = LiveScheduler(config_of(backend, worker_type="decode", **fields), clock=clock, worker_id=1)
        async with prefill, decode:
            prompt = range(12)
            accepted = await decode.command(ReserveDestination(1, Request(7, prompt, 4)), listen=True)
            assert accepted.result == DestinationAccepted(7)
            reserved = await anext(decode.lifecycle())
            assert isinstance(reserved, DestinationReserved)
            assert reserved.transferable_prompt_tokens == 12
            await prefill.command(SubmitHandoffPrefill(1, Request(7, prompt, 1)))
            held = await anext(prefill.lifecycle())
            assert isinstance(held, SourceHeld)
            await clock.sleep(1.0)  # the transfer
            assert (await decode.command(ActivateDestination(1))).result == Applied()
            assert (await prefill.command(ReleaseSource(1))).result == Applied()
            outputs = await collect(decode.outputs(7))
            await together(prefill.drained(), decode.drained())
        return outputs

    outputs = run(main())
    assert len(outputs) == 4
    assert outputs[-1].completed


# ---------------------------------------------------------------- KVBM tiers


@pytest.mark.parametrize("ruleset", ["dynamo", "dynamo-1.3"])
def test_a_destination_waits_for_the_copy_of_what_it_displaces_while_a_pass_runs(ruleset: str) -> None:
    """C9 and V46 with live commands. Under `dynamo` nothing of a pass is shown before its end."""
    config = config_of(
        ruleset=ruleset,
        num_gpu_blocks=2,
        block_size=4,
        max_num_seqs=2,
        emit_kv_events=True,
        timing_model=FixedTiming(prefill_ms=50.0, decode_ms=1000.0),
        kv_cache_bytes_per_token=5_000_000,
        kvbm_tiers=KvbmTiers(num_g2_blocks=8, g1_to_g2_gbps=1.0),
    )

    async def main() -> None:
        clock, sink = VirtualClock(), Everything()

        def host_events() -> list[float]:
            return [at for at, events in sink.of("kv_events") for e in events if e.storage_tier == "host_pinned"]

        engine = LiveScheduler(config, clock=clock, sinks=[sink])
        async with engine:
            rank, lifecycle = engine.ranks[0], engine.lifecycle()
            await engine.submit(Request(1, range(4), 1))
            await collect(engine.outputs(1))
            assert (engine.metrics().active_blocks, engine.metrics().inactive_blocks) == (0, 1)
            # One token less than in the scenario: it decodes while the copy goes on, and must not need a second block.
            await engine.submit(Request(2, [9, 9], 100))
            blocker = engine.outputs(2)
            assert not (await anext(blocker)).completed
            start = clock.now()
            assert start == (100.0 if ruleset == "dynamo" else start)
            assert (engine.metrics().active_blocks, engine.metrics().inactive_blocks) == (1, 1)
            # Between two passes of the blocker.
            reserved = await engine.command(ReserveDestination(1, Request(3, range(4, 8), 1)))
            assert reserved.result == DestinationAccepted(3)
            assert (reserved.lifecycle_events, len(lifecycle)) == ([], 0)
            assert rank.next_internal_deadline_ms() == pytest.approx(start + 20.0, abs=0.01)
            await clock.sleep_until(start + 19.0)
            assert rank.metrics().active_blocks == 2
            assert rank.next_internal_deadline_ms() == pytest.approx(start + 20.0, abs=0.01)
            assert host_events() == []
            await clock.sleep_until(start + 21.0)
            assert rank.metrics().active_blocks == 1
            assert rank.next_internal_deadline_ms() is None
            assert (len(lifecycle), len(rank.block_table(3))) == (0, 0)
            at_once = pytest.approx([start + 20.0], abs=0.01)
            assert host_events() == ([] if ruleset == "dynamo" else at_once)
            event = await anext(lifecycle)
            assert (event.handoff_id, event.request_id, clock.now()) == (1, 3, start + 1000.0)
            assert len(rank.block_table(3)) == 1
            assert host_events() == ([clock.now()] if ruleset == "dynamo" else at_once)
            rank.check_integrity()
            await engine.shutdown(drain=False)

    run(main())


@pytest.mark.parametrize(
    ("num_g2_blocks", "bytes_per_token", "attached"),
    [(8, 131_072, True), (None, 131_072, False), (8, None, False), (None, None, False)],
)
def test_kvbm_tiers_are_attached_if_they_have_blocks_of_a_known_size(
    num_g2_blocks: int | None, bytes_per_token: int | None, attached: bool
) -> None:
    """A12, A13 and A14: what leaves the device goes to G2, or is gone."""
    config = config_of(
        num_gpu_blocks=8,
        block_size=4,
        emit_kv_events=True,
        kv_cache_bytes_per_token=bytes_per_token,
        kvbm_tiers=None if num_g2_blocks is None else KvbmTiers(num_g2_blocks=num_g2_blocks),
        timing_model=FixedTiming(prefill_ms=10.0, decode_ms=3.0),
    )

    async def main() -> Everything:
        clock, sink = VirtualClock(), Everything()
        async with LiveScheduler(config, clock=clock, sinks=[sink]) as engine:
            assert (engine.config.tiers_attached is not None) is attached
            assert engine.ranks[0].next_internal_deadline_ms() is None
            for number in range(3):
                await engine.submit(Request(number, range(100 * number, 100 * number + 16), 1))
                await collect(engine.outputs(number))
            await engine.drained()
            assert engine.ranks[0].next_internal_deadline_ms() is None
        return sink

    tiers = {event.storage_tier for event in run(main()).all_kv_events()}
    assert tiers == ({"device", "host_pinned"} if attached else {"device"})


# ---------------------------------------------------------------- several engines


def test_engines_on_one_virtual_clock_see_one_time() -> None:
    config = config_of(num_gpu_blocks=64, block_size=16, timing_model=FixedTiming(prefill_ms=30.0, decode_ms=10.0))

    async def main() -> list[list[float]]:
        clock = VirtualClock()
        times: list[list[float]] = [[], []]

        async def client(engine: LiveScheduler, number: int) -> None:
            await clock.sleep_until(5.0 * number)
            await engine.submit(Request(number, range(20), 3))
            async for _ in engine.outputs(number):
                times[number].append(clock.now())

        async with LiveScheduler(config, clock=clock) as one, LiveScheduler(config, clock=clock, worker_id=1) as other:
            await together(client(one, 0), client(other, 1))
        return times

    assert run(main()) == [[30.0, 40.0, 50.0], [35.0, 45.0, 55.0]]


def test_virtual_clocks_beside_each_other_do_not_wait_for_one_another() -> None:
    config = config_of(num_gpu_blocks=64, block_size=16, timing_model=FixedTiming(prefill_ms=30.0, decode_ms=10.0))

    async def one(wait: float) -> float:
        clock = VirtualClock()
        async with LiveScheduler(config, clock=clock) as engine:
            await clock.sleep(wait)
            await engine.submit(Request(1, range(20), 3))
            await collect(engine.outputs(1))
        return clock.now()

    async def main() -> list[float]:
        return await together(one(0.0), one(1000.0))

    assert run(main()) == [50.0, 1050.0]


def test_a_group_has_one_barrier_and_a_rank_each_for_what_it_shows(clock: Clock) -> None:
    config = config_of(num_gpu_blocks=64, block_size=16, timing_model=FixedTiming(prefill_ms=3.0, decode_ms=1.0))

    async def main() -> Everything:
        sink = Everything()
        async with LiveScheduler(config, dp_size=2, clock=clock, sinks=[sink]) as engine:
            await together(*(engine.submit(Request(i, range(20), 2 + i)) for i in range(3)))
            outputs = await together(*(collect(engine.outputs(i)) for i in range(3)))
            assert [len(mine) for mine in outputs] == [2, 3, 4]
        return sink

    sink = run(main())
    assert {output.request_id for _, outputs in sink.of("outputs", 0) for output in outputs} == {0, 2}
    assert {output.request_id for _, outputs in sink.of("outputs", 1) for output in outputs} == {1}
    ends = [[at for at, _ in sink.of("fpm", rank)] for rank in range(2)]
    assert ends[0] == ends[1]


def test_a_draining_shutdown_lets_everything_finish(clock: Clock) -> None:
    config = config_of(num_gpu_blocks=64, block_size=16, speedup_ratio=1000.0)
    streams: list[Any] = []

    async def main() -> None:
        async with LiveScheduler(config, clock=clock) as engine:
            for i in range(20):
                await engine.submit(Request(i, range(i, i + 50), 20))
                streams.append(engine.outputs(i))
        for stream in streams:
            assert len(await collect(stream)) == 20

    run(main())
