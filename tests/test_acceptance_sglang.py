"""Scenarios of the SGLang acceptance list that need one rank and no handoff.

Names carry the number of the scenario. Ruleset ``dynamo`` (REF) unless a test says ``dynamo-1.3`` (LEGACY). Where the
list was worked out from an older generation and the specification was corrected against recorded runs, the numbers of
the list are those of ``dynamo-1.3``, and ``dynamo`` has what the specification gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kv_index import KvIndex
from kvsim.config import FixedTiming, SglangConfig
from kvsim.contract import (
    Applied,
    CancelRequest,
    CommandContext,
    Noop,
    PressureState,
    RankIdentity,
    Removed,
    Request,
    SameTimestampRetry,
    Stored,
    Submit,
)
from kvsim.errors import CommandError
from kvsim.layout import RUN
from model.hashing import chain, local_hash
from support import Engine, Step

REF, LEGACY = "dynamo", "dynamo-1.3"
BOTH = pytest.mark.parametrize("ruleset", [REF, LEGACY])
MS = 1e-6


class Sglang(Engine):
    """An `Engine` of the radix backend; short names as in the acceptance list."""

    def __init__(
        self,
        ruleset: str = REF,
        *,
        blk: int = 16,
        bs: int = 4,
        chunk: int = 8192,
        max_prefill: int = 16384,
        policy: str = "fifo",
        clip: int = 4096,
        conservativeness: float = 1.0,
        identity: RankIdentity | None = None,
        **fields: Any,
    ) -> None:
        options = SglangConfig(
            schedule_policy=policy,  # type: ignore[arg-type]
            max_prefill_tokens=max_prefill,
            chunked_prefill_size=chunk,
            clip_max_new_tokens=clip,
            schedule_conservativeness=conservativeness,
        )
        super().__init__(
            identity, backend="sglang", ruleset=ruleset, num_gpu_blocks=blk, block_size=bs, sglang=options, **fields
        )

    @property
    def radix(self) -> Any:
        return self.rank._state.view("radix")[0]

    @property
    def ratio(self) -> float:
        return float(self.radix["new_token_ratio"])

    @property
    def available(self) -> int:
        return int(self.radix["available"]) * self.config.tokens_per_block

    @property
    def evictable(self) -> int:
        return int(self.radix["evictable"]) * self.config.tokens_per_block

    @property
    def protected(self) -> int:
        return int(self.radix["protected"]) * self.config.tokens_per_block

    @property
    def occupied(self) -> int:
        return self.config.num_gpu_blocks * self.config.tokens_per_block - self.available

    def cached(self, tokens: Any) -> int:
        """Tokens of this prompt that the tree holds; nothing is touched."""
        size, tokens = self.config.tokens_per_block, list(tokens)
        rows = np.zeros(len(tokens) // size, RUN)
        rows["key"] = [local_hash(tokens[i * size : (i + 1) * size]) for i in range(len(rows))]
        rows["pages"] = 1
        return int(self.rank._state.tree_match_length(rows, len(rows))) * size

    def fill(self, request_id: int, tokens: Any) -> None:
        """Run a request without output, so that its prompt stays in the cache."""
        self.submit(request_id, tokens, 0)
        while self.rank.request_row(request_id) is not None:
            self.step()

    def counters(self, step: Step) -> tuple[int, int]:
        metrics = step.effects.metrics
        return metrics.sglang_cache_hit_tokens, metrics.sglang_cache_total_tokens


def sizes(step: Step) -> list[tuple[str, int]]:
    """Kind and number of blocks of every event of a pass."""
    return [
        (
            type(event.data).__name__,
            len(event.data.blocks if isinstance(event.data, Stored) else event.data.block_hashes),
        )
        for event in step.events
    ]


def index(steps: list[Step]) -> KvIndex:
    router = KvIndex()
    for step in steps:
        router.replay(step.events)
    return router


# ---------------------------------------------------------------- C and D


def fixed(**fields: Any) -> Sglang:
    return Sglang(blk=8, max_num_seqs=2, timing_model=FixedTiming(prefill_ms=10, decode_ms=10), **fields)


@BOTH
def test_c1_cancelling_an_unfinished_request_mid_pass_withdraws_its_output(ruleset: str) -> None:
    engine = fixed(ruleset=ruleset)
    engine.submit(1, [1, 2, 3, 4], planned=[5, 6])
    outcome = engine.rank.execute_pass(0.0)
    effects = engine.rank.apply_command(CancelRequest(1), CommandContext(1.0, True), outcome.pending)
    assert effects.result == Applied()
    assert effects.suppressed_pending_output
    assert list(outcome.pending.effects.outputs) == []


@BOTH
@pytest.mark.parametrize(("discard", "kept"), [(False, [5]), (True, [])])
def test_c2_c3_what_finished_in_the_pass_keeps_its_output_unless_discarded(
    ruleset: str, discard: bool, kept: list[int]
) -> None:
    engine = fixed(ruleset=ruleset)
    engine.submit(1, [1, 2, 3, 4], planned=[5])
    outcome = engine.rank.execute_pass(0.0)
    effects = engine.rank.apply_command(CancelRequest(1, discard), CommandContext(1.0, True), outcome.pending)
    assert effects.result == Noop()
    assert effects.suppressed_pending_output is discard
    assert [output.token_id for output in outcome.pending.effects.outputs] == kept


@BOTH
def test_c6_a_duplicate_submit_is_refused_and_changes_nothing(ruleset: str) -> None:
    engine = fixed(ruleset=ruleset, emit_kv_events=True)
    engine.submit(1, [1, 2, 3, 4], planned=[5, 6, 7])
    engine.step()
    before, metrics = engine.rank.digest(), engine.rank.metrics()
    with pytest.raises(CommandError, match="already active"):
        engine.submit(1, [9, 9], 1)
    assert engine.rank.digest() == before
    assert engine.rank.metrics() == metrics


@BOTH
def test_c7_internal_work_mid_pass_shows_nothing_and_events_wait_for_the_end(ruleset: str) -> None:
    engine = fixed(ruleset=ruleset, emit_kv_events=True)
    engine.submit(1, [1, 2, 3, 4], planned=[5])
    outcome = engine.rank.execute_pass(0.0)
    effects = engine.rank.apply_command(
        Submit(Request(2, [7, 8, 9, 10], 1)), CommandContext(1.0, True), outcome.pending
    )
    assert list(effects.kv_events) == []
    work = engine.rank.process_internal_work(2.0, True)
    assert list(work.kv_events) == []
    assert list(outcome.start_effects.kv_events) == []
    shown = engine.rank.complete_pass(outcome.pending, outcome.end_ms)
    assert len(shown.kv_events) == 1


@BOTH
def test_d1_events_are_shown_at_the_end_of_the_pass(ruleset: str) -> None:
    engine = Sglang(ruleset, blk=8, chunk=16, max_num_seqs=1, emit_kv_events=True)
    engine.submit(1, [1] * 8, 1)
    step = engine.step()
    assert list(step.start.kv_events) == []
    [event] = step.effects.kv_events
    assert event.event_id == 0
    assert event.data.parent_hash is None
    first, second = event.data.blocks
    assert first.tokens_hash == second.tokens_hash
    assert first.block_hash != second.block_hash
    assert step.end_ms == pytest.approx(16.622914 if ruleset == REF else 34.256664, abs=MS)
    assert step.fpm.num_prefill_requests == 1


# ---------------------------------------------------------------- G: order of the queue


def queue_after_a_pass(engine: Sglang, prompts: list[Any]) -> list[int]:
    """Ids of waiting requests, numbered from 0, after a pass in which all slots are taken."""
    engine.submit(1000, [10**6 + i for i in range(engine.config.tokens_per_block)], 50)
    engine.step()
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, 4)
    engine.step()
    assert engine.ids("running") == [1000]
    return engine.ids("waiting")


@BOTH
def test_g1_the_longest_cached_prefix_goes_first(ruleset: str) -> None:
    engine = Sglang(ruleset, blk=1000, bs=1, policy="lpm", max_num_seqs=1)
    engine.fill(1001, [1, 2, 3, 4, 5])
    assert queue_after_a_pass(engine, [[9, 8, 7], [1, 2, 3, 4, 5, 6, 7]]) == [1, 0]


@BOTH
def test_g2_all_but_the_first_of_equal_beginnings_go_last(ruleset: str) -> None:
    engine = Sglang(ruleset, blk=4000, bs=1, policy="lpm", max_num_seqs=1)
    order = queue_after_a_pass(engine, [range(32)] * 33 + [range(100, 132)])
    assert order == [0, 33, *range(1, 33)]


@pytest.mark.parametrize("case", ["129 waiting", "caching off", "fifo"])
def test_g3_the_order_is_kept_when_it_is_not_asked_for(case: str) -> None:
    policy = "fifo" if case == "fifo" else "lpm"
    engine = Sglang(blk=9000, bs=1, policy=policy, max_num_seqs=1, enable_prefix_caching=case != "caching off")
    if case != "caching off":
        engine.fill(1001, range(100, 132))
    prompts = [range(32)] * (128 if case == "129 waiting" else 40) + [range(100, 140)]
    assert queue_after_a_pass(engine, prompts) == list(range(len(prompts)))


def test_g3_128_waiting_are_still_ordered() -> None:
    engine = Sglang(blk=9000, bs=1, policy="lpm", max_num_seqs=1)
    engine.fill(1001, range(100, 132))
    assert queue_after_a_pass(engine, [range(32)] * 127 + [range(100, 140)])[0] == 127


def test_g4_short_or_cached_duplicates_are_not_put_last() -> None:
    engine = Sglang(blk=4000, bs=1, policy="lpm", max_num_seqs=1)
    assert queue_after_a_pass(engine, [range(31), range(31), range(100, 140)]) == [0, 1, 2]
    engine = Sglang(blk=4000, bs=1, policy="lpm", max_num_seqs=1)
    engine.fill(1001, range(33))
    assert queue_after_a_pass(engine, [range(200, 240), range(40), range(40)]) == [1, 2, 0]


# ---------------------------------------------------------------- H: passes


def test_h1_a_request_without_output_ends_in_its_prefill_pass() -> None:
    engine = Sglang(blk=32, chunk=16)
    engine.submit(1, range(4), 0)
    step = engine.step()
    assert [(o.token_id, o.completed, o.rejected) for o in step.outputs] == [(None, True, False)]
    assert step.fpm.num_decode_requests == 0
    assert step.end_ms == pytest.approx(16.56216, abs=MS)
    assert engine.ratio == 0.7
    assert engine.rank.is_drained()


def test_h2_a_hopeless_prompt_asks_for_600_retries_and_no_more() -> None:
    engine = Sglang(blk=1, chunk=8)
    engine.submit(1, range(8), 2)
    hints = []
    while True:
        outcome = engine.rank.execute_pass(37.0)
        assert outcome.end_ms == 37.0
        shown = engine.rank.complete_pass(outcome.pending, 37.0)
        assert not shown.outputs
        assert not outcome.start_effects.admissions
        if outcome.same_timestamp_retry is not SameTimestampRetry.RETRY:
            break
        assert engine.rank.stuck_head() is None
        hints.append(outcome.same_timestamp_retry)
    assert outcome.same_timestamp_retry is SameTimestampRetry.EXHAUSTED
    assert len(hints) == 600
    assert engine.ratio == pytest.approx(0.098, abs=1e-12)
    assert engine.ids("waiting") == [1]
    assert engine.rank.stuck_head().request_id == 1


@pytest.mark.parametrize(("ruleset", "passes"), [(REF, {7: 2}), (LEGACY, {2: 1, 6: 1})])
def test_h3_planned_tokens_come_in_order_and_complete_pages_are_stored(ruleset: str, passes: dict[int, int]) -> None:
    # REF publishes generated pages when the request finishes, which needs a slot for the last token, too.
    engine = Sglang(ruleset, blk=100, chunk=8, emit_kv_events=True)
    plan = [11, 12, 13, 14, 15, 16, 17]
    engine.submit(1, [1, 2], planned=plan)
    steps = [engine.step(at=float(i)) for i in range(7)]
    assert [token for step in steps for _, token in step.tokens] == plan
    assert engine.rank.is_drained()
    stored = {number: sum(len(data.blocks) for data in step.stored) for number, step in enumerate(steps, 1)}
    assert {number: count for number, count in stored.items() if count} == passes
    hashes = [block.block_hash for step in steps for data in step.stored for block in data.blocks]
    assert hashes == [block for block, _ in chain([1, 2, *plan], 4)]


def test_h4_a_first_chunk_is_admitted_although_the_whole_prompt_never_fits() -> None:
    engine = Sglang(blk=3, chunk=8)
    engine.submit(1, range(16), 2)
    step = engine.step()
    assert step.admitted == {1: 0}
    assert step.fpm.sum_prefill_tokens == 8
    digest = None
    for _ in range(700):
        step = engine.step()
        assert not step.outputs
        assert step.end_ms == step.start_ms
        if engine.rank.stuck_head() is not None:
            digest = engine.rank.digest()
            break
    assert digest is not None
    ended = engine.rank.fail_head()
    assert (ended.request_id, ended.completed, ended.failed, ended.rejected) == (1, True, True, False)
    assert engine.available + engine.evictable == 12


def test_h5_an_admission_owns_whole_pages() -> None:
    engine = Sglang(blk=100, chunk=8)
    engine.submit(1, range(6), 3)
    engine.step()
    # Six prompt tokens and the first generated one.
    assert (engine.row(1)["computed"], engine.row(1)["allocated"]) == (7, 8)


def test_h6_a_chunk_is_charged_in_pages() -> None:
    engine = Sglang(blk=100, chunk=8)
    engine.submit(1, range(7), 3)
    engine.submit(2, range(100, 108), 3)
    step = engine.step()
    assert list(step.admitted) == [1]
    assert engine.ids("waiting") == [2]


def test_h7_decoding_takes_a_page_only_when_one_is_full() -> None:
    engine = Sglang(blk=100)
    engine.submit(1, range(6), 4)
    allocated = []
    for _ in range(3):
        step = engine.step()
        assert len(step.outputs) == 1
        allocated.append(int(engine.row(1)["allocated"]))
    assert allocated == [8, 8, 12]


@pytest.mark.parametrize(("decode_speedup", "expected"), [(1.0, 2.871648), (4.0, 0.717912)])
def test_h8_the_decode_speedup_divides_decode_passes(decode_speedup: float, expected: float) -> None:
    engine = Sglang(blk=16384, speedup_ratio=2.0, decode_speedup_ratio=decode_speedup)
    engine.submit(1, range(3), 3)
    engine.step()
    step = engine.step()
    assert step.fpm.sum_decode_kv_tokens == 4
    assert step.end_ms - step.start_ms == pytest.approx(expected, abs=MS)


def test_h9_the_prompt_of_a_running_request_is_findable() -> None:
    engine = Sglang()
    engine.submit(1, range(4), 4)
    engine.step()
    engine.step()
    assert engine.row(1) is not None
    assert engine.cached(range(4)) == 4


def test_h10_active_blocks_are_those_in_use() -> None:
    engine = Sglang(blk=32, chunk=8, speedup_ratio=1.0)
    engine.submit(1, range(6), 2)
    step = engine.step()
    assert step.ended == []
    assert engine.active == 2


@BOTH
def test_h11_events_carry_worker_and_rank(ruleset: str) -> None:
    engine = Sglang(ruleset, blk=32, chunk=4, emit_kv_events=True, identity=RankIdentity(17))
    engine.submit(1, range(4), 1)
    step = engine.step()
    assert not step.start.kv_events
    assert step.effects.kv_events
    assert {(event.worker_id, event.dp_rank) for event in step.effects.kv_events} == {(17, 0)}


def test_h12_a_prefill_worker_reports_the_handoff_delay() -> None:
    engine = Sglang(
        blk=64, chunk=16, worker_type="prefill", kv_transfer_bandwidth=1.0, kv_transfer_bytes_per_token=1_000_000
    )
    engine.submit(1, range(8), 1)
    [output] = engine.step().outputs
    assert output.completed
    assert output.handoff_delay_ms == pytest.approx(8.0)


@pytest.mark.parametrize(("ruleset", "decodes", "end_ms"), [(REF, 0, 16.622914), (LEGACY, 1, 28.711977)])
def test_h13_a_prefill_pass_decodes_nothing_in_ref(ruleset: str, decodes: int, end_ms: float) -> None:
    engine = Sglang(ruleset, chunk=16, max_num_seqs=4)
    engine.submit(1, range(8), 1)
    step = engine.step()
    assert (step.fpm.num_prefill_requests, step.fpm.sum_prefill_tokens) == (1, 8)
    assert step.fpm.num_decode_requests == decodes
    assert (step.fpm.num_queued_prefill, step.fpm.num_queued_decode) == (0, 0)
    assert step.end_ms == pytest.approx(end_ms, abs=MS)
    assert step.ended == [(1, False)]


def test_h14_a_new_prompt_stalls_those_that_run() -> None:
    engine = Sglang(chunk=16, max_num_seqs=4)
    engine.submit(1, range(4), 3)
    first = engine.step(at=0.0)
    assert (first.fpm.num_prefill_requests, [request for request, _ in first.tokens]) == (1, [1])
    engine.submit(2, range(100, 104), 3)
    second = engine.step(at=1.0)
    assert (second.fpm.num_prefill_requests, second.fpm.num_decode_requests) == (1, 0)
    assert second.fpm.sum_decode_kv_tokens == 0
    assert [request for request, _ in second.tokens] == [2]
    assert engine.ids("running") == [1, 2]
    assert [int(engine.row(i)["generated"]) for i in (1, 2)] == [1, 1]
    third = engine.step()
    assert (third.fpm.num_prefill_requests, third.fpm.num_decode_requests) == (0, 2)
    assert third.fpm.sum_decode_kv_tokens == 10
    assert [request for request, _ in third.tokens] == [1, 2]
    assert third.end_ms == pytest.approx(31.112805, abs=MS)


def test_h14_in_generation_1_3_all_decode_in_every_pass() -> None:
    engine = Sglang(LEGACY, chunk=16, max_num_seqs=4)
    engine.submit(1, range(4), 3)
    engine.step(at=0.0)
    engine.submit(2, range(100, 104), 3)
    second = engine.step(at=1.0)
    assert (second.fpm.num_prefill_requests, second.fpm.num_decode_requests) == (1, 2)
    assert [request for request, _ in second.tokens] == [1, 2]


def test_h15_a_cached_page_is_not_computed_again() -> None:
    engine = Sglang(chunk=16, max_num_seqs=4)
    engine.submit(1, range(8), 2)
    assert engine.counters(engine.step()) == (0, 8)
    engine.submit(2, range(8), 1)
    step = engine.step()
    assert engine.counters(step) == (4, 8)
    assert step.admitted == {2: 4}
    assert step.fpm.sum_prefill_tokens == 4
    assert step.ended == [(2, False)]


def test_h16_without_caching_nothing_stays() -> None:
    engine = Sglang(chunk=16, max_num_seqs=4, enable_prefix_caching=False)
    for request_id in (1, 2):
        engine.submit(request_id, range(8), 0)
        step = engine.step()
        assert step.ended == [(request_id, False)]
        assert engine.counters(step) == (0, 8)
        assert step.fpm.num_prefill_requests == 1
        assert engine.available == 64


def test_h17_a_prompt_without_output_that_is_cached_whole_costs_nothing() -> None:
    engine = Sglang(chunk=16, max_num_seqs=4)
    engine.submit(1, range(8), 0)
    engine.step()
    engine.submit(2, range(8), 0)
    step = engine.step()
    assert step.tokens == [(2, None)]
    assert step.ended == [(2, False)]
    assert engine.counters(step) == (8, 8)
    assert (step.fpm.num_prefill_requests, step.fpm.sum_prefill_tokens, step.fpm.num_decode_requests) == (0, 0, 0)
    assert step.end_ms == step.start_ms


@BOTH
def test_h18_a_pass_of_an_empty_rank_has_metrics_of_zero(ruleset: str) -> None:
    engine = Sglang(ruleset, chunk=16)
    step = engine.step()
    assert step.end_ms == 0.0
    assert list(step.fpm) == [0] * len(step.fpm)


def test_h19_a_prompt_behind_the_budget_is_queued() -> None:
    engine = Sglang(blk=4, chunk=8, max_num_seqs=2)
    engine.submit(1, range(8), 1)
    engine.submit(2, range(100, 108), 1)
    step = engine.step()
    assert (step.fpm.num_prefill_requests, step.fpm.num_queued_prefill) == (1, 1)


def test_h20_the_variance_is_over_whole_prompts_and_the_mean_is_floored() -> None:
    engine = Sglang(blk=32, chunk=32)
    engine.submit(1, range(4), 1)
    engine.submit(2, range(100, 112), 1)
    step = engine.step()
    assert step.fpm.num_prefill_requests == 2
    assert step.fpm.var_prefill_length == 16.0
    assert step.end_ms == pytest.approx(16.744463, abs=MS)


def test_h21_a_long_prompt_is_computed_in_chunks() -> None:
    engine = Sglang(blk=32, chunk=8)
    engine.submit(1, range(16), 2)
    first = engine.step(at=0.0)
    assert (first.fpm.num_prefill_requests, first.fpm.sum_prefill_tokens) == (1, 8)
    assert first.outputs == []
    second = engine.step(at=1.0)
    assert (second.fpm.num_prefill_requests, second.fpm.sum_prefill_tokens) == (1, 8)
    assert second.fpm.sum_prefill_kv_tokens == 8
    assert second.admitted == {}
    assert len(second.outputs) == 1
    third = engine.step()
    assert third.ended == [(1, False)]
    assert third.end_ms == pytest.approx(30.082085, abs=MS)
    assert engine.occupied == 16


def test_h22_nothing_is_admitted_when_the_outputs_would_fill_the_pool() -> None:
    engine = Sglang(blk=6, chunk=32, max_num_seqs=4)
    engine.submit(1, range(4), 20)
    engine.submit(2, range(100, 104), 20)
    for _ in range(4):
        assert engine.step().admitted == {}
    engine.submit(3, range(200, 212), 10)
    step = engine.step()
    assert step.admitted == {}
    assert (step.fpm.num_queued_prefill, step.fpm.sum_queued_prefill_tokens) == (3, 20)
    assert step.fpm.num_queued_decode == 0


def page_one() -> Sglang:
    return Sglang(bs=1, blk=256, chunk=6, max_prefill=6, max_num_seqs=4)


def test_h23_only_what_is_not_cached_is_charged() -> None:
    engine = page_one()
    engine.fill(1, range(12))
    engine.submit(2, [*range(10), 50, 51, 52, 53], 1)
    step = engine.step()
    assert (step.fpm.num_prefill_requests, step.fpm.sum_prefill_tokens) == (1, 4)
    assert engine.ids("waiting") == []
    assert step.end_ms > step.start_ms
    assert step.admitted == {2: 10}
    assert engine.counters(step) == (10, 14)


def test_h24_a_cached_prompt_computes_its_last_token() -> None:
    engine = page_one()
    engine.fill(1, range(5))
    free = engine.available
    engine.submit(2, range(5), 2)
    step = engine.step()
    assert (step.fpm.num_prefill_requests, step.fpm.sum_prefill_tokens) == (1, 1)
    assert engine.ids("running") == [2]
    # The recomputed token of the prompt is a duplicate and goes back; the generated one stays.
    assert engine.available == free - 1


def test_h25_cached_prompts_leave_budget_to_others() -> None:
    engine = page_one()
    engine.fill(1, range(20))
    engine.submit(2, [*range(20), 50, 51, 52, 53], 2)
    engine.submit(3, [60, 61], 2)
    step = engine.step()
    assert (step.fpm.num_prefill_requests, step.fpm.sum_prefill_tokens) == (2, 6)
    assert engine.ids("running") == [2, 3]
    assert engine.ids("waiting") == []


def test_h26_a_later_chunk_is_no_admission_and_no_cache_hit() -> None:
    engine = page_one()
    engine.submit(1, range(12), 2)
    first = engine.step()
    assert engine.counters(first) == (0, 6)
    assert first.admitted == {1: 0}
    second = engine.step()
    assert second.admitted == {}
    assert engine.counters(second) == (0, 6)
    assert (second.fpm.sum_prefill_tokens, second.fpm.sum_prefill_kv_tokens) == (6, 6)


def test_h27_a_last_token_needs_no_page() -> None:
    engine = Sglang(blk=3, chunk=16, max_num_seqs=4)
    engine.submit(1, range(4), 1)
    engine.submit(2, range(100, 104), 1)
    step = engine.step()
    assert list(step.admitted) == [1, 2]
    assert step.ended == [(1, False), (2, False)]
    assert not step.start.pressure_events
    assert engine.occupied == 8


def test_h28_a_request_of_two_tokens_takes_two_passes() -> None:
    engine = Sglang(blk=3, chunk=16, max_num_seqs=4)
    engine.submit(1, range(4), 2)
    first = engine.step()
    assert first.ended == []
    assert not first.start.pressure_events
    assert first.fpm.num_decode_requests == 0
    assert int(engine.row(1)["generated"]) == 1
    second = engine.step()
    assert second.ended == [(1, False)]
    assert second.end_ms == pytest.approx(40.337577, abs=MS)


def test_h30_cancelling_returns_every_page() -> None:
    engine = Sglang(blk=32, chunk=32)
    plan = list(range(100, 108))
    engine.submit(1, range(8), planned=plan)
    engine.drain()
    assert engine.available + engine.evictable == 128
    engine.submit(2, range(8), planned=plan)
    engine.step()
    for _ in range(5):
        engine.step()
    assert engine.row(2)["status"] == 2
    assert engine.cancel(2).result == Applied()
    assert engine.available + engine.evictable == 128
    assert engine.protected == 0
    engine.rank.check_integrity()


def test_h31_bursts_follow_the_running_order() -> None:
    engine = Sglang(blk=32, chunk=16, aic_nextn=2, aic_nextn_accept_rates="1,1")
    engine.submit(1, range(4), 5)
    engine.submit(2, range(10, 14), 8)
    engine.submit(3, range(20, 24), 8)
    steps = engine.drain()
    assert [[request for request, _ in step.tokens] for step in steps] == [
        [1, 2, 3],
        [1, 1, 1, 2, 2, 2, 3, 3, 3],
        [1, 2, 2, 2, 3, 3, 3],
        [2, 3],
    ]
    assert [[request for request, _ in step.ended] for step in steps] == [[], [], [1], [2, 3]]
    assert steps[1].fpm.num_decode_requests == 3
    assert [step.end_ms for step in steps] == pytest.approx([16.683682, 28.399494, 43.361447, 57.62403], abs=MS)


def test_h31_in_generation_1_3_the_first_pass_bursts_too() -> None:
    engine = Sglang(LEGACY, blk=32, chunk=16, aic_nextn=2, aic_nextn_accept_rates="1,1")
    engine.submit(1, range(4), 5)
    engine.submit(2, range(10, 14), 8)
    engine.submit(3, range(20, 24), 8)
    steps = engine.drain()
    assert [[request for request, _ in step.tokens] for step in steps] == [
        [1, 1, 1, 2, 2, 2, 3, 3, 3],
        [1, 1, 2, 2, 2, 3, 3, 3],
        [2, 2, 3, 3],
    ]
    assert [[request for request, _ in step.ended] for step in steps] == [[], [1], [2, 3]]


@BOTH
def test_h32_speculation_on_a_tiny_pool_drains(ruleset: str) -> None:
    engine = Sglang(
        ruleset, blk=5, chunk=4, max_num_seqs=4, aic_nextn=2, aic_nextn_accept_rates="0,1", emit_kv_events=True
    )
    engine.submit(1, range(6), 7)
    engine.submit(2, range(100, 104), 5)
    steps = engine.drain(100)
    assert len(steps) == 13
    assert sum(len(step.outputs) for step in steps) == 12
    assert index(steps).removals >= 1


@BOTH
def test_h33_one_token_prompts_all_finish_on_a_tiny_pool(ruleset: str) -> None:
    engine = Sglang(ruleset, blk=4, chunk=4, emit_kv_events=True)
    for request_id in range(1, 9):
        engine.submit(request_id, [42], 4)
    steps = engine.drain(100)
    assert sum(len(step.outputs) for step in steps) == 32
    router = index(steps)
    assert router.removals >= 1
    if ruleset == REF:
        events = [kind for step in steps for kind, _ in sizes(step)]
        assert (len(steps), events.count("Stored"), events.count("Removed")) == (20, 8, 3)


@pytest.mark.parametrize(("running", "admitted"), [(10, False), (20, True), (30, True)])
def test_reserved_outputs_are_added_one_by_one(running: int, admitted: bool) -> None:
    # 10 times 0.7 sums to more than 7, 20 times to less than 14: the rounding decides what just fits (probed).
    engine = Sglang(bs=1, blk=4 * running)
    for request_id in range(running):
        engine.submit(request_id, [1000 + request_id], 2)
    engine.step()
    assert engine.ratio == 0.7
    prompt = 2 * running - 7 * running // 10 - 1
    engine.submit(99, range(prompt), 1)
    assert list(engine.step().admitted) == ([99] if admitted else [])


# ---------------------------------------------------------------- I: retraction


def test_i1_the_request_with_fewer_outputs_is_retracted_and_keeps_them() -> None:
    engine = Sglang(blk=4, clip=0, conservativeness=0.0001)
    engine.submit(1, range(4), 10)
    engine.step()
    engine.step()
    engine.submit(2, range(100, 104), 10)
    engine.step()
    for _ in range(4):
        step = engine.step()
        if step.start.pressure_events:
            break
    [event] = step.start.pressure_events
    assert event.request_id == 2
    assert engine.ids("running") == [1]
    row = engine.row(2)
    assert int(row["generated"]) > 0
    assert (row["computed"], row["allocated"], row["n_blocks"]) == (0, 0, 0)


def test_i2_the_ratio_is_estimated_before_the_forward() -> None:
    engine = Sglang(blk=3, chunk=16, max_num_seqs=4, clip=0, conservativeness=0.0001)
    engine.submit(1, range(4), 100)
    engine.submit(2, range(100, 104), 100)
    engine.step()
    step = engine.step()
    assert len(step.start.pressure_events) == 1
    assert [request for request, _ in step.tokens] == [1]
    # The survivor had no output when it was counted, and has one now.
    assert engine.ratio == pytest.approx((0 + 20) / (100 + 1))


def test_i4_a_retracted_request_waits_behind_newcomers_and_the_ratio_is_estimated() -> None:
    engine = Sglang(blk=14, chunk=32, max_num_seqs=4, conservativeness=0.3)
    engine.submit(1, range(4), 30)
    engine.submit(2, range(100, 104), 30)
    assert list(engine.step().admitted) == [1]
    engine.submit(3, range(200, 232), 40)
    assert list(engine.step().admitted) == [2]
    for number in range(3, 27):
        step = engine.step(at=engine.now + 1)
        assert bool(step.start.pressure_events) == (number == 26)
    [event] = step.start.pressure_events
    # On a tie of outputs and of prompt lengths the last in running order.
    assert event.request_id == 2
    assert event.kind == "sglang_retraction"
    assert event.at_ms == step.start_ms
    assert (event.logical_available_blocks_before, event.required_blocks_before) == (0, 2)
    assert event.request_active_blocks_before == 7
    assert event.state_before == PressureState(2, None, 14)
    assert event.state_after == PressureState(1, None, 8)
    assert engine.ids("running") == [1]
    assert engine.ids("waiting") == [3, 2]
    assert engine.ratio == 1.0


def test_i4_in_generation_1_3_it_waits_in_front_and_the_ratio_starts_again() -> None:
    engine = Sglang(LEGACY, blk=14, chunk=32, max_num_seqs=4, conservativeness=0.3)
    engine.submit(1, range(4), 30)
    engine.submit(2, range(100, 104), 30)
    assert list(engine.step().admitted) == [1]
    engine.submit(3, range(200, 232), 40)
    assert list(engine.step().admitted) == [2]
    while len(engine.ids("running")) == 2:
        assert engine.ratio < 0.21
        step = engine.step()
    assert not step.start.pressure_events
    # The first had one output more, from its own first pass.
    assert engine.ids("waiting") == [2, 3]
    assert engine.ratio == pytest.approx(0.7 * 0.3)


def test_a_tie_in_generation_1_3_retracts_the_earliest() -> None:
    engine = Sglang(LEGACY, blk=3, chunk=16, max_num_seqs=4, clip=0, conservativeness=0.0001)
    engine.submit(1, range(4), 4)
    engine.submit(2, range(100, 104), 4)
    while len(engine.ids("running")) != 1:
        engine.step()
    assert engine.ids("running") == [2]
    assert engine.ids("waiting") == [1]


# ---------------------------------------------------------------- J: what a request owns


def test_j5_a_matched_prefix_is_not_evicted_for_its_own_request() -> None:
    engine = Sglang(blk=3)
    engine.fill(1, [1, 2, 3, 4])
    engine.fill(2, range(9, 17))
    engine.fill(3, range(9, 17))
    assert engine.available == 0
    engine.submit(4, range(1, 9), 0)
    step = engine.step()
    assert step.admitted == {4: 4}
    assert engine.cached([1, 2, 3, 4]) == 4
    assert engine.cached(range(9, 17)) == 4
    assert engine.available == 0


def test_j6_a_partial_page_is_freed_when_its_request_ends() -> None:
    engine = Sglang(blk=3)
    engine.fill(1, [1, 2, 3, 4, 5])
    assert engine.available == 8
    assert engine.cached([1, 2, 3, 4, 5]) == 4
    assert engine.radix["live_nodes"] == 2


def test_j8_a_cancelled_request_leaves_what_it_committed() -> None:
    engine = Sglang(blk=4, chunk=4)
    engine.submit(1, range(6), 3)
    engine.step()
    engine.step()
    assert (engine.row(1)["computed"], engine.row(1)["n_blocks"]) == (7, 2)
    engine.cancel(1)
    assert (engine.available, engine.protected, engine.evictable) == (12, 0, 4)
    assert engine.cached(range(6)) == 4
    engine.rank.check_integrity()


def test_j11_a_request_extends_its_own_leaf_and_branches_off_that_of_others() -> None:
    # Two pages more than in the list: the engine's first tokens own some.
    engine = Sglang(blk=6, chunk=4, clip=0)
    first, second = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 10, 11, 12]
    engine.submit(1, first, 5)
    engine.step()
    assert engine.radix["live_nodes"] == 2
    node = int(engine.rank._state.view("leases")[0]["node"])
    engine.step()
    assert engine.radix["live_nodes"] == 2
    assert int(engine.rank._state.view("leases")[0]["node"]) == node
    engine.submit(2, second, 5)
    assert engine.step().admitted == {2: 4}
    assert int(engine.rank._state.view("leases")[0]["node"]) == node
    assert engine.radix["live_nodes"] == 4
    engine.cancel(1)
    engine.cancel(2)
    assert (engine.protected, engine.evictable) == (0, 12)
    assert engine.rank._state.tree_evict(3) == 3
    assert (engine.available, engine.radix["live_nodes"]) == (24, 1)
    engine.rank.check_integrity()


def test_j12_page_one_reuses_every_token() -> None:
    engine = Sglang(bs=1, blk=100, chunk=2)
    engine.fill(1, range(5))
    assert engine.available == 95
    engine.submit(2, range(8), 3)
    step = engine.step()
    assert step.admitted == {2: 5}
    assert engine.row(2)["computed"] == 7
    assert engine.available == 93


def test_j15_a_later_chunk_does_not_look_at_the_cache_again() -> None:
    engine = Sglang(bs=1, blk=64, chunk=12)
    engine.submit(1, range(1, 9), 0)
    engine.submit(2, range(1, 11), 3)
    first = engine.step()
    # Both in one pass: the second computes its first four tokens beside the first one.
    assert first.admitted == {1: 0, 2: 0}
    assert engine.row(2)["computed"] == 4
    assert engine.cached(range(1, 11)) == 8
    free = engine.available
    second = engine.step()
    assert second.fpm.sum_prefill_tokens == 6
    assert second.fpm.sum_prefill_kv_tokens == 4
    # Six tokens computed, four of them found to be duplicates at the commit; one generated.
    assert engine.available == free - 6 + 4 - 1


@BOTH
def test_j16_what_is_cached_is_stored_once(ruleset: str) -> None:
    engine = Sglang(ruleset, bs=1, emit_kv_events=True)
    steps = []
    for request_id in (1, 2):
        engine.submit(request_id, [1, 2, 3], 1)
        steps += engine.drain()
    # In 1.3 the last token owns a slot and is cached with its request; the second request generates another one.
    counts = [count for step in steps for kind, count in sizes(step) if kind == "Stored"]
    assert counts == ([3] if ruleset == REF else [3, 1, 1])
    assert steps[-1].admitted == {2: 2} if ruleset == REF else steps[-1].admitted == {2: 3}
    index(steps)


def test_j17_an_evicted_page_is_removed_before_another_is_stored() -> None:
    engine = Sglang(bs=1, blk=2, emit_kv_events=True)
    engine.submit(1, [1], 0)
    engine.submit(2, [2], 0)
    steps = engine.drain()
    engine.submit(3, [3], 0)
    steps += engine.drain()
    events = [event for step in steps for event in step.events]
    assert [type(event.data) for event in events] == [Stored, Stored, Removed, Stored]
    assert events[2].data.block_hashes == (events[0].data.blocks[0].block_hash,)
    assert index(steps).present == {events[1].data.blocks[0].block_hash, events[3].data.blocks[0].block_hash}


@BOTH
def test_j18_only_whole_pages_are_stored(ruleset: str) -> None:
    engine = Sglang(ruleset, emit_kv_events=True)
    engine.submit(1, [1, 2, 3, 4, 5, 6], 0)
    [step] = engine.drain()
    [event] = step.events
    [block] = event.data.blocks
    assert [(block.block_hash, block.tokens_hash)] == chain([1, 2, 3, 4, 5, 6], 4)


def test_j22_a_stored_event_names_the_page_before_it() -> None:
    engine = Sglang(bs=1, blk=20, emit_kv_events=True)
    engine.submit(1, [11, 22, 33], 0)
    [first] = engine.drain()
    engine.submit(2, [11, 22, 33, 44, 55, 66], 0)
    [second] = engine.drain()
    [a], [b] = first.stored, second.stored
    assert a.parent_hash is None
    assert len(b.blocks) == 3
    assert b.parent_hash == a.blocks[-1].block_hash
    assert second.admitted == {2: 3}


# ---------------------------------------------------------------- K: event streams


@BOTH
def test_k1_a_chunk_is_stored_when_it_is_computed(ruleset: str) -> None:
    engine = Sglang(ruleset, blk=32, chunk=4, emit_kv_events=True)
    engine.submit(1, range(6), 2)
    steps = engine.drain()
    assert len(steps) == 3
    assert [sum(len(data.blocks) for data in step.stored) for step in steps] == [1, 0, 1]
    assert steps[2].stored[0].parent_hash == steps[0].stored[0].blocks[0].block_hash
    assert index(steps).stores == 2


@pytest.mark.parametrize(("ruleset", "passes"), [(REF, [1, 0, 0, 0, 1]), (LEGACY, [1, 0, 0, 1, 0])])
def test_k2_a_generated_page_is_stored_at_the_end_or_in_1_3_when_it_is_full(ruleset: str, passes: list[int]) -> None:
    engine = Sglang(ruleset, blk=32, chunk=16, emit_kv_events=True)
    engine.submit(1, range(4), 5)
    steps = engine.drain()
    assert [sum(len(data.blocks) for data in step.stored) for step in steps] == passes
    index(steps)


@BOTH
def test_k3_stored_hashes_are_those_of_prompt_and_output(ruleset: str) -> None:
    engine = Sglang(ruleset, blk=32, chunk=16, emit_kv_events=True)
    engine.submit(1, [1, 2], planned=[3, 4])
    steps = engine.drain()
    hashes = [block.block_hash for step in steps for data in step.stored for block in data.blocks]
    assert hashes == [block for block, _ in chain([1, 2, 3, 4], 4)]


@BOTH
def test_k4_completion_removes_nothing(ruleset: str) -> None:
    engine = Sglang(ruleset, blk=32, chunk=16, emit_kv_events=True)
    engine.submit(1, range(4), 3)
    steps = engine.drain()
    assert len(steps) == 3
    assert [sizes(step) for step in steps] == [[("Stored", 1)], [], []]
    assert engine.occupied == 4


@BOTH
def test_k5_the_survivor_of_a_retraction_stays_indexed(ruleset: str) -> None:
    engine = Sglang(ruleset, blk=3, chunk=16, max_num_seqs=4, clip=0, conservativeness=0.0001, emit_kv_events=True)
    prompts = {1: [*range(4)], 2: [*range(100, 104)]}
    for request_id, prompt in prompts.items():
        engine.submit(request_id, prompt, 4)
    router = KvIndex()
    while len(engine.ids("running")) != 1:
        router.replay(engine.step().events)
    [survivor] = engine.ids("running")
    assert chain(prompts[survivor], 4)[0][0] in router.present
    for step in engine.drain():
        router.replay(step.events)


@pytest.mark.parametrize(
    ("ruleset", "events"),
    [
        # REF: pages of outputs are stored at the end of their request, first tokens may evict before they commit.
        (REF, [["Stored"], [], [], ["Stored"], ["Removed", "Stored"], [], []]),
        (LEGACY, [["Stored"], [], ["Stored"], [], ["Stored", "Removed"], [], []]),
    ],
)
def test_k6_a_tiny_pool_removes_what_the_next_request_needs(ruleset: str, events: list[list[str]]) -> None:
    engine = Sglang(ruleset, blk=3, chunk=4, max_num_seqs=4, emit_kv_events=True)
    engine.submit(1, range(6), 3)
    engine.submit(2, range(100, 104), 3)
    steps = engine.drain()
    assert [[kind for kind, _ in sizes(step)] for step in steps] == events
    index(steps)


def test_k7_without_room_for_first_tokens_nobody_gets_one() -> None:
    engine = Sglang(blk=3, chunk=16, max_num_seqs=4, clip=0, conservativeness=0.0001, emit_kv_events=True)
    engine.submit(1, range(4), 4)
    engine.submit(2, range(100, 104), 4)
    steps = [engine.step()]
    assert list(steps[0].admitted) == [1, 2]
    assert steps[0].outputs == []
    steps.append(engine.step())
    [event] = steps[1].start.pressure_events
    # The list has the first one retracted, the rule of an older generation; the last one is, as in recorded runs.
    assert event.request_id == 2
    assert (event.logical_available_blocks_before, event.required_blocks_before) == (1, 2)
    assert event.request_active_blocks_before == 1
    assert [request for request, _ in steps[1].tokens] == [1]
    assert engine.ratio == 1.0
    steps += engine.drain()
    assert [number for number, step in enumerate(steps, 1) if step.ended] == [5, 9]
    assert steps[5].admitted == {2: 0}
    assert len(steps) == 9
    index(steps)


def test_k7_in_generation_1_3_single_tokens_leave_room() -> None:
    engine = Sglang(LEGACY, blk=3, chunk=16, max_num_seqs=4, clip=0, conservativeness=0.0001, emit_kv_events=True)
    engine.submit(1, range(4), 4)
    engine.submit(2, range(100, 104), 4)
    steps = engine.drain()
    # Twelve slots: two prompts of four and two outputs each; then the earlier one gives way.
    assert [[request for request, _ in step.tokens] for step in steps] == [[1, 2], [1, 2], [2], [2], [1], [1]]
    assert not any(step.start.pressure_events for step in steps)
    assert steps[4].admitted == {1: 4}
    index(steps)


@BOTH
@pytest.mark.parametrize("seed", range(6))
def test_k8_random_mixes_on_tiny_pools_keep_every_page_accounted(ruleset: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    nextn = [None, 2][seed % 2]
    page = int(rng.choice([1, 2, 4]))
    engine = Sglang(
        ruleset,
        blk=int(rng.integers(4, 15)),
        bs=page,
        chunk=page * int(rng.integers(1, 5)),
        policy=["fifo", "lpm"][seed // 2 % 2],
        conservativeness=float(rng.choice([0.001, 0.3, 1.0])),
        aic_nextn=nextn,
        aic_nextn_accept_rates=None if nextn is None else "0.5,0.5",
        emit_kv_events=True,
    )
    router, live = KvIndex(), 0
    for request_id in range(60):
        if rng.random() < 0.6:
            length = int(rng.integers(1, 3 * page + 2))
            engine.submit(
                request_id, [int(rng.integers(0, 2)) * 100 + i for i in range(length)], int(rng.integers(0, 6))
            )
            live += 1
        if rng.random() < 0.1:
            router.replay(engine.cancel(int(rng.integers(0, request_id + 1))).kv_events)
        # `step` runs the integrity checker: pages of the tree, of requests and free ones are all there are.
        router.replay(engine.step().events)
        if engine.rank.stuck_head() is not None:
            engine.rank.fail_head()
    assert live > 20
