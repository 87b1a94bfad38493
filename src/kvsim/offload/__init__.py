"""Lower KV tiers: the links that transfers share, and who watches them."""

from kvsim.offload.links import FifoLink, SharedLink
from kvsim.offload.observer import HostOffloadRecorder

__all__ = ["FifoLink", "HostOffloadRecorder", "SharedLink"]
