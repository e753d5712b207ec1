"""An order of rows as bytes: by some columns, each up or down, and by the row's key where those are equal. Nulls come last either way.

| what | bytes |
|---|---|
| a value | 0, then its bytes as keys have them (`keys`); STRING and BINARY with 0, 255 for each 0 in them, and 0, 0 behind them |
| downwards | 0, then the same with every bit flipped |
| null | 1 |
| the row's key | as keys have it |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.operators.joins.piles import WIDE, Numbers, joined, pieces
from headrace.operators.keys import encode_keys, ordered_bytes, whole
from headrace.operators.row_codec import cut_out

Order = tuple[str, bool]
"""A column, and whether its largest values come first."""


def order_bytes(rows: pa.Table, by: Sequence[Order], key: Sequence[str]) -> pa.Array:
    """The bytes of each row, in the rows' order; different for rows with different keys."""
    columns = [part for column, down in by for part in _column(whole(rows.column(column)), down)]
    return joined([*columns, encode_keys(rows, key).cast(pa.binary()).cast(pa.large_binary())])


def beginnings(ordered: pa.Array) -> Numbers:
    """The first bytes of each, which have the same order as far as they go; for a pile."""
    padded = joined([ordered, pa.scalar(bytes(WIDE), pa.large_binary())])
    if not len(padded):
        return np.zeros(0, f"S{WIDE}")
    offsets = np.frombuffer(padded.buffers()[1], np.int64, count=len(padded) + 1, offset=padded.offset * 8)
    first = np.lib.stride_tricks.sliding_window_view(np.frombuffer(padded.buffers()[2], np.uint8), WIDE)[offsets[:-1]]
    return np.ascontiguousarray(first).view(f"S{WIDE}").reshape(-1)


def _column(array: pa.Array, down: bool) -> list[pa.Array]:
    """A column's marks and bytes, side by side for all rows."""
    there = array.is_valid().to_numpy(zero_copy_only=False)
    marks = pieces((~there).astype(np.uint8), np.arange(len(array) + 1))
    encoded = _encoded(array.drop_null())
    if down:
        encoded = _flipped(encoded)
    if not there.all():
        spread = pa.array(np.cumsum(there) - 1, mask=~there)
        encoded = encoded.take(spread).fill_null(b"")
    return [marks, encoded]


def _encoded(array: pa.Array) -> pa.Array:
    """Bytes in the order of the values, none of which is the beginning of another."""
    encoded = ordered_bytes(array)
    if not isinstance(encoded, pa.Array):
        return pieces(np.ascontiguousarray(encoded).reshape(-1), np.arange(len(encoded) + 1) * encoded.shape[1])
    escaped = pc.replace_substring(encoded, pattern=b"\x00", replacement=b"\x00\xff")
    return joined([escaped.cast(pa.large_binary()), pa.scalar(b"\x00\x00", pa.large_binary())])


def _flipped(encoded: pa.Array) -> pa.Array:
    if not len(encoded):
        return encoded
    offsets = np.frombuffer(encoded.buffers()[1], np.int64, count=len(encoded) + 1, offset=encoded.offset * 8)
    data = np.frombuffer(encoded.buffers()[2], np.uint8)
    return cut_out(~data, offsets[:-1], np.diff(offsets))
