"""What lower tiers did in a run: hits by tier, bytes moved, time waited, evictions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvsim.layout import Tier, TierLink

if TYPE_CHECKING:
    from kvsim.rank import SchedulerRank

__all__ = ["TransferTotals"]


@dataclass(slots=True)
class TransferTotals:
    """Sums over ranks, of native host offload and of KVBM tiers alike; what a design does not have stays 0.

    Attributes
    ----------
    device_hit_tokens, lower_hit_tokens : int
        Prompt tokens that first admissions did not compute: those that the device had when it was decided
        whether to load, and those that came back from lower tiers.
    device_to_host_bytes, host_to_device_bytes, host_to_disk_bytes, disk_to_host_bytes : int
    host_to_object_bytes, object_to_host_bytes : int
        Carried by transfers that ended. What came back from disk and object store crossed the host, too.
    host_evicted_blocks, disk_evicted_blocks : int
        Blocks that left a tier for others.
    load_wait_ms : float
        Summed over requests that waited for blocks to come back.
    fence_wait_ms : float
        Native host offload, summed over passes: how long the computation waited for stores that still read
        what it overwrites.
    """

    device_hit_tokens: int = 0
    lower_hit_tokens: int = 0
    device_to_host_bytes: int = 0
    host_to_device_bytes: int = 0
    host_to_disk_bytes: int = 0
    disk_to_host_bytes: int = 0
    host_to_object_bytes: int = 0
    object_to_host_bytes: int = 0
    host_evicted_blocks: int = 0
    disk_evicted_blocks: int = 0
    load_wait_ms: float = 0.0
    fence_wait_ms: float = 0.0

    def add(self, rank: SchedulerRank) -> None:
        """Add what a rank has counted; nothing if it has no lower tier."""
        config = rank.config
        block_bytes = config.tokens_per_block * (config.kv_cache_bytes_per_token or 0)
        if config.native_host_offload is not None:
            self._add_host(rank, block_bytes)
        elif config.tiers_attached is not None:
            self._add_tiers(rank, block_bytes)

    def _add_hits(self, rank: SchedulerRank) -> None:
        host = rank._state.view("host")[0]
        self.device_hit_tokens += int(host["device_hit_tokens"])
        self.lower_hit_tokens += int(host["lower_hit_tokens"])

    def _add_host(self, rank: SchedulerRank, block_bytes: int) -> None:
        self._add_hits(rank)
        host = rank._state.view("host")[0]
        self.device_to_host_bytes += int(host["stored_blocks"]) * block_bytes
        self.host_to_device_bytes += int(host["loaded_blocks"]) * block_bytes
        self.host_evicted_blocks += int(host["evicted_blocks"])
        self.load_wait_ms += float(host["load_wait_ms"])
        self.fence_wait_ms += float(host["fence_wait_ms"])

    def _add_tiers(self, rank: SchedulerRank, block_bytes: int) -> None:
        self._add_hits(rank)
        tiers = rank._state.view("tiers")[0]
        for link, name in (
            (TierLink.G1_TO_G2, "device_to_host_bytes"),
            (TierLink.G2_TO_G1, "host_to_device_bytes"),
            (TierLink.G2_TO_G3, "host_to_disk_bytes"),
            (TierLink.G3_TO_G2, "disk_to_host_bytes"),
            (TierLink.G2_TO_G4, "host_to_object_bytes"),
            (TierLink.G4_TO_G2, "object_to_host_bytes"),
        ):
            setattr(self, name, getattr(self, name) + int(tiers["moved"][link]) * block_bytes)
        self.host_evicted_blocks += int(tiers["evicted"][Tier.G2])
        self.disk_evicted_blocks += int(tiers["evicted"][Tier.G3])
        self.load_wait_ms += float(tiers["parked_ms"])

    def merge(self, other: TransferTotals) -> None:
        """Add what somebody else has added up."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def summary(self) -> dict[str, int | float]:
        """The entries of a report, each named ``offload_`` and the attribute."""
        return {f"offload_{name}": value for name, value in asdict(self).items()}
