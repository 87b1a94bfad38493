"""Dtypes of every table that kvsim reads or writes, and what their columns mean.

A dtype here and the C struct of the same name in ``_core/types.pxd`` are one
fact written twice; `kvsim._core.state` compares them, size and offsets, when
it is imported. All rows are aligned and without implicit padding.
"""

from __future__ import annotations

import enum

import numpy as np

__all__ = ["REQUEST_RECORD", "REQUEST_SPEC", "SEGMENT", "FailReason", "RequestStatus"]


class RequestStatus(enum.IntEnum):
    """How a request of a run ended."""

    UNFINISHED = 0
    COMPLETED = 1
    REJECTED = 2
    FAILED = 3
    CANCELLED = 4


class FailReason(enum.IntEnum):
    """Why a request was rejected or failed."""

    NONE = 0
    #: The prompt reaches ``max_model_len``.
    MODEL_LENGTH = 1
    #: The prompt (TensorRT-LLM: prompt and output) needs more blocks than the pool has.
    POOL_TOO_SMALL = 2
    #: Generation outgrew the pool.
    OUTGREW_POOL = 3
    #: Chunked prefill is off and the prompt exceeds the token budget of a pass.
    BUDGET_TOO_SMALL = 4


#: A run of prompt tokens: token ``j`` is ``(start + j * step) mod 2**32``, ``step`` in {0, 1}.
SEGMENT = np.dtype([("start", "<u4"), ("step", "<u4"), ("length", "<i8")])

#: What a request asks for: read-only input of a run, one row per request in release order.
REQUEST_SPEC = np.dtype(
    [
        ("id_hi", "<u8"),  # request id, upper and lower 64 bits
        ("id_lo", "<u8"),
        ("arrival_ms", "<f8"),  # nan: released by the closed loop or by a session
        ("input_tokens", "<i8"),
        ("max_output_tokens", "<i8"),
        ("prompt_offset", "<i8"),  # first row of the prompt in `segments`, or in `tokens`
        ("prompt_count", "<i8"),  # rows of it
        ("planned_offset", "<i8"),  # first of `max_output_tokens` ids in `planned`; -1: made up by rule
        ("session", "<i4"),  # -1: none
        ("turn", "<i4"),
        ("dp_rank", "<i4"),  # -1: any
        ("prompt_is_tokens", "<i4"),  # 1: the prompt lies in `tokens`, 0: in `segments`
    ]
)

#: What became of it: the per-request result of a run. Times are ms, nan where it did not happen.
REQUEST_RECORD = np.dtype(
    [
        ("id_hi", "<u8"),
        ("id_lo", "<u8"),
        ("arrival_ms", "<f8"),
        ("tokenized_ms", "<f8"),  # left the front tokenization pool
        ("first_admit_ms", "<f8"),
        ("first_token_ms", "<f8"),
        ("second_token_ms", "<f8"),
        ("last_token_ms", "<f8"),
        ("terminal_ms", "<f8"),
        ("input_tokens", "<i8"),
        ("requested_output_tokens", "<i8"),
        ("output_tokens", "<i8"),
        ("reused_tokens", "<i8"),  # largest reuse over all admissions
        ("first_reused_tokens", "<i8"),  # reuse of the first admission
        ("recomputed_tokens", "<i8"),  # tokens computed again after preemptions
        ("admissions", "<i4"),
        ("preemptions", "<i4"),
        ("worker", "<i4"),  # -1: never placed
        ("dp_rank", "<i4"),
        ("session", "<i4"),
        ("turn", "<i4"),
        ("status", "<i4"),  # RequestStatus
        ("reason", "<i4"),  # FailReason
        ("needed", "<i8"),  # blocks or tokens that `reason` found too many, else 0
        ("row", "<i8"),  # index of the request in its workload
    ]
)
