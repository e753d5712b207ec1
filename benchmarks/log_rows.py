"""The rows that the log's benchmarks move: a million, about 100 bytes each, the same for both
sides.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

ROWS = 1_000_000
BATCH_ROWS = 10_000
PARTITIONS = 4
SCHEMA = "id BIGINT, customer_id BIGINT, amount DOUBLE, payload STRING"
KEY = "customer_id"
_ARROW = pa.schema(
    [
        ("id", pa.int64()),
        ("customer_id", pa.int64()),
        ("amount", pa.float64()),
        ("payload", pa.string()),
    ]
)


def batches(rows: int = ROWS, batch_rows: int = BATCH_ROWS) -> list[pa.RecordBatch]:
    """Arrow batches: 24 bytes of numbers and 64 of text a row, some 110 bytes as JSON."""
    rng = np.random.default_rng(7)
    payload = pa.array(
        ["".join(chr(97 + c) for c in line) for line in rng.integers(0, 26, (1000, 64))]
    )
    made = []
    for first in range(0, rows, batch_rows):
        count = min(batch_rows, rows - first)
        columns = [
            pa.array(np.arange(first, first + count)),
            pa.array(rng.integers(0, 100_000, count)),
            pa.array(rng.integers(0, 100_000, count) / 100),
            payload.take(pa.array(rng.integers(0, 1000, count))),
        ]
        made.append(pa.RecordBatch.from_arrays(columns, schema=_ARROW))
    return made
