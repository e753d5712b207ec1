"""Aggregates per group: from rows of a stream or changes of a table to a table with one row for
each group, told by its changes.

The kernel groups rows by key and tick, fetches the states of all touched keys at once, lets each
accumulator go through all segments, and stores all states at once. For aggregates that allow it,
`combine` does the first half before the shuffle, and the kernel takes in what it made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import pyarrow as pa

from headrace.columnar.columns import CHANGE_FIELD, TICK_FIELD
from headrace.columnar.keys import canonical, decode_keys, encode_keys, whole
from headrace.columnar.segments import Segments, cut
from headrace.errors import PlanError
from headrace.operators.aggregates.aggregation import (
    ORDER,
    PARTIAL,
    Aggregation,
    Outcome,
    all_combined,
    by_tick,
    kept_array,
    pays,
)
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.changelog import Changes, changes
from headrace.operators.kernel import KeyedState, no_rows

__all__ = ["PARTIAL", "AggregateKernel"]


class AggregateKernel:
    """Aggregates by group.

    `step` names it in errors, `row_key` is the key of the table it reads, if it reads one. With
    `divert`, rows that a user's own aggregate raises on are left out of it. What is left out of an
    aggregate is found in `diverted`, and `lost` counts the results that could not be told (null) by
    aggregate.
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
        self.step_name, self.schema, self.by, self.aggregates = (
            step,
            schema,
            tuple(by),
            tuple(aggregates),
        )
        self.over_table, self.row_key = over_table, tuple(row_key)
        if rates := [name for name, spec in self.aggregates if spec.kind == "rate"]:
            raise PlanError(
                f"{rates[0]!r} of the step {step!r} is a rate, which is by the length of a window,"
                " and there is none.",
                fix="use window(…) before it.",
            )
        self._aggregation = Aggregation(
            step, schema, by, aggregates, over_table=over_table, row_key=row_key, divert=divert
        )
        self._layout = self._aggregation.layout
        self.diverted, self.lost = self._aggregation.diverted, self._aggregation.lost

    @cached_property
    def output(self) -> pa.Schema:
        keys = [self.schema.field(name) for name in self.by]
        return pa.schema([*keys, *self._aggregation.fields, CHANGE_FIELD])

    # The step

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """1. Cut rows into segments. 2. Get the states. 3. Go through all segments. 4. Put the
        states. 5. Tell what changed.
        """
        if not rows.num_rows:
            return self.output.append(TICK_FIELD).empty_table()
        if PARTIAL in rows.schema.names:
            rows = all_combined(rows, self.combine)
        segments = cut(rows, encode_keys(rows, self.by))
        stored, parts = self._layout.unpacked_array(state.get_array(segments.keys))
        outcome = self._aggregation.advance(segments, stored, parts)
        state.put_array(
            segments.keys,
            kept_array(self._layout.packed_array(outcome.rows, outcome.parts), outcome.rows),
        )
        told = changes(
            segments, outcome.exists, outcome.differs(segments.after - 1, segments.after)
        )
        self._aggregation.keep_account(segments, outcome, told.versions[told.comes])
        return self._table(segments, outcome, told)

    def _table(self, segments: Segments, outcome: Outcome, told: Changes) -> pa.Table:
        row = pa.array(segments.order[segments.starts[told.segments]])
        columns = [canonical(whole(segments.rows.column(name)).take(row)) for name in self.by]
        columns += outcome.results(told.versions)
        columns += [told.names(), pa.array(segments.ticks[told.segments])]
        return pa.Table.from_arrays(columns, schema=self.output.append(TICK_FIELD))

    # Looking at what is stored

    @property
    def key_fields(self) -> list[pa.Field]:
        return [self.schema.field(name) for name in self.by]

    def describe(self, keys: pa.Array, values: pa.Array) -> pa.Table:
        """The group's columns, how many rows it has, and what its aggregates amount to."""
        stored, parts = self._layout.unpacked_array(values)
        segments = no_rows(self.schema, len(keys), over_table=self.over_table)
        results = self._aggregation.advance(segments, stored, parts).results(segments.before_all)
        columns = {
            **dict(zip(self.by, decode_keys(keys, self.key_fields), strict=True)),
            "_rows": pa.array(stored),
        }
        return pa.table(
            columns | dict(zip((name for name, _ in self.aggregates), results, strict=True))
        )

    # Combining before the shuffle

    @property
    def combinable(self) -> bool:
        """Whether rows may be combined before the shuffle: if every aggregate's states can be put
        together exactly.
        """
        return self._aggregation.combinable

    def worth_combining(self, rows: pa.Table) -> bool:
        """Whether `combine` would make these rows far fewer. It decides about speed alone."""
        return self.combinable and pays(rows, self.by)

    def combine(self, rows: pa.Table) -> pa.Table:
        """Rows as fewer rows, one for each group and tick, that `step` takes in their stead. It
        does not matter which rows come together.

        The result has the group's columns, the system columns of the group's first row, and
        `_partial`, a state as it is stored. Rows that were not combined may come to `step` beside
        it, with a null `_partial`.
        """
        rows = by_tick(rows)
        segments = cut(rows, encode_keys(rows, self.by))
        first = rows.select(
            [*self.by, *(name for name in rows.schema.names if name in ORDER)]
        ).take(pa.array(segments.order[segments.starts]))
        return by_tick(
            first.append_column(
                pa.field(PARTIAL, pa.binary()), self._aggregation.partials(segments)
            )
        )
