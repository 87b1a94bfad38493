"""Pass durations (timing-and-fpm.md sections 1 to 3), with exact rounding to nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from kvsim.config import EngineConfig, ExternalTiming, FixedTiming, NpzTiming, PolynomialTiming
from kvsim.errors import ConfigError, TimingError


def round_ns(seconds: float) -> int:
    """Whole nanoseconds nearest to the exact value of `seconds`, ties to even."""
    return round(Fraction(seconds) * 10**9)


def scaled(raw_ms: float, ratio: float) -> float:
    """A raw duration divided by a speed-up ratio, ms; ratio 0 leaves it alone.

    Rounded to nanoseconds before and after. The detour over seconds is that of
    the peer: with it the sums of many passes are equal to the last bit.
    """
    if not math.isfinite(raw_ms):
        raise TimingError(f"non-finite duration {raw_ms}")
    if raw_ms < 0:
        raise TimingError(f"negative duration {raw_ms}")
    nanoseconds = round_ns(raw_ms / 1000.0)
    if ratio > 0 and nanoseconds > 0:
        nanoseconds = round_ns(nanoseconds / 1e9 / ratio)
    return nanoseconds / 1e9 * 1000.0


class Polynomial:
    def prefill(self, count: int, isl: int, prefix: int) -> float:
        x = float(count * (isl - prefix))
        return 4.209989e-07 * (x * x) + 1.518344e-02 * x + 16.50142

    def decode(self, count: int, active: int, context: int, total: int) -> float:
        u = min(1.0, active / total) if total else 1.0
        return max(1.0, -25.74 * (u * u) + 54.01 * u + 5.74)


class Fixed:
    def __init__(self, prefill_ms: float, decode_ms: float) -> None:
        self.prefill_ms, self.decode_ms = prefill_ms, decode_ms

    def prefill(self, count: int, isl: int, prefix: int) -> float:
        return self.prefill_ms

    def decode(self, count: int, active: int, context: int, total: int) -> float:
        return self.decode_ms


class Callback:
    """A model that the user supplies; kvsim.contract.TimingModel."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prefill(self, count: int, isl: int, prefix: int) -> float:
        try:
            return float(self.model.predict_prefill_ms(count, isl, prefix))
        except Exception as error:
            raise TimingError(f"external prefill prediction failed: {error}") from error

    def decode(self, count: int, active: int, context: int, total: int) -> float:
        try:
            return float(self.model.predict_decode_ms(count, active, context, total))
        except Exception as error:
            raise TimingError(f"external decode prediction failed: {error}") from error


def interpolate(axes: Sequence[Sequence[float]], values: Any, point: Sequence[float]) -> float:
    """Multilinear interpolation, linear extrapolation from the outermost cell, one axis at a time."""
    if not axes:
        return float(values)
    axis, x = axes[0], point[0]
    low = 0
    while low < len(axis) - 2 and x >= axis[low + 1]:
        low += 1
    share = (x - axis[low]) / (axis[low + 1] - axis[low])
    below = interpolate(axes[1:], values[low], point[1:])
    above = interpolate(axes[1:], values[low + 1], point[1:])
    return below + (above - below) * share


class Npz:
    """A profile file (timing-and-fpm.md section 2.1)."""

    def __init__(self, path: str) -> None:
        with np.load(path) as arrays:
            data = {name: np.asarray(arrays[name], dtype=float) for name in arrays.files}

        def axis(name: str) -> list[float]:
            values: list[float] = data[name].tolist()
            steps = pairwise(values)
            if len(values) < 2 or not np.isfinite(values).all() or not all(a < b for a, b in steps):
                raise ConfigError("timing_model.path", f"{name} must be finite and strictly increasing, got {values}")
            return values

        def table(name: str, axes: list[list[float]]) -> list[Any]:
            values = data[name]
            if values.shape != tuple(len(axis) for axis in axes) or not np.isfinite(values).all():
                raise ConfigError("timing_model.path", f"{name} must be finite and match its axes, got {values.shape}")
            cells: list[Any] = values.tolist()
            return cells

        self.decode_axes = [axis("decode_active_kv_tokens"), axis("decode_context_length")]
        self.decode_itl = table("decode_itl", self.decode_axes)
        self.batch_aware = "prefill_batch_size" in data
        if self.batch_aware:
            names = ("prefill_batch_size", "prefill_new_tokens_per_request", "prefill_kv_read_tokens_per_request")
            self.prefill_axes = [axis(name) for name in names]
            self.prefill_ms = table("prefill_time_ms", self.prefill_axes)
            if (data["prefill_time_ms"] < 0).any():
                raise ConfigError("timing_model.path", "prefill_time_ms must be >= 0")
        else:
            self.prefill_axes = [axis("prefill_isl")]
            self.prefill_ms = table("prefill_ttft_ms", self.prefill_axes)

    def prefill(self, count: int, isl: int, prefix: int) -> float:
        new = isl - prefix
        point = [count, new, prefix] if self.batch_aware else [count * new]
        return interpolate(self.prefill_axes, self.prefill_ms, point)

    def decode(self, count: int, active: int, context: int, total: int) -> float:
        return max(0.0, interpolate(self.decode_axes, self.decode_itl, [active, context]))


class Timing:
    """The model of a configuration with the guards, floors and ratios that every model shares."""

    def __init__(self, config: EngineConfig, supplied: Any = None) -> None:
        self.config = config
        spec = config.timing_model
        self.model: Polynomial | Fixed | Npz | Callback
        if supplied is not None:
            self.model = Callback(supplied)
        elif isinstance(spec, PolynomialTiming):
            self.model = Polynomial()
        elif isinstance(spec, FixedTiming):
            self.model = Fixed(spec.prefill_ms, spec.decode_ms)
        elif isinstance(spec, NpzTiming):
            self.model = Npz(spec.path)
        elif isinstance(spec, ExternalTiming):
            raise ConfigError("timing_model", f"the external model {spec.provider!r} was not supplied")

    def prefill_ms(self, count: int, total_isl: int, total_prefix: int) -> float:
        if count == 0:
            return 0.0
        isl, prefix = total_isl // count, total_prefix // count
        if isl <= prefix:
            return 0.0
        raw = self.model.prefill(count, isl, prefix)
        if not math.isfinite(raw):
            raise TimingError(f"non-finite duration {raw}")
        return scaled(max(0.0, raw), self.config.speedup_ratio)

    def decode_ms(self, lengths: Sequence[int], active_blocks: int) -> float:
        """Time of a decode step over sequences of these lengths."""
        if not lengths:
            return 0.0
        by_blocks = self.config.rules.decode_time_from_blocks
        active = active_blocks * self.config.tokens_per_block if by_blocks else sum(lengths)
        return self.decode_step_ms(len(lengths), active, sum(lengths) // len(lengths))

    def decode_step_ms(self, count: int, active_tokens: int, mean_context: int) -> float:
        """Time of a decode step of `count` sequences that hold `active_tokens` tokens."""
        config = self.config
        total = config.num_gpu_blocks * config.tokens_per_block
        raw = self.model.decode(count, active_tokens, mean_context, total)
        if not math.isfinite(raw):
            raise TimingError(f"non-finite duration {raw}")
        if config.rules.floor_decode_of_every_model:
            raw = max(1.0, raw)
        return scaled(raw, config.speedup_ratio * config.decode_speedup_ratio)
