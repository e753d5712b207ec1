"""Targets that cannot keep our place: a webhook's receiver, a broker. Rows are sent at least once,
each with an id by which the other side can drop repeats; the place in the topic is a note of the
log.

Rows of one partition come in the order of the topic. When the other side goes away in the middle of
a batch, what it has taken is noted, so it goes on there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import CHANGE_TYPE, DELETE, INSERT, OFFSET_COLUMN, PARTITION_COLUMN
from headrace.errors import (
    NoteConflict,
    SinkFenced,
    TargetRefuses,
    TargetUnavailable,
    TransactionFenced,
)
from headrace.log.api import Transaction
from headrace.sinks.base import (
    Applied,
    Batch,
    OnRefused,
    Refusal,
    Shape,
    SinkSpec,
    Target,
    in_pieces,
    json_of,
)

UPSERT = "upsert"
MAX_REFUSED_IN_A_ROW = 100
PLACES = [PARTITION_COLUMN, OFFSET_COLUMN]
_PLACE_TYPES = pa.schema([(PARTITION_COLUMN, pa.int32()), (OFFSET_COLUMN, pa.int64())])


class NotedTarget(Target):
    """`_post` hands rows over, or raises RowsRefused or TargetUnavailable. `identity` names the
    target among others of the same topic.
    """

    def __init__(self, sink: SinkSpec, shape: Shape, identity: str, *, request_rows: int) -> None:
        super().__init__(sink, shape)
        self._request_rows, self._id = request_rows, identity
        self._columns = [name for name in shape.schema.names if name not in {*PLACES, CHANGE_TYPE}]
        self._known: str | None = None
        self._next: str | None = None
        self._transaction: Transaction | None = None
        self._refused_in_a_row = 0
        self._failure: TargetUnavailable | None = None
        self._stop: dict[int, int] = {}
        """What ended the batch under way before its end, and where it then is."""

    @abstractmethod
    def _post(self, rows: pa.Table) -> None: ...

    def prepare(self) -> None:
        """There is nothing to make."""

    # The place, in the log

    @property
    def _note(self) -> str:
        return f"sync.{self._id}.place"

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self._known = self._next = self.log.note(self._note)
        yield
        self._store()

    def _store(self) -> None:
        if self._next == self._known:
            return
        transaction = (
            self._transaction.next()
            if self._transaction is not None
            else self.log.transaction(self._note)
        )
        self._transaction = transaction
        try:
            with transaction:
                transaction.set_note(self._note, self._next, expect=self._known)
        except (NoteConflict, TransactionFenced) as error:
            raise SinkFenced(
                f"Another process sends to this {self.sink.kind}.",
                fix="nothing, if that was meant: it goes on where this one stopped.",
            ) from error
        self._known = self._next

    def read_applied(self) -> Applied | None:
        return None if self._known is None else Applied.from_json(self._known)

    def write_applied(self, applied: Applied) -> None:
        self._next = applied.to_json()

    def clear(self) -> None:
        """What was sent cannot be taken back: starting over sends everything again, under the same
        ids.
        """

    # A batch

    def apply(self, batch: Batch, on_refused: OnRefused) -> bool:
        """1. What the receiver takes is sent. 2. What it refuses is told of. 3. The place behind
        both is stored. If the receiver goes away meanwhile, as far as it went.
        """
        is_new = super().apply(batch, on_refused)
        if is_new and self._failure is not None:
            raise self._failure
        return is_new

    def reached(self, batch: Batch) -> Mapping[int, int]:  # noqa: ARG002 - the merge knows
        return self._stop

    def merge(self, batch: Batch) -> list[Refusal]:
        """One request after the other, until something fails."""
        self._failure, self._stop = None, dict(batch.stop)
        refused: list[Refusal] = []
        rows = self._in_order(batch)
        for start in range(0, rows.num_rows, self._request_rows):
            piece = rows.slice(start, self._request_rows)
            try:
                self._check_stopped()
                self._send(piece, refused)
            except TargetUnavailable as error:
                self._failure, self._stop = error, _reached(batch, rows, start)
                break
        return refused

    def _send(self, rows: pa.Table, refused: list[Refusal]) -> None:
        in_pieces(rows, rows.select(PLACES), self._post, refused)

    def _check_stopped(self) -> None:
        if self.stopped.is_set():
            raise TargetUnavailable(
                "The sink was told to stop.", fix="nothing: it goes on from here."
            )

    def _in_order(self, batch: Batch) -> pa.Table:
        """Upserts and deletes, as they stand in the topic."""
        upserts = batch.upserts.select(self._columns)
        change = (
            batch.upserts[CHANGE_TYPE]
            if CHANGE_TYPE in batch.upserts.column_names
            else pa.repeat(UPSERT if self.shape.is_merge else INSERT, upserts.num_rows)
        )
        parts = [_placed(upserts, change, batch.upsert_places)]
        if batch.deletes.num_rows:
            gone = [
                (
                    batch.deletes[each.name]
                    if each.name in self.shape.key
                    else pa.nulls(batch.deletes.num_rows, each.type)
                )
                for each in upserts.schema
            ]
            parts.append(
                _placed(
                    pa.table(gone, schema=upserts.schema),
                    pa.repeat(DELETE, batch.deletes.num_rows),
                    batch.delete_places,
                )
            )
        return pa.concat_tables(parts).sort_by(
            [(PARTITION_COLUMN, "ascending"), (OFFSET_COLUMN, "ascending")]
        )

    def _count_refused(self, said: str) -> None:
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= MAX_REFUSED_IN_A_ROW:
            raise TargetRefuses(
                f"The other side refuses {MAX_REFUSED_IN_A_ROW} rows in a row: {said}.",
                fix=(
                    "see what it expects; rows that were put aside are in `headrace dead list`, and"
                    " the others of this batch are sent again."
                ),
            )

    def _taken(self) -> None:
        self._refused_in_a_row = 0

    def _messages(self, rows: pa.Table) -> list[tuple[str, int, int, str, bytes]]:
        """Of each row its id, its place, what kind of change it is, and its JSON."""
        source = self.shape.topic_id or self.shape.topic
        (batch,) = rows.combine_chunks().to_batches()
        places = zip(
            *(batch.column(name).to_pylist() for name in (*PLACES, CHANGE_TYPE)),
            _row_texts(batch, self._columns, self.shape.key),
            strict=True,
        )
        return [
            (f"{source}-{partition}-{offset}", partition, offset, change, text)
            for partition, offset, change, text in places
        ]

    def lookup(self, keys: pa.Table) -> pa.Table:  # noqa: ARG002 - nobody knows
        return self.shape.schema.empty_table()


def _placed(rows: pa.Table, change: pa.Array, places: pa.Table) -> pa.Table:
    placed = rows.append_column(CHANGE_TYPE, change)
    for each in _PLACE_TYPES:
        placed = placed.append_column(each, places[each.name].cast(each.type))
    return placed


def _row_texts(rows: pa.RecordBatch, columns: Sequence[str], key: Sequence[str]) -> Iterator[bytes]:
    """Each row as JSON; of one that is gone nothing but its key."""
    texts = json_of(rows.select(list(columns)))
    keys = [name for name in key if name in columns]
    gone = pc.equal(rows.column(CHANGE_TYPE), DELETE)
    if not keys or not pc.any(gone).as_py():
        yield from texts
        return
    for is_gone, text, alone in zip(
        gone.to_pylist(), texts, json_of(rows.select(keys)), strict=True
    ):
        yield alone if is_gone else text


def _reached(batch: Batch, rows: pa.Table, sent: int) -> dict[int, int]:
    """The places behind so many rows, which are in the order of partitions and offsets."""
    if sent == rows.num_rows:
        return dict(batch.stop)
    here, offset = rows[PARTITION_COLUMN][sent].as_py(), rows[OFFSET_COLUMN][sent].as_py()
    return {
        **{partition: stop for partition, stop in batch.stop.items() if partition < here},
        here: offset,
    }
