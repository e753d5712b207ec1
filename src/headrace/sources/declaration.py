"""The sources of rows that users declare: `hr.sources.directory(…)` and its siblings return a
`Source`.

Declaring opens nothing. To read from a system of another kind, see `headrace.sources.base`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.cdc.declaration import Capture
from headrace.cdc.declaration import from_url as capture_from_url
from headrace.connector import check_settings, without_scheme
from headrace.durations import to_us
from headrace.errors import InputError, nearest
from headrace.log.row_files import Format
from headrace.log.values import Duration, TopicInfo
from headrace.sources.base import RowSource, Source

_SETTINGS = ("log", "schema", "key", "partitions")
_UNUSABLE = re.compile(r"[^A-Za-z0-9._-]+")
DEFAULT_BODY_BYTES = 8 << 20


def directory(
    path: str | Path,
    *,
    topic: str,
    pattern: str = "*",
    format: str | None = None,
    every: Duration = "1 second",
    settle: Duration = "1 minute",
    name: str | None = None,
    **settings: Any,
) -> Source:
    """Declare a source that reads the files of a directory, each once, also across restarts: CSV,
    JSON lines (both also with `.gz` or `.zst`) and Parquet. Files that come are read, the oldest
    first, and what is appended to a text file.

    Args:
        path: The directory.
        topic: The topic that gets the rows.
        pattern: Which files; `**/*.csv` finds those of subdirectories too. Hidden ones, whose names
            begin with a dot, are never read.
        format: "jsonl", "csv" or "parquet"; by default by the end of a file's name, and files with
            other ends are not read.
        every: How often the directory is looked at.
        settle: How long a file must have stayed as it is until its last line is read although it
            has no end, or until it is given up as not whole.
        name: Of the source, under which its progress is stored; by default the directory's name.
        **settings: As for every source. `log`: the log's address. `schema`: the topic's columns, if
            it is to be created when it is missing; with `key`, the column that chooses the
            partition, and `partitions`.

    Returns:
        The source, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.sources.directory("incoming", topic="orders", pattern="*.csv", log="file:data")
    """
    if format is not None and format not in list(Format):
        raise InputError(
            f"hr.sources.directory has no format {format!r}: {nearest(format, list(Format))}"
        )
    if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        raise InputError(
            f"The pattern {pattern!r} leaves the directory.", fix="give one within it, as in *.csv."
        )
    options = {
        "path": str(path),
        "pattern": pattern,
        "format": None if format is None else Format(format),
        "every_s": to_us(every, what="every") / 1e6,
        "settle_s": to_us(settle, what="settle") / 1e6,
    }
    name = name or _name(Path(path).resolve().name)
    return _source("directory", name, topic, _open_directory, settings, options)


def _open_directory(source: Source, topic: TopicInfo) -> RowSource:
    from headrace.sources.directory_source import DirectorySource

    return DirectorySource(source, topic)


def poll(
    url: str,
    *,
    topic: str,
    items: str | None = None,
    cursor: str | None = None,
    column: str | None = None,
    parameter: str = "cursor",
    every: Duration = "10 seconds",
    timeout: Duration = "30 seconds",
    headers: Mapping[str, str] | None = None,
    body_bytes: int = DEFAULT_BODY_BYTES,
    name: str | None = None,
    **settings: Any,
) -> Source:
    """Declare a source that polls a URL for JSON. An answer is stored when it has changed, by its
    ETag, its time of change or its bytes; with a cursor, each answer has what follows the last one.

    Args:
        url: The URL, `https://…` or `http://…`.
        topic: The topic that gets the rows.
        items: Where the rows are in the answer, as in `data.orders`. By default the answer is an
            array of objects, lines that are objects, or one object.
        cursor: Where the answer has the cursor of the next request, as in `meta.next`.
        column: Instead of that, the column of the last row that is the next cursor, such as an id.
        parameter: The parameter of the URL in which the cursor is sent.
        every: How often the URL is polled; after an answer with rows and a new cursor, at once.
        timeout: How long an answer may take.
        headers: Further headers. Values may be `env:NAME` or `file:PATH`.
        body_bytes: The most bytes of an answer.
        name: Of the source, under which its position is stored; by default by the URL's host and
            path.
        **settings: As for every source, see `hr.sources.directory`.

    Returns:
        The source, which opens nothing until it is run.

    Raises:
        InputError: The URL or a setting cannot be used.

    Example:
        >>> hr.sources.poll(
        ...     "https://api.example.com/orders", topic="orders", items="data", cursor="next",
        ...     parameter="after", headers={"Authorization": "env:API_TOKEN"}, log="file:data")
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
        raise InputError(
            f"{url!r} cannot be polled.",
            fix="give a URL such as https://api.example.com/orders; credentials belong in headers.",
        )
    if cursor is not None and column is not None:
        raise InputError("The cursor is in the answer, or in a column, not in both.")
    if not 1 <= body_bytes <= 1 << 30:
        raise InputError("body_bytes must be from 1 to 1 GiB.")
    options = {
        "url": url,
        "items": items,
        "cursor": cursor,
        "column": column,
        "parameter": parameter,
        "every_s": to_us(every, what="every") / 1e6,
        "timeout_s": to_us(timeout, what="timeout") / 1e6,
        "headers": dict(headers or {}),
        "body_bytes": body_bytes,
    }
    name = name or _name(f"{parts.hostname}{parts.path}")
    return _source("poll", name, topic, _open_poll, settings, options)


def _open_poll(source: Source, topic: TopicInfo) -> RowSource:
    from headrace.sources.http_source import HttpSource

    return HttpSource(source, topic)


def mqtt(
    url: str,
    *,
    topic: str,
    subject_column: str | None = None,
    value_column: str | None = None,
    password: str = "",
    ca: str | None = None,
    name: str | None = None,
    **settings: Any,
) -> Source:
    """Declare a source that subscribes to topics of an MQTT broker. Each message is a row, at least
    once. Needs the extra `mqtt`.

    Args:
        url: `mqtt://USER@HOST/SUBJECTS`, or `mqtts://…` for TLS, as in `mqtt://localhost/sensors/#`
            with the broker's wildcards.
        topic: The topic of the log that gets the rows.
        subject_column: The column that gets the broker's topic of each message.
        value_column: The column that gets a message's content as text. By default a message is a
            JSON object with the topic's columns.
        password: The user's, as `env:NAME` or `file:PATH`.
        ca: With TLS, a file with the certificates to trust, in PEM format; by default those of the
            system.
        name: Of the source, under which the broker keeps messages for it; by default by the URL's
            host and topic.
        **settings: As for every source, see `hr.sources.directory`.

    Returns:
        The source, which opens nothing until it is run.

    Raises:
        InputError: The URL or a setting cannot be used.

    Example:
        >>> hr.sources.mqtt(
        ...     "mqtt://localhost/sensors/#", topic="readings", subject_column="sensor",
        ...     schema="sensor STRING, celsius DOUBLE", log="file:data")
    """
    parts = urlsplit(url)
    subjects = url.partition("://")[2].partition("/")[2]  # a # is a wildcard here, no fragment
    if parts.scheme not in {"mqtt", "mqtts"} or not parts.hostname or not subjects:
        raise InputError(
            f"hr.sources.mqtt cannot subscribe to {url!r}: it names no"
            f" {'broker' if not parts.hostname else 'topic'}.",
            fix="write it as mqtt://HOST/TOPIC, or mqtts://… for TLS.",
        )
    options = {
        "url": url,
        "subjects": subjects,
        "subject_column": subject_column,
        "value_column": value_column,
        "password": password,
        "ca": ca,
    }
    name = name or _name(f"mqtt.{parts.hostname}.{subjects}")
    return _source("mqtt", name, topic, _open_mqtt, settings, options)


def _open_mqtt(source: Source, topic: TopicInfo) -> RowSource:
    from headrace.sources.mqtt_source import MqttSource

    return MqttSource(source, topic)


def values(
    topic: str, lists: Sequence[Sequence[Mapping[str, Any]]], *, name: str | None = None
) -> Source:
    """Declare a source of rows that are written out. Each list is stored once, however often the
    pipeline runs; one that is edited counts as another.

    Args:
        topic: The topic that gets the rows.
        lists: Lists of rows, each a dictionary of values as JSON has them.
        name: Of the source, under which is stored what is done; by default by the topic.

    Returns:
        The source, which opens nothing until it is run.

    Raises:
        InputError: A list is too long.

    Example:
        >>> hr.sources.values("orders", [[{"order_id": 1, "amount": 9.5}]])
    """
    from headrace.sources.values_source import MAX_ROWS

    for rows in lists:
        if len(rows) > MAX_ROWS:
            raise InputError(
                f"A list of {len(rows):,} rows for {topic!r} is longer than {MAX_ROWS:,}.",
                fix="put the rows into a file, and read it with hr.sources.directory.",
            )
    options = {"lists": [list(rows) for rows in lists]}
    return _source("values", name or f"insert.{topic}", topic, _open_values, {}, options)


def _open_values(source: Source, topic: TopicInfo) -> RowSource:
    from headrace.sources.values_source import ValuesSource

    return ValuesSource(source, topic)


def _name(text: str) -> str:
    return _UNUSABLE.sub("_", text).strip("_.-")[:100] or "source"


def _source(
    kind: str, name: str, topic: str, reader: Any, settings: dict[str, Any], options: dict[str, Any]
) -> Source:
    check_settings(f"hr.sources.{kind}", settings, _SETTINGS)
    return Source(kind=kind, name=name, topic=topic, reader=reader, options=options, **settings)


def from_url(
    url: str, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any
) -> Capture:
    """Declare the source or capture that a URL stands for, as `headrace capture` does.

    Args:
        url: `dir:DIRECTORY`, with a pattern as in `dir:incoming/*.csv`; `poll:https://…`;
            `mqtt://HOST/TOPIC`; or one of `hr.cdc.from_url`: a database, or a scheme that an
            installed package handles, by an entry point of the group `headrace.sources`.
        tables: Of a database, the tables to capture.
        name: Of the source, under which its position is stored.
        **settings: As for every source; of those of a kind, the ones that this kind has.

    Returns:
        The source, which opens nothing until it is run.

    Raises:
        InputError: Nothing has such a URL, or a setting cannot be used.

    Example:
        >>> hr.sources.from_url("dir:incoming/*.csv", topic="orders", log="file:data")
    """
    scheme = urlsplit(url).scheme
    if scheme not in {"dir", "poll", "mqtt", "mqtts"}:
        return capture_from_url(url, tables=tables, name=name, **settings)
    if tables:
        raise InputError(f"{scheme}: has no tables.", fix="name the topic: topic=… (--topic).")
    if "topic" not in settings:
        raise InputError(f"{url} names no topic for its rows.", fix="name one: topic=… (--topic).")
    if scheme == "poll":
        return poll(without_scheme(url), name=name, **settings)
    if scheme in {"mqtt", "mqtts"}:
        return mqtt(url, name=name, **settings)
    path, pattern = without_scheme(url), "*"
    parts = Path(path).parts
    for index, part in enumerate(parts):
        if any(sign in part for sign in "*?["):
            path, pattern = str(Path(*parts[:index])), str(Path(*parts[index:]))
            break
    return directory(path, name=name, **{"pattern": pattern, **settings})
