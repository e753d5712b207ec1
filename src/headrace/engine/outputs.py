"""Tasks that put a batch's rows aside for its commit: rows of a derived topic, in order and staged
in the log; a view's changes, in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from headrace.columnar.buffers import pieces
from headrace.columnar.columns import ORDER_FIELDS, TICK
from headrace.columnar.keys import encode_keys
from headrace.columnar.sort import codes_of, order_of
from headrace.engine.context import BatchContext, TopicTarget
from headrace.engine.shard import by_partition, chosen_partitions, write_rows
from headrace.engine.shuffle import gathered, labels, unpack
from headrace.engine.state.files import write_report
from headrace.log.spark.options import Address, shared_log

_ORDER = [field.name for field in ORDER_FIELDS]


@dataclass(frozen=True)
class WriteTopic:
    """Behind a shuffle by partition: within a tick rows are written in order of key and, for one
    key, of change, so the topic does not depend on shards.
    """

    target: TopicTarget
    context: BatchContext

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        label, ports = unpack(batches)
        if label is None:
            return
        tables = [table for found in ports.values() for table in found]
        if tables:
            rows = _in_topic_order(pa.concat_tables(tables), self.target.key)
            ticks = _tick_rows(rows, self.target)
            plain = rows.drop_columns([name for name in rows.column_names if name in _ORDER])
            partition = None if self.target.key else 0  # as `chosen_partitions`
            log, directory = shared_log(Address(self.context.log)), str(self.context.job_directory)
            staged = log.stage(
                self.target.name,
                plain.to_batches(),
                partition=partition,
                directory=directory,
                group=self.context.job,
            )
            report = {
                "topic": staged.topic,
                "rows": staged.rows,
                "partitions": {str(p): list(place) for p, place in staged.partitions.items()},
                "ticks": ticks,
            }
            write_report(
                self.context.job_directory,
                f"topic-{self.target.name}-{labels(self.context.shards).index(label)}",
                report,
            )
        yield from ()


def _tick_rows(rows: pa.Table, target: TopicTarget) -> dict[str, list[list[int]]]:
    """How many rows of which tick go to each partition. Rows are in order of tick."""
    keys = rows.select([TICK, *target.key])  # the others may not fit into one batch
    chosen = np.concatenate([chosen_partitions(batch, target) for batch in pieces(keys)])
    ticks = rows[TICK].to_numpy()
    begins = np.flatnonzero(np.append(True, ticks[1:] != ticks[:-1]))
    found: dict[str, list[list[int]]] = {}
    for tick, some in zip(ticks[begins].tolist(), np.split(chosen, begins[1:]), strict=True):
        counts = np.bincount(some)
        for partition in np.flatnonzero(counts).tolist():
            found.setdefault(str(partition), []).append([tick, int(counts[partition])])
    return found


def _in_topic_order(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """By tick and key; rows of one key and tick stay in the order of change in which their shard
    gave them.
    """
    rows = rows.combine_chunks()
    columns = [rows[TICK].to_numpy(), *([codes_of(encode_keys(rows, list(key)))] if key else [])]
    order = order_of(
        [*columns, *(rows[name].to_numpy() for name in ("_rank", "_partition", "_offset"))],
        likely=len(columns),
    )
    return rows if order is None else rows.take(pa.array(order))


@dataclass(frozen=True)
class PackForTopic:
    """Rows to the tasks that write a topic."""

    target: TopicTarget
    shards: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in gathered(batches):
            yield from by_partition(0, self.target, rows, self.shards)


@dataclass(frozen=True)
class WriteView:
    """Rows of Spark's into a file of changes for a view."""

    view: str
    context: BatchContext

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = [batch for batch in batches if batch.num_rows]
        task = TaskContext.get()
        if found and task is not None:
            rows = pa.Table.from_batches(found)
            name = f"view-{self.view}-p{task.partitionId()}"  # a second attempt replaces the first
            file = write_rows(self.context.job_directory, name, rows)
            write_report(self.context.job_directory, name, {"views": {self.view: file}})
        yield from ()
