"""Rows by key, in Arrow: those that have one of some keys, or none of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def having(rows: pa.Table, keys: pa.Table, key: list[str], *, wanted: bool) -> pa.Table:
    """By number, since Arrow joins no nested columns; in their order."""
    numbered = rows.select(key).append_column("__n", pa.array(np.arange(rows.num_rows)))
    found = numbered.join(keys.select(key).cast(rows.select(key).schema), key, join_type="left semi" if wanted else "left anti")["__n"]
    return rows.take(pa.array(np.sort(found.to_numpy())))
