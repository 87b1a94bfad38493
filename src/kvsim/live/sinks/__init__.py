"""Ready-made sinks of a live engine: into memory, into a file, and to subscribers over ZeroMQ.

Each is one file, and no more than :class:`kvsim.live.Sink` asks for: copy the one
nearest to what you need.
"""

from __future__ import annotations

from kvsim.live.sinks.jsonl import JsonlSink
from kvsim.live.sinks.memory import MemorySink, Shown
from kvsim.live.sinks.zmq import ZmqSink

__all__ = ["JsonlSink", "MemorySink", "Shown", "ZmqSink"]
