"""Tables in files: small constant tables that streams look up, such as countries by their codes.

    code,name         orders: (1, "AT"), (2, "XX")
    AT,Austria        join(file, on="code", how="left")
    DE,Germany        -> (1, "AT", "Austria"), (2, "XX", null)

The rows travel with the plan: what comes out depends neither on when the file is read nor on where.
`headrace.pipeline.file_table` reads the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import ORDER_FIELDS
from headrace.columnar.keys import encode_keys


@dataclass(frozen=True)
class FileTable:
    """A table in a file, as `hr.file_table` returns it for `stream.join`."""

    path: str
    schema: pa.Schema
    key: tuple[str, ...]
    fingerprint: str
    """A digest of the file's bytes."""
    rows: pa.Table = field(repr=False, compare=False)


@dataclass(frozen=True)
class FileLookup:
    """Adds to each row the columns of the row of a file that has its key. `columns` has, for each
    column of the result, whether it is the file's, and its name there.
    """

    table: FileTable
    on: tuple[str, ...]
    columns: tuple[tuple[bool, str], ...]
    schema: pa.Schema
    keeps_unmatched: bool

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        # Spark may hand over a column in another form of its type.
        columns = {
            name: rows.column(name).cast(self.table.schema.field(key).type)
            for name, key in zip(self.on, self.table.key, strict=True)
        }
        keys = encode_keys(pa.table(columns), self.on).cast(pa.binary())
        index = pc.index_in(keys, value_set=self._keys)
        for name in self.on:
            # Null equals nothing, also where the file's key has the bytes that stand for it.
            column = rows.column(name)
            if column.null_count:
                index = pc.if_else(column.is_null(), pa.scalar(None, index.type), index)
        if not self.keeps_unmatched and index.null_count:
            is_known = index.is_valid()
            rows, index = rows.filter(is_known), index.filter(is_known)
        arrays: list[Any] = []
        for (is_of_file, name), result in zip(self.columns, self.schema, strict=True):
            column = self.table.rows[name].chunk(0) if is_of_file and len(self._keys) else None
            if column is not None:
                arrays.append(column.take(index).cast(result.type))
            elif is_of_file:
                arrays.append(pa.nulls(rows.num_rows, result.type))
            else:
                arrays.append(rows.column(name).cast(result.type))
        order = [rows.column(column.name) for column in ORDER_FIELDS]
        return pa.RecordBatch.from_arrays(
            [*arrays, *order], schema=pa.schema([*self.schema, *ORDER_FIELDS])
        )

    @cached_property
    def _keys(self) -> pa.Array:
        return encode_keys(self.table.rows, self.table.key).cast(pa.binary())
