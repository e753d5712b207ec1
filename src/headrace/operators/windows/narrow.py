"""Columns of numbers in as few bytes as they need: each as what its values are above the lowest, in 0, 1, 2, 4 or 8 bytes. For points of windows, whose times lie close together and
whose states are small numbers, that is a sixth.

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

Column = npt.NDArray[Any]
_WIDTHS = (0, 1, 2, 4, 8)
_FORM = np.dtype([("width", "u1"), ("lowest", "<u8")])
FORM_BYTES: int = _FORM.itemsize


@dataclass(frozen=True)
class Form:
    """How rows are laid out: for each column its width and its lowest number, as whole numbers of 64 bits."""

    widths: tuple[int, ...]
    lowest: tuple[int, ...]

    @staticmethod
    def of(columns: Sequence[Column]) -> Form:
        """The narrowest; the first column has at least a byte, so that bytes tell how many rows there are."""
        ranges = [(int(column.min()), int(column.max())) if len(column) else (0, 0) for column in map(_as_whole, columns)]
        widths = [_width(high - low) for low, high in ranges]
        return Form((max(widths[0], 1), *widths[1:]), tuple(low % 2**64 for low, _ in ranges))

    @staticmethod
    def from_bytes(raw: bytes) -> Form:
        known = np.frombuffer(raw, _FORM)
        return Form(tuple(known["width"].tolist()), tuple(known["lowest"].tolist()))

    def to_bytes(self) -> bytes:
        return np.array(list(zip(self.widths, self.lowest, strict=True)), _FORM).tobytes()

    @property
    def rows(self) -> np.dtype[np.void]:
        """One row; a column without bytes is not in it."""
        return np.dtype([(str(at), f"<u{width}") for at, width in enumerate(self.widths) if width])

    def packed(self, columns: Sequence[Column]) -> npt.NDArray[np.void]:
        rows = np.empty(len(columns[0]), self.rows)
        for at, (column, width, lowest) in enumerate(zip(columns, self.widths, self.lowest, strict=True)):
            if width:
                rows[str(at)] = _as_whole(column).view(np.uint64) - np.uint64(lowest)
        return rows

    def unpacked(self, rows: npt.NDArray[np.void], kinds: Sequence[np.dtype[Any]]) -> list[Column]:
        return [self._column(rows, at, kind) for at, kind in enumerate(kinds)]

    def _column(self, rows: npt.NDArray[np.void], at: int, kind: np.dtype[Any]) -> Column:
        lowest = np.uint64(self.lowest[at])
        whole = rows[str(at)].astype(np.uint64) + lowest if self.widths[at] else np.full(len(rows), lowest)
        return whole.view(kind) if kind.itemsize == whole.itemsize else whole.astype(kind)


def _as_whole(column: Column) -> Column:
    """Numbers of 64 bits, those with a sign with it; what is no whole number by its bits."""
    if column.dtype.itemsize < np.uint64().itemsize:
        return column.astype(np.uint64)
    plain = np.ascontiguousarray(column)
    return plain.view(np.uint64) if plain.dtype.kind == "f" else plain


def _width(span: int) -> int:
    needed = (span.bit_length() + 7) // 8
    return next(width for width in _WIDTHS if width >= needed)
