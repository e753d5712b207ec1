"""Values as numbers in the same order, and back: unsigned ones for types of up to 64 bits, places among the values at hand for all others.

NaN is the largest of all, and -0.0 comes before 0.0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.operators.accumulators.arrays import integers
from headrace.operators.buffers import Ints, Mask

Codes = npt.NDArray[np.uint64]
_TOP = np.uint64(1 << 63)


def has_order_in_64_bits(kind: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_temporal(kind))


def to_ordered(array: pa.Array) -> Codes:
    """The code of each value; of a null, any."""
    kind = array.type
    if pa.types.is_boolean(kind):
        truths: Codes = array.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint64)
        return truths
    if not pa.types.is_floating(kind):
        return integers(array).view(np.uint64) ^ _TOP
    values = array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float64)
    values[np.isnan(values)] = np.nan
    bits: Codes = values.view(np.uint64)
    return np.where(bits & _TOP, ~bits, bits | _TOP)


def from_ordered(codes: Codes, some: Mask, kind: pa.DataType) -> pa.Array:
    """The value of each code; null where there is none."""
    mask = None if some.all() else ~some
    if pa.types.is_boolean(kind):
        return pa.array(codes != 0, kind, mask=mask)
    if pa.types.is_floating(kind):
        bits = np.where(codes & _TOP, codes ^ _TOP, ~codes)
        with np.errstate(over="ignore", invalid="ignore"):
            return pa.array(bits.view(np.float64).astype(kind.to_pandas_dtype()), kind, mask=mask)
    values = (codes ^ _TOP).view(np.int64).copy()
    values[~some] = 0
    plain = pa.array(values.astype(f"i{kind.bit_width // 8}"), mask=mask)
    return plain if plain.type == kind else plain.view(kind)


def places(array: pa.Array) -> tuple[Ints, pa.Array]:
    """For each value (none null) its place among the distinct ones, and those in their order."""
    if has_order_in_64_bits(array.type):
        codes, found = np.unique(to_ordered(array), return_inverse=True)
        return found.astype(np.int64), from_ordered(codes, np.ones(len(codes), np.bool_), array.type)
    encoded = array.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place[encoded.indices.to_numpy()], encoded.dictionary.take(pa.array(order))
