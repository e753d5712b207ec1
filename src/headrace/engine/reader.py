"""Reading by ticks: which rows of which partition belong to a batch, and a Spark task that reads
them.

A task is an offset range of one topic partition with the ends of the ticks in it; its rows come as
Arrow batches with their tick and their place in the pipeline's order.
"""

from __future__ import annotations

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
)
from headrace.engine.ticks import Tick
from headrace.log.spark.options import Address, shared_log

DERIVED = -1  # the rank of rows that a stage made: below zero, also behind a union
_MAX_ROWS_A_BATCH = 100_000
_MIN_ROWS, _MIN_ROWS_ON_KAFKA = 10_000, 100_000


@dataclass(frozen=True)
class TopicRange:
    """Offsets `start` to `stop` of a partition. `ticks[i]` ends at `ends[i]`, and has the time
    `times_us[i]`.
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

    @property
    def stored_columns(self) -> tuple[str, ...]:
        """The user's."""
        return tuple(name for name in self.columns if name != CHANGE_TYPE)

    def read(self, log_address: str) -> Iterator[pa.RecordBatch]:
        """The rows with the user's columns first, then tick, rank, partition and offset."""
        log = shared_log(Address(log_address))
        names = [*self.columns, PARTITION_COLUMN, OFFSET_COLUMN]
        for batch in log.read(self.topic, self.partition, self.start, self.stop, columns=names):
            for first in range(0, batch.num_rows, _MAX_ROWS_A_BATCH):
                yield self._placed(batch.slice(first, _MAX_ROWS_A_BATCH))

    def _placed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        offsets = batch.column(OFFSET_COLUMN)
        at = np.searchsorted(
            np.array(self.ends), offsets.to_numpy(zero_copy_only=False), side="right"
        )
        order = [
            pa.array(np.array(self.ticks)[at]),
            pa.array(np.full(batch.num_rows, self.rank, np.int32)),
            batch.column(PARTITION_COLUMN),
            offsets,
        ]
        columns = [batch.column(name) for name in self.columns]
        fields = [batch.schema.field(name) for name in self.columns]
        return pa.RecordBatch.from_arrays(
            [*columns, *order], schema=pa.schema([*fields, *ORDER_FIELDS])
        )


def min_rows(log_address: str) -> int:
    """A range is not cut into smaller pieces than this. Kafka's client reads on behind the end of a
    piece, for nothing.
    """
    return _MIN_ROWS_ON_KAFKA if log_address.startswith("kafka:") else _MIN_ROWS


def ranges(
    topic: str,
    rank: int,
    columns: Sequence[str],
    before: Tick,
    ticks: Sequence[Tick],
    *,
    parts: int,
    least: int = 1,
) -> list[TopicRange]:
    """What is to be read of one input for some ticks: of each partition one range, or several of
    about equal size so that at least `parts` can be read at once.

    They have at least `least` rows each, if there are so many.
    """
    found = []
    last = ticks[-1]
    partitions = sorted(last.ends.get(topic, {}))
    max_pieces = max(1, -(-parts // max(1, len(partitions))))
    times_us = tuple(tick.time_us for tick in ticks)
    for partition in partitions:
        start, stop = before.end(topic, partition), last.end(topic, partition)
        pieces = max(1, min(max_pieces, (stop - start) // least))
        cuts = [start + (stop - start) * piece // pieces for piece in range(pieces + 1)]
        numbers, ends = (
            tuple(tick.number for tick in ticks),
            tuple(tick.end(topic, partition) for tick in ticks),
        )
        found += [
            TopicRange(topic, partition, rank, tuple(columns), a, b, numbers, ends, times_us)
            for a, b in pairwise(cuts)
            if b > a
        ]
    return found
