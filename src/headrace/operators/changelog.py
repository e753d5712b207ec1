"""A table as its changes: building them in their order, folding them back into a table, and telling
whether a value changed.

Within a tick, changes are in order of key. A key has one of: an insert, a delete with the row that
was, or an update_preimage with the row that was and an update_postimage with the row that is. Where
a tick left a row as it was there is no change.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, offsets_of, runs
from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.columnar.keys import whole
from headrace.columnar.segments import Segments
from headrace.errors import InputError

INSERT, UPDATE_PREIMAGE, UPDATE_POSTIMAGE, DELETE = CHANGES = (
    "insert",
    "update_preimage",
    "update_postimage",
    "delete",
)
COMES = frozenset({INSERT, UPDATE_POSTIMAGE})


class MalformedChangelog(InputError):
    """Changes that no table can have made: a row that goes and was not there, or comes and was
    there already.
    """


@dataclass(frozen=True)
class Changes:
    """Which changes there are, in order: for each its kind (a number in CHANGES), its segment, and
    the version of the key that it shows.
    """

    kinds: Ints
    segments: Ints
    versions: Ints

    @property
    def comes(self) -> Mask:
        """Which of them show a row that is there from then on."""
        shown: Mask = (self.kinds == 0) | (self.kinds == 2)
        return shown

    def names(self) -> pa.Array:
        return pa.array(CHANGES).take(pa.array(self.kinds))


def changes(segments: Segments, exists: Mask, differs: Mask) -> Changes:
    """What to tell: `exists` says for each version whether the row is there, `differs` for each
    segment whether it changed the row.
    """
    in_order = (
        np.arange(len(segments)) if segments.one_tick else np.argsort(segments.ticks, kind="stable")
    )
    after = segments.after[in_order]
    was, is_ = exists[after - 1], exists[after]
    updated = was & is_ & differs[in_order]
    count = np.where(updated, 2, (was != is_).astype(np.int64))
    which = np.repeat(np.arange(len(in_order)), count)
    second = np.zeros(len(which), np.int64)
    second[1:] = which[1:] == which[:-1]
    kinds = np.where(updated[which], 1 + second, np.where(is_[which], 0, 3))
    versions = after[which] - 1 + np.where(updated[which], second, is_[which])
    return Changes(kinds, in_order[which], versions)


def differs(before: pa.Array, after: pa.Array) -> Mask:
    """Where two columns differ, value by value. Null is like null, and NaN like NaN; but 0.0 is not
    -0.0: they are not the same bytes.
    """
    kind = before.type
    valid = before.is_valid().to_numpy(zero_copy_only=False)
    unlike: Mask = valid != after.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return unlike | _lists_differ(before, after, valid & ~unlike)
    if pa.types.is_struct(kind):
        children = [
            differs(pc.struct_field(before, at), pc.struct_field(after, at))
            for at in range(kind.num_fields)
        ]
        return unlike | (np.logical_or.reduce(children) & valid if children else unlike)
    if pa.types.is_floating(kind):
        bits = pa.int64() if pa.types.is_float64(kind) else pa.int32()
        before, after = before.view(bits), after.view(bits)
    elsewhere: Mask = pc.not_equal(before, after).fill_null(False).to_numpy(zero_copy_only=False)
    return unlike | elsewhere


def _lists_differ(before: pa.Array, after: pa.Array, both: Mask) -> Mask:
    """Lists differ in length, or else in some element."""
    unlike = np.zeros(len(before), np.bool_)
    rows = np.flatnonzero(both)
    left, right = (whole_lists(each, rows) for each in (before, after))
    lengths = np.diff(left[0])
    same = lengths == np.diff(right[0])
    unlike[rows[~same]] = True
    rows, lengths = rows[same], lengths[same]
    elements = [
        values.take(pa.array(runs(offsets[:-1][same], lengths)))
        for offsets, values in (left, right)
    ]
    of_row = np.repeat(rows, lengths)
    unlike[of_row[differs(*elements)]] = True
    return unlike


def whole_lists(array: pa.Array, rows: Ints) -> tuple[Ints, pa.Array]:
    """The offsets and the elements of some rows' lists."""
    chosen = array.take(pa.array(rows))
    offsets = offsets_of(chosen)
    values = (
        chosen.values
        if pa.types.is_list(array.type)
        else pa.StructArray.from_arrays([chosen.keys, chosen.items], ["key", "value"])
    )
    return offsets, values


Row = dict[str, Any]
Folded = dict[tuple[Any, ...], Row]


def fold(
    changelog: pa.Table, key: Sequence[str], into: Mapping[tuple[Any, ...], Row] | None = None
) -> Folded:
    """The table that changes amount to, key by key. For tests and for looking closely: it refuses
    changes that no table can have made.
    """
    table: Folded = dict(into or {})
    for row in changelog.to_pylist():
        change, _ = row.pop(CHANGE_TYPE), row.pop(TICK, None)
        _apply(table, tuple(_key_part(row[name]) for name in key), change, row)
    return table


def _apply(table: Folded, key: tuple[Any, ...], change: str, row: Row) -> None:
    there = table.get(key)
    if change in COMES:
        if there is not None:
            raise MalformedChangelog(
                f"A row comes ({change}) for the key {key!r}, which has one already: {there!r}."
            )
        table[key] = row
        return
    if there is None or not same_row(there, row):
        raise MalformedChangelog(
            f"A row goes ({change}) for the key {key!r} that was not there: {row!r}, but {there!r}."
        )
    del table[key]


def _key_part(value: Any) -> Any:
    """NaN as one object, which a dictionary finds again."""
    return math.nan if isinstance(value, float) and math.isnan(value) else value


def same_row(left: Row, right: Row) -> bool:
    """Equal, with NaN like NaN."""
    return repr(left) == repr(right)


def check_ticks(changelog: pa.Table, key: Sequence[str]) -> None:
    """Refuse a changelog that is out of order, has more than one change of a key in a tick, or an
    update without one of its halves.
    """
    ticks = whole(changelog.column(TICK)).to_pylist()
    if ticks != sorted(ticks):
        raise MalformedChangelog("Changes are out of the order of their ticks.")
    of_key: dict[tuple[Any, ...], list[str]] = {}
    for row in changelog.to_pylist():
        of_key.setdefault((row[TICK], *(row[name] for name in key)), []).append(row[CHANGE_TYPE])
    for place, kinds in of_key.items():
        if kinds not in ([INSERT], [DELETE], [UPDATE_PREIMAGE, UPDATE_POSTIMAGE]):
            raise MalformedChangelog(
                f"In tick {place[0]} the key {place[1:]!r} has the changes {kinds}."
            )


# Values that a database did not send because a change left them as they were (Postgres's large
# values), filled in from the row before. Captured tables' topics mark them, in the column `_marks`;
# sinks, folding and the kernel of a pipeline's captured table fill them in, and a mark goes when
# its value is there.
#
# A row whose key has changed comes as a delete and an insert with the same `_transaction` and
# `_order`: there the row before is the one that goes. Few rows are concerned, so those are gone
# through one by one, and no others.


MARKS, TRANSACTION, ORDER = "_marks", "_transaction", "_order"
Key = tuple[Any, ...]
Pair = tuple[int, int]


def marked_unchanged(rows: pa.Table) -> pa.ChunkedArray:
    """Which rows have a mark of that kind."""
    return pc.fill_null(pc.match_substring(rows[MARKS], '"unchanged"'), False)


def with_unchanged(
    rows: pa.Table, key: list[str], lookup: Callable[[pa.Table], pa.Table]
) -> pa.Table:
    """Changes in their order, whole: what is marked as unchanged is as before in these rows, or
    else in what `lookup` has for some keys.
    """
    marked = marked_unchanged(rows)
    if not pc.any(marked).as_py():
        return rows
    touched = _touched(rows, rows.filter(marked), key)
    here = _among(rows, touched, key)
    known = {_key(row, key): row for row in lookup(touched).to_pylist()}
    changed = pa.Table.from_pylist(
        _Filling(rows.filter(here).to_pylist(), known, key).filled(), schema=rows.schema
    )
    numbers = pa.array(range(rows.num_rows))
    order = pa.concat_arrays([numbers.filter(pc.invert(here)), numbers.filter(here)])
    return pa.concat_tables([rows.filter(pc.invert(here)), changed]).take(pc.sort_indices(order))


def _touched(rows: pa.Table, marked: pa.Table, key: list[str]) -> pa.Table:
    """The keys of marked rows, and those that they had before."""
    keys = marked.select(key)
    if ORDER in rows.column_names and TRANSACTION in rows.column_names:
        gone = rows.filter(pc.equal(rows[CHANGE_TYPE], DELETE)).select([*key, TRANSACTION, ORDER])
        keys = pa.concat_tables(
            [
                keys,
                gone.join(
                    marked.select([TRANSACTION, ORDER]), [TRANSACTION, ORDER], join_type="left semi"
                )
                .select(key)
                .cast(keys.schema),
            ]
        )
    return pa.TableGroupBy(keys, key).aggregate([])


def _among(rows: pa.Table, keys: pa.Table, key: list[str]) -> pa.Array:
    """Which rows have one of the keys."""
    numbered = rows.select(key).append_column("__n", pa.array(range(rows.num_rows), pa.int64()))
    found = numbered.join(keys, key, join_type="left semi")["__n"]
    return pc.is_in(numbered["__n"], value_set=found.combine_chunks()).combine_chunks()


class _Filling:
    """Changes of some keys, each key's in order. A row that takes over from another key waits until
    that one is gone: it may stand in another partition.
    """

    def __init__(self, rows: list[Row], known: dict[Key, Row], key: list[str]) -> None:
        self._rows, self._known, self._names = rows, known, key
        self._waiting: dict[Key, deque[Row]] = {}
        for row in rows:
            self._waiting.setdefault(_key(row, key), deque()).append(row)
        self._deletes = {
            pair for row in rows if row[CHANGE_TYPE] == DELETE and (pair := _pair(row)) is not None
        }
        self._gone: dict[Pair, Row] = {}

    def filled(self) -> list[Row]:
        while any(self._waiting.values()):
            moved = sum(self._advance(queue) for queue in self._waiting.values())
            if not moved:  # keys that took each other's places: whatever is known must do
                self._take(next(queue for queue in self._waiting.values() if queue).popleft())
        return self._rows

    def _advance(self, queue: deque[Row]) -> int:
        moved = 0
        while queue and not self._must_wait(queue[0]):
            self._take(queue.popleft())
            moved += 1
        return moved

    def _must_wait(self, row: Row) -> bool:
        pair = _pair(row)
        return (
            row[CHANGE_TYPE] != DELETE
            and pair in self._deletes
            and pair not in self._gone
            and any(_unchanged(row))
        )

    def _take(self, row: Row) -> None:
        place, pair = _key(row, self._names), _pair(row)
        if row[CHANGE_TYPE] == DELETE:
            before = self._known.pop(place, None)
            if pair is not None:
                self._gone[pair] = before or {}
            return
        before = self._gone.get(pair) if pair in self._gone else self._known.get(place)
        _fill(row, before or {})
        self._known[place] = row


def _fill(row: Row, before: Row) -> None:
    """What the row before does not know either stays marked."""
    marks = _marks(row)
    unknown = {*_unchanged(before)}
    for name in _unchanged(row):
        if name in before and name not in unknown:
            row[name] = before[name]
            marks.pop(name)
    row[MARKS] = json.dumps(marks, ensure_ascii=False) if marks else None


def _marks(row: Row) -> dict[str, Any]:
    return json.loads(row[MARKS]) if row.get(MARKS) else {}


def _unchanged(row: Row) -> Iterator[str]:
    return (name for name, mark in _marks(row).items() if "unchanged" in mark)


def _pair(row: Row) -> Pair | None:
    transaction, order = row.get(TRANSACTION), row.get(ORDER)
    return None if transaction is None or order is None else (transaction, order)


def _key(row: Row, names: list[str]) -> Key:
    return tuple(row[name] for name in names)
