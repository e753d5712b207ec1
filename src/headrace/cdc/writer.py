"""The log's side of a capture: parts of the stream are written to one open transaction, and
committed together with the position behind them.

A transaction of the source is never split: a part that ends inside one leaves the log's transaction
open, which keeps its rows in staged files until they can be committed.
"""

from __future__ import annotations

import logging

import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.base import (
    DeadRecords,
    SchemaChange,
    SnapshotChunk,
    StreamItem,
    StreamPart,
    TableChanges,
    TableShape,
    TableStopped,
    TopicRows,
    Truncation,
)
from headrace.cdc.row_counts import RowCounts, TooManyRows
from headrace.cdc.selection import CaptureSelection, TableSelection
from headrace.cdc.state import (
    CaptureState,
    SnapshotState,
    TableState,
    note_name,
    read_state,
)
from headrace.cdc.topic_owner import TopicClaims
from headrace.cdc.topics import MetadataTopics, TopicMapping, live_keys, prepare, topic_name
from headrace.columnar.columns import (
    CHANGE_FIELD,
    CHANGE_TYPE,
    COMMITTED_AT,
    DELETE,
    HIDDEN_FIELDS,
    INSERT,
    POSITION,
    UPDATE_PREIMAGE,
)
from headrace.errors import ConfigurationError, NoteConflict, RetryError
from headrace.log.api import Log, Transaction
from headrace.log.dead_letters import dead_letters_to_rows, ensure_dead_topic

# The outbox: a table into which applications insert events in the same transaction as their data.
# Its rows become events in topics named by `aggregate_type`. Only inserts count: an application may
# delete the row in the same transaction, and the event is emitted all the same.

OUTBOX_COLUMNS = ("id", "aggregate_type", "aggregate_id", "type", "payload")
_HIDDEN_DDL = f"{POSITION} BIGINT, {COMMITTED_AT} TIMESTAMP"


def check_outbox(shape: TableShape) -> None:
    names = [name for name, _ in shape.columns]
    if missing := [name for name in OUTBOX_COLUMNS if name not in names]:
        raise ConfigurationError(
            f"The outbox {shape.name} has no column {missing[0]!r}.",
            fix=f"an outbox has the columns {', '.join(OUTBOX_COLUMNS)}; others are ignored.",
        )


def outbox_events(shape: TableShape, rows: pa.RecordBatch, prefix: str) -> list[TopicRows]:
    """Return the events of a batch of the outbox's changes, one batch a topic, in their order."""
    inserted = rows.filter(pc.equal(rows.column(CHANGE_TYPE), INSERT))
    kinds = dict(shape.columns)
    names = ("id", "aggregate_id", "type", "payload")
    ddl = ", ".join(
        f"{name} {'STRING' if name == 'aggregate_id' else kinds[name]}" for name in names
    )
    items = []
    for aggregate in pc.unique(inserted.column("aggregate_type")).to_pylist():
        mine = inserted.filter(pc.equal(inserted.column("aggregate_type"), aggregate))
        columns = {name: mine.column(name) for name in (*names, POSITION, COMMITTED_AT)}
        columns["aggregate_id"] = columns["aggregate_id"].cast(pa.string())
        items.append(
            TopicRows(
                topic=topic_name(str(aggregate), prefix),
                ddl=f"{ddl}, {_HIDDEN_DDL}",
                key="aggregate_id",
                rows=pa.RecordBatch.from_pydict(columns),
            )
        )
    return items


logger = logging.getLogger("headrace.cdc")
LONGEST_TRANSACTION = "15 minutes"  # the most that a Kafka broker allows by default


class CaptureWriter:
    """Writes the parts of one capture. It is fenced once another process has taken the capture
    over.
    """

    def __init__(
        self,
        log: Log,
        capture: str,
        *,
        prefix: str,
        partitions: int,
        preimages: bool,
        outbox: str | None = None,
        selection: CaptureSelection | None = None,
        template: str | None = None,
        schema_topic: str | None = None,
        transaction_topic: str | None = None,
    ) -> None:
        self.log = log
        self.capture = capture
        self.prefix = prefix
        self.partitions = partitions
        self.preimages = preimages
        self.outbox = outbox
        self._selection = selection or CaptureSelection()
        self._selections: dict[str, TableSelection] = {}
        self._template = template
        self._metadata = MetadataTopics(schema_topic, transaction_topic)
        # Opening a transaction fences the process that ran this capture before.
        self._last = log.transaction(note_name(capture), timeout=LONGEST_TRANSACTION)
        self._last.abort()
        self._open: Transaction | None = None
        self.state = CaptureState()
        self._is_new = True
        """Whether nothing was ever committed: what is wrong with a table is raised then."""
        self.shapes: dict[str, TableShape] = {}
        self._mappings: dict[str, TopicMapping] = {}
        self._event_topics: set[str] = set()
        self._claims = TopicClaims(log, capture)
        self._counts: dict[str, RowCounts] = {}
        """Of tables without a key, as of the last row written."""
        self._awaited: SnapshotState | None = None
        """The snapshot that the requested chunk is of. It may have begun anew since."""
        self._written: dict[str, list[pa.RecordBatch]] = {}
        """By table, keys and change types in the open transaction."""
        self.rows = self.changes = self.transactions = self.dead_letters = 0
        self._committed = (0, 0, 0, 0)
        """Those four counts as of the last commit, to return to after an abort."""
        self.newest_commit_us: int | None = None
        """When the last change that was written was committed in the source."""
        self.waiting_rows = 0
        """Rows in the open transaction."""

    def reload(self) -> CaptureState:
        """Drop what was not committed, and read the state from the log."""
        self._abort()
        stored = self.log.note(note_name(self.capture))
        self.state = read_state(stored, capture=self.capture)
        self._counts.clear()
        self._metadata.clear()
        self._is_new = stored is None
        self.shapes.clear()
        self._mappings.clear()
        return self.state

    # Tables

    def add(self, shape: TableShape) -> None:
        """Prepare for a table's rows. A table that is new, has new columns, or whose rows were
        rewritten, gets a snapshot. One that was stopped stays so.
        """
        if shape.name == self.outbox:
            self._add_outbox(shape)
            return
        known = self.state.tables.get(shape.name)
        if known is not None and known.stopped:
            if known.is_gone:
                self.resume_table(shape)
            return
        try:
            selection = self._selection.of(shape)
            self._map(selection.shape)
        except ConfigurationError as error:
            if self._is_new:
                raise
            self.state.tables.setdefault(shape.name, TableState(self._topic(shape.name)))
            self.stop_table(shape.name, str(error))
            return
        shape = selection.shape
        self._selections[shape.name] = selection
        columns = [list(column) for column in shape.columns]
        known = self.state.tables.setdefault(shape.name, TableState(self._topic(shape.name)))
        has_more = bool({*map(tuple, columns)} - {*map(tuple, known.columns)})
        was_rewritten = False
        if shape.storage is not None:
            was_rewritten = known.storage is not None and shape.storage.was_rewritten_since(
                known.storage
            )
            known.storage = shape.storage
        # Dropped columns need no snapshot, unless rows are identified by all of them.
        is_selected_anew = bool(known.columns) and known.selection != selection.digest
        known.selection = selection.digest
        if (
            has_more
            or was_rewritten
            or is_selected_anew
            or (shape.copies and known.columns != columns)
        ):
            if was_rewritten and not has_more:
                logger.warning(
                    "Rows of %s came, went or were rewritten without a change in the stream: it is"
                    " read again.",
                    shape.name,
                )
            self.restart_snapshot(shape.name)
        known.columns = columns

    def has_news(self, shape: TableShape) -> bool:
        """Return whether a table is unknown, or its rows were rewritten since it was added."""
        known = self.state.tables.get(shape.name)
        if known is None or known.stopped:
            return known is None or known.is_gone
        if shape.name not in self.shapes:
            return True
        return (
            shape.storage is not None
            and known.storage is not None
            and shape.storage.was_rewritten_since(known.storage)
        )

    def stop_table(self, table: str, reason: str, *, is_gone: bool = False) -> None:
        """Follow a table no longer. Its topic stays as it is. One that is gone is followed again as
        soon as it is added.
        """
        known = self.state.tables.get(table)
        if known is None:
            raise ConfigurationError(reason)  # it was never captured
        if known.stopped:
            return
        known.stopped = reason
        known.is_gone = is_gone
        known.snapshot = None
        known.conditions.clear()
        self.shapes.pop(table, None)
        self._mappings.pop(table, None)
        self.touch()
        logger.error("%s of %s is not followed any more: %s", table, self.capture, reason)

    def resume_table(self, shape: TableShape) -> None:
        """Follow a table again that was stopped, beginning with a snapshot."""
        self.state.tables[shape.name].stopped = None
        self.state.tables[shape.name].is_gone = False
        self.add(shape)
        if not self.state.tables[shape.name].stopped:
            self.restart_snapshot(shape.name)

    def _add_outbox(self, shape: TableShape) -> None:
        """Prepare for the outbox, whose rows are events: its snapshot is taken once."""
        check_outbox(shape)
        self.shapes[shape.name] = shape
        if shape.name not in self.state.tables:
            self.state.tables[shape.name] = TableState(
                "",
                [list(column) for column in shape.columns],
                snapshot=SnapshotState(),
            )

    def _topic(self, table: str) -> str:
        known = self.state.tables.get(table)
        return known.topic if known else topic_name(table, self.prefix, self._template)

    def _map(self, shape: TableShape) -> None:
        self._mappings[shape.name] = self._prepare(shape)
        self.shapes[shape.name] = shape

    def _prepare(self, shape: TableShape) -> TopicMapping:
        topic = self._topic(shape.name)
        self._claims.claim(topic, shape.name)
        return prepare(self.log, shape, topic, partitions=self.partitions)

    def restart_snapshot(self, table: str) -> None:
        """Begin a table's snapshot, or begin it again. Rows that are in the topic before its first
        chunk and that it does not read will be deleted at its end.
        """
        if table == self.outbox:
            return
        self.state.tables[table].snapshot = SnapshotState()
        self.state.tables[table].conditions.clear()

    # Rows

    def write(self, part: StreamPart) -> None:
        """Write a part to the open transaction."""
        # Add new columns to topics before any row of a part is written. They are null in rows of
        # the old shape.
        shapes = [item.shape for item in part.items if isinstance(item, SchemaChange)]
        for shape in shapes:
            if shape.name == self.outbox or self._is_stopped(shape.name):
                continue
            try:
                self._prepare(self._selection.of(shape).shape)
            except ConfigurationError as error:
                self.stop_table(shape.name, str(error))
                continue
            if shape.name in self.shapes:
                self._map(self.shapes[shape.name])
        for item in part.items:
            self._write(item)
            if isinstance(item, TableChanges | SnapshotChunk | SchemaChange):
                self._describe(item)
            if isinstance(item, TableChanges):
                self._metadata.add_changes(item)
        if part.position is not None:
            for rows in self._metadata.ended_transactions():
                self._write_event(rows)
        self.transactions += part.transactions
        if part.position is not None:
            self.state.position = part.position

    def _describe(self, item: TableChanges | SnapshotChunk | SchemaChange) -> None:
        """Write a table's columns to the topic of schema changes when the stream has them. At a
        start, the catalogue may be ahead of the stream.
        """
        name = item.shape.name if isinstance(item, SchemaChange) else item.table
        known = self.state.tables.get(name)
        if known is None or known.columns == known.described or name not in self.shapes:
            return
        for rows in self._metadata.schema_change(self.shapes[name], known.topic, known.described):
            self._write_event(rows)
        known.described = known.columns

    def _is_stopped(self, table: str) -> bool:
        known = self.state.tables.get(table)
        return known is not None and known.stopped is not None

    def _write(self, item: StreamItem) -> None:
        if isinstance(item, SchemaChange):
            self.add(item.shape)
            if item.missed and not self._is_stopped(item.shape.name):
                # Read a table again of which changes were missed, and the whole of it, also if a
                # snapshot of a part of it is yet to begin.
                snapshot = self.state.tables[item.shape.name].snapshot
                if snapshot is None or snapshot.has_begun:
                    logger.warning(
                        "Changes of %s may have been missed, since it was not captured for a"
                        " while: it is"
                        " read again.",
                        item.shape.name,
                    )
                self.restart_snapshot(item.shape.name)
        elif isinstance(item, TableStopped):
            self.stop_table(item.table, item.reason, is_gone=item.is_gone)
        elif (
            isinstance(item, TableChanges | SnapshotChunk | Truncation)
            and item.table not in self.shapes
        ):
            return  # it was stopped
        elif isinstance(item, TableChanges):
            selected = self._select(item.table, item.rows)
            if self._is_stopped(item.table):
                return
            if self.shapes[item.table].copies is not None:
                if self.state.tables[item.table].snapshot is not None:
                    return  # the snapshot has them: it is read at once, behind these changes
                rows = self._counted(item.table, selected)
            else:
                rows = selected if self.preimages else _without_preimages(selected)
            self._append(item.table, rows)
            self.changes += rows.num_rows
            if item.rows.num_rows:
                committed_at = item.rows.column(COMMITTED_AT)[-1]
                self.newest_commit_us = committed_at.value or self.newest_commit_us
        elif isinstance(item, SnapshotChunk):
            self._write_chunk(item)
        elif isinstance(item, Truncation) and item.table != self.outbox:
            self._append_deletes(item.table, self._live(item.table), item)
            if self.shapes[item.table].copies is not None:
                self._counts[item.table] = RowCounts(self.shapes[item.table])
        elif isinstance(item, TopicRows):
            self._write_event(item)
        elif isinstance(item, DeadRecords):
            dead_letter_topic = ensure_dead_topic(self.log, item.topic)
            count = len(item.dead_letters)
            self._transaction().append(dead_letter_topic, dead_letters_to_rows(item.dead_letters))
            self.dead_letters += count
            self.waiting_rows += count
            logger.warning(
                "%d records of %s cannot be used, such as offset %s: %s. They are in %s.",
                count,
                item.topic,
                item.dead_letters[0].offset,
                item.dead_letters[0].reason,
                dead_letter_topic,
            )

    def _append(self, table: str, rows: pa.RecordBatch) -> None:
        if not rows.num_rows or self._is_stopped(table):
            return
        if table == self.outbox:
            for event in outbox_events(self.shapes[table], rows, self.prefix):
                self._write_event(event)
            return
        mapping = self._mappings[table]
        topic_rows = mapping.to_topic_rows(rows)
        for name in mapping.key:
            if topic_rows.column(name).null_count:
                self.stop_table(
                    table,
                    f"A row of {table} has no value in its key column {name!r}. To fix: give it"
                    " one, make the column NOT NULL, and request a snapshot of the table.",
                )
                return
        self._transaction().append(mapping.topic, topic_rows)
        self._written.setdefault(table, []).append(_keys_and_changes(topic_rows, mapping.key))
        self.waiting_rows += rows.num_rows
        self.rows += rows.num_rows

    def _select(self, table: str, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows as the topic has them; none if that cannot be told, which stops the table."""
        if table not in self._selections:  # the outbox
            return rows
        try:
            return self._selections[table].apply(rows)
        except ConfigurationError as error:
            self.stop_table(table, str(error))
            return rows.slice(0, 0)

    def _counted(self, table: str, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return single rows of a table without a key as changes of the number of equal rows."""
        shape = self.shapes[table]
        if shape.copies is None:
            return rows
        try:
            if table not in self._counts:
                self._counts[table] = RowCounts.load(shape, self.log, self._topic(table))
            counts = self._counts[table]
            counted = counts.apply(rows)
        except TooManyRows as error:
            self.stop_table(table, str(error))
            return rows.slice(0, 0)
        if counts.has_missed:
            logger.warning("A row of %s was deleted that is not known: it is read again.", table)
            counts.has_missed = False
            self.restart_snapshot(table)
        return counted

    def _write_event(self, item: TopicRows) -> None:
        if item.topic not in self._event_topics:
            self._claims.check_is_free(item.topic)
            if item.ddl is not None:
                self.log.create_topic(
                    item.topic, item.ddl, key=item.key, partitions=self.partitions, exist_ok=True
                )
            self._event_topics.add(item.topic)
        self._transaction().append(item.topic, item.rows)
        self.waiting_rows += item.rows.num_rows
        if not item.topic.startswith("__"):  # else a source's own notes
            self.rows += item.rows.num_rows

    # Snapshots

    def await_chunk(self, table: str) -> None:
        """A chunk of a table's snapshot was requested. Should the snapshot begin anew before it
        comes, it is dropped.
        """
        self._awaited = self.state.tables[table].snapshot

    def _write_chunk(self, chunk: SnapshotChunk) -> None:
        table, shape = self.state.tables[chunk.table], self.shapes[chunk.table]
        snapshot = table.snapshot
        if snapshot is None or snapshot is not self._awaited:
            return
        if chunk.is_first or not snapshot.has_begun:
            snapshot.has_begun = True
            snapshot.rows = 0
            if snapshot.condition is None and chunk.table != self.outbox:
                snapshot.since = self._filled_offsets(table.topic)
            if shape.copies is not None:
                self._counts[chunk.table] = RowCounts(shape)
        rows = self._select(chunk.table, chunk.rows)
        if self._is_stopped(chunk.table):
            return
        self._append(chunk.table, self._counted(chunk.table, rows))
        if self._is_stopped(chunk.table):
            return
        snapshot.rows += chunk.rows.num_rows
        snapshot.after = chunk.after if chunk.after is not None else snapshot.after
        self._transaction()  # the snapshot of an empty table is progress too
        if chunk.is_last:
            if snapshot.since is not None:
                before = {int(partition): end for partition, end in snapshot.since.items()}
                self._append_deletes(chunk.table, self._live(chunk.table, before), None)
            table.snapshot = (
                SnapshotState(condition=table.conditions.pop(0)) if table.conditions else None
            )

    def _filled_offsets(self, topic: str) -> dict[str, int] | None:
        """Return a topic's end offsets; None if it is empty."""
        ends = self.log.end_offsets(topic)
        filled = any(ends.values())
        return {str(partition): end for partition, end in ends.items()} if filled else None

    def _live(self, table: str, before: dict[int, int] | None = None) -> pa.Table:
        return live_keys(
            self.log,
            self._mappings[table].topic,
            before=before,
            written=self._written.get(table, ()),
        )

    def _append_deletes(self, table: str, keys: pa.Table, item: Truncation | None) -> None:
        hidden = dict(item.hidden) if item else {}
        shape = self.shapes[table]
        for batch in keys.to_batches(max_chunksize=100_000):
            count = batch.num_rows
            columns = {name: batch.column(name) for name in batch.schema.names}
            columns |= {
                field.name: pa.array([hidden.get(field.name)] * count, field.type)
                for field in HIDDEN_FIELDS
            }
            columns[CHANGE_TYPE] = pa.array([DELETE] * count)
            schema = shape.batch_schema
            arrays = [
                columns[field.name] if field.name in columns else pa.nulls(count, field.type)
                for field in schema
            ]
            self._append(
                table,
                pa.RecordBatch.from_arrays(
                    arrays, schema=pa.schema([*shape.schema, *HIDDEN_FIELDS, CHANGE_FIELD])
                ),
            )

    # The transaction

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def _transaction(self) -> Transaction:
        if self._open is None:
            self._open = self._last.next()
        return self._open

    def touch(self) -> None:
        """Let there be a transaction, so that the state is stored."""
        self._transaction()

    def commit(self) -> None:
        """Commit the open transaction: rows and state become visible together."""
        transaction = self._transaction()
        transaction.set_note(note_name(self.capture), self.state.to_json())
        self._claims.add_to(transaction)
        self._last, self._open = transaction, None
        try:
            transaction.commit()
        except NoteConflict as error:
            raise RetryError(
                f"Another capture has just taken a topic of {self.capture!r}: {error.message}",
                fix="the capture looks again by itself, and says whose topic it is.",
            ) from error
        self._is_new = False
        self._claims.pending.clear()
        self._written, self.waiting_rows = {}, 0
        self._committed = (self.rows, self.changes, self.transactions, self.dead_letters)

    def _abort(self) -> None:
        if self._open is not None:
            self._open.abort()
            self._last, self._open = self._open, None
        self._written, self.waiting_rows = {}, 0
        self._claims.pending.clear()
        self.rows, self.changes, self.transactions, self.dead_letters = self._committed

    def close(self) -> None:
        self._abort()


def _keys_and_changes(rows: pa.RecordBatch, key: tuple[str, ...]) -> pa.RecordBatch:
    """Return the keys and change types of rows, which is all that is remembered of rows that are
    not committed yet, since a transaction may be large.
    """
    changes = pc.dictionary_encode(rows.column(CHANGE_TYPE))
    return pa.RecordBatch.from_arrays(
        [*(rows.column(name) for name in key), changes], names=[*key, CHANGE_TYPE]
    )


def _without_preimages(rows: pa.RecordBatch) -> pa.RecordBatch:
    is_before = pc.equal(rows.column(CHANGE_TYPE), UPDATE_PREIMAGE)
    return rows.filter(pc.invert(is_before)) if pc.any(is_before).as_py() else rows
