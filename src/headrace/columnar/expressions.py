"""Row-local steps that Python does itself, over whole columns, in the task that reads the rows:
they need not go through Spark, which would turn each into an object.

What can be done here is said in `pipeline.expressions.in_arrow`, and gives what Spark gives: null
and NaN as in SQL, where NaN equals itself and is greater than any number.
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
class Column:
    """A column of the input."""

    name: str

    def over(self, rows: pa.RecordBatch) -> Any:
        return rows.column(self.name)


@dataclass(frozen=True)
class Constant:
    value: Any
    type: pa.DataType

    def over(self, _rows: pa.RecordBatch) -> Any:
        return pa.scalar(self.value, self.type)


@dataclass(frozen=True)
class Arithmetic:
    """On DOUBLE, where nothing can fail."""

    sign: str
    left: Node
    right: Node

    def over(self, rows: pa.RecordBatch) -> Any:
        return ARITHMETIC[self.sign](
            _as(self.left.over(rows), pa.float64()), _as(self.right.over(rows), pa.float64())
        )


@dataclass(frozen=True)
class Comparison:
    """Of whole numbers as BIGINT, of floating ones as DOUBLE, of texts by their bytes: `type` says
    which.
    """

    sign: str
    left: Node
    right: Node
    type: pa.DataType

    def over(self, rows: pa.RecordBatch) -> Any:
        left, right = _as(self.left.over(rows), self.type), _as(self.right.over(rows), self.type)
        equal, less = (
            (_nan_equal, _nan_less) if pa.types.is_floating(self.type) else (pc.equal, pc.less)
        )
        if self.sign in ("=", "<>"):
            same = equal(left, right)
            return same if self.sign == "=" else pc.invert(same)
        if self.sign in ("<", ">="):
            below = less(left, right)
            return below if self.sign == "<" else pc.invert(below)
        above = less(right, left)
        return above if self.sign == ">" else pc.invert(above)


@dataclass(frozen=True)
class Logic:
    """AND, OR and NOT with SQL's unknown; IS NULL."""

    word: str
    operands: tuple[Node, ...]

    def over(self, rows: pa.RecordBatch) -> Any:
        values = [each.over(rows) for each in self.operands]
        if self.word == "is null":
            return pc.is_null(values[0])
        if self.word == "not":
            return pc.invert(values[0])
        return reduce(pc.and_kleene if self.word == "and" else pc.or_kleene, values)


@dataclass(frozen=True)
class JsonField:
    """A field of a JSON object in a text column. Raises `json_fields.Inexact` at rows that are
    Spark's.
    """

    text: Column
    name: str
    floating: bool = False

    def over(self, rows: pa.RecordBatch) -> Any:
        return json_fields.field(self.text.over(rows), self.name, floating=self.floating)


@dataclass(frozen=True)
class JsonNumber:
    """The same as a number."""

    field: JsonField
    type: pa.DataType

    def over(self, rows: pa.RecordBatch) -> Any:
        texts = self.field.over(rows)
        return (
            json_fields.floating_numbers(texts)
            if pa.types.is_floating(self.type)
            else json_fields.whole_numbers(texts, self.type)
        )


Node = Column | Constant | Arithmetic | Comparison | Logic | JsonField | JsonNumber


def _as(values: Any, kind: pa.DataType) -> Any:
    """As Java converts numbers: a BIGINT becomes the nearest DOUBLE."""
    return values if values.type == kind else pc.cast(values, kind, safe=False)


def _nan_equal(left: Any, right: Any) -> Any:
    nan_left, nan_right = pc.is_nan(left), pc.is_nan(right)
    plain = pc.equal(left, right)
    return (
        pc.or_(plain, pc.and_(nan_left, nan_right)) if _any(nan_left) and _any(nan_right) else plain
    )


def _nan_less(left: Any, right: Any) -> Any:
    nan_right = pc.is_nan(right)
    plain = pc.less(left, right)
    return (
        pc.or_(plain, pc.and_(pc.invert(pc.is_nan(left)), nan_right)) if _any(nan_right) else plain
    )


def _any(values: Any) -> bool:
    found = values if isinstance(values, pa.Scalar) else pc.any(values)
    return bool(found.as_py())


# Steps


@dataclass(frozen=True)
class Compute:
    """New columns in the place of the old ones; the pipeline's order stays."""

    columns: tuple[tuple[str, Node], ...]
    schema: pa.Schema

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        made = [
            self._filled(node.over(rows), rows.num_rows, self.schema.field(name).type)
            for name, node in self.columns
        ]
        order = [rows.column(field.name) for field in ORDER_FIELDS]
        return pa.RecordBatch.from_arrays(
            [*made, *order], schema=pa.schema([*self.schema, *ORDER_FIELDS])
        )

    @staticmethod
    def _filled(values: Any, count: int, kind: pa.DataType) -> pa.Array:
        column = pa.repeat(values, count) if isinstance(values, pa.Scalar) else values
        return column if column.type == kind else column.cast(kind)


@dataclass(frozen=True)
class Keep:
    """The rows for which a condition is true."""

    condition: Node

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        fits = self.condition.over(rows)
        if isinstance(fits, pa.Scalar):
            return rows if fits.as_py() else rows.slice(0, 0)
        return rows.filter(fits)


RowStep = Compute | Keep
