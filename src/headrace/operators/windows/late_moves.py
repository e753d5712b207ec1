"""Rows of a table that move from one window to another too late: the kernel in front of a window
over a table whose rows can change their event time.

A closed window cannot retract a row. If an update moves the row into another window, it would be
counted in both. So an update that moves a row out of a closed window comes too late as a whole: it
is counted as late, and for the window the row stays as it was, until it is deleted. Tumbling
windows of 10 s, times in seconds, horizon 15:

    changes in                           state               rows out
    tick 1: update 1 (at 3) -> (at 17)   1: shown (at 3)     (none; a late row)
    tick 2: update 1 (at 17) -> (at 25)  1: shown (at 3)     (none; a late row)
    tick 3: update 2 (at 16) -> (at 27)                      update 2 (at 16) -> (at 27)
    tick 4: delete 1 (at 25)                                 delete 1 (at 3), which is late, too

A row that came too late when it was inserted is in no window. That is remembered as well, so that
it is counted once it moves into an open one. Whether a session is closed depends on the rows of its
group, which this kernel does not see: a row of a session may move until its gap has passed.

State of a row's key: version 1; 1 and the row that the window has, or 0 if it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import CHANGE_FIELD, CHANGE_TYPES, TICK_FIELD
from headrace.columnar.keys import as_array, encode_keys
from headrace.columnar.lookup import rank_keys
from headrace.columnar.segments import Segments, segment_rows
from headrace.errors import NewerFormat
from headrace.operators.joins.row_store import concat_bytes
from headrace.operators.kernel import UNSTARTED, KeyedState, Times, Watermarks, microseconds
from headrace.operators.windows.assignment import assign
from headrace.operators.windows.late_policy import Divert, LatePolicy
from headrace.operators.windows.late_rows import LateRowCounter, row_tick_indices, step_horizon
from headrace.operators.windows.specs import Session, Sliding, WindowSpec

_VERSION = 1
_AS_IT_IS, _NOT_SHOWN = -2, -1
"""What a window has of a row: the row as it is; nothing. Otherwise the index of an older row."""
_INSERT, _BEFORE, _AFTER, _DELETE = range(4)  # as in CHANGE_TYPES
_MAX_ROW_BYTES = 2**31


@dataclass(frozen=True, kw_only=True)
class LateMoveSettings:
    """The window that the rows go to. `time`, `time_shift_us`, `by` and `producer` are as in
    `WindowSettings`; `key` is the table's primary key.
    """

    name: str
    schema: pa.Schema
    key: tuple[str, ...]
    time: str
    time_shift_us: int
    by: tuple[str, ...]
    window: WindowSpec
    late: LatePolicy
    producer: str | None = None


class LateMoveKernel:
    """Holds back the updates that move a row out of a closed window. After each call, the host
    reads `late_rows` and `counts`.
    """

    def __init__(self, settings: LateMoveSettings) -> None:
        self.settings = settings
        self.step_name = settings.name
        self.schema = settings.schema
        self.late_rows = LateRowCounter(
            settings.schema, settings.producer, divert=isinstance(settings.late, Divert)
        )
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(CHANGE_FIELD)

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """None: no row waits for a watermark."""
        return None

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Find the keys that have state, or a row that comes or moves too late; pass on the rows
        of all others. 2. Go through the ticks of these keys. 3. Store. 4. Emit.
        """
        rows, own_watermarks = inputs[0], watermarks[0]
        self.counts = {"late": 0}
        result = self.output.append(TICK_FIELD)
        if not rows.num_rows:
            return result.empty_table()
        # 1. The changes of each key and tick: the row before, and the row after; -1 for none.
        segments = segment_rows(rows, encode_keys(rows, self.settings.key))
        stored = state.get_array(segments.keys)
        before, after = _row_before_and_after(segments)
        tick_index = row_tick_indices(rows, own_watermarks)[segments.order[segments.starts]]
        horizons = step_horizon(own_watermarks.horizon_before, self.settings.late.lateness_us)
        times = self._times(rows)
        moves = _Moves(self.settings, [rows], times, horizons)
        concerns = moves.is_held(before, after, tick_index)
        concerns |= moves.is_missed(before, after, tick_index)
        is_stored = stored.is_valid().to_numpy(zero_copy_only=False)
        is_kept = is_stored.copy()
        is_kept[segments.key_of[concerns]] = True
        if not is_kept.any():
            return rows.select(result.names).cast(result)
        # 2. From here on, rows are numbered with the stored ones first.
        with_row = np.flatnonzero(is_stored)
        shown = np.full(len(segments.keys), _AS_IT_IS)
        flags, old_rows = self._decode(stored.take(pa.array(with_row)))
        shown[with_row] = np.where(flags == 0, _NOT_SHOWN, np.cumsum(flags) - 1)
        old_count = old_rows.num_rows
        columns = pa.concat_tables([old_rows, rows.select(self.schema.names).cast(self.schema)])
        moves = _Moves(
            self.settings,
            [old_rows, rows],
            np.concatenate([self._times(old_rows), times]),
            horizons,
        )
        before, after = (np.where(each < 0, -1, each + old_count) for each in (before, after))
        emitted, late = _Emitted(), np.zeros(rows.num_rows, np.bool_)
        plain = np.flatnonzero(~is_kept[segments.key_of])
        emitted.add(plain, before[plain], after[plain])
        for every in segments.rounds():
            turn = every[is_kept[segments.key_of[every]]]
            keys = segments.key_of[turn]
            had = np.where(shown[keys] == _AS_IT_IS, before[turn], shown[keys])
            has = after[turn]
            held = moves.is_held(had, has, tick_index[turn])
            missed = ~held & moves.is_missed(had, has, tick_index[turn])
            # A row that is deleted before the window ever had it
            had = np.where((has < 0) & (shown[keys] == _NOT_SHOWN), before[turn], had)
            goes = ~held
            emitted.add(turn[goes], had[goes], has[goes])
            late[has[held] - old_count] = True
            shown[keys] = np.select([held, missed], [had, _NOT_SHOWN], _AS_IT_IS)
        # 3. Store.
        kept = np.flatnonzero(is_kept)
        state.put_array(segments.keys.take(pa.array(kept)), self._encode(shown[kept], columns))
        ticks = row_tick_indices(rows, own_watermarks)
        self.counts["late"] = self.late_rows.add(
            rows, late, own_watermarks.times_us[ticks], horizons[ticks] - times
        )
        # 4. Emit, in the order of the changes that came.
        segment, row, kind = emitted.in_order(segments)
        arrays = [as_array(column).take(pa.array(row)) for column in columns.columns]
        arrays.append(pa.array(CHANGE_TYPES).take(pa.array(kind)))
        arrays.append(pa.array(segments.ticks[segment]))
        return pa.Table.from_arrays(arrays, schema=result)

    def _times(self, rows: pa.Table) -> Times:
        return microseconds(rows.column(self.settings.time)) + self.settings.time_shift_us

    def _encode(self, shown: Ints, columns: pa.Table) -> pa.Array:
        """What is stored of keys; null for those of which the window has the row as it is."""
        has_row = shown >= 0
        rows = columns.take(pa.array(shown[has_row])).combine_chunks()
        structs = pa.StructArray.from_arrays(
            [as_array(column) for column in rows.columns], fields=list(self.schema)
        )
        header = pa.scalar(bytes([_VERSION, 1]), pa.large_binary())
        values = concat_bytes([header, row_codec.encode_array(structs)]).cast(pa.binary())
        values = pa.concat_arrays([values, pa.array([bytes([_VERSION, 0])], pa.binary())])
        index = np.where(has_row, np.cumsum(has_row) - 1, len(values) - 1)
        return values.take(pa.array(index, mask=shown == _AS_IT_IS))

    def _decode(self, values: pa.Array) -> tuple[Ints, pa.Table]:
        """For each stored value 1 if it has a row, else 0; and the rows."""
        if pc.any(pc.greater(pc.binary_slice(values, 0, 1), bytes([_VERSION]))).as_py():
            raise NewerFormat(
                f"The state of step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        has_row = pc.equal(pc.binary_slice(values, 1, 2), b"\x01")
        content = pc.binary_slice(values.filter(has_row).cast(pa.large_binary()), 2, _MAX_ROW_BYTES)
        rows = row_codec.decode_array(content, pa.struct(list(self.schema)))
        flags: Ints = has_row.to_numpy(zero_copy_only=False).astype(np.int64)
        columns = [pc.struct_field(rows, index) for index in range(len(self.schema))]
        return flags, pa.Table.from_arrays(columns, schema=self.schema)


def _row_before_and_after(segments: Segments) -> tuple[Ints, Ints]:
    """For each segment the row that its changes begin with, and the one that they end with; -1 for
    none. A table has at most one change of a key in a tick.
    """
    first = segments.starts
    last = segments.starts + segments.sizes - 1
    assert segments.signs is not None
    before = np.where(segments.signs[first] < 0, segments.order[first], -1)
    after = np.where(segments.signs[last] > 0, segments.order[last], -1)
    return before, after


class _Moves:
    """Which rows come, or move from one window to another, too late; rows by index, horizons by the
    index of a tick.
    """

    def __init__(
        self,
        settings: LateMoveSettings,
        tables: Sequence[pa.Table],
        times: Times,
        horizons: Times,
    ) -> None:
        self.window, self.times, self.horizons = settings.window, times, horizons
        if isinstance(self.window, Session):
            keys = [encode_keys(table, settings.by) for table in tables]
            self.groups = np.concatenate(rank_keys(keys).ranks)
        elif not isinstance(self.window, Sliding):
            # Windows have numbers: a row is in those from its first to its last. The oldest that
            # contains the horizon is the oldest open one.
            has_begun = horizons != UNSTARTED
            assigned = assign(self.window, np.concatenate([times, horizons[has_begun]]))
            self.first, self.last = assigned.first[: len(times)], assigned.last[: len(times)]
            self.oldest_open = np.full(len(horizons), np.iinfo(np.int64).min)
            self.oldest_open[has_begun] = assigned.first[len(times) :]

    def is_held(self, before: Ints, after: Ints, tick_index: Ints) -> Mask:
        """Whether a closed window has the row before, and does not have the row after; -1 is no
        row.
        """
        horizons = self.horizons[tick_index]
        held: Mask = (before >= 0) & (after >= 0)
        if isinstance(self.window, Session):
            held &= self.times[before] + self.window.gap_us <= horizons
            held &= (self.times[before] != self.times[after]) | (
                self.groups[before] != self.groups[after]
            )
            return held
        if isinstance(self.window, Sliding):
            held &= self.times[before] < horizons
            held &= self.times[before] != self.times[after]
            return held
        last_closed = np.minimum(self.last[before], self.oldest_open[tick_index] - 1)
        stays = (self.first[after] <= self.first[before]) & (self.last[after] >= last_closed)
        held &= (self.first[before] <= last_closed) & ~stays
        return held

    def is_missed(self, before: Ints, after: Ints, tick_index: Ints) -> Mask:
        """Whether no open window takes the row after, and no closed one has the row before. A
        session takes any row as long as its group has one.
        """
        missed: Mask = after >= 0
        if isinstance(self.window, Session):
            return np.zeros(len(after), np.bool_)
        if isinstance(self.window, Sliding):
            horizons = self.horizons[tick_index]
            missed &= self.times[after] < horizons
            missed &= (before < 0) | (self.times[before] >= horizons)
            return missed
        oldest_open = self.oldest_open[tick_index]
        missed &= self.last[after] < oldest_open
        missed &= (before < 0) | (self.first[before] >= oldest_open)
        return missed


class _Emitted:
    """The rows to emit: of each change its segment, the row before and the row after."""

    def __init__(self) -> None:
        self.parts: list[tuple[Ints, Ints, npt.NDArray[np.int64]]] = []

    def add(self, segments: Ints, before: Ints, after: Ints) -> None:
        for rows, other, kinds in (
            (before, after, (_BEFORE, _DELETE)),
            (after, before, (_AFTER, _INSERT)),
        ):
            there = rows >= 0
            kind = np.where(other[there] >= 0, *kinds)
            self.parts.append((segments[there], rows[there], kind))

    def in_order(self, segments: Segments) -> tuple[Ints, Ints, Ints]:
        """Segment, row and kind of each change, in the order of the segments' first rows."""
        segment, row, kind = (np.concatenate(each) for each in zip(*self.parts, strict=True))
        order = np.lexsort((kind, segments.order[segments.starts[segment]]))
        return segment[order], row[order], kind[order]
