"""What a live rank shows, and in which order: every row of the table in spec/engine-contract.md section 8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvsim.config import EngineConfig, FixedTiming, NativeHostOffload, SglangConfig
from kvsim.contract import (
    ActivateDestination,
    Admission,
    Applied,
    CancelDestination,
    CancelRequest,
    CommandEffects,
    DestinationAccepted,
    DestinationReserved,
    ForwardPassMetrics,
    InternalEffects,
    KvEvent,
    Metrics,
    Noop,
    Output,
    PassCompletionEffects,
    PassStartEffects,
    PressureEvent,
    PressureState,
    ReleaseSource,
    Removed,
    Request,
    ReserveDestination,
    SourceHeld,
    Stored,
    SubmitHandoffPrefill,
)
from kvsim.errors import CommandError
from kvsim.live import LiveScheduler, VirtualClock
from kvsim.live.publication import ORDER, Fact, Moment, Publisher, attach
from kvsim.live.streams import LifecycleStream, MetricsWatch
from live_support import Everything, collect, run

TEN_THREE = FixedTiming(prefill_ms=10.0, decode_ms=3.0)

# ---------------------------------------------------------------- the table, with facts of every kind

METRICS = Metrics(0, 3, 0, 8, 0.375, 0.375, 1, 0, 0)
KV = [KvEvent(0, 0, 0, Removed((1,)))]
CLEANUP_KV = [KvEvent(1, 0, 0, Removed((2,)))]
LIFECYCLE: list[Any] = [DestinationReserved(5, 6, 4)]
OUTPUT = Output(1, 7, completed=False, rejected=False, cached_tokens=None)
FPM = ForwardPassMetrics(1, 4, 0.0, 0, 0, 0, 0.0, 0, 0, 0.0, 0, 0, 0.0, 10.0)
PRESSURE = PressureEvent(0.0, "vllm_preemption", 1, PressureState(1, 0, 2), PressureState(0, 1, 0), 2, None, None)


class Table:
    """A publisher whose sink, client and watcher write into one list."""

    def __init__(self) -> None:
        self.sink = Everything()
        self.watch = MetricsWatch(METRICS._replace(active_blocks=0))
        self.lifecycle = LifecycleStream(8, lambda: None)
        self.delivered: list[Output] = []
        self.publisher = Publisher(
            0,
            [attach(self.sink)],
            lambda rank, outputs: self.delivered.extend(outputs),
            self.lifecycle,
            self.watch,
            True,
        )

    def reply(self, effects: CommandEffects) -> None:
        self.sink.facts.append(("reply", 0, 0.0, effects))

    def clean_up(self, dp_rank: int) -> CommandEffects | None:
        return CommandEffects(Applied(), [], CLEANUP_KV, (1,), METRICS)

    def facts(self) -> list[Fact]:
        return [Fact.CLEANUP_KV_EVENTS if value == CLEANUP_KV else Fact(kind) for kind, _, _, value in self.sink.facts]


def completion(*, empty: bool = False) -> PassCompletionEffects:
    if empty:
        return PassCompletionEffects([], [], [], METRICS, FPM)
    return PassCompletionEffects([OUTPUT], LIFECYCLE, KV, METRICS, FPM)


FULL: dict[Moment, Callable[[Table], Any]] = {
    Moment.PASS_START: lambda t: t.publisher.pass_start(0.0, PassStartEffects([Admission(1, 0)], [PRESSURE], KV)),
    Moment.PASS_END: lambda t: t.publisher.pass_end(0.0, completion(), t.clean_up),
    Moment.IDLE_COMMAND: lambda t: t.publisher.idle_command(
        0.0, CommandEffects(Applied(), LIFECYCLE, KV, (), METRICS), t.reply
    ),
    Moment.INTERNAL_WORK: lambda t: t.publisher.internal_work(0.0, InternalEffects(LIFECYCLE, KV), METRICS),
    Moment.MID_PASS_TRANSFER: lambda t: t.publisher.mid_pass_transfer(0.0, InternalEffects([], KV)),
    Moment.CLEANUP: lambda t: t.publisher.cleanup(0.0, CommandEffects(Applied(), LIFECYCLE, CLEANUP_KV, (), METRICS)),
    Moment.GIVEN_UP: lambda t: t.publisher.given_up(0.0, OUTPUT, METRICS),
}
EMPTY: dict[Moment, tuple[Callable[[Table], Any], list[Fact]]] = {
    Moment.PASS_START: (lambda t: t.publisher.pass_start(0.0, PassStartEffects([], [], [])), []),
    Moment.PASS_END: (
        lambda t: t.publisher.pass_end(0.0, completion(empty=True), lambda rank: None),
        [Fact.FPM, Fact.ACCEPTANCE, Fact.METRICS],
    ),
    Moment.IDLE_COMMAND: (
        lambda t: t.publisher.idle_command(0.0, CommandEffects(Noop(), metrics=METRICS), t.reply),
        [Fact.REPLY, Fact.METRICS],
    ),
    Moment.INTERNAL_WORK: (lambda t: t.publisher.internal_work(0.0, InternalEffects(), METRICS), [Fact.METRICS]),
    Moment.MID_PASS_TRANSFER: (lambda t: t.publisher.mid_pass_transfer(0.0, InternalEffects()), []),
}


@pytest.mark.parametrize("moment", FULL, ids=lambda moment: moment.value)
def test_each_moment_shows_its_facts_in_the_order_of_the_table(moment: Moment) -> None:
    table = Table()
    FULL[moment](table)
    assert table.facts() == list(ORDER[moment])


@pytest.mark.parametrize("moment", EMPTY, ids=lambda moment: moment.value)
def test_what_is_empty_is_not_shown(moment: Moment) -> None:
    table = Table()
    show, shown = EMPTY[moment]
    show(table)
    assert table.facts() == shown


def test_facts_reach_clients_coordinators_and_watchers_too() -> None:
    table = Table()
    table.publisher.pass_end(0.0, completion(), lambda rank: None)
    assert table.delivered == [OUTPUT]
    assert len(table.lifecycle) == 1
    assert table.watch.latest == METRICS


def test_metrics_after_a_cleanup_keep_what_the_pass_found_in_the_cache() -> None:
    table = Table()
    shown = completion()
    shown.metrics = METRICS._replace(sglang_cache_hit_tokens=4, sglang_cache_total_tokens=8)
    table.publisher.pass_end(0.0, shown, table.clean_up)
    assert table.watch.latest == METRICS._replace(sglang_cache_hit_tokens=4, sglang_cache_total_tokens=8)


def test_a_plain_kv_sink_sees_the_device_and_one_with_tiers_everything() -> None:
    class Plain:
        delivery = "inline"

        def __init__(self) -> None:
            self.seen: list[KvEvent] = []

        def kv_events(self, dp_rank: int, at_ms: float, events: Any) -> None:
            self.seen += events

    class Both(Plain):
        def kv_events_with_tier(self, dp_rank: int, at_ms: float, events: Any) -> None:
            self.seen += events

    plain, both = Plain(), Both()
    watch, lifecycle = MetricsWatch(METRICS), LifecycleStream(8, lambda: None)
    publisher = Publisher(0, [attach(plain), attach(both)], lambda rank, outputs: None, lifecycle, watch, True)
    events = [*KV, KvEvent(1, 0, 0, Removed((9,)), "host_pinned")]
    publisher.pass_start(0.0, PassStartEffects([], [], events))
    assert plain.seen == KV
    assert both.seen == events
    publisher.pass_start(0.0, PassStartEffects([], [], events[1:]))
    assert plain.seen == KV


# ---------------------------------------------------------------- the same of engines


def engine_config(backend: str = "vllm", **more: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "num_gpu_blocks": 16,
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "emit_kv_events": True,
        "timing_model": TEN_THREE,
    }
    return EngineConfig.for_backend(backend, **(values | more))


BACKENDS = pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
RULESETS = pytest.mark.parametrize("ruleset", ["dynamo", "dynamo-1.3"])


@BACKENDS
@RULESETS
def test_a_pass_shows_admissions_at_its_start_and_the_rest_at_its_end(backend: str, ruleset: str) -> None:
    async def main() -> Everything:
        sink = Everything()
        clock = VirtualClock()
        async with LiveScheduler(engine_config(backend, ruleset=ruleset), clock=clock, sinks=[sink]) as engine:
            await engine.submit(Request(1, range(8), 2))
            sink.facts.clear()
            await clock.sleep(9.0)
            started = list(sink.facts)
            await clock.sleep_until(14.0)
            sink.facts = [*started, ("mark", 0, 0.0, None), *sink.facts[len(started) :]]
        return sink

    sink = run(main())
    kinds = [(kind, at) for kind, _, at, _ in sink.facts]
    at_start = backend != "sglang" and ruleset == "dynamo-1.3"
    started = [("admissions", 0.0), ("kv_events", 0.0)] if at_start else [("admissions", 0.0)]
    mark = kinds.index(("mark", 0.0))
    assert kinds[:mark] == started
    first_end = kinds[mark + 1][1]
    assert first_end == pytest.approx(13.0 if ruleset == "dynamo-1.3" else 10.0)
    ended = [kind for kind, at in kinds[mark + 1 :] if at == first_end]
    assert ended[: 4 if at_start else 5] == (
        ["fpm", "acceptance", "outputs", "metrics"]
        if at_start
        else ["kv_events", "fpm", "acceptance", "outputs", "metrics"]
    )


@BACKENDS
def test_there_is_one_snapshot_per_pass_and_no_empty_list(backend: str) -> None:
    async def main() -> Everything:
        sink = Everything()
        async with LiveScheduler(engine_config(backend), clock=VirtualClock(), sinks=[sink]) as engine:
            for number in range(5):
                await engine.submit(Request(number, range(number, number + 9), 4))
        return sink

    sink = run(main())
    ends = [at for at, _ in sink.of("fpm")]
    assert ends == sorted(set(ends))
    assert {at for at, _ in sink.of("outputs")} <= set(ends)
    assert all(value for kind, _, _, value in sink.facts)


def test_metrics_start_with_an_empty_pool() -> None:
    async def main() -> None:
        async with LiveScheduler(engine_config(), dp_size=2, clock=VirtualClock()) as engine:
            for dp_rank in range(2):
                metrics = engine.metrics(dp_rank)
                assert (metrics.dp_rank, metrics.active_blocks, metrics.total_blocks) == (dp_rank, 0, 16)
                assert (metrics.cache_usage, metrics.running_requests, metrics.waiting_requests) == (0.0, 0, 0)

    run(main())


# ---------------------------------------------------------------- commands


def decode_config(backend: str = "vllm", **more: Any) -> EngineConfig:
    return engine_config(backend, worker_type="decode", **more)


@BACKENDS
def test_an_idle_command_shows_kv_events_then_answers_then_lifecycle_then_metrics(backend: str) -> None:
    async def main() -> tuple[list[str], CommandEffects]:
        sink = Everything()
        async with LiveScheduler(decode_config(backend), clock=VirtualClock(), sinks=[sink]) as engine:
            effects = await engine.command(ReserveDestination(1, Request(2, range(8), 1)))
            assert effects.result == DestinationAccepted(2)
            assert [type(event) for event in effects.lifecycle_events] == [DestinationReserved]
            reserved = sink.kinds()
            sink.facts.clear()
            activated = await engine.command(ActivateDestination(1))
            assert activated.result == Applied()
            return [*reserved, "|", *sink.kinds()], activated

    kinds, activated = run(main())
    first, second = " ".join(kinds).split(" | ")
    assert first == "lifecycle metrics"
    # SGLang hands out the events of an activation with those of a later pass.
    assert bool(activated.kv_events) == (backend != "sglang")
    assert second.startswith("metrics" if backend == "sglang" else "kv_events metrics")


@BACKENDS
def test_a_command_in_the_middle_of_a_pass_only_answers(backend: str) -> None:
    """Its KV events come at the end, with those of the pass; so do lifecycle events and metrics."""

    async def main() -> None:
        sink, clock = Everything(), VirtualClock()
        async with LiveScheduler(decode_config(backend), clock=clock, sinks=[sink]) as engine:
            lifecycle = engine.lifecycle()
            await engine.submit(Request(1, range(100, 104), 3))
            await engine.command(ReserveDestination(1, Request(2, range(8), 1)))
            assert isinstance(await anext(lifecycle), DestinationReserved)
            while not sink.of("admissions"):
                await clock.sleep(0.5)
            await clock.sleep(0.5)
            assert engine.ranks[0].metrics().running_requests == 1
            before = list(sink.facts)
            metrics = engine.metrics()
            activated = await engine.command(ActivateDestination(1))
            second = await engine.command(ReserveDestination(3, Request(4, range(200, 204), 1)))
            assert activated.result == Applied()
            assert second.result == DestinationAccepted(4)
            for effects in (activated, second):
                assert not effects.kv_events
                assert not effects.lifecycle_events
            assert sink.facts == before
            assert engine.metrics() == metrics
            reserved = await anext(lifecycle)
            assert (reserved.handoff_id, reserved.request_id) == (3, 4)
            shown = sink.facts[len(before) :]
            end = shown[0][2]
            kinds = [kind for kind, _, at, _ in shown if at == end]
            kinds = kinds[: kinds.index("metrics") + 1]
            if backend == "sglang":
                assert kinds == ["fpm", "acceptance", "outputs", "lifecycle", "metrics"]
            else:
                assert kinds == ["kv_events", "fpm", "acceptance", "outputs", "lifecycle", "metrics"]
                stored = [event for event in shown[0][3] if isinstance(event.data, Stored)]
                assert sum(len(event.data.blocks) for event in stored) >= 2  # the activated prompt
            await engine.command(CancelDestination(3))
        assert await collect(lifecycle) == []

    run(main())


@BACKENDS
@pytest.mark.parametrize("busy", [False, True])
def test_a_refused_command_raises_where_it_was_called_and_shows_nothing(backend: str, busy: bool) -> None:
    async def main() -> None:
        sink, clock = Everything(), VirtualClock()
        async with LiveScheduler(engine_config(backend), clock=clock, sinks=[sink]) as engine:
            await engine.submit(Request(1, range(8), 2))
            if busy:
                await clock.sleep(1.0)
            before, digest = list(sink.facts), engine.ranks[0].digest()
            with pytest.raises(CommandError, match="request_id: 1 is already active"):
                await engine.submit(Request(1, range(4), 2))
            with pytest.raises(CommandError, match="the prompt must have 1 <= tokens"):
                await engine.submit(Request(2, [], 2))
            with pytest.raises(CommandError, match="max_output_tokens: must lie in 0 <= n"):
                await engine.submit(Request(2, range(4), -1))
            if busy:
                assert sink.facts == before
                assert engine.ranks[0].digest() == digest

    run(main())


def test_a_command_of_no_known_kind_is_refused() -> None:
    async def main() -> None:
        async with LiveScheduler(engine_config(), dp_size=2, clock=VirtualClock()) as engine:
            with pytest.raises(CommandError, match="command: expected a Command"):
                await engine.command("nonsense")  # type: ignore[arg-type]
            with pytest.raises(CommandError, match="request: expected a Request"):
                await engine.submit("nonsense")  # type: ignore[arg-type]
            with pytest.raises(CommandError, match="dp_rank: must lie in 0 <= dp_rank < 2, got 2"):
                await engine.submit(Request(1, range(4)), 2)
            with pytest.raises(CommandError, match="dp_rank: must lie in 0 <= dp_rank < 2, got -1"):
                await engine.command(CancelRequest(1), -1)
            assert engine.failure is None

    run(main())


@BACKENDS
def test_cancelling_in_the_middle_of_a_pass_withdraws_its_output(backend: str) -> None:
    async def main() -> None:
        sink, clock = Everything(), VirtualClock()
        async with LiveScheduler(engine_config(backend), clock=clock, sinks=[sink]) as engine:
            await engine.submit(Request(1, range(8), 4))
            stream = engine.outputs(1)
            await clock.sleep(1.0)
            assert await engine.cancel(1)
            assert await collect(stream) == []
            assert engine.in_flight == 0
            assert not await engine.cancel(1)
            await engine.drained()
            assert engine.metrics().active_blocks == 0 or backend == "sglang"
        assert not sink.of("outputs")
        assert len(sink.of("fpm")) == 1

    run(main())


@BACKENDS
def test_a_request_that_ends_in_the_pass_is_withdrawn_only_if_asked(backend: str) -> None:
    async def main(discard: bool) -> tuple[CommandEffects, list[Output]]:
        clock = VirtualClock()
        async with LiveScheduler(engine_config(backend), clock=clock) as engine:
            await engine.submit(Request(1, range(8), 1))
            stream = engine.outputs(1)
            await clock.sleep(1.0)
            effects = await engine.command(CancelRequest(1, discard))
            return effects, await collect(stream)

    kept, outputs = run(main(False))
    assert (kept.result, kept.suppressed_pending_output, len(outputs)) == (Noop(), False, 1)
    gone, outputs = run(main(True))
    assert (gone.result, gone.suppressed_pending_output, outputs) == (Noop(), True, [])


# ---------------------------------------------------------------- passes without duration


@BACKENDS
def test_a_pass_without_duration_that_does_something_is_followed_by_the_next_at_once(backend: str) -> None:
    async def main() -> Everything:
        sink = Everything()
        free = engine_config(backend, timing_model=FixedTiming(prefill_ms=0.0, decode_ms=0.0))
        async with LiveScheduler(free, clock=VirtualClock(), sinks=[sink]) as engine:
            await engine.submit(Request(1, range(8), 4))
            stream = engine.outputs(1)
            assert len(await collect(stream)) == 4
        return sink

    sink = run(main())
    assert len(sink.of("outputs")) >= 4
    assert sink.kinds().index("admissions") < sink.kinds().index("fpm")


@BACKENDS
def test_a_pass_that_does_nothing_waits_for_something_to_happen(backend: str) -> None:
    """Scenario F6 of acceptance-sglang-handoff.md, and its like for the paged engines."""

    async def main() -> None:
        sink, clock = Everything(), VirtualClock()
        # TensorRT-LLM reserves the block of the output, too.
        config = decode_config(backend, num_gpu_blocks=3 if backend == "trtllm" else 2, max_num_seqs=2)
        async with LiveScheduler(config, clock=clock, sinks=[sink]) as engine:
            reserved = await engine.command(ReserveDestination(1, Request(2, [1] * 8, 1)))
            assert len(reserved.lifecycle_events) == 1
            await engine.submit(Request(3, [2] * 4, 1))
            stream = engine.outputs(3)
            await clock.sleep(1.0)
            passes, facts = engine.passes, len(sink.facts)
            assert engine.metrics().waiting_requests >= 1
            await clock.sleep(1000.0)
            assert engine.passes == passes
            assert len(sink.facts) == facts
            assert not sink.of("fpm")
            assert (await engine.command(CancelDestination(1))).result == Applied()
            outputs = await collect(stream)
            assert [output.completed for output in outputs] == [True]
            assert outputs[0].token_id is not None

    run(main())


def test_a_request_that_can_never_run_ends_as_in_a_replay() -> None:
    async def main() -> None:
        sink, clock = Everything(), VirtualClock()
        async with LiveScheduler(engine_config(num_gpu_blocks=2), clock=clock, sinks=[sink]) as engine:
            await engine.submit(Request(1, range(40), 1))
            await engine.submit(Request(2, range(4), 1))
            (end,) = await collect(engine.outputs(1))
            assert (end.rejected, end.completed, end.token_id) == (True, True, None)
            assert [output.completed for output in await collect(engine.outputs(2))] == [True]

    run(main())


# ---------------------------------------------------------------- transfers of the host tier


def host_config(**more: Any) -> EngineConfig:
    return engine_config(
        num_gpu_blocks=8,
        kv_cache_bytes_per_token=1_000_000,
        native_host_offload=NativeHostOffload(num_host_blocks=8, d2h_bandwidth_gbps=0.5, h2d_bandwidth_gbps=0.5),
        **more,
    )


def test_a_transfer_that_ends_in_an_idle_rank_is_shown_at_its_own_time() -> None:
    async def main() -> Everything:
        sink, clock = Everything(), VirtualClock()
        async with LiveScheduler(host_config(), clock=clock, sinks=[sink]) as engine:
            await engine.submit(Request(1, range(8), 1))
            await engine.drained()
            assert clock.now() > 10.0
        return sink

    sink = run(main())
    host = [(at, e) for at, events in sink.of("kv_events") for e in events if e.storage_tier == "host_pinned"]
    # 8 tokens of 1 MB at 0.5 GB/s after the pass of 10 ms.
    assert [at for at, _ in host] == [pytest.approx(26.0)]
    last = [kind for kind, _, at, _ in sink.facts if at == host[0][0]]
    assert last == ["kv_events", "metrics"]


def test_a_draining_shutdown_waits_for_transfers() -> None:
    async def main() -> tuple[Everything, float]:
        sink, clock = Everything(), VirtualClock()
        async with LiveScheduler(host_config(), clock=clock, sinks=[sink]) as engine:
            await engine.submit(Request(1, range(8), 1), listen=False)
        assert engine.ranks[0].is_drained()
        return sink, clock.now()

    sink, end = run(main())
    assert end == pytest.approx(26.0)
    assert any(event.storage_tier == "host_pinned" for event in sink.all_kv_events())


# ---------------------------------------------------------------- a receiver that is gone


@BACKENDS
def test_outputs_nobody_takes_end_the_request_at_the_same_boundary(backend: str) -> None:
    """Outputs, then KV events of the cleanup, then lifecycle events, then metrics of after it."""

    async def main() -> None:
        sink, clock = Everything(), VirtualClock()
        config = decode_config(backend, num_gpu_blocks=4, max_num_seqs=4)
        async with LiveScheduler(config, clock=clock, sinks=[sink]) as engine:
            # Blocks in the cache, which the destination below will evict.
            await engine.submit(Request(9, range(300, 304), 1))
            await engine.drained()
            await engine.submit(Request(1, range(8), 4))
            stream = engine.outputs(1)
            await anext(stream)
            reserved = await engine.command(ReserveDestination(5, Request(6, range(100, 114), 1)))
            assert not reserved.lifecycle_events
            await clock.sleep(0.5)
            del stream
            sink.facts.clear()
            await clock.sleep(20.0)
            end = sink.facts[0][2]
            kinds = [kind for kind, _, at, _ in sink.facts if at == end]
            outputs = kinds.index("outputs")
            assert kinds[outputs:] == ["outputs", "kv_events", "lifecycle", "metrics"]
            cleanup = [value for kind, _, at, value in sink.facts if at == end and kind == "kv_events"][-1]
            assert any(isinstance(event.data, Removed) for event in cleanup)
            ((_, (event,)),) = sink.of("lifecycle")
            assert (event.handoff_id, event.request_id) == (5, 6)
            assert engine.in_flight == 1
            await engine.command(CancelDestination(5))
            await engine.drained()
            assert engine.metrics().running_requests == 0
            engine.ranks[0].check_integrity()

    run(main())


def test_a_receiver_that_goes_between_passes_is_cleaned_up_at_once() -> None:
    async def main() -> None:
        sink, clock = Everything(), VirtualClock()
        async with LiveScheduler(decode_config(num_gpu_blocks=2), clock=clock, sinks=[sink]) as engine:
            await engine.command(ReserveDestination(1, Request(2, [1] * 8, 1)))
            await engine.submit(Request(3, [2] * 4, 1))
            stream = engine.outputs(3)
            await clock.sleep(1.0)
            assert engine.in_flight == 2
            await stream.aclose()
            sink.facts.clear()
            await clock.sleep(1.0)
            assert sink.kinds() == ["metrics"]
            assert engine.metrics().waiting_requests == 1  # the destination
            assert await collect(stream) == []
            await engine.command(CancelDestination(1))
            await engine.drained()

    run(main())


@pytest.mark.parametrize("shape", ["chunk", "whole"])
def test_sources_are_held_and_told_at_the_end_of_their_pass(shape: str) -> None:
    async def main() -> None:
        sink, clock = Everything(), VirtualClock()
        budget = 4 if shape == "chunk" else 64
        config = engine_config(
            "sglang",
            worker_type="prefill",
            sglang=SglangConfig(chunked_prefill_size=budget),
            kv_transfer_bytes_per_token=1000,
        )
        async with LiveScheduler(config, clock=clock, sinks=[sink]) as engine:
            lifecycle = engine.lifecycle()
            with pytest.raises(CommandError, match="lifecycle: that of rank 0 was taken before"):
                engine.lifecycle()
            await engine.command(SubmitHandoffPrefill(1, Request(2, range(8), 1)), listen=True)
            outputs = await collect(engine.outputs(2))
            assert outputs[-1].completed
            held = await anext(lifecycle)
            assert held == SourceHeld(1, 2, held.transfer_timing)
            kinds = sink.kinds()
            assert kinds.index("outputs") < kinds.index("lifecycle")
            assert (await engine.command(ReleaseSource(1))).result == Applied()
            await engine.drained()

    run(main())


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_the_accept_length_of_a_pass_counts_what_it_shows(backend: str) -> None:
    """One sample per pass: (non-rejected outputs, requests among them), (0, 0) if none."""
    config = engine_config(backend, num_gpu_blocks=12, aic_nextn=3, aic_nextn_accept_rates="1,0.5,0.5")

    async def main() -> Everything:
        sink, clock = Everything(), VirtualClock()
        async with LiveScheduler(config, clock=clock, sinks=[sink]) as engine:
            for number, length in enumerate([8, 9, 200, 12]):
                await engine.submit(Request(number, range(100 * number, 100 * number + length), 9), listen=False)
            while not sink.of("outputs"):
                await clock.sleep(0.5)
            await clock.sleep(0.5)
            # Nobody sees what the pass in flight has for it.
            await engine.command(CancelRequest(0, discard_pending_output=True))
        return sink

    sink = run(main())
    shown: dict[float, list[int]] = {at: [] for at, _ in sink.of("fpm")}
    for at, output in sink.all_outputs():
        if not output.rejected and not output.failed:
            shown[at].append(output.request_id)
    got: dict[float, tuple[int, int]] = {}
    for at, sample in sink.of("acceptance"):
        # A pass of no duration may follow at the same time; it shows nothing but rejections.
        got[at] = max(sample, got.get(at, (0, 0)))
    assert got == {at: (len(ids), len(set(ids))) for at, ids in shown.items()}
    assert len(sink.of("acceptance")) == len(sink.of("fpm"))
    assert max(tokens / max(requests, 1) for tokens, requests in got.values()) > 1.0
