"""Rows made ready for a commit, outside any lock: which partition each goes to, and the frames they are stored as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.errors import BadPartition, InputError
from headrace.log.api import HEADERS_COLUMN, Headers, Partitioner, Rows
from headrace.log.file.draft import PreparedRows
from headrace.log.file.frame import CONTROL, Frame, FrameHeader, decode_batch, encode_rows
from headrace.log.file.state import TopicState
from headrace.log.keys import partitions_by_key
from headrace.log.rows import check_changes, to_batch, with_headers


class PartitionChooser:
    """Where rows go: a partition named by the user, a function of theirs, the key, or each in turn."""

    def __init__(self, partitioner: Partitioner | None = None) -> None:
        self.partitioner = partitioner
        self._turn = 0

    def choose(self, batch: pa.RecordBatch, topic: TopicState, partition: int | None) -> npt.NDArray[np.int32] | int:
        count = len(topic.partitions)
        if partition is not None:
            if not 0 <= partition < count:
                raise BadPartition(f"The topic {topic.name!r} has no partition {partition}.", fix=f"name one from 0 to {count - 1}.")
            return partition
        if count == 1:
            return 0
        if self.partitioner is not None:
            return self._asked(batch, topic, count)
        if topic.info.key:
            chosen = partitions_by_key(batch, topic.info.key, count)
            return int(chosen[0]) if len(chosen) == 1 else chosen
        first, self._turn = self._turn, self._turn + batch.num_rows
        return first % count if batch.num_rows == 1 else ((first + np.arange(batch.num_rows)) % count).astype(np.int32)

    def _asked(self, batch: pa.RecordBatch, topic: TopicState, count: int) -> npt.NDArray[np.int32]:
        chosen = np.asarray(self.partitioner(batch, count), dtype=np.int32)  # type: ignore[misc]
        if chosen.shape != (batch.num_rows,) or (len(chosen) and not 0 <= chosen.min() <= chosen.max() < count):
            raise BadPartition(
                f"The partitioner for {topic.name!r} must give one number from 0 to {count - 1} for each of {batch.num_rows} rows; it gave {chosen!r}.",
                fix="return an array of partition numbers as long as the batch.",
            )
        return chosen


def rows_to_batch(rows: Rows, topic: TopicState, headers: Headers | None) -> pa.RecordBatch:
    """Check rows against a topic; on a table's topic each says what kind of change it is."""
    batch = to_batch(rows, topic.info.arrow_schema, topic=topic.name)
    if topic.info.is_table:
        check_changes(batch, topic=topic.name)
    return with_headers(batch, headers)


def prepare(topic: TopicState, batch: pa.RecordBatch, partitions: npt.NDArray[np.int32] | int) -> PreparedRows:
    """Frames by partition; the order of a partition's rows is the batch's."""
    compression = topic.info.compression
    frames = {number: list(encode_rows(part, compression=compression)) for number, part in split(batch, partitions)}
    return PreparedRows(topic.name, topic.directory, topic.settings["ddl"], len(topic.partitions), frames)


def prepare_control(topic: TopicState, partition: int, frame: Frame) -> PreparedRows:
    return PreparedRows(topic.name, topic.directory, topic.settings["ddl"], len(topic.partitions), {partition: [frame]})


def split(batch: pa.RecordBatch, partitions: npt.NDArray[np.int32] | int) -> Sequence[tuple[int, pa.RecordBatch]]:
    if not batch.num_rows:
        return []
    if isinstance(partitions, int):
        return [(partitions, batch)]
    order = np.argsort(partitions, kind="stable")
    in_order = partitions[order]
    numbers, firsts = np.unique(in_order, return_index=True)
    taken = batch.take(pa.array(order))
    stops = [*firsts[1:], len(order)]
    return [(int(number), taken.slice(int(a), int(b) - int(a))) for number, a, b in zip(numbers, firsts, stops, strict=True)]


def label(rows: PreparedRows, *, producer: int, epoch: int, sequence: int) -> None:
    """Write into each frame who sent it, so that a repeat can be found again."""
    for frames in rows.frames.values():
        for frame in frames:
            frame.producer, frame.epoch, frame.sequence = producer, epoch, sequence


def refit(rows: PreparedRows, old: pa.Schema, topic: TopicState, chooser: PartitionChooser) -> PreparedRows:
    """Prepare rows again for a topic that got columns or partitions after they were first prepared."""
    if topic.name != rows.topic or len(topic.partitions) < rows.partition_count:
        raise InputError(
            f"The topic {rows.topic!r} was deleted while rows for it were on their way.", fix="append them again, if they belong to the new topic."
        )
    fresh = PreparedRows(topic.name, topic.directory, topic.settings["ddl"], len(topic.partitions), {})
    for number, frames in rows.frames.items():
        for frame in frames:
            if frame.kind == CONTROL:
                fresh.frames.setdefault(number, []).append(frame)
                continue
            batch = widened(_decoded(frame, old), topic.info.arrow_schema)
            moved = chooser.choose(batch, topic, None) if topic.info.key and topic.partitions[rows.partition_count :] else number
            for target, part in split(batch, moved):
                again = [
                    replace(new, producer=frame.producer, epoch=frame.epoch, sequence=frame.sequence)
                    for new in encode_rows(part, compression=topic.info.compression)
                ]
                fresh.frames.setdefault(target, []).extend(again)
    return fresh


def _decoded(frame: Frame, schema: pa.Schema) -> pa.RecordBatch:
    header = FrameHeader(frame.kind, frame.flags, frame.body_crc, len(frame.body), frame.count, frame.count, 0, 0, 0, 0, 0, 0, 0)
    return decode_batch(header, memoryview(frame.body), schema)


def widened(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch with a topic's newer columns added as nulls; `_headers` stay last."""
    wanted = list(schema) + ([batch.schema.field(HEADERS_COLUMN)] if HEADERS_COLUMN in batch.schema.names else [])
    arrays = [batch.column(f.name) if f.name in batch.schema.names else pa.nulls(batch.num_rows, f.type) for f in wanted]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(wanted))
