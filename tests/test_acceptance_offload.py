"""Native host offload of one rank: transfers, what waits for them, and when they show.

Names carry the number of the scenario in the acceptance lists: `r` of the neutral rank (the same as `a` of the shared
contract), `n` of the newest engine.
"""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from kvsim import layout
from kvsim.config import EngineConfig, FixedTiming, NativeHostOffload, parse_config
from kvsim.contract import (
    Applied,
    CancelRequest,
    CancelSource,
    CommandContext,
    InternalEffects,
    KvEvent,
    Noop,
    RankIdentity,
    Removed,
    Request,
    Stored,
    Submit,
    SubmitHandoffPrefill,
    Submitted,
)
from kvsim.errors import CommandError, ConfigError
from kvsim.layout import OffloadEventKind as Kind
from kvsim.offload import HostOffloadRecorder
from kvsim.rank import SchedulerRank
from model import recording
from offload_driver import LOAD_ENDS, Driver

BUSY, OTHER, LOADING, HANDOFF = 93005, 93006, 93004, 93003
PROMPT = [1, 2, 3, 4]


def config(blocks: int = 2, host: int = 4, **fields: Any) -> EngineConfig:
    """Blocks of 4 tokens and 1 MB, 1 ms each way."""
    offload = {"num_host_blocks": host, "d2h_bandwidth_gbps": 1.0, "h2d_bandwidth_gbps": 1.0}
    offload |= {name: fields.pop(name) for name in list(fields) if name in offload}
    values: dict[str, Any] = {
        "num_gpu_blocks": blocks,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "speedup_ratio": 0.0,
        "kv_cache_bytes_per_token": 250_000,
        "emit_kv_events": True,
        "timing_model": FixedTiming(prefill_ms=10.0, decode_ms=10.0),
    }
    return EngineConfig(**(values | fields), native_host_offload=NativeHostOffload(**offload))


def loading() -> tuple[Driver, float]:
    """A rank that loads the prompt of a source half of a handoff, and when the load ends."""
    driver = Driver(config())
    end = driver.whole(1, PROMPT)
    deadline = driver.rank.next_internal_deadline_ms()
    assert (end, deadline) == (10.0, 11.0)
    driver.work(deadline)
    driver.whole(2, range(5, 13))
    assert driver.now == 21.0
    assert driver.settle() == 23.0
    assert driver.do(SubmitHandoffPrefill(HANDOFF, Request(LOADING, PROMPT, 0))).result == Submitted(LOADING)
    driver.execute()
    assert driver.complete().outputs == ()
    assert driver.now == 23.0
    assert not driver.admissions[2:]
    due = driver.rank.next_internal_deadline_ms()
    assert due == 24.0
    [(_, queued)] = driver.seen(Kind.LOAD_QUEUED)
    assert (queued.at_ms, queued.completes_at_ms) == (23.0, 24.0)
    return driver, due


def busy(driver: Driver, due: float) -> float:
    """Start a pass shortly before the load ends; it lasts longer."""
    assert driver.submit(BUSY, range(21, 25), at=due - 0.5).result == Submitted(BUSY)
    end = driver.execute(due - 0.5).end_ms
    assert end > due
    return end


# ---------------------------------------------------------------- the neutral rank


def test_r4_a_load_that_ends_inside_a_pass_shows_at_its_end_with_its_own_time() -> None:
    driver, due = loading()
    assert busy(driver, due) == 33.5
    effects = driver.submit(OTHER, range(31, 35), at=due + 0.5)
    assert effects.result == Submitted(OTHER)
    assert effects.kv_events == ()
    assert driver.seen(*LOAD_ENDS) == []
    before = driver.rank.digest()
    assert driver.rank.process_internal_work(due + 0.5, True) == InternalEffects()
    assert driver.rank.digest() == before
    assert driver.seen(*LOAD_ENDS) == []
    driver.complete()
    [(request, completed)] = driver.seen(*LOAD_ENDS)
    assert (request, completed.kind, completed.at_ms) == (LOADING, Kind.LOAD_COMPLETED, due)


def test_r5_a_refused_submit_changes_nothing() -> None:
    driver, due = loading()
    before = driver.rank.metrics(), driver.rank.next_internal_deadline_ms(), len(driver.recorder.records)
    digest = driver.rank.digest()
    with pytest.raises(CommandError, match="already active"):
        driver.submit(LOADING, range(41, 45), at=due + 1.0)
    assert (driver.rank.metrics(), driver.rank.next_internal_deadline_ms(), len(driver.recorder.records)) == before
    assert driver.rank.digest() == digest
    assert len(driver.rank._drain_events()) == 0


def test_r6_several_loads_start_in_one_pass() -> None:
    driver = Driver(config(4, 8))
    driver.whole(1, PROMPT)
    driver.settle()
    driver.whole(2, range(11, 15))
    driver.settle()
    driver.whole(3, range(100, 116))
    at = driver.settle()
    assert at == 36.0
    driver.submit(95004, [1, 2, 3, 4, 21, 22, 23, 24])
    driver.submit(95005, [11, 12, 13, 14, 31, 32, 33, 34])
    driver.execute()
    queued = driver.seen(Kind.LOAD_QUEUED)
    assert [(request, event.at_ms, event.completes_at_ms) for request, event in queued] == [
        (95004, at, 37.0),
        (95005, at, 38.0),
    ]
    driver.complete()
    driver.run()
    assert [(time, a.request_id, a.cache_tier_attribution) for time, a in driver.admissions[3:]] == [
        (37.0, 95004, (0, 4)),
        (47.0, 95005, (0, 4)),
    ]
    assert driver.rank.is_drained()


@pytest.mark.parametrize("command", [CancelRequest(LOADING), CancelSource(HANDOFF)])
def test_r7_a_load_cancelled_inside_a_pass_ends_when_the_command_comes(command: Any) -> None:
    driver, due = loading()
    busy(driver, due)
    assert driver.do(command, at=due + 0.5).result == Applied()
    [(request, event)] = driver.seen(*LOAD_ENDS)
    assert (request, event.kind, event.at_ms) == (LOADING, Kind.LOAD_CANCELLED, due + 0.5)
    driver.complete()
    driver.run()
    assert len(driver.seen(*LOAD_ENDS)) == 1
    assert driver.rank.is_drained()
    assert driver.rank.metrics().active_blocks == 0


def test_r8_a_load_cancelled_while_idle() -> None:
    driver, due = loading()
    effects = driver.do(CancelSource(HANDOFF), at=due - 0.25)
    assert effects.result == Applied()
    assert effects.retired_requests == (LOADING,)
    [(_, event)] = driver.seen(*LOAD_ENDS)
    assert (event.kind, event.at_ms) == (Kind.LOAD_CANCELLED, due - 0.25)
    assert driver.rank.next_internal_deadline_ms() is None
    assert driver.rank.is_drained()
    assert driver.do(CancelSource(HANDOFF), at=due).result == Noop()


def test_a_host_tier_needs_a_rank_of_its_own() -> None:
    with pytest.raises(ConfigError, match="native_host_offload: needs dp_size 1, got 2"):
        SchedulerRank(RankIdentity(dp_size=2), config())


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("backend", {"backend": "trtllm"}),
        ("worker_type", {"worker_type": "prefill"}),
        ("enable_prefix_caching", {"enable_prefix_caching": False}),
        ("aic_nextn", {"aic_nextn": 1}),
        ("ruleset", {"ruleset": "dynamo-1.3"}),
        ("kv_cache_bytes_per_token", {"kv_cache_bytes_per_token": None}),
        ("native_host_offload.num_host_blocks", {"num_host_blocks": 2**63}),
        ("native_host_offload.num_host_blocks", {"num_host_blocks": 0}),
        ("native_host_offload.h2d_bandwidth_gbps", {"h2d_bandwidth_gbps": 1e-310}),
        ("native_host_offload.d2h_bandwidth_gbps", {"d2h_bandwidth_gbps": math.inf}),
    ],
)
def test_what_does_not_go_with_a_host_tier_is_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert caught.value.field == field


# ---------------------------------------------------------------- links and recency


def test_n9_each_link_is_first_in_first_out() -> None:
    driver = Driver(config(4, 8, max_num_batched_tokens=8))
    driver.submit(1, PROMPT)
    driver.submit(2, range(11, 15))
    driver.execute()
    driver.complete()
    stores = driver.seen(Kind.STORE_SUBMITTED)
    assert [(request, event.at_ms, event.completes_at_ms) for request, event in stores] == [
        (1, 10.0, 11.0),
        (2, 10.0, 12.0),
    ]
    driver.settle()
    assert [event.at_ms for _, event in driver.seen(Kind.STORE_COMPLETED)] == [11.0, 12.0]


def test_a_cancelled_load_leaves_the_lane_as_long_as_it_was() -> None:
    driver, due = loading()
    driver.do(CancelSource(HANDOFF))
    driver.submit(7, PROMPT)
    driver.execute()
    assert driver.seen(Kind.LOAD_QUEUED, request=7)[0][1].completes_at_ms == due + 1.0


def test_n10_without_budget_nobody_looks_at_the_host() -> None:
    """The chunk that takes the whole budget evicts A, which a lookup in between would have made recent."""
    driver = Driver(config(64, 4, d2h_bandwidth_gbps=0.0, h2d_bandwidth_gbps=0.0, max_num_batched_tokens=4))
    x_a = list(range(1, 9))
    driver.submit(1, x_a)
    driver.run()
    driver.submit(2, range(21, 25))
    driver.run()
    driver.submit(3, range(31, 35))
    driver.run()
    kept = [event.block_hashes for _, event in driver.seen(Kind.STORE_PREPARED)]
    (x,), (a,), (b,), (d,) = kept
    assert driver.seen(Kind.EVICTED) == []
    driver.submit(4, range(41, 49))
    driver.execute()
    assert [event.block_hashes for _, event in driver.seen(Kind.EVICTED)] == [(x,)]
    driver.submit(5, [*x_a, 9])
    driver.complete()
    driver.execute()
    assert [event.block_hashes for _, event in driver.seen(Kind.EVICTED)] == [(x,), (a,)]
    assert {b, d} <= set(driver.rank._state.view("host_entries")["hash"].tolist())


def test_cohorts_of_equal_age_are_evicted_by_hash() -> None:
    driver = Driver(config(16, 4))
    driver.whole(1, range(16))
    driver.settle()
    driver.whole(2, range(100, 112))
    evicted = [event.block_hashes[0] for _, event in driver.seen(Kind.EVICTED)]
    [(_, prepared), _] = driver.seen(Kind.STORE_PREPARED)
    assert len(evicted) == 3
    assert evicted == sorted(prepared.block_hashes)[:3]


# ---------------------------------------------------------------- stores


def test_completed_prompt_blocks_are_stored_chunk_by_chunk_and_outputs_never() -> None:
    driver = Driver(config(16, 16, max_num_batched_tokens=6))
    driver.submit(1, range(14), out=6)
    driver.run()
    stores = driver.seen(Kind.STORE_BLOCK_MAPPINGS)
    assert [(event.at_ms, event.logical_block_indices) for _, event in stores] == [
        (0.0, (0,)),
        (10.0, (1, 2)),
    ]
    host = [(time, event) for time, event in driver.kv if event.storage_tier == "host_pinned"]
    assert [(time, event.data.start_position, len(event.data.blocks)) for time, event in host] == [
        (20.0, 0, 1),
        (30.0, 1, 2),
    ]
    device = [event.data for _, event in driver.kv if event.storage_tier == "device"]
    assert host[1][1].data.parent_hash == device[0].blocks[0].block_hash
    assert all(data.start_position is None for data in device)
    assert sum(len(data.blocks) for data in device) == 4


def test_a_store_names_only_what_the_host_lacks() -> None:
    """The event of a store is one per run of neighbours; each run names the block before it."""
    driver = Driver(config(16, 8, max_num_batched_tokens=64))
    driver.whole(1, range(16))
    driver.settle()
    first = driver.seen(Kind.STORE_PREPARED)[0][1].block_hashes
    driver.whole(2, range(100, 128))
    driver.settle()
    gone = {event.block_hashes[0] for _, event in driver.seen(Kind.EVICTED)}
    assert len(gone) == 3
    driver.whole(3, range(200, 204))
    driver.settle()
    # All of its device blocks are there, so it is not loaded; the host gets back what it has lost.
    kv = len(driver.kv)
    driver.whole(4, [*range(16), 1, 2])
    driver.settle()
    lost = [event.block_hashes for _, event in driver.seen(Kind.STORE_PREPARED, request=4)]
    here = {event.block_hashes[0] for _, event in driver.seen(Kind.EVICTED)} & set(first)
    assert len(lost) == 1
    assert set(lost[0]) <= here
    runs = [event.data for _, event in driver.kv[kv:] if event.storage_tier == "host_pinned"]
    stored = [data for data in runs if isinstance(data, Stored)]
    assert sum(len(data.blocks) for data in stored) == len(lost[0])
    for data in stored:
        start = data.start_position
        assert start is not None
        assert [block.block_hash for block in data.blocks] == list(first[start : start + len(data.blocks)])
        assert data.parent_hash == (first[start - 1] if start else None)


def test_a_cohort_that_can_never_fit_says_so_and_the_request_goes_on() -> None:
    driver = Driver(config(8, 2))
    driver.submit(1, range(12), out=2)
    driver.run()
    retries = driver.seen(Kind.CAPACITY_RETRY)
    assert [event.at_ms for _, event in retries] == [0.0, 10.0]
    assert all(event.structurally_unfittable and len(event.block_hashes) == 3 for _, event in retries)
    assert driver.seen(Kind.STORE_PREPARED) == []
    assert driver.rank.is_drained()
    assert [output.completed for _, output in driver.outputs] == [False, True]


def test_a_cohort_waits_for_room_that_a_store_under_way_takes() -> None:
    driver = Driver(config(8, 3, max_num_batched_tokens=32))
    driver.submit(1, range(8), out=4)
    driver.submit(2, range(100, 108), out=4)
    driver.run()
    # The store of the first request ends at 12, inside the second pass: it shows at 20.
    retries = driver.seen(Kind.CAPACITY_RETRY)
    assert [(n, event.at_ms, event.structurally_unfittable) for n, event in retries] == [
        (2, 0.0, False),
        (2, 10.0, False),
    ]
    stores = driver.seen(Kind.STORE_PREPARED)
    assert [(request, event.at_ms) for request, event in stores] == [(1, 0.0), (2, 20.0)]
    assert len(driver.seen(Kind.EVICTED)) == 1


def test_writing_over_blocks_that_are_still_read_waits_for_the_store() -> None:
    """The pass computes when the store has read the blocks: it ends later by that time."""
    driver = Driver(config(3, 8, d2h_bandwidth_gbps=0.1))
    driver.whole(1, range(12))
    assert driver.rank.next_internal_deadline_ms() == 40.0
    driver.submit(2, range(100, 108), out=2)
    assert driver.execute().end_ms == 50.0
    assert driver.running() == [2]
    # They are the source of a store under way and may not be read for another one yet.
    assert driver.seen(Kind.STORE_PREPARED, request=2) == []
    driver.complete()
    driver.execute()
    assert [event.at_ms for _, event in driver.seen(Kind.STORE_PREPARED, request=2)] == [50.0]


def test_preemption_waits_for_the_newest_store_of_the_victim() -> None:
    driver = Driver(config(4, 8, d2h_bandwidth_gbps=0.1, max_num_batched_tokens=32))
    driver.submit(1, range(8), out=8)
    driver.submit(2, range(100, 108), out=8)
    driver.execute()
    driver.complete()
    # Stores of two blocks each are under way until 40 and 60; the second request is preempted at 20.
    assert driver.now == 10.0
    assert driver.rank.next_internal_deadline_ms() == 30.0
    flight = driver.execute()
    assert [event.request_id for event in flight.start_effects.pressure_events] == [2]
    assert flight.end_ms == 60.0
    driver.complete()
    driver.run()
    assert driver.rank.is_drained()
    assert len([1 for _, output in driver.outputs if output.completed]) == 2


# ---------------------------------------------------------------- loads


def evicted(blocks: int = 4, host: int = 16, **fields: Any) -> Driver:
    """A rank whose host has two prompts (1: 8 tokens from 0, 2: 8 tokens from 100) and whose device has neither."""
    driver = Driver(config(blocks, host, **fields))
    driver.whole(1, range(8))
    driver.settle()
    driver.whole(2, range(100, 108))
    driver.settle()
    driver.whole(3, range(200, 200 + 4 * blocks))
    driver.settle()
    assert driver.rank.metrics().active_blocks == 0
    return driver


def test_what_was_loaded_counts_as_reuse_of_the_host() -> None:
    driver = evicted(max_num_batched_tokens=64)
    at = driver.now
    driver.submit(10, [*range(8), 50, 51, 52], out=2)
    driver.run()
    [(time, admission)] = driver.admissions[3:]
    assert (time, admission.reused_input_tokens, admission.cache_tier_attribution) == (at + 2.0, 8, (0, 8))
    assert driver.outputs[-2][1].cached_tokens == 8
    back = [event.data for time, event in driver.kv if time == at + 2.0 and event.storage_tier == "device"]
    assert [len(data.blocks) for data in back if isinstance(data, Stored)] == [2]


def test_a_prompt_partly_on_the_device_loads_the_rest() -> None:
    driver = Driver(config(5, 16, max_num_batched_tokens=64))
    driver.whole(1, range(12))
    driver.settle()
    # Leaves go first: the last two blocks of the prompt.
    driver.whole(2, range(100, 116))
    driver.settle()
    at = driver.now
    driver.submit(3, [*range(12), 7, 7, 7], out=1)
    driver.run()
    [(_, queued)] = driver.seen(Kind.LOAD_QUEUED)
    assert queued.at_ms == at
    assert len(queued.block_hashes) == 2
    assert driver.admissions[-1][1].cache_tier_attribution == (4, 8)


def test_the_last_loaded_block_is_computed_again_when_nothing_else_is_left() -> None:
    driver = evicted(max_num_batched_tokens=64)
    driver.submit(10, range(8), out=1)
    driver.run()
    assert driver.admissions[-1][1].cache_tier_attribution == (0, 4)


def test_a_request_whose_blocks_another_one_loads_sleeps_until_they_are_there() -> None:
    driver = evicted(8, max_num_batched_tokens=64)
    driver.submit(10, [*range(8), 50], out=1)
    driver.submit(11, [*range(8), 60], out=1)
    driver.submit(12, range(300, 304), out=1)
    driver.execute()
    assert driver.connector() == [10, 11]
    assert driver.admissions[-1][1].request_id == 12
    assert driver.rank.metrics().waiting_requests == 2
    driver.complete()
    driver.run()
    assert len(driver.seen(Kind.LOAD_QUEUED)) == 1
    assert [(a.request_id, a.cache_tier_attribution) for _, a in driver.admissions[3:]] == [
        (12, (0, 0)),
        (10, (0, 8)),
        (11, (8, 0)),
    ]


def test_who_only_waits_for_a_transfer_makes_no_rank_ready() -> None:
    driver, _ = loading()
    assert driver.connector() == [LOADING]
    assert not driver.rank.is_ready()
    assert not driver.rank.is_drained()
    assert not driver.rank.is_empty()
    assert not driver.rank.waiting_for_external_command()
    driver.settle()
    assert driver.rank.is_ready()


def test_who_sleeps_for_a_load_wakes_when_it_is_cancelled() -> None:
    driver = evicted(8, max_num_batched_tokens=64)
    driver.submit(10, [*range(8), 50], out=1)
    driver.submit(11, [*range(8), 60], out=1)
    driver.execute()
    driver.complete()
    assert driver.connector() == [10, 11]
    assert not driver.rank.is_ready()
    driver.do(CancelRequest(10))
    assert driver.rank.is_ready()
    driver.run()
    assert driver.admissions[-1][1].request_id == 11
    assert driver.rank.is_drained()
    assert [(number, event.kind) for number, event in driver.seen(*LOAD_ENDS)] == [
        (10, Kind.LOAD_CANCELLED),
        (11, Kind.LOAD_COMPLETED),
    ]


def test_loads_leave_each_other_the_blocks_of_their_tails() -> None:
    """Two loads that each fit alone, but not both to the end: the second waits instead of locking both up."""
    driver = evicted(5, max_num_batched_tokens=64)
    driver.submit(10, [*range(8), *range(50, 54)], out=1)
    driver.submit(11, [*range(100, 108), *range(60, 64)], out=1)
    driver.execute()
    assert [number for number, _ in driver.seen(Kind.LOAD_QUEUED)] == [10]
    driver.complete()
    driver.run()
    assert [number for number, _ in driver.seen(Kind.LOAD_COMPLETED)] == [10, 11]
    assert driver.rank.is_drained()


def test_an_id_may_be_used_again_while_its_old_store_is_under_way() -> None:
    driver = Driver(config(8, 8, d2h_bandwidth_gbps=0.1))
    driver.submit(1, range(8), out=4)
    driver.execute()
    driver.do(CancelRequest(1), at=5.0)
    driver.submit(1, range(100, 108), out=2, at=6.0)
    driver.complete()
    driver.run()
    assert [(n, e.transfer_id) for n, e in driver.seen(Kind.STORE_COMPLETED)] == [(1, 0), (1, 1)]
    assert driver.rank.is_drained()
    assert len([1 for _, output in driver.outputs if output.completed]) == 1


def test_stores_of_a_cancelled_request_run_to_their_end() -> None:
    driver = Driver(config(8, 8))
    driver.submit(1, range(8), out=4)
    driver.execute()
    driver.do(CancelRequest(1), at=5.0)
    assert driver.seen(Kind.STORE_SUBMITTED) == []
    driver.complete()
    assert driver.rank.is_empty()
    assert not driver.rank.is_drained()
    driver.settle()
    assert len(driver.seen(Kind.STORE_COMPLETED)) == 1
    assert driver.rank.is_drained()


def test_transfers_without_duration_end_at_the_boundary_that_starts_them() -> None:
    driver = evicted(d2h_bandwidth_gbps=0.0, h2d_bandwidth_gbps=0.0, max_num_batched_tokens=64)
    for _, event in driver.seen(Kind.STORE_SUBMITTED):
        assert event.completes_at_ms == event.at_ms
    at = driver.now
    driver.submit(10, [*range(8), 50], out=1)
    driver.execute()
    assert driver.connector() == [10]
    driver.complete()
    assert driver.now == at
    assert driver.rank.is_ready()
    assert driver.rank.next_internal_deadline_ms() is None
    driver.run()
    assert driver.admissions[-1] == (at, driver.admissions[-1][1])
    assert driver.admissions[-1][1].cache_tier_attribution == (0, 8)


def test_commands_settle_nothing_however_late_they_come() -> None:
    driver, due = loading()
    before = driver.rank.next_internal_deadline_ms()
    driver.submit(OTHER, range(31, 35), at=due + 5.0)
    assert driver.rank.next_internal_deadline_ms() == before
    assert driver.seen(*LOAD_ENDS) == []
    digest = driver.rank.digest()
    with pytest.raises(CommandError, match="process_internal_work first"):
        driver.rank.execute_pass(due + 5.0)
    assert driver.rank.digest() == digest
    driver.work(due + 5.0)
    assert driver.seen(*LOAD_ENDS)[0][1].at_ms == due


def test_ticks_into_the_past_change_nothing() -> None:
    driver, _ = loading()
    digest = driver.rank.digest()
    driver.rank.process_internal_work(3.0, False)
    assert driver.rank.digest() == digest


# ---------------------------------------------------------------- whole states and observers


def test_a_fork_and_a_snapshot_keep_transfers_under_way() -> None:
    driver, due = loading()
    snapshot = pickle.loads(pickle.dumps(driver.rank.snapshot()))
    other = driver.rank.fork()
    fresh = SchedulerRank(RankIdentity(worker_id=2), config())
    fresh.restore(snapshot)
    fresh.check_integrity()
    for rank in (other, fresh):
        assert rank.digest() == driver.rank.digest()
        assert rank.next_internal_deadline_ms() == due
    for rank in (driver.rank, other, fresh):
        rank.process_internal_work(due, False)
        result = rank.execute_pass(due)
        assert [a.request_id for a in result.start_effects.admissions] == [LOADING]
        rank.complete_pass(result.pending, result.end_ms)
        rank.check_integrity()
    assert driver.rank.digest() == other.digest() == fresh.digest()


class Failing:
    """An observer that cannot stand loads."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []

    def record(self, request_id: int, event: Any) -> None:
        self.kinds.append(event.kind)
        if event.kind is Kind.STORE_PREPARED:
            raise RuntimeError("no more")


def test_an_observer_that_raises_is_warned_about_and_changes_nothing() -> None:
    observer = Failing()
    rank = SchedulerRank(RankIdentity(), config(), observer=observer)
    quiet = SchedulerRank(RankIdentity(), config())
    for each in (rank, quiet):
        each.apply_command(Submit(Request(1, PROMPT, 0)), CommandContext(0.0))
    with pytest.warns(RuntimeWarning, match="STORE_PREPARED of request 1"):
        flight = rank.execute_pass(0.0)
    rank.complete_pass(flight.pending, flight.end_ms)
    rank.check_integrity()
    flight = quiet.execute_pass(0.0)
    quiet.complete_pass(flight.pending, flight.end_ms)
    assert rank.digest() == quiet.digest()
    assert observer.kinds == [Kind.STORE_PREPARED, Kind.STORE_BLOCK_MAPPINGS, Kind.STORE_SUBMITTED]


def test_a_recorder_gives_its_events_as_tables() -> None:
    driver, _ = loading()
    events, blocks = driver.recorder.arrays()
    assert events.dtype == layout.OFFLOAD_EVENT
    assert blocks.dtype == layout.OFFLOAD_BLOCK
    assert len(events) == len(driver.recorder.records)
    assert np.isnan(events["completes_at_ms"][events["kind"] == Kind.STORE_PREPARED]).all()
    assert (events["completes_at_ms"][events["kind"] == Kind.LOAD_QUEUED] == 24.0).all()
    assert int(events["count"].sum()) == len(blocks)


def test_without_an_observer_nothing_is_kept() -> None:
    rank = SchedulerRank(RankIdentity(), config())
    rank.apply_command(Submit(Request(1, PROMPT, 0)), CommandContext(0.0))
    rank.execute_pass(0.0)
    assert len(rank._state.view("offload_events")) == 0


def test_a_rank_without_a_host_tier_has_no_deadline_and_empty_tables() -> None:
    plain = EngineConfig(num_gpu_blocks=64, block_size=4)
    rank = SchedulerRank(RankIdentity(), plain, observer=HostOffloadRecorder())
    assert rank.next_internal_deadline_ms() is None
    for name in ("host_entries", "transfers", "transfer_blocks", "offloads", "sources"):
        assert len(rank._state.view(name)) == 0
    with pytest.raises(CommandError, match="now_ms"):
        rank.process_internal_work(math.nan, False)


# ---------------------------------------------------------------- recorded runs


def as_recorded(number: int, event: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"event": event.kind.name.lower()}
    if event.transfer_id is not None:
        data["transfer_id"] = event.transfer_id
    if event.kind is Kind.STORE_BLOCK_MAPPINGS:
        pairs = zip(event.block_hashes, event.logical_block_indices, strict=True)
        data["mappings"] = [{"block_hash": block, "logical_block_index": index} for block, index in pairs]
    elif event.kind is Kind.EVICTED:
        [data["block_hash"]] = event.block_hashes
    else:
        data["block_hashes"] = list(event.block_hashes)
    if event.completes_at_ms is not None:
        data["completes_at_ms"] = pytest.approx(event.completes_at_ms, abs=1e-6)
    if event.structurally_unfittable is not None:
        data["structurally_unfittable"] = event.structurally_unfittable
    return {
        "event": data,
        "observed_at_ms": pytest.approx(event.at_ms, abs=1e-6),
        "request_id": f"00000000-0000-0000-0000-{number:012x}",
    }


def kv_as_recorded(time: float, event: KvEvent) -> dict[str, Any]:
    if isinstance(event.data, Removed):
        data: dict[str, Any] = {"removed": {"block_hashes": list(event.data.block_hashes)}}
    else:
        blocks = [{"block_hash": b.block_hash, "tokens_hash": b.tokens_hash} for b in event.data.blocks]
        data = {"stored": {"blocks": blocks, "parent_hash": event.data.parent_hash}}
        if event.data.start_position is not None:
            data["stored"]["start_position"] = event.data.start_position
    found = {"data": data, "dp_rank": 0, "event_id": event.event_id}
    if event.storage_tier != "device":
        found["tier"] = event.storage_tier
    return {"event": found, "observed_at_ms": pytest.approx(time, abs=1e-6)}


@pytest.mark.parametrize("name", ["vllm_host_offload", "vllm_host_offload_small_host"])
def test_one_rank_does_what_was_recorded(name: str) -> None:
    case = recording.load(recording.FOLDER / f"{name}.json.gz")
    payload, expected = case["input"]["payload"]["spec"], case["expected"]
    fields = payload["engine"]["rank"] | {"emit_kv_events": True}
    driver = Driver(parse_config(fields))
    driver.replay(payload["requests"])
    artifacts = expected["artifacts"]
    for want in artifacts["kv_events"]:
        want["event"]["data"].get("stored", {}).pop("session_id", None)
    assert [kv_as_recorded(*pair) for pair in driver.kv] == artifacts["kv_events"]
    assert [as_recorded(*pair) for pair in driver.recorder.records] == artifacts["host_offload_events"]
    admissions: list[tuple[Any, ...]] = []
    for request in expected["report"]["per_request"]:
        admissions += [
            (round(row["at_ms"], 6), row["reused_input_tokens"], row.get("g1_reused_input_tokens"))
            for row in request["admission_history"]
        ]
    mine = [
        (round(time, 6), a.reused_input_tokens, a.cache_tier_attribution and a.cache_tier_attribution[0])
        for time, a in driver.admissions
    ]
    assert sorted(mine, key=str) == sorted(admissions, key=str)
    assert driver.rank.is_drained()
