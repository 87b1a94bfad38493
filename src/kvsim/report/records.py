"""One plain record per request (spec/workloads-and-report.md section 3)."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.layout import ADMISSION_LOG, REQUEST_RECORD, FailReason, RequestStatus

__all__ = ["ADMISSION_LOG", "STATUS_NAMES", "AdmissionIndex", "name_at", "request_row", "terminal_order"]

#: Words of `terminal_status`.
STATUS_NAMES = {
    RequestStatus.COMPLETED: "completed",
    RequestStatus.REJECTED: "rejected",
    RequestStatus.FAILED: "failed",
    RequestStatus.CANCELLED: "canceled",
}

_FIELDS = REQUEST_RECORD.names or ()

# Stamps of a handoff and of the pools it goes through: null in an aggregated run.
_HANDOFF_KEYS = (
    "prefill_worker_idx",
    "prefill_admit_ms",
    "source_held_ms",
    "destination_reserved_ms",
    "destination_activated_ms",
    "decode_admit_ms",
    "source_released_ms",
    "decode_reused_input_tokens",
    "prefill_route_overlap_tokens",
    "decode_route_overlap_tokens",
)


class AdmissionIndex:
    """Admissions grouped by request.

    Parameters
    ----------
    log : ndarray of ADMISSION_LOG, shape (m,)
        In time order.

    Notes
    -----
    Built in O(m log m); `of` is O(log m) plus the admissions it returns.
    """

    __slots__ = ("_log", "_rows")

    def __init__(self, log: npt.NDArray[np.void]) -> None:
        # Stable: admissions of one request keep their time order.
        self._log = log[np.argsort(log["row"], kind="stable")]
        self._rows = np.ascontiguousarray(self._log["row"])

    def of(self, row: int) -> npt.NDArray[np.void]:
        """Admissions of workload row `row`, in time order; may be empty."""
        first, end = np.searchsorted(self._rows, [row, row + 1])
        return self._log[first:end]


def terminal_order(records: npt.NDArray[np.void]) -> npt.NDArray[np.intp]:
    """Return the indices of the requests that ended, ordered by (arrival, id)."""
    ended = np.flatnonzero(records["status"] != RequestStatus.UNFINISHED)
    rows = records[ended]
    return ended[np.lexsort((rows["id_lo"], rows["id_hi"], rows["arrival_ms"]))]


def request_row(
    record: np.void,
    *,
    admissions: npt.NDArray[np.void] | None = None,
    request_id: str | None = None,
    session_id: str | None = None,
    dp_size: int = 1,
    tokenized: bool = False,
    tokenless_e2e: bool = True,
    reasons: bool = True,
) -> dict[str, Any]:
    """Return the record of one request of an aggregated run, as plain values.

    Parameters
    ----------
    record : void of REQUEST_RECORD
    admissions : ndarray of ADMISSION_LOG, optional
        Its admissions in time order. Without, the history is empty; the counts
        are those of `record` in either case.
    request_id : str, optional
        The id that the workload wrote; the key is absent without one.
    session_id : str, optional
    dp_size : int
        Ranks per worker; the record numbers schedulers ``worker * dp_size + rank``.
    tokenized : bool
        Adds `tokenized_ms`.
    tokenless_e2e : bool
        See `kvsim.report.summary.end_to_end_ms`.
    reasons : bool
        Adds `fail_reason` and `fail_needed` (blocks or tokens found too many)
        to a request that has a reason for its end.

    Returns
    -------
    dict
        Times in ms; None where something did not happen.
    """
    # Plain values at once: reading fields of a struct scalar one by one is slow.
    at: dict[str, Any] = dict(zip(_FIELDS, record.item(), strict=True))
    status = RequestStatus(at["status"])
    arrival, first, last, tokens = at["arrival_ms"], at["first_token_ms"], at["last_token_ms"], at["output_tokens"]
    e2e = last - arrival
    if tokenless_e2e and tokens == 0 and status is RequestStatus.COMPLETED:
        e2e = at["terminal_ms"] - arrival
    worker, rank = at["worker"], max(at["dp_rank"], 0)
    scheduler = worker * dp_size + rank if worker >= 0 else None
    history = [] if admissions is None else [_admission(k, entry) for k, entry in enumerate(admissions)]
    count = at["admissions"]
    row: dict[str, Any] = {
        "uuid": str(uuid.UUID(int=at["id_hi"] << 64 | at["id_lo"])),
        "session_id": session_id,
        "turn_index": at["turn"] if at["turn"] >= 0 else None,
        "arrival_time_ms": _time(arrival),
        "dispatched_at_ms": None,
        "first_admit_ms": _time(at["first_admit_ms"]),
        "first_token_ms": _time(first),
        "last_token_ms": _time(last),
        "terminal_time_ms": _time(at["terminal_ms"]),
        "terminal_status": STATUS_NAMES.get(status),
        "ttft_ms": _span(first - arrival),
        "ttst_ms": _span(at["second_token_ms"] - first),
        "e2e_latency_ms": _span(e2e),
        "itl_ms": _span((last - first) / (tokens - 1)) if tokens > 1 else None,
        "input_length": at["input_tokens"],
        "requested_output_length": at["requested_output_tokens"],
        "output_length": tokens,
        "reused_input_tokens": at["reused_tokens"],
        "first_admission_reused_input_tokens": at["first_reused_tokens"],
        "decode_worker_idx": scheduler,
        "routing_history": [] if scheduler is None else [_route(worker, rank, scheduler)],
        "admission_history": history,
        "admission_count": count,
        "readmission_count": max(count - 1, 0),
        "pressure_record_ordinals": [],
        **dict.fromkeys(_HANDOFF_KEYS),
    }
    if request_id is not None:
        row["request_id"] = request_id
    if tokenized:
        row["tokenized_ms"] = _time(at["tokenized_ms"])
    if reasons and at["reason"] != FailReason.NONE:
        row["fail_reason"] = FailReason(at["reason"]).name.lower()
        row["fail_needed"] = at["needed"]
    return row


def name_at(names: Sequence[str | None] | Mapping[int, str] | None, index: int) -> str | None:
    """Entry `index` of a list or mapping of names, None if there is none."""
    if names is None or index < 0:
        return None
    if isinstance(names, Mapping):
        return names.get(index)
    return names[index] if index < len(names) else None


def _time(value: float) -> float | None:
    """Return a time stamp that JSON can hold."""
    return value if math.isfinite(value) else None


def _span(value: float) -> float | None:
    return max(value, 0.0) if math.isfinite(value) else None


def _admission(ordinal: int, entry: np.void) -> dict[str, Any]:
    # One pool, so both ordinals are the same.
    return {
        "admission_ordinal": ordinal,
        "pool_admission_ordinal": ordinal,
        "pool": "agg",
        "at_ms": float(entry["at_ms"]),
        "reused_input_tokens": int(entry["reused_tokens"]),
        "is_readmission": ordinal > 0,
    }


def _route(worker: int, rank: int, scheduler: int) -> dict[str, Any]:
    """Describe a placement by round robin: at once, blind to the caches."""
    return {
        "pool": "agg",
        "outcome": "immediate",
        "queue_entered_at_ms": None,
        "released_at_ms": None,
        "queue_wait_ms": 0.0,
        "logical_worker_id": worker,
        "scheduler_id": scheduler,
        "dp_rank": rank,
        "reported_overlap_tokens": 0,
        "selected_overlap_blocks": None,
        "best_available_overlap_blocks": None,
        "overlap_regret_blocks": None,
        "placement_replica_id": None,
    }
