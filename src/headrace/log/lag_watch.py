"""Watching consumer lag: a hook that is called when a group falls too far behind, and again when
it has caught up.

`Log.watch_lag` starts a `LagWatch`, whichever backend stores the log. Alert rules on lag, with
delivery to pagers and webhooks, are in `headrace.alerts`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Thread, current_thread
from typing import Self

from headrace.errors import InputError
from headrace.log.values import PartitionLag

logger = logging.getLogger("headrace.log")


@dataclass(frozen=True)
class LagAlert:
    """One partition's lag has crossed the threshold.

    Attributes:
        firing: True when the lag has risen above the threshold, False when it has fallen back.
        lag: The partition's lag at that moment.
    """

    firing: bool
    lag: PartitionLag


class LagWatch:
    """Compares lag with a threshold at regular intervals, in a background thread.

    The hook is called once when a partition crosses the threshold and once when it falls back. An
    exception of the hook, or a log that cannot be reached, is logged; the watch goes on.

    Args:
        read_lag: Returns the lag of a group, or of all groups for None (`Log.lag`).
        on_alert: The hook.
        rows: Threshold in rows, or None.
        seconds: Threshold in seconds, or None.
        group: The group to watch; None for all groups.
        every_s: Seconds between two checks.

    Raises:
        InputError: Neither `rows` nor `seconds` is given.
    """

    def __init__(
        self,
        read_lag: Callable[[str | None], Sequence[PartitionLag]],
        on_alert: Callable[[LagAlert], None],
        *,
        rows: int | None,
        seconds: float | None,
        group: str | None,
        every_s: float,
    ) -> None:
        if rows is None and seconds is None:
            raise InputError(
                "A lag alert needs a threshold.", fix="pass rows=…, seconds=…, or both."
            )
        self._read_lag = read_lag
        self._on_alert = on_alert
        self._rows = rows
        self._seconds = seconds
        self._group = group
        self._every_s = every_s
        self._firing: dict[tuple[str, str, int], PartitionLag] = {}
        self._last_error = ""
        self._stop = Event()
        self._thread = Thread(target=self._run, daemon=True, name="lag watch")

    def start(self) -> Self:
        """Start the background thread.

        Returns:
            This watch.

        Raises:
            UnknownGroup: No group of the given name has ever committed. The error is raised here,
                where the caller sees it, rather than logged by the thread.
        """
        if self._group is not None:
            self._read_lag(self._group)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the background thread. The hook may call this on its own watch."""
        self._stop.set()
        if current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def check(self) -> None:
        """Read the lag once and call the hook for each partition that crossed the threshold.

        A partition that no longer exists counts as caught up.
        """
        current = {
            (lag.group, lag.topic, lag.partition): lag for lag in self._read_lag(self._group)
        }
        before = self._firing
        self._firing = {key: lag for key, lag in current.items() if self.exceeds(lag)}
        alerts = [
            LagAlert(firing=True, lag=lag) for key, lag in self._firing.items() if key not in before
        ]
        alerts += [
            LagAlert(firing=False, lag=current.get(key, lag))
            for key, lag in before.items()
            if key not in self._firing
        ]
        for alert in alerts:
            try:
                self._on_alert(alert)
            except Exception:
                logger.exception("The lag hook failed on %s", alert)

    def exceeds(self, lag: PartitionLag) -> bool:
        """Whether a partition's lag is above the threshold in rows or in seconds."""
        too_many_rows = self._rows is not None and lag.rows > self._rows
        too_old = self._seconds is not None and lag.seconds > self._seconds
        return too_many_rows or too_old

    def _run(self) -> None:
        while True:
            try:
                self.check()
                self._last_error = ""
            except Exception as error:
                if str(error) != self._last_error:  # log a lasting failure once, not at every check
                    self._last_error = str(error)
                    logger.warning("Lag cannot be watched now: %s", error)
            if self._stop.wait(self._every_s):
                return
