"""How a process that goes on and on is doing: `headrace capture` and `headrace sync` say a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from headrace.cli.output import counted, emit, seconds_text

EVERY_S = 5.0


class HasRows(Protocol):
    @property
    def rows(self) -> int: ...


Status = TypeVar("Status", bound=HasRows)


@dataclass
class StatusLines(Generic[Status]):
    """Status lines on standard error, now and then; JSON on standard output, if asked for. `line` puts a status, and rows a second, into words."""

    line: Callable[[Status, float], str]
    as_json: bool = False
    last: Status | None = None
    _said_s: float = field(default_factory=time.monotonic)
    _said_rows: int = 0
    _started_s: float = field(default_factory=time.monotonic)

    def __call__(self, status: Status) -> None:
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
        return f"ended cleanly; {counted(rows, 'row')} in {seconds_text(time.monotonic() - self._started_s)}."
