"""The join of two tables into a table that is kept up to date from the changes of both: on primary
or foreign keys, one to one, one to many or many to many.

Example: orders (key `order`) joined with customers (key `customer`) on `customer`, `how="left"`;
the key of the result is `order`.

    tick 1   orders: insert (1, customer=7)       state of join key 7: left (1, 7); counts (1, 0)
                                                  emits insert (1, 7, null)
    tick 2   customers: insert (7, "Ann")         state: left (1, 7), right (7, "Ann")
                                                  emits update (1, 7, null) -> (1, 7, "Ann")
    tick 3   customers: update "Ann" -> "Anna"    emits update (1, 7, "Ann") -> (1, 7, "Anna")
    tick 4   orders: delete (1, customer=7)       emits delete (1, 7, "Anna")

The result has a row for each pair of rows with equal join keys, and in an outer join one for each
row that has no match. Its key is that of both tables, or of one of them where that is enough. A
change costs as much as there are rows of its join key on the other side. A row whose join key has a
null matches nothing, as in SQL. Where a full join could have an unmatched row of either side under
one key of the result, because both keys are null, the right one becomes a dead letter.

Where a row moves from one join key to another, the result's row may be removed under the one and
added under the other in the same tick, by different shards. `SettleKernel`, sharded by the result's
key, merges the two into one change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import CHANGE_FIELD, TICK_FIELD
from headrace.columnar.keys import as_array, encode_keys
from headrace.columnar.lookup import (
    expand_pairs,
    group_start_mask,
    key_bounds,
    mask_at,
    rank_keys,
    search_within,
    sort_order,
)
from headrace.errors import InputError
from headrace.operators.joins.row_store import (
    HIGHEST,
    KeyedRowStore,
    RowStoreWriter,
    delete_keys,
)
from headrace.operators.joins.sides import (
    JoinColumns,
    ResultColumn,
    Side,
    join_keys,
    merge_changes,
    retraction_mask,
    ticks_of,
)
from headrace.operators.joins.stream_table import ALWAYS, FOREVER, TableSide, Versions
from headrace.operators.kernel import DeadLetterBuffer, KeyedState, Watermarks

# Overlapping versions


def overlapping_versions(left: Versions, right: Versions, count: int) -> tuple[Ints, Ints]:
    """All pairs of versions of the same key (one of `count`) that exist in a common tick, except
    those that exist both before and after the batch.

    Of a pair either the right one is added while the left one exists, or the left one while the
    right one exists, or both existed before the batch.
    """
    existed_left = left.start == ALWAYS
    removed_left = np.flatnonzero(existed_left & (left.end != FOREVER))
    lasting_left = np.flatnonzero(existed_left & (left.end == FOREVER))
    existed_right = np.flatnonzero(right.start == ALWAYS)
    removed_right = existed_right[right.end[existed_right] != FOREVER]
    pairs = [
        _pairs_added(left, right, count),
        _pairs_added(right, left, count, strictly=True)[::-1],
        _pairs_of_keys(left, removed_left, right, existed_right, count),
        _pairs_of_keys(left, lasting_left, right, removed_right, count),
    ]
    return (
        np.concatenate([lefts for lefts, _ in pairs]),
        np.concatenate([rights for _, rights in pairs]),
    )


def _pairs_added(
    existing: Versions, added: Versions, count: int, *, strictly: bool = False
) -> tuple[Ints, Ints]:
    """Pairs of which the second is added in the batch while the first exists; `strictly`: the first
    was added in an earlier tick.
    """
    fresh = np.flatnonzero(added.start != ALWAYS)
    fresh = fresh[sort_order(added.keys[fresh], added.start[fresh])]
    starts = added.start[fresh]
    begin = key_bounds(added.keys[fresh], count)
    first, end = begin[existing.keys], begin[existing.keys + 1]
    low = search_within(starts, first, end, existing.start, right=strictly)
    high = search_within(starts, low, end, existing.end, right=False)
    existing_index, fresh_index = expand_pairs(low, high)
    return existing_index, fresh[fresh_index]


def _pairs_of_keys(
    left: Versions, lefts: Ints, right: Versions, rights: Ints, count: int
) -> tuple[Ints, Ints]:
    """All pairs of some left and some right versions with the same key."""
    begin = key_bounds(right.keys[rights], count)
    keys = left.keys[lefts]
    left_index, right_index = expand_pairs(begin[keys], begin[keys + 1])
    return lefts[left_index], rights[right_index]


def absences(versions: Versions, rows_before: Ints) -> Versions:
    """The ranges of ticks in which each key has no rows, as versions of a row that is missing (-1).
    `rows_before` is the number of rows of each key before the batch.
    """
    added, removed = versions.start != ALWAYS, versions.end != FOREVER
    every_key = np.arange(len(rows_before))
    keys = np.concatenate([every_key, versions.keys[added], versions.keys[removed]])
    ticks = np.concatenate(
        [np.full(len(every_key), ALWAYS), versions.start[added], versions.end[removed]]
    )
    change = np.concatenate(
        [rows_before, np.ones(int(added.sum()), np.int64), np.full(int(removed.sum()), -1)]
    )
    order = sort_order(keys, ticks)
    keys, ticks, change = keys[order], ticks[order], change[order]
    starts = np.flatnonzero(group_start_mask(keys, ticks))
    if not len(starts):
        nothing = np.zeros(0, np.int64)
        return Versions(
            keys=nothing, sort_keys=nothing, start=nothing, end=nothing, row=nothing, row_id=nothing
        )
    keys, ticks, net = keys[starts], ticks[starts], np.add.reduceat(change, starts)
    matters = (net != 0) | (ticks == ALWAYS)
    keys, ticks, net = keys[matters], ticks[matters], net[matters]
    is_first = group_start_mask(keys)
    total = np.cumsum(net)
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(is_first)), 0))
    row_count = total - np.append(0, total)[first]
    end = np.append(ticks[1:], FOREVER)
    end[np.append(is_first[1:], True)] = FOREVER
    missing = np.full(len(keys), -1)
    return Versions(
        keys=keys, sort_keys=missing, start=ticks, end=end, row=missing, row_id=missing
    ).take(row_count == 0)


# The join


@dataclass(frozen=True)
class ResultChanges:
    """Rows of the result that are added or removed in a tick."""

    ticks: Ints
    keys: Ints  # the index of the join key
    left_ids: Ints  # tell the left rows of a key apart; -1 for none
    right_ids: Ints
    is_insertion: Ints  # 1 for rows that are added, 0 for those that are removed
    left_rows: Ints  # the index of the row among those of its side; -1 for none
    right_rows: Ints

    def take(self, which: Ints | Mask) -> ResultChanges:
        return ResultChanges(
            **{field.name: getattr(self, field.name)[which] for field in fields(self)}
        )

    @staticmethod
    def concat(parts: Sequence[ResultChanges]) -> ResultChanges:
        return ResultChanges(
            **{
                field.name: np.concatenate([getattr(part, field.name) for part in parts])
                for field in fields(ResultChanges)
            }
        )


_KEEPING = {"left": "right", "right": "left"}
"""For each side, the type of the join that keeps the unmatched rows of the other side alone."""


class TableTableJoin:
    """The kernel of a join of two tables. Its inputs are the changes of both; `key` is the key of
    the result.
    """

    hold_us = 0  # changes are emitted in their own tick: no watermark is held back

    def __init__(
        self,
        step: str,
        left: Side,
        right: Side,
        columns: Sequence[ResultColumn],
        *,
        how: str = "inner",
        nulls_in_both_keys: bool = False,
    ) -> None:
        """Declare the join. `nulls_in_both_keys` says that the primary keys of both tables may be
        null.
        """
        self.step_name, self.how = step, how
        self.left, self.right = left, right
        self._columns = JoinColumns(step, left, right, columns, how)
        # Whether rows of the result with one join key are told apart by the key of a side.
        self._by_left = not left.is_unique or (self._columns.keeps_left and not right.is_unique)
        self._by_right = not right.is_unique or (self._columns.keeps_right and not left.is_unique)
        if self._by_left or self._by_right:
            left_key = self._result_names("left", left.key) if self._by_left else ()
            right_key = self._result_names("right", right.key) if self._by_right else ()
            self.key = tuple(dict.fromkeys(left_key + right_key))
        else:
            self.key = self._result_names("key" if self._columns.keeps_right else "left", left.on)
        self._rejects_null_keys = how == "full" and nulls_in_both_keys
        self.dead_letters = DeadLetterBuffer(right.schema)
        # The key columns of a side that are null where the side is missing.
        self._own_left, self._own_right = (
            pa.schema([side.schema.field(name) for name in side.key if (source, name) in names])
            for names in [{(source, column) for source, column, _ in self._columns.columns}]
            for source, side in (("left", left), ("right", right))
        )

    def _result_names(self, side: str, columns: Sequence[str]) -> tuple[str, ...]:
        """The names of some columns of a side in the result. A join column may come as the key's,
        or in an inner join from the other side.
        """
        names = {(source, column): name for source, column, name in self._columns.columns}
        on, other_on = (
            (self.right.on, self.left.on) if side == "right" else (self.left.on, self.right.on)
        )
        result = []
        for column in columns:
            index = on.index(column) if column in on else None
            name = names.get((side, column))
            if name is None and index is not None:
                name = names.get(("key", self.left.on[index]))
            # The other side's column has the same value, if the other side is never missing.
            if name is None and index is not None and self.how in {"inner", _KEEPING[side]}:
                name = names.get(("left" if side == "right" else "right", other_on[index]))
            if name is None:
                raise InputError(
                    f"The result of step {self.step_name!r} lacks {column!r}, which is part of its"
                    " key.",
                    fix="keep it among the columns.",
                )
            result.append(name)
        return tuple(result)

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema.append(CHANGE_FIELD)

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """None: no row waits for a watermark."""
        return None

    def step_timed(
        self,
        state: KeyedState,
        inputs: Sequence[pa.Table],
        watermarks: Sequence[Watermarks],  # noqa: ARG002
    ) -> pa.Table:
        """1. Load the rows that change, and all rows of their join key on the other side. 2. Apply
        the changes. 3. Pair the versions. 4. Store. 5. Emit what was added and removed.
        """
        # 1. Load.
        if self._rejects_null_keys:
            inputs = [inputs[0], self._without_null_keys(inputs[1])]
        keyed = [
            join_keys(changes, side.on)
            for changes, side in zip(inputs, (self.left, self.right), strict=True)
        ]
        ranked = rank_keys([keys for keys, _ in keyed])
        row_store = KeyedRowStore(self.step_name, state, ranked.keys, sections=2, registers=2)
        stored_fields = self._columns.left_fields, self._columns.right_fields
        sides = [
            TableSide(
                self.step_name,
                side=side,
                fields=stored_fields[number],
                changes=inputs[number],
                keys=ranked.ranks[number],
                has_null=keyed[number][1],
            )
            for number, side in enumerate((self.left, self.right))
        ]
        for number, side in enumerate(sides):
            side.load(row_store, number, mask_at(len(row_store), sides[1 - number].keys))
        # 2. and 3. Apply the changes and pair the versions. The registers count the rows of a key.
        left, right = versions = [side.versions() for side in sides]
        count = len(row_store)
        rows_before = np.where(row_store.registers == HIGHEST, 0, row_store.registers)
        changes = [_paired_changes(left, right, count)]
        if self._columns.keeps_left:
            changes += [
                _paired_changes(left, absences(right, rows_before[1]), count),
                _null_key_changes(sides[0], keyed[0][1], ranked.ranks[0], is_left=True),
            ]
        if self._columns.keeps_right:
            changes += [
                _paired_changes(absences(left, rows_before[0]), right, count),
                _null_key_changes(sides[1], keyed[1][1], ranked.ranks[1], is_left=False),
            ]
        # 4. Store.
        writer = RowStoreWriter(row_store)
        for number, (side, of_side) in enumerate(zip(sides, versions, strict=True)):
            side.store(writer, number, of_side)
            added = np.bincount(of_side.keys[of_side.start != ALWAYS], minlength=count)
            removed = np.bincount(of_side.keys[of_side.end != FOREVER], minlength=count)
            rows = rows_before[number] + added - removed
            row_store.registers[number] = np.where(rows == 0, HIGHEST, rows)
        writer.save()
        return self._emit(self._with_result_ids(ResultChanges.concat(changes), *sides), *sides)

    def _without_null_keys(self, rows: pa.Table) -> pa.Table:
        """The right rows that cannot have the key of an unmatched left row."""
        by_pair = self._by_left or self._by_right
        nulls = [
            as_array(rows.column(name)).is_null().to_numpy(zero_copy_only=False)
            for name in (self.right.key if by_pair else self.right.on)
        ]
        has_null = (np.logical_and if by_pair else np.logical_or).reduce(nulls)
        if not has_null.any():
            return rows
        self.dead_letters.add(
            rows,
            np.flatnonzero(has_null & ~retraction_mask(rows)),
            "full join",
            "its key is null, and so may be that of a row of the other table, which it does not"
            " match: the result has one row a key",
        )
        return rows.filter(pa.array(~has_null))

    def _with_result_ids(
        self, changes: ResultChanges, left: TableSide, right: TableSide
    ) -> ResultChanges:
        """The changes, in which a row of a side and no row of it have one id if the key of the
        result is the same for both: if that side's part of it is null, or has no columns.
        """
        left_ids, right_ids = changes.left_ids, changes.right_ids
        if self._by_left and self._columns.keeps_right:
            is_null = _null_mask(left, self._own_left, changes.left_rows)
            left_ids = np.where(is_null, -1, left_ids)
        if self._by_right and self._columns.keeps_left:
            is_null = _null_mask(right, self._own_right, changes.right_rows)
            right_ids = np.where(is_null, -1, right_ids)
        return replace(changes, left_ids=left_ids, right_ids=right_ids)

    def forget(self, state: KeyedState, keys: pa.Array) -> None:
        """Delete the rows of some join keys, of both sides."""
        delete_keys(KeyedRowStore(self.step_name, state, keys, sections=2, registers=2))

    def _emit(self, changes: ResultChanges, left: TableSide, right: TableSide) -> pa.Table:
        """The changes in order of tick, join key and row. A row that is removed and added in the
        same tick is an update, or nothing if it is as it was.
        """
        nothing = np.zeros(len(changes.ticks), np.int64)
        identity = (
            changes.ticks,
            changes.keys,
            changes.left_ids if self._by_left else nothing,
            changes.right_ids if self._by_right else nothing,
        )
        order = sort_order(*identity, changes.is_insertion)
        changes = changes.take(order)
        is_second = ~group_start_mask(*(column[order] for column in identity))
        columns = self._columns.arrays(left.rows, changes.left_rows, right.rows, changes.right_rows)
        kinds, is_emitted = merge_changes(columns, is_second, changes.is_insertion == 1)
        result = pa.Table.from_arrays(
            [*columns, kinds, pa.array(changes.ticks)], schema=self.output.append(TICK_FIELD)
        )
        return result if is_emitted.all() else result.filter(pa.array(is_emitted))


def _null_mask(side: TableSide, fields: pa.Schema, rows: Ints) -> Mask:
    """Which rows of a side have nothing but nulls in some columns; -1 is a missing row."""
    is_null = np.ones(len(rows), np.bool_)
    for array in side.rows.columns(fields, rows).values() if len(fields) else ():
        is_null &= array.is_null().to_numpy(zero_copy_only=False)
    return is_null


def _paired_changes(left: Versions, right: Versions, count: int) -> ResultChanges:
    """Pairs of versions are added in the tick in which the later one is, and removed in the tick in
    which the first of them is.
    """
    lefts, rights = overlapping_versions(left, right, count)
    start = np.maximum(left.start[lefts], right.start[rights])
    end = np.minimum(left.end[lefts], right.end[rights])
    parts = []
    for ticks, happens, is_insertion in ((start, start != ALWAYS, 1), (end, end != FOREVER, 0)):
        changes = ResultChanges(
            ticks=ticks,
            keys=left.keys[lefts],
            left_ids=left.row_id[lefts],
            right_ids=right.row_id[rights],
            is_insertion=np.full(len(ticks), is_insertion),
            left_rows=left.row[lefts],
            right_rows=right.row[rights],
        )
        parts.append(changes if happens.all() else changes.take(happens))
    return ResultChanges.concat(parts)


def _null_key_changes(
    side: TableSide, has_null: Mask, keys: Ints, *, is_left: bool
) -> ResultChanges:
    """The changes of rows whose join key has a null, which match nothing, whatever the other side
    has. They are not stored: a change brings the row that is removed, too.
    """
    which = np.flatnonzero(has_null)
    changes = side.fresh.take(pa.array(which))
    ids = rank_keys([encode_keys(changes, side.side.key)]).ranks[0]
    rows, missing = len(side.stored) + which, np.full(len(which), -1)
    return ResultChanges(
        ticks=ticks_of(changes),
        keys=keys[which],
        left_ids=ids if is_left else missing,
        right_ids=missing if is_left else ids,
        is_insertion=(~retraction_mask(changes)).astype(np.int64),
        left_rows=rows if is_left else missing,
        right_rows=missing if is_left else rows,
    )
