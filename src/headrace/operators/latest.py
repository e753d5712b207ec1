"""The newest row of each key, as a table: from a stream of rows, or from a table's topic, whose rows say what is now and not what was.

Everything downstream of a table needs the row that goes as well as the row that comes; this is where it is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import NewerFormat
from headrace.operators import row_codec
from headrace.operators.buffers import Ints, take_bytes
from headrace.operators.changelog import DELETE, UPDATE_PREIMAGE, changes, differs
from headrace.operators.kernel import CHANGE_TYPE, TICK, KeyedState
from headrace.operators.keys import encode_keys, whole
from headrace.operators.segments import Segments, cut
from headrace.operators.unchanged import MARKS, marked_unchanged, with_unchanged

_VERSION = b"\x01"
_NOTHING = pa.scalar(b"", pa.large_binary())
_LONGEST = 2**31  # longer than any row
_TICK_FIELD = pa.field(TICK, pa.int64(), nullable=False)


class LatestKernel:
    """Keeps the last row of each key. A `delete` of a table's topic, which may have nothing but the key, removes it."""

    def __init__(self, step: str, schema: pa.Schema, key: Sequence[str]) -> None:
        self.step_name, self.schema, self.key = step, schema, tuple(key)
        self._struct = pa.struct(list(schema))

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(pa.field(CHANGE_TYPE, pa.string(), nullable=False))

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        if CHANGE_TYPE in rows.column_names:
            rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_PREIMAGE))
        if not rows.num_rows:
            return self.output.append(_TICK_FIELD).empty_table()
        rows = self._whole(state, rows)
        segments = cut(rows, encode_keys(rows, self.key))
        versions = self._versions(segments, state.get_array(segments.keys))
        after = segments.after
        unlike = differs(take_bytes(versions, after - 1), take_bytes(versions, after))
        told = changes(segments, versions.is_valid().to_numpy(zero_copy_only=False), unlike)
        newest = np.append(segments.before_all[1:], segments.versions) - 1
        state.put_array(segments.keys, take_bytes(versions, newest))
        return self._told(take_bytes(versions, told.versions), told.names(), segments.ticks[told.segments])

    def _whole(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """Rows of a captured table that are declared with `_marks`: what a change left as it was is as in the row before, if that is known."""
        if MARKS not in self.schema.names or CHANGE_TYPE not in rows.column_names or not pc.any(marked_unchanged(rows)).as_py():
            return rows
        return with_unchanged(rows, list(self.key), lambda keys: self._stored(state, keys))

    def _stored(self, state: KeyedState, keys: pa.Table) -> pa.Table:
        values = state.get_array(encode_keys(keys, self.key)).drop_null()
        return pa.Table.from_arrays(self._decoded(values), schema=self.schema)

    def _versions(self, segments: Segments, stored: pa.Array) -> pa.Array:
        """Each key's row before all, and after each of its ticks, as bytes; null where it has none."""
        last = pa.array(segments.order[segments.starts + segments.sizes - 1])
        rows = pa.StructArray.from_arrays([whole(segments.rows.column(name)).take(last) for name in self.schema.names], fields=list(self.schema))
        encoded = pc.binary_join_element_wise(pa.scalar(_VERSION, pa.large_binary()), row_codec.encode_array(rows), _NOTHING).cast(pa.binary())
        if CHANGE_TYPE in segments.rows.schema.names:
            gone = pc.equal(whole(segments.rows.column(CHANGE_TYPE)).take(last), DELETE)
            encoded = pc.if_else(gone, pa.scalar(None, pa.binary()), encoded)
        place = np.empty(segments.versions, np.int64)
        place[segments.before_all] = np.arange(len(stored))
        place[segments.after] = len(stored) + np.arange(len(segments))
        return take_bytes(pa.concat_arrays([stored, encoded]), place)

    def _told(self, values: pa.Array, kinds: pa.Array, ticks: Ints) -> pa.Table:
        columns = self._decoded(values)
        return pa.Table.from_arrays([*columns, kinds, pa.array(ticks, pa.int64())], schema=self.output.append(_TICK_FIELD))

    def _decoded(self, values: pa.Array) -> list[pa.Array]:
        """The columns of stored rows."""
        if pc.any(pc.greater(pc.binary_slice(values, 0, 1), _VERSION)).as_py():
            raise NewerFormat(f"The state of step {self.step_name!r} was written by a newer Headrace.", fix="upgrade Headrace.")
        plain = pc.binary_slice(values.cast(pa.large_binary()), len(_VERSION), _LONGEST)
        rows = row_codec.decode_array(plain, self._struct)
        return [pc.struct_field(rows, at) for at in range(self._struct.num_fields)]

    # Looking at what is stored

    @property
    def key_fields(self) -> list[pa.Field]:
        return [self.schema.field(name) for name in self.key]

    def describe(self, keys: pa.Array, values: pa.Array) -> pa.Table:  # noqa: ARG002 - the row has the key's columns
        """The newest row of each key."""
        return pa.Table.from_arrays(self._decoded(values), schema=self.schema)
