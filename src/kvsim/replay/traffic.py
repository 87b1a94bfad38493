"""What arrived, was placed and ended between two instants (spec/replay.md sections 7 and 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.layout import RequestStatus
from kvsim.report.summary import mean_gap_ms

__all__ = ["Traffic", "TrafficWindow"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Numbers of one window. Means are 0 where nothing was counted.

    Attributes
    ----------
    duration_s : float
    arrived : int
        Requests that arrived.
    completed : int
        Requests that completed; those that were rejected, failed or cancelled do not count.
    mean_input_tokens, mean_output_tokens : float
        Over the completed requests; outputs as emitted.
    mean_ttft_ms : float
    ttft_count : int
        Completed requests that emitted a token.
    mean_gap_ms : float
        Mean over requests of the mean gap between their tokens.
    gap_count : int
        Completed requests of more than one token.
    mean_hit_rate : float
        Over placements by a router that knows the caches: share of the prompt's
        blocks it believed cached. In disaggregated runs those of prefill.
    hit_rate_count : int
    mean_accept_length : float or None
        Tokens per decoding request and pass; None without any.
    forward_count : int
        Decoding requests, summed over passes.
    """

    duration_s: float = 0.0
    arrived: int = 0
    completed: int = 0
    mean_input_tokens: float = 0.0
    mean_output_tokens: float = 0.0
    mean_ttft_ms: float = 0.0
    ttft_count: int = 0
    mean_gap_ms: float = 0.0
    gap_count: int = 0
    mean_hit_rate: float = 0.0
    hit_rate_count: int = 0
    mean_accept_length: float | None = None
    forward_count: int = 0

    def scaling_row(self) -> dict[str, Any]:
        """The `traffic` of a snapshot that a scaling policy gets."""
        return {
            "duration_s": self.duration_s,
            "num_req": self.arrived,
            "avg_isl": self.mean_input_tokens,
            "avg_osl": self.mean_output_tokens,
            "avg_ttft_ms": self.mean_ttft_ms,
            "avg_itl_ms": self.mean_gap_ms,
            "shape_count": self.completed,
            "ttft_count": self.ttft_count,
            "itl_count": self.gap_count,
            "avg_accept_length": self.mean_accept_length,
            "avg_kv_hit_rate": self.mean_hit_rate,
            "hit_rate_count": self.hit_rate_count,
            "accept_length_forward_count": self.forward_count,
        }

    def telemetry_row(self) -> dict[str, Any]:
        """The `traffic` of a telemetry sample."""
        return {
            "duration_s": self.duration_s,
            "arriving_requests": self.arrived,
            "completed_requests": self.completed,
            "avg_isl": self.mean_input_tokens,
            "avg_osl": self.mean_output_tokens,
            "avg_ttft_ms": self.mean_ttft_ms,
            "avg_itl_ms": self.mean_gap_ms,
            "ttft_count": self.ttft_count,
            "itl_count": self.gap_count,
            "avg_router_kv_hit_rate": self.mean_hit_rate,
            "router_kv_hit_rate_count": self.hit_rate_count,
            "avg_accept_length": self.mean_accept_length,
            "accept_length_forward_count": self.forward_count,
        }


class TrafficWindow:
    """Counts since the last `drain`.

    A window is (start, end], and the first one includes its start: the run
    reports what happens at an instant before it drains at that instant.

    Parameters
    ----------
    start_ms : float

    Attributes
    ----------
    start_ms : float
        Where the window begins.
    """

    __slots__ = (
        "_arrived",
        "_completed",
        "_forwards",
        "_gap_count",
        "_gap_sum",
        "_hit_count",
        "_hit_sum",
        "_input_sum",
        "_output_sum",
        "_tokens",
        "_ttft_count",
        "_ttft_sum",
        "start_ms",
    )

    def __init__(self, start_ms: float = 0.0) -> None:
        self.start_ms = start_ms
        self._clear()

    def _clear(self) -> None:
        self._arrived = self._completed = self._input_sum = self._output_sum = 0
        self._ttft_count = self._gap_count = self._hit_count = 0
        self._ttft_sum = self._gap_sum = self._hit_sum = 0.0
        self._tokens = self._forwards = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not (self._arrived or self._completed or self._hit_count or self._forwards)

    def arrived(self, count: int = 1) -> None:
        """Requests arrived."""
        self._arrived += count

    def placed(self, overlap_blocks: int, prompt_blocks: int) -> None:
        """A router that knows the caches placed a request.

        Parameters
        ----------
        overlap_blocks : int
            Blocks it believed cached on the chosen rank.
        prompt_blocks : int
            Of the whole prompt, a partial last one included; 0 is not counted.
        """
        if prompt_blocks > 0:
            self._hit_sum += overlap_blocks / prompt_blocks
            self._hit_count += 1

    def decoded(self, tokens: int, forwards: int) -> None:
        """Passes of aggregated or decode ranks completed.

        Parameters
        ----------
        tokens : int
            Emitted by decoding requests.
        forwards : int
            Decoding requests, summed over the passes.
        """
        self._tokens += tokens
        self._forwards += forwards

    def ended(self, records: npt.NDArray[np.void]) -> None:
        """Requests ended; only completed ones count.

        Parameters
        ----------
        records : ndarray of REQUEST_RECORD, shape (n,)
        """
        done = records[records["status"] == RequestStatus.COMPLETED]
        if not done.shape[0]:
            return
        self._completed += int(done.shape[0])
        self._input_sum += int(done["input_tokens"].sum())
        self._output_sum += int(done["output_tokens"].sum())
        ttft = done["first_token_ms"] - done["arrival_ms"]
        seen = ~np.isnan(ttft)
        self._ttft_count += int(np.count_nonzero(seen))
        self._ttft_sum += float(np.maximum(ttft[seen], 0.0).sum())
        gaps = mean_gap_ms(done)
        seen = ~np.isnan(gaps)
        self._gap_count += int(np.count_nonzero(seen))
        self._gap_sum += float(gaps[seen].sum())

    def drain(self, now_ms: float) -> Traffic:
        """The numbers up to `now_ms`; a new window begins there."""
        traffic = Traffic(
            duration_s=max(now_ms - self.start_ms, 0.0) / 1000.0,
            arrived=self._arrived,
            completed=self._completed,
            mean_input_tokens=_mean(self._input_sum, self._completed),
            mean_output_tokens=_mean(self._output_sum, self._completed),
            mean_ttft_ms=_mean(self._ttft_sum, self._ttft_count),
            ttft_count=self._ttft_count,
            mean_gap_ms=_mean(self._gap_sum, self._gap_count),
            gap_count=self._gap_count,
            mean_hit_rate=_mean(self._hit_sum, self._hit_count),
            hit_rate_count=self._hit_count,
            mean_accept_length=self._tokens / self._forwards if self._forwards else None,
            forward_count=self._forwards,
        )
        self.start_ms = now_ms
        self._clear()
        return traffic


def _mean(total: float, count: int) -> float:
    return total / count if count else 0.0
