"""KVBM tiers of a rank: when there are any."""

from __future__ import annotations

from kvsim.config import EngineConfig

__all__ = ["tiers_attached"]


def tiers_attached(config: EngineConfig) -> bool:
    """Whether a rank of this configuration has lower tiers.

    Both `kvbm_tiers` and `kv_cache_bytes_per_token` are needed; one without the
    other is a rank without tiers, not an error.
    """
    return config.tiers_attached is not None
