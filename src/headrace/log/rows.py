"""Whatever a user appends, made into one Arrow batch with exactly the topic's schema, or refused
with the row and the column named.

Producers and transactions of both backends call `to_batch` before anything is written. The usual
case is converted first and looked at only if that fails: one dict costs some microseconds, a batch
that already fits next to nothing. Row numbers count from 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import (
    CHANGE_FIELD,
    CHANGE_TYPE,
    CHANGE_TYPES,
    DELETE,
    HEADERS_COLUMN,
    HEADERS_TYPE,
    UPDATE,
)
from headrace.errors import BadRows, nearest
from headrace.log.values import Headers, Rows
from headrace.types.schema import NOT_NULL_KEY, declared_schema
from headrace.types.values import Column, Misfit, check, column, culprit, fit, needs_check

if TYPE_CHECKING:
    import pandas as pd


_PLANS_KEPT = 512
_HEADERS_FIELD = pa.field(HEADERS_COLUMN, HEADERS_TYPE)
_ERRORS = (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError)


@dataclass(frozen=True)
class _Plan:
    """What a schema asks of rows, worked out once."""

    schema: pa.Schema
    names: list[str]
    columns: list[Column]
    struct: pa.StructType
    checked: list[int]
    """The columns that can break the schema although their type is right."""


_plans: dict[int, _Plan] = {}


def _plan(schema: pa.Schema) -> _Plan:
    """Kept by identity: schemas are compared without their metadata, where lengths stand. A plan
    holds its schema, so an id is not used again.
    """
    plan = _plans.get(id(schema))
    if plan is None:
        checked = [position for position, field in enumerate(schema) if needs_check(field)]
        plan = _Plan(
            schema,
            schema.names,
            [column(field) for field in schema],
            pa.struct(list(schema)),
            checked,
        )
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        _plans[id(schema)] = plan
    return plan


def to_batch(rows: Rows, schema: pa.Schema, *, topic: str) -> pa.RecordBatch:
    """`rows` as one batch with exactly `schema`. BadRows, naming row and column, if that would lose
    or guess anything.
    """
    plan = _plan(schema)
    if type(rows) is dict:
        return _from_mappings([rows], plan, topic)
    if isinstance(rows, pa.RecordBatch):
        return _from_arrow(rows, plan, topic)
    if isinstance(rows, pa.Table):
        return _from_arrow(rows.combine_chunks(), plan, topic)
    if isinstance(rows, Mapping):
        return _from_mappings([rows], plan, topic)
    if _is_pandas(rows):
        return _from_pandas(rows, plan, topic)
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise BadRows(f"Rows for {topic} cannot be a {type(rows).__name__}.", fix=_ACCEPTED)
    listed: list[Any] = list(rows)
    return _from_mappings(listed, plan, topic)


_ACCEPTED = "pass a dict, a list of dicts, a pyarrow Table or RecordBatch, or a pandas DataFrame."


def _is_pandas(rows: object) -> TypeGuard[pd.DataFrame]:
    """Without importing pandas: whoever has a frame has done so. Another thread may be importing it
    right now.
    """
    frame = getattr(sys.modules.get("pandas"), "DataFrame", None)
    return frame is not None and isinstance(rows, frame)


# Dicts


def _from_mappings(rows: list[Mapping[str, Any]], plan: _Plan, topic: str) -> pa.RecordBatch:
    batch = _converted(rows, plan)
    if batch is None:
        _explain_mappings(rows, plan, topic)
    return batch


def _converted(rows: list[Mapping[str, Any]], plan: _Plan) -> pa.RecordBatch | None:
    """The batch, or nothing if any row does not fit; which one, and why, is a question for
    later.
    """
    try:
        if not {len(plan.names)}.issuperset(map(len, rows)):
            return None
        if _are_plain(rows, plan):
            return pa.RecordBatch.from_struct_array(pa.array(rows, plan.struct))
        arrays = [each.array([row[each.name] for row in rows]) for each in plan.columns]
    except (KeyError, *_ERRORS):
        return None
    return pa.RecordBatch.from_arrays(arrays, schema=plan.schema)


def _are_plain(rows: list[Mapping[str, Any]], plan: _Plan) -> bool:
    """Whether all values have types that Arrow takes as they are: then it can take all columns in
    one go.
    """
    return {dict}.issuperset(map(type, rows)) and all(
        each.exact.issuperset([type(row[each.name]) for row in rows]) for each in plan.columns
    )


def _explain_mappings(rows: list[Mapping[str, Any]], plan: _Plan, topic: str) -> NoReturn:
    """The first thing that is wrong: the columns of any row come before the values."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise BadRows(
                f"Row {number} for {topic} is a {type(row).__name__}, not a dict.", fix=_ACCEPTED
            )
        _check_names(row, plan.names, where=f"Row {number} for {topic}")
    for each in plan.columns:
        values = [row[each.name] for row in rows]
        try:
            each.array(values)
        except _ERRORS:
            _refuse(topic, each.name, *each.culprit(values))
    raise BadRows(f"The rows for {topic} do not fit its schema.", fix="append fewer rows at once.")


def _check_names(present: Iterable[str], wanted: list[str], *, where: str) -> None:
    names = list(present)
    missing = [name for name in wanted if name not in names]
    extra = [name for name in names if name not in wanted]
    if extra:
        raise BadRows(
            f"{where}: the topic has no column {extra[0]!r}: {nearest(str(extra[0]), wanted)}",
            fix=_FIX_NAMES,
        )
    if missing:
        raise BadRows(
            f"{where}: the column {missing[0]!r} is missing.",
            fix="give every column of the schema; None where there is no value.",
        )
    if len(names) != len(wanted):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRows(f"{where}: the column {twice!r} is there twice.", fix="rename or drop one.")


_FIX_NAMES = (
    "give exactly the columns of the schema, or add the column to the topic with"
    " alter_topic(add_columns=...)."
)


def _refuse(topic: str, name: str, row: int, reason: str) -> NoReturn:
    raise BadRows(
        f"Row {row} for {topic}, column {name!r}: {reason.rstrip('.')}.",
        fix=(
            "convert the value to the column's type before appending; nothing of this append was"
            " stored."
        ),
    )


# Arrow


def _from_arrow(rows: pa.Table | pa.RecordBatch, plan: _Plan, topic: str) -> pa.RecordBatch:
    if isinstance(rows, pa.RecordBatch) and rows.schema.equals(plan.schema, check_metadata=True):
        _check_columns(rows, plan, topic)
        return rows
    _check_names(rows.schema.names, plan.names, where=f"Rows for {topic}")
    arrays = [
        _fitted(_whole(rows.column(field.name), topic, field.name), field, topic)
        for field in plan.schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=plan.schema)


def _check_columns(batch: pa.RecordBatch, plan: _Plan, topic: str) -> None:
    for position in plan.checked:
        array, field = batch.column(position), plan.schema.field(position)
        try:
            check(array, field)
        except Misfit as error:
            _refuse(topic, field.name, *culprit(array, field, error, check))


def _whole(values: pa.Array | pa.ChunkedArray, topic: str, name: str) -> pa.Array:
    """One array of what may be several."""
    if isinstance(values, pa.Array):
        return values
    if values.num_chunks == 1:
        return values.chunk(0)
    combined = values.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        if combined.num_chunks > 1:
            raise BadRows(
                f"Column {name!r} of the rows for {topic} is larger than 2 GiB.",
                fix="append fewer rows at once.",
            )
        return combined.chunk(0) if combined.num_chunks else pa.array([], combined.type)
    return combined


def _fitted(array: pa.Array, field: pa.Field, topic: str) -> pa.Array:
    try:
        return fit(array, field)
    except (Misfit, pa.ArrowException) as error:
        _refuse(topic, field.name, *culprit(array, field, error))


# pandas


def _from_pandas(frame: Any, plan: _Plan, topic: str) -> pa.RecordBatch:
    """Column by column: objects value by value, everything typed through Arrow. What pandas calls
    missing is null.
    """
    _check_names(frame.columns, plan.names, where=f"Rows for {topic}")
    arrays = [_from_series(frame[each.name], each, topic) for each in plan.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=plan.schema)


def _from_series(series: Any, each: Column, topic: str) -> pa.Array:
    if series.dtype == object:
        return _from_objects(series, each, topic)
    try:
        array = _whole(pa.array(series, from_pandas=True), topic, each.name)
    except (pa.ArrowException, TypeError):
        _refuse(topic, each.name, 0, f"pandas' {series.dtype} has no counterpart in Arrow")
    if pa.types.is_floating(array.type) and pa.types.is_integer(each.field.type):
        array = _integers(array, each, topic)
    return _fitted(array, each.field, topic)


def _from_objects(series: Any, each: Column, topic: str) -> pa.Array:
    values = [
        None if missing else value for value, missing in zip(series, series.isna(), strict=True)
    ]
    try:
        return each.array(values)
    except _ERRORS:
        _refuse(topic, each.name, *each.culprit(values))


def _integers(array: pa.Array, each: Column, topic: str) -> pa.Array:
    """Floats are what pandas has for integers with gaps; whole numbers are taken back as what they
    were.
    """

    def whole(part: pa.Array, field: pa.Field) -> pa.Array:
        if not pc.all(pc.equal(pc.trunc(part), part), min_count=0).as_py():
            raise Misfit("it has a fraction, and the column holds whole numbers")
        return part.cast(field.type)

    try:
        return whole(array, each.field)
    except (Misfit, pa.ArrowException) as error:
        _refuse(topic, each.name, *culprit(array, each.field, error, whole))


# Headers and changes


def with_headers(batch: pa.RecordBatch, headers: Headers | None) -> pa.RecordBatch:
    """`batch` with a column `_headers`, if there are any: one entry per row."""
    if headers is None:
        return batch
    if len(headers) != batch.num_rows:
        raise BadRows(
            f"There are {len(headers)} headers for {batch.num_rows} rows.",
            fix="give one entry per row; None for a row without headers.",
        )
    pairs = [_header_pairs(entry, row) for row, entry in enumerate(headers)]
    return batch.append_column(_HEADERS_FIELD, pa.array(pairs, HEADERS_TYPE))


def _header_pairs(entry: Any, row: int) -> list[tuple[str, bytes | None]] | None:
    if entry is None:
        return None
    pairs = list(entry.items()) if isinstance(entry, Mapping) else list(entry)
    for pair in pairs:
        if not (
            isinstance(pair, tuple | list)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], bytes | None)
        ):
            raise BadRows(
                f"Row {row} has the header {pair!r}.",
                fix="a header is a str and bytes (or None), as in [('trace', b'7')].",
            )
    return [(name, value) for name, value in pairs]


def with_change_type(batch: pa.RecordBatch, change: str) -> pa.RecordBatch:
    """`batch` with every row's `_change_type` set to `change`."""
    changes = pa.repeat(pa.scalar(change, pa.string()), batch.num_rows)
    position = batch.schema.get_field_index(CHANGE_TYPE)
    return (
        batch.append_column(CHANGE_FIELD, changes)
        if position < 0
        else batch.set_column(position, CHANGE_FIELD, changes)
    )


def check_changes(batch: pa.RecordBatch, *, topic: str = "the table") -> None:
    """Refuse a `_change_type` that does not exist, and a null that only a tombstone may have."""
    changes = batch.column(CHANGE_TYPE)
    unknown = pc.invert(pc.is_in(changes, pa.array(CHANGE_TYPES)))
    if pc.any(unknown).as_py():
        row = pc.index(unknown, True).as_py()
        change = changes[row].as_py()
        _refuse(
            topic,
            CHANGE_TYPE,
            row,
            f"{change!r} is not a change: {nearest(str(change), CHANGE_TYPES)}",
        )
    for field in batch.schema:
        if (
            field.metadata
            and NOT_NULL_KEY in field.metadata
            and batch.column(field.name).null_count
        ):
            _check_not_null(batch.column(field.name), changes, field.name, topic)


def _check_not_null(array: pa.Array, changes: pa.Array, name: str, topic: str) -> None:
    wrong = pc.and_(array.is_null(), pc.not_equal(changes, DELETE))
    if pc.any(wrong).as_py():
        _refuse(
            topic, name, pc.index(wrong, True).as_py(), "it is null, but the column is NOT NULL"
        )


def upserts(rows: Rows, schema: pa.Schema, *, topic: str) -> pa.RecordBatch:
    """Rows of a table as the changes that store them. `schema` is the table's stored one; the rows
    come without `_change_type`.
    """
    batch = to_batch(rows, _derived(schema, None), topic=topic)
    return pa.RecordBatch.from_arrays(with_change_type(batch, UPDATE).columns, schema=schema)


_derived_schemas: dict[tuple[int, tuple[str, ...] | None], tuple[pa.Schema, pa.Schema]] = {}


def _derived(schema: pa.Schema, key: tuple[str, ...] | None) -> pa.Schema:
    """What users give for a table stored as `schema`: its key's columns, or all declared ones. Kept
    by identity, so that the plan is found again.
    """
    kept = _derived_schemas.get((id(schema), key))
    if kept is None:
        if len(_derived_schemas) >= _PLANS_KEPT:
            _derived_schemas.clear()
        derived = (
            declared_schema(schema)
            if key is None
            else pa.schema([schema.field(name) for name in key])
        )
        kept = _derived_schemas[id(schema), key] = (schema, derived)
    return kept[1]


def tombstones(keys: Any, schema: pa.Schema, key: tuple[str, ...], *, topic: str) -> pa.RecordBatch:
    """Changes that delete keys from a table: the key's columns, everything else null.

    Keys are rows with the key's columns alone, or, for a key of one column, plain values.
    """
    batch = to_batch(_key_rows(keys, key), _derived(schema, key), topic=topic)
    count = batch.num_rows
    arrays = [
        batch.column(field.name) if field.name in key else pa.nulls(count, field.type)
        for field in schema
    ]
    arrays[schema.get_field_index(CHANGE_TYPE)] = pa.repeat(pa.scalar(DELETE, pa.string()), count)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _key_rows(keys: Any, key: tuple[str, ...]) -> Any:
    """Plain values as rows of the key: `delete(7)`, `delete([7, 8])`, `delete([("a", 1)])`."""
    if isinstance(keys, pa.Table | pa.RecordBatch | Mapping) or _is_pandas(keys):
        return keys
    if isinstance(keys, pa.Array | pa.ChunkedArray) and len(key) == 1:
        return pa.table({key[0]: keys})
    if (
        isinstance(keys, str | bytes)
        or not isinstance(keys, Iterable)
        or (isinstance(keys, tuple) and len(key) > 1)
    ):
        keys = [keys]
    return [each if isinstance(each, Mapping) else _key_row(each, key) for each in keys]


def _key_row(value: Any, key: tuple[str, ...]) -> dict[str, Any]:
    if len(key) == 1:
        return {key[0]: value}
    if not isinstance(value, tuple | list) or len(value) != len(key):
        raise BadRows(
            f"The key {value!r} does not have the columns {', '.join(key)}.",
            fix="give a dict, or a tuple with one value per key column.",
        )
    return dict(zip(key, value, strict=True))
