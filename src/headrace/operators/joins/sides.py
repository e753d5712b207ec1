"""The two sides of a join: what each brings, which of its columns the result has, and its rows,
some of them stored and some new.
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
from headrace.columnar.columns import CHANGE_FIELD, CHANGE_TYPE, TICK, TICK_FIELD
from headrace.columnar.keys import encode_keys, whole
from headrace.columnar.lookup import begins, marked, sorting
from headrace.columnar.segments import by_key
from headrace.errors import BugError, InputError, UnknownColumn
from headrace.operators.changelog import CHANGES, DELETE, UPDATE_PREIMAGE, differs
from headrace.operators.kernel import KeyedState

ResultColumn = tuple[str, str, str]
"""(from where, column, name in the result). From "left" or "right"; or "key": a join column (as the
left names it) of whichever side is there; or "time": the left's time column, of whichever side is
there.
"""
HOWS = ("inner", "left", "right", "full")


@dataclass(frozen=True)
class Side:
    """An input of a join: its columns, those it is joined on, its primary key if it is a table, and
    its column of event times if it has one.
    """

    schema: pa.Schema
    on: tuple[str, ...]
    key: tuple[str, ...] = ()
    time: str | None = None

    def check(self, where: str) -> None:
        for name in (*self.on, *self.key, *([self.time] if self.time else [])):
            if name not in self.schema.names:
                raise UnknownColumn(name, self.schema.names, where=where)

    @property
    def one_row_a_key(self) -> bool:
        """Whether a join key has no more than one row: if it has the whole primary key."""
        return set(self.key) <= set(self.on)


class JoinColumns:
    """The result's columns, and what of each side they need."""

    def __init__(
        self, step: str, left: Side, right: Side, columns: Sequence[ResultColumn], how: str
    ) -> None:
        self.left, self.right, self.columns = left, right, tuple(columns)
        if how not in HOWS:
            raise InputError(
                f"Step {step!r} joins how={how!r}.",
                fix=f"choose one of {', '.join(map(repr, HOWS))}.",
            )
        self.keeps_left, self.keeps_right = how in {"left", "full"}, how in {"right", "full"}
        self._check(step)
        self.left_needs, self.right_needs = self._needs("left"), self._needs("right")

    def _check(self, step: str) -> None:
        self.left.check(f"The left input of step {step!r}")
        self.right.check(f"The right input of step {step!r}")
        if len(self.left.on) != len(self.right.on):
            raise InputError(
                f"Step {step!r} joins {len(self.left.on)} columns with {len(self.right.on)}.",
                fix="name as many on either side.",
            )
        for mine, other in zip(self.left.on, self.right.on, strict=True):
            types = self.left.schema.field(mine).type, self.right.schema.field(other).type
            if types[0] != types[1]:
                raise InputError(
                    f"Step {step!r} joins {mine!r} ({types[0]}) with {other!r} ({types[1]}).",
                    fix="cast one of them with with_columns first.",
                )
        names = [name for _, _, name in self.columns]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(
                f"Both inputs of step {step!r} have a column {twice[0]!r}.",
                fix="tell them apart with suffix=, or select or rename one first.",
            )

    def sources(self, kind: str, column: str) -> tuple[str | None, str | None]:
        """The left and the right column that a result's column is taken from; None where it is not
        needed.
        """
        if kind == "left":
            return column, None
        if kind == "right":
            return None, column
        if kind == "time":
            return self.left.time, self.right.time if self.keeps_right else None
        if kind == "key":
            return column, self.right.on[self.left.on.index(column)] if self.keeps_right else None
        raise BugError(f"A result's column comes from {kind!r}.")

    def _needs(self, side: str) -> pa.Schema:
        """The columns that are needed of a side's rows, in their order."""
        at = 0 if side == "left" else 1
        schema = self.left.schema if side == "left" else self.right.schema
        names = {self.sources(kind, column)[at] for kind, column, _ in self.columns}
        return pa.schema([field for field in schema if field.name in names])

    @cached_property
    def schema(self) -> pa.Schema:
        """The result's columns; those that a missing side leaves empty can be null."""
        fields = []
        for kind, column, name in self.columns:
            left, right = self.sources(kind, column)
            field = self.right.schema.field(right) if left is None else self.left.schema.field(left)
            empty = (
                self.keeps_right if right is None else self.keeps_left if left is None else False
            )
            fields.append(field.with_name(name).with_nullable(field.nullable or empty))
        return pa.schema(fields)

    def arrays(self, left: Rows, left_at: Ints, right: Rows, right_at: Ints) -> list[pa.Array]:
        """The columns of pairs of rows; a row that is missing is at -1."""
        lefts, rights = (
            left.columns(self.left_needs, left_at),
            right.columns(self.right_needs, right_at),
        )
        there = pa.array(left_at >= 0)
        arrays = []
        for kind, column, _ in self.columns:
            mine, other = self.sources(kind, column)
            if mine is not None and other is not None:
                arrays.append(pc.if_else(there, lefts[mine], rights[other]))
            else:
                arrays.append(lefts[mine] if mine is not None else rights[other or ""])
        return arrays


class Rows:
    """Rows of one side by their place: first the stored ones, of which there are bytes, then the
    new ones, of which there are columns.
    """

    def __init__(self, kept: pa.Schema, stored: pa.Array, fresh: pa.Table) -> None:
        self.kept, self.stored, self.fresh = kept, stored, fresh
        self._kind = pa.struct(list(kept))

    def columns(self, needed: pa.Schema, at: Ints) -> dict[str, pa.Array]:
        """Some columns of some rows; nulls for those at -1."""
        count = len(self.stored)
        old = np.flatnonzero((at >= 0) & (at < count))
        wanted = marked(count, at[old])
        used = np.flatnonzero(wanted)
        moved = np.where(at >= count, at - count + len(used), at)
        moved[old] = (np.cumsum(wanted) - 1)[at[old]]
        decoded = (
            row_codec.decode_array(self.stored.take(pa.array(used)), self._kind)
            if len(used)
            else None
        )
        which = pa.array(moved, mask=at < 0) if len(at) and at.min() < 0 else pa.array(moved)
        return {field.name: self._column(field, decoded).take(which) for field in needed}

    def _column(self, field: pa.Field, decoded: pa.Array | None) -> pa.Array:
        fresh = whole(self.fresh.column(field.name))
        return fresh if decoded is None else pa.concat_arrays([decoded.field(field.name), fresh])

    def bytes(self, at: Ints) -> pa.Array:
        """The bytes of some rows, as they are stored."""
        count = len(self.stored)
        new = at >= count
        if not new.any():
            return self.stored.take(pa.array(at))
        encoded = self._encoded(pa.array(at[new] - count))
        if new.all():
            return encoded
        moved = at.copy()
        moved[new] = count + np.arange(len(encoded))
        return pa.concat_arrays([self.stored, encoded]).take(pa.array(moved))

    def _encoded(self, which: pa.Array) -> pa.Array:
        if not len(self.kept):
            return pa.array([b""] * len(which), pa.large_binary())
        columns = [whole(self.fresh.column(name)).take(which) for name in self.kept.names]
        return row_codec.encode_array(pa.StructArray.from_arrays(columns, fields=list(self.kept)))


def ticks_of(rows: pa.Table) -> Ints:
    ticks: Ints = whole(rows.column(TICK)).to_numpy()
    if len(ticks) and (ticks[1:] < ticks[:-1]).any():
        raise BugError("Rows came to a kernel out of the order of their ticks.")
    return ticks


def goes(changes: pa.Table) -> Mask:
    """Which changes show a row that goes."""
    gone: Mask = pc.is_in(
        whole(changes.column(CHANGE_TYPE)), pa.array([DELETE, UPDATE_PREIMAGE])
    ).to_numpy(zero_copy_only=False)
    return gone


def join_keys(rows: pa.Table, on: Sequence[str]) -> tuple[pa.Array, Mask]:
    """The key bytes that rows are joined on; and which of them have a null among their values, and
    so join nothing.
    """
    missing = np.zeros(rows.num_rows, np.bool_)
    for name in on:
        column = whole(rows.column(name))
        if column.null_count:
            missing |= column.is_null().to_numpy(zero_copy_only=False)
    return encode_keys(rows, on), missing


# Changes of a table, some of which come from different shards, made one change for each key and
# tick: what went and came again is an update, or nothing.
#
# Needed behind a join of tables, and wherever else the rows of one key may be told under two: by
# the table's own key, before anything relies on that key.


class SettleKernel:
    """A kernel without state: each tick's changes are made out by themselves. Of a key, a tick may
    bring one row that goes and one that comes.
    """

    def __init__(self, step: str, schema: pa.Schema, key: Sequence[str]) -> None:
        self.step_name, self.schema, self.key = step, schema, tuple(key)

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(CHANGE_FIELD)

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:  # noqa: ARG002
        ticks, comes = ticks_of(rows), (~goes(rows)).astype(np.int64)
        order, new_key = by_key(encode_keys(rows, self.key))
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.cumsum(new_key)
        order = sorting(ticks, ranks, comes)
        ticks, ranks, comes = ticks[order], ranks[order], comes[order]
        if len(order) and not begins(ticks, ranks, comes).all():
            raise BugError(
                f"Step {self.step_name!r} was told of several rows of one key in a tick."
            )
        columns = [whole(rows.column(name)).take(pa.array(order)) for name in self.schema.names]
        kinds, stays = merged(columns, ~begins(ticks, ranks), comes == 1)
        result = pa.Table.from_arrays(
            [*columns, kinds, pa.array(ticks)],
            schema=self.output.append(TICK_FIELD),
        )
        return result if stays.all() else result.filter(pa.array(stays))


def merged(columns: Sequence[pa.Array], again: Mask, comes: Mask) -> tuple[pa.Array, Mask]:
    """The kinds of changes, of which some come `again` right behind the row that went; and which to
    tell: not those that are as they were.
    """
    second = np.flatnonzero(again)
    kinds = np.where(comes, 0, 3)
    kinds[second], kinds[second - 1] = 2, 1
    stays = np.ones(len(kinds), np.bool_)
    if len(second):
        before, after = pa.array(second - 1), pa.array(second)
        same = ~np.logical_or.reduce(
            [differs(column.take(before), column.take(after)) for column in columns]
        )
        stays[second[same]] = stays[second[same] - 1] = False
    return pa.array(CHANGES).take(pa.array(kinds)), stays
