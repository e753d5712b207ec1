"""Watching lag: a hook that is called when a group falls too far behind, and again when it has caught up. For every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING

from headrace.errors import InputError

if TYPE_CHECKING:
    from headrace.log.api import Log, PartitionLag


@dataclass(frozen=True)
class LagAlert:
    """A partition that passed the threshold (`firing`) or came back below it."""

    firing: bool
    lag: PartitionLag


class LagWatch:
    """Compares lag with a threshold at intervals, in a thread of its own. Each start and end of an excess is told once."""

    def __init__(
        self, log: Log, on_alert: Callable[[LagAlert], None], *, rows: int | None, seconds: float | None, group: str | None, every_s: float
    ) -> None:
        if rows is None and seconds is None:
            raise InputError("A lag alert needs a threshold.", fix="pass rows=…, seconds=…, or both.")
        self._log, self._on_alert, self._rows, self._seconds, self._group = log, on_alert, rows, seconds, group
        self._firing: set[tuple[str, str, int]] = set()
        self._stop = Event()
        self._thread = Thread(target=self._run, args=(every_s,), daemon=True, name="lag watch")
        self._thread.start()

    def _run(self, every_s: float) -> None:
        while True:
            self.check()
            if self._stop.wait(every_s):
                return

    def check(self) -> None:
        """Look once, now."""
        for lag in self._log.lag(self._group):
            key = (lag.group, lag.topic, lag.partition)
            exceeds = self.exceeds(lag)
            if exceeds != (key in self._firing):
                self._firing ^= {key}
                self._on_alert(LagAlert(exceeds, lag))

    def exceeds(self, lag: PartitionLag) -> bool:
        too_many = self._rows is not None and lag.rows > self._rows
        too_old = self._seconds is not None and lag.seconds > self._seconds
        return too_many or too_old

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
