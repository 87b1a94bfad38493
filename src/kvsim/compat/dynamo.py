"""The functions of the peer ``dynamo.replay``, under its option names and with its report keys.

`run_trace_replay` and `run_synthetic_trace_replay` run offline (spec/workloads-and-report.md
section 6). Beyond the peer's functions both take `scaling_policy`, an object as
`kvsim.replay.scaling.ScalingPolicy` describes. Differences on purpose: a request
that can never finish ends as rejected or failed instead of aborting the run,
percentiles of token gaps are exact instead of sketched, equal costs of ranks go
to the lowest worker and rank instead of to chance, and options that this
version does not simulate are errors instead of being passed over.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

from kvsim.config import EngineConfig, parse_config
from kvsim.errors import ConfigError
from kvsim.layout import Pool
from kvsim.replay.pool import PoolSpec, startup_delay_ms
from kvsim.replay.run import Run
from kvsim.replay.scaling import ScalingLike
from kvsim.replay.telemetry import TelemetryOptions
from kvsim.report import ReplayResult, Sla
from kvsim.report.summary import summarize, wall_rates
from kvsim.workload import Workload, load_workload, workload_from_traffic

if TYPE_CHECKING:
    from kvsim.placement import KvRouterConfig, Placement

__all__ = ["KvRouterConfig", "ReplayReport", "TelemetryOptions", "run_synthetic_trace_replay", "run_trace_replay"]

EngineArgs = Mapping[str, Any] | EngineConfig | str | os.PathLike[str] | None


def __getattr__(name: str) -> Any:
    # The router and its kernel are loaded by those who use them.
    if name == "KvRouterConfig":
        from kvsim.placement import KvRouterConfig

        return KvRouterConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Options of the peer's engine that this version does not simulate, with the value that leaves them off.
_OFF: dict[str, Any] = {
    "prefill_schedule_interval": 1,
    "g3_offload": None,
    "state_cache": None,
    "frontend": None,
    "vision": None,
}

# Names of the peer's flat engine arguments and of its command line -> path in the configuration.
_ALIASES = {
    "engine_type": "backend",
    "disaggregation_mode": "worker_type",
    "data_parallel_size": "dp_size",
    "num_g2_blocks": "native_host_offload.num_host_blocks",
    "num_host_blocks": "native_host_offload.num_host_blocks",
    "bandwidth_g1_to_g2_gbps": "native_host_offload.d2h_bandwidth_gbps",
    "host_offload_d2h_bandwidth_gbps": "native_host_offload.d2h_bandwidth_gbps",
    "bandwidth_g2_to_g1_gbps": "native_host_offload.h2d_bandwidth_gbps",
    "host_offload_h2d_bandwidth_gbps": "native_host_offload.h2d_bandwidth_gbps",
    "trtllm_capacity_scheduler_policy": "trtllm.capacity_scheduler_policy",
    "planner_profile_data": "timing_model",
    **{
        f"sglang_{name}": f"sglang.{name}"
        for name in (
            "schedule_policy",
            "max_prefill_tokens",
            "chunked_prefill_size",
            "clip_max_new_tokens",
            "schedule_conservativeness",
        )
    },
}
# Options that only the peer's older tiers have. With one of them, or under the older ruleset, G2 is a tier of its own
# that takes what is evicted; else it is the host memory that finished blocks are written through to.
_TIER_OPTIONS = {
    "num_g3_blocks": "kvbm_tiers.num_g3_blocks",
    "enable_g4_storage": "kvbm_tiers.g4_storage",
    "offload_batch_size": "kvbm_tiers.offload_batch_size",
    "bandwidth_g2_to_g3_gbps": "kvbm_tiers.g2_to_g3_gbps",
    "bandwidth_g3_to_g2_gbps": "kvbm_tiers.g3_to_g2_gbps",
    "bandwidth_g2_to_g4_gbps": "kvbm_tiers.g2_to_g4_gbps",
    "bandwidth_g4_to_g2_gbps": "kvbm_tiers.g4_to_g2_gbps",
}
_TIER_ALIASES = {
    "num_g2_blocks": "kvbm_tiers.num_g2_blocks",
    "bandwidth_g1_to_g2_gbps": "kvbm_tiers.g1_to_g2_gbps",
    "bandwidth_g2_to_g1_gbps": "kvbm_tiers.g2_to_g1_gbps",
    **_TIER_OPTIONS,
}
#: Of a served engine: nothing listens in a simulation.
_PORTS = ("zmq_kv_events_port", "zmq_replay_port", "bootstrap_port")
#: What stands beside ``engine``.
_LAUNCH_KEYS = ("engine", "dp_size", "startup_time")


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay hands back.

    Attributes
    ----------
    summary : dict
        Flat: counts, throughputs, distributions.
    per_request : list of dict or None
        One record per request that ended, by (arrival, id); with `capture_per_request`.
    coverage : dict
        What was captured, and how many records.
    planner : dict or None
        ``ticks`` of the scaling policy and ``lifecycle_operations`` of the
        pools; with a policy and `capture_planner_details`.
    telemetry : dict or None
        ``sample_interval_ms`` and ``samples``; with `telemetry_options`.
    """

    summary: dict[str, Any]
    per_request: list[dict[str, Any]] | None
    coverage: dict[str, Any]
    planner: dict[str, Any] | None = None
    telemetry: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``telemetry`` only if it was asked for."""
        result: dict[str, Any] = {
            "summary": self.summary,
            "per_request": self.per_request,
            "coverage": self.coverage,
            "planner": self.planner,
        }
        if self.telemetry is not None:
            result["telemetry"] = self.telemetry
        return result


def run_trace_replay(
    trace_files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    extra_engine_args: EngineArgs = None,
    prefill_engine_args: EngineArgs = None,
    decode_engine_args: EngineArgs = None,
    router_config: KvRouterConfig | Mapping[str, Any] | None = None,
    num_workers: int = 1,
    num_prefill_workers: int = 1,
    num_decode_workers: int = 1,
    replay_concurrency: int | None = None,
    replay_mode: Literal["offline"] = "offline",
    router_mode: Literal["round_robin", "kv_router"] = "round_robin",
    arrival_speedup_ratio: float = 1.0,
    trace_format: str = "mooncake",
    trace_block_size: int | None = None,
    trace_shared_prefix_ratio: float = 0.0,
    trace_num_prefix_groups: int = 0,
    report_jsonl_path: str | os.PathLike[str] | None = None,
    max_sim_time_ms: float | None = None,
    agentic_lanes: int | None = None,
    execution_model: str | None = None,
    weka_nested_timestamp_basis: str | None = None,
    model_name: str | None = None,
    sla_ttft_ms: float | None = None,
    sla_itl_ms: float | None = None,
    sla_e2e_ms: float | None = None,
    capture_per_request: bool = False,
    capture_planner_details: bool = True,
    planner_config: Any = None,
    benchmark_granularity: int = 8,
    performance_model_metadata: Any = None,
    ais_perf_config: Any = None,
    telemetry_options: TelemetryOptions | None = None,
    kv_event_lag_ms: float | None = None,
    scaling_policy: ScalingLike | None = None,
) -> ReplayReport:
    """Replay a trace file.

    Parameters
    ----------
    trace_files : path, or sequence of one path
        Of `trace_format`.
    extra_engine_args : mapping, EngineConfig, path or JSON text, optional
        Engine of the aggregated workers: ``{"engine": {...}, "dp_size": 1,
        "startup_time": seconds}``, or the older flat form with names as in
        ``engine_type``, ``is_prefill``, ``num_g2_blocks``. Defaults if omitted.
    prefill_engine_args, decode_engine_args : as `extra_engine_args`, optional
        Both: a disaggregated run.
    router_config : KvRouterConfig or mapping, optional
        For `router_mode` ``kv_router``; that of a disaggregated run gives one
        router per pool.
    num_workers, num_prefill_workers, num_decode_workers : int
    replay_concurrency : int, optional
        Closed loop: at most so many requests, or active sessions. Neither
        arrivals nor think times are scaled then.
    replay_mode : {"offline"}
    router_mode : {"round_robin", "kv_router"}
    arrival_speedup_ratio : float
        Divides arrivals and think times of the open loop.
    trace_format : str
        ``mooncake`` or ``mooncake-delta``.
    trace_block_size : int, optional
        Tokens per hash id, 512.
    report_jsonl_path : path, optional
        File for the records, one line each, replaced if it exists.
    max_sim_time_ms : float, optional
        Events later than this do not happen.
    model_name, benchmark_granularity, performance_model_metadata : object
        Accepted; they change nothing.
    sla_ttft_ms, sla_itl_ms, sla_e2e_ms : float, optional
        Bounds of goodput; the last stands alone.
    capture_per_request : bool
        Whether the report holds records.
    capture_planner_details : bool
        Whether it holds what the scaling policy saw and decided.
    trace_shared_prefix_ratio, trace_num_prefix_groups, agentic_lanes, execution_model, \
weka_nested_timestamp_basis, planner_config, ais_perf_config : object
        Of formats and models that this version does not have; anything but the default is an error.
    telemetry_options : TelemetryOptions, optional
    kv_event_lag_ms : float, optional
        KV events reach the router so long after the pass that caused them.
    scaling_policy : object, optional
        See `kvsim.replay.scaling.ScalingPolicy`.

    Returns
    -------
    ReplayReport

    Raises
    ------
    ConfigError, WorkloadError
        Naming the option or the place in the trace.
    PolicyError
        If the scaling policy raises.
    """
    started = time.perf_counter()
    _unsupported(
        trace_shared_prefix_ratio=(trace_shared_prefix_ratio, 0.0),
        trace_num_prefix_groups=(trace_num_prefix_groups, 0),
        agentic_lanes=(agentic_lanes, None),
        execution_model=(execution_model, None),
        weka_nested_timestamp_basis=(weka_nested_timestamp_basis, None),
        planner_config=(planner_config, None),
        ais_perf_config=(ais_perf_config, None),
    )
    system = _system(
        extra_engine_args,
        prefill_engine_args,
        decode_engine_args,
        num_workers,
        num_prefill_workers,
        num_decode_workers,
        router_mode,
        router_config,
        replay_mode,
    )
    files = [trace_files] if isinstance(trace_files, (str, os.PathLike)) else list(trace_files)
    if len(files) != 1:
        raise ConfigError("trace_files", f"must be exactly one file for trace_format {trace_format}, got {len(files)}")
    workload = load_workload(files[0], format=trace_format, block_size=trace_block_size)
    return _run(
        system,
        workload,
        started=started,
        concurrency=replay_concurrency,
        speedup=arrival_speedup_ratio,
        max_sim_time_ms=max_sim_time_ms,
        sla=Sla(sla_ttft_ms, sla_itl_ms, sla_e2e_ms),
        capture_per_request=capture_per_request,
        capture_planner_details=capture_planner_details,
        report_jsonl_path=report_jsonl_path,
        telemetry=telemetry_options,
        kv_event_lag_ms=kv_event_lag_ms,
        scaling=scaling_policy,
    )


def run_synthetic_trace_replay(
    input_tokens: int,
    output_tokens: int,
    request_count: int,
    *,
    extra_engine_args: EngineArgs = None,
    prefill_engine_args: EngineArgs = None,
    decode_engine_args: EngineArgs = None,
    router_config: KvRouterConfig | Mapping[str, Any] | None = None,
    num_workers: int = 1,
    num_prefill_workers: int = 1,
    num_decode_workers: int = 1,
    replay_concurrency: int | None = None,
    replay_mode: Literal["offline"] = "offline",
    router_mode: Literal["round_robin", "kv_router"] = "round_robin",
    arrival_speedup_ratio: float = 1.0,
    request_rate: float | None = None,
    arrival_interval_ms: float | None = None,
    arrival_seed: int = 42,
    turns_per_session: int = 1,
    shared_prefix_ratio: float = 0.0,
    num_prefix_groups: int = 0,
    inter_turn_delay_ms: float = 0.0,
    model_name: str | None = None,
    sla_ttft_ms: float | None = None,
    sla_itl_ms: float | None = None,
    sla_e2e_ms: float | None = None,
    capture_per_request: bool = False,
    capture_planner_details: bool = True,
    planner_config: Any = None,
    benchmark_granularity: int = 8,
    performance_model_metadata: Any = None,
    ais_perf_config: Any = None,
    telemetry_options: TelemetryOptions | None = None,
    kv_event_lag_ms: float | None = None,
    scaling_policy: ScalingLike | None = None,
) -> ReplayReport:
    """Replay made-up requests.

    Parameters
    ----------
    input_tokens, output_tokens : int
        Of each request, or of each turn.
    request_count : int
        Requests, or sessions if they have more than one turn.
    request_rate, arrival_interval_ms, replay_concurrency : float, float, int, optional
        Exactly one of them: Poisson arrivals per second, a fixed gap, or the closed loop.
    arrival_seed : int
        Of Poisson arrivals.
    turns_per_session : int
    shared_prefix_ratio, num_prefix_groups : float, int
        Share of a prompt that all sessions of a group have in common.
    inter_turn_delay_ms : float
        Think time.

    Returns
    -------
    ReplayReport

    Raises
    ------
    ConfigError
        Naming the option.
    PolicyError
        If the scaling policy raises.

    Notes
    -----
    All other options are those of `run_trace_replay`.
    """
    started = time.perf_counter()
    _unsupported(planner_config=(planner_config, None), ais_perf_config=(ais_perf_config, None))
    system = _system(
        extra_engine_args,
        prefill_engine_args,
        decode_engine_args,
        num_workers,
        num_prefill_workers,
        num_decode_workers,
        router_mode,
        router_config,
        replay_mode,
    )
    controllers = {
        "replay_concurrency": replay_concurrency,
        "request_rate": request_rate,
        "arrival_interval_ms": arrival_interval_ms,
    }
    given = [name for name, value in controllers.items() if value is not None]
    if len(given) != 1:
        raise ConfigError(given[1] if given else "replay_concurrency", f"give exactly one of {', '.join(controllers)}")
    loads = {"replay_concurrency": "concurrency", "request_rate": "poisson", "arrival_interval_ms": "constant_rate"}
    plan = workload_from_traffic(
        {
            "source_type": "synthetic" if turns_per_session == 1 else "synthetic-session",
            "load_type": loads[given[0]],
            "isl": input_tokens,
            "osl": output_tokens,
            "request_count": request_count,
            "turns_per_session": turns_per_session,
            "shared_prefix_ratio": shared_prefix_ratio,
            "num_prefix_groups": num_prefix_groups,
            "inter_turn_delay_ms": inter_turn_delay_ms,
            "arrival_seed": arrival_seed,
            given[0]: controllers[given[0]],
        },
        engine_block_size=system.config.tokens_per_block,
    )
    return _run(
        system,
        plan.workload,
        started=started,
        concurrency=plan.concurrency,
        speedup=arrival_speedup_ratio,
        max_sim_time_ms=None,
        sla=Sla(sla_ttft_ms, sla_itl_ms, sla_e2e_ms),
        capture_per_request=capture_per_request,
        capture_planner_details=capture_planner_details,
        report_jsonl_path=None,
        telemetry=telemetry_options,
        kv_event_lag_ms=kv_event_lag_ms,
        scaling=scaling_policy,
    )


# ---------------------------------------------------------------- reading the options


class _System(NamedTuple):
    """What runs: the configuration that content is cut by, and the options of `Run` that describe the workers."""

    config: EngineConfig
    options: dict[str, Any]


def _unsupported(**options: tuple[Any, Any]) -> None:
    for name, (value, off) in options.items():
        if value != off:
            raise ConfigError(name, f"is not simulated by this version, must be {off!r}, got {value!r}")


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(name, f"must be an int >= 1, got {value!r}")
    return value


def _system(
    extra: EngineArgs,
    prefill: EngineArgs,
    decode: EngineArgs,
    num_workers: int,
    num_prefill_workers: int,
    num_decode_workers: int,
    router_mode: str,
    router_config: KvRouterConfig | Mapping[str, Any] | None,
    replay_mode: str,
) -> _System:
    if replay_mode != "offline":
        raise ConfigError("replay_mode", f"must be 'offline' in this version, got {replay_mode!r}")
    if router_mode not in ("round_robin", "kv_router"):
        raise ConfigError("router_mode", f"must be one of round_robin, kv_router, got {router_mode!r}")
    if router_mode == "round_robin" and router_config is not None:
        # The peer's callers hand it over whatever the mode is.
        warnings.warn("router_config has no effect with router_mode round_robin", stacklevel=4)
    placements: dict[str, Placement] = {}
    if router_mode == "kv_router":
        from kvsim.placement import get_placement

        roles = {"placement": Pool.AGGREGATED}
        if prefill is not None or decode is not None:
            roles = {"prefill_placement": Pool.PREFILL, "decode_placement": Pool.DECODE}
        placements = {name: get_placement("kv_router", router_config, role) for name, role in roles.items()}
    if prefill is None and decode is None:
        workers = _count("num_workers", num_workers)
        for name, count in (("num_prefill_workers", num_prefill_workers), ("num_decode_workers", num_decode_workers)):
            if count != 1:
                raise ConfigError(name, f"needs prefill_engine_args and decode_engine_args, got {count!r}")
        args = _engine_args("extra_engine_args", extra, "aggregated")
        options: dict[str, Any] = {"workers": workers, "dp_size": args.dp_size}
        if args.startup_ms:
            options["startup_ms"] = args.startup_ms
        return _System(args.config, options | placements)
    if prefill is None or decode is None:
        missing, given = ("prefill", "decode") if prefill is None else ("decode", "prefill")
        raise ConfigError(f"{missing}_engine_args", f"is required together with {given}_engine_args")
    if extra is not None:
        raise ConfigError("extra_engine_args", "must not be given together with prefill_engine_args")
    if num_workers != 1:
        raise ConfigError("num_workers", f"is of aggregated runs, use num_decode_workers, got {num_workers!r}")
    sides = {}
    for role, text, count in (("prefill", prefill, num_prefill_workers), ("decode", decode, num_decode_workers)):
        args = _engine_args(f"{role}_engine_args", text, role)
        sides[role] = PoolSpec(args.config, _count(f"num_{role}_workers", count), args.dp_size, args.startup_ms)
    if sides["prefill"].config.backend != sides["decode"].config.backend:
        raise ConfigError(
            "decode_engine_args.backend",
            f"must be that of prefill_engine_args, {sides['prefill'].config.backend!r}, "
            f"got {sides['decode'].config.backend!r}",
        )
    return _System(sides["decode"].config, {**sides, **placements})


class _EngineArgs(NamedTuple):
    config: EngineConfig
    dp_size: int
    startup_ms: float


def _engine_args(option: str, given: EngineArgs, role: str) -> _EngineArgs:
    """Engine of one kind of workers, in any of the forms the peer takes."""
    if isinstance(given, EngineConfig):
        return _EngineArgs(given.replace(worker_type=role), 1, 0.0)
    values = _decode_args(option, given)
    try:
        if "engine" in values:
            for key in values:
                if key not in _LAUNCH_KEYS:
                    raise ConfigError(key, "unknown field")
            engine = values["engine"]
            if not isinstance(engine, Mapping):
                raise ConfigError("engine", f"expected an object, got {engine!r}")
            flat = dict(engine)
            launch = {key: values[key] for key in _LAUNCH_KEYS[1:] if key in values}
        else:
            flat, launch = _from_flat(values)
        for name, off in _OFF.items():
            if name in flat and flat.pop(name) != off:
                raise ConfigError(name, "is not simulated by this version")
        dp_size = launch.get("dp_size")
        startup_ms = startup_delay_ms(launch.get("startup_time")) or 0.0
        # The role of a worker is the run's to say, not its configuration's.
        flat["worker_type"] = role
        return _EngineArgs(parse_config(flat), 1 if dp_size is None else _count("dp_size", dp_size), startup_ms)
    except ConfigError as error:
        message = str(error).removeprefix(f"{error.field}: ")
        raise ConfigError(f"{option}.{error.field}" if error.field else option, message) from None


def _decode_args(option: str, given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if isinstance(given, (str, os.PathLike)):
        text = os.fspath(given)
        if not text.lstrip().startswith("{"):
            try:
                text = Path(text).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(option, f"{given}: cannot be read: {error}") from None
        try:
            given = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(option, f"not valid JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise ConfigError(option, f"expected an object, got {given!r}")
    return given


def _from_flat(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the engine, and of its launch, out of the peer's flat arguments."""
    engine: dict[str, Any] = {}
    launch: dict[str, Any] = {}
    older = values.get("ruleset") == "dynamo-1.3" or any(values.get(name) for name in _TIER_OPTIONS)
    aliases = {**_ALIASES, **(_TIER_ALIASES if older else {})}
    for key, value in values.items():
        if key in _PORTS or key in ("is_prefill", "is_decode") or (key in _TIER_OPTIONS and not older):
            continue
        path = aliases.get(key, key)
        if key == "planner_profile_data":
            value = None if value is None else {"type": "npz", "path": str(value)}
        if path in _LAUNCH_KEYS[1:]:
            target = launch
        else:
            target = engine
            if path != key and value is None:
                # An absent option of the older form is a null.
                continue
        group, _, field = path.rpartition(".")
        if group:
            inner = target.setdefault(group, {})
            if not isinstance(inner, dict):
                inner = target[group] = dict(inner)
            target = inner
        if field in target:
            raise ConfigError(key, f"is given twice, as {path} too")
        target[field] = dict(value) if isinstance(value, Mapping) else value
    _old_words(engine)
    if "kvbm_tiers" in engine and values.get("kv_bytes_per_token"):
        # The older engine has one size for transfers of both kinds.
        engine.setdefault("kv_cache_bytes_per_token", values["kv_bytes_per_token"])
    return engine, launch


def _old_words(engine: dict[str, Any]) -> None:
    """Values that older engine arguments wrote in other words."""
    offload = engine.get("native_host_offload")
    if isinstance(offload, dict) and not offload.get("num_host_blocks"):
        # No blocks, no tier; its bandwidths alone say nothing.
        del engine["native_host_offload"]
    tiers = engine.get("kvbm_tiers")
    if isinstance(tiers, dict) and not tiers.get("num_g2_blocks"):
        del engine["kvbm_tiers"]
    sglang = engine.get("sglang")
    if not isinstance(sglang, dict):
        return
    if sglang.get("schedule_policy") == "fcfs":
        sglang["schedule_policy"] = "fifo"
    if "page_size" in sglang:
        page = sglang.pop("page_size")
        if page is not None and engine.setdefault("block_size", page) != page:
            raise ConfigError("sglang.page_size", f"must equal block_size {engine['block_size']}, got {page!r}")
    for name in [name for name, value in sglang.items() if value is None]:
        del sglang[name]


# ---------------------------------------------------------------- running


def _run(
    system: _System,
    workload: Workload,
    *,
    started: float,
    concurrency: int | None,
    speedup: float,
    max_sim_time_ms: float | None,
    sla: Sla,
    capture_per_request: bool,
    capture_planner_details: bool,
    report_jsonl_path: str | os.PathLike[str] | None,
    telemetry: TelemetryOptions | None,
    kv_event_lag_ms: float | None,
    scaling: ScalingLike | None,
) -> ReplayReport:
    if telemetry is not None and not isinstance(telemetry, TelemetryOptions):
        raise ConfigError("telemetry_options", f"expected None or TelemetryOptions, got {telemetry!r}")
    if report_jsonl_path is not None:
        # A run may take long: what cannot be written shows before it.
        try:
            Path(report_jsonl_path).write_text("")
        except OSError as error:
            raise ConfigError("report_jsonl_path", f"{report_jsonl_path}: cannot be written: {error}") from error
    options = dict(system.options)
    detail = capture_per_request or report_jsonl_path is not None
    if telemetry is not None:
        options["telemetry"] = telemetry
    if scaling is not None:
        options["scaling"] = scaling
    if kv_event_lag_ms is not None:
        for name in ("placement", "prefill_placement", "decode_placement"):
            if name in options:
                router = options[name]
                options[name] = type(router)(msgspec.structs.replace(router.config, kv_event_lag_ms=kv_event_lag_ms))
    if detail and ("placement" in options or "prefill" in options):
        # Of round robin over one pool the records know all.
        options["capture_routing"] = True
    closed = concurrency is not None
    run = Run(
        workload,
        None if "prefill" in options else system.config,
        concurrency=concurrency,
        # The peer scales nothing in the closed loop; the ratio is checked all the same.
        speedup=_checked_speedup(speedup) if closed else speedup,
        max_sim_time_ms=max_sim_time_ms,
        capture_admissions=detail,
        **options,
    )
    run.execute()
    result = run.result(started=started)
    rows = None
    if detail:
        rows = list(_rows(result, workload, closed=closed))
    if report_jsonl_path is not None:
        _write_rows(report_jsonl_path, rows or [])
    planner = None
    if scaling is not None and capture_planner_details:
        planner = {"ticks": result.scaling or [], "lifecycle_operations": result.lifecycle or []}
    return ReplayReport(
        summary=_summary(result, sla),
        per_request=rows if capture_per_request else None,
        coverage={
            "capture_per_request": capture_per_request,
            "capture_planner_details": planner is not None,
            "per_request_records": len(rows) if capture_per_request and rows is not None else 0,
        },
        planner=planner,
        telemetry=result.telemetry,
    )


def _checked_speedup(speedup: Any) -> float:
    good = isinstance(speedup, (int, float)) and not isinstance(speedup, bool)
    if not good or not 0 < speedup < float("inf"):
        raise ConfigError("arrival_speedup_ratio", f"must be finite and > 0, got {speedup!r}")
    return 1.0


def _summary(result: ReplayResult, sla: Sla) -> dict[str, Any]:
    summary = summarize(result.requests, result.gaps, result.totals, sla, tokenless_e2e=False)
    # The peer gives 0 where there is no sample.
    report: dict[str, Any] = {key: 0.0 if value is None else value for key, value in summary.items()}
    report.update(wall_rates(summary, result.totals.wall_time_ms))
    # There is one eviction policy, and no power model.
    report.update(kv_eviction_policy="lru", power_w=None, power_coverage=None)
    return report


def _rows(result: ReplayResult, workload: Workload, *, closed: bool) -> Iterator[dict[str, Any]]:
    """Records; a request that is a session of its own has no session, but in the closed loop."""
    alone: set[str | None] = set()
    if not closed and workload.session_names is not None:
        turns = np.bincount(workload.specs["session"][workload.specs["session"] >= 0])
        alone = {workload.session_names[k] for k in np.flatnonzero(turns == 1).tolist()}
    for row in result.rows(tokenless_e2e=False, reasons=False):
        if row["session_id"] in alone:
            row["session_id"] = row["turn_index"] = None
        yield row


def _write_rows(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
    Path(path).write_text("".join(encode(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
