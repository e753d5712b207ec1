"""Tables without a key: how many equal rows there are.

Such a table is a multiset, and a topic has one row a key. So the key is a digest of the whole row,
and a column counts the rows that are equal:

    in       insert ('ann', 1), insert ('ann', 1), delete ('ann', 1)

    out      insert            'ann' 1  _row d41d…  _copies 1
             update_postimage  'ann' 1  _row d41d…  _copies 2
             update_postimage  'ann' 1  _row d41d…  _copies 1

The counts are in the topic; here they are cached, for the rows of the open transaction too.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.base import TableShape
from headrace.cdc.topics import live_rows
from headrace.columnar.columns import (
    CHANGE_FIELD,
    CHANGE_TYPE,
    DELETE,
    INSERT,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
)
from headrace.errors import ConfigurationError
from headrace.log.api import Log

MAX_DISTINCT = 2_000_000
"""The most different rows of one table: about 300 MB of memory."""
_CHANGES = pa.array([INSERT, UPDATE_POSTIMAGE, DELETE])
_INSERT, _UPDATE, _DELETE = range(3)


class TooManyRows(ConfigurationError):
    """A table without a key has more different rows than can be counted. Give it a key."""

    def __init__(self, table: str) -> None:
        super().__init__(
            f"{table} has no key, and more than {MAX_DISTINCT:,} different rows. They would have to"
            " be counted in memory.",
            fix=(
                f"ALTER TABLE {table} ADD COLUMN id bigint GENERATED ALWAYS AS IDENTITY PRIMARY"
                " KEY; and capture it under a new name and prefix."
            ),
        )


class RowCounts:
    """The number of equal rows of one table, by digest."""

    def __init__(self, shape: TableShape) -> None:
        assert shape.copies is not None
        self.shape = shape
        (self._key,) = shape.key
        self._copies = shape.copies
        self._counts: dict[str, int] = {}
        self.has_missed = False
        """Whether a row was deleted of which nothing was known."""

    @staticmethod
    def load(shape: TableShape, log: Log, topic: str) -> RowCounts:
        """Return the counts as they are in a topic. Raises TooManyRows."""
        counts = RowCounts(shape)
        rows = live_rows(log, topic, values=[counts._copies])
        copies = pc.fill_null(rows[counts._copies], 1).to_pylist()
        counts._counts = dict(zip(rows[counts._key].to_pylist(), copies, strict=True))
        counts._check_size()
        return counts

    def _check_size(self) -> None:
        if len(self._counts) > MAX_DISTINCT:
            raise TooManyRows(self.shape.name)

    def apply(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return single rows, inserted and deleted, as changes of the counts. Raises TooManyRows.

        An update that changed nothing is an old and a new row with one digest, and is left out.
        """
        changes = rows.column(CHANGE_TYPE)
        is_update = pc.or_(pc.equal(changes, UPDATE_PREIMAGE), pc.equal(changes, UPDATE_POSTIMAGE))
        rows = rows.filter(pc.invert(is_update))
        if not rows.num_rows:
            return rows
        digests = rows.column(self._key).dictionary_encode()
        codes = digests.indices.to_numpy()
        names = digests.dictionary.to_pylist()
        signs = np.where(pc.equal(rows.column(CHANGE_TYPE), DELETE).to_numpy(False), -1, 1)
        # Running sums by digest, in the order of the rows.
        order = np.argsort(codes, kind="stable")
        sums = np.cumsum(signs[order])
        starts = np.searchsorted(codes[order], np.arange(len(names)))
        sums -= np.repeat(
            sums[starts] - signs[order][starts], np.diff(np.append(starts, len(codes)))
        )
        before = np.array([self._counts.get(name, 0) for name in names])
        missing = np.maximum(0, -(before + np.minimum.reduceat(sums, starts)))
        if missing.any():
            self.has_missed = True
            before = before + missing
        after = np.empty(len(codes), np.int64)
        after[order] = sums + before[codes[order]]
        self._store(names, before + np.add.reduceat(signs[order], starts))
        kinds = np.where(
            signs > 0,
            np.where(after == 1, _INSERT, _UPDATE),
            np.where(after == 0, _DELETE, _UPDATE),
        )
        counts = pa.array(np.maximum(after, 1))
        rows = rows.set_column(rows.schema.get_field_index(self._copies), self._copies, counts)
        return rows.set_column(
            rows.schema.get_field_index(CHANGE_TYPE), CHANGE_FIELD, _CHANGES.take(pa.array(kinds))
        )

    def _store(self, names: list[str], counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        for name, count in zip(names, counts.tolist(), strict=True):
            if count:
                self._counts[name] = count
            else:
                self._counts.pop(name, None)
        self._check_size()
