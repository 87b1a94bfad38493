"""The KVBM tiers in the kernel: the offload scenarios of spec/acceptance-vllm.md and what bounds them."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim import (
    CancelDestination,
    CancelSource,
    CommandContext,
    CommandError,
    ConfigError,
    EngineConfig,
    KvbmTiers,
    NativeHostOffload,
    RankIdentity,
    Request,
    ReserveDestination,
    SchedulerRank,
    Submit,
    SubmitHandoffPrefill,
)
from kvsim._core.content import hash_parts
from kvsim.contract import Applied, DestinationReserved
from kvsim.layout import Tier

MB = 1_000_000


def build(blocks: int, *, block_bytes: int = MB, ruleset: str = "dynamo-1.3", seqs: int = 4, **fields) -> SchedulerRank:
    """A rank of 4-token blocks; `tiers` are the fields of KvbmTiers."""
    tiers = {"num_g2_blocks": 8, "g1_to_g2_gbps": 1.0, "g2_to_g1_gbps": 1.0} | fields.pop("tiers", {})
    config = EngineConfig(
        ruleset=ruleset,
        num_gpu_blocks=blocks,
        block_size=4,
        max_num_seqs=seqs,
        max_num_batched_tokens=fields.pop("budget", 64),
        speedup_ratio=0.0,
        emit_kv_events=True,
        kv_cache_bytes_per_token=block_bytes // 4,
        kvbm_tiers=KvbmTiers(**tiers),
        **fields,
    )
    return SchedulerRank(RankIdentity(), config)


def submit(rank: SchedulerRank, number: int, tokens, out: int, at: float = 0.0):
    return rank.apply_command(Submit(Request(number, tokens, max_output_tokens=out)), CommandContext(at))


def reserve(rank: SchedulerRank, number: int, tokens, at: float = 0.0):
    request = Request(number, tokens, max_output_tokens=2)
    return rank.apply_command(ReserveDestination(1000 + number, request), CommandContext(at)).lifecycle_events


def run(rank: SchedulerRank, at: float):
    """One pass that is completed at its end: (pass, completion effects)."""
    executed = rank.execute_pass(at)
    done = rank.complete_pass(executed.pending, executed.end_ms)
    rank.check_integrity()
    return executed, done


def drain(rank: SchedulerRank, at: float) -> float:
    """Passes until nobody is left, going to the next deadline if a pass does nothing."""
    for _ in range(200):
        if rank.is_empty() and rank.next_internal_deadline_ms() is None:
            return at
        due = rank.next_internal_deadline_ms()
        if rank.is_ready():
            at = run(rank, at)[0].end_ms
        elif due is not None:
            at = max(at, due)
        rank.tick_offload_only(at)
        rank.check_integrity()
    raise AssertionError(f"not drained at {at}: {rank.metrics()}")


def fill(rank: SchedulerRank, tokens, tier: Tier = Tier.G2, first: int = 0) -> None:
    """Have the full blocks of a prompt from `first` on in a tier, as if they had been offloaded in the past."""
    tokens = np.array(list(tokens), np.uint32)
    hashes, _ = hash_parts([tokens], None, 0, 0, 0, 4, len(tokens), False)
    rank._state.tier_put(tier, hashes[first:].tolist())


def tiers_of(events) -> list[str]:
    return [event.storage_tier for event in events]


def test_a_destination_waits_for_the_copy_of_what_it_displaces():
    """V46 and C9."""
    rank = build(2, seqs=2, block_bytes=20 * MB)
    submit(rank, 1, range(4), 1)
    run(rank, 0.0)
    assert rank.metrics().active_blocks == 0
    assert rank.metrics().inactive_blocks == 1
    submit(rank, 2, [9, 9, 9], 100)
    run(rank, 0.0)
    assert rank.metrics().active_blocks == 1
    assert rank.metrics().inactive_blocks == 1
    assert reserve(rank, 3, range(4, 8), at=100.0) == []
    assert rank.next_internal_deadline_ms() == pytest.approx(120.0, abs=0.01)
    idle = rank.tick_offload_only(100.0)
    assert idle.lifecycle_events == []
    assert rank.metrics().active_blocks == 2
    assert rank.next_internal_deadline_ms() == pytest.approx(120.0, abs=0.01)
    moved = rank.tick_offload_transport_only(rank.next_internal_deadline_ms())
    assert moved.lifecycle_events == []
    assert tiers_of(moved.kv_events) == ["host_pinned"]
    assert rank.metrics().active_blocks == 1
    assert len(rank.block_table(3)) == 0
    assert [type(e) for e in rank.tick_offload_only(120.0).lifecycle_events] == [DestinationReserved]
    assert len(rank.block_table(3)) == 1
    rank.check_integrity()


def test_blocks_that_g2_has_leave_their_slots_at_once():
    """V55: the caller of the allocation sees success."""
    rank = build(2, seqs=2)
    submit(rank, 1, range(4), 1)
    at = drain(rank, 0.0)
    fill(rank, range(4))
    assert (rank.metrics().active_blocks, rank.metrics().inactive_blocks) == (0, 1)
    events = reserve(rank, 3, range(4, 12), at)
    assert [type(e) for e in events] == [DestinationReserved]
    assert rank.next_internal_deadline_ms() is None
    assert len(rank.block_table(3)) == 2


def test_growth_waits_for_an_offload_and_nobody_is_preempted():
    """V43 with a block that an earlier request left behind."""
    rank = build(3, worker_type="decode")
    submit(rank, 1, range(100, 104), 1)
    at = drain(rank, 0.0)
    submit(rank, 2, range(4), 8, at)
    submit(rank, 3, range(10, 12), 4, at)
    executed, done = run(rank, at)
    assert [o.request_id for o in done.outputs] == [3]
    row = rank.request_row(2)
    assert (row["generated"], row["allocated"], row["computed"]) == (0, 4, 4)
    assert rank.metrics().preemptions_total == 0
    assert rank.metrics().running_requests == 2
    _, done = run(rank, executed.end_ms)
    assert 2 in [o.request_id for o in done.outputs]
    row = rank.request_row(2)
    assert (row["generated"], row["allocated"]) == (1, 5)
    assert rank.metrics().preemptions_total == 0
    assert rank.offload_dependency_ms(2) is None


def test_speculative_growth_waits_for_an_offload():
    """V44."""
    rank = build(5, worker_type="decode", aic_nextn=5, aic_nextn_accept_rates="1,1,1,1,1")
    submit(rank, 1, range(100, 104), 1)
    at = drain(rank, 0.0)
    submit(rank, 2, range(4), 20, at)
    submit(rank, 3, range(10, 12), 20, at)
    executed, done = run(rank, at)
    assert len(done.outputs) == 0
    assert executed.end_ms == pytest.approx(at + 1.0)
    assert [rank.request_row(i)["generated"] for i in (2, 3)] == [0, 0]
    _, done = run(rank, executed.end_ms)
    assert [rank.request_row(i)["generated"] for i in (2, 3)] == [6, 6]
    assert rank.metrics().preemptions_total == 0


def test_a_prompt_in_g2_is_parked_until_it_has_come_back():
    """V47."""
    rank = build(8)
    fill(rank, range(4))
    at = 0.0
    submit(rank, 1, range(4), 2, at)
    first = rank.execute_pass(at)
    assert len(first.start_effects.admissions) == 0
    assert len(rank.parked) == 1
    assert first.end_ms == at + 1.0
    assert rank.metrics().waiting_requests == 0
    assert not rank.is_ready()
    assert not rank.is_empty()
    rank.complete_pass(first.pending, at)
    rank.execute_pass(at + 0.5)
    assert len(rank.parked) == 1
    last = rank.execute_pass(at + 1.0)
    assert len(rank.parked) == 0
    assert [(a.request_id, a.reused_input_tokens) for a in last.start_effects.admissions] == [(1, 4)]
    rank.check_integrity()


def test_a_follower_cannot_take_the_slots_of_a_parked_request():
    """V48."""
    rank = build(1, seqs=2)
    fill(rank, range(4))
    at = 0.0
    submit(rank, 1, range(4), 1, at)
    submit(rank, 2, range(4, 8), 1, at)
    executed = rank.execute_pass(at)
    assert len(executed.start_effects.admissions) == 0
    assert rank.metrics().active_blocks == 1
    assert rank.requests["id_lo"][rank.waiting].tolist() == [2]
    rank.check_integrity()


def test_a_prompt_in_g3_takes_two_hops():
    """V49."""
    rank = build(1, seqs=1, tiers={"num_g2_blocks": 1, "num_g3_blocks": 8, "g3_to_g2_gbps": 1.0})
    fill(rank, range(4), Tier.G3)
    at = 0.0
    submit(rank, 1, range(4), 1, at)
    executed = rank.execute_pass(at)
    assert len(rank.parked) == 1
    assert len(executed.start_effects.admissions) == 0
    rank.tick_offload_only(at + 1.0)
    assert len(rank.parked) == 1
    rank.tick_offload_only(at + 2.0)
    assert len(rank.parked) == 0
    last = rank.execute_pass(at + 2.0)
    assert [(a.request_id, a.reused_input_tokens) for a in last.start_effects.admissions] == [(1, 4)]
    rank.check_integrity()


def split_prompt(rank: SchedulerRank) -> float:
    """range(12) with its first two blocks inactive on a device of three blocks and the third in G2."""
    submit(rank, 992, range(8), 1)
    at = drain(rank, 0.0)
    fill(rank, range(12), first=2)
    return at


def test_the_prefix_of_a_parked_request_is_pinned():
    """V50."""
    rank = build(3)
    at = split_prompt(rank)
    assert (rank.metrics().active_blocks, rank.metrics().inactive_blocks) == (0, 2)
    submit(rank, 1, range(12), 1, at)
    executed = rank.execute_pass(at)
    assert len(executed.start_effects.admissions) == 0
    assert len(rank.parked) == 1
    assert rank.metrics().active_blocks == 3
    rank.check_integrity()


def test_a_cancelled_parked_request_leaves_its_pins_behind():
    """V51."""
    rank = build(3, worker_type="prefill")
    at = split_prompt(rank)
    request = Request(1, range(12), max_output_tokens=1)
    rank.apply_command(SubmitHandoffPrefill(7, request), CommandContext(at))
    rank.execute_pass(at)
    assert len(rank.parked) == 1
    assert rank.metrics().active_blocks == 3
    with pytest.raises(CommandError, match="already active"):
        submit(rank, 1, range(4), 1, at)
    assert reserve(rank, 2, range(50, 54), at) == []
    effects = rank.apply_command(CancelSource(7), CommandContext(at))
    assert isinstance(effects.result, Applied)
    assert effects.lifecycle_events == []
    assert len(rank.parked) == 0
    assert rank.request_row(1) is None
    assert isinstance(rank.apply_command(CancelDestination(1002), CommandContext(at)).result, Applied)
    assert rank.metrics().active_blocks == 3
    rank.tick_offload_only(at + 0.5)
    assert rank.metrics().active_blocks == 3
    assert not rank.is_drained()
    submit(rank, 1, range(70, 74), 1, at + 0.5)
    rank.check_integrity()
    rank.tick_offload_only(at + 10.0)
    assert rank.metrics().active_blocks == 0
    assert rank.request_row(1) is not None
    last = rank.execute_pass(at + 10.0)
    assert [a.request_id for a in last.start_effects.admissions] == [1]
    rank.check_integrity()


def test_parked_requests_return_in_their_order():
    """V52."""
    rank = build(2, seqs=2, tiers={"g2_to_g1_gbps": 2.0})
    fill(rank, range(4))
    fill(rank, range(4, 8))
    at = 0.0
    for number, start in ((1, 0), (2, 4), (3, 8)):
        submit(rank, number, range(start, start + 4), 1, at)
    executed = rank.execute_pass(at)
    assert len(executed.start_effects.admissions) == 0
    assert rank.requests["id_lo"][rank.parked].tolist() == [1, 2]
    assert rank.requests["id_lo"][rank.waiting].tolist() == [3]
    last = rank.execute_pass(at + 1.0)
    assert [a.request_id for a in last.start_effects.admissions] == [1, 2]
    rank.check_integrity()


def test_several_blocks_come_back_together():
    """V53."""
    rank = build(16, block_bytes=250_000)
    fill(rank, range(16))
    at = 0.0
    submit(rank, 1, range(16), 1, at)
    rank.execute_pass(at)
    assert len(rank.parked) == 1
    rank.execute_pass(at + 0.5)
    assert len(rank.parked) == 1
    last = rank.execute_pass(at + 2.0)
    assert [(a.request_id, a.reused_input_tokens) for a in last.start_effects.admissions] == [(1, 16)]
    kinds = [e.storage_tier for e in last.start_effects.kv_events]
    assert "host_pinned" not in kinds


def test_a_fork_goes_on_alike_with_transfers_in_flight():
    rank = build(5, tiers={"num_g3_blocks": 4, "g4_storage": True, "offload_batch_size": 1})
    at = split_prompt(rank)
    submit(rank, 1, range(12), 3, at)
    submit(rank, 2, range(30, 38), 3, at)
    run(rank, at)
    saved = rank.snapshot()
    other = rank.fork()
    assert other.digest() == rank.digest()
    end = drain(rank, at)
    assert drain(other, at) == end
    assert other.digest() == rank.digest()
    other.restore(saved)
    assert drain(other, at) == end
    assert other.digest() == rank.digest()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("backend", {"backend": "trtllm"}),
        ("enable_prefix_caching", {"enable_prefix_caching": False, "emit_kv_events": False}),
        ("kvbm_tiers", {"native_host_offload": NativeHostOffload(num_host_blocks=4)}),
        ("kvbm_tiers.num_g2_blocks", {"kvbm_tiers": {"num_g2_blocks": 0}}),
        ("kvbm_tiers.offload_batch_size", {"kvbm_tiers": {"num_g2_blocks": 1, "offload_batch_size": -1}}),
        ("kvbm_tiers.g3_to_g2_gbps", {"kvbm_tiers": {"num_g2_blocks": 1, "g3_to_g2_gbps": float("inf")}}),
        ("kvbm_tiers.g1_to_g2_gbps", {"kvbm_tiers": {"num_g2_blocks": 1, "g1_to_g2_gbps": 1e-320}}),
        ("kvbm_tiers.num_g2_blocks", {"kvbm_tiers": {"num_g2_blocks": 2**63}}),
    ],
)
def test_what_the_tiers_cannot_be_combined_with_is_named(field, changes):
    values = {"kv_cache_bytes_per_token": 1000, "kvbm_tiers": {"num_g2_blocks": 4}} | changes
    with pytest.raises(ConfigError) as error:
        EngineConfig(**values | {"kvbm_tiers": KvbmTiers(**values["kvbm_tiers"])})
    assert error.value.field == field


def test_no_batch_size_is_the_default_one():
    assert KvbmTiers(num_g2_blocks=1, offload_batch_size=0).offload_batch_size == 32


def test_without_the_size_of_a_token_nothing_is_attached():
    """A14 and A17."""
    config = EngineConfig(num_gpu_blocks=2, block_size=4, kvbm_tiers=KvbmTiers(num_g2_blocks=8))
    assert config.tiers_attached is None
    rank = SchedulerRank(RankIdentity(), config)
    assert rank.next_internal_deadline_ms() is None
    assert rank.tick_offload_only(5.0).kv_events == ()
