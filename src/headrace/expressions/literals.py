"""Checks of literals in an expression that would fail on every row if they were wrong: patterns,
formats, time zones, units.

Patterns are Java's regular expressions. Those that mean the same in Python are let through; what
only one of the two supports is refused.
"""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Callable
from typing import Any

from headrace.expressions.typed_expression import ExpressionRefused, TypedExpression

_NOT_IN_JAVA = re.compile(r"\(\?P|\(\?#|\(\?\(|\\Z\w|\[\]|\[\^\]|\{,|(?<!\\)\{(?!\d+(,\d*)?\})")
_FORMAT_LETTERS = {
    "y": 4,
    "M": 4,
    "d": 2,
    "H": 2,
    "h": 2,
    "m": 2,
    "s": 2,
    "S": 9,
    "a": 1,
    "X": 3,
    "x": 3,
    "E": 4,
    "D": 3,
    "Q": 2,
}
_ONLY_FOR_TEXT = "EQD"  # letters that Spark can write, but not parse
_TRUNC_UNITS = (
    "year",
    "quarter",
    "month",
    "week",
    "day",
    "hour",
    "minute",
    "second",
    "millisecond",
    "microsecond",
)
_DATE_UNITS = ("year", "quarter", "month", "week")
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def quoted_text(text: str) -> str:
    """A text as a literal of Spark SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def quoted_name(name: str) -> str:
    """A name as an identifier of Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def pattern(value: Any) -> None:
    _compiled(value)


def _compiled(value: Any) -> re.Pattern[str]:
    text = str(value)
    if odd := _NOT_IN_JAVA.search(text):
        raise ExpressionRefused(
            f"The pattern {text!r} has {odd[0]!r}, which Spark does not take.",
            "escape it with a backslash, or write it another way.",
        )
    try:
        return re.compile(re.sub(r"(?<!\\)\(\?<(?=[A-Za-z])", "(?P<", text))
    except re.error as error:
        raise ExpressionRefused(f"The pattern {text!r} cannot be read: {error}.") from None


def count_groups(value: Any) -> int:
    return _compiled(value).groups


def like_pattern(value: Any) -> None:
    """Refuse a pattern of LIKE with a backslash before anything but `_`, `%` and itself."""
    if re.search(r"\\(?![_%\\])", str(value).replace("\\\\", "")):
        raise ExpressionRefused(
            f"The pattern {value!r} has a backslash before a plain character.",
            "in a LIKE pattern write a backslash only before _, % or another one.",
        )


def replacement(value: Any, groups: int) -> None:
    """Refuse a replacement with a group, such as `$1`, that the pattern does not have."""
    for match in re.finditer(r"(\\.)|\$(\d)?", str(value)):
        if match[1] is None and (match[2] is None or int(match[2]) > groups):
            raise ExpressionRefused(
                f"The replacement {value!r} has {match[0]!r}, but the pattern has {groups} groups.",
                "write a plain dollar sign as '\\\\$'.",
            )


def read_format(value: Any) -> None:
    """Refuse a format by which Spark cannot parse texts."""
    _format(value, forbidden=_ONLY_FOR_TEXT)


def write_format(value: Any) -> None:
    """Refuse a format in which Spark cannot write times."""
    _format(value, forbidden="")


def _format(value: Any, *, forbidden: str) -> None:
    text = re.sub(r"'[^']*'", "", str(value))
    if "'" in text:
        raise ExpressionRefused(f"The format {value!r} has a quote that is not closed.")
    for match in re.finditer(r"([A-Za-z])\1*", text):
        letter, length = match[1], len(match[0])
        if letter in forbidden or length > _FORMAT_LETTERS.get(letter, 0):
            known = "".join(each for each in _FORMAT_LETTERS if each not in forbidden)
            raise ExpressionRefused(
                f"The format {value!r} has {match[0]!r}.",
                f"use the letters {known}, as in 'yyyy-MM-dd HH:mm:ss'; put text in single quotes.",
            )


def trunc_unit(value: Any) -> None:
    _one_of(value, _TRUNC_UNITS, "unit")


def date_unit(value: Any) -> None:
    _one_of(value, _DATE_UNITS, "unit")


def weekday(value: Any) -> None:
    _one_of(value, _WEEKDAYS, "day")


def _one_of(value: Any, known: tuple[str, ...], what: str) -> None:
    if str(value).lower() not in known:
        raise ExpressionRefused(f"{value!r} is no {what}.", f"use one of {', '.join(known)}.")


def zone(value: Any) -> None:
    text = str(value)
    if not re.fullmatch(r"[+-]\d\d:\d\d", text) and text not in zoneinfo.available_timezones():
        raise ExpressionRefused(
            f"{text!r} is no time zone.", "write it as in 'Europe/Vienna', 'UTC' or '+02:00'."
        )


def small(value: Any) -> None:
    """Refuse a length that is too large; a huge one could crash a worker."""
    if not isinstance(value, int) or not 0 <= value <= 10_000:
        raise ExpressionRefused(f"{value!r} is no length.", "write a number from 0 to 10,000.")


def part(value: Any) -> None:
    if not isinstance(value, int) or value == 0:
        raise ExpressionRefused(
            f"{value!r} is no position.", "positions count from 1, or from the end with -1."
        )


def from_one(value: Any) -> None:
    if not isinstance(value, int) or value < 0:
        raise ExpressionRefused(f"{value!r} is no length.", "write zero or more.")


def hash_bits(value: Any) -> None:
    if value not in (0, 224, 256, 384, 512):
        raise ExpressionRefused(f"sha2 has no {value!r} bits.", "use 224, 256, 384 or 512.")


def not_empty(value: Any) -> None:
    if value == "":
        raise ExpressionRefused(
            "The text that separates parts is empty.", "name what stands between them."
        )


def url_part(value: Any) -> None:
    known = ("HOST", "PATH", "QUERY", "REF", "PROTOCOL", "FILE", "AUTHORITY", "USERINFO")
    if value not in known:  # Spark gives null for any other, also in lower case
        raise ExpressionRefused(
            f"{value!r} is no part of an address.", f"use one of {', '.join(known)}."
        )


def escaped_pattern(value: str, escape: str) -> None:
    """Refuse a pattern of LIKE in which the escape character stands before a plain one."""
    quoted = re.escape(escape)
    if re.search(rf"{quoted}(?![_%]|{quoted})", value.replace(escape * 2, "")):
        raise ExpressionRefused(
            f"The pattern {value!r} has {escape!r} before a plain character.",
            f"write it only before _, % or another {escape}.",
        )


_PRINTF = re.compile(r"%(\d+\$|<)?[-#+ 0,(]*(\d*)(?:\.(\d+))?([a-zA-Z%])")


def printf(value: Any) -> None:
    """Refuse a format of `format_string` that Java cannot read, or that makes huge texts."""
    text = str(value)
    for match in _PRINTF.finditer(text):
        if (
            match[4] not in "bBhHsScCdoxXeEfgGaA%n"
            or max(int(match[2] or 0), int(match[3] or 0)) > 10_000
        ):
            raise ExpressionRefused(
                f"The format {text!r} has {match[0]!r}.",
                "use %s, %d, %x, %c, %e, %.2f and the like, at most 10,000 wide.",
            )
    if "%" in _PRINTF.sub("", text):
        raise ExpressionRefused(
            f"The format {text!r} has a % that begins no conversion.", "write it as %%."
        )


def charset(value: Any) -> None:
    _one_of(
        value,
        ("us-ascii", "iso-8859-1", "utf-8", "utf-16be", "utf-16le", "utf-16", "utf-32"),
        "character set",
    )


def binary_format(value: Any) -> None:
    _one_of(value, ("hex", "utf-8", "utf8", "base64"), "format of bytes")


_NUMBER_FORMAT = re.compile(r"(MI|S)?[$]?([09][09,G]*)?([.D][09]*)?[$]?(MI|S|PR)?", re.IGNORECASE)


def number_format(value: Any) -> None:
    number_digits(value)


def number_digits(value: Any) -> tuple[int, int]:
    """How many digits a format such as '999.99' has before and behind the point. Refuses others."""
    text = str(value)
    match = _NUMBER_FORMAT.fullmatch(text)
    before, behind = (re.sub(r"[^09]", "", (match and match[part]) or "") for part in (2, 3))
    if not before + behind or len(before + behind) > 38:
        raise ExpressionRefused(
            f"The format {text!r} is not one of a number.",
            "write it with 0, 9, a point and commas, as in '999,999.99' or 'S000.0'.",
        )
    return len(before), len(behind)


def ecb(value: Any) -> None:
    if str(value).upper() != "ECB":
        raise ExpressionRefused(
            f"aes_encrypt in the mode {value!r} draws a random vector, and a replay must give the"
            " same rows.",
            "give it one: aes_encrypt(text, key, 'CBC', 'PKCS', vector).",
        )


def anything(_: Any) -> None:
    """Accept any literal."""


CHECKS: dict[str, Callable[[Any], None]] = {
    "pattern": pattern,
    "read_format": read_format,
    "write_format": write_format,
    "trunc_unit": trunc_unit,
    "date_unit": date_unit,
    "weekday": weekday,
    "zone": zone,
    "small": small,
    "part": part,
    "from_one": from_one,
    "hash_bits": hash_bits,
    "not_empty": not_empty,
    "url_part": url_part,
    "literal": anything,
    "printf": printf,
    "charset": charset,
    "binary_format": binary_format,
    "number_format": number_format,
    "ecb": ecb,
}


def check(name: str, operand: TypedExpression, *, function: str) -> None:
    """Refuse an argument that is no literal, or does not pass its check."""
    if not operand.is_literal:
        raise ExpressionRefused(
            f"An argument of {function} must be written out, not computed.",
            f"write it as a literal; {function} checks it when the pipeline is declared.",
        )
    CHECKS[name](operand.value)
