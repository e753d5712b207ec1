"""The functions that run in the tasks of a micro-batch's Spark job, before the shuffle.

Each is a small picklable object that is called with a task's Arrow batches: reading ranges of a
topic (`ReadRows`, `ReadAndPack`), row-local steps (`ApplyRowStep`, `RankRows`), packing
(`PackRows`), filtering (`filter_changes`, `DivertFailed`, `StopAtFailed`), and waking shards
without rows (`ShardHeartbeat`). `runtime.job_builder` puts them together; `shard` and `outputs`
have the functions behind the shuffle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import (
    CHANGE_TYPE,
    DELETE,
    INSERT,
    ORDER_FIELDS,
    RANK,
    UPDATE_PREIMAGE,
)
from headrace.columnar.json_fields import NeedsSpark
from headrace.engine.dead_letters import Diverter, this_task
from headrace.engine.event_times import EventTimes, with_metadata, with_tick_times
from headrace.engine.reader import TopicRange
from headrace.engine.reports import JobFiles, mark_needs_spark, write_report
from headrace.engine.shuffle import heartbeat, pack, without_unread
from headrace.errors import ExpressionFailed
from headrace.expressions.evaluator import Filter, RowStep
from headrace.operators.kernel import BroadcastKernel
from headrace.operators.load_shedding import LoadShedder
from headrace.operators.watermark_spec import WatermarkSpec

# Reading


@runtime_checkable
class CombiningKernel(Protocol):
    """A kernel that can do part of its work before the shuffle, as a partial aggregate can."""

    @property
    def combinable(self) -> bool: ...

    def combine(self, rows: pa.Table) -> pa.Table: ...


@dataclass(frozen=True)
class InputReader:
    """Reads the ranges of an input that a batch needs, and applies row-local steps on the spot."""

    ranges: tuple[TopicRange, ...]
    watermark: WatermarkSpec
    log: str
    """The address of the log."""
    job: JobFiles
    time_column: str | None = None
    """The name of a column to add, with the time of each row's tick."""
    metadata: tuple[tuple[str, str], ...] = ()
    """Columns to add behind it: their names, and the columns of the log that they have."""
    steps: tuple[RowStep, ...] = ()
    """Row-local steps that Python computes as Spark would."""
    shedding: LoadShedder | None = None

    def rows(self, number: int) -> Iterator[pa.RecordBatch]:
        """The usable rows of a range. Reports event times, dead letters and shed rows."""
        topic_range, shed, read_rows, read_bytes = self.ranges[number], 0, 0, 0
        times = EventTimes(self.watermark, topic_range, number, self.job)
        read_counts: Counter[str] = Counter()
        for batch in topic_range.read(self.log, read_counts):
            rows = batch
            read_rows += rows.num_rows
            read_bytes += rows.nbytes
            if self.time_column is not None:
                rows = with_tick_times(rows, topic_range, self.time_column)
            if self.metadata:
                position = len(topic_range.stored_columns) + (self.time_column is not None)
                rows = with_metadata(
                    rows,
                    self.metadata,
                    position,
                    append_times=not self.watermark.follows_ticks,
                )
            rows = times.usable(rows)
            # A shed row still counts for the watermark: it happened.
            if self.shedding is not None:
                before, rows = rows.num_rows, self.shedding.filter_rows(rows)
                shed += before - rows.num_rows
            try:
                yield reduce(lambda result, step: step(result), self.steps, rows)
            except NeedsSpark:
                mark_needs_spark(self.job)
                break
        times.finish()
        # Every task that reads this range reads and sheds the same rows and writes the same report.
        name = self.watermark.name
        read_counts["shed"] = shed
        counts = {f"{name}.{what}": count for what, count in read_counts.items() if count}
        report = {"counts": counts, "read": [read_rows, read_bytes]}
        write_report(self.job, f"read-{name}-{number}", report)


@dataclass(frozen=True)
class ReadRows:
    """Reads the ranges whose numbers come in, from `spark.range`."""

    reader: InputReader

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self.reader.rows(number)


@dataclass(frozen=True)
class ReadAndPack:
    """Reads the ranges whose numbers come in and packs their rows for the shuffle: the rows never
    leave Python.
    """

    reader: InputReader
    port: int
    step: str
    key: tuple[str, ...] | None
    shards: int
    combine: CombiningKernel | None = None
    nulls: bool = False
    """Whether a key may be null."""
    prepare: BroadcastKernel | None = None
    unread: tuple[str, ...] = ()
    """The columns that the step does not read."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self._read_range(number)

    def _read_range(self, number: int) -> Iterator[pa.RecordBatch]:
        diverter, row_count = Diverter(self.reader.job, self.step), 0

        def rows_with_key() -> Iterator[pa.RecordBatch]:
            nonlocal row_count
            for batch in self.reader.rows(number):
                rows = diverter.divert_null_keys(batch, self.key, nulls=self.nulls)
                row_count += rows.num_rows
                yield without_unread(rows, self.unread)

        transform = None
        if self.combine is not None:
            transform = self.combine.combine
        elif self.prepare is not None:
            transform = self.prepare.prepare
        yield from pack(self.port, rows_with_key(), self.key, self.shards, transform)
        part = f"{self.port}-{self.reader.watermark.name}-{number}"
        diverter.finish(part)
        if self.combine is not None:  # the shard receives fewer rows than were read
            counts = {f"{self.step}.rows_in": row_count}
            write_report(self.reader.job, f"packed-{self.step}-{part}", {"counts": counts})


# Row-local steps behind a stage


@dataclass(frozen=True)
class ApplyRowStep:
    """Computes a row-local step over rows that a stage emitted. `schema` has the step's rows, order
    columns included. Of a table's rows, which are changes, an update is filtered as a whole.
    """

    step: RowStep
    schema: pa.Schema
    job: JobFiles

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            if CHANGE_TYPE not in self.schema.names:
                yield from map(self.step, batches)
            elif isinstance(self.step, Filter):
                yield from filter_changes(map(self._with_condition, batches))
            else:
                yield from map(self._project_changes, batches)
        except NeedsSpark:
            mark_needs_spark(self.job)

    def _with_condition(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        assert isinstance(self.step, Filter)
        keep = self.step.condition.evaluate(rows)
        if isinstance(keep, pa.Scalar):
            keep = pa.repeat(keep, rows.num_rows)
        return rows.append_column(KEEP, keep)

    def _project_changes(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        projected = self.step(rows)
        index = self.schema.get_field_index(CHANGE_TYPE)
        field = self.schema.field(CHANGE_TYPE)
        return projected.add_column(index, field, rows.column(CHANGE_TYPE))


@dataclass(frozen=True)
class RenameChangeType:
    """A table's changes as rows of a stream, with the type of the change in the column `name`."""

    name: str
    columns: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        order = [field.name for field in ORDER_FIELDS]
        for rows in batches:
            columns = [*(rows.column(name) for name in self.columns), rows.column(CHANGE_TYPE)]
            columns += [rows.column(name) for name in order]
            yield pa.RecordBatch.from_arrays(columns, names=[*self.columns, self.name, *order])


@dataclass(frozen=True)
class RankRows:
    """The rows of one input of a union, with the union's columns. Rows with equal order columns
    come in the order of the inputs: a rank is multiplied by the number of inputs, and the index of
    the input added. A negative rank stays negative.
    """

    index: int
    inputs: int
    columns: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in batches:
            ranks = rows.column(RANK).to_numpy() * self.inputs + self.index
            ranked = rows.set_column(
                rows.schema.get_field_index(RANK), RANK, pa.array(ranks.astype(np.int32))
            )
            yield ranked.select(list(self.columns))


# Packing


@dataclass(frozen=True)
class PackRows:
    """Packs rows that Spark computed for the shuffle."""

    port: int
    step: str
    key: tuple[str, ...] | None
    shards: int
    job: JobFiles
    nulls: bool = False
    """Whether a key may be null."""
    prepare: BroadcastKernel | None = None
    unread: tuple[str, ...] = ()
    """The columns that the step does not read."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        diverter = Diverter(self.job, self.step)
        rows = (
            without_unread(
                diverter.divert_null_keys(batch, self.key, nulls=self.nulls), self.unread
            )
            for batch in batches
        )
        transform = self.prepare.prepare if self.prepare else None
        yield from pack(self.port, rows, self.key, self.shards, transform)
        diverter.finish(f"{self.port}-{this_task()}")


@dataclass(frozen=True)
class ShardHeartbeat:
    """Emits a heartbeat for every shard, so that each runs even if no row is for it."""

    shards: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield heartbeat(self.shards)


# Filtering
#
# Spark computes a boolean column `_keep`. A stream keeps the rows where it is true. Of a table's
# changes, the two rows of an update, which are neighbours, are looked at together: a row that no
# longer fits becomes a delete, one that fits only now becomes an insert.


KEEP = "_keep"


def filter_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows where `_keep` is true, without that column; of a table, as `filter_changes`."""
    iterator = iter(batches)
    first = next(iterator, None)
    if first is None:
        return
    batches = chain([first], iterator)
    if CHANGE_TYPE in first.schema.names:
        yield from filter_changes(batches)
    else:
        for batch in batches:
            yield batch.filter(batch.column(KEEP)).drop_columns([KEEP])


def filter_changes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The changes of the table of rows where `_keep` is true, without that column."""
    pending: pa.RecordBatch | None = None
    for new in batches:
        batch = new if pending is None else pa.concat_batches([pending, new])
        # A last row that is the old value of an update waits for the new value.
        count = batch.num_rows
        if count and batch.column(CHANGE_TYPE)[count - 1].as_py() == UPDATE_PREIMAGE:
            count -= 1
        pending = batch.slice(count) if count < batch.num_rows else None
        if count:
            yield _filter_whole_changes(batch.slice(0, count))
    if pending is not None:
        yield _filter_whole_changes(pending)


def _filter_whole_changes(batch: pa.RecordBatch) -> pa.RecordBatch:
    changes = np.array(batch.column(CHANGE_TYPE).to_pylist(), dtype=object)
    fits = batch.column(KEEP).fill_null(False).to_numpy(zero_copy_only=False)
    before = np.flatnonzero(changes == UPDATE_PREIMAGE)
    changes[before[fits[before] & ~fits[before + 1]]] = DELETE
    changes[before[~fits[before] & fits[before + 1]] + 1] = INSERT
    changed = batch.set_column(
        batch.schema.get_field_index(CHANGE_TYPE),
        batch.schema.field(CHANGE_TYPE),
        pa.array(changes.tolist(), pa.string()),
    )
    names = [name for name in batch.schema.names if name != KEEP]
    return changed.select(names).filter(pa.array(fits))


@dataclass(frozen=True)
class DivertFailed:
    """Filters rows by `_keep`, which says whether a step's expressions can be computed for them,
    and makes dead letters of the others.
    """

    job: JobFiles
    step: str
    reason: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        diverter = Diverter(self.job, self.step)

        def divert_failed() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                failed = batch.filter(pc.invert(batch.column(KEEP))).drop_columns([KEEP])
                diverter.divert(failed, self.reason)
                yield batch

        yield from filter_rows(divert_failed())
        # Named by its first row, not by the task: Spark may compute these rows in several stages.
        diverter.finish(f"failed-{diverter.first}")


@dataclass(frozen=True)
class StopAtFailed:
    """Passes rows on while `_keep` is true. The first row for which a step's expressions cannot be
    computed ends the batch with ExpressionFailed.
    """

    step: str
    expressions: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = batch.drop_columns([KEEP])
            failed = rows.filter(pc.invert(batch.column(KEEP)))
            if failed.num_rows:
                names = [field.name for field in ORDER_FIELDS if field.name in rows.schema.names]
                (row,) = failed.slice(0, 1).drop_columns(names).to_pylist()
                raise ExpressionFailed(step=self.step, expressions=self.expressions, row=row)
            yield rows
