"""What rules look at, now: groups' lag, dead letters and what gateways tell, from the log, and what runners leave in their state directories. A value for each thing, by its name."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.gateways.telling import Told
from headrace.log import dead
from headrace.log.api import Log
from headrace.serve.run_status import read_run
from headrace.watching.rules import A_MINUTE, BEHIND, DEAD, DROPPED, FAILED, LAG_ROWS, LAG_SECONDS, LATE, REFUSED, STATUS_AGE, WATERMARK

MINUTE_S = 60.0
MOST_LOOKS = 10_000
Values = Mapping[str, Mapping[str, float]]
"""What -> of what -> how much."""


class Facts:
    def __init__(self, log: Log, states: Sequence[Path]) -> None:
        self._log, self._states = log, states
        self._gateways = Told(log)
        self._has_looked = False
        self._before: dict[tuple[str, str], deque[tuple[float, float]]] = {}

    def look(self, now_s: float | None = None) -> Values:
        now = time.time() if now_s is None else now_s
        values: dict[str, dict[str, float]] = {}
        for what, of, value in self._found(now):
            values.setdefault(what, {})[of] = self._in_a_minute(what, of, value, now) if what in A_MINUTE else value
        self._has_looked = True
        return values

    def _found(self, now_s: float) -> Iterator[tuple[str, str, float]]:
        for lag in self._log.lag():
            place = f"{lag.group}/{lag.topic}/{lag.partition}"
            yield LAG_ROWS, place, lag.rows
            yield LAG_SECONDS, place, lag.seconds if lag.rows else 0.0
        for topic in dead.topics(self._log):
            yield DEAD, topic.of, topic.rows
        for name, told in self._gateways.read().items():
            yield DROPPED, f"gateway/{name}", told["dropped"] + told["lost"]
            yield REFUSED, f"gateway/{name}", told["refused"]
        for state in self._states:
            if (run := read_run(state)) is not None:
                yield from _of_run(run, now_s)

    def _in_a_minute(self, what: str, of: str, total: float, now_s: float) -> float:
        """How much more than a minute ago, or than at the first look; a total that begins anew, or appears later, is all new."""
        if (looks := self._before.get((what, of))) is None:
            looks = self._before[what, of] = deque([(now_s, 0.0)] if self._has_looked else [], maxlen=MOST_LOOKS)
        if looks and total < looks[-1][1]:
            looks.clear()
            looks.append((now_s, 0.0))
        looks.append((now_s, total))
        while len(looks) > 1 and looks[1][0] <= now_s - MINUTE_S:
            looks.popleft()
        return total - looks[0][1]


def _of_run(run: dict[str, Any], now_s: float) -> Iterator[tuple[str, str, float]]:
    name = str(run["pipeline"])
    yield BEHIND, name, float(run.get("rows_behind", 0))
    yield FAILED, name, float(run.get("failures", 0))
    yield STATUS_AGE, name, now_s - float(run["updated"])
    for what, clock in run.get("clocks", {}).items():
        if clock.get("complete_us") is not None:
            yield WATERMARK, f"{name}/{what}", now_s - clock["complete_us"] / 1e6
    for counted, count in run.get("counts", {}).items():
        of, _, what = counted.rpartition(".")
        if what in {"late", "shed"}:
            yield LATE if what == "late" else DROPPED, f"{name}/{of}", float(count)
