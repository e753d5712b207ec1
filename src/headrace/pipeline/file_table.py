"""`hr.file_table`: reads a constant table from a CSV, Parquet or JSON file when a pipeline is
declared.

The content's fingerprint is part of the plan, so an edited file is an edited pipeline. Tables that
change belong into topics. `headrace.operators.file_table` looks rows up in it.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.keys import encode_keys
from headrace.errors import PlanError
from headrace.operators.file_table import FileTable
from headrace.types.json_codec import decode_rows
from headrace.types.schema import check_key, parse_schema

MAX_FILE_BYTES = 16 * 1024**2
_FORMATS = {".csv": "csv", ".parquet": "parquet", ".json": "json", ".jsonl": "json"}


def file_table(
    path: str | Path, *, schema: str, key: str | Sequence[str], format: str | None = None
) -> FileTable:
    """A constant table in a CSV, Parquet or JSON file, for `stream.join`.

    The file is read now. Its content is part of the plan: where it differs, the pipeline is another
    one, and outputs that depend on it are built again or need a new version, as after every edit.

    Args:
        path: The file, of at most 16 MiB. A CSV file has a header; an empty field is null, a quoted
            empty one an empty text. A JSON file has an object per line. Further columns are
            ignored.
        schema: The columns that are used, as Spark DDL.
        key: The column or columns of the primary key: never null, and each value once.
        format: `"csv"`, `"parquet"` or `"json"`; by default as the file's name ends.

    Returns:
        What `stream.join` takes as `other`.

    Raises:
        BadSchema: The schema cannot be parsed.
        UnknownColumn: The key names a column that does not exist.
        PlanError: The file cannot be read, is too large, does not fit the schema, or has a key
            twice.

    Example:
        ```python
        def with_names(orders):
            names = hr.file_table("regions.csv", schema="region STRING, name STRING", key="region")
            return orders.join(names, on="region", how="left")
        ```
    """
    where = f"The file {str(path)!r}"
    columns = parse_schema(schema)
    names = check_key(columns, (key,) if isinstance(key, str) else tuple(key), where=where)
    kind = format or _FORMATS.get(Path(path).suffix.lower())
    if kind not in {"csv", "parquet", "json"}:
        raise PlanError(
            f"{where} has the format {kind!r}.", fix='say which: format="csv", "parquet" or "json".'
        )
    try:
        size = Path(path).stat().st_size
        content = Path(path).read_bytes() if size <= MAX_FILE_BYTES else b""
    except OSError as error:
        raise PlanError(
            f"{where} cannot be read: {error.strerror}.",
            fix="give the path of a file that is there where the pipeline is declared.",
        ) from None
    if size > MAX_FILE_BYTES:
        raise PlanError(
            f"{where} has {size:,} bytes, and a table in a file has at most {MAX_FILE_BYTES:,}.",
            fix="append its rows to a table's topic, and read that with table(…).",
        )
    try:
        rows = _parse(content, kind, columns)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise PlanError(
            f"{where} does not fit the columns {schema}: {error}.",
            fix="correct the file, or declare the columns that it has.",
        ) from None
    _check_keys(rows, names, where=where)
    return FileTable(str(path), columns, names, hashlib.sha256(content).hexdigest()[:16], rows)


def _parse(content: bytes, kind: str, columns: pa.Schema) -> pa.Table:
    """The declared columns of a file's rows."""
    if kind == "parquet":
        from pyarrow import parquet

        found = parquet.read_table(io.BytesIO(content), columns=columns.names)
    elif kind == "csv":
        from pyarrow import csv

        found = csv.read_csv(
            io.BytesIO(content),
            convert_options=csv.ConvertOptions(
                column_types=dict(zip(columns.names, columns.types, strict=True)),
                include_columns=columns.names,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
    else:
        found = _parse_json_lines(content, columns)
    return found.select(columns.names).cast(columns).combine_chunks()


def _parse_json_lines(content: bytes, columns: pa.Schema) -> pa.Table:
    lines = [line for line in content.splitlines() if line.strip()]
    decoded = decode_rows(lines, columns, unknown=Counter())
    if decoded.misfits:
        number, reason = next(iter(decoded.misfits.items()))
        raise ValueError(f"row {number + 1}: {reason}")
    return pa.Table.from_batches([decoded.batch])


def _check_keys(rows: pa.Table, key: tuple[str, ...], *, where: str) -> None:
    for name in key:
        if rows[name].null_count:
            raise PlanError(
                f"{where} has a row whose key {name!r} is null.", fix="leave such rows out."
            )
    keys = encode_keys(rows, key).cast(pa.binary())
    counts = pc.value_counts(keys)
    repeated = counts.field(0).filter(pc.greater(counts.field(1), 1))
    if len(repeated):
        first = rows.slice(pc.index(keys, repeated[0]).as_py(), 1).select(key).to_pylist()[0]
        raise PlanError(
            f"{where} has the key {first!r} more than once.",
            fix="keep one row for each key, or name more columns as the key.",
        )
