"""Runs a workload through simulated engines in virtual time (spec/replay.md sections 1 to 4, 6, 9, 10).

`Run` turns the options of a replay into pools, placements and a fleet of
engines. When every release is known ahead the kernel `Fleet` does the whole
run; otherwise `kvsim.replay.system.System` leads it from decision to decision.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvsim import layout
from kvsim._core import content
from kvsim._core.drive import Fleet
from kvsim.config import EngineConfig
from kvsim.contract import HostOffloadEvent, RankIdentity
from kvsim.errors import ConfigError
from kvsim.layout import Pool, RequestStatus
from kvsim.offload.observer import offload_events
from kvsim.offload.tiers import has_tiers
from kvsim.offload.totals import TransferTotals
from kvsim.placement import KvRouterConfig, PlacedRequests, Placement, PoolInfo, RoundRobin, get_placement
from kvsim.policies import Policy
from kvsim.rank import SchedulerRank, content_tokens
from kvsim.replay.pool import LifecycleLog, PoolSpec, WorkerPool
from kvsim.replay.scaling import Scaling, ScalingLike
from kvsim.replay.system import RunPool, System
from kvsim.replay.telemetry import Telemetry, TelemetryOptions
from kvsim.report import GapHistogram, ReplayResult, RunTotals, Sla
from kvsim.workload import ArrivalDriver, TokenizationPool, Workload

__all__ = ["PlacementLike", "Run"]

#: A name, an object, or what makes one; see `kvsim.placement.get_placement`.
PlacementLike: TypeAlias = "str | Placement | Callable[[], Placement] | None"

#: Passes between two looks at the progress callback and at signals.
_SLICE = 200_000

_UNTIL, _NOTED, _SLICED, _CAPPED = range(4)


class Run:
    """One replay, from parsed input to result. Parameters as for `kvsim.replay`; used once.

    Attributes
    ----------
    ranks : list of SchedulerRank
        Of the workers that the run began with, pool by pool.
    records : ndarray of layout.REQUEST_RECORD, shape (n,)
    now_ms : float
        Virtual time.
    """

    def __init__(
        self,
        workload: Workload,
        config: EngineConfig | None = None,
        *,
        workers: int = 1,
        dp_size: int = 1,
        startup_ms: float = 0.0,
        prefill: PoolSpec | None = None,
        decode: PoolSpec | None = None,
        handoff_latency_ms: float = 0.0,
        placement: PlacementLike = None,
        prefill_placement: PlacementLike = None,
        decode_placement: PlacementLike = None,
        router: KvRouterConfig | Mapping[str, Any] | None = None,
        scaling: ScalingLike | None = None,
        telemetry: TelemetryOptions | None = None,
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
        capture_routing: bool = False,
        capture_kv_events: bool = False,
        capture_offload: bool = False,
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError("seed", f"must be an int >= 0, got {seed!r}")
        _check_time("max_sim_time_ms", max_sim_time_ms)
        _check_time("handoff_latency_ms", handoff_latency_ms)
        if handoff_latency_ms is None:
            raise ConfigError("handoff_latency_ms", "must be finite and >= 0, got None")
        specs = self._pool_specs(config, workers, dp_size, startup_ms, prefill, decode)
        self._disaggregated = len(specs) == 2
        if not self._disaggregated and (prefill_placement is not None or decode_placement is not None):
            raise ConfigError("prefill_placement", "needs the pools prefill and decode")
        if not self._disaggregated and handoff_latency_ms:
            raise ConfigError("handoff_latency_ms", "needs the pools prefill and decode")
        for kind, spec in specs.items():
            _check_hints(workload, kind, spec.dp_size)
        self.workload = workload
        self.max_sim_time_ms = max_sim_time_ms
        self.driver = ArrivalDriver(workload, concurrency=concurrency, speedup=speedup)
        # Prompts that contain what earlier turns emitted are known only when a turn starts.
        self._growing = workload.cumulative and workload.has_sessions
        self._concurrency = concurrency
        self._tokenization = None if tokenization is None else _tokenization_pool(tokenization)
        self._record_passes = record_passes
        self._capture_outputs = capture_outputs
        self._capture_routing = capture_routing
        self.records = _new_records(workload)
        self.handoffs = _new_handoffs(len(workload)) if self._disaggregated else None
        self.gaps = GapHistogram()
        sizes = [spec.dp_size for spec in specs.values()]
        self._scaling = None if scaling is None else Scaling(scaling, dp_size=sizes[-1], prefill_dp_size=sizes[0])
        self._telemetry = None if telemetry is None else Telemetry(telemetry)
        self.lifecycle = LifecycleLog()
        chosen = {
            Pool.AGGREGATED: placement,
            Pool.PREFILL: placement if prefill_placement is None else prefill_placement,
            Pool.DECODE: placement if decode_placement is None else decode_placement,
        }
        self.configs: dict[Pool, EngineConfig] = {}
        self._placements: dict[Pool, Placement] = {}
        for kind, spec in specs.items():
            named = chosen[kind] is None or isinstance(chosen[kind], str)
            made = get_placement(chosen[kind], router if named else None, kind)
            if made in self._placements.values():
                raise ConfigError("placement", "each pool needs one of its own; give a class instead of an object")
            made.start(
                PoolInfo(
                    role=kind,
                    dp_size=spec.dp_size,
                    block_size=spec.config.tokens_per_block,
                    max_num_batched_tokens=spec.config.max_num_batched_tokens,
                    seed=seed,
                    workers=tuple(range(spec.workers)),
                    timing=timing,
                )
            )
            self._placements[kind] = made
            # Events nobody reads would only pile up; leaving them out changes no decision.
            events = (capture_kv_events or made.wants_kv_events) and spec.config.enable_prefix_caching
            self.configs[kind] = _engine_config(spec, kind, seed, events)
        self._fleet = Fleet(
            self.records,
            self.gaps,
            handoffs=self.handoffs,
            capture_admissions=capture_admissions,
            capture_outputs=capture_outputs,
            record_passes=record_passes,
            capture_offload=capture_offload,
            watch_gauges=self._telemetry is not None,
            watch_passes=self._scaling is not None,
        )
        for kind, adjusted in self.configs.items():
            # Not a bound method: a cycle would keep the arrays of every run until a full garbage collection.
            source = partial(_content_of, workload, adjusted, self._growing)
            # Only captured outputs show their ids.
            self._fleet.set_content(workload.specs, workload.planned if capture_outputs else None, source, int(kind))
        self.ranks: list[SchedulerRank] = []
        expected = len(workload) if concurrency is None else min(len(workload), concurrency)
        self._pools = [
            RunPool(
                kind,
                self.configs[kind],
                spec.dp_size,
                WorkerPool(kind, spec.workers, startup_ms=spec.startup_ms, log=self.lifecycle),
                self._placements[kind],
                partial(_make_ranks, self.configs[kind], spec.dp_size, timing, policy, expected),
                self._fleet,
                PlacedRequests(self.driver, self.configs[kind].tokens_per_block),
                None if kind is Pool.DECODE else self._tokenization,
            )
            for kind, spec in specs.items()
        ]
        for pool in self._pools:
            self.ranks += pool.ranks.values()
        self._handoff_latency_ms = handoff_latency_ms
        self.system: System | None = None
        self.admissions: npt.NDArray[Any] | None = None
        self.outputs: npt.NDArray[Any] | None = None
        self.passes: npt.NDArray[Any] | None = None

    @staticmethod
    def _pool_specs(
        config: EngineConfig | None,
        workers: int,
        dp_size: int,
        startup_ms: float,
        prefill: PoolSpec | None,
        decode: PoolSpec | None,
    ) -> dict[Pool, PoolSpec]:
        """One aggregated pool, or a prefill and a decode pool."""
        if prefill is None and decode is None:
            return {Pool.AGGREGATED: PoolSpec(config or EngineConfig(), workers, dp_size, startup_ms)}
        for name, spec in (("prefill", prefill), ("decode", decode)):
            if not isinstance(spec, PoolSpec):
                raise ConfigError(name, f"prefill and decode pools come together, as PoolSpec; got {spec!r}")
        assert prefill is not None
        assert decode is not None
        alone = {
            "config": (config, None),
            "workers": (workers, 1),
            "dp_size": (dp_size, 1),
            "startup_ms": (startup_ms, 0),
        }
        for name, (value, default) in alone.items():
            if value != default:
                raise ConfigError(name, "belongs into prefill and decode when there are two pools")
        if prefill.config.backend != decode.config.backend:
            raise ConfigError(
                "decode.backend", f"must be that of prefill, {prefill.config.backend!r}, got {decode.config.backend!r}"
            )
        if decode.config.backend == "trtllm" and not decode.config.rules.trtllm_destinations:
            raise ConfigError(
                "decode.ruleset", f"destination reservation is not supported for TRT-LLM by {decode.config.ruleset!r}"
            )
        return {Pool.PREFILL: prefill, Pool.DECODE: decode}

    @property
    def now_ms(self) -> float:
        """Virtual time."""
        return float(self._fleet.now_ms)

    @property
    def config(self) -> EngineConfig:
        """Configuration of the engines; in a disaggregated run of those that decode."""
        return list(self.configs.values())[-1]

    # ------------------------------------------------------------ running

    def execute(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Let the run happen, to its end or to the cap."""
        placement = self._pools[0].placement
        undecided = (
            self._disaggregated
            or self._scaling is not None
            or self._telemetry is not None
            or type(placement) is not RoundRobin
            or self.workload.has_sessions
            or (self._tokenization is not None and self._concurrency is not None)
        )
        if undecided:
            self._execute_event_by_event(progress)
        else:
            self._execute_fed(progress)
        self.admissions, outputs, passes = self._fleet.finish()
        self.outputs = outputs if self._capture_outputs else None
        self.passes = passes if self._record_passes else None

    def _execute_event_by_event(self, progress: Callable[[int, int], None] | None) -> None:
        self._fleet.note(True, any(pool.placement.wants_first_tokens for pool in self._pools))
        self.system = System(
            self.workload,
            self.driver,
            self._fleet,
            self.records,
            self._pools,
            handoffs=self.handoffs,
            handoff_latency_ms=self._handoff_latency_ms,
            growing=self._growing,
            cap_ms=self._cap_ms,
            scaling=self._scaling,
            telemetry=self._telemetry,
            capture_routing=self._capture_routing,
            slice_passes=_SLICE,
            progress=progress,
        )
        self.system.execute()

    def _execute_fed(self, progress: Callable[[int, int], None] | None) -> None:
        """Releases that need no decision: the kernel does the whole run."""
        n = len(self.workload)
        pool = self._pools[0]
        placement = pool.placement
        assert isinstance(placement, RoundRobin)
        closed = self._concurrency is not None
        order = np.arange(n) if closed else self.driver.static_order()
        times = np.zeros(n) if closed else self.driver.static_arrivals()
        ranks = placement.place_all(self.workload.specs["dp_rank"][order])
        if not closed:
            self.records["arrival_ms"][order] = times
        arrivals = times
        if self._tokenization is not None:
            lengths = self.workload.specs["input_tokens"][order].tolist()
            leave = np.array(
                [
                    self._tokenization.leave_ms(rank // pool.dp_size, at, length)
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
            if progress is not None:
                progress(int(fleet.done), n)
            if status == _CAPPED or (status == _UNTIL and not fleet.fail_stuck()):
                break
        if self._tokenization is not None:
            self.records["arrival_ms"][self.driver.static_order()] = arrivals
            seen = arrivals[arrivals <= self._cap_ms]
            if status == _CAPPED and len(seen) and seen[-1] > fleet.now_ms:
                # Entering the pool is an event too, though no engine sees it.
                fleet.run(float(seen[-1]))
        # Nothing of what lies beyond the end of the run did happen.
        unfinished = self.records["status"] == RequestStatus.UNFINISHED
        for name in ("arrival_ms", "tokenized_ms"):
            self.records[name][unfinished & (self.records[name] > fleet.now_ms)] = np.nan

    @property
    def _cap_ms(self) -> float:
        return math.inf if self.max_sim_time_ms is None else float(self.max_sim_time_ms)

    # ------------------------------------------------------------ results

    def result(self, *, sla: Sla | None = None, started: float | None = None) -> ReplayResult:
        """The report of an executed run.

        Parameters
        ----------
        sla : Sla, optional
        started : float, optional
            `time.perf_counter` when the work began, for the wall time.
        """
        front, back = self._pools[0], self._pools[-1]
        end_ms = self.now_ms
        totals = RunTotals(
            committed_prefill_tokens=int(self._fleet.committed_prefill_tokens),
            passes=int(self._fleet.passes),
            preemptions=int(self.records["preemptions"].sum()),
            wall_time_ms=0.0 if started is None else (time.perf_counter() - started) * 1000.0,
            end_ms=end_ms,
            prefill_worker_seconds=front.workers.worker_seconds(end_ms) if self._disaggregated else 0.0,
            decode_worker_seconds=back.workers.worker_seconds(end_ms),
            prefill_gpus_per_worker=front.dp_size if self._disaggregated else 0,
            decode_gpus_per_worker=back.dp_size,
            tokenized=self._tokenization is not None,
            transfers=self._transfers(),
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
            handoffs=self.handoffs,
            routing=None if self.system is None else self.system.routing,
            telemetry=None if self._telemetry is None else self._telemetry.result(),
            scaling=None if self._scaling is None else self._scaling.history,
            stalled=None if self.system is None else self.system.stalled,
            lifecycle=None if self._scaling is None else self.lifecycle.operations,
            request_names=self.workload.request_names,
            session_names=self.workload.session_names,
            dp_size=back.dp_size,
            prefill_dp_size=front.dp_size,
        )

    def _transfers(self) -> TransferTotals | None:
        """What lower KV tiers of all workers did, also of those that are gone; None if nobody has any."""
        if not any(map(has_tiers, self.configs.values())):
            return None
        totals = TransferTotals()
        for pool in self._pools:
            if pool.transfers is not None:
                totals.merge(pool.transfers)
            for rank in pool.ranks.values():
                totals.add(rank)
        return totals

    def kv_events(self, worker: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """KV events of a worker up to the end of the run: (layout.EVENT, layout.EVENT_BLOCK) rows."""
        events, blocks = self.ranks[worker]._state.drain_events()
        return events[(events["at_ms"] >= 0) & (events["at_ms"] <= self.now_ms)], blocks

    def offload_events(self, worker: int = 0) -> Iterator[tuple[int, HostOffloadEvent]]:
        """Observations of a worker's host tier, if the run captured them: (request id, event)."""
        return offload_events(*self.ranks[worker]._state.drain_offload())


def _check_time(name: str, value: Any) -> None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf
    ):
        raise ConfigError(name, f"must be finite and >= 0, got {value!r}")


def _check_hints(workload: Workload, kind: Pool, dp_size: int) -> None:
    """Rank hints of the rows must lie in the workers (spec/replay.md section 1)."""
    own = workload.prefill_dp_ranks
    hints = workload.specs["dp_rank"]
    if kind is Pool.AGGREGATED and own is not None and (own >= 0).any():
        row = int(np.flatnonzero(own >= 0)[0])
        raise ConfigError("prefill_dp_rank", f"request {row} asks for rank {own[row]} of a prefill pool, there is none")
    if kind is Pool.PREFILL and own is not None:
        hints = np.where(own >= 0, own, hints)
    if (hints >= dp_size).any():
        row = int(np.flatnonzero(hints >= dp_size)[0])
        name = "prefill_dp_rank" if kind is Pool.PREFILL else "dp_rank"
        raise ConfigError(name, f"request {row} asks for rank {hints[row]}, workers have {dp_size}")


def _engine_config(spec: PoolSpec, kind: Pool, seed: int, events: bool) -> EngineConfig:
    """Configuration of the engines of a pool, as the run needs it."""
    config = spec.config.replace(
        emit_kv_events=events,
        emit_kv_token_ids=False,
        aic_mtp_seed=(spec.config.aic_mtp_seed + seed) % (1 << 64),
    )
    if kind is not Pool.AGGREGATED:
        # The role of a worker is the topology's to say (spec/replay.md section 1).
        config = config.replace(worker_type="prefill" if kind is Pool.PREFILL else "decode")
    return config.for_attention_dp(spec.dp_size)


def _make_ranks(
    config: EngineConfig, dp_size: int, timing: Any, policy: Policy | str | None, requests: int, worker: int
) -> list[SchedulerRank]:
    return [
        SchedulerRank(
            RankIdentity(worker, rank, dp_size), config, timing=timing, policy=policy, expected_requests=requests
        )
        for rank in range(dp_size)
    ]


def _new_handoffs(n: int) -> npt.NDArray[Any]:
    """Halves of the requests of a disaggregated run, nothing having happened yet."""
    halves = np.zeros(n, layout.HANDOFF_RECORD)
    for name in halves.dtype.names or ():
        if name.endswith("_ms"):
            halves[name] = np.nan
    for name in ("decode_reused_tokens", "prefill_worker", "prefill_dp_rank"):
        halves[name] = -1
    return halves


def _content_of(workload: Workload, config: EngineConfig, growing: bool, first: int, last: int) -> tuple[Any, ...]:
    """Content of rows first .. last-1 as `Fleet.set_content` wants it.

    Nothing but offsets without prefix caching, and for growing
    conversations, whose turns bring their own.
    """
    if not config.enable_prefix_caching or growing:
        return np.zeros(1, np.uint64), None, None, None, np.zeros(last - first + 1, np.int64)
    inputs = (
        workload.specs[first:last],
        workload.runs,
        workload.tokens,
        workload.plan,
        config.tokens_per_block,
        content_tokens(config),
        config.emit_kv_events,
        workload.equal_block_hashes(config.tokens_per_block),
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
    blank = np.zeros(1, layout.REQUEST_RECORD)
    for name in blank.dtype.names or ():
        if name.endswith("_ms"):
            blank[name] = np.nan
    blank["worker"] = blank["dp_rank"] = -1
    # A row at a time: memory is walked through once, not once for each column.
    records = np.repeat(blank, len(specs))
    for name in ("id_hi", "id_lo", "input_tokens", "session", "turn"):
        records[name] = specs[name]
    records["requested_output_tokens"] = specs["max_output_tokens"]
    records["row"] = np.arange(len(specs))
    return records
