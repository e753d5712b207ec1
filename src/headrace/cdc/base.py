"""What a captured database must be able to do, and how to write a source for another one.

A source implements the protocol `CaptureSource`. It delivers *parts* of the database's stream of
changes, in commit order; `CaptureLoop` (in `capture`) writes them to the log and confirms them.
A part consists of items: changes of a table, a chunk of a snapshot, a change of a table's columns,
and so on. Rows are Arrow batches with the table's columns, then the hidden ones
(`columnar.columns.HIDDEN_FIELDS`), then `_change_type`.

    source in      BEGIN; INSERT INTO orders VALUES (1, 'new');
                   UPDATE orders SET state = 'paid' WHERE id = 1; COMMIT;

    part out       StreamPart(position="16/B374D848", transactions=1, items=[
                       TableChanges("public.orders", rows)])

    rows           id  state   _position  _transaction  _order  _change_type
                   1   'new'   98…        745           0       insert
                   1   'new'   98…        745           1       update_preimage
                   1   'paid'  98…        745           1       update_postimage

The position is the source's own text. It is stored in the log in the same transaction as the rows,
and given back to `start` after a restart.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from headrace.columnar.columns import CHANGE_FIELD, HIDDEN_FIELDS
from headrace.connector import InboundConnector
from headrace.errors import ConfigurationError, InputError, nearest
from headrace.log.dead_letters import DeadLetter
from headrace.types.schema import RESERVED_COLUMNS, parse_schema

logger = logging.getLogger("headrace.cdc")
DEFAULT_CHUNK_ROWS = 50_000
INITIAL, NEVER, WHEN_NEEDED, ONLY = "initial", "never", "when_needed", "only"
SNAPSHOT_MODES = (INITIAL, NEVER, WHEN_NEEDED, ONLY)


@dataclass(frozen=True, kw_only=True)
class CaptureSpec(InboundConnector):
    """A declared capture: tables of one database that are followed into the log.

    Attributes:
        name: Identifies the capture; its position and progress are stored under it.
        opener: Makes the source, and imports the driver that it needs.
        tables: The tables to capture; all of them if empty.
        prefix: Put in front of the topics' names.
        partitions: How many partitions a new topic gets.
        preimages: Whether the row before an update is stored too.
        topic: A template of the topics' names, with `{schema}` and `{table}`; by default the
            table's name, after the schema's unless that is `public`.
        snapshot: When the rows that are in a table already are read: "initial" (or True) first,
            "never" (or False), "when_needed" also when the database has lost what follows the
            position, "only" without following changes.
        chunk_rows: The most rows of one chunk of a snapshot.
        outbox: A table whose rows are events, for topics named by their `aggregate_type`.
        include: Columns as `table.column`. Of a table of which any is named, only those and the
            key are captured.
        exclude: Columns that are not captured.
        mask: By column, the text that stands in its place.
        hash: Columns that are replaced by the SHA-256 of `salt` and the value.
        salt: A secret in front of what is hashed.
        where: By table, a condition; only rows for which it is true are captured.
        schema_topic: A topic for the changes of tables' columns.
        transaction_topic: A topic with one row for each transaction.
    """

    noun: ClassVar[str] = "capture"

    name: str
    opener: Callable[[CaptureSpec], CaptureSource] = field(repr=False, compare=False)
    tables: tuple[str, ...] = ()
    prefix: str = ""
    partitions: int = 1
    preimages: bool = False
    topic: str | None = None
    snapshot: bool | str = True
    chunk_rows: int = DEFAULT_CHUNK_ROWS
    outbox: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    mask: Mapping[str, str] = field(default_factory=dict)
    hash: tuple[str, ...] = ()
    salt: str = field(default="", repr=False)
    where: Mapping[str, str] = field(default_factory=dict)
    schema_topic: str | None = None
    transaction_topic: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_rows < 1 or self.partitions < 1:
            raise InputError("chunk_rows and partitions must be at least 1.")
        if self.snapshot_mode not in SNAPSHOT_MODES:
            raise InputError(
                f"snapshot={self.snapshot!r}: {nearest(str(self.snapshot), SNAPSHOT_MODES)}"
            )

    @property
    def snapshot_mode(self) -> str:
        """When existing rows are read: one of `SNAPSHOT_MODES`."""
        if isinstance(self.snapshot, bool):
            return INITIAL if self.snapshot else NEVER
        return self.snapshot

    def open(self) -> CaptureSource:
        """Open the source. It must be started before it is polled."""
        return self.opener(self)


class CaptureSource(Protocol):
    """A database that is captured.

    Every method may raise `RetryError` (the database is away; the session ends, and a new one is
    started) or `ConfigurationError` (somebody must act; the capture ends).
    """

    def start(self, position: str | None, *, start_over: bool = False) -> str:
        """Begin to stream.

        What capture needs in the database (triggers, a replication slot) is created here.

        Args:
            position: Stream what follows it; None streams what happens from now on.
            start_over: Create what is needed anew, even if it exists.

        Returns:
            The position at which the stream begins.
        """

    def tables(self) -> list[TableShape]:
        """Return the tables to capture, as they are now. Called at the start and from time to time,
        to find new tables.
        """

    def request(self, chunk: ChunkRequest) -> None:
        """Request a chunk of a snapshot, which comes with one of the next parts. There is at most
        one request at a time.
        """

    def count(self, table: str) -> int:
        """Return about how many rows a table has, for progress."""

    def poll(self, timeout_s: float) -> StreamPart:
        """Return the next part; an empty one if nothing comes in time."""

    def is_caught_up(self) -> bool:
        """Return whether everything has been delivered that was committed before the first call."""

    def confirm(self, position: str) -> None:
        """Everything up to a position is durable in the log: the database need not keep it."""

    def status(self) -> dict[str, Any]:
        """Return how the source is doing: what it retains for the capture, how far it is behind."""

    def close(self) -> None: ...

    def remove(self) -> list[str]:
        """Remove what capture created in the database. Returns descriptions of it."""


class PositionLost(ConfigurationError):
    """The database has not, or may not have, what follows the position. Everything has to be read
    again: start over. A capture with `snapshot="when_needed"` does that by itself.
    """


# Tables


@dataclass(frozen=True)
class TableStorage:
    """Where a table's rows are. It shows that rows came, went or were rewritten without a change in
    the stream: a partition was attached or truncated, a column was given another type.

        parts = {"orders_2026 16402 16402"}, files = "16400", definition = "9f3c…"

    A source that cannot tell has none.
    """

    parts: tuple[str, ...] = ()
    """What the rows are in. When one is another, rows came or went."""
    empty_parts: tuple[str, ...] = ()
    """Those that have never had a row. A new one brings none."""
    files: str = ""
    definition: str = ""
    """Rows were rewritten if both are other ones. Files alone change when a table is compacted,
    definitions alone when a default is set.
    """
    published: str = ""
    """Under which name, and with which settings, the source publishes the table's changes. While it
    was another one, changes may not have been in the stream. Empty in what was stored before this.
    """

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> TableStorage:
        return TableStorage(
            parts=tuple(raw["parts"]),
            empty_parts=tuple(raw["empty_parts"]),
            files=raw["files"],
            definition=raw["definition"],
            published=raw.get("published", ""),
        )

    def was_rewritten_since(self, before: TableStorage) -> bool:
        """Return whether rows may have changed without a change in the stream."""
        went = {*before.parts} - {*self.parts}
        came = {*self.parts} - {*before.parts} - {*self.empty_parts}
        is_rewritten = self.files != before.files and self.definition != before.definition
        was_unpublished = bool(before.published) and self.published != before.published
        return bool(went or came) or is_rewritten or was_unpublished


@dataclass(frozen=True)
class TableShape:
    """A table as the source has it now."""

    name: str
    columns: tuple[tuple[str, str], ...]
    """Names, and types in Spark's DDL."""
    key: tuple[str, ...]
    """The columns that identify a row."""
    storage: TableStorage | None = field(default=None, compare=False)
    """Where the rows are. If it shows that they changed unseen, the table is read again."""
    copies: str | None = None
    """For a table without a key, whose key is a digest of the row: the column with the number of
    rows that are equal. Its changes are inserts and deletes of single rows, with a null there.
    """

    def key_in(self, own_names: Sequence[str]) -> tuple[str, ...]:
        """Return the key's columns under the source's own names, given its names of all columns."""
        names = dict(zip([name for name, _ in self.columns], own_names, strict=True))
        return tuple(names[name] for name in self.key)

    @property
    def ddl(self) -> str:
        return ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in self.columns)

    @cached_property
    def schema(self) -> pa.Schema:
        return parse_schema(self.ddl)

    @cached_property
    def batch_schema(self) -> pa.Schema:
        """The schema of a batch of changes: the table's columns, the hidden ones, the change
        type.
        """
        return pa.schema([*self.schema, *HIDDEN_FIELDS, CHANGE_FIELD])


_RESERVED_NAMES = {*RESERVED_COLUMNS, *(field.name for field in HIDDEN_FIELDS)}


def usable_names(names: Sequence[str]) -> list[str]:
    """Return column names that a topic can have: an underscore is appended to a name that is
    reserved or differs from another one in case only.
    """
    usable: list[str] = []
    taken = set(_RESERVED_NAMES)
    for name in names:
        chosen = name or "_"
        while chosen.lower() in taken:
            chosen += "_"
        taken.add(chosen.lower())
        usable.append(chosen)
    return usable


class SkippedTables:
    """Logs a warning, once a table, when a table that nobody named cannot be captured."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, table: str, error: ConfigurationError) -> None:
        if table not in self._warned:
            self._warned.add(table)
            logger.warning("%s is not captured: %s", table, error)


# The stream


@dataclass(frozen=True)
class TableChanges:
    """Changes of one table, in the order in which they were made."""

    table: str
    rows: pa.RecordBatch


@dataclass(frozen=True)
class ChunkRequest:
    """A request for rows of a table, in the order of its key."""

    table: str
    after: Sequence[Any] | None
    """The key after which the chunk begins; None for the first chunk."""
    rows: int
    """The most rows."""
    condition: str | None = None
    """An SQL expression: only rows for which it is true."""


@dataclass(frozen=True)
class SnapshotChunk:
    """Rows of a snapshot, at the point of the stream at which they were read: they contain all
    changes before it, and none after it.
    """

    table: str
    rows: pa.RecordBatch
    after: Sequence[Any] | None
    """The key of the last row, in a form that JSON can hold; None if there was no row."""
    is_last: bool
    is_first: bool = False
    """Whether a snapshot begins with it, also if rows were read before: what those were is
    forgotten.
    """


@dataclass(frozen=True)
class SchemaChange:
    """A table has other columns from here on. Rows that are in the topic already are read again, in
    a snapshot while the stream goes on.

    `missed`: changes may have been missed, because the table was not captured for a while. It is
    read again in any case.
    """

    shape: TableShape
    missed: bool = False


@dataclass(frozen=True)
class Truncation:
    """All rows of a table were removed at once."""

    table: str
    hidden: Mapping[str, Any] = field(default_factory=dict)
    """Values of the hidden columns."""


@dataclass(frozen=True)
class TableStopped:
    """A table cannot be followed from here on: it was dropped, or altered too much. Its topic stays
    as it is, and the other tables go on. Once it can be captured again, `tables` has it again; it
    is followed when somebody requests a snapshot of it.
    """

    table: str
    reason: str
    """What happened, and what to do."""
    is_gone: bool = False
    """Whether it does not exist any more. It is followed as soon as there is one of its name."""


@dataclass(frozen=True)
class TopicRows:
    """Rows for a topic that is no captured table: events of an outbox, logical messages, or what a
    source of rows reads.
    """

    topic: str
    ddl: str | None
    """The columns with which a missing topic is created; None if it exists."""
    key: str
    rows: pa.RecordBatch


@dataclass(frozen=True)
class DeadRecords:
    """Records that cannot be used: they become dead letters of a topic, in the same transaction as
    the rows around them.
    """

    topic: str
    dead_letters: tuple[DeadLetter, ...]


StreamItem = (
    TableChanges
    | SnapshotChunk
    | SchemaChange
    | Truncation
    | TableStopped
    | TopicRows
    | DeadRecords
)


@dataclass(frozen=True)
class StreamPart:
    """The next part of the stream."""

    items: Sequence[StreamItem] = ()
    position: str | None = None
    """Where to resume after this part; None if it ends inside a transaction."""
    transactions: int = 0
    """How many transactions of the source end in it."""
    is_idle: bool = True
    """Whether the source has nothing more right now."""


# Marks: values that a topic's column cannot hold are null there, and noted in the hidden column
# `_marks` as JSON, so that nothing is lost. {"amount": {"text": "NaN"}} has the source's own text;
# {"document": {"unchanged": true}} says that the source did not send the value, because the change
# left it as it was.

Marks = dict[int, dict[str, Any]]
"""By row, and then by column, the mark."""
UNCHANGED = {"unchanged": True}


def marks_column(marks: Mapping[int, Mapping[str, Any]], rows: int) -> pa.Array:
    """Return the column `_marks` of a batch with that many rows."""
    if not marks:
        return pa.nulls(rows, pa.string())
    texts = [
        json.dumps(marks[row], ensure_ascii=False) if row in marks else None for row in range(rows)
    ]
    return pa.array(texts, pa.string())
