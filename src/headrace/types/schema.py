"""A topic's schema: from Spark's DDL to Arrow and back, the key, and the schema of a table's
changes.

Both log backends and the Spark data source use it. It needs neither pyspark nor a JVM; the parser
is in `ddl`, and how a schema changes is in `schema_history`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pyarrow as pa

from headrace.columnar.columns import (
    CHANGE_FIELD,
    CHANGE_TYPE,
    HEADERS_COLUMN,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TIMESTAMP_COLUMN,
)
from headrace.errors import BadSchema, CorruptionError, UnknownColumn
from headrace.types.ddl import SPARK_METADATA_KEY, TYPE_KEY, check_duplicates, parse_columns

RESERVED_COLUMNS = (
    PARTITION_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    HEADERS_COLUMN,
    CHANGE_TYPE,
    "_commit",
)
NOT_NULL_KEY = b"headrace.not_null"
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_NAMES: dict[pa.DataType, str] = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.date32(): "DATE",
    pa.time64("ns"): "TIME(6)",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP",
    pa.timestamp("us"): "TIMESTAMP_NTZ",
    pa.duration("us"): "INTERVAL DAY TO SECOND",
}


def parse_schema(ddl: str) -> pa.Schema:
    """The Arrow schema of a DDL column list, with the types that Spark uses for Arrow."""
    fields = parse_columns(ddl)
    if not fields:
        raise BadSchema(
            "The schema has no columns.",
            fix="name at least one, as in 'order_id BIGINT, amount DOUBLE'.",
        )
    check_duplicates(fields, where="The schema")
    for field in fields:
        if field.name.lower() in RESERVED_COLUMNS:
            raise BadSchema(
                f"The column name {field.name!r} is reserved.",
                fix=f"rename it; reserved are {', '.join(RESERVED_COLUMNS)}.",
            )
    return pa.schema(fields)


def to_ddl(schema: pa.Schema) -> str:
    """The DDL of a schema, the inverse of `parse_schema`."""
    return ", ".join(_column_ddl(field, separator=" ") for field in schema)


def to_spark_ddl(schema: pa.Schema) -> str:
    """The DDL of a schema for Spark's Python sources. CHAR and VARCHAR become STRING, because
    pyspark cannot pass them through Arrow.
    """
    return to_ddl(pa.schema([_without_lengths(field) for field in schema]))


def _without_lengths(field: pa.Field) -> pa.Field:
    metadata = {
        name: value
        for name, value in (field.metadata or {}).items()
        if name != TYPE_KEY or not value.startswith((b"CHAR", b"VARCHAR"))
    }
    kind = field.type
    if pa.types.is_map(kind):
        kind = pa.map_(_without_lengths(kind.key_field), _without_lengths(kind.item_field))
    elif pa.types.is_list(kind):
        kind = pa.list_(_without_lengths(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_without_lengths(child) for child in kind])
    return field.with_type(kind).with_metadata(metadata or None)


def _column_ddl(field: pa.Field, *, separator: str) -> str:
    is_plain = _PLAIN_NAME.fullmatch(field.name)
    name = field.name if is_plain else "`" + field.name.replace("`", "``") + "`"
    ddl = f"{name}{separator}{_type_ddl(field)}{'' if field.nullable else ' NOT NULL'}"
    comment = json.loads((field.metadata or {}).get(SPARK_METADATA_KEY, b"{}")).get("comment")
    if comment is None:
        return ddl
    escaped = comment.replace("\\", "\\\\").replace("'", "\\'")
    return f"{ddl} COMMENT '{escaped}'"


def _type_ddl(field: pa.Field) -> str:
    if field.metadata and TYPE_KEY in field.metadata:
        return str(field.metadata[TYPE_KEY], "utf-8")
    kind = field.type
    if kind in _NAMES:
        return _NAMES[kind]
    if pa.types.is_decimal128(kind):
        return f"DECIMAL({kind.precision},{kind.scale})"
    if pa.types.is_map(kind):
        return f"MAP<{_type_ddl(kind.key_field)}, {_type_ddl(kind.item_field)}>"
    if pa.types.is_list(kind):
        return f"ARRAY<{_type_ddl(kind.value_field)}>"
    if pa.types.is_struct(kind):
        # VARIANT, GEOMETRY and GEOGRAPHY are tagged structs in Arrow.
        if is_variant(kind):
            return "VARIANT"
        if name := _spatial_name(kind):
            srid = kind.field("wkb").metadata[b"srid"].decode()
            return f"{name}({'ANY' if srid == '-1' else srid})"
        return f"STRUCT<{', '.join(_column_ddl(child, separator=': ') for child in kind)}>"
    raise BadSchema(
        f"Column {field.name!r} has the Arrow type {kind}, which has no Spark type.",
        fix="cast it to a type that Spark has.",
    )


def type_name(kind: pa.DataType) -> str:
    """The name of a type in Spark's DDL, for messages and casts."""
    try:
        return _type_ddl(pa.field("", kind))
    except BadSchema:
        return "VOID" if pa.types.is_null(kind) else str(kind)


def is_spatial(kind: pa.DataType) -> bool:
    """Whether an Arrow type is Spark's GEOMETRY or GEOGRAPHY: a struct whose field `wkb` is
    tagged.
    """
    return pa.types.is_struct(kind) and _spatial_name(kind) is not None


def _spatial_name(kind: pa.StructType) -> str | None:
    for child in kind:
        for name in (b"geometry", b"geography"):
            if child.name == "wkb" and (child.metadata or {}).get(name) == b"true":
                return name.decode().upper()
    return None


def is_variant(kind: pa.DataType) -> bool:
    """Whether an Arrow type is Spark's VARIANT: a struct whose field `metadata` is tagged."""
    if not pa.types.is_struct(kind) or kind.num_fields != 2:
        return False
    return any(
        child.name == "metadata" and (child.metadata or {}).get(b"variant") == b"true"
        for child in kind
    )


def _split_change_type(schema: pa.Schema) -> tuple[list[pa.Field], list[pa.Field]]:
    fields = list(schema)
    return (fields[:-1], fields[-1:]) if fields and fields[-1].name == CHANGE_TYPE else (fields, [])


def check_key(schema: pa.Schema, key: str | Sequence[str] | None, *, where: str) -> tuple[str, ...]:
    """The columns of a key, checked: each must exist and have a plain type."""
    names = () if key is None else (key,) if isinstance(key, str) else tuple(key)
    for position, name in enumerate(names):
        if name not in schema.names:
            raise UnknownColumn(name, schema.names, where=where)
        if name in names[:position]:
            raise BadSchema(
                f"The key of {where} names the column {name!r} twice.", fix="name it once."
            )
        if pa.types.is_nested(schema.field(name).type):
            raise BadSchema(
                f"The column {name!r} of {where} is {_type_ddl(schema.field(name))}, which cannot"
                " be a key.",
                fix="use columns of plain types, or add one that holds what identifies the row.",
            )
    return names


def table_schema(schema: pa.Schema, key: tuple[str, ...]) -> pa.Schema:
    """The schema of a table's changes: key columns are never null, the others are null in a
    tombstone, and `_change_type` comes last. NOT NULL is stored in the metadata of the other
    columns, since it applies to every row but a tombstone.
    """
    stored = []
    for field in schema:
        if field.name in key:
            stored.append(field.with_nullable(False))
        elif field.nullable:
            stored.append(field)
        else:
            metadata = {**(field.metadata or {}), NOT_NULL_KEY: b"true"}
            stored.append(field.with_nullable(True).with_metadata(metadata))
    return pa.schema([*stored, CHANGE_FIELD], schema.metadata)


def declared_schema(schema: pa.Schema) -> pa.Schema:
    """The schema as the user declared it, which rows of a table's `upsert` have: without
    `_change_type`, and with NOT NULL. The inverse of `table_schema`.
    """
    stored, _ = _split_change_type(schema)
    declared = []
    for field in stored:
        metadata = dict(field.metadata or {})
        is_required = metadata.pop(NOT_NULL_KEY, None) is not None
        declared.append(
            field.with_nullable(False).with_metadata(metadata) if is_required else field
        )
    return pa.schema(declared, schema.metadata)


def schema_to_bytes(schema: pa.Schema) -> bytes:
    """A schema in Arrow's IPC format, metadata included."""
    return bytes(schema.serialize())


def schema_from_bytes(data: bytes) -> pa.Schema:
    """The inverse of `schema_to_bytes`."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(
            f"A stored schema cannot be read: {error}.",
            fix="restore the file that holds it from a backup.",
        ) from error


def quote_identifier(name: str) -> str:
    """A name quoted as in standard SQL, for the databases of views, captures and sinks."""
    return '"' + name.replace('"', '""') + '"'
