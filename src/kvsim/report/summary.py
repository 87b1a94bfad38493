"""From per-request records to the flat summary of a run (spec/workloads-and-report.md sections 4 and 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvsim.errors import ConfigError
from kvsim.layout import RequestStatus
from kvsim.offload.totals import TransferTotals
from kvsim.report.gaps import GapHistogram

__all__ = [
    "STATISTICS",
    "RunTotals",
    "Sla",
    "Summary",
    "distribution",
    "end_to_end_ms",
    "mean_gap_ms",
    "summarize",
    "wall_rates",
]

#: Flat report: key -> int, float, bool or None.
Summary: TypeAlias = dict[str, Any]

_PERCENTILES = {"median": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99}

#: The statistics of every distribution, in report order.
STATISTICS = ("mean", "min", "max", *_PERCENTILES, "std")

_Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sla:
    """Latency bounds that make a completed request count as goodput.

    Parameters
    ----------
    ttft_ms : float, optional
        Bound of the time to the first token.
    itl_ms : float, optional
        Bound of the mean gap between tokens of a request.
    e2e_ms : float, optional
        Bound of the time to the last token; stands alone.

    Raises
    ------
    ConfigError
        If a bound is not a finite number > 0, or `e2e_ms` is mixed with the others.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "itl_ms", "e2e_ms"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"sla.{name}", f"expected a number of milliseconds, got {value!r}")
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"sla.{name}", f"must be finite and > 0, got {value}")
        if self.e2e_ms is not None and (self.ttft_ms is not None or self.itl_ms is not None):
            raise ConfigError("sla.e2e_ms", "cannot be combined with sla.ttft_ms or sla.itl_ms")

    @property
    def is_set(self) -> bool:
        """Whether there is any bound."""
        return self.ttft_ms is not None or self.itl_ms is not None or self.e2e_ms is not None


@dataclass(slots=True)
class RunTotals:
    """What a run counts beside its requests.

    Attributes
    ----------
    committed_prefill_tokens : int
        Prompt tokens computed by completed passes, recomputation included.
    passes : int
        Completed forward passes, all ranks.
    preemptions : int
        Preemptions and retractions, of every request.
    wall_time_ms : float
        Real time of construction and run.
    end_ms : float
        Virtual time at which the run stopped.
    prefill_worker_seconds, decode_worker_seconds : float
        Virtual seconds integrated over live workers; aggregated ones count as decode.
    prefill_gpus_per_worker, decode_gpus_per_worker : int
        Tensor parallel size times data parallel size.
    tokenized : bool
        Whether requests crossed a tokenization pool; records then show when they left it.
    transfers : TransferTotals or None
        What lower KV tiers did; None without any.
    """

    committed_prefill_tokens: int = 0
    passes: int = 0
    preemptions: int = 0
    wall_time_ms: float = 0.0
    end_ms: float = 0.0
    prefill_worker_seconds: float = 0.0
    decode_worker_seconds: float = 0.0
    prefill_gpus_per_worker: int = 0
    decode_gpus_per_worker: int = 1
    tokenized: bool = False
    transfers: TransferTotals | None = None


def distribution(values: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> dict[str, float | None]:
    """Mean, extremes, percentiles and population standard deviation.

    A percentile is the sample at index ``floor((n - 1) * p / 100 + 0.5)`` of the
    sorted samples: no interpolation.

    Parameters
    ----------
    values : array_like of float64, shape (n,)
        Samples in any order, finite.
    weights : array_like of int64, shape (n,), optional
        How often each sample occurs, >= 0; the result is that of the repeated samples.

    Returns
    -------
    dict
        Keys `STATISTICS`, plain floats; every value None if there is no sample.

    Raises
    ------
    ValueError
        If shapes differ, a sample is not finite or a weight is negative.
    """
    samples = np.asarray(values, np.float64)
    times = None if weights is None else np.asarray(weights, np.int64)
    if samples.ndim != 1 or (times is not None and samples.shape != times.shape):
        shape = samples.shape if times is None else times.shape
        raise ValueError(f"expected samples and weights of one shape (n,), got {samples.shape} and {shape}")
    if not np.isfinite(samples).all():
        raise ValueError("samples must be finite")
    if times is None:
        samples = np.sort(samples)
    else:
        if times.size and int(times.min()) < 0:
            raise ValueError(f"weights must be >= 0, got {int(times.min())}")
        if not (samples[1:] >= samples[:-1]).all():
            order = np.argsort(samples, kind="stable")
            samples, times = samples[order], times[order]
        if times.size and int(times.min()) == 0:
            samples, times = samples[times > 0], times[times > 0]
    if not samples.size:
        return dict.fromkeys(STATISTICS)
    upto = None if times is None else np.cumsum(times)
    n = len(samples) if upto is None else int(upto[-1])
    low, high = float(samples[0]), float(samples[-1])
    # Rounding must not push the mean of equal samples off them.
    total = float(np.sum(samples if times is None else samples * times))
    mean = min(max(total / n, low), high)
    result: dict[str, float | None] = {"mean": mean, "min": low, "max": high}
    for name, percent in _PERCENTILES.items():
        # floor(x / 100 + 1/2) in integers: exact for every n.
        index = (2 * (n - 1) * percent + 100) // 200
        result[name] = float(samples[index if upto is None else np.searchsorted(upto, index, side="right")])
    squares = (samples - mean) ** 2
    if times is not None:
        squares = squares * times
    result["std"] = math.sqrt(float(np.sum(squares)) / n)
    return result


def end_to_end_ms(records: npt.NDArray[np.void], *, tokenless_e2e: bool = True) -> _Float64:
    """End-to-end latency of each request, nan where it has none.

    From arrival to the last token, and to the end for a completed request that
    was to produce no token: it did occupy the engine until then.

    Parameters
    ----------
    records : ndarray of REQUEST_RECORD, shape (n,)
    tokenless_e2e : bool
        False gives a request without tokens no latency, as the peer does.

    Returns
    -------
    ndarray of float64, shape (n,)
        Milliseconds, >= 0 or nan.
    """
    last = records["last_token_ms"]
    if tokenless_e2e:
        tokenless = (records["status"] == RequestStatus.COMPLETED) & (records["output_tokens"] == 0)
        last = np.where(tokenless, records["terminal_ms"], last)
    result: _Float64 = np.maximum(last - records["arrival_ms"], 0.0)
    return result


def summarize(
    records: npt.NDArray[np.void],
    gaps: GapHistogram,
    totals: RunTotals,
    sla: Sla | None = None,
    *,
    tokenless_e2e: bool = True,
) -> Summary:
    """Summarize a run in one flat mapping.

    Only requests that were admitted and completed count in tokens, durations
    and latencies. `num_requests` counts those that arrived by the end of the
    run: with a cap on virtual time, later ones count in `unreleased_requests`
    only (the peer's recorded run with such a cap counts 25 of 30 so, 3 of them
    completed).

    Parameters
    ----------
    records : ndarray of REQUEST_RECORD, shape (n,)
        One row per request of the workload.
    gaps : GapHistogram
        Token gaps of the completed requests.
    totals : RunTotals
    sla : Sla, optional
        Adds the three ``goodput_`` keys when it has a bound.
    tokenless_e2e : bool
        See `end_to_end_ms`.

    Returns
    -------
    dict
        The keys of workloads-and-report.md section 5 without the three that
        depend on real time (see `wall_rates`), counts of how requests ended,
        and with lower KV tiers what they did, as ``offload_`` keys. Plain
        Python ints, floats, bools and None; None is the statistic of an empty
        sample.
    """
    status = np.ascontiguousarray(records["status"])  # read often
    counted = (status == RequestStatus.COMPLETED) & ~np.isnan(records["first_admit_ms"])
    done = records if counted.all() else records[counted]
    arrived = (status != RequestStatus.UNFINISHED) | (records["arrival_ms"] <= totals.end_ms)
    num_requests = int(np.count_nonzero(arrived))
    ended = {kind: int(np.count_nonzero(status == kind)) for kind in RequestStatus}

    completed = int(done.shape[0])
    input_tokens, output_tokens = int(done["input_tokens"].sum()), int(done["output_tokens"].sum())
    duration_ms = max(float(done["terminal_ms"].max()), 0.0) if completed else 0.0
    duration_s = max(duration_ms / 1000.0, 1e-9)

    summary: Summary = {
        "num_requests": num_requests,
        "completed_requests": completed,
        "rejected_requests": ended[RequestStatus.REJECTED],
        "failed_requests": ended[RequestStatus.FAILED],
        "cancelled_requests": ended[RequestStatus.CANCELLED],
        "unfinished_requests": num_requests - (records.shape[0] - ended[RequestStatus.UNFINISHED]),
        "unreleased_requests": int(records.shape[0]) - num_requests,
        "preemptions": int(totals.preemptions),
        "passes": int(totals.passes),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "processed_tokens": input_tokens + output_tokens,
        "committed_prefill_tokens": int(totals.committed_prefill_tokens),
        "recomputed_tokens": int(records["recomputed_tokens"].sum()),
        "duration_ms": duration_ms,
        "request_throughput_rps": completed / duration_s,
        "input_throughput_tok_s": input_tokens / duration_s,
        "output_throughput_tok_s": output_tokens / duration_s,
        "total_throughput_tok_s": (input_tokens + output_tokens) / duration_s,
        "prefill_worker_seconds": float(totals.prefill_worker_seconds),
        "decode_worker_seconds": float(totals.decode_worker_seconds),
        "prefill_gpus_per_worker": int(totals.prefill_gpus_per_worker),
        "decode_gpus_per_worker": int(totals.decode_gpus_per_worker),
        "gpu_hours": (
            totals.prefill_worker_seconds * totals.prefill_gpus_per_worker
            + totals.decode_worker_seconds * totals.decode_gpus_per_worker
        )
        / 3600.0,
        "prefix_cache_reused_ratio": _ratio(done["reused_tokens"], input_tokens),
        "first_admission_prefix_cache_reused_ratio": _ratio(done["first_reused_tokens"], input_tokens),
    }
    ttft = _samples(done["first_token_ms"] - done["arrival_ms"])
    ttst = _samples(done["second_token_ms"] - done["first_token_ms"])
    tpot = _samples(mean_gap_ms(done))
    e2e = _samples(end_to_end_ms(done, tokenless_e2e=tokenless_e2e))
    if totals.transfers is not None:
        summary |= totals.transfers.summary()
    summary["num_ttft_samples"] = int(ttft.shape[0])
    summary["num_tpot_samples"] = int(tpot.shape[0])
    summary["num_e2e_latency_samples"] = int(e2e.shape[0])
    if sla is not None and sla.is_set:
        good = done[_meets(done, sla)]
        summary["goodput_completed_requests"] = int(good.shape[0])
        summary["goodput_request_throughput_rps"] = good.shape[0] / duration_s
        summary["goodput_output_throughput_tok_s"] = int(good["output_tokens"].sum()) / duration_s
    for name, values in (("ttft", ttft), ("ttst", ttst), ("tpot", tpot), ("e2e_latency", e2e)):
        for statistic, value in distribution(values).items():
            summary[f"{statistic}_{name}_ms"] = value
    gap_ns, weight = gaps.items()
    for statistic, value in distribution(gap_ns / 1e6, weight).items():
        summary[f"{statistic}_itl_ms"] = value
    # A burst emits tokens at one instant: such a gap has no rate.
    positive = gap_ns > 0
    for statistic, value in distribution(1e9 / gap_ns[positive], weight[positive]).items():
        summary[f"{statistic}_output_token_throughput_per_user"] = value
    summary["itl_exact"] = gaps.exact
    return summary


def wall_rates(summary: Summary, wall_time_ms: float) -> dict[str, float]:
    """Return the three report values that depend on real time and so differ from run to run.

    Parameters
    ----------
    summary : dict
        Of `summarize`.
    wall_time_ms : float
        Real time of the run; the rates are 0 if it is not > 0.
    """
    seconds = wall_time_ms / 1000.0
    rates = {"wall_time_ms": float(wall_time_ms)}
    for key, tokens in (
        ("processed_tokens_per_s", summary["processed_tokens"]),
        ("processed_output_tokens_per_s", summary["total_output_tokens"]),
    ):
        rates[key] = tokens / seconds if seconds > 0 else 0.0
    return rates


def mean_gap_ms(records: npt.NDArray[np.void]) -> _Float64:
    """Mean gap between the tokens of each request (TPOT), ms; nan below two tokens."""
    gaps = records["output_tokens"] - 1
    span = np.maximum(records["last_token_ms"] - records["first_token_ms"], 0.0)
    return np.where(gaps > 0, span / np.maximum(gaps, 1), np.nan)


def _samples(values: _Float64) -> _Float64:
    """Latencies that exist, never negative."""
    return np.maximum(values[~np.isnan(values)], 0.0)


def _ratio(reused: npt.NDArray[np.int64], input_tokens: int) -> float:
    return int(reused.sum()) / input_tokens if input_tokens else 0.0


def _meets(done: npt.NDArray[np.void], sla: Sla) -> npt.NDArray[np.bool_]:
    """Which completed requests keep every bound.

    Comparisons with nan are False, which is the rule for a request without
    tokens under bounds on tokens; only its end-to-end time is defined.
    """
    good = np.ones(done.shape, np.bool_)
    e2e = end_to_end_ms(done)
    ttft = np.maximum(done["first_token_ms"] - done["arrival_ms"], 0.0)
    if sla.e2e_ms is not None:
        good &= e2e <= sla.e2e_ms
    if sla.ttft_ms is not None:
        good &= ttft <= sla.ttft_ms
    if sla.itl_ms is not None:
        # Written as the rule has it: another order of the subtractions rounds
        # differently, and a request may lie exactly on the bound.
        tokens = done["output_tokens"]
        good &= (tokens == 1) | ((e2e - ttft) / np.maximum(tokens - 1, 1) <= sla.itl_ms)
    return good
