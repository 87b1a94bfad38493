"""Recorded runs of the peer: which there are, how to run one through the twin, how to compare."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from kvsim.config import EngineConfig, parse_config
from kvsim.contract import KvEvent, RankIdentity, Request, Stored
from model.replay import Factory, Model, Record, Replay, Result, model_of
from model.sglang import SglangModel

FOLDER = Path(__file__).parent.parent / "conformance"

#: Recorded times are equal to ours to the last bit; the tolerance allows for other orders of summation.
TOLERANCE_MS = 1e-4


def load(path: Path) -> dict[str, Any]:
    with gzip.open(path) as file:
        case: dict[str, Any] = json.load(file)
    return case


def explicit_cases(*backends: str) -> list[Path]:
    """Explicit request lists on aggregated workers of one rank with one of these engines, without a front end."""
    found = []
    for path in sorted(FOLDER.rglob("*.json.gz")):
        case = load(path)
        payload = case["input"]["payload"]
        spec = payload["spec"]
        if (
            "traffic" not in payload
            and "tokenization" not in payload
            and spec["topology"]["kind"] == "aggregated"
            and spec["engine"].get("dp_size", 1) == 1
            and spec["engine"]["rank"].get("backend", "vllm") in backends
        ):
            found.append(path)
    return found


def explicit_paged_cases() -> list[Path]:
    return explicit_cases("vllm", "trtllm")


def explicit_radix_cases() -> list[Path]:
    return explicit_cases("sglang")


def engine_config(spec: dict[str, Any]) -> EngineConfig:
    rank = {**spec["engine"]["rank"], "emit_kv_events": True}
    rank.pop("prefill_decode_interval", None)
    return parse_config(rank)


def factory_of(spec: dict[str, Any]) -> Factory:
    """Builds the twin of a recorded engine."""
    interval = spec["engine"]["rank"].get("prefill_decode_interval", 0)

    def build(identity: RankIdentity, config: EngineConfig) -> Model:
        if config.backend == "sglang":
            return SglangModel(identity, config, prefill_decode_interval=interval)
        return model_of(identity, config)

    return build


def requests_of(spec: dict[str, Any]) -> list[Request]:
    """Ids count the list from 1; a prompt given by its length counts up from (id - 1) * 1000003."""
    requests = []
    for index, row in enumerate(spec["requests"]):
        tokens = row.get("input_token_ids")
        if tokens is None:
            tokens = [(index * 1_000_003 + position) % 2**32 for position in range(row["input_tokens"])]
        request = Request(index + 1, tokens, row["output_tokens"], row.get("output_token_ids"), row["arrival_time_ms"])
        requests.append(request)
    return requests


def run_twin(payload: dict[str, Any], *, check: bool = True) -> Result:
    spec = payload["spec"]
    limit = spec.get("max_sim_time_ms")
    return Replay(
        engine_config(spec),
        requests_of(spec),
        workers=spec["topology"]["workers"].get("initial_workers", 1),
        max_in_flight=spec.get("max_in_flight"),
        max_sim_time_ms=float("inf") if limit is None else limit,
        check=check,
        factory=factory_of(spec),
    ).run()


def uuid_to_int(text: str) -> int:
    return int(text.replace("-", ""), 16)


def near(want: float | None, got: float | None) -> bool:
    if want is None or got is None:
        return want is None and got is None
    return abs(want - got) <= TOLERANCE_MS


def request_differences(want: dict[str, Any], got: Record) -> list[str]:
    """Every field of the recorded request that the twin has different."""
    times = {
        "arrival_time_ms": got.arrival_ms,
        "first_admit_ms": got.first_admit_ms,
        "first_token_ms": got.first_token_ms,
        "last_token_ms": got.last_token_ms,
        "terminal_time_ms": got.terminal_ms,
    }
    found = [f"{name}: want {want[name]} got {value}" for name, value in times.items() if not near(want[name], value)]
    if len(got.outputs) > 1 and not near(want["ttst_ms"], got.second_token_ms - got.first_token_ms):  # type: ignore[operator]
        found.append(f"ttst_ms: want {want['ttst_ms']} got {got.second_token_ms} - {got.first_token_ms}")
    counts = {
        "terminal_status": got.status,
        "input_length": got.input_tokens,
        "requested_output_length": got.requested_output_tokens,
        "output_length": len(got.outputs),
        "reused_input_tokens": got.reused_tokens,
        "first_admission_reused_input_tokens": got.first_reused_tokens,
        "readmission_count": max(0, len(got.admissions) - 1),
        "decode_worker_idx": got.worker if got.admissions else want["decode_worker_idx"],
    }
    found += [f"{name}: want {want[name]} got {value}" for name, value in counts.items() if want[name] != value]
    history = [(entry["at_ms"], entry["reused_input_tokens"]) for entry in want["admission_history"]]
    same = len(history) == len(got.admissions) and all(
        near(a[0], b[0]) and a[1] == b[1] for a, b in zip(history, got.admissions, strict=True)
    )
    return found if same else [*found, f"admission_history: want {history} got {got.admissions}"]


def outputs_of(artifacts: dict[str, Any]) -> list[tuple[float, tuple[Any, ...]]]:
    """(when, what) of the recorded output series."""
    return [
        (
            row["observed_at_ms"],
            (uuid_to_int(row["request_id"]), row["token_id"], row["completed"], row["rejected"], row["cached_tokens"]),
        )
        for row in artifacts["outputs"]
    ]


def kv_events_of(artifacts: dict[str, Any]) -> list[tuple[float, tuple[Any, ...]]]:
    events = []
    for row in artifacts["kv_events"]:
        data = row["event"]["data"]
        what: tuple[Any, ...]
        if "stored" in data:
            blocks = tuple((block["block_hash"], block["tokens_hash"]) for block in data["stored"]["blocks"])
            what = ("stored", data["stored"]["parent_hash"], blocks, data["stored"].get("start_position"))
        else:
            what = ("removed", None, tuple(data["removed"]["block_hashes"]), None)
        tier = row["event"].get("tier", "device")
        events.append((row["observed_at_ms"], (row["event"]["event_id"], tier, *what)))
    return events


def plain_event(event: KvEvent) -> tuple[Any, ...]:
    """The same form of an event of ours."""
    if isinstance(event.data, Stored):
        blocks = tuple((block.block_hash, block.tokens_hash) for block in event.data.blocks)
        return (
            event.event_id,
            event.storage_tier,
            "stored",
            event.data.parent_hash,
            blocks,
            event.data.start_position,
        )
    return (event.event_id, event.storage_tier, "removed", None, tuple(event.data.block_hashes), None)


def host_records_of(artifacts: dict[str, Any]) -> list[tuple[float, tuple[Any, ...]]]:
    """(when, what) of the recorded observations of host memory."""
    found = []
    for row in artifacts["host_offload_events"]:
        event = row["event"]
        keys = event.get("block_hashes") or [mapping["block_hash"] for mapping in event.get("mappings", ())]
        what = (
            uuid_to_int(row["request_id"]),
            event["event"],
            event.get("transfer_id"),
            [event["block_hash"]] if event["event"] == "evicted" else keys,
            event.get("completes_at_ms"),
            [mapping["logical_block_index"] for mapping in event.get("mappings", ())],
            event.get("structurally_unfittable"),
        )
        found.append((row["observed_at_ms"], what))
    return found


def plain_record(record: Any) -> tuple[float, tuple[Any, ...]]:
    """The same form of an observation of the twin."""
    return record.at_ms, (
        record.request_id,
        record.kind,
        record.transfer_id,
        record.keys,
        record.completes_at_ms,
        record.indices,
        record.structurally_unfittable,
    )


def first_difference(want: list[tuple[float, Any]], got: list[tuple[float, Any]]) -> str | None:
    """Where two series part, None if they do not."""
    for index, (a, b) in enumerate(zip(want, got, strict=False)):
        if not near(a[0], b[0]) or a[1] != b[1]:
            return f"[{index}]: want {a} got {b}"
    return None if len(want) == len(got) else f"length: want {len(want)} got {len(got)}"
