"""Tumbling and hopping windows: an aggregate for each group and window, told when the window is complete or at every change.

A row is in all its windows that are not closed yet, by the closed clock before its tick; a row of which all windows are closed is late. A window's state is one
entry (`entries`), which goes once the closed clock has passed the window's end by the allowed lateness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace.operators.aggregation import Outcome
from headrace.operators.buffers import Ints, Mask, runs
from headrace.operators.kernel import UNSTARTED, Clocks, KeyedState, Times
from headrace.operators.keys import encode_keys
from headrace.operators.layout import kept
from headrace.operators.segments import Codes, Segments, codes_of, cut_codes, with_keys
from headrace.operators.windows.assign import Assigned, assign
from headrace.operators.windows.base import Windowed, WindowStep
from headrace.operators.windows.entries import Windows, joined, with_long_keys
from headrace.operators.windows.late import places_of
from headrace.operators.windows.specs import Hopping, Tumbling
from headrace.operators.windows.telling import NOTHING, Shown


@dataclass(frozen=True)
class Held:
    """Rows in windows: `entries` are the rows, one for each window that takes it in; `windows` is a number for that window, of which these are the bounds."""

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

    def advance(self, state: KeyedState, rows: pa.Table, clock: Clocks) -> pa.Table:
        """1. Put rows into windows. 2. Get the states, those of completed windows too. 3. Go through all segments. 4. Put the states. 5. Tell. 6. Forget."""
        held = self._held(rows, clock)
        windows, segments = together(rows, encode_keys(rows, self.by), held, self.completed(state, clock))
        table = self._windows(state, windows, segments, clock) if len(windows) else self.nothing()
        self.forget(state, clock)
        return table

    def _windows(self, state: KeyedState, windows: Windows, segments: Segments, clock: Clocks) -> pa.Table:
        names = windows.names(self._waits(windows, clock.complete_at_start))
        stored, parts = self.aggregation.layout.unpacked(state.get(names, windows.groups))
        outcome = self.aggregation.advance(segments, stored, parts)
        self._put(state, windows, names, outcome, clock)
        table, changes = self.told(windows, self._shown(windows, segments, outcome, clock), outcome, clock)
        self.aggregation.keep_account(segments, outcome, changes.versions[changes.comes])
        return table

    def _waits(self, windows: Windows, complete_us: int) -> Mask:
        return windows.ends > complete_us if self.final else np.zeros(len(windows), np.bool_)

    # Rows into windows

    def _held(self, rows: pa.Table, clock: Clocks) -> Held:
        """Each row in its windows that are not closed; those of which none is are late."""
        times, places = self.times(rows), places_of(rows, clock)
        limits = self.bounds(clock.closed_before)
        begun = limits != UNSTARTED
        assigned = assign(self.spec, np.concatenate([times, limits[begun]]))
        first, last = assigned.first[: len(times)], assigned.last[: len(times)]
        # The oldest window that holds the limit is the oldest that is not closed.
        oldest = np.full(len(clock), np.iinfo(np.int64).min)
        oldest[begun] = assigned.first[len(times) :]
        oldest_open = oldest[places]
        late = last < oldest_open
        self.counts["late"] += self.late.add(rows, late, clock.times_us[places], limits[places] - times)
        return _held(assigned, np.maximum(first, oldest_open), last)

    # What is stored and told

    def _put(self, state: KeyedState, windows: Windows, names: list[bytes], outcome: Outcome, clock: Clocks) -> None:
        """States under the names they had; those that have been told since move."""
        values = with_long_keys(names, kept(self.aggregation.layout.packed(outcome.rows, outcome.parts), outcome.rows))
        waited, waits = (self._waits(windows, int(complete)) for complete in (clock.complete_at_start, clock.complete[-1]))
        closed = windows.ends <= self.bounds(clock.closed[-1:])[0]
        moved = np.flatnonzero((waited != waits) & ~closed)
        goes = (waited != waits) | closed
        if not goes.any():
            state.put(names, values, windows.groups)
            return
        state.put(names, [None if go else value for value, go in zip(values, goes.tolist(), strict=True)], windows.groups)
        if len(moved):
            there = windows.take(moved)
            state.put(there.names(waits[moved]), [values[at] for at in moved.tolist()], there.groups)

    def _shown(self, windows: Windows, segments: Segments, outcome: Outcome, clock: Clocks) -> Shown:
        """What each segment changes, and what is shown for the first time when nothing changes it."""
        told_from = self.told_from(windows.ends, clock)
        place, key = np.searchsorted(clock.ticks, segments.ticks), segments.key_of
        was = np.where(outcome.exists[segments.after - 1] & (told_from[key] < place), segments.after - 1, NOTHING)
        now = np.where(outcome.exists[segments.after] & (told_from[key] <= place), segments.after, NOTHING)
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


def _held(assigned: Assigned, first: Ints, last: Ints) -> Held:
    count = np.maximum(last - first + 1, 0)
    if (count == 1).all():
        entries, numbers = None, last
    else:
        entries, numbers = np.repeat(np.arange(len(last)), count), runs(first, count)
    distinct, windows = _ranked(numbers)
    return Held(entries, windows, *assigned.bounds(distinct))


def _ranked(numbers: Ints) -> tuple[Ints, Ints]:
    """The distinct numbers in order, and the place of each among them. Windows of a call mostly lie close together."""
    if not len(numbers):
        return numbers, numbers
    lowest, highest = int(numbers.min()), int(numbers.max())
    if highest - lowest > 4 * len(numbers) + 1000:
        distinct, places = np.unique(numbers, return_inverse=True)
        return distinct, places
    there = np.zeros(highest - lowest + 1, np.bool_)
    there[numbers - lowest] = True
    return np.flatnonzero(there) + lowest, (np.cumsum(there) - 1)[numbers - lowest]


def together(rows: pa.Table, by: pa.Array, held: Held, more: Windows) -> tuple[Windows, Segments]:
    """All windows of groups that a call is about, and their segments: those that rows are in, and some more."""
    starts, ends, places = _catalogue(np.concatenate([held.starts, more.starts]), np.concatenate([held.ends, more.ends]))
    keys = joined(by, more.by)
    codes = numbered(codes_of(keys), len(starts))
    of_rows = codes[: len(by)] if held.entries is None else codes[held.entries]
    segments, known = cut_codes(rows, of_rows + places[: len(held.starts)].astype(np.uint64)[held.windows], held.entries)
    found, everything = segments.order[segments.starts[segments.firsts]], known
    if len(more):
        of_more = codes[len(by) :] + places[len(held.starts) :].astype(np.uint64)
        everything = np.union1d(known, of_more)
        of_known, found = found, np.empty(len(everything), np.int64)
        found[np.searchsorted(everything, of_more)] = len(by) + np.arange(len(of_more))
        found[np.searchsorted(everything, known)] = of_known
        segments = with_keys(segments, known, everything)
    window = (everything % np.uint64(max(len(starts), 1))).astype(np.int64)
    return Windows.of(keys.take(pa.array(found)), starts[window], ends[window]), segments


def _catalogue(starts: Times, ends: Times) -> tuple[Times, Times, Ints]:
    """The distinct windows in order of start and end, and the place of each given one among them. Neighbours are often the same."""
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


def numbered(codes: Codes, windows: int) -> Codes:
    """The groups' numbers, spread out so that a window's number can be added to each."""
    if not len(codes):
        return codes
    lowest = codes.min()
    if (int(codes.max()) - int(lowest) + 1) * max(windows, 1) >= 1 << 64:
        codes, lowest = _dense(codes), np.uint64(0)
    spread: Codes = (codes - lowest) * np.uint64(windows)
    return spread


def _dense(codes: Codes) -> Codes:
    """Numbers in the same order, without gaps."""
    encoded = pa.array(codes).dictionary_encode()
    ranks = np.empty(len(encoded.dictionary), np.uint64)
    ranks[np.argsort(encoded.dictionary.to_numpy())] = np.arange(len(ranks), dtype=np.uint64)
    dense: Codes = ranks[encoded.indices.to_numpy()]
    return dense
