"""The target `webhook`: rows are posted to a receiver, at least once (`noted_target`).

A request has up to `request_rows` rows:

    {"table": "orders", "topic": "orders", "rows": [{"id": "…-0-17", "partition": 0, "offset": 17,
    "change": "upsert", "row": {…}}]}
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http
import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from threading import Event, Timer
from urllib.parse import SplitResult, urlsplit

import pyarrow as pa

from headrace.errors import ConfigurationError, InputError, NotSupported, TargetUnavailable
from headrace.log.api import Closing
from headrace.secrets import is_named, secret
from headrace.sinks.at_least_once import NotedTarget
from headrace.sinks.base import Applied, RowsRefused, Shape, SinkSpec

# Which addresses a webhook may be sent to: those of the public internet, and internal ones that
# were allowed by name.
#
# A name is resolved once for a connection, all its addresses are judged, and the connection goes to
# one of exactly these: a name that resolves differently a moment later leads nowhere else.


ALLOWED_VARIABLE = "HEADRACE_WEBHOOK_INTERNAL"
Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address
_TRANSLATED = ip_network("64:ff9b::/96")  # an IPv4 address stands in the last four bytes


def allowed_networks(declared: Iterable[str]) -> tuple[Network, ...]:
    """Internal networks that may be reached: those declared, and those of the environment."""
    given = [
        *declared,
        *filter(None, (part.strip() for part in os.environ.get(ALLOWED_VARIABLE, "").split(","))),
    ]
    try:
        return tuple(ip_network(each, strict=False) for each in given)
    except ValueError as error:
        raise InputError(
            f"An internal network that webhooks may be sent to is written as 10.1.0.0/16: {error}.",
            fix=f"correct internal=[…] or {ALLOWED_VARIABLE}.",
        ) from None


def resolved(host: str, port: int, allowed: Sequence[Network]) -> list[str]:
    """The addresses of a host, all of which may be connected to."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TargetUnavailable(
            f"The name {host!r} cannot be resolved: {error}.",
            fix="see that the name is right, and that there is a network.",
        ) from error
    addresses = list(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))
    for text in addresses:
        if not _may_be_reached(ip_address(text), allowed):
            raise ConfigurationError(
                f"{host!r} is {text}, which is no public address: webhooks are not sent to internal"
                " ones unless that was allowed.",
                fix=(
                    f"allow it, with internal=['{text}'] in hr.sinks.webhook(…), or"
                    f" {ALLOWED_VARIABLE}={text} in the environment; a network is written as"
                    " 10.1.0.0/16."
                ),
            )
    return addresses


def _may_be_reached(address: Address, allowed: Sequence[Network]) -> bool:
    meant = _meant(address)
    return (meant.is_global and not meant.is_multicast) or any(
        each in network
        for network in allowed
        for each in {address, meant}
        if each.version == network.version
    )


def _meant(address: Address) -> Address:
    """The IPv4 address that an IPv6 one may stand for."""
    if isinstance(address, IPv4Address):
        return address
    if address in _TRANSLATED:
        return IPv4Address(address.packed[-4:])
    inner = (
        address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
    )
    return inner or address


# Webhooks out: one signed POST after the other to one receiver. The sink `webhook` sends rows
# through it, and whatever else has something to tell can do so too.
#
# Every request carries a key by which the receiver can drop repeats (`Idempotency-Key`, and the
# same as `webhook-id`). With a secret it is signed as the Standard Webhooks convention has it, for
# which there are libraries in most languages: `webhook-signature: v1,` and base64 of HMAC-SHA256
# over "id.timestamp.body".
#
# What the answer means: 2xx is delivered. 408, 425, 429, 5xx, no answer in time, and nonsense pass:
# `TargetUnavailable`, with the time that the receiver asks us to wait. 401, 403, 404, 405, 407, 410
# and redirects, which are never followed, are about the receiver as a whole: `ConfigurationError`.
# Any other 4xx refuses this request: `Refused`.


SECRET_VARIABLE = "HEADRACE_WEBHOOK_SECRET"  # noqa: S105 - where it is, not what it is
MAX_ANSWER_BYTES = 64 << 10
LONGEST_WAIT_S = 3600.0
_PASSING = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
_ABOUT_ALL = {
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.METHOD_NOT_ALLOWED,
    HTTPStatus.PROXY_AUTHENTICATION_REQUIRED,
    HTTPStatus.GONE,
}
_OURS = {
    "host",
    "content-type",
    "content-length",
    "idempotency-key",
    "webhook-id",
    "webhook-timestamp",
    "webhook-signature",
    "transfer-encoding",
    "connection",
}


class Refused(Exception):
    """The receiver does not want this request, now or later. The text is its own."""


@dataclass(frozen=True)
class Receiver:
    """Where to send, and how. `secret` and the values of `headers` may be `env:NAME` or
    `file:PATH`; `internal` are networks that are not public and yet allowed.
    """

    url: str
    secret: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 10.0
    internal: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parts = self.parts
        if (
            parts.scheme not in {"http", "https"}
            or not parts.hostname
            or not _has_port(parts)
            or not all("!" <= char <= "~" for char in self.url)
        ):
            raise InputError(
                f"{self.url!r} is no address of a webhook.",
                fix=(
                    "write it as https://example.com/hook; spaces and letters beyond ASCII as %20"
                    " and the like."
                ),
            )
        if parts.username or parts.password:
            raise InputError(
                "User and password do not belong into a webhook's URL.",
                fix="give headers={'Authorization': 'env:NAME'}.",
            )
        if self.secret is not None and not is_named(self.secret):
            raise InputError(
                "A webhook's secret does not belong into a program's text.",
                fix=f"name the place: secret='env:{SECRET_VARIABLE}', or secret='file:PATH'.",
            )
        if taken := sorted(name for name in self.headers if name.lower() in _OURS):
            raise InputError(f"The header {taken[0]!r} is set by us.", fix="leave it out.")
        if self.timeout_s <= 0:
            raise InputError("A webhook's timeout must be longer than nothing.")

    @property
    def parts(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def name(self) -> str:
        """For messages: without path and query, in which there may be a token."""
        return f"{self.parts.scheme}://{self.parts.netloc}"


class Sender(Closing):
    """Sends to one receiver, one request at a time, over a connection that is kept while it
    lasts.
    """

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        parts = receiver.parts
        self._host, self._is_tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._allowed = allowed_networks(receiver.internal)
        self._secret = _key_of(secret("secret", receiver.secret)) if receiver.secret else None
        self._headers = {
            name: _header(name, secret(name, value)) for name, value in receiver.headers.items()
        }
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def send(self, body: bytes, key: str) -> None:
        """Returns when the receiver has taken it. One that closed the kept connection is connected
        to again.
        """
        is_kept = self._connection is not None and self._connection.sock is not None
        try:
            self._judge(*self._asked(body, key))
        except (ConnectionError, http.client.HTTPException) as error:
            self.close()
            if not is_kept:
                raise TargetUnavailable(
                    f"{self.receiver.name} breaks off, or answers what is no HTTP:"
                    f" {str(error) or type(error).__name__}.",
                    fix="see that the receiver runs.",
                ) from error
            self.send(body, key)
        except OSError as error:
            self.close()
            raise TargetUnavailable(
                f"{self.receiver.name} does not answer: {error}.",
                fix="see that the receiver runs and can be reached.",
            ) from error

    def _asked(self, body: bytes, key: str) -> tuple[int, http.client.HTTPMessage, str]:
        connection = self._connected()
        is_late = Event()
        deadline = Timer(self.receiver.timeout_s, _cut, (connection.sock, is_late))
        deadline.daemon = True
        deadline.start()
        try:
            connection.request("POST", self._path, body, self._signed(body, key))
            answer = connection.getresponse()
            text = answer.read(MAX_ANSWER_BYTES)
            if not answer.isclosed():
                self.close()
        except (OSError, http.client.HTTPException):
            if is_late.is_set():
                raise TimeoutError(
                    f"it took longer than {self.receiver.timeout_s:g} seconds"
                ) from None
            raise
        finally:
            deadline.cancel()
        return answer.status, answer.headers, text.decode(errors="replace").strip()

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is not None and self._connection.sock is not None:
            return self._connection
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=self.receiver.timeout_s
        )
        connection.auto_open = 0  # it would resolve the name by itself
        connection.default_port = 443 if self._is_tls else 80
        connection.sock = self._socket()
        self._connection = connection
        return connection

    def _socket(self) -> socket.socket:
        failure: OSError = ConnectionError("it has no address")
        for address in resolved(self._host, self._port, self._allowed):
            try:
                plain = socket.create_connection((address, self._port), self.receiver.timeout_s)
            except OSError as error:
                failure = error
                continue
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._wrapped(plain) if self._is_tls else plain
        raise TargetUnavailable(
            f"{self.receiver.name} cannot be connected to: {failure}.",
            fix="see that the receiver runs and can be reached.",
        ) from failure

    def _wrapped(self, plain: socket.socket) -> socket.socket:
        try:
            return ssl.create_default_context().wrap_socket(plain, server_hostname=self._host)
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise ConfigurationError(
                f"The certificate of {self.receiver.name} is not to be trusted:"
                f" {error.verify_message}.",
                fix="renew it; for a certificate authority of your own set SSL_CERT_FILE.",
            ) from error
        except OSError:
            plain.close()
            raise

    def _signed(self, body: bytes, key: str) -> dict[str, str]:
        at_s = str(int(time.time()))
        headers = {
            **self._headers,
            "Content-Type": "application/json",
            "User-Agent": "headrace",
            "Idempotency-Key": key,
            "webhook-id": key,
            "webhook-timestamp": at_s,
        }
        if self._secret is not None:
            headers["webhook-signature"] = signature(self._secret, key, at_s, body)
        return headers

    def _judge(self, status: int, headers: http.client.HTTPMessage, text: str) -> None:
        said = f"{self.receiver.name} answers {status}{': ' + text[:200] if text else ''}"
        if 200 <= status < 300:
            return
        if 300 <= status < 400:
            raise ConfigurationError(
                f"{said}. Redirects are not followed.",
                fix=f"give the address itself: {headers.get('Location', 'the answer names none')}.",
            )
        if status in _ABOUT_ALL:
            raise ConfigurationError(
                f"{said}.",
                fix=(
                    "check the address, the secret and the headers; nothing more is sent until"
                    " then."
                ),
            )
        if status in _PASSING or status >= 500 or status < 200:
            raise TargetUnavailable(
                f"{said}.",
                fix="nothing, if it passes; else look at the receiver.",
                wait_s=waiting_s(headers.get("Retry-After")),
            )
        raise Refused(said)


def _has_port(parts: SplitResult) -> bool:
    """Whether what stands there as a port is one."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def _header(name: str, value: str) -> str:
    if not name.isascii() or not value.isascii() or not (name + value).isprintable():
        raise ConfigurationError(
            f"The header {name!r} has a name or a value that HTTP cannot carry.",
            fix="use printable ASCII, in one line.",
        )
    return value


def signature(key: bytes, identity: str, at_s: str, body: bytes) -> str:
    signed = hmac.digest(key, f"{identity}.{at_s}.".encode() + body, "sha256")
    return f"v1,{base64.b64encode(signed).decode()}"


def _key_of(text: str) -> bytes:
    """`whsec_…` is base64, as the convention has it; anything else stands for itself."""
    if not text:
        raise ConfigurationError(
            "The webhook's secret is empty.",
            fix="make one: python -c 'import secrets; print(secrets.token_urlsafe())'",
        )
    try:
        return (
            base64.b64decode(text.removeprefix("whsec_"), validate=True)
            if text.startswith("whsec_")
            else text.encode()
        )
    except ValueError:
        raise ConfigurationError(
            "The webhook's secret begins with whsec_, and what follows is no base64.",
            fix="copy it anew.",
        ) from None


def waiting_s(retry_after: str | None) -> float:
    """What `Retry-After` asks for, in seconds or as a date; at most an hour."""
    if retry_after is None:
        return 0.0
    try:
        wait_s = (
            float(retry_after)
            if retry_after.strip().isdigit()
            else parsedate_to_datetime(retry_after).timestamp() - time.time()
        )
    except (ValueError, TypeError):
        return 0.0
    return min(max(wait_s, 0.0), LONGEST_WAIT_S)


def _cut(connected: socket.socket, is_late: Event) -> None:
    """Ends whoever reads from it: a receiver that sends a byte now and then would never be too slow
    for a socket's own timeout.
    """
    is_late.set()
    with suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


class WebhookTarget(NotedTarget):
    def __init__(self, sink: SinkSpec, shape: Shape) -> None:
        receiver: Receiver = sink.options["receiver"]
        identity = (
            sink.name
            or f"{sink.table or shape.topic}.webhook.{hashlib.sha256(receiver.url.encode()).hexdigest()[:12]}"
        )
        super().__init__(sink, shape, identity, request_rows=sink.options["request_rows"])
        self._sender = Sender(receiver)

    def close(self) -> None:
        self._sender.close()

    def _post(self, rows: pa.Table) -> None:
        ids, body = self._request(rows)
        try:
            self._sender.send(
                body,
                ids[0] if len(ids) == 1 else hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
            )
        except Refused as error:
            if rows.num_rows == 1:
                self._count_refused(str(error))
            raise RowsRefused(str(error)) from error
        self._taken()

    def _request(self, rows: pa.Table) -> tuple[list[str], bytes]:
        """The rows' ids, and the request's body."""
        ids, entries = [], []
        for identity, partition, offset, change, text in self._messages(rows):
            ids.append(identity)
            head = json.dumps(
                {"id": identity, "partition": partition, "offset": offset, "change": change}
            )[:-1]
            entries.append(head.encode() + b', "row": ' + text + b"}")
        head = json.dumps({"table": self.table, "topic": self.shape.topic})[:-1]
        return ids, head.encode() + b', "rows": [' + b", ".join(entries) + b"]}"

    def contents(self) -> tuple[Applied | None, Iterator[pa.Table]]:
        raise NotSupported(
            "A webhook's receiver cannot be read back, so there is nothing to compare with the"
            " log.",
            fix="compare at the receiver, by the rows' ids.",
        )
