"""Faults users reported on engines and simulators of this kind, each as a test of the whole kind.

Numbers are those of the list of reports; bs is the block size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsim.config import FixedTiming
from kvsim.errors import IntegrityError
from kvsim.layout import FailReason
from kvsim.policies import VllmPolicy
from kvsim.rank import describe_reason
from support import Engine, Step

SIZES = pytest.mark.parametrize("block_size", [2, 4, 16, 32])


def engine_of(**fields: Any) -> Engine:
    return Engine(
        **{
            "num_gpu_blocks": 200,
            "block_size": 16,
            "timing_model": FixedTiming(prefill_ms=20, decode_ms=10),
            **fields,
        }
    )


def hit(engine: Engine, request_id: int, tokens: Any) -> int:
    """Tokens reused by a request that is run to its end."""
    engine.submit(request_id, tokens)
    return next(step.admitted[request_id] for step in engine.drain() if request_id in step.admitted)


# ---------------------------------------------------------------- 1


@SIZES
def test_1_a_repeat_hits_all_whole_blocks_but_the_one_of_the_last_token(block_size: int) -> None:
    for length in (1, block_size - 1, block_size, block_size + 1, 2 * block_size - 1, 2 * block_size, 5 * block_size):
        engine = engine_of(block_size=block_size)
        assert hit(engine, 1, range(length)) == 0
        expected = (length - 1) // block_size * block_size
        assert hit(engine, 2, range(length)) == expected, length
        # The chain of hashes is not broken by the part that was computed again.
        assert hit(engine, 3, range(length + block_size)) == length // block_size * block_size, length


@pytest.mark.parametrize(("length", "reused"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32)])
def test_1_the_reported_lengths(length: int, reused: int) -> None:
    engine = engine_of()
    hit(engine, 1, range(length))
    assert hit(engine, 2, range(length)) == reused


# ---------------------------------------------------------------- 5


@SIZES
@pytest.mark.parametrize("blocks", [2, 5])
def test_5_a_partly_filled_last_block_is_used_to_its_end(block_size: int, blocks: int) -> None:
    engine = engine_of(
        block_size=block_size, num_gpu_blocks=blocks, enable_prefix_caching=False, max_num_batched_tokens=None
    )
    prompt = (blocks - 1) * block_size + 1
    engine.submit(1, [7] * prompt, 10 * block_size)
    steps = []
    while engine.rank.metrics().preemptions_total == 0:
        steps.append(engine.step())
    # All block_size - 1 free places are computed without a spurious preemption; one more token is too many.
    made = sum(len(step.outputs) for step in steps)
    assert prompt + made - 1 == blocks * block_size
    assert len(steps) == made + 1


@SIZES
def test_5_growth_inside_the_last_block_preempts_nobody(block_size: int) -> None:
    engine = engine_of(block_size=block_size, num_gpu_blocks=2, enable_prefix_caching=False)
    for request_id in (1, 2):
        engine.submit(request_id, [request_id], block_size)  # computes exactly block_size tokens
    steps = engine.drain()
    assert engine.rank.metrics().preemptions_total == 0
    assert len(steps) == block_size


# ---------------------------------------------------------------- 6


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 50, 100, 199, 500])
@pytest.mark.parametrize(("block_size", "length"), [(16, 200), (16, 192), (4, 63), (32, 200)])
def test_6_chunked_prompts_are_found_like_whole_ones(block_size: int, length: int, chunk: int) -> None:
    engine = engine_of(block_size=block_size, max_num_batched_tokens=chunk)
    hit(engine, 1, range(length))
    assert hit(engine, 2, range(length)) == (length - 1) // block_size * block_size
    assert hit(engine, 3, range(length + 1)) == length // block_size * block_size


# ---------------------------------------------------------------- 7


@pytest.mark.parametrize(("block_size", "length"), [(16, 100), (16, 97), (4, 9), (32, 40)])
def test_7_a_preempted_request_finds_what_it_had_computed(block_size: int, length: int) -> None:
    need = length // block_size + 1
    engine = engine_of(block_size=block_size, num_gpu_blocks=need + 1)
    engine.submit(1, [7] * (block_size - 1), 50)
    engine.submit(2, range(1000, 1000 + length), 50)
    while engine.rank.metrics().preemptions_total == 0:
        engine.step()
    # The victim's unfinished block is all that the other one needs: nothing is evicted.
    assert engine.status(2) == "preempted"
    engine.cancel(1)
    assert engine.step().admitted == {2: length // block_size * block_size}


@SIZES
def test_7_many_requests_under_pressure_all_end(block_size: int) -> None:
    engine = engine_of(block_size=block_size, num_gpu_blocks=12, max_num_seqs=8)
    for request_id in range(20):
        engine.submit(request_id, range(1000 * request_id, 1000 * request_id + 3 * block_size), 2 * block_size)
    steps = engine.drain(4000)
    assert sum(len(step.outputs) for step in steps) == 20 * 2 * block_size
    assert [ended for step in steps for ended in step.ended if ended[1]] == []
    assert engine.rank.metrics().preemptions_total > 0


# ---------------------------------------------------------------- 8


@pytest.mark.parametrize("backend", ["vllm", "trtllm"])
@pytest.mark.parametrize(("pool", "length"), [(64, 2048), (64, 64 * 16 + 1), (1, 17)])
def test_8_a_prompt_that_never_fits_is_rejected_with_its_reason_and_the_next_runs(
    backend: Any, pool: int, length: int
) -> None:
    engine = engine_of(backend=backend, num_gpu_blocks=pool, max_num_batched_tokens=None)
    engine.submit(0, range(length))
    engine.submit(1, [5] * (16 if backend == "vllm" else 15))
    outcome = engine.rank.execute_pass(0.0)
    signals = outcome.pending.effects.outputs.array
    assert [int(signal["id_lo"]) for signal in signals] == [1, 0]
    last = signals[-1]
    assert FailReason(int(last["reason"])) is FailReason.POOL_TOO_SMALL
    # TensorRT-LLM counts the output token too: 2048 + 1 tokens are 129 blocks.
    needed = -(-(length + (backend == "trtllm")) // 16)
    assert describe_reason(int(last["reason"]), int(last["needed"]), engine.config) == f"needs {needed} > {pool} blocks"
    outputs = list(outcome.pending.effects.outputs)
    assert [(output.completed, output.rejected) for output in outputs] == [(True, False), (True, True)]
    assert engine.rank.is_drained()


def test_8_the_reported_prompt_needs_128_blocks() -> None:
    assert describe_reason(FailReason.POOL_TOO_SMALL, 128, engine_of(num_gpu_blocks=64).config) == (
        "needs 128 > 64 blocks"
    )


def test_8_a_request_that_outgrows_the_pool_ends_and_the_next_runs() -> None:
    engine = engine_of(num_gpu_blocks=3)
    engine.submit(0, range(40), 100)
    engine.submit(1, range(500, 510), 1)
    steps: list[Step] = []
    while engine.rank.stuck_head() is None:
        steps.append(engine.step())
        assert len(steps) < 100
    head = engine.rank.stuck_head()
    assert head is not None
    assert head.request_id == 0
    assert head.describe(engine.config) == "outgrew the pool: 4 > 3 blocks"
    # 48 tokens are computed, so the tokens at lengths 41 to 49 came out.
    assert sum(len(step.outputs) for step in steps) == 9
    output = engine.rank.fail_head()
    assert output is not None
    assert (output.failed, output.rejected, output.completed, output.token_id) == (True, False, True, None)
    assert [ended for step in engine.drain() for ended in step.ended] == [(1, False)]


# ---------------------------------------------------------------- 10


@pytest.mark.parametrize(("budget", "length"), [(2048, 3000), (8, 9), (1, 2)])
def test_10_an_unchunked_prompt_over_the_budget_ends_instead_of_waiting_for_ever(budget: int, length: int) -> None:
    engine = engine_of(num_gpu_blocks=300, enable_chunked_prefill=False, max_num_batched_tokens=budget)
    engine.submit(0, range(length))
    engine.submit(1, [5] * budget)
    step = engine.step()
    assert (step.admitted, step.end_ms) == ({}, 0.0)
    head = engine.rank.stuck_head()
    assert head is not None
    assert (head.request_id, head.reason, head.needed) == (0, FailReason.BUDGET_TOO_SMALL, length)
    assert str(length) in head.describe(engine.config)
    assert str(budget) in head.describe(engine.config)
    output = engine.rank.fail_head()
    assert output is not None
    assert output.rejected
    assert [ended for step in engine.drain() for ended in step.ended] == [(1, False)]


def test_10_an_unchunked_prompt_runs_once_enough_of_it_is_cached() -> None:
    engine = engine_of(num_gpu_blocks=300, enable_chunked_prefill=False, max_num_batched_tokens=32)
    engine.submit(0, range(32))
    engine.drain()
    engine.submit(1, range(48))  # 16 or 32 of 48 are cached
    assert [ended for step in engine.drain() for ended in step.ended] == [(1, False)]


# ---------------------------------------------------------------- 11


@pytest.mark.parametrize(
    ("pool", "first", "second", "chunk"), [(10, 96, 128, 32), (10, 96, 80, 16), (20, 160, 320, 64)]
)
def test_11_a_prompt_waits_until_the_whole_of_it_fits(pool: int, first: int, second: int, chunk: int) -> None:
    engine = engine_of(num_gpu_blocks=pool, max_num_batched_tokens=chunk)
    engine.submit(1, range(first), 8)
    for _ in range(-(-first // chunk)):
        engine.step()
    assert engine.row(1)["generated"] == 1
    engine.submit(2, range(1000, 1000 + second), 1)
    step = engine.step()
    assert step.admitted == {}
    assert engine.status(2) == "waiting"
    steps = engine.drain()
    assert engine.rank.metrics().preemptions_total == 0
    assert [ended for step in steps for ended in step.ended] == [(1, False), (2, False)]


# ---------------------------------------------------------------- 15


@pytest.mark.parametrize(("pool", "prompt", "out", "running"), [(100, 256, 256, 3), (100, 256, 16, 5), (7, 16, 96, 1)])
def test_15_trtllm_admits_only_what_it_can_finish(pool: int, prompt: int, out: int, running: int) -> None:
    engine = engine_of(backend="trtllm", num_gpu_blocks=pool, max_num_batched_tokens=None)
    for request_id in range(6):
        engine.submit(request_id, [request_id] * prompt, out)
    step = engine.step()
    assert len(step.admitted) == running
    assert engine.active == running * prompt // 16
    steps = [step, *engine.drain(10_000)]
    assert engine.rank.metrics().preemptions_total == 0
    assert sum(len(step.outputs) for step in steps) == 6 * out


# ---------------------------------------------------------------- 16


@SIZES
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_16_speculation_gives_one_matched_block_back(block_size: int, shared: int) -> None:
    hits = {}
    for nextn in (None, 1, 3):
        engine = engine_of(block_size=block_size, aic_nextn=nextn)
        hit(engine, 1, range(shared * block_size))
        hits[nextn] = hit(engine, 2, [*range(shared * block_size), *range(5000, 5000 + block_size)])
    full = shared * block_size
    assert hits == {None: full, 1: full - block_size, 3: full - block_size}


def test_16_the_reported_prompt_hits_64_plain_and_48_with_drafts() -> None:
    for nextn, reused in ((None, 64), (2, 48)):
        engine = engine_of(aic_nextn=nextn)
        hit(engine, 1, range(64))
        assert hit(engine, 2, [*range(64), *range(900, 916)]) == reused


# ---------------------------------------------------------------- 31, the part about the roll-back


@pytest.mark.parametrize("others", [0, 1, 3])
def test_31_a_victim_already_scheduled_in_the_pass_is_taken_back_from_it(others: int) -> None:
    """The oldest decodes first, then the second needs a block and takes the oldest's."""
    engine = engine_of(
        block_size=4,
        num_gpu_blocks=3 + others,
        max_num_batched_tokens=16 if others == 0 else 2 * (2 + others),
        enable_prefix_caching=False,
        preemption_mode="fifo",
    )
    engine.submit(1, [1] * 5, 20)  # 2 blocks, room up to 8
    engine.submit(2, [2] * 3, 20)  # 1 block, needs a second one at length 5
    for request_id in range(3, 3 + others):
        engine.submit(request_id, [request_id], 3)
    while engine.rank.metrics().preemptions_total == 0:
        step = engine.step()
    [event] = step.start.pressure_events
    assert event.request_id == 1
    assert 1 not in [output.request_id for output in step.outputs]
    assert engine.row(1)["generated"] == engine.row(1)["length"] - 5
    decoding = [output.request_id for output in step.outputs]
    assert 2 in decoding
    assert step.fpm.num_decode_requests == len(decoding)
    assert step.fpm.num_queued_decode == 1
    assert step.fpm.sum_queued_decode_kv_tokens == engine.row(1)["length"]


@pytest.mark.parametrize("budget", [2, 3, 10])
def test_31_the_victims_tokens_go_back_to_the_budget(budget: int) -> None:
    """1 is scheduled and taken back for 2; 3 is passed over (everybody moved up); 4 gets the token of 1."""
    engine = engine_of(
        block_size=4,
        num_gpu_blocks=5,
        max_num_batched_tokens=None,
        max_num_seqs=4,
        enable_prefix_caching=False,
        preemption_mode="fifo",
    )
    for request_id, length in ((1, 5), (2, 3), (3, 1), (4, 1)):
        engine.submit(request_id, [request_id] * length, 20)
    engine.step()
    engine.step()
    # The third pass: 2 holds 4 tokens and needs a block.
    engine.rank._state.view("config", writable=True)["budget"] = budget
    step = engine.step()
    assert [event.request_id for event in step.start.pressure_events] == [1]
    assert [output.request_id for output in step.outputs] == [2, 4]


def test_31_a_victims_prompt_is_taken_out_of_the_prefill_of_the_pass() -> None:
    class Eager(VllmPolicy):
        def admit(self, request: np.void, pool: tuple[int, int, int, int]) -> bool:
            return True

    timing = FixedTiming(prefill_ms=20, decode_ms=10)
    engine = Engine(
        policy=Eager(), num_gpu_blocks=4, max_num_batched_tokens=8, enable_prefix_caching=False, timing_model=timing
    )
    engine.submit(1, [1] * 14, 4)
    engine.step()
    engine.submit(2, [2] * 2, 4)
    # The rest of prompt 1 (6 tokens, 4 blocks) is scheduled, then 2 takes its place in the pool.
    step = engine.step()
    assert [event.request_id for event in step.start.pressure_events] == [1]
    assert (step.fpm.num_prefill_requests, step.fpm.sum_prefill_tokens, step.fpm.sum_prefill_kv_tokens) == (1, 2, 0)
    assert step.fpm.var_prefill_length == 0.0
    assert [output.request_id for output in step.outputs] == [2]


# ---------------------------------------------------------------- 32, as integrity


def loaded() -> Engine:
    """A rank with running, waiting, shared, inactive and free blocks."""
    engine = engine_of(block_size=4, num_gpu_blocks=12, max_num_seqs=2)
    engine.submit(9, range(400, 412))
    engine.drain()
    for request_id in (1, 2, 3):
        engine.submit(request_id, range(9 + request_id), 6)
    engine.step()
    engine.rank.check_integrity()
    return engine


def first(engine: Engine, condition: Any) -> int:
    return int(np.flatnonzero(condition(engine.rank.blocks))[0])


@pytest.mark.parametrize("change", [-2, -1, 1])
def test_32_a_reference_too_many_or_too_few_is_found(change: int) -> None:
    engine = loaded()
    block = first(engine, lambda blocks: blocks["refs"] > 0)
    engine.rank._state.view("blocks", writable=True)["refs"][block] += change
    with pytest.raises(IntegrityError, match="references differ"):
        engine.rank.check_integrity()


@pytest.mark.parametrize(
    ("section", "field", "change"),
    [
        ("header", "num_inactive", 1),
        ("header", "num_waiting", -1),
        ("header", "num_live", 1),
        ("header", "queued_sum", 1),
        ("header", "running_blocks", 1),
        ("header", "running_completion", -1),
        ("header", "num_reserved", 1),
        ("requests", "computed", 1000),
        ("requests", "allocated", 1000),
        ("requests", "capacity", 4),
        ("requests", "generated", 1),
        ("requests", "n_blocks", -1),
        ("requests", "status", 1),
        ("requests", "id_lo", 1000),
        ("blocks", "hash", 1),
        ("blocks", "hashed", -1),
        ("blocks", "hashed", 16 << 1),
        ("blocks", "link", 1),
        ("blocks", "follow", 1),
        ("heads", "", 1),
        ("copies", "next", 1),
    ],
)
def test_32_any_broken_count_or_link_is_found(section: str, field: str, change: int) -> None:
    engine = loaded()
    rows = engine.rank._state.view(section, writable=True)
    if section == "blocks":
        at = first(engine, lambda blocks: blocks["hashed"] > 0)
    elif section == "heads":
        at = int(np.flatnonzero(rows >= 0)[0])
    elif section == "requests":
        at = int(engine.rank.running[0])
    else:
        at = 0
    column = rows[field] if field else rows
    column[at] = column[at] + np.array(change).astype(column.dtype)
    with pytest.raises(IntegrityError):
        engine.rank.check_integrity()


def test_32_a_block_on_the_stack_twice_or_in_a_table_twice_is_found() -> None:
    engine = loaded()
    stack = engine.rank._state.view("free_stack", writable=True)
    stack[0] = stack[1]
    with pytest.raises(IntegrityError, match="the stack lists a block twice"):
        engine.rank.check_integrity()
    engine = loaded()
    row = engine.row(1)
    tables = engine.rank._state.view("tables", writable=True)
    tables[row["table"]] = tables[row["table"] + 1]
    with pytest.raises(IntegrityError, match="lists a block twice"):
        engine.rank.check_integrity()


@SIZES
def test_32_releasing_shared_blocks_frees_each_of_them_once(block_size: int) -> None:
    engine = engine_of(block_size=block_size, num_gpu_blocks=32, max_num_batched_tokens=None)
    engine.submit(0, range(4 * block_size))
    engine.drain()
    for request_id in range(1, 6):
        engine.submit(request_id, range(4 * block_size + 1), 5)
    engine.step()
    blocks = engine.rank.blocks
    assert blocks["refs"].max() == 5
    for request_id in range(1, 6):
        engine.cancel(request_id)
        engine.rank.check_integrity()
        assert engine.rank.blocks["refs"].min() >= 0
    assert engine.active == 0
    assert engine.rank.header["num_free"][0] + engine.inactive == 32
