"""The counts of gateways as Prometheus reads them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.durations import from_us
from headrace.errors import HeadraceError
from headrace.gateways.inbox import Fate, GatewayStatus
from headrace.http_server import family
from headrace.log.api import Log

Samples = list[tuple[dict[str, str], float]]


def metrics(statuses: Sequence[GatewayStatus]) -> str:
    def of(status: GatewayStatus, **more: str) -> dict[str, str]:
        return {"gateway": status.gateway, "kind": status.kind, **more}

    fates: Samples = [
        (of(each, fate=fate), getattr(each, fate)) for each in statuses for fate in Fate
    ]
    reasons: Samples = [
        (of(each, reason=reason), count)
        for each in statuses
        for reason, count in each.reasons.items()
    ]
    details: Samples = [
        (of(each, what=name), value) for each in statuses for name, value in each.details.items()
    ]
    lines = [
        *family(
            "headrace_gateway_received_total",
            "counter",
            "Rows that came.",
            [(of(each), each.received) for each in statuses],
        ),
        *family("headrace_gateway_rows_total", "counter", "Rows, by what became of them.", fates),
        *family(
            "headrace_gateway_turned_away_total",
            "counter",
            "Rows that were refused or dropped, by why.",
            reasons,
        ),
        *family(
            "headrace_gateway_waiting_rows",
            "gauge",
            "Rows that wait for the log.",
            [(of(each), each.waiting_rows) for each in statuses],
        ),
        *family(
            "headrace_gateway_waiting_bytes",
            "gauge",
            "Bytes that wait for the log.",
            [(of(each), each.waiting_bytes) for each in statuses],
        ),
        *family(
            "headrace_gateway_detail", "gauge", "What only this kind of gateway knows.", details
        ),
    ]
    return "\n".join(lines) + "\n"


# What gateways tell of themselves to others: their counts, in a compacted topic that keeps the
# newest of each gateway, every few seconds while they change. `headrace watch` has rules over them,
# `headrace gateway list` shows them.


logger = logging.getLogger("headrace.gateways")
TOPIC = "__gateway_counts"
"""By gateway, and compacted: whoever reads it whole knows every gateway. Earlier ones told theirs
in `__gateways`, of which the oldest rows went.
"""
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


class Telling:
    """One gateway's. What cannot be told now is told the next time; a gateway that may not tell
    anything works all the same.
    """

    def __init__(self, log: Log) -> None:
        self._log, self._is_made, self._is_warned = log, False, False
        self._told = _figures(GatewayStatus("", ""))

    def tell(self, status: GatewayStatus, now_us: int) -> None:
        figures = _figures(status)
        if figures == self._told:
            return
        try:
            if not self._is_made:
                self._log.create_topic(
                    TOPIC,
                    _SCHEMA,
                    key="gateway",
                    compact=True,
                    segment_bytes=_SEGMENT_BYTES,
                    exist_ok=True,
                )
                self._is_made = True
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
            if not self._is_warned:
                logger.warning(
                    "The gateway %s cannot tell how it goes; it goes on, and tries again: %s",
                    status.gateway,
                    error,
                )
            self._is_warned = True
            return
        self._told, self._is_warned = figures, False


class Told:
    """The newest that each gateway of a log has told."""

    def __init__(self, log: Log) -> None:
        self._log, self._reached = log, 0
        self._newest: dict[str, dict[str, Any]] = {}

    def read(self) -> dict[str, dict[str, Any]]:
        """By the gateway's name, with when it was told (`at`), its counts, and the packets that the
        system lost (`lost`).
        """
        if TOPIC not in self._log.topics():
            return {}
        for row in self._news():
            self._newest[row["gateway"]] = row
        return self._newest

    def _news(self) -> Iterator[dict[str, Any]]:
        end = self._log.end_offsets(TOPIC)[0]
        start = max(self._reached, self._log.start_offsets(TOPIC)[0])
        if start < end:
            for batch in self._log.read(TOPIC, 0, start, end):
                yield from batch.to_pylist()
        self._reached = end
