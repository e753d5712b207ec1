"""Sliding windows over streams, for aggregates whose states can be merged, in time linear in the
rows.

For each row at t the result covers the rows of its group in (t - size, t]. The rows of a group at
one time are a *point* with one state. Points are stored in *panes*, a sixteenth of a window long,
and each group has a *head* with the merged state of every pane. A window is merged from the points
of the panes at its two ends and the heads of the panes between. `count()` by `k`, size 16 s, panes
of 1 s:

    rows in              watermark  state after                       rows out
    tick 1: k=a at 0     at 1       q a 0: {0: 1}; h a: 0 -> 1        insert a (-16,0] 1
    tick 2: k=a at 9     at 10      q a 9: {9: 1}; h a: 0 -> 1, 9 -> 1  insert a (-7,9] 2
    tick 3: k=a at 18    at 30      q a 18: {18: 1}; h a: 18 -> 1     insert a (2,18] 2

Groups whose rows arrive in order of time, tick after tick, are processed in one go and read few of
their panes. The others are processed tick by tick with all their points, since a row out of order
changes windows that have been emitted. Entries:

    head      `h`, the group's key: for each pane its number, the time of its last point, the time
    of
              its first point that waits to be emitted, and its state
    pane      `q`, the pane's number (8 bytes, big-endian, sortable), the group's key: for each
    point
              its time and state
    timers    as in `buffered_window`

Heads and panes are stored as `RecordStore` encodes them. Over tables, and for aggregates whose
states cannot be merged, see `buffered_window`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import (
    Ints,
    Mask,
    as_binary,
    equal_length_values,
    expand_ranges,
    offsets_of,
)
from headrace.columnar.keys import as_array, encode_keys, key_groups
from headrace.columnar.lookup import (
    group_start_mask,
    lower_bound,
    merge_order,
    number_keys,
    sort_order,
)
from headrace.columnar.packed_array import (
    LAYOUT_BYTES,
    LayoutGroup,
    PackedLayout,
    group_by_widths,
    row_dtype,
)
from headrace.columnar.row_codec import gather_ranges
from headrace.columnar.segments import Segments
from headrace.operators.aggregates.state_pool import (
    StateMerger,
    StatePool,
    States,
    concat_states,
    put_states,
    take_states,
)
from headrace.operators.kernel import UNSTARTED, Groups, KeyedState, Times, Watermarks
from headrace.operators.windows.buffered_window import (
    GroupKeys,
    distinct_windows,
    put_timers,
    scan_expired,
)
from headrace.operators.windows.kernel import WindowKernel, WindowSettings, shown_over_lifetimes
from headrace.operators.windows.late_rows import row_tick_indices
from headrace.operators.windows.specs import Sliding
from headrace.operators.windows.state import (
    TIME,
    RowStore,
    WindowHistory,
    Windows,
    WindowVersions,
    any_within,
)

# Records in the state

STATE = "state"
_VERSION = 2
_NO_BYTES = pa.scalar(b"", pa.large_binary())
_WHOLE: np.dtype[Any] = np.dtype("<i8")


class RecordStore:
    """Reads and writes records: a time, further integers, and an aggregate state.

    An entry whose states all have fixed-width fields only is version 2: the layout of its columns
    and the rows, as `columnar.packed_array` packs them. Other entries are version 1: rows as
    `state.RowStore` stores them.
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
        self._before_rows = 1 + LAYOUT_BYTES * len(self._kinds)

    def write(
        self, state: KeyedState, names: pa.Array, groups: Groups, counts: Ints, rows: pa.Table
    ) -> None:
        """Store the records of entries: `rows` in order of entry, `counts[i]` of them for entry i.

        An entry without records is deleted.
        """
        plain = equal_length_values(as_array(rows.column(STATE)))
        if plain is None or plain.dtype.itemsize != self._states.itemsize:
            self._rows.write(state, names, groups, counts, rows)
            return
        RowStore.check(self._rows.step_name, counts)
        values, there = self._encode(rows, plain.view(self._states), counts), counts > 0
        state.put_array(
            names,
            (
                values
                if there.all()
                else pc.if_else(pa.array(there), values, pa.scalar(None, pa.binary()))
            ),
            groups,
        )

    def _encode(
        self, rows: pa.Table, states: np.ndarray[tuple[int], Any], counts: Ints
    ) -> pa.Array:
        columns = [as_array(rows.column(name)).to_numpy() for name in self.schema.names[:-1]]
        columns += [states[name] for name in self._fields]
        layout = PackedLayout.of(columns)
        packed = layout.pack(columns)
        offsets = np.append(0, np.cumsum(counts)) * packed.dtype.itemsize
        data = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), len(counts), [None, pa.py_buffer(offsets), pa.py_buffer(packed)]
        )
        before = pa.scalar(bytes([_VERSION]) + layout.to_bytes(), pa.large_binary())
        return pc.binary_join_element_wise(before, data, _NO_BYTES).cast(pa.binary())

    def read(self, state: KeyedState, names: pa.Array, groups: Groups) -> tuple[Ints, pa.Table]:
        """The number of records of each entry, and all records in order of entry."""
        values = state.get_array(names, groups)
        there = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        known = values.drop_null()
        as_records = self._versions(known) == _VERSION
        if not as_records.any():
            return self._rows.decode(values)
        counts, parts = np.zeros(len(values), np.int64), []
        records = np.flatnonzero(as_records)
        for alike in self._by_widths(known.take(pa.array(records))):
            which = records[alike.entries]
            counts[there[which]], rows = self._decode(known.take(pa.array(which)), alike)
            parts.append((there[which], rows))
        if not as_records.all():
            which = np.flatnonzero(~as_records)
            counts[there[which]], rows = self._rows.decode(known.take(pa.array(which)))
            parts.append((there[which], rows))
        return counts, _in_entry_order(counts, parts)

    @staticmethod
    def _versions(values: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        data = (
            np.frombuffer(values.buffers()[2], np.uint8) if len(values) else np.zeros(0, np.uint8)
        )
        return data[offsets_of(values)[:-1]]

    def _by_widths(self, values: pa.Array) -> list[LayoutGroup]:
        forms = pc.binary_slice(values, 1, self._before_rows)
        return group_by_widths(
            np.frombuffer(
                forms.buffers()[2], np.uint8, count=len(forms) * (self._before_rows - 1)
            ).reshape(len(forms), -1)
        )

    def _decode(self, values: pa.Array, alike: LayoutGroup) -> tuple[Ints, pa.Table]:
        """The records of entries with columns of the same widths."""
        offsets = offsets_of(values)
        sizes = np.diff(offsets) - self._before_rows
        bare = gather_ranges(
            np.frombuffer(values.buffers()[2], np.uint8), offsets[:-1] + self._before_rows, sizes
        )
        row = row_dtype(alike.widths)
        counts = sizes // row.itemsize
        columns = alike.unpack(
            np.frombuffer(bare.buffers()[2], row, count=int(counts.sum())), counts, self._kinds
        )
        states = np.empty(int(counts.sum()), self._states)
        for name, column in zip(self._fields, columns[len(self.schema) - 1 :], strict=True):
            states[name] = column
        numbers = [pa.array(column) for column in columns[: len(self.schema) - 1]]
        return counts, pa.Table.from_arrays(
            [*numbers, as_binary(states.view(f"V{self._states.itemsize}"))], schema=self.schema
        )


def _in_entry_order(counts: Ints, parts: Sequence[tuple[Ints, pa.Table]]) -> pa.Table:
    """The rows of all entries in order, from parts that each have some of the entries."""
    if len(parts) == 1:
        return parts[0][1]
    entry = np.concatenate([np.repeat(which, counts[which]) for which, _ in parts])
    return pa.concat_tables([rows for _, rows in parts]).take(
        pa.array(np.argsort(entry, kind="stable"))
    )


# Points, panes and heads

PANES = 16
NEVER = np.iinfo(np.int64).max
_LAST, _WAITS = "last", "waits"
_HEAD, _PANE = pa.scalar(b"h", pa.binary()), b"q"
_NOTHING = pa.scalar(b"", pa.binary())
_SIGN = np.uint64(1 << 63)


@dataclass(frozen=True)
class Points:
    """Points: the number of each one's group, its time, the index of the tick that brought it (-1
    if it was stored), and the number of its state.
    """

    keys: Ints
    times: Times
    tick_index: Ints
    states: Ints

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, which: Ints | Mask) -> Points:
        return Points(
            self.keys[which], self.times[which], self.tick_index[which], self.states[which]
        )

    def and_also(self, other: Points) -> Points:
        pairs = (
            (self.keys, other.keys),
            (self.times, other.times),
            (self.tick_index, other.tick_index),
            (self.states, other.states),
        )
        return Points(*(np.concatenate(pair) for pair in pairs))

    def merged_with(self, other: Points) -> Points:
        """The points of both, in order; each of them is in order."""
        return self.and_also(other).take(
            merge_order(
                (self.keys, self.times, self.tick_index),
                (other.keys, other.times, other.tick_index),
            )
        )

    def in_order(self) -> Points:
        """The points in order of group, time and tick."""
        return self.take(sort_order(self.keys, self.times, self.tick_index))


@dataclass(frozen=True)
class Heads:
    """Panes of groups, in order of group and pane: the time of each one's last point and of its
    first that waits to be emitted, and the number of its state.
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
        """Which of the given panes of groups are among these."""
        return any_within(self.keys, self.panes, keys, panes, panes + 1)

    def and_also(self, other: Heads) -> Heads:
        names = ("keys", "panes", "last", "waits", "states")
        both = Heads(
            *(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names)
        )
        return both.take(sort_order(both.keys, both.panes))

    @staticmethod
    def of(
        points: Points,
        panes: Ints,
        emitted_until: int | None,
        merging: StateMerger,
        pool: StatePool,
    ) -> Heads:
        """The heads of points that are in order of group and time. Points from `emitted_until` on
        wait to be emitted; with None, none does.
        """
        new = group_start_mask(points.keys, panes)
        first = np.flatnonzero(new)
        states = pool.add(merging.reduce(pool.take(points.states), np.cumsum(new)))
        last = points.times[np.append(first[1:], len(points))[: len(first)] - 1]
        waits = (
            np.full(len(points), NEVER)
            if emitted_until is None
            else np.where(points.times >= emitted_until, points.times, NEVER)
        )
        return Heads(
            points.keys[first],
            panes[first],
            last,
            np.minimum.reduceat(waits, first) if len(first) else last,
            states,
        )


class PaneStore:
    """Reads and writes the heads and panes of some groups, during one call."""

    def __init__(self, step: str, by: pa.Array, groups: Groups, states: np.dtype[Any]) -> None:
        self._by, self._groups = by.cast(pa.binary()), groups
        self._heads = RecordStore(step, [_LAST, _WAITS], states)
        self._panes = RecordStore(step, [], states)

    def read_heads(self, state: KeyedState, merging: StateMerger) -> tuple[Heads, StatePool]:
        """The heads of all groups, and a pool with their states."""
        counts, rows = self._heads.read(state, self._head_names(), self._groups)
        pool = StatePool(merging.open_states(as_array(rows.column(STATE))))
        panes, last, waits = (
            as_array(rows.column(name)).to_numpy() for name in (TIME, _LAST, _WAITS)
        )
        return (
            Heads(
                np.repeat(np.arange(len(counts)), counts), panes, last, waits, np.arange(len(panes))
            ),
            pool,
        )

    def read_points(
        self, state: KeyedState, heads: Heads, merging: StateMerger, pool: StatePool
    ) -> Points:
        """The points of some panes; their states are added to the pool."""
        counts, rows = self._panes.read(
            state, self._pane_names(heads.keys, heads.panes), self._groups[heads.keys]
        )
        states = pool.add(merging.open_states(as_array(rows.column(STATE))))
        keys = np.repeat(heads.keys, counts)
        return Points(keys, as_array(rows.column(TIME)).to_numpy(), np.full(len(keys), -1), states)

    def write(
        self,
        state: KeyedState,
        heads: Heads,
        gone: Heads,
        points: Points,
        panes: Ints,
        stored: tuple[pa.Array, pa.Array],
    ) -> None:
        """Store the panes of the groups.

        Args:
            state: The state.
            heads: The heads of all panes.
            gone: The panes to delete.
            points: The points of the panes that changed, in order of group and time.
            panes: The pane of each point.
            stored: The stored states of heads and of points.
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
        first = np.flatnonzero(group_start_mask(points.keys, panes))
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


# The states of windows, from points in order of group and time and from the heads of whole panes


def windows_at(
    points: Points,
    chosen: Ints,
    heads: Heads,
    others: Heads,
    size_us: int,
    pane_us: int,
    merging: StateMerger,
    pool: StatePool,
) -> States:
    """The states of the windows (t - size, t] that end at some of the points.

    `others` are the heads of the panes whose points were not read.
    """
    found = _windows_by_subtraction(points, chosen, others, size_us, merging, pool)
    return (
        windows_by_merging(points, chosen, heads, size_us, pane_us, merging, pool)
        if found is None
        else found
    )


def _windows_by_subtraction(
    points: Points, chosen: Ints, others: Heads, size_us: int, merging: StateMerger, pool: StatePool
) -> States | None:
    """The states of windows from a running total over the points and the heads of the other panes:
    the total at the window's end less that at its start. None if an aggregate cannot subtract.
    """
    keys, times, states, last = points.keys, points.times, points.states, chosen
    if len(others):
        keys, times, states = (
            np.concatenate(pair)
            for pair in ((keys, others.keys), (times, others.last), (states, others.states))
        )
        order = merge_order((points.keys, points.times), (others.keys, others.last))
        keys, times, states = keys[order], times[order], states[order]
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        last = position[chosen]
    first = lower_bound(keys, times, points.keys[chosen], points.times[chosen] - size_us + 1)
    return merging.over_ranges(pool.take(states), first, last + 1)


def windows_by_merging(
    points: Points,
    chosen: Ints,
    heads: Heads,
    size_us: int,
    pane_us: int,
    merging: StateMerger,
    pool: StatePool,
) -> States:
    """The states of windows by merging alone.

    A window consists of the points in the pane of t, those in the pane of t - size, and the panes
    between, by their heads. All points of the panes at the two ends must be present.
    """
    panes = points.times // pane_us
    pane: Ints = np.cumsum(group_start_mask(points.keys, panes)) - 1
    of, until = points.keys[chosen], points.times[chosen]
    windows = _scan_panes(points, pane, chosen, merging.prefixes, pool)
    begins_in = (until - size_us + 1) // pane_us
    oldest = lower_bound(points.keys, points.times, of, until - size_us + 1)
    also = np.flatnonzero((panes[oldest] == begins_in) & (pane[oldest] != pane[chosen]))
    put_states(
        windows,
        also,
        merging.merge(
            _scan_panes(points, pane, oldest[also], merging.suffixes, pool),
            take_states(windows, also),
        ),
    )
    first, stop = (
        lower_bound(heads.keys, heads.panes, of, wanted)
        for wanted in (begins_in + 1, panes[chosen])
    )
    also = np.flatnonzero(first < stop)
    put_states(
        windows,
        also,
        merging.merge(
            _merge_heads(first[also], stop[also], heads, merging, pool), take_states(windows, also)
        ),
    )
    return windows


def _scan_panes(
    points: Points,
    pane: Ints,
    chosen: Ints,
    scan: Callable[[States, Ints], States],
    pool: StatePool,
) -> States:
    """For each chosen point, the merge of it and all points before it (or after it) in its pane.
    Only the panes of the chosen points are scanned.
    """
    mine = np.zeros(int(pane[-1]) + 1 if len(pane) else 0, np.bool_)
    mine[pane[chosen]] = True
    there = np.flatnonzero(mine[pane])
    return take_states(
        scan(pool.take(points.states[there]), pane[there]), np.searchsorted(there, chosen)
    )


def _merge_heads(
    first: Ints, stop: Ints, heads: Heads, merging: StateMerger, pool: StatePool
) -> States:
    """The merged states of ranges of heads.

    Ranges are no longer than a block: one that crosses the bound of two blocks is a suffix of one
    and a prefix of the other.
    """
    new = group_start_mask(first, stop)
    first, stop = first[new], stop[new]
    low, high = int(first.min(initial=0)), int(stop.max(initial=0))
    states, blocks = pool.take(heads.states[low:high]), np.arange(high - low) // PANES
    first, last = first - low, stop - low - 1
    ends = take_states(merging.suffixes(states, blocks), first)
    over = np.flatnonzero(blocks[first] != blocks[last])
    put_states(
        ends,
        over,
        merging.merge(
            take_states(ends, over), take_states(merging.prefixes(states, blocks), last[over])
        ),
    )
    inside = np.flatnonzero((blocks[first] == blocks[last]) & ((last + 1) % PANES != 0))
    lengths = (last - first + 1)[inside]
    members = take_states(states, expand_ranges(first[inside], lengths))
    put_states(ends, inside, merging.reduce(members, np.repeat(np.arange(len(lengths)), lengths)))
    return take_states(ends, np.cumsum(new) - 1)


_NO_KEYS = pa.nulls(0, pa.binary())
_NONE = np.zeros(0, np.int64)
_NO_HEADS = Heads(_NONE, _NONE, _NONE, _NONE, _NONE)


@dataclass
class SlidingBatch:
    """The working set of a call: the heads of the groups as stored, all states by number, the
    versions of windows, and their states.
    """

    heads: Heads
    pool: StatePool
    watermarks: Watermarks
    history: WindowHistory = field(default_factory=WindowHistory)
    windows: list[States] = field(default_factory=list)


class SlidingWindows(WindowKernel):
    """Sliding windows: for each row, the rows of its group up to `size` before it."""

    shown_end_shift_us = -1

    def __init__(self, settings: WindowSettings) -> None:
        super().__init__(settings)
        assert isinstance(settings.window, Sliding)
        self.size_us = settings.window.size_us
        self.pane_us = max(self.size_us // PANES, 1)
        self._merging = StateMerger(self.aggregation)

    def advance(self, state: KeyedState, rows: pa.Table, watermarks: Watermarks) -> pa.Table:
        """Process the rows of some ticks.

        1. Drop late rows and turn the others into points.
        2. Read the heads of all groups concerned, and the panes that are needed.
        3. Compute windows: in one go for groups in order, tick by tick for the others.
        4. Emit what changed.
        5. Store panes and timers.
        """
        rows, times = self._drop_late(rows, watermarks)
        keys, ranks = number_keys(
            [
                encode_keys(rows, self.by),
                self.scan_completed(state, watermarks).by,
                scan_expired(self, state, watermarks),
            ]
        )
        if not len(keys):
            return self.empty_output()
        grouped = GroupKeys(keys, key_groups(keys), _NO_KEYS)
        store = PaneStore(self.step_name, grouped.by, grouped.groups, self.aggregation.layout.dtype)
        batch = SlidingBatch(*store.read_heads(state, self._merging), watermarks)
        fresh = self._points(rows, ranks[0], times, batch.pool, watermarks)
        in_order = self._in_order(batch.heads, fresh, len(grouped.by))
        needed = ~in_order[batch.heads.keys] | self._needed(
            batch.heads, fresh, len(grouped.by), watermarks
        )
        known = store.read_points(state, batch.heads.take(needed), self._merging, batch.pool)
        points, heads = self._windows_in_order(
            known.take(in_order[known.keys]),
            fresh.take(in_order[fresh.keys]),
            batch.heads.take(~needed),
            batch,
        )
        more, others = self._windows_out_of_order(
            known.take(~in_order[known.keys]), fresh.take(~in_order[fresh.keys]), batch
        )
        table = self._emit(grouped, batch)
        self._store_panes(
            state, store, grouped, batch, points.merged_with(more), heads.and_also(others)
        )
        return table

    # Rows into points

    def _drop_late(self, rows: pa.Table, watermarks: Watermarks) -> tuple[pa.Table, Times]:
        """The rows that are not late, and their times."""
        times, tick_index = self.times(rows), row_tick_indices(rows, watermarks)
        limits = self.step_horizon(watermarks.horizon_before)[tick_index]
        late = times < limits
        if not late.any():
            return rows, times
        self.counts["late"] += self.late.add(
            rows, late, watermarks.times_us[tick_index], limits - times
        )
        return rows.filter(pa.array(~late)), times[~late]

    def _points(
        self, rows: pa.Table, keys: Ints, times: Times, pool: StatePool, watermarks: Watermarks
    ) -> Points:
        """The points of the rows: one per group, time and tick."""
        tick_index = row_tick_indices(rows, watermarks)
        order = sort_order(keys, times, tick_index)
        points = Points(keys[order], times[order], tick_index[order], _NONE)
        first = np.flatnonzero(group_start_mask(points.keys, points.times, points.tick_index))
        states = pool.add(
            self._merging.lift(
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
            points = Points(
                points.keys[first], points.times[first], points.tick_index[first], _NONE
            )
        return replace(points, states=states)

    # Which groups and panes

    @staticmethod
    def _in_order(heads: Heads, fresh: Points, groups: int) -> Mask:
        """Which groups receive their points in order of time."""
        last = np.full(groups, UNSTARTED)
        last[heads.keys] = heads.last  # of a group's panes, the last assignment wins
        by_tick = fresh.take(sort_order(fresh.keys, fresh.tick_index, fresh.times))
        new = group_start_mask(by_tick.keys)
        before = np.append(UNSTARTED, by_tick.times[:-1]) if len(fresh) else fresh.times
        before = np.where(new, last[by_tick.keys], before)
        in_order = np.ones(groups, np.bool_)
        in_order[by_tick.keys[by_tick.times <= before]] = False
        return in_order

    def _needed(self, heads: Heads, fresh: Points, groups: int, watermarks: Watermarks) -> Mask:
        """The panes that groups in order need: those that receive points, those with points to be
        emitted, and those in which the computed windows begin.
        """
        first, last = np.full(groups, NEVER), np.full(groups, UNSTARTED)
        new = np.flatnonzero(group_start_mask(fresh.keys))
        first[fresh.keys[new]] = fresh.times[new]
        last[fresh.keys[np.append(new[1:], len(fresh))[: len(new)] - 1]] = fresh.times[
            np.append(new[1:], len(fresh))[: len(new)] - 1
        ]
        needed: Mask = heads.panes == (first // self.pane_us)[heads.keys]
        lowest, highest = first.copy(), last
        if self.emits_final:
            complete = int(watermarks.watermark[-1])
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

    def _windows_in_order(
        self, known: Points, fresh: Points, others: Heads, batch: SlidingBatch
    ) -> tuple[Points, Heads]:
        """Process the groups in order. Returns the points of the panes that changed, and all heads.

        `others` are the heads of the panes that were not read.
        """
        points = known.merged_with(fresh)
        panes = points.times // self.pane_us
        mine = Heads.of(
            points, panes, self._emitted_until(batch.watermarks), self._merging, batch.pool
        )
        heads = others.and_also(mine)
        wanted = points.tick_index >= 0
        if self.emits_final:
            wanted = (wanted | (points.times >= batch.watermarks.watermark_at_start)) & (
                points.times < batch.watermarks.watermark[-1]
            )
        self._add(points, np.flatnonzero(wanted), points.tick_index, heads, others, batch)
        pane = np.cumsum(group_start_mask(points.keys, panes)) - 1
        changed = np.bincount(pane[points.tick_index >= 0], minlength=len(mine)) > 0
        return points.take(changed[pane]), heads

    def _windows_out_of_order(
        self, known: Points, fresh: Points, batch: SlidingBatch
    ) -> tuple[Points, Heads]:
        """Process the groups out of order, tick by tick. Returns all their points and all heads."""
        limits = self.step_horizon(batch.watermarks.horizon_before)
        alive, history = known.in_order(), batch.history
        closed = int(self.step_horizon(np.array([batch.watermarks.horizon_at_start]))[0])
        self._add(
            alive,
            np.flatnonzero(alive.times >= closed),
            alive.tick_index,
            self._heads(alive, batch),
            _NO_HEADS,
            batch,
        )
        for tick in np.unique(fresh.tick_index).tolist():
            comes = fresh.take(fresh.tick_index == tick)
            touched = np.isin(alive.keys, comes.keys)
            mine, rest = (
                self._merged(alive.take(touched).and_also(comes), batch.pool),
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
                mine, chosen, np.full(len(mine), tick), self._heads(mine, batch), _NO_HEADS, batch
            )
            alive = rest.and_also(mine)
        alive = alive.in_order()
        return alive, self._heads(alive, batch)

    def _merged(self, points: Points, pool: StatePool) -> Points:
        """The points in order, with those of one time merged."""
        points = points.in_order()
        new = group_start_mask(points.keys, points.times)
        if new.all():
            return points
        merged = pool.add(self._merging.reduce(pool.take(points.states), np.cumsum(new)))
        return Points(points.keys[new], points.times[new], points.tick_index[new], merged)

    def _heads(self, points: Points, batch: SlidingBatch) -> Heads:
        return Heads.of(
            points,
            points.times // self.pane_us,
            self._emitted_until(batch.watermarks),
            self._merging,
            batch.pool,
        )

    def _emitted_until(self, watermarks: Watermarks) -> int | None:
        return int(watermarks.watermark[-1]) if self.emits_final else None

    def _add(
        self,
        points: Points,
        chosen: Ints,
        born: Ints,
        heads: Heads,
        others: Heads,
        batch: SlidingBatch,
    ) -> None:
        """Add the windows that end at some of these points, as versions born with the
        given ticks.
        """
        if len(chosen):
            states = windows_at(
                points, chosen, heads, others, self.size_us, self.pane_us, self._merging, batch.pool
            )
            batch.windows.append(states)
            ends = points.times[chosen]
            batch.history.add_each(
                WindowVersions(points.keys[chosen], ends - self.size_us, ends + 1, _NONE, _NONE),
                born[chosen],
            )

    # Emitting and storing

    def _emit(self, grouped: GroupKeys, batch: SlidingBatch) -> pa.Table:
        if not batch.windows:
            return self.empty_output()
        sets, history = batch.history.all(), batch.history
        shows = self._merging.results(concat_states(batch.windows))
        windows, window = distinct_windows(grouped, sets.keys, sets.starts, sets.ends)
        shown = shown_over_lifetimes(
            window,
            history.born,
            history.died,
            self.emitted_from(sets.ends, batch.watermarks),
            len(batch.watermarks),
        )
        table, changes = self.emit_rows(windows, shown, shows, batch.watermarks)
        shows.count_unknown(self.aggregation, changes.versions[changes.comes])
        return table

    def _store_panes(
        self,
        state: KeyedState,
        store: PaneStore,
        grouped: GroupKeys,
        batch: SlidingBatch,
        points: Points,
        heads: Heads,
    ) -> None:
        """Store the panes and timers; panes that no open window needs are deleted."""
        (limit,) = self.step_horizon(batch.watermarks.horizon[-1:]).tolist()
        needed = heads.last > max(limit - self.size_us, UNSTARTED)
        heads, gone = heads.take(needed), heads.take(~needed)
        panes = points.times // self.pane_us
        if len(gone):
            new = group_start_mask(points.keys, panes)
            there = ~gone.have(points.keys[new], panes[new])[np.cumsum(new) - 1]
            points, panes = points.take(there), panes[there]
            gone = batch.heads.take(gone.have(batch.heads.keys, batch.heads.panes))
        stored = self._merging.close_states(
            batch.pool.take(np.concatenate([heads.states, points.states]))
        )
        store.write(
            state,
            heads,
            gone,
            points,
            panes,
            (stored.slice(0, len(heads)), stored.slice(len(heads))),
        )
        put_timers(state, self._timers(grouped, batch.heads), self._timers(grouped, heads))

    def _timers(self, grouped: GroupKeys, heads: Heads) -> tuple[pa.Array, Groups]:
        """The timers of groups: one for the first window that waits to be emitted, and one for when
        the last point is no longer needed.
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
