"""Handoffs inside a rank, kernel against twin: whatever happens, both agree after every step.

``KVSIM_EXAMPLES`` sets the number of random histories per engine (default 150), for long runs.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from histories import (
    HANDOFF_IDS,
    HANDOFF_SCRIPTS,
    IDENTITIES,
    IDS,
    RADIX_HANDOFF_SCRIPTS,
    TARGETS,
    configs,
    handoff_configs,
    radix_configs,
    requests,
)
from kvsim.config import EngineConfig, SglangConfig
from kvsim.contract import (
    ActivateDestination,
    CancelDestination,
    CancelSource,
    DestinationReserved,
    RankIdentity,
    ReleaseSource,
    Request,
    ReserveDestination,
    SubmitHandoffPrefill,
)
from support import Pair, drive_both, handoff_step

EXAMPLES = int(os.environ.get("KVSIM_EXAMPLES", "150"))
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]

PAGED, RADIX = handoff_configs(configs()), handoff_configs(radix_configs())


def one_attempt_per_generation(pair: Pair) -> None:
    """Make the twin fail if it tries a reservation again before capacity may have improved.

    That the kernel tries as often is part of the comparison.
    """
    tried: set[tuple[int, int]] = set()
    reserve = pair.twin._reserve_destination

    def watched(request: Any) -> Any:
        key = request.request_id, pair.twin.handoffs.generation
        assert key not in tried
        tried.add(key)
        return reserve(request)

    pair.twin._reserve_destination = watched  # type: ignore[method-assign]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=QUIET)
@given(config=PAGED, identity=IDENTITIES, script=HANDOFF_SCRIPTS)
def test_random_histories_of_a_paged_rank_agree_with_the_model(
    config: EngineConfig, identity: RankIdentity, script: list[tuple[Any, ...]]
) -> None:
    drive_both(config, identity, script, at_start=one_attempt_per_generation)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=QUIET)
@given(config=RADIX, identity=IDENTITIES, script=RADIX_HANDOFF_SCRIPTS)
def test_random_histories_of_a_radix_rank_agree_with_the_model(
    config: EngineConfig, identity: RankIdentity, script: list[tuple[Any, ...]]
) -> None:
    drive_both(config, identity, script, at_start=one_attempt_per_generation)


@settings(max_examples=max(1, EXAMPLES // 8), deadline=None, suppress_health_check=QUIET)
@given(case=st.one_of(st.tuples(PAGED, HANDOFF_SCRIPTS), st.tuples(RADIX, RADIX_HANDOFF_SCRIPTS)), identity=IDENTITIES)
def test_the_same_history_gives_the_same_digests(
    case: tuple[EngineConfig, list[tuple[Any, ...]]], identity: RankIdentity
) -> None:
    trails: list[list[Any]] = [[], []]
    for trail in trails:
        drive_both(*(case[0], identity, case[1]), after_step=lambda pair, trail=trail: trail.append(pair.rank.digest()))
    assert trails[0] == trails[1]


class HandoffMachine(RuleBasedStateMachine):
    """Any order of commands, passes, forks and reloads."""

    @initialize(config=st.one_of(PAGED, RADIX), identity=IDENTITIES)
    def build(self, config: EngineConfig, identity: RankIdentity) -> None:
        self.pair = Pair(config, identity)

    @rule(request=requests())
    def submit(self, request: Request) -> None:
        self.pair.submit(request)

    @rule(handoff_id=HANDOFF_IDS, request=requests())
    def register_a_source(self, handoff_id: int, request: Request) -> None:
        self.pair.attempt(SubmitHandoffPrefill(handoff_id, request))

    @rule(handoff_id=HANDOFF_IDS, request=requests())
    def reserve(self, handoff_id: int, request: Request) -> None:
        self.pair.attempt(ReserveDestination(handoff_id, request))

    @rule(which=TARGETS)
    def activate(self, which: tuple[str, int]) -> None:
        handoff_step(self.pair, "activate", which)

    @rule(action=st.sampled_from(["release", "cancel_source", "cancel_destination"]), which=TARGETS)
    def give_up(self, action: str, which: tuple[str, int]) -> None:
        handoff_step(self.pair, action, which)

    @rule(request_id=IDS, discard=st.booleans())
    def cancel(self, request_id: int, discard: bool) -> None:
        self.pair.cancel(request_id, discard=discard)

    @precondition(lambda self: self.pair.in_flight is None)
    @rule()
    def execute(self) -> None:
        self.pair.execute()

    @precondition(lambda self: self.pair.in_flight is not None)
    @rule()
    def complete(self) -> None:
        self.pair.complete()

    @precondition(lambda self: self.pair.in_flight is None)
    @rule(passes=st.integers(0, 5), keep=st.booleans())
    def fork_and_go_on_with_either(self, passes: int, keep: bool) -> None:
        self.pair.branch(passes, keep=keep)

    @rule()
    def restore_from_a_pickled_snapshot(self) -> None:
        self.pair.reload()

    @precondition(lambda self: self.pair.in_flight is None)
    @rule()
    def fail_what_is_stuck(self) -> None:
        self.pair.fail_head()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.drain()


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(
    max_examples=max(1, EXAMPLES // 4), stateful_step_count=30, deadline=None, suppress_health_check=QUIET
)


# ---------------------------------------------------------------- known ways to get stuck


def transferred(pair: Pair, handoff_id: int, request: Request) -> None:
    """A destination that is reserved at once and activated."""
    assert pair.apply(ReserveDestination(handoff_id, request)).lifecycle_events
    pair.apply(ActivateDestination(handoff_id))


@pytest.mark.parametrize("ruleset", ["dynamo", "dynamo-1.3"])
def test_a_driver_lets_a_transferred_prompt_pass_a_head_that_waits_for_its_blocks(ruleset: str) -> None:
    config = EngineConfig(ruleset=ruleset, num_gpu_blocks=8, block_size=4, worker_type="decode")
    pair = Pair(config)
    transferred(pair, 1, Request(1, range(12), 16))
    pair.step()
    pair.apply(ReserveDestination(2, Request(2, range(100, 116), 4)))
    while 1 in [request.request_id for request in pair.twin.running]:
        pair.step()
    assert pair.rank.metrics().preemptions_total == 1
    pair.apply(ActivateDestination(2))
    # The peer gives its run up here, unless a later destination stays pending: then the head is not looked at.
    assert not pair.step().outputs
    assert pair.rank.stuck_head() is None
    assert pair.unblock()
    assert [output.request_id for output in pair.step().outputs] == [2]
    pair.drain()
    assert pair.rank.metrics().preemptions_total == 1


def test_a_pending_destination_lets_a_transferred_prompt_pass_the_head() -> None:
    config = EngineConfig(num_gpu_blocks=8, block_size=4, worker_type="decode")
    pair = Pair(config)
    transferred(pair, 1, Request(1, range(12), 16))
    pair.step()
    pair.apply(ReserveDestination(2, Request(2, range(100, 116), 4)))
    while 1 in [request.request_id for request in pair.twin.running]:
        pair.step()
    pair.apply(ActivateDestination(2))
    assert not pair.step().outputs
    pair.apply(ReserveDestination(3, Request(3, range(200, 232), 1)))
    assert [output.request_id for output in pair.step().outputs] == [2]
    pair.drain()


@pytest.mark.parametrize("rates", ["0", "1"])
def test_a_lone_request_does_not_preempt_itself_again_and_again_within_an_instant(rates: str) -> None:
    config = EngineConfig(
        num_gpu_blocks=8, block_size=4, worker_type="decode", aic_nextn=1, aic_nextn_accept_rates=rates
    )
    pair = Pair(config)
    transferred(pair, 1, Request(1, range(12), 16))
    pair.apply(ReserveDestination(2, Request(2, range(100, 116), 4)))
    for _ in range(12):
        pair.step()
    # It waits for what the transfer under way holds.
    assert 1 <= pair.rank.metrics().preemptions_total <= 2
    assert pair.twin.last_pass_effect_free
    assert pair.rank.stuck_head() is None
    pair.apply(CancelDestination(2))
    pair.drain()
    assert pair.rank.metrics().preemptions_total <= 2


@pytest.mark.parametrize("ruleset", ["dynamo", "dynamo-1.3"])
def test_half_a_prompt_and_a_pending_destination_that_need_each_others_pages_do_not_wait_for_ever(ruleset: str) -> None:
    config = EngineConfig(
        backend="sglang",
        ruleset=ruleset,
        num_gpu_blocks=8,
        block_size=4,
        sglang=SglangConfig(chunked_prefill_size=16, clip_max_new_tokens=0),
    )
    pair = Pair(config)
    pair.submit(Request(1, range(24), 2))
    pair.step()
    assert not pair.apply(ReserveDestination(1, Request(2, range(100, 120), 2))).lifecycle_events
    while not pair.twin.last_pass_effect_free or pair.rank.stuck_head() is None:
        pair.step()
    stuck = pair.rank.stuck_head()
    assert stuck is not None
    assert stuck.request_id == 1
    pair.fail_head()
    assert [type(event) for event in pair.step().lifecycle_events] == [DestinationReserved]
    pair.drain()


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_what_a_handoff_holds_is_not_a_reason_to_fail_the_queue(backend: str) -> None:
    config = EngineConfig(backend=backend, num_gpu_blocks=4, block_size=4)
    pair = Pair(config)
    pair.apply(SubmitHandoffPrefill(1, Request(1, range(12), 1)))
    pair.step()
    pair.submit(Request(2, range(100, 112), 1))
    for _ in range(700):
        pair.step()
    assert pair.rank.stuck_head() is None
    pair.once(ReleaseSource(1))
    assert [output.completed for output in pair.step().outputs] == [True]
    pair.drain()


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_one_handoff_id_on_both_halves_of_a_rank_withdraws_only_its_own_outputs(backend: str) -> None:
    config = EngineConfig(backend=backend, num_gpu_blocks=16, block_size=4)
    pair = Pair(config)
    pair.apply(SubmitHandoffPrefill(7, Request(1, range(8), 4)))
    transferred(pair, 7, Request(2, range(100, 108), 4))
    pair.step()
    pair.step()
    pair.execute()
    effects = pair.once(CancelSource(7))
    assert effects.retired_requests == (1,)
    shown = pair.complete()
    assert {output.request_id for output in shown.outputs} == {2}
    pair.drain()
