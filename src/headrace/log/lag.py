"""Watching lag: a hook that is called when a group falls too far behind, and again when it has caught up. For every backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread, current_thread
from typing import TYPE_CHECKING

from headrace.errors import InputError

if TYPE_CHECKING:
    from headrace.log.api import Log, PartitionLag

logger = logging.getLogger("headrace.log")


@dataclass(frozen=True)
class LagAlert:
    """A partition that passed the threshold (`firing`) or came back below it."""

    firing: bool
    lag: PartitionLag


class LagWatch:
    """Compares lag with a threshold at intervals, in a thread of its own. Each start and end of an excess is told once.

    It outlives what fails, a hook that raises or a log that does not answer: that is logged, and it looks again.
    """

    def __init__(
        self, log: Log, on_alert: Callable[[LagAlert], None], *, rows: int | None, seconds: float | None, group: str | None, every_s: float
    ) -> None:
        if rows is None and seconds is None:
            raise InputError("A lag alert needs a threshold.", fix="pass rows=…, seconds=…, or both.")
        self._log, self._on_alert, self._rows, self._seconds, self._group = log, on_alert, rows, seconds, group
        self._firing: dict[tuple[str, str, int], PartitionLag] = {}
        self._trouble = ""
        if group is not None:
            log.lag(group)  # an unknown group is an error here, where somebody sees it
        self._stop = Event()
        self._thread = Thread(target=self._run, args=(every_s,), daemon=True, name="lag watch")
        self._thread.start()

    def _run(self, every_s: float) -> None:
        while True:
            try:
                self.check()
                self._trouble = ""
            except Exception as error:
                self._report(error)
            if self._stop.wait(every_s):
                return

    def check(self) -> None:
        """Look once, now. A partition that is gone is behind no more."""
        now = {(lag.group, lag.topic, lag.partition): lag for lag in self._log.lag(self._group)}
        before, self._firing = self._firing, {key: lag for key, lag in now.items() if self.exceeds(lag)}
        alerts = [LagAlert(True, lag) for key, lag in self._firing.items() if key not in before]
        alerts += [LagAlert(False, now.get(key, lag)) for key, lag in before.items() if key not in self._firing]
        for alert in alerts:
            try:
                self._on_alert(alert)
            except Exception:
                logger.exception("The hook for lag failed on %s", alert)

    def _report(self, error: Exception) -> None:
        """Once, not at every look."""
        if str(error) != self._trouble:
            self._trouble = str(error)
            logger.warning("Lag cannot be watched now: %s", error)

    def exceeds(self, lag: PartitionLag) -> bool:
        too_many = self._rows is not None and lag.rows > self._rows
        too_old = self._seconds is not None and lag.seconds > self._seconds
        return too_many or too_old

    def stop(self) -> None:
        self._stop.set()
        if current_thread() is not self._thread:  # a hook may stop its watch
            self._thread.join(timeout=5)
