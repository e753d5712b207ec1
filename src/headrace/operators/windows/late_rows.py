"""Rows that came too late for any window: counted by the minute of their tick and by producer, and
kept whole where they are to be diverted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, offsets_of
from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.columnar.keys import encode_keys, whole
from headrace.columnar.segments import Segments
from headrace.columnar.sort import Codes, codes_of, joint, stable_sort
from headrace.durations import format_us
from headrace.operators.aggregates.aggregation import ORDER, PARTIAL, Aggregation, by_tick
from headrace.operators.kernel import REASON, UNSTARTED, Times, Watermarks

# Rows combined before the shuffle: one row stands for those of one group, pane and tick. A pane is
# what lies between two bounds of windows, so its rows are in the same windows, and are late
# together.
#
# A combined row has the group's columns, a time in its pane, the columns that tell a row's place,
# `_partial` (a state, as it is stored), and `_producers`: how many rows of each producer it stands
# for, so that late rows are counted exactly all the same.


PRODUCERS = "_producers"
_NO_KEYS = pa.nulls(0, pa.binary())


def combine(
    aggregation: Aggregation, rows: pa.Table, times: Sequence[str], panes: Ints, producers: pa.Array
) -> pa.Table:
    """Rows with a pane and a producer each, as fewer rows, each with the columns `times` of one of
    its rows. It does not matter which rows come together.
    """
    ticks = whole(rows.column(TICK)).to_numpy()
    coarse = joint(joint(codes_of(encode_keys(rows, aggregation.by)), panes), ticks)
    order, _ = stable_sort(joint(coarse, _numbers(producers)))
    starts = np.flatnonzero(_begins(coarse[order]))
    segments = Segments(rows, order, starts, ticks[order[starts]], np.arange(len(starts)), _NO_KEYS)
    columns = dict.fromkeys(
        [*aggregation.by, *times, *(name for name in rows.schema.names if name in ORDER)]
    )
    first = rows.select(list(columns)).take(pa.array(order[starts]))
    first = first.append_column(PRODUCERS, _counted(producers.take(pa.array(order)), starts))
    return by_tick(
        first.append_column(pa.field(PARTIAL, pa.binary()), aggregation.partials(segments))
    )


def _numbers(producers: pa.Array) -> Ints:
    """A number for each producer, whichever."""
    if pa.types.is_null(producers.type):
        return np.zeros(len(producers), np.int64)
    numbers: Ints = (
        producers.dictionary_encode(null_encoding="encode").indices.to_numpy().astype(np.int64)
    )
    return numbers


def _counted(producers: pa.Array, starts: Ints) -> pa.Array:
    """For each segment its producers, each with its number of rows. Those of a segment lie
    together.
    """
    new = _begins(_numbers(producers).astype(np.uint64))
    new[starts] = True
    runs = np.flatnonzero(new)
    rows = pa.array(np.diff(runs, append=len(producers)))
    counted = pa.StructArray.from_arrays(
        [producers.take(pa.array(runs)), rows], ["producer", "rows"]
    )
    return pa.ListArray.from_arrays(
        pa.array(np.append(np.searchsorted(runs, starts), len(runs)).astype(np.int32)), counted
    )


def _begins(codes: Codes) -> Mask:
    begins = np.ones(len(codes), np.bool_)
    begins[1:] = codes[1:] != codes[:-1]
    return begins


MINUTE = "minute"
PRODUCER = "producer"
ROWS = "rows"
_MINUTE_US = 60_000_000


def bound(closed: Times, lateness_us: int) -> Times:
    """What ends at or before this is closed to late rows, by the closed clock and the allowed
    lateness.
    """
    return np.where(closed < UNSTARTED + lateness_us, UNSTARTED, closed - lateness_us)


def places_of(rows: pa.Table, clock: Watermarks) -> Ints:
    """For each row the place of its tick in the clock's arrays; rows are in order of tick."""
    ticks = whole(rows.column(TICK)).to_numpy()
    return np.repeat(
        np.arange(len(clock)), np.diff(np.searchsorted(ticks, clock.ticks), append=len(ticks))
    )


def rows_behind(rows: pa.Table, chosen: Mask) -> int:
    """How many rows these are, or were before they were combined."""
    if PRODUCERS not in rows.schema.names or not chosen.any():
        return int(np.count_nonzero(chosen))
    counted = whole(rows.column(PRODUCERS)).filter(pa.array(chosen)).flatten()
    return int(counted.field(1).to_numpy().sum())


class LateRows:
    """Keeps the account until the host takes it, after each step. `producer` is the column that
    names a row's producer, if that is known.
    """

    def __init__(self, schema: pa.Schema, producer: str | None, *, divert: bool) -> None:
        self.producer, self.divert = producer, divert
        self.producer_type = (
            schema.field(producer).type
            if producer in schema.names
            else pa.int64()
            if producer
            else pa.null()
        )
        self.counts_schema = pa.schema(
            [
                (MINUTE, pa.timestamp("us", "UTC")),
                (PRODUCER, self.producer_type),
                (ROWS, pa.int64()),
            ]
        )
        system = [
            pa.field(TICK, pa.int64()),
            pa.field(CHANGE_TYPE, pa.string()),
            pa.field(REASON, pa.string()),
        ]
        self.rows_schema = pa.schema([*schema, *system])
        self._counts: list[pa.Table] = []
        self._rows: list[pa.Table] = []

    def add(self, rows: pa.Table, late: Mask, times_us: Times, behind_us: Times) -> int:
        """Rows that are late: when each one's tick was, and how far it is behind what could still
        be taken. Gives how many they are.
        """
        if not late.any():
            return 0
        which = np.flatnonzero(late)
        chosen = rows.take(pa.array(which))
        count = self._count(chosen, times_us[which])
        if self.divert:
            self._rows.append(self._whole(chosen, behind_us[which]))
        return count

    def _count(self, rows: pa.Table, times_us: Times) -> int:
        producers, count = self.producers(rows), np.ones(len(times_us), np.int64)
        if PRODUCERS in rows.schema.names:
            lists = whole(rows.column(PRODUCERS))
            producers, count = lists.flatten().field(0), lists.flatten().field(1).to_numpy()
            times_us = np.repeat(times_us, np.diff(offsets_of(lists)))
        minutes = pa.array(times_us // _MINUTE_US * _MINUTE_US).cast(
            self.counts_schema.field(MINUTE).type
        )
        self._counts.append(
            pa.table([minutes, producers, pa.array(count)], schema=self.counts_schema)
        )
        return int(count.sum())

    def producers(self, rows: pa.Table) -> pa.Array:
        """Who sent each row; null if that is not known."""
        if self.producer is None or self.producer not in rows.schema.names:
            return pa.nulls(rows.num_rows, self.producer_type)
        return whole(rows.column(self.producer)).cast(self.producer_type)

    def _whole(self, rows: pa.Table, behind_us: Times) -> pa.Table:
        amounts = pc.dictionary_encode(pa.array(behind_us))
        reasons = pa.array(
            [f"too late by {format_us(amount)}" for amount in amounts.dictionary.to_pylist()],
            pa.string(),
        ).take(amounts.indices)
        known = {name: rows.column(name) for name in rows.schema.names}
        known[REASON] = reasons
        return pa.Table.from_arrays(
            [
                known.get(field.name, pa.nulls(len(reasons), field.type))
                for field in self.rows_schema
            ],
            schema=self.rows_schema,
        )

    def take_counts(self) -> pa.Table:
        """How many since the last time: minute of the tick, producer, rows."""
        tables, self._counts = self._counts, []
        if not tables:
            return self.counts_schema.empty_table()
        grouped = (
            pa.concat_tables(tables)
            .group_by([MINUTE, PRODUCER], use_threads=False)
            .aggregate([(ROWS, "sum")])
        )
        return (
            grouped.rename_columns({f"{ROWS}_sum": ROWS})
            .select(self.counts_schema.names)
            .cast(self.counts_schema)
            .sort_by([(MINUTE, "ascending")])
        )

    def take_rows(self) -> pa.Table:
        """The diverted rows since the last time, whole, each with its `_tick`, `_change_type` if it
        had one, and `_reason`.
        """
        tables, self._rows = self._rows, []
        return pa.concat_tables(tables) if tables else self.rows_schema.empty_table()
