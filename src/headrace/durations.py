"""Durations and points in time as people write them, as whole microseconds and back.

Every option that takes a duration such as "30 seconds", or a time, is read here. What is stored and
compared is always microseconds.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from headrace.errors import BadDuration

_UNITS_US: dict[str, int] = {
    "week": 7 * 24 * 3600 * 1_000_000,
    "day": 24 * 3600 * 1_000_000,
    "hour": 3600 * 1_000_000,
    "minute": 60 * 1_000_000,
    "second": 1_000_000,
    "millisecond": 1_000,
    "microsecond": 1,
}
_SHORT = {
    "w": "week",
    "d": "day",
    "h": "hour",
    "hr": "hour",
    "m": "minute",
    "min": "minute",
    "s": "second",
    "sec": "second",
    "ms": "millisecond",
    "milli": "millisecond",
    "us": "microsecond",
    "µs": "microsecond",
    "μs": "microsecond",
    "micro": "microsecond",
}
_FORMAT_UNITS = ("day", "hour", "minute", "second", "millisecond", "microsecond")
_PART = re.compile(
    r"(?P<whole>\d+)(?:\.(?P<fraction>\d+))?\s*(?P<unit>[a-zµμ]+)\s*(?:,\s*)?(?:and\s+)?",
    re.ASCII | re.IGNORECASE,
)
_AGO = re.compile(r"(?P<duration>.+?)\s+ago", re.IGNORECASE | re.DOTALL)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII)
_MAX_US = 2**63 - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNDERSTOOD = (
    "write a number and a unit, such as '30 seconds', '1 hour 30 minutes', '7 days' or '250 ms'"
    " (week, day, hour, minute, second, ms, us)."
)
_TIMES = (
    "give a datetime, an ISO time such as '2026-01-31T12:00:00Z', seconds since 1970, or a time"
    " back from now such as '1 hour ago'."
)


def to_us(duration: str | timedelta, *, what: str = "duration") -> int:
    """Return the microseconds of a duration.

    Args:
        duration: A text such as "1 hour 30 minutes", or a timedelta.
        what: The name of the option, for the error.

    Raises:
        BadDuration: It cannot be read, is negative, or has no unit.

    Example:
        >>> to_us("250 ms")
        250000

    """
    if isinstance(duration, timedelta):
        us = duration // timedelta(microseconds=1)
    elif isinstance(duration, str):
        us = _parse(duration, what)
    else:
        raise BadDuration(
            f"The {what} {duration!r} is a {type(duration).__name__}, which has no unit.",
            fix=_UNDERSTOOD,
        )
    if us < 0:
        raise BadDuration(f"The {what} {str(duration)!r} is negative.", fix="give zero or more.")
    if us > _MAX_US:
        raise BadDuration(
            f"The {what} {str(duration)!r} is longer than 292,000 years.", fix="give a shorter one."
        )
    return us


def _parse(text: str, what: str) -> int:
    """Return the sum of the parts of a text such as '1 hour 30 minutes'."""
    rest = text.strip()
    if rest.startswith("-"):
        raise BadDuration(f"The {what} {text!r} is negative.", fix="give zero or more.")
    position, total_us = 0, 0
    while position < len(rest):
        part = _PART.match(rest, position)
        if part is None:
            raise BadDuration(
                f"The {what} {text!r} cannot be read from {rest[position:]!r} on.", fix=_UNDERSTOOD
            )
        total_us += _part_us(part, text, what)
        position = part.end()
    if not rest:
        raise BadDuration(f"The {what} is empty.", fix=_UNDERSTOOD)
    return total_us


def _part_us(part: re.Match[str], text: str, what: str) -> int:
    """Return the microseconds of one part, by integer arithmetic: '0.1 seconds' is exactly
    100,000.
    """
    unit_us = _UNITS_US[_unit(part["unit"], text, what)]
    fraction = part["fraction"] or ""
    digits = int(part["whole"] + fraction)
    scaled: int = digits * unit_us // 10 ** len(fraction)
    if scaled * 10 ** len(fraction) != digits * unit_us:
        raise BadDuration(
            f"The {what} {text!r} is finer than a microsecond.",
            fix="round it to whole microseconds.",
        )
    return scaled


def _unit(written: str, text: str, what: str) -> str:
    unit = written.lower()
    for candidate in (unit, unit.removesuffix("s")):
        if candidate in _UNITS_US:
            return candidate
        if candidate in _SHORT:
            return _SHORT[candidate]
    raise BadDuration(f"The {what} {text!r} has the unknown unit {written!r}.", fix=_UNDERSTOOD)


def format_us(us: int) -> str:
    """Return a duration for people, exact, and in one unit where that is short: '1 day', '90
    seconds', '1 day 1 second'.
    """
    if us < 0:
        return "-" + format_us(-us)
    unit = next((unit for unit in _FORMAT_UNITS if us and us % _UNITS_US[unit] == 0), "second")
    count = us // _UNITS_US[unit]
    return _counted(count, unit) if count < 1000 else _in_parts(us)


def _in_parts(us: int) -> str:
    """Return a duration in several units, the largest first, without zeros."""
    parts = []
    for unit in _FORMAT_UNITS:
        count, us = divmod(us, _UNITS_US[unit])
        if count:
            parts.append(_counted(count, unit))
    return " ".join(parts)


def _counted(count: int, unit: str) -> str:
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


def to_time_us(value: datetime | str | float) -> int:
    """Return a time as microseconds since 1970 in UTC. A time without a zone is in UTC.

    Args:
        value: A datetime, an ISO text, "now", a text such as "1 hour ago", or seconds since 1970.

    Raises:
        BadDuration: It cannot be read.

    """
    if isinstance(value, datetime):
        return _datetime_us(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadDuration(f"A {type(value).__name__} is not a time: {value!r}.", fix=_TIMES)
    if isinstance(value, str):
        return _parse_time(value)
    return _seconds_us(value)


def _seconds_us(seconds: float) -> int:
    if not abs(seconds) < _MAX_US / 1_000_000:  # so written, it refuses NaN too
        raise BadDuration(
            f"{seconds!r} seconds since 1970 is not a time that can be stored.",
            fix="give seconds, not milliseconds or microseconds.",
        )
    return round(seconds * 1_000_000)


def _parse_time(text: str) -> int:
    stripped = text.strip()
    if stripped.lower() == "now":
        return _now_us()
    if ago := _AGO.fullmatch(stripped):
        return _now_us() - to_us(ago["duration"], what="time")
    if _NUMBER.fullmatch(stripped) and not _is_compact_date(stripped):
        return _seconds_us(float(stripped) if "." in stripped else int(stripped))
    try:
        return _datetime_us(datetime.fromisoformat(stripped))
    except ValueError:
        raise BadDuration(f"The time {text!r} cannot be read.", fix=_TIMES) from None


def _is_compact_date(digits: str) -> bool:
    """Return whether digits are ISO's compact date, 20260131: eight of them that begin like a year.
    As seconds they would all be in 1970.
    """
    return len(digits) == 8 and digits.isdigit() and digits[:2] in ("19", "20", "21")


def _datetime_us(moment: datetime) -> int:
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return (aware - _EPOCH) // timedelta(microseconds=1)


def _now_us() -> int:
    return _datetime_us(datetime.now(UTC))


def from_us(us: int) -> datetime:
    """Return microseconds since 1970 as a datetime in UTC."""
    try:
        return _EPOCH + timedelta(microseconds=us)
    except OverflowError:
        raise BadDuration(
            f"{us} microseconds since 1970 lies outside the years 1 to 9999.",
            fix="check the unit of the number.",
        ) from None
