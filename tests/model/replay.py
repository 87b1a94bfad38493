"""A tiny event-driven replay over the twin: several workers, round robin (replay.md sections 2 to 4 and 9)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsim.config import EngineConfig
from kvsim.contract import (
    CommandContext,
    KvEvent,
    Output,
    PassCompletionEffects,
    RankIdentity,
    Request,
    SameTimestampRetry,
    Submit,
)
from model.host import Record as HostRecord
from model.paged import PagedModel, prompt_tokens
from model.sglang import SglangModel

Model = PagedModel | SglangModel
Factory = Callable[[RankIdentity, EngineConfig], Model]


#: hints after which an effect-free pass is followed by another at the same time
TRY_AGAIN = (SameTimestampRetry.RETRY, SameTimestampRetry.COUNTDOWN)


def model_of(identity: RankIdentity, config: EngineConfig) -> Model:
    """The twin of the backend of a configuration."""
    return SglangModel(identity, config) if config.backend == "sglang" else PagedModel(identity, config)


@dataclass
class Record:
    """What became of one request; times are ms, None where it did not happen."""

    request_id: int
    arrival_ms: float
    input_tokens: int
    requested_output_tokens: int
    worker: int
    first_admit_ms: float | None = None
    first_token_ms: float | None = None
    second_token_ms: float | None = None
    last_token_ms: float | None = None
    terminal_ms: float | None = None
    status: str = "unfinished"
    reason: str | None = None
    outputs: list[int] = field(default_factory=list)
    #: (when, reused tokens) of every admission
    admissions: list[tuple[float, int]] = field(default_factory=list)
    preemptions: int = 0

    @property
    def reused_tokens(self) -> int:
        return max((reused for _, reused in self.admissions), default=0)

    @property
    def first_reused_tokens(self) -> int:
        return self.admissions[0][1] if self.admissions else 0


@dataclass
class Result:
    records: dict[int, Record]
    #: (when, worker, signal) in order of emission
    outputs: list[tuple[float, int, Output]]
    #: per worker: (when, event)
    kv_events: list[list[tuple[float, KvEvent]]]
    #: per worker: what happened to its host memory
    host_records: list[list[HostRecord]] = field(default_factory=list)


@dataclass
class Worker:
    model: Model
    pending: Any = None
    end_ms: float = math.inf
    in_flight: int = 0


class Replay:
    """One run. `run` may be called once."""

    def __init__(
        self,
        config: EngineConfig,
        requests: Sequence[Request],
        *,
        workers: int = 1,
        max_in_flight: int | None = None,
        max_sim_time_ms: float = math.inf,
        check: bool = False,
        factory: Factory = model_of,
    ) -> None:
        self.workers = [Worker(factory(RankIdentity(index, 0, 1), config)) for index in range(workers)]
        #: stable by arrival
        self.queue = sorted(requests, key=lambda request: request.arrival_ms or 0.0)
        self.max_in_flight = max_in_flight
        self.max_sim_time_ms = max_sim_time_ms
        self.check = check
        self.placed = 0
        self.now = 0.0
        self.result = Result({}, [], [[] for _ in range(workers)])

    def run(self) -> Result:
        while True:
            self._settle()
            times = [worker.end_ms for worker in self.workers]
            times += [deadline for deadline in map(self._deadline, self.workers) if deadline is not None]
            if self.queue and self.max_in_flight is None:
                times.append(self.queue[0].arrival_ms or 0.0)
            self.now = min(times)
            if self.now > self.max_sim_time_ms or self.now == math.inf:
                tiers = [getattr(worker.model, "host", None) for worker in self.workers]
                self.result.host_records = [[] if tier is None else tier.records for tier in tiers]
                return self.result

    def _settle(self) -> None:
        """Everything that happens at `now`, until nothing changes."""
        changed = True
        while changed:
            changed = self._work_internally()
            changed |= self._complete_due()
            changed |= self._release_arrivals()
            while self._drive():
                changed = True

    @staticmethod
    def _deadline(worker: Worker) -> float | None:
        """When a transfer of an idle worker ends; a busy one sees it at the end of its pass."""
        return None if worker.pending is not None else worker.model.next_internal_deadline_ms()

    def _work_internally(self) -> bool:
        did = False
        for index, worker in enumerate(self.workers):
            deadline = self._deadline(worker)
            if deadline is not None and deadline <= self.now:
                did = True
                effects = worker.model.process_internal_work(self.now)
                self.result.kv_events[index] += [(self.now, event) for event in effects.kv_events]
        return did

    def _complete_due(self) -> bool:
        due = [index for index, worker in enumerate(self.workers) if worker.end_ms == self.now]
        for index in due:
            worker = self.workers[index]
            pending, worker.pending, worker.end_ms = worker.pending, None, math.inf
            self._show(index, worker.model.complete_pass(pending, self.now))
        return bool(due)

    def _release_arrivals(self) -> bool:
        released = False
        while self.queue:
            request = self.queue[0]
            arrival = request.arrival_ms or 0.0
            if self.max_in_flight is None:
                if arrival > self.now:
                    break
            else:
                if sum(worker.in_flight for worker in self.workers) >= self.max_in_flight:
                    break
                arrival = self.now
            self.queue.pop(0)
            self._place(request, arrival)
            released = True
        return released

    def _place(self, request: Request, arrival_ms: float) -> None:
        index = self.placed % len(self.workers)
        self.placed += 1
        worker = self.workers[index]
        request_id = int(request.request_id)
        planned = request.output_token_ids
        wanted = request.max_output_tokens if planned is None else len(planned)
        length = len(prompt_tokens(request))
        self.result.records[request_id] = Record(request_id, arrival_ms, length, wanted, index)
        busy = worker.pending is not None
        worker.model.apply_command(Submit(request), CommandContext(self.now, busy), worker.pending)
        worker.in_flight += 1

    def _drive(self) -> bool:
        """Start the pass of the first idle worker that does something; False if none does."""
        for index, worker in enumerate(self.workers):
            if worker.pending is not None or not worker.model.is_ready():
                continue
            outcome = worker.model.execute_pass(self.now)
            if self.check:
                worker.model.check()
            for admission in outcome.start_effects.admissions:
                record = self.result.records[admission.request_id]
                record.admissions.append((self.now, admission.reused_input_tokens))
                if record.first_admit_ms is None:
                    record.first_admit_ms = self.now
            for event in outcome.start_effects.pressure_events:
                self.result.records[event.request_id].preemptions += 1
            self.result.kv_events[index] += [(self.now, event) for event in outcome.start_effects.kv_events]
            if outcome.end_ms > self.now:
                worker.pending, worker.end_ms = outcome.pending, outcome.end_ms
                return True
            self._show(index, worker.model.complete_pass(outcome.pending, self.now))
            if not worker.model.last_pass_effect_free or outcome.same_timestamp_retry in TRY_AGAIN:
                return True
            if self._end_stuck(index, worker.model):
                return True
        return False

    def _end_stuck(self, index: int, model: Model) -> bool:
        """End the request that keeps a worker from any progress; False if there is none."""
        stuck = model.stuck_head()
        if stuck is not None:
            output = model.fail_head(self.now)
        elif isinstance(model, SglangModel) and (stuck := model.stuck_running()) is not None:
            output = model.fail_running()
        else:
            return False
        self.result.records[stuck[0]].reason = stuck[1]
        self._signal(index, output)
        return True

    def _show(self, index: int, effects: PassCompletionEffects) -> None:
        self.result.kv_events[index] += [(self.now, event) for event in effects.kv_events]
        for output in effects.outputs:
            self._signal(index, output)

    def _signal(self, index: int, output: Output) -> None:
        self.result.outputs.append((self.now, index, output))
        record = self.result.records[output.request_id]
        if output.token_id is not None:
            record.outputs.append(output.token_id)
            record.last_token_ms = self.now
            if len(record.outputs) == 1:
                record.first_token_ms = self.now
            elif len(record.outputs) == 2:
                record.second_token_ms = self.now
        if output.completed:
            record.terminal_ms = self.now
            record.status = "rejected" if output.rejected else "failed" if output.failed else "completed"
            self.workers[index].in_flight -= 1
