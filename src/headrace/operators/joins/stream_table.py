"""A stream joined with a table: each row meets the table as it is at the end of the row's tick, so changes of that tick come first.

The result is a stream. Later changes of the table change nothing of what was told. A row whose join key has a null meets nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.errors import InputError
from headrace.operators.joins.matching import Ranked, bounds, marked, pairs, ranked, search, sorting
from headrace.operators.joins.pile_writing import PileWriter
from headrace.operators.joins.piles import Piles
from headrace.operators.joins.sides import JoinColumns, ResultColumn, Rows, Side, join_keys, ticks_of
from headrace.operators.joins.table_side import TableSide, Versions
from headrace.operators.kernel import TICK, Clocks, KeyedState

_NO_ROWS = pa.nulls(0, pa.large_binary())


class StreamTableJoin:
    """`how`: "inner", or "left", where a row that meets nothing is told too. Inputs: the stream's rows, the table's changes."""

    hold_us = 0  # rows go on in their own tick: nothing of the stream's clocks is held back

    def __init__(self, step: str, stream: Side, table: Side, columns: Sequence[ResultColumn], *, how: str = "inner") -> None:
        if how not in {"inner", "left"}:
            raise InputError(
                f"Step {step!r} joins a stream with a table how={how!r}.",
                fix='choose how="inner" or how="left"; join tables for what has no row yet.',
            )
        self.step_name, self.stream, self.table, self.how = step, stream, table, how
        self._columns = JoinColumns(step, stream, table, columns, how)

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """Nothing waits for time."""
        return None

    def step_timed(self, state: KeyedState, inputs: Sequence[pa.Table], clocks: Sequence[Clocks]) -> pa.Table:  # noqa: ARG002
        """1. Find the keys. 2. Load what the table has of them. 3. Take in its changes. 4. Let rows and versions of the same ticks meet."""
        rows, changes = inputs
        keys, _ = join_keys(rows, self.stream.on)
        changed_keys, missing = join_keys(changes, self.table.on)
        found = ranked([keys, changed_keys])
        side = TableSide(self.step_name, self.table, self._columns.right_needs, changes, found.ranks[1], missing)
        piles = Piles(self.step_name, state, found.keys, sections=1, marks=0)
        side.load(piles, 0, marked(len(piles), found.ranks[0]))
        versions = side.versions()
        writer = PileWriter(piles)
        side.store(writer, 0, versions)
        writer.save()
        return self._joined(rows, found, versions, side.rows)

    def _joined(self, rows: pa.Table, found: Ranked, versions: Versions, table_rows: Rows) -> pa.Table:
        order = found.orders[0]
        ticks = ticks_of(rows)[order]
        begin = bounds(found.ranks[0][order], len(found.keys))
        first, end = begin[versions.keys], begin[versions.keys + 1]
        low = search(ticks, first, end, versions.start, right=False)
        high = search(ticks, first, end, versions.end, right=False)
        version, row = pairs(low, high)
        if self.how == "left":
            alone = np.ones(len(order), np.bool_)
            alone[row] = False
            alone_rows = np.flatnonzero(alone)
            row, version = np.concatenate([row, alone_rows]), np.concatenate([version, np.full(len(alone_rows), -1)])
        in_order = sorting(ticks[row], row, version)
        row, version = row[in_order], version[in_order]
        stream_rows = Rows(self._columns.left_needs, _NO_ROWS, rows)
        columns = self._columns.arrays(stream_rows, order[row], table_rows, np.append(versions.row, -1)[version])
        return pa.Table.from_arrays([*columns, pa.array(ticks[row])], schema=self.output.append(pa.field(TICK, pa.int64(), nullable=False)))
