"""The row messages of one relation as one batch. Messages of one form are taken apart together: inserts, updates with and without the old row, deletes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.marking import UNCHANGED, Marks, marks_column
from headrace.cdc.postgres_source.relations import Relation
from headrace.cdc.postgres_source.toast import ToastCache
from headrace.cdc.postgres_source.tuples import Bytes, Columns, Flags, Ints, read_tuples
from headrace.cdc.postgres_source.types import typed_columns
from headrace.cdc.source import COMMITTED_AT, HIDDEN, MARKS, ORDER
from headrace.log.api import CHANGE_TYPES

_INSERT, _BEFORE, _UPDATE, _DELETE = range(4)
_KEY, _OLD, _NEW = b"KON"
_CHANGE_NAMES = pa.array(CHANGE_TYPES)


@dataclass
class _Group:
    """Rows of one form: which message each is of, whether it comes before or behind the message's other row, and what kind of change it is."""

    messages: Ints
    behind: int
    changes: Ints
    texts: list[pa.Array]
    unchanged: dict[int, Flags] = field(default_factory=dict)


class RowGroups:
    def __init__(self, relation: Relation, data: Bytes, buffer: pa.Buffer, toast: ToastCache) -> None:
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
            groups.append(_Group(updates, 1, np.full(len(updates), _UPDATE), new.texts, new.unchanged))
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
        """An update that says what was: the key has changed if it differs, and then the old row goes and the new one comes."""
        if not len(messages):
            return []
        old = self._read(starts[messages] + 6)
        new = self._read(old.ends + 1)
        texts = [self._filled(text, before, new.unchanged.get(place)) for place, (text, before) in enumerate(zip(new.texts, old.texts, strict=True))]
        left = {place: flags & old.texts[place].is_null().to_numpy(zero_copy_only=False) for place, flags in new.unchanged.items()}
        moved = self._is_moved(old.texts, texts)
        return [
            _Group(messages, 0, np.where(moved, _DELETE, _BEFORE), old.texts),
            _Group(messages, 1, np.where(moved, _INSERT, _UPDATE), texts, {place: flags for place, flags in left.items() if flags.any()}),
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
        texts = [pa.concat_arrays([group.texts[place] for group in groups]) for place in range(self.relation.width)]
        unchanged = _joined_flags(groups)
        if len(groups) > 1:
            order = np.argsort(messages * 2 + np.concatenate([np.full(len(group.messages), group.behind) for group in groups]), kind="stable")
            messages, changes, texts = messages[order], changes[order], [text.take(pa.array(order)) for text in texts]
            unchanged = {place: flags[order] for place, flags in unchanged.items()}
        texts, unchanged = self.toast.filled(self.relation, texts, unchanged, is_new=(changes == _INSERT) | (changes == _UPDATE))
        marks: Marks = {}
        columns = finished_columns(self.relation, texts, marks)
        for place, flags in unchanged.items():
            name = self.relation.shape.columns[place][0]
            for row in np.flatnonzero(flags):
                marks.setdefault(int(row), {})[name] = UNCHANGED
        arrays = [*columns, *_hidden_arrays(hidden, messages, marks), _CHANGE_NAMES.take(pa.array(changes))]
        return pa.RecordBatch.from_arrays(arrays, schema=self.relation.shape.batch_schema)


def _joined_flags(groups: list[_Group]) -> dict[int, Flags]:
    places = {place for group in groups for place in group.unchanged}
    return {
        place: np.concatenate([group.unchanged.get(place, np.zeros(len(group.messages), np.bool_)) for group in groups]) for place in places
    }


def _hidden_arrays(hidden: dict[str, Ints], messages: Ints, marks: Marks) -> list[pa.Array]:
    arrays = []
    for each in HIDDEN:
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
    return pa.array([hashlib.sha256(repr(row).encode()).hexdigest()[:32] for row in rows], pa.string())
