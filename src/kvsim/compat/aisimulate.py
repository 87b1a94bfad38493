"""The two functions of the peer ``aisimulate._runtime``: JSON text in, JSON text out.

Payloads, report keys and artifacts are the peer's (spec/workloads-and-report.md
sections 3 to 6). Differences on purpose: a request that can never finish ends
as rejected or failed instead of aborting the run, percentiles of token gaps
are exact instead of sketched, and rows of rejected requests come with the rest.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from kvsim._core import content
from kvsim.config import parse_config
from kvsim.contract import HostOffloadEvent
from kvsim.errors import ConfigError
from kvsim.layout import OffloadEventKind
from kvsim.replay.pool import PoolSpec
from kvsim.replay.run import Run
from kvsim.report import Sla
from kvsim.report.summary import summarize, wall_rates
from kvsim.workload import workload_from_requests, workload_from_traffic

__all__ = ["run_replay_json", "run_replay_with_artifacts_json"]

_HAS_TOKEN, _COMPLETED, _REJECTED, _FAILED, _HAS_CACHED = 1, 2, 4, 8, 16

# Options of the peer's engine that this version does not simulate, with the value that leaves them off.
_OFF: dict[str, Any] = {
    "prefill_schedule_interval": 1,
    "g3_offload": None,
    "state_cache": None,
    "frontend": None,
    "vision": None,
}
_PAYLOAD_KEYS = {"spec", "determinism", "traffic", "tokenization"}
_SPEC_KEYS = {
    "version",
    "topology",
    "engine",
    "max_in_flight",
    "max_sim_time_ms",
    "sla",
    "record_per_request",
    "requests",
    "placement",
    "scaling",
}


def run_replay_json(payload: str) -> str:
    """Run a replay; the report as JSON.

    Parameters
    ----------
    payload : str
        ``{"spec": {...}, "determinism": ..., "traffic": {...}, "tokenization": {...}}``.

    Raises
    ------
    ConfigError, WorkloadError
        Naming the field.
    """
    return _dump(_replay(payload, artifacts=False)["report"])


def run_replay_with_artifacts_json(payload: str) -> str:
    """Run a replay; report and artifacts (releases, outputs, KV events) as JSON. One worker only."""
    return _dump(_replay(payload, artifacts=True))


def _dump(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _replay(text: str, *, artifacts: bool) -> dict[str, Any]:
    started = time.perf_counter()
    payload = _mapping(msgspec.json.decode(text), "payload")
    _known(payload, _PAYLOAD_KEYS, "")
    spec = _mapping(payload.get("spec"), "spec")
    _known(spec, _SPEC_KEYS, "spec.")
    if spec.get("version", 1) != 1:
        raise ConfigError("spec.version", f"must be 1, got {spec['version']!r}")
    pools = _pools(spec)
    config = pools["prefill"].config if "prefill" in pools else pools["config"]
    if artifacts and ("prefill" in pools or pools["workers"] * pools["dp_size"] != 1):
        shape = "two pools" if "prefill" in pools else f"{pools['workers']} workers of {pools['dp_size']} ranks"
        raise ConfigError("spec.topology", f"artifacts need one worker of one rank, got {shape}")
    concurrency, speedup = spec.get("max_in_flight"), 1.0
    traffic = payload.get("traffic")
    if traffic is not None:
        plan = workload_from_traffic(traffic, engine_block_size=config.tokens_per_block)
        workload, concurrency, speedup = plan.workload, plan.concurrency, plan.speedup
    else:
        workload = workload_from_requests(spec.get("requests") or [], strict=False)
    detail = artifacts or bool(spec.get("record_per_request"))
    run = Run(
        workload,
        **pools,
        concurrency=concurrency,
        speedup=speedup,
        max_sim_time_ms=spec.get("max_sim_time_ms"),
        tokenization=payload.get("tokenization"),
        capture_outputs=artifacts,
        capture_admissions=detail,
        capture_routing=detail and "prefill" in pools,
        capture_kv_events=artifacts,
        capture_offload=artifacts,
    )
    run.execute()
    sla = _sla(spec.get("sla"))
    result = run.result(started=started)
    summary = summarize(run.records, run.gaps, result.totals, sla, tokenless_e2e=False)
    # The peer gives 0 where there is no sample.
    report: dict[str, Any] = {key: 0.0 if value is None else value for key, value in summary.items()}
    report.update(wall_rates(summary, result.totals.wall_time_ms))
    report["kv_eviction_policy"] = "lru"
    if spec.get("record_per_request"):
        report["per_request"] = list(result.rows(tokenless_e2e=False, reasons=False))
        if traffic is not None:
            for row in report["per_request"]:
                row["request_id"] = None
    return {"report": report, "artifacts": _artifacts(run, traced=traffic is not None) if artifacts else None}


# ---------------------------------------------------------------- reading the payload


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(name, f"expected an object, got {value!r}")
    return value


def _known(value: Mapping[str, Any], keys: set[str], at: str) -> None:
    unknown = set(value) - keys
    if unknown:
        raise ConfigError(at + sorted(unknown)[0], "unknown field")


def _pools(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run that say which engines there are."""
    topology = _mapping(spec.get("topology", {"kind": "aggregated"}), "spec.topology")
    engine = _mapping(spec.get("engine", {}), "spec.engine")
    kind = topology.get("kind")
    if kind == "aggregated":
        _known(topology, {"kind", "workers"}, "spec.topology.")
        pool = _pool(topology.get("workers", {}), engine, "spec.topology.workers", "spec.engine")
        # The role of a worker is the topology's to say (spec/replay.md section 1).
        config = pool.config.replace(worker_type="aggregated")
        return {
            "config": config,
            "workers": pool.workers,
            "dp_size": pool.dp_size,
            "startup_ms": pool.startup_ms,
        }
    if kind != "disaggregated":
        raise ConfigError("spec.topology.kind", f"must be one of 'aggregated', 'disaggregated', got {kind!r}")
    _known(topology, {"kind", "prefill", "decode", "handoff_latency_ms"}, "spec.topology.")
    _known(engine, {"prefill", "decode", "kv_eviction_policy"}, "spec.engine.")
    _lru(engine, "spec.engine")
    pools: dict[str, Any] = {
        role: _pool(
            topology.get(role, {}),
            _mapping(engine.get(role, {}), f"spec.engine.{role}"),
            f"spec.topology.{role}",
            f"spec.engine.{role}",
        )
        for role in ("prefill", "decode")
    }
    pools["handoff_latency_ms"] = topology.get("handoff_latency_ms", 0.0)
    return pools


def _pool(workers: Any, engine: Mapping[str, Any], of_workers: str, of_engine: str) -> PoolSpec:
    """Workers of one role and their engines."""
    _known(_mapping(workers, of_workers), {"initial_workers", "startup_delay_ms"}, f"{of_workers}.")
    _known(engine, {"dp_size", "rank", "kv_eviction_policy"}, f"{of_engine}.")
    _lru(engine, of_engine)
    values = dict(_mapping(engine.get("rank", {}), f"{of_engine}.rank"))
    for name, off in _OFF.items():
        if name in values:
            if values[name] != off:
                raise ConfigError(f"{of_engine}.rank.{name}", f"is not simulated by this version, got {values[name]!r}")
            del values[name]
    return PoolSpec(
        parse_config(values),
        workers.get("initial_workers", 1),
        engine.get("dp_size", 1),
        workers.get("startup_delay_ms", 0.0),
    )


def _lru(engine: Mapping[str, Any], at: str) -> None:
    if engine.get("kv_eviction_policy", "lru") != "lru":
        raise ConfigError(f"{at}.kv_eviction_policy", f"must be 'lru', got {engine['kv_eviction_policy']!r}")


def _sla(value: Any) -> Sla | None:
    if value is None:
        return None
    bounds = _mapping(value, "spec.sla")
    _known(bounds, {"ttft_ms", "itl_ms", "e2e_ms"}, "spec.sla.")
    return Sla(**bounds)


# ---------------------------------------------------------------- artifacts


def _uuid(spec: Any) -> str:
    return str(uuid.UUID(int=(int(spec["id_hi"]) << 64) | int(spec["id_lo"])))


def _artifacts(run: Run, *, traced: bool) -> dict[str, Any]:
    ids = [_uuid(spec) for spec in run.workload.specs]
    assert run.outputs is not None
    outputs = [
        {
            "request_id": ids[row],
            "token_id": token if flags & _HAS_TOKEN else None,
            "completed": bool(flags & _COMPLETED),
            "rejected": bool(flags & (_REJECTED | _FAILED)),
            "cached_tokens": cached if flags & _HAS_CACHED else None,
            "observed_at_ms": at_ms,
        }
        for row, at_ms, token, flags, cached in zip(
            *(run.outputs[name].tolist() for name in ("row", "at_ms", "token", "flags", "cached")), strict=True
        )
    ]
    return {
        "requests": _releases(run, ids, traced=traced),
        "outputs": outputs,
        "kv_events": _kv_events(run),
        "host_offload_events": [_offload_event(*pair) for pair in run.offload_events()],
    }


def _releases(run: Run, ids: list[str], *, traced: bool) -> list[dict[str, Any]]:
    """Requests in order of release, with the block hashes of their prompts when a trace gave the content."""
    records = run.records
    seen = np.flatnonzero(records["arrival_ms"] <= run.now_ms)
    order = seen[np.argsort(records["arrival_ms"][seen], kind="stable")]
    size = run.config.tokens_per_block
    released = []
    for row in order.tolist():
        record, spec = records[row], run.workload.specs[row]
        hashes = None
        if traced:
            sequence, local = content.hash_parts(
                run.driver.prompt_parts(row), None, int(spec["id_hi"]), int(spec["id_lo"]), 0, size, 2**62, True
            )
            hashes = {"local_block_hashes": local.tolist(), "sequence_hashes": sequence.tolist()}
        released.append(
            {
                "request_id": ids[row],
                "input_length": int(record["input_tokens"]),
                "output_length": int(record["requested_output_tokens"]),
                "observed_at_ms": float(record["arrival_ms"]),
                "scheduled_ready_at_ms": float(record["arrival_ms"]),
                "replay_hashes": hashes,
            }
        )
    return released


def _offload_event(request_id: int, event: HostOffloadEvent) -> dict[str, Any]:
    data: dict[str, Any] = {"event": event.kind.name.lower()}
    if event.transfer_id is not None:
        data["transfer_id"] = event.transfer_id
    if event.logical_block_indices is not None:
        data["mappings"] = [
            {"block_hash": block, "logical_block_index": index}
            for block, index in zip(event.block_hashes, event.logical_block_indices, strict=True)
        ]
    elif event.kind is OffloadEventKind.EVICTED:
        data["block_hash"] = event.block_hashes[0]
    else:
        data["block_hashes"] = list(event.block_hashes)
    if event.completes_at_ms is not None:
        data["completes_at_ms"] = event.completes_at_ms
    if event.structurally_unfittable is not None:
        data["structurally_unfittable"] = event.structurally_unfittable
    return {"event": data, "observed_at_ms": event.at_ms, "request_id": str(uuid.UUID(int=request_id))}


def _kv_events(run: Run) -> list[dict[str, Any]]:
    events, blocks = run.kv_events()
    hashes, local = blocks["block_hash"].tolist(), blocks["tokens_hash"].tolist()
    listed = []
    for event in events:
        span = range(int(event["first"]), int(event["first"] + event["count"]))
        data: dict[str, Any]
        if event["kind"] == 0:
            data = {
                "stored": {
                    "parent_hash": int(event["parent_hash"]) if event["flags"] & 1 else None,
                    "blocks": [{"block_hash": hashes[i], "tokens_hash": local[i]} for i in span],
                }
            }
            if event["start"] >= 0:
                data["stored"]["start_position"] = int(event["start"])
        else:
            data = {"removed": {"block_hashes": [hashes[i] for i in span]}}
        found = {"event_id": int(event["event_id"]), "dp_rank": 0, "data": data}
        if event["tier"]:
            found["tier"] = "host_pinned"
        listed.append({"observed_at_ms": float(event["at_ms"]), "event": found})
    return listed
