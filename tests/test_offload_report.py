"""What reports, the command line and the views of a rank say of lower KV tiers."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim import layout
from kvsim._core.drive import Fleet
from kvsim.cli import main
from kvsim.compat import dynamo
from kvsim.config import EngineConfig, FixedTiming, KvbmTiers, NativeHostOffload
from kvsim.errors import ConfigError, SnapshotError
from kvsim.layout import Tier, TierLink
from kvsim.offload import host_blocks, host_lru, host_transfers, tier_blocks, tier_lru, tier_transfers
from kvsim.rank import SchedulerRank
from offload_driver import Driver
from tier_bench import Bench

BLOCK = 1_000_000
ENGINE = EngineConfig(
    num_gpu_blocks=4,
    block_size=4,
    max_num_seqs=4,
    speedup_ratio=0.0,
    kv_cache_bytes_per_token=BLOCK // 4,
    timing_model=FixedTiming(prefill_ms=10.0, decode_ms=10.0),
)
HOST = ENGINE.replace(
    native_host_offload=NativeHostOffload(num_host_blocks=16, d2h_bandwidth_gbps=1.0, h2d_bandwidth_gbps=1.0)
)
TIERS = ENGINE.replace(kvbm_tiers=KvbmTiers(num_g2_blocks=4, num_g3_blocks=16, g1_to_g2_gbps=1.0, g2_to_g1_gbps=1.0))
#: The third prompt is the first one, which the second has pushed out.
REQUESTS = [
    {"arrival_time_ms": 500.0 * k, "input_token_ids": list(range(first, first + 16)), "output_tokens": 1}
    for k, first in enumerate((0, 1000, 0))
]


def said(config: EngineConfig, **options: Any) -> dict[str, Any]:
    summary = kvsim.replay(REQUESTS, config, **options).summary
    return {name.removeprefix("offload_"): value for name, value in summary.items() if name.startswith("offload_")}


def test_a_run_without_lower_tiers_says_nothing_of_them() -> None:
    assert said(ENGINE) == {}
    assert said(ENGINE.replace(kvbm_tiers=TIERS.kvbm_tiers, kv_cache_bytes_per_token=None)) == {}
    assert kvsim.replay(REQUESTS, ENGINE).summary["prefix_cache_reused_ratio"] == 0.0


def test_native_host_offload_counts_hits_bytes_and_waits() -> None:
    found = said(HOST)
    # The last block of a prompt is computed again for its logits.
    assert (found["device_hit_tokens"], found["lower_hit_tokens"]) == (0, 12)
    assert found["device_to_host_bytes"] == 8 * BLOCK
    assert found["host_to_device_bytes"] == 4 * BLOCK
    assert found["load_wait_ms"] == pytest.approx(4.0)
    assert found["host_evicted_blocks"] == 0
    small = said(HOST.replace(native_host_offload=NativeHostOffload(num_host_blocks=4)))
    assert small["host_evicted_blocks"] >= 4


def test_tiers_count_every_link() -> None:
    found = said(TIERS)
    assert found["device_to_host_bytes"] > 0
    assert found["host_to_disk_bytes"] > 0
    assert found["lower_hit_tokens"] > 0
    assert found["host_to_device_bytes"] == BLOCK * 4
    assert found["load_wait_ms"] > 0.0
    small = TIERS.replace(kvbm_tiers=KvbmTiers(num_g2_blocks=2, num_g3_blocks=16))
    assert said(small)["host_evicted_blocks"] > 0
    assert found["host_to_object_bytes"] == found["object_to_host_bytes"] == 0


def test_totals_are_over_all_workers() -> None:
    # The third request goes to the first worker, which has its prompt.
    found = said(HOST, workers=2)
    assert found["device_to_host_bytes"] == 8 * BLOCK
    assert (found["device_hit_tokens"], found["lower_hit_tokens"]) == (12, 0)


def test_the_table_names_the_tiers() -> None:
    assert "Reused tokens, lower tiers" in kvsim.replay(REQUESTS, HOST).table(wall=False)
    assert "lower tiers" not in kvsim.replay(REQUESTS, ENGINE).table(wall=False)


def test_a_sweep_has_a_column_for_each_entry() -> None:
    grid = {"native_host_offload": [None, {"num_host_blocks": 16}]}
    swept = kvsim.sweep(REQUESTS, grid, base=ENGINE)
    without, with_host = swept.table["offload_lower_hit_tokens"].tolist()
    assert math.isnan(without)
    assert with_host == 12


@pytest.mark.parametrize(
    "options",
    [
        ["--host-blocks", "64", "--d2h-gbps", "0", "--h2d-gbps", "0"],
        ["--g2-blocks", "64", "--g3-blocks", "64", "--g4"],
    ],
)
def test_the_command_line_sets_the_tiers(options: list[str], tmp_path: Any, capsys: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 500 * k, "input_length": 16, "output_length": 1, "hash_ids": ids}
        for k, ids in enumerate(([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]))
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["--set", "num_gpu_blocks=4", "--set", "block_size=4", "--trace-block-size", "4"]
    arguments = ["replay", str(trace), *small, "--kv-cache-bytes", "1000", *options, "--format", "json"]
    assert main(arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["offload_lower_hit_tokens"] == 12


def test_older_engine_arguments_mean_the_older_tiers() -> None:
    newer = dynamo._from_flat({"num_g2_blocks": 8, "kv_cache_bytes_per_token": 4, "num_g3_blocks": None})[0]
    assert newer["native_host_offload"] == {"num_host_blocks": 8}
    assert "kvbm_tiers" not in newer
    older = dynamo._from_flat(
        {
            "num_g2_blocks": 8,
            "num_g3_blocks": 4,
            "enable_g4_storage": True,
            "bandwidth_g1_to_g2_gbps": 2.0,
            "kv_bytes_per_token": 7,
        }
    )[0]
    assert older["kvbm_tiers"] == {"num_g2_blocks": 8, "num_g3_blocks": 4, "g4_storage": True, "g1_to_g2_gbps": 2.0}
    assert older["kv_cache_bytes_per_token"] == 7
    assert "native_host_offload" not in older
    assert dynamo._from_flat({"ruleset": "dynamo-1.3", "num_g2_blocks": 8})[0]["kvbm_tiers"] == {"num_g2_blocks": 8}
    assert "kvbm_tiers" not in dynamo._from_flat({"ruleset": "dynamo-1.3", "num_g2_blocks": 0})[0]


def test_views_of_host_memory() -> None:
    driver = Driver(HOST)
    driver.whole(1, range(16))
    transfers = host_transfers(driver.rank)
    assert transfers["store"].tolist() == [True]
    assert transfers["blocks"].tolist() == [4]
    assert not host_blocks(driver.rank)["resident"].any()
    assert host_lru(driver.rank).size == 0
    driver.settle()
    assert host_transfers(driver.rank).size == 0
    blocks = host_blocks(driver.rank)
    assert blocks["resident"].all()
    assert sorted(host_lru(driver.rank).tolist()) == blocks["hash"].tolist()
    # What is shown is a copy.
    blocks["pins"] = 7
    driver.rank.check_integrity()


def test_views_of_tiers() -> None:
    bench = Bench("kernel", {"g1_to_g2_gbps": 1.0, "num_g3_blocks": 4, "g2_to_g3_gbps": 1.0}, num_gpu_blocks=2)
    bench.complete(1, range(8))
    bench.reserve(2, range(100, 108))
    rank: SchedulerRank = bench.rank
    transfers, hashes = tier_transfers(rank)
    assert transfers["link"].tolist() == [TierLink.G1_TO_G2]
    assert [len(mine) for mine in hashes] == [2]
    bench.tick(2.0)
    assert tier_transfers(rank)[0]["link"].tolist() == [TierLink.G2_TO_G3]
    assert tier_blocks(rank, Tier.G2)["pins"].tolist() == [1, 1]
    assert tier_lru(rank, Tier.G2).size == 0
    bench.tick(10.0)
    assert sorted(tier_lru(rank, Tier.G3).tolist()) == tier_blocks(rank, Tier.G3)["hash"].tolist()
    plain = SchedulerRank(kvsim.RankIdentity(), ENGINE)
    assert tier_blocks(plain, Tier.G2).size == tier_lru(plain, Tier.G2).size == len(tier_transfers(plain)[1]) == 0
    assert host_blocks(plain).size == host_lru(plain).size == host_transfers(plain).size == 0


# ---------------------------------------------------------------- workers that share G3


def shared_requests() -> list[dict[str, Any]]:
    """Round robin over two workers: the second is asked for what the first computed and pushed out."""
    firsts = (0, 5000, 1000, 0)
    return [
        {"arrival_time_ms": 500.0 * k, "input_token_ids": list(range(first, first + 16)), "output_tokens": 1}
        for k, first in enumerate(firsts)
    ]


def test_a_worker_finds_what_another_brought_to_the_disk() -> None:
    tiers = TIERS.replace(kvbm_tiers=KvbmTiers(num_g2_blocks=8, num_g3_blocks=16))
    runs = [kvsim.replay(shared_requests(), tiers, workers=2, placement="round_robin") for _ in range(2)]
    summary = runs[0].summary
    assert summary["offload_disk_to_host_bytes"] == 4 * BLOCK
    assert summary["offload_lower_hit_tokens"] == 12
    assert runs[0].requests.tobytes() == runs[1].requests.tobytes()
    # Each worker brings four blocks down: only one of them finds room.
    small = TIERS.replace(kvbm_tiers=KvbmTiers(num_g2_blocks=8, num_g3_blocks=4))
    assert (
        kvsim.replay(shared_requests(), small, workers=2, placement="round_robin").summary[
            "offload_disk_evicted_blocks"
        ]
        > 0
    )


def make_fleet(*configs: EngineConfig) -> tuple[Fleet, list[SchedulerRank]]:
    fleet = Fleet(np.zeros(0, layout.REQUEST_RECORD), np.zeros(1, np.int64))
    ranks = [SchedulerRank(kvsim.RankIdentity(number), config) for number, config in enumerate(configs)]
    for rank in ranks:
        fleet.add_worker([rank._state])
    return fleet, ranks


def test_what_a_worker_brought_down_outlives_it() -> None:
    fleet, (first, second) = make_fleet(TIERS, TIERS)
    first._state.tier_put(Tier.G3, [1, 2, 3])
    assert tier_blocks(second, Tier.G3)["hash"].tolist() == [1, 2, 3]
    fleet.remove_worker(0)
    del first
    second._state.tier_put(Tier.G3, [4])
    late = SchedulerRank(kvsim.RankIdentity(2), TIERS)
    fleet.add_worker([late._state])
    assert tier_lru(late, Tier.G3).tolist() == [1, 2, 3, 4]
    for rank in (second, late):
        rank.check_integrity()
        with pytest.raises(SnapshotError, match="shares G3 or G4"):
            rank.fork()


def test_pools_share_only_tiers_that_are_equal() -> None:
    other = TIERS.replace(kvbm_tiers=KvbmTiers(num_g2_blocks=4, num_g3_blocks=8, g1_to_g2_gbps=1.0))
    fleet, (first,) = make_fleet(TIERS)
    ranks = [SchedulerRank(kvsim.RankIdentity(number), config) for number, config in enumerate((other, TIERS))]
    with pytest.raises(ConfigError, match="num_g3_blocks"):
        fleet.add_worker([ranks[0]._state])
    fleet.add_worker([ranks[0]._state], 1)
    fleet.add_worker([ranks[1]._state], 2)
    first._state.tier_put(Tier.G3, [1])
    assert [len(tier_blocks(rank, Tier.G3)) for rank in ranks] == [0, 1]
