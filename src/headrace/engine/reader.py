"""Reading by ticks: which rows of which partition belong to a batch.

`topic_ranges` turns the ticks of a batch into offset ranges of the input partitions; `TopicRange`
reads one of them inside a Spark task. Its rows come as Arrow batches with their tick and the other
order columns. `map_tasks` has the function around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from headrace.columnar.columns import (
    CHANGE_TYPE,
    OFFSET_COLUMN,
    ORDER_FIELDS,
    PARTITION_COLUMN,
    TIMESTAMP_COLUMN,
)
from headrace.engine.ticks import Tick
from headrace.errors import BadRows
from headrace.log.spark.options import Address, shared_log
from headrace.types.schema_history import definition
from headrace.types.values import Misfit, find_misfit, fit_column

DERIVED = -1
"""The rank of rows that a stage emitted. It is negative, and a union keeps it so."""
_MAX_ROWS_A_BATCH = 100_000
_MIN_ROWS, _MIN_ROWS_ON_KAFKA = 10_000, 100_000


@dataclass(frozen=True)
class TopicRange:
    """The offsets [start, stop) of a partition. The tick `ticks[i]` ends at the offset `ends[i]`,
    and its time is `times_us[i]`.
    """

    topic: str
    partition: int
    rank: int
    columns: tuple[str, ...]
    start: int
    stop: int
    ticks: tuple[int, ...]
    ends: tuple[int, ...]
    times_us: tuple[int, ...] = ()
    declared: pa.Schema | None = None
    """The columns as the pipeline declares them. The topic may have wider ones by now."""
    append_times: bool = False
    """Whether rows come with their append times, in a last column."""

    @property
    def stored_columns(self) -> tuple[str, ...]:
        """The user's columns."""
        return tuple(name for name in self.columns if name != CHANGE_TYPE)

    def read(
        self, log_address: str, counts: Counter[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows: the user's columns, then the order columns (tick, rank, partition, offset), and
        the append time if it is asked for.

        Records of other programs that do not fit the topic become its dead letters. At the end,
        `counts` has their number (`diverted`), and how often fields that the topic does not have
        were ignored (`unknown_fields`).
        """
        log = shared_log(Address(log_address))
        names = [*self.columns, PARTITION_COLUMN, OFFSET_COLUMN]
        if self.append_times:
            names.append(TIMESTAMP_COLUMN)
        batches = log.read(
            self.topic, self.partition, self.start, self.stop, columns=names
        ).with_dead_letters()
        for rows in batches:
            batch = rows if self.declared is None else self._as_declared(rows, self.declared)
            for first in range(0, batch.num_rows, _MAX_ROWS_A_BATCH):
                yield self._with_order_columns(batch.slice(first, _MAX_ROWS_A_BATCH))
        if counts is not None:
            counts["diverted"] += batches.misfits
            counts["unknown_fields"] += sum(batches.unknown_fields.values())

    def _as_declared(self, batch: pa.RecordBatch, declared: pa.Schema) -> pa.RecordBatch:
        """Rows with the declared types. A topic's column can be widened under a pipeline, which
        goes on until a value comes that it cannot hold.
        """
        for field in declared:
            array = batch.column(field.name)
            is_null = CHANGE_TYPE not in self.columns and not field.nullable and array.null_count
            if array.type.equals(field.type) and not is_null:
                continue
            try:
                fitted = fit_column(array, field)
            except (Misfit, pa.ArrowException) as error:
                row, reason = find_misfit(array, field, error)
                raise BadRows(
                    f"The row at {self.topic}[{self.partition}], offset"
                    f" {batch.column(OFFSET_COLUMN)[row].as_py()}, has a value in {field.name!r}"
                    f" that does not fit {definition(field)}, as the pipeline declares it, since"
                    f" the topic was altered: {reason}.",
                    fix=(
                        "declare the column in the pipeline as the topic has it now; if state"
                        " depends on it, build a new version with headrace replay FILE --as v2."
                    ),
                ) from None
            position = batch.schema.get_field_index(field.name)
            batch = batch.set_column(position, field.name, fitted)
        return batch

    def _with_order_columns(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        offsets = batch.column(OFFSET_COLUMN)
        tick_indices = np.searchsorted(
            np.array(self.ends), offsets.to_numpy(zero_copy_only=False), side="right"
        )
        order = [
            pa.array(np.array(self.ticks)[tick_indices]),
            pa.array(np.full(batch.num_rows, self.rank, np.int32)),
            batch.column(PARTITION_COLUMN),
            offsets,
        ]
        columns = [batch.column(name) for name in self.columns]
        fields = [batch.schema.field(name) for name in self.columns]
        arrays, schema = [*columns, *order], [*fields, *ORDER_FIELDS]
        if self.append_times:
            arrays.append(batch.column(TIMESTAMP_COLUMN))
            schema.append(batch.schema.field(TIMESTAMP_COLUMN))
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(schema))


def min_range_rows(log_address: str) -> int:
    """The size below which a range is not split. It is larger on Kafka, whose client fetches past
    the end of a range in vain.
    """
    return _MIN_ROWS_ON_KAFKA if log_address.startswith("kafka:") else _MIN_ROWS


def topic_ranges(
    topic: str,
    rank: int,
    columns: Sequence[str],
    before: Tick,
    ticks: Sequence[Tick],
    *,
    parts: int,
    min_rows: int = 1,
    declared: pa.Schema | None = None,
    append_times: bool = False,
) -> list[TopicRange]:
    """The ranges to read of one input for the ticks after `before`.

    Each partition is one range, or is split evenly so that at least `parts` ranges can be read in
    parallel, each with at least `min_rows` rows.
    """
    ranges = []
    last = ticks[-1]
    partitions = sorted(last.ends.get(topic, {}))
    max_splits = max(1, -(-parts // max(1, len(partitions))))
    for partition in partitions:
        start, stop = before.end(topic, partition), last.end(topic, partition)
        splits = max(1, min(max_splits, (stop - start) // min_rows))
        cuts = [start + (stop - start) * split // splits for split in range(splits + 1)]
        ranges += [
            TopicRange(
                topic=topic,
                partition=partition,
                rank=rank,
                columns=tuple(columns),
                start=low,
                stop=high,
                ticks=tuple(tick.number for tick in ticks),
                ends=tuple(tick.end(topic, partition) for tick in ticks),
                times_us=tuple(tick.time_us for tick in ticks),
                declared=declared,
                append_times=append_times,
            )
            for low, high in pairwise(cuts)
            if high > low
        ]
    return ranges
