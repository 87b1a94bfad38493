"""The peer's functions over the twin of the whole system: JSON in, JSON out, for the shared comparison tools."""

from __future__ import annotations

import json
import uuid
from typing import Any

import numpy as np

from kvsim.config import EngineConfig, parse_config
from kvsim.contract import KvEvent, Stored
from kvsim.report.summary import distribution
from kvsim.workload import read_mooncake, workload_from_requests, workload_from_traffic
from model import host
from model.system import AGGREGATED, DECODE, PREFILL, Record, System


def run_replay_json(text: str) -> str:
    return json.dumps(report_of(json.loads(text)))


def run_replay_with_artifacts_json(text: str) -> str:
    payload = json.loads(text)
    system = build(payload).run()
    return json.dumps({"report": report_of(payload, system), "artifacts": artifacts_of(system)})


def uuid_text(request_id: int) -> str:
    return str(uuid.UUID(int=request_id))


def artifacts_of(system: System) -> dict[str, Any]:
    """Series of the only rank."""
    outputs = [
        {
            "request_id": uuid_text(output.request_id),
            "token_id": output.token_id,
            "completed": output.completed,
            "rejected": output.rejected or output.failed,
            "cached_tokens": output.cached_tokens,
            "observed_at_ms": at_ms,
        }
        for at_ms, _, _, output in system.outputs
    ]
    rank = system.pools[AGGREGATED].workers[0].ranks[0]
    tier: host.HostTier | None = getattr(rank, "host", None)
    return {
        "outputs": outputs,
        "kv_events": [
            {"observed_at_ms": at_ms, "event": shown_event(event)} for at_ms, _, _, event in system.kv_events
        ],
        "host_offload_events": [] if tier is None else [shown_record(record) for record in tier.records],
    }


def shown_event(event: KvEvent) -> dict[str, Any]:
    data: dict[str, Any]
    if isinstance(event.data, Stored):
        blocks = [{"block_hash": block.block_hash, "tokens_hash": block.tokens_hash} for block in event.data.blocks]
        stored = {"parent_hash": event.data.parent_hash, "blocks": blocks}
        if event.data.start_position is not None:
            stored["start_position"] = event.data.start_position
        data = {"stored": stored}
    else:
        data = {"removed": {"block_hashes": list(event.data.block_hashes)}}
    tier = {} if event.storage_tier == "device" else {"tier": event.storage_tier}
    return {"event_id": event.event_id, "dp_rank": event.dp_rank, "data": data, **tier}


def shown_record(record: host.Record) -> dict[str, Any]:
    """One observation of host memory."""
    what: dict[str, Any] = {"event": record.kind}
    if record.transfer_id is not None:
        what["transfer_id"] = record.transfer_id
    if record.completes_at_ms is not None:
        what["completes_at_ms"] = record.completes_at_ms
    if record.structurally_unfittable is not None:
        what["structurally_unfittable"] = record.structurally_unfittable
    if record.kind == "store_block_mappings":
        what["mappings"] = [
            {"block_hash": key, "logical_block_index": index}
            for key, index in zip(record.keys, record.indices, strict=True)
        ]
    elif record.kind == "evicted":
        what["block_hash"] = record.keys[0]
    else:
        what["block_hashes"] = record.keys
    return {"request_id": uuid_text(record.request_id), "observed_at_ms": record.at_ms, "event": what}


def pool_of(engine: dict[str, Any], workers: dict[str, Any], role: str) -> tuple[EngineConfig, int, int]:
    rank = dict(engine.get("rank", {}))
    if rank.get("prefill_schedule_interval", 1) == 1:
        rank.pop("prefill_schedule_interval", None)
    config = parse_config(rank).replace(worker_type=role, emit_kv_events=True)
    return config, workers.get("initial_workers", 1), engine.get("dp_size", 1)


def build(payload: dict[str, Any], *, check: bool = False) -> System:
    spec = payload["spec"]
    topology, engine = spec["topology"], spec["engine"]
    if topology["kind"] == "aggregated":
        pools = {AGGREGATED: pool_of(engine, topology["workers"], "aggregated")}
    else:
        pools = {name: pool_of(engine[name], topology[name], name) for name in (PREFILL, DECODE)}
    concurrency, speedup = spec.get("max_in_flight"), 1.0
    if payload.get("traffic"):
        plan = workload_from_traffic(
            payload["traffic"], engine_block_size=next(iter(pools.values()))[0].tokens_per_block
        )
        workload, concurrency, speedup = plan.workload, plan.concurrency, plan.speedup
    else:
        workload = workload_from_requests(spec["requests"], strict=False)
    limit = spec.get("max_sim_time_ms")
    return System(
        workload,
        pools,
        concurrency=concurrency,
        speedup=speedup,
        max_sim_time_ms=float("inf") if limit is None else limit,
        handoff_latency_ms=topology.get("handoff_latency_ms", 0.0),
        tokenization=payload.get("tokenization"),
        check=check,
    )


class TraceReport:
    """What the second peer's `run_trace_replay` returns, as far as round robin goes."""

    telemetry = None

    def __init__(self, system: System, sla: dict[str, float]) -> None:
        self.summary = summary(system, sla)
        self.per_request = [
            row(system, record, None) for record in system.records.values() if record.status is not None
        ]


def run_trace_replay(path: str, **options: Any) -> TraceReport:
    """Round robin over the trace; options of the second peer."""
    assert options.get("router_mode", "round_robin") == "round_robin"
    assert "scaling_policy" not in options
    assert "telemetry_options" not in options
    if "prefill_engine_args" in options:
        pools = {
            name: engine_of(options[f"{name}_engine_args"], options.get(f"num_{name}_workers", 1), name)
            for name in (PREFILL, DECODE)
        }
    else:
        pools = {AGGREGATED: engine_of(options["extra_engine_args"], options.get("num_workers", 1), "aggregated")}
    concurrency = options.get("replay_concurrency")
    limit = options.get("max_sim_time_ms")
    system = System(
        read_mooncake(path, block_size=options.get("trace_block_size") or 512),
        pools,
        concurrency=concurrency,
        speedup=options.get("arrival_speedup_ratio", 1.0),
        scale_think_times=concurrency is None,
        max_sim_time_ms=float("inf") if limit is None else limit,
    ).run()
    return TraceReport(system, {key.removeprefix("sla_"): options[key] for key in options if key.startswith("sla_")})


def engine_of(arguments: dict[str, Any], workers: int, role: str) -> tuple[EngineConfig, int, int]:
    config = parse_config(arguments["engine"]).replace(worker_type=role)
    return config, workers, arguments.get("dp_size", 1)


def report_of(payload: dict[str, Any], system: System | None = None) -> dict[str, Any]:
    if system is None:
        system = build(payload).run()
    spec = payload["spec"]
    report = summary(system, spec.get("sla") or {})
    if spec.get("record_per_request"):
        named = None if payload.get("traffic") else system.workload.request_names
        report["per_request"] = [
            row(system, record, named) for record in system.records.values() if record.status is not None
        ]
    report["stuck"] = bool(system.stalled)
    return report


def shown_session(system: System, session: int) -> bool:
    """Whether a report names the session of a request; an open loop does not name single rows of a trace."""
    names = system.workload.session_names
    name = None if names is None or session < 0 else names[session]
    return name is not None and (system.driver.concurrency is not None or not name.startswith("request_"))


def first(values: Any) -> Any:
    return values[0] if values else None


def row(system: System, record: Record, names: list[str] | None) -> dict[str, Any]:
    spec = system.workload.specs[record.row]
    times = record.token_times
    history, seen = [], {}
    for ordinal, (pool, at_ms, reused) in enumerate(record.admissions):
        attribution = record.attributions[ordinal]
        tiers = (
            {}
            if attribution is None
            else {"g1_reused_input_tokens": attribution[0], "host_reused_input_tokens": attribution[1]}
        )
        seen[pool] = seen.get(pool, -1) + 1
        history.append(
            {
                "admission_ordinal": ordinal,
                "pool_admission_ordinal": seen[pool],
                "pool": pool,
                "at_ms": at_ms,
                "reused_input_tokens": reused,
                "is_readmission": seen[pool] > 0,
                **tiers,
            }
        )
    by_pool = {pool: [reused for name, _, reused in record.admissions if name == pool] for pool in seen}
    preferred = by_pool.get(PREFILL) or [reused for _, _, reused in record.admissions]
    return {
        "turn_index": int(spec["turn"]) if shown_session(system, int(spec["session"])) and spec["turn"] >= 0 else None,
        "uuid": str(uuid.UUID(int=(int(spec["id_hi"]) << 64) | int(spec["id_lo"]))),
        "request_id": None if names is None else names[record.row],
        "arrival_time_ms": record.arrival_ms,
        "tokenized_ms": record.tokenized_ms,
        "first_admit_ms": record.first_admit_ms,
        "first_token_ms": first(times),
        "last_token_ms": times[-1] if times else None,
        "terminal_time_ms": record.terminal_ms,
        "terminal_status": record.status,
        "input_length": record.input_tokens,
        "requested_output_length": record.requested_output_tokens,
        "output_length": len(times),
        "reused_input_tokens": max(preferred, default=0),
        "first_admission_reused_input_tokens": record.admissions[0][2] if record.admissions else 0,
        "decode_reused_input_tokens": max(by_pool[DECODE]) if DECODE in by_pool else None,
        "admission_history": history,
        "admission_count": len(history),
        "readmission_count": sum(entry["is_readmission"] for entry in history),
        "prefill_worker_idx": record.prefill_worker,
        "decode_worker_idx": record.decode_worker,
        "prefill_admit_ms": record.prefill_admit_ms,
        "source_held_ms": record.source_held_ms,
        "destination_reserved_ms": record.destination_reserved_ms,
        "destination_activated_ms": record.destination_activated_ms,
        "decode_admit_ms": record.decode_admit_ms,
        "source_released_ms": record.source_released_ms,
        "routing_history": [
            {
                "pool": route.pool,
                "outcome": "immediate",
                "queue_entered_at_ms": None,
                "released_at_ms": None,
                "queue_wait_ms": 0.0,
                "logical_worker_id": route.worker,
                "scheduler_id": route.scheduler,
                "dp_rank": route.dp_rank,
                "reported_overlap_tokens": 0,
            }
            for route in record.routes
        ],
    }


def summary(system: System, sla: dict[str, float]) -> dict[str, Any]:
    done = [r for r in system.records.values() if r.status == "completed" and r.first_admit_ms is not None]
    inputs, outputs = sum(r.input_tokens for r in done), sum(len(r.token_times) for r in done)
    duration_ms = max((r.terminal_ms or 0.0 for r in done), default=0.0)
    duration_s = max(duration_ms / 1000.0, 1e-9)
    reused = sum(max((entry[2] for entry in r.admissions), default=0) for r in done)
    first_reused = sum(r.admissions[0][2] for r in done)
    report: dict[str, Any] = {
        "num_requests": len(system.records),
        "completed_requests": len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "processed_tokens": inputs + outputs,
        "committed_prefill_tokens": system.committed_prefill_tokens,
        "duration_ms": duration_ms,
        "request_throughput_rps": len(done) / duration_s,
        "input_throughput_tok_s": inputs / duration_s,
        "output_throughput_tok_s": outputs / duration_s,
        "total_throughput_tok_s": (inputs + outputs) / duration_s,
        "prefix_cache_reused_ratio": reused / inputs if inputs else 0.0,
        "first_admission_prefix_cache_reused_ratio": first_reused / inputs if inputs else 0.0,
    }
    report |= provisioned(system)
    tokens = [r for r in done if r.token_times]
    itl = [(r.token_times[-1] - r.token_times[0]) / (len(r.token_times) - 1) for r in tokens if len(r.token_times) > 1]
    gaps = [b - a for r in tokens for a, b in zip(r.token_times, r.token_times[1:], strict=False)]
    samples = {
        "ttft": [max(0.0, r.token_times[0] - r.arrival_ms) for r in tokens],
        "ttst": [max(0.0, r.token_times[1] - r.token_times[0]) for r in tokens if len(r.token_times) > 1],
        "tpot": itl,
        "itl": gaps,
        "e2e_latency": [max(0.0, r.token_times[-1] - r.arrival_ms) for r in tokens],
    }
    for name, values in samples.items():
        report |= {f"{key}_{name}_ms": value or 0.0 for key, value in distribution(np.array(values)).items()}
    rates = [1000.0 / gap for gap in gaps if gap > 0]
    report |= {
        f"{key}_output_token_throughput_per_user": value or 0.0 for key, value in distribution(np.array(rates)).items()
    }
    for name in ("ttft", "tpot", "e2e_latency"):
        report[f"num_{name}_samples"] = len(samples[name])
    if sla:
        good = [r for r in done if meets(r, sla)]
        report["goodput_completed_requests"] = len(good)
        report["goodput_request_throughput_rps"] = len(good) / duration_s
        report["goodput_output_throughput_tok_s"] = sum(len(r.token_times) for r in good) / duration_s
    return report


def provisioned(system: System) -> dict[str, Any]:
    seconds = {name: len(pool.workers) * system.now / 1000.0 for name, pool in system.pools.items()}
    ranks = {name: pool.dp_size for name, pool in system.pools.items()}
    prefill, decode = seconds.get(PREFILL, 0.0), seconds.get(DECODE, seconds.get(AGGREGATED, 0.0))
    prefill_gpus, decode_gpus = ranks.get(PREFILL, 0), ranks.get(DECODE, ranks.get(AGGREGATED, 0))
    return {
        "prefill_worker_seconds": prefill,
        "decode_worker_seconds": decode,
        "prefill_gpus_per_worker": prefill_gpus,
        "decode_gpus_per_worker": decode_gpus,
        "gpu_hours": (prefill * prefill_gpus + decode * decode_gpus) / 3600.0,
    }


def meets(record: Record, sla: dict[str, float]) -> bool:
    times = record.token_times
    if not times:
        return set(sla) == {"e2e_ms"} and (record.terminal_ms or 0.0) - record.arrival_ms <= sla["e2e_ms"]
    ttft, e2e = times[0] - record.arrival_ms, times[-1] - record.arrival_ms
    itl = (e2e - ttft) / (len(times) - 1) if len(times) > 1 else None
    values = {"ttft_ms": ttft, "e2e_ms": e2e, "itl_ms": itl}
    return all(values[name] is None or values[name] <= bound for name, bound in sla.items())
