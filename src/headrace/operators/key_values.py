"""From a key's bytes back to its values: the other way round of `keys.encode_keys`, for kernels that find keys in their state and tell rows of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.operators.buffers import Ints, Mask, fixed_width, offsets_of, runs

_NULL_LENGTH = 0xFFFFFFFF
Data = npt.NDArray[np.uint8]


def decode_keys(keys: pa.Array, fields: Sequence[pa.Field]) -> list[pa.Array]:
    """The columns whose key bytes these are, each value in the one spelling that a key has."""
    if not fields:
        return []
    data, starts, lengths = _laid_out(keys)
    if len(fields) == 1:
        return [_single(data, starts, lengths, fields[0].type)]
    columns = []
    for field in fields:
        sizes = data[runs(starts, np.full(len(starts), 4))].view(">u4").astype(np.int64)
        there = sizes != _NULL_LENGTH
        sizes = np.where(there, sizes, 0)
        columns.append(_values(data, starts + 4, sizes, there, field.type))
        starts = starts + 4 + sizes
    return columns


def _laid_out(keys: pa.Array) -> tuple[Data, Ints, Ints]:
    """All bytes, and where each key begins and how long it is."""
    if pa.types.is_fixed_size_binary(keys.type):
        width = keys.type.byte_width
        return fixed_width(keys, np.uint8), np.arange(len(keys)) * width, np.full(len(keys), width)
    offsets = offsets_of(keys)
    data = np.frombuffer(keys.buffers()[2], np.uint8) if len(keys) and keys.buffers()[2] is not None else np.zeros(0, np.uint8)
    return data, offsets[:-1], np.diff(offsets)


def _single(data: Data, starts: Ints, lengths: Ints, kind: pa.DataType) -> pa.Array:
    """Alone in a key a null is nothing, and what varies in length has a byte before it."""
    there = lengths > 0
    before = 0 if _width(kind) is not None else 1
    return _values(data, starts + before, np.where(there, lengths - before, 0), there, kind)


def _values(data: Data, starts: Ints, sizes: Ints, there: Mask, kind: pa.DataType) -> pa.Array:
    width = _width(kind)
    if width is None:
        return _varying(data[runs(starts, sizes)], sizes, there, kind)
    values = _fixed(_cut(data, starts[there], width), kind)
    if there.all():
        return values
    return values.take(pa.array(np.cumsum(there) - 1, mask=~there))


def _cut(data: Data, starts: Ints, width: int) -> Data:
    """So many bytes from each of these places on. Mostly they lie one behind the other."""
    if len(starts) and (np.diff(starts) == width).all():
        return data[starts[0] : starts[-1] + width].reshape(-1, width)
    return data[runs(starts, np.full(len(starts), width))].reshape(-1, width)


def _width(kind: pa.DataType) -> int | None:
    if pa.types.is_boolean(kind):
        return 1
    return kind.bit_width // 8 if pa.types.is_primitive(kind) or pa.types.is_decimal128(kind) else None


def _varying(data: Data, sizes: Ints, there: Mask, kind: pa.DataType) -> pa.Array:
    offsets = np.append(0, np.cumsum(sizes))
    plain = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    if not there.all():
        plain = plain.take(pa.array(np.arange(len(sizes)), mask=~there))
    return plain.cast(pa.binary()).cast(kind)


def _fixed(big: Data, kind: pa.DataType) -> pa.Array:
    """Values of a fixed width from their bytes in order."""
    if pa.types.is_boolean(kind):
        return pa.array(big[:, 0] != 0)
    width = big.shape[1]
    if pa.types.is_decimal128(kind):
        words = np.ascontiguousarray(big).view(">u8").reshape(-1, 2).astype("<u8")
        little = np.stack([words[:, 1], words[:, 0] ^ np.uint64(1 << 63)], axis=1)
        return pa.Array.from_buffers(kind, len(big), [None, pa.py_buffer(np.ascontiguousarray(little))])
    bits = np.ascontiguousarray(big).view(f">u{width}").reshape(-1).astype(f"<u{width}")
    if not pa.types.is_unsigned_integer(kind):
        bits = _signed(bits, floating=pa.types.is_floating(kind))
    return pa.Array.from_buffers(kind, len(bits), [None, pa.py_buffer(bits)])


def _signed(bits: npt.NDArray[np.unsignedinteger], *, floating: bool) -> npt.NDArray[np.unsignedinteger]:
    top = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(bits & top, bits ^ top, ~bits) if floating else bits ^ top
