"""Spark SQL expressions, checked when they are declared, without Spark: syntax, columns, types, and
what could fail on a row.

`read` is what others use. Only what is known to look at one row, to be the same each time and not
to bring a worker down is let through (`reading` has the kinds of nodes, `catalogue` and `functions`
the functions).
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from sqlglot import exp

from headrace.errors import BadExpression
from headrace.plan.expressions.literals import quoted_name
from headrace.plan.expressions.parser import parse
from headrace.plan.expressions.type_checker import Reader
from headrace.plan.expressions.type_rules import MONTHS, VOID
from headrace.plan.expressions.typed_expression import MAX_TEXT, ExpressionRefused, TypedExpression

__all__ = ["Expression", "failed", "parse_expression", "parse_named_expression", "safe"]


@dataclass(frozen=True)
class Expression:
    """An expression that was read over a schema.

    `column` is the name of the column it is, if it is nothing else. `columns` are those it reads.
    `type` is the type of its result, None where it has none of its own (a bare NULL). `sql` is what
    it means, spelled out; `safe` the same with every operation that can fail giving null instead;
    `failed` is a condition, never null, that is true exactly for the rows on which one failed
    although its operands were not null; None if none can.
    """

    text: str
    column: str | None
    columns: tuple[str, ...]
    type: pa.DataType | None
    sql: str
    safe: str
    failed: str | None


def parse_expression(text: str, schema: pa.Schema, *, where: str) -> Expression:
    """An expression over a schema. BadExpression or UnknownColumn, naming the step (`where`), if it
    cannot be used.

    The exact name of a column is that column, whatever it would mean in SQL.
    """
    if text in schema.names:
        return _column(text, schema)
    return _read(parse(text, where=where), text, schema, where=where)


def parse_named_expression(
    text: str, schema: pa.Schema, *, where: str
) -> tuple[str | None, Expression]:
    """An expression that may have its name behind AS; a column names itself."""
    if text in schema.names:
        return text, _column(text, schema)
    tree = parse(text, where=where)
    if not isinstance(tree, exp.Alias):
        expression = _read(tree, text, schema, where=where)
        return expression.column, expression
    return tree.alias, _read(tree.this, _without_name(text, tree), schema, where=where)


def _column(name: str, schema: pa.Schema) -> Expression:
    quoted = quoted_name(name)
    return Expression(name, name, (name,), schema.field(name).type, quoted, quoted, None)


def _without_name(text: str, tree: exp.Alias) -> str:
    """What the user wrote before AS, as it was written."""
    end = tree.args["alias"].meta.get("start")
    before = text if end is None else text[: int(end)].rstrip().rstrip("`").rstrip()
    return (
        before[:-2].rstrip()
        if before[-3:].lower().endswith("as") and not before[-3:-2].isalnum()
        else before
    )


def safe(text: str, schema: pa.Schema) -> str:
    """The same expression, with null where it would fail."""
    return parse_expression(text, schema, where="expression").safe


def failed(text: str, schema: pa.Schema) -> str | None:
    """A condition that is true for the rows on which the expression fails."""
    return parse_expression(text, schema, where="expression").failed


def _read(tree: exp.Expr, text: str, schema: pa.Schema, *, where: str) -> Expression:
    reader = Reader(schema, where=f"The step {where}")
    try:
        piece = reader.read(tree)
    except ExpressionRefused as refused:
        raise BadExpression(
            f"The step {where} cannot use {text!r}: {refused.message}", fix=refused.fix
        ) from None
    except RecursionError:
        raise BadExpression(
            f"The step {where} has an expression that is nested too deeply.",
            fix="split it with with_columns.",
        ) from None
    if len(piece.safe) + len(piece.failed or "") > MAX_TEXT:
        raise BadExpression(
            f"The step {where} has an expression that is nested too deeply: {text[:80]!r}….",
            fix="split it with with_columns.",
        )
    return Expression(
        text,
        piece.column,
        tuple(reader.columns),
        _column_type(piece),
        piece.sql,
        piece.safe,
        piece.failed,
    )


def _column_type(piece: TypedExpression) -> pa.DataType | None:
    """Some types are only steps on the way."""
    return None if piece.type in (VOID, MONTHS) else piece.type
