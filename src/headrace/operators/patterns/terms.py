"""What conditions and measures take from the rows of a match: a column of its first or last row (of a symbol), or an aggregate over its rows. For many matches at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.operators.buffers import Ints, Mask
from headrace.operators.kernel import Times
from headrace.operators.keys import whole
from headrace.operators.patterns.walking import Entries
from headrace.operators.specs import AggregateSpec, result_type

FIRST, LAST, COUNT, CLASSIFIER, MATCH_NUMBER = "first", "last", "count", "classifier", "match_number"
AGGREGATES = ("count", "sum", "avg", "min", "max")
NAVIGATION = (FIRST, LAST, "prev")


@dataclass(frozen=True)
class Term:
    """`symbols`: whose rows, None for all of the match. `offset`: how many rows of those from the first or last one. `back`: how many rows of the key before that one.

    `final`: of the whole match, also where a row of it is told before its end.
    """

    kind: str
    symbols: tuple[str, ...] | None = None
    column: str | None = None
    offset: int = 0
    back: int = 0
    final: bool = False

    @property
    def is_current(self) -> bool:
        """Whether it is a column of the newest row itself, whatever came before."""
        return self.kind == LAST and self.symbols is None and not self.offset

    def type(self, schema: pa.Schema) -> pa.DataType:
        if self.kind == CLASSIFIER:
            return pa.string()
        if self.kind in (COUNT, MATCH_NUMBER):
            return pa.int64()
        assert self.column is not None
        kind = schema.field(self.column).type
        if self.kind == "avg" and pa.types.is_decimal(kind):
            return pa.float64()
        return kind if self.kind in (FIRST, LAST) else result_type(AggregateSpec(self.kind, self.column), kind)


@dataclass(frozen=True)
class Source:
    """Rows for terms to read: their columns, and where in them each row is, in order; when they were, and the first row of each one's key. `symbols`: of each place."""

    rows: pa.Table
    order: Ints
    times: Times
    start: Ints
    symbols: tuple[str, ...]
    within_us: int | None = None

    def column(self, name: str, at: Ints, there: Mask | None = None) -> pa.Array:
        """A column's values at these rows; null where there is none."""
        indices = pa.array(self.order[at], mask=None if there is None else ~there)
        return whole(self.rows.column(name)).take(indices)

    def values(self, terms: Sequence[Term], entries: Entries, count: int) -> list[pa.Array]:
        """What each term is for each of so many owners of entries."""
        return [self._value(term, entries, count) for term in terms]

    def _value(self, term: Term, entries: Entries, count: int) -> pa.Array:
        mine = self._mine(term, entries)
        owner, row = (entries.owner, entries.row) if mine is None else (entries.owner[mine], entries.row[mine])
        if term.kind in AGGREGATES:
            return self._aggregate(term, owner, row, count)
        bounds = np.searchsorted(owner, np.arange(count + 1))
        at = bounds[:-1] + term.offset if term.kind == FIRST else bounds[1:] - 1 - term.offset
        there = (at >= bounds[:-1]) & (at < bounds[1:])
        if term.kind == CLASSIFIER:
            places = entries.place if mine is None else entries.place[mine]
            return pa.array(self.symbols, pa.string()).take(pa.array(places[np.where(there, at, 0)], mask=~there)) if len(places) else pa.nulls(count, pa.string())
        assert term.column is not None
        rows = row[np.where(there, at, 0)] if len(row) else np.zeros(count, np.int64)
        if term.back:
            rows, there = self._before(rows, there, term.back)
        return self.column(term.column, rows, there)

    def _before(self, rows: Ints, there: Mask, back: int) -> tuple[Ints, Mask]:
        """So many rows of the key earlier. What lies further back than a match may take is not looked at: it may have been forgotten."""
        earlier = rows - back
        known = there & (earlier >= self.start[rows])
        safe = np.where(known, earlier, rows)
        if self.within_us is not None:
            known &= self.times[safe] >= self.times[rows] - self.within_us
        return np.where(known, earlier, rows), known

    def _mine(self, term: Term, entries: Entries) -> Mask | None:
        if term.symbols is None:
            return None
        fits = np.array([symbol in term.symbols for symbol in self.symbols], np.bool_)
        mine: Mask = fits[entries.place]
        return None if mine.all() else mine

    def _aggregate(self, term: Term, owner: Ints, row: Ints, count: int) -> pa.Array:
        if term.column is None:
            return pa.array(np.bincount(owner, minlength=count).astype(np.int64))
        values = self.column(term.column, row)
        kind = term.type(self.rows.schema)
        if _is_plain(values.type) and term.kind != "count":
            there = values.is_valid().to_numpy(zero_copy_only=False)
            return _reduced(term.kind, values.drop_null(), owner[there], count).cast(kind)
        name = {"avg": "mean"}.get(term.kind, term.kind)
        values = values.cast(pa.float64()) if term.kind == "avg" else values
        grouped = pa.table({"owner": owner, "v": values}).group_by("owner", use_threads=False).aggregate([("v", name)])
        places = np.full(count, -1)
        places[grouped["owner"].to_numpy()] = np.arange(grouped.num_rows)
        found = whole(grouped[f"v_{name}"]).take(pa.array(places, mask=places < 0))
        return (found.fill_null(0) if term.kind == "count" else found).cast(kind)


def _is_plain(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


_REDUCERS: dict[str, np.ufunc] = {"sum": np.add, "avg": np.add, "min": np.fmin, "max": np.maximum}
"""NaN is greater than any number."""
_TOO_LARGE = float(2**63)


def _reduced(kind: str, values: pa.Array, owner: Ints, count: int) -> pa.Array:
    """Numbers without nulls, in order of owner: one after the other."""
    counts = np.bincount(owner, minlength=count)
    there = counts > 0
    numbers: npt.NDArray[np.generic] = values.to_numpy()
    if kind == "avg" or (kind == "sum" and numbers.dtype.kind == "f"):
        numbers = numbers.astype(np.float64)
    elif kind == "sum":
        numbers = numbers.astype(np.int64)
    if not len(numbers):
        return pa.nulls(count, pa.from_numpy_dtype(numbers.dtype))
    starts = (np.cumsum(counts) - counts)[there]
    reduced = _REDUCERS[kind].reduceat(numbers, starts)
    if kind == "avg":
        reduced = reduced / counts[there]
    elif kind == "sum" and numbers.dtype.kind == "i":
        too_large = np.abs(np.add.reduceat(numbers.astype(np.float64), starts)) >= _TOO_LARGE
        return pa.array(reduced, mask=too_large).take(pa.array(np.cumsum(there) - 1, mask=~there))
    return pa.array(reduced).take(pa.array(np.cumsum(there) - 1, mask=~there))
