"""Host memory of a rank, kernel against twin: whatever happens, both agree after every step.

``KVSIM_EXAMPLES`` sets the number of random histories (default 200), for long runs.
"""

from __future__ import annotations

import os
import pickle
import random
from typing import Any

import pytest

from kvsim.config import EngineConfig, FixedTiming, NativeHostOffload
from kvsim.contract import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    CommandEffects,
    HostOffloadEvent,
    InternalEffects,
    RankIdentity,
    ReleaseSource,
    Request,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from kvsim.offload import HostOffloadRecorder
from kvsim.rank import SchedulerRank
from model.host import Record
from model.paged import PagedModel
from support import Pair, plain

EXAMPLES = int(os.environ.get("KVSIM_EXAMPLES", "200"))
PARTS = 10
STEPS = 50


def random_config(rng: random.Random) -> EngineConfig:
    """Pools that are always full over host memory that is always full; links from instantaneous to very slow."""
    links = rng.choice([(1.0, 1.0), (0.0, 0.0), (0.1, 1.0), (1.0, 0.1), (0.0, 0.3), (0.05, 0.05)])
    return EngineConfig(
        num_gpu_blocks=rng.choice([2, 3, 4, 6, 9, 16]),
        block_size=rng.choice([2, 4]),
        max_num_seqs=rng.choice([1, 2, 4, None]),
        max_num_batched_tokens=rng.choice([3, 8, 16, 64, None]),
        max_model_len=rng.choice([None, None, None, 20]),
        preemption_mode=rng.choice(["lifo", "fifo"]),
        enable_chunked_prefill=rng.random() < 0.85,
        speedup_ratio=0.0,
        kv_cache_bytes_per_token=250_000,
        emit_kv_events=rng.random() < 0.8,
        emit_kv_token_ids=False,
        timing_model=FixedTiming(prefill_ms=rng.choice([0.0, 1.0, 5.0]), decode_ms=rng.choice([0.0, 1.0, 4.0])),
        native_host_offload=NativeHostOffload(
            num_host_blocks=rng.choice([1, 2, 4, 7, 30]), d2h_bandwidth_gbps=links[0], h2d_bandwidth_gbps=links[1]
        ),
    )


def observed(request_id: int, event: HostOffloadEvent) -> tuple[Any, ...]:
    return (
        request_id,
        event.kind.name.lower(),
        event.at_ms,
        event.transfer_id,
        list(event.block_hashes),
        event.completes_at_ms,
        list(event.logical_block_indices or ()),
        event.structurally_unfittable,
    )


def expected_observation(record: Record) -> tuple[Any, ...]:
    return (
        record.request_id,
        record.kind,
        record.at_ms,
        record.transfer_id,
        record.keys,
        record.completes_at_ms,
        record.indices,
        record.structurally_unfittable,
    )


class OffloadPair(Pair):
    """A rank with host memory and its twin."""

    def __post_init__(self) -> None:
        self.recorder = HostOffloadRecorder()
        self.rank = SchedulerRank(self.identity, self.config, observer=self.recorder)
        self.model = PagedModel(self.identity, self.config)
        self.twin = self.model
        self.compared = 0

    def compare(self) -> None:
        super().compare()
        assert self.rank.next_internal_deadline_ms() == self.model.next_internal_deadline_ms()
        assert self.model.host is not None
        records = self.model.host.records
        mine = [observed(*item) for item in self.recorder.records[self.compared :]]
        assert mine == [expected_observation(record) for record in records[self.compared :]]
        self.compared = len(records)

    def at(self, when: float, command: Command) -> CommandEffects | None:
        """A command at a time; while a pass is in flight the clock goes on to its end."""
        now, self.now = self.now, when
        try:
            return self.attempt(command)
        finally:
            if self.in_flight is not None:
                self.now = now

    def work(self) -> InternalEffects:
        """Transfers that are due settle; nothing at all happens while a pass is in flight."""
        busy = self.in_flight is not None
        before = self.rank.digest()
        mine, expected = (side.process_internal_work(self.now, busy) for side in (self.rank, self.model))
        assert plain(mine) == plain(expected)
        if busy:
            assert self.rank.digest() == before
            assert mine == InternalEffects()
        self.index.replay(mine.kv_events)
        self.compare()
        return mine

    def due(self) -> bool:
        deadline = self.rank.next_internal_deadline_ms()
        return deadline is not None and deadline <= self.now

    def go_on_with_a_fork(self) -> None:
        """The fork takes over, the original runs away from it."""
        original, self.rank = self.rank, self.rank.fork()
        start = self.rank.digest()
        assert start == original.digest()
        original.observer = None
        now = self.now
        for _ in range(4):
            deadline = original.next_internal_deadline_ms()
            if deadline is not None:
                now = max(now, deadline)
                original.process_internal_work(now, False)
            outcome = original.execute_pass(now)
            now = outcome.end_ms
            original.complete_pass(outcome.pending, now)
        original.check_integrity()
        assert self.rank.digest() == start
        self.compare()

    def reload(self) -> None:
        saved = pickle.loads(pickle.dumps(self.rank.snapshot()))
        other = SchedulerRank(self.identity, self.config, observer=self.recorder)
        other.restore(saved)
        assert other.digest() == self.rank.digest()
        self.rank = other
        self.compare()


class History:
    """Commands at any time, passes, transfers, forks and clocks that jump."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pair = OffloadPair(random_config(self.rng), RankIdentity(2))
        self.next = 1
        #: the last pass did nothing, and nothing has happened since
        self.idle = False
        self.trail: list[str] = []

    def prompt(self) -> list[int]:
        rng = self.rng
        family = rng.randrange(3) * 1000
        shared, fresh = rng.choice([0, 4, 8, 12, 12]), rng.randrange(10)
        return [family + i for i in range(shared)] + [self.next * 10_000 + i for i in range(fresh)] or [family]

    def command(self) -> None:
        rng, pair = self.rng, self.pair
        twin = pair.model
        when = pair.now
        if pair.in_flight is not None:
            when += rng.random() * (pair.in_flight[0].end_ms - pair.now)
        self.idle = False
        number, self.next = self.next, self.next + 1
        tokens, out = self.prompt(), rng.choice([0, 1, 2, 5])
        planned = [tokens[-1] + 1 + i for i in range(out)] if rng.random() < 0.3 else None
        request = Request(number, tokens, out, planned)
        handoffs = [*twin.handoffs.registered, *twin.handoffs.held, *twin.handoffs.reserved, *twin.handoffs.active]
        choice = rng.random()
        if choice < 0.06:
            pair.at(when, SubmitHandoffPrefill(number, request))
        elif choice < 0.10:
            pair.at(when, ReserveDestination(number, request))
        elif choice < 0.22 and handoffs:
            kind = rng.choice([ReleaseSource, CancelSource, ActivateDestination, CancelDestination])
            pair.at(when, kind(rng.choice(handoffs)))
        elif choice < 0.42 and twin.requests:
            # Rather those that wait for transfers, if there are any.
            waiting = [other.request_id for other in twin.connector]
            live = [*twin.requests]
            pair.at(
                when, CancelRequest(rng.choice(waiting if waiting and rng.random() < 0.6 else live), rng.random() < 0.3)
            )
        elif choice < 0.46 and twin.requests:
            # An id that is live is refused and nothing changes.
            pair.at(when, Submit(Request(rng.choice([*twin.requests]), tokens, out)))
        else:
            pair.at(when, Submit(request))

    def advance(self) -> bool:
        """What happens next without a command; False if nothing does."""
        pair = self.pair
        deadline = pair.rank.next_internal_deadline_ms()
        if pair.in_flight is not None:
            pair.complete()
        elif pair.due():
            pair.work()
            self.idle = False
        elif pair.rank.is_ready() and not self.idle:
            pair.execute()
            self.idle = pair.model.last_pass_effect_free
        elif deadline is not None:
            pair.now = deadline
        else:
            if not self.idle:
                return False
            self.idle = False
            return pair.unblock() or pair.fail_head()
        return True

    def step(self) -> None:
        rng, pair = self.rng, self.pair
        choice = rng.random()
        if choice < 0.4:
            self.command()
        elif choice < 0.43:
            pair.work()
        elif choice < 0.46 and pair.in_flight is None and not pair.due():
            pair.go_on_with_a_fork() if rng.random() < 0.5 else pair.reload()
        elif choice < 0.50 and pair.in_flight is None:
            pair.now += rng.choice([0.25, 1.0, 7.5])
        else:
            self.advance()
        self.trail.append(pair.rank.digest())

    def finish(self) -> None:
        """Let everything end; what only a command can end gets one."""
        pair = self.pair
        for _ in range(3000):
            if self.advance():
                continue
            pair.end_handoffs()
            if pair.rank.is_drained():
                return
            self.idle = False
            if pair.model.last_pass_effect_free and pair.model.handoffs.pending:
                # It waits for blocks of a request that may not pass it.
                pair.once(CancelDestination(pair.model.handoffs.pending[0].handoff_id))
        raise AssertionError(f"not drained: {pair.model.state()}")


def verify_end(pair: OffloadPair) -> None:
    """No slot is lost, no pin is left, every load ended once."""
    assert pair.model.host is not None
    metrics = pair.rank.metrics()
    assert metrics.active_blocks == metrics.running_requests == metrics.waiting_requests == 0
    assert metrics.inactive_blocks + pair.model.pool.free == metrics.total_blocks
    assert pair.rank.next_internal_deadline_ms() is None
    assert all(entry.pins == 0 and entry.pending is None for entry in pair.model.host.entries.values())
    queued: list[int | None] = []
    ended: list[int | None] = []
    for record in pair.model.host.records:
        if record.kind == "load_queued":
            queued.append(record.transfer_id)
        if record.kind in ("load_completed", "load_cancelled"):
            ended.append(record.transfer_id)
    assert len(set(queued)) == len(queued)
    assert sorted(queued, key=str) == sorted(ended, key=str)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_histories_agree_with_the_model(part: int) -> None:
    for seed in range(part, EXAMPLES, PARTS):
        history = History(seed)
        try:
            for _ in range(STEPS):
                history.step()
            history.finish()
            verify_end(history.pair)
        except BaseException as error:
            error.add_note(f"history {seed}")
            raise


def test_the_same_history_gives_the_same_digests() -> None:
    for seed in range(0, EXAMPLES, 20):
        one, other = History(seed), History(seed)
        for history in (one, other):
            for _ in range(STEPS):
                history.step()
        assert one.trail == other.trail


def test_histories_are_rich() -> None:
    """What the comparison is about does happen in it."""
    kinds: dict[str, int] = {}
    unfittable = 0
    for seed in range(60):
        history = History(seed)
        for _ in range(STEPS):
            history.step()
        assert history.pair.model.host is not None
        for record in history.pair.model.host.records:
            kinds[record.kind] = kinds.get(record.kind, 0) + 1
            unfittable += bool(record.structurally_unfittable)
    assert unfittable
    for kind in ("store_prepared", "store_submitted", "store_completed", "evicted", "capacity_retry"):
        assert kinds[kind] >= 20, kinds
    for kind in ("load_queued", "load_completed", "load_cancelled"):
        assert kinds.get(kind, 0) >= 1, kinds
