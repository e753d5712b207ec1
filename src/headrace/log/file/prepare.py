"""Rows made ready for a commit, outside any lock: which partition each goes to, and the frames they are stored as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from headrace.errors import InputError
from headrace.log.api import HEADERS_COLUMN, Headers, Rows
from headrace.log.file.draft import PreparedRows
from headrace.log.file.frame import CONTROL, Frame, FrameHeader, decode_batch, encode_rows
from headrace.log.file.state import TopicState
from headrace.log.partitioning import Chooser, Numbers
from headrace.log.rows import check_changes, to_batch, with_headers


def rows_to_batch(rows: Rows, topic: TopicState, headers: Headers | None) -> pa.RecordBatch:
    """Check rows against a topic; on a table's topic each says what kind of change it is."""
    batch = to_batch(rows, topic.info.arrow_schema, topic=topic.name)
    if topic.info.is_table:
        check_changes(batch, topic=topic.name)
    return with_headers(batch, headers)


def prepare(topic: TopicState, batch: pa.RecordBatch, partitions: Numbers) -> PreparedRows:
    """Frames by partition; the order of a partition's rows is the batch's."""
    compression = topic.info.compression
    frames = {number: list(encode_rows(part, compression=compression)) for number, part in split(batch, partitions)}
    return PreparedRows(topic.name, topic.directory, topic.settings["ddl"], len(topic.partitions), frames)


def prepare_control(topic: TopicState, partition: int, frame: Frame) -> PreparedRows:
    return PreparedRows(topic.name, topic.directory, topic.settings["ddl"], len(topic.partitions), {partition: [frame]})


def split(batch: pa.RecordBatch, partitions: Numbers) -> Sequence[tuple[int, pa.RecordBatch]]:
    if not batch.num_rows:
        return []
    if batch.num_rows == 1 or (partitions == partitions[0]).all():
        return [(int(partitions[0]), batch)]
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


def refit(rows: PreparedRows, old: pa.Schema, topic: TopicState, chooser: Chooser) -> PreparedRows:
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
            moved = chooser.partitions(topic.info, batch, None if topic.info.key and topic.partitions[rows.partition_count :] else number)
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
