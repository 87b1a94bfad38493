"""Drives one rank with a host tier the way an event loop does, and keeps all it shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvsim.config import EngineConfig
from kvsim.contract import (
    Admission,
    Command,
    CommandContext,
    CommandEffects,
    HostOffloadEvent,
    KvEvent,
    Output,
    PassCompletionEffects,
    RankIdentity,
    RankPass,
    Request,
    Submit,
)
from kvsim.layout import OffloadEventKind
from kvsim.offload import HostOffloadRecorder
from kvsim.rank import SchedulerRank

LOAD_ENDS = (OffloadEventKind.LOAD_COMPLETED, OffloadEventKind.LOAD_CANCELLED)


class Driver:
    """One rank and its clock; invariants are checked after every call."""

    def __init__(self, config: EngineConfig, *, check: bool = True) -> None:
        self.recorder = HostOffloadRecorder()
        self.rank = SchedulerRank(RankIdentity(worker_id=2), config, observer=self.recorder)
        self.now = 0.0
        self.flight: RankPass | None = None
        self.outputs: list[tuple[float, Output]] = []
        self.kv: list[tuple[float, KvEvent]] = []
        self.admissions: list[tuple[float, Admission]] = []
        self.idle = False
        self._check = check

    # ------------------------------------------------------------ one call each

    def check(self) -> None:
        if self._check:
            self.rank.check_integrity()

    def do(self, command: Command, *, at: float | None = None) -> CommandEffects:
        """Apply a command, to the pass in flight if there is one."""
        at = self.now if at is None else at
        pending = None if self.flight is None else self.flight.pending
        self.idle = False
        effects = self.rank.apply_command(command, CommandContext(at, self.flight is not None), pending)
        self.kv += [(at, event) for event in effects.kv_events]
        self.check()
        return effects

    def submit(self, number: int, tokens: Sequence[int], out: int = 0, *, at: float | None = None) -> CommandEffects:
        return self.do(Submit(Request(number, list(tokens), out)), at=at)

    def execute(self, at: float | None = None) -> RankPass:
        self.now = self.now if at is None else at
        self.flight = self.rank.execute_pass(self.now)
        self.admissions += [(self.now, admission) for admission in self.flight.start_effects.admissions]
        self.check()
        return self.flight

    def complete(self) -> PassCompletionEffects:
        assert self.flight is not None
        self.now = self.flight.end_ms
        effects = self.rank.complete_pass(self.flight.pending, self.now)
        self.flight = None
        self.outputs += [(self.now, output) for output in effects.outputs]
        self.kv += [(self.now, event) for event in effects.kv_events]
        self.check()
        return effects

    def work(self, at: float) -> None:
        """Internal work while no pass is in flight."""
        self.now = at
        self.idle = False
        effects = self.rank.process_internal_work(at, False)
        self.kv += [(at, event) for event in effects.kv_events]
        self.check()

    # ------------------------------------------------------------ many calls

    def settle(self) -> float:
        """Wait for every transfer under way; the time then."""
        while (deadline := self.rank.next_internal_deadline_ms()) is not None:
            self.work(max(self.now, deadline))
        return self.now

    def whole(self, number: int, tokens: Sequence[int], out: int = 0) -> float:
        """Submit a request to an idle rank and run one pass; its end."""
        self.submit(number, tokens, out)
        self.execute()
        self.complete()
        return self.now

    def advance(self, before: float = math.inf) -> bool:
        """Do what happens next, if it does before an arrival at that time; passes start after arrivals."""
        if self.flight is not None:
            if self.flight.end_ms > before:
                return False
            self.complete()
            return True
        deadline = self.rank.next_internal_deadline_ms()
        if deadline is not None and deadline <= self.now:
            self.work(self.now)
        elif self.rank.is_ready() and not self.idle and self.now < before:
            if self.execute().end_ms == self.now:
                self.complete()
                self.idle = not self.rank.last_pass_progressed
        elif self.idle and self.rank.fail_head() is not None:
            self.idle = False
        elif deadline is not None and deadline <= before:
            self.work(deadline)
        else:
            return False
        return True

    def run(self) -> None:
        """Everything that happens without a further command."""
        while self.advance():
            pass

    def replay(self, requests: Sequence[dict[str, Any]]) -> None:
        """Run requests (arrival_time_ms, input_token_ids, output_tokens, output_token_ids) to the end, ids from 1."""
        order = sorted(range(len(requests)), key=lambda i: (requests[i]["arrival_time_ms"], i))
        for number, index in enumerate(order, 1):
            row = requests[index]
            arrival = float(row["arrival_time_ms"])
            while self.advance(arrival):
                pass
            self.now = max(self.now, arrival) if self.flight is None else self.now
            planned = row.get("output_token_ids")
            self.do(Submit(Request(number, row["input_token_ids"], row["output_tokens"], planned)), at=arrival)
        self.run()

    # ------------------------------------------------------------ looking

    def seen(self, *kinds: OffloadEventKind, request: int | None = None) -> list[tuple[int, HostOffloadEvent]]:
        """Observations so far, of some kinds or all, of one request or all."""
        return [
            (number, event)
            for number, event in self.recorder.records
            if (not kinds or event.kind in kinds) and (request is None or number == request)
        ]

    def running(self) -> list[int]:
        return [int(self.rank.requests[slot]["id_lo"]) for slot in self.rank.running]

    def connector(self) -> list[int]:
        return [int(self.rank.requests[slot]["id_lo"]) for slot in self.rank.connector]
