"""Tumbling and hopping windows: an aggregate for each group and window, told when the window is
complete or at every change.

A row is in all its windows that are not closed yet, by the closed clock before its tick; a row of
which all windows are closed is late. A window's state is one entry (`entries`), which goes once the
closed clock has passed the window's end by the allowed lateness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, runs
from headrace.columnar.columns import TICK
from headrace.columnar.keys import encode_keys
from headrace.columnar.segments import Segments, cut_codes, with_keys
from headrace.columnar.sort import Codes, codes_of, ranked, spread_out
from headrace.operators.aggregates.aggregation import PARTIAL, Outcome, all_combined, pays
from headrace.operators.kernel import UNSTARTED, KeyedState, Times, Watermarks
from headrace.operators.windows.assignment import Assigned, assign
from headrace.operators.windows.kernel import NOTHING, Shown, Windowed, WindowStep
from headrace.operators.windows.late_rows import PRODUCERS, combine, places_of, rows_behind
from headrace.operators.windows.specs import Hopping, Tumbling
from headrace.operators.windows.state import Windows, joined, with_long_keys

_PANE = "_pane"
_MANY = 3  # windows a row, from which on rows are combined before they go into them


@dataclass(frozen=True)
class Held:
    """Rows in windows: `entries` are the rows, one for each window that takes it in; `windows` is a
    number for that window, of which these are the bounds.
    """

    entries: Ints | None  # None: each row once
    windows: Ints
    starts: Times
    ends: Times


class FixedWindows(Windowed):
    """Windows whose bounds do not depend on the rows."""

    def __init__(self, step: WindowStep) -> None:
        super().__init__(step)
        assert isinstance(step.window, Tumbling | Hopping)
        self.spec = step.window

    def advance(self, state: KeyedState, rows: pa.Table, clock: Watermarks) -> pa.Table:
        """1. Put rows into windows. 2. Get the states, those of completed windows too. 3. Go
        through all segments. 4. Put the states. 5. Tell. 6. Forget.
        """
        rows = self._few(rows)
        held = self._held(rows, clock)
        windows, segments = together(
            rows, encode_keys(rows, self.by), held, self.completed(state, clock)
        )
        table = self._windows(state, windows, segments, clock) if len(windows) else self.nothing()
        self.forget(state, clock)
        return table

    def _few(self, rows: pa.Table) -> pa.Table:
        """Rows, combined if some of them are, or if each is in many windows: then fewer go into
        them.
        """
        if PARTIAL in rows.schema.names:
            return all_combined(rows, self.combine, [PRODUCERS])
        overlapping = self.spec.size_us // self.spec.every_us
        return self.combine(rows) if overlapping >= _MANY and self.worth_combining(rows) else rows

    # Combining before the shuffle

    @property
    def combinable(self) -> bool:
        """If every aggregate's states can be put together exactly, and no row is needed whole."""
        return self.aggregation.combinable and not self.late.divert

    def worth_combining(self, rows: pa.Table) -> bool:
        """Whether `combine` would make these rows far fewer. It decides about speed alone."""
        if not self.combinable or not rows.num_rows:
            return False
        panes = pa.array(assign(self.spec, self.times(rows)).panes())
        return pays(rows.select([*self.by, TICK]).append_column(_PANE, panes), [*self.by, _PANE])

    def combine(self, rows: pa.Table) -> pa.Table:
        """Rows as fewer rows, one for each group, pane and tick, that the step takes in their
        stead. See `combining`.
        """
        return combine(
            self.aggregation,
            rows,
            [self.settings.time],
            assign(self.spec, self.times(rows)).panes(),
            self.late.producers(rows),
        )

    # The step

    def _windows(
        self, state: KeyedState, windows: Windows, segments: Segments, clock: Watermarks
    ) -> pa.Table:
        names = windows.names(self._waits(windows, clock.watermark_at_start))
        stored, parts = self.aggregation.layout.unpacked_array(
            state.get_array(names, windows.groups)
        )
        outcome = self.aggregation.advance(segments, stored, parts)
        self._put(state, windows, names, outcome, clock)
        table, changes = self.told(
            windows, self._shown(windows, segments, outcome, clock), outcome, clock
        )
        self.aggregation.keep_account(segments, outcome, changes.versions[changes.comes])
        return table

    def _waits(self, windows: Windows, watermark_us: int) -> Mask:
        return windows.ends > watermark_us if self.final else np.zeros(len(windows), np.bool_)

    # Rows into windows

    def _held(self, rows: pa.Table, clock: Watermarks) -> Held:
        """Each row in its windows that are not closed; those of which none is are late. Rows that
        come when a window of theirs is complete already are counted.
        """
        times, places = self.times(rows), places_of(rows, clock)
        limits = self.bounds(clock.horizon_before)
        since = np.concatenate([limits, clock.watermark_before])
        begun = since != UNSTARTED
        assigned = assign(self.spec, np.concatenate([times, since[begun]]))
        # The oldest window that holds the limit is the oldest that is not closed; by the complete
        # clock, the oldest that is not complete.
        oldest = np.full(len(since), np.iinfo(np.int64).min)
        oldest[begun] = assigned.first[len(times) :]
        oldest_open, oldest_incomplete = oldest[places], oldest[len(clock) + places]
        first, last = (
            np.maximum(assigned.first[: len(times)], oldest_open),
            assigned.last[: len(times)],
        )
        late = last < oldest_open
        self.counts["late"] += self.late.add(
            rows, late, clock.times_us[places], limits[places] - times
        )
        self.counts["corrected"] = rows_behind(rows, (first < oldest_incomplete) & (first <= last))
        return _held(assigned, first, last)

    # What is stored and told

    def _put(
        self,
        state: KeyedState,
        windows: Windows,
        names: pa.Array,
        outcome: Outcome,
        clock: Watermarks,
    ) -> None:
        """States under the names they had; those that have been told since move."""
        values = with_long_keys(
            names, self.aggregation.layout.packed_array(outcome.rows, outcome.parts)
        )
        waited, waits = (
            self._waits(windows, int(complete))
            for complete in (clock.watermark_at_start, clock.complete[-1])
        )
        stays = (windows.ends > self.bounds(clock.closed[-1:])[0]) & (outcome.rows > 0)
        state.put_array(names, _where(stays & (waited == waits), values), windows.groups)
        moved = np.flatnonzero(stays & (waited != waits))
        if len(moved):
            there = windows.take(moved)
            state.put_array(there.names(waits[moved]), values.take(pa.array(moved)), there.groups)

    def _shown(
        self, windows: Windows, segments: Segments, outcome: Outcome, clock: Watermarks
    ) -> Shown:
        """What each segment changes, and what is shown for the first time when nothing changes
        it.
        """
        told_from = self.told_from(windows.ends, clock)
        place, key = np.searchsorted(clock.ticks, segments.ticks), segments.key_of
        was = np.where(
            outcome.exists[segments.after - 1] & (told_from[key] < place),
            segments.after - 1,
            NOTHING,
        )
        now = np.where(
            outcome.exists[segments.after] & (told_from[key] <= place), segments.after, NOTHING
        )
        changed_then = np.bincount(key[place == told_from[key]], minlength=len(windows)) > 0
        first = np.flatnonzero((told_from >= 0) & (told_from < len(clock)) & ~changed_then)
        earlier = np.bincount(key[place < told_from[key]], minlength=len(windows))
        version = segments.before_all[first] + earlier[first]
        return Shown.of(
            np.concatenate([place, told_from[first]]),
            np.concatenate([key, first]),
            np.concatenate([was, np.full(len(first), NOTHING)]),
            np.concatenate([now, np.where(outcome.exists[version], version, NOTHING)]),
        )


def _where(stays: Mask, values: pa.Array) -> pa.Array:
    return (
        values if stays.all() else pc.if_else(pa.array(stays), values, pa.scalar(None, values.type))
    )


def _held(assigned: Assigned, first: Ints, last: Ints) -> Held:
    count = np.maximum(last - first + 1, 0)
    if (count == 1).all():
        entries, numbers = None, last
    else:
        entries, numbers = np.repeat(np.arange(len(last)), count), runs(first, count)
    distinct, windows = ranked(numbers)
    return Held(entries, windows, *assigned.bounds(distinct))


def together(rows: pa.Table, by: pa.Array, held: Held, more: Windows) -> tuple[Windows, Segments]:
    """All windows of groups that a call is about, and their segments: those that rows are in, and
    some more.
    """
    starts, ends, places = _catalogue(
        np.concatenate([held.starts, more.starts]), np.concatenate([held.ends, more.ends])
    )
    keys = joined(by, more.by)
    codes = spread_out(codes_of(keys), len(starts))
    of_rows = codes[: len(by)] if held.entries is None else codes[held.entries]
    segments, known = cut_codes(
        rows, of_rows + places[: len(held.starts)].astype(np.uint64)[held.windows], held.entries
    )
    found, everything = segments.order[segments.starts[segments.firsts]], known
    if len(more):
        of_more = codes[len(by) :] + places[len(held.starts) :].astype(np.uint64)
        everything = _united(known, of_more)
        of_known, found = found, np.empty(len(everything), np.int64)
        found[np.searchsorted(everything, of_more)] = len(by) + np.arange(len(of_more))
        found[np.searchsorted(everything, known)] = of_known
        segments = with_keys(segments, known, everything)
    window = (everything % np.uint64(max(len(starts), 1))).astype(np.int64)
    return Windows.of(keys.take(pa.array(found)), starts[window], ends[window]), segments


def _united(first: Codes, second: Codes) -> Codes:
    """The distinct numbers of both, in order."""
    both = np.sort(np.concatenate([first, second]))
    new = np.ones(len(both), np.bool_)
    new[1:] = both[1:] != both[:-1]
    return both[new]


def _catalogue(starts: Times, ends: Times) -> tuple[Times, Times, Ints]:
    """The distinct windows in order of start and end, and the place of each given one among them.
    Neighbours are often the same.
    """
    new = np.ones(len(starts), np.bool_)
    new[1:] = (starts[1:] != starts[:-1]) | (ends[1:] != ends[:-1])
    run_starts, run_ends = starts[new], ends[new]
    order = np.lexsort((run_ends, run_starts))
    run_starts, run_ends = run_starts[order], run_ends[order]
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = (run_starts[1:] != run_starts[:-1]) | (run_ends[1:] != run_ends[:-1])
    place = np.empty(len(order), np.int64)
    place[order] = np.cumsum(fresh) - 1
    return run_starts[fresh], run_ends[fresh], place[np.cumsum(new) - 1]
