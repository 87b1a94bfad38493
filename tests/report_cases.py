"""Records for the tests of the report: made by hand, or out of recorded runs of the peer."""

import gzip
import json
import math
from functools import cache
from pathlib import Path

import numpy as np

from kvsim.layout import REQUEST_RECORD, RequestStatus
from kvsim.report import ADMISSION_LOG, GapHistogram, RunTotals, Sla

NAN = math.nan

_DEFAULTS = {
    "arrival_ms": 0.0,
    "tokenized_ms": NAN,
    "first_admit_ms": NAN,
    "first_token_ms": NAN,
    "second_token_ms": NAN,
    "last_token_ms": NAN,
    "terminal_ms": NAN,
    "worker": -1,
    "dp_rank": -1,
    "session": -1,
    "turn": -1,
}


def record(*, tokens=(), **fields):
    """One request; `tokens` are its token times, from which all token columns follow."""
    row = np.zeros((), REQUEST_RECORD)
    values = dict(_DEFAULTS)
    if tokens:
        values["first_token_ms"], values["last_token_ms"] = tokens[0], tokens[-1]
        values["second_token_ms"] = tokens[1] if len(tokens) > 1 else NAN
        values["output_tokens"] = values["requested_output_tokens"] = len(tokens)
    values.update(fields)
    for name, value in values.items():
        row[name] = value
    return row


def completed(*, tokens=(), **fields):
    """A request that was admitted at 0 on worker 0 and ended with its last token."""
    values = {
        "status": RequestStatus.COMPLETED,
        "first_admit_ms": 0.0,
        "admissions": 1,
        "worker": 0,
        "dp_rank": 0,
        "terminal_ms": tokens[-1] if tokens else NAN,
    }
    return record(tokens=tokens, **{**values, **fields})


def table_of(*rows):
    """Struct array of single records, numbered in order; ids too where there is none."""
    records = np.empty(len(rows), REQUEST_RECORD)
    for k, row in enumerate(rows):
        records[k] = row
    records["row"] = np.arange(len(rows))
    nameless = (records["id_hi"] == 0) & (records["id_lo"] == 0)
    records["id_lo"][nameless] = np.arange(1, len(rows) + 1)[nameless]
    return records


def gaps_of(*token_times):
    """Histogram of the gaps of lists of token times."""
    gaps = GapHistogram()
    for times in token_times:
        gaps.add(np.rint(np.diff(times) * 1e6).astype(np.int64))
    return gaps


# ---------------------------------------------------------------- recorded runs

_FOLDER = Path(__file__).parent / "conformance"


def recorded_paths():
    """Recorded runs of the first peer that lie in the test tree, by name."""
    return {
        path.name.removesuffix(".json.gz"): path
        for path in sorted(_FOLDER.rglob("*.json.gz"))
        if path.parent.name == "aisimulate"
    }


@cache
def load_case(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


class RecordedRun:
    """A recorded run, as the input of our report."""

    def __init__(self, case):
        self.report = case["expected"].get("report")
        self.spec = case["input"]["payload"]["spec"]
        self.rows = self.report["per_request"]
        self.artifacts = case["expected"].get("artifacts") or {}
        engine = self.spec["engine"]
        self.dp_size = engine.get("dp_size", 1)
        self.sla = Sla(**self.spec["sla"]) if self.spec.get("sla") else None
        self.tokenized = any("tokenized_ms" in row for row in self.rows)

    def records(self):
        """Records of the requests that ended, in the order of the rows."""
        return table_of(*(self._record(row) for row in self.rows))

    def _record(self, row):
        kind = {"completed": RequestStatus.COMPLETED, "rejected": RequestStatus.REJECTED}[row["terminal_status"]]
        uuid = int(row["uuid"].replace("-", ""), 16)
        history = row["admission_history"]
        values = {
            "arrival_ms": row["arrival_time_ms"],
            "tokenized_ms": row.get("tokenized_ms", NAN),
            "first_admit_ms": row["first_admit_ms"],
            "first_token_ms": row["first_token_ms"],
            "last_token_ms": row["last_token_ms"],
            "terminal_ms": row["terminal_time_ms"],
            "input_tokens": row["input_length"],
            "requested_output_tokens": row["requested_output_length"],
            "output_tokens": row["output_length"],
            "reused_tokens": max((entry["reused_input_tokens"] for entry in history), default=0),
            "first_reused_tokens": row["first_admission_reused_input_tokens"],
            "admissions": row["admission_count"],
            "preemptions": row["readmission_count"],
            "turn": row["turn_index"] if row["turn_index"] is not None else -1,
            "status": kind,
        }
        if row["ttst_ms"] is not None:
            values["second_token_ms"] = row["first_token_ms"] + row["ttst_ms"]
        if row["routing_history"]:
            values["worker"] = row["routing_history"][0]["logical_worker_id"]
            values["dp_rank"] = row["routing_history"][0]["dp_rank"]
        made = record(**{name: NAN if value is None else value for name, value in values.items()})
        made["id_hi"], made["id_lo"] = uuid >> 64, uuid & (2**64 - 1)
        return made

    def unfinished(self):
        """Requests of the list that have no row."""
        known = {row.get("request_id") for row in self.rows}
        requests = [request for request in self.spec.get("requests") or [] if request["id"] not in known]
        return [record(arrival_ms=request["arrival_time_ms"]) for request in requests]

    def admissions(self):
        """The admission log of the run, in time order."""
        log = [
            (row, entry["at_ms"], entry["reused_input_tokens"], 0, 0, 0, entry.get("g1_reused_input_tokens", -1))
            for row, values in enumerate(self.rows)
            for entry in values["admission_history"]
        ]
        return np.array(sorted(log, key=lambda entry: entry[1]), ADMISSION_LOG)

    def gaps(self):
        """Token gaps of the completed requests, or None if the run has no token times."""
        if not self.artifacts:
            return None
        done = {row["uuid"] for row in self.rows if row["terminal_status"] == "completed"}
        times = {}
        for output in self.artifacts["outputs"]:
            if not output["rejected"] and output["request_id"] in done:
                times.setdefault(output["request_id"], []).append(output["observed_at_ms"])
        return gaps_of(*times.values())

    def totals(self):
        """Totals, as far as the summary takes them from the run."""
        workers = self.spec["topology"].get("workers", {}).get("initial_workers", 1)
        report = self.report
        return RunTotals(
            committed_prefill_tokens=report["committed_prefill_tokens"],
            end_ms=report["decode_worker_seconds"] * 1000 / workers,
            prefill_worker_seconds=report["prefill_worker_seconds"],
            decode_worker_seconds=report["decode_worker_seconds"],
            prefill_gpus_per_worker=report["prefill_gpus_per_worker"],
            decode_gpus_per_worker=report["decode_gpus_per_worker"],
            tokenized=self.tokenized,
        )
