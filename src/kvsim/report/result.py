"""What a run hands back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.report.gaps import GapHistogram
from kvsim.report.records import RowIndex, name_at, request_row, terminal_order
from kvsim.report.summary import RunTotals, Sla, Summary, summarize, wall_rates
from kvsim.report.table import format_table

__all__ = ["ReplayResult"]


class ReplayResult:
    """Result of a replay.

    Everything here but `wall` is a function of the input: the same run twice
    gives the same `summary`, the same records and byte for byte the same files.
    Real time enters `wall` alone, and is written nowhere.

    Parameters
    ----------
    requests : ndarray of REQUEST_RECORD, shape (n,)
        One row per request of the workload; kept, not copied.
    gaps : GapHistogram
        Token gaps of the completed requests.
    totals : RunTotals
    config : object
        Configuration of the run.
    sla : Sla, optional
    passes : struct array, optional
        One row per pass, when the run recorded them.
    outputs : ndarray of OUTPUT_RECORD, optional
        One row per output signal, when the run captured them.
    admissions : ndarray of ADMISSION_LOG, optional
        In time order, for the admission history of the records.
    handoffs : ndarray of HANDOFF_RECORD, shape (n,), optional
        Of a disaggregated run, one per row of the workload.
    routing : ndarray of ROUTING_RECORD, optional
        Every placement, in order of decision.
    telemetry : dict, optional
        Of `kvsim.replay.telemetry.Telemetry.result`.
    scaling : list of dict, optional
        What the scaling policy was given and what it answered, tick by tick.
    stalled : list of dict, optional
        Requests that were given up because nothing could reach them any more:
        ``row``, ``request_id``, ``at_ms`` and what each ``waits_for``.
    lifecycle : list of dict, optional
        Changes of the pools, see `kvsim.replay.pool.LifecycleLog`.
    request_names : sequence of (str or None), or mapping, optional
        The id that the workload wrote, by workload row.
    session_names : sequence of str, or mapping, optional
        By the session number of the records.
    dp_size, prefill_dp_size : int
        Ranks per aggregated or decode worker, and per prefill worker.

    Attributes
    ----------
    summary : dict
        Of `kvsim.report.summary.summarize`.
    wall : dict
        `wall_time_ms`, `processed_tokens_per_s` and `processed_output_tokens_per_s`:
        the values that differ from run to run.
    requests : ndarray of REQUEST_RECORD, shape (n,)
        Read-only.
    passes : struct array or None
        Read-only.
    outputs : struct array or None
        Read-only.
    gaps : GapHistogram
    totals : RunTotals
    config : object
    admissions : ndarray of ADMISSION_LOG or None
    handoffs : ndarray of HANDOFF_RECORD or None
        Read-only.
    routing : ndarray of ROUTING_RECORD or None
        Read-only.
    telemetry : dict or None
    scaling : list of dict or None
    stalled : list of dict
        Empty if nobody was given up.
    lifecycle : list of dict or None
    """

    __slots__ = (
        "_dp_size",
        "_prefill_dp_size",
        "_request_names",
        "_session_names",
        "_sla",
        "_summary",
        "admissions",
        "config",
        "gaps",
        "handoffs",
        "lifecycle",
        "outputs",
        "passes",
        "requests",
        "routing",
        "scaling",
        "stalled",
        "telemetry",
        "totals",
    )

    def __init__(
        self,
        requests: npt.NDArray[np.void],
        gaps: GapHistogram,
        totals: RunTotals,
        *,
        config: Any = None,
        sla: Sla | None = None,
        passes: npt.NDArray[np.void] | None = None,
        outputs: npt.NDArray[np.void] | None = None,
        admissions: npt.NDArray[np.void] | None = None,
        handoffs: npt.NDArray[np.void] | None = None,
        routing: npt.NDArray[np.void] | None = None,
        telemetry: dict[str, Any] | None = None,
        scaling: list[dict[str, Any]] | None = None,
        stalled: list[dict[str, Any]] | None = None,
        lifecycle: list[dict[str, Any]] | None = None,
        request_names: Sequence[str | None] | Mapping[int, str] | None = None,
        session_names: Sequence[str | None] | Mapping[int, str] | None = None,
        dp_size: int = 1,
        prefill_dp_size: int = 1,
    ) -> None:
        self.requests = _read_only(requests)
        self.passes = None if passes is None else _read_only(passes)
        self.outputs = None if outputs is None else _read_only(outputs)
        self.admissions = None if admissions is None else _read_only(admissions)
        self.handoffs = None if handoffs is None else _read_only(handoffs)
        self.routing = None if routing is None else _read_only(routing)
        self.telemetry = telemetry
        self.scaling = scaling
        self.stalled = stalled or []
        self.lifecycle = lifecycle
        self.gaps = gaps
        self.totals = totals
        self.config = config
        self._sla = sla
        self._summary: Summary | None = None
        self._request_names = request_names
        self._session_names = session_names
        self._dp_size = dp_size
        self._prefill_dp_size = prefill_dp_size

    @property
    def summary(self) -> Summary:
        """Of `summarize`; made when first asked for."""
        if self._summary is None:
            self._summary = summarize(self.requests, self.gaps, self.totals, self._sla)
        return self._summary

    @property
    def wall(self) -> dict[str, float]:
        """Of `wall_rates`."""
        return wall_rates(self.summary, self.totals.wall_time_ms)

    def rows(self, *, tokenless_e2e: bool = True, reasons: bool = True) -> Iterator[dict[str, Any]]:
        """Yield the records of the requests that ended, ordered by (arrival, id).

        Parameters
        ----------
        tokenless_e2e, reasons : bool
            See `kvsim.report.records.request_row`.
        """
        admissions = None if self.admissions is None else RowIndex(self.admissions)
        routing = None if self.routing is None else RowIndex(self.routing)
        for k in terminal_order(self.requests):
            record = self.requests[k]
            row = int(record["row"])
            yield request_row(
                record,
                admissions=None if admissions is None else admissions.of(row),
                routing=None if routing is None else routing.of(row),
                handoff=None if self.handoffs is None else self.handoffs[row],
                request_id=name_at(self._request_names, row),
                session_id=name_at(self._session_names, int(record["session"])),
                dp_size=self._dp_size,
                prefill_dp_size=self._prefill_dp_size,
                tokenized=self.totals.tokenized,
                tokenless_e2e=tokenless_e2e,
                reasons=reasons,
            )

    def to_json(self, indent: int | None = 2) -> str:
        """Return the summary as JSON: sorted keys, a newline at the end."""
        return json.dumps(self.summary, indent=indent, sort_keys=True, allow_nan=False) + "\n"

    def to_jsonl(self) -> str:
        """Each record of `rows` as one line of compact JSON with sorted keys."""
        encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
        return "".join(encode(row) + "\n" for row in self.rows())

    def table(self, title: str = "kvsim replay", *, wall: bool = True) -> str:
        """Return the summary as a table for people.

        Parameters
        ----------
        title : str
            First line.
        wall : bool
            Whether to show the wall time, which differs from run to run.
        """
        return format_table(self.summary, title, wall=self.wall if wall else None)

    def write(self, directory: str | Path) -> Path:
        """Write the result into a directory, which is made if missing.

        ``summary.json``, ``requests.jsonl``, ``table.txt`` (without the wall
        time) and, when passes were recorded, ``passes.npy``. Files of an earlier
        run are replaced, and a ``passes.npy`` that is not of this run is removed.

        Returns
        -------
        Path
            The directory.

        Raises
        ------
        OSError
            If something cannot be written.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("summary.json", self.to_json()),
            ("requests.jsonl", self.to_jsonl()),
            ("table.txt", self.table(wall=False)),
        ):
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        if self.passes is None:
            (folder / "passes.npy").unlink(missing_ok=True)
        else:
            np.save(folder / "passes.npy", self.passes, allow_pickle=False)
        return folder

    def __repr__(self) -> str:
        done, n = self.summary["completed_requests"], self.summary["num_requests"]
        return f"<ReplayResult: {done} of {n} requests completed, {self.summary['duration_ms']:.3f} ms>"


def _read_only(array: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """View of `array` that cannot be written through."""
    view = array.view()
    view.flags.writeable = False
    return view
