import json
import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import ConfigError
from kvsim.layout import RequestStatus
from kvsim.report import GapHistogram, RunTotals, Sla, distribution, summarize
from kvsim.report.summary import STATISTICS, wall_rates
from report_cases import RecordedRun, completed, gaps_of, load_case, record, recorded_paths, table_of

LATENCIES = ("ttft_ms", "ttst_ms", "tpot_ms", "itl_ms", "e2e_latency_ms", "output_token_throughput_per_user")


def summary_of(*rows, gaps=None, sla=None, **totals):
    totals.setdefault("end_ms", math.inf)
    return summarize(table_of(*rows), gaps or GapHistogram(), RunTotals(**totals), sla)


# ---------------------------------------------------------------- distributions

EXAMPLE = [0, 1, 1, 2.5, 4, 4, 7.25, 9.5, 15, 22, 22, 100]
EXAMPLE_RESULT = {
    "mean": 15.6875,
    "min": 0.0,
    "max": 100.0,
    "median": 7.25,
    "p75": 15.0,
    "p90": 22.0,
    "p95": 22.0,
    "p99": 100.0,
    "std": pytest.approx(26.49353793066025, rel=1e-14),
}


def test_distribution_of_the_checked_example():
    assert distribution(EXAMPLE) == EXAMPLE_RESULT
    assert distribution(EXAMPLE[::-1]) == EXAMPLE_RESULT


def test_distribution_of_the_checked_example_with_weights():
    values, weights = np.unique(EXAMPLE, return_counts=True)
    assert distribution(values, weights) == EXAMPLE_RESULT


def test_distribution_of_nothing_is_none():
    assert distribution([]) == dict.fromkeys(STATISTICS)
    assert distribution([3.0], [0]) == dict.fromkeys(STATISTICS)


def test_distribution_of_one_sample_is_that_sample():
    assert distribution([0.1]) == {**dict.fromkeys(STATISTICS, 0.1), "std": 0.0}


def test_equal_samples_have_no_spread():
    result = distribution([0.1] * 7)
    assert result["mean"] == 0.1
    assert result["std"] == 0.0


def test_percentile_rounds_a_half_upwards():
    # (n - 1) * 50 / 100 = 0.5 and 1.5: Python's round would take the even neighbour.
    assert distribution([1.0, 2.0])["median"] == 2.0
    assert distribution([1.0, 2.0, 3.0, 4.0])["median"] == 3.0


@given(st.lists(st.tuples(st.floats(0, 1e9), st.integers(0, 6)), max_size=40))
def test_weighted_distribution_is_that_of_the_repeated_samples(rows):
    values, weights = [value for value, _ in rows], [weight for _, weight in rows]
    weighted = distribution(np.array(values), np.array(weights, np.int64))
    expanded = distribution(np.repeat(values, weights))
    assert weighted == pytest.approx(expanded, rel=1e-9, abs=1e-3) if sum(weights) else weighted == expanded
    for name in ("min", "max", "median", "p75", "p90", "p95", "p99"):
        assert weighted[name] == expanded[name]


@pytest.mark.parametrize(
    ("values", "weights"),
    [([1.0, math.nan], None), ([math.inf], None), ([1.0], [-1]), ([1.0, 2.0], [1]), ([[1.0]], None)],
)
def test_distribution_refuses_what_is_no_sample(values, weights):
    with pytest.raises(ValueError):
        distribution(values, weights)


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("name", [field.name for field in fields(Sla)])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "5", True])
def test_a_bound_must_be_a_positive_number(name, value):
    with pytest.raises(ConfigError, match=rf"^sla\.{name}: ") as caught:
        Sla(**{name: value})
    assert caught.value.field == f"sla.{name}"


@pytest.mark.parametrize("other", ["ttft_ms", "itl_ms"])
def test_an_end_to_end_bound_stands_alone(other):
    with pytest.raises(ConfigError, match=r"^sla\.e2e_ms: cannot be combined"):
        Sla(**{"e2e_ms": 10.0, other: 5.0})


# ---------------------------------------------------------------- one request


def test_latencies_of_one_request():
    times = [50.0, 60.0, 75.0, 95.0]
    summary = summary_of(completed(tokens=times, input_tokens=10), gaps=gaps_of(times))
    assert summary["mean_ttft_ms"] == 50.0
    assert summary["mean_ttst_ms"] == 10.0
    assert summary["mean_e2e_latency_ms"] == 95.0
    assert summary["mean_tpot_ms"] == 15.0
    assert [summary[f"{name}_itl_ms"] for name in ("min", "median", "max", "mean")] == [10.0, 15.0, 20.0, 15.0]
    assert summary["max_output_token_throughput_per_user"] == 100.0


def test_time_to_second_token_runs_from_the_first_token():
    summary = summary_of(completed(tokens=[120.0, 130.0], input_tokens=1000))
    assert (summary["mean_ttft_ms"], summary["mean_ttst_ms"]) == (120.0, 10.0)


def test_a_completion_without_output_counts_in_requests_tokens_and_duration():
    row = completed(first_admit_ms=5.0, terminal_ms=25.0, input_tokens=32)
    summary = summary_of(row, decode_worker_seconds=0.025, decode_gpus_per_worker=4)
    assert summary["completed_requests"] == 1
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (32, 0)
    assert summary["duration_ms"] == 25.0
    assert summary["decode_worker_seconds"] == 0.025
    assert summary["gpu_hours"] == pytest.approx(0.1 / 3600, rel=1e-15)
    assert (summary["num_ttft_samples"], summary["num_tpot_samples"]) == (0, 0)
    for name in ("ttft_ms", "ttst_ms", "tpot_ms", "itl_ms", "output_token_throughput_per_user"):
        assert summary[f"mean_{name}"] is None


def test_a_completion_without_output_lasts_to_its_end_unless_the_peer_is_followed():
    rows = table_of(completed(first_admit_ms=0.0, terminal_ms=20.0, input_tokens=32))
    totals = RunTotals(end_ms=20.0)
    ours = summarize(rows, GapHistogram(), totals)
    peers = summarize(rows, GapHistogram(), totals, tokenless_e2e=False)
    assert (ours["mean_e2e_latency_ms"], ours["num_e2e_latency_samples"]) == (20.0, 1)
    assert (peers["mean_e2e_latency_ms"], peers["num_e2e_latency_samples"]) == (None, 0)


def test_a_request_without_end_counts_only_as_unfinished():
    row = record(tokens=[50.0, 60.0], first_admit_ms=0.0, input_tokens=32, admissions=1)
    summary = summary_of(row, gaps=None)
    assert (summary["num_requests"], summary["completed_requests"], summary["unfinished_requests"]) == (1, 0, 1)
    assert (summary["total_input_tokens"], summary["total_output_tokens"], summary["duration_ms"]) == (0, 0, 0.0)
    assert all(summary[f"{statistic}_{name}"] is None for statistic in STATISTICS for name in LATENCIES)


def test_a_single_token_gives_no_time_per_output_token():
    one, three = completed(tokens=[20.0]), completed(tokens=[20.0, 30.0, 40.0])
    both = summary_of(one, three, gaps=gaps_of([20.0], [20.0, 30.0, 40.0]))
    assert (both["mean_tpot_ms"], both["num_tpot_samples"]) == (10.0, 1)
    only = summary_of(one)
    assert (only["mean_tpot_ms"], only["num_tpot_samples"]) == (None, 0)
    assert (only["mean_ttft_ms"], only["num_ttft_samples"]) == (20.0, 1)


def test_a_burst_has_zero_gaps_and_no_rate_for_them():
    first, second = [42.0, 42.0], [42.0]
    summary = summary_of(completed(tokens=first), completed(tokens=second), gaps=gaps_of(first, second))
    assert (summary["min_itl_ms"], summary["max_itl_ms"]) == (0.0, 0.0)
    assert summary["mean_output_token_throughput_per_user"] is None
    assert (summary["mean_ttft_ms"], summary["mean_tpot_ms"], summary["total_output_tokens"]) == (42.0, 0.0, 3)


# ---------------------------------------------------------------- many requests


def test_says_how_every_request_ended():
    summary = summary_of(
        completed(tokens=[10.0], input_tokens=4),
        record(status=RequestStatus.REJECTED, terminal_ms=5.0, input_tokens=400),
        record(status=RequestStatus.FAILED, tokens=[10.0, 20.0], first_admit_ms=0.0, terminal_ms=900.0),
        record(status=RequestStatus.CANCELLED, tokens=[10.0], first_admit_ms=0.0, terminal_ms=800.0),
        record(arrival_ms=5.0),
        record(arrival_ms=50.0),
        record(arrival_ms=math.nan),
        end_ms=20.0,
        preemptions=3,
        passes=7,
    )
    counts = ("num", "completed", "rejected", "failed", "cancelled", "unfinished", "unreleased")
    assert [summary[f"{name}_requests"] for name in counts] == [5, 1, 1, 1, 1, 1, 2]
    assert (summary["preemptions"], summary["passes"]) == (3, 7)
    assert (summary["total_input_tokens"], summary["total_output_tokens"], summary["duration_ms"]) == (4, 1, 10.0)
    assert summary["max_e2e_latency_ms"] == 10.0


def test_tokens_of_requests_that_did_not_complete_do_not_raise_throughput():
    good = completed(tokens=[1000.0], input_tokens=10)
    lost = record(status=RequestStatus.CANCELLED, tokens=[1.0] * 500, first_admit_ms=0.0, terminal_ms=300.0)
    summary = summary_of(good, lost)
    assert summary["output_throughput_tok_s"] == 1.0
    assert summary["total_throughput_tok_s"] == 11.0
    assert summary["request_throughput_rps"] == 1.0
    assert summary["cancelled_requests"] == 1


def test_reuse_after_preemption_is_kept_apart_from_the_first_hit():
    preempted = completed(
        tokens=[10.0], input_tokens=100, reused_tokens=96, first_reused_tokens=0, recomputed_tokens=4, admissions=2
    )
    fresh = completed(tokens=[10.0], input_tokens=100, admissions=1)
    summary = summary_of(preempted, fresh)
    assert summary["first_admission_prefix_cache_reused_ratio"] == 0.0
    assert summary["prefix_cache_reused_ratio"] == 0.48
    assert summary["recomputed_tokens"] == 4


def test_summary_of_no_request_has_no_division_and_no_statistic():
    summary = summary_of()
    assert summary["num_requests"] == 0
    assert summary["request_throughput_rps"] == 0.0
    assert summary["prefix_cache_reused_ratio"] == 0.0
    assert all(summary[f"{statistic}_{name}"] is None for statistic in STATISTICS for name in LATENCIES)


def test_summary_holds_plain_values_only():
    times = [50.0, 60.0]
    summary = summary_of(completed(tokens=times, input_tokens=3), gaps=gaps_of(times), sla=Sla(ttft_ms=60))
    assert {type(value) for value in summary.values()} <= {int, float, bool, type(None)}
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_says_when_token_gaps_were_folded():
    gaps = GapHistogram()
    gaps.add(np.arange(300_000) * 1000 + 10**7, 1)
    summary = summary_of(completed(tokens=[1.0]), gaps=gaps)
    assert summary["itl_exact"] is False
    assert summary["median_itl_ms"] == pytest.approx(160.0, rel=1e-5)
    assert summary_of()["itl_exact"] is True


def test_real_time_has_rates_of_its_own():
    summary = summary_of(completed(tokens=[10.0], input_tokens=99))
    assert not {"wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s"} & set(summary)
    assert wall_rates(summary, 500.0) == {
        "wall_time_ms": 500.0,
        "processed_tokens_per_s": 200.0,
        "processed_output_tokens_per_s": 2.0,
    }
    assert wall_rates(summary, 0.0)["processed_tokens_per_s"] == 0.0


# ---------------------------------------------------------------- goodput


def goodput(sla, *rows):
    return summary_of(*rows, sla=sla)["goodput_completed_requests"]


def test_a_completion_without_tokens_is_good_only_under_an_end_to_end_bound():
    row = completed(first_admit_ms=0.0, terminal_ms=100.0)
    assert goodput(Sla(e2e_ms=100), row) == 1
    assert goodput(Sla(e2e_ms=99), row) == 0
    assert goodput(Sla(ttft_ms=1000), row) == 0
    assert goodput(Sla(itl_ms=1000), row) == 0


def test_every_bound_must_hold_and_a_value_on_the_bound_holds():
    row = completed(tokens=[50.0, 60.0, 75.0, 95.0])
    assert goodput(Sla(ttft_ms=50, itl_ms=15), row) == 1
    assert goodput(Sla(ttft_ms=49, itl_ms=15), row) == 0
    assert goodput(Sla(ttft_ms=50, itl_ms=14), row) == 0
    assert goodput(Sla(e2e_ms=95), row) == 1
    assert goodput(Sla(e2e_ms=94), row) == 0


def test_a_single_token_meets_any_bound_on_gaps():
    assert goodput(Sla(itl_ms=1e-3), completed(tokens=[50.0])) == 1


def test_goodput_rates_count_good_requests_over_the_whole_duration():
    good, slow = completed(tokens=[100.0, 200.0]), completed(tokens=[900.0, 1000.0])
    summary = summary_of(good, slow, sla=Sla(ttft_ms=100))
    assert summary["goodput_completed_requests"] == 1
    assert summary["goodput_request_throughput_rps"] == 1.0
    assert summary["goodput_output_throughput_tok_s"] == 2.0


def test_there_is_no_goodput_without_a_bound():
    assert not [key for key in summary_of(completed(tokens=[1.0]), sla=Sla()) if "goodput" in key]


# ---------------------------------------------------------------- recorded runs

CASES = recorded_paths()

# Values that only the peer has, and rows.
NOT_OURS = {"per_request", "prediction_provenance", "power_coverage", "power_w", "kv_eviction_policy"}
# Means of the stages of a host loop, present only in runs with one.
HOST_LOOP = {
    "mean_frontend_ms",
    "mean_handoff_to_first_token_ms",
    "mean_prefill_elapsed_ms",
    "mean_receive_to_admit_ms",
    "mean_result_observation_delay_ms",
    "mean_scheduler_inbox_wait_ms",
}
OF_GAPS = ("_itl_ms", "_output_token_throughput_per_user")


@pytest.mark.skipif(not CASES, reason="no recorded runs of the peer in tests/conformance")
@pytest.mark.parametrize("name", sorted(CASES) or ["none"])
def test_summary_of_recorded_requests_is_the_recorded_report(name):
    case = load_case(CASES[name])
    if "error" in case["expected"]:
        pytest.skip("the peer aborted this run, there is no report")
    run = RecordedRun(case)
    records = table_of(*run.records(), *run.unfinished())
    gaps = run.gaps()
    summary = summarize(records, gaps or GapHistogram(), run.totals(), run.sla, tokenless_e2e=False)
    wanted = {key: value for key, value in run.report.items() if key not in NOT_OURS | HOST_LOOP}
    compared = 0
    for key, value in wanted.items():
        if gaps is None and key.endswith(OF_GAPS):
            continue
        got = summary[key]
        # The peer writes 0 for the statistics of an empty sample.
        got = 0.0 if got is None else got
        of_sketch = key.endswith(OF_GAPS) and not key.startswith(("mean", "min", "max", "std"))
        # A rebuilt second token time and the peer's float gaps are off in the last digits.
        assert got == pytest.approx(value, rel=1.001e-3 if of_sketch else 1e-9, abs=1e-9), key
        compared += 1
    assert compared >= 57
