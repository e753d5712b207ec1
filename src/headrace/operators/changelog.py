"""Changelogs: a table as the sequence of its changes.

Within a tick, changes are in order of key, and a key has one of: an insert; a delete, with the old
row; or an update_preimage with the old row followed by an update_postimage with the new row. A tick
that leaves a row as it was emits no change. A table with key `k`:

    tick 7: k=a n=1, k=b n=1     insert a 1; insert b 1
    tick 8: k=a n=2, b removed   update_preimage a 1; update_postimage a 2; delete b 1

Kernels build changelogs with `segment_changes` (one version per segment) and compare values with
`differs`. Tests fold changelogs back into tables with `fold` and check their form with
`check_ticks`. `fill_unchanged_values` completes captured changes that lack unchanged large values.
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

from headrace.columnar.buffers import Ints, Mask, expand_ranges, offsets_of
from headrace.columnar.columns import (
    CHANGE_TYPE,
    CHANGE_TYPES,
    DELETE,
    INSERT,
    MARKS,
    ORDER,
    TICK,
    TRANSACTION,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
)
from headrace.columnar.keys import as_array
from headrace.columnar.segments import Segments
from headrace.errors import InputError

ADDITIONS = frozenset({INSERT, UPDATE_POSTIMAGE})


class MalformedChangelog(InputError):
    """A changelog that no table can have: it removes a row that is absent, or adds one that is
    present.
    """


@dataclass(frozen=True)
class EmittedChanges:
    """Changes in order: the kind of each (an index into CHANGE_TYPES), its segment, and the version
    shown.
    """

    kinds: Ints
    segments: Ints
    versions: Ints

    @property
    def additions(self) -> Mask:
        """Which changes show a row that is present from then on: inserts and postimages."""
        shown: Mask = (self.kinds == 0) | (self.kinds == 2)
        return shown

    def names(self) -> pa.Array:
        """The `_change_type` of each change."""
        return pa.array(CHANGE_TYPES).take(pa.array(self.kinds))


def segment_changes(segments: Segments, exists: Mask, differs: Mask) -> EmittedChanges:
    """The changes that segments make to their keys, in order of tick and key.

    Args:
        segments: The rows of a call, cut by key and tick.
        exists: For each version of a key, whether the row is present.
        differs: For each segment, whether it changed the row.

    """
    in_order = (
        np.arange(len(segments))
        if segments.has_one_tick
        else np.argsort(segments.ticks, kind="stable")
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
    return EmittedChanges(kinds, in_order[which], versions)


def differs(before: pa.Array, after: pa.Array) -> Mask:
    """Where two columns differ, value by value.

    Null equals null and NaN equals NaN, but 0.0 differs from -0.0, which has other bytes.
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
    """Whether lists that are both present differ in length or in some element."""
    unlike = np.zeros(len(before), np.bool_)
    rows = np.flatnonzero(both)
    left, right = (list_parts(each, rows) for each in (before, after))
    lengths = np.diff(left[0])
    same = lengths == np.diff(right[0])
    unlike[rows[~same]] = True
    rows, lengths = rows[same], lengths[same]
    elements = [
        values.take(pa.array(expand_ranges(offsets[:-1][same], lengths)))
        for offsets, values in (left, right)
    ]
    of_row = np.repeat(rows, lengths)
    unlike[of_row[differs(*elements)]] = True
    return unlike


def list_parts(array: pa.Array, rows: Ints) -> tuple[Ints, pa.Array]:
    """The offsets and the elements of some rows' lists or maps."""
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
    """The table that results from a changelog, by key. For tests and for close inspection.

    Args:
        changelog: Rows with a `_change_type`, in order.
        key: The columns of the table's key.
        into: The table before the first change; empty unless given.

    Raises:
        MalformedChangelog: A change does not fit the table, as the removal of an absent row.

    """
    table: Folded = dict(into or {})
    for row in changelog.to_pylist():
        change, _ = row.pop(CHANGE_TYPE), row.pop(TICK, None)
        _apply(table, tuple(_key_part(row[name]) for name in key), change, row)
    return table


def _apply(table: Folded, key: tuple[Any, ...], change: str, row: Row) -> None:
    there = table.get(key)
    if change in ADDITIONS:
        if there is not None:
            raise MalformedChangelog(
                f"The change {change} adds a row for the key {key!r}, which has one already:"
                f" {there!r}."
            )
        table[key] = row
        return
    if there is None or not same_row(there, row):
        raise MalformedChangelog(
            f"The change {change} removes the row {row!r} for the key {key!r}, which has {there!r}."
        )
    del table[key]


def _key_part(value: Any) -> Any:
    """The value, with every NaN as the same object, so that a dictionary finds it."""
    return math.nan if isinstance(value, float) and math.isnan(value) else value


def same_row(left: Row, right: Row) -> bool:
    """Whether two rows are equal, with NaN equal to NaN."""
    return repr(left) == repr(right)


def check_ticks(changelog: pa.Table, key: Sequence[str]) -> None:
    """Check that ticks are in order, and that a key has one insert, delete or whole update per
    tick.

    Raises:
        MalformedChangelog: The changelog is not of that form.

    """
    ticks = as_array(changelog.column(TICK)).to_pylist()
    if ticks != sorted(ticks):
        raise MalformedChangelog("The changes are not in order of tick.")
    of_key: dict[tuple[Any, ...], list[str]] = {}
    for row in changelog.to_pylist():
        of_key.setdefault((row[TICK], *(row[name] for name in key)), []).append(row[CHANGE_TYPE])
    for (tick, *key_values), kinds in of_key.items():
        if kinds not in ([INSERT], [DELETE], [UPDATE_PREIMAGE, UPDATE_POSTIMAGE]):
            raise MalformedChangelog(
                f"In tick {tick} the key {tuple(key_values)!r} has the changes {kinds}."
            )


# Unchanged values of captured rows. Postgres does not send a large value that a change leaves as it
# was; the capture marks such a column in `_marks`, and the value is filled in from the row before:
# by sinks, by folding, and by the kernel of a pipeline's captured table. The mark goes with it.
#
# A row whose key changes is captured as a delete and an insert with the same `_transaction` and
# `_order`; the row before is then the deleted one. Marked rows are few, so they are processed one
# by one.


Key = tuple[Any, ...]
Pair = tuple[int, int]


def unchanged_mask(rows: pa.Table) -> pa.ChunkedArray:
    """Which rows have a value that is marked as unchanged."""
    return pc.fill_null(pc.match_substring(rows[MARKS], '"unchanged"'), False)


def fill_unchanged_values(
    rows: pa.Table, key: list[str], lookup: Callable[[pa.Table], pa.Table]
) -> pa.Table:
    """Fill in the values that are marked as unchanged.

    Args:
        rows: Changes in order, with a column `_marks`.
        key: The columns of the table's key.
        lookup: Returns the current rows of a table of keys, for rows that `rows` do not contain.

    Returns:
        The changes in the same order. A value that is found nowhere stays marked.

    """
    marked = unchanged_mask(rows)
    if not pc.any(marked).as_py():
        return rows
    touched = _touched(rows, rows.filter(marked), key)
    # Which rows have one of the keys.
    numbered = rows.select(key).append_column("__n", pa.array(range(rows.num_rows), pa.int64()))
    matching = numbered.join(touched, key, join_type="left semi")["__n"]
    here = pc.is_in(numbered["__n"], value_set=matching.combine_chunks()).combine_chunks()
    known = {_key(row, key): row for row in lookup(touched).to_pylist()}
    changed = pa.Table.from_pylist(
        _UnchangedValueFiller(rows.filter(here).to_pylist(), known, key).filled(),
        schema=rows.schema,
    )
    numbers = pa.array(range(rows.num_rows))
    order = pa.concat_arrays([numbers.filter(pc.invert(here)), numbers.filter(here)])
    return pa.concat_tables([rows.filter(pc.invert(here)), changed]).take(pc.sort_indices(order))


def _touched(rows: pa.Table, marked: pa.Table, key: list[str]) -> pa.Table:
    """The keys of marked rows, and the keys that those rows had before."""
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


class _UnchangedValueFiller:
    """Fills in the rows of some keys, each key's in order.

    A row that continues a row of another key waits until that one's delete has been processed,
    which may come from another partition.
    """

    def __init__(self, rows: list[Row], known: dict[Key, Row], key: list[str]) -> None:
        self._rows = rows
        self._known = known
        self._names = key
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
            if not moved:  # keys were swapped: use the row that is known
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
        key, pair = _key(row, self._names), _pair(row)
        if row[CHANGE_TYPE] == DELETE:
            before = self._known.pop(key, None)
            if pair is not None:
                self._gone[pair] = before or {}
            return
        before = self._gone.get(pair) if pair in self._gone else self._known.get(key)
        _fill(row, before or {})
        self._known[key] = row


def _fill(row: Row, before: Row) -> None:
    """Fill in marked values from the row before; a value that it lacks as well stays marked."""
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
