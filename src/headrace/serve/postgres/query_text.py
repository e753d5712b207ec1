"""The text of a query, between what a client sends and what DuckDB runs: parameters with their
types, names without the schema `public`, and what columns without a name are called.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headrace.serve.postgres import errors, values
from headrace.serve.postgres.catalogue_query import FUNCTIONS
from headrace.serve.postgres.catalogue_tables import TABLES
from headrace.serve.postgres.errors import SqlError
from headrace.serve.postgres.lexer import PARAMETER, QUOTED, WORD, SqlStatement, SqlToken, split
from headrace.serve.postgres.parameters import DUCKDB_TYPES

_SQL_WORDS = TABLES | {
    "information_schema",
    "pg_catalog",
    "regclass",
    "regtype",
    "regnamespace",
    "oid",
}
_CALL = re.compile(r"([A-Za-z_]\w*)\((.*)\)", re.DOTALL)


def column_name(name: str, statement: SqlStatement) -> str:
    """The name of a column that the query gives none, as Postgres would call it: DuckDB takes the
    whole expression.
    """
    if name.isidentifier() or f'"{name}"' in statement.text:
        return name
    call = _CALL.fullmatch(name)
    if call is None:
        return name if re.fullmatch(r"[\w $#@.\-]+", name) and not name[0].isdigit() else "?column?"
    function = call[1].lower().removeprefix("_")
    if function == "cast":
        inner = call[2].rpartition(" AS ")[0]
        return column_name(inner, statement)
    if function == "count_star":
        return "count"
    return function.removeprefix("to_") if function.startswith("to_reg") else function


def mentions(statement: SqlStatement, view: str) -> bool:
    return any(
        token.kind in {WORD, QUOTED} and token.name.lower() == view.lower()
        for token in statement.tokens
    )


def is_about_catalogue(statement: SqlStatement) -> bool:
    """Whether a query asks for what there is, rather than for the rows of views."""
    for number, token in enumerate(statement.tokens):
        lowered = token.lowered
        if lowered in _SQL_WORDS or token.name in {"information_schema", "pg_catalog"}:
            return True
        if lowered in FUNCTIONS:
            following = (
                statement.tokens[number + 1].text if number + 1 < len(statement.tokens) else ""
            )
            is_keyword = lowered in {
                "current_user",
                "session_user",
                "current_catalog",
                "current_schema",
            }
            if following == "(" or is_keyword:
                return True
    return False


def without_schema(text: str, database: str) -> str:
    """A query without the schema `public` and the database before its names."""
    parts, at = [], 0
    for statement in split(text):
        tokens = statement.tokens
        number = 0
        while number < len(tokens):
            names = [tokens[number].name, _name_at(tokens, number + 2)]
            steps = 0
            if _is_dot(tokens, number + 1) and names[0] == "public":
                steps = 2
            elif (
                names[0] == database.lower()
                and names[1] == "public"
                and _is_dot(tokens, number + 1)
                and _is_dot(tokens, number + 3)
            ):
                steps = 4
            is_inside = number > 0 and tokens[number - 1].text == "."
            if steps and not is_inside:
                start = statement.start + tokens[number].start
                parts.append(text[at:start])
                at = statement.start + tokens[number + steps].start
                number += steps
            number += 1
    return "".join([*parts, text[at:]])


def _name_at(tokens: Sequence[SqlToken], at: int) -> str:
    return tokens[at].name if at < len(tokens) else ""


def _is_dot(tokens: Sequence[SqlToken], at: int) -> bool:
    return at + 1 < len(tokens) and tokens[at].text == "."


def with_parameters(
    statement: SqlStatement, types: Sequence[int], parameters: Sequence[Any]
) -> tuple[str, list[Any]]:
    """A query whose parameters have their types, and their values in order of number. A parameter
    that it does not use is left out.
    """
    used = sorted({int(token.text[1:]) for token in statement.tokens if token.kind == PARAMETER})
    if used and used[-1] > len(parameters):
        raise SqlError(errors.UNDEFINED_PARAMETER, f"there is no parameter ${used[-1]}")
    numbers = {number: place for place, number in enumerate(used, 1)}
    parts, at = [], 0
    for token in statement.tokens:
        if token.kind != PARAMETER:
            continue
        number = int(token.text[1:])
        name = f"${numbers[number]}"
        oid = types[number - 1] if number <= len(types) else 0
        is_exact = oid == values.NUMERIC and parameters[number - 1] is not None
        kind = None if is_exact else _duckdb_type(oid)
        parts += [statement.text[at : token.start], f"CAST({name} AS {kind})" if kind else name]
        at = token.end
    text = "".join([*parts, statement.text[at:]])
    return text, [parameters[number - 1] for number in used]


def _duckdb_type(oid: int) -> str | None:
    element = values.ARRAY_ELEMENTS.get(oid)
    if element is not None:
        inner = DUCKDB_TYPES.get(element)
        return None if inner is None else f"{inner}[]"
    return DUCKDB_TYPES.get(oid)
