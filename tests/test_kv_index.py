"""The consumer that watches KV events finds what is wrong with a stream, and watches all of them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import kvsim
from kv_index import KvIndex
from kvsim import EngineConfig, RankIdentity, SchedulerRank
from kvsim._core.state import RankState
from kvsim.contract import KvEvent, Removed, Stored, StoredBlock
from kvsim.rank import KvEvents
from support import Engine


def stored(number: int, parent: int | None, *hashes: int, tier: str = "device", start: int | None = None) -> KvEvent:
    return KvEvent(number, 0, 0, Stored(parent, tuple(StoredBlock(block, 0) for block in hashes), start), tier)


def removed(number: int, *hashes: int, tier: str = "device") -> KvEvent:
    return KvEvent(number, 0, 0, Removed(hashes), tier)


FIRST = stored(0, None, 10, 11)


def test_a_sound_stream_is_followed_by_tier() -> None:
    index = KvIndex()
    index.replay([FIRST, stored(1, 10, 20), stored(2, 10, 11, tier="host_pinned", start=1), removed(3, 11)])
    index.replay([removed(4, 20), stored(5, 10, 11), removed(6, 11, tier="host_pinned")])
    assert index.tiers == {"device": {10, 11}, "host_pinned": set()}
    assert (index.stores, index.removals) == (5, 3)


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (stored(1, 11, 10), "stored twice"),
        (stored(1, 11, 12, 12), "stored twice"),
        (stored(1, 12, 13), "parent 12 is not on device"),
        (stored(1, 12, 13, tier="host_pinned"), "parent 12 is not on host_pinned"),
        (removed(1, 12), "removed block 12 is not on device"),
        (removed(1, 10, 10), "removed block 10 is not on device"),
        (removed(1, 10, tier="host_pinned"), "removed block 10 is not on host_pinned"),
        (stored(2, 11, 12), "event 2 where 1 was due"),
        (stored(0, 11, 12), "event 0 where 1 was due"),
        (stored(1, 10, 11, tier="host_pinned", start=0), "starts at 0"),
        (stored(1, None, 11, tier="host_pinned"), "block 11 moved"),
        (stored(1, 11), "stores nothing"),
        (removed(1), "removes nothing"),
    ],
)
def test_what_cannot_be_indexed_is_named(event: KvEvent, what: str) -> None:
    index = KvIndex()
    index.replay([FIRST])
    with pytest.raises(AssertionError, match=what):
        index.replay([event])


def test_a_parent_that_was_evicted_is_unknown_on_the_device_and_known_below() -> None:
    index = KvIndex()
    index.replay([FIRST, removed(1, 11), stored(2, 11, 12, tier="host_pinned", start=2)])
    with pytest.raises(AssertionError, match="parent 11 is not on device"):
        index.replay([stored(3, 11, 12)])


def test_rows_are_the_same_events() -> None:
    engine = Engine(num_gpu_blocks=4, emit_kv_events=True)
    engine.submit(1, range(9))
    engine.submit(2, range(100, 116))
    events = [event for step in engine.drain() for event in step.events]
    rows, objects = KvIndex(), KvIndex()
    objects.replay(events)
    engine = Engine(num_gpu_blocks=4, emit_kv_events=True)
    engine.submit(1, range(9))
    engine.submit(2, range(100, 116))
    for step in engine.drain():
        shown = step.effects.kv_events
        if len(shown):
            assert isinstance(shown, KvEvents)
            rows.rows(shown.events, shown.blocks)
    assert vars(rows) == vars(objects)
    assert rows.removals > 0


# ---------------------------------------------------------------- the watch over all tests


def first_store_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks tell their first store twice."""
    original = RankState.drain_events

    class Lying:
        def __init__(self, state: RankState) -> None:
            self.state = state

        def __getattr__(self, name: str) -> Any:
            return getattr(self.state, name)

        def drain_events(self) -> Any:
            events, blocks = original(self.state)
            twice = np.concatenate([events, events[-1:]])
            twice["event_id"] = events["event_id"][0] + np.arange(len(twice))
            return twice, blocks

    original_init = SchedulerRank.__init__

    def made(rank: Any, *arguments: Any, **options: Any) -> None:
        original_init(rank, *arguments, **options)
        rank._state = Lying(rank._state)

    monkeypatch.setattr(SchedulerRank, "__init__", made)


def test_the_stream_of_any_rank_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    first_store_again(monkeypatch)
    engine = Engine(num_gpu_blocks=8, emit_kv_events=True)
    engine.submit(1, range(9))
    with pytest.raises(AssertionError, match="stored twice on device"):
        engine.drain()


def test_forks_and_restored_ranks_go_on_with_the_stream_of_their_origin() -> None:
    engine = Engine(num_gpu_blocks=8, emit_kv_events=True)
    engine.submit(1, range(9))
    engine.drain()
    saved = pickle.loads(pickle.dumps(engine.rank.snapshot()))
    other = SchedulerRank(RankIdentity(), engine.config)
    other.restore(saved)
    for rank in (engine.rank, engine.rank.fork(), other):
        engine.rank = rank
        engine.submit(2, range(24))
        events = [event for step in engine.drain() for event in step.events]
        # Not a root: a stream of its own could not begin like this.
        assert isinstance(events[0].data, Stored)
        assert events[0].data.parent_hash is not None
        assert events[0].event_id > 0


def test_what_a_placement_is_shown_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = KvIndex.rows
    monkeypatch.setattr(KvIndex, "rows", lambda index, *rows: (seen.append(len(rows[0])), original(index, *rows)))
    requests = [{"arrival_time_ms": 100.0 * i, "input_tokens": 64, "output_tokens": 2} for i in range(3)]
    kvsim.replay(requests, EngineConfig(block_size=16, num_gpu_blocks=8), placement="kv_router")
    assert sum(seen) > 0
