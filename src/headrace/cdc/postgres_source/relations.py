"""Relations as pgoutput describes them, and the shapes they have for us."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from headrace.cdc.source import TableShape, usable_names

ROW_COLUMN = "_row"
"""The key of a table without one: a digest of the whole row."""
TypeNamer = Callable[[int, int], str]
"""From a type's number and modifier to the type of a topic's column."""


@dataclass(frozen=True)
class Relation:
    """A table as the stream has it. `key` are the places of the key's columns; a table without a key has none, and its rows are known by their digest."""

    id: int
    shape: TableShape
    key: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def width(self) -> int:
        """How many columns the source sends."""
        return len(self.shape.columns) - (0 if self.key else 1)


def make_shape(name: str, columns: list[str], kinds: list[str], key: list[str]) -> tuple[TableShape, tuple[int, ...]]:
    """The shape of a table, and where its key stands. Without a key there is one more column, the row's digest."""
    usable = usable_names(columns)
    places = tuple(columns.index(each) for each in key)
    described = tuple(zip(usable, kinds, strict=True))
    if not places:
        return TableShape(name, (*described, (ROW_COLUMN, "STRING")), (ROW_COLUMN,)), ()
    return TableShape(name, described, tuple(usable[place] for place in places)), places


@dataclass(frozen=True)
class RelationMessage:
    """What `R` says, before types have names."""

    id: int
    name: str
    columns: tuple[tuple[str, int, int], ...]

    def to_relation(self, type_name: TypeNamer, key: list[str]) -> Relation:
        names = [name for name, _, _ in self.columns]
        shape, places = make_shape(self.name, names, [type_name(kind, mod) for _, kind, mod in self.columns], [each for each in key if each in names])
        return Relation(self.id, shape, places)


def parse_relation(payload: bytes) -> RelationMessage:
    (number,) = struct.unpack_from(">I", payload, 1)
    schema, at = _text(payload, 5)
    name, at = _text(payload, at)
    (count,) = struct.unpack_from(">H", payload, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        column, at = _text(payload, at + 1)
        kind, mod = struct.unpack_from(">Ii", payload, at)
        at += 8
        columns.append((column, kind, mod))
    return RelationMessage(number, f"{schema}.{name}", tuple(columns))


def parse_truncate(payload: bytes) -> list[int]:
    (count,) = struct.unpack_from(">I", payload, 1)
    return list(struct.unpack_from(f">{count}I", payload, 6))


def parse_logical(payload: bytes) -> tuple[str, bytes]:
    """A logical message: its prefix and its content."""
    prefix, at = _text(payload, 10)
    (length,) = struct.unpack_from(">I", payload, at)
    return prefix, payload[at + 4 : at + 4 + length]


def _text(payload: bytes, at: int) -> tuple[str, int]:
    end = payload.index(0, at)
    return payload[at:end].decode(), end + 1
