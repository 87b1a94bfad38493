"""What-ifs from one instant: the same rank, forked, under different commands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvsim.contract import Command, CommandContext, Metrics, Output, RankPass, SameTimestampRetry
from kvsim.errors import ConfigError
from kvsim.rank import SchedulerRank

__all__ = ["BranchResult", "branch"]

Variant: TypeAlias = "Callable[[SchedulerRank, float], object] | Iterable[tuple[float, Command]]"

_AGAIN = (SameTimestampRetry.RETRY, SameTimestampRetry.COUNTDOWN)


@dataclass(frozen=True, slots=True)
class BranchResult:
    """What became of one variant.

    Attributes
    ----------
    outputs : tuple of (float, Output)
        Every output signal with the time (ms) at which it was visible.
    passes : int
        Passes that ended.
    now_ms : float
        End of the horizon; if every request ended before, the end of the last pass.
    in_flight : RankPass or None
        The pass that the horizon cuts: executed, its outputs not yet visible.
    metrics : Metrics
        Occupancy then.
    rank : SchedulerRank
        The fork, to go on with.
    """

    outputs: tuple[tuple[float, Output], ...]
    passes: int
    now_ms: float
    in_flight: RankPass | None
    metrics: Metrics
    rank: SchedulerRank

    @property
    def tokens(self) -> int:
        """Tokens that became visible."""
        return sum(output.token_id is not None for _, output in self.outputs)

    @property
    def completed(self) -> tuple[int, ...]:
        """Ids of the requests that completed, in order."""
        return tuple(
            output.request_id
            for _, output in self.outputs
            if output.completed and not output.rejected and not output.failed
        )

    def first_token_ms(self, request_id: int) -> float | None:
        """When the first token of a request after the fork was visible, None if none was."""
        times = (at for at, output in self.outputs if output.request_id == request_id and output.token_id is not None)
        return next(times, None)


def branch(
    rank: SchedulerRank, variants: Iterable[Variant], horizon_ms: float, *, now_ms: float = 0.0
) -> list[BranchResult]:
    """Fork a rank once per variant and let each fork run.

    Parameters
    ----------
    rank : SchedulerRank
        Between two passes; it is not changed.
    variants : iterable
        Each either a callable, called with the fork and `now_ms`, that applies
        commands; or a list of (time in ms, command), applied at their times,
        those of one time in the order given. An empty list is "nothing changes".
    horizon_ms : float
        Virtual time to run for, finite, >= 0. What happens exactly at its end
        still happens; commands and passes later than that do not.
    now_ms : float
        The present, finite, >= 0: the end of the last completed pass of the rank.

    Returns
    -------
    list of BranchResult
        In the order of the variants.

    Raises
    ------
    ConfigError
        An argument is not allowed, or a command lies before `now_ms`.
    CommandError
        A rank refuses a command.
    """
    for name, value in (("horizon_ms", horizon_ms), ("now_ms", now_ms)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ConfigError(name, f"must be finite and >= 0, got {value!r}")
    results = []
    for number, variant in enumerate(variants):
        fork = rank.fork()
        commands: list[tuple[float, Command]] = []
        if callable(variant):
            variant(fork, now_ms)
        else:
            commands = _in_order(variant, number, now_ms)
        results.append(_run(fork, commands, now_ms, now_ms + horizon_ms))
    return results


def _in_order(variant: Iterable[tuple[float, Command]], number: int, now_ms: float) -> list[tuple[float, Command]]:
    commands = []
    for item in variant:
        if not isinstance(item, tuple) or len(item) != 2:
            raise ConfigError(f"variants[{number}]", f"expected pairs of time and command, got {item!r}")
        at, command = item
        if isinstance(at, bool) or not isinstance(at, (int, float)) or not now_ms <= at < math.inf:
            raise ConfigError(f"variants[{number}]", f"times must be finite and >= now_ms ({now_ms}), got {at!r}")
        commands.append((float(at), command))
    return sorted(commands, key=lambda item: item[0])


def _run(rank: SchedulerRank, commands: Sequence[tuple[float, Command]], now: float, end: float) -> BranchResult:
    """Commands and passes of one fork up to `end`."""
    outputs: list[tuple[float, Output]] = []
    passes = 0
    due = 0  # commands applied so far
    in_flight: RankPass | None = None
    while True:
        while due < len(commands) and commands[due][0] <= now:
            rank.apply_command(commands[due][1], CommandContext(now))
            due += 1
        if rank.is_ready():
            started = rank.execute_pass(now)
            while due < len(commands) and commands[due][0] < started.end_ms and commands[due][0] <= end:
                at, command = commands[due]
                rank.apply_command(command, CommandContext(at, pass_in_flight=True), started.pending)
                due += 1
            if started.end_ms > end:
                in_flight, now = started, end
                break
            shown = rank.complete_pass(started.pending, started.end_ms)
            now = started.end_ms
            passes += 1
            outputs += [(now, output) for output in shown.outputs]
            if not rank.header[0]["effect_free"] or started.same_timestamp_retry in _AGAIN:
                continue
            # Nothing runs and the head of the queue does not fit: it never will.
            failed = rank.fail_head()
            if failed is not None:
                outputs.append((now, failed))
                continue
        wake = commands[due][0] if due < len(commands) else math.inf
        if wake > end:
            now = end if rank.is_ready() or due < len(commands) else now
            break
        now = wake
    return BranchResult(tuple(outputs), passes, now, in_flight, rank.metrics(), rank)
