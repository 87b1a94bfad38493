"""What decides on which rank a request runs, and what it may know (spec/replay.md section 6).

A run drives one placement per pool: one for the aggregated pool, or one for the prefill and one for the
decode pool. It calls the hooks of `Placement` in the order in which things happen, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvsim.layout import Pool

__all__ = ["PlacedRequest", "Placement", "PoolInfo", "Released", "Route"]


class Route(NamedTuple):
    """Where a request goes.

    Parameters
    ----------
    worker, dp_rank : int
        Worker id, and rank within the worker.
    overlap_tokens : int
        Prompt tokens the placement believes cached there.
    overlap_blocks : int
        The same in blocks, -1: it does not look.
    best_overlap_blocks : int
        Most that any rank had when the request arrived, -1: it does not look.
    cost : float
        Of the chosen rank, nan: it computes none.
    """

    worker: int
    dp_rank: int
    overlap_tokens: int = 0
    overlap_blocks: int = -1
    best_overlap_blocks: int = -1
    cost: float = math.nan


class PlacedRequest:
    """A request as a placement sees it; one object per request and pool.

    Parameters
    ----------
    row : int
        Row of the workload: the handle by which hooks name the request.
    request_id : int
    input_tokens, max_output_tokens : int
        Prompt length, and tokens asked for.
    dp_rank : int
        Rank that it asks for, -1: any.
    session, turn : int
        -1: none.
    arrival_ms : float
    priority : float
        Seconds of advantage in a queue.
    strict_priority : int
        A higher one leaves a queue first.
    hashes : ndarray of uint64, or callable without arguments that makes it
        See `block_hashes`; none if omitted.
    """

    __slots__ = (
        "_hashes",
        "arrival_ms",
        "dp_rank",
        "input_tokens",
        "max_output_tokens",
        "priority",
        "request_id",
        "row",
        "session",
        "strict_priority",
        "turn",
    )

    def __init__(
        self,
        row: int,
        request_id: int,
        input_tokens: int,
        max_output_tokens: int = 1,
        *,
        dp_rank: int = -1,
        session: int = -1,
        turn: int = -1,
        arrival_ms: float = 0.0,
        priority: float = 0.0,
        strict_priority: int = 0,
        hashes: npt.NDArray[np.uint64] | Callable[[], npt.NDArray[np.uint64]] | None = None,
    ) -> None:
        self.row = row
        self.request_id = request_id
        self.input_tokens = input_tokens
        self.max_output_tokens = max_output_tokens
        self.dp_rank = dp_rank
        self.session = session
        self.turn = turn
        self.arrival_ms = arrival_ms
        self.priority = priority
        self.strict_priority = strict_priority
        self._hashes = np.empty(0, np.uint64) if hashes is None else hashes

    def __repr__(self) -> str:
        return f"PlacedRequest(row={self.row}, input_tokens={self.input_tokens}, dp_rank={self.dp_rank})"

    @property
    def block_hashes(self) -> npt.NDArray[np.uint64]:
        """Sequence hashes of the complete blocks of the prompt, those that KV events carry; computed when asked for."""
        if not isinstance(self._hashes, np.ndarray):
            self._hashes = self._hashes()
        return self._hashes


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The workers that a placement chooses from.

    Parameters
    ----------
    role : Pool
    dp_size : int
        Ranks of each worker.
    block_size : int
        Tokens per block of the engines.
    max_num_batched_tokens : int or None
        Token budget of a pass of one rank, None: no limit.
    seed : int
        Of the run; what a placement draws follows from it.
    workers : tuple of int
        Ids of the workers that are active when the run begins.
    timing : TimingModel, optional
        Callable model of the engines, if they have one.
    """

    role: Pool = Pool.AGGREGATED
    dp_size: int = 1
    block_size: int = 16
    max_num_batched_tokens: int | None = None
    seed: int = 0
    workers: tuple[int, ...] = (0,)
    timing: Any = None


#: Requests that leave the queue of a placement, and where they go, in order.
Released = Sequence[tuple[PlacedRequest, Route]]


class Placement:
    """Base of all placements: subclass it, implement `place`, and whichever hooks you need.

    A placement may keep a request (`place` returns None) and hand it out later, from any hook that returns
    `Released`. The class attributes say what the run has to report; what is not wanted costs nothing. They are
    read after `start`, which may set them for the instance.

    Attributes
    ----------
    wants_kv_events : bool
        Call `observe`. The engines of the pool then record their KV events.
    wants_first_tokens : bool
        Call `prefill_completed`.
    wants_terminals : bool
        Call `request_terminal`.
    """

    wants_kv_events: bool = False
    wants_first_tokens: bool = False
    wants_terminals: bool = False

    def start(self, pool: PoolInfo) -> None:
        """Begin a run. Called once, before all else."""

    def place(self, request: PlacedRequest, now_ms: float) -> Route | None:
        """Choose a rank for a request that arrives now.

        Called only while the pool has an active worker; before, the run keeps what arrives.

        Returns
        -------
        Route or None
            None: kept, to be released by a hook.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement place(request, now_ms)")

    def observe(self, worker: int, dp_rank: int, events: npt.NDArray[Any], blocks: npt.NDArray[Any]) -> None:
        """KV events of a rank became visible: the pass that caused them has ended.

        Parameters
        ----------
        worker, dp_rank : int
        events : ndarray of layout.EVENT
            In order; `at_ms` is the end of the pass, `kind` 0 stored and 1 removed.
        blocks : ndarray of layout.EVENT_BLOCK
            Blocks of the events: `count` rows from `first`. Valid during the call only, as `events`.
        """

    def prefill_completed(self, row: int, now_ms: float) -> Released:
        """A request has its first token, and goes on."""
        return ()

    def request_terminal(self, row: int, now_ms: float) -> Released:
        """A request that was placed has left the pool: done, rejected, failed or cancelled.

        In a prefill pool that is when its source is released, not when its prompt is computed.
        """
        return ()

    def cancel(self, row: int, now_ms: float) -> Released:
        """A request is given up, be it kept or placed; an unknown one is none of your business."""
        return ()

    def worker_ready(self, worker: int, now_ms: float) -> Released:
        """A worker may get requests from now on. Ids are never used twice."""
        return ()

    def worker_draining(self, worker: int, now_ms: float) -> Released:
        """A worker must not get requests any more; it finishes those it has.

        Others may drain at this instant too, which is told next: what may go elsewhere leaves by `topology_settled`.
        """
        return ()

    def worker_removed(self, worker: int, now_ms: float) -> Released:
        """A drained worker is gone."""
        return ()

    def topology_settled(self, now_ms: float) -> Released:
        """All changes of workers at this instant have been told: the moment to release what waited for one."""
        return ()

    def pending_count(self) -> int:
        """Requests that are kept."""
        return 0
