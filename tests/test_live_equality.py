"""The live scheduler under the virtual clock is `kvsim.replay`: same outputs, times, KV events, forward-pass metrics.

``KVSIM_EXAMPLES`` sets the number of random workloads (default 150), for long runs.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.config import EngineConfig, KvbmTiers, NativeHostOffload
from kvsim.contract import ForwardPassMetrics, KvEvent, Request, Stored
from kvsim.layout import FailReason
from kvsim.live import LiveScheduler, VirtualClock
from kvsim.rank import KvEvents
from kvsim.replay.run import Run
from live_support import Everything, play, run
from replay_ways import CONFIGS, TIMINGS, digests, request_lists, requests_of, run_kernel

EXAMPLES = int(os.environ.get("KVSIM_EXAMPLES", "150"))


def kv_row(event: KvEvent) -> tuple[Any, ...]:
    data = event.data
    what = (
        ("stored", data.parent_hash, tuple(block.block_hash for block in data.blocks))
        if isinstance(data, Stored)
        else ("removed", None, data.block_hashes)
    )
    return (event.dp_rank, event.event_id, event.storage_tier, *what)


def kv_rows(run: Run, dp_rank: int) -> list[tuple[float, Any]]:
    """(time, event) of what a rank of the replay recorded and nobody took while it ran."""
    taken = run._fleet.take_events(dp_rank)
    if taken is None:
        return []
    events, blocks = taken
    rows = map(kv_row, KvEvents(events, blocks, run.ranks[dp_rank].identity, None))
    return list(zip(events["at_ms"].tolist(), rows, strict=True))


def plain_outputs(run: Run) -> list[tuple[Any, ...]]:
    assert run.outputs is not None
    ids = (run.records["id_hi"].astype(object) << 64) | run.records["id_lo"].astype(object)
    return [
        (
            ids[row["row"]],
            float(row["at_ms"]),
            int(row["token"]) if row["flags"] & 1 else None,
            bool(row["flags"] & 2),
            bool(row["flags"] & 4),
            bool(row["flags"] & 8),
        )
        for row in run.outputs
    ]


def plain_passes(run: Run, dp_rank: int) -> list[tuple[Any, ...]]:
    """(end, metrics) of the passes of a rank."""
    assert run.passes is not None
    names = [name for name in ForwardPassMetrics._fields if name != "duration_ms"]
    rows = run.passes[run.passes["dp_rank"] == dp_rank]
    return [(row["end_ms"], *(row[n] for n in names), row["end_ms"] - row["start_ms"]) for row in rows]


@st.composite
def host_configs(draw: st.DrawFn) -> EngineConfig:
    """A small device pool over host memory that fills up, too."""
    return EngineConfig(
        num_gpu_blocks=draw(st.sampled_from([8, 12, 16, 5])),
        block_size=4,
        max_num_seqs=draw(st.sampled_from([None, 4, 2])),
        max_num_batched_tokens=draw(st.sampled_from([None, 16, 8])),
        timing_model=draw(TIMINGS),
        kv_cache_bytes_per_token=1_000_000,
        native_host_offload=NativeHostOffload(
            num_host_blocks=draw(st.sampled_from([1, 3, 8, 64])),
            d2h_bandwidth_gbps=draw(st.sampled_from([0.0, 0.2, 1.0, 100.0])),
            h2d_bandwidth_gbps=draw(st.sampled_from([0.0, 0.2, 1.0, 100.0])),
        ),
    )


@st.composite
def tiered_configs(draw: st.DrawFn) -> EngineConfig:
    """A small device pool over KVBM tiers, with links that are slower and faster than passes."""
    gbps = st.sampled_from([0.0, 0.2, 1.0, 100.0])
    return EngineConfig(
        ruleset=draw(st.sampled_from(["dynamo", "dynamo-1.3"])),
        num_gpu_blocks=draw(st.sampled_from([8, 12, 16, 5])),
        block_size=4,
        max_num_seqs=draw(st.sampled_from([None, 4, 2])),
        max_num_batched_tokens=draw(st.sampled_from([None, 16, 8])),
        timing_model=draw(TIMINGS),
        kv_cache_bytes_per_token=1_000_000,
        kvbm_tiers=KvbmTiers(
            num_g2_blocks=draw(st.sampled_from([1, 3, 8, 64])),
            num_g3_blocks=draw(st.sampled_from([0, 2, 16])),
            g4_storage=draw(st.booleans()),
            offload_batch_size=draw(st.sampled_from([32, 1, 2])),
            g1_to_g2_gbps=draw(gbps),
            g2_to_g1_gbps=draw(gbps),
            g2_to_g3_gbps=draw(gbps),
            g3_to_g2_gbps=draw(gbps),
        ),
    )


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    items=request_lists(),
    pinned=st.booleans(),
    config=st.one_of(CONFIGS, CONFIGS, host_configs(), tiered_configs()),
    dp_size=st.sampled_from([1, 1, 1, 2, 3]),
    events=st.booleans(),
)
def test_a_live_run_under_the_virtual_clock_is_the_replay(
    items: list[dict[str, Any]], pinned: bool, config: EngineConfig, dp_size: int, events: bool
) -> None:
    if config.native_host_offload is not None or config.kvbm_tiers is not None:
        dp_size = 1
    if pinned:
        items = [{**item, "dp_rank": (k // 3) % dp_size} if k % 3 == 0 else item for k, item in enumerate(items)]
    config = config.replace(emit_kv_events=False, emit_kv_token_ids=False)
    replayed = run_kernel(items, config, dp_size=dp_size, capture_kv_events=events)
    kept = [kv_rows(replayed, dp_rank) for dp_rank in range(dp_size)]
    hints = replayed.workload.specs["dp_rank"].tolist()
    requests = [
        (request.arrival_ms or 0.0, request, hint if hint >= 0 else None)
        for request, hint in zip(requests_of(replayed.workload), hints, strict=True)
    ]
    config = config.replace(emit_kv_events=events and config.enable_prefix_caching)
    sink, engine = run(play(config, requests, dp_size=dp_size))

    live = [(o.request_id, at, o.token_id, o.completed, o.rejected, o.failed) for at, o in sink.all_outputs()]
    assert live == plain_outputs(replayed)
    for rank in range(dp_size):
        mine = [(at, *fpm) for at, fpm in sink.of("fpm", rank)]
        theirs = plain_passes(replayed, rank)
        if dp_size > 1 or events or config.kvbm_tiers is not None:
            # A replay leaves out passes in which a rank did nothing, or only evicted: a sibling did something, or
            # all that it runs waits for transfers.
            kept_passes = set(theirs)
            fpms = [fpm for at, fpm in sink.of("fpm", rank) if (at, *fpm) not in kept_passes]
            # The sums of SGLang may count a decode in a pass without effect.
            decodes = config.backend != "sglang" and any(fpm.num_decode_requests for fpm in fpms)
            assert not decodes
            assert not any(fpm.num_prefill_requests for fpm in fpms)
            mine = [row for row in mine if row in kept_passes]
        assert mine == theirs
        if events:
            shown = [(at, kv_row(event)) for at, facts in sink.of("kv_events", rank) for event in facts]
            if dp_size > 1 or (config.rules.kv_events_at_pass_start and config.backend != "sglang"):
                # Routers of a replay hear of them at the end of the pass all the same; and what a rank
                # evicted in a pass in which only its siblings did anything else, they hear with the next.
                assert [row for _, row in shown] == [row for _, row in kept[rank]]
            else:
                assert shown == kept[rank]
    shared = config.kvbm_tiers is not None and (config.kvbm_tiers.num_g3_blocks > 0 or config.kvbm_tiers.g4_storage)
    if not events and not shared:
        # The ranks of a replay hold on to events that nobody takes, and to their place in the queue; what lies
        # below G2 belongs to all of them, and to each live rank alone.
        assert [rank.digest() for rank in engine.ranks] == digests(replayed)
    for rank in engine.ranks:
        rank.check_integrity()


@settings(max_examples=max(10, EXAMPLES // 3), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(items=request_lists(), config=CONFIGS, dp_size=st.sampled_from([1, 1, 2]), concurrency=st.integers(1, 4))
def test_clients_that_wait_for_their_outputs_are_the_closed_loop(
    items: list[dict[str, Any]], config: EngineConfig, dp_size: int, concurrency: int
) -> None:
    """So many requests at a time, the next as soon as one has ended, which its client hears from its outputs."""
    config = config.replace(emit_kv_events=False, emit_kv_token_ids=False)
    replayed = run_kernel(items, config, dp_size=dp_size, concurrency=concurrency)
    waiting = sorted(requests_of(replayed.workload), key=lambda request: request.arrival_ms or 0.0)

    async def main() -> Everything:
        sink, inside = Everything(), asyncio.Semaphore(concurrency)

        async def listen(request: Request) -> None:
            async for _ in engine.outputs(request.request_id):
                pass
            inside.release()

        async with (
            LiveScheduler(config, dp_size=dp_size, clock=VirtualClock(), sinks=[sink]) as engine,
            asyncio.TaskGroup() as clients,
        ):
            for request in waiting:
                await inside.acquire()
                await engine.submit(request)
                clients.create_task(listen(request))
        return sink

    if any(record["reason"] == FailReason.NOT_ADMITTED for record in replayed.records):
        return  # ends when nothing else can happen, which a client that waits never lets come
    sink = run(main())
    live = [(o.request_id, at, o.token_id, o.completed, o.rejected, o.failed) for at, o in sink.all_outputs()]
    assert live == plain_outputs(replayed)
