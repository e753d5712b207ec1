"""Large values that an update did not touch. Postgres keeps them apart from the row (TOAST) and does not send them again; here the newest ones seen are remembered, up to a bound.

What is not known is marked in the row, never null without a word. `REPLICA IDENTITY FULL` makes Postgres send them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.postgres_source.relations import Relation
from headrace.cdc.postgres_source.tuples import Flags
from headrace.operators.buffers import offsets_of

SMALLEST_BYTES = 500
"""Smaller values are rarely kept apart."""
_Place = tuple[int, int, tuple[str | None, ...]]


@dataclass
class ToastCache:
    """The last value of each large field, least recently used first."""

    most_bytes: int = 64 << 20
    _values: OrderedDict[_Place, str] = field(default_factory=OrderedDict)
    _bytes: int = 0
    _holding: set[tuple[int, int]] = field(default_factory=set)
    """Relations and columns of which there is any value."""

    def filled(self, relation: Relation, texts: list[pa.Array], unchanged: dict[int, Flags], *, is_new: Flags) -> tuple[list[pa.Array], dict[int, Flags]]:
        """Columns with what is known filled in, and what is not. The rows are in order, so what one brings is there for the next."""
        filled, left = list(texts), {}
        for place, text in enumerate(texts):
            flags = unchanged.get(place)
            large = self._large(text) & is_new
            if flags is None and not large.any() and (relation.id, place) not in self._holding:
                continue
            asked = flags if flags is not None else np.zeros(len(text), np.bool_)
            filled[place], missing = self._column(relation, texts, place, asked, large, is_new)
            if missing.any():
                left[place] = missing
        return filled, left

    @staticmethod
    def _large(text: pa.Array) -> Flags:
        if not len(text) or int(np.diff(offsets_of(text)).max()) < SMALLEST_BYTES:
            return np.zeros(len(text), np.bool_)
        large: Flags = pc.fill_null(pc.greater_equal(pc.binary_length(text), SMALLEST_BYTES), False).to_numpy(zero_copy_only=False)
        return large

    def _column(self, relation: Relation, texts: list[pa.Array], place: int, unchanged: Flags, large: Flags, is_new: Flags) -> tuple[pa.Array, Flags]:
        missing = np.zeros(len(unchanged), np.bool_)
        found: dict[int, str] = {}
        touched = unchanged | (is_new if (relation.id, place) in self._holding else large)
        for row in map(int, np.flatnonzero(touched)):
            key = (relation.id, place, tuple(texts[each][row].as_py() for each in relation.key))
            if not unchanged[row]:
                self._put(key, texts[place][row].as_py() if large[row] else None)
                continue
            value = self._values.get(key) or self._of_old_key(relation, texts, place, row, is_new)
            if value is None:
                missing[row] = True
            else:
                found[row] = value
                self._put(key, value)
        if not found:
            return texts[place], missing
        values = texts[place].to_pylist()
        for row, value in found.items():
            values[row] = value
        return pa.array(values, pa.string()), missing

    def _of_old_key(self, relation: Relation, texts: list[pa.Array], place: int, row: int, is_new: Flags) -> str | None:
        """A row whose key changed stands right behind the one that goes."""
        if not row or is_new[row - 1]:
            return None
        return self._values.get((relation.id, place, tuple(texts[each][row - 1].as_py() for each in relation.key)))

    def _put(self, key: _Place, value: str | None) -> None:
        """Remember a value, or forget the one there is: one that is small is sent again."""
        self._bytes -= len(self._values.pop(key, ""))
        if value is None:
            return
        self._holding.add(key[:2])
        self._values[key] = value
        self._bytes += len(value)
        while self._bytes > self.most_bytes:
            _, dropped = self._values.popitem(last=False)
            self._bytes -= len(dropped)
