from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt

from kvsim._core.state import RankState

_Rows: TypeAlias = npt.NDArray[Any]  # a struct array of kvsim.layout
_U32: TypeAlias = npt.NDArray[np.uint32]
_U64: TypeAlias = npt.NDArray[np.uint64]
_I64: TypeAlias = npt.NDArray[np.int64]
# Paged engines: hashes, local hashes or None. Radix engine: layout.RUN rows, heads. Then offsets of shape (rows + 1,).
_Content: TypeAlias = tuple[_U64 | None, _U64 | None, _Rows | None, _U64 | None, _I64]

class _Histogram(Protocol):
    def add(self, gap_ns: npt.ArrayLike, weight: npt.ArrayLike = 1) -> None: ...

@final
class Fleet:
    def __init__(
        self,
        states: Sequence[RankState],
        dp_size: int,
        records: _Rows,  # layout.REQUEST_RECORD
        histogram: _Histogram,
        *,
        capture_admissions: bool = False,
        capture_outputs: bool = False,
        record_passes: bool = False,
    ) -> None: ...
    @property
    def now_ms(self) -> float: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def passes(self) -> int: ...
    @property
    def committed_prefill_tokens(self) -> int: ...
    @property
    def done(self) -> int: ...
    def set_content(
        self,
        specs: _Rows,  # layout.REQUEST_SPEC
        planned: _U32,
        source: Callable[[int, int], _Content],
    ) -> None: ...
    def set_feed(
        self, rows: _I64, times: npt.NDArray[np.float64], ranks: npt.NDArray[np.int32], concurrency: int = 0
    ) -> None: ...
    def submit(
        self,
        rank: int,
        row: int,
        arrival_ms: float,
        num_input: int | None = None,
        content: tuple[Any, Any, _U32 | None, Any] | None = None,  # as RankState.submit
    ) -> None: ...
    def track_rows(self, rank: int, slots: npt.NDArray[Any]) -> _I64: ...
    def run(
        self, until_ms: float = ..., cap_ms: float = ..., stop_on_end: bool = False, slice_passes: int = ...
    ) -> int: ...
    def take_ended(self) -> list[int]: ...
    def fail_stuck(self) -> bool: ...
    def finish(self) -> tuple[_Rows, _Rows, _Rows]: ...  # layout.ADMISSION_LOG, OUTPUT_RECORD, PASS_RECORD

def check_layout() -> None: ...
