"""Workloads: traces, request lists and generators, and the order in which their requests are released."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvsim.errors import WorkloadError
from kvsim.workload.base import Workload
from kvsim.workload.driver import ArrivalDriver
from kvsim.workload.generate import TraceProfile, example_trace_path, generate_trace, write_mooncake
from kvsim.workload.mooncake import DEFAULT_BLOCK_SIZE, read_mooncake
from kvsim.workload.requests import workload_from_requests
from kvsim.workload.synthetic import arrival_times, flat_workload, session_workload, think_times
from kvsim.workload.tokenization import TokenizationPool
from kvsim.workload.traffic import TrafficPlan, workload_from_traffic

__all__ = [
    "TRACE_FORMATS",
    "ArrivalDriver",
    "TokenizationPool",
    "TraceProfile",
    "TrafficPlan",
    "Workload",
    "arrival_times",
    "example_trace_path",
    "flat_workload",
    "generate_trace",
    "load_workload",
    "read_mooncake",
    "session_workload",
    "think_times",
    "workload_from_requests",
    "workload_from_traffic",
    "write_mooncake",
]

#: Trace formats that can be read, with their other spellings.
TRACE_FORMATS: Mapping[str, str] = {
    "mooncake": "mooncake",
    "mooncake-delta": "mooncake-delta",
    "mooncake_delta": "mooncake-delta",
}

# Known formats of the peers that are not read (spec/workloads-and-report.md 1, 1.3, 1.4), and what they are.
_UNSUPPORTED = {
    "agentic_mooncake": "rows with workflow dependencies",
    "applied_compute_agentic": "agent records with tool calls",
    "dynamo": "request traces exported by a server",
    "weka": "published agent traces",
}


def load_workload(
    path: str | os.PathLike[str],
    format: str = "mooncake",  # noqa: A002 - the name of the option in every peer
    block_size: int | None = None,
    *,
    strict: bool = False,
) -> Workload:
    """Read a trace file of a named format.

    Parameters
    ----------
    path : path
        The file, plain or gzip.
    format : str, default "mooncake"
        ``mooncake``, or ``mooncake-delta`` (also ``mooncake_delta``), whose
        follow-up rows carry only new input.
    block_size : int, optional
        Tokens per hash id, default 512.
    strict : bool, default False
        As for :func:`read_mooncake`.

    Returns
    -------
    Workload

    Raises
    ------
    WorkloadError
        If the format is not supported, or the file is malformed.
    """
    canonical = TRACE_FORMATS.get(format)
    if canonical is None:
        kind = _UNSUPPORTED.get(str(format).replace("-", "_"))
        what = f"{format!r} ({kind}) is a known trace format but not supported" if kind else f"got {format!r}"
        raise WorkloadError(f"must be one of {', '.join(TRACE_FORMATS)}; {what}", path=os.fspath(path), field="format")
    return read_mooncake(
        path,
        block_size=DEFAULT_BLOCK_SIZE if block_size is None else block_size,
        delta=canonical == "mooncake-delta",
        strict=strict,
    )
