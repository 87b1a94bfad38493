"""Options of `kvsim replay` about many engines: pools, placement, scaling, telemetry."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from kvsim.cli.options import milliseconds, override, positive_float, positive_int
from kvsim.errors import ConfigError

if TYPE_CHECKING:
    from kvsim.config import EngineConfig

__all__ = ["add_system_options", "system_of"]


def add_system_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that turn one pool of workers into a system."""
    pools = parser.add_argument_group(
        "prefill and decode pools", "give both numbers of workers for a disaggregated run"
    )
    for role in ("prefill", "decode"):
        pools.add_argument(f"--{role}-workers", type=positive_int, metavar="N", help=f"workers of the {role} pool")
        pools.add_argument(
            f"--{role}-dp-size", type=positive_int, default=1, metavar="N", help=f"ranks of each {role} worker (1)"
        )
        pools.add_argument(
            f"--set-{role}",
            action="append",
            default=[],
            type=override,
            metavar="PATH=VALUE",
            help=f"as --set, for the {role} pool only",
        )
    pools.add_argument(
        "--handoff-latency-ms",
        type=milliseconds,
        default=0.0,
        metavar="MS",
        help="time of a transfer without a configured bandwidth (0)",
    )
    system = parser.add_argument_group("system")
    system.add_argument(
        "--placement", default="round_robin", metavar="NAME", help="round_robin or kv_router (round_robin)"
    )
    system.add_argument(
        "--router",
        action="append",
        default=[],
        type=override,
        metavar="OPTION=VALUE",
        help="option of kv_router, e.g. router_queue_threshold=0.5; may be repeated",
    )
    system.add_argument(
        "--scaling", metavar="MODULE:NAME", help="scaling policy: a class or object of a module that can be imported"
    )
    system.add_argument(
        "--startup-ms", type=milliseconds, default=0.0, metavar="MS", help="time until an added worker is ready (0)"
    )
    system.add_argument("--telemetry", metavar="FILE", help="write samples of the running system as JSON lines")
    system.add_argument(
        "--telemetry-interval-ms",
        type=positive_float,
        default=1000.0,
        metavar="MS",
        help="virtual time between samples (1000)",
    )


def system_of(arguments: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Arguments of `kvsim.replay` that the options stand for.

    Raises
    ------
    ConfigError
        Naming the option.
    """
    from kvsim.replay.telemetry import TelemetryOptions

    options: dict[str, Any] = {"placement": arguments.placement}
    if arguments.router:
        options["router"] = dict(arguments.router)
    if arguments.scaling is not None:
        options["scaling"] = _policy(arguments.scaling)
    if arguments.telemetry is not None:
        options["telemetry"] = TelemetryOptions(
            sample_interval_ms=arguments.telemetry_interval_ms, jsonl_path=arguments.telemetry
        )
    return options | _pools(arguments, config)


def _pools(arguments: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    from kvsim.config import apply_overrides, parse_config
    from kvsim.replay.pool import PoolSpec

    counts = {"prefill": arguments.prefill_workers, "decode": arguments.decode_workers}
    if counts == {"prefill": None, "decode": None}:
        for role in counts:
            if getattr(arguments, f"set_{role}") or getattr(arguments, f"{role}_dp_size") != 1:
                raise ConfigError(f"--{role}-workers", f"is needed for options of the {role} pool")
        if arguments.handoff_latency_ms:
            raise ConfigError("--handoff-latency-ms", "needs --prefill-workers and --decode-workers")
        return {
            "config": config,
            "workers": arguments.workers,
            "dp_size": arguments.dp_size,
            "startup_ms": arguments.startup_ms,
        }
    for role, count in counts.items():
        if count is None:
            raise ConfigError(f"--{role}-workers", "prefill and decode workers come together")
    for name in ("workers", "dp_size"):
        if getattr(arguments, name) != 1:
            dashed = name.replace("_", "-")
            raise ConfigError(f"--{dashed}", f"use --prefill-{dashed} and --decode-{dashed} with two pools")
    pools: dict[str, Any] = {
        role: PoolSpec(
            parse_config(apply_overrides(config.to_dict(), dict(getattr(arguments, f"set_{role}")))),
            count,
            getattr(arguments, f"{role}_dp_size"),
            arguments.startup_ms,
        )
        for role, count in counts.items()
    }
    return pools | {"handoff_latency_ms": arguments.handoff_latency_ms}


def _policy(text: str) -> Any:
    """What ``module:name`` names; a class is called without arguments."""
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError("--scaling", f"expected MODULE:NAME, got {text!r}")
    here = os.getcwd()
    if here not in sys.path:
        # As `python -m` does: a module beside the caller can be imported.
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError("--scaling", f"{text} cannot be imported: {error}") from None
    return found() if isinstance(found, type) else found
