"""Random configurations, requests and scripts, small enough that pools run full all the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from kvsim.config import EngineConfig, FixedTiming, PolynomialTiming, SglangConfig
from kvsim.contract import RankIdentity, Request
from kvsim.layout import SEGMENT

RULESETS = st.sampled_from(["dynamo", "dynamo", "dynamo-1.3"])
#: Few enough that cancels hit and duplicates happen.
IDS = st.sampled_from([*range(1, 20), 2**64 - 1, 2**64, 2**128 - 1])
RATES = st.sampled_from(["1,1,1", "0,0,0", "0,1,1", "1,0,1", "0.5,0.5,0.5", "0.85,0.3,0.1", "0.25,1,0.75", None])


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    events = draw(st.booleans())
    nextn = draw(st.one_of(st.none(), st.integers(1, 3)))
    return EngineConfig(
        backend=draw(st.sampled_from(["vllm", "vllm", "trtllm"])),
        ruleset=draw(RULESETS),
        num_gpu_blocks=draw(st.sampled_from([8, 6, 10, 4, 12, 5, 7, 16, 3, 2, 1])),
        block_size=draw(st.sampled_from([4, 2, 3, 5])),
        max_model_len=draw(st.sampled_from([None, None, None, 30, 20, 9, 1])),
        max_num_seqs=draw(st.sampled_from([None, 4, 3, 2, 1, 6])),
        max_num_batched_tokens=draw(st.sampled_from([None, 16, 12, 20, 32, 8, 5, 3, 1])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        enable_chunked_prefill=draw(st.sampled_from([True, True, True, False])),
        preemption_mode=draw(st.sampled_from(["lifo", "fifo"])),
        worker_type=draw(st.sampled_from(["aggregated", "aggregated", "aggregated", "prefill", "decode"])),
        aic_nextn=nextn,
        aic_nextn_accept_rates=None if nextn is None else draw(RATES),
        aic_mtp_seed=draw(st.sampled_from([0, 42, 2**64 - 1])),
        emit_kv_events=events,
        emit_kv_token_ids=events and draw(st.booleans()),
        kv_transfer_bytes_per_token=draw(st.sampled_from([None, 1000])),
        kv_transfer_bandwidth=draw(st.sampled_from([None, 0.0, 0.5])),
        speedup_ratio=draw(st.sampled_from([0.0, 1.0, 1.7])),
        decode_speedup_ratio=1.0 if nextn is not None else draw(st.sampled_from([0.0, 1.0, 3.0])),
        timing_model=draw(
            st.sampled_from(
                [
                    PolynomialTiming(),
                    FixedTiming(prefill_ms=10.0, decode_ms=3.0),
                    FixedTiming(prefill_ms=0, decode_ms=0),
                ]
            )
        ),
    )


@st.composite
def radix_configs(draw: st.DrawFn) -> EngineConfig:
    page = draw(st.sampled_from([4, 1, 2, 16]))
    events = draw(st.booleans())
    nextn = draw(st.one_of(st.none(), st.none(), st.integers(1, 3)))
    return EngineConfig(
        backend="sglang",
        ruleset=draw(RULESETS),
        num_gpu_blocks=draw(st.sampled_from([8, 6, 12, 5, 7, 10, 16, 20, 30, 60, 4])),
        block_size=page,
        max_model_len=draw(st.sampled_from([None, None, None, None, 30, 20, 9, 1])),
        max_num_seqs=draw(st.sampled_from([None, 4, 3, 2, 1, 6])),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        worker_type=draw(st.sampled_from(["aggregated", "aggregated", "aggregated", "prefill", "decode"])),
        prefill_decode_interval=draw(st.sampled_from([0, 0, 0, 0, 1, 2, 5])),
        aic_nextn=nextn,
        aic_nextn_accept_rates=None if nextn is None else draw(RATES),
        aic_mtp_seed=draw(st.sampled_from([0, 42, 2**64 - 1])),
        emit_kv_events=events,
        emit_kv_token_ids=events and draw(st.booleans()),
        kv_transfer_bytes_per_token=draw(st.sampled_from([None, 1000])),
        kv_transfer_bandwidth=draw(st.sampled_from([None, 0.0, 0.5])),
        speedup_ratio=draw(st.sampled_from([0.0, 1.0, 1.7])),
        decode_speedup_ratio=1.0 if nextn is not None else draw(st.sampled_from([0.0, 1.0, 3.0])),
        timing_model=draw(
            st.sampled_from(
                [
                    PolynomialTiming(),
                    FixedTiming(prefill_ms=10.0, decode_ms=3.0),
                    FixedTiming(prefill_ms=0, decode_ms=0),
                ]
            )
        ),
        sglang=SglangConfig(
            schedule_policy=draw(st.sampled_from(["fifo", "lpm"])),
            chunked_prefill_size=page * draw(st.sampled_from([1, 2, 3, 4, 8, 100])),
            max_prefill_tokens=max(page, draw(st.sampled_from([16384, 16384, 8, 20, 35]))),
            clip_max_new_tokens=draw(st.sampled_from([4096, 0, 1, 3, 8])),
            schedule_conservativeness=draw(st.sampled_from([1.0, 0.0, 0.001, 0.3, 3.0])),
        ),
    )


IDENTITIES = st.sampled_from([RankIdentity(), RankIdentity(3, 1, 4), RankIdentity(2**64 - 1)])


LENGTHS = [8, 4, 12, 5, 9, 16, 7, 3, 1, 2, 6, 10, 20, 13, 24, 40]
#: Long enough for the prefix check of SGLang's queue order, too.
RADIX_LENGTHS = [*LENGTHS, 32, 33, 48, 70]


@st.composite
def requests(draw: st.DrawFn, lengths: Sequence[int] = tuple(LENGTHS)) -> Request:
    """Prompts are cuts of few families, so that prefixes meet; planned outputs continue the family."""
    length = draw(st.sampled_from(lengths))
    start, step = draw(st.sampled_from([(0, 1), (100, 1), (7, 0)]))
    common = min(length, draw(st.sampled_from([max(lengths), 8, 4, 5, 0])))
    request_id = draw(IDS)
    output = draw(st.sampled_from([4, 8, 2, 1, 0, 3, 12, 6, 20]))
    planned = None
    if draw(st.booleans()):
        # What a longer prompt of the same family would hold: generated blocks become prefixes of prompts.
        planned = [start + (length + i) * step for i in range(output)]
    if common == length and draw(st.booleans()):
        return Request.from_segments(request_id, np.array([(start, step, length)], SEGMENT), output, planned)
    tokens = [start + i * step for i in range(common)] + [
        2**32 - 1 - i - request_id % 3 for i in range(length - common)
    ]
    return Request(request_id, tokens, output, planned)


def steps(lengths: Sequence[int] = tuple(LENGTHS)) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.one_of(
        st.tuples(st.just("submit"), requests(lengths)),
        st.tuples(st.just("submit"), requests(lengths)),
        st.just(("pass",)),
        st.just(("pass",)),
        st.just(("execute",)),
        st.just(("complete",)),
        st.tuples(st.just("cancel"), IDS, st.booleans()),
    )


SCRIPTS = st.lists(steps(), min_size=6, max_size=40)
RADIX_SCRIPTS = st.lists(steps(RADIX_LENGTHS), min_size=6, max_size=40)


# ---------------------------------------------------------------- handoffs

#: Few enough that they are used again, also on both halves of a rank at once.
HANDOFF_IDS = st.sampled_from([1, 2, 3, 4, 5, 6, 2**64, 2**128 - 1])
#: One of the handoffs that a command concerns, or any id at all.
TARGETS = st.one_of(
    st.tuples(st.just("any"), st.integers(0, 3)),
    st.tuples(st.just("any"), st.integers(0, 3)),
    st.tuples(st.just("id"), HANDOFF_IDS),
)


@st.composite
def handoff_configs(draw: st.DrawFn, engine: st.SearchStrategy[EngineConfig]) -> EngineConfig:
    """Configurations as for ranks without handoffs, more often of a half of a disaggregated system."""
    config = draw(engine)
    worker = draw(st.sampled_from([config.worker_type, "prefill", "decode", "decode"]))
    mode = draw(st.sampled_from(["full_prompt", "destination_missing"]))
    # With drafts and small budgets, first-in victims can preempt each other for ever, handoffs or not.
    victims = "lifo" if config.aic_nextn is not None else config.preemption_mode
    return msgspec.structs.replace(config, worker_type=worker, kv_transfer_timing_mode=mode, preemption_mode=victims)


def handoff_steps(lengths: Sequence[int] = tuple(LENGTHS)) -> st.SearchStrategy[tuple[Any, ...]]:
    """Steps of a script with every command of a rank."""

    def new(action: str) -> st.SearchStrategy[tuple[Any, ...]]:
        return st.tuples(st.just(action), st.tuples(st.just("id"), HANDOFF_IDS), requests(lengths))

    known = ("activate", "activate", "activate", "release", "cancel_source", "cancel_destination")
    return st.one_of(
        steps(lengths),
        st.just(("pass",)),
        st.just(("execute",)),
        new("source"),
        new("source"),
        new("reserve"),
        new("reserve"),
        new("reserve"),
        *(st.tuples(st.just(action), TARGETS) for action in known),
    )


HANDOFF_SCRIPTS = st.lists(handoff_steps(), min_size=15, max_size=60)
RADIX_HANDOFF_SCRIPTS = st.lists(handoff_steps(RADIX_LENGTHS), min_size=15, max_size=60)
