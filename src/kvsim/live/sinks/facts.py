"""Which facts a sink takes, for sinks that let their user choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from kvsim.errors import ConfigError
from kvsim.live.publication import METHODS

__all__ = ["ALL_FACTS", "take_facts"]

#: Everything once: KV events of all tiers, not those of the device again.
ALL_FACTS = tuple(method for method in METHODS if method != "kv_events")


def take_facts(sink: object, facts: Iterable[str] | None, take: Callable[[str, int, float, Any], None]) -> None:
    """Give `sink` a method for each fact; each calls `take` with the fact before its own arguments.

    Parameters
    ----------
    sink : object
    facts : iterable of str, optional
        Methods of `kvsim.live.Sink`; by default `ALL_FACTS`.
    take : callable
        Of (fact, dp rank, time in milliseconds, payload).

    Raises
    ------
    ConfigError
        There is no such fact, or none at all.
    """
    if isinstance(facts, str):
        raise ConfigError("facts", f"expected names out of {', '.join(METHODS)}, got the string {facts!r}")
    chosen = ALL_FACTS if facts is None else tuple(dict.fromkeys(facts))
    if not chosen:
        raise ConfigError("facts", f"at least one of {', '.join(METHODS)}")
    for fact in chosen:
        if fact not in METHODS:
            raise ConfigError("facts", f"must be out of {', '.join(METHODS)}, got {fact!r}")
        setattr(sink, fact, partial(take, fact))
