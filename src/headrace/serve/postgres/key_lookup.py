"""The fast path of the most frequent query: the row of one key.

    SELECT balance FROM accounts WHERE id = $1

Such a query needs no engine: the view's store is asked by its key, in the event loop's thread, as
`GET /views/NAME?key=…` does it. A statement that looks otherwise, in whatever respect, is none: it
goes the way of all queries, which gives the same row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.serve.lookups import RowLookups
from headrace.serve.postgres.lexer import (
    NUMBER,
    PARAMETER,
    QUOTED,
    STRING,
    SYMBOL,
    WORD,
    SqlStatement,
    SqlToken,
)
from headrace.serve.postgres.messages import BINARY, data_row
from headrace.serve.postgres.values import encode_rows
from headrace.serve.stores import ViewStores
from headrace.views.file import ViewInfo
from headrace.views.lookup import Lookup

_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class KeyQuery:
    """`SELECT columns FROM view WHERE key = value AND …`, as it is written."""

    view: str
    columns: tuple[str, ...]
    """The columns; empty for all."""
    values: tuple[tuple[str, SqlToken, bool], ...]
    """The key's columns, what each is compared with, and whether that is negative."""


def parse_key_query(statement: SqlStatement) -> KeyQuery | None:
    """Read a statement as a look-up by key; None if it is anything else."""
    tokens = statement.tokens
    if not 8 <= len(tokens) <= 200 or tokens[0].lowered != "select":
        return None
    at = 1
    columns: list[str] = []
    if tokens[1].text == "*":
        at = 2
    else:
        while True:
            if tokens[at].kind not in {WORD, QUOTED} or at + 1 >= len(tokens):
                return None
            columns.append(tokens[at].name)
            at += 2
            if tokens[at - 1].text != ",":
                at -= 1
                break
            if at >= len(tokens):
                return None
    if at + 3 > len(tokens) or tokens[at].lowered != "from":
        return None
    view, where = tokens[at + 1], tokens[at + 2]
    if view.kind not in {WORD, QUOTED} or where.lowered != "where":
        return None
    compared: list[tuple[str, SqlToken, bool]] = []
    at += 3
    while True:
        if (
            at + 3 > len(tokens)
            or tokens[at].kind not in {WORD, QUOTED}
            or tokens[at + 1].text != "="
        ):
            return None
        name, value = tokens[at].name, tokens[at + 2]
        is_negative = value.kind == SYMBOL and value.text == "-"
        if is_negative and at + 3 < len(tokens):
            at += 1
            value = tokens[at + 2]
        is_integer = value.kind == NUMBER and value.text.isdecimal()
        is_plain_text = value.kind == STRING and value.text[0] == "'"
        if not (is_integer or (not is_negative and (is_plain_text or value.kind == PARAMETER))):
            return None
        compared.append((name, value, is_negative))
        at += 3
        if at == len(tokens):
            break
        if tokens[at].lowered != "and":
            return None
        at += 1
    return KeyQuery(view.name, tuple(columns), tuple(compared))


@dataclass(frozen=True)
class FoundRow:
    """The answer: the columns, and the row's message, if there is a row."""

    schema: pa.Schema
    message: bytes | None


class KeyLookups:
    """Looks rows up by their keys. Only the event loop's thread may use it."""

    def __init__(self, stores: ViewStores, lookups: RowLookups) -> None:
        self._stores = stores
        self._lookups = lookups

    def find(
        self,
        query: KeyQuery,
        parameters: Sequence[Any],
        formats: Callable[[int], Sequence[int]],
        zone: str,
    ) -> FoundRow | None:
        """The row of a query; None if it must go the way of all queries.

        Args:
            query: The query.
            parameters: The values of its parameters.
            formats: The format of each column, by their number.
            zone: The session's time zone.
        """
        location, lookup = self._lookups.lookup(query.view)
        if location.version is not None or location.stored_name != query.view:
            return None
        info = lookup.info
        names = info.schema.names
        columns = query.columns or tuple(names)
        if any(name not in names for name in columns):
            return None
        stored_key = _stored_key(query, info, parameters)
        if stored_key is None:
            return None
        schema = (
            info.schema if not query.columns else pa.schema([info.schema.field(n) for n in columns])
        )
        row = lookup.stored_row(stored_key)
        if row is None:
            return FoundRow(schema, None)
        places = [names.index(name) for name in columns]
        return FoundRow(schema, _message(row, places, info, lookup, formats(len(columns)), zone))


def _stored_key(query: KeyQuery, info: ViewInfo, parameters: Sequence[Any]) -> list[Any] | None:
    """The key as it is stored; None if the query compares other columns, or other values than those
    that need no conversion.
    """
    given = {name: (token, is_negative) for name, token, is_negative in query.values}
    if len(given) != len(query.values) or set(given) != set(info.key) or info.is_stream:
        return None
    stored = []
    for name in info.key:
        token, is_negative = given[name]
        kind = info.schema.field(name).type
        value: Any = token.value
        if token.kind == PARAMETER:
            number = int(token.text[1:])
            if number > len(parameters):
                return None
            value = parameters[number - 1]
        elif token.kind == NUMBER:
            value = -int(value) if is_negative else int(value)
        is_text = pa.types.is_string(kind) and type(value) is str
        if not is_text and not (pa.types.is_int64(kind) and type(value) is int and value in _INT64):
            return None
        stored.append(value)
    return stored


def _message(
    row: tuple[Any, ...],
    places: Sequence[int],
    info: ViewInfo,
    lookup: Lookup,
    formats: Sequence[int],
    zone: str,
) -> bytes:
    parts: list[bytes | None] = []
    for place, chosen in zip(places, formats, strict=True):
        value, column = row[place], info.schema.field(place)
        if value is None:
            parts.append(None)
            continue
        encode = _PLAIN.get(column.type)
        if encode is None or (info.null_keys and column.name in info.key):
            batch = lookup.batch([row]).select([info.schema.names[each] for each in places])
            return encode_rows(batch, formats, zone)
        parts.append(encode(value, chosen == BINARY))
    return data_row(parts)


def _integer(form: str) -> Callable[[Any, bool], bytes]:
    packed = struct.Struct(form)
    return lambda value, is_binary: packed.pack(value) if is_binary else b"%d" % value


def _text(value: Any, _is_binary: bool) -> bytes:
    encoded: bytes = value.encode()
    return encoded.replace(b"\0", b"")


def _boolean(value: Any, is_binary: bool) -> bytes:
    if is_binary:
        return b"\1" if value else b"\0"
    return b"t" if value else b"f"


_PLAIN: dict[pa.DataType, Callable[[Any, bool], bytes]] = {
    pa.int8(): _integer(">h"),
    pa.int16(): _integer(">h"),
    pa.int32(): _integer(">i"),
    pa.int64(): _integer(">q"),
    pa.string(): _text,
    pa.bool_(): _boolean,
}
