"""Sliding windows over streams, for aggregates whose states can be put together, in time
proportional to the rows.

The rows of a group at one time are a point, with a state; points are kept in panes (`panes`), and
windows are computed from the panes at their two ends and from what the panes between amount to
(`ranges`). Groups whose rows come in the order of their times, tick after tick, are worked on in
one go, and need few of their panes. The others are worked on tick by tick, with all their points: a
row that comes late changes windows that were told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, as_binary, offsets_of, runs, same_width
from headrace.columnar.keys import encode_keys, key_groups, whole
from headrace.columnar.lookup import begins, first_from, merge_order, numbered, sorting
from headrace.columnar.packed_array import FORM_BYTES, Alike, Form, by_widths, row_type
from headrace.columnar.row_codec import cut_out
from headrace.columnar.segments import Segments
from headrace.operators.aggregates.state_pool import Merging, Pool, States, pick, place, together
from headrace.operators.kernel import UNSTARTED, Groups, KeyedState, Times, Watermarks
from headrace.operators.windows.buffered_window import (
    Grouped,
    closing,
    distinct_windows,
    put_timers,
)
from headrace.operators.windows.kernel import Windowed, WindowStep, over_lifetimes
from headrace.operators.windows.late_rows import places_of
from headrace.operators.windows.specs import Sliding
from headrace.operators.windows.state import TIME, History, RowStore, Sets, Windows, any_within

# Points and panes of sliding windows in the state: a group's, or a pane's, in one entry. States
# that have nothing but fields, as most do, lie there in few bytes (`narrow`); where some have more
# bytes than others, an entry is one of rows, as `kept_rows` has them.
#
# | entry | bytes | |---|---| | records | version 2; the form of the columns (whole numbers, and the
# fields of states), and the rows, as `narrow` has them | | rows | version 1; as `kept_rows` has
# them |


STATE = "state"
_VERSION = 2
_NO_BYTES = pa.scalar(b"", pa.large_binary())
_WHOLE: np.dtype[Any] = np.dtype("<i8")


class RecordStore:
    """Reads and writes tables with a time, more whole numbers, and a state, most of which have
    these fields alone.
    """

    def __init__(self, step: str, numbers: Sequence[str], states: np.dtype[Any]) -> None:
        self._rows = RowStore(
            step,
            [*(pa.field(name, pa.int64()) for name in numbers), pa.field(STATE, pa.binary())],
            with_id=False,
        )
        self.schema, self._states = pa.schema(self._rows.fields), states
        self._fields: list[str] = list(states.names or ())
        self._kinds = [_WHOLE] * (len(self.schema) - 1) + [states[name] for name in self._fields]
        self._before_rows = 1 + FORM_BYTES * len(self._kinds)

    def write(
        self, state: KeyedState, names: pa.Array, groups: Groups, counts: Ints, rows: pa.Table
    ) -> None:
        """`rows` are in order of entry, so many for each; an entry without any goes."""
        plain = same_width(whole(rows.column(STATE)))
        if plain is None or plain.dtype.itemsize != self._states.itemsize:
            self._rows.write(state, names, groups, counts, rows)
            return
        RowStore.check(self._rows.step_name, counts)
        values, there = self._encoded(rows, plain.view(self._states), counts), counts > 0
        state.put_array(
            names,
            (
                values
                if there.all()
                else pc.if_else(pa.array(there), values, pa.scalar(None, pa.binary()))
            ),
            groups,
        )

    def _encoded(
        self, rows: pa.Table, states: np.ndarray[tuple[int], Any], counts: Ints
    ) -> pa.Array:
        columns = [whole(rows.column(name)).to_numpy() for name in self.schema.names[:-1]]
        columns += [states[name] for name in self._fields]
        form = Form.of(columns)
        packed = form.packed(columns)
        offsets = np.append(0, np.cumsum(counts)) * packed.dtype.itemsize
        data = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), len(counts), [None, pa.py_buffer(offsets), pa.py_buffer(packed)]
        )
        before = pa.scalar(bytes([_VERSION]) + form.to_bytes(), pa.large_binary())
        return pc.binary_join_element_wise(before, data, _NO_BYTES).cast(pa.binary())

    def read(self, state: KeyedState, names: pa.Array, groups: Groups) -> tuple[Ints, pa.Table]:
        """How many rows each entry has, and all of them."""
        values = state.get_array(names, groups)
        there = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        known = values.drop_null()
        as_records = self._versions(known) == _VERSION
        if not as_records.any():
            return self._rows.decoded(values)
        counts, parts = np.zeros(len(values), np.int64), []
        records = np.flatnonzero(as_records)
        for alike in self._by_widths(known.take(pa.array(records))):
            which = records[alike.which]
            counts[there[which]], rows = self._decoded(known.take(pa.array(which)), alike)
            parts.append((there[which], rows))
        if not as_records.all():
            which = np.flatnonzero(~as_records)
            counts[there[which]], rows = self._rows.decoded(known.take(pa.array(which)))
            parts.append((there[which], rows))
        return counts, _put_together(counts, parts)

    @staticmethod
    def _versions(values: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        data = (
            np.frombuffer(values.buffers()[2], np.uint8) if len(values) else np.zeros(0, np.uint8)
        )
        return data[offsets_of(values)[:-1]]

    def _by_widths(self, values: pa.Array) -> list[Alike]:
        forms = pc.binary_slice(values, 1, self._before_rows)
        return by_widths(
            np.frombuffer(
                forms.buffers()[2], np.uint8, count=len(forms) * (self._before_rows - 1)
            ).reshape(len(forms), -1)
        )

    def _decoded(self, values: pa.Array, alike: Alike) -> tuple[Ints, pa.Table]:
        """Entries of the same widths."""
        offsets = offsets_of(values)
        sizes = np.diff(offsets) - self._before_rows
        bare = cut_out(
            np.frombuffer(values.buffers()[2], np.uint8), offsets[:-1] + self._before_rows, sizes
        )
        row = row_type(alike.widths)
        counts = sizes // row.itemsize
        columns = alike.unpacked(
            np.frombuffer(bare.buffers()[2], row, count=int(counts.sum())), counts, self._kinds
        )
        states = np.empty(int(counts.sum()), self._states)
        for name, column in zip(self._fields, columns[len(self.schema) - 1 :], strict=True):
            states[name] = column
        numbers = [pa.array(column) for column in columns[: len(self.schema) - 1]]
        return counts, pa.Table.from_arrays(
            [*numbers, as_binary(states.view(f"V{self._states.itemsize}"))], schema=self.schema
        )


def _put_together(counts: Ints, parts: Sequence[tuple[Ints, pa.Table]]) -> pa.Table:
    """The rows of all entries in their order, from several parts with some entries each."""
    if len(parts) == 1:
        return parts[0][1]
    entry = np.concatenate([np.repeat(which, counts[which]) for which, _ in parts])
    return pa.concat_tables([rows for _, rows in parts]).take(
        pa.array(np.argsort(entry, kind="stable"))
    )


# The points of sliding windows in the state, in panes: a sixteenth of a window each. A group has a
# head, which knows of each pane what all of its points amount to; so a window is computed from the
# panes at its two ends and from the heads of those between.
#
# | entry | name | bytes | |---|---|---| | head | `h`, the group's key | as `records` has them, one
# for each pane: number, time of its last point, time of its first point that was not told yet,
# state | | pane | `q`, number (big-endian in order), the group's key | as `records` has them, one
# for each point: time, state |


PANES = 16
NEVER = np.iinfo(np.int64).max
_LAST, _WAITS = "last", "waits"
_HEAD, _PANE = pa.scalar(b"h", pa.binary()), b"q"
_NOTHING = pa.scalar(b"", pa.binary())
_SIGN = np.uint64(1 << 63)


@dataclass(frozen=True)
class Points:
    """Points of groups: the number of each one's group, its time, the place of the tick that it
    came with (-1: stored), and the number of its state.
    """

    keys: Ints
    times: Times
    places: Ints
    states: Ints

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, which: Ints | Mask) -> Points:
        return Points(self.keys[which], self.times[which], self.places[which], self.states[which])

    def and_also(self, other: Points) -> Points:
        pairs = (
            (self.keys, other.keys),
            (self.times, other.times),
            (self.places, other.places),
            (self.states, other.states),
        )
        return Points(*(np.concatenate(pair) for pair in pairs))

    def merged_with(self, other: Points) -> Points:
        """Both, in order; each is."""
        return self.and_also(other).take(
            merge_order(
                (self.keys, self.times, self.places), (other.keys, other.times, other.places)
            )
        )

    def in_order(self) -> Points:
        """By group, time and place."""
        return self.take(sorting(self.keys, self.times, self.places))


@dataclass(frozen=True)
class Heads:
    """Panes of groups, in order of group and number: the time of each one's last point and of its
    first that waits, and the number of its state.
    """

    keys: Ints
    panes: Ints
    last: Times
    waits: Times
    states: Ints

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, which: Ints | Mask) -> Heads:
        return Heads(
            self.keys[which],
            self.panes[which],
            self.last[which],
            self.waits[which],
            self.states[which],
        )

    def have(self, keys: Ints, panes: Ints) -> Mask:
        """Which of these panes of groups are among them."""
        return any_within(self.keys, self.panes, keys, panes, panes + 1)

    def and_also(self, other: Heads) -> Heads:
        names = ("keys", "panes", "last", "waits", "states")
        both = Heads(
            *(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names)
        )
        return both.take(sorting(both.keys, both.panes))

    @staticmethod
    def of(
        points: Points, panes: Ints, told_until: int | None, merging: Merging, pool: Pool
    ) -> Heads:
        """What points, in order of group and time, amount to in each pane. Those from `told_until`
        on wait; None: none does.
        """
        new = begins(points.keys, panes)
        first = np.flatnonzero(new)
        states = pool.add(merging.reduced(pool.pick(points.states), np.cumsum(new)))
        last = points.times[np.append(first[1:], len(points))[: len(first)] - 1]
        waits = (
            np.full(len(points), NEVER)
            if told_until is None
            else np.where(points.times >= told_until, points.times, NEVER)
        )
        return Heads(
            points.keys[first],
            panes[first],
            last,
            np.minimum.reduceat(waits, first) if len(first) else last,
            states,
        )


class PaneStore:
    """Reads and writes the heads and panes of some groups, during one step."""

    def __init__(self, step: str, by: pa.Array, groups: Groups, states: np.dtype[Any]) -> None:
        self._by, self._groups = by.cast(pa.binary()), groups
        self._heads = RecordStore(step, [_LAST, _WAITS], states)
        self._panes = RecordStore(step, [], states)

    def read_heads(self, state: KeyedState, merging: Merging) -> tuple[Heads, Pool]:
        counts, rows = self._heads.read(state, self._head_names(), self._groups)
        pool = Pool(merging.opened(whole(rows.column(STATE))))
        panes, last, waits = (whole(rows.column(name)).to_numpy() for name in (TIME, _LAST, _WAITS))
        return (
            Heads(
                np.repeat(np.arange(len(counts)), counts), panes, last, waits, np.arange(len(panes))
            ),
            pool,
        )

    def read_points(self, state: KeyedState, heads: Heads, merging: Merging, pool: Pool) -> Points:
        """The points of some panes."""
        counts, rows = self._panes.read(
            state, self._pane_names(heads.keys, heads.panes), self._groups[heads.keys]
        )
        states = pool.add(merging.opened(whole(rows.column(STATE))))
        keys = np.repeat(heads.keys, counts)
        return Points(keys, whole(rows.column(TIME)).to_numpy(), np.full(len(keys), -1), states)

    def write(
        self,
        state: KeyedState,
        heads: Heads,
        gone: Heads,
        points: Points,
        panes: Ints,
        stored: tuple[pa.Array, pa.Array],
    ) -> None:
        """All panes of the groups; those of them whose points changed, in order of group and time;
        those that are gone. `stored` are the states of heads and points.
        """
        rows = pa.table(
            {
                TIME: pa.array(heads.panes),
                _LAST: pa.array(heads.last),
                _WAITS: pa.array(heads.waits),
                STATE: stored[0],
            }
        )
        self._heads.write(
            state,
            self._head_names(),
            self._groups,
            np.bincount(heads.keys, minlength=len(self._by)),
            rows,
        )
        first = np.flatnonzero(begins(points.keys, panes))
        keys, counts = points.keys[first], np.diff(first, append=len(points))
        rows = pa.table({TIME: pa.array(points.times), STATE: stored[1]})
        self._panes.write(
            state, self._pane_names(keys, panes[first]), self._groups[keys], counts, rows
        )
        state.put_array(
            self._pane_names(gone.keys, gone.panes),
            pa.nulls(len(gone), pa.binary()),
            self._groups[gone.keys],
        )

    def _head_names(self) -> pa.Array:
        return pc.binary_join_element_wise(_HEAD, self._by, _NOTHING)

    def _pane_names(self, keys: Ints, panes: Ints) -> pa.Array:
        heads = np.empty((len(keys), 9), np.uint8)
        heads[:, 0] = _PANE[0]
        heads[:, 1:] = (panes.view(np.uint64) ^ _SIGN).astype(">u8").view(np.uint8).reshape(-1, 8)
        numbers = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(9), len(keys), [None, pa.py_buffer(heads)]
        ).cast(pa.binary())
        return pc.binary_join_element_wise(numbers, self._by.take(pa.array(keys)), _NOTHING)


# What windows over points amount to: from the points in order of group and time, and from what
# whole panes of them amount to.


def windows_at(
    points: Points,
    chosen: Ints,
    heads: Heads,
    others: Heads,
    size_us: int,
    pane_us: int,
    merging: Merging,
    pool: Pool,
) -> States:
    """The states of the windows (t - size, t] that end at some of the points. `others` are the
    heads of panes of which no point is there.
    """
    found = _by_taking_away(points, chosen, others, size_us, merging, pool)
    return (
        pane_windows(points, chosen, heads, size_us, pane_us, merging, pool)
        if found is None
        else found
    )


def _by_taking_away(
    points: Points, chosen: Ints, others: Heads, size_us: int, merging: Merging, pool: Pool
) -> States | None:
    """A running total over the points and the heads of the other panes, in order of group and time:
    a window is what it is at its end less what it was at its beginning.
    """
    keys, times, states, last = points.keys, points.times, points.states, chosen
    if len(others):
        keys, times, states = (
            np.concatenate(pair)
            for pair in ((keys, others.keys), (times, others.last), (states, others.states))
        )
        order = merge_order((points.keys, points.times), (others.keys, others.last))
        keys, times, states = keys[order], times[order], states[order]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        last = place[chosen]
    first = first_from(keys, times, points.keys[chosen], points.times[chosen] - size_us + 1)
    return merging.over_ranges(pool.pick(states), first, last + 1)


def pane_windows(
    points: Points,
    chosen: Ints,
    heads: Heads,
    size_us: int,
    pane_us: int,
    merging: Merging,
    pool: Pool,
) -> States:
    """The same by merging alone.

    A window is what lies at its end, in the pane of t; at its beginning, in the pane of t - size;
    and the whole panes between, by their heads. The points of the panes at the two ends must all be
    there.
    """
    panes = points.times // pane_us
    pane: Ints = np.cumsum(begins(points.keys, panes)) - 1
    of, until = points.keys[chosen], points.times[chosen]
    windows = _within(points, pane, chosen, merging.prefixes, pool)
    begins_in = (until - size_us + 1) // pane_us
    oldest = first_from(points.keys, points.times, of, until - size_us + 1)
    also = np.flatnonzero((panes[oldest] == begins_in) & (pane[oldest] != pane[chosen]))
    place(
        windows,
        also,
        merging.merge(
            _within(points, pane, oldest[also], merging.suffixes, pool), pick(windows, also)
        ),
    )
    first, stop = (
        first_from(heads.keys, heads.panes, of, wanted) for wanted in (begins_in + 1, panes[chosen])
    )
    also = np.flatnonzero(first < stop)
    place(
        windows,
        also,
        merging.merge(_between(first[also], stop[also], heads, merging, pool), pick(windows, also)),
    )
    return windows


def _within(
    points: Points, pane: Ints, chosen: Ints, scan: Callable[[States, Ints], States], pool: Pool
) -> States:
    """What some points amount to with all before them in their pane, or all behind them. Only their
    panes are looked at.
    """
    mine = np.zeros(int(pane[-1]) + 1 if len(pane) else 0, np.bool_)
    mine[pane[chosen]] = True
    there = np.flatnonzero(mine[pane])
    return pick(scan(pool.pick(points.states[there]), pane[there]), np.searchsorted(there, chosen))


def _between(first: Ints, stop: Ints, heads: Heads, merging: Merging, pool: Pool) -> States:
    """What each range of heads amounts to. Ranges have up to so many heads as a block: one over the
    bound of two blocks is the end of one and the beginning of the other.
    """
    new = begins(first, stop)
    first, stop = first[new], stop[new]
    low, high = int(first.min(initial=0)), int(stop.max(initial=0))
    states, blocks = pool.pick(heads.states[low:high]), np.arange(high - low) // PANES
    first, last = first - low, stop - low - 1
    ends = pick(merging.suffixes(states, blocks), first)
    over = np.flatnonzero(blocks[first] != blocks[last])
    place(
        ends,
        over,
        merging.merge(pick(ends, over), pick(merging.prefixes(states, blocks), last[over])),
    )
    inside = np.flatnonzero((blocks[first] == blocks[last]) & ((last + 1) % PANES != 0))
    lengths = (last - first + 1)[inside]
    members = pick(states, runs(first[inside], lengths))
    place(ends, inside, merging.reduced(members, np.repeat(np.arange(len(lengths)), lengths)))
    return pick(ends, np.cumsum(new) - 1)


_NO_KEYS = pa.nulls(0, pa.binary())
_NONE = np.zeros(0, np.int64)
_NO_HEADS = Heads(_NONE, _NONE, _NONE, _NONE, _NONE)


@dataclass
class Work:
    """A call at work: the groups' heads as they were, all states by number, and what windows were,
    with each version's state.
    """

    heads: Heads
    pool: Pool
    clock: Watermarks
    history: History = field(default_factory=History)
    windows: list[States] = field(default_factory=list)


class SlidingStates(Windowed):
    """What the rows of a group before each of its rows amount to."""

    end_shown_us = -1

    def __init__(self, step: WindowStep) -> None:
        super().__init__(step)
        assert isinstance(step.window, Sliding)
        self.size_us = step.window.size_us
        self.pane_us = max(self.size_us // PANES, 1)
        self._merging = Merging(self.aggregation)

    def advance(self, state: KeyedState, rows: pa.Table, clock: Watermarks) -> pa.Table:
        """1. Make points. 2. Read the heads of all groups that something happens to, and the panes
        that are needed. 3. Compute windows. 4. Tell. 5. Store.
        """
        rows, times = self._in_time(rows, clock)
        keys, ranks = numbered(
            [
                encode_keys(rows, self.by),
                self.completed(state, clock).by,
                closing(self, state, clock),
            ]
        )
        if not len(keys):
            return self.nothing()
        grouped = Grouped(keys, key_groups(keys), _NO_KEYS)
        store = PaneStore(self.step_name, grouped.by, grouped.groups, self.aggregation.layout.dtype)
        work = Work(*store.read_heads(state, self._merging), clock)
        fresh = self._points(rows, ranks[0], times, work.pool, clock)
        in_order = self._in_order(work.heads, fresh, len(grouped.by))
        needed = ~in_order[work.heads.keys] | self._needed(
            work.heads, fresh, len(grouped.by), clock
        )
        known = store.read_points(state, work.heads.take(needed), self._merging, work.pool)
        points, heads = self._in_one_go(
            known.take(in_order[known.keys]),
            fresh.take(in_order[fresh.keys]),
            work.heads.take(~needed),
            work,
        )
        more, others = self._tick_by_tick(
            known.take(~in_order[known.keys]), fresh.take(~in_order[fresh.keys]), work
        )
        table = self._result(grouped, work)
        self._put(state, store, grouped, work, points.merged_with(more), heads.and_also(others))
        return table

    # Rows into points

    def _in_time(self, rows: pa.Table, clock: Watermarks) -> tuple[pa.Table, Times]:
        """The rows that are not late, and their times."""
        times, places = self.times(rows), places_of(rows, clock)
        limits = self.bounds(clock.horizon_before)[places]
        late = times < limits
        if not late.any():
            return rows, times
        self.counts["late"] += self.late.add(rows, late, clock.times_us[places], limits - times)
        return rows.filter(pa.array(~late)), times[~late]

    def _points(
        self, rows: pa.Table, keys: Ints, times: Times, pool: Pool, clock: Watermarks
    ) -> Points:
        places = places_of(rows, clock)
        order = sorting(keys, times, places)
        points = Points(keys[order], times[order], places[order], _NONE)
        first = np.flatnonzero(begins(points.keys, points.times, points.places))
        states = pool.add(
            self._merging.lifted(
                Segments(
                    rows,
                    order,
                    first,
                    np.zeros(len(first), np.int64),
                    np.arange(len(first)),
                    _NO_KEYS,
                )
            )
        )
        if len(first) < len(order):
            points = Points(points.keys[first], points.times[first], points.places[first], _NONE)
        return replace(points, states=states)

    # Which groups and panes

    @staticmethod
    def _in_order(heads: Heads, fresh: Points, groups: int) -> Mask:
        """Which groups' points come in the order of their times."""
        last = np.full(groups, UNSTARTED)
        last[heads.keys] = heads.last  # of a group's panes, the last one's stays
        by_tick = fresh.take(sorting(fresh.keys, fresh.places, fresh.times))
        new = begins(by_tick.keys)
        before = np.append(UNSTARTED, by_tick.times[:-1]) if len(fresh) else fresh.times
        before = np.where(new, last[by_tick.keys], before)
        in_order = np.ones(groups, np.bool_)
        in_order[by_tick.keys[by_tick.times <= before]] = False
        return in_order

    def _needed(self, heads: Heads, fresh: Points, groups: int, clock: Watermarks) -> Mask:
        """The panes that groups in order need: to which points come, that have points to be told,
        and in which the windows that are computed begin.
        """
        first, last = np.full(groups, NEVER), np.full(groups, UNSTARTED)
        new = np.flatnonzero(begins(fresh.keys))
        first[fresh.keys[new]] = fresh.times[new]
        last[fresh.keys[np.append(new[1:], len(fresh))[: len(new)] - 1]] = fresh.times[
            np.append(new[1:], len(fresh))[: len(new)] - 1
        ]
        needed: Mask = heads.panes == (first // self.pane_us)[heads.keys]
        lowest, highest = first.copy(), last
        if self.final:
            complete = int(clock.complete[-1])
            needed |= heads.waits < complete
            np.minimum.at(lowest, heads.keys, heads.waits)
            np.maximum.at(highest, heads.keys, heads.last)
            highest = (
                np.minimum(highest, complete - 1)
                if complete > UNSTARTED
                else np.full(groups, UNSTARTED)
            )
        some = lowest <= highest
        low = np.where(some, lowest - self.size_us + 1, 0) // self.pane_us
        high = np.where(some, highest - self.size_us + 1, 0) // self.pane_us
        begins_in: Mask = (
            some[heads.keys] & (heads.panes >= low[heads.keys]) & (heads.panes <= high[heads.keys])
        )
        needed |= begins_in
        return needed

    # Windows

    def _in_one_go(
        self, known: Points, fresh: Points, others: Heads, work: Work
    ) -> tuple[Points, Heads]:
        """Groups in order: the points of the panes that changed, and all their panes. `others` are
        the panes that were not read.
        """
        points = known.merged_with(fresh)
        panes = points.times // self.pane_us
        mine = Heads.of(points, panes, self._told_until(work.clock), self._merging, work.pool)
        heads = others.and_also(mine)
        wanted = points.places >= 0
        if self.final:
            wanted = (wanted | (points.times >= work.clock.watermark_at_start)) & (
                points.times < work.clock.complete[-1]
            )
        self._add(points, np.flatnonzero(wanted), points.places, heads, others, work)
        pane = np.cumsum(begins(points.keys, panes)) - 1
        changed = np.bincount(pane[points.places >= 0], minlength=len(mine)) > 0
        return points.take(changed[pane]), heads

    def _tick_by_tick(self, known: Points, fresh: Points, work: Work) -> tuple[Points, Heads]:
        """Groups out of order: all their points, and all their panes."""
        limits = self.bounds(work.clock.horizon_before)
        alive, history = known.in_order(), work.history
        closed = int(self.bounds(np.array([work.clock.horizon_at_start]))[0])
        self._add(
            alive,
            np.flatnonzero(alive.times >= closed),
            alive.places,
            self._heads(alive, work),
            _NO_HEADS,
            work,
        )
        for tick in np.unique(fresh.places).tolist():
            comes = fresh.take(fresh.places == tick)
            touched = np.isin(alive.keys, comes.keys)
            mine, rest = (
                self._merged(alive.take(touched).and_also(comes), work.pool),
                alive.take(~touched),
            )
            history.forget(
                np.isin(history.current.keys, comes.keys) & (history.current.ends <= limits[tick])
            )
            current = history.current
            history.end(
                any_within(comes.keys, comes.times, current.keys, current.starts + 1, current.ends),
                tick,
            )
            changed = any_within(
                comes.keys, comes.times, mine.keys, mine.times - self.size_us + 1, mine.times + 1
            )
            chosen = np.flatnonzero(changed & (mine.times >= limits[tick]))
            self._add(
                mine, chosen, np.full(len(mine), tick), self._heads(mine, work), _NO_HEADS, work
            )
            alive = rest.and_also(mine)
        alive = alive.in_order()
        return alive, self._heads(alive, work)

    def _merged(self, points: Points, pool: Pool) -> Points:
        """Points of one time as one, in order."""
        points = points.in_order()
        new = begins(points.keys, points.times)
        if new.all():
            return points
        merged = pool.add(self._merging.reduced(pool.pick(points.states), np.cumsum(new)))
        return Points(points.keys[new], points.times[new], points.places[new], merged)

    def _heads(self, points: Points, work: Work) -> Heads:
        return Heads.of(
            points,
            points.times // self.pane_us,
            self._told_until(work.clock),
            self._merging,
            work.pool,
        )

    def _told_until(self, clock: Watermarks) -> int | None:
        return int(clock.complete[-1]) if self.final else None

    def _add(
        self, points: Points, chosen: Ints, born: Ints, heads: Heads, others: Heads, work: Work
    ) -> None:
        """The windows that end at some of these points, as versions born with some ticks."""
        if len(chosen):
            states = windows_at(
                points, chosen, heads, others, self.size_us, self.pane_us, self._merging, work.pool
            )
            work.windows.append(states)
            ends = points.times[chosen]
            work.history.add_each(
                Sets(points.keys[chosen], ends - self.size_us, ends + 1, _NONE, _NONE), born[chosen]
            )

    # What is told and stored

    def _result(self, grouped: Grouped, work: Work) -> pa.Table:
        if not work.windows:
            return self.nothing()
        sets, history = work.history.all(), work.history
        shows = self._merging.results(together(work.windows))
        windows, window = distinct_windows(grouped, sets.keys, sets.starts, sets.ends)
        shown = over_lifetimes(
            window,
            history.born,
            history.died,
            self.told_from(sets.ends, work.clock),
            len(work.clock),
        )
        table, changes = self.told(windows, shown, shows, work.clock)
        shows.count_lost(self.aggregation, changes.versions[changes.comes])
        return table

    def _put(
        self,
        state: KeyedState,
        store: PaneStore,
        grouped: Grouped,
        work: Work,
        points: Points,
        heads: Heads,
    ) -> None:
        """Panes of which no window needs a point any more go."""
        (limit,) = self.bounds(work.clock.closed[-1:]).tolist()
        needed = heads.last > max(limit - self.size_us, UNSTARTED)
        heads, gone = heads.take(needed), heads.take(~needed)
        panes = points.times // self.pane_us
        if len(gone):
            new = begins(points.keys, panes)
            there = ~gone.have(points.keys[new], panes[new])[np.cumsum(new) - 1]
            points, panes = points.take(there), panes[there]
            gone = work.heads.take(gone.have(work.heads.keys, work.heads.panes))
        stored = self._merging.stored(work.pool.pick(np.concatenate([heads.states, points.states])))
        store.write(
            state,
            heads,
            gone,
            points,
            panes,
            (stored.slice(0, len(heads)), stored.slice(len(heads))),
        )
        put_timers(state, self._timers(grouped, work.heads), self._timers(grouped, heads))

    def _timers(self, grouped: Grouped, heads: Heads) -> tuple[pa.Array, Groups]:
        """One for the first window of a group that waits, and one for when its last point is not
        needed any more.
        """
        waits, last = np.full(len(grouped.by), NEVER), np.full(len(grouped.by), UNSTARTED)
        np.minimum.at(waits, heads.keys, heads.waits)
        np.maximum.at(last, heads.keys, heads.last)
        waiting, there = np.flatnonzero(waits != NEVER), np.flatnonzero(last != UNSTARTED)
        of, ends = (
            np.concatenate([waiting, there]),
            np.concatenate([waits[waiting] + 1, last[there] + self.size_us]),
        )
        windows = Windows(
            grouped.by.take(pa.array(of)), np.zeros(len(of), np.int64), ends, grouped.groups[of]
        )
        return windows.names(np.arange(len(of)) < len(waiting)).cast(pa.binary()), windows.groups
