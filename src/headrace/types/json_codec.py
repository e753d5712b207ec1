"""Rows as JSON values and back, a whole batch at a time: what a topic's records hold on Kafka,
readable by anyone.

Reading takes Arrow's JSON reader where it can. Whatever that refuses or might get wrong (NaN, maps,
a record of a foreign producer that does not fit) goes through `json_shape.py`, value by value,
which is exact and says what is wrong with a record.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from headrace.columnar.buffers import compact_offsets, list_elements, map_entries
from headrace.errors import BadRows, BugError

# How each type of a schema travels in JSON, and the way back from what a JSON parser yields to the
# type itself.
#
# A column's *wire type* is what its JSON parses to: text for decimals, binaries and times, numbers
# for intervals, pairs for maps, itself for the rest. `json_rows.py` parses values to wire types,
# quickly or exactly, and turns whole columns back here.


_DAY_US = 24 * 3600 * 1_000_000
_FIRST_DAY, _LAST_DAY = (
    -719_162,
    2_932_896,
)  # 0001-01-01 and 9999-12-31: outside them ISO 8601 needs more than four digits


def is_text_encoded(kind: pa.DataType) -> bool:
    """Types whose JSON is a string that stands for something else."""
    return bool(
        pa.types.is_decimal(kind)
        or pa.types.is_binary(kind)
        or (pa.types.is_temporal(kind) and not pa.types.is_duration(kind))
    )


def wire_type(kind: pa.DataType, *, exact: bool = False) -> pa.DataType:
    """The type that a column's JSON parses to. Parsed exactly, floats are text too: NaN has no
    number, and a FLOAT read as a double rounds twice.
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
    """Whether Arrow's JSON reader can read the type: it knows no objects with arbitrary names,
    which is what maps are.
    """
    if pa.types.is_map(kind):
        return False
    return all(is_arrow_readable(kind.field(i).type) for i in range(kind.num_fields))


def from_wire(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """A wire column as its own type. Raises ArrowInvalid if a text does not stand for a value of
    the type.
    """
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
    decode_rows = binascii.a2b_base64
    try:
        values = [
            None if value is None else decode_rows(value, strict_mode=True)
            for value in array.to_pylist()
        ]
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
    """`MapArray.from_arrays` takes a null offset as a null map, and has no mask in all versions
    that are supported.
    """
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
    """Whether every date and timestamp in a column, at any depth, has a year of four digits: the
    text of others reads back as nothing.
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
    """A column of dates or timestamps without those whose year has not four digits: null in their
    place.
    """
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


# JSON values checked against a schema one by one: exact, slow, and able to say what is wrong. Used
# by `json_rows.py` for what the quick way refuses.


WireConverter = Callable[[Any], Any]
Parser = Callable[[bytes], Any]
_NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
_RANGES: dict[pa.DataType, int] = {pa.int8(): 7, pa.int16(): 15, pa.int32(): 31, pa.int64(): 63}

_FLOAT_BOUND = (
    (1 << 128) - (1 << 103)
)  # halfway from the largest number to the next that there would be: from here on, infinity is nearer
_DOUBLE_BOUND = (1 << 1024) - (1 << 970)


class JsonMismatch(Exception):
    """A JSON value that is not of the column's type; the text says why."""


def parse_rows_exactly(
    values: Sequence[bytes], schema: pa.Schema, ignored: Collection[str], parser: Parser
) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """Rows of wire values by index, and the reasons of those that do not fit."""
    shapes = {column.name: wire_converter(column) for column in schema}
    rows: dict[int, dict[str, Any]] = {}
    misfits: dict[int, str] = {}
    for index, value in enumerate(values):
        try:
            rows[index] = _row(parser(value), shapes, ignored)
        except JsonMismatch as error:
            misfits[index] = str(error)
    return rows, misfits


def parse_json(value: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN; numbers with a point keep every digit."""
    try:
        return json.loads(value.decode(), parse_float=Decimal, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise JsonMismatch(f"it is not JSON: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _row(parsed: Any, shapes: dict[str, WireConverter], ignored: Collection[str]) -> dict[str, Any]:
    if not isinstance(parsed, dict):
        raise JsonMismatch(f"it is {_named(parsed)}, not an object")
    for name in parsed:
        if name not in shapes and name not in ignored:
            raise JsonMismatch(f"it has the unknown column {name!r}")
    return {
        name: _inside(f"column {name!r}", shaped, parsed.get(name))
        for name, shaped in shapes.items()
    }


def wire_converter(field: pa.Field) -> WireConverter:
    """A function that gives the wire value of one JSON value, or raises Misshapen."""
    shaped, nullable = _shape(field.type), field.nullable

    def checked(value: Any) -> Any:
        if value is not None:
            return shaped(value)
        if not nullable:
            raise JsonMismatch("it is null, but the schema says NOT NULL")
        return None

    return checked


def _shape(kind: pa.DataType) -> WireConverter:
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
        return _object_map(kind) if pa.types.is_string(kind.key_type) else _pairs_map(kind)
    return _list(kind) if pa.types.is_list(kind) else _struct(kind)


def _named(value: Any) -> str:
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


def _refuse(value: Any, wanted: str) -> JsonMismatch:
    return JsonMismatch(f"it is {_named(value)}, not {wanted}")


def _inside(place: str, shaped: WireConverter, value: Any) -> Any:
    try:
        return shaped(value)
    except JsonMismatch as error:
        raise JsonMismatch(f"{place}: {error}") from None


def _boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise _refuse(value, "a boolean")
    return value


def _integer(bits: int) -> WireConverter:
    def integer(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refuse(value, "a whole number")
        if not -(1 << bits) <= value < 1 << bits:
            raise JsonMismatch(f"{value} is out of range")
        return value

    return integer


def _float(bound: int) -> WireConverter:
    """As text, which is parsed to the column's own precision once; a number that would become
    infinite is refused.
    """

    def floating(value: Any) -> Any:
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            raise _refuse(value, "a number")
        if not -bound < value < bound:
            raise JsonMismatch(f"{value:.6g} is beyond the column's range")
        return str(value)

    return floating


def _decimal(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
        raise _refuse(value, "a decimal in a string")
    return str(value)


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise _refuse(value, "a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise JsonMismatch("it has half of a surrogate pair") from None
    return value


def _list(kind: pa.ListType) -> WireConverter:
    element = wire_converter(kind.value_field)

    def listed(value: Any) -> Any:
        if not isinstance(value, list):
            raise _refuse(value, "an array")
        return [_inside(f"[{position}]", element, item) for position, item in enumerate(value)]

    return listed


def _struct(kind: pa.StructType) -> WireConverter:
    parts = {child.name: wire_converter(child) for child in kind}

    def structured(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _refuse(value, "an object")
        for name in value:
            if name not in parts:
                raise JsonMismatch(f"it has the unknown field {name!r}")
        return {name: _inside(f".{name}", part, value.get(name)) for name, part in parts.items()}

    return structured


def _object_map(kind: pa.MapType) -> WireConverter:
    item = wire_converter(kind.item_field)

    def mapped(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _refuse(value, "an object")
        return [
            {"key": _text(name), "value": _inside(f"[{name!r}]", item, content)}
            for name, content in value.items()
        ]

    return mapped


def _pairs_map(kind: pa.MapType) -> WireConverter:
    key, item = wire_converter(kind.key_field), wire_converter(kind.item_field)

    def mapped(value: Any) -> Any:
        if not isinstance(value, list) or not all(
            isinstance(pair, list) and len(pair) == 2 for pair in value
        ):
            raise _refuse(value, "an array of pairs")
        return [
            {"key": _inside(" key", key, name), "value": _inside(f"[{name!r}]", item, content)}
            for name, content in value
        ]

    return mapped


# Arrow values as JSON text, column by column: the key bytes of both backends and the values on
# Kafka are made of it.
#
# The rules (DESIGN.md section 3): DECIMAL as a string, BINARY as base64, timestamps in ISO 8601
# with microseconds (and `Z`, unless the column has no zone), NaN and infinities as strings, floats
# in their shortest form that reads back the same, intervals as microseconds, structs and maps with
# string keys as objects, other maps as arrays of pairs. Nothing is done row by row except base64
# and rare escapes.


_NEEDS_ESCAPE = r'["\\\x00-\x1f]'
_NEEDS_RARE_ESCAPE = r"[\x00-\x1f]"
_ESCAPES = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))


def json_text(array: pa.Array) -> pa.StringArray:
    """The JSON text of each element. A null stays null: the caller decides whether it is absent or
    written as `null`.
    """
    for is_kind, text in _TEXTS:
        if is_kind(array.type):
            return text(array)
    raise BugError(f"No JSON text for {array.type}.")


def json_text_or_null(array: pa.Array) -> pa.StringArray:
    """The JSON text of each element, with `null` for nulls: what stands inside an array or an
    object.
    """
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
    """What is left after the common escapes: control characters without a short form that everyone
    shares.
    """
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
        for arrow_name, json_name in (
            ("nan", '"NaN"'),
            ("-nan", '"NaN"'),
            ("inf", '"Infinity"'),
            ("-inf", '"-Infinity"'),
        ):
            text = pc.if_else(pc.equal(text, arrow_name), json_name, text)
    return text


def _plain_decimal(array: pa.Array) -> pa.StringArray:
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
    encode_rows = base64.b64encode
    return pa.array(
        [None if value is None else encode_rows(value) for value in array.to_pylist()], pa.binary()
    ).cast(pa.string())


def _date_text(array: pa.Array) -> pa.StringArray:
    return _quoted(array.cast(pa.date32()).cast(pa.string()))


def _time_text(array: pa.Array) -> pa.StringArray:
    """Microseconds, as everywhere; nanoseconds only in those values that have any."""
    text = array.cast(pa.time64("ns")).cast(pa.string())
    return _quoted(pc.replace_substring_regex(text, r"000$", ""))


def _timestamp_text(array: pa.Array) -> pa.StringArray:
    zone = array.type.tz
    naive = array.cast(pa.timestamp("us", tz=zone)).cast(
        pa.timestamp("us")
    )  # values are stored in UTC: only the label goes
    text = pc.replace_substring(naive.cast(pa.string()), " ", "T")
    return pc.binary_join_element_wise('"', text, '"' if zone is None else 'Z"', "")


def _duration_text(array: pa.Array) -> pa.StringArray:
    return array.cast(pa.duration("us")).cast(pa.int64()).cast(pa.string())


def object_text(names: list[str], columns: list[pa.Array]) -> pa.StringArray:
    """One JSON object a row, from columns of the same length."""
    parts: list[Any] = []
    for position, (name, column) in enumerate(zip(names, columns, strict=True)):
        parts += [
            ("{" if position == 0 else ",") + json.dumps(name, ensure_ascii=False) + ":",
            json_text_or_null(column),
        ]
    return pc.binary_join_element_wise(*parts, "}", "")


def array_text(columns: list[pa.Array]) -> pa.StringArray:
    """One JSON array a row, from columns of the same length."""
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
    """Keys may not be null, so a map is an object when its keys are strings and an array of pairs
    otherwise.
    """
    keys, values = map_entries(array)
    if pa.types.is_string(array.type.key_type):
        return _joined(
            array,
            pc.binary_join_element_wise(json_text(keys), json_text_or_null(values), ":"),
            "{",
            "}",
        )
    return _joined(array, array_text([keys, values]), "[", "]")


def _joined(array: pa.Array, texts: pa.StringArray, opening: str, closing: str) -> pa.StringArray:
    """The texts of the elements of each list of `array`, comma-separated in brackets; null lists
    stay null.
    """
    lists = pa.ListArray.from_arrays(compact_offsets(array), texts)
    text = pc.binary_join_element_wise(opening, pc.binary_join(lists, ","), closing, "")
    return (
        text
        if array.null_count == 0
        else pc.if_else(array.is_valid(), text, pa.scalar(None, pa.string()))
    )


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
    (
        pa.types.is_list,
        lambda array: _joined(array, json_text_or_null(list_elements(array)), "[", "]"),
    ),
)

MAX_QUICK_BYTES = 1 << 30  # one block of Arrow's JSON reader; its sizes are 32 bits wide


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
    """One JSON object a row."""
    values: list[bytes] = encode_column(batch).to_pylist()
    return values


def encode_column(batch: pa.RecordBatch) -> pa.BinaryArray:
    """The same as a column."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if not fits_iso_years(column):
            raise BadRows(
                f"Column {name!r} has a date or timestamp outside the years 0001 to 9999, which"
                " JSON on Kafka cannot carry.",
                fix="leave it null.",
            )
    return object_text(batch.schema.names, batch.columns).cast(pa.binary())


def decode_rows(
    values: Sequence[bytes], schema: pa.Schema, *, ignored: Collection[str] = ()
) -> Decoded:
    """The rows of JSON values. Columns that a value lacks are null; `ignored` are names it may have
    although the schema does not.
    """
    quick = (
        _decode_quickly(values, schema)
        if values and all(is_arrow_readable(column.type) for column in schema)
        else None
    )
    if quick is not None:
        return Decoded(quick)
    return decode_rows_exactly(values, schema, ignored=ignored)


def _decode_quickly(values: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch | None:
    """None if anything is unusual; what comes back is what the exact way would have given."""
    joined = b"\n".join(values)
    if len(joined) > MAX_QUICK_BYTES or not _look_like_objects(joined, len(values)):
        return None
    try:
        parsed = pj.read_json(
            pa.BufferReader(joined),
            read_options=_read_options(len(joined)),
            parse_options=_parse_options(schema),
        )
        if parsed.num_rows != len(values):
            return None
        columns = [from_wire(_whole(parsed.column(column.name)), column.type) for column in schema]
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    if not all(
        _is_plain(column, declared) for column, declared in zip(columns, schema, strict=True)
    ):
        return None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _look_like_objects(joined: bytes, count: int) -> bool:
    """One line of valid UTF-8 in braces each: Arrow's reader checks none of it, and crashes on a
    bare `null`.
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


def _read_options(size: int) -> pj.ReadOptions:
    return pj.ReadOptions(use_threads=False, block_size=size + 1)


def _parse_options(schema: pa.Schema) -> pj.ParseOptions:
    wire = pa.schema([pa.field(column.name, wire_type(column.type)) for column in schema])
    return pj.ParseOptions(
        explicit_schema=wire, newlines_in_values=False, unexpected_field_behavior="error"
    )


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _is_plain(column: pa.Array, declared: pa.Field) -> bool:
    return has_every_required_value(column, declared) and _is_finite(column)


def _is_finite(column: pa.Array) -> bool:
    """Arrow's reader takes a bare NaN, which is no JSON, and makes numbers beyond a FLOAT
    infinite.
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
    parser: Parser = parse_json,
) -> Decoded:
    """The slow and exact way. `parser` gives a row's JSON object for a value, or raises
    Misshapen.
    """
    rows, misfits = parse_rows_exactly(values, schema, ignored, parser)
    columns: list[pa.Array] = []
    while len(columns) < len(schema):
        column = schema.field(len(columns))
        cells = {index: row[column.name] for index, row in rows.items()}
        try:
            columns.append(_exact_column(list(cells.values()), column))
        except (pa.ArrowException, OverflowError, ValueError):
            for index, reason in _culprits(cells, column).items():
                misfits[index] = reason
                del rows[index]
            columns = []  # the columns before this one have rows that are gone now
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    return Decoded(batch, list(rows) if misfits else None, dict(sorted(misfits.items())))


def _exact_column(cells: list[object], column: pa.Field) -> pa.Array:
    array = from_wire(pa.array(cells, wire_type(column.type, exact=True)), column.type)
    if not has_every_required_value(array, column):
        raise pa.ArrowInvalid("null where the schema says NOT NULL")
    return array


def _culprits(cells: dict[int, object], column: pa.Field) -> dict[int, str]:
    reasons = {}
    for index, cell in cells.items():
        try:
            _exact_column([cell], column)
        except (pa.ArrowException, OverflowError, ValueError) as error:
            reasons[index] = f"column {column.name!r}: {error}"
    return reasons
