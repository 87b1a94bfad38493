"""The neutral contract of one scheduler rank: what goes in and what comes out.

Field sets follow spec/engine-contract.md section 4. Times are milliseconds on
the driver's clock, lengths are tokens, capacities are blocks. Everything here
is plain data; :class:`kvsim.SchedulerRank` is the one that acts on it.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvsim.errors import CommandError, ConfigError
from kvsim.layout import OffloadEventKind

__all__ = [
    "ActivateDestination",
    "Admission",
    "Applied",
    "CancelDestination",
    "CancelRequest",
    "CancelSource",
    "Command",
    "CommandContext",
    "CommandEffects",
    "DestinationAccepted",
    "DestinationReserved",
    "ForwardPassMetrics",
    "HostOffloadEvent",
    "HostOffloadObserver",
    "KvEvent",
    "Metrics",
    "Noop",
    "Output",
    "PassCompletionEffects",
    "PassStartEffects",
    "PendingPass",
    "PressureEvent",
    "PressureState",
    "RankIdentity",
    "RankPass",
    "ReleaseSource",
    "Removed",
    "Request",
    "RequestId",
    "ReserveDestination",
    "Rows",
    "SameTimestampRetry",
    "SourceHeld",
    "Stored",
    "StoredBlock",
    "Submit",
    "SubmitHandoffPrefill",
    "Submitted",
    "TimingModel",
    "TransferTiming",
    "id_to_int",
]

_U32 = 1 << 32
_U64 = 1 << 64
_U128 = 1 << 128

RequestId: TypeAlias = "int | uuid.UUID"


def id_to_int(value: RequestId, field_name: str = "request_id") -> int:
    """The 128-bit integer of an id given as ``int`` or ``uuid.UUID``.

    Raises
    ------
    CommandError
        If it is neither, or outside ``0 <= id < 2**128``; the message names `field_name`.
    """
    if isinstance(value, uuid.UUID):
        return value.int
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise CommandError(f"{field_name}: expected an int or a uuid.UUID, got {value!r}")
    number = int(value)
    if not 0 <= number < _U128:
        raise CommandError(f"{field_name}: must lie in 0 <= id < 2**128, got {number}")
    return number


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Which scheduler this is among all of a deployment.

    Parameters
    ----------
    worker_id : int
        Logical engine, 0 <= worker_id < 2**64.
    dp_rank : int
        Attention-DP rank inside the worker, 0 <= dp_rank < dp_size.
    dp_size : int
        Ranks of the worker, at least 1.
    """

    worker_id: int = 0
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (("worker_id", 0, _U64), ("dp_size", 1, _U32), ("dp_rank", 0, self.dp_size)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(name, f"expected an int, got {value!r}")
            if not low <= value < high:
                raise ConfigError(name, f"must lie in {low} <= {name} < {high}, got {value}")
        _ = self.seed_offset

    @property
    def seed_offset(self) -> int:
        """``worker_id * dp_size + dp_rank``, added to every seed of the rank (engine-contract.md section 4).

        Raises
        ------
        ConfigError
            If it does not fit 64 bits (seed offset overflow).
        """
        offset = self.worker_id * self.dp_size + self.dp_rank
        if offset >= _U64:
            raise ConfigError("worker_id", f"seed offset overflow: {self.worker_id} * {self.dp_size} + {self.dp_rank}")
        return offset


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One generation request.

    Parameters
    ----------
    request_id : int or uuid.UUID
        Chosen by the caller, 128 bits, unique among the live requests of a rank.
    tokens : sequence of int, or ndarray of uint32, shape (n_tokens,)
        Prompt token ids, at least one. Segment content, which never expands
        tokens, is given by :meth:`from_segments`.
    max_output_tokens : int
        Tokens to generate; 0 is prefill-only work.
    output_token_ids : sequence of int, optional
        Exact tokens to generate. Their number replaces `max_output_tokens`.
    arrival_ms : float, optional
        When it arrived, for reports only; the rank never reads it.

    Notes
    -----
    The arrays are kept, not copied: do not change them while the request lives.
    """

    request_id: RequestId
    tokens: Sequence[int] | npt.NDArray[np.uint32]
    max_output_tokens: int = 1
    output_token_ids: Sequence[int] | npt.NDArray[np.uint32] | None = None
    arrival_ms: float | None = None
    segments: npt.NDArray[Any] | None = None

    @classmethod
    def from_segments(
        cls,
        request_id: RequestId,
        segments: npt.NDArray[Any],
        max_output_tokens: int = 1,
        output_token_ids: Sequence[int] | npt.NDArray[np.uint32] | None = None,
    ) -> Request:
        """Request whose prompt is given as runs of tokens.

        Parameters
        ----------
        request_id : int or uuid.UUID
            As for the class.
        segments : ndarray of `kvsim.layout.SEGMENT`, shape (n_segments,)
            Rows ``(start, step, length)``: token ``j`` of a segment is
            ``(start + j * step) mod 2**32``, `step` being 0 or 1.
        max_output_tokens, output_token_ids
            As for the class.
        """
        return cls(request_id, (), max_output_tokens, output_token_ids, None, segments)


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request. Result: Submitted; error if the id is active."""

    request: Request


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Drop a live request. Result: Applied, or Noop if unknown.

    `discard_pending_output` also withdraws what a pass in flight computed for
    a request that already completed in that pass.
    """

    request_id: RequestId
    discard_pending_output: bool = False


@dataclass(frozen=True, slots=True)
class SubmitHandoffPrefill:
    """Queue a request whose prompt KV stays held at this source after prefill."""

    handoff_id: RequestId
    request: Request


@dataclass(frozen=True, slots=True)
class ReserveDestination:
    """Queue a reservation of prompt KV at this destination."""

    handoff_id: RequestId
    request: Request


@dataclass(frozen=True, slots=True)
class ActivateDestination:
    """Make a reserved destination schedulable."""

    handoff_id: RequestId


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """The transfer is over: free the held source KV."""

    handoff_id: RequestId


@dataclass(frozen=True, slots=True)
class CancelSource:
    """Give up the source half of a handoff."""

    handoff_id: RequestId


@dataclass(frozen=True, slots=True)
class CancelDestination:
    """Give up the destination half of a handoff."""

    handoff_id: RequestId


Command: TypeAlias = (
    Submit
    | CancelRequest
    | SubmitHandoffPrefill
    | ReserveDestination
    | ActivateDestination
    | ReleaseSource
    | CancelSource
    | CancelDestination
)


@dataclass(frozen=True, slots=True)
class CommandContext:
    """When a command is applied.

    Parameters
    ----------
    now_ms : float
        Time of application.
    pass_in_flight : bool
        A pass of this rank, or of a sibling of its group, is executing.
    """

    now_ms: float
    pass_in_flight: bool = False

    @property
    def allow_immediate_admission(self) -> bool:
        """Whether the command may admit pending destinations at once."""
        return not self.pass_in_flight


@dataclass(frozen=True, slots=True)
class Submitted:
    """The request is queued."""

    request_id: int


@dataclass(frozen=True, slots=True)
class DestinationAccepted:
    """The rank owns the reservation; physical capacity may come later."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Applied:
    """The command changed the rank."""


@dataclass(frozen=True, slots=True)
class Noop:
    """The command found nothing to change."""


# ---------------------------------------------------------------- results


class SameTimestampRetry(enum.Enum):
    """Hint of an effect-free zero-duration pass: whether to try again at the same instant."""

    NOT_APPLICABLE = "not_applicable"
    RETRY = "retry"
    COUNTDOWN = "countdown"
    EXHAUSTED = "exhausted"


@dataclass(frozen=True, slots=True)
class Output:
    """One output signal: a token, or the end of a request without one.

    `cached_tokens` are the prompt tokens found in the cache at first admission,
    reported on the first output of a request only. `failed` marks a request
    that ran before but can never finish, `rejected` one that never ran
    (spec/README.md).
    """

    request_id: int
    token_id: int | None
    completed: bool
    rejected: bool
    cached_tokens: int | None
    handoff_delay_ms: float | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """A request entered the running set; reuse counts tokens of all tiers.

    `cache_tier_attribution` splits the reuse of a first admission into (tokens
    that were on the device, tokens loaded from the host); None for later
    admissions and for ranks without a host tier.
    """

    request_id: int
    reused_input_tokens: int
    cache_tier_attribution: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PressureState:
    """Occupancy beside a pressure event."""

    running_requests: int
    waiting_requests: int | None
    active_blocks: int


@dataclass(frozen=True, slots=True)
class PressureEvent:
    """A preemption (kind ``vllm_preemption``) or retraction (``sglang_retraction``)."""

    at_ms: float
    kind: str
    request_id: int
    state_before: PressureState
    state_after: PressureState
    request_active_blocks_before: int
    logical_available_blocks_before: int | None
    required_blocks_before: int | None


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """What is needed to time the transfer of a held prompt (engine-contract.md section 5.4)."""

    mode: str
    full_prompt_tokens: int
    bytes_per_token: int | None
    bandwidth_gb_s: float | None


@dataclass(frozen=True, slots=True)
class SourceHeld:
    """The prompt KV of a source is complete and held."""

    handoff_id: int
    request_id: int
    transfer_timing: TransferTiming


@dataclass(frozen=True, slots=True)
class DestinationReserved:
    """A destination owns capacity for the prompt."""

    handoff_id: int
    request_id: int
    transferable_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block that became findable."""

    block_hash: int
    tokens_hash: int
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks became findable; the first one's parent is `parent_hash`."""

    parent_hash: int | None
    blocks: tuple[StoredBlock, ...]
    start_position: int | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks are no longer findable, in eviction order."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One KV cache event; `event_id` counts per rank from 0."""

    event_id: int
    worker_id: int
    dp_rank: int
    data: Stored | Removed
    storage_tier: str = "device"


class Metrics(NamedTuple):
    """Occupancy of a rank (spec/vllm.md section 12)."""

    dp_rank: int
    active_blocks: int
    inactive_blocks: int
    total_blocks: int
    cache_usage: float
    physical_cache_usage: float
    running_requests: int
    waiting_requests: int
    preemptions_total: int
    sglang_cache_hit_tokens: int = 0
    sglang_cache_total_tokens: int = 0


class ForwardPassMetrics(NamedTuple):
    """Work of one pass and the queues after it (spec/timing-and-fpm.md section 5).

    Variances are population variances; an empty set has variance 0.
    """

    num_prefill_requests: int
    sum_prefill_tokens: int
    var_prefill_length: float
    sum_prefill_kv_tokens: int
    num_decode_requests: int
    sum_decode_kv_tokens: int
    var_decode_kv_tokens: float
    num_queued_prefill: int
    sum_queued_prefill_tokens: int
    var_queued_prefill_length: float
    num_queued_decode: int
    sum_queued_decode_kv_tokens: int
    var_queued_decode_kv_tokens: float
    duration_ms: float


_T = TypeVar("_T")


class Rows(Sequence[_T], Generic[_T]):
    """A struct array that reads as a sequence of objects.

    The objects are built when touched. `array` is the data itself, read-only.
    """

    __slots__ = ("_build", "array")

    def __init__(self, array: npt.NDArray[Any], build: Callable[[Any], _T]) -> None:
        self.array = array
        self._build = build

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | Rows[_T]:
        if isinstance(index, slice):
            return Rows(self.array[index], self._build)
        return self._build(self.array[index])

    def __iter__(self) -> Iterator[_T]:
        build = self._build
        for row in self.array:
            yield build(row)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Rows({list(self)!r})"


@dataclass(slots=True)
class PassStartEffects:
    """What is visible when a pass starts.

    `kv_events` is empty but under rule sets that show them at the start.
    """

    admissions: Sequence[Admission]
    pressure_events: Sequence[PressureEvent]
    kv_events: Sequence[KvEvent] = ()


@dataclass(slots=True)
class PassCompletionEffects:
    """What is visible when a pass ends.

    `decode_acceptance` is (non-rejected output signals, distinct requests among
    them), (0, 0) if none.
    """

    outputs: Sequence[Output]
    lifecycle_events: list[SourceHeld | DestinationReserved]
    kv_events: Sequence[KvEvent]
    metrics: Metrics
    forward_pass_metrics: ForwardPassMetrics
    decode_acceptance: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class PendingPass:
    """A pass that executes: what it will show, kept back until it completes."""

    started_at_ms: float
    effects: PassCompletionEffects
    completed: bool = False


@dataclass(slots=True)
class RankPass:
    """Result of `SchedulerRank.execute_pass`."""

    end_ms: float
    same_timestamp_retry: SameTimestampRetry
    start_effects: PassStartEffects
    pending: PendingPass


@dataclass(slots=True)
class CommandEffects:
    """Result of `SchedulerRank.apply_command`."""

    result: Submitted | DestinationAccepted | Applied | Noop
    lifecycle_events: list[SourceHeld | DestinationReserved] = field(default_factory=list)
    kv_events: Sequence[KvEvent] = ()
    retired_requests: tuple[int, ...] = ()
    metrics: Metrics | None = None
    suppressed_pending_output: bool = False


@dataclass(slots=True)
class InternalEffects:
    """Result of `SchedulerRank.process_internal_work`."""

    lifecycle_events: list[SourceHeld | DestinationReserved] = field(default_factory=list)
    kv_events: Sequence[KvEvent] = ()


# ---------------------------------------------------------------- what users supply


@runtime_checkable
class TimingModel(Protocol):
    """A model of pass durations; results are milliseconds, finite, unscaled."""

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        """Prefill time of `batch_size` prompts of floor-mean length `mean_isl`, `mean_prefix` of it cached."""
        ...

    def predict_decode_ms(
        self, batch_size: int, active_kv_tokens: int, mean_context: int, total_kv_tokens: int
    ) -> float:
        """Decode time of `batch_size` sequences that hold `active_kv_tokens` of `total_kv_tokens`."""
        ...


@dataclass(frozen=True, slots=True)
class HostOffloadEvent:
    """One observation of the host tier (spec/host-offload.md section 2).

    Attributes
    ----------
    kind : OffloadEventKind
    at_ms : float
        When it happened: ends of transfers have their own time, even if they
        are told later; a cancelled load has that of the command.
    transfer_id : int or None
    block_hashes : tuple of int
        Sequence hashes, in order.
    completes_at_ms : float or None
        End of a transfer that was put on its link.
    logical_block_indices : tuple of int or None
        With STORE_BLOCK_MAPPINGS: position of each block in the prompt.
    structurally_unfittable : bool or None
        With CAPACITY_RETRY: the host could not take the blocks if it were empty.
    """

    kind: OffloadEventKind
    at_ms: float
    transfer_id: int | None
    block_hashes: tuple[int, ...]
    completes_at_ms: float | None = None
    logical_block_indices: tuple[int, ...] | None = None
    structurally_unfittable: bool | None = None


class HostOffloadObserver(Protocol):
    """Hooks around lower-tier transfers; called synchronously, in order.

    The rank has finished what it was asked to do when it calls. An exception is
    reported as a warning, and nothing else comes of it.
    """

    def record(self, request_id: int, event: HostOffloadEvent) -> None:
        """One transfer event of a request."""
        ...
