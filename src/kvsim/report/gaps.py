"""The multiset of token gaps of a run, in bounded memory.

Inter-token latency has one sample per token gap (spec/workloads-and-report.md
section 4), and a run easily has 10**8 gaps but few distinct ones: a gap is a
sum of pass times, and pass times repeat. So the distinct values are kept with
their multiplicities, and percentiles over them are exact.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["EXACT_VALUES", "GapHistogram"]

#: Distinct gaps up to which the histogram is exact.
EXACT_VALUES = 2**18

# Rows collected before they are merged: large enough that a merge, which sorts,
# costs little per row; small enough to stay in cache.
_BUFFER_ROWS = 2**16

# Significant bits a folded gap keeps. A bin then spans at most 2**-17 of its
# lower edge (7.6e-6, below the promised 1e-5).
_KEPT_BITS = 18

_Int64 = npt.NDArray[np.int64]


class GapHistogram:
    """Gaps between tokens, whole nanoseconds, with how often each occurred.

    Exact up to `EXACT_VALUES` distinct values. Beyond that, neighbouring values
    share bins of relative width below 1e-5: a gap is replaced by the middle of
    its bin, which is off by less than 4e-6 of the gap (gaps under 2**18 ns are
    never changed), and `exact` becomes False for good. Which bin a gap falls in
    depends on its value alone, so the result does not depend on the order of
    `add` and `merge`. Counts are always exact.

    Zero gaps, as bursts of speculative decoding give, are ordinary values.
    """

    __slots__ = ("_buffer", "_exact", "_fill", "_gap", "_weight")

    def __init__(self) -> None:
        self._gap: _Int64 = np.empty(0, np.int64)
        self._weight: _Int64 = np.empty(0, np.int64)
        self._buffer: _Int64 | None = None
        self._fill = 0
        self._exact = True

    def add(self, gap_ns: npt.ArrayLike, weight: npt.ArrayLike = 1) -> None:
        """Count gaps.

        Parameters
        ----------
        gap_ns : array_like of int64, shape (n,) or scalar
            Gaps, nanoseconds, >= 0, in any order, repetitions allowed.
        weight : array_like of int64, broadcast against `gap_ns`
            How often each occurred, >= 0.

        Raises
        ------
        TypeError
            If either holds anything but integers.
        ValueError
            If one is negative; the histogram is unchanged.

        Notes
        -----
        Amortised O(log b) per row with a buffer of b rows.
        """
        gaps, weights = _whole(gap_ns, "gap_ns"), _whole(weight, "weight")
        if gaps.shape != weights.shape:
            gaps, weights = np.broadcast_arrays(gaps, weights)
        n = gaps.shape[0]
        if n == 0:
            return
        for name, values in (("gap_ns", gaps), ("weight", weights)):
            low = int(values.min())
            if low < 0:
                raise ValueError(f"{name}: must be >= 0, got {low}")
        if n >= _BUFFER_ROWS:
            self._flush()
            self._absorb(gaps, weights)
            return
        if self._fill + n > _BUFFER_ROWS:
            self._flush()
        if self._buffer is None:
            self._buffer = np.empty((2, _BUFFER_ROWS), np.int64)
        self._buffer[0, self._fill : self._fill + n] = gaps
        self._buffer[1, self._fill : self._fill + n] = weights
        self._fill += n

    @property
    def exact(self) -> bool:
        """Whether no two distinct gaps have been folded into one."""
        self._flush()
        return self._exact

    @property
    def count(self) -> int:
        """Number of gaps, the sum of all weights."""
        total = int(self._weight.sum())
        if self._fill and self._buffer is not None:
            total += int(self._buffer[1, : self._fill].sum())
        return total

    def items(self) -> tuple[_Int64, _Int64]:
        """Distinct gaps and their counts.

        Returns
        -------
        gap_ns, weight : ndarray of int64, shape (n,)
            Gaps ascending and unique; weights > 0. Read-only, not copied;
            later additions do not change them.
        """
        self._flush()
        return self._gap, self._weight

    def merge(self, other: GapHistogram) -> None:
        """Add all gaps of `other`, which stays as it is."""
        gaps, weights = other.items()
        self._flush()
        # Folding is idempotent, so what `other` folded needs no second look.
        self._exact = self._exact and other._exact
        if gaps.shape[0]:
            self._absorb(gaps, weights)

    def copy(self) -> GapHistogram:
        """Independent copy."""
        self._flush()
        twin = GapHistogram()
        # The arrays are replaced, never written to: both may hold them.
        twin._gap, twin._weight, twin._exact = self._gap, self._weight, self._exact
        return twin

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GapHistogram):
            return NotImplemented
        return (
            self.exact == other.exact
            and np.array_equal(self.items()[0], other.items()[0])
            and np.array_equal(self._weight, other._weight)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        self._flush()
        return f"GapHistogram(count={self.count}, distinct={self._gap.shape[0]}, exact={self._exact})"

    def _flush(self) -> None:
        if self._fill and self._buffer is not None:
            filled, self._fill = self._fill, 0
            self._absorb(self._buffer[0, :filled], self._buffer[1, :filled])

    def _absorb(self, gaps: _Int64, weights: _Int64) -> None:
        """Replace the table by its union with rows in any order."""
        gaps, weights = np.concatenate([self._gap, gaps]), np.concatenate([self._weight, weights])
        if not self._exact:
            gaps = _fold(gaps)
        gaps, weights = _combine(gaps, weights)
        if gaps.shape[0] > EXACT_VALUES and self._exact:
            self._exact = False
            gaps, weights = _combine(_fold(gaps), weights)
        gaps.flags.writeable = weights.flags.writeable = False
        self._gap, self._weight = gaps, weights


def _whole(values: npt.ArrayLike, name: str) -> _Int64:
    """One-dimensional int64 array of `values`; refuses what a cast would round."""
    array = np.atleast_1d(np.asarray(values))
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected whole numbers, got {array.dtype}")
    return array.astype(np.int64, copy=False)


def _combine(gaps: _Int64, weights: _Int64) -> tuple[_Int64, _Int64]:
    """Ascending unique gaps with summed weights; rows of weight 0 vanish."""
    if not weights.all():
        gaps, weights = gaps[weights > 0], weights[weights > 0]
    if not gaps.shape[0]:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = np.argsort(gaps, kind="stable")
    gaps = gaps[order]
    first = np.flatnonzero(np.concatenate([[True], gaps[1:] != gaps[:-1]]))
    return gaps[first], np.add.reduceat(weights[order], first)


def _fold(gaps: _Int64) -> _Int64:
    """Each gap replaced by the middle of its bin; a folded gap stays where it is."""
    # frexp of a large integer may round up to the next power of two; the shift
    # is then one too long, which would widen that bin, so it is looked at again.
    bits = np.frexp(gaps.astype(np.float64))[1].astype(np.int64)
    bits -= (bits > 0) & (gaps >> np.maximum(bits - 1, 0) == 0)
    shift = np.maximum(bits - _KEPT_BITS, 0)
    middle = (np.int64(1) << shift) >> 1
    return ((gaps >> shift) << shift) + middle
