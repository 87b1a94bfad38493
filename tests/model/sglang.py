"""Twin of the SGLang scheduler rank: plain lists, no cleverness.

Written from spec/sglang.md and spec/handoff.md and from no kernel.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from kvsim.config import EngineConfig
from kvsim.contract import (
    Admission,
    ForwardPassMetrics,
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
    Request,
    SameTimestampRetry,
    id_to_int,
)
from kvsim.errors import CommandError, TimingError
from model.handoff import HandoffRank, Handoffs
from model.hashing import ChaCha12, synthetic_token
from model.paged import prompt_tokens
from model.radix import EventLog, KvManager, Lease, PagePool, TokenPool, ceil_div
from model.timing import Callback, Timing
from model.welford import Welford

MASK64 = 2**64 - 1

WAITING, RUNNING = "waiting", "running"

#: section 1.4
RATIO_OF_CONSERVATIVENESS = 0.7
MIN_RATIO_SHARE = 0.14
RATIO_DECAY_STEPS = 600
LPM_QUEUE_LIMIT = 128
DUPLICATE_TOKENS = 32
LOOK_AHEAD_STEPS = 20
#: section 4.7
DECODE_PASSES_PER_FLUSH = 40


@dataclass(eq=False)
class Live:
    """A request and what it owns."""

    request_id: int
    tokens: list[int]
    num_input: int
    max_output: int
    planned: list[int] | None
    lease: Lease = field(default_factory=Lease)
    allocated: int = 0
    status: str = WAITING
    #: it was in a prefill batch or promoted at some time
    ever_admitted: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def out(self) -> int:
        return len(self.tokens) - self.num_input

    @property
    def remaining(self) -> int:
        return max(0, self.max_output - self.out)

    @property
    def materialized(self) -> int:
        return self.lease.materialized


@dataclass
class Chunk:
    """What one request computes in a prefill pass."""

    request: Live
    computed: int
    prefix: int
    cache_reused: int


@dataclass
class PassState:
    """The pass that is being formed."""

    now_ms: float
    chunks: list[Chunk] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    pressure: list[PressureEvent] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    #: in the order in which they give up their KV
    completed: list[Live] = field(default_factory=list)
    retracted: list[Live] = field(default_factory=list)
    #: what the survivors of a retraction make of the new-token ratio
    estimate: float | None = None
    #: the pool refused a request that the budgets had let pass
    allocation_failed: bool = False
    decode_lengths: list[int] = field(default_factory=list)


class SglangModel(HandoffRank):
    """One rank; the methods are those of kvsim.SchedulerRank."""

    #: what a failed timing provider must leave as it was
    MUTABLE = (
        "kv",
        "waiting",
        "prebuilt",
        "running",
        "requests",
        "handoffs",
        "lifecycle",
        "ratio",
        "countdown",
        "decode_passes",
        "hit_tokens",
        "cache_total_tokens",
        "last_pass_effect_free",
        "last_hint",
    )

    def __init__(
        self,
        identity: RankIdentity,
        config: EngineConfig,
        timing: Any = None,
        *,
        prefill_decode_interval: int = 0,
    ) -> None:
        assert config.backend == "sglang"
        self.identity = identity
        self.config = config
        self.options = config.sglang
        self.rules = config.rules
        self.interval = prefill_decode_interval
        self.page_size = config.tokens_per_block
        self.caching = config.enable_prefix_caching
        self.total_tokens = config.num_gpu_blocks * self.page_size
        self.timing = Timing(config, timing)
        self.drafter = ChaCha12((config.aic_mtp_seed + identity.seed_offset) & MASK64)
        #: section 13
        self.legacy = config.ruleset == "dynamo-1.3"
        emits = config.emit_kv_events and self.caching
        events = EventLog(identity, emits, config.emit_kv_token_ids, merging=not self.legacy)
        pool = (TokenPool if self.legacy else PagePool)(self.total_tokens, self.page_size)
        self.kv = KvManager(pool, self.caching, events)
        self.requests: dict[int, Live] = {}
        self.running: list[Live] = []
        self.waiting: list[Live] = []
        #: activated destinations, until a pass promotes them into `running`
        self.prebuilt: list[Live] = []
        self.handoffs = Handoffs()
        #: what happened to handoffs in the pass that is being formed
        self.lifecycle: list[Any] = []
        self.init_ratio = RATIO_OF_CONSERVATIVENESS * self.options.schedule_conservativeness
        self.min_ratio = self.init_ratio * MIN_RATIO_SHARE
        self.decay = (self.init_ratio - self.min_ratio) / RATIO_DECAY_STEPS
        self.ratio = self.init_ratio
        #: rounds that still may not prefill
        self.countdown = 0
        self.decode_passes = 0
        self.hit_tokens = 0
        self.cache_total_tokens = 0
        self.last_pass_effect_free = False
        self.last_hint = SameTimestampRetry.NOT_APPLICABLE
        #: a command freed KV while a pass was in flight
        self.command_events = False

    # ------------------------------------------------------------ commands

    def _watch(self) -> list[KvEvent]:
        return list(self.kv.events.buffer)

    def _shown(self, mark: Any, *, show: bool) -> list[KvEvent]:
        """All that is buffered if a command added to it; what decode passes hold back alone stays."""
        self.command_events |= self.kv.events.buffer != mark
        if not show or not self.command_events:
            return []
        self.command_events = False
        return self.kv.events.drain()

    def _build(self, request: Request) -> Live:
        request_id = id_to_int(request.request_id)
        tokens = prompt_tokens(request)
        if not tokens:
            raise CommandError("tokens: at least one is needed, got none")
        planned = None if request.output_token_ids is None else [int(token) for token in request.output_token_ids]
        max_output = request.max_output_tokens if planned is None else len(planned)
        limit = self.config.max_model_len
        if limit is not None and len(tokens) < limit:
            max_output = min(max_output, limit - len(tokens))
        return Live(request_id, tokens, len(tokens), max_output, planned)

    def _enqueue(self, request: Live) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def _drop(self, request: Live) -> bool:
        """The request leaves without finishing; whether that freed anything."""
        for queue in (self.waiting, self.prebuilt, self.running):
            if request in queue:
                queue.remove(request)
        del self.requests[request.request_id]
        self.handoffs.forget(request.request_id)
        return self.kv.release(request.lease)

    # ------------------------------------------------------------ handoff (section 12)

    def _finish(self, request: Live) -> None:
        """A completed request leaves the rank, or stays with its lease as the source of a handoff."""
        held = self._hold_source(request)
        del self.requests[request.request_id]
        self.handoffs.forget(request.request_id)
        if held is None:
            self.kv.finish(request.lease, request.tokens)
            self.handoffs.generation += 1
        else:
            self.kv.cache_prefix(request.lease, request.tokens)
            self.lifecycle.append(held)

    def _clean_up_source(self, request: Live) -> None:
        self.kv.finish(request.lease, request.tokens)

    def _check_destination(self, request: Live) -> None:
        limit = self.config.max_model_len
        if limit is not None and request.num_input >= limit:
            raise CommandError(f"destination prompt of {request.num_input} tokens: max_model_len {limit}")
        if self.kv.ceil(request.num_input) > self.total_tokens:
            raise CommandError("destination prompt exceeds the KV pool capacity")

    def _reserve_destination(self, request: Live) -> tuple[None, int] | None:
        """Pages for the whole prompt, none of them published; the lease of the request is the reservation."""
        whole = self.kv.ceil(request.num_input)
        prefix = self.kv.allocate(request.lease, request.tokens, request.num_input, whole_pages=True)
        if prefix is None:
            return None
        request.allocated = whole
        return None, whole - prefix

    def _activate(self, request: Live, reservation: None) -> bool:
        """The request waits for a place in `running`; its pages stay its own until then.

        In generation 1.3 they are committed at once, and what the last one does not hold is free.
        """
        self.prebuilt.append(request)
        if not self.legacy:
            return False
        reachable = self.kv.reachable
        self.kv.pool.trim(request.lease.pages, request.num_input)
        self.kv.cache_prefix(request.lease, request.tokens)
        return self.kv.reachable > reachable

    def _cancel_reservation(self, request: Live, reservation: None) -> None:
        self.kv.release(request.lease)

    def _promote(self, work: PassState) -> None:
        """Section 6.2, step 2."""
        limit = self.config.max_num_seqs
        while self.prebuilt and (limit is None or len(self.running) < limit):
            request = self.prebuilt.pop(0)
            request.status = RUNNING
            request.ever_admitted = True
            self.running.append(request)
            work.admissions.append(Admission(request.request_id, 0))
            self.kv.cache_prefix(request.lease, request.tokens)
            self.handoffs.generation += not self.legacy

    # ------------------------------------------------------------ the pass (section 6.2)

    def execute_pass(self, now_ms: float) -> RankPass:
        may_fail = isinstance(self.timing.model, Callback)
        saved = copy.deepcopy({name: getattr(self, name) for name in self.MUTABLE}) if may_fail else {}
        try:
            return self._execute_pass(now_ms)
        except TimingError:
            for name, value in saved.items():
                setattr(self, name, value)
            raise

    def _execute_pass(self, now_ms: float) -> RankPass:
        ratio_before = self.ratio
        work = PassState(now_ms)
        rejected = self._reject_too_long()
        self._promote(work)
        self._order_waiting()
        deferred = self.countdown > 0
        if deferred:
            self.countdown -= 1
        elif not self.prebuilt and not self.handoffs.pending:
            self._admit(work)
        prefill_ms = self._prefill_ms(work)

        set_aside, fresh = self.running, self._disperse(work)
        prefill_pass = bool(work.chunks) and not self.legacy
        if self.legacy:
            self.running = set_aside + fresh
        if prefill_pass:
            self.running = fresh
            end_ms = now_ms + prefill_ms
            self._first_tokens(work)
            self.running = set_aside + self.running
        else:
            work.decode_lengths = [request.length for request in self.running if request.remaining > 0]
            end_ms = now_ms + prefill_ms + self._decode_step(work)
        for request in work.completed:
            self._finish(request)
        self.waiting = work.retracted + self.waiting if self.legacy else self.waiting + work.retracted
        self._update_ratio(work, prefill_pass, deferred)
        computed = sum(chunk.computed for chunk in work.chunks)
        if computed:
            # Of a group of ranks, any rank that computed starts the countdown of all.
            self.countdown = self.interval
        self.decode_passes += bool(work.decode_lengths)
        flush = (
            self.legacy
            or computed > 0
            or not self.running
            or (bool(work.decode_lengths) and self.decode_passes % DECODE_PASSES_PER_FLUSH == 0)
        )
        events = self.kv.events.drain() if flush else []
        outputs = work.outputs + rejected
        lifecycle, self.lifecycle = self.lifecycle, []
        # Cached pages that a vain attempt evicted bring nothing nearer, with or without an event.
        self.last_pass_effect_free = end_ms <= now_ms and not (
            outputs or work.admissions or work.pressure or work.chunks or work.retracted
        )
        if self.last_pass_effect_free and not deferred and not self.legacy and self._hopeless():
            self.ratio = self.min_ratio
        if deferred:
            hint = SameTimestampRetry.COUNTDOWN
        elif self.legacy:
            hint = SameTimestampRetry.NOT_APPLICABLE
        elif self.ratio != ratio_before:
            hint = SameTimestampRetry.RETRY
        else:
            hint = SameTimestampRetry.EXHAUSTED
        self.last_hint = hint
        self.hit_tokens = sum(chunk.cache_reused for chunk in work.chunks)
        self.cache_total_tokens = self.hit_tokens + computed
        metrics = self.metrics()._replace(
            sglang_cache_hit_tokens=self.hit_tokens, sglang_cache_total_tokens=self.cache_total_tokens
        )
        signals = [output.request_id for output in outputs if not output.rejected]
        effects = PassCompletionEffects(
            outputs=outputs,
            lifecycle_events=lifecycle,
            kv_events=events,
            metrics=metrics,
            forward_pass_metrics=self._forward_pass_metrics(work, max(0.0, end_ms - now_ms)),
            decode_acceptance=(len(signals), len(set(signals))),
        )
        return RankPass(
            end_ms=end_ms,
            same_timestamp_retry=hint,
            start_effects=PassStartEffects(work.admissions, work.pressure, []),
            pending=PendingPass(now_ms, effects),
        )

    def _reject_too_long(self) -> list[Output]:
        """Section 6.7: prompts that the model length leaves no room for."""
        limit = self.config.max_model_len
        if limit is None:
            return []
        doomed = [request for request in self.waiting if request.num_input >= limit]
        for request in doomed:
            self.handoffs.generation += self._drop(request)
        return [Output(request.request_id, None, True, True, None) for request in doomed]

    def _prefill_ms(self, work: PassState) -> float:
        if self.config.worker_type == "decode":
            return 0.0
        computing = [chunk for chunk in work.chunks if chunk.computed > 0]
        isl = sum(chunk.request.materialized for chunk in computing)
        prefix = sum(chunk.prefix for chunk in computing)
        return self.timing.prefill_ms(len(computing), isl, prefix)

    def _disperse(self, work: PassState) -> list[Live]:
        """Unfinished chunks to the front of `waiting`, the rest is returned for `running`."""
        fresh = []
        for chunk in work.chunks:
            request = chunk.request
            if request.materialized < request.length:
                self.kv.cache_prefix(request.lease, request.tokens)
                self.waiting.insert(0, request)
            else:
                if self.legacy:
                    self.kv.cache_prefix(request.lease, request.tokens)
                request.status = RUNNING
                fresh.append(request)
        return fresh

    def _update_ratio(self, work: PassState, prefill_pass: bool, deferred: bool) -> None:
        if self.legacy and (work.retracted or work.allocation_failed):
            self.ratio = self.init_ratio
        elif work.estimate is not None:
            self.ratio = work.estimate
        elif deferred and not self.running and not work.decode_lengths:
            # No rank of the group ran the model.
            self.ratio = self.init_ratio
        elif not prefill_pass:
            self.ratio = max(self.min_ratio, self.ratio - self.decay)

    # ------------------------------------------------------------ order and admission

    def _order_waiting(self) -> None:
        """Section 6.3."""
        if self.options.schedule_policy != "lpm" or not self.caching or len(self.waiting) > LPM_QUEUE_LIMIT:
            return
        duplicate_length = self.kv.ceil(DUPLICATE_TOKENS)
        seen: set[tuple[int, ...]] = set()
        keys = {}
        for request in self.waiting:
            prefix = self.kv.match_len(request.lease, request.tokens, request.length)
            deprioritised = False
            if prefix <= DUPLICATE_TOKENS and request.length >= duplicate_length:
                start = tuple(request.tokens[:duplicate_length])
                deprioritised = start in seen
                seen.add(start)
            keys[request.request_id] = (deprioritised, -prefix)
        self.waiting.sort(key=lambda request: keys[request.request_id])

    def _admit(self, work: PassState) -> None:
        """Section 6.4."""
        options = self.options
        rem_total = float(self.kv.reachable) - self._promised() - self._page_slack()
        rem_input, rem_chunk = options.max_prefill_tokens, options.chunked_prefill_size
        limit = self.config.max_num_seqs
        while self.waiting and (limit is None or len(work.chunks) < limit - len(self.running)):
            request = self.waiting[0]
            tokens, lease = request.tokens, request.lease
            started = request.materialized > 0
            start = request.materialized
            if not started and not self.legacy:
                reach = request.length - (request.max_output > 0)
                start = self.kv.match_len(lease, tokens, reach)
            extend = request.length - start
            if extend == 0 and started:
                break
            room = options.chunked_prefill_size if self.legacy else rem_chunk
            chunk = extend if self.kv.ceil(extend) <= room else min(extend, self.kv.floor(room))
            if chunk == 0 and extend > 0:
                break
            charge = self.kv.ceil(chunk)
            reserve = min(request.remaining, options.clip_max_new_tokens) if chunk == extend else 0
            if charge + reserve >= rem_total or charge > rem_input or charge > rem_chunk:
                break
            if started:
                prefix = self.kv.extend(lease, start + chunk)
            else:
                prefix = self.kv.allocate(lease, tokens[: start + chunk], chunk if self.legacy else start)
            if prefix is None:
                work.allocation_failed = True
                break
            self.waiting.pop(0)
            request.allocated = self.kv.ceil(request.materialized)
            request.ever_admitted = True
            if not started or self.legacy:
                work.admissions.append(Admission(request.request_id, prefix))
            computed = chunk if self.legacy else request.materialized - prefix
            reused = prefix if not started or self.legacy else 0
            work.chunks.append(Chunk(request, computed, prefix, reused))
            rem_total -= charge + reserve
            rem_input -= charge
            rem_chunk -= charge
            if rem_chunk <= 0:
                break

    def _page_slack(self) -> int:
        """Tokens of partial pages that nobody else could use; pages in REF are owned whole."""
        if not self.legacy:
            return 0
        owners = (*self.requests.values(), *self.handoffs.held.values())
        return sum(request.allocated - request.materialized for request in owners)

    def _promised(self) -> float:
        """Tokens that the running requests are expected to ask for."""
        total = 0.0
        for request in self.running:
            # Added one by one: the roundings of the sum decide what just fits (probed).
            total += min(request.remaining, self.options.clip_max_new_tokens) * self.ratio
        return total

    # ------------------------------------------------------------ first tokens (section 6.5)

    def _first_tokens(self, work: PassState) -> None:
        """`running` holds the requests whose prompt is complete now, and they alone."""
        none_left = [request for request in self.running if request.remaining == 0]
        last = [request for request in self.running if request.remaining == 1]
        others = [request for request in self.running if request.remaining > 1]
        for request in none_left:
            work.outputs.append(self._signal(request, None))
        for request in last:
            work.outputs.append(self._generate(request))
        growth = self._growth(others, 1)
        self.kv.evict(growth - self.kv.available)
        reserved = self.kv.pool.reserve(growth)
        if reserved is None:
            for request in (*others, *last):
                self.kv.cache_prefix(request.lease, request.tokens)
            self.kv.evict(growth - self.kv.available)
            reserved = self.kv.pool.reserve(growth)
        if reserved is not None:
            for request in others:
                self.kv.cache_prefix(request.lease, request.tokens)
                self._grow(request, reserved)
                work.outputs.append(self._generate(request))
            self.kv.pool.free(reserved)
        for request in last:
            self.kv.cache_prefix(request.lease, request.tokens)
        self.running = others
        work.completed += none_left + last

    # ------------------------------------------------------------ decode step (section 7)

    def _growth(self, requests: list[Live], burst: int) -> int:
        """Tokens in pages that the next burst of every request needs beyond what it has."""
        return sum(
            self.kv.pool.need(request.materialized, request.length + min(burst, request.remaining))
            for request in requests
        )

    def _grow(self, request: Live, reserved: list[int]) -> None:
        self.kv.grow(request.lease, reserved)
        request.allocated = self.kv.ceil(request.materialized)

    def _decode_step(self, work: PassState) -> float:
        """One step of everything in `running`; its duration, ms."""
        for request in [request for request in self.running if request.remaining == 0]:
            self._complete(request, work)
            work.outputs.append(self._signal(request, None))
        nextn = self.config.aic_nextn
        burst_max = 1 if nextn is None or self.config.worker_type == "prefill" else nextn + 1
        if not self.running:
            return 0.0
        self._retract(burst_max, work)
        context = sum(request.length for request in self.running)
        if self.legacy:
            context = min(context, self.total_tokens)
        duration = self.timing.decode_step_ms(len(self.running), context, context // len(self.running))
        reserved = self.kv.pool.reserve(self._growth(self.running, burst_max))
        if reserved is None:
            return 0.0
        finished = []
        for request in self.running:
            for _ in range(self._sample_burst(request, burst_max)):
                self._grow(request, reserved)
                work.outputs.append(self._generate(request))
            if request.remaining == 0:
                finished.append(request)
            elif self.legacy:
                self.kv.cache_prefix(request.lease, request.tokens)
        self.kv.pool.free(reserved)
        for request in finished:
            self._complete(request, work)
        return duration

    def _complete(self, request: Live, work: PassState) -> None:
        self.running.remove(request)
        work.completed.append(request)

    def _retract(self, burst_max: int, work: PassState) -> None:
        """Section 7.2: make room for the step, taking the KV of as few requests as possible."""
        order = list(self.running)
        while (avail := self.kv.reachable) < (growth := self._growth(self.running, burst_max)):
            if len(self.running) <= 1:
                break
            if self.legacy:
                victim = min(self.running, key=lambda request: request.out)
            else:
                if not work.retracted:
                    self.running.sort(key=lambda request: (-request.out, request.num_input))
                victim = self.running[-1]
            before = self._pressure_state()
            blocks = ceil_div(victim.allocated, self.page_size)
            self.running.remove(victim)
            self.kv.release(victim.lease)
            victim.allocated = 0
            victim.status = WAITING
            work.retracted.append(victim)
            if self.legacy:
                continue
            work.pressure.append(
                PressureEvent(
                    work.now_ms,
                    "sglang_retraction",
                    victim.request_id,
                    before,
                    self._pressure_state(),
                    blocks,
                    avail // self.page_size,
                    ceil_div(growth, self.page_size),
                )
            )
            self.kv.evict(LOOK_AHEAD_STEPS * len(self.running) - self.kv.available)
        self.kv.evict(self._growth(self.running, burst_max) - self.kv.available)
        if work.retracted:
            self.handoffs.generation += 1
            if self.legacy:
                work.retracted.sort(key=order.index)
            out = sum(request.out for request in self.running)
            planned = sum(request.max_output for request in self.running)
            work.estimate = min(1.0, (out + LOOK_AHEAD_STEPS * len(self.running)) / (planned + 1))

    def _pressure_state(self) -> PressureState:
        return PressureState(len(self.running), None, self._active_blocks())

    def _sample_burst(self, request: Live, burst_max: int) -> int:
        """Section 8: drafts are drawn to the first rejection, then cut to what is left."""
        accepted = 1
        for rate in self.config.accept_rates[: burst_max - 1]:
            if not self.drafter.accept(rate):
                break
            accepted += 1
        return min(accepted, request.remaining)

    # ------------------------------------------------------------ signals

    def _generate(self, request: Live) -> Output:
        """Append one token; its signal."""
        ordinal = request.out
        if request.planned is not None and ordinal < len(request.planned):
            token = request.planned[ordinal]
        else:
            token = synthetic_token(request.request_id, ordinal)
        request.tokens.append(token)
        return self._signal(request, token)

    def _signal(self, request: Live, token: int | None) -> Output:
        completed = request.remaining == 0
        delay = self._handoff_delay(request) if completed else None
        return Output(request.request_id, token, completed, False, None, delay)

    def _handoff_delay(self, request: Live) -> float | None:
        per_token, bandwidth = self.config.kv_transfer_bytes_per_token, self.config.kv_transfer_bandwidth
        if self.config.worker_type != "prefill" or not per_token or not bandwidth:
            return None
        return request.num_input * per_token / (bandwidth * 1e9) * 1000.0

    # ------------------------------------------------------------ boundaries

    def _completion_metrics(self) -> Metrics:
        return self.metrics()._replace(
            sglang_cache_hit_tokens=self.hit_tokens, sglang_cache_total_tokens=self.cache_total_tokens
        )

    def is_drained(self) -> bool:
        return super().is_drained() and self.countdown == 0

    def is_ready(self) -> bool:
        return not self.is_drained()

    def unblock(self) -> bool:
        """Activated destinations have a queue of their own, ahead of all others: nobody is in their way."""
        return False

    def waiting_for_external_command(self) -> bool:
        return super().waiting_for_external_command() and self.countdown == 0

    def _active_blocks(self) -> int:
        return ceil_div(self.total_tokens - self.kv.available + self._page_slack(), self.page_size)

    def metrics(self) -> Metrics:
        active, total = self._active_blocks(), self.config.num_gpu_blocks
        usage = active / total
        running = len(self.running)
        waiting = len(self.waiting) + len(self.prebuilt) + len(self.handoffs.waiting_lengths())
        return Metrics(self.identity.dp_rank, active, 0, total, usage, usage, running, waiting, 0)

    def _forward_pass_metrics(self, work: PassState, duration_ms: float) -> ForwardPassMetrics:
        prefills = [chunk for chunk in work.chunks if chunk.computed > 0]
        decode_kv = Welford(work.decode_lengths)
        new, again = [], [*(request.length for request in self.prebuilt), *self.handoffs.waiting_lengths()]
        for request in self.waiting:
            started = request.out > 0 or self.handoffs.is_active(request.request_id)
            (again if started else new).append(request.length)
        queued_prefill, queued_decode = Welford(new), Welford(again)
        return ForwardPassMetrics(
            num_prefill_requests=len(prefills),
            sum_prefill_tokens=sum(chunk.computed for chunk in prefills),
            var_prefill_length=Welford(chunk.request.num_input for chunk in prefills).variance,
            sum_prefill_kv_tokens=sum(chunk.prefix for chunk in prefills),
            num_decode_requests=decode_kv.count,
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

    # ------------------------------------------------------------ liveness

    def _exhausted(self) -> bool:
        """The last pass did nothing and the next would be the same."""
        final = (SameTimestampRetry.EXHAUSTED, SameTimestampRetry.NOT_APPLICABLE)
        if not self.last_pass_effect_free or self.last_hint not in final:
            return False
        # A pending destination that may fit now is tried before the next pass.
        pending = self.handoffs.pending
        return not pending or pending[0].last_attempt == self.handoffs.generation

    def _hopeless(self) -> bool:
        """Passes at this instant could only wear down the ratio, and longer than anyone would wait.

        The peer gives a run up after 1024 such passes in a row. With nobody running the ratio counts for
        nothing; with no page to be had nothing is admitted at any ratio.
        """
        if not self.requests or self.decay <= 0.0:
            return False
        steps = (self.ratio - self.min_ratio) / self.decay
        return steps > 2**20 or (steps > 1024 and (not self.running or self.kv.reachable == 0))

    def stuck_head(self) -> tuple[int, str] | None:
        """The waiting request that can never progress and why; None while there is hope.

        Pages that a handoff holds come back by a command. A pending destination keeps everybody from being
        admitted, also the rest of a prompt whose first pages stand in its way: that request gives in.
        """
        handoffs = self.handoffs
        if self.running or not self.waiting or not self._exhausted() or handoffs.held or handoffs.reserved:
            return None
        candidates = [request for request in self.waiting if not handoffs.pending or request.lease.active]
        return (candidates[0].request_id, "pool too small") if candidates else None

    def fail_head(self, now_ms: float) -> Output:
        """Remove the stuck request; the signal that ends it."""
        stuck = self.stuck_head()
        assert stuck is not None
        return self._fail(self.requests[stuck[0]])

    def stuck_running(self) -> tuple[int, str] | None:
        """The lone running request if its next step can never fit; None while there is hope."""
        if len(self.running) != 1 or not self._exhausted() or self.handoffs.held or self.handoffs.reserved:
            return None
        return self.running[0].request_id, "outgrew the pool"

    def fail_running(self) -> Output:
        """Remove the running request that outgrew the pool; the signal that ends it."""
        return self._fail(self.running[0])

    def _fail(self, request: Live) -> Output:
        self.handoffs.generation += self._drop(request)
        self.last_pass_effect_free = False
        # What this freed is shown with the next completion.
        self.command_events = bool(self.kv.events.buffer)
        failed = request.ever_admitted
        return Output(request.request_id, None, True, not failed, None, failed=failed)

    # ------------------------------------------------------------ for comparison

    def state(self) -> dict[str, Any]:
        """Canonical description: no page ids and no times, only hashes, counts and orders."""
        tree = self.kv.tree
        return {
            "waiting": [request.request_id for request in self.waiting],
            "prebuilt": [request.request_id for request in self.prebuilt],
            "running": [request.request_id for request in self.running],
            "requests": {
                request_id: {
                    "seq_len": request.length,
                    "out": request.out,
                    "materialized": request.materialized,
                    "allocated": request.allocated,
                    "cached": request.lease.cached,
                    "pages": len(request.lease.pages),
                    "status": request.status,
                }
                for request_id, request in sorted(self.requests.items())
            },
            "new_token_ratio": self.ratio,
            "countdown": self.countdown,
            "available_tokens": self.kv.available,
            "tree": tree.describe(),
            "eviction_order": [
                [key for step in tree.path(node) for key in step.keys] for node in tree.eviction_order()
            ],
            "evictable_size": tree.evictable_size,
            "protected_size": tree.protected_size,
            "next_event_id": self.kv.events.next_event_id,
            "buffered_events": list(self.kv.events.buffer),
            "handoffs": self.handoffs.state(),
            "parked": {
                request.request_id: {
                    "seq_len": request.length,
                    "materialized": request.materialized,
                    "cached": request.lease.cached,
                    "pages": len(request.lease.pages),
                }
                for request in self._parked_owners()
            },
        }

    def _parked_owners(self) -> list[Live]:
        """Requests outside the queues that own KV."""
        return [*self.handoffs.held.values(), *(entry.request for entry in self.handoffs.reserved.values())]

    def check(self) -> None:
        """The invariants of sections 2, 4 and 5."""
        members = [request.request_id for request in (*self.running, *self.waiting, *self.prebuilt)]
        assert sorted(members) == sorted(self.requests)
        assert not self.lifecycle
        self.handoffs.check(set(self.requests))
        owners = [*self.requests.values(), *self._parked_owners()]
        self.kv.check([request.lease for request in owners])
        assert all(not entry.request.lease.active for entry in self.handoffs.pending)
        assert self.min_ratio <= self.ratio or self.ratio <= 1.0
        limit = self.config.max_num_seqs
        assert limit is None or len(self.running) <= limit
        for request in owners:
            lease = request.lease
            assert request.allocated == len(lease.pages) * self.page_size
            assert 0 <= request.allocated - lease.materialized < self.page_size
            assert lease.cached <= lease.materialized <= request.length
            assert request.out <= request.max_output
            if request.status == RUNNING and request.request_id in self.requests:
                assert request in self.running
                assert lease.materialized == request.length
            elif request.request_id in self.requests:
                assert request in self.waiting or request in self.prebuilt
        for request in (*self.prebuilt, *(entry.request for entry in self.handoffs.reserved.values())):
            assert request.materialized == request.num_input == request.length
        if self.is_drained():
            assert self.kv.tree.protected_size == 0
            assert self.metrics().running_requests == self.metrics().waiting_requests == 0
