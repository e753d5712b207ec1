"""Two views compared: by key, rows that one lacks and rows that differ; without a key, rows that one has more often. `headrace view diff` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import InputError
from headrace.log.json_text import array_text
from headrace.operators.kernel import TICK
from headrace.sinks.view_file import ViewInfo

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Difference:
    """Rows of the common columns that only one side has, and those that differ, in the same order on both sides."""

    columns_only_left: tuple[str, ...]
    columns_only_right: tuple[str, ...]
    only_left: pa.Table
    only_right: pa.Table
    changed_left: pa.Table
    changed_right: pa.Table
    same: int

    @property
    def is_none(self) -> bool:
        tables = (self.only_left, self.only_right, self.changed_left)
        return not (self.columns_only_left or self.columns_only_right or any(table.num_rows for table in tables))


def difference(left: pa.Table, right: pa.Table, left_info: ViewInfo, right_info: ViewInfo) -> Difference:
    """What is different, in the columns that both have. InputError if they cannot be laid beside each other."""
    if left_info.key != right_info.key:
        keys = [f"({', '.join(info.key)})" if info.key else "none" for info in (left_info, right_info)]
        raise InputError(
            f"{left_info.name!r} has the key {keys[0]}, {right_info.name!r} the key {keys[1]}.",
            fix="compare views with the same key, or ask with SQL.",
        )
    common = [name for name in left_info.schema.names if name in right_info.schema.names]
    only = [tuple(name for name in info.schema.names if name not in common) for info in (left_info, right_info)]
    left, right = (table.select(common) for table in (left, right))
    texts = [_texts(table, common) for table in (left, right)]
    if not left_info.key:
        return Difference(only[0], only[1], *_beyond(left, right, *texts), left.slice(0, 0), right.slice(0, 0), _shared(*texts))
    keys_left, keys_right = (_texts(table, left_info.key) for table in (left, right))
    at = pc.index_in(keys_left, value_set=keys_right)
    is_common = at.is_valid().to_numpy(zero_copy_only=False)
    pairs = np.flatnonzero(is_common), at.drop_null().to_numpy()
    unlike = pc.not_equal(texts[0].take(pa.array(pairs[0])), texts[1].take(pa.array(pairs[1]))).to_numpy(zero_copy_only=False)
    lonely = np.ones(right.num_rows, np.bool_)
    lonely[pairs[1]] = False
    changed_left, changed_right = (table.take(pa.array(rows[unlike])) for table, rows in zip((left, right), pairs, strict=True))
    return Difference(
        only[0], only[1], left.filter(pa.array(~is_common)), right.filter(pa.array(lonely)), changed_left, changed_right, int((~unlike).sum())
    )


def _texts(table: pa.Table, names: Sequence[str]) -> pa.Array:
    """A row's values as one text: nulls and NaN are like themselves."""
    if not table.num_rows:
        return pa.array([], pa.string())
    (whole,) = table.select(list(names)).combine_chunks().to_batches()
    return array_text(whole.columns)


def _counts(texts: pa.Array) -> dict[str, int]:
    return {each["values"]: each["counts"] for each in pc.value_counts(texts).to_pylist()}


def _beyond(left: pa.Table, right: pa.Table, left_texts: pa.Array, right_texts: pa.Array) -> tuple[pa.Table, pa.Table]:
    """Rows that a side has more often than the other: as many of them as it has more."""
    return left.filter(_more(left_texts, right_texts)), right.filter(_more(right_texts, left_texts))


def _more(mine: pa.Array, others: pa.Array) -> pa.Array:
    left = _counts(others)
    more = []
    for text in mine.to_pylist():
        left[text] = left.get(text, 0) - 1
        more.append(left[text] < 0)
    return pa.array(more, pa.bool_())


def _shared(left: pa.Array, right: pa.Array) -> int:
    others = _counts(right)
    return sum(min(count, others.get(text, 0)) for text, count in _counts(left).items())


def comparable(info: ViewInfo, table: pa.Table) -> pa.Table:
    """Without a stream's ticks, which a version may have cut otherwise."""
    return table.drop_columns([TICK]) if info.is_stream else table
