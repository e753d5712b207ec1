"""Several aggregates over the same groups: how all their states go through segments together. What every kernel that aggregates has in common.

A kernel decides what a group is, and where its state is kept; here states become states, and results, and an account of what was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from headrace.operators.changelog import differs
from headrace.operators.combining import PARTIAL
from headrace.operators.diverted import Diverted
from headrace.operators.failures import AggregateFailed, GroupFull
from headrace.operators.keys import whole
from headrace.operators.layout import Layout
from headrace.operators.segments import Segments
from headrace.operators.specs import AggregateSpec, result_type

Part = tuple[Columns, Tails | None]


@dataclass(frozen=True)
class Outcome:
    """What became of all groups: their newest states, and their results at every version."""

    counted: Advanced
    advanced: list[Advanced]
    parts: list[Part]

    @property
    def rows(self) -> Ints:
        """The number of rows that each group has now."""
        newest: Ints = self.counted.columns[0]
        return newest

    @cached_property
    def exists(self) -> Mask:
        """For each version whether the group has rows."""
        there: Mask = self.counted.results.to_numpy() > 0
        return there

    def differs(self, before: Ints, after: Ints) -> Mask:
        """Which of these pairs of versions have different results."""
        unlike = np.zeros(len(before), np.bool_)
        left, right = pa.array(before), pa.array(after)
        for each in self.advanced:
            if not unlike.all():
                unlike |= differs(each.results.take(left), each.results.take(right))
        return unlike

    def results(self, versions: Ints) -> list[pa.Array]:
        """The results of some versions, a column for each aggregate."""
        which = pa.array(versions)
        return [each.results.take(which) for each in self.advanced]


class Aggregation:
    """The aggregates of one step. `by` names a group in errors; with `divert`, rows that a user's own aggregate raises on are left out of it.

    What is left out of an aggregate is found in `diverted`, and `lost` counts the results that could not be told (null) by aggregate.
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
        self._check(row_key)
        self._rows = CountRows()
        self.accumulators: list[Accumulator] = [
            build(spec, schema, over_table=over_table, row_key=row_key, divert=divert) for _, spec in self.aggregates
        ]
        # The group's own row count is in every state: a count of rows needs no second one.
        self.layout = Layout([each for each in self.accumulators if type(each) is not CountRows])
        self.diverted = Diverted(schema)
        self.lost: dict[str, int] = {}

    def _check(self, row_key: Sequence[str]) -> None:
        used = [*self.by, *row_key, *(name for _, spec in self.aggregates for name in spec.reads)]
        if missing := [name for name in used if name not in self.schema.names]:
            raise UnknownColumn(missing[0], self.schema.names, where=f"The input of step {self.step_name!r}")
        names = [*self.by, *(name for name, _ in self.aggregates)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise InputError(f"Step {self.step_name!r} has two results named {min(twice)!r}.", fix="give each aggregate a name of its own.")

    @property
    def fields(self) -> list[pa.Field]:
        """The results' columns."""
        return [pa.field(name, result_type(spec, self._type(spec))) for name, spec in self.aggregates]

    def _type(self, spec: AggregateSpec) -> pa.DataType | None:
        return None if spec.column is None else self.schema.field(spec.column).type

    # From states to states

    def advance(self, segments: Segments, stored: Ints, parts: list[Part]) -> Outcome:
        """Each aggregate through all segments, from the states that groups had: their numbers of rows, and each accumulator's part."""
        if PARTIAL in segments.rows.schema.names:
            counted, advanced = self._advance_by_partials(segments, stored, parts)
        else:
            counted, advanced = self._advance(segments, stored, parts)
        pairs = zip(advanced, self.accumulators, strict=True)
        return Outcome(counted, advanced, [(each.columns, each.tails) for each, accumulator in pairs if type(accumulator) is not CountRows])

    def _advance(self, segments: Segments, stored: Ints, parts: list[Part]) -> tuple[Advanced, list[Advanced]]:
        """The row counts, and each aggregate in its turn."""
        counted = self._rows.advance((stored,), None, segments)
        segments = replace(segments, exists=self._exists(counted, segments))
        remaining = iter(parts)
        advanced = []
        for (name, _), each in zip(self.aggregates, self.accumulators, strict=True):
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
        if len(count) and count.min() < 0:
            key = int(np.searchsorted(segments.before_all, int(np.argmin(count)), side="right")) - 1
            raise BugError(f"Step {self.step_name!r} was told that rows go which never came, in the group {self._group(segments, key)!r}.")
        exists: Mask = count > 0
        return exists

    def _group(self, segments: Segments, key: int) -> dict[str, Any]:
        row = int(segments.order[segments.starts[segments.firsts[key]]])
        return {name: segments.rows.column(name)[row].as_py() for name in self.by}

    def keep_account(self, segments: Segments, outcome: Outcome, shown: Ints) -> None:
        """Of results that could not be told, among the versions that are shown; and of rows that were left out."""
        self.count_lost(outcome, shown)
        for (name, _), each in zip(self.aggregates, outcome.advanced, strict=True):
            for left_out in each.left_out:
                self.diverted.add(segments.rows, segments.order[left_out.rows], name, left_out.reason)

    def count_lost(self, outcome: Outcome, shown: Ints) -> None:
        """Count the results that could not be told."""
        for (name, _), each in zip(self.aggregates, outcome.advanced, strict=True):
            if each.lost is not None and (lost := int(np.count_nonzero(each.lost[shown]))):
                self.lost[name] = self.lost.get(name, 0) + lost

    # Combining before the shuffle

    @property
    def combinable(self) -> bool:
        """Whether rows may be combined before the shuffle: if every aggregate's states can be put together exactly."""
        return all(each.combinable for each in self.accumulators)

    def partials(self, segments: Segments) -> pa.Array:
        """The state of each segment's rows alone, as it is stored."""
        (counted,) = self._rows.lift(segments)
        return self.layout.packed_array(counted, [self._lifted(each, segments) for each in self.accumulators if type(each) is not CountRows])

    @staticmethod
    def _lifted(accumulator: Accumulator, segments: Segments) -> Part:
        assert isinstance(accumulator, Monoid)
        return accumulator.closed(accumulator.lift(segments))

    def _advance_by_partials(self, segments: Segments, stored: Ints, parts: list[Part]) -> tuple[Advanced, list[Advanced]]:
        rows, partials = self.layout.unpacked_array(whole(segments.rows.column(PARTIAL)))
        counted = self._rows.advance_by((stored,), None, ((rows,), None), segments)
        self._exists(counted, segments)
        pairs = iter(zip(parts, partials, strict=True))
        advanced = []
        for each in self.accumulators:
            if type(each) is CountRows:
                advanced.append(counted)
                continue
            assert isinstance(each, Monoid)
            part, partial = next(pairs)
            advanced.append(each.advance_by(*part, partial, segments))
        return counted, advanced
