"""A topic, read on from the places that a target has reached, in pieces of a bounded size."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from headrace.cdc.source import ORDER, TRANSACTION
from headrace.errors import TargetMismatch
from headrace.log.api import CHANGE_TYPE, DELETE, OFFSET_COLUMN, PARTITION_COLUMN, Log
from headrace.sinks.applied import Applied

MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
    """Rows between two places of a topic. `fresh` are partitions of which the target knows nothing yet, `behind` is how many offsets there are after it."""

    rows: list[pa.RecordBatch]
    start: Mapping[int, int]
    stop: Mapping[int, int]
    fresh: frozenset[int]
    behind: int


class Following:
    """Where a target is in its topic, and what comes next.

    A piece ends where the log was at one moment, if that is not too far: so a transaction that is not larger than a batch is applied as a whole by a sink that keeps up.
    """

    def __init__(self, log: Log, topic: str, applied: Applied) -> None:
        self.log, self.topic = log, topic
        first = log.start_offsets(topic)
        _check_kept(log, topic, applied, first)
        self.positions = {partition: applied.positions.get(partition, start) for partition, start in first.items()}
        self._known = set(applied.positions)
        self._turn = 0

    def next(self, most_rows: int) -> Piece | None:
        """At most about so many rows; nothing, if there is nothing new."""
        ends = self.log.snapshot([self.topic])[self.topic]
        for partition in ends.keys() - self.positions.keys():  # the topic was given more partitions
            self.positions[partition] = 0
        start = {partition: self.positions[partition] for partition, end in ends.items() if end > self.positions[partition]}
        if not start:
            return None
        self._turn += 1  # each partition is the first one at times, so that none waits for ever
        turned = sorted(start, key=lambda partition: (partition - self._turn) % len(ends))
        rows, stop = self._read({partition: start[partition] for partition in turned}, ends, most_rows)
        behind = sum(end - stop.get(partition, start.get(partition, end)) for partition, end in ends.items())
        return Piece(rows, {partition: start[partition] for partition in stop}, stop, frozenset(stop.keys() - self._known), behind)

    def _read(self, start: Mapping[int, int], ends: Mapping[int, int], most_rows: int) -> tuple[list[pa.RecordBatch], dict[int, int]]:
        rows: list[pa.RecordBatch] = []
        stop: dict[int, int] = {}
        left_rows, left_bytes = most_rows, MOST_BYTES
        for partition, first in start.items():
            if left_rows <= 0 or left_bytes <= 0:
                break
            stop[partition] = ends[partition]
            for batch in self.log.read(self.topic, partition, first, ends[partition]):
                kept = batch.slice(0, left_rows) if left_rows > 0 and left_bytes > 0 else batch.slice(0, 0)
                if kept.num_rows < batch.num_rows:
                    kept = batch.slice(0, kept.num_rows + belonging(rows, batch, kept.num_rows))
                rows.append(kept)
                left_rows, left_bytes = left_rows - kept.num_rows, left_bytes - kept.nbytes
                if kept.num_rows < batch.num_rows:
                    stop[partition] = batch.column(OFFSET_COLUMN)[kept.num_rows].as_py()
                    break
        return rows, stop

    def advance(self, piece: Piece) -> None:
        self.positions.update(piece.stop)
        self._known.update(piece.stop)


def belonging(before: list[pa.RecordBatch], batch: pa.RecordBatch, count: int) -> int:
    """1 if the row at which a piece would be cut has the same key change to tell of as the one before it: the old row goes, the new one comes, and both go together."""
    if not {ORDER, TRANSACTION, CHANGE_TYPE} <= set(batch.schema.names):
        return 0
    last = batch.slice(count - 1, 1) if count else next((each.slice(each.num_rows - 1, 1) for each in reversed(before) if each.num_rows), None)
    if last is None or last.column(PARTITION_COLUMN)[0] != batch.column(PARTITION_COLUMN)[count] or last.column(CHANGE_TYPE)[0].as_py() != DELETE:
        return 0
    order = last.column(ORDER)[0]
    return int(order.is_valid and order == batch.column(ORDER)[count] and last.column(TRANSACTION)[0] == batch.column(TRANSACTION)[count])


def _check_kept(log: Log, topic: str, applied: Applied, first: Mapping[int, int]) -> None:
    """What the target has not seen must still be there: rows, and the tombstones that compaction removes after a while."""
    fix = "--start-over empties the target, and fills it with what is there now."
    for partition, position in applied.positions.items():
        if position < first.get(partition, 0):
            raise TargetMismatch(
                f"The target is at offset {position} of {topic}[{partition}], and retention has removed what follows: the earliest kept is {first[partition]}.",
                fix=fix,
            )
    info = log.topic(topic)
    away_us = time.time_ns() // 1000 - applied.at_us
    if (info.compact or info.history_us is not None) and applied.positions and away_us > info.tombstone_us:
        whole = log.whole_from(topic)
        if any(position < whole.get(partition, 0) for partition, position in applied.positions.items()):
            raise TargetMismatch(
                f"The target has not followed {topic!r} for longer than its tombstones are kept: it may have missed deletes.", fix=fix
            )
