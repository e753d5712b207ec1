"""Spark SQL expressions, checked when they are declared, without Spark. `read` is what others use."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import sqlglot
from sqlglot import exp

from headrace.errors import BadExpression, UnknownColumn


@dataclass(frozen=True)
class Expression:
    """An expression that was read over a schema.

    `column` is the name of the column it is, if it is nothing else. `type` is the type of its result, None where it cannot be told.
    `sql` is what it means, spelled out; `safe` the same with every operation that can fail giving null instead; `failed` is a condition that is true
    exactly for the rows on which one failed, None if none can.
    """

    text: str
    column: str | None
    columns: tuple[str, ...]
    type: pa.DataType | None
    sql: str
    safe: str
    failed: str | None


def read_named(text: str, schema: pa.Schema, *, where: str) -> tuple[str | None, Expression]:
    """An expression with its name behind AS; a column names itself."""
    try:
        tree = sqlglot.parse_one(text, dialect="spark")
    except sqlglot.errors.ParseError as error:
        raise BadExpression(f"The step {where} has an expression that cannot be read: {error}") from None
    name = tree.alias if isinstance(tree, exp.Alias) else None
    tree = tree.this if isinstance(tree, exp.Alias) else tree
    for column in tree.find_all(exp.Column):
        if column.name not in schema.names:
            raise UnknownColumn(column.name, schema.names, where=f"The step {where}")
    column = tree.name if isinstance(tree, exp.Column) else None
    sql = tree.sql("spark")
    kind = None if column is None else schema.field(column).type
    return name or column, Expression(sql, column, tuple(dict.fromkeys(each.name for each in tree.find_all(exp.Column))), kind, sql, sql, None)


def read(text: str, schema: pa.Schema, *, where: str) -> Expression:
    return read_named(text, schema, where=where)[1]
