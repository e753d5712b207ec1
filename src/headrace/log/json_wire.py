"""How each type of a schema travels in JSON, and the way back from what a JSON parser yields to the type itself.

A column's *wire type* is what its JSON parses to: text for decimals, binaries and times, numbers for intervals, pairs for maps, itself for the rest.
`json_rows.py` parses values to wire types, quickly or exactly, and turns whole columns back here.
"""

from __future__ import annotations

import binascii

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.log.lists import compact_offsets, entries

_DAY_US = 24 * 3600 * 1_000_000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31: outside them ISO 8601 needs more than four digits


def is_text(kind: pa.DataType) -> bool:
    """Types whose JSON is a string that stands for something else."""
    return bool(pa.types.is_decimal(kind) or pa.types.is_binary(kind) or (pa.types.is_temporal(kind) and not pa.types.is_duration(kind)))


def wire_type(kind: pa.DataType, *, exact: bool = False) -> pa.DataType:
    """The type that a column's JSON parses to. Parsed exactly, floats are text too: NaN has no number, and a FLOAT read as a double rounds twice."""
    if is_text(kind) or (exact and pa.types.is_floating(kind)):
        return pa.string()
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_map(kind):
        return pa.list_(
            pa.struct([pa.field("key", wire_type(kind.key_type, exact=exact)), pa.field("value", wire_type(kind.item_type, exact=exact))])
        )
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, wire_type(kind.value_type, exact=exact)))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(child.name, wire_type(child.type, exact=exact)) for child in kind])
    return kind


def is_quick(kind: pa.DataType) -> bool:
    """Whether Arrow's JSON reader can read the type: it knows no objects with arbitrary names, which is what maps are."""
    if pa.types.is_map(kind):
        return False
    return all(is_quick(kind.field(i).type) for i in range(kind.num_fields))


def from_wire(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """A wire column as its own type. Raises ArrowInvalid if a text does not stand for a value of the type."""
    if array.type.equals(kind, check_metadata=True):
        return array
    if pa.types.is_binary(kind):
        return _from_base64(array)
    if pa.types.is_time(kind):
        return _time_of_day(array).cast(kind)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return _list_from_wire(array, kind)
    if pa.types.is_struct(kind):
        return _struct_from_wire(array, kind)
    return array.cast(kind)


def _from_base64(array: pa.StringArray) -> pa.BinaryArray:
    decode = binascii.a2b_base64
    try:
        values = [None if value is None else decode(value, strict_mode=True) for value in array.to_pylist()]
    except (binascii.Error, ValueError) as error:
        raise pa.ArrowInvalid(f"not base64: {error}") from error
    return pa.array(values, pa.binary())


def _time_of_day(array: pa.StringArray) -> pa.Array:
    """Arrow reads no times of day, but it reads them with a date in front."""
    moments = pc.binary_join_element_wise("1970-01-01T", array, "").cast(pa.timestamp("ns"))
    return moments.cast(pa.time64("ns"))


def _list_from_wire(array: pa.ListArray, kind: pa.DataType) -> pa.Array:
    offsets = compact_offsets(array)
    mask = array.is_null() if array.null_count else None
    items = array.flatten()
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(offsets, from_wire(items, kind.value_type), type=kind, mask=mask)
    keys, values = items.field(0), items.field(1)
    if keys.null_count:
        raise pa.ArrowInvalid("a map's key is null")
    return _map_from_arrays(offsets, from_wire(keys, kind.key_type), from_wire(values, kind.item_type), kind, mask)


def _map_from_arrays(offsets: pa.Array, keys: pa.Array, values: pa.Array, kind: pa.MapType, mask: pa.Array | None) -> pa.MapArray:
    """`MapArray.from_arrays` takes a null offset as a null map, and has no mask in all versions that are supported."""
    if mask is not None:
        starts = pa.array(np.append(mask.to_numpy(zero_copy_only=False), [False]))
        offsets = pc.if_else(starts, pa.scalar(None, pa.int32()), offsets)
    return pa.MapArray.from_arrays(offsets, keys, values, type=kind)


def _struct_from_wire(array: pa.StructArray, kind: pa.StructType) -> pa.StructArray:
    children = [from_wire(child, kind.field(i).type) for i, child in enumerate(array.flatten())]
    mask = array.is_null() if array.null_count else None
    if not children:
        return array.cast(kind)
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)


def has_every_required_value(array: pa.Array, field: pa.Field) -> bool:
    """Whether nothing is null where the schema, at any depth, says NOT NULL."""
    if not field.nullable and array.null_count:
        return False
    kind = field.type
    if pa.types.is_map(kind):
        return has_every_required_value(entries(array)[1], kind.item_field)
    if pa.types.is_list(kind):
        return has_every_required_value(array.flatten(), kind.value_field)
    if pa.types.is_struct(kind):
        rows = array.drop_null() if array.null_count else array
        return all(has_every_required_value(rows.field(i), kind.field(i)) for i in range(kind.num_fields))
    return True


def fits_iso_years(array: pa.Array) -> bool:
    """Whether every date and timestamp in a column, at any depth, has a year of four digits: the text of others reads back as nothing."""
    kind = array.type
    if pa.types.is_date(kind):
        return _within(array.cast(pa.int32()), _FIRST_DAY, _LAST_DAY)
    if pa.types.is_timestamp(kind):
        return _within(array.cast(pa.int64()), _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1)
    if pa.types.is_map(kind):
        return all(map(fits_iso_years, entries(array)))
    if pa.types.is_list(kind):
        return fits_iso_years(array.flatten())
    if pa.types.is_struct(kind):
        return all(map(fits_iso_years, array.flatten()))
    return True


def with_iso_years(array: pa.Array) -> pa.Array:
    """A column of dates or timestamps without those whose year has not four digits: null in their place."""
    if pa.types.is_date(array.type):
        numbers, first, last = array.cast(pa.int32()), _FIRST_DAY, _LAST_DAY
    elif pa.types.is_timestamp(array.type):
        numbers, first, last = array.cast(pa.int64()), _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1
    else:
        return array
    if _within(numbers, first, last):
        return array
    fits = pc.and_(pc.greater_equal(numbers, first), pc.less_equal(numbers, last))
    return pc.if_else(fits, array, pa.scalar(None, array.type))


def _within(numbers: pa.Array, first: int, last: int) -> bool:
    bounds = pc.min_max(numbers)
    if bounds["min"].as_py() is None:
        return True
    return bool(first <= bounds["min"].as_py() and bounds["max"].as_py() <= last)
