"""Explicit request lists: from Python objects and from the peers' JSON (spec/replay.md 3.1).

An explicit list keeps its times. Its sessions are labels: nothing waits for an
earlier turn. Requests are numbered 1..N in input order, also when the times
are unsorted, and a prompt given by its length alone has made-up content that
no other request shares: token ``j`` of the request at position ``i`` of the
input is ``(i * 1000003 + j) mod 2**32``.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvsim.errors import WorkloadError
from kvsim.layout import SEGMENT
from kvsim.workload.base import MAX_TOKENS, NO_SESSION, NO_TURN, Workload, concatenate_ids, new_specs

__all__ = ["CONTENT_STRIDE", "REQUEST_KEYS", "workload_from_requests"]

#: Distance of the made-up prompts of neighbouring requests.
CONTENT_STRIDE = 1_000_003

#: What a request may say; `metadata` is accepted and not used.
REQUEST_KEYS = (
    "id",
    "arrival_time_ms",
    "input_tokens",
    "input_token_ids",
    "output_tokens",
    "output_token_ids",
    "dp_rank",
    "prefill_dp_rank",
    "session_id",
    "turn_index",
    "priority",
    "strict_priority",
    "metadata",
)

_U32 = 1 << 32


class _Fields:
    """The fields of one request, checked; errors name the position and the field."""

    def __init__(self, index: int, item: Any, *, strict: bool) -> None:
        self.index = index
        if isinstance(item, Mapping):
            self.given: Mapping[str, Any] = item
            if strict:
                for key in item:
                    if key not in REQUEST_KEYS:
                        raise WorkloadError(
                            f"is not a key of a request (allowed: {', '.join(REQUEST_KEYS)})",
                            field=f"requests[{index}].{key}",
                        )
        else:
            self.given = {key: getattr(item, key) for key in REQUEST_KEYS if hasattr(item, key)}
            if not self.given:
                raise WorkloadError(
                    f"must be a mapping or an object with the fields of a request, got {item!r}",
                    field=f"requests[{index}]",
                )

    def fail(self, key: str, message: str) -> NoReturn:
        raise WorkloadError(message, field=f"requests[{self.index}].{key}")

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self.given.get(key)
        if value is None:
            return None
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            self.fail(key, f"must be an int with {low} <= {key} <= {high}, got {value!r}")
        if not low <= value <= high:
            self.fail(key, f"must lie in {low} <= {key} <= {high}, got {value}")
        return int(value)

    def number(self, key: str) -> float:
        value = self.given.get(key)
        if value is None:
            return 0.0
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
            self.fail(key, f"must be a number, got {value!r}")
        if not -math.inf < value < math.inf:
            self.fail(key, f"must be finite, got {value!r}")
        return float(value)

    def time(self, key: str) -> float:
        value = self.given.get(key, 0.0)
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
            self.fail(key, f"must be a time in ms, finite and >= 0, got {value!r}")
        if not 0 <= value < math.inf:
            self.fail(key, f"must be finite and >= 0 ms, got {value!r}")
        return float(value)

    def token_ids(self, key: str) -> npt.NDArray[np.uint32] | None:
        value = self.given.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) and (not isinstance(value, Sequence) or isinstance(value, (str, bytes))):
            self.fail(key, f"must be a sequence of token ids, got {value!r}")
        array = np.asarray(value)
        if array.size == 0:
            return np.empty(0, np.uint32)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            self.fail(key, "must be a one-dimensional sequence of ints with 0 <= id < 2**32")
        if array.dtype != np.uint32:
            wrong = np.flatnonzero((array < 0) | (array >= _U32))
            if len(wrong):
                self.fail(key, f"must lie in 0 <= id < 2**32, entry {wrong[0]} is {array[wrong[0]]}")
        return array.astype(np.uint32)

    def name(self) -> str:
        value = self.given.get("id")
        if value is None:
            return f"request-{self.index}"
        if isinstance(value, bool) or not isinstance(value, (str, int, np.integer, uuid.UUID)) or value == "":
            self.fail("id", f"must be a non-empty str, an int or a uuid.UUID, got {value!r}")
        return str(value)

    def session(self) -> str | None:
        value = self.given.get("session_id")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (str, int, np.integer, uuid.UUID)):
            self.fail("session_id", f"must be a str, an int or a uuid.UUID, got {value!r}")
        return str(value)


def workload_from_requests(
    requests: Iterable[Mapping[str, Any] | Any], *, strict: bool = True, source: str = "requests"
) -> Workload:
    """Workload of an explicit list of requests.

    Parameters
    ----------
    requests : iterable of mapping, or of objects with these attributes
        ``id`` (str, int or UUID; default ``request-<position>``),
        ``arrival_time_ms`` (default 0), ``input_tokens`` (a length) or
        ``input_token_ids`` (the content) or both when they agree,
        ``output_tokens`` (default 1), ``output_token_ids`` (their number
        replaces `output_tokens`), ``dp_rank``, ``prefill_dp_rank``,
        ``session_id``, ``turn_index``, ``priority`` (seconds that it gains in the
        queue of a router) and ``strict_priority`` (a higher one leaves that queue
        first), ``metadata``.
    strict : bool, default True
        Refuse unknown keys of mappings; otherwise ignore them.
    source : str
        Name for reports and errors.

    Returns
    -------
    Workload
        Rows in order of arrival, ties in input order; ids are input positions + 1.

    Raises
    ------
    WorkloadError
        Naming the position, the field, the value and what is allowed; an id that
        occurs twice is named itself.
    """
    items = list(requests)
    n = len(items)
    if n == 0:
        raise WorkloadError("has no requests, at least one is required", path=source)
    specs, segments = new_specs(n), np.zeros(n, SEGMENT)
    names: dict[str, int] = {}
    sessions: dict[str, int] = {}
    prompts: list[npt.NDArray[np.uint32]] = []
    plans: list[npt.NDArray[np.uint32]] = []
    prefill_ranks = np.full(n, -1, np.int32)
    num_tokens = num_planned = num_segments = 0
    for i, item in enumerate(items):
        fields, spec = _Fields(i, item, strict=strict), specs[i]
        name = fields.name()
        if name in names:
            fields.fail("id", f"must be unique, {name!r} is also requests[{names[name]}]")
        names[name] = i
        spec["arrival_ms"] = fields.time("arrival_time_ms")
        length, ids = fields.integer("input_tokens", 1, MAX_TOKENS), fields.token_ids("input_token_ids")
        if ids is None:
            if length is None:
                fields.fail("input_tokens", "is required, or input_token_ids")
            segments[num_segments] = (i * CONTENT_STRIDE % _U32, 1, length)
            spec["input_tokens"], spec["prompt_offset"], spec["prompt_count"] = length, num_segments, 1
            num_segments += 1
        else:
            if len(ids) == 0:
                fields.fail("input_token_ids", "must have at least one id, got []")
            if length is not None and length != len(ids):
                fields.fail("input_tokens", f"must be the number of input_token_ids, {len(ids)}, got {length}")
            prompts.append(ids)
            spec["input_tokens"] = spec["prompt_count"] = len(ids)
            spec["prompt_offset"], spec["prompt_is_tokens"] = num_tokens, 1
            num_tokens += len(ids)
        output, plan = fields.integer("output_tokens", 0, MAX_TOKENS), fields.token_ids("output_token_ids")
        if plan is not None:
            plans.append(plan)
            spec["max_output_tokens"], spec["planned_offset"] = len(plan), num_planned
            num_planned += len(plan)
        else:
            spec["max_output_tokens"] = 1 if output is None else output
        rank, prefill_rank = (fields.integer(key, 0, 2**31 - 1) for key in ("dp_rank", "prefill_dp_rank"))
        spec["dp_rank"] = -1 if rank is None else rank
        prefill_ranks[i] = -1 if prefill_rank is None else prefill_rank
        session, turn = fields.session(), fields.integer("turn_index", 0, 2**31 - 1)
        spec["session"] = NO_SESSION if session is None else sessions.setdefault(session, len(sessions))
        spec["turn"] = NO_TURN if turn is None else turn
        spec["priority"] = fields.number("priority")
        spec["strict_priority"] = fields.integer("strict_priority", 0, _U32 - 1) or 0

    order = np.argsort(specs["arrival_ms"], kind="stable")
    in_file = list(names)
    return Workload(
        specs=specs[order],
        segments=segments[:num_segments],
        tokens=concatenate_ids(prompts),
        planned=concatenate_ids(plans),
        delay_ms=np.zeros(n),
        first_turn=np.ones(n, np.bool_),
        request_names=[in_file[i] for i in order.tolist()],
        session_names=list(sessions) or None,
        prefill_dp_ranks=prefill_ranks[order] if (prefill_ranks >= 0).any() else None,
        source=source,
    )
