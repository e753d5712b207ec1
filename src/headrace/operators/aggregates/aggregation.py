"""Several aggregates over the same groups: how their states advance together.

A kernel decides what a group is and where its state is stored. An `AggregateSet` takes the stored
states of groups and the rows cut into segments, and returns the new states, the results of every
version, and the rows that an aggregate rejected. `AggregateKernel` and all window kernels use it.

The state of a group (`StateLayout`):

    1 byte    version, 1; a state of zeros stands for an absent group
    8 bytes   the number of rows of the group
    ...       the fields of each accumulator, little-endian, without gaps
    ...       the tails of the accumulators that have one, in the same order; their lengths follow
              from the fields
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, as_binary, bytes_list, equal_length_values
from headrace.columnar.keys import as_array
from headrace.columnar.segments import Segments
from headrace.errors import BugError, InputError, NewerFormat, UnknownColumn
from headrace.operators.aggregates.accumulator import (
    Accumulator,
    AccumulatorOutcome,
    Columns,
    Monoid,
    Tails,
    TooManyValues,
)
from headrace.operators.aggregates.custom import CustomAggregateRaised
from headrace.operators.aggregates.factory import build
from headrace.operators.aggregates.partial_aggregation import PARTIAL
from headrace.operators.aggregates.specs import AggregateSpec, result_type
from headrace.operators.aggregates.sums import CountRows
from headrace.operators.changelog import differs
from headrace.operators.kernel import AggregateFailed, DeadLetterBuffer, GroupFull

VERSION = 1
Heads = npt.NDArray[np.void]


class StateLayout:
    """The states of many groups, from bytes to columns and back."""

    def __init__(self, accumulators: Sequence[Accumulator]) -> None:
        self.accumulators = accumulators
        fields = [("version", "u1"), ("rows", "<i8")]
        for at, accumulator in enumerate(accumulators):
            fields += [(f"{at}.{name}", kind) for name, kind in accumulator.fields]
        self.dtype = np.dtype(fields)
        self._nothing = bytes(self.dtype.itemsize)

    def unpack(
        self, values: Sequence[bytes | None]
    ) -> tuple[Ints, list[tuple[Columns, Tails | None]]]:
        """The number of rows of each group (0 for None, a new one), and each accumulator's part."""
        return self.unpack_array(pa.array(values, pa.binary()))

    def unpack_array(self, values: pa.Array) -> tuple[Ints, list[tuple[Columns, Tails | None]]]:
        """The number of rows of each group (0 for null, a new one), and each accumulator's part.

        States that all have the same width are read without a copy.
        """
        plain = equal_length_values(values)
        if plain is not None and plain.dtype.itemsize == self.dtype.itemsize:
            return self._from_heads(plain.view(self.dtype), None)
        if values.null_count == len(values):
            return self._from_heads(np.zeros(len(values), self.dtype), None)
        known = equal_length_values(values.drop_null())
        if known is not None and known.dtype.itemsize == self.dtype.itemsize:
            heads = np.zeros(len(values), self.dtype)
            heads[values.is_valid().to_numpy(zero_copy_only=False)] = known.view(self.dtype)
            return self._from_heads(heads, None)
        each = [self._nothing if value is None else value for value in values.to_pylist()]
        return self._from_heads(
            np.frombuffer(b"".join([value[: self.dtype.itemsize] for value in each]), self.dtype),
            each,
        )

    def _from_heads(
        self, heads: Heads, values: list[bytes] | None
    ) -> tuple[Ints, list[tuple[Columns, Tails | None]]]:
        """The row counts and parts from the fixed-width heads; `values` are whole states if some
        have tails.
        """
        self._check(heads)
        parts: list[tuple[Columns, Tails | None]] = []
        at = np.full(len(heads), self.dtype.itemsize)
        for number, accumulator in enumerate(self.accumulators):
            columns = self._columns(heads, number, accumulator)
            sizes = accumulator.tail_sizes(columns)
            tails = (
                None
                if sizes is None
                else [b""] * len(heads)
                if values is None
                else _slices(values, at, sizes)
            )
            parts.append((columns, tails))
            at = at if sizes is None else at + sizes
        return np.ascontiguousarray(heads["rows"]), parts

    def pack(self, rows: Ints, parts: Sequence[tuple[Columns, Tails | None]]) -> list[bytes]:
        """The bytes of each group's state."""
        return [value or b"" for value in bytes_list(self.pack_array(rows, parts))]

    def pack_array(self, rows: Ints, parts: Sequence[tuple[Columns, Tails | None]]) -> pa.Array:
        """The bytes of each group's state, as a column."""
        heads = self.heads(rows, [columns for columns, _ in parts]).view(f"V{self.dtype.itemsize}")
        tails = [tails for _, tails in parts if tails is not None]
        return (
            pa.array(map(b"".join, zip(heads.tolist(), *tails, strict=True)), pa.binary())
            if tails
            else as_binary(heads)
        )

    def heads(self, rows: Ints, parts: Sequence[Columns]) -> Heads:
        """The fixed-width part of each group's state."""
        heads = np.empty(len(rows), self.dtype)
        heads["version"], heads["rows"] = VERSION, rows
        for number, (accumulator, columns) in enumerate(zip(self.accumulators, parts, strict=True)):
            for (name, _), column in zip(accumulator.fields, columns, strict=True):
                heads[f"{number}.{name}"] = column
        return heads

    def _check(self, heads: Heads) -> None:
        if len(heads) and int(newest := heads["version"].max()) > VERSION:
            raise NewerFormat(
                f"A state has version {newest}, and this Headrace supports up to {VERSION}.",
                fix="run the newer Headrace that wrote it.",
            )

    @staticmethod
    def _columns(heads: Heads, number: int, accumulator: Accumulator) -> Columns:
        return tuple(
            np.ascontiguousarray(heads[f"{number}.{name}"]) for name, _ in accumulator.fields
        )


def _slices(values: Sequence[bytes], starts: Ints, sizes: Ints) -> list[bytes]:
    return [
        value[start:stop]
        for value, start, stop in zip(
            values, starts.tolist(), (starts + sizes).tolist(), strict=True
        )
    ]


def delete_empty(values: list[bytes], rows: Ints) -> list[bytes | None]:
    """The values to store, with None for groups without rows, which deletes them."""
    stays: Mask = rows != 0
    return (
        list(values)
        if stays.all()
        else [value if stay else None for value, stay in zip(values, stays.tolist(), strict=True)]
    )


def delete_empty_array(values: pa.Array, rows: Ints) -> pa.Array:
    """The column of values to store, with null for groups without rows, which deletes them."""
    stays: Mask = rows != 0
    return (
        values if stays.all() else pc.if_else(pa.array(stays), values, pa.scalar(None, values.type))
    )


Part = tuple[Columns, Tails | None]


@dataclass(frozen=True)
class AggregateOutcome:
    """The outcome of advancing all groups: their newest states, and the results of
    every version.
    """

    counted: AccumulatorOutcome
    advanced: list[AccumulatorOutcome]
    parts: list[Part]

    @property
    def rows(self) -> Ints:
        """The number of rows of each group now."""
        newest: Ints = self.counted.columns[0]
        return newest

    @cached_property
    def exists(self) -> Mask:
        """For each version, whether the group has rows."""
        there: Mask = self.counted.results.to_numpy() > 0
        return there

    def differs(self, before: Ints, after: Ints) -> Mask:
        """Which pairs of versions have different results."""
        unlike = np.zeros(len(before), np.bool_)
        left, right = pa.array(before), pa.array(after)
        for each in self.advanced:
            if not unlike.all():
                unlike |= differs(each.results.take(left), each.results.take(right))
        return unlike

    def results(self, versions: Ints) -> list[pa.Array]:
        """The results of some versions, one column per aggregate."""
        which = pa.array(versions)
        return [each.results.take(which) for each in self.advanced]


class AggregateSet:
    """The aggregates of one step.

    `by` are the columns of a group, for errors. With `divert`, rows that a user's own aggregate
    raises on are rejected instead of stopping the query. `dead_letters` collects the rejected rows,
    `unknown_results` counts by aggregate the emitted results that are null because they are
    unknown, and `left_out` the rows that made them so.
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
        self._check(row_key)
        self._rows = CountRows()
        self.accumulators: list[Accumulator] = [
            build(spec, schema, over_table=over_table, row_key=row_key, divert=divert)
            for _, spec in self.aggregates
        ]
        # Every state has the group's row count, so `count()` needs no state of its own.
        self.layout = StateLayout(
            [each for each in self.accumulators if type(each) is not CountRows]
        )
        self.dead_letters = DeadLetterBuffer(schema)
        self.unknown_results: dict[str, int] = {}
        self.left_out: dict[str, int] = {}

    def _check(self, row_key: Sequence[str]) -> None:
        used = [*self.by, *row_key, *(name for _, spec in self.aggregates for name in spec.reads)]
        if missing := [name for name in used if name not in self.schema.names]:
            raise UnknownColumn(
                missing[0], self.schema.names, where=f"The input of step {self.step_name!r}"
            )
        names = [*self.by, *(name for name, _ in self.aggregates)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise InputError(
                f"Step {self.step_name!r} has two results named {min(twice)!r}.",
                fix="give each aggregate a name of its own.",
            )

    @property
    def fields(self) -> list[pa.Field]:
        """The columns of the results."""
        return [
            pa.field(name, result_type(spec, self._type(spec))) for name, spec in self.aggregates
        ]

    def _type(self, spec: AggregateSpec) -> pa.DataType | None:
        return None if spec.column is None else self.schema.field(spec.column).type

    # From states to states

    def advance(self, segments: Segments, stored: Ints, parts: list[Part]) -> AggregateOutcome:
        """Advance all aggregates through all segments.

        Args:
            segments: The rows of a call, cut by group and tick.
            stored: The number of rows that each group had.
            parts: The state of each accumulator for each group.
        """
        if PARTIAL in segments.rows.schema.names:
            counted, advanced = self._advance_by_partials(segments, stored, parts)
        else:
            counted, advanced = self._advance(segments, stored, parts)
        pairs = zip(advanced, self.accumulators, strict=True)
        return AggregateOutcome(
            counted,
            advanced,
            [
                (each.columns, each.tails)
                for each, accumulator in pairs
                if type(accumulator) is not CountRows
            ],
        )

    def _advance(
        self, segments: Segments, stored: Ints, parts: list[Part]
    ) -> tuple[AccumulatorOutcome, list[AccumulatorOutcome]]:
        """Advance the row counts, then each aggregate in turn."""
        counted = self._rows.advance((stored,), None, segments)
        segments = replace(segments, exists=self._exists(counted, segments))
        remaining = iter(parts)
        advanced = []
        for (name, _), each in zip(self.aggregates, self.accumulators, strict=True):
            advanced.append(
                counted
                if type(each) is CountRows
                else self._advance_one(name, each, next(remaining), segments)
            )
        return counted, advanced

    def _advance_one(
        self, name: str, accumulator: Accumulator, part: Part, segments: Segments
    ) -> AccumulatorOutcome:
        try:
            return accumulator.advance(*part, segments)
        except TooManyValues as full:
            group = self._group(segments, full.key)
            raise GroupFull(
                step=self.step_name, aggregate=name, group=group, max_values=full.max_values
            ) from None
        except CustomAggregateRaised as raised:
            row = (
                None
                if raised.row is None
                else segments.rows.slice(int(segments.order[raised.row]), 1).to_pylist()[0]
            )
            cause = f"{type(raised.cause).__name__}: {raised.cause}"
            raise AggregateFailed(
                step=self.step_name, aggregate=name, row=row, cause=cause, trace=raised.trace
            ) from raised.cause

    def _exists(self, counted: AccumulatorOutcome, segments: Segments) -> Mask:
        """For each version, whether its group has rows. A negative count is a bug upstream."""
        count = counted.results.to_numpy()
        if len(count) and count.min() < 0:
            key = (
                int(np.searchsorted(segments.initial_versions, int(np.argmin(count)), side="right"))
                - 1
            )
            raise BugError(
                f"Step {self.step_name!r} received retractions of rows that it never received, in"
                f" the group {self._group(segments, key)!r}."
            )
        exists: Mask = count > 0
        return exists

    def _group(self, segments: Segments, key: int) -> dict[str, Any]:
        """The columns of a group, for errors."""
        row = int(segments.order[segments.starts[segments.firsts[key]]])
        return {name: segments.rows.column(name)[row].as_py() for name in self.by}

    def record_rejected(self, segments: Segments, outcome: AggregateOutcome, shown: Ints) -> None:
        """Record the unknown results among the emitted versions, and the rows that aggregates
        rejected or left out.
        """
        self.count_unknown(outcome, shown)
        for (name, _), each in zip(self.aggregates, outcome.advanced, strict=True):
            if each.left_out:
                self.left_out[name] = self.left_out.get(name, 0) + each.left_out
            for rejected in each.rejected:
                self.dead_letters.add(
                    segments.rows, segments.order[rejected.rows], name, rejected.reason
                )

    def count_unknown(self, outcome: AggregateOutcome, shown: Ints) -> None:
        """Count the unknown results among the emitted versions."""
        for (name, _), each in zip(self.aggregates, outcome.advanced, strict=True):
            if each.unknown is not None and (unknown := int(np.count_nonzero(each.unknown[shown]))):
                self.unknown_results[name] = self.unknown_results.get(name, 0) + unknown

    # Partial aggregation before the shuffle

    @property
    def combinable(self) -> bool:
        """Whether rows may be combined before the shuffle: whether every aggregate's states can be
        merged.
        """
        return all(each.combinable for each in self.accumulators)

    def partials(self, segments: Segments) -> pa.Array:
        """The state of each segment's rows alone, as it is stored."""
        (counted,) = self._rows.lift(segments)
        return self.layout.pack_array(
            counted,
            [
                self._lifted(each, segments)
                for each in self.accumulators
                if type(each) is not CountRows
            ],
        )

    @staticmethod
    def _lifted(accumulator: Accumulator, segments: Segments) -> Part:
        assert isinstance(accumulator, Monoid)
        return accumulator.close_states(accumulator.lift(segments))

    def _advance_by_partials(
        self, segments: Segments, stored: Ints, parts: list[Part]
    ) -> tuple[AccumulatorOutcome, list[AccumulatorOutcome]]:
        rows, partials = self.layout.unpack_array(as_array(segments.rows.column(PARTIAL)))
        counted = self._rows.advance_by_partials((stored,), None, ((rows,), None), segments)
        self._exists(counted, segments)
        pairs = iter(zip(parts, partials, strict=True))
        advanced = []
        for each in self.accumulators:
            if type(each) is CountRows:
                advanced.append(counted)
                continue
            assert isinstance(each, Monoid)
            part, partial = next(pairs)
            advanced.append(each.advance_by_partials(*part, partial, segments))
        return counted, advanced
