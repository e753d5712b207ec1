"""The tasks that write a batch's outputs for its commit: rows of a derived topic, sorted and staged
in the log (`PackForTopic`, then `WriteTopic` behind a shuffle; `CopyToTopic` without one); changes
of a view, in a file (`WriteView`).

A stage whose rows go to views only writes them itself (`shard`). `commit` makes all of them
visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import TaskContext

from headrace.columnar.buffers import split_table
from headrace.columnar.columns import (
    CHANGE_TYPE,
    OFFSET_COLUMN,
    ORDER_FIELDS,
    PARTITION_COLUMN,
    RANK,
    TICK,
)
from headrace.columnar.keys import encode_keys
from headrace.columnar.sort import key_codes, row_order
from headrace.engine.context import BatchContext, TopicTarget
from headrace.engine.dead_letters import Diverter
from headrace.engine.map_tasks import InputReader
from headrace.engine.reports import write_report, write_rows
from headrace.engine.shard import pack_by_partition, topic_partitions
from headrace.engine.shuffle import gather, labels, unpack
from headrace.log.spark.options import Address, shared_log

_ORDER_COLUMNS = [field.name for field in ORDER_FIELDS]


@dataclass(frozen=True)
class PackForTopic:
    """Packs rows for the tasks that write a derived topic."""

    target: TopicTarget
    shards: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in gather(batches):
            yield from pack_by_partition(0, self.target, rows, self.shards)


@dataclass(frozen=True)
class WriteTopic:
    """Stages the rows of some partitions of a derived topic in the log, and reports how many rows
    of which tick each partition gets.

    Within a tick, rows are sorted by key, and the rows of a key stay in the order of their changes,
    so the topic's content does not depend on the number of shards.
    """

    target: TopicTarget
    context: BatchContext

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        label, ports = unpack(batches)
        tables = [table for port_tables in ports.values() for table in port_tables]
        if label is not None and tables:
            task = labels(self.context.shards).index(label)
            rows = self._sort(pa.concat_tables(tables).combine_chunks())
            if CHANGE_TYPE in rows.column_names:
                rows = self._with_key(rows, task)
            if not rows.num_rows:
                return
            plain = rows.drop_columns([n for n in rows.column_names if n in _ORDER_COLUMNS])
            staged = [
                shared_log(Address(self.context.log)).stage(
                    self.target.name,
                    part.to_batches(),
                    partition=partition,
                    directory=str(self.context.job_directory),
                    group=self.context.job,
                )
                for partition, part in self._by_partition(rows, plain)
            ]
            files = {p: file for part in staged for p, file in part.partitions.items()}
            report = {
                "topic": staged[0].topic,
                "rows": sum(part.rows for part in staged),
                "partitions": {str(p): list(file) for p, file in files.items()},
                "ticks": count_tick_rows(rows, self.target),
            }
            write_report(self.context.files, f"topic-{self.target.name}-{task}", report)
        yield from ()

    def _by_partition(
        self, rows: pa.Table, plain: pa.Table
    ) -> Iterator[tuple[int | None, pa.Table]]:
        """The plain rows to stage: with a key, all of them, which the log partitions as every
        producer's; without one, those of each partition.
        """
        if self.target.key or self.target.partitions == 1:
            yield None if self.target.key else 0, plain
            return
        partitions = _partitions_of(rows, self.target)
        for partition in np.flatnonzero(np.bincount(partitions)).tolist():
            is_mine = partitions == partition
            yield partition, plain if is_mine.all() else plain.filter(pa.array(is_mine))

    def _with_key(self, rows: pa.Table, task: int) -> pa.Table:
        """The rows that a table's topic can have: its primary key is never null. A row with a null
        key, such as that of the group null, becomes a dead letter.
        """
        if not any(rows[name].null_count for name in self.target.key):
            return rows
        diverter = Diverter(self.context.files, dead_letters_of(self.target.name))
        with_key = [
            diverter.divert_null_keys(batch, self.target.key, nulls=False)
            for batch in rows.to_batches()
        ]
        diverter.finish(f"topic-{task}")
        return pa.Table.from_batches(with_key, schema=rows.schema)

    def _sort(self, rows: pa.Table) -> pa.Table:
        columns = [rows[TICK].to_numpy()]
        if self.target.key:
            columns.append(key_codes(encode_keys(rows, list(self.target.key))))
        change_order = [rows[name].to_numpy() for name in (RANK, PARTITION_COLUMN, OFFSET_COLUMN)]
        order = row_order([*columns, *change_order], likely=len(columns))
        return rows if order is None else rows.take(pa.array(order))


@dataclass(frozen=True)
class CopyToTopic:
    """Writes a derived topic without a key whose rows come from one input, for the partitions whose
    numbers come in. Each has the rows of certain partitions of the input, so one task can read,
    compute and stage them: nothing is packed, shuffled or sorted, and if they are of one partition
    of the input, only a batch of them is in memory at a time.
    """

    reader: InputReader
    target: TopicTarget
    context: BatchContext

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for partition in batch.column(0).to_pylist():
                self._write(partition)
        yield from ()

    def _write(self, partition: int) -> None:
        ranges = self.reader.ranges
        mine = [
            number
            for number, each in enumerate(ranges)
            if each.partition % self.target.partitions == partition
        ]
        rows: Iterable[pa.RecordBatch] = (
            batch for number in mine for batch in self.reader.rows(number) if batch.num_rows
        )
        if len({ranges[number].partition for number in mine}) > 1:
            rows = _in_order(list(rows))
        remaining = iter(rows)
        first = next(remaining, None)
        if first is None:
            return
        batches = chain([first], remaining)
        ticks: Counter[int] = Counter()
        names = [name for name in first.schema.names if name not in _ORDER_COLUMNS]

        def plain() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                found, counts = np.unique(batch[TICK].to_numpy(), return_counts=True)
                ticks.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
                yield batch.select(names)

        staged = shared_log(Address(self.context.log)).stage(
            self.target.name,
            plain(),
            partition=partition,
            directory=str(self.context.job_directory),
            group=self.context.job,
        )
        report = {
            "topic": staged.topic,
            "rows": staged.rows,
            "partitions": {str(p): list(file) for p, file in staged.partitions.items()},
            "ticks": {str(partition): sorted(ticks.items())},
        }
        write_report(self.context.files, f"topic-{self.target.name}-{partition}", report)


def copies_in_parallel(reader: InputReader, target: TopicTarget, cores: int) -> bool:
    """Whether `CopyToTopic` keeps as many tasks busy as reading would."""
    if target.key:
        return False
    written = {each.partition % target.partitions for each in reader.ranges}
    return len(written) >= min(cores, len(reader.ranges))


def _in_order(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of several partitions by tick, partition and offset."""
    if batches:
        rows = pa.Table.from_batches(batches)
        order = row_order([rows[name].to_numpy() for name in _ORDER_COLUMNS])
        yield from split_table(rows if order is None else rows.take(pa.array(order)))


def dead_letters_of(topic: str) -> str:
    """The name under which rows that a derived topic cannot have are counted and kept."""
    return f"{topic}.topic"


def count_tick_rows(rows: pa.Table, target: TopicTarget) -> dict[str, list[list[int]]]:
    """Partition -> [tick, number of rows]. The rows are sorted by tick."""
    partitions = _partitions_of(rows, target)
    ticks = rows[TICK].to_numpy()
    starts = np.flatnonzero(np.append(True, ticks[1:] != ticks[:-1]))
    tick_rows: dict[str, list[list[int]]] = {}
    for tick, tick_partitions in zip(
        ticks[starts].tolist(), np.split(partitions, starts[1:]), strict=True
    ):
        counts = np.bincount(tick_partitions)
        for partition in np.flatnonzero(counts).tolist():
            tick_rows.setdefault(str(partition), []).append([tick, int(counts[partition])])
    return tick_rows


def _partitions_of(rows: pa.Table, target: TopicTarget) -> npt.NDArray[np.int32]:
    """The partition of each row."""
    # All columns might not fit into one batch.
    ordered = [] if target.partitions == 1 else [PARTITION_COLUMN]
    keys = rows.select(list(target.key) or ordered or [TICK])
    return np.concatenate([topic_partitions(batch, target) for batch in split_table(keys)])


@dataclass(frozen=True)
class WriteView:
    """Writes rows that Spark computed to a file of changes for a view."""

    view: str
    context: BatchContext

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with_rows = [batch for batch in batches if batch.num_rows]
        task = TaskContext.get()
        if with_rows and task is not None:
            name = f"view-{self.view}-p{task.partitionId()}"  # a second attempt replaces the first
            file = write_rows(self.context.files, name, pa.Table.from_batches(with_rows))
            write_report(self.context.files, name, {"views": {self.view: file}})
        yield from ()
