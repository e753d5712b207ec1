"""Decodes messages of pgoutput, many at once: Python collects them, numpy and Arrow take them
apart.

Row messages of a table are decoded into one batch (`RowDecoder`): numpy walks all of them together,
one column a step, and Arrow copies the texts. Messages that are rare (a relation, a truncation, a
logical message) are parsed one by one; where one of them changes what follows, the batch is cut.

The format of a tuple is a count of columns (two bytes), then for each column a letter: `n` is null,
`u` is unchanged (a large value that was not sent), `t` is text, with its length (four bytes) in
front of it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.base import (
    UNCHANGED,
    Marks,
    SchemaChange,
    StreamItem,
    TableChanges,
    TableShape,
    TableStopped,
    TopicRows,
    Truncation,
    marks_column,
)
from headrace.cdc.postgres_source.relations import (
    PostgresRelation,
    RelationMessage,
    parse_logical,
    parse_relation,
    parse_truncate,
    typed_columns,
)
from headrace.columnar.buffers import offsets_of
from headrace.columnar.columns import (
    CHANGE_TYPES,
    COMMITTED_AT,
    HIDDEN_FIELDS,
    MARKS,
    ORDER,
    POSITION,
    TRANSACTION,
)
from headrace.errors import ConfigurationError

# Tuples

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
_NULL, _UNCHANGED, _TEXT = b"nut"


@dataclass(frozen=True)
class TupleColumns:
    """The tuples of some messages, as columns."""

    texts: list[pa.Array]
    unchanged: dict[int, Flags]
    """By column, in which rows it was not sent. A column that all rows have is not in it."""
    ends: Ints
    """Where each tuple ends in the data."""


def read_ints(data: Bytes, at: Ints, size: int) -> Ints:
    """Return the big-endian numbers of `size` bytes at many offsets of the data."""
    value = np.zeros(len(at), np.int64)
    for byte in range(size):
        value = (value << 8) | data[at + byte]
    return value


def read_tuples(data: Bytes, buffer: pa.Buffer, at: Ints, width: int) -> TupleColumns:
    """Return the tuples that begin at the given offsets, which are in ascending order, with `width`
    columns each.
    """
    counts = read_ints(data, at, 2)
    assert (counts == width).all(), "a row has another number of columns than its relation"
    at = at + 2
    texts: list[pa.Array] = []
    unchanged: dict[int, Flags] = {}
    for column in range(width):
        kinds = data[at]
        is_text = kinds == _TEXT
        if is_text.all():
            lengths = read_ints(data, at + 1, 4)
            starts = at + 5
        else:
            length_at = np.where(is_text, at + 1, 0)
            lengths = np.where(is_text, read_ints(data, length_at, 4), 0)
            starts = np.where(is_text, at + 5, at + 1)
            if (kinds == _UNCHANGED).any():
                unchanged[column] = kinds == _UNCHANGED
        texts.append(slices(buffer, starts, lengths, is_text))
        at = starts + lengths
    return TupleColumns(texts, unchanged, at)


def slices(buffer: pa.Buffer, starts: Ints, lengths: Ints, valid: Flags) -> pa.Array:
    """Return slices of a buffer as an array of text. The slices and the gaps between them form an
    Arrow array without a copy; taking every other element copies the slices.
    """
    count = len(starts)
    if not count:
        return pa.array([], pa.string())
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2], offsets[1::2] = starts, starts + lengths
    slices_and_gaps = pa.Array.from_buffers(
        pa.string(), 2 * count - 1, [None, pa.py_buffer(offsets), buffer]
    )
    wanted = np.arange(0, 2 * count, 2, dtype=np.int32)
    return slices_and_gaps.take(pa.array(wanted, mask=None if valid.all() else ~valid))


# Unchanged large values

SMALLEST_BYTES = 500
"""Smaller values are rarely stored apart from their row."""
_FieldKey = tuple[int, str, tuple[str | None, ...]]
"""A relation, a column's name, and the row's key."""


@dataclass
class ToastCache:
    """Remembers the last value of large fields, up to a bound.

    Postgres stores them apart from the row (TOAST), and does not send them when an update leaves
    them unchanged. A value that is not in the cache is marked in the row (`_marks`), so that it is
    not taken for null. With `REPLICA IDENTITY FULL`, Postgres sends them.

    Values go by the column's name, since its place changes with `DROP COLUMN`. What is cached of a
    table is forgotten (`forget`) whenever its rows may have changed without messages: by DDL, by
    TRUNCATE, or while it was not captured.
    """

    max_bytes: int = 64 << 20
    _values: OrderedDict[_FieldKey, str] = field(default_factory=OrderedDict)
    """The least recently used first."""
    _bytes: int = 0
    _cached_columns: set[tuple[int, str]] = field(default_factory=set)
    """Relations and columns of which any value is cached."""

    def forget(self, relation_id: int) -> None:
        """Drop all values of a table."""
        if not any(cached_id == relation_id for cached_id, _ in self._cached_columns):
            return
        self._cached_columns = {
            cached for cached in self._cached_columns if cached[0] != relation_id
        }
        for key in [key for key in self._values if key[0] == relation_id]:
            self._put(key, None)

    def fill(
        self,
        relation: PostgresRelation,
        texts: list[pa.Array],
        unchanged: dict[int, Flags],
        *,
        is_new: Flags,
    ) -> tuple[list[pa.Array], dict[int, Flags]]:
        """Fill in unchanged values that are cached. Returns the columns, and by column the rows of
        which the value is not known. The rows are in order: a value of one is there for the next.
        """
        columns = list(texts)
        unknown = {}
        for index, text in enumerate(texts):
            flags = unchanged.get(index)
            large = self._large(text) & is_new
            if (
                flags is None
                and not large.any()
                and self._column_key(relation, index) not in self._cached_columns
            ):
                continue
            if flags is None:
                flags = np.zeros(len(text), np.bool_)
            columns[index], missing = self._column(relation, texts, index, flags, large, is_new)
            if missing.any():
                unknown[index] = missing
        return columns, unknown

    @staticmethod
    def _column_key(relation: PostgresRelation, index: int) -> tuple[int, str]:
        return relation.id, relation.shape.columns[index][0]

    @staticmethod
    def _large(text: pa.Array) -> Flags:
        if not len(text) or int(np.diff(offsets_of(text)).max()) < SMALLEST_BYTES:
            return np.zeros(len(text), np.bool_)
        large: Flags = pc.fill_null(
            pc.greater_equal(pc.binary_length(text), SMALLEST_BYTES), False
        ).to_numpy(zero_copy_only=False)
        return large

    def _column(
        self,
        relation: PostgresRelation,
        texts: list[pa.Array],
        index: int,
        unchanged: Flags,
        large: Flags,
        is_new: Flags,
    ) -> tuple[pa.Array, Flags]:
        missing = np.zeros(len(unchanged), np.bool_)
        cached: dict[int, str] = {}
        column_key = self._column_key(relation, index)
        # A small value replaces a large one, of these rows too.
        is_cached = column_key in self._cached_columns or bool(large.any())
        touched = unchanged | (is_new if is_cached else large)
        for row in map(int, np.flatnonzero(touched)):
            key = (*column_key, tuple(texts[part][row].as_py() for part in relation.key))
            if not unchanged[row]:
                self._put(key, texts[index][row].as_py() if large[row] else None)
                continue
            value = self._values.get(key) or self._value_of_old_key(
                relation, texts, index, row, is_new
            )
            if value is None:
                missing[row] = True
            else:
                cached[row] = value
                self._put(key, value)
        if not cached:
            return texts[index], missing
        values = texts[index].to_pylist()
        for row, value in cached.items():
            values[row] = value
        return pa.array(values, pa.string()), missing

    def _value_of_old_key(
        self, relation: PostgresRelation, texts: list[pa.Array], index: int, row: int, is_new: Flags
    ) -> str | None:
        """Return the value of the row before: a row whose key changed comes right behind the delete
        of its old key.
        """
        if not row or is_new[row - 1]:
            return None
        old_key = tuple(texts[part][row - 1].as_py() for part in relation.key)
        return self._values.get((*self._column_key(relation, index), old_key))

    def _put(self, key: _FieldKey, value: str | None) -> None:
        """Cache a value, or with None drop the cached one: small values are always sent."""
        self._bytes -= len(self._values.pop(key, ""))
        if value is None:
            return
        self._cached_columns.add(key[:2])
        self._values[key] = value
        self._bytes += len(value)
        while self._bytes > self.max_bytes:
            _, dropped = self._values.popitem(last=False)
            self._bytes -= len(dropped)


# Rows

_INSERT, _BEFORE, _UPDATE, _DELETE = range(4)
_KEY, _OLD, _NEW = b"KON"
_CHANGE_NAMES = pa.array(CHANGE_TYPES)


@dataclass
class _RowGroup:
    """Rows of messages of one form: inserts, updates with or without the old row, deletes."""

    messages: Ints
    """The index of the message that each row is of."""
    rank: int
    """0 if the rows come before the other row of their message, 1 if they come behind it."""
    changes: Ints
    texts: list[pa.Array]
    unchanged: dict[int, Flags] = field(default_factory=dict)


class RowDecoder:
    """Decodes the row messages of one relation into one batch."""

    def __init__(
        self, relation: PostgresRelation, data: Bytes, buffer: pa.Buffer, toast: ToastCache
    ) -> None:
        self.relation = relation
        self.data = data
        self.buffer = buffer
        self.toast = toast

    def batch(self, starts: Ints, kinds: Bytes, hidden: dict[str, Ints]) -> pa.RecordBatch:
        """Return the rows of messages. `starts` are their offsets in the data, `hidden` their
        hidden columns.
        """
        groups: list[_RowGroup] = []
        forms = self.data[starts + 5]
        inserts = np.flatnonzero(kinds == ord("I"))
        if len(inserts):
            new = self._read(starts[inserts] + 6)
            groups.append(_RowGroup(inserts, 1, np.full(len(inserts), _INSERT), new.texts))
        updates = np.flatnonzero((kinds == ord("U")) & (forms == _NEW))
        if len(updates):
            new = self._read(starts[updates] + 6)
            groups.append(
                _RowGroup(updates, 1, np.full(len(updates), _UPDATE), new.texts, new.unchanged)
            )
        for form in (_KEY, _OLD):
            groups += self._with_old(starts, np.flatnonzero((kinds == ord("U")) & (forms == form)))
        deletes = np.flatnonzero(kinds == ord("D"))
        if len(deletes):
            old = self._read(starts[deletes] + 6)
            groups.append(_RowGroup(deletes, 0, np.full(len(deletes), _DELETE), old.texts))
        return self._assemble(groups, hidden)

    def _read(self, at: Ints) -> TupleColumns:
        return read_tuples(self.data, self.buffer, at, self.relation.width)

    def _with_old(self, starts: Ints, messages: Ints) -> list[_RowGroup]:
        """Decode updates that contain the old row, or its key. If the key has changed, the update
        is a delete and an insert.
        """
        if not len(messages):
            return []
        old = self._read(starts[messages] + 6)
        new = self._read(old.ends + 1)
        texts = [
            text
            if (flags := new.unchanged.get(index)) is None
            else pc.if_else(pa.array(flags), before, text)
            for index, (text, before) in enumerate(zip(new.texts, old.texts, strict=True))
        ]
        left = {
            index: flags & old.texts[index].is_null().to_numpy(zero_copy_only=False)
            for index, flags in new.unchanged.items()
        }
        has_new_key = self._has_new_key(old.texts, texts)
        return [
            _RowGroup(messages, 0, np.where(has_new_key, _DELETE, _BEFORE), old.texts),
            _RowGroup(
                messages,
                1,
                np.where(has_new_key, _INSERT, _UPDATE),
                texts,
                {index: flags for index, flags in left.items() if flags.any()},
            ),
        ]

    def _has_new_key(self, old: list[pa.Array], new: list[pa.Array]) -> Flags:
        has_new_key = np.zeros(len(old[0]), np.bool_)
        for index in self.relation.key or range(self.relation.width):
            is_same = pc.fill_null(pc.equal(old[index], new[index]), False)
            both_null = pc.and_(old[index].is_null(), new[index].is_null())
            has_new_key |= ~pc.or_(is_same, both_null).to_numpy(zero_copy_only=False)
        return has_new_key

    def _assemble(self, groups: list[_RowGroup], hidden: dict[str, Ints]) -> pa.RecordBatch:
        messages = np.concatenate([group.messages for group in groups])
        changes = np.concatenate([group.changes for group in groups])
        texts = [
            pa.concat_arrays([group.texts[index] for group in groups])
            for index in range(self.relation.width)
        ]
        unchanged = _concat_flags(groups)
        if len(groups) > 1:
            order = np.argsort(
                messages * 2
                + np.concatenate([np.full(len(group.messages), group.rank) for group in groups]),
                kind="stable",
            )
            messages = messages[order]
            changes = changes[order]
            texts = [text.take(pa.array(order)) for text in texts]
            unchanged = {index: flags[order] for index, flags in unchanged.items()}
        texts, unchanged = self.toast.fill(
            self.relation, texts, unchanged, is_new=(changes == _INSERT) | (changes == _UPDATE)
        )
        marks: Marks = {}
        columns = shape_columns(self.relation, texts, marks)
        for index, flags in unchanged.items():
            name = self.relation.shape.columns[index][0]
            for row in np.flatnonzero(flags):
                marks.setdefault(int(row), {})[name] = UNCHANGED
        arrays = [
            *columns,
            *_hidden_arrays(hidden, messages, marks),
            _CHANGE_NAMES.take(pa.array(changes)),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.relation.shape.batch_schema)


def _concat_flags(groups: list[_RowGroup]) -> dict[int, Flags]:
    indices = {index for group in groups for index in group.unchanged}
    return {
        index: np.concatenate(
            [
                group.unchanged.get(index, np.zeros(len(group.messages), np.bool_))
                for group in groups
            ]
        )
        for index in indices
    }


def _hidden_arrays(hidden: dict[str, Ints], messages: Ints, marks: Marks) -> list[pa.Array]:
    arrays = []
    for hidden_field in HIDDEN_FIELDS:
        if hidden_field.name == MARKS:
            arrays.append(marks_column(marks, len(messages)))
            continue
        values = hidden[hidden_field.name][messages]
        array = pa.array(values.astype(np.int32) if hidden_field.name == ORDER else values)
        is_time = hidden_field.name == COMMITTED_AT
        arrays.append(array.cast(hidden_field.type) if is_time else array)
    return arrays


def shape_columns(
    relation: PostgresRelation, texts: list[pa.Array], marks: Marks
) -> list[pa.Array]:
    """Return texts as the columns of the relation's shape; for a table without a key, with the
    digest of each row, and nulls for how many rows are equal.
    """
    fields = list(relation.shape.schema)
    columns = typed_columns(texts, fields[: relation.width], marks)
    if relation.key:
        return columns
    digests = row_digests(texts)
    return [*columns, digests, pa.nulls(len(digests), pa.int64())]


def row_digests(texts: list[pa.Array]) -> pa.Array:
    """Return the digests that identify rows without a key."""
    rows = zip(*(text.to_pylist() for text in texts), strict=True)
    return pa.array(
        [hashlib.sha256(repr(row).encode()).hexdigest()[:32] for row in rows], pa.string()
    )


# The stream

BEGIN, COMMIT, RELATION, INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE = b"BCRIUDTM"
OUR_PREFIX = "headrace"
LOGICAL_TOPIC = "logical_messages"
LOGICAL_DDL = "prefix STRING, content BINARY, position BIGINT, transaction BIGINT"
EPOCH_US = 946_684_800_000_000  # Postgres counts from 2000


@dataclass
class OpenTransaction:
    """The transaction that continues in the next messages."""

    position: int = 0
    at_us: int = 0
    xid: int = 0
    order: int = 0


@dataclass
class Decoder:
    """Decodes the messages of one connection, and remembers its relations. `resolve` returns the
    relation that a message describes; None if the table is not captured. It raises
    ConfigurationError if the table cannot be followed any more.
    """

    resolve: Callable[[RelationMessage], PostgresRelation | None]
    prefix: str = ""
    relations: dict[int, PostgresRelation | None] = field(default_factory=dict)
    _messages: dict[int, RelationMessage] = field(default_factory=dict)
    known_shapes: dict[str, TableShape] = field(default_factory=dict)
    """By table, the shape that was last reported to the writer."""
    toast: ToastCache = field(default_factory=ToastCache)
    open: OpenTransaction | None = None
    found: list[StreamItem] = field(default_factory=list)
    """What is to follow the items that are decoded next, such as tables that are stopped."""
    commits: int = 0
    """Commits among the messages that were decoded last."""

    def decode(self, payloads: Sequence[bytes]) -> list[StreamItem]:
        """Return the items of messages, in the order of the stream. Changes of one table are
        together; changes of different tables may be in another order than in the stream.
        """
        if not payloads:
            found, self.found = self.found, []
            return found
        kinds = np.frombuffer(b"".join([payload[:1] for payload in payloads]), np.uint8)
        items: list[StreamItem] = []
        begin, self.commits = 0, int(np.count_nonzero(kinds == COMMIT))
        for index in map(
            int, np.flatnonzero((kinds == RELATION) | (kinds == TRUNCATE) | (kinds == MESSAGE))
        ):
            if self._needs_cut(payloads[index], kinds[index]):
                items += self._decode_rows(payloads[begin:index], kinds[begin:index])
                items += self._decode_rare(payloads[index], kinds[index])
                begin = index + 1
        items += self._decode_rows(payloads[begin:], kinds[begin:])
        found, self.found = self.found, []
        return [*items, *found]

    # Rare messages

    def _needs_cut(self, payload: bytes, kind: int) -> bool:
        """Return whether a rare message changes the meaning of those that follow. A relation that
        is described for the first time, or as before, does not.
        """
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
        self.toast.forget(message.id)
        self._messages[message.id] = message
        try:
            self.relations[message.id] = self.resolve(message)
        except ConfigurationError as error:
            self.relations[message.id] = None
            self.found.append(TableStopped(message.name, str(error)))

    def describe_again(self, table: str) -> None:
        """Resolve a table's relation again, which was not captured when it was described."""
        for message in list(self._messages.values()):
            if message.name == table and self.relations.get(message.id) is None:
                self._learn(message)

    def _is_reshaped(self, relation_id: int) -> bool:
        relation = self.relations[relation_id]
        return relation is not None and self.known_shapes.get(relation.name) != relation.shape

    def _decode_rare(self, payload: bytes, kind: int) -> list[StreamItem]:
        if kind == TRUNCATE:
            relations = [self.relations.get(number) for number in parse_truncate(payload)]
            for relation in filter(None, relations):
                self.toast.forget(relation.id)
            return [Truncation(relation.name, self._hidden()) for relation in relations if relation]
        if kind == MESSAGE:
            return self._logical_message(payload)
        message = parse_relation(payload)
        self._learn(message)
        described = self.relations[message.id]
        if described is None or not self._is_reshaped(message.id):
            return []
        self.known_shapes[described.name] = described.shape
        return [SchemaChange(described.shape)]

    def _hidden(self) -> dict[str, int]:
        transaction = self.open or OpenTransaction()
        transaction.order += 1
        return {
            POSITION: transaction.position,
            COMMITTED_AT: transaction.at_us,
            TRANSACTION: transaction.xid,
            ORDER: transaction.order - 1,
        }

    def _logical_message(self, payload: bytes) -> list[StreamItem]:
        prefix, content = parse_logical(payload)
        if prefix == OUR_PREFIX:
            return []
        transaction = self.open or OpenTransaction()
        schema = pa.schema(
            [
                ("prefix", pa.string()),
                ("content", pa.binary()),
                ("position", pa.int64()),
                ("transaction", pa.int64()),
            ]
        )
        rows = pa.RecordBatch.from_pylist(
            [
                {
                    "prefix": prefix,
                    "content": content,
                    "position": transaction.position,
                    "transaction": transaction.xid,
                }
            ],
            schema=schema,
        )
        return [TopicRows(self.prefix + LOGICAL_TOPIC, LOGICAL_DDL, "prefix", rows)]

    # Rows

    def _decode_rows(self, payloads: Sequence[bytes], kinds: Bytes) -> list[StreamItem]:
        if not len(payloads):
            return []
        raw = b"".join(payloads)
        data, buffer = np.frombuffer(raw, np.uint8), pa.py_buffer(raw)
        lengths = np.fromiter(map(len, payloads), np.int64, len(payloads))
        starts = np.cumsum(lengths) - lengths
        is_row = (kinds == INSERT) | (kinds == UPDATE) | (kinds == DELETE)
        at = np.flatnonzero(is_row)
        # The hidden columns of row messages: the transaction of each, and its number in it.
        begins = np.flatnonzero(kinds == BEGIN)
        begin_at = starts[begins]
        before = self.open or OpenTransaction()
        positions = np.concatenate([[before.position], read_ints(data, begin_at + 1, 8)])
        times = np.concatenate([[before.at_us], read_ints(data, begin_at + 9, 8) + EPOCH_US])
        xids = np.concatenate([[before.xid], read_ints(data, begin_at + 17, 4)])
        transaction = np.searchsorted(begins, at, side="right")
        firsts = np.concatenate([[-before.order], np.searchsorted(at, begins)])
        order = np.arange(len(at)) - firsts[transaction]
        self._remember_open(
            kinds, int(positions[-1]), int(times[-1]), int(xids[-1]), len(at) - int(firsts[-1])
        )
        hidden = {
            POSITION: positions[transaction],
            COMMITTED_AT: times[transaction],
            TRANSACTION: xids[transaction],
            ORDER: order,
        }
        relations = read_ints(data, starts[at] + 1, 4)
        items: list[StreamItem] = []
        for number in np.unique(relations):
            relation = self.relations.get(int(number))
            if relation is not None:
                mine = np.flatnonzero(relations == number)
                groups = RowDecoder(relation, data, buffer, self.toast)
                rows = groups.batch(
                    starts[at[mine]],
                    kinds[at[mine]],
                    {name: values[mine] for name, values in hidden.items()},
                )
                items.append(TableChanges(relation.name, rows))
        return items

    def _remember_open(self, kinds: Bytes, position: int, at_us: int, xid: int, order: int) -> None:
        """Remember the transaction that continues behind the messages, if any."""
        edges = kinds[(kinds == BEGIN) | (kinds == COMMIT)]
        is_open = edges[-1] == BEGIN if len(edges) else self.open is not None
        self.open = OpenTransaction(position, at_us, xid, order) if is_open else None
