"""Rows that came too late for any window: counted by the minute of their tick and by producer, and kept whole where they are to be diverted."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.durations import format_us
from headrace.operators.buffers import Ints, Mask, offsets_of
from headrace.operators.diverted import REASON
from headrace.operators.kernel import CHANGE_TYPE, TICK, UNSTARTED, Clocks, Times
from headrace.operators.keys import whole
from headrace.operators.windows.combining import PRODUCERS

MINUTE = "minute"
PRODUCER = "producer"
ROWS = "rows"
_MINUTE_US = 60_000_000


def bound(closed: Times, lateness_us: int) -> Times:
    """What ends at or before this is closed to late rows, by the closed clock and the allowed lateness."""
    return np.where(closed < UNSTARTED + lateness_us, UNSTARTED, closed - lateness_us)


def places_of(rows: pa.Table, clock: Clocks) -> Ints:
    """For each row the place of its tick in the clock's arrays; rows are in order of tick."""
    ticks = whole(rows.column(TICK)).to_numpy()
    return np.repeat(np.arange(len(clock)), np.diff(np.searchsorted(ticks, clock.ticks), append=len(ticks)))


def rows_behind(rows: pa.Table, chosen: Mask) -> int:
    """How many rows these are, or were before they were combined."""
    if PRODUCERS not in rows.schema.names or not chosen.any():
        return int(np.count_nonzero(chosen))
    counted = whole(rows.column(PRODUCERS)).filter(pa.array(chosen)).flatten()
    return int(counted.field(1).to_numpy().sum())


class LateRows:
    """Keeps the account until the host takes it, after each step. `producer` is the column that names a row's producer, if that is known."""

    def __init__(self, schema: pa.Schema, producer: str | None, *, divert: bool) -> None:
        self.producer, self.divert = producer, divert
        self.producer_type = schema.field(producer).type if producer in schema.names else pa.int64() if producer else pa.null()
        self.counts_schema = pa.schema([(MINUTE, pa.timestamp("us", "UTC")), (PRODUCER, self.producer_type), (ROWS, pa.int64())])
        system = [pa.field(TICK, pa.int64()), pa.field(CHANGE_TYPE, pa.string()), pa.field(REASON, pa.string())]
        self.rows_schema = pa.schema([*schema, *system])
        self._counts: list[pa.Table] = []
        self._rows: list[pa.Table] = []

    def add(self, rows: pa.Table, late: Mask, times_us: Times, behind_us: Times) -> int:
        """Rows that are late: when each one's tick was, and how far it is behind what could still be taken. Gives how many they are."""
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
        minutes = pa.array(times_us // _MINUTE_US * _MINUTE_US).cast(self.counts_schema.field(MINUTE).type)
        self._counts.append(pa.table([minutes, producers, pa.array(count)], schema=self.counts_schema))
        return int(count.sum())

    def producers(self, rows: pa.Table) -> pa.Array:
        """Who sent each row; null if that is not known."""
        if self.producer is None or self.producer not in rows.schema.names:
            return pa.nulls(rows.num_rows, self.producer_type)
        return whole(rows.column(self.producer)).cast(self.producer_type)

    def _whole(self, rows: pa.Table, behind_us: Times) -> pa.Table:
        amounts = pc.dictionary_encode(pa.array(behind_us))
        reasons = pa.array([f"too late by {format_us(amount)}" for amount in amounts.dictionary.to_pylist()], pa.string()).take(amounts.indices)
        known = {name: rows.column(name) for name in rows.schema.names}
        known[REASON] = reasons
        return pa.Table.from_arrays(
            [known.get(field.name, pa.nulls(len(reasons), field.type)) for field in self.rows_schema], schema=self.rows_schema
        )

    def take_counts(self) -> pa.Table:
        """How many since the last time: minute of the tick, producer, rows."""
        tables, self._counts = self._counts, []
        if not tables:
            return self.counts_schema.empty_table()
        grouped = pa.concat_tables(tables).group_by([MINUTE, PRODUCER], use_threads=False).aggregate([(ROWS, "sum")])
        return (
            grouped.rename_columns({f"{ROWS}_sum": ROWS}).select(self.counts_schema.names).cast(self.counts_schema).sort_by([(MINUTE, "ascending")])
        )

    def take_rows(self) -> pa.Table:
        """The diverted rows since the last time, whole, each with its `_tick`, `_change_type` if it had one, and `_reason`."""
        tables, self._rows = self._rows, []
        return pa.concat_tables(tables) if tables else self.rows_schema.empty_table()
