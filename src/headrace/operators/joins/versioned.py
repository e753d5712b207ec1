"""A stream joined with the versions of a table: each row meets the row that was valid at its own time, whatever came when.

A row waits until the table's complete clock has passed its time, and is answered at the end of that tick with what is known then. A version that
comes behind the complete clock is counted: it changes nothing that was told, and holds for all rows that are told from then on. Versions are kept for
`history` behind the clock of the input that is behind, and the newest before that; rows older than that are left out and counted. The result is a
stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.errors import InputError
from headrace.operators.buffers import Ints, Mask
from headrace.operators.joins import timers
from headrace.operators.joins.matching import hull, marked, ranked, sorting
from headrace.operators.joins.pile_writing import PileWriter
from headrace.operators.joins.piles import LOWEST, Piles, Records
from headrace.operators.joins.sides import JoinColumns, ResultColumn, Rows, Side, join_keys, ticks_of
from headrace.operators.joins.timeline import Timeline, check_versioned, horizon
from headrace.operators.kernel import TICK, Clocks, KeyedState
from headrace.operators.times import microseconds

_TICK_FIELD = pa.field(TICK, pa.int64(), nullable=False)
_WAITS, _FORGETS = 0, 1


class VersionedJoin:
    """`stream.time`: the time at which a row looks; `table.time`: from when on a version is valid; the table's key is what it is joined on.

    After each step `counts` has the versions that came behind the clock (`late_versions`) and the rows older than the history (`too_old`).
    """

    hold_us = 0  # rows that wait are not before the table's clock

    def __init__(self, step: str, stream: Side, table: Side, columns: Sequence[ResultColumn], *, history_us: int, how: str = "inner") -> None:
        if how not in {"inner", "left"}:
            raise InputError(f"Step {step!r} joins a stream with versions how={how!r}.", fix='choose how="inner" or how="left".')
        self.step_name, self.stream, self.table, self.history_us, self.how = step, stream, table, history_us, how
        self._columns = JoinColumns(step, stream, table, columns, how)
        check_versioned(step, table)
        if stream.time is None:
            raise InputError(f"Step {step!r} joins a stream without a time with versions.", fix="say at which time a row looks: table.as_of(column).")
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema

    def due(self, state: KeyedState) -> int | None:
        """When the first row that waits can be told, by the table's clock."""
        return timers.earliest(state, _WAITS)

    def step_timed(self, state: KeyedState, inputs: Sequence[pa.Table], clocks: Sequence[Clocks]) -> pa.Table:
        """1. Find the keys: of rows, versions, and what waited long enough. 2. Load. 3. Answer. 4. Keep what waits, and what rows may ask for."""
        rows, changes = inputs
        own, table = clocks
        if not len(own):
            return self.output.append(_TICK_FIELD).empty_table()
        keys, missing = join_keys(rows, self.stream.on)
        changed_keys, _ = join_keys(changes, self.table.on)
        clock = int(min(own.complete[-1], table.complete[-1]))
        woken = [timers.fired(state, _WAITS, int(table.complete[-1])), timers.fired(state, _FORGETS, clock)]
        found = ranked([keys, changed_keys, *(each.cast(keys.type) for each in woken)])
        piles = Piles(self.step_name, state, found.keys, sections=2, marks=2)
        known = tuple(horizon(list(each), self.history_us) for each in ((own.complete_before, table.complete_before), (own.complete, table.complete)))
        waiting = _Waiting(self, rows, missing, found.ranks[0], found.orders[0], clocks)
        waiting.load(piles, marked(len(piles), found.ranks[2]), self._columns.left_needs)
        timeline = Timeline(self.table, self._columns.right_needs, changes, found.ranks[1], table)
        timeline.load(piles, waiting.asked(), marked(len(piles), found.ranks[3]), (known[0], known[1]))
        late = timeline.fresh_at < table.complete_before[timeline.fresh_place]
        self.counts = {"late_versions": int(np.count_nonzero(late)), "too_old": waiting.too_old}
        writer = PileWriter(piles)
        waiting.store(writer)
        timeline.store(writer, self.history_us)
        writer.save((_WAITS, _FORGETS))
        return self._told(waiting, timeline, own)

    def _told(self, waiting: _Waiting, timeline: Timeline, clock: Clocks) -> pa.Table:
        """In order of tick, key, time and arrival."""
        which = np.flatnonzero(waiting.told_at < len(clock))
        version = timeline.known(waiting.keys[which], waiting.times[which], waiting.told_at[which])
        version = np.where((version >= 0) & ~np.append(timeline.gone, True)[version], version, -1)
        if self.how == "inner":
            which, version = which[version >= 0], version[version >= 0]
        order = sorting(waiting.told_at[which])
        which, version = which[order], version[order]
        columns = self._columns.arrays(waiting.rows, waiting.row[which], timeline.rows, np.append(timeline.row, -1)[version])
        ticks = clock.ticks[waiting.told_at[which]]
        return pa.Table.from_arrays([*columns, pa.array(ticks, pa.int64())], schema=self.output.append(_TICK_FIELD))


class _Waiting:
    """The rows of a call that wait for their answer or get it, stored and new, in order of key, time and arrival."""

    def __init__(self, join: VersionedJoin, rows: pa.Table, missing: Mask, keys: Ints, order: Ints, clocks: Sequence[Clocks]) -> None:
        own, self._table = clocks
        assert join.stream.time is not None
        times, places = microseconds(rows.column(join.stream.time)), own.at(ticks_of(rows))
        known = horizon([own.complete_before, self._table.complete_before], join.history_us)
        old = times < known[places]
        self.too_old = int(np.count_nonzero(old))
        used = order[~(old | (missing & (join.how == "inner")))[order]] if old.any() or missing.any() else order
        self._used, self.fresh = used, rows
        self._keys, self._times, self._places, self._missing = keys[used], times[used], places[used], missing[used]

    def load(self, piles: Piles, woken: Mask, needs: pa.Schema) -> None:
        fresh_told = np.maximum(np.searchsorted(self._table.complete, self._times, side="right"), self._places)
        stays = (fresh_told >= len(self._table)) & ~self._missing
        low, high = hull(len(piles), self._keys[stays], self._times[stays], self._times[stays])
        self._piles, self._woken = piles, woken
        passed = int(self._table.complete[-1])
        stored = piles.load(1, np.where(woken, LOWEST, low), np.where(woken, np.maximum(high, passed), high))
        self.rows = Rows(needs, stored.rows, self.fresh)
        keys, times = np.concatenate([stored.keys, self._keys]), np.concatenate([stored.at, self._times])
        told = np.concatenate([np.searchsorted(self._table.complete, stored.at, side="right"), np.where(self._missing, self._places, fresh_told)])
        row = np.concatenate([np.arange(len(stored)), len(stored) + self._used])
        order = sorting(keys, times)
        self.keys, self.times, self.told_at, self.row = keys[order], times[order], told[order], row[order]
        self._is_new = self.row >= len(stored)

    def asked(self) -> tuple[Ints, Ints]:
        """For each key the times that rows ask for; the lowest above the highest if none does."""
        told = self.told_at < len(self._table)
        return hull(len(self._piles), self.keys[told], self.times[told], self.times[told])

    def store(self, writer: PileWriter) -> None:
        """Keep what waits on, and wake it when the clock has passed its time."""
        waits = self.told_at >= len(self._table)
        which = np.flatnonzero(waits)
        mark = self._piles.marks[_WAITS]
        mark[:] = timers.of_the_rest(self._piles, 1, _WAITS, self._woken, 1)
        np.minimum.at(mark, self.keys[which], self.times[which] + 1)
        touched = np.where(self._is_new, waits, ~waits)
        if touched.any():
            records = Records(self.keys[which], self.times[which], np.zeros(len(which), np.uint8), self.rows.bytes(self.row[which]))
            writer.replace(1, records, self.keys[touched], self.times[touched])
