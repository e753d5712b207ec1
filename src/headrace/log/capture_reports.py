"""What running captures say about themselves, as notes of the log: `headrace watch`, the metrics
and `headrace capture --status` read them, in other processes and on other machines.

    note capture_report.shop    {"version": 1, "at": 1767225600.0, "rows": 7, "stopped": {}, …}
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from headrace.errors import HeadraceError
from headrace.log.api import Log, Transaction

VERSION = 1
_NOTES = "capture_report."
logger = logging.getLogger("headrace.cdc")


class CaptureReporter:
    """Writes the reports of one capture. When that fails, it is tried again the next time, and the
    capture goes on.
    """

    def __init__(self, log: Log, capture: str) -> None:
        self._log = log
        self._capture = capture
        self._last: Transaction | None = None
        self._was_warned = False

    def report(self, figures: dict[str, Any]) -> None:
        """Write a report, with the time."""
        note = _NOTES + self._capture
        text = json.dumps({"version": VERSION, "at": time.time(), **figures})
        try:
            transaction = (
                self._last.next() if self._last is not None else self._log.transaction(note)
            )
            self._last = transaction
            with transaction:
                transaction.set_note(note, text)
        except HeadraceError as error:
            self._last = None
            if not self._was_warned:
                logger.warning(
                    "The capture %s cannot report how it is doing; it goes on, and tries again: %s",
                    self._capture,
                    error,
                )
            self._was_warned = True


def read_capture_reports(log: Log) -> dict[str, dict[str, Any]]:
    """Return the last report of each capture of a log, by name. `at` is in seconds since 1970.
    Reports of a newer Headrace are left out.
    """
    reports = {name: json.loads(text) for name, text in log.notes(_NOTES).items()}
    return {
        name.removeprefix(_NOTES): report
        for name, report in reports.items()
        if report["version"] <= VERSION
    }
