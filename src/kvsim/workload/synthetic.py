"""Synthetic workloads: arrival processes, sessions with shared prefixes, flat lists (spec/workloads-and-report.md 2).

Random numbers come from NumPy's PCG64, each purpose from a seed of its own.
``stream="chacha12"`` draws arrivals and prefix groups from the generator of the
peer instead, so that its recorded runs can be repeated; it knows neither
gamma arrivals nor spread lengths or delays.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvsim._core import content
from kvsim.errors import ConfigError
from kvsim.layout import SEGMENT
from kvsim.workload.base import MAX_TOKENS, NumberedBlocks, NumberedNames, Workload, new_specs, plan_outputs
from kvsim.workload.requests import CONTENT_STRIDE

__all__ = ["arrival_times", "flat_workload", "session_workload", "think_times"]

ArrivalProcess: TypeAlias = Literal["burst", "constant", "poisson", "gamma"]
DelayProcess: TypeAlias = Literal["none", "constant", "exponential"]
Stream: TypeAlias = Literal["pcg64", "chacha12"]
_Rng: TypeAlias = "Callable[[], np.random.Generator]"

#: Seed of the peer's content generator; its arrivals have a seed of their own.
_PEER_CONTENT_SEED = 0
#: Marks shared ids among the raw block ids; fresh ids count up from 0.
_SHARED = 1 << 63
_U32 = 1 << 32
#: Numbered blocks are told apart by signed 32-bit numbers.
_MAX_NUMBERED = 1 << 31


def _rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def _check_number(name: str, value: Any, *, low: float, exclusive: bool = False, high: float = math.inf) -> None:
    good = not isinstance(value, bool) and isinstance(value, (int, float, np.integer, np.floating))
    if good:
        good = (value > low if exclusive else value >= low) and value <= high and math.isfinite(value)
    if not good:
        bound = f"{'>' if exclusive else '>='} {low:g}" + ("" if high == math.inf else f" and <= {high:g}")
        raise ConfigError(name, f"must be finite and {bound}, got {value!r}")


def _check_count(name: str, value: Any, low: int, high: int = MAX_TOKENS) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise ConfigError(name, f"must be an int with {low} <= {name} <= {high}, got {value!r}")


def arrival_times(
    process: ArrivalProcess,
    count: int,
    *,
    rate: float | None = None,
    smoothness: float = 1.0,
    seed: int = 42,
    stream: Stream = "pcg64",
) -> npt.NDArray[np.float64]:
    """Arrival times of an arrival process; the first one is always 0.

    Parameters
    ----------
    process : {"burst", "constant", "poisson", "gamma"}
        All at once; equal gaps; exponential gaps; gamma gaps.
    count : int
        Arrivals, at least 1.
    rate : float
        Mean arrivals per second, > 0; not for ``burst``.
    smoothness : float, default 1.0
        Shape of the gamma gaps, > 0: 1 is Poisson, below it bursty, above it smooth.
    seed : int, default 42
        0 <= seed < 2**64.
    stream : {"pcg64", "chacha12"}
        Generator, see the module; ``chacha12`` has no gamma.

    Returns
    -------
    ndarray of float64, shape (count,)
        Milliseconds, ascending.

    Raises
    ------
    ConfigError
        Naming the parameter.
    """
    _check_count("count", count, 1)
    _check_count("seed", seed, 0, 2**64 - 1)
    if process == "burst":
        return np.zeros(count)
    if process not in ("constant", "poisson", "gamma"):
        raise ConfigError("process", f"must be one of burst, constant, poisson, gamma, got {process!r}")
    _check_number("rate", rate, low=0, exclusive=True)
    assert rate is not None
    mean_ms = 1000.0 / rate
    if process == "constant":
        return np.arange(count, dtype=np.float64) * mean_ms
    if process == "poisson":
        gaps = -mean_ms * np.log(1.0 - _uniforms(seed, count - 1, stream))
    else:
        _check_number("smoothness", smoothness, low=0, exclusive=True)
        if stream != "pcg64":
            raise ConfigError("stream", f"must be pcg64 for the gamma process, got {stream!r}")
        gaps = _rng(seed).gamma(smoothness, mean_ms / smoothness, count - 1)
    return np.concatenate(([0.0], np.cumsum(gaps)))


def _uniforms(seed: int, count: int, stream: Stream) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) of 53 bits."""
    if stream == "pcg64":
        return _rng(seed).random(count)
    words = content.planned_tokens(seed, 2 * count).astype(np.uint64)  # low word first
    return np.asarray((words[0::2] | words[1::2] << np.uint64(32)) >> np.uint64(11), np.float64) * 2.0**-53


def think_times(process: DelayProcess, count: int, *, mean_ms: float = 0.0, seed: int = 42) -> npt.NDArray[np.float64]:
    """Think times between turns.

    Parameters
    ----------
    process : {"none", "constant", "exponential"}
        All 0; all `mean_ms`; exponential with that mean.
    count : int
        How many.
    mean_ms : float
        Finite, >= 0.
    seed : int, default 42
        For ``exponential``.

    Returns
    -------
    ndarray of float64, shape (count,)
        Milliseconds.

    Raises
    ------
    ConfigError
        Naming the parameter.
    """
    _check_count("count", count, 0)
    _check_number("mean_ms", mean_ms, low=0)
    if process == "none":
        return np.zeros(count)
    if process == "constant":
        return np.full(count, float(mean_ms))
    if process == "exponential":
        return _rng(seed).exponential(mean_ms, count)
    raise ConfigError("process", f"must be one of none, constant, exponential, got {process!r}")


def _lengths(mean: int, stddev: float, shape: tuple[int, int], rng: _Rng) -> npt.NDArray[np.int64]:
    """Draw normal lengths, rounded, at least 1."""
    if stddev == 0:
        return np.full(shape, mean, np.int64)
    return np.clip(np.rint(rng().normal(mean, stddev, shape)), 1, MAX_TOKENS).astype(np.int64)


def session_workload(
    *,
    sessions: int,
    input_tokens: int,
    output_tokens: int,
    turns: int = 1,
    block_size: int,
    arrivals_ms: npt.NDArray[np.float64] | None = None,
    input_stddev: float = 0.0,
    output_stddev: float = 0.0,
    shared_prefix_ratio: float = 0.0,
    prefix_groups: int = 0,
    cached_prefix_tokens: int = 0,
    delay_process: DelayProcess = "constant",
    delay_ms: float = 0.0,
    seed: int = 42,
    stream: Stream = "pcg64",
    source: str = "synthetic sessions",
) -> Workload:
    """Sessions of turns that share prefixes in groups; with one turn, plain requests.

    Each turn brings `input_tokens` new tokens. Its prompt is the whole
    previous prompt, the previous output and the new tokens, so the workload is
    cumulative. New tokens are blocks of one id each: first
    ``round(blocks * shared_prefix_ratio)`` ids that all sessions of a group
    share, then fresh ones, numbered in order of creation.

    Parameters
    ----------
    sessions, turns : int
        At least 1; named ``session_0``, ``session_1``, ...
    input_tokens, output_tokens : int
        Mean new prompt tokens and output tokens of a turn, at least 1.
    block_size : int
        Tokens per block id.
    arrivals_ms : ndarray of float64, shape (sessions,), optional
        First arrivals, all 0 if absent.
    input_stddev, output_stddev : float, default 0.0
        Spread of the lengths (normal, rounded, at least 1).
    shared_prefix_ratio : float, default 0.0
        In [0, 1]; no effect without groups.
    prefix_groups : int, default 0
        Every session belongs to one, drawn uniformly.
    cached_prefix_tokens : int, default 0
        New tokens of every turn begin with this many that all sessions share,
        in place of as much of the prefix of the group. The blocks shrink so
        that both are whole: to one token if `shared_prefix_ratio` is set, else
        to the greatest common divisor with `block_size`.
    delay_process, delay_ms
        Think time between turns, see :func:`think_times`.
    seed : int, default 42
        For groups, lengths and delays.
    stream : {"pcg64", "chacha12"}
        See the module.
    source : str
        Name for reports.

    Returns
    -------
    Workload
        Rows session by session.

    Raises
    ------
    ConfigError
        Naming the parameter.
    """
    for name, value in (("sessions", sessions), ("turns", turns), ("block_size", block_size)):
        _check_count(name, value, 1)
    _check_count("input_tokens", input_tokens, 1)
    _check_count("output_tokens", output_tokens, 1)
    _check_count("prefix_groups", prefix_groups, 0)
    _check_count("cached_prefix_tokens", cached_prefix_tokens, 0)
    _check_number("shared_prefix_ratio", shared_prefix_ratio, low=0, high=1)
    for name, number in (("input_stddev", input_stddev), ("output_stddev", output_stddev)):
        _check_number(name, number, low=0)
    if stream != "pcg64" and (input_stddev or output_stddev or delay_process == "exponential"):
        raise ConfigError("stream", f"must be pcg64 for spread lengths or delays, got {stream!r}")

    # Made with the first draw: the module behind it takes longer to import than many a run.
    rng = partial(cache(_rng), seed)
    shape = (sessions, turns)
    ratio = shared_prefix_ratio if prefix_groups > 0 else 0.0
    groups = np.zeros(sessions, np.int64)
    if cached_prefix_tokens:
        block_size = 1 if shared_prefix_ratio > 0 else math.gcd(block_size, cached_prefix_tokens)
    if ratio > 0:
        groups = 1 + _groups(sessions, prefix_groups, rng, stream)
    inputs = _lengths(input_tokens, input_stddev, shape, rng).ravel()
    outputs = _lengths(output_tokens, output_stddev, shape, rng).ravel()
    if cached_prefix_tokens > inputs.min():
        raise ConfigError(
            "cached_prefix_tokens", f"must be at most the shortest input, {inputs.min()}, got {cached_prefix_tokens}"
        )
    n = sessions * turns
    delays = np.zeros(shape)
    delay_seed = int(rng().integers(2**63)) if delay_process == "exponential" else 0
    delays[:, 1:] = think_times(delay_process, sessions * (turns - 1), mean_ms=delay_ms, seed=delay_seed).reshape(
        sessions, turns - 1
    )

    blocks = -(-inputs // block_size)
    shared = np.minimum(blocks, np.floor(blocks * ratio + 0.5).astype(np.int64))  # halves are rounded up
    cached = cached_prefix_tokens // block_size
    shared = np.maximum(shared, cached)
    ids = None  # all fresh
    if shared.any():
        index = np.arange(int(blocks.sum())) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        is_shared = index < np.repeat(shared, blocks)
        raw = np.cumsum(~is_shared).astype(np.uint64)
        row_group = np.where(index < cached, 0, np.repeat(np.repeat(groups, turns), blocks))  # group 0: shared by all
        raw[is_shared] = np.uint64(_SHARED) | (row_group << 32 | index).astype(np.uint64)[is_shared]
        ids = content.intern_ids(raw)
    segments: Any = NumberedBlocks(int(blocks.sum()), block_size)
    offset, count = np.cumsum(blocks) - blocks, blocks
    if ids is not None or segments.num_blocks >= _MAX_NUMBERED or block_size > MAX_TOKENS:
        segments, offset, count = content.block_segments(ids, blocks, inputs, block_size)

    specs = new_specs(n)
    first_turn = np.tile(np.arange(turns) == 0, sessions)
    arrivals = np.zeros(sessions) if arrivals_ms is None else np.asarray(arrivals_ms, np.float64)
    if arrivals.shape != (sessions,):
        raise ConfigError("arrivals_ms", f"must have one entry per session ({sessions}), got shape {arrivals.shape}")
    specs["arrival_ms"] = np.where(first_turn, np.repeat(arrivals, turns), np.nan)
    specs["input_tokens"] = inputs
    specs["max_output_tokens"] = outputs
    specs["prompt_offset"] = offset
    specs["prompt_count"] = count
    specs["session"] = np.repeat(np.arange(sessions), turns)
    specs["turn"] = np.tile(np.arange(turns), sessions)
    planned, specs["planned_offset"] = plan_outputs(outputs, {})
    return Workload(
        specs=specs,
        segments=segments,
        tokens=np.empty(0, np.uint32),
        planned=planned,
        delay_ms=delays.ravel(),
        first_turn=first_turn,
        session_names=NumberedNames("session_", 0, sessions),
        cumulative=True,
        block_size=block_size,
        source=source,
    )


def _groups(sessions: int, groups: int, rng: _Rng, stream: Stream) -> npt.NDArray[np.int64]:
    if stream == "pcg64":
        return rng().integers(groups, size=sessions)
    words = content.planned_tokens(_PEER_CONTENT_SEED, sessions).astype(np.uint64)
    return np.asarray(words * np.uint64(groups) >> np.uint64(32), np.int64)


def flat_workload(
    *,
    requests: int,
    input_tokens: int,
    output_tokens: int,
    random_range_ratio: float = 1.0,
    random_seed: int = 0,
    cached_prefix_tokens: int = 0,
    request_rate: float | None = None,
    arrival_interval_ms: float | None = None,
    arrival_seed: int = 42,
    source: str = "synthetic",
) -> Workload:
    """Single requests ``synthetic-0``, ``synthetic-1``, ... without shared content but a common prefix.

    Lengths and Poisson gaps are those of `random.Random`, number for number as
    the public definition of this generator has them.

    Parameters
    ----------
    requests : int
        At least 1.
    input_tokens, output_tokens : int
        Largest lengths, at least 1.
    random_range_ratio : float, default 1.0
        In (0, 1]: lengths are uniform integers from ``int(length * ratio)`` to
        the length; all prompt lengths are drawn before the first output length.
    random_seed : int, default 0
        For the lengths, 0 <= random_seed < 2**64.
    cached_prefix_tokens : int, default 0
        Every prompt begins with tokens 1, 2, ... of this number.
    request_rate : float, optional
        Poisson arrivals, requests per second.
    arrival_interval_ms : float, optional
        Arrivals at equal distances. Without either, all arrive at 0.
    arrival_seed : int, default 42
        For the Poisson arrivals.
    source : str
        Name for reports.

    Returns
    -------
    Workload
        An explicit list: arrivals as generated, no planned outputs.

    Raises
    ------
    ConfigError
        Naming the parameter.
    """
    for name, value in (("requests", requests), ("input_tokens", input_tokens), ("output_tokens", output_tokens)):
        _check_count(name, value, 1)
    _check_count("random_seed", random_seed, 0, 2**64 - 1)
    _check_count("arrival_seed", arrival_seed, 0, 2**64 - 1)
    _check_count("cached_prefix_tokens", cached_prefix_tokens, 0)
    _check_number("random_range_ratio", random_range_ratio, low=0, exclusive=True, high=1)
    if request_rate is not None and arrival_interval_ms is not None:
        raise ConfigError("request_rate", "must not be given together with arrival_interval_ms")
    arrivals = np.zeros(requests)
    if request_rate is not None:
        _check_number("request_rate", request_rate, low=0, exclusive=True)
        clock = random.Random(arrival_seed)
        gaps = [0.0, *(clock.expovariate(request_rate) * 1000.0 for _ in range(requests - 1))]
        arrivals = np.cumsum(gaps)
    elif arrival_interval_ms is not None:
        _check_number("arrival_interval_ms", arrival_interval_ms, low=0)
        arrivals = np.arange(requests, dtype=np.float64) * float(arrival_interval_ms)

    lengths = random.Random(random_seed)
    inputs = np.array(_range_lengths("input_tokens", input_tokens, requests, random_range_ratio, lengths), np.int64)
    outputs = np.array(_range_lengths("output_tokens", output_tokens, requests, random_range_ratio, lengths), np.int64)
    prefix = int(cached_prefix_tokens)
    if prefix > inputs.min():
        raise ConfigError("cached_prefix_tokens", f"must be at most the shortest input, {inputs.min()}, got {prefix}")
    index = np.arange(requests, dtype=np.int64)
    per_row = 2 if prefix else 1
    segments = np.zeros(requests * per_row, SEGMENT)
    segments["step"] = 1
    if prefix:
        segments[0::2]["start"], segments[0::2]["length"] = 1, prefix
        segments[1::2]["start"] = ((index + 1) * CONTENT_STRIDE + prefix) % _U32
        segments[1::2]["length"] = inputs - prefix
    else:
        segments["start"] = index * CONTENT_STRIDE % _U32
        segments["length"] = inputs
    kept = segments["length"] > 0
    specs = new_specs(requests)
    specs["arrival_ms"] = arrivals
    specs["input_tokens"] = inputs
    specs["max_output_tokens"] = outputs
    counts = np.add.reduceat(kept.astype(np.int64), index * per_row)
    specs["prompt_count"] = counts
    specs["prompt_offset"] = np.cumsum(counts) - counts
    return Workload(
        specs=specs,
        segments=segments[kept],
        tokens=np.empty(0, np.uint32),
        planned=np.empty(0, np.uint32),
        delay_ms=np.zeros(requests),
        first_turn=np.ones(requests, np.bool_),
        request_names=[f"synthetic-{i}" for i in range(requests)],
        source=source,
    )


def _range_lengths(name: str, upper: int, count: int, ratio: float, rng: random.Random) -> list[int]:
    if ratio == 1.0:
        return [upper] * count
    lower = int(upper * ratio)
    if lower == 0:
        raise ConfigError(name, f"must be at least {math.ceil(1 / ratio)} at random_range_ratio {ratio:g}, got {upper}")
    return [rng.randint(lower, upper) for _ in range(count)]
