"""Arrow buffers as numpy arrays without a copy, and tables split into batches of bounded size.

The row and key codecs, the kernels and the JSON codec read Arrow columns through these functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import ConfigurationError

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_MAX_COLUMN_BYTES = 2**31 - 1
MAX_BATCH_BYTES = 64 << 20


def fixed_width_values(array: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The values of a fixed-width column as they lie in memory. The value of a null is
    arbitrary.
    """
    item_bytes = np.dtype(dtype).itemsize
    value_bytes = array.type.bit_width // 8
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(
        array.buffers()[1],
        dtype,
        count=len(array) * value_bytes // item_bytes,
        offset=array.offset * value_bytes,
    )


def byte_width(kind: pa.DataType) -> int | None:
    """The number of bytes of each value of a type when it is stored; None if that varies."""
    if pa.types.is_boolean(kind):
        return 1
    return (
        kind.bit_width // 8 if pa.types.is_primitive(kind) or pa.types.is_decimal128(kind) else None
    )


def offsets_of(array: pa.Array) -> Ints:
    """The start offset of each element of a binary, string, list or map column, and the end of the
    last one.
    """
    if not len(array):
        return np.zeros(1, np.int64)
    offsets: Ints = np.frombuffer(
        array.buffers()[1], np.int32, count=len(array) + 1, offset=array.offset * 4
    ).astype(np.int64)
    return offsets


def equal_length_values(array: pa.Array) -> npt.NDArray[np.void] | None:
    """The values of a binary column as they lie in memory, if all have the same length and none is
    null or empty; otherwise None.
    """
    if array.null_count or not len(array):
        return None
    if pa.types.is_fixed_size_binary(array.type):
        return (
            fixed_width_values(array, f"V{array.type.byte_width}")
            if array.type.byte_width
            else None
        )
    offsets = offsets_of(array)
    width = int(offsets[1] - offsets[0])
    if not width or not (np.diff(offsets) == width).all():
        return None
    return np.frombuffer(array.buffers()[2], f"V{width}", count=len(array), offset=int(offsets[0]))


def as_binary(values: npt.NDArray[np.void]) -> pa.Array:
    """Values of equal length as a binary column, without a copy."""
    if values.nbytes > _MAX_COLUMN_BYTES:
        raise ConfigurationError(
            f"A batch reads {values.nbytes >> 20} MiB of one step's state at once; the limit"
            " is 2048 MiB.",
            fix="use more shards (--shards), or smaller batches.",
        )
    offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(values.dtype.itemsize)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(values.view(np.uint8))]
    )


def take_bytes(array: pa.Array, positions: Ints) -> pa.Array:
    """The values of a binary column at the given positions, as a binary column. Faster than Arrow's
    `take` where all values have the same length.
    """
    values = equal_length_values(array)
    return (
        array.take(pa.array(positions)).cast(pa.binary())
        if values is None
        else as_binary(values[positions])
    )


def bytes_list(array: pa.Array) -> list[bytes | None]:
    """The values of a binary column as Python objects."""
    values = equal_length_values(array)
    listed: list[bytes | None] = array.to_pylist() if values is None else values.tolist()
    return listed


def expand_ranges(starts: Ints, lengths: Ints) -> Ints:
    """The indices start, start + 1, …, start + length - 1 of each range, concatenated."""
    ends = np.cumsum(lengths)
    positions: Ints = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(
        starts - (ends - lengths), lengths
    )
    return positions


# Lists and maps, whatever slicing and nulls they have: elements without gaps, and their offsets


def compact_offsets(array: pa.Array) -> pa.Int32Array:
    """The offsets of each list or map into what `list_elements` or `map_entries` returns. A null
    list has no elements.
    """
    lengths = (
        np.diff(array.offsets.to_numpy())
        if pa.types.is_map(array.type)
        else pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    )
    if pa.types.is_map(array.type) and array.null_count:
        lengths = np.where(array.is_null().to_numpy(zero_copy_only=False), 0, lengths)
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def list_elements(array: pa.Array) -> pa.Array:
    """The elements of all lists, concatenated."""
    return array.flatten()


def map_entries(array: pa.MapArray) -> tuple[pa.Array, pa.Array]:
    """The keys and the values of all maps, concatenated."""
    if array.null_count:
        array = array.drop_null()  # a null map may still have entries in its buffers
    offsets = array.offsets
    start, stop = offsets[0].as_py(), offsets[-1].as_py()
    return array.keys.slice(start, stop - start), array.items.slice(start, stop - start)


# Batches of bounded size


def split_table(rows: pa.Table, max_bytes: int | None = None) -> Iterator[pa.RecordBatch]:
    """All rows of a table in order, in as few batches as the bound allows.

    A single row may exceed the bound; an empty table gives no batch. Every table that becomes
    record batches goes through here, because Arrow's 32-bit offsets limit a text column to 2 GiB.
    """
    if rows.num_rows > 1 and rows.nbytes > (MAX_BATCH_BYTES if max_bytes is None else max_bytes):
        middle = rows.num_rows // 2
        yield from split_table(rows.slice(0, middle), max_bytes)
        yield from split_table(rows.slice(middle), max_bytes)
    elif rows.num_rows:
        in_chunks = any(column.num_chunks > 1 for column in rows.columns)
        yield from (rows.combine_chunks() if in_chunks else rows).to_batches()
