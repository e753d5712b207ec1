"""The embedded log's producer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.columnar.columns import HEADERS_COLUMN
from headrace.errors import BadName, BadRows, DiskFull, FencedError, InputError, ProducerFenced
from headrace.log.api import Producer
from headrace.log.file.commit_draft import Draft, PreparedRows, StaleTopic
from headrace.log.file.segment import (
    CONTROL,
    Frame,
    FrameHeader,
    decode_batch,
    encode_rows,
    producer_hash,
)
from headrace.log.file.state import ProducerState, TopicState
from headrace.log.partitioning import Chooser, Numbers
from headrace.log.rows import check_changes, to_batch, tombstones, upserts, with_headers
from headrace.log.topic_config import check_name
from headrace.log.values import (
    AppendResult,
    Headers,
    OffsetRange,
    Partitioner,
    Rows,
    Staged,
    check_sequence,
)

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle


# Rows made ready for a commit, outside any lock: which partition each goes to, and the frames they
# are stored as.


def rows_to_batch(rows: Rows, topic: TopicState, headers: Headers | None) -> pa.RecordBatch:
    """Check rows against a topic; on a table's topic each says what kind of change it is."""
    batch = to_batch(rows, topic.info.arrow_schema, topic=topic.name)
    if topic.info.is_table:
        check_changes(batch, topic=topic.name)
    return with_headers(batch, headers)


def prepare(topic: TopicState, batch: pa.RecordBatch, partitions: Numbers) -> PreparedRows:
    """Frames by partition; the order of a partition's rows is the batch's."""
    compression = topic.info.compression
    frames = {
        number: list(encode_rows(part, compression=compression))
        for number, part in split(batch, partitions)
    }
    return PreparedRows(
        topic.name, topic.directory, topic.settings["ddl"], len(topic.partitions), frames
    )


def prepare_control(topic: TopicState, partition: int, frame: Frame) -> PreparedRows:
    return PreparedRows(
        topic.name,
        topic.directory,
        topic.settings["ddl"],
        len(topic.partitions),
        {partition: [frame]},
    )


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
    return [
        (int(number), taken.slice(int(a), int(b) - int(a)))
        for number, a, b in zip(numbers, firsts, stops, strict=True)
    ]


def label(rows: PreparedRows, *, producer: int, epoch: int, sequence: int) -> None:
    """Write into each frame who sent it, so that a repeat can be found again."""
    for frames in rows.frames.values():
        for frame in frames:
            frame.producer, frame.epoch, frame.sequence = producer, epoch, sequence


def refit(rows: PreparedRows, old: pa.Schema, topic: TopicState, chooser: Chooser) -> PreparedRows:
    """Prepare rows again for a topic that got columns or partitions after they were first
    prepared.
    """
    if topic.name != rows.topic or len(topic.partitions) < rows.partition_count:
        raise InputError(
            f"The topic {rows.topic!r} was deleted while rows for it were on their way.",
            fix="append them again, if they belong to the new topic.",
        )
    fresh = PreparedRows(
        topic.name, topic.directory, topic.settings["ddl"], len(topic.partitions), {}
    )
    for number, frames in rows.frames.items():
        for frame in frames:
            if frame.kind == CONTROL:
                fresh.frames.setdefault(number, []).append(frame)
                continue
            batch = widened(_decoded(frame, old), topic.info.arrow_schema)
            moved = chooser.partitions(
                topic.info,
                batch,
                None if topic.info.key and topic.partitions[rows.partition_count :] else number,
            )
            for target, part in split(batch, moved):
                again = [
                    replace(
                        new, producer=frame.producer, epoch=frame.epoch, sequence=frame.sequence
                    )
                    for new in encode_rows(part, compression=topic.info.compression)
                ]
                fresh.frames.setdefault(target, []).extend(again)
    return fresh


def _decoded(frame: Frame, schema: pa.Schema) -> pa.RecordBatch:
    header = FrameHeader(
        frame.kind,
        frame.flags,
        frame.body_crc,
        len(frame.body),
        frame.count,
        frame.count,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    )
    return decode_batch(header, memoryview(frame.body), schema)


def widened(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch with a topic's newer columns added as nulls; `_headers` stay last."""
    wanted = list(schema) + (
        [batch.schema.field(HEADERS_COLUMN)] if HEADERS_COLUMN in batch.schema.names else []
    )
    arrays = [
        batch.column(f.name) if f.name in batch.schema.names else pa.nulls(batch.num_rows, f.type)
        for f in wanted
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(wanted))


MAX_BYTES_A_COMMIT = 8 << 20
"""A larger append is staged first, so that it does not hold the log's lock while it is written."""


class FileProducer(Producer):
    def __init__(
        self, log: LogHandle, topic: str, id: str | None, partitioner: Partitioner | None
    ) -> None:
        self.log, self.topic, self.id = log, topic, id
        self._chooser = Chooser(partitioner)
        self._topic: TopicState = log.topic_state(topic)
        self._last = -1
        self._turn = (
            Lock()
        )  # two threads must not use one number: the later one would be taken for a repeat
        self.epoch = 0
        if id is not None:
            check_name(id, what="producer id", error=BadName)
            self._name = f"{topic}\0{id}"
            self._hash = producer_hash(topic, id)
            self.epoch, self._last = log.committer.submit(self._register)
        self._closed = False

    def _register(self, draft: Draft) -> tuple[int, int]:
        """Take the id over: an older producer with it is refused from now on."""
        draft.state.topic(self.topic)
        known = draft.state.producers.get(self._name) or ProducerState()
        epoch = known.epoch + 1
        draft.do("epoch", "producer", self._name, epoch)
        return epoch, known.last

    @property
    def last_sequence(self) -> int:
        return self._last

    def append(
        self,
        rows: Rows,
        *,
        sequence: int | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> AppendResult:
        return self._store(self._checked(rows, headers), sequence, partition)

    def _checked(self, rows: Rows, headers: Headers | None) -> pa.RecordBatch:
        """Rows are checked against the topic as we know it; before they are refused, as it is
        now.
        """
        if isinstance(rows, Iterator):  # it can be gone through only once
            rows = list(rows)
        try:
            return rows_to_batch(rows, self._topic, headers)
        except BadRows:
            self._topic = self.log.topic_state(self.topic)
            return rows_to_batch(rows, self._topic, headers)

    def upsert(
        self, rows: Rows, *, sequence: int | None = None, headers: Headers | None = None
    ) -> AppendResult:
        self._check_table("upsert")
        self._topic = self.log.topic_state(self.topic)
        batch = upserts(rows, self._topic.info.arrow_schema, topic=self.topic)
        return self._store(with_headers(batch, headers), sequence, None)

    def delete(self, keys: Any, *, sequence: int | None = None) -> AppendResult:
        self._check_table("delete")
        info = self._topic.info
        return self._store(
            tombstones(keys, info.arrow_schema, info.key, topic=self.topic), sequence, None
        )

    def _check_table(self, what: str) -> None:
        if not self._topic.info.is_table:
            raise InputError(
                f"{what} needs a table, and {self.topic!r} is a plain topic.",
                fix="use append, or create it with create_table.",
            )

    def _store(
        self, batch: pa.RecordBatch, sequence: int | None, partition: int | None
    ) -> AppendResult:
        if self.id is None:
            return self._store_next(batch, sequence, partition)
        with self._turn:
            return self._store_next(batch, sequence, partition)

    def _store_next(
        self, batch: pa.RecordBatch, sequence: int | None, partition: int | None
    ) -> AppendResult:
        self._check_usable(sequence)
        prepared = prepare(
            self._topic, batch, self._chooser.partitions(self._topic.info, batch, partition)
        )
        if self.id is not None:
            sequence = self._last + 1 if sequence is None else sequence
            label(prepared, producer=self._hash, epoch=self.epoch, sequence=sequence)
        while True:
            try:
                position = self._commit(prepared, sequence)
                break
            except StaleTopic:
                old, self._topic = self._topic, self.log.topic_state(self.topic)
                prepared = refit(prepared, old.info.arrow_schema, self._topic, self._chooser)
        if sequence is not None:
            self._last = max(self._last, sequence)
        return position

    def _check_usable(self, sequence: int | None) -> None:
        if self._closed:
            raise InputError(
                f"This producer of {self.topic!r} was closed.",
                fix="open another one with log.producer(...).",
            )
        check_sequence(sequence, topic=self.topic, id=self.id)

    def _commit(self, rows: PreparedRows, sequence: int | None) -> AppendResult:
        staged = self.log.stage_prepared(rows) if rows.size > MAX_BYTES_A_COMMIT else None

        def decide(draft: Draft) -> AppendResult:
            draft.check_fresh(rows)
            if sequence is not None:
                repeated = self._repeated(draft, sequence)
                if repeated is not None:
                    return repeated
            if staged is None:
                draft.append(rows)
            else:
                self.log.adopt_into(draft, staged)
            if sequence is not None and draft.operations:
                places = {
                    str(p): [r.start, r.stop] for p, r in draft.offsets.get(self.topic, {}).items()
                }
                draft.do("sequence", self._name, sequence, places)
            return draft.position()

        try:
            position = self.log.committer.submit(decide, size=rows.size)
        except (
            InputError,
            FencedError,
            StaleTopic,
            DiskFull,
        ):  # refused; otherwise the staged rows may yet be needed
            self._discard(staged)
            raise
        self._discard(staged)
        if position.duplicate and not position.offsets:
            return self.log.find_repeated(self.topic, self._hash, sequence or 0)
        return position

    def _discard(self, staged: Staged | None) -> None:
        if staged is not None:
            self.log.discard_staged(staged)

    def _repeated(self, draft: Draft, sequence: int) -> AppendResult | None:
        """Whether a number was stored already. Refuses an older producer of the same id."""
        known = draft.state.producers.get(self._name) or ProducerState()
        if known.epoch != self.epoch:
            raise ProducerFenced(
                f"The producer {self.id!r} of {self.topic!r} was opened again elsewhere (epoch"
                f" {known.epoch}, this one has {self.epoch}).",
                fix="stop this one; if it should go on, open it again and look at last_sequence.",
            )
        if sequence > known.last:
            return None
        for number, commit, places in known.recent:
            if number == sequence:
                offsets = {int(p): OffsetRange(*place) for p, place in places.items()}
                return AppendResult({self.topic: offsets}, commit, duplicate=True)
        return AppendResult({}, None, duplicate=True)

    def close(self) -> None:
        self._closed = True
