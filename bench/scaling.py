#!/usr/bin/env python3
"""How the cost of a run grows: one table per size that grows, CPU time of the whole call.

    python bench/scaling.py [--trace FILE] [--runs N] [--table NAME ...]

Each line is the median of `--runs` calls of `kvsim.replay` on a workload that is
loaded already. `ns/pass` and `ns/token` divide by passes and by generated
tokens, `ns/block` by the prompt blocks that were looked up.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import kvsim
from kvsim.workload import Workload, example_trace_path, flat_workload
from ranks import FIXED

#: Name of a table, label of a line, workload, configuration, options of `replay`.
Line = tuple[str, str, Workload, kvsim.EngineConfig, dict[str, Any]]


def config(backend: str = "vllm", **fields: Any) -> kvsim.EngineConfig:
    """An engine with the pass times of all tables."""
    given: dict[str, Any] = {"max_num_seqs": 2048, "max_num_batched_tokens": 8192, "timing_model": FIXED} | fields
    return kvsim.EngineConfig.for_backend(backend, **given)


def lines(trace: Any) -> Iterator[Line]:
    """What is measured."""
    for running in (1, 8, 64, 256, 1024):
        workload = flat_workload(requests=2 * running, input_tokens=256, output_tokens=2048)
        engine = config(num_gpu_blocks=(running * 2400) // 64 + 64, block_size=64)
        yield "running requests", f"{running}", workload, engine, {"concurrency": running}
    for backend in ("vllm", "sglang"):
        for block in (1, 16, 64, 512) if backend == "sglang" else (16, 64, 512):
            engine = config(backend, num_gpu_blocks=(1 << 21) // block, block_size=block, max_num_seqs=256)
            yield "block size", f"{backend} {block}", trace, engine, {}
    for tokens in (1 << 18, 1 << 20, 1 << 22, 1 << 24):
        engine = config(num_gpu_blocks=tokens // 64, block_size=64, max_num_seqs=256)
        yield "tokens in the pool", f"{tokens:,}", trace, engine, {}
    for workers in (1, 4, 16, 64):
        engine = config(num_gpu_blocks=(1 << 21) // 64, block_size=64, max_num_seqs=256)
        yield "workers", f"{workers}", trace, engine, {"workers": workers}
    for requests in (1000, 10_000, 100_000):
        workload = flat_workload(requests=requests, input_tokens=1024, output_tokens=128)
        engine = config(num_gpu_blocks=32_768, block_size=16, max_num_seqs=256)
        yield "requests", f"{requests:,}", workload, engine, {"concurrency": 256}


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", metavar="FILE", default=example_trace_path(), help="a Mooncake trace")
    parser.add_argument("--runs", type=int, default=3, help="calls per line")
    parser.add_argument("--table", action="append", help="only this table; may be repeated")
    arguments = parser.parse_args()
    table = None
    for name, label, workload, engine, options in lines(kvsim.load_workload(arguments.trace)):
        if arguments.table and name not in arguments.table:
            continue
        if name != table:
            print(f"\n{name:20} {'CPU ms':>9} {'passes':>10} {'ns/pass':>9} {'ns/token':>9} {'ns/block':>9}")
            table = name
        seconds = []
        kvsim.replay(workload, engine, **options)
        for _ in range(arguments.runs):
            started = time.process_time()
            summary = kvsim.replay(workload, engine, **options).summary
            seconds.append(time.process_time() - started)
        ns = 1e9 * statistics.median(seconds)
        blocks = workload.total_input_tokens / (engine.block_size or 1)
        print(
            f"{label:20} {ns / 1e6:9.1f} {summary['passes']:10,} {ns / summary['passes']:9.0f} "
            f"{ns / summary['total_output_tokens']:9.1f} {ns / blocks:9.1f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
