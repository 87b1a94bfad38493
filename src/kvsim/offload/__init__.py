"""Lower KV tiers: what lies in them, the links that transfers share, and who watches them."""

from kvsim.offload.host import host_blocks, host_lru, host_transfers
from kvsim.offload.links import FifoLink, SharedLink
from kvsim.offload.observer import HostOffloadRecorder
from kvsim.offload.tiers import has_tiers, tier_blocks, tier_lru, tier_transfers
from kvsim.offload.totals import TransferTotals

__all__ = [
    "FifoLink",
    "HostOffloadRecorder",
    "SharedLink",
    "TransferTotals",
    "has_tiers",
    "host_blocks",
    "host_lru",
    "host_transfers",
    "tier_blocks",
    "tier_lru",
    "tier_transfers",
]
