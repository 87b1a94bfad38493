"""Requests as placements see them, made of a workload one by one."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim._core import content
from kvsim.layout import Pool
from kvsim.placement.base import PlacedRequest
from kvsim.workload.driver import ArrivalDriver

__all__ = ["PlacedRequests", "PromptHashes"]

_NO_LIMIT = 2**63 - 1


class PromptHashes:
    """Sequence hashes of the prompts of a run, computed when asked for and not kept.

    A prompt whose content was made up by the reader of the workload has hashes like any other: it is a content
    that no other request shares.

    Parameters
    ----------
    driver : ArrivalDriver
        Knows the prompts, also those that grow with the conversation.
    block_size : int
        Tokens per block of the engines.
    """

    __slots__ = ("_driver", "block_size")

    def __init__(self, driver: ArrivalDriver, block_size: int) -> None:
        self._driver = driver
        self.block_size = block_size

    def __call__(self, row: int) -> npt.NDArray[np.uint64]:
        """Hashes of the complete blocks of the prompt of a row, shape (prompt_tokens // block_size,).

        Raises
        ------
        WorkloadError
            The prompt of a growing conversation is not known before the turn is released.
        """
        parts = self._driver.prompt_parts(row)
        return content.hash_parts(parts, None, 0, 0, 0, self.block_size, _NO_LIMIT, False)[0]


class PlacedRequests:
    """Makes the `PlacedRequest` of a row.

    Parameters
    ----------
    driver : ArrivalDriver
    block_size : int
        Tokens per block of the engines.
    """

    __slots__ = ("_columns", "_driver", "_hashes", "_prefill_ranks", "_specs")

    def __init__(self, driver: ArrivalDriver, block_size: int) -> None:
        self._driver = driver
        self._specs = driver.workload.specs
        self._prefill_ranks = driver.workload.prefill_dp_ranks
        self._hashes = PromptHashes(driver, block_size)
        names: Any = self._specs.dtype.names
        wanted = ("id_hi", "id_lo", "max_output_tokens", "session", "turn", "dp_rank", "priority", "strict_priority")
        self._columns = tuple(names.index(name) for name in wanted)

    def make(self, row: int, arrival_ms: float, pool: Pool = Pool.AGGREGATED) -> PlacedRequest:
        """Request of a row that has been released; `pool` decides which rank hint counts."""
        spec = self._specs[row].item()
        id_hi, id_lo, outputs, session, turn, dp_rank, priority, strict_priority = (spec[i] for i in self._columns)
        if pool is Pool.PREFILL and self._prefill_ranks is not None and self._prefill_ranks[row] >= 0:
            dp_rank = int(self._prefill_ranks[row])
        return PlacedRequest(
            row,
            (id_hi << 64) | id_lo,
            self._driver.prompt_tokens(row),
            outputs,
            dp_rank=dp_rank,
            session=session,
            turn=turn,
            arrival_ms=arrival_ms,
            priority=priority,
            strict_priority=strict_priority,
            hashes=partial(self._hashes, row),
        )
