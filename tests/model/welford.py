"""Running mean and population variance (timing-and-fpm.md section 4)."""

from __future__ import annotations

from collections.abc import Iterable


class Welford:
    def __init__(self, values: Iterable[int] = ()) -> None:
        self.count = 0
        self.sum = 0
        self.mean = 0.0
        self.m2 = 0.0
        for value in values:
            self.add(value)

    def add(self, value: int) -> None:
        self.count += 1
        self.sum += value
        delta = value - self.mean
        self.mean += delta / self.count
        self.m2 += delta * (value - self.mean)

    @property
    def variance(self) -> float:
        return self.m2 / self.count if self.count else 0.0
