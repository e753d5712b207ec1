"""A capture, declared: what `hr.cdc.postgres(…)` and its siblings return. It opens nothing until it
is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace.cdc.base import CaptureSpec, Source
from headrace.durations import to_us
from headrace.errors import InputError, nearest
from headrace.log.values import Duration

if TYPE_CHECKING:
    from headrace.cdc.capture import CaptureStatus


@dataclass(frozen=True)
class Capture(CaptureSpec):
    """Tables of one database, on their way into the log. `name` identifies it: position and
    progress are kept under it.
    """

    def run(
        self,
        *,
        log: str | None = None,
        stop: Event | None = None,
        until_caught_up: bool = False,
        start_over: bool = False,
        on_status: Callable[[CaptureStatus], None] | None = None,
    ) -> None:
        """Capture in this process until `stop` is set, or until everything that is there now has
        been taken in.

        `start_over` forgets the position and reads all tables again: for when the source has lost
        what follows it.
        """
        from headrace.cdc.capture import Capturing
        from headrace.log import open_log

        with open_log(self.log_address(log)) as opened:
            Capturing(self, opened, start_over=start_over, on_status=on_status).run(
                stop=stop, until_caught_up=until_caught_up
            )

    def remove(self) -> list[str]:
        """Take away what the capture made in the database: triggers, or a publication and a slot.
        Topics stay.
        """
        source = self.open()
        try:
            return source.remove()
        finally:
            source.close()


# `hr.cdc.<kind>(…)`: one function a kind of database. Packages of a database are imported when a
# capture is run, not when it is declared.


def sqlite(
    path: str | Path, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any
) -> Capture:
    """Tables of a SQLite database (all of them, if none are named), captured by triggers that are
    put into it.

    Further settings, here and for every kind: `log` (the log's address), `prefix` (of the topics'
    names), `partitions` (of a topic), `preimages` (also what an update replaced), `snapshot`
    (whether to begin with what is there), `chunk_rows` (rows a piece of the snapshot), `outbox` (a
    table whose rows are events, for topics named by their `aggregate_type`).
    """
    return _capture(
        "sqlite", name or Path(path).stem, _open_sqlite, tables, settings, path=str(path)
    )


def _open_sqlite(capture: CaptureSpec) -> Source:
    from headrace.cdc.sqlite_source import SqliteSource

    return SqliteSource(capture.options["path"], capture.name, capture.tables)


def postgres(
    url: str, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any
) -> Capture:
    """Tables of a Postgres database (all of them, if none are named; `schema.*` is a pattern),
    captured by logical replication. Needs the extra `postgres`.
    """
    return _capture(
        "postgres", name or _database_of(url), _open_postgres, tables, settings, url=url
    )


def _open_postgres(capture: CaptureSpec) -> Source:
    from headrace.cdc.postgres_source.source import PostgresSource

    return PostgresSource(
        capture.options["url"], capture.name, capture.tables, prefix=capture.prefix
    )


def mariadb(
    url: str, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any
) -> Capture:
    """Tables of a MariaDB database (all of them, if none are named), captured from its row binlog.
    Needs the extra `mysql`.
    """
    return _capture("mariadb", name or _database_of(url), _open_mysql, tables, settings, url=url)


def mysql(
    url: str, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any
) -> Capture:
    """The same for MySQL. A snapshot needs `gtid_mode = ON` there; without, `snapshot=False`
    captures changes only.
    """
    return _capture("mysql", name or _database_of(url), _open_mysql, tables, settings, url=url)


def _open_mysql(capture: CaptureSpec) -> Source:
    from headrace.cdc.mysql_source.source import MysqlSource

    return MysqlSource(capture.options["url"], capture.name, capture.tables)


def polling(
    connect: Callable[[], Any],
    table: str,
    *,
    column: str,
    schema: str,
    key: str | Sequence[str],
    name: str | None = None,
    every: Duration = "1 second",
    mark: str = "?",
    **settings: Any,
) -> Capture:
    """A table of any SQL database, asked now and then for rows whose `column` has grown: a serial
    number, or the time of the last change.

    It sees no deletes, of several updates between two looks the last one, and a row that is
    committed later than one with a larger value in the column not at all. `connect` gives a DB-API
    connection; `mark` is how its driver writes a parameter (`?` or `%s`).
    """
    columns = (key,) if isinstance(key, str) else tuple(key)
    options = {
        "connect": connect,
        "table": table,
        "column": column,
        "schema": schema,
        "key": columns,
        "every_s": to_us(every, what="every") / 1e6,
        "mark": mark,
    }
    settings.setdefault("snapshot", False)  # the first look sees everything
    return _capture("polling", name or table, _open_polling, (table,), settings, **options)


def _open_polling(capture: CaptureSpec) -> Source:
    from headrace.cdc.polling_source import PollingSource

    return PollingSource(**capture.options)


def debezium(
    topic: str,
    *,
    schema: str,
    key: str | Sequence[str],
    log: str,
    table: str | None = None,
    decimals: str = "precise",
    errors: str = "divert",
    name: str | None = None,
    **settings: Any,
) -> Capture:
    """A topic with Debezium's envelope as JSON, in a column `value`, becomes a table: creates,
    updates, deletes, reads of a snapshot, truncations, tombstones.

    `schema` and `key` say what the table's rows are; the table is called as the topic's last word,
    unless `table` says otherwise. `decimals` is the connector's `decimal.handling.mode`: "precise",
    "string" or "double". A record that cannot be taken for a change goes to the dead letters of its
    topic, and is counted; with `errors="stop"` it ends the capture.
    """
    for setting, value, known in (
        ("decimals", decimals, ("precise", "string", "double")),
        ("errors", errors, ("divert", "stop")),
    ):
        if value not in known:
            raise InputError(f"hr.cdc.debezium has no {setting}={value!r}: {nearest(value, known)}")
    columns = (key,) if isinstance(key, str) else tuple(key)
    target = table or topic.rsplit(".", 1)[-1]
    settings.setdefault("snapshot", False)
    options = {
        "topic": topic,
        "table": target,
        "schema": schema,
        "key": columns,
        "log": log,
        "decimals": decimals,
        "errors": errors,
    }
    return _capture(
        "debezium", name or topic, _open_debezium, (target,), {**settings, "log": log}, **options
    )


def _open_debezium(capture: CaptureSpec) -> Source:
    from headrace.cdc.debezium_source import DebeziumSource

    return DebeziumSource(**{**capture.options, "log": capture.log or capture.options["log"]})


def _database_of(url: str) -> str:
    return urlsplit(url).path.strip("/") or "database"


_SETTINGS = ("log", "prefix", "partitions", "preimages", "snapshot", "chunk_rows", "outbox")


def _capture(
    kind: str,
    name: str,
    opener: Any,
    tables: Sequence[str],
    settings: dict[str, Any],
    **options: Any,
) -> Capture:
    for setting in settings:
        if setting not in _SETTINGS:
            raise InputError(
                f"hr.cdc.{kind} has no setting {setting!r}: {nearest(setting, _SETTINGS)}"
            )
    if isinstance(tables, str):
        raise InputError(
            f"tables must be a list, not {tables!r}.", fix=f"write tables=[{tables!r}]."
        )
    return Capture(
        name=name, kind=kind, opener=opener, tables=tuple(tables), options=options, **settings
    )


def from_url(
    url: str, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any
) -> Capture:
    """The capture that a URL stands for: `sqlite:shop.db`."""
    kind = urlsplit(url).scheme
    if kind == "sqlite":
        return sqlite(
            url.removeprefix("sqlite:").removeprefix("//"), tables=tables, name=name, **settings
        )
    if kind in {"postgres", "postgresql"}:
        return postgres(url, tables=tables, name=name, **settings)
    if kind in {"mariadb", "mysql"}:
        return (mariadb if kind == "mariadb" else mysql)(url, tables=tables, name=name, **settings)
    raise InputError(
        f"{kind or url!r} is no kind of database that can be captured:"
        f" {nearest(kind, ['sqlite', 'postgres', 'mariadb', 'mysql'])}",
        fix="give sqlite:PATH, or postgres://, mariadb:// or mysql://USER@HOST/DATABASE.",
    )
