"""An aggregate as a plan holds it: its kind, column, options and the type of its result.

`hr.agg` (`functions`) builds specs; `factory` turns them into accumulators. Result types follow
Spark's own aggregates, so that a pipeline and a Spark query over the same rows agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from headrace.expressions.type_rules import MAX_DECIMAL_DIGITS, is_number

SKETCHES = frozenset({"approx_distinct", "quantiles", "heavy_hitters", "bloom"})
"""Kinds with approximate results."""

STREAMS_ONLY = SKETCHES | {"decayed_sum"}
"""Kinds that cannot retract rows."""

KEEPS_VALUES = frozenset(
    {
        "min",
        "max",
        "first",
        "last",
        "min_by",
        "max_by",
        "median",
        "collect",
        "collect_set",
        "count_distinct",
    }
)
"""Kinds that keep values of a group so that they can retract them, up to the option `most`."""

NEVER_REJECTING = frozenset(
    {"count", "count_if", "sum", "rate", "avg", "min", "max", "min_by", "max_by", "first", "last"}
)
"""Kinds that never make dead letters of the rows of a stream."""

ORDERED = frozenset({"first", "last", "min_by", "max_by"})
"""Kinds that choose a row by the option `by`, a column or (until the plan is built) an expression.
`first` and `last` without it go by arrival.
"""

ARRIVAL = "_arrival"
"""The `by` of `first` and `last` that says: by arrival, although the rows have an event time."""


class UnfitType(Exception):
    """An aggregate does not support a column's type; `fits` describes the types that
    it supports.
    """

    def __init__(self, fits: str) -> None:
        super().__init__(fits)
        self.fits = fits


@dataclass(frozen=True)
class AggregateSpec:
    """One aggregate. `column` is a column or, until the plan is built, a Spark SQL expression; None
    counts rows. `type` is the type of the result, None until the spec is bound to its input.
    `where` is the condition for a row to count, which is part of the columns once the spec is bound
    (`conditional`).
    """

    kind: str
    column: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    type: pa.DataType | None = None
    where: str | None = None

    def option(self, name: str, default: Any = None) -> Any:
        """The value of an option."""
        return dict(self.options).get(name, default)

    @property
    def is_sketch(self) -> bool:
        """Whether the result is approximate."""
        return self.kind in SKETCHES

    @property
    def takes_tables(self) -> bool:
        """Whether the aggregate can retract rows."""
        return (
            bool(self.option("aggregate").retractable)
            if self.kind == "custom"
            else self.kind not in STREAMS_ONLY
        )

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that the aggregate reads: its own, its time column if it has one, and those
        by which it compares rows.
        """
        own = (name for name in (self.column, self.option("time")) if name is not None)
        return (*own, *self.compared)

    @property
    def compared(self) -> tuple[str, ...]:
        """The columns besides its own by which rows are compared: that of `by`, and the further
        columns of `count_distinct`.
        """
        by = self.option("by")
        return (*([] if by is None else [by]), *self.option("more", ()))

    def with_expressions(self, rewrite: Callable[[str], str]) -> AggregateSpec:
        """The aggregate over other expressions: each of its own, rewritten."""
        changed: dict[str, Any] = {}
        by = self.option("by")
        if isinstance(by, str) and by != ARRIVAL:
            changed["by"] = rewrite(by)
        if self.option("more"):
            changed["more"] = tuple(rewrite(each) for each in self.option("more"))
        return replace(
            self,
            column=None if self.column is None else rewrite(self.column),
            where=None if self.where is None else rewrite(self.where),
            options=tuple((name, changed.get(name, value)) for name, value in self.options),
        )

    def former(self) -> AggregateSpec:
        """The aggregate before its results changed: `first` and `last` went by arrival, and
        `count_distinct` did not count values above its limit.
        """
        if self.kind not in {"first", "last", "count_distinct"}:
            return self
        return replace(
            self, options=tuple(each for each in self.options if each[0] not in {"by", "or_null"})
        )

    def without_bounds(self) -> AggregateSpec:
        """The spec without the limit on the values that it keeps."""
        if self.kind not in KEEPS_VALUES:
            return self
        return replace(
            self,
            options=tuple(each for each in self.options if each[0] not in {"most", "when_full"}),
        )

    def conditional(self) -> AggregateSpec:
        """The aggregate without `where`, over expressions that are null on the other rows.

            sum("amount", where="is_paid")     sum("CASE WHEN is_paid THEN amount END")
            count(where="is_paid")             count_if("is_paid")

        `first`, `last`, `min_by` and `max_by` may choose a row whose value is null; of those it is
        the column by which rows are compared that is null. Rows that are compared by arrival all
        have the same value there.
        """
        if self.where is None:
            return self
        spec = replace(self, where=None)
        if self.kind == "count" and self.column is None:
            return replace(spec, kind="count_if", column=self.where)
        if self.kind == "rate" and self.column is None:
            return replace(spec, column=self._if_true("1", otherwise="0"))
        if self.kind not in ORDERED:
            return replace(spec, column=self._if_true(str(self.column)))
        by = self.option("by")
        compared = self._if_true("0" if by in (None, ARRIVAL) else by)
        others = tuple(option for option in self.options if option[0] != "by")
        return replace(spec, options=(*others, ("by", compared)))

    def _if_true(self, text: str, otherwise: str = "NULL") -> str:
        """The value of an expression where the condition holds. A comment ends with its line."""
        parts = ("CASE WHEN", self.where, "THEN", text, "ELSE", otherwise, "END")
        return ("\n" if "--" in f"{self.where}{text}" else " ").join(map(str, parts))

    def bound(self, column: str | None, column_type: pa.DataType | None) -> AggregateSpec:
        """The spec over a column of a known type. Raises UnfitType if it does not
        support the type.
        """
        return replace(self, column=column, type=result_type(self, column_type))

    def __str__(self) -> str:
        arguments = [
            *([self.column] if self.column is not None else []),
            *(f"{name}={value!r}" for name, value in self.options),
            *([] if self.where is None else [f"where={self.where!r}"]),
        ]
        return f"{self.kind}({', '.join(arguments)})"


def result_type(spec: AggregateSpec, column_type: pa.DataType | None) -> pa.DataType:
    """The type of an aggregate's result. Raises UnfitType if it does not support the
    column's type.
    """
    if spec.kind == "custom":
        result: pa.DataType = spec.option("aggregate").result_type
        return result
    if column_type is None:
        return pa.float64() if spec.kind == "rate" else pa.int64()
    return _RESULTS[spec.kind](spec, column_type)


def check_order(kind: pa.DataType) -> None:
    """Raise UnfitType if values of a type cannot be compared."""
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        raise UnfitType(_ORDERED_TYPES)


_ORDERED_TYPES = (
    "plain types, which have an order: numbers, STRING, BINARY, BOOLEAN, dates, times and intervals"
)


def _count(_: AggregateSpec, __: pa.DataType) -> pa.DataType:
    return pa.int64()


def _sum(_: AggregateSpec, kind: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_decimal(kind):
        return pa.decimal128(min(kind.precision + 10, MAX_DECIMAL_DIGITS), kind.scale)
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_duration(kind):
        return kind
    raise UnfitType("numbers and INTERVAL DAY TO SECOND")


def _avg(_: AggregateSpec, kind: pa.DataType) -> pa.DataType:
    if pa.types.is_decimal(kind):
        return pa.decimal128(
            min(kind.precision + 4, MAX_DECIMAL_DIGITS), min(kind.scale + 4, MAX_DECIMAL_DIGITS)
        )
    if is_number(kind):
        return pa.float64()
    if pa.types.is_duration(kind):
        return kind
    raise UnfitType("numbers and INTERVAL DAY TO SECOND")


def _stddev(_: AggregateSpec, kind: pa.DataType) -> pa.DataType:
    if is_number(kind):
        return pa.float64()
    raise UnfitType("numbers")


def _same_if_ordered(_: AggregateSpec, kind: pa.DataType) -> pa.DataType:
    check_order(kind)
    return kind


def _same(_: AggregateSpec, kind: pa.DataType) -> pa.DataType:
    return kind


def _collect(_: AggregateSpec, kind: pa.DataType) -> pa.DataType:
    return pa.list_(kind)


def _collect_set(spec: AggregateSpec, kind: pa.DataType) -> pa.DataType:
    return pa.list_(_same_if_ordered(spec, kind))


def _count_if(_: AggregateSpec, kind: pa.DataType) -> pa.DataType:
    if not pa.types.is_boolean(kind):
        raise UnfitType("a condition, which is BOOLEAN")
    return pa.int64()


def _distinct(spec: AggregateSpec, kind: pa.DataType) -> pa.DataType:
    _same_if_ordered(spec, kind)
    return pa.int64()


def _quantiles(spec: AggregateSpec, kind: pa.DataType) -> pa.DataType:
    _stddev(spec, kind)
    return pa.list_(pa.float64()) if isinstance(spec.option("at"), tuple) else pa.float64()


def _heavy_hitters(spec: AggregateSpec, kind: pa.DataType) -> pa.DataType:
    _same_if_ordered(spec, kind)
    fields = [
        pa.field("value", kind),
        pa.field("count", pa.int64()),
        pa.field("at_least", pa.int64()),
        pa.field("at_most", pa.int64()),
    ]
    return pa.list_(pa.struct(fields))


def _bloom(spec: AggregateSpec, kind: pa.DataType) -> pa.DataType:
    _same_if_ordered(spec, kind)
    return pa.binary()


_RESULTS: dict[str, Callable[[AggregateSpec, pa.DataType], pa.DataType]] = {
    "count": _count,
    "sum": _sum,
    "avg": _avg,
    "min": _same_if_ordered,
    "max": _same_if_ordered,
    "first": _same,
    "last": _same,
    "min_by": _same,
    "max_by": _same,
    "collect": _collect,
    "collect_set": _collect_set,
    "count_if": _count_if,
    "count_distinct": _distinct,
    "median": _stddev,
    "stddev": _stddev,
    "variance": _stddev,
    "rate": _stddev,
    "decayed_sum": _stddev,
    "approx_distinct": _distinct,
    "quantiles": _quantiles,
    "heavy_hitters": _heavy_hitters,
    "bloom": _bloom,
}
KINDS = (*_RESULTS, "custom")
