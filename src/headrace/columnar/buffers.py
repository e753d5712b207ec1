"""Arrow's buffers as numpy's arrays, without a copy; and runs of positions in them."""

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
_MAX_BYTES_A_COLUMN = 2**31 - 1


def fixed_width(array: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The values of a fixed-width column as they lie in memory; those of nulls are any."""
    width = np.dtype(dtype).itemsize
    each = array.type.bit_width // 8
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(
        array.buffers()[1], dtype, count=len(array) * each // width, offset=array.offset * each
    )


def offsets_of(array: pa.Array) -> Ints:
    """Where each element of a binary, string, list or map column begins, and where the last
    ends.
    """
    if not len(array):
        return np.zeros(1, np.int64)
    offsets: Ints = np.frombuffer(
        array.buffers()[1], np.int32, count=len(array) + 1, offset=array.offset * 4
    ).astype(np.int64)
    return offsets


def same_width(array: pa.Array) -> npt.NDArray[np.void] | None:
    """The values of a binary column that are all of one length, none null and none empty, as they
    lie in memory; None if they are not.
    """
    if array.null_count or not len(array):
        return None
    if pa.types.is_fixed_size_binary(array.type):
        return fixed_width(array, f"V{array.type.byte_width}") if array.type.byte_width else None
    offsets = offsets_of(array)
    width = int(offsets[1] - offsets[0])
    if not width or not (np.diff(offsets) == width).all():
        return None
    return np.frombuffer(array.buffers()[2], f"V{width}", count=len(array), offset=int(offsets[0]))


def as_binary(values: npt.NDArray[np.void]) -> pa.Array:
    """Values of one length as a binary column, without a copy."""
    if values.nbytes > _MAX_BYTES_A_COLUMN:
        raise ConfigurationError(
            f"A batch touches {values.nbytes >> 20} MiB of one step's state at once; 2048 are the"
            " most.",
            fix="use more shards (--shards), or smaller batches.",
        )
    offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(values.dtype.itemsize)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(values.view(np.uint8))]
    )


def take_bytes(array: pa.Array, positions: Ints) -> pa.Array:
    """Some values of a binary column, as a binary column; quicker than Arrow's own where all have
    one length.
    """
    plain = same_width(array)
    return (
        array.take(pa.array(positions)).cast(pa.binary())
        if plain is None
        else as_binary(plain[positions])
    )


def bytes_list(array: pa.Array) -> list[bytes | None]:
    """The values of a binary column as Python has them."""
    plain = same_width(array)
    values: list[bytes | None] = array.to_pylist() if plain is None else plain.tolist()
    return values


def runs(starts: Ints, lengths: Ints) -> Ints:
    """The positions start, start + 1, … of each run, all in one sequence."""
    ends = np.cumsum(lengths)
    positions: Ints = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(
        starts - (ends - lengths), lengths
    )
    return positions


# The insides of Arrow's lists and maps, as they are whatever the slicing: elements without gaps,
# and the offsets that go with them.
#
# `json_text.py` and `row_arrays.py` take such columns apart with it and put them together again.


def compact_offsets(array: pa.Array) -> pa.Int32Array:
    """Where the elements of each list or map start, counted in `elements` or `entries`; a null has
    none.
    """
    lengths = (
        np.diff(array.offsets.to_numpy())
        if pa.types.is_map(array.type)
        else pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    )
    if pa.types.is_map(array.type) and array.null_count:
        lengths = np.where(array.is_null().to_numpy(zero_copy_only=False), 0, lengths)
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def elements(array: pa.Array) -> pa.Array:
    """The elements of all lists, one after the other."""
    return array.flatten()


def entries(array: pa.MapArray) -> tuple[pa.Array, pa.Array]:
    """The keys and the values of all maps, one after the other."""
    if array.null_count:
        array = array.drop_null()  # a null may have entries too, and they do not count
    offsets = array.offsets
    start, stop = offsets[0].as_py(), offsets[-1].as_py()
    return array.keys.slice(start, stop - start), array.items.slice(start, stop - start)


# Tables in pieces of bounded size: what Arrow counts in 32 bits, what Spark carries in one value
# and what a log writes in one go all have an end.
#
# Whoever turns a table into record batches takes them from here: a column of more than 2 GiB of
# text does not fit into one.


PIECE_BYTES = 64 << 20


def pieces(rows: pa.Table, max_bytes: int | None = None) -> Iterator[pa.RecordBatch]:
    """All rows in their order, as few batches as the bound allows; a single row may be larger. An
    empty table has none.
    """
    if rows.num_rows > 1 and rows.nbytes > (PIECE_BYTES if max_bytes is None else max_bytes):
        middle = rows.num_rows // 2
        yield from pieces(rows.slice(0, middle), max_bytes)
        yield from pieces(rows.slice(middle), max_bytes)
    elif rows.num_rows:
        in_chunks = any(column.num_chunks > 1 for column in rows.columns)
        yield from (rows.combine_chunks() if in_chunks else rows).to_batches()
