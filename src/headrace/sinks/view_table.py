"""The SQL of one view's rows: its table, the view that users' SQL sees, and the statements that read and write it, with keys in SQLite's terms.

A key column may hold nulls, but SQLite's primary keys cannot. So a null key is stored as a value of a kind that the column never has: an empty blob, or in
a column of blobs the number 0. Only when such a row has come does the view that SQL sees turn it back, since that keeps SQLite from using the key's index.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from headrace.errors import InputError
from headrace.log.row_values import Misfit, column
from headrace.operators.kernel import TICK
from headrace.sinks.view_file import ViewInfo
from headrace.sinks.view_types import affinity, from_values, to_values
from headrace.sql_names import quoted


class ViewTable:
    """Where a view's rows are: names of columns, keys, statements."""

    def __init__(self, info: ViewInfo) -> None:
        self.info = info
        self.table = f"_rows_{info.number}"
        names = info.schema.names
        self.columns = [f"c{position}" for position in range(len(names))]
        self.key_columns = [self.columns[names.index(name)] for name in info.key]
        self.key_fields = [info.schema.field(name) for name in info.key]

    # Statements

    def create(self) -> str:
        declared = [f"{name} {affinity(field.type)}" for name, field in zip(self.columns, self.info.schema, strict=True)]
        if self.info.is_stream:
            return f"CREATE TABLE {self.table} (_row INTEGER PRIMARY KEY, {TICK} INTEGER NOT NULL, {', '.join(declared)})"
        return f"CREATE TABLE {self.table} ({', '.join(declared)}, PRIMARY KEY ({', '.join(self.key_columns)})) WITHOUT ROWID"

    def create_view(self, *, null_keys: bool) -> str:
        """The rows under the user's names."""
        shown = [f"{self._shown(position, null_keys=null_keys)} AS {quoted(name)}" for position, name in enumerate(self.info.schema.names)]
        ticks = [TICK] if self.info.is_stream else []
        return f"CREATE VIEW {quoted(self.info.name)} AS SELECT {', '.join([*ticks, *shown])} FROM {self.table}"  # noqa: S608

    def _shown(self, position: int, *, null_keys: bool) -> str:
        name = self.columns[position]
        if not null_keys or name not in self.key_columns:
            return name
        stands_for_null = null_key(self.info.schema.field(position).type)
        return f"nullif({name}, {'x' + repr('') if stands_for_null == b'' else stands_for_null})"

    @property
    def written(self) -> list[str]:
        return [TICK, *self.columns] if self.info.is_stream else self.columns

    def select(self, conditions: list[str], *, reverse: bool = False) -> str:
        """Rows in the order of their key, or of a stream: as they came. A stream's have their tick behind them."""
        order = ["_row"] if self.info.is_stream else self.key_columns
        direction = " DESC" if reverse else ""
        ticks = [TICK] if self.info.is_stream else []
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        by = ", ".join(f"{name}{direction}" for name in order)
        return f"SELECT {', '.join([*self.columns, *ticks])} FROM {self.table}{where} ORDER BY {by}"  # noqa: S608

    # Keys

    def stored_key(self, key: Any) -> list[Any]:
        """A whole key as it is stored."""
        return self.key_prefix(key, whole=True)

    def key_prefix(self, key: Any, *, whole: bool = False) -> list[Any]:
        """The first columns of a key, or all, as they are stored. A key is a value, a tuple of them, or a dict by column name."""
        values = self._key_values(key)
        if not values or len(values) > len(self.info.key) or (whole and len(values) < len(self.info.key)):
            wanted = ", ".join(self.info.key)
            raise InputError(
                f"{key!r} is not a key of the view {self.info.name!r}, whose key is ({wanted}).", fix="give a value for each of its columns."
            )
        return [self._stored(value, field) for value, field in zip(values, self.key_fields, strict=False)]

    def _key_values(self, key: Any) -> tuple[Any, ...]:
        if isinstance(key, Mapping):
            return tuple(key[name] for name in self.info.key) if set(key) == set(self.info.key) else ()
        return tuple(key) if isinstance(key, tuple | list) else (key,)

    def _stored(self, value: Any, field: pa.Field) -> Any:
        if value is None:
            return null_key(field.type)
        try:
            (stored,) = to_values(column(field).array([value]))
        except (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError) as error:
            raise InputError(f"{value!r} cannot be the key column {field.name!r} of the view {self.info.name!r}: {error}.") from None
        return stored

    # Rows

    def key_values(self, array: pa.Array) -> list[Any]:
        """A key column as it is stored: without nulls."""
        values = to_values(array)
        if not array.null_count:
            return values
        stands_for_null = null_key(array.type)
        return [stands_for_null if value is None else value for value in values]

    @property
    def schema(self) -> pa.Schema:
        """Of rows as they are read: a stream's end with their tick."""
        return self.info.schema.append(pa.field(TICK, pa.int64(), nullable=False)) if self.info.is_stream else self.info.schema

    def batch(self, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
        """Rows as `select` gave them, with the view's own types."""
        cells = list(zip(*rows, strict=True)) if rows else [()] * len(self.schema)
        arrays = [self._array(list(values), field) for values, field in zip(cells, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _array(self, values: list[Any], field: pa.Field) -> pa.Array:
        if self.info.null_keys and field.name in self.info.key:
            stands_for_null = null_key(field.type)
            values = [None if value == stands_for_null and type(value) is type(stands_for_null) else value for value in values]
        return from_values(values, field.type)


def null_key(kind: pa.DataType) -> Any:
    """What stands for a null in a key column of a type; no value of the type is stored like it."""
    return 0 if pa.types.is_binary(kind) else b""
