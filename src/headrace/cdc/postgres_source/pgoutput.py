"""pgoutput's messages as items of the stream, many at once. One Python step a message is spent on collecting them, none on taking them apart.

Messages that are rare (a relation, a truncation, a logical message) are read one by one; where one of them changes what follows, the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from headrace.cdc.postgres_source.relations import Relation, RelationMessage, parse_logical, parse_relation, parse_truncate
from headrace.cdc.postgres_source.row_groups import RowGroups
from headrace.cdc.postgres_source.toast import ToastCache
from headrace.cdc.postgres_source.tuples import Bytes, Ints, read_ints
from headrace.cdc.source import COMMITTED_AT, ORDER, POSITION, TRANSACTION, Changes, Event, Item, Reshaped, TableShape, Truncated

BEGIN, COMMIT, RELATION, INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE = b"BCRIUDTM"
OUR_PREFIX = "headrace"
LOGICAL_TOPIC = "logical_messages"
LOGICAL_DDL = "prefix STRING, content BINARY, position BIGINT, transaction BIGINT"
EPOCH_US = 946_684_800_000_000  # Postgres counts from 2000


@dataclass
class Open:
    """The transaction that a batch begins in, if the one before ended inside it."""

    position: int = 0
    at_us: int = 0
    xid: int = 0
    order: int = 0


@dataclass
class Decoder:
    """Keeps the relations of a connection. `resolve` turns a message about a relation into one that we know how to write."""

    resolve: Callable[[RelationMessage], Relation | None]
    prefix: str = ""
    relations: dict[int, Relation | None] = field(default_factory=dict)
    _messages: dict[int, RelationMessage] = field(default_factory=dict)
    known_shapes: dict[str, TableShape] = field(default_factory=dict)
    """The shapes that the writer has heard of, by table."""
    toast: ToastCache = field(default_factory=ToastCache)
    open: Open | None = None
    commits: int = 0
    """Of the messages that were decoded last."""

    def decode(self, payloads: Sequence[bytes]) -> list[Item]:
        """Items in the order of the stream; changes of one table together, as far as their order among themselves goes."""
        if not payloads:
            return []
        kinds = np.frombuffer(b"".join([payload[:1] for payload in payloads]), np.uint8)
        items: list[Item] = []
        begin, self.commits = 0, int(np.count_nonzero(kinds == COMMIT))
        for index in map(int, np.flatnonzero((kinds == RELATION) | (kinds == TRUNCATE) | (kinds == MESSAGE))):
            if self._changes_what_follows(payloads[index], kinds[index]):
                items += self._rows(payloads[begin:index], kinds[begin:index])
                items += self._rare(payloads[index], kinds[index])
                begin = index + 1
        return [*items, *self._rows(payloads[begin:], kinds[begin:])]

    # Rare messages

    def _changes_what_follows(self, payload: bytes, kind: int) -> bool:
        """A relation that is described for the first time, or as before, needs no cut: its rows follow."""
        if kind != RELATION:
            return True
        message = parse_relation(payload)
        known = self._messages.get(message.id)
        if known == message:
            return False
        if known is None:
            self._learn(message)
        return known is not None or self._is_reshaped(message.id)

    def _learn(self, message: RelationMessage) -> None:
        self._messages[message.id] = message
        self.relations[message.id] = self.resolve(message)

    def _is_reshaped(self, relation: int) -> bool:
        found = self.relations[relation]
        return found is not None and self.known_shapes.get(found.name) != found.shape

    def _rare(self, payload: bytes, kind: int) -> list[Item]:
        if kind == TRUNCATE:
            return [Truncated(found.name, self._hidden()) for each in parse_truncate(payload) if (found := self.relations.get(each))]
        if kind == MESSAGE:
            return self._logical(payload)
        message = parse_relation(payload)
        self._learn(message)
        found = self.relations[message.id]
        if found is None or not self._is_reshaped(message.id):
            return []
        self.known_shapes[found.name] = found.shape
        return [Reshaped(found.shape)]

    def _hidden(self) -> dict[str, int]:
        now = self.open or Open()
        now.order += 1
        return {POSITION: now.position, COMMITTED_AT: now.at_us, TRANSACTION: now.xid, ORDER: now.order - 1}

    def _logical(self, payload: bytes) -> list[Item]:
        prefix, content = parse_logical(payload)
        if prefix == OUR_PREFIX:
            return []
        now = self.open or Open()
        schema = pa.schema([("prefix", pa.string()), ("content", pa.binary()), ("position", pa.int64()), ("transaction", pa.int64())])
        rows = pa.RecordBatch.from_pylist([{"prefix": prefix, "content": content, "position": now.position, "transaction": now.xid}], schema=schema)
        return [Event(self.prefix + LOGICAL_TOPIC, LOGICAL_DDL, "prefix", rows)]

    # Rows

    def _rows(self, payloads: Sequence[bytes], kinds: Bytes) -> list[Item]:
        if not len(payloads):
            return []
        raw = b"".join(payloads)
        data, buffer = np.frombuffer(raw, np.uint8), pa.py_buffer(raw)
        lengths = np.fromiter(map(len, payloads), np.int64, len(payloads))
        starts = np.cumsum(lengths) - lengths
        is_row = (kinds == INSERT) | (kinds == UPDATE) | (kinds == DELETE)
        at = np.flatnonzero(is_row)
        hidden = self._placed(data, starts, kinds, at)
        relations = read_ints(data, starts[at] + 1, 4)
        items: list[Item] = []
        for number in np.unique(relations):
            relation = self.relations.get(int(number))
            if relation is not None:
                mine = np.flatnonzero(relations == number)
                groups = RowGroups(relation, data, buffer, self.toast)
                rows = groups.batch(starts[at[mine]], kinds[at[mine]], {name: values[mine] for name, values in hidden.items()})
                items.append(Changes(relation.name, rows))
        return items

    def _placed(self, data: Bytes, starts: Ints, kinds: Bytes, at: Ints) -> dict[str, Ints]:
        """The hidden columns of all rows: of which transaction each is, and its place in it."""
        begins = np.flatnonzero(kinds == BEGIN)
        places = starts[begins]
        before = self.open or Open()
        positions = np.concatenate([[before.position], read_ints(data, places + 1, 8)])
        times = np.concatenate([[before.at_us], read_ints(data, places + 9, 8) + EPOCH_US])
        xids = np.concatenate([[before.xid], read_ints(data, places + 17, 4)])
        transaction = np.searchsorted(begins, at, side="right")
        firsts = np.concatenate([[-before.order], np.searchsorted(at, begins)])
        order = np.arange(len(at)) - firsts[transaction]
        self._remember(kinds, int(positions[-1]), int(times[-1]), int(xids[-1]), len(at) - int(firsts[-1]))
        return {POSITION: positions[transaction], COMMITTED_AT: times[transaction], TRANSACTION: xids[transaction], ORDER: order}

    def _remember(self, kinds: Bytes, position: int, at_us: int, xid: int, order: int) -> None:
        """The transaction that goes on behind these messages, if any."""
        edges = kinds[(kinds == BEGIN) | (kinds == COMMIT)]
        is_open = edges[-1] == BEGIN if len(edges) else self.open is not None
        self.open = Open(position, at_us, xid, order) if is_open else None
