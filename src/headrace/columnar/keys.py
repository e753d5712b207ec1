"""A row's key as bytes: what state is kept under, what results are ordered by, and what chooses a
row's key group.

Equal keys have equal bytes and different keys different ones, whatever else is in the batch. A key
of one column keeps the order of its values (null first); several columns are each written with
their length before them, so that no two keys run into each other.

| type | bytes |
|---|---|
| integers, dates, times, intervals | big-endian, sign bit flipped |
| FLOAT, DOUBLE | big-endian, in order; -0.0 is 0.0 and every NaN is one NaN, the largest |
| DECIMAL | 16 bytes, big-endian, sign bit flipped |
| BOOLEAN | one byte |
| STRING, BINARY | as they are; alone in a key with the byte 1 before them |
| null | alone in a key: nothing; among several: the length 0xFFFFFFFF |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, fixed_width, offsets_of, runs
from headrace.columnar.murmur2 import murmur2_array
from headrace.errors import InputError, UnknownColumn

GROUPS = 128
_NULL_LENGTH = b"\xff\xff\xff\xff"
Bytes = npt.NDArray[np.uint8]


def key_groups(keys: pa.Array) -> npt.NDArray[np.uint8]:
    """The key group of each key: which of 128 parts of the state it belongs to."""
    return (murmur2_array(keys) & np.uint32(GROUPS - 1)).astype(np.uint8)


def encode_keys(rows: pa.Table | pa.RecordBatch, columns: Sequence[str]) -> pa.Array:
    """The key bytes of each row: fixed-size binary where no value varies in length and none is
    null, else binary.
    """
    if not columns:
        return _fixed(np.zeros((rows.num_rows, 1), np.uint8))
    if missing := [name for name in columns if name not in rows.schema.names]:
        raise UnknownColumn(missing[0], rows.schema.names, where="The input")
    arrays = [whole(rows.column(name)) for name in columns]
    if len(arrays) == 1:
        return _single(arrays[0])
    matrices = [
        part
        for array in arrays
        if not array.null_count and not isinstance(part := ordered_bytes(array), pa.Array)
    ]
    if len(matrices) == len(arrays):
        return _fixed(np.hstack([each for part in matrices for each in (_lengths(part), part)]))
    pieces = [piece for array in arrays for piece in _with_length(array)]
    return pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.binary()))


def key_list(keys: pa.Array) -> list[bytes]:
    """Key bytes as Python has them, for the state."""
    if not pa.types.is_fixed_size_binary(keys.type):
        varying: list[bytes] = keys.to_pylist()
        return varying
    fixed: list[bytes] = fixed_width(keys, f"V{keys.type.byte_width}").tolist()
    return fixed


def whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def canonical(array: pa.Array) -> pa.Array:
    """A key column with one spelling for each value: of zeros and NaNs there are several."""
    if not pa.types.is_floating(array.type):
        return array
    values = _plain_floats(array.fill_null(0).to_numpy(zero_copy_only=False))
    return pa.array(
        values,
        array.type,
        mask=array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None,
    )


def ordered_bytes(array: pa.Array) -> Bytes | pa.Array:
    """The bytes of a column without nulls, in the order of its values: a matrix with a row for each
    value, or a binary array.
    """
    kind = array.type
    if pa.types.is_boolean(kind):
        return array.to_numpy(zero_copy_only=False).astype(np.uint8).reshape(-1, 1)
    if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        return _ordered_integers(array)
    if pa.types.is_floating(kind):
        return _ordered_floats(array.to_numpy(zero_copy_only=False))
    if pa.types.is_decimal128(kind):
        return _ordered_decimals(array)
    if (
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    ):
        return array.cast(pa.binary())
    raise InputError(
        f"A column of type {kind} cannot be part of a key.",
        fix="key by plain columns; take parts of nested ones out with select.",
    )


def _single(array: pa.Array) -> pa.Array:
    encoded = ordered_bytes(array.drop_null() if array.null_count else array)
    if isinstance(encoded, pa.Array):
        encoded = pc.binary_join_element_wise(
            pa.scalar(b"\x01", pa.binary()), encoded, pa.scalar(b"", pa.binary())
        )
    elif not array.null_count:
        return _fixed(encoded)
    else:
        encoded = _fixed(encoded).cast(pa.binary())
    return _with_nulls(encoded, array, b"") if array.null_count else encoded


def _with_length(array: pa.Array) -> tuple[pa.Array, pa.Array]:
    """For a key of several columns: each value's length, and its bytes."""
    encoded = ordered_bytes(array.drop_null() if array.null_count else array)
    encoded = encoded if isinstance(encoded, pa.Array) else _fixed(encoded).cast(pa.binary())
    lengths = pc.binary_length(encoded).to_numpy(zero_copy_only=False)
    prefix = _fixed(lengths.astype(">u4").view(np.uint8).reshape(-1, 4)).cast(pa.binary())
    if not array.null_count:
        return prefix, encoded
    return _with_nulls(prefix, array, _NULL_LENGTH), _with_nulls(encoded, array, b"")


def _with_nulls(encoded: pa.Array, array: pa.Array, null: bytes) -> pa.Array:
    """Bytes of the values that are there, spread over the rows, with `null` for the others."""
    return pc.replace_with_mask(
        pa.array([null], pa.binary()).take(pa.array(np.zeros(len(array), np.int32))),
        array.is_valid(),
        encoded,
    )


def _lengths(part: Bytes) -> Bytes:
    return np.broadcast_to(
        np.frombuffer(part.shape[1].to_bytes(4, "big"), np.uint8), (len(part), 4)
    )


def _fixed(matrix: Bytes) -> pa.Array:
    data = np.ascontiguousarray(matrix)
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(matrix.shape[1]), len(matrix), [None, pa.py_buffer(data)]
    )


def _matrix(words: npt.NDArray[np.unsignedinteger]) -> Bytes:
    """Unsigned integers as big-endian bytes."""
    return (
        words.astype(words.dtype.newbyteorder(">"))
        .view(np.uint8)
        .reshape(len(words), words.dtype.itemsize)
    )


def _ordered_integers(array: pa.Array) -> Bytes:
    width = array.type.bit_width // 8
    values = fixed_width(array, f"<u{width}")
    return _matrix(
        values
        if pa.types.is_unsigned_integer(array.type)
        else values ^ values.dtype.type(1 << (8 * width - 1))
    )


def _plain_floats(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """With one zero and one NaN."""
    plain = values + values.dtype.type(0)
    plain[np.isnan(plain)] = np.nan
    return plain


def _ordered_floats(values: npt.NDArray[np.floating]) -> Bytes:
    width = values.dtype.itemsize
    bits = _plain_floats(values).view(f"u{width}")
    top = bits.dtype.type(1 << (8 * width - 1))
    return _matrix(np.where(bits & top, ~bits, bits | top))


def _ordered_decimals(array: pa.Array) -> Bytes:
    words = fixed_width(array, "<u8").reshape(-1, 2)
    big = np.empty((len(array), 2), ">u8")
    big[:, 0], big[:, 1] = words[:, 1] ^ np.uint64(1 << 63), words[:, 0]
    return big.view(np.uint8).reshape(len(array), 16)


# From a key's bytes back to its values: the other way round of `keys.encode_keys`, for kernels that
# find keys in their state and tell rows of them.


_NULL_LENGTH_NUMBER = 0xFFFFFFFF
Data = npt.NDArray[np.uint8]


def decode_keys(keys: pa.Array, fields: Sequence[pa.Field]) -> list[pa.Array]:
    """The columns whose key bytes these are, each value in the one spelling that a key has."""
    if not fields:
        return []
    data, starts, lengths = _laid_out(keys)
    if len(fields) == 1:
        return [_decode_single(data, starts, lengths, fields[0].type)]
    columns = []
    for field in fields:
        sizes = data[runs(starts, np.full(len(starts), 4))].view(">u4").astype(np.int64)
        there = sizes != _NULL_LENGTH_NUMBER
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
    data = (
        np.frombuffer(keys.buffers()[2], np.uint8)
        if len(keys) and keys.buffers()[2] is not None
        else np.zeros(0, np.uint8)
    )
    return data, offsets[:-1], np.diff(offsets)


def _decode_single(data: Data, starts: Ints, lengths: Ints, kind: pa.DataType) -> pa.Array:
    """Alone in a key a null is nothing, and what varies in length has a byte before it."""
    there = lengths > 0
    before = 0 if _width(kind) is not None else 1
    return _values(data, starts + before, np.where(there, lengths - before, 0), there, kind)


def _values(data: Data, starts: Ints, sizes: Ints, there: Mask, kind: pa.DataType) -> pa.Array:
    width = _width(kind)
    if width is None:
        return _varying(data[runs(starts, sizes)], sizes, there, kind)
    values = _decode_fixed(_cut(data, starts[there], width), kind)
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
    return (
        kind.bit_width // 8 if pa.types.is_primitive(kind) or pa.types.is_decimal128(kind) else None
    )


def _varying(data: Data, sizes: Ints, there: Mask, kind: pa.DataType) -> pa.Array:
    offsets = np.append(0, np.cumsum(sizes))
    plain = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    if not there.all():
        plain = plain.take(pa.array(np.arange(len(sizes)), mask=~there))
    return plain.cast(pa.binary()).cast(kind)


def _decode_fixed(big: Data, kind: pa.DataType) -> pa.Array:
    """Values of a fixed width from their bytes in order."""
    if pa.types.is_boolean(kind):
        return pa.array(big[:, 0] != 0)
    width = big.shape[1]
    if pa.types.is_decimal128(kind):
        words = np.ascontiguousarray(big).view(">u8").reshape(-1, 2).astype("<u8")
        little = np.stack([words[:, 1], words[:, 0] ^ np.uint64(1 << 63)], axis=1)
        return pa.Array.from_buffers(
            kind, len(big), [None, pa.py_buffer(np.ascontiguousarray(little))]
        )
    bits = np.ascontiguousarray(big).view(f">u{width}").reshape(-1).astype(f"<u{width}")
    if not pa.types.is_unsigned_integer(kind):
        bits = _signed(bits, floating=pa.types.is_floating(kind))
    return pa.Array.from_buffers(kind, len(bits), [None, pa.py_buffer(bits)])


def _signed(
    bits: npt.NDArray[np.unsignedinteger], *, floating: bool
) -> npt.NDArray[np.unsignedinteger]:
    top = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(bits & top, bits ^ top, ~bits) if floating else bits ^ top
