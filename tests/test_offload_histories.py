"""Random histories of a rank with a host tier: nothing is lost, every load ends once, twins in time are equal."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from kvsim.config import EngineConfig, FixedTiming, NativeHostOffload
from kvsim.contract import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    CancelSource,
    ReleaseSource,
    Request,
    ReserveDestination,
    SubmitHandoffPrefill,
)
from kvsim.errors import CommandError
from kvsim.layout import OffloadEventKind as Kind
from offload_driver import LOAD_ENDS, Driver

HISTORIES = 1000
PARTS = 10


def config(rng: random.Random) -> EngineConfig:
    links = rng.choice([(1.0, 1.0), (0.0, 0.0), (0.1, 1.0), (1.0, 0.1), (0.0, 0.3), (0.05, 0.05)])
    return EngineConfig(
        num_gpu_blocks=rng.choice([3, 4, 6, 9, 16]),
        block_size=rng.choice([2, 4]),
        max_num_seqs=rng.choice([1, 2, 4]),
        max_num_batched_tokens=rng.choice([3, 8, 16, 64]),
        preemption_mode=rng.choice(["lifo", "fifo"]),
        enable_chunked_prefill=rng.random() < 0.85,
        speedup_ratio=0.0,
        kv_cache_bytes_per_token=250_000,
        emit_kv_events=rng.random() < 0.7,
        emit_kv_token_ids=False,
        timing_model=FixedTiming(prefill_ms=rng.choice([0.0, 1.0, 5.0]), decode_ms=rng.choice([0.0, 1.0, 4.0])),
        native_host_offload=NativeHostOffload(
            num_host_blocks=rng.choice([1, 2, 4, 7, 30]), d2h_bandwidth_gbps=links[0], h2d_bandwidth_gbps=links[1]
        ),
    )


class History:
    """Commands of many kinds at any time, passes and transfers between them."""

    def __init__(self, seed: int, *, check: bool) -> None:
        self.rng = random.Random(seed)
        self.driver = Driver(config(self.rng), check=check)
        self.live: list[int] = []
        self.handoffs: list[int] = []
        self.next = 1

    def prompt(self) -> list[int]:
        rng = self.rng
        family = rng.randrange(3) * 1000
        shared = rng.choice([0, 4, 8, 12, 12])
        fresh = rng.randrange(10)
        tokens = [family + i for i in range(shared)] + [self.next * 10_000 + i for i in range(fresh)]
        return tokens or [family]

    def command(self) -> None:
        rng, driver = self.rng, self.driver
        at = driver.now
        if driver.flight is not None:
            at += rng.random() * (driver.flight.end_ms - driver.now)
        number, self.next = self.next, self.next + 1
        choice = rng.random()
        request = Request(number, self.prompt(), rng.choice([0, 1, 2, 5]))
        if choice < 0.55 or not self.live:
            if choice < 0.04:
                driver.do(SubmitHandoffPrefill(number, request), at=at)
                self.handoffs.append(number)
            else:
                driver.submit(number, request.tokens, request.max_output_tokens, at=at)
            self.live.append(number)
        elif choice < 0.60:
            # A prompt that never fits is refused, and the history goes on.
            with contextlib.suppress(CommandError):
                driver.do(ReserveDestination(number, request), at=at)
                self.handoffs.append(number)
        elif choice < 0.72 and self.handoffs:
            kind = rng.choice([ReleaseSource, CancelSource, ActivateDestination, CancelDestination])
            driver.do(kind(rng.choice(self.handoffs)), at=at)
        else:
            # Rather those that wait for transfers, if there are any.
            number = rng.choice(driver.connector() or self.live if rng.random() < 0.5 else self.live)
            driver.do(CancelRequest(number, rng.random() < 0.3), at=at)

    def step(self) -> None:
        """One event, or a command at any moment before it."""
        if self.rng.random() < 0.45:
            self.command()
        elif not self.driver.advance() and self.rng.random() < 0.5:
            self.driver.now += self.rng.choice([0.0, 1.0, 7.5])

    def finish(self) -> None:
        """Let everything end; what only a command can end gets one."""
        self.driver.run()
        for handoff in self.handoffs:
            for kind in (CancelDestination, CancelSource):
                self.driver.do(kind(handoff))
            self.driver.run()


def verify(driver: Driver) -> None:
    rank = driver.rank
    assert rank.is_drained()
    assert rank.is_empty()
    assert rank.next_internal_deadline_ms() is None
    assert rank.metrics().active_blocks == 0
    assert rank.metrics().waiting_requests == 0
    entries = rank._state.view("host_entries")
    assert not entries["pins"][entries["pins"] > 0].size
    ends: dict[int | None, int] = {}
    for _, event in driver.seen(*LOAD_ENDS):
        ends[event.transfer_id] = ends.get(event.transfer_id, 0) + 1
    queued = [event.transfer_id for _, event in driver.seen(Kind.LOAD_QUEUED)]
    assert len(set(queued)) == len(queued)
    assert ends == dict.fromkeys(queued, 1)
    for first, second in (
        (Kind.STORE_PREPARED, Kind.STORE_SUBMITTED),
        (Kind.STORE_SUBMITTED, Kind.STORE_COMPLETED),
    ):
        assert [e.transfer_id for _, e in driver.seen(first)] == [e.transfer_id for _, e in driver.seen(second)]
    for _, event in driver.seen(Kind.STORE_SUBMITTED, Kind.LOAD_QUEUED):
        assert event.completes_at_ms is not None
        assert event.completes_at_ms >= event.at_ms


def indexed(driver: Driver) -> None:
    """The KV events of each tier can be followed: nothing is stored twice, nothing is removed that is not there."""
    there: dict[str, set[int]] = {"device": set(), "host_pinned": set()}
    for expected, (_, event) in enumerate(driver.kv):
        assert event.event_id == expected
        mine = there[event.storage_tier]
        blocks: Any = event.data
        if hasattr(blocks, "blocks"):
            new = [block.block_hash for block in blocks.blocks]
            assert not mine & set(new)
            assert event.storage_tier == "host_pinned" or blocks.parent_hash is None or blocks.parent_hash in mine
            mine |= set(new)
        else:
            assert mine >= set(blocks.block_hashes)
            mine -= set(blocks.block_hashes)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_histories_end_with_nothing_lost(part: int) -> None:
    for seed in range(part * HISTORIES // PARTS, (part + 1) * HISTORIES // PARTS):
        # Invariants after every step of each tenth history; the ends of all.
        history = History(seed, check=seed % 10 == 0)
        try:
            for _ in range(60):
                history.step()
            history.finish()
            history.driver.rank.check_integrity()
            verify(history.driver)
            indexed(history.driver)
        except BaseException as error:
            error.add_note(f"history {seed}")
            raise


@pytest.mark.parametrize("seed", range(60))
def test_two_runs_and_a_fork_are_equal(seed: int) -> None:
    first, second = History(seed, check=False), History(seed, check=False)
    for step in range(60):
        first.step()
        second.step()
        assert first.driver.rank.digest() == second.driver.rank.digest()
        if step == 30:
            # The fork goes on in place of the original.
            second.driver.rank = second.driver.rank.fork()
    first.finish()
    second.finish()
    assert first.driver.rank.digest() == second.driver.rank.digest()
    assert first.driver.recorder.records == second.driver.recorder.records
    assert first.driver.kv == second.driver.kv
