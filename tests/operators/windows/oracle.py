"""A naive computation of windows: rows in lists, and everything computed again in every tick."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from headrace.operators.windows.kernel import WindowSettings
from headrace.operators.windows.specs import Hopping, Tumbling
from tests.operators.oracle import REMOVALS, Oracle, aggregated, plain

Row = dict[str, Any]
Window = tuple[Any, ...]  # the group's values, start, end
EPOCH = datetime(1970, 1, 1, tzinfo=ZoneInfo("UTC"))  # as Arrow gives it


def us(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


def moment(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


@dataclass
class TickWatermarks:
    """The watermark and horizon before and after a tick."""

    watermark_before: int
    horizon_before: int
    watermark: int
    horizon: int


@dataclass
class WindowOracle:
    """What all oracles share: the visible results, tick by tick, and the changes between them."""

    step: WindowSettings
    shown: dict[Window, Row] = field(default_factory=dict)
    late: list[Row] = field(default_factory=list)

    def emit(self, number: int, shown: dict[Window, Row]) -> list[Row]:
        emitted: list[Row] = []
        oracle = Oracle(self.step.schema, self.step.by, ())
        for window in self._in_order({*self.shown, *shown}):
            emitted += oracle._changes(self.shown.get(window), shown.get(window))
        self.shown = shown
        return [{**change, "_tick": number} for change in emitted]

    def _in_order(self, windows: Iterable[Window]) -> list[Window]:
        groups = Oracle(self.step.schema, self.step.by, ())
        in_order = {
            group: at
            for at, group in enumerate(groups._in_order({window[:-2] for window in windows}))
        }
        return sorted(windows, key=lambda window: (in_order[window[:-2]], window[-2:]))

    def is_late(self, number: int, row: Row, limit: int) -> None:
        self.late.append({**row, "_tick": number, "behind_us": limit - us(row[self.step.time])})


@dataclass
class FixedOracle(WindowOracle):
    """Tumbling and hopping windows."""

    groups: Oracle = field(init=False)
    corrected: int = 0

    def __post_init__(self) -> None:
        names = [*self.step.by, "window_start", "window_end"]
        self.groups = Oracle(self.step.schema, names, self.step.aggregates, self.step.row_key)

    def windows(self, time: int) -> list[tuple[int, int]]:
        spec = self.step.window
        assert isinstance(spec, Tumbling | Hopping)
        newest = time - (time - spec.origin_us) % spec.every_us
        starts = [
            newest - back * spec.every_us for back in range(spec.size_us // spec.every_us + 2)
        ]
        return [
            (start, start + spec.size_us)
            for start in starts
            if start <= time < start + spec.size_us
        ]

    def tick(self, number: int, rows: Sequence[Row], tick_watermarks: TickWatermarks) -> list[Row]:
        limit = tick_watermarks.horizon_before - self.step.late.lateness_us
        touched: dict[Window, list[Row]] = {}
        for row in rows:
            group = tuple(plain(row[name]) for name in self.step.by)
            open_windows = [
                window for window in self.windows(us(row[self.step.time])) if window[1] > limit
            ]
            for start, end in open_windows:
                touched.setdefault((*group, start, end), []).append(row)
            if not open_windows:
                self.is_late(number, row, limit)
            self.corrected += any(
                end <= tick_watermarks.watermark_before for _, end in open_windows
            )
        for window, changes in touched.items():
            self.groups._apply(window, changes)
        emitted = self.emit(
            number,
            {
                window: self.result(window)
                for window in self.groups.groups
                if self._is_shown(window, tick_watermarks)
            },
        )
        self._forget(tick_watermarks.horizon - self.step.late.lateness_us)
        return emitted

    def _is_shown(self, window: Window, tick_watermarks: TickWatermarks) -> bool:
        return bool(self.groups.groups[window]) and (
            self.step.emit == "changes" or tick_watermarks.watermark >= window[-1]
        )

    def result(self, window: Window) -> Row:
        row = self.groups.result(window)
        assert row is not None
        return row | {"window_start": moment(window[-2]), "window_end": moment(window[-1])}

    def _forget(self, limit: int) -> None:
        self.groups.groups = {
            window: rows
            for window, rows in self.groups.groups.items()
            if rows and window[-1] > limit
        }
        self.shown = {window: row for window, row in self.shown.items() if window[-1] > limit}


@dataclass
class RowOracle(WindowOracle):
    """Windows that depend on the rows: all rows of a group that some window still needs, in their
    places; everything made anew from them at every tick.
    """

    groups: dict[tuple[Any, ...], list[Row]] = field(default_factory=dict)
    limit: int = 0

    def windows(self, rows: list[Row]) -> dict[tuple[int, int], list[Row]]:
        """The windows of some rows of a group: start, end (the first moment behind it), and what is
        in each.
        """
        raise NotImplementedError

    def take(self, rows: list[Row], added: list[Row], limit: int) -> list[Row]:
        """The rows that come and are not late."""
        raise NotImplementedError

    def is_retractable(self, row: Row, limit: int) -> bool:
        return True

    def needed(self, rows: list[Row], limit: int) -> list[Row]:
        """The rows that a window still needs that is not closed."""
        raise NotImplementedError

    def tick(self, number: int, rows: Sequence[Row], tick_watermarks: TickWatermarks) -> list[Row]:
        self.limit = limit = tick_watermarks.horizon_before - self.step.late.lateness_us
        touched: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            touched.setdefault(tuple(plain(row[name]) for name in self.step.by), []).append(row)
        for group, changes in touched.items():
            self._change(number, group, changes, limit)
        emitted = self.emit(number, dict(self._all_shown(tick_watermarks)))
        self._forget(tick_watermarks.horizon - self.step.late.lateness_us)
        return emitted

    def _change(self, number: int, group: tuple[Any, ...], changes: list[Row], limit: int) -> None:
        kept = self.groups.setdefault(group, [])
        added: list[Row] = []
        for ours in self._by_row(changes):
            first, last = ours[0], ours[-1]
            old = (
                [at for at, row in enumerate(kept) if self._id(row) == self._id(first)]
                if self.step.row_key
                else []
            )
            goes = first.get("_change_type") in REMOVALS
            found = goes and bool(old) and self.is_retractable(kept[old[-1]], limit)
            if goes and not found:
                self.is_late(number, first, limit)
            coming = last.get("_change_type") not in REMOVALS
            if coming:
                added.append(last)
            if found:
                kept[old[-1]] = {"place of": last} if coming else {}
        rest = [row for row in kept if "t" in row]
        taken = self.take(rest, added, limit)
        for row in added:
            if not any(row is each for each in taken):
                self.is_late(number, row, limit)
        moved = [each.get("place of", each) for each in kept if each]
        known = [row for row in moved if any(row is each for each in [*rest, *taken])]
        self.groups[group] = known + [
            row for row in taken if not any(row is each for each in known)
        ]

    def _by_row(self, changes: list[Row]) -> list[list[Row]]:
        if not self.step.row_key:
            return [[row] for row in changes]
        found: dict[str, list[Row]] = {}
        for row in changes:
            found.setdefault(self._id(row), []).append(row)
        return sorted(
            found.values(),
            key=lambda ours: [at for at, row in enumerate(changes) if row is ours[-1]],
        )

    def _id(self, row: Row) -> str:
        return repr([row.get(name) for name in self.step.row_key])

    def _all_shown(self, tick_watermarks: TickWatermarks) -> Iterable[tuple[Window, Row]]:
        for group, rows in self.groups.items():
            for (start, end), inside in self.windows(rows).items():
                if self.step.emit == "changes" or tick_watermarks.watermark >= end:
                    yield (*group, start, end), self.result(group, start, end, inside)

    def result(self, group: tuple[Any, ...], start: int, end: int, rows: list[Row]) -> Row:
        results = {
            name: aggregated(spec, self.step.schema, rows) for name, spec in self.step.aggregates
        }
        return (
            dict(zip(self.step.by, group, strict=True))
            | {"window_start": moment(start), "window_end": moment(end)}
            | results
        )

    def _forget(self, limit: int) -> None:
        self.groups = {
            group: rows
            for group, known in self.groups.items()
            if (rows := self.needed(known, limit))
        }
        self.shown = {window: row for window, row in self.shown.items() if window[-1] > limit}


class SessionOracle(RowOracle):
    def windows(self, rows: list[Row]) -> dict[tuple[int, int], list[Row]]:
        gap = self.step.window.gap_us  # type: ignore[union-attr]
        found: list[list[Row]] = []
        for row in sorted(rows, key=lambda each: each["t"]):
            if found and us(row["t"]) < us(found[-1][-1]["t"]) + gap:
                found[-1].append(row)
            else:
                found.append([row])
        return {
            (us(each[0]["t"]), us(each[-1]["t"]) + gap): [
                row for row in rows if any(row is one for one in each)
            ]
            for each in found
        }

    def take(self, rows: list[Row], added: list[Row], limit: int) -> list[Row]:
        taken: list[Row] = []
        for (_, end), inside in self.windows([*rows, *added]).items():
            live = end > limit or any(row is each for row in inside for each in rows)
            taken += [row for row in added if live and any(row is each for each in inside)]
        return [row for row in added if any(row is each for each in taken)]

    def needed(self, rows: list[Row], limit: int) -> list[Row]:
        open_windows = [inside for (_, end), inside in self.windows(rows).items() if end > limit]
        return [
            row for row in rows if any(row is each for inside in open_windows for each in inside)
        ]


class SlidingOracle(RowOracle):
    def windows(self, rows: list[Row]) -> dict[tuple[int, int], list[Row]]:
        size = self.step.window.size_us  # type: ignore[union-attr]
        times = sorted({us(row["t"]) for row in rows})
        return {
            (time - size, time + 1): [row for row in rows if time - size < us(row["t"]) <= time]
            for time in times
            if time >= self.limit
        }

    def take(self, rows: list[Row], added: list[Row], limit: int) -> list[Row]:
        return [row for row in added if us(row["t"]) >= limit]

    def is_retractable(self, row: Row, limit: int) -> bool:
        return us(row["t"]) >= limit

    def needed(self, rows: list[Row], limit: int) -> list[Row]:
        return [row for row in rows if us(row["t"]) > limit - self.step.window.size_us]  # type: ignore[union-attr]

    def result(self, group: tuple[Any, ...], start: int, end: int, rows: list[Row]) -> Row:
        return super().result(group, start, end - 1, rows)
