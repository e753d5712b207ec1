"""The typed tree of an expression, and its evaluation over whole Arrow columns: for the steps of a
plan whose expressions need no Spark, and for the conditions and measures of patterns. `compiler`
builds the tree from SQL.

The tree of `amount * 2 > 10`, over a column of DOUBLE:

    Operation(">", (Operation("*", (ColumnReference("amount"), Constant(2))), Constant(10)))

Results are Spark's: nulls as in SQL; NaN equals itself and is greater than any number; integers are
BIGINT, and other numbers are DOUBLE. What fails on a row (a division by zero, a number that is too
large) is null there, and noted in `Failures`.

From top to bottom: the nodes; the operations; CAST; and `Projection` and `Filter`, the row-local
steps that the task which reads the rows computes, so that the rows need not go through Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import json_fields
from headrace.columnar.buffers import Mask
from headrace.columnar.columns import ORDER_FIELDS
from headrace.expressions import arrow_functions

Values = Any
"""A column, or a single value that stands for all rows."""
Inputs = Any
"""The columns that an expression reads: a record batch by their names, or a list by numbers."""


@dataclass
class Failures:
    """The rows on which something failed."""

    rows: Mask

    def add(self, failed: Values) -> None:
        """Note the rows for which a mask is true."""
        if isinstance(failed, pa.Scalar):
            self.rows |= bool(failed.as_py())
        elif pc.any(failed).as_py():
            self.rows |= failed.fill_null(False).to_numpy(zero_copy_only=False)


# Nodes


@dataclass(frozen=True)
class ColumnReference:
    """A column of the input, by its name or its number."""

    key: str | int
    type: pa.DataType

    def evaluate(self, inputs: Inputs, _: Failures | None = None) -> Values:
        return inputs[self.key]


@dataclass(frozen=True)
class Constant:
    """A literal value of a type."""

    value: Any
    type: pa.DataType

    def evaluate(self, _: Inputs, __: Failures | None = None) -> Values:
        return pa.scalar(self.value, self.type)


@dataclass(frozen=True)
class Operation:
    """One of OPERATIONS, with its operands. `operation` builds it, and finds its type."""

    name: str
    operands: tuple[Node, ...]
    type: pa.DataType

    def evaluate(self, inputs: Inputs, failures: Failures | None = None) -> Values:
        values = [operand.evaluate(inputs, failures) for operand in self.operands]
        return OPERATIONS[self.name](values, failures)


@dataclass(frozen=True)
class Cast:
    """CAST or TRY_CAST: null where it fails."""

    operand: Node
    type: pa.DataType

    def evaluate(self, inputs: Inputs, failures: Failures | None = None) -> Values:
        return cast_values(self.operand.evaluate(inputs, failures), self.type, failures)


@dataclass(frozen=True)
class JsonField:
    """A field of a JSON object in a text column. Raises `json_fields.NeedsSpark` at rows that are
    Spark's.
    """

    text: ColumnReference
    name: str
    floating: bool = False
    type: pa.DataType = pa.string()  # noqa: RUF009  # types do not change

    def evaluate(self, inputs: Inputs, _: Failures | None = None) -> Values:
        return json_fields.field(self.text.evaluate(inputs), self.name, floating=self.floating)


@dataclass(frozen=True)
class JsonNumber:
    """A field of a JSON object in a text column, cast to a number type."""

    field: JsonField
    type: pa.DataType

    def evaluate(self, inputs: Inputs, _: Failures | None = None) -> Values:
        texts = self.field.evaluate(inputs)
        return (
            json_fields.floating_numbers(texts)
            if pa.types.is_floating(self.type)
            else json_fields.whole_numbers(texts, self.type)
        )


@dataclass(frozen=True)
class FunctionCall:
    """A function of `arrow_functions`, of one column and parameters that are written out. Raises
    `json_fields.NeedsSpark` at values that are Spark's.
    """

    name: str
    operand: Node
    parameters: tuple[Any, ...]
    type: pa.DataType

    def evaluate(self, inputs: Inputs, failures: Failures | None = None) -> Values:
        values = self.operand.evaluate(inputs, failures)
        return arrow_functions.FUNCTIONS[self.name](values, *self.parameters)


@dataclass(frozen=True)
class Infallible:
    """An expression, of which batches without a failure are computed here. A row on which it fails
    is for Spark to count: it raises `json_fields.NeedsSpark`.
    """

    operand: Node
    type: pa.DataType

    def evaluate(self, inputs: Inputs, _: Failures | None = None) -> Values:
        failures = Failures(np.zeros(inputs.num_rows, np.bool_))
        values = self.operand.evaluate(inputs, failures)
        if failures.rows.any():
            raise json_fields.NeedsSpark
        return values


Node = (
    ColumnReference
    | Constant
    | Operation
    | Cast
    | JsonField
    | JsonNumber
    | FunctionCall
    | Infallible
)


def operation(name: str, *operands: Node) -> Operation:
    """An operation on operands. Its type is found by computing it over no rows.

    Raises:
        pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError: the operands' types do not
            fit.
    """
    no_rows = [_over_no_rows(operand) for operand in operands]
    return Operation(name, operands, OPERATIONS[name](no_rows, None).type)


def cast(operand: Node, kind: pa.DataType) -> Cast:
    """A cast to a type.

    Raises:
        pa.ArrowInvalid, pa.ArrowNotImplementedError: there is no such cast.
    """
    cast_values(_over_no_rows(operand), kind, None)
    return Cast(operand, kind)


def _over_no_rows(node: Node) -> Values:
    return node.evaluate(()) if _is_constant(node) else pa.nulls(0, node.type)


def _is_constant(node: Node) -> bool:
    if isinstance(node, Operation):
        return all(map(_is_constant, node.operands))
    return isinstance(node, Constant) or (isinstance(node, Cast) and _is_constant(node.operand))


# Operations

_BIGINT = pa.int64()
BIGINT_LIMIT = float(2**63)


def is_integer_or_float(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _common_numbers(values: Sequence[Values]) -> list[Values]:
    """Integers as BIGINT; with other numbers among them, all as DOUBLE. They are converted as Java
    does: a BIGINT becomes the nearest DOUBLE.
    """
    kinds = [value.type for value in values]
    if not all(map(is_integer_or_float, kinds)):
        return list(values)
    kind = _BIGINT if all(map(pa.types.is_integer, kinds)) else pa.float64()
    return [value if value.type == kind else pc.cast(value, kind, safe=False) for value in values]


def _note(failures: Failures | None, failed: Values) -> None:
    if failures is not None:
        failures.add(failed)


def _is_true_anywhere(values: Values) -> bool:
    return bool((values if isinstance(values, pa.Scalar) else pc.any(values)).as_py())


def _checked_arithmetic(
    plain: Callable[..., Any], checked: Callable[..., Any]
) -> Callable[[Sequence[Values], Failures | None], Values]:
    def compute(values: Sequence[Values], failures: Failures | None) -> Values:
        values = _common_numbers(values)
        if values[0].type != _BIGINT or values[-1].type != _BIGINT:
            return plain(*values)
        try:
            return checked(*values)
        except pa.ArrowInvalid:
            about = plain(*(pc.cast(value, pa.float64(), safe=False) for value in values))
            too_large = pc.greater_equal(pc.abs(about), BIGINT_LIMIT)
            _note(failures, too_large)
            return pc.if_else(too_large, pa.scalar(None, _BIGINT), plain(*values))

    return compute


def _without_zeros(left: Values, right: Values, failures: Failures | None) -> Values:
    """The divisors, null where they are zero; that fails where there is a dividend."""
    zero = pc.equal(right, pa.scalar(0, right.type))
    if not _is_true_anywhere(zero):
        return right
    _note(failures, pc.and_(zero, pc.is_valid(left)))
    return pc.if_else(zero, pa.scalar(None, right.type), right)


def _divide(values: Sequence[Values], failures: Failures | None) -> Values:
    left, right = values
    if not pa.types.is_duration(left.type):
        left = cast_values(left, pa.float64(), failures)
    right = cast_values(right, pa.float64(), failures)
    return pc.divide(left, _without_zeros(left, right, failures))


def _remainder(values: Sequence[Values], failures: Failures | None) -> Values:
    left, right = _common_numbers(values)
    right = _without_zeros(left, right, failures)
    quotient = pc.divide(left, right)
    if right.type != _BIGINT:
        quotient = pc.trunc(quotient)
    return pc.subtract(left, pc.multiply(quotient, right))


def _comparison(sign: str) -> Callable[[Sequence[Values], Failures | None], Values]:
    def compute(values: Sequence[Values], _: Failures | None) -> Values:
        left, right = _common_numbers(values)
        if sign in (">", "<="):
            left, right = right, left
        result = (_equal if sign in ("=", "<>") else _less)(left, right)
        return result if sign in ("=", "<", ">") else pc.invert(result)

    return compute


def _equal(left: Values, right: Values) -> Values:
    """NaN equals itself."""
    is_equal = pc.equal(left, right)
    if pa.types.is_floating(left.type) and pa.types.is_floating(right.type):
        nan_left, nan_right = pc.is_nan(left), pc.is_nan(right)
        if _is_true_anywhere(nan_right) and _is_true_anywhere(nan_left):
            return pc.or_(is_equal, pc.and_(nan_left, nan_right))
    return is_equal


def _less(left: Values, right: Values) -> Values:
    """NaN is greater than any number."""
    is_less = pc.less(left, right)
    if pa.types.is_floating(left.type) and pa.types.is_floating(right.type):
        nan_right = pc.is_nan(right)
        if _is_true_anywhere(nan_right):
            return pc.or_(is_less, pc.and_(pc.invert(pc.is_nan(left)), nan_right))
    return is_less


def _case(values: Sequence[Values], _: Failures | None) -> Values:
    """CASE: conditions and results in turn, and the default at the end."""
    *pairs, chosen = values
    for condition, result in zip(reversed(pairs[::2]), reversed(pairs[1::2]), strict=True):
        chosen = pc.if_else(pc.coalesce(condition, pa.scalar(False)), result, chosen)
    return chosen


def _floor(values: Sequence[Values], failures: Failures | None) -> Values:
    floored = pc.floor(cast_values(values[0], pa.float64(), failures))
    return cast_values(floored, _BIGINT, failures)


OPERATIONS: dict[str, Callable[[Sequence[Values], Failures | None], Values]] = {
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
    "not": lambda values, _: pc.invert(values[0]),
    "is null": lambda values, _: pc.is_null(values[0]),
    "is true": lambda values, _: pc.coalesce(values[0], pa.scalar(False)),
    "case": _case,
    "coalesce": lambda values, _: pc.coalesce(*_common_numbers(values)),
    "least": lambda values, _: pc.min_element_wise(*_common_numbers(values)),
    "greatest": lambda values, _: pc.max_element_wise(*_common_numbers(values)),
    "concat": lambda values, _: pc.binary_join_element_wise(*values, ""),
    "like": lambda values, _: pc.match_like(values[0], values[1].as_py()),
    "lower": lambda values, _: pc.utf8_lower(values[0]),
    "upper": lambda values, _: pc.utf8_upper(values[0]),
    "length": lambda values, _: pc.cast(pc.utf8_length(values[0]), pa.int32()),
    "floor": _floor,
    "sqrt": lambda values, failures: pc.sqrt(cast_values(values[0], pa.float64(), failures)),
}


# CAST, as Spark has it: a value that cannot be cast fails on its own row alone

# Tuples, not Arrow arrays: making one loads pandas, which a declaration need not wait for.
_TRUE = ("t", "true", "y", "yes", "1")
_FALSE = ("f", "false", "n", "no", "0")
_INTEGER_TEXT = r"^[+-]?[0-9]{1,37}$"
_NUMBER = r"(?i)^[+-]?([0-9]+\.?[0-9]*(e[+-]?[0-9]+)?|\.[0-9]+(e[+-]?[0-9]+)?|nan|inf|infinity)$"
_LARGEST_DECIMAL = pa.decimal128(38, 0)


def cast_values(values: Values, kind: pa.DataType, failures: Failures | None) -> Values:
    """Cast values to another type; null where that fails."""
    source = values.type
    if pa.types.is_string(source) and kind != source:
        return _cast_text(values, kind, failures)
    if pa.types.is_timestamp(source) and is_integer_or_float(kind):
        micros = pc.cast(pc.cast(values, pa.timestamp("us", source.tz)), pa.int64())
        seconds = pc.divide(pc.cast(micros, pa.float64(), safe=False), pa.scalar(1e6))
        return cast_values(
            pc.floor(seconds) if pa.types.is_integer(kind) else seconds, kind, failures
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
        raise pa.ArrowNotImplementedError(f"a cast from {source} to STRING is not computed here")
    if pa.types.is_integer(kind):
        always_fits = (
            pa.types.is_boolean(source)
            or pa.types.is_null(source)
            or (pa.types.is_integer(source) and source.bit_width <= kind.bit_width)
        )
        if not always_fits:
            return _to_integers(values, kind, failures)
    return pc.cast(values, kind, safe=False)


def _to_integers(numbers: Values, kind: pa.DataType, failures: Failures | None) -> Values:
    """Numbers as integers of a type; null where they do not fit."""
    limit = float(2 ** (kind.bit_width - 1))
    about = pc.cast(numbers, pa.float64(), safe=False)
    fits = pc.and_(pc.greater(about, pa.scalar(-limit - 1)), pc.less(about, pa.scalar(limit)))
    _note(failures, pc.invert(fits))
    return pc.cast(pc.if_else(fits, numbers, pa.scalar(None, numbers.type)), kind, safe=False)


def _cast_text(texts: Values, kind: pa.DataType, failures: Failures | None) -> Values:
    try:
        return pc.cast(texts, kind)
    except pa.ArrowInvalid:
        texts = pc.utf8_trim_whitespace(texts)
    if pa.types.is_boolean(kind):
        lower = pc.utf8_lower(texts)
        is_true = pc.is_in(lower, value_set=pa.array(_TRUE))
        known = pc.or_(is_true, pc.is_in(lower, value_set=pa.array(_FALSE)))
        _note(failures, pc.and_(pc.is_valid(texts), pc.invert(known)))
        return pc.if_else(known, is_true, pa.scalar(None, pa.bool_()))
    fits = pc.match_substring_regex(texts, _INTEGER_TEXT if pa.types.is_integer(kind) else _NUMBER)
    _note(failures, pc.invert(fits))
    plain = pc.replace_substring_regex(
        pc.if_else(fits, texts, pa.scalar(None, pa.string())), r"^\+", ""
    )
    if pa.types.is_integer(kind):
        return _to_integers(pc.cast(plain, _LARGEST_DECIMAL), kind, failures)
    return pc.cast(plain, kind)


# Row-local steps


@dataclass(frozen=True)
class Projection:
    """Replaces a batch's columns by computed ones. The order columns (`ORDER_FIELDS`) are kept."""

    columns: tuple[tuple[str, Node], ...]
    schema: pa.Schema

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = []
        for name, node in self.columns:
            values = node.evaluate(rows)
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

    condition: Node

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        is_true = self.condition.evaluate(rows)
        if isinstance(is_true, pa.Scalar):
            return rows if is_true.as_py() else rows.slice(0, 0)
        return rows.filter(is_true)


RowStep = Callable[[pa.RecordBatch], pa.RecordBatch]
"""A row-local step over rows with their order columns: a `Projection`, a `Filter`, a look-up."""
