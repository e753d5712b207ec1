"""`parse_expression`: an expression of a step, parsed and checked over a schema."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from sqlglot import exp

from headrace.errors import BadExpression
from headrace.expressions.literals import quoted_name
from headrace.expressions.parser import parse_sql
from headrace.expressions.type_checker import TypeChecker
from headrace.expressions.type_rules import MONTHS, VOID
from headrace.expressions.typed_expression import MAX_TEXT, ExpressionRefused
from headrace.types.schema import is_variant


@dataclass(frozen=True)
class Expression:
    """An expression that was checked over a schema."""

    text: str
    """What the user wrote."""
    column: str | None
    """The column's name, if the expression is a column and nothing else."""
    columns: tuple[str, ...]
    """The columns it reads."""
    type: pa.DataType | None
    """The type of its result; None where it has none of its own (a bare NULL)."""
    sql: str
    """Spark SQL that fails on a row where an operation fails."""
    safe: str
    """Spark SQL in which an operation that fails gives null."""
    failed: str | None
    """A condition, never null, that is true exactly for the rows on which an operation fails
    although its operands are not null; None if none can fail.
    """


def parse_expression(text: str, schema: pa.Schema, *, where: str) -> Expression:
    """Parse and check an expression over a schema. A text that is exactly a column's name is that
    column, whatever it would be in SQL.

    Args:
        text: The expression.
        schema: The columns it may read.
        where: How errors call the step.

    Raises:
        BadExpression: It cannot be parsed, or is not allowed.
        UnknownColumn: It reads a column that does not exist.
    """
    if text in schema.names:
        return _column(text, schema)
    return _check(parse_sql(text, where=where), text, schema, where=where)


def parse_named_expression(
    text: str, schema: pa.Schema, *, where: str
) -> tuple[str | None, Expression]:
    """Parse and check an expression that may end in `AS name`. The name of a column is its own;
    other expressions without AS have none.
    """
    if text in schema.names:
        return text, _column(text, schema)
    tree = parse_sql(text, where=where)
    if not isinstance(tree, exp.Alias):
        expression = _check(tree, text, schema, where=where)
        return expression.column, expression
    return tree.alias, _check(tree.this, _without_name(text, tree), schema, where=where)


def _column(name: str, schema: pa.Schema) -> Expression:
    quoted = quoted_name(name)
    return Expression(
        text=name,
        column=name,
        columns=(name,),
        type=schema.field(name).type,
        sql=quoted,
        safe=quoted,
        failed=None,
    )


def _without_name(text: str, tree: exp.Alias) -> str:
    """The text before AS, as it was written."""
    end = tree.args["alias"].meta.get("start")
    before = text if end is None else text[: int(end)].rstrip().rstrip("`").rstrip()
    return (
        before[:-2].rstrip()
        if before[-3:].lower().endswith("as") and not before[-3:-2].isalnum()
        else before
    )


def parsed_text(text: str, columns: Collection[str], *, where: str) -> Any:
    """An expression's tree in plain values: two texts that differ in spaces, brackets, comments or
    the case of keywords have the same. Names of columns stay as they are written.

    Args:
        text: The expression.
        columns: The columns that it may read.
        where: How errors call the step.
    """
    return ["column", text] if text in columns else _plain_tree(parse_sql(text, where=where))


def _plain_tree(node: Any) -> Any:
    if isinstance(node, list):
        return [_plain_tree(each) for each in node]
    if not isinstance(node, exp.Expr):
        return str(node)
    if isinstance(node, exp.Paren):  # the tree says what belongs together
        return _plain_tree(node.this)
    if isinstance(node, exp.Column) and set(node.args) - {"this"} == {
        name for name, value in node.args.items() if name != "this" and not value
    }:
        return ["column", node.name]
    arguments = {
        name: _plain_tree(value)
        for name, value in sorted(node.args.items())
        if value not in (None, False, []) and name != "quoted"
    }
    if isinstance(node, exp.Anonymous):
        arguments["this"] = str(node.this).lower()
    return [type(node).__name__, arguments]


def safe(text: str, schema: pa.Schema) -> str:
    """An expression in Spark SQL, with null where it would fail."""
    return parse_expression(text, schema, where="expression").safe


def failed(text: str, schema: pa.Schema) -> str | None:
    """A condition that is true for the rows on which an expression fails; None if it cannot."""
    return parse_expression(text, schema, where="expression").failed


def _check(tree: exp.Expr, text: str, schema: pa.Schema, *, where: str) -> Expression:
    checker = TypeChecker(schema, where=f"The step {where}")
    try:
        typed = checker.check(tree)
    except ExpressionRefused as refused:
        raise BadExpression(
            f"The step {where} cannot use {text!r}: {refused.message}", fix=refused.fix
        ) from None
    except RecursionError:
        raise BadExpression(
            f"The step {where} has an expression that is nested too deeply.",
            fix="split it with with_columns.",
        ) from None
    if typed.column is None and is_variant(typed.type):
        raise BadExpression(
            f"The step {where} cannot use {text!r}: it gives a VARIANT, and Spark cannot hand over"
            " a computed one that is null.",
            fix="take out what you need, variant_get(…, '$.name', 'STRING'), or write to_json(…).",
        )
    if len(typed.safe) + len(typed.failed or "") > MAX_TEXT:
        raise BadExpression(
            f"The step {where} has an expression that is nested too deeply: {text[:80]!r}….",
            fix="split it with with_columns.",
        )
    has_column_type = typed.type not in (VOID, MONTHS)
    return Expression(
        text=text,
        column=typed.column,
        columns=tuple(checker.columns),
        type=typed.type if has_column_type else None,
        sql=typed.sql,
        safe=typed.safe,
        failed=typed.failed,
    )
