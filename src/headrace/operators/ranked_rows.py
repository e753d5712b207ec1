"""The first rows of each group of a stream, with their ranks: a table keyed by group and rank.

Example: `n=2`, `per=team`, by `points`, largest first.

    tick 1   (red, ann, 5), (red, bob, 9)    state of red, in order: bob 9, ann 5
                                             emits insert (red, 1, bob 9), insert (red, 2, ann 5)
    tick 2   (red, cat, 7)                   state: bob 9, cat 7
                                             emits update (red, 2, ann 5) -> (red, 2, cat 7)
    tick 3   (red, dan, 1)                   state as before; emits nothing

Since a stream only inserts, a row that is not among the first ones never will be: the state has `n`
rows a group. Of rows that are equal in the order, the first to arrive counts. Nulls come last.
`TopKernel` (in `top_rows`) does so for tables, whose rows change, and must keep all of them.

State of a group: version 1; its rows in their order, as an ARRAY of STRUCT.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, expand_ranges
from headrace.columnar.columns import CHANGE_FIELD, TICK_FIELD
from headrace.columnar.keys import as_array, encode_keys
from headrace.columnar.lookup import group_start_mask, rank_keys, sort_order
from headrace.errors import InputError, NewerFormat, UnknownColumn
from headrace.operators.aggregates.accumulator import rank_values
from headrace.operators.joins.row_store import concat_bytes
from headrace.operators.joins.sides import merge_changes, ticks_of
from headrace.operators.kernel import KeyedState
from headrace.operators.top_rows import Order

MAX_RANKED_ROWS = 1_000
RANK_TYPE = pa.int32()
_VERSION = b"\x01"
_MAX_GROUP_BYTES = 2**31


class RankedRowsKernel:
    """The first `n` rows by `by` of each group of `per`; without `per`, of the whole stream. `rank`
    is the column with a row's rank, from 1; there is none if it is None, which takes `n` = 1.
    """

    def __init__(
        self,
        step: str,
        schema: pa.Schema,
        *,
        n: int,
        by: Sequence[Order],
        per: Sequence[str] = (),
        rank: str | None = "rank",
    ) -> None:
        for name in (*per, *(column for column, _ in by)):
            if name not in schema.names:
                raise UnknownColumn(name, schema.names, where=f"The input of step {step!r}")
        if not 1 <= n <= (1 if rank is None else MAX_RANKED_ROWS):
            raise InputError(
                f"Step {step!r} asks for the first {n} rows of a stream.",
                fix=f"ask for 1 to {MAX_RANKED_ROWS:,} rows.",
            )
        self.step_name, self.schema, self.n = step, schema, n
        self.by, self.per, self.rank = tuple(by), tuple(per), rank
        self._stored_type = pa.list_(pa.struct(list(schema)))

    @cached_property
    def output(self) -> pa.Schema:
        ranked = [] if self.rank is None else [pa.field(self.rank, RANK_TYPE, nullable=False)]
        return pa.schema([*self.schema, *ranked, CHANGE_FIELD])

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """1. Load the rows of each group. 2. Sort them and the new ones by group and order. 3. Tick
        by tick, find the first rows, and what changed. 4. Store. 5. Emit.
        """
        if not rows.num_rows:
            return self.output.append(TICK_FIELD).empty_table()
        # 1. Load.
        ranked = rank_keys([encode_keys(rows, self.per)])
        stored_rows, stored_groups = self._load(state, ranked.keys)
        columns = {name: as_array(rows.column(name)) for name in self.schema.names}
        if len(stored_rows):
            columns = {
                name: pa.concat_arrays([stored_rows.field(name), column])
                for name, column in columns.items()
            }
        # 2. Sort. From here on a row is its position in this order, so the order of rows of a group
        # is the order of numbers.
        groups = np.concatenate([stored_groups, ranked.ranks[0]])
        order = sort_order(groups, *(code for by in self.by for code in _codes(columns, by)))
        positions = np.empty(len(order), np.int64)
        positions[order] = np.arange(len(order))
        first = _FirstRows(groups[order], len(ranked.keys), self.n)
        first.begin(positions[: len(stored_groups)])
        # 3. Tick by tick.
        ticks, arrived = ticks_of(rows), positions[len(stored_groups) :]
        changed = [(tick, *first.add(arrived[ticks == tick])) for tick in np.unique(ticks).tolist()]
        # 4. Store.
        kept, counts = first.rows()
        self._store(state, ranked.keys, columns, order[kept], counts)
        # 5. Emit.
        return self._emit(columns, order, changed)

    def _load(self, state: KeyedState, keys: pa.Array) -> tuple[pa.StructArray, Ints]:
        """The stored rows of some groups, and the group of each."""
        values = state.get_array(keys)
        is_stored = values.is_valid().to_numpy(zero_copy_only=False)
        lists = self._decode(values.drop_null())
        sizes = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        groups = np.repeat(np.flatnonzero(is_stored), sizes)
        return pc.list_flatten(lists), groups

    def _decode(self, values: pa.Array) -> pa.ListArray:
        """The rows of each stored group."""
        if pc.any(pc.not_equal(pc.binary_slice(values, 0, 1), _VERSION)).as_py():
            raise NewerFormat(
                f"The state of the step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade headrace.",
            )
        row_bytes = pc.binary_slice(values.cast(pa.large_binary()), 1, _MAX_GROUP_BYTES)
        return row_codec.decode_array(row_bytes, self._stored_type)

    def _store(
        self,
        state: KeyedState,
        keys: pa.Array,
        columns: dict[str, pa.Array],
        rows: Ints,
        counts: Ints,
    ) -> None:
        """Store the rows of each group, in their order."""
        indices = pa.array(rows)
        structs = pa.StructArray.from_arrays(
            [columns[name].take(indices) for name in self.schema.names], fields=list(self.schema)
        )
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), structs, type=self._stored_type)
        version = pa.scalar(_VERSION, pa.large_binary())
        values = concat_bytes([version, row_codec.encode_array(lists)])
        state.put_array(keys, values.cast(pa.binary()))

    def _emit(
        self,
        columns: dict[str, pa.Array],
        order: Ints,
        changed: Sequence[tuple[int, Ints, Ints, Ints]],
    ) -> pa.Table:
        """The changes in order of tick, group and rank: an insert, or an update of the row that had
        the rank before.
        """
        ticks = np.repeat([tick for tick, *_ in changed], [len(ranks) for _, ranks, *_ in changed])
        ranks, before, after = (
            np.concatenate([parts[number] for _, *parts in changed]) for number in range(3)
        )
        which = np.stack([before, after], axis=1).reshape(-1)
        exists = which >= 0
        which, is_second = which[exists], np.tile([False, True], len(ranks))[exists]
        is_second &= np.repeat(before >= 0, 2)[exists]
        is_insertion = np.tile([False, True], len(ranks))[exists]
        indices = pa.array(order[which])
        arrays = [columns[name].take(indices) for name in self.schema.names]
        kinds, is_emitted = merge_changes(arrays, is_second, is_insertion)
        if self.rank is not None:
            arrays.append(pa.array(np.repeat(ranks, 2)[exists] + 1, RANK_TYPE))
        result = pa.Table.from_arrays(
            [*arrays, kinds, pa.array(np.repeat(ticks, 2)[exists], pa.int64())],
            schema=self.output.append(TICK_FIELD),
        )
        return result if is_emitted.all() else result.filter(pa.array(is_emitted))

    # Expiry and inspection

    def forget(self, state: KeyedState, keys: pa.Array) -> None:
        """Delete the rows of some groups."""
        state.put_array(keys, pa.nulls(len(keys), pa.binary()))

    @property
    def key_fields(self) -> list[pa.Field]:
        return [self.schema.field(name) for name in self.per]

    def describe(self, keys: pa.Array, values: pa.Array) -> pa.Table:  # noqa: ARG002
        """The rows of each group, for people."""
        return pa.table({"rows": self._decode(values)})


def _codes(columns: dict[str, pa.Array], by: Order) -> list[Ints]:
    """Integers that sort as the values of a column: whether it is null, and the value."""
    name, is_descending = by
    values = columns[name]
    is_null = values.is_null().to_numpy(zero_copy_only=False)
    codes = np.zeros(len(values), np.int64)
    if pa.types.is_integer(values.type) or pa.types.is_timestamp(values.type):
        codes[~is_null] = pc.cast(values.drop_null(), pa.int64()).to_numpy()
    else:
        codes[~is_null] = rank_values(values.drop_null())[0]
    codes = ~codes if is_descending else codes
    return [is_null.astype(np.int64), codes] if is_null.any() else [codes]


class _FirstRows:
    """The first `n` rows of each group while rows arrive. A row is a number; `groups` has the group
    of each, and is sorted.

    Each group has as many slots as it can have first rows. `before` and `after` a change, slot by
    slot, are what has changed its rank.
    """

    def __init__(self, groups: Ints, count: int, n: int) -> None:
        self.groups, self.n = groups, n
        capacity = np.minimum(np.bincount(groups, minlength=count), n)
        self.starts = np.concatenate([[0], np.cumsum(capacity)])
        self.counts = np.zeros(count, np.int64)
        self.slots = np.full(int(self.starts[-1]), -1)

    def begin(self, rows: Ints) -> None:
        """Begin with rows that are the first ones of their groups."""
        if len(rows):
            self.add(rows)

    def add(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """Add rows. Returns the ranks that have another row now, from 0 and in order of group and
        rank, the rows that had them before (-1 if none did), and those that have them now.
        """
        groups = self.groups[np.sort(rows)]
        touched = groups[group_start_mask(groups)]
        slots = expand_ranges(self.starts[touched], self.counts[touched])
        candidates = np.sort(np.concatenate([self.slots[slots], rows]))
        of_group = self.groups[candidates]
        starts = np.flatnonzero(group_start_mask(of_group))
        sizes = np.diff(np.append(starts, len(candidates)))
        ranks = np.arange(len(candidates)) - np.repeat(starts, sizes)
        is_first = ranks < self.n
        rows, ranks, of_group = candidates[is_first], ranks[is_first], of_group[is_first]
        slots = self.starts[of_group] + ranks
        before = self.slots[slots]
        self.slots[slots] = rows
        self.counts[touched] = np.minimum(sizes, self.n)
        changed = before != rows
        return ranks[changed], before[changed], rows[changed]

    def rows(self) -> tuple[Ints, Ints]:
        """The first rows in order of group and rank, and how many each group has."""
        return self.slots[expand_ranges(self.starts[:-1], self.counts)], self.counts
