"""Reading Mooncake traces: content, sessions, and an error with its line for every kind of bad row."""

import gzip
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim._core import content
from kvsim.errors import WorkloadError
from kvsim.workload import load_workload, mooncake, read_mooncake

GOOD = {"hash_ids": [1, 2], "input_length": 20, "output_length": 3, "timestamp": 0}
PLAN_SEED = 0xD37A0A7E5EED


def row(**changes):
    """Return a good row with changes; ... removes a key."""
    return {key: value for key, value in (GOOD | changes).items() if value is not ...}


def write(path, rows):
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return path


@pytest.fixture
def read(tmp_path):
    """Read rows, or raw text, with trace block 16."""

    def read_rows(rows, **options):
        path = tmp_path / "trace.jsonl"
        if isinstance(rows, (str, bytes)):
            path.write_bytes(rows.encode() if isinstance(rows, str) else rows)
        else:
            write(path, rows)
        return read_mooncake(path, **({"block_size": 16} | options))

    return read_rows


def tokens_of_blocks(ids, length, block):
    return [ids[j // block] for j in range(length)]


# ---------------------------------------------------------------- content


def test_a_block_is_copies_of_its_id_in_order_of_first_appearance(read):
    work = read([row(hash_ids=[7, 9], input_length=6)], block_size=4)  # D14
    assert work.prompt_token_ids(0).tolist() == [0, 0, 0, 0, 1, 1]


def test_unused_trailing_ids_are_numbered_but_give_no_tokens(read):
    work = read([row(hash_ids=[5, 6, 7], input_length=16), row(hash_ids=[9], input_length=3)])
    assert work.prompt_token_ids(0).tolist() == [0] * 16
    assert work.prompt_token_ids(1).tolist() == [3] * 3


def test_ids_keep_all_64_bits(read):
    ids = [2**64 - 1, 2**63, 2**32, 0, 2**63]
    work = read([row(hash_ids=ids, input_length=80)])
    assert work.prompt_token_ids(0)[::16].tolist() == [0, 1, 2, 3, 1]


def test_neighbouring_equal_ids_make_one_segment_but_not_across_rows(read):
    work = read([row(hash_ids=[4, 4, 4], input_length=40), row(hash_ids=[4, 4, 5], input_length=48)])
    assert [(int(s["start"]), int(s["step"]), int(s["length"])) for s in work.segments] == [
        (0, 0, 40),
        (0, 0, 32),
        (1, 0, 16),
    ]


def test_missing_input_length_is_the_capacity(read):
    assert read([row(input_length=...)]).specs["input_tokens"].tolist() == [32]


def test_aliases_mean_the_same(read):
    plain = read([row(session_id="s"), row(session_id="s", timestamp=..., delay=4)])
    other = read(
        [
            {"hash_ids": [1, 2], "input_tokens": 20, "output_tokens": 3, "created_time": 0, "session_id": "s"},
            {"hash_ids": [1, 2], "input_tokens": 20, "output_tokens": 3, "delay_ms": 4, "session_id": "s"},
        ]
    )
    assert plain.specs.tobytes() == other.specs.tobytes()
    assert plain.delay_ms.tolist() == other.delay_ms.tolist() == [0, 4]


def test_unknown_keys_are_ignored_unless_strict(read):
    assert len(read([row(comment="x", type="chat")])) == 1
    with pytest.raises(WorkloadError, match=r"trace\.jsonl:1: comment: is not a key of a Mooncake row"):
        read([row(comment="x")], strict=True)


def test_planned_outputs_are_one_stream_in_request_number_order(read):
    rows = [
        row(session_id="a"),
        row(session_id="b", output_length=2),
        row(session_id="a", timestamp=..., output_length=4),
    ]
    work = read(rows)
    assert work.planned_token_ids(0)[:3].tolist() == [952584220, 694593853, 2967053780]
    stream = content.planned_tokens(PLAN_SEED, 9).tolist()
    assert [work.planned_token_ids(k).tolist() for k in range(3)] == [stream[:3], stream[3:7], stream[7:]]


def test_authored_outputs_are_kept_and_draw_nothing(read):
    work = read([row(), row(output_token_ids=[7, 8, 9]), row(output_length=2)])
    stream = content.planned_tokens(PLAN_SEED, 5).tolist()
    assert [work.planned_token_ids(k).tolist() for k in range(3)] == [stream[:3], [7, 8, 9], stream[3:]]


def test_length_beyond_the_ids_is_cut_and_counted(read):
    work = read([row(input_length=40), row()])
    assert work.clamped_rows == 1
    assert work.specs["input_tokens"].tolist() == [32, 20]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 5), min_size=1, max_size=6),
            st.integers(1, 96),
            st.integers(0, 5),
            st.integers(0, 100),
            st.none() | st.sampled_from("abc"),
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([1, 4, 16]),
)
def test_what_is_written_is_read(tmp_path_factory, items, block):
    rows, newest = [], {}
    for ids, length, output, stamp, session in items:
        item = {"hash_ids": ids, "input_length": min(length, len(ids) * block), "output_length": output}
        if session is None:
            item["timestamp"] = stamp
        else:
            item |= {"session_id": session, "timestamp": newest.get(session, 0) + stamp}
            newest[session] = item["timestamp"]
        rows.append(item)
    work = read_mooncake(write(tmp_path_factory.mktemp("trace") / "t.jsonl", rows), block_size=block)

    numbers, sessions = {}, {}
    for line, item in enumerate(rows, 1):
        for block_id in item["hash_ids"]:
            numbers.setdefault(block_id, len(numbers))
        sessions.setdefault(item.get("session_id", f"request_{line}"), []).append(item)
    assert work.session_names == list(sessions)
    in_order = [(name, turn, item) for name, turns in sessions.items() for turn, item in enumerate(turns)]
    assert work.num_requests == len(in_order)
    for at, (name, turn, item) in enumerate(in_order):
        spec = work.specs[at]
        assert (int(spec["id_hi"]), int(spec["id_lo"]), int(spec["turn"])) == (0, at + 1, turn)
        assert work.session_names[spec["session"]] == name
        assert work.prompt_token_ids(at).tolist() == tokens_of_blocks(
            [numbers[i] for i in item["hash_ids"]], item["input_length"], block
        )
        assert int(spec["max_output_tokens"]) == item["output_length"]
        if turn == 0:
            assert spec["arrival_ms"] == item["timestamp"]
        else:
            assert math.isnan(spec["arrival_ms"])
            assert work.delay_ms[at] == item["timestamp"] - sessions[name][turn - 1]["timestamp"]


# ---------------------------------------------------------------- sessions and times


def test_rows_without_session_are_named_by_line_with_blank_lines_counted(read):
    line = json.dumps(row())
    work = read(f"\n{line}\n \n\n{line}")
    assert work.session_names == ["request_2", "request_5"]
    assert not work.has_sessions


def test_sessions_lie_together_in_order_of_first_appearance(read):
    rows = [row(session_id="s"), row(), row(session_id="s", timestamp=90), row(session_id="t", timestamp=5)]
    work = read(rows)
    assert work.session_names == ["s", "request_2", "t"]
    assert work.specs["session"].tolist() == [0, 0, 1, 2]
    assert work.specs["turn"].tolist() == [0, 1, 0, 0]
    assert work.first_turn.tolist() == [True, False, True, True]
    assert work.delay_ms.tolist() == [0, 90, 0, 0]
    assert work.has_sessions
    assert work.num_sessions == 3


def test_think_time_is_the_delay_else_the_gap_to_the_newest_timestamp_else_zero(read):
    rows = [
        row(session_id="s", timestamp=10),
        row(session_id="s", timestamp=...),
        row(session_id="s", timestamp=50),
        row(session_id="s", timestamp=70, delay=3),
        row(session_id="s", timestamp=71),
    ]
    assert read(rows).delay_ms.tolist() == [0, 0, 40, 3, 1]


def test_priorities_are_kept_with_their_rows(read):
    work = read(
        [
            row(session_id="a", priority=-2, strict_priority=1),
            row(),
            row(session_id="a", priority=7, strict_priority=2**32 - 1),
        ]
    )
    assert work.specs["priority"].tolist() == [-2, 7, 0]
    assert work.specs["strict_priority"].tolist() == [1, 2**32 - 1, 0]


def test_missing_first_timestamp_is_time_zero(read):
    assert read([row(timestamp=...), row(timestamp=100)]).specs["arrival_ms"].tolist() == [0, 100]
    assert read([row(timestamp=None)]).specs["arrival_ms"].tolist() == [0]


def test_unsorted_timestamps_keep_file_order_until_the_run(read):
    work = read([row(timestamp=500), row(timestamp=0)])
    assert work.specs["arrival_ms"].tolist() == [500, 0]
    assert work.rebase_arrivals


def test_delta_rows_carry_new_tokens_only(read):
    rows = [row(session_id="s", hash_ids=[1] * 300, input_length=4190, output_length=592)]
    rows += [row(session_id="s", hash_ids=[2] * 40, input_length=592, output_length=16, timestamp=...)]
    work = read(rows, delta=True)
    assert work.cumulative
    assert work.full_prompt_tokens().tolist() == [4190, 5374]
    assert work.total_input_tokens == 9564


def test_request_ids_are_kept_and_missing_ones_named_by_line(read):
    work = read([row(request_id="b"), row(), row(request_id="a")])
    assert work.request_names == ["b", "request_2", "a"]
    assert read([row()]).request_names is None


# ---------------------------------------------------------------- files


def test_gzip_is_known_by_its_bytes_not_by_its_name(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(json.dumps(row()).encode()))
    assert len(read_mooncake(path, block_size=16)) == 1


def test_line_ends_of_windows_and_a_byte_order_mark_are_accepted(read):
    line = json.dumps(row()).encode()
    assert len(read(b"\xef\xbb\xbf" + line + b"\r\n" + line + b"\r\n\r\n")) == 2


@pytest.mark.parametrize("size", [2, 9, 60, -1])
def test_truncated_gzip_names_the_file(tmp_path, size):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(json.dumps(row(timestamp=t)).encode() + b"\n" for t in range(99)))[:size])
    with pytest.raises(WorkloadError, match=r"t\.jsonl\.gz: is a truncated or damaged gzip file"):
        read_mooncake(path)


def test_damaged_gzip_names_the_file(tmp_path):
    data = bytearray(gzip.compress(json.dumps(row()).encode() * 50))
    data[20] ^= 0xFF
    (tmp_path / "t.gz").write_bytes(bytes(data))
    with pytest.raises(WorkloadError, match="truncated or damaged gzip"):
        read_mooncake(tmp_path / "t.gz")


@pytest.mark.parametrize("text", ["", "\n", " \n\n\t\n"])
def test_a_file_without_requests_is_an_error(read, text):
    with pytest.raises(WorkloadError, match=r"trace\.jsonl: has no requests"):
        read(text)


def test_an_empty_gzip_file_is_an_error(tmp_path):
    (tmp_path / "t.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(WorkloadError, match="has no requests"):
        read_mooncake(tmp_path / "t.gz")


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(WorkloadError, match=r"nowhere\.jsonl: cannot be read"):
        read_mooncake(tmp_path / "nowhere.jsonl")


# ---------------------------------------------------------------- bad rows: file, line, field, value, what is allowed

BAD_ROWS = [
    (row(hash_ids=...), r"hash_ids: is required"),
    (row(hash_ids=None), r"hash_ids: is required"),
    (row(hash_ids=..., hash_id=[1]), r"hash_ids: is required, did you mean 'hash_id'\?"),
    (row(output_length=..., ouput_length=3), r"output_length: is required, did you mean 'ouput_length'\?"),
    (row(hash_ids=[]), r"hash_ids: must have at least one id, got \[\]"),
    (row(hash_ids=[-1, 2]), r"hash_ids: must lie in 0 <= id < 2\*\*64, got -1"),
    (row(hash_ids=[1, 2**64]), r"hash_ids: must lie in 0 <= id < 2\*\*64, got 18446744073709551616"),
    (row(hash_ids=[1.5, 2]), r"hash_ids\[0\]: expected `int`, got `float`"),
    (row(hash_ids="ab"), r"hash_ids: expected `array \| null`, got `str`"),
    (row(input_length=0), r"input_length: must be positive and at most 2147483647, got 0"),
    (row(input_length=-5), r"input_length: must be positive and at most 2147483647, got -5"),
    (row(input_length=20.5), r"input_length: expected `int \| null`, got `float`"),
    (row(input_length="20"), r"input_length: expected `int \| null`, got `str`"),
    (row(input_length=True), r"input_length: expected `int \| null`, got `bool`"),
    (row(input_tokens=20), r"input_length: must not be given together with its alias input_tokens: 20 and 20"),
    (row(output_tokens=3), r"output_length: must not be given together with its alias output_tokens: 3 and 3"),
    (row(created_time=1), r"timestamp: must not be given together with its alias created_time"),
    (row(delay=0, delay_ms=0), r"delay: must not be given together with its alias delay_ms"),
    (row(output_length=...), r"output_length: is required"),
    (row(output_length=-1), r"output_length: must lie in 0 <= output_length <= 2147483647, got -1"),
    (row(output_length=2**31), r"output_length: must lie in 0 <= output_length <= 2147483647, got 2147483648"),
    (row(output_token_ids=[1, 2]), r"output_token_ids: must have output_length = 3 entries, got 2"),
    (row(output_token_ids=[1, 2, 2**32]), r"output_token_ids: must lie in 0 <= id < 2\*\*32, got 4294967296"),
    (row(timestamp=-500), r"timestamp: must be finite and >= 0 ms, got -500"),
    (row(timestamp="5"), r"timestamp: expected `float \| null`, got `str`"),
    (row(delay=5), r"delay: must be 0 for the first turn of session 'request_3', got 5"),
    (row(delay=-1), r"delay: must be finite and >= 0 ms, got -1"),
    (row(session_id=3), r"session_id: expected `str \| null`, got `int`"),
    (row(wait_for=["a"]), r"carries dependencies of format agentic_mooncake"),
    (row(dependencies=[]), r"carries dependencies of format agentic_mooncake"),
    (row(request_id="x"), r"request_id: must be unique, 'x' is also on line 1"),
    (
        row(strict_priority=-1),
        r"strict_priority: must lie in 0 <= strict_priority <= 4294967295, got -1",
    ),
    (
        row(priority=2**31),
        r"priority: must lie in -2147483648 <= priority <= 2147483647, got 2147483648",
    ),
    (row(priority=0.5), r"priority: expected `int \| null`, got `float`"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS, ids=[str(i) for i in range(len(BAD_ROWS))])
def test_a_bad_row_is_named_by_file_line_and_field(read, bad, message):
    rows = [json.dumps(row(request_id="x")), "", json.dumps(bad), json.dumps(row())]
    with pytest.raises(WorkloadError, match=r"trace\.jsonl:3: " + message) as caught:
        read("\n".join(rows))
    assert caught.value.line == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("xx", "is not JSON"),
        ("{", "is not JSON"),
        ('{"hash_ids": [1], "output_length": 1, "timestamp": NaN}', "is not JSON"),
        ('{"hash_ids": [1], "output_length": NaN}', "is not JSON"),
        ('{"hash_ids": [1], "output_length": 1, "timestamp": 1e999}', "timestamp: number out of range"),
        ("[1]", "must be a JSON object"),
        ("7", "must be a JSON object"),
        ('{"hash_ids": [1], "output_length": 1} {"hash_ids": [1], "output_length": 1}', "is not JSON"),
        (b'{"hash_ids": [1], "output_length": 1, "session_id": "\xff"}', "is not JSON"),
    ],
)
def test_a_line_that_is_no_row_is_named(read, text, message):
    good = json.dumps(row()).encode()
    data = good + b"\n\n" + (text.encode() if isinstance(text, str) else text) + b"\n" + good
    with pytest.raises(WorkloadError, match=r"trace\.jsonl:3: " + message):
        read(data)


def test_turns_cannot_go_back_in_time(read):
    with pytest.raises(WorkloadError, match=r":2: timestamp: must not be before the previous one .* 90, got 50"):
        read([row(session_id="s", timestamp=90), row(session_id="s", timestamp=50)])


def test_a_follow_up_timestamp_needs_an_earlier_one(read):
    with pytest.raises(WorkloadError, match=r":2: timestamp: needs an earlier timestamp in session 's'"):
        read([row(session_id="s", timestamp=...), row(session_id="s", timestamp=50)])


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "16"])
def test_block_size_must_be_a_positive_int(read, size):
    with pytest.raises(WorkloadError, match="block_size: must be an int"):
        read([row()], block_size=size)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(), row(input_length=40)], r":2: input_length: 40 tokens need 3 hash ids of 16 tokens, got 2"),
        ([row(), row(input_length=16)], r":2: input_length: 16 tokens need 1 hash ids of 16 tokens, got 2"),
        ([row(), row(input_length=32)], r":2: hash_ids: id 2 holds 16 tokens here and 4 on line 1"),
        ([row(timestamp=500), row()], r":2: timestamp: must not be before 500 of line 1, got 0"),
        ([row(timestamp=...), row()], r":1: timestamp: is required, line 2 has one"),
        ([row(), row(), row(hashids=[1])], r":3: hashids: is not a key of a Mooncake row, did you mean 'hash_ids'"),
    ],
)
def test_strict_mode_refuses_what_is_otherwise_repaired(read, rows, message):
    assert len(read(rows)) == len(rows)
    with pytest.raises(WorkloadError, match=message):
        read(rows, strict=True)


def test_strict_mode_accepts_a_sound_trace(read):
    rows = [row(), row(timestamp=5), row(hash_ids=[1, 3], input_length=32, timestamp=5, session_id="s")]
    assert read(rows, strict=True).num_requests == 3
    assert read([row(timestamp=...), row(timestamp=...)], strict=True).num_requests == 2


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize("name", ["mooncake-delta", "mooncake_delta"])
def test_delta_format_has_two_spellings(tmp_path, name):
    path = write(tmp_path / "t.jsonl", [row()])
    assert load_workload(path, name, 16).cumulative
    assert not load_workload(path, "mooncake", 16).cumulative
    assert load_workload(path, block_size=None).block_size == 512


@pytest.mark.parametrize("name", ["agentic_mooncake", "agentic-mooncake", "applied_compute_agentic", "dynamo", "weka"])
def test_known_but_unsupported_formats_say_what_is_supported(tmp_path, name):
    with pytest.raises(WorkloadError, match=f"mooncake, mooncake-delta, mooncake_delta; '{name}' .* not supported"):
        load_workload(tmp_path / "t.jsonl", name)


def test_unknown_formats_say_what_is_supported(tmp_path):
    with pytest.raises(WorkloadError, match="must be one of mooncake, mooncake-delta, mooncake_delta; got 'csv'"):
        load_workload(tmp_path / "t.jsonl", "csv")


# ---------------------------------------------------------------- the workload itself


def test_arrays_are_read_only(read):
    work = read([row(), row()])
    for array in (work.specs, work.segments, work.planned, work.delay_ms, work.first_turn, work.prompt(0)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = array[0]
    with pytest.raises(AttributeError):
        work.cumulative = True


# --- Whole columns against row by row ---


VALUES = {
    "hash_ids": st.one_of(st.lists(st.integers(0, 5), max_size=3), st.sampled_from([None, [2**64], [-1], [2**63, 1]])),
    "input_length": st.one_of(st.integers(1, 40), st.sampled_from([None, 0, -1, 2**31, 2**70, -(2**63)])),
    "input_tokens": st.one_of(st.integers(1, 40), st.none()),
    "output_length": st.one_of(st.integers(0, 3), st.sampled_from([-1, 2**31, 2**65])),
    "output_token_ids": st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=3), st.just([2**32])),
    "timestamp": st.one_of(st.integers(0, 9), st.floats(0, 9), st.sampled_from([None, -1])),
    "created_time": st.none(),
    "delay": st.one_of(st.none(), st.just(0), st.integers(0, 5), st.just(-2)),
    "delay_ms": st.one_of(st.none(), st.integers(0, 5)),
    "session_id": st.one_of(st.none(), st.sampled_from(["a", "b", "request_2"])),
    "priority": st.one_of(st.none(), st.integers(-3, 3), st.just(2**31)),
    "strict_priority": st.one_of(st.none(), st.integers(0, 3), st.sampled_from([-1, 2**32])),
    "wait_for": st.one_of(st.none(), st.none(), st.just(["x"])),
}
KEPT = {"hash_ids", "output_length"}
ROWS = st.sets(st.sampled_from(sorted(VALUES)), max_size=5).flatmap(
    lambda keys: st.lists(st.fixed_dictionaries({key: VALUES[key] for key in keys | KEPT}), min_size=1, max_size=6)
)


@settings(max_examples=300, deadline=None)
@given(rows=ROWS, strict=st.booleans())
def test_a_trace_is_refused_if_and_only_if_a_look_at_each_row_finds_why(tmp_path_factory, rows, strict):
    path = tmp_path_factory.mktemp("rows") / "trace.jsonl"
    lines = [json.dumps(one) for one in rows]
    path.write_text("\n".join(lines))
    # A blank line keeps columns of ids out of it: the file is read line by line then.
    slow = path.with_name("slow.jsonl")
    slow.write_text("\n".join(lines) + "\n\n")
    found = []
    for one in (path, slow):
        try:
            work = read_mooncake(one, block_size=16, strict=strict)
        except WorkloadError as error:
            found.append(str(error).replace(str(one), "trace"))
            continue
        table = mooncake._read_table(one.read_bytes(), str(one))
        with pytest.raises(AssertionError, match="no row has an error"):
            mooncake._Builder(str(one), 16, False, strict).explain(table)
        found.append([work.specs.tolist(), work.segments.tolist(), work.planned.tolist(), work.delay_ms.tolist()])
    assert found[0] == found[1]
