"""The reserved column names, and the Arrow fields that go with them.

The names with a leading underscore that users meet next to their own columns:

- the columns that a log adds to each row that is read (`SYSTEM_FIELDS`, `HEADERS_COLUMN`);
- the change type of a row of a table (`CHANGE_TYPE`, `CHANGE_FIELD` and its four values);
- the order of rows in a pipeline (`TICK`, `RANK`, `ORDER_FIELDS`);
- the position of a captured change in its source database (`HIDDEN_FIELDS`).
"""

from __future__ import annotations

import pyarrow as pa

# Columns of a log

PARTITION_COLUMN = "_partition"
OFFSET_COLUMN = "_offset"
TIMESTAMP_COLUMN = "_timestamp"
HEADERS_COLUMN = "_headers"
TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
HEADERS_TYPE = pa.list_(
    pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])
)
SYSTEM_FIELDS = (
    pa.field(PARTITION_COLUMN, pa.int32(), nullable=False),
    pa.field(OFFSET_COLUMN, pa.int64(), nullable=False),
    pa.field(TIMESTAMP_COLUMN, TIMESTAMP_TYPE, nullable=False),
)

# Change types, named as Delta Lake's change data feed names them

CHANGE_TYPE = "_change_type"
INSERT = "insert"
UPDATE_PREIMAGE = "update_preimage"
UPDATE_POSTIMAGE = "update_postimage"
DELETE = "delete"
CHANGE_TYPES = (INSERT, UPDATE_PREIMAGE, UPDATE_POSTIMAGE, DELETE)
CHANGE_FIELD = pa.field(CHANGE_TYPE, pa.string(), nullable=False)

# The order of rows in a pipeline: by tick, then by the rank of their source, partition and offset

TICK = "_tick"
RANK = "_rank"
TICK_FIELD = pa.field(TICK, pa.int64(), nullable=False)
ORDER_FIELDS = (
    TICK_FIELD,
    pa.field(RANK, pa.int32(), nullable=False),
    pa.field(PARTITION_COLUMN, pa.int32(), nullable=False),
    pa.field(OFFSET_COLUMN, pa.int64(), nullable=False),
)

# Captured changes

POSITION = "_position"
COMMITTED_AT = "_committed_at"
TRANSACTION = "_transaction"
ORDER = "_order"
MARKS = "_marks"
HIDDEN_FIELDS = (
    pa.field(POSITION, pa.int64()),
    pa.field(COMMITTED_AT, TIMESTAMP_TYPE),
    pa.field(TRANSACTION, pa.int64()),
    pa.field(ORDER, pa.int32()),
    pa.field(MARKS, pa.string()),
)
"""The columns that change capture adds to a table's own: the change's position in the source, the
time and the id of its transaction, and its index in that transaction. `_marks` is JSON about values
that the columns cannot hold: {"document": {"unchanged": true}} or {"amount": {"text": "NaN"}}.
"""
HIDDEN_DDL = (
    f"{POSITION} BIGINT, {COMMITTED_AT} TIMESTAMP, {TRANSACTION} BIGINT, {ORDER} INT, {MARKS}"
    " STRING"
)
