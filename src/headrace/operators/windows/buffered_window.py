"""Windows that are made anew from the rows that they hold: for sessions and sliding windows over
tables, whose rows go again, and for aggregates whose states cannot be put together. Every window
that a tick changes is computed from its rows, so this costs what the windows hold; `sessions` and
`sliding` have the quick way for the rest.

Rows are kept as long as a window that is not closed holds them (`kept_rows`). Beside them a group
has timers, entries as other windows have them (`entries`), which say when it must be looked at
though no row came.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, runs
from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.columnar.keys import encode_keys, key_groups, whole
from headrace.columnar.lookup import begins, bounds, numbered, search, sorting
from headrace.columnar.segments import Segments
from headrace.operators.aggregates.aggregation import Aggregation, Outcome
from headrace.operators.kernel import UNSTARTED, Groups, KeyedState, Times, Watermarks
from headrace.operators.windows.kernel import Windowed, WindowStep, over_lifetimes
from headrace.operators.windows.late_rows import places_of
from headrace.operators.windows.specs import Session, Sliding
from headrace.operators.windows.state import (
    ID,
    TIME,
    TOLD,
    History,
    Kept,
    RowStore,
    Sets,
    Windows,
    any_within,
    chains,
    scan_until,
    with_long_keys,
)

_NO_KEYS = pa.nulls(0, pa.binary())
_ONE = b"\x01"


@dataclass(frozen=True)
class Spans:
    """Windows over rows that lie in order of group and time: each one's group, its bounds, and the
    places of its first row and of the one behind its last.
    """

    keys: Ints
    starts: Times
    ends: Times
    first: Ints
    stop: Ints

    def only(self, which: Mask) -> Spans:
        return Spans(
            self.keys[which],
            self.starts[which],
            self.ends[which],
            self.first[which],
            self.stop[which],
        )


@dataclass(frozen=True)
class Grouped:
    """The groups that a call is about."""

    by: pa.Array
    groups: Groups
    names: pa.Array  # of their rows


class Buffered(Windowed):
    """What sessions and sliding windows that keep rows have in common."""

    def __init__(self, step: WindowStep) -> None:
        super().__init__(step)
        read = dict.fromkeys(name for _, spec in step.timed_aggregates for name in spec.reads)
        self._store = RowStore(
            step.name, [step.schema.field(name) for name in read], with_id=step.over_table
        )

    def aggregating(self, step: WindowStep) -> Aggregation:
        """Rows that go are taken out before: aggregates see none go."""
        return Aggregation(
            step.name, step.schema, step.by, step.timed_aggregates, divert=step.divert_errors
        )

    # What kinds of windows differ in

    @abstractmethod
    def spans(self, keys: Ints, times: Times) -> Spans:
        """The windows of rows in order of group and time."""

    @abstractmethod
    def open(self, keys: Ints, times: Times, limit: int) -> Mask:
        """Which of these rows some window still needs, by the time up to which windows are closed.
        Rows are in order of group and time.
        """

    @abstractmethod
    def taken(self, keys: Ints, times: Times, comes: Mask, limit: int) -> Mask:
        """Which rows that come are not late, and all others. Rows are in order of group and
        time.
        """

    @abstractmethod
    def can_go(self, times: Times, limit: int) -> Mask:
        """Which kept rows may still go."""

    def counts_as_window(self, ends: Times, limit: int) -> Mask:  # noqa: ARG002
        """Which of the windows that rows make are windows still."""
        return np.ones(len(ends), np.bool_)

    @abstractmethod
    def reach(self, starts: Times, ends: Times) -> tuple[Times, Times]:
        """From which time up to which a row changes such windows."""

    @abstractmethod
    def timers(
        self, keys: Ints, times: Times, watermark_us: int
    ) -> tuple[Ints, Times, Times, Mask]:
        """When groups with these rows, in order, must be looked at: group, start, end and whether
        it waits for the complete clock (else for the closed one).
        """

    # The step

    def advance(self, state: KeyedState, rows: pa.Table, clock: Watermarks) -> pa.Table:
        """1. Read the rows of all groups that something happens to. 2. Go through the ticks. 3.
        Compute every version of a window. 4. Store rows and timers. 5. Tell.
        """
        grouped, kept = self._gather(state, rows, clock)
        if not len(grouped.by):
            return self.nothing()
        before = kept.in_order(np.arange(kept.stored))
        history, after = self._through(kept, before, rows, clock)
        self._put(state, grouped, kept, (before, after), clock)
        return self._result(rows, grouped, kept, history, clock)

    def _gather(self, state: KeyedState, rows: pa.Table, clock: Watermarks) -> tuple[Grouped, Kept]:
        of_rows = encode_keys(rows, self.by)
        keys, ranks = numbered(
            [of_rows, self.completed(state, clock).by, closing(self, state, clock)]
        )
        grouped = Grouped(keys, key_groups(keys), RowStore.names(keys))
        counts, stored = self._store.read(state, grouped.names, grouped.groups)
        return grouped, self._kept(rows, ranks[0], counts, stored, clock)

    def _kept(
        self, rows: pa.Table, keys: Ints, counts: Ints, stored: pa.Table, clock: Watermarks
    ) -> Kept:
        fresh = rows.select(
            [field.name for field in self._store.fields if field.name in rows.schema.names]
        )
        fresh = fresh.append_column(TIME, pa.array(self.times(rows)))
        comes = np.ones(stored.num_rows + rows.num_rows, np.bool_)
        if self.settings.over_table:
            fresh = fresh.append_column(
                ID, encode_keys(rows, self.settings.row_key).cast(pa.binary())
            )
            goes = pc.is_in(
                whole(rows.column(CHANGE_TYPE)), pa.array(["delete", "update_preimage"])
            )
            comes[stored.num_rows :] = ~goes.to_numpy(zero_copy_only=False)
        everything = pa.concat_tables(
            [stored, fresh.select(stored.schema.names).cast(stored.schema)]
        ).combine_chunks()
        keys = np.concatenate([np.repeat(np.arange(len(counts)), counts), keys])
        places = np.concatenate([np.full(stored.num_rows, -1), places_of(rows, clock)])
        times = whole(everything.column(TIME)).to_numpy()
        same = self._same(keys, everything) if self.settings.over_table else None
        ticks = pa.array(np.zeros(everything.num_rows, np.int64))
        return Kept(
            everything.append_column(TICK, ticks),
            stored.num_rows,
            keys,
            times,
            places,
            np.arange(len(keys)),
            comes,
            same,
        )

    @staticmethod
    def _same(keys: Ints, rows: pa.Table) -> Ints:
        ids = whole(rows.column(ID)).dictionary_encode().indices.to_numpy().astype(np.int64)
        _, same = np.unique(keys * (int(ids.max(initial=0)) + 1) + ids, return_inverse=True)
        return same

    # Tick by tick

    def _through(
        self, kept: Kept, before: Ints, rows: pa.Table, clock: Watermarks
    ) -> tuple[History, Ints]:
        """What windows were at every tick; and the rows that are kept at the end, in order of group
        and time.
        """
        limits = self.bounds(clock.horizon_before)
        history, late = History(), np.zeros(len(kept.keys), np.bool_)
        known = self.spans(kept.keys[before], kept.times[before])
        closed = int(self.bounds(np.array([clock.horizon_at_start]))[0])
        history.add(
            self._sets(kept, before, known.only(self.counts_as_window(known.ends, closed))), -1
        )
        alive = np.zeros(len(kept.keys), np.bool_)
        alive[before] = True
        for place, fresh in _by_place(kept):
            touched = np.zeros(int(kept.keys.max()) + 1, np.bool_)
            touched[kept.keys[fresh]] = True
            mine = kept.in_order(np.flatnonzero(alive & touched[kept.keys]))
            alive[mine] = False
            now = self._tick(kept, history, touched, (mine, fresh), late, place, int(limits[place]))
            alive[now] = True
        self.counts["late"] += self.late.add(
            rows, late[kept.stored :], *self._lateness(kept, limits, clock)
        )
        after = kept.in_order(np.flatnonzero(alive))
        (limit,) = self.bounds(clock.closed[-1:]).tolist()
        return history, after[self.open(kept.keys[after], kept.times[after], limit)]

    def _lateness(self, kept: Kept, limits: Times, clock: Watermarks) -> tuple[Times, Times]:
        places = kept.places[kept.stored :]
        return clock.times_us[places], limits[places] - kept.times[kept.stored :]

    def _tick(
        self,
        kept: Kept,
        history: History,
        touched: Mask,
        rows: tuple[Ints, Ints],
        late: Mask,
        place: int,
        limit: int,
    ) -> Ints:
        """The rows of the touched groups after a tick, in order. `rows` are theirs, in order, and
        those of the tick.
        """
        mine, fresh = rows
        mine = mine[self.open(kept.keys[mine], kept.times[mine], limit)]
        current = history.current
        history.forget(touched[current.keys] & (current.ends <= limit))
        goes, comes = self._net(kept, mine, fresh, late, limit)
        members = kept.in_order(np.concatenate([mine[~np.isin(mine, goes)], comes]))
        new = np.isin(members, comes)
        taken = self.taken(kept.keys[members], kept.times[members], new, limit)
        late[members[~taken]] = True
        changed = np.concatenate([goes, members[new & taken]])
        members = members[taken]
        self._renew(kept, history, touched, members, changed, place, limit)
        return members

    def _net(
        self, kept: Kept, mine: Ints, fresh: Ints, late: Mask, limit: int
    ) -> tuple[Ints, Ints]:
        """The kept rows that go and the rows that come. What comes and goes within the tick is not
        seen; what goes and is not there, or may not go any more, is late.
        """
        if kept.same is None:
            return np.zeros(0, np.int64), fresh
        there = np.full(int(kept.same.max()) + 1, -1)
        by_rank = mine[np.argsort(kept.ranks[mine], kind="stable")]
        there[kept.same[by_rank]] = by_rank
        order = fresh[np.argsort(kept.same[fresh], kind="stable")]
        new = np.ones(len(order), np.bool_)
        new[1:] = kept.same[order][1:] != kept.same[order][:-1]
        first, last = order[new], order[np.append(np.flatnonzero(new)[1:], len(order)) - 1]
        old = there[kept.same[first]]
        found = ~kept.comes[first] & (old >= 0)
        found[found] = self.can_go(kept.times[old[found]], limit)
        late[first[~kept.comes[first] & ~found]] = True
        comes = kept.comes[last]
        kept.ranks[last[comes & found]] = kept.ranks[old[comes & found]]
        return old[found], last[comes]

    def _renew(
        self,
        kept: Kept,
        history: History,
        touched: Mask,
        members: Ints,
        changed: Ints,
        place: int,
        limit: int,
    ) -> None:
        """End the versions of windows that the tick changes, and add what they are now."""
        keys, times = kept.keys[changed], kept.times[changed]
        current = history.current
        history.end(
            touched[current.keys]
            & any_within(keys, times, current.keys, *self.reach(current.starts, current.ends)),
            place,
        )
        spans = self.spans(kept.keys[members], kept.times[members])
        spans = spans.only(
            any_within(keys, times, spans.keys, *self.reach(spans.starts, spans.ends))
            & self.counts_as_window(spans.ends, limit)
        )
        history.add(self._sets(kept, members, spans), place)

    @staticmethod
    def _sets(kept: Kept, in_order: Ints, spans: Spans) -> Sets:
        lengths = spans.stop - spans.first
        entries = in_order[runs(spans.first, lengths)]
        return Sets(
            spans.keys,
            spans.starts,
            spans.ends,
            lengths,
            kept.ranked(np.repeat(np.arange(len(lengths)), lengths), entries),
        )

    # What is stored and told

    def _put(
        self,
        state: KeyedState,
        grouped: Grouped,
        kept: Kept,
        rows: tuple[Ints, Ints],
        clock: Watermarks,
    ) -> None:
        before, after = rows
        in_rank = kept.ranked(kept.keys[after], after)
        counts = np.bincount(kept.keys[after], minlength=len(grouped.by))
        self._store.write(
            state, grouped.names, grouped.groups, counts, kept.rows.take(pa.array(in_rank))
        )
        old, new = (
            self._timers(grouped, kept, *each)
            for each in ((before, clock.watermark_at_start), (after, int(clock.complete[-1])))
        )
        put_timers(state, old, new)

    def _timers(
        self, grouped: Grouped, kept: Kept, rows: Ints, watermark_us: int
    ) -> tuple[pa.Array, Groups]:
        of, starts, ends, waits = self.timers(kept.keys[rows], kept.times[rows], watermark_us)
        windows = Windows(grouped.by.take(pa.array(of)), starts, ends, grouped.groups[of])
        return windows.names(waits).cast(pa.binary()), windows.groups

    def _result(
        self, rows: pa.Table, grouped: Grouped, kept: Kept, history: History, clock: Watermarks
    ) -> pa.Table:
        sets, born = history.all(), history.born
        if not len(sets):
            return self.nothing()
        segments = Segments(
            kept.rows,
            sets.entries,
            np.cumsum(sets.lengths) - sets.lengths,
            np.zeros(len(sets), np.int64),
            np.arange(len(sets)),
            _NO_KEYS,
        )
        stored, parts = self.aggregation.layout.unpacked_array(pa.nulls(len(sets), pa.binary()))
        outcome = self.aggregation.advance(segments, stored, parts)
        windows, window = distinct_windows(grouped, sets.keys, sets.starts, sets.ends)
        shown = over_lifetimes(
            window, born, history.died, self.told_from(sets.ends, clock), len(clock)
        )
        table, changes = self.told(windows, shown, Versions(outcome, segments.after), clock)
        self.aggregation.count_lost(outcome, segments.after[changes.versions[changes.comes]])
        self._put_aside(rows, kept, outcome, segments, born)
        return table

    def _put_aside(
        self, rows: pa.Table, kept: Kept, outcome: Outcome, segments: Segments, born: Ints
    ) -> None:
        """Rows that an aggregate left out, when they come: each time that a window is computed it
        leaves them out again.
        """
        for (name, _), each in zip(self.aggregation.aggregates, outcome.advanced, strict=True):
            for left_out in each.left_out:
                row = segments.order[left_out.rows]
                fresh = (row >= kept.stored) & (
                    kept.places[row] == born[segments.segment_of[left_out.rows]]
                )
                if fresh.any():
                    self.diverted.add(rows, row[fresh] - kept.stored, name, left_out.reason)


@dataclass(frozen=True)
class Versions:
    """An outcome, by the numbers of windows' versions."""

    outcome: Outcome
    after: Ints

    def differs(self, before: Ints, after: Ints) -> Mask:
        return self.outcome.differs(self.after[before], self.after[after])

    def results(self, versions: Ints) -> list[pa.Array]:
        return self.outcome.results(self.after[versions])


def _by_place(kept: Kept) -> Iterator[tuple[int, Ints]]:
    """The ticks that have rows, and the rows of each."""
    places = kept.places[kept.stored :]
    starts = np.flatnonzero(begins(places))
    for start, stop in pairwise([*starts.tolist(), len(places)]):
        yield int(places[start]), kept.stored + np.arange(start, stop)


def distinct_windows(
    grouped: Grouped, keys: Ints, starts: Times, ends: Times
) -> tuple[Windows, Ints]:
    """The distinct windows in order of group, start and end, and the place of each given one among
    them.
    """
    order = sorting(keys, starts, ends)
    keys, starts, ends = keys[order], starts[order], ends[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (keys[1:] != keys[:-1]) | (starts[1:] != starts[:-1]) | (ends[1:] != ends[:-1])
    place = np.empty(len(order), np.int64)
    place[order] = np.cumsum(new) - 1
    return (
        Windows(
            grouped.by.take(pa.array(keys[new])), starts[new], ends[new], grouped.groups[keys[new]]
        ),
        place,
    )


def closing(kernel: Windowed, state: KeyedState, clock: Watermarks) -> pa.Array:
    """The groups of entries that the closed clock has passed."""
    (until,) = kernel.bounds(clock.closed[-1:]).tolist()
    if until == kernel.bounds(np.array([clock.horizon_at_start]))[0]:
        return _NO_KEYS
    return scan_until(state, TOLD, UNSTARTED, until)[1].by


def put_timers(
    state: KeyedState, old: tuple[pa.Array, Groups], new: tuple[pa.Array, Groups]
) -> None:
    """Take away the timers that groups had, and put those that they have now; names and key
    groups.
    """
    gone = pc.invert(pc.is_in(old[0], new[0])).to_numpy(zero_copy_only=False)
    state.put_array(
        old[0].filter(pa.array(gone)), pa.nulls(int(gone.sum()), pa.binary()), old[1][gone]
    )
    fresh = pc.invert(pc.is_in(new[0], old[0])).to_numpy(zero_copy_only=False)
    names = new[0].filter(pa.array(fresh))
    state.put_array(
        names, with_long_keys(names, pa.array([_ONE] * len(names), pa.binary())), new[1][fresh]
    )


# Sessions made from kept rows: over tables, where a row that goes may cut a session in two, and for
# aggregates whose states cannot be put together.
#
# Over a table, rows that come and go within one tick are not seen. A row that comes is late if the
# session that it would be in has nothing but rows that come, and ends at or before the time up to
# which windows are closed; a row that goes is late if its session is closed, or never took it in.


class SessionRows(Buffered):
    """Rows that follow each other in less than the gap."""

    def __init__(self, step: WindowStep) -> None:
        super().__init__(step)
        assert isinstance(step.window, Session)
        self.gap_us = step.window.gap_us

    def spans(self, keys: Ints, times: Times) -> Spans:
        chain = chains(keys, times, times + self.gap_us)
        first = np.flatnonzero(np.diff(chain, prepend=-1))
        stop = np.append(first[1:], len(chain))[: len(first)]
        return Spans(keys[first], times[first], times[stop - 1] + self.gap_us, first, stop)

    def open(self, keys: Ints, times: Times, limit: int) -> Mask:
        spans = self.spans(keys, times)
        return np.repeat(spans.ends > limit, spans.stop - spans.first)

    def taken(self, keys: Ints, times: Times, comes: Mask, limit: int) -> Mask:
        if not len(keys):
            return comes
        spans = self.spans(keys, times)
        live = np.logical_or.reduceat(~comes, spans.first) | (spans.ends > limit)
        return np.repeat(live, spans.stop - spans.first)

    def can_go(self, times: Times, limit: int) -> Mask:  # noqa: ARG002
        return np.ones(len(times), np.bool_)

    def reach(self, starts: Times, ends: Times) -> tuple[Times, Times]:
        return starts - self.gap_us + 1, ends

    def timers(
        self, keys: Ints, times: Times, watermark_us: int
    ) -> tuple[Ints, Times, Times, Mask]:
        """One for each session."""
        spans = self.spans(keys, times)
        waits = spans.ends > watermark_us if self.final else np.zeros(len(spans.keys), np.bool_)
        return spans.keys, spans.starts, spans.ends, waits


# Sliding windows made from kept rows: over tables, whose rows go again, and for aggregates whose
# states cannot be put together.
#
# For each time t of a row, the rows of its group in (t - size, t]. A row is late if t lies before
# the time up to which windows are closed; so is a row that goes. A window (t - size, t] is held as
# one that ends at t + 1 microsecond: it is told when no row at t or before is expected any more.


class SlidingRows(Buffered):
    """The rows of a group before each of its rows."""

    end_shown_us = -1

    def __init__(self, step: WindowStep) -> None:
        super().__init__(step)
        assert isinstance(step.window, Sliding)
        self.size_us = step.window.size_us

    def spans(self, keys: Ints, times: Times) -> Spans:
        last = np.flatnonzero(np.append(begins(keys, times)[1:], True)) if len(keys) else keys
        of, at = keys[last], times[last]
        where = bounds(keys, int(keys[-1]) + 1) if len(keys) else np.zeros(1, np.int64)
        first = search(times, where[of], last, at - self.size_us, right=True)
        return Spans(of, at - self.size_us, at + 1, first, last + 1)

    def open(self, keys: Ints, times: Times, limit: int) -> Mask:  # noqa: ARG002
        needed: Mask = times > max(limit - self.size_us, UNSTARTED)
        return needed

    def taken(self, keys: Ints, times: Times, comes: Mask, limit: int) -> Mask:  # noqa: ARG002
        return ~comes | (times >= limit)

    def can_go(self, times: Times, limit: int) -> Mask:
        return times >= limit

    def counts_as_window(self, ends: Times, limit: int) -> Mask:
        return ends > limit

    def reach(self, starts: Times, ends: Times) -> tuple[Times, Times]:
        return starts + 1, ends

    def timers(
        self, keys: Ints, times: Times, watermark_us: int
    ) -> tuple[Ints, Times, Times, Mask]:
        """One for the first window of a group that waits, and one for when its last row is not
        needed any more.
        """
        return group_timers(keys, times, self.size_us, watermark_us if self.final else None)


def group_timers(
    keys: Ints, times: Times, size_us: int, watermark_us: int | None
) -> tuple[Ints, Times, Times, Mask]:
    """When groups with rows at these times, in order, must be looked at: group, start, end, and
    whether it waits for the complete clock.
    """
    last = np.flatnonzero(np.append(keys[1:] != keys[:-1], True)) if len(keys) else keys
    closing = keys[last], times[last] + size_us
    waiting = np.flatnonzero(times >= watermark_us) if watermark_us is not None else keys[:0]
    first = waiting[begins(keys[waiting])] if len(waiting) else waiting
    of, ends = (
        np.concatenate([closing[0], keys[first]]),
        np.concatenate([closing[1], times[first] + 1]),
    )
    return of, np.zeros(len(of), np.int64), ends, np.arange(len(of)) >= len(last)
