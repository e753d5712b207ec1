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
from headrace.operators.changelog import DELETE, UPDATE_PREIMAGE, changes
from headrace.operators.kernel import CHANGE_TYPE, TICK, KeyedState
from headrace.operators.keys import encode_keys, key_list, whole
from headrace.operators.segments import Segments, cut

_VERSION = b"\x01"


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
            return self._told([], [], [])
        segments = cut(rows, encode_keys(rows, self.key))
        keys = key_list(segments.keys)
        versions = self._versions(segments, state.get(keys))
        exists = np.fromiter((value is not None for value in versions), np.bool_, len(versions))
        after = segments.after
        unlike = np.fromiter((versions[at] != versions[at - 1] for at in after), np.bool_, len(after))
        told = changes(segments, exists, unlike)
        newest = [*(segments.before_all[1:] - 1), len(versions) - 1]
        state.put(keys, [versions[at] for at in newest])
        return self._told([versions[at] for at in told.versions], told.names(), segments.ticks[told.segments])

    def _versions(self, segments: Segments, stored: list[bytes | None]) -> list[bytes | None]:
        """Each key's row before all, and after each of its ticks; None where it has none."""
        last = pa.array(segments.order[segments.starts + segments.sizes - 1])
        rows = pa.StructArray.from_arrays([whole(segments.rows.column(name)).take(last) for name in self.schema.names], fields=list(self.schema))
        versions: list[bytes | None] = [None] * segments.versions
        for at, value in zip(segments.after.tolist(), row_codec.encode(rows), strict=True):
            versions[at] = _VERSION + value
        if CHANGE_TYPE in segments.rows.schema.names:
            gone = pc.equal(whole(segments.rows.column(CHANGE_TYPE)).take(last), DELETE).to_numpy(zero_copy_only=False)
            for at in segments.after[gone].tolist():
                versions[at] = None
        for at, known in zip(segments.before_all.tolist(), stored, strict=True):
            versions[at] = known
        return versions

    def _told(self, values: list[bytes | None], kinds: pa.Array | list[str], ticks: object) -> pa.Table:
        stored = [value for value in values if value is not None]
        if any(value[:1] > _VERSION for value in stored):
            raise NewerFormat(f"The state of step {self.step_name!r} was written by a newer Headrace.", fix="upgrade Headrace.")
        rows = row_codec.decode([value[1:] for value in stored], self._struct)
        columns = [pc.struct_field(rows, at) for at in range(self._struct.num_fields)]
        schema = self.output.append(pa.field(TICK, pa.int64(), nullable=False))
        return pa.Table.from_arrays([*columns, pa.array(kinds, pa.string()), pa.array(ticks, pa.int64())], schema=schema)
