"""A kernel rank and its Python twin side by side: same commands, same passes, compared after every step."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kv_index import KvIndex
from kvsim.config import EngineConfig
from kvsim.contract import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    CommandContext,
    CommandEffects,
    DestinationAccepted,
    DestinationReserved,
    KvEvent,
    Noop,
    Output,
    PassCompletionEffects,
    RankIdentity,
    RankPass,
    ReleaseSource,
    Request,
    ReserveDestination,
    SameTimestampRetry,
    Stored,
    Submit,
    SubmitHandoffPrefill,
    id_to_int,
)
from kvsim.errors import CommandError
from kvsim.layout import HandoffRole, Tier, TierJob, TierLink, TierState
from kvsim.rank import KvEvents, SchedulerRank
from model.paged import PagedModel
from model.sglang import SglangModel

STATUS = {1: "waiting", 2: "running", 3: "preempted"}
#: The radix twin calls a retracted request waiting.
RADIX_STATUS = {1: "waiting", 2: "running", 3: "waiting"}
HELD_DESTINATION = 6


def rank_state(rank: SchedulerRank) -> dict[str, Any]:
    """The dictionary of the twin's `state()` read off the tables of a rank."""
    return radix_state(rank) if rank.config.backend == "sglang" else paged_state(rank)


def paged_state(rank: SchedulerRank) -> dict[str, Any]:
    """The dictionary of `PagedModel.state()`."""
    blocks, requests, header = rank.blocks, rank.requests, rank.header[0]

    def id_of(slot: int) -> int:
        return int(requests[slot]["id_hi"]) << 64 | int(requests[slot]["id_lo"])

    def hash_of(block: int) -> int | None:
        return int(blocks[block]["hash"]) if blocks[block]["hashed"] else None

    live = {id_of(slot): requests[slot] for slot in range(len(requests)) if requests[slot]["status"] in STATUS}
    copies: dict[int, int] = {}
    for row in blocks:
        if row["hashed"]:
            copies[int(row["hash"])] = copies.get(int(row["hash"]), 0) + 1
    lru = inactive_blocks(rank)
    return {
        "running": [id_of(slot) for slot in rank.running],
        "waiting": [id_of(slot) for slot in rank.waiting],
        "requests": {
            request_id: {
                "length": int(row["length"]),
                "generated": int(row["generated"]),
                "computed": int(row["computed"]),
                "allocated": int(row["allocated"]),
                "preemptions": int(row["preemptions"]),
                "status": STATUS[int(row["status"])],
                "blocks": [hash_of(block) for block in rank.block_table(request_id)],
            }
            for request_id, row in sorted(live.items())
        },
        "active_blocks": len(blocks) - len(lru) - int(header["num_free"]),
        "inactive_blocks": len(lru),
        "free_blocks": int(header["num_free"]),
        "lru": [hash_of(block) for block in lru],
        "copies": dict(sorted(copies.items())),
        "preemptions_total": int(header["preemptions_total"]),
        "next_event_id": int(header["next_event_id"]),
        "handoffs": handoff_state(rank),
        "held_blocks": {
            request_id: [hash_of(block) for block in rank.block_table(request_id)]
            for request_id in parked_ids(rank, HandoffRole.SOURCE_HELD)
        },
        "reserved_blocks": {
            request_id: reserved_blocks([hash_of(block) for block in rank.block_table(request_id)])
            for request_id in parked_ids(rank, HandoffRole.DESTINATION_HELD)
        },
        **({} if rank.config.native_host_offload is None else host_state(rank)),
        **({} if rank.config.tiers_attached is None else tier_state(rank)),
    }


def tier_state(rank: SchedulerRank) -> dict[str, Any]:
    """What `PagedModel.state()` says of the KVBM tiers."""
    state = rank._state
    tiers, entries, jobs, blocks = (state.view(name) for name in ("tiers", "tier_entries", "tier_jobs", "tier_blocks"))
    own, requests, config = tiers[0], rank.requests, rank.config.kvbm_tiers
    assert config is not None
    # Of G3, G4 and their links, which ranks may share.
    deep = state.deep()
    low, low_entries, low_jobs = deep.view("tiers")[0], deep.view("tier_entries"), deep.view("tier_jobs")

    def chained(head: int, jobs: Any) -> list[int]:
        found, row = [], head
        while row >= 0:
            found.append(row)
            row = int(jobs[row]["next"])
        return found

    def keys(row: int, first: int = 0, jobs: Any = jobs, blocks: Any = blocks) -> list[int]:
        start = int(jobs[row]["first"])
        return [int(block["hash"]) for block in blocks[start + first : start + int(jobs[row]["count"])]]

    def store(tier: Tier) -> dict[str, Any]:
        heap, table = (entries, own) if tier == Tier.G2 else (low_entries, low)
        mine = heap[heap["tier"] == tier]
        lru, row = [], int(table["lru_head"][tier])
        while row >= 0:
            lru.append(int(heap[row]["hash"]))
            row = int(heap[row]["next"])
        return {
            "resident": sorted(mine["hash"][mine["state"] == TierState.RESIDENT].tolist()),
            "pending": sorted(mine["hash"][mine["state"] != TierState.RESIDENT].tolist()),
            "pins": sorted((int(e["hash"]), int(e["pins"])) for e in mine if e["pins"]),
            "lru": lru,
        }

    def id_of(slot: int) -> int:
        return int(requests[slot]["id_hi"]) << 64 | int(requests[slot]["id_lo"])

    def queued(tier: Tier) -> list[list[int]]:
        heap, spans = (jobs, blocks) if tier == Tier.G2 else (low_jobs, deep.view("tier_blocks"))
        return [keys(row, 0, heap, spans) for row in chained(int(own["wait_head"][tier]), heap)]

    def on_link(link: TierLink) -> int:
        if link < TierLink.G2_TO_G3:
            ended = chained(int(own["ended_head"]), jobs)
            return len(chained(int(own["link_head"][link]), jobs)) + sum(jobs[row]["link"] == link for row in ended)
        active = chained(int(low["link_head"][link]), low_jobs)
        ended = chained(int(own["below_head"]), low_jobs)
        return sum(low_jobs[row]["rank"] == state.sharer for row in active) + sum(
            low_jobs[row]["link"] == link for row in ended
        )

    swaps = sorted(np.flatnonzero(jobs["kind"] == TierJob.SWAP).tolist(), key=lambda row: int(jobs[row]["id"]))
    owners = [slot for slot in range(len(requests)) if requests[slot]["status"] and state.depends(slot)]
    return {
        "tiers": {
            "g2": store(Tier.G2),
            "g3": store(Tier.G3) if config.num_g3_blocks else None,
            "g4": store(Tier.G4) if config.g4_storage else None,
            "offloads": int(own["num_offloads"]),
            "queued": {
                name: queued(tier)
                for name, tier in (("g1_to_g2", Tier.G2), ("g2_to_g3", Tier.G3), ("g2_to_g4", Tier.G4))
            },
            "on_links": [on_link(link) for link in TierLink],
        },
        "parked": [
            (
                None if jobs[row]["slot"] < 0 else id_of(int(jobs[row]["slot"])),
                int(jobs[row]["prefix"]),
                keys(row, int(jobs[row]["prefix"])),
                False,
            )
            for row in swaps
        ],
        "quarantined": int(own["num_quarantined"]),
        "dependent": sorted(id_of(slot) for slot in owners),
    }


def host_state(rank: SchedulerRank) -> dict[str, Any]:
    """What `PagedModel.state()` says of host memory."""
    view = rank._state.view
    host, entries, transfers, blocks = view("host")[0], view("host_entries"), view("transfers"), view("transfer_blocks")
    requests, offloads, sources = rank.requests, view("offloads"), view("sources")

    def id_of(row: Any) -> int:
        return int(row["id_hi"]) << 64 | int(row["id_lo"])

    def listed(head: str) -> list[int]:
        found, row = [], int(host[head])
        while row >= 0:
            found.append(row)
            row = int(transfers[row]["next"])
        return found

    def shown(row: int, kind: str) -> tuple[Any, ...]:
        transfer = transfers[row]
        span = blocks[int(transfer["first"]) :][: int(transfer["count"])]
        keys = [int(entries[entry]["hash"]) for entry in span["entry"]]
        deadline = float(transfer["deadline_ms"]) if transfer["on_link"] else None
        return int(transfer["id"]), kind, id_of(transfer), keys, deadline

    lru, row = [], int(host["lru_head"])
    while row >= 0:
        lru.append(int(entries[row]["hash"]))
        row = int(entries[row]["next"])
    used = entries[entries["pins"] >= 0]
    prepared, stores, loads = listed("prepared_head"), listed("store_head"), listed("load_head")
    live = [slot for slot in range(len(requests)) if requests[slot]["status"] in STATUS]
    connector = list(rank.connector)
    return {
        "host": {
            "resident": sorted(int(entry["hash"]) for entry in used if entry["transfer"] < 0),
            "pending": sorted(
                (int(entry["hash"]), int(transfers[int(entry["transfer"])]["id"]))
                for entry in used
                if entry["transfer"] >= 0
            ),
            "pins": sorted((int(entry["hash"]), int(entry["pins"])) for entry in used if entry["pins"] > 0),
            "lru": lru,
            "transfers": sorted(
                [*(shown(row, "store") for row in (*prepared, *stores)), *(shown(row, "load") for row in loads)]
            ),
            "prepared": [int(transfers[row]["id"]) for row in prepared],
            "tails": (float(host["store_tail_ms"]), float(host["load_tail_ms"])),
        },
        "connector": [
            (id_of(requests[slot]), bool(offloads[slot]["progress"] == host["progress"])) for slot in connector
        ],
        "stores": {id_of(requests[slot]): int(offloads[slot]["next_store"]) for slot in live},
        "loads": {
            id_of(requests[slot]): (int(offloads[slot]["device_blocks"]), bool(offloads[slot]["load"] < 0))
            for slot in connector
            if offloads[slot]["device_blocks"] >= 0
        },
        "readers": sorted(int(transfers[row]["id"]) for row in sources if row >= 0),
    }


def reserved_blocks(hashes: list[int | None]) -> tuple[list[int], int]:
    """(hashes of the prefix that was found, fresh blocks) of a held destination."""
    prefix = [block_hash for block_hash in hashes if block_hash is not None]
    assert None not in hashes[: len(prefix)]
    return prefix, len(hashes) - len(prefix)


def parked_ids(rank: SchedulerRank, role: HandoffRole) -> list[int]:
    """Ids of the requests with a role, in rising order."""
    requests, halves = rank.requests, rank._state.view("handoffs")
    slots = np.flatnonzero(halves["role"][: len(requests)] == role)
    return sorted(int(row["id_hi"]) << 64 | int(row["id_lo"]) for row in requests[slots])


def handoff_state(rank: SchedulerRank) -> dict[str, Any]:
    """The dictionary of the twin's `Handoffs.state()`."""
    requests, halves, header = rank.requests, rank._state.view("handoffs"), rank.header[0]

    def pair_of(slot: int) -> tuple[int, int]:
        row, half = requests[slot], halves[slot]
        handoff_id = int(half["handoff_hi"]) << 64 | int(half["handoff_lo"])
        return handoff_id, int(row["id_hi"]) << 64 | int(row["id_lo"])

    def pairs(role: HandoffRole) -> list[tuple[int, int]]:
        return sorted(pair_of(slot) for slot in np.flatnonzero(halves["role"][: len(requests)] == role).tolist())

    pending, slot = [], int(header["pending_head"])
    blocked = slot >= 0 and int(halves[slot]["attempted"]) == int(header["capacity_generation"])
    while slot >= 0:
        pending.append(pair_of(slot))
        slot = int(requests[slot]["next"])
    assert sorted(pending) == pairs(HandoffRole.DESTINATION_PENDING)
    return {
        "registered": pairs(HandoffRole.SOURCE_REGISTERED),
        "held": pairs(HandoffRole.SOURCE_HELD),
        "pending": pending,
        "head_waits_for_capacity": blocked,
        "reserved": pairs(HandoffRole.DESTINATION_HELD),
        "active": pairs(HandoffRole.DESTINATION_ACTIVE),
        "attempts": int(header["reserve_attempts"]),
    }


def radix_state(rank: SchedulerRank) -> dict[str, Any]:
    """The dictionary of `SglangModel.state()`."""
    state, size = rank._state, rank.config.tokens_per_block
    requests, leases, radix = rank.requests, state.view("leases"), state.view("radix")[0]
    nodes, runs, heap = state.view("nodes"), state.view("runs"), state.view("evict_heap")

    def id_of(slot: int) -> int:
        return int(requests[slot]["id_hi"]) << 64 | int(requests[slot]["id_lo"])

    def edge(node: int) -> list[int]:
        first = int(nodes[node]["keys"])
        part = runs[first : first + int(nodes[node]["num_runs"])]
        keys: list[int] = np.repeat(part["key"], part["pages"]).tolist()
        return keys

    def path(node: int) -> list[int]:
        return [] if nodes[node]["parent"] < 0 else path(int(nodes[node]["parent"])) + edge(node)

    children: dict[int, list[int]] = {}
    for node in np.flatnonzero(nodes["live"]).tolist():
        children.setdefault(int(nodes[node]["parent"]), []).append(node)

    def describe(node: int) -> list[dict[str, Any]]:
        below = sorted((edge(child), child) for child in children.get(node, ()))
        return [
            {"hashes": keys, "lock_ref": int(nodes[child]["lock_refs"]), "children": describe(child)}
            for keys, child in below
        ]

    prebuilt, slot = [], int(rank.header[0]["prebuilt_head"])
    while slot >= 0:
        prebuilt.append(id_of(slot))
        slot = int(requests[slot]["next"])
    held = [HandoffRole.SOURCE_HELD, HandoffRole.DESTINATION_HELD]
    parked = np.flatnonzero(np.isin(state.view("handoffs")["role"][: len(requests)], held)).tolist()
    # In generation 1.3 the tokens that partial pages do not use are free; a destination owns its pages whole.
    users = requests[requests["status"] != HELD_DESTINATION]
    loose = int((users["allocated"] - users["computed"]).sum()) if rank.config.rules.name == "dynamo-1.3" else 0
    victims = sorted(heap.tolist(), key=lambda node: (nodes[node]["last_access"], nodes[node]["ordinal"]))
    return {
        "waiting": [id_of(slot) for slot in rank.waiting],
        "prebuilt": prebuilt,
        "running": [id_of(slot) for slot in rank.running],
        "requests": {
            id_of(slot): {
                "seq_len": int(requests[slot]["length"]),
                "out": int(requests[slot]["generated"]),
                "materialized": int(requests[slot]["computed"]),
                "allocated": int(requests[slot]["allocated"]),
                "cached": int(leases[slot]["cached"]) * size,
                "pages": int(leases[slot]["pages"]),
                "status": RADIX_STATUS[int(requests[slot]["status"])],
            }
            for slot in np.flatnonzero(np.isin(requests["status"], list(RADIX_STATUS))).tolist()
        },
        "new_token_ratio": float(radix["new_token_ratio"]),
        "countdown": int(radix["countdown"]),
        "available_tokens": int(radix["available"]) * size + loose,
        "tree": describe(0),
        "eviction_order": [path(node) for node in victims],
        "evictable_size": int(radix["evictable"]) * size,
        "protected_size": int(radix["protected"]) * size,
        "next_event_id": int(rank.header[0]["next_event_id"]),
        "buffered_events": [
            without_token_ids(event)
            for event in KvEvents(state.view("events"), state.view("event_blocks"), rank.identity, None)
        ],
        "handoffs": handoff_state(rank),
        "parked": {
            id_of(slot): {
                "seq_len": int(requests[slot]["length"]),
                "materialized": int(requests[slot]["computed"]),
                "cached": int(leases[slot]["cached"]) * size,
                "pages": int(leases[slot]["pages"]),
            }
            for slot in parked
        },
    }


def without_token_ids(event: KvEvent) -> KvEvent:
    """Token ids are looked up when an event is shown; before that there are none to compare."""
    if not isinstance(event.data, Stored):
        return event
    blocks = tuple(dataclasses.replace(block, token_ids=None) for block in event.data.blocks)
    return dataclasses.replace(event, data=dataclasses.replace(event.data, blocks=blocks))


def twin_state(twin: PagedModel | SglangModel) -> dict[str, Any]:
    state = twin.state()
    if isinstance(twin, SglangModel):
        state["buffered_events"] = [without_token_ids(event) for event in state["buffered_events"]]
    return state


def twin_of(config: EngineConfig, identity: RankIdentity, timing: Any) -> PagedModel | SglangModel:
    if config.backend == "sglang":
        return SglangModel(identity, config, timing, prefill_decode_interval=config.prefill_decode_interval)
    return PagedModel(identity, config, timing)


def inactive_blocks(rank: SchedulerRank) -> list[int]:
    """Block ids of the inactive blocks, the next victim first."""
    return [int(block) for block in rank._state.inactive_blocks()]


def plain(value: Any) -> Any:
    """`value` with every sequence as a list, for equality whatever the container."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (
            type(value).__name__,
            *(plain(getattr(value, part.name)) for part in dataclasses.fields(value)),
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (type(value).__name__, *map(plain, value))
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        return value
    return [plain(item) for item in value]


def same_fpm(mine: Any, expected: Any) -> None:
    for name, left, right in zip(mine._fields, mine, expected, strict=True):
        if name.startswith("var_"):
            assert math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-9), f"{name}: {left} != {right}"
        elif name == "duration_ms":
            assert math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-9), f"{name}: {left} != {right}"
        else:
            assert left == right, f"{name}: {left} != {right}"


def same_effects(mine: PassCompletionEffects, expected: PassCompletionEffects) -> None:
    for name in ("outputs", "lifecycle_events", "kv_events", "metrics", "decode_acceptance"):
        assert plain(getattr(mine, name)) == plain(getattr(expected, name)), name
    same_fpm(mine.forward_pass_metrics, expected.forward_pass_metrics)


@dataclass
class Pair:
    """A rank and its twin driven as one; every method compares what both answer and where both stand."""

    config: EngineConfig
    identity: RankIdentity = field(default_factory=RankIdentity)
    timing: Any = None
    rank: SchedulerRank = field(init=False)
    twin: PagedModel | SglangModel = field(init=False)
    now: float = field(default=0.0, init=False)
    in_flight: tuple[RankPass, RankPass] | None = field(default=None, init=False)
    #: what a router makes of every KV event that was shown
    index: KvIndex = field(default_factory=lambda: KvIndex(), init=False)
    ledger: Ledger = field(default_factory=lambda: Ledger(), init=False)

    def __post_init__(self) -> None:
        self.rank = SchedulerRank(self.identity, self.config, timing=self.timing)
        self.twin = twin_of(self.config, self.identity, self.timing)

    def compare(self) -> None:
        self.rank.check_integrity()
        self.twin.check()
        assert rank_state(self.rank) == twin_state(self.twin)
        assert self.rank.metrics() == self.twin.metrics()
        assert self.rank.is_ready() == self.twin.is_ready()
        assert self.rank.is_drained() == self.twin.is_drained()
        assert self.rank.waiting_for_external_command() == self.twin.waiting_for_external_command()
        mine, expected = self.rank.stuck_head(), self.twin_stuck()
        assert (mine and mine.request_id) == (expected and expected[0])

    def twin_stuck(self) -> tuple[int, str] | None:
        """Who blocks the twin for ever, and why."""
        if isinstance(self.twin, SglangModel):
            return self.twin.stuck_head() or self.twin.stuck_running()
        return self.twin.stuck_head()

    def twin_fail(self) -> Output:
        if isinstance(self.twin, SglangModel) and self.twin.stuck_head() is None:
            return self.twin.fail_running()
        return self.twin.fail_head(self.now)

    def apply(self, command: Command) -> CommandEffects:
        pending = (None, None) if self.in_flight is None else (self.in_flight[0].pending, self.in_flight[1].pending)
        context = CommandContext(self.now, self.in_flight is not None)
        try:
            expected = self.twin.apply_command(command, context, pending[1])
        except CommandError:
            before = self.rank.digest()
            with pytest.raises(CommandError):
                self.rank.apply_command(command, context, pending[0])
            assert self.rank.digest() == before
            raise
        mine = self.rank.apply_command(command, context, pending[0])
        assert plain(mine) == plain(expected)
        self.index.replay(mine.kv_events)
        self.ledger.command(command, mine, in_flight=self.in_flight is not None)
        if self.in_flight is not None:
            same_effects(self.in_flight[0].pending.effects, self.in_flight[1].pending.effects)
        self.compare()
        return mine

    def attempt(self, command: Command) -> CommandEffects | None:
        """`apply`, or None if both refused."""
        try:
            return self.apply(command)
        except CommandError:
            return None

    def submit(self, request: Request) -> bool:
        """Whether both accepted it; an id that is live is refused by both."""
        return self.attempt(Submit(request)) is not None

    def once(self, command: Command) -> CommandEffects:
        """A command that takes something away: the second time it finds nothing and changes nothing."""
        effects = self.apply(command)
        before = self.rank.digest()
        again = self.apply(command)
        assert again.result == Noop()
        assert not any((again.lifecycle_events, again.kv_events, again.retired_requests))
        assert self.rank.digest() == before
        return effects

    def cancel(self, request_id: int, *, discard: bool = False) -> CommandEffects:
        return self.apply(CancelRequest(request_id, discard))

    def execute(self) -> RankPass:
        assert self.in_flight is None
        mine, expected = self.rank.execute_pass(self.now), self.twin.execute_pass(self.now)
        assert math.isclose(mine.end_ms, expected.end_ms, rel_tol=1e-12, abs_tol=1e-9)
        assert mine.same_timestamp_retry == expected.same_timestamp_retry
        assert plain(mine.start_effects) == plain(expected.start_effects)
        same_effects(mine.pending.effects, expected.pending.effects)
        assert bool(self.rank.header[0]["effect_free"]) == self.twin.last_pass_effect_free
        self.index.replay(mine.start_effects.kv_events)
        self.in_flight = mine, expected
        self.compare()
        return mine

    def complete(self) -> PassCompletionEffects:
        assert self.in_flight is not None
        mine, expected = self.in_flight
        self.in_flight = None
        self.now = mine.end_ms
        shown = self.rank.complete_pass(mine.pending, self.now)
        same_effects(shown, self.twin.complete_pass(expected.pending, self.now))
        self.index.replay(shown.kv_events)
        self.ledger.completion(shown)
        self.compare()
        return shown

    def step(self) -> PassCompletionEffects:
        self.execute()
        return self.complete()

    def unblock(self) -> bool:
        """Let a transferred prompt pass a blocked head on both sides; False if that is not what blocks the rank."""
        done = self.rank.unblock()
        assert done == self.twin.unblock()
        self.compare()
        return done

    def fail_head(self) -> bool:
        """End a stuck head on both sides; False if nothing is stuck."""
        if self.rank.stuck_head() is None:
            assert self.rank.fail_head() is None
            return False
        failed = self.rank.fail_head()
        assert failed == self.twin_fail()
        self.ledger.ended(failed.request_id)
        self.compare()
        return True

    def drain(self, most: int = 2000) -> None:
        """Passes until nothing is live; handoffs and stuck requests are ended as a driver would."""
        for _ in range(most):
            if self.in_flight is not None:
                self.complete()
            self.end_handoffs()
            if self.rank.is_drained():
                self.compare_drained()
                return
            self.execute()
            self.complete()
            if self.twin.last_pass_effect_free:
                self.retry()
                if self.rank.is_drained() or not self.twin.last_pass_effect_free:
                    continue
                if not self.unblock() and not self.fail_head():
                    assert self.twin.handoffs.pending, f"no progress and nothing stuck: {self.twin.state()}"
                    self.once(CancelDestination(self.twin.handoffs.pending[0].handoff_id))
        raise AssertionError(f"not drained after {most} passes: {self.twin.state()}")

    def end_handoffs(self) -> None:
        """What coordinators will still command: held sources are released, reserved destinations activated."""
        for handoff_id in list(self.twin.handoffs.held):
            self.once(ReleaseSource(handoff_id))
        for handoff_id in list(self.twin.handoffs.reserved):
            self.apply(ActivateDestination(handoff_id))

    def compare_drained(self) -> None:
        """No block is lost: what is not free is cached and can be evicted."""
        assert not self.ledger.accepted
        metrics = self.rank.metrics()
        assert metrics.running_requests == metrics.waiting_requests == 0
        assert not self.rank.is_ready()
        if isinstance(self.twin, SglangModel):
            assert self.twin.kv.reachable == self.twin.total_tokens
            assert self.twin.kv.tree.protected_size == 0
        else:
            assert metrics.active_blocks == 0
            assert metrics.inactive_blocks + self.twin.pool.free == metrics.total_blocks

    def retry(self) -> None:
        """Passes at this instant while the hint of an effect-free one asks for them, as a driver would."""
        again = (SameTimestampRetry.RETRY, SameTimestampRetry.COUNTDOWN)
        mine, expected = None, None
        while self.twin.last_pass_effect_free and (mine is None or expected.same_timestamp_retry in again):
            mine, expected = self.rank.execute_pass(self.now), self.twin.execute_pass(self.now)
            assert mine.same_timestamp_retry == expected.same_timestamp_retry
            assert bool(self.rank.header[0]["effect_free"]) == self.twin.last_pass_effect_free
            assert mine.end_ms == expected.end_ms
            self.now = mine.end_ms
            shown = self.rank.complete_pass(mine.pending, self.now)
            wanted = self.twin.complete_pass(expected.pending, self.now)
            if shown.outputs or wanted.outputs or shown.kv_events or wanted.kv_events:
                same_effects(shown, wanted)
            self.index.replay([*mine.start_effects.kv_events, *shown.kv_events])
            self.ledger.completion(shown)
        self.compare()

    def reload(self) -> None:
        """Replace the rank by a new one restored from a pickled snapshot."""
        saved = pickle.loads(pickle.dumps(self.rank.snapshot()))
        other = SchedulerRank(self.identity, self.config, timing=self.timing)
        other.restore(saved)
        assert other.digest() == self.rank.digest()
        self.rank = other
        self.compare()

    def branch(self, passes: int, *, keep: bool) -> None:
        """Fork, run one branch ahead, and go on with the other: both must be untouched by each other.

        `keep` says which of the two is the one that runs ahead, the original or its fork.
        """
        other = self.rank.fork()
        start = self.rank.digest()
        assert other.digest() == start
        ahead, stay = (other, self.rank) if keep else (self.rank, other)
        now = self.now
        for _ in range(passes):
            outcome = ahead.execute_pass(now)
            now = outcome.end_ms
            ahead.complete_pass(outcome.pending, now)
        ahead.check_integrity()
        assert stay.digest() == start
        self.rank = stay
        self.compare()


class Ledger:
    """Destinations a rank accepted: each is reserved at most once and ends once."""

    def __init__(self) -> None:
        #: request id -> whether its reservation was told
        self.accepted: dict[int, bool] = {}
        #: accepted while a pass is in flight: outputs of that pass are of a request before it with the same id
        self.late: set[int] = set()

    def command(self, command: Command, effects: CommandEffects, *, in_flight: bool) -> None:
        if isinstance(effects.result, DestinationAccepted):
            request_id = effects.result.request_id
            # The one before with this id may have ended in the pass in flight, which is told later.
            assert in_flight or request_id not in self.accepted
            self.accepted[request_id] = False
            if in_flight:
                self.late.add(request_id)
        for request_id in effects.retired_requests:
            self.ended(request_id)
        if isinstance(command, CancelRequest) and effects.suppressed_pending_output:
            # Nobody will be told that it was complete.
            self._told(id_to_int(command.request_id))
        self._reserved(effects.lifecycle_events)

    def completion(self, effects: PassCompletionEffects) -> None:
        for output in effects.outputs:
            if output.completed:
                self._told(output.request_id)
        self.late.clear()
        self._reserved(effects.lifecycle_events)

    def _told(self, request_id: int) -> None:
        if request_id not in self.late:
            self.ended(request_id)

    def ended(self, request_id: int) -> None:
        self.accepted.pop(request_id, None)
        self.late.discard(request_id)

    def _reserved(self, events: Iterable[Any]) -> None:
        for event in events:
            if isinstance(event, DestinationReserved):
                assert self.accepted[event.request_id] is False
                self.accepted[event.request_id] = True


def drive_both(
    config: EngineConfig,
    identity: RankIdentity,
    script: Iterable[tuple[Any, ...]],
    *,
    at_start: Callable[[Pair], None] | None = None,
    after_step: Callable[[Pair], None] | None = None,
) -> Pair:
    """Run a script on both sides, comparing after every step, then drain.

    Steps are ``("submit", request)``, ``("cancel", request_id, discard)``, ``("pass",)`` for a whole pass,
    ``("execute",)`` and ``("complete",)`` for its halves (ignored where they do not apply), and those of
    `handoff_step`.
    """
    pair = Pair(config, identity)
    if at_start is not None:
        at_start(pair)
    for action, *arguments in script:
        if action == "submit":
            pair.submit(arguments[0])
        elif action == "cancel":
            pair.cancel(arguments[0], discard=arguments[1])
        elif action == "complete" and pair.in_flight is not None:
            pair.complete()
        elif action == "execute" and pair.in_flight is None:
            pair.execute()
        elif action == "pass":
            if pair.in_flight is not None:
                pair.complete()
            pair.step()
        elif action in HANDOFF_COMMANDS:
            handoff_step(pair, action, *arguments)
        if after_step is not None:
            after_step(pair)
    pair.drain()
    return pair


HANDOFF_COMMANDS = {
    "source": SubmitHandoffPrefill,
    "reserve": ReserveDestination,
    "activate": ActivateDestination,
    "release": ReleaseSource,
    "cancel_source": CancelSource,
    "cancel_destination": CancelDestination,
}


def handoff_step(pair: Pair, action: str, target: tuple[str, int], request: Request | None = None) -> None:
    """One handoff command of a script.

    `target` is ``("id", handoff_id)``, or ``("any", n)`` for one of the handoffs that the command concerns, if there
    are any.
    """
    kind, number = target
    if kind == "any":
        handoffs = pair.twin.handoffs
        known = {
            "activate": [*handoffs.reserved],
            "release": [*handoffs.held, *handoffs.registered],
            "cancel_source": [*handoffs.registered, *handoffs.held],
            "cancel_destination": [
                *handoffs.reserved,
                *handoffs.active,
                *(entry.handoff_id for entry in handoffs.pending),
            ],
        }[action]
        number = known[number % len(known)] if known else number
    command = HANDOFF_COMMANDS[action]
    if request is not None:
        pair.attempt(command(number, request))
    elif action == "activate":
        before = pair.rank.metrics().active_blocks
        effects = pair.apply(command(number))
        if not effects.lifecycle_events:
            assert pair.rank.metrics().active_blocks <= before
    else:
        pair.once(command(number))


# ---------------------------------------------------------------- a rank alone, for scenarios with known numbers


@dataclass(frozen=True)
class Step:
    """Everything one whole pass showed."""

    start_ms: float
    end_ms: float
    start: Any
    effects: PassCompletionEffects

    @property
    def admitted(self) -> dict[int, int]:
        """Request id -> reused tokens, in admission order."""
        return {item.request_id: item.reused_input_tokens for item in self.start.admissions}

    @property
    def outputs(self) -> list[Any]:
        return list(self.effects.outputs)

    @property
    def tokens(self) -> list[tuple[int, int | None]]:
        return [(output.request_id, output.token_id) for output in self.outputs]

    @property
    def ended(self) -> list[tuple[int, bool]]:
        """(request id, rejected) of the requests that ended."""
        return [(output.request_id, output.rejected) for output in self.outputs if output.completed]

    @property
    def events(self) -> list[Any]:
        return [*self.start.kv_events, *self.effects.kv_events]

    @property
    def stored(self) -> list[Any]:
        return [event.data for event in self.events if isinstance(event.data, Stored)]

    @property
    def fpm(self) -> Any:
        return self.effects.forward_pass_metrics


class Engine:
    """A rank with a clock: `step` is a pass executed now and completed at its own end."""

    def __init__(self, identity: RankIdentity | None = None, *, timing: Any = None, policy: Any = None, **fields: Any):
        fields.setdefault("block_size", 4)
        fields.setdefault("speedup_ratio", 0.0)
        self.config = EngineConfig(**fields)
        self.rank = SchedulerRank(identity or RankIdentity(), self.config, timing=timing, policy=policy)
        self.now = 0.0

    def submit(
        self, request_id: Any, tokens: Any, out: int = 1, planned: Any = None, *, at: float | None = None
    ) -> CommandEffects:
        request = Request(request_id, list(tokens), out, planned)
        return self.rank.apply_command(Submit(request), CommandContext(self.now if at is None else at))

    def cancel(self, request_id: Any, *, discard: bool = False) -> CommandEffects:
        return self.rank.apply_command(CancelRequest(request_id, discard), CommandContext(self.now))

    def step(self, at: float | None = None) -> Step:
        start = self.now if at is None else at
        outcome = self.rank.execute_pass(start)
        self.rank.check_integrity()
        effects = self.rank.complete_pass(outcome.pending, outcome.end_ms)
        self.now = outcome.end_ms
        return Step(start, outcome.end_ms, outcome.start_effects, effects)

    def drain(self, most: int = 500, *, at: float | None = None) -> list[Step]:
        """Steps until nothing is live; fails if that does not happen."""
        steps = []
        while not self.rank.is_drained():
            assert len(steps) < most, f"{self.rank.metrics()} after {most} passes"
            steps.append(self.step(at))
        return steps

    def row(self, request_id: Any) -> Any:
        row = self.rank.request_row(request_id)
        assert row is not None, f"request {request_id} is gone"
        return row

    def status(self, request_id: Any) -> str:
        return STATUS[int(self.row(request_id)["status"])]

    def ids(self, which: str) -> list[int]:
        """Request ids of ``running`` or ``waiting``, in order."""
        result: list[int] = rank_state(self.rank)[which]
        return result

    @property
    def active(self) -> int:
        return self.rank.metrics().active_blocks

    @property
    def inactive(self) -> int:
        return self.rank.metrics().inactive_blocks


class RouterIndex:
    """What a router makes of a stream of KV events; any inconsistency is an error."""

    def __init__(self) -> None:
        self.present: set[int] = set()
        self.next_id = 0
        self.stores = 0
        self.removals = 0

    def replay(self, events: Iterable[Any]) -> None:
        for event in events:
            assert event.event_id == self.next_id, f"event {event.event_id} where {self.next_id} was due"
            self.next_id += 1
            if isinstance(event.data, Stored):
                self._store(event.data)
            else:
                for block in event.data.block_hashes:
                    assert block in self.present, f"removed block {block} is not present"
                    self.present.remove(block)
                    self.removals += 1

    def _store(self, data: Stored) -> None:
        assert data.blocks, "an event without blocks"
        parent = data.parent_hash
        assert parent is None or parent in self.present, f"parent {parent} is not present"
        for block in data.blocks:
            assert block.block_hash not in self.present, f"block {block.block_hash} is stored twice"
            self.present.add(block.block_hash)
            self.stores += 1


class TierIndex(RouterIndex):
    """A router index per tier; ids count over both."""

    def __init__(self) -> None:
        super().__init__()
        self.host: set[int] = set()

    def replay(self, events: Any) -> None:
        for event in events:
            if event.storage_tier == "device":
                super().replay([event])
                continue
            assert event.event_id == self.next_id
            self.next_id += 1
            if hasattr(event.data, "blocks"):
                new = [block.block_hash for block in event.data.blocks]
                assert len(set(new)) == len(new)
                assert self.host.isdisjoint(new)
                self.host.update(new)
            else:
                assert self.host.issuperset(event.data.block_hashes)
                self.host.difference_update(event.data.block_hashes)
