"""Scheduling hooks, and timing profiles."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.config import EngineConfig, FixedTiming, NpzTiming
from kvsim.contract import CommandContext, RankIdentity, Request, Submit
from kvsim.errors import ConfigError, PoisonedError
from kvsim.policies import Directive, Policy, TrtllmPolicy, VllmPolicy, get_policy, register_policy
from kvsim.rank import SchedulerRank
from kvsim.timing import load_profile
from support import Engine


class ShortestPromptFirst(VllmPolicy):
    def score(self, request: np.void) -> float:
        return float(request["num_input"])


class Shortest(VllmPolicy):
    """Shortest prompt first by order, and the victim with most left to do."""

    def order(self, waiting: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.argsort(waiting["num_input"], kind="stable")

    def victims(self, running: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.argsort(running["length"] - running["limit"], kind="stable")


def engine_of(policy: Any, **fields: Any) -> Engine:
    return Engine(
        policy=policy,
        **{
            "num_gpu_blocks": 32,
            "max_num_seqs": 1,
            "enable_prefix_caching": False,
            "timing_model": FixedTiming(prefill_ms=1, decode_ms=1),
            **fields,
        },
    )


def admissions(engine: Engine) -> list[int]:
    return [request_id for step in engine.drain() for request_id in step.admitted]


# ---------------------------------------------------------------- level 0: the directive


def test_policies_are_found_by_name() -> None:
    assert isinstance(get_policy("vllm"), VllmPolicy)
    assert isinstance(get_policy("trtllm"), TrtllmPolicy)
    with pytest.raises(ConfigError, match=r"policy: must be one of .*trtllm, vllm, got 'nope'"):
        get_policy("nope")
    with pytest.raises(ConfigError, match="policy: expected a Policy or its name, got 3"):
        Engine(policy=3)


def test_a_registered_policy_is_found_and_one_without_a_name_is_refused() -> None:
    @register_policy
    class Mine(VllmPolicy):
        name = "mine-for-this-test"

    engine = engine_of("mine-for-this-test")
    engine.submit(1, range(4))
    assert admissions(engine) == [1]
    assert isinstance(get_policy("mine-for-this-test"), Mine)

    class Nameless(VllmPolicy):
        name = ""

    with pytest.raises(ConfigError, match="Nameless has no name"):
        register_policy(Nameless)


def test_a_directive_alone_makes_vllm_reserve_to_completion() -> None:
    class Careful(VllmPolicy):
        def directive(self, config: EngineConfig) -> Directive:
            return Directive(reserve_to_completion=True)

    running = {}
    for policy in ("vllm", Careful()):
        engine = engine_of(policy, num_gpu_blocks=6, max_num_seqs=4)
        engine.submit(1, range(8), 8)
        engine.submit(2, range(8), 8)
        engine.step()
        running[type(engine.rank._policy).__name__] = engine.ids("running")
    assert running == {"VllmPolicy": [1, 2], "Careful": [1]}


@pytest.mark.parametrize("worker", ["aggregated", "prefill", "decode"])
@pytest.mark.parametrize("ruleset", ["dynamo", "dynamo-1.3"])
def test_the_built_in_directives_follow_the_rules(ruleset: str, worker: Any) -> None:
    config = EngineConfig(ruleset=ruleset, worker_type=worker, preemption_mode="fifo", aic_nextn=1)
    vllm, trtllm = VllmPolicy().directive(config), TrtllmPolicy().directive(config)
    assert vllm.oldest_victim
    assert vllm.may_preempt
    assert not vllm.reserve_to_completion
    assert vllm.giveback_blocks == 1
    assert vllm.recompute_last_token is config.rules.recompute_last_token
    assert trtllm.reserve_to_completion
    assert not trtllm.may_preempt
    assert not trtllm.recompute_last_token
    assert trtllm.giveback_blocks == 0
    assert trtllm.always_draft
    assert trtllm.limit_model_len is (ruleset == "dynamo")
    assert vllm.first_token_is_decode is (ruleset == "dynamo-1.3" or worker == "decode")


def test_a_policy_without_a_directive_says_so() -> None:
    with pytest.raises(NotImplementedError):
        Engine(policy=Policy())


# ---------------------------------------------------------------- level 1: score


def test_smaller_scores_go_first_and_equal_ones_keep_arrival_order() -> None:
    engine = engine_of(ShortestPromptFirst())
    for request_id, length in enumerate((12, 4, 8, 4, 12, 1)):
        engine.submit(request_id, [1] * length)
    assert engine.ids("waiting") == [5, 1, 3, 2, 0, 4]
    assert admissions(engine) == [5, 1, 3, 2, 0, 4]


def test_a_preempted_request_stays_in_front_of_better_scores() -> None:
    engine = engine_of(ShortestPromptFirst(), num_gpu_blocks=6, max_num_seqs=2, max_num_batched_tokens=64)
    engine.submit(1, range(8), 8)
    engine.submit(2, range(100, 108), 8)
    while engine.rank.metrics().preemptions_total == 0:
        engine.step()
    engine.submit(3, [1], 1)
    engine.submit(4, range(20), 1)
    engine.submit(5, range(3), 1)
    assert engine.ids("waiting") == [2, 3, 5, 4]


def test_the_score_is_asked_once_at_arrival_with_the_row_of_the_request() -> None:
    seen = []

    class Watching(VllmPolicy):
        def score(self, request: np.void) -> float:
            seen.append({name: int(request[name]) for name in ("id_hi", "id_lo", "num_input", "max_output")})
            return 0.0

    engine = engine_of(Watching())
    engine.submit(2**64 + 5, range(7), 3)
    engine.drain()
    assert seen == [{"id_hi": 1, "id_lo": 5, "num_input": 7, "max_output": 3}]


# ---------------------------------------------------------------- level 2: order and victims


def test_order_decides_who_is_tried_first_in_each_pass() -> None:
    engine = engine_of(Shortest())
    for request_id, length in enumerate((12, 4, 8)):
        engine.submit(request_id, [1] * length)
    engine.step()
    engine.submit(3, [1] * 2)  # overtakes those that wait
    assert admissions(engine) == [3, 2, 0]


def test_order_is_not_asked_when_there_is_nothing_to_decide() -> None:
    class Never(VllmPolicy):
        def order(self, waiting: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            raise AssertionError("asked")

    engine = engine_of(Never())
    engine.step()
    engine.submit(1, range(4), 3)
    engine.step()  # one waiting
    engine.submit(2, range(4))
    engine.submit(3, range(4))
    engine.step()  # no free place in the running set
    with pytest.raises(AssertionError, match="asked"):
        engine.drain()


def crowded(policy: Any) -> list[int]:
    """Three running requests with 12, 20 and 6 tokens to generate, in a pool that is too small; who is preempted."""
    engine = engine_of(policy, num_gpu_blocks=8, max_num_seqs=8, max_num_batched_tokens=64)
    for request_id, out in ((1, 12), (2, 20), (3, 6)):
        engine.submit(request_id, [request_id] * 8, out)
    while not engine.rank.metrics().preemptions_total:
        step = engine.step()
    return [event.request_id for event in step.start.pressure_events]


def test_the_victim_is_the_first_one_the_policy_names() -> None:
    assert crowded(Shortest())[0] == 2  # most work left
    assert crowded("vllm")[0] == 3  # the newest


def test_without_a_victim_nobody_is_preempted_and_growth_waits() -> None:
    class Mild(VllmPolicy):
        def victims(self, running: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return np.empty(0, int)

    engine = engine_of(Mild(), num_gpu_blocks=6, max_num_seqs=8)
    engine.submit(1, [1] * 8, 12)  # 5 blocks at its end
    engine.submit(2, [2] * 8, 5)  # 3
    steps = engine.drain()
    assert engine.rank.metrics().preemptions_total == 0
    assert sum(len(step.outputs) for step in steps) == 17


def test_shortest_prompt_first_with_the_longest_job_as_victim_runs_as_written() -> None:
    engine = engine_of(Shortest(), num_gpu_blocks=8, max_num_seqs=8, max_num_batched_tokens=64)
    for request_id, (length, out) in enumerate(((12, 9), (4, 13), (8, 5))):
        engine.submit(request_id, [request_id] * length, out)
    first = engine.step()
    # 1 + 2 + 3 blocks fit into 8, shortest first.
    assert list(first.admitted) == [1, 2, 0]
    preempted = [event.request_id for step in engine.drain() for event in step.start.pressure_events]
    # After 5 tokens each request 2 is done; before that 1 (13 to make) is the longest job when blocks run out.
    assert preempted[0] == 1


# ---------------------------------------------------------------- level 3: admit


def test_admit_sees_the_head_and_the_pool_and_may_hold_it_back() -> None:
    seen = []

    class OneAtATime(VllmPolicy):
        def admit(self, request: np.void, pool: tuple[int, int, int, int]) -> bool:
            active, inactive, free, total = pool
            seen.append((int(request["id_lo"]), active, inactive, free, total))
            return active == 0

    engine = engine_of(OneAtATime(), max_num_seqs=4)
    for request_id in (1, 2):
        engine.submit(request_id, [request_id] * 8, 2)
    assert admissions(engine) == [1, 2]
    # In the second pass the decode of the first has its third block already.
    assert seen == [(1, 0, 0, 32, 32), (2, 2, 0, 30, 32), (2, 3, 0, 29, 32), (2, 0, 0, 32, 32)]


def test_admit_may_overcommit_and_the_victim_pays() -> None:
    class Eager(VllmPolicy):
        def admit(self, request: np.void, pool: tuple[int, int, int, int]) -> bool:
            return True

    engine = engine_of(Eager(), num_gpu_blocks=4, max_num_seqs=4)
    engine.submit(1, [1] * 12, 4)
    engine.step()
    engine.submit(2, [2] * 8, 1)
    step = engine.step()
    assert [event.request_id for event in step.start.pressure_events] == [1]
    assert list(step.admitted) == [2]


def test_a_head_that_is_never_admitted_is_reported_as_the_policys_doing() -> None:
    class Never(VllmPolicy):
        def admit(self, request: np.void, pool: tuple[int, int, int, int]) -> bool:
            return False

    engine = engine_of(Never())
    engine.submit(1, range(4))
    step = engine.step()
    assert (step.admitted, step.end_ms) == ({}, 0.0)
    head = engine.rank.stuck_head()
    assert head is not None
    assert head.request_id == 1
    assert head.describe(engine.config) == "the policy never lets it run"


@pytest.mark.parametrize("budget", [None, 6])
def test_admit_cannot_keep_a_request_that_outgrew_the_pool_coming_back(budget: int | None) -> None:
    class Eager(VllmPolicy):
        def admit(self, request: np.void, pool: tuple[int, int, int, int]) -> bool:
            return True

    engine = engine_of(Eager(), num_gpu_blocks=3, max_num_batched_tokens=budget)
    engine.submit(1, [1] * 8, 20)
    for _ in range(50):
        engine.step()
        if engine.rank.stuck_head() is not None:
            break
    output = engine.rank.fail_head()
    assert output is not None
    assert output.failed
    assert engine.rank.is_drained()


# ---------------------------------------------------------------- hooks that fail


def failing(hook: str, answer: Any) -> type[VllmPolicy]:
    def body(self: Any, *arguments: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return type("Failing", (VllmPolicy,), {hook: body})


@pytest.mark.parametrize(
    ("hook", "answer", "error"),
    [
        ("score", ZeroDivisionError("mine"), ZeroDivisionError),
        ("score", "high", ValueError),
        ("score", math.nan, ValueError),
        ("order", ZeroDivisionError("mine"), ZeroDivisionError),
        ("order", [0, 0, 1], ValueError),
        ("order", [0], ValueError),
        ("order", [1, 2, 3], ValueError),
        ("order", None, Exception),
        ("admit", ZeroDivisionError("mine"), ZeroDivisionError),
        ("victims", ZeroDivisionError("mine"), ZeroDivisionError),
        ("victims", [7], IndexError),
        ("victims", [-1], IndexError),
        ("victims", ["first"], ValueError),
    ],
)
@pytest.mark.parametrize("ruleset", ["dynamo", "dynamo-1.3"])
def test_an_error_in_a_hook_comes_out_and_poisons_the_rank(
    hook: str, answer: Any, error: type[Exception], ruleset: str
) -> None:
    engine = engine_of(failing(hook, answer)(), num_gpu_blocks=4, max_num_seqs=2, ruleset=ruleset)

    def run() -> None:
        for request_id in (1, 2, 3):
            engine.submit(request_id, [request_id] * 7, 9)
        engine.drain()

    with pytest.raises(error):
        run()
    with pytest.raises(PoisonedError):
        engine.rank.execute_pass(engine.now)
    with pytest.raises(PoisonedError):
        engine.rank.apply_command(Submit(Request(9, [1])), CommandContext(engine.now))


def test_hooks_get_copies() -> None:
    class Vandal(VllmPolicy):
        def order(self, waiting: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            waiting["num_input"] = 0
            return np.arange(len(waiting))

        def victims(self, running: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            running["length"] = 0
            return np.array([len(running) - 1])

        def score(self, request: np.void) -> float:
            request["num_input"] = 1
            return 0.0

    engine = engine_of(Vandal(), num_gpu_blocks=6, max_num_seqs=4)
    plain = engine_of("vllm", num_gpu_blocks=6, max_num_seqs=4)
    for each in (engine, plain):
        for request_id in range(3):
            each.submit(request_id, [request_id] * 8, 6)
    assert [step.tokens for step in engine.drain()] == [step.tokens for step in plain.drain()]


def test_hooks_that_decide_as_the_kernel_does_change_nothing() -> None:
    class Same(VllmPolicy):
        def score(self, request: np.void) -> float:
            return 0.0

        def order(self, waiting: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return np.arange(len(waiting))

        def victims(self, running: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return np.arange(len(running))[::-1]

    ran = []
    for policy in (Same(), "vllm"):
        engine = engine_of(policy, num_gpu_blocks=7, max_num_seqs=3, max_num_batched_tokens=9)
        for request_id in range(6):
            engine.submit(request_id, [request_id] * (4 + 3 * request_id % 7), 4 + request_id)
        ran.append([(step.end_ms, step.admitted, step.tokens) for step in engine.drain()])
    assert ran[0] == ran[1]


# ---------------------------------------------------------------- NPZ profiles


def profile(**changes: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {
        "decode_active_kv_tokens": [0.0, 100.0],
        "decode_context_length": [0.0, 10.0],
        "decode_itl": [[1.0, 2.0], [3.0, 5.0]],
        "prefill_isl": [4.0, 8.0, 16.0],
        "prefill_ttft_ms": [10.0, 20.0, 60.0],
        **changes,
    }
    return {name: value for name, value in arrays.items() if value is not None}


BATCHED = {
    "prefill_isl": None,
    "prefill_ttft_ms": None,
    "prefill_batch_size": [1.0, 3.0],
    "prefill_new_tokens_per_request": [0.0, 10.0],
    "prefill_kv_read_tokens_per_request": [0.0, 8.0],
    # 1 + 2 b' + 4 n' + 8 k' at the corners, b', n', k' in {0, 1}
    "prefill_time_ms": [[[1.0, 9.0], [5.0, 13.0]], [[3.0, 11.0], [7.0, 15.0]]],
}


def profiled(tmp_path: Path, arrays: dict[str, Any], **fields: Any) -> Engine:
    path = tmp_path / "profile.npz"
    np.savez(path, **arrays)
    fields = {"num_gpu_blocks": 64, "ruleset": "dynamo", **fields}
    return Engine(timing_model=NpzTiming(path=str(path)), **fields)


# 4 points apart: 10 + (20 - 10) * (x - 4) / 4; from 8 on 20 + 40 * (x - 8) / 8; outside the outer cells go on.
@pytest.mark.parametrize(
    ("tokens", "ms"), [(4, 10.0), (6, 15.0), (8, 20.0), (12, 40.0), (16, 60.0), (2, 5.0), (24, 100.0)]
)
def test_a_one_dimensional_prefill_profile_is_interpolated_and_extrapolated(
    tmp_path: Path, tokens: int, ms: float
) -> None:
    engine = profiled(tmp_path, profile())
    engine.submit(1, range(tokens))
    assert engine.step().end_ms == pytest.approx(ms, abs=1e-6)


def test_the_one_dimensional_profile_sees_batch_times_new_tokens(tmp_path: Path) -> None:
    engine = profiled(tmp_path, profile())
    engine.submit(1, range(6))
    engine.submit(2, range(50, 56))
    assert engine.step().end_ms == pytest.approx(40.0, abs=1e-6)  # x = 12


def test_an_extrapolation_below_zero_costs_nothing(tmp_path: Path) -> None:
    engine = profiled(tmp_path, profile(prefill_ttft_ms=[1.0, 41.0, 42.0]))
    engine.submit(1, range(2))
    assert engine.step().end_ms == 0.0  # 1 - 40 / 2 < 0


# One request of length L: active = context = L. L = 5: (1 + .5) and (3 + 1), 5 % between: 1.5 + .05 * 2.5.
# L = 20: context 2 cells out: (1 + 2) and (3 + 4), 20 % between: 3 + .2 * 4.
@pytest.mark.parametrize(("length", "ms"), [(5, 1.625), (10, 2.3), (20, 3.8)])
def test_the_decode_profile_is_bilinear(tmp_path: Path, length: int, ms: float) -> None:
    engine = profiled(tmp_path, profile())
    engine.submit(1, range(length - 1), 2)
    start = engine.step().end_ms
    assert engine.step().end_ms - start == pytest.approx(ms, abs=1e-6)


def test_the_decode_profile_sees_summed_tokens_and_mean_context(tmp_path: Path) -> None:
    engine = profiled(tmp_path, profile())
    engine.submit(1, range(3), 2)
    engine.submit(2, range(50, 55), 2)
    start = engine.step().end_ms
    # Lengths 4 and 6: 10 active, mean 5: 1.5 + .1 * 2.5.
    assert engine.step().end_ms - start == pytest.approx(1.75, abs=1e-6)


# The corner values are linear in each axis, so inside and outside: 1 + (b - 1) + .4 n + k.
@pytest.mark.parametrize(
    ("prompts", "cached", "ms"),
    [
        ([10], 0, 5.0),
        ([5], 0, 3.0),
        ([5, 5], 0, 4.0),
        ([10] * 3, 0, 7.0),
        ([20], 0, 9.0),
        ([3], 4, 6.2),
        ([10] * 5, 0, 9.0),
    ],
)
def test_a_batch_aware_prefill_profile_is_trilinear(tmp_path: Path, prompts: list[int], cached: int, ms: float) -> None:
    engine = profiled(tmp_path, profile(**BATCHED), max_num_batched_tokens=None)
    if cached:
        engine.submit(0, range(cached))
        engine.step()
        engine.now = 0.0
    for request_id, length in enumerate(prompts, 1):
        engine.submit(request_id, [*range(cached), *[1000 * request_id + i for i in range(length)]])
    step = engine.step()
    assert set(step.admitted.values()) == {cached}
    assert step.end_ms == pytest.approx(ms, abs=1e-6)


def test_a_profile_is_scaled_like_any_model(tmp_path: Path) -> None:
    engine = profiled(tmp_path, profile(), speedup_ratio=4.0)
    engine.submit(1, range(8))
    assert engine.step().end_ms == pytest.approx(5.0, abs=1e-6)


BAD_PROFILES: dict[str, tuple[dict[str, Any], str, str]] = {
    "missing decode axis": ({"decode_context_length": None}, "decode_context_length", "is missing"),
    "missing decode table": ({"decode_itl": None}, "decode_itl", "is missing"),
    "missing prefill axis": ({"prefill_isl": None}, "prefill_isl", "is missing"),
    "missing prefill table": ({"prefill_ttft_ms": None}, "prefill_ttft_ms", "is missing"),
    "axis of one point": (
        {"prefill_isl": [1.0], "prefill_ttft_ms": [1.0]},
        "prefill_isl",
        "at least 2 strictly increasing points",
    ),
    "axis not increasing": ({"prefill_isl": [4.0, 4.0, 5.0]}, "prefill_isl", "strictly increasing"),
    "axis falling": ({"decode_context_length": [10.0, 0.0]}, "decode_context_length", "strictly increasing"),
    "axis of two dimensions": ({"decode_context_length": [[0.0, 1.0]]}, "decode_context_length", "one axis"),
    "axis not finite": ({"decode_active_kv_tokens": [0.0, math.inf]}, "decode_active_kv_tokens", "must be finite"),
    "table not finite": ({"decode_itl": [[1.0, math.nan], [3.0, 5.0]]}, "decode_itl", "must be finite"),
    "decode table misshaped": ({"decode_itl": [[1.0, 2.0]]}, "decode_itl", r"must have shape \(2, 2\)"),
    "prefill table misshaped": ({"prefill_ttft_ms": [1.0, 2.0]}, "prefill_ttft_ms", r"must have shape \(3,\)"),
    "batched without a table": (BATCHED | {"prefill_time_ms": None}, "prefill_time_ms", "is missing"),
    "batched misshaped": (BATCHED | {"prefill_time_ms": [[1.0, 2.0]]}, "prefill_time_ms", "must have shape"),
    "batched negative": (
        BATCHED | {"prefill_time_ms": [[[1.0, 9.0], [5.0, -1.0]], [[3.0, 11.0], [7.0, 15.0]]]},
        "prefill_time_ms",
        "must be >= 0, got -1.0",
    ),
}


@pytest.mark.parametrize("name", BAD_PROFILES)
def test_a_bad_profile_names_its_array(tmp_path: Path, name: str) -> None:
    changes, field, words = BAD_PROFILES[name]
    with pytest.raises(ConfigError, match=words) as caught:
        profiled(tmp_path, profile(**changes))
    assert caught.value.field == field


@pytest.mark.parametrize("content", [None, b"", b"no zip at all", b"PK\x03\x04 cut short"])
def test_a_profile_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "broken.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"timing_model.path: .*broken.npz"):
        load_profile(path)


def test_a_loaded_profile_can_be_given_in_place_of_the_configured_model(tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", **profile())
    engine = Engine(num_gpu_blocks=64, timing=load_profile(tmp_path / "p.npz"))
    engine.submit(1, range(8))
    assert engine.step().end_ms == pytest.approx(20.0, abs=1e-6)


def test_a_profile_given_as_arrays_is_checked_like_a_file() -> None:
    config = EngineConfig()
    with pytest.raises(ConfigError, match="decode_active_kv_tokens: is missing in profile timing"):
        SchedulerRank(RankIdentity(), config, timing={})
    with pytest.raises(ConfigError, match="prefill_isl: must be one axis"):
        SchedulerRank(RankIdentity(), config, timing=profile(prefill_isl=[2.0, 1.0]))
    with pytest.raises(ConfigError, match="decode_itl: must be an array of numbers"):
        SchedulerRank(RankIdentity(), config, timing=profile(decode_itl="fast"))
