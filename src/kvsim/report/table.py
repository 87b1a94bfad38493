"""The summary as a table for people (spec/workloads-and-report.md section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["format_table"]

# Column head -> statistic of the summary.
_COLUMNS = {"avg": "mean", "min": "min", "max": "max", "p99": "p99", "p90": "p90", "p75": "p75", "std": "std"}

# Label -> what follows "<statistic>_" in the summary.
_DISTRIBUTIONS = {
    "Time to first token (ms)": "ttft_ms",
    "Time to second token (ms)": "ttst_ms",
    "Request latency (ms)": "e2e_latency_ms",
    "Inter-token latency (ms)": "itl_ms",
    "Output throughput per user (tokens/s)": "output_token_throughput_per_user",
}

_SINGLE_VALUES = {
    "Output token throughput (tokens/s)": "output_throughput_tok_s",
    "Request throughput (requests/s)": "request_throughput_rps",
    "Requests": "num_requests",
    "Requests completed": "completed_requests",
    "Requests rejected": "rejected_requests",
    "Requests failed": "failed_requests",
    "Requests cancelled": "cancelled_requests",
    "Requests unfinished": "unfinished_requests",
    "Requests not released": "unreleased_requests",
    "Preemptions": "preemptions",
}

# Only with bounds on latency.
_GOODPUT = {
    "Goodput requests": "goodput_completed_requests",
    "Goodput (requests/s)": "goodput_request_throughput_rps",
    "Goodput (output tokens/s)": "goodput_output_throughput_tok_s",
}

# Only with lower KV tiers.
_OFFLOAD = {
    "Reused tokens, device": "offload_device_hit_tokens",
    "Reused tokens, lower tiers": "offload_lower_hit_tokens",
    "Bytes, device to host": "offload_device_to_host_bytes",
    "Bytes, host to device": "offload_host_to_device_bytes",
    "Bytes, disk to host": "offload_disk_to_host_bytes",
    "Bytes, object store to host": "offload_object_to_host_bytes",
    "Blocks evicted, host": "offload_host_evicted_blocks",
    "Waited for loads (ms)": "offload_load_wait_ms",
    "Waited for stores (ms)": "offload_fence_wait_ms",
}

_CLOSING = {
    "Duration, simulated (ms)": "duration_ms",
    "Wall time (ms)": "wall_time_ms",
    "Prefix cache reused ratio": "prefix_cache_reused_ratio",
    "Prefix cache reused ratio, first admission": "first_admission_prefix_cache_reused_ratio",
}


def format_table(summary: Mapping[str, Any], title: str, *, wall: Mapping[str, float] | None = None) -> str:
    """Table of a summary.

    Parameters
    ----------
    summary : mapping
        Of `kvsim.report.summary.summarize`.
    title : str
        First line.
    wall : mapping, optional
        Of `kvsim.report.summary.wall_rates`. Without, there is no row for the
        wall time, and equal runs give equal tables.

    Returns
    -------
    str
        Lines, each ending in a newline. Numbers have thousands separators and
        two decimals, counts none; what is missing reads N/A.
    """
    values = {**summary, **(wall or {})}
    single = {**_SINGLE_VALUES, **_GOODPUT, **_OFFLOAD, **_CLOSING}
    single = {label: key for label, key in single.items() if key in values or label not in _OFFLOAD}
    if "goodput_completed_requests" not in values:
        single = {label: key for label, key in single.items() if label not in _GOODPUT}
    if wall is None:
        del single["Wall time (ms)"]
    rows = [["", *_COLUMNS]]
    rows += [
        [label, *(_text(values.get(f"{statistic}_{name}")) for statistic in _COLUMNS.values())]
        for label, name in _DISTRIBUTIONS.items()
    ]
    rows += [[label, _text(values.get(key))] for label, key in single.items()]
    widths = [max(len(row[k]) for row in rows if k < len(row)) for k in range(len(_COLUMNS) + 1)]
    lines = [title]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines) + "\n"


def _text(value: float | None) -> str:
    if value is None:
        return "N/A"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}"
