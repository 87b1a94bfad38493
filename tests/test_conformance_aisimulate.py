"""`kvsim.compat.aisimulate` gives what its peer gave: every recorded run, from JSON text to JSON text."""

from __future__ import annotations

import json
import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kv_index import KvIndex
from kvsim.compat import aisimulate
from kvsim.errors import ConfigError
from model import recording

#: Kinds of deployment that `kvsim.compat.aisimulate` is not asked for here.
OTHER_KINDS = {"prefill_schedule_interval", "state_cache", "host_loop"}

CASES = {
    path.name.removesuffix(".json.gz"): case
    for path in sorted(recording.FOLDER.rglob("*.json.gz"))
    if not OTHER_KINDS & set((case := recording.load(path))["tags"])
}
ENDED = [name for name, case in CASES.items() if "error" not in case["expected"]]
ABORTED = [name for name, case in CASES.items() if "error" in case["expected"]]
#: The peer gives series for single workers only.
WITH_SERIES = [name for name in ENDED if CASES[name]["expected"].get("artifacts")]

#: Percentiles over all token gaps come from a sketch in the peer, exact ones here.
SKETCHED = tuple(
    f"{statistic}_{name}"
    for statistic in ("median", "p75", "p90", "p95", "p99")
    for name in ("itl_ms", "output_token_throughput_per_user")
)
SKETCH_ERROR = 1e-3

#: Of the peer's report, not of its simulation: where its numbers come from, and power, which none of the cases model.
NOT_OURS = {"power_w", "power_coverage", "prediction_provenance"}


@cache
def run(name: str) -> dict[str, Any]:
    """Report and artifacts, whichever function the case was recorded with."""
    case = CASES[name]
    payload = json.loads(json.dumps(case["input"]["payload"]))
    with tempfile.TemporaryDirectory() as folder:
        for file, rows in case["input"].get("files", {}).items():
            path = Path(folder) / file
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            if payload["traffic"].get("trace_path") == file:
                payload["traffic"]["trace_path"] = str(path)
        answer = json.loads(getattr(aisimulate, case["peer"]["function"])(json.dumps(payload)))
    return answer if "report" in answer else {"report": answer, "artifacts": None}


def differences(want: Any, got: Any, at: str = "") -> list[str]:
    """Paths at which two JSON values differ; times may differ by rounding of sums."""
    if isinstance(want, dict) and isinstance(got, dict):
        absent = [f"{at}.{key}: missing" for key in want.keys() - got.keys()]
        both = want.keys() & got.keys()
        return absent + [line for key in both for line in differences(want[key], got[key], f"{at}.{key}")]
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        return [line for k, pair in enumerate(zip(want, got, strict=True)) for line in differences(*pair, f"{at}[{k}]")]
    if isinstance(want, float) and isinstance(got, (int, float)) and not isinstance(got, bool):
        same = math.isclose(want, got, rel_tol=1e-9, abs_tol=1e-6)
    else:
        same = want == got and isinstance(want, bool) == isinstance(got, bool)
    return [] if same else [f"{at}: want {want!r} got {got!r}"]


def test_every_kind_of_case_is_here() -> None:
    tags = {tag for case in CASES.values() for tag in case["tags"]}
    assert {"vllm", "trtllm", "sglang", "trace", "synthetic", "closed_loop", "tokenization", "rng"} <= tags
    assert {"mooncake_delta_sessions", "synthetic_poisson", "vllm_workers3", "vllm_max_sim_time"} <= set(ENDED)
    assert len(ENDED) >= 48
    assert sorted(ABORTED) == ["sglang_oversized_aborts", "vllm_outgrows_pool_aborts"]
    assert len(WITH_SERIES) >= 46


@pytest.mark.parametrize("name", ENDED)
def test_every_request_has_all_its_recorded_fields(name: str) -> None:
    want = CASES[name]["expected"]["report"].get("per_request")
    assert want is not None
    got = run(name)["report"]["per_request"]
    assert [row["uuid"] for row in sorted(got, key=lambda row: row["uuid"])] == sorted(row["uuid"] for row in want)
    by_id = {row["uuid"]: row for row in got}
    assert [line for row in want for line in differences(row, by_id[row["uuid"]], row["uuid"])] == []


@pytest.mark.parametrize("name", ENDED)
def test_the_report_is_the_recorded_one(name: str) -> None:
    recorded = CASES[name]["expected"]["report"]
    want = {key: value for key, value in recorded.items() if key not in {"per_request", *NOT_OURS}}
    got = run(name)["report"]
    sketched = {key: want.pop(key) for key in SKETCHED}
    assert differences(want, got) == []
    for key, value in sketched.items():
        assert got[key] == pytest.approx(value, rel=SKETCH_ERROR), key


@pytest.mark.parametrize("name", WITH_SERIES)
def test_the_output_series_is_the_recorded_one_with_its_token_ids(name: str) -> None:
    want = recording.outputs_of(CASES[name]["expected"]["artifacts"])
    got = recording.outputs_of(run(name)["artifacts"])
    assert recording.first_difference(want, got) is None


@pytest.mark.parametrize("name", WITH_SERIES)
def test_the_kv_events_are_the_recorded_ones_in_order(name: str) -> None:
    want = recording.kv_events_of(CASES[name]["expected"]["artifacts"])
    got = recording.kv_events_of(run(name)["artifacts"])
    assert recording.first_difference(want, got) is None
    KvIndex().recorded(event for _, event in want)


@pytest.mark.parametrize("name", WITH_SERIES)
def test_the_releases_are_the_recorded_ones_with_their_block_hashes(name: str) -> None:
    want, got = CASES[name]["expected"]["artifacts"]["requests"], run(name)["artifacts"]["requests"]
    assert differences(want, got) == []


@pytest.mark.parametrize("name", ABORTED)
def test_a_run_that_the_peer_aborts_ends_with_a_state_for_every_request(name: str) -> None:
    requests = CASES[name]["input"]["payload"]["spec"]["requests"]
    answer = run(name)
    report, rows = answer["report"], answer["report"]["per_request"]
    assert sorted(row["request_id"] for row in rows) == sorted(request["id"] for request in requests)
    states = [row["terminal_status"] for row in rows]
    assert set(states) <= {"completed", "rejected", "failed"}
    assert states.count("completed") == report["completed_requests"] < len(requests)
    assert states.count("rejected") == report["rejected_requests"]
    assert states.count("failed") == report["failed_requests"]
    ends = [output for output in answer["artifacts"]["outputs"] if output["completed"]]
    assert len({output["request_id"] for output in ends}) == len(ends) == len(requests)
    for row in rows:
        assert row["terminal_time_ms"] is not None
        assert row["output_length"] == row["requested_output_length"] or row["terminal_status"] != "completed"


@pytest.mark.parametrize("name", ["vllm_prefix_on_b16", "sglang_page16", "mooncake_trace_vllm"])
def test_the_report_alone_is_that_of_the_run_with_artifacts(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    payload = json.loads(json.dumps(case["input"]["payload"]))
    for file, rows in case["input"].get("files", {}).items():
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        payload["traffic"]["trace_path"] = str(tmp_path / file)
    alone = json.loads(aisimulate.run_replay_json(json.dumps(payload)))
    real_time = {"wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s"}
    full = run(name)["report"]
    assert alone.keys() == full.keys() >= real_time
    assert {key: alone[key] for key in alone.keys() - real_time} == {key: full[key] for key in full.keys() - real_time}


def small_payload() -> dict[str, Any]:
    return {
        "spec": {
            "version": 1,
            "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
            "engine": {"rank": {"block_size": 16, "num_gpu_blocks": 64}},
            "requests": [{"id": "a", "arrival_time_ms": 0.0, "input_tokens": 40, "output_tokens": 3}],
        }
    }


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("surprise",), 1, "surprise"),
        (("spec", "surprise"), 1, "spec.surprise"),
        (("spec",), [], "spec"),
        (("spec", "topology", "kind"), "ring", "spec.topology.kind"),
        (("spec", "topology", "workers", "initial_workers"), 0, "workers"),
        (("spec", "engine", "kv_eviction_policy"), "mru", "spec.engine.kv_eviction_policy"),
        (("spec", "engine", "rank", "block_sise"), 16, "block_sise"),
        (("spec", "engine", "rank", "num_gpu_blocks"), 0, "num_gpu_blocks"),
        (("spec", "max_in_flight"), 0, "concurrency"),
        (("spec", "max_sim_time_ms"), -1.0, "max_sim_time_ms"),
        (("spec", "sla"), {"tpot_ms": 3.0}, "spec.sla.tpot_ms"),
        (("tokenization",), {"base_ms": 1.0}, "tokenization.workers"),
    ],
)
def test_a_wrong_payload_is_refused_with_its_field(path: tuple[str, ...], value: Any, field: str) -> None:
    payload = small_payload()
    level = payload
    for key in path[:-1]:
        level = level[key]
    level[path[-1]] = value
    with pytest.raises(ConfigError) as caught:
        aisimulate.run_replay_json(json.dumps(payload))
    assert caught.value.field == field


def test_artifacts_are_of_one_worker() -> None:
    payload = small_payload()
    payload["spec"]["topology"]["workers"]["initial_workers"] = 2
    with pytest.raises(ConfigError, match=r"spec\.topology"):
        aisimulate.run_replay_with_artifacts_json(json.dumps(payload))
