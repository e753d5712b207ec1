"""Each receiver of an alert follows the topic `alerts` on its own, so one that is slow or away
holds up no other: its place is a note of the log, stored when a message was taken.

A receiver that fails is tried again, with pauses that grow and a circuit breaker; a message that
nobody took in `GIVE_UP_US`, or that was refused, is a dead letter in `alerts.dead`; replayed from
there, it goes to all receivers again, under the same id.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import smtplib
import ssl
import time
from dataclasses import dataclass
from email.message import EmailMessage
from threading import Event
from typing import Protocol
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from headrace.alerts.alert import SCHEMA, TOPIC, Alert, AlertMessage, Email, Way
from headrace.columnar.columns import OFFSET_COLUMN
from headrace.durations import to_time_us
from headrace.errors import ConfigurationError, TargetUnavailable
from headrace.log import dead_letters
from headrace.log.api import Log, Transaction
from headrace.retry import CircuitBreaker
from headrace.secrets import secret
from headrace.sinks.webhook_target import Receiver, Refused, Sender

# How a message reaches its receiver: a signed POST, or a mail. What fails in passing is
# `TargetUnavailable`, or `ConfigurationError` until somebody mends it; `Refused` is for good.


_SUBMISSION_PORT, _SMTPS_PORT = 587, 465


class Teller(Protocol):
    """Tells one receiver. `name` says which in messages, without what may be a secret; `identity`
    tells it from others.
    """

    name: str
    identity: str

    def tell(self, message: AlertMessage) -> None: ...

    def close(self) -> None: ...


def teller(way: Way) -> Teller:
    return MailTeller(way) if isinstance(way, Email) else WebhookTeller(way.options["receiver"])


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _is_this_machine(server: smtplib.SMTP) -> bool:
    return (
        server.sock is not None and ipaddress.ip_address(server.sock.getpeername()[0]).is_loopback
    )


class WebhookTeller:
    def __init__(self, receiver: Receiver) -> None:
        self.name, self.identity = f"the webhook {receiver.name}", f"webhook.{_short(receiver.url)}"
        self._sender = Sender(receiver)

    def tell(self, message: AlertMessage) -> None:
        self._sender.send(message.body(), message.id)

    def close(self) -> None:
        self._sender.close()


class MailTeller:
    """A connection a message: they are few, and servers close what is idle."""

    def __init__(self, mail: Email) -> None:
        self._mail, self._parts = mail, urlsplit(mail.url)
        self.name, self.identity = (
            f"the mail server {self._parts.hostname}",
            f"email.{_short(' '.join((mail.url, *mail.to)))}",
        )

    def close(self) -> None:
        """Nothing is kept."""

    def tell(self, message: AlertMessage) -> None:
        try:
            with self._connected() as server:
                server.send_message(self._written(message))
        except smtplib.SMTPRecipientsRefused as error:
            codes = {code for code, _ in error.recipients.values()}
            if all(code >= 500 for code in codes):
                raise Refused(
                    f"{self.name} takes no mail for {', '.join(error.recipients)}"
                ) from None
            raise self._away(
                f"it refuses the receivers for now ({', '.join(map(str, sorted(codes)))})"
            ) from None
        except smtplib.SMTPAuthenticationError as error:
            raise ConfigurationError(
                f"{self.name} does not know us: {error.smtp_code}.",
                fix="check the user and the password.",
            ) from None
        except smtplib.SMTPResponseException as error:
            said = (
                error.smtp_error.decode(errors="replace")
                if isinstance(error.smtp_error, bytes)
                else str(error.smtp_error)
            )
            if error.smtp_code >= 500:
                raise Refused(f"{self.name} answers {error.smtp_code}: {said[:200]}") from None
            raise self._away(f"it answers {error.smtp_code}: {said[:200]}") from None
        except (smtplib.SMTPException, OSError) as error:
            raise self._away(str(error) or type(error).__name__) from None

    def _connected(self) -> smtplib.SMTP:
        host, port, timeout_s = self._parts.hostname or "", self._parts.port, self._mail.timeout_s
        if self._parts.scheme == "smtps":
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                host, port or _SMTPS_PORT, timeout=timeout_s, context=ssl.create_default_context()
            )
        else:
            server = smtplib.SMTP(host, port or _SUBMISSION_PORT, timeout=timeout_s)
        try:
            self._introduce(server)
        except BaseException:
            server.close()
            raise
        return server

    def _introduce(self, server: smtplib.SMTP) -> None:
        """With STARTTLS where the server has it. A password is not told to anybody who listens on
        the way.
        """
        server.ehlo_or_helo_if_needed()
        if self._parts.scheme == "smtp" and server.has_extn("starttls"):
            server.starttls(context=ssl.create_default_context())
        user = unquote(self._parts.username or "")
        if user and self._mail.password is not None:
            if not isinstance(server.sock, ssl.SSLSocket) and not _is_this_machine(server):
                raise ConfigurationError(
                    f"{self.name} has no STARTTLS: the password would go there in the clear.",
                    fix="use a server that has it, or smtps://….",
                )
            server.login(user, secret("password", self._mail.password))

    def _written(self, message: AlertMessage) -> EmailMessage:
        """The id of the alert is the mail's own, by which programs know a repeat."""
        written = EmailMessage()
        written["From"], written["To"], written["Subject"] = (
            self._mail.sender,
            ", ".join(self._mail.to),
            message.subject(),
        )
        written["Message-ID"], written["Date"] = f"<{message.id}@headrace>", message.at
        written.set_content(message.text())
        return written

    def _away(self, why: str) -> TargetUnavailable:
        return TargetUnavailable(
            f"{self.name} cannot be told: {why}.", fix="see that it runs and can be reached."
        )


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

    def __init__(
        self,
        log: Log,
        pipeline: str,
        alert: Alert,
        way: Way,
        *,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self.log, self.pipeline, self.alert = log, pipeline, alert
        self.status = SendingStatus()
        self._teller: Teller = teller(way)
        self._breaker = breaker or CircuitBreaker()
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
        """Messages that are there, one after the other, until one fails. Returns whether there were
        any.
        """
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
        if (message.pipeline, message.alert) != (
            self.pipeline,
            self.alert.name,
        ) or message.is_silenced:
            return True
        if stop.wait(self._breaker.wait_s()):
            return False
        try:
            self._teller.tell(message)
        except (Refused, TargetUnavailable, ConfigurationError) as error:
            if not self._is_over(message, error):
                return False
        else:
            self._breaker.record_success()
            self.status.told += 1
            self.status.failures, self.status.is_open, self.status.error = 0, False, None
        self._store(int(str(row[OFFSET_COLUMN])) + 1)
        return True

    def _is_over(self, message: AlertMessage, error: Exception) -> bool:
        """Whether the message is put aside: it was refused, or it is too old."""
        reason = (
            error.message
            if isinstance(error, TargetUnavailable | ConfigurationError)
            else str(error)
        )
        is_refused, is_old = (
            isinstance(error, Refused),
            time.time_ns() // 1_000 - to_time_us(message.at) > GIVE_UP_US,
        )
        if is_refused or is_old:
            row = pa.RecordBatch.from_pylist([message.row()], self.log.topic(TOPIC).arrow_schema)
            dead_letters.divert(
                self.log,
                TOPIC,
                [
                    dead_letters.DeadLetter(
                        f"alert {self.alert.name}, {self._teller.name}",
                        reason,
                        row=dead_letters.rows_to_json(row)[0],
                    )
                ],
            )
            self.status.refused, self.status.given_up = (
                self.status.refused + is_refused,
                self.status.given_up + (is_old and not is_refused),
            )
            return True
        self._breaker.record_failure(error.wait_s if isinstance(error, TargetUnavailable) else 0.0)
        self.status.failures, self.status.is_open, self.status.error = (
            self._breaker.failures,
            self._breaker.is_open,
            reason,
        )
        logger.warning(
            "The alert %s could not be told: %s\nTrying again in %.1f s.",
            self.alert.name,
            reason,
            self._breaker.wait_s(),
        )
        return False

    def _store(self, offset: int) -> None:
        self._transaction = (
            self._transaction.next()
            if self._transaction is not None
            else self.log.transaction(self._note)
        )
        with self._transaction as tx:
            tx.set_note(self._note, str(offset))
