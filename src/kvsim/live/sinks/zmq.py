"""KV events for routers, over ZeroMQ, in the form in which vLLM publishes them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import msgspec

from kvsim.contract import KvEvent, Stored
from kvsim.errors import ConfigError
from kvsim.layout import StorageTier
from kvsim.live.publication import SinkSource
from kvsim.rank import KvEvents

__all__ = ["END_OF_REPLAY", "MEDIA", "ZmqSink", "endpoint_of"]

#: Storage tiers as subscribers call them; others go by their own names, in capitals.
MEDIA = {"device": "GPU", "host_pinned": "CPU_TIER1", "disk": "CPU_TIER2"}

_MEDIUM = {int(tier): MEDIA.get(tier.name.lower(), tier.name) for tier in StorageTier}
_HAS_PARENT = 1

#: Instead of a sequence number: all that was asked for has been sent.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class ZmqSink:
    """Publishes KV events on a PUB socket per rank, and repeats what a subscriber missed on a ROUTER socket.

    A message has three frames: the topic; a sequence number, 8 bytes, big endian,
    from 0 without gaps; and msgpack of ``[seconds, events, dp_rank]``. An event is

    * ``["BlockStored", block_hashes, parent_hash, token_ids, block_size, None, medium, None]``, where the Nones are
      the id and the name of a LoRA, of which there are none, and `token_ids` is empty unless the configuration has
      `emit_kv_token_ids`,
    * or ``["BlockRemoved", block_hashes, medium]``.

    A replay is asked for with the first sequence number wanted, 8 bytes, from a
    REQ or DEALER socket, behind an empty frame. The answers are ``(b"", number,
    payload)`` for each message from there on that is still in the buffer, then
    ``(b"", END_OF_REPLAY, b"")``. If the first number is larger than the one asked
    for, what is between is lost.

    Parameters
    ----------
    endpoint : str
        Where rank 0 binds its PUB socket, for example ``tcp://127.0.0.1:5557``. Others
        take the ports after it, or the name with ``_dp1``, ... behind.
    replay_endpoint : str, optional
        The same of the ROUTER sockets; no replay if omitted.
    topic : str
        First frame of every message.
    buffer_steps : int
        Messages of each rank that are kept for replays.
    hwm : int
        Messages that wait for a slow subscriber; further ones it misses.
    linger_ms : int
        How long `close` waits for subscribers to take the last messages.
    queue_size, on_full
        As for every sink, see `kvsim.live.Sink`.

    Attributes
    ----------
    bad_requests : int
        Messages to the ROUTER sockets that ask for nothing known.
    endpoints, replay_endpoints : tuple of str
        Where the ranks are bound, wildcards resolved; empty before `open`.

    Raises
    ------
    ConfigError
        pyzmq is missing (``pip install 'kvsim[zmq]'``), or an argument is not allowed.

    Notes
    -----
    A ZeroMQ socket belongs to one thread at a time. PUB sockets are used by the
    thread that calls this sink, ROUTER sockets by one of its own; between them is
    only the buffer, under a lock.
    """

    delivery = "thread"

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "kv-events",
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        linger_ms: int = 500,
        queue_size: int = 16384,
        on_full: str = "drop",
    ) -> None:
        self._zmq = _import_zmq()
        for name, value, least in (("buffer_steps", buffer_steps, 1), ("hwm", hwm, 0), ("linger_ms", linger_ms, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(name, f"must be an int >= {least}, got {value!r}")
        for name, where in (("endpoint", endpoint), ("replay_endpoint", replay_endpoint)):
            if where is not None:
                endpoint_of(where, 0, name)
        self.queue_size = queue_size
        self.on_full = on_full
        self.bad_requests = 0
        self.endpoints: tuple[str, ...] = ()
        self.replay_endpoints: tuple[str, ...] = ()
        self._wanted = endpoint, replay_endpoint
        self._topic = topic.encode()
        self._buffer_steps = buffer_steps
        self._hwm = hwm
        self._linger_ms = linger_ms
        self._encoder = msgspec.msgpack.Encoder()
        self._block_size = 0
        self._context: Any = None
        self._publishers: list[Any] = []
        self._stop: Any = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._numbers: list[int] = []
        #: of each rank the newest messages: (number, payload)
        self._buffers: list[deque[tuple[int, bytes]]] = []

    # ------------------------------------------------------------ the sink

    def open(self, source: SinkSource) -> None:
        """Bind the sockets of all ranks.

        Raises
        ------
        ConfigError
            The engine emits no KV events, or an endpoint cannot be bound; nothing stays bound.
        """
        if not (source.config.emit_kv_events and source.config.enable_prefix_caching):
            raise ConfigError("emit_kv_events", "ZmqSink needs it, and prefix caching: else there are no events")
        zmq = self._zmq
        self._block_size = source.config.tokens_per_block
        self._numbers = [0] * source.dp_size
        self._buffers = [deque(maxlen=self._buffer_steps) for _ in range(source.dp_size)]
        self._context = zmq.Context()
        routers: list[Any] = []
        try:
            self._publishers = [
                self._bind(zmq.PUB, self._hwm, "endpoint", self._wanted[0], rank) for rank in range(source.dp_size)
            ]
            if self._wanted[1] is not None:
                routers = [
                    # A whole replay and its end fit, whatever the reader does.
                    self._bind(zmq.ROUTER, self._buffer_steps + 1, "replay_endpoint", self._wanted[1], rank)
                    for rank in range(source.dp_size)
                ]
        except BaseException:
            self._context.destroy(linger=0)
            self._publishers, self._context = [], None
            raise
        self.endpoints = tuple(_bound(socket) for socket in self._publishers)
        self.replay_endpoints = tuple(_bound(socket) for socket in routers)
        if routers:
            stopped = self._context.socket(zmq.PAIR)
            stopped.bind("inproc://stop")
            self._stop = self._context.socket(zmq.PAIR)
            self._stop.connect("inproc://stop")
            self._thread = threading.Thread(
                target=self._serve, args=(routers, stopped), name="kvsim-zmq-replay", daemon=True
            )
            self._thread.start()

    def kv_events_with_tier(self, dp_rank: int, at_ms: float, events: Sequence[KvEvent]) -> None:
        """Publish the events of one moment as one message."""
        packed = self._rows(events) if isinstance(events, KvEvents) else [self._event(event) for event in events]
        payload = self._encoder.encode((at_ms / 1000.0, packed, dp_rank))
        number = self._numbers[dp_rank]
        # In the buffer before it is out: who sees a gap finds all of it.
        with self._lock:
            self._buffers[dp_rank].append((number, payload))
        self._numbers[dp_rank] = number + 1
        self._publishers[dp_rank].send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def close(self) -> None:
        """End replays, let subscribers take what is on its way, and free the endpoints."""
        if self._context is None:
            return
        if self._thread is not None:
            self._stop.send(b"")
            self._thread.join()
            self._stop.close(linger=0)
            self._thread = None
        for socket in self._publishers:
            socket.close(linger=self._linger_ms)
        self._publishers = []
        context, self._context = self._context, None
        context.term()

    # ------------------------------------------------------------ inside

    def _bind(self, kind: int, hwm: int, name: str, endpoint: str, rank: int) -> Any:
        where = endpoint_of(endpoint, rank, name)
        socket = self._context.socket(kind)
        socket.sndhwm = hwm
        try:
            socket.bind(where)
        except self._zmq.ZMQError as error:
            raise ConfigError(name, f"{where} cannot be bound: {error.strerror or error}") from None
        return socket

    def _rows(self, events: KvEvents) -> list[tuple[Any, ...]]:
        """The same as `_event` of each, without an object for each block."""
        hashes, tokens = events.blocks["block_hash"].tolist(), events.token_ids
        columns = (events.events[name].tolist() for name in ("parent_hash", "first", "count", "kind", "flags", "tier"))
        packed: list[tuple[Any, ...]] = []
        for parent, first, count, kind, flags, tier in zip(*columns, strict=True):
            blocks, medium = hashes[first : first + count], _MEDIUM[tier]
            if kind:
                packed.append(("BlockRemoved", blocks, medium))
                continue
            ids = [] if tokens is None or tier else list(chain.from_iterable(tokens[first : first + count]))
            above = parent if flags & _HAS_PARENT else None
            packed.append(("BlockStored", blocks, above, ids, self._block_size, None, medium, None))
        return packed

    def _event(self, event: KvEvent) -> tuple[Any, ...]:
        data, medium = event.data, MEDIA.get(event.storage_tier, event.storage_tier.upper())
        if not isinstance(data, Stored):
            return "BlockRemoved", list(data.block_hashes), medium
        hashes = [block.block_hash for block in data.blocks]
        tokens = [token for block in data.blocks for token in block.token_ids or ()]
        return "BlockStored", hashes, data.parent_hash, tokens, self._block_size, None, medium, None

    def _serve(self, routers: list[Any], stopped: Any) -> None:
        """Answer replays until told to stop; owns these sockets."""
        zmq = self._zmq
        poller = zmq.Poller()
        for socket in (*routers, stopped):
            poller.register(socket, zmq.POLLIN)
        try:
            while stopped not in (ready := dict(poller.poll())):
                for rank, router in enumerate(routers):
                    if router in ready:
                        # A reader that went away is its own affair.
                        with contextlib.suppress(zmq.ZMQError):
                            self._replay(router, rank)
        finally:
            for socket in routers:
                socket.close(linger=self._linger_ms)
            stopped.close(linger=0)

    def _replay(self, router: Any, rank: int) -> None:
        frames = router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            self.bad_requests += 1
            return
        start = int.from_bytes(frames[2], "big")
        with self._lock:
            buffer = self._buffers[rank]
            skipped = min(max(0, start - buffer[0][0]), len(buffer)) if buffer else 0
            messages = list(islice(buffer, skipped, None))
        for number, payload in messages:
            router.send_multipart((frames[0], b"", number.to_bytes(8, "big"), payload))
        router.send_multipart((frames[0], b"", END_OF_REPLAY, b""))


def endpoint_of(endpoint: str, dp_rank: int, name: str = "endpoint") -> str:
    """Where a rank binds if rank 0 binds at `endpoint`.

    Raises
    ------
    ConfigError
        It is not an endpoint of ZeroMQ; says `name`.
    """
    transport, found, address = endpoint.partition("://")
    if not found or not address or transport not in ("tcp", "ipc"):
        raise ConfigError(name, f"must be tcp://HOST:PORT or ipc://PATH, got {endpoint!r}")
    if transport != "tcp":
        return endpoint if dp_rank == 0 else f"{endpoint}_dp{dp_rank}"
    host, found, port = address.rpartition(":")
    if port == "*" and found and host:
        return endpoint
    if not found or not host or not port.isdecimal() or not 0 < int(port) + dp_rank < 65536:
        raise ConfigError(name, f"must have a host and a port in 1 <= port < 65536 for every rank, got {endpoint!r}")
    return f"tcp://{host}:{int(port) + dp_rank}"


def _bound(socket: Any) -> str:
    where: bytes | str = socket.last_endpoint
    return where.decode().rstrip("\0") if isinstance(where, bytes) else where


def _import_zmq() -> Any:
    try:
        import zmq
    except ImportError:
        raise ConfigError("sinks", "ZmqSink needs the extra: pip install 'kvsim[zmq]'") from None
    return zmq
