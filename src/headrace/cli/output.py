"""Tables for people and JSON lines for programs.

JSON follows the log's own rules: times in ISO 8601, bytes in base64, decimals and non-finite floats
as strings.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from headrace.runtime.status import Status


PIPED_WIDTH = 100_000  # a table that nobody sees in a window is not cut to fit one


def console(*, stderr: bool = False) -> Console:
    """A console that prints what it is given as it is."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream, markup=False, highlight=False, width=None if stream.isatty() else PIPED_WIDTH
    )


def say(text: str) -> None:
    print(text)


def emit(value: Any) -> None:
    """One JSON line."""
    print(json.dumps(plain(value), ensure_ascii=False))


def plain(value: Any) -> Any:
    """A value in terms that JSON has."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return (
            value
            if math.isfinite(value)
            else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
        )
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {
            each.name: plain(getattr(value, each.name))
            for each in fields(value)
            if not isinstance(getattr(value, each.name), pa.Schema)
        }
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):
        return [plain(each) for each in value]
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, date | dt.time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value // timedelta(microseconds=1)
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value)


def iso(moment: datetime) -> str:
    """With microseconds, and `Z` when it has a zone."""
    if moment.tzinfo is None:
        return moment.isoformat(timespec="microseconds")
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return value
    if isinstance(value, datetime):
        return (
            iso(value).replace("T", " ").replace(".000000", "")
        )  # a narrow table breaks it at the blank
    shown = plain(value)
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    empty: str = "Nothing there.",
    title: str | None = None,
) -> None:
    """Print rows under headings; numbers on the right."""
    rows = list(rows)
    if not rows:
        say(empty)
        return
    console().print(as_table(headings, rows, title=title))


def as_table(
    headings: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None
) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for position, heading in enumerate(headings):
        numbers = all(_is_number(row[position]) for row in rows)
        drawn.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*map(cell, row))
    return drawn


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal | None) and not isinstance(value, bool)


def counted(count: int, thing: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def seconds_text(seconds: float) -> str:
    """A length of time for people: `0.4 s`, `3 min 20 s`, `2 h 5 min`, `4 d 3 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def bytes_text(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


# How far a run is behind, for the person who waits for it: a line on standard error every few
# seconds while there are known ticks to do.


EVERY_S = 5.0


@dataclass
class Progress:
    """Hears of every batch, and now and then in between. `line` and `summary` say the same in
    words.
    """

    every_s: float = EVERY_S
    opening: str = ""
    rows: int = 0
    last: Status | None = None
    _started_s: float = field(default_factory=time.monotonic)
    _said_s: float = field(default_factory=time.monotonic)
    _said_rows: int = 0

    def __call__(self, status: Status) -> None:
        if self.last is None and self.opening:  # whatever can be refused has not been
            say(self.opening)
        if status.batches > (self.last.batches if self.last is not None else 0):
            self.rows += status.batch_rows
        self.last = status
        now_s = time.monotonic()
        if status.tick < status.newest_tick and now_s - self._said_s >= self.every_s:
            print(self.line(status, now_s - self._said_s), file=sys.stderr, flush=True)
            self._said_s, self._said_rows = now_s, self.rows

    def line(self, status: Status, seconds: float) -> str:
        rate = (self.rows - self._said_rows) / max(seconds, 1e-9)
        left = (
            f"about {seconds_text(status.rows_behind / rate)} left"
            if rate >= 1
            else "time left not known"
        )
        return (
            f"tick {status.tick:,} of {status.newest_tick:,}, {counted(status.rows_behind, 'row')}"
            f" behind, {rate:,.0f} rows/s, {left}"
        )

    def summary(self) -> str:
        """When everything has been taken in."""
        if self.last is None or not self.last.batches:
            return "There was nothing to take in."
        seconds = time.monotonic() - self._started_s
        return (
            f"Caught up at tick {self.last.tick:,}: {counted(self.rows, 'row')} in"
            f" {seconds_text(seconds)} ({self.rows / max(seconds, 1e-9):,.0f} rows/s)."
        )


# How a process that goes on and on is doing: `headrace capture` and `headrace sync` say a line
# every few seconds.


class HasRows(Protocol):
    @property
    def rows(self) -> int: ...


LongRunningStatus = TypeVar("LongRunningStatus", bound=HasRows)


@dataclass
class StatusLines(Generic[LongRunningStatus]):
    """Status lines on standard error, now and then; JSON on standard output, if asked for. `line`
    puts a status, and rows a second, into words.
    """

    line: Callable[[LongRunningStatus, float], str]
    as_json: bool = False
    last: LongRunningStatus | None = None
    _said_s: float = field(default_factory=time.monotonic)
    _said_rows: int = 0
    _started_s: float = field(default_factory=time.monotonic)

    def __call__(self, status: LongRunningStatus) -> None:
        self.last = status
        now_s = time.monotonic()
        if now_s - self._said_s < EVERY_S:
            return
        rate = (status.rows - self._said_rows) / (now_s - self._said_s)
        self._said_s, self._said_rows = now_s, status.rows
        if self.as_json:
            emit({**vars(status), "rows_per_second": rate})
        else:
            print(self.line(status, rate), file=sys.stderr, flush=True)

    def summary(self) -> str:
        rows = self.last.rows if self.last else 0
        return (
            f"ended cleanly; {counted(rows, 'row')} in"
            f" {seconds_text(time.monotonic() - self._started_s)}."
        )
