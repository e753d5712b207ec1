"""Columns of numbers in as few bytes as they need: each as what its values are above the lowest, in
0, 1, 2, 4 or 8 bytes. For points of windows, whose times lie close together and whose states are
small numbers, that is a sixth.

| bytes | what |
|---|---|
| 9 for each column | the form: width, lowest |
| … | the rows, one behind the other: each column's number in its width, little-endian |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.buffers import Ints

Column = npt.NDArray[Any]
_WIDTHS = (0, 1, 2, 4, 8)
_FORM = np.dtype([("width", "u1"), ("lowest", "<u8")])
FORM_BYTES: int = _FORM.itemsize


@dataclass(frozen=True)
class Form:
    """How rows are laid out: for each column its width and its lowest number, as whole numbers of
    64 bits.
    """

    widths: tuple[int, ...]
    lowest: tuple[int, ...]

    @staticmethod
    def of(columns: Sequence[Column]) -> Form:
        """The narrowest; the first column has at least a byte, so that bytes tell how many rows
        there are.
        """
        ranges = [
            (int(column.min()), int(column.max())) if len(column) else (0, 0)
            for column in map(_as_whole, columns)
        ]
        widths = [_width(high - low) for low, high in ranges]
        return Form((max(widths[0], 1), *widths[1:]), tuple(low % 2**64 for low, _ in ranges))

    def to_bytes(self) -> bytes:
        return np.array(list(zip(self.widths, self.lowest, strict=True)), _FORM).tobytes()

    def packed(self, columns: Sequence[Column]) -> npt.NDArray[np.void]:
        rows = np.empty(len(columns[0]), row_type(self.widths))
        for at, (column, width, lowest) in enumerate(
            zip(columns, self.widths, self.lowest, strict=True)
        ):
            if width:
                rows[str(at)] = _as_whole(column).view(np.uint64) - np.uint64(lowest)
        return rows


@dataclass(frozen=True)
class Alike:
    """Entries of the same widths, by their places; `lowest` has a row for each, or one for all."""

    which: Ints
    widths: tuple[int, ...]
    lowest: npt.NDArray[np.uint64]

    def unpacked(
        self, rows: npt.NDArray[np.void], counts: Ints, kinds: Sequence[np.dtype[Any]]
    ) -> list[Column]:
        """The columns of these entries' rows, of which each has so many."""
        of_rows = self.lowest if len(self.lowest) == 1 else np.repeat(self.lowest, counts, axis=0)
        return [self._column(rows, at, of_rows[:, at], kind) for at, kind in enumerate(kinds)]

    def _column(
        self,
        rows: npt.NDArray[np.void],
        at: int,
        lowest: npt.NDArray[np.uint64],
        kind: np.dtype[Any],
    ) -> Column:
        whole = (
            rows[str(at)].astype(np.uint64) + lowest
            if self.widths[at]
            else np.broadcast_to(lowest, len(rows)).copy()
        )
        return whole.view(kind) if kind.itemsize == whole.itemsize else whole.astype(kind)


def by_widths(raw: npt.NDArray[np.uint8]) -> list[Alike]:
    """Entries' forms, one behind the other in each row: there are as many as were written at
    different times, but few differ in their widths.
    """
    forms = np.ascontiguousarray(raw).view(_FORM)
    widths, lowest = np.ascontiguousarray(forms["width"]), np.ascontiguousarray(forms["lowest"])
    different = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(widths.shape[1]), len(widths), [None, pa.py_buffer(widths)]
    ).dictionary_encode()
    of = different.indices.to_numpy()
    return [
        _alike(np.flatnonzero(of == number), tuple(each), lowest)
        for number, each in enumerate(different.dictionary.to_pylist())
    ]


def _alike(which: Ints, widths: tuple[int, ...], lowest: npt.NDArray[np.uint64]) -> Alike:
    mine = lowest[which]
    return Alike(which, widths, mine[:1] if (mine == mine[0]).all() else mine)


def row_type(widths: Sequence[int]) -> np.dtype[np.void]:
    """One row; a column without bytes is not in it."""
    return np.dtype([(str(at), f"<u{width}") for at, width in enumerate(widths) if width])


def _as_whole(column: Column) -> Column:
    """Numbers of 64 bits, those with a sign with it; what is no whole number by its bits."""
    if column.dtype.itemsize < np.uint64().itemsize:
        return column.astype(np.uint64)
    plain = np.ascontiguousarray(column)
    return plain.view(np.uint64) if plain.dtype.kind == "f" else plain


def _width(span: int) -> int:
    needed = (span.bit_length() + 7) // 8
    return next(width for width in _WIDTHS if width >= needed)
