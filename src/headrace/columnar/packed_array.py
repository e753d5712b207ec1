"""Integer columns in as few bytes as they need: each value is stored as its difference from the
column's lowest value, in 0, 1, 2, 4 or 8 bytes. Sliding windows store their points so, a sixth of
the plain size: their times are close together and their states are small numbers.

An entry is a layout followed by its rows:

- 9 bytes for each column: its width (1 byte) and its lowest value (8 bytes, little-endian)
- the rows, one after the other: each column's difference in its width, little-endian
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.buffers import Ints

NumberColumn = npt.NDArray[Any]
_WIDTHS = (0, 1, 2, 4, 8)
_LAYOUT = np.dtype([("width", "u1"), ("lowest", "<u8")])
LAYOUT_BYTES: int = _LAYOUT.itemsize


@dataclass(frozen=True)
class PackedLayout:
    """The layout of packed rows: for each column its width in bytes and its lowest value, as
    unsigned 64-bit integers.
    """

    widths: tuple[int, ...]
    lowest: tuple[int, ...]

    @staticmethod
    def of(columns: Sequence[NumberColumn]) -> PackedLayout:
        """The narrowest layout. The first column has at least one byte, so that the number of rows
        follows from the number of bytes.
        """
        ranges = [
            (int(column.min()), int(column.max())) if len(column) else (0, 0)
            for column in map(_as_integers, columns)
        ]
        widths = [_width(high - low) for low, high in ranges]
        return PackedLayout(
            (max(widths[0], 1), *widths[1:]), tuple(low % 2**64 for low, _ in ranges)
        )

    def to_bytes(self) -> bytes:
        return np.array(list(zip(self.widths, self.lowest, strict=True)), _LAYOUT).tobytes()

    def pack(self, columns: Sequence[NumberColumn]) -> npt.NDArray[np.void]:
        rows = np.empty(len(columns[0]), row_dtype(self.widths))
        for at, (column, width, lowest) in enumerate(
            zip(columns, self.widths, self.lowest, strict=True)
        ):
            if width:
                rows[str(at)] = _as_integers(column).view(np.uint64) - np.uint64(lowest)
        return rows


@dataclass(frozen=True)
class LayoutGroup:
    """The indices of entries whose layouts have the same widths. `lowest` has one row per entry, or
    a single row if it is the same for all.
    """

    entries: Ints
    widths: tuple[int, ...]
    lowest: npt.NDArray[np.uint64]

    def unpack(
        self, rows: npt.NDArray[np.void], counts: Ints, kinds: Sequence[np.dtype[Any]]
    ) -> list[NumberColumn]:
        """The columns of the rows of all entries; `counts` is the number of rows of each entry."""
        of_rows = self.lowest if len(self.lowest) == 1 else np.repeat(self.lowest, counts, axis=0)
        columns = []
        for at, kind in enumerate(kinds):
            lowest = of_rows[:, at]
            values = (
                rows[str(at)].astype(np.uint64) + lowest
                if self.widths[at]
                else np.broadcast_to(lowest, len(rows)).copy()
            )
            columns.append(
                values.view(kind) if kind.itemsize == values.itemsize else values.astype(kind)
            )
        return columns


def group_by_widths(layouts: npt.NDArray[np.uint8]) -> list[LayoutGroup]:
    """Group entries by the widths of their layouts, given as one row of layout bytes per entry.
    There are as many layouts as there were writes, but few different widths.
    """
    fields = np.ascontiguousarray(layouts).view(_LAYOUT)
    widths, lowest = np.ascontiguousarray(fields["width"]), np.ascontiguousarray(fields["lowest"])
    distinct = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(widths.shape[1]), len(widths), [None, pa.py_buffer(widths)]
    ).dictionary_encode()
    group_of = distinct.indices.to_numpy()
    groups = []
    for number, group_widths in enumerate(distinct.dictionary.to_pylist()):
        entries = np.flatnonzero(group_of == number)
        bases = lowest[entries]
        if (bases == bases[0]).all():
            bases = bases[:1]
        groups.append(LayoutGroup(entries, tuple(group_widths), bases))
    return groups


def row_dtype(widths: Sequence[int]) -> np.dtype[np.void]:
    """The numpy type of one packed row. A column of width 0 is not part of it."""
    return np.dtype([(str(at), f"<u{width}") for at, width in enumerate(widths) if width])


def _as_integers(column: NumberColumn) -> NumberColumn:
    """A column as 64-bit integers, signed if it is signed; floats by their bits."""
    if column.dtype.itemsize < np.uint64().itemsize:
        return column.astype(np.uint64)
    contiguous = np.ascontiguousarray(column)
    return contiguous.view(np.uint64) if contiguous.dtype.kind == "f" else contiguous


def _width(span: int) -> int:
    needed = (span.bit_length() + 7) // 8
    return next(width for width in _WIDTHS if width >= needed)
