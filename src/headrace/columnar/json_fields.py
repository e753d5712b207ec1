"""Fields of JSON texts, extracted from whole columns exactly as Spark's
`get_json_object(text, '$.name')` does.

Flat objects, which most events are, are parsed by regular expressions; other texts one by one, by
Python's parser. Where Spark's result is not certain (a text that is not strict JSON, a name that
occurs twice, a nested value or a floating number as text, which Spark would format anew) the
functions raise `NeedsSpark`, and the engine runs the batch again on Spark.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHOLE = r"(?:0|-?[1-9][0-9]{0,17})"
_NUMBER = r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,3})?"
_TEXT = r'"[^"\\\x00-\x1f]*"'
_VALUE = rf"(?:{_NUMBER}|{_TEXT}|true|false|null)"
_FLAT = rf"^\{{(?:{_TEXT}: ?{_VALUE}(?:, ?{_TEXT}: ?{_VALUE})*)?\}}$"
_MAX_TEXT_BYTES = 1 << 20


class NeedsSpark(Exception):
    """A row whose result only Spark can compute exactly."""


class _Pairs(tuple[tuple[str, Any], ...]):
    """The names and values of a JSON object, in order and with duplicates."""

    __slots__ = ()


class _Floating(str):
    """A number with a point or an exponent, as written in the JSON text."""

    __slots__ = ()


def field(texts: pa.Array, name: str, *, floating: bool) -> pa.Array:
    """The field as text; null where it is missing or null. With `floating`, numbers may have a
    point or an exponent, and are returned as written.
    """
    if (pc.max(pc.binary_length(texts)).as_py() or 0) > _MAX_TEXT_BYTES:
        raise NeedsSpark
    is_flat = pc.and_(
        pc.match_substring_regex(texts, _FLAT), pc.less(pc.count_substring(texts, f'"{name}":'), 2)
    )
    tokens = pc.struct_field(pc.extract_regex(texts, _token(name)), [0])
    if pc.any(
        pc.and_(
            is_flat,
            pc.match_substring_regex(tokens, "^-0$" if floating else r"^-?[0-9]+[.eE]|^-0$"),
        )
    ).as_py():
        raise NeedsSpark
    # Strings without their quotes, and null for a JSON null.
    tokens = pc.if_else(pc.equal(tokens, "null"), pa.scalar(None, pa.string()), tokens)
    quoted = pc.starts_with(tokens, '"')
    values = (
        pc.if_else(quoted, pc.utf8_slice_codeunits(tokens, 1, -1), tokens)
        if pc.any(quoted).as_py()
        else tokens
    )
    needs_parser = pc.fill_null(pc.invert(is_flat), fill_value=False)
    if not pc.any(needs_parser).as_py():
        return values
    parsed = [
        _parse_field(text, name, floating=floating)
        for text in texts.filter(needs_parser).to_pylist()
    ]
    return pc.replace_with_mask(values, needs_parser, pa.array(parsed, pa.string()))


@lru_cache(maxsize=1000)
def _token(name: str) -> str:
    return rf'"{name}": ?(?P<value>{_VALUE})'


def _parse_field(text: str, name: str, *, floating: bool) -> str | None:
    """The field of one text, by Python's parser."""
    try:
        pairs = json.loads(
            text, object_pairs_hook=_Pairs, parse_float=_Floating, parse_constant=_refuse
        )
    except (ValueError, RecursionError) as error:
        raise NeedsSpark from error
    if not isinstance(pairs, _Pairs):
        raise NeedsSpark
    values = [value for key, value in pairs if key == name]
    if len(values) > 1:
        raise NeedsSpark
    value = values[0] if values else None
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) < 10**18:
        return str(value)
    if (
        isinstance(value, str)
        and (floating or not isinstance(value, _Floating))
        and value.isprintable()
    ):
        return str(value)
    raise NeedsSpark


def _refuse(_text: str) -> NoReturn:
    raise NeedsSpark


def whole_numbers(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Texts as integers. NeedsSpark if one is something else, which Spark counts as a failed
    row.
    """
    _check(texts, rf"^{_WHOLE}$")
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid as error:  # out of the type's range
        raise NeedsSpark from error


def floating_numbers(texts: pa.Array) -> pa.Array:
    """Texts as DOUBLE. NeedsSpark if one is not a number."""
    _check(texts, rf"^{_NUMBER}$")
    return texts.cast(pa.float64())


def _check(texts: pa.Array, pattern: str) -> None:
    if not pc.all(pc.match_substring_regex(texts, pattern), min_count=0).as_py():
        raise NeedsSpark
