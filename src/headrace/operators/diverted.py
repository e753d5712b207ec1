"""Rows that an aggregate could not take in, with which and why: the host sends them to dead letters."""

from __future__ import annotations

import pyarrow as pa

from headrace.operators.buffers import Ints
from headrace.operators.kernel import CHANGE_TYPE, TICK

AGGREGATE = "_aggregate"
REASON = "_reason"


class Diverted:
    """Collects rows until the host takes them, after each step."""

    def __init__(self, schema: pa.Schema) -> None:
        system = [pa.field(TICK, pa.int64()), pa.field(CHANGE_TYPE, pa.string()), pa.field(AGGREGATE, pa.string()), pa.field(REASON, pa.string())]
        self.schema = pa.schema([*schema, *system])
        self._tables: list[pa.Table] = []

    def add(self, rows: pa.Table, which: Ints, aggregate: str, reason: str) -> None:
        chosen = rows.take(pa.array(which))
        known = {name: chosen.column(name) for name in chosen.schema.names}
        known[AGGREGATE], known[REASON] = (pa.repeat(pa.scalar(text), len(which)) for text in (aggregate, reason))
        arrays = [known.get(field.name, pa.nulls(len(which), field.type)) for field in self.schema]
        self._tables.append(pa.Table.from_arrays(arrays, schema=self.schema))

    def take(self) -> pa.Table:
        """What was diverted since the last time: the rows, `_tick`, `_change_type`, and which aggregate left them out and why."""
        tables, self._tables = self._tables, []
        return pa.concat_tables(tables).sort_by(TICK) if tables else self.schema.empty_table()
