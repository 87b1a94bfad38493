"""One workload run in different ways, and random workloads small enough that pools run full."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from histories import configs as paged_configs
from kvsim.config import EngineConfig, FixedTiming, PolynomialTiming, SglangConfig
from kvsim.contract import (
    CommandContext,
    ForwardPassMetrics,
    KvEvent,
    PendingPass,
    RankIdentity,
    Request,
    SameTimestampRetry,
    Submit,
)
from kvsim.layout import FailReason, RequestStatus
from kvsim.rank import SchedulerRank
from kvsim.replay.run import Run
from kvsim.workload import Workload, workload_from_requests
from model.replay import Model, Record, Replay, model_of
from model.sglang import SglangModel

TRY_AGAIN = (SameTimestampRetry.RETRY, SameTimestampRetry.COUNTDOWN)

# ---------------------------------------------------------------- random inputs


@st.composite
def request_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Up to a dozen requests whose prompts are cuts of few families; planned outputs continue the family."""
    items = []
    at = 0.0
    for index in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from([0.0, 0.0, 3.0, 10.0, 12.5, 1 / 3, 40.0]))
        length = draw(st.sampled_from([8, 4, 12, 5, 9, 16, 7, 3, 1, 2, 6, 10, 20, 13, 24, 40]))
        output = draw(st.sampled_from([4, 8, 2, 1, 0, 3, 12, 6, 20]))
        item: dict[str, Any] = {"arrival_time_ms": at, "output_tokens": output}
        start = draw(st.sampled_from([0, 100, None]))
        if start is None:
            item["input_tokens"] = length
        else:
            common = min(length, draw(st.sampled_from([40, 8, 5])))
            own = [2**31 + 1000 * index + j for j in range(length - common)]
            item["input_token_ids"] = [*range(start, start + common), *own]
            if draw(st.booleans()):
                item["output_token_ids"] = [start + length + j for j in range(output)]
        items.append(item)
    return items


TIMINGS = st.sampled_from(
    [PolynomialTiming(), FixedTiming(prefill_ms=10.0, decode_ms=3.0), FixedTiming(prefill_ms=0, decode_ms=0)]
)


@st.composite
def radix_configs(draw: st.DrawFn) -> EngineConfig:
    page = draw(st.sampled_from([1, 2, 4]))
    nextn = draw(st.sampled_from([None, None, 1, 3]))
    interval = draw(st.sampled_from([0, 0, 1, 3]))
    return EngineConfig(
        backend="sglang",
        num_gpu_blocks=draw(st.sampled_from([30, 48, 24, 64, 16, 8, 2, 1])),
        block_size=page,
        max_num_seqs=draw(st.sampled_from([None, 4, 2, 1])),
        max_model_len=draw(st.sampled_from([None, None, 30, 9])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        prefill_decode_interval=interval,
        aic_nextn=nextn,
        aic_nextn_accept_rates=None if nextn is None else draw(st.sampled_from(["1,1,1", "0.5,0.5,0.5", "0"])),
        speedup_ratio=draw(st.sampled_from([0.0, 1.0, 1.7])),
        timing_model=draw(TIMINGS),
        sglang=SglangConfig(
            schedule_policy=draw(st.sampled_from(["fifo", "lpm"])),
            max_prefill_tokens=draw(st.sampled_from([16384, 32, 12])),
            chunked_prefill_size=page * draw(st.sampled_from([100, 8, 3, 1])),
            clip_max_new_tokens=draw(st.sampled_from([4096, 8, 0])),
            schedule_conservativeness=draw(st.sampled_from([1.0, 0.3, 3.0, 0.0])),
        ),
    )


CONFIGS = st.one_of(paged_configs(), radix_configs())
WORKERS = st.sampled_from([1, 1, 2, 3])
RANKS = st.sampled_from([1, 1, 2])
CONCURRENCY = st.sampled_from([None, None, 1, 2, 5])
CAPS = st.sampled_from([None, None, 0.0, 10.0, 12.5, 33.0, 60.0, 150.0])

# ---------------------------------------------------------------- the kernel


@contextmanager
def slices_of(passes: int | None) -> Any:
    """The kernel comes back to Python after so many passes."""
    module: Any = sys.modules[Run.__module__]  # `kvsim.replay` is the function
    before = module._SLICE
    module._SLICE = before if passes is None else passes
    try:
        yield
    finally:
        module._SLICE = before


def run_kernel(
    workload: Workload | list[dict[str, Any]],
    config: EngineConfig,
    *,
    event_by_event: bool = False,
    slice_passes: int | None = None,
    cap: float | None = None,
    capture: bool = True,
    **options: Any,
) -> Run:
    """An executed run; `capture` keeps every log there is."""
    run = Run(
        workload if isinstance(workload, Workload) else workload_from_requests(workload),
        config,
        max_sim_time_ms=cap,
        record_passes=capture,
        capture_outputs=capture,
        capture_admissions=capture,
        **options,
    )
    if event_by_event:
        run._execute_fed = run._execute_event_by_event  # type: ignore[method-assign]
    with slices_of(slice_passes):
        run.execute()
    for rank in run.ranks:
        rank.check_integrity()
    return run


def digests(run: Run) -> list[str]:
    return [rank.digest() for rank in run.ranks]


def everything(run: Run) -> dict[str, Any]:
    """All that a run leaves behind, as plain comparable values."""
    gaps, weights = run.gaps.items()
    result = run.result()
    return {
        "records": run.records.tobytes(),
        "gaps": (gaps.tolist(), weights.tolist()),
        "summary": result.to_json(),
        "rows": result.to_jsonl(),
        "now": run.now_ms,
        "digests": digests(run),
        "admissions": None if run.admissions is None else run.admissions.tolist(),
        "outputs": None if run.outputs is None else run.outputs.tolist(),
        "passes": None if run.passes is None else run.passes.tobytes(),
    }


# ---------------------------------------------------------------- the same through the contract of a rank


@dataclass
class Seat:
    """A worker of one rank and the pass it executes."""

    rank: SchedulerRank
    pending: PendingPass | None = None
    end_ms: float = math.inf
    in_flight: int = 0
    idle: bool = False  # did nothing at this instant


@dataclass
class ContractRun:
    """Pass by pass through `SchedulerRank`, written without the kernel driver (spec/replay.md sections 2 to 4, 9)."""

    config: EngineConfig
    requests: Sequence[Request]
    workers: int = 1
    concurrency: int | None = None
    cap: float = math.inf
    #: replace every rank by its fork after so many passes
    fork_after: int | None = None
    #: asked at every instant after 0, when the passes that end at it are complete and nothing has begun
    at_boundary: Callable[[ContractRun], None] | None = None
    records: dict[int, Record] = field(default_factory=dict)
    now: float = 0.0
    passes: int = 0

    def __post_init__(self) -> None:
        self.seats = [Seat(SchedulerRank(RankIdentity(worker), self.config)) for worker in range(self.workers)]
        self.queue = sorted(self.requests, key=lambda request: request.arrival_ms or 0.0)
        self.placed = 0
        self.left_behind: list[SchedulerRank] = []
        #: of the passes that did something and ended, by worker
        self.metrics: list[list[ForwardPassMetrics]] = [[] for _ in self.seats]
        #: (when, event), by worker
        self.kv_events: list[list[tuple[float, KvEvent]]] = [[] for _ in self.seats]
        self._seen_ms = 0.0

    def run(self) -> ContractRun:
        while True:
            self._settle()
            times = [seat.end_ms for seat in self.seats]
            if self.queue and self.concurrency is None:
                times.append(self.queue[0].arrival_ms or 0.0)
            times += [self._deadline(seat) for seat in self.seats]
            if min(times) == math.inf:
                # Nothing can happen any more: only a policy that never admits is left.
                if not any(self._fail(seat) for seat in self.seats if seat.pending is None):
                    return self
            elif min(times) > self.cap:
                return self
            else:
                self.now = min(times)
                for seat in self.seats:
                    seat.idle = False

    def _deadline(self, seat: Seat) -> float:
        """When a transfer of a lower tier ends; one of native host offload waits for the end of a pass."""
        if seat.pending is not None and self.config.tiers_attached is None:
            return math.inf
        due = seat.rank.next_internal_deadline_ms()
        return math.inf if due is None else due

    def _settle(self) -> None:
        for seat in self.seats:
            if self._deadline(seat) > self.now:
                continue
            if seat.pending is None:
                work = seat.rank.process_internal_work(self.now, False)
            else:
                work = seat.rank.tick_offload_transport_only(self.now)
            self._show(seat, work.kv_events)
        for seat in self.seats:
            if seat.end_ms == self.now:
                assert seat.pending is not None
                self._outputs(seat, seat.rank.complete_pass(seat.pending, self.now))
                seat.pending, seat.end_ms, seat.idle = None, math.inf, False
        if self.at_boundary is not None and self.now > self._seen_ms:
            self._seen_ms = self.now
            self.at_boundary(self)
        self._release()
        self._drive_all()
        while self._release():
            self._drive_all()

    def _drive_all(self) -> None:
        again = True
        while again:
            again = False
            for seat in self.seats:
                if seat.pending is None and not seat.idle:
                    again |= self._drive(seat)

    def _release(self) -> bool:
        released = False
        while self.queue:
            request = self.queue[0]
            if self.concurrency is None:
                arrival = request.arrival_ms or 0.0
                if arrival > self.now:
                    break
            else:
                arrival = self.now
                if sum(seat.in_flight for seat in self.seats) >= self.concurrency:
                    break
            del self.queue[0]
            worker = self.placed % self.workers
            seat = self.seats[worker]
            self.placed += 1
            planned = request.output_token_ids
            asked = request.max_output_tokens if planned is None else len(planned)
            request_id = int(request.request_id)  # type: ignore[arg-type]
            self.records[request_id] = Record(request_id, arrival, len(request.tokens), asked, worker)
            seat.rank.apply_command(Submit(request), CommandContext(self.now, seat.pending is not None), seat.pending)
            seat.in_flight += 1
            seat.idle = False
            released = True
        return released

    def _drive(self, seat: Seat) -> bool:
        """Whether the idle worker did something that calls for another look at this instant."""
        if not seat.rank.is_ready():
            seat.idle = True
            return False
        outcome = seat.rank.execute_pass(self.now)
        self._show(seat, outcome.start_effects.kv_events)
        for admission in outcome.start_effects.admissions:
            record = self.records[admission.request_id]
            if not record.admissions:
                record.first_admit_ms = self.now
            record.admissions.append((self.now, admission.reused_input_tokens))
        for event in outcome.start_effects.pressure_events:
            self.records[event.request_id].preemptions += 1
        if outcome.end_ms > self.now:
            seat.pending, seat.end_ms = outcome.pending, outcome.end_ms
            return False
        self._outputs(seat, seat.rank.complete_pass(outcome.pending, self.now))
        if not seat.rank.header["effect_free"][0] or outcome.same_timestamp_retry in TRY_AGAIN:
            return True
        head = seat.rank.stuck_head()
        if head is not None and head.reason != FailReason.NOT_ADMITTED:
            return self._fail(seat)
        seat.idle = True
        return False

    def _fail(self, seat: Seat) -> bool:
        head = seat.rank.stuck_head()
        if head is None:
            return False
        output = seat.rank.fail_head()
        assert output is not None
        self.records[head.request_id].reason = head.reason.name
        self._signal(seat, output)
        seat.idle = False
        return True

    def _outputs(self, seat: Seat, effects: Any) -> None:
        self.passes += 1
        self._show(seat, effects.kv_events)
        if not seat.rank.header["effect_free"][0]:
            self.metrics[self.seats.index(seat)].append(effects.forward_pass_metrics)
        for output in effects.outputs:
            self._signal(seat, output)
        if self.passes == self.fork_after:
            self.left_behind = [other.rank for other in self.seats]
            for other in self.seats:
                other.rank = other.rank.fork()

    def _show(self, seat: Seat, events: Iterable[KvEvent]) -> None:
        self.kv_events[self.seats.index(seat)] += [(self.now, event) for event in events]

    def _signal(self, seat: Seat, output: Any) -> None:
        record = self.records[output.request_id]
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
            seat.in_flight -= 1


# ---------------------------------------------------------------- comparing


def requests_of(workload: Workload) -> list[Request]:
    """The rows of an explicit workload as commands of the contract."""
    found = []
    for row, spec in enumerate(workload.specs):
        planned = workload.planned_token_ids(row)
        found.append(
            Request(
                (int(spec["id_hi"]) << 64) | int(spec["id_lo"]),
                workload.prompt_token_ids(row),
                int(spec["max_output_tokens"]),
                planned,
                float(spec["arrival_ms"]),
            )
        )
    return found


def _twin(identity: RankIdentity, config: EngineConfig) -> Model:
    if config.backend == "sglang":
        return SglangModel(identity, config, prefill_decode_interval=config.prefill_decode_interval)
    return model_of(identity, config)


def twin_run(run: Run, *, concurrency: int | None, cap: float | None) -> dict[int, Record]:
    """The same through the Python twins of the ranks."""
    return (
        Replay(
            run.config,
            requests_of(run.workload),
            workers=len(run.ranks),
            max_in_flight=concurrency,
            max_sim_time_ms=math.inf if cap is None else cap,
            factory=_twin,
        )
        .run()
        .records
    )


def contract_run(run: Run, *, concurrency: int | None, cap: float | None, **more: Any) -> ContractRun:
    return ContractRun(
        run.config,
        requests_of(run.workload),
        workers=len(run.ranks),
        concurrency=concurrency,
        cap=math.inf if cap is None else cap,
        **more,
    ).run()


def _none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def plain_records(run: Run) -> dict[int, dict[str, Any]]:
    """Records of the requests that were released, by id."""
    found = {}
    for row in run.records:
        released = row["worker"] >= 0
        if released:
            found[(int(row["id_hi"]) << 64) | int(row["id_lo"])] = {
                **{name: _none(row[name]) for name in TIMES},
                **{name: int(row[name]) for name in COUNTS},
                "status": RequestStatus(row["status"]).name.lower(),
            }
    return found


TIMES = (
    "arrival_ms",
    "first_admit_ms",
    "first_token_ms",
    "second_token_ms",
    "last_token_ms",
    "terminal_ms",
)
COUNTS = (
    "input_tokens",
    "requested_output_tokens",
    "output_tokens",
    "reused_tokens",
    "first_reused_tokens",
    "admissions",
    "preemptions",
    "worker",
)


def plain_record(record: Record) -> dict[str, Any]:
    """The same of a record of the twin or of `ContractRun`."""
    return {
        **{name: getattr(record, name) for name in TIMES},
        "input_tokens": record.input_tokens,
        "requested_output_tokens": record.requested_output_tokens,
        "output_tokens": len(record.outputs),
        "reused_tokens": record.reused_tokens,
        "first_reused_tokens": record.first_reused_tokens,
        "admissions": len(record.admissions),
        "preemptions": record.preemptions,
        "worker": record.worker,
        "status": record.status,
    }


def same_records(run: Run, others: dict[int, Record]) -> None:
    assert plain_records(run) == {request_id: plain_record(record) for request_id, record in others.items()}
