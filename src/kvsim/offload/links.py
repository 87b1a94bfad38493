"""Links between KV tiers: one transfer after the other, or all at once with a share each.

Plain Python with no rank behind them: `FifoLink` is the rule of native host
offload (spec/host-offload.md section 2), `SharedLink` that of the KVBM tiers
(section 8). Times are ms, sizes are bytes, bandwidths decimal GB/s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvsim.errors import ConfigError

__all__ = ["FifoLink", "SharedLink", "Sharing"]

#: bytes per ms of one GB/s
_BYTES_PER_MS = 1e6

#: An end at most this much later than asked for counts as reached.
_SLACK_MS = 1e-9


def _rate(bandwidth_gbps: float) -> float:
    """Bytes per ms; 0 for a link without a transfer model."""
    if not math.isfinite(bandwidth_gbps):
        raise ConfigError("bandwidth_gbps", f"must be finite, got {bandwidth_gbps!r}")
    return max(0.0, bandwidth_gbps) * _BYTES_PER_MS


def _size(num_bytes: float) -> float:
    if not math.isfinite(num_bytes) or num_bytes < 0:
        raise ValueError(f"num_bytes: must be finite and >= 0, got {num_bytes!r}")
    return num_bytes


class FifoLink:
    """A link that carries one transfer at a time, in order of submission.

    Parameters
    ----------
    bandwidth_gbps : float
        Decimal GB/s; 0 or less is instantaneous.

    Attributes
    ----------
    tail_ms : float
        When everything submitted so far has been carried. Cancelling a transfer does not shorten it.
    """

    __slots__ = ("bytes_per_ms", "tail_ms")

    def __init__(self, bandwidth_gbps: float) -> None:
        self.bytes_per_ms = _rate(bandwidth_gbps)
        self.tail_ms = 0.0

    def submit(self, now_ms: float, num_bytes: float) -> float:
        """Append a transfer that may start at `now_ms`; when it completes."""
        duration = _size(num_bytes) / self.bytes_per_ms if self.bytes_per_ms else 0.0
        self.tail_ms = max(self.tail_ms, now_ms) + duration
        return self.tail_ms


@dataclass(slots=True)
class Sharing:
    """A transfer on a `SharedLink`."""

    transfer_id: int
    remaining: float


class SharedLink:
    """A link whose N active transfers progress at an Nth of the bandwidth each.

    Parameters
    ----------
    bandwidth_gbps : float
        Decimal GB/s; 0 or less is unlimited: a transfer completes at the next `advance`.
    ids : iterator of int, optional
        Where ids come from; links that share one give ids that are unique over all of them.

    Attributes
    ----------
    now_ms : float
        Up to when progress is accounted for.
    active : list of Sharing
        In order of start.
    """

    __slots__ = ("active", "bytes_per_ms", "ids", "now_ms")

    def __init__(self, bandwidth_gbps: float, ids: Iterator[int] | None = None) -> None:
        self.bytes_per_ms = _rate(bandwidth_gbps)
        self.ids = itertools.count() if ids is None else ids
        self.now_ms = 0.0
        self.active: list[Sharing] = []

    def start(self, now_ms: float, num_bytes: float) -> int:
        """Begin a transfer, at the latest time the link has seen if `now_ms` is before it; its id.

        What completes before `now_ms` has to be taken out by `advance` first.
        """
        num_bytes = _size(num_bytes)
        deadline = self.next_deadline_ms()
        if deadline is not None and self.bytes_per_ms and deadline + _SLACK_MS < now_ms:
            raise ValueError(f"now_ms: a transfer completes at {deadline}, advance first, got {now_ms!r}")
        self._progress(max(now_ms, self.now_ms))
        transfer = Sharing(next(self.ids), num_bytes)
        self.active.append(transfer)
        return transfer.transfer_id

    def advance(self, now_ms: float) -> list[tuple[int, float]]:
        """Let time pass; (id, completion) of the transfers that end by `now_ms`, earliest first.

        A time that has passed already changes nothing.
        """
        ended: list[tuple[int, float]] = []
        if now_ms < self.now_ms:
            return ended
        while self.active:
            least = min(transfer.remaining for transfer in self.active)
            finish = self.now_ms + self._share_ms(least, len(self.active))
            if finish > now_ms + _SLACK_MS:
                break
            self.now_ms = finish
            for transfer in self.active:
                transfer.remaining -= least
                if transfer.remaining <= 0:
                    ended.append((transfer.transfer_id, finish))
            self.active = [transfer for transfer in self.active if transfer.remaining > 0]
        self._progress(max(now_ms, self.now_ms))
        return ended

    def deadline_ms(self, transfer_id: int) -> float:
        """When a transfer completes if no other one starts.

        Raises
        ------
        KeyError
            It is not active.
        """
        mine = next((transfer for transfer in self.active if transfer.transfer_id == transfer_id), None)
        if mine is None:
            raise KeyError(transfer_id)
        carried = sum(min(transfer.remaining, mine.remaining) for transfer in self.active)
        return self.now_ms + self._share_ms(carried, 1)

    def next_deadline_ms(self) -> float | None:
        """When the next transfer completes, None without one."""
        if not self.active:
            return None
        least = min(transfer.remaining for transfer in self.active)
        return self.now_ms + self._share_ms(least, len(self.active))

    def _share_ms(self, num_bytes: float, sharers: int) -> float:
        return num_bytes * sharers / self.bytes_per_ms if self.bytes_per_ms else 0.0

    def _progress(self, now_ms: float) -> None:
        """Account for the time up to `now_ms`, in which nothing completes."""
        if self.active and self.bytes_per_ms:
            carried = (now_ms - self.now_ms) * self.bytes_per_ms / len(self.active)
            for transfer in self.active:
                transfer.remaining = max(0.0, transfer.remaining - carried)
        self.now_ms = now_ms
