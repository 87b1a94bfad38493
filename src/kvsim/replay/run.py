"""Runs a workload through simulated engines in virtual time (spec/replay.md sections 1 to 4, 6, 9, 10).

The kernel `Fleet` lets time pass: passes, their ends, and releases that are
known ahead. What depends on the run (sessions, a tokenization pool in a closed
loop) is decided here, at the instants at which requests end.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvsim import layout
from kvsim._core import content
from kvsim._core.drive import Fleet
from kvsim.config import EngineConfig
from kvsim.contract import RankIdentity
from kvsim.errors import ConfigError
from kvsim.layout import RequestStatus
from kvsim.placement import PoolInfo, RoundRobin
from kvsim.policies import Policy
from kvsim.rank import SchedulerRank, content_tokens, request_content
from kvsim.report import GapHistogram, ReplayResult, RunTotals, Sla
from kvsim.workload import ArrivalDriver, TokenizationPool, Workload

__all__ = ["Run"]

#: Passes between two looks at the progress callback and at signals.
_SLICE = 200_000

_UNTIL, _ENDED, _SLICED, _CAPPED = range(4)


class Run:
    """One replay, from parsed input to result. Parameters as for `kvsim.replay`; used once.

    Attributes
    ----------
    ranks : list of SchedulerRank
    records : ndarray of layout.REQUEST_RECORD, shape (n,)
    now_ms : float
        Virtual time.
    """

    def __init__(
        self,
        workload: Workload,
        config: EngineConfig,
        *,
        workers: int = 1,
        dp_size: int = 1,
        concurrency: int | None = None,
        speedup: float = 1.0,
        max_sim_time_ms: float | None = None,
        seed: int = 0,
        timing: Any = None,
        tokenization: Mapping[str, Any] | None = None,
        policy: Policy | str | None = None,
        record_passes: bool = False,
        capture_outputs: bool = False,
        capture_admissions: bool = False,
        capture_kv_events: bool = False,
    ) -> None:
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ConfigError("workers", f"must be an int >= 1, got {workers!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError("seed", f"must be an int >= 0, got {seed!r}")
        if max_sim_time_ms is not None and (
            isinstance(max_sim_time_ms, bool)
            or not isinstance(max_sim_time_ms, (int, float))
            or not 0 <= max_sim_time_ms < math.inf
        ):
            raise ConfigError("max_sim_time_ms", f"must be finite and >= 0, got {max_sim_time_ms!r}")
        if isinstance(dp_size, bool) or not isinstance(dp_size, int) or dp_size < 1:
            raise ConfigError("dp_size", f"must be an int >= 1, got {dp_size!r}")
        hints = workload.specs["dp_rank"]
        if (hints >= dp_size).any():
            row = int(np.flatnonzero(hints >= dp_size)[0])
            raise ConfigError("dp_rank", f"request {row} asks for rank {hints[row]}, workers have {dp_size}")
        self.workload = workload
        # Events nobody reads would only pile up; leaving them out changes no decision.
        emit = capture_kv_events and config.enable_prefix_caching
        config = config.replace(
            emit_kv_events=emit,
            emit_kv_token_ids=False,
            aic_mtp_seed=(config.aic_mtp_seed + seed) % (1 << 64),
        )
        if config.backend == "sglang" and dp_size > 1:
            # Attention DP divides the chunk among the ranks and admits more freely (spec/replay.md section 1).
            # A share that is not whole pages would leave prompts waiting for ever.
            page = config.tokens_per_block
            share = max(page, config.sglang.chunked_prefill_size // dp_size // page * page)
            config = config.replace(
                sglang=msgspec.structs.replace(
                    config.sglang,
                    chunked_prefill_size=share,
                    schedule_conservativeness=config.sglang.schedule_conservativeness * 0.3,
                )
            )
        self.config = config
        self.max_sim_time_ms = max_sim_time_ms
        self.driver = ArrivalDriver(workload, concurrency=concurrency, speedup=speedup)
        self._workers = workers
        self._dp_size = dp_size
        self._placement = RoundRobin()
        self._placement.start(PoolInfo(dp_size=dp_size, workers=tuple(range(workers))))
        # Prompts that contain what earlier turns emitted are known only when a turn starts.
        self._growing = workload.cumulative and workload.has_sessions
        self._concurrency = concurrency
        self._pool = None if tokenization is None else _tokenization_pool(tokenization)
        self.ranks = [
            SchedulerRank(RankIdentity(worker, rank, dp_size), config, timing=timing, policy=policy)
            for worker in range(workers)
            for rank in range(dp_size)
        ]
        self.records = _new_records(workload)
        self.gaps = GapHistogram()
        self._fleet = Fleet(
            [rank._state for rank in self.ranks],
            dp_size,
            self.records,
            self.gaps,
            capture_admissions=capture_admissions,
            capture_outputs=capture_outputs,
            record_passes=record_passes,
        )
        self._record_passes = record_passes
        self._capture_outputs = capture_outputs
        self.admissions: npt.NDArray[Any] | None = None
        self.outputs: npt.NDArray[Any] | None = None
        self.passes: npt.NDArray[Any] | None = None
        # Not a bound method: a cycle would keep the arrays of every run until a full garbage collection.
        self._fleet.set_content(workload.specs, workload.planned, partial(_content_of, workload, config, self._growing))
        self._released = 0

    @property
    def now_ms(self) -> float:
        """Virtual time."""
        return float(self._fleet.now_ms)

    # ------------------------------------------------------------ running

    def execute(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Let the run happen, to its end or to the cap."""
        self._progress = progress
        if self.workload.has_sessions or (self._pool is not None and self._concurrency is not None):
            self._execute_event_by_event()
        else:
            self._execute_fed()
        self.admissions, outputs, passes = self._fleet.finish()
        self.outputs = outputs if self._capture_outputs else None
        self.passes = passes if self._record_passes else None

    def _execute_fed(self) -> None:
        """Releases that need no decision: the kernel does the whole run."""
        n = len(self.workload)
        closed = self._concurrency is not None
        order = np.arange(n) if closed else self.driver.static_order()
        times = np.zeros(n) if closed else self.driver.static_arrivals()
        ranks = self._placement.place_all(self.workload.specs["dp_rank"][order].tolist())
        if not closed:
            self.records["arrival_ms"][order] = times
        arrivals = times
        if self._pool is not None:
            lengths = self.workload.specs["input_tokens"][order].tolist()
            leave = np.array(
                [
                    self._pool.leave_ms(rank // self._dp_size, at, length)
                    for rank, at, length in zip(ranks.tolist(), times.tolist(), lengths, strict=True)
                ]
            )
            self.records["tokenized_ms"][order] = leave
            behind = np.argsort(leave, kind="stable")
            order, times, ranks = order[behind], leave[behind], ranks[behind]
        fleet = self._fleet
        fleet.set_feed(
            np.ascontiguousarray(order, np.int64),
            np.ascontiguousarray(times, np.float64),
            np.ascontiguousarray(ranks, np.int32),
            self._concurrency or 0,
        )
        while True:
            status = fleet.run(cap_ms=self._cap_ms, slice_passes=_SLICE)
            fleet.take_ended()
            self._report_progress()
            if status == _CAPPED or (status == _UNTIL and not fleet.fail_stuck()):
                break
        if self._pool is not None:
            self.records["arrival_ms"][self.driver.static_order()] = arrivals
            seen = arrivals[arrivals <= self._cap_ms]
            if status == _CAPPED and len(seen) and seen[-1] > fleet.now_ms:
                # Entering the pool is an event too, though no engine sees it.
                fleet.run(float(seen[-1]))
        # Nothing of what lies beyond the end of the run did happen.
        unfinished = self.records["status"] == RequestStatus.UNFINISHED
        for name in ("arrival_ms", "tokenized_ms"):
            self.records[name][unfinished & (self.records[name] > fleet.now_ms)] = np.nan

    def _execute_event_by_event(self) -> None:
        """Releases that depend on the run: decided at each instant at which a request ends."""
        fleet, driver, records = self._fleet, self.driver, self.records
        in_front: list[tuple[float, int, int, int]] = []  # heap: (leaves the pool, order, row, rank)
        inside = 0
        while True:
            now = fleet.now_ms
            for row, arrival_ms in driver.release(now, inside):
                inside += 1
                worker, rank = self._placement.next_rank(int(self.workload.specs["dp_rank"][row]))
                rank += worker * self._dp_size
                self._released += 1
                records["arrival_ms"][row] = arrival_ms
                if self._pool is None:
                    self._submit(rank, row, arrival_ms)
                    continue
                leave = self._pool.leave_ms(rank // self._dp_size, arrival_ms, driver.prompt_tokens(row))
                heapq.heappush(in_front, (leave, self._released, row, rank))
            while in_front and in_front[0][0] <= now:
                leave, _, row, rank = heapq.heappop(in_front)
                records["tokenized_ms"][row] = leave
                self._submit(rank, row, float(records["arrival_ms"][row]))
            until = driver.next_ready_ms()
            until = math.inf if until is None else until
            if in_front:
                until = min(until, in_front[0][0])
            status = fleet.run(until, self._cap_ms, True, _SLICE)
            ended = fleet.take_ended()
            if not ended and status == _UNTIL and until == math.inf and fleet.fail_stuck():
                ended = fleet.take_ended()
            for row in ended:
                inside -= 1
                record = records[row]
                driver.resolve(row, fleet.now_ms, RequestStatus(int(record["status"])), int(record["output_tokens"]))
            self._report_progress()
            if status == _CAPPED or (status == _UNTIL and until == math.inf and not ended):
                break

    def _submit(self, rank: int, row: int, arrival_ms: float) -> None:
        if not self._growing:
            self._fleet.submit(rank, row, arrival_ms)
            return
        spec = self.workload.specs[row]
        parts = self.driver.prompt_parts(row)
        planned = int(spec["planned_offset"])
        count = int(spec["max_output_tokens"])
        outputs = None if planned < 0 else self.workload.planned[planned : planned + count]
        request_id = (int(spec["id_hi"]) << 64) | int(spec["id_lo"])
        made = request_content(self.config, parts, outputs, request_id, count)
        self._fleet.submit(rank, row, arrival_ms, self.driver.prompt_tokens(row), made)

    @property
    def _cap_ms(self) -> float:
        return math.inf if self.max_sim_time_ms is None else float(self.max_sim_time_ms)

    def _report_progress(self) -> None:
        if self._progress is not None:
            self._progress(int(self._fleet.done), len(self.workload))

    # ------------------------------------------------------------ results

    def result(self, *, sla: Sla | None = None, started: float | None = None) -> ReplayResult:
        """The report of an executed run.

        Parameters
        ----------
        sla : Sla, optional
        started : float, optional
            `time.perf_counter` when the work began, for the wall time.
        """
        seconds = self._workers * self.now_ms / 1000.0
        totals = RunTotals(
            committed_prefill_tokens=int(self._fleet.committed_prefill_tokens),
            passes=int(self._fleet.passes),
            preemptions=int(self.records["preemptions"].sum()),
            wall_time_ms=0.0 if started is None else (time.perf_counter() - started) * 1000.0,
            end_ms=self.now_ms,
            decode_worker_seconds=seconds,
            decode_gpus_per_worker=self._dp_size,
            tokenized=self._pool is not None,
        )
        return ReplayResult(
            self.records,
            self.gaps,
            totals,
            config=self.config,
            sla=sla,
            passes=self.passes,
            outputs=self.outputs,
            admissions=self.admissions,
            request_names=self.workload.request_names,
            session_names=self.workload.session_names,
            dp_size=self._dp_size,
        )

    def kv_events(self, worker: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """KV events of a worker up to the end of the run: (layout.EVENT, layout.EVENT_BLOCK) rows."""
        events, blocks = self.ranks[worker]._state.drain_events()
        return events[(events["at_ms"] >= 0) & (events["at_ms"] <= self.now_ms)], blocks


def _content_of(workload: Workload, config: EngineConfig, growing: bool, first: int, last: int) -> tuple[Any, ...]:
    """Content of rows first .. last-1 as `Fleet.set_content` wants it.

    Nothing but offsets without prefix caching, and for growing
    conversations, whose turns bring their own.
    """
    if not config.enable_prefix_caching or growing:
        return np.zeros(1, np.uint64), None, None, None, np.zeros(last - first + 1, np.int64)
    inputs = (
        workload.specs[first:last],
        workload.segments,
        workload.tokens,
        workload.planned,
        config.tokens_per_block,
        content_tokens(config),
        config.emit_kv_events,
    )
    if config.backend == "sglang":
        runs, offsets, heads = content.runs_workload(*inputs)
        return None, None, runs, heads, offsets
    hashes, local, offsets = content.hash_workload(*inputs)
    return hashes, local, None, None, offsets


def _tokenization_pool(options: Mapping[str, Any]) -> TokenizationPool:
    if not isinstance(options, Mapping):
        raise ConfigError("tokenization", f"expected None or a mapping, got {options!r}")
    unknown = set(options) - {"workers", "base_ms", "per_input_token_ms"}
    if unknown:
        raise ConfigError(f"tokenization.{sorted(unknown, key=str)[0]}", "unknown field")
    if "workers" not in options:
        raise ConfigError("tokenization.workers", "required field is missing")
    return TokenizationPool(**options)


def _new_records(workload: Workload) -> npt.NDArray[Any]:
    """One record per row of the workload, nothing having happened yet."""
    specs = workload.specs
    records = np.zeros(len(specs), layout.REQUEST_RECORD)
    for name in records.dtype.names or ():
        if name.endswith("_ms"):
            records[name] = np.nan
    for name in ("id_hi", "id_lo", "input_tokens", "session", "turn"):
        records[name] = specs[name]
    records["requested_output_tokens"] = specs["max_output_tokens"]
    records["worker"] = records["dp_rank"] = -1
    records["row"] = np.arange(len(specs))
    return records
