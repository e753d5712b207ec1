"""Arrow's buffers as numpy's arrays, without a copy; and runs of positions in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.errors import ConfigurationError

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_MOST_BYTES_A_COLUMN = 2**31 - 1


def fixed_width(array: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The values of a fixed-width column as they lie in memory; those of nulls are any."""
    width = np.dtype(dtype).itemsize
    each = array.type.bit_width // 8
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, count=len(array) * each // width, offset=array.offset * each)


def offsets_of(array: pa.Array) -> Ints:
    """Where each element of a binary, string, list or map column begins, and where the last ends."""
    if not len(array):
        return np.zeros(1, np.int64)
    offsets: Ints = np.frombuffer(array.buffers()[1], np.int32, count=len(array) + 1, offset=array.offset * 4).astype(np.int64)
    return offsets


def same_width(array: pa.Array) -> npt.NDArray[np.void] | None:
    """The values of a binary column that are all of one length, none null and none empty, as they lie in memory; None if they are not."""
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
    if values.nbytes > _MOST_BYTES_A_COLUMN:
        raise ConfigurationError(
            f"A batch touches {values.nbytes >> 20} MiB of one step's state at once; 2048 are the most.", fix="use more shards (--shards), or smaller batches."
        )
    offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(values.dtype.itemsize)
    return pa.BinaryArray.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(values.view(np.uint8))])


def take_bytes(array: pa.Array, positions: Ints) -> pa.Array:
    """Some values of a binary column, as a binary column; quicker than Arrow's own where all have one length."""
    plain = same_width(array)
    return array.take(pa.array(positions)).cast(pa.binary()) if plain is None else as_binary(plain[positions])


def bytes_list(array: pa.Array) -> list[bytes | None]:
    """The values of a binary column as Python has them."""
    plain = same_width(array)
    values: list[bytes | None] = array.to_pylist() if plain is None else plain.tolist()
    return values


def runs(starts: Ints, lengths: Ints) -> Ints:
    """The positions start, start + 1, … of each run, all in one sequence."""
    ends = np.cumsum(lengths)
    positions: Ints = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return positions
