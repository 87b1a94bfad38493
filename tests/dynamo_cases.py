"""Recorded runs of the second peer: files, and their rows as tables of a run."""

from __future__ import annotations

import gzip
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.layout import ADMISSION_LOG, HANDOFF_RECORD, ROUTING_RECORD, Pool, RequestStatus
from kvsim.replay.pool import LifecycleLog, WorkerPool, startup_delay_ms
from report_cases import NAN, record, table_of

FOLDER = Path(__file__).parent / "conformance_dynamo"
POOLS = {"agg": Pool.AGGREGATED, "prefill": Pool.PREFILL, "decode": Pool.DECODE}


@cache
def load(name: str) -> dict[str, Any]:
    with gzip.open(FOLDER / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)


NAMES = [path.name.removesuffix(".json.gz") for path in sorted(FOLDER.glob("*.json.gz"))]
#: Runs that the peer brought to an end.
ENDED = [name for name in NAMES if "error" not in load(name)["expected"]]


def with_part(part: str) -> list[str]:
    return [name for name in ENDED if load(name)["expected"].get(part)]


def rows(name: str) -> list[dict[str, Any]]:
    return load(name)["expected"]["per_request"]


def is_disaggregated(name: str) -> bool:
    return "disagg" in load(name)["tags"]


def dp_sizes(name: str) -> tuple[int, int]:
    """Ranks per aggregated or decode worker, and per prefill worker."""
    kwargs = load(name)["input"]["kwargs"]
    main = kwargs.get("extra_engine_args") or kwargs["decode_engine_args"]
    return main.get("dp_size", 1), (kwargs.get("prefill_engine_args") or {}).get("dp_size", 1)


def number(value: float | None) -> float:
    return NAN if value is None else value


def records(name: str) -> np.ndarray:
    """Request records in the order of the rows."""
    made = []
    for row in rows(name):
        history = row["admission_history"]
        routes = {route["pool"]: route for route in row["routing_history"]}
        last = routes.get("decode") or routes.get("agg") or {"logical_worker_id": -1, "dp_rank": -1}
        values = {
            "arrival_ms": row["arrival_time_ms"],
            "first_admit_ms": row["first_admit_ms"],
            "first_token_ms": row["first_token_ms"],
            "second_token_ms": None if row["ttst_ms"] is None else row["first_token_ms"] + row["ttst_ms"],
            "last_token_ms": row["last_token_ms"],
            "terminal_ms": row["terminal_time_ms"],
            "input_tokens": row["input_length"],
            "requested_output_tokens": row["requested_output_length"],
            "output_tokens": row["output_length"],
            "reused_tokens": max((entry["reused_input_tokens"] for entry in history), default=0),
            "first_reused_tokens": history[0]["reused_input_tokens"] if history else 0,
            "admissions": len(history),
            "turn": -1 if row["turn_index"] is None else row["turn_index"],
            "worker": last["logical_worker_id"],
            "dp_rank": last["dp_rank"],
            "status": {"completed": RequestStatus.COMPLETED, "rejected": RequestStatus.REJECTED}[
                row["terminal_status"]
            ],
        }
        made.append(record(**{key: number(value) for key, value in values.items()}))
    return table_of(*made)


def admissions(name: str) -> np.ndarray:
    log = [
        (
            *(k, entry["at_ms"], entry["reused_input_tokens"], 0, 0, POOLS[entry["pool"]]),
            entry.get("g1_reused_input_tokens", -1),
        )
        for k, row in enumerate(rows(name))
        for entry in row["admission_history"]
    ]
    return np.array(log, ADMISSION_LOG)


def routing(name: str) -> np.ndarray:
    log = np.zeros(sum(len(row["routing_history"]) for row in rows(name)), ROUTING_RECORD)
    at = 0
    for k, row in enumerate(rows(name)):
        for route in row["routing_history"]:
            selected, best = route["selected_overlap_blocks"], route["best_available_overlap_blocks"]
            log[at]["row"] = k
            log[at]["queue_entered_ms"] = number(route["queue_entered_at_ms"])
            log[at]["released_ms"] = number(route["released_at_ms"])
            log[at]["overlap_tokens"] = route["reported_overlap_tokens"]
            log[at]["overlap_blocks"] = -1 if selected is None else selected
            log[at]["best_overlap_blocks"] = -1 if best is None else best
            log[at]["worker"], log[at]["dp_rank"] = route["logical_worker_id"], route["dp_rank"]
            log[at]["pool"] = POOLS[route["pool"]]
            at += 1
    return log


def handoffs(name: str) -> np.ndarray | None:
    if not is_disaggregated(name):
        return None
    log = np.zeros(len(rows(name)), HANDOFF_RECORD)
    for k, row in enumerate(rows(name)):
        for column, key in (
            ("prefill_admit_ms", "prefill_admit_ms"),
            ("source_held_ms", "source_held_ms"),
            ("destination_reserved_ms", "destination_reserved_ms"),
            ("destination_activated_ms", "destination_activated_ms"),
            ("source_released_ms", "source_released_ms"),
            ("decode_admit_ms", "decode_admit_ms"),
        ):
            log[k][column] = number(row[key])
        reused = row["decode_reused_input_tokens"]
        log[k]["decode_reused_tokens"] = -1 if reused is None else reused
        route = next((entry for entry in row["routing_history"] if entry["pool"] == "prefill"), None)
        log[k]["prefill_worker"] = -1 if route is None else route["logical_worker_id"]
        log[k]["prefill_dp_rank"] = -1 if route is None else route["dp_rank"]
    return log


def pools(name: str, log: LifecycleLog | None = None) -> dict[str, WorkerPool]:
    """Pools as at the start of a run, by the name that the run gives them."""
    kwargs = load(name)["input"]["kwargs"]
    if is_disaggregated(name):
        sides = {"prefill": (Pool.PREFILL, "prefill_"), "decode": (Pool.DECODE, "decode_")}
    else:
        sides = {"agg": (Pool.AGGREGATED, "")}
    return {
        side: WorkerPool(
            kind,
            kwargs[f"num_{prefix}workers"],
            startup_ms=startup_delay_ms(kwargs[f"{prefix or 'extra_'}engine_args"].get("startup_time")),
            log=log,
        )
        for side, (kind, prefix) in sides.items()
    }


def repeat_change(name: str, made: dict[str, WorkerPool], wanted: dict[str, Any]) -> None:
    """Let one recorded change of a pool happen again, from its cause."""
    at_ms, workers = wanted["at_ms"], made[wanted["pool"]]
    gone = {step["worker_id"] for step in wanted["transitions"] if step["transition"] == "worker_removed"}
    if wanted["cause"] == "planner_scale":
        ordinal = wanted["planner_tick_ordinal"]
        decision = load(name)["expected"]["scaling"][ordinal]["decision"]
        target = decision["target_prefill" if wanted["pool"] == "prefill" else "target_decode"]
        workers.apply_target_count(target, at_ms, drained=gone.__contains__, tick=ordinal)
    elif wanted["cause"] == "worker_ready_event":
        assert math.isclose(workers.next_ready_ms, at_ms)
        workers.mark_worker_ready(workers.due(at_ms)[0], at_ms)
    else:
        workers.settle(at_ms, drained=gone.__contains__)


def same(want: Any, got: Any, at: str = "") -> list[str]:
    """Paths at which two plain values differ; floats may differ in their last digits."""
    if isinstance(want, dict) and isinstance(got, dict):
        found = [f"{at}.{key}: only one has it" for key in sorted(set(want) ^ set(got))]
        return found + [line for key in want if key in got for line in same(want[key], got[key], f"{at}.{key}")]
    if isinstance(want, list) and isinstance(got, list):
        if len(want) != len(got):
            return [f"{at}: {len(want)} or {len(got)} entries"]
        return [line for k, pair in enumerate(zip(want, got, strict=True)) for line in same(*pair, f"{at}[{k}]")]
    if isinstance(want, float) and isinstance(got, (int, float)):
        return [] if math.isclose(want, got, rel_tol=1e-9, abs_tol=1e-9) else [f"{at}: {want!r} or {got!r}"]
    return [] if want == got else [f"{at}: {want!r} or {got!r}"]
