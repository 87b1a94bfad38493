"""Block identity, made-up output tokens and the acceptance stream, in plain Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import xxhash

SEED = 1337
MASK32 = 2**32 - 1
MASK64 = 2**64 - 1


def local_hash(tokens: Sequence[int]) -> int:
    """XXH3-64 of the tokens of one block as little-endian u32."""
    return xxhash.xxh3_64_intdigest(b"".join(int(token).to_bytes(4, "little") for token in tokens), seed=SEED)


def lineage_hash(parent: int | None, local: int) -> int:
    """Hash of a block and of everything before it; a root's is its local hash."""
    if parent is None:
        return local
    return xxhash.xxh3_64_intdigest(parent.to_bytes(8, "little") + local.to_bytes(8, "little"), seed=SEED)


def chain(tokens: Sequence[int], block_size: int) -> list[tuple[int, int]]:
    """(lineage hash, local hash) of every complete block of `tokens`."""
    result: list[tuple[int, int]] = []
    parent: int | None = None
    for start in range(0, len(tokens) - block_size + 1, block_size):
        local = local_hash(tokens[start : start + block_size])
        parent = lineage_hash(parent, local)
        result.append((parent, local))
    return result


def synthetic_token(request_id: int, ordinal: int) -> int:
    """Output token `ordinal` of a request without planned ids (vllm.md section 2)."""
    data = request_id.to_bytes(16, "big") + ordinal.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(data, seed=0) & MASK32


def _rotate_left(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & MASK32


def _quarter_round(x: list[int], a: int, b: int, c: int, d: int) -> None:
    for first, second, third, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x[first] = (x[first] + x[second]) & MASK32
        x[third] = _rotate_left(x[third] ^ x[first], bits)


class ChaCha12:
    """ChaCha with 12 rounds, 64-bit block counter, stream 0, keyed by a u64 (vllm.md section 7)."""

    def __init__(self, seed: int) -> None:
        state = seed & MASK64
        self.key: list[int] = []
        for _ in range(8):
            state = (state * 6364136223846793005 + 11634580027462260723) & MASK64
            word, turn = (((state >> 18) ^ state) >> 27) & MASK32, state >> 59
            self.key.append(((word >> turn) | (word << (32 - turn))) & MASK32)
        self._words = self._stream()

    def _stream(self) -> Iterator[int]:
        counter = 0
        while True:
            start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *self.key]
            start += [counter & MASK32, counter >> 32, 0, 0]
            x = list(start)
            for _ in range(6):
                for columns in ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)):
                    _quarter_round(x, *columns)
                for diagonal in ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)):
                    _quarter_round(x, *diagonal)
            yield from ((a + b) & MASK32 for a, b in zip(x, start, strict=True))
            counter += 1

    def next_u32(self) -> int:
        return next(self._words)

    def next_u64(self) -> int:
        low, high = islice(self._words, 2)
        return low | high << 32

    def accept(self, probability: float) -> bool:
        """One trial; probability 1 consumes nothing."""
        if probability >= 1.0:
            return True
        return self.next_u64() < int(probability * 2.0**64)
