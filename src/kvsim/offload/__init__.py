"""Lower KV tiers: the links that transfers share, and who watches them."""

from kvsim.offload.observer import HostOffloadRecorder

__all__ = ["HostOffloadRecorder"]
