"""The SGLang kernel against its twin: whatever happens, both agree after every step.

``KVSIM_EXAMPLES`` sets the number of random histories (default 120), for long runs.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from histories import IDENTITIES, IDS, RADIX_LENGTHS, RADIX_SCRIPTS, radix_configs, requests
from kvsim.config import EngineConfig, SglangConfig
from kvsim.contract import RankIdentity, Request
from support import Pair, drive_both

EXAMPLES = int(os.environ.get("KVSIM_EXAMPLES", "120"))
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=QUIET)
@given(config=radix_configs(), identity=IDENTITIES, script=RADIX_SCRIPTS)
def test_random_histories_agree_with_the_model(
    config: EngineConfig, identity: RankIdentity, script: list[tuple[Any, ...]]
) -> None:
    drive_both(config, identity, script)


class RadixMachine(RuleBasedStateMachine):
    """Any order of commands, passes, forks and reloads."""

    @initialize(config=radix_configs(), identity=IDENTITIES)
    def build(self, config: EngineConfig, identity: RankIdentity) -> None:
        self.pair = Pair(config, identity)

    @rule(request=requests(RADIX_LENGTHS))
    def submit(self, request: Request) -> None:
        self.pair.submit(request)

    @rule(request_id=IDS, discard=st.booleans())
    def cancel(self, request_id: int, discard: bool) -> None:
        self.pair.cancel(request_id, discard=discard)

    @precondition(lambda self: self.pair.in_flight is None)
    @rule()
    def execute(self) -> None:
        self.pair.execute()

    @precondition(lambda self: self.pair.in_flight is not None)
    @rule()
    def complete(self) -> None:
        self.pair.complete()

    @precondition(lambda self: self.pair.in_flight is None)
    @rule(passes=st.integers(0, 5), keep=st.booleans())
    def fork_and_go_on_with_either(self, passes: int, keep: bool) -> None:
        self.pair.branch(passes, keep=keep)

    @rule()
    def restore_from_a_pickled_snapshot(self) -> None:
        self.pair.reload()

    @precondition(lambda self: self.pair.in_flight is None)
    @rule()
    def fail_a_stuck_head(self) -> None:
        self.pair.fail_head()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.drain()


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(
    max_examples=max(1, EXAMPLES // 4), stateful_step_count=25, deadline=None, suppress_health_check=QUIET
)


@pytest.mark.parametrize("ruleset", ["dynamo", "dynamo-1.3"])
@pytest.mark.parametrize("passes", range(1, 5))
@pytest.mark.parametrize("keep", [True, False])
def test_a_fork_between_two_chunks_of_a_prompt_goes_its_own_way(ruleset: str, passes: int, keep: bool) -> None:
    config = EngineConfig(
        backend="sglang",
        ruleset=ruleset,
        num_gpu_blocks=24,
        block_size=4,
        emit_kv_events=True,
        emit_kv_token_ids=True,
        sglang=SglangConfig(chunked_prefill_size=8),
    )
    pair = Pair(config)
    pair.submit(Request(1, range(6), 12))
    pair.step()
    pair.submit(Request(2, range(40), 3))
    for _ in range(passes):
        pair.step()
        pair.branch(6, keep=keep)
        pair.reload()
    row = pair.rank.request_row(2)
    assert row is not None
    assert 0 < row["computed"] < 40
    pair.drain()


def test_events_held_back_keep_their_token_ids_when_their_request_is_gone() -> None:
    config = EngineConfig(
        backend="sglang", num_gpu_blocks=60, block_size=2, emit_kv_events=True, emit_kv_token_ids=True
    )
    pair = Pair(config)
    pair.submit(Request(1, [1, 2], 0, [3, 4, 5]))
    pair.submit(Request(2, [11, 12], 30))
    while pair.rank.request_row(1) is not None:
        pair.step()
    assert pair.rank.header[0]["num_events"] == 1
    # Another request takes the row of the first one before its pages are told.
    pair.submit(Request(3, [21, 22, 23], 4))
    pair.reload()
    shown = pair.step().kv_events
    assert [block.token_ids for event in shown for block in event.data.blocks] == [(3, 4), (21, 22)]
    pair.drain()
