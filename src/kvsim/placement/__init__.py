"""Placement of requests on ranks: round robin, a KV router, or your own.

See ``docs/placement.md``. A run asks `get_placement` for one placement per pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvsim.errors import ConfigError
from kvsim.layout import Pool
from kvsim.placement.base import PlacedRequest, Placement, PoolInfo, Released, Route
from kvsim.placement.kv_router import KvRouter, KvRouterConfig, decode_router, prefill_router
from kvsim.placement.prompts import PlacedRequests, PromptHashes
from kvsim.placement.round_robin import RoundRobin

__all__ = [
    "PLACEMENTS",
    "KvRouter",
    "KvRouterConfig",
    "PlacedRequest",
    "PlacedRequests",
    "Placement",
    "PoolInfo",
    "PromptHashes",
    "Released",
    "RoundRobin",
    "Route",
    "decode_router",
    "get_placement",
    "prefill_router",
]


def _round_robin(config: Any, role: Pool) -> Placement:
    if config is not None:
        raise ConfigError("router_config", f"needs placement kv_router, got {config!r}")
    return RoundRobin()


def _kv_router(config: Any, role: Pool) -> Placement:
    parsed = KvRouterConfig.parse(config)
    if role is Pool.PREFILL:
        parsed = prefill_router(parsed)
    elif role is Pool.DECODE:
        parsed = decode_router(parsed)
    return KvRouter(parsed)


#: Placements by name; each entry makes one for a pool out of the router configuration of a run.
PLACEMENTS: dict[str, Callable[[Any, Pool], Placement]] = {"round_robin": _round_robin, "kv_router": _kv_router}


def get_placement(
    placement: str | Placement | Callable[[], Placement] | None = None,
    config: KvRouterConfig | Mapping[str, Any] | None = None,
    role: Pool = Pool.AGGREGATED,
) -> Placement:
    """Placement for one pool of one run.

    Parameters
    ----------
    placement : str, Placement, callable or None
        A name of `PLACEMENTS` (None: ``round_robin``); an object, which is used as it is and so serves one pool of
        one run; a subclass of `Placement`, or whatever makes one when called without arguments.
    config : KvRouterConfig or mapping, optional
        Of a KV router named by name. For the pools of a disaggregated run it is derived by `prefill_router` and
        `decode_router`.
    role : Pool

    Returns
    -------
    Placement
        Not started.

    Raises
    ------
    ConfigError
        Unknown name, something that is no placement, or a configuration nobody reads: names the option.
    """
    if placement is None or isinstance(placement, str):
        name = placement or "round_robin"
        if name not in PLACEMENTS:
            raise ConfigError("placement", f"must be one of {', '.join(PLACEMENTS)}, or a Placement, got {placement!r}")
        return PLACEMENTS[name](config, role)
    if config is not None:
        raise ConfigError("router_config", f"needs placement kv_router by name, got {placement!r}")
    made = placement if isinstance(placement, Placement) or not callable(placement) else placement()
    if not isinstance(made, Placement):
        raise ConfigError("placement", f"must be one of {', '.join(PLACEMENTS)}, or a Placement, got {placement!r}")
    return made
