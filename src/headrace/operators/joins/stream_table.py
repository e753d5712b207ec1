"""A stream joined with a table: each row meets the table as it is at the end of the row's tick, so
changes of that tick come first.

The result is a stream. Later changes of the table change nothing of what was told. A row whose join
key has a null meets nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import TICK_FIELD
from headrace.columnar.keys import encode_keys, whole
from headrace.columnar.lookup import Ranked, begins, bounds, marked, pairs, ranked, search, sorting
from headrace.columnar.murmur2 import murmur2_array
from headrace.columnar.sort import codes_of
from headrace.errors import BugError, InputError
from headrace.operators.joins.row_store import LOWEST, NONE, Numbers, Piles, PileWriter, Records
from headrace.operators.joins.sides import (
    JoinColumns,
    ResultColumn,
    Rows,
    Side,
    goes,
    join_keys,
    ticks_of,
)
from headrace.operators.kernel import KeyedState, Watermarks

# A table as one side of a join: its rows by join key, and their versions in the ticks of a call.
#
# A version is a row from the tick in which it came to the tick in which it went: it is there at the
# end of each tick from `start` on, and before `end`. Within a tick it does not matter in which
# order a row goes and its next version comes, as long as one follows from the other.


ID = "_id"
ALWAYS, FOREVER = LOWEST, NONE
"""The start of a version that was there before the call, and the end of one that is there after
it.
"""


@dataclass(frozen=True)
class Versions:
    """Versions in order of key and row: for each its key, its row's number in the pile, its start
    and end, its place among the side's rows, and which row it is a version of.
    """

    keys: Ints
    at: Numbers
    start: Ints
    end: Ints
    row: Ints
    of: Ints

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, which: Ints | Mask) -> Versions:
        return Versions(
            self.keys[which],
            self.at[which],
            self.start[which],
            self.end[which],
            self.row[which],
            self.of[which],
        )


class TableSide:
    """The changes of one side in a call, and what is stored of its rows."""

    def __init__(
        self, step: str, side: Side, needs: pa.Schema, changes: pa.Table, keys: Ints, missing: Mask
    ) -> None:
        """`needs`: the columns that are kept. `keys`: the number of each change's join key.
        `missing`: which have a null in it: they are not kept.
        """
        self.step, self.side = step, side
        self.one = side.one_row_a_key
        self.kept = needs if self.one else pa.schema([pa.field(ID, pa.binary()), *needs])
        self.fresh = (
            changes
            if self.one
            else changes.append_column(ID, encode_keys(changes, side.key).cast(pa.binary()))
        )
        self.which = np.flatnonzero(~missing)
        self.changes = changes.take(pa.array(self.which)) if missing.any() else changes
        self.keys, self.ticks = keys[self.which], ticks_of(self.changes)
        self.at = (
            np.zeros(len(self.which), np.int64) if self.one else numbers(self.changes, side.key)
        )

    def load(self, piles: Piles, section: int, whole_keys: Mask) -> None:
        """All rows of some keys, and of the others those that change."""
        self.stored = piles.load_touched(section, self.keys, self.at, whole_keys)
        self.rows = Rows(self.kept, self.stored.rows, self.fresh)

    def versions(self) -> Versions:
        """All versions of the rows that were loaded, and of those that came."""
        was = self.stored
        if not self.changes.num_rows:
            return Versions(
                was.keys,
                was.at,
                np.full(len(was), ALWAYS),
                np.full(len(was), FOREVER),
                np.arange(len(was)),
                np.arange(len(was)),
            )
        keys, at = np.concatenate([was.keys, self.keys]), np.concatenate([was.at, self.at])
        ticks = np.concatenate([np.full(len(was), ALWAYS), self.ticks])
        signs = np.concatenate([np.ones(len(was), np.int64), np.where(goes(self.changes), -1, 1)])
        rows = np.concatenate([np.arange(len(was)), len(was) + self.which])
        return versions_of(
            self.step,
            keys,
            at,
            self._ids() if not self.one else np.zeros(len(keys), np.int64),
            ticks,
            signs,
            rows,
        )

    def _ids(self) -> Ints:
        """A number for each row's primary key, stored ones first."""
        known = row_codec.decode_array(self.stored.rows, pa.struct([self.kept.field(0)])).field(0)
        return np.concatenate(
            ranked([known, whole(self.fresh.column(ID)).take(pa.array(self.which))]).ranks
        )

    def store(self, writer: PileWriter, section: int, versions: Versions) -> None:
        """Keep the versions that last."""
        if not self.changes.num_rows:
            return
        last = versions.take(versions.end == FOREVER)
        records = Records(
            last.keys, last.at, np.zeros(len(last), np.uint8), self.rows.bytes(last.row)
        )
        writer.replace(section, records, self.keys, self.at)


def versions_of(
    step: str, keys: Ints, at: Numbers, ids: Ints, ticks: Ints, signs: Ints, rows: Ints
) -> Versions:
    """Versions from what comes (sign 1) and goes (-1), what was there first; `ids` tell rows of one
    key and number apart.
    """
    order = sorting(keys, at, ids)  # ticks come in order, and stay so
    keys, at, ids, ticks, signs = keys[order], at[order], ids[order], ticks[order], signs[order]
    new_row = begins(keys, at, ids)
    starts = np.flatnonzero(new_row | begins(ticks))
    there = _there(step, signs, starts, new_row[starts])
    last = np.maximum.reduceat(np.where(signs > 0, np.arange(len(signs)), -1), starts)
    end = np.append(ticks[starts[1:]], FOREVER)
    end[np.append(new_row[starts[1:]], True)] = FOREVER
    return Versions(
        keys[starts],
        at[starts],
        ticks[starts],
        end,
        rows[order[last]],
        np.cumsum(new_row, dtype=np.int64)[starts],
    ).take(there)


def _there(step: str, signs: Ints, starts: Ints, first: Mask) -> Mask:
    """Whether the row is there at the end of each tick in which it changes: as often as it came and
    did not go.
    """
    total = np.cumsum(np.add.reduceat(signs, starts))
    count = (
        total
        - np.append(0, total)[np.maximum.accumulate(np.where(first, np.arange(len(first)), 0))]
    )
    if count.min() < 0 or count.max() > 1:
        raise BugError(
            f"Step {step!r} was told that a row comes which is there, or that one goes which is"
            " not.",
            fix=(
                "if tables are united with disjoint=True, and a key can be in two of them, leave"
                " that out; else please report it."
            ),
        )
    there: Mask = count == 1
    return there


def numbers(rows: pa.Table, key: tuple[str, ...]) -> Ints:
    """A number for each primary key, by which its rows are ordered in a pile: a small key's own
    value, else a hash. The same in every batch.
    """
    if len(key) == 1 and (row_codec.width_of(rows.schema.field(key[0]).type) or 9) <= 8:
        column = whole(rows.column(key[0]))
        values = np.full(rows.num_rows, LOWEST + 1)
        there = column.is_valid().to_numpy(zero_copy_only=False)
        codes = codes_of(encode_keys(rows.select(list(key)).filter(pa.array(there)), key))
        values[there] = (codes ^ np.uint64(1 << 63)).view(np.int64)
        return values
    return murmur2_array(encode_keys(rows, key)).astype(np.int64)


_NO_ROWS = pa.nulls(0, pa.large_binary())


class StreamTableJoin:
    """`how`: "inner", or "left", where a row that meets nothing is told too. Inputs: the stream's
    rows, the table's changes.
    """

    hold_us = 0  # rows go on in their own tick: nothing of the stream's clocks is held back

    def __init__(
        self,
        step: str,
        stream: Side,
        table: Side,
        columns: Sequence[ResultColumn],
        *,
        how: str = "inner",
    ) -> None:
        if how not in {"inner", "left"}:
            raise InputError(
                f"Step {step!r} joins a stream with a table how={how!r}.",
                fix='choose how="inner" or how="left"; join tables for what has no row yet.',
            )
        self.step_name, self.stream, self.table, self.how = step, stream, table, how
        self._columns = JoinColumns(step, stream, table, columns, how)

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """Nothing waits for time."""
        return None

    def step_timed(
        self,
        state: KeyedState,
        inputs: Sequence[pa.Table],
        watermarks: Sequence[Watermarks],  # noqa: ARG002
    ) -> pa.Table:
        """1. Find the keys. 2. Load what the table has of them. 3. Take in its changes. 4. Let rows
        and versions of the same ticks meet.
        """
        rows, changes = inputs
        keys, _ = join_keys(rows, self.stream.on)
        changed_keys, missing = join_keys(changes, self.table.on)
        found = ranked([keys, changed_keys])
        side = TableSide(
            self.step_name, self.table, self._columns.right_needs, changes, found.ranks[1], missing
        )
        piles = Piles(self.step_name, state, found.keys, sections=1, marks=0)
        side.load(piles, 0, marked(len(piles), found.ranks[0]))
        versions = side.versions()
        writer = PileWriter(piles)
        side.store(writer, 0, versions)
        writer.save()
        return self._joined(rows, found, versions, side.rows)

    def _joined(
        self, rows: pa.Table, found: Ranked, versions: Versions, table_rows: Rows
    ) -> pa.Table:
        order = found.orders[0]
        ticks = ticks_of(rows)[order]
        begin = bounds(found.ranks[0][order], len(found.keys))
        first, end = begin[versions.keys], begin[versions.keys + 1]
        low = search(ticks, first, end, versions.start, right=False)
        high = search(ticks, first, end, versions.end, right=False)
        version, row = pairs(low, high)
        if self.how == "left":
            alone = np.ones(len(order), np.bool_)
            alone[row] = False
            alone_rows = np.flatnonzero(alone)
            row, version = (
                np.concatenate([row, alone_rows]),
                np.concatenate([version, np.full(len(alone_rows), -1)]),
            )
        in_order = sorting(ticks[row], row, version)
        row, version = row[in_order], version[in_order]
        stream_rows = Rows(self._columns.left_needs, _NO_ROWS, rows)
        columns = self._columns.arrays(
            stream_rows, order[row], table_rows, np.append(versions.row, -1)[version]
        )
        return pa.Table.from_arrays(
            [*columns, pa.array(ticks[row])],
            schema=self.output.append(TICK_FIELD),
        )
