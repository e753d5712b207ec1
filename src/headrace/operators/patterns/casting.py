"""CAST in conditions and measures, as Spark has it: what is no number fails on its row, and the others do not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Values = Any
Note = Callable[[Any], None]
"""Told where something failed."""
_TRUE, _FALSE = ("t", "true", "y", "yes", "1"), ("f", "false", "n", "no", "0")  # no Arrow arrays: making one loads pandas, which a declaration need not wait for
_WHOLE = r"^[+-]?[0-9]{1,37}$"
_NUMBER = r"(?i)^[+-]?([0-9]+\.?[0-9]*(e[+-]?[0-9]+)?|\.[0-9]+(e[+-]?[0-9]+)?|nan|inf|infinity)$"
_LARGEST_DECIMAL = pa.decimal128(38, 0)


def converted(values: Values, kind: pa.DataType, note: Note) -> Values:
    """Values as another type; null where that fails."""
    given = values.type
    if pa.types.is_string(given) and kind != given:
        return _from_text(values, kind, note)
    if pa.types.is_timestamp(given) and _is_number(kind):
        seconds = _seconds(values)
        return converted(pc.floor(seconds) if pa.types.is_integer(kind) else seconds, kind, note)
    if pa.types.is_duration(given) and kind != given:
        raise pa.ArrowNotImplementedError("an interval is no number: compare it with an INTERVAL")
    if kind == pa.string() and not (pa.types.is_string(given) or pa.types.is_integer(given) or pa.types.is_boolean(given) or pa.types.is_decimal(given) or pa.types.is_null(given)):
        raise pa.ArrowNotImplementedError(f"a cast from {given} to STRING is not computed over a match")
    if pa.types.is_integer(kind) and not _always_fits(given, kind):
        return _whole(values, kind, note)
    return pc.cast(values, kind, safe=False)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _always_fits(given: pa.DataType, kind: pa.DataType) -> bool:
    """Whether every value is a whole number of this type."""
    return bool(pa.types.is_boolean(given) or pa.types.is_null(given) or (pa.types.is_integer(given) and given.bit_width <= kind.bit_width))


def _seconds(times: Values) -> Values:
    kind = times.type
    micros = pc.cast(pc.cast(times, pa.timestamp("us", kind.tz)), pa.int64())
    return pc.divide(pc.cast(micros, pa.float64(), safe=False), pa.scalar(1e6))


def _whole(numbers: Values, kind: pa.DataType, note: Note) -> Values:
    """Whole numbers of so many bits."""
    limit = float(2 ** (kind.bit_width - 1))
    about = pc.cast(numbers, pa.float64(), safe=False)
    fits = pc.and_(pc.greater(about, pa.scalar(-limit - 1)), pc.less(about, pa.scalar(limit)))
    note(pc.invert(fits))
    return pc.cast(pc.if_else(fits, numbers, pa.scalar(None, numbers.type)), kind, safe=False)


def _from_text(texts: Values, kind: pa.DataType, note: Note) -> Values:
    try:
        return pc.cast(texts, kind)
    except pa.ArrowInvalid:
        texts = pc.utf8_trim_whitespace(texts)
    if pa.types.is_boolean(kind):
        return _truth(pc.utf8_lower(texts), note)
    fits = pc.match_substring_regex(texts, _WHOLE if pa.types.is_integer(kind) else _NUMBER)
    note(pc.invert(fits))
    plain = pc.replace_substring_regex(pc.if_else(fits, texts, pa.scalar(None, pa.string())), r"^\+", "")
    return _whole(pc.cast(plain, _LARGEST_DECIMAL), kind, note) if pa.types.is_integer(kind) else pc.cast(plain, kind)


def _truth(texts: Values, note: Note) -> Values:
    is_true, is_false = pc.is_in(texts, value_set=pa.array(_TRUE)), pc.is_in(texts, value_set=pa.array(_FALSE))
    known = pc.or_(is_true, is_false)
    note(pc.and_(pc.is_valid(texts), pc.invert(known)))
    return pc.if_else(known, is_true, pa.scalar(None, pa.bool_()))
