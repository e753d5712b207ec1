"""Expressions over what a match has so far, as a tree of a few kinds of nodes: made by `reading` from what a user wrote, computed over whole columns. Nothing else is ever run.

They mean what they mean in Spark SQL. What fails on a row (a division by zero, a number that is too large) is null there, and counted; a condition that is null does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.operators.buffers import Mask
from headrace.operators.patterns.casting import converted
from headrace.operators.patterns.terms import Term

Values = Any
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
        return OPERATIONS[self.name]([each.over(given, failures) for each in self.operands], failures)


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

_WHOLE = pa.int64()
_LARGEST = float(2**63)


def _numbers(values: Sequence[Values]) -> list[Values]:
    """Whole numbers as BIGINT; with others among them, all as DOUBLE."""
    kinds = [value.type for value in values]
    if not all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in kinds):
        return list(values)
    kind = _WHOLE if all(map(pa.types.is_integer, kinds)) else pa.float64()
    return [value if value.type == kind else pc.cast(value, kind, safe=False) for value in values]


def _checked(plain: Callable[..., Any], checked: Callable[..., Any]) -> Callable[[Sequence[Values], Failures], Values]:
    def computed(values: Sequence[Values], failures: Failures) -> Values:
        values = _numbers(values)
        if values[0].type != _WHOLE or values[-1].type != _WHOLE:
            return plain(*values)
        try:
            return checked(*values)
        except pa.ArrowInvalid:
            about = plain(*(pc.cast(value, pa.float64(), safe=False) for value in values))
            too_large = pc.greater_equal(pc.abs(about), _LARGEST)
            failures.add(too_large)
            return pc.if_else(too_large, pa.scalar(None, _WHOLE), plain(*values))

    return computed


def _divided(values: Sequence[Values], failures: Failures) -> Values:
    left, right = (value if pa.types.is_duration(value.type) else converted(value, pa.float64(), failures.add) for value in values)
    zero = pc.equal(right, pa.scalar(0.0))
    failures.add(pc.and_(zero, pc.is_valid(left)))
    return pc.divide(left, pc.if_else(zero, pa.scalar(None, right.type), right))


def _remainder(values: Sequence[Values], failures: Failures) -> Values:
    left, right = _numbers(values)
    zero = pc.equal(right, pa.scalar(0, right.type))
    failures.add(pc.and_(zero, pc.is_valid(left)))
    right = pc.if_else(zero, pa.scalar(None, right.type), right)
    if right.type != _WHOLE:
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
    "floor": lambda values, failures: converted(pc.floor(converted(values[0], pa.float64(), failures.add)), _WHOLE, failures.add),
    "sqrt": lambda values, failures: pc.sqrt(converted(values[0], pa.float64(), failures.add)),
}
FUNCTIONS = {"abs": (1, 1), "coalesce": (1, 20), "least": (2, 20), "greatest": (2, 20), "lower": (1, 1), "upper": (1, 1), "length": (1, 1), "floor": (1, 1), "sqrt": (1, 1)}
"""The functions that can be called, and how many arguments each takes."""
