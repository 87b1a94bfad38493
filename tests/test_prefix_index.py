"""The index of findable blocks and the queue of inactive ones, where they are wide (spec/kv-cache.md sections 2, 3)."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.layout import BlockFlag
from support import Engine, inactive_blocks

SIZE = 4


def engine(blocks: int, **options: object) -> Engine:
    return Engine(block_size=SIZE, num_gpu_blocks=blocks, max_num_batched_tokens=None, **options)


def cached(engine: Engine, request_id: int, prompt: list[int]) -> int:
    """Run a request that emits one token; tokens of its prompt that were found."""
    engine.submit(request_id, prompt, 1)
    admitted = {}
    for step in engine.drain():
        admitted.update(step.admitted)
    return int(admitted[request_id])


def flags(engine: Engine, flag: BlockFlag) -> int:
    return int(np.count_nonzero(engine.rank.blocks["hashed"] & flag))


def own(request_id: int) -> list[int]:
    return [1000 + request_id] * SIZE


@pytest.mark.parametrize("width", [1, 2, 40])
def test_prompts_that_part_behind_one_block_are_all_found(width: int) -> None:
    system = list(range(2 * SIZE))
    rank = engine(4 * width + 16)
    for request_id in range(width):
        assert cached(rank, request_id, system + own(request_id) + [7]) == (2 * SIZE if request_id else 0)
    for request_id in range(width):
        assert cached(rank, width + request_id, system + own(request_id) + [7]) == 3 * SIZE
    # The first block of all, and all but one of those where they part.
    assert flags(rank, BlockFlag.ROOTED) == width
    assert flags(rank, BlockFlag.BRANCHED) == (width > 1)
    assert cached(rank, 2 * width, system + own(-1)) == 2 * SIZE


def test_a_place_that_was_evicted_is_taken_again_and_the_others_stay() -> None:
    system = list(range(SIZE))
    rank = engine(4)
    for request_id in (0, 1, 2):
        cached(rank, request_id, system + own(request_id))
    # A fourth branch takes the block of the first, which was the one found through its parent.
    assert cached(rank, 3, system + own(3)) == SIZE
    assert cached(rank, 4, [*system, *own(1), 9]) == 2 * SIZE
    assert cached(rank, 5, [*system, *own(3), 9]) == 2 * SIZE
    assert cached(rank, 6, [*system, *own(0)]) == SIZE


def test_a_full_hit_leaves_a_copy_each_time_and_the_oldest_is_found() -> None:
    prompt = list(range(2 * SIZE))
    rank = engine(8)
    cached(rank, 0, prompt)
    for request_id in range(1, 7):
        assert cached(rank, request_id, prompt) == SIZE  # its last block is computed again
        assert flags(rank, BlockFlag.NEWER) == request_id
    assert flags(rank, BlockFlag.COPIED) == 1
    oldest = int(np.flatnonzero(rank.rank.blocks["hashed"] & BlockFlag.COPIED)[0])
    assert inactive_blocks(rank.rank)[0] == oldest
    # The pool is full: the oldest copy goes, and the next older takes its place, until none is left.
    for request_id in range(7, 12):
        cached(rank, request_id, own(request_id))
        assert flags(rank, BlockFlag.NEWER) == 12 - request_id
        assert flags(rank, BlockFlag.COPIED) == 1
        assert not rank.rank.blocks["hashed"][oldest] & BlockFlag.COPIED
    assert cached(rank, 12, [*prompt, 9]) == 2 * SIZE


def test_what_is_behind_a_block_is_found_behind_its_copy_when_the_block_has_gone() -> None:
    prompt = list(range(2 * SIZE))
    rank = engine(6)
    cached(rank, 0, prompt)
    cached(rank, 1, prompt)
    # It owns a copy of the last block of its prompt; what it emits stands behind the oldest copy in the index.
    rank.submit(2, prompt, SIZE + 1)
    emitted = [output.token_id for step in rank.drain() for output in step.outputs]
    assert flags(rank, BlockFlag.NEWER) == 2
    for request_id, copies in ((10, 2), (11, 1), (12, 0)):
        cached(rank, request_id, own(request_id))
        assert flags(rank, BlockFlag.NEWER) == copies
    assert cached(rank, 13, [*prompt, *emitted]) == 3 * SIZE


def test_the_queue_of_inactive_blocks_keeps_its_order_when_its_gaps_are_squeezed_out() -> None:
    rank = engine(8)
    for request_id in range(3):
        cached(rank, request_id, [*own(request_id), 7])
    state = rank.rank._state
    squeezed = 0
    for request_id in range(3, 60):
        before, tail = inactive_blocks(rank.rank), int(state.view("header")["inactive_tail"][0])
        # The last one is hit again and again; the others stay where they are.
        assert cached(rank, request_id, [*own(2), 7]) == SIZE
        assert inactive_blocks(rank.rank) == before
        squeezed += int(state.view("header")["inactive_tail"][0]) <= tail
    assert squeezed > 1
    assert len(state.view("inactive")) == 16


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_pool_of_very_few_blocks(blocks: int) -> None:
    rank = engine(blocks)
    for request_id in range(9):
        found = cached(rank, request_id, own(request_id % 2)[: SIZE if blocks > 1 else SIZE - 1])
        assert found == 0
