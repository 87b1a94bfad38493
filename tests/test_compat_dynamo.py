"""`kvsim.compat.dynamo` under the option names of its peer: the recorded runs, and how options are read."""

from __future__ import annotations

import inspect
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import dynamo_cases as cases
from kvsim.compat import dynamo
from kvsim.config import EngineConfig, FixedTiming, NpzTiming
from kvsim.errors import ConfigError, WorkloadError
from kvsim.replay.pool import PoolSpec

SKETCHED = tuple(
    f"{statistic}_{name}"
    for statistic in ("median", "p75", "p90", "p95", "p99")
    for name in ("itl_ms", "output_token_throughput_per_user")
)
ENGINE = {"backend": "vllm", "block_size": 16, "num_gpu_blocks": 256}


class Scripted:
    """The scaling policy of a recorded run: its decisions, one after the other."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self.recorded = recorded
        self.seen: list[dict[str, Any]] = []

    def initial_tick_ms(self) -> float:
        return float(self.recorded["initial_tick_ms"])

    def on_tick(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        decisions = self.recorded["decisions"]
        self.seen.append(snapshot)
        return decisions[len(self.seen) - 1] if len(self.seen) <= len(decisions) else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@cache
def replay(name: str, folder: Path) -> dynamo.ReplayReport:
    case = cases.load(name)["input"]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in case["trace_rows"]))
    options = json.loads(json.dumps(case["kwargs"]))
    if "router_config" in options:
        options["router_config"] = dynamo.KvRouterConfig(**options["router_config"])
    if "telemetry_options" in options:
        options["telemetry_options"] = dynamo.TelemetryOptions(**options["telemetry_options"])
    if case.get("scaling_policy"):
        options["scaling_policy"] = Scripted(case["scaling_policy"])
    with warnings.catch_warnings():
        # Some cases show that options have no effect, and we say so.
        warnings.simplefilter("ignore", UserWarning)
        return dynamo.run_trace_replay([path], **options)


@pytest.mark.parametrize("name", cases.ENDED)
def test_recorded_summaries(name, folder):
    report = replay(name, folder)
    wanted = cases.load(name)["expected"]["summary"]
    exact = {key: value for key, value in wanted.items() if key not in SKETCHED}
    assert cases.same(exact, {key: report.summary[key] for key in exact}) == []
    for key in SKETCHED:
        assert report.summary[key] == pytest.approx(wanted[key], rel=1e-3)


@pytest.mark.parametrize("name", cases.ENDED)
def test_recorded_records(name, folder):
    expected, report = cases.load(name)["expected"], replay(name, folder)
    order = lambda row: (row["arrival_time_ms"], row["input_length"], row["turn_index"] or 0)  # noqa: E731
    # The peer numbers pressure records, of which it shows none.
    left_out = {"row", "pressure_record_ordinals"}
    wanted = [{key: value for key, value in row.items() if key not in left_out} for row in expected["per_request"]]
    got = [{key: row[key] for key in wanted[0]} for row in report.per_request]
    assert cases.same(sorted(wanted, key=order), sorted(got, key=order)) == []
    assert report.coverage == expected["coverage"]


@pytest.mark.parametrize("name", cases.ENDED)
def test_recorded_telemetry_and_ticks(name, folder):
    expected, report = cases.load(name)["expected"], replay(name, folder)
    assert (report.telemetry is None) == (not expected.get("telemetry"))
    if report.telemetry is not None:
        assert cases.same(expected["telemetry"]["samples"], report.telemetry["samples"]) == []
    assert (report.planner is None) == (not expected.get("scaling"))
    if report.planner is not None:
        assert cases.same([tick["snapshot"] for tick in expected["scaling"]], snapshots(report)) == []
        assert cases.same(expected["lifecycle_operations"], operations(report)) == []


def snapshots(report: dynamo.ReplayReport) -> list[dict[str, Any]]:
    return [tick["snapshot"] for tick in report.planner["ticks"]]


def operations(report: dynamo.ReplayReport) -> list[dict[str, Any]]:
    return report.planner["lifecycle_operations"]


@pytest.mark.parametrize("name", sorted(set(cases.NAMES) - set(cases.ENDED)))
def test_runs_that_the_peer_aborts_end(name, folder):
    assert replay(name, folder).summary["num_requests"] == len(cases.load(name)["input"]["trace_rows"])


# ---------------------------------------------------------------- what comes back


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": at, "input_length": 40 + at, "output_length": 3, "hash_ids": [at, 1000 + at]} for at in (5, 9, 12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_records_are_only_given_when_asked_for(trace):
    options = {"extra_engine_args": {"engine": ENGINE}, "trace_block_size": 64}
    bare = dynamo.run_trace_replay(trace, **options)
    full = dynamo.run_trace_replay(trace, capture_per_request=True, **options)
    assert bare.per_request is None
    assert (bare.coverage["per_request_records"], full.coverage["per_request_records"]) == (0, 3)
    assert [row["session_id"] for row in full.per_request] == [None] * 3
    wall = {"wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s"}
    assert {key: bare.summary[key] for key in set(bare.summary) - wall} == {
        key: full.summary[key] for key in set(full.summary) - wall
    }
    assert set(full.to_dict()) == {"summary", "per_request", "coverage", "planner"}
    json.dumps(full.to_dict(), allow_nan=False)


def test_the_closed_loop_shows_a_session_per_line(trace):
    report = dynamo.run_trace_replay(
        trace, extra_engine_args={"engine": ENGINE}, replay_concurrency=1, capture_per_request=True
    )
    assert [(row["session_id"], row["turn_index"]) for row in report.per_request] == [
        ("request_1", 0),
        ("request_2", 0),
        ("request_3", 0),
    ]


def test_records_go_to_a_file(trace, tmp_path):
    path = tmp_path / "rows.jsonl"
    report = dynamo.run_trace_replay(trace, extra_engine_args={"engine": ENGINE}, report_jsonl_path=path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 3
    assert report.per_request is None
    assert (
        rows
        == dynamo.run_trace_replay(trace, extra_engine_args={"engine": ENGINE}, capture_per_request=True).per_request
    )
    with pytest.raises(ConfigError, match=r"report_jsonl_path: .*cannot be written"):
        dynamo.run_trace_replay(trace, report_jsonl_path=tmp_path / "no" / "rows.jsonl")


def test_bounds_add_goodput(trace):
    report = dynamo.run_trace_replay(trace, extra_engine_args={"engine": ENGINE}, sla_ttft_ms=1e6)
    assert report.summary["goodput_completed_requests"] == 3
    assert "goodput_completed_requests" not in dynamo.run_trace_replay(trace).summary


# ---------------------------------------------------------------- made-up workloads


def test_fixed_gaps():
    report = dynamo.run_synthetic_trace_replay(
        20, 3, 4, extra_engine_args={"engine": ENGINE}, arrival_interval_ms=7.0, capture_per_request=True
    )
    assert [row["arrival_time_ms"] for row in report.per_request] == [0.0, 7.0, 14.0, 21.0]
    assert {row["input_length"] for row in report.per_request} == {20}


def test_the_speed_up_divides_the_gaps():
    report = dynamo.run_synthetic_trace_replay(
        20,
        3,
        4,
        extra_engine_args={"engine": ENGINE},
        arrival_interval_ms=7.0,
        arrival_speedup_ratio=2.0,
        capture_per_request=True,
    )
    assert [row["arrival_time_ms"] for row in report.per_request] == [0.0, 3.5, 7.0, 10.5]


def test_poisson_arrivals_follow_their_seed():
    def arrivals(seed):
        report = dynamo.run_synthetic_trace_replay(
            20,
            3,
            5,
            extra_engine_args={"engine": ENGINE},
            request_rate=50.0,
            arrival_seed=seed,
            capture_per_request=True,
        )
        return [row["arrival_time_ms"] for row in report.per_request]

    assert arrivals(1) == arrivals(1) != arrivals(2)


@pytest.mark.parametrize("ratio", [1.0, 4.0])
def test_the_closed_loop_scales_no_think_time(ratio):
    report = dynamo.run_synthetic_trace_replay(
        20,
        3,
        2,
        extra_engine_args={"engine": ENGINE | {"timing_model": {"type": "fixed", "prefill_ms": 10, "decode_ms": 5}}},
        replay_concurrency=1,
        turns_per_session=2,
        inter_turn_delay_ms=100.0,
        arrival_speedup_ratio=ratio,
        capture_per_request=True,
    )
    first, second, third, _ = report.per_request
    assert second["arrival_time_ms"] == first["terminal_time_ms"] + 100.0
    assert third["arrival_time_ms"] == second["terminal_time_ms"]


@pytest.mark.parametrize(
    "given", [{}, {"request_rate": 1.0, "replay_concurrency": 2}, {"request_rate": 1.0, "arrival_interval_ms": 2.0}]
)
def test_made_up_workloads_need_one_controller(given):
    with pytest.raises(ConfigError, match="give exactly one of replay_concurrency, request_rate, arrival_interval_ms"):
        dynamo.run_synthetic_trace_replay(20, 3, 4, **given)


# ---------------------------------------------------------------- reading options


class BuiltError(Exception):
    """Carries what a run would have been built with."""

    def __init__(self, **options: Any) -> None:
        self.options = options


@pytest.fixture
def built(monkeypatch, trace):
    """Call `run_trace_replay` up to the point where the run is built; what for."""

    def stop(workload, config, **options):
        raise BuiltError(workload=workload, config=config, **options)

    def call(**options):
        monkeypatch.setattr(dynamo, "Run", stop)
        with pytest.raises(BuiltError) as caught:
            dynamo.run_trace_replay(trace, **options)
        return caught.value.options

    return call


def test_engine_arguments_in_every_form(built, tmp_path):
    wanted = EngineConfig(num_gpu_blocks=99, block_size=16)
    file = tmp_path / "engine.json"
    launch = {"engine": {"num_gpu_blocks": 99, "block_size": 16}, "dp_size": 2, "startup_time": 1.5}
    flat = {"num_gpu_blocks": 99, "block_size": 16, "dp_size": 2, "startup_time": 1.5}
    file.write_text(json.dumps(launch))
    for given in (launch, flat, json.dumps(launch), f"  {json.dumps(flat)}", file, str(file)):
        options = built(extra_engine_args=given)
        assert (options["config"], options["dp_size"], options["startup_ms"]) == (wanted, 2, 1500.0)
    assert built(extra_engine_args=wanted)["config"] == wanted
    assert built()["config"] == EngineConfig()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"engine_type": "sglang", "sglang": {"page_size": 16}}, EngineConfig(backend="sglang", block_size=16)),
        (
            {"engine_type": "sglang", "sglang_schedule_policy": "fcfs", "sglang_chunked_prefill_size": 64},
            {"backend": "sglang", "sglang": {"schedule_policy": "fifo", "chunked_prefill_size": 64}},
        ),
        ({"engine_type": "sglang", "sglang": None}, None),
        ({"is_prefill": False, "is_decode": False, "zmq_kv_events_port": 5557}, EngineConfig()),
        ({"worker_type": "decode"}, EngineConfig()),
        ({"num_g2_blocks": None, "bandwidth_g1_to_g2_gbps": 14.0}, EngineConfig()),
        ({"num_g2_blocks": 0}, EngineConfig()),
        (
            {"num_g2_blocks": 64, "bandwidth_g1_to_g2_gbps": 14.0, "kv_cache_bytes_per_token": 100},
            {
                "kv_cache_bytes_per_token": 100,
                "native_host_offload": {"num_host_blocks": 64, "d2h_bandwidth_gbps": 14.0},
            },
        ),
        ({"trtllm_capacity_scheduler_policy": "guaranteed_no_evict", "engine_type": "trtllm"}, {"backend": "trtllm"}),
        ({"kv_bytes_per_token": 7}, EngineConfig(kv_transfer_bytes_per_token=7)),
        ({"planner_profile_data": "p.npz"}, EngineConfig(timing_model=NpzTiming(path="p.npz"))),
        (
            {"timing_model": {"type": "fixed", "prefill_ms": 1, "decode_ms": 2}},
            EngineConfig(timing_model=FixedTiming(prefill_ms=1, decode_ms=2)),
        ),
        ({"g3_offload": None, "prefill_schedule_interval": 1}, EngineConfig()),
        ({"data_parallel_size": 3}, EngineConfig()),
    ],
)
def test_older_engine_arguments(given, wanted, built):
    if wanted is None:
        with pytest.raises(ConfigError, match=r"extra_engine_args.sglang"):
            built(extra_engine_args=given)
        return
    if isinstance(wanted, dict):
        wanted = dynamo.parse_config(wanted)
    options = built(extra_engine_args=given)
    assert options["config"] == wanted
    assert options["dp_size"] == given.get("data_parallel_size", 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": {}, "num_gpu_blocks": 3}, "extra_engine_args.num_gpu_blocks: unknown field"),
        ({"engine": {"num_gpu_block": 3}}, "extra_engine_args.num_gpu_block: unknown field"),
        ({"engine": 3}, "extra_engine_args.engine: expected an object"),
        ({"engine": {"num_gpu_blocks": 0}}, r"extra_engine_args.num_gpu_blocks: must lie in 1 <= num_gpu_blocks"),
        ({"engine": {"state_cache": {}}}, "extra_engine_args.state_cache: is not simulated by this version"),
        ({"engine": {}, "dp_size": 0}, "extra_engine_args.dp_size: must be an int >= 1, got 0"),
        ({"engine": {}, "startup_time": "1"}, "extra_engine_args.startup_time: must be a finite number"),
        ({"backend": "vllm", "engine_type": "vllm"}, "extra_engine_args.engine_type: is given twice, as backend too"),
        (
            {"block_size": 4, "engine_type": "sglang", "sglang": {"page_size": 8}},
            "extra_engine_args.sglang.page_size: must equal block_size 4, got 8",
        ),
        ("{", "extra_engine_args: not valid JSON"),
        ("{} x", "extra_engine_args: not valid JSON"),
        ("no/such.json", "extra_engine_args: no/such.json: cannot be read"),
        (3, "extra_engine_args: expected an object, got 3"),
    ],
)
def test_engine_arguments_that_are_refused(given, message, trace):
    with pytest.raises(ConfigError, match=message):
        dynamo.run_trace_replay(trace, extra_engine_args=given)


def test_two_engines_are_two_pools(built):
    options = built(
        prefill_engine_args={"engine": ENGINE, "startup_time": 0.5},
        decode_engine_args={"engine": ENGINE | {"num_gpu_blocks": 512}, "dp_size": 2},
        num_prefill_workers=3,
        num_decode_workers=4,
        capture_per_request=True,
    )
    prefill = dynamo.parse_config(ENGINE | {"worker_type": "prefill"})
    decode = dynamo.parse_config(ENGINE | {"worker_type": "decode", "num_gpu_blocks": 512})
    assert options["prefill"] == PoolSpec(prefill, 3, 1, 500.0)
    assert options["decode"] == PoolSpec(decode, 4, 2, 0.0)
    assert options["config"] is None
    assert options["capture_routing"] is True
    assert not {"workers", "dp_size", "placement"} & set(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_engine_args": {}}, "decode_engine_args: is required together with prefill_engine_args"),
        ({"decode_engine_args": {}}, "prefill_engine_args: is required together with decode_engine_args"),
        (
            {"prefill_engine_args": {}, "decode_engine_args": {}, "extra_engine_args": {}},
            "extra_engine_args: must not be given together with prefill_engine_args",
        ),
        ({"prefill_engine_args": {}, "decode_engine_args": {}, "num_workers": 2}, "num_workers: is of aggregated runs"),
        ({"num_decode_workers": 2}, "num_decode_workers: needs prefill_engine_args and decode_engine_args, got 2"),
        (
            {"prefill_engine_args": {}, "decode_engine_args": {"backend": "sglang"}},
            "decode_engine_args.backend: must be that of prefill_engine_args, 'vllm', got 'sglang'",
        ),
        ({"num_workers": 0}, "num_workers: must be an int >= 1, got 0"),
        ({"replay_mode": "online"}, "replay_mode: must be 'offline' in this version, got 'online'"),
        ({"router_mode": "random"}, "router_mode: must be one of round_robin, kv_router, got 'random'"),
        ({"agentic_lanes": 3}, "agentic_lanes: is not simulated by this version, must be None, got 3"),
        ({"planner_config": {}}, "planner_config: is not simulated by this version"),
        ({"telemetry_options": {}}, "telemetry_options: expected None or TelemetryOptions"),
        ({"replay_concurrency": 1, "arrival_speedup_ratio": 0.0}, "arrival_speedup_ratio: must be finite and > 0"),
        ({"sla_ttft_ms": 1.0, "sla_e2e_ms": 1.0}, "sla.e2e_ms: cannot be combined"),
    ],
)
def test_options_that_are_refused(options, message, trace):
    with pytest.raises(ConfigError, match=message):
        dynamo.run_trace_replay(trace, **options)


def test_one_file_is_needed(trace):
    with pytest.raises(ConfigError, match="trace_files: must be exactly one file for trace_format mooncake, got 2"):
        dynamo.run_trace_replay([trace, trace])
    with pytest.raises(WorkloadError, match="weka"):
        dynamo.run_trace_replay(trace, trace_format="weka")


def test_a_router_configuration_without_a_router_warns(built):
    with pytest.warns(UserWarning, match="router_config has no effect with router_mode round_robin"):
        built(router_config={})


def test_options_reach_the_run(built):
    policy, telemetry = object(), dynamo.TelemetryOptions(sample_interval_ms=3.0)
    options = built(
        num_workers=3,
        arrival_speedup_ratio=2.0,
        max_sim_time_ms=50.0,
        scaling_policy=policy,
        telemetry_options=telemetry,
        router_mode="kv_router",
        kv_event_lag_ms=4.0,
    )
    assert (options["workers"], options["speedup"], options["max_sim_time_ms"]) == (3, 2.0, 50.0)
    assert options["scaling"] is policy
    assert options["telemetry"] is telemetry
    assert (options["placement"].config.kv_event_lag_ms, options["concurrency"]) == (4.0, None)


COMMON = """
    extra_engine_args prefill_engine_args decode_engine_args num_workers num_prefill_workers num_decode_workers
    replay_mode router_mode router_config replay_concurrency arrival_speedup_ratio model_name sla_ttft_ms sla_itl_ms
    sla_e2e_ms capture_per_request capture_planner_details planner_config benchmark_granularity
    performance_model_metadata ais_perf_config telemetry_options kv_event_lag_ms scaling_policy
"""
OF_TRACES = """
    trace_format trace_block_size trace_shared_prefix_ratio trace_num_prefix_groups report_jsonl_path max_sim_time_ms
    agentic_lanes execution_model weka_nested_timestamp_basis
"""
OF_SYNTHETIC = """
    request_rate arrival_interval_ms arrival_seed turns_per_session shared_prefix_ratio num_prefix_groups
    inter_turn_delay_ms
"""


def test_both_functions_know_the_options_of_the_peer():
    for function, names in (
        (dynamo.run_trace_replay, (COMMON + OF_TRACES).split()),
        (dynamo.run_synthetic_trace_replay, (COMMON + OF_SYNTHETIC).split()),
    ):
        keyword_only = [
            name for name, it in inspect.signature(function).parameters.items() if it.kind is it.KEYWORD_ONLY
        ]
        assert sorted(keyword_only) == sorted(names)


# ---------------------------------------------------------------- routers


def test_each_pool_gets_a_router_of_its_own(built):
    from kvsim.placement import KvRouter, decode_router, prefill_router

    config = dynamo.KvRouterConfig(router_temperature=0.5, overlap_score_credit=0.25)
    alone = built(router_mode="kv_router", router_config=config, num_workers=2, capture_per_request=True)
    assert isinstance(alone["placement"], KvRouter)
    assert alone["placement"].config == config
    assert alone["capture_routing"] is True
    both = built(
        router_mode="kv_router",
        router_config={"router_temperature": 0.5, "overlap_score_credit": 0.25},
        prefill_engine_args={"engine": ENGINE},
        decode_engine_args={"engine": ENGINE},
    )
    assert both["prefill_placement"].config == prefill_router(config)
    assert both["decode_placement"].config == decode_router(config)
    assert "capture_routing" not in both
    with pytest.raises(ConfigError, match=r"router_config.overlap: unknown field"):
        built(router_mode="kv_router", router_config={"overlap": 1})
