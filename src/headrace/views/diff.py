"""Compares two views. `headrace view diff` prints the result.

Views with a key are compared by key: rows that only one side has, and rows that differ. Streams
have no key, so their rows are compared as multisets: a row counts as extra as often as one side has
it more often than the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import TICK
from headrace.errors import InputError
from headrace.types.json_codec import array_text
from headrace.views.file import ViewInfo


@dataclass(frozen=True)
class ViewDifference:
    """The result of `diff_views`. Rows hold the columns that both views have; `changed_left` and
    `changed_right` list the rows that differ, in the same order.
    """

    columns_only_left: tuple[str, ...]
    columns_only_right: tuple[str, ...]
    only_left: pa.Table
    only_right: pa.Table
    changed_left: pa.Table
    changed_right: pa.Table
    same_rows: int

    @property
    def is_empty(self) -> bool:
        tables = (self.only_left, self.only_right, self.changed_left)
        return not (
            self.columns_only_left
            or self.columns_only_right
            or any(table.num_rows for table in tables)
        )


def diff_views(
    left: pa.Table, right: pa.Table, left_info: ViewInfo, right_info: ViewInfo
) -> ViewDifference:
    """Compare the columns that both views have. InputError if the views have different keys."""
    if left_info.key != right_info.key:
        keys = [
            f"({', '.join(info.key)})" if info.key else "none" for info in (left_info, right_info)
        ]
        raise InputError(
            f"{left_info.name!r} has the key {keys[0]}, {right_info.name!r} the key {keys[1]}.",
            fix="compare views with the same key, or ask with SQL.",
        )
    common = [name for name in left_info.schema.names if name in right_info.schema.names]
    left_only_columns, right_only_columns = (
        tuple(name for name in info.schema.names if name not in common)
        for info in (left_info, right_info)
    )
    left, right = left.select(common), right.select(common)
    left_texts, right_texts = _row_texts(left, common), _row_texts(right, common)
    if not left_info.key:
        extra_left = _extra_mask(left_texts, right_texts)
        return ViewDifference(
            columns_only_left=left_only_columns,
            columns_only_right=right_only_columns,
            only_left=left.filter(extra_left),
            only_right=right.filter(_extra_mask(right_texts, left_texts)),
            changed_left=left.slice(0, 0),
            changed_right=right.slice(0, 0),
            same_rows=pc.sum(pc.invert(extra_left), min_count=0).as_py(),
        )
    left_keys, right_keys = (_row_texts(table, left_info.key) for table in (left, right))
    matches = pc.index_in(left_keys, value_set=right_keys)
    is_common = matches.is_valid().to_numpy(zero_copy_only=False)
    left_rows, right_rows = np.flatnonzero(is_common), matches.drop_null().to_numpy()
    differs = pc.not_equal(
        left_texts.take(pa.array(left_rows)), right_texts.take(pa.array(right_rows))
    ).to_numpy(zero_copy_only=False)
    is_unmatched = np.ones(right.num_rows, np.bool_)
    is_unmatched[right_rows] = False
    return ViewDifference(
        columns_only_left=left_only_columns,
        columns_only_right=right_only_columns,
        only_left=left.filter(pa.array(~is_common)),
        only_right=right.filter(pa.array(is_unmatched)),
        changed_left=left.take(pa.array(left_rows[differs])),
        changed_right=right.take(pa.array(right_rows[differs])),
        same_rows=int((~differs).sum()),
    )


def without_ticks(info: ViewInfo, table: pa.Table) -> pa.Table:
    """A stream's rows without `_tick`: two versions of a pipeline may assign rows to different
    ticks.
    """
    return table.drop_columns([TICK]) if info.is_stream else table


def _row_texts(table: pa.Table, names: Sequence[str]) -> pa.Array:
    """The values of each row as one text, so that null equals null and NaN equals NaN."""
    if not table.num_rows:
        return pa.array([], pa.string())
    (batch,) = table.select(list(names)).combine_chunks().to_batches()
    return array_text(batch.columns)


def _extra_mask(texts: pa.Array, other_texts: pa.Array) -> pa.Array:
    """True at each row of one side that has no counterpart left on the other side."""
    available = {
        count["values"]: count["counts"] for count in pc.value_counts(other_texts).to_pylist()
    }
    is_extra = []
    for text in texts.to_pylist():
        available[text] = available.get(text, 0) - 1
        is_extra.append(available[text] < 0)
    return pa.array(is_extra, pa.bool_())
