"""Functions of Spark SQL over Arrow columns, each with exactly Spark's result. Where that is not
certain (letters that are not ASCII, years beyond 9999) they raise `NeedsSpark`, and the engine runs
the batch again on Spark.

    date_format(placed_at, 'yyyy-MM-dd')     2026-03-01 10:05:00     '2026-03-01'
    split_part(url, '/', 4)                  'https://host/a/b'      'a'
    regexp_extract(url, 'id=([0-9]+)', 1)    '?id=17'                '17'

`spark_subset` decides by `accepts_*` which calls are computed here; `FunctionCall` of `evaluator`
computes them, by their names in FUNCTIONS.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.json_fields import NeedsSpark

Values = Any
"""A column of one type."""

_SECOND_US = 1_000_000
_DAY_US = 86_400 * _SECOND_US
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
"""0001-01-01 and 9999-12-31, in days since 1970."""

# Texts


def _ascii(texts: Values) -> Values:
    if not pc.all(pc.string_is_ascii(texts), min_count=0).as_py():
        raise NeedsSpark  # Java and Arrow have different tables of letters
    return texts


def _split_part(texts: Values, delimiter: str, part: int) -> Values:
    """The n-th part, from the end if it is negative; an empty text if there are fewer."""
    parts = pc.split_pattern(texts, pattern=delimiter)
    if isinstance(parts, pa.ChunkedArray):
        parts = parts.combine_chunks()
    offsets = parts.offsets.to_numpy()
    begin, end = offsets[:-1], offsets[1:]
    index = begin + part - 1 if part > 0 else end + part
    exists = (index >= begin) & (index < end)
    chosen = parts.values.take(pa.array(np.where(exists, index, 0), mask=~exists))
    return pc.if_else(pc.is_valid(texts), pc.fill_null(chosen, ""), pa.scalar(None, pa.string()))


def _regexp_extract(texts: Values, pattern: str, group: int) -> Values:
    """What a group matched first; an empty text if there is no match."""
    matches = pc.extract_regex(texts, pattern=_with_one_group(pattern, group))
    found = pc.fill_null(pc.struct_field(matches, [0]), "")
    return pc.if_else(pc.is_valid(texts), found, pa.scalar(None, pa.string()))


def _substring(texts: Values, start: int, length: int | None) -> Values:
    """Characters from `start`, which counts from one."""
    begin = start - 1
    return pc.utf8_slice_codeunits(
        texts, start=begin, stop=None if length is None else begin + length
    )


def _replace(texts: Values, searched: str, replacement: str) -> Values:
    return pc.replace_substring(texts, pattern=searched, replacement=replacement)


# A pattern means the same for Java and for RE2 if it has only these parts. Groups are not repeated,
# since what a repeated group has matched differs.
_REGEX_PART = re.compile(
    r"[A-Za-z0-9_\-=&/:,;%@!~\"'<> #]"  # characters
    r"|\\[.?*+()\[\]{}|^$/\\-]"  # escaped characters
    r"|\[\^?(?:[A-Za-z0-9_=&/:,;%@!~\"'<> #.?*+(){}|$]-?|\\[\[\]\\^-])+\]"  # one of several
    r"|[(|^]"
    r"|\)(?![*+?{])"
    r"|(?<![(|^*+?}])[*+?]\??(?![*+?{])"  # repeated
    r"|(?<![(|^*+?}])\{[0-9]{1,3}(?:,[0-9]{0,3})?\}(?![*+?{])"
)
_GROUP = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])+\]|\(")


def _with_one_group(pattern: str, group: int) -> str:
    """The pattern with the group as its only one; 0 is all of it."""
    number = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal number
        if match[0] != "(":
            return match[0]
        number += 1
        return "(?P<x>" if number == group else "(?:"

    named = _GROUP.sub(replaced, pattern)
    return f"(?P<x>{named})" if group == 0 else named


def accepts_pattern(pattern: str) -> bool:
    """Whether a regular expression means the same to Java and to RE2."""
    position = 0
    while position < len(pattern):
        part = _REGEX_PART.match(pattern, position)
        if part is None or (part[0] == "^" and position and pattern[position - 1] not in "(|"):
            return False
        position = part.end()
    return True


# Times


def _micros(times: Values) -> Values:
    """Microseconds since 1970. NeedsSpark if a year is not one of 1 to 9999."""
    if pa.types.is_date(times.type):
        days = pc.cast(times, pa.int32())
        _check_range(days, _FIRST_DAY, _LAST_DAY)
        return pc.multiply(pc.cast(days, pa.int64()), _DAY_US)
    micros = pc.cast(times, pa.int64())
    _check_range(micros, _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1)
    return micros


def _check_range(values: Values, low: int, high: int) -> None:
    limits = pc.min_max(values).as_py()
    if limits["min"] is not None and not low <= limits["min"] <= limits["max"] <= high:
        raise NeedsSpark


def _floor_division(values: Values, divisor: int) -> Values:
    quotients = pc.divide(values, divisor)
    is_above = pc.greater(pc.multiply(quotients, divisor), values)
    return pc.subtract(quotients, pc.cast(is_above, pa.int64()))


def _time_field(compute: Callable[[Values], Values]) -> Callable[[Values], Values]:
    """A function of times that gives an INT, such as the year."""

    def field(times: Values) -> Values:
        seconds = pc.cast(_floor_division(_micros(times), _SECOND_US), pa.timestamp("s"))
        return pc.cast(compute(seconds), pa.int32())

    return field


def _to_date(times: Values) -> Values:
    days = _floor_division(_micros(times), _DAY_US)
    return pc.cast(pc.cast(days, pa.int32()), pa.date32())


_FORMATS = {
    "yyyy": ("%Y", _DAY_US),
    "MM": ("%m", _DAY_US),
    "dd": ("%d", _DAY_US),
    "HH": ("%H", 3600 * _SECOND_US),
    "mm": ("%M", 60 * _SECOND_US),
    "ss": ("%S", _SECOND_US),
}
_FORMAT_PART = re.compile(r"yyyy|MM|dd|HH|mm|ss|[-/:., ]|'[A-Za-z]+'")


def accepts_format(pattern: str) -> bool:
    """Whether times can be written by a pattern of Java's."""
    return _FORMAT_PART.sub("", pattern) == "" and bool(pattern)


def _date_format(times: Values, pattern: str) -> Values:
    """Times as texts. Each different day, hour, minute or second is written once."""
    unit_us, written = _DAY_US, ""
    for part in _FORMAT_PART.findall(pattern):
        text, part_us = _FORMATS.get(part, (part.strip("'"), _DAY_US))
        written += text
        unit_us = min(unit_us, part_us)
    units = _floor_division(_micros(times), unit_us)
    if isinstance(units, pa.ChunkedArray):
        units = units.combine_chunks()
    encoded = units.dictionary_encode()
    seconds = pc.multiply(encoded.dictionary, unit_us // _SECOND_US)
    texts = pc.strftime(pc.cast(seconds, pa.timestamp("s")), format=written)
    return texts.take(encoded.indices)


FUNCTIONS: dict[str, Callable[..., Values]] = {
    "lower": lambda texts: pc.ascii_lower(_ascii(texts)),
    "upper": lambda texts: pc.ascii_upper(_ascii(texts)),
    "length": lambda texts: pc.cast(pc.utf8_length(texts), pa.int32()),
    "substring": _substring,
    "split_part": _split_part,
    "replace": _replace,
    "regexp_extract": _regexp_extract,
    "startswith": pc.starts_with,
    "endswith": pc.ends_with,
    "contains": pc.match_substring,
    "date_format": _date_format,
    "to_date": _to_date,
    "year": _time_field(pc.year),
    "quarter": _time_field(pc.quarter),
    "month": _time_field(pc.month),
    "day": _time_field(pc.day),
    "hour": _time_field(pc.hour),
    "minute": _time_field(pc.minute),
    "second": _time_field(pc.second),
}
