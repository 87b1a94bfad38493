"""The `traffic` object of the aisimulate JSON interface as a workload.

How the peer reads it (probed where its documents are silent):

- ``synthetic`` is the session generator with one turn, ``synthetic-session``
  the same with ``turns_per_session`` (default 4); their trace block is the
  engine's block, whatever ``trace_block_size`` says.
- ``cached_prefix_tokens`` stays with the session generator; only
  ``random_range_ratio`` below 1 selects the flat generator.
- A trace runs in the closed loop iff ``replay_concurrency`` is set.

Two loads at once and settings without effect are errors here; the peer picks one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kvsim.errors import ConfigError
from kvsim.workload.base import MAX_TOKENS, Workload
from kvsim.workload.mooncake import DEFAULT_BLOCK_SIZE, read_mooncake
from kvsim.workload.synthetic import Stream, arrival_times, flat_workload, session_workload

__all__ = ["TrafficPlan", "workload_from_traffic"]

_TRACE_KEYS = (
    "source_type",
    "load_type",
    "trace_path",
    "trace_paths",
    "trace_format",
    "trace_block_size",
    "replay_concurrency",
    "arrival_speedup_ratio",
)
_SYNTHETIC_KEYS = (
    "source_type",
    "load_type",
    "isl",
    "osl",
    "request_count",
    "num_request_ratio",
    "turns_per_session",
    "shared_prefix_ratio",
    "num_prefix_groups",
    "inter_turn_delay_ms",
    "cached_prefix_tokens",
    "random_range_ratio",
    "random_seed",
    "concurrency",
    "replay_concurrency",
    "request_rate",
    "arrival_interval_ms",
    "arrival_seed",
    "trace_block_size",
)
_SOURCES = ("synthetic", "synthetic-session", "trace")
_DEFAULT_TURNS = 4


class TrafficPlan(NamedTuple):
    """What a `traffic` object asks for."""

    workload: Workload
    #: Cap of the closed loop, None for the open loop.
    concurrency: int | None
    #: Divides arrivals and think times.
    speedup: float


def workload_from_traffic(
    traffic: Mapping[str, Any], *, engine_block_size: int, stream: Stream = "chacha12"
) -> TrafficPlan:
    """Read or generate the workload that `traffic` describes.

    Parameters
    ----------
    traffic : mapping
        ``source_type`` is ``synthetic``, ``synthetic-session`` or ``trace``. Null values count as absent.
    engine_block_size : int
        Tokens per KV block of the engine, the block of synthetic content.
    stream : {"chacha12", "pcg64"}
        Generator of arrivals and prefix groups; the default is the peer's.

    Returns
    -------
    TrafficPlan

    Raises
    ------
    ConfigError
        Naming the key, its value and what is allowed; unknown keys are refused.
    WorkloadError
        If a trace cannot be read.
    """
    source = traffic.get("source_type")
    if source not in _SOURCES:
        raise ConfigError("traffic.source_type", f"must be one of {', '.join(_SOURCES)}, got {source!r}")
    fields = _Traffic({key: value for key, value in traffic.items() if value is not None})
    fields.check_keys(_TRACE_KEYS if source == "trace" else _SYNTHETIC_KEYS, source)
    return _trace(fields) if source == "trace" else _synthetic(fields, source, engine_block_size, stream)


class _Traffic:
    """Checked access to the keys that are set."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given

    def fail(self, key: str, message: str) -> NoReturn:
        raise ConfigError(f"traffic.{key}", message)

    def check_keys(self, allowed: tuple[str, ...], source: str) -> None:
        for key in self.given:
            if key not in allowed:
                self.fail(key, f"is not a key of {source} traffic (allowed: {', '.join(allowed)})")

    def integer(self, key: str, low: int, high: int = MAX_TOKENS) -> int | None:
        value = self.given.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(key, f"must be an int with {low} <= {key} <= {high}, got {value!r}")
        return value

    def number(self, key: str, *, positive: bool = False, high: float = math.inf) -> float | None:
        value = self.given.get(key)
        if value is None:
            return None
        good = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
        if not good or not (value > 0 if positive else value >= 0) or value > high:
            bound = ("> 0" if positive else ">= 0") + ("" if high == math.inf else f" and <= {high:g}")
            self.fail(key, f"must be finite and {bound}, got {value!r}")
        return float(value)

    def required(self, key: str) -> int:
        value = self.integer(key, 1)
        if value is None:
            self.fail(key, "is required")
        return value


def _trace(fields: _Traffic) -> TrafficPlan:
    given = fields.given
    load = given.get("load_type", "trace_timestamps")
    if load not in ("trace_timestamps", "concurrency"):
        fields.fail("load_type", f"must be trace_timestamps or concurrency for a trace, got {load!r}")
    concurrency = fields.integer("replay_concurrency", 1)
    if load == "concurrency" and concurrency is None:
        fields.fail("replay_concurrency", "is required for load_type concurrency")
    speedup = fields.number("arrival_speedup_ratio", positive=True)
    trace_format = given.get("trace_format", "mooncake")
    if trace_format not in ("mooncake", "mooncake-delta"):
        fields.fail("trace_format", f"must be mooncake or mooncake-delta, got {trace_format!r}")
    block_size = fields.integer("trace_block_size", 1)
    paths = given.get("trace_paths", [])
    if not isinstance(paths, list):
        fields.fail("trace_paths", f"must be a list of paths, got {paths!r}")
    paths = ([given["trace_path"]] if "trace_path" in given else []) + paths
    if len(paths) != 1 or not isinstance(paths[0], (str, os.PathLike)) or not paths[0]:
        fields.fail("trace_path", f"must be exactly one path, got {paths!r}")
    workload = read_mooncake(
        paths[0],
        block_size=DEFAULT_BLOCK_SIZE if block_size is None else block_size,
        delta=trace_format == "mooncake-delta",
    )
    return TrafficPlan(workload, concurrency, 1.0 if speedup is None else speedup)


def _synthetic(fields: _Traffic, source: str, engine_block_size: int, stream: Stream) -> TrafficPlan:
    given = fields.given
    concurrency, rate, interval = _load(fields)
    count = fields.integer("request_count", 1)
    if count is None:
        ratio = fields.number("num_request_ratio", positive=True)
        if ratio is None:
            fields.fail("request_count", "is required, or num_request_ratio")
        load = concurrency or rate or 1000.0 / (interval or 1.0)
        count = max(1, math.floor(ratio * load + 0.5))
    seed = fields.integer("arrival_seed", 0, 2**64 - 1)
    seed = 42 if seed is None else seed
    isl, osl = fields.required("isl"), fields.required("osl")
    cached = fields.integer("cached_prefix_tokens", 0) or 0
    if cached > isl:
        fields.fail("cached_prefix_tokens", f"must be at most isl = {isl}, got {cached}")
    turns = fields.integer("turns_per_session", 1)
    if source == "synthetic" and turns not in (None, 1):
        fields.fail("turns_per_session", f"must be 1 for synthetic traffic, use synthetic-session, got {turns}")
    if turns is None:
        turns = 1 if source == "synthetic" else _DEFAULT_TURNS
    prefix_ratio = fields.number("shared_prefix_ratio", high=1.0) or 0.0
    groups = fields.integer("num_prefix_groups", 0) or 0
    delay = fields.number("inter_turn_delay_ms") or 0.0
    fields.integer("trace_block_size", 1)
    range_ratio = fields.number("random_range_ratio", positive=True, high=1.0)
    random_seed = fields.integer("random_seed", 0, 2**64 - 1) or 0
    if range_ratio is not None and range_ratio != 1.0:
        for key in ("turns_per_session", "shared_prefix_ratio", "num_prefix_groups", "inter_turn_delay_ms"):
            if given.get(key, 0) not in (0, 1 if key == "turns_per_session" else 0):
                fields.fail(key, f"must not be set together with random_range_ratio, got {given[key]!r}")
        if source != "synthetic":
            fields.fail("random_range_ratio", f"must be 1 for {source} traffic, got {range_ratio:g}")
        workload = flat_workload(
            requests=count,
            input_tokens=isl,
            output_tokens=osl,
            random_range_ratio=range_ratio,
            random_seed=random_seed,
            cached_prefix_tokens=cached,
            request_rate=rate if given["load_type"] == "poisson" else None,
            arrival_interval_ms=interval,
            arrival_seed=seed,
        )
        return TrafficPlan(workload, concurrency, 1.0)
    if interval is not None:
        arrivals = np.arange(count, dtype=np.float64) * interval
    elif rate is not None:
        arrivals = arrival_times("poisson", count, rate=rate, seed=seed, stream=stream)
    else:
        arrivals = np.zeros(count)
    workload = session_workload(
        sessions=count,
        input_tokens=isl,
        output_tokens=osl,
        turns=turns,
        block_size=engine_block_size,
        arrivals_ms=arrivals,
        shared_prefix_ratio=prefix_ratio,
        prefix_groups=groups,
        cached_prefix_tokens=cached,
        delay_ms=delay,
        stream=stream,
        source=source,
    )
    return TrafficPlan(workload, concurrency, 1.0)


def _load(fields: _Traffic) -> tuple[int | None, float | None, float | None]:
    """Concurrency, Poisson rate (requests/s) or interval (ms): exactly one of them."""
    load = fields.given.get("load_type")
    concurrency, replay = fields.integer("concurrency", 1), fields.integer("replay_concurrency", 1)
    if concurrency is not None and replay is not None and concurrency != replay:
        fields.fail("replay_concurrency", f"must equal concurrency {concurrency} if both are set, got {replay}")
    concurrency = replay if concurrency is None else concurrency
    rate = fields.number("request_rate", positive=True)
    interval = fields.number("arrival_interval_ms", positive=True)
    wanted: dict[str, dict[str, float | None]] = {
        "concurrency": {"concurrency": concurrency},
        "poisson": {"request_rate": rate},
        "constant_rate": {"request_rate": rate, "arrival_interval_ms": interval},
    }
    if not isinstance(load, str) or load not in wanted:
        fields.fail("load_type", f"must be one of {', '.join(wanted)} for synthetic traffic, got {load!r}")
    every: dict[str, float | None] = {"concurrency": concurrency, "request_rate": rate, "arrival_interval_ms": interval}
    for key, value in every.items():
        if value is not None and key not in wanted[load]:
            fields.fail(key, f"must not be set for load_type {load}, got {value!r}")
    values = [value for value in wanted[load].values() if value is not None]
    if len(values) != 1:
        fields.fail(next(iter(wanted[load])), f"load_type {load} needs exactly one of {', '.join(wanted[load])}")
    if load == "constant_rate":
        return None, None, interval if rate is None else 1000.0 / rate
    return concurrency, rate, None
