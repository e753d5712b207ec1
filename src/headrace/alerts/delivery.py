"""Sends the messages of alerts to their receivers. Each receiver reads the topic `alerts` on its
own, so one that is slow or unreachable delays no other. Its offset is a note of the log, stored
after each message.

A receiver that fails is retried with growing pauses and a circuit breaker. A message that was
refused, or that was not accepted within `GIVE_UP_US`, becomes a dead letter in `alerts.dead`;
replayed from there, it goes to all receivers again under the same id.
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
from typing import Protocol, Self
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from headrace.alerts.alert import SCHEMA, TOPIC, Alert, AlertMessage, AlertReceiver, Email
from headrace.columnar.columns import OFFSET_COLUMN
from headrace.durations import to_time_us
from headrace.errors import ConfigurationError, TargetUnavailable
from headrace.log import dead_letters
from headrace.log.api import Log, Transaction
from headrace.retry import CircuitBreaker
from headrace.secrets import secret
from headrace.sinks.webhook_target import DeliveryRefused, WebhookEndpoint, WebhookSender

# Notifiers


_SUBMISSION_PORT, _SMTPS_PORT = 587, 465


class Notifier(Protocol):
    """Sends messages to one receiver. `name` is its name in errors, without anything that may be a
    secret; `identity` tells it from other receivers.
    """

    name: str
    identity: str

    def notify(self, message: AlertMessage) -> None:
        """Send a message. TargetUnavailable if it may succeed later, ConfigurationError if it
        succeeds once the configuration is corrected, DeliveryRefused if it never will.
        """

    def close(self) -> None: ...


def make_notifier(receiver: AlertReceiver) -> Notifier:
    if isinstance(receiver, Email):
        return EmailNotifier(receiver)
    return WebhookNotifier(receiver.options["endpoint"])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _is_loopback(server: smtplib.SMTP) -> bool:
    return (
        server.sock is not None and ipaddress.ip_address(server.sock.getpeername()[0]).is_loopback
    )


class WebhookNotifier:
    """Sends messages as signed POST requests."""

    def __init__(self, endpoint: WebhookEndpoint) -> None:
        self.name = f"the webhook {endpoint.name}"
        self.identity = f"webhook.{_digest(endpoint.url)}"
        self._sender = WebhookSender(endpoint)

    def notify(self, message: AlertMessage) -> None:
        self._sender.send(message.body(), message.id)

    def close(self) -> None:
        self._sender.close()


class EmailNotifier:
    """Sends messages as mail, each over a connection of its own: messages are few, and servers
    close idle connections.
    """

    def __init__(self, mail: Email) -> None:
        self._mail = mail
        self._url = urlsplit(mail.url)
        self.name = f"the mail server {self._url.hostname}"
        self.identity = f"email.{_digest(' '.join((mail.url, *mail.to)))}"

    def close(self) -> None:
        """Nothing is open between messages."""

    def notify(self, message: AlertMessage) -> None:
        try:
            with self._connect() as server:
                server.send_message(self._compose(message))
        except smtplib.SMTPRecipientsRefused as error:
            codes = {code for code, _ in error.recipients.values()}
            if all(code >= 500 for code in codes):
                raise DeliveryRefused(
                    f"{self.name} accepts no mail for {', '.join(error.recipients)}"
                ) from None
            raise self._unavailable(
                f"it refuses the recipients for now ({', '.join(map(str, sorted(codes)))})"
            ) from None
        except smtplib.SMTPAuthenticationError as error:
            raise ConfigurationError(
                f"{self.name} refuses the login: {error.smtp_code}.",
                fix="check the user and the password.",
            ) from None
        except smtplib.SMTPResponseException as error:
            text = (
                error.smtp_error.decode(errors="replace")
                if isinstance(error.smtp_error, bytes)
                else str(error.smtp_error)
            )
            if error.smtp_code >= 500:
                raise DeliveryRefused(
                    f"{self.name} answers {error.smtp_code}: {text[:200]}"
                ) from None
            raise self._unavailable(f"it answers {error.smtp_code}: {text[:200]}") from None
        except (smtplib.SMTPException, OSError) as error:
            raise self._unavailable(str(error) or type(error).__name__) from None

    def _connect(self) -> smtplib.SMTP:
        host, port, timeout_s = self._url.hostname or "", self._url.port, self._mail.timeout_s
        if self._url.scheme == "smtps":
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                host, port or _SMTPS_PORT, timeout=timeout_s, context=ssl.create_default_context()
            )
        else:
            server = smtplib.SMTP(host, port or _SUBMISSION_PORT, timeout=timeout_s)
        try:
            self._authenticate(server)
        except BaseException:
            server.close()
            raise
        return server

    def _authenticate(self, server: smtplib.SMTP) -> None:
        """Start TLS if the server supports it, and log in. A password is never sent in the clear,
        except to this machine.
        """
        server.ehlo_or_helo_if_needed()
        if self._url.scheme == "smtp" and server.has_extn("starttls"):
            server.starttls(context=ssl.create_default_context())
        user = unquote(self._url.username or "")
        if user and self._mail.password is not None:
            if not isinstance(server.sock, ssl.SSLSocket) and not _is_loopback(server):
                raise ConfigurationError(
                    f"{self.name} has no STARTTLS: the password would go there in the clear.",
                    fix="use a server that has it, or smtps://….",
                )
            server.login(user, secret("password", self._mail.password))

    def _compose(self, message: AlertMessage) -> EmailMessage:
        """The mail of a message. Its Message-ID is the message's id, by which programs recognise a
        repeat.
        """
        mail = EmailMessage()
        mail["From"] = self._mail.sender
        mail["To"] = ", ".join(self._mail.to)
        mail["Subject"] = message.subject()
        mail["Message-ID"] = f"<{message.id}@headrace>"
        mail["Date"] = message.at
        mail.set_content(message.text())
        return mail

    def _unavailable(self, why: str) -> TargetUnavailable:
        return TargetUnavailable(
            f"{self.name} cannot be notified: {why}.",
            fix="check that it runs and can be reached.",
        )


# Senders


logger = logging.getLogger("headrace.alerts")
GIVE_UP_US = 24 * 3600 * 1_000_000
POLL_S = 0.1
_READ_MESSAGES = 100


@dataclass
class SenderStatus:
    """The counts and the last error of an alert's sender."""

    sent: int = 0
    refused: int = 0
    given_up: int = 0
    failures: int = 0
    is_open: bool = False
    """Whether the circuit breaker is open: nothing is sent for a while."""
    error: str | None = None


class AlertSender:
    """Sends the messages of one alert to one receiver. A new receiver gets the messages from now
    on.
    """

    def __init__(
        self,
        log: Log,
        pipeline: str,
        alert: Alert,
        notifier: Notifier,
        *,
        breaker: CircuitBreaker,
    ) -> None:
        self.log = log
        self.pipeline = pipeline
        self.alert = alert
        self.status = SenderStatus()
        self._notifier = notifier
        self._breaker = breaker
        self._note = f"alerting.{pipeline}.{alert.name}.{notifier.identity}"
        self._transaction: Transaction | None = None
        self._next = 0

    @classmethod
    def open(
        cls,
        log: Log,
        pipeline: str,
        alert: Alert,
        receiver: AlertReceiver,
        *,
        breaker: CircuitBreaker | None = None,
    ) -> Self:
        """Create the topic of alerts if it is missing, and store from where the receiver reads."""
        log.create_topic(TOPIC, SCHEMA, exist_ok=True)
        sender = cls(
            log, pipeline, alert, make_notifier(receiver), breaker=breaker or CircuitBreaker()
        )
        stored = log.note(sender._note)
        sender._next = int(stored) if stored is not None else log.end_offsets(TOPIC)[0]
        sender._store_offset(sender._next)
        return sender

    def run(self, stop: Event, *, until_caught_up: bool = False) -> None:
        """Send messages until `stop` is set, or until those that exist now have been sent."""
        goal = self.log.end_offsets(TOPIC)[0] if until_caught_up else None
        try:
            while not stop.is_set():
                if not self._step(stop):
                    stop.wait(POLL_S)
                if goal is not None and (self._next >= goal or self._breaker.is_open):
                    return
        finally:
            self._notifier.close()

    def _step(self, stop: Event) -> bool:
        """Send the messages after the offset, one after the other, until one fails. Returns whether
        there were any.
        """
        end = self.log.end_offsets(TOPIC)[0]
        if self._next >= end:
            return False
        stop_offset = min(end, self._next + _READ_MESSAGES)
        for batch in self.log.read(TOPIC, 0, self._next, stop_offset):
            for row in batch.to_pylist():
                if stop.is_set() or not self._handle(row, stop):
                    return True
                self._next = row[OFFSET_COLUMN] + 1
        self._next = stop_offset
        return True

    def _handle(self, row: dict[str, object], stop: Event) -> bool:
        """Send a message if it is one of this alert. False if it must be tried again."""
        message = AlertMessage.from_row(row)
        is_own = (message.pipeline, message.alert) == (self.pipeline, self.alert.name)
        if not is_own or message.is_silenced:
            return True
        if stop.wait(self._breaker.wait_s()):
            return False
        try:
            self._notifier.notify(message)
        except (DeliveryRefused, TargetUnavailable, ConfigurationError) as error:
            if not self._give_up(message, error):
                return False
        else:
            self._breaker.record_success()
            self.status.sent += 1
            self.status.failures = 0
            self.status.is_open = False
            self.status.error = None
        self._store_offset(int(str(row[OFFSET_COLUMN])) + 1)
        return True

    def _give_up(self, message: AlertMessage, error: Exception) -> bool:
        """Turn a message that was refused, or that is too old, into a dead letter. False if it is
        to be tried again.
        """
        reason = (
            error.message
            if isinstance(error, TargetUnavailable | ConfigurationError)
            else str(error)
        )
        is_refused = isinstance(error, DeliveryRefused)
        is_old = time.time_ns() // 1_000 - to_time_us(message.at) > GIVE_UP_US
        if is_refused or is_old:
            row = pa.RecordBatch.from_pylist([message.row()], self.log.topic(TOPIC).arrow_schema)
            dead_letters.divert(
                self.log,
                TOPIC,
                [
                    dead_letters.DeadLetter(
                        f"alert {self.alert.name}, {self._notifier.name}",
                        reason,
                        row=dead_letters.rows_to_json(row)[0],
                    )
                ],
            )
            self.status.refused += is_refused
            self.status.given_up += is_old and not is_refused
            return True
        self._breaker.record_failure(error.wait_s if isinstance(error, TargetUnavailable) else 0.0)
        self.status.failures = self._breaker.failures
        self.status.is_open = self._breaker.is_open
        self.status.error = reason
        logger.warning(
            "The alert %s could not be sent: %s\nTrying again in %.1f s.",
            self.alert.name,
            reason,
            self._breaker.wait_s(),
        )
        return False

    def _store_offset(self, offset: int) -> None:
        self._transaction = (
            self._transaction.next()
            if self._transaction is not None
            else self.log.transaction(self._note)
        )
        with self._transaction as tx:
            tx.set_note(self._note, str(offset))
