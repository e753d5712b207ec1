"""The small values a log speaks in: what goes in, what comes out, and the names of the columns it
adds. Part of `api`.
"""

from __future__ import annotations

import pyarrow as pa

CHANGE_TYPE = "_change_type"
HEADERS_COLUMN = "_headers"
PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN = "_partition", "_offset", "_timestamp"
HEADERS_TYPE = pa.list_(
    pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])
)
TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
SYSTEM_FIELDS = (
    pa.field(PARTITION_COLUMN, pa.int32(), nullable=False),
    pa.field(OFFSET_COLUMN, pa.int64(), nullable=False),
    pa.field(TIMESTAMP_COLUMN, TIMESTAMP_TYPE, nullable=False),
)
INSERT, UPDATE_BEFORE, UPDATE, DELETE = "insert", "update_preimage", "update_postimage", "delete"
CHANGE_TYPES = (INSERT, UPDATE_BEFORE, UPDATE, DELETE)


# What a kernel is, and what it sees of its state and of time. Kernels compute; the engine hosts
# them on Spark, tests and users' tests host them in memory.
#
# A kernel is pure: its answer follows from its state, its rows and the clocks, never from a wall
# clock, from chance, or from how ticks were put into calls.


TICK = "_tick"
PARTITION = "_partition"


# Reading by ticks: which rows of which partition belong to a batch, and a Spark task that reads
# them.
#
# A task is an offset range of one topic partition with the ends of the ticks in it; its rows come
# as Arrow batches with their tick and their place in the pipeline's order.


RANK = "_rank"


# What change capture asks of a database: the protocol `Source`, and the values it speaks in.
# `capturing` drives it; each kind of database implements it.
#
# A source hands out *parts* of its stream, in commit order. Rows are Arrow batches: the table's
# columns, then the hidden ones (`HIDDEN`), then `_change_type`.

POSITION, COMMITTED_AT, TRANSACTION, ORDER, MARKS = (
    "_position",
    "_committed_at",
    "_transaction",
    "_order",
    "_marks",
)
HIDDEN = (
    pa.field(POSITION, pa.int64()),
    pa.field(COMMITTED_AT, TIMESTAMP_TYPE),
    pa.field(TRANSACTION, pa.int64()),
    pa.field(ORDER, pa.int32()),
    pa.field(MARKS, pa.string()),
)
"""Where in the source a change stands: its position, when and in which transaction it was
committed, its place in it. `_marks` is JSON about values that the columns cannot hold: {"document":
{"unchanged": true}} or {"amount": {"text": "NaN"}}.
"""
HIDDEN_DDL = (
    f"{POSITION} BIGINT, {COMMITTED_AT} TIMESTAMP, {TRANSACTION} BIGINT, {ORDER} INT, {MARKS}"
    " STRING"
)
CHANGE_FIELD = pa.field(CHANGE_TYPE, pa.string(), nullable=False)
