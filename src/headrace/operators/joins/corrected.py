"""A stream joined with the versions of a table, answered at once and corrected: when a version comes that was valid at the time of a row that was
told already, what was told is taken back and told anew.

The result is a table, keyed by what identifies a row of the stream: its key, which should be its own; `NewestKernel` makes it so where it is not. Rows and versions are kept for `history` behind
the clock of the input that is behind, and of versions the newest before that. Rows older than that are left out and counted; of what is forgotten
nothing is corrected any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.errors import InputError
from headrace.operators.buffers import Ints, Mask
from headrace.operators.joins import timers
from headrace.operators.joins.matching import begins, bounds, hull, marked, pairs, ranked, search, sorting
from headrace.operators.joins.pile_writing import PileWriter
from headrace.operators.joins.piles import LOWEST, NONE, Piles, Records
from headrace.operators.joins.settling import merged
from headrace.operators.joins.sides import JoinColumns, ResultColumn, Rows, Side, join_keys, ticks_of
from headrace.operators.joins.timeline import Timeline, check_versioned, horizon
from headrace.operators.kernel import CHANGE_TYPE, TICK, Clocks, KeyedState, Times
from headrace.operators.times import microseconds

_TICK_FIELD = pa.field(TICK, pa.int64(), nullable=False)
_ROWS, _VERSIONS = 0, 1


class CorrectedJoin:
    """As `VersionedJoin`, with a table as its result; `key` is the result's. `counts`: `late_versions` are those from before what is kept."""

    hold_us = 0

    def __init__(self, step: str, stream: Side, table: Side, columns: Sequence[ResultColumn], *, history_us: int, how: str = "inner") -> None:
        if how not in {"inner", "left"}:
            raise InputError(f"Step {step!r} joins a stream with versions how={how!r}.", fix='choose how="inner" or how="left".')
        self.step_name, self.stream, self.table, self.history_us, self.how = step, stream, table, history_us, how
        self._columns = JoinColumns(step, stream, table, columns, how)
        check_versioned(step, table)
        if stream.time is None:
            raise InputError(f"Step {step!r} joins a stream without a time with versions.", fix="say at which time a row looks: table.as_of(column).")
        self.key = self._key()
        self.counts: dict[str, int] = {}

    def _key(self) -> tuple[str, ...]:
        names = {column: name for kind, column, name in self._columns.columns if kind in {"left", "key"}}
        if not self.stream.key or (missing := [column for column in self.stream.key if column not in names]):
            lacks = repr(missing[0]) if self.stream.key else "what identifies a row"
            raise InputError(f"The result of step {self.step_name!r} is a table, and lacks {lacks}.", fix="keep the columns that identify a row.")
        return tuple(names[column] for column in self.stream.key)

    @property
    def lateness_us(self) -> int:
        """How far behind the clocks a correction can be."""
        return self.history_us

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema.append(pa.field(CHANGE_TYPE, pa.string(), nullable=False))

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """Nothing waits for time."""
        return None

    def step_timed(self, state: KeyedState, inputs: Sequence[pa.Table], clocks: Sequence[Clocks]) -> pa.Table:
        """1. Find the keys. 2. Load versions, and the rows that new versions are valid for. 3. Tell and correct. 4. Keep what may be corrected."""
        rows, changes = inputs
        own, table = clocks
        if not len(own):
            return self.output.append(_TICK_FIELD).empty_table()
        keys, missing = join_keys(rows, self.stream.on)
        clock = int(min(own.complete[-1], table.complete[-1]))
        woken = [timers.fired(state, kind, clock).cast(keys.type) for kind in (_ROWS, _VERSIONS)]
        found = ranked([keys, join_keys(changes, self.table.on)[0], *woken])
        piles = Piles(self.step_name, state, found.keys, sections=2, marks=2)
        known_from = horizon([own.complete, table.complete], self.history_us)
        known_before = horizon([own.complete_before, table.complete_before], self.history_us)
        answered = _Answered(self.stream, rows, missing, found.ranks[0], found.orders[0], own, known_before, keep_missing=self.how == "left")
        timeline = Timeline(self.table, self._columns.right_needs, changes, found.ranks[1], table)
        timeline.load(piles, answered.times_by_key(len(piles)), marked(len(piles), found.ranks[3]), (known_before, known_from))
        answered.load(piles, marked(len(piles), found.ranks[2]), known_from, timeline, self._columns.left_needs)
        late = timeline.fresh_at < known_before[timeline.fresh_place]
        self.counts = {"late_versions": int(np.count_nonzero(late)), "too_old": answered.too_old}
        writer = PileWriter(piles)
        answered.store(writer, int(known_from[-1]), self.history_us)
        timeline.store(writer, self.history_us)
        writer.save((_ROWS, _VERSIONS))
        return self._told(answered, timeline, known_before, own)

    def _told(self, answered: _Answered, timeline: Timeline, known_before: Times, clock: Clocks) -> pa.Table:
        """Each row's answers one after the other: each takes the place of the one before. In order of tick, key, time and arrival."""
        row, place, version = answered.answers(timeline, known_before)
        version = np.where(np.append(timeline.gone, True)[version], -1, version)
        first = begins(row)
        told = (version >= 0) | (self.how == "left")
        goes = ~first & np.append(False, told)[:-1]
        comes = told & (place >= 0)
        which = np.concatenate([np.flatnonzero(goes), np.flatnonzero(comes)])
        shows = np.concatenate([version[np.flatnonzero(goes) - 1], version[comes]])
        is_new = np.arange(len(which)) >= np.count_nonzero(goes)
        order = sorting(place[which], row[which], is_new.astype(np.int64))
        which, shows, is_new = which[order], shows[order], is_new[order]
        columns = self._columns.arrays(answered.rows, answered.row[row[which]], timeline.rows, np.append(timeline.row, -1)[shows])
        kinds, stays = merged(columns, ~begins(place[which], row[which]), is_new)
        ticks = pa.array(clock.ticks[place[which]], pa.int64())
        result = pa.Table.from_arrays([*columns, kinds, ticks], schema=self.output.append(_TICK_FIELD))
        return result if stays.all() else result.filter(pa.array(stays))


class _Answered:
    """The stream's rows of a call, in order of key, time and arrival. `place`: that of the tick in which each came, -1 for stored ones."""

    def __init__(
        self, side: Side, rows: pa.Table, missing: Mask, keys: Ints, order: Ints, own: Clocks, known_before: Times, *, keep_missing: bool
    ) -> None:
        assert side.time is not None
        times, places = microseconds(rows.column(side.time)), own.at(ticks_of(rows))
        old = times < known_before[places]
        self.too_old = int(np.count_nonzero(old))
        self._used = order[~(old | (missing & (not keep_missing)))[order]]
        self._fresh, self._keys, self._times = rows, keys[self._used], times[self._used]
        self._places, self._missing = places[self._used], missing[self._used]

    def times_by_key(self, count: int) -> tuple[Ints, Ints]:
        return hull(count, self._keys, self._times, self._times)

    def load(self, piles: Piles, woken: Mask, known_from: Times, timeline: Timeline, needs: pa.Schema) -> None:
        """The rows that new versions are valid for, those that can be forgotten, and room for the new ones."""
        fresh = np.flatnonzero(timeline.place >= 0)
        until = np.append(timeline.at, NONE)[timeline.behind(fresh, timeline.place[fresh])]
        corrected = hull(len(piles), timeline.keys[fresh], timeline.at[fresh], until)
        mine = self.times_by_key(len(piles))
        low, high = np.minimum(corrected[0], mine[0]), np.maximum(corrected[1], mine[1])
        self._piles, self._woken = piles, woken
        stored = piles.load(1, np.where(woken, LOWEST, low), np.where(woken, np.maximum(high, known_from[-1]), high))
        self.rows = Rows(needs, stored.rows, self._fresh)
        keys, times = np.concatenate([stored.keys, self._keys]), np.concatenate([stored.at, self._times])
        order = sorting(keys, times)
        self.keys, self.times = keys[order], times[order]
        self.row = np.concatenate([np.arange(len(stored)), len(stored) + self._used])[order]
        self.place = np.concatenate([np.full(len(stored), -1), self._places])[order]
        self.missing = np.concatenate([np.zeros(len(stored), np.bool_), self._missing])[order]

    def answers(self, timeline: Timeline, known_before: Times) -> tuple[Ints, Ints, Ints]:
        """Rows, places of ticks, and the version that answers the row from then on; of a stored row also its answer before, if it changes."""
        corrected, by = self._corrections(timeline, known_before)
        new = np.flatnonzero(self.place >= 0)
        old = np.unique(corrected[self.place[corrected] < 0])
        known = np.concatenate([new, old])
        first = timeline.known(self.keys[known], self.times[known], self.place[known])
        row, place = np.concatenate([known, corrected]), np.concatenate([self.place[known], timeline.place[by]])
        order = sorting(row, place)
        return row[order], place[order], np.concatenate([first, by])[order]

    def _corrections(self, timeline: Timeline, known_before: Times) -> tuple[Ints, Ints]:
        """Rows that were there, and new versions that are valid for them when they come."""
        fresh = np.flatnonzero(timeline.place >= 0)
        places = timeline.place[fresh]
        until = np.append(timeline.at, NONE)[timeline.behind(fresh, places)]
        begin = bounds(self.keys, len(self._piles))
        first, end = begin[timeline.keys[fresh]], begin[timeline.keys[fresh] + 1]
        low = search(self.times, first, end, timeline.at[fresh], right=False)
        version, row = pairs(low, search(self.times, low, end, until, right=False))
        there = (self.place[row] < places[version]) & (self.times[row] >= known_before[places[version]])
        return row[there], fresh[version[there]]

    def store(self, writer: PileWriter, known_from: int, history_us: int) -> None:
        """Keep what may be corrected."""
        stays = ~self.missing & (self.times >= known_from)
        which = np.flatnonzero(stays)
        mark = self._piles.marks[_ROWS]
        mark[:] = timers.of_the_rest(self._piles, 1, _ROWS, self._woken, history_us + 1)
        np.minimum.at(mark, self.keys[which], self.times[which] + history_us + 1)
        touched = np.where(self.place >= 0, stays, ~stays)
        if touched.any():
            records = Records(self.keys[which], self.times[which], np.zeros(len(which), np.uint8), self.rows.bytes(self.row[which]))
            writer.replace(1, records, self.keys[touched], self.times[touched])
