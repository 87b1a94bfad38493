"""The two halves of a handoff inside one rank: which command does what in which state (spec/handoff.md).

A half is a live request with a role. The tables here say what a command finds
and does; the work is done by verbs of `RankState`, rows of the rank are the
handles. `SchedulerRank` and the runs of `kvsim.replay` go through the same
`RankHandoffs`.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from kvsim._core.state import RankState
from kvsim.config import EngineConfig
from kvsim.contract import DestinationReserved, SourceHeld, TransferTiming
from kvsim.errors import CommandError
from kvsim.layout import FailReason, HandoffRole

__all__ = ["HandoffCommand", "Outcome", "RankHandoffs", "Retry", "Transition"]

_MASK64 = (1 << 64) - 1


class HandoffCommand(enum.IntEnum):
    """Commands whose effect depends on the role of a request."""

    CANCEL_REQUEST = 0
    RELEASE_SOURCE = 1
    CANCEL_SOURCE = 2
    ACTIVATE_DESTINATION = 3
    CANCEL_DESTINATION = 4


class Retry(enum.Enum):
    """Whether a command is followed by an attempt to reserve for the first pending destination."""

    NEVER = enum.auto()
    #: Unless a pass is in flight.
    IF_ADMITTING = enum.auto()
    ALWAYS = enum.auto()


class Transition(NamedTuple):
    """What a command does to a request in one role; a pair that is not in `TRANSITIONS` is a Noop.

    Attributes
    ----------
    verb : str
        Method of `RankState`, called with the row.
    retires : bool
        The request has left the rank.
    retry : Retry
    """

    verb: str
    retires: bool
    retry: Retry


#: (role, command) -> effect: spec/handoff.md, the tables of sections 2 and 3.
TRANSITIONS: dict[tuple[HandoffRole, HandoffCommand], Transition] = {
    (HandoffRole.NONE, HandoffCommand.CANCEL_REQUEST): Transition("cancel", True, Retry.IF_ADMITTING),
    (HandoffRole.SOURCE_REGISTERED, HandoffCommand.RELEASE_SOURCE): Transition("release_source", False, Retry.ALWAYS),
    (HandoffRole.SOURCE_REGISTERED, HandoffCommand.CANCEL_SOURCE): Transition("cancel_source", True, Retry.ALWAYS),
    (HandoffRole.SOURCE_REGISTERED, HandoffCommand.CANCEL_REQUEST): Transition("cancel", True, Retry.IF_ADMITTING),
    (HandoffRole.SOURCE_HELD, HandoffCommand.RELEASE_SOURCE): Transition("release_source", True, Retry.ALWAYS),
    (HandoffRole.SOURCE_HELD, HandoffCommand.CANCEL_SOURCE): Transition("cancel_source", True, Retry.ALWAYS),
    (HandoffRole.DESTINATION_PENDING, HandoffCommand.CANCEL_DESTINATION): Transition(
        "cancel_destination", True, Retry.ALWAYS
    ),
    (HandoffRole.DESTINATION_HELD, HandoffCommand.ACTIVATE_DESTINATION): Transition("activate", False, Retry.ALWAYS),
    (HandoffRole.DESTINATION_HELD, HandoffCommand.CANCEL_DESTINATION): Transition(
        "cancel_destination", True, Retry.ALWAYS
    ),
    (HandoffRole.DESTINATION_ACTIVE, HandoffCommand.CANCEL_DESTINATION): Transition(
        "cancel_destination", True, Retry.ALWAYS
    ),
    (HandoffRole.DESTINATION_ACTIVE, HandoffCommand.CANCEL_REQUEST): Transition("cancel", True, Retry.IF_ADMITTING),
}


class Outcome(NamedTuple):
    """What a command did.

    Attributes
    ----------
    applied : bool
        False: Noop.
    retired : bool
        The row is gone.
    reserved : int
        Row of a destination that the retry after the command reserved, -1: none.
    """

    applied: bool
    retired: bool
    reserved: int


_NOOP = Outcome(False, False, -1)


class RankHandoffs:
    """Handoff commands on the rows of one rank.

    Parameters
    ----------
    state : RankState
    config : EngineConfig
        Of the rank: what its transfers cost, and whether it takes destinations.
    """

    __slots__ = ("_config", "_effects", "_refuses", "_state")

    def __init__(self, state: RankState, config: EngineConfig) -> None:
        self._state = state
        self._config = config
        self._refuses = config.backend == "trtllm" and not config.rules.trtllm_destinations
        # [role][command] -> (bound verb, transition), or None.
        effects: list[list[Any]] = [[None] * len(HandoffCommand) for _ in HandoffRole]
        for (role, command), transition in TRANSITIONS.items():
            effects[role][command] = (getattr(state, transition.verb), transition)
        self._effects = effects

    def apply(self, command: HandoffCommand, slot: int, admitting: bool = True) -> Outcome:
        """Apply a command to a row.

        Parameters
        ----------
        command : HandoffCommand
        slot : int
            Row of the request, -1 if the rank has none: Noop.
        admitting : bool
            No pass of the rank or its group is in flight.
        """
        if slot < 0:
            return _NOOP
        effect = self._effects[self._state.role(slot)][command]
        if effect is None:
            return _NOOP
        verb, (_, retires, retry) = effect
        verb(slot)
        if retry is Retry.ALWAYS or (admitting and retry is Retry.IF_ADMITTING):
            return Outcome(True, retires, self._state.retry())
        return Outcome(True, retires, -1)

    def check_source(self, handoff_id: int) -> None:
        """Refuse a handoff that the rank is the source of already."""
        if self._state.find_handoff(handoff_id >> 64, handoff_id & _MASK64, False) >= 0:
            raise CommandError(f"handoff_id: {handoff_id} is already active as a source of this rank")

    def register_source(self, slot: int, handoff_id: int) -> None:
        """A request just submitted is the source of a handoff, checked before."""
        self._state.register_source(slot, handoff_id >> 64, handoff_id & _MASK64)

    def check_destination(self, handoff_id: int, num_input: int, max_output: int) -> None:
        """Refuse a destination that can never be reserved, and a handoff that has one already.

        Raises
        ------
        CommandError
        """
        if self._refuses:
            raise CommandError("destination reservation is not supported for TRT-LLM")
        if self._state.find_handoff(handoff_id >> 64, handoff_id & _MASK64, True) >= 0:
            raise CommandError(f"handoff_id: {handoff_id} is already active as a destination of this rank")
        reason, needed = self._state.reserve_error(num_input, max_output)
        if reason == FailReason.NONE:
            return
        if reason == FailReason.MODEL_LENGTH:
            limit = self._config.max_model_len
            raise CommandError(f"tokens: destination prompt of {needed} tokens reaches max_model_len {limit}")
        what = "destination prompt exceeds the"
        if self._config.backend == "trtllm":
            what = "TRT-LLM destination request exceeds the to-completion"
        raise CommandError(f"tokens: {what} KV pool capacity: needs {needed} > {self._config.num_gpu_blocks} blocks")

    def retry(self) -> int:
        """Try to reserve for the first pending destination, as at the end of a pass: its row, or -1."""
        return self._state.retry()

    def source_held(self, slot: int) -> SourceHeld:
        """The lifecycle event of a source in state SOURCE_HELD."""
        handoff, request, num_input, _ = self._state.handoff(slot)
        config = self._config
        timing = TransferTiming(
            config.kv_transfer_timing_mode,
            num_input,
            config.kv_transfer_bytes_per_token,
            # No bandwidth means no transfer model, and so does 0.
            config.kv_transfer_bandwidth or None,
        )
        return SourceHeld((handoff[0] << 64) | handoff[1], (request[0] << 64) | request[1], timing)

    def destination_reserved(self, slot: int) -> DestinationReserved:
        """The lifecycle event of a destination that was just reserved."""
        handoff, request, _, transferable = self._state.handoff(slot)
        return DestinationReserved((handoff[0] << 64) | handoff[1], (request[0] << 64) | request[1], transferable)
