"""Facts of a live engine as lines of JSON in a file."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import msgspec

from kvsim.errors import ConfigError
from kvsim.live.publication import SinkSource
from kvsim.live.sinks.facts import take_facts

__all__ = ["JsonlSink"]

#: What a line is called: one output, one admission, ...
_NAMES = {
    "admissions": "admission",
    "kv_events": "kv_event",
    "kv_events_with_tier": "kv_event",
    "outputs": "output",
}
#: Facts that are single.
_SINGLE = ("fpm", "acceptance", "metrics")
#: Too wide for a number of JSON, so written as UUIDs.
_IDS = ("request_id", "handoff_id")


class JsonlSink:
    """Writes one line of JSON per fact, each handed to the system at once, so that others may follow the file.

    Every line has ``fact``, ``dp_rank`` and ``at_ms``; the rest are the fields of
    the fact as `kvsim.contract` names them, ids as UUIDs.

    Parameters
    ----------
    path : str or path
        Opened when the engine starts.
    facts : iterable of str, optional
        Methods of `kvsim.live.Sink`; by default all, KV events of all tiers.
    append : bool
        Keep what the file has; otherwise it starts anew.
    queue_size, on_full
        As for every sink, see `kvsim.live.Sink`: a disk that is too slow costs
        lines (``"drop"``) or time of the engine (``"wait"``).

    Attributes
    ----------
    lines : int
        Written so far.
    lost_lines : int
        Not written because the system refused; the calls they came with count as failed.

    Notes
    -----
    No line is torn: one that could be written only in part is completed before
    the next.
    """

    delivery = "thread"

    def __init__(
        self,
        path: str | os.PathLike[str],
        facts: Iterable[str] | None = None,
        *,
        append: bool = False,
        queue_size: int = 16384,
        on_full: str = "drop",
    ) -> None:
        self.path = os.fspath(path)
        self.queue_size = queue_size
        self.on_full = on_full
        self.lines = 0
        self.lost_lines = 0
        self._append = append
        self._file: io.FileIO | None = None
        self._rest = b""
        self._encoder = msgspec.json.Encoder()
        take_facts(self, facts, self._take)

    def open(self, source: SinkSource) -> None:
        """Open the file.

        Raises
        ------
        ConfigError
            That is not possible.
        """
        del source
        try:
            # Without a buffer: what the system has not taken is ours to keep.
            self._file = io.FileIO(self.path, "ab" if self._append else "wb")
        except OSError as error:
            raise ConfigError("path", f"{self.path} cannot be written: {error.strerror or error}") from None

    def close(self) -> None:
        """Complete the last line and close the file."""
        file, self._file = self._file, None
        if file is not None:
            try:
                self._write(file, b"")
            finally:
                file.close()

    def _take(self, fact: str, dp_rank: int, at_ms: float, payload: Any) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is not open")
        encode = self._encoder.encode
        head = {"fact": _NAMES.get(fact, fact), "dp_rank": dp_rank, "at_ms": at_ms}
        self._write(self._file, b"".join(encode(head | row) + b"\n" for row in _rows(fact, payload)))

    def _write(self, file: io.FileIO, lines: bytes) -> None:
        data = self._rest + lines
        done = 0
        try:
            while done < len(data):
                done += file.write(data[done:]) or 0
        except OSError:
            end = done
            if self._rest and done < len(self._rest):
                end = len(self._rest)
            elif done and data[done - 1 : done] != b"\n":
                end = data.index(b"\n", done) + 1
            self._rest = data[done:end]
            self.lines += data.count(b"\n", 0, done)
            self.lost_lines += data.count(b"\n", end)
            raise
        self._rest = b""
        self.lines += data.count(b"\n")


def _rows(fact: str, payload: Any) -> Iterator[dict[str, Any]]:
    make: Callable[[Any], dict[str, Any]] = _row
    if fact in ("kv_events", "kv_events_with_tier"):
        make = _kv_event
    elif fact == "lifecycle":
        make = _lifecycle
    elif fact == "acceptance":
        make = _acceptance
    for item in (payload,) if fact in _SINGLE else payload:
        yield make(item)


def _row(item: Any) -> dict[str, Any]:
    row: dict[str, Any] = item._asdict() if hasattr(item, "_asdict") else asdict(item)
    for name in _IDS:
        if name in row:
            row[name] = str(uuid.UUID(int=row[name]))
    # A name of the line already.
    row.pop("at_ms", None)
    row.pop("dp_rank", None)
    return row


def _kv_event(event: Any) -> dict[str, Any]:
    row = _row(event)
    return {**row, "data": {"type": type(event.data).__name__.lower(), **row["data"]}}


def _acceptance(sample: tuple[int, int]) -> dict[str, Any]:
    return {"accepted_tokens": sample[0], "forwards": sample[1]}


def _lifecycle(event: Any) -> dict[str, Any]:
    kind = "source_held" if type(event).__name__ == "SourceHeld" else "destination_reserved"
    return {"event": kind, **_row(event)}
