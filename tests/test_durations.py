"""Durations and times as people write them."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.durations import format_us, from_us, to_time_us, to_us
from headrace.errors import BadDuration

SECOND = 1_000_000
HOUR = 3600 * SECOND


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("30 seconds", 30 * SECOND),
        ("1 second", SECOND),
        ("1 minute", 60 * SECOND),
        ("2 minutes", 120 * SECOND),
        ("5 min", 300 * SECOND),
        ("5 mins", 300 * SECOND),
        ("7 days", 7 * 24 * HOUR),
        ("1 day", 24 * HOUR),
        ("2 weeks", 14 * 24 * HOUR),
        ("1 week", 7 * 24 * HOUR),
        ("250 ms", 250_000),
        ("250ms", 250_000),
        ("1 millisecond", 1000),
        ("3 milliseconds", 3000),
        ("10 microseconds", 10),
        ("10 us", 10),
        ("10 µs", 10),
        ("1h", HOUR),
        ("1h30m", HOUR + 1800 * SECOND),
        ("1 hour 30 minutes", HOUR + 1800 * SECOND),
        ("1 hour, 30 minutes and 5 seconds", HOUR + 1805 * SECOND),
        ("90s", 90 * SECOND),
        ("90 sec", 90 * SECOND),
        ("90 secs", 90 * SECOND),
        ("  3 HOURS ", 3 * HOUR),
        ("1.5 hours", HOUR * 3 // 2),
        ("0.1 seconds", 100_000),
        ("0.3 s", 300_000),
        ("0 seconds", 0),
    ],
)
def test_texts_are_read(text: str, us: int) -> None:
    assert to_us(text) == us


def test_timedeltas_are_read() -> None:
    assert to_us(timedelta(days=1, microseconds=7)) == 24 * HOUR + 7


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "  ",
        "soon",
        "5",
        "5 lightyears",
        "seconds",
        "1 hour 30",
        "-1 second",
        "1 -second",
        "1e3 seconds",
        "٣ seconds",
        "0.0000001 seconds",
        "1 hour; 2 s",
    ],
)
def test_unreadable_texts_are_refused_with_what_is_understood(bad: str) -> None:
    with pytest.raises(BadDuration, match=r"retention.*[\s\S]*To fix: ") as caught:
        to_us(bad, what="retention")
    assert caught.value.fix


def test_a_negative_timedelta_is_refused() -> None:
    with pytest.raises(BadDuration, match="negative"):
        to_us(timedelta(seconds=-1))


def test_a_number_without_a_unit_is_refused() -> None:
    with pytest.raises(BadDuration, match="no unit"):
        to_us(30)  # type: ignore[arg-type]


def test_a_duration_beyond_64_bits_is_refused() -> None:
    assert to_us("290000 days") == 290000 * 24 * HOUR
    with pytest.raises(BadDuration, match="292,000 years"):
        to_us("106751992 days")


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0, "0 seconds"),
        (1, "1 microsecond"),
        (250_000, "250 milliseconds"),
        (SECOND, "1 second"),
        (90 * SECOND, "90 seconds"),
        (60 * SECOND, "1 minute"),
        (HOUR, "1 hour"),
        (24 * HOUR, "1 day"),
        (7 * 24 * HOUR, "7 days"),
        (24 * HOUR + SECOND, "1 day 1 second"),
        (HOUR + 1, "1 hour 1 microsecond"),
        (-90 * SECOND, "-90 seconds"),
    ],
)
def test_durations_are_shown_for_people(us: int, text: str) -> None:
    assert format_us(us) == text


@given(st.integers(0, 2**63 - 1))
def test_a_formatted_duration_parses_back(us: int) -> None:
    assert to_us(format_us(us)) == us


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=100_000_000)))
def test_timedeltas_lose_nothing(duration: timedelta) -> None:
    assert timedelta(microseconds=to_us(duration)) == duration


NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
NOON_US = 1769860800 * SECOND


@pytest.mark.parametrize(
    "value",
    [
        NOON,
        NOON.replace(tzinfo=None),
        NOON.astimezone(timezone(timedelta(hours=5, minutes=30))),
        "2026-01-31T12:00:00Z",
        "2026-01-31 12:00:00",
        "2026-01-31T13:00:00+01:00",
        "20260131T120000Z",
        1769860800,
        1769860800.0,
        "1769860800",
        "1769860800.000",
    ],
)
def test_times_are_read(value: datetime | str | float) -> None:
    assert to_time_us(value) == NOON_US


def test_dates_are_midnight_in_utc() -> None:
    assert to_time_us("2026-01-31") == to_time_us("20260131") == NOON_US - 12 * HOUR


def test_fractions_of_seconds_are_kept() -> None:
    assert to_time_us("2026-01-31T12:00:00.000007") == NOON_US + 7
    assert to_time_us(0.25) == 250_000
    assert to_time_us(-1) == -SECOND


@pytest.mark.parametrize(
    ("text", "back_us"),
    [("1 hour ago", HOUR), ("1 hour 30 minutes AGO", HOUR + 1800 * SECOND), ("now", 0)],
)
def test_times_relative_to_now(text: str, back_us: int) -> None:
    now_us = to_time_us(datetime.now(UTC))
    assert 0 <= to_time_us(text) - (now_us - back_us) < 60 * SECOND


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "yesterday",
        "2026-13-01",
        "ago",
        "soon ago",
        "-1 hour ago",
        True,
        None,
        float("nan"),
        float("inf"),
        1e300,
        10**30,
    ],
)
def test_text_that_is_no_time_is_refused(bad: str | float) -> None:
    with pytest.raises(BadDuration):
        to_time_us(bad)


@given(st.datetimes(timezones=st.just(UTC)))
def test_times_come_back_the_same(moment: datetime) -> None:
    assert from_us(to_time_us(moment)) == moment
    assert to_time_us(moment.isoformat()) == to_time_us(moment)


def test_a_time_outside_the_calendar_is_refused() -> None:
    with pytest.raises(BadDuration, match="1 to 9999"):
        from_us(2**62)
