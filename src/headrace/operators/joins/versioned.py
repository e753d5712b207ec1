"""A stream joined with the versions of a table: each row meets the row that was valid at its own
time, whatever came when.

A row waits until the table's complete clock has passed its time, and is answered at the end of that
tick with what is known then. A version that comes behind the complete clock is counted: it changes
nothing that was told, and holds for all rows that are told from then on. Versions are kept for
`history` behind the clock of the input that is behind, and the newest before that; rows older than
that are left out and counted. The result is a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import CHANGE_FIELD, TICK_FIELD
from headrace.columnar.lookup import begins, bounds, hull, marked, pairs, ranked, search, sorting
from headrace.errors import InputError
from headrace.operators.joins import row_store
from headrace.operators.joins.row_store import LOWEST, NONE, Piles, PileWriter, Records
from headrace.operators.joins.sides import (
    JoinColumns,
    ResultColumn,
    Rows,
    Side,
    join_keys,
    merged,
    ticks_of,
)
from headrace.operators.joins.timeline import Timeline, check_versioned, horizon
from headrace.operators.kernel import KeyedState, Times, Watermarks, microseconds

_WAITS, _FORGETS = 0, 1


class VersionedJoin:
    """`stream.time`: the time at which a row looks; `table.time`: from when on a version is valid;
    the table's key is what it is joined on.

    After each step `counts` has the versions that came behind the clock (`late_versions`) and the
    rows older than the history (`too_old`).
    """

    hold_us = 0  # rows that wait are not before the table's clock

    def __init__(
        self,
        step: str,
        stream: Side,
        table: Side,
        columns: Sequence[ResultColumn],
        *,
        history_us: int,
        how: str = "inner",
    ) -> None:
        if how not in {"inner", "left"}:
            raise InputError(
                f"Step {step!r} joins a stream with versions how={how!r}.",
                fix='choose how="inner" or how="left".',
            )
        self.step_name, self.stream, self.table, self.history_us, self.how = (
            step,
            stream,
            table,
            history_us,
            how,
        )
        self._columns = JoinColumns(step, stream, table, columns, how)
        check_versioned(step, table)
        if stream.time is None:
            raise InputError(
                f"Step {step!r} joins a stream without a time with versions.",
                fix="say at which time a row looks: table.as_of(column).",
            )
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema

    def due(self, state: KeyedState) -> int | None:
        """When the first row that waits can be told, by the table's clock."""
        return row_store.earliest(state, _WAITS)

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Find the keys: of rows, versions, and what waited long enough. 2. Load. 3. Answer. 4.
        Keep what waits, and what rows may ask for.
        """
        rows, changes = inputs
        own, table = watermarks
        if not len(own):
            return self.output.append(TICK_FIELD).empty_table()
        keys, missing = join_keys(rows, self.stream.on)
        changed_keys, _ = join_keys(changes, self.table.on)
        clock = int(min(own.complete[-1], table.complete[-1]))
        woken = [
            row_store.fired(state, _WAITS, int(table.complete[-1])),
            row_store.fired(state, _FORGETS, clock),
        ]
        found = ranked([keys, changed_keys, *(each.cast(keys.type) for each in woken)])
        piles = Piles(self.step_name, state, found.keys, sections=2, marks=2)
        known = tuple(
            horizon(list(each), self.history_us)
            for each in (
                (own.watermark_before, table.watermark_before),
                (own.complete, table.complete),
            )
        )
        waiting = _Waiting(self, rows, missing, found.ranks[0], found.orders[0], watermarks)
        waiting.load(piles, marked(len(piles), found.ranks[2]), self._columns.left_needs)
        timeline = Timeline(self.table, self._columns.right_needs, changes, found.ranks[1], table)
        timeline.load(
            piles, waiting.asked(), marked(len(piles), found.ranks[3]), (known[0], known[1])
        )
        late = timeline.fresh_at < table.watermark_before[timeline.fresh_place]
        self.counts = {"late_versions": int(np.count_nonzero(late)), "too_old": waiting.too_old}
        writer = PileWriter(piles)
        waiting.store(writer)
        timeline.store(writer, self.history_us)
        writer.save((_WAITS, _FORGETS))
        return self._told(waiting, timeline, own)

    def _told(self, waiting: _Waiting, timeline: Timeline, clock: Watermarks) -> pa.Table:
        """In order of tick, key, time and arrival."""
        which = np.flatnonzero(waiting.told_at < len(clock))
        version = timeline.known(waiting.keys[which], waiting.times[which], waiting.told_at[which])
        version = np.where((version >= 0) & ~np.append(timeline.gone, True)[version], version, -1)
        if self.how == "inner":
            which, version = which[version >= 0], version[version >= 0]
        order = sorting(waiting.told_at[which])
        which, version = which[order], version[order]
        columns = self._columns.arrays(
            waiting.rows, waiting.row[which], timeline.rows, np.append(timeline.row, -1)[version]
        )
        ticks = clock.ticks[waiting.told_at[which]]
        return pa.Table.from_arrays(
            [*columns, pa.array(ticks, pa.int64())], schema=self.output.append(TICK_FIELD)
        )


class _Waiting:
    """The rows of a call that wait for their answer or get it, stored and new, in order of key,
    time and arrival.
    """

    def __init__(
        self,
        join: VersionedJoin,
        rows: pa.Table,
        missing: Mask,
        keys: Ints,
        order: Ints,
        watermarks: Sequence[Watermarks],
    ) -> None:
        own, self._table = watermarks
        assert join.stream.time is not None
        times, places = microseconds(rows.column(join.stream.time)), own.at(ticks_of(rows))
        known = horizon([own.watermark_before, self._table.watermark_before], join.history_us)
        old = times < known[places]
        self.too_old = int(np.count_nonzero(old))
        used = (
            order[~(old | (missing & (join.how == "inner")))[order]]
            if old.any() or missing.any()
            else order
        )
        self._used, self.fresh = used, rows
        self._keys, self._times, self._places, self._missing = (
            keys[used],
            times[used],
            places[used],
            missing[used],
        )

    def load(self, piles: Piles, woken: Mask, needs: pa.Schema) -> None:
        fresh_told = np.maximum(
            np.searchsorted(self._table.complete, self._times, side="right"), self._places
        )
        stays = (fresh_told >= len(self._table)) & ~self._missing
        low, high = hull(len(piles), self._keys[stays], self._times[stays], self._times[stays])
        self._piles, self._woken = piles, woken
        passed = int(self._table.complete[-1])
        stored = piles.load(
            1, np.where(woken, LOWEST, low), np.where(woken, np.maximum(high, passed), high)
        )
        self.rows = Rows(needs, stored.rows, self.fresh)
        keys, times = (
            np.concatenate([stored.keys, self._keys]),
            np.concatenate([stored.at, self._times]),
        )
        told = np.concatenate(
            [
                np.searchsorted(self._table.complete, stored.at, side="right"),
                np.where(self._missing, self._places, fresh_told),
            ]
        )
        row = np.concatenate([np.arange(len(stored)), len(stored) + self._used])
        order = sorting(keys, times)
        self.keys, self.times, self.told_at, self.row = (
            keys[order],
            times[order],
            told[order],
            row[order],
        )
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
        mark[:] = row_store.of_the_rest(self._piles, 1, _WAITS, self._woken, 1)
        np.minimum.at(mark, self.keys[which], self.times[which] + 1)
        touched = np.where(self._is_new, waits, ~waits)
        if touched.any():
            records = Records(
                self.keys[which],
                self.times[which],
                np.zeros(len(which), np.uint8),
                self.rows.bytes(self.row[which]),
            )
            writer.replace(1, records, self.keys[touched], self.times[touched])


# A stream joined with the versions of a table, answered at once and corrected: when a version comes
# that was valid at the time of a row that was told already, what was told is taken back and told
# anew.
#
# The result is a table, keyed by what identifies a row of the stream: its key, which should be its
# own; `NewestKernel` makes it so where it is not. Rows and versions are kept for `history` behind
# the clock of the input that is behind, and of versions the newest before that. Rows older than
# that are left out and counted; of what is forgotten nothing is corrected any more.

_ROWS, _VERSIONS = 0, 1


class CorrectedJoin:
    """As `VersionedJoin`, with a table as its result; `key` is the result's. `counts`:
    `late_versions` are those from before what is kept.
    """

    hold_us = 0

    def __init__(
        self,
        step: str,
        stream: Side,
        table: Side,
        columns: Sequence[ResultColumn],
        *,
        history_us: int,
        how: str = "inner",
    ) -> None:
        if how not in {"inner", "left"}:
            raise InputError(
                f"Step {step!r} joins a stream with versions how={how!r}.",
                fix='choose how="inner" or how="left".',
            )
        self.step_name, self.stream, self.table, self.history_us, self.how = (
            step,
            stream,
            table,
            history_us,
            how,
        )
        self._columns = JoinColumns(step, stream, table, columns, how)
        check_versioned(step, table)
        if stream.time is None:
            raise InputError(
                f"Step {step!r} joins a stream without a time with versions.",
                fix="say at which time a row looks: table.as_of(column).",
            )
        self.key = self._key()
        self.counts: dict[str, int] = {}

    def _key(self) -> tuple[str, ...]:
        names = {
            column: name for kind, column, name in self._columns.columns if kind in {"left", "key"}
        }
        if not self.stream.key or (
            missing := [column for column in self.stream.key if column not in names]
        ):
            lacks = repr(missing[0]) if self.stream.key else "what identifies a row"
            raise InputError(
                f"The result of step {self.step_name!r} is a table, and lacks {lacks}.",
                fix="keep the columns that identify a row.",
            )
        return tuple(names[column] for column in self.stream.key)

    @property
    def lateness_us(self) -> int:
        """How far behind the clocks a correction can be."""
        return self.history_us

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema.append(CHANGE_FIELD)

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """Nothing waits for time."""
        return None

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Find the keys. 2. Load versions, and the rows that new versions are valid for. 3. Tell
        and correct. 4. Keep what may be corrected.
        """
        rows, changes = inputs
        own, table = watermarks
        if not len(own):
            return self.output.append(TICK_FIELD).empty_table()
        keys, missing = join_keys(rows, self.stream.on)
        clock = int(min(own.complete[-1], table.complete[-1]))
        woken = [row_store.fired(state, kind, clock).cast(keys.type) for kind in (_ROWS, _VERSIONS)]
        found = ranked([keys, join_keys(changes, self.table.on)[0], *woken])
        piles = Piles(self.step_name, state, found.keys, sections=2, marks=2)
        known_from = horizon([own.complete, table.complete], self.history_us)
        known_before = horizon([own.watermark_before, table.watermark_before], self.history_us)
        answered = _Answered(
            self.stream,
            rows,
            missing,
            found.ranks[0],
            found.orders[0],
            own,
            known_before,
            keep_missing=self.how == "left",
        )
        timeline = Timeline(self.table, self._columns.right_needs, changes, found.ranks[1], table)
        timeline.load(
            piles,
            answered.times_by_key(len(piles)),
            marked(len(piles), found.ranks[3]),
            (known_before, known_from),
        )
        answered.load(
            piles,
            marked(len(piles), found.ranks[2]),
            known_from,
            timeline,
            self._columns.left_needs,
        )
        late = timeline.fresh_at < known_before[timeline.fresh_place]
        self.counts = {"late_versions": int(np.count_nonzero(late)), "too_old": answered.too_old}
        writer = PileWriter(piles)
        answered.store(writer, int(known_from[-1]), self.history_us)
        timeline.store(writer, self.history_us)
        writer.save((_ROWS, _VERSIONS))
        return self._told(answered, timeline, known_before, own)

    def _told(
        self, answered: _Answered, timeline: Timeline, known_before: Times, clock: Watermarks
    ) -> pa.Table:
        """Each row's answers one after the other: each takes the place of the one before. In order
        of tick, key, time and arrival.
        """
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
        columns = self._columns.arrays(
            answered.rows,
            answered.row[row[which]],
            timeline.rows,
            np.append(timeline.row, -1)[shows],
        )
        kinds, stays = merged(columns, ~begins(place[which], row[which]), is_new)
        ticks = pa.array(clock.ticks[place[which]], pa.int64())
        result = pa.Table.from_arrays(
            [*columns, kinds, ticks], schema=self.output.append(TICK_FIELD)
        )
        return result if stays.all() else result.filter(pa.array(stays))


class _Answered:
    """The stream's rows of a call, in order of key, time and arrival. `place`: that of the tick in
    which each came, -1 for stored ones.
    """

    def __init__(
        self,
        side: Side,
        rows: pa.Table,
        missing: Mask,
        keys: Ints,
        order: Ints,
        own: Watermarks,
        known_before: Times,
        *,
        keep_missing: bool,
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

    def load(
        self, piles: Piles, woken: Mask, known_from: Times, timeline: Timeline, needs: pa.Schema
    ) -> None:
        """The rows that new versions are valid for, those that can be forgotten, and room for the
        new ones.
        """
        fresh = np.flatnonzero(timeline.place >= 0)
        until = np.append(timeline.at, NONE)[timeline.behind(fresh, timeline.place[fresh])]
        corrected = hull(len(piles), timeline.keys[fresh], timeline.at[fresh], until)
        mine = self.times_by_key(len(piles))
        low, high = np.minimum(corrected[0], mine[0]), np.maximum(corrected[1], mine[1])
        self._piles, self._woken = piles, woken
        stored = piles.load(
            1, np.where(woken, LOWEST, low), np.where(woken, np.maximum(high, known_from[-1]), high)
        )
        self.rows = Rows(needs, stored.rows, self._fresh)
        keys, times = (
            np.concatenate([stored.keys, self._keys]),
            np.concatenate([stored.at, self._times]),
        )
        order = sorting(keys, times)
        self.keys, self.times = keys[order], times[order]
        self.row = np.concatenate([np.arange(len(stored)), len(stored) + self._used])[order]
        self.place = np.concatenate([np.full(len(stored), -1), self._places])[order]
        self.missing = np.concatenate([np.zeros(len(stored), np.bool_), self._missing])[order]

    def answers(self, timeline: Timeline, known_before: Times) -> tuple[Ints, Ints, Ints]:
        """Rows, places of ticks, and the version that answers the row from then on; of a stored row
        also its answer before, if it changes.
        """
        corrected, by = self._corrections(timeline, known_before)
        new = np.flatnonzero(self.place >= 0)
        old = np.unique(corrected[self.place[corrected] < 0])
        known = np.concatenate([new, old])
        first = timeline.known(self.keys[known], self.times[known], self.place[known])
        row, place = (
            np.concatenate([known, corrected]),
            np.concatenate([self.place[known], timeline.place[by]]),
        )
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
        there = (self.place[row] < places[version]) & (
            self.times[row] >= known_before[places[version]]
        )
        return row[there], fresh[version[there]]

    def store(self, writer: PileWriter, known_from: int, history_us: int) -> None:
        """Keep what may be corrected."""
        stays = ~self.missing & (self.times >= known_from)
        which = np.flatnonzero(stays)
        mark = self._piles.marks[_ROWS]
        mark[:] = row_store.of_the_rest(self._piles, 1, _ROWS, self._woken, history_us + 1)
        np.minimum.at(mark, self.keys[which], self.times[which] + history_us + 1)
        touched = np.where(self.place >= 0, stays, ~stays)
        if touched.any():
            records = Records(
                self.keys[which],
                self.times[which],
                np.zeros(len(which), np.uint8),
                self.rows.bytes(self.row[which]),
            )
            writer.replace(1, records, self.keys[touched], self.times[touched])
