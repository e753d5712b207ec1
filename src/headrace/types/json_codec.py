"""The codec between Arrow columns and JSON. The values of Kafka records are rows as JSON objects,
and the key bytes of both backends are made of JSON texts.

JSON represents the types as follows: DECIMAL as a string, BINARY as base64, timestamps in ISO 8601
with microseconds (and `Z`, unless the column has no zone), NaN and infinities as strings, floats in
the shortest form that reads back the same, intervals as microseconds, structs and maps with string
keys as objects, other maps as arrays of pairs.

Encoding (`encode_rows`, `json_text`) works on whole columns; only base64 and rare escapes are done
row by row. Decoding (`decode_rows`) uses Arrow's JSON reader where it can. What that reader refuses
or might get wrong (NaN, maps, a foreign record that does not fit) is decoded value by value, which
is exact and says what is wrong with a record. Either way JSON is parsed to a column's *wire type*
first: text for decimals, binaries and times, integers for intervals, pairs for maps, and the type
itself for the rest.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from headrace.columnar.buffers import compact_offsets, list_elements, map_entries
from headrace.columnar.keys import as_array
from headrace.errors import BadRows, BugError
from headrace.types.schema import parse_schema
from headrace.types.schema_history import NO_HISTORY, SchemaHistory

# Wire types

_DAY_US = 24 * 3600 * 1_000_000
# 0001-01-01 and 9999-12-31: outside of them ISO 8601 needs more than four digits.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896


def is_text_encoded(kind: pa.DataType) -> bool:
    """Whether the JSON of a type is a string that represents something else."""
    return bool(
        pa.types.is_decimal(kind)
        or pa.types.is_binary(kind)
        or (pa.types.is_temporal(kind) and not pa.types.is_duration(kind))
    )


def wire_type(kind: pa.DataType, *, exact: bool = False) -> pa.DataType:
    """The type that a column's JSON parses to. With `exact`, floats are text too: NaN is not a JSON
    number, and a FLOAT that is read as a double is rounded twice.
    """
    if is_text_encoded(kind) or (exact and pa.types.is_floating(kind)):
        return pa.string()
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_map(kind):
        return pa.list_(
            pa.struct(
                [
                    pa.field("key", wire_type(kind.key_type, exact=exact)),
                    pa.field("value", wire_type(kind.item_type, exact=exact)),
                ]
            )
        )
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, wire_type(kind.value_type, exact=exact)))
    if pa.types.is_struct(kind):
        return pa.struct(
            [pa.field(child.name, wire_type(child.type, exact=exact)) for child in kind]
        )
    return kind


def is_arrow_readable(kind: pa.DataType) -> bool:
    """Whether Arrow's JSON reader can read a type. It cannot read objects with arbitrary names,
    which represent maps.
    """
    if pa.types.is_map(kind):
        return False
    return all(is_arrow_readable(kind.field(i).type) for i in range(kind.num_fields))


def from_wire(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column of a wire type as its own type. Raises ArrowInvalid if a text does not represent a
    value of the type.
    """
    if array.type.equals(kind, check_metadata=True):
        return array
    if pa.types.is_binary(kind):
        return _from_base64(array)
    if pa.types.is_time(kind):
        # Arrow does not parse times of day, but it parses them with a date in front.
        moments = pc.binary_join_element_wise("1970-01-01T", array, "").cast(pa.timestamp("ns"))
        return moments.cast(pa.time64("ns")).cast(kind)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return _list_from_wire(array, kind)
    if pa.types.is_struct(kind):
        children = [from_wire(child, kind.field(i).type) for i, child in enumerate(array.flatten())]
        mask = array.is_null() if array.null_count else None
        if not children:
            return array.cast(kind)
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    return array.cast(kind)


def _from_base64(array: pa.StringArray) -> pa.BinaryArray:
    decode = binascii.a2b_base64
    try:
        values = [
            None if value is None else decode(value, strict_mode=True)
            for value in array.to_pylist()
        ]
    except (binascii.Error, ValueError) as error:
        raise pa.ArrowInvalid(f"not base64: {error}") from error
    return pa.array(values, pa.binary())


def _list_from_wire(array: pa.ListArray, kind: pa.DataType) -> pa.Array:
    offsets = compact_offsets(array)
    mask = array.is_null() if array.null_count else None
    items = array.flatten()
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(
            offsets, from_wire(items, kind.value_type), type=kind, mask=mask
        )
    keys, values = items.field(0), items.field(1)
    if keys.null_count:
        raise pa.ArrowInvalid("a map's key is null")
    return _map_from_arrays(
        offsets, from_wire(keys, kind.key_type), from_wire(values, kind.item_type), kind, mask
    )


def _map_from_arrays(
    offsets: pa.Array, keys: pa.Array, values: pa.Array, kind: pa.MapType, mask: pa.Array | None
) -> pa.MapArray:
    """A map column with nulls. `MapArray.from_arrays` reads a null offset as a null map; not all
    supported versions have its `mask`.
    """
    if mask is not None:
        starts = pa.array(np.append(mask.to_numpy(zero_copy_only=False), [False]))
        offsets = pc.if_else(starts, pa.scalar(None, pa.int32()), offsets)
    return pa.MapArray.from_arrays(offsets, keys, values, type=kind)


def has_every_required_value(array: pa.Array, field: pa.Field) -> bool:
    """Whether no value is null where the schema says NOT NULL, at any depth."""
    if not field.nullable and array.null_count:
        return False
    kind = field.type
    if pa.types.is_map(kind):
        return has_every_required_value(map_entries(array)[1], kind.item_field)
    if pa.types.is_list(kind):
        return has_every_required_value(array.flatten(), kind.value_field)
    if pa.types.is_struct(kind):
        rows = array.drop_null() if array.null_count else array
        return all(
            has_every_required_value(rows.field(i), kind.field(i)) for i in range(kind.num_fields)
        )
    return True


def fits_iso_years(array: pa.Array) -> bool:
    """Whether every date and timestamp in a column, at any depth, has a year of four digits. The
    text of others could not be read back.
    """
    kind = array.type
    if pa.types.is_date(kind):
        return _within(array.cast(pa.int32()), _FIRST_DAY, _LAST_DAY)
    if pa.types.is_timestamp(kind):
        return _within(array.cast(pa.int64()), _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1)
    if pa.types.is_map(kind):
        return all(map(fits_iso_years, map_entries(array)))
    if pa.types.is_list(kind):
        return fits_iso_years(array.flatten())
    if pa.types.is_struct(kind):
        return all(map(fits_iso_years, array.flatten()))
    return True


def with_iso_years(array: pa.Array) -> pa.Array:
    """A column of dates or timestamps with null for those whose year does not have four digits."""
    if pa.types.is_date(array.type):
        numbers, first, last = array.cast(pa.int32()), _FIRST_DAY, _LAST_DAY
    elif pa.types.is_timestamp(array.type):
        numbers, first, last = (
            array.cast(pa.int64()),
            _FIRST_DAY * _DAY_US,
            (_LAST_DAY + 1) * _DAY_US - 1,
        )
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


# Exact decoding: JSON values checked against a schema one by one

WireConverter = Callable[[Any], Any]
UnknownFields = Counter[str]
"""The path of each field that a schema does not have, with the number of times it was met."""
Parser = Callable[[bytes], Any]
_NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
_RANGES: dict[pa.DataType, int] = {pa.int8(): 7, pa.int16(): 15, pa.int32(): 31, pa.int64(): 63}

# Halfway between the largest finite number and the next power of two: what is not below rounds to
# infinity.
_FLOAT_BOUND = (1 << 128) - (1 << 103)
_DOUBLE_BOUND = (1 << 1024) - (1 << 970)


class JsonMismatch(Exception):
    """A JSON value that does not fit a column's type; the message says why."""


def parse_rows_exactly(
    values: Sequence[bytes],
    schema: pa.Schema,
    ignored: Collection[str],
    parser: Parser,
    unknown: UnknownFields | None = None,
) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """The rows that fit, as wire values by index, and the reasons why the others do not. With
    `unknown`, fields that the schema does not have are counted there; otherwise they do not fit.
    """
    converters = {column.name: wire_converter(column, unknown, column.name) for column in schema}
    rows: dict[int, dict[str, Any]] = {}
    misfits: dict[int, str] = {}
    for index, value in enumerate(values):
        try:
            rows[index] = _convert_row(parser(value), converters, ignored, unknown)
        except JsonMismatch as error:
            misfits[index] = str(error)
    return rows, misfits


def parse_json(value: bytes) -> Any:
    """Parse strict JSON: UTF-8, no NaN; numbers with a point keep all digits."""
    try:
        return json.loads(value.decode(), parse_float=Decimal, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise JsonMismatch(f"it is not JSON: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _convert_row(
    parsed: Any,
    converters: dict[str, WireConverter],
    ignored: Collection[str],
    unknown: UnknownFields | None,
) -> dict[str, Any]:
    if not isinstance(parsed, dict):
        raise JsonMismatch(f"it is {_json_type(parsed)}, not an object")
    for name in parsed:
        if name not in converters and name not in ignored:
            if unknown is None:
                raise JsonMismatch(f"it has the unknown column {name!r}")
            unknown[name] += parsed[name] is not None
    return {
        name: _convert_part(f"column {name!r}", convert, parsed.get(name))
        for name, convert in converters.items()
    }


def wire_converter(
    field: pa.Field, unknown: UnknownFields | None = None, path: str = ""
) -> WireConverter:
    """A function that converts one JSON value to a wire value, or raises JsonMismatch. Unknown
    fields of structs are counted in `unknown`, under the path of the value.
    """
    convert_present = _type_converter(field.type, unknown, path)
    nullable = field.nullable

    def convert(value: Any) -> Any:
        if value is not None:
            return convert_present(value)
        if not nullable:
            raise JsonMismatch("it is null, but the schema says NOT NULL")
        return None

    return convert


def _type_converter(kind: pa.DataType, unknown: UnknownFields | None, path: str) -> WireConverter:
    if pa.types.is_boolean(kind):
        return _boolean
    if pa.types.is_integer(kind) or pa.types.is_duration(kind):
        return _integer(int(_RANGES.get(kind, 63)))
    if pa.types.is_floating(kind):
        return _float(_FLOAT_BOUND if kind.bit_width == 32 else _DOUBLE_BOUND)
    if pa.types.is_decimal(kind):
        return _decimal
    if is_text_encoded(kind) or pa.types.is_string(kind):
        return _text
    if pa.types.is_map(kind):
        convert_map = _object_map if pa.types.is_string(kind.key_type) else _pairs_map
        return convert_map(kind, unknown, path)
    return (_list if pa.types.is_list(kind) else _struct)(kind, unknown, path)


def _json_type(value: Any) -> str:
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        Decimal: "a number",
        type(None): "null",
    }
    return names[type(value)]


def _mismatch(value: Any, wanted: str) -> JsonMismatch:
    return JsonMismatch(f"it is {_json_type(value)}, not {wanted}")


def _convert_part(path: str, convert: WireConverter, value: Any) -> Any:
    """Convert a part of a value. The path of the part is added to the reason if it does not fit."""
    try:
        return convert(value)
    except JsonMismatch as error:
        raise JsonMismatch(f"{path}: {error}") from None


def _boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise _mismatch(value, "a boolean")
    return value


def _integer(bits: int) -> WireConverter:
    def convert(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _mismatch(value, "a whole number")
        if not -(1 << bits) <= value < 1 << bits:
            raise JsonMismatch(f"{value} is out of range")
        return value

    return convert


def _float(bound: int) -> WireConverter:
    """A converter of numbers to text, which is parsed once, in the column's own precision. A number
    that would become infinite is refused.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            raise _mismatch(value, "a number")
        if not -bound < value < bound:
            raise JsonMismatch(f"{value:.6g} is beyond the column's range")
        return str(value)

    return convert


def _decimal(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
        raise _mismatch(value, "a decimal in a string")
    return str(value)


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise _mismatch(value, "a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise JsonMismatch("it has half of a surrogate pair") from None
    return value


def _list(kind: pa.ListType, unknown: UnknownFields | None, path: str) -> WireConverter:
    element = wire_converter(kind.value_field, unknown, path)

    def convert(value: Any) -> Any:
        if not isinstance(value, list):
            raise _mismatch(value, "an array")
        return [_convert_part(f"[{index}]", element, item) for index, item in enumerate(value)]

    return convert


def _struct(kind: pa.StructType, unknown: UnknownFields | None, path: str) -> WireConverter:
    parts = {child.name: wire_converter(child, unknown, f"{path}.{child.name}") for child in kind}

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _mismatch(value, "an object")
        for name in value:
            if name not in parts:
                if unknown is None:
                    raise JsonMismatch(f"it has the unknown field {name!r}")
                unknown[f"{path}.{name}"] += value[name] is not None
        return {
            name: _convert_part(f".{name}", part, value.get(name)) for name, part in parts.items()
        }

    return convert


def _object_map(kind: pa.MapType, unknown: UnknownFields | None, path: str) -> WireConverter:
    item = wire_converter(kind.item_field, unknown, path)

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _mismatch(value, "an object")
        return [
            {"key": _text(name), "value": _convert_part(f"[{name!r}]", item, content)}
            for name, content in value.items()
        ]

    return convert


def _pairs_map(kind: pa.MapType, unknown: UnknownFields | None, path: str) -> WireConverter:
    key = wire_converter(kind.key_field, unknown, path)
    item = wire_converter(kind.item_field, unknown, path)

    def convert(value: Any) -> Any:
        if not isinstance(value, list) or not all(
            isinstance(pair, list) and len(pair) == 2 for pair in value
        ):
            raise _mismatch(value, "an array of pairs")
        return [
            {
                "key": _convert_part(" key", key, name),
                "value": _convert_part(f"[{name!r}]", item, content),
            }
            for name, content in value
        ]

    return convert


# Encoding: Arrow columns as columns of JSON text

_NEEDS_ESCAPE = r'["\\\x00-\x1f]'
_NEEDS_RARE_ESCAPE = r"[\x00-\x1f]"
_ESCAPES = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))


def json_text(array: pa.Array) -> pa.StringArray:
    """The JSON text of each element. A null stays null: the caller decides whether to leave it out
    or to write `null`.
    """
    for is_kind, text in _ENCODERS:
        if is_kind(array.type):
            return text(array)
    raise BugError(f"No JSON text for {array.type}.")


def json_text_or_null(array: pa.Array) -> pa.StringArray:
    """The JSON text of each element, with `null` for nulls, as in an array or an object."""
    return pc.fill_null(json_text(array), "null")


def _quote(text: pa.StringArray) -> pa.StringArray:
    return pc.binary_join_element_wise('"', text, '"', "")


def _escape(text: pa.StringArray) -> pa.StringArray:
    """Text with JSON's escapes. A column that needs none, as most do, is not copied."""
    if not _any(pc.match_substring_regex(text, _NEEDS_ESCAPE)):
        return text
    for plain, escape in _ESCAPES:
        text = pc.replace_substring(text, plain, escape)
    rare = pc.match_substring_regex(text, _NEEDS_RARE_ESCAPE)
    return _replace_where(rare, text, _escape_controls) if _any(rare) else text


def _escape_controls(text: str) -> str:
    """Text with escapes for the control characters that have no common short escape."""
    return "".join(json.dumps(char)[1:-1] if char < " " else char for char in text)


def _any(mask: pa.BooleanArray) -> bool:
    return pc.any(mask).as_py() is True


def _replace_where(
    mask: pa.BooleanArray, text: pa.StringArray, fix: Callable[[str], str]
) -> pa.StringArray:
    """`text` with the few elements for which `mask` is true replaced by the result of `fix`."""
    mask = pc.fill_null(mask, False)
    fixed = [fix(value) for value in text.filter(mask).to_pylist()]
    return pc.replace_with_mask(text, mask, pa.array(fixed, pa.string()))


def _float_text(array: pa.Array) -> pa.StringArray:
    text = array.cast(pa.string())
    whole = pc.match_substring_regex(text, r"^-?[0-9]+$")
    if _any(whole):  # 1.0, not 1: the text shows that it is a float
        text = pc.if_else(whole, pc.binary_join_element_wise(text, ".0", ""), text)
    if not pc.all(pc.is_finite(array)).as_py():
        for arrow_name, json_name in (
            ("nan", '"NaN"'),
            ("-nan", '"NaN"'),
            ("inf", '"Infinity"'),
            ("-inf", '"-Infinity"'),
        ):
            text = pc.if_else(pc.equal(text, arrow_name), json_name, text)
    return text


def plain_decimal(array: pa.Array) -> pa.StringArray:
    """Digits with exactly the column's scale, never an exponent."""
    text = array.cast(pa.string())
    scientific = pc.match_substring(text, "E")
    if not _any(scientific):
        return text
    scale = array.type.scale
    plain = [
        f"{value:.{scale}f}" for value in array.filter(pc.fill_null(scientific, False)).to_pylist()
    ]
    return pc.replace_with_mask(text, pc.fill_null(scientific, False), pa.array(plain, pa.string()))


def _base64(array: pa.Array) -> pa.StringArray:
    encode = base64.b64encode
    return pa.array(
        [None if value is None else encode(value) for value in array.to_pylist()], pa.binary()
    ).cast(pa.string())


def _date_text(array: pa.Array) -> pa.StringArray:
    return _quote(array.cast(pa.date32()).cast(pa.string()))


def _time_text(array: pa.Array) -> pa.StringArray:
    """Times with microseconds, and with nanoseconds only where they are not zero."""
    text = array.cast(pa.time64("ns")).cast(pa.string())
    return _quote(pc.replace_substring_regex(text, r"000$", ""))


def _timestamp_text(array: pa.Array) -> pa.StringArray:
    zone = array.type.tz
    # Values are in UTC: the cast only drops the zone.
    naive = array.cast(pa.timestamp("us", tz=zone)).cast(pa.timestamp("us"))
    text = pc.replace_substring(naive.cast(pa.string()), " ", "T")
    return pc.binary_join_element_wise('"', text, '"' if zone is None else 'Z"', "")


def _duration_text(array: pa.Array) -> pa.StringArray:
    return array.cast(pa.duration("us")).cast(pa.int64()).cast(pa.string())


def object_text(names: list[str], columns: list[pa.Array]) -> pa.StringArray:
    """One JSON object per row, from columns of the same length."""
    parts: list[Any] = []
    for position, (name, column) in enumerate(zip(names, columns, strict=True)):
        parts += [
            ("{" if position == 0 else ",") + json.dumps(name, ensure_ascii=False) + ":",
            json_text_or_null(column),
        ]
    return pc.binary_join_element_wise(*parts, "}", "")


def array_text(columns: list[pa.Array]) -> pa.StringArray:
    """One JSON array per row, from columns of the same length."""
    return pc.binary_join_element_wise(
        "[", pc.binary_join_element_wise(*map(json_text_or_null, columns), ","), "]", ""
    )


def _struct_text(array: pa.StructArray) -> pa.StringArray:
    if array.type.num_fields == 0:
        return pc.if_else(array.is_valid(), "{}", pa.scalar(None, pa.string()))
    names = [array.type.field(i).name for i in range(array.type.num_fields)]
    text = object_text(names, array.flatten())
    return (
        text
        if array.null_count == 0
        else pc.if_else(array.is_valid(), text, pa.scalar(None, pa.string()))
    )


def _map_text(array: pa.MapArray) -> pa.StringArray:
    """The JSON text of maps: an object if the keys are strings, otherwise an array of pairs."""
    keys, values = map_entries(array)
    if pa.types.is_string(array.type.key_type):
        return _join_elements(
            array,
            pc.binary_join_element_wise(json_text(keys), json_text_or_null(values), ":"),
            "{",
            "}",
        )
    return _join_elements(array, array_text([keys, values]), "[", "]")


def _join_elements(
    array: pa.Array, texts: pa.StringArray, opening: str, closing: str
) -> pa.StringArray:
    """The texts of each list's elements, separated by commas and in brackets; a null list stays
    null.
    """
    lists = pa.ListArray.from_arrays(compact_offsets(array), texts)
    text = pc.binary_join_element_wise(opening, pc.binary_join(lists, ","), closing, "")
    return (
        text
        if array.null_count == 0
        else pc.if_else(array.is_valid(), text, pa.scalar(None, pa.string()))
    )


_ENCODERS: tuple[
    tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.StringArray]], ...
] = (
    (pa.types.is_integer, lambda array: array.cast(pa.string())),
    (pa.types.is_string, lambda array: _quote(_escape(array))),
    (pa.types.is_floating, _float_text),
    (pa.types.is_boolean, lambda array: array.cast(pa.string())),
    (pa.types.is_timestamp, _timestamp_text),
    (pa.types.is_date, _date_text),
    (pa.types.is_time, _time_text),
    (pa.types.is_duration, _duration_text),
    (pa.types.is_decimal, lambda array: _quote(plain_decimal(array))),
    (pa.types.is_binary, lambda array: _quote(_base64(array))),
    (pa.types.is_null, lambda array: pa.nulls(len(array), pa.string())),
    (pa.types.is_struct, _struct_text),
    (pa.types.is_map, _map_text),
    (
        pa.types.is_list,
        lambda array: _join_elements(array, json_text_or_null(list_elements(array)), "[", "]"),
    ),
)

# Rows

_SAMPLED_VALUES = 100
_MAX_SAMPLED_FIELDS = 100
MAX_ARROW_BYTES = 1 << 30  # one block of Arrow's JSON reader, whose sizes have 32 bits


@dataclass(frozen=True)
class Decoded:
    """The rows of JSON values that fit a schema.

    Attributes:
        batch: the rows that fit.
        rows: the index of each of them among the values; None if all values fit.
        misfits: why the other values do not fit, by their index.

    """

    batch: pa.RecordBatch
    rows: list[int] | None = None
    misfits: dict[int, str] = field(default_factory=dict)


def encode_rows(batch: pa.RecordBatch) -> list[bytes]:
    """One JSON object per row, as a list."""
    values: list[bytes] = encode_column(batch).to_pylist()
    return values


def encode_column(batch: pa.RecordBatch) -> pa.BinaryArray:
    """One JSON object per row, as a binary column."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if not fits_iso_years(column):
            raise BadRows(
                f"Column {name!r} has a date or timestamp outside the years 0001 to 9999, which"
                " JSON on Kafka cannot carry.",
                fix="leave it null.",
            )
    return object_text(batch.schema.names, batch.columns).cast(pa.binary())


def decode_rows(
    values: Sequence[bytes],
    schema: pa.Schema,
    *,
    ignored: Collection[str] = (),
    history: SchemaHistory = NO_HISTORY,
    unknown: UnknownFields | None = None,
) -> Decoded:
    """The rows of JSON values. Columns that a value lacks are null; `ignored` are names that a
    value may have although the schema does not. By the `history` of the schema, renamed columns are
    found by their former names, and dropped ones are ignored. With `unknown`, values may have any
    other fields, which are counted there; without it they do not fit.
    """
    if values and all(is_arrow_readable(column.type) for column in schema):
        batch = _decode_with_arrow(values, schema, history=history)
        if batch is None and unknown is not None:
            batch = _decode_known_fields(values, schema, ignored, history, unknown)
        if batch is not None:
            return Decoded(batch)
    return decode_rows_exactly(values, schema, ignored=ignored, history=history, unknown=unknown)


def _decode_known_fields(
    values: Sequence[bytes],
    schema: pa.Schema,
    ignored: Collection[str],
    history: SchemaHistory,
    unknown: UnknownFields,
) -> pa.RecordBatch | None:
    """The rows of JSON values by Arrow's reader, without the fields that the schema does not have,
    which are counted unless they are null; None if anything else is unusual.
    """
    sampled: UnknownFields = Counter()
    parse_rows_exactly(values[:_SAMPLED_VALUES], schema, ignored, parse_json, sampled)
    if len(sampled) > _MAX_SAMPLED_FIELDS:  # Arrow would make a column of each
        return None
    batch = _decode_with_arrow(values, schema, "ignore", history=history)
    if batch is None:
        return None
    wire = _wire_schema(schema, history)
    try:
        parsed = _read_with_arrow(b"\n".join(values), wire, "infer")
    except pa.ArrowException:  # such as a field that is a number here and a text there
        return None
    if [field.type for field in parsed.schema][: len(wire)] != wire.types:
        return None  # an unknown field of a struct: its path is found value by value
    for name in parsed.schema.names[len(wire) :]:
        if name not in ignored and not history.is_dropped(name):
            unknown[name] += len(values) - parsed.column(name).null_count
    return batch


def _read_with_arrow(joined: bytes, wire: pa.Schema, unexpected: str) -> pa.Table:
    return pj.read_json(
        pa.BufferReader(joined),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(joined) + 1),
        parse_options=pj.ParseOptions(
            explicit_schema=wire, newlines_in_values=False, unexpected_field_behavior=unexpected
        ),
    )


def _decode_with_arrow(
    values: Sequence[bytes],
    schema: pa.Schema,
    unexpected: str = "error",
    *,
    history: SchemaHistory = NO_HISTORY,
) -> pa.RecordBatch | None:
    """The rows of JSON values by Arrow's reader, the same as by `decode_rows_exactly`; None if
    anything is unusual.
    """
    joined = b"\n".join(values)
    if len(joined) > MAX_ARROW_BYTES or not _are_object_lines(joined, len(values)):
        return None
    formers = {column.name: history.former_names(column.name) for column in schema}
    wire = _wire_schema(schema, history)
    try:
        parsed = _read_with_arrow(joined, wire, unexpected)
        if parsed.num_rows != len(values):
            return None
        columns = [
            from_wire(_merge_names(parsed, each.name, formers[each.name]), each.type)
            for each in schema
        ]
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    for column, declared in zip(columns, schema, strict=True):
        if not has_every_required_value(column, declared) or not _is_finite(column):
            return None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _wire_schema(schema: pa.Schema, history: SchemaHistory) -> pa.Schema:
    """The wire types of a schema's columns, then those of the former names of renamed columns and
    of dropped ones.
    """
    fields = [pa.field(column.name, wire_type(column.type)) for column in schema]
    for former, present in history.renamed:
        if present in schema.names:
            fields.append(pa.field(former, wire_type(schema.field(present).type)))
    for name, kind in history.dropped:
        if name not in schema.names and is_arrow_readable(_named_type(kind)):
            fields.append(pa.field(name, wire_type(_named_type(kind))))
    return pa.schema(fields)


@lru_cache(maxsize=1024)
def _named_type(name: str) -> pa.DataType:
    return parse_schema(f"c {name}").field(0).type


def _merge_names(parsed: pa.Table, name: str, formers: Sequence[str]) -> pa.Array:
    """A column of parsed rows, of which some have it under a former name."""
    column = as_array(parsed.column(name))
    for former in formers:
        values = as_array(parsed.column(former))
        if values.null_count < len(values):
            column = pc.coalesce(column, values)
    return column


def _are_object_lines(joined: bytes, count: int) -> bool:
    """Whether the bytes are `count` lines of valid UTF-8 in braces. Arrow's reader checks none of
    it, and crashes on a bare `null`.
    """
    if (
        not joined.startswith(b"{")
        or not joined.endswith(b"}")
        or not joined.count(b"}\n{") == joined.count(b"\n") == count - 1
    ):
        return False
    try:
        return joined.isascii() or bool(joined.decode())
    except UnicodeDecodeError:
        return False


def _is_finite(column: pa.Array) -> bool:
    """Whether all floats are finite. Arrow's reader accepts a bare NaN, which is not JSON, and
    reads numbers beyond the range of a FLOAT as infinite.
    """
    kind = column.type
    if pa.types.is_floating(kind):
        return pc.all(pc.is_finite(column)).as_py() is not False
    if pa.types.is_list(kind) or pa.types.is_struct(kind):
        children = [column.flatten()] if pa.types.is_list(kind) else column.flatten()
        return all(map(_is_finite, children))
    return True


def decode_rows_exactly(
    values: Sequence[bytes],
    schema: pa.Schema,
    *,
    ignored: Collection[str] = (),
    history: SchemaHistory = NO_HISTORY,
    parser: Parser = parse_json,
    unknown: UnknownFields | None = None,
) -> Decoded:
    """The rows of JSON values, decoded value by value. `parser` returns the JSON object of a value,
    or raises JsonMismatch. See `decode_rows` for the rest.
    """
    if history:
        ignored = [*ignored, *(name for name, _ in history.dropped)]
        rows, misfits = parse_rows_exactly(
            values,
            schema,
            ignored,
            lambda value: _with_present_names(parser(value), history),
            unknown,
        )
    else:
        rows, misfits = parse_rows_exactly(values, schema, ignored, parser, unknown)
    columns: list[pa.Array] = []
    while len(columns) < len(schema):
        column = schema.field(len(columns))
        cells = {index: row[column.name] for index, row in rows.items()}
        try:
            columns.append(_exact_column(list(cells.values()), column))
        except (pa.ArrowException, OverflowError, ValueError):
            for index, reason in _find_misfits(cells, column).items():
                misfits[index] = reason
                del rows[index]
            columns = []  # earlier columns still have the removed rows: build all columns again
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    return Decoded(batch, list(rows) if misfits else None, dict(sorted(misfits.items())))


def _with_present_names(parsed: Any, history: SchemaHistory) -> Any:
    """A JSON object with the present names of its columns."""
    if not isinstance(parsed, dict) or not history.renamed:
        return parsed
    formers = dict(history.renamed)
    renamed = {formers[name]: value for name, value in parsed.items() if name in formers}
    return renamed | {name: value for name, value in parsed.items() if name not in formers}


def _exact_column(cells: list[object], column: pa.Field) -> pa.Array:
    array = from_wire(pa.array(cells, wire_type(column.type, exact=True)), column.type)
    if not has_every_required_value(array, column):
        raise pa.ArrowInvalid("null where the schema says NOT NULL")
    return array


def _find_misfits(cells: dict[int, object], column: pa.Field) -> dict[int, str]:
    reasons = {}
    for index, cell in cells.items():
        try:
            _exact_column([cell], column)
        except (pa.ArrowException, OverflowError, ValueError) as error:
            reasons[index] = f"column {column.name!r}: {error}"
    return reasons
