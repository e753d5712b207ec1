"""Event times of rows in one task: which are usable, how far they may move the watermark, and the
report of the newest ones.

`EventTimes` checks the rows where they are read, or where a shard computes their times (device
time). A row whose time is null or is no time of ours becomes a dead letter. A row that claims to
have happened later than it was appended is data like any other, but a wrong clock must not make
every other row late: it moves the watermark to its append time plus `max_ahead` at most.

    row appended at 12:00 with event time 11:58, max_ahead 0    moves the watermark to 11:58
    row appended at 12:00 with event time 11:00 tomorrow        moves it to 12:00, and is counted

The report has one row per tick and producer, with the row that was newest (`PARTS`), and the row
that was furthest ahead. `engine.watermarks` computes the watermarks from the reports of all tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints
from headrace.columnar.columns import (
    CHANGE_TYPE,
    DELETE,
    OFFSET_COLUMN,
    ORDER_FIELDS,
    PARTITION_COLUMN,
    RANK,
    TICK,
    TIMESTAMP_COLUMN,
)
from headrace.engine.dead_letters import Diverter
from headrace.engine.reader import TopicRange
from headrace.engine.reports import JobFiles, write_report
from headrace.operators.kernel import Times
from headrace.operators.watermark_spec import NO_PRODUCER, WatermarkSpec

PARTS = pa.schema(
    [
        ("tick", pa.int64()),
        ("producer", pa.string()),
        ("newest_us", pa.int64()),
        ("event_us", pa.int64()),
        ("appended_us", pa.int64()),
        ("partition", pa.int64()),
        ("offset", pa.int64()),
        ("is_ahead", pa.bool_()),
    ]
)
"""The rows of a read task's report: for each tick and producer the row that moves the watermark
furthest, to `newest_us`. A row with `is_ahead` is the one that was furthest ahead of its append
time, among those that move it less far than they claim. Partition and offset are -1 for rows that a
stage emitted.
"""
COUNTED_AHEAD_US = 1_000_000
"""A row is counted as ahead if it is further beyond `max_ahead` than this: clocks differ by
milliseconds, and Kafka's times are milliseconds.
"""
NO_TIME = "its event time is null"
NEVER = "its event time is before the year 1"
TOO_FAR = "its event time is after the year 9900"
_YEAR_1_US = -62_135_596_800_000_000
_YEAR_9900_US = 250_246_540_800_000_000


class Ticks(Protocol):
    """The numbers and times of some ticks."""

    @property
    def ticks(self) -> tuple[int, ...]: ...

    @property
    def times_us(self) -> tuple[int, ...]: ...


class EventTimes:
    """Checks event times in one task. `usable` filters each batch; `finish` writes the report of
    the newest times and the dead letters.
    """

    def __init__(self, spec: WatermarkSpec, ticks: Ticks, number: int, job: JobFiles) -> None:
        self.spec = spec
        self.ticks = ticks
        self.number = number
        self.job = job
        self.rows_ahead = 0
        self._diverter = Diverter(job, spec.name)
        self._newest: list[pa.Table] = []

    def usable(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with a usable event time; the others become dead letters. The tombstone of a
        table has no event time and needs none. A column with append times is taken off.
        """
        rows = batch
        if self.spec.column is None or not rows.num_rows:
            return _without_append_times(rows)
        column = rows.column(self.spec.column)
        is_zoned = rows.schema.field(self.spec.column).type.tz is not None
        times = column.cast(pa.timestamp("us", "UTC") if is_zoned else pa.timestamp("us")).cast(
            pa.int64()
        )
        if times.null_count:
            no_time = pc.is_null(times)
            if CHANGE_TYPE in rows.schema.names:
                is_tombstone = pc.equal(rows.column(CHANGE_TYPE), DELETE)
                no_time = pc.and_(no_time, pc.invert(is_tombstone))
            rows, times = self._divert(rows, times, no_time, NO_TIME)
        rows, times = self._divert(rows, times, pc.less(times, _YEAR_1_US), NEVER)
        rows, times = self._divert(rows, times, pc.greater(times, _YEAR_9900_US), TOO_FAR)
        if rows.num_rows:
            self._add_newest(rows, times)
        return _without_append_times(rows)

    def _divert(
        self, rows: pa.RecordBatch, times: pa.Array, is_bad: pa.Array, reason: str
    ) -> tuple[pa.RecordBatch, pa.Array]:
        """Make dead letters of bad rows; return the other rows and their times."""
        bad = is_bad.fill_null(False)
        if pc.any(bad).as_py():
            self._diverter.divert(_without_append_times(rows.filter(bad)), reason)
            rows, times = rows.filter(pc.invert(bad)), times.filter(pc.invert(bad))
        return rows, times

    def _add_newest(self, rows: pa.RecordBatch, times: pa.Array) -> None:
        """Add the newest rows to the report. How far a row may move the watermark goes by its
        append time, which the log has recorded. Where a producer sets that (Kafka's `CreateTime`),
        or it is not known any more behind a stage, the time of the row's tick is the bound.
        """
        if times.null_count:  # tombstones
            rows, times = rows.filter(times.is_valid()), times.drop_null()
        if not rows.num_rows:
            return
        event_us = times.to_numpy()
        appended_us = _tick_times(rows, self.ticks)
        if TIMESTAMP_COLUMN in rows.schema.names:
            stored_us = rows.column(TIMESTAMP_COLUMN).cast(pa.int64()).to_numpy()
            appended_us = np.minimum(appended_us, stored_us)
        limits_us = appended_us + self.spec.max_ahead_us
        is_derived = rows.column(RANK).to_numpy() < 0
        table = pa.Table.from_arrays(
            [
                rows.column(TICK),
                self._producers(rows),
                pa.array(np.minimum(event_us, limits_us)),
                times,
                pa.array(appended_us),
                pa.array(np.where(is_derived, -1, rows.column(PARTITION_COLUMN).to_numpy())),
                pa.array(np.where(is_derived, -1, rows.column(OFFSET_COLUMN).to_numpy())),
                pa.repeat(pa.scalar(False), rows.num_rows),
            ],
            schema=PARTS,
        )
        self._newest.append(newest_rows(table))
        ahead = np.flatnonzero(event_us > limits_us + COUNTED_AHEAD_US)
        if len(ahead):
            self.rows_ahead += len(ahead)
            self._newest.append(furthest_ahead(table.take(pa.array(ahead))))

    def _producers(self, rows: pa.RecordBatch) -> pa.Array:
        """The producer of each row as text. Without a producer column, each partition is one."""
        if self.spec.is_one_producer:
            return pa.repeat(pa.scalar(NO_PRODUCER), rows.num_rows)
        if self.spec.producer is None:
            return rows.column(PARTITION_COLUMN).cast(pa.string())
        column = rows.column(self.spec.producer)
        text = _hex(column) if pa.types.is_binary(column.type) else column.cast(pa.string())
        return text.fill_null(NO_PRODUCER)

    def finish(self) -> None:
        self._diverter.finish(f"times-{self.number}")
        if self._newest:
            parts = pa.concat_tables(self._newest)
            is_ahead = parts["is_ahead"]
            report = [newest_rows(parts.filter(pc.invert(is_ahead)))]
            if self.rows_ahead:
                report.append(furthest_ahead(parts.filter(is_ahead)))
                counts = {f"{self.spec.name}.ahead": self.rows_ahead}
                name = f"ahead-{self.spec.name}-{self.number}"
                write_report(self.job, name, {"counts": counts})
            write_part(self.job, self.spec.name, self.number, pa.concat_tables(report))


def _without_append_times(rows: pa.RecordBatch) -> pa.RecordBatch:
    index = rows.schema.get_field_index(TIMESTAMP_COLUMN)
    return rows if index < 0 else rows.remove_column(index)


def newest_rows(parts: pa.Table) -> pa.Table:
    """The row of each tick and producer that moves the watermark furthest, in order of tick. Of
    several, the one with the latest event time, and then the first in the topic.
    """
    if not parts.num_rows:
        return parts
    parts = parts.combine_chunks()
    groups = _tick_and_producer(parts)
    newest_us = parts["newest_us"].to_numpy()
    best_us = np.full(int(groups.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(best_us, groups, newest_us)
    best = np.flatnonzero(newest_us == best_us[groups])
    if len(best) > len(best_us):
        order = _by_source(parts, best, groups[best])
        best = best[order]
        is_first = np.concatenate([[True], np.diff(groups[best]) != 0])
        best = best[is_first]
    ticks = parts["tick"].to_numpy()[best]
    if (ticks[1:] < ticks[:-1]).any():
        best = best[np.argsort(ticks, kind="stable")]
    is_all = len(best) == parts.num_rows and (np.diff(best) == 1).all()
    return parts if is_all else parts.take(pa.array(best))


def _tick_and_producer(parts: pa.Table) -> Ints:
    """The number of each row's tick and producer, from 0."""
    encoded = parts["producer"].combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], pa.string())
    encoded = encoded.dictionary_encode()
    producers: Ints = encoded.indices.to_numpy().astype(np.int64)
    ticks = parts["tick"].to_numpy()
    if (ticks == ticks[0]).all():
        return producers
    both = pa.array((ticks - ticks.min()) * len(encoded.dictionary) + producers)
    numbers: Ints = both.dictionary_encode().indices.to_numpy().astype(np.int64)
    return numbers


def _by_source(parts: pa.Table, which: Ints, groups: Ints) -> Ints:
    """The order of some rows by group, then the latest event time, then their place."""
    event_us, partition, offset = (
        parts[name].to_numpy()[which] for name in ("event_us", "partition", "offset")
    )
    return np.lexsort((offset, partition, -event_us, groups))


def furthest_ahead(parts: pa.Table) -> pa.Table:
    """The one row that was furthest ahead of its append time; of several, the first."""
    if parts.num_rows:
        by_us = parts["event_us"].to_numpy() - parts["appended_us"].to_numpy()
        order = np.lexsort(
            (
                parts["offset"].to_numpy(),
                parts["partition"].to_numpy(),
                parts["tick"].to_numpy(),
                -by_us,
            )
        )
        parts = parts.take(pa.array(order[:1]))
    is_ahead = pa.repeat(pa.scalar(True), parts.num_rows)
    return parts.set_column(parts.schema.get_field_index("is_ahead"), "is_ahead", is_ahead)


def _tick_times(rows: pa.RecordBatch, ticks: Ticks) -> Times:
    """The time of each row's tick."""
    times: Times = np.array(ticks.times_us, np.int64)[
        np.searchsorted(ticks.ticks, rows.column(TICK).to_numpy())
    ]
    return times


def with_tick_times(rows: pa.RecordBatch, topic_range: TopicRange, name: str) -> pa.RecordBatch:
    """Rows with the time of their tick in a column behind the user's own."""
    return rows.add_column(
        len(topic_range.stored_columns),
        pa.field(name, pa.timestamp("us", "UTC")),
        pa.array(_tick_times(rows, topic_range)).cast(pa.timestamp("us", "UTC")),
    )


def with_metadata(
    rows: pa.RecordBatch, columns: Sequence[tuple[str, str]], at: int, *, append_times: bool
) -> pa.RecordBatch:
    """Rows with columns of the log under other names, from the position `at` on. Append times that
    were read for these columns alone are taken off.
    """
    for number, (name, source) in enumerate(columns):
        field = rows.schema.field(source).with_name(name)
        rows = rows.add_column(at + number, field, rows.column(source))
    return rows if append_times else _without_append_times(rows)


def _hex(column: pa.Array) -> pa.Array:
    """Bytes as hexadecimal text; each distinct producer is converted once."""
    encoded = column.dictionary_encode()
    return pa.array([value.hex() for value in encoded.dictionary.to_pylist()], pa.string()).take(
        encoded.indices
    )


def with_event_times(
    spec: WatermarkSpec, rows: pa.Table, source: pa.Table, ticks: Ticks, shard: int, job: JobFiles
) -> pa.Table:
    """Check the event times that a shard has computed for rows, as `EventTimes` does where rows are
    read. The rows keep the order columns of `source`, the rows as they came to the shard.
    """
    names = [field.name for field in ORDER_FIELDS]
    columns = {name: rows[name] for name in rows.column_names if name not in names}
    ordered = pa.table({**columns, **{name: source[name] for name in names}})
    times = EventTimes(spec, ticks, shard, job)
    usable = [times.usable(batch) for batch in ordered.to_batches()]
    times.finish()
    return pa.Table.from_batches(usable, ordered.schema)


# Reports of read tasks, for the shards behind the shuffle and for the driver


def write_part(job: JobFiles, name: str, number: int, rows: pa.Table) -> None:
    """Write the newest event times that a read task found. A second attempt of the task replaces
    the file with the same content.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)
    job.write(f"clock-{name}-{number}.part", sink.getvalue())


def read_parts(job: JobFiles, name: str) -> pa.Table:
    """The reports of all read tasks of an input."""
    tables = [
        pa.ipc.open_file(job.read(part)).read_all() for part in job.names(f"clock-{name}-", ".part")
    ]
    return pa.concat_tables(tables) if tables else PARTS.empty_table()
