"""One side of a join of streams in a call: its rows that wait for rows of the other side, stored and new, in order of key and time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace.operators.buffers import Ints, Mask
from headrace.operators.joins import timers
from headrace.operators.joins.matching import bounds, hull, sorting
from headrace.operators.joins.pile_writing import PileWriter
from headrace.operators.joins.piles import LOWEST, Piles, Records
from headrace.operators.joins.sides import Rows, Side, join_keys, ticks_of
from headrace.operators.kernel import Clocks, KeyedState
from headrace.operators.times import microseconds

MATCHED = np.uint8(1)
_FORGETTING_TIMES = 16
"""So many times are there to forget at, while a row could meet others."""


@dataclass(frozen=True)
class Reach:
    """A row at t meets rows of the other side from t - back_us to t + forth_us."""

    back_us: int
    forth_us: int


class Arrivals:
    """The rows of a side that come in a call and are not too late; `other` are the clocks of the side that they wait for."""

    passed: timers.Entries
    """What takes away the lists of those who were woken to forget."""

    def __init__(self, number: int, side: Side, rows: pa.Table, own: Clocks, other: Clocks, *, keeps: bool) -> None:
        """`keeps`: whether the result has rows of this side that met nothing."""
        self.number, self.other, self.keeps = number, other, keeps
        assert side.time is not None
        places, times = own.at(ticks_of(rows)), microseconds(rows.column(side.time))
        late = times < own.closed_before[places]
        self.late = int(np.count_nonzero(late))
        keys, missing = join_keys(rows, side.on)
        used = ~late if keeps else ~late & ~missing
        if not used.all():
            rows, keys, places, times, missing = rows.filter(pa.array(used)), keys.filter(pa.array(used)), places[used], times[used], missing[used]
        self.rows, self.keys, self.places, self.times, self.missing = rows, keys, places, times, missing

    def woken(self, state: KeyedState) -> pa.Array:
        """The keys whose rows have waited long enough."""
        forgets, self.passed = timers.fired_lists(state, 2 * self.number + 1, int(self.other.closed[-1]))
        return pa.concat_arrays([timers.fired(state, 2 * self.number, int(self.other.complete[-1])), forgets]) if self.keeps else forgets


class WaitingSide:
    """All rows of a side that a call looks at. Positions are in order of key and time; of equal times the stored ones first, then as they came."""

    def __init__(self, arrivals: Arrivals, keys: Ints, woken: Mask, reach: Reach, kept: pa.Schema, piles: Piles, looked: tuple[Ints, Ints]) -> None:
        """`keys`: of the new rows. `woken`: by key. `looked`: the times at which rows of the other side look, by key."""
        self.arrivals, self.reach, self.piles, self.woken = arrivals, reach, piles, woken
        mine = hull(len(piles), keys, arrivals.times, arrivals.times)
        low, high = np.minimum(mine[0], looked[0]), np.maximum(mine[1], looked[1])
        passed = max(int(arrivals.other.complete[-1]) - reach.forth_us, LOWEST)
        self.stored = piles.load(arrivals.number, np.where(woken, LOWEST, low), np.where(woken, np.maximum(high, passed), high))
        self.rows = Rows(kept, self.stored.rows, arrivals.rows)
        stored, fresh = len(self.stored), len(keys)
        all_keys, all_times = np.concatenate([self.stored.keys, keys]), np.concatenate([self.stored.at, arrivals.times])
        self.row = sorting(all_keys, all_times)
        self.keys, self.times = all_keys[self.row], all_times[self.row]
        self.is_new = self.row >= stored
        self.place = np.concatenate([np.full(stored, -1), arrivals.places])[self.row]
        self.alone = np.concatenate([np.zeros(stored, np.bool_), arrivals.missing])[self.row]
        self.was_matched = np.concatenate([self.stored.flags & MATCHED, np.zeros(fresh, np.uint8)])[self.row].astype(np.bool_)
        self.bounds = bounds(self.keys, len(piles))

    def __len__(self) -> int:
        return len(self.row)

    def told_at(self) -> Ints:
        """The place of the tick at whose end each row is told if it met nothing by then; the number of ticks if that is not yet."""
        found = np.searchsorted(self.arrivals.other.complete, self.times + self.reach.forth_us, side="right")
        return np.where(self.alone, self.place, np.maximum(found, self.place))

    def store(self, writer: PileWriter, matched: Mask, told: Mask) -> None:
        """Keep what may still meet something; forget what was told alone, and what the closed clock of the other side has passed."""
        closed = int(self.arrivals.other.closed[-1])
        stays = ~told & ~self.alone & (self.times + self.reach.forth_us >= closed)
        touched = np.where(self.is_new, stays, ~stays | (matched != self.was_matched))
        which = np.flatnonzero(stays)
        flags = np.where(matched, MATCHED, np.uint8(0))[which]
        number = self.arrivals.number
        if self.arrivals.keeps:
            self._wake_later(2 * number, which[~matched[which]])
        self._wake_later(2 * number + 1, which[matched[which]] if self.arrivals.keeps else which, steps_us=self._forgetting_us)
        if touched.any():
            records = Records(self.keys[which], self.times[which], flags, self.rows.bytes(self.row[which]))
            writer.replace(number, records, self.keys[touched], self.times[touched])

    @property
    def _forgetting_us(self) -> int:
        """What can be forgotten waits for a little company: keys that share a time share an entry."""
        return max(1, (self.reach.back_us + self.reach.forth_us) // _FORGETTING_TIMES)

    def _wake_later(self, kind: int, waiting: Ints, *, steps_us: int = 1) -> None:
        """Set a kind of timer to the first row that waits for it. Of rows that were not loaded it is enough to know that they are not earlier."""
        mark = self.piles.marks[kind]
        later = self.reach.forth_us + 1
        mark[:] = timers.of_the_rest(self.piles, self.arrivals.number, kind, self.woken, later)
        wakes = self.times[waiting] + later
        np.minimum.at(mark, self.keys[waiting], wakes if steps_us == 1 else -(-wakes // steps_us) * steps_us)


def looked_at(arrivals: Arrivals, keys: Ints, reach: Reach, count: int) -> tuple[Ints, Ints]:
    """For each key the times of the other side's rows that new rows of this side look at; the lowest above the highest if there are none."""
    return hull(count, keys, arrivals.times - reach.back_us, arrivals.times + reach.forth_us)
