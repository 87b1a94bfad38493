"""Twin of the KV router, of plain dicts and sets (replay.md section 6; conformance/dynamo/README.md "Router")."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from kvsim.placement import KvRouterConfig

Rank = tuple[int, int]  # worker, rank within the worker


@dataclass
class Asked:
    """A request."""

    row: int
    length: int
    blocks: list[int]  # hashes of its complete blocks
    hint: int = -1
    priority: float = 0.0
    strict: int = 0


@dataclass
class Placed:
    rank: Rank
    overlap: int
    best: int
    cost: float


@dataclass
class Waiting:
    asked: Asked
    arrival_ms: float
    overlaps: dict[Rank, int]
    best: int


@dataclass
class RouterModel:
    """One router; `prefill_ms(length, cached)` makes loads of prompts fall with time."""

    config: KvRouterConfig
    block_size: int
    budget: float
    dp_size: int = 1
    prefill_ms: object = None
    active: list[int] = field(default_factory=list)
    cached: dict[Rank, set[int]] = field(default_factory=dict)
    #: (visible at, rank, is stored, hashes), in order
    late: list[tuple[float, Rank, bool, list[int]]] = field(default_factory=list)
    live: dict[int, tuple[Rank, Asked]] = field(default_factory=dict)
    #: row -> (tokens, since, duration) of prompts not computed yet
    prompts: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    queue: list[Waiting] = field(default_factory=list)

    # ------------------------------------------------------------ what a rank has

    def candidates(self, hint: int = -1) -> list[Rank]:
        return [(w, r) for w in sorted(self.active) for r in range(self.dp_size) if hint in (-1, r)]

    def overlap(self, rank: Rank, blocks: list[int]) -> int:
        count = 0
        while count < len(blocks) and blocks[count] in self.cached[rank]:
            count += 1
        return count

    def prompt_load(self, rank: Rank, now: float) -> float:
        if not self.config.router_track_prefill_tokens:
            return 0.0
        total = 0.0
        for row, (where, _) in self.live.items():
            if where == rank and row in self.prompts:
                tokens, since, duration = self.prompts[row]
                if duration == math.inf:
                    total += tokens
                elif now - since < duration:
                    total += tokens * (1.0 - (now - since) / duration)
        return total

    def requests(self, rank: Rank) -> list[Asked]:
        return [asked for where, asked in self.live.values() if where == rank]

    def blocks_with(self, rank: Rank, asked: Asked | None) -> int:
        """Blocks in use once `asked` is there too."""
        if not self.config.router_track_active_blocks:
            return 0
        everyone = self.requests(rank) + ([asked] if asked else [])
        if not self.config.router_assume_kv_reuse:
            return sum(one.length // self.block_size for one in everyone)
        return len({block for one in everyone for block in one.blocks})

    # ------------------------------------------------------------ placing

    def place(self, asked: Asked, now: float) -> Placed | None:
        self._see(now)
        overlaps = {rank: self.overlap(rank, asked.blocks) for rank in self.cached}
        best = max((overlaps[rank] for rank in self.candidates()), default=0)
        waiting = Waiting(asked, now, overlaps, best)
        if self.queue or not self.candidates() or self._busy(now):
            self.queue.append(waiting)
            return None
        return self._put(waiting, now)

    def _busy(self, now: float) -> bool:
        threshold = self.config.router_queue_threshold
        if threshold is None:
            return False
        return all(self.prompt_load(rank, now) > threshold * self.budget for rank in self.candidates())

    def costs(self, waiting: Waiting, now: float) -> dict[Rank, float]:
        config, size, asked = self.config, self.block_size, waiting.asked
        ranks = self.candidates(asked.hint)
        loads = {rank: self.prompt_load(rank, now) for rank in ranks}
        weight = config.overlap_score_weight
        credit = 0.0 if weight == 0 else config.overlap_score_credit
        scale = config.prefill_load_scale if weight is None else weight
        costs = {}
        for rank in ranks:
            excess = (loads[rank] - min(loads.values())) / size
            whole = math.ceil(Fraction(asked.length, size))
            decay = 1.0 / (1.0 + config.overlap_score_credit_decay * excess / whole) if whole else 1.0
            prompt = (loads[rank] + asked.length) / size if config.router_track_prefill_tokens else 0.0
            costs[rank] = (
                scale * max(0.0, prompt - credit * decay * waiting.overlaps.get(rank, 0))
                + self.blocks_with(rank, asked)
                + config.decode_active_request_weight * len(self.requests(rank))
            )
        return costs

    def _put(self, waiting: Waiting, now: float) -> Placed:
        costs = self.costs(waiting, now)
        rank = min(costs, key=lambda one: (costs[one], one))
        asked, overlap = waiting.asked, waiting.overlaps.get(rank, 0)
        tokens = max(0, asked.length - overlap * self.block_size)
        duration = math.inf
        if self.prefill_ms is not None:
            duration = self.prefill_ms(asked.length, min(overlap * self.block_size, asked.length))
        self.live[asked.row] = (rank, asked)
        self.prompts[asked.row] = (tokens, now, duration)
        return Placed(rank, overlap, waiting.best, costs[rank])

    # ------------------------------------------------------------ the queue

    def _order(self, waiting: Waiting) -> tuple[float, ...]:
        asked, p, seconds = waiting.asked, max(0.0, waiting.asked.priority), waiting.arrival_ms / 1000.0
        policy = self.config.router_queue_policy
        if policy == "fcfs":
            order = seconds - p
        elif policy == "lcfs":
            order = -(seconds + p)
        else:
            order = -(1.0 + p) / max(1, asked.length - waiting.best * self.block_size)
        return (-asked.strict, order, self.queue.index(waiting))  # the list is in order of arrival

    def drain(self, now: float) -> list[tuple[int, Placed]]:
        released = []
        while self.queue and self.candidates() and not self._busy(now):
            waiting = min(self.queue, key=self._order)
            self.queue.remove(waiting)
            released.append((waiting.asked.row, self._put(waiting, now)))
        return released

    def first_token(self, row: int, now: float) -> list[tuple[int, Placed]]:
        if row not in self.live:
            return []
        self.prompts.pop(row, None)
        return self.drain(now)

    def terminal(self, row: int, now: float) -> list[tuple[int, Placed]]:
        if row not in self.live:
            return []
        del self.live[row]
        self.prompts.pop(row, None)
        return self.drain(now)

    def cancel(self, row: int, now: float) -> list[tuple[int, Placed]]:
        kept = [waiting for waiting in self.queue if waiting.asked.row != row]
        if len(kept) < len(self.queue):
            self.queue = kept
            return []
        return self.terminal(row, now)

    # ------------------------------------------------------------ caches and workers

    def event(self, rank: Rank, at_ms: float, stored: bool, blocks: list[int]) -> None:
        self.late.append((at_ms + self.config.kv_event_lag_ms, rank, stored, blocks))

    def _see(self, now: float) -> None:
        for visible, rank, stored, blocks in self.late:
            if visible <= now and rank in self.cached:
                for block in blocks:
                    (self.cached[rank].add if stored else self.cached[rank].discard)(block)
        self.late = [late for late in self.late if late[0] > now]

    def ready(self, worker: int) -> None:
        self.active.append(worker)
        for dp_rank in range(self.dp_size):
            self.cached[worker, dp_rank] = set()

    def draining(self, worker: int) -> None:
        self.active.remove(worker)

    def removed(self, worker: int) -> None:
        for dp_rank in range(self.dp_size):
            del self.cached[worker, dp_rank]
        for row, (rank, _) in list(self.live.items()):
            if rank[0] == worker:
                del self.live[row]
                self.prompts.pop(row, None)
