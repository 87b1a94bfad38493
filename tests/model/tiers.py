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

    def take(self, key: int) -> None:
        """A place for a block that is on its way; the oldest block goes if need be."""
        assert key not in self.cells
        if self.capacity is not None and len(self.cells) == self.capacity:
            del self.cells[self.lru.pop(0)]
        self.cells[key] = Cell()

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
class Batch:
    """Blocks that go down together; `slots` only of blocks that leave the pool."""

    keys: list[int]
    slots: list[int] = field(default_factory=list)


@dataclass(eq=False)
class SwapIn:
    """Blocks that come back to the pool."""

    #: in prompt order: those in G2, then what is staged from G3, then from G4
    keys: list[int]
    from_g3: list[int]
    from_g4: list[int]
    #: links of the first hop whose transfer has not ended
    staging: list[str] = field(default_factory=list)
    done: bool = False
    #: nobody waits for it any more
    cancelled: bool = False


class Lower:
    """What lies below host memory: disk and object store with their links."""

    def __init__(self, config: EngineConfig, ids: Any = None) -> None:
        tiers = config.kvbm_tiers
        assert tiers is not None
        ids = itertools.count() if ids is None else ids
        self.g3 = Store(tiers.num_g3_blocks) if tiers.num_g3_blocks else None
        self.g4 = Store(None) if tiers.g4_storage else None
        self.links = {
            name: SharedLink(getattr(tiers, f"{name}_gbps"), ids) for name in LINKS if "g3" in name or "g4" in name
        }


class Tiers:
    """G2, G3 and G4 of one rank.

    `free` is called with the slots that are free again, `announce` with
    ("stored" | "removed", blocks) for what enters and leaves host memory, and
    `finish` with a swap-in whose blocks have come.
    """

    def __init__(
        self,
        config: EngineConfig,
        free: Callable[[list[int]], None],
        announce: Callable[[str, list[int]], None],
        finish: Callable[[SwapIn], None],
    ) -> None:
        tiers = config.kvbm_tiers
        assert tiers is not None
        assert config.kv_cache_bytes_per_token is not None
        self.block_bytes = config.tokens_per_block * config.kv_cache_bytes_per_token
        self.batch_size = tiers.offload_batch_size or 32
        self.free = free
        self.announce = announce
        self.finish = finish
        ids = itertools.count()
        lower = Lower(config, ids)
        self.g2 = Store(tiers.num_g2_blocks)
        self.g3, self.g4 = lower.g3, lower.g4
        self.links = {name: SharedLink(getattr(tiers, f"{name}_gbps"), ids) for name in LINKS[:2]} | lower.links
        #: what each transfer on a link carries
        self.carried: dict[int, Batch | SwapIn] = {}
        #: batches that wait for a transfer to end, by link
        self.queued: dict[str, list[Batch]] = {"g1_to_g2": [], "g2_to_g3": [], "g2_to_g4": []}
        #: link and how many of its transfers that ended together have not been settled
        self.settling: tuple[str, int] = ("", 0)
        #: blocks on their way out: they wait for their turn and have no place in G2 yet
        self.leaving: set[int] = set()
        self.now = 0.0
        # What happened: swap-ins, blocks copied down in the background and staged, evicted blocks that were not moved.
        self.began = self.returned = self.cancelled = self.copied = self.staged = self.filtered = 0

    # ------------------------------------------------------------ time

    def next_deadline(self) -> float | None:
        deadlines = [link.next_deadline_ms() for link in self.links.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def tick(self, now: float) -> bool:
        """Settle what has ended by now, in order of time; whether anything had."""
        settled = False
        while (deadline := self.next_deadline()) is not None and deadline <= now + SLACK_MS:
            name = next(name for name in LINKS if self.links[name].next_deadline_ms() == deadline)
            ended = [(self.carried.pop(transfer), time) for transfer, time in self.links[name].advance(deadline)]
            # Those that end together still take their places on the link until it is their turn.
            self.settling = (name, len(ended))
            for carried, time in ended:
                self.settling = (name, self.settling[1] - 1)
                self._settle(name, carried, time)
            settled = True
        for link in self.links.values():
            link.advance(now)
        return settled

    def _start(self, name: str, blocks: int, now: float, carried: Batch | SwapIn) -> None:
        self.carried[self.links[name].start(now, blocks * self.block_bytes)] = carried

    def _settle(self, name: str, carried: Batch | SwapIn, time: float) -> None:
        if isinstance(carried, SwapIn):
            if name == "g2_to_g1":
                carried.done = True
                self.finish(carried)
                for key in reversed(carried.keys):
                    self.g2.unpin(key)
                self.returned += not carried.cancelled
                self.cancelled += carried.cancelled
            else:
                self._end_staging(name, carried, time)
            return
        if name == "g1_to_g2":
            for key in carried.keys:
                self.g2.arrive(key)
                self.announce("stored", [key])
            self.free(carried.slots)
            for below in ("g2_to_g3", "g2_to_g4"):
                if self._below(below) is not None:
                    self.queued[below].append(Batch(list(carried.keys)))
                    self._start_copies(below, time)
            self._start_batches(time)
            return
        store = self._below(name)
        assert store is not None
        for key in carried.keys:
            store.arrive(key)
            self.g2.unpin(key)
        self._start_copies(name, time)

    def _below(self, name: str) -> Store | None:
        return self.g3 if "g3" in name else self.g4

    # ------------------------------------------------------------ down: G1 -> G2

    def enqueue(self, victims: Sequence[tuple[int, int]], now: float) -> None:
        """Take over evicted blocks (slot, key); slots of blocks that are below already are free at once."""
        passed: list[tuple[int, int]] = []
        for slot, key in victims:
            if key in self.g2.cells or key in self.leaving:
                self.free([slot])
                self.filtered += 1
            else:
                self.leaving.add(key)
                passed.append((slot, key))
        for first in range(0, len(passed), self.batch_size):
            part = passed[first : first + self.batch_size]
            self.queued["g1_to_g2"].append(Batch([key for _, key in part], [slot for slot, _ in part]))
        self._start_batches(now)

    @property
    def offloading(self) -> bool:
        """Whether blocks are on their way from the pool to G2."""
        return bool(self.queued["g1_to_g2"]) or self._on_link("g1_to_g2") > 0

    def _on_link(self, name: str) -> int:
        """Transfers of a link that are not settled."""
        waiting = self.settling[1] if self.settling[0] == name else 0
        return len(self.links[name].active) + waiting

    def _make_room(self, count: int) -> None:
        """Have places in G2."""
        assert self.g2.capacity is not None
        victims = []
        while self.g2.capacity - len(self.g2.cells) < count:
            victims.append(self.g2.lru.pop(0))
            del self.g2.cells[victims[-1]]
        if victims:
            self.announce("removed", victims)

    def _start_batches(self, now: float) -> None:
        """Evicted blocks whose turn it is; what finds no room in G2 is lost."""
        queue = self.queued["g1_to_g2"]
        while queue and self._on_link("g1_to_g2") < self.batch_size:
            batch = queue.pop(0)
            self.leaving.difference_update(batch.keys)
            fit = int(min(self.g2.room, len(batch.keys)))
            self._make_room(fit)
            for key in batch.keys[:fit]:
                self.g2.take(key)
            self.free(batch.slots[fit:])
            self.filtered += len(batch.keys) - fit
            if fit:
                self._start("g1_to_g2", fit, now, Batch(batch.keys[:fit], batch.slots[:fit]))

    def _start_copies(self, name: str, now: float) -> None:
        """Blocks that are copied on; those that are not in G2 any more, are below or find no room are passed over."""
        queue, store = self.queued[name], self._below(name)
        assert store is not None
        while queue and self._on_link(name) < (1 if name == "g2_to_g3" else self.batch_size):
            passed = []
            for key in queue.pop(0).keys:
                if self.g2.is_resident(key) and key not in store.cells and store.room >= 1:
                    store.take(key)
                    self.g2.pin(key)
                    passed.append(key)
            self.copied += len(passed)
            if passed:
                self._start(name, len(passed), now, Batch(passed))

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
        return list(itertools.takewhile(lambda key: store.is_resident(key) and not self._on_way(key), keys))

    def _on_way(self, key: int) -> bool:
        return key in self.g2.cells or key in self.leaving

    def give_up(self, swap: SwapIn) -> None:
        """A plan that came to nothing."""
        for key in reversed(swap.keys[: len(swap.keys) - len(swap.from_g3) - len(swap.from_g4)]):
            self.g2.unpin(key)

    def begin(self, swap: SwapIn, now: float) -> None:
        self.began += 1
        self.staged += len(swap.from_g3) + len(swap.from_g4)
        self._make_room(len(swap.from_g3) + len(swap.from_g4))
        for name, keys in (("g3_to_g2", swap.from_g3), ("g4_to_g2", swap.from_g4)):
            store = self._below(name)
            if keys:
                assert store is not None
                for key in keys:
                    store.pin(key)
                    self.g2.take(key)
                    self.g2.cells[key].pins = 1
                swap.staging.append(name)
                self._start(name, len(keys), now, swap)
        if not swap.staging:
            self._start("g2_to_g1", len(swap.keys), now, swap)

    def _end_staging(self, name: str, swap: SwapIn, time: float) -> None:
        store, keys = self._below(name), swap.from_g3 if name == "g3_to_g2" else swap.from_g4
        assert store is not None
        for key in keys:
            self.g2.cells[key].pending = False
            self.announce("stored", [key])
        for key in reversed(keys):
            store.unpin(key)
        swap.staging.remove(name)
        if not swap.staging:
            self._start("g2_to_g1", len(swap.keys), time, swap)

    # ------------------------------------------------------------ for comparison

    def swaps(self) -> list[SwapIn]:
        found = [carried for carried in self.carried.values() if isinstance(carried, SwapIn)]
        return list({id(swap): swap for swap in found}.values())

    def state(self) -> dict[str, Any]:
        return {
            "g2": self.g2.state(),
            "g3": None if self.g3 is None else self.g3.state(),
            "g4": None if self.g4 is None else self.g4.state(),
            "queued": {name: [batch.keys for batch in queue] for name, queue in self.queued.items()},
            "on_links": {
                name: [self._shown(name, self.carried[transfer.transfer_id]) for transfer in self.links[name].active]
                for name in LINKS
            },
        }

    @staticmethod
    def _shown(name: str, carried: Batch | SwapIn) -> list[int]:
        if isinstance(carried, SwapIn) and name != "g2_to_g1":
            return carried.from_g3 if name == "g3_to_g2" else carried.from_g4
        return carried.keys

    def check(self) -> None:
        for store in (self.g2, self.g3, self.g4):
            if store is not None:
                store.check()
        pins: dict[int, int] = {}
        below: dict[str, dict[int, int]] = {"g3_to_g2": {}, "g4_to_g2": {}}
        for carried in self.carried.values():
            if isinstance(carried, Batch) and not carried.slots:
                for key in carried.keys:
                    pins[key] = pins.get(key, 0) + 1
        for swap in self.swaps():
            for key in swap.keys:
                pins[key] = pins.get(key, 0) + 1
            for name in swap.staging:
                for key in swap.from_g3 if name == "g3_to_g2" else swap.from_g4:
                    below[name][key] = below[name].get(key, 0) + 1
        assert {key: cell.pins for key, cell in self.g2.cells.items() if cell.pins} == pins
        for name, wanted in below.items():
            store = self._below(name)
            found = {} if store is None else {key: cell.pins for key, cell in store.cells.items() if cell.pins}
            assert found == wanted
        assert sum(len(link.active) for link in self.links.values()) == len(self.carried)
        assert self.leaving == {key for batch in self.queued["g1_to_g2"] for key in batch.keys}
        assert self.leaving.isdisjoint(self.g2.cells)
        assert not self.queued["g1_to_g2"] or len(self.links["g1_to_g2"].active) == self.batch_size

    def held_slots(self) -> list[int]:
        """Slots of the pool that are quarantined."""
        batches = [carried for carried in self.carried.values() if isinstance(carried, Batch)]
        return [slot for batch in (*batches, *self.queued["g1_to_g2"]) for slot in batch.slots]
