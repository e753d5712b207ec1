"""The same window a period earlier or later, for `compare`: in a time zone, the one that begins when the clock shows what it shows at the window's beginning, the period away."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.operators.buffers import Ints, Mask
from headrace.operators.kernel import Times
from headrace.operators.windows.assign import assign
from headrace.operators.windows.local_time import LocalClock, local_clock
from headrace.operators.windows.specs import DAY_US, Hopping, Tumbling


@dataclass(frozen=True)
class Counterparts:
    """When the counterparts of some windows begin and end, and which windows have one. No two have the same, and that one's is the window again."""

    starts: Times
    ends: Times
    there: Mask


def counterparts(window: Tumbling | Hopping | None, starts: Times, ends: Times, by_us: int) -> Counterparts:
    """Of windows without a time zone, those that begin `by_us` later. In one, what begins with an hour that the clock leaves out, or shows again, has none."""
    if window is None or window.timezone is None:
        return Counterparts(starts + by_us, ends + by_us, np.ones(len(starts), np.bool_))
    clock = local_clock(window.timezone, starts, reach_us=abs(by_us) + window.size_us + 2 * DAY_US, whole_us=None)
    shown = _begins_at(window, clock, starts)
    wanted = clock.first_shown(shown + by_us)
    own_starts, own_ends = _bounds(window, starts)
    found_starts, found_ends = _bounds(window, wanted)
    is_known = (own_starts == starts) & (own_ends == ends) & (clock.first_shown(shown) == starts)
    return Counterparts(found_starts, found_ends, is_known & (found_starts == wanted) & (_begins_at(window, clock, wanted) == shown + by_us))


def _begins_at(window: Tumbling | Hopping, clock: LocalClock, instants: Times) -> Times:
    """The local time at which the newest window begins: where a clock leaves out midnight, it shows one o'clock when the day begins, but that is the day's beginning."""
    numbers: Ints = (clock.shown(instants) - window.origin_us) // window.every_us
    return window.origin_us + numbers * window.every_us


def _bounds(window: Tumbling | Hopping, instants: Times) -> tuple[Times, Times]:
    """The bounds of the newest window that each instant is in."""
    assigned = assign(window, instants)
    return assigned.bounds(assigned.last)
