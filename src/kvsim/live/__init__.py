"""The engine against a clock: a mock engine that routers and planners talk to while it runs.

A :class:`LiveScheduler` is one worker, a rank or a group of ranks with attention
DP, driven by one asyncio task. It is the same core as `kvsim.replay`: under a
:class:`VirtualClock` the same arrivals give the same outputs, times, KV events
and forward-pass metrics, and a run takes no longer than it computes. Under a
:class:`WallClock` passes last as long as modelled.

.. code-block:: python

    async with LiveScheduler(config, clock=WallClock(), sinks=[MySink()]) as engine:
        await engine.submit(Request(7, range(100), max_output_tokens=20))
        async for output in engine.outputs(7):
            print(engine.clock.now(), output.token_id)

What leaves the engine:

==================================  ================================================================
to whom                             how
==================================  ================================================================
the client of a request             ``engine.outputs(request_id)``, one `Output` after the other
a frontend of many requests         ``engine.receiver()``, the outputs of a pass as one list
the caller of a command             the `CommandEffects` that ``await engine.command(...)`` returns
the coordinator of handoffs         ``engine.lifecycle(dp_rank)``, taken once
whoever watches the load            ``engine.metrics(dp_rank)``, ``await engine.metrics_changed(dp_rank)``
everybody else                      sinks, see :class:`Sink`
==================================  ================================================================
"""

from __future__ import annotations

from kvsim.live.clock import Clock, VirtualClock, WallClock
from kvsim.live.publication import AttachedSink, Sink, SinkSource
from kvsim.live.scheduler import LiveScheduler
from kvsim.live.streams import LifecycleStream, MetricsWatch, OutputReceiver, OutputStream

__all__ = [
    "AttachedSink",
    "Clock",
    "LifecycleStream",
    "LiveScheduler",
    "MetricsWatch",
    "OutputReceiver",
    "OutputStream",
    "Sink",
    "SinkSource",
    "VirtualClock",
    "WallClock",
]
