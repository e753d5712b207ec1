"""The log's side of a capture: parts of the stream go into one open transaction, and are committed
with the position behind them.

A source's transaction is never cut: a part that ends inside one leaves the log's transaction open,
which keeps its rows in staged files until they can be committed.
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
    Aside,
    Changes,
    Chunk,
    Event,
    Item,
    Part,
    Reshaped,
    TableShape,
    Truncated,
)
from headrace.cdc.topics import Fitting, live_keys, prepare, topic_name
from headrace.columnar.columns import (
    CHANGE_FIELD,
    CHANGE_TYPE,
    COMMITTED_AT,
    DELETE,
    HIDDEN_FIELDS,
    INSERT,
    POSITION,
    UPDATE_BEFORE,
)
from headrace.errors import ConfigurationError, InputError, NewerFormat
from headrace.log.api import Log, Transaction
from headrace.log.dead_letters import ensure_topic, letters_to_rows

# The outbox: a table into which applications put events in the same transaction as their data. Its
# rows become events in topics named by `aggregate_type`, not a table.
#
# Only what is inserted counts: an application may delete a row at once, even in the same
# transaction, and the event is there all the same.


COLUMNS = ("id", "aggregate_type", "aggregate_id", "type", "payload")
_HIDDEN_DDL = f"{POSITION} BIGINT, {COMMITTED_AT} TIMESTAMP"


def check_outbox(shape: TableShape) -> None:
    names = [name for name, _ in shape.columns]
    if missing := [name for name in COLUMNS if name not in names]:
        raise ConfigurationError(
            f"The outbox {shape.name} has no column {missing[0]!r}.",
            fix=f"an outbox has the columns {', '.join(COLUMNS)}; others are ignored.",
        )


def events(shape: TableShape, rows: pa.RecordBatch, prefix: str) -> list[Event]:
    """A batch of the outbox's changes as events, one batch a topic, in their order."""
    inserted = rows.filter(pc.equal(rows.column(CHANGE_TYPE), INSERT))
    kinds = dict(shape.columns)
    kept = ("id", "aggregate_id", "type", "payload")
    ddl = ", ".join(
        f"{name} {'STRING' if name == 'aggregate_id' else kinds[name]}" for name in kept
    )
    found = []
    for aggregate in pc.unique(inserted.column("aggregate_type")).to_pylist():
        mine = inserted.filter(pc.equal(inserted.column("aggregate_type"), aggregate))
        columns = {name: mine.column(name) for name in (*kept, POSITION, COMMITTED_AT)}
        columns["aggregate_id"] = columns["aggregate_id"].cast(pa.string())
        found.append(
            Event(
                topic_name(str(aggregate), prefix),
                f"{ddl}, {_HIDDEN_DDL}",
                "aggregate_id",
                pa.RecordBatch.from_pydict(columns),
            )
        )
    return found


# How far a capture is: the source's position, and for each table its topic and how far its snapshot
# is. One note of the log, stored in the transactions that write rows.


VERSION = 1


@dataclass
class SnapshotState:
    """A snapshot under way. `since` are the topic's ends when it began, if the topic had rows
    before: what it does not meet again is gone.
    """

    after: Sequence[Any] | None = None
    rows: int = 0
    about: int = 0
    since: dict[str, int] | None = None


@dataclass
class TableState:
    """`columns` are those that the topic was filled with: a table that has others is read again."""

    topic: str
    columns: Sequence[Sequence[str]] = ()
    snapshot: SnapshotState | None = None
    """Nothing, when it is done."""


@dataclass
class CaptureState:
    position: str | None = None
    tables: dict[str, TableState] = field(default_factory=dict)
    handled: str | None = None
    """The last request (of another process, for a snapshot) that was taken up."""

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))

    @property
    def pending(self) -> list[str]:
        """Tables whose snapshot is not done."""
        return [name for name, each in self.tables.items() if each.snapshot is not None]


def note_name(capture: str) -> str:
    return f"cdc.{capture}"


def request_name(capture: str) -> str:
    return f"cdc.{capture}.request"


def read_state(text: str | None, *, capture: str) -> CaptureState:
    if text is None:
        return CaptureState()
    raw = json.loads(text)
    if raw.pop("version") > VERSION:
        raise NewerFormat(
            f"The state of the capture {capture!r} was written by a newer Headrace.",
            fix="upgrade Headrace.",
        )
    tables = {name: _table(each) for name, each in raw["tables"].items()}
    return CaptureState(raw["position"], tables, raw["handled"])


def _table(raw: dict[str, Any]) -> TableState:
    return TableState(
        raw["topic"], raw["columns"], SnapshotState(**raw["snapshot"]) if raw["snapshot"] else None
    )


logger = logging.getLogger("headrace.cdc")
LONGEST_TRANSACTION = "15 minutes"  # no broker allows more unless it is told to


class Writer:
    """Writes for one capture, and refuses to once another process has taken it over."""

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
        self.outbox = outbox
        self.log, self.capture, self.prefix, self.partitions, self.preimages = (
            log,
            capture,
            prefix,
            partitions,
            preimages,
        )
        self._last = log.transaction(
            note_name(capture), timeout=LONGEST_TRANSACTION
        )  # takes over from whoever had it
        self._last.abort()
        self._open: Transaction | None = None
        self.state = CaptureState()
        self.shapes: dict[str, TableShape] = {}
        self._fittings: dict[str, Fitting] = {}
        self._events: set[str] = set()
        self._written: dict[str, list[pa.RecordBatch]] = {}
        self.rows = self.changes = self.transactions = self.aside = 0
        self._committed = (0, 0, 0, 0)
        """The same as of the last commit: what is given up does not count."""
        self.waiting_rows = 0
        """Rows in the open transaction."""

    def reload(self) -> CaptureState:
        """Forget what was not committed, and read how far the log says we are."""
        self._abort()
        self.state = read_state(self.log.note(note_name(self.capture)), capture=self.capture)
        return self.state

    # Tables

    def add(self, shape: TableShape) -> None:
        """Get ready for a table's rows. One that is new, or has got other columns, is to be
        snapshotted.
        """
        if shape.name == self.outbox:
            self._add_outbox(shape)
            return
        self._fit(shape)
        columns = [list(column) for column in shape.columns]
        known = self.state.tables.setdefault(shape.name, TableState(self._topic(shape.name)))
        if known.columns != columns:
            has_more = bool({*map(tuple, columns)} - {*map(tuple, known.columns)})
            known.columns = columns
            if has_more:  # those that went need no reading again
                self.renew(shape.name)

    def _add_outbox(self, shape: TableShape) -> None:
        """Its rows are events: they are read from the beginning once, and never again."""
        check_outbox(shape)
        self.shapes[shape.name] = shape
        if shape.name not in self.state.tables:
            self.state.tables[shape.name] = TableState(
                "", [list(column) for column in shape.columns], SnapshotState()
            )

    def _topic(self, table: str) -> str:
        known = self.state.tables.get(table)
        return known.topic if known else topic_name(table, self.prefix)

    def _fit(self, shape: TableShape) -> None:
        self.shapes[shape.name] = shape
        self._fittings[shape.name] = prepare(
            self.log, shape, self._topic(shape.name), partitions=self.partitions
        )

    def _widen(self, shapes: list[TableShape]) -> None:
        """Topics get their new columns before any row of a part is written; rows of the old shape
        then have nothing in them.
        """
        for shape in shapes:
            if shape.name == self.outbox:
                continue
            prepare(self.log, shape, self._topic(shape.name), partitions=self.partitions)
            if shape.name in self.shapes:
                self._fit(self.shapes[shape.name])

    def renew(self, table: str) -> None:
        """Begin a table's snapshot, or begin it again. What is in the topic now and is not met
        again will be deleted at its end.
        """
        if table == self.outbox:
            return
        ends = self.log.end_offsets(self._topic(table))
        since = (
            {str(partition): end for partition, end in ends.items()} if any(ends.values()) else None
        )
        self.state.tables[table].snapshot = SnapshotState(since=since)

    def _make_good(self, table: str) -> None:
        """Read a table again of which changes were missed; one whose snapshot is still to begin
        needs nothing.
        """
        snapshot = self.state.tables[table].snapshot
        if snapshot is None or snapshot.after is not None:
            logger.warning(
                "Changes of %s may have been missed, since it was not captured for a while: it is"
                " read again.",
                table,
            )
            self.renew(table)

    # Rows

    def write(self, part: Part) -> None:
        self._widen([item.shape for item in part.items if isinstance(item, Reshaped)])
        for item in part.items:
            self._write(item)
        self.transactions += part.transactions
        if part.position is not None:
            self.state.position = part.position

    def _write(self, item: Item) -> None:
        if isinstance(item, Reshaped):
            self.add(item.shape)
            if item.missed:
                self._make_good(item.shape.name)
        elif isinstance(item, Changes):
            rows = item.rows if self.preimages else _without_preimages(item.rows)
            self._append(item.table, rows)
            self.changes += rows.num_rows
        elif isinstance(item, Chunk):
            self._write_chunk(item)
        elif isinstance(item, Truncated) and item.table != self.outbox:
            self._append_deletes(item.table, self._live(item.table), item)
        elif isinstance(item, Event):
            self._write_event(item)
        elif isinstance(item, Aside):
            self._put_aside(item)

    def _append(self, table: str, rows: pa.RecordBatch) -> None:
        if not rows.num_rows:
            return
        if table == self.outbox:
            for event in events(self.shapes[table], rows, self.prefix):
                self._write_event(event)
            return
        fitting = self._fittings[table]
        fitted = fitting.rows(rows)
        self._check_keys(table, fitted, fitting)
        self._transaction().append(fitting.topic, fitted)
        self._written.setdefault(table, []).append(_keys_of(fitted, fitting.key))
        self.waiting_rows += rows.num_rows
        self.rows += rows.num_rows

    @staticmethod
    def _check_keys(table: str, rows: pa.RecordBatch, fitting: Fitting) -> None:
        for name in fitting.key:
            if rows.column(name).null_count:
                raise InputError(
                    f"A row of {table} has no value in its key column {name!r}.",
                    fix=(
                        f"give it one, and make the column NOT NULL: {table} cannot be captured so."
                    ),
                )

    def _write_event(self, item: Event) -> None:
        if item.topic not in self._events:
            self.log.create_topic(
                item.topic, item.ddl, key=item.key, partitions=self.partitions, exist_ok=True
            )
            self._events.add(item.topic)
        self._transaction().append(item.topic, item.rows)
        self.waiting_rows += item.rows.num_rows
        self.rows += item.rows.num_rows

    def _put_aside(self, item: Aside) -> None:
        dead = ensure_topic(self.log, item.topic)
        self._transaction().append(dead, letters_to_rows(item.letters))
        self.aside += len(item.letters)
        self.waiting_rows += len(item.letters)
        logger.warning(
            "%d records of %s cannot be used, such as offset %s: %s. They are in %s.",
            len(item.letters),
            item.topic,
            item.letters[0].offset,
            item.letters[0].reason,
            dead,
        )

    # Snapshots

    def _write_chunk(self, chunk: Chunk) -> None:
        snapshot = self.state.tables[chunk.table].snapshot
        if snapshot is None:
            return
        self._append(chunk.table, chunk.rows)
        snapshot.rows += chunk.rows.num_rows
        snapshot.after = chunk.after if chunk.after is not None else snapshot.after
        self._transaction()  # an empty table's snapshot is progress too
        if chunk.is_last:
            if snapshot.since is not None:
                before = {int(partition): end for partition, end in snapshot.since.items()}
                self._append_deletes(chunk.table, self._live(chunk.table, before), None)
            self.state.tables[chunk.table].snapshot = None

    def _live(self, table: str, before: dict[int, int] | None = None) -> pa.Table:
        return live_keys(
            self.log,
            self._fittings[table].topic,
            before=before,
            written=self._written.get(table, ()),
        )

    def _append_deletes(self, table: str, keys: pa.Table, item: Truncated | None) -> None:
        hidden = dict(item.hidden) if item else {}
        shape = self.shapes[table]
        for batch in keys.to_batches(max_chunksize=100_000):
            count = batch.num_rows
            columns = {name: batch.column(name) for name in batch.schema.names}
            columns |= {
                each.name: pa.array([hidden.get(each.name)] * count, each.type)
                for each in HIDDEN_FIELDS
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
        """1. rows are in the transaction; 2. the state joins them; 3. both become visible at
        once.
        """
        transaction = self._transaction()
        transaction.set_note(note_name(self.capture), self.state.to_json())
        self._last, self._open = transaction, None
        transaction.commit()
        self._written, self.waiting_rows = {}, 0
        self._committed = (self.rows, self.changes, self.transactions, self.aside)

    def _abort(self) -> None:
        if self._open is not None:
            self._open.abort()
            self._last, self._open = self._open, None
        self._written, self.waiting_rows = {}, 0
        self.rows, self.changes, self.transactions, self.aside = self._committed

    def close(self) -> None:
        self._abort()


def _keys_of(rows: pa.RecordBatch, key: tuple[str, ...]) -> pa.RecordBatch:
    """What is remembered of rows that are not committed yet: as little as will do, since a
    transaction may be large.
    """
    changes = pc.dictionary_encode(rows.column(CHANGE_TYPE))
    return pa.RecordBatch.from_arrays(
        [*(rows.column(name) for name in key), changes], names=[*key, CHANGE_TYPE]
    )


def _without_preimages(rows: pa.RecordBatch) -> pa.RecordBatch:
    is_before = pc.equal(rows.column(CHANGE_TYPE), UPDATE_BEFORE)
    return rows.filter(pc.invert(is_before)) if pc.any(is_before).as_py() else rows
