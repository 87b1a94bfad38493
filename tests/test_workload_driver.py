"""When requests are released: open loop, closed loop, sessions, growing prompts, tokenizers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim._core import content
from kvsim.errors import ConfigError, WorkloadError
from kvsim.layout import RequestStatus
from kvsim.workload import ArrivalDriver, TokenizationPool, read_mooncake, session_workload, workload_from_requests
from test_workload_mooncake import row, write

DONE, REJECTED, FAILED, CANCELLED = (
    RequestStatus.COMPLETED,
    RequestStatus.REJECTED,
    RequestStatus.FAILED,
    RequestStatus.CANCELLED,
)


@pytest.fixture
def trace(tmp_path):
    def make(rows, **options):
        return read_mooncake(write(tmp_path / "t.jsonl", rows), block_size=16, **options)

    return make


def listed(*arrivals):
    return workload_from_requests([{"id": i, "arrival_time_ms": t, "input_tokens": 4} for i, t in enumerate(arrivals)])


# ---------------------------------------------------------------- open loop


def test_speedup_divides_the_arrivals_of_a_trace_from_zero(trace):
    driver = ArrivalDriver(trace([row(timestamp=100), row(timestamp=200)]), speedup=10)  # D7
    assert driver.is_static
    assert driver.static_arrivals().tolist() == [0, 10]


def test_epoch_timestamps_start_at_zero(trace):
    work = trace([row(timestamp=1787267980083), row(timestamp=1787267980183)])
    assert ArrivalDriver(work).static_arrivals().tolist() == [0, 100]


def test_missing_first_timestamp_is_released_first(trace):
    assert ArrivalDriver(trace([row(timestamp=...), row(timestamp=100)])).static_arrivals().tolist() == [0, 100]


def test_unsorted_traces_are_released_by_time_with_ties_in_row_order(trace):
    driver = ArrivalDriver(trace([row(timestamp=t) for t in (500, 0, 500, 0)]))
    assert driver.static_order().tolist() == [1, 3, 0, 2]
    assert driver.static_arrivals().tolist() == [0, 0, 500, 500]


def test_explicit_lists_keep_their_times():
    driver = ArrivalDriver(listed(50, 10, 10))
    assert driver.static_arrivals().tolist() == [10, 10, 50]
    assert ArrivalDriver(listed(50, 10), speedup=2).static_arrivals().tolist() == [5, 25]


def test_static_and_stepwise_release_agree(trace):
    work = trace([row(timestamp=t) for t in (7, 3, 3, 40, 0, 3)])
    driver, seen = ArrivalDriver(work, speedup=3.0), []
    while (now := driver.next_ready_ms()) is not None:
        seen += driver.release(now)
    assert [r for r, _ in seen] == driver.static_order().tolist()
    assert [t for _, t in seen] == driver.static_arrivals().tolist()
    assert not driver.drained
    for r, _ in seen:
        driver.resolve(r, 99.0, DONE)
    assert driver.drained


def test_late_release_keeps_the_scheduled_stamp():
    assert ArrivalDriver(listed(1, 2, 30)).release(25.0) == [(0, 1.0), (1, 2.0)]


def test_follow_up_turn_is_ready_its_think_time_after_the_end(trace):
    rows = [row(session_id="s", timestamp=50), row(session_id="s", timestamp=..., delay=30), row(timestamp=50)]
    driver = ArrivalDriver(trace(rows), speedup=2.0)
    assert not driver.is_static
    with pytest.raises(WorkloadError, match="depend on the run"):
        driver.static_arrivals()
    assert driver.release(0.0) == [(0, 0.0), (2, 0.0)]
    assert driver.next_ready_ms() is None
    driver.resolve(0, 21.0, DONE, 3)
    assert driver.next_ready_ms() == 36.0
    assert driver.release(35.9) == []
    assert driver.release(36.0) == [(1, 36.0)]
    driver.resolve(2, 40.0, DONE, 3)
    driver.resolve(1, 60.0, DONE, 3)
    assert driver.drained


def test_think_times_can_be_left_unscaled(trace):
    work = trace([row(session_id="s"), row(session_id="s", timestamp=..., delay=30)])
    driver = ArrivalDriver(work, speedup=2.0, scale_think_times=False)
    driver.release(0.0)
    driver.resolve(0, 10.0, DONE)
    assert driver.next_ready_ms() == 40.0


@pytest.mark.parametrize(("status", "goes_on"), [(DONE, True), (REJECTED, True), (FAILED, True), (CANCELLED, False)])
def test_only_a_cancelled_turn_ends_its_session(trace, status, goes_on):
    driver = ArrivalDriver(trace([row(session_id="s"), row(session_id="s", timestamp=..., delay=3)]))
    driver.release(0.0)
    driver.resolve(0, 10.0, status)
    assert driver.next_ready_ms() == (13.0 if goes_on else None)
    assert driver.drained is not goes_on


# ---------------------------------------------------------------- closed loop


def test_session_holds_its_slot_through_think_time():
    work = session_workload(sessions=2, turns=2, input_tokens=4, output_tokens=1, block_size=4, delay_ms=5.0)
    driver = ArrivalDriver(work, concurrency=1)  # D11, with two turns in both sessions
    assert driver.release(0.0, 0) == [(0, 0.0)]
    driver.resolve(0, 10.0, DONE, 1)
    assert driver.release(10.0, 0) == []
    assert driver.next_ready_ms() == 15.0
    assert driver.release(15.0, 0) == [(1, 15.0)]
    driver.resolve(1, 20.0, DONE, 1)
    assert driver.release(20.0, 0) == [(2, 20.0)]


def test_closed_loop_keeps_the_cap_full_in_row_order_and_stamps_the_release(trace):
    driver = ArrivalDriver(trace([row(timestamp=t) for t in (500, 0, 70)]), concurrency=2)
    assert driver.release(0.0, 0) == [(0, 0.0), (1, 0.0)]
    assert driver.next_ready_ms() is None
    assert driver.release(5.0, 2) == []
    driver.resolve(1, 21.0, DONE, 3)
    assert driver.release(21.0, 1) == [(2, 21.0)]
    driver.resolve(0, 30.0, DONE, 3)
    driver.resolve(2, 30.0, DONE, 3)
    assert driver.drained


def test_closed_loop_of_a_list_goes_by_time():
    driver = ArrivalDriver(listed(50, 10, 20), concurrency=1)
    assert driver.workload.request_name(driver.release(0.0)[0][0]) == "1"


def test_room_taken_by_others_delays_the_release(trace):
    driver = ArrivalDriver(trace([row(), row(), row()]), concurrency=2)
    assert driver.release(0.0, 1) == [(0, 0.0)]
    assert driver.release(4.0, 1) == [(1, 4.0)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(1, 4),
    st.lists(st.sampled_from([DONE, DONE, REJECTED, CANCELLED]), min_size=40, max_size=40),
)
def test_never_more_active_sessions_than_the_cap(cap, sessions, turns, ends):
    work = session_workload(sessions=sessions, turns=turns, input_tokens=4, output_tokens=2, block_size=4, delay_ms=7.0)
    driver, now, flying, seen, closed = ArrivalDriver(work, concurrency=cap), 0.0, [], [], set()
    while not driver.drained:
        for r, at in driver.release(now, len(flying)):
            assert at == now
            flying.append(r)
            seen.append(r)
        started = {int(work.specs["session"][r]) for r in seen}
        assert len(started - closed) <= cap
        assert started == set(range(len(started)))  # sessions start in order
        if flying:
            now += 1.0
            r, status = flying.pop(0), ends[len(seen)]
            driver.resolve(r, now, status)
            if status is CANCELLED or work.specs["turn"][r] == turns - 1:
                closed.add(int(work.specs["session"][r]))
        else:
            now = driver.next_ready_ms()
    assert closed == set(range(sessions))
    assert len(set(seen)) == len(seen)


# ---------------------------------------------------------------- errors


def test_ends_that_cannot_be_are_errors(trace):
    driver = ArrivalDriver(trace([row(), row(timestamp=9)]))
    driver.release(0.0)
    with pytest.raises(WorkloadError, match="row 1 is not in flight"):
        driver.resolve(1, 1.0, DONE)
    driver.resolve(1, 1.0, CANCELLED)
    with pytest.raises(WorkloadError, match="row 0 is rejected but has emitted 2 tokens"):
        driver.resolve(0, 1.0, REJECTED, 2)
    with pytest.raises(WorkloadError, match="row 0 must emit 0 <= emitted_tokens <= 3, got 4"):
        driver.resolve(0, 1.0, DONE, 4)
    with pytest.raises(WorkloadError, match="cannot end as UNFINISHED"):
        driver.resolve(0, 1.0, RequestStatus.UNFINISHED)
    driver.resolve(0, 1.0, DONE, 3)
    with pytest.raises(WorkloadError, match="row 0 is not in flight"):
        driver.resolve(0, 2.0, DONE, 3)


@pytest.mark.parametrize("cap", [0, -1, 1.5, True, "2"])
def test_concurrency_must_be_a_positive_int(cap):
    with pytest.raises(ConfigError, match="concurrency: must be None or an int >= 1"):
        ArrivalDriver(listed(0), concurrency=cap)


@pytest.mark.parametrize("speedup", [0, -1.0, float("nan"), float("inf"), True, "2"])
def test_speedup_must_be_finite_and_positive(speedup):
    with pytest.raises(ConfigError, match="speedup: must be finite and > 0"):
        ArrivalDriver(listed(0), speedup=speedup)


# ---------------------------------------------------------------- growing prompts


def tokens_of(driver, at):
    ids = content.expand_parts(driver.prompt_parts(at)).tolist()
    assert driver.prompt_tokens(at) == len(ids)
    return ids


def test_delta_prompts_grow_by_the_output_and_the_new_tokens(trace):
    rows = [row(session_id="s", hash_ids=[1] * 262, input_length=4190, output_length=592)]
    rows += [row(session_id="s", hash_ids=[2] * 37, input_length=592, output_length=16, timestamp=...)]
    work = trace(rows, delta=True)
    driver = ArrivalDriver(work)
    driver.release(0.0)
    assert driver.prompt_tokens(0) == 4190
    driver.resolve(0, 9.0, DONE, 592)
    assert driver.prompt_tokens(1) == 5374
    assert tokens_of(driver, 1) == [0] * 4190 + work.planned_token_ids(0).tolist() + [1] * 592


def test_only_what_was_emitted_by_completed_turns_enters_later_prompts(trace):
    rows = [row(session_id="s", hash_ids=[k], input_length=k + 1, timestamp=0) for k in range(5)]
    rows.insert(1, row(hash_ids=[77], input_length=2))
    work = trace(rows, delta=True)
    driver, expected = ArrivalDriver(work), []
    number = {0: 0, 1: 2, 2: 3, 3: 4, 4: 5}  # turn -> interned id; 1 is the other session's
    ends = [(DONE, 2), (REJECTED, 0), (FAILED, 1), (DONE, 3), (DONE, 3)]
    for turn, (status, emitted) in enumerate(ends):
        driver.release(float(turn))
        expected += [number[turn]] * (turn + 1)
        assert tokens_of(driver, turn) == expected
        driver.resolve(turn, float(turn), status, emitted)
        if status is DONE:
            expected += work.planned_token_ids(turn)[:emitted].tolist()
    assert tokens_of(driver, 5) == [1, 1]


def test_plain_sessions_give_their_prompts_as_they_are(trace):
    driver = ArrivalDriver(trace([row(session_id="s"), row(session_id="s", timestamp=...)]))
    driver.release(0.0)
    driver.resolve(0, 1.0, DONE, 3)
    assert tokens_of(driver, 1) == [0] * 16 + [1] * 4


def test_prompts_of_a_later_turn_are_known_at_every_speed_of_the_first():
    work = session_workload(sessions=1, turns=3, input_tokens=5, output_tokens=2, block_size=4)
    assert work.full_prompt_tokens().tolist() == [5, 12, 19]
    driver = ArrivalDriver(work)
    for turn in range(3):
        driver.release(float(turn))
        assert driver.prompt_tokens(turn) == work.full_prompt_tokens()[turn]
        driver.resolve(turn, float(turn), DONE, 2)


# ---------------------------------------------------------------- tokenizers


def test_one_server_takes_requests_one_after_the_other():
    pool = TokenizationPool(1, base_ms=2.0, per_input_token_ms=0.5)
    assert [pool.leave_ms(0, t, 10) for t in (0.0, 1.0, 20.0)] == [7.0, 14.0, 27.0]


def test_the_server_that_is_free_first_is_taken():
    pool = TokenizationPool(2, per_input_token_ms=1.0)
    assert [pool.leave_ms(0, 0.0, n) for n in (10, 3, 4, 1)] == [10.0, 3.0, 7.0, 8.0]


def test_workers_do_not_share_servers():
    pool = TokenizationPool(1, base_ms=5.0)
    assert [pool.leave_ms(w, 0.0, 1) for w in (0, 1, 0)] == [5.0, 5.0, 10.0]


def test_service_time_is_one_number_before_it_is_added():
    # Recorded from the peer. (2.1 + 2.0) + 0.05 would be 4.1499999999999995.
    assert TokenizationPool(1, base_ms=2.0, per_input_token_ms=0.05).leave_ms(0, 2.1, 1) == 4.15


def test_a_pool_without_service_time_lets_everything_through():
    pool = TokenizationPool(1)
    assert [pool.leave_ms(3, t, 100) for t in (0.0, 0.0, 4.5)] == [0.0, 0.0, 4.5]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0, 1.0, 1.0), "workers"),
        ((1.0, 1.0, 1.0), "workers"),
        ((True, 1.0, 1.0), "workers"),
        ((1, -1.0, 1.0), "base_ms"),
        ((1, float("nan"), 1.0), "base_ms"),
        ((1, 1.0, float("inf")), "per_input_token_ms"),
        ((1, 1.0, "1"), "per_input_token_ms"),
    ],
)
def test_pool_parameters_are_checked(arguments, field):
    with pytest.raises(ConfigError, match=f"tokenization.{field}: must be"):
        TokenizationPool(*arguments)


def test_a_hundred_thousand_sparse_sessions_are_released_one_by_one():
    # A driver that scans its sessions at each release does not end here in reasonable time.
    work = session_workload(
        sessions=100_000, input_tokens=4, output_tokens=1, block_size=4, arrivals_ms=np.arange(100_000) * 10.0
    )
    driver, released = ArrivalDriver(work), 0
    while (now := driver.next_ready_ms()) is not None:
        for r, _ in driver.release(now):
            driver.resolve(r, now + 1.0, DONE, 1)
            released += 1
    assert released == 100_000
    assert driver.drained
