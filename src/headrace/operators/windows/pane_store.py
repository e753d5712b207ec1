"""The state of sliding windows: points, panes and heads, and how they are stored.

A *point* is the state of a group's rows at one time. Points are stored in panes, a sixteenth of a
window long; the *head* of a group has the merged state of each pane. For a group `a` with panes of
1 s:

    rows at 0.1, 0.7, 9.2    h a: pane 0 -> state of 2 rows, last 0.7; pane 9 -> state of 1 row
                             q 0 a: 0.1 -> state, 0.7 -> state
                             q 9 a: 9.2 -> state

The entries, encoded by `RecordStore`:

    head      `h`, the group's key: for each pane its number, the time of its last point, the time
              of its first point that waits to be emitted, and its state
    pane      `q`, the pane's number (8 bytes, big-endian, sortable), the group's key: for each
              point its time and state

`sliding_window` computes windows from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import (
    Ints,
    Mask,
    as_binary,
    equal_length_values,
    offsets_of,
)
from headrace.columnar.keys import as_array
from headrace.columnar.lookup import (
    group_start_mask,
    merge_order,
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
from headrace.operators.aggregates.state_pool import (
    StateMerger,
    StatePool,
)
from headrace.operators.kernel import Groups, KeyedState, Times
from headrace.operators.windows.state import (
    TIME,
    RowStore,
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
            keys=self.keys[which],
            times=self.times[which],
            tick_index=self.tick_index[which],
            states=self.states[which],
        )

    def concat(self, other: Points) -> Points:
        pairs = (
            (self.keys, other.keys),
            (self.times, other.times),
            (self.tick_index, other.tick_index),
            (self.states, other.states),
        )
        return Points(*(np.concatenate(pair) for pair in pairs))

    def merge_sorted(self, other: Points) -> Points:
        """The points of both, in order; each of them is in order."""
        return self.concat(other).take(
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
            keys=self.keys[which],
            panes=self.panes[which],
            last=self.last[which],
            waits=self.waits[which],
            states=self.states[which],
        )

    def have(self, keys: Ints, panes: Ints) -> Mask:
        """Which of the given panes of groups are among these."""
        return any_within(self.keys, self.panes, keys, panes, panes + 1)

    def concat(self, other: Heads) -> Heads:
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
        merger: StateMerger,
        pool: StatePool,
    ) -> Heads:
        """The heads of points that are in order of group and time. Points from `emitted_until` on
        wait to be emitted; with None, none does.
        """
        new = group_start_mask(points.keys, panes)
        first = np.flatnonzero(new)
        states = pool.add(merger.reduce(pool.take(points.states), np.cumsum(new)))
        last = points.times[np.append(first[1:], len(points))[: len(first)] - 1]
        waits = (
            np.full(len(points), NEVER)
            if emitted_until is None
            else np.where(points.times >= emitted_until, points.times, NEVER)
        )
        return Heads(
            keys=points.keys[first],
            panes=panes[first],
            last=last,
            waits=np.minimum.reduceat(waits, first) if len(first) else last,
            states=states,
        )


class PaneStore:
    """Reads and writes the heads and panes of some groups, during one call."""

    def __init__(self, step: str, by: pa.Array, groups: Groups, states: np.dtype[Any]) -> None:
        self._by, self._groups = by.cast(pa.binary()), groups
        self._heads = RecordStore(step, [_LAST, _WAITS], states)
        self._panes = RecordStore(step, [], states)

    def read_heads(self, state: KeyedState, merger: StateMerger) -> tuple[Heads, StatePool]:
        """The heads of all groups, and a pool with their states."""
        counts, rows = self._heads.read(state, self._head_names(), self._groups)
        pool = StatePool(merger.open_states(as_array(rows.column(STATE))))
        panes, last, waits = (
            as_array(rows.column(name)).to_numpy() for name in (TIME, _LAST, _WAITS)
        )
        return (
            Heads(
                keys=np.repeat(np.arange(len(counts)), counts),
                panes=panes,
                last=last,
                waits=waits,
                states=np.arange(len(panes)),
            ),
            pool,
        )

    def read_points(
        self, state: KeyedState, heads: Heads, merger: StateMerger, pool: StatePool
    ) -> Points:
        """The points of some panes; their states are added to the pool."""
        counts, rows = self._panes.read(
            state, self._pane_names(heads.keys, heads.panes), self._groups[heads.keys]
        )
        states = pool.add(merger.open_states(as_array(rows.column(STATE))))
        keys = np.repeat(heads.keys, counts)
        return Points(
            keys=keys,
            times=as_array(rows.column(TIME)).to_numpy(),
            tick_index=np.full(len(keys), -1),
            states=states,
        )

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
