"""A consumer of KV events: what a router makes of a stream, and everything that could be wrong with one.

`KvIndex` is the consumer. `watched_streams` puts one on every stream that leaves a rank or a run, in whatever test;
`conftest.py` keeps it on for the whole session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy.typing as npt
import pytest

from kvsim.contract import Stored
from kvsim.layout import StorageTier
from kvsim.rank import KvEvents, SchedulerRank
from kvsim.replay.run import Run
from kvsim.replay.system import System

DEVICE = "device"
TIERS = [tier.name.lower() for tier in StorageTier]
_REMOVED, _HAS_PARENT = 1, 1


class KvIndex:
    """The blocks of one rank by storage tier, from its events; any inconsistency is an error.

    Event ids count from 0 without gaps, over all tiers. On every tier a block that is present is not stored again and
    one that is not is not removed. On the device the parent of a store is present. Lower tiers forget in an order of
    their own, so there the parent need only have been announced once, on any tier.

    Parameters
    ----------
    first_id : int, optional
        Id of the first event; None takes whatever comes, for streams that are joined in the middle.
    """

    def __init__(self, *, first_id: int | None = 0) -> None:
        self.next_id = first_id
        self.tiers: dict[str, set[int]] = {DEVICE: set()}
        #: position in the prompt of every block ever announced
        self.positions: dict[int, int] = {}
        self.stores = 0
        self.removals = 0

    @property
    def present(self) -> set[int]:
        """Blocks on the device."""
        return self.tiers[DEVICE]

    def copy(self) -> KvIndex:
        other = KvIndex(first_id=self.next_id)
        other.tiers = {tier: set(present) for tier, present in self.tiers.items()}
        other.positions = dict(self.positions)
        other.stores, other.removals = self.stores, self.removals
        return other

    # ------------------------------------------------------------ the forms in which events come

    def replay(self, events: Iterable[Any]) -> None:
        """Events as `kvsim.contract.KvEvent`."""
        if isinstance(events, KvEvents):
            self.rows(events.events, events.blocks)
            return
        for event in events:
            data = event.data
            if isinstance(data, Stored):
                hashes = [block.block_hash for block in data.blocks]
                self.store(event.event_id, event.storage_tier, data.parent_hash, hashes, data.start_position)
            else:
                self.remove(event.event_id, event.storage_tier, list(data.block_hashes))

    def rows(self, events: npt.NDArray[Any], blocks: npt.NDArray[Any]) -> None:
        """Events as rows of `layout.EVENT` and `layout.EVENT_BLOCK`."""
        hashes = blocks["block_hash"].tolist()
        names = ("event_id", "parent_hash", "first", "count", "kind", "flags", "tier", "start")
        for number, parent, first, count, kind, flags, tier, start in zip(
            *(events[name].tolist() for name in names), strict=True
        ):
            found = hashes[first : first + count]
            if kind == _REMOVED:
                self.remove(number, TIERS[tier], found)
            else:
                position = start if start >= 0 else None
                self.store(number, TIERS[tier], parent if flags & _HAS_PARENT else None, found, position)

    def recorded(self, events: Iterable[tuple[Any, ...]]) -> None:
        """Events as `model.recording.plain_event` gives them."""
        for number, tier, kind, parent, blocks, start in events:
            if kind == "stored":
                self.store(number, tier, parent, [block[0] for block in blocks], start)
            else:
                self.remove(number, tier, list(blocks))

    # ------------------------------------------------------------ one event

    def store(self, event_id: int, tier: str, parent: int | None, hashes: list[int], start: int | None) -> None:
        self._number(event_id)
        assert hashes, f"event {event_id} stores nothing"
        present = self.tiers.setdefault(tier, set())
        if parent is None:
            position = 0
        else:
            where = present if tier == DEVICE else self.positions
            assert parent in where, f"event {event_id}: parent {parent} is not on {tier}"
            position = self.positions[parent] + 1
        assert start is None or start == position, f"event {event_id}: starts at {start}, its parent ends at {position}"
        for block in hashes:
            assert block not in present, f"event {event_id}: block {block} is stored twice on {tier}"
            present.add(block)
            assert self.positions.setdefault(block, position) == position, f"event {event_id}: block {block} moved"
            position += 1
        self.stores += len(hashes)

    def remove(self, event_id: int, tier: str, hashes: list[int]) -> None:
        self._number(event_id)
        assert hashes, f"event {event_id} removes nothing"
        present = self.tiers.setdefault(tier, set())
        for block in hashes:
            assert block in present, f"event {event_id}: removed block {block} is not on {tier}"
            present.remove(block)
        self.removals += len(hashes)

    def _number(self, event_id: int) -> None:
        assert self.next_id is None or event_id == self.next_id, f"event {event_id} where {self.next_id} was due"
        self.next_id = event_id + 1


class IndexSink:
    """A sink of a live engine that indexes what each rank publishes."""

    delivery = "inline"

    def __init__(self) -> None:
        self.ranks: dict[int, KvIndex] = {}

    def kv_events_with_tier(self, dp_rank: int, at_ms: float, events: Iterable[Any]) -> None:
        self.ranks.setdefault(dp_rank, KvIndex()).replay(events)

    @property
    def stores(self) -> int:
        return sum(index.stores for index in self.ranks.values())


# ---------------------------------------------------------------- every stream of every test


class _Streams:
    """The index of every stream, by the object it comes from.

    Neither ranks nor runs can be referred to weakly, so they are known by address. A new object at an old address
    begins a new stream, which is why all that make one are watched.
    """

    def __init__(self) -> None:
        self.indices: dict[tuple[int, int], KvIndex] = {}
        #: by digest of the rank: what belongs to a snapshot, wherever it has been in between
        self.saved: dict[str, KvIndex] = {}

    def begin(self, owner: object, stream: int = 0, index: KvIndex | None = None) -> None:
        self.indices[id(owner), stream] = index or KvIndex()

    def of(self, owner: object, stream: int = 0) -> KvIndex | None:
        return self.indices.get((id(owner), stream))

    def of_rank(self, fleet: object, rank: int) -> KvIndex:
        return self.indices.setdefault((id(fleet), rank), KvIndex())

    def forget(self, owner: object) -> None:
        for key in [key for key in self.indices if key[0] == id(owner)]:
            del self.indices[key]


class _TappedFleet:
    """A `Fleet` of which `System` reads events: they are indexed on their way."""

    def __init__(self, fleet: Any, streams: _Streams) -> None:
        self.fleet = fleet
        self.streams = streams

    def take_events(self, rank: int) -> Any:
        seen = self.fleet.take_events(rank)
        if seen is not None:
            self.streams.of_rank(self.fleet, rank).rows(*seen)
        return seen


@contextlib.contextmanager
def watched_streams() -> Iterator[None]:
    """Index what every rank drains, what every placement is shown and what every run hands out.

    Streams of ranks restored from a snapshot that nobody saw being taken are left alone.
    """
    streams = _Streams()
    with pytest.MonkeyPatch.context() as patch:

        def around(owner: type, name: str) -> Callable[[Callable[..., Any]], None]:
            original = getattr(owner, name)

            def replace(make: Callable[..., Any]) -> None:
                patch.setattr(owner, name, make(original))

            return replace

        @around(SchedulerRank, "__init__")
        def _(original: Any) -> Any:
            def made(rank: Any, *arguments: Any, **options: Any) -> None:
                original(rank, *arguments, **options)
                streams.begin(rank)

            return made

        @around(SchedulerRank, "fork")
        def _(original: Any) -> Any:
            def forked(rank: Any) -> Any:
                other, index = original(rank), streams.of(rank)
                streams.forget(other)
                if index is not None:
                    streams.begin(other, index=index.copy())
                return other

            return forked

        @around(SchedulerRank, "snapshot")
        def _(original: Any) -> Any:
            def saved(rank: Any) -> Any:
                snapshot, index = original(rank), streams.of(rank)
                if index is not None:
                    streams.saved[rank.digest()] = index.copy()
                return snapshot

            return saved

        @around(SchedulerRank, "restore")
        def _(original: Any) -> Any:
            def restored(rank: Any, snapshot: Any) -> None:
                original(rank, snapshot)
                streams.forget(rank)
                index = streams.saved.get(rank.digest())
                if index is not None:
                    streams.begin(rank, index=index.copy())

            return restored

        @around(SchedulerRank, "_drain_events")
        def _(original: Any) -> Any:
            def drained(rank: Any) -> Any:
                events, index = original(rank), streams.of(rank)
                if index is not None and len(events):
                    index.replay(events)
                return events

            return drained

        @around(System, "__init__")
        def _(original: Any) -> Any:
            def made(system: Any, *arguments: Any, **options: Any) -> None:
                original(system, *arguments, **options)
                streams.forget(system.fleet)

            return made

        @around(System, "_observe")
        def _(original: Any) -> Any:
            def observed(system: Any, pool: Any) -> None:
                fleet = system.fleet
                system.fleet = _TappedFleet(fleet, streams)
                try:
                    original(system, pool)
                finally:
                    system.fleet = fleet

            return observed

        @around(Run, "kv_events")
        def _(original: Any) -> Any:
            def taken(run: Any, worker: int = 0) -> Any:
                events, blocks = original(run, worker)
                # A placement that follows events has taken the first of them, and they were indexed there.
                if len(events) and not events["event_id"][0]:
                    KvIndex().rows(events, blocks)
                return events, blocks

            return taken

        yield
