"""The recent changes of a view, which the store retains for subscribers: Arrow record batches of
whole ticks, bounded in rows and bytes. The oldest are evicted first.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import CHANGE_TYPE, CHANGE_TYPES, INSERT, TICK
from headrace.errors import ChangesGone
from headrace.views.file import ViewInfo

MAX_CHANGES = 100_000
MAX_BYTES = 64 << 20
_BATCH_ROWS = 8_192
_CHANGE_TYPES = pa.array(CHANGE_TYPES)


@dataclass(frozen=True)
class RetainedChanges:
    """How much of a view's changes is retained: all ticks after `after_tick`."""

    after_tick: int
    rows: int = 0
    size_bytes: int = 0


def _stored_schema(view: ViewInfo) -> pa.Schema:
    return view.schema.append(pa.field(TICK, pa.int64())).append(pa.field(CHANGE_TYPE, pa.int8()))


def retain_changes(
    db: sqlite3.Connection, view: ViewInfo, changes: pa.Table, max_rows: int
) -> RetainedChanges:
    """Store the changes of new ticks, and evict old ones beyond the bounds. A tick is retained
    whole or not at all.
    """
    retained = RetainedChanges(view.kept_after, view.kept_rows, view.kept_bytes)
    new_batches: list[tuple[int, int, bytes]] = []
    room_rows, room_bytes = max_rows, max(MAX_BYTES, MAX_BYTES * max_rows // MAX_CHANGES)
    batch_rows = max(1, min(_BATCH_ROWS, max_rows // 8))
    for batch in reversed(list(_batches(view, changes, batch_rows))):
        last_tick = batch.column(TICK)[-1].as_py()
        data = batch.serialize().to_pybytes() if batch.num_rows <= room_rows else b""
        room_rows, room_bytes = room_rows - batch.num_rows, room_bytes - len(data)
        if room_rows < 0 or room_bytes < 0:  # no subscriber can cross a gap: drop all before it
            db.execute("DELETE FROM _changes WHERE view = ?", (view.number,))
            retained = RetainedChanges(last_tick)
            break
        new_batches.append((last_tick, batch.num_rows, data))
    retained = _evict_oldest(db, view.number, retained, max(0, room_rows), max(0, room_bytes))
    statement = "INSERT INTO _changes (view, last_tick, rows, data) VALUES (?, ?, ?, ?)"
    db.executemany(statement, [(view.number, *each) for each in reversed(new_batches)])
    return RetainedChanges(
        retained.after_tick,
        retained.rows + sum(rows for _, rows, _ in new_batches),
        retained.size_bytes + sum(len(data) for _, _, data in new_batches),
    )


def _evict_oldest(
    db: sqlite3.Connection, number: int, retained: RetainedChanges, room_rows: int, room_bytes: int
) -> RetainedChanges:
    """Delete the oldest changes until the others fit into the room that the new ones leave."""
    last = None
    oldest_first = db.execute(
        "SELECT id, last_tick, rows, length(data) FROM _changes WHERE view = ? ORDER BY id",
        (number,),
    )
    while retained.rows > room_rows or retained.size_bytes > room_bytes:
        last, last_tick, rows, size = oldest_first.fetchone()
        retained = RetainedChanges(last_tick, retained.rows - rows, retained.size_bytes - size)
    oldest_first.close()
    if last is not None:
        db.execute("DELETE FROM _changes WHERE view = ? AND id <= ?", (number, last))
    return retained


def _batches(view: ViewInfo, changes: pa.Table, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Batches of whole ticks with about `batch_rows` rows each; a larger tick is a batch of its
    own.
    """
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
        pc.index_in(kinds, value_set=_CHANGE_TYPES).cast(pa.int8()),
    ]
    stored = pa.Table.from_arrays(columns, schema=_stored_schema(view)).combine_chunks()
    ticks = changes[TICK].to_numpy()
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ticks)) + 1])
    firsts = starts[np.concatenate([[True], np.diff(starts // batch_rows) > 0])]
    for first, stop in zip(firsts.tolist(), [*firsts[1:].tolist(), len(ticks)], strict=True):
        (batch,) = stored.slice(first, stop - first).to_batches()
        yield batch


def changes_since(
    db: sqlite3.Connection, view: ViewInfo, tick: int
) -> Iterator[tuple[int, pa.Table]]:
    """Each later tick that changed the view, with its changes. ChangesGone, raised at once, if some
    of them are no longer retained.
    """
    if not view.kept_after <= tick <= view.tick:
        raise ChangesGone(view.name, tick, view.kept_after, view.tick)
    stored = db.execute(
        "SELECT data FROM _changes WHERE view = ? AND last_tick > ? ORDER BY id",
        (view.number, tick),
    ).fetchall()
    return _split_ticks(view, [data for (data,) in stored], tick)


def _split_ticks(view: ViewInfo, stored: list[bytes], after: int) -> Iterator[tuple[int, pa.Table]]:
    schema = _stored_schema(view)
    for data in stored:
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
        kinds = _CHANGE_TYPES.take(batch.column(CHANGE_TYPE))
        rows = pa.Table.from_arrays(
            [*batch.columns[:-2], kinds],
            schema=view.schema.append(pa.field(CHANGE_TYPE, pa.string())),
        )
        ticks = batch.column(TICK).to_numpy()
        starts = np.concatenate([[0], np.flatnonzero(np.diff(ticks)) + 1])
        for first, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(ticks)], strict=True):
            if ticks[first] > after:
                yield int(ticks[first]), rows.slice(first, stop - first)


# The last change of each key


def last_of_each_key(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The last row of each key, in key order."""
    if rows.num_rows == 0:
        return rows
    rows = rows.take(
        pc.sort_indices(rows.select(list(key)), sort_keys=[(name, "ascending") for name in key])
    )  # a stable sort: the last change of a key stays the last
    is_last = np.ones(rows.num_rows, np.bool_)
    is_last[:-1] = np.logical_or.reduce(
        [_differs_from_next(rows[name].combine_chunks()) for name in key]
    )
    return rows if is_last.all() else rows.filter(pa.array(is_last))


def _differs_from_next(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Whether each value differs from the next one as keys compare: null equals null, NaN equals
    NaN, -0.0 equals 0.0.
    """
    left, right = column.slice(0, len(column) - 1), column.slice(1)
    is_same = pc.fill_null(pc.equal(left, right), False)
    if column.null_count:
        is_same = pc.or_(is_same, pc.and_(left.is_null(), right.is_null()))
    if pa.types.is_floating(column.type):
        is_same = pc.or_(is_same, pc.fill_null(pc.and_(pc.is_nan(left), pc.is_nan(right)), False))
    return ~is_same.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
