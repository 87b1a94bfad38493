"""The event loop of a run whose course is decided on the way (spec/replay.md sections 2 to 9).

Time passes in the kernel `Fleet`. It comes back at the instants at which
something is to be decided: requests ended, a prompt is held, a destination
got its blocks. What happens inside one instant stands in `System._settle`, in
order. Decisions are other people's: where a request goes (`kvsim.placement`),
what the two halves of a handoff do next (`kvsim.replay.coordinator`), how many
workers there are (`kvsim.replay.scaling`).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvsim import layout
from kvsim._core.drive import Fleet
from kvsim.config import EngineConfig
from kvsim.contract import TransferTiming
from kvsim.errors import PolicyError
from kvsim.handoff import HandoffCommand
from kvsim.layout import FailReason, Pool, RequestStatus
from kvsim.offload.tiers import has_tiers
from kvsim.offload.totals import TransferTotals
from kvsim.placement import PlacedRequest, PlacedRequests, Placement, Released, RoundRobin, Route
from kvsim.rank import SchedulerRank, request_content
from kvsim.replay.coordinator import Action, Coordinator, Fact, Outcome, State, kernel_tables
from kvsim.replay.pool import WorkerPool
from kvsim.replay.scaling import Scaling, forward_row
from kvsim.replay.telemetry import PoolCounters, RankGauges, Telemetry
from kvsim.replay.traffic import TrafficWindow
from kvsim.workload import ArrivalDriver, TokenizationPool, Workload

__all__ = ["RunPool", "System"]

_UNTIL, _NOTED, _SLICED, _CAPPED, _, _STARTING, _STUCK = range(7)
_ENDED, _HELD, _RESERVED, _FIRST, _WOKEN = range(5)

_COMMANDS = {
    Action.RELEASE_SOURCE: HandoffCommand.RELEASE_SOURCE,
    Action.CANCEL_SOURCE: HandoffCommand.CANCEL_SOURCE,
    Action.ACTIVATE_DESTINATION: HandoffCommand.ACTIVATE_DESTINATION,
    Action.CANCEL_DESTINATION: HandoffCommand.CANCEL_DESTINATION,
}

#: Zero-duration passes that one instant may contain before the run counts as stuck there.
_MOST_AT_ONCE = 1_000_000


class MakeRanks(Protocol):
    """How the engines of a worker are made."""

    def __call__(self, worker: int) -> list[SchedulerRank]: ...


class RunPool:
    """The workers of one pool, with the placement in front of them.

    Parameters
    ----------
    kind : Pool
    config : EngineConfig
    dp_size : int
    workers : WorkerPool
    placement : Placement
        Started.
    make_ranks : callable
        Gives the ranks of a new worker.
    fleet : Fleet
    requests : PlacedRequests
        Tell the placement about rows.
    tokenization : TokenizationPool, optional
        Between the placement and the engines.
    """

    __slots__ = (
        "active",
        "coming",
        "config",
        "dp_size",
        "first_rank",
        "fleet",
        "gone",
        "index",
        "kind",
        "make_ranks",
        "parked",
        "placed",
        "placement",
        "queued_ms",
        "ranks",
        "requests",
        "tokenization",
        "transfers",
        "workers",
    )

    def __init__(
        self,
        kind: Pool,
        config: EngineConfig,
        dp_size: int,
        workers: WorkerPool,
        placement: Placement,
        make_ranks: MakeRanks,
        fleet: Fleet,
        requests: PlacedRequests,
        tokenization: TokenizationPool | None = None,
    ) -> None:
        self.kind = kind
        self.config = config
        self.dp_size = dp_size
        self.workers = workers
        self.placement = placement
        self.make_ranks = make_ranks
        self.fleet = fleet
        self.tokenization = tokenization
        self.requests = requests
        #: Fleet numbers of a worker and of its first rank.
        self.index: dict[int, int] = {}
        self.first_rank: dict[int, int] = {}
        #: Engines by rank number of the fleet.
        self.ranks: dict[int, SchedulerRank] = {}
        #: Counters of workers that are gone.
        self.gone = [0, 0, 0]
        #: What lower KV tiers of workers that are gone did.
        self.transfers = TransferTotals() if has_tiers(config) else None
        #: Ids of the workers that take requests.
        self.active = frozenset(workers.active_ids)
        #: Requests on their way to a worker through its tokenization pool, by fleet number.
        self.coming: dict[int, int] = {}
        #: Requests for which there was no worker, in order.
        self.parked: deque[tuple[PlacedRequest, Any]] = deque()
        #: What a live request is to the placement, by row.
        self.placed: dict[int, tuple[PlacedRequest, Any]] = {}
        #: When a request entered the placement's queue, by row.
        self.queued_ms: dict[int, float] = {}
        for worker in workers.active_ids:
            self.add(worker)

    def add(self, worker: int) -> None:
        """Make the engines of a worker that is active from now on."""
        ranks = self.make_ranks(worker)
        index, first = self.fleet.add_worker([rank._state for rank in ranks], int(self.kind), worker)
        self.index[worker] = index
        self.first_rank[worker] = first
        self.ranks.update(zip(range(first, first + len(ranks)), ranks, strict=True))

    def remove(self, worker: int) -> None:
        """Forget the engines of a worker that has nothing left to do."""
        index = self.index.pop(worker, None)
        if index is None:
            return
        first = self.first_rank.pop(worker)
        for rank in range(first, first + self.dp_size):
            gauges = self.fleet.gauges[rank]
            for k, column in enumerate((5, 6, 4)):
                self.gone[k] += int(gauges[column])
            engine = self.ranks.pop(rank)
            if self.transfers is not None:
                self.transfers.add(engine)
        self.fleet.remove_worker(index)
        self.coming.pop(index, None)

    def is_drained(self, worker: int) -> bool:
        """Whether a worker has nothing left to do."""
        index = self.index.get(worker)
        return index is None or (not self.coming.get(index) and self.fleet.is_drained(index))

    def comes(self, rank: int, count: int) -> None:
        """One more request is on its way to a rank of the fleet, or with -1 one less."""
        index = self.fleet.worker_of(rank)
        self.coming[index] = self.coming.get(index, 0) + count

    def first_token(self, row: int, now_ms: float) -> Released:
        """Tell the placement of a first token, if it wants to know; what it releases."""
        return self.placement.prefill_completed(row, now_ms) if self.placement.wants_first_tokens else ()

    def left(self, row: int, now_ms: float) -> Released:
        """Tell the placement that a request left the pool, if it wants to know; what it releases."""
        return self.placement.request_terminal(row, now_ms) if self.placement.wants_terminals else ()


class _Handoff:
    """A live request of a disaggregated run."""

    __slots__ = (
        "coordinator",
        "decode_rank",
        "decode_slot",
        "ended",
        "prefill_rank",
        "prefill_slot",
        "row",
    )

    def __init__(self, row: int, coordinator: Coordinator) -> None:
        self.row = row
        self.coordinator = coordinator
        self.prefill_rank = self.prefill_slot = self.decode_rank = self.decode_slot = -1
        self.ended = False


class System:
    """One run, event by event.

    Parameters
    ----------
    workload : Workload
    driver : ArrivalDriver
    fleet : Fleet
    records : ndarray of layout.REQUEST_RECORD
    pools : list of RunPool
        One aggregated pool, or a prefill and a decode pool.
    handoffs : ndarray of layout.HANDOFF_RECORD, optional
    handoff_latency_ms : float
        Transfer time where the engines have no transfer model.
    growing : bool
        Prompts contain what earlier turns emitted.
    cap_ms : float
        Events later than this do not happen.
    scaling : Scaling, optional
    telemetry : Telemetry, optional
    capture_routing : bool
    slice_passes : int
        Passes between two looks at `progress` and at signals.
    progress : callable, optional

    Attributes
    ----------
    stalled : list of dict
        Requests that were given up because nothing could reach them any more:
        ``row``, ``request_id`` and what each ``waits_for``.
    """

    def __init__(
        self,
        workload: Workload,
        driver: ArrivalDriver,
        fleet: Fleet,
        records: npt.NDArray[Any],
        pools: Sequence[RunPool],
        *,
        handoffs: npt.NDArray[Any] | None = None,
        handoff_latency_ms: float = 0.0,
        growing: bool = False,
        cap_ms: float = math.inf,
        scaling: Scaling | None = None,
        telemetry: Telemetry | None = None,
        capture_routing: bool = False,
        slice_passes: int = 200_000,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.workload, self.driver, self.fleet, self.records = workload, driver, fleet, records
        self.pools = list(pools)
        self.handoffs = np.zeros(0, layout.HANDOFF_RECORD) if handoffs is None else handoffs
        self.cap_ms = cap_ms
        # Columns that are used once or more per request.
        self._arrival_ms, self._input_tokens = records["arrival_ms"], records["input_tokens"]
        self._activated_ms = self.handoffs["destination_activated_ms"]
        self._released_ms = self.handoffs["source_released_ms"]
        self.scaling, self.telemetry = scaling, telemetry
        self.stalled: list[dict[str, Any]] = []
        self._disaggregated = len(self.pools) == 2
        self._front, self._back = self.pools[0], self.pools[-1]
        self._latency_ms = handoff_latency_ms
        self._source_first = self._front.config.backend != "sglang"
        config = self._front.config
        # The model of the transfer is the prefill engine's.
        self._transfer: tuple[Any, ...] = (
            config.kv_transfer_timing_mode,
            config.kv_transfer_bytes_per_token,
            config.kv_transfer_bandwidth,
        )
        self._growing = growing
        self._slice = slice_passes
        self._progress = progress
        self._windows: list[TrafficWindow] = [part.traffic for part in (scaling, telemetry) if part is not None]
        self._inside = 0
        self._released = 0
        self._transfers: list[tuple[float, int, _Handoff]] = []  # heap
        self._waiting_room: list[tuple[float, int, int, Any, Any, Any]] = []  # heap: behind the tokenization pool
        self._actions: deque[tuple[_Handoff, int, Action]] = deque()
        self._arrived: deque[tuple[_Handoff, int, Action]] = deque()
        self._deferred: dict[int, dict[int, list[tuple[_Handoff, int, Action]]]] = {}  # by worker and rank of the fleet
        self._live: dict[int, _Handoff] = {}
        self._routing: list[tuple[Any, ...]] | None = [] if capture_routing else None
        self._decoded = [0, 0]
        self._is_led = self._can_be_led()
        self._fpm: dict[int, Any] = {}  # newest metrics of a pass by rank of the fleet, for the tick under way

    # ------------------------------------------------------------ what others read

    def worker_pool(self, role: Pool) -> WorkerPool | None:
        """Workers of `Pool.PREFILL` (None in an aggregated run), and of `Pool.DECODE` or all."""
        if role is Pool.PREFILL:
            return self._front.workers if self._disaggregated else None
        return self._back.workers

    def gauges(self, role: Pool) -> Iterator[RankGauges]:
        """Every rank of every live worker, by (worker, rank)."""
        pool = self._front if role is Pool.PREFILL else self._back
        rows = self.fleet.gauges
        blocks = pool.config.num_gpu_blocks
        for worker in pool.workers.live_ids:
            first = pool.first_rank.get(worker)
            for rank in range(pool.dp_size):
                row = (0, 0, 0, 0) if first is None else tuple(rows[first + rank, :4].tolist())
                yield RankGauges(worker, rank, row[0], row[1], blocks, row[2], row[3])

    def counters(self, role: Pool) -> PoolCounters:
        """Counters of a pool, removed workers included."""
        pool = self._front if role is Pool.PREFILL else self._back
        rows = self.fleet.gauges[sorted(pool.ranks)]
        hits, looked, lost = (int(rows[:, column].sum()) for column in (5, 6, 4))
        return PoolCounters(hits + pool.gone[0], looked + pool.gone[1], lost + pool.gone[2])

    def pending_requests(self, role: Pool) -> int:
        """Requests in the queue of the pool's placement."""
        return (self._front if role is Pool.PREFILL else self._back).placement.pending_count()

    def newest_passes(self, role: Pool) -> Iterable[tuple[int, int, float, dict[str, Any]]]:
        """Newest completed pass of each rank since the last tick."""
        pool = self._front if role is Pool.PREFILL else self._back
        for worker in sorted(pool.first_rank):
            first = pool.first_rank[worker]
            for rank in range(pool.dp_size):
                newest = self._fpm.get(first + rank)
                if newest is not None:
                    end_ms, duration_ms, metrics = newest
                    yield worker, rank, end_ms, forward_row(worker, rank, duration_ms, metrics)

    @property
    def routing(self) -> npt.NDArray[Any] | None:
        """Placements so far: layout.ROUTING_RECORD, in order of decision."""
        if self._routing is None:
            return None
        if self._is_led:
            return self._led_routing()
        return np.array(self._routing, layout.ROUTING_RECORD)

    # ------------------------------------------------------------ running

    def execute(self) -> None:
        """Let the run happen, to its end or to the cap."""
        telemetry = self.telemetry
        if self._is_led:
            self._execute_led()
            return
        try:
            self._settle(ticks=False)
            if telemetry is not None:
                telemetry.baseline(self.fleet.now_ms, self)
            self._settle(ticks=True)
            self._run()
            if telemetry is not None:
                self._count_decoded()
                telemetry.finish(self.fleet.now_ms, self)
        finally:
            if telemetry is not None:
                telemetry.close()

    def _run(self) -> None:
        fleet, telemetry, cap_ms = self.fleet, self.telemetry, self.cap_ms
        while self._inside > 0 or not self.driver.drained:
            until_ms = self._next_ms()
            next_ms = min(until_ms, fleet.next_event_ms())
            if next_ms == math.inf:
                if not self._release_stuck():
                    return
                self._settle(ticks=True)
                continue
            if next_ms > cap_ms:
                return
            limit_ms, hold = until_ms, False
            if telemetry is not None:
                if telemetry.next_sample_ms < next_ms:
                    self._count_decoded()
                    telemetry.advance(next_ms, self)
                if telemetry.next_sample_ms < until_ms:
                    # Everything up to the sample, and nothing behind it.
                    limit_ms, hold = math.nextafter(telemetry.next_sample_ms, math.inf), True
            status = fleet.run(limit_ms, cap_ms, hold, self._slice)
            if self._progress is not None:
                self._progress(int(fleet.done), len(self.workload))
            if status == _CAPPED:
                return
            if status in (_NOTED, _STARTING) or (status == _UNTIL and not hold):
                self._settle(ticks=True, starting=status == _STARTING)

    # ------------------------------------------------------------ handoffs that the kernel leads

    def _can_be_led(self) -> bool:
        """Whether nobody but the coordinators decides anything: the kernel has their tables and does it all."""
        pools = self.pools
        if not self._disaggregated or self.scaling is not None or self.telemetry is not None or self._growing:
            return False
        if any(type(pool.placement) is not RoundRobin or pool.tokenization is not None for pool in pools):
            return False
        _, size, bandwidth = self._transfer
        longest = 0.0
        if size is not None and bandwidth:
            # Sizes that a kernel integer does not hold, and delays that no float does, are the coordinator's to refuse.
            most = int(self._input_tokens.max()) * size
            longest = most / (bandwidth * 1e9) * 1000.0 if most < 2**62 else math.inf
        return longest < math.inf and not self.workload.has_sessions

    def _execute_led(self) -> None:
        fleet, driver, specs = self.fleet, self.driver, self.workload.specs
        closed = driver.concurrency is not None
        hints = np.ascontiguousarray(specs["dp_rank"], np.int32)
        own = self.workload.prefill_dp_ranks
        mode, size, bandwidth = self._transfer
        known = size is not None and bool(bandwidth)
        turns = []
        for pool in self.pools:
            assert isinstance(pool.placement, RoundRobin)
            turns.append((len(pool.active), pool.dp_size, pool.placement.turn))
        facts, outcomes = kernel_tables(self._source_first)
        fleet.set_leads(
            np.arange(len(specs)) if closed else np.ascontiguousarray(driver.static_order(), np.int64),
            np.zeros(len(specs)) if closed else np.ascontiguousarray(driver.static_arrivals(), np.float64),
            driver.concurrency or 0,
            facts,
            outcomes,
            turns,
            [hints if own is None else np.where(own >= 0, own, hints).astype(np.int32), hints],
            (mode != "full_prompt", size if known else -1, float(bandwidth or 0.0), self._latency_ms),
            self._routing is not None,
        )
        fleet.settle_leads()
        fleet.settle_leads()
        while True:
            status = fleet.lead(self.cap_ms, self._slice)
            if self._progress is not None:
                self._progress(int(fleet.done), len(self.workload))
            if status == _STUCK:
                if not self._release_stuck_led():
                    return
                fleet.settle_leads()
            elif status != _SLICED:
                return

    def _release_stuck_led(self) -> bool:
        """As `_release_stuck`."""
        if self.fleet.fail_stuck():
            return True
        stuck = self.fleet.stuck_lead()
        if stuck is None:
            return False
        row, state = stuck
        self._note_stalled(row, FailReason.STALLED, f"the end of {State(state).name.lower()}", self.fleet.now_ms)
        self.fleet.fail_lead(row)
        return True

    def _led_routing(self) -> npt.NDArray[Any]:
        routes = self.fleet.take_routes()
        records = np.zeros(len(routes), layout.ROUTING_RECORD)
        records["row"], records["worker"], records["dp_rank"], records["pool"] = routes.T
        records["queue_entered_ms"] = records["released_ms"] = records["cost"] = math.nan
        records["overlap_blocks"] = records["best_overlap_blocks"] = -1
        return records

    def _next_ms(self) -> float:
        """The next instant at which something happens outside the engines."""
        ready = self.driver.next_ready_ms()
        next_ms = math.inf if ready is None else ready
        if self._transfers:
            next_ms = min(next_ms, self._transfers[0][0])
        if self._waiting_room:
            next_ms = min(next_ms, self._waiting_room[0][0])
        if self.scaling is not None:
            next_ms = min(next_ms, self.scaling.next_tick_ms)
            for pool in self.pools:
                next_ms = min(next_ms, pool.workers.next_ready_ms)
        return next_ms

    def _settle(self, *, ticks: bool, starting: bool = False) -> None:
        """Everything that happens at this instant, until nothing changes.

        The engines' completions have been applied, what they showed lies in
        the fleet's notes. With `starting` the engines are in the midst of it.
        """
        now = self.fleet.now_ms
        while True:
            if not starting:
                self._take_notes(now)
                if self.scaling is not None:
                    self._workers_ready(now)
                if self._disaggregated:
                    while self._transfers and self._transfers[0][0] <= now:
                        handoff = heapq.heappop(self._transfers)[2]
                        self._follow(handoff, handoff.coordinator.fact(Fact.TRANSFER_COMPLETED))
                    self._act(now)
                # In a disaggregated run it acts last of all: the passes of this instant do not contain it.
                self._release_arrivals(now)
                self._leave_waiting_room(now)
            starting = False
            changed = self._start_passes(now)
            if self.scaling is not None:
                for pool in self.pools:
                    changed |= self._remove_drained(pool, now)
            if ticks:
                if self.telemetry is not None and self.telemetry.next_sample_ms <= now:
                    self._count_decoded()
                    self.telemetry.settle(now, self)
                if self.scaling is not None and self.scaling.next_tick_ms <= now:
                    if self._inside > 0 or not self.driver.drained:
                        changed |= self._tick(now)
                    else:
                        self.scaling.next_tick_ms = math.inf
            if self._arrived:
                self._actions.extend(self._arrived)
                self._arrived.clear()
                changed = True
            if not changed:
                return

    def _start_passes(self, now: float) -> bool:
        """Idle workers start passes until none does anything; whether one was over at once and showed something."""
        showed = self._take_notes(now)
        rounds = 0
        # Each turn of the instant gives those whose pass did nothing another try (spec/engine-contract.md section 7).
        while self.fleet.start(rounds == 0):
            showed = self._take_notes(now)
            rounds += 1
            if rounds > _MOST_AT_ONCE:
                raise PolicyError(f"the run does not leave {now} ms: {rounds} rounds of passes without duration")
        return showed

    def _take_notes(self, now: float) -> bool:
        """Deal with what the engines showed, in order; whether there was anything."""
        notes = self.fleet.take_notes()
        for note in notes:
            self._take_note(note, now)
        return bool(notes)

    # ------------------------------------------------------------ arrivals and placement

    def _release_arrivals(self, now: float) -> None:
        for row, arrival_ms in self.driver.release(now, self._inside):
            self._inside += 1
            self._arrival_ms[row] = arrival_ms
            for window in self._windows:
                window.arrived()
            if self._disaggregated:
                handoff = _Handoff(row, Coordinator(self._source_first, row, self._latency_ms))
                self._live[row] = handoff
                for number, action in handoff.coordinator.start():
                    self._arrived.append((handoff, number, action))
            else:
                self._place(self._front, self._front.requests.make(row, arrival_ms), None, now)

    def _place(self, pool: RunPool, request: PlacedRequest, work: Any, now: float) -> None:
        """Ask the placement for a rank, and go there or wait."""
        if not pool.active:
            pool.parked.append((request, work))
            return
        self._observe(pool)
        pool.placed[request.row] = (request, work)
        route = pool.placement.place(request, now)
        if route is None:
            pool.queued_ms[request.row] = now
            return
        self._dispatch(pool, request, route, now)

    def _observe(self, pool: RunPool) -> None:
        """Show the placement the KV events that have become visible."""
        if not pool.placement.wants_kv_events:
            return
        take = self.fleet.take_events
        for worker, first in pool.first_rank.items():
            for rank in range(pool.dp_size):
                seen = take(first + rank)
                if seen is not None:
                    pool.placement.observe(worker, rank, *seen)

    def _released_by(self, pool: RunPool, released: Sequence[tuple[PlacedRequest, Route]], now: float) -> list[int]:
        """Send off what a placement released from its queue; the rows."""
        for request, route in released:
            self._dispatch(pool, request, route, now)
        return [request.row for request, _ in released]

    def _dispatch(self, pool: RunPool, request: PlacedRequest, route: Route, now: float) -> None:
        row = request.row
        request, work = pool.placed[row]
        queued_ms = pool.queued_ms.pop(row, None)
        first = pool.first_rank.get(route.worker)
        if first is None or not 0 <= route.dp_rank < pool.dp_size or route.worker not in pool.active:
            raise PolicyError(
                f"placement {type(pool.placement).__name__}: request {row} was sent to worker {route.worker}, rank "
                f"{route.dp_rank}; active workers are {pool.workers.active_ids}, ranks 0 <= rank < {pool.dp_size}"
            )
        if self._routing is not None:
            self._routing.append(
                (
                    row,
                    math.nan if queued_ms is None else queued_ms,
                    math.nan if queued_ms is None else now,
                    route.cost,
                    route.overlap_tokens,
                    route.overlap_blocks,
                    route.best_overlap_blocks,
                    route.worker,
                    route.dp_rank,
                    int(pool.kind),
                    0,
                )
            )
        if self._windows and route.overlap_blocks >= 0 and pool is self._front:
            blocks = -(-request.input_tokens // pool.config.tokens_per_block)
            for window in self._windows:
                window.placed(route.overlap_blocks, blocks)
        rank = first + route.dp_rank
        if pool.tokenization is not None:
            leave = pool.tokenization.leave_ms(route.worker, now, request.input_tokens)
            self._released += 1
            heapq.heappush(self._waiting_room, (leave, self._released, row, pool, rank, work))
            pool.comes(rank, 1)
            return
        self._enter(pool, row, rank, work)

    def _leave_waiting_room(self, now: float) -> None:
        room = self._waiting_room
        while room and room[0][0] <= now:
            leave, _, row, pool, rank, work = heapq.heappop(room)
            pool.comes(rank, -1)
            self.records["tokenized_ms"][row] = leave
            self._enter(pool, row, rank, work)

    def _enter(self, pool: RunPool, row: int, rank: int, work: Any) -> None:
        """Hand a request to its rank."""
        arrival_ms = float(self._arrival_ms[row])
        length, made = self._content(pool, row)
        if work is None:
            self.fleet.submit(rank, row, arrival_ms, length, made)
            return
        handoff, number, action = work
        if action is Action.SUBMIT_PREFILL:
            handoff.prefill_rank = rank
            handoff.prefill_slot = self.fleet.submit_prefill(rank, row, arrival_ms, length, made)
            self._follow(handoff, handoff.coordinator.outcome(number, Outcome.SUBMITTED))
            return
        slot = self.fleet.reserve(rank, row, arrival_ms, length, made)
        if slot < 0:
            self._end_early(row, RequestStatus.FAILED, self.fleet.now_ms)
            self._follow(handoff, handoff.coordinator.outcome(number, Outcome.FAILED))
            return
        handoff.decode_rank, handoff.decode_slot = rank, slot
        self._follow(handoff, handoff.coordinator.outcome(number, Outcome.ACCEPTED))
        if not self.fleet.is_busy(self.fleet.worker_of(rank)):
            self._reserved(rank, pool.ranks[rank]._handoffs.retry())

    def _content(self, pool: RunPool, row: int) -> tuple[int | None, Any]:
        """Length and content of the prompt of a growing conversation; (None, None): the fleet knows them."""
        if not self._growing:
            return None, None
        spec = self.workload.specs[row]
        planned = int(spec["planned_offset"])
        count = int(spec["max_output_tokens"])
        outputs = None if planned < 0 else self.workload.planned[planned : planned + count]
        request_id = (int(spec["id_hi"]) << 64) | int(spec["id_lo"])
        parts = self.driver.prompt_parts(row)
        return self.driver.prompt_tokens(row), request_content(pool.config, parts, outputs, request_id, count)

    # ------------------------------------------------------------ what the engines showed

    def _take_note(self, note: tuple[int, int, int, int, int, int], now: float) -> None:
        kind, row, worker, status, pool_kind, value = note
        if kind == _WOKEN:
            for _, deferred in sorted(self._deferred.pop(worker, {}).items()):
                self._actions.extend(deferred)
        elif not self._disaggregated:
            pool = self._front
            if kind == _FIRST:
                self._released_by(pool, pool.first_token(row, now), now)
            else:
                self._finish(row, now)
                del pool.placed[row]
                self._released_by(pool, pool.left(row, now), now)
        else:
            self._take_half(kind, row, status, pool_kind, value, now)

    def _take_half(self, kind: int, row: int, status: int, pool_kind: int, value: int, now: float) -> None:
        handoff = self._live.get(row)
        if handoff is None:
            return
        front, back = self._front, self._back
        if kind == _HELD:
            mode, size, bandwidth = self._transfer
            timing = TransferTiming(mode, int(self._input_tokens[row]), size, bandwidth)
            self._follow(handoff, handoff.coordinator.fact(Fact.SOURCE_HELD, timing))
            self._released_by(front, front.first_token(row, now), now)
        elif kind == _RESERVED:
            self._follow(handoff, handoff.coordinator.fact(Fact.DESTINATION_RESERVED, value))
        elif kind == _FIRST:
            self._released_by(back, back.first_token(row, now), now)
        elif pool_kind == Pool.DECODE:
            handoff.decode_slot = -1
            handoff.ended = True
            self._finish(row, now)
            back.placed.pop(row, None)
            self._released_by(back, back.left(row, now), now)
            self._retire(handoff)
        else:
            # The prefill half ended without being held.
            handoff.prefill_slot = -1
            self._end_early(row, RequestStatus(status), now)
            self._follow(handoff, handoff.coordinator.fact(Fact.FAILED))

    def _finish(self, row: int, now: float) -> None:
        """A request has left the system."""
        self._inside -= 1
        record = self.records[row]
        for window in self._windows:
            window.ended(self.records[row : row + 1])
        self.driver.resolve(row, now, RequestStatus(int(record["status"])), int(record["output_tokens"]))

    def _end_early(self, row: int, status: RequestStatus, now: float) -> None:
        """A request ends before its decode half has run."""
        record = self.records[row]
        if record["status"] == RequestStatus.UNFINISHED:
            record["status"] = status
            record["terminal_ms"] = now

    # ------------------------------------------------------------ handoffs

    def _follow(self, handoff: _Handoff, actions: Iterable[tuple[int, Action]]) -> None:
        for number, action in actions:
            self._actions.append((handoff, number, action))

    def _act(self, now: float) -> None:
        """Carry out actions, first come first served."""
        queue = self._actions
        while queue:
            handoff, number, action = queue.popleft()
            if action <= Action.RESERVE_DESTINATION:
                pool = self._front if action is Action.SUBMIT_PREFILL else self._back
                arrival_ms = float(self._arrival_ms[handoff.row])
                request = pool.requests.make(handoff.row, arrival_ms, pool.kind)
                self._place(pool, request, (handoff, number, action), now)
            elif action is Action.START_TRANSFER:
                self._start_transfer(handoff, number, now)
            elif action is Action.COMPLETE:
                self._release_route(self._front, handoff.row, now)
                self._retire(handoff)
            elif action is Action.COMPLETE_CANCELED:
                self._abandon(handoff, now)
            else:
                self._command(handoff, number, action, now)

    def _start_transfer(self, handoff: _Handoff, number: int, now: float) -> None:
        coordinator = handoff.coordinator
        delay = coordinator.delay_ms
        self._follow(handoff, coordinator.outcome(number, Outcome.SCHEDULED))
        if delay > 0.0:
            heapq.heappush(self._transfers, (now + delay, handoff.row, handoff))
        else:
            self._follow(handoff, coordinator.fact(Fact.TRANSFER_COMPLETED))

    def _command(self, handoff: _Handoff, number: int, action: Action, now: float) -> None:
        """A command to the rank that has a half; deferred while its worker is in a pass."""
        source = action is Action.RELEASE_SOURCE or action is Action.CANCEL_SOURCE
        pool = self._front if source else self._back
        rank = handoff.prefill_rank if source else handoff.decode_rank
        slot = handoff.prefill_slot if source else handoff.decode_slot
        if slot < 0:
            # Still on its way to a rank, or gone already.
            self._withdraw(pool, handoff.row)
            self._follow(handoff, handoff.coordinator.outcome(number, Outcome.NOOP))
            return
        worker = self.fleet.watch(rank)
        if worker >= 0:
            self._deferred.setdefault(worker, {}).setdefault(rank, []).append((handoff, number, action))
            return
        done = pool.ranks[rank]._handoffs.apply(_COMMANDS[action], slot)
        if action is Action.ACTIVATE_DESTINATION:
            self._activated_ms[handoff.row] = now
        elif source:
            handoff.prefill_slot = -1
            if action is Action.RELEASE_SOURCE:
                self._released_ms[handoff.row] = now
        else:
            handoff.decode_slot = -1
        self.fleet.touch(rank)
        # The slots are those of live halves, so nothing is a Noop here.
        self._follow(handoff, handoff.coordinator.outcome(number, Outcome.APPLIED if done.applied else Outcome.FAILED))
        self._reserved(rank, done.reserved)

    def _reserved(self, rank: int, slot: int) -> None:
        """A command made room for the first pending destination of its rank; slot -1: it did not."""
        if slot < 0:
            return
        row, tokens = self.fleet.show_reservation(rank, slot)
        handoff = self._live[row]
        self._follow(handoff, handoff.coordinator.fact(Fact.DESTINATION_RESERVED, tokens))

    def _withdraw(self, pool: RunPool, row: int) -> None:
        """A half that no rank has: take it out of the queues in front of them."""
        now = self.fleet.now_ms
        pool.parked = deque(entry for entry in pool.parked if entry[0].row != row)
        room = [entry for entry in self._waiting_room if not (entry[2] == row and entry[3] is pool)]
        if len(room) != len(self._waiting_room):
            for entry in self._waiting_room:
                if entry[2] == row and entry[3] is pool:
                    pool.comes(entry[4], -1)
            heapq.heapify(room)
            self._waiting_room = room
        if row in pool.placed:
            if pool.queued_ms.pop(row, None) is not None:
                del pool.placed[row]
                self._released_by(pool, pool.placement.cancel(row, now), now)
            else:
                self._release_route(pool, row, now)

    def _release_route(self, pool: RunPool, row: int, now: float) -> None:
        if pool.placed.pop(row, None) is not None:
            self._released_by(pool, pool.left(row, now), now)

    def _abandon(self, handoff: _Handoff, now: float) -> None:
        """Both halves are cleaned up: the request ends."""
        if handoff.ended:
            return
        row = handoff.row
        self._end_early(row, RequestStatus.CANCELLED, now)
        handoff.ended = True
        self._withdraw(self._front, row)
        self._withdraw(self._back, row)
        self._finish(row, now)
        self._retire(handoff)

    def _retire(self, handoff: _Handoff) -> None:
        if handoff.ended and handoff.coordinator.ended and handoff.row in self._live:
            del self._live[handoff.row]
            self.fleet.forget_halves(handoff.row)

    # ------------------------------------------------------------ workers

    def _workers_ready(self, now: float) -> None:
        for pool in self.pools:
            for worker in pool.workers.due(now):
                operation = pool.workers.mark_worker_ready(worker, now)
                if operation is None:
                    continue
                pool.add(worker)
                pool.active = frozenset(pool.workers.active_ids)
                rows = self._released_by(pool, pool.placement.worker_ready(worker, now), now)
                rows += self._topology_settled(pool, now)
                operation["topology_released_rows"] = rows

    def _topology_settled(self, pool: RunPool, now: float) -> list[int]:
        """A batch of changes is over: the placement may go on, and so may requests that found no worker."""
        rows = self._released_by(pool, pool.placement.topology_settled(now), now)
        if pool.parked and pool.active:
            parked, pool.parked = pool.parked, deque()
            for request, work in parked:
                self._place(pool, request, work, now)
        return rows

    def _remove_drained(self, pool: RunPool, now: float) -> bool:
        """Remove workers that have nothing left to do; whether the placement released requests thereupon."""
        if not pool.workers.draining_ids:
            return False
        removed, operations = pool.workers.settle(now, drained=pool.is_drained)
        if not removed:
            return False
        rows: list[int] = []
        for worker in removed:
            pool.remove(worker)
            rows += self._released_by(pool, pool.placement.worker_removed(worker, now), now)
        rows += self._topology_settled(pool, now)
        operations[-1]["topology_released_rows"] = rows
        return bool(rows)

    def _tick(self, now: float) -> bool:
        """Ask the scaling policy; whether it changed anything."""
        assert self.scaling is not None
        self._count_decoded()
        ordinal = len(self.scaling.history)
        self._fpm = self.fleet.take_fpm()
        targets = self.scaling.tick(now, self)
        changed = False
        for pool in self.pools:
            target = targets.prefill if pool.kind is Pool.PREFILL else targets.decode
            if target is not None:
                changed |= self._scale(pool, target, now, ordinal)
        return changed

    def _scale(self, pool: RunPool, target: int, now: float, tick: int | None) -> bool:
        change = pool.workers.apply_target_count(target, now, drained=pool.is_drained, tick=tick)
        if change.operation is None:
            return False
        rows: list[int] = []
        placement = pool.placement
        pool.active = frozenset(pool.workers.active_ids)
        for worker in change.added:
            if worker in pool.active:
                pool.add(worker)
                rows += self._released_by(pool, placement.worker_ready(worker, now), now)
        for worker in change.newly_marked:
            rows += self._released_by(pool, placement.worker_draining(worker, now), now)
        for worker in change.removed:
            pool.remove(worker)
            rows += self._released_by(pool, placement.worker_removed(worker, now), now)
        rows += self._topology_settled(pool, now)
        change.operation["topology_released_rows"] = rows
        return True

    def _count_decoded(self) -> None:
        """Tell the traffic windows what was emitted since the last look."""
        fleet, seen = self.fleet, self._decoded
        now = [int(fleet.accepted_tokens), int(fleet.decode_forwards)]
        if now != seen:
            for window in self._windows:
                window.decoded(now[0] - seen[0], now[1] - seen[1])
        self._decoded = now

    # ------------------------------------------------------------ when nothing can happen any more

    def _release_stuck(self) -> bool:
        """Give up what nothing can reach: a head that its policy never admits, then whatever waits for ever."""
        if self.fleet.fail_stuck():
            return True
        now = self.fleet.now_ms
        given_up = False
        for pool in self.pools:
            parked, pool.parked = pool.parked, deque()
            for request, work in parked:
                self._give_up(request.row, work, FailReason.NO_WORKER, "an active worker", now)
                given_up = True
        if given_up:
            return True
        for pool in self.pools:
            kept = sorted(pool.queued_ms)
            for left, row in zip(range(len(kept) - 1, -1, -1), kept, strict=True):
                work = pool.placed[row][1]
                self._withdraw(pool, row)
                self._give_up(row, work, FailReason.STALLED, f"the placement of the {pool.kind.name.lower()} pool", now)
                given_up = True
                if len(pool.queued_ms) != left:
                    # Its cancellation let others go: they may free the rest.
                    return True
        if given_up:
            return True
        for row in sorted(self._live):
            handoff = self._live[row]
            if not handoff.coordinator.ended and self.records["status"][row] == RequestStatus.UNFINISHED:
                state = handoff.coordinator.state.name.lower()
                self._give_up(row, (handoff, 0, None), FailReason.STALLED, f"the end of {state}", now)
                return True
        return False

    def _note_stalled(self, row: int, reason: FailReason, waits_for: str, now: float) -> None:
        """A request fails because it would wait for ever."""
        record = self.records[row]
        record["reason"] = reason
        request_id = (int(record["id_hi"]) << 64) | int(record["id_lo"])
        self.stalled.append({"row": row, "request_id": request_id, "waits_for": waits_for, "at_ms": now})
        self._end_early(row, RequestStatus.FAILED, now)

    def _give_up(self, row: int, work: Any, reason: FailReason, waits_for: str, now: float) -> None:
        self._note_stalled(row, reason, waits_for, now)
        if work is None:
            self._finish(row, now)
        else:
            handoff = work[0]
            self._follow(handoff, handoff.coordinator.fact(Fact.FAILED))
