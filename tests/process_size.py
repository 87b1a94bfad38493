"""The greatest size of a process, and code run in a process of its own."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path


def peak_mb() -> float:
    """Greatest resident size of this process so far, megabytes.

    Linux hands `ru_maxrss` on to a child, so a small child of a large process
    would look large; ``VmHWM`` starts anew.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_alone(code: str) -> str:
    """What `code` prints in a new process with the module path of this one."""
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
