"""Which tumbling or hopping windows a row is in. Windows have numbers, in the order of their beginnings; numbers have a meaning within one call only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.operators.buffers import Ints
from headrace.operators.kernel import Times
from headrace.operators.windows.local_time import LocalClock, local_clock
from headrace.operators.windows.specs import DAY_US, Hopping, Tumbling

FARTHEST_US = 1 << 61
"""Times farther from 1970 than this, some 73,000 years, are taken for this: so that no sum of times overflows."""


@dataclass(frozen=True)
class Assigned:
    """For each row the first and the last of its windows; those between are its windows too."""

    spec: Tumbling | Hopping
    clock: LocalClock | None
    first: Ints
    last: Ints

    def bounds(self, windows: Ints) -> tuple[Times, Times]:
        """When these windows begin and end."""
        begins = self.spec.origin_us + windows * self.spec.every_us
        ends = begins + self.spec.size_us
        if self.clock is None:
            return begins, ends
        return self.clock.first_shown(begins), self.clock.first_shown(ends)

    def panes(self) -> Ints:
        """A number for each row such that rows with the same one are in the same windows."""
        return self.first + self.last


def assign(spec: Tumbling | Hopping, times: Times) -> Assigned:
    """The windows of rows with these event times."""
    times = np.clip(times, -FARTHEST_US, FARTHEST_US)
    clock = None
    if spec.timezone is not None and len(times):
        whole_us = spec.every_us if spec.size_us < DAY_US else None
        clock = local_clock(spec.timezone, times, reach_us=spec.size_us + 2 * DAY_US, whole_us=whole_us)
    local = times if clock is None else clock.shown(times)
    last = (local - spec.origin_us) // spec.every_us
    return Assigned(spec, clock, _first(spec, local, last), last)


def _first(spec: Tumbling | Hopping, local: Times, last: Ints) -> Ints:
    """The oldest window that still holds each row."""
    overlapping, rest = divmod(spec.size_us, spec.every_us)
    if overlapping == 1 and not rest:
        return last
    return last - (overlapping - 1) if not rest else (local - spec.origin_us - spec.size_us) // spec.every_us + 1
