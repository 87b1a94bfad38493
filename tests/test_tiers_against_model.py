"""Tiers below the pool, kernel against twin: whatever happens, both agree after every step and nothing is lost.

``KVSIM_EXAMPLES`` sets the number of random histories (default 24), for long runs.
"""

from __future__ import annotations

import math
import os
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvsim.config import EngineConfig, FixedTiming, KvbmTiers
from kvsim.contract import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    CommandContext,
    InternalEffects,
    RankIdentity,
    RankPass,
    ReleaseSource,
    Request,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from kvsim.errors import CommandError, SnapshotError
from kvsim.rank import SchedulerRank
from model.paged import PagedModel
from model.tiers import Lower
from support import TierIndex, plain, rank_state, same_effects

EXAMPLES = int(os.environ.get("KVSIM_EXAMPLES", "24"))
PARTS = 10
STEPS = 120
IDENTITY = RankIdentity(2)


def random_config(rng: random.Random) -> EngineConfig:
    """Pools that are always full over tiers that are always full; links from instantaneous to very slow."""
    below = rng.random() < 0.6
    tiers = KvbmTiers(
        num_g2_blocks=rng.choice([1, 2, 3, 4, 6] if below else [1, 2, 4, 8, 12, 40]),
        num_g3_blocks=rng.choice([0, 2, 6, 30, 30]) if below else 0,
        g4_storage=below and rng.random() < 0.4,
        offload_batch_size=rng.choice([1, 2, 3, 0]),
        **{
            f"{name}_gbps": rng.choice([0.0, 0.05, 0.3, 1.0, 1.0])
            for name in ("g1_to_g2", "g2_to_g1", "g2_to_g3", "g3_to_g2", "g2_to_g4", "g4_to_g2")
        },
    )
    nextn = rng.choice([None, None, None, 2])
    return EngineConfig(
        ruleset=rng.choice(["dynamo", "dynamo-1.3"]),
        worker_type=rng.choice(["aggregated", "aggregated", "prefill", "decode"]),
        num_gpu_blocks=rng.choice([2, 3, 4, 4, 6, 6, 9, 16]),
        block_size=rng.choice([2, 4]),
        max_num_seqs=rng.choice([1, 2, 4, None]),
        max_num_batched_tokens=rng.choice([3, 8, 16, 64, None]),
        max_model_len=rng.choice([None, None, None, 20]),
        preemption_mode=rng.choice(["lifo", "fifo"]),
        enable_chunked_prefill=rng.random() < 0.85,
        aic_nextn=nextn,
        aic_nextn_accept_rates=None if nextn is None else "0.7,0.4",
        speedup_ratio=0.0,
        kv_cache_bytes_per_token=250_000,
        emit_kv_events=rng.random() < 0.85,
        timing_model=FixedTiming(prefill_ms=rng.choice([0.0, 1.0, 5.0]), decode_ms=rng.choice([0.0, 1.0, 4.0])),
        kvbm_tiers=tiers,
    )


class Sides:
    """The twin and the kernel driven as one."""

    def __init__(self, config: EngineConfig, lower: Lower | None = None, owner: Any = None) -> None:
        self.config = config
        self.twin = PagedModel(IDENTITY, config, lower=lower)
        self.rank = SchedulerRank(IDENTITY, config)
        if owner is not None:
            self.rank._state.share_tiers(owner)
        self.index = TierIndex()
        self.now = 0.0
        self.in_flight: tuple[RankPass, RankPass] | None = None
        #: requests that were taken in, and ended
        self.live: set[int] = set()

    def compare(self) -> None:
        self.twin.check()
        self.rank.check_integrity()
        assert rank_state(self.rank) == self.twin.state()
        assert self.rank.metrics() == self.twin.metrics()
        for question in ("is_ready", "is_drained", "is_empty", "waiting_for_external_command"):
            assert getattr(self.rank, question)() == getattr(self.twin, question)(), question
        assert same_time(self.rank.next_internal_deadline_ms(), self.twin.next_internal_deadline_ms())
        mine, expected = self.rank.stuck_head(), self.twin.stuck_head()
        assert (mine and mine.request_id) == (expected and expected[0])

    def do(self, command: Command, at: float) -> None:
        """A command, or two refusals that change nothing."""
        context = CommandContext(at, self.in_flight is not None)
        mine_pending, pending = (None, None) if self.in_flight is None else [side.pending for side in self.in_flight]
        before = self.rank.digest()
        try:
            expected = self.twin.apply_command(command, context, pending)
        except CommandError:
            with pytest.raises(CommandError):
                self.rank.apply_command(command, context, mine_pending)
            assert self.rank.digest() == before
            self.compare()
            return
        mine = self.rank.apply_command(command, context, mine_pending)
        assert plain(mine) == plain(expected)
        self.index.replay(mine.kv_events)
        self.compare()

    def execute(self) -> None:
        mine, expected = self.rank.execute_pass(self.now), self.twin.execute_pass(self.now)
        assert same_time(mine.end_ms, expected.end_ms)
        assert plain(mine.start_effects) == plain(expected.start_effects)
        same_effects(mine.pending.effects, expected.pending.effects)
        assert bool(self.rank.header[0]["effect_free"]) == self.twin.last_pass_effect_free
        self.index.replay(mine.start_effects.kv_events)
        self.in_flight = mine, expected
        self.compare()

    def complete(self) -> None:
        assert self.in_flight is not None
        mine, expected = self.in_flight
        self.in_flight = None
        self.now = mine.end_ms
        shown = self.rank.complete_pass(mine.pending, self.now)
        same_effects(shown, self.twin.complete_pass(expected.pending, self.now))
        self.index.replay(shown.kv_events)
        self.compare()

    def _internal(self, call: Callable[[Any], InternalEffects]) -> None:
        mine, expected = call(self.rank), call(self.twin)
        assert plain(mine) == plain(expected)
        self.index.replay(mine.kv_events)
        self.compare()

    def tick(self, at: float) -> None:
        """What a driver does at a deadline: no admission of destinations while a pass is in flight."""
        if self.in_flight is not None:
            before = self.rank.digest()
            self._internal(lambda side: side.process_internal_work(at, True))
            assert self.rank.digest() == before
            self._internal(lambda side: side.tick_offload_transport_only(at))
        else:
            self._internal(lambda side: side.tick_offload_only(at))

    def unblock(self) -> bool:
        done = self.rank.unblock()
        assert done == self.twin.unblock()
        self.compare()
        return bool(done)

    def fail_head(self) -> bool:
        failed = self.rank.fail_head()
        if failed is None:
            assert self.twin.stuck_head() is None
            return False
        assert failed == self.twin.fail_head(self.now)
        self.compare()
        return True

    def fork_or_reload(self, rng: random.Random) -> None:
        """Go on with a copy; the original runs away from it."""
        original = self.rank
        if rng.random() < 0.5:
            self.rank = original.fork()
        else:
            self.rank = SchedulerRank(IDENTITY, self.config)
            self.rank.restore(pickle.loads(pickle.dumps(original.snapshot())))
        start = self.rank.digest()
        assert start == original.digest()
        now = self.now
        for _ in range(3):
            outcome = original.execute_pass(now)
            now = outcome.end_ms
            original.complete_pass(outcome.pending, now)
        original.check_integrity()
        assert self.rank.digest() == start
        self.compare()

    def digest(self) -> str:
        return str(self.rank.digest())


def same_time(mine: float | None, expected: float | None) -> bool:
    if mine is None or expected is None:
        return mine is expected
    return math.isclose(mine, expected, rel_tol=1e-12, abs_tol=1e-9)


class TwinAlone(Sides):
    """The twin without a kernel beside it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.twin = PagedModel(IDENTITY, config)
        self.index = TierIndex()
        self.now = 0.0
        self.in_flight = None

    def compare(self) -> None:
        self.twin.check()

    def do(self, command: Command, at: float) -> None:
        pending = None if self.in_flight is None else self.in_flight[1].pending
        try:
            effects = self.twin.apply_command(command, CommandContext(at, self.in_flight is not None), pending)
        except CommandError:
            return
        self.index.replay(effects.kv_events)
        self.compare()

    def execute(self) -> None:
        outcome = self.twin.execute_pass(self.now)
        self.index.replay(outcome.start_effects.kv_events)
        self.in_flight = outcome, outcome
        self.compare()

    def complete(self) -> None:
        assert self.in_flight is not None
        outcome, _ = self.in_flight
        self.in_flight = None
        self.now = outcome.end_ms
        self.index.replay(self.twin.complete_pass(outcome.pending, self.now).kv_events)
        self.compare()

    def _internal(self, call: Callable[[Any], InternalEffects]) -> None:
        self.index.replay(call(self.twin).kv_events)
        self.compare()

    def tick(self, at: float) -> None:
        busy = self.in_flight is not None
        self._internal(lambda side: side.tick_offload_transport_only(at) if busy else side.tick_offload_only(at))

    def unblock(self) -> bool:
        return self.twin.unblock()

    def fail_head(self) -> bool:
        if self.twin.stuck_head() is None:
            return False
        self.twin.fail_head(self.now)
        self.compare()
        return True

    def fork_or_reload(self, rng: random.Random) -> None:
        rng.random()

    def digest(self) -> str:
        return repr((self.now, self.twin.state()))


class History:
    """Commands at any time, passes, ticks, copies and clocks that jump."""

    def __init__(self, seed: int, sides: type[Sides] = Sides) -> None:
        self.rng = random.Random(seed)
        self.sides = sides(random_config(self.rng))
        self.next = 1
        self.idle = False
        self.trail: list[str] = []

    @property
    def twin(self) -> PagedModel:
        return self.sides.twin

    def prompt(self) -> list[int]:
        rng = self.rng
        family = rng.randrange(4) * 1000
        shared, fresh = rng.choice([0, 4, 8, 12, 12]), rng.choice([0, 1, 1, rng.randrange(10)])
        return [family + i for i in range(shared)] + [self.next * 10_000 + i for i in range(fresh)] or [family]

    def tick_until(self, when: float) -> None:
        """Everything that ends by then."""
        while (deadline := self.twin.next_internal_deadline_ms()) is not None and deadline <= when:
            self.sides.tick(max(deadline, self.sides.now))

    def command(self) -> None:
        rng, sides, twin = self.rng, self.sides, self.twin
        when = sides.now
        if sides.in_flight is not None:
            when += rng.random() * (sides.in_flight[0].end_ms - sides.now)
        self.tick_until(when)
        self.idle = False
        number, self.next = self.next, self.next + 1
        tokens, out = self.prompt(), rng.choice([0, 0, 1, 2, 5, 9])
        planned = [tokens[-1] + 1 + i for i in range(out)] if rng.random() < 0.3 else None
        request = Request(number, tokens, out, planned)
        table = twin.handoffs
        handoffs = [*table.registered, *table.held, *table.reserved, *table.active]
        handoffs += [entry.handoff_id for entry in table.pending]
        choice = rng.random()
        parked = [item.request.request_id for item in twin.parked if item.request is not None]
        if parked and rng.random() < 0.5:
            self.cancel(parked, when, request)
        elif choice < 0.06:
            sides.do(SubmitHandoffPrefill(number, request), when)
        elif choice < 0.13:
            sides.do(ReserveDestination(number, request), when)
        elif choice < 0.26 and handoffs:
            kind = rng.choice(
                [ReleaseSource, CancelSource, ActivateDestination, ActivateDestination, CancelDestination]
            )
            sides.do(kind(rng.choice(handoffs)), when)
        elif choice < 0.40 and twin.requests:
            self.cancel([*twin.requests], when, request)
        elif choice < 0.43 and twin.requests:
            sides.do(Submit(Request(rng.choice([*twin.requests]), tokens, out)), when)
        else:
            sides.do(Submit(request), when)

    def cancel(self, of: list[int], when: float, request: Request) -> None:
        number = self.rng.choice(of)
        self.sides.do(CancelRequest(number, self.rng.random() < 0.3), when)
        if self.rng.random() < 0.4:
            # The id may be used again while the old transfer still runs.
            self.sides.do(Submit(Request(number, request.tokens, request.max_output_tokens)), when)

    def advance(self) -> bool:
        """What happens next without a command; False if nothing does."""
        sides = self.sides
        deadline = self.twin.next_internal_deadline_ms()
        if sides.in_flight is not None:
            end = sides.in_flight[0].end_ms
            if deadline is not None and deadline <= end and self.rng.random() < 0.8:
                sides.tick(max(deadline, sides.now))
            else:
                sides.complete()
        elif deadline is not None and deadline <= sides.now:
            sides.tick(sides.now)
            self.idle = False
        elif self.twin.is_ready() and not self.idle:
            sides.execute()
            self.idle = self.twin.last_pass_effect_free
        elif deadline is not None:
            sides.now = max(deadline, sides.now)
            self.idle = False
        else:
            if not self.idle:
                return False
            self.idle = False
            return sides.unblock() or sides.fail_head()
        return True

    def step(self) -> None:
        rng, sides = self.rng, self.sides
        choice = rng.random()
        if choice < (0.4 if len(self.twin.requests) < 6 else 0.2):
            self.command()
        elif choice < 0.43:
            # A tick at any time, also at one that has passed already.
            sides.tick(max(0.0, sides.now - rng.choice([0.0, 0.0, 5.0])))
        elif choice < 0.46 and sides.in_flight is None:
            sides.fork_or_reload(rng)
        elif choice < 0.50 and sides.in_flight is None:
            sides.now += rng.choice([0.25, 1.0, 7.5])
        else:
            self.advance()
        self.trail.append(sides.digest())

    def finish(self) -> None:
        """Let everything end; what only a command can end gets one."""
        sides, handoffs = self.sides, self.twin.handoffs
        barren = 0
        for _ in range(5000):
            for handoff_id in list(handoffs.held):
                self.tick_until(sides.now)
                self.idle = False
                sides.do(ReleaseSource(handoff_id), sides.now)
            if barren > 100:
                # Oldest victims may take each other's blocks for ever; a driver ends the one that waits first.
                barren = 0
                self.tick_until(sides.now)
                sides.do(CancelRequest(self.twin.waiting[0].request_id), sides.now)
            preemptions = self.twin.preemptions_total
            before = sum(live.generated for live in self.twin.requests.values())
            if self.advance():
                produced = sum(live.generated for live in self.twin.requests.values()) != before
                barren = 0 if produced else barren + (self.twin.preemptions_total > preemptions)
                continue
            for handoff_id in list(handoffs.reserved):
                sides.do(ActivateDestination(handoff_id), sides.now)
            if self.twin.is_drained():
                return
            self.idle = False
            if self.twin.last_pass_effect_free and handoffs.pending:
                # It waits for blocks of a request that may not pass it.
                sides.do(CancelDestination(handoffs.pending[0].handoff_id), sides.now)
        raise AssertionError(f"not drained: {self.twin.state()}")

    def verify(self) -> None:
        """No slot is lost, no pin is left, nothing is under way."""
        twin, tiers = self.twin, self.twin.tiers
        assert tiers is not None
        metrics = twin.metrics()
        assert metrics.active_blocks == metrics.running_requests == metrics.waiting_requests == 0
        assert metrics.inactive_blocks + twin.pool.free == metrics.total_blocks
        assert not twin.parked
        assert twin.next_internal_deadline_ms() is None
        for store in (tiers.g2, tiers.g3, tiers.g4):
            if store is not None:
                assert all(cell.pins == 0 and not cell.pending for cell in store.cells.values())
                assert store.capacity is None or len(store.cells) <= store.capacity
        assert tiers.began == tiers.returned + tiers.cancelled


def play(seed: int, sides: type[Sides]) -> History:
    history = History(seed, sides)
    try:
        for _ in range(STEPS):
            history.step()
        history.finish()
        history.verify()
    except BaseException as error:
        error.add_note(f"history {seed}")
        raise
    return history


@pytest.mark.parametrize("part", range(PARTS))
def test_random_histories_agree_with_the_model(part: int) -> None:
    for seed in range(part, EXAMPLES, PARTS):
        play(seed, Sides)


@pytest.mark.parametrize("sides", [Sides, TwinAlone])
def test_the_same_history_twice_is_the_same(sides: type[Sides]) -> None:
    for seed in range(0, EXAMPLES, 20):
        assert play(seed, sides).trail == play(seed, sides).trail


def test_histories_of_the_twin_lose_nothing() -> None:
    """And what they are about does happen in them."""
    counts = dict.fromkeys(("began", "returned", "cancelled", "copied", "staged", "filtered"), 0)
    waits = 0
    for seed in range(100):
        history = History(seed, TwinAlone)
        for _ in range(STEPS):
            history.step()
            waits += bool(history.twin.state()["dependent"])
        history.finish()
        history.verify()
        for name in counts:
            counts[name] += getattr(history.twin.tiers, name)
    assert waits > 100
    assert counts["began"] > counts["cancelled"] > 0
    assert counts["copied"] > counts["staged"] > 0
    assert counts["filtered"] > 0


# ---------------------------------------------------------------- ranks that share G3, G4 and their links


class Sharer(Sides):
    """A twin and a kernel that share what lies below G2 with others of their kind; neither can be copied alone."""

    def fork_or_reload(self, rng: random.Random) -> None:
        with pytest.raises(SnapshotError, match="shares G3 or G4"):
            self.rank.fork()
        with pytest.raises(SnapshotError, match="shares G3 or G4"):
            self.rank.snapshot()


class SharingHistory(History):
    """A history of one of several ranks that use the same tiers below G2."""

    def __init__(self, seed: int, number: int, config: EngineConfig, lower: Lower, owner: Any) -> None:
        self.rng = random.Random(10 * seed + number)
        self.sides = Sharer(config, lower, owner)
        self.next = 1 + 1000 * number
        self.idle = False
        self.trail = []


def play_together(seed: int) -> list[SharingHistory]:
    """Three ranks, one of which leaves and is replaced by a new one; whoever is behind goes on."""
    rng = random.Random(seed)
    config = random_config(rng)
    while config.kvbm_tiers is None or not (config.kvbm_tiers.num_g3_blocks or config.kvbm_tiers.g4_storage):
        config = random_config(rng)
    lower, owner = Lower(config), SchedulerRank(IDENTITY, config)._state.make_owner()
    histories = [SharingHistory(seed, k, config, lower, owner) for k in range(3)]
    left: list[SharingHistory] = []
    try:
        for turn in range(STEPS):
            k = min(range(3), key=lambda k: histories[k].sides.now)
            histories[k].step()
            if turn % 20 == 0:
                for history in histories:
                    history.sides.compare()
            if turn == STEPS // 2:
                gone = histories[k]
                gone.finish()
                gone.sides.rank._state.leave_tiers()
                left.append(gone)
                histories[k] = SharingHistory(seed, 3, config, lower, owner)
        for history in histories:
            history.finish()
        for history in histories:
            history.verify()
            history.sides.compare()
    except BaseException as error:
        error.add_note(f"shared history {seed}")
        raise
    return [*left, *histories]


@pytest.mark.parametrize("part", range(PARTS))
def test_ranks_that_share_lower_tiers_agree_with_twins_that_do(part: int) -> None:
    for seed in range(part, max(PARTS, EXAMPLES // 20), PARTS):
        play_together(seed)


def test_shared_histories_twice_are_the_same() -> None:
    for seed in range(3):
        first, second = play_together(seed), play_together(seed)
        assert [history.trail for history in first] == [history.trail for history in second]


def test_shared_histories_bring_blocks_back() -> None:
    histories = [history for seed in range(10) for history in play_together(seed)]
    assert sum(history.twin.tiers.staged for history in histories if history.twin.tiers is not None) > 0
