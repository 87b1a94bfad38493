"""Made-up traces that look like served traffic: the generator behind ``kvsim synth``.

What makes real traces interesting for a KV cache is kept: prompt and output
lengths with heavy tails, bursts of arrivals, a tree of popular prompt prefixes
of which a few carry most of the traffic, and conversations whose prompts grow
by the answer and the next question. The rows are a Mooncake trace, so every
tool that reads those can read them.
"""

from __future__ import annotations

import gzip
import heapq
import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvsim.errors import ConfigError

__all__ = ["TraceProfile", "example_trace_path", "generate_trace", "write_mooncake"]

#: A client waits this long per output token before it can answer; only places follow-up turns in time.
_ASSUMED_ITL_MS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceProfile:
    """Shape of a generated trace.

    Parameters
    ----------
    requests : int, default 2000
        Rows of the trace.
    rate : float, default 11.0
        Mean requests per second, > 0.
    burstiness : float, default 2.0
        Squared coefficient of variation of the gaps between conversations:
        1 is Poisson, above it bursty, > 0.
    block_size : int, default 512
        Tokens per hash id.
    turns : float, default 2.0
        Mean turns of a conversation (geometric), >= 1.
    think_s : float, default 20.0
        Median time a client takes for its next question, seconds.
    input_median, input_sigma : float, default 350 and 1.1
        New prompt tokens of a turn: lognormal median and log deviation.
    document_share, document_min, document_tail : float, default 0.2, 3000 and 1.6
        Share of conversations that open with a document, and its length:
        Pareto of this minimum and exponent.
    output_median, output_sigma : float, default 180 and 0.8
        Output tokens: lognormal.
    max_input, max_output : int, default 60000 and 2048
        Prompts end a conversation that would outgrow the first; outputs are cut.
    prefix_roots, prefix_depth, prefix_branching : int, default 12, 3 and 4
        The tree of shared prefixes: roots, levels, children per node. 0 roots: none.
    prefix_tokens : float, default 600
        Mean length of the piece of one node, in whole blocks, at least one.
    prefix_skew : float, default 1.1
        Zipf exponent of the popularity of roots and of siblings, >= 0.
    session_ids : bool, default False
        Write conversations as sessions: follow-up rows carry ``session_id``
        and ``delay`` and wait for the turn before, instead of a timestamp.
    seed : int, default 0
        Equal seeds give equal traces.

    Raises
    ------
    ConfigError
        Naming the field.
    """

    requests: int = 2000
    rate: float = 11.0
    burstiness: float = 2.0
    block_size: int = 512
    turns: float = 2.0
    think_s: float = 20.0
    input_median: float = 350.0
    input_sigma: float = 1.1
    document_share: float = 0.2
    document_min: float = 3000.0
    document_tail: float = 1.6
    output_median: float = 180.0
    output_sigma: float = 0.8
    max_input: int = 60_000
    max_output: int = 2048
    prefix_roots: int = 12
    prefix_depth: int = 3
    prefix_branching: int = 4
    prefix_tokens: float = 600.0
    prefix_skew: float = 1.1
    session_ids: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        at_least = {"turns": 1.0, "seed": 0, "prefix_roots": 0, "prefix_skew": 0.0, "think_s": 0.0}
        at_least |= {"input_sigma": 0.0, "output_sigma": 0.0, "document_share": 0.0}
        at_most = {"document_share": 1.0}
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if field.type == "bool":
                if not isinstance(value, bool):
                    raise ConfigError(name, f"must be true or false, got {value!r}")
                continue
            kinds = (int, np.integer) if field.type == "int" else (int, float, np.integer, np.floating)
            if isinstance(value, bool) or not isinstance(value, kinds) or not np.isfinite(value):
                wanted = "an int" if field.type == "int" else "a finite number"
                raise ConfigError(name, f"must be {wanted}, got {value!r}")
            low = at_least.get(name)
            if low is None:
                low = 1 if field.type == "int" else 0.0
                if field.type == "float" and value == 0.0:
                    raise ConfigError(name, f"must be > 0, got {value!r}")
            if value < low or value > at_most.get(name, np.inf):
                bound = f">= {low:g}" + (f" and <= {at_most[name]:g}" if name in at_most else "")
                raise ConfigError(name, f"must be {bound}, got {value!r}")


class _PrefixTree:
    """Popular prompt beginnings: a path from a root is one prefix, made of whole blocks."""

    def __init__(self, profile: TraceProfile, rng: np.random.Generator) -> None:
        self.profile, self.rng = profile, rng
        self.blocks: dict[tuple[int, ...], range] = {}  # node, named by the choices that lead to it -> block ids
        self.next_id = 0
        self.root_odds = self._odds(profile.prefix_roots)
        self.child_odds = self._odds(profile.prefix_branching)

    def _odds(self, count: int) -> npt.NDArray[np.float64]:
        weights = np.arange(1, count + 1, dtype=np.float64) ** -self.profile.prefix_skew
        return np.asarray(weights / weights.sum(), np.float64)

    def fresh(self, count: int) -> range:
        """`count` block ids that nobody has used."""
        ids = range(self.next_id, self.next_id + count)
        self.next_id += count
        return ids

    def draw(self) -> list[int]:
        """Block ids of a prefix drawn by popularity; half of the conversations go one level deeper each."""
        profile, rng = self.profile, self.rng
        if profile.prefix_roots == 0:
            return []
        path = [int(rng.choice(profile.prefix_roots, p=self.root_odds))]
        while len(path) < profile.prefix_depth and rng.random() < 0.5:
            path.append(int(rng.choice(profile.prefix_branching, p=self.child_odds)))
        ids: list[int] = []
        for depth in range(1, len(path) + 1):
            node = tuple(path[:depth])
            if node not in self.blocks:
                tokens = rng.exponential(profile.prefix_tokens)
                self.blocks[node] = self.fresh(max(1, round(tokens / profile.block_size)))
            ids += self.blocks[node]
        return ids


def generate_trace(profile: TraceProfile) -> list[dict[str, Any]]:
    """Rows of a trace in the Mooncake format.

    Parameters
    ----------
    profile : TraceProfile
        Shape and seed.

    Returns
    -------
    list of dict
        Keys ``timestamp`` (whole ms, ascending from 0), ``input_length``,
        ``output_length``, ``hash_ids`` (numbered by first appearance); with
        `session_ids` also ``session_id``, and follow-up rows have ``delay``
        (ms) instead of ``timestamp``.
    """
    rng = np.random.Generator(np.random.PCG64(profile.seed))
    tree = _PrefixTree(profile, rng)
    turns: list[tuple[float, int, int, dict[str, Any]]] = []  # time, conversation, turn, row
    earliest: list[float] = []  # heap of the negated times of the `requests` earliest turns
    start_ms, conversation = 0.0, 0
    mean_gap_ms = 1000.0 * profile.turns / profile.rate
    # A conversation that starts after the last row wanted cannot change the trace.
    while len(earliest) < profile.requests or start_ms <= -earliest[0]:
        for turn in _conversation(profile, rng, tree, conversation, start_ms):
            turns.append(turn)
            if len(earliest) < profile.requests:
                heapq.heappush(earliest, -turn[0])
            else:
                heapq.heappushpop(earliest, -turn[0])
        start_ms += rng.gamma(1.0 / profile.burstiness, mean_gap_ms * profile.burstiness)
        conversation += 1
    turns.sort(key=lambda turn: turn[:3])
    rows = [row for _, _, _, row in turns[: profile.requests]]
    numbers: dict[int, int] = {}
    for row in rows:
        row["hash_ids"] = [numbers.setdefault(block, len(numbers)) for block in row["hash_ids"]]
    return rows


def _conversation(
    profile: TraceProfile, rng: np.random.Generator, tree: _PrefixTree, number: int, start_ms: float
) -> list[tuple[float, int, int, dict[str, Any]]]:
    block = profile.block_size
    history = tree.draw()
    tokens = len(history) * block
    if rng.random() < profile.document_share:
        document = profile.document_min * (1.0 + rng.pareto(profile.document_tail))
        tokens += round(min(document, profile.max_input))
    at_ms, gap_ms = start_ms, 0.0
    result = []
    for turn in range(int(rng.geometric(1.0 / profile.turns))):
        tokens += max(1, round(float(rng.lognormal(np.log(profile.input_median), profile.input_sigma))))
        if tokens > profile.max_input:
            if turn > 0:
                break
            tokens = max(profile.max_input, 1)
        output = round(float(rng.lognormal(np.log(profile.output_median), profile.output_sigma)))
        output = min(profile.max_output, max(1, output))
        needed = -(-tokens // block)
        kept = history[: tokens // block]
        ids = kept + list(tree.fresh(needed - len(kept)))
        row: dict[str, Any] = {"timestamp": round(at_ms)}
        if profile.session_ids:
            row = {"session_id": f"session_{number}"} | ({"delay": round(gap_ms)} if turn else row)
        row |= {"input_length": tokens, "output_length": output, "hash_ids": ids}
        result.append((at_ms, number, turn, row))
        # Only whole blocks keep their id: what follows changes the content of the last one.
        history = ids[: tokens // block]
        tokens += output
        gap_ms = float(rng.lognormal(np.log(max(profile.think_s, 1e-3) * 1000.0), 0.8))
        at_ms += output * _ASSUMED_ITL_MS + gap_ms
    return result


def write_mooncake(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines, gzip if the name ends in ``.gz``; equal rows give equal bytes.

    Parameters
    ----------
    path : path
        Replaced if it exists.
    rows : iterable of mapping
        One line each, keys in their order.

    Returns
    -------
    int
        Bytes written.
    """
    encode = msgspec.json.Encoder().encode
    data = b"".join(encode(dict(row)) + b"\n" for row in rows)
    target = Path(path)
    if target.name.endswith(".gz"):
        buffer = io.BytesIO()
        # Neither name nor time of the file belongs into the bytes.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as stream:
            stream.write(data)
        data = buffer.getvalue()
    target.write_bytes(data)
    return len(data)


def example_trace_path() -> Path:
    """Path of the trace that comes with kvsim, 2,000 requests made by ``generate_trace(TraceProfile())``.

    Hash ids stand for 512 tokens. One vLLM worker with the default timing and
    16384 blocks of 64 tokens is busy for about four fifths of its capacity and
    finds roughly half of the prompt tokens in its cache.
    """
    return Path(__file__).parent.parent / "data" / "example_trace.jsonl.gz"
