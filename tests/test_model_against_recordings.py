"""The twin gives what the peer gave: the recordings are the ground truth of ruleset ``dynamo``."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kv_index import KvIndex
from model import recording
from model.hashing import ChaCha12, chain, local_hash, synthetic_token
from model.replay import Result
from model.timing import scaled
from model.welford import Welford


def case_artifacts(case: dict[str, Any]) -> dict[str, Any]:
    artifacts: dict[str, Any] = case["expected"].get("artifacts") or {}
    return artifacts


CASES = {path.name.removesuffix(".json.gz"): recording.load(path) for path in recording.explicit_paged_cases()}
FINISHED = sorted(name for name, case in CASES.items() if "error" not in case["expected"])
ABORTED = sorted(set(CASES) - set(FINISHED))
#: The peer gives series for single workers only.
WITH_SERIES = [name for name in FINISHED if case_artifacts(CASES[name])]


@cache
def run(name: str) -> Result:
    return recording.run_twin(CASES[name]["input"]["payload"])


def test_every_kind_of_case_is_here() -> None:
    assert len(FINISHED) >= 28
    assert {"vllm_mtp_sampled", "trtllm_tight", "vllm_workers3", "vllm_max_sim_time", "vllm_host_offload"} <= set(
        FINISHED
    )
    assert "vllm_outgrows_pool_aborts" in ABORTED
    assert len(WITH_SERIES) >= 27


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


@pytest.mark.parametrize("name", WITH_SERIES)
def test_the_observations_of_host_memory_are_the_recorded_ones(name: str) -> None:
    want = recording.host_records_of(case_artifacts(CASES[name]))
    assert bool(want) == ("host_offload" in CASES[name]["tags"])
    got = [recording.plain_record(record) for record in run(name).host_records[0]]
    assert recording.first_difference(want, got) is None


@pytest.mark.parametrize("name", ABORTED)
def test_a_run_that_the_peer_aborts_ends_with_a_reason(name: str) -> None:
    assert "peer_abort" in CASES[name]["tags"]
    records = run(name).records.values()
    assert all(record.terminal_ms is not None for record in records)
    stuck = [record for record in records if record.status != "completed"]
    assert stuck
    assert all(record.reason for record in stuck)


def test_block_hashes_are_those_of_the_specification() -> None:
    assert local_hash([1, 2, 3, 4]) == 14643705804678351452
    assert chain([1, 2, 3, 4, 5, 6, 7, 8, 9], 4) == [
        (14643705804678351452, 14643705804678351452),
        (4945711292740353085, 16777012769546811212),
    ]
    assert chain(range(8), 4)[1] == (9510318385840434533, 12124091508212882195)


def test_made_up_tokens_are_those_of_the_specification() -> None:
    assert [synthetic_token(1, n) for n in range(4)] == [2515880452, 3600266899, 2716793611, 2249174135]
    assert synthetic_token(2, 0) == 1927195132


def test_acceptance_has_the_specified_mean_and_exact_ends() -> None:
    drafter = ChaCha12(42)
    rates, samples = (0.7, 0.5, 0.2), 20_000
    total = 0
    for _ in range(samples):
        total += 1
        for rate in rates:
            if not drafter.accept(rate):
                break
            total += 1
    assert total / samples == pytest.approx(2.12, abs=0.03)
    assert all(drafter.accept(1.0) and not drafter.accept(0.0) for _ in range(100))


def test_certain_acceptance_consumes_no_randomness() -> None:
    one, other = ChaCha12(7), ChaCha12(7)
    assert one.accept(1.0)
    assert one.next_u64() == other.next_u64()


@pytest.mark.parametrize(
    ("raw", "ratio", "want"), [(12.0, 3.0, 4.0), (12.0, 0.0, 12.0), (0.0, 3.0, 0.0), (1 / 3, 1.0, 0.333333)]
)
def test_durations_are_whole_nanoseconds_after_scaling(raw: float, ratio: float, want: float) -> None:
    assert scaled(raw, ratio) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "total", "variance"),
    [((), 0, 0.0), ((42,), 42, 0.0), ((2, 4, 4, 4, 5, 5, 7, 9), 40, 4.0), ((100, 200, 300), 600, 20000 / 3)],
)
def test_variance_is_that_of_the_population(values: tuple[int, ...], total: int, variance: float) -> None:
    running = Welford(values)
    assert running.count == len(values)
    assert running.sum == total
    assert running.variance == pytest.approx(variance)
