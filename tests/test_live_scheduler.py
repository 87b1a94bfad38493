"""What clients of a live engine may do with it, and what it says when it breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import kvsim.live.scheduler as scheduler
from kvsim.config import EngineConfig, FixedTiming
from kvsim.contract import Request
from kvsim.errors import CommandError, ConfigError, PoisonedError, StoppedError
from kvsim.live import LiveScheduler, VirtualClock
from live_support import Everything, collect, run, together

CONFIG = EngineConfig(
    num_gpu_blocks=64, block_size=4, max_num_seqs=8, timing_model=FixedTiming(prefill_ms=10.0, decode_ms=3.0)
)


def engine_of(**options: Any) -> LiveScheduler:
    return LiveScheduler(options.pop("config", CONFIG), clock=VirtualClock(), **options)


# ---------------------------------------------------------------- outputs


def test_outputs_wait_for_whoever_asks_for_them_also_after_the_end() -> None:
    async def main() -> None:
        async with engine_of() as engine:
            await engine.submit(Request(1, range(8), 3))
            await engine.drained()
        outputs = await collect(engine.outputs(1))
        assert [output.completed for output in outputs] == [False, False, True]
        with pytest.raises(CommandError, match="request_id: there are no outputs of request 1 to take"):
            engine.outputs(1)

    run(main())


def test_nothing_is_kept_for_nobody() -> None:
    async def main() -> None:
        async with engine_of() as engine:
            await engine.submit(Request(1, range(8), 3), listen=False)
            with pytest.raises(CommandError, match="there are no outputs of request 1"):
                engine.outputs(1)
            await engine.drained()
            assert engine.in_flight == 0

    run(main())


def test_outputs_that_nobody_ever_asks_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_MOST_UNCLAIMED", 3)

    async def main() -> None:
        async with engine_of() as engine:
            for number in range(5):
                await engine.submit(Request(number, range(8), 1))
                await engine.drained()
            assert engine.unclaimed_dropped == 2
            for number in (2, 3, 4):
                assert len(await collect(engine.outputs(number))) == 1
            with pytest.raises(CommandError, match="no outputs of request 1"):
                engine.outputs(1)

    with pytest.warns(RuntimeWarning, match="outputs of request 0 were never asked for"):
        run(main())


def test_a_receiver_gets_the_outputs_of_a_pass_as_one_list() -> None:
    async def main() -> None:
        sink = Everything()
        async with engine_of(sinks=[sink]) as engine:
            receiver = engine.receiver()
            await together(*(engine.submit(Request(i, range(i, i + 8), 3), receiver=receiver) for i in range(4)))
            await engine.submit(Request(9, range(90, 98), 3))
            assert receiver.requests == {0, 1, 2, 3}
            lists = [await anext(receiver) for _ in range(3)]
            assert [len(outputs) for outputs in lists] == [4, 4, 4]
            assert receiver.requests == set()
            assert [[output.request_id for output in outputs] for outputs in lists] == [[0, 1, 2, 3]] * 3
            assert len(await collect(engine.outputs(9))) == 3
            assert [len(outputs) for _, outputs in sink.of("outputs")] == [5, 5, 5]
            with pytest.raises(CommandError, match="receiver: expected an OutputReceiver"):
                await engine.submit(Request(10, range(4)), receiver="mine")  # type: ignore[arg-type]
        assert await collect(receiver) == []

    run(main())


def test_a_receiver_that_goes_takes_all_its_requests_with_it() -> None:
    async def main() -> None:
        async with engine_of() as engine:
            receiver = engine.receiver()
            for number in range(20):
                await engine.submit(Request(number, range(8), 50), receiver=receiver)
            await engine.submit(Request(99, range(200, 208), 6))
            await anext(receiver)
            del receiver
            assert len(await collect(engine.outputs(99))) == 6
            await engine.drained()
            assert engine.in_flight == 0
            assert engine.metrics().active_blocks == 0

    run(main())


def test_an_id_is_free_again_when_its_end_was_shown() -> None:
    async def main() -> None:
        async with engine_of(dp_size=2) as engine:
            await engine.submit(Request(1, range(8), 1), 0)
            with pytest.raises(CommandError, match="request_id: 1 is already active"):
                await engine.submit(Request(1, range(8), 1), 1)
            assert len(await collect(engine.outputs(1))) == 1
            await engine.submit(Request(1, range(8), 2), 1)
            assert len(await collect(engine.outputs(1))) == 2

    run(main())


def test_a_cancel_that_follows_its_submission_at_once_finds_the_request() -> None:
    async def main() -> None:
        async with engine_of(dp_size=2) as engine:
            await engine.submit(Request(7, range(8), 2), 0)
            submitted, cancelled = await together(engine.submit(Request(8, range(8), 2), 1), engine.cancel(8))
            assert submitted.request_id == 8
            assert cancelled
            assert await collect(engine.outputs(8)) == []

    run(main())


# ---------------------------------------------------------------- metrics


def test_metrics_changed_waits_for_another_value_and_a_version_misses_none() -> None:
    async def main() -> None:
        async with engine_of() as engine:
            watch = engine.watch()
            seen = watch.version
            change = asyncio.create_task(engine.metrics_changed())
            await asyncio.sleep(0)
            await engine.submit(Request(1, range(8), 3), listen=False)
            assert (await change).waiting_requests == 1
            assert watch.version > seen
            assert await watch.changed(seen) == watch.latest
            await engine.drained()
            idle = asyncio.create_task(watch.changed())
            await asyncio.sleep(0)
        with pytest.raises(StoppedError, match="metrics will not change any more"):
            await idle

    run(main())


# ---------------------------------------------------------------- its life


def test_an_engine_runs_once() -> None:
    async def main() -> None:
        engine = engine_of()
        with pytest.raises(StoppedError, match="Submit: the engine was not started"):
            await engine.submit(Request(1, range(4)))
        async with engine:
            with pytest.raises(StoppedError, match="was started before"):
                await engine.start()
        with pytest.raises(StoppedError, match="Submit: the engine has stopped"):
            await engine.submit(Request(1, range(4)))
        with pytest.raises(StoppedError, match="drained: the engine has stopped"):
            await engine.drained()
        await engine.shutdown()

    run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_size": 0}, "dp_size: must be an int >= 1, got 0"),
        ({"seed": -1}, "seed: must be an int >= 0, got -1"),
        ({"sink_timeout_s": -1}, "sink_timeout_s: must be finite and >= 0, got -1"),
        ({"config": 3}, "config: expected None or an EngineConfig, got 3"),
        ({"sinks": [object()]}, "sinks: expected an object with one of the methods admissions"),
        ({"policy": 3}, "policy: expected a Policy or its name, got 3"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(**options)


def test_a_seed_is_added_as_in_a_replay() -> None:
    config = CONFIG.replace(aic_nextn=2, aic_nextn_accept_rates="0.5,0.5", aic_mtp_seed=3)
    assert engine_of(config=config, seed=4).config.aic_mtp_seed == 7


# ---------------------------------------------------------------- what breaks


class Breaking:
    """A timing model that fails at its third decode."""

    def __init__(self) -> None:
        self.calls = 0

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        return 10.0

    def predict_decode_ms(self, batch_size: int, active: int, context: int, total: int) -> float:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("no more")
        return 1.0


@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_pass_that_breaks_off_is_told_to_everybody_who_waits(dp_size: int) -> None:
    async def main() -> None:
        async with engine_of(timing=Breaking(), dp_size=dp_size) as engine:
            await engine.submit(Request(1, range(8), 10))
            stream, lifecycle, receiver = engine.outputs(1), engine.lifecycle(), engine.receiver()
            taken = [await anext(stream) for _ in range(3)]
            assert not any(output.completed for output in taken)
            for waiting in (anext(stream), anext(lifecycle), engine.drained(), engine.submit(Request(2, range(8)))):
                with pytest.raises(PoisonedError, match="an earlier step failed: ") as caught:
                    await waiting
                assert caught.value.__cause__ is not None
            assert await collect(receiver) == []
            assert engine.failure is not None

    with pytest.raises(PoisonedError, match="an earlier step failed"):
        run(main())


def test_an_error_of_the_body_is_not_hidden_by_the_engine() -> None:
    async def main() -> None:
        async with engine_of(timing=Breaking()) as engine:
            await engine.submit(Request(1, range(8), 10))
            with pytest.raises(PoisonedError):
                await engine.drained()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run(main())
