"""A view as it was at an earlier tick: what is there now, with the kept changes since then undone.

The first change of a key since that tick says what the key was: there is none before an insert, and the old row is in a delete or in an update's first half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import ChangesGone
from headrace.log.api import CHANGE_TYPE, INSERT, UPDATE
from headrace.serve.answers import Refused
from headrace.sinks.view_file import ViewInfo
from headrace.sinks.view_reader import Snapshot

Key = tuple[Any, ...]
_PLACE = "_place"


class TickNotKept(ChangesGone):
    """A tick that is not, or no longer, or not yet among those a view can go back to."""

    def __init__(self, view: str, asked: int, kept_after: int, tick: int) -> None:
        super().__init__(view, asked, kept_after, tick)
        self.message = f"The view {view!r} can be read at the ticks {kept_after} to {tick}, not at {asked}."
        self.fix = "choose a tick among them; a view keeps as many as its newest changes reach back."


def view_at(snap: Snapshot, info: ViewInfo, tick: int, *, key: Key | None, start: Key, stop: Key, descending: bool, most_rows: int) -> pa.Table:
    """Rows of a key, or from one key up to another, as of a tick."""
    if not info.kept_after <= tick <= info.tick:
        raise TickNotKept(info.name, tick, info.kept_after, info.tick)
    if info.is_stream:
        return _stream_at(snap, info, tick, start, stop, descending=descending)
    now = _now(snap, info, key, most_rows)
    since = [rows for _, rows in snap.changes_since(info.name, tick)]
    found = _undone(info, now, pa.concat_tables(since) if since else None)
    if key is not None:
        return found.filter(_matches(found, info.key, key))
    found = found.filter(_mask(_within(found, info.key, start, stop)))
    order = pc.sort_indices(found.select(list(info.key)), sort_keys=[(name, "ascending") for name in info.key])
    return found.take(order[::-1] if descending else order)  # nulls come last, and backwards first


def _stream_at(snap: Snapshot, info: ViewInfo, tick: int, start: Key, stop: Key, *, descending: bool) -> pa.Table:
    """A stream only grows: what came later is left out."""
    end = min([tick + 1, *stop])
    return snap.scan(info.name, start=start[0] if start else None, stop=end, reverse=descending)


def _now(snap: Snapshot, info: ViewInfo, key: Key | None, most_rows: int) -> pa.Table:
    if key is not None:
        found = snap.get(info.name, key)
        return pa.Table.from_pylist([found] if found is not None else [], schema=info.schema)
    if snap.count(info.name) > most_rows:
        raise Refused(
            400, f"The view {info.name!r} has more than {most_rows:,} rows, too many to bring back to an earlier tick.", fix="ask for a key."
        )
    return snap.table(info.name)


def _undone(info: ViewInfo, now: pa.Table, since: pa.Table | None) -> pa.Table:
    """Changes first and in their order, then what is there now: of each key the first one says what it was."""
    if since is None:
        return now
    everything = pa.concat_tables([since.select(info.schema.names), now.select(info.schema.names)]).cast(info.schema)
    placed = everything.select(list(info.key)).append_column(_PLACE, pa.array(np.arange(everything.num_rows)))
    firsts = placed.group_by(list(info.key)).aggregate([(_PLACE, "min")])[f"{_PLACE}_min"].to_numpy()
    kinds = since[CHANGE_TYPE]
    comes = pc.or_(pc.equal(kinds, INSERT), pc.equal(kinds, UPDATE)).to_numpy().astype(np.bool_)
    was_there = np.ones(everything.num_rows, np.bool_)
    was_there[: len(comes)] = ~comes
    return everything.take(pa.array(np.sort(firsts[was_there[firsts]])))


# Keys


def _matches(rows: pa.Table, names: Sequence[str], key: Key) -> pa.Array:
    wanted = np.ones(rows.num_rows, np.bool_)
    for name, value in zip(names, key, strict=True):
        wanted &= _equal(rows[name], value)
    return pa.array(wanted)


def _equal(column: pa.ChunkedArray, value: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    alike = column.is_null() if value is None else pc.fill_null(pc.equal(column, pa.scalar(value, column.type)), False)
    return alike.to_numpy().astype(np.bool_)  # type: ignore[no-any-return]


def _within(rows: pa.Table, names: Sequence[str], start: Key, stop: Key) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """At or behind the first, and before the last; a part of a key stands for all that begin with it. Null is behind everything."""
    wanted = np.ones(rows.num_rows, np.bool_)
    if start:
        wanted &= ~_before(rows, names, start)
    if stop:
        wanted &= _before(rows, names, stop)
    return wanted


def _before(rows: pa.Table, names: Sequence[str], bound: Key) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Column by column: smaller in the first one that differs."""
    before, alike = np.zeros(rows.num_rows, np.bool_), np.ones(rows.num_rows, np.bool_)
    for name, value in zip(names, bound, strict=False):
        smaller = rows[name].is_valid() if value is None else pc.fill_null(pc.less(rows[name], pa.scalar(value, rows[name].type)), False)
        before |= alike & smaller.to_numpy().astype(np.bool_)
        alike &= _equal(rows[name], value)
    return before


def _mask(wanted: np.ndarray[Any, np.dtype[np.bool_]]) -> pa.Array:
    return pa.array(wanted)
