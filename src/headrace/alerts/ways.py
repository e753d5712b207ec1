"""How a message reaches its receiver: a signed POST, or a mail. What fails in passing is `TargetUnavailable`, or `ConfigurationError` until somebody mends it; `Refused` is for good."""

from __future__ import annotations

import hashlib
import ipaddress
import smtplib
import ssl
from email.message import EmailMessage
from typing import Protocol
from urllib.parse import unquote, urlsplit

from headrace.alerts.declared import Email, Way
from headrace.alerts.messages import AlertMessage
from headrace.errors import ConfigurationError, TargetUnavailable
from headrace.secret_values import secret
from headrace.sinks.webhook_sending import Receiver, Refused, Sender

_SUBMISSION_PORT, _SMTPS_PORT = 587, 465


class Teller(Protocol):
    """Tells one receiver. `name` says which in messages, without what may be a secret; `identity` tells it from others."""

    name: str
    identity: str

    def tell(self, message: AlertMessage) -> None: ...

    def close(self) -> None: ...


def teller(way: Way) -> Teller:
    return MailTeller(way) if isinstance(way, Email) else WebhookTeller(way.options["receiver"])


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _is_this_machine(server: smtplib.SMTP) -> bool:
    return server.sock is not None and ipaddress.ip_address(server.sock.getpeername()[0]).is_loopback


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
        self.name, self.identity = f"the mail server {self._parts.hostname}", f"email.{_short(' '.join((mail.url, *mail.to)))}"

    def close(self) -> None:
        """Nothing is kept."""

    def tell(self, message: AlertMessage) -> None:
        try:
            with self._connected() as server:
                server.send_message(self._written(message))
        except smtplib.SMTPRecipientsRefused as error:
            codes = {code for code, _ in error.recipients.values()}
            if all(code >= 500 for code in codes):
                raise Refused(f"{self.name} takes no mail for {', '.join(error.recipients)}") from None
            raise self._away(f"it refuses the receivers for now ({', '.join(map(str, sorted(codes)))})") from None
        except smtplib.SMTPAuthenticationError as error:
            raise ConfigurationError(f"{self.name} does not know us: {error.smtp_code}.", fix="check the user and the password.") from None
        except smtplib.SMTPResponseException as error:
            said = error.smtp_error.decode(errors="replace") if isinstance(error.smtp_error, bytes) else str(error.smtp_error)
            if error.smtp_code >= 500:
                raise Refused(f"{self.name} answers {error.smtp_code}: {said[:200]}") from None
            raise self._away(f"it answers {error.smtp_code}: {said[:200]}") from None
        except (smtplib.SMTPException, OSError) as error:
            raise self._away(str(error) or type(error).__name__) from None

    def _connected(self) -> smtplib.SMTP:
        host, port, timeout_s = self._parts.hostname or "", self._parts.port, self._mail.timeout_s
        if self._parts.scheme == "smtps":
            server: smtplib.SMTP = smtplib.SMTP_SSL(host, port or _SMTPS_PORT, timeout=timeout_s, context=ssl.create_default_context())
        else:
            server = smtplib.SMTP(host, port or _SUBMISSION_PORT, timeout=timeout_s)
        try:
            self._introduce(server)
        except BaseException:
            server.close()
            raise
        return server

    def _introduce(self, server: smtplib.SMTP) -> None:
        """With STARTTLS where the server has it. A password is not told to anybody who listens on the way."""
        server.ehlo_or_helo_if_needed()
        if self._parts.scheme == "smtp" and server.has_extn("starttls"):
            server.starttls(context=ssl.create_default_context())
        user = unquote(self._parts.username or "")
        if user and self._mail.password is not None:
            if not isinstance(server.sock, ssl.SSLSocket) and not _is_this_machine(server):
                raise ConfigurationError(f"{self.name} has no STARTTLS: the password would go there in the clear.", fix="use a server that has it, or smtps://….")
            server.login(user, secret("password", self._mail.password))

    def _written(self, message: AlertMessage) -> EmailMessage:
        """The id of the alert is the mail's own, by which programs know a repeat."""
        written = EmailMessage()
        written["From"], written["To"], written["Subject"] = self._mail.sender, ", ".join(self._mail.to), message.subject()
        written["Message-ID"], written["Date"] = f"<{message.id}@headrace>", message.at
        written.set_content(message.text())
        return written

    def _away(self, why: str) -> TargetUnavailable:
        return TargetUnavailable(f"{self.name} cannot be told: {why}.", fix="see that it runs and can be reached.")
