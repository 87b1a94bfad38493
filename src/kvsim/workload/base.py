"""A parsed workload: what every reader and generator makes and every run shares.

A workload is flat and immutable. Requests are rows of one struct array, their
prompts are runs of tokens in a second one, so that a trace of 145 million
prompt tokens stays a few megabytes. Runs keep their own state elsewhere
(:class:`kvsim.workload.ArrivalDriver`); ten sweeps may share one workload.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from kvsim._core import content
from kvsim.errors import WorkloadError
from kvsim.layout import REQUEST_SPEC, SEGMENT

__all__ = ["MAX_TOKENS", "PLAN_SEED", "Workload"]

#: Seed of the stream that planned output ids are drawn from (spec/replay.md 3.2).
PLAN_SEED = 0xD37A0A7E5EED

#: Upper bound of one length of a request: what fits a signed 32-bit count.
MAX_TOKENS = 2**31 - 1

#: Tokens per block from which a block takes longer to hash than to look up.
_LONG_BLOCK = 32

NO_SESSION = -1
NO_TURN = -1
ANY_RANK = -1
NO_PLAN = -1


class DrawnPlan(NamedTuple):
    """Planned output ids that are words of a random stream, see `kvsim._core.content.planned_tokens`."""

    seed: int
    num_ids: int


class NumberedBlocks(NamedTuple):
    """Prompts of blocks that all differ, row after row: block ``i`` repeats token ``i``, the last of a row is cut."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests of a run: lengths, arrivals, contents, sessions.

    Rows lie in request-number order. In a workload with sessions that is
    session by session, so a follow-up turn always is the row after the turn it
    waits for. An explicit list is sorted by arrival instead, and `id_lo` keeps
    the numbers of the input order. All arrays are read-only.

    Parameters
    ----------
    specs : ndarray of `kvsim.layout.REQUEST_SPEC`, shape (n,)
        One row per request. `arrival_ms` is as given (ms), nan for follow-up
        turns; `session` and `turn` are -1 where the input names none.
    segments : ndarray of `kvsim.layout.SEGMENT`, shape (n_segments,), or NumberedBlocks
        Prompts given as runs of tokens. Numbered blocks become an array when read.
    tokens : ndarray of uint32, shape (n_tokens,)
        Prompts given token by token.
    planned : ndarray of uint32, shape (n_planned,), or DrawnPlan
        Output token ids of the requests whose `planned_offset` is not -1. A drawn plan becomes an array when read.
    delay_ms : ndarray of float64, shape (n,)
        Think time between the end of the previous turn and this one, unscaled; 0 for first turns.
    first_turn : ndarray of bool, shape (n,)
        False: the request waits for the request of the row before.
    request_names : list of str, optional
        Name of each row as the input gave it; None if the input has no names.
    session_names : sequence of str, optional
        Name of each session number; None where a report shows no session.
    cumulative : bool
        `input_tokens` and the prompt of a follow-up turn are only what is new:
        the whole prompt is the previous prompt, its output, and these tokens.
    rebase_arrivals : bool
        The clock starts at the first arrival (traces), not at 0 (explicit lists).
    clamped_rows : int
        Requests whose length was cut to what their hash ids cover.
    block_size : int, optional
        Tokens per hash id of the input, None if it has no hash ids.
    prefill_dp_ranks : ndarray of int32, shape (n,), optional
        Rank hints for the prefill pool, -1: as `dp_rank`.
    source : str
        Where it came from, for reports.

    Raises
    ------
    WorkloadError
        If :meth:`validate` finds a broken rule.
    """

    specs: npt.NDArray[Any]
    segments: npt.NDArray[Any]
    tokens: npt.NDArray[np.uint32]
    planned: npt.NDArray[np.uint32]
    delay_ms: npt.NDArray[np.float64]
    first_turn: npt.NDArray[np.bool_]
    request_names: list[str] | None = None
    session_names: Sequence[str] | None = None
    cumulative: bool = False
    rebase_arrivals: bool = False
    clamped_rows: int = 0
    block_size: int | None = None
    prefill_dp_ranks: npt.NDArray[np.int32] | None = None
    source: str = ""
    _equal_hashes: dict[int, npt.NDArray[np.uint64] | None] = field(default_factory=dict, init=False, repr=False)
    _drawn: DrawnPlan | None = field(default=None, init=False, repr=False)
    _numbered: NumberedBlocks | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.planned, DrawnPlan):
            object.__setattr__(self, "_drawn", self.planned)
            object.__delattr__(self, "planned")
        else:
            self.planned.flags.writeable = False
        if isinstance(self.segments, NumberedBlocks):
            object.__setattr__(self, "_numbered", self.segments)
            object.__delattr__(self, "segments")
        else:
            self.segments.flags.writeable = False
        for array in (self.specs, self.tokens, self.delay_ms, self.first_turn):
            array.flags.writeable = False
        if self.prefill_dp_ranks is not None:
            self.prefill_dp_ranks.flags.writeable = False
        self.validate()

    def __getattr__(self, name: str) -> Any:
        # Drawn plans and numbered blocks are spelled out when somebody reads them: most runs need their hashes only.
        if name == "planned" and self._drawn is not None:
            array: npt.NDArray[Any] = content.planned_tokens(*self._drawn)
        elif name == "segments" and self._numbered is not None:
            rows, inputs = (self.specs[key].astype(np.int64) for key in ("prompt_count", "input_tokens"))
            array = content.block_segments(None, rows, inputs, self._numbered.block_size)[0]
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        array.flags.writeable = False
        object.__setattr__(self, name, array)
        return array

    def __len__(self) -> int:
        return len(self.specs)

    def __repr__(self) -> str:
        return (
            f"Workload({self.source!r}, num_requests={self.num_requests}, num_sessions={self.num_sessions}, "
            f"total_input_tokens={self.total_input_tokens}, total_output_tokens={self.total_output_tokens})"
        )

    # ------------------------------------------------------------ sizes

    @property
    def num_requests(self) -> int:
        """Requests of all sessions."""
        return len(self.specs)

    @property
    def num_sessions(self) -> int:
        """Chains of turns; a request that nothing waits for is a session of its own."""
        return int(np.count_nonzero(self.first_turn))

    @property
    def has_sessions(self) -> bool:
        """Whether some request waits for an earlier one."""
        return not bool(self.first_turn.all())

    @property
    def total_input_tokens(self) -> int:
        """Prompt tokens of all requests, histories included (see :meth:`full_prompt_tokens`)."""
        return int(self.full_prompt_tokens().sum())

    @property
    def total_output_tokens(self) -> int:
        """Tokens that all requests ask for."""
        return int(self.specs["max_output_tokens"].sum())

    def full_prompt_tokens(self) -> npt.NDArray[np.int64]:
        """Prompt length of each request when every earlier turn ends with its whole output.

        Returns
        -------
        ndarray of int64, shape (n,)
            `input_tokens`, and in a cumulative workload the history before it.
        """
        inputs = self.specs["input_tokens"].astype(np.int64)
        if not self.cumulative or not self.has_sessions:
            return inputs
        running = np.cumsum(inputs + self.specs["max_output_tokens"])
        before = np.concatenate(([0], running[:-1]))  # tokens of all rows before a row
        start_of = np.maximum.accumulate(np.where(self.first_turn, np.arange(len(self)), 0))
        return np.asarray(inputs + before - before[start_of], dtype=np.int64)

    @property
    def num_planned(self) -> int:
        """Output ids of all plans."""
        return len(self.planned) if self._drawn is None else self._drawn.num_ids

    # ------------------------------------------------------------ contents

    @property
    def runs(self) -> npt.NDArray[Any] | NumberedBlocks:
        """`segments`, or what they are numbered by."""
        return self.segments if self._numbered is None else self._numbered

    @property
    def plan(self) -> npt.NDArray[np.uint32] | DrawnPlan:
        """`planned`, or what it is drawn from as long as nobody has read it."""
        return self.planned if self._drawn is None else self._drawn

    def prompt(self, row: int) -> npt.NDArray[Any]:
        """Prompt content of one row, only the new tokens in a cumulative workload.

        Returns
        -------
        ndarray of `kvsim.layout.SEGMENT` or of uint32
            A read-only view.
        """
        spec = self.specs[row]
        offset, count = int(spec["prompt_offset"]), int(spec["prompt_count"])
        array = self.tokens if spec["prompt_is_tokens"] else self.segments
        return array[offset : offset + count]

    def prompt_token_ids(self, row: int) -> npt.NDArray[np.uint32]:
        """Token ids of :meth:`prompt`, one by one, shape (input_tokens,)."""
        return content.expand_parts([self.prompt(row)])

    def planned_token_ids(self, row: int) -> npt.NDArray[np.uint32] | None:
        """Output token ids of one row, shape (max_output_tokens,), or None if they are made up by rule."""
        spec = self.specs[row]
        offset = int(spec["planned_offset"])
        return None if offset == NO_PLAN else self.planned[offset : offset + int(spec["max_output_tokens"])]

    def equal_block_hashes(self, block_size: int) -> npt.NDArray[np.uint64] | None:
        """Local hashes of the blocks that the runs of the prompts hold; made once and shared by all runs.

        Parameters
        ----------
        block_size : int
            Tokens per block of an engine.

        Returns
        -------
        ndarray of uint64 or None
            As of `kvsim._core.content.equal_block_hashes`; None if the tokens of the runs are not numbered densely or
            occur once, so that a table would save nothing.
        """
        if self._numbered is not None or block_size < _LONG_BLOCK:
            return None
        if block_size not in self._equal_hashes:
            table = None
            count = int(self.segments["start"].max()) + 1 if len(self.segments) else 0
            if 0 < count <= 0.75 * len(self.segments):
                table = content.equal_block_hashes(count, block_size)
                table.flags.writeable = False
            self._equal_hashes[block_size] = table
        return self._equal_hashes[block_size]

    def request_name(self, row: int) -> str:
        """Name of one row for messages: as given, else its request number."""
        return self.request_names[row] if self.request_names is not None else f"request {int(self.specs['id_lo'][row])}"

    # ------------------------------------------------------------ rules

    def validate(self) -> None:
        """Check every rule of a workload; the readers' own checks name the line before this one would.

        Raises
        ------
        WorkloadError
            The message names the request, the field, its value and what is allowed.
        """
        specs, n = self.specs, len(self.specs)
        tables = [("specs", specs, REQUEST_SPEC)]
        if self._numbered is None:
            tables.append(("segments", self.segments, SEGMENT))
        for name, array, dtype in tables:
            if array.dtype != dtype or array.ndim != 1:
                raise WorkloadError(f"must be a one-dimensional array of {dtype}, got {array.dtype}", field=name)
        if n == 0:
            raise WorkloadError("has no requests, at least one is required", path=self.source or None)
        for name, length in (("delay_ms", len(self.delay_ms)), ("first_turn", len(self.first_turn))):
            if length != n:
                raise WorkloadError(f"must have one entry per request ({n}), got {length}", field=name)
        if self.request_names is not None and len(self.request_names) != n:
            raise WorkloadError(f"must have {n} entries, got {len(self.request_names)}", field="request_names")

        self._require(specs["input_tokens"] > 0, "input_tokens", "must be positive")
        self._require(specs["input_tokens"] <= MAX_TOKENS, "input_tokens", f"must be at most {MAX_TOKENS}")
        self._require(specs["max_output_tokens"] >= 0, "max_output_tokens", "must be >= 0")
        self._require(specs["max_output_tokens"] <= MAX_TOKENS, "max_output_tokens", f"must be at most {MAX_TOKENS}")
        self._require(specs["dp_rank"] >= ANY_RANK, "dp_rank", "must be >= 0, or -1 for any rank")
        self._require(np.isfinite(specs["priority"]), "priority", "must be finite")
        self._require(specs["strict_priority"] >= 0, "strict_priority", "must be >= 0")
        arrival = specs["arrival_ms"]
        self._require(~self.first_turn | (np.isfinite(arrival) & (arrival >= 0)), "arrival_ms", "must be finite, >= 0")
        self._require(self.first_turn | np.isnan(arrival), "arrival_ms", "must be nan for a follow-up turn")
        delay = self.delay_ms
        self._require(np.isfinite(delay) & (delay >= 0), "delay_ms", "must be finite, >= 0", delay)
        self._require(~self.first_turn | (delay == 0), "delay_ms", "must be 0 for the first turn of a session", delay)

        ids = specs["id_lo"] if not specs["id_hi"].any() else specs[["id_hi", "id_lo"]]
        ascending = not specs["id_hi"].any() and bool((specs["id_lo"][1:] > specs["id_lo"][:-1]).all())
        if not ascending and len(np.unique(ids)) != n:
            raise WorkloadError("request ids must be unique", field="id_lo")
        if self.request_names is not None and len(set(self.request_names)) != n:
            seen: set[str] = set()
            for name in self.request_names:
                if name in seen:
                    raise WorkloadError(f"request ids must be unique, {name!r} occurs twice", field="id")
                seen.add(name)

        follow = np.flatnonzero(~self.first_turn)
        if len(follow):
            linked = (follow > 0) & (specs["session"][follow] == specs["session"][follow - 1])
            linked &= specs["turn"][follow] == specs["turn"][follow - 1] + 1
            if not linked.all():
                row = int(follow[np.flatnonzero(~linked)[0]])
                raise WorkloadError(
                    f"{self.request_name(row)} is a follow-up turn, so the row before must be the turn it waits for",
                    field="first_turn",
                )
        names = 0 if self.session_names is None else len(self.session_names)
        self._require(specs["session"] < names, "session", f"must be below the number of sessions ({names})")
        self._check_content()

    def _check_content(self) -> None:
        if self._numbered is not None:
            self._check_numbered(self._numbered)
            self._check_plans()
            return
        specs = self.specs
        offset, count = specs["prompt_offset"], specs["prompt_count"]
        by_token = specs["prompt_is_tokens"] != 0
        room = np.where(by_token, len(self.tokens), len(self.segments))
        inside = (offset >= 0) & (count > 0) & (offset <= room - count)
        self._require(inside, "prompt_offset", "must lie inside the data")
        held = content.prompt_lengths(specs, self.segments)
        if (held < 0).any() and (self.segments["length"] <= 0).any():
            raise WorkloadError("must be positive", field="segments.length")
        self._require(held == specs["input_tokens"], "input_tokens", "must equal the length of the prompt content")
        self._check_plans()

    def _check_numbered(self, numbered: NumberedBlocks) -> None:
        specs = self.specs
        blocks = -(-specs["input_tokens"].astype(np.int64) // numbered.block_size)
        first = np.cumsum(blocks) - blocks
        self._require(specs["prompt_is_tokens"] == 0, "prompt_is_tokens", "must be 0 with numbered blocks")
        self._require(specs["prompt_count"] == blocks, "prompt_count", "must be the blocks that input_tokens take")
        self._require(specs["prompt_offset"] == first, "prompt_offset", "must follow the blocks of the row before")
        if int(blocks.sum()) != numbered.num_blocks:
            raise WorkloadError(f"must be {int(blocks.sum())} blocks, got {numbered.num_blocks}", field="segments")

    def _check_plans(self) -> None:
        specs = self.specs
        plan = specs["planned_offset"]
        fits = (plan >= 0) & (plan <= self.num_planned - specs["max_output_tokens"])
        self._require((plan == NO_PLAN) | fits, "planned_offset", "must lie inside `planned`, or be -1")

    def _require(
        self, good: npt.NDArray[np.bool_], field: str, rule: str, values: npt.NDArray[Any] | None = None
    ) -> None:
        if good.all():
            return
        row = int(np.flatnonzero(~good)[0])
        value = (self.specs[field] if values is None else values)[row]
        raise WorkloadError(f"{rule}, got {value.item()!r} ({self.request_name(row)})", field=field)


# ---------------------------------------------------------------- building blocks of readers and generators


class NumberedNames(Sequence[str]):
    """The names ``<prefix><number>`` of consecutive numbers, made when asked for.

    Parameters
    ----------
    prefix : str
    first, count : int
        Number of the first name, and how many there are.
    """

    __slots__ = ("_numbers", "_prefix")

    def __init__(self, prefix: str, first: int, count: int) -> None:
        self._prefix = prefix
        self._numbers = range(first, first + count)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [f"{self._prefix}{number}" for number in self._numbers[index]]
        return f"{self._prefix}{self._numbers[index]}"

    def __eq__(self, other: object) -> bool:
        return list(self) == other if isinstance(other, list) else self is other

    __hash__ = None  # type: ignore[assignment]


def new_specs(count: int) -> npt.NDArray[Any]:
    """`count` rows with ids 1..count and no session, turn, rank hint or plan."""
    specs = np.zeros(count, REQUEST_SPEC)
    specs["id_lo"] = np.arange(1, count + 1)
    for name, value in (("session", NO_SESSION), ("turn", NO_TURN), ("dp_rank", ANY_RANK), ("planned_offset", NO_PLAN)):
        specs[name] = value
    return specs


def plan_outputs(
    output_tokens: npt.NDArray[np.int64], authored: Mapping[int, Sequence[int] | npt.NDArray[np.uint32]]
) -> tuple[Any, npt.NDArray[np.int64]]:
    """Planned output ids of a trace: authored ones, else draws in row order (spec/replay.md 3.2).

    Parameters
    ----------
    output_tokens : ndarray of int64, shape (n,)
        Length of each plan, in request-number order.
    authored : mapping of row to token ids
        Rows that bring their own ids; they draw nothing from the stream.

    Returns
    -------
    planned : ndarray of uint32, shape (output_tokens.sum(),), or DrawnPlan
    offset : ndarray of int64, shape (n,)
    """
    offset = np.cumsum(output_tokens) - output_tokens
    total = int(output_tokens.sum())
    given = sum(int(output_tokens[row]) for row in authored)
    if not authored:
        return DrawnPlan(PLAN_SEED, total), offset
    draws = content.planned_tokens(PLAN_SEED, total - given)
    drawn = np.ones(len(output_tokens), np.bool_)
    drawn[list(authored)] = False
    planned = np.empty(total, np.uint32)
    planned[np.repeat(drawn, output_tokens)] = draws
    for row, ids in authored.items():
        planned[offset[row] : offset[row] + output_tokens[row]] = ids
    return planned, offset


def concatenate_ids(parts: Iterable[npt.NDArray[np.uint32]]) -> npt.NDArray[np.uint32]:
    """All parts one after the other; empty if there are none."""
    listed = list(parts)
    return np.concatenate(listed).astype(np.uint32, copy=False) if listed else np.empty(0, np.uint32)
