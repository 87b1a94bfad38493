"""Twin of the vLLM / TensorRT-LLM scheduler rank: plain lists, no cleverness.

Written from spec/vllm.md, spec/kv-cache.md, spec/handoff.md and
spec/host-offload.md and from no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsim.config import EngineConfig
from kvsim.contract import (
    Admission,
    Command,
    CommandContext,
    CommandEffects,
    ForwardPassMetrics,
    InternalEffects,
    KvEvent,
    Metrics,
    Output,
    PassCompletionEffects,
    PassStartEffects,
    PendingPass,
    PressureEvent,
    PressureState,
    RankIdentity,
    RankPass,
    Removed,
    Request,
    SameTimestampRetry,
    Stored,
    StoredBlock,
    id_to_int,
)
from kvsim.errors import CommandError
from model.handoff import HandoffRank, Handoffs
from model.hashing import ChaCha12, chain, lineage_hash, local_hash, synthetic_token
from model.host import LOAD, STORE, HostTier, Transfer
from model.pool import Block, BlockPool, Reservation
from model.tiers import Lower, Offload, SwapIn, Tiers
from model.timing import Timing
from model.welford import Welford

MASK64 = 2**64 - 1

WAITING, RUNNING, PREEMPTED = "waiting", "running", "preempted"


class Blocked(Exception):  # noqa: N818
    """An allocation has to wait for what it pushed out."""

    def __init__(self, offload: Offload) -> None:
        super().__init__(offload.id)
        self.offload = offload


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class Entry:
    """One block of a request's known sequence."""

    block_hash: int | None = None
    tokens_hash: int | None = None
    block: Block | None = None
    pending_cache: bool = False


@dataclass(eq=False)
class Load:
    """Blocks of a prompt that come back from host memory."""

    transfer_id: int
    reservation: Reservation
    #: leading blocks that were on the device when the load was decided
    base: int
    #: leading blocks that will be there when it is done
    blocks: int
    done: bool = False


@dataclass(eq=False)
class Parked:
    """A request whose blocks come back from a lower tier; the request is None once it was cancelled."""

    request: Live | None
    swap: SwapIn
    reservation: Reservation
    #: leading blocks that were in the pool when it began
    base: int


@dataclass(eq=False)
class Live:
    """A request and its lease."""

    request_id: int
    tokens: list[int]
    num_input: int
    max_output: int
    planned: list[int] | None
    entries: list[Entry]
    #: ordinal of its arrival, at submission or when its reservation was accepted
    order: int = 0
    generated: int = 0
    allocated: int = 0
    computed: int = 0
    status: str = WAITING
    preemptions: int = 0
    #: cached tokens found at the first admission, until the first output signal told them
    cached_prefix: int | None = None
    admitted_before: bool = False
    signalled: bool = False
    #: draft tokens that the last emission left behind
    drafts: int = 0
    #: alone in an empty pool it could not take its next step
    outgrown: bool = False
    #: blocks that must be there before it is admitted again, beyond those of what it knows
    wants_blocks: int = 0
    #: leading prompt blocks that need no store any more
    next_store_block: int = 0
    latest_store: int | None = None
    load: Load | None = None
    #: sleeps in the connector queue until a transfer makes progress
    asleep: bool = False
    #: an allocation for it had to push blocks out, which is not over
    dependency: Offload | None = None
    #: leading blocks in the pool when its first swap-in began
    swap_base: int | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass
class Cost:
    """What the prefix cache offers a request."""

    cached_tokens: int
    active_cached_tokens: int


@dataclass
class Work:
    """What one request does in one pass."""

    total_tokens: int
    prompt_tokens: int
    prefix_tokens: int
    prompt_length: int
    length: int
    was_complete: bool
    in_prefill_batch: bool
    drafts: int = 0


@dataclass
class PassState:
    """The pass that is being formed."""

    now_ms: float
    budget: float
    scheduled: dict[int, Work] = field(default_factory=dict)
    prefill_count: int = 0
    prefill_isl: int = 0
    prefill_prefix: int = 0
    preempted_any: bool = False
    admissions: list[Admission] = field(default_factory=list)
    pressure: list[PressureEvent] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    #: time that the pass takes as far as it is known
    duration_ms: float = 0.0
    #: requests that went to sleep until a transfer makes progress
    deferrals: int = 0


class PagedModel(HandoffRank):
    """One rank; the methods are those of kvsim.SchedulerRank."""

    def __init__(
        self, identity: RankIdentity, config: EngineConfig, timing: Any = None, lower: Lower | None = None
    ) -> None:
        assert config.backend in ("vllm", "trtllm")
        self.identity = identity
        self.config = config
        self.rules = config.rules
        self.trtllm = config.backend == "trtllm"
        self.block_size = config.tokens_per_block
        self.caching = config.enable_prefix_caching
        self.emits_events = config.emit_kv_events and self.caching
        self.timing = Timing(config, timing)
        self.drafter = ChaCha12((config.aic_mtp_seed + identity.seed_offset) & MASK64)
        #: speculation bursts in every pass and drafts cost no budget
        self.always_draft = self.rules.always_draft or self.trtllm
        limited = not self.trtllm or self.rules.model_len_limits_trtllm
        self.max_model_len = config.max_model_len if limited else None
        self.pool = BlockPool(config.num_gpu_blocks)
        self.requests: dict[int, Live] = {}
        self.running: list[Live] = []
        self.waiting: list[Live] = []
        self.host = None if config.native_host_offload is None else HostTier(config)
        #: requests that wait for host memory
        self.connector: list[Live] = []
        #: slot -> store that still reads what it held
        self.readers: dict[int, int] = {}
        #: what each unfinished store brings: (index in the prompt, block as announced, parent's hash)
        self.store_blocks: dict[int, list[tuple[int, StoredBlock, int | None]]] = {}
        #: tiers that take what is evicted
        self.tiers = None
        if config.tiers_attached:
            self.tiers = Tiers(config, self.pool.free_quarantined, self._announce_host, lower)
        #: requests whose blocks come back, in the order in which they began
        self.parked: list[Parked] = []
        #: block hash -> (block as announced, parent's hash), of every block that was ever findable
        self.known: dict[int, tuple[StoredBlock, int | None]] = {} if lower is None else lower.known
        #: time of the pass, the command or the tick that is under way
        self.now_ms = 0.0
        #: no pass computes before this
        self.compute_not_before = 0.0
        self.preemptions_total = 0
        self.next_event_id = 0
        self.event_buffer: list[KvEvent] = []
        self.last_pass_effect_free = False
        self.handoffs = Handoffs()
        #: circumstances of the command that is being applied
        self.command: CommandContext | None = None
        #: what happened to handoffs in the pass that is being formed
        self.lifecycle: list[Any] = []
        #: requests built so far: the order of their arrival
        self.next_order = 0

    # ------------------------------------------------------------ commands

    def _build(self, request: Request) -> Live:
        request_id = id_to_int(request.request_id)
        tokens = prompt_tokens(request)
        if not tokens:
            raise CommandError("tokens: at least one is needed, got none")
        planned = None if request.output_token_ids is None else [int(token) for token in request.output_token_ids]
        max_output = request.max_output_tokens if planned is None else len(planned)
        if self.trtllm:
            max_output = self._clamp(len(tokens), max_output)
        hashes = chain(tokens, self.block_size) if self.caching else []
        entries = [Entry(block_hash, tokens_hash) for block_hash, tokens_hash in hashes]
        while len(entries) < ceil_div(len(tokens), self.block_size):
            entries.append(Entry())
        self.next_order += 1
        return Live(request_id, tokens, len(tokens), max_output, planned, entries, self.next_order)

    def _enqueue(self, request: Live) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def _clamp(self, num_input: int, max_output: int) -> int:
        """TensorRT-LLM promises capacity to completion, so it cuts the output to what can exist."""
        capacity = self.config.num_gpu_blocks * self.block_size
        if num_input < capacity:
            max_output = min(max_output, capacity - num_input)
        if self.max_model_len is not None and num_input < self.max_model_len:
            max_output = min(max_output, self.max_model_len - num_input)
        return max_output

    def _drop(self, request: Live) -> bool:
        """Cancellation or rejection: the request leaves; whether a pending destination may fit better now."""
        active = self.pool.active_blocks
        improved = request in self.running or request.allocated > 0
        self._cancel_load(request)
        self._leave(request)
        self._release(request)
        return improved or self.pool.active_blocks < active

    def _finish(self, request: Live) -> None:
        """Completion: the request leaves, and its blocks unless they are the source of a handoff."""
        held = self._hold_source(request)
        self._leave(request)
        self.handoffs.generation += 1
        if held is None:
            self._release(request)
        else:
            self.lifecycle.append(held)

    def _leave(self, request: Live) -> None:
        """Out of the queues and of everything that knows live requests."""
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.connector:
            self.connector.remove(request)
        for parked in self.parked:
            if parked.request is request:
                parked.request = None
                parked.swap.cancelled = True
        del self.requests[request.request_id]
        self.handoffs.forget(request.request_id)

    # ------------------------------------------------------------ handoff (vllm.md section 10, kv-cache.md section 7)

    def _check_destination(self, request: Live) -> None:
        if self.trtllm and not self.rules.trtllm_destinations:
            raise CommandError("destination reservation is not supported for TRT-LLM")
        if self.max_model_len is not None and request.num_input >= self.max_model_len:
            raise CommandError(f"destination prompt of {request.num_input} tokens: max_model_len {self.max_model_len}")
        if self._blocks(request.num_input) > self.config.num_gpu_blocks:
            raise CommandError("destination prompt exceeds the KV pool capacity")
        if self.trtllm and self._completion_blocks(request) > self.config.num_gpu_blocks:
            raise CommandError("TRT-LLM destination request exceeds the to-completion KV pool capacity")

    def _clean_up_source(self, request: Live) -> None:
        self._release(request)

    def _has_slot_for_destination(self) -> bool:
        return self.config.max_num_seqs is None or len(self.running) < self.config.max_num_seqs

    def _reserve_destination(self, request: Live) -> tuple[Reservation, int] | None:
        """The longest prefix that is resident and fresh slots for the rest of the prompt."""
        prefix: list[int | None] = []
        if self.trtllm:
            if self._completion_blocks(request) > self._unpromised_blocks():
                return None
        else:
            for entry in request.entries:
                if entry.block_hash is None or self.pool.primary(entry.block_hash) is None:
                    break
                prefix.append(entry.block_hash)
        fresh = len(request.entries) - len(prefix)
        reservation = self._reserve(prefix, fresh)
        return None if reservation is None else (reservation, fresh * self.block_size)

    def _activate(self, request: Live, reservation: Reservation) -> bool:
        """Reserved capacity becomes blocks, whole ones findable at once; the request queues where it belongs."""
        active = self.pool.active_blocks
        for position, entry in enumerate(request.entries):
            fresh = not reservation.prefix
            entry.block = self.pool.take_fresh(reservation) if fresh else self.pool.take_prefix(reservation)
            entry.pending_cache = self.caching and fresh and entry.block_hash is not None
            assert fresh or position * self.block_size < request.num_input
        assert reservation.fresh == 0
        request.allocated = request.num_input
        request.computed = request.num_input
        self._finalize(request, 0, request.num_input)
        position = len(self.waiting)
        if self.rules.activation_keeps_arrival_order:
            later = [index for index, other in enumerate(self.waiting) if other.order > request.order]
            position = later[0] if later else position
        self.waiting.insert(position, request)
        return self.pool.active_blocks < active

    def _cancel_reservation(self, request: Live, reservation: Reservation) -> None:
        self.pool.cancel(reservation)

    def _is_materialised(self, request: Live) -> bool:
        """An activated destination that has not run yet: its whole prompt is there."""
        return request.computed >= request.num_input and request.allocated >= request.num_input

    def _destinations_hold_blocks(self) -> bool:
        return bool(self.handoffs.reserved) or any(self._is_materialised(other) for other in self.waiting)

    def _unpromised_blocks(self) -> int:
        """TensorRT-LLM: blocks that nobody holds or was promised to completion."""
        available = self.config.num_gpu_blocks - self.pool.active_blocks
        for other in self.running:
            available -= self._completion_blocks(other) - self._blocks(other.allocated)
        for other in self.waiting:
            if self._is_materialised(other):
                available -= self._completion_blocks(other) - self._blocks(other.num_input)
        for entry in self.handoffs.reserved.values():
            available -= self._completion_blocks(entry.request) - self._blocks(entry.request.num_input)
        return available

    def _shown(self, mark: Any, *, show: bool) -> list[KvEvent]:
        return self._drain_events() if show else []

    # ------------------------------------------------------------ lease (kv-cache.md section 4)

    def _allocate(self, request: Live, cumulative: int, reusable_blocks: int) -> bool:
        size = self.block_size
        previous = min(ceil_div(request.allocated, size), len(request.entries))
        target = min(ceil_div(cumulative, size), len(request.entries))
        if target <= previous:
            request.allocated = max(request.allocated, cumulative)
            return True
        reused = max(0, reusable_blocks - previous)
        assert reused <= target - previous
        assert self.caching or reused == 0
        prefix = [entry.block_hash for entry in request.entries[previous : previous + reused]]
        reservation = self._reserve(prefix, target - previous - reused)
        if reservation is None:
            return False
        self._fence(reservation.slots)
        for position in range(previous, target):
            entry = request.entries[position]
            assert entry.block is None
            if position < previous + reused:
                entry.block = self.pool.take_prefix(reservation)
                entry.pending_cache = False
            else:
                entry.block = self.pool.take_fresh(reservation)
                entry.pending_cache = self.caching and entry.block_hash is not None
        request.allocated = cumulative
        return True

    def _reserve(self, prefix: Sequence[int | None], fresh: int) -> Reservation | None:
        """Reserve and announce what was evicted for it; Blocked if it has to wait for that."""
        if self.tiers is not None:
            self._push_out(prefix, fresh)
        outcome = self.pool.reserve([block_hash for block_hash in prefix if block_hash is not None], fresh)
        if outcome is None:
            return None
        reservation, removed = outcome
        if removed:
            self._emit(Removed(tuple(removed)))
        return reservation

    def _finalize(self, request: Live, before: int, after: int) -> None:
        """Blocks whose last token is computed become findable; runs of new ones are one event."""
        size = self.block_size
        group: list[int] = []
        for position in range(before // size, after // size):
            entry = request.entries[position]
            if self.caching and entry.block_hash is None:
                parent = request.entries[position - 1].block_hash if position else None
                entry.tokens_hash = local_hash(request.tokens[position * size : (position + 1) * size])
                entry.block_hash = lineage_hash(parent, entry.tokens_hash)
                entry.pending_cache = True
            became_visible = False
            if entry.pending_cache:
                assert entry.block is not None
                assert entry.block_hash is not None
                entry.pending_cache = False
                became_visible = self.pool.publish(entry.block, entry.block_hash)
                parent = request.entries[position - 1].block_hash if position else None
                self.known[entry.block_hash] = (self._as_announced(request, position), parent)
            if became_visible:
                group.append(position)
            else:
                self._announce(request, group)
                group = []
        self._announce(request, group)

    def _announce(self, request: Live, positions: list[int]) -> None:
        if not positions:
            return
        blocks = [self._as_announced(request, position) for position in positions]
        parent = request.entries[positions[0] - 1].block_hash if positions[0] else None
        self._emit(Stored(parent, tuple(blocks)))

    def _as_announced(self, request: Live, position: int) -> StoredBlock:
        size = self.block_size
        entry = request.entries[position]
        assert entry.block_hash is not None
        assert entry.tokens_hash is not None
        ids = tuple(request.tokens[position * size : (position + 1) * size])
        return StoredBlock(entry.block_hash, entry.tokens_hash, ids if self.config.emit_kv_token_ids else None)

    def _emit(self, data: Stored | Removed, tier: str = "device") -> None:
        if not self.emits_events:
            return
        identity = self.identity
        self.event_buffer.append(KvEvent(self.next_event_id, identity.worker_id, identity.dp_rank, data, tier))
        self.next_event_id += 1

    def _drain_events(self) -> list[KvEvent]:
        events, self.event_buffer = self.event_buffer, []
        return events

    def _release(self, request: Live) -> None:
        for entry in reversed(request.entries):
            if entry.block is not None:
                self.pool.release(entry.block)
                entry.block = None
                entry.pending_cache = False
        request.allocated = 0

    # ------------------------------------------------------------ derived numbers

    def _remaining(self, request: Live) -> int:
        remaining = max(0, request.max_output - request.generated)
        if self.max_model_len is not None:
            remaining = min(remaining, max(0, self.max_model_len - request.length))
        return remaining

    def _blocks(self, tokens: int) -> int:
        return ceil_div(tokens, self.block_size)

    def _completion_blocks(self, request: Live) -> int:
        return self._blocks(request.num_input + request.max_output)

    def _prefix_cost(self, request: Live) -> Cost:
        """kv-cache.md section 5, with the recompute adjustment."""
        size = self.block_size
        overlap = active = 0
        if request.load is not None and request.load.done:
            # What it found when it began to load: more may have become visible, but it owns only this.
            overlap = active = request.load.blocks
        else:
            for entry in request.entries:
                block = None if entry.block_hash is None else self.pool.primary(entry.block_hash)
                if block is None:
                    break
                overlap += 1
                active += block.used
        cached = min(overlap * size, request.length)
        active_cached = min(active * size, request.length)
        if not self.trtllm and self._remaining(request) > 0:
            if self.rules.recompute_last_token:
                cached = min(cached, (request.length - 1) // size * size)
            if self.config.aic_nextn is not None and cached >= size:
                cached -= size
            active_cached = min(active_cached, cached)
        return Cost(cached, active_cached)

    # ------------------------------------------------------------ the pass

    def execute_pass(self, now_ms: float) -> RankPass:
        before = self.metrics()
        self.now_ms = now_ms
        self._tick(now_ms)
        budget = self.config.max_num_batched_tokens
        work = PassState(now_ms, math.inf if budget is None else budget)
        self._schedule_running(work)
        self._schedule_waiting(work)
        if self.host is not None:
            self._prepare_stores(work)

        prefill_ms = self.timing.prefill_ms(work.prefill_count, work.prefill_isl, work.prefill_prefix)
        work.duration_ms = prefill_ms
        decode_start = max(now_ms, self.compute_not_before) + prefill_ms
        outputs, decode_ms = self._emission(work)
        outputs += [Output(request_id, None, True, True, None) for request_id in work.rejected]
        end_ms = decode_start + decode_ms
        deadline = None if self.tiers is None else self.tiers.next_deadline()
        if end_ms <= now_ms and deadline is not None:
            # Nothing else can happen before a transfer ends.
            end_ms = max(deadline, now_ms)

        events = self._drain_events()
        lifecycle, self.lifecycle = self.lifecycle, []
        signals = [output.request_id for output in outputs if not output.rejected]
        metrics = self.metrics()
        self.last_pass_effect_free = (
            end_ms <= now_ms
            and not (outputs or events or work.admissions or work.pressure or work.deferrals)
            and not any(item.total_tokens for item in work.scheduled.values())
            and metrics == before
        )
        at_start = self.rules.kv_events_at_pass_start
        effects = PassCompletionEffects(
            outputs=outputs,
            lifecycle_events=lifecycle,
            kv_events=[] if at_start else events,
            metrics=metrics,
            forward_pass_metrics=self._forward_pass_metrics(work, max(0.0, end_ms - now_ms)),
            decode_acceptance=(len(signals), len(set(signals))),
        )
        return RankPass(
            end_ms=end_ms,
            same_timestamp_retry=SameTimestampRetry.NOT_APPLICABLE,
            start_effects=PassStartEffects(work.admissions, work.pressure, events if at_start else []),
            pending=PendingPass(now_ms, effects),
        )

    def _schedule_running(self, work: PassState) -> None:
        index = 0
        while index < len(self.running) and work.budget > 0:
            if self._is_dependent(self.running[index]):
                index += 1
                continue
            outcome = self._schedule(self.running[index], work, None)
            if outcome == "blocked":
                break
            if outcome in ("scheduled", "dependent"):
                index += 1

    def _schedule_waiting(self, work: PassState) -> None:
        limit = self.config.max_num_seqs
        while not work.preempted_any and (limit is None or len(self.running) < limit):
            if self.host is not None and work.budget <= 0:
                break
            # A pending destination owns the next free capacity: nothing that still needs some passes it.
            candidates = [
                request
                for request in (*(other for other in self.connector if not other.asleep), *self.waiting)
                if not self.handoffs.pending or self._is_materialised(request)
            ]
            if not candidates:
                break
            request = candidates[0]
            if self._is_dependent(request):
                break
            if self.max_model_len is not None and request.num_input >= self.max_model_len:
                self._reject(request, work)
                continue
            cost = self._prefix_cost(request)
            if self.host is not None and not self._is_materialised(request):
                found = self._look_up(request)
                if found == "deferred":
                    self._defer(request, work)
                    continue
                if found != "miss":
                    verdict = self._begin_load(request, found, cost, work)
                    if verdict == "reject":
                        self._reject(request, work)
                    if verdict == "wait":
                        break
                    continue
            verdict = "admit" if self._is_materialised(request) else self._gate(request, cost)
            if verdict == "reject":
                self._reject(request, work)
                continue
            if verdict == "admit" and self.tiers is not None and request.status == WAITING:
                found = "miss" if self._is_materialised(request) else self._begin_swap_in(request, work)
                if found == "parked":
                    continue
                if found == "dependent":
                    break
            if verdict == "wait" or self._schedule(request, work, cost) != "scheduled":
                break
            if work.budget == 0 and work.scheduled[request.request_id].total_tokens == 0:
                break

    def _reject(self, request: Live, work: PassState) -> None:
        self.handoffs.generation += self._drop(request)
        work.rejected.append(request.request_id)

    def _gate(self, request: Live, cost: Cost, headroom: int = 0) -> str:
        """Full-sequence admission (vllm.md sections 5 and 11): "admit", "wait" or "reject"."""
        if request.outgrown:
            return "wait"
        capacity = self.config.num_gpu_blocks
        footprint = self._completion_blocks(request) if self.trtllm else self._blocks(request.length)
        footprint = max(footprint, request.wants_blocks)
        if request.status == WAITING and footprint > capacity:
            return "reject"
        needed = footprint - max(cost.active_cached_tokens // self.block_size, self._blocks(request.allocated))
        available = self._unpromised_blocks() if self.trtllm else capacity - self.pool.active_blocks
        return "admit" if needed <= available - headroom else "wait"

    def _schedule(self, request: Live, work: PassState, cost: Cost | None) -> str:
        """vllm.md section 6: "scheduled", "blocked", "dependent" or "current preempted".

        A cost marks a waiting request.
        """
        from_waiting = cost is not None
        cached = 0
        if request.computed == 0:
            cached = (cost or self._prefix_cost(request)).cached_tokens
        before = request.computed + cached
        prompt_before = min(before, request.num_input)
        remaining = request.length - before
        if not self.config.enable_chunked_prefill and request.num_input - prompt_before > work.budget:
            return "blocked"
        want = int(min(remaining, work.budget))
        if want == 0 and remaining > 0:
            return "blocked"
        after = before + want
        try:
            while not self._allocate(request, after, cached // self.block_size):
                victim = self._victim()
                if victim is None:
                    after = before
                    break
                work.preempted_any = True
                self._undo(victim, work)
                self._preempt(victim, work)
                if victim is request:
                    return "current preempted"
            else:
                request.computed = after
        except Blocked as blocked:
            self._depend(request, blocked.offload, work)
            return "dependent"
        if after == before and request.computed < request.length:
            return "blocked"
        self._finalize(request, before, after)

        item = Work(
            total_tokens=after - before,
            prompt_tokens=min(after, request.num_input) - prompt_before,
            prefix_tokens=prompt_before,
            prompt_length=request.num_input,
            length=request.length,
            was_complete=self._remaining(request) == 0,
            in_prefill_batch=False,
        )
        if item.prompt_tokens > 0 and self.config.worker_type != "decode":
            item.in_prefill_batch = True
            work.prefill_count += 1
            work.prefill_isl += prompt_before + item.prompt_tokens
            work.prefill_prefix += prompt_before
        work.budget -= item.total_tokens
        work.scheduled[request.request_id] = item
        if after == request.length and not self.always_draft:
            self._schedule_drafts(request, item, work)
        if from_waiting:
            (self.waiting if request in self.waiting else self.connector).remove(request)
            self.running.append(request)
            request.status = RUNNING
            request.wants_blocks = 0
            work.admissions.append(Admission(request.request_id, cached, self._attribution(request, cached)))
            request.load = None
            if not request.admitted_before:
                request.admitted_before = True
                request.cached_prefix = cached
        return "scheduled"

    def _schedule_drafts(self, request: Live, item: Work, work: PassState) -> None:
        drafts = int(min(request.drafts, work.budget))
        if self.max_model_len is not None:
            drafts = min(drafts, max(0, self.max_model_len - 1 - request.length))
        item.drafts = drafts
        work.budget -= drafts

    # ------------------------------------------------------------ preemption

    def _victim(self) -> Live | None:
        candidates = [request for request in self.running if not self._is_dependent(request)]
        if self.trtllm or not candidates:
            return None
        return candidates[-1] if self.config.preemption_mode == "lifo" else candidates[0]

    def _undo(self, request: Live, work: PassState) -> None:
        """Take back what this pass had given to a victim."""
        item = work.scheduled.pop(request.request_id, None)
        if item is None:
            return
        work.budget += item.total_tokens + item.drafts
        if item.in_prefill_batch:
            work.prefill_count -= 1
            work.prefill_isl -= item.prefix_tokens + item.prompt_tokens
            work.prefill_prefix -= item.prefix_tokens

    def _preempt(self, request: Live, work: PassState) -> None:
        before = self._occupancy()
        held = self._blocks(request.allocated)
        if self.host is not None and request.latest_store is not None:
            self._fence_store(request.latest_store)
        self._release(request)
        request.computed = 0
        request.drafts = 0
        request.preemptions += 1
        request.status = PREEMPTED
        self.preemptions_total += 1
        self.handoffs.generation += 1
        self.running.remove(request)
        self.waiting.insert(0, request)
        work.pressure.append(
            PressureEvent(
                work.now_ms, "vllm_preemption", request.request_id, before, self._occupancy(), held, None, None
            )
        )

    def _occupancy(self) -> PressureState:
        return PressureState(len(self.running), len(self.waiting), self.pool.active_blocks)

    def _preempt_at_emission(self, work: PassState) -> Live | None:
        """Preempt somebody because a sampled token finds no block; None if nobody can be.

        The work of this pass stays counted. A request that was alone with the
        whole pool at its disposal has outgrown it if its first emission after a
        readmission, which has no drafts left by another, would not fit either.
        """
        victim = self._victim()
        if victim is None:
            return None
        self._preempt(victim, work)
        if not self.running:
            next_length = victim.length + min(self._max_burst(None), self._remaining(victim))
            needed = self._blocks(next_length)
            if self.pool.active_blocks == 0:
                victim.outgrown = needed > self.config.num_gpu_blocks
            elif work.duration_ms == 0.0 or self._destinations_hold_blocks():
                # Handoffs hold the rest, and either no time passes in which they could let go of it, or what
                # lets go of it is a request further back that has to run.
                victim.wants_blocks = needed
        return victim

    # ------------------------------------------------------------ emission (vllm.md section 7)

    def _emission(self, work: PassState) -> tuple[list[Output], float]:
        candidates = [
            request
            for request in self.running
            if request.computed == request.length and not self._is_dependent(request)
        ]
        outputs = []
        for request in candidates:
            if self._remaining(request) == 0:
                outputs.append(self._signal(request, None))
        ready = [request for request in candidates if request.request_id in self.requests]
        if not ready:
            return outputs, 0.0
        if self.config.aic_nextn is not None:
            more, decode_ms = self._emit_bursts(ready, work)
        else:
            more, decode_ms = self._emit_single(ready, work)
        return outputs + more, decode_ms

    def _decode_ms(self, ready: list[Live], work: PassState) -> float:
        if self.config.worker_type == "prefill":
            return 0.0
        decoding = [request for request in ready if self._is_decoding(request, work)]
        return self.timing.decode_ms([request.length for request in decoding], self.pool.active_blocks)

    def _is_decoding(self, request: Live, work: PassState) -> bool:
        """Whether the token of this request is made by the decode part of the pass."""
        if self.rules.first_token_is_decode or self.config.worker_type == "decode":
            return True
        if self.config.aic_nextn is not None and self.always_draft:
            return True
        item = work.scheduled.get(request.request_id)
        return request.generated > 0 or item is None or item.prompt_tokens == 0

    def _emit_single(self, ready: list[Live], work: PassState) -> tuple[list[Output], float]:
        decode_ms = self._decode_ms(ready, work)
        work.duration_ms += decode_ms
        outputs = []
        for request in ready:
            if request.status != RUNNING:
                continue
            if self.rules.eager_sample_blocks and not self._grow_eagerly(request, work):
                continue
            outputs.append(self._generate(request))
        return outputs, decode_ms

    def _grow_eagerly(self, request: Live, work: PassState) -> bool:
        """Take the block of the token that is about to be sampled, preempting for it; False if it cannot be had."""
        if request.length % self.block_size == 0:
            try:
                while (reservation := self._reserve([], 1)) is None:
                    victim = self._preempt_at_emission(work)
                    if victim is None or victim is request:
                        return False
            except Blocked as blocked:
                self._depend(request, blocked.offload, work)
                return False
            request.entries.append(Entry(block=self.pool.take_fresh(reservation)))
        request.allocated = request.length + 1
        return True

    def _max_burst(self, item: Work | None) -> int:
        """Most tokens of one emission of a request with this work."""
        if self.config.worker_type == "prefill" or self.config.aic_nextn is None:
            return 1
        if self.always_draft:
            return 1 + self.config.aic_nextn
        return 1 + (item.drafts if item is not None else 0)

    def _emit_bursts(self, ready: list[Live], work: PassState) -> tuple[list[Output], float]:
        reservation = None
        while reservation is None:
            fresh = 0
            for request in ready:
                burst = min(self._max_burst(work.scheduled.get(request.request_id)), self._remaining(request))
                fresh += self._blocks(request.length + burst) - self._blocks(request.length)
            try:
                reservation = self._reserve([], fresh)
            except Blocked as blocked:
                for request in ready:
                    self._depend(request, blocked.offload, work)
                return [], 0.0
            if reservation is None:
                if self._preempt_at_emission(work) is None:
                    return [], 0.0
                ready = [request for request in ready if request.status == RUNNING]
                if not ready:
                    return [], 0.0
        decode_ms = self._decode_ms(ready, work)
        bursts = [self._sample_burst(request, work.scheduled.get(request.request_id)) for request in ready]
        outputs = []
        for request, burst in zip(ready, bursts, strict=True):
            for _ in range(burst):
                self._finalize(request, request.computed, request.length)
                request.computed = request.length
                if request.length % self.block_size == 0:
                    request.entries.append(Entry(block=self.pool.take_fresh(reservation)))
                request.allocated = request.length + 1
                outputs.append(self._generate(request))
                if outputs[-1].completed:
                    break
            else:
                request.drafts = 0 if self.config.worker_type == "prefill" else self.config.aic_nextn or 0
        self.pool.cancel(reservation)
        return outputs, decode_ms

    def _sample_burst(self, request: Live, item: Work | None) -> int:
        accepted = 1
        for rate in self.config.accept_rates[: self._max_burst(item) - 1]:
            if not self.drafter.accept(rate):
                break
            accepted += 1
        return min(accepted, self._remaining(request))

    def _generate(self, request: Live) -> Output:
        """Append one token; its signal. A completed request leaves."""
        ordinal = request.generated
        if request.planned is not None and ordinal < len(request.planned):
            token = request.planned[ordinal]
        else:
            token = synthetic_token(request.request_id, ordinal)
        if request.length % self.block_size == 0 and len(request.entries) * self.block_size == request.length:
            request.entries.append(Entry())
        request.tokens.append(token)
        request.generated += 1
        return self._signal(request, token)

    def _signal(self, request: Live, token: int | None) -> Output:
        completed = self._remaining(request) == 0
        cached = None if request.signalled else request.cached_prefix
        request.signalled = True
        delay = self._handoff_delay(request) if completed else None
        if completed:
            self._finish(request)
        return Output(request.request_id, token, completed, False, cached, delay)

    def _handoff_delay(self, request: Live) -> float | None:
        per_token, bandwidth = self.config.kv_transfer_bytes_per_token, self.config.kv_transfer_bandwidth
        if self.config.worker_type != "prefill" or not per_token or not bandwidth:
            return None
        return request.num_input * per_token / (bandwidth * 1e9) * 1000.0

    # ------------------------------------------------------------ boundaries

    def is_ready(self) -> bool:
        return bool(self.running or self.waiting or any(not request.asleep for request in self.connector))

    def metrics(self) -> Metrics:
        active, inactive, total = self.pool.active_blocks, len(self.pool.inactive), self.config.num_gpu_blocks
        return Metrics(
            self.identity.dp_rank,
            active,
            inactive,
            total,
            active / total,
            (active + inactive) / total,
            len(self.running),
            len(self.waiting) + len(self.connector) + len(self.handoffs.waiting_lengths()),
            self.preemptions_total,
        )

    def _forward_pass_metrics(self, work: PassState, duration_ms: float) -> ForwardPassMetrics:
        prefills = [item for item in work.scheduled.values() if item.prompt_tokens > 0]
        decodes = [item for item in work.scheduled.values() if item.prompt_tokens == 0 and not item.was_complete]
        decode_kv = Welford(item.length for item in decodes)
        fresh, again = [], self.handoffs.waiting_lengths()
        for request in (*self.waiting, *self.connector):
            started = request.status == PREEMPTED or self.handoffs.is_active(request.request_id)
            (again if started else fresh).append(request.length)
        queued_prefill, queued_decode = Welford(fresh), Welford(again)
        return ForwardPassMetrics(
            num_prefill_requests=len(prefills),
            sum_prefill_tokens=sum(item.total_tokens for item in prefills),
            var_prefill_length=Welford(item.prompt_length for item in prefills).variance,
            sum_prefill_kv_tokens=sum(item.prefix_tokens for item in prefills),
            num_decode_requests=len(decodes),
            sum_decode_kv_tokens=decode_kv.sum,
            var_decode_kv_tokens=decode_kv.variance,
            num_queued_prefill=queued_prefill.count,
            sum_queued_prefill_tokens=queued_prefill.sum,
            var_queued_prefill_length=queued_prefill.variance,
            num_queued_decode=queued_decode.count,
            sum_queued_decode_kv_tokens=queued_decode.sum,
            var_queued_decode_kv_tokens=queued_decode.variance,
            duration_ms=duration_ms,
        )

    # ------------------------------------------------------------ host memory (host-offload.md part A)

    def _prompt_keys(self, request: Live) -> list[int]:
        keys = [entry.block_hash for entry in request.entries[: request.num_input // self.block_size]]
        return [key for key in keys if key is not None]

    def _touch_prompt(self, request: Live) -> None:
        assert self.host is not None
        for key in reversed(self._prompt_keys(request)):
            self.host.touch([key])

    def _prepare_stores(self, work: PassState) -> None:
        """Section 3: prompt blocks that this pass completed, in running order."""
        for request in self.running:
            if request.request_id in work.scheduled:
                self._prepare_store(request, work.now_ms)

    def _prepare_store(self, request: Live, now_ms: float) -> None:
        assert self.host is not None
        keys = self._prompt_keys(request)
        start, end = (
            request.next_store_block,
            min(min(request.computed, request.num_input) // self.block_size, len(keys)),
        )
        if end <= start:
            return
        missing = [position for position in range(start, end) if self.host.lookup(keys[position]) == "miss"]
        if not missing:
            request.next_store_block = end
            return
        blocks = [request.entries[position].block for position in missing]
        if any(block is None or block.hash is None or block.slot in self.readers for block in blocks):
            return
        transfer, outcome, victims = self.host.prepare_store(request.request_id, keys[start:end], now_ms)
        if victims:
            self._emit(Removed(tuple(victims)), "host_pinned")
        if outcome == "retry":
            return
        assert transfer is not None
        parents = [None, *keys]
        self.store_blocks[transfer.id] = [
            (position, self._as_announced(request, position), parents[position]) for position in missing
        ]
        self.host.record_mappings(transfer, missing, now_ms)
        for block in blocks:
            assert block is not None
            self.readers[block.slot] = transfer.id
        request.latest_store = transfer.id
        request.next_store_block = end
        self._touch_prompt(request)

    def _look_up(self, request: Live) -> Any:
        """Section 4: "miss", "deferred" or the keys of a hit."""
        assert self.host is not None
        if request.load is not None:
            return "miss" if request.load.done else "deferred"
        if request.latest_store is not None:
            if request.latest_store in self.host.transfers:
                return "deferred"
            request.latest_store = None
        keys = self._prompt_keys(request)
        base = 0
        while base < len(request.entries):
            block_hash = request.entries[base].block_hash
            if block_hash is None or self.pool.primary(block_hash) is None:
                break
            base += 1
        found: list[int] = []
        deferred = False
        for key in keys[base:]:
            state = self.host.lookup(key)
            if state == "miss":
                break
            deferred |= state == "pending" or self.host.is_loading(key)
            found.append(key)
        self._touch_prompt(request)
        if not found:
            return "miss"
        return "deferred" if deferred else found

    def _defer(self, request: Live, work: PassState) -> None:
        """To the end of the connector queue, or where it is if it is there already."""
        if request in self.waiting:
            self.waiting.remove(request)
            self.connector.append(request)
        request.asleep = True
        work.deferrals += 1

    def _headroom(self) -> int:
        """Blocks that running prompts and loading requests will still take."""
        blocks = sum(self._blocks(other.length) - self._blocks(other.allocated) for other in self.running)
        for other in self.connector:
            if other.load is not None:
                blocks += self._blocks(other.length) - other.load.blocks
        return blocks

    def _begin_load(self, request: Live, keys: list[int], cost: Cost, work: PassState) -> str:
        """Queue a load: "queued", "wait" or "reject"."""
        assert self.host is not None
        verdict = self._gate(request, cost, self._headroom())
        if verdict != "admit":
            return verdict
        base = self._prompt_keys(request).index(keys[0])
        reservation = self._reserve([entry.block_hash for entry in request.entries[:base]], len(keys))
        if reservation is None:
            return "wait"
        not_before = max((self._store_deadline(self.readers.get(slot)) for slot in reservation.slots), default=0.0)
        transfer = self.host.schedule_load(request.request_id, keys, work.now_ms, not_before)
        assert transfer is not None
        request.load = Load(transfer.id, reservation, base, base + len(keys))
        self._defer(request, work)
        return "queued"

    def _attribution(self, request: Live, reused: int) -> tuple[int, int] | None:
        """Tokens of the first admission that came from the device and from below it."""
        if (self.host is None and self.tiers is None) or request.admitted_before:
            return None
        base = request.swap_base if request.load is None else request.load.base
        device = reused if base is None else min(base * self.block_size, reused)
        return (device, reused - device)

    def _store_deadline(self, transfer_id: int | None) -> float:
        """When a store that is on its link ends, 0 for anything else."""
        if transfer_id is None or self.host is None or transfer_id not in self.host.transfers:
            return 0.0
        return self.host.transfers[transfer_id].deadline or 0.0

    def _fence(self, slots: list[int]) -> None:
        """What is written into these slots has to wait for the stores that still read them."""
        for slot in slots:
            if slot in self.readers:
                self._fence_store(self.readers[slot])

    def _fence_store(self, transfer_id: int) -> None:
        self.compute_not_before = max(self.compute_not_before, self._store_deadline(transfer_id))

    def _cancel_load(self, request: Live) -> None:
        if request.load is None or request.load.done:
            return
        assert self.host is not None
        assert self.command is not None
        deadline = self.host.next_deadline()
        overdue = deadline is not None and deadline < self.command.now_ms
        now = self.host.clock if self.command.pass_in_flight or overdue else self.command.now_ms
        self.host.cancel_load(request.load.transfer_id, now, self.command.now_ms)
        self.pool.cancel(request.load.reservation)
        request.load = None
        self._wake()

    def _cross_boundary(self, now_ms: float, *, submit: bool) -> None:
        """Section 6: settle transfers and let the rank see it."""
        if self.host is None:
            return
        settled = self.host.tick(now_ms)
        if submit:
            self.host.submit_prepared(now_ms)
            settled += self.host.tick(now_ms)
        for transfer in settled:
            if transfer.kind == STORE:
                self.readers = {slot: reader for slot, reader in self.readers.items() if reader != transfer.id}
                self._announce_store(transfer)
        for transfer in settled:
            if transfer.kind == LOAD:
                self._activate_load(transfer)
        if settled:
            self._wake()

    def _wake(self) -> None:
        """A transfer came to an end, one way or the other: who waits for one looks again."""
        for request in self.connector:
            request.asleep = False
        self.last_pass_effect_free = False

    def _announce_store(self, transfer: Transfer) -> None:
        blocks = self.store_blocks.pop(transfer.id)
        run: list[tuple[int, StoredBlock, int | None]] = []
        for block in [*blocks, None]:
            if run and (block is None or block[0] != run[-1][0] + 1):
                self._emit(Stored(run[0][2], tuple(one for _, one, _ in run), run[0][0]), "host_pinned")
                run = []
            if block is not None:
                run.append(block)

    def _activate_load(self, transfer: Transfer) -> None:
        """What was loaded becomes part of the lease, findable at once."""
        request = self.requests[transfer.request_id]
        load = request.load
        assert load is not None
        for position in range(load.blocks):
            entry = request.entries[position]
            loaded = position >= load.base
            entry.block = self.pool.take_fresh(load.reservation) if loaded else self.pool.take_prefix(load.reservation)
            entry.pending_cache = loaded
        request.allocated = load.blocks * self.block_size
        self._finalize(request, 0, request.allocated)
        request.next_store_block = load.blocks
        load.done = True

    # ------------------------------------------------------------ lower tiers (host-offload.md part B)

    def _push_out(self, prefix: Sequence[int | None], fresh: int) -> None:
        """Section 9: what must be evicted goes down a tier and keeps its slots meanwhile."""
        assert self.tiers is not None
        needed = fresh - self.pool.free
        if needed <= 0:
            return
        victims = self.pool.quarantine(needed, [block_hash for block_hash in prefix if block_hash is not None])
        if victims is None:
            return
        removed = [block_hash for _, block_hash, vanished in victims if vanished]
        if removed:
            self._emit(Removed(tuple(removed)))
        offload = self.tiers.enqueue(
            [(slot, block_hash if vanished else None) for slot, block_hash, vanished in victims], self.now_ms
        )
        if offload is not None:
            raise Blocked(offload)

    def _depend(self, request: Live, offload: Offload, work: PassState) -> None:
        request.dependency = offload
        work.deferrals += 1

    def _is_dependent(self, request: Live) -> bool:
        if request.dependency is not None:
            assert self.tiers is not None
            request.dependency = self.tiers.follow(request.dependency)
        return request.dependency is not None

    def _announce_host(self, kind: str, block_hash: int) -> None:
        block, parent = self.known[block_hash]
        data = Stored(parent, (block,)) if kind == "stored" else Removed((block_hash,))
        self._emit(data, "host_pinned")

    def _begin_swap_in(self, request: Live, work: PassState) -> str:
        """Section 10: "miss", "parked" or "dependent"."""
        assert self.tiers is not None
        hashes = [entry.block_hash for entry in request.entries]
        keys = [key for key in hashes if key is not None]
        base = 0
        while base < len(keys) and self.pool.primary(keys[base]) is not None:
            base += 1
        swap = self.tiers.plan(keys[base:])
        if swap is None:
            return "miss"
        try:
            reservation = self._reserve(keys[:base], len(swap.keys))
        except Blocked as blocked:
            self.tiers.give_up(swap)
            self._depend(request, blocked.offload, work)
            return "dependent"
        if reservation is None:
            self.tiers.give_up(swap)
            return "miss"
        self.tiers.begin(swap, work.now_ms)
        self.waiting.remove(request)
        self.parked.append(Parked(request, swap, reservation, base))
        if request.swap_base is None:
            request.swap_base = base
        work.deferrals += 1
        return "parked"

    def _tick(self, now_ms: float) -> None:
        """Section 11: what ended by now is seen."""
        if self.tiers is None or now_ms < self.tiers.now:
            return
        self.now_ms = self.tiers.now = now_ms
        active = self.pool.active_blocks
        if self.tiers.tick(now_ms):
            self.last_pass_effect_free = False
        back: list[Live] = []
        for parked in [parked for parked in self.parked if parked.swap.done]:
            self.parked.remove(parked)
            if parked.request is None:
                self.pool.cancel(parked.reservation)
            else:
                self._promote(parked.request, parked)
                back.append(parked.request)
            self.tiers.release(parked.swap)
        self.waiting[:0] = back
        self.handoffs.generation += self.pool.active_blocks < active

    def _promote(self, request: Live, parked: Parked) -> None:
        """Blocks that came back are unused cached copies."""
        group: list[int] = []
        blocks = []
        for position, key in enumerate(parked.swap.keys, parked.base):
            block = self.pool.take_fresh(parked.reservation)
            if self.pool.primary(key) is None:
                self.pool.publish(block, key)
                blocks.append(block)
                group.append(position)
            else:
                self.pool.release(block)
                self._announce(request, group)
                group = []
        self._announce(request, group)
        for block in reversed(blocks):
            self.pool.release(block)
        self.pool.cancel(parked.reservation)

    def tick_offload_only(self, now_ms: float) -> InternalEffects:
        self._tick(now_ms)
        lifecycle = self.retry_pending_destinations()
        return InternalEffects(lifecycle, self._drain_events())

    def tick_offload_transport_only(self, now_ms: float) -> InternalEffects:
        """While a pass is in flight; the events of a pass that shows its own at its end wait for them."""
        self._tick(now_ms)
        return InternalEffects([], self._drain_events() if self.rules.kv_events_at_pass_start else [])

    def retry_pending_destinations(self) -> list[Any]:
        pending = self.handoffs.pending
        if pending and self._is_dependent(pending[0].request):
            return []
        try:
            return super().retry_pending_destinations()
        except Blocked as blocked:
            pending[0].request.dependency = blocked.offload
            return []

    # ------------------------------------------------------------ boundaries with lower tiers

    def apply_command(
        self, command: Command, context: CommandContext, pending: PendingPass | None = None
    ) -> CommandEffects:
        self.command = context
        self.now_ms = context.now_ms
        return super().apply_command(command, context, pending)

    def complete_pass(self, pending: PendingPass, end_ms: float) -> PassCompletionEffects:
        self._cross_boundary(end_ms, submit=True)
        self.now_ms = end_ms
        return super().complete_pass(pending, end_ms)

    def complete_idle_group_pass(self, start_ms: float, end_ms: float) -> PassCompletionEffects:
        self._cross_boundary(end_ms, submit=True)
        self.now_ms = end_ms
        return super().complete_idle_group_pass(start_ms, end_ms)

    def next_internal_deadline_ms(self) -> float | None:
        if self.tiers is not None:
            return self.tiers.next_deadline()
        return None if self.host is None else self.host.next_deadline()

    def process_internal_work(self, now_ms: float, pass_in_flight: bool = False) -> InternalEffects:
        if pass_in_flight:
            return InternalEffects([], [])
        if self.tiers is not None:
            return self.tick_offload_only(now_ms)
        self._cross_boundary(now_ms, submit=False)
        return super().process_internal_work(now_ms)

    def is_drained(self) -> bool:
        if self.tiers is not None and (self.parked or self.tiers.next_deadline() is not None):
            return False
        return super().is_drained() and (self.host is None or not self.host.transfers)

    # ------------------------------------------------------------ liveness

    def stuck_head(self) -> tuple[int, str] | None:
        """The head of the queue and why it can never progress; None while there is hope."""
        if self.running or not (self.connector or self.waiting) or not self.last_pass_effect_free:
            return None
        if self.host is not None and self.host.transfers:
            # A transfer ends, and whoever waits for it looks again.
            return None
        if self.tiers is not None and self.tiers.next_deadline() is not None:
            return None
        head = [*self.connector, *self.waiting][0]
        if head.outgrown:
            return head.request_id, "outgrew the pool"
        if max(self._blocks(head.length), head.wants_blocks) > self.config.num_gpu_blocks:
            return head.request_id, "outgrew the pool"
        materialised = any(self._is_materialised(other) for other in self.waiting)
        if self.handoffs.pending or self.handoffs.held or self.handoffs.reserved or materialised:
            # It may be blocked by what a command will end, or by somebody who may pass it.
            return None
        limit = self.config.max_num_batched_tokens
        uncached = head.num_input - min(head.num_input, self._prefix_cost(head).cached_tokens)
        if not self.config.enable_chunked_prefill and limit is not None and uncached > limit:
            return head.request_id, "budget too small"
        if self.connector:
            # Blocks that were loaded for a request behind it are what it lacks.
            return head.request_id, "not admitted"
        return None

    def unblock(self) -> bool:
        """Let a request whose prompt came with a handoff pass a head that waits for its blocks.

        For a driver to which nothing else can happen: a later handoff may still free the head.
        """
        ready = [other for other in self.waiting if self._is_materialised(other)]
        if self.running or self.handoffs.pending or not self.last_pass_effect_free or not ready:
            return False
        if ready[0] is self.waiting[0]:
            return False
        self.waiting.remove(ready[0])
        self.waiting.insert(0, ready[0])
        self.last_pass_effect_free = False
        return True

    def fail_head(self, now_ms: float) -> Output:
        """Remove the stuck head; the signal that ends it."""
        head = [*self.connector, *self.waiting][0]
        cached = None if head.signalled else head.cached_prefix
        self.handoffs.generation += self._drop(head)
        self.last_pass_effect_free = False
        failed = head.preemptions > 0
        return Output(head.request_id, None, True, not failed, cached, failed=failed)

    # ------------------------------------------------------------ for comparison

    def state(self) -> dict[str, Any]:
        """Canonical description: no block ids, only hashes, counts and orders."""
        return {
            "running": [request.request_id for request in self.running],
            "waiting": [request.request_id for request in self.waiting],
            "requests": {
                request_id: {
                    "length": request.length,
                    "generated": request.generated,
                    "computed": request.computed,
                    "allocated": max(request.allocated, len(self._reserved_for_load(request)) * self.block_size),
                    "preemptions": request.preemptions,
                    "status": request.status,
                    "blocks": [entry.block.hash for entry in request.entries if entry.block is not None]
                    + self._reserved_for_load(request),
                }
                for request_id, request in sorted(self.requests.items())
            },
            "active_blocks": self.pool.active_blocks,
            "inactive_blocks": len(self.pool.inactive),
            "free_blocks": self.pool.free,
            "lru": [block.hash for block in self.pool.inactive],
            "copies": {block_hash: len(copies) for block_hash, copies in sorted(self.pool.copies.items())},
            "preemptions_total": self.preemptions_total,
            "next_event_id": self.next_event_id,
            "handoffs": self.handoffs.state(),
            "held_blocks": {
                request.request_id: [entry.block.hash for entry in request.entries if entry.block is not None]
                for request in self.handoffs.held.values()
            },
            "reserved_blocks": {
                entry.request.request_id: ([block.hash for block in entry.reservation.prefix], entry.reservation.fresh)
                for entry in self.handoffs.reserved.values()
            },
            **({} if self.host is None else self._host_state()),
            **({} if self.tiers is None else self._tier_state()),
        }

    @staticmethod
    def _reserved_for_load(request: Live) -> list[int | None]:
        """Hashes of what a request owns while it loads, None for a block that is on its way."""
        if request.load is None or request.load.done:
            return []
        reservation = request.load.reservation
        return [*(block.hash for block in reservation.prefix), *[None] * reservation.fresh]

    def _host_state(self) -> dict[str, Any]:
        assert self.host is not None
        return {
            "host": self.host.state(),
            "connector": [(request.request_id, request.asleep) for request in self.connector],
            "stores": {r.request_id: r.next_store_block for r in self.requests.values()},
            "loads": {
                request.request_id: (request.load.base, request.load.done)
                for request in self.requests.values()
                if request.load is not None
            },
            "readers": sorted(self.readers.values()),
        }

    def _tier_state(self) -> dict[str, Any]:
        assert self.tiers is not None
        owners = [*self.running, *self.waiting, *(entry.request for entry in self.handoffs.pending)]
        return {
            "tiers": self.tiers.state(),
            "parked": [
                (None if p.request is None else p.request.request_id, p.base, p.swap.keys, p.swap.done)
                for p in self.parked
            ],
            "quarantined": len(self.pool.quarantined),
            "dependent": sorted(owner.request_id for owner in owners if self._is_dependent(owner)),
        }

    def check(self) -> None:
        """The invariants of kv-cache.md section 2 and vllm.md section 2."""
        self.pool.check()
        assert not self.lifecycle
        parked = [parked.request for parked in self.parked if parked.request is not None]
        members = [request.request_id for request in (*self.running, *self.waiting, *self.connector, *parked)]
        assert sorted(members) == sorted(self.requests)
        self.handoffs.check(set(self.requests))
        refs: dict[int, int] = {}
        for request in (*self.requests.values(), *self.handoffs.held.values()):
            assert request.computed <= request.length
            assert request.allocated <= request.length
            assert request.length == request.num_input + request.generated
            assert len(request.entries) == self._blocks(request.length)
            held = [entry.block for entry in request.entries if entry.block is not None]
            assert len(held) == self._blocks(request.allocated)
            assert all(entry.block is not None for entry in request.entries[: len(held)])
            for block in held:
                refs[id(block)] = refs.get(id(block), 0) + 1
            if request.request_id not in self.requests:
                assert self._remaining(request) == 0
            elif request.status == RUNNING:
                assert request in self.running
            elif request in self.connector:
                assert request.computed == 0
                load = request.load
                assert request.allocated == (load.blocks * self.block_size if load is not None and load.done else 0)
            else:
                assert request in self.waiting or request in parked
                assert request.computed == request.allocated
                assert request.computed == 0 or (
                    request.computed == request.num_input == request.length
                    and self.handoffs.is_active(request.request_id)
                )
        pins: dict[int, int] = {}
        fresh = 0
        for entry in self.handoffs.reserved.values():
            fresh += entry.reservation.fresh
            for block in entry.reservation.prefix:
                pins[id(block)] = pins.get(id(block), 0) + 1
            assert entry.reservation.fresh + len(entry.reservation.prefix) == len(entry.request.entries)
        for request in self.connector:
            if request.load is not None and not request.load.done:
                fresh += request.load.reservation.fresh
                for block in request.load.reservation.prefix:
                    pins[id(block)] = pins.get(id(block), 0) + 1
        for item in self.parked:
            fresh += item.reservation.fresh
            assert item.reservation.fresh == len(item.swap.keys)
            for block in item.reservation.prefix:
                pins[id(block)] = pins.get(id(block), 0) + 1
        assert self.pool.reserved == fresh
        if self.tiers is not None:
            self.tiers.check([item.swap for item in self.parked])
            assert sorted(self.tiers.held_slots()) == sorted(self.pool.quarantined)
        if self.host is not None:
            self.host.check()
            assert set(self.readers.values()) <= set(self.host.transfers)
            assert set(self.store_blocks) == {t.id for t in self.host.transfers.values() if t.kind == STORE}
        for waiting in self.handoffs.pending:
            assert all(entry.block is None for entry in waiting.request.entries)
        every = [*self.pool.private, *(block for copies in self.pool.copies.values() for block in copies)]
        assert all(block.pins == pins.get(id(block), 0) for block in every)
        assert all(block.refs == refs.get(id(block), 0) for block in every)
        if not self.caching:
            assert not self.pool.copies
            assert not self.pool.inactive


def prompt_tokens(request: Request) -> list[int]:
    """The prompt as a plain list."""
    if request.segments is None:
        return [int(token) for token in request.tokens]
    tokens: list[int] = []
    for start, step, length in request.segments.tolist():
        tokens += [(start + position * step) & 0xFFFFFFFF for position in range(length)]
    return tokens
