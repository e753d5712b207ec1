"""Points and panes of sliding windows in the state: a group's, or a pane's, in one entry. States that have nothing but fields, as most do, lie there in few bytes (`narrow`); where
some have more bytes than others, an entry is one of rows, as `kept_rows` has them.

| entry | bytes |
|---|---|
| records | version 2; the form of the columns (whole numbers, and the fields of states), and the rows, as `narrow` has them |
| rows | version 1; as `kept_rows` has them |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.operators.buffers import Ints, as_binary, offsets_of, same_width
from headrace.operators.kernel import Groups, KeyedState
from headrace.operators.keys import whole
from headrace.operators.row_codec import cut_out
from headrace.operators.windows.kept_rows import RowStore
from headrace.operators.windows.narrow import FORM_BYTES, Alike, Form, by_widths, row_type

STATE = "state"
_VERSION = 2
_NO_BYTES = pa.scalar(b"", pa.large_binary())
_WHOLE: np.dtype[Any] = np.dtype("<i8")


class RecordStore:
    """Reads and writes tables with a time, more whole numbers, and a state, most of which have these fields alone."""

    def __init__(self, step: str, numbers: Sequence[str], states: np.dtype[Any]) -> None:
        self._rows = RowStore(step, [*(pa.field(name, pa.int64()) for name in numbers), pa.field(STATE, pa.binary())], with_id=False)
        self.schema, self._states = pa.schema(self._rows.fields), states
        self._fields: list[str] = list(states.names or ())
        self._kinds = [_WHOLE] * (len(self.schema) - 1) + [states[name] for name in self._fields]
        self._before_rows = 1 + FORM_BYTES * len(self._kinds)

    def write(self, state: KeyedState, names: pa.Array, groups: Groups, counts: Ints, rows: pa.Table) -> None:
        """`rows` are in order of entry, so many for each; an entry without any goes."""
        plain = same_width(whole(rows.column(STATE)))
        if plain is None or plain.dtype.itemsize != self._states.itemsize:
            self._rows.write(state, names, groups, counts, rows)
            return
        RowStore.check(self._rows.step_name, counts)
        values, there = self._encoded(rows, plain.view(self._states), counts), counts > 0
        state.put_array(names, values if there.all() else pc.if_else(pa.array(there), values, pa.scalar(None, pa.binary())), groups)

    def _encoded(self, rows: pa.Table, states: np.ndarray[tuple[int], Any], counts: Ints) -> pa.Array:
        columns = [whole(rows.column(name)).to_numpy() for name in self.schema.names[:-1]]
        columns += [states[name] for name in self._fields]
        form = Form.of(columns)
        packed = form.packed(columns)
        offsets = np.append(0, np.cumsum(counts)) * packed.dtype.itemsize
        data = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(counts), [None, pa.py_buffer(offsets), pa.py_buffer(packed)])
        before = pa.scalar(bytes([_VERSION]) + form.to_bytes(), pa.large_binary())
        return pc.binary_join_element_wise(before, data, _NO_BYTES).cast(pa.binary())

    def read(self, state: KeyedState, names: pa.Array, groups: Groups) -> tuple[Ints, pa.Table]:
        """How many rows each entry has, and all of them."""
        values = state.get_array(names, groups)
        there = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        known = values.drop_null()
        as_records = self._versions(known) == _VERSION
        if not as_records.any():
            return self._rows.decoded(values)
        counts, parts = np.zeros(len(values), np.int64), []
        records = np.flatnonzero(as_records)
        for alike in self._by_widths(known.take(pa.array(records))):
            which = records[alike.which]
            counts[there[which]], rows = self._decoded(known.take(pa.array(which)), alike)
            parts.append((there[which], rows))
        if not as_records.all():
            which = np.flatnonzero(~as_records)
            counts[there[which]], rows = self._rows.decoded(known.take(pa.array(which)))
            parts.append((there[which], rows))
        return counts, _put_together(counts, parts)

    @staticmethod
    def _versions(values: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        data = np.frombuffer(values.buffers()[2], np.uint8) if len(values) else np.zeros(0, np.uint8)
        return data[offsets_of(values)[:-1]]

    def _by_widths(self, values: pa.Array) -> list[Alike]:
        forms = pc.binary_slice(values, 1, self._before_rows)
        return by_widths(np.frombuffer(forms.buffers()[2], np.uint8, count=len(forms) * (self._before_rows - 1)).reshape(len(forms), -1))

    def _decoded(self, values: pa.Array, alike: Alike) -> tuple[Ints, pa.Table]:
        """Entries of the same widths."""
        offsets = offsets_of(values)
        sizes = np.diff(offsets) - self._before_rows
        bare = cut_out(np.frombuffer(values.buffers()[2], np.uint8), offsets[:-1] + self._before_rows, sizes)
        row = row_type(alike.widths)
        counts = sizes // row.itemsize
        columns = alike.unpacked(np.frombuffer(bare.buffers()[2], row, count=int(counts.sum())), counts, self._kinds)
        states = np.empty(int(counts.sum()), self._states)
        for name, column in zip(self._fields, columns[len(self.schema) - 1 :], strict=True):
            states[name] = column
        numbers = [pa.array(column) for column in columns[: len(self.schema) - 1]]
        return counts, pa.Table.from_arrays([*numbers, as_binary(states.view(f"V{self._states.itemsize}"))], schema=self.schema)


def _put_together(counts: Ints, parts: Sequence[tuple[Ints, pa.Table]]) -> pa.Table:
    """The rows of all entries in their order, from several parts with some entries each."""
    if len(parts) == 1:
        return parts[0][1]
    entry = np.concatenate([np.repeat(which, counts[which]) for which, _ in parts])
    return pa.concat_tables([rows for _, rows in parts]).take(pa.array(np.argsort(entry, kind="stable")))
