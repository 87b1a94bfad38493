"""Round robin, the base of placements, their registry, and requests as placements see them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvsim import layout
from kvsim.errors import ConfigError, WorkloadError
from kvsim.layout import Pool, RequestStatus
from kvsim.placement import (
    PLACEMENTS,
    KvRouter,
    KvRouterConfig,
    PlacedRequest,
    PlacedRequests,
    Placement,
    PoolInfo,
    PromptHashes,
    RoundRobin,
    Route,
    get_placement,
)
from kvsim.workload import ArrivalDriver, session_workload, workload_from_requests
from model.hashing import chain


def block_hashes(tokens, block_size):
    return [sequence for sequence, _ in chain([int(token) for token in tokens], block_size)]


def round_robin(workers, dp_size=1, role=Pool.AGGREGATED):
    made = RoundRobin()
    made.start(PoolInfo(role, dp_size, workers=tuple(workers)))
    return made


def ids(made, count, hint=-1):
    """Rank ids 10 * worker + rank of the next placements."""
    routes = [made.place(PlacedRequest(row, row, 8, dp_rank=hint), 0.0) for row in range(count)]
    return [10 * route.worker + route.dp_rank for route in routes]


def settle(made, change, *workers):
    for worker in workers:
        assert getattr(made, change)(worker, 0.0) == ()
    return made.topology_settled(0.0)


# ---------------------------------------------------------------- round robin


def test_the_aggregated_rule_survives_changes_of_the_workers():  # D9
    made = round_robin([1, 2, 3], dp_size=2)
    assert ids(made, 4) == [10, 20, 30, 11]
    settle(made, "worker_draining", 3)
    assert ids(made, 1) == [21]
    settle(made, "worker_removed", 3)
    settle(made, "worker_ready", 3)
    assert ids(made, 2) == [30, 10]
    settle(made, "worker_ready", 4)
    assert ids(made, 3) == [20, 31, 40]


def test_the_pool_rule_counts_ranks():  # D10
    made = round_robin([10, 11, 12], role=Pool.DECODE)
    assert [one // 10 for one in ids(made, 4)] == [10, 11, 12, 10]
    settle(made, "worker_draining", 12)
    assert [one // 10 for one in ids(made, 1)] == [11]


def test_a_wanted_rank_leaves_the_turn_of_the_ranks_alone():
    made = round_robin([1, 2], dp_size=2)
    assert ids(made, 1) + ids(made, 2, hint=1) + ids(made, 4) == [10, 21, 11, 20, 11, 21, 10]


def test_in_a_pool_a_wanted_rank_counts_only_its_like():
    made = round_robin([1, 2], dp_size=3, role=Pool.PREFILL)
    assert ids(made, 4) == [10, 11, 12, 20]  # four of six
    assert ids(made, 2, hint=2) == [12, 22]  # 4 mod 2, then 1
    assert ids(made, 1) == [12]


def test_placing_many_is_placing_one_by_one():
    hints = [-1, -1, 1, -1, 0, -1, -1]
    many, one = round_robin(range(3), dp_size=2), round_robin(range(3), dp_size=2)
    expected = [one.next_rank(hint) for hint in hints]
    assert many.place_all(np.array(hints, np.int32)).tolist() == [worker * 2 + rank for worker, rank in expected]
    assert many.next_rank() == one.next_rank()


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("dp_size", [1, 3])
@pytest.mark.parametrize("before", range(4))
def test_placing_many_without_wishes_is_placing_one_by_one(workers, dp_size, before):
    many, one = (round_robin(range(workers), dp_size=dp_size) for _ in range(2))
    for count in (before, 1, 2 * workers + 1, 0, 4):
        expected = [one.next_rank() for _ in range(count)]
        placed = many.place_all(np.full(count, -1, np.int32)).tolist()
        assert placed == [worker * dp_size + rank for worker, rank in expected]
    assert many.next_rank(0) == one.next_rank(0)
    assert [many.next_rank() for _ in range(7)] == [one.next_rank() for _ in range(7)]


def test_a_route_of_round_robin_claims_to_know_nothing():
    route = round_robin([0]).place(PlacedRequest(0, 0, 8), 0.0)
    assert route[:5] == (0, 0, 0, -1, -1)
    assert math.isnan(route.cost)


# ---------------------------------------------------------------- base and registry


def test_the_hooks_of_the_base_do_nothing():
    made = Placement()
    made.start(PoolInfo())
    made.observe(0, 0, np.zeros(0, layout.EVENT), np.zeros(0, layout.EVENT_BLOCK))
    for hook in (
        "prefill_completed",
        "request_terminal",
        "cancel",
        "worker_ready",
        "worker_draining",
        "worker_removed",
    ):
        assert getattr(made, hook)(0, 0.0) == ()
    assert (made.topology_settled(0.0), made.pending_count()) == ((), 0)
    assert (made.wants_kv_events, made.wants_first_tokens, made.wants_terminals) == (False, False, False)
    with pytest.raises(NotImplementedError, match=r"Placement must implement place\(request, now_ms\)"):
        made.place(PlacedRequest(0, 0, 8), 0.0)


class First(Placement):
    def place(self, request, now_ms):
        return Route(0, 0)


def test_placements_are_found_by_name_or_given():
    assert list(PLACEMENTS) == ["round_robin", "kv_router"]
    assert type(get_placement()) is type(get_placement("round_robin")) is RoundRobin
    mine = First()
    assert get_placement(mine) is mine
    assert type(get_placement(First)) is First
    assert type(get_placement(lambda: KvRouter({"router_temperature": 1.0}))) is KvRouter


def test_a_named_router_is_derived_for_its_pool():
    config = {"overlap_score_credit": 2.0, "router_prefill_load_model": "aic"}
    found = {role: get_placement("kv_router", config, role).config for role in Pool}
    assert found[Pool.AGGREGATED] == KvRouterConfig(**config)
    assert found[Pool.PREFILL] == KvRouterConfig(**config, router_track_active_blocks=False)
    assert found[Pool.DECODE] == KvRouterConfig(
        overlap_score_credit=0.0, router_assume_kv_reuse=False, router_track_prefill_tokens=False
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fastest",), "placement: must be one of round_robin, kv_router, or a Placement, got 'fastest'"),
        ((3,), "placement: must be one of round_robin, kv_router, or a Placement, got 3"),
        ((dict,), "placement: must be one of round_robin, kv_router, or a Placement, got <class 'dict'>"),
        (("round_robin", {}), "router_config: needs placement kv_router, got {}"),
        ((First, {}), "router_config: needs placement kv_router by name, got <class"),
        (("kv_router", {"temperature": 1}), r"router_config\.temperature: unknown field"),
    ],
)
def test_what_is_no_placement_is_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        get_placement(*arguments)


# ---------------------------------------------------------------- requests


def test_a_placed_request_is_the_row_of_its_workload():
    work = workload_from_requests(
        [
            {"input_tokens": 9, "output_tokens": 5, "dp_rank": 1, "priority": 0.5, "strict_priority": 3},
            {"input_token_ids": list(range(8)), "session_id": "s", "turn_index": 4, "dp_rank": 1, "prefill_dp_rank": 0},
        ]
    )
    made = PlacedRequests(ArrivalDriver(work), 4)
    first, second = made.make(0, 1.5), made.make(1, 2.0, Pool.PREFILL)
    fields = ("row", "request_id", "input_tokens", "max_output_tokens", "dp_rank", "session", "turn", "arrival_ms")
    fields += ("priority", "strict_priority")
    assert [getattr(first, name) for name in fields] == [0, 1, 9, 5, 1, -1, -1, 1.5, 0.5, 3]
    assert [getattr(second, name) for name in fields] == [1, 2, 8, 1, 0, 0, 4, 2.0, 0.0, 0]
    assert made.make(0, 0.0, Pool.PREFILL).dp_rank == made.make(1, 0.0, Pool.DECODE).dp_rank == 1
    assert second.block_hashes.tolist() == block_hashes(list(range(8)), 4)
    assert second.block_hashes is second.block_hashes
    assert repr(second) == "PlacedRequest(row=1, input_tokens=8, dp_rank=0)"


def test_prompts_of_made_up_content_share_nothing():
    work = workload_from_requests([{"input_tokens": 16}, {"input_tokens": 16}])
    hashes = PromptHashes(ArrivalDriver(work), 4)
    first, second = hashes(0).tolist(), hashes(1).tolist()
    assert first == block_hashes(list(range(16)), 4)
    assert len(first) == len(second) == 4
    assert not set(first) & set(second)


def test_a_growing_prompt_is_hashed_as_it_stands():
    work = session_workload(sessions=1, turns=2, input_tokens=10, output_tokens=4, block_size=4)
    assert work.cumulative
    driver = ArrivalDriver(work)
    hashes = PromptHashes(driver, 4)
    driver.release(0.0)
    before = hashes(0).tolist()
    driver.resolve(0, 5.0, RequestStatus.COMPLETED, 3)
    tokens = [*work.prompt_token_ids(0), *work.planned_token_ids(0)[:3], *work.prompt_token_ids(1)]
    assert hashes(1).tolist() == block_hashes(tokens, 4)
    assert hashes(1).tolist()[: len(before)] == before
    assert PlacedRequests(driver, 4).make(1, 5.0).input_tokens == len(tokens)


def test_priorities_must_be_numbers():
    for key, value, message in (
        ("priority", "high", r"requests\[0\]\.priority: must be a number, got 'high'"),
        ("priority", math.inf, r"requests\[0\]\.priority: must be finite, got inf"),
        ("strict_priority", -1, r"requests\[0\]\.strict_priority: must lie in 0 <= strict_priority"),
        ("strict_priority", 0.5, r"requests\[0\]\.strict_priority: must be an int"),
    ):
        with pytest.raises(WorkloadError, match=message):
            workload_from_requests([{"input_tokens": 4, key: value}])
