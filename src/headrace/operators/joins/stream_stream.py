"""Two streams joined within a time bound: a left row at t meets the right rows from t - before to t
+ after.

A pair is told in the tick in which the later of the two comes. An outer join also tells rows that
met nothing, each once: at the end of the tick in which the other side's complete clock says that no
row for it is expected any more; what comes for it later meets it no more. A row is forgotten when
the other side's closed clock has passed all that it could meet. A row behind the closed clock of
its own side is too late, and is left out and counted. A row whose join key has a null meets
nothing.

A result's time is its left row's, or its right row's where there is no left one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import TICK_FIELD
from headrace.columnar.lookup import bounds, hull, marked, pairs, ranked, search, sorting
from headrace.errors import InputError
from headrace.operators.joins import row_store
from headrace.operators.joins.row_store import LOWEST, Piles, PileWriter, Records
from headrace.operators.joins.sides import (
    JoinColumns,
    ResultColumn,
    Rows,
    Side,
    join_keys,
    ticks_of,
)
from headrace.operators.kernel import KeyedState, Watermarks, microseconds

# One side of a join of streams in a call: its rows that wait for rows of the other side, stored and
# new, in order of key and time.


MATCHED = np.uint8(1)
_FORGETTING_TIMES = 16
"""So many times are there to forget at, while a row could meet others."""


@dataclass(frozen=True)
class Reach:
    """A row at t meets rows of the other side from t - back_us to t + forth_us."""

    back_us: int
    forth_us: int


class Arrivals:
    """The rows of a side that come in a call and are not too late; `other` are the clocks of the
    side that they wait for.
    """

    passed: row_store.Entries
    """What takes away the lists of those who were woken to forget."""

    def __init__(
        self,
        number: int,
        side: Side,
        rows: pa.Table,
        own: Watermarks,
        other: Watermarks,
        *,
        keeps: bool,
    ) -> None:
        """`keeps`: whether the result has rows of this side that met nothing."""
        self.number, self.other, self.keeps = number, other, keeps
        assert side.time is not None
        places, times = own.at(ticks_of(rows)), microseconds(rows.column(side.time))
        late = times < own.horizon_before[places]
        self.late = int(np.count_nonzero(late))
        keys, missing = join_keys(rows, side.on)
        used = ~late if keeps else ~late & ~missing
        if not used.all():
            rows, keys, places, times, missing = (
                rows.filter(pa.array(used)),
                keys.filter(pa.array(used)),
                places[used],
                times[used],
                missing[used],
            )
        self.rows, self.keys, self.places, self.times, self.missing = (
            rows,
            keys,
            places,
            times,
            missing,
        )

    def woken(self, state: KeyedState) -> pa.Array:
        """The keys whose rows have waited long enough."""
        forgets, self.passed = row_store.fired_lists(
            state, 2 * self.number + 1, int(self.other.closed[-1])
        )
        return (
            pa.concat_arrays(
                [row_store.fired(state, 2 * self.number, int(self.other.complete[-1])), forgets]
            )
            if self.keeps
            else forgets
        )


class WaitingSide:
    """All rows of a side that a call looks at. Positions are in order of key and time; of equal
    times the stored ones first, then as they came.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        keys: Ints,
        woken: Mask,
        reach: Reach,
        kept: pa.Schema,
        piles: Piles,
        looked: tuple[Ints, Ints],
    ) -> None:
        """`keys`: of the new rows. `woken`: by key. `looked`: the times at which rows of the other
        side look, by key.
        """
        self.arrivals, self.reach, self.piles, self.woken = arrivals, reach, piles, woken
        mine = hull(len(piles), keys, arrivals.times, arrivals.times)
        low, high = np.minimum(mine[0], looked[0]), np.maximum(mine[1], looked[1])
        passed = max(int(arrivals.other.complete[-1]) - reach.forth_us, LOWEST)
        self.stored = piles.load(
            arrivals.number,
            np.where(woken, LOWEST, low),
            np.where(woken, np.maximum(high, passed), high),
        )
        self.rows = Rows(kept, self.stored.rows, arrivals.rows)
        stored, fresh = len(self.stored), len(keys)
        all_keys, all_times = (
            np.concatenate([self.stored.keys, keys]),
            np.concatenate([self.stored.at, arrivals.times]),
        )
        self.row = sorting(all_keys, all_times)
        self.keys, self.times = all_keys[self.row], all_times[self.row]
        self.is_new = self.row >= stored
        self.place = np.concatenate([np.full(stored, -1), arrivals.places])[self.row]
        self.alone = np.concatenate([np.zeros(stored, np.bool_), arrivals.missing])[self.row]
        self.was_matched = np.concatenate([self.stored.flags & MATCHED, np.zeros(fresh, np.uint8)])[
            self.row
        ].astype(np.bool_)
        self.bounds = bounds(self.keys, len(piles))

    def __len__(self) -> int:
        return len(self.row)

    def told_at(self) -> Ints:
        """The place of the tick at whose end each row is told if it met nothing by then; the number
        of ticks if that is not yet.
        """
        found = np.searchsorted(
            self.arrivals.other.complete, self.times + self.reach.forth_us, side="right"
        )
        return np.where(self.alone, self.place, np.maximum(found, self.place))

    def store(self, writer: PileWriter, matched: Mask, told: Mask) -> None:
        """Keep what may still meet something; forget what was told alone, and what the closed clock
        of the other side has passed.
        """
        closed = int(self.arrivals.other.closed[-1])
        stays = ~told & ~self.alone & (self.times + self.reach.forth_us >= closed)
        touched = np.where(self.is_new, stays, ~stays | (matched != self.was_matched))
        which = np.flatnonzero(stays)
        flags = np.where(matched, MATCHED, np.uint8(0))[which]
        number = self.arrivals.number
        if self.arrivals.keeps:
            self._wake_later(2 * number, which[~matched[which]])
        self._wake_later(
            2 * number + 1,
            which[matched[which]] if self.arrivals.keeps else which,
            steps_us=self._forgetting_us,
        )
        if touched.any():
            records = Records(
                self.keys[which], self.times[which], flags, self.rows.bytes(self.row[which])
            )
            writer.replace(number, records, self.keys[touched], self.times[touched])

    @property
    def _forgetting_us(self) -> int:
        """What can be forgotten waits for a little company: keys that share a time share an
        entry.
        """
        return max(1, (self.reach.back_us + self.reach.forth_us) // _FORGETTING_TIMES)

    def _wake_later(self, kind: int, waiting: Ints, *, steps_us: int = 1) -> None:
        """Set a kind of timer to the first row that waits for it. Of rows that were not loaded it
        is enough to know that they are not earlier.
        """
        mark = self.piles.marks[kind]
        later = self.reach.forth_us + 1
        mark[:] = row_store.of_the_rest(self.piles, self.arrivals.number, kind, self.woken, later)
        wakes = self.times[waiting] + later
        np.minimum.at(
            mark, self.keys[waiting], wakes if steps_us == 1 else -(-wakes // steps_us) * steps_us
        )


def looked_at(arrivals: Arrivals, keys: Ints, reach: Reach, count: int) -> tuple[Ints, Ints]:
    """For each key the times of the other side's rows that new rows of this side look at; the
    lowest above the highest if there are none.
    """
    return hull(count, keys, arrivals.times - reach.back_us, arrivals.times + reach.forth_us)


class StreamStreamJoin:
    """`before_us`, `after_us`: how far a right row may lie before and after its left row; negative
    for a bound on the other side of it.

    After each step `counts` has how many rows were too late: `late_left`, `late_right`.
    """

    def __init__(
        self,
        step: str,
        left: Side,
        right: Side,
        columns: Sequence[ResultColumn],
        *,
        before_us: int,
        after_us: int,
        how: str = "inner",
    ) -> None:
        if before_us + after_us < 0:
            raise InputError(
                f"Step {step!r} joins rows from {-before_us} to {after_us} µs apart, and no two"
                " are.",
                fix="let before= and after= leave some time between them.",
            )
        if left.time is None or right.time is None:
            raise InputError(
                f"Step {step!r} joins streams, and one of them has no event time.",
                fix="declare its topic with event_time=hr.EventTime(...).",
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
        """How far behind the earlier of the inputs' clocks a result's time can be: its clocks are
        held back so much.
        """
        return max(
            0, self._reach[0].forth_us, self._reach[1].forth_us if self._columns.keeps_right else 0
        )

    def due(self, state: KeyedState) -> int | None:
        """When the next row that met nothing may be told. What can be forgotten waits for the next
        tick.
        """
        found = [row_store.earliest(state, kind) for kind in (0, 2)]
        return min((time for time in found if time is not None), default=None)

    # The step

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Leave out what is too late. 2. Load what rows can meet, and what waited long enough.
        3. Find pairs. 4. Find who is alone. 5. Store.
        """
        if not len(watermarks[0]):
            return self.output.append(TICK_FIELD).empty_table()
        keeps = self._columns.keeps_left, self._columns.keeps_right
        sides = zip(
            (self.left, self.right), inputs, watermarks, watermarks[::-1], keeps, strict=True
        )
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
            side.store(writer, matched, alone < len(watermarks[0]))
        tick = int(watermarks[0].ticks[-1])
        writer.save(
            (0, 2),
            [
                arrivals[0].passed,
                arrivals[1].passed,
                *(row_store.listed(piles, kind, tick) for kind in (1, 3)),
            ],
        )
        return self._told(watermarks[0], left, right, (lefts, rights, met_at), alone_at)

    def _loaded(
        self, state: KeyedState, arrivals: list[Arrivals]
    ) -> tuple[Piles, WaitingSide, WaitingSide]:
        """The rows of all keys that come up."""
        keys = [each.keys for each in arrivals]
        # Keys of a fixed size are quicker to compare; the first input's are, unless one of them has
        # a null.
        woken = [each.woken(state).cast(keys[0].type) for each in arrivals]
        found = ranked([*keys, *woken])
        piles = Piles(self.step_name, state, found.keys, sections=2, marks=4)
        looks = [
            looked_at(arrivals[at], found.ranks[at], self._reach[at], len(piles)) for at in range(2)
        ]
        wake = [marked(len(piles), found.ranks[at]) for at in (2, 3)]
        needs = self._columns.left_needs, self._columns.right_needs
        left, right = (
            WaitingSide(
                arrivals[at],
                found.ranks[at],
                wake[at],
                self._reach[at],
                needs[at],
                piles,
                looks[1 - at],
            )
            for at in range(2)
        )
        return piles, left, right

    def _pairs(self, left: WaitingSide, right: WaitingSide) -> tuple[Ints, Ints]:
        """Rows within the bounds of each other of which one is new: new left ones with all, stored
        left ones with new ones.
        """
        everyone, new = np.flatnonzero(~right.alone), np.flatnonzero(right.is_new & ~right.alone)
        found = [self._within(left, np.flatnonzero(left.is_new & ~left.alone), right, everyone)]
        if not left.is_new.all():
            found.append(self._within(left, np.flatnonzero(~left.is_new), right, new))
        return np.concatenate([each[0] for each in found]), np.concatenate(
            [each[1] for each in found]
        )

    def _within(
        self, left: WaitingSide, lefts: Ints, right: WaitingSide, rights: Ints
    ) -> tuple[Ints, Ints]:
        times, keys = left.times[lefts], left.keys[lefts]
        others = right.times[rights]
        begin = np.searchsorted(rights, right.bounds)
        first, end = begin[keys], begin[keys + 1]
        low = search(others, first, end, times - self._reach[0].back_us, right=False)
        high = search(others, low, end, times + self._reach[0].forth_us, right=True)
        which, at = pairs(low, high)
        return lefts[which], rights[at]

    # The result

    def _told(
        self,
        clock: Watermarks,
        left: WaitingSide,
        right: WaitingSide,
        met: tuple[Ints, Ints, Ints],
        alone_at: tuple[Ints, Ints],
    ) -> pa.Table:
        """In order of tick, key, left row and right row; a right row that is alone comes behind its
        key's left rows.
        """
        ticks = len(clock)
        left_alone, right_alone = (np.flatnonzero(each < ticks) for each in alone_at)
        lefts = np.concatenate([met[0], left_alone, np.full(len(right_alone), -1)])
        rights = np.concatenate([met[1], np.full(len(left_alone), -1), right_alone])
        places = np.concatenate([met[2], alone_at[0][left_alone], alone_at[1][right_alone]])
        behind = 2 * left.bounds[right.keys[right_alone] + 1] - 1
        order = sorting(places, np.concatenate([2 * met[0], 2 * left_alone, behind]), rights)
        lefts, rights = lefts[order], rights[order]
        columns = self._columns.arrays(
            left.rows, np.append(left.row, -1)[lefts], right.rows, np.append(right.row, -1)[rights]
        )
        return pa.Table.from_arrays(
            [*columns, pa.array(clock.ticks[places[order]], pa.int64())],
            schema=self.output.append(TICK_FIELD),
        )


def _settled(
    sides: tuple[WaitingSide, WaitingSide],
    pair: tuple[Ints, Ints],
    met_at: Ints,
    keeps: tuple[bool, bool],
) -> tuple[Mask, tuple[Ints, Ints]]:
    """Which pairs meet; and for each row of either side at which tick's end it is told alone, the
    number of ticks if it is not.

    A row that was told alone meets nothing any more, so pairs that would come after that are looked
    at tick by tick. There are some only where rows come behind the complete clock and yet not
    behind the closed one.
    """
    ticks = len(sides[0].arrivals.other)
    told_at = [
        side.told_at() if keep else np.full(len(side), ticks)
        for side, keep in zip(sides, keeps, strict=True)
    ]
    meet = (met_at <= told_at[0][pair[0]]) & (met_at <= told_at[1][pair[1]])
    first = [np.where(side.was_matched, -1, ticks) for side in sides]
    _note(first, pair, met_at, np.flatnonzero(meet))
    doubtful = np.flatnonzero(~meet)
    for tick in np.unique(met_at[doubtful]):
        these = doubtful[met_at[doubtful] == tick]
        free = [
            (first[at] <= told_at[at])[pair[at][these]] | (tick <= told_at[at][pair[at][these]])
            for at in range(2)
        ]
        these = these[free[0] & free[1]]
        meet[these] = True
        _note(first, pair, met_at, these)
    alone_at = tuple(np.where(first[at] <= told_at[at], ticks, told_at[at]) for at in range(2))
    return meet, (alone_at[0], alone_at[1])


def _note(first: list[Ints], pair: tuple[Ints, Ints], met_at: Ints, which: Ints) -> None:
    """When rows met for the first time."""
    for at in range(2):
        np.minimum.at(first[at], pair[at][which], met_at[which])
