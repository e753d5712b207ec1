"""Two tables joined into a table, kept up to date from the changes of both: on primary or foreign
keys, one to one, one to many or many to many.

The result has a row for each pair of rows with equal join keys, and in an outer join one for each
row that has no partner. Its key is that of both, or of one of them where that is enough. A change
costs as much as there are rows of its join key on the other side. A row whose join key has a null
has no partner.

Where a row moves from one join key to another, the result's row may go under the one and come under
the other in the same tick: in the work of different shards. `SettleKernel`, by the result's key,
makes one change of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import CHANGE_FIELD, TICK_FIELD
from headrace.columnar.keys import encode_keys
from headrace.columnar.lookup import begins, bounds, marked, pairs, ranked, search, sorting
from headrace.errors import InputError
from headrace.operators.joins.row_store import NONE, Piles, PileWriter
from headrace.operators.joins.sides import (
    JoinColumns,
    ResultColumn,
    Side,
    goes,
    join_keys,
    merged,
    ticks_of,
)
from headrace.operators.joins.stream_table import ALWAYS, FOREVER, TableSide, Versions
from headrace.operators.kernel import KeyedState, Watermarks

# Versions that are there at the same time, and times at which a key has no rows: what a join of
# tables is made of.


def overlaps(left: Versions, right: Versions, count: int) -> tuple[Ints, Ints]:
    """All pairs of versions of one of `count` keys that are there together for a while, except
    those that were before the call and are after it.

    Of a pair either the right one comes when the left one is there, or the left one when the right
    one is there, or both were there before.
    """
    found = [
        _starting_in(left, right, count),
        _starting_in(right, left, count, strictly=True)[::-1],
        *_were_there(left, right, count),
    ]
    return np.concatenate([each[0] for each in found]), np.concatenate([each[1] for each in found])


def _starting_in(
    these: Versions, others: Versions, count: int, *, strictly: bool = False
) -> tuple[Ints, Ints]:
    """Pairs in which the other comes in the call, and this one is there then; `strictly`: was there
    before.
    """
    fresh = np.flatnonzero(others.start != ALWAYS)
    fresh = fresh[sorting(others.keys[fresh], others.start[fresh])]
    begin = bounds(others.keys[fresh], count)
    low = search(
        others.start[fresh], begin[these.keys], begin[these.keys + 1], these.start, right=strictly
    )
    high = search(others.start[fresh], low, begin[these.keys + 1], these.end, right=False)
    this, at = pairs(low, high)
    return this, fresh[at]


def _were_there(left: Versions, right: Versions, count: int) -> list[tuple[Ints, Ints]]:
    """Pairs that were there before the call, of which one goes in it."""
    goes, stays = (
        np.flatnonzero((left.start == ALWAYS) & ((left.end == FOREVER) == lasts))
        for lasts in (False, True)
    )
    there = np.flatnonzero(right.start == ALWAYS)
    return [
        _all_of_a_key(left, goes, right, there, count),
        _all_of_a_key(left, stays, right, there[right.end[there] != FOREVER], count),
    ]


def _all_of_a_key(
    left: Versions, lefts: Ints, right: Versions, rights: Ints, count: int
) -> tuple[Ints, Ints]:
    begin = bounds(right.keys[rights], count)
    which, at = pairs(begin[left.keys[lefts]], begin[left.keys[lefts] + 1])
    return lefts[which], rights[at]


def absences(versions: Versions, rows_before: Ints) -> Versions:
    """When each key has no rows, as versions of no row at all. `rows_before`: how many each key had
    before the call.
    """
    comes, goes = versions.start != ALWAYS, versions.end != FOREVER
    keys = np.concatenate([np.arange(len(rows_before)), versions.keys[comes], versions.keys[goes]])
    ticks = np.concatenate(
        [np.full(len(rows_before), ALWAYS), versions.start[comes], versions.end[goes]]
    )
    change = np.concatenate(
        [rows_before, np.ones(int(comes.sum()), np.int64), np.full(int(goes.sum()), -1)]
    )
    order = sorting(keys, ticks)
    keys, ticks, change = keys[order], ticks[order], change[order]
    at = np.flatnonzero(begins(keys, ticks))
    if not len(at):
        return Versions(*(np.zeros(0, np.int64) for _ in range(6)))
    keys, ticks, net = keys[at], ticks[at], np.add.reduceat(change, at)
    kept = (net != 0) | (ticks == ALWAYS)
    keys, ticks, net = keys[kept], ticks[kept], net[kept]
    first = begins(keys)
    total = np.cumsum(net)
    rows = (
        total
        - np.append(0, total)[np.maximum.accumulate(np.where(first, np.arange(len(first)), 0))]
    )
    end = np.append(ticks[1:], FOREVER)
    end[np.append(first[1:], True)] = FOREVER
    nothing = np.full(len(keys), -1)
    return Versions(keys, nothing, ticks, end, nothing, nothing).take(rows == 0)


_SYSTEM = [
    CHANGE_FIELD,
    TICK_FIELD,
]


@dataclass(frozen=True)
class Told:
    """Result rows that come or go, and when: their join key, which rows of either side they are
    made of, and where those are; -1 for none.
    """

    ticks: Ints
    keys: Ints
    lefts: Ints
    rights: Ints
    comes: Ints
    left_rows: Ints
    right_rows: Ints

    def take(self, which: Ints | Mask) -> Told:
        return Told(*(column[which] for column in vars(self).values()))

    @staticmethod
    def together(parts: Sequence[Told]) -> Told:
        return Told(
            *(
                np.concatenate(columns)
                for columns in zip(*(vars(part).values() for part in parts), strict=True)
            )
        )


class TableTableJoin:
    """Inputs: the changes of both tables. `key` is the result's."""

    hold_us = 0  # what changes is told in the same tick

    def __init__(
        self,
        step: str,
        left: Side,
        right: Side,
        columns: Sequence[ResultColumn],
        *,
        how: str = "inner",
    ) -> None:
        self.step_name, self.left, self.right, self.how = step, left, right, how
        self._columns = JoinColumns(step, left, right, columns, how)
        one, other = left.one_row_a_key, right.one_row_a_key
        self._by_left = not one or (self._columns.keeps_left and not other)
        self._by_right = not other or (self._columns.keeps_right and not one)
        self.key = self._key()

    def _key(self) -> tuple[str, ...]:
        """The result's columns that have the keys of the sides that tell its rows apart."""
        if not self._by_left and not self._by_right:
            return (
                self._named("left", self.left.on)
                if not self._columns.keeps_right
                else self._named("key", self.left.on)
            )
        left = self._named("left", self.left.key) if self._by_left else ()
        right = self._named("right", self.right.key) if self._by_right else ()
        return tuple(dict.fromkeys(left + right))

    def _named(self, side: str, columns: Sequence[str]) -> tuple[str, ...]:
        """What the result calls some columns of a side. A join column may be had as the key's, or
        in an inner join from the other side.
        """
        names = {(kind, column): name for kind, column, name in self._columns.columns}
        mine, other = (
            (self.right.on, self.left.on) if side == "right" else (self.left.on, self.right.on)
        )
        found = []
        for column in columns:
            at = mine.index(column) if column in mine else None
            name = names.get((side, column)) or (
                names.get(("key", self.left.on[at])) if at is not None else None
            )
            if name is None and at is not None and self.how == "inner":
                name = names.get(("left" if side == "right" else "right", other[at]))
            if name is None:
                raise InputError(
                    f"The result of step {self.step_name!r} lacks {column!r}, which is part of its"
                    " key.",
                    fix="keep it among the columns.",
                )
            found.append(name)
        return tuple(found)

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema.append(_SYSTEM[0])

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """Nothing waits for time."""
        return None

    # The step

    def step_timed(
        self,
        state: KeyedState,
        inputs: Sequence[pa.Table],
        watermarks: Sequence[Watermarks],  # noqa: ARG002
    ) -> pa.Table:
        """1. Load what changes, and all of its key on the other side. 2. Take in the changes. 3.
        Pair versions. 4. Tell what came and what went.
        """
        keyed = [
            join_keys(changes, side.on)
            for changes, side in zip(inputs, (self.left, self.right), strict=True)
        ]
        found = ranked([keys for keys, _ in keyed])
        piles = Piles(self.step_name, state, found.keys, sections=2, marks=2)
        sides = self._sides(inputs, [missing for _, missing in keyed], found.ranks, piles)
        left, right = versions = [side.versions() for side in sides]
        rows_before = np.where(piles.marks == NONE, 0, piles.marks)
        told = [self._pairs(left, right, len(piles))]
        if self._columns.keeps_left:
            told += [
                self._pairs(left, absences(right, rows_before[1]), len(piles)),
                _without_key(sides[0], keyed[0][1], found.ranks[0], left=True),
            ]
        if self._columns.keeps_right:
            told += [
                self._pairs(absences(left, rows_before[0]), right, len(piles)),
                _without_key(sides[1], keyed[1][1], found.ranks[1], left=False),
            ]
        self._store(piles, sides, versions, rows_before)
        return self._table(Told.together(told), *sides)

    def _sides(
        self, inputs: Sequence[pa.Table], missing: list[Mask], ranks: list[Ints], piles: Piles
    ) -> list[TableSide]:
        needs = self._columns.left_needs, self._columns.right_needs
        sides = [
            TableSide(self.step_name, each, needs[at], inputs[at], ranks[at], missing[at])
            for at, each in enumerate((self.left, self.right))
        ]
        for at, side in enumerate(sides):
            side.load(piles, at, marked(len(piles), sides[1 - at].keys))
        return sides

    def _store(
        self, piles: Piles, sides: list[TableSide], versions: list[Versions], rows_before: Ints
    ) -> None:
        writer = PileWriter(piles)
        for at, (side, each) in enumerate(zip(sides, versions, strict=True)):
            side.store(writer, at, each)
            more = np.bincount(each.keys[each.start != ALWAYS], minlength=len(piles)) - np.bincount(
                each.keys[each.end != FOREVER], minlength=len(piles)
            )
            rows = rows_before[at] + more
            piles.marks[at] = np.where(rows == 0, NONE, rows)
        writer.save()

    # What is told

    @staticmethod
    def _pairs(left: Versions, right: Versions, count: int) -> Told:
        """Pairs come when the later of the two comes, and go when the first of them goes."""
        lefts, rights = overlaps(left, right, count)
        start, end = (
            np.maximum(left.start[lefts], right.start[rights]),
            np.minimum(left.end[lefts], right.end[rights]),
        )
        pair = left.keys[lefts], left.of[lefts], right.of[rights]
        rows = left.row[lefts], right.row[rights]
        parts = []
        for ticks, some, comes in ((start, start != ALWAYS, 1), (end, end != FOREVER, 0)):
            columns = [ticks, *pair, np.full(len(ticks), comes), *rows]
            parts.append(Told(*(columns if some.all() else [column[some] for column in columns])))
        return Told.together(parts)

    def _table(self, told: Told, left: TableSide, right: TableSide) -> pa.Table:
        """In order of tick, join key and rows. What goes and comes again in a tick is an update, or
        nothing if it is as it was.
        """
        nothing = np.zeros(len(told.ticks), np.int64)
        identity = (
            told.ticks,
            told.keys,
            told.lefts if self._by_left else nothing,
            told.rights if self._by_right else nothing,
        )
        order = sorting(*identity, told.comes)
        told = told.take(order)
        again = ~begins(*(column[order] for column in identity))
        columns = self._columns.arrays(left.rows, told.left_rows, right.rows, told.right_rows)
        kinds, stays = merged(columns, again, told.comes == 1)
        result = pa.Table.from_arrays(
            [*columns, kinds, pa.array(told.ticks)], schema=self.output.append(_SYSTEM[1])
        )
        return result if stays.all() else result.filter(pa.array(stays))


def _without_key(side: TableSide, missing: Mask, keys: Ints, *, left: bool) -> Told:
    """Changes of rows that have no partner, whatever the other side has. They are not stored:
    changes bring the rows that go, too.
    """
    which = np.flatnonzero(missing)
    changes = side.fresh.take(pa.array(which))
    of, nothing = ranked([encode_keys(changes, side.side.key)]).ranks[0], np.full(len(which), -1)
    ticks, comes, rows = (
        ticks_of(changes),
        (~goes(changes)).astype(np.int64),
        len(side.stored) + which,
    )
    if left:
        return Told(ticks, keys[which], of, nothing, comes, rows, nothing)
    return Told(ticks, keys[which], nothing, of, comes, nothing, rows)
