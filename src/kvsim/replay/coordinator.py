"""Who does what next in a handoff: facts and outcomes in, actions out (spec/handoff.md section 8, spec/replay.md 5.1).

One :class:`Coordinator` leads one request from its prefill rank (the source)
to its decode rank (the destination). It touches no rank and no clock: the
driver carries out the actions it is given and reports what came of them. What
follows what stands in the tables `SOURCE_FIRST`, `DESTINATION_FIRST`,
`COMMON` and `CLEANUP`, one row a transition.
"""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvsim.contract import TransferTiming
from kvsim.errors import CommandError, ConfigError

__all__ = ["Action", "Actions", "Coordinator", "Fact", "Outcome", "State", "kernel_tables", "transfer_delay_ms"]


class Fact(enum.IntEnum):
    """What a rank, the clock or the user reports."""

    #: value: `TransferTiming`
    SOURCE_HELD = 0
    #: value: prompt tokens that the destination does not hold yet, in whole blocks
    DESTINATION_RESERVED = 1
    TRANSFER_COMPLETED = 2
    FAILED = 3
    TIMED_OUT = 4
    CANCELED = 5


class Action(enum.IntEnum):
    """What the driver is to do."""

    SUBMIT_PREFILL = 0
    RESERVE_DESTINATION = 1
    #: `Coordinator.delay_ms` says how long it takes
    START_TRANSFER = 2
    ACTIVATE_DESTINATION = 3
    RELEASE_SOURCE = 4
    CANCEL_SOURCE = 5
    CANCEL_DESTINATION = 6
    #: both halves have done their part
    COMPLETE = 7
    #: the handoff was given up and both halves are cleaned
    COMPLETE_CANCELED = 8


class Outcome(enum.IntEnum):
    """What came of an action."""

    SUBMITTED = 0
    ACCEPTED = 1
    SCHEDULED = 2
    APPLIED = 3
    NOOP = 4
    FAILED = 5


class State(enum.IntEnum):
    """What a handoff waits for."""

    NEW = 0
    SUBMITTING = 1
    PREFILLING = 2
    RESERVING = 3
    PENDING = 4
    SCHEDULING = 5
    TRANSFERRING = 6
    ACTIVATING = 7
    RELEASING = 8
    DONE = 9
    #: canceled, but a transfer is starting or under way: both halves stay as they are until it ends
    CANCELED_SCHEDULING = 10
    CANCELED_TRANSFERRING = 11
    CLEANING_BOTH = 12
    CLEANING_SOURCE = 13
    CLEANING_DESTINATION = 14
    ABANDONED = 15


#: (id, what): ids count the actions of a handoff from 1
Actions: TypeAlias = "tuple[tuple[int, Action], ...]"

_F, _A, _O, _S = Fact, Action, Outcome, State
_START = "start"
_GIVE_UP = (_F.FAILED, _F.TIMED_OUT, _F.CANCELED)

#: (state, fact or (action, outcome), next state, actions, lifecycle)
_Row: TypeAlias = "tuple[State, Any, State, tuple[Action, ...], tuple[str, ...]]"

SOURCE_FIRST: tuple[_Row, ...] = (
    (_S.NEW, _START, _S.SUBMITTING, (_A.SUBMIT_PREFILL,), ()),
    (_S.SUBMITTING, (_A.SUBMIT_PREFILL, _O.SUBMITTED), _S.PREFILLING, (), ()),
    (_S.PREFILLING, _F.SOURCE_HELD, _S.RESERVING, (_A.RESERVE_DESTINATION,), ("source_held",)),
    (_S.RESERVING, (_A.RESERVE_DESTINATION, _O.ACCEPTED), _S.PENDING, (), ("destination_accepted",)),
    (_S.PENDING, _F.DESTINATION_RESERVED, _S.SCHEDULING, (_A.START_TRANSFER,), ("destination_reserved",)),
)

DESTINATION_FIRST: tuple[_Row, ...] = (
    (_S.NEW, _START, _S.RESERVING, (_A.RESERVE_DESTINATION,), ()),
    (_S.RESERVING, (_A.RESERVE_DESTINATION, _O.ACCEPTED), _S.PENDING, (), ("destination_accepted",)),
    (_S.PENDING, _F.DESTINATION_RESERVED, _S.SUBMITTING, (_A.SUBMIT_PREFILL,), ("destination_reserved",)),
    (_S.SUBMITTING, (_A.SUBMIT_PREFILL, _O.SUBMITTED), _S.PREFILLING, (), ()),
    (_S.PREFILLING, _F.SOURCE_HELD, _S.SCHEDULING, (_A.START_TRANSFER,), ("source_held",)),
)

_RELEASED = ("source_released", "completed")

#: From the transfer on both orders are one.
COMMON: tuple[_Row, ...] = (
    (_S.SCHEDULING, (_A.START_TRANSFER, _O.SCHEDULED), _S.TRANSFERRING, (), ()),
    (_S.TRANSFERRING, _F.TRANSFER_COMPLETED, _S.ACTIVATING, (_A.ACTIVATE_DESTINATION,), ()),
    (
        _S.ACTIVATING,
        (_A.ACTIVATE_DESTINATION, _O.APPLIED),
        _S.RELEASING,
        (_A.RELEASE_SOURCE,),
        ("destination_activated",),
    ),
    (_S.RELEASING, (_A.RELEASE_SOURCE, _O.APPLIED), _S.DONE, (_A.COMPLETE,), _RELEASED),
    (_S.RELEASING, (_A.RELEASE_SOURCE, _O.NOOP), _S.DONE, (_A.COMPLETE,), _RELEASED),
)

#: How each kind of giving up goes on: (state, actions).
_CLEAN_NOTHING = (_S.ABANDONED, (_A.COMPLETE_CANCELED,), ("canceled",))
_CLEAN_SOURCE = (_S.CLEANING_SOURCE, (_A.CANCEL_SOURCE,), ())
_CLEAN_DESTINATION = (_S.CLEANING_DESTINATION, (_A.CANCEL_DESTINATION,), ())
_CLEAN_BOTH = (_S.CLEANING_BOTH, (_A.CANCEL_SOURCE, _A.CANCEL_DESTINATION), ())

CLEANUP: tuple[_Row, ...] = (
    # A cancel while blocks are on the wire waits for the end of the transfer.
    (_S.SCHEDULING, _F.CANCELED, _S.CANCELED_SCHEDULING, (), ()),
    (_S.TRANSFERRING, _F.CANCELED, _S.CANCELED_TRANSFERRING, (), ()),
    (_S.CANCELED_SCHEDULING, (_A.START_TRANSFER, _O.SCHEDULED), _S.CANCELED_TRANSFERRING, (), ()),
    (_S.CANCELED_SCHEDULING, (_A.START_TRANSFER, _O.FAILED), *_CLEAN_BOTH),
    (_S.CANCELED_SCHEDULING, _F.FAILED, *_CLEAN_BOTH),
    (_S.CANCELED_SCHEDULING, _F.TIMED_OUT, *_CLEAN_BOTH),
    (_S.CANCELED_TRANSFERRING, _F.TRANSFER_COMPLETED, *_CLEAN_BOTH),
    (_S.CANCELED_TRANSFERRING, _F.FAILED, *_CLEAN_BOTH),
    (_S.CANCELED_TRANSFERRING, _F.TIMED_OUT, *_CLEAN_BOTH),
    # The source is gone by then, the destination may still run.
    (_S.DONE, _F.CANCELED, *_CLEAN_DESTINATION),
    *(
        row
        for settled in (_O.APPLIED, _O.NOOP)
        for row in (
            (_S.CLEANING_BOTH, (_A.CANCEL_SOURCE, settled), _S.CLEANING_DESTINATION, (), ()),
            (_S.CLEANING_BOTH, (_A.CANCEL_DESTINATION, settled), _S.CLEANING_SOURCE, (), ()),
            (_S.CLEANING_SOURCE, (_A.CANCEL_SOURCE, settled), *_CLEAN_NOTHING),
            (_S.CLEANING_DESTINATION, (_A.CANCEL_DESTINATION, settled), *_CLEAN_NOTHING),
        )
    ),
)

#: What may come of an action.
OUTCOMES: dict[Action, tuple[Outcome, ...]] = {
    _A.SUBMIT_PREFILL: (_O.SUBMITTED, _O.FAILED),
    _A.RESERVE_DESTINATION: (_O.ACCEPTED, _O.FAILED),
    _A.START_TRANSFER: (_O.SCHEDULED, _O.FAILED),
    _A.ACTIVATE_DESTINATION: (_O.APPLIED, _O.FAILED),
    _A.RELEASE_SOURCE: (_O.APPLIED, _O.NOOP, _O.FAILED),
    # A cleanup that fails leaves nothing to fall back on.
    _A.CANCEL_SOURCE: (_O.APPLIED, _O.NOOP),
    _A.CANCEL_DESTINATION: (_O.APPLIED, _O.NOOP),
    _A.COMPLETE: (_O.APPLIED,),
    _A.COMPLETE_CANCELED: (_O.APPLIED,),
}


class _Step(NamedTuple):
    state: State
    actions: tuple[Action, ...]
    lifecycle: tuple[str, ...]


_IGNORED = _Step(_S.NEW, (), ())
_NOTHING: Actions = ()


class _Tables(NamedTuple):
    """The rows of one order, looked up by position."""

    first: _Step
    #: [state][fact]; None: too early
    facts: tuple[tuple[_Step | None, ...], ...]
    #: [state][action][outcome]; None: not an outcome of this action
    outcomes: tuple[tuple[tuple[_Step | None, ...], ...], ...]


def _compile(order: tuple[_Row, ...]) -> _Tables:
    first = next(_Step(state, actions, lifecycle) for _, event, state, actions, lifecycle in order if event is _START)
    facts: list[list[_Step | None]] = [[None] * len(Fact) for _ in State]
    outcomes: list[list[list[_Step | None]]] = [[[None] * len(Outcome) for _ in Action] for _ in State]
    # Once a handoff is done or given up hardly anything comes too early, and what is still under way changes nothing.
    for state in State:
        if state >= _S.DONE:
            facts[state] = [_IGNORED] * len(Fact)
            for action, allowed in OUTCOMES.items():
                for outcome in allowed:
                    outcomes[state][action][outcome] = _IGNORED
    facts[_S.CANCELED_SCHEDULING][_F.TRANSFER_COMPLETED] = None
    seen: set[Fact] = set()
    issued: set[Action] = set()
    for state, event, _, actions, _ in (*order, *COMMON):
        # The rows stand in the order of the states: what is known and asked for on entry.
        for fact in seen:
            facts[state][fact] = _IGNORED
        halves = (_A.SUBMIT_PREFILL in issued, _A.RESERVE_DESTINATION in issued)
        up = {
            (False, False): _CLEAN_NOTHING,
            (True, False): _CLEAN_SOURCE,
            (False, True): _CLEAN_DESTINATION,
            (True, True): _CLEAN_BOTH,
        }[halves]
        for fact in _GIVE_UP:
            facts[state][fact] = _Step(*up)
        if isinstance(event, tuple):
            outcomes[state][event[0]][_O.FAILED] = _Step(*up)
        elif event is not _START:
            seen.add(event)
        issued.update(actions)
    for state, event, following, actions, lifecycle in (*order, *COMMON, *CLEANUP):
        step = _Step(following, actions, lifecycle)
        if isinstance(event, tuple):
            outcomes[state][event[0]][event[1]] = step
        elif event is not _START:
            facts[state][event] = step
    return _Tables(
        first,
        tuple(tuple(row) for row in facts),
        tuple(tuple(tuple(row) for row in rows) for rows in outcomes),
    )


_TABLES = {True: _compile(SOURCE_FIRST), False: _compile(DESTINATION_FIRST)}


def kernel_tables(source_first: bool) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The tables of one order as the kernel `Fleet` reads them.

    Returns
    -------
    facts : ndarray of int32, shape (states, facts)
    outcomes : ndarray of int32, shape (states, actions, outcomes)
        A step is the next state, from bit 8 on the number of its actions, from bits 16 and 20 on the actions. -2:
        nothing changes, -1: refused. The start stands at ``facts[NEW, SOURCE_HELD]``, a fact that comes too early.
    """

    def coded(step: _Step | None) -> int:
        if step is None:
            return -1
        if step is _IGNORED:
            return -2
        actions = sum(int(action) << (16 + 4 * k) for k, action in enumerate(step.actions))
        return int(step.state) | len(step.actions) << 8 | actions

    tables = _TABLES[source_first]
    facts = np.array([[coded(step) for step in row] for row in tables.facts], np.int32)
    outcomes = np.array([[[coded(step) for step in row] for row in rows] for rows in tables.outcomes], np.int32)
    facts[State.NEW, Fact.SOURCE_HELD] = coded(tables.first)
    return facts, outcomes


def transfer_delay_ms(timing: TransferTiming, transferable_tokens: int | None = None) -> float | None:
    """How long the KV of a prompt is on the wire.

    Parameters
    ----------
    timing : TransferTiming
        Of the held source. A bandwidth of 0 is the same as none.
    transferable_tokens : int, optional
        What the destination lacks, needed in mode ``destination_missing``.

    Returns
    -------
    float or None
        ms; None if bytes per token or bandwidth are not known.

    Raises
    ------
    CommandError
        A field is negative or not finite, or the mode is unknown.
    """
    tokens: int | None
    if timing.mode == "full_prompt":
        tokens = timing.full_prompt_tokens
    elif timing.mode == "destination_missing":
        tokens = transferable_tokens
    else:
        raise CommandError(f"mode: must be 'full_prompt' or 'destination_missing', got {timing.mode!r}")
    size, bandwidth = timing.bytes_per_token, timing.bandwidth_gb_s
    if size is not None and size < 0:
        raise CommandError(f"bytes_per_token: must be None or >= 0, got {size!r}")
    if bandwidth is not None and not 0 <= bandwidth < math.inf:
        raise CommandError(f"bandwidth_gb_s: must be None or finite and >= 0, got {bandwidth!r}")
    if tokens is not None and tokens < 0:
        raise CommandError(f"tokens: must be >= 0, got {tokens!r}")
    if size is None or not bandwidth or tokens is None:
        return None
    delay = tokens * size / (bandwidth * 1e9) * 1000.0
    if delay == math.inf:
        raise CommandError(f"transfer delay: must be finite, got {tokens} tokens of {size} bytes at {bandwidth} GB/s")
    return delay


class Coordinator:
    """The handoff of one request, from its start to its completion or its cleanup.

    Every method returns the actions that follow, which the driver carries out in
    order, each with one `outcome`. Errors leave the coordinator as it was.

    Parameters
    ----------
    source_first : bool
        Prefill before reservation (vLLM, TensorRT-LLM), or the reverse (SGLang).
    handoff_id : int
        Chosen by the caller, for messages and to recognise facts of others.
    fallback_ms : float
        Transfer time if bytes per token or bandwidth are not known; finite, >= 0.

    Attributes
    ----------
    state : State
    delay_ms : float
        Of the transfer, from `Action.START_TRANSFER` on; NaN before.
    lifecycle : list of str
        What has been reached, in order: ``source_held``, ``destination_accepted``,
        ``destination_reserved``, ``destination_activated``, ``source_released``,
        ``completed``, ``canceled``.
    """

    __slots__ = (
        "_issued",
        "_outcomes",
        "_tables",
        "_timing",
        "_tokens",
        "delay_ms",
        "fallback_ms",
        "handoff_id",
        "lifecycle",
        "state",
    )

    def __init__(self, source_first: bool, handoff_id: int = 0, fallback_ms: float = 0.0) -> None:
        if not 0 <= fallback_ms < math.inf:
            raise ConfigError("handoff_latency_ms", f"must be finite and >= 0, got {fallback_ms!r}")
        self._tables = _TABLES[source_first]
        self.handoff_id = handoff_id
        self.fallback_ms = fallback_ms
        self.state = State.NEW
        self.delay_ms = math.nan
        self.lifecycle: list[str] = []
        self._issued: list[Action] = []
        self._outcomes: list[Outcome | None] = []
        self._timing: TransferTiming | None = None
        self._tokens: int | None = None

    @property
    def succeeded(self) -> bool:
        """The request is the destination's alone."""
        return self.state is State.DONE

    @property
    def ended(self) -> bool:
        """Nothing is to be done any more (a cancel after success opens the cleanup again)."""
        return self.state is State.DONE or self.state is State.ABANDONED

    def start(self) -> Actions:
        """The first action.

        Raises
        ------
        CommandError
            If the handoff was started or canceled before.
        """
        if self.state is not State.NEW:
            raise CommandError(f"handoff {self.handoff_id}: start is due once, at first, not in {self.state.name}")
        return self._take(self._tables.first)

    def fact(self, fact: Fact, value: TransferTiming | int | None = None, handoff_id: int | None = None) -> Actions:
        """Something has happened. Repetitions and whatever comes after the end change nothing.

        Parameters
        ----------
        fact : Fact
        value : TransferTiming or int, optional
            For ``SOURCE_HELD`` and ``DESTINATION_RESERVED``.
        handoff_id : int, optional
            Whose fact it is, if the caller wants that checked.

        Raises
        ------
        CommandError
            The fact comes too early, is another handoff's, or its value is not allowed.
        """
        if handoff_id is not None and handoff_id != self.handoff_id:
            raise CommandError(f"handoff_id: {fact.name} of {handoff_id} was given to handoff {self.handoff_id}")
        step = self._tables.facts[self.state][fact]
        if step is _IGNORED:
            return _NOTHING
        if step is None:
            raise CommandError(f"handoff {self.handoff_id}: {fact.name} comes too early, in {self.state.name}")
        if fact <= Fact.DESTINATION_RESERVED:
            return self._take_measured(step, fact, value)
        return self._take(step)

    def outcome(self, action_id: int, outcome: Outcome) -> Actions:
        """What came of an action. The same outcome again changes nothing.

        Raises
        ------
        CommandError
            Unknown action, another outcome than the first, or one that this action
            cannot have; so a cleanup that fails, or an activation that does nothing.
        """
        outcomes = self._outcomes
        if not 0 < action_id <= len(outcomes):
            raise CommandError(
                f"handoff {self.handoff_id}: action_id must lie in 1 <= id <= {len(outcomes)}, got {action_id}"
            )
        before = outcomes[action_id - 1]
        if before is not None:
            if before == outcome:
                return _NOTHING
            raise CommandError(f"handoff {self.handoff_id}: action {action_id} was {before.name}, not {outcome.name}")
        action = self._issued[action_id - 1]
        step = self._tables.outcomes[self.state][action][outcome]
        if step is None:
            allowed = ", ".join(one.name for one in OUTCOMES[action])
            raise CommandError(
                f"handoff {self.handoff_id}: outcome of {action.name} must be one of {allowed}, got {outcome.name}"
            )
        outcomes[action_id - 1] = outcome
        return _NOTHING if step is _IGNORED else self._take(step)

    def outstanding(self) -> Actions:
        """Actions without an outcome, completions left out."""
        return tuple(
            (index + 1, action)
            for index, action in enumerate(self._issued)
            if self._outcomes[index] is None and action < Action.COMPLETE
        )

    def _take_measured(self, step: _Step, fact: Fact, value: TransferTiming | int | None) -> Actions:
        """A step that tells sizes: they are checked before anything changes."""
        timing, tokens = self._timing, self._tokens
        if fact == Fact.SOURCE_HELD:
            if not isinstance(value, TransferTiming):
                raise CommandError(f"SOURCE_HELD: expected a TransferTiming, got {value!r}")
            timing = value
        else:
            if isinstance(value, (bool, TransferTiming)) or value is None or value < 0:
                raise CommandError(f"DESTINATION_RESERVED: expected tokens >= 0, got {value!r}")
            tokens = value
        if timing is not None:
            delay = transfer_delay_ms(timing, tokens)
            if tokens is not None:
                self.delay_ms = self.fallback_ms if delay is None else delay
        self._timing, self._tokens = timing, tokens
        return self._take(step)

    def _take(self, step: _Step) -> Actions:
        state, actions, lifecycle = step
        self.state = state
        if lifecycle:
            self.lifecycle += lifecycle
        if not actions:
            return _NOTHING
        issued, outcomes = self._issued, self._outcomes
        issued += actions
        if len(actions) == 1:
            outcomes.append(None)
            return ((len(issued), actions[0]),)
        outcomes += (None, None)
        return ((len(issued) - 1, actions[0]), (len(issued), actions[1]))
