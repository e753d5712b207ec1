"""pgoutput's messages as items of the stream, many at once. One Python step a message is spent on
collecting them, none on taking them apart.

Messages that are rare (a relation, a truncation, a logical message) are read one by one; where one
of them changes what follows, the batch is cut.
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
    Changes,
    Event,
    Item,
    Marks,
    Reshaped,
    TableShape,
    Truncated,
    marks_column,
)
from headrace.cdc.postgres_source.relations import (
    Relation,
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

# Rows of many pgoutput messages, cut into columns at once: numpy walks all messages together, one
# column a step, and Arrow copies the texts.
#
# A tuple is a count of columns (two bytes), then for each column a letter: `n` null, `u` unchanged
# (a large value that was not sent), `t` text with its length (four bytes) before it.


Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
_NULL, _UNCHANGED, _TEXT = b"nut"


@dataclass(frozen=True)
class Columns:
    """The tuples of some messages. `unchanged` says for each column which rows did not send it;
    nothing, if all did.
    """

    texts: list[pa.Array]
    unchanged: dict[int, Flags]
    ends: Ints


def read_ints(data: Bytes, at: Ints, size: int) -> Ints:
    """Big-endian numbers of some bytes at many places."""
    value = np.zeros(len(at), np.int64)
    for byte in range(size):
        value = (value << 8) | data[at + byte]
    return value


def read_tuples(data: Bytes, buffer: pa.Buffer, at: Ints, width: int) -> Columns:
    """The tuples that begin at these places, which are in ascending order, with `width` columns
    each.
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
            place = np.where(is_text, at + 1, 0)
            lengths = np.where(is_text, read_ints(data, place, 4), 0)
            starts = np.where(is_text, at + 5, at + 1)
            if (kinds == _UNCHANGED).any():
                unchanged[column] = kinds == _UNCHANGED
        texts.append(slices(buffer, starts, lengths, is_text))
        at = starts + lengths
    return Columns(texts, unchanged, at)


def slices(buffer: pa.Buffer, starts: Ints, lengths: Ints, valid: Flags) -> pa.Array:
    """Pieces of a buffer as an array of text. The pieces and the gaps between them are an Arrow
    array without any copy; taking every other element copies what is wanted.
    """
    count = len(starts)
    if not count:
        return pa.array([], pa.string())
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2], offsets[1::2] = starts, starts + lengths
    everything = pa.Array.from_buffers(
        pa.string(), 2 * count - 1, [None, pa.py_buffer(offsets), buffer]
    )
    wanted = np.arange(0, 2 * count, 2, dtype=np.int32)
    return everything.take(pa.array(wanted, mask=None if valid.all() else ~valid))


# Large values that an update did not touch. Postgres keeps them apart from the row (TOAST) and does
# not send them again; here the newest ones seen are remembered, up to a bound.
#
# What is not known is marked in the row, never null without a word. `REPLICA IDENTITY FULL` makes
# Postgres send them.


SMALLEST_BYTES = 500
"""Smaller values are rarely kept apart."""
_Place = tuple[int, int, tuple[str | None, ...]]


@dataclass
class ToastCache:
    """The last value of each large field, least recently used first."""

    max_bytes: int = 64 << 20
    _values: OrderedDict[_Place, str] = field(default_factory=OrderedDict)
    _bytes: int = 0
    _holding: set[tuple[int, int]] = field(default_factory=set)
    """Relations and columns of which there is any value."""

    def filled(
        self,
        relation: Relation,
        texts: list[pa.Array],
        unchanged: dict[int, Flags],
        *,
        is_new: Flags,
    ) -> tuple[list[pa.Array], dict[int, Flags]]:
        """Columns with what is known filled in, and what is not. The rows are in order, so what one
        brings is there for the next.
        """
        filled, left = list(texts), {}
        for place, text in enumerate(texts):
            flags = unchanged.get(place)
            large = self._large(text) & is_new
            if flags is None and not large.any() and (relation.id, place) not in self._holding:
                continue
            asked = flags if flags is not None else np.zeros(len(text), np.bool_)
            filled[place], missing = self._column(relation, texts, place, asked, large, is_new)
            if missing.any():
                left[place] = missing
        return filled, left

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
        relation: Relation,
        texts: list[pa.Array],
        place: int,
        unchanged: Flags,
        large: Flags,
        is_new: Flags,
    ) -> tuple[pa.Array, Flags]:
        missing = np.zeros(len(unchanged), np.bool_)
        found: dict[int, str] = {}
        touched = unchanged | (is_new if (relation.id, place) in self._holding else large)
        for row in map(int, np.flatnonzero(touched)):
            key = (relation.id, place, tuple(texts[each][row].as_py() for each in relation.key))
            if not unchanged[row]:
                self._put(key, texts[place][row].as_py() if large[row] else None)
                continue
            value = self._values.get(key) or self._of_old_key(relation, texts, place, row, is_new)
            if value is None:
                missing[row] = True
            else:
                found[row] = value
                self._put(key, value)
        if not found:
            return texts[place], missing
        values = texts[place].to_pylist()
        for row, value in found.items():
            values[row] = value
        return pa.array(values, pa.string()), missing

    def _of_old_key(
        self, relation: Relation, texts: list[pa.Array], place: int, row: int, is_new: Flags
    ) -> str | None:
        """A row whose key changed stands right behind the one that goes."""
        if not row or is_new[row - 1]:
            return None
        return self._values.get(
            (relation.id, place, tuple(texts[each][row - 1].as_py() for each in relation.key))
        )

    def _put(self, key: _Place, value: str | None) -> None:
        """Remember a value, or forget the one there is: one that is small is sent again."""
        self._bytes -= len(self._values.pop(key, ""))
        if value is None:
            return
        self._holding.add(key[:2])
        self._values[key] = value
        self._bytes += len(value)
        while self._bytes > self.max_bytes:
            _, dropped = self._values.popitem(last=False)
            self._bytes -= len(dropped)


# The row messages of one relation as one batch. Messages of one form are taken apart together:
# inserts, updates with and without the old row, deletes.


_INSERT, _BEFORE, _UPDATE, _DELETE = range(4)
_KEY, _OLD, _NEW = b"KON"
_CHANGE_NAMES = pa.array(CHANGE_TYPES)


@dataclass
class _Group:
    """Rows of one form: which message each is of, whether it comes before or behind the message's
    other row, and what kind of change it is.
    """

    messages: Ints
    behind: int
    changes: Ints
    texts: list[pa.Array]
    unchanged: dict[int, Flags] = field(default_factory=dict)


class RowGroups:
    def __init__(
        self, relation: Relation, data: Bytes, buffer: pa.Buffer, toast: ToastCache
    ) -> None:
        self.relation, self.data, self.buffer, self.toast = relation, data, buffer, toast

    def batch(self, starts: Ints, kinds: Bytes, hidden: dict[str, Ints]) -> pa.RecordBatch:
        """`starts` are the messages' places, `hidden` their hidden columns."""
        groups: list[_Group] = []
        forms = self.data[starts + 5]
        inserts = np.flatnonzero(kinds == ord("I"))
        if len(inserts):
            new = self._read(starts[inserts] + 6)
            groups.append(_Group(inserts, 1, np.full(len(inserts), _INSERT), new.texts))
        updates = np.flatnonzero((kinds == ord("U")) & (forms == _NEW))
        if len(updates):
            new = self._read(starts[updates] + 6)
            groups.append(
                _Group(updates, 1, np.full(len(updates), _UPDATE), new.texts, new.unchanged)
            )
        for form in (_KEY, _OLD):
            groups += self._with_old(starts, np.flatnonzero((kinds == ord("U")) & (forms == form)))
        deletes = np.flatnonzero(kinds == ord("D"))
        if len(deletes):
            old = self._read(starts[deletes] + 6)
            groups.append(_Group(deletes, 0, np.full(len(deletes), _DELETE), old.texts))
        return self._assembled(groups, hidden)

    def _read(self, at: Ints) -> Columns:
        return read_tuples(self.data, self.buffer, at, self.relation.width)

    def _with_old(self, starts: Ints, messages: Ints) -> list[_Group]:
        """An update that says what was: the key has changed if it differs, and then the old row
        goes and the new one comes.
        """
        if not len(messages):
            return []
        old = self._read(starts[messages] + 6)
        new = self._read(old.ends + 1)
        texts = [
            self._filled(text, before, new.unchanged.get(place))
            for place, (text, before) in enumerate(zip(new.texts, old.texts, strict=True))
        ]
        left = {
            place: flags & old.texts[place].is_null().to_numpy(zero_copy_only=False)
            for place, flags in new.unchanged.items()
        }
        moved = self._is_moved(old.texts, texts)
        return [
            _Group(messages, 0, np.where(moved, _DELETE, _BEFORE), old.texts),
            _Group(
                messages,
                1,
                np.where(moved, _INSERT, _UPDATE),
                texts,
                {place: flags for place, flags in left.items() if flags.any()},
            ),
        ]

    @staticmethod
    def _filled(text: pa.Array, before: pa.Array, unchanged: Flags | None) -> pa.Array:
        return text if unchanged is None else pc.if_else(pa.array(unchanged), before, text)

    def _is_moved(self, old: list[pa.Array], new: list[pa.Array]) -> Flags:
        places = self.relation.key or range(self.relation.width)
        moved = np.zeros(len(old[0]), np.bool_)
        for place in places:
            same = pc.fill_null(pc.equal(old[place], new[place]), False)
            both_null = pc.and_(old[place].is_null(), new[place].is_null())
            moved |= ~pc.or_(same, both_null).to_numpy(zero_copy_only=False)
        return moved

    # One batch of all

    def _assembled(self, groups: list[_Group], hidden: dict[str, Ints]) -> pa.RecordBatch:
        messages = np.concatenate([group.messages for group in groups])
        changes = np.concatenate([group.changes for group in groups])
        texts = [
            pa.concat_arrays([group.texts[place] for group in groups])
            for place in range(self.relation.width)
        ]
        unchanged = _joined_flags(groups)
        if len(groups) > 1:
            order = np.argsort(
                messages * 2
                + np.concatenate([np.full(len(group.messages), group.behind) for group in groups]),
                kind="stable",
            )
            messages, changes, texts = (
                messages[order],
                changes[order],
                [text.take(pa.array(order)) for text in texts],
            )
            unchanged = {place: flags[order] for place, flags in unchanged.items()}
        texts, unchanged = self.toast.filled(
            self.relation, texts, unchanged, is_new=(changes == _INSERT) | (changes == _UPDATE)
        )
        marks: Marks = {}
        columns = finished_columns(self.relation, texts, marks)
        for place, flags in unchanged.items():
            name = self.relation.shape.columns[place][0]
            for row in np.flatnonzero(flags):
                marks.setdefault(int(row), {})[name] = UNCHANGED
        arrays = [
            *columns,
            *_hidden_arrays(hidden, messages, marks),
            _CHANGE_NAMES.take(pa.array(changes)),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.relation.shape.batch_schema)


def _joined_flags(groups: list[_Group]) -> dict[int, Flags]:
    places = {place for group in groups for place in group.unchanged}
    return {
        place: np.concatenate(
            [
                group.unchanged.get(place, np.zeros(len(group.messages), np.bool_))
                for group in groups
            ]
        )
        for place in places
    }


def _hidden_arrays(hidden: dict[str, Ints], messages: Ints, marks: Marks) -> list[pa.Array]:
    arrays = []
    for each in HIDDEN_FIELDS:
        if each.name == MARKS:
            arrays.append(marks_column(marks, len(messages)))
            continue
        values = hidden[each.name][messages]
        array = pa.array(values.astype(np.int32) if each.name == ORDER else values)
        arrays.append(array.cast(each.type) if each.name == COMMITTED_AT else array)
    return arrays


def finished_columns(relation: Relation, texts: list[pa.Array], marks: Marks) -> list[pa.Array]:
    """Texts as the columns of the shape; with the row's digest, if that is its key."""
    fields = list(relation.shape.schema)
    columns = typed_columns(texts, fields[: relation.width], marks)
    return columns if relation.key else [*columns, row_digests(texts)]


def row_digests(texts: list[pa.Array]) -> pa.Array:
    """What a row without a key is known by."""
    rows = zip(*(text.to_pylist() for text in texts), strict=True)
    return pa.array(
        [hashlib.sha256(repr(row).encode()).hexdigest()[:32] for row in rows], pa.string()
    )


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
    """Keeps the relations of a connection. `resolve` turns a message about a relation into one that
    we know how to write.
    """

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
        """Items in the order of the stream; changes of one table together, as far as their order
        among themselves goes.
        """
        if not payloads:
            return []
        kinds = np.frombuffer(b"".join([payload[:1] for payload in payloads]), np.uint8)
        items: list[Item] = []
        begin, self.commits = 0, int(np.count_nonzero(kinds == COMMIT))
        for index in map(
            int, np.flatnonzero((kinds == RELATION) | (kinds == TRUNCATE) | (kinds == MESSAGE))
        ):
            if self._changes_what_follows(payloads[index], kinds[index]):
                items += self._rows(payloads[begin:index], kinds[begin:index])
                items += self._rare(payloads[index], kinds[index])
                begin = index + 1
        return [*items, *self._rows(payloads[begin:], kinds[begin:])]

    # Rare messages

    def _changes_what_follows(self, payload: bytes, kind: int) -> bool:
        """A relation that is described for the first time, or as before, needs no cut: its rows
        follow.
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
        self._messages[message.id] = message
        self.relations[message.id] = self.resolve(message)

    def _is_reshaped(self, relation: int) -> bool:
        found = self.relations[relation]
        return found is not None and self.known_shapes.get(found.name) != found.shape

    def _rare(self, payload: bytes, kind: int) -> list[Item]:
        if kind == TRUNCATE:
            return [
                Truncated(found.name, self._hidden())
                for each in parse_truncate(payload)
                if (found := self.relations.get(each))
            ]
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
        return {
            POSITION: now.position,
            COMMITTED_AT: now.at_us,
            TRANSACTION: now.xid,
            ORDER: now.order - 1,
        }

    def _logical(self, payload: bytes) -> list[Item]:
        prefix, content = parse_logical(payload)
        if prefix == OUR_PREFIX:
            return []
        now = self.open or Open()
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
                    "position": now.position,
                    "transaction": now.xid,
                }
            ],
            schema=schema,
        )
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
                rows = groups.batch(
                    starts[at[mine]],
                    kinds[at[mine]],
                    {name: values[mine] for name, values in hidden.items()},
                )
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
        self._remember(
            kinds, int(positions[-1]), int(times[-1]), int(xids[-1]), len(at) - int(firsts[-1])
        )
        return {
            POSITION: positions[transaction],
            COMMITTED_AT: times[transaction],
            TRANSACTION: xids[transaction],
            ORDER: order,
        }

    def _remember(self, kinds: Bytes, position: int, at_us: int, xid: int, order: int) -> None:
        """The transaction that goes on behind these messages, if any."""
        edges = kinds[(kinds == BEGIN) | (kinds == COMMIT)]
        is_open = edges[-1] == BEGIN if len(edges) else self.open is not None
        self.open = Open(position, at_us, xid, order) if is_open else None
