"""Workers of one role, driven step by step (spec/engine-contract.md section 7).

`EngineComponent` is what `kvsim.replay` does to engines, in plain Python and
for any clock: whoever drives it decides when requests come, keeps the time and
delivers the completions it was given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvsim.config import EngineConfig
from kvsim.contract import (
    Admission,
    CancelRequest,
    Command,
    CommandContext,
    CommandEffects,
    DestinationAccepted,
    ForwardPassMetrics,
    InternalEffects,
    KvEvent,
    PassCompletionEffects,
    PendingPass,
    PressureEvent,
    RankIdentity,
    Request,
    ReserveDestination,
    SameTimestampRetry,
    Submit,
    SubmitHandoffPrefill,
    Submitted,
    id_to_int,
)
from kvsim.errors import CommandError, ConfigError, IntegrityError
from kvsim.group import Health, check_time, command_rank, execute_ranks, merge_retries, runnable_ranks
from kvsim.layout import FailReason, Pool
from kvsim.policies import Policy
from kvsim.rank import SchedulerRank, StuckHead
from kvsim.replay.pool import ScaleChange, WorkerPool, startup_delay_ms

__all__ = ["Collector", "Completion", "ComponentRank", "DriveEffects", "EngineComponent", "TokenTimes"]

_TRY_AGAIN = (SameTimestampRetry.RETRY, SameTimestampRetry.COUNTDOWN)
_NO_WORK = ForwardPassMetrics(0, 0, 0.0, 0, 0, 0, 0.0, 0, 0, 0.0, 0, 0, 0.0, 0.0)


class Collector(Protocol):
    """Takes the tokens of a visible component."""

    def record_token(self, request_id: int, token_id: int, at_ms: float) -> None:
        """A token became visible."""
        ...


class TokenTimes:
    """A collector that keeps the time of every token.

    Attributes
    ----------
    times : dict of int to list of float
        By request, in order.
    """

    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = {}

    def record_token(self, request_id: int, token_id: int, at_ms: float) -> None:
        """Keep `at_ms`."""
        self.times.setdefault(request_id, []).append(at_ms)


@dataclass(slots=True, eq=False)
class Completion:
    """What a rank shows when the pass of its group ends.

    Attributes
    ----------
    role : Pool
    worker_id, dp_rank, rank_id : int
        `rank_id` counts over all workers.
    started_at_ms, end_ms : float
        Of the whole group.
    effects : PassCompletionEffects
        Until it is delivered, as they were when the pass was executed. A
        cancellation may withdraw outputs meanwhile; delivery adds what the
        boundary brings.
    pending : PendingPass or None
        None: the rank was idle, and its effects are empty.
    stuck : StuckHead or None
        Why a request was given up, if this is its end.
    """

    role: Pool
    worker_id: int
    dp_rank: int
    rank_id: int
    started_at_ms: float
    end_ms: float
    effects: PassCompletionEffects
    pending: PendingPass | None = None
    stuck: StuckHead | None = None
    _collector: Collector | None = field(default=None, repr=False)

    @property
    def completed_requests(self) -> list[int]:
        """Requests that end, in order of their signals."""
        return [output.request_id for output in self.effects.outputs if output.completed]


@dataclass(slots=True)
class DriveEffects:
    """What `EngineComponent.drive_ready` did: a pass of one worker, or nothing.

    Attributes
    ----------
    worker_id : int
        -1: no worker could do anything.
    end_ms : float
        End of the pass.
    admissions, pressure_events : list
        Visible now.
    pass_start_events : list of KvEvent
        Those that a ruleset shows at the start of a pass.
    scheduled : list of Completion
        To be delivered at `end_ms`, one per rank of the worker, idle ones included.
    immediate : list of Completion
        Of a pass that took no time: over already.
    """

    worker_id: int = -1
    end_ms: float = math.nan
    admissions: list[Admission] = field(default_factory=list)
    pressure_events: list[PressureEvent] = field(default_factory=list)
    pass_start_events: list[KvEvent] = field(default_factory=list)
    scheduled: list[Completion] = field(default_factory=list)
    immediate: list[Completion] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.admissions or self.pass_start_events or self.scheduled or self.immediate)


@dataclass(slots=True, eq=False)
class ComponentRank:
    """A rank of a component.

    Attributes
    ----------
    rank_id, worker_id, dp_rank : int
    core : SchedulerRank
    flying : Completion or None
        Of the pass in flight of its worker.
    live : set of int
        Requests accepted that have not ended visibly.
    """

    rank_id: int
    worker_id: int
    dp_rank: int
    core: SchedulerRank
    flying: Completion | None = None
    live: set[int] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        """Whether a pass of its worker is in flight, its own or a sibling's."""
        return self.flying is not None

    @property
    def in_flight(self) -> int:
        """Number of `live` requests."""
        return len(self.live)

    @property
    def ready(self) -> bool:
        """Whether it could form a pass now."""
        return not self.busy and self.core.is_ready() and not self.core.waiting_for_external_command()

    @property
    def drained(self) -> bool:
        """Whether nothing is left: no request, hold, reservation or transfer, and no pass in flight."""
        return not self.busy and not self.live and self.core.is_drained()


class EngineComponent:
    """Workers of one role: who may start a pass, what passes show and when, scaling.

    Parameters
    ----------
    config : EngineConfig
        Of every worker. Under attention DP each rank gets its share
        (`EngineConfig.for_attention_dp`), and `worker_type` follows a `role`
        of prefill or decode.
    workers : int
        Ready from the start, at least 1.
    dp_size : int
        Ranks of each worker, at least 1.
    role : {'aggregated', 'prefill', 'decode'}
    visible : bool
        Whether tokens are recorded in the collector; those of prefill workers of a
        disaggregated run are not.
    startup_s : float, optional
        How long a worker that is added later takes to be ready; none and 0 are no delay.
    timing, policy
        As for `SchedulerRank`.

    Attributes
    ----------
    ranks : list of ComponentRank or None
        By rank id, worker by worker. An id is never used again; None: gone.
    groups : list of tuple of int or None
        Rank ids of each worker, by worker id; None: gone.
    workers : WorkerPool
        Which workers are starting, active, draining.
    ready, deferred : set of int
        Workers that could start a pass. Those deferred did nothing when they last
        tried; the next drive tries them again.

    Raises
    ------
    ConfigError
        Naming the field.

    Notes
    -----
    One call of `drive_ready` starts the pass of one worker, the lowest first.
    Everything that arrives while a worker is busy waits for all of its ranks.
    A failure in the middle of a pass poisons the component.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        workers: int = 1,
        dp_size: int = 1,
        role: str = "aggregated",
        visible: bool = True,
        startup_s: float | None = None,
        timing: Any = None,
        policy: Policy | str | None = None,
    ) -> None:
        for name, value in (("workers", workers), ("dp_size", dp_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, f"must be an int >= 1, got {value!r}")
        if role not in ("aggregated", "prefill", "decode"):
            raise ConfigError("role", f"must be one of aggregated, prefill, decode, got {role!r}")
        self.role = Pool[role.upper()]
        if self.role is not Pool.AGGREGATED:
            config = config.replace(worker_type=role)
        self.config = config.for_attention_dp(dp_size)
        self.dp_size = dp_size
        self.visible = visible
        self._timing, self._policy = timing, policy
        self._health = Health()
        self.workers = WorkerPool(self.role, workers, startup_ms=startup_delay_ms(startup_s))
        self.ranks: list[ComponentRank | None] = []
        self.groups: list[tuple[int, ...] | None] = []
        #: Passes of each worker since it was last drained.
        self._wave_steps: list[int] = []
        self.ready: set[int] = set()
        self.deferred: set[int] = set()
        for worker in range(workers):
            self._add_group(worker)

    # ------------------------------------------------------------ commands

    def dispatch(self, rank_id: int, request: Request, now_ms: float) -> CommandEffects:
        """Submit a request to a rank; the same as `apply_command` with `Submit`."""
        return self.apply_command(rank_id, Submit(request), now_ms)

    def apply_command(self, rank_id: int, command: Command, now_ms: float) -> CommandEffects:
        """Apply one command to one rank; while its worker is busy it admits nothing.

        Raises
        ------
        CommandError
            There is no such rank, or the command is invalid. Nothing changed.
        PoisonedError
            An earlier step failed.
        """
        self._health.check()
        check_time("now_ms", now_ms)
        rank = self._rank(rank_id)
        if isinstance(command, (Submit, SubmitHandoffPrefill, ReserveDestination)):
            request_id = id_to_int(command.request.request_id)
            if request_id in rank.live:
                raise CommandError(f"request_id: {request_id} is already active")
        pending = None if rank.flying is None else rank.flying.pending
        effects = command_rank(rank.core, command, CommandContext(now_ms, rank.busy), pending, self._health)
        if isinstance(effects.result, (Submitted, DestinationAccepted)):
            rank.live.add(effects.result.request_id)
        rank.live.difference_update(effects.retired_requests)
        if effects.suppressed_pending_output and isinstance(command, CancelRequest):
            # It had ended in the pass in flight; nobody will see that end.
            rank.live.discard(id_to_int(command.request_id))
        self.refresh(rank.worker_id)
        return effects

    # ------------------------------------------------------------ passes

    def drive_ready(self, now_ms: float, collector: Collector | None = None) -> DriveEffects:
        """Start the pass of the lowest ready worker that does anything.

        Call it until it returns nothing, handling what it returns before the next call.

        Parameters
        ----------
        now_ms : float
        collector : Collector, optional
            Takes the tokens of this pass when they become visible; required by a
            visible component.

        Returns
        -------
        DriveEffects
            False if no worker could do anything.

        Raises
        ------
        CommandError
            The collector is missing, or `now_ms` is not a time. Nothing changed.
        TimingError
            A timing model failed. The component is poisoned.
        PoisonedError
            An earlier step failed.
        """
        self._health.check()
        check_time("now_ms", now_ms)
        if self.visible and collector is None:
            raise CommandError("collector: a visible component needs one")
        for worker in sorted(self.deferred):
            self.refresh(worker)
        while self.ready:
            worker = min(self.ready)
            self.ready.discard(worker)
            if not self._can_start(worker):
                continue
            effects = self._start(worker, now_ms, collector if self.visible else None)
            if effects:
                if effects.end_ms <= now_ms:
                    self.refresh(worker)
                return effects
            if self._can_start(worker):
                self.deferred.add(worker)
        return DriveEffects()

    def on_scheduled_completion(self, completion: Completion) -> PassCompletionEffects:
        """Deliver a scheduled completion: the rank crosses the end of its pass.

        A worker is free again when all of its ranks have. Deliver those of one
        instant in order of the ranks.

        Returns
        -------
        PassCompletionEffects
            Also ``completion.effects``.

        Raises
        ------
        CommandError
            It is of another role, its rank is gone, or it is not in flight. Nothing changed.
        PoisonedError
            An earlier step failed.
        """
        self._health.check()
        if completion.role is not self.role:
            raise CommandError(f"completion: is of role {completion.role.name}, the component of {self.role.name}")
        rank = self._rank(completion.rank_id)
        if rank.flying is not completion:
            raise CommandError(f"completion: is not in flight at rank {completion.rank_id}")
        rank.flying = None
        with self._health.step(rank.dp_rank):
            if completion.pending is None:
                completion.effects = rank.core.complete_idle_group_pass(completion.started_at_ms, completion.end_ms)
            else:
                completion.effects = rank.core.complete_pass(completion.pending, completion.end_ms)
        self._show(rank, completion)
        self.refresh(rank.worker_id)
        return completion.effects

    def completions_due(self, now_ms: float) -> list[Completion]:
        """Scheduled completions that end by `now_ms`, by end and rank."""
        due = [r.flying for r in self._live_ranks() if r.flying is not None and r.flying.end_ms <= now_ms]
        return sorted(due, key=lambda completion: completion.end_ms)

    @property
    def next_end_ms(self) -> float:
        """When the next scheduled completion is due; inf if none is in flight."""
        return min((r.flying.end_ms for r in self._live_ranks() if r.flying is not None), default=math.inf)

    def end_stuck_head(
        self, now_ms: float, collector: Collector | None = None, *, not_admitted: bool = False
    ) -> Completion | None:
        """End one request that blocks a deferred worker for ever, None if there is none.

        Nothing overtakes the head of a queue, so those behind it would wait for
        ever, too. Ask after each `drive_ready`, until there is none.

        Parameters
        ----------
        now_ms : float
        collector : Collector, optional
            As for `drive_ready`.
        not_admitted : bool
            Also a request that only the policy keeps out. It may change its
            mind: ask for this last of all, when nothing else can happen.
        """
        self._health.check()
        check_time("now_ms", now_ms)
        for worker in sorted(self.deferred):
            for rank in self._group(worker):
                head = rank.core.stuck_head()
                if head is None or (head.reason is FailReason.NOT_ADMITTED and not not_admitted):
                    continue
                with self._health.step(rank.dp_rank):
                    output = rank.core.fail_head()
                assert output is not None
                effects = PassCompletionEffects([output], [], (), rank.core.metrics(), _NO_WORK)
                completion = self._completion(rank, now_ms, now_ms, effects, None, collector)
                completion.stuck = head
                self._show(rank, completion)
                self.refresh(worker)
                return completion
        return None

    # ------------------------------------------------------------ lower tiers

    def next_offload_deadline_ms(self) -> float | None:
        """When the next transfer of a lower tier is over; those of native host offload only of idle workers."""
        times = (rank.core.next_internal_deadline_ms() for rank in self._live_ranks() if self._ticks(rank))
        return min((due for due in times if due is not None), default=None)

    def tick_offload(self, now_ms: float) -> list[tuple[int, InternalEffects]]:
        """Let transfers go on to `now_ms`: (rank id, what it brought) of ranks with something due, in order.

        While a worker is busy, transfers of its KVBM tiers go on and let no
        destination in; those of native host offload wait for the end of the pass.
        """
        self._health.check()
        check_time("now_ms", now_ms)
        shown = []
        for rank in self._live_ranks():
            due = rank.core.next_internal_deadline_ms()
            if due is None or due > now_ms or not self._ticks(rank):
                continue
            with self._health.step(rank.dp_rank):
                if rank.busy:
                    effects = rank.core.tick_offload_transport_only(now_ms)
                else:
                    effects = rank.core.process_internal_work(now_ms, False)
            shown.append((rank.rank_id, effects))
            self.refresh(rank.worker_id)
        return shown

    def _ticks(self, rank: ComponentRank) -> bool:
        return not rank.busy or self.config.tiers_attached is not None

    # ------------------------------------------------------------ scaling

    def apply_target_count(self, target: int, now_ms: float = 0.0, *, tick: int | None = None) -> ScaleChange:
        """Go towards `target` active and starting workers; see `WorkerPool.apply_target_count`.

        With a startup delay, call `mark_worker_ready` for each added worker when it is over. Requests
        that wait in a starting worker go with it when it is cancelled, without an output:
        ``retired_requests`` names them, and they may be dispatched again.
        """
        self._health.check()
        check_time("now_ms", now_ms)
        change = self.workers.apply_target_count(target, now_ms, drained=self._group_drained, tick=tick)
        for worker in change.added:
            self._add_group(worker)
        retired = sorted(i for worker in change.cancelled for rank in self._group(worker) for i in rank.live)
        for worker in (*change.cancelled, *change.removed):
            self._remove_group(worker)
        return change._replace(retired_requests=tuple(retired))

    def mark_worker_ready(self, worker: int, now_ms: float = 0.0) -> bool:
        """The startup delay of a worker is over; False if it is not starting (cancelled meanwhile, or unknown)."""
        self._health.check()
        if self.workers.mark_worker_ready(worker, now_ms) is None:
            return False
        self.refresh(worker)
        return True

    def remove_drained(self, now_ms: float = 0.0) -> tuple[int, ...]:
        """Remove draining workers whose ranks are all drained; their ids, ascending."""
        self._health.check()
        removed, _ = self.workers.settle(now_ms, drained=self._group_drained)
        for worker in removed:
            self._remove_group(worker)
        return removed

    # ------------------------------------------------------------ looking in

    @property
    def in_flight(self) -> int:
        """Requests accepted by any rank that have not ended visibly."""
        return sum(rank.in_flight for rank in self._live_ranks())

    @property
    def drained(self) -> bool:
        """Whether nothing is left in any worker and no pass is in flight."""
        return all(rank.drained for rank in self._live_ranks())

    @property
    def poison_reason(self) -> str | None:
        """Why the component refuses every change; None: it does not."""
        return self._health.reason

    def rank_id(self, worker: int, dp_rank: int) -> int:
        """Id of a rank of a live worker.

        Raises
        ------
        CommandError
            If there is none.
        """
        group = self.groups[worker] if 0 <= worker < len(self.groups) else None
        if group is None or not 0 <= dp_rank < self.dp_size:
            raise CommandError(f"worker: no rank {dp_rank} of worker {worker}")
        return group[dp_rank]

    def check_integrity(self) -> None:
        """Verify the state of every rank, and that exactly those that can start a pass are known to.

        Raises
        ------
        IntegrityError
            Naming the first invariant that does not hold.
        """
        for rank in self._live_ranks():
            rank.core.check_integrity()
        able = {worker for worker, group in enumerate(self.groups) if group is not None and self._can_start(worker)}
        if self.ready & self.deferred or self.ready | self.deferred != able:
            raise IntegrityError(f"workers {sorted(able)} can start, ready {self.ready}, deferred {self.deferred}")

    def refresh(self, worker: int) -> None:
        """See anew whether a worker may start a pass; after anything that may have changed it."""
        self.deferred.discard(worker)
        if self._can_start(worker):
            self.ready.add(worker)
        else:
            self.ready.discard(worker)

    # ------------------------------------------------------------ inside

    def _start(self, worker: int, now_ms: float, collector: Collector | None) -> DriveEffects:
        """A pass of a worker; as long as it does nothing and its ranks ask for another try, another one."""
        while True:
            effects, retry = self._execute(worker, now_ms, collector)
            if effects or retry not in _TRY_AGAIN or not self._can_start(worker):
                return effects

    def _execute(
        self, worker: int, now_ms: float, collector: Collector | None
    ) -> tuple[DriveEffects, SameTimestampRetry]:
        group = self._group(worker)
        cores = [rank.core for rank in group]
        passes = execute_ranks(cores, runnable_ranks(cores), self._wave_steps[worker], now_ms, self._health)
        end_ms = max(now_ms, *(p.end_ms for p in passes.values()))
        self._wave_steps[worker] += 1
        effects = DriveEffects(worker, end_ms)
        for rank in group:
            executed = passes.get(rank.dp_rank)
            if executed is None:
                if end_ms > now_ms:
                    idle = _NO_WORK._replace(duration_ms=end_ms - now_ms)
                    nothing = PassCompletionEffects((), [], (), rank.core.metrics(), idle)
                    rank.flying = self._completion(rank, now_ms, end_ms, nothing, None, None)
                    effects.scheduled.append(rank.flying)
                continue
            shown, kept = executed.start_effects, executed.pending.effects
            effects.admissions += shown.admissions
            effects.pressure_events += shown.pressure_events
            effects.pass_start_events += shown.kv_events
            kept.forward_pass_metrics = kept.forward_pass_metrics._replace(duration_ms=end_ms - now_ms)
            completion = self._completion(rank, now_ms, end_ms, kept, executed.pending, collector)
            if end_ms > now_ms:
                rank.flying = completion
                effects.scheduled.append(completion)
                continue
            progressed = rank.core.last_pass_progressed
            with self._health.step(rank.dp_rank):
                rank.core.complete_pass(executed.pending, now_ms)
            if progressed or kept.outputs or kept.lifecycle_events or kept.kv_events:
                self._show(rank, completion)
                effects.immediate.append(completion)
        if all(core.is_drained() for core in cores):
            self._wave_steps[worker] = 0
        return effects, merge_retries([p.same_timestamp_retry for p in passes.values()])

    def _completion(
        self,
        rank: ComponentRank,
        start_ms: float,
        end_ms: float,
        effects: PassCompletionEffects,
        pending: PendingPass | None,
        collector: Collector | None,
    ) -> Completion:
        return Completion(
            self.role,
            rank.worker_id,
            rank.dp_rank,
            rank.rank_id,
            start_ms,
            end_ms,
            effects,
            pending,
            _collector=collector,
        )

    def _show(self, rank: ComponentRank, completion: Completion) -> None:
        """The outputs of a completion become visible."""
        collector = completion._collector
        for output in completion.effects.outputs:
            if output.token_id is not None and collector is not None:
                collector.record_token(output.request_id, output.token_id, completion.end_ms)
            if output.completed:
                rank.live.discard(output.request_id)

    def _can_start(self, worker: int) -> bool:
        """Whether a worker is there, started, idle and has something to run."""
        if self.groups[worker] is None or worker in self.workers.starting_ids:
            return False
        group = self._group(worker)
        return not any(rank.busy for rank in group) and bool(runnable_ranks([rank.core for rank in group]))

    def _group_drained(self, worker: int) -> bool:
        return all(rank.drained for rank in self._group(worker))

    def _add_group(self, worker: int) -> None:
        first = len(self.ranks)
        for dp_rank in range(self.dp_size):
            identity = RankIdentity(worker, dp_rank, self.dp_size)
            core = SchedulerRank(identity, self.config, timing=self._timing, policy=self._policy)
            self.ranks.append(ComponentRank(first + dp_rank, worker, dp_rank, core))
        self.groups.append(tuple(range(first, first + self.dp_size)))
        self._wave_steps.append(0)

    def _remove_group(self, worker: int) -> None:
        for rank in self._group(worker):
            self.ranks[rank.rank_id] = None
        self.groups[worker] = None
        self.ready.discard(worker)
        self.deferred.discard(worker)

    def _group(self, worker: int) -> list[ComponentRank]:
        return [self._rank(rank_id) for rank_id in self.groups[worker] or ()]

    def _live_ranks(self) -> Iterator[ComponentRank]:
        return (rank for rank in self.ranks if rank is not None)

    def _rank(self, rank_id: int) -> ComponentRank:
        rank = None
        if not isinstance(rank_id, bool) and isinstance(rank_id, int) and 0 <= rank_id < len(self.ranks):
            rank = self.ranks[rank_id]
        if rank is None:
            raise CommandError(f"rank_id: there is no rank {rank_id!r}")
        return rank
