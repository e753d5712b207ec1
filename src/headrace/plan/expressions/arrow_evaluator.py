"""Which expressions Python can compute over Arrow's columns with exactly Spark's results, and how.
The others are Spark's.

Few kinds are enough for most row-local steps: columns, literals, arithmetic that ends in DOUBLE,
comparisons of numbers and of texts, logic, IS NULL, IN and BETWEEN. The tests hold every expression
that is let through here against Spark, on rows where everything goes wrong. Fields of JSON texts
are computed *hopefully*: rows of which Python is not sure are noticed, and their batch is done
again by Spark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pyarrow as pa
from sqlglot import exp

from headrace.columnar.expressions import (
    Arithmetic,
    ArrowExpression,
    ColumnReference,
    Comparison,
    Constant,
    JsonField,
    JsonNumber,
    Logic,
)
from headrace.columnar.json_fields import NAME
from headrace.plan.expressions import Expression
from headrace.plan.expressions.parser import parse
from headrace.plan.expressions.type_checker import Reader
from headrace.plan.expressions.type_rules import (
    BIGINT,
    BOOLEAN,
    DOUBLE,
    FLOAT,
    INT,
    STRING,
    is_integer,
)
from headrace.plan.expressions.typed_expression import TypedExpression

_ARITHMETIC = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/"}
_COMPARISONS = {exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">="}


class _NotHere(Exception):
    """An expression for Spark."""


def compile_to_arrow(
    expression: Expression, schema: pa.Schema, *, optimistic: bool = False
) -> ArrowExpression | None:
    """How to compute an expression that was read over a schema; None if that is Spark's. `hopeful`:
    also what may turn out to be Spark's at some row.
    """
    if expression.column is not None:
        return ColumnReference(expression.column)
    if expression.type is None or pa.types.is_decimal(expression.type):
        return None
    try:
        compiler = _Compiler(schema, optimistic=optimistic)
        tree = parse(expression.text, where="expression")
        if (
            expression.failed is not None
        ):  # rows that fail are counted, by Spark; of numbers in JSON those are noticed
            return compiler.json_number(tree)
        return compiler.node(tree)
    except _NotHere:
        return None


class _Compiler:
    """From sqlglot's tree, with the types that the reader tells."""

    def __init__(self, schema: pa.Schema, *, optimistic: bool) -> None:
        self._reader = Reader(schema, where="expression")
        self._optimistic = optimistic

    def node(self, tree: exp.Expr) -> ArrowExpression:
        maker = self._makers.get(type(tree))
        if maker is None:
            raise _NotHere
        return maker(self, tree)

    def _piece(self, tree: exp.Expr) -> TypedExpression:
        return self._reader.read(tree)

    def _leaf(self, tree: exp.Expr) -> ArrowExpression:
        piece = self._piece(tree)
        if piece.column is not None:
            return ColumnReference(piece.column)
        if piece.is_literal and (is_integer(piece.type) or piece.type in (DOUBLE, STRING, BOOLEAN)):
            return Constant(piece.value, piece.type)
        if piece.is_literal and pa.types.is_decimal(
            piece.type
        ):  # beside a number that becomes a DOUBLE; elsewhere it is refused
            return Constant(float(piece.value), DOUBLE)
        raise _NotHere

    def _within(self, tree: exp.Paren) -> ArrowExpression:
        return self.node(tree.this)

    def _arithmetic(self, tree: exp.Binary) -> ArrowExpression:
        if self._piece(tree).type != DOUBLE or not all(
            _becomes_double(self._piece(side)) for side in (tree.this, tree.expression)
        ):
            raise _NotHere
        return Arithmetic(_ARITHMETIC[type(tree)], self.node(tree.this), self.node(tree.expression))

    def _comparison(self, tree: exp.Binary) -> ArrowExpression:
        return self._compared(_COMPARISONS[type(tree)], tree.this, tree.expression)

    def _compared(self, sign: str, left: exp.Expr, right: exp.Expr) -> ArrowExpression:
        pieces = [self._piece(side) for side in (left, right)]
        kinds = {piece.type for piece in pieces}
        if all(map(is_integer, kinds)):
            common = BIGINT
        elif kinds == {STRING}:
            common = STRING
        elif DOUBLE in kinds and all(map(_becomes_double, pieces)):
            common = DOUBLE
        else:
            raise _NotHere
        return Comparison(sign, self.node(left), self.node(right), common)

    def _both(self, tree: exp.Binary) -> ArrowExpression:
        return Logic(
            "and" if isinstance(tree, exp.And) else "or",
            (self._truth(tree.this), self._truth(tree.expression)),
        )

    def _not(self, tree: exp.Not) -> ArrowExpression:
        return Logic("not", (self._truth(tree.this),))

    def _truth(self, tree: exp.Expr) -> ArrowExpression:
        if self._piece(tree).type != BOOLEAN:
            raise _NotHere
        return self.node(tree)

    def _is(self, tree: exp.Is) -> ArrowExpression:
        if not isinstance(tree.expression, exp.Null):
            raise _NotHere
        return Logic("is null", (self.node(tree.this),))

    def _in(self, tree: exp.In) -> ArrowExpression:
        alike = {self._piece(each).type for each in (tree.this, *tree.expressions)}
        if alike != {STRING} and not all(
            map(is_integer, alike)
        ):  # one type is found for all of them together
            raise _NotHere
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
        """CAST(get_json_object(…) AS a number)."""
        kind = self._piece(tree).type
        if not isinstance(tree, exp.TryCast | exp.Cast) or kind not in (INT, BIGINT, DOUBLE):
            raise _NotHere
        return JsonNumber(self._json_field(tree.this, floating=kind == DOUBLE), kind)

    def _json_field(self, tree: exp.Expr, *, floating: bool = False) -> JsonField:
        if (
            not self._optimistic
            or not isinstance(tree, exp.Anonymous)
            or tree.name.lower() != "get_json_object"
        ):
            raise _NotHere
        column, path = (self._piece(each) for each in tree.expressions)
        name = str(path.value).removeprefix("$.")
        if (
            column.column is None
            or column.type != STRING
            or path.value != f"$.{name}"
            or not NAME.fullmatch(name)
        ):
            raise _NotHere
        return JsonField(ColumnReference(column.column), name, floating)

    _makers: ClassVar[dict[type[exp.Expr], Callable[[_Compiler, Any], ArrowExpression]]] = {
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


def _becomes_double(piece: TypedExpression) -> bool:
    """Whether Arrow converts it as Spark does. A decimal that is not written out may be rounded
    differently.
    """
    return (
        is_integer(piece.type)
        or piece.type in (FLOAT, DOUBLE)
        or (piece.is_literal and bool(pa.types.is_decimal(piece.type)))
    )
