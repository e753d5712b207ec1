"""Arrow's buffers as numpy's arrays, without a copy; and runs of positions in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


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


def runs(starts: Ints, lengths: Ints) -> Ints:
    """The positions start, start + 1, … of each run, all in one sequence."""
    ends = np.cumsum(lengths)
    positions: Ints = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return positions
