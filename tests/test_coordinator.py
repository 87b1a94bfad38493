"""The handoff coordinator: both orders, giving up anywhere, any input in any order."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.contract import TransferTiming
from kvsim.errors import CommandError, ConfigError
from kvsim.replay.coordinator import OUTCOMES, Action, Actions, Coordinator, Fact, Outcome, State, transfer_delay_ms
from model.coordinator import CoordinatorModel, RefusedError

EXAMPLES = int(os.environ.get("KVSIM_EXAMPLES", "400"))
TIMING = TransferTiming("full_prompt", 100, 1000, 1.0)

#: what a driver reports when all goes well
GOOD = {
    Action.SUBMIT_PREFILL: Outcome.SUBMITTED,
    Action.RESERVE_DESTINATION: Outcome.ACCEPTED,
    Action.START_TRANSFER: Outcome.SCHEDULED,
    Action.ACTIVATE_DESTINATION: Outcome.APPLIED,
    Action.RELEASE_SOURCE: Outcome.APPLIED,
    Action.CANCEL_SOURCE: Outcome.APPLIED,
    Action.CANCEL_DESTINATION: Outcome.NOOP,
}
#: the fact that follows the good outcome of an action
FOLLOWS: dict[Action, tuple[Fact, Any]] = {
    Action.SUBMIT_PREFILL: (Fact.SOURCE_HELD, TIMING),
    Action.RESERVE_DESTINATION: (Fact.DESTINATION_RESERVED, 20),
    Action.START_TRANSFER: (Fact.TRANSFER_COMPLETED, None),
}
ORDERS = pytest.mark.parametrize("source_first", [True, False], ids=["source_first", "destination_first"])

ISSUED = {
    True: [
        Action.SUBMIT_PREFILL,
        Action.RESERVE_DESTINATION,
        Action.START_TRANSFER,
        Action.ACTIVATE_DESTINATION,
        Action.RELEASE_SOURCE,
        Action.COMPLETE,
    ],
    False: [
        Action.RESERVE_DESTINATION,
        Action.SUBMIT_PREFILL,
        Action.START_TRANSFER,
        Action.ACTIVATE_DESTINATION,
        Action.RELEASE_SOURCE,
        Action.COMPLETE,
    ],
}


def only(actions: Actions) -> tuple[int, Action]:
    (action,) = actions
    return action


def inputs(source_first: bool) -> list[Any]:
    """The inputs of a handoff that succeeds, after its start, in order."""
    steps: list[Any] = []
    for number, action in enumerate(ISSUED[source_first][:-1], 1):
        steps.append((number, GOOD[action]))
        if action in FOLLOWS:
            steps.append(FOLLOWS[action])
    return steps


def feed(coordinator: Coordinator, step: Any) -> Actions:
    if isinstance(step[0], Fact):
        return coordinator.fact(*step)
    return coordinator.outcome(*step)


def started(source_first: bool, steps: int = 0) -> Coordinator:
    coordinator = Coordinator(source_first)
    coordinator.start()
    for step in inputs(source_first)[:steps]:
        feed(coordinator, step)
    return coordinator


def image(coordinator: Coordinator) -> tuple[Any, ...]:
    """Everything that could change, comparable."""
    return tuple(repr(getattr(coordinator, name)) for name in Coordinator.__slots__)


STEPS = len(inputs(True))


# ---------------------------------------------------------------- success (D22)


@ORDERS
def test_the_actions_of_a_success_come_one_by_one_with_increasing_ids(source_first: bool) -> None:
    coordinator = Coordinator(source_first, handoff_id=9)
    seen = [only(coordinator.start())]
    for step in inputs(source_first):
        seen += feed(coordinator, step)
    assert [action for _, action in seen] == ISSUED[source_first]
    assert [number for number, _ in seen] == list(range(1, len(seen) + 1))
    assert coordinator.succeeded
    assert coordinator.ended
    assert coordinator.outstanding() == ()


@ORDERS
def test_the_lifecycle_is_the_normal_one(source_first: bool) -> None:
    first = ["source_held", "destination_accepted", "destination_reserved"]
    second = ["destination_accepted", "destination_reserved", "source_held"]
    last = ["destination_activated", "source_released", "completed"]
    assert started(source_first, STEPS).lifecycle == (first if source_first else second) + last


def test_a_source_that_is_gone_already_is_as_good_as_released() -> None:
    coordinator = started(True, STEPS - 1)
    assert only(coordinator.outcome(5, Outcome.NOOP)) == (6, Action.COMPLETE)
    assert coordinator.succeeded


@ORDERS
def test_the_whole_life_takes_microseconds(source_first: bool) -> None:
    steps = inputs(source_first)
    best = math.inf
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(200):
            coordinator = Coordinator(source_first)
            coordinator.start()
            for step in steps:
                feed(coordinator, step)
        best = min(best, (time.perf_counter() - begun) / 200)
    # About 6 on an idle machine; the bar of all bookkeeping of a handoff is 40.
    assert best < 40e-6


# ---------------------------------------------------------------- transfer times (D4, D5)


@pytest.mark.parametrize(
    ("mode", "size", "bandwidth", "want"),
    [
        ("full_prompt", 1000, 1.0, 0.1),
        ("destination_missing", 1000, 1.0, 0.02),
        ("full_prompt", None, 1.0, 7.5),
        ("full_prompt", 1000, None, 7.5),
        ("full_prompt", 1000, 0.0, 7.5),
        ("destination_missing", 1000, 0, 7.5),
    ],
)
@ORDERS
def test_a_transfer_lasts_as_its_tokens_say_or_as_configured(
    source_first: bool, mode: str, size: int | None, bandwidth: float | None, want: float
) -> None:
    coordinator = Coordinator(source_first, fallback_ms=7.5)
    coordinator.start()
    timing = TransferTiming(mode, 100, size, bandwidth)
    for step in inputs(source_first)[:4]:
        feed(coordinator, (Fact.SOURCE_HELD, timing) if step[0] is Fact.SOURCE_HELD else step)
    assert coordinator.state is State.SCHEDULING
    assert coordinator.delay_ms == pytest.approx(want, rel=1e-15)


def test_the_delay_that_a_client_sees_is_that_of_the_full_prompt() -> None:
    assert transfer_delay_ms(TransferTiming("full_prompt", 128, 1_000_000, 1.0)) == 128.0
    assert transfer_delay_ms(TransferTiming("full_prompt", 128, 1_000_000, None)) is None
    assert transfer_delay_ms(TransferTiming("destination_missing", 128, 1_000_000, 1.0), 0) == 0.0
    assert transfer_delay_ms(TransferTiming("destination_missing", 128, 1_000_000, 1.0)) is None


BAD_TIMINGS = [
    (TransferTiming("full_prompt", 100, 1000, -1.0), "bandwidth_gb_s"),
    (TransferTiming("full_prompt", 100, 1000, math.nan), "bandwidth_gb_s"),
    (TransferTiming("full_prompt", 100, 1000, math.inf), "bandwidth_gb_s"),
    (TransferTiming("full_prompt", 100, None, -1.0), "bandwidth_gb_s"),
    (TransferTiming("full_prompt", 100, -1, 1.0), "bytes_per_token"),
    (TransferTiming("full_prompt", -1, 1, 1.0), "tokens"),
    (TransferTiming("half_prompt", 100, 1, 1.0), "mode"),
    (TransferTiming("full_prompt", 100, 10**300, 1e-300), "transfer delay"),
    (None, "TransferTiming"),
    (7, "TransferTiming"),
]


@pytest.mark.parametrize(("timing", "name"), BAD_TIMINGS)
@ORDERS
def test_sizes_that_are_not_sizes_are_refused_and_nothing_changes(source_first: bool, timing: Any, name: str) -> None:
    coordinator = started(source_first, 1 if source_first else 3)
    before = image(coordinator)
    with pytest.raises(CommandError, match=name):
        coordinator.fact(Fact.SOURCE_HELD, timing)
    assert image(coordinator) == before
    coordinator.fact(Fact.SOURCE_HELD, TIMING)


@pytest.mark.parametrize("tokens", [-1, None, True, TIMING])
def test_a_reservation_tells_its_tokens(tokens: Any) -> None:
    coordinator = started(True, 3)
    with pytest.raises(CommandError, match="tokens >= 0"):
        coordinator.fact(Fact.DESTINATION_RESERVED, tokens)
    assert only(coordinator.fact(Fact.DESTINATION_RESERVED, 0)) == (3, Action.START_TRANSFER)


@pytest.mark.parametrize("fallback", [-1.0, math.nan, math.inf])
def test_the_configured_latency_is_a_duration(fallback: float) -> None:
    with pytest.raises(ConfigError, match="handoff_latency_ms"):
        Coordinator(True, fallback_ms=fallback)


# ---------------------------------------------------------------- order, repetition, identity


@ORDERS
def test_every_input_may_come_twice_and_changes_nothing_then(source_first: bool) -> None:
    for last in range(1, STEPS + 1):
        coordinator = started(source_first, last)
        before = image(coordinator)
        for step in inputs(source_first)[:last]:
            assert feed(coordinator, step) == ()
        assert image(coordinator) == before


@ORDERS
def test_a_fact_before_its_time_is_an_error(source_first: bool) -> None:
    steps = inputs(source_first)
    for done in range(STEPS):
        for step in steps[done + 1 :]:
            if not isinstance(step[0], Fact):
                continue
            coordinator = started(source_first, done)
            before = image(coordinator)
            with pytest.raises(CommandError, match=f"{step[0].name} comes too early"):
                feed(coordinator, step)
            assert image(coordinator) == before


def test_facts_before_the_start_and_a_second_start_are_errors() -> None:
    coordinator = Coordinator(True)
    with pytest.raises(CommandError, match="too early"):
        coordinator.fact(Fact.SOURCE_HELD, TIMING)
    coordinator.start()
    with pytest.raises(CommandError, match="start is due once"):
        coordinator.start()


def test_facts_of_another_handoff_are_errors() -> None:
    coordinator = Coordinator(True, handoff_id=3)
    coordinator.start()
    coordinator.outcome(1, Outcome.SUBMITTED)
    with pytest.raises(CommandError, match="SOURCE_HELD of 4"):
        coordinator.fact(Fact.SOURCE_HELD, TIMING, handoff_id=4)
    coordinator.fact(Fact.SOURCE_HELD, TIMING, handoff_id=3)


@pytest.mark.parametrize("action_id", [0, 2, -1])
def test_an_unknown_action_is_an_error(action_id: int) -> None:
    coordinator = started(True)
    with pytest.raises(CommandError, match="action_id must lie in"):
        coordinator.outcome(action_id, Outcome.SUBMITTED)


@ORDERS
def test_only_the_outcomes_of_an_action_are_taken_and_only_one_of_them(source_first: bool) -> None:
    for number, action in enumerate(ISSUED[source_first], 1):
        steps = inputs(source_first)
        done = steps.index((number, GOOD[action])) if action in GOOD else STEPS
        for outcome in Outcome:
            coordinator = started(source_first, done)
            if outcome in OUTCOMES[action]:
                coordinator.outcome(number, outcome)
                for other in Outcome:
                    if other is not outcome:
                        with pytest.raises(CommandError, match=f"was {outcome.name}, not {other.name}"):
                            coordinator.outcome(number, other)
            else:
                before = image(coordinator)
                with pytest.raises(CommandError, match=f"outcome of {action.name} must be one of"):
                    coordinator.outcome(number, outcome)
                assert image(coordinator) == before


# ---------------------------------------------------------------- giving up


@ORDERS
@pytest.mark.parametrize("fact", [Fact.FAILED, Fact.TIMED_OUT, Fact.CANCELED])
@pytest.mark.parametrize("done", range(STEPS))
def test_giving_up_cancels_what_was_asked_for_once_and_source_first(source_first: bool, fact: Fact, done: int) -> None:
    coordinator = started(source_first, done)
    asked = {action for _, action in coordinator.outstanding()} | set(coordinator._issued)
    waits = fact is Fact.CANCELED and coordinator.state in (State.SCHEDULING, State.TRANSFERRING)
    actions = coordinator.fact(fact)
    if waits:
        assert actions == ()
        if coordinator.state is State.CANCELED_SCHEDULING:
            assert coordinator.outcome(3, Outcome.SCHEDULED) == ()
        actions = coordinator.fact(Fact.TRANSFER_COMPLETED)
    want = [Action.CANCEL_SOURCE] * (Action.SUBMIT_PREFILL in asked)
    want += [Action.CANCEL_DESTINATION] * (Action.RESERVE_DESTINATION in asked)
    assert [action for _, action in actions] == want
    for again in (Fact.FAILED, Fact.TIMED_OUT, Fact.CANCELED, Fact.TRANSFER_COMPLETED):
        assert coordinator.fact(again) == ()
    completed: Actions = ()
    for number, action in reversed(actions):
        assert completed == ()
        completed = coordinator.outcome(number, GOOD[action])
    assert only(completed)[1] is Action.COMPLETE_CANCELED
    assert coordinator.state is State.ABANDONED
    assert coordinator.lifecycle[-1] == "canceled"
    assert "completed" not in coordinator.lifecycle


@ORDERS
def test_a_failed_action_gives_up(source_first: bool) -> None:
    for number, action in enumerate(ISSUED[source_first][:-1], 1):
        coordinator = started(source_first, inputs(source_first).index((number, GOOD[action])))
        asked = ISSUED[source_first][:number]
        want = [Action.CANCEL_SOURCE] * (Action.SUBMIT_PREFILL in asked)
        want += [Action.CANCEL_DESTINATION] * (Action.RESERVE_DESTINATION in asked)
        assert [what for _, what in coordinator.outcome(number, Outcome.FAILED)] == want


def test_a_cancel_before_the_start_has_nothing_to_clean() -> None:
    coordinator = Coordinator(True)
    assert only(coordinator.fact(Fact.CANCELED)) == (1, Action.COMPLETE_CANCELED)
    with pytest.raises(CommandError, match="start is due once"):
        coordinator.start()


@pytest.mark.parametrize("end", [Fact.TRANSFER_COMPLETED, Fact.FAILED, Fact.TIMED_OUT])
def test_blocks_on_the_wire_stay_until_the_transfer_ends(end: Fact) -> None:
    coordinator = started(True, 5)
    assert coordinator.fact(Fact.CANCELED) == ()
    assert coordinator.fact(Fact.CANCELED) == ()
    assert not coordinator.ended
    actions = coordinator.fact(end)
    assert [action for _, action in actions] == [Action.CANCEL_SOURCE, Action.CANCEL_DESTINATION]


def test_a_transfer_that_never_started_pins_nothing() -> None:
    coordinator = started(True, 4)
    assert coordinator.fact(Fact.CANCELED) == ()
    with pytest.raises(CommandError, match="too early"):
        coordinator.fact(Fact.TRANSFER_COMPLETED)
    assert len(coordinator.outcome(3, Outcome.FAILED)) == 2


@ORDERS
def test_a_cancel_after_success_cleans_the_destination_alone(source_first: bool) -> None:
    coordinator = started(source_first, STEPS)
    assert coordinator.fact(Fact.FAILED) == ()
    assert coordinator.fact(Fact.TIMED_OUT) == ()
    number, action = only(coordinator.fact(Fact.CANCELED))
    assert action is Action.CANCEL_DESTINATION
    assert not coordinator.ended
    assert coordinator.fact(Fact.CANCELED) == ()
    assert only(coordinator.outcome(number, Outcome.APPLIED))[1] is Action.COMPLETE_CANCELED
    assert coordinator.fact(Fact.CANCELED) == ()
    assert coordinator.lifecycle[-2:] == ["completed", "canceled"]


def test_a_cleanup_that_fails_is_an_error_and_stays_due() -> None:
    coordinator = started(True, 2)
    first, second = coordinator.fact(Fact.CANCELED)
    with pytest.raises(CommandError, match="CANCEL_SOURCE must be one of APPLIED, NOOP"):
        coordinator.outcome(first[0], Outcome.FAILED)
    assert coordinator.outcome(first[0], Outcome.NOOP) == ()
    assert only(coordinator.outcome(second[0], Outcome.NOOP))[1] is Action.COMPLETE_CANCELED


def test_what_was_under_way_still_gets_its_outcome_during_the_cleanup() -> None:
    coordinator = started(True)
    ((cancel, _),) = coordinator.fact(Fact.TIMED_OUT)
    assert coordinator.outstanding() == ((1, Action.SUBMIT_PREFILL), (2, Action.CANCEL_SOURCE))
    assert coordinator.outcome(1, Outcome.SUBMITTED) == ()
    assert coordinator.fact(Fact.SOURCE_HELD, TIMING) == ()
    assert len(coordinator.outcome(cancel, Outcome.APPLIED)) == 1


# ---------------------------------------------------------------- anything in any order, beside the twin

TIMINGS = st.builds(
    TransferTiming,
    st.sampled_from(["full_prompt", "full_prompt", "destination_missing", "half_prompt"]),
    st.integers(0, 300),
    st.sampled_from([None, 1, 1000]),
    st.sampled_from([None, 0.0, 1.0, 64.0, -1.0, math.nan, math.inf]),
)
NORMAL = TransferTiming("destination_missing", 64, 1000, 2.0)
STRAY = st.one_of(
    st.tuples(st.just("start"), st.none(), st.none()),
    st.tuples(st.just("fact"), st.sampled_from(Fact), st.one_of(st.none(), st.integers(-1, 64), TIMINGS)),
    st.tuples(st.just("outcome"), st.integers(-1, 9), st.sampled_from(Outcome)),
)
#: "go": the driver does its next due thing
SCRIPT = st.lists(st.one_of(st.just(("go", None, None)), st.just(("go", None, None)), STRAY), max_size=40)


class Both:
    """The coordinator and its twin under the same inputs."""

    def __init__(self, source_first: bool) -> None:
        self.real = Coordinator(source_first, 5, 7.5)
        self.twin = CoordinatorModel(source_first, 7.5)
        self.actions: list[Action] = []

    def give(self, kind: str, a: Any, b: Any) -> bool:
        """One input to both; whether it was accepted."""
        before = image(self.real)
        want = error = None
        try:
            if kind == "start":
                want = self.twin.start()
            elif kind == "fact":
                want = self.twin.fact(a.name, b)
            else:
                want = self.twin.outcome(a, b.name)
        except RefusedError as refused:
            error = refused
        if error is not None:
            with pytest.raises(CommandError):
                self._call(kind, a, b)
            assert image(self.real) == before
            return False
        got = self._call(kind, a, b)
        assert [(number, action.name) for number, action in got] == want
        self.actions += [action for _, action in got]
        self.check()
        return True

    def _call(self, kind: str, a: Any, b: Any) -> Actions:
        if kind == "start":
            return self.real.start()
        return self.real.fact(a, b) if kind == "fact" else self.real.outcome(a, b)

    def check(self) -> None:
        assert self.real.lifecycle == self.twin.lifecycle
        assert self.real.ended == self.twin.ended
        if self.twin.delay_ms is not None:
            assert self.real.delay_ms == self.twin.delay_ms
        # Exactly once, whatever happened.
        assert len(set(self.actions)) == len(self.actions)
        assert [action.name for action in self.actions] == self.twin.actions
        if Action.COMPLETE_CANCELED in self.actions:
            for asked, cancel in (
                (Action.SUBMIT_PREFILL, Action.CANCEL_SOURCE),
                (Action.RESERVE_DESTINATION, Action.CANCEL_DESTINATION),
            ):
                cleaned = cancel in self.actions or (asked is Action.SUBMIT_PREFILL and Action.COMPLETE in self.actions)
                assert asked not in self.actions or cleaned

    def go(self) -> bool:
        """What a faithful driver does next; False if nothing is due."""
        if self.real.ended:
            return False
        if self.real.state is State.NEW:
            return self.give("start", None, None)
        for number, action in self.real.outstanding():
            return self.give("outcome", number, GOOD[action])
        for action, (fact, value) in FOLLOWS.items():
            if action in self.actions and fact.name not in self.twin.facts:
                return self.give("fact", fact, NORMAL if fact is Fact.SOURCE_HELD else value)
        raise AssertionError(f"nobody is waited for in {self.real.state.name}")


@settings(max_examples=EXAMPLES, deadline=None)
@given(source_first=st.booleans(), script=SCRIPT)
def test_any_inputs_in_any_order_give_what_the_twin_gives_and_the_handoff_ends(
    source_first: bool, script: list[tuple[str, Any, Any]]
) -> None:
    both = Both(source_first)
    for kind, a, b in script:
        if kind == "go":
            both.go()
        else:
            both.give(kind, a, b)
    steps = 0
    while both.go():
        steps += 1
        assert steps < 20
    assert both.real.ended
    assert both.actions[-1] in (Action.COMPLETE, Action.COMPLETE_CANCELED)
