"""The first rows of each group of a table, in an order: a table that is kept up to date, with as
much work as there are changes.

All rows of a group are kept in their order. Rows of equal rank are ordered by their keys, so that
there is always one answer. A row that moves to another group may go from the one and come to the
other in the same tick, in the work of different shards: `SettleKernel` makes one change of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask, runs
from headrace.columnar.columns import CHANGE_FIELD, TICK_FIELD
from headrace.columnar.keys import encode_keys, ordered_bytes, whole
from headrace.columnar.lookup import begins, bounds, ranked, sorting
from headrace.columnar.row_codec import cut_out
from headrace.errors import InputError, UnknownColumn
from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.operators.joins.row_store import (
    MAX_IN_A_LEAF,
    WIDE,
    Numbers,
    Piles,
    PileWriter,
    Records,
    joined,
    pieces,
)
from headrace.operators.joins.sides import Rows, goes, merged, ticks_of
from headrace.operators.joins.stream_table import ALWAYS, FOREVER, Versions, versions_of
from headrace.operators.kernel import KeyedState

# An order of rows as bytes: by some columns, each up or down, and by the row's key where those are
# equal. Nulls come last either way.
#
# | what | bytes | |---|---| | a value | 0, then its bytes as keys have them (`keys`); STRING and
# BINARY with 0, 255 for each 0 in them, and 0, 0 behind them | | downwards | 0, then the same with
# every bit flipped | | null | 1 | | the row's key | as keys have it |


Order = tuple[str, bool]
"""A column, and whether its largest values come first."""


def order_bytes(rows: pa.Table, by: Sequence[Order], key: Sequence[str]) -> pa.Array:
    """The bytes of each row, in the rows' order; different for rows with different keys."""
    columns = [part for column, down in by for part in _column(whole(rows.column(column)), down)]
    return joined([*columns, encode_keys(rows, key).cast(pa.binary()).cast(pa.large_binary())])


def beginnings(ordered: pa.Array) -> Numbers:
    """The first bytes of each, which have the same order as far as they go; for a pile."""
    padded = joined([ordered, pa.scalar(bytes(WIDE), pa.large_binary())])
    if not len(padded):
        return np.zeros(0, f"S{WIDE}")
    offsets = np.frombuffer(
        padded.buffers()[1], np.int64, count=len(padded) + 1, offset=padded.offset * 8
    )
    first = np.lib.stride_tricks.sliding_window_view(
        np.frombuffer(padded.buffers()[2], np.uint8), WIDE
    )[offsets[:-1]]
    return np.ascontiguousarray(first).view(f"S{WIDE}").reshape(-1)


def _column(array: pa.Array, down: bool) -> list[pa.Array]:
    """A column's marks and bytes, side by side for all rows."""
    there = array.is_valid().to_numpy(zero_copy_only=False)
    marks = pieces((~there).astype(np.uint8), np.arange(len(array) + 1))
    encoded = _encoded(array.drop_null())
    if down:
        encoded = _flipped(encoded)
    if not there.all():
        spread = pa.array(np.cumsum(there) - 1, mask=~there)
        encoded = encoded.take(spread).fill_null(b"")
    return [marks, encoded]


def _encoded(array: pa.Array) -> pa.Array:
    """Bytes in the order of the values, none of which is the beginning of another."""
    encoded = ordered_bytes(array)
    if not isinstance(encoded, pa.Array):
        return pieces(
            np.ascontiguousarray(encoded).reshape(-1),
            np.arange(len(encoded) + 1) * encoded.shape[1],
        )
    escaped = pc.replace_substring(encoded, pattern=b"\x00", replacement=b"\x00\xff")
    return joined([escaped.cast(pa.large_binary()), pa.scalar(b"\x00\x00", pa.large_binary())])


def _flipped(encoded: pa.Array) -> pa.Array:
    if not len(encoded):
        return encoded
    offsets = np.frombuffer(
        encoded.buffers()[1], np.int64, count=len(encoded) + 1, offset=encoded.offset * 8
    )
    data = np.frombuffer(encoded.buffers()[2], np.uint8)
    return cut_out(~data, offsets[:-1], np.diff(offsets))


MOST = 10_000
_ORDER = "_order"


class TopKernel:
    """The first `n` rows by `by` of each group of `per`; with no `per`, of the whole table. The
    result has the table's columns and key.
    """

    def __init__(
        self,
        step: str,
        schema: pa.Schema,
        key: Sequence[str],
        *,
        n: int,
        by: Sequence[Order],
        per: Sequence[str] = (),
    ) -> None:
        for name in (*key, *per, *(column for column, _ in by)):
            if name not in schema.names:
                raise UnknownColumn(name, schema.names, where=f"The input of step {step!r}")
        if not 1 <= n <= MOST or not by:
            raise InputError(
                f"Step {step!r} asks for the first {n} rows by {len(by)} columns.",
                fix=f"ask for 1 to {MOST:,} rows by at least one column.",
            )
        self.step_name, self.schema, self.key, self.n, self.by, self.per = (
            step,
            schema,
            tuple(key),
            n,
            tuple(by),
            tuple(per),
        )
        self._kept = pa.schema([pa.field(_ORDER, pa.large_binary()), *schema])

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(CHANGE_FIELD)

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """1. Load the first rows of each group, and what changes. 2. Take in the changes. 3. Tick
        by tick, see who is among the first. 4. Store.
        """
        if not rows.num_rows:
            return self.output.append(TICK_FIELD).empty_table()
        found = ranked([encode_keys(rows, self.per)])
        groups, going = found.ranks[0], goes(rows)
        piles = Piles(self.step_name, state, found.keys, sections=1, marks=0, wide=True)
        ordered = order_bytes(rows, self.by, self.key)
        at = beginnings(ordered)
        needed = self.n + np.bincount(groups[going], minlength=len(piles))
        stored = _load(piles, np.unique(piles.sections[0].leaves_of(groups, at)), needed)
        source = Rows(self._kept, stored.rows, rows.append_column(_ORDER, ordered))
        versions = self._versions(stored, groups, ordered, ticks_of(rows), going)
        self._store(piles, versions, source, groups, at)
        return self._told(versions, source, ticks_of(rows), groups)

    def _versions(
        self, stored: Records, groups: Ints, ordered: pa.Array, ticks: Ints, going: Mask
    ) -> Versions:
        known = row_codec.decode_array(stored.rows, pa.struct([self._kept.field(0)])).field(0)
        places = np.concatenate(ranked([known, ordered]).ranks)
        all_groups = np.concatenate([stored.keys, groups])
        all_ticks = np.concatenate([np.full(len(stored), ALWAYS), ticks])
        signs = np.concatenate([np.ones(len(stored), np.int64), np.where(going, -1, 1)])
        return versions_of(
            self.step_name,
            all_groups,
            places,
            np.zeros(len(places), np.int64),
            all_ticks,
            signs,
            np.arange(len(places)),
        )

    @staticmethod
    def _store(piles: Piles, versions: Versions, source: Rows, groups: Ints, at: Numbers) -> None:
        last = versions.take(versions.end == FOREVER)
        rows = source.bytes(last.row)
        ordered = row_codec.decode_array(rows, pa.struct([source.kept.field(0)])).field(0)
        writer = PileWriter(piles)
        writer.replace(
            0,
            Records(last.keys, beginnings(ordered), np.zeros(len(last), np.uint8), rows),
            groups,
            at,
        )
        writer.save()

    def _told(self, versions: Versions, source: Rows, ticks: Ints, groups: Ints) -> pa.Table:
        """In order of tick, group and key. Who leaves the first and comes back otherwise is an
        update.
        """
        begin = bounds(versions.keys, int(groups.max()) + 1)
        parts = [
            self._changes(versions, begin, int(tick), np.unique(groups[ticks == tick]))
            for tick in np.unique(ticks)
        ]
        when, which, comes = (np.concatenate(each) for each in zip(*parts, strict=True))
        columns = source.columns(self.schema, versions.row[which])
        keys = ranked([encode_keys(pa.table(columns, schema=self.schema), self.key)]).ranks[0]
        order = sorting(when, versions.keys[which], keys, comes)
        taken = [columns[name].take(pa.array(order)) for name in self.schema.names]
        again = ~begins(when[order], versions.keys[which][order], keys[order])
        kinds, stays = merged(taken, again, comes[order] == 1)
        result = pa.Table.from_arrays(
            [*taken, kinds, pa.array(when[order], pa.int64())],
            schema=self.output.append(TICK_FIELD),
        )
        return result if stays.all() else result.filter(pa.array(stays))

    def _changes(
        self, versions: Versions, begin: Ints, tick: int, groups: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """Who leaves the first rows of some groups in a tick, and who comes to them: tick, version,
        1 for those that come.
        """
        which = runs(begin[groups], begin[groups + 1] - begin[groups])
        of, start, end = versions.keys[which], versions.start[which], versions.end[which]
        before, after = (
            self._first(of, (start < tick) & (end >= tick)),
            self._first(of, (start <= tick) & (end > tick)),
        )
        gone, came = which[before & ~after], which[after & ~before]
        comes = np.concatenate([np.zeros(len(gone), np.int64), np.ones(len(came), np.int64)])
        return np.full(len(comes), tick), np.concatenate([gone, came]), comes

    def _first(self, groups: Ints, there: Mask) -> Mask:
        """Of those that are there, the first of each group, which lie in their order."""
        before: Ints = np.cumsum(there) - there
        begin = np.maximum.accumulate(np.where(begins(groups), np.arange(len(groups)), 0))
        first: Mask = there & (before - before[begin] < self.n)
        return first


def _load(piles: Piles, touched: Ints, needed: Ints) -> Records:
    """The leaves that change, and of each group the first ones, until they have as many rows as are
    needed.
    """
    part = piles.sections[0]
    found = [piles.load_whole(0)]
    leaves, rows, depth = (
        np.diff(part.firsts),
        np.zeros(len(part.lows), np.int64),
        np.zeros(len(piles), np.int64),
    )
    wanted = touched
    while True:
        missing = wanted[~part.loaded[wanted]]
        found.append(piles.load_leaves(0, missing))
        rows += np.bincount(part.leaves_of(found[-1].keys, found[-1].at), minlength=len(rows))
        total, first = np.append(0, np.cumsum(rows)), part.firsts[:-1]
        lacks = needed - (total[first + depth] - total[first])
        short = np.flatnonzero(part.tree & (lacks > 0) & (depth < leaves))
        if not len(short):
            return Records.together(found)
        more = np.minimum(-(-lacks // MAX_IN_A_LEAF), leaves - depth)[short]
        wanted = runs(first[short] + depth[short], more)
        depth[short] += more


# The different rows of a table, or the different values of some of its columns: each once, however
# many rows have them. A table keyed by these columns.


def distinct(
    step: str, schema: pa.Schema, row_key: tuple[str, ...] = (), columns: Sequence[str] = ()
) -> AggregateKernel:
    """A kernel over a table's changes, by some columns, or by all: what is told is there as long as
    a row has it. Shards must be chosen by them, too.
    """
    return AggregateKernel(
        step, schema, columns or schema.names, [], over_table=True, row_key=row_key
    )
