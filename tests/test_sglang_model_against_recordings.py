"""The SGLang twin gives what the peer gave: the recordings are the ground truth of ruleset ``dynamo``."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kv_index import KvIndex
from model import recording
from model.replay import Result


def case_artifacts(case: dict[str, Any]) -> dict[str, Any]:
    artifacts: dict[str, Any] = case["expected"].get("artifacts") or {}
    return artifacts


CASES = {path.name.removesuffix(".json.gz"): recording.load(path) for path in recording.explicit_radix_cases()}
FINISHED = sorted(name for name, case in CASES.items() if "error" not in case["expected"])
ABORTED = sorted(set(CASES) - set(FINISHED))
#: The peer gives series for single workers only.
WITH_SERIES = [name for name in FINISHED if case_artifacts(CASES[name])]


@cache
def run(name: str) -> Result:
    return recording.run_twin(CASES[name]["input"]["payload"])


def test_every_kind_of_case_is_here() -> None:
    assert len(FINISHED) >= 12
    assert len(WITH_SERIES) >= 11
    assert {"sglang_retract", "sglang_mtp", "sglang_interval2", "sglang_lpm_page1"} <= set(WITH_SERIES)
    assert "sglang_oversized_aborts" in ABORTED


@pytest.mark.parametrize("name", FINISHED)
def test_every_request_has_its_recorded_times_and_reuse(name: str) -> None:
    report, records = CASES[name]["expected"]["report"], run(name).records
    for row in report["per_request"]:
        record = records[recording.uuid_to_int(row["uuid"])]
        assert recording.request_differences(row, record) == []
    assert len(report["per_request"]) == sum(record.terminal_ms is not None for record in records.values())
    assert report["completed_requests"] == sum(record.status == "completed" for record in records.values())


@pytest.mark.parametrize("name", WITH_SERIES)
def test_the_output_series_is_the_recorded_one(name: str) -> None:
    want = recording.outputs_of(case_artifacts(CASES[name]))
    got = [
        (when, (output.request_id, output.token_id, output.completed, output.rejected, output.cached_tokens))
        for when, _, output in run(name).outputs
    ]
    assert recording.first_difference(want, got) is None


@pytest.mark.parametrize("name", WITH_SERIES)
def test_the_kv_events_are_the_recorded_ones_in_order(name: str) -> None:
    want = recording.kv_events_of(case_artifacts(CASES[name]))
    got = [(when, recording.plain_event(event)) for when, event in run(name).kv_events[0]]
    assert recording.first_difference(want, got) is None
    KvIndex().recorded(event for _, event in want)


@pytest.mark.parametrize("name", ABORTED)
def test_a_run_that_the_peer_aborts_ends_with_a_reason(name: str) -> None:
    assert "peer_abort" in CASES[name]["tags"]
    records = run(name).records.values()
    assert all(record.terminal_ms is not None for record in records)
    stuck = [record for record in records if record.status != "completed"]
    assert stuck
    assert all(record.reason for record in stuck)
