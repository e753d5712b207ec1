"""Targets that cannot store a checkpoint: the receiver of a webhook, a message broker.

Rows are sent at least once, each with an id by which the other side can drop repeats. The
checkpoint is a note of the log. Rows of one partition are sent in the order of the topic. When the
other side goes away in the middle of a batch, the checkpoint is stored behind the rows that it has
taken, so that the sink resumes there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import CHANGE_TYPE, DELETE, INSERT, OFFSET_COLUMN, PARTITION_COLUMN
from headrace.errors import (
    NoteConflict,
    NotSupported,
    SinkFenced,
    TargetRefuses,
    TargetUnavailable,
    TransactionFenced,
)
from headrace.log.api import Transaction
from headrace.sinks.base import (
    OnRefused,
    Refusal,
    RowsRefused,
    SinkSpec,
    Target,
    bisect_refused,
    rows_to_json,
)
from headrace.sinks.batch import OFFSET_COLUMNS, SinkBatch, TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint

UPSERT = "upsert"
MAX_REFUSED_IN_A_ROW = 100
_OFFSET_SCHEMA = pa.schema([(PARTITION_COLUMN, pa.int32()), (OFFSET_COLUMN, pa.int64())])


class OutgoingRow(NamedTuple):
    """A row as it is sent."""

    id: str
    """It does not change when the row is sent again."""
    partition: int
    offset: int
    change: str
    """The kind of change: "upsert", or a change type of a table's topic."""
    json: bytes


class AtLeastOnceTarget(Target):
    """A target whose checkpoint is a note of the log.

    A subclass implements `_post`. `identity` names the target among others of the same topic;
    `request_rows` is the most rows that are posted at a time.
    """

    def __init__(
        self, sink: SinkSpec, shape: TargetShape, identity: str, *, request_rows: int
    ) -> None:
        super().__init__(sink, shape)
        self._request_rows = request_rows
        self._note = f"sync.{identity}.place"
        self._columns = [
            name for name in shape.schema.names if name not in {*OFFSET_COLUMNS, CHANGE_TYPE}
        ]
        self._stored_text: str | None = None
        self._next_text: str | None = None
        self._transaction: Transaction | None = None
        self._refused_in_a_row = 0
        self._failure: TargetUnavailable | None = None
        """What ended the current batch before its end."""
        self._applied_offsets: dict[int, int] = {}

    @abstractmethod
    def _post(self, rows: pa.Table) -> None:
        """Send rows. Raises RowsRefused if none of them was taken, and TargetUnavailable if it is
        unknown which were.
        """

    def prepare(self) -> None:
        """There is nothing to create."""

    # The checkpoint

    @contextmanager
    def atomic(self) -> Iterator[None]:
        self._stored_text = self._next_text = self.log.note(self._note)
        yield
        self._store()

    def _store(self) -> None:
        if self._next_text == self._stored_text:
            return
        if self._transaction is None:
            self._transaction = self.log.transaction(self._note)
        else:
            self._transaction = self._transaction.next()
        try:
            with self._transaction as transaction:
                transaction.set_note(self._note, self._next_text, expect=self._stored_text)
        except (NoteConflict, TransactionFenced) as error:
            raise SinkFenced(
                f"Another process sends to this {self.sink.kind}.",
                fix="nothing, if that was intended: it goes on where this process stopped.",
            ) from error
        self._stored_text = self._next_text

    def read_checkpoint(self) -> SinkCheckpoint | None:
        if self._stored_text is None:
            return None
        return SinkCheckpoint.from_json(self._stored_text)

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        self._next_text = checkpoint.to_json()

    def clear(self) -> None:
        """What was sent cannot be removed: starting over sends all rows again, under the same
        ids.
        """

    # A batch

    def apply(self, batch: SinkBatch, on_refused: OnRefused) -> bool:
        """Send a batch, then store the checkpoint in the log.

        1. Rows are sent until all are taken or refused, or the receiver goes away.
        2. Refused rows become dead letters.
        3. The checkpoint is stored, behind the last row that was taken or refused.
        4. If the receiver went away, that is raised now.
        """
        is_new = super().apply(batch, on_refused)
        if is_new and self._failure is not None:
            raise self._failure
        return is_new

    def applied_offsets(self, batch: SinkBatch) -> Mapping[int, int]:  # noqa: ARG002 - as merged
        return self._applied_offsets

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        """Send one request after the other, until something fails."""
        self._failure = None
        self._applied_offsets = dict(batch.stop)
        refused: list[Refusal] = []
        # Upserts and deletes in the order of partitions and offsets. Of a deleted row only
        # the key is not null.
        upserts = batch.upserts.select(self._columns)
        if CHANGE_TYPE in batch.upserts.column_names:
            change = batch.upserts[CHANGE_TYPE]
        else:
            change = pa.repeat(UPSERT if self.shape.is_merge else INSERT, upserts.num_rows)
        parts = [_with_offsets(upserts, change, batch.upsert_offsets)]
        count = batch.deletes.num_rows
        if count:
            deletes = [
                batch.deletes[field.name]
                if field.name in self.shape.key
                else pa.nulls(count, field.type)
                for field in upserts.schema
            ]
            parts.append(
                _with_offsets(
                    pa.table(deletes, schema=upserts.schema),
                    pa.repeat(DELETE, count),
                    batch.delete_offsets,
                )
            )
        rows = pa.concat_tables(parts).sort_by(
            [(PARTITION_COLUMN, "ascending"), (OFFSET_COLUMN, "ascending")]
        )
        for start in range(0, rows.num_rows, self._request_rows):
            failure: TargetUnavailable | None = None
            if self.stopped.is_set():
                failure = TargetUnavailable(
                    "The sink was told to stop.", fix="nothing: it resumes from here."
                )
            else:
                try:
                    self._send(rows.slice(start, self._request_rows), refused)
                except TargetUnavailable as error:
                    failure = error
            if failure is not None:
                self._failure = failure
                self._applied_offsets = _offsets_before(batch, rows, start)
                break
        return refused

    def _send(self, rows: pa.Table, refused: list[Refusal]) -> None:
        bisect_refused(rows, rows.select(OFFSET_COLUMNS), self._post, refused)

    def _record_refused(self, reason: str) -> None:
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= MAX_REFUSED_IN_A_ROW:
            raise TargetRefuses(
                f"The receiver refuses {MAX_REFUSED_IN_A_ROW} rows in a row: {reason}.",
                fix=(
                    "see what it expects. `headrace dead list` shows the rows that are dead letters"
                    " now; the others of this batch are sent again."
                ),
            )

    def _record_taken(self) -> None:
        self._refused_in_a_row = 0

    def _outgoing(self, rows: pa.Table) -> list[OutgoingRow]:
        """Return rows in the form in which they are sent."""
        source = self.shape.topic_id or self.shape.topic
        (batch,) = rows.combine_chunks().to_batches()
        texts = rows_to_json(batch.select(self._columns))
        key = [name for name in self.shape.key if name in self._columns]
        is_delete = pc.equal(batch.column(CHANGE_TYPE), DELETE)
        if key and pc.any(is_delete).as_py():
            key_texts = rows_to_json(batch.select(key))
            texts = [
                key_text if is_gone else text
                for is_gone, key_text, text in zip(
                    is_delete.to_pylist(), key_texts, texts, strict=True
                )
            ]
        columns = (batch.column(name).to_pylist() for name in (*OFFSET_COLUMNS, CHANGE_TYPE))
        return [
            OutgoingRow(f"{source}-{partition}-{offset}", partition, offset, change, text)
            for partition, offset, change, text in zip(*columns, texts, strict=True)
        ]

    def lookup(self, keys: pa.Table) -> pa.Table:  # noqa: ARG002 - the receiver cannot be asked
        return self.shape.schema.empty_table()


class MessageTarget(AtLeastOnceTarget):
    """A target that takes messages and acknowledges them, for sinks of your own.

        class PrintTarget(MessageTarget):
            def send(self, messages):
                for message in messages:
                    print(message.id, message.change, message.json.decode())

        Sink(kind="print", opener=PrintTarget, table="orders").run("orders", log="file:data")

    A sink without a `table` is identified by its kind and topic; give two of one topic a `table` or
    a `name` each.
    """

    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        identity = f"{sink.kind}.{sink.name or sink.table or shape.topic}"
        super().__init__(sink, shape, identity, request_rows=sink.batch_rows)

    @abstractmethod
    def send(self, messages: Sequence[OutgoingRow]) -> None:
        """Send messages, and return when the other side has all of them.

        Raises:
            TargetUnavailable: It is away, or it is not known what it has. They are sent again.
            RowsRefused: It will never take them, and has none of them. They are sent again in
                smaller groups; what is refused alone becomes a dead letter.
        """

    def close(self) -> None:
        """Disconnect, where there is a connection."""

    def _post(self, rows: pa.Table) -> None:
        try:
            self.send(self._outgoing(rows))
        except RowsRefused as error:
            if rows.num_rows == 1:
                self._record_refused(str(error))
            raise
        self._record_taken()

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        """Return the checkpoint and all rows, where the other side can be asked. Not supported
        unless a kind of target implements it.
        """
        raise NotSupported(
            f"What was sent to {self.sink.kind} cannot be read back, so it cannot be compared with"
            " the log.",
            fix="compare at the receiver, by the messages' ids.",
        )


def _with_offsets(rows: pa.Table, change: pa.Array, offsets: pa.Table) -> pa.Table:
    table = rows.append_column(CHANGE_TYPE, change)
    for field in _OFFSET_SCHEMA:
        table = table.append_column(field, offsets[field.name].cast(field.type))
    return table


def _offsets_before(batch: SinkBatch, rows: pa.Table, index: int) -> dict[int, int]:
    """By partition, the offset after the last row in front of an index. Rows are in the order of
    partitions and offsets.
    """
    if index == rows.num_rows:
        return dict(batch.stop)
    here = rows[PARTITION_COLUMN][index].as_py()
    offset = rows[OFFSET_COLUMN][index].as_py()
    before = {partition: stop for partition, stop in batch.stop.items() if partition < here}
    return {**before, here: offset}
