"""What lower tiers did in a run: hits by tier, bytes moved, time waited, evictions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsim.rank import SchedulerRank

__all__ = ["TransferTotals"]


@dataclass(slots=True)
class TransferTotals:
    """Sums over ranks, of native host offload and of KVBM tiers alike; what a design does not have stays 0.

    Attributes
    ----------
    device_hit_tokens, host_hit_tokens : int
        Prompt tokens that first admissions did not compute, by the tier they were in when it was decided.
    device_to_host_bytes, host_to_device_bytes : int
        Carried by transfers that completed.
    host_evicted_blocks : int
    load_wait_ms : float
        Summed over requests: from the decision to load to the end of the load, or its cancellation.
    fence_wait_ms : float
        Summed over passes: how long the computation waited for stores that still read what it overwrites.
    """

    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    device_to_host_bytes: int = 0
    host_to_device_bytes: int = 0
    host_evicted_blocks: int = 0
    load_wait_ms: float = 0.0
    fence_wait_ms: float = 0.0

    def add(self, rank: SchedulerRank) -> None:
        """Add what a rank has counted."""
        if rank.config.native_host_offload is not None:
            self._add_host(rank)

    def _add_host(self, rank: SchedulerRank) -> None:
        host = rank._state.view("host")[0]
        block_bytes = rank.config.tokens_per_block * (rank.config.kv_cache_bytes_per_token or 0)
        self.device_hit_tokens += int(host["device_hit_tokens"])
        self.host_hit_tokens += int(host["host_hit_tokens"])
        self.device_to_host_bytes += int(host["stored_blocks"]) * block_bytes
        self.host_to_device_bytes += int(host["loaded_blocks"]) * block_bytes
        self.host_evicted_blocks += int(host["evicted_blocks"])
        self.load_wait_ms += float(host["load_wait_ms"])
        self.fence_wait_ms += float(host["fence_wait_ms"])

    def merge(self, other: TransferTotals) -> None:
        """Add what somebody else has added up."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def summary(self) -> dict[str, int | float]:
        """The entries of a report, each named ``offload_`` and the attribute."""
        return {f"offload_{name}": value for name, value in asdict(self).items()}
