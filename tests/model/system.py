"""Twin of a whole run: pools of workers, handoffs and one clock (replay.md sections 2 to 5 and 9).

One loop over plain lists. Ranks are the twins of single engines, a worker is a
group of ranks behind a barrier, placement is round robin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvsim.config import EngineConfig
from kvsim.contract import (
    ActivateDestination,
    Admission,
    Applied,
    CancelDestination,
    CancelSource,
    CommandContext,
    CommandEffects,
    DestinationReserved,
    KvEvent,
    Output,
    PassCompletionEffects,
    RankIdentity,
    ReleaseSource,
    Request,
    ReserveDestination,
    SameTimestampRetry,
    SourceHeld,
    Submit,
    SubmitHandoffPrefill,
)
from kvsim.errors import CommandError
from kvsim.layout import RequestStatus
from kvsim.workload import ArrivalDriver, TokenizationPool, Workload
from model.coordinator import CoordinatorModel
from model.paged import PagedModel
from model.sglang import SglangModel

AGGREGATED, PREFILL, DECODE = "agg", "prefill", "decode"

TRY_AGAIN = (SameTimestampRetry.RETRY, SameTimestampRetry.COUNTDOWN)

#: Passes that take no time, in a row at one instant: more is a livelock.
PATIENCE = 20_000


@dataclass
class Route:
    pool: str
    worker: int
    dp_rank: int
    scheduler: int


@dataclass
class Record:
    """What became of one request; times are ms, None where it did not happen."""

    row: int
    arrival_ms: float
    input_tokens: int
    requested_output_tokens: int
    tokenized_ms: float | None = None
    first_admit_ms: float | None = None
    prefill_admit_ms: float | None = None
    source_held_ms: float | None = None
    destination_reserved_ms: float | None = None
    destination_activated_ms: float | None = None
    source_released_ms: float | None = None
    decode_admit_ms: float | None = None
    terminal_ms: float | None = None
    status: str | None = None
    token_times: list[float] = field(default_factory=list)
    #: (pool, when, reused tokens)
    admissions: list[tuple[str, float, int]] = field(default_factory=list)
    #: (device, host) tokens of each admission, where known
    attributions: list[tuple[int, int] | None] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    prefill_worker: int | None = None
    decode_worker: int | None = None


@dataclass(eq=False)
class Job:
    """A request inside the system."""

    record: Record
    request: Request
    hint: int
    prefill_hint: int
    coordinator: CoordinatorModel | None = None
    #: rank of each half, once placed
    source: tuple[Worker, int] | None = None
    destination: tuple[Worker, int] | None = None
    #: it no longer counts as inside
    left: bool = False

    @property
    def handoff_id(self) -> int:
        return int(self.request.request_id)


@dataclass(eq=False)
class Worker:
    """A group of ranks that step together."""

    pool: str
    index: int
    ranks: list[Any]
    started_ms: float = 0.0
    end_ms: float = math.inf
    #: pass of each rank while it is in flight; None for a rank that only waits for the barrier
    pending: list[Any] = field(default_factory=list)
    #: (rank, action) for later, while a pass is in flight
    deferred: list[tuple[int, tuple[Job, int, str]]] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return self.end_ms < math.inf

    def is_ready(self) -> bool:
        return any(self.may_run(rank) for rank in self.ranks)

    @staticmethod
    def may_run(rank: Any) -> bool:
        return rank.is_ready() and not rank.waiting_for_external_command()


class Pool:
    """Workers of one kind, and the next place of the round robin."""

    def __init__(self, name: str, config: EngineConfig, workers: int, dp_size: int) -> None:
        self.name = name
        self.config = config
        self.dp_size = dp_size
        self.workers = [
            Worker(name, index, [build_rank(config, index, rank, dp_size) for rank in range(dp_size)])
            for index in range(workers)
        ]
        self.counter = 0
        self.rank_counters = [0] * workers

    def place(self, hint: int) -> tuple[Worker, int]:
        if self.name == AGGREGATED:
            worker = self.workers[self.counter % len(self.workers)]
            self.counter = (self.counter + 1) % len(self.workers)
            if hint < 0:
                hint = self.rank_counters[worker.index] % self.dp_size
                self.rank_counters[worker.index] += 1
            return worker, hint
        flat = [(worker, rank) for worker in self.workers for rank in range(self.dp_size) if hint in (-1, rank)]
        index = self.counter % len(flat)
        self.counter = index + 1
        return flat[index]


def build_rank(config: EngineConfig, worker: int, dp_rank: int, dp_size: int) -> Any:
    identity = RankIdentity(worker, dp_rank, dp_size)
    if config.backend == "sglang":
        if dp_size > 1:
            # replay.md section 1, but never less than a page: a rank that may prefill nothing would wait for ever.
            page = config.tokens_per_block
            share = max(page, config.sglang.chunked_prefill_size // dp_size // page * page)
            options = msgspec.structs.replace(
                config.sglang,
                chunked_prefill_size=share,
                schedule_conservativeness=config.sglang.schedule_conservativeness * 0.3,
            )
            config = config.replace(sglang=options)
        return SglangModel(identity, config, prefill_decode_interval=config.prefill_decode_interval)
    return PagedModel(identity, config)


class System:
    """One run. `run` may be called once.

    `pools` gives (configuration, workers, dp size) by pool name: either ``agg``, or ``prefill`` and ``decode``.
    """

    def __init__(
        self,
        workload: Workload,
        pools: dict[str, tuple[EngineConfig, int, int]],
        *,
        concurrency: int | None = None,
        speedup: float = 1.0,
        scale_think_times: bool = True,
        max_sim_time_ms: float = math.inf,
        handoff_latency_ms: float = 0.0,
        tokenization: dict[str, Any] | None = None,
        check: bool = False,
    ) -> None:
        self.workload = workload
        self.driver = ArrivalDriver(workload, concurrency, speedup, scale_think_times)
        self.pools = {name: Pool(name, *values) for name, values in pools.items()}
        self.disaggregated = PREFILL in pools
        self.source_first = self.disaggregated and pools[PREFILL][0].backend != "sglang"
        self.max_sim_time_ms = max_sim_time_ms
        self.handoff_latency_ms = handoff_latency_ms
        #: a pool that costs nothing is none
        costs = tokenization is not None and any(tokenization.get(key) for key in ("base_ms", "per_input_token_ms"))
        self.tokenizers = TokenizationPool(**tokenization) if costs else None
        self.check = check
        self.now = 0.0
        self.inside = 0
        self.jobs: dict[int, Job] = {}
        self.actions: list[tuple[Job, int, str]] = []
        #: (when, order, what to do)
        self.transfers: list[tuple[float, int, Job]] = []
        self.in_front: list[tuple[float, int, Callable[[], None]]] = []
        self.records: dict[int, Record] = {}
        self.committed_prefill_tokens = 0
        self.passes = 0
        self.outputs: list[tuple[float, str, int, Output]] = []
        self.kv_events: list[tuple[float, str, int, KvEvent]] = []
        #: the run came to a stop with these requests inside
        self.stalled: list[int] = []
        self.count = 0

    # ------------------------------------------------------------ the clock

    def run(self) -> System:
        while True:
            self.settle()
            following = self.next_event_ms()
            if following == math.inf:
                if self.end_one_stuck():
                    continue
                self.stalled = sorted(job.record.row for job in self.jobs.values() if not job.left)
                return self
            if following > self.max_sim_time_ms:
                return self
            self.now = following

    def next_event_ms(self) -> float:
        times = [worker.end_ms for pool in self.pools.values() for worker in pool.workers]
        times += [when for when, _, _ in self.transfers]
        times += [when for when, _, _ in self.in_front]
        times += self.internal_deadlines()
        ready = self.driver.next_ready_ms()
        return min([*times, *([] if ready is None else [ready])], default=math.inf)

    def internal_deadlines(self) -> list[float]:
        """Of idle workers: a busy one settles at its boundary."""
        ranks = [
            rank for pool in self.pools.values() for worker in pool.workers if not worker.busy for rank in worker.ranks
        ]
        deadlines = [rank.next_internal_deadline_ms() for rank in ranks]
        return [deadline for deadline in deadlines if deadline is not None]

    def process_internal_work(self) -> bool:
        did = False
        for pool in self.pools.values():
            for worker in pool.workers:
                for dp_rank, rank in enumerate(worker.ranks):
                    deadline = None if worker.busy else rank.next_internal_deadline_ms()
                    if deadline is not None and deadline <= self.now:
                        did = True
                        effects = rank.process_internal_work(self.now)
                        self.kv_events += [(self.now, pool.name, dp_rank, event) for event in effects.kv_events]
        return did

    def settle(self) -> None:
        """Everything that happens at `now`, until nothing changes."""
        turns = 0
        while True:
            turns += 1
            assert turns < PATIENCE, f"no end of the instant {self.now}"
            changed = self.process_internal_work()
            changed |= self.complete_due_passes()
            changed |= self.complete_due_transfers()
            changed |= self.leave_front()
            changed |= self.carry_out_actions()
            changed |= self.release_arrivals()
            for pool in self.pools:
                changed |= self.drive(pool)
            if not changed:
                return

    # ------------------------------------------------------------ passes

    def complete_due_passes(self) -> bool:
        due = [worker for pool in self.pools.values() for worker in pool.workers if worker.end_ms <= self.now]
        for worker in due:
            worker.end_ms = math.inf
            # rank by rank, each in its order
            self.actions += [action for _, action in sorted(worker.deferred, key=lambda entry: entry[0])]
            worker.deferred = []
            passes, worker.pending = worker.pending, []
            for dp_rank, pending in enumerate(passes):
                rank = worker.ranks[dp_rank]
                if pending is None:
                    effects = rank.complete_idle_group_pass(worker.started_ms, self.now)
                else:
                    effects = rank.complete_pass(pending, self.now)
                self.show(worker, dp_rank, effects)
        return bool(due)

    def show(self, worker: Worker, dp_rank: int, effects: PassCompletionEffects) -> None:
        """What a pass computed becomes visible."""
        self.passes += 1
        self.committed_prefill_tokens += effects.forward_pass_metrics.sum_prefill_tokens
        self.kv_events += [(self.now, worker.pool, dp_rank, event) for event in effects.kv_events]
        for output in effects.outputs:
            self.signal(worker, output)
        self.lifecycle(effects.lifecycle_events)

    def signal(self, worker: Worker, output: Output) -> None:
        self.outputs.append((self.now, worker.pool, worker.index, output))
        job = self.jobs[output.request_id]
        if worker.pool == PREFILL:
            if output.rejected or output.failed:
                self.end(job, "rejected" if output.rejected else "failed")
                self.fact(job, "FAILED")
            return
        if output.token_id is not None:
            job.record.token_times.append(self.now)
        if output.completed:
            self.end(job, "rejected" if output.rejected else "failed" if output.failed else "completed")
            self.leave(job)

    def end(self, job: Job, status: str) -> None:
        """The terminal state of a request; the first one counts."""
        if job.record.status is None:
            job.record.status = status
            job.record.terminal_ms = self.now

    def leave(self, job: Job) -> None:
        """A request no longer counts as inside: the next one of its session, or of the queue, may come."""
        if job.left:
            return
        job.left = True
        self.inside -= 1
        status = {
            "completed": RequestStatus.COMPLETED,
            "rejected": RequestStatus.REJECTED,
            "failed": RequestStatus.FAILED,
            "canceled": RequestStatus.CANCELLED,
        }[str(job.record.status)]
        self.driver.resolve(job.record.row, self.now, status, len(job.record.token_times))

    def drive(self, pool: str) -> bool:
        """Passes of idle workers, lowest first, until none does anything."""
        progress = False
        resting: set[int] = set()
        while True:
            ready = [
                worker
                for worker in self.pools[pool].workers
                if not worker.busy and worker.index not in resting and worker.is_ready()
            ]
            if not ready:
                return progress
            if self.step(ready[0]):
                progress = True
            else:
                resting.add(ready[0].index)

    def step(self, worker: Worker) -> bool:
        """One pass of a worker; False if it had no effect."""
        outcomes = [rank.execute_pass(self.now) if Worker.may_run(rank) else None for rank in worker.ranks]
        self.share_interval(worker, outcomes)
        ends = [outcome.end_ms for outcome in outcomes if outcome is not None]
        end_ms = max([self.now, *ends])
        for outcome in outcomes:
            if outcome is None:
                continue
            for admission in outcome.start_effects.admissions:
                self.admit(worker, admission)
        if self.check:
            for rank in worker.ranks:
                rank.check()
        worker.started_ms = self.now
        if end_ms > self.now:
            worker.end_ms = end_ms
            worker.pending = [None if outcome is None else outcome.pending for outcome in outcomes]
            return True
        ran = [(rank, outcome) for rank, outcome in zip(worker.ranks, outcomes, strict=True) if outcome is not None]
        effect = any(not rank.last_pass_effect_free for rank, _ in ran)
        for dp_rank, outcome in enumerate(outcomes):
            rank = worker.ranks[dp_rank]
            if outcome is not None:
                self.show(worker, dp_rank, rank.complete_pass(outcome.pending, self.now))
            elif effect:
                self.show(worker, dp_rank, rank.complete_idle_group_pass(self.now, self.now))
        again = any(outcome.same_timestamp_retry in TRY_AGAIN for _, outcome in ran)
        return effect or again or self.end_stuck(worker)

    def share_interval(self, worker: Worker, outcomes: list[Any]) -> None:
        """The prefill interval of SGLang counts passes of the group (sglang.md section 6.7)."""
        interval = self.pools[worker.pool].config.prefill_decode_interval
        if not interval or len(worker.ranks) == 1:
            return
        metrics = [outcome.pending.effects.forward_pass_metrics for outcome in outcomes if outcome is not None]
        prefilled = any(one.sum_prefill_tokens for one in metrics)
        worked = prefilled or any(one.num_decode_requests for one in metrics)
        for rank, outcome in zip(worker.ranks, outcomes, strict=True):
            if prefilled:
                rank.countdown = interval
            elif outcome is None and rank.countdown > 0:
                rank.countdown -= 1
            deferred = outcome is not None and outcome.same_timestamp_retry is SameTimestampRetry.COUNTDOWN
            if not worked and deferred:
                rank.ratio = rank.init_ratio

    def admit(self, worker: Worker, admission: Admission) -> None:
        record = self.jobs[admission.request_id].record
        record.admissions.append((worker.pool, self.now, admission.reused_input_tokens))
        record.attributions.append(admission.cache_tier_attribution)
        if record.first_admit_ms is None:
            record.first_admit_ms = self.now
        if worker.pool == PREFILL and record.prefill_admit_ms is None:
            record.prefill_admit_ms = self.now
        if worker.pool == DECODE and record.decode_admit_ms is None:
            record.decode_admit_ms = self.now

    # ------------------------------------------------------------ arrivals

    def release_arrivals(self) -> bool:
        released = self.driver.release(self.now, self.inside)
        for row, arrival_ms in released:
            self.inside += 1
            job = self.new_job(row, arrival_ms)
            self.jobs[job.handoff_id] = job
            self.records[row] = job.record
            if self.disaggregated:
                job.coordinator = CoordinatorModel(self.source_first, self.handoff_latency_ms)
                self.ask(job, job.coordinator.start())
            else:
                self.submit_aggregated(job)
        return bool(released)

    def new_job(self, row: int, arrival_ms: float) -> Job:
        spec = self.workload.specs[row]
        planned = self.workload.planned_token_ids(row)
        tokens: list[int] = []
        for part in self.driver.prompt_parts(row):
            if part.dtype.names is None:
                tokens += part.tolist()
            else:
                for start, step, length in part.tolist():
                    tokens += [(start + position * step) & 0xFFFFFFFF for position in range(length)]
        request_id = (int(spec["id_hi"]) << 64) | int(spec["id_lo"])
        wanted = int(spec["max_output_tokens"])
        request = Request(request_id, tokens, wanted, None if planned is None else planned.tolist())
        hint = int(spec["dp_rank"])
        ranks = self.workload.prefill_dp_ranks
        prefill_hint = hint if ranks is None or ranks[row] < 0 else int(ranks[row])
        return Job(Record(row, arrival_ms, len(tokens), wanted), request, hint, prefill_hint)

    def place(self, job: Job, pool: str) -> tuple[Worker, int]:
        worker, dp_rank = self.pools[pool].place(job.prefill_hint if pool == PREFILL else job.hint)
        scheduler = worker.index * self.pools[pool].dp_size + dp_rank
        job.record.routes.append(Route(pool, worker.index, dp_rank, scheduler))
        if pool == PREFILL:
            job.record.prefill_worker = scheduler
        else:
            job.record.decode_worker = scheduler
        return worker, dp_rank

    def submit_aggregated(self, job: Job) -> None:
        worker, dp_rank = self.place(job, AGGREGATED)
        self.cross_front(job, worker, lambda: self.command(worker, dp_rank, Submit(job.request)))

    def cross_front(self, job: Job, worker: Worker, then: Callable[[], Any]) -> None:
        """Through the tokenizers of a worker, if there are any."""
        if self.tokenizers is None:
            then()
            return
        leave = self.tokenizers.leave_ms(worker.index, self.now, job.record.input_tokens)
        self.count += 1

        def out() -> None:
            job.record.tokenized_ms = leave
            then()

        self.in_front.append((leave, self.count, out))

    def leave_front(self) -> bool:
        due = sorted((entry for entry in self.in_front if entry[0] <= self.now), key=lambda entry: entry[:2])
        for entry in due:
            self.in_front.remove(entry)
            entry[2]()
        return bool(due)

    # ------------------------------------------------------------ handoffs

    def ask(self, job: Job, actions: list[tuple[int, str]]) -> None:
        self.actions += [(job, number, name) for number, name in actions]

    def fact(self, job: Job, name: str, value: Any = None) -> None:
        assert job.coordinator is not None
        self.ask(job, job.coordinator.fact(name, value))

    def lifecycle(self, events: list[SourceHeld | DestinationReserved]) -> None:
        for event in events:
            job = self.jobs[event.request_id]
            if isinstance(event, SourceHeld):
                job.record.source_held_ms = self.now
                self.fact(job, "SOURCE_HELD", event.transfer_timing)
            else:
                job.record.destination_reserved_ms = self.now
                self.fact(job, "DESTINATION_RESERVED", event.transferable_prompt_tokens)

    def complete_due_transfers(self) -> bool:
        due = sorted((entry for entry in self.transfers if entry[0] <= self.now), key=lambda entry: entry[:2])
        for entry in due:
            self.transfers.remove(entry)
            self.fact(entry[2], "TRANSFER_COMPLETED")
        return bool(due)

    def carry_out_actions(self) -> bool:
        did = bool(self.actions)
        while self.actions:
            job, number, name = self.actions.pop(0)
            self.carry_out(job, number, name)
        return did

    def carry_out(self, job: Job, number: int, name: str) -> None:
        coordinator = job.coordinator
        assert coordinator is not None
        if name == "SUBMIT_PREFILL":
            self.submit_prefill(job, number)
        elif name == "RESERVE_DESTINATION":
            self.reserve(job, number)
        elif name == "START_TRANSFER":
            assert coordinator.delay_ms is not None
            delay = coordinator.delay_ms
            self.ask(job, coordinator.outcome(number, "SCHEDULED"))
            if delay > 0:
                self.transfers.append((self.now + delay, job.handoff_id, job))
            else:
                self.fact(job, "TRANSFER_COMPLETED")
        elif name in ("COMPLETE", "COMPLETE_CANCELED"):
            if name == "COMPLETE_CANCELED":
                self.end(job, "canceled")
                self.leave(job)
        else:
            self.command_owner(job, number, name)

    def submit_prefill(self, job: Job, number: int) -> None:
        worker, dp_rank = job.source = self.place(job, PREFILL)
        whole = job.request
        planned = whole.output_token_ids
        copy = Request(whole.request_id, whole.tokens, min(1, job.record.requested_output_tokens))
        if planned is not None:
            copy = Request(whole.request_id, whole.tokens, 1, planned[:1])

        def submit() -> None:
            effects = self.command(worker, dp_rank, SubmitHandoffPrefill(job.handoff_id, copy))
            assert job.coordinator is not None
            self.ask(job, job.coordinator.outcome(number, "SUBMITTED"))
            self.lifecycle(effects.lifecycle_events)

        self.cross_front(job, worker, submit)

    def reserve(self, job: Job, number: int) -> None:
        assert job.coordinator is not None
        worker, dp_rank = job.destination = self.place(job, DECODE)
        try:
            effects = self.command(worker, dp_rank, ReserveDestination(job.handoff_id, job.request))
        except CommandError:
            job.destination = job.record.decode_worker = None
            self.end(job, "failed")
            self.ask(job, job.coordinator.outcome(number, "FAILED"))
            return
        self.ask(job, job.coordinator.outcome(number, "ACCEPTED"))
        self.lifecycle(effects.lifecycle_events)

    def command_owner(self, job: Job, number: int, name: str) -> None:
        """A command for a half that is placed; it waits while the worker has a pass in flight."""
        assert job.coordinator is not None
        owner = job.destination if name in ("ACTIVATE_DESTINATION", "CANCEL_DESTINATION") else job.source
        if owner is None:
            # The half was refused: there is nothing to clean, and nobody to wait for.
            self.ask(job, job.coordinator.outcome(number, "NOOP"))
            return
        worker, dp_rank = owner
        if worker.busy:
            worker.deferred.append((dp_rank, (job, number, name)))
            return
        command = {
            "ACTIVATE_DESTINATION": ActivateDestination,
            "CANCEL_DESTINATION": CancelDestination,
            "RELEASE_SOURCE": ReleaseSource,
            "CANCEL_SOURCE": CancelSource,
        }[name](job.handoff_id)
        effects = self.command(worker, dp_rank, command)
        applied = isinstance(effects.result, Applied)
        outcome = "APPLIED" if applied else "NOOP"
        if name == "ACTIVATE_DESTINATION":
            if applied:
                job.record.destination_activated_ms = self.now
            else:
                outcome = "FAILED"
        if name == "RELEASE_SOURCE":
            job.record.source_released_ms = self.now
        self.ask(job, job.coordinator.outcome(number, outcome))
        self.lifecycle(effects.lifecycle_events)

    def command(self, worker: Worker, dp_rank: int, command: Any) -> CommandEffects:
        pending = worker.pending[dp_rank] if worker.busy else None
        effects: CommandEffects = worker.ranks[dp_rank].apply_command(
            command, CommandContext(self.now, worker.busy), pending
        )
        self.kv_events += [(self.now, worker.pool, dp_rank, event) for event in effects.kv_events]
        if self.check:
            worker.ranks[dp_rank].check()
        return effects

    # ------------------------------------------------------------ liveness

    def end_one_stuck(self) -> bool:
        """Nothing is to come: let a request past another that waits for it, else end one."""
        ranks = [rank for pool in self.pools.values() for worker in pool.workers for rank in worker.ranks]
        if any(isinstance(rank, PagedModel) and rank.unblock() for rank in ranks):
            return True
        return any(self.end_stuck(worker) for pool in self.pools.values() for worker in pool.workers)

    def end_stuck(self, worker: Worker) -> bool:
        """End the request that keeps a rank from any progress; False if there is none."""
        for rank in worker.ranks:
            if rank.stuck_head() is not None:
                output = rank.fail_head(self.now)
            elif isinstance(rank, SglangModel) and rank.stuck_running() is not None:
                output = rank.fail_running()
            else:
                continue
            self.signal(worker, output)
            return True
        return False
