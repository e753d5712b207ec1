"""Statements about other systems, and about code: sources, sinks, alerts, functions.

CREATE SOURCE shop FROM POSTGRES 'postgresql://…' (
    TABLE people (id BIGINT PRIMARY KEY, name STRING)) WITH (slot = 'headrace')
CREATE SOURCE files FROM DIRECTORY 'incoming' INTO orders WITH (pattern = '*.csv')
CREATE SOURCE api FROM HTTP 'https://example.com/orders' INTO orders WITH (every = '1 minute')
CREATE SOURCE door FROM HTTP INTO orders WITH (port = 8080)
CREATE SINK copy INTO 'postgresql://…' WITH (table = 'revenue') AS SELECT * FROM revenue
CREATE ALERT spike TO 'https://example.com/hook' WITH (every = '5 minutes') AS SELECT …
CREATE FUNCTION tax AS 'shop_code:tax' RETURNS DOUBLE
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from headrace.errors import DuplicateStep, HeadraceError, PlanError, UnknownTopic, nearest
from headrace.sql.catalog import DependsOnError, SqlCatalog, spelled
from headrace.sql.cursor import Cursor
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.query import rows_of
from headrace.sql.query_parser import read_query
from headrace.sql.script import STRING, Span
from headrace.sql.statements import (
    declared_name,
    note_declaration,
    read_columns,
    read_options,
    taken_options,
)

_DATABASES = ("POSTGRES", "POSTGRESQL", "MYSQL", "MARIADB", "SQLITE")
_SOURCES = (*_DATABASES, "DIRECTORY", "HTTP", "MQTT", "STATSD", "ZEROMQ", "AMQP")
_TOPIC_OPTIONS = [
    "partitions",
    "retention",
    "retention_bytes",
    "compact",
    "history",
    "tombstones",
    "segment_bytes",
    "segment_age",
    "compression",
    "strict",
    "format",
    "registry",
]


def create_source(cursor: Cursor, catalog: SqlCatalog) -> None:
    """CREATE SOURCE name FROM kind …: a capture, a source of rows, or a gateway."""
    name, _ = declared_name(cursor, catalog, "a source")
    cursor.expect("FROM", fix=f"say from what: {', '.join(_SOURCES)}.")
    kind = cursor.expect_one(_SOURCES, fix=f"there is {', '.join(_SOURCES)}.")
    url_offset = cursor.offset
    url = cursor.string("an address in quotes") if cursor.token.kind == STRING else None
    if kind in _DATABASES:
        if url is None:
            cursor.fail("an address in quotes", fix="write FROM POSTGRES 'postgresql://…'.")
        _capture(cursor, catalog, name, kind, url, url_offset)
    else:
        _rows(cursor, catalog, name, kind, url)
    note_declaration(catalog, "source", name, cursor)


def _capture(
    cursor: Cursor, catalog: SqlCatalog, name: str, kind: str, url: str, offset: int
) -> None:
    from headrace import cdc

    fix = "write (TABLE people (id BIGINT PRIMARY KEY, name STRING), …) behind the address."
    inner = Cursor(cursor.brackets("(TABLE name (columns), …)"))
    tables: list[tuple[str, str, list[str], Any, int]] = []
    while True:
        inner.expect("TABLE", fix=fix)
        table_offset = inner.offset
        table = inner.path("the table's name")
        columns, keys, _, watermark = read_columns(inner.brackets("(columns)"))
        if not keys:
            raise SqlRefusal(
                table_offset,
                f"The table {table!r} has no PRIMARY KEY here.",
                "say by what its rows are told apart: id BIGINT PRIMARY KEY.",
                PlanError,
            )
        tables.append((table, columns, keys, watermark, table_offset))
        if not inner.take(","):
            break
    inner.finish("','")
    options = {key: value for key, (value, _) in read_options(cursor).items()}
    cursor.finish("WITH or the end of the statement", ("WITH",))
    make = {"POSTGRESQL": "postgres"}.get(kind, kind.lower())
    with located(Span(cursor.script, cursor.span.first, cursor.stop)):
        try:
            address = url.removeprefix("sqlite:") if kind == "SQLITE" else url
            capture = getattr(cdc, make)(
                address, tables=[table for table, *_ in tables], name=name, **options
            )
        except TypeError as error:
            raise _wrong_option(error, offset) from None
        for table, columns, keys, watermark, _ in tables:
            catalog.pipeline.capture(
                capture,
                table,
                schema=columns,
                key=keys if len(keys) > 1 else keys[0],
                event_time=None if watermark is None else _event_time(watermark),
            )


def _event_time(watermark: tuple[str, str | None]) -> Any:
    from headrace.plan.event_time import EventTime

    return EventTime(watermark[0], delay=watermark[1])


def _wrong_option(error: TypeError, offset: int) -> SqlRefusal:
    text = str(error).partition("() ")[2] or str(error)
    return SqlRefusal(offset, f"This cannot be declared so: {text}.", kind=PlanError)


def _rows(cursor: Cursor, catalog: SqlCatalog, name: str, kind: str, url: str | None) -> None:
    """A source of rows, or a gateway, into topics that were declared."""
    from headrace import gateways, sources

    offset = cursor.offset
    cursor.expect("INTO", fix="say into which topic: INTO orders.")
    topics = [_topic(cursor, catalog)]
    while cursor.take(","):
        topics.append(_topic(cursor, catalog))
    options = {key: value for key, (value, _) in read_options(cursor).items()}
    cursor.finish("WITH or the end of the statement", ("WITH",))
    pipeline = catalog.pipeline
    is_source = kind in {"DIRECTORY", "MQTT"} or (kind == "HTTP" and url is not None)
    if (is_source or kind in {"STATSD", "ZEROMQ", "AMQP"}) and len(topics) > 1:
        raise SqlRefusal(offset, f"A source from {kind} has one topic.", "name one.", PlanError)
    if url is None and kind in {"DIRECTORY", "MQTT", "AMQP"}:
        raise SqlRefusal(
            offset, f"{kind} has no address.", f"write FROM {kind} 'address'.", PlanError
        )
    with located(Span(cursor.script, cursor.span.first, cursor.stop)):
        try:
            if kind == "DIRECTORY":
                path = pipeline.directory / str(url)
                pipeline.source(sources.directory(path, topic=topics[0], name=name, **options))
            elif kind == "MQTT":
                pipeline.source(sources.mqtt(str(url), topic=topics[0], name=name, **options))
            elif is_source:
                pipeline.source(sources.poll(str(url), topic=topics[0], name=name, **options))
            elif kind == "HTTP":
                pipeline.gateway(gateways.http(topics, name=name, **options))
            elif kind == "STATSD":
                pipeline.gateway(gateways.statsd(topics[0], name=name, **options))
            elif kind == "ZEROMQ":
                options.setdefault("bind", url or ())
                pipeline.gateway(gateways.zeromq(topics[0], name=name, **options))
            else:
                pipeline.gateway(gateways.amqp(topics[0], url=str(url), name=name, **options))
        except TypeError as error:
            raise _wrong_option(error, offset) from None


def _topic(cursor: Cursor, catalog: SqlCatalog) -> str:
    offset = cursor.offset
    name = cursor.path("a topic")
    rows = catalog.pipeline.declared_rows()
    known = spelled(name, rows)
    if known is None:
        if name.lower() in catalog.broken:
            raise DependsOnError(offset, f"{name!r} was not declared.")
        raise SqlRefusal(
            offset,
            f"There is no topic {name!r}: {nearest(name, rows)}",
            "declare it before this statement, with CREATE TOPIC.",
            UnknownTopic,
        )
    catalog.reads.add(known.lower())
    return known


# Sinks and alerts


def _queried(cursor: Cursor, catalog: SqlCatalog, fix: str) -> Any:
    """The rows behind AS SELECT, or FROM a name."""
    if cursor.take("FROM"):
        offset = cursor.offset
        return catalog.find(cursor.path("a topic, table or view"), offset)
    cursor.expect("AS", fix=fix)
    return rows_of(read_query(cursor), catalog.find)


def create_sink(cursor: Cursor, catalog: SqlCatalog) -> None:
    """CREATE SINK name [FROM rows] INTO 'url' [WITH (…)] [AS SELECT …]."""
    from headrace.sinks import from_url

    name, _ = declared_name(cursor, catalog, "a sink")
    fix = "write CREATE SINK name FROM view INTO 'url', or CREATE SINK name INTO 'url' AS SELECT …."
    rows = _queried(cursor, catalog, fix) if cursor.sees("FROM") else None
    cursor.expect("INTO", fix=fix)
    offset = cursor.offset
    url = cursor.string("an address in quotes")
    options = {key: value for key, (value, _) in read_options(cursor).items()}
    if rows is None:
        rows = _queried(cursor, catalog, fix)
    cursor.finish("WITH or the end of the statement", ("WITH",))
    of_topic = {key: options.pop(key) for key in [*options] if key in {"topic", *_TOPIC_OPTIONS}}
    with located(Span(cursor.script, cursor.span.first, cursor.stop)):
        try:
            sink = from_url(url, **{"name": name, **options})
            catalog.pipeline.sink(sink, rows, **of_topic)
        except TypeError as error:
            raise _wrong_option(error, offset) from None
    note_declaration(catalog, "sink", name, cursor)


def create_alert(cursor: Cursor, catalog: SqlCatalog) -> None:
    """CREATE ALERT name [TO 'url', …] [WITH (every, by, for)] AS SELECT … | FROM name."""
    name, _ = declared_name(cursor, catalog, "an alert")
    urls: list[tuple[str, int]] = []
    if cursor.take("TO"):
        while True:
            urls.append((cursor.peek(0).text, cursor.offset))
            urls[-1] = (cursor.string("an address in quotes"), urls[-1][1])
            if not cursor.take(","):
                break
    options = read_options(cursor)
    given = taken_options(options, ["every", "by", "for", "mail_to", "secret"], "An alert")
    rows = _queried(cursor, catalog, "write CREATE ALERT name TO 'https://…' AS SELECT ….")
    cursor.finish()
    receivers = [_receiver(url, offset, given) for url, offset in urls]
    arguments: dict[str, Any] = {key: given[key] for key in ("every", "by") if key in given}
    if "for" in given:
        arguments["for_"] = given["for"]
    with located(Span(cursor.script, cursor.span.first, cursor.stop)):
        catalog.pipeline.alert(name, rows, to=receivers, **arguments)
    note_declaration(catalog, "alert", name, cursor)


def _receiver(url: str, offset: int, given: Mapping[str, Any]) -> Any:
    from headrace import alerts, sinks

    scheme = url.partition(":")[0].lower()
    try:
        if scheme in {"http", "https"}:
            return sinks.webhook(url, secret=given.get("secret"))
        if scheme in {"smtp", "smtps"}:
            if "mail_to" not in given:
                raise SqlRefusal(
                    offset,
                    "This mail has no address.",
                    "add WITH (mail_to = 'ops@example.com').",
                    PlanError,
                )
            return alerts.email(url, to=given["mail_to"])
    except HeadraceError as error:
        raise SqlRefusal(offset, error.message, error.fix, type(error)) from None
    raise SqlRefusal(
        offset,
        f"{url!r} cannot be notified.",
        "give a webhook, 'https://…', or a mail server, 'smtp://…' with mail_to.",
        PlanError,
    )


# Functions


def create_function(cursor: Cursor, catalog: SqlCatalog) -> None:
    """CREATE FUNCTION name AS 'module:function' [RETURNS type]."""
    from headrace.expressions.user_functions import UserFunction, udf

    name, offset = declared_name(cursor, catalog, "a function")
    cursor.expect("AS", fix="write CREATE FUNCTION tax AS 'shop_code:tax' RETURNS DOUBLE.")
    target_offset = cursor.offset
    target = cursor.string("'module:function'")
    returns = None
    if cursor.take("RETURNS"):
        returns = cursor.until({"WITH"}).text()
    options = taken_options(read_options(cursor), ["each_row", "inputs", "version"], "A function")
    cursor.finish("RETURNS, WITH or the end of the statement", ("RETURNS", "WITH"))
    function = _imported(target, target_offset, catalog)
    with located(Span(cursor.script, cursor.span.first, cursor.stop)):
        if isinstance(function, UserFunction):
            if function.name.lower() != name.lower():
                raise SqlRefusal(
                    offset,
                    f"{target!r} is the function {function.name!r}, not {name!r}.",
                    f"write CREATE FUNCTION {function.name}.",
                    DuplicateStep,
                )
        elif returns is None:
            raise SqlRefusal(
                target_offset,
                f"{target!r} does not say what it returns.",
                "add RETURNS DOUBLE, or decorate it with @hr.udf('DOUBLE').",
                PlanError,
            )
        else:
            function = udf(returns, name=name, **options)(function)
    catalog.functions[name.lower()] = function
    note_declaration(catalog, "function", name, cursor)


def _imported(target: str, offset: int, catalog: SqlCatalog) -> Any:
    """The function that a module has. Modules next to the file of SQL are found, too."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise SqlRefusal(
            offset, f"{target!r} names no function.", "write 'module:function'.", PlanError
        )
    folder = str(catalog.pipeline.directory)
    sys.path.insert(0, folder)
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        if isinstance(error, AttributeError):
            known = [each for each in vars(sys.modules.get(module_name, sys)) if each[0] != "_"]
            raise SqlRefusal(
                offset,
                f"{module_name!r} has no {attribute!r}: {nearest(attribute, known)}",
                kind=PlanError,
            ) from None
        raise SqlRefusal(
            offset,
            f"{module_name!r} cannot be imported: {type(error).__name__}: {error}.",
            "let the module stand next to the file of SQL, or install it.",
            PlanError,
        ) from None
    finally:
        sys.path.remove(folder)
    if not callable(value):
        raise SqlRefusal(offset, f"{target!r} is no function.", kind=PlanError)
    return value
