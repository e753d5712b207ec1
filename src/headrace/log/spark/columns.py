"""Columns of topics and of DataFrames: a topic's columns as Spark's, and the check whether a
DataFrame's columns fit a topic.

A read gives the topic's columns, then `_partition`, `_offset`, `_timestamp`, and `_headers` if
requested. A write must have exactly the topic's columns, in any order; a column may have a narrower
type than the topic's (INT for BIGINT), or a former name, and may be left out if it was added to the
topic later.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type
from pyspark.sql.types import StructType

from headrace.columnar.columns import (
    CHANGE_TYPE,
    HEADERS_COLUMN,
    SYSTEM_FIELDS,
    UPDATE_POSTIMAGE,
)
from headrace.errors import BadRows, ConfigurationError, InputError, nearest
from headrace.log.rows import with_change_type
from headrace.log.values import TopicInfo, selected_columns
from headrace.types.schema import is_spatial, is_variant, to_spark_ddl
from headrace.types.values import Misfit, cast_losslessly

types = pa.types
_ADDED_BY_READING = {HEADERS_COLUMN, *(field.name for field in SYSTEM_FIELDS)}
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
"""The decimal digits that an integer needs, by its number of bits."""


# Reading


def spark_schema(info: TopicInfo, columns: Iterable[str] | None, *, headers: bool) -> str:
    """The DDL of a read: all columns, or the named ones in their order."""
    chosen = None if columns is None else list(columns)
    return to_spark_ddl(selected_columns(info, chosen, headers=headers)[0])


def arrow_schema(schema: StructType) -> pa.Schema:
    """A Spark schema as Spark's Python workers expect it of Arrow batches."""
    return to_arrow_schema(schema, timezone="UTC")


def check_readable(wanted: StructType, info: TopicInfo, *, headers: bool) -> None:
    """Check a schema given with `.schema(...)`: it may leave out columns, but not change one."""
    full, _ = selected_columns(info, wanted.names, headers=headers)
    for field in arrow_schema(wanted):
        stored = full.field(field.name)
        if not (type_fits(field.type, stored.type) and type_fits(stored.type, field.type)):
            raise ConfigurationError(
                f"The schema given for reading {info.name!r} has {field.name!r} as {field.type};"
                f" the topic has {stored.type}.",
                fix="leave the schema out: the topic has one.",
            )


def relabel(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch with Spark's names for the same types: the element of a list is called `element`
    there. No value changes.

    Raises:
        InputError: A column of the topic was widened under the query, and has a value that does
            not fit.
    """
    if batch.schema.equals(schema):
        return batch
    arrays = [
        array if array.type.equals(field.type) else _relabelled(array, field)
        for array, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _relabelled(array: pa.Array, field: pa.Field) -> pa.Array:
    if type_fits(array.type, field.type):
        return array.cast(field.type)
    try:
        return cast_losslessly(array, field)
    except (Misfit, pa.ArrowInvalid) as error:
        raise InputError(
            f"The topic's column {field.name!r} was altered since the query started, and has a"
            f" value that the query cannot hold: {error}.",
            fix="start the query again: it takes over the topic's present types.",
        ) from None


# Writing


def check_writable(schema: StructType, info: TopicInfo) -> None:
    """Refuse a DataFrame that does not fit a topic, naming the column, before it runs."""
    where = f"The topic {info.name!r}"
    wanted = info.arrow_schema
    for name in schema.names:
        if info.schema_history.present_name(name) not in wanted.names:
            raise _unknown_column(name, info)
        if schema.names.count(name) > 1:
            raise BadRows(
                f"The DataFrame has the column {name!r} twice.", fix="rename or drop one."
            )
    sources = {info.schema_history.present_name(name): name for name in schema.names}
    for field in wanted:
        if field.name in sources:
            _check_type(schema, field, sources[field.name], where)
        elif field.name != CHANGE_TYPE and field.name not in info.schema_history.added:
            raise BadRows(
                f"{where} has a column {field.name!r} that the DataFrame lacks.",
                fix="add it; as null, if there is no value.",
            )


def _unknown_column(name: str, info: TopicInfo) -> Exception:
    if name in _ADDED_BY_READING:
        return BadRows(
            f"The DataFrame has the column {name!r}, which reading a topic adds and which cannot be"
            " written.",
            fix=f"df.drop({name!r})",
        )
    return BadRows(
        f"The topic {info.name!r} has no column {name!r}, and the DataFrame has:"
        f" {nearest(name, info.columns)}",
        fix="drop it, or add it to the topic with alter_topic(add_columns=...).",
    )


def _check_type(schema: StructType, field: pa.Field, source: str, where: str) -> None:
    kind = schema[source].dataType
    try:
        given = to_arrow_type(kind, timezone="UTC")
    except PySparkException:
        given = None
    if given is None or not type_fits(given, field.type):
        raise BadRows(
            f"{where} has the column {field.name!r} as {_spark_name(field)}; the DataFrame has it"
            f" as {kind.simpleString().upper()}.",
            fix=(
                f"cast it, as in df.withColumn({source!r},"
                f" df[{source!r}].cast({_spark_name(field)!r}))."
            ),
        )


def _spark_name(field: pa.Field) -> str:
    return to_spark_ddl(
        pa.schema([pa.field("c", field.type, metadata=field.metadata)])
    ).removeprefix("c ")


def type_fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether every value of one type can be stored in another without loss."""
    if types.is_null(given):
        return True
    if any(map(_is_tagged, (given, wanted))):
        return bool(given.equals(wanted, check_metadata=True))
    if types.is_nested(wanted):
        return _nested_fits(given, wanted)
    if given.equals(wanted):
        return True
    if types.is_integer(given):
        return _integer_fits(given, wanted)
    if types.is_decimal(given) and types.is_decimal(wanted):
        return bool(
            wanted.scale >= given.scale
            and wanted.precision - wanted.scale >= given.precision - given.scale
        )
    return bool(types.is_float32(given) and types.is_float64(wanted))


def _is_tagged(kind: pa.DataType) -> bool:
    """Whether a type is VARIANT or spatial: in Arrow a struct with a tag in a field's metadata."""
    return is_variant(kind) or is_spatial(kind)


def _integer_fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    if types.is_decimal(wanted):
        return bool(wanted.precision - wanted.scale >= _DIGITS[given.bit_width])
    if types.is_floating(wanted):
        return bool(given.bit_width < wanted.bit_width)
    return bool(types.is_integer(wanted) and given.bit_width <= wanted.bit_width)


def _nested_fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    if types.is_map(wanted):
        return (
            bool(types.is_map(given))
            and type_fits(given.key_type, wanted.key_type)
            and type_fits(given.item_type, wanted.item_type)
        )
    if types.is_list(wanted):
        return (
            bool(types.is_list(given))
            and not types.is_map(given)
            and type_fits(given.value_type, wanted.value_type)
        )
    if not types.is_struct(given) or sorted(part.name for part in given) != sorted(
        part.name for part in wanted
    ):
        return False
    return all(type_fits(given.field(part.name).type, part.type) for part in wanted)


def with_default_change(batch: pa.RecordBatch, info: TopicInfo) -> pa.RecordBatch:
    """A batch with a change type. On a table's topic, rows without one are upserts."""
    return (
        with_change_type(batch, UPDATE_POSTIMAGE)
        if info.is_table and CHANGE_TYPE not in batch.schema.names
        else batch
    )
