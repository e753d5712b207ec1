"""The captures that users declare: `hr.cdc.postgres(…)` and its siblings return a `Capture`.

Declaring opens nothing. The driver of a database is imported when the capture is run. To capture a
database of another kind, see `headrace.cdc.base`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace.cdc.base import NEVER, CaptureSource, CaptureSpec
from headrace.cdc.selection import selection_of
from headrace.cdc.topics import topic_name
from headrace.connector import (
    PluginGroup,
    as_tuple,
    build_from_url,
    check_settings,
    without_scheme,
)
from headrace.durations import to_us
from headrace.error_policy import DIVERT, STOP, check_error_policy
from headrace.errors import InputError, nearest
from headrace.log.values import Duration

if TYPE_CHECKING:
    from headrace.cdc.capture import CaptureStatus


@dataclass(frozen=True, kw_only=True)
class Capture(CaptureSpec):
    """Tables of one database that are followed into the log."""

    def run(
        self,
        *,
        log: str | None = None,
        stop: Event | None = None,
        until_caught_up: bool = False,
        start_over: bool = False,
        on_status: Callable[[CaptureStatus], None] | None = None,
    ) -> None:
        """Capture in this process.

        Args:
            log: The log's address; by default the declared one.
            stop: Set it to stop. Without it, and without `until_caught_up`, this never returns.
            until_caught_up: Return when everything is written that the database has now.
            start_over: Drop the position and read all tables again, for when the database no longer
                has what follows the position. Rows that are not there any more are deleted.
            on_status: Called about once a second with how the capture is doing.

        Raises:
            ConfigurationError: The database lacks what capture needs, or has lost changes. The
                message says what to do.
            RetryError: With `until_caught_up`, the database was away for a minute.
            TransactionFenced: Another process runs the same capture.

        Example:
            >>> hr.cdc.sqlite("shop.db").run(log="file:data", until_caught_up=True)
        """
        from headrace.cdc.capture import CaptureLoop
        from headrace.log import open_log

        with open_log(self.log_address(log)) as opened:
            loop = CaptureLoop(self, opened, start_over=start_over, on_status=on_status)
            loop.run(stop=stop, until_caught_up=until_caught_up)

    def remove(self) -> list[str]:
        """Remove what the capture created in the database: triggers, or a publication and a
        replication slot. Topics stay.

        Returns:
            Descriptions of what was removed.

        Example:
            >>> hr.cdc.sqlite("shop.db").remove()  # doctest: +SKIP
            ['trigger _headrace_orders_insert', …]
        """
        source = self.open()
        try:
            return source.remove()
        finally:
            source.close()


def sqlite(
    path: str | Path, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any
) -> Capture:
    """Declare a capture of an SQLite database, by triggers that are put into it.

    Args:
        path: The database file.
        tables: The tables to capture; all of them by default.
        name: Of the capture, under which its position is stored; by default the file's name.
        **settings: As for every capture. `log`: the log's address. `prefix`: put in front of the
            topics' names. `partitions`: of a new topic. `preimages`: whether the row before an
            update is stored too. `snapshot`: "initial" begins with the rows that are there,
            "never" does not, "when_needed" reads all again when the database has lost what follows
            the position, "only" does not follow changes. `chunk_rows`: the most rows of one chunk
            of the snapshot. `outbox`: a table whose rows are events, for topics named by their
            `aggregate_type`. `topic`: a template of the topics' names, with `{schema}` and
            `{table}`. `include`, `exclude`, `hash`: columns as `table.column` that alone are
            captured, are not captured, or are replaced by the SHA-256 of `salt` and the value.
            `mask`: by column, the text in its place. `where`: by table, a condition that its rows
            must meet. `schema_topic`, `transaction_topic`: topics for the changes of tables'
            columns, and for one row a transaction.

    Returns:
        The capture, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> shop = hr.cdc.sqlite("shop.db", tables=["customers", "orders"], log="file:data")
    """
    name = name or Path(path).stem
    return _capture("sqlite", name, _open_sqlite, tables, settings, path=str(path))


def _open_sqlite(capture: CaptureSpec) -> CaptureSource:
    from headrace.cdc.sqlite_source import SqliteSource

    return SqliteSource.open(capture.options["path"], capture.name, capture.tables)


def postgres(
    url: str,
    *,
    tables: Sequence[str] = (),
    name: str | None = None,
    publication: str | None = None,
    slot: str | None = None,
    **settings: Any,
) -> Capture:
    """Declare a capture of a Postgres database, by logical replication. Needs the extra `postgres`.

    Args:
        url: As in `postgresql://user@host/database`.
        tables: The tables to capture, as `schema.table` or a pattern such as `sales.*`; all of them
            by default.
        name: Of the capture, under which its position is stored; by default the database's name.
        publication: A publication that exists and is used as it is: its tables, columns and rows
            are captured. By default the capture makes one.
        slot: A replication slot that exists and is used as it is. By default the capture makes one.
        **settings: As for every capture, see `hr.cdc.sqlite`.

    Returns:
        The capture, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> shop = hr.cdc.postgres("postgresql://app@db/shop", tables=["orders"], log="file:data")
    """
    name = name or _database_name(url)
    options = {"url": url, "publication": publication, "slot": slot}
    return _capture("postgres", name, _open_postgres, tables, settings, **options)


def _open_postgres(capture: CaptureSpec) -> CaptureSource:
    from headrace.cdc.postgres_source.source import PostgresSource

    options = capture.options
    return PostgresSource.open(
        options["url"],
        capture.name,
        capture.tables,
        prefix=capture.prefix,
        publication=options.get("publication"),
        slot=options.get("slot"),
    )


def mariadb(
    url: str, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any
) -> Capture:
    """Declare a capture of a MariaDB database, from its row binlog. Needs the extra `mysql`.

    Args:
        url: As in `mariadb://user@host/database`.
        tables: The tables to capture; all of them by default.
        name: Of the capture, under which its position is stored; by default the database's name.
        **settings: As for every capture, see `hr.cdc.sqlite`.

    Returns:
        The capture, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> shop = hr.cdc.mariadb("mariadb://app@db/shop", log="file:data")
    """
    return _capture("mariadb", name or _database_name(url), _open_mysql, tables, settings, url=url)


def mysql(
    url: str, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any
) -> Capture:
    """Declare a capture of a MySQL database, from its row binlog. Needs the extra `mysql`.

    Args:
        url: As in `mysql://user@host/database`.
        tables: The tables to capture; all of them by default.
        name: Of the capture, under which its position is stored; by default the database's name.
        **settings: As for every capture, see `hr.cdc.sqlite`. A snapshot needs `gtid_mode = ON` in
            the server; without it, `snapshot=False` captures changes only.

    Returns:
        The capture, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> shop = hr.cdc.mysql("mysql://app@db/shop", log="file:data")
    """
    return _capture("mysql", name or _database_name(url), _open_mysql, tables, settings, url=url)


def _open_mysql(capture: CaptureSpec) -> CaptureSource:
    from headrace.cdc.mysql_source.source import MysqlSource

    return MysqlSource.open(
        capture.options["url"],
        capture.name,
        capture.tables,
        snapshot=capture.snapshot_mode != NEVER,
    )


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
    """Declare a capture of a table of any SQL database, by polling it for rows whose `column` has
    grown: a serial number, or the time of the last change.

    It sees no deletes; of several updates between two polls it sees the last one; and it misses a
    row that is committed later than another one with a larger value in the column.

    Args:
        connect: Returns a new DB-API connection.
        table: The table.
        column: The column that grows.
        schema: The table's columns, as Spark DDL.
        key: The column or columns that identify a row.
        name: Of the capture, under which its position is stored; by default the table's name.
        every: How often the table is polled.
        mark: How the driver writes a parameter: `?` or `%s`.
        **settings: As for every capture, see `hr.cdc.sqlite`.

    Returns:
        The capture, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> orders = hr.cdc.polling(
        ...     lambda: sqlite3.connect("shop.db"), "orders", column="updated_at",
        ...     schema="id BIGINT, updated_at STRING", key="id", log="file:data")
    """
    options = {
        "connect": connect,
        "table": table,
        "column": column,
        "schema": schema,
        "key": as_tuple(key),
        "every_s": to_us(every, what="every") / 1e6,
        "mark": mark,
    }
    settings.setdefault("snapshot", False)  # the first poll sees everything
    return _capture("polling", name or table, _open_polling, (table,), settings, **options)


def _open_polling(capture: CaptureSpec) -> CaptureSource:
    from headrace.cdc.polling_source import PollingSource

    return PollingSource.open(**capture.options)


def debezium(
    topic: str,
    *,
    schema: str,
    key: str | Sequence[str],
    log: str,
    table: str | None = None,
    decimals: str = "precise",
    errors: str = DIVERT,
    name: str | None = None,
    **settings: Any,
) -> Capture:
    """Declare a capture that turns a topic of Debezium's records into a table: creates, updates,
    deletes, reads of a snapshot, truncations and tombstones.

    Args:
        topic: A topic with Debezium's envelope as JSON, in a column `value`.
        schema: The table's columns, as Spark DDL.
        key: The column or columns that identify a row.
        log: The log's address.
        table: The table's name; by default the last word of the topic's name.
        decimals: The connector's `decimal.handling.mode`: "precise", "string" or "double".
        errors: What happens to a record that is not a change of the table: "divert" writes it to
            the dead letters of its topic, and counts it; "stop" ends the capture.
        name: Of the capture, under which its position is stored; by default the topic's name.
        **settings: As for every capture, see `hr.cdc.sqlite`.

    Returns:
        The capture, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> orders = hr.cdc.debezium(
        ...     "pg.public.orders", schema="id BIGINT, state STRING", key="id", log="file:data")
    """
    kinds = ("precise", "string", "double")
    if decimals not in kinds:
        raise InputError(
            f"hr.cdc.debezium has no decimals={decimals!r}: {nearest(decimals, kinds)}"
        )
    check_error_policy(errors, where="hr.cdc.debezium", supported=(DIVERT, STOP))
    table = table or topic.rsplit(".", 1)[-1]
    settings.setdefault("snapshot", False)
    options = {
        "topic": topic,
        "table": table,
        "schema": schema,
        "key": as_tuple(key),
        "log": log,
        "decimals": decimals,
        "errors": errors,
    }
    settings = {**settings, "log": log}
    return _capture("debezium", name or topic, _open_debezium, (table,), settings, **options)


def _open_debezium(capture: CaptureSpec) -> CaptureSource:
    from headrace.cdc.debezium_source import DebeziumSource

    return DebeziumSource.open(**{**capture.options, "log": capture.log or capture.options["log"]})


def _database_name(url: str) -> str:
    return urlsplit(url).path.strip("/") or "database"


_SETTINGS = (
    "log",
    "prefix",
    "topic",
    "partitions",
    "preimages",
    "snapshot",
    "chunk_rows",
    "outbox",
    "include",
    "exclude",
    "mask",
    "hash",
    "salt",
    "where",
    "schema_topic",
    "transaction_topic",
)


def _capture(
    kind: str,
    name: str,
    opener: Any,
    tables: Sequence[str],
    settings: dict[str, Any],
    **options: Any,
) -> Capture:
    check_settings(f"hr.cdc.{kind}", settings, _SETTINGS)
    if isinstance(tables, str):
        raise InputError(
            f"tables must be a list, not {tables!r}.", fix=f"write tables=[{tables!r}]."
        )
    for rules in ("include", "exclude", "hash"):
        if rules in settings:
            settings = {**settings, rules: as_tuple(settings[rules])}
    capture = Capture(
        name=name, kind=kind, opener=opener, tables=tuple(tables), options=options, **settings
    )
    selection_of(capture)
    topic_name("schema.table", capture.prefix, capture.topic)
    return capture


def from_url(
    url: str, *, tables: Sequence[str] = (), name: str | None = None, **settings: Any
) -> Capture:
    """Declare the capture that a URL stands for, as `headrace capture` does.

    Args:
        url: `sqlite:PATH`, or `postgresql://`, `mariadb://` or `mysql://USER@HOST/DATABASE`; or
            another scheme that an installed package handles, by an entry point of the group
            `headrace.sources`.
        tables: The tables to capture; all of them by default.
        name: Of the capture, under which its position is stored.
        **settings: As for every capture, see `hr.cdc.sqlite`.

    Returns:
        The capture, which opens nothing until it is run.

    Raises:
        InputError: The URL names no database that can be captured, or a setting cannot be used.

    Example:
        >>> hr.cdc.from_url("sqlite:shop.db", log="file:data")
    """

    def with_url(declare: Callable[..., Capture]) -> Callable[[str], Capture]:
        return lambda url: declare(url, tables=tables, name=name, **settings)

    builders = {
        "sqlite": lambda url: sqlite(without_scheme(url), tables=tables, name=name, **settings),
        "postgres": with_url(postgres),
        "postgresql": with_url(postgres),
        "mariadb": with_url(mariadb),
        "mysql": with_url(mysql),
    }
    given = {
        **({"tables": tables} if tables else {}),
        **({"name": name} if name else {}),
        **settings,
    }
    return build_from_url(
        url,
        builders,
        plugins=PluginGroup("headrace.sources", Capture),
        settings={**given, **settings},
        what="a database that can be captured",
        examples="sqlite:PATH, or postgres://, mariadb:// or mysql://USER@HOST/DATABASE",
    )
