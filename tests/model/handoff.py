"""The two halves of a handoff inside one rank, for the twins of both engines.

Written from spec/handoff.md and from no kernel: tables are dictionaries and
lists, and what an engine does with its KV is asked of it by small methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsim.config import EngineConfig
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
    ForwardPassMetrics,
    InternalEffects,
    KvEvent,
    Metrics,
    Noop,
    Output,
    PassCompletionEffects,
    PendingPass,
    ReleaseSource,
    Request,
    ReserveDestination,
    SourceHeld,
    Submit,
    SubmitHandoffPrefill,
    Submitted,
    TransferTiming,
    id_to_int,
)
from kvsim.errors import CommandError


@dataclass(eq=False)
class Pending:
    """A destination that owns nothing yet."""

    handoff_id: int
    request: Any
    #: capacity generation at which it was last tried
    last_attempt: int | None = None


@dataclass(eq=False)
class Reserved:
    """A destination that owns the KV of its prompt but may not compute."""

    request: Any
    #: what the engine needs to commit or to cancel it
    reservation: Any


@dataclass
class Handoffs:
    """Everything a rank knows of handoffs (sections 2 and 3). Ids are those of handoffs unless said otherwise."""

    #: id -> request id
    registered: dict[int, int] = field(default_factory=dict)
    #: id -> the completed request with its KV
    held: dict[int, Any] = field(default_factory=dict)
    #: in order of arrival
    pending: list[Pending] = field(default_factory=list)
    reserved: dict[int, Reserved] = field(default_factory=dict)
    #: id -> request id
    active: dict[int, int] = field(default_factory=dict)
    #: capacity generation: it grows whenever a pending destination may fit better than before
    generation: int = 0
    #: physical reservations tried
    attempts: int = 0

    def __bool__(self) -> bool:
        return bool(self.registered or self.held or self.pending or self.reserved or self.active)

    def forget(self, request_id: int) -> None:
        """A live request is gone: what was registered or activated for it is, too."""
        for table in (self.registered, self.active):
            for handoff_id in [key for key, value in table.items() if value == request_id]:
                del table[handoff_id]

    def source_of(self, request_id: int) -> int | None:
        """The handoff a live request is the source of."""
        return next((key for key, value in self.registered.items() if value == request_id), None)

    def request_of_source(self, handoff_id: int) -> int | None:
        if handoff_id in self.held:
            request_id: int = self.held[handoff_id].request_id
            return request_id
        return self.registered.get(handoff_id)

    def request_of_destination(self, handoff_id: int) -> int | None:
        found = [entry.request.request_id for entry in self.pending if entry.handoff_id == handoff_id]
        if handoff_id in self.reserved:
            found.append(self.reserved[handoff_id].request.request_id)
        return found[0] if found else self.active.get(handoff_id)

    def is_active(self, request_id: int) -> bool:
        """Whether a live request came in as a destination."""
        return request_id in self.active.values()

    def parked(self) -> list[int]:
        """Ids of the requests that are in no queue but owned all the same."""
        parked = [*self.held.values(), *(entry.request for entry in (*self.pending, *self.reserved.values()))]
        return [request.request_id for request in parked]

    def waiting_lengths(self) -> list[int]:
        """Prompt lengths of the destinations that count as waiting without being in a queue."""
        return [entry.request.num_input for entry in (*self.pending, *self.reserved.values())]

    def state(self) -> dict[str, Any]:
        """For comparison, all by request id."""
        return {
            "registered": sorted(self.registered.items()),
            "held": sorted((key, request.request_id) for key, request in self.held.items()),
            "pending": [(entry.handoff_id, entry.request.request_id) for entry in self.pending],
            "head_waits_for_capacity": bool(self.pending) and self.pending[0].last_attempt == self.generation,
            "reserved": sorted((key, entry.request.request_id) for key, entry in self.reserved.items()),
            "active": sorted(self.active.items()),
            "attempts": self.attempts,
        }

    def check(self, live: set[int]) -> None:
        """Section 7, 1 and 2."""
        for table in (self.registered, self.active):
            assert len(set(table.values())) == len(table)
            assert set(table.values()) <= live
        assert set(self.registered).isdisjoint(self.held)
        destinations = [*(entry.handoff_id for entry in self.pending), *self.reserved, *self.active]
        assert len(set(destinations)) == len(destinations)
        parked = self.parked()
        assert len(set(parked)) == len(parked)
        assert live.isdisjoint(parked)
        # Only the head is ever tried.
        assert all(entry.last_attempt is None for entry in self.pending[1:])
        assert all(entry.last_attempt is None or entry.last_attempt <= self.generation for entry in self.pending)


class HandoffRank:
    """Commands and pass boundaries of a rank; an engine is what its subclass says."""

    config: EngineConfig
    handoffs: Handoffs
    #: live requests by id: those in queues or running
    requests: dict[int, Any]
    last_pass_effect_free: bool

    # ------------------------------------------------------------ what an engine does

    def _build(self, request: Request) -> Any:
        """The request as it will be queued; an error leaves no trace."""
        raise NotImplementedError

    def _check_destination(self, request: Any) -> None:
        """Refuse a destination that can never be reserved."""
        raise NotImplementedError

    def _enqueue(self, request: Any) -> None:
        """A new request waits."""
        raise NotImplementedError

    def _drop(self, request: Any) -> bool:
        """A live request leaves without finishing; whether capacity may have improved."""
        raise NotImplementedError

    def _clean_up_source(self, request: Any) -> None:
        """The transfer of a held source is over: the KV of a completed request is let go."""
        raise NotImplementedError

    def _has_slot_for_destination(self) -> bool:
        """Whether a reservation may be tried at all now."""
        return True

    def _reserve_destination(self, request: Any) -> tuple[Any, int] | None:
        """Own the KV of a prompt: (reservation, tokens to transfer), None if there is no room."""
        raise NotImplementedError

    def _activate(self, request: Any, reservation: Any) -> bool:
        """The KV has arrived: the request waits to run; whether capacity may have improved."""
        raise NotImplementedError

    def _cancel_reservation(self, request: Any, reservation: Any) -> None:
        """Give the KV of a prompt back."""
        raise NotImplementedError

    def _watch(self) -> Any:
        """Something that `_shown` compares with to know whether events were made since."""
        return None

    def _shown(self, mark: Any, *, show: bool) -> list[KvEvent]:
        """KV events of a command or a boundary; none while a pass is in flight."""
        raise NotImplementedError

    def _completion_metrics(self) -> Metrics:
        """Metrics at the end of a pass."""
        return self.metrics()

    def metrics(self) -> Metrics:
        raise NotImplementedError

    # ------------------------------------------------------------ commands

    def apply_command(
        self, command: Command, context: CommandContext, pending: PendingPass | None = None
    ) -> CommandEffects:
        target, discard = self._suppression_target(command)
        mark = self._watch()
        result, retired, retries = self._apply(command)
        lifecycle: list[SourceHeld | DestinationReserved] = []
        if retries == "always" or (retries == "if allowed" and context.allow_immediate_admission):
            lifecycle += self.retry_pending_destinations()
        events = self._shown(mark, show=not context.pass_in_flight)
        suppressed = False
        if target is not None and pending is not None and (discard or not isinstance(result, Noop)):
            suppressed = withdraw(pending, target)
        if not isinstance(result, Noop):
            self.last_pass_effect_free = False
        return CommandEffects(
            result=result,
            lifecycle_events=lifecycle,
            kv_events=events,
            retired_requests=retired,
            metrics=self.metrics(),
            suppressed_pending_output=suppressed,
        )

    def _suppression_target(self, command: Command) -> tuple[int | None, bool]:
        """(request whose pending outputs the command withdraws, even if the command is a Noop).

        Section 6 keeps a map for it, which knows no more than the tables do.
        """
        if isinstance(command, CancelRequest):
            return id_to_int(command.request_id), command.discard_pending_output
        if isinstance(command, CancelSource):
            return self.handoffs.request_of_source(handoff_id_of(command)), False
        if isinstance(command, CancelDestination):
            return self.handoffs.request_of_destination(handoff_id_of(command)), False
        return None, False

    def _apply(self, command: Command) -> tuple[Any, tuple[int, ...], str]:
        """(result, retired requests, when pending destinations are retried)."""
        if isinstance(command, Submit):
            return self._submit(command.request), (), "never"
        if isinstance(command, CancelRequest):
            return self._cancel_request(id_to_int(command.request_id))
        if isinstance(command, SubmitHandoffPrefill):
            return self._register_source(handoff_id_of(command), command.request), (), "never"
        if isinstance(command, ReserveDestination):
            return self._accept_destination(handoff_id_of(command), command.request), (), "if allowed"
        if isinstance(command, ReleaseSource):
            return self._release_source(handoff_id_of(command))
        if isinstance(command, CancelSource):
            return self._cancel_source(handoff_id_of(command))
        if isinstance(command, ActivateDestination):
            return self._activate_destination(handoff_id_of(command))
        assert isinstance(command, CancelDestination)
        return self._cancel_destination(handoff_id_of(command))

    def _refuse_active(self, request: Request) -> None:
        request_id = id_to_int(request.request_id)
        if request_id in self.requests or request_id in self.handoffs.parked():
            raise CommandError(f"request {request_id} is already active")

    def _submit(self, request: Request) -> Submitted:
        self._refuse_active(request)
        built = self._build(request)
        self._enqueue(built)
        return Submitted(built.request_id)

    def _cancel_request(self, request_id: int) -> tuple[Any, tuple[int, ...], str]:
        if request_id not in self.requests:
            return Noop(), (), "never"
        self.handoffs.generation += self._drop(self.requests[request_id])
        return Applied(), (request_id,), "if allowed"

    # ------------------------------------------------------------ source half (section 2)

    def _register_source(self, handoff_id: int, request: Request) -> Submitted:
        self._refuse_active(request)
        if handoff_id in self.handoffs.registered or handoff_id in self.handoffs.held:
            raise CommandError(f"handoff {handoff_id} is already active as a source")
        submitted = self._submit(request)
        self.handoffs.registered[handoff_id] = submitted.request_id
        return submitted

    def _release_source(self, handoff_id: int) -> tuple[Any, tuple[int, ...], str]:
        if handoff_id in self.handoffs.registered:
            del self.handoffs.registered[handoff_id]
            return Applied(), (), "always"
        return self._let_go_of_source(handoff_id)

    def _cancel_source(self, handoff_id: int) -> tuple[Any, tuple[int, ...], str]:
        if handoff_id in self.handoffs.registered:
            request_id = self.handoffs.registered[handoff_id]
            self.handoffs.generation += self._drop(self.requests[request_id])
            return Applied(), (request_id,), "always"
        return self._let_go_of_source(handoff_id)

    def _let_go_of_source(self, handoff_id: int) -> tuple[Any, tuple[int, ...], str]:
        if handoff_id not in self.handoffs.held:
            return Noop(), (), "never"
        request = self.handoffs.held.pop(handoff_id)
        self._clean_up_source(request)
        self.handoffs.generation += 1
        return Applied(), (request.request_id,), "always"

    def _hold_source(self, request: Any) -> SourceHeld | None:
        """A request completed: keep it with its KV if it is the source of a handoff, else None."""
        handoff_id = self.handoffs.source_of(request.request_id)
        if handoff_id is None:
            return None
        del self.handoffs.registered[handoff_id]
        self.handoffs.held[handoff_id] = request
        timing = TransferTiming(
            self.config.kv_transfer_timing_mode,
            request.num_input,
            self.config.kv_transfer_bytes_per_token,
            # A bandwidth of 0 is no transfer model.
            self.config.kv_transfer_bandwidth or None,
        )
        return SourceHeld(handoff_id, request.request_id, timing)

    # ------------------------------------------------------------ destination half (section 3)

    def _accept_destination(self, handoff_id: int, request: Request) -> DestinationAccepted:
        self._refuse_active(request)
        handoffs = self.handoffs
        if any(entry.handoff_id == handoff_id for entry in handoffs.pending):
            raise CommandError(f"handoff {handoff_id} is already pending as a destination")
        if handoff_id in handoffs.reserved or handoff_id in handoffs.active:
            raise CommandError(f"handoff {handoff_id} is already active as a destination")
        built = self._build(request)
        self._check_destination(built)
        handoffs.pending.append(Pending(handoff_id, built))
        return DestinationAccepted(built.request_id)

    def retry_pending_destinations(self) -> list[SourceHeld | DestinationReserved]:
        """Try the head if it may fit now; what came of it."""
        handoffs = self.handoffs
        if not handoffs.pending:
            return []
        head = handoffs.pending[0]
        if not self._has_slot_for_destination():
            head.last_attempt = handoffs.generation
            return []
        if head.last_attempt == handoffs.generation:
            return []
        handoffs.attempts += 1
        head.last_attempt = handoffs.generation
        outcome = self._reserve_destination(head.request)
        if outcome is None:
            return []
        reservation, transferable = outcome
        handoffs.pending.pop(0)
        handoffs.reserved[head.handoff_id] = Reserved(head.request, reservation)
        self.last_pass_effect_free = False
        return [DestinationReserved(head.handoff_id, head.request.request_id, transferable)]

    def _activate_destination(self, handoff_id: int) -> tuple[Any, tuple[int, ...], str]:
        if handoff_id not in self.handoffs.reserved:
            return Noop(), (), "never"
        entry = self.handoffs.reserved.pop(handoff_id)
        self.requests[entry.request.request_id] = entry.request
        self.handoffs.active[handoff_id] = entry.request.request_id
        self.handoffs.generation += self._activate(entry.request, entry.reservation)
        return Applied(), (), "always"

    def _cancel_destination(self, handoff_id: int) -> tuple[Any, tuple[int, ...], str]:
        handoffs = self.handoffs
        for entry in handoffs.pending:
            if entry.handoff_id == handoff_id:
                handoffs.pending.remove(entry)
                handoffs.generation += 1
                return Applied(), (entry.request.request_id,), "always"
        if handoff_id in handoffs.reserved:
            held = handoffs.reserved.pop(handoff_id)
            self._cancel_reservation(held.request, held.reservation)
            handoffs.generation += 1
            return Applied(), (held.request.request_id,), "always"
        if handoff_id in handoffs.active:
            request_id = handoffs.active[handoff_id]
            handoffs.generation += self._drop(self.requests[request_id])
            return Applied(), (request_id,), "always"
        return Noop(), (), "never"

    # ------------------------------------------------------------ boundaries (section 6)

    def complete_pass(self, pending: PendingPass, end_ms: float) -> PassCompletionEffects:
        assert not pending.completed
        pending.completed = True
        effects = pending.effects
        mark = self._watch()
        effects.lifecycle_events = [*effects.lifecycle_events, *self.retry_pending_destinations()]
        effects.kv_events = [*effects.kv_events, *self._shown(mark, show=True)]
        effects.metrics = self._completion_metrics()
        duration = max(0.0, end_ms - pending.started_at_ms)
        effects.forward_pass_metrics = effects.forward_pass_metrics._replace(duration_ms=duration)
        return effects

    def complete_idle_group_pass(self, start_ms: float, end_ms: float) -> PassCompletionEffects:
        mark = self._watch()
        lifecycle = self.retry_pending_destinations()
        idle = ForwardPassMetrics(0, 0, 0.0, 0, 0, 0, 0.0, 0, 0, 0.0, 0, 0, 0.0, max(0.0, end_ms - start_ms))
        return PassCompletionEffects([], lifecycle, self._shown(mark, show=True), self.metrics(), idle)

    def next_internal_deadline_ms(self) -> float | None:
        return None

    def process_internal_work(self, now_ms: float, pass_in_flight: bool = False) -> InternalEffects:
        return InternalEffects([], self._shown(self._watch(), show=not pass_in_flight))

    # ------------------------------------------------------------ predicates (section 5)

    def is_empty(self) -> bool:
        return not self.requests

    def is_drained(self) -> bool:
        return self.is_empty() and not self.handoffs

    def is_ready(self) -> bool:
        return not self.is_empty()

    def waiting_for_external_command(self) -> bool:
        return self.is_empty() and bool(self.handoffs)


def handoff_id_of(command: Any) -> int:
    return id_to_int(command.handoff_id, "handoff_id")


def withdraw(pending: PendingPass, request_id: int) -> bool:
    """Take what concerns a request out of a pass in flight; whether an output was among it."""
    effects = pending.effects
    kept: Sequence[Output] = [output for output in effects.outputs if output.request_id != request_id]
    suppressed = len(kept) != len(effects.outputs)
    effects.outputs = kept
    # The sample counts what is visible.
    visible = [output.request_id for output in kept if not output.rejected]
    effects.decode_acceptance = (len(visible), len(set(visible)))
    effects.lifecycle_events = [event for event in effects.lifecycle_events if event.request_id != request_id]
    return suppressed
