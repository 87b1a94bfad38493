"""kvsim: a fast, step-exact simulator of LLM serving engines.

The public names are here; each is imported from its module when it is first
used, so that ``import kvsim`` costs a few milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvsim.replay import replay

if TYPE_CHECKING:
    from kvsim.branches import BranchResult, branch
    from kvsim.config import (
        EngineConfig,
        ExternalTiming,
        FixedTiming,
        KvbmTiers,
        NativeHostOffload,
        NpzTiming,
        PolynomialTiming,
        SglangConfig,
        TrtllmConfig,
        load_config,
        parse_config,
    )
    from kvsim.contract import (
        ActivateDestination,
        CancelDestination,
        CancelRequest,
        CancelSource,
        CommandContext,
        RankIdentity,
        ReleaseSource,
        Request,
        ReserveDestination,
        Submit,
        SubmitHandoffPrefill,
        TimingModel,
    )
    from kvsim.errors import (
        CommandError,
        ConfigError,
        IntegrityError,
        InternalWorkDueError,
        KvsimError,
        PoisonedError,
        PolicyError,
        SnapshotError,
        StoppedError,
        TimingError,
        WorkloadError,
    )
    from kvsim.group import EngineGroup
    from kvsim.layout import FailReason, RequestStatus
    from kvsim.live import LiveScheduler, VirtualClock, WallClock
    from kvsim.placement import KvRouter, KvRouterConfig, PlacedRequest, Placement, PoolInfo, RoundRobin, Route
    from kvsim.policies import Directive, Policy, register_policy
    from kvsim.rank import RankSnapshot, SchedulerRank
    from kvsim.replay.component import EngineComponent
    from kvsim.replay.pool import PoolSpec
    from kvsim.replay.scaling import ScalingPolicy
    from kvsim.replay.telemetry import TelemetryOptions
    from kvsim.report import ReplayResult, Sla
    from kvsim.sweeps import RandomParameter, SweepResult, sweep
    from kvsim.workload import Workload, load_workload

__version__ = "0.1.0"

__all__ = [
    "ActivateDestination",
    "BranchResult",
    "CancelDestination",
    "CancelRequest",
    "CancelSource",
    "CommandContext",
    "CommandError",
    "ConfigError",
    "Directive",
    "EngineComponent",
    "EngineConfig",
    "EngineGroup",
    "ExternalTiming",
    "FailReason",
    "FixedTiming",
    "IntegrityError",
    "InternalWorkDueError",
    "KvRouter",
    "KvRouterConfig",
    "KvbmTiers",
    "KvsimError",
    "LiveScheduler",
    "NativeHostOffload",
    "NpzTiming",
    "PlacedRequest",
    "Placement",
    "PoisonedError",
    "Policy",
    "PolicyError",
    "PolynomialTiming",
    "PoolInfo",
    "PoolSpec",
    "RandomParameter",
    "RankIdentity",
    "RankSnapshot",
    "ReleaseSource",
    "ReplayResult",
    "Request",
    "RequestStatus",
    "ReserveDestination",
    "RoundRobin",
    "Route",
    "ScalingPolicy",
    "SchedulerRank",
    "SglangConfig",
    "Sla",
    "SnapshotError",
    "StoppedError",
    "Submit",
    "SubmitHandoffPrefill",
    "SweepResult",
    "TelemetryOptions",
    "TimingError",
    "TimingModel",
    "TrtllmConfig",
    "VirtualClock",
    "WallClock",
    "Workload",
    "WorkloadError",
    "__version__",
    "branch",
    "load_config",
    "load_workload",
    "parse_config",
    "register_policy",
    "replay",
    "sweep",
]

#: Module -> the public names that live in it, beside those above.
_HOMES = {
    "branches": "BranchResult branch",
    "config": (
        "EngineConfig ExternalTiming FixedTiming KvbmTiers NativeHostOffload NpzTiming PolynomialTiming SglangConfig "
        "TrtllmConfig load_config parse_config"
    ),
    "contract": (
        "ActivateDestination CancelDestination CancelRequest CancelSource CommandContext RankIdentity ReleaseSource "
        "Request ReserveDestination Submit SubmitHandoffPrefill TimingModel"
    ),
    "errors": (
        "CommandError ConfigError IntegrityError InternalWorkDueError KvsimError PoisonedError PolicyError "
        "SnapshotError StoppedError TimingError WorkloadError"
    ),
    "group": "EngineGroup",
    "layout": "FailReason RequestStatus",
    "live": "LiveScheduler VirtualClock WallClock",
    "placement": "KvRouter KvRouterConfig PlacedRequest Placement PoolInfo RoundRobin Route",
    "policies": "Directive Policy register_policy",
    "rank": "RankSnapshot SchedulerRank",
    "replay.component": "EngineComponent",
    "replay.pool": "PoolSpec",
    "replay.scaling": "ScalingPolicy",
    "replay.telemetry": "TelemetryOptions",
    "report": "ReplayResult Sla",
    "sweeps": "RandomParameter SweepResult sweep",
    "workload": "Workload load_workload",
}
_HOME_OF = {name: f"kvsim.{module}" for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return import_module(f"kvsim.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
