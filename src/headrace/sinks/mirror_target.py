"""The target `mirror`: a topic of another log with the same rows at the same offsets.

    offset    0    1    2         3    4     …    the topic: 2 was removed by compaction,
              a    b         (control) c          3 is a control record of a pipeline
    offset    0    1    2         3    4     …    the mirror: 2 is left out
              a    b         (control) c

A commit is one transaction of the other log: rows, control records, offsets that are left out,
and the checkpoint, which is a note there. So consumers, sinks and pipelines can go on in the mirror
with the offsets that they have committed. Rows keep partition, order and headers; their append
times are those of the mirror.

Nobody else may append to the mirror, since that would move its offsets. Before and after each
commit they are compared with the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.columnar.columns import (
    HEADERS_COLUMN,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TIMESTAMP_COLUMN,
)
from headrace.errors import (
    HeadraceError,
    InputError,
    NoteConflict,
    SinkFenced,
    TargetMismatch,
    TransactionFenced,
)
from headrace.log import open_log
from headrace.log.api import Log, Transaction
from headrace.log.values import TopicInfo
from headrace.sinks.base import Refusal, SinkSpec, Target
from headrace.sinks.batch import SinkBatch, TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint


class MirrorTarget(Target):
    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        super().__init__(sink, shape)
        self._mirror: Log = open_log(sink.options["log"])
        self._note = f"mirror.{self.table}"
        self._transaction: Transaction | None = None
        self._stored_text: str | None = None
        self._next_text: str | None = None
        self._batch: SinkBatch | None = None
        self._clears = False

    def close(self) -> None:
        self._mirror.close()

    # Preparing

    def prepare(self) -> None:
        """Create the topic, or give it the columns and partitions that the other one has got."""
        source = self.log.topic(self.shape.topic)
        if self._mirror.address == self.log.address and self.table == source.name:
            raise InputError(
                f"The topic {source.name!r} cannot be its own mirror.",
                fix="choose another log, or another name with table=… (--table …).",
            )
        if self.table not in self._mirror.topics():
            if not self.sink.create:
                raise TargetMismatch(
                    f"There is no topic {self.table!r} in {self._mirror.address}.",
                    fix="leave out create=False (--no-create), so that the sink creates it.",
                )
            self._create(source)

    def begin(
        self, owner: int, *, resume: bool = False, start_over: bool = False
    ) -> SinkCheckpoint:
        checkpoint = super().begin(owner, resume=resume, start_over=start_over)
        self._follow(self.log.topic(self.shape.topic))
        return checkpoint

    def _follow(self, source: TopicInfo) -> None:
        """Change the mirror as the topic was changed, as far as that loses nothing there: more
        columns at the end, and partitions.
        """
        found = self._mirror.topic(self.table)
        if found.is_table != source.is_table or found.key != source.key:
            raise TargetMismatch(
                f"The topic {self.table!r} in {self._mirror.address} has another key, or is"
                f" {'a' if found.is_table else 'no'} table.",
                fix="choose another name with table=… (--table …).",
            )
        if self.sink.create and source.schema.startswith(f"{found.schema}, "):
            added = source.schema.removeprefix(f"{found.schema}, ")
            self._mirror.alter_topic(self.table, add_columns=added)
        if self.sink.create and found.partitions < source.partitions:
            self._mirror.alter_topic(
                self.table, partitions=source.partitions, allow_moving_keys=True
            )
        found = self._mirror.topic(self.table)
        if found.schema != source.schema or found.partitions != source.partitions:
            raise TargetMismatch(
                f"The mirror {self.table!r} in {self._mirror.address} has the columns"
                f" {found.schema} in {found.partitions} partitions, and the topic {source.schema}"
                f" in {source.partitions}.",
                fix="change it there as the topic was changed (headrace topic alter).",
            )

    def _create(self, source: TopicInfo) -> None:
        def text(duration_us: int | None) -> str | None:
            return None if duration_us is None else f"{duration_us} microseconds"

        settings: dict[str, Any] = {
            "key": list(source.key) or None,
            "partitions": source.partitions,
            "tombstones": text(source.tombstone_us),
            "segment_bytes": source.segment_bytes,
            "segment_age": text(source.segment_us),
            "compression": source.compression,
        }
        if source.is_table:
            self._mirror.create_table(
                self.table, source.schema, history=text(source.history_us), **settings
            )
        else:
            self._mirror.create_topic(
                self.table,
                source.schema,
                retention=text(source.retention_us),
                retention_bytes=source.retention_bytes,
                compact=source.compact,
                **settings,
            )

    # A commit

    @contextmanager
    def atomic(self) -> Iterator[None]:
        self._stored_text = self._next_text = self._mirror.note(self._note)
        self._batch, self._clears = None, False
        yield
        if self._next_text != self._stored_text:
            self._commit()

    def read_checkpoint(self) -> SinkCheckpoint | None:
        if self._stored_text is None:
            self._check_empty()
            return None
        checkpoint = SinkCheckpoint.from_json(self._stored_text)
        ends = self._ends()
        if not any(ends.values()) and any(checkpoint.positions.values()):
            return None  # the mirror was deleted, and created again
        return checkpoint

    def _ends(self) -> dict[int, int]:
        return self._mirror.end_offsets(self.table)

    def _check_empty(self) -> None:
        if any(self._ends().values()):
            raise TargetMismatch(
                f"The topic {self.table!r} in {self._mirror.address} has rows that this sink did"
                " not write.",
                fix="choose another name with table=… (--table …), or delete that topic.",
            )

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        self._next_text = checkpoint.to_json()

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        self._batch = batch
        return []

    def clear(self) -> None:
        self._clears = True

    def _commit(self) -> None:
        if self._clears:
            source = self.log.topic(self.shape.topic)
            self._mirror.delete_topic(self.table)
            self._create(source)
        if self._batch is not None:
            new = self._batch.new_partitions
            starts = self._batch.start.items()
            self._check_ends({part: 0 if part in new else start for part, start in starts})
        if self._transaction is None:
            self._transaction = self._mirror.transaction(self._note)
        else:
            self._transaction = self._transaction.next()
        try:
            with self._transaction as transaction:
                if self._batch is not None:
                    for partition, stop in sorted(self._batch.stop.items()):
                        self._copy(transaction, partition, self._batch.start[partition], stop)
                transaction.set_note(self._note, self._next_text, expect=self._stored_text)
        except (NoteConflict, TransactionFenced) as error:
            raise SinkFenced(
                f"Another process writes to the mirror {self.table!r}.",
                fix="nothing, if that was intended: it goes on where this process stopped.",
            ) from error
        if self._batch is not None:
            self._check_ends(self._batch.stop)

    def _check_ends(self, expected: Mapping[int, int]) -> None:
        ends = self._ends()
        for partition, offset in expected.items():
            if ends[partition] != offset:
                raise TargetMismatch(
                    f"The mirror {self.table!r}[{partition}] in {self._mirror.address} ends at"
                    f" offset {ends[partition]}, and not at {offset}: somebody else appends to it.",
                    fix="stop that program. --start-over deletes the mirror, and fills it again.",
                )

    def _copy(self, transaction: Transaction, partition: int, start: int, stop: int) -> None:
        """Copy what is between two offsets, and leave out what is not there any more."""
        at = self._ends()[partition]

        def go_to(offset: int) -> None:
            nonlocal at
            transaction.skip_offsets(self.table, partition, offset - at)
            at = offset

        controls = iter(self.log.read_control(self.shape.topic, partition, start, stop))
        control = next(controls, None)
        for batch in self.log.read(self.shape.topic, partition, start, stop, headers=True):
            for rows in _runs(batch):
                first = rows.column(OFFSET_COLUMN)[0].as_py()
                while control is not None and control.offset < first:
                    go_to(control.offset)
                    transaction.append_control(self.table, partition, control.payload)
                    at, control = at + 1, next(controls, None)
                go_to(first)
                self._append(transaction, partition, rows)
                at += rows.num_rows
        while control is not None:
            go_to(control.offset)
            transaction.append_control(self.table, partition, control.payload)
            at, control = at + 1, next(controls, None)
        go_to(stop)

    def _append(self, transaction: Transaction, partition: int, rows: pa.RecordBatch) -> None:
        own = rows.drop_columns([PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN, HEADERS_COLUMN])
        headers = rows.column(HEADERS_COLUMN)
        given = None
        if headers.null_count < len(headers):
            given = [
                None if pairs is None else [(pair["key"], pair["value"]) for pair in pairs]
                for pairs in headers.to_pylist()
            ]
        transaction.append(self.table, own, headers=given, partition=partition)

    # Reading back

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        text = self._mirror.note(self._note)
        if text is None:
            return None, iter(())
        checkpoint = SinkCheckpoint.from_json(text)
        return checkpoint, self._rows(checkpoint)

    def _rows(self, checkpoint: SinkCheckpoint) -> Iterator[pa.Table]:
        for partition, stop in sorted(checkpoint.positions.items()):
            first = self._mirror.start_offsets(self.table)[partition]
            try:
                for batch in self._mirror.read(self.table, partition, first, stop):
                    yield pa.Table.from_batches([batch]).select(self.shape.schema.names)
            except HeadraceError as error:
                self.unreadable.add(f"partition {partition} of the mirror: {error.message}")

    def lookup(self, keys: pa.Table) -> pa.Table:  # noqa: ARG002 - rows are copied as they are
        return self.shape.schema.empty_table()


def _runs(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the parts of a batch whose offsets follow each other."""
    offsets = np.asarray(batch.column(OFFSET_COLUMN))
    bounds = [0, *(np.flatnonzero(np.diff(offsets) != 1) + 1), len(offsets)]
    for start, stop in pairwise(bounds):
        if stop > start:
            yield batch.slice(int(start), int(stop - start))
