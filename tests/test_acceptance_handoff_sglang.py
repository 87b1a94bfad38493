"""Scenarios of the SGLang acceptance list that concern handoffs, on one rank or two.

Names carry the number of the scenario. Both rulesets where they apply; what depends on the generation says so: under
``dynamo-1.3`` the pages of a destination can be found from its activation on, under ``dynamo`` from the pass that lets
it run.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kv_index import KvIndex
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
    ReleaseSource,
    Removed,
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
from support import Step
from test_acceptance_sglang import BOTH, LEGACY, MS, REF, Sglang, index


class Half(Sglang):
    """A rank that takes handoff commands; handoff and request have the same id unless a test gives both."""

    def apply(self, command: Command, *, mid_pass: Any = None) -> CommandEffects:
        context = CommandContext(self.now, mid_pass is not None)
        effects = self.rank.apply_command(command, context, mid_pass.pending if mid_pass is not None else None)
        self.rank.check_integrity()
        return effects

    def prefill(self, handoff: int, tokens: Any, out: int = 1, *, request: int | None = None) -> CommandEffects:
        return self.apply(SubmitHandoffPrefill(handoff, Request(request or handoff, list(tokens), out)))

    def reserve(
        self, handoff: int, tokens: Any, out: int = 1, *, request: int | None = None, planned: Any = None
    ) -> CommandEffects:
        return self.apply(ReserveDestination(handoff, Request(request or handoff, list(tokens), out, planned)))

    def activate(self, handoff: int) -> CommandEffects:
        return self.apply(ActivateDestination(handoff))

    def cancel_destination(self, handoff: int) -> CommandEffects:
        return self.apply(CancelDestination(handoff))

    def release(self, handoff: int) -> CommandEffects:
        return self.apply(ReleaseSource(handoff))

    def cancel_source(self, handoff: int) -> CommandEffects:
        return self.apply(CancelSource(handoff))

    def boundary(self) -> Any:
        """What shows at a pass boundary that this rank crosses without a pass."""
        return self.rank.complete_idle_group_pass(self.now, self.now)

    @property
    def empty(self) -> bool:
        return self.rank.is_drained() or self.rank.waiting_for_external_command()

    @property
    def attempts(self) -> int:
        return int(self.rank.header[0]["reserve_attempts"])

    @property
    def generation(self) -> int:
        return int(self.rank.header[0]["capacity_generation"])

    @property
    def queued_decodes(self) -> tuple[int, int, float]:
        """Number, tokens and variance of the queued decodes of a pass executed now."""
        fpm = self.step().effects.forward_pass_metrics
        return fpm.num_queued_decode, fpm.sum_queued_decode_kv_tokens, fpm.var_queued_decode_kv_tokens


def reserved(effects: CommandEffects) -> list[tuple[int, int]]:
    """(request, transferable tokens) of the destinations that got their pages."""
    return [
        (event.request_id, event.transferable_prompt_tokens)
        for event in effects.lifecycle_events
        if isinstance(event, DestinationReserved)
    ]


def admitted(step: Step) -> list[tuple[int, int]]:
    return [(admission.request_id, admission.reused_input_tokens) for admission in step.start.admissions]


def tokens_of(step: Step) -> list[int]:
    """Requests that got a token, in order."""
    return [output.request_id for output in step.effects.outputs if output.token_id is not None]


def ended(step: Step) -> list[int]:
    return [output.request_id for output in step.effects.outputs if output.completed]


def source(ruleset: str = REF, **fields: Any) -> Half:
    return Half(ruleset, worker_type="prefill", **({"max_num_seqs": 1} | fields))


def destination(ruleset: str = REF, **fields: Any) -> Half:
    return Half(ruleset, worker_type="decode", **({"max_num_seqs": 1} | fields))


A, B, C, OWNER, F = 1, 2, 3, 4, 5


# ---------------------------------------------------------------- A


@BOTH
def test_a1_a_destination_without_room_waits_and_all_halves_can_be_cancelled(ruleset: str) -> None:
    prefill, decode = source(ruleset, blk=8), destination(ruleset, blk=2)
    assert decode.reserve(C, range(100, 108), 2).result == DestinationAccepted(C)
    assert prefill.prefill(A, range(8), 2).result == Submitted(A)
    steps = [prefill.step(), prefill.step()]
    if ruleset == REF:
        assert steps[1].end_ms == pytest.approx(35.517152, abs=MS)
    assert prefill.occupied == 12
    assert prefill.rank.waiting_for_external_command()
    assert not prefill.rank.is_drained()
    effects = decode.reserve(A, range(4), 2)
    assert effects.result == DestinationAccepted(A)
    assert reserved(effects) == []
    assert decode.cancel_destination(A).result == Applied()
    assert decode.cancel_destination(C).result == Applied()
    assert prefill.cancel_source(A).result == Applied()
    assert prefill.rank.is_drained()
    assert decode.rank.is_drained()
    assert (prefill.occupied, prefill.evictable) == (8, 8)
    assert decode.occupied == 0


@BOTH
def test_a2_cancelling_the_owner_reserves_for_the_blocked_head(ruleset: str) -> None:
    engine = destination(ruleset, blk=2)
    effects = engine.reserve(A, range(100, 108), 2)
    assert effects.lifecycle_events == [DestinationReserved(A, A, 8)]
    assert engine.reserve(B, range(200, 204), 2, request=77).lifecycle_events == []
    effects = engine.cancel_destination(A)
    assert effects.result == Applied()
    assert effects.retired_requests == (A,)
    assert effects.lifecycle_events == [DestinationReserved(B, 77, 4)]


@BOTH
def test_a3_a_blocked_head_holds_fresh_work_back_without_spinning(ruleset: str) -> None:
    engine = destination(ruleset, blk=4)
    assert reserved(engine.reserve(OWNER, range(100, 108), 2)) == [(OWNER, 8)]
    assert engine.active == 2
    assert reserved(engine.reserve(B, range(200, 212), 2)) == []
    assert engine.rank.waiting_for_external_command()
    step = engine.step(at=0.0)
    assert (step.end_ms, admitted(step), tokens_of(step)) == (0.0, [], [])
    engine.submit(F, range(300, 304), 2)
    step = engine.step(at=0.0)
    assert (step.end_ms, admitted(step), tokens_of(step)) == (0.0, [], [])
    assert list(engine.ids("waiting")) == [F]
    assert engine.active == 2
    assert engine.rank.stuck_head() is None
    assert engine.activate(OWNER).result == Applied()
    step = engine.step(at=0.0)
    assert admitted(step) == [(OWNER, 0)]
    assert tokens_of(step) == [OWNER]
    assert step.end_ms == pytest.approx(26.31, abs=MS)
    assert engine.cancel_destination(B).result == Applied()
    assert engine.cancel_destination(OWNER).result == Applied()
    assert admitted(engine.step(at=1.0)) == [(F, 0)]


@BOTH
def test_a4_nothing_is_probed_again_before_capacity_changed(ruleset: str) -> None:
    engine = destination(ruleset, blk=2)
    assert reserved(engine.reserve(OWNER, range(8), 2)) == [(OWNER, 8)]
    assert reserved(engine.reserve(B, range(100, 104), 2, request=77)) == []
    assert engine.attempts == 2
    for _ in range(3):
        assert engine.boundary().lifecycle_events == []
    assert engine.attempts == 2
    assert engine.cancel_destination(OWNER).lifecycle_events == [DestinationReserved(B, 77, 4)]
    assert engine.attempts == 3
    assert engine.cancel_destination(B).result == Applied()
    assert engine.rank.is_drained()


@BOTH
def test_a5_a_destination_that_is_activated_but_not_running_can_be_cancelled(ruleset: str) -> None:
    engine = destination(ruleset)
    assert reserved(engine.reserve(A, range(8), 2)) == [(A, 8)]
    assert engine.active == 2
    engine.submit(B, range(100, 108), 8)
    assert admitted(engine.step(at=0.0)) == [(B, 0)]
    assert engine.active == 5
    assert engine.activate(A).result == Applied()
    assert engine.active == 5
    assert engine.rank.metrics().waiting_requests == 1
    assert engine.cancel_destination(A).result == Applied()
    assert engine.cancel_destination(A).result == Noop()
    assert engine.ids("running") == [B]
    assert engine.rank.metrics().waiting_requests == 0


@BOTH
def test_a6_a_source_can_be_cancelled_before_it_completes(ruleset: str) -> None:
    engine = source(ruleset, blk=8)
    engine.prefill(A, range(8), 2)
    assert engine.ids("waiting") == [A]
    effects = engine.cancel_source(A)
    assert (effects.result, effects.retired_requests) == (Applied(), (A,))
    assert engine.rank.is_drained()
    assert engine.cancel_source(A).result == Noop()


# ---------------------------------------------------------------- B


@BOTH
def test_b2_a_handoff_names_one_source_and_is_free_again_when_that_is_gone(ruleset: str) -> None:
    engine = source(ruleset)
    engine.prefill(4, range(8), request=3)
    with pytest.raises(CommandError, match="handoff_id"):
        engine.prefill(4, range(8), request=5)
    assert engine.ids("waiting") == [3]
    with pytest.raises(CommandError, match="already active"):
        engine.prefill(6, range(8), request=3)
    assert engine.cancel_source(4).retired_requests == (3,)
    assert engine.prefill(4, range(8), request=5).result == Submitted(5)


@BOTH
def test_b7_one_trigger_reserves_one_destination(ruleset: str) -> None:
    engine = destination(ruleset, blk=4)
    assert reserved(engine.reserve(A, range(16))) == [(A, 16)]
    assert reserved(engine.reserve(B, range(100, 104))) == []
    assert reserved(engine.reserve(C, range(200, 204))) == []
    assert reserved(engine.cancel_destination(A)) == [(B, 4)]
    assert [event.request_id for event in engine.boundary().lifecycle_events] == [C]
    assert engine.boundary().lifecycle_events == []


@BOTH
@pytest.mark.parametrize("state", ["waiting", "running", "registered", "held", "pending", "reserved", "active"])
def test_b8_an_id_that_is_in_use_is_refused_and_nothing_changes(ruleset: str, state: str) -> None:
    engine = Half(ruleset, blk=8, max_num_seqs=2)
    if state in ("waiting", "running"):
        engine.submit(7, range(8), 4)
    elif state in ("registered", "held"):
        engine.prefill(1, range(8), 1, request=7)
    else:
        if state == "pending":
            engine.reserve(2, range(100, 132))
        engine.reserve(1, range(8), 4, request=7)
    if state in ("running", "held"):
        engine.step()
    if state == "active":
        engine.activate(1)
    before, metrics = engine.rank.digest(), engine.rank.metrics()
    request = Request(7, [1, 2, 3], 1)
    for command in (Submit(request), SubmitHandoffPrefill(9, request), ReserveDestination(9, request)):
        with pytest.raises(CommandError, match="already active"):
            engine.apply(command)
    assert engine.rank.digest() == before
    assert engine.rank.metrics() == metrics


@BOTH
def test_b9_a_prompt_larger_than_the_pool_can_never_be_reserved(ruleset: str) -> None:
    engine = destination(ruleset, blk=2)
    with pytest.raises(CommandError, match=r"3.*2"):
        engine.reserve(A, range(9))
    assert engine.rank.is_drained()
    assert reserved(engine.reserve(A, range(8))) == [(A, 8)]


@BOTH
def test_b10_commands_about_nobody_are_noop(ruleset: str) -> None:
    engine = destination(ruleset, blk=2)
    engine.reserve(A, range(8))
    engine.reserve(B, range(100, 104))
    before = engine.rank.digest()
    assert engine.activate(B).result == Noop()
    for other in (engine.release, engine.activate, engine.cancel_source, engine.cancel_destination):
        assert other(99).result == Noop()
    for request in (A, B):
        assert engine.apply(CancelRequest(request)).result == Noop()
    assert engine.rank.digest() == before


@BOTH
def test_a_prompt_at_the_limit_of_the_model_is_not_reserved_and_outputs_stop_there(ruleset: str) -> None:
    engine = destination(ruleset, max_model_len=10)
    with pytest.raises(CommandError, match="max_model_len"):
        engine.reserve(A, range(10))
    assert engine.rank.is_drained()
    engine.reserve(A, range(8), 50)
    engine.activate(A)
    assert sum(len(tokens_of(step)) for step in engine.drain()) == 2


# ---------------------------------------------------------------- E


def held_source(ruleset: str, **fields: Any) -> tuple[Half, Step]:
    """Base E with its request held: the rank, and the pass in which the request completed."""
    engine = source(ruleset, chunk=16, **fields)
    assert engine.prefill(A, range(8), 2).result == Submitted(A)
    first, second = engine.step(), engine.step()
    if ruleset == REF and not fields:
        assert first.end_ms == pytest.approx(16.622914, abs=MS)
        assert second.end_ms == pytest.approx(29.449052, abs=MS)
    assert (tokens_of(first), ended(first)) == ([A], [])
    assert first.effects.lifecycle_events == []
    return engine, second


@BOTH
def test_e1_a_completed_source_keeps_its_pages_until_it_is_released(ruleset: str) -> None:
    engine, step = held_source(ruleset)
    assert ended(step) == [A]
    assert step.effects.lifecycle_events == [SourceHeld(A, A, TransferTiming("full_prompt", 8, None, None))]
    assert engine.ids("running") == []
    assert engine.occupied == 12
    assert engine.protected == 8
    assert engine.rank.waiting_for_external_command()
    assert not engine.rank.is_drained()
    assert engine.rank.metrics().running_requests == engine.rank.metrics().waiting_requests == 0
    generation = engine.generation
    effects = engine.release(A)
    assert (effects.result, effects.retired_requests) == (Applied(), (A,))
    assert (engine.occupied, engine.protected) == (8, 0)
    assert engine.generation == generation + 1
    assert engine.rank.is_drained()
    assert engine.release(A).result == Noop()
    assert (engine.occupied, engine.generation) == (8, generation + 1)


@BOTH
def test_e2_cancelling_a_held_source_is_releasing_it(ruleset: str) -> None:
    engine, _ = held_source(ruleset)
    assert engine.apply(CancelRequest(A)).result == Noop()
    assert engine.occupied == 12
    assert engine.cancel_source(A).result == Applied()
    assert engine.occupied == 8
    assert engine.rank.is_drained()
    assert engine.cancel_source(A).result == Noop()
    assert engine.occupied == 8


@BOTH
def test_e3_a_source_released_before_it_completes_is_an_ordinary_request(ruleset: str) -> None:
    engine, _ = held_source(ruleset)
    engine.cancel_source(A)
    assert engine.rank._state.tree_evict(2) == 2
    engine.prefill(A, range(8), 2, request=B)
    effects = engine.release(A)
    assert (effects.result, effects.retired_requests) == (Applied(), ())
    assert engine.release(A).result == Noop()
    engine.step()
    step = engine.step()
    assert ended(step) == [B]
    assert step.effects.lifecycle_events == []
    assert engine.rank.is_drained()
    assert engine.occupied == 8


@BOTH
def test_e4_an_ordinary_request_leaves_its_whole_pages_only(ruleset: str) -> None:
    engine = source(ruleset, chunk=16)
    engine.submit(A, range(8), 2)
    engine.step()
    assert ended(engine.step()) == [A]
    assert engine.occupied == 8


@BOTH
def test_e5_a_duplicate_request_leaves_no_registration_behind(ruleset: str) -> None:
    engine = source(ruleset, chunk=16)
    engine.submit(A, range(8), 2)
    with pytest.raises(CommandError, match="already active"):
        engine.submit(A, range(8), 2)
    with pytest.raises(CommandError, match="already active"):
        engine.prefill(9, range(8), 2, request=A)
    assert engine.release(9).result == Noop()
    assert engine.ids("waiting") == [A]
    assert engine.rank.metrics().waiting_requests == 1


@BOTH
def test_a_held_prompt_is_found_by_others_and_cannot_be_evicted(ruleset: str) -> None:
    engine, step = held_source(ruleset, blk=8, emit_kv_events=True)
    router = index([step])
    assert engine.cached(range(8)) == 8
    assert engine.rank._state.tree_evict(8) == 0
    engine.submit(B, [*range(8), 20], 1)
    step = engine.step()
    assert admitted(step) == [(B, 8)]
    router.replay(step.events)
    effects = engine.release(A)
    assert list(effects.kv_events) == []
    assert engine.rank.is_drained()


@BOTH
def test_a_source_that_is_retracted_or_rejected_keeps_or_loses_its_registration(ruleset: str) -> None:
    engine = source(ruleset, max_model_len=8)
    engine.prefill(A, range(8))
    step = engine.step()
    assert [output.rejected for output in step.effects.outputs] == [True]
    assert step.effects.lifecycle_events == []
    assert engine.rank.is_drained()
    assert engine.cancel_source(A).result == Noop()

    engine = Half(ruleset, blk=5, clip=0, conservativeness=0.0, max_num_seqs=2)
    engine.prefill(A, range(4), 9)
    engine.prefill(B, range(100, 104), 9)
    held: list[int] = []
    retracted = 0
    for _ in range(60):
        step = engine.step()
        retracted += len(step.start.pressure_events)
        for event in step.effects.lifecycle_events:
            assert event.request_id == event.handoff_id
            held.append(event.request_id)
            assert engine.release(event.handoff_id).result == Applied()
    assert sorted(held) == [A, B]
    assert engine.rank.is_drained()
    if ruleset == REF:
        assert retracted > 0


def test_outputs_that_need_no_slot_are_held_too() -> None:
    engine = source(chunk=16, emit_kv_events=True)
    engine.prefill(A, range(8), 1)
    engine.prefill(B, range(100, 106), 0)
    step = engine.step()
    assert step.effects.lifecycle_events == [SourceHeld(A, A, TransferTiming("full_prompt", 8, None, None))]
    assert (engine.occupied, engine.protected) == (8, 8)
    step = engine.step()
    assert [(output.request_id, output.token_id) for output in step.effects.outputs] == [(B, None)]
    assert [event.request_id for event in step.effects.lifecycle_events] == [B]
    assert (engine.occupied, engine.protected) == (16, 12)
    engine.release(A)
    engine.release(B)
    assert (engine.occupied, engine.protected) == (12, 0)


# ---------------------------------------------------------------- F


@BOTH
def test_f1_destinations_count_as_waiting_and_as_queued_decodes(ruleset: str) -> None:
    engine = destination(ruleset, blk=6, chunk=32)
    assert reserved(engine.reserve(1, [1] * 4, 1, request=11)) == [(11, 4)]
    assert engine.rank.metrics().waiting_requests == 1
    engine.now = 0.0
    assert engine.queued_decodes == (1, 4, 0.0)
    assert reserved(engine.reserve(2, [2] * 24, 1, request=12)) == []
    assert engine.rank.metrics().waiting_requests == 2
    assert engine.queued_decodes == (2, 28, 100.0)
    assert engine.cancel_destination(2).result == Applied()
    assert engine.rank.metrics().waiting_requests == 1
    engine.submit(15, [3] * 4, 2)
    step = engine.step(at=1.0)
    assert engine.rank.metrics().running_requests == 1
    if ruleset == REF:
        assert step.end_ms == 1.0
    assert engine.activate(1).result == Applied()
    assert engine.rank.metrics().waiting_requests == 1
    step = engine.step()
    fpm = step.effects.forward_pass_metrics
    assert (fpm.num_queued_prefill, fpm.num_queued_decode, fpm.sum_queued_decode_kv_tokens) == (0, 1, 4)
    assert ended(step) == [15]
    if ruleset == REF:
        assert step.end_ms == pytest.approx(16.874896, abs=MS)
    step = engine.step()
    fpm = step.effects.forward_pass_metrics
    assert (fpm.num_queued_decode, fpm.sum_queued_decode_kv_tokens) == (0, 0)
    assert admitted(step) == [(11, 0)]
    assert ended(step) == [11]
    assert engine.rank.metrics().waiting_requests == 0
    assert engine.rank.is_drained()


@BOTH
@pytest.mark.parametrize("out", [1, 128])
def test_f2_outputs_do_not_count_in_what_is_transferred(ruleset: str, out: int) -> None:
    assert reserved(destination(ruleset).reserve(A, range(10), out)) == [(A, 12)]


@BOTH
def test_f3_a_whole_handoff(ruleset: str) -> None:
    decode = destination(ruleset, chunk=16, emit_kv_events=True)
    prefill, held = held_source(ruleset)
    assert [event.request_id for event in held.effects.lifecycle_events] == [A]
    router = KvIndex()
    decode.submit(B, range(4), 1)
    step = decode.step(at=0.0)
    assert ended(step) == [B]
    assert decode.occupied == 4
    router.replay(step.events)
    decode.submit(C, range(100, 104), 3)
    step = decode.step(at=1.0)
    router.replay(step.events)
    assert decode.ids("running") == [C]
    assert decode.occupied == 12
    before = router.stores

    effects = decode.reserve(A, range(8), 2)
    assert effects.result == DestinationAccepted(A)
    assert effects.lifecycle_events == [DestinationReserved(A, A, 4)]
    assert list(effects.kv_events) == []
    assert decode.occupied == 16
    assert decode.protected == 8
    assert decode.ids("running") == [C]
    effects = decode.activate(A)
    assert effects.result == Applied()
    assert decode.occupied == 16
    router.replay(effects.kv_events)
    # Generation 1.3 publishes at once, the default ruleset when the request runs.
    assert router.stores - before == (1 if ruleset == LEGACY else 0)
    assert decode.protected == (12 if ruleset == LEGACY else 8)
    assert decode.cached(range(8)) == (8 if ruleset == LEGACY else 4)
    assert prefill.release(A).result == Applied()
    assert prefill.rank.is_drained()

    steps = [decode.step(), decode.step()]
    assert [admitted(step) for step in steps] == [[], []]
    if ruleset == REF:
        assert [step.end_ms for step in steps] == pytest.approx([10.802427, 21.379634], abs=MS)
        assert ended(steps[1]) == [C]
        steps.append(decode.step())
    else:
        # There the blocker has its first token from its first pass, as everybody does.
        assert ended(steps[0]) == []
        steps.append(decode.step())
    assert admitted(steps[2]) == [(A, 0)]
    assert tokens_of(steps[2]) == [A]
    steps += decode.drain()
    assert ended(steps[-1]) == [A]
    if ruleset == REF:
        assert [step.end_ms for step in steps[2:]] == pytest.approx([33.468697, 46.294835], abs=2 * MS)
    router.replay(event for step in steps for event in step.events)
    assert decode.cached(range(8)) == 8
    assert decode.protected == 0


@BOTH
def test_f4_a_running_destination_can_be_cancelled(ruleset: str) -> None:
    engine = destination(ruleset, chunk=16)
    engine.reserve(A, range(8), 4)
    engine.activate(A)
    step = engine.step(at=0.0)
    assert engine.ids("running") == [A]
    assert step.end_ms == pytest.approx(12.0890625, abs=MS)
    effects = engine.cancel_destination(A)
    assert (effects.result, effects.retired_requests) == (Applied(), (A,))
    assert engine.rank.is_drained()
    assert engine.occupied == 8
    assert engine.cancel_destination(A).result == Noop()


def test_f5_activation_keeps_the_partial_page() -> None:
    engine = destination(blk=3)
    assert reserved(engine.reserve(B, range(200, 204))) == [(B, 4)]
    assert reserved(engine.reserve(OWNER, range(5))) == [(OWNER, 8)]
    assert reserved(engine.reserve(F, range(100, 104))) == []
    effects = engine.activate(OWNER)
    assert (effects.result, effects.lifecycle_events) == (Applied(), [])
    assert engine.occupied == 12
    assert reserved(engine.cancel_destination(OWNER)) == [(F, 4)]
    assert engine.cancel_destination(F).result == Applied()


def test_f5_generation_13_gives_the_tail_of_the_page_back_at_activation() -> None:
    engine = destination(LEGACY, blk=3)
    engine.submit(B, [7], 3)
    engine.step()
    # 12 tokens: B owns 2, OWNER 8 until it is activated, then 5.
    assert reserved(engine.reserve(OWNER, range(5))) == [(OWNER, 8)]
    assert reserved(engine.reserve(F, range(100, 104))) == []
    assert reserved(engine.activate(OWNER)) == [(F, 4)]
    assert engine.cancel_destination(OWNER).result == Applied()
    assert engine.cancel_destination(F).result == Applied()


@BOTH
def test_f6_a_rank_blocked_by_a_reservation_wakes_when_that_is_cancelled(ruleset: str) -> None:
    engine = destination(ruleset, blk=2, max_num_seqs=2)
    assert reserved(engine.reserve(A, [1] * 8, 1)) == [(A, 8)]
    engine.submit(B, [2] * 4, 1)
    for _ in range(700):
        step = engine.step(at=0.0)
        assert (step.end_ms, list(step.effects.outputs)) == (0.0, [])
        assert step.effects.forward_pass_metrics.num_queued_prefill == 1
    # Only a command can help, so nobody is to blame.
    assert engine.rank.stuck_head() is None
    assert engine.cancel_destination(A).result == Applied()
    assert tokens_of(engine.step()) == [B]


# ---------------------------------------------------------------- J


@BOTH
def test_j9_only_the_prompt_is_matched_and_published(ruleset: str) -> None:
    engine = destination(ruleset, blk=2, emit_kv_events=True)
    assert reserved(engine.reserve(A, range(4), planned=range(4, 8))) == [(A, 4)]
    assert engine.active == 1
    events = list(engine.activate(A).kv_events)
    outcome = engine.rank.execute_pass(0.0)
    assert engine.cached(range(8)) == 4
    effects = engine.rank.complete_pass(outcome.pending, outcome.end_ms)
    stored = [len(event.data.blocks) for event in [*events, *effects.kv_events] if isinstance(event.data, Stored)]
    # The default ruleset keeps the events of a decode pass back while somebody runs.
    assert stored == ([1] if ruleset == LEGACY else [])


@BOTH
def test_j13_what_is_transferred_is_what_is_not_cached(ruleset: str) -> None:
    engine = destination(ruleset)
    assert reserved(engine.reserve(A, range(10))) == [(A, 12)]
    engine.cancel_destination(A)
    engine.fill(B, range(4))
    engine.fill(C, range(20, 28))
    assert reserved(engine.reserve(A, range(10))) == [(A, 8)]
    # The whole prompt, its last token too: nothing of it is computed here.
    assert reserved(engine.reserve(F, range(20, 28))) == [(F, 0)]
    assert engine.protected == 12


# ---------------------------------------------------------------- pages of a destination


def test_a_prompt_that_was_cached_meanwhile_is_adopted_when_the_destination_runs() -> None:
    engine = destination(emit_kv_events=True, max_num_seqs=2)
    router = KvIndex()
    assert reserved(engine.reserve(A, range(8), 4)) == [(A, 8)]
    engine.submit(B, range(8), 1)
    step = engine.step()
    router.replay(step.events)
    assert router.stores == 2
    assert (engine.occupied, engine.evictable) == (16, 8)
    engine.activate(A)
    assert engine.occupied == 16
    engine.step()
    # Two pages of its own were free again, one was taken for the token.
    assert (engine.occupied, engine.protected) == (12, 8)
    for step in engine.drain():
        router.replay(step.events)
    # The output page joins; the prompt was there.
    assert router.stores == 3


def test_without_prefix_caching_nothing_is_shared() -> None:
    engine = destination(enable_prefix_caching=False, max_num_seqs=2)
    assert reserved(engine.reserve(A, range(8), 2)) == [(A, 8)]
    assert reserved(engine.reserve(B, range(8), 2)) == [(B, 8)]
    engine.activate(A)
    engine.activate(B)
    assert admitted(engine.step()) == [(A, 0), (B, 0)]
    assert engine.protected == 0
    engine.drain()
    assert engine.occupied == 0


def test_a_reservation_evicts_what_it_needs_and_says_so_at_once() -> None:
    engine = destination(blk=4, emit_kv_events=True)
    engine.submit(B, range(12), 1)
    router = index(engine.drain())
    assert engine.evictable == 12
    effects = engine.reserve(A, range(100, 112))
    assert reserved(effects) == [(A, 12)]
    assert [type(event.data) for event in effects.kv_events] == [Removed]
    router.replay(effects.kv_events)
    assert (router.removals, engine.evictable) == (2, 4)
    effects = engine.cancel_destination(A)
    assert list(effects.kv_events) == []
    assert engine.available == 12


def test_a_head_that_failed_is_tried_again_when_a_destination_starts_to_run() -> None:
    engine = destination(blk=4, max_num_seqs=2)
    engine.fill(B, range(8))
    # A shares both pages with the cache only after it runs: until then they are its own.
    assert reserved(engine.reserve(A, range(100, 108), 4)) == [(A, 8)]
    assert reserved(engine.reserve(C, range(200, 212))) == []
    generation, attempts = engine.generation, engine.attempts
    effects = engine.activate(A)
    assert effects.lifecycle_events == []
    assert (engine.generation, engine.attempts) == (generation, attempts)
    outcome = engine.rank.execute_pass(engine.now)
    assert engine.generation == generation + 1
    assert engine.attempts == attempts
    engine.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert engine.attempts == attempts + 1


# ---------------------------------------------------------------- who runs first


@BOTH
def test_activated_destinations_run_in_order_and_before_everything_else(ruleset: str) -> None:
    engine = destination(ruleset, max_num_seqs=2)
    engine.submit(F, range(900, 904), 3)
    for handoff in (A, B, C):
        engine.reserve(handoff, range(100 * handoff, 100 * handoff + 4), 2)
    for handoff in (C, A, B):
        engine.activate(handoff)
    step = engine.step()
    assert admitted(step) == [(C, 0), (A, 0)]
    # B still waits for a slot, so the prompt does.
    step = engine.step()
    assert (admitted(step), sorted(ended(step))) == ([], [A, C])
    step = engine.step()
    assert admitted(step) == [(B, 0), (F, 0)]


@BOTH
def test_reserved_destinations_do_not_hold_prompts_back_but_pending_ones_do(ruleset: str) -> None:
    engine = destination(ruleset, blk=8, max_num_seqs=4)
    engine.reserve(A, range(100, 116))
    engine.submit(F, range(300, 304), 8)
    assert admitted(engine.step()) == [(F, 0)]
    engine.reserve(B, range(200, 212))
    assert engine.rank.metrics().waiting_requests == 2
    engine.submit(C, range(400, 402), 1)
    step = engine.step()
    assert (admitted(step), tokens_of(step)) == ([], [F])
    assert reserved(engine.cancel_destination(A)) == [(B, 12)]
    assert admitted(engine.step()) == [(C, 0)]


@BOTH
def test_a_prompt_between_two_chunks_waits_for_a_pending_destination(ruleset: str) -> None:
    engine = Half(ruleset, blk=8, chunk=8, max_num_seqs=4)
    engine.submit(F, range(20), 1)
    assert admitted(engine.step()) == [(F, 0)]
    assert engine.row(F)["computed"] == 8
    assert reserved(engine.reserve(A, range(100, 132))) == []
    before = engine.rank.digest()
    step = engine.step()
    assert (list(step.start.admissions), list(step.effects.outputs), step.end_ms) == ([], [], step.start_ms)
    assert engine.row(F)["computed"] == 8
    # Nothing outside can help: the prompt owns what the destination needs.
    for _ in range(700):
        engine.step()
    head = engine.rank.stuck_head()
    assert head is not None
    assert head.request_id == F
    assert before != engine.rank.digest()
    output = engine.rank.fail_head()
    assert output is not None
    assert output.completed
    assert [event.request_id for event in engine.boundary().lifecycle_events] == [A]


# ---------------------------------------------------------------- retraction


def retracted_destination() -> tuple[Half, list[Step]]:
    """Two destinations in a pool for one and a half of them, until one is retracted."""
    engine = destination(blk=5, max_num_seqs=2)
    for handoff in (A, B):
        engine.reserve(handoff, range(100 * handoff, 100 * handoff + 8), 10)
        engine.activate(handoff)
    steps = []
    while not steps or not steps[-1].start.pressure_events:
        steps.append(engine.step())
    return engine, steps


def test_a_retracted_destination_stays_one_and_waits_as_a_decode() -> None:
    engine, steps = retracted_destination()
    # The first step needs a page for each, and there is one: B loses all before it has a token.
    assert len(steps) == 1
    assert admitted(steps[0]) == [(A, 0), (B, 0)]
    assert tokens_of(steps[0]) == [A]
    fpm = steps[0].effects.forward_pass_metrics
    assert (fpm.num_queued_prefill, fpm.num_queued_decode, fpm.sum_queued_decode_kv_tokens) == (0, 1, 8)
    assert engine.ids("waiting") == [B]
    assert engine.activate(B).result == Noop()
    with pytest.raises(CommandError, match="already"):
        engine.reserve(B, range(4), request=99)
    steps = engine.drain()
    assert sum(len(tokens_of(step)) for step in steps) == 9 + 10
    readmitted = [admission for step in steps for admission in admitted(step)]
    assert [request for request, _ in readmitted] == [B]
    assert sorted(request for step in steps for request in ended(step)) == [A, B]


def test_a_retracted_destination_can_be_cancelled_by_its_handoff() -> None:
    engine, _ = retracted_destination()
    effects = engine.cancel_destination(B)
    assert (effects.result, effects.retired_requests) == (Applied(), (B,))
    assert engine.ids("waiting") == []
    engine.drain()
    assert engine.cancel_destination(A).result == Noop()


# ---------------------------------------------------------------- commands while a pass runs


@BOTH
def test_a_reservation_during_a_pass_is_attempted_at_its_end(ruleset: str) -> None:
    engine = destination(ruleset)
    engine.submit(F, range(4), 3)
    engine.step()
    outcome = engine.rank.execute_pass(engine.now)
    effects = engine.apply(ReserveDestination(A, Request(A, list(range(100, 108)), 1)), mid_pass=outcome)
    assert effects.result == DestinationAccepted(A)
    assert effects.lifecycle_events == []
    assert engine.attempts == 0
    ends = engine.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert ends.lifecycle_events == [DestinationReserved(A, A, 8)]
    assert ends.metrics.waiting_requests == 1


@BOTH
def test_an_activated_destination_cancelled_in_its_own_pass_loses_its_outputs(ruleset: str) -> None:
    engine = destination(ruleset)
    engine.reserve(A, range(8), 4)
    engine.activate(A)
    outcome = engine.rank.execute_pass(0.0)
    assert [output.request_id for output in outcome.pending.effects.outputs] == [A]
    effects = engine.apply(CancelDestination(A), mid_pass=outcome)
    assert effects.result == Applied()
    assert effects.suppressed_pending_output
    ends = engine.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert list(ends.outputs) == []
    assert engine.rank.is_drained()


@BOTH
def test_a_source_cancelled_in_the_pass_that_completes_it_is_not_announced(ruleset: str) -> None:
    engine = source(ruleset)
    engine.prefill(A, range(8), 1)
    outcome = engine.rank.execute_pass(0.0)
    assert not engine.rank.is_drained()
    effects = engine.apply(CancelSource(A), mid_pass=outcome)
    assert effects.result == Applied()
    assert effects.suppressed_pending_output
    ends = engine.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert (list(ends.outputs), list(ends.lifecycle_events)) == ([], [])
    assert engine.rank.is_drained()
    assert engine.occupied == 8


# ---------------------------------------------------------------- random histories


class Player:
    """Random commands and passes on a small pool; remembers which half of a handoff is in which state."""

    def __init__(self, rng: random.Random, ruleset: str) -> None:
        self.rng = rng
        size = rng.choice([1, 2, 4])
        self.blocks = rng.randint(4, 14)
        self.caching = rng.random() < 0.8
        self.engine = Half(
            ruleset,
            blk=self.blocks,
            bs=size,
            chunk=size * rng.randint(1, 4),
            policy=rng.choice(["fifo", "lpm"]),
            clip=rng.choice([0, 3, 4096]),
            conservativeness=rng.choice([0.0, 0.3, 1.0]),
            max_num_seqs=rng.randint(1, 4),
            enable_prefix_caching=self.caching,
            emit_kv_events=self.caching,
            aic_nextn=rng.choice([None, None, 2]),
            worker_type=rng.choice(["aggregated", "prefill", "decode"]),
        )
        if self.engine.config.aic_nextn:
            self.engine = Half(
                ruleset,
                blk=self.blocks,
                bs=size,
                chunk=size * 2,
                max_num_seqs=3,
                aic_nextn=2,
                enable_prefix_caching=self.caching,
                emit_kv_events=self.caching,
                aic_nextn_accept_rates="1,0",
            )
        self.size = size
        self.router = KvIndex()
        self.next_id = 1
        self.live: set[int] = set()
        self.registered: set[int] = set()
        self.held: set[int] = set()
        self.pending: list[int] = []
        self.owned: set[int] = set()
        self.active: set[int] = set()
        self.kinds: set[str] = set()

    def prompt(self) -> list[int]:
        length = self.rng.randint(1, max(1, self.blocks * self.size // 2))
        base = self.rng.choice([0, 0, 1000])
        fork = self.rng.randint(0, length)
        return [base + i if i < fork else 5000 + self.next_id * 100 + i for i in range(length)]

    def take(self, effects: Any, *, events: Any) -> None:
        self.router.replay(events)
        for event in effects.lifecycle_events:
            if isinstance(event, DestinationReserved):
                assert event.handoff_id == self.pending.pop(0), "reserved out of turn"
                self.owned.add(event.handoff_id)
                assert event.transferable_prompt_tokens % self.size == 0
            else:
                self.registered.remove(event.handoff_id)
                self.held.add(event.handoff_id)

    def apply(self, command: Command) -> CommandEffects:
        effects = self.engine.apply(command)
        self.take(effects, events=effects.kv_events)
        for request in effects.retired_requests:
            self.live.discard(request)
        return effects

    def play(self) -> None:
        rng, engine = self.rng, self.engine
        move = rng.choice(
            ["step"] * 6
            + ["submit", "prefill", "reserve", "reserve", "activate", "activate", "release", "release"]
            + ["cancel", "cancel_source", "cancel_destination"]
        )
        if move in ("submit", "prefill", "reserve"):
            number = self.next_id
            self.next_id += 1
            request = Request(number, self.prompt(), rng.randint(0, 6))
            self.live.add(number)
            if move == "submit":
                self.apply(Submit(request))
            elif move == "prefill":
                self.registered.add(number)
                self.apply(SubmitHandoffPrefill(number, request))
            else:
                self.pending.append(number)
                assert self.apply(ReserveDestination(number, request)).result == DestinationAccepted(number)
        elif move == "activate" and self.owned:
            number = rng.choice(sorted(self.owned))
            self.owned.remove(number)
            self.active.add(number)
            active = engine.active
            assert self.apply(ActivateDestination(number)).result == Applied()
            # Another destination may have been reserved with it.
            assert engine.active <= active or self.kinds
        elif move == "release" and self.registered | self.held:
            number = rng.choice(sorted(self.registered | self.held))
            self.registered.discard(number)
            self.held.discard(number)
            assert self.apply(ReleaseSource(number)).result == Applied()
            assert self.apply(ReleaseSource(number)).result == Noop()
        elif move == "cancel" and self.live:
            number = rng.choice(sorted(self.live))
            unreachable = number in self.held or number in self.pending or number in self.owned
            result = self.apply(CancelRequest(number)).result
            assert isinstance(result, Noop) == unreachable
            if not unreachable:
                self.registered.discard(number)
                self.active.discard(number)
        elif move == "cancel_source" and self.registered | self.held:
            number = rng.choice(sorted(self.registered | self.held))
            self.registered.discard(number)
            self.held.discard(number)
            assert self.apply(CancelSource(number)).result == Applied()
        elif move == "cancel_destination" and (self.pending or self.owned or self.active):
            number = rng.choice(sorted({*self.pending, *self.owned, *self.active}))
            if number in self.pending:
                self.pending.remove(number)
            self.owned.discard(number)
            self.active.discard(number)
            assert self.apply(CancelDestination(number)).result == Applied()
            assert self.apply(CancelDestination(number)).result == Noop()
        elif move == "step":
            self.step()
        self.kinds.add(move)
        self.compare()

    def step(self) -> Step:
        step = self.engine.step()
        for output in step.effects.outputs:
            if output.completed and output.request_id in self.live and output.request_id not in self.registered:
                self.live.remove(output.request_id)
                self.active.discard(output.request_id)
        for event in step.effects.lifecycle_events:
            assert event.request_id in self.live
        self.take(step.effects, events=step.events)
        return step

    def compare(self) -> None:
        rank = self.engine.rank
        header = rank.header[0]
        assert header["num_live"] == len(self.live)
        assert header["num_held_sources"] == len(self.held)
        assert header["num_pending"] == len(self.pending)
        assert header["num_held_destinations"] == len(self.owned)
        metrics = rank.metrics()
        assert metrics.waiting_requests + metrics.running_requests == len(self.live) - len(self.held)
        assert rank.is_drained() == (not self.live)

    def finish(self) -> None:
        """Settle everything: each half ends in one of the ways the specification has."""
        for _ in range(3000):
            if not self.live:
                break
            for number in sorted(self.held):
                self.held.remove(number)
                assert self.apply(ReleaseSource(number)).result == Applied()
            for number in sorted(self.owned):
                self.owned.remove(number)
                self.active.add(number)
                assert self.apply(ActivateDestination(number)).result == Applied()
            self.step()
            output = self.engine.rank.fail_head()
            if output is not None:
                self.live.discard(output.request_id)
                self.registered.discard(output.request_id)
                self.active.discard(output.request_id)
                ends = self.engine.boundary()
                self.take(ends, events=ends.kv_events)
            self.compare()
        assert not self.live
        assert self.engine.protected == 0
        assert self.engine.available + self.engine.evictable == self.blocks * self.size


@BOTH
@pytest.mark.parametrize("seed", range(60))
def test_k8_random_histories_keep_every_invariant(ruleset: str, seed: int) -> None:
    player = Player(random.Random(seed), ruleset)
    for _ in range(120):
        player.play()
    twin = player.engine.rank.fork()
    assert twin.digest() == player.engine.rank.digest()
    snapshot = player.engine.rank.snapshot()
    player.finish()
    twin.restore(snapshot)
    twin.check_integrity()
