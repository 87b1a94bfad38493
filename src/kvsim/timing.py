"""Timing models: how long a pass takes (spec/timing-and-fpm.md).

The configuration names a model; built-in ones reach the kernels as numbers or
arrays, a callable one is asked once per part of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from kvsim._core.state import modelled_ms
from kvsim.config import EngineConfig, ExternalTiming, FixedTiming, NpzTiming
from kvsim.contract import TimingModel
from kvsim.errors import ConfigError

__all__ = ["TimingParameters", "check_profile", "load_profile", "modelled_ms", "resolve_timing"]

FIXED, POLYNOMIAL, PROFILE, CALLABLE = range(4)

_DECODE_AXES = ("decode_active_kv_tokens", "decode_context_length")
_PREFILL_1D = ("prefill_isl",)
_PREFILL_3D = ("prefill_batch_size", "prefill_new_tokens_per_request", "prefill_kv_read_tokens_per_request")


class TimingParameters(NamedTuple):
    """A timing model as the kernels take it.

    Attributes
    ----------
    kind : int
        FIXED, POLYNOMIAL, PROFILE or CALLABLE.
    prefill_ms, decode_ms : float
        Modelled durations of FIXED.
    profile : dict of ndarray, or None
        Arrays of PROFILE.
    model : TimingModel or None
        Object of CALLABLE.
    """

    kind: int
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    profile: dict[str, npt.NDArray[np.float64]] | None = None
    model: TimingModel | None = None


def resolve_timing(config: EngineConfig, timing: Any = None) -> TimingParameters:
    """Parameters of the timing model a rank uses.

    Parameters
    ----------
    config : EngineConfig
        Its `timing_model` counts unless `timing` is given.
    timing : TimingModel, or a profile from `load_profile`, optional
        A model object; required when the configuration names an external one.

    Raises
    ------
    ConfigError
        If an external model is named but not given, or `timing` lacks a method.
    """
    if isinstance(timing, dict):
        return TimingParameters(PROFILE, profile=check_profile(timing))
    if timing is not None:
        if not isinstance(timing, TimingModel):
            raise ConfigError(
                "timing", f"must have predict_prefill_ms and predict_decode_ms, got {type(timing).__name__}"
            )
        return TimingParameters(CALLABLE, model=timing)
    model = config.timing_model
    if isinstance(model, FixedTiming):
        decode_ms = model.decode_ms
        if config.rules.floor_decode_of_every_model:
            decode_ms = max(1.0, decode_ms)
        return TimingParameters(
            FIXED,
            modelled_ms(model.prefill_ms, config.speedup_ratio),
            modelled_ms(decode_ms, config.speedup_ratio * config.decode_speedup_ratio),
        )
    if isinstance(model, NpzTiming):
        return TimingParameters(PROFILE, profile=load_profile(model.path))
    if isinstance(model, ExternalTiming):
        raise ConfigError("timing_model", f"external model {model.provider!r} is named but no timing object is given")
    return TimingParameters(POLYNOMIAL)


def load_profile(path: str | Path) -> dict[str, npt.NDArray[np.float64]]:
    """Arrays of an NPZ timing profile, checked (timing-and-fpm.md section 2.1).

    Returns
    -------
    dict of str to ndarray of float64
        ``decode_active_kv_tokens`` [A], ``decode_context_length`` [C], ``decode_itl`` [A, C] and either
        ``prefill_isl`` [P], ``prefill_ttft_ms`` [P] or the batch-aware arrays. C-contiguous.

    Raises
    ------
    ConfigError
        Unreadable file, or an array that is missing, misshaped, not finite or not increasing; names it.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            raw = {name: np.asarray(archive[name], dtype=np.float64) for name in archive.files}
    except (OSError, EOFError, ValueError, TypeError, BadZipFile) as error:
        raise ConfigError("timing_model.path", f"{path}: cannot be read as an .npz profile: {error}") from None
    return check_profile(raw, str(path))


def check_profile(raw: Mapping[str, Any], source: str = "timing") -> dict[str, npt.NDArray[np.float64]]:
    """Arrays of a profile as the kernels take them, checked.

    Parameters
    ----------
    raw : mapping of str to array-like
        As `load_profile` returns.
    source : str
        Where it came from, for errors.

    Raises
    ------
    ConfigError
        An array that is missing, misshaped, not finite or not increasing; names it.
    """
    batched = "prefill_batch_size" in raw
    axes = _PREFILL_3D if batched else _PREFILL_1D
    table = "prefill_time_ms" if batched else "prefill_ttft_ms"
    profile = {}
    for name in (*_DECODE_AXES, "decode_itl", *axes, table):
        if name not in raw:
            raise ConfigError(name, f"is missing in profile {source}")
        try:
            profile[name] = np.ascontiguousarray(raw[name], dtype=np.float64)
        except (TypeError, ValueError):
            raise ConfigError(name, f"must be an array of numbers in profile {source}") from None
        if not np.isfinite(profile[name]).all():
            raise ConfigError(name, f"must be finite in profile {source}")
    for name in (*_DECODE_AXES, *axes):
        axis = profile[name]
        if axis.ndim != 1 or len(axis) < 2 or not (np.diff(axis) > 0).all():
            raise ConfigError(
                name, f"must be one axis of at least 2 strictly increasing points, got shape {axis.shape}"
            )
    for name, over in (("decode_itl", _DECODE_AXES), (table, axes)):
        shape = tuple(len(profile[axis]) for axis in over)
        if profile[name].shape != shape:
            raise ConfigError(name, f"must have shape {shape} to match {', '.join(over)}, got {profile[name].shape}")
    if batched and (profile[table] < 0).any():
        raise ConfigError(table, f"must be >= 0, got {profile[table].min()}")
    return profile
