import json
import math
import uuid

import numpy as np
import pytest

import dynamo_cases
from kvsim.layout import HANDOFF_RECORD, FailReason, Pool, RequestStatus
from kvsim.report import ADMISSION_LOG, GapHistogram, ReplayResult, RunTotals, Sla, format_table, request_row
from kvsim.report.records import RowIndex
from report_cases import RecordedRun, completed, gaps_of, load_case, record, recorded_paths, table_of

CASES = recorded_paths()


def result_of(*rows, **options):
    options.setdefault("gaps", GapHistogram())
    options.setdefault("totals", RunTotals(end_ms=1e9))
    return ReplayResult(table_of(*rows), options.pop("gaps"), options.pop("totals"), **options)


# ---------------------------------------------------------------- records


def test_record_of_the_checked_example():
    row = request_row(table_of(completed(tokens=[50.0, 60.0, 75.0, 95.0], input_tokens=7))[0])
    assert (row["ttft_ms"], row["ttst_ms"], row["e2e_latency_ms"], row["itl_ms"]) == (50.0, 10.0, 95.0, 15.0)
    assert row["uuid"] == str(uuid.UUID(int=1))
    assert row["terminal_status"] == "completed"
    assert "request_id" not in row
    assert "tokenized_ms" not in row


def test_record_of_a_request_never_placed_holds_nothing_that_did_not_happen():
    row = request_row(record(status=RequestStatus.FAILED, terminal_ms=9.0))
    for name in ("first_admit_ms", "ttft_ms", "ttst_ms", "itl_ms", "e2e_latency_ms", "decode_worker_idx", "turn_index"):
        assert row[name] is None
    assert row["routing_history"] == row["admission_history"] == []


def test_record_says_why_a_request_was_rejected():
    made = record(
        status=RequestStatus.REJECTED, terminal_ms=5.0, reason=FailReason.POOL_TOO_SMALL, needed=128, worker=0
    )
    row = request_row(made)
    assert (row["terminal_status"], row["fail_reason"], row["fail_needed"]) == ("rejected", "pool_too_small", 128)
    assert "fail_reason" not in request_row(made, reasons=False)


def test_record_of_a_completion_without_output_lasts_to_its_end():
    made = completed(terminal_ms=20.0, input_tokens=32)
    assert request_row(made)["e2e_latency_ms"] == 20.0
    assert request_row(made, tokenless_e2e=False)["e2e_latency_ms"] is None


def test_record_carries_all_128_bits_of_an_id():
    made = completed(tokens=[1.0], id_hi=0x0123456789ABCDEF, id_lo=0xFEDCBA9876543210)
    assert request_row(made)["uuid"] == "01234567-89ab-cdef-fedc-ba9876543210"


def test_schedulers_are_numbered_over_workers_and_ranks():
    row = request_row(completed(tokens=[1.0], worker=2, dp_rank=1), dp_size=4)
    assert row["decode_worker_idx"] == 9
    (route,) = row["routing_history"]
    assert (route["logical_worker_id"], route["dp_rank"], route["scheduler_id"]) == (2, 1, 9)


def test_admissions_are_grouped_by_request_in_time_order():
    log = np.array([(2, 0.0, 0, 0, 0, 0, -1), (0, 5.0, 16, 0, 0, 0, -1), (2, 10.0, 32, 0, 0, 0, -1)], ADMISSION_LOG)
    index = RowIndex(log)
    assert index.of(2)["at_ms"].tolist() == [0.0, 10.0]
    assert index.of(1).shape == (0,)
    row = request_row(completed(tokens=[1.0], admissions=2), admissions=index.of(2))
    assert [entry["is_readmission"] for entry in row["admission_history"]] == [False, True]
    assert [entry["reused_input_tokens"] for entry in row["admission_history"]] == [0, 32]
    assert (row["admission_count"], row["readmission_count"]) == (2, 1)


@pytest.mark.skipif(not CASES, reason="no recorded runs of the peer in tests/conformance")
@pytest.mark.parametrize("name", sorted(CASES) or ["none"])
def test_rebuilt_rows_are_the_recorded_rows(name):
    case = load_case(CASES[name])
    if "error" in case["expected"]:
        pytest.skip("the peer aborted this run, there are no rows")
    run = RecordedRun(case)
    if "workers" not in run.spec["topology"]:
        pytest.skip("rows are of aggregated runs, this one is disaggregated")
    admissions = RowIndex(run.admissions())
    for k, (made, wanted) in enumerate(zip(run.records(), run.rows, strict=True)):
        row = request_row(
            made,
            admissions=admissions.of(k),
            request_id=wanted.get("request_id"),
            session_id=wanted["session_id"],
            dp_size=run.dp_size,
            tokenized=run.tokenized,
            tokenless_e2e=False,
            reasons=False,
        )
        # Stages of a host loop and of a host tier are not part of an ordinary row.
        extra = {"prefill_complete_ms", "scheduler_received_ms", "selected_ms"} | {
            key for key in wanted if key.startswith(("first_admission_g1", "first_admission_host"))
        }
        assert set(row) == set(wanted) - extra
        for key in row:
            if key == "ttst_ms" and row[key] is not None:
                assert row[key] == pytest.approx(wanted[key], abs=1e-9)
            elif key == "admission_history":
                plain = [{k: v for k, v in e.items() if k in row[key][0]} for e in wanted[key]] if row[key] else []
                assert row[key] == plain
            else:
                assert row[key] == wanted[key], key


# ---------------------------------------------------------------- result


def test_result_shows_the_records_themselves_read_only():
    records = table_of(completed(tokens=[1.0]))
    result = ReplayResult(records, GapHistogram(), RunTotals())
    assert np.shares_memory(result.requests, records)
    with pytest.raises(ValueError, match="read-only"):
        result.requests["status"][0] = 0
    records["turn"] = 3
    assert result.requests["turn"][0] == 3


def test_json_is_sorted_indented_and_ends_in_a_newline():
    result = result_of(completed(tokens=[1.0, 2.0]), gaps=gaps_of([1.0, 2.0]))
    text = result.to_json()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert json.loads(text) == result.summary
    assert result.to_json(indent=None).count("\n") == 1


def test_real_time_reaches_no_file(tmp_path):
    def run(wall_time_ms):
        return result_of(completed(tokens=[1.0]), totals=RunTotals(wall_time_ms=wall_time_ms, end_ms=1.0))

    one, other = run(12.0), run(99.0)
    assert one.wall != other.wall
    one.write(tmp_path / "one")
    other.write(tmp_path / "other")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["requests.jsonl", "summary.json", "table.txt"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert "Wall time (ms)" in one.table()
    assert "12.00" in one.table()
    assert "Wall time" not in one.table(wall=False)


def test_lines_are_compact_sorted_and_ordered_by_arrival_and_id():
    rows = table_of(
        completed(arrival_ms=5.0, tokens=[9.0]),
        completed(arrival_ms=1.0, tokens=[9.0]),
        record(arrival_ms=0.0),
        completed(arrival_ms=1.0, tokens=[9.0]),
    )
    rows["id_lo"] = [1, 9, 3, 4]
    result = ReplayResult(
        rows,
        GapHistogram(),
        RunTotals(end_ms=10.0),
        request_names=["a", "b", "c", None],
        session_names=["s"],
    )
    lines = result.to_jsonl().splitlines()
    decoded = [json.loads(line) for line in lines]
    assert [int(row["uuid"].replace("-", ""), 16) for row in decoded] == [4, 9, 1]
    assert [row.get("request_id") for row in decoded] == [None, "b", "a"]
    assert lines == [json.dumps(row, sort_keys=True, separators=(",", ":")) for row in decoded]
    assert result.to_jsonl().endswith("\n")


def test_sessions_are_named_in_the_lines():
    rows = [completed(tokens=[1.0], session=0, turn=1), completed(tokens=[1.0])]
    first, second = result_of(*rows, session_names={0: "chat"}).rows()
    assert (first["session_id"], first["turn_index"]) == ("chat", 1)
    assert (second["session_id"], second["turn_index"]) == (None, None)


def test_lines_of_a_run_in_which_nothing_ended_are_empty():
    assert result_of(record(arrival_ms=0.0)).to_jsonl() == ""


def test_lines_hold_no_number_that_json_lacks():
    rows = [record(status=RequestStatus.REJECTED, terminal_ms=math.nan, arrival_ms=math.nan)]
    (line,) = result_of(*rows).to_jsonl().splitlines()
    decoded = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert decoded["arrival_time_ms"] is None


def test_recorded_passes_are_written_and_those_of_another_run_removed(tmp_path):
    passes = np.array([(1.0, 2)], [("end_ms", "<f8"), ("decodes", "<i8")])
    result_of(completed(tokens=[1.0]), passes=passes).write(tmp_path)
    assert np.array_equal(np.load(tmp_path / "passes.npy"), passes)
    result_of(completed(tokens=[1.0])).write(tmp_path)
    assert not (tmp_path / "passes.npy").exists()


def test_repr_is_short():
    assert repr(result_of(completed(tokens=[1.5]))) == "<ReplayResult: 1 of 1 requests completed, 1.500 ms>"


# ---------------------------------------------------------------- table


def cells(text, label):
    (line,) = [line for line in text.splitlines() if line.startswith(label)]
    return line[len(label) :].split()


def test_table_shows_statistics_counts_and_what_is_missing():
    times = [1234.5, 1244.5]
    result = result_of(
        completed(tokens=times, input_tokens=8, reused_tokens=4),
        record(status=RequestStatus.REJECTED, terminal_ms=3.0),
        totals=RunTotals(end_ms=2000.0, preemptions=1234),
    )
    text = format_table(result.summary, "a title")
    assert text.splitlines()[0] == "a title"
    assert text.splitlines()[1].split() == ["avg", "min", "max", "p99", "p90", "p75", "std"]
    assert cells(text, "Time to first token (ms)") == ["1,234.50"] * 6 + ["0.00"]
    assert cells(text, "Inter-token latency (ms)") == ["N/A"] * 7
    assert cells(text, "Requests completed") == ["1"]
    assert cells(text, "Requests rejected") == ["1"]
    assert cells(text, "Preemptions") == ["1,234"]
    assert cells(text, "Prefix cache reused ratio, first admission") == ["0.00"]
    assert "Goodput" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_table_shows_goodput_when_there_is_a_bound():
    text = result_of(completed(tokens=[5.0]), sla=Sla(ttft_ms=10)).table()
    assert cells(text, "Goodput requests") == ["1"]


# ---------------------------------------------------------------- pools, handoffs, placements


#: With rows; the tiers of a host cache are not part of ordinary ones.
WITH_ROWS = [name for name in dynamo_cases.ENDED if dynamo_cases.rows(name) and "host_offload" not in name]


@pytest.mark.parametrize("name", WITH_ROWS)
def test_rows_of_pools_and_routers_are_the_recorded_rows(name):
    dp_size, prefill_dp_size = dynamo_cases.dp_sizes(name)
    result = ReplayResult(
        dynamo_cases.records(name),
        GapHistogram(),
        RunTotals(end_ms=1e9),
        admissions=dynamo_cases.admissions(name),
        handoffs=dynamo_cases.handoffs(name),
        routing=dynamo_cases.routing(name),
        session_names={},
        dp_size=dp_size,
        prefill_dp_size=prefill_dp_size,
    )
    made = list(result.rows())
    assert len(made) == len(dynamo_cases.rows(name))
    for row, wanted in zip(made, dynamo_cases.rows(name), strict=True):
        wanted = {key: value for key, value in wanted.items() if key not in ("row", "session_id")}
        assert set(wanted) < set(row)
        assert dynamo_cases.same(wanted, {key: row[key] for key in wanted}) == []
    for key in ("prefix_cache_reused_ratio", "first_admission_prefix_cache_reused_ratio"):
        assert result.summary[key] == pytest.approx(dynamo_cases.load(name)["expected"]["summary"][key])


def disaggregated(**fields):
    handoff = np.zeros((), HANDOFF_RECORD)
    for column in HANDOFF_RECORD.names:
        handoff[column] = math.nan if column.endswith("_ms") else -1
    for column, value in fields.items():
        handoff[column] = value
    return handoff


def test_a_second_pool_is_no_readmission_and_a_second_admission_in_it_is():
    log = np.array(
        [(0, 0.0, 0, 0, 0, Pool.PREFILL, -1), (0, 5.0, 0, 0, 0, Pool.DECODE, -1), (0, 9.0, 48, 0, 0, Pool.DECODE, -1)],
        ADMISSION_LOG,
    )
    made = completed(tokens=[8.0], admissions=3, reused_tokens=48, input_tokens=50)
    row = request_row(made, admissions=log, handoff=disaggregated(decode_reused_tokens=48))
    assert [entry["pool_admission_ordinal"] for entry in row["admission_history"]] == [0, 0, 1]
    assert [entry["pool"] for entry in row["admission_history"]] == ["prefill", "decode", "decode"]
    assert (row["admission_count"], row["readmission_count"]) == (3, 1)
    # The record shows what the prefill pool reused; the ratio of a run counts the most that any pool did.
    assert (row["reused_input_tokens"], row["decode_reused_input_tokens"]) == (0, 48)
    bare = request_row(made, handoff=disaggregated(decode_reused_tokens=48))
    assert (bare["admission_count"], bare["readmission_count"], bare["reused_input_tokens"]) == (3, 1, 0)


def test_halves_that_did_not_happen_are_null():
    row = request_row(record(status=RequestStatus.FAILED, terminal_ms=9.0), handoff=disaggregated(prefill_worker=1))
    assert row["prefill_worker_idx"] == 1
    for key in ("decode_worker_idx", "source_held_ms", "decode_reused_input_tokens", "decode_route_overlap_tokens"):
        assert row[key] is None
    assert (row["routing_history"], row["readmission_count"]) == ([], 0)


def test_ranks_of_the_pools_are_numbered_by_their_own_size():
    handoff = disaggregated(prefill_worker=3, prefill_dp_rank=1)
    row = request_row(completed(tokens=[1.0], worker=2, dp_rank=1), handoff=handoff, dp_size=4, prefill_dp_size=2)
    assert (row["prefill_worker_idx"], row["decode_worker_idx"]) == (7, 9)
