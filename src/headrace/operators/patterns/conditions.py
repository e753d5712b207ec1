"""Expressions over what a match has so far, as a tree of a few kinds of nodes: made by `reading`
from what a user wrote, computed over whole columns. Nothing else is ever run.

They mean what they mean in Spark SQL. What fails on a row (a division by zero, a number that is too
large) is null there, and counted; a condition that is null does not hold.
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
from headrace.columnar.keys import whole
from headrace.operators.aggregates.specs import AggregateSpec, result_type
from headrace.operators.kernel import Times
from headrace.operators.patterns.walker import Entries

# CAST in conditions and measures, as Spark has it: what is no number fails on its row, and the
# others do not notice.


Values = Any
Note = Callable[[Any], None]
"""Told where something failed."""
_TRUE, _FALSE = (
    ("t", "true", "y", "yes", "1"),
    (
        "f",
        "false",
        "n",
        "no",
        "0",
    ),
)  # no Arrow arrays: making one loads pandas, which a declaration need not wait for
_INTEGER_TEXT = r"^[+-]?[0-9]{1,37}$"
_NUMBER = r"(?i)^[+-]?([0-9]+\.?[0-9]*(e[+-]?[0-9]+)?|\.[0-9]+(e[+-]?[0-9]+)?|nan|inf|infinity)$"
_LARGEST_DECIMAL = pa.decimal128(38, 0)


def converted(values: Values, kind: pa.DataType, note: Note) -> Values:
    """Values as another type; null where that fails."""
    given = values.type
    if pa.types.is_string(given) and kind != given:
        return _from_text(values, kind, note)
    if pa.types.is_timestamp(given) and _is_number(kind):
        seconds = _seconds(values)
        return converted(pc.floor(seconds) if pa.types.is_integer(kind) else seconds, kind, note)
    if pa.types.is_duration(given) and kind != given:
        raise pa.ArrowNotImplementedError("an interval is no number: compare it with an INTERVAL")
    if kind == pa.string() and not (
        pa.types.is_string(given)
        or pa.types.is_integer(given)
        or pa.types.is_boolean(given)
        or pa.types.is_decimal(given)
        or pa.types.is_null(given)
    ):
        raise pa.ArrowNotImplementedError(
            f"a cast from {given} to STRING is not computed over a match"
        )
    if pa.types.is_integer(kind) and not _always_fits(given, kind):
        return _whole(values, kind, note)
    return pc.cast(values, kind, safe=False)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _always_fits(given: pa.DataType, kind: pa.DataType) -> bool:
    """Whether every value is a whole number of this type."""
    return bool(
        pa.types.is_boolean(given)
        or pa.types.is_null(given)
        or (pa.types.is_integer(given) and given.bit_width <= kind.bit_width)
    )


def _seconds(times: Values) -> Values:
    kind = times.type
    micros = pc.cast(pc.cast(times, pa.timestamp("us", kind.tz)), pa.int64())
    return pc.divide(pc.cast(micros, pa.float64(), safe=False), pa.scalar(1e6))


def _whole(numbers: Values, kind: pa.DataType, note: Note) -> Values:
    """Whole numbers of so many bits."""
    limit = float(2 ** (kind.bit_width - 1))
    about = pc.cast(numbers, pa.float64(), safe=False)
    fits = pc.and_(pc.greater(about, pa.scalar(-limit - 1)), pc.less(about, pa.scalar(limit)))
    note(pc.invert(fits))
    return pc.cast(pc.if_else(fits, numbers, pa.scalar(None, numbers.type)), kind, safe=False)


def _from_text(texts: Values, kind: pa.DataType, note: Note) -> Values:
    try:
        return pc.cast(texts, kind)
    except pa.ArrowInvalid:
        texts = pc.utf8_trim_whitespace(texts)
    if pa.types.is_boolean(kind):
        return _truth(pc.utf8_lower(texts), note)
    fits = pc.match_substring_regex(texts, _INTEGER_TEXT if pa.types.is_integer(kind) else _NUMBER)
    note(pc.invert(fits))
    plain = pc.replace_substring_regex(
        pc.if_else(fits, texts, pa.scalar(None, pa.string())), r"^\+", ""
    )
    return (
        _whole(pc.cast(plain, _LARGEST_DECIMAL), kind, note)
        if pa.types.is_integer(kind)
        else pc.cast(plain, kind)
    )


def _truth(texts: Values, note: Note) -> Values:
    is_true, is_false = (
        pc.is_in(texts, value_set=pa.array(_TRUE)),
        pc.is_in(texts, value_set=pa.array(_FALSE)),
    )
    known = pc.or_(is_true, is_false)
    note(pc.and_(pc.is_valid(texts), pc.invert(known)))
    return pc.if_else(known, is_true, pa.scalar(None, pa.bool_()))


# What conditions and measures take from the rows of a match: a column of its first or last row (of
# a symbol), or an aggregate over its rows. For many matches at once.


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
    """`symbols`: whose rows, None for all of the match. `offset`: how many rows of those from the
    first or last one. `back`: how many rows of the key before that one.

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
        return (
            kind
            if self.kind in (FIRST, LAST)
            else result_type(AggregateSpec(self.kind, self.column), kind)
        )


@dataclass(frozen=True)
class Source:
    """Rows for terms to read: their columns, and where in them each row is, in order; when they
    were, and the first row of each one's key. `symbols`: of each place.
    """

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
        owner, row = (
            (entries.owner, entries.row)
            if mine is None
            else (entries.owner[mine], entries.row[mine])
        )
        if term.kind in AGGREGATES:
            return self._aggregate(term, owner, row, count)
        bounds = np.searchsorted(owner, np.arange(count + 1))
        at = bounds[:-1] + term.offset if term.kind == FIRST else bounds[1:] - 1 - term.offset
        there = (at >= bounds[:-1]) & (at < bounds[1:])
        if term.kind == CLASSIFIER:
            places = entries.place if mine is None else entries.place[mine]
            return (
                pa.array(self.symbols, pa.string()).take(
                    pa.array(places[np.where(there, at, 0)], mask=~there)
                )
                if len(places)
                else pa.nulls(count, pa.string())
            )
        assert term.column is not None
        rows = row[np.where(there, at, 0)] if len(row) else np.zeros(count, np.int64)
        if term.back:
            rows, there = self._before(rows, there, term.back)
        return self.column(term.column, rows, there)

    def _before(self, rows: Ints, there: Mask, back: int) -> tuple[Ints, Mask]:
        """So many rows of the key earlier. What lies further back than a match may take is not
        looked at: it may have been forgotten.
        """
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
        grouped = (
            pa.table({"owner": owner, "v": values})
            .group_by("owner", use_threads=False)
            .aggregate([("v", name)])
        )
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


"""A column, or a single value that stands for all rows."""


@dataclass
class Failures:
    """On which rows something failed."""

    rows: Mask

    def add(self, failed: Any) -> None:
        if isinstance(failed, pa.Scalar):
            failed = pa.repeat(failed, len(self.rows))
        self.rows |= failed.fill_null(False).to_numpy(zero_copy_only=False)


@dataclass(frozen=True)
class Given:
    """A term, by its number."""

    number: int

    def over(self, given: Sequence[pa.Array], _: Failures) -> Values:
        return given[self.number]


@dataclass(frozen=True)
class Literal:
    value: Any
    type: pa.DataType

    def over(self, _: Sequence[pa.Array], __: Failures) -> Values:
        return pa.scalar(self.value, self.type)


@dataclass(frozen=True)
class Operation:
    """One of OPERATIONS, over its operands."""

    name: str
    operands: tuple[Node, ...]

    def over(self, given: Sequence[pa.Array], failures: Failures) -> Values:
        return OPERATIONS[self.name](
            [each.over(given, failures) for each in self.operands], failures
        )


@dataclass(frozen=True)
class Convert:
    """A cast that gives null where it fails."""

    operand: Node
    type: pa.DataType

    def over(self, given: Sequence[pa.Array], failures: Failures) -> Values:
        return converted(self.operand.over(given, failures), self.type, failures.add)


Node = Given | Literal | Operation | Convert


@dataclass(frozen=True)
class Expression:
    """A tree and the terms that it is over."""

    text: str
    node: Node
    terms: tuple[Term, ...]
    _type: list[pa.DataType] = field(default_factory=list, repr=False, compare=False)

    def over(self, given: Sequence[pa.Array], count: int) -> tuple[pa.Array, Mask]:
        """Its values, and where it failed."""
        failures = Failures(np.zeros(count, np.bool_))
        found = self.node.over(given, failures)
        return (pa.repeat(found, count) if isinstance(found, pa.Scalar) else found), failures.rows

    def holds(self, given: Sequence[pa.Array], count: int) -> tuple[Mask, Mask]:
        """Where it is true, and where it failed."""
        found, failed = self.over(given, count)
        return found.fill_null(False).to_numpy(zero_copy_only=False), failed

    def type(self, schema: pa.Schema) -> pa.DataType:
        """Found out by computing it over no rows at all."""
        nothing = [pa.nulls(0, term.type(schema)) for term in self.terms]
        return self.over(nothing, 0)[0].type


# Operations

_INTEGER = pa.int64()
_LARGEST = float(2**63)


def _numbers(values: Sequence[Values]) -> list[Values]:
    """Whole numbers as BIGINT; with others among them, all as DOUBLE."""
    kinds = [value.type for value in values]
    if not all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in kinds):
        return list(values)
    kind = _INTEGER if all(map(pa.types.is_integer, kinds)) else pa.float64()
    return [value if value.type == kind else pc.cast(value, kind, safe=False) for value in values]


def _checked(
    plain: Callable[..., Any], checked: Callable[..., Any]
) -> Callable[[Sequence[Values], Failures], Values]:
    def computed(values: Sequence[Values], failures: Failures) -> Values:
        values = _numbers(values)
        if values[0].type != _INTEGER or values[-1].type != _INTEGER:
            return plain(*values)
        try:
            return checked(*values)
        except pa.ArrowInvalid:
            about = plain(*(pc.cast(value, pa.float64(), safe=False) for value in values))
            too_large = pc.greater_equal(pc.abs(about), _LARGEST)
            failures.add(too_large)
            return pc.if_else(too_large, pa.scalar(None, _INTEGER), plain(*values))

    return computed


def _divided(values: Sequence[Values], failures: Failures) -> Values:
    left, right = (
        value if pa.types.is_duration(value.type) else converted(value, pa.float64(), failures.add)
        for value in values
    )
    zero = pc.equal(right, pa.scalar(0.0))
    failures.add(pc.and_(zero, pc.is_valid(left)))
    return pc.divide(left, pc.if_else(zero, pa.scalar(None, right.type), right))


def _remainder(values: Sequence[Values], failures: Failures) -> Values:
    left, right = _numbers(values)
    zero = pc.equal(right, pa.scalar(0, right.type))
    failures.add(pc.and_(zero, pc.is_valid(left)))
    right = pc.if_else(zero, pa.scalar(None, right.type), right)
    if right.type != _INTEGER:
        return pc.subtract(left, pc.multiply(pc.trunc(pc.divide(left, right)), right))
    return pc.subtract(left, pc.multiply(pc.divide(left, right), right))


def _compared(sign: str) -> Callable[[Sequence[Values], Failures], Values]:
    """NaN equals itself, and is greater than any number."""

    def computed(values: Sequence[Values], _: Failures) -> Values:
        left, right = _numbers(values)
        if sign in ("=", "<>"):
            same = _same(left, right)
            return same if sign == "=" else pc.invert(same)
        if sign in (">", "<="):
            left, right = right, left
        less = _less(left, right)
        return less if sign in ("<", ">") else pc.invert(less)

    return computed


def _same(left: Values, right: Values) -> Values:
    plain = pc.equal(left, right)
    if not (pa.types.is_floating(left.type) and pa.types.is_floating(right.type)):
        return plain
    return pc.or_(plain, pc.and_(pc.is_nan(left), pc.is_nan(right)))


def _less(left: Values, right: Values) -> Values:
    plain = pc.less(left, right)
    if not (pa.types.is_floating(left.type) and pa.types.is_floating(right.type)):
        return plain
    return pc.or_(plain, pc.and_(pc.invert(pc.is_nan(left)), pc.is_nan(right)))


def _chosen(values: Sequence[Values], _: Failures) -> Values:
    """CASE: conditions and results in turn, and what is left at the end."""
    *pairs, found = values
    for condition, result in zip(reversed(pairs[::2]), reversed(pairs[1::2]), strict=True):
        found = pc.if_else(pc.coalesce(condition, pa.scalar(False)), result, found)
    return found


def _simple(function: Callable[..., Any]) -> Callable[[Sequence[Values], Failures], Values]:
    return lambda values, _: function(*values)


OPERATIONS: dict[str, Callable[[Sequence[Values], Failures], Values]] = {
    "+": _checked(pc.add, pc.add_checked),
    "-": _checked(pc.subtract, pc.subtract_checked),
    "*": _checked(pc.multiply, pc.multiply_checked),
    "negative": _checked(pc.negate, pc.negate_checked),
    "abs": _checked(pc.abs, pc.abs_checked),
    "/": _divided,
    "%": _remainder,
    **{sign: _compared(sign) for sign in ("=", "<>", "<", "<=", ">", ">=")},
    "and": lambda values, _: reduce(pc.and_kleene, values),
    "or": lambda values, _: reduce(pc.or_kleene, values),
    "not": _simple(pc.invert),
    "is null": _simple(pc.is_null),
    "is true": lambda values, _: pc.coalesce(values[0], pa.scalar(False)),
    "case": _chosen,
    "coalesce": lambda values, _: pc.coalesce(*_numbers(values)),
    "least": lambda values, _: pc.min_element_wise(*_numbers(values)),
    "greatest": lambda values, _: pc.max_element_wise(*_numbers(values)),
    "like": lambda values, _: pc.match_like(values[0], values[1].as_py()),
    "lower": _simple(pc.utf8_lower),
    "upper": _simple(pc.utf8_upper),
    "length": lambda values, _: pc.cast(pc.utf8_length(values[0]), pa.int32()),
    "floor": lambda values, failures: converted(
        pc.floor(converted(values[0], pa.float64(), failures.add)), _INTEGER, failures.add
    ),
    "sqrt": lambda values, failures: pc.sqrt(converted(values[0], pa.float64(), failures.add)),
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
