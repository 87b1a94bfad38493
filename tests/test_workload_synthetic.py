"""Arrival processes, session and flat generators, the peers' traffic object, made-up traces."""

import dataclasses
import gzip
import json
import math
import random

import numpy as np
import pytest

from kvsim._core import content
from kvsim.errors import ConfigError, WorkloadError
from kvsim.layout import SEGMENT
from kvsim.workload import (
    ArrivalDriver,
    TraceProfile,
    arrival_times,
    example_trace_path,
    flat_workload,
    generate_trace,
    read_mooncake,
    session_workload,
    think_times,
    workload_from_traffic,
    write_mooncake,
)

SESSIONS = {"sessions": 4, "input_tokens": 40, "output_tokens": 3, "block_size": 16}


def block_heads(work, at, block):
    """First token of each block of a prompt."""
    return work.prompt_token_ids(at)[::block].tolist()


# ---------------------------------------------------------------- arrivals and delays


def test_constant_rate_is_evenly_spaced():
    assert arrival_times("constant", 4, rate=10.0).tolist() == [0, 100, 200, 300]  # D8


def test_burst_arrives_at_once():
    assert arrival_times("burst", 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("process", ["constant", "poisson", "gamma"])
def test_first_arrival_is_zero_and_times_ascend(process):
    times = arrival_times(process, 1000, rate=50.0, smoothness=0.5)
    assert times[0] == 0
    assert (np.diff(times) >= 0).all()
    assert arrival_times(process, 1, rate=50.0).tolist() == [0]


@pytest.mark.parametrize("stream", ["pcg64", "chacha12"])
def test_poisson_gaps_are_exponential(stream):
    gaps = np.diff(arrival_times("poisson", 100_001, rate=10.0, stream=stream))
    assert abs(gaps.mean() - 100) < 1
    assert abs(gaps.std() - 100) < 2


@pytest.mark.parametrize(("smoothness", "tolerance"), [(4.0, 0.5), (1.0, 0.8), (0.25, 1.5)])
def test_gamma_gaps_have_the_mean_and_the_shape(smoothness, tolerance):
    gaps = np.diff(arrival_times("gamma", 100_001, rate=20.0, smoothness=smoothness))
    assert abs(gaps.mean() - 50) < tolerance
    assert gaps.std() / gaps.mean() == pytest.approx(smoothness**-0.5, rel=0.03)


def test_seeds_repeat_and_differ():
    one, same, other = (arrival_times("poisson", 50, rate=1.0, seed=s) for s in (3, 3, 4))
    assert one.tolist() == same.tolist()
    assert one.tolist() != other.tolist()


def test_the_peers_stream_gives_its_recorded_arrivals():
    times = arrival_times("poisson", 4, rate=60.0, seed=5, stream="chacha12")
    recorded = [0.0, 6.979043357159298, 7.089711323921254, 17.19149046758816]
    np.testing.assert_allclose(times, recorded, rtol=1e-14)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({"process": "poisson", "rate": 0.0}, "rate"),
        ({"process": "poisson", "rate": -1.0}, "rate"),
        ({"process": "poisson", "rate": math.nan}, "rate"),
        ({"process": "constant", "rate": math.inf}, "rate"),
        ({"process": "constant"}, "rate"),
        ({"process": "gamma", "rate": 1.0, "smoothness": 0.0}, "smoothness"),
        ({"process": "gamma", "rate": 1.0, "smoothness": math.nan}, "smoothness"),
        ({"process": "gamma", "rate": 1.0, "stream": "chacha12"}, "stream"),
        ({"process": "weibull", "rate": 1.0}, "process"),
        ({"process": "burst", "count": 0}, "count"),
        ({"process": "poisson", "rate": 1.0, "seed": -1}, "seed"),
    ],
)
def test_arrival_parameters_are_checked(call, field):
    with pytest.raises(ConfigError, match=f"^{field}: must be"):
        arrival_times(**({"count": 3} | call))


def test_think_times():
    assert think_times("none", 2).tolist() == [0, 0]
    assert think_times("constant", 2, mean_ms=7.5).tolist() == [7.5, 7.5]
    delays = think_times("exponential", 50_000, mean_ms=40.0)
    assert abs(delays.mean() - 40) < 1
    assert abs(delays.std() - 40) < 1
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="mean_ms: must be finite and >= 0"):
            think_times("constant", 2, mean_ms=bad)
    with pytest.raises(ConfigError, match="process: must be one of none, constant, exponential"):
        think_times("normal", 2)


# ---------------------------------------------------------------- sessions


def test_fresh_blocks_are_numbered_in_order_of_creation():
    work = session_workload(**SESSIONS)
    assert [block_heads(work, r, 16) for r in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert work.specs["input_tokens"].tolist() == [40] * 4
    assert work.session_names == ["session_0", "session_1", "session_2", "session_3"]


@pytest.mark.parametrize(
    ("ratio", "second"),
    [(0.124, [4, 5, 6, 7]), (0.125, [0, 4, 5, 6]), (0.4, [0, 1, 4, 5]), (0.626, [0, 1, 2, 4]), (1.0, [0, 1, 2, 3])],
)
def test_shared_prefix_is_a_rounded_share_of_the_blocks(ratio, second):
    work = session_workload(**SESSIONS | {"input_tokens": 64}, shared_prefix_ratio=ratio, prefix_groups=1)
    assert block_heads(work, 0, 16) == [0, 1, 2, 3]
    assert block_heads(work, 1, 16) == second


def test_ratio_without_groups_shares_nothing():
    work = session_workload(**SESSIONS, shared_prefix_ratio=1.0)
    assert block_heads(work, 1, 16) == [3, 4, 5]


def test_the_peers_groups_are_those_it_was_seen_to_draw():
    work = session_workload(**SESSIONS | {"sessions": 12}, shared_prefix_ratio=0.5, prefix_groups=3, stream="chacha12")
    first = [int(work.prompt_token_ids(r)[0]) for r in range(12)]
    names = {head: "ABC"[k] for k, head in enumerate(dict.fromkeys(first))}
    assert "".join(names[head] for head in first) == "AABAACABACCA"


def test_every_group_is_drawn_about_equally():
    work = session_workload(**SESSIONS | {"sessions": 6000}, shared_prefix_ratio=1.0, prefix_groups=3)
    _, counts = np.unique([int(work.prompt(r)["start"][0]) for r in range(6000)], return_counts=True)
    assert len(counts) == 3
    assert (abs(counts - 2000) < 200).all()


def test_each_turn_brings_the_prefix_again_and_fresh_blocks():
    work = session_workload(
        **SESSIONS | {"sessions": 2, "input_tokens": 32}, turns=2, shared_prefix_ratio=0.5, prefix_groups=1
    )
    assert [block_heads(work, r, 16) for r in range(4)] == [[0, 1], [0, 2], [0, 3], [0, 4]]
    assert work.cumulative
    assert work.full_prompt_tokens().tolist() == [32, 67, 32, 67]
    assert work.first_turn.tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("prefix", "ratio", "block", "shared"), [(16, 0.0, 16, 16), (20, 0.0, 4, 20), (40, 0.0, 8, 40), (8, 0.5, 1, 24)]
)
def test_cached_prefix_tokens_are_common_to_all(prefix, ratio, block, shared):
    work = session_workload(
        **SESSIONS | {"input_tokens": 48}, cached_prefix_tokens=prefix, shared_prefix_ratio=ratio, prefix_groups=1
    )
    assert work.block_size == block
    first, second = work.prompt_token_ids(0), work.prompt_token_ids(1)
    assert (first[:shared] == second[:shared]).all()
    assert not set(first[shared:].tolist()) & set(second.tolist())


def test_spread_lengths_have_the_mean_and_stay_positive():
    work = session_workload(
        **SESSIONS | {"sessions": 5000, "output_tokens": 2}, turns=2, input_stddev=12.0, output_stddev=3.0
    )
    inputs, outputs = work.specs["input_tokens"], work.specs["max_output_tokens"]
    assert abs(inputs.mean() - 40) < 0.5
    assert abs(inputs.std() - 12) < 0.5
    assert outputs.min() == 1
    assert work.num_requests == 10_000


def test_arrivals_and_delays_go_to_their_turns():
    work = session_workload(**SESSIONS, turns=3, arrivals_ms=np.array([0, 5, 9, 9.5]), delay_ms=4.0)
    assert work.specs["arrival_ms"][work.first_turn].tolist() == [0, 5, 9, 9.5]
    assert np.isnan(work.specs["arrival_ms"][~work.first_turn]).all()
    assert work.delay_ms[:3].tolist() == [0, 4, 4]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sessions": 0}, "sessions"),
        ({"turns": 0}, "turns"),
        ({"input_tokens": 0}, "input_tokens"),
        ({"output_tokens": -1}, "output_tokens"),
        ({"block_size": 0}, "block_size"),
        ({"shared_prefix_ratio": 1.5}, "shared_prefix_ratio"),
        ({"shared_prefix_ratio": math.nan}, "shared_prefix_ratio"),
        ({"prefix_groups": -1}, "prefix_groups"),
        ({"cached_prefix_tokens": 41}, "cached_prefix_tokens"),
        ({"input_stddev": -1.0}, "input_stddev"),
        ({"delay_ms": -1.0}, "mean_ms"),
        ({"arrivals_ms": np.zeros(3)}, "arrivals_ms"),
        ({"stream": "chacha12", "output_stddev": 1.0}, "stream"),
    ],
)
def test_session_parameters_are_checked(changes, field):
    with pytest.raises(ConfigError, match=f"^{field}: must"):
        session_workload(**SESSIONS | changes)


# ---------------------------------------------------------------- flat lists

FLAT = {"requests": 5, "input_tokens": 100, "output_tokens": 10}


def test_flat_lengths_draw_all_inputs_before_the_outputs():
    work = flat_workload(**FLAT, random_range_ratio=0.5, random_seed=7)
    rng = random.Random(7)
    assert work.specs["input_tokens"].tolist() == [rng.randint(50, 100) for _ in range(5)]
    assert work.specs["max_output_tokens"].tolist() == [rng.randint(5, 10) for _ in range(5)]


def test_flat_poisson_arrivals_are_those_of_the_standard_library():
    work, rng, now = flat_workload(**FLAT, request_rate=10.0), random.Random(42), 0.0
    assert work.specs["arrival_ms"][0] == 0
    for at in work.specs["arrival_ms"][1:]:
        now += rng.expovariate(10.0) * 1000.0
        assert at == now


def test_flat_prompts_share_nothing_but_the_cached_prefix():
    plain = flat_workload(**FLAT)
    assert [int(plain.prompt_token_ids(r)[0]) for r in range(3)] == [0, 1000003, 2000006]
    work = flat_workload(**FLAT, cached_prefix_tokens=30)
    for r in range(5):
        ids = work.prompt_token_ids(r)
        assert ids[:30].tolist() == list(range(1, 31))
        assert ids[30:].tolist() == [(r + 1) * 1000003 + 30 + j for j in range(70)]
    assert work.request_names == [f"synthetic-{i}" for i in range(5)]
    assert flat_workload(**FLAT, cached_prefix_tokens=100).prompt_token_ids(3).tolist() == list(range(1, 101))


def test_flat_interval_and_burst():
    assert flat_workload(**FLAT, arrival_interval_ms=2.5).specs["arrival_ms"].tolist() == [0, 2.5, 5, 7.5, 10]
    assert flat_workload(**FLAT).specs["arrival_ms"].tolist() == [0] * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 0}, "requests: must be an int"),
        ({"random_range_ratio": 0.0}, "random_range_ratio: must be finite and > 0 and <= 1, got 0.0"),
        ({"random_range_ratio": 1.5}, "random_range_ratio: must be finite and > 0 and <= 1, got 1.5"),
        ({"random_range_ratio": 0.05}, "output_tokens: must be at least 20 at random_range_ratio 0.05, got 10"),
        ({"cached_prefix_tokens": 101}, "cached_prefix_tokens: must be at most the shortest input, 100, got 101"),
        ({"request_rate": 0.0}, "request_rate: must be finite and > 0"),
        ({"request_rate": 1.0, "arrival_interval_ms": 1.0}, "request_rate: must not be given together"),
        ({"arrival_interval_ms": -1.0}, "arrival_interval_ms: must be finite and >= 0"),
        ({"random_seed": -1}, "random_seed: must be an int"),
    ],
)
def test_flat_parameters_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        flat_workload(**FLAT | changes)


# ---------------------------------------------------------------- the peers' traffic object

SYNTHETIC = {"source_type": "synthetic", "isl": 40, "osl": 3, "request_count": 4}
CONSTANT = SYNTHETIC | {"load_type": "constant_rate", "arrival_interval_ms": 9.0}


def plan(traffic, block=16):
    return workload_from_traffic(traffic, engine_block_size=block)


def test_constant_rate_takes_an_interval_or_a_rate():
    assert plan(CONSTANT).workload.specs["arrival_ms"].tolist() == [0, 9, 18, 27]
    by_rate = SYNTHETIC | {"load_type": "constant_rate", "request_rate": 10.0}
    assert plan(by_rate).workload.specs["arrival_ms"].tolist() == [0, 100, 200, 300]


def test_concurrency_arrives_at_zero_under_a_cap():
    work, cap, speedup = plan(SYNTHETIC | {"load_type": "concurrency", "concurrency": 2})
    assert (work.specs["arrival_ms"].tolist(), cap, speedup) == ([0] * 4, 2, 1.0)


def test_sessions_have_four_turns_by_default():
    work = plan(CONSTANT | {"source_type": "synthetic-session"}).workload
    assert work.num_requests == 16
    assert plan(CONSTANT | {"source_type": "synthetic-session", "turns_per_session": 2}).workload.num_requests == 8


def test_synthetic_content_is_cut_by_the_block_of_the_engine():
    assert plan(CONSTANT | {"trace_block_size": 512}, block=8).workload.block_size == 8


@pytest.mark.parametrize(
    ("load", "ratio", "count"),
    [
        ({"load_type": "concurrency", "concurrency": 2}, 1.26, 3),
        ({"load_type": "concurrency", "concurrency": 2}, 0.1, 1),
        ({"load_type": "poisson", "request_rate": 2.5}, 1.0, 3),
        ({"load_type": "constant_rate", "arrival_interval_ms": 9.0}, 1.0, 111),
    ],
)
def test_request_count_can_follow_the_load(load, ratio, count):
    traffic = SYNTHETIC | load | {"request_count": None, "num_request_ratio": ratio}
    assert plan(traffic).workload.num_requests == count


def test_a_range_ratio_selects_the_flat_generator():
    work = plan(CONSTANT | {"random_range_ratio": 0.5, "random_seed": 3}).workload
    rng = random.Random(3)
    assert work.specs["input_tokens"].tolist() == [rng.randint(20, 40) for _ in range(4)]
    assert work.request_names[0] == "synthetic-0"
    assert work.specs["arrival_ms"].tolist() == [0, 9, 18, 27]
    assert plan(CONSTANT | {"random_range_ratio": 1.0}).workload.request_names is None


def test_traces_are_read_with_their_load(tmp_path):
    path = tmp_path / "t.jsonl"
    write_mooncake(path, [{"hash_ids": [1], "input_length": 5, "output_length": 1, "timestamp": t} for t in (10, 30)])
    traffic = {"source_type": "trace", "trace_path": str(path), "load_type": "trace_timestamps"}
    work, cap, speedup = plan(traffic | {"arrival_speedup_ratio": 2.0})
    assert ArrivalDriver(work, cap, speedup).static_arrivals().tolist() == [0, 10]
    assert work.block_size == 512
    closed = plan(traffic | {"load_type": "concurrency", "replay_concurrency": 1, "trace_block_size": 64})
    assert (closed.concurrency, closed.workload.block_size, closed.workload.cumulative) == (1, 64, False)
    assert plan(traffic | {"trace_format": "mooncake-delta"}).workload.cumulative


TRACE = {"source_type": "trace", "trace_path": "t.jsonl"}


@pytest.mark.parametrize(
    ("traffic", "message"),
    [
        ({}, "traffic.source_type: must be one of synthetic, synthetic-session, trace, got None"),
        (CONSTANT | {"source_type": "weka"}, "traffic.source_type: must be one of"),
        (CONSTANT | {"image_count": 1}, "traffic.image_count: is not a key of synthetic traffic"),
        (CONSTANT | {"trace_path": "x"}, "traffic.trace_path: is not a key of synthetic traffic"),
        (CONSTANT | {"arrival_speedup_ratio": 2.0}, "traffic.arrival_speedup_ratio: is not a key of synthetic"),
        (CONSTANT | {"isl": 0}, "traffic.isl: must be an int with 1 <= isl <= 2147483647, got 0"),
        (CONSTANT | {"isl": None}, "traffic.isl: is required"),
        (CONSTANT | {"osl": 2.5}, "traffic.osl: must be an int"),
        (CONSTANT | {"request_count": 0}, "traffic.request_count: must be an int"),
        (CONSTANT | {"request_count": None}, "traffic.request_count: is required, or num_request_ratio"),
        (CONSTANT | {"arrival_interval_ms": 0.0}, "traffic.arrival_interval_ms: must be finite and > 0, got 0.0"),
        (CONSTANT | {"arrival_interval_ms": math.nan}, "traffic.arrival_interval_ms: must be finite and > 0, got nan"),
        (CONSTANT | {"request_rate": 5.0}, "traffic.request_rate: load_type constant_rate needs exactly one"),
        (CONSTANT | {"concurrency": 5}, "traffic.concurrency: must not be set for load_type constant_rate, got 5"),
        (CONSTANT | {"shared_prefix_ratio": 1.5}, "traffic.shared_prefix_ratio: must be finite and >= 0 and <= 1"),
        (CONSTANT | {"num_prefix_groups": -1}, "traffic.num_prefix_groups: must be an int"),
        (CONSTANT | {"inter_turn_delay_ms": -1.0}, "traffic.inter_turn_delay_ms: must be finite and >= 0"),
        (CONSTANT | {"turns_per_session": 2}, "traffic.turns_per_session: must be 1 for synthetic traffic"),
        (CONSTANT | {"cached_prefix_tokens": 41}, "traffic.cached_prefix_tokens: must be at most isl = 40, got 41"),
        (CONSTANT | {"arrival_seed": -1}, "traffic.arrival_seed: must be an int"),
        (CONSTANT | {"random_range_ratio": 0}, "traffic.random_range_ratio: must be finite and > 0"),
        (
            CONSTANT | {"random_range_ratio": 0.5, "shared_prefix_ratio": 0.5},
            "traffic.shared_prefix_ratio: must not be set together with random_range_ratio",
        ),
        (SYNTHETIC, "traffic.load_type: must be one of concurrency, poisson, constant_rate"),
        (SYNTHETIC | {"load_type": "burst"}, "traffic.load_type: must be one of concurrency, poisson"),
        (SYNTHETIC | {"load_type": "poisson"}, "traffic.request_rate: load_type poisson needs exactly one"),
        (SYNTHETIC | {"load_type": "poisson", "request_rate": 0}, "traffic.request_rate: must be finite and > 0"),
        (SYNTHETIC | {"load_type": "concurrency", "concurrency": 0}, "traffic.concurrency: must be an int"),
        (
            SYNTHETIC | {"load_type": "concurrency", "concurrency": 2, "replay_concurrency": 3},
            "traffic.replay_concurrency: must equal concurrency 2",
        ),
        (TRACE | {"load_type": "poisson"}, "traffic.load_type: must be trace_timestamps or concurrency"),
        (TRACE | {"load_type": "concurrency"}, "traffic.replay_concurrency: is required"),
        (TRACE | {"arrival_speedup_ratio": 0.0}, "traffic.arrival_speedup_ratio: must be finite and > 0"),
        (TRACE | {"trace_block_size": 0}, "traffic.trace_block_size: must be an int"),
        (TRACE | {"trace_format": "weka"}, "traffic.trace_format: must be mooncake or mooncake-delta"),
        (TRACE | {"trace_path": None}, "traffic.trace_path: must be exactly one path"),
        (TRACE | {"trace_paths": ["a"]}, "traffic.trace_path: must be exactly one path"),
        (TRACE | {"isl": 3}, "traffic.isl: is not a key of trace traffic"),
    ],
)
def test_traffic_is_checked_key_by_key(traffic, message):
    with pytest.raises(ConfigError, match=message):
        plan(traffic)


def test_an_unreadable_trace_is_a_workload_error():
    with pytest.raises(WorkloadError, match=r"t\.jsonl: cannot be read"):
        plan(TRACE)


# ---------------------------------------------------------------- made-up traces


def test_generated_traces_are_sound_and_repeat(tmp_path):
    profile = TraceProfile(requests=300, seed=5)
    rows = generate_trace(profile)
    assert rows == generate_trace(profile)
    assert rows != generate_trace(dataclasses.replace(profile, seed=6))
    sizes = [write_mooncake(tmp_path / name, rows) for name in ("a.jsonl.gz", "b.jsonl.gz", "c.jsonl")]
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()) == (tmp_path / "c.jsonl").read_bytes()
    assert sizes[0] < sizes[2] == (tmp_path / "c.jsonl").stat().st_size
    assert [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()] == rows
    work = read_mooncake(tmp_path / "a.jsonl.gz", strict=True)
    assert work.num_requests == 300
    times = work.specs["arrival_ms"]
    assert times[0] == 0
    assert (np.diff(times) >= 0).all()


def test_generated_rates_and_lengths_follow_the_profile():
    rows = generate_trace(TraceProfile(requests=20_000, rate=50.0, think_s=1.0, output_median=100.0))
    outputs = np.array([r["output_length"] for r in rows])
    assert abs(np.median(outputs) - 100) < 5
    assert outputs.mean() > 1.2 * np.median(outputs)  # a heavy tail
    assert max(r["input_length"] for r in rows) <= TraceProfile().max_input
    assert len(rows) / (rows[-1]["timestamp"] / 1000) == pytest.approx(50, rel=0.1)


def test_a_prefix_cut_by_the_longest_prompt_is_not_shared_in_part(tmp_path):
    rows = generate_trace(TraceProfile(requests=200, prefix_tokens=4000.0, max_input=1500))
    ends = [r["hash_ids"][-1] for r in rows if r["input_length"] == 1500]
    assert len(ends) == len(set(ends)) > 20
    write_mooncake(tmp_path / "t.jsonl", rows)
    assert read_mooncake(tmp_path / "t.jsonl", strict=True).num_requests == 200


def test_conversations_can_be_written_as_sessions(tmp_path):
    rows = generate_trace(TraceProfile(requests=400, session_ids=True, block_size=64, seed=1))
    write_mooncake(tmp_path / "t.jsonl", rows)
    work = read_mooncake(tmp_path / "t.jsonl", block_size=64, strict=True)
    assert work.has_sessions
    follow = np.flatnonzero(~work.first_turn)
    assert (work.delay_ms[follow] > 0).all()
    for at in follow:  # the prompt before, as far as its blocks are whole, is the beginning of this one
        whole = int(work.specs["input_tokens"][at - 1]) // 64 * 64
        assert (work.prompt_token_ids(at)[:whole] == work.prompt_token_ids(at - 1)[:whole]).all()


def test_popular_prefixes_are_shared_by_conversations():
    rows = generate_trace(TraceProfile(requests=500, turns=1.0, prefix_tokens=2000.0))
    heads = [r["hash_ids"][0] for r in rows]
    assert len(set(heads)) <= TraceProfile().prefix_roots
    assert max(np.bincount(heads)) > 500 / TraceProfile().prefix_roots
    apart = generate_trace(TraceProfile(requests=500, turns=1.0, prefix_roots=0))
    assert len({r["hash_ids"][0] for r in apart}) == 500


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("requests", 0, "requests: must be >= 1, got 0"),
        ("requests", 1.5, "requests: must be an int, got 1.5"),
        ("rate", 0.0, "rate: must be > 0, got 0.0"),
        ("rate", math.nan, "rate: must be a finite number, got nan"),
        ("rate", -1.0, "rate: must be >= 0, got -1.0"),
        ("turns", 0.5, "turns: must be >= 1, got 0.5"),
        ("document_share", 1.5, "document_share: must be >= 0 and <= 1, got 1.5"),
        ("session_ids", 1, "session_ids: must be true or false, got 1"),
        ("block_size", True, "block_size: must be an int, got True"),
    ],
)
def test_profile_fields_are_checked(field, value, message):
    with pytest.raises(ConfigError, match=message):
        TraceProfile(**{field: value})


def test_the_example_trace_is_small_and_sound():
    path = example_trace_path()
    assert path.stat().st_size < 300_000
    work = read_mooncake(path, strict=True)
    assert work.num_requests == 2000
    # Tokens whose leading blocks occurred in an earlier prompt: what a cache without limit would find.
    seen, found = set(), 0
    for at in range(len(work)):
        ids = tuple(np.repeat(s["start"], -(-s["length"] // 512)).tolist() for s in work.prompt(at))
        chain = tuple(i for part in ids for i in part)
        whole = int(work.specs["input_tokens"][at]) // 512
        hit = 0
        while hit < whole and chain[: hit + 1] in seen:
            hit += 1
        found += hit * 512
        seen |= {chain[: k + 1] for k in range(whole)}
    assert 0.3 < found / work.total_input_tokens < 0.6


@pytest.mark.parametrize("block_size", [1, 3, 16, 20, 64, 100])
@pytest.mark.parametrize("page_size", [1, 16, 17, 61, 64, 128, 2100])
def test_numbered_blocks_have_the_content_of_their_segments(block_size, page_size):
    work = session_workload(
        sessions=12, input_tokens=300, output_tokens=37, block_size=block_size, input_stddev=250.0, stream="pcg64"
    )
    tables = work.specs, work.runs, work.segments
    assert isinstance(tables[1], tuple)
    for make in (content.hash_workload, content.runs_workload):
        for flag, limit in ((True, 2**40), (False, 2**40), (False, 128)):
            numbered, spelled = (
                make(work.specs, table, work.tokens, work.plan, page_size, limit, flag) for table in tables[1:]
            )
            for mine, theirs in zip(numbered, spelled, strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_long_numbered_blocks_are_hashed_as_runs_of_their_token():
    for size in (61, 64, 256, 257, 272, 1000):
        rows = np.zeros(1, SEGMENT)
        rows["length"] = size
        hashes = content.equal_block_hashes(70, size)
        for token in (0, 1, 69):
            rows["start"] = token
            spelled = content.expand_parts([rows])
            assert hashes[token] == content.hash_parts([spelled], None, 0, 0, 0, size, 2**40, False)[0][0]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("prompt_offset", "prompt_offset: must follow the blocks of the row before"),
        ("prompt_count", "prompt_count: must be the blocks that input_tokens take"),
    ],
)
def test_numbered_blocks_must_lie_row_after_row(field, message):
    work = session_workload(**SESSIONS)
    specs = work.specs.copy()
    specs[field][1] += 1
    fields = {item.name: getattr(work, item.name) for item in dataclasses.fields(work) if item.init}
    with pytest.raises(WorkloadError, match=message):
        type(work)(**fields | {"specs": specs, "segments": work.runs})


def test_tables_of_numbered_blocks_are_checked_for_their_range():
    work = session_workload(**SESSIONS)
    for table, message in (((-1, 16), r"segments\[0\]"), ((2**31, 16), r"segments\[0\]"), ((9, 0), r"segments\[1\]")):
        with pytest.raises(ValueError, match=message):
            content.hash_workload(work.specs, table, work.tokens, work.plan, 16, 2**40, False)
    with pytest.raises(ValueError, match="must lie within the 1 rows of segments"):
        content.hash_workload(work.specs, (1, 16), work.tokens, work.plan, 16, 2**40, False)
    with pytest.raises(ValueError, match="must hold at least input_tokens"):
        content.hash_workload(work.specs, (work.runs.num_blocks, 1), work.tokens, work.plan, 16, 2**40, False)
