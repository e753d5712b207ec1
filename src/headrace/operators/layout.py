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
import pyarrow.compute as pc

from headrace.errors import NewerFormat
from headrace.operators.accumulators.accumulator import Accumulator, Columns, Tails
from headrace.operators.buffers import Ints, Mask, as_binary, bytes_list, same_width

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
        """The number of rows of each key (0 for a new one, which is None), and each accumulator's part."""
        return self.unpacked_array(pa.array(values, pa.binary()))

    def unpacked_array(self, values: pa.Array) -> tuple[Ints, list[tuple[Columns, Tails | None]]]:
        """The same from a column of states; without a copy where all have the same width."""
        plain = same_width(values)
        if plain is not None and plain.dtype.itemsize == self.dtype.itemsize:
            return self._from_heads(plain.view(self.dtype), None)
        if values.null_count == len(values):
            return self._from_heads(np.zeros(len(values), self.dtype), None)
        known = same_width(values.drop_null())
        if known is not None and known.dtype.itemsize == self.dtype.itemsize:
            heads = np.zeros(len(values), self.dtype)
            heads[values.is_valid().to_numpy(zero_copy_only=False)] = known.view(self.dtype)
            return self._from_heads(heads, None)
        each = [self._nothing if value is None else value for value in values.to_pylist()]
        return self._from_heads(np.frombuffer(b"".join([value[: self.dtype.itemsize] for value in each]), self.dtype), each)

    def _from_heads(self, heads: Heads, values: list[bytes] | None) -> tuple[Ints, list[tuple[Columns, Tails | None]]]:
        """`values` are whole states, if some have tails."""
        self._check(heads)
        parts: list[tuple[Columns, Tails | None]] = []
        at = np.full(len(heads), self.dtype.itemsize)
        for number, accumulator in enumerate(self.accumulators):
            columns = self._columns(heads, number, accumulator)
            sizes = accumulator.tail_sizes(columns)
            tails = None if sizes is None else [b""] * len(heads) if values is None else _slices(values, at, sizes)
            parts.append((columns, tails))
            at = at if sizes is None else at + sizes
        return np.ascontiguousarray(heads["rows"]), parts

    def packed(self, rows: Ints, parts: Sequence[tuple[Columns, Tails | None]]) -> list[bytes]:
        """The bytes of each key's state."""
        values: list[bytes] = bytes_list(self.packed_array(rows, parts))  # type: ignore[assignment]  # none is null
        return values

    def packed_array(self, rows: Ints, parts: Sequence[tuple[Columns, Tails | None]]) -> pa.Array:
        """The states as a column."""
        heads = self.heads(rows, [columns for columns, _ in parts]).view(f"V{self.dtype.itemsize}")
        tails = [tails for _, tails in parts if tails is not None]
        return pa.array(map(b"".join, zip(heads.tolist(), *tails, strict=True)), pa.binary()) if tails else as_binary(heads)

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


def kept_array(values: pa.Array, rows: Ints) -> pa.Array:
    """The same of a column of states."""
    stays: Mask = rows != 0
    return values if stays.all() else pc.if_else(pa.array(stays), values, pa.scalar(None, values.type))
