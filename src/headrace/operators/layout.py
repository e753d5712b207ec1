"""How a key's state is laid out in bytes: a version, the number of rows, each accumulator's fields, and behind them what has no fixed width.

| bytes | what |
|---|---|
| 1 | version, 1; a state of zeros stands for a key that is not there |
| 8 | rows of the group |
| … | the fields of each accumulator, little-endian, without gaps |
| … | the tails of the accumulators that have one, in the same order; their lengths follow from the fields |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.errors import NewerFormat
from headrace.operators.accumulators.accumulator import Accumulator, Columns, Tails
from headrace.operators.buffers import Ints, Mask, offsets_of

VERSION = 1
Heads = npt.NDArray[np.void]


class Layout:
    """The states of many keys, from bytes to columns and back."""

    def __init__(self, accumulators: Sequence[Accumulator]) -> None:
        self.accumulators = accumulators
        fields = [("version", "u1"), ("rows", "<i8")]
        for at, accumulator in enumerate(accumulators):
            fields += [(f"{at}.{name}", kind) for name, kind in accumulator.fields]
        self.dtype = np.dtype(fields)
        self._nothing = bytes(self.dtype.itemsize)

    def unpacked(self, values: Sequence[bytes | None]) -> tuple[Ints, list[tuple[Columns, Tails | None]]]:
        """The number of rows of each key (0 for a new one), and each accumulator's part."""
        there = [self._nothing if value is None else value for value in values]
        size = self.dtype.itemsize
        joined = b"".join(there)
        if len(joined) != size * len(there):
            joined = b"".join([value[:size] for value in there])
        heads = np.frombuffer(joined, self.dtype)
        self._check(heads)
        parts: list[tuple[Columns, Tails | None]] = []
        at = np.full(len(there), size)
        for number, accumulator in enumerate(self.accumulators):
            columns = self._columns(heads, number, accumulator)
            sizes = accumulator.tail_sizes(columns)
            parts.append((columns, None if sizes is None else _slices(there, at, sizes)))
            at = at if sizes is None else at + sizes
        return np.ascontiguousarray(heads["rows"]), parts

    def unpacked_array(self, values: pa.Array) -> tuple[Ints, list[tuple[Columns, Tails | None]]]:
        """The same from a column of states, none null; without a copy where none has a tail."""
        size = self.dtype.itemsize
        offsets = offsets_of(values)
        if not (np.diff(offsets) == size).all():
            return self.unpacked(values.to_pylist())
        heads = np.frombuffer(values.buffers()[2], self.dtype, count=len(values), offset=int(offsets[0]))
        self._check(heads)
        parts: list[tuple[Columns, Tails | None]] = [(self._columns(heads, number, each), None) for number, each in enumerate(self.accumulators)]
        return np.ascontiguousarray(heads["rows"]), parts

    def packed_array(self, rows: Ints, parts: Sequence[tuple[Columns, Tails | None]]) -> pa.Array:
        """The states as a column."""
        if any(tails is not None for _, tails in parts):
            return pa.array(self.packed(rows, parts), pa.binary())
        heads = self.heads(rows, [columns for columns, _ in parts])
        offsets = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(self.dtype.itemsize)
        return pa.BinaryArray.from_buffers(pa.binary(), len(rows), [None, pa.py_buffer(offsets), pa.py_buffer(heads.view(np.uint8))])

    def packed(self, rows: Ints, parts: Sequence[tuple[Columns, Tails | None]]) -> list[bytes]:
        """The bytes of each key's state."""
        heads = self.heads(rows, [columns for columns, _ in parts])
        values: list[bytes] = heads.view(f"V{self.dtype.itemsize}").tolist()
        tails = [tails for _, tails in parts if tails is not None]
        return list(map(b"".join, zip(values, *tails, strict=True))) if tails else values

    def heads(self, rows: Ints, parts: Sequence[Columns]) -> Heads:
        heads = np.empty(len(rows), self.dtype)
        heads["version"], heads["rows"] = VERSION, rows
        for number, (accumulator, columns) in enumerate(zip(self.accumulators, parts, strict=True)):
            for (name, _), column in zip(accumulator.fields, columns, strict=True):
                heads[f"{number}.{name}"] = column
        return heads

    def _check(self, heads: Heads) -> None:
        if len(heads) and int(newest := heads["version"].max()) > VERSION:
            raise NewerFormat(f"A state has version {newest}, and this Headrace knows up to {VERSION}.", fix="run the newer Headrace that wrote it.")

    @staticmethod
    def _columns(heads: Heads, number: int, accumulator: Accumulator) -> Columns:
        return tuple(np.ascontiguousarray(heads[f"{number}.{name}"]) for name, _ in accumulator.fields)


def _slices(values: Sequence[bytes], starts: Ints, sizes: Ints) -> list[bytes]:
    return [value[start:stop] for value, start, stop in zip(values, starts.tolist(), (starts + sizes).tolist(), strict=True)]


def kept(values: list[bytes], rows: Ints) -> list[bytes | None]:
    """A group without rows is deleted."""
    stays: Mask = rows != 0
    return list(values) if stays.all() else [value if stay else None for value, stay in zip(values, stays.tolist(), strict=True)]
