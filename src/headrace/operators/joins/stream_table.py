"""The join of a stream with a table: each row of the stream meets the table as it is at the end of
the row's tick, so changes of the table in that tick come first.

Example: orders joined with customers on `customer`, `how="left"`.

    tick 1   customers: insert (customer=7, name="Ann")     state of key 7: (7, "Ann")
             orders:    (order=1, customer=7)               emits (1, 7, "Ann"), tick 1
    tick 2   orders:    (order=2, customer=8)               emits (2, 8, null), tick 2
    tick 3   orders:    (order=3, customer=7)
             customers: update (7, "Ann") -> (7, "Anna")    state of key 7: (7, "Anna")
                                                            emits (3, 7, "Anna"), tick 3

The result is a stream: later changes of the table do not change what was emitted. A row whose join
key has a null matches nothing, unless the step says `null_matches`. The rows of the stream are not
stored.

Also here: a table as one side of a join, as rows that exist from tick to tick (`TableSide`,
`Versions`), which the join of two tables and the top rows are made of too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask, byte_width
from headrace.columnar.columns import TICK_FIELD
from headrace.columnar.keys import as_array, encode_keys
from headrace.columnar.lookup import (
    expand_pairs,
    group_start_mask,
    key_bounds,
    mask_at,
    rank_keys,
    search_within,
    sort_order,
)
from headrace.columnar.murmur2 import murmur2_array
from headrace.columnar.sort import key_codes
from headrace.errors import BugError, InputError
from headrace.operators.joins.row_store import (
    HIGHEST,
    LOWEST,
    KeyedRowStore,
    RowStoreWriter,
    SortKeys,
    StoredRows,
)
from headrace.operators.joins.sides import (
    JoinColumns,
    ResultColumn,
    Side,
    SideRows,
    join_keys,
    retraction_mask,
    ticks_of,
)
from headrace.operators.kernel import KeyedState, Watermarks

ID = "\0id"
"""The column of the stored rows that has their primary key, where the join key does not tell rows
apart.
"""
ALWAYS, FOREVER = LOWEST, HIGHEST
"""The start of a version that existed before the batch, and the end of one that exists after it."""
_NO_STORED_ROWS = pa.nulls(0, pa.large_binary())


@dataclass(frozen=True)
class Versions:
    """Versions of rows, in order of key and row.

    A version is a row from the tick in which it was added to the tick in which it was removed: it
    exists at the end of each tick from `start` on, and before `end`.
    """

    keys: Ints  # the index of its join key
    sort_keys: SortKeys  # the row's sort key in the row store
    start: Ints
    end: Ints
    row: Ints  # its index among the rows of the side
    row_id: Ints  # equal for the versions of one row

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, which: Ints | Mask) -> Versions:
        return Versions(
            keys=self.keys[which],
            sort_keys=self.sort_keys[which],
            start=self.start[which],
            end=self.end[which],
            row=self.row[which],
            row_id=self.row_id[which],
        )


class TableSide:
    """The changes of a table in a batch, and its stored rows."""

    def __init__(
        self,
        step: str,
        side: Side,
        fields: pa.Schema,
        changes: pa.Table,
        keys: Ints,
        has_null: Mask,
    ) -> None:
        """Take the changes of a batch.

        Args:
            step: the name of the step, for errors.
            side: the table's columns.
            fields: the columns that are stored.
            changes: the changes, in order of tick.
            keys: the index of each change's join key.
            has_null: the changes whose join key has a null: they are not stored.
        """
        self.step, self.side = step, side
        if side.is_unique:
            self.stored_fields, self.fresh = fields, changes
        else:
            self.stored_fields = pa.schema([pa.field(ID, pa.binary()), *fields])
            ids = encode_keys(changes, side.key).cast(pa.binary())
            self.fresh = changes.append_column(ID, ids)
        self.which = np.flatnonzero(~has_null)
        self.changes = changes.take(pa.array(self.which)) if has_null.any() else changes
        self.keys, self.ticks = keys[self.which], ticks_of(self.changes)
        self.sort_keys = (
            np.zeros(len(self.which), np.int64)
            if side.is_unique
            else primary_key_sort_keys(self.changes, side.key)
        )

    def load(self, row_store: KeyedRowStore, section: int, whole_keys: Mask) -> None:
        """Load all rows of some keys, and of the others the rows that change."""
        self.stored = row_store.load_touched(section, self.keys, self.sort_keys, whole_keys)
        self.rows = SideRows(self.stored_fields, self.stored.rows, self.fresh)

    def versions(self) -> Versions:
        """The versions of all rows that were loaded or added."""
        stored = self.stored
        if not self.changes.num_rows:
            return Versions(
                keys=stored.keys,
                sort_keys=stored.sort_keys,
                start=np.full(len(stored), ALWAYS),
                end=np.full(len(stored), FOREVER),
                row=np.arange(len(stored)),
                row_id=np.arange(len(stored)),
            )
        keys = np.concatenate([stored.keys, self.keys])
        if self.side.is_unique:
            ids = np.zeros(len(keys), np.int64)
        else:
            id_struct = pa.struct([self.stored_fields.field(0)])
            stored_ids = row_codec.decode_array(stored.rows, id_struct).field(0)
            fresh_ids = as_array(self.fresh.column(ID)).take(pa.array(self.which))
            ids = np.concatenate(rank_keys([stored_ids, fresh_ids]).ranks)
        signs = np.where(retraction_mask(self.changes), -1, 1)
        return build_versions(
            self.step,
            keys=keys,
            sort_keys=np.concatenate([stored.sort_keys, self.sort_keys]),
            ids=ids,
            ticks=np.concatenate([np.full(len(stored), ALWAYS), self.ticks]),
            signs=np.concatenate([np.ones(len(stored), np.int64), signs]),
            rows=np.concatenate([np.arange(len(stored)), len(stored) + self.which]),
        )

    def store(self, writer: RowStoreWriter, section: int, versions: Versions) -> None:
        """Store the versions that exist after the batch."""
        if not self.changes.num_rows:
            return
        last = versions.take(versions.end == FOREVER)
        rows = StoredRows(
            keys=last.keys,
            sort_keys=last.sort_keys,
            flags=np.zeros(len(last), np.uint8),
            rows=self.rows.bytes(last.row),
        )
        writer.replace(section, rows, self.keys, self.sort_keys)


def build_versions(
    step: str,
    *,
    keys: Ints,
    sort_keys: SortKeys,
    ids: Ints,
    ticks: Ints,
    signs: Ints,
    rows: Ints,
) -> Versions:
    """Versions from additions (sign 1) and removals (-1), the stored rows first, then in order of
    tick. `ids` tell rows of one key and sort key apart.

    Within a tick the order does not matter: a row that is removed and added again has one version
    from that tick on.
    """
    order = sort_order(keys, sort_keys, ids)  # stable: the ticks of a row stay in order
    keys, sort_keys, ids = keys[order], sort_keys[order], ids[order]
    ticks, signs = ticks[order], signs[order]
    is_new_row = group_start_mask(keys, sort_keys, ids)
    starts = np.flatnonzero(is_new_row | group_start_mask(ticks))
    is_first = is_new_row[starts]
    # Whether the row exists at the end of each tick in which it changes.
    total = np.cumsum(np.add.reduceat(signs, starts))
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(is_first)), 0))
    count = total - np.append(0, total)[first]
    if count.min() < 0 or count.max() > 1:
        raise BugError(
            f"Step {step!r} received a row that exists already, or the removal of a row that does"
            " not exist.",
            fix=(
                "if tables are united with disjoint=True, and a key can be in two of them, leave"
                " that out; else please report it."
            ),
        )
    last_added = np.maximum.reduceat(np.where(signs > 0, np.arange(len(signs)), -1), starts)
    end = np.append(ticks[starts[1:]], FOREVER)
    end[np.append(is_new_row[starts[1:]], True)] = FOREVER
    return Versions(
        keys=keys[starts],
        sort_keys=sort_keys[starts],
        start=ticks[starts],
        end=end,
        row=rows[order[last_added]],
        row_id=np.cumsum(is_new_row, dtype=np.int64)[starts],
    ).take(count == 1)


def primary_key_sort_keys(rows: pa.Table, key: tuple[str, ...]) -> Ints:
    """The sort key of each row by its primary key: the value of a key of at most 8 bytes, else a
    hash. It is the same in every batch.
    """
    if len(key) == 1 and (byte_width(rows.schema.field(key[0]).type) or 9) <= 8:
        column = as_array(rows.column(key[0]))
        sort_keys = np.full(rows.num_rows, LOWEST + 1)
        is_valid = column.is_valid().to_numpy(zero_copy_only=False)
        codes = key_codes(encode_keys(rows.select(list(key)).filter(pa.array(is_valid)), key))
        sort_keys[is_valid] = (codes ^ np.uint64(1 << 63)).view(np.int64)
        return sort_keys
    return murmur2_array(encode_keys(rows, key)).astype(np.int64)


class StreamTableJoin:
    """The kernel of a join of a stream with a table. Its inputs are the rows of the stream and the
    changes of the table; `how` is "inner", or "left" to emit unmatched rows too.
    """

    hold_us = 0  # rows are emitted in their own tick: no watermark is held back

    def __init__(
        self,
        step: str,
        stream: Side,
        table: Side,
        columns: Sequence[ResultColumn],
        *,
        how: str = "inner",
        null_matches: bool = False,
    ) -> None:
        if how not in {"inner", "left"}:
            raise InputError(
                f"Step {step!r} joins a stream with a table how={how!r}.",
                fix='choose how="inner" or how="left"; join tables for what has no row yet.',
            )
        self.step_name, self.how, self.null_matches = step, how, null_matches
        self.stream, self.table = stream, table
        self._columns = JoinColumns(step, stream, table, columns, how)

    @cached_property
    def output(self) -> pa.Schema:
        return self._columns.schema

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """None: no row waits for a watermark."""
        return None

    def step_timed(
        self,
        state: KeyedState,
        inputs: Sequence[pa.Table],
        watermarks: Sequence[Watermarks],  # noqa: ARG002
    ) -> pa.Table:
        """1. Rank the keys. 2. Load the table's rows of them. 3. Apply the table's changes, and
        store. 4. Match rows with the versions that exist in their ticks. 5. Emit.
        """
        # 1. to 3.
        rows, changes = inputs
        keys, _ = join_keys(rows, self.stream.on)
        changed_keys, has_null = join_keys(changes, self.table.on)
        ranked = rank_keys([keys, changed_keys])
        side = TableSide(
            self.step_name,
            side=self.table,
            fields=self._columns.right_fields,
            changes=changes,
            keys=ranked.ranks[1],
            has_null=np.zeros_like(has_null) if self.null_matches else has_null,
        )
        row_store = KeyedRowStore(self.step_name, state, ranked.keys, sections=1, registers=0)
        side.load(row_store, 0, mask_at(len(row_store), ranked.ranks[0]))
        versions = side.versions()
        writer = RowStoreWriter(row_store)
        side.store(writer, 0, versions)
        writer.save()
        # 4. Rows in order of key; a row in tick t matches the versions with start <= t < end.
        order = ranked.orders[0]
        ticks = ticks_of(rows)[order]
        begin = key_bounds(ranked.ranks[0][order], len(ranked.keys))
        first, end = begin[versions.keys], begin[versions.keys + 1]
        low = search_within(ticks, first, end, versions.start, right=False)
        high = search_within(ticks, first, end, versions.end, right=False)
        version, row = expand_pairs(low, high)
        if self.how == "left":
            unmatched = np.flatnonzero(~mask_at(len(order), row))
            row = np.concatenate([row, unmatched])
            version = np.concatenate([version, np.full(len(unmatched), -1)])
        # 5. Emit in order of tick, key, row and version.
        emit_order = sort_order(ticks[row], row, version)
        row, version = row[emit_order], version[emit_order]
        columns = self._columns.arrays(
            SideRows(self._columns.left_fields, _NO_STORED_ROWS, rows),
            order[row],
            side.rows,
            np.append(versions.row, -1)[version],
        )
        return pa.Table.from_arrays(
            [*columns, pa.array(ticks[row])], schema=self.output.append(TICK_FIELD)
        )
