"""Rows that a kernel keeps for as long as a window may need them: all of a group's in one entry, in the order in which they came into it.

| entry | name | bytes |
|---|---|---|
| rows | `r`, the group's key | version 1; an ARRAY of STRUCT as `row_codec` has it: time, the row's own key if it is a table's, the columns that aggregates read |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import InputError, NewerFormat
from headrace.operators import row_codec
from headrace.operators.accumulators.keeper import lists
from headrace.operators.buffers import Ints, Mask, offsets_of
from headrace.operators.joins.matching import sorting
from headrace.operators.kernel import Groups, KeyedState, Times

MOST_ROWS = 1_000_000
_VERSION = 1
_NAME = pa.scalar(b"r", pa.binary())
_FIRST_BYTE = pa.scalar(bytes([_VERSION]), pa.large_binary())
_NOTHING = pa.scalar(b"", pa.binary())
_NO_BYTES = pa.scalar(b"", pa.large_binary())
TIME, ID = "_time", "_id"


@dataclass
class Kept:
    """Rows of some groups: those that were stored, and behind them those that come now. A row has a number of its group, a time, the tick it came with (its place in
    the call, -1 for stored ones) and a rank, its place among the group's rows. `comes` is false for a row of a table that goes.
    """

    rows: pa.Table
    stored: int
    keys: Ints
    times: Times
    places: Ints
    ranks: Ints
    comes: Mask
    same: Ints | None  # for a table's rows: a number for group and row key

    def in_order(self, which: Ints) -> Ints:
        """Some rows in order of group, time and rank."""
        return which[sorting(self.keys[which], self.times[which], self.ranks[which])]

    def ranked(self, sets: Ints, which: Ints) -> Ints:
        """Some rows, each in a set, in order of set and rank."""
        return which[sorting(sets, self.ranks[which])]


class RowStore:
    """Reads and writes them. `columns` are those that aggregates read."""

    def __init__(self, step: str, fields: Sequence[pa.Field], *, with_id: bool) -> None:
        self.step_name = step
        identity = [pa.field(ID, pa.binary())] if with_id else []
        self.fields = [pa.field(TIME, pa.int64()), *identity, *fields]
        self._type = pa.list_(pa.struct(self.fields))

    @staticmethod
    def names(by: pa.Array) -> pa.Array:
        return pc.binary_join_element_wise(_NAME, by.cast(pa.binary()), _NOTHING)

    def read(self, state: KeyedState, names: pa.Array, groups: Groups) -> tuple[Ints, pa.Table]:
        """How many rows each group has, and all of them."""
        return self.decoded(state.get_array(names, groups))

    def decoded(self, values: pa.Array) -> tuple[Ints, pa.Table]:
        """The same from entries; null for a group that has none."""
        found = row_codec.decode_array(self._behind_version(values.drop_null()), self._type)
        counts = np.zeros(len(values), np.int64)
        counts[values.is_valid().to_numpy(zero_copy_only=False)] = np.diff(offsets_of(found))
        structs = found.flatten()
        return counts, pa.Table.from_arrays([structs.field(at) for at in range(len(self.fields))], schema=pa.schema(self.fields))

    def _behind_version(self, values: pa.Array) -> pa.Array:
        if not len(values):
            return pa.array([], pa.large_binary())
        data, offsets = np.frombuffer(values.buffers()[2], np.uint8), offsets_of(values)
        if int(data[offsets[:-1]].max()) > _VERSION:
            raise NewerFormat(f"The state of step {self.step_name!r} was written by a newer Headrace.", fix="upgrade Headrace.")
        return row_codec.cut_out(data, offsets[:-1] + 1, np.diff(offsets) - 1)

    def write(self, state: KeyedState, names: pa.Array, groups: Groups, counts: Ints, rows: pa.Table) -> None:
        """`rows` are in order of group, so many for each; a group without any goes."""
        self.check(self.step_name, counts)
        columns = [rows.column(field.name).combine_chunks() for field in self.fields]
        structs = pa.StructArray.from_arrays(columns, fields=self.fields)
        encoded = row_codec.encode_array(lists(counts, structs))
        values = pc.binary_join_element_wise(_FIRST_BYTE, encoded, _NO_BYTES).cast(pa.binary())
        state.put_array(names, pc.if_else(pa.array(counts > 0), values, pa.scalar(None, pa.binary())), groups)

    @staticmethod
    def check(step: str, counts: Ints) -> None:
        """That no entry is too large."""
        if len(counts) and int(counts.max()) > MOST_ROWS:
            raise InputError(
                f"The step {step!r} keeps up to {MOST_ROWS:,} rows a group for its windows, and a group has more.",
                fix="use aggregates that need no rows (count, sum, avg, stddev; min and max of numbers), shorter windows or a shorter lateness, or smaller groups.",
            )
