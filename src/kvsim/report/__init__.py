"""Results of a run: summary, records, table."""

from __future__ import annotations

from kvsim.report.gaps import GapHistogram
from kvsim.report.records import ADMISSION_LOG, request_row
from kvsim.report.result import ReplayResult
from kvsim.report.summary import RunTotals, Sla, distribution, summarize
from kvsim.report.table import format_table

__all__ = [
    "ADMISSION_LOG",
    "GapHistogram",
    "ReplayResult",
    "RunTotals",
    "Sla",
    "distribution",
    "format_table",
    "request_row",
    "summarize",
]
