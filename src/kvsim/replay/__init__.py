"""Replay of workloads in virtual time."""

from kvsim.replay.run import Run, replay

__all__ = ["Run", "replay"]
