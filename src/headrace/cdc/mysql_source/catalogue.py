"""What is asked of a MariaDB or MySQL server: connections, settings that capture needs, tables and
their types, GTIDs; and rows as Arrow batches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address
from json import dumps
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from uuid import UUID

import pyarrow as pa

from headrace.cdc.base import (
    Marks,
    SkippedTables,
    TableChanges,
    TableShape,
    marks_column,
    usable_names,
)
from headrace.columnar.columns import (
    COMMITTED_AT,
    DELETE,
    HIDDEN_FIELDS,
    INSERT,
    MARKS,
    ORDER,
    POSITION,
    TRANSACTION,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
)
from headrace.errors import ConfigurationError, HeadraceError, MissingExtra, RetryError, nearest

# Connections

_TEMPORARY_CODES = {
    1040,
    1053,
    1158,
    1159,
    1160,
    1161,
    1205,
    1213,
    1927,
    2002,
    2003,
    2006,
    2013,
    2055,
}
_LOGIN_CODES = {1045, 1698}
_PRIVILEGE_CODES = {1044, 1142, 1143, 1227}
_LOST_BINLOG = 1236
_TLS = ("ssl_ca", "ssl_cert", "ssl_key", "ssl_verify_cert", "ssl_verify_identity")


def drivers() -> tuple[Any, Any]:
    """Import pymysql and pymysqlreplication and return them."""
    try:
        import pymysql
        import pymysqlreplication
    except ImportError:
        raise MissingExtra("mysql-replication", "mysql") from None
    return pymysql, pymysqlreplication


def connection_settings(url: str) -> dict[str, Any]:
    """Return pymysql's arguments for `mariadb://USER@HOST:PORT/DATABASE`. The password may be in
    the environment's MYSQL_PWD, as for MariaDB's own programs.
    """
    parts = urlsplit(url)
    database = parts.path.strip("/")
    if not database:
        raise ConfigurationError(
            f"The address of {parts.hostname} names no database.",
            fix="write mariadb://USER@HOST:PORT/DATABASE.",
        )
    settings: dict[str, Any] = {
        "host": parts.hostname or "127.0.0.1",
        "port": parts.port or 3306,
        "user": unquote(parts.username or "root"),
        "charset": "utf8mb4",
    }
    password = unquote(parts.password) if parts.password else os.environ.get("MYSQL_PWD")
    return {
        **settings,
        "database": database,
        **({"password": password} if password else {}),
        **_tls(parts.query),
    }


def _tls(query: str) -> dict[str, Any]:
    """Return the TLS options of a URL's query, `?ssl_ca=PATH&ssl_verify_identity=true`."""
    options = dict(parse_qsl(query))
    for name in options:
        if name not in _TLS:
            raise ConfigurationError(
                f"An address of MariaDB or MySQL has no option {name!r}: {nearest(name, _TLS)}",
                fix="leave it out.",
            )
    return {
        name: value.lower() in {"1", "true", "yes"} if name.startswith("ssl_verify") else value
        for name, value in options.items()
    }


def connect(url: str) -> Any:
    pymysql, _ = drivers()
    with driver_errors():
        return pymysql.connect(
            **connection_settings(url),
            autocommit=True,
            connect_timeout=10,
            init_command="SET time_zone = '+00:00', sql_mode = ''",
        )


@contextmanager
def driver_errors() -> Iterator[None]:
    """Translate the driver's errors by what can be done about them."""
    pymysql, _ = drivers()
    try:
        yield
    except (pymysql.err.Error, OSError) as error:
        raise to_headrace_error(error) from error
    except RuntimeError as error:  # MySQL's default authentication, without TLS
        if "cryptography" not in str(error):
            raise
        raise ConfigurationError(
            f"The database's authentication needs another package: {error}.",
            fix="pip install cryptography; or connect with TLS: …/DATABASE?ssl_ca=PATH.",
        ) from error


def to_headrace_error(error: BaseException) -> HeadraceError:
    """Return the error to raise for one of the driver's."""
    code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    text = str(error.args[-1]) if error.args else str(error)
    if code == _LOST_BINLOG:
        return binlog_lost_error(text)
    if code in _LOGIN_CODES:
        return ConfigurationError(
            f"The database refuses the connection: {text}",
            fix="check the user; its password can be in the environment's MYSQL_PWD.",
        )
    if code in _PRIVILEGE_CODES:
        return ConfigurationError(
            f"The database refuses: {text}",
            fix=(
                "GRANT REPLICATION SLAVE, REPLICATION CLIENT, SLAVE MONITOR ON *.* and SELECT on"
                " the tables to this user."
            ),
        )
    if code in _TEMPORARY_CODES or code == 0:
        return RetryError(
            f"The database cannot be reached: {text}",
            fix="see that the server runs; the capture tries again by itself.",
        )
    return ConfigurationError(
        f"The database refuses: {text}",
        fix="check the address, the user and the database's settings.",
    )


def binlog_lost_error(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The server no longer has the binlog that follows what is in the log: {reason}. Changes"
        " made"
        " meanwhile may be missing.",
        fix=(
            "run it once with --start-over, which reads all tables again and deletes rows that are"
            " not there any more; then retain binlogs for longer (binlog_expire_logs_seconds)."
        ),
    )


# GTIDs of the transactions that were captured: MariaDB has the last one of each domain, MySQL
# ranges for each source.

_RANGE = re.compile(r"\d+(-\d+)?")


def parse_mariadb_gtids(text: str) -> dict[str, str]:
    """Parse `0-1-7,1-1-3`: the last GTID by domain."""
    return {gtid.split("-", maxsplit=1)[0]: gtid for gtid in text.split(",") if gtid}


def parse_mysql_gtids(text: str) -> dict[str, str]:
    """Parse `uuid:1-7:9,uuid:3`: the ranges by source. A source with a tag (`uuid:tag:5`) is a
    source of its own.
    """
    ranges: dict[str, str] = {}
    for entry in "".join(text.split()).split(","):
        uuid, *parts = entry.split(":")
        source = uuid
        for part in parts:
            if _RANGE.fullmatch(part):
                ranges[source] = f"{ranges[source]}:{part}" if source in ranges else part
            else:
                source = f"{uuid}:{part}"
    return ranges


def format_mysql_gtids(gtids: Mapping[str, str]) -> str:
    """Write ranges by source as MySQL does: `uuid:1-7:9,uuid:3`."""
    return ",".join(f"{source}:{ranges}" for source, ranges in gtids.items())


def add_transaction(ranges: str, number: int) -> str:
    """Add a number to ranges such as `1-7:9`. Nearly always it follows the last one."""
    head, _, last = ranges.rpartition(":")
    start, _, end = last.partition("-")
    if last and int(end or start) + 1 == number:
        return f"{head}:{start}-{number}" if head else f"{start}-{number}"
    bounds = [_bounds(part) for part in ranges.split(":") if part]
    return _merge_ranges([*bounds, (number, number)])


def _bounds(text: str) -> tuple[int, int]:
    start, _, end = text.partition("-")
    return int(start), int(end or start)


def _merge_ranges(ranges: list[tuple[int, int]]) -> str:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return ":".join(f"{start}-{end}" if start != end else str(start) for start, end in merged)


# Types and values. The binlog and a SELECT return some values in different forms, which become the
# same here.

_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_SIGNED = {
    "tinyint": "TINYINT",
    "smallint": "SMALLINT",
    "mediumint": "INT",
    "int": "INT",
    "bigint": "BIGINT",
}
_UNSIGNED = {
    "tinyint": "SMALLINT",
    "smallint": "INT",
    "mediumint": "INT",
    "int": "BIGINT",
    "bigint": "DECIMAL(20,0)",
}
_PLAIN = {
    "float": "FLOAT",
    "double": "DOUBLE",
    "date": "DATE",
    "datetime": "TIMESTAMP_NTZ",
    "timestamp": "TIMESTAMP",
    "year": "INT",
    "bit": "BIGINT",
}
_BINARY = {
    "binary",
    "varbinary",
    "tinyblob",
    "blob",
    "mediumblob",
    "longblob",
    "vector",
    "geometry",
    "point",
    "linestring",
    "polygon",
    "multipoint",
    "multilinestring",
    "multipolygon",
    "geometrycollection",
    "geomcollection",
}
"""Geometries are in the server's own format: the SRID in four bytes, then WKB."""


def ddl_type(data_type: str, column_type: str) -> str:
    """Return the type of a topic's column for types of `information_schema.columns`. TIME can be
    negative and longer than a day, so it stays text, as do sets, enums and unknown types.
    """
    if data_type in _SIGNED:
        return (_UNSIGNED if "unsigned" in column_type else _SIGNED)[data_type]
    if match := _DECIMAL.match(column_type):
        return f"DECIMAL({match[1]},{match[2]})" if int(match[1]) <= 38 else "STRING"
    return "BINARY" if data_type in _BINARY else _PLAIN.get(data_type, "STRING")


def _column_arrays(
    columns: Sequence[Sequence[Any]], schema: pa.Schema, marks: Marks, forms: Mapping[str, str]
) -> list[pa.Array]:
    return [
        _array(values, field, marks, forms.get(field.name))
        for values, field in zip(columns, schema, strict=True)
    ]


def _array(values: Sequence[Any], field: pa.Field, marks: Marks, form: str | None) -> pa.Array:
    convert = FORMS[form] if form is not None else _converter(field.type)
    plain = (
        list(values)
        if convert is None
        else [None if value is None else convert(value) for value in values]
    )
    try:
        return pa.array(plain, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return _one_by_one(plain, field, marks)


def _one_by_one(values: list[Any], field: pa.Field, marks: Marks) -> pa.Array:
    """Convert values one by one, and mark those that do not fit, such as a date of zeros."""
    fitting: list[Any] = []
    for row, value in enumerate(values):
        try:
            pa.array([value], field.type)
            fitting.append(value)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            marks.setdefault(row, {})[field.name] = {"text": str(value)}
            fitting.append(None)
    return pa.array(fitting, field.type)


def _converter(kind: pa.DataType) -> Callable[[Any], Any] | None:
    if pa.types.is_string(kind):
        return _as_text
    if pa.types.is_binary(kind):
        return lambda value: value.encode("latin-1") if isinstance(value, str) else value
    if pa.types.is_timestamp(kind) and kind.tz:
        return lambda value: value.replace(tzinfo=UTC) if isinstance(value, datetime) else value
    if pa.types.is_integer(kind):
        return _as_int
    return None


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, set | frozenset):
        return ",".join(sorted(map(str, value)))
    return _as_time(value) if isinstance(value, timedelta) else str(value)


def _json_text(value: Any) -> str:
    """Return a JSON value as text, as the server writes it. A SELECT returns text; MySQL's binlog
    has the parsed value, with its strings as bytes.
    """
    return value if isinstance(value, str) else dumps(_plain_json(value), ensure_ascii=False)


def _plain_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {_as_text(name): _plain_json(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_plain_json(element) for element in value]
    return value if value is None or isinstance(value, bool | int | float) else _as_text(value)


def _uuid_text(value: Any) -> str:
    """Return a UUID as text. In the binlog it is bytes without the zeros at the end."""
    return str(UUID(bytes=value.ljust(16, b"\0"))) if isinstance(value, bytes) else str(value)


def _inet6_text(value: Any) -> str:
    if not isinstance(value, bytes):
        return str(value)
    address = IPv6Address(value.ljust(16, b"\0"))
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)


def _inet4_text(value: Any) -> str:
    return str(IPv4Address(value.ljust(4, b"\0"))) if isinstance(value, bytes) else str(value)


FORMS: dict[str, Callable[[Any], str]] = {
    "json": _json_text,
    "uuid": _uuid_text,
    "inet6": _inet6_text,
    "inet4": _inet4_text,
}
"""How values are written as text, by the server's type."""
BINARY_FORMS = {"uuid", "inet6", "inet4"}
"""Types that are bytes in the binlog."""


def _as_time(value: timedelta) -> str:
    sign, whole = ("-", -value) if value < timedelta(0) else ("", value)
    seconds, micros = divmod(whole // timedelta(microseconds=1), 1_000_000)
    fraction = f".{micros:06d}" if micros else ""
    return f"{sign}{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{fraction}"


def _as_int(value: Any) -> Any:
    """Return an integer. A BIT is bytes in a SELECT, and a text of zeros and ones in the binlog."""
    if isinstance(value, bytes):
        return int.from_bytes(value, "big")
    return int(value, 2) if isinstance(value, str) else value


# Tables

_REQUIRED_SETTINGS = (
    ("log_bin", "ON"),
    ("binlog_format", "ROW"),
    ("binlog_row_image", "FULL"),
    ("binlog_row_metadata", "FULL"),
)
_MARIADB_SETTINGS = (("log_bin_compress", "OFF"),)
_MYSQL_SETTINGS = (("binlog_transaction_compression", "OFF"), ("binlog_row_value_options", ""))
_COLUMNS = """
SELECT column_name, data_type, column_type FROM information_schema.columns
WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position
"""
_KEY = """
SELECT column_name FROM information_schema.key_column_usage
WHERE table_schema = %s AND table_name = %s AND constraint_name = 'PRIMARY'
ORDER BY ordinal_position
"""


@dataclass(frozen=True)
class MysqlTable:
    """A table: its columns under the server's names, and its shape."""

    columns: tuple[str, ...]
    shape: TableShape
    forms: Mapping[str, str] = field(default_factory=dict)
    """By name in the topic, the server's type of columns that need a conversion of their own."""

    @property
    def key_columns(self) -> tuple[str, ...]:
        return self.shape.key_in(self.columns)


class MysqlCatalogue:
    """Queries one database over one connection."""

    def __init__(self, connection: Any, database: str) -> None:
        self.connection = connection
        self.database = database
        self._skipped = SkippedTables()

    def query(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with driver_errors(), self.connection.cursor() as cursor:
            cursor.execute(query, values)
            return [tuple(row) for row in cursor.fetchall()]

    def check_server(self) -> None:
        """Raise ConfigurationError unless the server's settings allow capture."""
        for name, wanted in (
            *_REQUIRED_SETTINGS,
            *(_MARIADB_SETTINGS if self.is_mariadb else _MYSQL_SETTINGS),
        ):
            rows = self.query("SHOW GLOBAL VARIABLES LIKE %s", name)
            if rows and str(rows[0][1]).upper() != wanted:  # older servers lack some of them
                command = (
                    "start the server with log_bin"
                    if name == "log_bin"
                    else (
                        f"SET GLOBAL {name} = '{wanted}'; and the same in the server's"
                        " configuration"
                    )
                )
                raise ConfigurationError(
                    f"The server's {name} is {rows[0][1]!r}; change capture needs {wanted!r}.",
                    fix=f"{command}.",
                )

    @cached_property
    def is_mariadb(self) -> bool:
        return "mariadb" in str(self.query("SELECT version()")[0][0]).lower()

    @cached_property
    def has_gtids(self) -> bool:
        """Whether transactions have GTIDs: in MariaDB always, in MySQL with `gtid_mode = ON`."""
        return self.is_mariadb or str(self.query("SELECT @@global.gtid_mode")[0][0]).upper() == "ON"

    @cached_property
    def _end_statement(self) -> str:
        """The statement that returns the end of the binlog. MySQL 8.2 gave it another name, and 8.4
        removed the old one.
        """
        if self.is_mariadb:
            return "SHOW MASTER STATUS"
        ((version,),) = self.query("SELECT version()")
        numbers = [int(part) for part in re.findall(r"\d+", str(version))[:2]]
        return "SHOW BINARY LOG STATUS" if numbers >= [8, 2] else "SHOW MASTER STATUS"

    def table_names(self) -> list[str]:
        query = (
            "SELECT table_name FROM information_schema.tables WHERE table_schema = %s AND"
            " table_type = 'BASE TABLE' ORDER BY 1"
        )
        return [name for (name,) in self.query(query, self.database)]

    def tables(self, wanted: Sequence[str]) -> list[MysqlTable]:
        """Return the wanted tables, or all if none is named. Of the latter, those without a key are
        skipped.
        """
        existing = self.table_names()
        for name in wanted:
            if name not in existing:
                raise ConfigurationError(
                    f"There is no table {name!r} in {self.database}: {nearest(name, existing)}",
                    fix="name tables that exist.",
                )
        tables = []
        for name in wanted or existing:
            try:
                tables.append(self.table(name))
            except ConfigurationError as error:
                if wanted:
                    raise
                self._skipped.warn(name, error)
        return tables

    def table(self, name: str) -> MysqlTable:
        rows = self.query(_COLUMNS, self.database, name)
        key = [column for (column,) in self.query(_KEY, self.database, name)]
        if not key:
            raise ConfigurationError(
                f"The table {name!r} has no primary key, so its rows cannot be identified.",
                fix=f"ALTER TABLE {name} ADD PRIMARY KEY (…), or leave it out of tables=[…].",
            )
        own_names = [column for column, _, _ in rows]
        usable = usable_names(own_names)
        columns = tuple(
            (column, ddl_type(kind, full))
            for column, (_, kind, full) in zip(usable, rows, strict=True)
        )
        forms = {
            column: str(kind)
            for column, (_, kind, _) in zip(usable, rows, strict=True)
            if kind in FORMS
        }
        key_names = tuple(usable[own_names.index(column)] for column in key)
        return MysqlTable(tuple(own_names), TableShape(name, columns, key_names), forms)

    def end(self) -> tuple[str, int]:
        """Return the end of the binlog: file and position."""
        return self.end_with_gtids()[:2]

    def end_with_gtids(self) -> tuple[str, int, dict[str, str]]:
        """Return the end of the binlog, and the GTIDs of the transactions up to there."""
        rows = self.query(self._end_statement)
        file, position = str(rows[0][0]), int(rows[0][1])
        if self.is_mariadb:
            return (
                file,
                position,
                parse_mariadb_gtids(str(self.query("SELECT @@gtid_binlog_pos")[0][0])),
            )
        return file, position, parse_mysql_gtids(str(rows[0][4] or "")) if self.has_gtids else {}

    def binlogs(self) -> list[str]:
        return [str(row[0]) for row in self.query("SHOW BINARY LOGS")]


# Rows as Arrow batches


@dataclass(frozen=True)
class RowChange:
    """A change of a row: its kind, the values by column, and its number in the transaction."""

    change: str
    values: Mapping[str, Any]
    order: int


def row_changes(event: Any, table: MysqlTable, order: int) -> list[RowChange]:
    """Return the changes of a row event. An update that changes the key is a delete and an insert.
    `order` is the number of the first one in its transaction.
    """
    rows: list[RowChange] = []
    key = table.key_columns
    for row_order, row in enumerate(event.rows, order):
        if "values" in row:
            kind = INSERT if type(event).__name__.startswith("Write") else DELETE
            rows.append(RowChange(kind, row["values"], row_order))
            continue
        before, after = row["before_values"], row["after_values"]
        has_new_key = any(before.get(name) != after.get(name) for name in key)
        rows += [
            RowChange(DELETE if has_new_key else UPDATE_PREIMAGE, before, row_order),
            RowChange(INSERT if has_new_key else UPDATE_POSTIMAGE, after, row_order),
        ]
    return rows


def table_changes(
    table: MysqlTable, rows: Sequence[RowChange], *, position: int, at_s: int, transaction: int
) -> TableChanges:
    """Return the changes of a table in one transaction, as they are written to its topic."""
    count = len(rows)
    hidden = {
        POSITION: pa.array([position] * count, pa.int64()),
        COMMITTED_AT: (
            pa.array([at_s * 1_000_000] * count, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        ),
        TRANSACTION: pa.array([transaction] * count, pa.int64()),
        ORDER: pa.array([row.order for row in rows], pa.int32()),
    }
    columns = [
        _binlog_values([row.values.get(name) for row in rows], table.forms.get(field))
        for name, (field, _) in zip(table.columns, table.shape.columns, strict=True)
    ]
    return TableChanges(
        table.shape.name, change_batch(table, columns, hidden, [row.change for row in rows])
    )


def _binlog_values(values: list[Any], form: str | None) -> list[Any]:
    """Return values of types that are bytes. Those that happen to be valid text come as text."""
    return (
        [value.encode() if isinstance(value, str) else value for value in values]
        if form in BINARY_FORMS
        else values
    )


def change_batch(
    table: MysqlTable,
    columns: Sequence[Sequence[Any]],
    hidden: Mapping[str, pa.Array],
    kinds: list[str],
) -> pa.RecordBatch:
    """Return rows as a batch with the table's columns, the hidden ones and the change types."""
    marks: Marks = {}
    arrays = _column_arrays(columns, table.shape.schema, marks, table.forms)
    count = len(kinds)
    hidden = {**hidden, MARKS: marks_column(marks, count)}
    arrays += [hidden.get(field.name, pa.nulls(count, field.type)) for field in HIDDEN_FIELDS]
    return pa.RecordBatch.from_arrays(
        [*arrays, pa.array(kinds, pa.string())], schema=table.shape.batch_schema
    )
