"""Expression trees over Arrow columns, and the row-local steps `Projection` and `Filter` built from
them. The task that reads the rows evaluates them column by column, so that the rows need not go
through Spark.

The results are exactly Spark's: nulls as in SQL; NaN equals itself and is greater than any number.
`headrace.expressions.spark_subset` decides which SQL expressions become such a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import json_fields
from headrace.columnar.columns import ORDER_FIELDS

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": pc.add,
    "-": pc.subtract,
    "*": pc.multiply,
    "/": pc.divide,
}
COMPARISONS = ("=", "<>", "<", "<=", ">", ">=")


@dataclass(frozen=True)
class ColumnReference:
    """A column of the input."""

    name: str

    def evaluate(self, rows: pa.RecordBatch) -> Any:
        return rows.column(self.name)


@dataclass(frozen=True)
class Constant:
    """A literal value of a type."""

    value: Any
    type: pa.DataType

    def evaluate(self, _rows: pa.RecordBatch) -> Any:
        return pa.scalar(self.value, self.type)


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic on DOUBLE, which cannot fail."""

    operator: str
    left: ArrowExpression
    right: ArrowExpression

    def evaluate(self, rows: pa.RecordBatch) -> Any:
        return ARITHMETIC[self.operator](
            _convert(self.left.evaluate(rows), pa.float64()),
            _convert(self.right.evaluate(rows), pa.float64()),
        )


@dataclass(frozen=True)
class Comparison:
    """A comparison of two values as `type`: integers as BIGINT, floats as DOUBLE, texts by their
    bytes.
    """

    operator: str
    left: ArrowExpression
    right: ArrowExpression
    type: pa.DataType

    def evaluate(self, rows: pa.RecordBatch) -> Any:
        left, right = (
            _convert(self.left.evaluate(rows), self.type),
            _convert(self.right.evaluate(rows), self.type),
        )
        equal, less = (
            (_nan_equal, _nan_less) if pa.types.is_floating(self.type) else (pc.equal, pc.less)
        )
        if self.operator in ("=", "<>"):
            is_equal = equal(left, right)
            return is_equal if self.operator == "=" else pc.invert(is_equal)
        if self.operator in ("<", ">="):
            is_below = less(left, right)
            return is_below if self.operator == "<" else pc.invert(is_below)
        is_above = less(right, left)
        return is_above if self.operator == ">" else pc.invert(is_above)


@dataclass(frozen=True)
class Logic:
    """AND, OR and NOT in SQL's three-valued logic, and IS NULL."""

    operator: str
    operands: tuple[ArrowExpression, ...]

    def evaluate(self, rows: pa.RecordBatch) -> Any:
        values = [operand.evaluate(rows) for operand in self.operands]
        if self.operator == "is null":
            return pc.is_null(values[0])
        if self.operator == "not":
            return pc.invert(values[0])
        return reduce(pc.and_kleene if self.operator == "and" else pc.or_kleene, values)


@dataclass(frozen=True)
class JsonField:
    """A field of a JSON object in a text column. Raises `json_fields.NeedsSpark` at rows that are
    Spark's.
    """

    text: ColumnReference
    name: str
    floating: bool = False

    def evaluate(self, rows: pa.RecordBatch) -> Any:
        return json_fields.field(self.text.evaluate(rows), self.name, floating=self.floating)


@dataclass(frozen=True)
class JsonNumber:
    """A field of a JSON object in a text column, cast to a number type."""

    field: JsonField
    type: pa.DataType

    def evaluate(self, rows: pa.RecordBatch) -> Any:
        texts = self.field.evaluate(rows)
        return (
            json_fields.floating_numbers(texts)
            if pa.types.is_floating(self.type)
            else json_fields.whole_numbers(texts, self.type)
        )


ArrowExpression = (
    ColumnReference | Constant | Arithmetic | Comparison | Logic | JsonField | JsonNumber
)


def _convert(values: Any, kind: pa.DataType) -> Any:
    """Values as another type, converted as Java does: a BIGINT becomes the nearest DOUBLE."""
    return values if values.type == kind else pc.cast(values, kind, safe=False)


def _nan_equal(left: Any, right: Any) -> Any:
    nan_left, nan_right = pc.is_nan(left), pc.is_nan(right)
    is_equal = pc.equal(left, right)
    if _any(nan_left) and _any(nan_right):
        return pc.or_(is_equal, pc.and_(nan_left, nan_right))
    return is_equal


def _nan_less(left: Any, right: Any) -> Any:
    nan_right = pc.is_nan(right)
    is_less = pc.less(left, right)
    if _any(nan_right):
        return pc.or_(is_less, pc.and_(pc.invert(pc.is_nan(left)), nan_right))
    return is_less


def _any(values: Any) -> bool:
    scalar = values if isinstance(values, pa.Scalar) else pc.any(values)
    return bool(scalar.as_py())


# Row-local steps


@dataclass(frozen=True)
class Projection:
    """Replaces a batch's columns by computed ones. The order columns (`ORDER_FIELDS`) are kept."""

    columns: tuple[tuple[str, ArrowExpression], ...]
    schema: pa.Schema

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = []
        for name, expression in self.columns:
            values = expression.evaluate(rows)
            if isinstance(values, pa.Scalar):
                values = pa.repeat(values, rows.num_rows)
            kind = self.schema.field(name).type
            columns.append(values if values.type == kind else values.cast(kind))
        order = [rows.column(field.name) for field in ORDER_FIELDS]
        return pa.RecordBatch.from_arrays(
            [*columns, *order], schema=pa.schema([*self.schema, *ORDER_FIELDS])
        )


@dataclass(frozen=True)
class Filter:
    """Keeps the rows for which a condition is true."""

    condition: ArrowExpression

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        is_true = self.condition.evaluate(rows)
        if isinstance(is_true, pa.Scalar):
            return rows if is_true.as_py() else rows.slice(0, 0)
        return rows.filter(is_true)


RowStep = Projection | Filter
