"""Observations of the host tier: from tables of a rank to hooks, and back to tables."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim import layout
from kvsim.contract import HostOffloadEvent, HostOffloadObserver
from kvsim.layout import OffloadEventKind

__all__ = ["HostOffloadRecorder", "offload_events", "tell"]

_MASK64 = (1 << 64) - 1
_UNFITTABLE = 1


def offload_events(events: npt.NDArray[Any], blocks: npt.NDArray[Any]) -> Iterator[tuple[int, HostOffloadEvent]]:
    """(request id, event) of each row.

    Parameters
    ----------
    events : ndarray of layout.OFFLOAD_EVENT
    blocks : ndarray of layout.OFFLOAD_BLOCK
        Those that `first` and `count` of the events refer to.
    """
    for row in events:
        kind = OffloadEventKind(int(row["kind"]))
        mine = blocks[int(row["first"]) : int(row["first"]) + int(row["count"])]
        completes = float(row["completes_at_ms"])
        yield (
            int(row["id_hi"]) << 64 | int(row["id_lo"]),
            HostOffloadEvent(
                kind,
                float(row["at_ms"]),
                int(row["transfer_id"]) if row["transfer_id"] >= 0 else None,
                tuple(mine["hash"].tolist()),
                None if math.isnan(completes) else completes,
                tuple(mine["index"].tolist()) if kind is OffloadEventKind.STORE_BLOCK_MAPPINGS else None,
                bool(row["flags"] & _UNFITTABLE) if kind is OffloadEventKind.CAPACITY_RETRY else None,
            ),
        )


def tell(observer: HostOffloadObserver, events: npt.NDArray[Any], blocks: npt.NDArray[Any]) -> None:
    """Call an observer once per row; one that raises is warned about and called for the next row all the same."""
    for request_id, event in offload_events(events, blocks):
        try:
            observer.record(request_id, event)
        except Exception as error:
            warnings.warn(
                f"the host offload observer failed at {event.kind.name} of request {request_id}: {error!r}",
                RuntimeWarning,
                stacklevel=3,
            )


class HostOffloadRecorder:
    """An observer that keeps what it is told, as tables.

    Attributes
    ----------
    records : list of (int, HostOffloadEvent)
        Request and event, in order.
    """

    __slots__ = ("records",)

    def __init__(self) -> None:
        self.records: list[tuple[int, HostOffloadEvent]] = []

    def record(self, request_id: int, event: HostOffloadEvent) -> None:
        """Keep one event."""
        self.records.append((request_id, event))

    def arrays(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The events so far: layout.OFFLOAD_EVENT and layout.OFFLOAD_BLOCK rows, copies."""
        events = np.zeros(len(self.records), layout.OFFLOAD_EVENT)
        blocks = np.zeros(sum(len(event.block_hashes) for _, event in self.records), layout.OFFLOAD_BLOCK)
        first = 0
        for row, (request_id, event) in zip(events, self.records, strict=True):
            count = len(event.block_hashes)
            row["at_ms"] = event.at_ms
            row["completes_at_ms"] = math.nan if event.completes_at_ms is None else event.completes_at_ms
            row["id_hi"], row["id_lo"] = request_id >> 64, request_id & _MASK64
            row["transfer_id"] = -1 if event.transfer_id is None else event.transfer_id
            row["kind"], row["flags"] = event.kind, _UNFITTABLE if event.structurally_unfittable else 0
            row["first"], row["count"] = first, count
            blocks["hash"][first : first + count] = event.block_hashes
            if event.logical_block_indices is not None:
                blocks["index"][first : first + count] = event.logical_block_indices
            first += count
        return events, blocks
