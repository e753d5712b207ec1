"""Single rows of a view as JSON, as fast as SQLite gives them: one statement a row, which shows one moment, and no Arrow data. The server uses it.

What is stored is close to JSON already (`view_types.py`), so each column has a function from its stored value to its JSON text.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import InputError
from headrace.sinks.view_file import ViewInfo, open_for_reading, translated
from headrace.sinks.view_table import ViewTable, null_key

_INT64 = range(-(1 << 63), 1 << 63)


class Lookup:
    """Rows of one view by key. Not for several threads at once."""

    def __init__(self, path: Path, info: ViewInfo) -> None:
        self.info, self.path = info, path
        self._table = ViewTable(info)
        self._db = open_for_reading(path)
        matches = " AND ".join(f"r.{name} = ?" for name in self._table.key_columns) or "FALSE"
        columns = ", ".join(f"r.{name}" for name in self._table.columns)
        joined = f"_views v LEFT JOIN {self._table.table} r ON {matches}"
        self._statement = f"SELECT v.tick, r.{(self._table.key_columns or ['c0'])[0]} IS NOT NULL, {columns} FROM {joined} WHERE v.number = ?"  # noqa: S608
        self._encoders = [_encoder(field) for field in info.schema]
        self._names = [("," if at else "{") + json.dumps(name, ensure_ascii=False) + ":" for at, name in enumerate(info.schema.names)]
        self._null_keys = [null_key(field.type) if field.name in info.key else None for field in info.schema]

    def close(self) -> None:
        self._db.close()

    def get(self, stored_key: Sequence[Any]) -> tuple[int, str | None] | None:
        """The tick that the view shows, and the row of a key as JSON, if it has one. None if the view is no longer there."""
        with translated(self.path):
            found = self._db.execute(self._statement, (*stored_key, self.info.number)).fetchone()
        if found is None:
            return None
        return found[0], self._text(found[2:]) if found[1] else None

    def _text(self, values: Sequence[Any]) -> str:
        parts = []
        for name, encode, value, nothing in zip(self._names, self._encoders, values, self._null_keys, strict=True):
            is_null = value is None or (nothing is not None and type(value) is type(nothing) and value == nothing)
            parts += [name, "null" if is_null else encode(value)]
        return "".join(parts) + "}"

    def stored_key(self, texts: Sequence[str]) -> list[Any] | None:
        """The key of some texts as it is stored, if each is of a type that needs no thought; else None."""
        fields = self._table.key_fields
        if len(texts) != len(fields):
            return None
        stored: list[Any] = []
        for text, field in zip(texts, fields, strict=True):
            if pa.types.is_string(field.type):
                stored.append(text)
            elif pa.types.is_int64(field.type) and text.removeprefix("-").isdecimal() and text.isascii() and int(text) in _INT64:
                stored.append(int(text))
            else:
                return None
        return stored

    def key_of(self, values: tuple[Any, ...]) -> list[Any]:
        """A key of typed values as it is stored."""
        if self.info.is_stream:
            raise InputError(f"The view {self.info.name!r} is a stream: its rows have no key.")
        return self._table.stored_key(values)


def _encoder(field: pa.Field) -> Callable[[Any], str]:
    kind = field.type
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
    return lambda value: json.dumps(value, ensure_ascii=False)


def _float(value: Any, shown: Callable[[float], str]) -> str:
    """NaN is stored as text; JSON has no infinities."""
    if type(value) is str:
        return f'"{value}"'
    if math.isinf(value):
        return '"Infinity"' if value > 0 else '"-Infinity"'
    return shown(value)
