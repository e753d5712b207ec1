"""The types of a statement's parameters (`$1`, `$2`, …) that its client left open.

WHERE region = $1              the type of the column region
WHERE at BETWEEN $1 AND $2     the type of the column at
LIMIT $1                       bigint
$1::date                       what it is cast to
anything else                  text, as in Postgres
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from headrace.serve.postgres import values
from headrace.serve.postgres.errors import UNDEFINED_PARAMETER, SqlError
from headrace.serve.postgres.lexer import PARAMETER, QUOTED, WORD, SqlStatement, SqlToken
from headrace.serve.postgres.values import ARRAY_ELEMENTS, postgres_type

MAX_PARAMETERS = 1_000
_CASTS = {
    "bool": values.BOOL,
    "boolean": values.BOOL,
    "smallint": values.INT2,
    "int2": values.INT2,
    "int": values.INT4,
    "integer": values.INT4,
    "int4": values.INT4,
    "bigint": values.INT8,
    "int8": values.INT8,
    "real": values.FLOAT4,
    "float4": values.FLOAT4,
    "float": values.FLOAT8,
    "float8": values.FLOAT8,
    "double": values.FLOAT8,
    "numeric": values.NUMERIC,
    "decimal": values.NUMERIC,
    "text": values.TEXT_OID,
    "varchar": values.TEXT_OID,
    "name": values.NAME,
    "char": values.TEXT_OID,
    "string": values.TEXT_OID,
    "bytea": values.BYTEA,
    "blob": values.BYTEA,
    "date": values.DATE,
    "time": values.TIME,
    "timestamp": values.TIMESTAMP,
    "timestamptz": values.TIMESTAMPTZ,
    "oid": values.OID,
    "regclass": values.TEXT_OID,
    "interval": values.INTERVAL,
}
DUCKDB_TYPES = {
    values.BOOL: "BOOLEAN",
    values.INT2: "SMALLINT",
    values.INT4: "INTEGER",
    values.INT8: "BIGINT",
    values.OID: "UINTEGER",
    values.FLOAT4: "FLOAT",
    values.FLOAT8: "DOUBLE",
    values.NUMERIC: "DECIMAL(38, 10)",
    values.TEXT_OID: "VARCHAR",
    values.VARCHAR: "VARCHAR",
    values.BPCHAR: "VARCHAR",
    values.NAME: "VARCHAR",
    values.UNKNOWN: "VARCHAR",
    values.UUID: "VARCHAR",
    values.JSON: "VARCHAR",
    values.JSONB: "VARCHAR",
    values.BYTEA: "BLOB",
    values.DATE: "DATE",
    values.TIME: "TIME",
    values.TIMESTAMP: "TIMESTAMP",
    values.TIMESTAMPTZ: "TIMESTAMPTZ",
    values.INTERVAL: "INTERVAL",
}
_COMPARISONS = {"=", "<", ">", "!"}


def parameter_numbers(statement: SqlStatement) -> list[int]:
    """The numbers of the parameters in a statement, each once, in order.

    Raises:
        SqlError: There is a number that no parameter can have.
    """
    numbers = {int(token.text[1:]) for token in statement.tokens if token.kind == PARAMETER}
    if numbers and not 1 <= min(numbers) <= max(numbers) <= MAX_PARAMETERS:
        raise SqlError(UNDEFINED_PARAMETER, f"there is no parameter ${max(numbers)}")
    return sorted(numbers)


def parameter_types(
    statement: SqlStatement, given: Sequence[int], schemas: Iterable[pa.Schema]
) -> list[int]:
    """The type of each parameter of a statement.

    Args:
        statement: The statement.
        given: The types that the client names; 0 leaves one open.
        schemas: The columns of the views that the statement reads.
    """
    numbers = parameter_numbers(statement)
    count = max([len(given), *numbers], default=0)
    columns = _column_types(schemas)
    types = [*given, *[0] * (count - len(given))]
    for at, token in enumerate(statement.tokens):
        if token.kind == PARAMETER:
            number = int(token.text[1:]) - 1
            types[number] = types[number] or _guess(statement.tokens, at, columns)
    return [oid or values.TEXT_OID for oid in types]


def _column_types(schemas: Iterable[pa.Schema]) -> Mapping[str, int]:
    """The type of each column name that has one type in all views."""
    types: dict[str, int] = {}
    for schema in schemas:
        for field in schema:
            oid, name = postgres_type(field.type).oid, field.name.lower()
            types[name] = oid if types.get(name, oid) == oid else 0
    return types


def _guess(tokens: Sequence[SqlToken], at: int, columns: Mapping[str, int]) -> int:
    """The type of the parameter at a place; 0 if nothing says it."""
    if _text(tokens, at + 1) == "::":
        return _cast_type(tokens, at + 2)
    before = _lowered(tokens, at - 1)
    if _lowered(tokens, at - 2) == "cast" or (
        _text(tokens, at - 1) == "(" and _lowered(tokens, at - 2) == "cast"
    ):
        return _cast_type(tokens, at + 2) if _lowered(tokens, at + 1) == "as" else 0
    if before in {"limit", "offset"}:
        return values.INT8
    if before in {"like", "ilike"}:
        return values.TEXT_OID
    if before == "between":
        return _column(tokens, at - 2, columns)
    if before == "and" and _lowered(tokens, at - 3) == "between":
        return _column(tokens, at - 4, columns)
    if _text(tokens, at - 1) in _COMPARISONS:
        start = at - 1
        while start > 0 and _text(tokens, start - 1) in _COMPARISONS:
            start -= 1
        return _column(tokens, start - 1, columns)
    if _text(tokens, at - 1) == "(" and before == "" and _lowered(tokens, at - 2) in {"any", "all"}:
        element = _column(tokens, at - 4, columns)
        arrays = {each: array for array, each in ARRAY_ELEMENTS.items()}
        return arrays.get(element, 0)
    if _text(tokens, at - 1) in {"(", ","} and (listed := _in_list(tokens, at)) is not None:
        return _column(tokens, listed, columns)
    if _text(tokens, at + 1) in _COMPARISONS:
        end = at + 1
        while _text(tokens, end) in _COMPARISONS:
            end += 1
        return _column_ahead(tokens, end, columns)
    return 0


def _text(tokens: Sequence[SqlToken], at: int) -> str:
    return tokens[at].text if 0 <= at < len(tokens) else ""


def _lowered(tokens: Sequence[SqlToken], at: int) -> str:
    return tokens[at].lowered if 0 <= at < len(tokens) else ""


def _cast_type(tokens: Sequence[SqlToken], at: int) -> int:
    oid = _CASTS.get(_lowered(tokens, at), 0)
    following = [_lowered(tokens, at + step) for step in (1, 2, 3)]
    if oid == values.TIMESTAMP and following == ["with", "time", "zone"]:
        return values.TIMESTAMPTZ
    if oid and _text(tokens, at + 1) == "[":
        return next((array for array, each in ARRAY_ELEMENTS.items() if each == oid), 0)
    return oid


def _column(tokens: Sequence[SqlToken], at: int, columns: Mapping[str, int]) -> int:
    """The type of the column whose name ends at a token."""
    if 0 <= at < len(tokens) and tokens[at].kind in {WORD, QUOTED}:
        return columns.get(tokens[at].name.lower(), 0)
    return 0


def _column_ahead(tokens: Sequence[SqlToken], at: int, columns: Mapping[str, int]) -> int:
    while _text(tokens, at + 1) == "." and at + 2 < len(tokens):
        at += 2
    return _column(tokens, at, columns)


def _in_list(tokens: Sequence[SqlToken], at: int) -> int | None:
    """Where the column before `IN (…, $n` stands."""
    depth = 0
    for place in range(at - 1, -1, -1):
        if tokens[place].text == ")":
            depth += 1
        elif tokens[place].text == "(":
            if depth == 0:
                if _lowered(tokens, place - 1) != "in":
                    return None
                return place - 3 if _lowered(tokens, place - 2) == "not" else place - 2
            depth -= 1
    return None
