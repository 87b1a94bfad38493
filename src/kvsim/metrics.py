"""Running statistics of a stream of numbers (spec/timing-and-fpm.md section 4)."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Welford"]


class Welford:
    """Count, sum, mean and population variance by Welford's update.

    Parameters
    ----------
    values : iterable of float, optional
        Added in order.

    Attributes
    ----------
    count : int
    sum : float
        Exact while the values are integers.
    mean, m2 : float
        Running mean, and sum of squared deviations from it.
    """

    __slots__ = ("count", "m2", "mean", "sum")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.count = 0
        self.sum: float = 0
        self.mean = 0.0
        self.m2 = 0.0
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        """Account one more value. O(1)."""
        self.count += 1
        self.sum += value
        delta = value - self.mean
        self.mean += delta / self.count
        self.m2 += delta * (value - self.mean)

    @property
    def variance(self) -> float:
        """Population variance; 0 when empty."""
        return self.m2 / self.count if self.count else 0.0

    def __repr__(self) -> str:
        return f"Welford(count={self.count}, sum={self.sum}, variance={self.variance})"
