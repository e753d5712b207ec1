"""What the server says about itself and its tables: settings that capture needs, columns, keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from headrace.cdc.mysql_source.connecting import translated
from headrace.cdc.mysql_source.gtid_sets import mariadb_set, mysql_set
from headrace.cdc.mysql_source.values import FORMS, ddl_type
from headrace.cdc.source import Skipped, TableShape, usable_names
from headrace.errors import ConfigurationError, nearest

_NEEDED = (("log_bin", "ON"), ("binlog_format", "ROW"), ("binlog_row_image", "FULL"), ("binlog_row_metadata", "FULL"))
_NEEDED_OF_MARIADB = (("log_bin_compress", "OFF"),)
_NEEDED_OF_MYSQL = (("binlog_transaction_compression", "OFF"), ("binlog_row_value_options", ""))
_COLUMNS = """
SELECT column_name, data_type, column_type FROM information_schema.columns
WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position
"""
_KEY = """
SELECT column_name FROM information_schema.key_column_usage
WHERE table_schema = %s AND table_name = %s AND constraint_name = 'PRIMARY' ORDER BY ordinal_position
"""


@dataclass(frozen=True)
class MysqlTable:
    """A table: its columns in its own names, and its shape."""

    columns: tuple[str, ...]
    shape: TableShape
    forms: Mapping[str, str] = field(default_factory=dict)
    """The server's types of columns, as the topic calls them, whose values the binlog has in a form of their own."""

    @property
    def key_columns(self) -> tuple[str, ...]:
        return self.shape.key_in(self.columns)


class Catalogue:
    def __init__(self, connection: Any, database: str) -> None:
        self.connection, self.database = connection, database
        self._skipped = Skipped()

    def ask(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with translated(), self.connection.cursor() as cursor:
            cursor.execute(query, values)
            return [tuple(row) for row in cursor.fetchall()]

    def check_server(self) -> None:
        for name, wanted in (*_NEEDED, *(_NEEDED_OF_MARIADB if self.is_mariadb else _NEEDED_OF_MYSQL)):
            rows = self.ask("SHOW GLOBAL VARIABLES LIKE %s", name)
            if rows and str(rows[0][1]).upper() != wanted:  # an older server has not all of them
                command = "start the server with log_bin" if name == "log_bin" else f"SET GLOBAL {name} = '{wanted}'; and the same in the server's configuration"
                raise ConfigurationError(f"The server's {name} is {rows[0][1]!r}; change capture needs {wanted!r}.", fix=f"{command}.")

    @cached_property
    def is_mariadb(self) -> bool:
        return "mariadb" in str(self.ask("SELECT version()")[0][0]).lower()

    @cached_property
    def has_gtids(self) -> bool:
        """MariaDB always; MySQL if it was told to."""
        return self.is_mariadb or str(self.ask("SELECT @@global.gtid_mode")[0][0]).upper() == "ON"

    @cached_property
    def _where(self) -> str:
        """The statement that says where the binlog ends. MySQL 8.2 gave it another name, and 8.4 took the old one away."""
        if self.is_mariadb:
            return "SHOW MASTER STATUS"
        ((version,),) = self.ask("SELECT version()")
        numbers = [int(part) for part in re.findall(r"\d+", str(version))[:2]]
        return "SHOW BINARY LOG STATUS" if numbers >= [8, 2] else "SHOW MASTER STATUS"

    def table_names(self) -> list[str]:
        query = "SELECT table_name FROM information_schema.tables WHERE table_schema = %s AND table_type = 'BASE TABLE' ORDER BY 1"
        return [name for (name,) in self.ask(query, self.database)]

    def tables(self, wanted: Sequence[str]) -> list[MysqlTable]:
        there = self.table_names()
        for name in wanted:
            if name not in there:
                raise ConfigurationError(f"There is no table {name!r} in {self.database}: {nearest(name, there)}", fix="name tables that are there.")
        found = []
        for name in wanted or there:
            try:
                found.append(self.table(name))
            except ConfigurationError as error:
                if wanted:
                    raise
                self._skipped(name, error)
        return found

    def table(self, name: str) -> MysqlTable:
        rows = self.ask(_COLUMNS, self.database, name)
        key = [column for (column,) in self.ask(_KEY, self.database, name)]
        if not key:
            raise ConfigurationError(
                f"The table {name!r} has no primary key, so its rows cannot be told apart.", fix=f"ALTER TABLE {name} ADD PRIMARY KEY (…), or leave it out of tables=[…]."
            )
        own = [column for column, _, _ in rows]
        usable = usable_names(own)
        columns = tuple((column, ddl_type(kind, full)) for column, (_, kind, full) in zip(usable, rows, strict=True))
        forms = {column: str(kind) for column, (_, kind, _) in zip(usable, rows, strict=True) if kind in FORMS}
        return MysqlTable(tuple(own), TableShape(name, columns, tuple(usable[own.index(each)] for each in key)), forms)

    def end(self) -> tuple[str, int]:
        """Where the binlog ends now."""
        return self.end_with_gtids()[:2]

    def end_with_gtids(self) -> tuple[str, int, dict[str, str]]:
        """And which transactions are in it up to there."""
        rows = self.ask(self._where)
        file, position = str(rows[0][0]), int(rows[0][1])
        if self.is_mariadb:
            return file, position, mariadb_set(str(self.ask("SELECT @@gtid_binlog_pos")[0][0]))
        return file, position, mysql_set(str(rows[0][4] or "")) if self.has_gtids else {}

    def binlogs(self) -> list[str]:
        return [str(row[0]) for row in self.ask("SHOW BINARY LOGS")]
