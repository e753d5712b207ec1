"""Functions over a frame of rows around each row of a stream: running and bounded aggregates, the
rows before and after, row numbers and ranks. Each row is emitted once, with its results.

Example: `avg(price)` over the last 2 rows of each `seller`.

    tick 1   (ann, 5, 10:02), (ann, 9, 10:01)    state of ann: both rows, which wait
    tick 2   horizon passes 10:03                emits (ann, 9, 10:01) avg 9
                                                       (ann, 5, 10:02) avg 7
                                                 state of ann: 5, of which only the price
    tick 3   (ann, 3, 10:04); horizon 10:05      emits (ann, 3, 10:04) avg 4;  state of ann: 3

A row is looked at once the horizon has passed it, so rows are in order of event time, whatever
order they arrived in; a row that `lead` looks behind waits for that row, or until `within` is over.
Rows of one time are in the order of `tie_order`, then of arrival. Without a time, rows are in order
of arrival and wait for nothing.

State of a partition:

    rows      `r`, the key                the rows that wait, and before them those that frames of
                                          later rows need, with the columns that these need
    running   `k`, the key                the aggregates of all rows so far, as `aggregates` has
                                          them; only if a function goes by all rows
    timer     `w`, time, zeros, the key   as `windows/state.py` stores windows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.columnar.columns import TICK, TICK_FIELD
from headrace.columnar.keys import as_array, encode_keys, key_groups
from headrace.columnar.lookup import (
    group_start_mask,
    mask_at,
    rank_keys,
    search_within,
    sort_order,
)
from headrace.columnar.segments import Segments
from headrace.errors import InputError, UnknownColumn
from headrace.operators.aggregates.aggregation import AggregateSet
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.aggregates.state_pool import StateMerger, States, put_states, take_states
from headrace.operators.kernel import UNSTARTED, KeyedState, Times, Watermarks, microseconds
from headrace.operators.patterns.row_buffer import (
    NO_TIMER,
    TIMER,
    BufferedBatch,
    RowBits,
    merge_by_key,
    sort_by_time,
    store_rows,
    tie_ranks,
    timer_column,
    timers_of,
)
from headrace.operators.row_functions import DENSE_RANK, LAG, LEAD, RANK, ROW_NUMBER, RowFunction
from headrace.operators.windows.late_policy import Divert, LatePolicy
from headrace.operators.windows.late_rows import LateRowCounter
from headrace.operators.windows.state import (
    MAX_ROWS,
    TIME,
    WAITING,
    RowStore,
    first_end,
    scan_windows,
)

NUMBER_TYPE = pa.int64()
_IS_DONE = "_done"
_IS_FIRST, _NUMBER, _DENSE = "#first", "#number", "#dense"
_STORED = "="
"""The prefix of a stored row's own columns, whose names may be those of the others."""
_FAR = 1 << 62
_MAX_EXPANDED = 1_000_000
"""How many rows of frames are expanded at a time."""
_NO_KEYS = pa.nulls(0, pa.binary())
_RUNNING, _EMPTY = pa.scalar(b"k", pa.binary()), pa.scalar(b"", pa.binary())


@dataclass(frozen=True, kw_only=True)
class FrameSettings:
    """What a step computes over frames.

    Attributes:
        name: The step's name.
        schema: The columns of its input.
        columns: Those of them that it emits.
        by: The columns of a partition.
        time: The column with the event time; None goes by arrival.
        tie_order: Columns by which rows of one time are ordered, and whether they descend.
        rows: How many rows a frame has, this one included.
        range_us: How far before its row a frame begins. With neither it begins with the partition.
        gap_us: A row that is further behind the one before begins the partition anew.
        results: The functions by the name of their column.
        late: What becomes of rows behind the horizon.
        producer: The column with a row's producer.
        time_shift_us: Added to `time`.
        horizon_lag_us: How far the horizon is behind the watermark.
    """

    name: str
    schema: pa.Schema
    columns: tuple[str, ...]
    by: tuple[str, ...]
    time: str | None
    tie_order: tuple[tuple[str, bool], ...] = ()
    rows: int | None = None
    range_us: int | None = None
    gap_us: int | None = None
    results: tuple[tuple[str, AggregateSpec | RowFunction], ...]
    late: LatePolicy
    producer: str | None = None
    time_shift_us: int = 0
    horizon_lag_us: int = 0

    @cached_property
    def aggregates(self) -> tuple[tuple[str, AggregateSpec], ...]:
        return tuple((name, each) for name, each in self.results if isinstance(each, AggregateSpec))

    @cached_property
    def functions(self) -> tuple[tuple[str, RowFunction], ...]:
        return tuple((name, each) for name, each in self.results if isinstance(each, RowFunction))

    @property
    def is_running(self) -> bool:
        """Whether aggregates go by all rows so far."""
        return self.rows is None and self.range_us is None

    @cached_property
    def depth(self) -> int:
        """How many rows before a row its functions need, besides those of `range_us`."""
        lags = [function.offset for _, function in self.functions if function.kind == LAG]
        last_row = 0 if self.gap_us is None else 1
        return max([(self.rows or 1) - 1, last_row, *lags])

    @cached_property
    def leads(self) -> tuple[RowFunction, ...]:
        return tuple(function for _, function in self.functions if function.kind == LEAD)

    @cached_property
    def history_columns(self) -> frozenset[str]:
        """The columns that functions read of rows that have been emitted."""
        bounded = () if self.is_running else self.aggregates
        lags = {str(function.column) for _, function in self.functions if function.kind == LAG}
        return frozenset({name for _, spec in bounded for name in spec.reads} | lags)


class FrameKernel:
    """The kernel of functions over frames. After each step `counts` has the number of late rows."""

    gauges: ClassVar[Mapping[str, bytes]] = {"keys_waiting": WAITING}

    def __init__(self, settings: FrameSettings) -> None:
        self.settings, self.step_name = settings, settings.name
        used = [*settings.by, *(name for name, _ in settings.tie_order), *settings.columns]
        used += [name for name in (settings.time,) if name is not None]
        for name in used:
            if name not in settings.schema.names:
                raise UnknownColumn(
                    name, settings.schema.names, where=f"The input of step {settings.name!r}"
                )
        stored = [pa.field(f"{_STORED}{field.name}", field.type) for field in settings.schema]
        system = [pa.field(TIMER, pa.int64()), pa.field(_IS_DONE, pa.bool_())]
        self._columns = pa.schema([field.with_nullable(True) for field in settings.schema])
        self._store = RowStore(settings.name, [*system, *stored], with_id=False)
        self._frames = AggregateSet(
            settings.name, settings.schema, settings.by, settings.aggregates
        )
        running = list(settings.aggregates) if settings.is_running else []
        kinds = {function.kind for _, function in settings.functions}
        if kinds & {ROW_NUMBER, RANK}:
            running.append((_NUMBER, AggregateSpec("count", type=NUMBER_TYPE)))
        if DENSE_RANK in kinds:
            running.append((_DENSE, AggregateSpec("sum", _IS_FIRST, type=NUMBER_TYPE)))
        schema = settings.schema.append(pa.field(_IS_FIRST, NUMBER_TYPE))
        self._running = (
            AggregateSet(settings.name, schema, settings.by, running) if running else None
        )
        self.unknown_results = (
            self._running.unknown_results
            if self._running is not None and settings.is_running
            else self._frames.unknown_results
        )
        own = pa.schema([settings.schema.field(name) for name in settings.columns])
        self.late_rows = LateRowCounter(
            own, settings.producer, divert=isinstance(settings.late, Divert)
        )
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        settings = self.settings
        types = {field.name: field for field in self._frames.fields}
        fields = [
            types[name]
            if isinstance(result, AggregateSpec)
            else pa.field(
                name,
                NUMBER_TYPE if result.column is None else settings.schema.field(result.column).type,
            )
            for name, result in settings.results
        ]
        return pa.schema([*(settings.schema.field(name) for name in settings.columns), *fields])

    def due(self, state: KeyedState) -> int | None:
        """The earliest watermark at which a row becomes certain, or is forgotten."""
        end = first_end(state, WAITING)
        return None if end is None else end + self.settings.horizon_lag_us

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Leave out late rows. 2. Sort the rows of all partitions that have new rows or due
        timers. 3. Find the rows that are certain now, and their results. 4. Store the rows that
        wait, and those that frames of later rows need. 5. Emit, in order of tick and key.
        """
        (rows,), (clock,) = inputs, watermarks
        self.counts = {}
        nothing = self.output.append(TICK_FIELD).empty_table()
        if not len(clock):
            return nothing
        sorted_rows = self._load(state, self._without_late(rows, clock), clock)
        batch = sorted_rows.batch
        if not len(batch.by):
            return nothing
        emitted = sorted_rows.emitted
        results = self._results(state, sorted_rows) if len(emitted) else {}
        self._retain(state, sorted_rows, clock)
        if not len(emitted):
            return nothing
        ticks = clock.ticks[sorted_rows.emit_at[emitted]]
        order = sort_order(ticks, batch.keys[emitted])
        source = pa.array(batch.order[emitted][order])
        columns = [
            *(as_array(batch.rows.column(name)).take(source) for name in self.settings.columns),
            *(results[name].take(pa.array(order)) for name, _ in self.settings.results),
            pa.array(ticks[order], pa.int64()),
        ]
        return pa.Table.from_arrays(columns, schema=self.output.append(TICK_FIELD))

    # Rows in order

    def _without_late(self, rows: pa.Table, clock: Watermarks) -> pa.Table:
        if not rows.num_rows or self.settings.time is None:
            return rows
        tick_index = clock.tick_indices(as_array(rows.column(TICK)).to_numpy())
        horizon = clock.horizon_before[tick_index]
        behind = horizon - self._times(rows)
        is_late = (behind > 0) & (horizon != UNSTARTED)
        if not is_late.any():
            return rows
        self.counts["late"] = self.late_rows.add(rows, is_late, clock.times_us[tick_index], behind)
        return rows.filter(pa.array(~is_late))

    def _times(self, rows: pa.Table) -> Times:
        """The event time of rows; without one their ticks, which are in order of arrival."""
        if self.settings.time is None:
            ticks: Times = as_array(rows.column(TICK)).to_numpy()
            return ticks
        return microseconds(rows.column(self.settings.time)) + self.settings.time_shift_us

    def _load(self, state: KeyedState, rows: pa.Table, clock: Watermarks) -> _SortedRows:
        """The stored and the new rows of all partitions with new rows or due timers, sorted."""
        settings, now_us = self.settings, int(clock.horizon[-1])
        due_keys = (
            _NO_KEYS
            if now_us == UNSTARTED or settings.time is None
            else scan_windows(state, WAITING, UNSTARTED, now_us)[1].group_keys
        )
        ranked = rank_keys([encode_keys(rows, settings.by), due_keys])
        groups, names = key_groups(ranked.keys), RowStore.names(ranked.keys)
        stored_counts, stored = self._store.read(state, names, groups)
        fresh = rows.select(settings.schema.names).cast(self._columns)
        own = stored.select([f"{_STORED}{name}" for name in settings.schema.names])
        all_rows = pa.concat_tables([own.rename_columns(settings.schema.names), fresh])
        all_rows = all_rows.combine_chunks()
        all_times = np.concatenate([as_array(stored.column(TIME)).to_numpy(), self._times(rows)])
        was_done = np.zeros(all_rows.num_rows, np.bool_)
        was_done[: stored.num_rows] = as_array(stored.column(_IS_DONE)).to_numpy(
            zero_copy_only=False
        )
        order, keys = merge_by_key(stored_counts, ranked.ranks[0], ranked.orders[0])
        # Rows that have been emitted are in order already, and may lack the columns of the order.
        ties = [
            np.where(was_done, 0, tie_ranks(as_array(all_rows.column(name)), descends=descends))
            for name, descends in settings.tie_order
        ]
        order, times = sort_by_time(order, keys, all_times, ties)
        batch = BufferedBatch(
            by=ranked.keys,
            groups=groups,
            names=names,
            rows=all_rows,
            order=order,
            keys=keys,
            times=times,
            bits=RowBits([]),
            stored_counts=stored_counts,
            timers=timers_of(as_array(stored.column(TIMER)).to_numpy(), stored_counts),
            certain=np.flatnonzero(times < now_us),
        )
        return _SortedRows(batch, settings, clock, was_done[order], [tie[order] for tie in ties])

    # Results

    def _results(self, state: KeyedState, rows: _SortedRows) -> dict[str, pa.Array]:
        """The results of the rows that are emitted, by the name of their column."""
        settings, emitted = self.settings, rows.emitted
        results: dict[str, pa.Array] = {}
        running = self._advance_running(state, rows)
        if settings.is_running:
            results |= {name: running[name] for name, _ in settings.aggregates}
        elif settings.aggregates:
            arrays = self._over_frames(rows)
            results |= dict(zip((name for name, _ in settings.aggregates), arrays, strict=True))
        for name, function in settings.functions:
            if function.column is not None:
                results[name] = rows.neighbour(function)
            elif function.kind == DENSE_RANK:
                results[name] = running[_DENSE]
            elif function.kind == ROW_NUMBER:
                results[name] = running[_NUMBER]
            else:
                behind = pa.array(emitted - rows.peer_first[emitted])
                results[name] = pc.subtract(running[_NUMBER], behind)
        return results

    def _advance_running(self, state: KeyedState, rows: _SortedRows) -> dict[str, pa.Array]:
        """The results of all rows of the partition so far, for each row that is emitted."""
        aggregation, emitted = self._running, rows.emitted
        if aggregation is None:
            return {}
        batch = rows.batch
        parts = rows.parts[emitted]
        first = np.flatnonzero(group_start_mask(parts))
        part_keys, begins_anew = batch.keys[emitted[first]], rows.is_gap[emitted[first]]
        names = _running_names(batch.by)
        stored = state.get_array(names, batch.groups).take(pa.array(part_keys, mask=begins_anew))
        is_first = np.zeros(batch.rows.num_rows, np.int64)
        is_first[batch.order] = rows.peer_first == np.arange(len(rows))
        table = _with_tick(batch.rows.append_column(_IS_FIRST, pa.array(is_first)))
        segments = Segments(
            rows=table,
            order=batch.order[emitted],
            starts=np.arange(len(emitted)),
            ticks=np.arange(len(emitted)),
            firsts=first,
            keys=_NO_KEYS,
        )
        outcome = aggregation.advance(segments, *aggregation.layout.unpack_array(stored))
        aggregation.count_unknown(outcome, segments.after)
        is_last = np.append(part_keys[1:] != part_keys[:-1], True)
        values = aggregation.layout.pack_array(outcome.rows, outcome.parts)
        state.put_array(
            names.take(pa.array(part_keys[is_last])),
            values.filter(pa.array(is_last)),
            batch.groups[part_keys[is_last]],
        )
        arrays = outcome.results(segments.after)
        return dict(zip((name for name, _ in aggregation.aggregates), arrays, strict=True))

    def _over_frames(self, rows: _SortedRows) -> list[pa.Array]:
        """The aggregates over the frame of each row that is emitted."""
        aggregation = self._frames
        first, stop = rows.frames()
        table = _with_tick(rows.batch.rows)
        if aggregation.combinable:
            merger = StateMerger(aggregation)
            states = self._merged_frames(rows, table, merger, first, stop)
            results = merger.results(states)
            results.count_unknown(aggregation, np.arange(len(first)))
            return results.arrays
        pieces: list[list[pa.Array]] = []
        for low, high in _pieces(stop - first):
            lengths = stop[low:high] - first[low:high]
            segments = Segments(
                rows=table,
                order=rows.batch.order[expand_ranges(first[low:high], lengths)],
                starts=np.cumsum(lengths) - lengths,
                ticks=np.zeros(high - low, np.int64),
                firsts=np.arange(high - low),
                keys=_NO_KEYS,
            )
            nothing = aggregation.layout.unpack_array(pa.nulls(high - low, pa.binary()))
            outcome = aggregation.advance(segments, *nothing)
            aggregation.count_unknown(outcome, segments.after)
            pieces.append(outcome.results(segments.after))
        return [pa.concat_arrays(arrays) for arrays in zip(*pieces, strict=True)]

    def _merged_frames(
        self, rows: _SortedRows, table: pa.Table, merger: StateMerger, first: Ints, stop: Ints
    ) -> States:
        """The states of frames, by subtraction from a running total or else by merging: each
        partition is cut into blocks as long as a frame, so that a frame is the end of one block and
        the beginning of the next.
        """
        count = int(stop.max())
        states = merger.lift(
            Segments(
                rows=table,
                order=rows.batch.order[:count],
                starts=np.arange(count),
                ticks=np.zeros(count, np.int64),
                firsts=np.arange(count),
                keys=_NO_KEYS,
            )
        )
        subtracted = merger.over_ranges(states, first, stop)
        if subtracted is not None:
            return subtracted
        blocks = rows.blocks()[:count]
        last = stop - 1
        merged = take_states(merger.prefixes(states, blocks), last)
        crosses = np.flatnonzero(blocks[first] != blocks[last])
        suffixes = take_states(merger.suffixes(states, blocks), first[crosses])
        put_states(merged, crosses, merger.merge(suffixes, take_states(merged, crosses)))
        return merged

    # What is retained

    def _retain(self, state: KeyedState, rows: _SortedRows, clock: Watermarks) -> None:
        """Store the rows that wait, and as many of those before as their frames and those of rows
        to come need. Of these only the columns stay that functions read.
        """
        settings, batch = self.settings, rows.batch
        now_us = max(int(clock.horizon[-1]), -_FAR)
        keys, count = batch.keys, len(batch.by)
        is_done = rows.is_done
        retained = ~is_done
        # The last rows that are done, of the last part of each key.
        bounds = np.searchsorted(keys, np.arange(count + 1))
        done_ends = bounds[:-1] + np.bincount(keys[is_done], minlength=count)
        last_parts = np.append(rows.parts, -1)[done_ends - 1]
        positions = np.arange(len(rows))
        is_in_part = is_done & (rows.parts == last_parts[keys])
        retained |= is_in_part & (positions >= (done_ends - settings.depth)[keys])
        timers = np.full(count, _FAR)
        waiting = np.flatnonzero(~is_done)
        np.minimum.at(timers, keys[waiting], rows.certain_at[waiting] + 1)
        if settings.range_us is not None:
            from_us = np.full(count, now_us)
            np.minimum.at(from_us, keys[waiting], batch.times[waiting])
            in_range = is_in_part & (batch.times >= from_us[keys] - settings.range_us)
            retained |= in_range
            _set_timers(timers, keys, batch.times, in_range, settings.range_us + 1)
        if settings.gap_us is not None:
            has_waiting = np.bincount(keys[waiting], minlength=count) > 0
            last_done = np.full(count, UNSTARTED)
            np.maximum.at(last_done, keys[is_done], batch.times[is_done])
            is_over = (
                ~has_waiting & (last_done > UNSTARTED) & (last_done < now_us - settings.gap_us)
            )
            retained &= ~is_over[keys]
            self._forget_running(state, batch, np.flatnonzero(is_over))
            _set_timers(timers, keys, batch.times, is_done & ~is_over[keys], settings.gap_us + 1)
        which = np.flatnonzero(retained)
        counts = np.bincount(keys[which], minlength=count)
        self._check(counts)
        is_early = (batch.timers != NO_TIMER) & (batch.timers > now_us) & (batch.timers < timers)
        timers = np.where(is_early, batch.timers, timers)
        timers = np.where((counts > 0) & (timers < _FAR), timers, NO_TIMER)
        source, gone = batch.order[which], is_done[which]
        reduced, whole = pa.array(source, mask=gone), pa.array(source)
        columns = {
            f"{_STORED}{name}": as_array(batch.rows.column(name)).take(
                whole if name in settings.history_columns else reduced
            )
            for name in settings.schema.names
        }
        columns[TIME] = pa.array(batch.times[which])
        columns[TIMER], columns[_IS_DONE] = pa.array(timer_column(timers, counts)), pa.array(gone)
        store_rows(self._store, state, batch, pa.table(columns), counts, timers)

    def _forget_running(self, state: KeyedState, batch: BufferedBatch, which: Ints) -> None:
        if self._running is not None and len(which):
            names = _running_names(batch.by.take(pa.array(which)))
            state.put_array(names, pa.nulls(len(which), pa.binary()), batch.groups[which])

    def _check(self, counts: Ints) -> None:
        if len(counts) and int(counts.max()) > MAX_ROWS:
            raise InputError(
                f"The step {self.step_name!r} keeps up to {MAX_ROWS:,} rows a partition that wait"
                " or that later rows need, and one partition has more.",
                fix=(
                    "partition by more columns, or give a shorter frame, or a shorter delay= of the"
                    " event time."
                ),
            )


class _SortedRows:
    """The rows of a call in order of partition and time, and what follows from their order.

    Attributes:
        is_gap: Whether a row is so far behind the one before that the partition begins anew.
        parts: The number of each row's partition; it is another one behind a gap.
        part_first: The first row of each row's part.
        certain_at: The time that the horizon must pass for a row to be emitted.
        emit_at: The index of the tick that emits a row; the number of ticks if none does.
        emitted: The rows that are emitted in this call.
        is_done: Which rows have been emitted, in this call or before.
    """

    def __init__(
        self,
        batch: BufferedBatch,
        settings: FrameSettings,
        clock: Watermarks,
        was_done: Mask,
        ties: Sequence[Ints],
    ) -> None:
        self.batch, self.settings, self._ties = batch, settings, ties
        keys, times = batch.keys, batch.times
        is_new_key = group_start_mask(keys)
        self.is_gap = np.zeros(len(keys), np.bool_)
        if settings.gap_us is not None:
            self.is_gap[1:] = ~is_new_key[1:] & (np.diff(times) > settings.gap_us)
        begins = is_new_key | self.is_gap
        self.parts = np.cumsum(begins) - 1
        starts = np.flatnonzero(begins)
        sizes = np.diff(starts, append=len(keys))
        self.part_first = np.repeat(starts, sizes)
        self._part_end = np.repeat(starts + sizes, sizes)
        self.certain_at = self._certain_at()
        if settings.time is None:
            self.emit_at = np.where(was_done, 0, np.searchsorted(clock.ticks, times))
        else:
            self.emit_at = np.searchsorted(clock.horizon, self.certain_at, side="right")
        self.emitted = np.flatnonzero(~was_done & (self.emit_at < len(clock)))
        self.is_done = was_done | mask_at(len(keys), self.emitted)

    def __len__(self) -> int:
        return len(self.batch.keys)

    def _certain_at(self) -> Times:
        """The time of a row; with `lead` that of the row that it looks for, or the end of its
        patience. Rows of one time are certain together.
        """
        times = self.batch.times
        if not self.settings.leads:
            return times
        certain_at = times.copy()
        for lead in self.settings.leads:
            which = np.arange(len(times)) + lead.offset
            is_there = which < self._part_end
            until = times + int(lead.within_us or 0)
            until[is_there] = np.minimum(until[is_there], times[which[is_there]])
            np.maximum(certain_at, until, out=certain_at)
        certain: Times = certain_at[self._time_end - 1]
        return certain

    @cached_property
    def _time_end(self) -> Ints:
        """Behind the last row of each row's part that has its time."""
        starts = np.flatnonzero(group_start_mask(self.parts, self.batch.times))
        sizes = np.diff(starts, append=len(self))
        return np.repeat(starts + sizes, sizes)

    @cached_property
    def peer_first(self) -> Ints:
        """The first row of each row's part that is equal to it in the order."""
        is_new = group_start_mask(self.parts, self.batch.times, *self._ties)
        starts = np.flatnonzero(is_new)
        return np.repeat(starts, np.diff(starts, append=len(self)))

    def frames(self) -> tuple[Ints, Ints]:
        """The first row of the frame of each row that is emitted, and the end of the frame."""
        part_first, emitted = self.part_first[self.emitted], self.emitted
        if self.settings.rows is not None:
            return np.maximum(part_first, emitted - self.settings.rows + 1), emitted + 1
        times = self.batch.times
        from_us = times[emitted] - int(self.settings.range_us or 0)
        first = search_within(times, part_first, emitted + 1, from_us, right=False)
        return first, self._time_end[emitted]

    def blocks(self) -> Ints:
        """Blocks of each part that are as long as a frame, numbered."""
        if self.settings.rows is not None:
            within = (np.arange(len(self)) - self.part_first) // self.settings.rows
        else:
            within = self.batch.times // (int(self.settings.range_us or 0) + 1)
        return np.cumsum(group_start_mask(self.parts, within)) - 1

    def neighbour(self, function: RowFunction) -> pa.Array:
        """What `lag` or `lead` finds for each row that is emitted."""
        if function.kind == LAG:
            which = self.emitted - function.offset
            exists = which >= self.part_first[self.emitted]
        else:
            which = self.emitted + function.offset
            exists = which < self._part_end[self.emitted]
            times, until = self.batch.times, int(function.within_us or 0)
            exists[exists] = (times[which[exists]] - times[self.emitted[exists]]) <= until
        rows = np.full(len(which), 0)
        rows[exists] = self.batch.order[which[exists]]
        return as_array(self.batch.rows.column(function.column)).take(pa.array(rows, mask=~exists))


def _set_timers(timers: Times, keys: Ints, times: Times, which: Mask, delay_us: int) -> None:
    """Set the timers of keys to some time after the newest of some rows, unless they are
    earlier.
    """
    newest = np.full(len(timers), UNSTARTED)
    np.maximum.at(newest, keys[which], times[which])
    has_rows = newest > UNSTARTED
    timers[has_rows] = np.minimum(timers[has_rows], newest[has_rows] + delay_us)


def _running_names(keys: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(_RUNNING, keys.cast(pa.binary()), _EMPTY)


def _with_tick(rows: pa.Table) -> pa.Table:
    """Rows with the column that segments have."""
    return rows.append_column(TICK, pa.array(np.zeros(rows.num_rows, np.int64)))


def _pieces(lengths: Ints) -> Iterator[tuple[int, int]]:
    """Ranges of frames that have some million rows together."""
    ends = np.cumsum(lengths)
    low = 0
    while low < len(lengths):
        before = int(ends[low - 1]) if low else 0
        high = max(int(np.searchsorted(ends, before + _MAX_EXPANDED, side="right")), low + 1)
        yield low, high
        low = high
