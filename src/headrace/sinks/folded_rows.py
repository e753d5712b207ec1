"""The rows that a target should have, folded from its topic into a store that is as small as it can be and goes to disk when it grows: `headrace sync --check` strikes out what the target has.

The store is a temporary SQLite database without a name. Rows stand there as JSON, under the JSON of their keys, so that two rows are equal if their texts are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.source import MARKS
from headrace.log.api import TIMESTAMP_COLUMN, Closing, Log
from headrace.log.dead import rows_to_texts
from headrace.log.json_rows import decode
from headrace.sinks.batch import batch_of
from headrace.sinks.following import belonging
from headrace.sinks.shape import Shape

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
        self._db = sqlite3.connect("", isolation_level=None)  # no name: in memory, until it is larger than the cache
        self._db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._db.execute("PRAGMA journal_mode = MEMORY")
        self._db.execute("CREATE TABLE rows (key BLOB PRIMARY KEY, text BLOB NOT NULL) WITHOUT ROWID")

    def close(self) -> None:
        self._db.close()

    # From the log

    def fold(self, log: Log, topic: str, positions: Mapping[int, int]) -> None:
        """All rows up to these places."""
        for piece in pieces(log, topic, self.shape, positions):
            batch = batch_of(piece, self.shape, {}, {}, self._lookup)
            self._db.execute("BEGIN")
            self._db.executemany("DELETE FROM rows WHERE key = ?", ((key,) for key in self._keys(batch.deletes)))
            self._db.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", self._pairs(batch.upserts))
            self._db.execute("COMMIT")

    def _lookup(self, keys: pa.Table) -> pa.Table:
        found = (self._db.execute("SELECT text FROM rows WHERE key = ?", (key,)).fetchone() for key in self._keys(keys))
        rows = decode([row[0] for row in found if row is not None], self._schema).batch
        return pa.Table.from_batches([rows]).cast(self.shape.schema)

    # Comparing

    def count(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM rows").fetchone()[0])

    def first(self, most: int) -> list[TextRow]:
        return [TextRow(*row) for row in self._db.execute("SELECT key, text FROM rows ORDER BY key LIMIT ?", (most,))]

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
    texts: list[bytes] = rows_to_texts(rows.cast(_as_compared(rows.schema))).cast(pa.binary()).to_pylist()
    return texts


def _as_compared(schema: pa.Schema) -> pa.Schema:
    """Dates and timestamps as numbers: JSON has no words for the year 10,000."""
    return pa.schema([pa.field(each.name, _number_of(each.type)) for each in schema])


def _number_of(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_date32(kind):
        return pa.int32()
    return pa.int64() if pa.types.is_timestamp(kind) else kind


# Pieces of a topic


def pieces(log: Log, topic: str, shape: Shape, positions: Mapping[int, int]) -> Iterator[list[pa.RecordBatch]]:
    """The topic up to some places, in pieces that can be folded one after the other: a row that takes values over from one of another key stands in the same piece."""
    first = log.start_offsets(topic)
    reads = [log.read(topic, partition, first.get(partition, 0), stop) for partition, stop in sorted(positions.items())]
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
    """All partitions side by side, cut at times of appending: what one commit wrote into several partitions has one time, and stays together."""
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
        counts = [int(pc.sum(pc.less(batch.column(TIMESTAMP_COLUMN).cast(pa.int64()), until)).as_py() or 0) for batch in self._rows]
        taken = [batch.slice(0, count) for batch, count in zip(self._rows, counts, strict=True) if count]
        self._rows = [batch.slice(count) for batch, count in zip(self._rows, counts, strict=True) if count < batch.num_rows]
        if not self._rows and not self.is_ended:
            self.read_on()
        return taken
