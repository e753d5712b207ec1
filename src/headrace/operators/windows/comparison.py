"""Each window beside the same window a period earlier: `compare("7 days")` over a table of windows.
Where there is no earlier one, its columns are null.

A window's row is kept until the window a period later is closed, since it stands beside that one
too. In a time zone the period is one of its clock: seven days back from a midnight is a midnight,
also when the clock was changed in between.

| entry | name | bytes |
|---|---|---|
| a window's row | as `entries` has them, by the end of the window a period later | version 1; a
STRUCT as `row_codec` has it: the results |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask, offsets_of
from headrace.columnar.columns import CHANGE_FIELD, CHANGE_TYPE, TICK_FIELD
from headrace.columnar.keys import decode_keys, encode_keys, key_groups, whole
from headrace.columnar.lookup import begins, ranked, sorting
from headrace.errors import NewerFormat, PlanError
from headrace.operators.changelog import DELETE, UPDATE_PREIMAGE, differs
from headrace.operators.kernel import UNSTARTED, KeyedState, Times, Watermarks, microseconds
from headrace.operators.windows.assignment import counterparts
from headrace.operators.windows.buffered_window import Grouped, distinct_windows
from headrace.operators.windows.kernel import NOTHING, WINDOW_END, WINDOW_START, Shown, tell
from headrace.operators.windows.late_rows import places_of
from headrace.operators.windows.specs import Hopping, Tumbling
from headrace.operators.windows.state import TOLD, Windows, scan_until

PREVIOUS = "previous_"
_VERSION = b"\x01"


@dataclass(frozen=True)
class Timeline:
    """The versions of windows' rows: in order of window and tick, from what was stored (tick -1)
    on. `rows` are positions in the kernel's table, NOTHING for no row.
    """

    windows: Ints
    places: Ints
    rows: Ints
    ticks: int

    def at(self, windows: Ints, places: Ints) -> Ints:
        """The row that each window has at the end of a tick; NOTHING too for a window that is none
        (-1).
        """
        found = (
            np.searchsorted(
                self._code(self.windows, self.places), self._code(windows, places), side="right"
            )
            - 1
        )
        there = (windows >= 0) & (found >= 0)
        return np.where(there, self.rows[np.where(there, found, 0)], NOTHING)

    def _code(self, windows: Ints, places: Ints) -> Ints:
        code: Ints = windows * (self.ticks + 1) + places + 1
        return code


@dataclass(frozen=True)
class Pairs:
    """A window's row and the one a period earlier, as positions in a table of results; NOTHING for
    no row.
    """

    table: pa.Table
    mine: Ints
    earlier: Ints

    def differs(self, before: Ints, after: Ints) -> Mask:
        unlike = np.zeros(len(before), np.bool_)
        for rows in (self.mine, self.earlier):
            for column in self.table.columns:
                unlike |= differs(_taken(column, rows[before]), _taken(column, rows[after]))
        return unlike

    def results(self, which: Ints) -> list[pa.Array]:
        return [
            _taken(column, rows[which])
            for rows in (self.mine, self.earlier)
            for column in self.table.columns
        ]


class CompareKernel:
    """`schema` is that of a table of windows, keyed by `by`, window_start and window_end. `window`
    is what they are; it matters in a time zone alone.
    """

    def __init__(
        self,
        step: str,
        schema: pa.Schema,
        by: Sequence[str],
        period_us: int,
        window: Tumbling | Hopping | None = None,
        prefix: str = PREVIOUS,
    ) -> None:
        self.step_name, self.schema, self.by, self.period_us, self.window, self.prefix = (
            step,
            schema,
            tuple(by),
            period_us,
            window,
            prefix,
        )
        self._results = [
            field
            for field in schema
            if field.name not in {*by, WINDOW_START, WINDOW_END, CHANGE_TYPE}
        ]
        if taken := {f"{prefix}{field.name}" for field in self._results} & set(schema.names):
            raise PlanError(
                f"Step {step!r} would have two columns named {min(taken)!r}.",
                fix=(
                    "rename the one that is there, compare before it is made, or give another"
                    " prefix."
                ),
            )
        self._struct = pa.struct(self._results)

    @cached_property
    def output(self) -> pa.Schema:
        keys = [self.schema.field(name) for name in (*self.by, WINDOW_START, WINDOW_END)]
        earlier = [pa.field(f"{self.prefix}{field.name}", field.type) for field in self._results]
        return pa.schema([*keys, *self._results, *earlier, CHANGE_FIELD])

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Name the windows that rows are of, those a period earlier and later. 2. Get their
        rows. 3. Tell what became of the pairs. 4. Put. 5. Forget.
        """
        (rows,), (clock,) = inputs, watermarks
        table = (
            self._compared(state, rows, clock)
            if rows.num_rows
            else self.output.append(TICK_FIELD).empty_table()
        )
        if len(clock) and clock.closed[-1] > clock.horizon_at_start:
            names, windows = scan_until(state, TOLD, UNSTARTED, int(clock.closed[-1]))
            if names:
                state.put(names, [None] * len(names), windows.groups)
        return table

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """Nothing is told when time passes."""
        return None

    def _compared(self, state: KeyedState, rows: pa.Table, clock: Watermarks) -> pa.Table:
        found = ranked([encode_keys(rows, self.by)])
        grouped = Grouped(found.keys, key_groups(found.keys), found.keys)
        starts, ends = (microseconds(rows.column(name)) for name in (WINDOW_START, WINDOW_END))
        earlier, later = (
            counterparts(self.window, starts, ends, by) for by in (-self.period_us, self.period_us)
        )
        count, keys = len(starts), found.ranks[0]
        all_starts, all_ends = (
            np.concatenate([starts, earlier.starts, later.starts]),
            np.concatenate([ends, earlier.ends, later.ends]),
        )
        windows, number = distinct_windows(grouped, np.tile(keys, 3), all_starts, all_ends)
        mine, before, after = number[:count], number[count : 2 * count], number[2 * count :]
        timeline, table, names = self._timeline(state, rows, windows, mine, clock)
        earlier_of = np.full(len(windows), -1)
        earlier_of[after[later.there]] = mine[later.there]
        earlier_of[mine] = np.where(earlier.there, before, -1)
        told = self._told(
            windows,
            earlier_of,
            np.concatenate([mine, after]),
            np.tile(places_of(rows, clock), 2),
            timeline,
            table,
            clock,
        )
        self._put(state, windows, names, np.unique(mine), timeline, table)
        return told

    # What rows windows have

    def _timeline(
        self, state: KeyedState, rows: pa.Table, windows: Windows, mine: Ints, clock: Watermarks
    ) -> tuple[Timeline, pa.Table, pa.Array]:
        """The versions of all windows; the rows that they show, stored ones first; the names of
        windows in the state.
        """
        lasting = Windows(windows.by, windows.starts, self._needed_until(windows), windows.groups)
        names = lasting.names(np.zeros(len(windows), np.bool_))
        stored, there = self._read(state.get_array(names, windows.groups))
        places = places_of(rows, clock)
        order = sorting(mine, places)
        last = order[np.append(begins(mine[order], places[order])[1:], True)]
        goes = pc.is_in(
            whole(rows.column(CHANGE_TYPE)), pa.array([DELETE, UPDATE_PREIMAGE])
        ).to_numpy(zero_copy_only=False)
        of_rows = np.where(goes[last], NOTHING, stored.num_rows + last)
        known = np.full(len(windows), NOTHING)
        known[there] = np.arange(stored.num_rows)
        number = np.concatenate([np.arange(len(windows)), mine[last]])
        place = np.concatenate([np.full(len(windows), -1), places[last]])
        in_order = sorting(number, place)
        timeline = Timeline(
            number[in_order],
            place[in_order],
            np.concatenate([known, of_rows])[in_order],
            len(clock),
        )
        fresh = rows.select([field.name for field in self._results]).cast(pa.schema(self._results))
        return timeline, pa.concat_tables([stored, fresh]).combine_chunks(), names

    def _needed_until(self, windows: Windows) -> Times:
        """When the windows a period later end; of one that has none, a period after it ended."""
        later = counterparts(self.window, windows.starts, windows.ends, self.period_us)
        return np.where(later.there, later.ends, windows.ends + self.period_us)

    def _read(self, values: pa.Array) -> tuple[pa.Table, Ints]:
        there = values.drop_null()
        data, offsets = (
            (
                np.frombuffer(there.buffers()[2] or b"", np.uint8)
                if len(there)
                else np.zeros(0, np.uint8)
            ),
            offsets_of(there),
        )
        if len(there) and int(data[offsets[:-1]].max()) > _VERSION[0]:
            raise NewerFormat(
                f"The state of step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        rows = row_codec.decode_array(
            row_codec.cut_out(data, offsets[:-1] + 1, np.diff(offsets) - 1), self._struct
        )
        columns = [pc.struct_field(rows, at) for at in range(len(self._results))]
        return pa.Table.from_arrays(columns, schema=pa.schema(self._results)), np.flatnonzero(
            values.is_valid().to_numpy(zero_copy_only=False)
        )

    def _put(
        self,
        state: KeyedState,
        windows: Windows,
        names: pa.Array,
        touched: Ints,
        timeline: Timeline,
        table: pa.Table,
    ) -> None:
        row = timeline.at(touched, np.full(len(touched), timeline.ticks - 1))
        stays = np.flatnonzero(row != NOTHING)
        structs = pa.StructArray.from_arrays(
            [whole(column) for column in table.take(pa.array(row[stays])).columns],
            fields=self._results,
        )
        values = np.full(len(touched), None, object)
        values[stays] = [_VERSION + value for value in row_codec.encode(structs)]
        state.put_array(
            names.take(pa.array(touched)), pa.array(values, pa.binary()), windows.groups[touched]
        )

    # What is told

    def _told(
        self,
        windows: Windows,
        earlier_of: Ints,
        window: Ints,
        places: Ints,
        timeline: Timeline,
        table: pa.Table,
        clock: Watermarks,
    ) -> pa.Table:
        """Of windows that something may have become of, in some ticks: once a window and tick."""
        order = sorting(places, window)
        order = order[begins(places[order], window[order])]
        window, places = window[order], places[order]
        pairs = Pairs(
            table,
            np.concatenate([timeline.at(window, places - 1), timeline.at(window, places)]),
            np.concatenate(
                [
                    timeline.at(earlier_of[window], places - 1),
                    timeline.at(earlier_of[window], places),
                ]
            ),
        )
        number = np.arange(len(window))
        was = np.where(pairs.mine[: len(window)] == NOTHING, NOTHING, number)
        now = np.where(pairs.mine[len(window) :] == NOTHING, NOTHING, number + len(window))
        changes = tell(Shown(places, window, was, now), pairs.differs)
        of = window[changes.segments]
        columns = decode_keys(
            windows.by.take(pa.array(of)), [self.schema.field(name) for name in self.by]
        )
        bounds = ((WINDOW_START, windows.starts), (WINDOW_END, windows.ends))
        columns += [
            pa.array(times[of]).cast(self.schema.field(name).type) for name, times in bounds
        ]
        columns += [
            *pairs.results(changes.versions),
            changes.names(),
            pa.array(clock.ticks[places[changes.segments]]),
        ]
        return pa.Table.from_arrays(columns, schema=self.output.append(TICK_FIELD))


def _taken(column: pa.ChunkedArray, rows: Ints) -> pa.Array:
    return whole(column).take(pa.array(np.where(rows == NOTHING, 0, rows), mask=rows == NOTHING))
