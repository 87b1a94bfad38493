"""The ready-made sinks of live engines: memory, JSONL, KV events over ZeroMQ."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kv_index import KvIndex
from kvsim import EngineConfig, FixedTiming, NativeHostOffload, Request
from kvsim.contract import (
    Admission,
    DestinationReserved,
    ForwardPassMetrics,
    KvEvent,
    Metrics,
    Output,
    PressureEvent,
    PressureState,
    Removed,
    SourceHeld,
    Stored,
    StoredBlock,
    TransferTiming,
)
from kvsim.errors import ConfigError
from kvsim.live import LiveScheduler, SinkSource, VirtualClock
from kvsim.live.sinks import JsonlSink, MemorySink, ZmqSink
from kvsim.live.sinks.facts import ALL_FACTS
from kvsim.live.sinks.zmq import END_OF_REPLAY, endpoint_of
from kvsim.rank import KvEvents

BIG = 2**127 + 5
CONFIG = EngineConfig(
    block_size=4,
    num_gpu_blocks=12,
    max_num_batched_tokens=16,
    max_num_seqs=4,
    emit_kv_events=True,
    emit_kv_token_ids=True,
    timing_model=FixedTiming(prefill_ms=5.0, decode_ms=2.0),
)
SOURCE = SinkSource(3, 1, CONFIG)
STORED = KvEvent(0, 3, 0, Stored(None, (StoredBlock(11, 12, (1, 2, 3, 4)), StoredBlock(21, 22, (5, 6, 7, 8)))))
REMOVED = KvEvent(1, 3, 0, Removed((21,)), "host_pinned")
STATE = PressureState(1, 2, 3)
#: One of everything: (fact, payload, what its lines say).
EVERYTHING: list[tuple[str, Any, list[dict[str, Any]]]] = [
    (
        "admissions",
        [Admission(BIG, 8, (4, 4)), Admission(2, 0)],
        [
            {
                "fact": "admission",
                "request_id": str(uuid.UUID(int=BIG)),
                "reused_input_tokens": 8,
                "cache_tier_attribution": [4, 4],
            },
            {
                "fact": "admission",
                "request_id": "00000000-0000-0000-0000-000000000002",
                "reused_input_tokens": 0,
                "cache_tier_attribution": None,
            },
        ],
    ),
    (
        "pressure",
        [PressureEvent(1.5, "vllm_preemption", 2, STATE, STATE, 1, None, None)],
        [
            {
                "fact": "pressure",
                "kind": "vllm_preemption",
                "request_id": "00000000-0000-0000-0000-000000000002",
                "state_before": {"running_requests": 1, "waiting_requests": 2, "active_blocks": 3},
                "state_after": {"running_requests": 1, "waiting_requests": 2, "active_blocks": 3},
                "request_active_blocks_before": 1,
                "logical_available_blocks_before": None,
                "required_blocks_before": None,
            }
        ],
    ),
    (
        "kv_events_with_tier",
        [STORED, REMOVED],
        [
            {
                "fact": "kv_event",
                "event_id": 0,
                "worker_id": 3,
                "storage_tier": "device",
                "data": {
                    "type": "stored",
                    "parent_hash": None,
                    "start_position": None,
                    "blocks": [
                        {"block_hash": 11, "tokens_hash": 12, "token_ids": [1, 2, 3, 4]},
                        {"block_hash": 21, "tokens_hash": 22, "token_ids": [5, 6, 7, 8]},
                    ],
                },
            },
            {
                "fact": "kv_event",
                "event_id": 1,
                "worker_id": 3,
                "storage_tier": "host_pinned",
                "data": {"type": "removed", "block_hashes": [21]},
            },
        ],
    ),
    (
        "fpm",
        ForwardPassMetrics(1, 8, 0.0, 0, 0, 0, 0.0, 0, 0, 0.0, 0, 0, 0.0, 5.0),
        [
            {
                "fact": "fpm",
                **ForwardPassMetrics(1, 8, 0.0, 0, 0, 0, 0.0, 0, 0, 0.0, 0, 0, 0.0, 5.0)._asdict(),
            }
        ],
    ),
    ("acceptance", (5, 2), [{"fact": "acceptance", "accepted_tokens": 5, "forwards": 2}]),
    (
        "outputs",
        [Output(2, 7, False, False, 4)],
        [
            {
                "fact": "output",
                "request_id": "00000000-0000-0000-0000-000000000002",
                "token_id": 7,
                "completed": False,
                "rejected": False,
                "cached_tokens": 4,
                "handoff_delay_ms": None,
                "failed": False,
            }
        ],
    ),
    (
        "lifecycle",
        [SourceHeld(9, 2, TransferTiming("full_prompt", 8, 100, None)), DestinationReserved(9, 2, 12)],
        [
            {
                "fact": "lifecycle",
                "event": "source_held",
                "handoff_id": "00000000-0000-0000-0000-000000000009",
                "request_id": "00000000-0000-0000-0000-000000000002",
                "transfer_timing": {
                    "mode": "full_prompt",
                    "full_prompt_tokens": 8,
                    "bytes_per_token": 100,
                    "bandwidth_gb_s": None,
                },
            },
            {
                "fact": "lifecycle",
                "event": "destination_reserved",
                "handoff_id": "00000000-0000-0000-0000-000000000009",
                "request_id": "00000000-0000-0000-0000-000000000002",
                "transferable_prompt_tokens": 12,
            },
        ],
    ),
    (
        "metrics",
        Metrics(0, 1, 2, 12, 1 / 12, 0.25, 1, 0, 0),
        [
            {
                "fact": "metrics",
                **{k: v for k, v in Metrics(0, 1, 2, 12, 1 / 12, 0.25, 1, 0, 0)._asdict().items() if k != "dp_rank"},
            }
        ],
    ),
]


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def prompts(count: int, length: int = 9) -> list[Request]:
    """Requests of which some share their beginnings, more than fit into the pool."""
    return [Request(i, [*range(100 * (i % 3), 100 * (i % 3) + length - 1), i], 4) for i in range(count)]


def serve(sinks: list[Any], requests: list[Request], config: EngineConfig = CONFIG, **options: Any) -> LiveScheduler:
    """Run requests to the end under a virtual clock."""

    async def run() -> LiveScheduler:
        engine = LiveScheduler(config, clock=VirtualClock(), sinks=sinks, **options)
        async with engine:
            for request in requests:
                await engine.submit(request, listen=False)
        return engine

    return asyncio.run(run())


# ---------------------------------------------------------------- which facts


@pytest.mark.parametrize("make", [MemorySink, lambda facts: JsonlSink("unused", facts)])
@pytest.mark.parametrize(
    ("facts", "what"),
    [
        (("outputs", "tokens"), "facts: must be out of admissions, .*, got 'tokens'"),
        ((), "facts: at least one of admissions, "),
        ("outputs", "facts: expected names out of .*, got the string 'outputs'"),
    ],
)
def test_facts_that_there_are_not_are_refused(make: Any, facts: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make(facts)


def test_only_the_chosen_facts_are_taken() -> None:
    sink = MemorySink(["outputs"])
    serve([sink], prompts(2))
    assert {one.fact for one in sink.shown} == {"outputs"}
    assert len(sink.items("outputs")) == 8


# ---------------------------------------------------------------- memory


def test_memory_keeps_everything_in_the_order_of_publication() -> None:
    sink = MemorySink()
    engine = serve([sink], prompts(1))
    assert [(one.fact, one.at_ms) for one in sink.shown][:11] == [
        ("metrics", 0.0),
        ("admissions", 0.0),
        ("kv_events_with_tier", 5.0),
        ("fpm", 5.0),
        ("acceptance", 5.0),
        ("outputs", 5.0),
        ("metrics", 5.0),
        ("fpm", 7.0),
        ("acceptance", 7.0),
        ("outputs", 7.0),
        ("metrics", 7.0),
    ]
    assert sink.source == SinkSource(0, 1, CONFIG)
    assert sink.closed
    [attached] = engine.sinks
    assert (attached.delivered, attached.dropped, attached.failed) == (len(sink.shown), 0, 0)


def test_memory_may_keep_the_newest_only() -> None:
    whole, newest = MemorySink(), MemorySink(most=5)
    serve([whole, newest], prompts(3))
    assert list(newest.shown) == list(whole.shown)[-5:]
    assert newest.forgotten == len(whole.shown) - 5


@pytest.mark.parametrize("most", [0, -1, True, 2.0])
def test_memory_that_keeps_nothing_is_refused(most: Any) -> None:
    with pytest.raises(ConfigError, match="most: must be an int >= 1 or None"):
        MemorySink(most=most)


# ---------------------------------------------------------------- JSONL


@pytest.mark.parametrize(("fact", "payload", "want"), EVERYTHING, ids=[row[0] for row in EVERYTHING])
def test_a_line_of_json_says_all_of_a_fact(tmp_path: Path, fact: str, payload: Any, want: Any) -> None:
    sink = JsonlSink(tmp_path / "facts.jsonl", [fact])
    sink.open(SOURCE)
    getattr(sink, fact)(1, 2.5, payload)
    # Before the file is closed: others follow it.
    assert lines_of(tmp_path / "facts.jsonl") == [{"dp_rank": 1, "at_ms": 2.5} | row for row in want]
    assert (sink.lines, sink.lost_lines) == (len(want), 0)
    sink.close()


def test_there_is_a_line_for_every_kind_of_fact() -> None:
    assert [fact for fact, _, _ in EVERYTHING] == list(ALL_FACTS)


def test_jsonl_says_what_memory_has(tmp_path: Path) -> None:
    memory, file = MemorySink(), JsonlSink(tmp_path / "facts.jsonl", on_full="wait", queue_size=2)
    engine = serve([memory, file], prompts(20))
    items = sum(1 if one.fact in ("fpm", "acceptance", "metrics") else len(one.payload) for one in memory.shown)
    written = lines_of(tmp_path / "facts.jsonl")
    assert len(written) == items == file.lines
    tokens = [(row["request_id"], row["token_id"]) for row in written if row["fact"] == "output"]
    assert tokens == [(str(uuid.UUID(int=out.request_id)), out.token_id) for out in memory.items("outputs")]
    assert [attached.dropped for attached in engine.sinks] == [0, 0]


@pytest.mark.parametrize("append", [False, True])
def test_a_file_starts_anew_unless_told_otherwise(tmp_path: Path, append: bool) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text('{"old": 1}\n', encoding="utf-8")
    sink = JsonlSink(path, append=append)
    sink.open(SOURCE)
    sink.close()
    assert lines_of(path) == [{"old": 1}] * append


def test_a_file_that_cannot_be_opened_fails_the_start_and_leaves_nothing_running(tmp_path: Path) -> None:
    first = MemorySink()
    with pytest.raises(ConfigError, match=r"path: .*nowhere.*cannot be written: No such file"):
        serve([first, JsonlSink(tmp_path / "nowhere" / "facts.jsonl")], [])
    assert first.closed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_lines_and_is_counted_and_the_engine_goes_on() -> None:
    memory, file = MemorySink(), JsonlSink("/dev/full", ["outputs"])
    with pytest.warns(RuntimeWarning, match="JsonlSink failed at outputs of rank 0 at 5.0 ms"):
        engine = serve([memory, file], prompts(4))
    attached = engine.sinks[1]
    assert len(memory.items("outputs")) == 16
    assert file.lost_lines == 16
    assert file.lines == 0
    assert attached.failed == attached.published > 0
    assert isinstance(attached.last_error, OSError)


class Narrow:
    """A file that takes some bytes of each call, and refuses some calls."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken = b""

    def write(self, data: bytes) -> int:
        room = self.script.pop(0) if self.script else len(data)
        if room < 0:
            raise OSError(28, "No space left on device")
        self.taken += data[:room]
        return min(room, len(data))

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("script", "want", "lost"),
    [
        ([3, 2], b"aaaa\nbbbb\ncccc\ndddd\neeee\n", 0),
        ([-1], b"cccc\ndddd\neeee\n", 2),
        ([7, -1], b"aaaa\nbbbb\ncccc\ndddd\neeee\n", 0),
        ([2, -1], b"aaaa\ncccc\ndddd\neeee\n", 1),
        ([5, -1], b"aaaa\ncccc\ndddd\neeee\n", 1),
        ([2, -1, 1, -1], b"aaaa\neeee\n", 3),
        ([2, -1, -1, -1], b"aaaa\n", 4),
    ],
)
def test_no_line_is_torn(script: list[int], want: bytes, lost: int) -> None:
    sink, file = JsonlSink("unused"), Narrow(script)
    failures = 0
    for lines in (b"aaaa\nbbbb\n", b"cccc\ndddd\n", b"eeee\n"):
        try:
            sink._write(file, lines)  # type: ignore[arg-type]
        except OSError:
            failures += 1
    sink._file = file  # type: ignore[assignment]
    sink.close()
    assert file.taken == want
    assert (sink.lines, sink.lost_lines) == (want.count(b"\n"), lost)
    assert sink.lines + sink.lost_lines == 5


# ---------------------------------------------------------------- ZeroMQ


class Subscriber:
    """A router: follows the stream of one rank, and asks for what it missed."""

    def __init__(self, zmq: Any, endpoint: str, replay: str | None, topic: str = "kv-events") -> None:
        self.zmq = zmq
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.connect(endpoint)
        self.replay = self.context.socket(zmq.DEALER)
        if replay is not None:
            self.replay.connect(replay)
        self.index = KvIndex(first_id=None)
        self.next = 0

    def receive(self, timeout_ms: int = 5000) -> tuple[bytes, int, list[Any]]:
        assert self.sub.poll(timeout_ms), "no message"
        topic, number, payload = self.sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def missed(self, first: int) -> list[tuple[int, list[Any]]]:
        self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert self.replay.poll(5000), "no end of the replay"
            empty, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))

    def take(self, number: int, payload: list[Any]) -> None:
        """Index a message."""
        assert number == self.next
        self.next += 1
        for event in payload[1]:
            event_id = self.index.next_id or 0
            tier = {"GPU": "device", "CPU_TIER1": "host_pinned"}[event[6] if event[0] == "BlockStored" else event[2]]
            if event[0] == "BlockStored":
                _, hashes, parent, tokens, block_size, *_ = event
                assert len(tokens) in (0, block_size * len(hashes))
                self.index.store(event_id, tier, parent, hashes, None)
            else:
                self.index.remove(event_id, tier, event[1])

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def zmq() -> Any:
    return pytest.importorskip("zmq", reason="needs the extra kvsim[zmq]")


@pytest.fixture
def published(zmq: Any) -> Iterator[tuple[ZmqSink, Subscriber]]:
    """A sink on loopback and a subscriber that it knows of."""
    sink = ZmqSink("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", buffer_steps=3)
    sink.open(SOURCE)
    subscriber = Subscriber(zmq, sink.endpoints[0], sink.replay_endpoints[0])
    # A subscription is on its way for a while; messages before it arrives are missed.
    number = 0
    while not subscriber.sub.poll(20):
        sink.kv_events_with_tier(0, 0.0, [KvEvent(number, 3, 0, Removed((1,)))])
        number += 1
        assert number < 500, "no connection"
    while subscriber.sub.poll(20):
        subscriber.sub.recv_multipart()
    yield sink, subscriber
    sink.close()
    subscriber.close()


def test_a_message_is_topic_number_and_payload(published: tuple[ZmqSink, Subscriber]) -> None:
    sink, subscriber = published
    sink.kv_events_with_tier(0, 1500.0, [STORED, REMOVED])
    topic, number, payload = subscriber.receive()
    assert topic == b"kv-events"
    assert number == sink._numbers[0] - 1
    assert payload == [
        1.5,
        [
            ["BlockStored", [11, 21], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", None],
            ["BlockRemoved", [21], "CPU_TIER1"],
        ],
        0,
    ]


def test_what_was_missed_is_repeated_from_the_buffer(published: tuple[ZmqSink, Subscriber]) -> None:
    sink, subscriber = published
    before = sink._numbers[0]
    for step in range(5):
        sink.kv_events_with_tier(0, float(step), [KvEvent(step, 3, 0, Removed((step,)))])
    last = before + 4
    live = [subscriber.receive()[1:] for _ in range(5)]
    assert [number for number, _ in live] == list(range(before, last + 1))
    assert subscriber.missed(last) == live[-1:]
    # The buffer has three; what is older is lost, and the first number says so.
    assert subscriber.missed(before) == subscriber.missed(last - 2) == live[-3:]
    assert subscriber.missed(0) == live[-3:]
    # What has not been sent yet is nothing to repeat.
    assert subscriber.missed(last + 1) == subscriber.missed(2**64 - 2) == []


def test_requests_that_make_no_sense_are_counted_and_do_no_harm(published: tuple[ZmqSink, Subscriber]) -> None:
    sink, subscriber = published
    for frames in ([b"", b"short"], [b"", b"", bytes(8)], [b"full", bytes(8)], [b"alone"]):
        subscriber.replay.send_multipart(frames)
    assert len(subscriber.missed(0)) == min(3, sink._numbers[0])
    assert sink.bad_requests == 4


def test_a_replay_without_a_message_is_only_its_end(zmq: Any) -> None:
    sink = ZmqSink("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    sink.open(SOURCE)
    subscriber = Subscriber(zmq, sink.endpoints[0], sink.replay_endpoints[0])
    assert subscriber.missed(0) == []
    sink.close()
    subscriber.close()


@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_router_that_comes_late_catches_up_and_knows_every_block(zmq: Any, dp_size: int) -> None:
    """Everything from the live stream or the replay, each rank on its own endpoints, nothing twice."""
    memory, sink = MemorySink(["kv_events"]), ZmqSink("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", on_full="wait")
    subscribers: list[Subscriber] = []

    async def run() -> None:
        engine = LiveScheduler(CONFIG, dp_size=dp_size, clock=VirtualClock(), sinks=[memory, sink])
        async with engine:
            for request in prompts(24):
                await engine.submit(request, listen=False)
            await engine.drained()
            await engine.flush_sinks()
            assert len(sink.endpoints) == len(sink.replay_endpoints) == dp_size
            for rank in range(dp_size):
                subscriber = Subscriber(zmq, sink.endpoints[rank], sink.replay_endpoints[rank])
                for message in await asyncio.to_thread(subscriber.missed, 0):
                    subscriber.take(*message)
                subscribers.append(subscriber)

    asyncio.run(run())
    for rank, subscriber in enumerate(subscribers):
        want = KvIndex()
        want.replay(memory.items("kv_events", rank))
        assert want.removals > 0
        assert subscriber.index.tiers == want.tiers
        assert (subscriber.index.stores, subscriber.index.removals) == (want.stores, want.removals)
        subscriber.close()


@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_events_are_packed_alike_from_rows_and_from_objects(zmq: Any, backend: str, token_ids: bool) -> None:
    sink = ZmqSink("tcp://127.0.0.1:*")
    memory = MemorySink(["kv_events_with_tier"])
    config = CONFIG.replace(backend=backend, emit_kv_token_ids=token_ids)
    if backend == "vllm":
        config = config.replace(
            kv_cache_bytes_per_token=1000,
            # So slow that the last of them end when the engine has nothing else to do.
            native_host_offload=NativeHostOffload(num_host_blocks=6, d2h_bandwidth_gbps=1e-6),
        )
    serve([memory], prompts(24), config=config)
    # Where several moments are shown as one, they are objects already.
    shown = [one.payload for one in memory.shown if isinstance(one.payload, KvEvents)]
    assert len(shown) > 10
    for events in shown:
        assert sink._rows(events) == [sink._event(event) for event in events]
    media = {event[6] for events in shown for event in sink._rows(events) if event[0] == "BlockStored"}
    assert media == ({"GPU", "CPU_TIER1"} if backend == "vllm" else {"GPU"})


def test_the_live_stream_goes_on_where_the_replay_ended(zmq: Any) -> None:
    sink = ZmqSink("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    sink.open(SOURCE)
    made = [KvEvent(i, 3, 0, Stored(i - 1 if i else None, (StoredBlock(i, 0),))) for i in range(40)]
    for event in made[:10]:
        sink.kv_events_with_tier(0, 0.0, [event])
    subscriber = Subscriber(zmq, sink.endpoints[0], sink.replay_endpoints[0])
    number = 10
    while not subscriber.sub.poll(20):
        sink.kv_events_with_tier(0, 0.0, [made[number]])
        number += 1
    _, first, payload = subscriber.receive()
    assert first >= 10
    for message in subscriber.missed(0)[:first]:
        subscriber.take(*message)
    subscriber.take(first, payload)
    assert subscriber.index.present == set(range(first + 1))
    sink.close()
    subscriber.close()


def test_closing_frees_the_endpoints_and_leaves_no_thread(zmq: Any) -> None:
    before = threading.active_count()
    sink = ZmqSink("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    sink.open(SOURCE)
    again = ZmqSink(sink.endpoints[0], sink.replay_endpoints[0])
    with pytest.raises(ConfigError, match=r"^endpoint: tcp://127.0.0.1:\d+ cannot be bound: Address already in use"):
        again.open(SOURCE)
    sink.close()
    sink.close()
    again.open(SOURCE)
    again.close()
    assert threading.active_count() == before


def test_what_was_bound_is_freed_if_the_rest_cannot_be(zmq: Any, tmp_path: Path) -> None:
    taken = ZmqSink("tcp://127.0.0.1:*")
    taken.open(SOURCE)
    first = ZmqSink(f"ipc://{tmp_path}/events", taken.endpoints[0])
    with pytest.raises(ConfigError, match=r"replay_endpoint: .* cannot be bound"):
        first.open(SOURCE)
    assert first.endpoints == ()
    first.close()
    taken.close()


def test_ranks_have_endpoints_of_their_own() -> None:
    assert [endpoint_of("tcp://127.0.0.1:5557", rank) for rank in range(3)] == [
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5558",
        "tcp://127.0.0.1:5559",
    ]
    assert [endpoint_of("ipc:///run/kv", rank) for rank in range(2)] == ["ipc:///run/kv", "ipc:///run/kv_dp1"]
    assert endpoint_of("tcp://127.0.0.1:*", 1) == "tcp://127.0.0.1:*"


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "5557", "127.0.0.1:5557", "udp://127.0.0.1:5557", "tcp://", "tcp://5557", "tcp://127.0.0.1:"),
        *("tcp://:5557", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:http", "ipc://", "inproc://a"),
    ],
)
def test_what_is_no_endpoint_is_refused_before_anything_starts(zmq: Any, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^endpoint: must "):
        ZmqSink(endpoint)
    with pytest.raises(ConfigError, match=r"^replay_endpoint: must "):
        ZmqSink("tcp://127.0.0.1:5557", endpoint)


@pytest.mark.parametrize("fields", [{"emit_kv_events": False}, {"enable_prefix_caching": False}])
def test_an_engine_without_events_has_nothing_to_publish(zmq: Any, fields: dict[str, Any]) -> None:
    config = EngineConfig(emit_kv_events=True).replace(**fields)
    with pytest.raises(ConfigError, match="emit_kv_events: ZmqSink needs it"):
        ZmqSink("tcp://127.0.0.1:*").open(SinkSource(0, 1, config))


@pytest.mark.parametrize(("name", "value"), [("buffer_steps", 0), ("hwm", -1), ("linger_ms", 1.5)])
def test_sizes_that_are_not_allowed_are_refused(zmq: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: must be an int >= "):
        ZmqSink("tcp://127.0.0.1:*", **{name: value})


def test_without_pyzmq_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"sinks: ZmqSink needs the extra: pip install 'kvsim\[zmq\]'"):
        ZmqSink("tcp://127.0.0.1:*")
