"""The different rows of a table: each once, however many rows are alike. A table keyed by all its columns."""

from __future__ import annotations

import pyarrow as pa

from headrace.operators.aggregate import AggregateKernel


def distinct(step: str, schema: pa.Schema, row_key: tuple[str, ...] = ()) -> AggregateKernel:
    """A kernel over a table's changes, by all columns: a row is there as long as one like it is. Shards must be chosen by all columns, too."""
    return AggregateKernel(step, schema, schema.names, [], over_table=True, row_key=row_key)
