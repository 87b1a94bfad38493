"""KVBM tiers of a rank (spec/host-offload.md part B): when there are any."""

from __future__ import annotations

from kvsim.config import EngineConfig

__all__ = ["has_tiers", "tiers_attached"]


def has_tiers(config: EngineConfig) -> bool:
    """Whether ranks of this configuration have lower KV tiers, of either design."""
    return config.native_host_offload is not None or tiers_attached(config)


def tiers_attached(config: EngineConfig) -> bool:
    """Whether a rank of this configuration has lower tiers.

    Both `kvbm_tiers` and `kv_cache_bytes_per_token` are needed; one without the
    other is a rank without tiers, not an error.
    """
    return config.kvbm_tiers is not None and config.kv_cache_bytes_per_token is not None
