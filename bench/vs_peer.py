#!/usr/bin/env python3
"""CPU seconds of kvsim and of its peer on the same payloads.

The peer is the package `aisimulate`, whose two functions `kvsim.compat.aisimulate`
shares. It is not a dependency: install it in an environment of its own, with

    python3 -m venv peer && peer/bin/pip install --no-deps --pre aisimulate

and run, with the Python that has kvsim,

    python bench/vs_peer.py --peer-python peer/bin/python

Each run is a new process, the two sides alternate, and the median of CPU
seconds counts, reading the trace included. Without `--peer-python` only kvsim
is measured. Exit code 1 if a result differs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvsim.workload import example_trace_path

CHILD = """
import importlib, json, resource, sys, time
module = importlib.import_module(sys.argv[1])
payload = sys.stdin.read()
module.run_replay_json(json.dumps(json.loads(payload)["warm_up"]))
started = time.process_time()
report = json.loads(module.run_replay_json(json.dumps(json.loads(payload)["payload"])))
print(json.dumps({
    "cpu_s": time.process_time() - started,
    "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "same": [report[key] for key in ("completed_requests", "total_output_tokens", "duration_ms", "mean_ttft_ms")],
}))
"""


def payload(traffic: dict[str, Any], concurrency: int | None = None, workers: int = 1, **rank: Any) -> dict[str, Any]:
    """One payload of the peer's entry point."""
    given = {
        "backend": "vllm",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "timing_model": {"type": "fixed", "prefill_ms": 30.0, "decode_ms": 10.0},
    }
    return {
        "spec": {
            "version": 1,
            "topology": {"kind": "aggregated", "workers": {"initial_workers": workers}},
            "engine": {"dp_size": 1, "rank": given | rank},
            "record_per_request": False,
            "max_in_flight": concurrency,
            "requests": [],
        },
        "determinism": "canonical_v1",
        "traffic": traffic,
    }


def closed_loop(requests: int, input_tokens: int, output_tokens: int, concurrency: int) -> dict[str, Any]:
    """Traffic of equal requests, `concurrency` of them inside."""
    return {
        "source_type": "synthetic",
        "load_type": "concurrency",
        "isl": input_tokens,
        "osl": output_tokens,
        "request_count": requests,
        "concurrency": concurrency,
    }


def cases(trace: str) -> dict[str, dict[str, Any]]:
    """Payloads by name; `trace` is a plain Mooncake file."""
    from_trace = {
        "source_type": "trace",
        "load_type": "trace_timestamps",
        "trace_path": trace,
        "trace_format": "mooncake",
        "trace_block_size": 512,
    }
    loop = closed_loop(5000, 1024, 128, 256)
    return {
        "trace, block 64": payload(from_trace, num_gpu_blocks=32_768, block_size=64),
        "trace, block 16": payload(from_trace, num_gpu_blocks=131_072, block_size=16),
        "trace, block 64, 4 workers": payload(from_trace, workers=4, num_gpu_blocks=32_768, block_size=64),
        "closed loop, roomy": payload(loop, 256, num_gpu_blocks=32_768, block_size=16),
        "closed loop, tight": payload(loop, 256, num_gpu_blocks=16_384, block_size=16),
        "long decodes": payload(closed_loop(512, 1024, 1024, 256), 256, num_gpu_blocks=65_536, block_size=16),
    }


def measure(python: str, module: str, case: dict[str, Any]) -> dict[str, Any]:
    """One run in a new process."""
    small = payload(closed_loop(1, 8, 2, 1), 1, num_gpu_blocks=64, block_size=16)
    done = subprocess.run(
        [python, "-c", CHILD, module],
        input=json.dumps({"warm_up": small, "payload": case}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{module} failed under {python}: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    """Print one line per case."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter that has the peer; else only kvsim runs")
    parser.add_argument("--our-python", metavar="PATH", default=sys.executable, help="interpreter that has kvsim")
    parser.add_argument("--trace", metavar="FILE", help="a Mooncake trace in place of the example")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side")
    parser.add_argument("--case", action="append", help="only this case; may be repeated")
    arguments = parser.parse_args()

    different = 0
    with tempfile.TemporaryDirectory() as folder:
        trace = arguments.trace
        if trace is None or trace.endswith(".gz"):
            plain = Path(folder) / "trace.jsonl"
            plain.write_bytes(gzip.decompress(Path(trace or example_trace_path()).read_bytes()))
            trace = str(plain)
        for name, case in cases(str(Path(trace).resolve())).items():
            if arguments.case and name not in arguments.case:
                continue
            ours, peers = [], []
            for _ in range(arguments.runs):
                ours.append(measure(arguments.our_python, "kvsim.compat.aisimulate", case))
                if arguments.peer_python:
                    peers.append(measure(arguments.peer_python, "aisimulate._runtime", case))
            mine = statistics.median(run["cpu_s"] for run in ours)
            line = f"{name:28} kvsim {mine:8.3f} s {ours[0]['rss_mb']:6.0f} MB"
            if peers:
                theirs = statistics.median(run["cpu_s"] for run in peers)
                same = all(abs(a - b) <= 1e-6 * abs(b) for a, b in zip(ours[0]["same"], peers[0]["same"], strict=True))
                different += not same
                line += f"   peer {theirs:8.3f} s {peers[0]['rss_mb']:6.0f} MB   ratio {theirs / mine:5.2f}"
                line += "" if same else "   RESULTS DIFFER"
            print(line, flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
