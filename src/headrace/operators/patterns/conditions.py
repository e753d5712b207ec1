"""Conditions and measures over the rows of a match: an expression (`headrace.expressions`) and the
terms that it reads. `condition_parser.py` builds them from what a user wrote.

The condition `amount > 2 * avg(b.amount)`:

    terms   0 is the amount of the newest row, 1 the average amount of the rows of b
    node    column 0 > 2 * column 1

What fails on a row (a division by zero, a number that is too large) is null there, and counted; a
condition that is null does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.keys import as_array
from headrace.expressions.evaluator import BIGINT_LIMIT, Failures, Node, is_integer_or_float
from headrace.operators.aggregates.specs import AggregateSpec, result_type
from headrace.operators.kernel import Times
from headrace.operators.patterns.walker import MatchRows

FIRST, LAST, COUNT, CLASSIFIER, MATCH_NUMBER = (
    "first",
    "last",
    "count",
    "classifier",
    "match_number",
)
AGGREGATES = ("count", "sum", "avg", "min", "max")
NAVIGATION = (FIRST, LAST, "prev")


@dataclass(frozen=True)
class RowExpression:
    """An expression over the columns of one row, which its tree reads by their numbers: the price
    of `sum(price * quantity)`.
    """

    text: str
    node: Node = field(compare=False)
    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name under which its values stand beside the columns of rows."""
        return f"= {self.text}"


@dataclass(frozen=True)
class Term:
    """A column of the first or last row of a match, or an aggregate over its rows.

    `symbols` are those whose rows count, None for all rows of the match. `offset` is how many of
    those rows from the first or last one, `look_back` how many rows of the key before that one. A
    `final` term is over the whole match, even where a row of it is emitted with what is known up to
    it. Where the term is of an expression, `column` is the expression's name.
    """

    kind: str
    symbols: tuple[str, ...] | None = None
    column: str | None = None
    offset: int = 0
    look_back: int = 0
    final: bool = False
    expression: RowExpression | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of rows that the term needs."""
        if self.expression is not None:
            return self.expression.columns
        return () if self.column is None else (self.column,)

    @property
    def is_current(self) -> bool:
        """Whether the term is a column of the newest row itself, whatever came before."""
        return self.kind == LAST and self.symbols is None and not self.offset

    def type(self, schema: pa.Schema) -> pa.DataType:
        if self.kind == CLASSIFIER:
            return pa.string()
        if self.kind in (COUNT, MATCH_NUMBER):
            return pa.int64()
        assert self.column is not None
        expression = self.expression
        kind = schema.field(self.column).type if expression is None else expression.node.type
        if self.kind == "avg" and pa.types.is_decimal(kind):
            return pa.float64()
        return (
            kind
            if self.kind in (FIRST, LAST)
            else result_type(AggregateSpec(self.kind, self.column), kind)
        )


@dataclass(frozen=True)
class MatchSource:
    """The rows that terms read: their columns, the index of each row in them, its time, and the
    first row of its key. `symbols` are those of the states of the automaton.
    """

    rows: pa.Table
    order: Ints
    times: Times
    start: Ints
    symbols: tuple[str, ...]
    within_us: int | None = None
    computed: Mapping[str, pa.Array] = field(default_factory=dict)
    """The values of expressions by name, for each row in order."""

    def type_of(self, name: str) -> pa.DataType:
        """The type of a column, or of an expression."""
        if name in self.computed:
            return self.computed[name].type
        return self.rows.schema.field(name).type

    def column(self, name: str, rows: Ints, exists: Mask | None = None) -> pa.Array:
        """The values of a column or expression at some rows; null where a row does not exist."""
        if name in self.computed:
            which = pa.array(rows, mask=None if exists is None else ~exists)
            return self.computed[name].take(which)
        indices = pa.array(self.order[rows], mask=None if exists is None else ~exists)
        return as_array(self.rows.column(name)).take(indices)

    def values(self, terms: Sequence[Term], match_rows: MatchRows, count: int) -> list[pa.Array]:
        """The value of each term for each of `count` owners of match rows."""
        return [self._value(term, match_rows, count) for term in terms]

    def _value(self, term: Term, match_rows: MatchRows, count: int) -> pa.Array:
        owner, row, state = match_rows.owner, match_rows.row, match_rows.state
        if term.symbols is not None:
            is_member = np.array([symbol in term.symbols for symbol in self.symbols], np.bool_)
            counted = is_member[state]
            if not counted.all():
                owner, row, state = owner[counted], row[counted], state[counted]
        if term.kind in AGGREGATES:
            return self._aggregate(term, owner, row, count)
        bounds = np.searchsorted(owner, np.arange(count + 1))
        first, end = bounds[:-1], bounds[1:]
        index = first + term.offset if term.kind == FIRST else end - 1 - term.offset
        exists = (index >= first) & (index < end)
        index = np.where(exists, index, 0)
        if term.kind == CLASSIFIER:
            if not len(state):
                return pa.nulls(count, pa.string())
            symbols = pa.array(self.symbols, pa.string())
            return symbols.take(pa.array(state[index], mask=~exists))
        assert term.column is not None
        rows = row[index] if len(row) else np.zeros(count, np.int64)
        if term.look_back:
            rows, exists = self.look_back(rows, exists, term.look_back)
        return self.column(term.column, rows, exists)

    def look_back(self, rows: Ints, exists: Mask, row_count: int) -> tuple[Ints, Mask]:
        """The rows so many rows of the key earlier, and which exist. Rows further back than a match
        may be long are not looked at: they may have been dropped.
        """
        earlier = rows - row_count
        exists = exists & (earlier >= self.start[rows])
        if self.within_us is not None:
            times = self.times[np.where(exists, earlier, rows)]
            exists &= times >= self.times[rows] - self.within_us
        return np.where(exists, earlier, rows), exists

    def _aggregate(self, term: Term, owner: Ints, row: Ints, count: int) -> pa.Array:
        if term.column is None:
            return pa.array(np.bincount(owner, minlength=count).astype(np.int64))
        values = self.column(term.column, row)
        kind = term.type(self.rows.schema)
        if is_integer_or_float(values.type) and term.kind != "count":
            is_valid = values.is_valid().to_numpy(zero_copy_only=False)
            reduced = _reduce_by_owner(term.kind, values.drop_null(), owner[is_valid], count)
            return reduced.cast(kind)
        function = {"avg": "mean"}.get(term.kind, term.kind)
        values = values.cast(pa.float64()) if term.kind == "avg" else values
        grouped = (
            pa.table({"owner": owner, "v": values})
            .group_by("owner", use_threads=False)
            .aggregate([("v", function)])
        )
        source = np.full(count, -1)
        source[grouped["owner"].to_numpy()] = np.arange(grouped.num_rows)
        result = as_array(grouped[f"v_{function}"]).take(pa.array(source, mask=source < 0))
        return (result.fill_null(0) if term.kind == "count" else result).cast(kind)


_REDUCERS: dict[str, np.ufunc] = {"sum": np.add, "avg": np.add, "min": np.fmin, "max": np.maximum}
"""NaN is greater than any number."""


def _reduce_by_owner(kind: str, values: pa.Array, owner: Ints, count: int) -> pa.Array:
    """An aggregate over numbers without nulls, in order of owner."""
    counts = np.bincount(owner, minlength=count)
    has_values = counts > 0
    numbers: npt.NDArray[np.generic] = values.to_numpy()
    if kind == "avg" or (kind == "sum" and numbers.dtype.kind == "f"):
        numbers = numbers.astype(np.float64)
    elif kind == "sum":
        numbers = numbers.astype(np.int64)
    if not len(numbers):
        return pa.nulls(count, pa.from_numpy_dtype(numbers.dtype))
    starts = (np.cumsum(counts) - counts)[has_values]
    reduced = _REDUCERS[kind].reduceat(numbers, starts)
    is_too_large = None
    if kind == "avg":
        reduced = reduced / counts[has_values]
    elif kind == "sum" and numbers.dtype.kind == "i":
        about = np.add.reduceat(numbers.astype(np.float64), starts)
        is_too_large = np.abs(about) >= BIGINT_LIMIT
    source = pa.array(np.cumsum(has_values) - 1, mask=~has_values)
    return pa.array(reduced, mask=is_too_large).take(source)


@dataclass(frozen=True)
class ConditionExpression:
    """A condition or measure: its tree, which reads the terms by their numbers."""

    text: str
    node: Node
    terms: tuple[Term, ...]

    @property
    def type(self) -> pa.DataType:
        return self.node.type

    def evaluate(self, term_values: Sequence[pa.Array], count: int) -> tuple[pa.Array, Mask]:
        """The values of the expression, and the rows on which it failed."""
        failures = Failures(np.zeros(count, np.bool_))
        values = self.node.evaluate(term_values, failures)
        column = pa.repeat(values, count) if isinstance(values, pa.Scalar) else values
        return column, failures.rows

    def holds(self, term_values: Sequence[pa.Array], count: int) -> tuple[Mask, Mask]:
        """The rows for which the expression is true, and those on which it failed."""
        values, failed = self.evaluate(term_values, count)
        return values.fill_null(False).to_numpy(zero_copy_only=False), failed
