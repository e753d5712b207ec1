"""Following a topic: reads on from the offsets that a target has applied, in slices of bounded
size.

`SinkLoop` (in `sync`) turns each slice into a batch and applies it. Where the slices are cut
matters twice: a row whose key changed is a delete and an insert that are never separated, and a
slice ends at one snapshot of the log if that is not too far away, so that a sink that keeps up
applies whole transactions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from headrace.columnar.columns import (
    CHANGE_TYPE,
    DELETE,
    OFFSET_COLUMN,
    ORDER,
    PARTITION_COLUMN,
    TRANSACTION,
)
from headrace.errors import TargetMismatch
from headrace.log.api import Log
from headrace.sinks.checkpoint import SinkCheckpoint

MAX_BYTES = 64 << 20
"""The most bytes in a slice, give or take one batch of the log."""


@dataclass(frozen=True)
class TopicSlice:
    """Consecutive rows of some partitions of a topic."""

    rows: list[pa.RecordBatch]
    start: Mapping[int, int]
    """By partition, the offset of the first row."""
    stop: Mapping[int, int]
    """By partition, the offset after the last row."""
    new_partitions: frozenset[int]
    """Partitions that the target has applied nothing of."""
    behind: int
    """How many offsets follow the slice in the topic."""


class TopicFollower:
    """Reads a topic from the offsets of a checkpoint on.

    Raises:
        TargetMismatch: Rows or tombstones that the target has not applied are no longer in the
            topic.
    """

    def __init__(self, log: Log, topic: str, checkpoint: SinkCheckpoint) -> None:
        self.log = log
        self.topic = topic
        earliest = log.start_offsets(topic)
        _check_nothing_missed(log, topic, checkpoint, earliest)
        self.positions = {
            partition: checkpoint.positions.get(partition, start)
            for partition, start in earliest.items()
        }
        """By partition, the next offset to read."""
        self._applied_partitions = set(checkpoint.positions)
        self._turn = 0

    def next(self, max_rows: int) -> TopicSlice | None:
        """Return the next rows, about `max_rows` of them at most; None if there is nothing new."""
        ends = self.log.snapshot([self.topic])[self.topic]
        for partition in ends.keys() - self.positions.keys():  # the topic got more partitions
            self.positions[partition] = 0
        start = {
            partition: self.positions[partition]
            for partition, end in ends.items()
            if end > self.positions[partition]
        }
        if not start:
            return None
        self._turn += 1  # another partition comes first each time, so that none starves
        in_turn = sorted(start, key=lambda partition: (partition - self._turn) % len(ends))
        rows, stop = self._read(
            {partition: start[partition] for partition in in_turn}, ends, max_rows
        )
        behind = sum(
            end - stop.get(partition, start.get(partition, end)) for partition, end in ends.items()
        )
        return TopicSlice(
            rows=rows,
            start={partition: start[partition] for partition in stop},
            stop=stop,
            new_partitions=frozenset(stop.keys() - self._applied_partitions),
            behind=behind,
        )

    def _read(
        self, start: Mapping[int, int], ends: Mapping[int, int], max_rows: int
    ) -> tuple[list[pa.RecordBatch], dict[int, int]]:
        """Read partitions one after the other until the slice is full. Returns the rows, and where
        each partition that was read stops.
        """
        rows: list[pa.RecordBatch] = []
        stop: dict[int, int] = {}
        rows_left, bytes_left = max_rows, MAX_BYTES
        for partition, first in start.items():
            if rows_left <= 0 or bytes_left <= 0:
                break
            stop[partition] = ends[partition]
            batches = self.log.read(self.topic, partition, first, ends[partition])
            for batch in batches.with_dead_letters():
                count = min(batch.num_rows, rows_left) if rows_left > 0 and bytes_left > 0 else 0
                if count < batch.num_rows and cuts_key_change(rows, batch, count):
                    count += 1
                part = batch.slice(0, count)
                rows.append(part)
                rows_left -= part.num_rows
                bytes_left -= part.nbytes
                if count < batch.num_rows:
                    stop[partition] = batch.column(OFFSET_COLUMN)[count].as_py()
                    break
        return rows, stop

    def advance(self, topic_slice: TopicSlice) -> None:
        """Go on behind a slice that was applied."""
        self.positions.update(topic_slice.stop)
        self._applied_partitions.update(topic_slice.stop)


def cuts_key_change(before: list[pa.RecordBatch], batch: pa.RecordBatch, index: int) -> bool:
    """Return whether a cut in front of a row of a captured table would separate the delete of an
    old key from the insert of the new one.

    Args:
        before: The batches that precede `batch`.
        batch: The batch in which the cut would be.
        index: The row in front of which the cut would be.
    """
    if not {ORDER, TRANSACTION, CHANGE_TYPE} <= set(batch.schema.names):
        return False
    if index:
        last = batch.slice(index - 1, 1)
    else:
        not_empty = (earlier for earlier in reversed(before) if earlier.num_rows)
        previous = next(not_empty, None)
        if previous is None:
            return False
        last = previous.slice(previous.num_rows - 1, 1)
    if (
        last.column(PARTITION_COLUMN)[0] != batch.column(PARTITION_COLUMN)[index]
        or last.column(CHANGE_TYPE)[0].as_py() != DELETE
    ):
        return False
    order = last.column(ORDER)[0]
    return bool(
        order.is_valid
        and order == batch.column(ORDER)[index]
        and last.column(TRANSACTION)[0] == batch.column(TRANSACTION)[index]
    )


def _check_nothing_missed(
    log: Log, topic: str, checkpoint: SinkCheckpoint, earliest: Mapping[int, int]
) -> None:
    """Raise TargetMismatch if rows that the target has not applied were removed by retention, or
    tombstones by compaction.
    """
    fix = (
        "choose another target with table=… (--table …): it gets what the topic has now."
        " --start-over does that in this target, and removes the rows that it has now first."
    )
    for partition, position in checkpoint.positions.items():
        if position < earliest.get(partition, 0):
            raise TargetMismatch(
                f"The target is at offset {position} of {topic}[{partition}], and retention has"
                f" removed what follows: the earliest kept is {earliest[partition]}.",
                fix=fix,
            )
    info = log.topic(topic)
    is_compacted = info.compact or info.history_us is not None
    away_us = time.time_ns() // 1000 - checkpoint.at_us
    if not is_compacted or not checkpoint.positions or away_us <= info.tombstone_us:
        return
    whole_from = log.whole_from(topic)
    if any(
        position < whole_from.get(partition, 0)
        for partition, position in checkpoint.positions.items()
    ):
        raise TargetMismatch(
            f"The target has not followed {topic!r} for longer than its tombstones are kept: it"
            " may have missed deletes.",
            fix=fix,
        )
