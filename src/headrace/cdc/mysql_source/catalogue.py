"""What the server says about itself and its tables: settings that capture needs, columns, keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.cdc.mysql_source.connecting import translated
from headrace.cdc.mysql_source.values import ddl_type
from headrace.cdc.source import Skipped, TableShape, usable_names
from headrace.errors import ConfigurationError, nearest

_NEEDED = (("log_bin", "1"), ("binlog_format", "ROW"), ("binlog_row_image", "FULL"), ("binlog_row_metadata", "FULL"))
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
        for name, wanted in _NEEDED:
            rows = self.ask(f"SELECT @@global.{name}")
            if str(rows[0][0]).upper() != wanted:
                command = "start the server with log_bin" if name == "log_bin" else f"SET GLOBAL {name} = '{wanted}'; and the same in the server's configuration"
                raise ConfigurationError(f"The server's {name} is {rows[0][0]!r}; change capture needs {wanted!r}.", fix=f"{command}.")

    @property
    def is_mariadb(self) -> bool:
        return "mariadb" in str(self.ask("SELECT version()")[0][0]).lower()

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
        return MysqlTable(tuple(own), TableShape(name, columns, tuple(usable[own.index(each)] for each in key)))

    def end(self) -> tuple[str, int]:
        """Where the binlog ends now."""
        rows = self.ask("SHOW MASTER STATUS")
        return str(rows[0][0]), int(rows[0][1])

    def binlogs(self) -> list[str]:
        return [str(row[0]) for row in self.ask("SHOW BINARY LOGS")]
