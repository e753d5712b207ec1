"""Kafka's murmur2 hash, over one key and over whole columns of keys. The log chooses partitions by
it, the engine chooses key groups by it.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF
_WORD = struct.Struct("<I")
_FEW_ROWS = 24  # below this many rows numpy's cost per call exceeds the cost of plain Python

Words = npt.NDArray[np.uint32]


def murmur2(data: bytes) -> int:
    """Kafka's hash of a key: 32 bits, unsigned."""
    whole = len(data) & ~3
    hashed = _mix(_SEED ^ len(data), data[:whole])
    if tail := data[whole:]:
        hashed = ((hashed ^ int.from_bytes(tail, "little")) * _M) & _MASK
    hashed ^= hashed >> 13
    hashed = (hashed * _M) & _MASK
    return hashed ^ (hashed >> 15)


def _mix(hashed: int, data: bytes) -> int:
    """Mix in whole words, one by one."""
    for (word,) in _WORD.iter_unpack(data):
        mixed = (word * _M) & _MASK
        mixed ^= mixed >> 24
        hashed = (hashed * _M) & _MASK ^ (mixed * _M) & _MASK
    return hashed


def murmur2_array(array: pa.BinaryArray | pa.StringArray | pa.FixedSizeBinaryArray) -> Words:
    """The hash of each element; a null hashes as the empty key. The cost is proportional to the
    number of bytes, however long single keys are.
    """
    if (
        pa.types.is_fixed_size_binary(array.type)
        and array.type.byte_width % 4 == 0
        and not array.null_count
    ):
        return _hash_words(array)
    if len(array) < _FEW_ROWS or pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    if len(array) < _FEW_ROWS:
        return np.array([murmur2(value or b"") for value in array.to_pylist()], np.uint32)
    starts, lengths, values = _layout(array)
    hashed = lengths.astype(np.uint32) ^ np.uint32(_SEED)
    _mix_words(hashed, starts, lengths, values)
    _mix_tails(hashed, starts, lengths, values)
    return _finish(hashed)


def hash64(keys: pa.Array) -> npt.NDArray[np.uint64]:
    """64 bits of each key: its hash, and that of the key behind another byte."""
    prefix, end = pa.scalar(b"\x01", pa.binary()), pa.scalar(b"", pa.binary())
    salted = pc.binary_join_element_wise(prefix, keys.cast(pa.binary()), end)
    words = murmur2_array(keys).astype(np.uint64) << np.uint64(32)
    return words | murmur2_array(salted).astype(np.uint64)


def mix64(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Words whose bits depend on all bits of the ones before: the finalizer of SplitMix64."""
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _finish(hashed: Words) -> Words:
    hashed ^= hashed >> np.uint32(13)
    hashed *= np.uint32(_M)
    hashed ^= hashed >> np.uint32(15)
    return hashed


def _hash_words(array: pa.FixedSizeBinaryArray) -> Words:
    """The hash of keys of equal length in whole words, such as BIGINT keys: one word of all keys at
    a time.
    """
    width: int = array.type.byte_width
    words = np.frombuffer(
        array.buffers()[1], "<u4", count=len(array) * width // 4, offset=array.offset * width
    ).reshape(len(array), width // 4)
    hashed = np.full(len(array), _SEED ^ width, np.uint32)
    for at in range(width // 4):
        k = words[:, at].copy()
        k *= np.uint32(_M)
        k ^= k >> np.uint32(24)
        k *= np.uint32(_M)
        hashed *= np.uint32(_M)
        hashed ^= k
    return _finish(hashed)


def _layout(
    array: pa.Array,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """The start and length of each element (0 for a null), and all bytes, padded so that a whole
    word can be read at the last one.
    """
    if array.null_count:
        array = pc.fill_null(array, b"" if pa.types.is_binary(array.type) else "")
    _, offset_buffer, value_buffer = array.buffers()
    offsets = np.frombuffer(
        offset_buffer, np.int32, count=len(array) + 1, offset=array.offset * 4
    ).astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    values = np.zeros(last - first + 4, np.uint8)
    if last > first:
        values[:-4] = np.frombuffer(value_buffer, np.uint8, count=last - first, offset=first)
    return offsets[:-1] - first, np.diff(offsets), values


def _words_at(values: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64]) -> Words:
    """The little-endian words that start at the given byte positions."""
    overlapping: Words = np.ndarray(
        shape=(len(values) - 3,), dtype="<u4", buffer=values.data, strides=(1,)
    )
    return overlapping[positions]


def _mix_words(
    hashed: Words,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    values: npt.NDArray[np.uint8],
) -> None:
    """Mix in one word of every key that has one left, then the next word, and so on. The last few
    long keys are finished one by one.
    """
    words = lengths >> 2
    rows = np.flatnonzero(words)
    step = 0
    while len(rows) >= _FEW_ROWS:
        is_every_row = len(rows) == len(hashed)
        k = _words_at(values, (starts if is_every_row else starts[rows]) + 4 * step)
        k *= np.uint32(_M)
        k ^= k >> np.uint32(24)
        k *= np.uint32(_M)
        if is_every_row:
            hashed *= np.uint32(_M)
            hashed ^= k
        else:
            hashed[rows] = hashed[rows] * np.uint32(_M) ^ k
        step += 1
        rows = rows[words[rows] > step]
    for row in rows:
        start = starts[row] + 4 * step
        hashed[row] = _mix(int(hashed[row]), values[start : starts[row] + 4 * words[row]].tobytes())


def _mix_tails(
    hashed: Words,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    values: npt.NDArray[np.uint8],
) -> None:
    """Mix in the last one to three bytes of keys whose length is not a multiple of four."""
    rows = np.flatnonzero(lengths & 3)
    if not len(rows):
        return
    tail = _words_at(values, starts[rows] + (lengths[rows] & ~3))
    tail &= (np.uint32(1) << (8 * (lengths[rows] & 3)).astype(np.uint32)) - np.uint32(1)
    hashed[rows] = (hashed[rows] ^ tail) * np.uint32(_M)
