"""What a sink is, and how to write one.

A sink keeps a *target* (a table of a database, a directory of files, a search index) equal to a
topic. `SinkLoop` (in `sync`) reads the topic, builds batches (`batch`) and applies them, exactly
once: each commit of the target contains the rows of a batch and the target's checkpoint
(`checkpoint`), which says up to which offsets rows are applied and which process may write.

To write to a system that Headrace does not know, subclass `Target`. Eight methods say what only
that system knows; the protocol above them, `begin` and `apply`, is here, once:

    class JsonFileTarget(Target):
        def prepare(self):
            self._path = Path(self.sink.options["path"])

        @contextmanager
        def atomic(self):
            self._state = {"checkpoint": None, "rows": {}}
            if self._path.exists():
                self._state = json.loads(self._path.read_text())
            yield  # here the methods below are called
            write_atomically(self._path, json.dumps(self._state).encode(), durable=True)

        def read_checkpoint(self):
            text = self._state["checkpoint"]
            return None if text is None else SinkCheckpoint.from_json(text)

        def write_checkpoint(self, checkpoint):
            self._state["checkpoint"] = checkpoint.to_json()

        def merge(self, batch):
            for row in batch.deletes.to_pylist():
                self._state["rows"].pop(str(list(row.values())), None)
            for row in batch.upserts.to_pylist():
                self._state["rows"][str([row[name] for name in self.shape.key])] = row
            return []

        def clear(self):
            self._state["rows"].clear()

        def contents(self): ...     # only for `check`
        def lookup(self, keys): ... # only for captured tables with unchanged columns

    sink = Sink(kind="json", opener=JsonFileTarget, options={"path": "orders.json"})
    sink.run("orders", log="file:data")

A target raises `TargetUnavailable` for what passes by itself (the loop tries again),
`TargetMismatch` for what somebody must fix (the loop ends), and `RowsRefused` for rows that it will
never take (they become dead letters). If the system cannot store a checkpoint in the same commit as
rows, such as a message broker, subclass `at_least_once.MessageTarget` instead. The tests that
every target must pass are in `headrace.testing.sink_contract`, to subclass. An entry point of the
group `headrace.sinks` makes `headrace sync` know the target's URLs (`connector.PluginGroup`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Event
from typing import ClassVar, TypeVar

import pyarrow as pa

from headrace.columnar.columns import OFFSET_COLUMN, PARTITION_COLUMN
from headrace.connector import Connector
from headrace.errors import BadRows, InputError, TargetMismatch, TargetRefuses, nearest
from headrace.log.api import Closeable, Log
from headrace.log.values import TopicInfo
from headrace.sinks.batch import APPEND, MERGE, OFFSET_COLUMNS, SinkBatch, TargetShape, target_shape
from headrace.sinks.checkpoint import SinkCheckpoint, check_owner, is_next_batch, take_over
from headrace.types.json_codec import encode_rows

DEFAULT_BATCH_ROWS = 50_000
READ_ROWS = 10_000
"""Rows of a target that are in memory at a time when it is read back."""
MAX_REFUSED = 1000
"""Rows of one batch that may become dead letters. More are a sign that something else is wrong."""
MAX_DESCRIBED = 20
"""Unreadable parts of a target that are described; all are counted."""
MAX_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class SinkSpec(Connector):
    """A declared sink: a target in another system that is kept equal to a topic.

    Attributes:
        opener: Makes the target, and imports the driver that it needs.
        table: What the target is called in its system; by default as the topic.
        mode: "merge" (one row a key, the newest; the default for tables and topics with a `key`) or
            "append" (every row of the topic once, with `_partition` and `_offset`).
        key: The columns to merge by, for a topic that is not a table.
        create: Whether a missing table, or a missing column, is created.
        batch_rows: The most rows in one commit.
        commit_interval_s: How long a sink that has caught up waits after a commit.
        columns: The topic's columns that the target gets; all if there are none.
        follows: In a pipeline, the input's topic that the sink follows, if it has no topic of its
            own.
        default_name: What the sink is called if it has no name; by default `<topic>.<kind>`.
        keeps_marks: Whether the hidden column `_marks` goes along in merge mode too, because the
            target cannot be asked for values that a change left unchanged.
        keeps_all: Whether all hidden columns of a captured table go along.
    """

    noun: ClassVar[str] = "sink"

    opener: Callable[[SinkSpec, TargetShape], Target] = field(repr=False, compare=False)
    table: str | None = None
    mode: str | None = None
    key: tuple[str, ...] = ()
    create: bool = True
    batch_rows: int = DEFAULT_BATCH_ROWS
    commit_interval_s: float = 0.0
    columns: tuple[str, ...] = ()
    follows: str | None = None
    default_name: str | None = None
    keeps_marks: bool = False
    keeps_all: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in {None, MERGE, APPEND}:
            raise InputError(
                f"A sink has no mode {self.mode!r}: {nearest(str(self.mode), [MERGE, APPEND])}"
            )
        if self.batch_rows < 1:
            raise InputError("batch_rows must be at least 1.")

    def name_for(self, topic: str) -> str:
        """Return the sink's name, by default `<topic>.<kind>`. Its dead letters are in the topic
        `<name>.dead`.
        """
        return self.name or self.default_name or f"{topic}.{self.kind}"

    def shape_for(self, info: TopicInfo) -> TargetShape:
        """Return the columns and the key that the target has when it follows a topic."""
        return target_shape(
            info,
            mode=self.mode,
            key=self.key,
            columns=self.columns,
            keeps_marks=self.keeps_marks,
            keeps_all=self.keeps_all,
        )

    def open(self, shape: TargetShape, log: Log) -> Target:
        """Open the target. It must be prepared before it is used."""
        target = self.opener(self, shape)
        target.log = log
        return target


class RowsRefused(Exception):
    """The target will never take these rows: a constraint or a type forbids it. The text is the
    target's own.
    """


@dataclass(frozen=True)
class Refusal:
    """A row that a target refuses: where it stands in the topic, and why."""

    partition: int
    offset: int
    reason: str


OnRefused = Callable[[Sequence[Refusal]], None]


@dataclass
class UnreadableParts:
    """Parts of a target that cannot be read: rows, keys or files. The first are described."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, description: str) -> None:
        """Count a part that cannot be read, and describe it if it is one of the first."""
        self.count += 1
        if len(self.examples) < MAX_DESCRIBED:
            self.examples.append(description)


class Target(Closeable):
    """A target, opened by one process.

    To write, call `prepare`, `begin`, and then `apply` for each batch. To compare, call `prepare`
    and `contents`.
    """

    log: Log
    """The log of the topic, for targets that store their checkpoint there."""

    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        self.sink = sink
        self.shape = shape
        self.table = sink.table or shape.topic
        self.owner = -1
        self.stopped = Event()
        """Set when the sink should stop. What takes long checks it."""
        self.unreadable = UnreadableParts()
        """What `contents` has found and could not read, such as a file that is missing."""

    # What a kind of target implements

    @abstractmethod
    def prepare(self) -> None:
        """Connect, and create what is missing if the sink may.

        Raises:
            TargetMismatch: What is there does not fit the shape.
        """

    @abstractmethod
    def atomic(self) -> AbstractContextManager[None]:
        """Return a context in which one atomic commit is made.

        Everything done inside takes effect together when the context is left, unless another
        process has changed the target meanwhile; then, and after an exception, nothing does.
        """

    @abstractmethod
    def read_checkpoint(self) -> SinkCheckpoint | None:
        """Inside a commit: return the stored checkpoint, None if there is none."""

    @abstractmethod
    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        """Inside a commit: store a checkpoint."""

    @abstractmethod
    def merge(self, batch: SinkBatch) -> list[Refusal]:
        """Inside a commit: apply deletes, then upserts. Returns the rows that were refused."""

    @abstractmethod
    def clear(self) -> None:
        """Inside a commit: remove all rows."""

    @abstractmethod
    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        """Return the checkpoint and all rows, with the shape's columns, some at a time. Both are as
        of one moment, even if the target is written to while the rows are read. What cannot be read
        is added to `unreadable` and left out.
        """

    @abstractmethod
    def lookup(self, keys: pa.Table) -> pa.Table:
        """Return the rows that have one of the given keys."""

    def as_stored(self, rows: pa.Table) -> pa.Table:
        """Return rows as the target gives them back, for `check`: by default as they are. A target
        whose types have fewer values, such as none for -0.0, replaces those by what it stores.
        """
        return rows

    # The protocol, the same for all kinds

    def begin(
        self, owner: int, *, resume: bool = False, start_over: bool = False
    ) -> SinkCheckpoint:
        """Take over the target from whoever wrote to it before, and return where to resume.

        Args:
            owner: This process.
            resume: Go on after a failure: fail if another process has taken over meanwhile.
            start_over: Remove all rows and begin at the topic's beginning.

        Raises:
            SinkFenced: Another process has taken over.
            TargetMismatch: The target is filled from another topic.
        """
        with self.atomic():
            stored = self.read_checkpoint()
            checkpoint = take_over(stored, self.shape, owner, resume=resume, start_over=start_over)
            if start_over and not resume:
                self.clear()
            if checkpoint != stored:
                self.write_checkpoint(checkpoint)
        self.owner = owner
        return checkpoint

    def apply(self, batch: SinkBatch, on_refused: OnRefused) -> bool:
        """Apply a batch and advance the checkpoint, in one commit.

        1. Check that this process still owns the target, and that the batch is the next one.
        2. Delete and upsert.
        3. Hand refused rows to `on_refused`, which makes them durable elsewhere.
        4. Store the checkpoint. All of it becomes visible at once.

        Returns False if the target had applied the batch already.
        """
        with self.atomic():
            stored = self.read_checkpoint()  # 1
            check_owner(stored, self.owner)
            assert stored is not None
            if not is_next_batch(stored, batch):
                return False
            refused = refusals(batch.keyless, "its key is null")
            refused += self.merge(batch)  # 2
            stop = self.applied_offsets(batch)
            refused = [row for row in refused if row.offset < stop.get(row.partition, 0)]
            if refused:
                on_refused(refused)  # 3
            self.write_checkpoint(stored.with_offsets(stop))  # 4
        return True

    def applied_offsets(self, batch: SinkBatch) -> Mapping[int, int]:
        """By partition, the offset after the last that `merge` applied: the end of the batch,
        unless a kind of target can stop in the middle of one.
        """
        return batch.stop


# For the implementation of `merge`


def refusals(offsets: pa.Table, reason: str) -> list[Refusal]:
    """Return a refusal for each row of a table of partitions and offsets."""
    return [
        Refusal(row[PARTITION_COLUMN], row[OFFSET_COLUMN], reason)
        for row in offsets.select(OFFSET_COLUMNS).to_pylist()
    ]


def bisect_refused(
    rows: pa.Table, offsets: pa.Table, attempt: Callable[[pa.Table], None], refused: list[Refusal]
) -> None:
    """Call `attempt` with rows; if they are refused, with each half, and so on, until the rows that
    are to blame stand alone. These are added to `refused`.

    `attempt` raises `RowsRefused`, and must then leave nothing behind.
    """
    if not rows.num_rows:
        return
    try:
        attempt(rows)
    except RowsRefused as error:
        if rows.num_rows > 1:
            half = rows.num_rows // 2
            for start, length in ((0, half), (half, rows.num_rows - half)):
                bisect_refused(
                    rows.slice(start, length), offsets.slice(start, length), attempt, refused
                )
            return
        refused += refusals(offsets, str(error))
        check_refused(refused)


def check_refused(refused: Sequence[Refusal]) -> None:
    """Raise TargetRefuses if so many rows of a batch are refused that something else is wrong."""
    if len(refused) <= MAX_REFUSED:
        return
    raise TargetRefuses(
        f"The target refuses more than {MAX_REFUSED:,} rows of one batch, such as offset"
        f" {refused[0].offset} of partition {refused[0].partition}: {refused[0].reason}",
        fix=(
            "change the target's table or constraints so that it takes them. The checkpoint is"
            " still before this batch; the sink resumes with it."
        ),
    )


def upsert_in_chunks(
    batch: SinkBatch, attempt: Callable[[pa.Table], None], *, chunk_rows: int
) -> list[Refusal]:
    """Call `attempt` with a batch's upserts, some at a time. Returns the rows that it refuses."""
    refused: list[Refusal] = []
    for start in range(0, batch.upserts.num_rows, chunk_rows):
        rows = batch.upserts.slice(start, chunk_rows)
        offsets = batch.upsert_offsets.slice(start, chunk_rows)
        bisect_refused(rows, offsets, attempt, refused)
    return refused


# For the implementation of `contents` and `lookup`

Stored = TypeVar("Stored")
_CONVERSION_ERRORS = (ValueError, TypeError, ArithmeticError, KeyError, pa.ArrowException)


def convert_readable(
    stored: Sequence[Stored],
    convert: Callable[[Sequence[Stored]], pa.Table],
    on_unreadable: Callable[[str], None],
) -> pa.Table:
    """Convert rows as a target stores them. Rows that cannot be converted, such as a text in a
    column of dates, are found by halves, handed to `on_unreadable` and left out.
    """
    try:
        return convert(stored)
    except _CONVERSION_ERRORS as error:
        if len(stored) > 1:
            half = len(stored) // 2
            parts = (stored[:half], stored[half:])
            return pa.concat_tables(
                [convert_readable(part, convert, on_unreadable) for part in parts]
            )
        on_unreadable(f"{shorten(repr(stored[0]))}: {error}")
        return convert(stored[:0])


def shorten(text: str) -> str:
    """Return the beginning of a text that may be long."""
    is_long = len(text) > MAX_SHOWN_CHARACTERS
    return f"{text[:MAX_SHOWN_CHARACTERS]}…" if is_long else text


def refuse_unreadable(description: str) -> None:
    """Raise TargetMismatch: a row whose unchanged values are needed cannot be read.

    Leaving it out would replace its values with nulls.
    """
    raise TargetMismatch(
        f"A row of the target cannot be read, and a change needs its unchanged values:"
        f" {description}.",
        fix=(
            "correct that row; or choose another target with table=… (--table …), which gets what"
            " the topic has now."
        ),
    )


def rows_to_json(rows: pa.RecordBatch) -> list[bytes]:
    """Return each row as a JSON object, as the log writes it.

    Raises:
        RowsRefused: A value cannot be written as JSON.
    """
    try:
        return encode_rows(rows)
    except BadRows as error:
        raise RowsRefused(error.message) from error
