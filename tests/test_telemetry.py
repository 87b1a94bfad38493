"""Telemetry: when samples are taken, what they hold, where they go; against the recorded samples of the peer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import dynamo_cases as cases
from kvsim.errors import ConfigError
from kvsim.layout import Pool
from kvsim.replay.pool import WorkerPool
from kvsim.replay.telemetry import PoolCounters, RankGauges, Telemetry, TelemetryOptions
from test_scaling import feed

SAMPLED = cases.with_part("telemetry")


class View:
    """A system whose numbers are set by hand."""

    def __init__(self, pools: dict[Pool, WorkerPool]) -> None:
        self.pools = pools
        self.rows: dict[Pool, list[RankGauges]] = {role: [] for role in pools}
        self.counted = {role: PoolCounters() for role in pools}
        self.pending = dict.fromkeys(pools, 0)

    def worker_pool(self, role):
        return self.pools.get(role)

    def gauges(self, role):
        return self.rows[role]

    def counters(self, role):
        return self.counted[role]

    def pending_requests(self, role):
        return self.pending[role]


def plain(workers: int = 1) -> View:
    view = View({Pool.DECODE: WorkerPool(Pool.AGGREGATED, workers)})
    view.rows[Pool.DECODE] = [RankGauges(worker, 0, 3, 1, 16, 2, 5) for worker in range(workers)]
    return view


@pytest.mark.parametrize("name", SAMPLED)
def test_recorded_samples(name):
    expected, pools = cases.load(name)["expected"], cases.pools(name)
    sides = {Pool.DECODE: "decode"}
    if cases.is_disaggregated(name):
        sides = {Pool.PREFILL: "prefill"} | sides
    view = View({role: pools.get(side) or pools["agg"] for role, side in sides.items()})
    wanted = expected["telemetry"]
    telemetry = Telemetry(TelemetryOptions(sample_interval_ms=wanted["sample_interval_ms"]))
    changes = list(expected.get("lifecycle_operations") or [])
    told = bool(cases.rows(name))
    for sample in wanted["samples"]:
        at, kind = sample["sampled_at_ms"], sample["kind"]
        # A sample is taken before the tick of its instant.
        while changes and (changes[0]["at_ms"], changes[0]["cause"] == "planner_scale") < (at, True):
            cases.repeat_change(name, pools, changes.pop(0))
        for role, side in sides.items():
            view.rows[role] = [
                RankGauges(*(row[key] for key in ("worker_id", "dp_rank", "active_blocks", "inactive_blocks")),
                           *(row[key] for key in ("total_blocks", "running_requests", "waiting_requests")))
                for row in sample[f"{side}_scheduler_metrics"]
            ]  # fmt: skip
            metrics = sample[f"{side}_interval_metrics"]
            view.counted[role] = PoolCounters(
                *(metrics[field] + getattr(view.counted[role], field) for field in PoolCounters._fields)
            )
            view.pending[role] = sample[f"router_pending_{side}_requests"]
        traffic = sample["traffic"]
        if told and kind != "baseline":
            feed(telemetry.traffic, name, sample["interval_start_ms"], at)
        elif kind != "baseline":
            # Nothing ended before the cap of this run, so its rows tell nothing.
            telemetry.traffic.arrived(traffic["arriving_requests"])
            for _ in range(traffic["router_kv_hit_rate_count"]):
                telemetry.traffic.placed(traffic["avg_router_kv_hit_rate"], 1)
        telemetry.traffic.decoded(traffic["accept_length_forward_count"], traffic["accept_length_forward_count"])
        if kind == "baseline":
            telemetry.baseline(at, view)
        elif kind == "periodic":
            assert telemetry.next_sample_ms == at
            telemetry.advance(at, view)
            telemetry.settle(at, view)
        else:
            telemetry.finish(at, view)
    assert cases.same(wanted, telemetry.result()) == []


def kinds(telemetry: Telemetry) -> list[tuple[str, float, float]]:
    return [(row["kind"], row["interval_start_ms"], row["sampled_at_ms"]) for row in telemetry.samples]


def test_samples_lie_at_multiples_of_the_interval_and_at_the_end():
    telemetry, view = Telemetry(TelemetryOptions(sample_interval_ms=0.1)), plain()
    telemetry.baseline(0.0, view)
    telemetry.advance(0.25, view)
    telemetry.settle(0.25, view)
    telemetry.advance(0.3, view)
    assert len(telemetry.samples) == 3
    telemetry.settle(3 * 0.1, view)
    telemetry.finish(0.35, view)
    assert kinds(telemetry) == [
        ("baseline", 0.0, 0.0),
        ("periodic", 0.0, 0.1),
        ("periodic", 0.1, 0.2),
        ("periodic", 0.2, 3 * 0.1),
        ("final", 3 * 0.1, 0.35),
    ]


def test_there_is_no_final_sample_where_a_periodic_one_shows_all():
    telemetry, view = Telemetry(TelemetryOptions(sample_interval_ms=10.0)), plain()
    telemetry.baseline(0.0, view)
    telemetry.settle(10.0, view)
    telemetry.finish(10.0, view)
    assert [kind for kind, _, _ in kinds(telemetry)] == ["baseline", "periodic"]


def test_what_comes_after_the_last_sample_of_its_instant_is_in_the_final_one():
    telemetry, view = Telemetry(TelemetryOptions(sample_interval_ms=10.0)), plain()
    telemetry.baseline(0.0, view)
    telemetry.settle(10.0, view)
    telemetry.traffic.arrived()
    telemetry.finish(10.0, view)
    assert telemetry.samples[-1]["kind"] == "final"
    assert telemetry.samples[-1]["traffic"]["arriving_requests"] == 1


def test_what_arrives_at_zero_is_in_the_window_behind_the_baseline():
    telemetry, view = Telemetry(TelemetryOptions(sample_interval_ms=10.0)), plain()
    telemetry.traffic.arrived(2)
    view.counted[Pool.DECODE] = PoolCounters(4, 8, 1)
    telemetry.baseline(0.0, view)
    telemetry.settle(10.0, view)
    first, second = telemetry.samples
    assert (first["traffic"]["arriving_requests"], second["traffic"]["arriving_requests"]) == (0, 2)
    assert set(first["decode_interval_metrics"].values()) == {0}
    assert second["decode_interval_metrics"] == {"cache_hit_tokens": 4, "cache_total_tokens": 8, "preemptions": 1}


def test_usage_is_a_share_of_the_pool():
    telemetry, view = Telemetry(TelemetryOptions()), plain()
    view.rows[Pool.DECODE].append(RankGauges(1, 0, 0, 0, 0, 0, 0))
    telemetry.baseline(0.0, view)
    row, empty = telemetry.samples[0]["decode_scheduler_metrics"]
    assert (row["active_cache_usage"], row["physical_cache_usage"]) == (3 / 16, 4 / 16)
    assert (empty["active_cache_usage"], empty["physical_cache_usage"]) == (0.0, 0.0)


# ---------------------------------------------------------------- sinks


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, True),
        ({"capture_in_memory": True}, True),
        ({"callback": print}, False),
        ({"jsonl_path": "x"}, False),
        ({"callback": print, "capture_in_memory": True}, True),
        ({"callback": print, "capture_in_memory": False}, False),
    ],
)
def test_samples_are_kept_when_nothing_else_takes_them(options, kept):
    assert TelemetryOptions(**options).in_memory is kept


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sample_interval_ms": 0.0}, "sample_interval_ms: must be finite and > 0, got 0.0"),
        ({"sample_interval_ms": math.inf}, "sample_interval_ms"),
        ({"sample_interval_ms": math.nan}, "sample_interval_ms"),
        ({"sample_interval_ms": True}, "sample_interval_ms"),
        ({"capture_in_memory": False}, "capture_in_memory: must not be false without"),
        ({"capture_in_memory": 1}, "capture_in_memory"),
        ({"callback": 3}, "callback: must be callable"),
        ({"jsonl_path": 3}, "jsonl_path: expected a path"),
    ],
)
def test_options_that_are_refused(options, field):
    with pytest.raises(ConfigError, match=f"telemetry.{field}"):
        TelemetryOptions(**options)


def run(options: TelemetryOptions) -> Telemetry:
    telemetry, view = Telemetry(options), plain(2)
    telemetry.baseline(0.0, view)
    for at in (10.0, 20.0):
        telemetry.traffic.arrived()
        telemetry.settle(at, view)
    telemetry.finish(25.0, view)
    return telemetry


def test_all_sinks_get_the_same_samples(tmp_path: Path):
    seen: list[dict[str, Any]] = []
    path = tmp_path / "samples.jsonl"
    telemetry = run(
        TelemetryOptions(sample_interval_ms=10.0, capture_in_memory=True, callback=seen.append, jsonl_path=path)
    )
    telemetry.close()
    telemetry.close()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(written) == 4
    assert telemetry.samples == seen == written
    assert "sink_errors" not in telemetry.result()


def test_what_a_callback_does_to_a_sample_stays_with_it():
    telemetry = run(TelemetryOptions(sample_interval_ms=10.0, capture_in_memory=True, callback=dict.clear))
    assert [row["sample_ordinal"] for row in telemetry.samples] == [0, 1, 2, 3]


def test_a_callback_that_fails_is_given_up_and_reported():
    seen = []

    def sink(sample):
        seen.append(sample["sample_ordinal"])
        if len(seen) == 2:
            raise KeyError("lost")

    telemetry = run(TelemetryOptions(sample_interval_ms=10.0, capture_in_memory=True, callback=sink))
    with pytest.warns(RuntimeWarning, match=r"telemetry.callback failed at sample 1: KeyError: 'lost'"):
        telemetry.close()
    telemetry.close()
    assert seen == [0, 1]
    assert len(telemetry.samples) == 4
    assert telemetry.result()["sink_errors"] == ["telemetry.callback failed at sample 1: KeyError: 'lost'"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that takes nothing")
def test_a_full_disk_is_reported():
    telemetry = Telemetry(TelemetryOptions(sample_interval_ms=1.0, jsonl_path="/dev/full", callback=lambda _: None))
    view = plain(8)
    for at in range(100):
        telemetry.settle(float(at), view)
    with pytest.warns(RuntimeWarning, match="telemetry.jsonl_path failed at sample"):
        telemetry.close()
    assert len(telemetry.sink_errors) == 1


def test_a_file_that_cannot_be_opened_is_an_error_before_the_run(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"telemetry.jsonl_path: .*missing.*cannot be written"):
        Telemetry(TelemetryOptions(jsonl_path=tmp_path / "missing" / "x.jsonl"))
