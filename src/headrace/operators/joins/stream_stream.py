"""Two streams joined within a time bound: a left row at t meets the right rows from t - before to t + after.

A pair is told in the tick in which the later of the two comes. An outer join also tells rows that met nothing, each once: at the end of the tick in
which the other side's complete clock says that no row for it is expected any more; what comes for it later meets it no more. A row is forgotten when
the other side's closed clock has passed all that it could meet. A row behind the closed clock of its own side is too late, and is left out and
counted. A row whose join key has a null meets nothing.

A result's time is its left row's, or its right row's where there is no left one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.errors import InputError
from headrace.operators.buffers import Ints, Mask
from headrace.operators.joins import timers
from headrace.operators.joins.matching import marked, pairs, ranked, search, sorting
from headrace.operators.joins.pile_writing import PileWriter
from headrace.operators.joins.piles import Piles
from headrace.operators.joins.sides import JoinColumns, ResultColumn, Side
from headrace.operators.joins.waiting import Arrivals, Reach, WaitingSide, looked_at
from headrace.operators.kernel import TICK, Clocks, KeyedState

_TICK_FIELD = pa.field(TICK, pa.int64(), nullable=False)


class StreamStreamJoin:
    """`before_us`, `after_us`: how far a right row may lie before and after its left row; negative for a bound on the other side of it.

    After each step `counts` has how many rows were too late: `late_left`, `late_right`.
    """

    def __init__(
        self, step: str, left: Side, right: Side, columns: Sequence[ResultColumn], *, before_us: int, after_us: int, how: str = "inner"
    ) -> None:
        if before_us + after_us < 0:
            raise InputError(
                f"Step {step!r} joins rows from {-before_us} to {after_us} µs apart, and no two are.",
                fix="let before= and after= leave some time between them.",
            )
        if left.time is None or right.time is None:
            raise InputError(
                f"Step {step!r} joins streams, and one of them has no event time.", fix="declare its topic with event_time=hr.EventTime(...)."
            )
        self.step_name, self.left, self.right, self.how = step, left, right, how
        self._columns = JoinColumns(step, left, right, columns, how)
        self._reach = Reach(before_us, after_us), Reach(after_us, before_us)
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema

    @property
    def hold_us(self) -> int:
        """How far behind the earlier of the inputs' clocks a result's time can be: its clocks are held back so much."""
        return max(0, self._reach[0].forth_us, self._reach[1].forth_us if self._columns.keeps_right else 0)

    def due(self, state: KeyedState) -> int | None:
        """When the next row that met nothing may be told. What can be forgotten waits for the next tick."""
        found = [timers.earliest(state, kind) for kind in (0, 2)]
        return min((time for time in found if time is not None), default=None)

    # The step

    def step_timed(self, state: KeyedState, inputs: Sequence[pa.Table], clocks: Sequence[Clocks]) -> pa.Table:
        """1. Leave out what is too late. 2. Load what rows can meet, and what waited long enough. 3. Find pairs. 4. Find who is alone. 5. Store."""
        if not len(clocks[0]):
            return self.output.append(_TICK_FIELD).empty_table()
        keeps = self._columns.keeps_left, self._columns.keeps_right
        sides = zip((self.left, self.right), inputs, clocks, clocks[::-1], keeps, strict=True)
        arrivals = [Arrivals(number, *each[:4], keeps=each[4]) for number, each in enumerate(sides)]
        self.counts = {"late_left": arrivals[0].late, "late_right": arrivals[1].late}
        piles, left, right = self._loaded(state, arrivals)
        lefts, rights = self._pairs(left, right)
        met_at = np.maximum(left.place[lefts], right.place[rights])
        meet, alone_at = _settled((left, right), (lefts, rights), met_at, keeps)
        lefts, rights, met_at = lefts[meet], rights[meet], met_at[meet]
        writer = PileWriter(piles)
        for side, met, alone in ((left, lefts, alone_at[0]), (right, rights, alone_at[1])):
            matched = side.was_matched.copy()
            matched[met] = True
            side.store(writer, matched, alone < len(clocks[0]))
        tick = int(clocks[0].ticks[-1])
        writer.save((0, 2), [arrivals[0].passed, arrivals[1].passed, *(timers.listed(piles, kind, tick) for kind in (1, 3))])
        return self._told(clocks[0], left, right, (lefts, rights, met_at), alone_at)

    def _loaded(self, state: KeyedState, arrivals: list[Arrivals]) -> tuple[Piles, WaitingSide, WaitingSide]:
        """The rows of all keys that come up."""
        keys = [each.keys for each in arrivals]
        # Keys of a fixed size are quicker to compare; the first input's are, unless one of them has a null.
        woken = [each.woken(state).cast(keys[0].type) for each in arrivals]
        found = ranked([*keys, *woken])
        piles = Piles(self.step_name, state, found.keys, sections=2, marks=4)
        looks = [looked_at(arrivals[at], found.ranks[at], self._reach[at], len(piles)) for at in range(2)]
        wake = [marked(len(piles), found.ranks[at]) for at in (2, 3)]
        needs = self._columns.left_needs, self._columns.right_needs
        left, right = (WaitingSide(arrivals[at], found.ranks[at], wake[at], self._reach[at], needs[at], piles, looks[1 - at]) for at in range(2))
        return piles, left, right

    def _pairs(self, left: WaitingSide, right: WaitingSide) -> tuple[Ints, Ints]:
        """Rows within the bounds of each other of which one is new: new left ones with all, stored left ones with new ones."""
        everyone, new = np.flatnonzero(~right.alone), np.flatnonzero(right.is_new & ~right.alone)
        found = [self._within(left, np.flatnonzero(left.is_new & ~left.alone), right, everyone)]
        if not left.is_new.all():
            found.append(self._within(left, np.flatnonzero(~left.is_new), right, new))
        return np.concatenate([each[0] for each in found]), np.concatenate([each[1] for each in found])

    def _within(self, left: WaitingSide, lefts: Ints, right: WaitingSide, rights: Ints) -> tuple[Ints, Ints]:
        times, keys = left.times[lefts], left.keys[lefts]
        others = right.times[rights]
        begin = np.searchsorted(rights, right.bounds)
        first, end = begin[keys], begin[keys + 1]
        low = search(others, first, end, times - self._reach[0].back_us, right=False)
        high = search(others, low, end, times + self._reach[0].forth_us, right=True)
        which, at = pairs(low, high)
        return lefts[which], rights[at]

    # The result

    def _told(self, clock: Clocks, left: WaitingSide, right: WaitingSide, met: tuple[Ints, Ints, Ints], alone_at: tuple[Ints, Ints]) -> pa.Table:
        """In order of tick, key, left row and right row; a right row that is alone comes behind its key's left rows."""
        ticks = len(clock)
        left_alone, right_alone = (np.flatnonzero(each < ticks) for each in alone_at)
        lefts = np.concatenate([met[0], left_alone, np.full(len(right_alone), -1)])
        rights = np.concatenate([met[1], np.full(len(left_alone), -1), right_alone])
        places = np.concatenate([met[2], alone_at[0][left_alone], alone_at[1][right_alone]])
        behind = 2 * left.bounds[right.keys[right_alone] + 1] - 1
        order = sorting(places, np.concatenate([2 * met[0], 2 * left_alone, behind]), rights)
        lefts, rights = lefts[order], rights[order]
        columns = self._columns.arrays(left.rows, np.append(left.row, -1)[lefts], right.rows, np.append(right.row, -1)[rights])
        return pa.Table.from_arrays([*columns, pa.array(clock.ticks[places[order]], pa.int64())], schema=self.output.append(_TICK_FIELD))


def _settled(
    sides: tuple[WaitingSide, WaitingSide], pair: tuple[Ints, Ints], met_at: Ints, keeps: tuple[bool, bool]
) -> tuple[Mask, tuple[Ints, Ints]]:
    """Which pairs meet; and for each row of either side at which tick's end it is told alone, the number of ticks if it is not.

    A row that was told alone meets nothing any more, so pairs that would come after that are looked at tick by tick. There are some only where rows
    come behind the complete clock and yet not behind the closed one.
    """
    ticks = len(sides[0].arrivals.other)
    told_at = [side.told_at() if keep else np.full(len(side), ticks) for side, keep in zip(sides, keeps, strict=True)]
    meet = (met_at <= told_at[0][pair[0]]) & (met_at <= told_at[1][pair[1]])
    first = [np.where(side.was_matched, -1, ticks) for side in sides]
    _note(first, pair, met_at, np.flatnonzero(meet))
    doubtful = np.flatnonzero(~meet)
    for tick in np.unique(met_at[doubtful]):
        these = doubtful[met_at[doubtful] == tick]
        free = [(first[at] <= told_at[at])[pair[at][these]] | (tick <= told_at[at][pair[at][these]]) for at in range(2)]
        these = these[free[0] & free[1]]
        meet[these] = True
        _note(first, pair, met_at, these)
    alone_at = tuple(np.where(first[at] <= told_at[at], ticks, told_at[at]) for at in range(2))
    return meet, (alone_at[0], alone_at[1])


def _note(first: list[Ints], pair: tuple[Ints, Ints], met_at: Ints, which: Ints) -> None:
    """When rows met for the first time."""
    for at in range(2):
        np.minimum.at(first[at], pair[at][which], met_at[which])
