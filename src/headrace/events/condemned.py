"""Which rows of a log's topics go when a person is forgotten. Used by `excising`.

Of the events' own topic: the subject's. Of topics that pipelines derived from it: rows that name the subject, or an entity of which no event is left, in columns called `subject` and `entity`. Of every topic:
rows that have one of the values given. Where rows are changes of a table, all changes of a key go with one: an older row must not come back in place of a newer one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.events import forgetting
from headrace.events.scanning import spellings
from headrace.log.keys import key_bytes

if TYPE_CHECKING:
    from headrace.events.store import EventStore
    from headrace.log.file.log import FileLog

Marked = Callable[[pa.RecordBatch], pa.BooleanArray]
"""For each row whether it goes; never null."""


def with_subject(subject: str) -> Marked:
    return lambda rows: _equal(rows, "subject", subject)


def with_values(values: Sequence[str]) -> Marked:
    """Rows in whose columns one of the values is, however it is spelled in JSON."""
    patterns = sorted({pattern for value in values for pattern in spellings(value)})
    return lambda rows: reduce(pc.or_, (_has(column, patterns) for column in rows.columns if patterns), _none(rows))


def with_gone_entities(store: EventStore) -> Marked:
    """Rows that name an entity of which no event is left."""
    where = store.log.topic_state(store.topic).directory
    gone = forgetting.kept_versions(store.log, store.topic).keys() - {forgetting.hashed(where, entity) for entity in _entities(store)}

    def marked(rows: pa.RecordBatch) -> pa.BooleanArray:
        if not gone or "entity" not in rows.schema.names or rows.column("entity").type != pa.string():
            return _none(rows)
        column = rows.column("entity")
        names = [name for name in pc.unique(column).to_pylist() if name is not None and forgetting.hashed(where, name) in gone]
        return pc.is_in(column, value_set=pa.array(names, pa.string()))

    return marked


def any_of(*marks: Marked) -> Marked:
    return lambda rows: reduce(pc.or_, (mark(rows) for mark in marks))


def _entities(store: EventStore) -> Iterator[str]:
    for rows in store.log.read(store.topic, 0, columns=["entity"]):
        yield from pc.unique(rows.column("entity")).to_pylist()


def _none(rows: pa.RecordBatch) -> pa.BooleanArray:
    return pa.repeat(pa.scalar(value=False), rows.num_rows)


def _equal(rows: pa.RecordBatch, name: str, value: str) -> pa.BooleanArray:
    if name not in rows.schema.names or rows.column(name).type != pa.string():
        return _none(rows)
    return pc.fill_null(pc.equal(rows.column(name), value), fill_value=False)


def _has(column: pa.Array, patterns: Collection[bytes]) -> pa.BooleanArray:
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        plain = column.cast(pa.binary())
        found = reduce(pc.or_, (pc.match_substring(plain, pattern) for pattern in patterns))
        return pc.fill_null(found, fill_value=False)
    if pa.types.is_nested(column.type):
        texts = (_text(item) for item in column.to_pylist())
        return pa.array([any(pattern in text for pattern in patterns) for text in texts], pa.bool_())
    return pa.repeat(pa.scalar(value=False), len(column))


def _text(item: Any) -> bytes:
    """All texts and bytes of a nested value, one behind the other."""
    if isinstance(item, bytes):
        return item
    if isinstance(item, dict):
        return b"\0".join(_text(each) for pair in item.items() for each in pair)
    if isinstance(item, list | tuple):
        return b"\0".join(map(_text, item))
    return item.encode() if isinstance(item, str) else json.dumps(item, default=str).encode()


@dataclass(frozen=True)
class Condemned:
    """The rows of one topic that go. `first` are those that must be gone before the others: of a table, other changes of the same keys, which are only known by them."""

    topic: str
    marked: Marked
    keys: pa.Array | None = None
    key: tuple[str, ...] = ()

    def passes(self) -> list[Marked]:
        """What is kept, in one pass after the other."""
        others: list[Marked] = [] if self.keys is None else [lambda rows: pc.invert(pc.and_not(self._of_keys(rows), self.marked(rows)))]
        return [*others, lambda rows: pc.invert(self.marked(rows))]

    def _of_keys(self, rows: pa.RecordBatch) -> pa.BooleanArray:
        return pc.fill_null(pc.is_in(key_bytes(rows, self.key), value_set=self.keys), fill_value=False)


def found(log: FileLog, topic: str, marked: Marked) -> Condemned | None:
    """What goes from a topic; None if nothing does."""
    info = log.topic(topic)
    keys: list[pa.Array] = []
    for rows in log.read(topic, headers=True):
        goes = marked(rows)
        if pc.any(goes).as_py():
            if not info.is_table:
                return Condemned(topic, marked)
            keys.append(key_bytes(rows.filter(goes), info.key).drop_null())
    return Condemned(topic, marked, pa.concat_arrays(keys).unique(), tuple(info.key)) if keys else None
