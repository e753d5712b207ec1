"""Tumbling and hopping windows: one aggregate per group and window.

A window is emitted when the watermark passes its end (`emit="final"`) or on every change
(`emit="changes"`). A row takes part in all its windows that end after the step's horizon, as of the
tick before; a row without such a window is late. `sum(v)` per `k`, windows of 10 s every 5 s, times
in seconds:

    rows in               watermark  state after            rows out
    tick 1: k=a v=1 at 7  at 7       w a [0,10) -> 1
                                     w a [5,15) -> 1
    tick 2: k=a v=2 at 8  at 11      w a [5,15) -> 3        tick 2: insert a [0,10) 3
    tick 3: k=a v=4 at 9  at 16                             tick 3: insert a [5,15) 7

In tick 3 the window [0,10) is behind the horizon: the row is counted in [5,15) only. The state of a
window is one entry (see `state`), deleted once the step's horizon passes the window's end. Where
each row is in several windows, rows are combined by pane first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.columnar.columns import TICK
from headrace.columnar.keys import encode_keys
from headrace.columnar.lookup import group_start_mask
from headrace.columnar.segments import Segments, add_empty_keys, segment_codes
from headrace.columnar.sort import key_codes, rank_integers, spread_codes
from headrace.operators.aggregates.aggregation import AggregateOutcome
from headrace.operators.aggregates.partial_aggregation import (
    PARTIAL,
    PRODUCERS,
    combine_panes,
    combine_rest,
    is_worth_combining,
)
from headrace.operators.kernel import UNSTARTED, KeyedState, Times, Watermarks
from headrace.operators.windows.assignment import AssignedWindows, assign
from headrace.operators.windows.kernel import NOTHING, ShownVersions, WindowKernel, WindowSettings
from headrace.operators.windows.late_rows import count_input_rows, row_tick_indices
from headrace.operators.windows.specs import Hopping, Tumbling
from headrace.operators.windows.state import Windows, concat_keys, with_long_keys

_PANE = "_pane"
_MANY = 3  # windows per row, from which on rows are combined before they are assigned


@dataclass(frozen=True)
class WindowAssignment:
    """Rows in windows: one entry for each pair of a row and a window that takes it."""

    entries: Ints | None
    """The row of each entry; None if each row has exactly one."""
    windows: Ints
    """The number of each entry's window."""
    starts: Times
    ends: Times


class FixedWindows(WindowKernel):
    """Tumbling and hopping windows, whose bounds do not depend on the rows."""

    def __init__(self, settings: WindowSettings) -> None:
        super().__init__(settings)
        assert isinstance(settings.window, Tumbling | Hopping)
        self.spec = settings.window

    def advance(self, state: KeyedState, rows: pa.Table, watermarks: Watermarks) -> pa.Table:
        """Process the rows of some ticks.

        1. Combine rows if some are combined already, or if each is in many windows.
        2. Assign rows to windows; add the stored windows that the watermarks complete.
        3. Read the windows' states and advance them through all segments.
        4. Store the states.
        5. Emit what changed.
        6. Forget expired windows.
        """
        if PARTIAL in rows.schema.names:
            rows = combine_rest(rows, self.combine, [PRODUCERS])
        elif self.spec.size_us // self.spec.every_us >= _MANY and self.is_worth_combining(rows):
            rows = self.combine(rows)

        # Assign each row to its open windows; count rows without one as late. Rows that arrive
        # after a window of theirs is complete are counted as corrections.
        times, tick_index = self.times(rows), row_tick_indices(rows, watermarks)
        horizons = self.step_horizon(watermarks.horizon_before)
        limits = np.concatenate([horizons, watermarks.watermark_before])
        has_begun = limits != UNSTARTED
        assigned = assign(self.spec, np.concatenate([times, limits[has_begun]]))
        # The oldest window that contains the horizon is the oldest open one; the oldest that
        # contains the watermark is the oldest incomplete one.
        oldest = np.full(len(limits), np.iinfo(np.int64).min)
        oldest[has_begun] = assigned.first[len(times) :]
        oldest_open = oldest[tick_index]
        oldest_incomplete = oldest[len(watermarks) + tick_index]
        first = np.maximum(assigned.first[: len(times)], oldest_open)
        last = assigned.last[: len(times)]
        self.counts["late"] += self.late_rows.add(
            rows, last < oldest_open, watermarks.times_us[tick_index], horizons[tick_index] - times
        )
        self.counts["corrected"] = count_input_rows(
            rows, (first < oldest_incomplete) & (first <= last)
        )
        assignment = _assignment(assigned, first, last)
        windows, segments = _segments_of_windows(
            rows, encode_keys(rows, self.by), assignment, self.scan_completed(state, watermarks)
        )
        emitted = self.empty_output()
        if len(windows):
            names = windows.names(self._waits(windows, watermarks.watermark_at_start))
            stored, parts = self.aggregation.layout.unpack_array(
                state.get_array(names, windows.groups)
            )
            outcome = self.aggregation.advance(segments, stored, parts)
            # Store the states under the names they had; windows that are emitted now change names.
            packed = self.aggregation.layout.pack_array(outcome.rows, outcome.parts)
            values = with_long_keys(names, packed)
            waited = self._waits(windows, watermarks.watermark_at_start)
            waits = self._waits(windows, int(watermarks.watermark[-1]))
            is_open = windows.ends > self.step_horizon(watermarks.horizon[-1:])[0]
            stays = is_open & (outcome.rows > 0)
            in_place = stays & (waited == waits)
            kept = values
            if not in_place.all():
                kept = pc.if_else(pa.array(in_place), values, pa.scalar(None, values.type))
            state.put_array(names, kept, windows.groups)
            moved = np.flatnonzero(stays & (waited != waits))
            if len(moved):
                renamed = windows.take(moved)
                state.put_array(
                    renamed.names(waits[moved]), values.take(pa.array(moved)), renamed.groups
                )
            shown = self._shown_versions(windows, segments, outcome, watermarks)
            emitted, changes = self.emit_rows(windows, shown, outcome, watermarks)
            self.aggregation.record_rejected(segments, outcome, changes.versions[changes.additions])
        self.expire_windows(state, watermarks)
        return emitted

    def _waits(self, windows: Windows, watermark_us: int) -> Mask:
        """Which windows wait to be emitted, at a watermark."""
        return windows.ends > watermark_us if self.emits_final else np.zeros(len(windows), np.bool_)

    # Partial aggregation before the shuffle

    @property
    def combinable(self) -> bool:
        """Whether every aggregate's states can be merged, and no late row must be kept whole."""
        return self.aggregation.combinable and not self.late_rows.divert

    def is_worth_combining(self, rows: pa.Table) -> bool:
        """Whether `combine` would leave far fewer rows. The answer affects speed only."""
        if not self.combinable or not rows.num_rows:
            return False
        panes = pa.array(assign(self.spec, self.times(rows)).panes())
        return is_worth_combining(
            rows.select([*self.by, TICK]).append_column(_PANE, panes), [*self.by, _PANE]
        )

    def combine(self, rows: pa.Table) -> pa.Table:
        """Combine the rows of each group, pane and tick into one, which `advance`
        accepts instead.
        """
        return combine_panes(
            rows,
            self.by,
            [self.settings.time],
            assign(self.spec, self.times(rows)).panes(),
            self.late_rows.producers(rows),
            self.aggregation.partials,
        )

    # Storing and emitting

    def _shown_versions(
        self,
        windows: Windows,
        segments: Segments,
        outcome: AggregateOutcome,
        watermarks: Watermarks,
    ) -> ShownVersions:
        """The versions before and after each segment, and those that a watermark alone reveals."""
        emitted_from = self.emitted_from(windows.ends, watermarks)
        tick_index = np.searchsorted(watermarks.ticks, segments.ticks)
        window = segments.key_of
        was_shown = outcome.exists[segments.after - 1] & (emitted_from[window] < tick_index)
        is_shown = outcome.exists[segments.after] & (emitted_from[window] <= tick_index)
        was = np.where(was_shown, segments.after - 1, NOTHING)
        now = np.where(is_shown, segments.after, NOTHING)
        # Windows that become visible in a tick that brings them no rows
        with_rows = tick_index == emitted_from[window]
        has_rows_then = np.bincount(window[with_rows], minlength=len(windows)) > 0
        in_call = (emitted_from >= 0) & (emitted_from < len(watermarks))
        revealed = np.flatnonzero(in_call & ~has_rows_then)
        before = window[tick_index < emitted_from[window]]
        earlier = np.bincount(before, minlength=len(windows))
        version = segments.initial_versions[revealed] + earlier[revealed]
        return ShownVersions.of(
            np.concatenate([tick_index, emitted_from[revealed]]),
            np.concatenate([window, revealed]),
            np.concatenate([was, np.full(len(revealed), NOTHING)]),
            np.concatenate([now, np.where(outcome.exists[version], version, NOTHING)]),
        )


def _assignment(assigned: AssignedWindows, first: Ints, last: Ints) -> WindowAssignment:
    """Rows in all windows from each one's first to its last."""
    count = np.maximum(last - first + 1, 0)
    if (count == 1).all():
        entries, numbers = None, last
    else:
        entries, numbers = np.repeat(np.arange(len(last)), count), expand_ranges(first, count)
    distinct, windows = rank_integers(numbers)
    return WindowAssignment(entries, windows, *assigned.bounds(distinct))


def _segments_of_windows(
    rows: pa.Table, by: pa.Array, assignment: WindowAssignment, completed: Windows
) -> tuple[Windows, Segments]:
    """All windows of groups that a call is about, and the rows cut by window and tick.

    These are the windows that rows are assigned to and those that the watermarks complete.
    """
    starts, ends, positions = _distinct_bounds(
        np.concatenate([assignment.starts, completed.starts]),
        np.concatenate([assignment.ends, completed.ends]),
    )
    keys = concat_keys(by, completed.group_keys)
    codes = spread_codes(key_codes(keys), len(starts))
    of_rows = codes[: len(by)] if assignment.entries is None else codes[assignment.entries]
    window_of_entry = positions[: len(assignment.starts)].astype(np.uint64)[assignment.windows]
    segments, row_codes = segment_codes(rows, of_rows + window_of_entry, assignment.entries)
    key_at = segments.order[segments.starts[segments.firsts]]
    all_codes = row_codes
    if len(completed):
        completed_codes = codes[len(by) :] + positions[len(assignment.starts) :].astype(np.uint64)
        all_codes = np.unique(np.concatenate([row_codes, completed_codes]))
        of_rows_at, key_at = key_at, np.empty(len(all_codes), np.int64)
        key_at[np.searchsorted(all_codes, completed_codes)] = len(by) + np.arange(len(completed))
        key_at[np.searchsorted(all_codes, row_codes)] = of_rows_at
        segments = add_empty_keys(segments, row_codes, all_codes)
    window = (all_codes % np.uint64(max(len(starts), 1))).astype(np.int64)
    return Windows.of(keys.take(pa.array(key_at)), starts[window], ends[window]), segments


def _distinct_bounds(starts: Times, ends: Times) -> tuple[Times, Times, Ints]:
    """The distinct pairs of bounds in order, and the position of each given pair among them.

    Neighbours are often equal, so runs of them are collapsed before sorting.
    """
    run_mask = group_start_mask(starts, ends)
    run_starts, run_ends = starts[run_mask], ends[run_mask]
    order = np.lexsort((run_ends, run_starts))
    run_starts, run_ends = run_starts[order], run_ends[order]
    distinct = group_start_mask(run_starts, run_ends)
    position = np.empty(len(order), np.int64)
    position[order] = np.cumsum(distinct) - 1
    return run_starts[distinct], run_ends[distinct], position[np.cumsum(run_mask) - 1]
