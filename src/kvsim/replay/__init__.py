"""Replay of workloads in virtual time.

The package has the name of its function: ``kvsim.replay(...)`` runs a
workload. `kvsim` imports this module first of all, because the import system
binds a submodule to its parent when it is loaded; so nothing heavy is
imported before the function is called.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from kvsim.config import EngineConfig
    from kvsim.placement import KvRouterConfig
    from kvsim.policies import Policy
    from kvsim.replay.pool import PoolSpec
    from kvsim.replay.run import PlacementLike
    from kvsim.replay.scaling import ScalingLike
    from kvsim.replay.telemetry import TelemetryOptions
    from kvsim.report import ReplayResult, Sla
    from kvsim.workload import Workload

__all__ = ["replay"]

WorkloadLike: TypeAlias = "str | os.PathLike[str] | Workload | Iterable[Mapping[str, Any]]"


def replay(
    workload: WorkloadLike,
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
    sla: Sla | None = None,
    timing: Any = None,
    tokenization: Mapping[str, Any] | None = None,
    policy: Policy | str | None = None,
    trace_format: str = "mooncake",
    trace_block_size: int = 512,
    strict: bool = False,
    record_passes: bool = False,
    capture_outputs: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayResult:
    """Run a workload through simulated engines and report.

    Parameters
    ----------
    workload : path, Workload or iterable of mappings
        A trace file, a parsed workload, or a list of requests as for
        `kvsim.workload.workload_from_requests`.
    config : EngineConfig, optional
        Of every worker; defaults if omitted.
    workers : int
        Engines, at least 1.
    dp_size : int
        Attention-DP ranks of each worker: they share a barrier, so a pass lasts as
        long as its slowest rank.
    startup_ms : float
        Time until a worker that `scaling` adds takes requests.
    prefill, decode : PoolSpec, optional
        Two pools instead of `config`, `workers`, `dp_size` and `startup_ms`: prompts are
        computed in one, their KV is handed over, tokens come from the other.
    handoff_latency_ms : float
        Transfer time of a prompt if `prefill` has no transfer bandwidth and bytes per token.
    placement : str, Placement or callable, optional
        Which rank a request goes to: ``"round_robin"`` (default), ``"kv_router"``, a
        `kvsim.Placement` of your own or its class. In a disaggregated run of both pools.
    prefill_placement, decode_placement : str, Placement or callable, optional
        Instead of `placement`, for one pool.
    router : KvRouterConfig or mapping, optional
        Options of ``"kv_router"``.
    scaling : object, optional
        Adds and removes workers: a `kvsim.ScalingPolicy` or whatever has its methods.
    telemetry : TelemetryOptions, optional
        Samples of the running system, in ``result.telemetry`` or elsewhere.
    concurrency : int, optional
        Closed loop: at most so many requests (or active sessions) inside. Open loop if omitted.
    speedup : float
        Divides arrival times and think times; finite, > 0.
    max_sim_time_ms : float, optional
        Events later than this do not happen; what is unfinished then is counted as such.
    seed : int
        Added to the seeds of the configuration.
    sla : Sla, optional
        Bounds that count as goodput.
    timing : TimingModel, optional
        Callable model, or a profile, in place of the configuration's.
    tokenization : mapping, optional
        ``workers``, ``base_ms``, ``per_input_token_ms`` of a pool in front of each worker.
    policy : Policy or str, optional
        Scheduling policy of every rank; the backend's own if omitted.
    trace_format, trace_block_size, strict
        How to read a trace file, see `kvsim.workload.load_workload`.
    record_passes : bool
        Keep forward-pass metrics of every pass in ``result.passes``.
    capture_outputs : bool
        Keep every output signal in ``result.outputs``.
    progress : callable, optional
        Called now and then with (requests ended, requests in all).

    Returns
    -------
    ReplayResult

    Raises
    ------
    ConfigError
        An option or the configuration is not allowed; names it.
    WorkloadError
        The trace or the list is malformed; names file and line, or position.
    TimingError
        A callable timing model failed.
    """
    from kvsim.config import EngineConfig
    from kvsim.errors import ConfigError, WorkloadError
    from kvsim.replay.run import Run
    from kvsim.report import Sla
    from kvsim.workload import Workload, load_workload, workload_from_requests

    started = time.perf_counter()
    # What is used only later is checked before the run, not after it.
    for name, value, kind in (("config", config, EngineConfig), ("sla", sla, Sla)):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(name, f"expected None or an object of {kind.__name__}, got {value!r}")
    if progress is not None and not callable(progress):
        raise ConfigError("progress", f"must be callable, got {progress!r}")
    if not isinstance(workload, Workload):
        if isinstance(workload, (str, os.PathLike)):
            workload = load_workload(workload, format=trace_format, block_size=trace_block_size, strict=strict)
        elif not isinstance(workload, Iterable):
            raise WorkloadError(f"expected a path, a Workload or an iterable of requests, got {workload!r}")
        else:
            workload = workload_from_requests(workload)
    run = Run(
        workload,
        config,
        workers=workers,
        dp_size=dp_size,
        startup_ms=startup_ms,
        prefill=prefill,
        decode=decode,
        handoff_latency_ms=handoff_latency_ms,
        placement=placement,
        prefill_placement=prefill_placement,
        decode_placement=decode_placement,
        router=router,
        scaling=scaling,
        telemetry=telemetry,
        concurrency=concurrency,
        speedup=speedup,
        max_sim_time_ms=max_sim_time_ms,
        seed=seed,
        timing=timing,
        tokenization=tokenization,
        policy=policy,
        record_passes=record_passes,
        capture_outputs=capture_outputs,
        capture_admissions=True,
        capture_routing=True,
    )
    run.execute(progress)
    return run.result(sla=sla, started=started)
