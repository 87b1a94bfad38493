"""What is refused, what poisons a rank, and what a rank can be turned back into."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.config import ExternalTiming, FixedTiming
from kvsim.contract import (
    CancelRequest,
    CommandContext,
    Request,
    Submit,
)
from kvsim.errors import CommandError, ConfigError, PoisonedError, SnapshotError, TimingError
from kvsim.layout import SEGMENT
from support import Engine, rank_state


def busy(**fields: Any) -> Engine:
    """A rank with one running and one waiting request and some cached blocks."""
    engine = Engine(**{"num_gpu_blocks": 8, "max_num_seqs": 1, "emit_kv_events": True, **fields})
    engine.submit(99, range(8))
    engine.drain()
    engine.submit(1, range(4), 20)
    engine.submit(2, range(6), 3)
    engine.step()
    return engine


def segments(*rows: tuple[int, int, int]) -> Request:
    return Request.from_segments(7, np.array(list(rows), SEGMENT))


BAD_COMMANDS: dict[str, tuple[Any, str]] = {
    "duplicate running id": (Submit(Request(1, [1])), "request_id: 1 is already active"),
    "duplicate waiting id": (Submit(Request(2, [1])), "request_id: 2 is already active"),
    "duplicate as uuid": (Submit(Request(uuid.UUID(int=1), [1])), "request_id: 1 is already active"),
    "id negative": (Submit(Request(-1, [1])), "request_id: must lie in 0 <= id < 2"),
    "id of 129 bits": (Submit(Request(2**128, [1])), "request_id: must lie in"),
    "id a bool": (Submit(Request(True, [1])), "request_id: expected an int"),
    "id a float": (Submit(Request(1.0, [1])), "request_id: expected an int"),  # type: ignore[arg-type]
    "id a string": (Submit(Request("1", [1])), "request_id: expected an int"),  # type: ignore[arg-type]
    "no tokens": (Submit(Request(7, [])), "tokens: the prompt must have 1 <= tokens"),
    "token negative": (Submit(Request(7, [1, -1])), "tokens: expected token ids"),
    "token of 33 bits": (Submit(Request(7, [2**32])), "tokens: expected token ids"),
    "token huge": (Submit(Request(7, [2**80])), "tokens: expected token ids"),
    "token a float": (Submit(Request(7, [1.5])), "tokens: expected token ids"),  # type: ignore[list-item]
    "token a bool": (Submit(Request(7, [True])), "tokens: expected token ids"),
    "tokens a string": (Submit(Request(7, "abc")), "tokens: expected token ids"),  # type: ignore[arg-type]
    "tokens none": (Submit(Request(7, None)), "tokens: expected token ids"),  # type: ignore[arg-type]
    "tokens of two dimensions": (Submit(Request(7, np.ones((2, 2), np.uint32))), "tokens: expected one dimension"),
    "output negative": (Submit(Request(7, [1], -1)), "max_output_tokens: must lie in 0 <= n"),
    "output too large": (Submit(Request(7, [1], 2**31)), "max_output_tokens: must lie in 0 <= n"),
    "output a float": (Submit(Request(7, [1], 1.0)), "max_output_tokens: expected an int"),  # type: ignore[arg-type]
    "output a bool": (Submit(Request(7, [1], True)), "max_output_tokens: expected an int"),
    "planned negative": (Submit(Request(7, [1], 1, [-1])), "output_token_ids: expected token ids"),
    "planned a float": (Submit(Request(7, [1], 1, [0.5])), "output_token_ids"),  # type: ignore[list-item]
    "segment empty": (Submit(segments((0, 1, 0))), "segments: every length"),
    "segment negative": (Submit(segments((0, 1, 4), (0, 1, -3))), "segments: every length"),
    # Four of these wrap to a sum of 5 in 64 bits.
    "segment sums that wrap": (Submit(segments(*[(0, 1, 2**62)] * 4, (0, 1, 5))), "segments: every length"),
    "segments too long": (Submit(segments(*[(0, 1, 2**30)] * 2)), "tokens: the prompt must have"),
    "segment step": (Submit(segments((0, 2, 4))), "segments: every step"),
    "segments none": (Submit(segments()), "tokens: the prompt must have"),
    "segments of another type": (
        Submit(Request.from_segments(7, np.zeros(3, np.uint32))),
        "segments: expected a one-dimensional array",
    ),
    "cancel of a float": (CancelRequest(1.5), "request_id: expected an int"),  # type: ignore[arg-type]
    "no command": ("stop", "str"),
}


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_a_refused_command_leaves_no_trace(name: str, in_flight: bool) -> None:
    command, message = BAD_COMMANDS[name]
    engine = busy()
    pending = engine.rank.execute_pass(engine.now).pending if in_flight else None
    before, shown = engine.rank.digest(), list(pending.effects.outputs) if pending else None
    with pytest.raises(CommandError, match=message):
        engine.rank.apply_command(command, CommandContext(engine.now, in_flight), pending)
    assert engine.rank.digest() == before
    assert pending is None or list(pending.effects.outputs) == shown
    engine.rank.check_integrity()


@pytest.mark.parametrize("now_ms", [math.nan, math.inf, -math.inf, -1.0])
def test_a_time_that_is_none_is_refused(now_ms: float) -> None:
    engine = busy()
    before = engine.rank.digest()
    with pytest.raises(CommandError, match="now_ms: must be finite and >= 0"):
        engine.rank.apply_command(Submit(Request(7, [1])), CommandContext(now_ms))
    with pytest.raises(CommandError, match="now_ms: must be finite and >= 0"):
        engine.rank.execute_pass(now_ms)
    assert engine.rank.digest() == before
    engine.drain()


@pytest.mark.parametrize("end_ms", [math.nan, math.inf, 4.0])
def test_a_pass_cannot_end_before_it_started(end_ms: float) -> None:
    engine = busy()
    outcome = engine.rank.execute_pass(max(engine.now, 5.0))
    with pytest.raises(CommandError, match="end_ms: must be finite"):
        engine.rank.complete_pass(outcome.pending, end_ms)
    engine.rank.complete_pass(outcome.pending, outcome.end_ms)


def test_a_pass_is_completed_once() -> None:
    engine = busy()
    outcome = engine.rank.execute_pass(engine.now)
    engine.rank.complete_pass(outcome.pending, outcome.end_ms)
    with pytest.raises(CommandError, match="complete already"):
        engine.rank.complete_pass(outcome.pending, outcome.end_ms)


def test_an_unknown_id_is_a_noop_that_changes_nothing() -> None:
    engine = busy()
    before = engine.rank.digest()
    effects = engine.cancel(12345)
    assert type(effects.result).__name__ == "Noop"
    assert engine.rank.digest() == before


@pytest.mark.parametrize(
    "request_id", [0, 1, 2**64 - 1, 2**64, 2**127 + 5, 2**128 - 1, uuid.UUID(int=2**100 + 7), np.uint64(2**64 - 1)]
)
def test_ids_of_128_bits_come_back_as_they_went_in(request_id: Any) -> None:
    engine = Engine(num_gpu_blocks=8)
    number = request_id.int if isinstance(request_id, uuid.UUID) else int(request_id)
    assert engine.submit(request_id, range(4), 2).result.request_id == number
    # The same low or high half is another request.
    engine.submit(number ^ (1 << 127), range(50, 54), 2)
    engine.submit(number ^ 1, range(60, 64), 2)
    step = engine.step()
    assert next(iter(step.admitted)) == number
    assert step.outputs[0].request_id == number
    assert engine.cancel(request_id).retired_requests == (number,)
    assert engine.rank.metrics().running_requests == 2


# ---------------------------------------------------------------- timing models that fail


class Timing:
    """Returns or raises what it is told to, per part."""

    def __init__(self, prefill: Any = 10.0, decode: Any = 5.0) -> None:
        self.answers = {"prefill": prefill, "decode": decode}
        self.calls: list[tuple[Any, ...]] = []

    def _answer(self, part: str, *arguments: int) -> float:
        self.calls.append((part, *arguments))
        answer = self.answers[part]
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        return self._answer("prefill", batch_size, mean_isl, mean_prefix)

    def predict_decode_ms(
        self, batch_size: int, active_kv_tokens: int, mean_context: int, total_kv_tokens: int
    ) -> float:
        return self._answer("decode", batch_size, active_kv_tokens, mean_context, total_kv_tokens)


def test_a_callable_model_is_asked_once_per_part_with_floor_means() -> None:
    timing = Timing()
    engine = Engine(num_gpu_blocks=16, timing=timing, timing_model=ExternalTiming(provider="mine"))
    engine.submit(1, range(4), 2)
    engine.submit(2, range(50, 57), 2)
    assert engine.step().end_ms == 10.0
    assert engine.step().end_ms == 15.0
    # (4 + 7) // 2 = 5; lengths 5 and 8 are 13 tokens, mean 6; 16 blocks of 4.
    assert timing.calls == [("prefill", 2, 5, 0), ("decode", 2, 13, 6, 64)]


def test_a_model_that_is_named_but_not_given_is_refused() -> None:
    with pytest.raises(ConfigError, match="timing_model: external model 'mine' is named but no timing object is given"):
        Engine(timing_model=ExternalTiming(provider="mine"))


def test_an_object_that_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="timing: must have predict_prefill_ms and predict_decode_ms, got int"):
        Engine(timing=3)


@pytest.mark.parametrize("part", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (RuntimeError("no such GPU"), "external {} prediction failed: no such GPU"),
        (math.nan, "external {} prediction returned a non-finite duration, got nan"),
        (math.inf, "non-finite duration"),
        ("fast", "external {} prediction must be a number of milliseconds, got 'fast'"),
        (None, "must be a number of milliseconds"),
    ],
)
def test_a_failing_model_poisons_the_rank(part: str, answer: Any, message: str) -> None:
    engine = Engine(num_gpu_blocks=16, timing=Timing(**{part: answer}))
    engine.submit(1, range(4), 3)
    good = engine.rank.snapshot()
    if part == "decode":
        engine.step()
    with pytest.raises(TimingError, match=message.format(part)) as caught:
        engine.step()
    if isinstance(answer, BaseException):
        assert caught.value.__cause__ is answer
    rank = engine.rank
    calls = [
        lambda: rank.execute_pass(50.0),
        lambda: rank.apply_command(Submit(Request(2, [1])), CommandContext(50.0)),
        lambda: rank.apply_command(CancelRequest(1), CommandContext(50.0)),
        lambda: rank.complete_idle_group_pass(0.0, 1.0),
        rank.fork,
        rank.snapshot,
    ]
    for call in calls:
        with pytest.raises(PoisonedError, match="an earlier pass failed"):
            call()
    assert not rank.is_ready()
    assert not rank.is_drained()
    assert rank.metrics().total_blocks == 16  # looking is allowed
    rank.digest()
    # A snapshot from before is a way out.
    rank.restore(good)
    rank.check_integrity()
    assert rank.metrics().waiting_requests == 1


def test_a_negative_decode_time_is_an_error_and_a_negative_prefill_costs_nothing() -> None:
    engine = Engine(num_gpu_blocks=16, timing=Timing(prefill=-3.0, decode=-1.0))
    engine.submit(1, range(4), 3)
    assert engine.step().end_ms == 0.0
    with pytest.raises(TimingError, match=r"negative duration, got -1\.0"):
        engine.step()


@pytest.mark.parametrize(("ruleset", "end_ms"), [("dynamo", 0.25), ("dynamo-1.3", 1.0)])
def test_short_decodes_of_a_model_are_floored_under_the_old_rules_only(ruleset: str, end_ms: float) -> None:
    engine = Engine(num_gpu_blocks=16, ruleset=ruleset, worker_type="decode", timing=Timing(decode=0.25))
    engine.submit(1, range(4), 3)
    assert engine.step().end_ms == end_ms


# ---------------------------------------------------------------- whole state


def test_a_snapshot_goes_through_pickle_and_the_run_continues_as_it_would_have() -> None:
    engine = busy(emit_kv_token_ids=True, num_gpu_blocks=6)
    saved = pickle.loads(pickle.dumps(engine.rank.snapshot()))
    other = busy(emit_kv_token_ids=True, num_gpu_blocks=6)
    other.drain()
    other.rank.restore(saved)
    other.now = engine.now
    assert other.rank.digest() == engine.rank.digest()
    first, second = engine.drain(), other.drain()
    assert [step.tokens for step in first] == [step.tokens for step in second]
    assert [step.events for step in first] == [step.events for step in second]
    assert engine.rank.digest() == other.rank.digest()


def test_a_snapshot_taken_before_the_tables_grew_can_be_restored_after() -> None:
    engine = Engine(num_gpu_blocks=64, max_num_seqs=300, max_num_batched_tokens=None)
    engine.submit(0, range(4), 5)
    saved, before = engine.rank.snapshot(), engine.rank.digest()
    for request_id in range(1, 200):
        engine.submit(request_id, range(request_id, request_id + 4), 5)
    engine.step()
    engine.rank.restore(saved)
    engine.rank.check_integrity()
    assert engine.rank.digest() == before
    assert len(engine.drain()) == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"num_gpu_blocks": 9},
        {"block_size": 8},
        {"max_num_seqs": 2},
        {"enable_prefix_caching": False},
        {"emit_kv_events": False},
        {"preemption_mode": "fifo"},
        {"timing_model": FixedTiming(prefill_ms=1, decode_ms=1)},
        {"ruleset": "dynamo-1.3"},
        {"backend": "trtllm"},
    ],
    ids=str,
)
def test_a_snapshot_of_another_configuration_is_refused(fields: dict[str, Any]) -> None:
    engine, other = busy(), busy(**fields)
    before, state = engine.rank.digest(), rank_state(engine.rank)
    with pytest.raises(SnapshotError):
        engine.rank.restore(other.rank.snapshot())
    assert engine.rank.digest() == before
    assert rank_state(engine.rank) == state
    engine.rank.check_integrity()
    engine.drain()


@pytest.mark.parametrize("what", ["no snapshot", "cut short", "other tables"])
def test_a_broken_snapshot_is_refused(what: str) -> None:
    engine = busy()
    saved: Any = engine.rank.snapshot()
    if what == "no snapshot":
        saved = b"bytes"
    elif what == "cut short":
        saved = dataclasses.replace(saved, arena=saved.arena[:-64])
    else:
        saved = dataclasses.replace(saved, sizes={**saved.sizes, "other": 3})
    before = engine.rank.digest()
    with pytest.raises(SnapshotError):
        engine.rank.restore(saved)
    assert engine.rank.digest() == before
    engine.drain()


def test_a_fork_and_its_origin_do_not_touch_each_other() -> None:
    engine = busy()
    start = engine.rank.digest()
    fork = engine.rank.fork()
    assert fork.digest() == start
    ends = [outcome.end_ms for outcome in (fork.execute_pass(engine.now),)]
    fork.apply_command(CancelRequest(2), CommandContext(engine.now))
    fork.apply_command(Submit(Request(77, [9] * 5)), CommandContext(engine.now))
    assert fork.digest() != start
    assert engine.rank.digest() == start
    again = engine.rank.fork()
    assert [again.execute_pass(engine.now).end_ms] == ends
    engine.drain()
    fork.check_integrity()
    assert fork.metrics().waiting_requests == 1


def test_a_fork_outlives_its_origin() -> None:
    engine = busy(emit_kv_token_ids=True)
    fork, now = engine.rank.fork(), engine.now
    expected = [step.tokens for step in engine.drain()]
    del engine
    tokens = []
    while not fork.is_drained():
        outcome = fork.execute_pass(now)
        now = outcome.end_ms
        tokens.append([(output.request_id, output.token_id) for output in outcome.pending.effects.outputs])
    assert tokens == expected


def test_the_digest_tells_states_apart() -> None:
    digests = []
    for tokens, out in (([1, 2, 3], 4), ([1, 2, 3], 5), ([1, 2, 3, 4], 4)):
        engine = Engine(num_gpu_blocks=8)
        empty = engine.rank.digest()
        engine.submit(1, tokens, out)
        digests += [empty, engine.rank.digest()]
        engine.step()
        digests.append(engine.rank.digest())
    assert digests[0] == digests[3] == digests[6]
    assert len(set(digests)) == 7
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests)


PROGRAM = """
from support import Engine
engine = Engine(num_gpu_blocks=6, aic_nextn=2, aic_nextn_accept_rates="0.5,0.5", emit_kv_events=True)
for request_id in range(4):
    engine.submit(request_id, range(9 * request_id % 7, 9 * request_id % 7 + 7), 6)
for _ in range(6):
    engine.step()
print(engine.rank.digest())
"""


def test_equal_histories_give_equal_digests_in_every_process() -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(kvsim.__file__).parents[1])])
    digests = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "12345")
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 16


def test_views_cannot_be_written() -> None:
    rank = busy().rank
    for array in (rank.blocks, rank.requests, rank.running, rank.header):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = array[:1]
