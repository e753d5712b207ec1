"""Conditions and measures over the rows of a match: a tree of a few kinds of nodes, evaluated over
whole columns. `condition_parser.py` builds it from what a user wrote; nothing else is ever run.

The tree of `amount > 2 * avg(b.amount)`:

    Operation(">", (TermReference(0), Operation("*", (Literal(2), TermReference(1)))))
    terms: 0 is the amount of the newest row, 1 the average amount of the rows of b

Expressions mean what they mean in Spark SQL. What fails on a row (a division by zero, a number that
is too large) is null there, and counted; a condition that is null does not hold.

From top to bottom: CAST; the terms, which read the rows of matches; the nodes and operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.keys import as_array
from headrace.operators.aggregates.specs import AggregateSpec, result_type
from headrace.operators.kernel import Times
from headrace.operators.patterns.walker import MatchRows

# CAST, as Spark has it: a value that cannot be cast fails on its own row alone


Values = Any
"""A column, or a single value that stands for all rows."""
NoteFailures = Callable[[Any], None]
"""Takes the mask of the rows on which something failed."""
# Tuples, not Arrow arrays: making one loads pandas, which a declaration need not wait for.
_TRUE = ("t", "true", "y", "yes", "1")
_FALSE = ("f", "false", "n", "no", "0")
_INTEGER_TEXT = r"^[+-]?[0-9]{1,37}$"
_NUMBER = r"(?i)^[+-]?([0-9]+\.?[0-9]*(e[+-]?[0-9]+)?|\.[0-9]+(e[+-]?[0-9]+)?|nan|inf|infinity)$"
_LARGEST_DECIMAL = pa.decimal128(38, 0)


def cast_values(values: Values, kind: pa.DataType, note_failures: NoteFailures) -> Values:
    """Cast values to another type; null where that fails."""
    source = values.type
    if pa.types.is_string(source) and kind != source:
        return _cast_text(values, kind, note_failures)
    if pa.types.is_timestamp(source) and _is_number(kind):
        seconds = _epoch_seconds(values)
        return cast_values(
            pc.floor(seconds) if pa.types.is_integer(kind) else seconds, kind, note_failures
        )
    if pa.types.is_duration(source) and kind != source:
        raise pa.ArrowNotImplementedError("an interval is no number: compare it with an INTERVAL")
    if kind == pa.string() and not (
        pa.types.is_string(source)
        or pa.types.is_integer(source)
        or pa.types.is_boolean(source)
        or pa.types.is_decimal(source)
        or pa.types.is_null(source)
    ):
        raise pa.ArrowNotImplementedError(
            f"a cast from {source} to STRING is not computed over a match"
        )
    if pa.types.is_integer(kind) and not _fits_always(source, kind):
        return _to_integers(values, kind, note_failures)
    return pc.cast(values, kind, safe=False)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _fits_always(source: pa.DataType, kind: pa.DataType) -> bool:
    """Whether every value of a type is a value of an integer type."""
    return bool(
        pa.types.is_boolean(source)
        or pa.types.is_null(source)
        or (pa.types.is_integer(source) and source.bit_width <= kind.bit_width)
    )


def _epoch_seconds(times: Values) -> Values:
    kind = times.type
    micros = pc.cast(pc.cast(times, pa.timestamp("us", kind.tz)), pa.int64())
    return pc.divide(pc.cast(micros, pa.float64(), safe=False), pa.scalar(1e6))


def _to_integers(numbers: Values, kind: pa.DataType, note_failures: NoteFailures) -> Values:
    """Numbers as integers of a type; null where they do not fit."""
    limit = float(2 ** (kind.bit_width - 1))
    about = pc.cast(numbers, pa.float64(), safe=False)
    fits = pc.and_(pc.greater(about, pa.scalar(-limit - 1)), pc.less(about, pa.scalar(limit)))
    note_failures(pc.invert(fits))
    return pc.cast(pc.if_else(fits, numbers, pa.scalar(None, numbers.type)), kind, safe=False)


def _cast_text(texts: Values, kind: pa.DataType, note_failures: NoteFailures) -> Values:
    try:
        return pc.cast(texts, kind)
    except pa.ArrowInvalid:
        texts = pc.utf8_trim_whitespace(texts)
    if pa.types.is_boolean(kind):
        return _text_to_boolean(pc.utf8_lower(texts), note_failures)
    fits = pc.match_substring_regex(texts, _INTEGER_TEXT if pa.types.is_integer(kind) else _NUMBER)
    note_failures(pc.invert(fits))
    plain = pc.replace_substring_regex(
        pc.if_else(fits, texts, pa.scalar(None, pa.string())), r"^\+", ""
    )
    return (
        _to_integers(pc.cast(plain, _LARGEST_DECIMAL), kind, note_failures)
        if pa.types.is_integer(kind)
        else pc.cast(plain, kind)
    )


def _text_to_boolean(texts: Values, note_failures: NoteFailures) -> Values:
    is_true, is_false = (
        pc.is_in(texts, value_set=pa.array(_TRUE)),
        pc.is_in(texts, value_set=pa.array(_FALSE)),
    )
    known = pc.or_(is_true, is_false)
    note_failures(pc.and_(pc.is_valid(texts), pc.invert(known)))
    return pc.if_else(known, is_true, pa.scalar(None, pa.bool_()))


# Terms: what conditions and measures read of the rows of a match


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
class Term:
    """A column of the first or last row of a match, or an aggregate over its rows.

    `symbols` are those whose rows count, None for all rows of the match. `offset` is how many of
    those rows from the first or last one, `look_back` how many rows of the key before that one. A
    `final` term is over the whole match, even where a row of it is emitted with what is known up to
    it.
    """

    kind: str
    symbols: tuple[str, ...] | None = None
    column: str | None = None
    offset: int = 0
    look_back: int = 0
    final: bool = False

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
        kind = schema.field(self.column).type
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

    def column(self, name: str, rows: Ints, exists: Mask | None = None) -> pa.Array:
        """The values of a column at some rows; null where a row does not exist."""
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
            rows, exists = self._look_back(rows, exists, term.look_back)
        return self.column(term.column, rows, exists)

    def _look_back(self, rows: Ints, exists: Mask, row_count: int) -> tuple[Ints, Mask]:
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
        if _is_number(values.type) and term.kind != "count":
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
_BIGINT_LIMIT = float(2**63)


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
        is_too_large = np.abs(about) >= _BIGINT_LIMIT
    source = pa.array(np.cumsum(has_values) - 1, mask=~has_values)
    return pa.array(reduced, mask=is_too_large).take(source)


# Nodes


@dataclass
class Failures:
    """The rows on which something failed."""

    rows: Mask

    def add(self, failed: Any) -> None:
        if isinstance(failed, pa.Scalar):
            failed = pa.repeat(failed, len(self.rows))
        self.rows |= failed.fill_null(False).to_numpy(zero_copy_only=False)


@dataclass(frozen=True)
class TermReference:
    """A term, by its number."""

    number: int

    def evaluate(self, term_values: Sequence[pa.Array], _: Failures) -> Values:
        return term_values[self.number]


@dataclass(frozen=True)
class Literal:
    value: Any
    type: pa.DataType

    def evaluate(self, _: Sequence[pa.Array], __: Failures) -> Values:
        return pa.scalar(self.value, self.type)


@dataclass(frozen=True)
class Operation:
    """One of OPERATIONS, with its operands."""

    name: str
    operands: tuple[Node, ...]

    def evaluate(self, term_values: Sequence[pa.Array], failures: Failures) -> Values:
        return OPERATIONS[self.name](
            [each.evaluate(term_values, failures) for each in self.operands], failures
        )


@dataclass(frozen=True)
class Convert:
    """A cast that is null where it fails."""

    operand: Node
    type: pa.DataType

    def evaluate(self, term_values: Sequence[pa.Array], failures: Failures) -> Values:
        return cast_values(self.operand.evaluate(term_values, failures), self.type, failures.add)


Node = TermReference | Literal | Operation | Convert


@dataclass(frozen=True)
class ConditionExpression:
    """A tree and the terms that it reads."""

    text: str
    node: Node
    terms: tuple[Term, ...]
    _type: list[pa.DataType] = field(default_factory=list, repr=False, compare=False)

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

    def type(self, schema: pa.Schema) -> pa.DataType:
        """The type of the expression, found by evaluating it over no rows."""
        nothing = [pa.nulls(0, term.type(schema)) for term in self.terms]
        return self.evaluate(nothing, 0)[0].type


# Operations

_INTEGER = pa.int64()


def _common_numbers(values: Sequence[Values]) -> list[Values]:
    """Integers as BIGINT; with other numbers among them, all as DOUBLE."""
    kinds = [value.type for value in values]
    if not all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in kinds):
        return list(values)
    kind = _INTEGER if all(map(pa.types.is_integer, kinds)) else pa.float64()
    return [value if value.type == kind else pc.cast(value, kind, safe=False) for value in values]


def _checked_arithmetic(
    plain: Callable[..., Any], checked: Callable[..., Any]
) -> Callable[[Sequence[Values], Failures], Values]:
    def computed(values: Sequence[Values], failures: Failures) -> Values:
        values = _common_numbers(values)
        if values[0].type != _INTEGER or values[-1].type != _INTEGER:
            return plain(*values)
        try:
            return checked(*values)
        except pa.ArrowInvalid:
            about = plain(*(pc.cast(value, pa.float64(), safe=False) for value in values))
            too_large = pc.greater_equal(pc.abs(about), _BIGINT_LIMIT)
            failures.add(too_large)
            return pc.if_else(too_large, pa.scalar(None, _INTEGER), plain(*values))

    return computed


def _divide(values: Sequence[Values], failures: Failures) -> Values:
    left, right = (
        value
        if pa.types.is_duration(value.type)
        else cast_values(value, pa.float64(), failures.add)
        for value in values
    )
    zero = pc.equal(right, pa.scalar(0.0))
    failures.add(pc.and_(zero, pc.is_valid(left)))
    return pc.divide(left, pc.if_else(zero, pa.scalar(None, right.type), right))


def _remainder(values: Sequence[Values], failures: Failures) -> Values:
    left, right = _common_numbers(values)
    zero = pc.equal(right, pa.scalar(0, right.type))
    failures.add(pc.and_(zero, pc.is_valid(left)))
    right = pc.if_else(zero, pa.scalar(None, right.type), right)
    if right.type != _INTEGER:
        return pc.subtract(left, pc.multiply(pc.trunc(pc.divide(left, right)), right))
    return pc.subtract(left, pc.multiply(pc.divide(left, right), right))


def _comparison(sign: str) -> Callable[[Sequence[Values], Failures], Values]:
    """A comparison in which NaN equals itself, and is greater than any number."""

    def computed(values: Sequence[Values], _: Failures) -> Values:
        left, right = _common_numbers(values)
        if sign in ("=", "<>"):
            same = _equal(left, right)
            return same if sign == "=" else pc.invert(same)
        if sign in (">", "<="):
            left, right = right, left
        less = _less_than(left, right)
        return less if sign in ("<", ">") else pc.invert(less)

    return computed


def _equal(left: Values, right: Values) -> Values:
    plain = pc.equal(left, right)
    if not (pa.types.is_floating(left.type) and pa.types.is_floating(right.type)):
        return plain
    return pc.or_(plain, pc.and_(pc.is_nan(left), pc.is_nan(right)))


def _less_than(left: Values, right: Values) -> Values:
    plain = pc.less(left, right)
    if not (pa.types.is_floating(left.type) and pa.types.is_floating(right.type)):
        return plain
    return pc.or_(plain, pc.and_(pc.invert(pc.is_nan(left)), pc.is_nan(right)))


def _case(values: Sequence[Values], _: Failures) -> Values:
    """CASE: conditions and results in turn, and the default at the end."""
    *pairs, chosen = values
    for condition, result in zip(reversed(pairs[::2]), reversed(pairs[1::2]), strict=True):
        chosen = pc.if_else(pc.coalesce(condition, pa.scalar(False)), result, chosen)
    return chosen


def _plain_function(function: Callable[..., Any]) -> Callable[[Sequence[Values], Failures], Values]:
    return lambda values, _: function(*values)


OPERATIONS: dict[str, Callable[[Sequence[Values], Failures], Values]] = {
    "+": _checked_arithmetic(pc.add, pc.add_checked),
    "-": _checked_arithmetic(pc.subtract, pc.subtract_checked),
    "*": _checked_arithmetic(pc.multiply, pc.multiply_checked),
    "negative": _checked_arithmetic(pc.negate, pc.negate_checked),
    "abs": _checked_arithmetic(pc.abs, pc.abs_checked),
    "/": _divide,
    "%": _remainder,
    **{sign: _comparison(sign) for sign in ("=", "<>", "<", "<=", ">", ">=")},
    "and": lambda values, _: reduce(pc.and_kleene, values),
    "or": lambda values, _: reduce(pc.or_kleene, values),
    "not": _plain_function(pc.invert),
    "is null": _plain_function(pc.is_null),
    "is true": lambda values, _: pc.coalesce(values[0], pa.scalar(False)),
    "case": _case,
    "coalesce": lambda values, _: pc.coalesce(*_common_numbers(values)),
    "least": lambda values, _: pc.min_element_wise(*_common_numbers(values)),
    "greatest": lambda values, _: pc.max_element_wise(*_common_numbers(values)),
    "like": lambda values, _: pc.match_like(values[0], values[1].as_py()),
    "lower": _plain_function(pc.utf8_lower),
    "upper": _plain_function(pc.utf8_upper),
    "length": lambda values, _: pc.cast(pc.utf8_length(values[0]), pa.int32()),
    "floor": lambda values, failures: cast_values(
        pc.floor(cast_values(values[0], pa.float64(), failures.add)), _INTEGER, failures.add
    ),
    "sqrt": lambda values, failures: pc.sqrt(cast_values(values[0], pa.float64(), failures.add)),
}
FUNCTIONS = {
    "abs": (1, 1),
    "coalesce": (1, 20),
    "least": (2, 20),
    "greatest": (2, 20),
    "lower": (1, 1),
    "upper": (1, 1),
    "length": (1, 1),
    "floor": (1, 1),
    "sqrt": (1, 1),
}
"""The functions that can be called, and how many arguments each takes."""
