"""Compare a target with its topic, key by key: `headrace sync --check`.

The topic is folded up to the place that the target says it has, so a sink may run meanwhile.
Neither side is held in memory: the log's rows stand in a store that goes to disk when it grows
(`folded_rows`), and the target is read piece by piece; what it has as the log has it is struck out,
and what then is left is missing there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import MARKS, OFFSET_COLUMN, PARTITION_COLUMN, TIMESTAMP_COLUMN
from headrace.log.api import Closing, Log
from headrace.log.dead_letters import rows_to_texts
from headrace.sinks.base import Shape, SinkSpec, batch_of, shape_of
from headrace.sinks.sync import belonging
from headrace.types.json_codec import decode

# The rows that a target should have, folded from its topic into a store that is as small as it can
# be and goes to disk when it grows: `headrace sync --check` strikes out what the target has.
#
# The store is a temporary SQLite database without a name. Rows stand there as JSON, under the JSON
# of their keys, so that two rows are equal if their texts are.


PIECE_ROWS = 100_000
PIECE_BYTES = 32 << 20
CACHE_KIB = 32 << 10


@dataclass(frozen=True)
class TextRow:
    """A row as it is compared."""

    key: bytes
    text: bytes

    def values(self, shape: Shape) -> dict[str, Any]:
        """For people: dates and times as such, where Python has them."""
        rows = decode([self.text], _as_compared(shape.schema)).batch
        try:
            shown: dict[str, Any] = pa.Table.from_batches([rows]).cast(shape.schema).to_pylist()[0]
        except (pa.ArrowException, ValueError, OverflowError):
            shown = rows.to_pylist()[0]
        return shown


class FoldedRows(Closing):
    """At first nothing; then what `fold` has made of a topic."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._schema = _as_compared(shape.schema)
        self._db = sqlite3.connect(
            "", isolation_level=None
        )  # no name: in memory, until it is larger than the cache
        self._db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._db.execute("PRAGMA journal_mode = MEMORY")
        self._db.execute(
            "CREATE TABLE rows (key BLOB PRIMARY KEY, text BLOB NOT NULL) WITHOUT ROWID"
        )

    def close(self) -> None:
        self._db.close()

    # From the log

    def fold(self, log: Log, topic: str, positions: Mapping[int, int]) -> None:
        """All rows up to these places."""
        for piece in pieces(log, topic, self.shape, positions):
            batch = batch_of(piece, self.shape, {}, {}, self._lookup)
            self._db.execute("BEGIN")
            self._db.executemany(
                "DELETE FROM rows WHERE key = ?", ((key,) for key in self._keys(batch.deletes))
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO rows VALUES (?, ?)", self._pairs(batch.upserts)
            )
            self._db.execute("COMMIT")

    def _lookup(self, keys: pa.Table) -> pa.Table:
        found = (
            self._db.execute("SELECT text FROM rows WHERE key = ?", (key,)).fetchone()
            for key in self._keys(keys)
        )
        rows = decode([row[0] for row in found if row is not None], self._schema).batch
        return pa.Table.from_batches([rows]).cast(self.shape.schema)

    # Comparing

    def count(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM rows").fetchone()[0])

    def first(self, most: int) -> list[TextRow]:
        return [
            TextRow(*row)
            for row in self._db.execute("SELECT key, text FROM rows ORDER BY key LIMIT ?", (most,))
        ]

    def strike_out(self, rows: pa.Table) -> list[TextRow]:
        """Remove rows that are the same here. Returns those that are not."""
        pairs = self._pairs(rows)
        same = "DELETE FROM rows WHERE key = ? AND text = ?"
        self._db.execute("BEGIN")
        if self._db.executemany(same, pairs).rowcount == len(pairs):
            self._db.execute("COMMIT")
            return []
        self._db.execute("ROLLBACK")  # and once more, one by one, to see which
        self._db.execute("BEGIN")
        unlike = [TextRow(*pair) for pair in pairs if not self._db.execute(same, pair).rowcount]
        self._db.execute("COMMIT")
        return unlike

    def take_out(self, key: bytes) -> TextRow | None:
        found = self._db.execute("SELECT key, text FROM rows WHERE key = ?", (key,)).fetchone()
        self._db.execute("DELETE FROM rows WHERE key = ?", (key,))
        return None if found is None else TextRow(*found)

    # Texts

    def _keys(self, rows: pa.Table) -> list[bytes]:
        return _texts(rows.select(list(self.shape.key)))

    def _pairs(self, rows: pa.Table) -> list[tuple[bytes, bytes]]:
        return list(zip(self._keys(rows), _texts(rows.cast(self.shape.schema)), strict=True))


def _texts(rows: pa.Table) -> list[bytes]:
    texts: list[bytes] = (
        rows_to_texts(rows.cast(_as_compared(rows.schema))).cast(pa.binary()).to_pylist()
    )
    return texts


def _as_compared(schema: pa.Schema) -> pa.Schema:
    """Dates and timestamps as numbers: JSON has no words for the year 10,000."""
    return pa.schema([pa.field(each.name, _number_of(each.type)) for each in schema])


def _number_of(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_date32(kind):
        return pa.int32()
    return pa.int64() if pa.types.is_timestamp(kind) else kind


# Pieces of a topic


def pieces(
    log: Log, topic: str, shape: Shape, positions: Mapping[int, int]
) -> Iterator[list[pa.RecordBatch]]:
    """The topic up to some places, in pieces that can be folded one after the other: a row that
    takes values over from one of another key stands in the same piece.
    """
    first = log.start_offsets(topic)
    reads = [
        log.read(topic, partition, first.get(partition, 0), stop)
        for partition, stop in sorted(positions.items())
    ]
    if MARKS in shape.source.names and len(reads) > 1:
        yield from _by_time([iter(read) for read in reads])
        return
    for read in reads:
        yield from _grown(iter(read))


def _grown(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        if _is_enough(waiting) and not belonging(waiting, batch, 0):
            yield waiting
            waiting = []
        waiting.append(batch)
    if waiting:
        yield waiting


def _is_enough(waiting: list[pa.RecordBatch]) -> bool:
    rows, size = sum(each.num_rows for each in waiting), sum(each.nbytes for each in waiting)
    return bool(rows >= PIECE_ROWS or size >= PIECE_BYTES)


def _by_time(readers: list[Iterator[pa.RecordBatch]]) -> Iterator[list[pa.RecordBatch]]:
    """All partitions side by side, cut at times of appending: what one commit wrote into several
    partitions has one time, and stays together.
    """
    lanes = [_Lane(reader) for reader in readers]
    waiting: list[pa.RecordBatch] = []
    while True:
        until = min((lane.newest for lane in lanes if not lane.is_ended), default=None)
        taken = [batch for lane in lanes for batch in lane.take(until)]
        if not taken and until is None:
            break
        if not taken:  # one commit, larger than what was read of it
            for lane in lanes:
                if not lane.is_ended and lane.newest == until:
                    lane.read_on()
        waiting += taken
        if _is_enough(waiting):
            yield waiting
            waiting = []
    if waiting:
        yield waiting


class _Lane:
    """One partition, read as far as needed. Unless it has ended, there is a row."""

    def __init__(self, reader: Iterator[pa.RecordBatch]) -> None:
        self._reader, self._rows, self.is_ended = reader, list[pa.RecordBatch](), False
        self.read_on()

    def read_on(self) -> None:
        batch = next((each for each in self._reader if each.num_rows), None)
        if batch is None:
            self.is_ended = True
        else:
            self._rows.append(batch)

    @property
    def newest(self) -> int:
        return int(self._rows[-1].column(TIMESTAMP_COLUMN)[-1].value)

    def take(self, until: int | None) -> list[pa.RecordBatch]:
        """What was appended before a time; everything, if none is given."""
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
    """One key on which target and log disagree: a row that is missing in the target, one that it
    has too many, or one with other values in `columns`.
    """

    kind: str
    key: Mapping[str, Any]
    columns: tuple[str, ...] = ()
    log: Mapping[str, Any] | None = None
    target: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Comparison:
    """`rows` are those that the log says there should be; `counts` how many keys differ in which
    way, `examples` the first of them.
    """

    rows: int
    counts: Mapping[str, int]
    examples: Sequence[Difference]
    positions: Mapping[int, int]

    @property
    def is_equal(self) -> bool:
        return not any(self.counts.values())


def compare(sink: SinkSpec, log: Log, topic: str, *, most: int = 20) -> Comparison:
    shape = shape_of(sink, log.topic(topic))
    with (
        replace(sink, create=False).open(shape, log) as target,
        FoldedRows(shape) as expected,
    ):  # looking changes nothing
        target.prepare()
        applied, actual = target.contents()
        positions = dict(applied.positions) if applied is not None else {}
        expected.fold(log, topic, positions)
        rows = expected.count()
        comparing = _Comparing(expected, most)
        first = log.start_offsets(topic)
        for piece in actual:
            comparing.take(piece if shape.is_merge else _still_kept(piece, first))
        return Comparison(rows, *comparing.result(), positions)


def _still_kept(rows: pa.Table, first: Mapping[int, int]) -> pa.Table:
    """Appended rows that the log has not removed since."""
    starts = pa.array(
        [first.get(partition, 0) for partition in range(max(first, default=0) + 1)], pa.int64()
    )
    return rows.filter(
        pc.greater_equal(rows[OFFSET_COLUMN], pc.take(starts, rows[PARTITION_COLUMN]))
    )


@dataclass
class _Comparing:
    """What was found to differ. Of each kind, those with the smallest keys are kept as examples."""

    expected: FoldedRows
    most: int
    _counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((MISSING, EXTRA, DIFFERENT), 0)
    )
    _found: dict[str, list[tuple[TextRow | None, TextRow | None]]] = field(
        default_factory=lambda: {EXTRA: [], DIFFERENT: []}
    )

    def take(self, rows: pa.Table) -> None:
        for of_target in self.expected.strike_out(rows):
            of_log = self.expected.take_out(of_target.key)
            kind = EXTRA if of_log is None else DIFFERENT
            self._counts[kind] += 1
            self._found[kind] = sorted(
                [*self._found[kind], (of_log, of_target)],
                key=lambda pair: pair[1].key if pair[1] else b"",
            )[: self.most]

    def result(self) -> tuple[Mapping[str, int], list[Difference]]:
        self._counts[MISSING] = self.expected.count()
        pairs: list[tuple[str, TextRow | None, TextRow | None]] = [
            (MISSING, of_log, None) for of_log in self.expected.first(self.most)
        ]
        pairs += [(kind, *pair) for kind, found in self._found.items() for pair in found]
        return (
            self._counts,
            [_difference(self.expected.shape, *each) for each in pairs][: self.most],
        )


def _difference(
    shape: Shape, kind: str, of_log: TextRow | None, of_target: TextRow | None
) -> Difference:
    log, target = (each.values(shape) if each is not None else None for each in (of_log, of_target))
    known = log or target or {}
    columns = tuple(
        name for name in shape.values if log and target and repr(log[name]) != repr(target[name])
    )
    return Difference(kind, {name: known[name] for name in shape.key}, columns, log, target)
