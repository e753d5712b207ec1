"""A digest of a batch's rows: the same for the same rows, whatever their order and however they are
split into tasks.

The stream writer stores it with each batch, and so distinguishes a batch that Spark repeats from
another batch with the same number. Every row gets a 64-bit hash, computed column by column; a
digest is the number of rows and two sums over their hashes. A null adds nothing, so a column that
is added to the topic later does not change the digest of older rows. The digest does not protect
against deliberate collisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.buffers import compact_offsets, list_elements, map_entries

Hashes = npt.NDArray[np.uint64]
types = pa.types
_MASK = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xD1B54A32D192ED03), np.uint64(0x8CB92BA72F3D8DD7)
_LAST_WORD_MASKS = np.array([_MASK, *((1 << (8 * count)) - 1 for count in range(1, 8))], np.uint64)
"""By length modulo 8, the mask of the bits of a value's last word that belong to it."""


@dataclass(frozen=True)
class Digest:
    """The digest of some rows. Digests of parts add up to the digest of the whole."""

    rows: int = 0
    sums: tuple[int, int] = (0, 0)

    def __add__(self, other: Digest) -> Digest:
        first, second = (sum(pair) & _MASK for pair in zip(self.sums, other.sums, strict=True))
        return Digest(self.rows + other.rows, (first, second))

    @property
    def text(self) -> str:
        return "".join(f"{part:016x}" for part in self.sums)


def digest_rows(batch: pa.RecordBatch) -> Digest:
    """The digest of a batch."""
    rows = _hash_rows(dict(zip(batch.schema.names, batch.columns, strict=True)), batch.num_rows)
    first, second = (int(_mix(rows + salt).sum(dtype=np.uint64)) for salt in (_FIRST, _SECOND))
    return Digest(batch.num_rows, (first, second))


def _hash_rows(columns: dict[str, pa.Array], count: int) -> Hashes:
    """One hash for each row of several columns. It depends on which column a value is in; a null
    adds nothing.
    """
    total = np.zeros(count, np.uint64)
    for name, column in columns.items():
        hashes = _hash_column(column)
        total += np.where(hashes == 0, hashes, _mix(hashes + _seed(name)))
    return total


def _seed(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little"))


def _mix(values: Hashes) -> Hashes:
    """Mix every bit into all others (the finalizer of splitmix64), in place: the array must not be
    shared.
    """
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _hash_column(array: pa.Array) -> Hashes:
    """A hash for each value; 0 for a null, and with negligible probability for anything else."""
    if array.null_count == len(array):
        return np.zeros(len(array), np.uint64)
    hashes = _hash_values(array)
    if array.null_count:
        hashes[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return hashes


def _hash_values(array: pa.Array) -> Hashes:
    """A hash for each value; arbitrary for a null."""
    kind = array.type
    if types.is_struct(kind):
        parts = dict(zip((child.name for child in kind), array.flatten(), strict=True))
        return _mix(_hash_rows(parts, len(array)) + _STEP)
    if types.is_map(kind):
        keys, items = map_entries(array)
        return _hash_lists(
            _hash_rows({"key": keys, "value": items}, len(keys)), compact_offsets(array)
        )
    if types.is_list(kind):
        return _hash_lists(_hash_column(list_elements(array)), compact_offsets(array))
    if types.is_string(kind) or types.is_binary(kind):
        return _hash_texts(array)
    if types.is_boolean(kind):
        return _mix(array.cast(pa.uint8()).fill_null(0).to_numpy().astype(np.uint64) + _STEP)
    return _hash_fixed(array)


def _hash_fixed(array: pa.Array) -> Hashes:
    """Hashes of numbers and times, by their bits."""
    width = array.type.bit_width // 8
    if width == 16:  # a decimal
        words = np.frombuffer(array.buffers()[1], np.uint64, 2 * len(array), 16 * array.offset)
        return _mix(words[0::2] + _STEP) + _mix(words[1::2] + _FIRST)
    bits = np.frombuffer(array.buffers()[1], f"u{width}", len(array), width * array.offset)
    return _mix(bits.astype(np.uint64) + _STEP)


def _hash_lists(hashes: Hashes, offsets: pa.Array) -> Hashes:
    """Hashes of lists whose elements have hashes; the order within a list matters."""
    bounds = offsets.to_numpy().astype(np.int64)
    lengths = np.diff(bounds)
    indices = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    return _hash_sequences(hashes, indices, bounds, lengths)


def _hash_sequences(
    hashes: Hashes,
    indices: npt.NDArray[np.int64],
    bounds: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> Hashes:
    """For each sequence the sum of its elements' hashes, each mixed with its index; mixed with the
    length.
    """
    mixed = _mix(hashes + (indices.astype(np.uint64) + np.uint64(1)) * _STEP)
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    return _mix(
        running[bounds[1:]]
        - running[bounds[:-1]]
        + (lengths.astype(np.uint64) + np.uint64(1)) * _FIRST
    )


def _hash_texts(array: pa.Array) -> Hashes:
    """Hashes of texts and binaries, eight bytes at a time."""
    offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, 4 * array.offset).astype(
        np.int64
    )
    lengths = np.diff(offsets)
    counts = (lengths + 7) // 8
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    indices = np.arange(bounds[-1]) - np.repeat(bounds[:-1], counts)
    words = _words(
        array.buffers()[2],
        int(offsets[0]),
        int(offsets[-1]),
        np.repeat(offsets[:-1], counts) + 8 * indices,
    )
    has_words = counts > 0
    words[bounds[1:][has_words] - 1] &= _LAST_WORD_MASKS[lengths[has_words] % 8]
    return _hash_sequences(words, indices, bounds, lengths)


def _words(
    data: pa.Buffer | None, start: int, stop: int, positions: npt.NDArray[np.int64]
) -> Hashes:
    """The eight bytes at each position, whatever its alignment; zeros after the end."""
    padded = np.zeros(stop - start + 8, np.uint8)
    if data is not None:
        padded[: stop - start] = np.frombuffer(data, np.uint8, stop - start, start)
    sliding: Hashes = np.ndarray((stop - start + 1,), np.dtype("<u8"), padded, strides=(1,))
    return sliding[positions - start]
