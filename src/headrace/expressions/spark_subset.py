"""Which expressions Arrow computes with exactly Spark's results; they are compiled, and the others
are left to Spark.

A few kinds suffice for most row-local steps: columns, literals, arithmetic with a DOUBLE result,
comparisons of numbers and of texts, logic, IS NULL, IN and BETWEEN. The tests compare every
expression that is compiled here with Spark, on rows with edge cases. Fields of JSON texts are
computed optimistically: a value that may differ from Spark's is noticed, and its batch is computed
again by Spark.
"""

from __future__ import annotations

import pyarrow as pa
from sqlglot import exp

from headrace.columnar.json_fields import NAME
from headrace.expressions.compiler import Compiler
from headrace.expressions.evaluator import (
    ColumnReference,
    Constant,
    JsonField,
    JsonNumber,
    Node,
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


class _LeftToSpark(Exception):
    """Arrow's result may differ from Spark's."""


def compile_to_arrow(
    expression: Expression, schema: pa.Schema, *, optimistic: bool = False
) -> Node | None:
    """The tree that computes an expression over a schema; None if Spark must compute it. With
    `optimistic`, also where some values may turn out to need Spark.
    """
    if expression.column is not None:
        return ColumnReference(expression.column, expression.type)
    if expression.type is None or pa.types.is_decimal(expression.type):
        return None
    tree = parse_sql(expression.text, where="expression")
    subset = _SparkSubset(schema, optimistic=optimistic)
    try:
        if expression.failed is not None:
            # Spark counts the rows that fail. Of numbers in JSON they are noticed here too.
            return subset.json_number(tree)
        return Compiler(subset.resolve).node(tree)
    except _LeftToSpark:
        return None


class _SparkSubset:
    """Resolves leaves with the types that Spark gives them, and refuses operators on types for
    which the evaluator's results may differ from Spark's.
    """

    def __init__(self, schema: pa.Schema, *, optimistic: bool) -> None:
        self._checker = TypeChecker(schema, where="expression")
        self._optimistic = optimistic
        self._checked: dict[int, TypedExpression] = {}

    def _check(self, tree: exp.Expr) -> TypedExpression:
        """The typed expression of a node; cached, since each node is asked for by its parent
        too.
        """
        if id(tree) not in self._checked:
            self._checked[id(tree)] = self._checker.check(tree)
        return self._checked[id(tree)]

    def resolve(self, tree: exp.Expr) -> Node | None:
        match tree:
            case exp.Column() | exp.Literal() | exp.Boolean() | exp.Neg():
                return self._leaf(self._check(tree))
            case exp.Anonymous():
                return self._json_field(tree)
            case exp.Paren():
                is_exact = True
            case exp.Add() | exp.Sub() | exp.Mul() | exp.Div():
                is_exact = self._check(tree).type == DOUBLE and all(
                    _becomes_double(self._check(side)) for side in (tree.this, tree.expression)
                )
            case exp.EQ() | exp.NEQ() | exp.LT() | exp.LTE() | exp.GT() | exp.GTE():
                is_exact = self._compares_exactly(tree.this, tree.expression)
            case exp.And() | exp.Or():
                is_exact = all(self._check(side).type == BOOLEAN for side in tree.flatten())
            case exp.Not():
                is_exact = self._check(tree.this).type == BOOLEAN
            case exp.Is():
                is_exact = isinstance(tree.expression, exp.Null)
            case exp.In():
                # Spark finds one type for all values together.
                kinds = {self._check(each).type for each in (tree.this, *tree.expressions)}
                is_exact = kinds == {STRING} or all(map(is_integer, kinds))
            case exp.Between():
                is_exact = all(
                    self._compares_exactly(tree.this, tree.args[bound]) for bound in ("low", "high")
                )
            case _:
                is_exact = False
        if not is_exact:
            raise _LeftToSpark
        return None

    def _leaf(self, operand: TypedExpression) -> Node:
        if operand.column is not None:
            return ColumnReference(operand.column, operand.type)
        if operand.is_literal and (
            is_integer(operand.type) or operand.type in (DOUBLE, STRING, BOOLEAN)
        ):
            return Constant(operand.value, operand.type)
        if operand.is_literal and pa.types.is_decimal(operand.type):
            # Next to a number that becomes a DOUBLE; elsewhere the operation is refused.
            return Constant(float(operand.value), DOUBLE)
        raise _LeftToSpark

    def _compares_exactly(self, left: exp.Expr, right: exp.Expr) -> bool:
        operands = [self._check(side) for side in (left, right)]
        kinds = {operand.type for operand in operands}
        return (
            all(map(is_integer, kinds))
            or kinds == {STRING}
            or (DOUBLE in kinds and all(map(_becomes_double, operands)))
        )

    def json_number(self, tree: exp.Expr) -> Node:
        """A field of a JSON text as a number: CAST(get_json_object(…) AS DOUBLE)."""
        kind = self._check(tree).type
        if not isinstance(tree, exp.TryCast | exp.Cast) or kind not in (INT, BIGINT, DOUBLE):
            raise _LeftToSpark
        return JsonNumber(self._json_field(tree.this, floating=kind == DOUBLE), kind)

    def _json_field(self, tree: exp.Expr, *, floating: bool = False) -> JsonField:
        if (
            not self._optimistic
            or not isinstance(tree, exp.Anonymous)
            or tree.name.lower() != "get_json_object"
        ):
            raise _LeftToSpark
        column, path = (self._check(each) for each in tree.expressions)
        name = str(path.value).removeprefix("$.")
        if (
            column.column is None
            or column.type != STRING
            or path.value != f"$.{name}"
            or not NAME.fullmatch(name)
        ):
            raise _LeftToSpark
        return JsonField(ColumnReference(column.column, STRING), name, floating)


def _becomes_double(operand: TypedExpression) -> bool:
    """Whether Arrow converts a value to DOUBLE as Spark does. A decimal that is no literal may be
    rounded differently.
    """
    return (
        is_integer(operand.type)
        or operand.type in (FLOAT, DOUBLE)
        or (operand.is_literal and bool(pa.types.is_decimal(operand.type)))
    )
