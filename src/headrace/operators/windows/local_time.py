"""A time zone's clock, for windows that go by it: from instants to what the clock shows, and back to when it first shows something.

Where a clock is put back, an hour is shown twice. Windows must lie side by side all the same, so they go by the *latest* time that the clock has shown so far:
it stands still while the clock repeats an hour, and a window begins when its beginning is first shown. Where a clock is put forward, what it leaves out is
shown at the moment of the change. All times are microseconds: instants since 1970 in UTC, local times since 1970-01-01 00:00 on that clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from zoneinfo import ZoneInfo

import numpy as np

from headrace.operators.kernel import Times

_SECOND_US = 1_000_000
_BLOCK_S = 1 << 25  # about a year
_BLOCK_US = _BLOCK_S * _SECOND_US
_PROBE_S = 86_400
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_S, _LAST_S = -62_135_510_400, 253_402_214_400  # a day inside the years that Python knows
_FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class LocalClock:
    """What a zone's clock showed during some years: from `begins[i]` on it is `ahead[i]` ahead of UTC. `peaks[i]` is the latest that it showed before."""

    begins: Times
    ahead: Times
    peaks: Times
    ends: Times
    """The latest that it has shown at the end of each stretch."""

    def shown(self, instants: Times) -> Times:
        """The latest local time that the clock has shown at each instant."""
        at = np.searchsorted(self.begins, instants, side="right") - 1
        latest: Times = np.maximum(instants + self.ahead[at], self.peaks[at])
        return latest

    def first_shown(self, local: Times) -> Times:
        """The instant at which the clock first shows a local time, or one past it."""
        at = np.searchsorted(self.ends, local, side="left")
        when: Times = np.maximum(local - self.ahead[at], self.begins[at])
        return when


def local_clock(zone: str, instants: Times, *, reach_us: int, whole_us: int | None) -> LocalClock:
    """The clock around some instants, as far as `reach_us` before and after them.

    Changes by a multiple of `whole_us` are passed over: windows that begin at every multiple of it begin there before and after the change alike.
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
    return LocalClock(begins, ahead, np.append(-_FOREVER, last_shown), np.append(last_shown, _FOREVER))


@lru_cache(maxsize=4096)
def _stretches(zone: str, block: int) -> tuple[tuple[int, int], ...]:
    """The stretches of one block in which the clock is not changed: when each begins and how far it is ahead of UTC, in seconds. Found by asking day by day."""
    probes = range(block * _BLOCK_S, (block + 1) * _BLOCK_S + _PROBE_S, _PROBE_S)
    clock = ZoneInfo(zone)
    found = [(probes[0], _ahead_s(clock, probes[0]))]
    for before, after in pairwise(probes):
        if (ahead := _ahead_s(clock, after)) != found[-1][1]:
            found.append((_change_s(clock, before, after), ahead))
    return tuple(stretch for stretch in found if stretch[0] < (block + 1) * _BLOCK_S)


def _change_s(zone: ZoneInfo, low: int, high: int) -> int:
    """The second, after `low` and up to `high`, at which the clock is changed: by halving."""
    before = _ahead_s(zone, low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _ahead_s(zone, middle) == before else (low, middle)
    return high


def _ahead_s(zone: ZoneInfo, second: int) -> int:
    moment = _EPOCH + timedelta(seconds=min(max(second, _FIRST_S), _LAST_S))
    ahead = moment.astimezone(zone).utcoffset()
    assert ahead is not None
    return ahead // timedelta(seconds=1)
