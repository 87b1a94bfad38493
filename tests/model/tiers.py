"""Tiers below the pool that take what is evicted: host, disk and object store over links that share their bandwidth.

Written from spec/host-offload.md part B and from no kernel: dictionaries and lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsim.config import EngineConfig
from kvsim.offload.links import SharedLink

#: an end at most this much later than asked for counts as reached
SLACK_MS = 1e-9

#: in the order in which ends at one time are settled
LINKS = ("g1_to_g2", "g2_to_g1", "g2_to_g3", "g3_to_g2", "g2_to_g4", "g4_to_g2")


@dataclass(eq=False)
class Cell:
    """One block in a lower tier."""

    #: it is still on its way in
    pending: bool = True
    #: copies, staged requests and swap-ins that read it
    pins: int = 0


class Store:
    """What one tier holds; `capacity` None is unbounded."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.cells: dict[int, Cell] = {}
        #: resident and read by nobody, the next victim first
        self.lru: list[int] = []

    @property
    def room(self) -> float:
        """Blocks that could come in now."""
        free = float("inf") if self.capacity is None else self.capacity - len(self.cells)
        return free + len(self.lru)

    def is_resident(self, key: int) -> bool:
        return key in self.cells and not self.cells[key].pending

    def take(self, key: int) -> int | None:
        """A place for a block that is on its way; the block that had to go for it."""
        assert key not in self.cells
        victim = None
        if self.capacity is not None and len(self.cells) == self.capacity:
            victim = self.lru.pop(0)
            del self.cells[victim]
        self.cells[key] = Cell()
        return victim

    def arrive(self, key: int) -> None:
        self.cells[key].pending = False
        self._rest(key)

    def pin(self, key: int) -> None:
        cell = self.cells[key]
        assert not cell.pending
        if cell.pins == 0:
            self.lru.remove(key)
        cell.pins += 1

    def unpin(self, key: int) -> None:
        self.cells[key].pins -= 1
        self._rest(key)

    def _rest(self, key: int) -> None:
        if self.cells[key].pins == 0:
            self.lru.append(key)

    def state(self) -> dict[str, Any]:
        return {
            "resident": sorted(key for key, cell in self.cells.items() if not cell.pending),
            "pending": sorted(key for key, cell in self.cells.items() if cell.pending),
            "pins": sorted((key, cell.pins) for key, cell in self.cells.items() if cell.pins),
            "lru": list(self.lru),
        }

    def check(self) -> None:
        assert self.capacity is None or len(self.cells) <= self.capacity
        assert sorted(self.lru) == sorted(k for k, cell in self.cells.items() if not cell.pending and not cell.pins)


@dataclass(eq=False)
class Offload:
    """The blocks that one allocation pushed out."""

    id: int
    #: batches that have not ended
    open_batches: int = 0
    #: slots of blocks that need no transfer: they are free when the offload is over
    spare_slots: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Batch:
    """Blocks that go down together; `slots` only of blocks that leave the pool."""

    keys: list[int]
    slots: list[int] = field(default_factory=list)
    offload: Offload | None = None


@dataclass(eq=False)
class SwapIn:
    """Blocks that come back to the pool."""

    #: in prompt order: those in G2, then what is staged from G3, then from G4
    keys: list[int]
    from_g3: list[int]
    from_g4: list[int]
    #: transfers of the first hop that have not ended
    staging: int = 0
    done: bool = False
    #: nobody waits for it any more; it goes on until the hop that runs has ended
    cancelled: bool = False


class Lower:
    """What lies below host memory: disk and object store with their links; several ranks may use it."""

    def __init__(self, config: EngineConfig) -> None:
        tiers = config.kvbm_tiers
        assert tiers is not None
        self.ids = ids = itertools.count()
        #: whose transfer it is, of those on the links here
        self.users: dict[int, Tiers] = {}
        #: what ranks that share it announce of its blocks
        self.known: dict[int, Any] = {}
        self.g3 = Store(tiers.num_g3_blocks) if tiers.num_g3_blocks else None
        self.g4 = Store(None) if tiers.g4_storage else None
        self.links = {
            name: SharedLink(getattr(tiers, f"{name}_gbps"), ids) for name in LINKS if "g3" in name or "g4" in name
        }


class Tiers:
    """G2, G3 and G4 of one rank.

    `free` is called with the slots that are free again, `announce` with
    ("stored" | "removed", block) for what enters and leaves host memory.
    `lower` is what it shares with others, its own by default.
    """

    def __init__(
        self,
        config: EngineConfig,
        free: Callable[[list[int]], None],
        announce: Callable[[str, int], None],
        lower: Lower | None = None,
    ) -> None:
        tiers = config.kvbm_tiers
        assert tiers is not None
        assert config.kv_cache_bytes_per_token is not None
        self.block_bytes = config.tokens_per_block * config.kv_cache_bytes_per_token
        self.batch_size = tiers.offload_batch_size or 32
        self.free = free
        self.announce = announce
        self.lower = lower = Lower(config) if lower is None else lower
        ids = lower.ids
        self.g2 = Store(tiers.num_g2_blocks)
        self.g3, self.g4 = lower.g3, lower.g4
        self.links = {name: SharedLink(getattr(tiers, f"{name}_gbps"), ids) for name in LINKS[:2]} | lower.links
        #: what each transfer on a link carries
        self.carried: dict[int, Batch | SwapIn] = {}
        #: batches that wait for a transfer to end, by link
        self.queued: dict[str, list[Batch]] = {"g1_to_g2": [], "g2_to_g3": [], "g2_to_g4": []}
        self.limits = {"g1_to_g2": self.batch_size, "g2_to_g3": 1, "g2_to_g4": self.batch_size}
        #: alive, the oldest first
        self.offloads: list[Offload] = []
        self.next_offload = 0
        #: (time, place of its link, transfer): what has ended and nobody has seen yet
        self.ended: list[tuple[float, int, int]] = []
        self.now = 0.0
        # What happened: swap-ins, blocks copied down in the background and staged, evicted blocks that were not moved.
        self.began = self.returned = self.cancelled = self.copied = self.staged = self.filtered = 0

    # ------------------------------------------------------------ time

    def next_deadline(self) -> float | None:
        if not self.carried:
            return None
        times = [time for time, _, _ in self.ended]
        times += [deadline for link in self.links.values() if (deadline := link.next_deadline_ms()) is not None]
        return min(times, default=None)

    def _carry(self, now: float) -> None:
        """Let the links work; what ends is not settled."""
        for place, name in enumerate(LINKS):
            for transfer, time in self.links[name].advance(now):
                self.lower.users.pop(transfer, self).ended.append((time, place, transfer))

    def tick(self, now: float) -> bool:
        """Settle what has ended by now, in order of time; whether anything had."""
        settled = False
        while (deadline := self.next_deadline()) is not None and deadline <= now + SLACK_MS:
            self._carry(deadline)
            due = sorted(item for item in self.ended if item[0] <= deadline + SLACK_MS)
            due.sort(key=lambda item: (item[1], item[2]))
            self.ended = [item for item in self.ended if item not in due]
            for time, place, transfer in due:
                self._settle(LINKS[place], self.carried.pop(transfer), time)
            settled = True
        self._carry(now)
        return settled

    def _start(self, name: str, blocks: int, now: float, carried: Batch | SwapIn) -> None:
        self._carry(now)
        transfer = self.links[name].start(now, blocks * self.block_bytes)
        self.carried[transfer] = carried
        if name in self.lower.links:
            self.lower.users[transfer] = self

    def _settle(self, name: str, carried: Batch | SwapIn, time: float) -> None:
        if isinstance(carried, SwapIn):
            if name == "g2_to_g1":
                carried.done = True
            else:
                self._end_staging(name, carried, time)
            return
        if name == "g1_to_g2":
            self._register(carried, time)
        else:
            store = self.g3 if name == "g2_to_g3" else self.g4
            assert store is not None
            for key in carried.keys:
                store.arrive(key)
                self.g2.unpin(key)
        self._start_queued(name, time)

    # ------------------------------------------------------------ down: G1 -> G2

    def enqueue(self, victims: Sequence[tuple[int, int | None]], now: float) -> Offload | None:
        """Take over evicted blocks (slot, key); None if nothing has to move and all slots are free again.

        A block without key left a copy behind in the pool.
        """
        offload = Offload(self.next_offload)
        passed: list[tuple[int, int]] = []
        for slot, key in victims:
            if key is None or key in self.g2.cells or self.g2.room < 1:
                offload.spare_slots.append(slot)
                self.filtered += 1
                continue
            self._take_place(key)
            passed.append((slot, key))
        if not passed:
            self.free(offload.spare_slots)
            return None
        self.next_offload += 1
        self.offloads.append(offload)
        for first in range(0, len(passed), self.batch_size):
            part = passed[first : first + self.batch_size]
            offload.open_batches += 1
            self.queued["g1_to_g2"].append(Batch([key for _, key in part], [slot for slot, _ in part], offload))
        self._start_queued("g1_to_g2", now)
        return offload

    def follow(self, offload: Offload) -> Offload | None:
        """What a request that waits for an offload waits for now."""
        if offload in self.offloads:
            return offload
        return self.offloads[0] if self.offloads else None

    def _take_place(self, key: int) -> None:
        victim = self.g2.take(key)
        if victim is not None:
            self.announce("removed", victim)

    def _start_queued(self, name: str, now: float) -> None:
        queue = self.queued[name]
        while queue and self._on_link(name) < self.limits[name]:
            batch = queue.pop(0)
            self._start(name, len(batch.keys), now, batch)

    def _on_link(self, name: str) -> int:
        """Its own transfers on a link that are not settled."""
        place = LINKS.index(name)
        active = sum(transfer.transfer_id in self.carried for transfer in self.links[name].active)
        return active + sum(other == place for _, other, _ in self.ended)

    def _register(self, batch: Batch, time: float) -> None:
        assert batch.offload is not None
        for key in batch.keys:
            self.g2.arrive(key)
            self.announce("stored", key)
        self.free(batch.slots)
        batch.offload.open_batches -= 1
        if batch.offload.open_batches == 0:
            self.free(batch.offload.spare_slots)
            self.offloads.remove(batch.offload)
        self._copy_down(batch.keys, "g2_to_g3", self.g3, time)
        self._copy_down(batch.keys, "g2_to_g4", self.g4, time)

    def _copy_down(self, keys: Sequence[int], name: str, store: Store | None, time: float) -> None:
        if store is None:
            return
        passed = []
        for key in keys:
            if key not in store.cells and store.room >= 1:
                store.take(key)
                self.g2.pin(key)
                passed.append(key)
        self.copied += len(passed)
        self.queued[name] += [
            Batch(passed[first : first + self.batch_size]) for first in range(0, len(passed), self.batch_size)
        ]
        self._start_queued(name, time)

    # ------------------------------------------------------------ up: swap-in

    def plan(self, keys: Sequence[int]) -> SwapIn | None:
        """What of these blocks, from the first on, can come back; the part in G2 is pinned."""
        in_g2 = list(itertools.takewhile(self.g2.is_resident, keys))
        in_g3 = self._run_below(self.g3, keys[len(in_g2) :])
        in_g4 = self._run_below(self.g4, keys[len(in_g2) + len(in_g3) :])
        for key in in_g2:
            self.g2.pin(key)
        if len(in_g3) + len(in_g4) > self.g2.room:
            in_g3, in_g4 = [], []
        swap = SwapIn([*in_g2, *in_g3, *in_g4], in_g3, in_g4)
        return swap if swap.keys else None

    def _run_below(self, store: Store | None, keys: Sequence[int]) -> list[int]:
        """Leading blocks that are in a lower tier; one that is in G2, or on its way there, cannot be staged."""
        if store is None:
            return []
        return list(itertools.takewhile(lambda key: store.is_resident(key) and key not in self.g2.cells, keys))

    def give_up(self, swap: SwapIn) -> None:
        """A plan that came to nothing."""
        for key in reversed(swap.keys[: len(swap.keys) - len(swap.from_g3) - len(swap.from_g4)]):
            self.g2.unpin(key)

    def begin(self, swap: SwapIn, now: float) -> None:
        self.began += 1
        self.staged += len(swap.from_g3) + len(swap.from_g4)
        for key in (*swap.from_g3, *swap.from_g4):
            self._take_place(key)
        for name, store, keys in (("g3_to_g2", self.g3, swap.from_g3), ("g4_to_g2", self.g4, swap.from_g4)):
            if keys:
                assert store is not None
                for key in keys:
                    store.pin(key)
                swap.staging += 1
                self._start(name, len(keys), now, swap)
        if not swap.staging:
            self._start("g2_to_g1", len(swap.keys), now, swap)

    def _end_staging(self, name: str, swap: SwapIn, time: float) -> None:
        store, keys = (self.g3, swap.from_g3) if name == "g3_to_g2" else (self.g4, swap.from_g4)
        assert store is not None
        for key in reversed(keys):
            store.unpin(key)
        swap.staging -= 1
        if swap.staging:
            return
        for key in (*swap.from_g3, *swap.from_g4):
            self.g2.arrive(key)
            self.g2.pin(key)
            self.announce("stored", key)
        if swap.cancelled:
            swap.done = True
        else:
            self._start("g2_to_g1", len(swap.keys), time, swap)

    def release(self, swap: SwapIn) -> None:
        """A swap-in is over: nobody reads its sources any more."""
        self.returned += not swap.cancelled
        self.cancelled += swap.cancelled
        for key in reversed(swap.keys):
            self.g2.unpin(key)

    # ------------------------------------------------------------ for comparison

    def swaps(self) -> list[SwapIn]:
        return [carried for carried in self.carried.values() if isinstance(carried, SwapIn)]

    def state(self) -> dict[str, Any]:
        return {
            "g2": self.g2.state(),
            "g3": None if self.g3 is None else self.g3.state(),
            "g4": None if self.g4 is None else self.g4.state(),
            "offloads": len(self.offloads),
            "queued": {name: [batch.keys for batch in queue] for name, queue in self.queued.items()},
            "on_links": [self._on_link(name) for name in LINKS],
        }

    def check(self, parked: Sequence[SwapIn]) -> None:
        for store in (self.g2, self.g3, self.g4):
            if store is not None:
                store.check()
        batches = [carried for carried in self.carried.values() if isinstance(carried, Batch)]
        waiting = [batch for queue in self.queued.values() for batch in queue]
        for offload in self.offloads:
            assert offload.open_batches == sum(batch.offload is offload for batch in (*batches, *waiting))
            assert offload.open_batches > 0
        pins: dict[int, int] = {}
        for batch in (*batches, *waiting):
            if batch.offload is None:
                for key in batch.keys:
                    pins[key] = pins.get(key, 0) + 1
        for swap in parked:
            staged = set() if swap.staging == 0 else {*swap.from_g3, *swap.from_g4}
            for key in swap.keys:
                if key not in staged:
                    pins[key] = pins.get(key, 0) + 1
        assert {key: cell.pins for key, cell in self.g2.cells.items() if cell.pins} == pins
        assert set(self.swaps()) == {swap for swap in parked if not swap.done}
        assert sum(map(self._on_link, LINKS)) == len(self.carried)
        for name, queue in self.queued.items():
            assert not queue or self._on_link(name) == self.limits[name]

    def held_slots(self) -> list[int]:
        """Slots of the pool that are quarantined."""
        batches = [carried for carried in self.carried.values() if isinstance(carried, Batch)]
        batches += self.queued["g1_to_g2"]
        slots = [slot for batch in batches for slot in batch.slots]
        return slots + [slot for offload in self.offloads for slot in offload.spare_slots]
