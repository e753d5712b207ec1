"""The sandbox for SQL over views. Queries come from people and programs that are trusted with
nothing else, so they may only read, only views, with a list of functions, for a limited time.

`reader.Snapshot.sql` runs queries here; SQL in pipelines is in `headrace.pipeline.sql`.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from headrace.errors import BadQuery, InputError, UnknownView, nearest
from headrace.views.file import is_storage_error

MAX_SQL_ROWS = 1_000_000
_MAX_VALUE_BYTES = 64 << 20
_STEPS_BETWEEN_CHECKS = 10_000
_FETCH_ROWS = 4_096
_TABLE_FUNCTIONS = frozenset({"json_each", "json_tree"})
_FUNCTION_NAMES = """
    abs char coalesce concat concat_ws format glob hex ifnull iif instr length like lower ltrim max
    min nullif octet_length printf quote replace round rtrim sign soundex substr substring
    trim typeof unhex unicode upper
    acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10 log2
    mod pi pow power radians sin sinh sqrt tan tanh trunc
    date time datetime julianday strftime timediff unixepoch
    avg count group_concat string_agg sum total median percentile row_number rank dense_rank
    percent_rank cume_dist ntile lag lead first_value last_value nth_value
    json json_array json_array_length json_error_position json_extract -> ->> json_insert
    json_object json_patch json_pretty json_quote json_remove json_replace json_set json_type
    json_valid json_group_array json_group_object json_each json_tree
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
    """The result of one SELECT, in the snapshot that the connection has open."""
    views = {
        name: f"_rows_{number}" for name, number in db.execute("SELECT name, number FROM _views")
    }
    # SQLite sets these two up at their first use, which the authorizer would deny to a query.
    db.execute("SELECT 1 FROM json_each('[]'), json_tree('[]')")
    try:
        with _restricted(db, _authorizer(db, views), timeout_us):
            cursor = db.execute(query, parameters)
            if cursor.description is None:
                raise BadQuery("There is no query.", fix="write a SELECT over the views.")
            rows: list[tuple[Any, ...]] = []
            while fetched := cursor.fetchmany(_FETCH_ROWS):
                rows += fetched
                if len(rows) > max_rows:
                    raise BadQuery(
                        f"The query's result has more than {max_rows:,} rows.",
                        fix="add a LIMIT, or aggregate.",
                    )
    except (sqlite3.Error, sqlite3.Warning) as error:
        if is_storage_error(error):
            raise
        raise _query_error(error, views, timeout_us) from None
    names = [column for column, *_ in cursor.description]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    return pa.Table.from_arrays(
        [_array(name, list(values)) for name, values in zip(names, columns, strict=True)],
        names=names,
    )


def mentions(query: str, view: str) -> bool:
    """Whether a query's text contains the name of a view, quoted or not. It may mean something
    else there, such as a column.
    """
    return re.search(rf"(?<![\w.]){re.escape(view)}(?![\w.])", query, re.IGNORECASE) is not None


def check_names(columns: Sequence[str]) -> None:
    """Refuse a result with two columns of one name: rows are written as objects, and one of the
    two would be lost.
    """
    for index, name in enumerate(columns):
        if name in columns[:index]:
            raise BadQuery(
                f"The query's result has two columns {name!r}.",
                fix="name the columns instead of *, and rename one of these: … AS other.",
            )


# Restrictions


@contextmanager
def _restricted(db: sqlite3.Connection, authorizer: Authorizer, timeout_us: int) -> Iterator[None]:
    """Run statements under an authorizer, a time limit and a limit on the size of a value."""
    deadline = time.monotonic() + timeout_us / 1_000_000
    length = db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    db.set_authorizer(authorizer)
    db.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS_BETWEEN_CHECKS)
    try:
        yield
    finally:
        db.set_progress_handler(None, 0)
        db.set_authorizer(None)
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, length)


def _authorizer(db: sqlite3.Connection, views: Mapping[str, str]) -> Authorizer:
    """An allow-list: SQLite asks about each action of a statement while compiling it, and whatever
    is not on the list is denied.

    Views may be read, and the tables behind them, which hold nothing else. SQLite's last argument,
    the view or trigger that reads a table, proves nothing: a query can make up that name.
    """
    readable = {*views, *views.values(), *_TABLE_FUNCTIONS}
    internal = {name for (name,) in db.execute("SELECT name FROM sqlite_schema")} - readable

    def may_read(table: str, column: str | None) -> bool:
        """SQLite asks without a column for names that the query itself defines."""
        return table in readable or (
            not column and table not in internal and not table.startswith("sqlite_")
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


def _query_error(error: Exception, views: Collection[str], timeout_us: int) -> InputError:
    text = str(error)
    if getattr(error, "sqlite_errorname", "") == "SQLITE_INTERRUPT":
        return BadQuery(
            f"The query took longer than {timeout_us / 1_000_000:g} seconds.",
            fix="narrow it, or give it a longer timeout.",
        )
    if match := re.fullmatch(r"no such table: (?:main\.)?(.*)", text):
        name = match[1]
        if name not in views:
            return UnknownView(name, list(views))
        return BadQuery(  # the name has a dot, in front of which SQL expects a database
            f"The view {name} has a dot in its name.", fix=f'write it in double quotes: "{name}".'
        )
    if match := re.fullmatch(r"not authorized to use function: (.*)", text):
        return BadQuery(
            f"The query may not use the function {match[1]}.",
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


# Results


def _array(name: str, values: list[Any]) -> pa.Array:
    """A column of SQLite's values: whole numbers, floats, text or bytes. Among floats the text NaN
    is read as the number.
    """
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {float, str} and {value for value in values if type(value) is str} == {"NaN"}:
        return pa.array(
            [float(value) if type(value) is str else value for value in values], pa.float64()
        )
    if kinds == {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if len(kinds) > 1:
        mixed = " and ".join(sorted(_KIND_NAMES[kind] for kind in kinds))
        raise BadQuery(
            f"The column {name!r} of the result mixes {mixed}.",
            fix=f"make it one of them, as in CAST({name} AS TEXT).",
        )
    return pa.array(values, _ARROW_TYPES[kinds.pop()] if kinds else pa.null())


_KIND_NAMES = {int: "whole numbers", float: "floats", str: "text", bytes: "bytes"}
_ARROW_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}
