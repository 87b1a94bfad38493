"""The KV router: kernel and placement against the twin, and the scenarios of the acceptance list."""

from __future__ import annotations

import collections
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim import layout
from kvsim._core.router import RouterState
from kvsim.errors import ConfigError, TimingError
from kvsim.layout import Pool
from kvsim.placement import KvRouter, KvRouterConfig, PlacedRequest, PoolInfo, decode_router, prefill_router
from model.router import Asked, RouterModel

BLOCK = 4


# ---------------------------------------------------------------- building blocks


def hashes_of(*values):
    return np.array(values, np.uint64)


def events_of(*changes, at_ms=0.0):
    """EVENT and EVENT_BLOCK rows of (is stored, hashes), or (is stored, hashes, at_ms)."""
    events, blocks = np.zeros(len(changes), layout.EVENT), []
    for row, (stored, values, *at) in zip(events, changes, strict=True):
        row["kind"], row["first"], row["count"] = (0 if stored else 1), len(blocks), len(values)
        row["at_ms"] = at[0] if at else at_ms
        blocks += values
    table = np.zeros(len(blocks), layout.EVENT_BLOCK)
    table["block_hash"] = hashes_of(*blocks)
    return events, table


def request(row, length, *blocks, **more):
    return PlacedRequest(row, row + 1, length, hashes=hashes_of(*blocks), **more)


def router(workers=(0, 1), dp_size=1, budget=None, role=Pool.AGGREGATED, seed=0, timing=None, **options):
    made = KvRouter(options)
    made.start(PoolInfo(role, dp_size, BLOCK, budget, seed, tuple(workers), timing))
    return made


class PrefillTime:
    """A timing model of so many ms per token that is not cached."""

    def __init__(self, ms_per_token):
        self.ms_per_token = ms_per_token

    def predict_prefill_ms(self, batch_size, mean_isl, mean_prefix):
        assert batch_size == 1
        return self.ms_per_token * (mean_isl - mean_prefix)


# ---------------------------------------------------------------- the kernel


class Index:
    """The tables of `RouterState` as sets and counters."""

    def __init__(self):
        self.present = collections.defaultdict(set)
        self.tracked = collections.defaultdict(collections.Counter)

    @property
    def num_present(self):
        return len(set().union(*self.present.values()))

    @property
    def num_tracked(self):
        return len(set().union(*(+tracked for tracked in self.tracked.values())))

    @property
    def num_shared(self):
        return sum(count > 1 for tracked in self.tracked.values() for count in tracked.values())


def leading(prompt, known):
    return next((i for i, block in enumerate(prompt) if block not in known), len(prompt))


#: Block hashes: neighbours in the table, its ends, and ordinary ones.
KEYS = [0, 1, 2, 3, 2**64 - 1, 2**63, 0x9E3779B97F4A7C15, *(k << 54 for k in range(1, 12))]


@st.composite
def chains(draw):
    """Prompts that share prefixes: paths in a tree whose nodes have hashes of their own."""
    names = {}
    pool = iter(draw(st.permutations([*KEYS, *range(1000, 1100)])))
    prompts = draw(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=6))
    made = []
    for prompt in prompts:
        path = [tuple(prompt[: i + 1]) for i in range(len(prompt))]
        made.append([names[node] if node in names else names.setdefault(node, next(pool)) for node in path])
    return made


@settings(max_examples=200, deadline=None)
@given(st.data(), chains(), st.sampled_from([1, 3, 70]))
def test_the_tables_equal_sets_and_counters(data, prompts, num_ranks):
    state, index = RouterState(BLOCK), Index()
    ranks = [state.add_rank(worker, 0) for worker in range(num_ranks)]
    used = data.draw(st.lists(st.sampled_from(ranks), min_size=1, max_size=3, unique=True))
    live = []
    prompt, rank = st.sampled_from(prompts), st.sampled_from(used)
    for _ in range(data.draw(st.integers(0, 30))):
        what = data.draw(st.sampled_from(["store", "remove", "begin", "end", "forget"]))
        if what in ("store", "remove"):
            at, blocks = data.draw(rank), data.draw(prompt)
            blocks = blocks[data.draw(st.integers(0, len(blocks))) :] if what == "remove" else blocks
            state.apply(at, *events_of((what == "store", blocks)))
            index.present[at] = index.present[at] | set(blocks) if what == "store" else index.present[at] - set(blocks)
        elif what == "begin":
            at, blocks = data.draw(rank), data.draw(prompt)
            state.begin(at, hashes_of(*blocks), len(blocks), 3)
            index.tracked[at].update(blocks)
            live.append((at, blocks))
        elif what == "end" and live:
            at, blocks = live.pop(data.draw(st.integers(0, len(live) - 1)))
            state.end(at, hashes_of(*blocks), len(blocks), 3)
            index.tracked[at].subtract(blocks)
        elif what == "forget":
            at = data.draw(rank)
            worker = int(state.loads[at]["worker"])
            state.remove_rank(at)
            index.present.pop(at, None)
            index.tracked.pop(at, None)
            live = [one for one in live if one[0] != at]
            # Its number is the only one that is free.
            assert state.add_rank(worker + 1000, 0) == at
        for name in ("num_present", "num_tracked", "num_shared"):
            assert getattr(state, name) == getattr(index, name), name
        for at in used:
            assert state.loads[at]["blocks"] == len(+index.tracked[at])
            assert state.loads[at]["requests"] == sum(one[0] == at for one in live)
            assert state.loads[at]["prefill_tokens"] == 3 * sum(one[0] == at for one in live)
        for blocks in prompts:
            state.match(hashes_of(*blocks))
            for at in ranks:
                assert state.overlap[at] == leading(blocks, index.present[at]), (at, blocks)
                assert state.held[at] == leading(blocks, +index.tracked[at]), (at, blocks)


def test_the_tables_grow_and_empty_again():
    state = RouterState(BLOCK)
    ranks = [state.add_rank(worker, 0) for worker in range(3)]
    blocks = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    table = np.zeros(len(blocks), layout.EVENT_BLOCK)
    table["block_hash"] = blocks
    event = np.zeros(1, layout.EVENT)
    event["count"] = len(blocks)
    for rank in ranks:
        state.apply(rank, event, table)
        for _ in range(2):
            state.begin(rank, blocks, len(blocks), 0)
    assert (state.num_present, state.num_tracked, state.num_shared) == (20_000, 20_000, 60_000)
    state.match(blocks)
    assert state.overlap[:3].tolist() == state.held[:3].tolist() == [20_000] * 3
    event["kind"] = 1
    for rank in ranks[:2]:
        state.apply(rank, event, table)
        for _ in range(2):
            state.end(rank, blocks, len(blocks), 0)
    state.remove_rank(ranks[2])
    assert (state.num_present, state.num_tracked, state.num_shared) == (0, 0, 0)
    assert state.loads["blocks"].tolist() == [0] * len(state.loads)


def test_an_event_that_points_outside_its_blocks_changes_nothing():
    state = RouterState(BLOCK)
    rank = state.add_rank(0, 0)
    events, blocks = events_of((True, [1, 2]), (True, [3]))
    events[1]["count"] = 2
    with pytest.raises(ValueError, match=r"events\[1\]: its blocks must lie within the 3 rows"):
        state.apply(rank, events, blocks)
    assert state.num_present == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda state: RouterState(0), "block_size: must be >= 1, got 0"),
        (lambda state: RouterState(4, tracking=3), "tracking: must be 0, 1 or 2, got 3"),
        (lambda state: state.apply(1, *events_of()), "there is no rank 1"),
        (lambda state: state.remove_rank(0), "0 is a candidate"),
        (lambda state: state.set_candidates([0, 5]), "there is no rank 5"),
        (lambda state: state.match([1]), "hashes: must be an array of uint64"),
        (lambda state: state.begin(0, None, 1, 1), "hashes: must be an array of uint64"),
        (lambda state: state.choose(4, np.zeros(0, np.int32)), "overlap: must have 1 entries, got 0"),
        (lambda state: state.match(np.zeros(4, np.uint64)[::2]), "hashes: must be one-dimensional and contiguous"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    state = RouterState(BLOCK)
    state.set_candidates([state.add_rank(0, 0)])
    with pytest.raises(ValueError, match=message):
        call(state)


# ---------------------------------------------------------------- the router against its twin

WHOLE = st.integers(0, 3).map(float)
OPTIONS = st.fixed_dictionaries(
    {
        "overlap_score_credit": WHOLE,
        "overlap_score_credit_decay": st.sampled_from([0.0, 0.0, 1.5]),
        "overlap_score_weight": st.sampled_from([None, None, 0.0, 2.0]),
        "prefill_load_scale": WHOLE,
        "decode_active_request_weight": st.sampled_from([0.0, 0.0, 1.0, 2.5]),
        "router_track_active_blocks": st.booleans(),
        "router_assume_kv_reuse": st.booleans(),
        "router_track_prefill_tokens": st.booleans(),
        "router_queue_threshold": st.sampled_from([None, 0.0, 0.5, 1.0]),
        "router_queue_policy": st.sampled_from(["fcfs", "lcfs", "wspt"]),
        "kv_event_lag_ms": st.sampled_from([0.0, 0.0, 2.0]),
    }
)


@settings(max_examples=200, deadline=None)
@given(st.data(), OPTIONS, chains(), st.integers(1, 2), st.sampled_from([None, 0.0, 0.25]))
def test_the_router_equals_its_twin(data, options, prompts, dp_size, ms_per_token):
    model = None if ms_per_token is None else PrefillTime(ms_per_token)
    config = KvRouterConfig(**options, router_prefill_load_model=model or "none")
    made = KvRouter(config)
    made.start(PoolInfo(Pool.AGGREGATED, dp_size, BLOCK, 32, 0, (0, 1)))
    twin = RouterModel(
        config, BLOCK, 32, dp_size, model and (lambda length, cached: model.predict_prefill_ms(1, length, cached))
    )
    twin.ready(0)
    twin.ready(1)
    now, row, next_worker, draining = 0.0, 0, 2, []

    def same(released, expected):
        assert [(one.row, route[:2]) for one, route in released] == [(at, placed.rank) for at, placed in expected]
        for (_, route), (_, placed) in zip(released, expected, strict=True):
            check(route, placed)

    def check(route, placed):
        assert (route.worker, route.dp_rank) == placed.rank
        assert (route.overlap_blocks, route.best_overlap_blocks) == (placed.overlap, placed.best)
        assert route.cost == placed.cost

    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0]))
        what = data.draw(
            st.sampled_from(["place"] * 4 + ["event"] * 3 + ["first", "end", "end", "cancel", "up", "down", "gone"])
        )
        if what == "place":
            blocks = data.draw(st.sampled_from(prompts))
            length = len(blocks) * BLOCK + data.draw(st.integers(0 if blocks else 1, BLOCK - 1))
            hint = data.draw(st.sampled_from([-1, -1, *range(dp_size)]))
            priority = data.draw(st.sampled_from([0.0, 0.0, 0.001, 0.003, -5.0]))
            strict = data.draw(st.sampled_from([0, 0, 0, 1]))
            asked = request(row, length, *blocks, dp_rank=hint, priority=priority, strict_priority=strict)
            route = made.place(asked, now)
            placed = twin.place(Asked(row, length, blocks, hint, priority, strict), now)
            assert (route is None) == (placed is None)
            if route is not None:
                check(route, placed)
                assert route.overlap_tokens == route.overlap_blocks * BLOCK
            row += 1
        elif what == "event" and twin.cached:
            rank = data.draw(st.sampled_from(sorted(twin.cached)))
            stored, blocks = data.draw(st.booleans()), data.draw(st.sampled_from(prompts))
            blocks = blocks if stored else blocks[data.draw(st.integers(0, len(blocks))) :]
            made.observe(*rank, *events_of((stored, blocks), at_ms=now))
            twin.event(rank, now, stored, blocks)
        elif what == "first" and row:
            at = data.draw(st.integers(0, row - 1))
            same(made.prefill_completed(at, now), twin.first_token(at, now))
        elif what == "end" and row:
            at = data.draw(st.integers(0, row - 1))
            same(made.request_terminal(at, now), twin.terminal(at, now))
        elif what == "cancel" and row:
            at = data.draw(st.integers(0, row - 1))
            same(made.cancel(at, now), twin.cancel(at, now))
        elif what == "up":
            assert made.worker_ready(next_worker, now) == ()
            twin.ready(next_worker)
            next_worker += 1
            same(made.topology_settled(now), twin.drain(now))
        elif what == "down" and twin.active:
            worker = data.draw(st.sampled_from(twin.active))
            assert made.worker_draining(worker, now) == ()
            twin.draining(worker)
            draining.append(worker)
            same(made.topology_settled(now), twin.drain(now))
        elif what == "gone" and draining:
            worker = draining.pop(data.draw(st.integers(0, len(draining) - 1)))
            assert made.worker_removed(worker, now) == ()
            twin.removed(worker)
        assert made.pending_count() == len(twin.queue)
        for rank in twin.cached:
            assert made.active_prefill_tokens(*rank, now) == twin.prompt_load(rank, now)


# ---------------------------------------------------------------- scenarios


def test_a_prompt_under_a_model_decays_over_its_predicted_duration():  # D12
    made = router(workers=[0], router_prefill_load_model=PrefillTime(10_000 / 64))
    assert made.place(request(0, 64), 0.0).worker == 0
    assert [made.active_prefill_tokens(0, 0, at) for at in (0.0, 5_000.0, 10_000.0, 20_000.0)] == [64, 32, 0, 0]
    made.prefill_completed(0, 20_000.0)
    made.request_terminal(0, 20_000.0)
    assert made.active_prefill_tokens(0, 0, 20_000.0) == 0


def test_the_model_of_the_engines_can_be_asked():
    made = router(workers=[0], timing=PrefillTime(1.0), router_prefill_load_model="aic")
    made.place(request(0, 64), 0.0)
    assert made.active_prefill_tokens(0, 0, 16.0) == 48
    with pytest.raises(ConfigError, match=r"router_config\.router_prefill_load_model: aic needs a timing model"):
        router(router_prefill_load_model="aic")


@pytest.mark.parametrize("answer", [math.nan, -1.0, math.inf, None, True])
def test_a_model_that_returns_no_duration_is_an_error(answer):
    model = PrefillTime(0)
    model.predict_prefill_ms = lambda *_: answer
    with pytest.raises(TimingError, match="predict_prefill_ms must return finite milliseconds >= 0"):
        router(router_prefill_load_model=model).place(request(0, 8), 0.0)


def test_a_second_prompt_waits_above_the_threshold():  # D13
    made = router(workers=[0], budget=64, router_queue_threshold=0.5)
    assert made.place(request(0, 64), 0.0).worker == 0
    second = request(1, 64)
    assert made.place(second, 0.0) is None
    assert made.pending_count() == 1
    ((released, route),) = made.prefill_completed(0, 8.0)
    assert (released, route.worker, made.pending_count()) == (second, 0, 0)


def test_a_request_is_busy_only_above_the_threshold():
    made = router(workers=[0], budget=64, router_queue_threshold=0.5)
    assert made.place(request(0, 32), 0.0) is not None
    assert made.place(request(1, 1), 0.0) is not None
    assert made.place(request(2, 1), 0.0) is None


def test_nobody_overtakes_a_backlog():
    # A load that decays lets a rank be idle before the event at which the queue is looked at.
    made = router(workers=[0], budget=64, router_queue_threshold=0.5, router_prefill_load_model=PrefillTime(1.0))
    assert made.place(request(0, 64), 0.0) is not None
    assert made.place(request(1, 64), 0.0) is None
    assert made.active_prefill_tokens(0, 0, 40.0) == 24
    assert made.place(request(2, 4), 40.0) is None
    assert [one.row for one, _ in made.prefill_completed(0, 41.0)] == [1]
    assert [one.row for one, _ in made.request_terminal(0, 80.0)] == [2]


def test_without_a_token_budget_nobody_is_busy():
    made = router(workers=[0], router_queue_threshold=0.0)
    assert all(made.place(request(row, 10_000), 0.0) for row in range(3))


@pytest.mark.parametrize(
    ("policy", "order"),
    # row, arrival, priority, strict priority, length: see below
    [("fcfs", [5, 4, 2, 1, 3]), ("lcfs", [5, 4, 2, 3, 1]), ("wspt", [5, 4, 3, 2, 1])],
)
def test_the_order_of_the_queue(policy, order):
    made = router(workers=[0], budget=64, router_queue_threshold=0.0, router_queue_policy=policy)
    made.place(request(0, 8), 0.0)
    waiting = [
        request(1, 40),
        request(2, 40, priority=0.5),
        request(3, 20, priority=-1.0),
        request(4, 40, priority=2.0),
        request(5, 60, strict_priority=1),
    ]
    for at_ms, one in enumerate(waiting, 1):
        assert made.place(one, float(at_ms)) is None
    left, row = [], 0
    for _ in waiting:
        ((one, _),) = made.request_terminal(row, 10.0)
        row = one.row
        left.append(row)
    assert left == order


def test_equal_weights_leave_the_queue_in_order_of_arrival():
    made = router(workers=[0], budget=64, router_queue_threshold=0.0, router_queue_policy="wspt")
    made.place(request(9, 8), 0.0)
    for row in range(3):
        made.place(request(row, 16), 1.0)
    assert [one.row for row in (9, 0, 1) for one, _ in made.prefill_completed(row, 2.0)] == [0, 1, 2]


def test_overlap_is_that_of_the_arrival_also_after_a_wait():
    made = router(workers=[0], budget=16, router_queue_threshold=0.0)
    made.observe(0, 0, *events_of((True, [1, 2])))
    made.place(request(0, 16), 0.0)
    assert made.place(request(1, 12, 1, 2, 3), 1.0) is None
    made.observe(0, 0, *events_of((True, [3]), (False, [2])))
    made.worker_ready(1, 2.0)
    made.observe(1, 0, *events_of((True, [1, 2, 3])))
    ((_, route),) = made.topology_settled(2.0)
    # A rank that came meanwhile counts as empty, but has nothing to do.
    assert route == (1, 0, 0, 0, 2, 3 + 3)
    assert made.place(request(2, 12, 1, 2, 3), 3.0) is None
    ((_, route),) = made.prefill_completed(1, 3.0)
    assert (route.worker, route.overlap_blocks, route.best_overlap_blocks) == (1, 3, 3)


def test_a_new_rank_does_not_inherit_the_overlap_of_one_whose_number_it_has():
    made = router(workers=[0, 1], budget=16, router_queue_threshold=0.0)
    made.observe(1, 0, *events_of((True, [1, 2, 3])))
    for row in range(2):
        assert made.place(request(row, 16), 0.0) is not None
    assert made.place(request(2, 12, 1, 2, 3), 1.0) is None
    made.worker_draining(1, 2.0)
    made.worker_removed(1, 2.0)
    made.worker_ready(2, 2.0)
    ((_, route),) = made.topology_settled(2.0)
    assert (route.worker, route.overlap_blocks, route.best_overlap_blocks) == (2, 0, 3)


def test_events_become_visible_after_the_lag():
    made = router(workers=[0, 1], kv_event_lag_ms=20.0)
    made.observe(1, 0, *events_of((True, [1], 5.0), (True, [2], 10.0), (False, [1], 30.0)))
    seen = []
    for row, now in enumerate((24.0, 25.0, 30.0, 49.0, 50.0)):
        seen.append(made.place(request(row, 8, 1, 2), now).best_overlap_blocks)
        made.request_terminal(row, now)
    assert seen == [0, 1, 2, 2, 0]


def test_late_events_of_ranks_do_not_hold_each_other_up():
    made = router(workers=[0, 1], kv_event_lag_ms=10.0)
    made.observe(0, 0, *events_of((True, [1], 0.0), (True, [2], 90.0)))
    made.observe(1, 0, *events_of((True, [1, 2], 5.0)))
    assert made.place(request(0, 8, 1, 2), 15.0)[:4] == (1, 0, 8, 2)


def test_the_arrays_of_an_event_may_be_reused_during_the_lag():
    made = router(workers=[0], kv_event_lag_ms=1.0)
    events, blocks = events_of((True, [1]))
    made.observe(0, 0, events, blocks)
    blocks["block_hash"] = 7
    assert made.place(request(0, 4, 1), 1.0).overlap_blocks == 1


def test_requests_wait_for_a_worker_when_there_is_none():
    made = router(workers=[0])
    made.worker_draining(0, 0.0)
    assert made.topology_settled(0.0) == []
    assert made.place(request(0, 8), 1.0) is None
    assert made.worker_ready(1, 2.0) == ()
    ((one, route),) = made.topology_settled(2.0)
    assert (one.row, route[:2]) == (0, (1, 0))


def test_a_draining_rank_keeps_its_load_until_its_requests_end():
    made = router(workers=[0, 1])
    assert made.place(request(0, 8), 0.0).worker == 0
    made.worker_draining(0, 1.0)
    assert made.active_prefill_tokens(0, 0, 1.0) == 8
    assert [made.place(request(row, 8), 1.0).worker for row in (1, 2)] == [1, 1]
    made.request_terminal(0, 2.0)
    assert made.active_prefill_tokens(0, 0, 2.0) == 0
    made.worker_removed(0, 2.0)
    made.observe(0, 0, *events_of((True, [1])))
    assert made.place(request(3, 4, 1), 3.0)[:4] == (1, 0, 0, 0)


def test_a_request_that_asks_for_a_rank_gets_it():
    made = router(workers=[0, 1], dp_size=2)
    assert [made.place(request(row, 8, dp_rank=1), 0.0)[:2] for row in range(3)] == [(0, 1), (1, 1), (0, 1)]
    assert made.place(request(3, 8), 0.0)[:2] == (0, 0)


def test_the_reported_overlap_is_at_most_the_prompt():
    made = router(workers=[0])
    made.observe(0, 0, *events_of((True, [1, 2])))
    assert made.place(request(0, 8, 1, 2), 0.0).overlap_tokens == 8


def test_a_prefill_pool_counts_no_blocks_and_a_decode_pool_no_prompts():
    config = KvRouterConfig(overlap_score_credit=2.0, decode_active_request_weight=3.0, router_queue_threshold=0.0)
    pool = PoolInfo(Pool.PREFILL, 1, BLOCK, 1_000, 0, (0, 1))
    prefill = KvRouter(prefill_router(config))
    prefill.start(pool)
    assert (prefill.wants_kv_events, prefill.wants_first_tokens, prefill.wants_terminals) == (True, True, True)
    assert prefill.place(request(0, 18, 1, 2, 3, 4), 0.0).cost == 4.5
    decode = KvRouter(decode_router(config))
    decode.start(PoolInfo(Pool.DECODE, 1, BLOCK, 1_000, 0, (0, 1)))
    assert (decode.wants_kv_events, decode.wants_first_tokens, decode.wants_terminals) == (False, False, True)
    # Never looked at, never busy; equal prompts share nothing.
    lazy = [PlacedRequest(row, row, 18, hashes=lambda: pytest.fail("nobody needs them")) for row in range(3)]
    assert [decode.place(one, 0.0)[-1] for one in lazy] == [4, 4, 4 + 4 + 3]


def test_a_cancelled_request_leaves_the_queue_or_its_rank():
    made = router(workers=[0], budget=16, router_queue_threshold=0.0)
    made.place(request(0, 8), 0.0)
    for row in (1, 2):
        assert made.place(request(row, 8), 0.0) is None
    assert made.cancel(1, 1.0) == ()
    assert [one.row for one, _ in made.cancel(0, 1.0)] == [2]
    assert made.cancel(77, 1.0) == ()
    assert (made.pending_count(), made.active_prefill_tokens(0, 0, 1.0)) == (0, 8)


# ---------------------------------------------------------------- draws


def picks(count, **options):
    """Workers of `count` independent requests, the first of which is cheapest on worker 1."""
    made = router(workers=[0, 1, 2], **options)
    made.observe(1, 0, *events_of((True, [1, 2])))
    made.observe(2, 0, *events_of((True, [1])))
    workers = []
    for row in range(count):
        workers.append(made.place(request(row, 16, 1, 2, 3, 4), 0.0).worker)
        made.request_terminal(row, 0.0)
    return workers


def test_temperature_draws_by_softmax_of_scaled_costs():
    count, temperature = 4_000, 0.5
    weights = np.exp(-np.array([8.0, 6.0, 7.0]) / (2.0 * temperature))
    expected = count * weights / weights.sum()
    found = np.bincount(picks(count, router_temperature=temperature, seed=3), minlength=3)
    # Chi square with two degrees of freedom exceeds 13.8 once in a thousand.
    assert ((found - expected) ** 2 / expected).sum() < 13.8


def test_draws_follow_the_documented_generator():
    draws = np.random.Generator(np.random.PCG64([7, int(Pool.AGGREGATED)]))
    below = np.cumsum(np.exp((6.0 - np.array([8.0, 6.0, 7.0])) / 2.0))
    expected = [int(np.searchsorted(below, draws.random() * below[-1], side="right")) for _ in range(50)]
    assert picks(50, router_temperature=1.0, seed=7) == expected
    assert picks(50, router_temperature=1.0, seed=8) != expected


def test_a_tiny_temperature_is_the_best_rank_and_equal_costs_are_drawn_evenly():
    assert set(picks(100, router_temperature=1e-9)) == {1}
    made = router(workers=[0, 1, 2, 3], router_temperature=0.1)
    found = collections.Counter()
    for row in range(600):
        found[made.place(request(row, 8), 0.0).worker] += 1
        made.request_terminal(row, 0.0)
    assert sorted(found) == [0, 1, 2, 3]
    assert min(found.values()) > 100


def test_ties_go_to_the_lowest_rank_or_are_drawn():
    assert set(picks(30)) == {1}
    assert set(picks(30, router_tie_break="random")) == {1}
    lowest, drawn = router(workers=[2, 0, 1]), router(workers=[2, 0, 1], router_tie_break="random")
    for made, expected in ((lowest, {0}), (drawn, {0, 1, 2})):
        seen = set()
        for row in range(60):
            seen.add(made.place(request(row, 8), 0.0).worker)
            made.request_terminal(row, 0.0)
        assert seen == expected


def test_draws_respect_the_rank_that_is_asked_for():
    made = router(workers=[0, 1], dp_size=2, router_temperature=5.0)
    assert {made.place(request(row, 8, dp_rank=1), 0.0).dp_rank for row in range(40)} == {1}


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap_score_credit": -1.0}, "router_config.overlap_score_credit: must be finite and >= 0, got -1.0"),
        ({"overlap_score_credit": True}, "router_config.overlap_score_credit: expected a number, got True"),
        ({"prefill_load_scale": math.nan}, "router_config.prefill_load_scale: must be finite and >= 0, got nan"),
        ({"router_temperature": "hot"}, "router_config.router_temperature: expected a number, got 'hot'"),
        ({"router_queue_threshold": -0.1}, "router_config.router_queue_threshold: must be finite and >= 0"),
        ({"kv_event_lag_ms": math.inf}, "router_config.kv_event_lag_ms: must be finite and >= 0, got inf"),
        ({"router_queue_policy": "lifo"}, "router_config.router_queue_policy: must be one of fcfs, lcfs, wspt, got"),
        ({"router_tie_break": None}, "router_config.router_tie_break: must be one of lowest, random, got None"),
        ({"router_track_active_blocks": 1}, "router_config.router_track_active_blocks: expected true or false, got 1"),
        ({"router_prefill_load_model": "x"}, "router_config.router_prefill_load_model: must be none, aic or an object"),
        ({"overlap_weight": 1.0}, "router_config.overlap_weight: unknown field"),
        (3, "router_config: expected None, a mapping or a KvRouterConfig, got 3"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        KvRouterConfig.parse(options)


def test_the_older_weight_replaces_the_scale_and_zero_kills_the_credit():
    config = KvRouterConfig(overlap_score_weight=2.0, prefill_load_scale=9.0, overlap_score_credit=3.0)
    assert (config.prefill_scale, config.credit) == (2.0, 3.0)
    config = KvRouterConfig(overlap_score_weight=0.0)
    assert (config.prefill_scale, config.credit) == (0.0, 0.0)


def test_options_without_effect_are_accepted_with_one_warning():
    options = {"use_kv_events": False, "host_cache_hit_weight": 1.0, "router_ttl_secs": 120.0}
    with pytest.warns(UserWarning, match="without effect in a simulation: host_cache_hit_weight, use_kv_events$"):
        KvRouter(options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KvRouter({"router_ttl_secs": 120.0})
