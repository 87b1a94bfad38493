"""Lower tiers that take what the pool evicts: the scenarios of the acceptance lists, and what follows from the rules.

Names carry the number of the scenario (`a` and `v` of the engine list, `b` of the replay component, `c` of the live
driver). Each runs against the kernel and against the twin. Where a scenario wants a block in a lower tier and not
in the pool, it gets there as any block does: a reservation evicts it and is cancelled.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvsim.config import EngineConfig, FixedTiming, KvbmTiers
from kvsim.contract import (
    Applied,
    CancelDestination,
    CancelSource,
    DestinationReserved,
    RankIdentity,
    Removed,
    Request,
    Stored,
    SubmitHandoffPrefill,
    Submitted,
)
from kvsim.errors import CommandError
from kvsim.offload import SharedLink
from kvsim.rank import SchedulerRank
from model.paged import PagedModel
from tier_bench import Bench

FACES = pytest.mark.parametrize("face", ["twin", "kernel"])
PROMPT = [0, 1, 2, 3]
OTHER = [4, 5, 6, 7]


def in_g2(bench: Bench, *prompts: list[int], blocks: int) -> None:
    """The prompts in G2, and a pool with so many empty blocks."""
    for number, prompt in enumerate(prompts, 9000):
        bench.complete(number, prompt)
    bench.push_out(blocks)
    assert bench.active == bench.inactive == 0
    bench.kv.clear()


# ---------------------------------------------------------------- links


@pytest.mark.parametrize(
    ("starts", "ends"), [([0.0], [1.0]), ([0.0, 0.0], [2.0, 2.0]), ([0.0, 0.5], [1.5, 2.0]), ([0.0] * 10, [10.0] * 10)]
)
def test_transfers_share_their_link(starts: list[float], ends: list[float]) -> None:
    link = SharedLink(1.0)
    found = []
    for start in starts:
        found += link.advance(start)
        link.start(start, 1e6)
    found += link.advance(100.0)
    assert [time for _, time in sorted(found)] == pytest.approx(ends)


# ---------------------------------------------------------------- attachment


@FACES
def test_a12_a15_tiers_are_attached_and_idle(face: str) -> None:
    bench = Bench(face, {"num_g2_blocks": 8}, kv_cache_bytes_per_token=131_072)
    assert bench.config.tiers_attached is not None
    assert bench.deadline is None
    assert len(bench.tick(100.0).kv_events) == 0
    assert bench.deadline is None
    assert bench.rank.is_drained()


@pytest.mark.parametrize(
    "fields",
    [
        {"kvbm_tiers": None, "kv_cache_bytes_per_token": 131_072},
        {"kvbm_tiers": KvbmTiers(num_g2_blocks=8), "kv_cache_bytes_per_token": None},
    ],
)
@pytest.mark.parametrize("face", [PagedModel, SchedulerRank])
def test_a13_a14_a16_a17_without_blocks_or_bytes_there_are_no_tiers(face: Any, fields: dict[str, Any]) -> None:
    config = EngineConfig(num_gpu_blocks=2, block_size=4, **fields)
    assert config.tiers_attached is None
    rank = face(RankIdentity(), config)
    assert rank.next_internal_deadline_ms() is None
    assert rank.is_drained()


# ---------------------------------------------------------------- what is evicted goes down


@FACES
def test_v43_a_decode_that_pushes_a_block_out_waits_and_others_go_on(face: str) -> None:
    bench = Bench(face, {"g1_to_g2_gbps": 1.0, "offload_batch_size": 4}, num_gpu_blocks=3, worker_type="decode")
    bench.complete(1, [100, 101, 102, 103])
    assert bench.inactive == 1
    bench.submit(2, PROMPT, 8)
    bench.submit(3, [7, 8], 8)
    assert bench.signals(0.0) == [3]
    blocked = bench.row(2)
    assert (blocked["generated"], blocked["allocated"], blocked["computed"]) == (0, 4, 4)
    assert bench.dependent == [2]
    assert bench.deadline == pytest.approx(1.0)
    assert bench.row(3)["status"] == "running"
    assert bench.preemptions == 0
    assert bench.tick(1.0).lifecycle_events == []
    assert 2 in bench.signals(1.0)
    blocked = bench.row(2)
    assert (blocked["generated"], blocked["allocated"]) == (1, 5)
    assert bench.dependent == []
    assert bench.preemptions == 0


@FACES
def test_v44_a_burst_that_pushes_a_block_out_waits_as_a_whole(face: str) -> None:
    bench = Bench(
        face,
        {"g1_to_g2_gbps": 1.0, "offload_batch_size": 4},
        num_gpu_blocks=5,
        worker_type="decode",
        aic_nextn=5,
        aic_nextn_accept_rates="1,1,1,1,1",
    )
    bench.complete(1, [100, 101, 102, 103])
    bench.submit(2, PROMPT, 8)
    bench.submit(3, [7, 8], 8)
    assert bench.signals(0.0) == []
    assert bench.dependent == [2, 3]
    assert [bench.row(number)["generated"] for number in (2, 3)] == [0, 0]
    assert bench.state["running"] == [2, 3]
    bench.tick(1.0)
    assert bench.signals(1.0) == [2] * 6 + [3] * 6
    assert [bench.row(number)["generated"] for number in (2, 3)] == [6, 6]
    assert bench.dependent == []
    assert bench.preemptions == 0


@FACES
def test_v46_c9_a_destination_waits_for_what_it_pushes_out(face: str) -> None:
    bench = Bench(
        face,
        {"g1_to_g2_gbps": 1.0},
        num_gpu_blocks=2,
        max_num_seqs=2,
        kv_cache_bytes_per_token=5_000_000,
        worker_type="decode",
        timing_model=FixedTiming(prefill_ms=1.0, decode_ms=1.0),
    )
    bench.submit(1, PROMPT, 1)
    bench.rank.complete_pass(bench.rank.execute_pass(0.0).pending, 1.0)
    assert (bench.active, bench.inactive) == (0, 1)
    bench.submit(2, [9, 9, 9], 100)
    assert bench.signals(2.0) == [2]
    assert (bench.active, bench.inactive) == (1, 1)
    effects = bench.reserve(3, OTHER, 100.0)
    assert effects.lifecycle_events == []
    assert bench.deadline == pytest.approx(120.0, abs=0.01)
    attempts = bench.state["handoffs"]["attempts"]
    assert bench.tick(100.0).lifecycle_events == []
    assert bench.active == 2
    assert bench.deadline == pytest.approx(120.0, abs=0.01)
    assert bench.state["handoffs"]["attempts"] == attempts
    ticked = bench.transport(bench.deadline)
    assert ticked.lifecycle_events == []
    [event] = ticked.kv_events
    assert event.storage_tier == "host_pinned"
    assert isinstance(event.data, Stored)
    assert bench.active == 1
    assert bench.state["reserved_blocks"] == {}
    [reserved] = bench.tick(120.5).lifecycle_events
    assert isinstance(reserved, DestinationReserved)
    assert bench.state["reserved_blocks"][3] == ([], 1)
    assert bench.active == 2


@FACES
def test_v45_tiers_that_are_never_needed_have_no_deadline(face: str) -> None:
    bench = Bench(face, {})
    bench.submit(1, PROMPT, 4)
    for at in (0.0, 10.0):
        assert bench.deadline is None
        bench.pass_at(at)
    assert bench.deadline is None


@FACES
def test_v55_what_is_below_already_makes_room_at_once(face: str) -> None:
    bench = Bench(face, {"g1_to_g2_gbps": 1.0}, num_gpu_blocks=2, max_num_seqs=2, worker_type="decode")
    # Down, up again, and then it is in both.
    bench.complete(1, PROMPT)
    bench.reserve(50, range(50, 58))
    bench.tick(1.0)
    bench.do(CancelDestination(50), 1.0)
    bench.complete(2, PROMPT, 1.0)
    assert (bench.active, bench.inactive, bench.in_g2, bench.deadline) == (0, 1, 1, None)
    effects = bench.reserve(3, range(4, 12), 2.0)
    assert [type(event) for event in effects.lifecycle_events] == [DestinationReserved]
    assert bench.deadline is None
    assert bench.state["reserved_blocks"][3] == ([], 2)
    assert bench.in_g2 == 1


@FACES
def test_a_burst_is_cut_into_batches_and_as_many_run_at_a_time(face: str) -> None:
    """Two blocks per batch, two batches at a time over a link of 1 GB/s: 2+2 at 4 ms, then the fifth alone."""
    bench = Bench(face, {"g1_to_g2_gbps": 1.0, "offload_batch_size": 2}, num_gpu_blocks=5, worker_type="decode")
    bench.complete(1, range(20))
    bench.kv.clear()
    bench.reserve(2, range(100, 120))
    assert bench.active == 5
    [removed] = bench.kv
    assert isinstance(removed.data, Removed)
    assert len(removed.data.block_hashes) == 5
    assert bench.deadline == pytest.approx(4.0)
    assert bench.tick(4.0).lifecycle_events == []
    assert (bench.active, bench.in_g2) == (1, 4)
    assert bench.deadline == pytest.approx(5.0)
    [reserved] = bench.tick(5.0).lifecycle_events
    assert reserved.transferable_prompt_tokens == 20
    assert (bench.active, bench.in_g2) == (5, 5)
    assert [len(event.data.blocks) for event in bench.hosted()] == [1] * 5
    # What was evicted first is there first, and each names its parent.
    names = [(event.data.parent_hash, event.data.blocks[0].block_hash) for event in bench.hosted()]
    assert [name for _, name in names] == list(removed.data.block_hashes)
    assert [parent for parent, _ in names] == [*[name for _, name in names[1:]], None]


@FACES
def test_g2_evicts_its_oldest_and_skips_what_finds_no_room(face: str) -> None:
    bench = Bench(face, {"num_g2_blocks": 2}, num_gpu_blocks=4, worker_type="decode")
    for number in range(4):
        bench.complete(number + 1, range(number * 10, number * 10 + 4))
    hashes = [event.data.blocks[0].block_hash for event in bench.kv]
    bench.push_out(1)
    bench.push_out(2)
    assert bench.state["tiers"]["g2"]["lru"] == hashes[:2]
    bench.kv.clear()
    bench.push_out(3)
    assert bench.state["tiers"]["g2"]["lru"] == hashes[1:3]
    assert [(type(event.data), event.storage_tier) for event in bench.kv] == [
        (Removed, "device"),
        (Removed, "host_pinned"),
        (Stored, "host_pinned"),
    ]
    assert bench.kv[1].data.block_hashes == (hashes[0],)
    # Three at once into a tier of two: the third of a burst finds no room, since two are on their way.
    tiny = Bench(face, {"num_g2_blocks": 2}, num_gpu_blocks=3, worker_type="decode")
    tiny.complete(1, range(12))
    tiny.push_out(3)
    assert tiny.in_g2 == 2
    assert tiny.state["free_blocks"] == 3


# ---------------------------------------------------------------- swap-in


@FACES
def test_v47_a_hit_is_parked_until_its_blocks_are_back(face: str) -> None:
    bench = Bench(face, {"g2_to_g1_gbps": 1.0})
    in_g2(bench, PROMPT, blocks=8)
    bench.submit(1, PROMPT, 2)
    assert bench.admitted(0.0) == {}
    assert bench.parked == [1]
    assert not bench.rank.is_empty()
    assert not bench.rank.is_ready()
    assert bench.rank.metrics().waiting_requests == 0
    bench.pass_at(0.5)
    assert bench.parked == [1]
    assert bench.admitted(1.0) == {1: 4}
    assert bench.parked == []
    # It is announced once, when it is back.
    assert [event.storage_tier for event in bench.kv if isinstance(event.data, Stored)] == ["device"]


@FACES
def test_v48_a_cold_follower_does_not_take_the_blocks_of_a_swap_in(face: str) -> None:
    bench = Bench(face, {"g2_to_g1_gbps": 1.0}, num_gpu_blocks=1, max_num_seqs=2)
    in_g2(bench, PROMPT, blocks=1)
    bench.submit(1, PROMPT, 0)
    bench.submit(2, OTHER, 0)
    assert bench.admitted(0.0) == {}
    assert (bench.parked, bench.active, bench.state["waiting"]) == ([1], 1, [2])
    assert bench.admitted(0.25) == {}


@FACES
@pytest.mark.parametrize("ruleset", ["dynamo-1.3", "dynamo"])
def test_v49_a_block_on_the_disk_takes_two_hops(face: str, ruleset: str) -> None:
    bench = Bench(
        face,
        {"num_g2_blocks": 1, "num_g3_blocks": 8, "g2_to_g1_gbps": 1.0, "g3_to_g2_gbps": 1.0},
        num_gpu_blocks=2,
        max_num_seqs=1,
        ruleset=ruleset,
    )
    prompt = PROMPT if ruleset == "dynamo-1.3" else [*PROMPT, 4]
    in_g2(bench, PROMPT, blocks=2)
    in_g2(bench, [50, 51, 52, 53], blocks=2)
    tiers = bench.state["tiers"]
    assert (len(tiers["g2"]["resident"]), len(tiers["g3"]["resident"])) == (1, 2)
    bench.submit(1, prompt, 2)
    assert bench.admitted(0.0) == {}
    assert bench.parked == [1]
    # The place in G2 is taken from the start.
    assert [type(event.data) for event in bench.hosted()] == [Removed]
    assert bench.deadline == pytest.approx(1.0)
    bench.tick(1.0)
    assert bench.parked == [1]
    assert bench.deadline == pytest.approx(2.0)
    bench.tick(2.0)
    assert bench.parked == []
    assert bench.admitted(2.0) == {1: 4}


@FACES
def test_one_tick_over_both_hops_is_the_same(face: str) -> None:
    bench = Bench(
        face, {"num_g2_blocks": 1, "num_g3_blocks": 8, "g2_to_g1_gbps": 1.0, "g3_to_g2_gbps": 1.0}, num_gpu_blocks=1
    )
    in_g2(bench, PROMPT, blocks=1)
    in_g2(bench, OTHER, blocks=1)
    bench.submit(1, PROMPT, 0)
    bench.pass_at(0.0)
    bench.tick(1.75)
    assert bench.deadline == pytest.approx(2.0)
    assert bench.admitted(2.0) == {1: 4}


@FACES
def test_v50_the_prefix_in_the_pool_is_kept_for_a_swap_in(face: str) -> None:
    bench = Bench(face, {"g2_to_g1_gbps": 1.0}, num_gpu_blocks=3)
    bench.complete(1, range(12))
    bench.push_out(1)
    assert (bench.inactive, bench.in_g2) == (2, 1)
    bench.submit(2, range(12), 0)
    assert bench.admitted(0.0) == {}
    assert (bench.parked, bench.active) == ([2], 3)
    assert bench.admitted(1.0) == {2: 12}


@FACES
def test_v51_a_cancelled_swap_in_keeps_its_blocks_until_the_transfer_ends(face: str) -> None:
    bench = Bench(face, {"g2_to_g1_gbps": 1.0}, num_gpu_blocks=3)
    bench.complete(1, range(12))
    bench.push_out(1)
    bench.do(SubmitHandoffPrefill(70, Request(2, list(range(12)), 0)))
    bench.pass_at(0.0)
    assert (bench.parked, bench.active) == ([2], 3)
    with pytest.raises(CommandError, match="already active"):
        bench.submit(2, [90])
    assert bench.reserve(3, [90, 91, 92, 93]).lifecycle_events == []
    effects = bench.do(CancelSource(70))
    assert effects.result == Applied()
    assert effects.lifecycle_events == []
    assert bench.parked == []
    assert bench.rank.is_empty()
    assert not bench.rank.is_drained()
    assert bench.do(CancelDestination(3)).result == Applied()
    assert bench.active == 3
    bench.tick(0.5)
    assert bench.active == 3
    assert bench.submit(2, [90, 91], 1).result == Submitted(2)
    bench.tick(10.0)
    assert (bench.active, bench.parked, bench.state["waiting"]) == (0, [], [2])
    assert bench.state["tiers"]["g2"]["pins"] == []
    assert 2 in bench.admitted(10.0)


@FACES
def test_v52_swap_ins_that_end_together_return_in_their_order(face: str) -> None:
    bench = Bench(face, {"g2_to_g1_gbps": 2.0}, num_gpu_blocks=2, max_num_seqs=2)
    in_g2(bench, PROMPT, OTHER, blocks=2)
    for number, prompt in ((1, PROMPT), (2, OTHER), (3, [8, 9, 10, 11])):
        bench.submit(number, prompt, 0)
    assert bench.admitted(0.0) == {}
    assert (bench.parked, bench.state["waiting"]) == ([1, 2], [3])
    assert list(bench.admitted(1.0)) == [1, 2]


@FACES
@pytest.mark.parametrize(("ruleset", "reused"), [("dynamo-1.3", 16), ("dynamo", 12)])
def test_v53_a_prompt_comes_back_as_a_whole(face: str, ruleset: str, reused: int) -> None:
    bench = Bench(face, {"g2_to_g1_gbps": 0.5}, num_gpu_blocks=16, ruleset=ruleset, kv_cache_bytes_per_token=62_500)
    in_g2(bench, list(range(16)), blocks=16)
    bench.submit(1, range(16), 2)
    assert bench.admitted(0.0) == {}
    assert bench.admitted(0.5) == {}
    assert bench.parked == [1]
    assert bench.admitted(2.0) == {1: reused}


@FACES
def test_v54_the_same_times_give_the_same_run(face: str) -> None:
    def run() -> tuple[Any, ...]:
        bench = Bench(
            face,
            {"num_g2_blocks": 32, "g2_to_g1_gbps": 4.0},
            num_gpu_blocks=32,
            max_num_batched_tokens=256,
            max_num_seqs=8,
            kv_cache_bytes_per_token=62_500,
        )
        in_g2(bench, list(range(16)), blocks=32)
        for number in range(4):
            bench.submit(number + 1, range(16), 4)
        bench.submit(9, range(500, 516), 4)
        swapped: set[int] = set()
        admissions = []
        for at in (0.0, 0.5, 0.8, 1.5, 3.0):
            admitted = bench.admitted(at)
            admissions.append(admitted)
            swapped |= set(bench.parked)
        stores = sum(isinstance(event.data, Stored) for event in bench.kv)
        removals = sum(isinstance(event.data, Removed) for event in bench.kv)
        return admissions, stores, removals, len(swapped & {n for admitted in admissions for n in admitted})

    first = run()
    assert first == run()
    assert first[3] == 4


@FACES
def test_a_swap_in_that_must_push_out_waits_for_it(face: str) -> None:
    bench = Bench(face, {"g1_to_g2_gbps": 1.0, "g2_to_g1_gbps": 1.0}, num_gpu_blocks=1)
    bench.complete(1, PROMPT)
    bench.reserve(50, OTHER)
    bench.tick(1.0)
    bench.do(CancelDestination(50), 1.0)
    bench.complete(2, OTHER, 1.0)
    bench.submit(3, PROMPT, 0, 1.0)
    assert bench.admitted(1.0) == {}
    assert (bench.parked, bench.dependent, bench.state["waiting"]) == ([], [3], [3])
    assert bench.state["tiers"]["g2"]["pins"] == []
    assert bench.deadline == pytest.approx(2.0)
    assert bench.admitted(2.0) == {}
    assert (bench.parked, bench.dependent) == ([3], [])
    assert bench.admitted(3.0) == {3: 4}


@FACES
def test_an_object_store_keeps_everything(face: str) -> None:
    bench = Bench(
        face, {"num_g2_blocks": 1, "g4_storage": True, "g4_to_g2_gbps": 1.0, "g2_to_g4_gbps": 1.0}, num_gpu_blocks=1
    )
    bench.complete(1, PROMPT)
    bench.reserve(50, OTHER)
    [reserved] = bench.tick(0.0).lifecycle_events
    assert isinstance(reserved, DestinationReserved)
    bench.do(CancelDestination(50))
    # The copy to the object store goes on in the background: nobody waits for it, the rank is not drained.
    assert bench.deadline == pytest.approx(1.0)
    assert not bench.rank.is_drained()
    assert bench.state["tiers"]["g2"]["pins"] != []
    bench.tick(1.0)
    assert bench.rank.is_drained()
    assert bench.state["tiers"]["g2"]["pins"] == []
    bench.complete(2, OTHER, 1.0)
    bench.push_out(1, 1.0)
    assert len(bench.state["tiers"]["g4"]["resident"]) == 1
    bench.tick(2.0)
    assert len(bench.state["tiers"]["g4"]["resident"]) == 2
    bench.submit(3, PROMPT, 0, 2.0)
    assert bench.admitted(2.0) == {}
    assert bench.deadline == pytest.approx(3.0)
    assert bench.admitted(3.0) == {3: 4}


@FACES
def test_a_staging_that_finds_no_room_uses_what_is_in_host_memory(face: str) -> None:
    """G2 holds the first block of the prompt and nothing else: the second comes through it when the first is back."""
    bench = Bench(face, {"num_g2_blocks": 1, "num_g3_blocks": 8, "g2_to_g1_gbps": 1.0}, num_gpu_blocks=2)
    bench.complete(1, range(8))
    # Leaves go first: the root is the last one in G2, both are on the disk.
    bench.push_out(1)
    bench.push_out(2)
    assert bench.state["tiers"]["g3"]["resident"] != []
    bench.submit(2, range(8), 0)
    assert bench.admitted(0.0) == {}
    assert bench.state["parked"][0][2] == bench.state["tiers"]["g2"]["resident"]
    assert bench.admitted(1.0) == {}
    assert bench.parked == [2]
    assert bench.admitted(2.0) == {2: 8}


@FACES
def test_a_pass_without_work_ends_when_a_transfer_does(face: str) -> None:
    bench = Bench(face, {"g2_to_g1_gbps": 1.0})
    in_g2(bench, PROMPT, blocks=8)
    bench.submit(1, PROMPT, 0)
    assert bench.pass_at(0.0).end_ms == pytest.approx(1.0)
