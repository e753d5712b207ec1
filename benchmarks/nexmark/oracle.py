"""DuckDB's answers to Nexmark's queries over all rows at once, and ours in the same form: as many
of each row, whatever their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks.nexmark.events import Events, side_input
from benchmarks.nexmark.queries import Query
from headrace.columnar.columns import CHANGE_TYPE, OFFSET_COLUMN, PARTITION_COLUMN
from headrace.log.api import Log

Rows = Counter[tuple[Any, ...]]


def expected(query: Query, rows: Events) -> Rows:
    """What a query comes to over some events."""
    with duckdb.connect() as database:
        for name, table in rows.tables().items():
            arrival = pa.array(np.arange(table.num_rows))
            database.register(name, _without_zones(table).append_column("arrival", arrival))
        database.register("side_input", side_input())
        return _counted(database.sql(query.sql).to_arrow_table())


def answered(
    query: Query, log: Log, topic: str, key: Sequence[str], columns: Sequence[str]
) -> Rows:
    """What is in a query's topic: a stream's rows, or what the changes of a table amount to.

    Args:
        query: The query.
        log: The log.
        topic: The topic with the answer.
        key: The primary key if the answer is a table.
        columns: The answer's columns.

    """
    rows = log.read(topic).to_table()
    if CHANGE_TYPE in rows.column_names:
        with duckdb.connect() as database:
            database.register("changes", rows)
            keys = ", ".join(f'"{name}"' for name in key)
            rows = database.sql(
                f"SELECT * FROM changes WHERE {CHANGE_TYPE} <> 'update_preimage' QUALIFY"
                f" ROW_NUMBER() OVER (PARTITION BY {keys} ORDER BY {PARTITION_COLUMN},"
                f" {OFFSET_COLUMN} DESC) = 1 AND {CHANGE_TYPE} <> 'delete'"
            ).to_arrow_table()
    return _counted(_in_the_form_of_sql(query, _without_zones(rows.select(list(columns)))))


def _in_the_form_of_sql(query: Query, rows: pa.Table) -> pa.Table:
    """The columns of the SQL: windows that the benchmark leaves out, and the times of a session."""
    if query.name in {"q5", "q8", "q9"}:
        extra = {"window_start", "window_end", "rank"} & set(rows.column_names)
        return rows.drop_columns(list(extra))
    if query.name == "q12":
        return rows.group_by("bidder").aggregate([("bid_count", "sum")])
    return rows


def _without_zones(rows: pa.Table) -> pa.Table:
    for number, field in enumerate(rows.schema):
        if pa.types.is_timestamp(field.type):
            naive = rows.column(number).cast(pa.int64()).cast(pa.timestamp("us"))
            rows = rows.set_column(number, field.name, naive)
    return rows


def _counted(rows: pa.Table) -> Rows:
    columns = [[_plain(value) for value in column.to_pylist()] for column in rows.columns]
    return Counter(zip(*columns, strict=True))


def _plain(value: Any) -> Any:
    """Numbers of all types alike."""
    if isinstance(value, float | Decimal) and value == int(value):
        return int(value)
    return value
