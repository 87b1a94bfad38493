#!/usr/bin/env python3
"""Instructions of kernels, counted by valgrind: they repeat within 0.01 % where times do not.

    python bench/callgrind.py [--case NAME ...] [--write | --limit PERCENT]

Needs `valgrind` and an installed kvsim. Only what runs inside the named kernels
is counted; what prepares a case is subtracted by counting it alone. Counts are
shown beside those of `counts.json`, which `--write` replaces; with `--limit`
the exit code is 1 if a case needs that much more. Another compiler gives other
counts, so the file names the one it was made with.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

#: Counts to compare with.
FILE = Path(__file__).with_name("counts.json")

#: Kernels of one pass, and of a whole run.
PASS = ("*paged_pass_paged_schedule", "*paged_pass_paged_emit", "*paged_pass_paged_settle")
RUN = ("*drive_5Fleet_loop",)

Case = tuple[tuple[str, ...], str, dict[str, Any], int, str]

DECODE = """
import ranks
rank = ranks.decoding({n}, {block_size})
now = 0.0
for _ in range({rounds}):
    now = rank._state.execute(now)
"""
REPLAY = """
import kvsim, ranks
from kvsim.workload import example_trace_path
config = kvsim.EngineConfig.for_backend(
    {backend!r}, block_size={block_size}, num_gpu_blocks=2**20 // {block_size}, timing_model=ranks.FIXED)
workload = kvsim.load_workload(example_trace_path())
for _ in range({rounds}):
    kvsim.replay(workload, config)
"""
LOOP = """
import kvsim, ranks
from kvsim.workload import flat_workload
config = kvsim.EngineConfig.for_backend(
    {backend!r}, block_size={block_size}, num_gpu_blocks={blocks}, timing_model=ranks.FIXED)
workload = flat_workload(requests={requests}, input_tokens=1024, output_tokens={output_tokens})
for _ in range({rounds}):
    kvsim.replay(workload, config, concurrency={concurrency})
"""


def _loop(backend: str, block_size: int, blocks: int, requests: int, output_tokens: int, concurrency: int) -> Case:
    parameters = locals()
    return RUN, LOOP, parameters, 1, "run"


#: Name -> kernels, program, its parameters, rounds, unit of a round.
CASES: dict[str, Case] = {
    **{
        f"decode pass, {n} requests, block {block}": (PASS, DECODE, {"n": n, "block_size": block}, 64, "pass")
        for n in (64, 256, 1024)
        for block in (16, 64)
    },
    **{
        f"example trace, {backend}, block {block}": (RUN, REPLAY, {"backend": backend, "block_size": block}, 1, "run")
        for backend in ("vllm", "sglang")
        for block in (16, 64)
    },
    "closed loop, vllm": _loop("vllm", 16, 32_768, 1000, 128, 256),
    "closed loop, vllm, tight": _loop("vllm", 16, 16_384, 1000, 128, 256),
    "closed loop, sglang": _loop("sglang", 16, 32_768, 1000, 128, 256),
    "long decodes, 1 at a time": _loop("vllm", 64, 16_384, 4, 4096, 1),
    "long decodes, 32 at a time": _loop("vllm", 64, 16_384, 64, 4096, 32),
    "long decodes, 256 at a time": _loop("vllm", 16, 65_536, 512, 1024, 256),
}


def count(program: str, kernels: tuple[str, ...]) -> int:
    """Instructions that `program` spends in `kernels`."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        command += [f"--toggle-collect={kernel}" for kernel in kernels]
        here = str(Path(__file__).parent)
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
        done = subprocess.run(
            [*command, sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None:
        raise SystemExit(f"valgrind reports no count:\n{done.stderr[-2000:]}")
    return int(found[1])


def main() -> int:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", action="append", help="only this case; may be repeated")
    parser.add_argument("--write", action="store_true", help=f"put the counts into {FILE.name}")
    parser.add_argument("--limit", type=float, metavar="PERCENT", help="fail if a case needs this much more")
    arguments = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed")
    known = json.loads(FILE.read_text()) if FILE.exists() else {"counts": {}}
    if known.get("compiler", compiler()) != compiler():
        print(f"{FILE.name} was made with {known['compiler']}, this is {compiler()}: expect other counts")
    worse = 0
    for name, (kernels, program, parameters, rounds, unit) in CASES.items():
        if arguments.case and name not in arguments.case:
            continue
        whole = count(program.format(rounds=rounds, **parameters), kernels)
        before = count(program.format(rounds=0, **parameters), kernels)
        counted = round((whole - before) / rounds)
        line = f"{name:36} {counted:16,} instructions per {unit}"
        if name in known["counts"]:
            change = 100.0 * (counted / known["counts"][name] - 1.0)
            line += f"   {change:+8.2f} %"
            worse += arguments.limit is not None and change > arguments.limit
        print(line, flush=True)
        known["counts"][name] = counted
    if arguments.write:
        counts = {name: known["counts"][name] for name in CASES if name in known["counts"]}
        FILE.write_text(json.dumps({"compiler": compiler(), "counts": counts}, indent=2) + "\n")
    return 1 if worse else 0


def compiler() -> str:
    """First line of what the compiler of extension modules says of itself."""
    command = (sysconfig.get_config_var("CC") or "cc").split()[0]
    return subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
