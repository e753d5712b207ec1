"""Single rows of a view as JSON, as fast as SQLite gives them: one statement a row, several in one
transaction, and no Arrow data. The server uses it.

What is stored is close to JSON already (`view_types.py`), so each column has a function from its
stored value to its JSON text.
"""

from __future__ import annotations

import base64
import json
import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import InputError
from headrace.views.file import ViewInfo, ViewTable, null_key, open_for_reading, translated

_HEADERS_BYTES = 96
_INT64 = range(-(1 << 63), 1 << 63)
_quoted = json.JSONEncoder(ensure_ascii=False).encode


class Commits:
    """Whether anything has been committed, at the price of comparing some bytes.

    They are the header of SQLite's index of its write-ahead log
    (https://sqlite.org/walformat.html), which changes with every commit and lies in memory that all
    processes share. The file goes when the last connection does, and another takes its place: so it
    may be mapped only while one's own connection has it open.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}-shm")
        self._header: mmap.mmap | None = None

    def newest(self) -> bytes | None:
        """Equal as long as nothing was committed; None if that cannot be told."""
        return None if self._header is None else self._header[:]

    def map(self) -> None:
        if self._header is None:
            with suppress(OSError, ValueError), self._path.open("rb") as file:
                self._header = mmap.mmap(file.fileno(), _HEADERS_BYTES, access=mmap.ACCESS_READ)


class Lookup:
    """Rows of one view by key. Not for several threads at once. After `show_newest` all rows are of
    one moment, that of the view's `tick`, until it is called again.
    """

    def __init__(self, path: Path, info: ViewInfo) -> None:
        self.info, self.path = info, path
        self.closed, self.tick = False, info.tick
        self._table = ViewTable(info)
        self._db = open_for_reading(path)
        self._commits = Commits(path)
        self._shown: bytes | None = None
        matches = " AND ".join(f"{name} = ?" for name in self._table.key_columns) or "FALSE"
        self._statement = (
            f"SELECT {', '.join(self._table.columns)} FROM {self._table.table} WHERE {matches}"  # noqa: S608
        )
        self._encoders = [
            _encoder(field, null_key(field.type) if field.name in info.key else None)
            for field in info.schema
        ]
        self._form = (
            "{"
            + ",".join(f"{_quoted(name).replace('%', '%%')}:%s" for name in info.schema.names)
            + "}"
        )
        self._plain_keys = [_plain(field.type) for field in self._table.key_fields]

    def close(self) -> None:
        self.closed = True
        self._db.close()

    def show_newest(self) -> bool:
        """Go on to the newest commit, if it is not the one that is shown. False if the view is no
        longer there.
        """
        newest = self._commits.newest()
        if self._db.in_transaction:
            if newest is not None and newest == self._shown:
                return True
            self._db.execute("ROLLBACK")
        with translated(self.path):
            self._db.execute("BEGIN")
            found = self._db.execute(
                "SELECT tick FROM _views WHERE number = ?", (self.info.number,)
            ).fetchone()
        if found is None:
            return False
        (self.tick,), self._shown = (
            found,
            newest,
        )  # which was looked at before: what is shown is no older
        self._commits.map()
        return True

    def end(self) -> None:
        """Hold on to nothing: SQLite cannot shorten its log of changes behind what is shown."""
        if not self.closed and self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def row(self, stored_key: Sequence[Any]) -> str | None:
        """The row of a key as JSON, if there is one."""
        with translated(self.path):
            found = self._db.execute(self._statement, stored_key).fetchone()
        if found is None:
            return None
        return self._form % tuple(
            [encode(value) for encode, value in zip(self._encoders, found, strict=True)]
        )

    def stored_key(self, texts: Sequence[str]) -> list[Any] | None:
        """The key of some texts as it is stored, if each is of a type that needs no thought; else
        None.
        """
        if len(texts) != len(self._plain_keys):
            return None
        stored: list[Any] = []
        for text, plain in zip(texts, self._plain_keys, strict=True):
            if plain is str:
                stored.append(text)
            elif (
                plain is int
                and text.removeprefix("-").isdecimal()
                and text.isascii()
                and int(text) in _INT64
            ):
                stored.append(int(text))
            else:
                return None
        return stored

    def key_of(self, values: tuple[Any, ...]) -> list[Any]:
        """A key of typed values as it is stored."""
        if self.info.is_stream:
            raise InputError(f"The view {self.info.name!r} is a stream: its rows have no key.")
        return self._table.stored_key(values)


def _plain(kind: pa.DataType) -> type | None:
    """A type of keys that is stored as it is written."""
    return str if pa.types.is_string(kind) else int if pa.types.is_int64(kind) else None


def _encoder(field: pa.Field, nothing: Any) -> Callable[[Any], str]:
    """From a stored value to its JSON text. `nothing` is what a key column has in place of a
    null.
    """
    encode = _encoder_of(field.type)
    if nothing is None:
        return lambda value: "null" if value is None else encode(value)
    return lambda value: (
        "null"
        if value is None or (type(value) is type(nothing) and value == nothing)
        else encode(value)
    )


def _encoder_of(kind: pa.DataType) -> Callable[[Any], str]:
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


def _float(value: Any, shown: Callable[[float], str]) -> str:
    """NaN is stored as text; JSON has no infinities."""
    if type(value) is str:
        return f'"{value}"'
    if math.isinf(value):
        return '"Infinity"' if value > 0 else '"-Infinity"'
    return shown(value)
