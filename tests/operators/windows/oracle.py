"""The obvious computation of windows: rows in lists, clocks as numbers, everything anew at every tick."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from headrace.operators.windows.base import WindowStep
from headrace.operators.windows.specs import Hopping, Tumbling
from tests.operators.oracle import Oracle, plain

Row = dict[str, Any]
Window = tuple[Any, ...]  # the group's values, start, end
EPOCH = datetime(1970, 1, 1, tzinfo=ZoneInfo("UTC"))  # as Arrow gives it


def us(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


def moment(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


@dataclass
class Clock:
    """The clocks before and after a tick."""

    complete_before: int
    closed_before: int
    complete: int
    closed: int


@dataclass
class FixedOracle:
    """Tumbling and hopping windows."""

    step: WindowStep
    groups: Oracle = field(init=False)
    shown: dict[Window, Row] = field(default_factory=dict)
    late: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [*self.step.by, "window_start", "window_end"]
        self.groups = Oracle(self.step.schema, names, self.step.aggregates, self.step.row_key)

    def windows(self, time: int) -> list[tuple[int, int]]:
        spec = self.step.window
        assert isinstance(spec, Tumbling | Hopping)
        newest = time - (time - spec.origin_us) % spec.every_us
        starts = [newest - back * spec.every_us for back in range(spec.size_us // spec.every_us + 2)]
        return [(start, start + spec.size_us) for start in starts if start <= time < start + spec.size_us]

    def tick(self, number: int, rows: Sequence[Row], clock: Clock) -> list[Row]:
        limit = clock.closed_before - self.step.late.lateness_us
        touched: dict[Window, list[Row]] = {}
        for row in rows:
            group = tuple(plain(row[name]) for name in self.step.by)
            open_windows = [window for window in self.windows(us(row[self.step.time])) if window[1] > limit]
            for start, end in open_windows:
                touched.setdefault((*group, start, end), []).append(row)
            if not open_windows:
                self.late.append({**row, "_tick": number, "behind_us": limit - us(row[self.step.time])})
        for window, changes in touched.items():
            self.groups._apply(window, changes)
        told = self._told(number, {window: self.result(window) for window in self.groups.groups if self._is_shown(window, clock)})
        self._forget(clock.closed - self.step.late.lateness_us)
        return told

    def _is_shown(self, window: Window, clock: Clock) -> bool:
        return bool(self.groups.groups[window]) and (self.step.emit == "changes" or clock.complete >= window[-1])

    def result(self, window: Window) -> Row:
        row = self.groups.result(window)
        assert row is not None
        return row | {"window_start": moment(window[-2]), "window_end": moment(window[-1])}

    def _told(self, number: int, shown: dict[Window, Row]) -> list[Row]:
        told: list[Row] = []
        for window in self._in_order({*self.shown, *shown}):
            told += self.groups._told(self.shown.get(window), shown.get(window))
        self.shown = shown
        return [{**change, "_tick": number} for change in told]

    def _in_order(self, windows: Iterable[Window]) -> list[Window]:
        groups = Oracle(self.step.schema, self.step.by, ())
        in_order = {group: at for at, group in enumerate(groups._in_order({window[:-2] for window in windows}))}
        return sorted(windows, key=lambda window: (in_order[window[:-2]], window[-2:]))

    def _forget(self, limit: int) -> None:
        self.groups.groups = {window: rows for window, rows in self.groups.groups.items() if rows and window[-1] > limit}
        self.shown = {window: row for window, row in self.shown.items() if window[-1] > limit}
