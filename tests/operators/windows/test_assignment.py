"""Which windows a row is in: by arithmetic, and in time zones with daylight saving time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.operators.windows.assignment import assign
from headrace.operators.windows.specs import Hopping, Tumbling, hopping, tumbling

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
SPRING_AND_AUTUMN = ["Europe/Berlin", "America/Havana", "Australia/Lord_Howe", "Asia/Beirut"]
ZONES = [
    *SPRING_AND_AUTUMN,
    "Asia/Kolkata",
    "America/Sao_Paulo",
    "Pacific/Apia",
    "Africa/Casablanca",
]


def us(moment: datetime) -> int:
    return (moment - EPOCH) // MICROSECOND


def utc(*parts: int) -> int:
    return us(datetime(*parts, tzinfo=UTC))  # type: ignore[misc,arg-type]


def windows(spec: Tumbling | Hopping, times: list[int]) -> list[list[tuple[int, int]]]:
    """The (start, end) pairs of each row's windows."""
    assigned = assign(spec, np.array(times, np.int64))
    found = []
    for first, last in zip(assigned.first.tolist(), assigned.last.tolist(), strict=True):
        starts, ends = assigned.bounds(np.arange(first, last + 1))
        found.append(list(zip(starts.tolist(), ends.tolist(), strict=True)))
    return found


def of(spec: Tumbling | Hopping, time: int) -> tuple[int, int]:
    ((window,),) = windows(spec, [time])
    return window


SPANS = st.integers(1, 50)
TIMES = st.lists(st.integers(-500, 500), min_size=1, max_size=20)


@given(SPANS, SPANS, st.integers(0, 60), TIMES)
def test_a_row_is_in_exactly_the_windows_that_hold_it(
    size: int, every: int, offset: int, times: list[int]
) -> None:
    size = max(size, every)
    expected = [
        [
            (s, s + size)
            for s in range(-600 * every + offset, 600 * every, every)
            if s <= t < s + size
        ]
        for t in times
    ]
    assert windows(Hopping(size, every, offset % every), times) == expected
    assert all(expected)


@given(SPANS, SPANS, TIMES)
def test_rows_of_a_pane_are_in_the_same_windows(size: int, every: int, times: list[int]) -> None:
    spec = Hopping(max(size, every), every)
    found = windows(spec, times)
    panes = assign(spec, np.array(times)).panes().tolist()
    for left in range(len(times)):
        for right in range(left):
            assert (panes[left] == panes[right]) == (found[left] == found[right])


def test_weeks_begin_on_mondays_and_all_else_at_midnight_in_1970() -> None:
    start, end = of(tumbling("1 week"), utc(2026, 3, 12))
    assert (start, end) == (utc(2026, 3, 9), utc(2026, 3, 16))
    assert of(tumbling("5 days"), 0)[0] == 0


@pytest.mark.parametrize("extreme", [-(2**63), 2**63 - 1])
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_no_time_overflows(extreme: int, zone: str | None) -> None:
    start, end = of(tumbling("3660 days", timezone=zone), extreme)
    assert start < end
    assert (start > 0) == (extreme > 0)


# Time zones


def midnights(zone: str, around: int) -> list[int]:
    """When the days around an instant begin: at the first moment of each date, found second by
    second where the clock is changed.
    """
    clock = ZoneInfo(zone)
    today = (EPOCH + timedelta(microseconds=around)).astimezone(clock).date()
    begins = []
    for days in range(-3, 4):
        date = today + timedelta(days=days)
        guess = us(datetime(date.year, date.month, date.day, tzinfo=clock)) // 1_000_000
        near = range(guess - 26 * 3600, guess + 26 * 3600, 900)
        after = [
            second
            for second in near
            if (EPOCH + timedelta(seconds=second)).astimezone(clock).date() >= date
        ]
        begins.append(min(after) * 1_000_000)
    return sorted(set(begins))


@given(st.sampled_from(ZONES), st.integers(utc(2000, 1, 1), utc(2030, 1, 1)))
@example("Europe/Berlin", utc(2026, 3, 29, 1))
@example("Europe/Berlin", utc(2026, 10, 25, 0, 30))
@example("America/Havana", utc(2026, 11, 1, 5, 30))  # midnight is shown twice
@example("Asia/Beirut", utc(2026, 3, 28, 22, 30))  # midnight is not shown
@example("Pacific/Apia", utc(2011, 12, 30, 12))  # a date that never was
def test_days_begin_at_local_midnight(zone: str, time: int) -> None:
    begins = midnights(zone, time)
    at = max(number for number, begin in enumerate(begins) if begin <= time)
    assert of(tumbling("1 day", timezone=zone), time) == (begins[at], begins[at + 1])


def test_days_have_23_and_25_hours_when_the_clock_is_changed() -> None:
    spec = tumbling("1 day", timezone="Europe/Berlin")
    lengths = [
        (end - start) // HOUR_US
        for start, end in (
            of(spec, utc(2026, *day, 12)) for day in [(3, 28), (3, 29), (3, 30), (10, 25), (10, 26)]
        )
    ]
    assert lengths == [24, 23, 24, 25, 24]


def test_a_day_may_begin_in_the_morning() -> None:
    spec = tumbling("1 day", offset="6 hours", timezone="Europe/Berlin")
    assert of(spec, utc(2026, 3, 29, 3)) == (utc(2026, 3, 28, 5), utc(2026, 3, 29, 4))


def test_hours_keep_their_length_and_longer_parts_of_a_day_go_by_the_clock() -> None:
    hours = tumbling("1 hour", timezone="Europe/Berlin")
    assert [of(hours, utc(2026, 10, 25, hour, 30))[0] for hour in (0, 1)] == [
        utc(2026, 10, 25, 0),
        utc(2026, 10, 25, 1),
    ]
    quarters = tumbling("6 hours", timezone="Europe/Berlin")
    assert of(quarters, utc(2026, 10, 25, 1, 30)) == (utc(2026, 10, 24, 22), utc(2026, 10, 25, 5))
    assert of(quarters, utc(2026, 3, 29, 1, 30)) == (utc(2026, 3, 28, 23), utc(2026, 3, 29, 4))
    assert of(tumbling("1 hour", timezone="Asia/Kolkata"), utc(2026, 1, 1, 0, 10)) == (
        utc(2025, 12, 31, 23, 30),
        utc(2026, 1, 1, 0, 30),
    )


def test_weeks_of_days_in_a_time_zone() -> None:
    found = windows(
        hopping("7 days", every="1 day", timezone="Europe/Berlin"), [utc(2026, 3, 29, 12)]
    )[0]
    assert len(found) == 7
    assert [(end - start) // HOUR_US for start, end in found] == [167] * 7
    assert found[-1] == (utc(2026, 3, 28, 23), utc(2026, 4, 4, 22))


SIZES = st.sampled_from(
    ["15 minutes", "25 minutes", "1 hour", "2 hours", "7 hours", "1 day", "3 days"]
)


@given(
    st.sampled_from(ZONES),
    SIZES,
    st.integers(utc(2010, 1, 1), utc(2026, 12, 31)),
    st.integers(-3 * DAY_US, 3 * DAY_US),
)
@example("Australia/Lord_Howe", "1 hour", utc(2026, 4, 4, 15), 0)
@example("America/Havana", "7 hours", utc(2026, 11, 1, 5, 30), HOUR_US)
def test_windows_lie_side_by_side_whatever_else_is_in_the_call(
    zone: str, size: str, time: int, away: int
) -> None:
    spec = tumbling(size, timezone=zone)
    start, end = of(spec, time)
    assert start <= time < end
    assert of(spec, start) == of(spec, end - 1) == (start, end)
    assert of(spec, end)[0] == end
    assert of(spec, start - 1)[1] == start
    assert windows(spec, [time + away, time, utc(1960, 1, 1)])[1] == [(start, end)]
