"""Reads single rows of a view as JSON, as fast as SQLite returns them: one statement a row, several
rows in one transaction, and no Arrow data. The server uses it for `GET /views/NAME?key=…`.

Stored values are close to JSON already (`types.sqlite_codec`), so each column has a function from
its stored value to its JSON text.
"""

from __future__ import annotations

import base64
import json
import math
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import InputError
from headrace.types.json_codec import json_text
from headrace.types.sqlite_codec import affinity, from_key_values, key_affinity, null_key
from headrace.views.file import ViewInfo, ViewTable, open_for_reading, translate_errors

_INT64 = range(-(1 << 63), 1 << 63)
_quoted = json.JSONEncoder(ensure_ascii=False).encode


class Lookup:
    """Rows of one view by key, for one thread. After `refresh` all rows come from one snapshot,
    that of `tick`, until it is called again.

    Whether anything was committed is asked of a second connection, because the snapshot hides it
    from the first. This costs 2 µs of the 85 µs that a look-up takes over HTTP; a snapshot for each
    look-up would cost 6 µs.
    """

    def __init__(
        self,
        path: Path,
        info: ViewInfo,
        db: sqlite3.Connection,
        version_db: sqlite3.Connection,
    ) -> None:
        self.info = info
        self.path = path
        self.is_closed = False
        self.tick = info.tick
        self._table = ViewTable(info)
        self._db = db
        self._version_db = version_db
        self._snapshot_version: int | None = None
        matches = " AND ".join(f"{name} = ?" for name in self._table.key_columns) or "FALSE"
        self._statement = (
            f"SELECT {', '.join(self._table.columns)} FROM {self._table.table} WHERE {matches}"  # noqa: S608
        )
        self._encoders = [
            _encoder(field, null_key(field.type) if field.name in info.key else None)
            for field in info.schema
        ]
        columns = (f"{_quoted(name).replace('%', '%%')}:%s" for name in info.schema.names)
        self._row_template = "{" + ",".join(columns) + "}"
        # Key columns whose text needs no parsing beyond `str` or `int`.
        self._plain_key_types = [
            str
            if pa.types.is_string(field.type)
            else int
            if pa.types.is_int64(field.type)
            else None
            for field in self._table.key_fields
        ]

    @classmethod
    def open(cls, path: Path, info: ViewInfo) -> Lookup:
        return cls(path, info, open_for_reading(path), open_for_reading(path))

    def close(self) -> None:
        self.is_closed = True
        self._db.close()
        self._version_db.close()

    def refresh(self) -> bool:
        """Move on to a snapshot of the newest commit, if there is a newer one. False if the view no
        longer exists.
        """
        try:  # read before the snapshot, which is therefore no older
            (version,) = self._version_db.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            with translate_errors(self.path):
                raise
        if self._db.in_transaction:
            if version == self._snapshot_version:
                return True
            self._db.execute("ROLLBACK")
        with translate_errors(self.path):
            self._db.execute("BEGIN")
            row = self._db.execute(
                "SELECT tick FROM _views WHERE number = ?", (self.info.number,)
            ).fetchone()
        if row is None:
            return False
        (self.tick,) = row
        self._snapshot_version = version
        return True

    def release(self) -> None:
        """End the snapshot: SQLite cannot shorten its write-ahead log behind an open one."""
        if not self.is_closed and self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def row_json(self, stored_key: Sequence[Any]) -> str | None:
        """The row of a key as JSON, if there is one."""
        row = self.stored_row(stored_key)
        if row is None:
            return None
        return self._row_template % tuple(
            [encode(value) for encode, value in zip(self._encoders, row, strict=True)]
        )

    def stored_row(self, stored_key: Sequence[Any]) -> tuple[Any, ...] | None:
        """The row of a key as it is stored, if there is one."""
        with translate_errors(self.path):
            row: tuple[Any, ...] | None = self._db.execute(self._statement, stored_key).fetchone()
        return row

    def batch(self, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
        """Stored rows, converted to the view's types."""
        return self._table.batch(rows)

    def parse_plain_key(self, texts: Sequence[str]) -> list[Any] | None:
        r"""The stored form of a key given as texts, if all its columns are STRING or BIGINT and no
        text ends in `\N`, which may be null; else None.
        """
        if len(texts) != len(self._plain_key_types):
            return None
        stored: list[Any] = []
        for text, plain_type in zip(texts, self._plain_key_types, strict=True):
            if plain_type is str and not text.endswith("\\N"):
                stored.append(text)
            elif (
                plain_type is int
                and text.removeprefix("-").isdecimal()
                and text.isascii()
                and int(text) in _INT64
            ):
                stored.append(int(text))
            else:
                return None
        return stored

    def stored_key(self, values: tuple[Any, ...]) -> list[Any]:
        """The stored form of a key given as typed values."""
        if self.info.is_stream:
            raise InputError(f"The view {self.info.name!r} is a stream: its rows have no key.")
        return self._table.stored_key(values)


def _encoder(field: pa.Field, null_value: Any) -> Callable[[Any], str]:
    """A function from a stored value to its JSON text. `null_value` is the stand-in for null in a
    key column.
    """
    encode = _value_encoder(field.type)
    if null_value is not None and key_affinity(field.type) != affinity(field.type):
        encode = _key_encoder(field.type)
    if null_value is None:
        return lambda value: "null" if value is None else encode(value)
    return lambda value: (
        "null"
        if value is None or (type(value) is type(null_value) and value == null_value)
        else encode(value)
    )


def _value_encoder(kind: pa.DataType) -> Callable[[Any], str]:
    if pa.types.is_boolean(kind):
        return lambda value: "true" if value else "false"
    if pa.types.is_float32(kind):
        return lambda value: _float(value, lambda number: str(np.float32(number)))
    if pa.types.is_floating(kind):
        return lambda value: _float(value, repr)
    if pa.types.is_integer(kind) or pa.types.is_duration(kind):
        return str
    if pa.types.is_binary(kind):
        return lambda value: f'"{base64.b64encode(value).decode()}"'
    if pa.types.is_nested(kind):
        return str  # JSON already
    return _quoted


def _key_encoder(kind: pa.DataType) -> Callable[[Any], str]:
    """For key columns that are stored in another form than other columns."""
    return lambda value: str(json_text(from_key_values([value], kind))[0].as_py())


def _float(value: Any, to_text: Callable[[float], str]) -> str:
    """The JSON text of a float. NaN is stored as text, and JSON has no infinities."""
    if type(value) is str:
        return f'"{value}"'
    if math.isinf(value):
        return '"Infinity"' if value > 0 else '"-Infinity"'
    return to_text(value)
