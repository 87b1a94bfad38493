"""Facts of a live engine kept in memory, for tests and notebooks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.live.publication import SinkSource
from kvsim.live.sinks.facts import take_facts

__all__ = ["MemorySink", "Shown"]


class Shown(NamedTuple):
    """Something that an engine showed.

    Attributes
    ----------
    fact : str
        Method of `kvsim.live.Sink`.
    dp_rank : int
    at_ms : float
        By the clock of the engine.
    payload : object
        A sequence, or what is single: forward-pass metrics, accept length, metrics.
    """

    fact: str
    dp_rank: int
    at_ms: float
    payload: Any


class MemorySink:
    """Keeps what an engine shows, in order.

    Parameters
    ----------
    facts : iterable of str, optional
        Methods of `kvsim.live.Sink`; by default all, KV events of all tiers.
    most : int, optional
        Keep only the newest so many; all by default.

    Attributes
    ----------
    shown : deque of Shown
    forgotten : int
        Those that were too many.
    source : SinkSource or None
        Whose facts they are.
    closed : bool
    """

    #: Appending returns at once.
    delivery = "inline"

    def __init__(self, facts: Iterable[str] | None = None, *, most: int | None = None) -> None:
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ConfigError("most", f"must be an int >= 1 or None, got {most!r}")
        self.shown: deque[Shown] = deque(maxlen=most)
        self.forgotten = 0
        self.source: SinkSource | None = None
        self.closed = False
        take_facts(self, facts, self._take)

    def open(self, source: SinkSource) -> None:
        """Remember whose facts will come."""
        self.source = source
        self.closed = False

    def close(self) -> None:
        """Note that no more will come."""
        self.closed = True

    def of(self, fact: str, dp_rank: int | None = None) -> list[Shown]:
        """Those of one kind, of one rank or of all."""
        return [one for one in self.shown if one.fact == fact and (dp_rank is None or one.dp_rank == dp_rank)]

    def items(self, fact: str, dp_rank: int | None = None) -> list[Any]:
        """The same without times, the items of all sequences one after the other."""
        return [item for one in self.of(fact, dp_rank) for item in one.payload]

    def _take(self, fact: str, dp_rank: int, at_ms: float, payload: Any) -> None:
        if len(self.shown) == self.shown.maxlen:
            self.forgotten += 1
        self.shown.append(Shown(fact, dp_rank, at_ms, payload))
