"""The public Mooncake conversation trace, whole: 12,031 requests, 144.8 M prompt tokens, 4.12 M output tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvsim
from kvsim.cli import main
from kvsim.config import EngineConfig, FixedTiming
from process_size import run_alone

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"

pytestmark = pytest.mark.skipif(
    not TRACE.is_file(), reason=f"the public trace {TRACE.name} is not in ../shared/traces beside the project"
)

REQUESTS, OUTPUT_TOKENS = 12_031, 4_122_048
OPTIONS = ["--set", "block_size=64", "--set", "num_gpu_blocks=32768"]


def test_the_command_line_completes_every_request_and_prints_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(TRACE), *OPTIONS, "--format", "json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    summary = json.loads(printed.out)
    assert summary["num_requests"] == summary["completed_requests"] == REQUESTS
    assert summary["total_output_tokens"] == OUTPUT_TOKENS
    assert summary["rejected_requests"] == summary["failed_requests"] == summary["unfinished_requests"] == 0
    assert summary["committed_prefill_tokens"] < summary["total_input_tokens"]
    assert 0.05 < summary["first_admission_prefix_cache_reused_ratio"] < 0.6


@pytest.mark.parametrize("backend", ["trtllm", "sglang"])
def test_the_other_engines_complete_every_request_too(backend: str) -> None:
    config = EngineConfig(
        backend=backend,  # type: ignore[arg-type]
        block_size=64,
        num_gpu_blocks=32768,
        timing_model=FixedTiming(prefill_ms=30.0, decode_ms=10.0),
    )
    summary = kvsim.replay(TRACE, config, workers=4).summary
    assert summary["completed_requests"] == REQUESTS
    assert summary["total_output_tokens"] == OUTPUT_TOKENS


_MEASURED = """
import kvsim
from process_size import peak_mb
from kvsim.config import EngineConfig

result = kvsim.replay({trace!r}, EngineConfig(block_size=64, num_gpu_blocks=32768))
print(result.summary["completed_requests"], len(result.to_jsonl().splitlines()))
print(peak_mb())
"""


def test_the_whole_trace_with_every_request_takes_less_than_200_megabytes() -> None:
    counts, megabytes = run_alone(_MEASURED.format(trace=str(TRACE))).splitlines()
    assert counts.split() == [str(REQUESTS)] * 2
    assert float(megabytes) < 200.0
