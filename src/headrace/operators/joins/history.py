"""A table's history: every version of its rows, with when it was valid, as a table keyed by the row's key and the time from which it was valid.

A version that comes between others ends the one before it; one that comes for the same time takes its place. Versions are remembered for `history`
behind the clock, and the newest before that, even if it says that the row is gone: one from before that, where a newer one is known from before that
too, is left out and counted. What was told of forgotten versions stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.operators.buffers import Ints
from headrace.operators.joins import timers
from headrace.operators.joins.matching import begins, hull, marked, ranked, sorting
from headrace.operators.joins.pile_writing import PileWriter
from headrace.operators.joins.piles import NONE, Piles
from headrace.operators.joins.settling import merged
from headrace.operators.joins.sides import Side, join_keys
from headrace.operators.joins.timeline import Timeline, check_versioned, horizon
from headrace.operators.kernel import CHANGE_TYPE, TICK, Clocks, KeyedState

_TICK_FIELD = pa.field(TICK, pa.int64(), nullable=False)
_FORGETS = 1


class HistoryKernel:
    """Input: a table's changes. The result has the table's columns, of which `table.time` is when a version's validity begins, and `valid_to`, when
    it ends; null as long as it does not. `counts`: `late_versions` are those that were left out.
    """

    hold_us = 0

    def __init__(self, step: str, table: Side, *, history_us: int, valid_to: str = "valid_to") -> None:
        table.check(f"The input of step {step!r}")
        check_versioned(step, table)
        assert table.time is not None
        self.step_name, self.table, self.history_us, self.valid_to = step, table, history_us, valid_to
        self.key = (*table.key, table.time)
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        ends = pa.field(self.valid_to, self.table.schema.field(self.table.time).type)
        return pa.schema([*self.table.schema, ends, pa.field(CHANGE_TYPE, pa.string(), nullable=False)])

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """Nothing waits for time."""
        return None

    def step_timed(self, state: KeyedState, inputs: Sequence[pa.Table], clocks: Sequence[Clocks]) -> pa.Table:
        """1. Load the versions beside those that come. 2. Leave out what is too late. 3. Tell whose content or end has changed. 4. Forget."""
        (changes,), (clock,) = inputs, clocks
        if not len(clock):
            return self.output.append(_TICK_FIELD).empty_table()
        keys, _ = join_keys(changes, self.table.on)
        found = ranked([keys, timers.fired(state, _FORGETS, int(clock.complete[-1])).cast(keys.type)])
        piles = Piles(self.step_name, state, found.keys, sections=1, marks=2)
        timeline = Timeline(self.table, self.table.schema, changes, found.ranks[0], clock, forgets_gone=False)
        nothing = np.zeros(0, np.int64)
        woken = marked(len(piles), found.ranks[1])
        known = horizon([clock.complete_before], self.history_us), horizon([clock.complete], self.history_us)
        timeline.load(piles, hull(len(piles), nothing, nothing, nothing), woken, known)
        self.counts = {"late_versions": self._leave_out(timeline, clock)}
        writer = PileWriter(piles)
        timeline.store(writer, self.history_us)
        writer.save((_FORGETS,))
        return self._told(timeline, clock)

    def _leave_out(self, timeline: Timeline, clock: Clocks) -> int:
        """Versions that come when a newer one was old enough already that what is before it may be forgotten."""
        fresh = np.flatnonzero(timeline.place >= 0)
        places = timeline.place[fresh]
        known_before = horizon([clock.complete_before], self.history_us)[places]
        newest = timeline.known(timeline.keys[fresh], known_before, places - 1)
        late = (newest >= 0) & (np.append(timeline.at, 0)[newest] > timeline.at[fresh])
        timeline.leave_out(fresh[late])
        return int(np.count_nonzero(late))

    def _told(self, timeline: Timeline, clock: Clocks) -> pa.Table:
        """In order of tick, key and time."""
        moment, place, version, until = self._states(timeline)
        first = begins(moment)
        there = (version >= 0) & ~np.append(timeline.gone, True)[version]
        goes, comes = np.flatnonzero(~first & np.append(False, there)[:-1]), np.flatnonzero(there & (place >= 0))
        which, shows = np.concatenate([goes, comes]), np.concatenate([goes - 1, comes])
        is_new = np.arange(len(which)) >= len(goes)
        order = sorting(place[which], moment[which], is_new.astype(np.int64))
        which, shows, is_new = which[order], shows[order], is_new[order]
        ends = np.append(timeline.at, 0)[until[shows]]
        found = timeline.rows.columns(self.table.schema, timeline.row[version[shows]])
        columns = [
            *(found[name] for name in self.table.schema.names),
            pa.array(ends, mask=until[shows] < 0).cast(self.output.field(self.valid_to).type),
        ]
        kinds, stays = merged(columns, ~begins(place[which], moment[which]), is_new)
        ticks = pa.array(clock.ticks[place[which]], pa.int64())
        result = pa.Table.from_arrays([*columns, kinds, ticks], schema=self.output.append(_TICK_FIELD))
        return result if stays.all() else result.filter(pa.array(stays))

    @staticmethod
    def _states(timeline: Timeline) -> tuple[Ints, Ints, Ints, Ints]:
        """Of each moment of a key, for each tick that touches it and before the first: the version that stands for it, and the one that ends it; -1
        for none.

        A version that comes touches its own moment, and that of the version before it, which it ends.
        """
        fresh = np.flatnonzero(timeline.place >= 0)
        before = timeline.before(fresh, timeline.place[fresh])
        touched = np.concatenate([fresh, before[before >= 0]])
        place = np.concatenate([timeline.place[fresh], timeline.place[fresh[before >= 0]]])
        moment = timeline.moments[touched]
        moment, place = np.concatenate([moment, moment]), np.concatenate([place, np.full(len(place), -1)])
        order = sorting(moment, place)
        order = order[begins(moment[order], place[order])]
        moment, place = moment[order], place[order]
        version = timeline.known(timeline.keys[moment], timeline.at[moment], place)
        version = np.where(np.append(timeline.moments, NONE)[version] == moment, version, -1)
        until = np.where(version >= 0, timeline.behind(moment, place), -1)
        return moment, place, version, until
