"""KVBM tiers of a rank (spec/host-offload.md part B)."""

from __future__ import annotations

from kvsim.config import EngineConfig

__all__ = ["has_tiers"]


def has_tiers(config: EngineConfig) -> bool:
    """Whether ranks of this configuration have lower KV tiers, of either design."""
    return config.native_host_offload is not None or config.tiers_attached is not None
