"""Late rows: the one place where they are counted, and collected if they are diverted.

A row is late for a step if it lies behind the step's horizon: the horizon of the input less the
lateness that the step allows. Window and pattern kernels decide which rows are late and `add` them
to their `LateRowCounter`; after each call the host takes the counts, by minute and producer, for
status and metrics, and the rows themselves for the topic of `hr.late.divert`. The policies are in
`late_policy`.

    horizon 12:00, correct("5 minutes"): step horizon 11:55
    rows in: 11:58 (takes part)    11:50 from producer p, in the tick of 12:03 (late)
    counts:  minute 12:03, producer p, rows 1
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, offsets_of
from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.columnar.keys import as_array
from headrace.durations import format_us
from headrace.operators.aggregates.partial_aggregation import PRODUCERS
from headrace.operators.kernel import REASON, UNSTARTED, Times, Watermarks

MINUTE = "minute"
PRODUCER = "producer"
ROWS = "rows"
_MINUTE_US = 60_000_000


def step_horizon(horizon: Times, lateness_us: int) -> Times:
    """The horizon of a step: that of its input less the allowed lateness. A window that ends at or
    before it takes no more rows.
    """
    return np.where(horizon < UNSTARTED + lateness_us, UNSTARTED, horizon - lateness_us)


def row_tick_indices(rows: pa.Table, watermarks: Watermarks) -> Ints:
    """The index of each row's tick in the watermarks' arrays; rows are in order of tick."""
    ticks = as_array(rows.column(TICK)).to_numpy()
    return np.repeat(
        np.arange(len(watermarks)),
        np.diff(np.searchsorted(ticks, watermarks.ticks), append=len(ticks)),
    )


def count_input_rows(rows: pa.Table, chosen: Mask) -> int:
    """How many input rows the chosen rows stand for; a combined row stands for several."""
    if PRODUCERS not in rows.schema.names or not chosen.any():
        return int(np.count_nonzero(chosen))
    counted = as_array(rows.column(PRODUCERS)).filter(pa.array(chosen)).flatten()
    return int(counted.field(1).to_numpy().sum())


class LateRowCounter:
    """Counts the late rows of one step until the host takes the counts, after each call.

    Args:
        schema: The columns of the step's input.
        producer: The column with a row's producer, if there is one.
        divert: Whether the rows themselves are collected as well.

    """

    def __init__(self, schema: pa.Schema, producer: str | None, *, divert: bool) -> None:
        self.producer = producer
        self.divert = divert
        if producer is None:
            self.producer_type = pa.null()
        elif producer in schema.names:
            self.producer_type = schema.field(producer).type
        else:  # the partition
            self.producer_type = pa.int64()
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
        """Count the rows that are late, and collect them if they are diverted.

        Args:
            rows: The rows of a call.
            late: Which of them are late.
            times_us: The time of each row's tick.
            behind_us: How far each row is behind the step's horizon.

        Returns:
            How many input rows are late.

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
            lists = as_array(rows.column(PRODUCERS))
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
        """The producer of each row; null if it is not known."""
        if self.producer is None or self.producer not in rows.schema.names:
            return pa.nulls(rows.num_rows, self.producer_type)
        return as_array(rows.column(self.producer)).cast(self.producer_type)

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
        """The counts since the last call: minute of the tick, producer, rows."""
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
        """The diverted rows since the last call, with their `_tick`, `_change_type` if any, and
        `_reason`.
        """
        tables, self._rows = self._rows, []
        return pa.concat_tables(tables) if tables else self.rows_schema.empty_table()


@runtime_checkable
class LateRowKernel(Protocol):
    """A kernel that counts late rows; the host takes them after each call."""

    late_rows: LateRowCounter
