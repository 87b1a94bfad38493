"""An attention-DP group: ranks that share one barrier (spec/engine-contract.md section 6).

The group owns the barrier and nothing else. It never looks into requests,
events or metrics; all scheduler and cache state is of its ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvsim.config import EngineConfig
from kvsim.contract import (
    Command,
    CommandContext,
    CommandEffects,
    InternalEffects,
    Metrics,
    PassCompletionEffects,
    PassStartEffects,
    PendingPass,
    RankIdentity,
    RankPass,
    SameTimestampRetry,
)
from kvsim.errors import CommandError, ConfigError, InternalWorkDueError, PoisonedError, TimingError
from kvsim.policies import Policy
from kvsim.rank import SchedulerRank

__all__ = [
    "EngineGroup",
    "GroupPass",
    "Health",
    "check_time",
    "command_rank",
    "execute_ranks",
    "merge_retries",
    "runnable_ranks",
]

#: What a group does when its ranks disagree: the first of these that any rank says.
_RETRY_ORDER = (SameTimestampRetry.COUNTDOWN, SameTimestampRetry.RETRY, SameTimestampRetry.EXHAUSTED)


@dataclass(frozen=True, slots=True)
class GroupPass:
    """Result of `EngineGroup.execute_pass`.

    Attributes
    ----------
    pass_id : int
        Names the pass to `EngineGroup.complete_pass`; counts from 0.
    start_ms, end_ms : float
        From now to the end of the slowest rank.
    participating : int
        Ranks that cross the boundary: all of the group.
    executed : tuple of int
        Ranks that ran a pass; the others were idle.
    same_timestamp_retry : SameTimestampRetry
        What the hints of the ranks amount to.
    countdown : int
        Rounds left of a COUNTDOWN, the largest of any rank; else 0.
    start_effects : tuple of PassStartEffects
        By rank; empty for idle ones.
    """

    pass_id: int
    start_ms: float
    end_ms: float
    participating: int
    executed: tuple[int, ...]
    same_timestamp_retry: SameTimestampRetry
    countdown: int
    start_effects: tuple[PassStartEffects, ...]


@dataclass(slots=True)
class _Pending:
    executed: GroupPass
    passes: dict[int, PendingPass]


class Health:
    """Whether something broke in the middle of a change. The first reason stands.

    Attributes
    ----------
    reason : str or None
        None: all is well.
    """

    __slots__ = ("_cause", "reason")

    def __init__(self) -> None:
        self.reason: str | None = None
        self._cause: BaseException | None = None

    def check(self) -> None:
        """Raise PoisonedError with the reason, if there is one."""
        if self.reason is not None:
            raise PoisonedError(f"an earlier step failed: {self.reason}") from self._cause

    @contextmanager
    def step(self, dp_rank: int) -> Iterator[None]:
        """A step of a rank that cannot be taken back: whatever it raises poisons the group, and goes on."""
        try:
            yield
        except BaseException as error:
            if self.reason is None:
                self.reason, self._cause = f"rank {dp_rank}: {error}", error
            raise


def runnable_ranks(ranks: Sequence[SchedulerRank]) -> list[int]:
    """Which ranks of an idle group take part in a pass that starts now, in order.

    Those that could form a pass and need no command for it. A rank that has no
    request and only counts the passes since a prefill takes part only if no
    sibling has a request: the interval counts rounds of the group.
    """
    ready = [i for i, rank in enumerate(ranks) if rank.is_ready() and not rank.waiting_for_external_command()]
    if not any(ranks[i].prefill_countdown for i in ready):
        return ready
    return [i for i in ready if not ranks[i].is_empty()] or ready


def execute_ranks(
    ranks: Sequence[SchedulerRank], runnable: Sequence[int], wave_step: int, now_ms: float, health: Health
) -> dict[int, RankPass]:
    """Run one pass of a group: every runnable rank in order, then what depends on all of them.

    Parameters
    ----------
    ranks : sequence of SchedulerRank
        All of the group.
    runnable : sequence of int
        As from `runnable_ranks`.
    wave_step : int
        Passes of the group since it was last drained.
    now_ms : float
    health : Health
        Poisoned if a rank fails.

    Returns
    -------
    dict of int to RankPass
        By number of the rank, in order.
    """
    for i, rank in enumerate(ranks):
        with health.step(i):
            rank.prepare_group_pass(wave_step, len(ranks))
    passes: dict[int, RankPass] = {}
    for i in runnable:
        with health.step(i):
            passes[i] = ranks[i].execute_pass(now_ms)
            if not passes[i].end_ms >= now_ms:
                raise TimingError(f"a pass of {now_ms} ended before it started, at {passes[i].end_ms}")
    if len(ranks) > 1:
        prefilled = any(p.pending.effects.forward_pass_metrics.sum_prefill_tokens > 0 for p in passes.values())
        worked = prefilled or any(p.end_ms > now_ms for p in passes.values())
        for i, rank in enumerate(ranks):
            with health.step(i):
                rank.observe_group_pass(executed=i in passes, prefilled=prefilled, worked=worked)
    return passes


def command_rank(
    rank: SchedulerRank, command: Command, context: CommandContext, pending: PendingPass | None, health: Health
) -> CommandEffects:
    """Apply a command to a rank of a group: what is refused changes nothing, all else that fails poisons."""
    try:
        return rank.apply_command(command, context, pending)
    except CommandError:
        raise
    except BaseException:
        with health.step(rank.identity.dp_rank):
            raise


def merge_retries(hints: Sequence[SameTimestampRetry]) -> SameTimestampRetry:
    """The hint of a group: a countdown beats all, then a retry, then exhaustion."""
    for hint in _RETRY_ORDER:
        if hint in hints:
            return hint
    return SameTimestampRetry.NOT_APPLICABLE


class EngineGroup:
    """A worker of `dp_size` ranks whose passes start together and end with the slowest.

    Parameters
    ----------
    worker_id : int
        Logical engine, 0 <= worker_id < 2**64.
    dp_size : int
        Ranks, at least 1.
    factory : callable
        Makes the rank of a `RankIdentity`; called in order of the ranks.

    Raises
    ------
    ConfigError
        A rank cannot be made; names it.

    Notes
    -----
    A failure in the middle of a pass poisons the group: what may still be read
    can be read, every later change raises `PoisonedError` with the first reason.
    A refused command changes nothing and does not poison.
    """

    __slots__ = ("_health", "_next_pass", "_pending", "dp_size", "ranks", "wave_step", "worker_id")

    def __init__(self, worker_id: int, dp_size: int, factory: Callable[[RankIdentity], SchedulerRank]) -> None:
        if isinstance(dp_size, bool) or not isinstance(dp_size, int) or dp_size < 1:
            raise ConfigError("dp_size", f"must be an int >= 1, got {dp_size!r}")
        ranks = []
        for dp_rank in range(dp_size):
            try:
                ranks.append(factory(RankIdentity(worker_id, dp_rank, dp_size)))
            except Exception as error:
                raise ConfigError(f"rank {dp_rank}", str(error)) from error
        self.worker_id = worker_id
        self.dp_size = dp_size
        self.ranks = tuple(ranks)
        #: Passes since the group was last drained.
        self.wave_step = 0
        self._next_pass = 0
        self._pending: _Pending | None = None
        self._health = Health()

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        worker_id: int = 0,
        dp_size: int = 1,
        timing: Any = None,
        policy: Policy | str | None = None,
    ) -> EngineGroup:
        """Group of equal ranks, each with its share of `config` (`EngineConfig.for_attention_dp`)."""
        share = config.for_attention_dp(dp_size)
        return cls(worker_id, dp_size, lambda identity: SchedulerRank(identity, share, timing=timing, policy=policy))

    # ------------------------------------------------------------ commands

    def apply_command(self, dp_rank: int, command: Command, now_ms: float) -> CommandEffects:
        """Apply one command to one rank.

        Parameters
        ----------
        dp_rank : int
        command : Command
        now_ms : float
            Finite, >= 0.

        Raises
        ------
        InternalWorkDueError
            A transfer of an idle group is due at `now_ms`: call `process_internal_work`, then repeat.
        CommandError
            The command is invalid. Nothing changed.
        PoisonedError
            An earlier step failed.
        """
        self._health.check()
        check_time("now_ms", now_ms)
        rank = self._rank(dp_rank)
        pending = None
        if self._pending is not None:
            pending = self._pending.passes.get(dp_rank)
        else:
            due = self.next_internal_deadline_ms()
            if due is not None and due <= now_ms:
                raise InternalWorkDueError(
                    f"now_ms: internal work of {due} is due at {now_ms}; process it, then repeat the command"
                )
        context = CommandContext(now_ms, self._pending is not None)
        effects = command_rank(rank, command, context, pending, self._health)
        self._settle_wave()
        return effects

    # ------------------------------------------------------------ the pass

    def execute_pass(self, now_ms: float) -> GroupPass | None:
        """Start a pass of the group at `now_ms`; None if no rank is runnable.

        Raises
        ------
        CommandError
            A pass is in flight, or `now_ms` is not a time. Nothing changed.
        TimingError
            A timing model failed or returned nonsense. The group is poisoned.
        PoisonedError
            An earlier step failed.
        """
        self._health.check()
        check_time("now_ms", now_ms)
        if self._pending is not None:
            raise CommandError(f"execute_pass: pass {self._pending.executed.pass_id} is in flight")
        runnable = runnable_ranks(self.ranks)
        if not runnable:
            return None
        passes = execute_ranks(self.ranks, runnable, self.wave_step, now_ms, self._health)
        retry = merge_retries([p.same_timestamp_retry for p in passes.values()])
        idle = PassStartEffects((), ())
        executed = GroupPass(
            self._next_pass,
            now_ms,
            max(now_ms, *(p.end_ms for p in passes.values())),
            self.dp_size,
            tuple(passes),
            retry,
            _rounds_left(self.ranks, passes) if retry is SameTimestampRetry.COUNTDOWN else 0,
            tuple(passes[i].start_effects if i in passes else idle for i in range(self.dp_size)),
        )
        self._pending = _Pending(executed, {i: p.pending for i, p in passes.items()})
        self._next_pass += 1
        self.wave_step += 1
        return executed

    def complete_pass(self, pass_id: int, end_ms: float) -> tuple[PassCompletionEffects, ...]:
        """End the pass in flight.

        Parameters
        ----------
        pass_id : int
            Of the `GroupPass`.
        end_ms : float
            Not before the modelled end. A wall clock may be late; the ranks end when the model says.

        Returns
        -------
        tuple of PassCompletionEffects
            By rank; idle ones crossed the boundary.

        Raises
        ------
        CommandError
            That pass is not in flight, or ends later. Nothing changed.
        PoisonedError
            An earlier step failed.
        """
        self._health.check()
        pending = self._pending
        if pending is None or pending.executed.pass_id != pass_id:
            flying = "none is" if pending is None else f"{pending.executed.pass_id} is"
            raise CommandError(f"pass_id: pass {pass_id} is not in flight, {flying}")
        start_ms, modelled_ms = pending.executed.start_ms, pending.executed.end_ms
        if not math.isfinite(end_ms) or end_ms < modelled_ms:
            raise CommandError(f"end_ms: must be finite and >= {modelled_ms}, got {end_ms}")
        effects = []
        for i, rank in enumerate(self.ranks):
            with self._health.step(i):
                if i in pending.passes:
                    effects.append(rank.complete_pass(pending.passes[i], modelled_ms))
                else:
                    effects.append(rank.complete_idle_group_pass(start_ms, modelled_ms))
        self._pending = None
        self._settle_wave()
        return tuple(effects)

    @property
    def pass_in_flight(self) -> GroupPass | None:
        """The pass that executes, None between passes."""
        return None if self._pending is None else self._pending.executed

    # ------------------------------------------------------------ internal work

    def next_internal_deadline_ms(self) -> float | None:
        """Earliest end of a transfer of any rank; None while a pass is in flight."""
        if self._pending is not None:
            return None
        return min((due for rank in self.ranks if (due := rank.next_internal_deadline_ms()) is not None), default=None)

    def process_internal_work(self, now_ms: float) -> tuple[InternalEffects, ...]:
        """Settle transfers due at `now_ms`, by rank; nothing at all while a pass is in flight."""
        self._health.check()
        check_time("now_ms", now_ms)
        effects = [InternalEffects() for _ in self.ranks]
        if self._pending is not None:
            return tuple(effects)
        for i, rank in enumerate(self.ranks):
            due = rank.next_internal_deadline_ms()
            if due is None or due > now_ms:
                continue
            with self._health.step(i):
                effects[i] = rank.process_internal_work(now_ms, False)
        self._settle_wave()
        return tuple(effects)

    # ------------------------------------------------------------ readiness

    def is_ready(self) -> bool:
        """Whether `execute_pass` would start a pass."""
        return self.poison_reason is None and self._pending is None and bool(runnable_ranks(self.ranks))

    def waiting_for_external_command(self) -> bool:
        """Whether there is work, but none that goes on without a command."""
        if self.poison_reason is not None or self._pending is not None:
            return False
        ready = [rank for rank in self.ranks if rank.is_ready()]
        return bool(ready) and all(rank.waiting_for_external_command() for rank in ready)

    def is_drained(self) -> bool:
        """Whether nothing is left in any rank and no pass is in flight."""
        return self.poison_reason is None and self._pending is None and all(rank.is_drained() for rank in self.ranks)

    @property
    def poison_reason(self) -> str | None:
        """Why the group refuses every change; None: it does not."""
        return self._health.reason

    def metrics(self) -> tuple[Metrics, ...]:
        """Occupancy now, by rank."""
        return tuple(rank.metrics() for rank in self.ranks)

    def check_integrity(self) -> None:
        """Verify every invariant of every rank; see `SchedulerRank.check_integrity`."""
        for rank in self.ranks:
            rank.check_integrity()

    # ------------------------------------------------------------ inside

    def _rank(self, dp_rank: int) -> SchedulerRank:
        if isinstance(dp_rank, bool) or not isinstance(dp_rank, int) or not 0 <= dp_rank < self.dp_size:
            raise CommandError(f"dp_rank: must lie in 0 <= dp_rank < {self.dp_size}, got {dp_rank!r}")
        return self.ranks[dp_rank]

    def _settle_wave(self) -> None:
        if self._pending is None and all(rank.is_drained() for rank in self.ranks):
            self.wave_step = 0


def _rounds_left(ranks: Sequence[SchedulerRank], passes: dict[int, RankPass]) -> int:
    return max(
        ranks[i].prefill_countdown for i, p in passes.items() if p.same_timestamp_retry is SameTimestampRetry.COUNTDOWN
    )


def check_time(name: str, value: float) -> None:
    """Refuse what is not a time with a CommandError that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise CommandError(f"{name}: must be finite and >= 0, got {value!r}")
