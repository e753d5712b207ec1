"""The output of commands: tables and lines for people, JSON lines for programs, and progress.

JSON follows the rules of the log: times in ISO 8601, bytes in base64, decimals and non-finite
floats as strings.
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
    from headrace.run_status import Status


PIPED_WIDTH = 100_000  # the table is not cut if there is no terminal


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is, without markup."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream, markup=False, highlight=False, width=None if stream.isatty() else PIPED_WIDTH
    )


def echo(text: str) -> None:
    print(text)


def print_json(value: Any) -> None:
    """Print a value as one JSON line."""
    print(json.dumps(to_json_value(value), ensure_ascii=False))


def to_json_value(value: Any) -> Any:
    """A value, such as a dataclass or a row, as JSON's types."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return (
            value
            if math.isfinite(value)
            else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
        )
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        members = {member.name: getattr(value, member.name) for member in fields(value)}
        return {
            name: to_json_value(item)
            for name, item in members.items()
            if not isinstance(item, pa.Schema)
        }
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):
        return [to_json_value(item) for item in value]
    if isinstance(value, datetime):
        return iso_text(value)
    if isinstance(value, date | dt.time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value // timedelta(microseconds=1)
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value)


def iso_text(moment: datetime) -> str:
    """A time in ISO 8601 with microseconds, and `Z` if it has a zone."""
    if moment.tzinfo is None:
        return moment.isoformat(timespec="microseconds")
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def format_cell(value: Any) -> str:
    """A value as text in a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return value
    if isinstance(value, datetime):
        text = iso_text(value).replace(".000000", "")
        return text.replace("T", " ")  # a narrow table can break it at the blank
    json_value = to_json_value(value)
    if isinstance(json_value, str):
        return json_value
    return json.dumps(json_value, ensure_ascii=False)


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    empty: str = "Nothing there.",
    title: str | None = None,
) -> None:
    """Print rows under headings, with numbers aligned to the right."""
    rows = list(rows)
    if not rows:
        echo(empty)
        return
    console().print(make_table(headings, rows, title=title))


def make_table(
    headings: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None
) -> Table:
    """A table of rows under headings, with numbers aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for index, heading in enumerate(headings):
        is_numeric = all(
            (
                isinstance(row[index], int | float | Decimal | None)
                and not isinstance(row[index], bool)
            )
            for row in rows
        )
        table.add_column(heading, justify="right" if is_numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(format_cell, row))
    return table


def count_text(count: int, thing: str) -> str:
    """A count with its noun: `1 row`, `2 rows`."""
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


# Progress


EVERY_S = 5.0


@dataclass
class RunProgress:
    """Reports how far a run is behind: a line on standard error every few seconds while there are
    ticks to process. The runner calls it after every batch, and now and then in between.
    """

    every_s: float = EVERY_S
    opening: str = ""
    rows: int = 0
    last: Status | None = None
    _counts_before: dict[str, int] | None = None
    _started_s: float = field(default_factory=time.monotonic)
    _reported_s: float = field(default_factory=time.monotonic)
    _reported_rows: int = 0

    def __call__(self, status: Status) -> None:
        if self.last is None and self.opening:  # the run has started: nothing was refused
            echo(self.opening)
        if self._counts_before is None:
            self._counts_before = dict(status.counts)
        before = self.last.batches if self.last is not None else 0
        if status.batches not in (0, before):  # a run that had to start Spark again counts anew
            self.rows += status.batch_rows
        self.last = status
        now_s = time.monotonic()
        if status.tick < status.newest_tick and now_s - self._reported_s >= self.every_s:
            print(self.line(status, now_s - self._reported_s), file=sys.stderr, flush=True)
            self._reported_s, self._reported_rows = now_s, self.rows

    def line(self, status: Status, seconds: float) -> str:
        """The progress in the last seconds, as one line."""
        rate = (self.rows - self._reported_rows) / max(seconds, 1e-9)
        left = (
            f"about {seconds_text(status.rows_behind / rate)} left"
            if rate >= 1
            else "time left unknown"
        )
        return (
            f"tick {status.tick:,} of {status.newest_tick:,},"
            f" {count_text(status.rows_behind, 'row')}"
            f" behind, {rate:,.0f} rows/s, {left}"
        )

    def dead_letters(self) -> dict[str, int]:
        """Step or input -> how many of its rows became dead letters in this run."""
        return self._counted(".diverted")

    def losses(self) -> str:
        """What did not get into the results of the run, as lines; empty if there is nothing."""
        lines = []
        if diverted := self.dead_letters():
            names = ", ".join(f"{count:,} of {name}" for name, count in diverted.items())
            rows = "1 row" if sum(diverted.values()) == 1 else f"{sum(diverted.values()):,} rows"
            lines.append(f"{rows} became dead letters: {names}. See `headrace dead list`.")
        if unknown := self._counted(".unknown_fields"):
            names = ", ".join(f"{count:,} of {name}" for name, count in unknown.items())
            lines.append(f"Fields that the topic does not have were ignored: {names}.")
        return "\n".join(lines)

    def _counted(self, suffix: str) -> dict[str, int]:
        """What the run has added to the counts with a suffix, by step."""
        if self.last is None:
            return {}
        before = self._counts_before or {}
        added = {
            name.removesuffix(suffix): count - before.get(name, 0)
            for name, count in sorted(self.last.counts.items())
            if name.endswith(suffix)
        }
        return {name: count for name, count in added.items() if count > 0}

    def summary(self) -> str:
        """The line at the end of a run that has caught up."""
        if self.last is None or not self.last.batches:
            return "There was nothing to process."
        seconds = time.monotonic() - self._started_s
        line = (
            f"Caught up at tick {self.last.tick:,}: {count_text(self.rows, 'row')} in"
            f" {seconds_text(seconds)} ({self.rows / max(seconds, 1e-9):,.0f} rows/s)."
        )
        return f"{line}\n{self.still_open()}".rstrip()

    def still_open(self) -> str:
        """What waits for event time at the end of a run, as a line; empty if nothing does."""
        if self.last is None:
            return ""
        due = {step for query in self.last.queries.values() for step in query["due_us"]}
        counted: dict[str, str] = {}
        for kind, what in ((".windows_waiting", "window"), (".keys_waiting", "key")):
            for name, count in sorted(self.last.counts.items()):
                if name.endswith(kind) and count > 0:
                    step = name.removesuffix(kind)
                    rows = " with rows that wait" if what == "key" else ""
                    counted[step] = f"{count_text(count, what)} of {step}{rows}"
        texts = [*counted.values(), *(f"rows of {step}" for step in sorted(due - counted.keys()))]
        if not texts:
            return ""
        return (
            f"Still open, until event time goes on: {', '.join(texts)}. A final run (--final) emits"
            " them."
        )


class ConnectorProgress(Protocol):
    """The status of a capture or a sink: the rows that it has moved, and what fails."""

    @property
    def rows(self) -> int: ...

    @property
    def failures(self) -> int: ...

    @property
    def error(self) -> str | None: ...


LongRunningStatus = TypeVar("LongRunningStatus", bound=ConnectorProgress)


@dataclass
class StatusLines(Generic[LongRunningStatus]):
    """Reports the status of `headrace capture` and `headrace sync` every few seconds: lines on
    standard error, or JSON on standard output. `line` formats a status and the rows per second.
    """

    line: Callable[[LongRunningStatus, float], str]
    as_json: bool = False
    last: LongRunningStatus | None = None
    _reported_s: float = field(default_factory=time.monotonic)
    _reported_rows: int = 0
    _started_s: float = field(default_factory=time.monotonic)

    def __call__(self, status: LongRunningStatus) -> None:
        self.last = status
        now_s = time.monotonic()
        if now_s - self._reported_s < EVERY_S:
            return
        rate = (status.rows - self._reported_rows) / (now_s - self._reported_s)
        self._reported_s, self._reported_rows = now_s, status.rows
        if self.as_json:
            print_json({**vars(status), "rows_per_second": rate})
        else:
            print(self.line(status, rate), file=sys.stderr, flush=True)

    @property
    def is_failing(self) -> bool:
        """Whether the run ended while the other system was away."""
        return self.last is not None and self.last.error is not None

    def summary(self) -> str:
        """The line at the end of the run."""
        rows = self.last.rows if self.last else 0
        done = f"{count_text(rows, 'row')} in {seconds_text(time.monotonic() - self._started_s)}."
        if self.last is None or self.last.error is None:
            return f"ended cleanly; {done}"
        return (
            f"stopped while it could not work; {done} It failed"
            f" {count_text(self.last.failures, 'time')} in a row, last: {self.last.error}"
        )
