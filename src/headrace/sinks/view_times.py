"""Dates, times and timestamps as text that sorts as they do, and back: for a view's columns and for what stands inside its nested ones."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from headrace.log.json_text import json_text

_NUMBER = r"^[+-][0-9]+$"
_DAY_US = 24 * 3600 * 1_000_000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31


def is_time_text(kind: pa.DataType) -> bool:
    """DATE, TIME and TIMESTAMP; an INTERVAL is a number."""
    return bool(pa.types.is_temporal(kind)) and not pa.types.is_duration(kind)


def time_text(array: pa.Array) -> pa.StringArray:
    """ISO 8601, as the log writes it in JSON; a signed number of days or microseconds for years that need more or fewer than four digits."""
    if pa.types.is_time(array.type):
        return _iso(array)
    numbers = array.cast(pa.int32() if pa.types.is_date(array.type) else pa.int64())
    first, last = _bounds(array.type)
    fits = pc.and_(pc.greater_equal(numbers, first), pc.less_equal(numbers, last))
    if pc.all(fits).as_py() is not False:
        return _iso(array)
    signed = pc.if_else(pc.less(numbers, 0), numbers.cast(pa.string()), pc.binary_join_element_wise("+", numbers.cast(pa.string()), ""))
    return pc.if_else(fits, _iso(pc.if_else(fits, array, pa.scalar(None, array.type))), signed)


def time_array(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """The inverse of `time_text`."""
    if pa.types.is_time(kind):  # Arrow reads no times of day, but it reads them with a date in front
        return pc.binary_join_element_wise("1970-01-01T", texts, "").cast(pa.timestamp("ns")).cast(kind)
    is_number = pc.match_substring_regex(texts, _NUMBER)
    if not pc.any(is_number).as_py():
        return texts.cast(kind)
    missing = pa.scalar(None, pa.string())
    digits = pc.utf8_ltrim(pc.if_else(is_number, texts, missing), characters="+")
    numbers = digits.cast(pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind)
    return pc.coalesce(pc.if_else(is_number, missing, texts).cast(kind), numbers)


def _bounds(kind: pa.DataType) -> tuple[int, int]:
    if pa.types.is_date(kind):
        return _FIRST_DAY, _LAST_DAY
    return _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1


def _iso(array: pa.Array) -> pa.StringArray:
    return pc.utf8_trim(json_text(array), characters='"')
