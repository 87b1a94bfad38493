"""Random configurations, requests and scripts, small enough that pools run full all the time."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvsim.config import EngineConfig, FixedTiming, PolynomialTiming
from kvsim.contract import RankIdentity, Request
from kvsim.layout import SEGMENT

IDS = st.one_of(st.integers(1, 6), st.integers(2**64 - 1, 2**64 + 1), st.just(2**128 - 1))
RATES = st.sampled_from(["1,1,1", "0,0,0", "0,1,1", "1,0,1", "0.5,0.5,0.5", "0.85,0.3,0.1", "0.25,1,0.75", None])


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    events = draw(st.booleans())
    nextn = draw(st.one_of(st.none(), st.integers(1, 3)))
    return EngineConfig(
        backend=draw(st.sampled_from(["vllm", "vllm", "trtllm"])),
        ruleset=draw(st.sampled_from(["dynamo", "dynamo", "dynamo-1.3"])),
        num_gpu_blocks=draw(st.integers(1, 12)),
        block_size=draw(st.integers(2, 5)),
        max_model_len=draw(st.one_of(st.none(), st.none(), st.integers(1, 40))),
        max_num_seqs=draw(st.one_of(st.none(), st.integers(1, 5))),
        max_num_batched_tokens=draw(st.one_of(st.none(), st.integers(1, 20))),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=draw(st.booleans()),
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
                [PolynomialTiming(), FixedTiming(prefill_ms=10.0, decode_ms=3.0), FixedTiming(prefill_ms=0, decode_ms=0)]
            )
        ),
    )


IDENTITIES = st.sampled_from([RankIdentity(), RankIdentity(3, 1, 4), RankIdentity(2**64 - 1)])


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Prompts are cuts of few families, so that prefixes meet; outputs continue some of them."""
    length = draw(st.one_of(st.integers(1, 12), st.integers(1, 50)))
    family = draw(st.integers(0, 3))
    start, step = (7, 0) if family == 3 else (family * 100, 1)
    odd = draw(st.integers(0, length)) if draw(st.booleans()) else length
    request_id = draw(IDS)
    output = draw(st.one_of(st.integers(0, 3), st.integers(0, 14)))
    planned = None
    if draw(st.booleans()):
        # What a longer prompt of the same family would hold: generated blocks become prefixes of prompts.
        planned = [(start + (length + i) * step) for i in range(output)]
    if odd == length and draw(st.booleans()):
        return Request.from_segments(request_id, np.array([(start, step, length)], SEGMENT), output, planned)
    tokens = [start + i * step for i in range(odd)] + [2**32 - 1 - i for i in range(length - odd)]
    return Request(request_id, tokens, output, planned)


def steps() -> st.SearchStrategy[tuple[Any, ...]]:
    return st.one_of(
        st.tuples(st.just("submit"), requests()),
        st.tuples(st.just("submit"), requests()),
        st.just(("pass",)),
        st.just(("pass",)),
        st.just(("execute",)),
        st.just(("complete",)),
        st.tuples(st.just("cancel"), IDS, st.booleans()),
    )


SCRIPTS = st.lists(steps(), min_size=1, max_size=25)
