"""Each receiver of an alert follows the topic `alerts` on its own, so one that is slow or away holds up no other: its place is a note of the log, stored when a message was taken.

A receiver that fails is tried again, with pauses that grow and a circuit breaker; a message that nobody took in `GIVE_UP_US`, or that was refused, is a dead letter in `alerts.dead`; replayed from there, it goes to all receivers again, under the same id.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from threading import Event

import pyarrow as pa

from headrace.alerts.breaker import Breaker
from headrace.alerts.declared import Alert, Way
from headrace.alerts.messages import SCHEMA, TOPIC, AlertMessage
from headrace.alerts.ways import Teller, teller
from headrace.durations import to_time_us
from headrace.errors import ConfigurationError, TargetUnavailable
from headrace.log import dead
from headrace.log.api import OFFSET_COLUMN, Log, Transaction
from headrace.sinks.webhook_sending import Refused

logger = logging.getLogger("headrace.alerts")
GIVE_UP_US = 24 * 3600 * 1_000_000
POLL_S = 0.1
_READ_MESSAGES = 100


@dataclass
class SendingStatus:
    told: int = 0
    refused: int = 0
    given_up: int = 0
    failures: int = 0
    is_open: bool = False
    """Whether the circuit is open: nothing is tried for a while."""
    error: str | None = None


class Sending:
    """One receiver of one alert. A receiver that is new hears of what comes from now on."""

    def __init__(self, log: Log, pipeline: str, alert: Alert, way: Way, *, breaker: Breaker | None = None) -> None:
        self.log, self.pipeline, self.alert = log, pipeline, alert
        self.status = SendingStatus()
        self._teller: Teller = teller(way)
        self._breaker = breaker or Breaker()
        self._transaction: Transaction | None = None
        log.create_topic(TOPIC, SCHEMA, exist_ok=True)
        self._note = f"alerting.{pipeline}.{alert.name}.{self._teller.identity}"
        known = log.note(self._note)
        self._next = int(known) if known is not None else log.end_offsets(TOPIC)[0]
        self._store(self._next)

    def run(self, stop: Event, *, until_caught_up: bool = False) -> None:
        goal = self.log.end_offsets(TOPIC)[0] if until_caught_up else None
        try:
            while not stop.is_set():
                if not self._step(stop):
                    stop.wait(POLL_S)
                if goal is not None and (self._next >= goal or self._breaker.is_open):
                    return
        finally:
            self._teller.close()

    def _step(self, stop: Event) -> bool:
        """Messages that are there, one after the other, until one fails. Returns whether there were any."""
        end = self.log.end_offsets(TOPIC)[0]
        if self._next >= end:
            return False
        reached = min(end, self._next + _READ_MESSAGES)
        for batch in self.log.read(TOPIC, 0, self._next, reached):
            for row in batch.to_pylist():
                if stop.is_set() or not self._handled(row, stop):
                    return True
                self._next = row[OFFSET_COLUMN] + 1
        self._next = reached
        return True

    def _handled(self, row: dict[str, object], stop: Event) -> bool:
        message = AlertMessage.of(row)
        if (message.pipeline, message.alert) != (self.pipeline, self.alert.name) or message.is_silenced:
            return True
        if stop.wait(self._breaker.wait_s()):
            return False
        try:
            self._teller.tell(message)
        except (Refused, TargetUnavailable, ConfigurationError) as error:
            if not self._is_over(message, error):
                return False
        else:
            self._breaker.succeeded()
            self.status.told += 1
            self.status.failures, self.status.is_open, self.status.error = 0, False, None
        self._store(int(str(row[OFFSET_COLUMN])) + 1)
        return True

    def _is_over(self, message: AlertMessage, error: Exception) -> bool:
        """Whether the message is put aside: it was refused, or it is too old."""
        reason = error.message if isinstance(error, TargetUnavailable | ConfigurationError) else str(error)
        is_refused, is_old = isinstance(error, Refused), time.time_ns() // 1_000 - to_time_us(message.at) > GIVE_UP_US
        if is_refused or is_old:
            row = pa.RecordBatch.from_pylist([message.row()], self.log.topic(TOPIC).arrow_schema)
            dead.divert(self.log, TOPIC, [dead.DeadLetter(f"alert {self.alert.name}, {self._teller.name}", reason, row=dead.row_to_text(row)[0])])
            self.status.refused, self.status.given_up = self.status.refused + is_refused, self.status.given_up + (is_old and not is_refused)
            return True
        self._breaker.failed(error.wait_s if isinstance(error, TargetUnavailable) else 0.0)
        self.status.failures, self.status.is_open, self.status.error = self._breaker.failures, self._breaker.is_open, reason
        logger.warning("The alert %s could not be told: %s\nTrying again in %.1f s.", self.alert.name, reason, self._breaker.wait_s())
        return False

    def _store(self, offset: int) -> None:
        self._transaction = self._transaction.next() if self._transaction is not None else self.log.transaction(self._note)
        with self._transaction as tx:
            tx.set_note(self._note, str(offset))
