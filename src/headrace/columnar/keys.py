"""A row's key as bytes, and back. State is stored under these bytes, results are ordered by them,
and their hash chooses a row's key group.

Equal keys have equal bytes and different keys have different bytes, whatever else is in the batch.
A key of one column keeps the order of its values (null first); in a key of several columns each
value is prefixed by its length, so that no two keys coincide. The bytes of a value, by type:

- integers, dates, times, intervals: big-endian, sign bit flipped
- FLOAT, DOUBLE: big-endian, in order; -0.0 equals 0.0, and every NaN is one NaN, the largest value
- DECIMAL: 16 bytes, big-endian, sign bit flipped
- BOOLEAN: one byte
- STRING, BINARY: unchanged; prefixed by the byte 1 in a key of one column
- null: no bytes in a key of one column, the length 0xFFFFFFFF in a key of several
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import (
    Ints,
    Mask,
    byte_width,
    expand_ranges,
    fixed_width_values,
    offsets_of,
)
from headrace.columnar.murmur2 import murmur2_array
from headrace.errors import InputError, UnknownColumn

KEY_GROUPS = 128
_NULL_LENGTH = 0xFFFFFFFF
Bytes = npt.NDArray[np.uint8]


def key_groups(keys: pa.Array) -> npt.NDArray[np.uint8]:
    """The key group of each key: the index of the one of 128 parts of the state that holds it."""
    return (murmur2_array(keys) & np.uint32(KEY_GROUPS - 1)).astype(np.uint8)


def encode_keys(rows: pa.Table | pa.RecordBatch, columns: Sequence[str]) -> pa.Array:
    """The key bytes of each row: fixed-size binary if no column varies in length and no value is
    null, otherwise binary.
    """
    if not columns:
        return _fixed(np.zeros((rows.num_rows, 1), np.uint8))
    if missing := [name for name in columns if name not in rows.schema.names]:
        raise UnknownColumn(missing[0], rows.schema.names, where="The input")
    arrays = [as_array(rows.column(name)) for name in columns]
    if len(arrays) == 1:
        (array,) = arrays
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
    matrices = [
        matrix
        for array in arrays
        if not array.null_count and not isinstance(matrix := ordered_bytes(array), pa.Array)
    ]
    if len(matrices) == len(arrays):
        return _fixed(
            np.hstack([part for matrix in matrices for part in (_lengths(matrix), matrix)])
        )
    pieces = [piece for array in arrays for piece in _with_length(array)]
    return pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.binary()))


def key_list(keys: pa.Array) -> list[bytes]:
    """Key bytes as Python objects, for the state."""
    if not pa.types.is_fixed_size_binary(keys.type):
        varying: list[bytes] = keys.to_pylist()
        return varying
    fixed: list[bytes] = fixed_width_values(keys, f"V{keys.type.byte_width}").tolist()
    return fixed


def as_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one array: the chunks of a chunked column are combined."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def canonicalize(array: pa.Array) -> pa.Array:
    """A key column with one representation for each value: 0.0 for both zeros, one NaN for all."""
    if not pa.types.is_floating(array.type):
        return array
    values = _canonical_floats(array.fill_null(0).to_numpy(zero_copy_only=False))
    return pa.array(
        values,
        array.type,
        mask=array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None,
    )


def ordered_bytes(array: pa.Array) -> Bytes | pa.Array:
    """The bytes of a column without nulls, ordered as its values are: a matrix with one row per
    value, or a binary array where lengths vary.
    """
    kind = array.type
    if pa.types.is_boolean(kind):
        return array.to_numpy(zero_copy_only=False).astype(np.uint8).reshape(-1, 1)
    if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        width = kind.bit_width // 8
        values = fixed_width_values(array, f"<u{width}")
        return _matrix(
            values
            if pa.types.is_unsigned_integer(kind)
            else values ^ values.dtype.type(1 << (8 * width - 1))
        )
    if pa.types.is_floating(kind):
        values = array.to_numpy(zero_copy_only=False)
        width = values.dtype.itemsize
        bits = _canonical_floats(values).view(f"u{width}")
        top = bits.dtype.type(1 << (8 * width - 1))
        return _matrix(np.where(bits & top, ~bits, bits | top))
    if pa.types.is_decimal128(kind):
        words = fixed_width_values(array, "<u8").reshape(-1, 2)
        big = np.empty((len(array), 2), ">u8")
        big[:, 0], big[:, 1] = words[:, 1] ^ np.uint64(1 << 63), words[:, 0]
        return big.view(np.uint8).reshape(len(array), 16)
    if (
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    ):
        return array.cast(pa.binary())
    raise InputError(
        f"A column of type {kind} cannot be part of a key.",
        fix="key by columns of plain types; extract fields of nested columns with select.",
    )


def _with_length(array: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The length and the bytes of each value, for a key of several columns."""
    encoded = ordered_bytes(array.drop_null() if array.null_count else array)
    encoded = encoded if isinstance(encoded, pa.Array) else _fixed(encoded).cast(pa.binary())
    lengths = pc.binary_length(encoded).to_numpy(zero_copy_only=False)
    prefix = _fixed(lengths.astype(">u4").view(np.uint8).reshape(-1, 4)).cast(pa.binary())
    if not array.null_count:
        return prefix, encoded
    null_prefix = _NULL_LENGTH.to_bytes(4, "big")
    return _with_nulls(prefix, array, null_prefix), _with_nulls(encoded, array, b"")


def _with_nulls(encoded: pa.Array, array: pa.Array, null: bytes) -> pa.Array:
    """The bytes of the non-null values at their rows, and the bytes `null` at the others."""
    return pc.replace_with_mask(
        pa.array([null], pa.binary()).take(pa.array(np.zeros(len(array), np.int32))),
        array.is_valid(),
        encoded,
    )


def _lengths(matrix: Bytes) -> Bytes:
    return np.broadcast_to(
        np.frombuffer(matrix.shape[1].to_bytes(4, "big"), np.uint8), (len(matrix), 4)
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


def _canonical_floats(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Floats with one zero (-0.0 becomes 0.0) and one NaN."""
    canonical = values + values.dtype.type(0)
    canonical[np.isnan(canonical)] = np.nan
    return canonical


# Decoding


def decode_keys(keys: pa.Array, fields: Sequence[pa.Field]) -> list[pa.Array]:
    """The inverse of `encode_keys`: the key columns, each value in its canonical form."""
    if not fields:
        return []
    data, starts, lengths = _layout(keys)
    if len(fields) == 1:
        return [_decode_single(data, starts, lengths, fields[0].type)]
    columns = []
    for field in fields:
        sizes = data[expand_ranges(starts, np.full(len(starts), 4))].view(">u4").astype(np.int64)
        is_present = sizes != _NULL_LENGTH
        sizes = np.where(is_present, sizes, 0)
        columns.append(_decode_values(data, starts + 4, sizes, is_present, field.type))
        starts = starts + 4 + sizes
    return columns


def _layout(keys: pa.Array) -> tuple[Bytes, Ints, Ints]:
    """All bytes, and the start and length of each key in them."""
    if pa.types.is_fixed_size_binary(keys.type):
        width = keys.type.byte_width
        return (
            fixed_width_values(keys, np.uint8),
            np.arange(len(keys)) * width,
            np.full(len(keys), width),
        )
    offsets = offsets_of(keys)
    data = (
        np.frombuffer(keys.buffers()[2], np.uint8)
        if len(keys) and keys.buffers()[2] is not None
        else np.zeros(0, np.uint8)
    )
    return data, offsets[:-1], np.diff(offsets)


def _decode_single(data: Bytes, starts: Ints, lengths: Ints, kind: pa.DataType) -> pa.Array:
    """Decode keys of one column: a null has no bytes, and a value that varies in length is prefixed
    by one byte.
    """
    is_present = lengths > 0
    prefix = 0 if byte_width(kind) is not None else 1
    sizes = np.where(is_present, lengths - prefix, 0)
    return _decode_values(data, starts + prefix, sizes, is_present, kind)


def _decode_values(
    data: Bytes, starts: Ints, sizes: Ints, is_present: Mask, kind: pa.DataType
) -> pa.Array:
    width = byte_width(kind)
    if width is not None:
        values = _decode_fixed(_gather(data, starts[is_present], width), kind)
        if is_present.all():
            return values
        return values.take(pa.array(np.cumsum(is_present) - 1, mask=~is_present))
    offsets = np.append(0, np.cumsum(sizes))
    content = data[expand_ranges(starts, sizes)]
    binary = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    )
    if not is_present.all():
        binary = binary.take(pa.array(np.arange(len(sizes)), mask=~is_present))
    return binary.cast(pa.binary()).cast(kind)


def _gather(data: Bytes, starts: Ints, width: int) -> Bytes:
    """`width` bytes from each start. No copy if the values are adjacent, as they mostly are."""
    if len(starts) and (np.diff(starts) == width).all():
        return data[starts[0] : starts[-1] + width].reshape(-1, width)
    return data[expand_ranges(starts, np.full(len(starts), width))].reshape(-1, width)


def _decode_fixed(big: Bytes, kind: pa.DataType) -> pa.Array:
    """The values of a fixed-width type from their ordered, big-endian bytes."""
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
        top = bits.dtype.type(1 << (8 * width - 1))
        bits = np.where(bits & top, bits ^ top, ~bits) if pa.types.is_floating(kind) else bits ^ top
    return pa.Array.from_buffers(kind, len(bits), [None, pa.py_buffer(bits)])
