"""Event times of the rows that one task reads, or that a shard finds them for: rows without a usable time are put aside, of the others the newest of each producer is told.

A time that is null, or absurdly far in the future, must not move the clock: everything else would then be late.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.durations import format_us
from headrace.engine.clock_files import write_part
from headrace.engine.clocks import NO_PRODUCER, PARTS, ClockSpec, newest
from headrace.engine.diverting import Diverter
from headrace.engine.tasks import ORDER_FIELDS, TICK, TopicRange
from headrace.log.api import CHANGE_TYPE, DELETE, PARTITION_COLUMN

NO_TIME = "its event time is null"
NEVER = "its event time is before the year 1"
_YEAR_1_US = -62_135_596_800_000_000


class Ticks(Protocol):
    """Numbers and times of some ticks."""

    @property
    def ticks(self) -> tuple[int, ...]: ...

    @property
    def times_us(self) -> tuple[int, ...]: ...


class EventTimes:
    """For one task: `taken` gives a batch's usable rows, `finish` leaves what was found. `ticks` have numbers and times."""

    def __init__(self, spec: ClockSpec, ticks: Ticks, number: int, directory: Path) -> None:
        self.spec, self.ticks, self.number, self.directory = spec, ticks, number, directory
        self._diverter = Diverter(directory, spec.name)
        self._found: list[pa.Table] = []
        self._ahead = f"its event time is more than {format_us(spec.most_ahead_us)} ahead"

    def taken(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if self.spec.column is None or not rows.num_rows:
            return rows
        usable, times = self._usable(rows)
        if usable.num_rows:
            self._found.append(self._newest(usable, times))
        return usable

    def _usable(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array]:
        """Without rows that have no time, or one that cannot be. The tombstone of a table has none, and needs none."""
        times = rows.column(self.spec.column).cast(pa.timestamp("us", "UTC") if _zoned(rows, self.spec) else pa.timestamp("us")).cast(pa.int64())
        if times.null_count:
            gone = pc.equal(rows.column(CHANGE_TYPE), DELETE) if CHANGE_TYPE in rows.schema.names else pa.repeat(pa.scalar(False), rows.num_rows)
            rows, times = self._without(rows, times, pc.and_(pc.is_null(times), pc.invert(gone)), NO_TIME)
        rows, times = self._without(rows, times, pc.less(times, _YEAR_1_US), NEVER)
        return self._without(rows, times, pc.greater(times, self._limits(rows)), self._ahead)

    def _without(self, rows: pa.RecordBatch, times: pa.Array, which: pa.Array, reason: str) -> tuple[pa.RecordBatch, pa.Array]:
        bad = which.fill_null(False)
        if pc.any(bad).as_py():
            self._diverter.divert(rows.filter(bad), reason)
            rows, times = rows.filter(pc.invert(bad)), times.filter(pc.invert(bad))
        return rows, times

    def _limits(self, rows: pa.RecordBatch) -> pa.Array:
        return pa.array(_tick_times(rows, self.ticks) + self.spec.most_ahead_us)

    def _newest(self, rows: pa.RecordBatch, times: pa.Array) -> pa.Table:
        table = pa.table([rows.column(TICK), self._producers(rows), times], schema=PARTS)
        return newest(table)

    def _producers(self, rows: pa.RecordBatch) -> pa.Array:
        """As text: without a producer column, each partition is one."""
        if self.spec.producer is None:
            return rows.column(PARTITION_COLUMN).cast(pa.string())
        column = rows.column(self.spec.producer)
        text = _hex(column) if pa.types.is_binary(column.type) else column.cast(pa.string())
        return text.fill_null(NO_PRODUCER)

    def finish(self) -> None:
        self._diverter.finish(f"times-{self.number}")
        if self._found:
            write_part(self.directory, self.spec.name, self.number, newest(pa.concat_tables(self._found)))


def _tick_times(rows: pa.RecordBatch, piece: Ticks) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    times: np.ndarray[tuple[int], np.dtype[np.int64]] = np.array(piece.times_us, np.int64)[np.searchsorted(piece.ticks, rows.column(TICK).to_numpy())]
    return times


def with_tick_times(rows: pa.RecordBatch, piece: TopicRange, name: str) -> pa.RecordBatch:
    """Rows with the time of their tick in a column behind the user's own."""
    at = len(piece.stored_columns)
    return rows.add_column(at, pa.field(name, pa.timestamp("us", "UTC")), pa.array(_tick_times(rows, piece)).cast(pa.timestamp("us", "UTC")))


def _zoned(rows: pa.RecordBatch, spec: ClockSpec) -> bool:
    return rows.schema.field(spec.column).type.tz is not None


def _hex(column: pa.Array) -> pa.Array:
    """Bytes as text: producers are few, so each is spelled once."""
    encoded = column.dictionary_encode()
    return pa.array([value.hex() for value in encoded.dictionary.to_pylist()], pa.string()).take(encoded.indices)


def corrected(spec: ClockSpec, rows: pa.Table, given: pa.Table, ticks: Ticks, shard: int, directory: Path) -> pa.Table:
    """Rows whose times a shard has found, `given` as they came to it: usable ones, in the places that they have in their topic; the rest is done as where rows are read."""
    names = [field.name for field in ORDER_FIELDS]
    placed = pa.table({**{name: rows[name] for name in rows.column_names if name not in names}, **{name: given[name] for name in names}})
    times = EventTimes(spec, ticks, shard, directory)
    usable = [times.taken(batch) for batch in placed.to_batches()]
    times.finish()
    return pa.Table.from_batches(usable, placed.schema)
