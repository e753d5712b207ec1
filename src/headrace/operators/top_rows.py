"""The first rows of each group of a table, in an order: a table that is kept up to date at a cost
that follows the changes, not the size of the table.

Example: `n=2`, `per=team`, by `points`, largest first; the key is `player`.

    tick 1   insert (ann, red, 5), (bob, red, 9)    state of red, in order: bob 9, ann 5
                                                    emits insert ann, insert bob
    tick 2   insert (cat, red, 7)                   state: bob 9, cat 7, ann 5
                                                    emits delete ann, insert cat
    tick 3   delete (bob, red, 9)                   state: cat 7, ann 5
                                                    emits insert ann, delete bob

All rows of a group are stored in their order. Rows that are equal in the order are sorted by their
keys, so that the result is always the same. A row that moves to another group may be removed from
the one and added to the other in the same tick, by different shards: `SettleKernel` merges the two
into one change.

Also here: the distinct rows of a table (`distinct_kernel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.columnar.columns import CHANGE_FIELD, TICK_FIELD
from headrace.columnar.keys import as_array, encode_keys, ordered_bytes
from headrace.columnar.lookup import group_start_mask, key_bounds, rank_keys, sort_order
from headrace.columnar.row_codec import gather_ranges
from headrace.errors import InputError, UnknownColumn
from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.operators.joins.row_store import (
    MAX_CHUNK_ROWS,
    WIDE_SORT_KEY_BYTES,
    KeyedRowStore,
    RowStoreWriter,
    SortKeys,
    StoredRows,
    concat_bytes,
    delete_keys,
    large_offsets,
    slice_bytes,
    value_bytes,
)
from headrace.operators.joins.sides import SideRows, merge_changes, retraction_mask, ticks_of
from headrace.operators.joins.stream_table import ALWAYS, FOREVER, Versions, build_versions
from headrace.operators.kernel import KeyedState

MAX_TOP_ROWS = 10_000
Order = tuple[str, bool]
"""A column, and whether its largest values come first."""
_ORDER = "_order"
"""The stored column that has the order of a row as bytes."""


# The order of rows as bytes


def order_bytes(
    rows: pa.Table, by: Sequence[Order], key: Sequence[str], *, key_by_length: bool = False
) -> pa.Array:
    """The order of each row as bytes: by some columns, each ascending or descending, and by the
    row's key where those are equal. Nulls come last either way; in the key they come first.

    The bytes of a row are those of its columns, then its key:

        a value           0, then its bytes as in a key (`columnar/keys.py`); of STRING and BINARY
                          with 0, 255 for each 0 in them, and 0, 0 behind them
        descending        0, then the same bytes with every bit inverted
        null              1
        a key             of one column, its bytes as a key; of several, for each column 0 for null,
                          or 1 and the bytes of the value; with `key_by_length`, as earlier versions
                          stored it, its bytes as a key, which do not sort as the values do
    """
    columns = []
    for name, is_descending in by:
        array = as_array(rows.column(name))
        is_valid = array.is_valid().to_numpy(zero_copy_only=False)
        columns.append(slice_bytes((~is_valid).astype(np.uint8), np.arange(len(array) + 1)))
        encoded = _prefix_free_bytes(array.drop_null())
        if is_descending and len(encoded):
            offsets = large_offsets(encoded)
            encoded = gather_ranges(~value_bytes(encoded), offsets[:-1], np.diff(offsets))
        if not is_valid.all():
            source = pa.array(np.cumsum(is_valid) - 1, mask=~is_valid)
            encoded = encoded.take(source).fill_null(b"")
        columns.append(encoded)
    if len(key) == 1 or key_by_length:
        columns.append(encode_keys(rows, key).cast(pa.binary()).cast(pa.large_binary()))
    else:
        columns += [part for name in key for part in _key_bytes(as_array(rows.column(name)))]
    return concat_bytes(columns)


def _key_bytes(array: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Whether each value is not null, and its bytes."""
    is_valid = array.is_valid().to_numpy(zero_copy_only=False)
    encoded = _prefix_free_bytes(array.drop_null())
    if not is_valid.all():
        source = pa.array(np.cumsum(is_valid) - 1, mask=~is_valid)
        encoded = encoded.take(source).fill_null(b"")
    return slice_bytes(is_valid.astype(np.uint8), np.arange(len(array) + 1)), encoded


def _prefix_free_bytes(array: pa.Array) -> pa.Array:
    """Bytes in the order of the values, none of which is the beginning of another."""
    encoded = ordered_bytes(array)
    if not isinstance(encoded, pa.Array):
        offsets = np.arange(len(encoded) + 1) * encoded.shape[1]
        return slice_bytes(np.ascontiguousarray(encoded).reshape(-1), offsets)
    escaped = pc.replace_substring(encoded, pattern=b"\x00", replacement=b"\x00\xff")
    end = pa.scalar(b"\x00\x00", pa.large_binary())
    return concat_bytes([escaped.cast(pa.large_binary()), end])


def order_sort_keys(ordered: pa.Array) -> SortKeys:
    """The sort keys of rows in the row store: the first 24 bytes of their order."""
    width = WIDE_SORT_KEY_BYTES
    padded = concat_bytes([ordered, pa.scalar(bytes(width), pa.large_binary())])
    if not len(padded):
        return np.zeros(0, f"S{width}")
    windows = np.lib.stride_tricks.sliding_window_view(value_bytes(padded), width)
    first = windows[large_offsets(padded)[:-1]]
    return np.ascontiguousarray(first).view(f"S{width}").reshape(-1)


# The kernel


class TopKernel:
    """The first `n` rows by `by` of each group of `per`; without `per`, of the whole table. The
    result has the table's columns and key. `key_by_length` is for state of earlier versions: see
    `order_bytes`.
    """

    def __init__(
        self,
        step: str,
        schema: pa.Schema,
        key: Sequence[str],
        *,
        n: int,
        by: Sequence[Order],
        per: Sequence[str] = (),
        key_by_length: bool = False,
    ) -> None:
        for name in (*key, *per, *(column for column, _ in by)):
            if name not in schema.names:
                raise UnknownColumn(name, schema.names, where=f"The input of step {step!r}")
        if not 1 <= n <= MAX_TOP_ROWS or not by:
            raise InputError(
                f"Step {step!r} asks for the first {n} rows by {len(by)} columns.",
                fix=f"ask for 1 to {MAX_TOP_ROWS:,} rows by at least one column.",
            )
        self.step_name, self.schema, self.n = step, schema, n
        self.key, self.by, self.per = tuple(key), tuple(by), tuple(per)
        self.key_by_length = key_by_length
        self._stored_fields = pa.schema([pa.field(_ORDER, pa.large_binary()), *schema])

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(CHANGE_FIELD)

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """1. Load the first rows of each group, and those that change. 2. Apply the changes. 3.
        Store. 4. Tick by tick, emit the rows that enter or leave the first ones.
        """
        if not rows.num_rows:
            return self.output.append(TICK_FIELD).empty_table()
        # 1. Load.
        ranked = rank_keys([encode_keys(rows, self.per)])
        groups, ticks, is_removed = ranked.ranks[0], ticks_of(rows), retraction_mask(rows)
        row_store = KeyedRowStore(
            self.step_name, state, ranked.keys, sections=1, registers=0, wide=True
        )
        ordered = order_bytes(rows, self.by, self.key, key_by_length=self.key_by_length)
        sort_keys = order_sort_keys(ordered)
        touched_chunks = np.unique(row_store.sections[0].chunks_of(groups, sort_keys))
        needed = self.n + np.bincount(groups[is_removed], minlength=len(row_store))
        stored = _load_first_rows(row_store, touched_chunks, needed)
        source = SideRows(self._stored_fields, stored.rows, rows.append_column(_ORDER, ordered))
        # 2. Apply the changes.
        order_struct = pa.struct([self._stored_fields.field(0)])
        stored_order = row_codec.decode_array(stored.rows, order_struct).field(0)
        ranks = np.concatenate(rank_keys([stored_order, ordered]).ranks)
        versions = build_versions(
            self.step_name,
            keys=np.concatenate([stored.keys, groups]),
            sort_keys=ranks,
            ids=np.zeros(len(ranks), np.int64),
            ticks=np.concatenate([np.full(len(stored), ALWAYS), ticks]),
            signs=np.concatenate([np.ones(len(stored), np.int64), np.where(is_removed, -1, 1)]),
            rows=np.arange(len(ranks)),
        )
        # 3. Store.
        last = versions.take(versions.end == FOREVER)
        row_bytes = source.bytes(last.row)
        last_order = row_codec.decode_array(row_bytes, order_struct).field(0)
        last_rows = StoredRows(
            keys=last.keys,
            sort_keys=order_sort_keys(last_order),
            flags=np.zeros(len(last), np.uint8),
            rows=row_bytes,
        )
        writer = RowStoreWriter(row_store)
        writer.replace(0, last_rows, groups, sort_keys)
        writer.save()
        return self._emit(versions, source, ticks, groups)

    def forget(self, state: KeyedState, keys: pa.Array) -> None:
        """Delete the rows of some groups."""
        delete_keys(KeyedRowStore(self.step_name, state, keys, sections=1, registers=0, wide=True))

    def _emit(self, versions: Versions, source: SideRows, ticks: Ints, groups: Ints) -> pa.Table:
        """The changes of the first rows in order of tick, group and key. A row that leaves and
        enters the first rows in the same tick is an update.
        """
        begin = key_bounds(versions.keys, int(groups.max()) + 1)
        parts = [
            self._tick_changes(versions, begin, int(tick), np.unique(groups[ticks == tick]))
            for tick in np.unique(ticks)
        ]
        when, which, is_insertion = (np.concatenate(column) for column in zip(*parts, strict=True))
        columns = source.columns(self.schema, versions.row[which])
        keys = rank_keys([encode_keys(pa.table(columns, schema=self.schema), self.key)]).ranks[0]
        of_group = versions.keys[which]
        order = sort_order(when, of_group, keys, is_insertion)
        arrays = [columns[name].take(pa.array(order)) for name in self.schema.names]
        is_second = ~group_start_mask(when[order], of_group[order], keys[order])
        kinds, is_emitted = merge_changes(arrays, is_second, is_insertion[order] == 1)
        result = pa.Table.from_arrays(
            [*arrays, kinds, pa.array(when[order], pa.int64())],
            schema=self.output.append(TICK_FIELD),
        )
        return result if is_emitted.all() else result.filter(pa.array(is_emitted))

    def _tick_changes(
        self, versions: Versions, begin: Ints, tick: int, groups: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """The versions that leave or enter the first rows of some groups in a tick: the tick, the
        version, and 1 for those that enter.
        """
        which = expand_ranges(begin[groups], begin[groups + 1] - begin[groups])
        of_group, start, end = versions.keys[which], versions.start[which], versions.end[which]
        before = self._first_mask(of_group, (start < tick) & (end >= tick))
        after = self._first_mask(of_group, (start <= tick) & (end > tick))
        left, entered = which[before & ~after], which[after & ~before]
        is_insertion = np.concatenate(
            [np.zeros(len(left), np.int64), np.ones(len(entered), np.int64)]
        )
        return np.full(len(is_insertion), tick), np.concatenate([left, entered]), is_insertion

    def _first_mask(self, groups: Ints, exists: Mask) -> Mask:
        """Of the rows that exist, the first `n` of each group; the rows are in order."""
        count_before: Ints = np.cumsum(exists) - exists
        starts = group_start_mask(groups)
        begin = np.maximum.accumulate(np.where(starts, np.arange(len(groups)), 0))
        mask: Mask = exists & (count_before - count_before[begin] < self.n)
        return mask


def _load_first_rows(row_store: KeyedRowStore, touched: Ints, needed: Ints) -> StoredRows:
    """Load the chunks that change, and of each group the first ones, until they have as many rows
    as are needed.
    """
    part = row_store.sections[0]
    loaded = [row_store.load_inline(0)]
    chunk_count = np.diff(part.chunk_starts)
    rows_by_chunk = np.zeros(len(part.lows), np.int64)
    depth = np.zeros(len(row_store), np.int64)  # how many first chunks of a group are loaded
    wanted = touched
    while True:
        rows = row_store.load_chunks(0, wanted[~part.is_loaded[wanted]])
        loaded.append(rows)
        rows_by_chunk += np.bincount(
            part.chunks_of(rows.keys, rows.sort_keys), minlength=len(rows_by_chunk)
        )
        total, first = np.append(0, np.cumsum(rows_by_chunk)), part.chunk_starts[:-1]
        missing = needed - (total[first + depth] - total[first])
        short = np.flatnonzero(part.is_chunked & (missing > 0) & (depth < chunk_count))
        if not len(short):
            return StoredRows.concat(loaded)
        more = np.minimum(-(-missing // MAX_CHUNK_ROWS), chunk_count - depth)[short]
        wanted = expand_ranges(first[short] + depth[short], more)
        depth[short] += more


def distinct_kernel(
    step: str, schema: pa.Schema, row_key: tuple[str, ...] = (), columns: Sequence[str] = ()
) -> AggregateKernel:
    """A kernel for the distinct values of some columns of a table, or of all: each once, however
    many rows have them, as a table keyed by these columns. Its input is sharded by them, too.
    """
    return AggregateKernel(
        step, schema, columns or schema.names, [], over_table=True, row_key=row_key
    )
