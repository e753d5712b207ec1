"""Arrow values as JSON text, column by column: the key bytes of both backends and the values on Kafka are made of it.

The rules (DESIGN.md section 3): DECIMAL as a string, BINARY as base64, timestamps in ISO 8601 with microseconds (and `Z`, unless the column has
no zone), NaN and infinities as strings, floats in their shortest form that reads back the same, intervals as microseconds, structs and maps with
string keys as objects, other maps as arrays of pairs. Nothing is done row by row except base64 and rare escapes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import BugError
from headrace.log.lists import compact_offsets, elements, entries

_NEEDS_ESCAPE = r'["\\\x00-\x1f]'
_NEEDS_RARE_ESCAPE = r"[\x00-\x1f]"
_ESCAPES = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))


def json_text(array: pa.Array) -> pa.StringArray:
    """The JSON text of each element. A null stays null: the caller decides whether it is absent or written as `null`."""
    for is_kind, text in _TEXTS:
        if is_kind(array.type):
            return text(array)
    raise BugError(f"No JSON text for {array.type}.")


def json_text_or_null(array: pa.Array) -> pa.StringArray:
    """The JSON text of each element, with `null` for nulls: what stands inside an array or an object."""
    return pc.fill_null(json_text(array), "null")


def _quoted(text: pa.StringArray) -> pa.StringArray:
    return pc.binary_join_element_wise('"', text, '"', "")


def _escaped(text: pa.StringArray) -> pa.StringArray:
    """JSON's escapes. Most columns need none, and those are not copied."""
    if not _any(pc.match_substring_regex(text, _NEEDS_ESCAPE)):
        return text
    for plain, escape in _ESCAPES:
        text = pc.replace_substring(text, plain, escape)
    rare = pc.match_substring_regex(text, _NEEDS_RARE_ESCAPE)
    return _patched(text, rare, _escape_controls) if _any(rare) else text


def _escape_controls(text: str) -> str:
    """What is left after the common escapes: control characters without a short form that everyone shares."""
    return "".join(json.dumps(char)[1:-1] if char < " " else char for char in text)


def _any(mask: pa.BooleanArray) -> bool:
    return pc.any(mask).as_py() is True


def _patched(text: pa.StringArray, mask: pa.BooleanArray, fix: Any) -> pa.StringArray:
    """`text` with the few elements that `mask` marks passed through `fix`."""
    mask = pc.fill_null(mask, False)
    fixed = [fix(value) for value in text.filter(mask).to_pylist()]
    return pc.replace_with_mask(text, mask, pa.array(fixed, pa.string()))


def _float_text(array: pa.Array) -> pa.StringArray:
    text = array.cast(pa.string())
    whole = pc.match_substring_regex(text, r"^-?[0-9]+$")
    if _any(whole):  # 1.0, not 1: the text says that it is a float
        text = pc.if_else(whole, pc.binary_join_element_wise(text, ".0", ""), text)
    if not pc.all(pc.is_finite(array)).as_py():
        for arrow_name, json_name in (("nan", '"NaN"'), ("-nan", '"NaN"'), ("inf", '"Infinity"'), ("-inf", '"-Infinity"')):
            text = pc.if_else(pc.equal(text, arrow_name), json_name, text)
    return text


def _plain_decimal(array: pa.Array) -> pa.StringArray:
    """Digits with exactly the column's scale, never an exponent."""
    text = array.cast(pa.string())
    scientific = pc.match_substring(text, "E")
    if not _any(scientific):
        return text
    scale = array.type.scale
    plain = [f"{value:.{scale}f}" for value in array.filter(pc.fill_null(scientific, False)).to_pylist()]
    return pc.replace_with_mask(text, pc.fill_null(scientific, False), pa.array(plain, pa.string()))


def _base64(array: pa.Array) -> pa.StringArray:
    encode = base64.b64encode
    return pa.array([None if value is None else encode(value) for value in array.to_pylist()], pa.binary()).cast(pa.string())


def _date_text(array: pa.Array) -> pa.StringArray:
    return _quoted(array.cast(pa.date32()).cast(pa.string()))


def _time_text(array: pa.Array) -> pa.StringArray:
    """Microseconds, as everywhere; nanoseconds only in those values that have any."""
    text = array.cast(pa.time64("ns")).cast(pa.string())
    return _quoted(pc.replace_substring_regex(text, r"000$", ""))


def _timestamp_text(array: pa.Array) -> pa.StringArray:
    zone = array.type.tz
    naive = array.cast(pa.timestamp("us", tz=zone)).cast(pa.timestamp("us"))  # values are stored in UTC: only the label goes
    text = pc.replace_substring(naive.cast(pa.string()), " ", "T")
    return pc.binary_join_element_wise('"', text, '"' if zone is None else 'Z"', "")


def _duration_text(array: pa.Array) -> pa.StringArray:
    return array.cast(pa.duration("us")).cast(pa.int64()).cast(pa.string())


def object_text(names: list[str], columns: list[pa.Array]) -> pa.StringArray:
    """One JSON object a row, from columns of the same length."""
    parts: list[Any] = []
    for position, (name, column) in enumerate(zip(names, columns, strict=True)):
        parts += [("{" if position == 0 else ",") + json.dumps(name, ensure_ascii=False) + ":", json_text_or_null(column)]
    return pc.binary_join_element_wise(*parts, "}", "")


def array_text(columns: list[pa.Array]) -> pa.StringArray:
    """One JSON array a row, from columns of the same length."""
    return pc.binary_join_element_wise("[", pc.binary_join_element_wise(*map(json_text_or_null, columns), ","), "]", "")


def _struct_text(array: pa.StructArray) -> pa.StringArray:
    if array.type.num_fields == 0:
        return pc.if_else(array.is_valid(), "{}", pa.scalar(None, pa.string()))
    names = [array.type.field(i).name for i in range(array.type.num_fields)]
    text = object_text(names, array.flatten())
    return text if array.null_count == 0 else pc.if_else(array.is_valid(), text, pa.scalar(None, pa.string()))


def _map_text(array: pa.MapArray) -> pa.StringArray:
    """Keys may not be null, so a map is an object when its keys are strings and an array of pairs otherwise."""
    keys, values = entries(array)
    if pa.types.is_string(array.type.key_type):
        return _joined(array, pc.binary_join_element_wise(json_text(keys), json_text_or_null(values), ":"), "{", "}")
    return _joined(array, array_text([keys, values]), "[", "]")


def _joined(array: pa.Array, texts: pa.StringArray, opening: str, closing: str) -> pa.StringArray:
    """The texts of the elements of each list of `array`, comma-separated in brackets; null lists stay null."""
    lists = pa.ListArray.from_arrays(compact_offsets(array), texts)
    text = pc.binary_join_element_wise(opening, pc.binary_join(lists, ","), closing, "")
    return text if array.null_count == 0 else pc.if_else(array.is_valid(), text, pa.scalar(None, pa.string()))


_TEXTS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.StringArray]], ...] = (
    (pa.types.is_integer, lambda array: array.cast(pa.string())),
    (pa.types.is_string, lambda array: _quoted(_escaped(array))),
    (pa.types.is_floating, _float_text),
    (pa.types.is_boolean, lambda array: array.cast(pa.string())),
    (pa.types.is_timestamp, _timestamp_text),
    (pa.types.is_date, _date_text),
    (pa.types.is_time, _time_text),
    (pa.types.is_duration, _duration_text),
    (pa.types.is_decimal, lambda array: _quoted(_plain_decimal(array))),
    (pa.types.is_binary, lambda array: _quoted(_base64(array))),
    (pa.types.is_null, lambda array: pa.nulls(len(array), pa.string())),
    (pa.types.is_struct, _struct_text),
    (pa.types.is_map, _map_text),
    (pa.types.is_list, lambda array: _joined(array, json_text_or_null(elements(array)), "[", "]")),
)
