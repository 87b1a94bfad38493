"""The invariants of a rank's state, one by one (spec/kv-cache.md section 2, spec/sglang.md sections 2 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsim.errors import IntegrityError
from kvsim.layout import BlockFlag as _Flag
from kvsim.layout import HandoffRole as _Role
from kvsim.layout import Tier as _Tier
from kvsim.layout import TierJob as _Job
from kvsim.layout import TierLink as _Link
from kvsim.layout import TierState as _State

__all__ = ["check_rank"]

_WAITING, _RUNNING, _PREEMPTED, _HELD_SOURCE, _PENDING_DESTINATION, _HELD_DESTINATION = 1, 2, 3, 4, 5, 6
_HANDOFF, _ACTIVATED, _MATERIALISED = 8, 16, 32
_CONNECTOR, _UNSTORED, _DEPENDENT, _PARKED = 1, 2, 4, 8
_STORE, _LOAD = 1, 2
_RADIX = 1
_ROOT = 0
_GOLDEN = 0x9E3779B97F4A7C15


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise IntegrityError(message)


def _same(name: str, recorded: Any, counted: Any) -> None:
    _require(recorded == counted, f"{name} is {recorded}, counting gives {counted}")


def check_rank(state: Any, locked: Sequence[int] = ()) -> None:
    """Verify the arena of a `RankState` between passes.

    Paged engines: every block is in exactly one place and its references are
    its occurrences in block tables; the queue of inactive ones and lists link both
    ways; the index finds each
    findable block under its hash and nothing else; every sum equals its
    recount. Radix engine: every page is free, in the tree or of one request;
    the tree links both ways and is indexed; locks are those of the leases; the
    eviction heap holds the unlocked leaves in order; every sum equals its
    recount.

    Parameters
    ----------
    state : RankState
    locked : sequence of int
        Radix engine: nodes locked by `RankState.tree_lock`, once per lock.

    Raises
    ------
    IntegrityError
        Naming the first invariant that does not hold.
    """
    config, header = state.view("config")[0], state.view("header")[0]
    requests = state.view("requests")
    live = np.flatnonzero(requests["status"])
    _same("num_live", header["num_live"], len(live))
    if config["engine"] == _RADIX:
        _check_radix(state, config, header, requests, live, locked)
        _check_queues(state, config, header, requests)
        return
    blocks, tables = state.view("blocks"), state.view("tables")
    held = np.zeros(len(blocks), np.int64)
    for slot in live.tolist():
        row = requests[slot]
        _require(
            row["n_blocks"] <= 0 or row["table"] >= 0,
            f"request row {slot} owns {row['n_blocks']} blocks without a table",
        )
        owned = tables[row["table"] : row["table"] + row["n_blocks"]] if row["n_blocks"] else tables[:0]
        _require(len(np.unique(owned)) == len(owned), f"request row {slot} lists a block twice")
        np.add.at(held, owned, 1)
        _check_request(row, slot, config)
    if config["tiers"]:
        np.add.at(held, _check_tiers(state, config, header, requests), 1)
    _require((held == blocks["refs"]).all(), "references differ from occurrences in block tables")

    _check_pool(state, config, header, blocks)
    _check_queues(state, config, header, requests)
    if config["caching"]:
        _check_findable(state, requests, live, blocks)
    else:
        _require(not blocks["hashed"].any(), "prefix caching is off but a block is findable")
    if config["host"]:
        _check_host(state, config, header, requests)
    elif not config["tiers"]:
        for name in ("num_connector", "num_asleep", "num_transfers"):
            _same(f"{name} without a host tier", header[name], 0)


def _check_request(row: Any, slot: int, config: Any) -> None:
    size = config["block_size"]
    name = f"request row {slot}"
    _require(row["computed"] <= row["length"], f"{name}: computed {row['computed']} > length {row['length']}")
    _require(row["allocated"] <= row["length"], f"{name}: allocated {row['allocated']} > length {row['length']}")
    _require(row["allocated"] <= row["capacity"], f"{name}: allocated {row['allocated']} > capacity {row['capacity']}")
    _same(f"{name}: capacity", row["capacity"], row["n_blocks"] * size)
    _same(f"{name}: generated", row["generated"], row["length"] - row["num_input"])
    _same(f"{name}: next_seal", row["next_seal"], (row["computed"] // size + 1) * size)
    if row["status"] == _HELD_SOURCE:
        _require(row["length"] >= row["limit"], f"{name} is held as a source but is not complete")
    elif row["status"] == _HELD_DESTINATION or row["flags"] & _MATERIALISED:
        _same(f"{name}: blocks of a destination", row["n_blocks"], -(-int(row["num_input"]) // int(size)))
        _same(f"{name}: allocated", row["allocated"], row["num_input"])
        _same(f"{name}: computed", row["computed"], row["num_input"] if row["flags"] & _MATERIALISED else 0)
    elif row["status"] != _RUNNING and not row["host"] & _CONNECTOR:
        _same(f"{name}: blocks of a waiting request", row["n_blocks"], 0)


def _check_pool(state: Any, config: Any, header: Any, blocks: Any) -> None:
    queue, head, tail = state.view("inactive"), int(header["inactive_head"]), int(header["inactive_tail"])
    _require(0 <= tail - head <= len(queue), f"the queue of inactive blocks goes from {head} to {tail}")
    places = np.arange(head, tail) % len(queue)
    inside = np.zeros(len(queue), bool)
    inside[places] = True
    _require((queue[~inside] == -1).all(), "a block lies outside the queue of inactive blocks")
    places = places[queue[places] != -1]
    inactive = queue[places]
    _same("num_inactive", header["num_inactive"], len(inactive))
    _require((blocks["place"][inactive] == places).all(), "an inactive block does not know its place in the queue")
    listed = np.zeros(len(blocks), bool)
    listed[inactive] = True
    _require((listed == (blocks["place"] != -1)).all(), "a block that is not in the queue has a place in it")
    _require(
        (listed == ((blocks["refs"] == 0) & (blocks["hashed"] != 0))).all(),
        "the queue of inactive blocks is not the findable blocks without references",
    )
    free = state.view("free_stack")
    _require(len(np.unique(free)) == len(free), "the stack lists a block twice")
    empty = np.zeros(len(blocks), bool)
    empty[free] = True
    _require(
        (empty == ((blocks["refs"] == 0) & (blocks["hashed"] == 0))).all(),
        "the stack is not the blocks without content and references",
    )
    _same("num_reserved between passes", header["num_reserved"], 0)


def _check_queues(state: Any, config: Any, header: Any, requests: Any) -> None:
    running = state.view("running")
    _require((requests["status"][running] == _RUNNING).all(), "a request in `running` is not running")
    _same("running requests", len(np.unique(running)), (requests["status"] == _RUNNING).sum())
    waiting = _listed("waiting", header, requests)
    _same("num_waiting", header["num_waiting"], len(waiting))
    prebuilt = _listed("prebuilt", header, requests)
    _require(config["engine"] == _RADIX or not prebuilt, "a paged rank has a list of prebuilt requests")
    connector = _listed("connector", state.view("host")[0], requests) if config["host"] else []
    if config["tiers"]:
        connector = _listed("parked", state.view("tiers")[0], requests)
    _same("num_connector", header["num_connector"], len(connector))
    queued = waiting + connector + prebuilt
    status, flags = requests["status"][queued], requests["flags"][queued]
    _require(np.isin(status, (_WAITING, _PREEMPTED)).all(), "a request in the waiting list is not waiting")
    _same("waiting requests", len(queued), np.isin(requests["status"], (_WAITING, _PREEMPTED)).sum())
    if config["tiers"]:
        # Parked requests are in no sum.
        status, flags, queued = status[: len(waiting)], flags[: len(waiting)], waiting
    again = (status == _PREEMPTED) | ((flags & _ACTIVATED) != 0)
    for prefix, group, column in (("queued", ~again, "num_input"), ("requeued", again, "length")):
        lengths = requests[column][queued][group].astype(np.int64)
        _same(f"{prefix}_count", header[f"{prefix}_count"], len(lengths))
        _same(f"{prefix}_sum", header[f"{prefix}_sum"], lengths.sum())
        _same(f"{prefix}_squares", header[f"{prefix}_squares"], (lengths * lengths).sum())
    _check_handoffs(state, config, header, requests, prebuilt)
    rows = requests[running]
    _same("running_blocks", header["running_blocks"], rows["n_blocks"].sum())
    total = rows["num_input"].astype(np.int64) + rows["max_output"]
    _same("running_completion", header["running_completion"], (-(-total // config["block_size"])).sum())
    ids = {(int(row["id_hi"]), int(row["id_lo"])) for row in requests[requests["status"] != 0]}
    _same("distinct ids", len(ids), int(header["num_live"]))
    for slot in np.flatnonzero(requests["status"]).tolist():
        row = requests[slot]
        _same("row found by id", state.find(int(row["id_hi"]), int(row["id_lo"])), slot)


def _listed(name: str, header: Any, requests: Any) -> list[int]:
    """Rows of a list through `next` and `prev` of the requests, in order."""
    found: list[int] = []
    before, slot = -1, int(header[f"{name}_head"])
    while slot >= 0:
        _require(len(found) <= len(requests), f"the {name} list does not end")
        _same(f"request row {slot}: prev", requests[slot]["prev"], before)
        found.append(slot)
        before, slot = slot, int(requests[slot]["next"])
    _same(f"{name}_tail", header[f"{name}_tail"], before)
    return found


def _check_handoffs(state: Any, config: Any, header: Any, requests: Any, prebuilt: list[int]) -> None:
    """Roles agree with status and flags, no handoff has two equal halves, lists and sums are those of the rows."""
    halves, status, flags = state.view("handoffs"), requests["status"], requests["flags"]
    role = halves["role"]
    _require(((role != _Role.NONE) == ((flags & _HANDOFF) != 0)).all(), "a half of a handoff has no role")
    _require((status[role != _Role.NONE] != 0).all(), "an unused request row is half of a handoff")
    unused = halves[role == _Role.NONE]
    _require((unused == np.zeros(1, halves.dtype)).all(), "an unused row of `handoffs` is not empty")
    for fixed, wanted in (
        (_Role.SOURCE_HELD, _HELD_SOURCE),
        (_Role.DESTINATION_PENDING, _PENDING_DESTINATION),
        (_Role.DESTINATION_HELD, _HELD_DESTINATION),
    ):
        _require(((role == fixed) == (status == wanted)).all(), f"role {fixed.name} does not fit a status")
    active, materialised = (flags & _ACTIVATED) != 0, (flags & _MATERIALISED) != 0
    _require(((role == _Role.DESTINATION_ACTIVE) == active).all(), "an active destination is not activated")
    _require((active & (status == _WAITING))[materialised].all(), "a materialised request does not wait")
    for name, destination in (("source", False), ("destination", True)):
        mine = halves[(role >= _Role.DESTINATION_PENDING) if destination else (role != 0) & (role <= _Role.SOURCE_HELD)]
        pairs = {(int(row["handoff_hi"]), int(row["handoff_lo"])) for row in mine}
        _same(f"distinct handoffs of {name} halves", len(pairs), len(mine))

    pending = _listed("pending", header, requests)
    _same("pending destinations", sorted(pending), np.flatnonzero(role == _Role.DESTINATION_PENDING).tolist())
    if config["engine"] == _RADIX:
        _same("prebuilt requests", sorted(prebuilt), np.flatnonzero(materialised).tolist())
    _require((np.diff(requests["waiting_order"][pending]) > 0).all(), "pending destinations are out of order")
    _require((halves["attempted"][pending[1:]] == -1).all(), "a pending destination was tried before it came first")
    _require((halves["attempted"] <= header["capacity_generation"]).all(), "an attempt of a later capacity generation")
    for name, members in (
        ("num_held_sources", role == _Role.SOURCE_HELD),
        ("num_pending", role == _Role.DESTINATION_PENDING),
        ("num_held_destinations", role == _Role.DESTINATION_HELD),
        ("num_materialised", materialised),
    ):
        _same(name, header[name], members.sum())
    expected = np.isin(role, (_Role.DESTINATION_PENDING, _Role.DESTINATION_HELD))
    lengths = requests["num_input"][expected].astype(np.int64)
    _same("expected_sum", header["expected_sum"], lengths.sum())
    _same("expected_squares", header["expected_squares"], (lengths * lengths).sum())
    rows = requests[(role == _Role.DESTINATION_HELD) | materialised]
    total = rows["num_input"].astype(np.int64) + rows["max_output"]
    _same("promised_blocks", header["promised_blocks"], (-(-total // config["block_size"]) - rows["n_blocks"]).sum())


def _check_findable(state: Any, requests: Any, live: Any, blocks: Any) -> None:
    """Each hash is in the forest once, its newer copies in a ring; live prompts find in it what is there."""
    flags, links, follows = blocks["hashed"], blocks["link"], blocks["follow"]
    findable, newer = (flags & _Flag.FINDABLE) != 0, (flags & _Flag.NEWER) != 0
    copied, rooted = (flags & _Flag.COPIED) != 0, (flags & _Flag.ROOTED) != 0
    _require(((flags == 0) | findable).all() and (flags >> len(_Flag) == 0).all(), "a block has impossible flags")
    none = blocks[~findable]
    _require((none["link"] == -1).all() and (none["follow"] == -1).all(), "a block that is not findable is linked")
    _require(
        (flags[newer] == _Flag.FINDABLE | _Flag.NEWER).all() and (follows[newer] == -1).all(),
        "a newer copy is in the forest",
    )
    forest = np.flatnonzero(findable & ~newer)
    _same("distinct hashes", len(np.unique(blocks["hash"][forest])), len(forest))

    # What is found through the block before it, and what that block finds, are each other's neighbours.
    below = np.flatnonzero(findable & ~newer & ~rooted)
    above = forest[follows[forest] != -1]
    _require(
        np.isin(links[below], above).all() and (follows[links[below]] == below).all(),
        "a block is not the one behind the block before it",
    )
    _same("blocks behind another", len(above), len(below))
    up = links[below]
    for _ in range(len(below)):
        up = links[up[~rooted[up]]]
        if len(up) == 0:
            break
    _require(len(up) == 0, "blocks are behind each other in a circle")

    heads = state.view("heads")
    seen = np.zeros(len(blocks), bool)
    for at in np.flatnonzero(heads != -1).tolist():
        block = int(heads[at])
        while block != -1:
            _require(rooted[block] and not seen[block], f"block {block} in chain {at} is not rooted, or is in two")
            _same(f"chain of block {block}", int(blocks["hash"][block]) & (len(heads) - 1), at)
            seen[block] = True
            block = int(links[block])
    _require((seen == rooted).all(), "a rooted block is in no chain")

    copies = state.view("copies")
    _require((copies[~(newer | copied)] == np.zeros(1, copies.dtype)).all(), "a block without copies is in a ring")
    ringed = newer & False
    for oldest in np.flatnonzero(copied).tolist():
        before, block = oldest, int(copies["next"][oldest])
        _require(block != oldest, f"block {oldest} is alone in its ring")
        while True:
            _same(f"block {block}: older copy", int(copies["prev"][block]), before)
            if block == oldest:
                break
            _require(newer[block] and not ringed[block], f"block {block} in the ring of {oldest} is no newer copy")
            _same(f"block {block}: hash", blocks["hash"][block], blocks["hash"][oldest])
            ringed[block] = True
            before, block = block, int(copies["next"][block])
    _require((ringed == newer).all(), "a newer copy is in no ring")

    tables = state.view("tables")
    for slot in live.tolist():
        row, hashes = requests[slot], state.content_hashes(slot)
        owned = tables[row["table"] : row["table"] + row["n_blocks"]] if row["n_blocks"] else tables[:0]
        sealed = np.flatnonzero(flags[owned])
        _require(
            (blocks["hash"][owned[sealed]] == hashes[sealed]).all(),
            f"request row {slot} owns a block with the hash of another",
        )
        known = hashes[: row["hashed"]]
        here = np.isin(known, blocks["hash"][forest])
        cached = len(known) if here.all() else int(np.argmin(here))
        found = state.lookup(slot)
        _same(f"request row {slot}: findable leading blocks", len(found), cached)
        _require(not here[cached:].any(), f"request row {slot}: a block is findable, and one before it is not")
        _require(
            (findable & ~newer)[found].all() and (blocks["hash"][found] == known[:cached]).all(),
            f"request row {slot} finds a block that is not the oldest copy",
        )
        remembered, active = state.remembered(slot)
        _require(
            len(remembered) <= cached and (remembered == found[: len(remembered)]).all(),
            f"request row {slot} remembers a block that it would not find",
        )
        _same(f"request row {slot}: remembered blocks in use", active, (blocks["refs"][remembered] > 0).sum())


# ---------------------------------------------------------------- host tier


def _check_host(state: Any, config: Any, header: Any, requests: Any) -> None:
    """Entries, their order and pins, transfers and what they hold, and who waits for them (spec/host-offload.md)."""
    host, entries, transfers = state.view("host")[0], state.view("host_entries"), state.view("transfers")
    used = np.flatnonzero(entries["pins"] >= 0)
    _check_entries(state, config, host, entries, used)

    prepared, stores, loads = (
        _chained(name, int(host[f"{name}_head"]), int(host[f"{name}_tail"]), transfers)
        for name in ("prepared", "store", "load")
    )
    _require(host["settled_head"] == -1 and host["settled_tail"] == -1, "a settled transfer was not shown")
    _same("transfers in a list", sorted(prepared + stores + loads), np.flatnonzero(transfers["kind"]).tolist())
    _same("num_transfers", header["num_transfers"], len(prepared) + len(stores) + len(loads))
    for name, rows, kind, on_link in (
        ("prepared", prepared, _STORE, 0),
        ("store", stores, _STORE, 1),
        ("load", loads, _LOAD, 1),
    ):
        members = transfers[rows]
        _require(
            (members["kind"] == kind).all() and (members["on_link"] == on_link).all(),
            f"a transfer of another kind is in the {name} list",
        )
        _require((np.diff(members["id"]) > 0).all(), f"the {name} list is not in order of transfer ids")
        if on_link:
            _require((np.diff(members["deadline_ms"]) >= 0).all(), f"the {name} link is not first in, first out")
            _require((members["deadline_ms"] <= host[f"{name}_tail_ms"]).all(), f"the {name} link ends too early")
    _require((transfers["id"][prepared + stores + loads] < host["next_transfer"]).all(), "a transfer has the next id")

    blocks, sources = state.view("transfer_blocks"), state.view("sources")
    filled = np.full(len(entries), -1)
    read_by = np.full(len(sources), -1)
    pins = np.zeros(len(entries), np.int64)
    for row in prepared + stores + loads:
        first, count = int(transfers[row]["first"]), int(transfers[row]["count"])
        mine = blocks[first : first + count]
        _require(count > 0 and first + count <= host["blocks_used"], f"transfer row {row} has {count} blocks")
        _require((entries["hash"][mine["entry"]] == mine["hash"]).all(), f"transfer row {row} names another block")
        if row in loads:
            np.add.at(pins, mine["entry"], 1)
            continue
        _require((filled[mine["entry"]] == -1).all(), "two stores fill one block")
        filled[mine["entry"]] = row
        _require((read_by[mine["block"]] == -1).all(), "two stores read one device block")
        read_by[mine["block"]] = row
    _require((entries["transfer"][used] == filled[used]).all(), "a pending block has no store, or a resident one has")
    _require((sources == read_by).all(), "`sources` is not what the stores read")
    _require((entries["pins"][used] == pins[used]).all(), "pins differ from the loads that read a block")
    _check_waiters(state, config, header, host, requests, transfers, prepared + stores, loads)


def _check_entries(state: Any, config: Any, host: Any, entries: Any, used: Any) -> None:
    _same("num_entries", host["num_entries"], len(used))
    _require(len(used) <= config["host_blocks"], f"{len(used)} blocks in a host of {config['host_blocks']}")
    _same("distinct hashes in the host", len(np.unique(entries["hash"][used])), len(used))
    pending = entries["transfer"][used] >= 0
    _same("num_pending", host["num_pending"], pending.sum())
    _require((entries["pins"][used][pending] == 0).all(), "a load reads a pending block")
    index = state.view("host_index")
    listed = (index[index != np.uint64(2**64 - 1)] & np.uint64(2**32 - 1)).astype(np.int64)
    _require(len(listed) == len(used) and (np.sort(listed) == used).all(), "the host index is not the blocks there")
    for row in used.tolist():
        _same("block found in the host", state.host_find(int(entries[row]["hash"])), row)
    order = _chained("lru", int(host["lru_head"]), int(host["lru_tail"]), entries)
    _same("num_evictable", host["num_evictable"], len(order))
    evictable = used[~pending & (entries["pins"][used] == 0)]
    _same("blocks that may be evicted", sorted(order), evictable.tolist())
    keys = [(int(entries[row]["epoch"]), int(entries[row]["hash"])) for row in order]
    _require(keys == sorted(keys), "the LRU list is not in order of (epoch, hash)")
    _require(not keys or keys[-1][0] <= host["epoch"], "a block was touched in the future")


def _chained(name: str, head: int, tail: int, rows: Any) -> list[int]:
    """Rows of a doubly linked list, in order."""
    found: list[int] = []
    before, row = -1, head
    while row >= 0:
        _require(len(found) <= len(rows), f"the {name} list does not end")
        _same(f"{name} row {row}: prev", rows[row]["prev"], before)
        found.append(row)
        before, row = row, int(rows[row]["next"])
    _same(f"{name}_tail", tail, before)
    return found


def _check_waiters(
    state: Any, config: Any, header: Any, host: Any, requests: Any, transfers: Any, stores: list[int], loads: list[int]
) -> None:
    offloads = state.view("offloads")
    live = requests["status"] != 0
    connector = set(_listed("connector", host, requests))
    _same("requests of the connector queue", sorted(connector), np.flatnonzero(requests["host"] & _CONNECTOR).tolist())
    asleep = [slot for slot in connector if offloads[slot]["progress"] == host["progress"]]
    _same("num_asleep", header["num_asleep"], len(asleep))
    _require(not asleep or header["num_transfers"] > 0, "a request sleeps and no transfer is under way")
    for row in loads:
        _same(f"load of transfer row {row}", offloads[transfers[row]["slot"]]["load"], row)
    for slot in np.flatnonzero(live).tolist():
        row, request, name = offloads[slot], requests[slot], f"request row {slot}"
        whole = int(request["num_input"]) // int(config["block_size"])
        _require(0 <= row["next_store"] <= whole, f"{name}: asked to store {row['next_store']} of {whole} blocks")
        if row["latest_store"] >= 0:
            _require(row["latest_store"] in stores, f"{name}: its newest store is not under way")
            _same(f"{name}: request of its newest store", transfers[row["latest_store"]]["slot"], slot)
        if not request["host"] & _UNSTORED and whole <= config["num_blocks"]:
            _same(f"{name}: blocks it asked to store", row["next_store"], whole)
        if row["load"] >= 0:
            _require(row["load"] in loads and slot in connector, f"{name}: its load is not under way")
        if slot in connector:
            _same(f"{name}: has blocks", request["n_blocks"] > 0, row["device_blocks"] >= 0)
            _same(f"{name}: computed tokens of a request that waits for transfers", request["computed"], 0)
        else:
            _same(f"{name}: a load of its own", (int(row["load"]), int(row["device_blocks"])), (-1, -1))


# ---------------------------------------------------------------- KVBM tiers


def _check_tiers(state: Any, config: Any, header: Any, requests: Any) -> list[int]:
    """Blocks of each tier, jobs and what they hold, links, who is parked (spec/host-offload.md part B).

    Returns the device blocks that jobs hold, one entry per reference.
    """
    tiers, entries, jobs, rows = (state.view(name) for name in ("tiers", "tier_entries", "tier_jobs", "tier_blocks"))
    own = tiers[0]
    deep_state = state.deep()
    deep = {name: deep_state.view(name) for name in ("tiers", "tier_entries", "tier_jobs", "tier_blocks")}
    low = deep["tiers"][0]
    shared = deep_state is not state
    owner = state.sharer
    _check_tier_entries(state, config, own, entries)
    if shared:
        _check_tier_entries(deep_state, config, low, deep["tier_entries"])

    ended: dict[int, list[int]] = {link: [] for link in _Link}
    for name, heap, mine in (("ended", jobs, slice(0, 2)), ("below", deep["tier_jobs"], slice(2, None))):
        unsettled = _chained(name, int(own[f"{name}_head"]), int(own[f"{name}_tail"]), heap)
        first = min((float(heap["ended_ms"][row]) for row in unsettled), default=np.inf)
        _same(f"{name}_ms", float(own[f"{name}_ms"]), first)
        for row in unsettled:
            _require(heap["link"][row] in list(_Link)[mine], f"{name}: a transfer of another link")
            ended[int(heap["link"][row])].append(row)
    links = {}
    for link in _Link:
        table, heap = (own, jobs) if link < _Link.G2_TO_G3 else (low, deep["tier_jobs"])
        found = _chained(f"{link.name} link", int(table["link_head"][link]), int(table["link_tail"][link]), heap)
        _require((heap["link"][found] == link).all(), f"a job on the link {link.name} does not know it")
        _same(f"{link.name} has an end", bool(table["link_next_ms"][link] < np.inf), bool(found))
        links[link] = found + ended[link]
    _require(own["done_head"] == -1 and own["done_tail"] == -1, "a swap is over and was not shown")
    waiting = {
        tier: _chained(
            f"batches for {tier.name}",
            int(own["wait_head"][tier]),
            int(own["wait_tail"][tier]),
            jobs if tier is _Tier.G2 else deep["tier_jobs"],
        )
        for tier in _Tier
    }
    kinds, deep_kinds = jobs["kind"], deep["tier_jobs"]["kind"]
    ours = deep["tier_jobs"]["rank"] == owner
    offloads, swaps = (np.flatnonzero(kinds == kind).tolist() for kind in (_Job.OFFLOAD, _Job.SWAP))
    batches = links[_Link.G1_TO_G2] + waiting[_Tier.G2]
    stages = [row for link in (_Link.G3_TO_G2, _Link.G4_TO_G2) for row in links[link] if ours[row]]
    copies = [row for link in (_Link.G2_TO_G3, _Link.G2_TO_G4) for row in links[link] if ours[row]]
    copies += waiting[_Tier.G3] + waiting[_Tier.G4]
    _same("num_offloads", own["num_offloads"], len(offloads))
    for name, rows_of, _kind, among in (
        ("batches", batches, _Job.BATCH, kinds == _Job.BATCH),
        ("stages", stages, _Job.STAGE, (deep_kinds == _Job.STAGE) & ours),
        ("copies", copies, _Job.COPY, (deep_kinds == _Job.COPY) & ours),
    ):
        _same(f"{name} on a link or waiting for it", sorted(rows_of), np.flatnonzero(among).tolist())
    _same("swaps on the link", sorted(links[_Link.G2_TO_G1]), [row for row in swaps if jobs[row]["stages"] == 0])
    for leaders, followers, heap in ((offloads, batches, jobs), (swaps, stages, deep["tier_jobs"])):
        parents = heap["parent"][followers].tolist()
        _require(all(jobs[row]["stages"] == parents.count(row) for row in leaders), "a job miscounts its parts")
        _require(set(parents) <= set(leaders), "a part of a job has no whole")
    for tier, link, most in (
        (_Tier.G2, _Link.G1_TO_G2, config["offload_batch"]),
        (_Tier.G3, _Link.G2_TO_G3, 1),
        (_Tier.G4, _Link.G2_TO_G4, config["offload_batch"]),
    ):
        running = len(links[link]) if tier is _Tier.G2 else int(ours[links[link]].sum())
        _same(f"batches on the link to {tier.name}", own["num_running"][tier], running)
        _require(running <= most, f"{running} batches go to {tier.name} at a time")
        _require(not waiting[tier] or running == most, f"a batch waits for {tier.name} without need")
    total = len(batches) + len(swaps) + len(stages) + len(copies)
    _same("num_transfers", header["num_transfers"], total)

    def of(job: Any, heap: Any) -> Any:
        return heap[job["first"] : job["first"] + job["count"]]

    held: list[int] = []
    pins = np.zeros(len(entries), np.int64)
    filled: list[int] = []
    for row in batches:
        part = of(jobs[row], rows)
        _require(1 <= len(part) <= config["offload_batch"], f"a batch has {len(part)} blocks")
        _require((entries["hash"][part["entry"]] == part["hash"]).all(), "a batch names another block")
        filled += part["entry"].tolist()
        held += part["block"].tolist()
    for row in offloads:
        held += of(jobs[row], rows)["block"].tolist()
    _same("num_quarantined", own["num_quarantined"], len(held))
    for row in swaps:
        part = of(jobs[row], rows)
        brought = part["entry"][jobs[row]["prefix"] :]
        _require((brought >= 0).all(), "a swap brings a block that G2 knows nothing of")
        np.add.at(pins, brought[entries["state"][brought] == _State.RESIDENT], 1)
        filled += brought[entries["state"][brought] == _State.ARRIVING].tolist()
        held += part["block"].tolist()
    for row in copies:
        np.add.at(pins, of(deep["tier_jobs"][row], deep["tier_blocks"])["entry"], 1)
    near = entries["tier"] == _Tier.G2
    _require((entries["pins"][near] == pins[near]).all(), "pins of G2 differ from the jobs that read it")
    arriving = np.flatnonzero(near & (entries["state"] != _State.RESIDENT))
    _same("blocks on their way to G2", sorted(filled), arriving.tolist())
    if shared:
        # Those of all sharers, each of which looks for its own on a link or waiting for it.
        stages, copies = (np.flatnonzero(deep_kinds == kind).tolist() for kind in (_Job.STAGE, _Job.COPY))
    _check_below(deep, stages, copies)
    _check_parked(state, own, requests, jobs, swaps)
    return held


def _check_below(deep: Any, stages: list[int], copies: list[int]) -> None:
    """What lies in G3 and G4 is pinned by the stages that read it and on its way as long as a copy brings it."""
    jobs, rows, entries = deep["tier_jobs"], deep["tier_blocks"], deep["tier_entries"]
    pins, filled = np.zeros(len(entries), np.int64), []
    for row in stages:
        first = jobs[row]["first"]
        np.add.at(pins, rows["below"][first : first + jobs[row]["count"]], 1)
    for row in copies:
        first = jobs[row]["first"]
        filled += rows["below"][first : first + jobs[row]["count"]].tolist()
    low = entries["tier"] > _Tier.G2
    _require((entries["pins"][low] == pins[low]).all(), "pins of G3 and G4 differ from the stages that read them")
    arriving = np.flatnonzero(low & (entries["state"] != _State.RESIDENT))
    _same("blocks on their way to G3 and G4", sorted(filled), arriving.tolist())


def _check_tier_entries(state: Any, config: Any, tiers: Any, entries: Any) -> None:
    used = np.flatnonzero(entries["tier"] >= 0)
    index = state.view("tier_index")
    listed = index[index >= 0]
    _require(len(listed) == len(used) and (np.sort(listed) == used).all(), "the tier index is not the blocks there")
    for row in used.tolist():
        if state.deep() is state or entries[row]["tier"] == _Tier.G2:
            found = state.tier_find(int(entries[row]["tier"]), int(entries[row]["hash"]))
            _same("block found in its tier", found, row)
    for tier in _Tier:
        mine = entries["tier"] == tier
        _same(f"num_entries of {tier.name}", tiers["num_entries"][tier], mine.sum())
        _require(mine.sum() <= config["tier_blocks"][tier], f"{mine.sum()} blocks in {tier.name}")
        order = _chained(f"LRU of {tier.name}", int(tiers["lru_head"][tier]), int(tiers["lru_tail"][tier]), entries)
        _same(f"num_evictable of {tier.name}", tiers["num_evictable"][tier], len(order))
        free = mine & (entries["state"] == _State.RESIDENT) & (entries["pins"] == 0)
        _same(f"blocks of {tier.name} that may be evicted", sorted(order), np.flatnonzero(free).tolist())


def _check_parked(state: Any, tiers: Any, requests: Any, jobs: Any, swaps: list[int]) -> None:
    parked = _listed("parked", tiers, requests)
    loads = state.view("offloads")["load"]
    _same("parked requests", sorted(parked), np.flatnonzero(requests["host"] & _PARKED).tolist())
    _same("asleep", state.view("header")[0]["num_asleep"], len(parked))
    _require(
        (requests["status"][parked] == _WAITING).all(), "a parked request is not one that waits for the first time"
    )
    followed = sorted(int(jobs[row]["slot"]) for row in swaps if jobs[row]["slot"] >= 0)
    _same("requests of swaps", followed, sorted(parked))
    for slot in parked:
        _require(loads[slot] in swaps and jobs[loads[slot]]["slot"] == slot, "a parked request has another swap")
    for slot in np.flatnonzero(requests["status"]).tolist():
        _require(slot in parked or loads[slot] == -1, f"request row {slot} has a swap and is not parked")


# ---------------------------------------------------------------- radix engine


def _check_radix(state: Any, config: Any, header: Any, requests: Any, live: Any, locked: Sequence[int]) -> None:
    radix, nodes, leases = state.view("radix")[0], state.view("nodes"), state.view("leases")
    rows = np.flatnonzero(nodes["live"])
    _require(len(rows) > 0 and rows[0] == _ROOT, "the root is not there")
    _same("live_nodes", radix["live_nodes"], len(rows))
    _require(
        nodes["parent"][_ROOT] == -1 and nodes["num_runs"][_ROOT] == 0 and nodes["lock_refs"][_ROOT] == 0,
        "the root has a parent, an edge or a lock",
    )
    tree = rows[1:]
    _check_edges(state, config, radix, nodes, tree)
    _check_links(radix, nodes, rows, tree)
    _check_locks(nodes, tree, np.concatenate([leases["node"][live], np.array(locked, np.int64)]).astype(np.int64))
    _check_index(state, nodes, tree)
    _check_eviction_heap(state, radix, nodes, tree)

    pages, unlocked = nodes["pages"][tree], nodes["lock_refs"][tree] == 0
    _same("evictable", radix["evictable"], pages[unlocked].sum())
    _same("protected", radix["protected"], pages[~unlocked].sum())
    private = int((leases["pages"][live].astype(np.int64) - leases["cached"][live]).sum())
    _same("num_blocks", config["num_blocks"], radix["available"] + pages.sum() + private)
    free = int(radix["available"]) * int(config["block_size"])
    if config["legacy"]:
        # Generation 1.3 hands out single tokens: those of partial pages that their owners do not use are free, too.
        # Pages that wait for the prompt of a destination are its own to the last token.
        users = live[requests["status"][live] != _HELD_DESTINATION]
        free += int((requests["allocated"][users].astype(np.int64) - requests["computed"][users]).sum())
    _require(free >= 0, f"{free} tokens are free")
    if not config["caching"]:
        _require(len(tree) == 0, "prefix caching is off but the tree has pages")

    ratio, most = float(radix["new_token_ratio"]), max(1.0, float(config["init_ratio"]))
    _require(0.0 <= ratio <= most, f"new_token_ratio is {ratio}, outside 0..{most}")
    _require(
        0 <= radix["countdown"] <= config["prefill_interval"],
        f"countdown is {radix['countdown']}, the interval {config['prefill_interval']}",
    )
    _require(
        0 <= radix["flushed"] <= header["num_events"],
        f"{radix['flushed']} of {header['num_events']} buffered events were handed out",
    )
    for slot in live.tolist():
        _check_lease(state, config, nodes, requests[slot], leases[slot], slot)
    _same("late_requests", radix["late_requests"], leases["late"][live].sum())


def _check_edges(state: Any, config: Any, radix: Any, nodes: Any, tree: Any) -> None:
    """Edges are not empty and lie in their spans; the spans of live nodes and the free ones tile the heap of runs."""
    runs = state.view("runs")
    part = nodes[tree]
    keys, count = part["keys"].astype(np.int64), part["num_runs"].astype(np.int64)
    span, room = part["span"].astype(np.int64), np.int64(1) << part["span_class"].astype(np.int64)
    _require((count > 0).all(), "a node has an empty edge")
    _require(((span <= keys) & (keys + count <= span + room)).all(), "the runs of an edge lie outside its span")
    first = np.cumsum(count) - count
    at = np.repeat(keys - first, count) + np.arange(count.sum())
    _require((runs["pages"][at] > 0).all(), "an edge has a run without pages")
    if len(tree):
        _require(
            (np.add.reduceat(runs["pages"][at], first) == part["pages"]).all(),
            "the runs of an edge do not sum to its pages",
        )
    if config["emit_events"]:
        _require((runs["pages"][at] == 1).all(), "a run is longer than the page that its events name")

    starts, sizes = span.tolist(), room.tolist()
    for size, free in enumerate(radix["run_free"].tolist()):
        while free != -1:
            _require(len(starts) <= radix["runs_used"], f"the list of free spans of {1 << size} runs does not end")
            starts.append(free)
            sizes.append(1 << size)
            free = int(runs["pages"][free])
    begin, length = np.array(starts, np.int64), np.array(sizes, np.int64)
    order = np.argsort(begin)
    ends = (begin + length)[order]
    _require((begin[order] == np.concatenate([[0], ends])[:-1]).all(), "the spans of runs overlap or leave a gap")
    _same("runs_used", radix["runs_used"], ends[-1] if len(ends) else 0)


def _check_links(radix: Any, nodes: Any, rows: Any, tree: Any) -> None:
    """Parents live and count their children, every node is below the root, unused rows are on their list."""
    parents = nodes["parent"][tree]
    _require(
        ((parents >= 0) & (parents < len(nodes))).all() and (nodes["live"][parents] != 0).all(),
        "a node hangs below a row that is not in use",
    )
    counted = np.bincount(parents, minlength=len(nodes))
    _require((counted[rows] == nodes["children"][rows]).all(), "a node miscounts its children")
    above, depth = parents, 0
    while (above != _ROOT).any():
        _require(depth <= len(tree), "the tree has a cycle")
        above = np.where(above == _ROOT, _ROOT, nodes["parent"][above])
        depth += 1
    _require((nodes["last_access"][rows] <= radix["clock"]).all(), "a node was touched in the future")
    ordinals = nodes["ordinal"][rows]
    _require(
        len(np.unique(ordinals)) == len(rows) and (ordinals < radix["next_ordinal"]).all(),
        "two nodes have the same ordinal, or one has the next",
    )
    unused, row = 0, int(radix["free_node"])
    while row != -1:
        _require(not nodes["live"][row], f"node {row} is in use and on the list of unused rows")
        unused += 1
        _require(unused <= len(nodes), "the list of unused nodes does not end")
        row = int(nodes["next"][row])
    _same("num_nodes", radix["num_nodes"], len(rows) + unused)


def _check_locks(nodes: Any, tree: Any, held: Any) -> None:
    """A lock of a node is a lock of all above it; there are no others."""
    expected = np.zeros(len(nodes), np.int64)
    above = held[held != _ROOT]
    while len(above):
        np.add.at(expected, above, 1)
        above = nodes["parent"][above]
        above = above[above != _ROOT]
    wrong = np.flatnonzero(nodes["lock_refs"] != expected)
    _require(
        len(wrong) == 0,
        f"lock_refs of nodes {wrong.tolist()} are {nodes['lock_refs'][wrong].tolist()}, "
        f"leases give {expected[wrong].tolist()}",
    )


def _check_index(state: Any, nodes: Any, tree: Any) -> None:
    """The index holds every node once, reachable from the home of its parent and first key."""
    index, runs = state.view("node_index"), state.view("runs")
    used = np.flatnonzero(index >= 0)
    listed = index[used]
    _require(
        len(listed) == len(tree) and (np.sort(listed) == tree).all(),
        "the index of children is not the nodes of the tree",
    )
    if len(tree) == 0:
        return
    mask = len(index) - 1
    parents = nodes["parent"][listed]
    keys = runs["key"][nodes["keys"][listed]]
    homes = (keys ^ (parents.astype(np.uint64) * np.uint64(_GOLDEN))) & np.uint64(mask)
    gap = (used - homes.astype(np.int64)) & mask
    # Empty slots up to each place, twice round, tell whether any lies between a home and its node.
    empty = np.concatenate([[0], np.cumsum(np.tile(index < 0, 2))])
    start = homes.astype(np.int64)
    _require((empty[start + gap] == empty[start]).all(), "a node cannot be reached from its home in the index")
    pairs = np.unique(np.stack([parents.astype(np.uint64), keys]), axis=1)
    _require(pairs.shape[1] == len(tree), "two children of a node begin with the same page")


def _check_eviction_heap(state: Any, radix: Any, nodes: Any, tree: Any) -> None:
    heap = state.view("evict_heap")
    _same("heap_size", radix["heap_size"], len(heap))
    leaves = tree[(nodes["children"][tree] == 0) & (nodes["lock_refs"][tree] == 0)]
    _require(
        len(leaves) == len(heap) and (np.sort(heap) == leaves).all(), "the eviction heap is not the unlocked leaves"
    )
    _require((nodes["heap_at"][heap] == np.arange(len(heap))).all(), "a leaf does not know its place in the heap")
    _same("nodes with a place in the heap", (nodes["heap_at"] >= 0).sum(), len(heap))
    at = np.arange(1, len(heap))
    below, above = heap[at], heap[(at - 1) // 2]
    time, ordinal = nodes["last_access"], nodes["ordinal"]
    _require(
        ((time[above] < time[below]) | ((time[above] == time[below]) & (ordinal[above] < ordinal[below]))).all(),
        "the eviction heap is out of order",
    )


def _check_lease(state: Any, config: Any, nodes: Any, row: Any, lease: Any, slot: int) -> None:
    size = int(config["block_size"])
    name = f"request row {slot}"
    pages, cached, computed = int(lease["pages"]), int(lease["cached"]), int(row["computed"])
    _same(f"{name}: n_blocks", row["n_blocks"], pages)
    _same(f"{name}: allocated", row["allocated"], pages * size)
    _same(f"{name}: pages of {computed} computed tokens", pages, -(-computed // size))
    _same(f"{name}: generated", row["generated"], row["length"] - row["num_input"])
    _same(f"{name}: limit", row["limit"], row["num_input"] + row["max_output"])
    _require(computed <= row["length"] <= row["limit"], f"{name}: computed {computed}, length {row['length']}")
    _require(0 <= cached <= computed // size, f"{name}: {cached} pages cached of {computed} computed tokens")
    if row["status"] in (_RUNNING, _HELD_DESTINATION) or row["flags"] & _MATERIALISED:
        # The pages of a destination count as computed while their content is on its way.
        _same(f"{name}: computed tokens of a request that is past its prefill", computed, row["length"])
    elif row["status"] == _HELD_SOURCE:
        _require(computed >= row["length"] - 1, f"{name}: a complete source has computed {computed} tokens")
        _require(not config["caching"] or cached == computed // size, f"{name}: {cached} pages of a held source cached")
    elif row["status"] == _PENDING_DESTINATION:
        _same(f"{name}: computed tokens of a pending destination", computed, 0)
    else:
        again = _PREEMPTED if row["generated"] else _WAITING
        _same(f"{name}: status of a waiting request", row["status"], again)
    late = 0 < config["max_model_len"] <= row["num_input"]
    _same(f"{name}: late", lease["late"], late)
    if pages == 0:
        _require(lease["node"] == _ROOT and cached == 0, f"{name} owns nothing but holds a node")
        return
    runs = state.content_runs(slot)
    path: list[int] = []
    node = int(lease["node"])
    while node != _ROOT:
        path.append(node)
        node = int(nodes["parent"][node])
    _same(f"{name}: cached", cached, sum(nodes["pages"][path].tolist()))
    _same(
        f"{name}: pages before the place in its content",
        cached,
        runs["pages"][: lease["run"]].sum() + lease["run_offset"],
    )
    if cached:
        edges, heap = [], state.view("runs")
        for node in reversed(path):
            first = int(nodes["keys"][node])
            edges.append(heap[first : first + int(nodes["num_runs"][node])])
        _require(
            _spelled(np.concatenate(edges), cached) == _spelled(runs, cached),
            f"{name}: the path of its node is not the beginning of its content",
        )


def _spelled(runs: Any, pages: int) -> list[tuple[int, int]]:
    """(key, pages) of the first `pages` pages, equal neighbours joined."""
    found: list[tuple[int, int]] = []
    for key, count in zip(runs["key"].tolist(), runs["pages"].tolist(), strict=True):
        if pages == 0:
            break
        take = min(count, pages)
        pages -= take
        if found and found[-1][0] == key:
            found[-1] = (key, found[-1][1] + take)
        else:
            found.append((key, take))
    return found
