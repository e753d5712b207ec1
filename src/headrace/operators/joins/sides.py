"""The two sides of a join: what an input brings, which of its columns the result has, and its rows,
stored or new. Every join of this package is made of these.

Also here: the merging of the changes of one key in one tick (`merge_changes`, `SettleKernel`),
which every join whose result is a table needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import (
    CHANGE_FIELD,
    CHANGE_TYPE,
    CHANGE_TYPES,
    DELETE,
    TICK,
    TICK_FIELD,
    UPDATE_PREIMAGE,
)
from headrace.columnar.keys import as_array, encode_keys
from headrace.columnar.lookup import group_start_mask, mask_at, sort_order
from headrace.columnar.segments import order_by_key
from headrace.errors import BugError, InputError, UnknownColumn
from headrace.operators.changelog import differs
from headrace.operators.kernel import KeyedState, Times, microseconds

ResultColumn = tuple[str, str, str]
"""(source, column, name in the result). The source is "left" or "right"; or "key": a join column
(as the left names it) of whichever side has a row; or "time": the left's time column, of whichever
side has a row.
"""
JOIN_TYPES = ("inner", "left", "right", "full")


@dataclass(frozen=True)
class Side:
    """An input of a join: its columns, those it is joined on, its primary key if it is a table, and
    its column of event times if it has one. `shift_us` is added to these times.
    """

    schema: pa.Schema
    on: tuple[str, ...]
    key: tuple[str, ...] = ()
    time: str | None = None
    shift_us: int = 0

    def times(self, rows: pa.Table) -> Times:
        """The event times of rows."""
        assert self.time is not None
        times: Times = microseconds(rows.column(self.time)) + self.shift_us
        return times

    def check(self, where: str) -> None:
        """Raise `UnknownColumn` if the input lacks a column that is named."""
        for name in (*self.on, *self.key, *([self.time] if self.time else [])):
            if name not in self.schema.names:
                raise UnknownColumn(name, self.schema.names, where=where)

    @property
    def is_unique(self) -> bool:
        """Whether a join key has at most one row: it contains the whole primary key."""
        return set(self.key) <= set(self.on)


class JoinColumns:
    """The columns of a join's result, and the columns that it needs of each side.

    `keeps_left` and `keeps_right` say whether the result has the unmatched rows of a side.
    """

    def __init__(
        self, step: str, left: Side, right: Side, columns: Sequence[ResultColumn], how: str
    ) -> None:
        self.left, self.right, self.columns = left, right, tuple(columns)
        if how not in JOIN_TYPES:
            raise InputError(
                f"Step {step!r} joins how={how!r}.",
                fix=f"choose one of {', '.join(map(repr, JOIN_TYPES))}.",
            )
        self.keeps_left, self.keeps_right = how in {"left", "full"}, how in {"right", "full"}
        left.check(f"The left input of step {step!r}")
        right.check(f"The right input of step {step!r}")
        if len(left.on) != len(right.on):
            raise InputError(
                f"Step {step!r} joins {len(left.on)} columns with {len(right.on)}.",
                fix="name as many on either side.",
            )
        for left_name, right_name in zip(left.on, right.on, strict=True):
            left_type = left.schema.field(left_name).type
            right_type = right.schema.field(right_name).type
            if left_type != right_type:
                raise InputError(
                    f"Step {step!r} joins {left_name!r} ({left_type}) with {right_name!r}"
                    f" ({right_type}).",
                    fix="cast one of them with with_columns first.",
                )
        names = [name for _, _, name in self.columns]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(
                f"Both inputs of step {step!r} have a column {duplicates[0]!r}.",
                fix="tell them apart with suffix=, or select or rename one first.",
            )
        sources = [self.sources(source, column) for source, column, _ in self.columns]
        left_names = {left_name for left_name, _ in sources}
        right_names = {right_name for _, right_name in sources}
        self.left_fields = pa.schema([field for field in left.schema if field.name in left_names])
        self.right_fields = pa.schema(
            [field for field in right.schema if field.name in right_names]
        )

    def sources(self, source: str, column: str) -> tuple[str | None, str | None]:
        """The left and the right column that a result column is taken from; None for a side that is
        not needed.
        """
        if source == "left":
            return column, None
        if source == "right":
            return None, column
        if source == "time":
            return self.left.time, self.right.time if self.keeps_right else None
        if source == "key":
            return column, self.right.on[self.left.on.index(column)] if self.keeps_right else None
        raise BugError(f"A result's column comes from {source!r}.")

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the result. Those that an unmatched row leaves empty are nullable."""
        fields = []
        for source, column, name in self.columns:
            left, right = self.sources(source, column)
            field = self.right.schema.field(right) if left is None else self.left.schema.field(left)
            may_be_empty = (
                self.keeps_right if right is None else self.keeps_left if left is None else False
            )
            fields.append(field.with_name(name).with_nullable(field.nullable or may_be_empty))
        return pa.schema(fields)

    def arrays(
        self, left: SideRows, left_index: Ints, right: SideRows, right_index: Ints
    ) -> list[pa.Array]:
        """The result columns of pairs of rows; -1 is the index of a row that is missing."""
        left_arrays = left.columns(self.left_fields, left_index)
        right_arrays = right.columns(self.right_fields, right_index)
        has_left = pa.array(left_index >= 0)
        arrays = []
        for source, column, _ in self.columns:
            left_name, right_name = self.sources(source, column)
            if left_name is not None and right_name is not None:
                arrays.append(
                    pc.if_else(has_left, left_arrays[left_name], right_arrays[right_name])
                )
            elif left_name is not None:
                arrays.append(left_arrays[left_name])
            else:
                arrays.append(right_arrays[right_name or ""])
        return arrays


class SideRows:
    """The rows of one side by index: first the stored ones, of which there are bytes, then the new
    ones, of which there are columns.
    """

    def __init__(self, stored_fields: pa.Schema, stored: pa.Array, fresh: pa.Table) -> None:
        self.stored_fields, self.stored, self.fresh = stored_fields, stored, fresh
        self._struct = pa.struct(list(stored_fields))

    def columns(self, fields: pa.Schema, index: Ints) -> dict[str, pa.Array]:
        """Some columns of some rows; nulls where the index is -1."""
        count = len(self.stored)
        from_stored = np.flatnonzero((index >= 0) & (index < count))
        is_used = mask_at(count, index[from_stored])
        used = np.flatnonzero(is_used)
        # Only the stored rows that are used are decoded: indices move up accordingly.
        moved = np.where(index >= count, index - count + len(used), index)
        moved[from_stored] = (np.cumsum(is_used) - 1)[index[from_stored]]
        decoded = (
            row_codec.decode_array(self.stored.take(pa.array(used)), self._struct)
            if len(used)
            else None
        )
        has_missing = len(index) and index.min() < 0
        indices = pa.array(moved, mask=index < 0) if has_missing else pa.array(moved)
        arrays = {}
        for field in fields:
            column = as_array(self.fresh.column(field.name))
            if decoded is not None:
                column = pa.concat_arrays([decoded.field(field.name), column])
            arrays[field.name] = column.take(indices)
        return arrays

    def bytes(self, index: Ints) -> pa.Array:
        """The bytes of some rows, as they are stored."""
        count = len(self.stored)
        is_new = index >= count
        if not is_new.any():
            return self.stored.take(pa.array(index))
        encoded = self._encode(pa.array(index[is_new] - count))
        if is_new.all():
            return encoded
        moved = index.copy()
        moved[is_new] = count + np.arange(len(encoded))
        return pa.concat_arrays([self.stored, encoded]).take(pa.array(moved))

    def _encode(self, indices: pa.Array) -> pa.Array:
        if not len(self.stored_fields):
            return pa.array([b""] * len(indices), pa.large_binary())
        columns = [
            as_array(self.fresh.column(name)).take(indices) for name in self.stored_fields.names
        ]
        return row_codec.encode_array(
            pa.StructArray.from_arrays(columns, fields=list(self.stored_fields))
        )


def ticks_of(rows: pa.Table) -> Ints:
    """The tick of each row; raises `BugError` if they are not in order."""
    ticks: Ints = as_array(rows.column(TICK)).to_numpy()
    if len(ticks) and (ticks[1:] < ticks[:-1]).any():
        raise BugError("Rows came to a kernel out of the order of their ticks.")
    return ticks


def retraction_mask(changes: pa.Table) -> Mask:
    """Which changes retract a row: deletes and the old rows of updates."""
    mask: Mask = pc.is_in(
        as_array(changes.column(CHANGE_TYPE)), pa.array([DELETE, UPDATE_PREIMAGE])
    ).to_numpy(zero_copy_only=False)
    return mask


def join_keys(rows: pa.Table, on: Sequence[str]) -> tuple[pa.Array, Mask]:
    """The join keys of rows as bytes, and which of them contain a null and so match nothing."""
    has_null = np.zeros(rows.num_rows, np.bool_)
    for name in on:
        column = as_array(rows.column(name))
        if column.null_count:
            has_null |= column.is_null().to_numpy(zero_copy_only=False)
    return encode_keys(rows, on), has_null


# Merging the changes of a key in a tick


def merge_changes(
    columns: Sequence[pa.Array], is_second: Mask, is_insertion: Mask
) -> tuple[pa.Array, Mask]:
    """Turn rows that are removed and added in the same tick into updates.

    Args:
        columns: the rows, those of one key and tick next to each other, the removed one first.
        is_second: the rows that are added right behind the removed row of the same key and tick.
        is_insertion: the rows that are added; the others are removed.

    Returns:
        The change type of each row, and which rows to emit: not those of an update that changes
        nothing.
    """
    second = np.flatnonzero(is_second)
    kinds = np.where(is_insertion, 0, 3)
    kinds[second], kinds[second - 1] = 2, 1
    is_emitted = np.ones(len(kinds), np.bool_)
    if len(second):
        before, after = pa.array(second - 1), pa.array(second)
        is_same = ~np.logical_or.reduce(
            [differs(column.take(before), column.take(after)) for column in columns]
        )
        is_emitted[second[is_same]] = is_emitted[second[is_same] - 1] = False
    return pa.array(CHANGE_TYPES).take(pa.array(kinds)), is_emitted


class SettleKernel:
    """Merges the changes of a table that come from different shards into one change per key and
    tick. It has no state.

    A row that moves from one join key (or group) to another is removed by one shard and added by
    another. This kernel runs behind such a step, sharded by the table's own key, before anything
    relies on that key:

        tick 7, shard 0:  delete  order=1 customer="ann"
        tick 7, shard 1:  insert  order=1 customer="bob"
        emitted           update_preimage   order=1 customer="ann"
                          update_postimage  order=1 customer="bob"
    """

    def __init__(self, step: str, schema: pa.Schema, key: Sequence[str]) -> None:
        self.step_name, self.schema, self.key = step, schema, tuple(key)

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(CHANGE_FIELD)

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:  # noqa: ARG002
        ticks, is_insertion = ticks_of(rows), (~retraction_mask(rows)).astype(np.int64)
        order, is_new_key = order_by_key(encode_keys(rows, self.key))
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.cumsum(is_new_key)
        order = sort_order(ticks, ranks, is_insertion)
        ticks, ranks, is_insertion = ticks[order], ranks[order], is_insertion[order]
        if len(order) and not group_start_mask(ticks, ranks, is_insertion).all():
            raise BugError(f"Step {self.step_name!r} received several rows of one key in a tick.")
        columns = [as_array(rows.column(name)).take(pa.array(order)) for name in self.schema.names]
        is_second = ~group_start_mask(ticks, ranks)
        kinds, is_emitted = merge_changes(columns, is_second, is_insertion == 1)
        result = pa.Table.from_arrays(
            [*columns, kinds, pa.array(ticks)], schema=self.output.append(TICK_FIELD)
        )
        return result if is_emitted.all() else result.filter(pa.array(is_emitted))
