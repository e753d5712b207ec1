"""The log's side of a capture: parts of the stream are written to one open transaction, and
committed together with the position behind them.

A transaction of the source is never split: a part that ends inside one leaves the log's transaction
open, which keeps its rows in staged files until they can be committed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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
    TopicRows,
    Truncation,
)
from headrace.cdc.topics import TopicMapping, live_keys, prepare, topic_name
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
from headrace.errors import ConfigurationError, InputError, NewerFormat
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


# The state of a capture: the source's position, and for each table its topic and the progress of
# its snapshot. It is a note of the log, stored in the transactions that write rows.

VERSION = 1


@dataclass
class SnapshotState:
    """A snapshot that is not complete."""

    after: Sequence[Any] | None = None
    """The key of the last row that was read."""
    rows: int = 0
    """How many rows were read."""
    about: int = 0
    """About how many rows there are."""
    since: dict[str, int] | None = None
    """The topic's end offsets when the snapshot began, if it had rows before. Rows in front of them
    that the snapshot does not read again are deleted at its end.
    """


@dataclass
class TableState:
    """The state of one table."""

    topic: str
    columns: Sequence[Sequence[str]] = ()
    """The columns that the topic was filled with. A table that has more is read again."""
    snapshot: SnapshotState | None = None
    """None when it is complete."""


@dataclass
class CaptureState:
    """The state of a capture."""

    position: str | None = None
    tables: dict[str, TableState] = field(default_factory=dict)
    handled: str | None = None
    """The last request for snapshots that was handled."""

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))

    @property
    def pending(self) -> list[str]:
        """Tables whose snapshot is not complete."""
        return [name for name, table in self.tables.items() if table.snapshot is not None]


def note_name(capture: str) -> str:
    """Return the name of the note with a capture's state."""
    return f"cdc.{capture}"


def request_name(capture: str) -> str:
    """Return the name of the note with which snapshots are requested."""
    return f"cdc.{capture}.request"


def read_state(text: str | None, *, capture: str) -> CaptureState:
    """Return the state that a note holds; an empty one if there is no note."""
    if text is None:
        return CaptureState()
    raw = json.loads(text)
    if raw.pop("version") > VERSION:
        raise NewerFormat(
            f"The state of the capture {capture!r} was written by a newer Headrace.",
            fix="upgrade Headrace.",
        )
    tables = {}
    for name, table in raw["tables"].items():
        snapshot = SnapshotState(**table["snapshot"]) if table["snapshot"] else None
        tables[name] = TableState(table["topic"], table["columns"], snapshot)
    return CaptureState(raw["position"], tables, raw["handled"])


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
    ) -> None:
        self.log = log
        self.capture = capture
        self.prefix = prefix
        self.partitions = partitions
        self.preimages = preimages
        self.outbox = outbox
        # Opening a transaction fences the process that ran this capture before.
        self._last = log.transaction(note_name(capture), timeout=LONGEST_TRANSACTION)
        self._last.abort()
        self._open: Transaction | None = None
        self.state = CaptureState()
        self.shapes: dict[str, TableShape] = {}
        self._mappings: dict[str, TopicMapping] = {}
        self._event_topics: set[str] = set()
        self._written: dict[str, list[pa.RecordBatch]] = {}
        """By table, keys and change types in the open transaction."""
        self.rows = self.changes = self.transactions = self.dead_letters = 0
        self._committed = (0, 0, 0, 0)
        """Those four counts as of the last commit, to return to after an abort."""
        self.waiting_rows = 0
        """Rows in the open transaction."""

    def reload(self) -> CaptureState:
        """Drop what was not committed, and read the state from the log."""
        self._abort()
        self.state = read_state(self.log.note(note_name(self.capture)), capture=self.capture)
        return self.state

    # Tables

    def add(self, shape: TableShape) -> None:
        """Prepare for a table's rows. A table that is new, or has new columns, gets a snapshot."""
        if shape.name == self.outbox:
            self._add_outbox(shape)
            return
        self._map(shape)
        columns = [list(column) for column in shape.columns]
        known = self.state.tables.setdefault(shape.name, TableState(self._topic(shape.name)))
        if known.columns != columns:
            has_more = bool({*map(tuple, columns)} - {*map(tuple, known.columns)})
            known.columns = columns
            if has_more:  # dropped columns need no snapshot
                self.restart_snapshot(shape.name)

    def _add_outbox(self, shape: TableShape) -> None:
        """Prepare for the outbox, whose rows are events: its snapshot is taken once."""
        check_outbox(shape)
        self.shapes[shape.name] = shape
        if shape.name not in self.state.tables:
            self.state.tables[shape.name] = TableState(
                "", [list(column) for column in shape.columns], SnapshotState()
            )

    def _topic(self, table: str) -> str:
        known = self.state.tables.get(table)
        return known.topic if known else topic_name(table, self.prefix)

    def _map(self, shape: TableShape) -> None:
        self.shapes[shape.name] = shape
        self._mappings[shape.name] = prepare(
            self.log, shape, self._topic(shape.name), partitions=self.partitions
        )

    def restart_snapshot(self, table: str) -> None:
        """Begin a table's snapshot, or begin it again. Rows that are in the topic now and that it
        does not read will be deleted at its end.
        """
        if table == self.outbox:
            return
        ends = self.log.end_offsets(self._topic(table))
        since = (
            {str(partition): end for partition, end in ends.items()} if any(ends.values()) else None
        )
        self.state.tables[table].snapshot = SnapshotState(since=since)

    # Rows

    def write(self, part: StreamPart) -> None:
        """Write a part to the open transaction."""
        # Add new columns to topics before any row of a part is written. They are null in rows of
        # the old shape.
        shapes = [item.shape for item in part.items if isinstance(item, SchemaChange)]
        for shape in shapes:
            if shape.name == self.outbox:
                continue
            prepare(self.log, shape, self._topic(shape.name), partitions=self.partitions)
            if shape.name in self.shapes:
                self._map(self.shapes[shape.name])
        for item in part.items:
            self._write(item)
        self.transactions += part.transactions
        if part.position is not None:
            self.state.position = part.position

    def _write(self, item: StreamItem) -> None:
        if isinstance(item, SchemaChange):
            self.add(item.shape)
            if item.missed:
                # Read a table again of which changes were missed, unless its snapshot is yet to
                # begin.
                snapshot = self.state.tables[item.shape.name].snapshot
                if snapshot is None or snapshot.after is not None:
                    logger.warning(
                        "Changes of %s may have been missed, since it was not captured for a"
                        " while: it is"
                        " read again.",
                        item.shape.name,
                    )
                    self.restart_snapshot(item.shape.name)
        elif isinstance(item, TableChanges):
            rows = item.rows if self.preimages else _without_preimages(item.rows)
            self._append(item.table, rows)
            self.changes += rows.num_rows
        elif isinstance(item, SnapshotChunk):
            self._write_chunk(item)
        elif isinstance(item, Truncation) and item.table != self.outbox:
            self._append_deletes(item.table, self._live(item.table), item)
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
        if not rows.num_rows:
            return
        if table == self.outbox:
            for event in outbox_events(self.shapes[table], rows, self.prefix):
                self._write_event(event)
            return
        mapping = self._mappings[table]
        topic_rows = mapping.to_topic_rows(rows)
        for name in mapping.key:
            if topic_rows.column(name).null_count:
                raise InputError(
                    f"A row of {table} has no value in its key column {name!r}.",
                    fix=f"give it one, and make the column NOT NULL; then {table} can be captured.",
                )
        self._transaction().append(mapping.topic, topic_rows)
        self._written.setdefault(table, []).append(_keys_and_changes(topic_rows, mapping.key))
        self.waiting_rows += rows.num_rows
        self.rows += rows.num_rows

    def _write_event(self, item: TopicRows) -> None:
        if item.topic not in self._event_topics:
            self.log.create_topic(
                item.topic, item.ddl, key=item.key, partitions=self.partitions, exist_ok=True
            )
            self._event_topics.add(item.topic)
        self._transaction().append(item.topic, item.rows)
        self.waiting_rows += item.rows.num_rows
        self.rows += item.rows.num_rows

    # Snapshots

    def _write_chunk(self, chunk: SnapshotChunk) -> None:
        snapshot = self.state.tables[chunk.table].snapshot
        if snapshot is None:
            return
        self._append(chunk.table, chunk.rows)
        snapshot.rows += chunk.rows.num_rows
        snapshot.after = chunk.after if chunk.after is not None else snapshot.after
        self._transaction()  # the snapshot of an empty table is progress too
        if chunk.is_last:
            if snapshot.since is not None:
                before = {int(partition): end for partition, end in snapshot.since.items()}
                self._append_deletes(chunk.table, self._live(chunk.table, before), None)
            self.state.tables[chunk.table].snapshot = None

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

    def commit(self) -> None:
        """Commit the open transaction: rows and state become visible together."""
        transaction = self._transaction()
        transaction.set_note(note_name(self.capture), self.state.to_json())
        self._last, self._open = transaction, None
        transaction.commit()
        self._written, self.waiting_rows = {}, 0
        self._committed = (self.rows, self.changes, self.transactions, self.dead_letters)

    def _abort(self) -> None:
        if self._open is not None:
            self._open.abort()
            self._last, self._open = self._open, None
        self._written, self.waiting_rows = {}, 0
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
