"""What importing costs: each round is a new process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

# Interpreter and numpy are there in any program that uses kvsim, so they are outside of what is counted.
CHILD = "import numpy, time; t = time.perf_counter(); {}; print((time.perf_counter() - t) * 1000)"


@pytest.mark.parametrize(
    "statement",
    ["import kvsim", "from kvsim import EngineConfig", "from kvsim import SchedulerRank", "import kvsim.replay.run"],
)
def test_import_beside_numpy(benchmark: Any, statement: str) -> None:
    added: list[float] = []

    def run() -> None:
        done = subprocess.run(
            [sys.executable, "-c", CHILD.format(statement)], capture_output=True, text=True, check=True
        )
        added.append(float(done.stdout))

    benchmark.pedantic(run, rounds=7, warmup_rounds=1)
    benchmark.extra_info["added_ms"] = sorted(added)[len(added) // 2]
