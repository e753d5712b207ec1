"""Several aggregates over the same groups: how all their states go through segments together. What
every kernel that aggregates has in common.

A kernel decides what a group is, and where its state is kept; here states become states, and
results, and an account of what was left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, as_binary, bytes_list, same_width
from headrace.columnar.columns import TICK
from headrace.columnar.keys import encode_keys, whole
from headrace.columnar.segments import Segments
from headrace.errors import BugError, InputError, NewerFormat, UnknownColumn
from headrace.operators.aggregates.accumulator import (
    Accumulator,
    Advanced,
    Columns,
    Full,
    Monoid,
    Tails,
)
from headrace.operators.aggregates.custom import Raised
from headrace.operators.aggregates.factory import build
from headrace.operators.aggregates.specs import AggregateSpec, result_type
from headrace.operators.aggregates.sums import CountRows
from headrace.operators.changelog import differs
from headrace.operators.kernel import AggregateFailed, Diverted, GroupFull

# How a key's state is laid out in bytes: a version, the number of rows, each accumulator's fields,
# and behind them what has no fixed width.
#
# | bytes | what | |---|---| | 1 | version, 1; a state of zeros stands for a key that is not there |
# | 8 | rows of the group | | … | the fields of each accumulator, little-endian, without gaps | | …
# | the tails of the accumulators that have one, in the same order; their lengths follow from the
# fields |


VERSION = 1
Heads = npt.NDArray[np.void]


class Layout:
    """The states of many keys, from bytes to columns and back."""

    def __init__(self, accumulators: Sequence[Accumulator]) -> None:
        self.accumulators = accumulators
        fields = [("version", "u1"), ("rows", "<i8")]
        for at, accumulator in enumerate(accumulators):
            fields += [(f"{at}.{name}", kind) for name, kind in accumulator.fields]
        self.dtype = np.dtype(fields)
        self._nothing = bytes(self.dtype.itemsize)

    def unpacked(
        self, values: Sequence[bytes | None]
    ) -> tuple[Ints, list[tuple[Columns, Tails | None]]]:
        """The number of rows of each key (0 for a new one, which is None), and each accumulator's
        part.
        """
        return self.unpacked_array(pa.array(values, pa.binary()))

    def unpacked_array(self, values: pa.Array) -> tuple[Ints, list[tuple[Columns, Tails | None]]]:
        """The same from a column of states; without a copy where all have the same width."""
        plain = same_width(values)
        if plain is not None and plain.dtype.itemsize == self.dtype.itemsize:
            return self._from_heads(plain.view(self.dtype), None)
        if values.null_count == len(values):
            return self._from_heads(np.zeros(len(values), self.dtype), None)
        known = same_width(values.drop_null())
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
        """`values` are whole states, if some have tails."""
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

    def packed(self, rows: Ints, parts: Sequence[tuple[Columns, Tails | None]]) -> list[bytes]:
        """The bytes of each key's state."""
        values: list[bytes] = bytes_list(self.packed_array(rows, parts))  # type: ignore[assignment]  # none is null
        return values

    def packed_array(self, rows: Ints, parts: Sequence[tuple[Columns, Tails | None]]) -> pa.Array:
        """The states as a column."""
        heads = self.heads(rows, [columns for columns, _ in parts]).view(f"V{self.dtype.itemsize}")
        tails = [tails for _, tails in parts if tails is not None]
        return (
            pa.array(map(b"".join, zip(heads.tolist(), *tails, strict=True)), pa.binary())
            if tails
            else as_binary(heads)
        )

    def heads(self, rows: Ints, parts: Sequence[Columns]) -> Heads:
        heads = np.empty(len(rows), self.dtype)
        heads["version"], heads["rows"] = VERSION, rows
        for number, (accumulator, columns) in enumerate(zip(self.accumulators, parts, strict=True)):
            for (name, _), column in zip(accumulator.fields, columns, strict=True):
                heads[f"{number}.{name}"] = column
        return heads

    def _check(self, heads: Heads) -> None:
        if len(heads) and int(newest := heads["version"].max()) > VERSION:
            raise NewerFormat(
                f"A state has version {newest}, and this Headrace knows up to {VERSION}.",
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


def kept(values: list[bytes], rows: Ints) -> list[bytes | None]:
    """A group without rows is deleted."""
    stays: Mask = rows != 0
    return (
        list(values)
        if stays.all()
        else [value if stay else None for value, stay in zip(values, stays.tolist(), strict=True)]
    )


def kept_array(values: pa.Array, rows: Ints) -> pa.Array:
    """The same of a column of states."""
    stays: Mask = rows != 0
    return (
        values if stays.all() else pc.if_else(pa.array(stays), values, pa.scalar(None, values.type))
    )


# Combining rows before the shuffle: whether it pays, about how many groups they would make, told
# from a sample; and what combined rows need to be a kernel's rows.


ORDER = (TICK, "_rank", "_partition", "_offset")
"""The columns that tell a row's place in the pipeline's order."""

PARTIAL = "_partial"
"""The column with a state, in rows that stand for several."""

_SAMPLE_ROWS = 8192
_WORTH = 0.5  # groups a row, above which combining costs more than it saves


def pays(rows: pa.Table, by: Sequence[str]) -> bool:
    """Whether these rows make far fewer groups than they are. It decides about speed alone: the
    result is the same either way.
    """
    if not rows.num_rows:
        return False
    sample = rows.slice(0, _SAMPLE_ROWS)
    distinct = len(pc.unique(encode_keys(sample, by)))
    if sample.num_rows == rows.num_rows:
        return bool(distinct <= _WORTH * rows.num_rows)
    keys = _keys_in_all(sample.num_rows, distinct)
    ticks = len(np.unique(whole(rows.column(TICK)).to_numpy()))
    return bool(ticks * _drawn(keys, rows.num_rows / ticks) <= _WORTH * rows.num_rows)


def _drawn(keys: float, rows: float) -> float:
    """How many different keys so many rows have, if each is as likely as any other."""
    return -keys * math.expm1(-rows / keys)


def _keys_in_all(rows: int, distinct: int) -> float:
    """From how many keys so many rows with so many different ones may have been drawn: found by
    halving.
    """
    low, high = float(distinct), 1e12
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _drawn(middle, rows) < distinct else (low, middle)
    return low


def by_tick(rows: pa.Table) -> pa.Table:
    """Rows in the order of their ticks, and otherwise as they were."""
    ticks = whole(rows.column(TICK)).to_numpy()
    return (
        rows
        if (ticks[1:] >= ticks[:-1]).all()
        else rows.take(pa.array(np.argsort(ticks, kind="stable")))
    )


def all_combined(
    rows: pa.Table, combine: Callable[[pa.Table], pa.Table], also: Sequence[str] = ()
) -> pa.Table:
    """Where only some rows were combined, the others too; where none was, rows as they are. `also`
    names other columns that only combined rows have.
    """
    partial = rows.column(PARTIAL)
    if partial.null_count == 0:
        return rows
    plain = rows.drop_columns([name for name in (PARTIAL, *also) if name in rows.schema.names])
    if partial.null_count == len(partial):
        return plain
    combined = combine(plain.filter(partial.is_null()))
    return by_tick(
        pa.concat_tables([rows.filter(partial.is_valid()).select(combined.schema.names), combined])
    )


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
    """The aggregates of one step. `by` names a group in errors; with `divert`, rows that a user's
    own aggregate raises on are left out of it.

    What is left out of an aggregate is found in `diverted`, and `lost` counts the results that
    could not be told (null) by aggregate.
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
        self._check(row_key)
        self._rows = CountRows()
        self.accumulators: list[Accumulator] = [
            build(spec, schema, over_table=over_table, row_key=row_key, divert=divert)
            for _, spec in self.aggregates
        ]
        # The group's own row count is in every state: a count of rows needs no second one.
        self.layout = Layout([each for each in self.accumulators if type(each) is not CountRows])
        self.diverted = Diverted(schema)
        self.lost: dict[str, int] = {}

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
        """The results' columns."""
        return [
            pa.field(name, result_type(spec, self._type(spec))) for name, spec in self.aggregates
        ]

    def _type(self, spec: AggregateSpec) -> pa.DataType | None:
        return None if spec.column is None else self.schema.field(spec.column).type

    # From states to states

    def advance(self, segments: Segments, stored: Ints, parts: list[Part]) -> Outcome:
        """Each aggregate through all segments, from the states that groups had: their numbers of
        rows, and each accumulator's part.
        """
        if PARTIAL in segments.rows.schema.names:
            counted, advanced = self._advance_by_partials(segments, stored, parts)
        else:
            counted, advanced = self._advance(segments, stored, parts)
        pairs = zip(advanced, self.accumulators, strict=True)
        return Outcome(
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
    ) -> tuple[Advanced, list[Advanced]]:
        """The row counts, and each aggregate in its turn."""
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
    ) -> Advanced:
        try:
            return accumulator.advance(*part, segments)
        except Full as full:
            group = self._group(segments, full.key)
            raise GroupFull(
                step=self.step_name, aggregate=name, group=group, most=full.most
            ) from None
        except Raised as raised:
            row = (
                None
                if raised.row is None
                else segments.rows.slice(int(segments.order[raised.row]), 1).to_pylist()[0]
            )
            cause = f"{type(raised.cause).__name__}: {raised.cause}"
            raise AggregateFailed(
                step=self.step_name, aggregate=name, row=row, cause=cause, trace=raised.trace
            ) from raised.cause

    def _exists(self, counted: Advanced, segments: Segments) -> Mask:
        count = counted.results.to_numpy()
        if len(count) and count.min() < 0:
            key = int(np.searchsorted(segments.before_all, int(np.argmin(count)), side="right")) - 1
            raise BugError(
                f"Step {self.step_name!r} was told that rows go which never came, in the group"
                f" {self._group(segments, key)!r}."
            )
        exists: Mask = count > 0
        return exists

    def _group(self, segments: Segments, key: int) -> dict[str, Any]:
        row = int(segments.order[segments.starts[segments.firsts[key]]])
        return {name: segments.rows.column(name)[row].as_py() for name in self.by}

    def keep_account(self, segments: Segments, outcome: Outcome, shown: Ints) -> None:
        """Of results that could not be told, among the versions that are shown; and of rows that
        were left out.
        """
        self.count_lost(outcome, shown)
        for (name, _), each in zip(self.aggregates, outcome.advanced, strict=True):
            for left_out in each.left_out:
                self.diverted.add(
                    segments.rows, segments.order[left_out.rows], name, left_out.reason
                )

    def count_lost(self, outcome: Outcome, shown: Ints) -> None:
        """Count the results that could not be told."""
        for (name, _), each in zip(self.aggregates, outcome.advanced, strict=True):
            if each.lost is not None and (lost := int(np.count_nonzero(each.lost[shown]))):
                self.lost[name] = self.lost.get(name, 0) + lost

    # Combining before the shuffle

    @property
    def combinable(self) -> bool:
        """Whether rows may be combined before the shuffle: if every aggregate's states can be put
        together exactly.
        """
        return all(each.combinable for each in self.accumulators)

    def partials(self, segments: Segments) -> pa.Array:
        """The state of each segment's rows alone, as it is stored."""
        (counted,) = self._rows.lift(segments)
        return self.layout.packed_array(
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
        return accumulator.closed(accumulator.lift(segments))

    def _advance_by_partials(
        self, segments: Segments, stored: Ints, parts: list[Part]
    ) -> tuple[Advanced, list[Advanced]]:
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
