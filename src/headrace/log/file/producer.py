"""The embedded log's producer, and how rows are prepared for a commit.

Rows are checked, partitioned and encoded into frames outside any lock (`rows_to_batch`, `prepare`).
Under the lock only offsets are given out. If the topic has changed in between, `refit` prepares the
rows again. Transactions, queues and staging use the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.columnar.columns import HEADERS_COLUMN
from headrace.errors import BadName, BadRows, DiskFull, FencedError, InputError, ProducerFenced
from headrace.log.api import Producer
from headrace.log.file.commit_draft import CommitDraft, PreparedRows, StaleTopic
from headrace.log.file.segment import (
    CONTROL,
    Frame,
    decode_frame,
    encode_rows,
    producer_hash,
    stored_column,
)
from headrace.log.file.state import ProducerState, TopicState, salvaged_name
from headrace.log.partitioning import PartitionAssigner, PartitionNumbers
from headrace.log.rows import (
    check_changes,
    dropped_value,
    to_batch,
    tombstones,
    upserts,
    with_headers,
)
from headrace.log.sequences import SequenceIndex, out_of_order
from headrace.log.values import (
    MAX_SEQUENCE,
    AppendResult,
    Headers,
    OffsetRange,
    Partitioner,
    Rows,
    TopicInfo,
    check_sequence,
)
from headrace.names import check_name

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle


# Preparing rows


def rows_to_batch(rows: Rows, topic: TopicState, headers: Headers | None) -> pa.RecordBatch:
    """Rows as a batch of a topic's schema, with `_headers` if there are any. Raises BadRows."""
    info = topic.info
    batch = to_batch(rows, info.arrow_schema, topic=info.name, history=info.schema_history)
    if topic.info.is_table:
        check_changes(batch, topic=topic.name)
    return with_headers(batch, headers)


def prepare(topic: TopicState, batch: pa.RecordBatch, partitions: PartitionNumbers) -> PreparedRows:
    """Encode a batch into frames by partition. Rows of a partition stay in the batch's order."""
    frames = {
        number: list(encode_rows(part, compression=topic.info.compression))
        for number, part in split(batch, partitions)
    }
    return PreparedRows.of(topic, frames)


def prepare_control(topic: TopicState, partition: int, frame: Frame) -> PreparedRows:
    """A control record's frame, prepared for a commit."""
    return PreparedRows.of(topic, {partition: [frame]})


def split(
    batch: pa.RecordBatch, partitions: PartitionNumbers
) -> Sequence[tuple[int, pa.RecordBatch]]:
    """(partition, rows) for each partition that a batch has rows for."""
    if not batch.num_rows:
        return []
    if batch.num_rows == 1 or (partitions == partitions[0]).all():
        return [(int(partitions[0]), batch)]
    order = np.argsort(partitions, kind="stable")
    numbers, starts = np.unique(partitions[order], return_index=True)
    stops = [*starts[1:], len(order)]
    by_partition = batch.take(pa.array(order))
    return [
        (int(number), by_partition.slice(int(start), int(stop) - int(start)))
        for number, start, stop in zip(numbers, starts, stops, strict=True)
    ]


def refit(
    rows: PreparedRows, old: pa.Schema, topic: TopicState, assigner: PartitionAssigner
) -> PreparedRows:
    """Prepare rows again for a topic whose columns or partitions changed after they were prepared.
    They get the columns that they would be read with, had they been stored before the change.
    """
    if topic.name != rows.topic or len(topic.partitions) < rows.partition_count:
        raise InputError(
            f"The topic {rows.topic!r} was deleted while rows for it were on their way.",
            fix="append them again, if they belong to the new topic.",
        )
    has_more_partitions = len(topic.partitions) > rows.partition_count
    frames_by_partition: dict[int, list[Frame]] = {}
    for number, frames in rows.frames.items():
        for frame in frames:
            if frame.kind == CONTROL:
                frames_by_partition.setdefault(number, []).append(frame)
                continue
            batch = _with_present_columns(decode_frame(frame, old), topic.info)
            partition = None if topic.info.key and has_more_partitions else number
            numbers = assigner.assign(topic.info, batch, partition)
            for target, part in split(batch, numbers):
                frames_by_partition.setdefault(target, []).extend(
                    replace(
                        encoded,
                        producer=frame.producer,
                        epoch=frame.epoch,
                        sequence=frame.sequence,
                    )
                    for encoded in encode_rows(part, compression=topic.info.compression)
                )
    return PreparedRows.of(topic, frames_by_partition)


def _with_present_columns(batch: pa.RecordBatch, info: TopicInfo) -> pa.RecordBatch:
    """A batch of an older schema with a topic's present columns; `_headers` stays last. Raises
    BadRows if it has values in a column that was dropped meanwhile.
    """
    for name in batch.schema.names:
        if info.schema_history.is_dropped(name) and batch.column(name).null_count < batch.num_rows:
            raise dropped_value(name, f"Rows for {info.name}")
    fields = list(info.arrow_schema)
    if HEADERS_COLUMN in batch.schema.names:
        fields.append(batch.schema.field(HEADERS_COLUMN))
    arrays = [stored_column(batch, column, column.name, info.schema_history) for column in fields]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


# The producer

MAX_COMMIT_BYTES = 8 << 20
"""A larger append is staged first, so that it does not hold the log's lock while it is written."""


class FileProducer(Producer):
    """Appends to one topic of the embedded log."""

    def __init__(
        self, log: LogHandle, topic: TopicState, id: str | None, partitioner: Partitioner | None
    ) -> None:
        self.log = log
        self.topic = topic.name
        self.id = id
        self.epoch = 0
        self._topic = topic
        self._name = f"{topic.name}\0{id}"
        self._hash = 0 if id is None else producer_hash(topic.name, id)
        self._assigner = PartitionAssigner(partitioner)
        self._last_sequence = -1
        self._index = SequenceIndex(MAX_SEQUENCE)  # of numbers that were stored long ago
        # Two threads must not use one sequence number: the later would count as a duplicate.
        self._sequence_guard = Lock() if id is not None else nullcontext()
        self._closed = False

    @classmethod
    def open(
        cls, log: LogHandle, topic: str, id: str | None, partitioner: Partitioner | None
    ) -> FileProducer:
        """Open a producer. One with an id fences older producers of the id, and continues after
        their last sequence number.
        """
        producer = cls(log, log.topic_state(topic), id, partitioner)
        if id is not None:
            check_name(id, what="producer id", error=BadName)

            def register(draft: CommitDraft) -> tuple[int, int]:
                draft.state.topic(topic)
                salvaged = salvaged_name(topic, producer._hash)
                if salvaged in draft.state.producers:
                    draft.do("inherit", producer._name, salvaged)
                known = draft.state.producers.get(producer._name) or ProducerState()
                epoch = known.epoch + 1
                draft.do("epoch", "producer", producer._name, epoch)
                return epoch, known.last

            producer.epoch, producer._last_sequence = log.committer.submit(register)
        return producer

    @property
    def last_sequence(self) -> int:
        return self._last_sequence

    def append(
        self,
        rows: Rows,
        *,
        sequence: int | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> AppendResult:
        if isinstance(rows, Iterator):  # it may have to be converted twice
            rows = list(rows)
        try:
            batch = rows_to_batch(rows, self._topic, headers)
        except BadRows:  # they may fit the topic as it is by now
            self._topic = self.log.topic_state(self.topic)
            batch = rows_to_batch(rows, self._topic, headers)
        return self._store(batch, sequence, partition)

    def upsert(
        self, rows: Rows, *, sequence: int | None = None, headers: Headers | None = None
    ) -> AppendResult:
        self._check_table("upsert")
        self._topic = self.log.topic_state(self.topic)
        info = self._topic.info
        batch = upserts(rows, info.arrow_schema, topic=self.topic, history=info.schema_history)
        return self._store(with_headers(batch, headers), sequence, None)

    def delete(self, keys: Any, *, sequence: int | None = None) -> AppendResult:
        self._check_table("delete")
        info = self._topic.info
        batch = tombstones(keys, info.arrow_schema, info.key, topic=self.topic)
        return self._store(batch, sequence, None)

    def _check_table(self, what: str) -> None:
        if not self._topic.info.is_table:
            raise InputError(
                f"{what} needs a table, and {self.topic!r} is a plain topic.",
                fix="use append, or create it with create_table.",
            )

    def _store(
        self, batch: pa.RecordBatch, sequence: int | None, partition: int | None
    ) -> AppendResult:
        with self._sequence_guard:
            if self._closed:
                raise InputError(
                    f"This producer of {self.topic!r} was closed.",
                    fix="open another one with log.producer(...).",
                )
            check_sequence(sequence, topic=self.topic, id=self.id)
            numbers = self._assigner.assign(self._topic.info, batch, partition)
            prepared = prepare(self._topic, batch, numbers)
            if self.id is not None:
                sequence = self._last_sequence + 1 if sequence is None else sequence
                for frames in prepared.frames.values():
                    for frame in frames:
                        frame.producer, frame.epoch = self._hash, self.epoch
                        frame.sequence = sequence
            while True:
                try:
                    result = self._commit(prepared, sequence)
                    break
                except StaleTopic:
                    old, self._topic = self._topic, self.log.topic_state(self.topic)
                    prepared = refit(prepared, old.info.arrow_schema, self._topic, self._assigner)
            if sequence is not None and prepared.frames:  # nothing leaves no number behind
                self._last_sequence = max(self._last_sequence, sequence)
            return result

    def _commit(self, rows: PreparedRows, sequence: int | None) -> AppendResult:
        staged = self.log.stage_prepared(rows) if rows.size > MAX_COMMIT_BYTES else None

        def decide(draft: CommitDraft) -> AppendResult:
            draft.check_fresh(rows)
            if sequence is not None:
                self._check_epoch(draft)
                duplicate = self._find_duplicate(draft, sequence) if rows.frames else None
                if duplicate is not None:
                    return duplicate
            if staged is None:
                draft.append(rows)
            else:
                self.log.adopt_into(draft, staged)
            if sequence is not None and draft.operations:
                offsets = draft.offsets.get(self.topic, {})
                ranges = {str(number): [span.start, span.stop] for number, span in offsets.items()}
                draft.do("sequence", self._name, sequence, ranges)
            return draft.result()

        try:
            result = self.log.committer.submit(decide, size=rows.size)
        except (InputError, FencedError, StaleTopic, DiskFull):
            # The commit was refused. After any other error it may have happened, and the staged
            # rows may still be needed.
            if staged is not None:
                self.log.discard_staged(staged)
            raise
        if staged is not None:
            self.log.discard_staged(staged)
        if sequence is not None and result.duplicate and not result.offsets:
            return self._find_in_frames(sequence)
        return result

    def _check_epoch(self, draft: CommitDraft) -> None:
        """Raise ProducerFenced if the id was opened again elsewhere."""
        known = draft.state.producers.get(self._name) or ProducerState()
        if known.epoch != self.epoch:
            raise ProducerFenced(
                f"The producer {self.id!r} of {self.topic!r} was opened again elsewhere (epoch"
                f" {known.epoch}, this one has {self.epoch}).",
                fix="stop this one; if it should go on, open it again and look at last_sequence.",
            )

    def _find_duplicate(self, draft: CommitDraft, sequence: int) -> AppendResult | None:
        """The result of an append whose sequence number is already stored; None for a new one. Its
        offsets are empty if the frames must be asked for them, or for whether it was stored.

        Raises:
            OutOfOrder: The number is below the newest one and was not stored.
        """
        known = draft.state.producers.get(self._name) or ProducerState()
        if sequence > known.last:
            return None
        if known.stored.status(sequence) is False:
            raise out_of_order(self.topic, self.id, sequence, known.last)
        for number, commit, ranges in known.recent:
            if number == sequence:
                offsets = {int(partition): OffsetRange(*span) for partition, span in ranges.items()}
                return AppendResult({self.topic: offsets}, commit, duplicate=True)
        return AppendResult({}, commit=None, duplicate=True)

    def _find_in_frames(self, sequence: int) -> AppendResult:
        """The result of an append whose sequence number was stored long ago. Whoever repeats one
        usually repeats those behind it too, so what was found is kept.
        """
        known = self.log.store.view().producers.get(self._name) or ProducerState()
        if sequence not in self._index:
            self._index = self.log.index_sequences(self.topic, self._hash, sequence)
            self._index.stop = min(self._index.stop, known.last + 1)  # later ones came since
        offsets = self._index.offsets(sequence)
        if not offsets and not known.stored.status(sequence):
            raise out_of_order(self.topic, self.id, sequence, known.last)
        return AppendResult({self.topic: offsets}, commit=None, duplicate=True)

    def close(self) -> None:
        self._closed = True
