from collections.abc import Sequence
from typing import Literal, TypeAlias, final, overload

import numpy as np
import numpy.typing as npt

__all__ = [
    "AcceptanceSampler",
    "block_segments",
    "equal_block_hashes",
    "expand_parts",
    "hash_parts",
    "hash_workload",
    "intern_ids",
    "parse_id_lists",
    "planned_tokens",
    "prompt_lengths",
    "runs_parts",
    "runs_workload",
    "synthetic_tokens",
    "xxh3_64",
]

_U32: TypeAlias = npt.NDArray[np.uint32]
_U64: TypeAlias = npt.NDArray[np.uint64]
_I64: TypeAlias = npt.NDArray[np.int64]
_Rows: TypeAlias = npt.NDArray[np.void]  # layout.SEGMENT, layout.REQUEST_SPEC or layout.RUN
_Parts: TypeAlias = Sequence[_U32 | _Rows]  # token ids or layout.SEGMENT

def xxh3_64(data: bytes | bytearray | memoryview | npt.NDArray[np.uint8], seed: int = 0) -> int: ...
@overload
def hash_workload(
    specs: _Rows,
    segments: _Rows | tuple[int, int],
    tokens: _U32,
    planned: _U32 | tuple[int, int],
    block_size: int,
    max_tokens: int,
    want_local: Literal[True],
    equal_hashes: _U64 | None = None,
) -> tuple[_U64, _U64, _I64]: ...
@overload
def hash_workload(
    specs: _Rows,
    segments: _Rows | tuple[int, int],
    tokens: _U32,
    planned: _U32 | tuple[int, int],
    block_size: int,
    max_tokens: int,
    want_local: Literal[False],
    equal_hashes: _U64 | None = None,
) -> tuple[_U64, None, _I64]: ...
@overload
def hash_workload(
    specs: _Rows,
    segments: _Rows | tuple[int, int],
    tokens: _U32,
    planned: _U32 | tuple[int, int],
    block_size: int,
    max_tokens: int,
    want_local: bool,
    equal_hashes: _U64 | None = None,
) -> tuple[_U64, _U64 | None, _I64]: ...
@overload
def hash_parts(
    parts: _Parts,
    outputs: _U32 | None,
    id_hi: int,
    id_lo: int,
    num_output: int,
    block_size: int,
    max_tokens: int,
    want_local: Literal[True],
) -> tuple[_U64, _U64]: ...
@overload
def hash_parts(
    parts: _Parts,
    outputs: _U32 | None,
    id_hi: int,
    id_lo: int,
    num_output: int,
    block_size: int,
    max_tokens: int,
    want_local: Literal[False],
) -> tuple[_U64, None]: ...
@overload
def hash_parts(
    parts: _Parts,
    outputs: _U32 | None,
    id_hi: int,
    id_lo: int,
    num_output: int,
    block_size: int,
    max_tokens: int,
    want_local: bool,
) -> tuple[_U64, _U64 | None]: ...
def runs_workload(
    specs: _Rows,
    segments: _Rows | tuple[int, int],
    tokens: _U32,
    planned: _U32 | tuple[int, int],
    page_size: int,
    max_tokens: int,
    with_hashes: bool,
    equal_hashes: _U64 | None = None,
) -> tuple[_Rows, _I64, _U64]: ...
def runs_parts(
    parts: _Parts,
    outputs: _U32 | None,
    id_hi: int,
    id_lo: int,
    num_output: int,
    page_size: int,
    max_tokens: int,
    with_hashes: bool,
) -> tuple[_Rows, int]: ...
def expand_parts(parts: _Parts) -> _U32: ...
def synthetic_tokens(id_hi: int, id_lo: int, count: int) -> _U32: ...
def planned_tokens(seed: int, count: int, skip: int = 0) -> _U32: ...
def intern_ids(ids: _U64) -> _U32: ...
def equal_block_hashes(count: int, block_size: int) -> _U64: ...
def parse_id_lists(text: bytes | bytearray | memoryview, num_lists: int) -> tuple[_U64, _I64] | None: ...
def block_segments(
    ids: _U32 | None, ids_per_row: _I64, input_tokens: _I64, block_size: int
) -> tuple[_Rows, _I64, _I64]: ...
def prompt_lengths(specs: _Rows, segments: _Rows) -> _I64: ...

@final
class AcceptanceSampler:
    def __init__(self, seed: int) -> None: ...
    def accept(self, p: float) -> bool: ...
