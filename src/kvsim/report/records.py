"""One plain record per request (spec/workloads-and-report.md section 3)."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.layout import ADMISSION_LOG, HANDOFF_RECORD, REQUEST_RECORD, FailReason, Pool, RequestStatus

__all__ = ["ADMISSION_LOG", "POOL_NAMES", "STATUS_NAMES", "RowIndex", "name_at", "request_row", "terminal_order"]

#: Words of `terminal_status`.
STATUS_NAMES = {
    RequestStatus.COMPLETED: "completed",
    RequestStatus.REJECTED: "rejected",
    RequestStatus.FAILED: "failed",
    RequestStatus.CANCELLED: "canceled",
}

#: Words for the pools in records and logs.
POOL_NAMES = {Pool.AGGREGATED: "agg", Pool.PREFILL: "prefill", Pool.DECODE: "decode"}

_FIELDS = REQUEST_RECORD.names or ()
_HANDOFF_FIELDS = HANDOFF_RECORD.names or ()

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


class RowIndex:
    """Rows of a log grouped by request.

    Parameters
    ----------
    log : ndarray of ADMISSION_LOG or ROUTING_RECORD, shape (m,)
        In time order.

    Notes
    -----
    Built in O(m log m); `of` is O(log m) plus the rows it returns.
    """

    __slots__ = ("_log", "_rows")

    def __init__(self, log: npt.NDArray[np.void]) -> None:
        # Stable: rows of one request keep their time order.
        self._log = log[np.argsort(log["row"], kind="stable")]
        self._rows = np.ascontiguousarray(self._log["row"])

    def of(self, row: int) -> npt.NDArray[np.void]:
        """Rows of workload row `row`, in time order; may be empty."""
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
    routing: npt.NDArray[np.void] | None = None,
    handoff: np.void | None = None,
    request_id: str | None = None,
    session_id: str | None = None,
    dp_size: int = 1,
    prefill_dp_size: int = 1,
    tokenized: bool = False,
    tokenless_e2e: bool = True,
    reasons: bool = True,
) -> dict[str, Any]:
    """Return the record of one request, as plain values.

    Parameters
    ----------
    record : void of REQUEST_RECORD
    admissions : ndarray of ADMISSION_LOG, optional
        Its admissions in time order. Without, the history is empty, and the
        counts are those of `record`.
    routing : ndarray of ROUTING_RECORD, optional
        Its placements in order of decision. Without, that of an aggregated run
        is the worker of `record`, chosen at once and blind to the caches.
    handoff : void of HANDOFF_RECORD, optional
        Its halves, in a disaggregated run: `record` then names the decode worker.
    request_id : str, optional
        The id that the workload wrote; the key is absent without one.
    session_id : str, optional
    dp_size, prefill_dp_size : int
        Ranks per aggregated or decode worker, and per prefill worker; the
        record numbers schedulers ``worker * dp_size + rank``.
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
    scheduler = _scheduler(at["worker"], at["dp_rank"], dp_size)
    history = [] if admissions is None else _admission_history(admissions)
    if admissions is None:
        count = at["admissions"]
        readmissions = max(count - (1 if handoff is None else 2), 0)
    else:
        # Entering the second pool is no readmission.
        count, readmissions = len(history), sum(entry["is_readmission"] for entry in history)
    if routing is not None:
        routes = [_route(entry, prefill_dp_size if entry["pool"] == Pool.PREFILL else dp_size) for entry in routing]
    elif scheduler is not None and handoff is None:
        routes = [_plain_route(at["worker"], max(at["dp_rank"], 0), scheduler)]
    else:
        routes = []
    tiers = {
        f"first_admission_{tier}_reused_input_tokens": history[0][f"{tier}_reused_input_tokens"]
        for tier in ("g1", "host")
        if history and "host_reused_input_tokens" in history[0]
    }
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
        "reused_input_tokens": at["reused_tokens"] if handoff is None else _prefill_reuse(at, handoff, history),
        "first_admission_reused_input_tokens": at["first_reused_tokens"],
        **tiers,
        "decode_worker_idx": scheduler,
        "routing_history": routes,
        "admission_history": history,
        "admission_count": count,
        "readmission_count": readmissions,
        "pressure_record_ordinals": [],
        **(dict.fromkeys(_HANDOFF_KEYS) if handoff is None else _halves(handoff, routes, prefill_dp_size)),
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


def _scheduler(worker: int, rank: int, dp_size: int) -> int | None:
    return worker * dp_size + max(rank, 0) if worker >= 0 else None


def _admission_history(admissions: npt.NDArray[np.void]) -> list[dict[str, Any]]:
    history = []
    in_pool: dict[int, int] = {}
    for ordinal, entry in enumerate(admissions):
        pool = int(entry["pool"])
        pool_ordinal = in_pool.get(pool, 0)
        in_pool[pool] = pool_ordinal + 1
        reused, device = int(entry["reused_tokens"]), int(entry["device_tokens"])
        history.append(
            {
                "admission_ordinal": ordinal,
                "pool_admission_ordinal": pool_ordinal,
                "pool": POOL_NAMES[Pool(pool)],
                "at_ms": float(entry["at_ms"]),
                "reused_input_tokens": reused,
                "is_readmission": pool_ordinal > 0,
            }
        )
        if device >= 0:
            history[-1] |= {"g1_reused_input_tokens": device, "host_reused_input_tokens": reused - device}
    return history


def _prefill_reuse(at: dict[str, Any], handoff: np.void, history: list[dict[str, Any]]) -> int:
    """Most tokens that an admission of a prefill rank found."""
    if history:
        return max((entry["reused_input_tokens"] for entry in history if entry["pool"] == "prefill"), default=0)
    # Without a history: the largest reuse of all is the decode rank's own, or else the prefill rank's.
    most = int(at["reused_tokens"])
    return most if most > int(handoff["decode_reused_tokens"]) else int(at["first_reused_tokens"])


def _halves(handoff: np.void, routes: list[dict[str, Any]], prefill_dp_size: int) -> dict[str, Any]:
    at: dict[str, Any] = dict(zip(_HANDOFF_FIELDS, handoff.item(), strict=True))
    # A request is placed once per pool, unless a placement is taken back; then the last one counts.
    overlap = {route["pool"]: route["reported_overlap_tokens"] for route in routes}
    reused = at["decode_reused_tokens"]
    return {
        "prefill_worker_idx": _scheduler(at["prefill_worker"], at["prefill_dp_rank"], prefill_dp_size),
        **{key: _time(at[key]) for key in _HANDOFF_KEYS if key.endswith("_ms")},
        "decode_reused_input_tokens": reused if reused >= 0 else None,
        "prefill_route_overlap_tokens": overlap.get("prefill"),
        "decode_route_overlap_tokens": overlap.get("decode"),
    }


def _route(entry: np.void, dp_size: int) -> dict[str, Any]:
    """Describe a placement."""
    worker, rank = int(entry["worker"]), max(int(entry["dp_rank"]), 0)
    entered, released = float(entry["queue_entered_ms"]), float(entry["released_ms"])
    queued = math.isfinite(entered)
    blocks, best = int(entry["overlap_blocks"]), int(entry["best_overlap_blocks"])
    route = _plain_route(worker, rank, worker * dp_size + rank)
    route["pool"] = POOL_NAMES[Pool(int(entry["pool"]))]
    if queued:
        route["outcome"] = "queued"
        route["queue_entered_at_ms"], route["released_at_ms"] = entered, _time(released)
        route["queue_wait_ms"] = released - entered
    route["reported_overlap_tokens"] = int(entry["overlap_tokens"])
    if blocks >= 0:
        route["selected_overlap_blocks"] = blocks
    if best >= 0:
        route["best_available_overlap_blocks"] = best
    if blocks >= 0 and best >= 0:
        route["overlap_regret_blocks"] = best - blocks
    return route


def _plain_route(worker: int, rank: int, scheduler: int) -> dict[str, Any]:
    """Describe a placement that is at once and blind to the caches."""
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
