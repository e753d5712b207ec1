"""Aggregates per group: from rows of a stream or changes of a table to a table with one row for each group, told by its changes.

The kernel groups rows by key and tick, fetches the states of all touched keys at once, lets each accumulator go through all segments, and stores
all states at once. For aggregates that allow it, `combine` does the first half before the shuffle, and the kernel takes in what it made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import BugError, InputError, UnknownColumn
from headrace.operators.accumulators.accumulator import Accumulator, Advanced, Columns, Monoid, Tails
from headrace.operators.accumulators.build import build
from headrace.operators.accumulators.counts import CountRows
from headrace.operators.accumulators.customs import Raised
from headrace.operators.accumulators.keeper import Full
from headrace.operators.buffers import Ints, Mask
from headrace.operators.changelog import Changes, changes, differs
from headrace.operators.combining import pays
from headrace.operators.diverted import Diverted
from headrace.operators.failures import AggregateFailed, GroupFull
from headrace.operators.kernel import CHANGE_TYPE, TICK, KeyedState
from headrace.operators.keys import canonical, encode_keys, key_list, whole
from headrace.operators.layout import Layout, kept
from headrace.operators.segments import Segments, cut
from headrace.operators.specs import AggregateSpec, result_type

Part = tuple[Columns, Tails | None]
PARTIAL = "_partial"
_TICK_FIELD = pa.field(TICK, pa.int64(), nullable=False)


class AggregateKernel:
    """Aggregates by group.

    `step` names it in errors, `row_key` is the key of the table it reads, if it reads one. With `divert`, rows that a user's own aggregate raises on are left
    out of it. What is left out of an aggregate is found in `diverted`, and `lost` counts the results that could not be told (null) by aggregate.
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
        self.step_name, self.schema, self.by, self.aggregates = step, schema, tuple(by), tuple(aggregates)
        self.over_table, self.row_key = over_table, tuple(row_key)
        self._check()
        self._rows = CountRows()
        self._accumulators: list[Accumulator] = [
            build(spec, schema, over_table=over_table, row_key=row_key, divert=divert) for _, spec in self.aggregates
        ]
        # The group's own row count is in every state: a count of rows needs no second one.
        self._layout = Layout([each for each in self._accumulators if type(each) is not CountRows])
        self.diverted = Diverted(schema)
        self.lost: dict[str, int] = {}

    def _check(self) -> None:
        used = [*self.by, *self.row_key, *(spec.column for _, spec in self.aggregates if spec.column is not None)]
        if missing := [name for name in used if name not in self.schema.names]:
            raise UnknownColumn(missing[0], self.schema.names, where=f"The input of step {self.step_name!r}")
        names = [*self.by, *(name for name, _ in self.aggregates)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise InputError(f"Step {self.step_name!r} has two results named {min(twice)!r}.", fix="give each aggregate a name of its own.")

    @cached_property
    def output(self) -> pa.Schema:
        keys = [self.schema.field(name) for name in self.by]
        results = [pa.field(name, result_type(spec, self._type(spec))) for name, spec in self.aggregates]
        return pa.schema([*keys, *results, pa.field(CHANGE_TYPE, pa.string(), nullable=False)])

    def _type(self, spec: AggregateSpec) -> pa.DataType | None:
        return None if spec.column is None else self.schema.field(spec.column).type

    # The step

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """1. Cut rows into segments. 2. Get the states. 3. Go through all segments. 4. Put the states. 5. Tell what changed."""
        if not rows.num_rows:
            return self.output.append(_TICK_FIELD).empty_table()
        if PARTIAL in rows.schema.names:
            rows = self._all_combined(rows)
        segments = cut(rows, encode_keys(rows, self.by))
        keys = key_list(segments.keys)
        stored, parts = self._layout.unpacked(state.get(keys))
        counted, advanced = self._advance(segments, stored, parts)
        newest = counted.columns[0]
        state.put(keys, kept(self._layout.packed(newest, self._parts(advanced)), newest))
        told = changes(segments, counted.results.to_numpy() > 0, self._differs(advanced, segments))
        self._keep_account(segments, advanced, told)
        return self._table(segments, advanced, told)

    def _advance(self, segments: Segments, stored: Ints, parts: list[Part]) -> tuple[Advanced, list[Advanced]]:
        """The row counts, and each aggregate in its turn."""
        if PARTIAL in segments.rows.schema.names:
            return self._advance_by_partials(segments, stored, parts)
        counted = self._rows.advance((stored,), None, segments)
        segments = replace(segments, exists=self._exists(counted, segments))
        remaining = iter(parts)
        advanced = []
        for (name, _), each in zip(self.aggregates, self._accumulators, strict=True):
            advanced.append(counted if type(each) is CountRows else self._advance_one(name, each, next(remaining), segments))
        return counted, advanced

    def _advance_one(self, name: str, accumulator: Accumulator, part: Part, segments: Segments) -> Advanced:
        try:
            return accumulator.advance(*part, segments)
        except Full as full:
            group = self._group(segments, full.key)
            raise GroupFull(step=self.step_name, aggregate=name, group=group, most=full.most) from None
        except Raised as raised:
            row = None if raised.row is None else segments.rows.slice(int(segments.order[raised.row]), 1).to_pylist()[0]
            cause = f"{type(raised.cause).__name__}: {raised.cause}"
            raise AggregateFailed(step=self.step_name, aggregate=name, row=row, cause=cause, trace=raised.trace) from raised.cause

    def _exists(self, counted: Advanced, segments: Segments) -> Mask:
        count = counted.results.to_numpy()
        if count.min() < 0:
            key = int(np.searchsorted(segments.before_all, int(np.argmin(count)), side="right")) - 1
            raise BugError(f"Step {self.step_name!r} was told that rows go which never came, in the group {self._group(segments, key)!r}.")
        exists: Mask = count > 0
        return exists

    def _group(self, segments: Segments, key: int) -> dict[str, Any]:
        row = int(segments.order[segments.starts[segments.firsts[key]]])
        return {name: segments.rows.column(name)[row].as_py() for name in self.by}

    def _parts(self, advanced: list[Advanced]) -> list[Part]:
        pairs = zip(advanced, self._accumulators, strict=True)
        return [(each.columns, each.tails) for each, accumulator in pairs if type(accumulator) is not CountRows]

    @staticmethod
    def _differs(advanced: list[Advanced], segments: Segments) -> Mask:
        unlike = np.zeros(len(segments), np.bool_)
        before, after = pa.array(segments.after - 1), pa.array(segments.after)
        for each in advanced:
            if not unlike.all():
                unlike |= differs(each.results.take(before), each.results.take(after))
        return unlike

    # The result

    def _table(self, segments: Segments, advanced: list[Advanced], told: Changes) -> pa.Table:
        row = pa.array(segments.order[segments.starts[told.segments]])
        columns = [canonical(whole(segments.rows.column(name)).take(row)) for name in self.by]
        versions = pa.array(told.versions)
        columns += [each.results.take(versions) for each in advanced]
        columns += [told.names(), pa.array(segments.ticks[told.segments])]
        return pa.Table.from_arrays(columns, schema=self.output.append(_TICK_FIELD))

    def _keep_account(self, segments: Segments, advanced: list[Advanced], told: Changes) -> None:
        """Of results that could not be told, and of rows that were left out."""
        shown = told.versions[told.comes]
        for (name, _), each in zip(self.aggregates, advanced, strict=True):
            if each.lost is not None and (lost := int(np.count_nonzero(each.lost[shown]))):
                self.lost[name] = self.lost.get(name, 0) + lost
            for left_out in each.left_out:
                self.diverted.add(segments.rows, segments.order[left_out.rows], name, left_out.reason)

    # Combining before the shuffle

    @property
    def combinable(self) -> bool:
        """Whether rows may be combined before the shuffle: if every aggregate's states can be put together exactly."""
        return all(each.combinable for each in self._accumulators)

    def worth_combining(self, rows: pa.Table) -> bool:
        """Whether `combine` would make these rows far fewer. It decides about speed alone."""
        return self.combinable and pays(rows, self.by)

    def combine(self, rows: pa.Table) -> pa.Table:
        """Rows as fewer rows, one for each group and tick, that `step` takes in their stead. It does not matter which rows come together.

        The result has the group's columns, the system columns of the group's first row, and `_partial`, a state as it is stored. Rows that were not
        combined may come to `step` beside it, with a null `_partial`.
        """
        rows = _by_tick(rows)
        segments = cut(rows, encode_keys(rows, self.by))
        (counted,) = self._rows.lift(segments)
        kept = [self._lifted(each, segments) for each in self._accumulators if type(each) is not CountRows]
        first = rows.select([*self.by, *(name for name in rows.schema.names if name in _ORDER)]).take(pa.array(segments.order[segments.starts]))
        return _by_tick(first.append_column(pa.field(PARTIAL, pa.binary()), self._layout.packed_array(counted, kept)))

    def _all_combined(self, rows: pa.Table) -> pa.Table:
        """Where only some rows were combined, the others too; where none was, rows as they are."""
        partial = rows.column(PARTIAL)
        if partial.null_count == 0:
            return rows
        plain = rows.drop_columns([PARTIAL])
        if partial.null_count == len(partial):
            return plain
        combined = self.combine(plain.filter(partial.is_null()))
        return _by_tick(pa.concat_tables([rows.filter(partial.is_valid()).select(combined.schema.names), combined]))

    @staticmethod
    def _lifted(accumulator: Accumulator, segments: Segments) -> Part:
        assert isinstance(accumulator, Monoid)
        return accumulator.closed(accumulator.lift(segments))

    def _advance_by_partials(self, segments: Segments, stored: Ints, parts: list[Part]) -> tuple[Advanced, list[Advanced]]:
        rows, partials = self._layout.unpacked_array(whole(segments.rows.column(PARTIAL)))
        counted = self._rows.advance_by((stored,), None, ((rows,), None), segments)
        self._exists(counted, segments)
        pairs = iter(zip(parts, partials, strict=True))
        advanced = []
        for each in self._accumulators:
            if type(each) is CountRows:
                advanced.append(counted)
                continue
            assert isinstance(each, Monoid)
            part, partial = next(pairs)
            advanced.append(each.advance_by(*part, partial, segments))
        return counted, advanced


_ORDER = (TICK, "_rank", "_partition", "_offset")


def _by_tick(rows: pa.Table) -> pa.Table:
    ticks = whole(rows.column(TICK)).to_numpy()
    return rows if (ticks[1:] >= ticks[:-1]).all() else rows.take(pa.array(np.argsort(ticks, kind="stable")))
