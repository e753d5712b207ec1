"""Fields of JSON texts, over whole columns: what Spark's `get_json_object(text, '$.name')` gives,
for the texts of which Python can be sure.

Flat objects, as most events are, are taken apart by regular expressions; others one by one, by
Python's parser. What is neither (a text that is no strict JSON, a name that stands twice, a nested
value or a floating number as text, which Spark would write anew) raises `Inexact`: the batch is
then done again by Spark itself.
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
_LONGEST_BYTES = 1 << 20


class NeedsSpark(Exception):
    """Rows of which only Spark can say what it would give."""


class _Pairs(tuple[tuple[str, Any], ...]):
    """An object's names and values, as they stand there."""

    __slots__ = ()


class _Floating(str):
    """A number with a point or an exponent, as it is written."""

    __slots__ = ()


def field(texts: pa.Array, name: str, *, floating: bool) -> pa.Array:
    """The texts of a field, null where it is missing or null. With `floating`, numbers may have a
    point or an exponent, and stand there as they were written.
    """
    if (pc.max(pc.binary_length(texts)).as_py() or 0) > _LONGEST_BYTES:
        raise NeedsSpark
    sure = pc.and_(
        pc.match_substring_regex(texts, _FLAT), pc.less(pc.count_substring(texts, f'"{name}":'), 2)
    )
    tokens = pc.struct_field(pc.extract_regex(texts, _token(name)), [0])
    if pc.any(
        pc.and_(
            sure, pc.match_substring_regex(tokens, "^-0$" if floating else r"^-?[0-9]+[.eE]|^-0$")
        )
    ).as_py():
        raise NeedsSpark
    found = _plain(tokens)
    odd = pc.fill_null(pc.invert(sure), fill_value=False)
    return _with_odd(found, texts, odd, name, floating=floating) if pc.any(odd).as_py() else found


@lru_cache(maxsize=1000)
def _token(name: str) -> str:
    return rf'"{name}": ?(?P<value>{_VALUE})'


def _plain(tokens: pa.Array) -> pa.Array:
    """Texts without their quotes, and null for null."""
    tokens = pc.if_else(pc.equal(tokens, "null"), pa.scalar(None, pa.string()), tokens)
    quoted = pc.starts_with(tokens, '"')
    return (
        pc.if_else(quoted, pc.utf8_slice_codeunits(tokens, 1, -1), tokens)
        if pc.any(quoted).as_py()
        else tokens
    )


def _with_odd(
    found: pa.Array, texts: pa.Array, odd: pa.Array, name: str, *, floating: bool
) -> pa.Array:
    parsed = [_parsed(text, name, floating=floating) for text in texts.filter(odd).to_pylist()]
    return pc.replace_with_mask(found, odd, pa.array(parsed, pa.string()))


def _parsed(text: str, name: str, *, floating: bool) -> str | None:
    try:
        pairs = json.loads(
            text, object_pairs_hook=_Pairs, parse_float=_Floating, parse_constant=_refuse
        )
    except (ValueError, RecursionError) as error:
        raise NeedsSpark from error
    values = (
        [value for key, value in pairs if key == name]
        if isinstance(pairs, _Pairs)
        else [pairs, pairs]
    )
    return (
        _text(values[0], floating=floating)
        if len(values) == 1
        else None
        if not values
        else _refuse(text)
    )


def _text(value: Any, *, floating: bool) -> str | None:
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
    return _refuse(str(value))


def _refuse(_text: str) -> NoReturn:
    raise NeedsSpark


def whole_numbers(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Texts as whole numbers; Inexact if one is something else, which Spark would count as
    failed.
    """
    _check(texts, rf"^{_WHOLE}$")
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid as error:  # too large for it
        raise NeedsSpark from error


def floating_numbers(texts: pa.Array) -> pa.Array:
    _check(texts, rf"^{_NUMBER}$")
    return texts.cast(pa.float64())


def _check(texts: pa.Array, pattern: str) -> None:
    if not pc.all(pc.match_substring_regex(texts, pattern), min_count=0).as_py():
        raise NeedsSpark
