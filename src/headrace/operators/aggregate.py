"""Aggregates per group: from rows of a stream or changes of a table to a table with one row for each group, told by its changes.

The kernel groups rows by key and tick, fetches the states of all touched keys at once, lets each accumulator go through all segments, and stores
all states at once. For aggregates that allow it, `combine` does the first half before the shuffle, and the kernel takes in what it made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.errors import BugError, InputError, UnknownColumn
from headrace.operators.accumulators.accumulator import Accumulator, Advanced, Columns, Monoid, Tails
from headrace.operators.accumulators.build import build
from headrace.operators.accumulators.counts import CountRows
from headrace.operators.buffers import fixed_width
from headrace.operators.changelog import Changes, changes, differs
from headrace.operators.kernel import CHANGE_TYPE, PARTITION, TICK, KeyedState
from headrace.operators.keys import canonical, encode_keys, whole
from headrace.operators.layout import Layout, kept
from headrace.operators.segments import Ints, Mask, Segments, cut
from headrace.operators.specs import AggregateSpec, result_type

Part = tuple[Columns, Tails | None]
PARTIAL = "_partial"
ORDER = (TICK, "_rank", PARTITION, "_offset")


class AggregateKernel:
    """Aggregates by group. `step` names it in errors; `counts` says how often each aggregate's result could not be told."""

    def __init__(
        self,
        step: str,
        schema: pa.Schema,
        by: Sequence[str],
        aggregates: Sequence[tuple[str, AggregateSpec]],
        *,
        over_table: bool = False,
    ) -> None:
        self.step_name, self.schema, self.by, self.aggregates, self.over_table = step, schema, tuple(by), tuple(aggregates), over_table
        self._check()
        self._rows = CountRows()
        self._accumulators: list[Accumulator] = [build(spec, schema, over_table=over_table) for _, spec in self.aggregates]
        # The group's own row count is in every state: a count of rows needs no second one.
        self._kept = [each for each in self._accumulators if type(each) is not CountRows]
        self._layout = Layout(self._kept)
        self.counts: dict[str, int] = {}

    def _check(self) -> None:
        used = [*self.by, *(spec.column for _, spec in self.aggregates if spec.column is not None)]
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
        if not rows.num_rows:
            return self._empty()
        segments = cut(rows, encode_keys(rows, self.by))
        keys = key_list(segments.keys)
        stored, parts = self._layout.unpacked(state.get(keys))
        counted, advanced = self._advance(segments, stored, parts)
        exists = self._exists(counted, segments)
        told = changes(segments, exists, self._differs(advanced, segments))
        newest = counted.columns[0]
        values = self._layout.packed(newest, [(each.columns, each.tails) for each in self._of_kept(advanced)])
        state.put(keys, kept(values, newest))
        self._count_lost(advanced, told)
        return self._table(segments, advanced, told)

    def _advance(self, segments: Segments, stored: Ints, parts: list[Part]) -> tuple[Advanced, list[Advanced]]:
        """The row counts, and each aggregate in its turn."""
        if PARTIAL in segments.rows.schema.names:
            return self._advance_by_partials(segments, stored, parts)
        counted = self._rows.advance((stored,), None, segments)
        remaining = iter(parts)
        return counted, [counted if type(each) is CountRows else each.advance(*next(remaining), segments) for each in self._accumulators]

    def _advance_by_partials(self, segments: Segments, stored: Ints, parts: list[Part]) -> tuple[Advanced, list[Advanced]]:
        rows, partials = self._layout.unpacked(whole(segments.rows.column(PARTIAL)).to_pylist())
        counted = self._rows.advance_by((stored,), None, ((rows,), None), segments)
        pairs = iter(zip(parts, partials, strict=True))
        advanced = []
        for each in self._accumulators:
            if type(each) is CountRows:
                advanced.append(counted)
            else:
                assert isinstance(each, Monoid)
                (columns, tails), partial = next(pairs)
                advanced.append(each.advance_by(columns, tails, partial, segments))
        return counted, advanced

    def _of_kept(self, advanced: list[Advanced]) -> list[Advanced]:
        return [each for each, accumulator in zip(advanced, self._accumulators, strict=True) if type(accumulator) is not CountRows]

    def _exists(self, counted: Advanced, segments: Segments) -> Mask:
        count = counted.results.to_numpy()
        if count.min() < 0:
            at = int(np.searchsorted(segments.before_all, int(np.argmin(count)), side="right")) - 1
            row = {name: segments.rows.column(name)[int(segments.order[segments.starts[segments.firsts[at]]])].as_py() for name in self.by}
            raise BugError(f"Step {self.step_name!r} was told that rows go which never came, in the group {row}.")
        exists: Mask = count > 0
        return exists

    @staticmethod
    def _differs(advanced: list[Advanced], segments: Segments) -> Mask:
        unlike = np.zeros(len(segments), np.bool_)
        before, after = pa.array(segments.after - 1), pa.array(segments.after)
        for each in advanced:
            if unlike.all():
                break
            unlike |= differs(each.results.take(before), each.results.take(after))
        return unlike

    def _count_lost(self, advanced: list[Advanced], told: Changes) -> None:
        shown = told.versions[(told.kinds == 0) | (told.kinds == 2)]
        for (name, _), each in zip(self.aggregates, advanced, strict=True):
            if each.lost is not None and (lost := int(np.count_nonzero(each.lost[shown]))):
                self.counts[name] = self.counts.get(name, 0) + lost

    # The result

    def _table(self, segments: Segments, advanced: list[Advanced], told: Changes) -> pa.Table:
        row = pa.array(segments.order[segments.starts[told.segments]])
        columns = [canonical(whole(segments.rows.column(name)).take(row)) for name in self.by]
        versions = pa.array(told.versions)
        columns += [each.results.take(versions) for each in advanced]
        columns += [told.names(), pa.array(segments.ticks[told.segments])]
        return pa.Table.from_arrays(columns, schema=self.output.append(pa.field(TICK, pa.int64(), nullable=False)))

    def _empty(self) -> pa.Table:
        return self.output.append(pa.field(TICK, pa.int64(), nullable=False)).empty_table()

    # Combining

    @property
    def combinable(self) -> bool:
        """Whether rows may be combined before the shuffle: if every aggregate's states can be put together exactly."""
        return all(each.combinable for each in self._accumulators)


def key_list(keys: pa.Array) -> list[bytes]:
    """Keys as Python's bytes, for the state."""
    if pa.types.is_fixed_size_binary(keys.type):
        fixed: list[bytes] = fixed_width(keys, f"V{keys.type.byte_width}").tolist()
        return fixed
    varying: list[bytes] = keys.to_pylist()
    return varying
