"""The block pool as lists and dicts (kv-cache.md sections 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class Block:
    """One physical copy; `hash` is None while it is private to its owner."""

    slot: int
    hash: int | None = None
    refs: int = 0
    pins: int = 0

    @property
    def used(self) -> bool:
        return self.refs + self.pins > 0


@dataclass
class Reservation:
    """Capacity that is promised: pinned prefix copies, root first, and fresh slots."""

    prefix: list[Block]
    #: the last one is handed out first
    slots: list[int]

    @property
    def fresh(self) -> int:
        return len(self.slots)


class BlockPool:
    """`capacity` anonymous slots."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        #: the last one is taken first
        self.free_slots = list(range(capacity))
        self.reserved = 0
        #: slots whose old content a lower tier still reads
        self.quarantined: list[int] = []
        self.private: list[Block] = []
        #: hash -> its copies; the first is the primary, the others wait in order of arrival.
        self.copies: dict[int, list[Block]] = {}
        #: unused cached copies, the next victim first.
        self.inactive: list[Block] = []

    @property
    def free(self) -> int:
        return len(self.free_slots)

    @property
    def active_blocks(self) -> int:
        cached = sum(len(copies) for copies in self.copies.values())
        return len(self.private) + cached - len(self.inactive) + self.reserved + len(self.quarantined)

    def primary(self, block_hash: int) -> Block | None:
        copies = self.copies.get(block_hash)
        return copies[0] if copies else None

    def reserve(self, prefix_hashes: Sequence[int], fresh: int) -> tuple[Reservation, list[int]] | None:
        """All or nothing: the reservation and the hashes that vanished for it, or None.

        Every hash of the prefix must be resident: the caller has just looked it up.
        """
        prefix = [self.copies[block_hash][0] for block_hash in prefix_hashes]
        evictions = max(0, fresh - self.free)
        protected = len({id(block) for block in prefix if not block.used})
        if evictions > len(self.inactive) - protected:
            return None
        for block in prefix:
            self._pin(block)
        slots = [self.free_slots.pop() for _ in range(fresh - evictions)]
        removed = []
        for _ in range(evictions):
            victim = self.inactive.pop(0)
            assert victim.hash is not None
            copies = self.copies[victim.hash]
            copies.remove(victim)
            if not copies:
                del self.copies[victim.hash]
                removed.append(victim.hash)
            slots.append(victim.slot)
        self.reserved += fresh
        return Reservation(prefix, slots), removed

    def quarantine(self, count: int, prefix_hashes: Sequence[int]) -> list[tuple[int, int, bool]] | None:
        """Evict unused copies that are not the primary of a prefix hash; their slots go to nobody yet.

        (slot, hash, whether the hash vanished) of each, or None if there are too few.
        """
        kept = {id(self.copies[block_hash][0]) for block_hash in prefix_hashes}
        victims = [block for block in self.inactive if id(block) not in kept][:count]
        if len(victims) < count:
            return None
        evicted = []
        for victim in victims:
            self.inactive.remove(victim)
            assert victim.hash is not None
            copies = self.copies[victim.hash]
            copies.remove(victim)
            if not copies:
                del self.copies[victim.hash]
            evicted.append((victim.slot, victim.hash, not copies))
            self.quarantined.append(victim.slot)
        return evicted

    def free_quarantined(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.quarantined.remove(slot)
            self.free_slots.append(slot)

    def cancel(self, reservation: Reservation) -> None:
        for block in reversed(reservation.prefix):
            block.pins -= 1
            self._rest(block)
        self.reserved -= reservation.fresh
        self.free_slots += reservation.slots
        reservation.prefix, reservation.slots = [], []

    def take_prefix(self, reservation: Reservation) -> Block:
        """The next pinned copy of the reservation, now referenced."""
        block = reservation.prefix.pop(0)
        block.pins -= 1
        block.refs += 1
        return block

    def take_fresh(self, reservation: Reservation) -> Block:
        """One of the fresh slots of the reservation as a private copy."""
        self.reserved -= 1
        block = Block(reservation.slots.pop(), refs=1)
        self.private.append(block)
        return block

    def publish(self, block: Block, block_hash: int) -> bool:
        """Make a private copy findable; True if the hash was not findable before."""
        self.private.remove(block)
        block.hash = block_hash
        self.copies.setdefault(block_hash, []).append(block)
        return len(self.copies[block_hash]) == 1

    def release(self, block: Block) -> None:
        """The owner lets go of a copy."""
        block.refs -= 1
        if block.hash is None:
            self.private.remove(block)
            self.free_slots.append(block.slot)
        else:
            self._rest(block)

    def _pin(self, block: Block) -> None:
        if not block.used:
            self.inactive.remove(block)
        block.pins += 1

    def _rest(self, block: Block) -> None:
        if not block.used:
            self.inactive.append(block)

    def check(self) -> None:
        """The invariants of kv-cache.md section 2."""
        cached = [block for copies in self.copies.values() for block in copies]
        assert self.free >= 0
        assert self.reserved >= 0
        assert self.capacity == len(cached) + len(self.private) + self.reserved + self.free + len(self.quarantined)
        assert all(copies for copies in self.copies.values())
        assert all(block.hash == key for key, copies in self.copies.items() for block in copies)
        assert {id(block) for block in cached if not block.used} == {id(block) for block in self.inactive}
        assert len(self.inactive) == len({id(block) for block in self.inactive})
        assert all(block.hash is None and block.refs == 1 and block.pins == 0 for block in self.private)
