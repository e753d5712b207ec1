"""Rows as users append them, converted to one Arrow batch with exactly the topic's schema, or
refused with an error that names the row and the column.

Rows have exactly the topic's columns, or those that it had before it changed (`SchemaHistory`):
columns that were added later may be left out, renamed ones may have their former names, and dropped
ones may still be there as long as they are null. So a change of the schema breaks no producer.

Producers and transactions of both backends call `to_batch` before anything is written. Conversion
is tried first and explained only if it fails, so that one dict costs a few microseconds and a batch
that already fits costs almost nothing. Row numbers count from 0.

Values of single columns are converted and checked in `headrace.types.values`.
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
    UPDATE_POSTIMAGE,
)
from headrace.errors import BadRows, nearest
from headrace.log.values import Headers, Rows
from headrace.types.schema import NOT_NULL_KEY, declared_schema
from headrace.types.schema_history import NO_HISTORY, SchemaHistory
from headrace.types.values import (
    ColumnConverter,
    Misfit,
    check_column,
    column_converter,
    find_misfit,
    fit_column,
    needs_check,
)

if TYPE_CHECKING:
    import pandas as pd


_MAX_CACHED_PLANS = 512
_HEADERS_FIELD = pa.field(HEADERS_COLUMN, HEADERS_TYPE)
_ERRORS = (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError)


@dataclass(frozen=True)
class _SchemaPlan:
    """A schema with everything that converting rows to it needs, computed once."""

    schema: pa.Schema
    names: list[str]
    columns: list[ColumnConverter]
    struct: pa.StructType
    checked_columns: list[int]
    """Indices of the columns whose values can break the schema although their type fits."""


_schema_plans: dict[int, _SchemaPlan] = {}


def _schema_plan(schema: pa.Schema) -> _SchemaPlan:
    """The plan of a schema, cached by the schema's identity.

    Equality would not do: it ignores metadata, which holds the lengths of VARCHAR columns. A plan
    holds its schema, so that no other schema gets the same id.
    """
    plan = _schema_plans.get(id(schema))
    if plan is None:
        plan = _SchemaPlan(
            schema=schema,
            names=schema.names,
            columns=[column_converter(field) for field in schema],
            struct=pa.struct(list(schema)),
            checked_columns=[index for index, field in enumerate(schema) if needs_check(field)],
        )
        if len(_schema_plans) >= _MAX_CACHED_PLANS:
            _schema_plans.clear()
        _schema_plans[id(schema)] = plan
    return plan


def to_batch(
    rows: Rows, schema: pa.Schema, *, topic: str, history: SchemaHistory = NO_HISTORY
) -> pa.RecordBatch:
    """Rows as one batch with exactly the given schema.

    Raises:
        BadRows: A value would be lost or guessed. Names the row and the column.
    """
    plan = _schema_plan(schema)
    if type(rows) is dict:
        return _from_mappings([rows], plan, topic, history)
    if isinstance(rows, pa.RecordBatch):
        return _from_arrow(rows, plan, topic, history)
    if isinstance(rows, pa.Table):
        return _from_arrow(rows.combine_chunks(), plan, topic, history)
    if isinstance(rows, Mapping):
        return _from_mappings([rows], plan, topic, history)
    if _is_pandas(rows):
        return _from_pandas(rows, plan, topic, history)
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise BadRows(f"Rows for {topic} cannot be a {type(rows).__name__}.", fix=_ACCEPTED)
    listed: list[Any] = list(rows)
    return _from_mappings(listed, plan, topic, history)


_ACCEPTED = "pass a dict, a list of dicts, a pyarrow Table or RecordBatch, or a pandas DataFrame."


def _is_pandas(rows: object) -> TypeGuard[pd.DataFrame]:
    """Whether rows are a pandas frame, without importing pandas: whoever has a frame has done so.

    Another thread may be importing pandas right now, so the attribute may be missing.
    """
    frame = getattr(sys.modules.get("pandas"), "DataFrame", None)
    return frame is not None and isinstance(rows, frame)


# Dicts


def _from_mappings(
    rows: list[Mapping[str, Any]], plan: _SchemaPlan, topic: str, history: SchemaHistory
) -> pa.RecordBatch:
    batch = _try_convert(rows, plan)
    if batch is None and history:
        rows = [
            _present_row(row, plan, history, where=f"Row {number} for {topic}")
            for number, row in enumerate(rows)
        ]
        batch = _try_convert(rows, plan)
    if batch is None:
        _explain_mappings(rows, plan, topic)
    return batch


def _present_row(
    row: Any, plan: _SchemaPlan, history: SchemaHistory, *, where: str
) -> Mapping[str, Any]:
    """A row of an older producer with the topic's present columns. What is no row is left to
    `_explain_mappings`.
    """
    if not isinstance(row, Mapping) or row.keys() == set(plan.names):
        unchanged: Mapping[str, Any] = row
        return unchanged
    sources = _sources(row, plan.names, history, where=where)
    for name in row:
        if name not in sources.values() and row[name] is not None:
            raise dropped_value(name, where)
    return {name: None if source is None else row[source] for name, source in sources.items()}


def _try_convert(rows: list[Mapping[str, Any]], plan: _SchemaPlan) -> pa.RecordBatch | None:
    """The batch, or None if any row does not fit; `_explain_mappings` finds out which."""
    try:
        if not {len(plan.names)}.issuperset(map(len, rows)):
            return None
        if _have_exact_types(rows, plan):
            return pa.RecordBatch.from_struct_array(pa.array(rows, plan.struct))
        arrays = [
            converter.array([row[converter.name] for row in rows]) for converter in plan.columns
        ]
    except (KeyError, *_ERRORS):
        return None
    return pa.RecordBatch.from_arrays(arrays, schema=plan.schema)


def _have_exact_types(rows: list[Mapping[str, Any]], plan: _SchemaPlan) -> bool:
    """Whether all values have types that Arrow converts as they are, so that one call converts all
    columns.
    """
    return {dict}.issuperset(map(type, rows)) and all(
        converter.exact.issuperset([type(row[converter.name]) for row in rows])
        for converter in plan.columns
    )


def _explain_mappings(rows: list[Mapping[str, Any]], plan: _SchemaPlan, topic: str) -> NoReturn:
    """Raise an error for the first thing that is wrong: wrong columns in any row, then values."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise BadRows(
                f"Row {number} for {topic} is a {type(row).__name__}, not a dict.", fix=_ACCEPTED
            )
        _check_names(row, plan.names, where=f"Row {number} for {topic}")
    for converter in plan.columns:
        values = [row[converter.name] for row in rows]
        try:
            converter.array(values)
        except _ERRORS:
            _raise_bad_row(topic, converter.name, *converter.find_misfit(values))
    raise BadRows(f"The rows for {topic} do not fit its schema.", fix="append fewer rows at once.")


def _sources(
    given: Iterable[str], wanted: list[str], history: SchemaHistory, *, where: str
) -> dict[str, str | None]:
    """The name that each of the topic's columns has in some rows; None if they may leave it out.
    Names of dropped columns are left over.
    """
    names = [name for name in given if not history.is_dropped(name)]
    columns = [name if name in wanted else history.present_name(name) for name in names]
    both = [name for name, column in zip(names, columns, strict=True) if columns.count(column) > 1]
    if len(set(both)) > 1:
        raise BadRows(
            f"{where}: {both[0]!r} and {both[1]!r} are one column, which was renamed.",
            fix=f"give {history.present_name(both[0])!r} alone.",
        )
    optional = [name for name in wanted if name in history.added and name not in columns]
    _check_names([*columns, *optional], wanted, where=where)
    sources = dict(zip(columns, names, strict=True))
    return {name: sources.get(name) for name in wanted}


def dropped_value(name: str, where: str) -> BadRows:
    """The error for rows that have a value in a column that was dropped."""
    return BadRows(
        f"{where}: the column {name!r} was dropped from the topic, and has a value.",
        fix="leave it out, or pass None; a value that is needed goes into a column of its own.",
    )


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


def _raise_bad_row(topic: str, name: str, row: int, reason: str) -> NoReturn:
    raise BadRows(
        f"Row {row} for {topic}, column {name!r}: {reason.rstrip('.')}.",
        fix=(
            "convert the value to the column's type before appending; nothing of this append was"
            " stored."
        ),
    )


# Arrow


def _from_arrow(
    rows: pa.Table | pa.RecordBatch, plan: _SchemaPlan, topic: str, history: SchemaHistory
) -> pa.RecordBatch:
    if isinstance(rows, pa.RecordBatch) and rows.schema.equals(plan.schema, check_metadata=True):
        for position in plan.checked_columns:
            array, field = rows.column(position), plan.schema.field(position)
            try:
                check_column(array, field)
            except Misfit as error:
                _raise_bad_row(topic, field.name, *find_misfit(array, field, error, check_column))
        return rows
    where = f"Rows for {topic}"
    sources = _sources(rows.schema.names, plan.names, history, where=where)
    for name in rows.schema.names:
        if name not in sources.values() and rows.column(name).null_count < rows.num_rows:
            raise dropped_value(name, where)
    arrays = []
    for field in plan.schema:
        source = sources[field.name]
        if source is None:
            arrays.append(pa.nulls(rows.num_rows, field.type))
        else:
            array = _single_array(rows.column(source), topic, source)
            arrays.append(_fit_column(array, field, topic))
    return pa.RecordBatch.from_arrays(arrays, schema=plan.schema)


def _single_array(values: pa.Array | pa.ChunkedArray, topic: str, name: str) -> pa.Array:
    """A column as one array."""
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


def _fit_column(array: pa.Array, field: pa.Field, topic: str) -> pa.Array:
    try:
        return fit_column(array, field)
    except (Misfit, pa.ArrowException) as error:
        _raise_bad_row(topic, field.name, *find_misfit(array, field, error))


# pandas


def _from_pandas(
    frame: Any, plan: _SchemaPlan, topic: str, history: SchemaHistory
) -> pa.RecordBatch:
    """A pandas frame, column by column: objects value by value, typed columns through Arrow.

    Values that pandas considers missing become null.
    """
    where = f"Rows for {topic}"
    sources = _sources(frame.columns, plan.names, history, where=where)
    for name in frame.columns:
        if name not in sources.values() and not frame[name].isna().all():
            raise dropped_value(name, where)
    arrays = []
    for converter in plan.columns:
        source = sources[converter.name]
        arrays.append(
            pa.nulls(len(frame), converter.field.type)
            if source is None
            else _from_series(frame[source], converter, topic)
        )
    return pa.RecordBatch.from_arrays(arrays, schema=plan.schema)


def _from_series(series: Any, converter: ColumnConverter, topic: str) -> pa.Array:
    if series.dtype == object:
        values = [
            None if missing else value for value, missing in zip(series, series.isna(), strict=True)
        ]
        try:
            return converter.array(values)
        except _ERRORS:
            _raise_bad_row(topic, converter.name, *converter.find_misfit(values))
    try:
        array = _single_array(pa.array(series, from_pandas=True), topic, converter.name)
    except (pa.ArrowException, TypeError):
        _raise_bad_row(
            topic, converter.name, 0, f"pandas' {series.dtype} has no counterpart in Arrow"
        )
    if pa.types.is_floating(array.type) and pa.types.is_integer(converter.field.type):
        array = _floats_to_integers(array, converter, topic)
    return _fit_column(array, converter.field, topic)


def _floats_to_integers(array: pa.Array, converter: ColumnConverter, topic: str) -> pa.Array:
    """Whole floats as integers: pandas stores an integer column with missing values as floats."""

    def whole(part: pa.Array, field: pa.Field) -> pa.Array:
        if not pc.all(pc.equal(pc.trunc(part), part), min_count=0).as_py():
            raise Misfit("it has a fraction, and the column holds whole numbers")
        return part.cast(field.type)

    try:
        return whole(array, converter.field)
    except (Misfit, pa.ArrowException) as error:
        _raise_bad_row(topic, converter.name, *find_misfit(array, converter.field, error, whole))


# Headers and changes


def with_headers(batch: pa.RecordBatch, headers: Headers | None) -> pa.RecordBatch:
    """A batch with a column `_headers` of one entry per row; unchanged if headers are None."""
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
    """A batch with every row's `_change_type` set to the given one."""
    changes = pa.repeat(pa.scalar(change, pa.string()), batch.num_rows)
    position = batch.schema.get_field_index(CHANGE_TYPE)
    return (
        batch.append_column(CHANGE_FIELD, changes)
        if position < 0
        else batch.set_column(position, CHANGE_FIELD, changes)
    )


def check_changes(batch: pa.RecordBatch, *, topic: str = "the table") -> None:
    """Refuse an unknown `_change_type`, and a null in a NOT NULL column unless it is deleted."""
    changes = batch.column(CHANGE_TYPE)
    unknown = pc.invert(pc.is_in(changes, pa.array(CHANGE_TYPES)))
    if pc.any(unknown).as_py():
        row = pc.index(unknown, True).as_py()
        change = changes[row].as_py()
        _raise_bad_row(
            topic,
            CHANGE_TYPE,
            row,
            f"{change!r} is not a change: {nearest(str(change), CHANGE_TYPES)}",
        )
    for field in batch.schema:
        array = batch.column(field.name)
        if not (field.metadata and NOT_NULL_KEY in field.metadata and array.null_count):
            continue
        wrong = pc.and_(array.is_null(), pc.not_equal(changes, DELETE))
        if pc.any(wrong).as_py():
            row = pc.index(wrong, True).as_py()
            _raise_bad_row(topic, field.name, row, "it is null, but the column is NOT NULL")


def upserts(
    rows: Rows, schema: pa.Schema, *, topic: str, history: SchemaHistory = NO_HISTORY
) -> pa.RecordBatch:
    """Rows of a table as stored changes. They come without `_change_type`; `schema` is the stored
    schema, which has it.
    """
    batch = to_batch(rows, _input_schema(schema, None), topic=topic, history=history)
    return pa.RecordBatch.from_arrays(
        with_change_type(batch, UPDATE_POSTIMAGE).columns, schema=schema
    )


_input_schemas: dict[tuple[int, tuple[str, ...] | None], tuple[pa.Schema, pa.Schema]] = {}


def _input_schema(schema: pa.Schema, key: tuple[str, ...] | None) -> pa.Schema:
    """The columns that users give for a table: its key's columns, or all declared ones for None.

    Cached by the stored schema's identity, so that `_schema_plan` finds its plan again.
    """
    cached = _input_schemas.get((id(schema), key))
    if cached is None:
        if len(_input_schemas) >= _MAX_CACHED_PLANS:
            _input_schemas.clear()
        if key is None:
            input_schema = declared_schema(schema)
        else:
            input_schema = pa.schema([schema.field(name) for name in key])
        cached = _input_schemas[id(schema), key] = (schema, input_schema)
    return cached[1]


def tombstones(keys: Any, schema: pa.Schema, key: tuple[str, ...], *, topic: str) -> pa.RecordBatch:
    """Tombstones of a table's keys: the key's columns, and null everywhere else.

    Keys are rows with the key's columns alone, tuples, or, for a key of one column, plain values.
    """
    batch = to_batch(_key_rows(keys, key), _input_schema(schema, key), topic=topic)
    count = batch.num_rows
    arrays = [
        batch.column(field.name) if field.name in key else pa.nulls(count, field.type)
        for field in schema
    ]
    arrays[schema.get_field_index(CHANGE_TYPE)] = pa.repeat(pa.scalar(DELETE, pa.string()), count)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _key_rows(keys: Any, key: tuple[str, ...]) -> Any:
    """Keys as rows with the key's columns: `delete(7)`, `delete([7, 8])`, `delete([("a", 1)])`."""
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
    return [row if isinstance(row, Mapping) else _key_row(row, key) for row in keys]


def _key_row(value: Any, key: tuple[str, ...]) -> dict[str, Any]:
    if len(key) == 1:
        return {key[0]: value}
    if not isinstance(value, tuple | list) or len(value) != len(key):
        raise BadRows(
            f"The key {value!r} does not have the columns {', '.join(key)}.",
            fix="give a dict, or a tuple with one value per key column.",
        )
    return dict(zip(key, value, strict=True))
