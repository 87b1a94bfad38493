"""The invariants of a rank's state, checked one by one (spec/kv-cache.md section 2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsim.errors import IntegrityError

__all__ = ["check_rank"]

_WAITING, _RUNNING, _PREEMPTED = 1, 2, 3


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise IntegrityError(message)


def _same(name: str, recorded: Any, counted: Any) -> None:
    _require(recorded == counted, f"{name} is {recorded}, counting gives {counted}")


def check_rank(state: Any) -> None:
    """Verify the arena of a `RankState` between passes.

    Every block is in exactly one place and its references are its occurrences
    in block tables; lists link both ways; the hash table finds each findable
    block under its hash and nothing else; every sum equals its recount.

    Raises
    ------
    IntegrityError
        Naming the first invariant that does not hold.
    """
    config, header = state.view("config")[0], state.view("header")[0]
    requests, blocks = state.view("requests"), state.view("blocks")
    tables = state.view("tables")
    live = np.flatnonzero(requests["status"])
    _same("num_live", header["num_live"], len(live))

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
    _require((held == blocks["refs"]).all(), "references differ from occurrences in block tables")

    _check_pool(state, config, header, blocks)
    _check_queues(state, config, header, requests)
    if config["caching"]:
        _check_hash_table(state, blocks)
    else:
        _require(not blocks["hashed"].any(), "prefix caching is off but a block is findable")


def _check_request(row: Any, slot: int, config: Any) -> None:
    size = config["block_size"]
    name = f"request row {slot}"
    _require(row["computed"] <= row["length"], f"{name}: computed {row['computed']} > length {row['length']}")
    _require(row["allocated"] <= row["length"], f"{name}: allocated {row['allocated']} > length {row['length']}")
    _require(row["allocated"] <= row["capacity"], f"{name}: allocated {row['allocated']} > capacity {row['capacity']}")
    _same(f"{name}: capacity", row["capacity"], row["n_blocks"] * size)
    _same(f"{name}: generated", row["generated"], row["length"] - row["num_input"])
    _same(f"{name}: next_seal", row["next_seal"], (row["computed"] // size + 1) * size)
    if row["status"] != _RUNNING:
        _same(f"{name}: blocks of a waiting request", row["n_blocks"], 0)


def _check_pool(state: Any, config: Any, header: Any, blocks: Any) -> None:
    sentinel = int(config["num_blocks"])
    inactive: list[int] = []
    end = state.view("sentinel")[0]
    before, block = sentinel, int(end["next"])
    while block != sentinel:
        _require(len(inactive) <= sentinel, "the inactive list does not end")
        _same(f"block {block}: prev", blocks[block]["prev"], before)
        inactive.append(block)
        before, block = block, int(blocks[block]["next"])
    _same("sentinel.prev", end["prev"], before)
    _same("num_inactive", header["num_inactive"], len(inactive))
    listed = np.zeros(sentinel, bool)
    listed[inactive] = True
    _require(
        (listed == ((blocks["refs"] == 0) & (blocks["hashed"] != 0))).all(),
        "the inactive list is not the findable blocks without references",
    )
    free = state.view("free_stack")
    _require(len(np.unique(free)) == len(free), "the stack lists a block twice")
    empty = np.zeros(sentinel, bool)
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
    waiting: list[int] = []
    before, slot = -1, int(header["waiting_head"])
    while slot >= 0:
        _require(len(waiting) <= len(requests), "the waiting list does not end")
        _same(f"request row {slot}: prev", requests[slot]["prev"], before)
        waiting.append(slot)
        before, slot = slot, int(requests[slot]["next"])
    _same("waiting_tail", header["waiting_tail"], before)
    _same("num_waiting", header["num_waiting"], len(waiting))
    status = requests["status"][waiting]
    _require(np.isin(status, (_WAITING, _PREEMPTED)).all(), "a request in the waiting list is not waiting")
    _same("waiting requests", len(waiting), np.isin(requests["status"], (_WAITING, _PREEMPTED)).sum())
    for prefix, wanted, column in (("queued", _WAITING, "num_input"), ("requeued", _PREEMPTED, "length")):
        lengths = requests[column][waiting][status == wanted].astype(np.int64)
        _same(f"{prefix}_count", header[f"{prefix}_count"], len(lengths))
        _same(f"{prefix}_sum", header[f"{prefix}_sum"], lengths.sum())
        _same(f"{prefix}_squares", header[f"{prefix}_squares"], (lengths * lengths).sum())
    rows = requests[running]
    _same("running_blocks", header["running_blocks"], rows["n_blocks"].sum())
    total = rows["num_input"].astype(np.int64) + rows["max_output"]
    _same("running_completion", header["running_completion"], (-(-total // config["block_size"])).sum())
    ids = {(int(row["id_hi"]), int(row["id_lo"])) for row in requests[requests["status"] != 0]}
    _same("distinct ids", len(ids), int(header["num_live"]))
    for slot in np.flatnonzero(requests["status"]).tolist():
        row = requests[slot]
        _same("row found by id", state.find(int(row["id_hi"]), int(row["id_lo"])), slot)


def _check_hash_table(state: Any, blocks: Any) -> None:
    slots = state.view("slots")
    used = np.flatnonzero(slots["first"] >= 0)
    seen = np.zeros(len(blocks), bool)
    mask = len(slots) - 1
    for at in used:
        entry = slots[at]
        home = int(entry["hash"]) & mask
        gap = np.arange(home, home + ((int(at) - home) & mask)) & mask
        _require((slots["first"][gap] >= 0).all(), f"hash slot {at} cannot be reached from its home {home}")
        before, block = -1, int(entry["first"])
        while block >= 0:
            _require(not seen[block], f"block {block} is listed under two hashes")
            seen[block] = True
            _same(f"block {block}: hash", blocks[block]["hash"], entry["hash"])
            _same(f"block {block}: copy_prev", blocks[block]["copy_prev"], before)
            before, block = block, int(blocks[block]["copy_next"])
        _same(f"hash slot {at}: last", entry["last"], before)
    _require((seen == (blocks["hashed"] != 0)).all(), "the hash table is not the findable blocks")
    _same("distinct hashes", len(np.unique(slots["hash"][used])), len(used))
