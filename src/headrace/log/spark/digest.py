"""What the rows of a batch are, in a few bytes: the same for the same rows, whatever their order and however they were split into tasks.

The stream writer stores it with each batch, and so knows a batch that Spark repeats from one that has the same number by accident. Every row gets a 64-bit
hash, computed column by column with numpy; a batch's digest is the number of rows and two sums over their hashes. A null counts nothing, so that a column added
to the topic meanwhile does not change the digest of older rows. It is no protection against someone who looks for collisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.log.lists import compact_offsets, elements, entries

Hashes = npt.NDArray[np.uint64]
types = pa.types
_MASK = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xD1B54A32D192ED03), np.uint64(0x8CB92BA72F3D8DD7)
_KEEP_BYTES = np.array([_MASK, *((1 << (8 * count)) - 1 for count in range(1, 8))], np.uint64)
"""For a length modulo 8: which bits of a value's last word belong to it."""


@dataclass(frozen=True)
class Digest:
    """Digests of parts add up to the digest of the whole."""

    rows: int = 0
    sums: tuple[int, int] = (0, 0)

    def __add__(self, other: Digest) -> Digest:
        first, second = (sum(pair) & _MASK for pair in zip(self.sums, other.sums, strict=True))
        return Digest(self.rows + other.rows, (first, second))

    @property
    def text(self) -> str:
        return "".join(f"{each:016x}" for each in self.sums)


def digest(batch: pa.RecordBatch) -> Digest:
    rows = _combined({field.name: column for field, column in zip(batch.schema, batch.columns, strict=True)}, batch.num_rows)
    first, second = (int(_mixed(rows + salt).sum(dtype=np.uint64)) for salt in (_FIRST, _SECOND))
    return Digest(batch.num_rows, (first, second))


def _combined(columns: dict[str, pa.Array], count: int) -> Hashes:
    """One hash for each row of several columns. Which value stands in which column matters; a null adds nothing."""
    total = np.zeros(count, np.uint64)
    for name, column in columns.items():
        hashes = _hashes(column)
        total += np.where(hashes == 0, hashes, _mixed(hashes + _seed(name)))
    return total


def _seed(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little"))


def _mixed(values: Hashes) -> Hashes:
    """Spreads every bit over all others (the finalizer of splitmix64). Works in place: give it an array of its own."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _hashes(array: pa.Array) -> Hashes:
    """A hash for each value; 0 for a null, and for practically nothing else."""
    if array.null_count == len(array):
        return np.zeros(len(array), np.uint64)
    hashes = _values(array)
    if array.null_count:
        hashes[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return hashes


def _values(array: pa.Array) -> Hashes:
    """A hash for each value; anything for a null."""
    kind = array.type
    if types.is_struct(kind):
        parts = dict(zip((child.name for child in kind), array.flatten(), strict=True))
        return _mixed(_combined(parts, len(array)) + _STEP)
    if types.is_map(kind):
        keys, items = entries(array)
        return _sequences(_combined({"key": keys, "value": items}, len(keys)), compact_offsets(array))
    if types.is_list(kind):
        return _sequences(_hashes(elements(array)), compact_offsets(array))
    if types.is_string(kind) or types.is_binary(kind):
        return _texts(array)
    if types.is_boolean(kind):
        return _mixed(array.cast(pa.uint8()).fill_null(0).to_numpy().astype(np.uint64) + _STEP)
    return _fixed(array)


def _fixed(array: pa.Array) -> Hashes:
    """Numbers and times, by their bits."""
    width = array.type.bit_width // 8
    if width == 16:  # a decimal
        words = np.frombuffer(array.buffers()[1], np.uint64, 2 * len(array), 16 * array.offset)
        return _mixed(words[0::2] + _STEP) + _mixed(words[1::2] + _FIRST)
    bits = np.frombuffer(array.buffers()[1], f"u{width}", len(array), width * array.offset)
    return _mixed(bits.astype(np.uint64) + _STEP)


def _sequences(hashes: Hashes, offsets: pa.Array) -> Hashes:
    """Lists of things that have hashes already; the order within a list matters."""
    bounds = offsets.to_numpy().astype(np.int64)
    lengths = np.diff(bounds)
    places = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    return _summed(hashes, places, bounds, lengths)


def _summed(hashes: Hashes, places: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Hashes:
    """For each sequence the sum over its things, each mixed with its place, mixed with the length."""
    placed = _mixed(hashes + (places.astype(np.uint64) + np.uint64(1)) * _STEP)
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(placed, dtype=np.uint64)])
    return _mixed(running[bounds[1:]] - running[bounds[:-1]] + (lengths.astype(np.uint64) + np.uint64(1)) * _FIRST)


def _texts(array: pa.Array) -> Hashes:
    """Texts and bytes, eight bytes at a time."""
    offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, 4 * array.offset).astype(np.int64)
    lengths = np.diff(offsets)
    counts = (lengths + 7) // 8
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    places = np.arange(bounds[-1]) - np.repeat(bounds[:-1], counts)
    words = _words(array.buffers()[2], int(offsets[0]), int(offsets[-1]), np.repeat(offsets[:-1], counts) + 8 * places)
    has_words = counts > 0
    words[bounds[1:][has_words] - 1] &= _KEEP_BYTES[lengths[has_words] % 8]
    return _summed(words, places, bounds, lengths)


def _words(data: pa.Buffer | None, start: int, stop: int, positions: npt.NDArray[np.int64]) -> Hashes:
    """Eight bytes from each position on, wherever it lies; behind the end there are zeros."""
    padded = np.zeros(stop - start + 8, np.uint8)
    if data is not None:
        padded[: stop - start] = np.frombuffer(data, np.uint8, stop - start, start)
    sliding: Hashes = np.ndarray((stop - start + 1,), np.dtype("<u8"), padded, strides=(1,))
    return sliding[positions - start]
