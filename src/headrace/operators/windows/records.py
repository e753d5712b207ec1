"""Points and panes of sliding windows in the state: a group's, or a pane's, in one entry. States of one width, as most are, lie there as they are; where some have more bytes than others, an
entry is one of rows, as `kept_rows` has them.

| entry | bytes |
|---|---|
| records | version 2; for each its whole numbers, 8 bytes each, and its state |
| rows | version 1; as `kept_rows` has them |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.operators.buffers import Ints, as_binary, offsets_of, same_width
from headrace.operators.kernel import Groups, KeyedState
from headrace.operators.keys import whole
from headrace.operators.row_codec import cut_out
from headrace.operators.windows.kept_rows import RowStore

STATE = "state"
_VERSION = 2
_FIRST_BYTE = pa.scalar(bytes([_VERSION]), pa.large_binary())
_NO_BYTES = pa.scalar(b"", pa.large_binary())


class RecordStore:
    """Reads and writes tables with a time, more whole numbers, and a state, most of `width` bytes."""

    def __init__(self, step: str, numbers: Sequence[str], width: int) -> None:
        self._rows = RowStore(step, [*(pa.field(name, pa.int64()) for name in numbers), pa.field(STATE, pa.binary())], with_id=False)
        self.schema, self.width = pa.schema(self._rows.fields), width
        self._size = 8 * (len(self.schema) - 1) + width

    def write(self, state: KeyedState, names: pa.Array, groups: Groups, counts: Ints, rows: pa.Table) -> None:
        """`rows` are in order of entry, so many for each; an entry without any goes."""
        plain = same_width(whole(rows.column(STATE)))
        if plain is None or plain.dtype.itemsize != self.width:
            self._rows.write(state, names, groups, counts, rows)
            return
        RowStore.check(self._rows.step_name, counts)
        numbers = np.stack([whole(rows.column(name)).to_numpy() for name in self.schema.names[:-1]], axis=1)
        records = np.empty((len(plain), self._size), np.uint8)
        records[:, : -self.width] = numbers.astype("<i8").view(np.uint8).reshape(len(plain), -1)
        records[:, -self.width :] = plain.view(np.uint8).reshape(len(plain), -1)
        offsets = np.append(0, np.cumsum(counts)) * self._size
        data = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(counts), [None, pa.py_buffer(offsets), pa.py_buffer(records)])
        values = pc.binary_join_element_wise(_FIRST_BYTE, data, _NO_BYTES).cast(pa.binary())
        there = counts > 0
        state.put_array(names, values if there.all() else pc.if_else(pa.array(there), values, pa.scalar(None, pa.binary())), groups)

    def read(self, state: KeyedState, names: pa.Array, groups: Groups) -> tuple[Ints, pa.Table]:
        """How many rows each entry has, and all of them."""
        values = state.get_array(names, groups)
        there = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        known = values.drop_null()
        as_records = self._versions(known) == _VERSION
        if not as_records.any():
            return self._rows.decoded(values)
        counts = np.zeros(len(values), np.int64)
        counts[there[as_records]], records = self._records(known.filter(pa.array(as_records)))
        if as_records.all():
            return counts, records
        of_rows, rows = self._rows.decoded(known.filter(pa.array(~as_records)))
        counts[there[~as_records]] = of_rows
        entry = np.concatenate([np.repeat(there[which], counts[there[which]]) for which in (as_records, ~as_records)])
        return counts, pa.concat_tables([records, rows]).take(pa.array(np.argsort(entry, kind="stable")))

    @staticmethod
    def _versions(values: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        data = np.frombuffer(values.buffers()[2], np.uint8) if len(values) else np.zeros(0, np.uint8)
        return data[offsets_of(values)[:-1]]

    def _records(self, values: pa.Array) -> tuple[Ints, pa.Table]:
        offsets = offsets_of(values)
        bare = cut_out(np.frombuffer(values.buffers()[2], np.uint8), offsets[:-1] + 1, np.diff(offsets) - 1)
        counts = (np.diff(offsets) - 1) // self._size
        records = np.frombuffer(bare.buffers()[2], np.uint8, count=int(counts.sum()) * self._size).reshape(-1, self._size)
        numbers = np.ascontiguousarray(records[:, : -self.width]).view("<i8")
        states = as_binary(np.ascontiguousarray(records[:, -self.width :]).view(f"V{self.width}").reshape(-1))
        columns = [pa.array(np.ascontiguousarray(numbers[:, at])) for at in range(numbers.shape[1])]
        return counts, pa.Table.from_arrays([*columns, states], schema=self.schema)
