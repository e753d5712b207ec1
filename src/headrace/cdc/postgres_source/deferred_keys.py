"""Tables with a deferrable key: inside a transaction two rows may have one key.

`UPDATE t SET id = id + 1` moves row 1 onto row 2 before row 2 moves on. Applied in its order, the
stream would delete the row that has just arrived:

    in       delete 1 'a', insert 2 'a', delete 2 'b', insert 3 'b'

    out      delete 1 'a', delete 2 'b', insert 2 'a', insert 3 'b'

At the commit a key is unique again. So the changes of a transaction are held until it ends, and
where a key had two rows only their net effect is left: what was deleted and not inserted, then what
was inserted and not deleted. Which row a delete is of shows its whole content, which the server
sends: a deferrable key cannot be a replica identity, so such a table has REPLICA IDENTITY FULL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.base import StreamItem, TableChanges, TableStopped
from headrace.columnar.columns import (
    CHANGE_FIELD,
    CHANGE_TYPE,
    DELETE,
    HIDDEN_FIELDS,
    INSERT,
    MARKS,
    TRANSACTION,
    UPDATE_POSTIMAGE,
)
from headrace.columnar.keys import encode_keys

MAX_HELD_BYTES = 256 << 20
"""The most that is held of one transaction's changes of a table."""
_HIDDEN = {field.name for field in HIDDEN_FIELDS} - {MARKS}
Numbers = npt.NDArray[np.int64]


def settle(rows: pa.RecordBatch, key: Sequence[str]) -> pa.RecordBatch:
    """Return changes of whole transactions as they can be applied in their order.

    Args:
        rows: Changes of one table, with the whole content of each row.
        key: The key's columns.
    """
    changes = rows.column(CHANGE_TYPE)
    is_insert = pc.or_(pc.equal(changes, INSERT), pc.equal(changes, UPDATE_POSTIMAGE))
    signs = np.where(is_insert.to_numpy(zero_copy_only=False), 1, -1)
    names = [name for name in rows.schema.names if name not in _HIDDEN and name != CHANGE_TYPE]
    keys = _numbers(rows, [TRANSACTION, *key])
    contents = _numbers(rows, [TRANSACTION, *names])
    order = np.argsort(keys, kind="stable")
    sorted_keys, sorted_signs, sorted_contents = keys[order], signs[order], contents[order]
    has_same_key = sorted_keys[1:] == sorted_keys[:-1]
    clashes = has_same_key & (
        (sorted_signs[1:] == sorted_signs[:-1])
        | ((sorted_signs[1:] < 0) & (sorted_contents[1:] != sorted_contents[:-1]))
    )
    # A key that begins with an insert and ends with as many deletes was absent before, and is
    # again; or it was there, had two equal rows, and has one again. Both ways nothing changes.
    is_first = np.concatenate([[True], ~has_same_key])
    totals = np.bincount(keys, weights=signs)
    is_unsettled = np.zeros(len(totals), np.bool_)
    is_unsettled[sorted_keys[1:][clashes]] = True
    is_unsettled[sorted_keys[is_first & (sorted_signs > 0) & (totals[sorted_keys] == 0)]] = True
    unsettled = is_unsettled[keys]
    if not unsettled.any():
        return rows
    net = np.bincount(contents, weights=signs)[contents]
    is_left = np.where(
        signs > 0, (net > 0) & _is_last(contents, signs), (net < 0) & _is_last(contents, signs)
    )
    return _in_order(rows, keys, signs, unsettled, np.flatnonzero(~unsettled | is_left))


def _numbers(rows: pa.RecordBatch, columns: Sequence[str]) -> Numbers:
    """Return a number for each row, the same for rows with the same values."""
    encoded = encode_keys(rows, columns).dictionary_encode()
    numbers: Numbers = encoded.indices.to_numpy().astype(np.int64)
    return numbers


def _is_last(contents: Numbers, signs: Numbers) -> npt.NDArray[np.bool_]:
    """Return whether each row is the last of its content and sign."""
    both = contents * 2 + (signs > 0)
    _, from_the_end = np.unique(both[::-1], return_index=True)
    is_last = np.zeros(len(both), np.bool_)
    is_last[len(both) - 1 - from_the_end] = True
    return is_last


def _in_order(
    rows: pa.RecordBatch,
    keys: Numbers,
    signs: Numbers,
    unsettled: npt.NDArray[np.bool_],
    left: Numbers,
) -> pa.RecordBatch:
    """Return the rows that are left. Of an unsettled key, at most one delete and one insert are
    left; the delete goes right in front of the insert if it came behind it.
    """
    places = left.astype(np.float64)
    deleted_at = {int(keys[row]): row for row in left[unsettled[left] & (signs[left] < 0)]}
    for index in np.flatnonzero(unsettled[left] & (signs[left] > 0)):
        row = left[index]
        places[index] = max(row, deleted_at.get(int(keys[row]), row) + 0.5)
    kinds = pc.if_else(
        pa.array(unsettled),
        pc.if_else(pa.array(signs > 0), INSERT, DELETE),
        rows.column(CHANGE_TYPE),
    )
    rows = rows.set_column(rows.schema.get_field_index(CHANGE_TYPE), CHANGE_FIELD, kinds)
    return rows.take(pa.array(left[np.argsort(places, kind="stable")]))


class DeferredKeyTables:
    """Holds the changes of tables with a deferrable key until their transaction ends."""

    def __init__(self, key_of: Callable[[str], tuple[str, ...] | None]) -> None:
        self._key_of = key_of
        """Returns the key of a table if it is deferrable."""
        self._held: dict[str, list[pa.RecordBatch]] = {}

    def items(self, items: Sequence[StreamItem], open_transaction: int | None) -> list[StreamItem]:
        """Return items of the stream, with the held changes of transactions that have ended. Where
        something else happens to such a table, its key is unique at that moment.
        """
        out: list[StreamItem] = []
        for item in items:
            if isinstance(item, TableChanges) and self._key_of(item.table) is not None:
                held = self._held.setdefault(item.table, [])
                held.append(item.rows)
                continue
            for table in list(self._held) if not isinstance(item, TableChanges) else []:
                out += self._settled(table, None)
            out.append(item)
        for table in list(self._held):
            out += self._settled(table, open_transaction)
        return out

    def _settled(self, table: str, open_transaction: int | None) -> list[StreamItem]:
        batches = self._held.pop(table)
        key = self._key_of(table)
        if key is None:  # it was stopped meanwhile
            return []
        rows = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
        ended = rows
        if open_transaction is not None:
            is_open = pc.equal(rows.column(TRANSACTION), open_transaction)
            held, ended = rows.filter(is_open), rows.filter(pc.invert(is_open))
            if held.nbytes > MAX_HELD_BYTES:
                return [TableStopped(table, _too_large(table))]
            if held.num_rows:
                self._held[table] = [held]
        return [TableChanges(table, settle(ended, key))] if ended.num_rows else []


def _too_large(table: str) -> str:
    return (
        f"The key of {table} is deferrable, so the changes of a transaction are held until it ends;"
        f" and one has more than {MAX_HELD_BYTES >> 20} MB of them. To fix: make the key NOT"
        " DEFERRABLE, or the transactions smaller; then request a snapshot of the table."
    )
