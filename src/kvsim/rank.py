"""One scheduler rank behind the neutral contract (spec/engine-contract.md sections 4 and 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kvsim import layout
from kvsim._core import content as _content
from kvsim._core.state import RankState
from kvsim.config import TIER_BANDWIDTHS, EngineConfig
from kvsim.contract import (
    ActivateDestination,
    Admission,
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
    HostOffloadObserver,
    InternalEffects,
    KvEvent,
    Metrics,
    Noop,
    Output,
    PassCompletionEffects,
    PassStartEffects,
    PendingPass,
    PressureEvent,
    PressureState,
    RankIdentity,
    RankPass,
    ReleaseSource,
    Removed,
    Request,
    RequestId,
    ReserveDestination,
    Rows,
    SameTimestampRetry,
    SourceHeld,
    Stored,
    StoredBlock,
    Submit,
    SubmitHandoffPrefill,
    Submitted,
    id_to_int,
)
from kvsim.errors import CommandError, ConfigError, PoisonedError, SnapshotError
from kvsim.handoff import HandoffCommand, RankHandoffs
from kvsim.integrity import check_rank
from kvsim.layout import FailReason, HandoffRole
from kvsim.offload.observer import tell
from kvsim.policies import Policy, get_policy
from kvsim.policies.base import Directive
from kvsim.timing import TimingParameters, resolve_timing

__all__ = ["RankSnapshot", "SchedulerRank", "StuckHead"]

_MASK64 = (1 << 64) - 1
#: Room that is made before requests come, at most.
_MOST_EXPECTED = 512
_MAX_TOKENS = 2**31 - 1
_UNLIMITED = 2**62
#: One decimal GB/s.
_BYTES_PER_MS = 1e6
#: Leading tokens that tell two waiting prompts apart (spec/sglang.md section 6.3).
_HEAD_TOKENS = 32

_HAS_TOKEN, _COMPLETED, _REJECTED, _FAILED, _HAS_CACHED, _HELD = 1, 2, 4, 8, 16, 32
_STORED = 0
_HAS_PARENT = 1
_TIERS = ("device", "host_pinned")
_WORKER = {"aggregated": 0, "prefill": 1, "decode": 2}
#: Commands on one half of a handoff, and whether that is the destination.
_HALVES: dict[type, tuple[HandoffCommand, bool]] = {
    ReleaseSource: (HandoffCommand.RELEASE_SOURCE, False),
    CancelSource: (HandoffCommand.CANCEL_SOURCE, False),
    ActivateDestination: (HandoffCommand.ACTIVATE_DESTINATION, True),
    CancelDestination: (HandoffCommand.CANCEL_DESTINATION, True),
}
#: Those that withdraw what a pass in flight has of the request.
_WITHDRAWS = (HandoffCommand.CANCEL_SOURCE, HandoffCommand.CANCEL_DESTINATION)
_RETRY_HINTS = {
    None: SameTimestampRetry.NOT_APPLICABLE,
    0: SameTimestampRetry.EXHAUSTED,
    1: SameTimestampRetry.RETRY,
    2: SameTimestampRetry.COUNTDOWN,
}
_EMPTY_EVENTS: tuple[KvEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class StuckHead:
    """The queue head of an idle rank that can never progress.

    Attributes
    ----------
    request_id : int
    reason : FailReason
    needed : int
        Blocks or tokens that are too many, by `reason`.
    """

    request_id: int
    reason: FailReason
    needed: int

    def describe(self, config: EngineConfig) -> str:
        """One clause for a report: what was needed and what there is."""
        return describe_reason(self.reason, self.needed, config)


def describe_reason(reason: int, needed: int, config: EngineConfig) -> str:
    """Why a request was rejected or failed, in one clause; empty for NONE."""
    if reason == FailReason.MODEL_LENGTH:
        return f"prompt of {needed} tokens reaches max_model_len {config.max_model_len}"
    if reason == FailReason.POOL_TOO_SMALL:
        return f"needs {needed} > {config.num_gpu_blocks} blocks"
    if reason == FailReason.OUTGREW_POOL:
        return f"outgrew the pool: {needed} > {config.num_gpu_blocks} blocks"
    if reason == FailReason.BUDGET_TOO_SMALL and config.backend == "sglang":
        return f"a chunk of {needed} tokens exceeds sglang.max_prefill_tokens {config.sglang.max_prefill_tokens}"
    if reason == FailReason.BUDGET_TOO_SMALL:
        return (
            f"prompt of {needed} tokens exceeds max_num_batched_tokens {config.max_num_batched_tokens} "
            "with chunked prefill off"
        )
    if reason == FailReason.NOT_ADMITTED:
        return "the policy never lets it run"
    if reason == FailReason.NO_WORKER:
        return "no worker was active to take it"
    if reason == FailReason.STALLED:
        return "waited for something that could not happen any more"
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class RankSnapshot:
    """A saved rank: plain data, fit for pickling.

    Attributes
    ----------
    identity : RankIdentity
    arena : ndarray of uint8
    sizes : dict of str to int
        Rows of each section of the arena.
    contents : list
        Request content by row.
    block_tokens : list of tuple of int
        Token ids of the blocks in the event buffer, if events carry them.
    """

    identity: RankIdentity
    arena: npt.NDArray[np.uint8]
    sizes: dict[str, int]
    contents: list[Any]
    block_tokens: list[tuple[int, ...]]


class _Tokens:
    """Token ids of a live request, spelled out when a KV event asks for them."""

    __slots__ = ("_all", "outputs", "parts", "request_id")

    def __init__(self, request_id: int, parts: list[npt.NDArray[Any]], outputs: Any) -> None:
        self.request_id = request_id
        self.parts = parts
        self.outputs = outputs
        self._all: npt.NDArray[np.uint32] | None = None

    def block(self, index: int, block_size: int) -> tuple[int, ...]:
        start, end = index * block_size, (index + 1) * block_size
        if self._all is None:
            self._all = _content.expand_parts(self.parts)
        prompt = self._all
        tokens = prompt[start:end].tolist()
        if end > len(prompt):
            first, last = max(0, start - len(prompt)), end - len(prompt)
            if self.outputs is None:
                made = _content.synthetic_tokens(self.request_id >> 64, self.request_id & _MASK64, last)
            else:
                made = self.outputs
            tokens += made[first:last].tolist()
        return tuple(tokens)


class KvEvents(Sequence[KvEvent]):
    """KV events as struct arrays that read as a sequence of `KvEvent`.

    Attributes
    ----------
    events : ndarray of layout.EVENT
    blocks : ndarray of layout.EVENT_BLOCK
    """

    __slots__ = ("_dp_rank", "_tokens", "_worker_id", "blocks", "events")

    def __init__(
        self,
        events: npt.NDArray[Any],
        blocks: npt.NDArray[Any],
        identity: RankIdentity,
        tokens: list[tuple[int, ...]] | None,
    ) -> None:
        self.events = events
        self.blocks = blocks
        self._worker_id = identity.worker_id
        self._dp_rank = identity.dp_rank
        self._tokens = tokens

    @property
    def token_ids(self) -> list[tuple[int, ...]] | None:
        """Token ids of each row of `blocks`, if the configuration has `emit_kv_token_ids`."""
        return self._tokens

    def __len__(self) -> int:
        return len(self.events)

    @overload
    def __getitem__(self, index: int) -> KvEvent: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[KvEvent]: ...
    def __getitem__(self, index: int | slice) -> KvEvent | Sequence[KvEvent]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        event = self.events[index]
        first = int(event["first"])
        rows = self.blocks[first : first + int(event["count"])]
        data: Stored | Removed
        if event["kind"] == _STORED:
            data = Stored(
                int(event["parent_hash"]) if event["flags"] & _HAS_PARENT else None,
                tuple(
                    StoredBlock(
                        int(row["block_hash"]),
                        int(row["tokens_hash"]),
                        # A store may end long after the request whose tokens they are.
                        None if self._tokens is None or event["tier"] else self._tokens[first + i],
                    )
                    for i, row in enumerate(rows)
                ),
                int(event["start"]) if event["start"] >= 0 else None,
            )
        else:
            data = Removed(tuple(rows["block_hash"].tolist()))
        tier = _TIERS[int(event["tier"])]
        return KvEvent(int(event["event_id"]), self._worker_id, self._dp_rank, data, tier)

    def __iter__(self) -> Iterator[KvEvent]:
        return (self[i] for i in range(len(self)))

    def selected(self, mask: npt.NDArray[np.bool_]) -> KvEvents:
        """Those events for which `mask` holds; the blocks are shared."""
        other = KvEvents.__new__(KvEvents)
        other.events, other.blocks, other._tokens = self.events[mask], self.blocks, self._tokens
        other._worker_id, other._dp_rank = self._worker_id, self._dp_rank
        return other

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"KvEvents({list(self)!r})"


def _id_of(row: Any) -> int:
    return (int(row["id_hi"]) << 64) | int(row["id_lo"])


def _admission(row: Any) -> Admission:
    return Admission(_id_of(row), int(row["reused"]))


def _tiered_admission(row: Any) -> Admission:
    reused, device = int(row["reused"]), int(row["device"])
    return Admission(_id_of(row), reused, None if device < 0 else (device, reused - device))


def _output_builder(config: EngineConfig) -> Callable[[Any], Output]:
    """Function that makes an `Output` of a SIGNAL row."""
    rate: float | None = None
    if (
        config.worker_type == "prefill"
        and config.kv_transfer_bytes_per_token is not None
        and config.kv_transfer_bandwidth
    ):
        rate = config.kv_transfer_bandwidth * 1e9
    per_token = config.kv_transfer_bytes_per_token

    def build(row: Any) -> Output:
        flags = int(row["flags"])
        delay = None
        if rate is not None and per_token is not None and flags & _COMPLETED and not flags & (_REJECTED | _FAILED):
            delay = int(row["num_input"]) * per_token / rate * 1000.0
        return Output(
            _id_of(row),
            int(row["token"]) if flags & _HAS_TOKEN else None,
            bool(flags & _COMPLETED),
            bool(flags & _REJECTED),
            int(row["cached"]) if flags & _HAS_CACHED else None,
            delay,
            bool(flags & _FAILED),
        )

    return build


def _config_row(
    config: EngineConfig, directive: Directive, timing: TimingParameters, policy: Policy
) -> npt.NDArray[Any]:
    """The constants of a rank as one row of layout.CONFIG."""
    row = np.zeros(1, layout.CONFIG)
    limit = config.max_model_len if directive.limit_model_len else None
    rates = config.accept_rates
    values: dict[str, Any] = {
        "num_blocks": config.num_gpu_blocks,
        "block_size": config.tokens_per_block,
        "max_model_len": limit or 0,
        "max_running": config.max_num_seqs or _UNLIMITED,
        "budget": config.max_num_batched_tokens or _UNLIMITED,
        "total_kv_tokens": config.num_gpu_blocks * config.tokens_per_block,
        "nextn": config.aic_nextn or 0,
        "speedup": config.speedup_ratio,
        "decode_speedup": config.decode_speedup_ratio,
        "prefill_ms": timing.prefill_ms,
        "decode_ms": timing.decode_ms,
        "caching": config.enable_prefix_caching,
        "chunked": config.enable_chunked_prefill,
        "gate": directive.reserve_to_completion,
        "may_preempt": directive.may_preempt,
        "victim": 2 if policy.overrides("victims") else int(directive.oldest_victim),
        "order": policy.overrides("score"),
        "worker": _WORKER[config.worker_type],
        "keeps_place": config.rules.activation_keeps_arrival_order,
        "legacy": config.backend == "sglang" and config.rules.mixed_radix_passes,
        "timing": timing.kind,
        "recompute_last": directive.recompute_last_token,
        "eager_samples": config.rules.eager_sample_blocks,
        "first_token_is_decode": directive.first_token_is_decode,
        "decode_from_blocks": config.rules.decode_time_from_blocks,
        "floor_every_decode": config.rules.floor_decode_of_every_model,
        "always_draft": directive.always_draft,
        "emit_events": config.emit_kv_events and config.enable_prefix_caching,
        "ask_admission": policy.overrides("admit"),
        "ask_order": policy.overrides("order"),
        "engine": config.backend == "sglang",
        "lpm": directive.longest_prefix_first,
        "max_prefill": config.sglang.max_prefill_tokens,
        "chunk": config.sglang.chunked_prefill_size,
        "clip": config.sglang.clip_max_new_tokens,
        "prefill_interval": config.prefill_decode_interval,
        "init_ratio": directive.init_new_token_ratio,
        "min_ratio": directive.min_new_token_ratio,
        "ratio_decay": directive.new_token_ratio_decay,
        "giveback": directive.giveback_blocks,
        "keep_locals": config.emit_kv_events,
    }
    offload = config.native_host_offload
    if offload is not None:
        values |= {
            "host": True,
            # More rows than a table can have are never needed.
            "host_blocks": min(offload.num_host_blocks, _MAX_TOKENS),
            "block_bytes": config.tokens_per_block * (config.kv_cache_bytes_per_token or 0),
            "store_rate": offload.d2h_bandwidth_gbps * _BYTES_PER_MS,
            "load_rate": offload.h2d_bandwidth_gbps * _BYTES_PER_MS,
        }
    tiers = config.tiers_attached
    if tiers is not None:
        values |= {
            "tiers": True,
            "tier_blocks": (
                min(tiers.num_g2_blocks, _MAX_TOKENS),
                min(tiers.num_g3_blocks, _MAX_TOKENS),
                _UNLIMITED if tiers.g4_storage else 0,
            ),
            "offload_batch": tiers.offload_batch_size,
            "block_bytes": config.tokens_per_block * (config.kv_cache_bytes_per_token or 0),
            "link_rates": tuple(max(0.0, getattr(tiers, name)) * _BYTES_PER_MS for name in TIER_BANDWIDTHS),
        }
    values["offload"] = offload is not None or tiers is not None
    for name, value in values.items():
        row[name] = value
    row["accept_rates"][0, : len(rates)] = rates
    return row


class SchedulerRank:
    """A simulated scheduler with its KV cache: one rank of one engine.

    Parameters
    ----------
    identity : RankIdentity
    config : EngineConfig
    timing : TimingModel, or a profile of `kvsim.timing.load_profile`, optional
        In place of the configuration's timing model.
    observer : HostOffloadObserver, optional
        Hooks around the transfers of `native_host_offload`.
    policy : Policy or str, optional
        Scheduling policy; the backend's own if omitted.
    expected_requests : int
        Live requests for which there is room from the start; more find room when they come, at the cost of a copy.

    Raises
    ------
    ConfigError
        The configuration cannot be simulated; names the field.

    Notes
    -----
    A pass is committed when it executes; what it shows at its end is kept back
    in a `PendingPass` until `complete_pass`. All state lies in one array, so
    `fork`, `snapshot` and `digest` cost a copy or a hash of it.
    """

    __slots__ = (
        "_block_tokens",
        "_build_output",
        "_handoffs",
        "_host",
        "_offload",
        "_params",
        "_poison",
        "_policy",
        "_radix",
        "_seed",
        "_state",
        "_tiers",
        "_token_ids",
        "config",
        "identity",
        "observer",
    )

    def __init__(
        self,
        identity: RankIdentity,
        config: EngineConfig,
        *,
        timing: Any = None,
        observer: HostOffloadObserver | None = None,
        policy: Policy | str | None = None,
        expected_requests: int = 64,
    ) -> None:
        self._host = config.native_host_offload is not None
        self._tiers = config.tiers_attached is not None
        self._offload = self._host or self._tiers
        if self._host and identity.dp_size != 1:
            raise ConfigError("native_host_offload", f"needs dp_size 1, got {identity.dp_size}")
        self.identity = identity
        self.config = config
        self.observer = observer
        if policy is None or isinstance(policy, str):
            policy = get_policy(policy or config.backend)
        elif not isinstance(policy, Policy):
            raise ConfigError("policy", f"expected a Policy or its name, got {policy!r}")
        self._policy = policy
        self._params = resolve_timing(config, timing)
        self._seed = (config.aic_mtp_seed + identity.seed_offset) & _MASK64
        self._state = RankState(
            _config_row(config, policy.directive(config), self._params, policy),
            self._seed,
            policy,
            self._params.model,
            self._params.profile,
            min(expected_requests, _MOST_EXPECTED),
        )
        self._state.observed = self._host and observer is not None
        self._handoffs = RankHandoffs(self._state, config)
        self._build_output = _output_builder(config)
        self._token_ids = config.emit_kv_token_ids
        self._block_tokens: list[tuple[int, ...]] = []
        self._radix = config.backend == "sglang"
        self._poison: BaseException | None = None

    # ------------------------------------------------------------ commands

    def apply_command(
        self, command: Command, context: CommandContext, pending: PendingPass | None = None
    ) -> CommandEffects:
        """Apply one command.

        Parameters
        ----------
        command : Command
        context : CommandContext
            When; and whether a pass of the group is in flight.
        pending : PendingPass, optional
            The pass of this rank in flight: a cancellation withdraws its outputs.

        Returns
        -------
        CommandEffects

        Raises
        ------
        CommandError
            The command is invalid; the rank is unchanged, byte for byte.
        """
        self._check_alive()
        if not math.isfinite(context.now_ms) or context.now_ms < 0:
            raise CommandError(f"now_ms: must be finite and >= 0, got {context.now_ms}")
        admitting = context.allow_immediate_admission
        if self._offload:
            self._state.at(context.now_ms)
        if isinstance(command, Submit):
            effects = CommandEffects(self._submit(command.request))
        elif isinstance(command, SubmitHandoffPrefill):
            effects = CommandEffects(self._submit(command.request, id_to_int(command.handoff_id, "handoff_id")))
        elif isinstance(command, ReserveDestination):
            effects = self._reserve(command, admitting)
        elif isinstance(command, CancelRequest):
            number = id_to_int(command.request_id)
            slot = self._state.find(number >> 64, number & _MASK64)
            effects = self._apply(HandoffCommand.CANCEL_REQUEST, slot, number, admitting)
            self._suppress(effects, pending, number, command.discard_pending_output)
        elif type(command) in _HALVES:
            kind, destination = _HALVES[type(command)]
            handoff_id = id_to_int(command.handoff_id, "handoff_id")
            slot = self._state.find_handoff(handoff_id >> 64, handoff_id & _MASK64, destination)
            number = 0
            if slot >= 0:
                _, (high, low), _, _ = self._state.handoff(slot)
                number = high << 64 | low
            effects = self._apply(kind, slot, number, admitting)
            if kind in _WITHDRAWS:
                self._suppress(effects, pending, number, False)
        else:
            raise CommandError(f"command: expected a Command, got {type(command).__name__} {command!r}")
        if not context.pass_in_flight:
            effects.kv_events = self._drain_events()
        effects.metrics = self.metrics()
        self._tell_observer()
        return effects

    def _new_content(self, request: Request) -> tuple[int, int, int, Any]:
        """(request id, prompt length, output length, content) of a request that is about to enter."""
        request_id = id_to_int(request.request_id)
        if self._state.find(request_id >> 64, request_id & _MASK64) >= 0:
            raise CommandError(f"request_id: {request_id} is already active")
        parts, num_input = _prompt_parts(request)
        outputs, max_output = _output_plan(request, num_input)
        return request_id, num_input, max_output, (parts, outputs)

    def _content(self, request_id: int, max_output: int, parts: Any, outputs: Any) -> Any:
        keep = _Tokens(request_id, parts, outputs) if self._token_ids else None
        return request_content(self.config, parts, outputs, request_id, max_output, keep)

    def _submit(self, request: Request, handoff_id: int | None = None) -> Submitted:
        """Queue a request; with a handoff it is held as a source when it completes."""
        request_id, num_input, max_output, tokens = self._new_content(request)
        if handoff_id is not None:
            self._handoffs.check_source(handoff_id)
        content = self._content(request_id, max_output, *tokens)
        slot = self._state.submit(request_id >> 64, request_id & _MASK64, num_input, max_output, content)
        if handoff_id is not None:
            self._handoffs.register_source(slot, handoff_id)
        self._raise_left_error()
        return Submitted(request_id)

    def _reserve(self, command: ReserveDestination, admitting: bool) -> CommandEffects:
        """Queue a destination; the first of the queue is tried at once unless a pass is in flight."""
        request_id, num_input, max_output, tokens = self._new_content(command.request)
        handoff_id = id_to_int(command.handoff_id, "handoff_id")
        self._handoffs.check_destination(handoff_id, num_input, max_output)
        content = self._content(request_id, max_output, *tokens)
        self._state.reserve(
            request_id >> 64,
            request_id & _MASK64,
            num_input,
            max_output,
            content,
            handoff_id >> 64,
            handoff_id & _MASK64,
        )
        return CommandEffects(DestinationAccepted(request_id), self._retry() if admitting else [])

    def _apply(self, kind: HandoffCommand, slot: int, request_id: int, admitting: bool) -> CommandEffects:
        """A command on a request that is here, or is not (slot -1)."""
        applied, retired, reserved = self._handoffs.apply(kind, slot, admitting)
        self._raise_left_error()
        if self._token_ids and kind is HandoffCommand.ACTIVATE_DESTINATION:
            # The request may be cancelled before its events are shown.
            self._spell_blocks()
        return CommandEffects(
            Applied() if applied else Noop(),
            [self._handoffs.destination_reserved(reserved)] if reserved >= 0 else [],
            retired_requests=(request_id,) if retired else (),
        )

    def _retry(self) -> list[SourceHeld | DestinationReserved]:
        """Try to reserve for the first pending destination; its lifecycle event."""
        reserved = self._handoffs.retry()
        return [self._handoffs.destination_reserved(reserved)] if reserved >= 0 else []

    def _suppress(self, effects: CommandEffects, pending: PendingPass | None, request_id: int, discard: bool) -> None:
        """Withdraw what a pass in flight has of a request that a command dropped."""
        if pending is not None and (discard or isinstance(effects.result, Applied)):
            effects.suppressed_pending_output = _withdraw(pending.effects, request_id)

    # ------------------------------------------------------------ the pass

    def execute_pass(self, now_ms: float) -> RankPass:
        """Run one scheduling pass that starts at `now_ms`.

        Returns
        -------
        RankPass
            ``end_ms == now_ms`` for a pass that models no work. Admissions and
            pressure events are visible now; the rest is kept in ``pending``.

        Raises
        ------
        TimingError
            A callable timing model failed or returned nonsense. The rank is poisoned.
        PoisonedError
            An earlier pass failed.
        CommandError
            A transfer that ended earlier was not processed yet; nothing has changed.
        """
        self._check_alive()
        if not math.isfinite(now_ms) or now_ms < 0:
            raise CommandError(f"now_ms: must be finite and >= 0, got {now_ms}")
        state = self._state
        if self._host and state.deadline() < now_ms:
            raise CommandError(
                f"now_ms: a transfer ended at {state.deadline()}, call process_internal_work first, got {now_ms}"
            )
        try:
            end_ms = state.execute(now_ms)
        except BaseException as error:
            self._poison = error
            raise
        admissions: Sequence[Admission] = ()
        if state.num_admissions:
            admissions = Rows(state.admissions(), _tiered_admission if self._offload else _admission)
        pressures: Sequence[PressureEvent] = ()
        if state.num_pressures:
            pressures = Rows(state.pressures(), self._pressure_builder(now_ms))
        outputs: Sequence[Output] = ()
        held: Sequence[int] = ()
        events = self._drain_events()
        if state.num_signals:
            rows = state.signals()
            outputs = Rows(rows, self._build_output)
            if state.completed:
                state.release_contents(rows["slot"][(rows["flags"] & _COMPLETED) != 0])
                held = rows["slot"][(rows["flags"] & _HELD) != 0]
        start = PassStartEffects(admissions, pressures)
        if events and self.config.rules.kv_events_at_pass_start and not self._radix:
            start.kv_events, events = events, _EMPTY_EVENTS
        metrics = self.metrics()
        if self._radix:
            hit, total = state.cache_counters()
            metrics = metrics._replace(sglang_cache_hit_tokens=hit, sglang_cache_total_tokens=total)
        effects = PassCompletionEffects(
            outputs,
            [self._handoffs.source_held(int(slot)) for slot in held],
            events,
            metrics,
            ForwardPassMetrics(*state.fpm(), end_ms - now_ms),
            state.acceptance,
        )
        self._tell_observer()
        return RankPass(end_ms, self._retry_hint(), start, PendingPass(now_ms, effects))

    def _retry_hint(self) -> SameTimestampRetry:
        return _RETRY_HINTS[self._state.retries()]

    def complete_pass(self, pending: PendingPass, end_ms: float) -> PassCompletionEffects:
        """End a pass: what it kept back, with metrics as they are now.

        Parameters
        ----------
        pending : PendingPass
            Of the `execute_pass` it belongs to; completed once.
        end_ms : float
            End of the whole group's pass, not before its start.

        Raises
        ------
        CommandError
            The pass was completed before, or ends before it started.
        """
        self._check_alive()
        if pending.completed:
            raise CommandError("pending: this pass is complete already")
        if not math.isfinite(end_ms) or end_ms < pending.started_at_ms:
            raise CommandError(f"end_ms: must be finite and >= {pending.started_at_ms}, got {end_ms}")
        pending.completed = True
        effects = pending.effects
        if self._offload:
            self._state.boundary(end_ms)
        effects.lifecycle_events += self._retry()
        late = self._drain_events()
        if late:
            effects.kv_events = [*effects.kv_events, *late]
        passed = effects.metrics
        effects.metrics = self.metrics()
        if self._radix:
            # What the pass found in the cache is an observation of the pass, not of this moment.
            effects.metrics = effects.metrics._replace(
                sglang_cache_hit_tokens=passed.sglang_cache_hit_tokens,
                sglang_cache_total_tokens=passed.sglang_cache_total_tokens,
            )
        duration = end_ms - pending.started_at_ms
        if effects.forward_pass_metrics.duration_ms != duration:
            effects.forward_pass_metrics = effects.forward_pass_metrics._replace(duration_ms=duration)
        self._tell_observer()
        return effects

    def complete_idle_group_pass(self, started_at_ms: float, end_ms: float) -> PassCompletionEffects:
        """Cross the boundary of a group pass in which this rank had no work."""
        self._check_alive()
        duration = max(0.0, end_ms - started_at_ms)
        if self._offload:
            self._state.boundary(end_ms)
        effects = PassCompletionEffects(
            (),
            self._retry(),
            self._drain_events(),
            self.metrics(),
            ForwardPassMetrics(0, 0, 0.0, 0, 0, 0, 0.0, 0, 0, 0.0, 0, 0, 0.0, duration),
        )
        self._tell_observer()
        return effects

    # ------------------------------------------------------------ one of a group

    @property
    def last_pass_progressed(self) -> bool:
        """Whether the last pass changed anything an observer could see (spec/engine-contract.md section 7)."""
        return bool(self._state.progressed())

    @property
    def prefill_countdown(self) -> int:
        """Passes of the group that may not prefill yet (spec/sglang.md section 6.7); 0 without an interval."""
        if not self.config.prefill_decode_interval:
            return 0
        return int(self._state.view("radix")[0]["countdown"])

    def prepare_group_pass(self, wave_step: int, dp_size: int) -> None:
        """Before a pass of the group, whether or not this rank takes part in it.

        Parameters
        ----------
        wave_step : int
            Passes of the group since it was last drained. No engine that is simulated reads it.
        dp_size : int
            With siblings, what depends on all ranks waits for `observe_group_pass`.
        """
        self._check_alive()
        self._state.grouped = dp_size > 1

    def observe_group_pass(self, *, executed: bool, prefilled: bool, worked: bool) -> None:
        """After the ranks of the group executed a pass, before it completes.

        Parameters
        ----------
        executed : bool
            Whether this rank took part.
        prefilled : bool
            Whether any rank computed prompt tokens: the prefill interval starts anew for all.
        worked : bool
            Whether any rank ran its model. After a round that only waited for
            the interval the new-token ratio returns to its first value.
        """
        self._check_alive()
        interval = self.config.prefill_decode_interval
        if not interval:
            return
        radix = self._state.view("radix", writable=True)[0]
        if prefilled:
            radix["countdown"] = interval
        elif not executed and radix["countdown"] > 0:
            radix["countdown"] -= 1
        if executed and not worked and self._retry_hint() is SameTimestampRetry.COUNTDOWN:
            radix["new_token_ratio"] = self._state.view("config")[0]["init_ratio"]

    # ------------------------------------------------------------ readiness

    def next_internal_deadline_ms(self) -> float | None:
        """Earliest end of a transfer in flight, or None."""
        deadline = self._state.deadline() if self._offload else math.inf
        return None if deadline == math.inf else deadline

    def process_internal_work(self, now_ms: float, pass_in_flight: bool) -> InternalEffects:
        """Settle transfers due at `now_ms`; nothing at all while a pass is in flight.

        With KVBM tiers the first pending destination is tried, too, as by `tick_offload_only`.

        Raises
        ------
        CommandError
            `now_ms` is not a time.
        """
        self._check_time(now_ms)
        if pass_in_flight:
            return InternalEffects()
        if self._offload:
            self._state.internal_work(now_ms)
        lifecycle = self._retry() if self._tiers else []
        effects = InternalEffects(lifecycle, self._drain_events())
        self._tell_observer()
        return effects

    def tick_offload_only(self, now_ms: float) -> InternalEffects:
        """Let the transfers of the KVBM tiers go on to `now_ms` and try the first pending destination.

        For drivers of an idle rank. Requests whose blocks have come wait at the
        front of the queue afterwards. An earlier time than before changes nothing,
        and so does a rank without these tiers.

        Raises
        ------
        CommandError
            `now_ms` is not a time.
        """
        self._check_time(now_ms)
        if not self._tiers:
            return InternalEffects()
        self._state.transport(now_ms)
        return InternalEffects(self._retry(), self._drain_events())

    def tick_offload_transport_only(self, now_ms: float) -> InternalEffects:
        """As `tick_offload_only`, without trying a destination: for while a pass is in flight.

        Where a pass shows its KV events at its end, those of transfers wait for
        it, too: they are later in the same stream.

        Raises
        ------
        CommandError
            `now_ms` is not a time.
        """
        self._check_time(now_ms)
        if not self._tiers:
            return InternalEffects()
        self._state.transport(now_ms)
        events = self._drain_events() if self.config.rules.kv_events_at_pass_start else _EMPTY_EVENTS
        return InternalEffects(kv_events=events)

    def _check_time(self, now_ms: float) -> None:
        self._check_alive()
        if not math.isfinite(now_ms) or now_ms < 0:
            raise CommandError(f"now_ms: must be finite and >= 0, got {now_ms}")

    def is_ready(self) -> bool:
        """Whether a pass could have work: a request waits or runs, and not only for transfers.

        SGLang is ready as long as it owns anything at all, halves of handoffs
        included, and while prefill has to wait for its interval: ask
        `waiting_for_external_command`, too, before executing passes in a row.
        """
        return self._poison is None and (not self._idle() if self._radix else self._state.runnable())

    def is_empty(self) -> bool:
        """Whether no request waits or runs; halves of handoffs that only a command moves do not count."""
        return self._state.empty()

    def is_drained(self) -> bool:
        """Whether no request, half of a handoff, transfer or prefill interval is left."""
        return self._poison is None and self._idle()

    def _idle(self) -> bool:
        return self._state.drained() and not self._counts_down()

    def _counts_down(self) -> bool:
        # Spec/sglang.md section 6.7: the interval is counted in passes, those without work too.
        return bool(self.config.prefill_decode_interval and self._state.view("radix")[0]["countdown"])

    def waiting_for_external_command(self) -> bool:
        """Whether only a later command can make progress: halves of handoffs are left, but no request to run."""
        return self._waits_for_command() and not self._counts_down()

    def _waits_for_command(self) -> bool:
        return bool(self._state.empty() and self.header[0]["num_live"])

    def metrics(self) -> Metrics:
        """Occupancy now."""
        active, inactive, total, running, waiting, preemptions = self._state.metrics()
        if self._radix:
            inactive = 0
        return Metrics(
            self.identity.dp_rank,
            active,
            inactive,
            total,
            active / total,
            (active + inactive) / total,
            running,
            waiting,
            preemptions,
        )

    def stuck_head(self) -> StuckHead | None:
        """The request that blocks an idle rank for ever, or None.

        Only after an effect-free pass. Nothing overtakes the head of the queue,
        so if nothing runs, nothing can change what blocks it.
        """
        slot, reason, needed = self._state.stuck()
        if not reason:
            return None
        row = self._state.request_row(slot)
        return StuckHead(_id_of(row), FailReason(reason), needed)

    def fail_head(self) -> Output | None:
        """End a stuck head as rejected (it never ran) or failed; its terminal output, None if nothing is stuck."""
        if not self._state.fail_stuck():
            return None
        rows = self._state.signals()
        self._state.release_contents(rows["slot"])
        return self._build_output(rows[0])

    def unblock(self) -> bool:
        """Let a request whose prompt came with a handoff pass a queue head that waits for its blocks.

        For drivers, when nothing else can happen; until then a later handoff
        may still free the head. False if that is not what blocks the rank.
        """
        return self._state.unblock()

    # ------------------------------------------------------------ looking in

    @property
    def blocks(self) -> npt.NDArray[Any]:
        """Pool blocks, read-only view of `layout.BLOCK`, shape (num_gpu_blocks,). Valid until the next call."""
        return self._state.view("blocks")

    @property
    def requests(self) -> npt.NDArray[Any]:
        """Request rows, read-only view of `layout.REQUEST`; status 0 is an unused row. Valid until the next call."""
        return self._state.view("requests")

    @property
    def running(self) -> npt.NDArray[np.int32]:
        """Row numbers of running requests in running order, read-only view."""
        return self._state.view("running")

    @property
    def waiting(self) -> npt.NDArray[np.int64]:
        """Row numbers of waiting requests in queue order, a copy."""
        return self._state.waiting_slots()

    @property
    def connector(self) -> npt.NDArray[np.int64]:
        """Row numbers of requests that wait for transfers of the host tier, or look at them first, in order; a copy."""
        return self._state.connector_slots()

    @property
    def parked(self) -> npt.NDArray[np.int64]:
        """Row numbers of requests whose blocks come back from the KVBM tiers, in order of parking; a copy."""
        return self._state.parked_slots()

    def offload_dependency_ms(self, request_id: RequestId) -> float | None:
        """When the offload that a live request waits for may end; None if it waits for none.

        The earliest end of any transfer from the device to G2.
        """
        number = id_to_int(request_id)
        slot = self._state.find(number >> 64, number & _MASK64)
        if slot < 0 or not self._state.depends(slot):
            return None
        return float(self._state.offload_deadline())

    @property
    def header(self) -> npt.NDArray[Any]:
        """Scalars of the rank, read-only view of `layout.HEADER`, shape (1,)."""
        return self._state.view("header")

    def request_row(self, request_id: RequestId) -> np.void | None:
        """Copy of the row of a live request, None if there is none of that id."""
        number = id_to_int(request_id)
        slot = self._state.find(number >> 64, number & _MASK64)
        return None if slot < 0 else self._state.request_row(slot)

    def find_slot(self, request_id: RequestId) -> int:
        """Row number of a live request, the same for all its life; -1 if there is none of that id."""
        number = id_to_int(request_id)
        return int(self._state.find(number >> 64, number & _MASK64))

    @property
    def completions(self) -> int:
        """Requests that ended in the last pass."""
        return int(self._state.completed)

    def handoff_role(self, handoff_id: RequestId, destination: bool) -> HandoffRole:
        """How far this rank's source or destination half of a handoff is; NONE if it has no such half."""
        number = id_to_int(handoff_id, "handoff_id")
        slot = self._state.find_handoff(number >> 64, number & _MASK64, destination)
        return HandoffRole.NONE if slot < 0 else HandoffRole(self._state.role(slot))

    def block_table(self, request_id: RequestId) -> npt.NDArray[np.int32]:
        """Ids of the blocks a live request owns, in order; a copy.

        Raises
        ------
        CommandError
            No live request has that id.
        """
        row = self.request_row(request_id)
        if row is None:
            raise CommandError(f"request_id: no live request {request_id!r}")
        first = int(row["table"])
        if first < 0:
            return np.empty(0, np.int32)
        table: npt.NDArray[np.int32] = self._state.view("tables")[first : first + int(row["n_blocks"])].copy()
        return table

    def check_integrity(self) -> None:
        """Verify every invariant of the state, O(blocks).

        Raises
        ------
        IntegrityError
            Naming the first that does not hold.
        """
        check_rank(self._state)

    # ------------------------------------------------------------ whole state

    def fork(self) -> SchedulerRank:
        """An independent rank in the same state; read-only inputs are shared.

        The policy and timing objects are shared too: give them no state of their own.
        """
        self._check_alive()
        other = SchedulerRank.__new__(SchedulerRank)
        other.identity, other.config, other.observer = self.identity, self.config, self.observer
        other._policy, other._params, other._seed = self._policy, self._params, self._seed
        other._build_output, other._token_ids = self._build_output, self._token_ids
        other._block_tokens = list(self._block_tokens)
        other._radix = self._radix
        other._host, other._tiers, other._offload = self._host, self._tiers, self._offload
        other._poison = None
        other._state = self._state.fork()
        other._handoffs = RankHandoffs(other._state, self.config)
        return other

    def snapshot(self) -> RankSnapshot:
        """The state as plain data."""
        self._check_alive()
        return RankSnapshot(self.identity, *self._state.save(), list(self._block_tokens))

    def restore(self, snapshot: RankSnapshot) -> None:
        """Return to a saved state, of this rank or of one built alike.

        Raises
        ------
        SnapshotError
            The snapshot is of another configuration or version; the rank is unchanged.
        """
        if not isinstance(snapshot, RankSnapshot):
            raise SnapshotError(f"expected a RankSnapshot, got {type(snapshot).__name__}")
        self._state.load(snapshot.arena, snapshot.sizes, snapshot.contents)
        self._block_tokens = list(snapshot.block_tokens)
        self._poison = None

    def digest(self) -> str:
        """Hash of the state, 16 hexadecimal digits; equal states give equal digests, in every process."""
        return f"{self._state.digest():016x}"

    # ------------------------------------------------------------ inside

    def _tell_observer(self) -> None:
        if self._host and self.observer is not None:
            tell(self.observer, *self._state.drain_offload())

    def _check_alive(self) -> None:
        if self._poison is not None:
            raise PoisonedError(f"an earlier pass failed: {self._poison}") from self._poison

    def _raise_left_error(self) -> None:
        error = self._state.take_error()
        if error is not None:
            self._poison = error
            raise error

    def _drain_events(self) -> Sequence[KvEvent]:
        state = self._state
        if self._token_ids:
            self._spell_blocks()
        if not state.num_events:
            return _EMPTY_EVENTS
        events, blocks = state.drain_events()
        tokens = None
        if self._token_ids:
            tokens, self._block_tokens = self._block_tokens, []
        return KvEvents(events, blocks, self.identity, tokens)

    def _spell_blocks(self) -> None:
        """Look up the tokens of blocks new in the event buffer, which may outlast the requests that computed them."""
        size = self.config.tokens_per_block
        for row in self._state.view("event_blocks")[len(self._block_tokens) :]:
            slot, index = int(row["slot"]), int(row["index"])
            self._block_tokens.append(self._state.content(slot)[3].block(index, size) if slot >= 0 else ())

    def _pressure_builder(self, now_ms: float) -> Callable[[Any], PressureEvent]:
        radix = self._radix

        def build(row: Any) -> PressureEvent:
            return PressureEvent(
                now_ms,
                "sglang_retraction" if radix else "vllm_preemption",
                _id_of(row),
                PressureState(
                    int(row["running_before"]),
                    None if radix else int(row["waiting_before"]),
                    int(row["active_before"]),
                ),
                PressureState(
                    int(row["running_after"]), None if radix else int(row["waiting_after"]), int(row["active_after"])
                ),
                int(row["request_blocks"]),
                int(row["logical_available"]) if radix else None,
                int(row["required"]) if radix else None,
            )

        return build


def content_tokens(config: EngineConfig) -> int:
    """Tokens of a request whose content the kernels may look at.

    One block more than the pool can hold, and what SGLang's queue order compares.
    """
    size = config.tokens_per_block
    return max(config.num_gpu_blocks + 1, -(-_HEAD_TOKENS // size)) * size


def request_content(
    config: EngineConfig,
    parts: list[npt.NDArray[Any]],
    outputs: npt.NDArray[np.uint32] | None,
    request_id: int,
    max_output: int,
    keep: Any = None,
) -> tuple[Any, Any, npt.NDArray[np.uint32] | None, Any]:
    """What the kernels need to know of a request's tokens, as `RankState.submit` takes it.

    Parameters
    ----------
    config : EngineConfig
    parts : list of ndarray
        Prompt as uint32 arrays or layout.SEGMENT arrays.
    outputs : ndarray of uint32, or None
        Planned output ids; None: made up by rule.
    request_id, max_output : int
    keep : object, optional
        Kept alive with the content.
    """
    high, low = request_id >> 64, request_id & _MASK64
    size = config.tokens_per_block
    most = content_tokens(config)
    if config.backend == "sglang":
        if not config.enable_prefix_caching:
            return np.empty(0, layout.RUN), 0, outputs, keep
        runs, head = _content.runs_parts(parts, outputs, high, low, max_output, size, most, config.emit_kv_events)
        return runs, head, outputs, keep
    if not config.enable_prefix_caching:
        return np.empty(0, np.uint64), None, outputs, keep
    hashes, local = _content.hash_parts(parts, outputs, high, low, max_output, size, most, config.emit_kv_events)
    return hashes, local, outputs, keep


def _withdraw(effects: PassCompletionEffects, request_id: int) -> bool:
    """Take a request's outputs and lifecycle events out of a pending pass; true if an output went."""
    kept: list[SourceHeld | DestinationReserved] = [e for e in effects.lifecycle_events if e.request_id != request_id]
    effects.lifecycle_events = kept
    outputs = effects.outputs
    if not isinstance(outputs, Rows):
        return False
    rows = outputs.array
    mine = (rows["id_hi"] == np.uint64(request_id >> 64)) & (rows["id_lo"] == np.uint64(request_id & _MASK64))
    if not mine.any():
        return False
    effects.outputs = Rows(rows[~mine], outputs._build)
    visible = int(np.count_nonzero(mine & ((rows["flags"] & _REJECTED) == 0)))
    tokens, requests = effects.decode_acceptance
    effects.decode_acceptance = tokens - visible, requests - (visible > 0)
    return True


def _prompt_parts(request: Request) -> tuple[list[npt.NDArray[Any]], int]:
    """Content of a prompt as arrays, and its length."""
    if request.segments is not None:
        segments = request.segments
        if not isinstance(segments, np.ndarray) or segments.dtype != layout.SEGMENT or segments.ndim != 1:
            raise CommandError("segments: expected a one-dimensional array of kvsim.layout.SEGMENT")
        if len(segments) and (segments["length"].min() < 1 or segments["length"].max() >= _MAX_TOKENS):
            raise CommandError(f"segments: every length must be 1 <= length < {_MAX_TOKENS}")
        if len(segments) and segments["step"].max() > 1:
            raise CommandError("segments: every step must be 0 or 1")
        parts, length = [np.ascontiguousarray(segments)], int(segments["length"].sum())
    else:
        tokens = _token_array(request.tokens, "tokens")
        parts, length = [tokens], len(tokens)
    if not 1 <= length < _MAX_TOKENS:
        raise CommandError(f"tokens: the prompt must have 1 <= tokens < {_MAX_TOKENS}, got {length}")
    return parts, length


def _output_plan(request: Request, num_input: int) -> tuple[npt.NDArray[np.uint32] | None, int]:
    """Planned output ids, and how many tokens to generate."""
    if request.output_token_ids is not None:
        outputs = _token_array(request.output_token_ids, "output_token_ids")
        count = len(outputs)
    else:
        outputs = None
        asked = request.max_output_tokens
        if isinstance(asked, bool) or not isinstance(asked, (int, np.integer)):
            raise CommandError(f"max_output_tokens: expected an int, got {asked!r}")
        count = int(asked)
    if not 0 <= count <= _MAX_TOKENS - num_input:
        raise CommandError(f"max_output_tokens: must lie in 0 <= n <= {_MAX_TOKENS - num_input}, got {count}")
    return outputs, count


def _token_array(tokens: Any, field: str) -> npt.NDArray[np.uint32]:
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint32 and tokens.ndim == 1 and tokens.flags.c_contiguous:
        return tokens
    try:
        array = np.asarray(tokens)
        if array.size and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 1 << 32):
            raise ValueError
        result = np.ascontiguousarray(array, dtype=np.uint32)
    except (ValueError, TypeError, OverflowError):
        raise CommandError(f"{field}: expected token ids 0 <= id < 2**32") from None
    if result.ndim != 1:
        raise CommandError(f"{field}: expected one dimension, got {result.ndim}")
    return result
