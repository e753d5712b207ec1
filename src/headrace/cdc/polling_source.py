"""The source `polling`: a table of any SQL database, polled for rows whose column has grown.

It is the simplest capture, and has limits: see `hr.cdc.polling`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from typing import Any, Self

import pyarrow as pa

from headrace.cdc.base import ChunkRequest, StreamPart, TableChanges, TableShape
from headrace.columnar.columns import HIDDEN_FIELDS, MARKS, ORDER, UPDATE_POSTIMAGE
from headrace.errors import ConfigurationError, HeadraceError, RetryError, UnknownColumn
from headrace.log.rows import to_batch
from headrace.types.schema import parse_schema, to_ddl

POLL_ROWS = 20_000
MAX_EQUAL_ROWS = 100_000


class PollingSource:
    """The position is the largest value of the column that was seen, with the keys of the rows that
    have it: more rows may come with the same value.
    """

    def __init__(
        self,
        connection: Any,
        table: str,
        column: str,
        schema: str,
        key: tuple[str, ...],
        every_s: float,
        mark: str,
    ) -> None:
        self._schema = parse_schema(schema)
        for name in (column, *key):
            if name not in self._schema.names:
                raise UnknownColumn(name, self._schema.names, where=f"The schema of {table}")
        columns = tuple(
            (
                field.name,
                to_ddl(pa.schema([field.with_name("c").with_nullable(True)])).removeprefix("c "),
            )
            for field in self._schema
        )
        self.shape = TableShape(table, columns, key)
        self.table = table
        self.column = column
        self.key = key
        self.every_s = every_s
        self.mark = mark
        self._connection = connection
        self._value: Any = None
        self._seen_keys: list[list[Any]] = []
        self._next_s = 0.0
        self._polls = 0

    @classmethod
    def open(cls, *, connect: Callable[[], Any], table: str, **options: Any) -> Self:
        """Connect to the database."""
        with _driver_errors(table):
            connection = connect()
        return cls(connection, table, **options)

    def start(self, position: str | None, *, start_over: bool = False) -> str:
        if position is not None and not start_over:
            stored = json.loads(position)
            self._value, self._seen_keys = _from_json(stored["value"]), stored["keys"]
        return self._position()

    def _position(self) -> str:
        return json.dumps({"value": _to_json(self._value), "keys": self._seen_keys})

    def tables(self) -> list[TableShape]:
        return [self.shape]

    def request(self, chunk: ChunkRequest) -> None:
        raise ConfigurationError(
            f"{chunk.table} is polled, and has no separate snapshot.",
            fix="run it with --start-over to read the whole table again.",
        )

    def count(self, table: str) -> int:
        assert table == self.table
        return 0

    def poll(self, timeout_s: float) -> StreamPart:
        left_s = self._next_s - time.monotonic()
        if left_s > 0:
            time.sleep(min(left_s, timeout_s))
            if left_s > timeout_s:
                return StreamPart()
        # Rows with a larger value, and new rows with the same value.
        names = ", ".join(self._schema.names)
        condition = (
            f"WHERE {self.column} >= {self.mark}"
            if self._value is not None
            else f"WHERE {self.column} IS NOT NULL"
        )
        limit = POLL_ROWS + len(self._seen_keys)
        query = (
            f"SELECT {names} FROM {self.table} {condition} ORDER BY"
            f" {', '.join((self.column, *self.key))} LIMIT {limit}"
        )
        with _driver_errors(self.table):
            cursor = self._connection.cursor()
            cursor.execute(query, (self._value,) if self._value is not None else ())
            rows = [dict(zip(self._schema.names, row, strict=True)) for row in cursor.fetchall()]
            self._connection.rollback()  # the next poll must see what is committed by then
        seen = {json.dumps(key) for key in self._seen_keys}
        new_rows = [
            row
            for row in rows
            if row[self.column] != self._value or json.dumps(self._key_of(row)) not in seen
        ]
        self._advance(new_rows)
        is_full = len(rows) >= limit
        self._polls += 1
        self._next_s = 0.0 if is_full else time.monotonic() + self.every_s
        if not new_rows:
            return StreamPart()
        return StreamPart(
            [TableChanges(self.table, self._batch(new_rows))],
            self._position(),
            transactions=1,
            is_idle=not is_full,
        )

    def _advance(self, new_rows: list[dict[str, Any]]) -> None:
        if not new_rows:
            return
        newest = new_rows[-1][self.column]
        equal = [self._key_of(row) for row in new_rows if row[self.column] == newest]
        self._seen_keys = self._seen_keys + equal if newest == self._value else equal
        self._value = newest
        if len(self._seen_keys) > MAX_EQUAL_ROWS:
            raise ConfigurationError(
                f"More than {MAX_EQUAL_ROWS:,} rows of {self.table} have the same value in"
                f" {self.column!r}.",
                fix="poll by a column that differs more, such as a serial number.",
            )

    def _key_of(self, row: dict[str, Any]) -> list[Any]:
        return [_to_json(row[name]) for name in self.key]

    def _batch(self, rows: list[dict[str, Any]]) -> pa.RecordBatch:
        batch = to_batch(rows, self.shape.schema, topic=self.table)
        count = len(rows)
        hidden = {ORDER: pa.array(range(count), pa.int32()), MARKS: pa.nulls(count, pa.string())}
        arrays = [
            *batch.columns,
            *(hidden.get(field.name, pa.nulls(count, field.type)) for field in HIDDEN_FIELDS),
            pa.array([UPDATE_POSTIMAGE] * count),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.shape.batch_schema)

    def is_caught_up(self) -> bool:
        return self._polls > 0

    def confirm(self, position: str) -> None:
        """The database retains nothing for the capture."""

    def status(self) -> dict[str, Any]:
        return {"seen_up_to": str(self._value)}

    def close(self) -> None:
        self._connection.close()

    def remove(self) -> list[str]:
        return []


def _to_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, date):
        return {"date": value.isoformat()}
    return value if isinstance(value, int | float | str | None) else str(value)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return (
            datetime.fromisoformat(value["datetime"])
            if "datetime" in value
            else date.fromisoformat(value["date"])
        )
    return value


@contextmanager
def _driver_errors(table: str) -> Iterator[None]:
    """Translate a driver's errors. Drivers differ in which of DB-API's errors pass by themselves,
    so only a wrong query ends the capture.
    """
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        if type(error).__name__ in {
            "ProgrammingError",
            "UndefinedTable",
            "UndefinedColumn",
        } or "no such" in str(error):
            raise ConfigurationError(
                f"{table} cannot be polled: {error}",
                fix="check the table's and the columns' names, and `mark`.",
            ) from error
        raise RetryError(
            f"{table} cannot be read now: {error}", fix="it is tried again."
        ) from error
