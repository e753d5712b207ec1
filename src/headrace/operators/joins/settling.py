"""Changes of a table, some of which come from different shards, made one change for each key and tick: what went and came again is an update, or
nothing.

Needed behind a join of tables, and wherever else the rows of one key may be told under two: by the table's own key, before anything relies on that
key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.errors import BugError
from headrace.operators.buffers import Mask
from headrace.operators.changelog import CHANGES, differs
from headrace.operators.joins.matching import begins, sorting
from headrace.operators.joins.sides import goes, ticks_of
from headrace.operators.kernel import CHANGE_TYPE, TICK, KeyedState
from headrace.operators.keys import encode_keys, whole
from headrace.operators.segments import by_key


class SettleKernel:
    """A kernel without state: each tick's changes are made out by themselves. Of a key, a tick may bring one row that goes and one that comes."""

    def __init__(self, step: str, schema: pa.Schema, key: Sequence[str]) -> None:
        self.step_name, self.schema, self.key = step, schema, tuple(key)

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(pa.field(CHANGE_TYPE, pa.string(), nullable=False))

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:  # noqa: ARG002
        ticks, comes = ticks_of(rows), (~goes(rows)).astype(np.int64)
        order, new_key = by_key(encode_keys(rows, self.key))
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.cumsum(new_key)
        order = sorting(ticks, ranks, comes)
        ticks, ranks, comes = ticks[order], ranks[order], comes[order]
        if len(order) and not begins(ticks, ranks, comes).all():
            raise BugError(f"Step {self.step_name!r} was told of several rows of one key in a tick.")
        columns = [whole(rows.column(name)).take(pa.array(order)) for name in self.schema.names]
        kinds, stays = merged(columns, ~begins(ticks, ranks), comes == 1)
        result = pa.Table.from_arrays([*columns, kinds, pa.array(ticks)], schema=self.output.append(pa.field(TICK, pa.int64(), nullable=False)))
        return result if stays.all() else result.filter(pa.array(stays))


def merged(columns: Sequence[pa.Array], again: Mask, comes: Mask) -> tuple[pa.Array, Mask]:
    """The kinds of changes, of which some come `again` right behind the row that went; and which to tell: not those that are as they were."""
    second = np.flatnonzero(again)
    kinds = np.where(comes, 0, 3)
    kinds[second], kinds[second - 1] = 2, 1
    stays = np.ones(len(kinds), np.bool_)
    if len(second):
        before, after = pa.array(second - 1), pa.array(second)
        same = ~np.logical_or.reduce([differs(column.take(before), column.take(after)) for column in columns])
        stays[second[same]] = stays[second[same] - 1] = False
    return pa.array(CHANGES).take(pa.array(kinds)), stays
