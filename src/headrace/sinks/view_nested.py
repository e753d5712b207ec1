"""Arrays, maps and structs as JSON text, and the exact way back. Used by `view_types.py` for a view's nested columns.

The text is the log's own (`log/json_text.py`), so SQLite's JSON functions can look inside. On the way back every number is read as text first and cast
to its own type once, so that no digit is lost.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.log.json_text import json_text
from headrace.log.lists import compact_offsets, elements, entries
from headrace.sinks.view_times import is_time_text, time_array, time_text

Leaf = Callable[[pa.Array, pa.DataType], pa.Array]


def nested_text(array: pa.Array) -> pa.StringArray:
    """The JSON of each value; null where the value is."""
    return json_text(_rebuilt(array, array.type, _time_as_text, exact=False) if _holds_times(array.type) else array)


def nested_array(texts: list[str | None], kind: pa.DataType) -> pa.Array:
    """The inverse of `nested_text`."""
    parsed = [None if text is None else json.loads(text, object_pairs_hook=list, parse_int=str, parse_float=str) for text in texts]
    if _holds_pairs(kind):
        parsed = [_with_tuples(value, kind) for value in parsed]
    return _rebuilt(pa.array(parsed, _wire_type(kind)), kind, _from_wire, exact=True)


def _holds_times(kind: pa.DataType) -> bool:
    return any(is_time_text(child) or _holds_times(child) for child in _children(kind))


def _holds_pairs(kind: pa.DataType) -> bool:
    """Whether there is a map whose keys are not strings, which JSON writes as an array of pairs."""
    return (pa.types.is_map(kind) and not pa.types.is_string(kind.key_type)) or any(map(_holds_pairs, _children(kind)))


def _children(kind: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_map(kind):
        return [kind.key_type, kind.item_type]
    return [kind.field(position).type for position in range(kind.num_fields)]


def _wire_type(kind: pa.DataType) -> pa.DataType:
    """What the parsed JSON of a type is read as: text at every leaf that is not a boolean."""
    if pa.types.is_map(kind):
        return pa.map_(_wire_type(kind.key_type), _wire_type(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_wire_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(child.name, _wire_type(child.type)) for child in kind])
    return kind if pa.types.is_boolean(kind) else pa.string()


def _with_tuples(value: Any, kind: pa.DataType) -> Any:
    """A parsed value with the pairs of its maps as tuples, which is how Arrow knows them. Objects are lists of tuples already."""
    if value is None or not pa.types.is_nested(kind):
        return value
    if pa.types.is_map(kind):
        return [(_with_tuples(key, kind.key_type), _with_tuples(item, kind.item_type)) for key, item in value]
    if pa.types.is_list(kind):
        return [_with_tuples(item, kind.value_type) for item in value]
    return [(name, _with_tuples(item, kind.field(name).type)) for name, item in value]


def _rebuilt(array: pa.Array, kind: pa.DataType, leaf: Leaf, *, exact: bool) -> pa.Array:
    """The same shape with `leaf` applied at every end. `kind` is the column's own type; with `exact`, the result has it."""
    declared = kind if exact else None
    nulls = array.is_null() if array.null_count else None
    if pa.types.is_map(kind):
        keys, items = entries(array)
        parts = _rebuilt(keys, kind.key_type, leaf, exact=exact), _rebuilt(items, kind.item_type, leaf, exact=exact)
        return pa.MapArray.from_arrays(_offsets_with_nulls(array), *parts, type=declared)
    if pa.types.is_list(kind):
        values = _rebuilt(elements(array), kind.value_type, leaf, exact=exact)
        return pa.ListArray.from_arrays(compact_offsets(array), values, type=declared, mask=nulls)
    if not pa.types.is_struct(kind):
        return leaf(array, kind)
    if kind.num_fields == 0:
        return array
    parts = tuple(_rebuilt(part, child.type, leaf, exact=exact) for part, child in zip(array.flatten(), kind, strict=True))
    fields = list(kind) if exact else [pa.field(child.name, part.type) for child, part in zip(kind, parts, strict=True)]
    return pa.StructArray.from_arrays(list(parts), fields=fields, mask=nulls)


def _offsets_with_nulls(array: pa.MapArray) -> pa.Int32Array:
    """A null offset is a null map to `MapArray.from_arrays`, which takes no mask in every version that is supported."""
    offsets = compact_offsets(array)
    if not array.null_count:
        return offsets
    starts_null = pa.array(np.append(array.is_null().to_numpy(zero_copy_only=False), [False]))
    return pc.if_else(starts_null, pa.scalar(None, pa.int32()), offsets)


def _time_as_text(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return time_text(array) if is_time_text(kind) else array


def _from_wire(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if is_time_text(kind):
        return time_array(texts, kind)
    if pa.types.is_binary(kind):
        return pa.array([None if text is None else base64.b64decode(text) for text in texts.to_pylist()], kind)
    if pa.types.is_duration(kind):
        return texts.cast(pa.int64()).cast(kind)
    return texts.cast(kind)
