"""Compiles expressions to nodes that are computed over Arrow columns, with exactly Spark's results.
Other expressions are left to Spark.

A few kinds suffice for most row-local steps: columns, literals, arithmetic with a DOUBLE result,
comparisons of numbers and of texts, logic, IS NULL, IN and BETWEEN. The tests compare every
expression that is compiled here with Spark, on rows with edge cases. Fields of JSON texts are
computed optimistically: a value that may differ from Spark's is noticed, and its batch is computed
again by Spark.

The nodes are in `headrace.expressions.evaluator`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pyarrow as pa
from sqlglot import exp

from headrace.columnar.json_fields import NAME
from headrace.expressions.evaluator import (
    Arithmetic,
    ArrowExpression,
    ColumnReference,
    Comparison,
    Constant,
    JsonField,
    JsonNumber,
    Logic,
)
from headrace.expressions.expression import Expression
from headrace.expressions.parser import parse_sql
from headrace.expressions.type_checker import TypeChecker
from headrace.expressions.type_rules import (
    BIGINT,
    BOOLEAN,
    DOUBLE,
    FLOAT,
    INT,
    STRING,
    is_integer,
)
from headrace.expressions.typed_expression import TypedExpression

_ARITHMETIC = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/"}
_COMPARISONS = {exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">="}


class _NotComputable(Exception):
    """The expression is left to Spark."""


def compile_to_arrow(
    expression: Expression, schema: pa.Schema, *, optimistic: bool = False
) -> ArrowExpression | None:
    """The node that computes an expression over a schema; None if Spark must compute it. With
    `optimistic`, also where some values may turn out to need Spark.
    """
    if expression.column is not None:
        return ColumnReference(expression.column)
    if expression.type is None or pa.types.is_decimal(expression.type):
        return None
    try:
        compiler = _Compiler(schema, optimistic=optimistic)
        tree = parse_sql(expression.text, where="expression")
        if expression.failed is not None:
            # Spark counts the rows that fail. Of numbers in JSON they are noticed here too.
            return compiler.json_number(tree)
        return compiler.node(tree)
    except _NotComputable:
        return None


class _Compiler:
    """Compiles sqlglot's tree, with the types that the type checker finds."""

    def __init__(self, schema: pa.Schema, *, optimistic: bool) -> None:
        self._checker = TypeChecker(schema, where="expression")
        self._optimistic = optimistic

    def node(self, tree: exp.Expr) -> ArrowExpression:
        handler = self._handlers.get(type(tree))
        if handler is None:
            raise _NotComputable
        return handler(self, tree)

    def _operand(self, tree: exp.Expr) -> TypedExpression:
        return self._checker.check(tree)

    def _leaf(self, tree: exp.Expr) -> ArrowExpression:
        operand = self._operand(tree)
        if operand.column is not None:
            return ColumnReference(operand.column)
        if operand.is_literal and (
            is_integer(operand.type) or operand.type in (DOUBLE, STRING, BOOLEAN)
        ):
            return Constant(operand.value, operand.type)
        if operand.is_literal and pa.types.is_decimal(operand.type):
            # Next to a number that becomes a DOUBLE; elsewhere the operation is refused.
            return Constant(float(operand.value), DOUBLE)
        raise _NotComputable

    def _within(self, tree: exp.Paren) -> ArrowExpression:
        return self.node(tree.this)

    def _arithmetic(self, tree: exp.Binary) -> ArrowExpression:
        if self._operand(tree).type != DOUBLE or not all(
            _becomes_double(self._operand(side)) for side in (tree.this, tree.expression)
        ):
            raise _NotComputable
        return Arithmetic(_ARITHMETIC[type(tree)], self.node(tree.this), self.node(tree.expression))

    def _comparison(self, tree: exp.Binary) -> ArrowExpression:
        return self._compared(_COMPARISONS[type(tree)], tree.this, tree.expression)

    def _compared(self, sign: str, left: exp.Expr, right: exp.Expr) -> ArrowExpression:
        operands = [self._operand(side) for side in (left, right)]
        kinds = {operand.type for operand in operands}
        if all(map(is_integer, kinds)):
            common = BIGINT
        elif kinds == {STRING}:
            common = STRING
        elif DOUBLE in kinds and all(map(_becomes_double, operands)):
            common = DOUBLE
        else:
            raise _NotComputable
        return Comparison(sign, self.node(left), self.node(right), common)

    def _both(self, tree: exp.Binary) -> ArrowExpression:
        return Logic(
            "and" if isinstance(tree, exp.And) else "or",
            (self._truth(tree.this), self._truth(tree.expression)),
        )

    def _not(self, tree: exp.Not) -> ArrowExpression:
        return Logic("not", (self._truth(tree.this),))

    def _truth(self, tree: exp.Expr) -> ArrowExpression:
        if self._operand(tree).type != BOOLEAN:
            raise _NotComputable
        return self.node(tree)

    def _is(self, tree: exp.Is) -> ArrowExpression:
        if not isinstance(tree.expression, exp.Null):
            raise _NotComputable
        return Logic("is null", (self.node(tree.this),))

    def _in(self, tree: exp.In) -> ArrowExpression:
        # Spark finds one type for all values together.
        kinds = {self._operand(each).type for each in (tree.this, *tree.expressions)}
        if kinds != {STRING} and not all(map(is_integer, kinds)):
            raise _NotComputable
        return Logic("or", tuple(self._compared("=", tree.this, each) for each in tree.expressions))

    def _between(self, tree: exp.Between) -> ArrowExpression:
        return Logic(
            "and",
            (
                self._compared(">=", tree.this, tree.args["low"]),
                self._compared("<=", tree.this, tree.args["high"]),
            ),
        )

    def json_number(self, tree: exp.Expr) -> ArrowExpression:
        """A field of a JSON text as a number: CAST(get_json_object(…) AS DOUBLE)."""
        kind = self._operand(tree).type
        if not isinstance(tree, exp.TryCast | exp.Cast) or kind not in (INT, BIGINT, DOUBLE):
            raise _NotComputable
        return JsonNumber(self._json_field(tree.this, floating=kind == DOUBLE), kind)

    def _json_field(self, tree: exp.Expr, *, floating: bool = False) -> JsonField:
        if (
            not self._optimistic
            or not isinstance(tree, exp.Anonymous)
            or tree.name.lower() != "get_json_object"
        ):
            raise _NotComputable
        column, path = (self._operand(each) for each in tree.expressions)
        name = str(path.value).removeprefix("$.")
        if (
            column.column is None
            or column.type != STRING
            or path.value != f"$.{name}"
            or not NAME.fullmatch(name)
        ):
            raise _NotComputable
        return JsonField(ColumnReference(column.column), name, floating)

    _handlers: ClassVar[dict[type[exp.Expr], Callable[[_Compiler, Any], ArrowExpression]]] = {
        **dict.fromkeys((exp.Column, exp.Literal, exp.Boolean, exp.Neg), _leaf),
        exp.Paren: _within,
        **dict.fromkeys(_ARITHMETIC, _arithmetic),
        **dict.fromkeys(_COMPARISONS, _comparison),
        exp.And: _both,
        exp.Or: _both,
        exp.Not: _not,
        exp.Is: _is,
        exp.In: _in,
        exp.Between: _between,
        exp.Anonymous: _json_field,
    }


def _becomes_double(operand: TypedExpression) -> bool:
    """Whether Arrow converts a value to DOUBLE as Spark does. A decimal that is no literal may be
    rounded differently.
    """
    return (
        is_integer(operand.type)
        or operand.type in (FLOAT, DOUBLE)
        or (operand.is_literal and bool(pa.types.is_decimal(operand.type)))
    )
