"""Statements that declare and change topics, tables and views: CREATE, DROP, INSERT. Each is read
and makes the call that Python spells.

    CREATE TOPIC orders (id BIGINT, amount DOUBLE, placed_at TIMESTAMP)
        WITH (key = 'id', event_time = 'placed_at', delay = '10 seconds', retention = '30 days')
    CREATE TABLE customers (id BIGINT PRIMARY KEY, name STRING)
    CREATE VIEW revenue AS SELECT …              a view that is kept and served
    CREATE TEMPORARY VIEW large AS SELECT …      a name for a query
    CREATE STREAM large_orders AS SELECT …       a derived topic
    CREATE TABLE latest AS SELECT …              a derived topic with a table's rows
    INSERT INTO orders VALUES (1, 9.5, TIMESTAMP '2026-01-01 00:00:00')
    DROP VIEW revenue

Sources, sinks, alerts and functions are in `services`; SHOW, DESCRIBE and EXPLAIN in
`descriptions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from headrace.errors import DuplicateStep, PlanError, StreamOnly, nearest
from headrace.names import check_name
from headrace.plan.event_time import EventTime, processing_time
from headrace.sql.catalog import DeclaredName, SqlCatalog, spelled
from headrace.sql.cursor import Cursor
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.query import rows_of
from headrace.sql.query_parser import read_query
from headrace.sql.script import NUMBER, QUOTED, STRING, WORD, Span
from headrace.types.schema import parse_schema

if TYPE_CHECKING:
    from headrace.pipeline.stream import Stream, Table

_EVENT_TIME = ("delay", "producer", "idle", "max_ahead")
_SHED = ("shed_behind", "shed_keep", "shed_priority", "shed_min_priority")
_DERIVED = (
    "partitions",
    "tombstones",
    "segment_bytes",
    "segment_age",
    "compression",
    "strict",
    "format",
    "registry",
)
MAX_INSERTED = 10_000

Declare = Callable[[Cursor, SqlCatalog], "Stream | Table | None"]


# Names and options


def declared_name(cursor: Cursor, catalog: SqlCatalog, what: str) -> tuple[str, int]:
    """Read the name of something new, and where it stands."""
    offset = cursor.offset
    name = cursor.path(f"the name of {what}")
    try:
        check_name(
            name, what=f"{what.removeprefix('a ').removeprefix('an ')} name", error=PlanError
        )
    except PlanError as error:
        raise SqlRefusal(offset, error.message, error.fix, PlanError) from None
    taken = catalog.declared.get(name.lower())
    if taken is not None:
        raise SqlRefusal(
            offset,
            f"There is a {taken.kind} {taken.name!r} already.",
            "choose another name, or DROP the other one first.",
            DuplicateStep,
        )
    return name, offset


def read_options(cursor: Cursor) -> dict[str, tuple[Any, int]]:
    """Read WITH (name = value, …): the values, and where the names stand."""
    options: dict[str, tuple[Any, int]] = {}
    if not cursor.take("WITH"):
        return options
    inner = Cursor(cursor.brackets("(name = value, …)"))
    while not inner.is_done:
        offset = inner.offset
        if inner.token.kind == STRING:
            name = inner.string().lower()
        else:
            name = inner.path("an option").lower()
        if name in options:
            raise SqlRefusal(offset, f"The option {name!r} is there twice.", "leave one out.")
        inner.expect("=", fix="write options as name = value.")
        options[name] = (inner.value(), offset)
        if not inner.take(",") and not inner.is_done:
            inner.fail("',' or ')'")
    return options


def taken_options(
    options: dict[str, tuple[Any, int]], known: Sequence[str], what: str
) -> dict[str, Any]:
    """The values of options. Raises SqlRefusal for one that is not known."""
    for name, (_, offset) in options.items():
        if name not in known:
            raise SqlRefusal(
                offset,
                f"{what} has no option {name!r}: {nearest(name, known)}",
                f"there is {', '.join(sorted(known))}.",
                PlanError,
            )
    return {name: value for name, (value, _) in options.items()}


# CREATE TOPIC and CREATE TABLE


def create_topic(cursor: Cursor, catalog: SqlCatalog, *, is_table: bool) -> Stream | Table | None:
    """CREATE TOPIC name (columns) WITH (…), or CREATE TABLE with a PRIMARY KEY."""
    what = "table" if is_table else "topic"
    exists_is_fine = cursor.take("IF", "NOT", "EXISTS")
    if exists_is_fine:
        ahead = Cursor(Span(cursor.script, cursor.at, cursor.stop))
        if spelled(ahead.path("a name"), catalog.pipeline.declared_rows()) is not None:
            cursor.rest()
            return None
    name, offset = declared_name(cursor, catalog, f"a {what}")
    if is_table and (cursor.sees("AS") or cursor.sees("WITH")):
        return _derived(cursor, catalog, name, offset, wants_table=True)
    if cursor.token.text != "(":
        cursor.fail(
            "(columns)" + (" or AS SELECT" if is_table else ""),
            fix=f"write CREATE {what.upper()} {name} (id BIGINT, name STRING)"
            + (" with a PRIMARY KEY." if is_table else "."),
        )
    columns, keys, metadata, watermark = read_columns(cursor.brackets())
    options = read_options(cursor)
    cursor.finish("WITH or the end of the statement", ("WITH",))
    common = [
        "key",
        "partitions",
        "event_time",
        "processing_time",
        "tombstones",
        "segment_bytes",
        "segment_age",
        "compression",
        "strict",
        "format",
        "registry",
    ]
    own = ["history"] if is_table else ["retention", "retention_bytes", "compact", *_SHED]
    if is_table and "file" in options:
        _file_table(cursor, catalog, name, columns, keys, options)
        return None
    given = taken_options(options, [*common, *_EVENT_TIME, *own], f"A {what}")
    arguments = _topic_arguments(given, options, watermark, offset)
    if keys:
        if "key" in arguments:
            raise SqlRefusal(
                options["key"][1],
                f"The {what} {name!r} has a PRIMARY KEY and the option key.",
                "leave one of them out.",
                PlanError,
            )
        arguments["key"] = keys if len(keys) > 1 else keys[0]
    if is_table and "key" not in arguments:
        raise SqlRefusal(
            offset,
            f"The table {name!r} has no key: a table has the newest row of each key.",
            "write PRIMARY KEY (id) among the columns; for rows that are only added use CREATE"
            " TOPIC.",
            PlanError,
        )
    if metadata and not is_table:
        arguments["metadata"] = metadata
    pipeline = catalog.pipeline
    with located(Span(cursor.script, cursor.span.first, cursor.stop)):
        rows: Any
        if "shed" in arguments:
            arguments["shed"] = pipeline.shed_policy(**arguments["shed"])
        if is_table:
            rows = pipeline.table(name, schema=columns, **arguments)
        else:
            rows = pipeline.topic(name, schema=columns, **arguments)
    note_declaration(catalog, what, name, cursor)
    return rows  # type: ignore[no-any-return]


def _file_table(
    cursor: Cursor,
    catalog: SqlCatalog,
    name: str,
    columns: str,
    keys: list[str],
    options: dict[str, tuple[Any, int]],
) -> None:
    """CREATE TABLE name (columns) WITH (file = 'path'): a constant table for joins of streams."""
    from headrace.pipeline.file_table import file_table

    given = taken_options(options, ["file", "format", "key"], "A table in a file")
    path = catalog.pipeline.directory / str(given["file"])
    with located(Span(cursor.script, cursor.span.first, cursor.stop)):
        rows: Any = file_table(
            path, schema=columns, key=keys or given.get("key", ()), format=given.get("format")
        )
    catalog.named[name] = rows
    note_declaration(catalog, "table", name, cursor)


def _topic_arguments(
    given: dict[str, Any],
    options: dict[str, tuple[Any, int]],
    watermark: tuple[str, str | None] | None,
    offset: int,
) -> dict[str, Any]:
    """The options of a topic as `pipeline.topic` takes them."""
    arguments = {
        name: value
        for name, value in given.items()
        if name not in {*_EVENT_TIME, "processing_time", "event_time", *_SHED}
    }
    if isinstance(arguments.get("key"), str) and "," in arguments["key"]:
        arguments["key"] = [part.strip() for part in arguments["key"].split(",")]
    times = {name: given[name] for name in _EVENT_TIME if name in given}
    column = given.get("event_time")
    if watermark is not None:
        column = watermark[0]
        if watermark[1] is not None:
            times.setdefault("delay", watermark[1])
    if "processing_time" in given:
        if column is not None or times:
            raise SqlRefusal(
                options["processing_time"][1],
                "processing_time is the time of processing, and event_time one that rows have.",
                "leave one of them out.",
                PlanError,
            )
        arguments["event_time"] = processing_time(str(given["processing_time"]))
    elif column is not None:
        arguments["event_time"] = EventTime(str(column), **times)
    elif times:
        name = next(iter(times))
        raise SqlRefusal(
            options.get(name, (None, offset))[1],
            f"The option {name!r} is of an event time, and there is none.",
            "name the column: event_time = 'placed_at'.",
            PlanError,
        )
    sheds = {name.removeprefix("shed_"): given[name] for name in _SHED if name in given}
    if sheds:
        arguments["shed"] = sheds
    return arguments


def read_columns(
    span: Span,
) -> tuple[str, list[str], dict[str, str], tuple[str, str | None] | None]:
    """The columns of a topic: as DDL, its primary key, the columns with what the log knows of a
    row, and the watermark that is declared among them.
    """
    ddl: list[str] = []
    keys: list[str] = []
    metadata: dict[str, str] = {}
    watermark: tuple[str, str | None] | None = None
    for part in span.split():
        cursor = Cursor(part)
        if not part:
            cursor.fail("a column", fix="write name TYPE, as in id BIGINT.")
        if cursor.take("PRIMARY", "KEY"):
            keys += cursor.names_in_brackets()
            cursor.finish("','")
            continue
        if cursor.take("WATERMARK", "FOR"):
            watermark = _watermark(cursor)
            continue
        words = [part.script.tokens[at].upper for at in part.top_level()]
        if "METADATA" in words:
            name = cursor.name("a column")
            cursor.until({"METADATA"})
            cursor.at += 1
            cursor.expect("FROM", fix="write name BIGINT METADATA FROM '_offset'.")
            metadata[name] = cursor.string()
            cursor.finish("','")
            continue
        stop = part.stop
        if words[-2:] == ["PRIMARY", "KEY"]:
            keys.append(part.tokens[0].name)
            stop -= 2
        column = Span(part.script, part.first, stop)
        _check_column(column)
        ddl.append(column.text())
    if not ddl:
        raise SqlRefusal(
            span.start, "A column was expected here.", "write name TYPE, as in id BIGINT."
        )
    return ", ".join(ddl), keys, metadata, watermark


def _check_column(span: Span) -> None:
    """Raise SqlRefusal, at its place, if a column cannot be read."""
    first = span.tokens[0]
    if first.kind not in {WORD, QUOTED} or len(span) < 2:
        raise SqlRefusal(
            span.start, f"{span.text()!r} is no column.", "write name TYPE, as in id BIGINT."
        )
    with located(span):
        parse_schema(span.text())


def _watermark(cursor: Cursor) -> tuple[str, str | None]:
    """WATERMARK FOR column AS column - INTERVAL '4' SECOND."""
    column = cursor.name("the column with the event time")
    cursor.expect("AS", fix="write WATERMARK FOR at AS at - INTERVAL '4' SECOND.")
    if cursor.name("the same column") != column:
        cursor.at -= 1
        cursor.fail(column)
    delay = cursor.interval() if cursor.take("-") else None
    cursor.finish("','")
    return column, delay


# Queries with a name


def create_view(cursor: Cursor, catalog: SqlCatalog) -> Stream | Table:
    """CREATE [MATERIALIZED] VIEW name [WITH (keep, keep_changes)] AS query."""
    name, offset = declared_name(cursor, catalog, "a view")
    options = read_options(cursor)
    arguments = taken_options(options, ["keep", "keep_changes"], "A view")
    rows = _as_query(cursor, catalog)
    if not rows.step.is_table:
        raise SqlRefusal(
            offset,
            f"The view {name!r} is of a stream: without a key it would only ever grow.",
            "make a table of it: GROUP BY, SELECT DISTINCT, or the newest row of each key: SELECT *"
            " FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY id ORDER BY placed_at DESC) AS n FROM"
            " …) WHERE n = 1. A topic of the rows is CREATE STREAM, a name for the query CREATE"
            " TEMPORARY VIEW.",
            StreamOnly,
        )
    with located(Span(cursor.script, cursor.span.first, cursor.stop)):
        catalog.pipeline.view(name, rows, **arguments)
    note_declaration(catalog, "view", name, cursor)
    return rows


def create_temporary_view(cursor: Cursor, catalog: SqlCatalog) -> Stream | Table:
    """CREATE TEMPORARY VIEW name AS query: a name for a query, of which nothing is kept."""
    name, offset = declared_name(cursor, catalog, "a view")
    if spelled(name, catalog.rows()) is not None:
        raise SqlRefusal(
            offset,
            f"There is a topic, table or view {name!r} already.",
            "choose another name.",
            DuplicateStep,
        )
    rows = _as_query(cursor, catalog)
    catalog.named[name] = rows
    note_declaration(catalog, "temporary view", name, cursor)
    return rows


def create_stream(cursor: Cursor, catalog: SqlCatalog) -> Stream | Table:
    """CREATE STREAM name [WITH (…)] AS query: a derived topic."""
    name, offset = declared_name(cursor, catalog, "a stream")
    return _derived(cursor, catalog, name, offset, wants_table=False)


def _derived(
    cursor: Cursor, catalog: SqlCatalog, name: str, offset: int, *, wants_table: bool
) -> Stream | Table:
    options = read_options(cursor)
    rows = _as_query(cursor, catalog)
    if rows.step.is_table != wants_table:
        if wants_table:
            raise SqlRefusal(
                offset,
                f"CREATE TABLE {name}: the query is a stream, whose rows have no key.",
                "write CREATE STREAM; or make a table of it with GROUP BY, SELECT DISTINCT, or"
                " ROW_NUMBER() OVER (…) = 1.",
                StreamOnly,
            )
        raise SqlRefusal(
            offset,
            f"CREATE STREAM {name}: the query is a table, whose rows change.",
            "write CREATE TABLE … AS SELECT for a topic of its rows, CREATE VIEW for a view, or"
            " SELECT … FROM CHANGES OF for a stream of the changes.",
            StreamOnly,
        )
    own = ["history"] if wants_table else ["retention", "retention_bytes", "compact"]
    what = "A table" if wants_table else "A stream"
    arguments = taken_options(options, [*_DERIVED, *own], what)
    with located(Span(cursor.script, cursor.span.first, cursor.stop)):
        catalog.pipeline.write(name, rows, **arguments)
    note_declaration(catalog, "table" if wants_table else "stream", name, cursor)
    return rows


def _as_query(cursor: Cursor, catalog: SqlCatalog) -> Stream | Table:
    cursor.expect("AS", fix="write … AS SELECT ….")
    query = read_query(cursor)
    cursor.finish(
        "the end of the statement",
        ("WHERE", "GROUP", "HAVING", "ORDER", "LIMIT", "UNION", "JOIN", "EMIT", "LATE", "QUALIFY"),
    )
    return rows_of(query, catalog.find)


def note_declaration(catalog: SqlCatalog, kind: str, name: str, cursor: Cursor) -> None:
    """Remember what the statement at hand has declared."""
    text = Span(cursor.script, cursor.span.first, cursor.stop).text()
    reads = frozenset(catalog.reads - {name.lower()})
    catalog.declared[name.lower()] = DeclaredName(kind, name, text, reads)


# DROP


_KINDS = ("TOPIC", "TABLE", "VIEW", "STREAM", "SOURCE", "SINK", "ALERT", "FUNCTION")


def drop(cursor: Cursor, catalog: SqlCatalog) -> None:
    """DROP VIEW name: the declaration is undone. Topics and their rows stay in the log."""
    cursor.take_one(("MATERIALIZED", "TEMPORARY", "TEMP", "STREAMING"))
    kind = cursor.expect_one(_KINDS, fix="write DROP VIEW name.").lower()
    missing_is_fine = cursor.take("IF", "EXISTS")
    offset = cursor.offset
    name = cursor.path(f"the {kind}'s name")
    cursor.finish()
    remove(catalog, kind, name, offset, missing_is_fine=missing_is_fine)


def remove(
    catalog: SqlCatalog, kind: str, name: str, offset: int, *, missing_is_fine: bool = False
) -> None:
    """Undo a declaration, unless another one reads it."""
    declared = catalog.declared.get(name.lower())
    own_kind = None if declared is None else declared.kind.removeprefix("temporary ")
    if declared is None or own_kind not in _same_kinds(kind):
        if missing_is_fine:
            return
        if name.lower() in catalog.broken:
            from headrace.sql.catalog import DependsOnError

            raise DependsOnError(offset, f"{name!r} was not declared.")
        known = [each.name for each in catalog.declared.values() if each.kind == kind]
        what = f" It is a {declared.kind}." if declared is not None else ""
        raise SqlRefusal(
            offset, f"There is no {kind} {name!r}: {nearest(name, known)}{what}", kind=PlanError
        )
    readers = [
        each.name for each in catalog.declared.values() if declared.name.lower() in each.reads
    ]
    if readers:
        raise SqlRefusal(
            offset,
            f"{readers[0]!r} reads the {kind} {declared.name!r}.",
            f"drop {readers[0]!r} first.",
            PlanError,
        )
    if declared.name in catalog.named:
        catalog.named.pop(declared.name)
    elif declared.kind == "function":
        catalog.functions.pop(declared.name.lower())
    else:
        catalog.pipeline.remove(declared.kind, declared.name)
    del catalog.declared[name.lower()]


def _same_kinds(kind: str) -> set[str]:
    """The kinds of declarations that a word of DROP can mean."""
    return {kind, "stream", "topic"} if kind in {"topic", "stream"} else {kind}


# INSERT


def insert(cursor: Cursor, catalog: SqlCatalog) -> None:
    """INSERT INTO topic [(columns)] VALUES (…), …: rows that are stored once, by the first run."""
    from headrace.plan.plan import TopicStep

    cursor.take("INTO")
    offset = cursor.offset
    name = cursor.path("a topic")
    rows = catalog.find(name, offset)
    step = rows.step
    if not isinstance(step, TopicStep) or step.captured_by is not None:
        raise SqlRefusal(
            offset,
            f"{name!r} is computed, and INSERT writes to topics that were declared with CREATE"
            " TOPIC or CREATE TABLE.",
            "insert into a topic that it is computed from.",
            PlanError,
        )
    stored = step.stored_schema.names
    if cursor.token.text == "(":
        columns = []
        column_offset = cursor.offset
        for column in cursor.names_in_brackets():
            known = spelled(column, stored)
            if known is None:
                from headrace.errors import UnknownColumn

                raise SqlRefusal(
                    column_offset,
                    f"{name!r} has no column {column!r}: {nearest(column, stored)}",
                    kind=UnknownColumn,
                )
            columns.append(known)
    else:
        columns = list(stored)
    cursor.expect("VALUES", fix="write INSERT INTO topic VALUES (…), (…).")
    lists: list[dict[str, Any]] = []
    while True:
        row_offset = cursor.offset
        values = _row(cursor)
        if len(values) != len(columns):
            raise SqlRefusal(
                row_offset,
                f"This row has {len(values)} values, and {name!r} has {len(columns)} columns:"
                f" {', '.join(columns)}.",
                "give one value for each, or name the columns: INSERT INTO topic (a, b) VALUES ….",
                PlanError,
            )
        lists.append(dict(zip(columns, values, strict=True)))
        _check_row(lists[-1], step, row_offset)
        if len(lists) > MAX_INSERTED:
            raise SqlRefusal(
                row_offset,
                f"One INSERT has at most {MAX_INSERTED:,} rows.",
                "put them into a file: CREATE SOURCE … FROM DIRECTORY, or headrace produce.",
                PlanError,
            )
        if not cursor.take(","):
            break
    cursor.finish("',' or the end of the statement")
    catalog.inserts.setdefault(step.topic, []).append(lists)


def _row(cursor: Cursor) -> list[Any]:
    inner = Cursor(cursor.brackets("(values)"))
    values = [_literal(inner)]
    while inner.take(","):
        values.append(_literal(inner))
    inner.finish("','")
    return values


def _literal(cursor: Cursor) -> Any:
    """A literal, as JSON has it: times are texts, and decimals are exact."""
    token = cursor.token
    if cursor.take("NULL"):
        return None
    if token.upper in {"TIMESTAMP", "TIMESTAMP_NTZ", "DATE"} and cursor.peek().kind == STRING:
        cursor.at += 1
        text = cursor.string()
        if token.upper == "DATE":
            return text
        text = text.replace(" ", "T", 1)
        has_zone = text.endswith("Z") or "+" in text or text.count("-") > 2
        return text if token.upper == "TIMESTAMP_NTZ" or has_zone else f"{text}Z"
    if token.upper == "ARRAY" and cursor.peek().text == "(":
        cursor.at += 1
        inside = cursor.brackets()
        inner = Cursor(inside)
        values = [] if not inside else [_literal(inner)]
        while inner.take(","):
            values.append(_literal(inner))
        inner.finish("','")
        return values
    if token.upper in {"NAMED_STRUCT", "MAP"} and cursor.peek().text == "(":
        cursor.at += 1
        inner = Cursor(cursor.brackets())
        struct: dict[str, Any] = {}
        while not inner.is_done:
            key = inner.string("a name in quotes")
            inner.expect(",")
            struct[key] = _literal(inner)
            if not inner.take(","):
                break
        inner.finish("','")
        return struct
    is_negative = token.text == "-" and cursor.peek().kind == NUMBER
    if token.kind == NUMBER or is_negative:
        cursor.at += 1 + is_negative
        digits = cursor.script.tokens[cursor.at - 1].text.rstrip("BDLSYF")
        sign = "-" if is_negative else ""
        if digits.isdigit():
            return int(sign + digits)
        return float(sign + digits) if "e" in digits.lower() else Decimal(sign + digits)
    if token.kind == STRING:
        return cursor.string()
    if token.upper in {"TRUE", "FALSE"}:
        cursor.at += 1
        return token.upper == "TRUE"
    return cursor.fail(
        "a literal",
        fix="write numbers, texts, TRUE, NULL, TIMESTAMP '2026-01-31 12:00:00', ARRAY(…) or"
        " NAMED_STRUCT('name', value).",
    )


def _check_row(row: dict[str, Any], step: Any, offset: int) -> None:
    """Raise SqlRefusal if a row does not fit its topic. Numbers get the type of their column."""
    import pyarrow as pa

    from headrace.types.schema import type_name

    schema = step.stored_schema
    for name, value in row.items():
        kind = schema.field(name).type
        if isinstance(value, Decimal):
            row[name] = str(value) if pa.types.is_decimal(kind) else float(value)
        is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
        of_numbers = (
            pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
        )
        of_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        fits = (
            value is None
            or (
                is_number
                and of_numbers
                and not (pa.types.is_integer(kind) and isinstance(value, Decimal | float))
            )
            or (isinstance(value, bool) and pa.types.is_boolean(kind))
            or (
                isinstance(value, str)
                and (of_text or not (of_numbers or pa.types.is_boolean(kind)))
            )
            or (isinstance(value, list | dict) and pa.types.is_nested(kind))
        )
        if not fits:
            raise SqlRefusal(
                offset,
                f"{name!r} is {type_name(kind)}, and the row has {value!r}.",
                "write a literal of that type.",
                PlanError,
            )
        if value is None and not schema.field(name).nullable:
            raise SqlRefusal(offset, f"{name!r} is NOT NULL, and the row has NULL.", kind=PlanError)
