"""Host memory as a tier below the pool: entries, two links, loads and stores, as dicts and lists.

Written from spec/host-offload.md part A and from no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsim.config import EngineConfig

STORE, LOAD = "store", "load"


class Lane:
    """Transfers one after the other; a later one starts when the earlier one ends."""

    def __init__(self, gbps: float) -> None:
        self.bytes_per_ms = gbps * 1e6
        self.tail = 0.0

    def submit(self, at_ms: float, size: int) -> float:
        duration = size / self.bytes_per_ms if self.bytes_per_ms else 0.0
        self.tail = max(self.tail, at_ms) + duration
        return self.tail


@dataclass
class Entry:
    """One block in host memory."""

    #: transfer that still brings it, None when it is there
    pending: int | None
    #: loads that read it
    pins: int = 0
    epoch: int = 0


@dataclass
class Transfer:
    kind: str
    id: int
    request_id: int
    keys: list[int]
    #: None until it is on its link
    deadline: float | None = None


@dataclass
class Record:
    """What an observer is told."""

    at_ms: float
    request_id: int
    kind: str
    transfer_id: int | None = None
    keys: list[int] = field(default_factory=list)
    completes_at_ms: float | None = None
    #: logical block index of each key, only of block mappings
    indices: list[int] = field(default_factory=list)
    structurally_unfittable: bool | None = None


class HostTier:
    def __init__(self, config: EngineConfig) -> None:
        offload = config.native_host_offload
        assert offload is not None
        assert config.kv_cache_bytes_per_token is not None
        self.capacity = offload.num_host_blocks
        self.block_bytes = config.tokens_per_block * config.kv_cache_bytes_per_token
        self.lanes = {STORE: Lane(offload.d2h_bandwidth_gbps), LOAD: Lane(offload.h2d_bandwidth_gbps)}
        self.entries: dict[int, Entry] = {}
        self.transfers: dict[int, Transfer] = {}
        #: stores that wait for the end of the pass, in order of preparation
        self.prepared: list[Transfer] = []
        self.clock = 0.0
        self.epoch = 0
        self.next_id = 0
        self.records: list[Record] = []

    # ------------------------------------------------------------ clock

    def _advance(self, now: float) -> None:
        assert now >= self.clock
        deadline = self.next_deadline()
        assert deadline is None or deadline >= now, "a transfer is due that was not settled"
        self.clock = now

    def next_deadline(self) -> float | None:
        return min((t.deadline for t in self.transfers.values() if t.deadline is not None), default=None)

    # ------------------------------------------------------------ recency

    def touch(self, keys: Sequence[int]) -> None:
        """All keys get one fresh epoch; what is missing, pending or read by a load stays as it is."""
        self.epoch += 1
        for key in keys:
            entry = self.entries.get(key)
            if entry is not None and entry.pending is None and entry.pins == 0:
                entry.epoch = self.epoch

    def lookup(self, key: int) -> str:
        entry = self.entries.get(key)
        if entry is None:
            return "miss"
        return "hit" if entry.pending is None else "pending"

    # ------------------------------------------------------------ stores

    def prepare_store(
        self, request_id: int, cohort: Sequence[int], now: float
    ) -> tuple[Transfer | None, str, list[int]]:
        """(transfer, "prepared" | "present" | "retry", victims)."""
        self._advance(now)
        distinct = list(dict.fromkeys(cohort))
        missing = [key for key in distinct if key not in self.entries]
        if not missing:
            return None, "present", []
        needed = max(0, len(missing) - (self.capacity - len(self.entries)))
        free_to_go = sorted(
            (entry.epoch, key)
            for key, entry in self.entries.items()
            if entry.pending is None and entry.pins == 0 and key not in distinct
        )
        if needed > len(free_to_go):
            unfittable = len(distinct) > self.capacity
            self.records.append(
                Record(now, request_id, "capacity_retry", keys=missing, structurally_unfittable=unfittable)
            )
            return None, "retry", []
        victims = [key for _, key in free_to_go[:needed]]
        for key in victims:
            del self.entries[key]
            self.records.append(Record(now, request_id, "evicted", keys=[key]))
        transfer = self._transfer(STORE, request_id, missing)
        for key in missing:
            self.entries[key] = Entry(transfer.id)
        self.prepared.append(transfer)
        self.records.append(Record(now, request_id, "store_prepared", transfer.id, missing))
        return transfer, "prepared", victims

    def record_mappings(self, transfer: Transfer, indices: list[int], now: float) -> None:
        self.records.append(
            Record(now, transfer.request_id, "store_block_mappings", transfer.id, transfer.keys, indices=indices)
        )

    def submit_prepared(self, now: float) -> None:
        self._advance(now)
        for transfer in self.prepared:
            transfer.deadline = self.lanes[STORE].submit(now, len(transfer.keys) * self.block_bytes)
            self.records.append(
                Record(now, transfer.request_id, "store_submitted", transfer.id, transfer.keys, transfer.deadline)
            )
        self.prepared = []

    # ------------------------------------------------------------ loads

    def schedule_load(self, request_id: int, keys: Sequence[int], now: float, not_before: float) -> Transfer | None:
        self._advance(now)
        if not keys or len(keys) > self.capacity or len(set(keys)) < len(keys):
            return None
        if any(self.lookup(key) != "hit" for key in keys):
            return None
        for key in keys:
            self.entries[key].pins += 1
        transfer = self._transfer(LOAD, request_id, list(keys))
        transfer.deadline = self.lanes[LOAD].submit(max(now, not_before), len(keys) * self.block_bytes)
        self.records.append(Record(now, request_id, "load_queued", transfer.id, transfer.keys, transfer.deadline))
        return transfer

    def cancel_load(self, transfer_id: int, now: float, observed: float) -> None:
        assert observed >= now
        self._advance(now)
        transfer = self.transfers.pop(transfer_id)
        self._unpin(transfer)
        self.records.append(Record(observed, transfer.request_id, "load_cancelled", transfer.id, transfer.keys))

    def _unpin(self, transfer: Transfer) -> None:
        for key in transfer.keys:
            self.entries[key].pins -= 1
        self.touch(transfer.keys)

    def is_loading(self, key: int) -> bool:
        return self.entries[key].pins > 0

    # ------------------------------------------------------------ settling

    def tick(self, now: float) -> list[Transfer]:
        """Settle what is due; the transfers in their order."""
        assert now >= self.clock
        due = [t for t in self.transfers.values() if t.deadline is not None and t.deadline <= now]
        due.sort(key=lambda t: (t.deadline, t.kind == LOAD, t.id))
        for transfer in due:
            assert transfer.deadline is not None
            del self.transfers[transfer.id]
            if transfer.kind == STORE:
                for key in transfer.keys:
                    self.entries[key].pending = None
                self.touch(transfer.keys)
            else:
                self._unpin(transfer)
            self.records.append(
                Record(transfer.deadline, transfer.request_id, transfer.kind + "_completed", transfer.id, transfer.keys)
            )
        self.clock = now
        return due

    def _transfer(self, kind: str, request_id: int, keys: list[int]) -> Transfer:
        transfer = Transfer(kind, self.next_id, request_id, keys)
        self.next_id += 1
        self.transfers[transfer.id] = transfer
        return transfer

    # ------------------------------------------------------------ for comparison

    def state(self) -> dict[str, Any]:
        evictable = sorted(
            (entry.epoch, key) for key, entry in self.entries.items() if entry.pending is None and entry.pins == 0
        )
        return {
            "resident": sorted(key for key, entry in self.entries.items() if entry.pending is None),
            "pending": sorted((key, e.pending) for key, e in self.entries.items() if e.pending is not None),
            "pins": sorted((key, entry.pins) for key, entry in self.entries.items() if entry.pins),
            "lru": [key for _, key in evictable],
            "transfers": [(t.id, t.kind, t.request_id, t.keys, t.deadline) for _, t in sorted(self.transfers.items())],
            "prepared": [t.id for t in self.prepared],
            "tails": (self.lanes[STORE].tail, self.lanes[LOAD].tail),
        }

    def check(self) -> None:
        assert len(self.entries) <= self.capacity
        pins: dict[int, int] = {}
        for transfer in self.transfers.values():
            if transfer.kind == LOAD:
                for key in transfer.keys:
                    pins[key] = pins.get(key, 0) + 1
            else:
                assert all(self.entries[key].pending == transfer.id for key in transfer.keys)
        assert all(entry.pins == pins.get(key, 0) for key, entry in self.entries.items())
        assert all(e.pending is None or e.pending in self.transfers for e in self.entries.values())
        assert all(t.deadline is not None or t in self.prepared for t in self.transfers.values())
        assert all(math.isfinite(lane.tail) for lane in self.lanes.values())
