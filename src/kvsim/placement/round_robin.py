"""Ranks in turn, whatever they hold (spec/replay.md section 6)."""

from __future__ import annotations

from bisect import insort

import numpy as np
import numpy.typing as npt

from kvsim.layout import Pool
from kvsim.placement.base import PlacedRequest, Placement, PoolInfo, Released, Route

__all__ = ["RoundRobin"]


class RoundRobin(Placement):
    """Workers in turn, and the ranks of each worker in turn; in a prefill or decode pool all ranks in turn.

    The aggregated rule has one turn over workers and one per worker over its ranks. A request that asks for
    a rank takes the worker whose turn it is, and leaves that worker's own turn alone. The rule of the other
    pools has one turn over all ranks; a request that asks for a rank counts only ranks of that number.

    The turns outlive changes of the workers; a worker that comes back begins with rank 0.
    """

    def __init__(self) -> None:
        self._by_worker = True
        self._dp_size = 1
        self._workers: list[int] = []
        self._turn = 0
        self._rank_turn: dict[int, int] = {}

    def start(self, pool: PoolInfo) -> None:
        """Take the workers and the rule of the pool."""
        self._by_worker = pool.role is Pool.AGGREGATED
        self._dp_size = pool.dp_size
        self._workers = sorted(pool.workers)

    def place(self, request: PlacedRequest, now_ms: float) -> Route:
        """Take the next turn."""
        return Route(*self.next_rank(request.dp_rank))

    def next_rank(self, dp_rank: int = -1) -> tuple[int, int]:
        """Take the turn of one request.

        Parameters
        ----------
        dp_rank : int
            Rank that it asks for, -1: any.

        Returns
        -------
        worker, dp_rank : int
            There must be an active worker.
        """
        if not self._by_worker:
            ranks = self._dp_size if dp_rank < 0 else 1
            at = self._turn % (len(self._workers) * ranks)
            self._turn = at + 1
            return self._workers[at // ranks], at % ranks if dp_rank < 0 else dp_rank
        at = self._turn % len(self._workers)
        self._turn = at + 1
        worker = self._workers[at]
        if dp_rank < 0:
            dp_rank = self._rank_turn.get(worker, 0)
            self._rank_turn[worker] = (dp_rank + 1) % self._dp_size
        return worker, dp_rank

    def place_all(self, dp_ranks: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Ranks of many requests in order, counted over all workers: ``worker * dp_size + dp_rank``."""
        size = self._dp_size
        if self._by_worker and len(dp_ranks) and (dp_ranks < 0).all():
            return self._place_unhinted(len(dp_ranks))
        taken = (self.next_rank(dp_rank) for dp_rank in dp_ranks.tolist())
        return np.fromiter((worker * size + rank for worker, rank in taken), np.int32)

    def _place_unhinted(self, count: int) -> npt.NDArray[np.int32]:
        """As `place_all`, of `count` > 0 requests that ask for no rank in an aggregated pool."""
        workers, size = len(self._workers), self._dp_size
        first = self._turn % workers
        self._turn = (first + count - 1) % workers + 1
        turn = np.arange(first, first + count)
        begins = np.array([self._rank_turn.get(worker, 0) for worker in self._workers])
        at = turn % workers
        # Turns that the worker had before: those in full rounds; workers before `first` begin a round later.
        before = turn // workers - (at < first)
        ranks = (begins[at] + before) % size
        for k in range(min(workers, count)):
            last = count - 1 - k
            self._rank_turn[self._workers[int(at[last])]] = (int(ranks[last]) + 1) % size
        return (np.array(self._workers)[at] * size + ranks).astype(np.int32)

    @property
    def turn(self) -> int:
        """The next turn over all ranks of a prefill or decode pool."""
        return self._turn

    def worker_ready(self, worker: int, now_ms: float) -> Released:
        """Let the worker take part, in the order of ids."""
        if worker not in self._workers:
            insort(self._workers, worker)
        return ()

    def worker_draining(self, worker: int, now_ms: float) -> Released:
        """Leave the worker out."""
        if worker in self._workers:
            self._workers.remove(worker)
        return ()

    def worker_removed(self, worker: int, now_ms: float) -> Released:
        """Leave the worker out and forget the turn of its ranks."""
        self.worker_draining(worker, now_ms)
        self._rank_turn.pop(worker, None)
        return ()
