"""What is asked of a MariaDB or MySQL server: connections, settings that capture needs, GTIDs,
tables, and the foreign keys by which a change of one table changes another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace.cdc.base import PositionLost, SkippedTables, TableShape, usable_names
from headrace.cdc.mysql_source.column_type import (
    ADDRESSES,
    MysqlColumn,
    catalogue_column,
    quoted,
)
from headrace.errors import ConfigurationError, HeadraceError, MissingExtra, RetryError, nearest
from headrace.mysql import connection_settings

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


def drivers() -> tuple[Any, Any]:
    """Import pymysql and pymysqlreplication and return them."""
    try:
        import pymysql
        import pymysqlreplication
    except ImportError:
        raise MissingExtra("mysql-replication", "mysql") from None
    return pymysql, pymysqlreplication


def connect(url: str) -> Any:
    """Connect to the database. Values come as the server writes them, in UTC: as text, or bytes."""
    pymysql, _ = drivers()
    encoders = {
        kind: encode
        for kind, encode in pymysql.converters.conversions.items()
        if not isinstance(kind, int)
    }
    with driver_errors():
        return pymysql.connect(
            **connection_settings(url),
            autocommit=True,
            connect_timeout=10,
            conv=encoders,
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


def binlog_lost_error(reason: str) -> PositionLost:
    return PositionLost(
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


# Tables

_REQUIRED_SETTINGS = (
    ("log_bin", "ON"),
    ("binlog_format", "ROW"),
    ("binlog_row_image", "FULL"),
    ("binlog_row_metadata", "FULL"),
)
_MARIADB_SETTINGS = (("log_bin_compress", "OFF"),)
_MYSQL_SETTINGS = (("binlog_transaction_compression", "OFF"), ("binlog_row_value_options", ""))
_TABLES = """
SELECT table_name, table_type FROM information_schema.tables
WHERE table_schema = %s AND table_type IN ('BASE TABLE', 'SYSTEM VERSIONED') {} ORDER BY 1
"""
_COLUMNS = """
SELECT table_name, column_name, data_type, column_type, generation_expression
FROM information_schema.columns WHERE table_schema = %s {} ORDER BY table_name, ordinal_position
"""
_KEYS = """
SELECT table_name, column_name FROM information_schema.key_column_usage
WHERE table_schema = %s AND constraint_name = 'PRIMARY' {} ORDER BY table_name, ordinal_position
"""
_REFERENCES = """
SELECT constraint_name, table_name, referenced_table_schema, referenced_table_name,
       referenced_column_name
FROM information_schema.key_column_usage
WHERE table_schema = %s AND referenced_table_name IS NOT NULL
"""
_PRIVILEGES = """
SELECT privilege_type, '' FROM information_schema.user_privileges
UNION SELECT privilege_type, table_schema FROM information_schema.schema_privileges
"""
_OLD_TIME = re.compile(r"\(\d\).*mariadb-5\.3")
_ACTIVE_RULE = r"ON {} (CASCADE|SET NULL|SET DEFAULT)"


@dataclass(frozen=True)
class MysqlTable:
    """A table: its columns as the server has them, and its shape."""

    columns: tuple[MysqlColumn, ...]
    shape: TableShape
    row_end: str | None = None
    """Of a system-versioned table, the column that says when a row ended."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def key_columns(self) -> tuple[MysqlColumn, ...]:
        by_name = {column.name: column for column in self.columns}
        return tuple(by_name[name] for name in self.shape.key_in(self.names))

    @property
    def address_forms(self) -> dict[str, str]:
        """The forms of columns that the binlog does not tell from binary strings."""
        return {column.name: column.form for column in self.columns if column.form in ADDRESSES}


def make_table(
    name: str, columns: Sequence[MysqlColumn], key: Sequence[str], row_end: str | None
) -> MysqlTable:
    """Return a table with its shape.

    Raises:
        ConfigurationError: It has no key.
    """
    key = [column for column in key if column != row_end]
    if not key:
        raise ConfigurationError(
            f"The table {name!r} has no primary key, so its rows cannot be identified.",
            fix=f"ALTER TABLE {name} ADD PRIMARY KEY (…), or leave it out of tables=[…].",
        )
    own_names = [column.name for column in columns]
    usable = usable_names(own_names)
    shape = TableShape(
        name,
        tuple((own, column.ddl) for own, column in zip(usable, columns, strict=True)),
        tuple(usable[own_names.index(column)] for column in key),
    )
    return MysqlTable(tuple(columns), shape, row_end)


def _table(
    name: str, table_type: str, rows: Sequence[tuple[Any, ...]], key: Sequence[str]
) -> MysqlTable:
    """Return a table by what the catalogue says of it."""
    for column, _, full, _ in rows:
        if _OLD_TIME.search(full):
            raise ConfigurationError(
                f"The column {column!r} of {name!r} has times in the format of MariaDB 5.3, whose"
                " fractions cannot be read in the binlog.",
                fix=f"SET GLOBAL mysql56_temporal_format = ON; then ALTER TABLE {name} FORCE.",
            )
    columns = [catalogue_column(column, kind, full) for column, kind, full, _ in rows]
    ends = [column for column, *_, made in rows if str(made or "").upper() == "ROW END"]
    row_end = ends[0] if ends else "row_end" if table_type == "SYSTEM VERSIONED" else None
    return make_table(name, columns, key, row_end)


@dataclass(frozen=True)
class ForeignKey:
    """A reference by which a change of the parent's rows changes the child's, which the binlog does
    not have.
    """

    child: tuple[str, str]
    parent: tuple[str, str]
    columns: frozenset[str]
    """The parent's columns."""
    on_delete: bool
    on_update: bool


class MysqlCatalogue:
    """Queries one database over one connection."""

    def __init__(self, connection: Any, database: str) -> None:
        self.connection = connection
        self.database = database
        self._skipped = SkippedTables()

    def query(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query. Values are text, or bytes."""
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
        self._check_filters()

    def _check_filters(self) -> None:
        (_, _, only, ignored, *_), *_ = self.query(self._end_statement)
        is_left_out = self.database in str(ignored or "").split(",")
        if is_left_out or (only and self.database not in str(only).split(",")):
            raise ConfigurationError(
                f"The server does not write the database {self.database!r} to its binlog"
                f" (binlog_do_db {only or ''!r}, binlog_ignore_db {ignored or ''!r}).",
                fix="change these two settings in the server's configuration, and restart it.",
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
        """Return the names of the tables, without views and sequences."""
        return [str(name) for name, _ in self.query(_TABLES.format(""), self.database)]

    def tables(
        self, wanted: Sequence[str], *, are_required: bool
    ) -> tuple[list[str], list[MysqlTable]]:
        """Return the names of all tables, and those tables that are wanted: all if none is named.
        Tables that cannot be captured raise a ConfigurationError if they are required, and are left
        out with a warning otherwise.
        """
        existing, columns, keys = self._definitions(None)
        tables = []
        for name in wanted or existing:
            if name not in existing:
                continue
            try:
                tables.append(_table(name, existing[name], columns[name], keys.get(name, [])))
            except ConfigurationError as error:
                if are_required:
                    raise
                self._skipped.warn(name, error)
        return list(existing), tables

    def check_exist(self, wanted: Sequence[str]) -> None:
        """Raise ConfigurationError if there is no table of a name."""
        existing = self.table_names()
        for name in wanted:
            if name not in existing:
                raise ConfigurationError(
                    f"There is no table {name!r} in {self.database}: {nearest(name, existing)}",
                    fix="name tables that exist.",
                )

    def table(self, name: str) -> MysqlTable:
        """Return a table as it is now.

        Raises:
            ConfigurationError: It does not exist, has no key, or a type that cannot be captured.
        """
        existing, columns, keys = self._definitions(name)
        if name not in existing:
            raise ConfigurationError(
                f"There is no table {name!r} in {self.database}.", fix="name tables that exist."
            )
        return _table(name, existing[name], columns[name], keys.get(name, []))

    def _definitions(
        self, only: str | None
    ) -> tuple[dict[str, str], dict[str, list[tuple[Any, ...]]], dict[str, list[str]]]:
        """Return, by table, its type, what the catalogue says of its columns, and its key."""
        condition = "" if only is None else "AND table_name = %s"
        parameters = (self.database,) if only is None else (self.database, only)
        # Columns last: what is in the list of tables has columns, unless it is dropped meanwhile.
        keys: dict[str, list[str]] = {}
        for table, column in self.query(_KEYS.format(condition), *parameters):
            keys.setdefault(table, []).append(column)
        types = dict(self.query(_TABLES.format(condition), *parameters))
        columns: dict[str, list[tuple[Any, ...]]] = {}
        for table, *column in self.query(_COLUMNS.format(condition), *parameters):
            columns.setdefault(table, []).append(tuple(column))
        return {table: kind for table, kind in types.items() if table in columns}, columns, keys

    def foreign_keys(self) -> list[ForeignKey]:
        """Return the references that change the child's rows: those of the database's tables, and
        of tables that these refer to.
        """
        keys: dict[tuple[Any, ...], set[str]] = {}
        schemas, read = {self.database}, set[str]()
        while schemas - read:
            schema = (schemas - read).pop()
            read.add(schema)
            definitions: dict[str, str] = {}
            for name, child, parent_schema, parent, column in self.query(_REFERENCES, schema):
                if child not in definitions:
                    definitions[child] = self._definition(schema, child)
                rules = _rules(definitions[child], name)
                if any(rules):
                    reference = ((schema, child), (parent_schema, parent), *rules)
                    keys.setdefault(reference, set()).add(column)
                    schemas.add(parent_schema)
        return [
            ForeignKey(child, parent, frozenset(columns), on_delete, on_update)
            for (child, parent, on_delete, on_update), columns in keys.items()
        ]

    def _definition(self, schema: str, table: str) -> str:
        """Return the statement that would create a table. It has the rules of foreign keys, which
        the information schema hides from users that may only read.
        """
        pymysql, _ = drivers()
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(f"SHOW CREATE TABLE {quoted(schema)}.{quoted(table)}", ())
                return str(cursor.fetchone()[1])
        except pymysql.err.ProgrammingError:  # it has just been dropped, so nothing cascades to it
            return ""
        except pymysql.err.Error as error:
            raise to_headrace_error(error) from error

    def has_hidden_writers(self, tables: Sequence[tuple[str, str]]) -> bool:
        """Return whether a statement that names these tables may write to others: by a trigger, or
        by a stored function of one of the names. Without the privileges TRIGGER and EXECUTE these
        cannot be seen, so it may.
        """
        granted = {(str(kind), str(schema)) for kind, schema in self.query(_PRIVILEGES)}
        for schema in {schema for schema, _ in tables}:
            for kind in ("TRIGGER", "EXECUTE"):
                if not {(kind, ""), (kind, schema)} & granted:
                    return True
        names = {name.casefold() for _, name in tables}
        triggers = self.query("SELECT DISTINCT event_object_table FROM information_schema.triggers")
        functions = self.query(
            "SELECT DISTINCT routine_name FROM information_schema.routines WHERE routine_type ="
            " 'FUNCTION'"
        )
        return any(str(name).casefold() in names for (name,) in (*triggers, *functions))

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


def _rules(definition: str, name: str) -> tuple[bool, bool]:
    """Return whether a foreign key of a table's definition does something when rows of its parent
    are deleted, and when their keys change.
    """
    for line in definition.splitlines():
        if f"CONSTRAINT `{name.replace('`', '``')}` FOREIGN KEY" in line:
            deleted, updated = (
                re.search(_ACTIVE_RULE.format(event), line) is not None
                for event in ("DELETE", "UPDATE")
            )
            return deleted, updated
    return False, False


class Cascades:
    """Which tables foreign keys change when rows of others change. The keys are read when they are
    first needed, and again after `forget`.
    """

    def __init__(self, catalogue: MysqlCatalogue) -> None:
        self._catalogue = catalogue
        self._known: list[ForeignKey] | None = None

    def forget(self) -> None:
        """Have the foreign keys read again, since they may have changed."""
        self._known = None

    @property
    def _keys(self) -> list[ForeignKey]:
        if self._known is None:
            self._known = self._catalogue.foreign_keys()
        return self._known

    def has_parent(self, table: tuple[str, str]) -> bool:
        """Return whether changes of a table may change others."""
        return any(key.parent == table for key in self._keys)

    def children(
        self, tables: Sequence[tuple[str, str]], is_first: Callable[[ForeignKey], bool]
    ) -> set[tuple[str, str]]:
        """Return the tables that change with rows of others, directly or through tables between
        them. `is_first` says of a key of these others whether it does anything.
        """
        parents = {(schema.casefold(), name.casefold()) for schema, name in tables}
        reached: set[tuple[str, str]] = set()
        waiting = [
            key.child
            for key in self._keys
            if (key.parent[0].casefold(), key.parent[1].casefold()) in parents and is_first(key)
        ]
        while waiting:
            child = waiting.pop()
            if child not in reached:
                reached.add(child)
                waiting += [key.child for key in self._keys if key.parent == child]
        return reached
