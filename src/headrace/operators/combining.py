"""Whether combining rows before the shuffle pays: about how many groups they would make, told from a sample."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.operators.kernel import TICK
from headrace.operators.keys import encode_keys, whole

_SAMPLE_ROWS = 8192
_WORTH = 0.5  # groups a row, above which combining costs more than it saves


def pays(rows: pa.Table, by: tuple[str, ...]) -> bool:
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
