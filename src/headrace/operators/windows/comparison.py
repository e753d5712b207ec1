"""Window comparison: each window next to the same window a period earlier, `compare("7 days")`.

Where there is no earlier window, its columns are null. A window's row is stored until the window a
period later expires, since it is compared with that one too. In a time zone the period is one of
the local clock: seven days before a midnight is a midnight, also across a change of the clock.
`compare` with a period of 60 s over windows of 60 s with a column `n`:

    changes in                      state after                rows out
    tick 1: insert a [0,60) n=4     p a [0,60) -> 4            insert a [0,60) 4 null
    tick 2: insert a [60,120) n=6   p a [0,60), [60,120)       insert a [60,120) 6 4
    tick 3: update a [0,60) n=5     p a [0,60) -> 5, ...       update a [0,60) 5 null;
                                                               update a [60,120) 6 5

State: the row of a window is an entry as `state` names them, by the end of the window a period
later: version 1, then a STRUCT with the results, as `row_codec` encodes it.
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
from headrace.columnar.columns import CHANGE_FIELD, CHANGE_TYPE, DELETE, TICK_FIELD, UPDATE_PREIMAGE
from headrace.columnar.keys import as_array, decode_keys, encode_keys, key_groups
from headrace.columnar.lookup import group_start_mask, rank_keys, sort_order
from headrace.errors import NewerFormat, PlanError
from headrace.operators.changelog import differs
from headrace.operators.kernel import UNSTARTED, KeyedState, Watermarks, microseconds
from headrace.operators.windows.assignment import counterparts
from headrace.operators.windows.kernel import (
    NOTHING,
    WINDOW_END,
    WINDOW_START,
    ShownVersions,
    emitted_changes,
)
from headrace.operators.windows.late_rows import row_tick_indices
from headrace.operators.windows.specs import Hopping, Tumbling
from headrace.operators.windows.state import (
    EMITTED,
    GroupKeys,
    Windows,
    distinct_windows,
    scan_windows,
)

PREVIOUS = "previous_"
_VERSION = b"\x01"


@dataclass(frozen=True)
class RowVersions:
    """The versions of windows' rows, in order of window and tick, beginning with what was stored
    (tick -1).

    `rows` are positions in the kernel's table, NOTHING for no row.
    """

    windows: Ints
    tick_index: Ints
    rows: Ints
    ticks: int

    def at(self, windows: Ints, tick_index: Ints) -> Ints:
        """The row that each window has at the end of a tick; NOTHING for no row, and
        for window -1.
        """
        found = (
            np.searchsorted(
                self._code(self.windows, self.tick_index),
                self._code(windows, tick_index),
                side="right",
            )
            - 1
        )
        there = (windows >= 0) & (found >= 0)
        return np.where(there, self.rows[np.where(there, found, 0)], NOTHING)

    def _code(self, windows: Ints, tick_index: Ints) -> Ints:
        code: Ints = windows * (self.ticks + 1) + tick_index + 1
        return code


@dataclass(frozen=True)
class ComparedPairs:
    """A window's row and the one a period earlier, as positions in a table of results; NOTHING for
    no row.
    """

    table: pa.Table
    mine: Ints
    earlier: Ints

    def differs(self, before: Ints, after: Ints) -> Mask:
        """Which pairs of versions have different results."""
        unlike = np.zeros(len(before), np.bool_)
        for rows in (self.mine, self.earlier):
            for column in self.table.columns:
                unlike |= differs(_take_rows(column, rows[before]), _take_rows(column, rows[after]))
        return unlike

    def results(self, which: Ints) -> list[pa.Array]:
        """The results of some versions: the window's own columns, then those of the
        earlier window.
        """
        return [
            _take_rows(column, rows[which])
            for rows in (self.mine, self.earlier)
            for column in self.table.columns
        ]


class CompareKernel:
    """Compares the windows of a table.

    Args:
        step: The step's name, for errors.
        schema: The columns of a table of windows, keyed by `by`, window_start and window_end.
        by: The columns of a group.
        period_us: How much earlier the other window begins.
        window: What the windows are; needed in a time zone only.
        prefix: The prefix of the earlier window's columns.
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
        self.step_name = step
        self.schema = schema
        self.by = tuple(by)
        self.period_us = period_us
        self.window = window
        self.prefix = prefix
        self._results = [
            field
            for field in schema
            if field.name not in {*by, WINDOW_START, WINDOW_END, CHANGE_TYPE}
        ]
        if taken := {f"{prefix}{field.name}" for field in self._results} & set(schema.names):
            raise PlanError(
                f"Step {step!r} would have two columns named {min(taken)!r}.",
                fix=(
                    "rename the existing column, compare before it is added, or give another"
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
        """Process the changes of some ticks.

        1. Name the windows that changed, and those a period earlier and later.
        2. Read their rows.
        3. Emit what changed in each pair.
        4. Store the rows.
        5. Delete expired rows.
        """
        rows, input_watermarks = inputs[0], watermarks[0]
        table = (
            self._compare(state, rows, input_watermarks)
            if rows.num_rows
            else self.output.append(TICK_FIELD).empty_table()
        )
        if (
            len(input_watermarks)
            and input_watermarks.horizon[-1] > input_watermarks.horizon_at_start
        ):
            names, windows = scan_windows(
                state, EMITTED, UNSTARTED, int(input_watermarks.horizon[-1])
            )
            if names:
                state.put(names, [None] * len(names), windows.groups)
        return table

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """Always None: no row is emitted when time passes."""
        return None

    def _compare(self, state: KeyedState, rows: pa.Table, watermarks: Watermarks) -> pa.Table:
        ranked = rank_keys([encode_keys(rows, self.by)])
        grouped = GroupKeys(ranked.keys, key_groups(ranked.keys), ranked.keys)
        starts, ends = (microseconds(rows.column(name)) for name in (WINDOW_START, WINDOW_END))
        earlier, later = (
            counterparts(self.window, starts, ends, by) for by in (-self.period_us, self.period_us)
        )
        count, keys = len(starts), ranked.ranks[0]
        all_starts = np.concatenate([starts, earlier.starts, later.starts])
        all_ends = np.concatenate([ends, earlier.ends, later.ends])
        windows, number = distinct_windows(grouped, np.tile(keys, 3), all_starts, all_ends)
        mine = number[:count]
        before = number[count : 2 * count]
        after = number[2 * count :]
        versions, table, names = self._row_versions(state, rows, windows, mine, watermarks)
        earlier_of = np.full(len(windows), -1)
        earlier_of[after[later.there]] = mine[later.there]
        earlier_of[mine] = np.where(earlier.there, before, -1)
        emitted = self._emit(
            windows,
            earlier_of,
            np.concatenate([mine, after]),
            np.tile(row_tick_indices(rows, watermarks), 2),
            versions,
            table,
            watermarks,
        )
        self._store_rows(state, windows, names, np.unique(mine), versions, table)
        return emitted

    # Rows of windows

    def _row_versions(
        self,
        state: KeyedState,
        rows: pa.Table,
        windows: Windows,
        mine: Ints,
        watermarks: Watermarks,
    ) -> tuple[RowVersions, pa.Table, pa.Array]:
        """The versions of all windows' rows; the rows, stored ones first; and the names of windows
        in the state.
        """
        # The end of the window a period later; of a window without one, its own end plus the
        # period.
        later = counterparts(self.window, windows.starts, windows.ends, self.period_us)
        lasting = Windows(
            group_keys=windows.group_keys,
            starts=windows.starts,
            ends=np.where(later.there, later.ends, windows.ends + self.period_us),
            groups=windows.groups,
        )
        names = lasting.names(np.zeros(len(windows), np.bool_))
        stored, there = self._read(state.get_array(names, windows.groups))
        tick_index = row_tick_indices(rows, watermarks)
        order = sort_order(mine, tick_index)
        last = order[np.append(group_start_mask(mine[order], tick_index[order])[1:], True)]
        is_removal = pc.is_in(
            as_array(rows.column(CHANGE_TYPE)), pa.array([DELETE, UPDATE_PREIMAGE])
        ).to_numpy(zero_copy_only=False)
        of_rows = np.where(is_removal[last], NOTHING, stored.num_rows + last)
        known = np.full(len(windows), NOTHING)
        known[there] = np.arange(stored.num_rows)
        number = np.concatenate([np.arange(len(windows)), mine[last]])
        tick_of_version = np.concatenate([np.full(len(windows), -1), tick_index[last]])
        in_order = sort_order(number, tick_of_version)
        versions = RowVersions(
            windows=number[in_order],
            tick_index=tick_of_version[in_order],
            rows=np.concatenate([known, of_rows])[in_order],
            ticks=len(watermarks),
        )
        fresh = rows.select([field.name for field in self._results]).cast(pa.schema(self._results))
        return versions, pa.concat_tables([stored, fresh]).combine_chunks(), names

    def _read(self, values: pa.Array) -> tuple[pa.Table, Ints]:
        there = values.drop_null()
        data = (
            np.frombuffer(there.buffers()[2] or b"", np.uint8)
            if len(there)
            else np.zeros(0, np.uint8)
        )
        offsets = offsets_of(there)
        if len(there) and int(data[offsets[:-1]].max()) > _VERSION[0]:
            raise NewerFormat(
                f"The state of step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        rows = row_codec.decode_array(
            row_codec.gather_ranges(data, offsets[:-1] + 1, np.diff(offsets) - 1), self._struct
        )
        columns = [pc.struct_field(rows, at) for at in range(len(self._results))]
        return pa.Table.from_arrays(columns, schema=pa.schema(self._results)), np.flatnonzero(
            values.is_valid().to_numpy(zero_copy_only=False)
        )

    def _store_rows(
        self,
        state: KeyedState,
        windows: Windows,
        names: pa.Array,
        touched: Ints,
        versions: RowVersions,
        table: pa.Table,
    ) -> None:
        row = versions.at(touched, np.full(len(touched), versions.ticks - 1))
        stays = np.flatnonzero(row != NOTHING)
        structs = pa.StructArray.from_arrays(
            [as_array(column) for column in table.take(pa.array(row[stays])).columns],
            fields=self._results,
        )
        values = np.full(len(touched), None, object)
        values[stays] = [_VERSION + value for value in row_codec.encode(structs)]
        state.put_array(
            names.take(pa.array(touched)), pa.array(values, pa.binary()), windows.groups[touched]
        )

    # Emission

    def _emit(
        self,
        windows: Windows,
        earlier_of: Ints,
        window: Ints,
        tick_index: Ints,
        versions: RowVersions,
        table: pa.Table,
        watermarks: Watermarks,
    ) -> pa.Table:
        """The rows to emit for windows that may have changed in some ticks, once per window and
        tick.
        """
        order = sort_order(tick_index, window)
        order = order[group_start_mask(tick_index[order], window[order])]
        window, tick_index = window[order], tick_index[order]
        pairs = ComparedPairs(
            table,
            np.concatenate([versions.at(window, tick_index - 1), versions.at(window, tick_index)]),
            np.concatenate(
                [
                    versions.at(earlier_of[window], tick_index - 1),
                    versions.at(earlier_of[window], tick_index),
                ]
            ),
        )
        number = np.arange(len(window))
        was = np.where(pairs.mine[: len(window)] == NOTHING, NOTHING, number)
        now = np.where(pairs.mine[len(window) :] == NOTHING, NOTHING, number + len(window))
        changes = emitted_changes(
            ShownVersions(tick_index=tick_index, windows=window, was=was, now=now), pairs.differs
        )
        of = window[changes.segments]
        columns = decode_keys(
            windows.group_keys.take(pa.array(of)), [self.schema.field(name) for name in self.by]
        )
        bounds = ((WINDOW_START, windows.starts), (WINDOW_END, windows.ends))
        columns += [
            pa.array(times[of]).cast(self.schema.field(name).type) for name, times in bounds
        ]
        columns += [
            *pairs.results(changes.versions),
            changes.names(),
            pa.array(watermarks.ticks[tick_index[changes.segments]]),
        ]
        return pa.Table.from_arrays(columns, schema=self.output.append(TICK_FIELD))


def _take_rows(column: pa.ChunkedArray, rows: Ints) -> pa.Array:
    return as_array(column).take(pa.array(np.where(rows == NOTHING, 0, rows), mask=rows == NOTHING))
