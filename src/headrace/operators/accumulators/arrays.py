"""Between Arrow's columns and the plain arrays that accumulators compute with. Nulls come as zeros; masks say which they are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.operators.accumulators.wide import Wide
from headrace.operators.buffers import Ints, Mask, fixed_width

Doubles = npt.NDArray[np.float64]


def valid_mask(array: pa.Array) -> Mask | None:
    """Which values are not null; None if all are."""
    return array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None


def integers(array: pa.Array) -> Ints:
    """Integers, dates, times and intervals as 64-bit integers."""
    width = array.type.bit_width // 8
    letter = "u" if pa.types.is_unsigned_integer(array.type) else "i"
    values = fixed_width(array, f"<{letter}{width}")
    valid = valid_mask(array)
    return values.astype(np.int64, copy=False) if valid is None else np.where(valid, values, 0).astype(np.int64, copy=False)


def doubles(array: pa.Array) -> Doubles:
    """Numbers as doubles. Decimals and large integers are rounded to the nearest."""
    if not pa.types.is_float64(array.type):
        array = array.cast(pa.float64(), safe=False)
    values: Doubles = array.fill_null(0.0).to_numpy(zero_copy_only=False)
    return values


def decimal_words(array: pa.Array) -> Wide:
    words = fixed_width(array, "<u8").reshape(-1, 2)
    valid = valid_mask(array)
    if valid is not None:
        words = np.where(valid[:, None], words, np.uint64(0))
    return words[:, 0].copy(), words[:, 1].copy()


def integer_array(values: Ints, some: Mask, type: pa.DataType) -> pa.Array:
    """Integers, or a type that Arrow keeps as integers; null where there is none."""
    plain = pa.array(values, pa.int64(), mask=None if some.all() else ~some)
    return plain if type == pa.int64() else plain.cast(type)


def double_array(values: Doubles, some: Mask) -> pa.Array:
    return pa.array(values, pa.float64(), mask=None if some.all() else ~some)


def decimal_array(wide: Wide, some: Mask, type: pa.DataType) -> pa.Array:
    data = np.where(some[:, None], np.stack(wide[:2], axis=1), np.uint64(0))
    bitmap = None if some.all() else pa.py_buffer(np.packbits(some, bitorder="little"))
    return pa.Array.from_buffers(type, len(some), [bitmap, pa.py_buffer(np.ascontiguousarray(data))])
