r"""The spellings in which a value may be stored, as one regular expression of linear time (RE2).

A text that was put into JSON, and that JSON into another one, has its characters escaped once,
twice or more often; `é` may be `\u00e9` at any depth, and `"` may have any number of
backslashes before it. So each character is matched in all its forms, and not the whole value in a
few:

    stored                                      the value `Ann "é"`
    Ann "é"                                     plain
    {"name":"Ann \"\u00e9\""}                  JSON
    {"row":"{\"name\":\"Ann \\\"é\\\"\"}"}    JSON in JSON
    Ann+%22%C3%A9%22                            in an address

Values are also found as UTF-16 and in base64, in both normal forms of Unicode, and, if they are
numbers, in columns of integers.
"""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_SHORT_ESCAPES = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}
_MAY_BE_ESCAPED = set("\"'/\\")
_LONGEST_FORM_BYTES = 48
"""How many bytes one character takes at most, but for more backslashes than anybody writes."""
_SHORTEST_BASE64 = 6
"""Of shorter values so few characters of base64 are certain that they are found everywhere."""


class Spellings:
    """All spellings of some values."""

    def __init__(self, values: Sequence[str]) -> None:
        forms = sorted(
            {unicodedata.normalize(form, value) for value in values for form in ("NFC", "NFD")}
            | set(values)
        )
        self._numbers = sorted(
            {int(value) for value in values if value.isascii() and value.isdigit()}
        )
        self._pattern = "|".join(
            dict.fromkeys(pattern for form in forms for pattern in _patterns(form))
        )
        self.overlap = max((len(form) for form in forms), default=0) * _LONGEST_FORM_BYTES
        """How much of one part of a file to search again with the next part."""
        self.literals = sorted({literal for form in forms for literal in _literals(form)})
        """The commonest spellings as they are, for values that are split over two pages."""

    def __bool__(self) -> bool:
        return bool(self._pattern)

    def are_in(self, content: bytes | memoryview) -> bool:
        """Whether any of the values is in some bytes."""
        if not self._pattern or not len(content):
            return False
        data = pa.array([content], pa.large_binary())
        return pc.any(pc.match_substring_regex(data, self._pattern)).as_py() is True

    def are_in_text(self, text: str) -> bool:
        return self.are_in(text.encode("utf-8", "surrogatepass"))

    def are_in_any(self, contents: Sequence[bytes]) -> bool:
        """Whether any of the values is in one of many texts, with one call."""
        return bool(pc.any(self.mask(pa.array(contents, pa.large_binary()))).as_py())

    def mask(self, column: pa.Array) -> pa.BooleanArray:
        """Which values of a column have one of the values; never null."""
        if not self._pattern:
            return _none(len(column))
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        kind = column.type
        if _is_text(kind):
            found = pc.match_substring_regex(column.cast(pa.large_binary()), self._pattern)
            return pc.fill_null(found, fill_value=False)
        if pa.types.is_nested(kind):
            texts = pa.array([_flat_text(item) for item in column.to_pylist()], pa.large_binary())
            return self.mask(texts)
        if pa.types.is_integer(kind) and self._numbers:
            return pc.fill_null(
                pc.is_in(column.cast(pa.decimal128(38, 0)), value_set=_decimals(self._numbers)),
                fill_value=False,
            )
        return _none(len(column))

    def mask_rows(self, rows: pa.RecordBatch) -> pa.BooleanArray:
        """Which rows have one of the values in a column."""
        return reduce(pc.or_, (self.mask(column) for column in rows.columns), _none(rows.num_rows))


def _none(count: int) -> pa.BooleanArray:
    return pa.repeat(pa.scalar(value=False), count)


def _decimals(numbers: Iterable[int]) -> pa.Array:
    return pa.array([number for number in numbers if number < 10**38], pa.decimal128(38, 0))


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _flat_text(item: Any) -> bytes:
    """All texts and bytes of a nested value, one after the other."""
    if isinstance(item, bytes):
        return item
    if isinstance(item, dict):
        return b"\0".join(_flat_text(each) for pair in item.items() for each in pair)
    if isinstance(item, list | tuple):
        return b"\0".join(map(_flat_text, item))
    return item.encode() if isinstance(item, str) else json.dumps(item, default=str).encode()


def _literals(value: str) -> Iterator[bytes]:
    """A value as UTF-8 and UTF-16, and as JSON escapes it once and twice."""
    yield value.encode()
    yield value.encode("utf-16-le")
    for is_ascii in (True, False):
        once = json.dumps(value, ensure_ascii=is_ascii)[1:-1]
        yield once.encode()
        yield json.dumps(once, ensure_ascii=is_ascii)[1:-1].encode()


def _patterns(value: str) -> Iterator[str]:
    yield "".join(map(_character, value))
    yield _escaped(value.encode("utf-16-le"))
    yield _escaped(value.encode("utf-16-be"))
    content = value.encode()
    if len(content) >= _SHORTEST_BASE64:
        yield from (_base64(content, before) for before in range(3))


def _character(char: str) -> str:
    """One character in all its forms."""
    content = char.encode("utf-8", "surrogatepass")
    units = char.encode("utf-16-be", "surrogatepass")
    plain = _escaped(content)
    if char == "\\":
        plain = r"\\+"
    elif char in _MAY_BE_ESCAPED:
        plain = rf"\\*{plain}"
    forms = [
        plain,
        "".join(rf"\\+u{_hex(units[at : at + 2])}" for at in range(0, len(units), 2)),
        "".join(f"%{_hex(bytes([byte]))}" for byte in content),
    ]
    if char in _SHORT_ESCAPES:
        forms.append(rf"\\+{_SHORT_ESCAPES[char]}")
    if char == " ":
        forms.append(r"\+")
    return f"(?:{'|'.join(forms)})"


def _escaped(content: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in content)


def _hex(content: bytes) -> str:
    """Hexadecimal digits, small or large."""
    return "".join(
        f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in content.hex()
    )


def _base64(content: bytes, before: int) -> str:
    """What base64 makes of some bytes behind others, as far as the others do not matter."""
    encoded = base64.b64encode(bytes(before) + content).decode().rstrip("=")
    first = -(-before * 8 // 6)
    last = (before + len(content)) * 8 // 6
    certain = encoded[first:last]
    return "".join({"+": r"[+\-]", "/": "[/_]"}.get(char, char) for char in certain)
