"""Which tumbling or hopping windows a row is in, also in time zones.

Windows are numbered in the order of their starts; a row is in all windows from its first to its
last. Windows of 10 s every 5 s, times in seconds:

    rows at 7, 12 -> first 0, 1; last 1, 2; window 0 is [0, 10), window 1 is [5, 15)

Window numbers are meaningful within one call only. `LocalClock` converts between instants and the
local times of a zone; `counterparts` finds the same window a period earlier or later, for
`compare`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from zoneinfo import ZoneInfo

import numpy as np

from headrace.columnar.buffers import Ints, Mask
from headrace.operators.kernel import Times
from headrace.operators.windows.late_policy import DAY_US
from headrace.operators.windows.specs import Hopping, Tumbling

# Local clocks
#
# When a clock is set back, it shows an hour twice. Windows must be adjacent all the same, so they
# follow the *latest* time that the clock has shown so far: it stands still while the clock repeats
# an hour, and a window begins when its start is first shown. When a clock is set forward, the hour
# that it skips is shown at the moment of the change. All times are microseconds: instants since
# 1970 in UTC, local times since 1970-01-01 00:00 on that clock.


_SECOND_US = 1_000_000
_BLOCK_S = 1 << 25  # about a year
_BLOCK_US = _BLOCK_S * _SECOND_US
_PROBE_S = 86_400
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_S, _LAST_S = -62_135_510_400, 253_402_214_400  # a day inside the range of datetime
_FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class LocalClock:
    """A zone's clock during some years: from `begins[i]` on it is `ahead[i]` ahead of UTC.

    `peaks[i]` is the latest local time shown before `begins[i]`.
    """

    begins: Times
    ahead: Times
    peaks: Times
    ends: Times
    """The latest local time shown at the end of each stretch."""

    def shown(self, instants: Times) -> Times:
        """The latest local time that the clock has shown at each instant."""
        at = np.searchsorted(self.begins, instants, side="right") - 1
        latest: Times = np.maximum(instants + self.ahead[at], self.peaks[at])
        return latest

    def first_shown(self, local: Times) -> Times:
        """The instant at which the clock first shows each local time, or one past it."""
        at = np.searchsorted(self.ends, local, side="left")
        when: Times = np.maximum(local - self.ahead[at], self.begins[at])
        return when


def local_clock(zone: str, instants: Times, *, reach_us: int, whole_us: int | None) -> LocalClock:
    """The clock around some instants, `reach_us` before and after them.

    Changes by a multiple of `whole_us` are ignored: windows that begin at every multiple of it
    begin at the same instants with or without the change.
    """
    reach = reach_us // _BLOCK_US + 1
    blocks = np.unique(np.unique(instants // _BLOCK_US)[:, None] + np.arange(-reach, reach + 1))
    stretches = [stretch for block in blocks.tolist() for stretch in _stretches(zone, block)]
    begins = np.array([begin for begin, _ in stretches], np.int64) * _SECOND_US
    ahead = np.array([offset for _, offset in stretches], np.int64) * _SECOND_US
    if whole_us is not None:
        changes = np.diff(ahead)
        ahead = ahead[0] + np.append(0, np.cumsum(np.where(changes % whole_us == 0, 0, changes)))
    last_shown = np.maximum.accumulate(begins[1:] - 1 + ahead[:-1])
    return LocalClock(
        begins=begins,
        ahead=ahead,
        peaks=np.append(-_FOREVER, last_shown),
        ends=np.append(last_shown, _FOREVER),
    )


@lru_cache(maxsize=4096)
def _stretches(zone: str, block: int) -> tuple[tuple[int, int], ...]:
    """The stretches of one block of time between changes of the clock: when each begins and how far
    it is ahead of UTC, in seconds. Found by probing day by day.
    """
    probes = range(block * _BLOCK_S, (block + 1) * _BLOCK_S + _PROBE_S, _PROBE_S)
    clock = ZoneInfo(zone)
    stretches = [(probes[0], _ahead_s(clock, probes[0]))]
    for before, after in pairwise(probes):
        if (ahead := _ahead_s(clock, after)) != stretches[-1][1]:
            stretches.append((_change_s(clock, before, after), ahead))
    return tuple(stretch for stretch in stretches if stretch[0] < (block + 1) * _BLOCK_S)


def _change_s(zone: ZoneInfo, low: int, high: int) -> int:
    """The second in (low, high] at which the clock changes, by bisection."""
    before = _ahead_s(zone, low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _ahead_s(zone, middle) == before else (low, middle)
    return high


def _ahead_s(zone: ZoneInfo, second: int) -> int:
    """How far the clock is ahead of UTC at a second since 1970, in seconds."""
    moment = _EPOCH + timedelta(seconds=min(max(second, _FIRST_S), _LAST_S))
    ahead = moment.astimezone(zone).utcoffset()
    assert ahead is not None
    return ahead // timedelta(seconds=1)


# Rows to windows

FARTHEST_US = 1 << 61
"""Times are clipped to this distance from 1970, some 73,000 years, so that sums do not overflow."""


@dataclass(frozen=True)
class AssignedWindows:
    """The first and the last window of each row; it is in all windows between, too."""

    spec: Tumbling | Hopping
    clock: LocalClock | None
    first: Ints
    last: Ints

    def bounds(self, windows: Ints) -> tuple[Times, Times]:
        """The start and end of the given windows."""
        begins = self.spec.origin_us + windows * self.spec.every_us
        ends = begins + self.spec.size_us
        if self.clock is None:
            return begins, ends
        return self.clock.first_shown(begins), self.clock.first_shown(ends)

    def panes(self) -> Ints:
        """A number for each row, equal for rows that are in the same windows."""
        return self.first + self.last


def assign(spec: Tumbling | Hopping, times: Times) -> AssignedWindows:
    """The windows of rows with these event times."""
    times = np.clip(times, -FARTHEST_US, FARTHEST_US)
    clock = None
    if spec.timezone is not None and len(times):
        whole_us = spec.every_us if spec.size_us < DAY_US else None
        clock = local_clock(
            spec.timezone, times, reach_us=spec.size_us + 2 * DAY_US, whole_us=whole_us
        )
    local = times if clock is None else clock.shown(times)
    last = (local - spec.origin_us) // spec.every_us
    return AssignedWindows(spec=spec, clock=clock, first=_first(spec, local, last), last=last)


def _first(spec: Tumbling | Hopping, local: Times, last: Ints) -> Ints:
    """The oldest window that contains each row."""
    overlapping, rest = divmod(spec.size_us, spec.every_us)
    if overlapping == 1 and not rest:
        return last
    return (
        last - (overlapping - 1)
        if not rest
        else (local - spec.origin_us - spec.size_us) // spec.every_us + 1
    )


# Windows a period earlier or later


@dataclass(frozen=True)
class Counterparts:
    """The bounds of windows' counterparts, and which windows have one. Counterparts are distinct,
    and the counterpart of a counterpart is the window itself.
    """

    starts: Times
    ends: Times
    there: Mask


def counterparts(
    window: Tumbling | Hopping | None, starts: Times, ends: Times, by_us: int
) -> Counterparts:
    """The windows that begin `by_us` later on the local clock.

    In a time zone, a window that begins in an hour that the clock skips or repeats has none.
    """
    if window is None or window.timezone is None:
        return Counterparts(starts + by_us, ends + by_us, np.ones(len(starts), np.bool_))
    clock = local_clock(
        window.timezone, starts, reach_us=abs(by_us) + window.size_us + 2 * DAY_US, whole_us=None
    )
    shown = _begins_at(window, clock, starts)
    wanted = clock.first_shown(shown + by_us)
    own_starts, own_ends = _bounds(window, starts)
    found_starts, found_ends = _bounds(window, wanted)
    is_known = (own_starts == starts) & (own_ends == ends) & (clock.first_shown(shown) == starts)
    return Counterparts(
        found_starts,
        found_ends,
        is_known & (found_starts == wanted) & (_begins_at(window, clock, wanted) == shown + by_us),
    )


def _begins_at(window: Tumbling | Hopping, clock: LocalClock, instants: Times) -> Times:
    """The local time at which the newest window begins. Where the clock skips midnight, it shows
    one o'clock at the start of the day, but the window begins at midnight.
    """
    numbers: Ints = (clock.shown(instants) - window.origin_us) // window.every_us
    return window.origin_us + numbers * window.every_us


def _bounds(window: Tumbling | Hopping, instants: Times) -> tuple[Times, Times]:
    """The bounds of the newest window that contains each instant."""
    assigned = assign(window, instants)
    return assigned.bounds(assigned.last)
