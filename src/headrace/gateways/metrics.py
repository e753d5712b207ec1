"""The counts of gateways: as Prometheus reads them, and as rows of the log.

A running gateway writes its counts to the compacted topic `__gateway_counts` every few seconds
while they change (`GatewayReporter`). `headrace gateway list` shows them, and rules of `headrace
watch` use them (`GatewayReports`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from headrace.durations import from_us
from headrace.errors import HeadraceError
from headrace.gateways.inbox import Fate, GatewayStatus
from headrace.http.prometheus import family
from headrace.log.api import Log

Samples = list[tuple[dict[str, str], float]]


def metrics(statuses: Sequence[GatewayStatus]) -> str:
    """Return the counts of gateways in Prometheus' text format."""

    def labels(status: GatewayStatus, **more: str) -> dict[str, str]:
        return {"gateway": status.gateway, "kind": status.kind, **more}

    fates: Samples = [
        (labels(status, fate=fate), getattr(status, fate)) for status in statuses for fate in Fate
    ]
    reasons: Samples = [
        (labels(status, reason=reason), count)
        for status in statuses
        for reason, count in status.reasons.items()
    ]
    details: Samples = [
        (labels(status, what=name), value)
        for status in statuses
        for name, value in status.details.items()
    ]
    lines = [
        *family(
            "headrace_gateway_received_total",
            "counter",
            "Rows received.",
            [(labels(status), status.received) for status in statuses],
        ),
        *family("headrace_gateway_rows_total", "counter", "Rows, by what became of them.", fates),
        *family(
            "headrace_gateway_turned_away_total",
            "counter",
            "Rows that were refused or dropped, by reason.",
            reasons,
        ),
        *family(
            "headrace_gateway_waiting_rows",
            "gauge",
            "Rows that wait for the log.",
            [(labels(status), status.waiting_rows) for status in statuses],
        ),
        *family(
            "headrace_gateway_waiting_bytes",
            "gauge",
            "Bytes that wait for the log.",
            [(labels(status), status.waiting_bytes) for status in statuses],
        ),
        *family("headrace_gateway_detail", "gauge", "Figures of this kind of gateway.", details),
    ]
    return "\n".join(lines) + "\n"


# Counts in the log

logger = logging.getLogger("headrace.gateways")
TOPIC = "__gateway_counts"
"""Compacted by gateway: it has the newest counts of every gateway."""
LOST = "packets_lost_by_the_system"
_FIGURES = ("received", "stored", "repeated", "dropped", "refused", "waiting_rows", "waiting_bytes")
_SCHEMA = (
    "gateway STRING, kind STRING, `at` TIMESTAMP,"
    f" {', '.join(f'{name} BIGINT' for name in _FIGURES)}, lost BIGINT, reasons STRING"
)
_SEGMENT_BYTES = 1 << 20


def _figures(status: GatewayStatus) -> dict[str, Any]:
    return {name: getattr(status, name) for name in _FIGURES} | {
        "lost": status.details.get(LOST, 0),
        "reasons": json.dumps(status.reasons, sort_keys=True),
    }


class GatewayReporter:
    """Writes the counts of one gateway to the log. When that fails, it is tried again the next
    time, and the gateway goes on.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._has_topic = False
        self._was_warned = False
        self._reported = _figures(GatewayStatus("", ""))

    def report(self, status: GatewayStatus, now_us: int) -> None:
        """Write the counts, if they have changed."""
        figures = _figures(status)
        if figures == self._reported:
            return
        try:
            if not self._has_topic:
                self._log.create_topic(
                    TOPIC,
                    _SCHEMA,
                    key="gateway",
                    compact=True,
                    segment_bytes=_SEGMENT_BYTES,
                    exist_ok=True,
                )
                self._has_topic = True
            with self._log.producer(TOPIC) as producer:
                producer.append(
                    [
                        {
                            "gateway": status.gateway,
                            "kind": status.kind,
                            "at": from_us(now_us),
                            **figures,
                        }
                    ]
                )
        except HeadraceError as error:
            if not self._was_warned:
                logger.warning(
                    "The gateway %s cannot report its counts; it goes on, and tries again: %s",
                    status.gateway,
                    error,
                )
            self._was_warned = True
            return
        self._reported = figures
        self._was_warned = False


class GatewayReports:
    """Reads the newest counts of each gateway of a log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._next_offset = 0
        self._newest: dict[str, dict[str, Any]] = {}

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the counts by the gateway's name, with the time of the report (`at`) and the
        packets that the system dropped (`lost`).
        """
        if TOPIC not in self._log.topics():
            return {}
        stop = self._log.end_offsets(TOPIC)[0]
        start = max(self._next_offset, self._log.start_offsets(TOPIC)[0])
        if start < stop:
            for batch in self._log.read(TOPIC, 0, start, stop):
                for row in batch.to_pylist():
                    self._newest[row["gateway"]] = row
        self._next_offset = stop
        return self._newest
