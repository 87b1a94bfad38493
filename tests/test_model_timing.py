"""The timing models of the twin: reference values, guards, floors, interpolation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.config import EngineConfig, ExternalTiming, FixedTiming, NpzTiming
from kvsim.errors import ConfigError, TimingError
from model.timing import Timing, interpolate

SMALL = {"num_gpu_blocks": 25, "block_size": 4}


class Supplied:
    def __init__(self, prefill: float, decode: float) -> None:
        self.prefill, self.decode = prefill, decode
        self.asked: list[tuple[int, ...]] = []

    def predict_prefill_ms(self, *batch: int) -> float:
        self.asked.append(batch)
        return self.prefill

    def predict_decode_ms(self, *batch: int) -> float:
        self.asked.append(batch)
        return self.decode


def external(supplied: Any, **fields: Any) -> Timing:
    return Timing(EngineConfig(timing_model=ExternalTiming(provider="mine"), **SMALL, **fields), supplied)


@pytest.mark.parametrize(("tokens", "want"), [(4, 16.5621604959824), (1000, 32.1058589), (8192, 169.1369184042496)])
def test_polynomial_prefill_has_its_reference_values(tokens: int, want: float) -> None:
    assert Timing(EngineConfig()).prefill_ms(1, tokens, 0) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(("length", "want"), [(25, 17.63375), (50, 26.31), (100, 34.01), (900, 34.01)])
def test_polynomial_decode_has_its_reference_values(length: int, want: float) -> None:
    assert Timing(EngineConfig(**SMALL)).decode_ms([length], 0) == pytest.approx(want, abs=1e-6)


def test_means_are_floored_before_the_model_sees_them() -> None:
    supplied = Supplied(3.0, 4.0)
    timing = external(supplied)
    assert timing.prefill_ms(2, 151, 33) == 3.0
    assert timing.decode_ms([7, 8], 5) == 4.0
    assert supplied.asked == [(2, 75, 16), (2, 15, 7, 100)]


def test_old_rules_time_decode_by_blocks_and_floor_every_model() -> None:
    supplied = Supplied(0.25, 0.25)
    timing = external(supplied, ruleset="dynamo-1.3")
    assert timing.decode_ms([7, 8], 5) == 1.0
    assert timing.prefill_ms(1, 8, 0) == 0.25
    assert supplied.asked[0] == (2, 20, 7, 100)
    assert external(supplied).decode_ms([7, 8], 5) == 0.25


def test_nothing_to_do_costs_nothing_and_asks_nobody() -> None:
    supplied = Supplied(3.0, 4.0)
    timing = external(supplied)
    assert timing.prefill_ms(0, 0, 0) == timing.prefill_ms(1, 8, 8) == timing.decode_ms([], 3) == 0.0
    assert supplied.asked == []


def test_either_ratio_of_zero_leaves_decode_unscaled() -> None:
    fixed = FixedTiming(prefill_ms=12.0, decode_ms=12.0)
    for speedup, decode_speedup, prefill, decode in (
        (3.0, 2.0, 4.0, 2.0),
        (0.0, 2.0, 12.0, 12.0),
        (3.0, 0.0, 4.0, 12.0),
    ):
        config = EngineConfig(timing_model=fixed, speedup_ratio=speedup, decode_speedup_ratio=decode_speedup)
        assert Timing(config).prefill_ms(1, 8, 0) == prefill
        assert Timing(config).decode_ms([8], 1) == decode


def test_bad_predictions_are_errors() -> None:
    with pytest.raises(TimingError, match="non-finite duration"):
        external(Supplied(float("nan"), 1.0)).prefill_ms(1, 8, 0)
    with pytest.raises(TimingError, match="negative duration"):
        external(Supplied(1.0, -1.0)).decode_ms([8], 1)
    with pytest.raises(TimingError, match="external decode prediction failed"):
        external(object()).decode_ms([8], 1)
    with pytest.raises(ConfigError, match="mine"):
        external(None)
    assert external(Supplied(-1.0, 1.0)).prefill_ms(1, 8, 0) == 0.0


def test_interpolation_is_linear_inside_and_outside_the_grid() -> None:
    assert [interpolate([[0.0, 10.0, 20.0]], [0.0, 10.0, 40.0], [x]) for x in (-10, 5, 15, 30)] == [-10, 5, 25, 70]
    plane = [[float(x + 10 * y) for y in (0, 1, 5)] for x in (0, 2)]
    assert interpolate([[0.0, 2.0], [0.0, 1.0, 5.0]], plane, [1, 3]) == 31.0
    assert interpolate([[0.0, 2.0], [0.0, 1.0, 5.0]], plane, [4, 7]) == 74.0


def test_a_profile_file_is_read_in_both_forms(tmp_path: Path) -> None:
    decode = {
        "decode_active_kv_tokens": [0.0, 100.0],
        "decode_context_length": [0.0, 10.0],
        "decode_itl": [[1.0, 2.0], [3.0, 4.0]],
    }
    plain = tmp_path / "plain.npz"
    np.savez(plain, prefill_isl=[0.0, 100.0], prefill_ttft_ms=[5.0, 15.0], **decode)
    timing = Timing(EngineConfig(timing_model=NpzTiming(path=str(plain)), **SMALL))
    assert timing.prefill_ms(2, 60, 20) == 9.0
    assert timing.decode_ms([5, 5, 40], 0) == pytest.approx(3.6)

    batched = tmp_path / "batched.npz"
    times = [[[float(b + 10 * t + 100 * k) for k in (0, 1)] for t in (0, 1)] for b in (1, 2)]
    np.savez(
        batched,
        prefill_batch_size=[1.0, 2.0],
        prefill_new_tokens_per_request=[0.0, 1.0],
        prefill_kv_read_tokens_per_request=[0.0, 1.0],
        prefill_time_ms=times,
        **decode,
    )
    timing = Timing(EngineConfig(timing_model=NpzTiming(path=str(batched)), **SMALL))
    assert timing.prefill_ms(3, 15, 6) == pytest.approx(3 + 10 * 3 + 100 * 2)


def test_a_profile_axis_must_increase(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    np.savez(
        path,
        prefill_isl=[0.0, 1.0],
        prefill_ttft_ms=[0.0, 1.0],
        decode_active_kv_tokens=[0.0, 0.0],
        decode_context_length=[0.0, 1.0],
        decode_itl=[[0.0, 0.0], [0.0, 0.0]],
    )
    with pytest.raises(ConfigError, match="decode_active_kv_tokens"):
        Timing(EngineConfig(timing_model=NpzTiming(path=str(path))))
