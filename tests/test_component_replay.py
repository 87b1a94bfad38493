"""`EngineComponent` in a loop of a few lines is `kvsim.replay`: same records, same ranks, byte for byte.

``KVSIM_EXAMPLES`` sets the number of random workloads (default 150), for long runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from histories import radix_configs
from kvsim.config import EngineConfig, SglangConfig
from kvsim.contract import CancelRequest, Output, Request
from kvsim.layout import RequestStatus
from kvsim.replay.component import Completion, DriveEffects, EngineComponent, TokenTimes
from kvsim.replay.run import Run
from replay_ways import CAPS, CONCURRENCY, CONFIGS, WORKERS, digests, request_lists, requests_of, run_kernel

EXAMPLES = int(os.environ.get("KVSIM_EXAMPLES", "150"))


class Loop:
    """The order of one instant, spec/replay.md section 4, around a component."""

    def __init__(
        self,
        component: EngineComponent,
        requests: Sequence[Request],
        hints: Sequence[int],
        concurrency: int | None,
        cap: float,
    ) -> None:
        self.component = component
        self.queue = sorted(zip(requests, hints, strict=True), key=lambda item: item[0].arrival_ms or 0.0)
        self.concurrency = concurrency
        self.cap = cap
        self.now = 0.0
        self.tokens = TokenTimes()
        self.records: dict[int, dict[str, Any]] = {}
        self.passes = 0
        self._worker = 0
        self._rank = [0] * len(component.groups)

    def run(self) -> Loop:
        while True:
            self.settle()
            self.component.check_integrity()
            following = self.component.next_end_ms
            if self.queue and self.concurrency is None:
                following = min(following, self.queue[0][0].arrival_ms or 0.0)
            if following == math.inf:
                given_up = self.component.end_stuck_head(self.now, self.tokens, not_admitted=True)
                if given_up is None:
                    return self
                self.complete(given_up)
            elif following > self.cap:
                return self
            else:
                self.now = following

    def settle(self) -> None:
        """All of one instant."""
        for completion in self.component.completions_due(self.now):
            self.component.on_scheduled_completion(completion)
            self.complete(completion)
        self.release()
        self.drive()
        while self.release():
            self.drive()

    def drive(self) -> None:
        while True:
            effects = self.component.drive_ready(self.now, self.tokens)
            self.start(effects)
            again = bool(effects)
            while (given_up := self.component.end_stuck_head(self.now, self.tokens)) is not None:
                self.complete(given_up)
                again = True
            if not again:
                return

    def release(self) -> bool:
        released = False
        while self.queue:
            request, hint = self.queue[0]
            arrival = request.arrival_ms or 0.0
            if self.concurrency is None:
                if arrival > self.now:
                    break
            elif self.component.in_flight >= self.concurrency:
                break
            else:
                arrival = self.now
            del self.queue[0]
            worker, dp_rank = self.place(hint)
            self.component.dispatch(self.component.rank_id(worker, dp_rank), request, self.now)
            self.records[int(request.request_id)] = {  # type: ignore[arg-type]
                "arrival_ms": arrival,
                "worker": worker,
                "dp_rank": dp_rank,
                "admissions": 0,
                "preemptions": 0,
                "first_admit_ms": math.nan,
                "first_reused_tokens": 0,
                "reused_tokens": 0,
                "terminal_ms": math.nan,
                "status": int(RequestStatus.UNFINISHED),
            }
            released = True
        return released

    def place(self, hint: int) -> tuple[int, int]:
        worker = self._worker
        self._worker = (worker + 1) % len(self._rank)
        if hint >= 0:
            return worker, hint
        dp_rank = self._rank[worker]
        self._rank[worker] = (dp_rank + 1) % self.component.dp_size
        return worker, dp_rank

    def start(self, effects: DriveEffects) -> None:
        for admission in effects.admissions:
            record = self.records[admission.request_id]
            if record["admissions"] == 0:
                record["first_admit_ms"] = self.now
                record["first_reused_tokens"] = admission.reused_input_tokens
            record["admissions"] += 1
            record["reused_tokens"] = max(record["reused_tokens"], admission.reused_input_tokens)
        for event in effects.pressure_events:
            self.records[event.request_id]["preemptions"] += 1
        for completion in effects.immediate:
            self.complete(completion)

    def complete(self, completion: Completion) -> None:
        assert completion.end_ms == self.now
        for output in completion.effects.outputs:
            if output.completed:
                self.end(output, completion)

    def end(self, output: Output, completion: Completion) -> None:
        record = self.records[output.request_id]
        record["terminal_ms"] = self.now
        record["status"] = int(
            RequestStatus.REJECTED
            if output.rejected
            else RequestStatus.FAILED
            if output.failed
            else RequestStatus.COMPLETED
        )

    def plain_records(self) -> dict[int, dict[str, Any]]:
        for request_id, record in self.records.items():
            times = self.tokens.times.get(request_id, [])
            record["output_tokens"] = len(times)
            record["first_token_ms"] = times[0] if times else math.nan
            record["second_token_ms"] = times[1] if len(times) > 1 else math.nan
            record["last_token_ms"] = times[-1] if times else math.nan
        return self.records


def plain_records(run: Run, names: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Those columns of the requests that were released, by id."""
    rows = run.records[run.records["worker"] >= 0]
    return {(int(row["id_hi"]) << 64) | int(row["id_lo"]): {name: row[name].item() for name in names} for row in rows}


def drive_like(
    run: Run, config: EngineConfig, *, workers: int, dp_size: int, concurrency: int | None, cap: float | None
) -> Loop:
    component = EngineComponent(config, workers=workers, dp_size=dp_size)
    hints = run.workload.specs["dp_rank"].tolist()
    return Loop(component, requests_of(run.workload), hints, concurrency, math.inf if cap is None else cap).run()


# Under the older rules every fruitless pass of SGLang lowers its ratio, so even those have to be the same.
@example(
    items=[{"arrival_time_ms": 0.0, "input_tokens": 8, "output_tokens": 4}] * 6,
    pinned=False,
    config=EngineConfig.for_backend(
        "sglang", ruleset="dynamo-1.3", num_gpu_blocks=8, sglang=SglangConfig(chunked_prefill_size=3)
    ),
    workers=3,
    dp_size=1,
    concurrency=None,
    cap=None,
)
# A sibling still lowers its ratio when the head of rank 0 is hopeless already.
@example(
    items=[
        {"arrival_time_ms": 0.0, "input_token_ids": [*range(8)], "output_tokens": 4},
        {"arrival_time_ms": 0.0, "input_token_ids": [*range(8)], "output_tokens": 4},
        {"arrival_time_ms": 0.0, "input_tokens": 8, "output_tokens": 4},
        {"arrival_time_ms": 0.0, "input_token_ids": [*range(8)], "output_tokens": 4},
        {"arrival_time_ms": 0.0, "input_token_ids": [*range(100, 108)], "output_tokens": 8},
    ],
    pinned=True,
    config=EngineConfig.for_backend("sglang", num_gpu_blocks=16, sglang=SglangConfig(chunked_prefill_size=3)),
    workers=1,
    dp_size=2,
    concurrency=None,
    cap=None,
)
@settings(
    max_examples=2 * EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    items=request_lists(),
    pinned=st.booleans(),
    config=st.one_of(CONFIGS, radix_configs()),
    workers=WORKERS,
    dp_size=st.sampled_from([1, 2, 2, 3]),
    concurrency=CONCURRENCY,
    cap=CAPS,
)
def test_a_component_driven_by_hand_is_the_replay(
    items: list[dict[str, Any]],
    pinned: bool,
    config: EngineConfig,
    workers: int,
    dp_size: int,
    concurrency: int | None,
    cap: float | None,
) -> None:
    if pinned:
        items = [{**item, "dp_rank": (k // 3) % dp_size} if k % 3 == 0 else item for k, item in enumerate(items)]
    config = config.replace(emit_kv_events=False, emit_kv_token_ids=False)
    options: dict[str, Any] = {"workers": workers, "dp_size": dp_size, "concurrency": concurrency, "cap": cap}
    run = run_kernel(items, config, **options)
    loop = drive_like(run, config, **options)
    names = [name for records in loop.plain_records().values() for name in records]
    if config.backend == "sglang" and config.rules.mixed_radix_passes:
        names = [name for name in names if name != "preemptions"]  # no pressure event tells of a retraction
    mine = {key: {name: record[name] for name in names} for key, record in loop.plain_records().items()}
    assert repr(mine) == repr(plain_records(run, names))
    assert [rank.core.digest() for rank in loop.component.ranks if rank is not None] == digests(run)
    assert loop.component.in_flight == sum(math.isnan(record["terminal_ms"]) for record in mine.values())


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "submit", "submit", "cancel", "drive", "drive", "deliver", "deliver", "scale", "ready"]
        ),
        st.integers(0, 11),
        st.booleans(),
    ),
    min_size=5,
    max_size=60,
)


# A worker that is cancelled while it starts may hold a request.
@example(
    script=[("submit", 0, False), ("scale", 3, False), ("submit", 2, False), ("scale", 0, False)],
    config=EngineConfig.for_backend("sglang", num_gpu_blocks=48),
    dp_size=1,
    startup_s=1.0,
)
@settings(max_examples=max(10, EXAMPLES // 4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    script=ACTIONS,
    config=st.one_of(CONFIGS, radix_configs()),
    dp_size=st.sampled_from([1, 2, 3]),
    startup_s=st.sampled_from([None, 1.0]),
)
def test_whatever_is_asked_every_request_ends_once_and_no_worker_is_forgotten(
    script: list[tuple[str, int, bool]], config: EngineConfig, dp_size: int, startup_s: float | None
) -> None:
    component = EngineComponent(config, workers=2, dp_size=dp_size, startup_s=startup_s)
    tokens = TokenTimes()
    now, accepted = 0.0, 0
    ends: dict[int, int] = {}
    flying: list[Completion] = []
    ids_seen = [0, 1]

    def shown(completion: Completion) -> None:
        for request_id in completion.completed_requests:
            ends[request_id] = ends.get(request_id, 0) + 1

    def deliver(completion: Completion) -> None:
        nonlocal now
        now = max(now, completion.end_ms)
        component.on_scheduled_completion(completion)
        shown(completion)

    def drive() -> bool:
        effects = component.drive_ready(now, tokens)
        flying.extend(effects.scheduled)
        for completion in effects.immediate:
            shown(completion)
        given_up = component.end_stuck_head(now, tokens, not_admitted=True)
        if given_up is not None:
            shown(given_up)
        return bool(effects) or given_up is not None

    def check() -> None:
        component.check_integrity()
        live = component.workers.live_ids
        assert [worker for worker, group in enumerate(component.groups) if group is not None] == live
        assert component.in_flight == accepted - sum(ends.values())
        for rank in component.ranks:
            assert rank is None or (rank.flying is not None) == any(item.rank_id == rank.rank_id for item in flying)

    for action, number, flag in script:
        targets = [rank for rank in component.ranks if rank is not None]
        if action == "submit" and targets:
            accepted += 1
            prompt = [*range(1 + 3 * (number % 4))] if flag else [accepted] * (1 + number)
            component.dispatch(targets[number % len(targets)].rank_id, Request(accepted, prompt, number % 5), now)
        elif action == "cancel" and accepted:
            request_id = 1 + number % accepted
            for rank in targets:
                known = request_id in rank.live
                effects = component.apply_command(rank.rank_id, CancelRequest(request_id, flag), now)
                if known and request_id not in rank.live:
                    assert effects.retired_requests or effects.suppressed_pending_output
                    ends[request_id] = ends.get(request_id, 0) + 1
        elif action == "drive":
            drive()
        elif action == "deliver" and flying:
            deliver(flying.pop(number % len(flying)))
        elif action == "scale":
            change = component.apply_target_count(number % 4, now)
            assert not set(change.added) & set(ids_seen)
            ids_seen += change.added
            for request_id in change.retired_requests:
                ends[request_id] = ends.get(request_id, 0) + 1
        elif action == "ready":
            for worker in component.workers.starting_ids[:1]:
                assert component.mark_worker_ready(worker, now)
        check()
    for worker in component.workers.starting_ids:
        component.mark_worker_ready(worker, now)
    while flying or drive():
        if flying:
            deliver(flying.pop(0))
        check()
    component.apply_target_count(0, now)
    assert component.drained
    assert component.workers.worker_count == 0
    assert ends == dict.fromkeys(range(1, accepted + 1), 1)
