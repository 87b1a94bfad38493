#!/usr/bin/env python3
"""Instructions of kernels, counted by valgrind: they repeat within 0.01 % where times do not.

    python bench/callgrind.py [--case NAME ...]

Needs `valgrind` and an installed kvsim. Only what runs inside the named kernels
is counted; what prepares a case is subtracted by counting it alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: Kernels of one pass, and of a whole run.
PASS = ("*paged_pass_paged_schedule", "*paged_pass_paged_emit", "*paged_pass_paged_settle")
RUN = ("*drive_5Fleet_loop",)

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
config = kvsim.EngineConfig(block_size={block_size}, num_gpu_blocks=2**20 // {block_size}, timing_model=ranks.FIXED)
for _ in range({rounds}):
    kvsim.replay(example_trace_path(), config)
"""

#: Name -> kernels, program, its parameters, rounds, unit of a round.
CASES = {
    **{
        f"decode pass, {n} requests, block {block}": (PASS, DECODE, {"n": n, "block_size": block}, 64, "pass")
        for n in (64, 256, 1024)
        for block in (16, 64)
    },
    **{f"example trace, block {block}": (RUN, REPLAY, {"block_size": block}, 1, "run") for block in (16, 64)},
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
    arguments = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed")
    for name, (kernels, program, parameters, rounds, unit) in CASES.items():
        if arguments.case and name not in arguments.case:
            continue
        whole = count(program.format(rounds=rounds, **parameters), kernels)
        before = count(program.format(rounds=0, **parameters), kernels)
        print(f"{name:36} {(whole - before) / rounds:16,.0f} instructions per {unit}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
