"""Mooncake traces: JSON lines whose prompts are hash ids of blocks (spec/workloads-and-report.md 1.1, 1.2).

Choices where the sources differ:

- A first turn without a timestamp arrives at 0, as the peer has it; strict
  mode refuses it when other first turns have one.
- Unsorted timestamps are sorted stably when the run starts; strict mode
  refuses them.
- `input_length` beyond what the hash ids cover is cut and counted; strict mode
  refuses it.
"""

from __future__ import annotations

import difflib
import gzip
import itertools
import math
import os
import zlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvsim._core import content
from kvsim.errors import WorkloadError
from kvsim.workload.base import MAX_TOKENS, Workload, block_segments, new_specs, plan_outputs

__all__ = ["DEFAULT_BLOCK_SIZE", "read_mooncake"]

#: Tokens per hash id of the public Mooncake traces.
DEFAULT_BLOCK_SIZE = 512

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
#: What a blank line looks like after the end of the line before.
_BLANK_STARTS = (b"\n\n", b"\n\r", b"\n ", b"\n\t")
_I32 = 1 << 31
_U32 = 1 << 32
_U64 = 1 << 64
_REQUIRED = ("hash_ids", "output_length")
_ALIASES = {"input_tokens": "input_length", "output_tokens": "output_length", "created_time": "timestamp"} | {
    "delay_ms": "delay"
}
_T = TypeVar("_T")


class _Row(msgspec.Struct, gc=False):
    """One line. Keys that are not here are ignored, in strict mode refused."""

    hash_ids: list[int] | None = None
    input_length: int | None = None
    input_tokens: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    output_token_ids: list[int] | None = None
    timestamp: float | None = None
    created_time: float | None = None
    delay: float | None = None
    delay_ms: float | None = None
    session_id: str | None = None
    request_id: str | None = None
    priority: int | None = None
    strict_priority: int | None = None
    policy_class: str | None = None
    # Keys of formats whose rows look alike; reading them as mooncake would drop what they say.
    wait_for: Any = None
    dependencies: Any = None


_KEYS = tuple(_Row.__struct_fields__[:-2])
_DECODER = msgspec.json.Decoder(_Row)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_mooncake(
    path: str | os.PathLike[str],
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    delta: bool = False,
    strict: bool = False,
) -> Workload:
    """Read a Mooncake trace, plain or gzip.

    Parameters
    ----------
    path : path
        JSON lines; gzip is recognised by its first bytes. Blank lines are skipped.
    block_size : int, default 512
        Tokens that one hash id stands for, at least 1.
    delta : bool, default False
        Rows of a session carry only new input (format ``mooncake-delta``).
    strict : bool, default False
        Refuse unknown keys, lengths that do not fit the hash ids, an id that is
        a partial block in one row and fuller in another, unsorted timestamps
        and first turns without a timestamp beside ones that have it.

    Returns
    -------
    Workload
        Sessions in order of first appearance, turns in file order; a row
        without `session_id` is its own session ``request_<line>``.

    Raises
    ------
    WorkloadError
        With path and 1-based line, blank lines counted, the field, its value and what is allowed.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or not 1 <= block_size <= MAX_TOKENS:
        allowed = f"must be an int with 1 <= block_size <= {MAX_TOKENS}"
        raise WorkloadError(f"{allowed}, got {block_size!r}", field="block_size")
    source = os.fspath(path)
    lines, rows = _decode(read_bytes(source), source)
    return _Builder(source, block_size, delta, strict).build(lines, rows)


def read_bytes(path: str) -> bytes:
    """Content of a plain or gzip file.

    Raises
    ------
    WorkloadError
        If it cannot be read, or is a truncated or damaged gzip file.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise WorkloadError(f"cannot be read: {error.strerror or error}", path=path) from error
    if data.startswith(_GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise WorkloadError(f"is a truncated or damaged gzip file: {error}", path=path) from error
    return data.removeprefix(_UTF8_BOM)


def _decode(data: bytes, path: str) -> tuple[list[int], list[_Row]]:
    """Line numbers and rows of all lines that are not blank."""
    try:
        rows = _DECODER.decode_lines(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        rows = []
    lines_in_file = data.count(b"\n") + (not data.endswith(b"\n"))
    # Without blank lines, as many rows as lines means one row in each.
    if len(rows) == lines_in_file and data[:1] == b"{" and not any(blank in data for blank in _BLANK_STARTS):
        return list(range(1, len(rows) + 1)), rows
    # Blank lines, a bad line or two rows in one: find out which is where.
    lines, rows = [], []
    for line, text in enumerate(data.split(b"\n"), 1):
        if not text or text.isspace():
            continue
        try:
            rows.append(_DECODER.decode(text))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _bad_line(error, path, line) from error
        lines.append(line)
    return lines, rows


def _bad_line(error: Exception, path: str, line: int) -> WorkloadError:
    message, _, where = str(error).partition(" - at `$.")
    if where:
        return WorkloadError(message[:1].lower() + message[1:], path=path, line=line, field=where.rstrip("`"))
    if isinstance(error, msgspec.ValidationError):
        return WorkloadError(f"must be a JSON object with the keys of a Mooncake row: {message}", path=path, line=line)
    return WorkloadError(f"is not JSON: {message}", path=path, line=line)


class _Builder:
    """Checks decoded rows and lays them out."""

    def __init__(self, path: str, block_size: int, delta: bool, strict: bool) -> None:
        self.path, self.block_size, self.delta, self.strict = path, block_size, delta, strict

    def error(self, line: int, field: str | None, message: str) -> WorkloadError:
        return WorkloadError(message, path=self.path, line=line, field=field)

    def build(self, lines: list[int], rows: list[_Row]) -> Workload:
        if not rows:
            raise WorkloadError("has no requests, at least one is required", path=self.path)
        if self.strict:
            self.check_keys(lines)
        n, clamped = len(rows), 0
        inputs, outputs, ids_per_row = [0] * n, [0] * n, [0] * n
        session, turn, arrival, delay = [0] * n, [0] * n, [math.nan] * n, [0.0] * n
        authored: dict[int, list[int]] = {}
        priority, strict_priority = [0] * n, [0] * n
        numbers: dict[str, int] = {}  # session name -> number
        turns: list[int] = []  # per session: turns so far
        clocks: list[float | None] = []  # per session: newest timestamp
        for i, (line, row) in enumerate(zip(lines, rows, strict=True)):
            if row.wait_for is not None or row.dependencies is not None:
                raise self.error(
                    line, None, "carries dependencies of format agentic_mooncake, which is not supported as mooncake"
                )
            ids_per_row[i], inputs[i], cut = self.lengths(line, row)
            clamped += cut
            outputs[i] = self.output_length(line, row)
            if row.output_token_ids is not None:
                authored[i] = self.authored(line, row.output_token_ids, outputs[i])
            priority[i] = self.whole(line, "priority", row.priority, -_I32, _I32 - 1)
            strict_priority[i] = self.whole(line, "strict_priority", row.strict_priority, 0, _U32 - 1)
            stamp = self.time(line, "timestamp", self.either(line, "timestamp", row.timestamp, row.created_time))
            think = self.time(line, "delay", self.either(line, "delay", row.delay, row.delay_ms))

            name = f"request_{line}" if row.session_id is None else row.session_id
            number = numbers.setdefault(name, len(turns))
            session[i] = number
            if number == len(turns):
                if think:
                    raise self.error(line, "delay", f"must be 0 for the first turn of session {name!r}, got {think:g}")
                turns.append(1)
                clocks.append(stamp)
                arrival[i] = 0.0 if stamp is None else stamp
                continue
            turn[i] = turns[number]
            turns[number] += 1
            before = clocks[number]
            if think is None and stamp is not None:
                if before is None:
                    raise self.error(
                        line, "timestamp", f"needs an earlier timestamp in session {name!r}, or give delay instead"
                    )
                think = stamp - before
                if think < 0:
                    raise self.error(
                        line,
                        "timestamp",
                        f"must not be before the previous one of its session, {before:g}, got {stamp:g}",
                    )
            delay[i] = think or 0.0
            if stamp is not None:
                clocks[number] = stamp

        raw = self.hash_ids(lines, rows, sum(ids_per_row))
        input_tokens, id_counts = np.array(inputs, np.int64), np.array(ids_per_row, np.int64)
        if self.strict:
            self.check_fill(lines, raw, id_counts, input_tokens)
            self.check_times(lines, rows, turn)
        segments, offset, count = block_segments(content.intern_ids(raw), id_counts, input_tokens, self.block_size)

        session_numbers = np.array(session, np.int32)
        order = np.argsort(session_numbers, kind="stable")
        specs = new_specs(n)
        specs["arrival_ms"] = np.array(arrival)[order]
        specs["input_tokens"] = input_tokens[order]
        specs["max_output_tokens"] = np.array(outputs, np.int64)[order]
        specs["prompt_offset"] = offset[order]
        specs["prompt_count"] = count[order]
        specs["session"] = session_numbers[order]
        specs["turn"] = np.array(turn, np.int32)[order]
        specs["priority"] = np.array(priority, np.float64)[order]
        specs["strict_priority"] = np.array(strict_priority, np.int64)[order]
        if authored:
            rank = np.empty(n, np.int64)
            rank[order] = np.arange(n)
            authored = {int(rank[i]): ids for i, ids in authored.items()}
        planned, specs["planned_offset"] = plan_outputs(specs["max_output_tokens"].copy(), authored)
        return Workload(
            specs=specs,
            segments=segments,
            tokens=np.empty(0, np.uint32),
            planned=planned,
            delay_ms=np.array(delay)[order],
            first_turn=specs["turn"] == 0,
            request_names=self.request_names(lines, rows, order),
            session_names=list(numbers),
            cumulative=self.delta,
            rebase_arrivals=True,
            clamped_rows=clamped,
            block_size=self.block_size,
            source=self.path,
        )

    def either(self, line: int, key: str, value: _T | None, alias_value: _T | None) -> _T | None:
        """Take the value of a key or of its alias; both is an error."""
        if alias_value is None:
            return value
        if value is not None:
            alias = next(alias for alias, of in _ALIASES.items() if of == key)
            raise self.error(
                line, key, f"must not be given together with its alias {alias}: {value!r} and {alias_value!r}"
            )
        return alias_value

    def missing(self, line: int, key: str) -> WorkloadError:
        """Make the error that proposes the key that was probably meant."""
        text = read_bytes(self.path).split(b"\n")[line - 1]
        unknown = [name for name in _OBJECT.decode(text) if name not in _KEYS]
        close = difflib.get_close_matches(key, unknown, 1, 0.6)
        hint = f", did you mean {close[0]!r}?" if close else ""
        return self.error(line, key, f"is required{hint}")

    def lengths(self, line: int, row: _Row) -> tuple[int, int, bool]:
        """Count hash ids and prompt tokens, and say whether the tokens were cut."""
        ids = row.hash_ids
        if ids is None:
            raise self.missing(line, "hash_ids")
        if not ids:
            raise self.error(line, "hash_ids", "must have at least one id, got []")
        capacity = len(ids) * self.block_size
        length = self.either(line, "input_length", row.input_length, row.input_tokens)
        if length is None:
            length = capacity
        if not 0 < length <= MAX_TOKENS:
            raise self.error(line, "input_length", f"must be positive and at most {MAX_TOKENS}, got {length}")
        if self.strict and -(-length // self.block_size) != len(ids):
            raise self.error(
                line,
                "input_length",
                f"{length} tokens need {-(-length // self.block_size)} hash ids of {self.block_size} tokens, "
                f"got {len(ids)} hash_ids (capacity {capacity})",
            )
        return len(ids), min(length, capacity), length > capacity

    def output_length(self, line: int, row: _Row) -> int:
        length = self.either(line, "output_length", row.output_length, row.output_tokens)
        if length is None:
            raise self.missing(line, "output_length")
        if not 0 <= length <= MAX_TOKENS:
            raise self.error(line, "output_length", f"must lie in 0 <= output_length <= {MAX_TOKENS}, got {length}")
        return length

    def whole(self, line: int, field: str, value: int | None, low: int, high: int) -> int:
        """An int that may be missing, then 0."""
        if value is None:
            return 0
        if not low <= value <= high:
            raise self.error(line, field, f"must lie in {low} <= {field} <= {high}, got {value}")
        return value

    def authored(self, line: int, ids: list[int], length: int) -> list[int]:
        if len(ids) != length:
            raise self.error(line, "output_token_ids", f"must have output_length = {length} entries, got {len(ids)}")
        for value in ids:
            if not 0 <= value < _U32:
                raise self.error(line, "output_token_ids", f"must lie in 0 <= id < 2**32, got {value}")
        return ids

    def time(self, line: int, key: str, value: float | None) -> float | None:
        if value is not None and not 0 <= value < math.inf:
            raise self.error(line, key, f"must be finite and >= 0 ms, got {value:g}")
        return value

    def hash_ids(self, lines: list[int], rows: list[_Row], total: int) -> npt.NDArray[np.uint64]:
        """All hash ids in file order, checked to be 64-bit."""
        lists: list[list[int]] = [row.hash_ids or [] for row in rows]
        try:
            return np.fromiter(itertools.chain.from_iterable(lists), np.uint64, total)
        except OverflowError:
            for line, ids in zip(lines, lists, strict=True):
                for value in ids:
                    if not 0 <= value < _U64:
                        raise self.error(line, "hash_ids", f"must lie in 0 <= id < 2**64, got {value}") from None
            raise

    def request_names(self, lines: list[int], rows: list[_Row], order: npt.NDArray[Any]) -> list[str] | None:
        """Names of the rows if any row has a `request_id`; they must be unique."""
        if all(row.request_id is None for row in rows):
            return None
        names: dict[str, int] = {}
        for line, row in zip(lines, rows, strict=True):
            name = f"request_{line}" if row.request_id is None else row.request_id
            if name in names:
                raise self.error(line, "request_id", f"must be unique, {name!r} is also on line {names[name]}")
            names[name] = line
        in_file = list(names)
        return [in_file[i] for i in order.tolist()]

    # ------------------------------------------------------------ strict mode

    def check_keys(self, lines: list[int]) -> None:
        texts = read_bytes(self.path).split(b"\n")
        for line in lines:
            for key in _OBJECT.decode(texts[line - 1]):
                if key not in _KEYS:
                    close = difflib.get_close_matches(key, _KEYS, 1, 0.6)
                    hint = f", did you mean {close[0]!r}?" if close else ""
                    raise self.error(line, key, f"is not a key of a Mooncake row{hint} (allowed: {', '.join(_KEYS)})")

    def check_fill(
        self,
        lines: list[int],
        ids: npt.NDArray[np.uint64],
        counts: npt.NDArray[np.int64],
        inputs: npt.NDArray[np.int64],
    ) -> None:
        """One id, one content: a block that ends a prompt half full cannot be fuller elsewhere."""
        fill = np.full(len(ids), self.block_size, np.int64)
        fill[np.cumsum(counts) - 1] = inputs - (counts - 1) * self.block_size
        _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        other = np.flatnonzero(fill != fill[first][inverse])
        if len(other):
            at = int(other[0])
            row = int(np.searchsorted(np.cumsum(counts), at, side="right"))
            before = int(np.searchsorted(np.cumsum(counts), first[inverse[at]], side="right"))
            raise self.error(
                lines[row],
                "hash_ids",
                f"id {ids[at]} holds {fill[at]} tokens here and {fill[first[inverse[at]]]} on line {lines[before]}; "
                "one id must always stand for the same tokens",
            )

    def check_times(self, lines: list[int], rows: list[_Row], turn: list[int]) -> None:
        newest: tuple[float, int] | None = None
        without: int | None = None
        for line, row, k in zip(lines, rows, turn, strict=True):
            if k:
                continue
            stamp = row.timestamp if row.created_time is None else row.created_time
            if stamp is None:
                without = line if without is None else without
            elif newest is not None and stamp < newest[0]:
                raise self.error(
                    line, "timestamp", f"must not be before {newest[0]:g} of line {newest[1]}, got {stamp:g}"
                )
            else:
                newest = (stamp, line)
        if without is not None and newest is not None:
            raise self.error(without, "timestamp", f"is required, line {newest[1]} has one")
