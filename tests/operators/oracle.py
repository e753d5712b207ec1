"""The reference computation: rows in a list, a table in a dictionary, every aggregate from all
values that are there, tick by tick.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import ROUND_HALF_UP, Decimal, localcontext
from fractions import Fraction
from typing import Any

import pyarrow as pa

from headrace.columnar.keys import encode_keys
from headrace.operators.aggregates.specs import AggregateSpec, result_type

Row = dict[str, Any]
REMOVALS = {"delete", "update_preimage"}


@dataclass
class Oracle:
    """Groups as lists of their rows, in the order in which rows came; an update keeps its row's
    place.
    """

    schema: pa.Schema
    by: Sequence[str]
    aggregates: Sequence[tuple[str, AggregateSpec]]
    row_key: Sequence[str] = ()
    groups: dict[tuple[Any, ...], list[Row]] = field(default_factory=dict)

    def tick(self, number: int, rows: Iterable[Row]) -> list[Row]:
        """Take in a tick; give the changes it made, in their order."""
        before: dict[tuple[Any, ...], Row | None] = {}
        touched: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            group = tuple(plain(row[name]) for name in self.by)
            if group not in before:
                before[group] = self.result(group)
            touched.setdefault(group, []).append(row)
        for group, changes in touched.items():
            self._apply(group, changes)
        emitted = [
            change
            for group in self._in_order(before)
            for change in self._changes(before[group], self.result(group))
        ]
        return [{**change, "_tick": number} for change in emitted]

    def _apply(self, group: tuple[Any, ...], changes: list[Row]) -> None:
        old = self.groups.setdefault(group, [])
        current = list(old)
        for change in changes:
            row = {name: change[name] for name in self.schema.names}
            if change.get("_change_type") in REMOVALS:
                current.remove(next(each for each in current if repr(each) == repr(row)))
            else:
                current.append(row)
        self.groups[group] = self._keeping_places(old, current)

    def _keeping_places(self, old: list[Row], new: list[Row]) -> list[Row]:
        if not self.row_key:
            return new
        by_id = {self._id(row): row for row in new}
        stay = [by_id[self._id(row)] for row in old if self._id(row) in by_id]
        known = {self._id(row) for row in old}
        return stay + [row for row in new if self._id(row) not in known]

    def _id(self, row: Row) -> str:
        return repr([plain(row[name]) for name in self.row_key])

    def result(self, group: tuple[Any, ...]) -> Row | None:
        rows = self.groups.get(group)
        if not rows:
            return None
        key = dict(zip(self.by, group, strict=True))
        return key | {name: aggregated(spec, self.schema, rows) for name, spec in self.aggregates}

    def _changes(self, was: Row | None, now: Row | None) -> list[Row]:
        if was is None or now is None:
            return (
                [{**now, "_change_type": "insert"}]
                if now
                else [{**was, "_change_type": "delete"}]
                if was
                else []
            )
        if repr(was) == repr(now):
            return []
        return [
            {**was, "_change_type": "update_preimage"},
            {**now, "_change_type": "update_postimage"},
        ]

    def _in_order(self, groups: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        listed = list(groups)
        if not self.by:
            return listed
        columns = {
            name: pa.array([group[at] for group in listed], self.schema.field(name).type)
            for at, name in enumerate(self.by)
        }
        keys = encode_keys(pa.table(columns), list(self.by)).to_pylist()
        return [
            group for _, group in sorted(zip(keys, listed, strict=True), key=lambda pair: pair[0])
        ]


def plain(value: Any) -> Any:
    """One zero and one NaN, as keys have them."""
    if not isinstance(value, float):
        return value
    return math.nan if math.isnan(value) else value + 0.0


def aggregated(spec: AggregateSpec, schema: pa.Schema, rows: list[Row]) -> Any:
    if spec.column is None:
        return len(rows)
    everything = [row[spec.column] for row in rows]
    values = [value for value in everything if value is not None]
    kind = schema.field(spec.column).type
    if spec.kind in {"min_by", "max_by"}:
        counted = [row for row in rows if row[spec.option("by")] is not None]
        sign = 1 if spec.kind == "max_by" else -1
        ranked = sorted(counted, key=lambda row: row[spec.option("by")] * sign)
        return ranked[-1][spec.column] if ranked else None
    if spec.kind == "count_distinct" and spec.option("more"):
        names = (spec.column, *spec.option("more"))
        found = [tuple(plain(row[name]) for name in names) for row in rows]
        return len({repr(each) for each in found if None not in each})
    if spec.kind == "collect_set":
        return sorted({plain(value) for value in values}, key=in_order)
    if spec.kind in {"first", "last"}:
        considered = values if spec.option("ignore_nulls") else everything
        return (considered[0] if spec.kind == "first" else considered[-1]) if considered else None
    if spec.kind == "count":
        return len(values)
    if spec.kind == "count_distinct":
        return len(Counter(map(repr, map(plain, values))))
    if spec.kind == "collect":
        return values
    return OF_VALUES[spec.kind](spec, kind, values) if values else None


def sum_of(spec: AggregateSpec, kind: pa.DataType, values: list[Any]) -> Any:
    if pa.types.is_floating(kind):
        return exact_double(values)
    result = result_type(spec, kind)
    if pa.types.is_decimal(kind):
        with localcontext() as context:
            context.prec = 100
            total = sum(values, Decimal(0))
            return (
                total.quantize(Decimal(1).scaleb(-kind.scale))
                if abs(total).scaleb(kind.scale) < 10**result.precision
                else None
            )
    if pa.types.is_duration(kind):
        return sum(values, timedelta())
    total = sum(values)
    return total if -(1 << 63) <= total < 1 << 63 else None


def exact_double(values: list[float]) -> float:
    """The exact sum, rounded once; IEEE 754's rules for what is not finite."""
    odd = [value for value in values if not math.isfinite(value)]
    if odd:
        return math.nan if len({repr(value) for value in odd}) > 1 or math.isnan(odd[0]) else odd[0]
    return to_double(sum(map(Fraction, values), Fraction(0)))


def to_double(value: Fraction) -> float:
    try:
        return float(value) + 0.0
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def avg_of(spec: AggregateSpec, kind: pa.DataType, values: list[Any]) -> Any:
    if pa.types.is_floating(kind):
        return exact_double(values) / len(values)
    if pa.types.is_duration(kind):
        return rounded(
            Fraction(sum(values, timedelta()) // timedelta(microseconds=1), len(values))
        ) * timedelta(microseconds=1)
    if not pa.types.is_decimal(kind):
        return sum(values) / len(values)
    result = result_type(spec, kind)
    with localcontext() as context:
        context.prec = 100
        units = rounded(Fraction(sum(values, Decimal(0))) / len(values) * 10**result.scale)
        return Decimal(units).scaleb(-result.scale) if abs(units) < 10**result.precision else None


def rounded(value: Fraction) -> int:
    with localcontext() as context:
        context.prec = 200
        return int(
            (Decimal(value.numerator) / Decimal(value.denominator)).quantize(
                Decimal(1), rounding=ROUND_HALF_UP
            )
        )


def stddev_of(spec: AggregateSpec, _: pa.DataType, values: list[Any]) -> Any:
    fewer = 0 if spec.option("population") else 1
    if len(values) <= fewer:
        return None
    doubles = list(map(float, values))
    if not all(map(math.isfinite, doubles)):
        return math.nan
    exact = list(map(Fraction, doubles))
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / (len(exact) - fewer)
    scale = 1 << 2400
    return to_double(Fraction(math.isqrt(int(variance * scale * scale)), scale))


def extreme_of(largest: bool) -> Callable[[AggregateSpec, pa.DataType, list[Any]], Any]:
    def choose(_: AggregateSpec, __: pa.DataType, values: list[Any]) -> Any:
        return (max if largest else min)(values, key=in_order)

    return choose


def in_order(value: Any) -> Any:
    """NaN after all, and -0.0 before 0.0."""
    if not isinstance(value, float):
        return value
    return (
        math.isnan(value),
        0.0 if math.isnan(value) else value,
        0.0 if math.isnan(value) else math.copysign(1, value),
    )


def variance_of(spec: AggregateSpec, _: pa.DataType, values: list[Any]) -> Any:
    exact = [Fraction(float(value)) for value in values]
    fewer = 0 if spec.option("population") else 1
    if len(exact) <= fewer:
        return None
    mean = sum(exact, Fraction(0)) / len(exact)
    squares = sum(((value - mean) ** 2 for value in exact), Fraction(0))
    return to_double(squares / (len(exact) - fewer))


def median_of(_: AggregateSpec, __: pa.DataType, values: list[Any]) -> Any:
    ordered = sorted((plain(float(value)) for value in values), key=in_order)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if low == high else 0.5 * low + 0.5 * high


OF_VALUES: dict[str, Callable[[AggregateSpec, pa.DataType, list[Any]], Any]] = {
    "sum": sum_of,
    "avg": avg_of,
    "stddev": stddev_of,
    "variance": variance_of,
    "median": median_of,
    "min": extreme_of(largest=False),
    "max": extreme_of(largest=True),
}
