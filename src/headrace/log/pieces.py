"""Tables in pieces of bounded size: what Arrow counts in 32 bits, what Spark carries in one value and what a log writes in one go all have an end.

Whoever turns a table into record batches takes them from here: a column of more than 2 GiB of text does not fit into one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

PIECE_BYTES = 64 << 20


def pieces(rows: pa.Table, most_bytes: int | None = None) -> Iterator[pa.RecordBatch]:
    """All rows in their order, as few batches as the bound allows; a single row may be larger. An empty table has none."""
    if rows.num_rows > 1 and rows.nbytes > (PIECE_BYTES if most_bytes is None else most_bytes):
        middle = rows.num_rows // 2
        yield from pieces(rows.slice(0, middle), most_bytes)
        yield from pieces(rows.slice(middle), most_bytes)
    elif rows.num_rows:
        in_chunks = any(column.num_chunks > 1 for column in rows.columns)
        yield from (rows.combine_chunks() if in_chunks else rows).to_batches()
