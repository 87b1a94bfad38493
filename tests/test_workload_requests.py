"""Explicit request lists: numbering, content, and an error with position and field for every bad value."""

import math
import uuid
from dataclasses import dataclass

import numpy as np
import pytest

from kvsim.errors import WorkloadError
from kvsim.layout import SEGMENT
from kvsim.workload import Workload, workload_from_requests


def request(**changes):
    return {"id": "x", "arrival_time_ms": 5.0, "input_tokens": 4, "output_tokens": 1} | changes


def test_rows_are_sorted_by_time_but_numbered_in_input_order():
    work = workload_from_requests(
        [request(id="b", arrival_time_ms=50), request(id="a", arrival_time_ms=10), request(id="c", arrival_time_ms=10)]
    )
    assert work.request_names == ["a", "c", "b"]
    assert work.specs["id_lo"].tolist() == [2, 3, 1]
    assert work.specs["arrival_ms"].tolist() == [10, 10, 50]
    assert not work.rebase_arrivals


def test_length_only_prompts_count_up_from_the_input_position():
    work = workload_from_requests([request(id="late", arrival_time_ms=9), request(id="early", arrival_time_ms=1)])
    early, late = work.request_names.index("early"), work.request_names.index("late")
    assert work.prompt_token_ids(late).tolist() == [0, 1, 2, 3]
    assert work.prompt_token_ids(early).tolist() == [1000003 + j for j in range(4)]


def test_length_only_prompts_wrap_at_32_bits():
    work = workload_from_requests([request(id=i, input_tokens=1_000_003) for i in range(4296)])
    ids = work.prompt_token_ids(4294)
    assert ids[0] == 4294 * 1000003 % 2**32
    assert ids[-1] == (4294 * 1000003 + 1_000_002) % 2**32 < ids[0]


def test_token_ids_are_the_content():
    work = workload_from_requests(
        [
            {"id": "x", "input_token_ids": [7, 0, 2**32 - 1]},
            {"id": "y", "input_tokens": 2, "input_token_ids": np.array([5, 6], np.int64)},
        ]
    )
    assert work.prompt_token_ids(0).tolist() == [7, 0, 2**32 - 1]
    assert work.prompt_token_ids(1).tolist() == [5, 6]
    assert work.specs["max_output_tokens"].tolist() == [1, 1]
    assert work.specs["arrival_ms"].tolist() == [0, 0]


def test_the_callers_array_is_not_frozen():
    mine = np.array([1, 2, 3], np.uint32)
    workload_from_requests([{"id": "x", "input_token_ids": mine}])
    mine[0] = 9


def test_output_ids_replace_the_output_length():
    work = workload_from_requests(
        [
            request(id="a", output_token_ids=[7, 8, 9]),
            request(id="b", output_tokens=0),
            request(id="c", output_token_ids=[]),
            request(id="d", output_token_ids=[4], output_tokens=6),
        ]
    )
    assert work.specs["max_output_tokens"].tolist() == [3, 0, 0, 1]
    assert [None if p is None else p.tolist() for p in map(work.planned_token_ids, range(4))] == [
        [7, 8, 9],
        None,
        [],
        [4],
    ]


def test_sessions_of_a_list_are_labels_only():
    work = workload_from_requests(
        [request(id=1, session_id="s", turn_index=3), request(id=2), request(id=3, session_id="s")]
    )
    assert work.session_names == ["s"]
    assert work.specs["session"].tolist() == [0, -1, 0]
    assert work.specs["turn"].tolist() == [3, -1, -1]
    assert not work.has_sessions
    assert workload_from_requests([request()]).session_names is None


def test_rank_hints_are_kept():
    work = workload_from_requests([request(id="a", dp_rank=1, prefill_dp_rank=0), request(id="b")])
    assert work.specs["dp_rank"].tolist() == [1, -1]
    assert work.prefill_dp_ranks.tolist() == [0, -1]
    assert workload_from_requests([request()]).prefill_dp_ranks is None


def test_objects_with_attributes_and_all_kinds_of_ids_work():
    @dataclass
    class Item:
        id: object
        input_tokens: int
        arrival_time_ms: float = 0.0

    name = uuid.UUID(int=5)
    work = workload_from_requests([Item("a", 3), Item(7, 4), Item(name, 5), {"input_tokens": 6}])
    assert work.request_names == ["a", "7", str(name), "request-3"]
    assert work.specs["input_tokens"].tolist() == [3, 4, 5, 6]


BAD = [
    ({"input_tokens": 0}, r"requests\[1\]\.input_tokens: must lie in 1 <= input_tokens <= 2147483647, got 0"),
    ({"input_tokens": -3}, r"requests\[1\]\.input_tokens: must lie in .*, got -3"),
    ({"input_tokens": math.nan}, r"requests\[1\]\.input_tokens: must be an int with .*, got nan"),
    ({"input_tokens": "4"}, r"requests\[1\]\.input_tokens: must be an int .*, got '4'"),
    ({"input_tokens": True}, r"requests\[1\]\.input_tokens: must be an int .*, got True"),
    ({"input_tokens": None}, r"requests\[1\]\.input_tokens: is required, or input_token_ids"),
    ({"input_token_ids": [1, 2]}, r"requests\[1\]\.input_tokens: must be the number of input_token_ids, 2, got 4"),
    ({"input_token_ids": []}, r"requests\[1\]\.input_token_ids: must have at least one id"),
    ({"input_token_ids": [1, 2, 3, -4]}, r"requests\[1\]\.input_token_ids: .* entry 3 is -4"),
    ({"input_token_ids": [1, 2, 3, 2**32]}, r"requests\[1\]\.input_token_ids: .* entry 3 is 4294967296"),
    (
        {"input_token_ids": [1.0, 2, 3, 4]},
        r"requests\[1\]\.input_token_ids: must be a one-dimensional sequence of ints",
    ),
    ({"input_token_ids": "1234"}, r"requests\[1\]\.input_token_ids: must be a sequence of token ids"),
    ({"output_tokens": -1}, r"requests\[1\]\.output_tokens: must lie in 0 <= output_tokens .*, got -1"),
    ({"output_token_ids": [2**32]}, r"requests\[1\]\.output_token_ids: must lie in 0 <= id < 2\*\*32"),
    ({"arrival_time_ms": -1}, r"requests\[1\]\.arrival_time_ms: must be finite and >= 0 ms, got -1"),
    ({"arrival_time_ms": math.nan}, r"requests\[1\]\.arrival_time_ms: must be finite and >= 0 ms, got nan"),
    ({"arrival_time_ms": math.inf}, r"requests\[1\]\.arrival_time_ms: must be finite and >= 0 ms, got inf"),
    ({"arrival_time_ms": None}, r"requests\[1\]\.arrival_time_ms: must be a time in ms"),
    ({"dp_rank": -1}, r"requests\[1\]\.dp_rank: must lie in 0 <= dp_rank"),
    ({"turn_index": 1.5}, r"requests\[1\]\.turn_index: must be an int"),
    ({"session_id": 1.5}, r"requests\[1\]\.session_id: must be a str, an int or a uuid"),
    ({"id": ""}, r"requests\[1\]\.id: must be a non-empty str"),
    ({"id": 1.5}, r"requests\[1\]\.id: must be a non-empty str, an int or a uuid\.UUID, got 1\.5"),
    ({"id": "first"}, r"requests\[1\]\.id: must be unique, 'first' is also requests\[0\]"),
    ({"input_token": 4}, r"requests\[1\]\.input_token: is not a key of a request \(allowed: id, "),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_a_bad_request_is_named_by_position_and_field(changes, message):
    with pytest.raises(WorkloadError, match=message):
        workload_from_requests([request(id="first"), request(**changes)])


def test_unknown_keys_can_be_let_through():
    assert len(workload_from_requests([request(colour=3)], strict=False)) == 1


def test_an_empty_list_is_an_error():
    with pytest.raises(WorkloadError, match="has no requests, at least one is required"):
        workload_from_requests([])


def test_what_is_not_a_request_is_an_error():
    with pytest.raises(WorkloadError, match=r"requests\[0\]: must be a mapping or an object"):
        workload_from_requests([3])


# ---------------------------------------------------------------- Workload.validate

FIELDS = ("specs", "segments", "tokens", "planned", "delay_ms", "first_turn")


def broken(change):
    base = workload_from_requests([request(id="a"), request(id="b", output_token_ids=[1, 2])])
    arrays = {name: getattr(base, name).copy() for name in FIELDS}
    options = {"request_names": base.request_names}
    change(arrays, options)
    return Workload(**arrays, **options)


def set_spec(name, value, row=1):
    def change(arrays, options):
        arrays["specs"][name][row] = value

    return change


def set_entry(name, value):
    def change(arrays, options):
        arrays[name][1] = value

    return change


def replace(name, value):
    def change(arrays, options):
        (options if name == "request_names" else arrays)[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_spec("input_tokens", 0), r"input_tokens: must be positive, got 0 \(b\)"),
        (set_spec("input_tokens", 5), r"input_tokens: must equal the length of the prompt content, got 5 \(b\)"),
        (set_spec("max_output_tokens", -1), r"max_output_tokens: must be >= 0, got -1"),
        (set_spec("max_output_tokens", 3), r"planned_offset: must lie inside `planned`"),
        (set_spec("arrival_ms", math.nan), r"arrival_ms: must be finite, >= 0, got nan \(b\)"),
        (set_spec("arrival_ms", -2.0), r"arrival_ms: must be finite, >= 0, got -2.0"),
        (set_spec("id_lo", 1), r"id_lo: request ids must be unique"),
        (set_spec("session", 0), r"session: must be below the number of sessions \(0\), got 0"),
        (set_spec("prompt_offset", 7), r"prompt_offset: must lie inside the data, got 7"),
        (set_spec("prompt_count", 0), r"prompt_offset: must lie inside the data"),
        (set_spec("dp_rank", -2), r"dp_rank: must be >= 0, or -1"),
        (set_entry("delay_ms", 3.0), r"delay_ms: must be 0 for the first turn of a session, got 3.0"),
        (set_entry("delay_ms", math.nan), r"delay_ms: must be finite, >= 0, got nan"),
        (set_entry("first_turn", False), r"arrival_ms: must be nan for a follow-up turn, got 5.0"),
        (replace("delay_ms", np.zeros(3)), r"delay_ms: must have one entry per request \(2\), got 3"),
        (replace("segments", np.zeros(2)), r"segments: must be a one-dimensional array"),
        (replace("segments", np.zeros(2, SEGMENT)), r"segments\.length: must be positive"),
        (replace("request_names", ["a", "a"]), r"id: request ids must be unique, 'a' occurs twice"),
        (replace("request_names", ["a"]), r"request_names: must have 2 entries, got 1"),
    ],
)
def test_validate_names_the_request_and_the_field(change, message):
    broken(lambda arrays, options: None)
    with pytest.raises(WorkloadError, match=message):
        broken(change)


def test_a_follow_up_turn_must_follow_its_session():
    def change(arrays, options):
        arrays["first_turn"][1] = False
        arrays["specs"]["arrival_ms"][1] = math.nan

    with pytest.raises(WorkloadError, match="b is a follow-up turn, so the row before must be the turn it waits for"):
        broken(change)
