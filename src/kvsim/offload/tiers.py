"""KVBM tiers of a rank (spec/host-offload.md part B): who has any, and what lies in them.

The kernel owns their state; what is read here is a copy of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvsim.config import EngineConfig
from kvsim.layout import Tier, TierJob, TierLink

if TYPE_CHECKING:
    from kvsim.rank import SchedulerRank

__all__ = ["TIER_BLOCK_VIEW", "TIER_TRANSFER_VIEW", "has_tiers", "tier_blocks", "tier_lru", "tier_transfers"]

#: A block in a tier.
TIER_BLOCK_VIEW = np.dtype(
    [
        ("hash", "<u8"),
        ("state", "<i4"),  # TierState
        ("pins", "<i4"),  # transfers that read it
    ]
)

#: A transfer between tiers that has not ended.
TIER_TRANSFER_VIEW = np.dtype(
    [
        ("id", "<i8"),
        ("link", "<i4"),  # TierLink
        ("waiting", "?"),  # it waits for its turn
        ("blocks", "<i8"),
        ("remaining_bytes", "<f8"),  # as of when its link was last accounted for
    ]
)

_NONE = -1

_LOWER_END = {
    TierLink.G1_TO_G2: Tier.G2,
    TierLink.G2_TO_G1: Tier.G2,
    TierLink.G2_TO_G3: Tier.G3,
    TierLink.G3_TO_G2: Tier.G3,
    TierLink.G2_TO_G4: Tier.G4,
    TierLink.G4_TO_G2: Tier.G4,
}


def has_tiers(config: EngineConfig) -> bool:
    """Whether ranks of this configuration have lower KV tiers, of either design."""
    return config.native_host_offload is not None or config.tiers_attached is not None


def tier_blocks(rank: SchedulerRank, tier: Tier) -> npt.NDArray[Any]:
    """The blocks of a tier, as a copy ordered by hash.

    Parameters
    ----------
    rank : SchedulerRank
        If it shares G3 and G4 with other workers of its run, they hold what all of them brought there.
    tier : Tier

    Returns
    -------
    ndarray of TIER_BLOCK_VIEW
        A rank without tiers has no blocks.
    """
    entries = _holder(rank, tier).view("tier_entries")
    mine = entries[(entries["tier"] == tier)] if rank.config.tiers_attached is not None else entries[:0]
    found = np.zeros(len(mine), TIER_BLOCK_VIEW)
    for name in TIER_BLOCK_VIEW.names or ():
        found[name] = mine[name]
    return np.sort(found, order="hash")


def tier_lru(rank: SchedulerRank, tier: Tier) -> npt.NDArray[np.uint64]:
    """Hashes of what a tier may evict, the next victim first; a copy."""
    holder, hashes = _holder(rank, tier), []
    entries = holder.view("tier_entries")
    row = int(holder.view("tiers")[0]["lru_head"][tier]) if rank.config.tiers_attached is not None else _NONE
    while row != _NONE:
        hashes.append(entries[row]["hash"])
        row = int(entries[row]["next"])
    return np.array(hashes, np.uint64)


def tier_transfers(rank: SchedulerRank) -> tuple[npt.NDArray[Any], list[npt.NDArray[np.uint64]]]:
    """Transfers that have not ended, link by link: those on it in order of their start, then those that wait.

    On links that the rank shares with other workers of its run theirs are not among them.

    Returns
    -------
    transfers : ndarray of TIER_TRANSFER_VIEW
    hashes : list of ndarray of uint64
        The blocks of each.
    """
    rows, hashes = [], []
    for link, job, waiting in _jobs(rank):
        blocks = _holder(rank, _LOWER_END[link]).view("tier_blocks")[int(job["first"]) :][: int(job["count"])]
        # A swap-in leads with the prefix that it keeps on the device.
        moved = blocks["hash"][int(job["prefix"]) if job["kind"] == TierJob.SWAP else 0 :]
        rows.append((int(job["id"]), link, waiting, len(moved), float(job["remaining"])))
        hashes.append(moved.copy())
    return np.array(rows, TIER_TRANSFER_VIEW), hashes


def _holder(rank: SchedulerRank, tier: Tier) -> Any:
    """The state in whose tables a tier of a rank, and the links to it from above, lie."""
    return rank._state if tier == Tier.G2 else rank._state.deep()


def _jobs(rank: SchedulerRank) -> Iterator[tuple[TierLink, Any, bool]]:
    if rank.config.tiers_attached is None:
        return
    own, owner = rank._state.view("tiers")[0], rank._state.sharer
    towards = {TierLink.G1_TO_G2: Tier.G2, TierLink.G2_TO_G3: Tier.G3, TierLink.G2_TO_G4: Tier.G4}
    for link in TierLink:
        holder = _holder(rank, _LOWER_END[link])
        jobs = holder.view("tier_jobs")
        heads = [(int(holder.view("tiers")[0]["link_head"][link]), False)]
        if link in towards:
            heads.append((int(own["wait_head"][towards[link]]), True))
        for head, waiting in heads:
            row = head
            while row != _NONE:
                if _LOWER_END[link] == Tier.G2 or jobs[row]["rank"] == owner:
                    yield link, jobs[row], waiting
                row = int(jobs[row]["next"])
