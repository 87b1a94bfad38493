"""Handoffs that the kernel leads, and the same run decided event by event: not a byte may differ."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.config import EngineConfig, FixedTiming, SglangConfig
from kvsim.placement import RoundRobin
from kvsim.replay.coordinator import Action, Coordinator, Fact, Outcome, State, kernel_tables
from kvsim.replay.run import Run
from kvsim.replay.system import System
from kvsim.workload import workload_from_requests

EXAMPLES = int(os.environ.get("KVSIM_EXAMPLES", "60"))


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    fields: dict[str, Any] = {
        "block_size": draw(st.sampled_from([4, 16])),
        "max_num_seqs": draw(st.sampled_from([1, 2, 8])),
        "max_num_batched_tokens": draw(st.sampled_from([16, 64])),
        "timing_model": FixedTiming(
            prefill_ms=draw(st.sampled_from([0.0, 1.0, 7.5])), decode_ms=draw(st.sampled_from([0.0, 1.0, 2.5]))
        ),
        "kv_transfer_bytes_per_token": draw(st.sampled_from([None, 1000, 1_000_000])),
        "kv_transfer_bandwidth": draw(st.sampled_from([None, 0.5, 10.0])),
        "kv_transfer_timing_mode": draw(st.sampled_from(["full_prompt", "destination_missing"])),
    }
    return EngineConfig(
        backend=draw(st.sampled_from(["vllm", "sglang", "trtllm"])),
        num_gpu_blocks=draw(st.integers(6, 64)),
        enable_prefix_caching=draw(st.booleans()),
        sglang=SglangConfig(chunked_prefill_size=fields["block_size"] * draw(st.sampled_from([2, 100]))),
        **fields,
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    config = draw(configs())
    sizes = [draw(st.integers(1, 3)) for _ in range(2)]
    ranks = [draw(st.integers(1, 2)) for _ in range(2)]
    hinted = draw(st.booleans())
    requests = []
    now = 0.0
    for _ in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0.0, 0.0, 1.0, 3.7, 40.0]))
        request: dict[str, Any] = {
            "arrival_time_ms": now,
            # Some of them never fit.
            "input_tokens": draw(st.one_of(st.integers(1, 60), st.integers(1, 60), st.integers(1, 400))),
            "output_tokens": draw(st.integers(0, 12)),
        }
        if draw(st.booleans()):
            request["input_token_ids"] = [7] * request["input_tokens"]
        if hinted and draw(st.booleans()):
            request["dp_rank"] = draw(st.integers(0, min(ranks) - 1))
            request["prefill_dp_rank"] = draw(st.integers(0, ranks[0] - 1))
        requests.append(request)
    options = {
        "prefill": kvsim.PoolSpec(config, sizes[0], ranks[0]),
        "decode": kvsim.PoolSpec(config.replace(num_gpu_blocks=draw(st.integers(4, 64))), sizes[1], ranks[1]),
        "handoff_latency_ms": draw(st.sampled_from([0.0, 0.3, 5.0])),
        "concurrency": draw(st.sampled_from([None, None, 1, 4])),
        "max_sim_time_ms": draw(st.sampled_from([None, None, 60.0])),
    }
    return requests, options


def everything(requests: list[dict[str, Any]], options: dict[str, Any], *, led: bool) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if not led:
            patch.setattr(System, "_can_be_led", lambda system: False)
        run = Run(
            workload_from_requests(requests),
            **options,
            record_passes=True,
            capture_outputs=True,
            capture_admissions=True,
            capture_routing=True,
        )
        try:
            run.execute()
        except kvsim.errors.KvsimError as error:
            return {"error": str(error)}
    assert run.system is not None
    assert run.system._is_led is led
    return {
        "records": run.records.tobytes(),
        "handoffs": run.handoffs.tobytes(),
        "routing": run.system.routing.tobytes(),
        "admissions": run.admissions.tobytes(),
        "outputs": run.outputs.tobytes(),
        "passes": run.passes.tobytes(),
        "gaps": [column.tolist() for column in run.gaps.items()],
        "now": run.now_ms,
        "stalled": run.system.stalled,
        "ranks": [rank.digest() for rank in run.ranks],
    }


@settings(max_examples=5 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=runs())
def test_led_handoffs_are_those_decided_event_by_event(made: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    requests, options = made
    assert everything(requests, options, led=True) == everything(requests, options, led=False)


@pytest.mark.parametrize("source_first", [True, False])
def test_the_kernel_has_the_tables_of_the_coordinator(source_first: bool) -> None:
    facts, outcomes = kernel_tables(source_first)
    tables = Coordinator(source_first)._tables
    for state in State:
        for fact in Fact:
            same_step(facts[state, fact], tables.first if (state, fact) == (0, 0) else tables.facts[state][fact])
        for action in Action:
            for outcome in Outcome:
                same_step(outcomes[state, action, outcome], tables.outcomes[state][action][outcome])


def same_step(code: int, step: Any) -> None:
    if step is None:
        assert code == -1
    elif code == -2:
        assert not step.actions
        assert not step.lifecycle
    else:
        assert code & 255 == step.state
        assert [code >> 16 & 15, code >> 20 & 15][: code >> 8 & 255] == list(step.actions)


class Same(RoundRobin):
    """Somebody's own placement, though it decides as the default one."""


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_placement": Same},
        {"decode_placement": Same},
        {"telemetry": kvsim.TelemetryOptions(sample_interval_ms=50.0)},
        {"tokenization": {"workers": 1, "base_ms": 1.0, "per_input_token_ms": 0.0}},
    ],
)
def test_where_somebody_else_decides_the_kernel_does_not(options: dict[str, Any]) -> None:
    config = EngineConfig(timing_model=FixedTiming(prefill_ms=20.0, decode_ms=5.0))
    pools = {"prefill": kvsim.PoolSpec(config), "decode": kvsim.PoolSpec(config)}
    items = [{"arrival_time_ms": 3.0 * k, "input_tokens": 30, "output_tokens": 4} for k in range(8)]
    run = Run(workload_from_requests(items), **pools, **options)
    run.execute()
    assert run.system is not None
    assert not run.system._is_led
    plain = Run(workload_from_requests(items), **pools)
    plain.execute()
    assert plain.system is not None
    assert plain.system._is_led
    assert np.array_equal(run.records["output_tokens"], plain.records["output_tokens"])
    if "tokenization" not in options:
        assert run.records.tobytes() == plain.records.tobytes()


def test_a_delay_that_no_float_holds_is_refused_as_ever() -> None:
    config = EngineConfig(kv_transfer_bytes_per_token=2**60, kv_transfer_bandwidth=1e-300)
    pools = {"prefill": kvsim.PoolSpec(config), "decode": kvsim.PoolSpec(config)}
    run = Run(workload_from_requests([{"input_tokens": 30}]), **pools)
    with pytest.raises(kvsim.errors.CommandError, match="transfer delay: must be finite"):
        run.execute()


def test_the_progress_of_led_handoffs_is_told() -> None:
    config = EngineConfig(timing_model=FixedTiming(prefill_ms=20.0, decode_ms=5.0))
    seen: list[tuple[int, int]] = []
    items = [{"arrival_time_ms": 3.0 * k, "input_tokens": 30, "output_tokens": 4} for k in range(8)]
    kvsim.replay(
        items,
        prefill=kvsim.PoolSpec(config),
        decode=kvsim.PoolSpec(config),
        progress=lambda done, of: seen.append((done, of)),
    )
    assert seen[-1] == (8, 8)
