"""Aggregates per group: from a stream or a table to a table with one row per group.

`count()` and `sum(v)` by `k`, over a stream:

    rows in                   state after               rows out
    tick 1: k=a v=1; k=b v=5  a -> rows 1, sum 1        insert a 1 1; insert b 1 5
                              b -> rows 1, sum 5
    tick 2: k=a v=2; k=a v=3  a -> rows 3, sum 6        update_preimage a 1 1;
                                                        update_postimage a 3 6

Over a table, a row that is removed (`delete`, `update_preimage`) is retracted from its group, and a
group without rows is deleted. The kernel cuts rows by group and tick, reads the states of all
touched groups at once, advances each accumulator through all segments, and stores all states at
once. `combine` does the first half before the shuffle (see `partial_aggregation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import pyarrow as pa

from headrace.columnar.columns import CHANGE_FIELD, TICK_FIELD
from headrace.columnar.keys import as_array, canonicalize, decode_keys, encode_keys
from headrace.columnar.segments import segment_rows
from headrace.errors import PlanError
from headrace.operators.aggregates.aggregation import (
    AggregateSet,
    delete_empty_array,
)
from headrace.operators.aggregates.partial_aggregation import (
    ORDER,
    PARTIAL,
    by_tick,
    combine_rest,
    is_worth_combining,
)
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.changelog import segment_changes
from headrace.operators.kernel import KeyedState, empty_segments


class AggregateKernel:
    """Aggregates by group.

    After each call, `dead_letters` holds the rows that an aggregate rejected; `unknown_results`
    counts by aggregate the emitted results that are null because they are unknown, and `left_out`
    the rows beyond an aggregate's limit that made them so.

    Args:
        step: The step's name, for errors.
        schema: The columns of the input.
        by: The columns of a group.
        aggregates: The names and specs of the results.
        over_table: Whether the input is a table's changes.
        row_key: The key of that table.
        divert: Whether rows that a user's own aggregate raises on are rejected; else they stop the
            query.
    """

    def __init__(
        self,
        step: str,
        schema: pa.Schema,
        by: Sequence[str],
        aggregates: Sequence[tuple[str, AggregateSpec]],
        *,
        over_table: bool = False,
        row_key: Sequence[str] = (),
        divert: bool = False,
    ) -> None:
        self.step_name = step
        self.schema = schema
        self.by = tuple(by)
        self.aggregates = tuple(aggregates)
        self.over_table = over_table
        self.row_key = tuple(row_key)
        if rates := [name for name, spec in self.aggregates if spec.kind == "rate"]:
            raise PlanError(
                f"The result {rates[0]!r} of the step {step!r} is a rate, which needs a window, and"
                " the step has none.",
                fix="use window(…) before group_by.",
            )
        self._aggregation = AggregateSet(
            step, schema, by, aggregates, over_table=over_table, row_key=row_key, divert=divert
        )
        self._layout = self._aggregation.layout
        self.dead_letters = self._aggregation.dead_letters
        self.unknown_results = self._aggregation.unknown_results
        self.left_out = self._aggregation.left_out

    @cached_property
    def output(self) -> pa.Schema:
        keys = [self.schema.field(name) for name in self.by]
        return pa.schema([*keys, *self._aggregation.fields, CHANGE_FIELD])

    # The step

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """1. Cut rows by group and tick. 2. Read states. 3. Advance. 4. Store. 5. Emit changes."""
        if not rows.num_rows:
            return self.output.append(TICK_FIELD).empty_table()
        if PARTIAL in rows.schema.names:
            rows = combine_rest(rows, self.combine)
        segments = segment_rows(rows, encode_keys(rows, self.by))
        stored, parts = self._layout.unpack_array(state.get_array(segments.keys))
        outcome = self._aggregation.advance(segments, stored, parts)
        state.put_array(
            segments.keys,
            delete_empty_array(self._layout.pack_array(outcome.rows, outcome.parts), outcome.rows),
        )
        emitted = segment_changes(
            segments, outcome.exists, outcome.differs(segments.after - 1, segments.after)
        )
        self._aggregation.record_rejected(segments, outcome, emitted.versions[emitted.additions])
        row = pa.array(segments.order[segments.starts[emitted.segments]])
        columns = [canonicalize(as_array(segments.rows.column(name)).take(row)) for name in self.by]
        columns += outcome.results(emitted.versions)
        columns += [emitted.names(), pa.array(segments.ticks[emitted.segments])]
        return pa.Table.from_arrays(columns, schema=self.output.append(TICK_FIELD))

    # Expiry: see `headrace.operators.expiry`

    def forget(self, state: KeyedState, keys: pa.Array) -> None:
        """Delete the states of some groups."""
        state.put_array(keys, pa.nulls(len(keys), pa.binary()))

    def stored_rows(self, state: KeyedState, keys: pa.Array) -> pa.Table:
        """The present rows of those of the groups that have one."""
        values = state.get_array(keys)
        is_stored = values.is_valid()
        rows = self.describe(keys.filter(is_stored), values.filter(is_stored))
        names = [name for name in self.output.names if name != CHANGE_FIELD.name]
        return rows.select(names).cast(self.output.remove(len(names)))

    # Inspection of stored state

    @property
    def key_fields(self) -> list[pa.Field]:
        return [self.schema.field(name) for name in self.by]

    def describe(self, keys: pa.Array, values: pa.Array) -> pa.Table:
        """The columns of each group, its number of rows, and its results."""
        stored, parts = self._layout.unpack_array(values)
        segments = empty_segments(self.schema, len(keys), over_table=self.over_table)
        results = self._aggregation.advance(segments, stored, parts).results(
            segments.initial_versions
        )
        columns = {
            **dict(zip(self.by, decode_keys(keys, self.key_fields), strict=True)),
            "_rows": pa.array(stored),
        }
        return pa.table(
            columns | dict(zip((name for name, _ in self.aggregates), results, strict=True))
        )

    # Partial aggregation before the shuffle

    @property
    def combinable(self) -> bool:
        """Whether rows may be combined before the shuffle: whether every aggregate's states can be
        merged.
        """
        return self._aggregation.combinable

    def is_worth_combining(self, rows: pa.Table) -> bool:
        """Whether `combine` would leave far fewer rows. The answer affects speed only."""
        return self.combinable and is_worth_combining(rows, self.by)

    def combine(self, rows: pa.Table) -> pa.Table:
        """Combine the rows of each group and tick into one, which `step` accepts instead.

        A combined row has the group's columns, the system columns of its first row, and `_partial`,
        the state of its rows. It does not matter which rows are combined; rows that are not may
        come to `step` in the same call, with a null `_partial`.
        """
        rows = by_tick(rows)
        segments = segment_rows(rows, encode_keys(rows, self.by))
        first = rows.select(
            [*self.by, *(name for name in rows.schema.names if name in ORDER)]
        ).take(pa.array(segments.order[segments.starts]))
        return by_tick(
            first.append_column(
                pa.field(PARTIAL, pa.binary()), self._aggregation.partials(segments)
            )
        )
