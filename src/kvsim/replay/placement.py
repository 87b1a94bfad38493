"""Which rank a request goes to (spec/replay.md section 6)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["RoundRobin"]


class RoundRobin:
    """Workers in turn, and the ranks of each worker in turn.

    Parameters
    ----------
    workers : int
    dp_size : int
        Ranks per worker.
    """

    __slots__ = ("_next_rank", "_next_worker", "dp_size", "workers")

    def __init__(self, workers: int, dp_size: int = 1) -> None:
        self.workers = workers
        self.dp_size = dp_size
        self._next_worker = 0
        self._next_rank = [0] * workers

    def place(self, hint: int = -1) -> int:
        """Rank of the next request, counted over all workers.

        Parameters
        ----------
        hint : int
            Rank inside the worker that the request asks for, which does not
            advance the worker's own turn; -1: any.
        """
        worker = self._next_worker
        self._next_worker = (worker + 1) % self.workers
        if hint < 0:
            hint = self._next_rank[worker]
            self._next_rank[worker] = (hint + 1) % self.dp_size
        return worker * self.dp_size + hint

    def place_all(self, hints: Iterable[int]) -> npt.NDArray[np.int32]:
        """Ranks of many requests in order."""
        return np.fromiter((self.place(hint) for hint in hints), np.int32)
