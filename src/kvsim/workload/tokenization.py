"""The pool of tokenizers that a request crosses before an engine sees it (spec/replay.md 4)."""

from __future__ import annotations

import heapq
import math

from kvsim.errors import ConfigError

__all__ = ["TokenizationPool"]


class TokenizationPool:
    """First-in-first-out servers in front of every engine worker.

    Each worker has servers of its own. A request takes the server that is free
    first and holds it for ``base_ms + per_input_token_ms * input_tokens``.
    Times are plain floats, not rounded to nanoseconds.

    Parameters
    ----------
    workers : int
        Servers in front of each engine worker, at least 1.
    base_ms, per_input_token_ms : float
        Service time, finite and >= 0.

    Raises
    ------
    ConfigError
        If a parameter is out of range.
    """

    __slots__ = ("_free_ms", "base_ms", "per_input_token_ms", "workers")

    def __init__(self, workers: int, base_ms: float = 0.0, per_input_token_ms: float = 0.0) -> None:
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ConfigError("tokenization.workers", f"must be an int >= 1, got {workers!r}")
        for name, value in (("base_ms", base_ms), ("per_input_token_ms", per_input_token_ms)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(f"tokenization.{name}", f"must be finite and >= 0, got {value!r}")
        self.workers = workers
        self.base_ms = float(base_ms)
        self.per_input_token_ms = float(per_input_token_ms)
        self._free_ms: dict[int, list[float]] = {}  # engine worker -> heap of the times its servers are free

    def leave_ms(self, worker: int, arrival_ms: float, input_tokens: int) -> float:
        """Let one request in and say when it leaves; call in order of arrival.

        Parameters
        ----------
        worker : int
            Engine worker that the request is placed on.
        arrival_ms : float
            When it reaches the pool; also when its server was free long before.
        input_tokens : int
            Prompt length.

        Returns
        -------
        float
            Time at which the worker may see it, ms.
        """
        free = self._free_ms.get(worker)
        if free is None:
            free = self._free_ms[worker] = [-math.inf] * self.workers
        # The service time is one number first: the sum rounds differently in another order.
        leave = max(arrival_ms, free[0]) + (self.base_ms + self.per_input_token_ms * input_tokens)
        heapq.heapreplace(free, leave)
        return leave
