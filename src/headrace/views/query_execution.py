"""Runs one query on a replica, in a process that was forked for it: checks what it may contain,
sets its limits, and gives its rows with the types that Headrace has.

    limit              how it is held
    time               the query is interrupted; a second later the kernel kills the process,
                       because some functions of DuckDB never look whether they were interrupted
    memory             DuckDB's own limit, and the process's address space for what DuckDB does
                       not count, such as long texts and lists
    rows and bytes     counted while the result is read

The process is a copy of the one that holds the replica, so that whatever happens to it happens to
nobody else. It may write no file.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from headrace.columnar.columns import TIMESTAMP_TYPE
from headrace.errors import BadQuery
from headrace.views.replica import LoadedView, ViewReplica
from headrace.views.statement import check_statement, took_too_long

_GRACE_S = 1.0
"""How long an interrupted query may take to end before its process is killed."""
_UNCOUNTED_BYTES = 256 << 20
_BATCH_ROWS = 2_048
_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class QueryRequest:
    """A query and its limits."""

    query: str
    parameters: list[Any]
    timeout_s: float
    max_rows: int
    max_bytes: int
    memory_bytes: int
    script: list[str]
    """Statements that make other tables and functions for this query alone."""
    tables: list[str]
    functions: list[str]
    only_schema: bool = False
    """Whether only the columns are wanted, and no rows."""


def set_limits(request: QueryRequest, deadline: float) -> None:
    """Bound this process: the kernel ends it after the deadline, and refuses it more memory."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, deadline - time.monotonic()) + _GRACE_S)
    with open("/proc/self/statm") as file:  # noqa: PTH123
        used = int(file.read().split()[0]) * _PAGE_BYTES
    room = used + request.memory_bytes + _UNCOUNTED_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def execute(
    replica: ViewReplica,
    request: QueryRequest,
    views: Collection[str],
    past: Sequence[tuple[LoadedView, int, pa.Table]],
    deadline: float,
) -> pa.Table:
    """The rows of a query. BadQuery if it is not allowed, cannot run, or passes a limit."""
    db = replica.db
    replica.undo(past)
    try:
        (parsed,) = db.execute("SELECT json_serialize_sql(?)", [request.query]).fetchall()[0]
        check_statement(
            json.loads(parsed), views, tables=request.tables, functions=request.functions
        )
        for statement in request.script:
            db.execute(statement)
    except RecursionError:
        raise _too_deep() from None
    except duckdb.Error as error:
        raise _query_error(error, request) from None
    except BadQuery as error:
        if "syntax error" not in error.message or not (names := _keywords(replica, request.query)):
            raise
        raise BadQuery(
            error.message,
            fix=f"write {' and '.join(names)} in double quotes: such names are keywords of SQL.",
        ) from None
    db.execute(f"SET memory_limit = '{replica.memory_bytes() + request.memory_bytes}B'")
    db.execute("SET lock_configuration = true")
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), db.interrupt)
    timer.daemon = True
    timer.start()
    try:
        return _columns(db, request) if request.only_schema else _rows(db, request)
    except duckdb.InterruptException:
        raise took_too_long(request.timeout_s) from None
    except (duckdb.OutOfMemoryException, MemoryError):
        raise needed_too_much_memory(request.memory_bytes) from None
    except duckdb.Error as error:
        raise _query_error(error, request) from None
    finally:
        timer.cancel()


def _keywords(replica: ViewReplica, query: str) -> list[str]:
    """The views and columns in a query whose names are keywords, and need quotes."""
    keywords = {
        word
        for (word,) in replica.db.execute(
            "SELECT keyword_name FROM duckdb_keywords()"
            " WHERE keyword_category IN ('reserved', 'type_function')"
        ).fetchall()
    }
    names = {
        name
        for view in replica.views.values()
        for name in (view.info.name, *view.info.schema.names)
        if name.lower() in keywords
    }
    return sorted(f'"{name}"' for name in names if re.search(rf"\b{name}\b", query, re.IGNORECASE))


def _rows(db: duckdb.DuckDBPyConnection, request: QueryRequest) -> pa.Table:
    result = db.execute(request.query, request.parameters)
    kinds = [str(column[1]) for column in result.description]
    reader = result.to_arrow_reader(_BATCH_ROWS)
    batches, rows, size = [], 0, 0
    for batch in reader:
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows > request.max_rows:
            raise BadQuery(
                f"The query's result has more than {request.max_rows:,} rows.",
                fix="add a LIMIT, or aggregate.",
            )
        if size > request.max_bytes:
            raise BadQuery(
                f"The query's result has more than {request.max_bytes:,} bytes.",
                fix="select fewer columns, add a LIMIT, or aggregate.",
            )
        batches.append(batch)
    return _with_own_types(pa.Table.from_batches(batches, reader.schema), kinds, request)


def _columns(db: duckdb.DuckDBPyConnection, request: QueryRequest) -> pa.Table:
    """No rows, with the columns that the query would give."""
    described = db.execute(f"DESCRIBE {request.query}", request.parameters).fetchall()
    result = db.execute(f"SELECT * FROM ({request.query}) LIMIT 0", request.parameters)  # noqa: S608
    kinds = [str(column[1]) for column in result.description]
    empty = _with_own_types(result.to_arrow_table(), kinds, request)
    return empty.rename_columns([name for name, *_ in described])


# Errors


def needed_too_much_memory(memory_bytes: int) -> BadQuery:
    return BadQuery(
        f"The query needs more than {memory_bytes >> 20:,} MiB of memory.",
        fix="narrow it: select fewer columns, filter before joining, or aggregate.",
    )


def _too_deep() -> BadQuery:
    return BadQuery("The query is nested too deeply.", fix="make it simpler.")


def _query_error(error: duckdb.Error, request: QueryRequest) -> BadQuery:
    """DuckDB's error without what does not help here: its prefix, and the query drawn again."""
    text = str(error).split("\n\nLINE ", 1)[0].split("\n\nPossible solutions", 1)[0]
    text = " ".join(text.split()).rstrip(".")
    if "bad_alloc" in text or "Allocation failure" in text:
        return needed_too_much_memory(request.memory_bytes)
    _, _, message = text.partition("Error: ")
    return BadQuery(
        f"The query cannot run: {message or text}.",
        fix="write one SELECT over the views, in DuckDB's SQL.",
    )


# Types of results


_INTEGERS = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.int64(),
}
_HUGE = ("HUGEINT", "UHUGEINT")
_NUMBERS_OF_OBJECTS = ("UINTEGER", "UINTEGER[]")


def _with_own_types(rows: pa.Table, kinds: Sequence[str], request: QueryRequest) -> pa.Table:
    """Columns with the types of Headrace: sums of whole numbers are BIGINT, as in Spark. Of tables
    that the request's script makes, UINTEGER columns keep their type.
    """
    columns, fields = [], []
    for column, field, kind in zip(rows.columns, rows.schema, kinds, strict=True):
        if request.script and kind in _NUMBERS_OF_OBJECTS:
            columns.append(column)
            fields.append(field)
            continue
        target = pa.int64() if kind in _HUGE else _own_type(field.type, field.name, kind)
        try:
            columns.append(_converted(column, target))
        except pa.ArrowException as error:
            raise BadQuery(
                f"The column {field.name!r} of the result does not fit {target}: {error}.",
                fix="cast it, as in CAST(… AS DECIMAL(38, 0)) or CAST(… AS DOUBLE).",
            ) from None
        fields.append(pa.field(field.name, target))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _converted(column: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_interval(column.type):
        return pa.chunked_array([_durations(chunk) for chunk in column.chunks], target)
    if isinstance(column.type, pa.BaseExtensionType):
        return pa.chunked_array([chunk.storage for chunk in column.chunks], target)
    return column if column.type == target else column.cast(target)


def _own_type(kind: pa.DataType, name: str, duck_type: str) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType) and pa.types.is_string(kind.storage_type):
        return pa.string()  # JSON
    if kind in _INTEGERS:
        return _INTEGERS[kind]
    if pa.types.is_timestamp(kind):
        return TIMESTAMP_TYPE if kind.tz else pa.timestamp("us")
    if pa.types.is_interval(kind):
        return pa.duration("us")
    if pa.types.is_time(kind):
        return pa.time64("us")
    if pa.types.is_dictionary(kind) or pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_map(kind):
        return pa.map_(
            _own_type(kind.key_type, name, duck_type), _own_type(kind.item_type, name, duck_type)
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if not pa.types.is_interval(kind.value_type):
            return pa.list_(_own_type(kind.value_type, name, duck_type))
    elif pa.types.is_struct(kind):
        if not any(pa.types.is_interval(field.type) for field in kind):
            return pa.struct(
                [pa.field(field.name, _own_type(field.type, name, duck_type)) for field in kind]
            )
    elif _is_own(kind):
        return kind
    raise BadQuery(
        f"The column {name!r} of the result has the type {duck_type}, which views do not have.",
        fix=f"cast it, as in CAST({name} AS VARCHAR).",
    )


def _is_own(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_boolean(kind)
        or pa.types.is_signed_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_null(kind)
    )


_INTERVAL = np.dtype([("months", "<i4"), ("days", "<i4"), ("nanoseconds", "<i8")])
_DAY_US = 24 * 3600 * 1_000_000


def _durations(array: pa.Array) -> pa.Array:
    """Intervals of days and time as microseconds. Months have no length."""
    buffer = array.buffers()[1]
    parts = np.frombuffer(buffer, _INTERVAL, len(array) + array.offset)[array.offset :]
    is_valid = array.is_valid().to_numpy(zero_copy_only=False)
    if parts["months"][is_valid].any():
        raise BadQuery(
            "The result has an interval of months, which has no fixed length.",
            fix="cast it, as in CAST(… AS VARCHAR), or use days.",
        )
    microseconds = parts["days"].astype(np.int64) * _DAY_US + parts["nanoseconds"] // 1_000
    return pa.array(microseconds, pa.int64(), mask=~is_valid).cast(pa.duration("us"))
