"""Every option of `kvsim.replay`: what it does, and how a wrong value is refused."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.config import EngineConfig, ExternalTiming, FixedTiming
from kvsim.errors import ConfigError, TimingError, WorkloadError
from kvsim.layout import RequestStatus
from kvsim.policies import VllmPolicy
from kvsim.report import Sla
from kvsim.workload import workload_from_requests

FIXED = FixedTiming(prefill_ms=20.0, decode_ms=10.0)
CONFIG = EngineConfig(num_gpu_blocks=64, block_size=16, timing_model=FIXED)
TIGHT = EngineConfig(num_gpu_blocks=12, block_size=4, max_num_batched_tokens=32, timing_model=FIXED)
RADIX = EngineConfig(backend="sglang", num_gpu_blocks=60, block_size=1, timing_model=FIXED)
MTP = TIGHT.replace(aic_nextn=3, aic_nextn_accept_rates="0.7,0.5,0.5")


def items(count: int = 6, length: int = 20, output: int = 4, gap: float = 5.0) -> list[dict[str, Any]]:
    return [{"input_tokens": length, "output_tokens": output, "arrival_time_ms": gap * k} for k in range(count)]


def shared(count: int = 12) -> list[dict[str, Any]]:
    """Prompts with a common beginning, outputs of several lengths."""
    return [
        {
            "input_token_ids": [*range(8), *range(100 * k, 100 * k + k)],
            "output_tokens": k % 9,
            "arrival_time_ms": 4.0 * k,
        }
        for k in range(1, count + 1)
    ]


# ---------------------------------------------------------------- wrong values


@pytest.mark.parametrize(
    ("options", "field"),
    [
        *(({"workers": value}, "workers") for value in (0, -1, True, 1.0, "2", None)),
        *(({"dp_size": value}, "dp_size") for value in (0, -1, True, 1.0)),
        *(({"concurrency": value}, "concurrency") for value in (0, -1, True, 1.5, "2")),
        *(({"speedup": value}, "speedup") for value in (0, -1.0, math.nan, math.inf, True, "2", None)),
        *(({"max_sim_time_ms": value}, "max_sim_time_ms") for value in (-1.0, math.nan, math.inf, True, "3")),
        *(({"seed": value}, "seed") for value in (-1, 1.5, True, None)),
        ({"sla": {"ttft_ms": 3.0}}, "sla"),
        ({"config": {"block_size": 16}}, "config"),
        ({"config": {}}, "config"),
        ({"policy": "fastest"}, "policy"),
        ({"policy": VllmPolicy}, "policy"),
        ({"timing": 3.0}, "timing"),
        ({"timing": FIXED}, "timing"),
        ({"tokenization": 3}, "tokenization"),
        ({"tokenization": {}}, "tokenization.workers"),
        ({"tokenization": {"workers": 0}}, "tokenization.workers"),
        ({"tokenization": {"workers": 1, "base_ms": math.nan}}, "tokenization.base_ms"),
        ({"tokenization": {"workers": 1, "per_input_token_ms": -0.5}}, "tokenization.per_input_token_ms"),
        ({"tokenization": {"workers": 1, "threads": 2}}, "tokenization.threads"),
        ({"progress": 1}, "progress"),
        ({"config": CONFIG.replace(timing_model=ExternalTiming(provider="mine"))}, "timing_model"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_before_anything_runs(options: dict[str, Any], field: str) -> None:
    called = []
    options.setdefault("progress", lambda *counts: called.append(counts))
    with pytest.raises(ConfigError) as caught:
        kvsim.replay(items(), **{"config": CONFIG, **options})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert called == []


@pytest.mark.parametrize("workload", [3, None, [], {}, [3], "no such file.jsonl", Path("no such file.jsonl")])
def test_what_is_no_workload_is_refused(workload: Any) -> None:
    with pytest.raises(WorkloadError):
        kvsim.replay(workload, CONFIG)


@pytest.mark.parametrize(
    ("options", "text"), [({"trace_format": "weka"}, "weka"), ({"trace_block_size": 0}, "block_size")]
)
def test_a_wrong_option_of_the_trace_is_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises((WorkloadError, ConfigError), match=text):
        kvsim.replay(trace(tmp_path), CONFIG, **options)


def test_a_rank_hint_beyond_the_ranks_of_a_worker_names_the_request() -> None:
    with pytest.raises(ConfigError, match=r"dp_rank: request 1 .*2"):
        kvsim.replay([items(1)[0], {**items(1)[0], "dp_rank": 2}], CONFIG, dp_size=2)


def test_every_option_has_a_test_here_or_in_test_system() -> None:
    here = {
        *("workers", "dp_size", "concurrency", "speedup", "max_sim_time_ms", "seed", "sla", "timing", "tokenization"),
        *("policy", "trace_format", "trace_block_size", "strict", "record_passes", "capture_outputs", "progress"),
    }
    of_systems = {
        *(
            "startup_ms",
            "prefill",
            "decode",
            "handoff_latency_ms",
            "placement",
            "prefill_placement",
            "decode_placement",
        ),
        *("router", "scaling", "telemetry"),
    }
    assert set(inspect.signature(kvsim.replay).parameters) == here | of_systems | {"workload", "config"}


# ---------------------------------------------------------------- load


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_workers_are_served_round_robin_in_order_of_release(workers: int) -> None:
    result = kvsim.replay(items(6), CONFIG, workers=workers)
    assert result.requests["worker"].tolist() == [k % workers for k in range(6)]
    assert result.summary["decode_worker_seconds"] == pytest.approx(workers * result.totals.end_ms / 1000)


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_concurrency_caps_what_is_inside_and_stamps_arrivals_at_release(concurrency: int) -> None:
    rows = kvsim.replay(items(9), CONFIG, concurrency=concurrency, workers=2).requests
    instants = np.unique([*rows["arrival_ms"], *rows["terminal_ms"]])
    inside = [np.count_nonzero((rows["arrival_ms"] <= at) & (rows["terminal_ms"] > at)) for at in instants]
    assert max(inside) == concurrency
    assert set(rows["arrival_ms"]) <= {0.0, *rows["terminal_ms"]}


@pytest.mark.parametrize("speedup", [0.5, 1.0, 2.0, 8.0])
def test_speedup_divides_arrivals(speedup: float) -> None:
    rows = kvsim.replay(items(5, gap=100.0), CONFIG, speedup=speedup).requests
    assert rows["arrival_ms"].tolist() == [100.0 * k / speedup for k in range(5)]


def test_a_workload_may_be_a_list_an_iterator_a_parsed_one_or_a_path(tmp_path: Path) -> None:
    expected = kvsim.replay(items(), CONFIG).to_jsonl()
    assert kvsim.replay(iter(items()), CONFIG).to_jsonl() == expected
    assert kvsim.replay(workload_from_requests(items()), CONFIG).to_jsonl() == expected
    path = trace(tmp_path)
    assert kvsim.replay(path, CONFIG).to_jsonl() == kvsim.replay(str(path), CONFIG).to_jsonl() != ""


def trace(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    rows = [{"timestamp": 10 * k, "input_length": 100, "output_length": 3, "hash_ids": [0, k + 1]} for k in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_trace_block_size_is_the_length_of_a_hash_id(tmp_path: Path) -> None:
    # Of 100 tokens, the first id is shared: the first 64, or all, as the block of the trace is 64 or 512.
    assert kvsim.replay(trace(tmp_path), CONFIG, trace_block_size=64).requests["reused_tokens"].tolist() == [
        0,
        64,
        64,
        64,
    ]
    assert kvsim.replay(trace(tmp_path), CONFIG).requests["reused_tokens"].tolist() == [0, 96, 96, 96]


def test_strict_refuses_a_trace_that_is_otherwise_repaired(tmp_path: Path) -> None:
    assert kvsim.replay(trace(tmp_path), CONFIG).summary["completed_requests"] == 4
    with pytest.raises(WorkloadError, match=r"trace\.jsonl:1"):
        kvsim.replay(trace(tmp_path), CONFIG, strict=True)
    assert kvsim.replay(trace(tmp_path), CONFIG, strict=True, trace_block_size=64).summary["completed_requests"] == 4


def test_the_trace_format_decides_what_a_follow_up_row_means(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 32, "output_length": 8, "hash_ids": [1]},
        {"session_id": "a", "delay": 5, "input_length": 16, "output_length": 8, "hash_ids": [2]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert kvsim.replay(path, CONFIG).requests["input_tokens"].tolist() == [32, 16]
    for name in ("mooncake-delta", "mooncake_delta"):
        assert kvsim.replay(path, CONFIG, trace_format=name).requests["input_tokens"].tolist() == [32, 32 + 8 + 16]


# ---------------------------------------------------------------- seed


def test_the_seed_is_added_to_the_seed_of_the_configuration() -> None:
    runs = {seed: kvsim.replay(shared(), MTP, seed=seed).to_jsonl() for seed in range(4)}
    assert len(set(runs.values())) > 1
    for seed, text in runs.items():
        assert kvsim.replay(shared(), MTP.replace(aic_mtp_seed=42 + seed)).to_jsonl() == text
    wrapped = kvsim.replay(shared(), MTP.replace(aic_mtp_seed=2**64 - 1), seed=43).to_jsonl()
    assert wrapped == runs[0]


def test_without_chance_the_seed_changes_nothing() -> None:
    assert kvsim.replay(shared(), TIGHT, seed=7).to_jsonl() == kvsim.replay(shared(), TIGHT).to_jsonl()


# ---------------------------------------------------------------- service level


def test_goodput_counts_the_completed_requests_within_every_bound() -> None:
    rows = kvsim.replay(shared(), TIGHT).requests
    done = rows[rows["status"] == RequestStatus.COMPLETED]
    ttft = done["first_token_ms"] - done["arrival_ms"]
    gap = (done["last_token_ms"] - done["first_token_ms"]) / np.maximum(done["output_tokens"] - 1, 1)
    e2e = np.where(done["output_tokens"] > 0, done["last_token_ms"], done["terminal_ms"]) - done["arrival_ms"]
    bound = float(np.nanmedian(ttft))
    good = np.count_nonzero((ttft <= bound) & (gap <= 15.0))
    assert 0 < good < len(done)
    summary = kvsim.replay(shared(), TIGHT, sla=Sla(ttft_ms=bound, itl_ms=15.0)).summary
    assert summary["goodput_completed_requests"] == good
    bound = float(np.median(e2e))
    summary = kvsim.replay(shared(), TIGHT, sla=Sla(e2e_ms=bound)).summary
    assert summary["goodput_completed_requests"] == np.count_nonzero(e2e <= bound)
    assert not [key for key in kvsim.replay(shared(), TIGHT).summary if key.startswith("goodput")]


# ---------------------------------------------------------------- timing


class Linear:
    """A model that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        self.asked.append(("prefill", batch_size, mean_isl, mean_prefix))
        return float(batch_size * (mean_isl - mean_prefix))

    def predict_decode_ms(
        self, batch_size: int, active_kv_tokens: int, mean_context: int, total_kv_tokens: int
    ) -> float:
        self.asked.append(("decode", batch_size, active_kv_tokens, mean_context, total_kv_tokens))
        return 0.5 * batch_size


@pytest.mark.parametrize("config", [CONFIG, CONFIG.replace(timing_model=ExternalTiming(provider="mine"))])
def test_a_timing_object_is_asked_in_place_of_the_configured_model(config: EngineConfig) -> None:
    model = Linear()
    rows = kvsim.replay(items(2, length=20, output=2, gap=1000.0), config, timing=model).requests
    assert (rows["first_token_ms"] - rows["arrival_ms"]).tolist() == [20.0, 20.0]
    assert (rows["last_token_ms"] - rows["first_token_ms"]).tolist() == [0.5, 0.5]
    assert model.asked == [("prefill", 1, 20, 0), ("decode", 1, 21, 21, 64 * 16)] * 2
    assert all(type(value) is int for question in model.asked for value in question[1:])


@pytest.mark.parametrize("method", ["predict_prefill_ms", "predict_decode_ms"])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (RuntimeError("no such kernel"), "prediction failed: no such kernel"),
        (math.nan, "non-finite duration"),
        (math.inf, "non-finite duration"),
        ("fast", "must be a number of milliseconds, got 'fast'"),
        (None, "must be a number of milliseconds, got None"),
    ],
)
@pytest.mark.parametrize("concurrency", [None, 2])
def test_a_timing_object_that_answers_nonsense_is_named(
    method: str, answer: Any, text: str, concurrency: int | None
) -> None:
    class Bad(Linear):
        pass

    def predict(self: Any, *_: int) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    setattr(Bad, method, predict)
    with pytest.raises(TimingError) as caught:
        kvsim.replay(items(), CONFIG, timing=Bad(), concurrency=concurrency)
    name = "prefill" if method == "predict_prefill_ms" else "decode"
    assert str(caught.value).startswith(f"external {name} prediction ")
    assert text in str(caught.value)
    if isinstance(answer, Exception):
        assert caught.value.__cause__ is answer


def test_a_negative_decode_time_is_refused() -> None:
    class Backwards(Linear):
        def predict_decode_ms(self, *_: int) -> float:
            return -1.0

    with pytest.raises(TimingError, match="negative duration"):
        kvsim.replay(items(), CONFIG, timing=Backwards())


# ---------------------------------------------------------------- policy


@pytest.mark.parametrize("hook", ["score", "order", "victims", "admit"])
@pytest.mark.parametrize("concurrency", [None, 2])
@pytest.mark.parametrize("sessions", [False, True])
def test_an_error_of_a_policy_comes_out_of_the_run(
    hook: str, concurrency: int | None, sessions: bool, tmp_path: Path
) -> None:
    class Broken(VllmPolicy):
        pass

    def fail(self: Any, *_: Any) -> Any:
        raise LookupError("policy is lost")

    setattr(Broken, hook, fail)
    workload: Any = [{"input_tokens": 20, "output_tokens": 40} for _ in range(5)]
    if sessions:
        workload = tmp_path / "trace.jsonl"
        rows = [
            {"session_id": f"s{k % 5}", "input_length": 20, "output_length": 40, "hash_ids": [k]}
            | ({"timestamp": 0} if k < 5 else {"delay": 1})
            for k in range(10)
        ]
        workload.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(LookupError, match="policy is lost"):
        kvsim.replay(workload, TIGHT.replace(max_num_seqs=2), policy=Broken(), concurrency=concurrency)


def test_a_policy_is_given_by_name_or_as_an_object() -> None:
    class ShortestFirst(VllmPolicy):
        def score(self, request: np.void) -> float:
            return float(request["num_input"])

    jobs = [{"input_tokens": length, "output_tokens": 2} for length in (30, 10, 20)]
    config = CONFIG.replace(max_num_seqs=1)
    plain = kvsim.replay(jobs, config).requests["first_admit_ms"]
    assert np.argsort(plain).tolist() == [0, 1, 2]
    assert kvsim.replay(jobs, config, policy="vllm").requests["first_admit_ms"].tolist() == plain.tolist()
    shortest = kvsim.replay(jobs, config, policy=ShortestFirst()).requests["first_admit_ms"]
    assert np.argsort(shortest).tolist() == [1, 2, 0]


# ---------------------------------------------------------------- tokenization


def test_a_tokenization_pool_serves_first_come_first_served_before_the_engine() -> None:
    jobs = [
        {"input_tokens": length, "output_tokens": 1, "arrival_time_ms": at} for length, at in ((40, 0), (8, 1), (8, 2))
    ]
    one = kvsim.replay(jobs, CONFIG, tokenization={"workers": 1, "base_ms": 2.0, "per_input_token_ms": 0.25}).requests
    assert one["tokenized_ms"].tolist() == [12.0, 16.0, 20.0]
    assert one["arrival_ms"].tolist() == [0.0, 1.0, 2.0]
    # The second and third wait for the pass of the first, from 12 to 32.
    assert one["first_token_ms"].tolist() == [32.0, 52.0, 52.0]
    two = kvsim.replay(jobs, CONFIG, tokenization={"workers": 2, "base_ms": 2.0, "per_input_token_ms": 0.25}).requests
    assert two["tokenized_ms"].tolist() == [12.0, 5.0, 9.0]
    assert two["first_token_ms"].tolist() == [45.0, 25.0, 45.0]


def test_every_worker_has_a_tokenization_pool_of_its_own() -> None:
    jobs = [{"input_tokens": 8, "output_tokens": 1} for _ in range(4)]
    rows = kvsim.replay(jobs, CONFIG, workers=2, tokenization={"workers": 1, "base_ms": 3.0}).requests
    assert rows["tokenized_ms"].tolist() == [3.0, 3.0, 6.0, 6.0]


def test_a_request_in_the_tokenization_pool_counts_as_inside() -> None:
    jobs = [{"input_tokens": 8, "output_tokens": 1} for _ in range(3)]
    rows = kvsim.replay(jobs, CONFIG, concurrency=1, tokenization={"workers": 4, "base_ms": 3.0}).requests
    assert rows["arrival_ms"].tolist() == [0.0, 23.0, 46.0]
    assert rows["terminal_ms"].tolist() == [23.0, 46.0, 69.0]
    assert '"tokenized_ms":3.0' in kvsim.replay(jobs, CONFIG, tokenization={"workers": 1, "base_ms": 3.0}).to_jsonl()
    assert "tokenized_ms" not in kvsim.replay(jobs, CONFIG).to_jsonl()


# ---------------------------------------------------------------- progress


@pytest.mark.parametrize("concurrency", [None, 2])
def test_progress_grows_to_all_requests(concurrency: int | None) -> None:
    seen: list[tuple[int, int]] = []
    kvsim.replay(items(9), CONFIG, concurrency=concurrency, progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (9, 9)
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {9}


def test_an_error_of_the_progress_callback_comes_out() -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvsim.replay(items(), CONFIG, progress=stop)


# ---------------------------------------------------------------- captures

CAPTURED = pytest.mark.parametrize(
    ("config", "workers"),
    [(CONFIG, 1), (TIGHT, 1), (TIGHT, 3), (MTP, 1), (RADIX, 1), (RADIX.replace(max_num_seqs=3), 2)],
)


@CAPTURED
@pytest.mark.parametrize("cap", [None, 63.0])
def test_the_passes_add_up_to_the_totals_of_the_run(config: EngineConfig, workers: int, cap: float | None) -> None:
    result = kvsim.replay(shared(20), config, workers=workers, max_sim_time_ms=cap, record_passes=True)
    passes, summary = result.passes, result.summary
    assert passes is not None
    assert len(passes) == summary["passes"] > 0
    assert passes["sum_prefill_tokens"].sum() == summary["committed_prefill_tokens"] > 0
    assert passes["output_tokens"].sum() == result.requests["output_tokens"].sum() > 0
    assert (passes["end_ms"] >= passes["start_ms"]).all()
    assert passes["end_ms"].max() <= result.totals.end_ms
    for worker in range(workers):
        mine = passes[passes["worker"] == worker]
        assert (mine["start_ms"][1:] >= mine["end_ms"][:-1]).all()
        assert (mine["running_requests"] + mine["waiting_requests"] <= 20).all()
    assert (passes["active_blocks"] + passes["inactive_blocks"] <= config.num_gpu_blocks).all()
    assert not passes.flags.writeable
    assert kvsim.replay(shared(20), config, workers=workers).passes is None


@CAPTURED
def test_the_outputs_are_every_token_and_every_end(config: EngineConfig, workers: int) -> None:
    jobs = shared(20)
    for k in (3, 7):
        jobs[k]["output_token_ids"] = list(range(1000 * k, 1000 * k + 5))
    result = kvsim.replay(jobs, config, workers=workers, capture_outputs=True)
    outputs = result.outputs
    assert outputs is not None
    has_token, completed, rejected, has_cached = (outputs["flags"] & bit != 0 for bit in (1, 2, 4, 16))
    assert has_token.sum() == result.requests["output_tokens"].sum()
    assert (np.diff(outputs["at_ms"]) >= 0).all()
    for row, record in enumerate(result.requests):
        mine = outputs["row"] == row
        times = outputs["at_ms"][mine & has_token]
        assert len(times) == record["output_tokens"]
        if len(times):
            assert (times[0], times[-1]) == (record["first_token_ms"], record["last_token_ms"])
        assert outputs["at_ms"][mine & completed].tolist() == [record["terminal_ms"]]
        assert (mine & rejected).any() == (record["status"] == RequestStatus.REJECTED)
        if record["admissions"]:
            # The first output tells; SGLang never does.
            told = [] if config.backend == "sglang" else [record["first_reused_tokens"]]
            assert outputs["cached"][mine & has_cached].tolist() == told
            assert not told or (mine & has_cached)[np.flatnonzero(mine)[0]]
        assert set(outputs["worker"][mine]) == {record["worker"]}
    for k in (3, 7):
        assert outputs["token"][(outputs["row"] == k) & has_token].tolist() == jobs[k]["output_token_ids"]
    assert kvsim.replay(jobs, config, workers=workers).outputs is None


def test_the_admission_history_has_every_admission_with_its_reuse() -> None:
    result = kvsim.replay([{"input_tokens": 12, "output_tokens": 16} for _ in range(4)], TIGHT)
    assert result.summary["preemptions"] > 0
    for row, record in zip(result.rows(), result.requests, strict=True):
        history = row["admission_history"]
        assert len(history) == record["admissions"] == row["admission_count"]
        assert row["readmission_count"] == record["preemptions"] == len(history) - 1
        assert history[0]["at_ms"] == record["first_admit_ms"]
        assert max(entry["reused_input_tokens"] for entry in history) == record["reused_tokens"]


def test_a_result_is_written_and_read_back(tmp_path: Path) -> None:
    result = kvsim.replay(shared(), TIGHT, record_passes=True)
    folder = result.write(tmp_path / "out")
    assert json.loads((folder / "summary.json").read_text()) == result.summary
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert [row["uuid"] for row in rows] == [row["uuid"] for row in result.rows()]
    assert result.passes is not None
    assert np.load(folder / "passes.npy").tobytes() == result.passes.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        result.requests["status"] = 0
