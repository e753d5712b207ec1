"""A view's recent changes, kept for those who follow it: Arrow record batches of whole ticks,
bounded in rows and bytes, oldest let go first.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import CHANGE_TYPE, CHANGE_TYPES, INSERT, TICK
from headrace.errors import ChangesGone
from headrace.views.file import ViewInfo

MAX_CHANGES = 100_000
MAX_BYTES = 64 << 20
_ROWS_A_BATCH = 8_192
_KINDS = pa.array(CHANGE_TYPES)


@dataclass(frozen=True)
class Kept:
    """What is kept of a view's changes: every tick after `after`; so many rows and bytes."""

    after: int
    rows: int = 0
    size: int = 0


def _stored_schema(view: ViewInfo) -> pa.Schema:
    return view.schema.append(pa.field(TICK, pa.int64())).append(pa.field(CHANGE_TYPE, pa.int8()))


def keep(db: sqlite3.Connection, view: ViewInfo, changes: pa.Table, max_rows: int) -> Kept:
    """Add the changes of new ticks, and let go of old ones beyond the bounds. A tick is kept whole
    or not at all.
    """
    kept = Kept(view.kept_after, view.kept_rows, view.kept_bytes)
    added: list[tuple[int, int, bytes]] = []
    room_rows, room_bytes = max_rows, max(MAX_BYTES, MAX_BYTES * max_rows // MAX_CHANGES)
    for batch in reversed(list(_batches(view, changes, max(1, min(_ROWS_A_BATCH, max_rows // 8))))):
        last_tick = batch.column(TICK)[-1].as_py()
        data = batch.serialize().to_pybytes() if batch.num_rows <= room_rows else b""
        room_rows, room_bytes = room_rows - batch.num_rows, room_bytes - len(data)
        if (
            room_rows < 0 or room_bytes < 0
        ):  # nobody can follow past a hole, so what is before it goes too
            db.execute("DELETE FROM _changes WHERE view = ?", (view.number,))
            kept = Kept(last_tick)
            break
        added.append((last_tick, batch.num_rows, data))
    kept = _let_go(db, view.number, kept, max(0, room_rows), max(0, room_bytes))
    statement = "INSERT INTO _changes (view, last_tick, rows, data) VALUES (?, ?, ?, ?)"
    db.executemany(statement, [(view.number, *each) for each in reversed(added)])
    return Kept(
        kept.after,
        kept.rows + sum(rows for _, rows, _ in added),
        kept.size + sum(len(data) for _, _, data in added),
    )


def _let_go(
    db: sqlite3.Connection, number: int, kept: Kept, room_rows: int, room_bytes: int
) -> Kept:
    """Drop the oldest until the others fit into the room that the new ones leave."""
    last = None
    oldest_first = db.execute(
        "SELECT id, last_tick, rows, length(data) FROM _changes WHERE view = ? ORDER BY id",
        (number,),
    )
    while kept.rows > room_rows or kept.size > room_bytes:
        last, last_tick, rows, size = oldest_first.fetchone()
        kept = Kept(last_tick, kept.rows - rows, kept.size - size)
    oldest_first.close()
    if last is not None:
        db.execute("DELETE FROM _changes WHERE view = ? AND id <= ?", (number, last))
    return kept


def _batches(view: ViewInfo, changes: pa.Table, rows_a_batch: int) -> Iterator[pa.RecordBatch]:
    """Changes cut at ticks into batches of about so many rows; a larger tick makes a larger one."""
    if changes.num_rows == 0:
        return
    kinds = (
        changes[CHANGE_TYPE]
        if CHANGE_TYPE in changes.schema.names
        else pa.array([INSERT] * changes.num_rows)
    )
    columns = [
        *(changes[name] for name in view.schema.names),
        changes[TICK],
        pc.index_in(kinds, value_set=_KINDS).cast(pa.int8()),
    ]
    stored = pa.Table.from_arrays(columns, schema=_stored_schema(view)).combine_chunks()
    ticks = changes[TICK].to_numpy()
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ticks)) + 1])
    firsts = starts[np.concatenate([[True], np.diff(starts // rows_a_batch) > 0])]
    for first, stop in zip(firsts.tolist(), [*firsts[1:].tolist(), len(ticks)], strict=True):
        (batch,) = stored.slice(first, stop - first).to_batches()
        yield batch


def changes_since(
    db: sqlite3.Connection, view: ViewInfo, tick: int
) -> Iterator[tuple[int, pa.Table]]:
    """For each later tick that changed anything: its number, and the changes. ChangesGone at once
    if they are not all there.
    """
    if not view.kept_after <= tick <= view.tick:
        raise ChangesGone(view.name, tick, view.kept_after, view.tick)
    stored = db.execute(
        "SELECT data FROM _changes WHERE view = ? AND last_tick > ? ORDER BY id",
        (view.number, tick),
    ).fetchall()
    return _ticks(view, [data for (data,) in stored], tick)


def _ticks(view: ViewInfo, stored: list[bytes], after: int) -> Iterator[tuple[int, pa.Table]]:
    schema = _stored_schema(view)
    for data in stored:
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
        kinds = _KINDS.take(batch.column(CHANGE_TYPE))
        rows = pa.Table.from_arrays(
            [*batch.columns[:-2], kinds],
            schema=view.schema.append(pa.field(CHANGE_TYPE, pa.string())),
        )
        ticks = batch.column(TICK).to_numpy()
        starts = np.concatenate([[0], np.flatnonzero(np.diff(ticks)) + 1])
        for first, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(ticks)], strict=True):
            if ticks[first] > after:
                yield int(ticks[first]), rows.slice(first, stop - first)
