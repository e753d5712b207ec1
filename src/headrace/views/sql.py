"""SQL over views, from people and programs that are not trusted with more: reading only, the views
only, known functions only, for a limited time.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from headrace.errors import BadQuery, InputError, UnknownView, nearest
from headrace.views.file import is_about_storage

MAX_SQL_ROWS = 1_000_000
_MAX_VALUE_BYTES = 64 << 20
_STEPS_BETWEEN_LOOKS = 10_000
_ROWS_A_FETCH = 4_096
_TABLE_FUNCTIONS = frozenset({"json_each", "json_tree"})
_FUNCTION_NAMES = """
    abs char coalesce concat concat_ws format glob hex ifnull iif instr length like lower ltrim max min nullif octet_length printf quote replace round
    rtrim sign soundex substr substring trim typeof unhex unicode upper
    acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10 log2 mod pi pow power radians sin sinh sqrt tan tanh trunc
    date time datetime julianday strftime timediff unixepoch
    avg count group_concat string_agg sum total median percentile row_number rank dense_rank percent_rank cume_dist ntile lag lead first_value last_value
    nth_value
    json json_array json_array_length json_error_position json_extract -> ->> json_insert json_object json_patch json_pretty json_quote json_remove
    json_replace json_set json_type json_valid json_group_array json_group_object json_each json_tree
"""
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
Authorizer = Callable[[int, str | None, str | None, str | None, str | None], int]


def run_query(
    db: sqlite3.Connection,
    query: str,
    parameters: Sequence[Any],
    *,
    timeout_us: int,
    max_rows: int,
) -> pa.Table:
    """The result of one SELECT, in the snapshot that the connection is in."""
    views = {
        name: f"_rows_{number}" for name, number in db.execute("SELECT name, number FROM _views")
    }
    db.execute(
        "SELECT 1 FROM json_each('[]'), json_tree('[]')"
    )  # SQLite sets them up at their first use, which a query may not do
    try:
        with _guarded(db, _authorizer(db, views), timeout_us):
            cursor = db.execute(query, parameters)
            if cursor.description is None:
                raise BadQuery("There is no query.", fix="write a SELECT over the views.")
            rows = list(_at_most(cursor, max_rows))
    except (sqlite3.Error, sqlite3.Warning) as error:
        if is_about_storage(error):
            raise
        raise _refusal(error, views, timeout_us) from None
    return _as_table([column for column, *_ in cursor.description], rows)


def _at_most(cursor: sqlite3.Cursor, max_rows: int) -> Iterator[tuple[Any, ...]]:
    count = 0
    while rows := cursor.fetchmany(_ROWS_A_FETCH):
        count += len(rows)
        if count > max_rows:
            raise BadQuery(
                f"The query's result has more than {max_rows:,} rows.",
                fix="add a LIMIT, or aggregate.",
            )
        yield from rows


def mentions(query: str, view: str) -> bool:
    """Whether a query's text has the name of a view, in quotes or not; also where it means
    something else.
    """
    return re.search(rf"(?<![\w.]){re.escape(view)}(?![\w.])", query, re.IGNORECASE) is not None


def check_names(columns: Sequence[str]) -> None:
    """Refuse a result whose columns cannot be told apart, where rows are written as objects: all
    but one would be lost.
    """
    twice = next((name for at, name in enumerate(columns) if name in columns[:at]), None)
    if twice is not None:
        raise BadQuery(
            f"The query's result has two columns {twice!r}.",
            fix="name the columns instead of *, and one of these otherwise: … AS other.",
        )


# What may be done


@contextmanager
def _guarded(db: sqlite3.Connection, authorizer: Authorizer, timeout_us: int) -> Iterator[None]:
    """Only what is allowed, and only for so long."""
    deadline = time.monotonic() + timeout_us / 1_000_000
    length = db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    db.set_authorizer(authorizer)
    db.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS_BETWEEN_LOOKS)
    try:
        yield
    finally:
        db.set_progress_handler(None, 0)
        db.set_authorizer(None)
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, length)


def _authorizer(db: sqlite3.Connection, views: Mapping[str, str]) -> Authorizer:
    """SQLite asks about each thing a statement would do, while it is compiled. What is not on the
    list is denied.

    Views may be read, and the tables behind them, which hold nothing else. Who is said to read a
    table is no help: that can be a name that the query made up.
    """
    readable = {*views, *views.values(), *_TABLE_FUNCTIONS}
    others = {name for (name,) in db.execute("SELECT name FROM sqlite_schema")} - readable

    def may_read(table: str, column: str | None) -> bool:
        """Of a name that the query itself defines, SQLite asks for no column."""
        return table in readable or (
            not column and table not in others and not table.startswith("sqlite_")
        )

    def allowed(action: int, first: str | None, second: str | None) -> bool:
        if action == sqlite3.SQLITE_READ:
            return may_read(first or "", second)
        if action == sqlite3.SQLITE_FUNCTION:
            return (second or "").lower() in _FUNCTIONS
        return action in {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE}

    return lambda action, first, second, _schema, _through: (
        sqlite3.SQLITE_OK if allowed(action, first, second) else sqlite3.SQLITE_DENY
    )


def _refusal(error: Exception, views: Iterable[str], timeout_us: int) -> InputError:
    text = str(error)
    if getattr(error, "sqlite_errorname", "") == "SQLITE_INTERRUPT":
        return BadQuery(
            f"The query took longer than {timeout_us / 1_000_000:g} seconds.",
            fix="narrow it, or give it a longer timeout.",
        )
    if found := re.fullmatch(r"no such table: (?:main\.)?(.*)", text):
        return _unknown(found[1], list(views))
    if found := re.fullmatch(r"not authorized to use function: (.*)", text):
        return BadQuery(
            f"The query may not use the function {found[1]}.",
            fix="use SQLite's functions over text, numbers, times and JSON, or its aggregates.",
        )
    if "not authorized" in text or "prohibited" in text:
        return BadQuery(
            f"The query may not run: {text}.",
            fix=f"write a SELECT over the views; {nearest('', views)}",
        )
    return BadQuery(
        f"The query cannot run: {text.rstrip('.')}.",
        fix="write one SELECT over the views, in SQLite's SQL.",
    )


def _unknown(name: str, views: list[str]) -> InputError:
    if name in views:  # it has a dot, in front of which SQL expects a database
        return BadQuery(
            f"The view {name} has a dot in its name.", fix=f'write it in double quotes: "{name}".'
        )
    return UnknownView(name, views)


# What comes back


def _as_table(names: list[str], rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    return pa.Table.from_arrays(
        [_array(name, list(values)) for name, values in zip(names, columns, strict=True)],
        names=names,
    )


def _array(name: str, values: list[Any]) -> pa.Array:
    """A column of what SQLite gave: whole numbers, floats, text or bytes. Among floats the text NaN
    is the number that it stands for.
    """
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {float, str} and {value for value in values if type(value) is str} == {"NaN"}:
        return pa.array(
            [float(value) if type(value) is str else value for value in values], pa.float64()
        )
    if kinds == {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if len(kinds) > 1:
        mixed = " and ".join(sorted(_KINDS[kind] for kind in kinds))
        raise BadQuery(
            f"The column {name!r} of the result mixes {mixed}.",
            fix=f"make it one of them, as in CAST({name} AS TEXT).",
        )
    return pa.array(values, _TYPES[kinds.pop()] if kinds else pa.null())


_KINDS = {int: "whole numbers", float: "floats", str: "text", bytes: "bytes"}
_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}
