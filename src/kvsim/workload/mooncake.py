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
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvsim._core import content
from kvsim.errors import WorkloadError
from kvsim.workload.base import MAX_TOKENS, NumberedNames, Workload, new_specs, plan_outputs

__all__ = ["DEFAULT_BLOCK_SIZE", "read_mooncake"]

#: Tokens per hash id of the public Mooncake traces.
DEFAULT_BLOCK_SIZE = 512

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_NEWLINE, _OPEN, _CLOSE = b"\n{}"
_I32 = 1 << 31
_U32 = 1 << 32
_U64 = 1 << 64
_REQUIRED = ("hash_ids", "output_length")
_ALIASES = {"input_tokens": "input_length", "output_tokens": "output_length", "created_time": "timestamp"} | {
    "delay_ms": "delay"
}
_T = TypeVar("_T")


class _Row(msgspec.Struct, gc=False):
    """One line. Keys that are not here are ignored, in strict mode refused.

    The ids stay text, which `content.parse_id_lists` reads for all rows at once.
    """

    hash_ids: msgspec.Raw = msgspec.Raw()
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


class _Plain(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """One line with the keys of the public traces and no other."""

    hash_ids: msgspec.Raw
    input_length: int
    output_length: int
    timestamp: float


class _Line(_Row, gc=False):
    """One line with its ids, for files that need a look at each line."""

    hash_ids: list[int] | None = None  # type: ignore[assignment]


_KEYS = tuple(_Row.__struct_fields__[:-2])
_PLAIN_DECODER = msgspec.json.Decoder(_Plain)
_DECODER = msgspec.json.Decoder(_Row)
_LINE_DECODER = msgspec.json.Decoder(_Line)
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
    table = _read_table(read_bytes(source), source)
    return _Builder(source, block_size, delta, strict).build(table)


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


class _Table(NamedTuple):
    """Rows of a file, and their ids in one array."""

    #: 1-based number of the line of each row.
    lines: Sequence[int]
    #: `_Plain`, `_Row` or `_Line`.
    rows: Sequence[Any]
    #: All ids in file order; None where some id is no 64-bit one.
    ids: npt.NDArray[np.uint64] | None
    ids_per_row: npt.NDArray[np.int64]


def _read_table(data: bytes, path: str) -> _Table:
    """Decode all lines that are not blank."""
    num_lines = _lines_of_objects(data)
    if num_lines:
        rows = _decode_rows(data)
        # As many objects as lines, each line beginning and ending as one: one in each.
        if rows and len(rows) == num_lines:
            found = content.parse_id_lists(b"".join([row.hash_ids for row in rows]), len(rows))
            if found is not None:
                return _Table(range(1, len(rows) + 1), rows, *found)
    # Blank lines, a bad line, two rows in one, unusual ids: find out which is where.
    lines, listed = [], []
    for line, text in enumerate(data.split(b"\n"), 1):
        if not text or text.isspace():
            continue
        try:
            listed.append(_LINE_DECODER.decode(text))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _bad_line(error, path, line) from error
        lines.append(line)
    counts = np.array([len(row.hash_ids or ()) for row in listed], np.int64)
    try:
        every = itertools.chain.from_iterable(row.hash_ids or () for row in listed)
        ids = np.fromiter(every, np.uint64, int(counts.sum()))
    except OverflowError:
        ids = None
    return _Table(lines, listed, ids, counts)


def _decode_rows(data: bytes) -> list[Any]:
    """All rows, as `_Plain` if they are; none if some row is not well-formed."""
    for decoder in (_PLAIN_DECODER, _DECODER):
        try:
            return decoder.decode_lines(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return []


def _lines_of_objects(data: bytes) -> int:
    """Number of lines, if each of them begins and ends with a brace; else 0.

    Between two braces such as ``}`` and ``{`` a line can end only behind one row and before the next.
    """
    text = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(text[:-1] == _NEWLINE)
    if not len(text) or text[0] != _OPEN or (len(ends) and ends[0] == 0):
        return 0
    apart = (text[ends - 1] == _CLOSE).all() and (text[ends + 1] == _OPEN).all()
    return len(ends) + 1 if apart else 0


def _bad_line(error: Exception, path: str, line: int) -> WorkloadError:
    message, _, where = str(error).partition(" - at `$.")
    if where:
        return WorkloadError(message[:1].lower() + message[1:], path=path, line=line, field=where.rstrip("`"))
    if isinstance(error, msgspec.ValidationError):
        return WorkloadError(f"must be a JSON object with the keys of a Mooncake row: {message}", path=path, line=line)
    return WorkloadError(f"is not JSON: {message}", path=path, line=line)


def _think_times(
    stamp: npt.NDArray[np.float64],
    delay: npt.NDArray[np.float64],
    first: npt.NDArray[np.bool_],
    start: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.float64], bool]:
    """Think times of rows in order of sessions, and whether all of them are allowed.

    Parameters
    ----------
    stamp, delay : ndarray
        Milliseconds, nan where not given. Without a delay the think time is what lies between the stamp and the newest
        one of the earlier turns.
    first : ndarray
        Whether a row begins a session.
    start : ndarray
        First row of the session of each.
    """
    given = np.where(np.isnan(delay), 0.0, delay)
    if first.all():
        return given, not given.any()
    stamped = ~np.isnan(stamp)
    newest = np.maximum.accumulate(np.where(stamped, np.arange(len(stamp)), -1))
    before = np.concatenate(([-1], newest[:-1]))
    gap = stamp - stamp[np.maximum(before, 0)]
    derived = ~first & np.isnan(delay) & stamped
    good = not given[first].any() and bool((before >= start)[derived].all() and (gap[derived] >= 0).all())
    return np.where(derived, gap, given), good


class _Builder:
    """Checks decoded rows and lays them out."""

    def __init__(self, path: str, block_size: int, delta: bool, strict: bool) -> None:
        self.path, self.block_size, self.delta, self.strict = path, block_size, delta, strict

    def error(self, line: int, field: str | None, message: str) -> WorkloadError:
        return WorkloadError(message, path=self.path, line=line, field=field)

    def build(self, table: _Table) -> Workload:
        lines, rows, n = table.lines, table.rows, len(table.rows)
        if not rows:
            raise WorkloadError("has no requests, at least one is required", path=self.path)
        if self.strict:
            self.check_keys(lines)
        capacity = table.ids_per_row * self.block_size
        columns = [
            self.column(rows, np.int64, "input_length", "input_tokens", absent=capacity),
            self.column(rows, np.int64, "output_length", "output_tokens"),
            self.column(rows, np.int64, "priority", absent=0),
            self.column(rows, np.int64, "strict_priority", absent=0),
            self.column(rows, np.float64, "timestamp", "created_time", absent=math.nan),
            self.column(rows, np.float64, "delay", "delay_ms", absent=math.nan),
        ]
        inputs, outputs, priority, strict_priority, stamp, delay = columns
        authored = {}
        if not self.lacks(rows, "output_token_ids"):
            authored = {i: ids for i, ids in enumerate(self.values(rows, "output_token_ids")) if ids is not None}
        session, session_names = self.sessions(lines, rows)
        # Rows in order of sessions; `first` and so on are columns in this order.
        order = np.arange(n) if len(session_names) == n else np.argsort(session, kind="stable")
        session = session[order]
        first = np.ones(n, np.bool_)
        np.not_equal(session[1:], session[:-1], out=first[1:])
        if any(column is None for column in columns) or not self.is_good(columns, table, authored):
            self.explain(table)
        raw = table.ids
        assert inputs is not None
        assert outputs is not None
        assert priority is not None
        assert strict_priority is not None
        assert stamp is not None
        assert delay is not None
        assert raw is not None
        index = np.arange(n)
        start = np.maximum.accumulate(np.where(first, index, 0))
        turn = index - start
        stamp, delay = stamp[order], delay[order]
        think, good = _think_times(stamp, delay, first, start)
        if not good:
            self.explain(table)
        clamped = int(np.count_nonzero(inputs > capacity))
        inputs = np.minimum(inputs, capacity)
        if self.strict:
            self.check_fill(lines, raw, table.ids_per_row, inputs)
            in_file = np.empty(n, np.int64)
            in_file[order] = turn
            self.check_times(lines, rows, in_file.tolist())
        segments, offset, count = content.block_segments(
            content.intern_ids(raw), table.ids_per_row, inputs, self.block_size
        )
        specs = new_specs(n)
        specs["arrival_ms"] = np.where(first, np.where(np.isnan(stamp), 0.0, stamp), math.nan)
        specs["input_tokens"] = inputs[order]
        specs["max_output_tokens"] = outputs[order]
        specs["prompt_offset"] = offset[order]
        specs["prompt_count"] = count[order]
        specs["session"] = session
        specs["turn"] = turn
        specs["priority"] = priority[order]
        specs["strict_priority"] = strict_priority[order]
        if authored:
            rank = np.empty(n, np.int64)
            rank[order] = index
            authored = {int(rank[i]): ids for i, ids in authored.items()}
        planned, specs["planned_offset"] = plan_outputs(outputs[order], authored)
        return Workload(
            specs=specs,
            segments=segments,
            tokens=np.empty(0, np.uint32),
            planned=planned,
            delay_ms=think,
            first_turn=first,
            request_names=self.request_names(lines, rows, order),
            session_names=session_names,
            cumulative=self.delta,
            rebase_arrivals=True,
            clamped_rows=clamped,
            block_size=self.block_size,
            source=self.path,
        )

    def values(self, rows: Sequence[Any], key: str) -> list[Any]:
        """Values of one key, None where a row does not have it."""
        if key not in rows[0].__struct_fields__:
            return [None] * len(rows)
        return list(map(attrgetter(key), rows))

    def lacks(self, rows: Sequence[Any], key: str) -> bool:
        """Whether no row has the key."""
        return key not in rows[0].__struct_fields__ or self.values(rows, key).count(None) == len(rows)

    def column(
        self,
        rows: Sequence[Any],
        kind: type[np.int64] | type[np.float64],
        key: str,
        alias: str | None = None,
        absent: float | npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[Any] | None:
        """Values of a key or its alias; None if a row has both, lacks it and may not, or has one that does not fit."""
        if key not in rows[0].__struct_fields__ and absent is not None:
            return np.full(len(rows), absent, kind)
        values = self.values(rows, key)
        if alias is not None and not self.lacks(rows, alias):
            others = self.values(rows, alias)
            if any(a is not None and b is not None for a, b in zip(values, others, strict=True)):
                return None
            values = [b if a is None else a for a, b in zip(values, others, strict=True)]
        if None in values:
            if absent is None:
                return None
            instead = np.broadcast_to(np.asarray(absent, kind), len(values)).tolist()
            values = [b if a is None else a for a, b in zip(values, instead, strict=True)]
        try:
            return np.array(values, kind)
        except OverflowError:
            return None

    def sessions(self, lines: Sequence[int], rows: Sequence[Any]) -> tuple[npt.NDArray[np.int32], Sequence[str]]:
        """Number of the session of each row, and the names of the sessions."""
        if isinstance(lines, range) and self.lacks(rows, "session_id"):
            return np.arange(len(rows), dtype=np.int32), NumberedNames("request_", lines[0], len(lines))
        given = self.values(rows, "session_id")
        numbers: dict[str, int] = {}
        session = [
            numbers.setdefault(f"request_{line}" if name is None else name, len(numbers))
            for line, name in zip(lines, given, strict=True)
        ]
        return np.array(session, np.int32), list(numbers)

    def is_good(
        self, columns: Sequence[npt.NDArray[Any] | None], table: _Table, authored: Mapping[int, list[int]]
    ) -> bool:
        """Whether each row is allowed, looked at alone."""
        inputs, outputs, priority, strict_priority, stamp, delay = (np.asarray(column) for column in columns)
        return bool(
            table.ids is not None
            and (table.ids_per_row > 0).all()
            and ((inputs > 0) & (inputs <= MAX_TOKENS)).all()
            and not (self.strict and (-(-inputs // self.block_size) != table.ids_per_row).any())
            and ((outputs >= 0) & (outputs <= MAX_TOKENS)).all()
            and ((priority >= -_I32) & (priority < _I32)).all()
            and ((strict_priority >= 0) & (strict_priority < _U32)).all()
            and (np.isnan(stamp) | ((stamp >= 0) & (stamp < math.inf))).all()
            and (np.isnan(delay) | ((delay >= 0) & (delay < math.inf))).all()
            and all(len(ids) == outputs[i] and all(0 <= k < _U32 for k in ids) for i, ids in authored.items())
            and self.lacks(table.rows, "wait_for")
            and self.lacks(table.rows, "dependencies")
        )

    def explain(self, table: _Table) -> NoReturn:
        """Raise the error of the first row that has one; a look at each row, with all its values."""
        clocks: dict[str, float | None] = {}  # per session: newest timestamp
        for i, (line, row) in enumerate(zip(table.lines, table.rows, strict=True)):
            if isinstance(row, _Plain):
                row = _Row(**{name: getattr(row, name) for name in _Plain.__struct_fields__})
            if row.wait_for is not None or row.dependencies is not None:
                raise self.error(
                    line, None, "carries dependencies of format agentic_mooncake, which is not supported as mooncake"
                )
            self.check_lengths(line, row, int(table.ids_per_row[i]))
            outputs = self.output_length(line, row)
            if row.output_token_ids is not None:
                self.check_authored(line, row.output_token_ids, outputs)
            self.check_whole(line, "priority", row.priority, -_I32, _I32 - 1)
            self.check_whole(line, "strict_priority", row.strict_priority, 0, _U32 - 1)
            stamp = self.time(line, "timestamp", self.either(line, "timestamp", row.timestamp, row.created_time))
            think = self.time(line, "delay", self.either(line, "delay", row.delay, row.delay_ms))
            name = f"request_{line}" if row.session_id is None else row.session_id
            if name not in clocks:
                if think:
                    raise self.error(line, "delay", f"must be 0 for the first turn of session {name!r}, got {think:g}")
                clocks[name] = stamp
                continue
            before = clocks[name]
            if think is None and stamp is not None:
                if before is None:
                    raise self.error(
                        line, "timestamp", f"needs an earlier timestamp in session {name!r}, or give delay instead"
                    )
                if stamp < before:
                    raise self.error(
                        line,
                        "timestamp",
                        f"must not be before the previous one of its session, {before:g}, got {stamp:g}",
                    )
            if stamp is not None:
                clocks[name] = stamp
        for line, row in zip(table.lines, table.rows, strict=True) if table.ids is None else ():
            for value in row.hash_ids:
                if not 0 <= value < _U64:
                    raise self.error(line, "hash_ids", f"must lie in 0 <= id < 2**64, got {value}")
        raise AssertionError(f"{self.path}: refused, but no row has an error")

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

    def check_lengths(self, line: int, row: _Row | _Line, num_ids: int) -> None:
        if row.hash_ids is None:
            raise self.missing(line, "hash_ids")
        if not num_ids:
            raise self.error(line, "hash_ids", "must have at least one id, got []")
        length = self.either(line, "input_length", row.input_length, row.input_tokens)
        if length is None:
            return
        if not 0 < length <= MAX_TOKENS:
            raise self.error(line, "input_length", f"must be positive and at most {MAX_TOKENS}, got {length}")
        if self.strict and -(-length // self.block_size) != num_ids:
            raise self.error(
                line,
                "input_length",
                f"{length} tokens need {-(-length // self.block_size)} hash ids of {self.block_size} tokens, "
                f"got {num_ids} hash_ids (capacity {num_ids * self.block_size})",
            )

    def output_length(self, line: int, row: _Row) -> int:
        length = self.either(line, "output_length", row.output_length, row.output_tokens)
        if length is None:
            raise self.missing(line, "output_length")
        if not 0 <= length <= MAX_TOKENS:
            raise self.error(line, "output_length", f"must lie in 0 <= output_length <= {MAX_TOKENS}, got {length}")
        return length

    def check_whole(self, line: int, field: str, value: int | None, low: int, high: int) -> None:
        if value is not None and not low <= value <= high:
            raise self.error(line, field, f"must lie in {low} <= {field} <= {high}, got {value}")

    def check_authored(self, line: int, ids: list[int], length: int) -> None:
        if len(ids) != length:
            raise self.error(line, "output_token_ids", f"must have output_length = {length} entries, got {len(ids)}")
        for value in ids:
            if not 0 <= value < _U32:
                raise self.error(line, "output_token_ids", f"must lie in 0 <= id < 2**32, got {value}")

    def time(self, line: int, key: str, value: float | None) -> float | None:
        if value is not None and not 0 <= value < math.inf:
            raise self.error(line, key, f"must be finite and >= 0 ms, got {value:g}")
        return value

    def request_names(self, lines: Sequence[int], rows: Sequence[Any], order: npt.NDArray[Any]) -> list[str] | None:
        """Names of the rows if any row has a `request_id`; they must be unique."""
        if self.lacks(rows, "request_id"):
            return None
        given = self.values(rows, "request_id")
        names: dict[str, int] = {}
        for line, value in zip(lines, given, strict=True):
            name = f"request_{line}" if value is None else value
            if name in names:
                raise self.error(line, "request_id", f"must be unique, {name!r} is also on line {names[name]}")
            names[name] = line
        in_file = list(names)
        return [in_file[i] for i in order.tolist()]

    # ------------------------------------------------------------ strict mode

    def check_keys(self, lines: Sequence[int]) -> None:
        texts = read_bytes(self.path).split(b"\n")
        for line in lines:
            for key in _OBJECT.decode(texts[line - 1]):
                if key not in _KEYS:
                    close = difflib.get_close_matches(key, _KEYS, 1, 0.6)
                    hint = f", did you mean {close[0]!r}?" if close else ""
                    raise self.error(line, key, f"is not a key of a Mooncake row{hint} (allowed: {', '.join(_KEYS)})")

    def check_fill(
        self,
        lines: Sequence[int],
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

    def check_times(self, lines: Sequence[int], rows: Sequence[Any], turn: list[int]) -> None:
        newest: tuple[float, int] | None = None
        without: int | None = None
        for line, row, k in zip(lines, rows, turn, strict=True):
            if k:
                continue
            stamp = getattr(row, "created_time", None)
            stamp = row.timestamp if stamp is None else stamp
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
