"""Halves of handoffs inside one rank of the paged engines.

Names carry the number of the scenario in the acceptance lists: `a` of the shared contract and of its hold tables,
`v` of the vLLM core, `r` of the neutral rank. Values without a mark hold under both rule sets.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kv_index import KvIndex
from kvsim.config import FixedTiming
from kvsim.contract import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    CommandContext,
    CommandEffects,
    DestinationAccepted,
    DestinationReserved,
    Noop,
    PendingPass,
    RankIdentity,
    ReleaseSource,
    Request,
    ReserveDestination,
    SourceHeld,
    Stored,
    Submit,
    SubmitHandoffPrefill,
    Submitted,
    TransferTiming,
)
from kvsim.errors import CommandError
from kvsim.layout import HandoffRole
from support import Engine, Step

BOTH = pytest.mark.parametrize("ruleset", ["dynamo", "dynamo-1.3"])
OLD, NEW = "dynamo-1.3", "dynamo"
ROLE = HandoffRole


class Half(Engine):
    """A rank that is driven by handoff commands; every one of them is followed by a check of all invariants."""

    def do(
        self, command: Command, *, at: float | None = None, in_flight: bool = False, pending: PendingPass | None = None
    ) -> CommandEffects:
        context = CommandContext(self.now if at is None else at, in_flight)
        effects = self.rank.apply_command(command, context, pending)
        self.rank.check_integrity()
        return effects

    def source(self, handoff: int, request: int, tokens: Iterable[int], out: int = 2) -> CommandEffects:
        return self.do(SubmitHandoffPrefill(handoff, Request(request, list(tokens), out)))

    def reserve(self, handoff: int, request: int, tokens: Iterable[int], out: int = 2, **how: Any) -> CommandEffects:
        return self.do(ReserveDestination(handoff, Request(request, list(tokens), out)), **how)

    def destination(self, handoff: int) -> HandoffRole:
        return self.rank.handoff_role(handoff, destination=True)

    def source_role(self, handoff: int) -> HandoffRole:
        return self.rank.handoff_role(handoff, destination=False)

    @property
    def attempts(self) -> int:
        return int(self.rank.header[0]["reserve_attempts"])

    @property
    def live(self) -> int:
        """Requests in queues or running, as the reference engines count them."""
        return len(self.rank.running) + len(self.rank.waiting)

    def retry(self) -> list[Any]:
        """What a boundary without a pass shows."""
        return self.rank.complete_idle_group_pass(self.now, self.now).lifecycle_events

    def run_to_hold(self, most: int = 8) -> list[Step]:
        steps = []
        while not self.rank.is_empty():
            assert len(steps) < most
            steps.append(self.step())
        return steps

    @property
    def gone(self) -> bool:
        return self.rank.is_empty() and self.rank.is_drained() and self.rank.metrics()[6:8] == (0, 0)


def contract(**fields: Any) -> Half:
    """Config A of the shared contract."""
    return Half(**{"max_num_batched_tokens": 16, "max_num_seqs": 1, **fields})


def prefill(**fields: Any) -> Half:
    """The source holds of the V scenarios."""
    return Half(
        **{
            "num_gpu_blocks": 8,
            "max_num_batched_tokens": 8,
            "max_num_seqs": 1,
            "enable_prefix_caching": False,
            "worker_type": "prefill",
            **fields,
        }
    )


def decode(**fields: Any) -> Half:
    """The destination lifecycle of the V scenarios."""
    return Half(
        **{
            "num_gpu_blocks": 12,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 1,
            "worker_type": "decode",
            **fields,
        }
    )


def admitted(step: Step) -> list[int]:
    return [admission.request_id for admission in step.start.admissions]


def reserved(effects: CommandEffects) -> list[int]:
    """Requests whose destination a command reserved."""
    assert all(isinstance(event, DestinationReserved) for event in effects.lifecycle_events)
    return [event.request_id for event in effects.lifecycle_events]


def stored(events: Iterable[Any]) -> list[int]:
    return [block.block_hash for event in events if isinstance(event.data, Stored) for block in event.data.blocks]


# ---------------------------------------------------------------- the shared contract


@BOTH
def test_a5_source_survives_an_unavailable_destination(ruleset: str) -> None:
    source = contract(num_gpu_blocks=8, worker_type="prefill", ruleset=ruleset)
    destination = contract(num_gpu_blocks=2, worker_type="decode", ruleset=ruleset)
    assert destination.reserve(2, 20, range(100, 108)).result == DestinationAccepted(20)
    assert source.source(1, 10, range(8)).result == Submitted(10)
    source.run_to_hold()
    assert source.rank.is_empty()
    assert not source.rank.is_drained()
    assert source.rank.waiting_for_external_command()
    assert destination.reserve(1, 10, range(4)).result == DestinationAccepted(10)
    assert destination.destination(1) is ROLE.DESTINATION_PENDING
    assert destination.do(CancelDestination(1)).result == Applied()
    assert destination.do(CancelDestination(2)).result == Applied()
    assert source.do(CancelSource(1)).result == Applied()
    assert source.gone
    assert destination.gone
    assert source.active == destination.active == 0


def test_a6_cancellation_retries_the_head() -> None:
    rank = contract(num_gpu_blocks=2, worker_type="decode")
    assert rank.reserve(1, 10, range(8)).lifecycle_events == [DestinationReserved(1, 10, 8)]
    assert rank.reserve(2, 20, range(100, 104)).lifecycle_events == []
    effects = rank.do(CancelDestination(1))
    assert effects.result == Applied()
    assert effects.lifecycle_events == [DestinationReserved(2, 20, 4)]
    assert effects.retired_requests == (10,)


@BOTH
def test_a7_a_blocked_head_holds_back_fresh_work(ruleset: str) -> None:
    rank = contract(num_gpu_blocks=4, worker_type="decode", ruleset=ruleset)
    assert reserved(rank.reserve(1, 10, range(8))) == [10]
    assert rank.active == 2
    assert reserved(rank.reserve(2, 20, range(100, 112))) == []
    assert rank.rank.is_empty()
    assert not rank.rank.is_drained()
    assert rank.rank.waiting_for_external_command()
    step = rank.step(0.0)
    assert step.end_ms == 0.0
    assert not admitted(step)
    assert not step.effects.outputs
    rank.submit(30, range(300, 304))
    step = rank.step(0.0)
    assert step.end_ms == 0.0
    assert not admitted(step)
    assert not step.effects.outputs
    assert rank.live == 1
    assert rank.active == 2
    assert rank.rank.stuck_head() is None
    assert rank.do(ActivateDestination(1)).result == Applied()
    assert admitted(rank.step(0.0)) == [10]
    assert rank.do(CancelDestination(2)).result == Applied()
    assert rank.do(CancelDestination(1)).result == Applied()
    assert admitted(rank.step(1.0)) == [30]


def test_a8_nothing_is_tried_twice_without_a_change_of_capacity() -> None:
    rank = contract(num_gpu_blocks=2, worker_type="decode")
    assert reserved(rank.reserve(1, 10, range(8))) == [10]
    assert reserved(rank.reserve(2, 20, range(100, 104))) == []
    tried = rank.attempts
    assert tried == 2
    for _ in range(3):
        assert rank.retry() == []
    assert rank.attempts == tried
    assert reserved(rank.do(CancelDestination(1))) == [20]
    assert rank.attempts == tried + 1
    assert rank.do(CancelDestination(2)).result == Applied()


@BOTH
def test_a9_a_materialised_request_passes_a_blocked_head(ruleset: str) -> None:
    rank = contract(num_gpu_blocks=4, worker_type="decode", ruleset=ruleset)
    rank.submit(30, range(200, 204), 2)
    assert reserved(rank.reserve(1, 10, range(8))) == [10]
    assert rank.do(ActivateDestination(1)).result == Applied()
    assert reserved(rank.reserve(2, 20, range(100, 112))) == []
    assert admitted(rank.step(0.0)) == [10]
    seen: list[int] = []
    for at in range(1, 5):
        step = rank.step(float(at))
        seen += [event.request_id for event in (*step.effects.lifecycle_events, *rank.retry())]
        assert seen == [20]
    assert rank.do(CancelDestination(2)).result == Applied()


@pytest.mark.parametrize(("ruleset", "active"), [(NEW, 4), (OLD, 5)])
def test_a10_cancel_an_activated_request_that_waits(ruleset: str, active: int) -> None:
    rank = contract(num_gpu_blocks=16, worker_type="decode", ruleset=ruleset)
    assert reserved(rank.reserve(1, 10, range(8))) == [10]
    assert rank.active > 0
    rank.submit(30, range(100, 108), 8)
    assert len(admitted(rank.step(0.0))) == 1
    assert rank.active == active
    assert rank.do(ActivateDestination(1)).result == Applied()
    assert rank.active == active
    assert rank.do(CancelDestination(1)).result == Applied()
    assert rank.do(CancelDestination(1)).result == Noop()
    assert rank.live == 1


def test_a11_cancel_before_completion() -> None:
    rank = contract(num_gpu_blocks=8, worker_type="prefill")
    rank.source(1, 10, range(8))
    assert rank.live == 1
    effects = rank.do(CancelSource(1))
    assert effects.result == Applied()
    assert effects.retired_requests == (10,)
    assert rank.gone
    assert rank.do(CancelSource(1)).result == Noop()


def test_b1_b2_handoffs_and_requests_pair_one_to_one() -> None:
    rank = prefill()
    rank.source(1, 10, range(8), 1)
    rank.step()
    assert rank.source_role(1) is ROLE.SOURCE_HELD
    with pytest.raises(CommandError, match="already active"):
        rank.source(2, 10, range(8))
    with pytest.raises(CommandError, match="handoff_id: 1 is already active"):
        rank.source(1, 11, range(8))
    assert rank.do(ReleaseSource(1)).retired_requests == (10,)
    assert rank.do(ReleaseSource(1)).result == Noop()
    rank.source(1, 10, range(8))
    assert rank.source_role(1) is ROLE.SOURCE_REGISTERED


def test_b4_b5_transfer_timing_of_a_held_source() -> None:
    for given, bandwidth in ((1.0, 1.0), (0.0, None), (None, None)):
        rank = prefill(
            kv_transfer_bytes_per_token=1000, kv_transfer_bandwidth=given, kv_transfer_timing_mode="destination_missing"
        )
        rank.source(1, 10, range(8), 1)
        (event,) = rank.step().effects.lifecycle_events
        assert event == SourceHeld(1, 10, TransferTiming("destination_missing", 8, 1000, bandwidth))


def test_b7_one_reservation_per_trigger() -> None:
    rank = decode(num_gpu_blocks=4)
    assert reserved(rank.reserve(1, 10, range(16))) == [10]
    assert reserved(rank.reserve(2, 20, range(100, 104))) == []
    assert reserved(rank.reserve(3, 30, range(200, 204))) == []
    assert reserved(rank.do(CancelDestination(1))) == [20]
    assert [event.request_id for event in rank.retry()] == [30]
    assert rank.retry() == []


def _running(rank: Half) -> None:
    rank.submit(7, range(50, 54), 4)
    rank.step()


def _held_source(rank: Half) -> None:
    rank.source(1, 7, range(50, 54), 1)
    rank.step()


def _pending(rank: Half) -> None:
    rank.reserve(8, 80, range(48))
    rank.reserve(1, 7, range(50, 54))


def _active(rank: Half) -> None:
    rank.reserve(1, 7, range(50, 54))
    rank.do(ActivateDestination(1))


@pytest.mark.parametrize(
    "prepare",
    [
        lambda rank: rank.submit(7, range(50, 54)),
        _running,
        lambda rank: rank.source(1, 7, range(50, 54)),
        _held_source,
        _pending,
        lambda rank: rank.reserve(1, 7, range(50, 54)),
        _active,
    ],
    ids=["waiting", "running", "registered", "held source", "pending", "held destination", "active"],
)
def test_b8_an_owned_request_id_is_refused_and_nothing_changes(prepare: Callable[[Half], Any]) -> None:
    rank = decode(emit_kv_events=True)
    prepare(rank)
    before, metrics = rank.rank.digest(), rank.rank.metrics()
    for command in (
        Submit(Request(7, [1, 2, 3], 1)),
        SubmitHandoffPrefill(99, Request(7, [1, 2, 3], 1)),
        ReserveDestination(99, Request(7, [1, 2, 3], 1)),
    ):
        with pytest.raises(CommandError, match="already active"):
            rank.do(command)
    assert rank.rank.digest() == before
    assert rank.rank.metrics() == metrics
    assert rank.destination(99) is rank.source_role(99) is ROLE.NONE


def test_b8_a_destination_handoff_is_refused_in_every_state() -> None:
    rank = decode(num_gpu_blocks=4)
    rank.reserve(1, 10, range(16))
    rank.reserve(2, 20, range(100, 104))
    for handoff in (1, 2):
        with pytest.raises(CommandError, match=f"handoff_id: {handoff} is already active"):
            rank.reserve(handoff, 99, range(4))
    rank.do(ActivateDestination(1))
    with pytest.raises(CommandError, match="handoff_id: 1 is already active"):
        rank.reserve(1, 99, range(4))
    # Sources and destinations have tables of their own.
    assert rank.source(1, 99, range(4)).result == Submitted(99)


def test_b9_a_prompt_larger_than_the_pool_is_refused() -> None:
    rank = decode(num_gpu_blocks=2, max_model_len=100)
    with pytest.raises(CommandError, match=r"destination prompt exceeds the KV pool capacity: needs 3 > 2 blocks"):
        rank.reserve(1, 10, range(9))
    assert rank.gone
    with pytest.raises(CommandError, match="reaches max_model_len 100"):
        rank.reserve(1, 10, range(100))
    assert rank.gone
    assert rank.attempts == 0


def test_b10_commands_that_find_nothing_are_noops() -> None:
    rank = decode(num_gpu_blocks=2)
    rank.reserve(1, 10, range(8))
    rank.reserve(2, 20, range(100, 104))
    before = rank.rank.digest()
    for command in (
        ActivateDestination(2),
        ActivateDestination(9),
        CancelDestination(9),
        ReleaseSource(9),
        CancelSource(9),
        ReleaseSource(1),
        CancelRequest(10),
        CancelRequest(20),
    ):
        effects = rank.do(command)
        assert effects.result == Noop()
        assert not effects.retired_requests
        assert not effects.lifecycle_events
    assert rank.rank.digest() == before


# ---------------------------------------------------------------- source holds


@pytest.mark.parametrize(("ruleset", "first", "last"), [(NEW, 2, 3), (OLD, 3, 3)])
def test_v1_a_source_is_held_with_its_blocks(ruleset: str, first: int, last: int) -> None:
    rank = prefill(ruleset=ruleset)
    rank.source(1, 10, range(8))
    step = rank.step()
    assert [output.completed for output in step.effects.outputs] == [False]
    assert not step.effects.lifecycle_events
    assert rank.active == first
    step = rank.step()
    assert [output.completed for output in step.effects.outputs] == [True]
    assert step.effects.lifecycle_events == [SourceHeld(1, 10, TransferTiming("full_prompt", 8, None, None))]
    assert rank.source_role(1) is ROLE.SOURCE_HELD
    assert rank.live == 0
    assert rank.rank.metrics()[6:8] == (0, 0)
    assert rank.active == last
    assert len(rank.rank.block_table(10)) == last
    effects = rank.do(ReleaseSource(1))
    assert effects.result == Applied()
    assert effects.retired_requests == (10,)
    assert effects.metrics is not None
    assert effects.metrics.active_blocks == 0
    assert rank.source_role(1) is ROLE.NONE
    assert rank.do(ReleaseSource(1)).result == Noop()
    assert rank.active == 0
    assert rank.gone


@BOTH
def test_v2_cancel_and_early_release(ruleset: str) -> None:
    rank = prefill(ruleset=ruleset)
    rank.source(1, 10, range(8))
    rank.run_to_hold()
    assert rank.active > 0
    assert rank.do(CancelSource(1)).result == Applied()
    assert rank.active == 0
    assert rank.do(CancelSource(1)).result == Noop()
    rank.source(1, 11, range(8))
    effects = rank.do(ReleaseSource(1))
    assert effects.result == Applied()
    assert not effects.retired_requests
    assert rank.source_role(1) is ROLE.NONE
    rank.step()
    step = rank.step()
    assert step.effects.outputs[0].completed
    assert not step.effects.lifecycle_events
    assert rank.active == 0
    assert rank.gone


def test_v3_a_submitted_id_cannot_become_a_source() -> None:
    rank = prefill()
    rank.submit(10, range(8), 2)
    with pytest.raises(CommandError, match="already active"):
        rank.submit(10, range(8), 2)
    with pytest.raises(CommandError, match="already active"):
        rank.source(1, 10, range(8))
    assert rank.source_role(1) is ROLE.NONE
    assert rank.live == 1


def test_a_released_source_leaves_its_prefix_as_cache() -> None:
    rank = prefill(enable_prefix_caching=True, emit_kv_events=True)
    rank.source(1, 10, range(10), 1)
    steps = rank.run_to_hold()
    assert len(stored(event for step in steps for event in step.effects.kv_events)) == 2
    assert (rank.active, rank.inactive) == (3, 0)
    effects = rank.do(ReleaseSource(1))
    assert not effects.kv_events
    assert (rank.active, rank.inactive) == (0, 2)
    rank.submit(11, range(10), 1)
    assert rank.step().start.admissions[0].reused_input_tokens == 8


def test_a_rejected_source_is_not_held() -> None:
    rank = prefill(num_gpu_blocks=2)
    rank.source(1, 10, range(20), 1)
    step = rank.step()
    assert step.effects.outputs[0].rejected
    assert not step.effects.lifecycle_events
    assert rank.gone


def test_prefill_without_output_is_held() -> None:
    rank = prefill()
    rank.source(1, 10, range(8), 0)
    step = rank.step()
    assert [(output.token_id, output.completed) for output in step.effects.outputs] == [(None, True)]
    assert [event.request_id for event in step.effects.lifecycle_events] == [10]
    assert rank.do(CancelRequest(10)).result == Noop()
    assert rank.do(ReleaseSource(1)).result == Applied()
    assert rank.gone


# ---------------------------------------------------------------- destinations


@BOTH
def test_v5_a_destination_counts_once(ruleset: str) -> None:
    rank = decode(num_gpu_blocks=6, max_num_batched_tokens=32, ruleset=ruleset)

    def queued(step: Step) -> tuple[int, int, float]:
        fpm = step.effects.forward_pass_metrics
        return fpm.num_queued_decode, fpm.sum_queued_decode_kv_tokens, fpm.var_queued_decode_kv_tokens

    assert reserved(rank.reserve(1, 10, [1] * 4, 1)) == [10]
    assert rank.rank.metrics().waiting_requests == 1
    assert queued(rank.step(0.0)) == (1, 4, 0.0)
    assert reserved(rank.reserve(2, 20, [2] * 24, 1)) == []
    assert rank.rank.metrics().waiting_requests == 2
    assert queued(rank.step(0.0)) == (2, 28, 100.0)
    assert rank.do(CancelDestination(2)).result == Applied()
    assert rank.rank.metrics().waiting_requests == 1
    rank.submit(30, [3] * 4, 2)
    rank.step(1.0)
    assert rank.rank.metrics().running_requests == 1
    assert rank.do(ActivateDestination(1)).result == Applied()
    assert rank.rank.metrics().waiting_requests == 1
    step = rank.step()
    assert queued(step) == (1, 4, 0.0)
    assert step.effects.forward_pass_metrics.num_queued_prefill == 0
    assert queued(rank.step()) == (0, 0, 0.0)
    assert rank.rank.metrics().waiting_requests == 0


@pytest.mark.parametrize("out", [1, 128])
def test_v6_the_footprint_is_the_prompt(out: int) -> None:
    rank = decode()
    assert rank.reserve(1, 10, range(10), out).lifecycle_events == [DestinationReserved(1, 10, 12)]


@pytest.mark.parametrize(("ruleset", "allocated"), [(NEW, 8), (OLD, 9)])
def test_v7_a_whole_handoff(ruleset: str, allocated: int) -> None:
    source = prefill(ruleset=ruleset, enable_prefix_caching=True, max_num_batched_tokens=16, num_gpu_blocks=12)
    rank = decode(ruleset=ruleset, emit_kv_events=True)
    router = KvIndex()

    def step() -> Step:
        made = rank.step()
        router.replay([*made.start.kv_events, *made.effects.kv_events])
        return made

    rank.submit(1, range(4), 1)
    step()
    assert rank.gone
    rank.submit(2, range(100, 104), 3)
    step()
    assert rank.rank.metrics().running_requests == 1
    source.source(7, 10, range(8))
    source.run_to_hold()

    active = rank.active
    effects = rank.reserve(7, 10, range(8))
    assert effects.result == DestinationAccepted(10)
    assert not effects.lifecycle_events
    assert not effects.kv_events
    assert rank.destination(7) is ROLE.DESTINATION_PENDING
    assert not rank.rank.is_drained()
    assert rank.active == active
    late: list[Any] = []
    while not rank.rank.is_empty():
        late += step().effects.lifecycle_events
    assert late == [DestinationReserved(7, 10, 4)]
    assert rank.active == 2
    blocks = rank.rank.block_table(10).tolist()
    assert len(blocks) == 2

    rank.submit(3, range(200, 204), 3)
    step()
    active = rank.active
    effects = rank.do(ActivateDestination(7))
    router.replay(effects.kv_events)
    assert effects.result == Applied()
    assert not effects.retired_requests
    assert rank.active == active
    assert rank.status(10) == "waiting"
    assert rank.rank.block_table(10).tolist() == blocks
    announced = stored(effects.kv_events)
    assert len(announced) == 1
    assert effects.kv_events[0].data.parent_hash is not None
    assert source.do(ReleaseSource(7)).result == Applied()
    assert source.gone

    assert admitted(step()) == []
    assert rank.rank.block_table(10).tolist() == blocks
    made = step()
    assert [(output.request_id, output.completed) for output in made.effects.outputs] == [(3, True)]
    assert rank.status(10) == "waiting"
    made = step()
    assert admitted(made) == [10]
    assert made.start.admissions[0].reused_input_tokens == 0
    assert rank.rank.block_table(10).tolist()[:2] == blocks
    assert rank.row(10)["allocated"] == allocated
    assert [output.cached_tokens for output in made.effects.outputs] == [0]
    made = step()
    assert made.effects.outputs[-1].completed
    assert rank.gone
    assert rank.active == 0


def test_v8_cancel_an_active_destination() -> None:
    rank = decode()
    assert reserved(rank.reserve(1, 10, range(8), 4)) == [10]
    rank.do(ActivateDestination(1))
    rank.step(0.0)
    assert rank.destination(1) is ROLE.DESTINATION_ACTIVE
    assert rank.status(10) == "running"
    effects = rank.do(CancelDestination(1))
    assert effects.result == Applied()
    assert effects.retired_requests == (10,)
    assert rank.gone
    assert rank.active == 0
    assert rank.do(CancelDestination(1)).result == Noop()


def test_v9_a_free_slot_is_what_the_next_destination_waits_for() -> None:
    rank = decode()
    rank.reserve(1, 10, range(4), 8)
    rank.do(ActivateDestination(1))
    rank.step()
    assert reserved(rank.reserve(2, 20, range(100, 104))) == []
    assert rank.attempts == 1
    assert reserved(rank.do(CancelDestination(1))) == [20]
    assert rank.do(CancelDestination(2)).result == Applied()
    assert rank.gone


def test_v10_trtllm_takes_no_destinations_in_the_generation_before() -> None:
    rank = decode(backend="trtllm", ruleset=OLD)
    with pytest.raises(CommandError, match=r"^destination reservation is not supported for TRT-LLM$"):
        rank.reserve(1, 10, range(8))
    assert rank.destination(1) is ROLE.NONE
    assert rank.active == 0
    assert rank.gone


def test_trtllm_reserves_to_completion_and_shares_no_prefix() -> None:
    rank = decode(backend="trtllm", num_gpu_blocks=6, max_num_seqs=4)
    rank.submit(1, range(8), 1)
    rank.step()
    assert rank.inactive == 2
    # Prompt 2 blocks and output 1; the cached prompt gives no credit.
    assert rank.reserve(1, 10, range(8), 4).lifecycle_events == [DestinationReserved(1, 10, 8)]
    assert rank.active == 2
    # 4 blocks are free, one of them is promised.
    assert reserved(rank.reserve(2, 20, range(100, 108), 8)) == []
    assert rank.do(CancelDestination(2)).result == Applied()
    assert reserved(rank.reserve(3, 30, range(100, 108), 4)) == [30]
    rank.do(ActivateDestination(1))
    rank.submit(40, range(200, 204), 4)
    # Two blocks are free, both promised: the fresh one waits, the materialised one came before.
    assert admitted(rank.step()) == [10]
    assert rank.status(40) == "waiting"
    rank.do(CancelDestination(3))
    rank.drain()
    with pytest.raises(CommandError, match="exceeds the to-completion KV pool capacity"):
        rank.reserve(4, 50, range(24), 1)
    assert reserved(rank.reserve(5, 51, range(20), 400)) == [51]
    assert rank.row(51)["max_output"] == 4


def test_destinations_share_what_is_resident() -> None:
    rank = decode(emit_kv_events=True, max_num_seqs=4)
    router = KvIndex()
    assert rank.reserve(1, 10, range(10)).lifecycle_events == [DestinationReserved(1, 10, 12)]
    effects = rank.do(ActivateDestination(1))
    router.replay(effects.kv_events)
    assert len(effects.kv_events) == 1
    assert len(stored(effects.kv_events)) == 2
    # A whole aligned prompt may be here already: nothing is transferred, the last token is not computed again.
    assert rank.reserve(2, 20, range(8)).lifecycle_events == [DestinationReserved(2, 20, 0)]
    assert rank.active == 3
    assert rank.reserve(3, 30, range(7)).lifecycle_events == [DestinationReserved(3, 30, 4)]
    for handoff in (2, 3):
        router.replay(rank.do(ActivateDestination(handoff)).kv_events)
    step = rank.step()
    assert admitted(step) == [10, 20, 30]
    assert step.effects.forward_pass_metrics.num_prefill_requests == 0
    router.replay(step.effects.kv_events)
    for step in rank.drain():
        router.replay(step.effects.kv_events)
    assert rank.gone
    assert rank.active == 0


def test_two_destinations_of_one_prompt_are_announced_once() -> None:
    rank = decode(emit_kv_events=True)
    router = KvIndex()
    rank.reserve(1, 10, range(8))
    rank.reserve(2, 20, range(8))
    assert rank.active == 4
    for handoff in (1, 2):
        router.replay(rank.do(ActivateDestination(handoff)).kv_events)
    assert router.stores == 2
    assert rank.active == 4
    rank.do(CancelDestination(1))
    rank.do(CancelDestination(2))
    assert (rank.active, rank.inactive) == (0, 4)


def test_a_reservation_evicts_and_says_so_at_once() -> None:
    rank = decode(num_gpu_blocks=4, emit_kv_events=True)
    router = KvIndex()
    rank.submit(1, range(12), 1)
    router.replay(rank.step().effects.kv_events)
    effects = rank.reserve(1, 10, range(100, 112))
    router.replay(effects.kv_events)
    assert router.removals == 2
    assert not rank.do(CancelDestination(1)).kv_events
    assert (rank.active, rank.inactive) == (0, 1)


def test_what_is_held_is_not_findable() -> None:
    rank = decode(emit_kv_events=True, max_num_seqs=4)
    rank.reserve(1, 10, range(8))
    rank.submit(20, range(8), 1)
    step = rank.step()
    assert step.start.admissions[0].reused_input_tokens == 0
    assert not rank.do(CancelDestination(1)).kv_events


@pytest.mark.parametrize(("ruleset", "order"), [(NEW, [10, 20, 30]), (OLD, [20, 30, 10])])
def test_place_of_an_activated_destination(ruleset: str, order: list[int]) -> None:
    rank = decode(max_num_seqs=4, max_num_batched_tokens=1, ruleset=ruleset)
    rank.reserve(1, 10, range(4))
    rank.submit(20, range(100, 104), 1)
    rank.submit(30, range(200, 204), 1)
    rank.do(ActivateDestination(1))
    assert rank.ids("waiting") == order


def test_first_token_of_a_destination_is_a_decode() -> None:
    rank = decode(timing_model=FixedTiming(prefill_ms=100, decode_ms=10))
    rank.reserve(1, 10, range(8), 3)
    rank.do(ActivateDestination(1))
    steps = rank.drain()
    assert [step.end_ms for step in steps] == [10.0, 20.0, 30.0]
    assert [output.completed for step in steps for output in step.effects.outputs] == [False, False, True]


def test_a_preempted_destination_is_an_ordinary_request_that_stays_active() -> None:
    rank = decode(num_gpu_blocks=5, max_num_seqs=2)
    rank.reserve(1, 10, range(8), 8)
    rank.reserve(2, 20, range(100, 108), 8)
    for handoff in (1, 2):
        rank.do(ActivateDestination(handoff))
    steps = [rank.step()]
    while not steps[-1].start.pressure_events:
        steps.append(rank.step())
    assert [event.request_id for event in steps[-1].start.pressure_events] == [20]
    assert rank.status(20) == "preempted"
    assert rank.destination(2) is ROLE.DESTINATION_ACTIVE
    fpm = steps[-1].effects.forward_pass_metrics
    assert (fpm.num_queued_prefill, fpm.num_queued_decode) == (0, 1)
    later = rank.drain()
    again = [admission for step in later for admission in step.start.admissions]
    assert [admission.request_id for admission in again] == [20]
    assert again[0].reused_input_tokens > 0
    outputs = [output for step in (*steps, *later) for output in step.effects.outputs]
    assert [sum(output.request_id == request for output in outputs) for request in (10, 20)] == [8, 8]
    assert rank.gone
    assert rank.active == 0


def test_a_preemption_lets_a_pending_destination_try_again() -> None:
    rank = decode(num_gpu_blocks=6, max_num_seqs=3, enable_prefix_caching=False)
    for request in (10, 20):
        rank.submit(request, range(8), 8)
    rank.step()
    rank.step()
    assert reserved(rank.reserve(1, 30, range(8), 1)) == []
    while not (step := rank.step()).start.pressure_events:
        assert not step.effects.lifecycle_events
    assert rank.attempts == 2
    # The victim waits: a destination that is pending has the first claim.
    assert rank.status(20) == "preempted"
    assert [event.request_id for event in step.effects.lifecycle_events] == [30]


def test_a_materialised_request_passes_a_head_that_waits_for_it() -> None:
    """With `dynamo-1.3` it waits behind a fresh request that needs its blocks; a driver lets it pass."""
    rank = decode(num_gpu_blocks=4, ruleset=OLD, enable_prefix_caching=False)
    rank.reserve(1, 10, range(8), 1)
    rank.submit(20, range(100, 112), 1)
    assert rank.step().end_ms == 0.0
    assert rank.rank.stuck_head() is None
    rank.do(ActivateDestination(1))
    assert rank.ids("waiting") == [20, 10]
    assert not rank.rank.unblock()
    assert admitted(rank.step()) == []
    assert rank.rank.stuck_head() is None
    assert rank.rank.unblock()
    assert rank.ids("waiting") == [10, 20]
    assert admitted(rank.step()) == [10]
    assert admitted(rank.step()) == [20]


def test_a_head_behind_held_blocks_is_not_stuck() -> None:
    rank = prefill(num_gpu_blocks=4)
    rank.source(1, 10, range(12), 1)
    rank.step()
    rank.submit(20, range(8), 1)
    rank.step()
    assert rank.rank.stuck_head() is None
    assert not rank.rank.waiting_for_external_command()
    rank.do(ReleaseSource(1))
    assert admitted(rank.step()) == [20]


# ---------------------------------------------------------------- commands while a pass is in flight


def neutral(**fields: Any) -> Half:
    """Config R of the neutral rank."""
    return Half(
        RankIdentity(1),
        **{
            "num_gpu_blocks": 8,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 16,
            "timing_model": FixedTiming(prefill_ms=10, decode_ms=10),
            **fields,
        },
    )


def test_r9_a_cancelled_destination_is_forgotten() -> None:
    rank = neutral(worker_type="decode")
    assert rank.reserve(91001, 91002, [1, 2, 3, 4], 1).result == DestinationAccepted(91002)
    assert rank.destination(91001) is ROLE.DESTINATION_HELD
    assert rank.do(CancelDestination(91001)).result == Applied()
    assert rank.destination(91001) is ROLE.NONE


def test_r11_a_source_that_was_shown_complete_withdraws_nothing_any_more() -> None:
    rank = neutral(worker_type="prefill")
    assert rank.source(92001, 92002, [1, 2, 3, 4], 1).result == Submitted(92002)
    step = rank.step()
    assert step.effects.outputs[0].completed
    rank.submit(5, range(10, 14), 4)
    outcome = rank.rank.execute_pass(rank.now)
    effects = rank.do(CancelSource(92001), in_flight=True, pending=outcome.pending)
    assert effects.result == Applied()
    assert not effects.suppressed_pending_output
    assert len(outcome.pending.effects.outputs) == 1


def test_cancel_a_source_in_the_pass_that_completes_it() -> None:
    rank = neutral(worker_type="prefill")
    rank.source(1, 10, range(4), 1)
    rank.submit(20, range(10, 14), 1)
    outcome = rank.rank.execute_pass(0.0)
    assert [event.request_id for event in outcome.pending.effects.lifecycle_events] == [10]
    effects = rank.do(CancelSource(1), at=1.0, in_flight=True, pending=outcome.pending)
    assert effects.result == Applied()
    assert effects.suppressed_pending_output
    assert effects.retired_requests == (10,)
    done = rank.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert [output.request_id for output in done.outputs] == [20]
    assert not done.lifecycle_events
    assert rank.gone


def test_discarding_a_source_that_completed_keeps_it_held() -> None:
    rank = neutral(worker_type="prefill")
    rank.source(1, 10, range(4), 1)
    outcome = rank.rank.execute_pass(0.0)
    effects = rank.do(CancelRequest(10, discard_pending_output=True), in_flight=True, pending=outcome.pending)
    assert effects.result == Noop()
    assert effects.suppressed_pending_output
    done = rank.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert not done.outputs
    assert not done.lifecycle_events
    assert rank.source_role(1) is ROLE.SOURCE_HELD
    rank.do(CancelSource(1))
    assert rank.gone


def test_destinations_are_not_reserved_in_flight_but_at_the_end() -> None:
    rank = neutral(worker_type="decode", emit_kv_events=True)
    rank.submit(20, range(10, 14), 1)
    outcome = rank.rank.execute_pass(0.0)
    assert rank.reserve(1, 10, range(8), in_flight=True, pending=outcome.pending).lifecycle_events == []
    assert rank.attempts == 0
    done = rank.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert done.lifecycle_events == [DestinationReserved(1, 10, 8)]
    assert done.metrics.active_blocks == 2

    rank.submit(21, range(20, 24), 1)
    outcome = rank.rank.execute_pass(10.0)
    effects = rank.do(ActivateDestination(1), in_flight=True, pending=outcome.pending)
    assert effects.result == Applied()
    assert not effects.kv_events
    done = rank.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert len(stored(done.kv_events)) == 3
    assert rank.status(10) == "waiting"


def test_a_release_in_flight_retries_at_once_and_a_cancelled_request_does_not() -> None:
    rank = neutral(num_gpu_blocks=4, enable_prefix_caching=False)
    rank.source(1, 10, range(4), 1)
    rank.step()
    rank.submit(20, range(10, 14), 4)
    outcome = rank.rank.execute_pass(rank.now)
    assert reserved(rank.reserve(2, 30, range(100, 112), in_flight=True)) == []
    assert reserved(rank.do(CancelRequest(20), in_flight=True, pending=outcome.pending)) == []
    assert rank.attempts == 0
    assert reserved(rank.do(ReleaseSource(1), in_flight=True, pending=outcome.pending)) == [30]
    assert rank.rank.complete_pass(outcome.pending, outcome.end_ms).lifecycle_events == []


def test_an_idle_sibling_retries_at_the_shared_boundary() -> None:
    rank = neutral()
    assert reserved(rank.reserve(1, 10, range(8), in_flight=True)) == []
    done = rank.rank.complete_idle_group_pass(0.0, 10.0)
    assert done.lifecycle_events == [DestinationReserved(1, 10, 8)]
    assert done.metrics.active_blocks == 2


def test_token_ids_of_an_activation_outlive_its_cancellation() -> None:
    rank = neutral(emit_kv_events=True, emit_kv_token_ids=True)
    rank.reserve(1, 10, range(8), 1)
    rank.submit(20, range(10, 14), 1)
    outcome = rank.rank.execute_pass(0.0)
    rank.do(ActivateDestination(1), in_flight=True)
    rank.do(CancelDestination(1), in_flight=True)
    done = rank.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert [block.token_ids for block in done.kv_events[-1].data.blocks] == [(0, 1, 2, 3), (4, 5, 6, 7)]


# ---------------------------------------------------------------- whole state


@BOTH
def test_every_state_survives_fork_and_snapshot(ruleset: str) -> None:
    rank = decode(num_gpu_blocks=20, max_num_seqs=3, ruleset=ruleset, emit_kv_events=True)
    rank.source(1, 10, range(8), 1)
    rank.step()
    rank.source(2, 20, range(50, 58), 4)
    rank.reserve(3, 30, range(100, 108))
    rank.reserve(4, 40, range(200, 208))
    rank.do(ActivateDestination(4))
    rank.reserve(5, 50, range(300, 368))
    assert [rank.source_role(h) for h in (1, 2)] == [ROLE.SOURCE_HELD, ROLE.SOURCE_REGISTERED]
    assert [rank.destination(h) for h in (3, 4, 5)] == [
        ROLE.DESTINATION_HELD,
        ROLE.DESTINATION_ACTIVE,
        ROLE.DESTINATION_PENDING,
    ]
    saved = pickle.loads(pickle.dumps(rank.rank.snapshot()))
    before = rank.rank.digest()
    fork = rank.rank.fork()

    def finish(at: float) -> tuple[str, list[str]]:
        rank.now = at
        seen = [repr(rank.do(command)) for command in (ReleaseSource(1), ActivateDestination(3), CancelDestination(5))]
        seen += [repr(step.effects.outputs) for step in rank.run_to_hold(20)]
        assert rank.source_role(2) is ROLE.SOURCE_HELD
        seen.append(repr(rank.do(CancelSource(2))))
        assert rank.gone
        return rank.rank.digest(), seen

    now = rank.now
    first = finish(now)
    assert rank.rank.digest() != before
    assert fork.digest() == before
    rank.rank.restore(saved)
    assert rank.rank.digest() == before
    assert finish(now) == first
    rank.rank = fork
    assert finish(now) == first


def test_rows_of_all_roles_survive_growth() -> None:
    rank = decode(num_gpu_blocks=1200, max_num_seqs=None, enable_prefix_caching=False)
    for handoff in range(200):
        if handoff % 4 == 0:
            rank.source(handoff, handoff, range(4), 1)
        else:
            rank.reserve(handoff, handoff, range(4), 1)
    rank.step(0.0)
    for handoff in range(200):
        if handoff % 4 == 0:
            assert rank.do(ReleaseSource(handoff)).result == Applied()
        elif handoff % 4 == 1:
            assert rank.do(CancelDestination(handoff)).result == Applied()
        else:
            assert rank.do(ActivateDestination(handoff)).result == Applied()
    assert rank.live > 0
    rank.drain()
    assert rank.gone
    assert rank.active == 0
