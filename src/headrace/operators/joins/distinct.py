"""The different rows of a table, or the different values of some of its columns: each once, however many rows have them. A table keyed by these columns."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from headrace.operators.aggregate import AggregateKernel


def distinct(step: str, schema: pa.Schema, row_key: tuple[str, ...] = (), columns: Sequence[str] = ()) -> AggregateKernel:
    """A kernel over a table's changes, by some columns, or by all: what is told is there as long as a row has it. Shards must be chosen by them, too."""
    return AggregateKernel(step, schema, columns or schema.names, [], over_table=True, row_key=row_key)
