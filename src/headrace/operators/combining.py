"""Combining rows before the shuffle: whether it pays, about how many groups they would make, told from a sample; and what combined rows need to be a kernel's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.operators.kernel import TICK
from headrace.operators.keys import encode_keys, whole

ORDER = (TICK, "_rank", "_partition", "_offset")
"""The columns that tell a row's place in the pipeline's order."""

PARTIAL = "_partial"
"""The column with a state, in rows that stand for several."""

_SAMPLE_ROWS = 8192
_WORTH = 0.5  # groups a row, above which combining costs more than it saves


def pays(rows: pa.Table, by: Sequence[str]) -> bool:
    """Whether these rows make far fewer groups than they are. It decides about speed alone: the result is the same either way."""
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
    """From how many keys so many rows with so many different ones may have been drawn: found by halving."""
    low, high = float(distinct), 1e12
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _drawn(middle, rows) < distinct else (low, middle)
    return low


def by_tick(rows: pa.Table) -> pa.Table:
    """Rows in the order of their ticks, and otherwise as they were."""
    ticks = whole(rows.column(TICK)).to_numpy()
    return rows if (ticks[1:] >= ticks[:-1]).all() else rows.take(pa.array(np.argsort(ticks, kind="stable")))


def all_combined(rows: pa.Table, combine: Callable[[pa.Table], pa.Table], also: Sequence[str] = ()) -> pa.Table:
    """Where only some rows were combined, the others too; where none was, rows as they are. `also` names other columns that only combined rows have."""
    partial = rows.column(PARTIAL)
    if partial.null_count == 0:
        return rows
    plain = rows.drop_columns([name for name in (PARTIAL, *also) if name in rows.schema.names])
    if partial.null_count == len(partial):
        return plain
    combined = combine(plain.filter(partial.is_null()))
    return by_tick(pa.concat_tables([rows.filter(partial.is_valid()).select(combined.schema.names), combined]))
