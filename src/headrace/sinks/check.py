"""Compares a target with its topic, key by key: `headrace sync --check`.

1. The topic is folded, up to the offsets of the target's checkpoint, into the rows that the target
   should have (`ExpectedRows`). A sink may run meanwhile.
2. The target is read chunk by chunk. Rows that are equal are removed from the expected ones; others
   are extra or different.
3. The expected rows that are left are missing in the target.

Neither side is held in memory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import MARKS, OFFSET_COLUMN, PARTITION_COLUMN, TIMESTAMP_COLUMN
from headrace.log.api import Closeable, Log
from headrace.log.dead_letters import rows_to_json_column
from headrace.sinks.base import SinkSpec
from headrace.sinks.batch import TargetShape, build_batch
from headrace.sinks.topic_follower import cuts_key_change
from headrace.types.json_codec import decode_rows

CHUNK_ROWS = 100_000
CHUNK_BYTES = 32 << 20
CACHE_KIB = 32 << 10


@dataclass(frozen=True)
class ComparedRow:
    """A row as it is compared: its key and all its columns, as JSON."""

    key: bytes
    text: bytes

    def values(self, shape: TargetShape) -> dict[str, Any]:
        """Return the row's values for people: dates and times as such, where Python has them."""
        rows = decode_rows([self.text], _as_compared(shape.schema)).batch
        try:
            values: dict[str, Any] = pa.Table.from_batches([rows]).cast(shape.schema).to_pylist()[0]
        except (pa.ArrowException, ValueError, OverflowError):
            values = rows.to_pylist()[0]
        return values


class ExpectedRows(Closeable):
    """The rows that a target should have, in a temporary SQLite database that is in memory until it
    grows. Rows are stored as JSON, so that two rows are equal if their texts are.
    """

    def __init__(self, shape: TargetShape, db: sqlite3.Connection) -> None:
        self.shape = shape
        self._schema = _as_compared(shape.schema)
        self._db = db

    @classmethod
    def open(cls, shape: TargetShape) -> Self:
        """Create the temporary database."""
        db = sqlite3.connect("", isolation_level=None)  # in memory, up to the cache's size
        db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        db.execute("PRAGMA journal_mode = MEMORY")
        db.execute("CREATE TABLE rows (key BLOB PRIMARY KEY, text BLOB NOT NULL) WITHOUT ROWID")
        return cls(shape, db)

    def close(self) -> None:
        self._db.close()

    def fold(
        self,
        log: Log,
        topic: str,
        positions: Mapping[int, int],
        as_stored: Callable[[pa.Table], pa.Table],
    ) -> None:
        """Fold a topic up to the given offsets. `as_stored` returns rows as the target has them."""
        for chunk in topic_chunks(log, topic, self.shape, positions):
            batch = build_batch(chunk, self.shape, {}, {}, self._lookup)
            self._db.execute("BEGIN")
            self._db.executemany(
                "DELETE FROM rows WHERE key = ?", ((key,) for key in self._keys(batch.deletes))
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO rows VALUES (?, ?)", self._pairs(as_stored(batch.upserts))
            )
            self._db.execute("COMMIT")

    def _lookup(self, keys: pa.Table) -> pa.Table:
        stored = (
            self._db.execute("SELECT text FROM rows WHERE key = ?", (key,)).fetchone()
            for key in self._keys(keys)
        )
        rows = decode_rows([row[0] for row in stored if row is not None], self._schema).batch
        return pa.Table.from_batches([rows]).cast(self.shape.schema)

    def count(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM rows").fetchone()[0])

    def first(self, limit: int) -> list[ComparedRow]:
        """Return the rows with the smallest keys."""
        rows = self._db.execute("SELECT key, text FROM rows ORDER BY key LIMIT ?", (limit,))
        return [ComparedRow(*row) for row in rows]

    def remove_equal(self, rows: pa.Table) -> list[ComparedRow]:
        """Remove the expected rows that are equal to the given ones. Returns the given ones that
        equal none.
        """
        pairs = self._pairs(rows)
        delete_equal = "DELETE FROM rows WHERE key = ? AND text = ?"
        self._db.execute("BEGIN")
        if self._db.executemany(delete_equal, pairs).rowcount == len(pairs):
            self._db.execute("COMMIT")
            return []
        self._db.execute("ROLLBACK")  # some are not equal: find out which, one by one
        self._db.execute("BEGIN")
        unequal = [
            ComparedRow(*pair)
            for pair in pairs
            if not self._db.execute(delete_equal, pair).rowcount
        ]
        self._db.execute("COMMIT")
        return unequal

    def pop(self, key: bytes) -> ComparedRow | None:
        """Remove and return the expected row of a key; None if there is none."""
        row = self._db.execute("SELECT key, text FROM rows WHERE key = ?", (key,)).fetchone()
        self._db.execute("DELETE FROM rows WHERE key = ?", (key,))
        return None if row is None else ComparedRow(*row)

    def _keys(self, rows: pa.Table) -> list[bytes]:
        return _texts(rows.select(list(self.shape.key)))

    def _pairs(self, rows: pa.Table) -> list[tuple[bytes, bytes]]:
        return list(zip(self._keys(rows), _texts(rows.cast(self.shape.schema)), strict=True))


def _texts(rows: pa.Table) -> list[bytes]:
    texts: list[bytes] = (
        rows_to_json_column(rows.cast(_as_compared(rows.schema))).cast(pa.binary()).to_pylist()
    )
    return texts


def _as_compared(schema: pa.Schema) -> pa.Schema:
    """Return a schema in which dates and timestamps are numbers, since dates beyond the year 9999
    cannot be written as JSON.
    """
    return pa.schema([pa.field(field.name, _compared_type(field.type)) for field in schema])


def _compared_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_date32(kind):
        return pa.int32()
    return pa.int64() if pa.types.is_timestamp(kind) else kind


# Chunks of a topic


def topic_chunks(
    log: Log, topic: str, shape: TargetShape, positions: Mapping[int, int]
) -> Iterator[list[pa.RecordBatch]]:
    """Yield a topic up to the given offsets, in chunks that can be folded one after the other: a
    row that takes unchanged values over from a row of another key is in the same chunk.
    """
    first = log.start_offsets(topic)
    reads = [
        log.read(topic, partition, first.get(partition, 0), stop)
        for partition, stop in sorted(positions.items())
    ]
    if MARKS in shape.source.names and len(reads) > 1:
        yield from _chunks_by_time([iter(read) for read in reads])
        return
    for read in reads:
        yield from _chunks_of_partition(iter(read))


def _chunks_of_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        if _is_full(waiting) and not cuts_key_change(waiting, batch, 0):
            yield waiting
            waiting = []
        waiting.append(batch)
    if waiting:
        yield waiting


def _is_full(waiting: list[pa.RecordBatch]) -> bool:
    rows = sum(batch.num_rows for batch in waiting)
    size = sum(batch.nbytes for batch in waiting)
    return bool(rows >= CHUNK_ROWS or size >= CHUNK_BYTES)


def _chunks_by_time(readers: list[Iterator[pa.RecordBatch]]) -> Iterator[list[pa.RecordBatch]]:
    """Yield all partitions in parallel, cut between append times: what one commit wrote to several
    partitions has the same time, and stays in one chunk.
    """
    lanes = [_PartitionLane(reader) for reader in readers]
    waiting: list[pa.RecordBatch] = []
    while True:
        until = min((lane.newest for lane in lanes if not lane.is_ended), default=None)
        taken = [batch for lane in lanes for batch in lane.take(until)]
        if not taken and until is None:
            break
        if not taken:  # one commit that is larger than what was read of it
            for lane in lanes:
                if not lane.is_ended and lane.newest == until:
                    lane.read_on()
        waiting += taken
        if _is_full(waiting):
            yield waiting
            waiting = []
    if waiting:
        yield waiting


class _PartitionLane:
    """One partition, read as far as needed. Unless it has ended, at least one row is buffered."""

    def __init__(self, reader: Iterator[pa.RecordBatch]) -> None:
        self._reader = reader
        self._rows: list[pa.RecordBatch] = []
        self.is_ended = False
        self.read_on()

    def read_on(self) -> None:
        batch = next((batch for batch in self._reader if batch.num_rows), None)
        if batch is None:
            self.is_ended = True
        else:
            self._rows.append(batch)

    @property
    def newest(self) -> int:
        return int(self._rows[-1].column(TIMESTAMP_COLUMN)[-1].value)

    def take(self, until: int | None) -> list[pa.RecordBatch]:
        """Remove and return what was appended before a time; everything, if none is given."""
        if until is None:
            taken, self._rows = self._rows, []
            return taken
        counts = [
            int(
                pc.sum(pc.less(batch.column(TIMESTAMP_COLUMN).cast(pa.int64()), until)).as_py() or 0
            )
            for batch in self._rows
        ]
        taken = [
            batch.slice(0, count) for batch, count in zip(self._rows, counts, strict=True) if count
        ]
        self._rows = [
            batch.slice(count)
            for batch, count in zip(self._rows, counts, strict=True)
            if count < batch.num_rows
        ]
        if not self._rows and not self.is_ended:
            self.read_on()
        return taken


MISSING, EXTRA, DIFFERENT = "missing", "extra", "different"


@dataclass(frozen=True)
class Difference:
    """A key on which target and log disagree.

    `kind` is "missing" (the target has no row), "extra" (the log has none) or "different" (the
    values in `columns` differ). `log` and `target` are the rows of both sides.
    """

    kind: str
    key: Mapping[str, Any]
    columns: tuple[str, ...] = ()
    log: Mapping[str, Any] | None = None
    target: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class SinkComparison:
    """The result of a comparison."""

    rows: int
    """How many rows the target should have."""
    counts: Mapping[str, int]
    """How many keys are "missing", "extra" and "different"."""
    examples: Sequence[Difference]
    """Those of them with the smallest keys."""
    positions: Mapping[int, int]
    """By partition, the offset up to which was compared."""
    unreadable: int = 0
    """How many rows, keys or files of the target could not be read. Their rows count as missing."""
    unreadable_examples: Sequence[str] = ()
    """Descriptions of the first of these."""

    @property
    def is_equal(self) -> bool:
        return not any(self.counts.values()) and not self.unreadable


def compare(sink: SinkSpec, log: Log, topic: str, *, max_examples: int = 20) -> SinkComparison:
    """Compare a sink's target with its topic. Nothing is changed."""
    shape = sink.shape_for(log.topic(topic))
    read_only = replace(sink, create=False)
    with read_only.open(shape, log) as target, ExpectedRows.open(shape) as expected:
        target.prepare()
        checkpoint, chunks = target.contents()
        positions = dict(checkpoint.positions) if checkpoint is not None else {}
        expected.fold(log, topic, positions, target.as_stored)
        rows = expected.count()
        comparer = _Comparer(expected, max_examples)
        first = log.start_offsets(topic)
        for chunk in chunks:
            comparer.compare(chunk if shape.is_merge else _rows_from(chunk, first))
        counts, examples = comparer.result()
        return SinkComparison(
            rows=rows,
            counts=counts,
            examples=examples,
            positions=positions,
            unreadable=target.unreadable.count,
            unreadable_examples=target.unreadable.examples,
        )


def _rows_from(rows: pa.Table, first: Mapping[int, int]) -> pa.Table:
    """Return the appended rows that retention has not removed from the topic since."""
    starts = pa.array(
        [first.get(partition, 0) for partition in range(max(first, default=0) + 1)], pa.int64()
    )
    return rows.filter(
        pc.greater_equal(rows[OFFSET_COLUMN], pc.take(starts, rows[PARTITION_COLUMN]))
    )


@dataclass
class _Comparer:
    """Counts differences. Those with the smallest keys are examples."""

    expected: ExpectedRows
    max_examples: int
    _counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((MISSING, EXTRA, DIFFERENT), 0)
    )
    _examples: dict[str, list[tuple[ComparedRow | None, ComparedRow | None]]] = field(
        default_factory=lambda: {EXTRA: [], DIFFERENT: []}
    )

    def compare(self, rows: pa.Table) -> None:
        for target_row in self.expected.remove_equal(rows):
            log_row = self.expected.pop(target_row.key)
            kind = EXTRA if log_row is None else DIFFERENT
            self._counts[kind] += 1
            examples = [*self._examples[kind], (log_row, target_row)]
            examples.sort(key=lambda pair: pair[1].key if pair[1] else b"")
            self._examples[kind] = examples[: self.max_examples]

    def result(self) -> tuple[Mapping[str, int], list[Difference]]:
        self._counts[MISSING] = self.expected.count()
        pairs: list[tuple[str, ComparedRow | None, ComparedRow | None]] = [
            (MISSING, log_row, None) for log_row in self.expected.first(self.max_examples)
        ]
        pairs += [(kind, *pair) for kind, examples in self._examples.items() for pair in examples]
        shape = self.expected.shape
        return self._counts, [_difference(shape, *pair) for pair in pairs[: self.max_examples]]


def _difference(
    shape: TargetShape, kind: str, log_row: ComparedRow | None, target_row: ComparedRow | None
) -> Difference:
    log = None if log_row is None else log_row.values(shape)
    target = None if target_row is None else target_row.values(shape)
    either = log or target or {}
    columns = tuple(
        name for name in shape.values if log and target and repr(log[name]) != repr(target[name])
    )
    return Difference(
        kind=kind,
        key={name: either[name] for name in shape.key},
        columns=columns,
        log=log,
        target=target,
    )
