"""Times in kernels: microseconds as integers, and as bytes that keep their order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.operators.kernel import Times
from headrace.operators.keys import whole

_SIGN = np.uint64(1 << 63)


def microseconds(column: pa.Array | pa.ChunkedArray) -> Times:
    """A column of timestamps without nulls."""
    array = whole(column)
    times: Times = array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64()).to_numpy()
    return times


def big_endian(times_us: Times) -> list[bytes]:
    """Eight bytes a time, in the order of the times."""
    raw = (times_us.astype(np.int64).view(np.uint64) ^ _SIGN).astype(">u8").tobytes()
    return [raw[at : at + 8] for at in range(0, len(raw), 8)]
