"""What lies in the host memory of a rank with native host offload (spec/host-offload.md part A).

The kernel owns the state; what is read here is a copy of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvsim.rank import SchedulerRank

__all__ = ["HOST_BLOCK_VIEW", "HOST_TRANSFER_VIEW", "host_blocks", "host_lru", "host_transfers"]

#: A block in host memory.
HOST_BLOCK_VIEW = np.dtype(
    [
        ("hash", "<u8"),
        ("resident", "?"),  # else a store still brings it
        ("pins", "<i4"),  # loads that read it
        ("epoch", "<i8"),  # recency; equal in a cohort
    ]
)

#: A transfer that has not completed.
HOST_TRANSFER_VIEW = np.dtype(
    [
        ("id", "<i8"),
        ("store", "?"),  # device to host, else a load
        ("on_link", "?"),  # else it is prepared and waits for the end of the pass
        ("blocks", "<i8"),
        ("deadline_ms", "<f8"),  # nan before it is on its link
        ("request_hi", "<u8"),
        ("request_lo", "<u8"),
    ]
)

_NONE = -1
_STORE = 1


def host_blocks(rank: SchedulerRank) -> npt.NDArray[Any]:
    """The blocks of the host, as a copy ordered by hash.

    Returns
    -------
    ndarray of HOST_BLOCK_VIEW
        Empty for a rank without a host tier.
    """
    entries = rank._state.view("host_entries")
    mine = entries[entries["pins"] >= 0] if rank.config.native_host_offload is not None else entries[:0]
    found = np.zeros(len(mine), HOST_BLOCK_VIEW)
    for name in ("hash", "pins", "epoch"):
        found[name] = mine[name]
    found["resident"] = mine["transfer"] == _NONE
    return np.sort(found, order="hash")


def host_lru(rank: SchedulerRank) -> npt.NDArray[np.uint64]:
    """Hashes of what the host may evict, the next victim first; a copy."""
    entries, hashes = rank._state.view("host_entries"), []
    row = int(rank._state.view("host")[0]["lru_head"]) if rank.config.native_host_offload is not None else _NONE
    while row != _NONE:
        hashes.append(entries[row]["hash"])
        row = int(entries[row]["next"])
    return np.array(hashes, np.uint64)


def host_transfers(rank: SchedulerRank) -> npt.NDArray[Any]:
    """Transfers that have not completed, as a copy ordered by id.

    Returns
    -------
    ndarray of HOST_TRANSFER_VIEW
        Empty for a rank without a host tier.
    """
    rows: list[tuple[Any, ...]] = []
    if rank.config.native_host_offload is not None:
        host, transfers = rank._state.view("host")[0], rank._state.view("transfers")
        for head in ("prepared_head", "store_head", "load_head"):
            row = int(host[head])
            while row != _NONE:
                one = transfers[row]
                deadline = float(one["deadline_ms"]) if one["on_link"] else np.nan
                store = int(one["kind"]) == _STORE
                rows.append(
                    (one["id"], store, bool(one["on_link"]), one["count"], deadline, one["id_hi"], one["id_lo"])
                )
                row = int(one["next"])
    return np.sort(np.array(rows, HOST_TRANSFER_VIEW), order="id")
