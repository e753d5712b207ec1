"""The target `webhook`: rows are posted to a receiver, at least once (`at_least_once`).

A request has up to `request_rows` rows:

    {"table": "orders", "topic": "orders", "rows": [
        {"id": "…-0-17", "partition": 0, "offset": 17, "change": "upsert", "row": {…}}]}

Every request has a key by which the receiver can drop repeats (`Idempotency-Key`, and the same as
`webhook-id`). With a secret it is signed according to the Standard Webhooks convention, for which
most languages have libraries: `webhook-signature: v1,` followed by base64 of HMAC-SHA256 over
"id.timestamp.body".

The response decides what happens:

- 2xx: delivered.
- 408, 425, 429, 5xx, no response in time, or one that is not HTTP: `TargetUnavailable`, with the
  time that the receiver asks us to wait.
- 401, 403, 404, 405, 407, 410 and redirects, which are never followed: the address or the
  credentials are wrong, `ConfigurationError`.
- Any other 4xx: the receiver refuses this request, `DeliveryRefused`.

`WebhookSender` is also used by alerts (`headrace.alerts.delivery`). The gateway that receives
webhooks is `headrace.gateways.http_gateway`.
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
from http import HTTPStatus
from ipaddress import ip_network
from threading import Event, Timer
from urllib.parse import SplitResult, urlsplit

import pyarrow as pa

from headrace.errors import ConfigurationError, InputError, NotSupported, TargetUnavailable
from headrace.log.api import Closeable
from headrace.public_addresses import Network, is_in, is_public, resolved_addresses
from headrace.retry import Backoff, retry_after_s
from headrace.secrets import is_named, secret
from headrace.sinks.at_least_once import AtLeastOnceTarget, OutgoingRow
from headrace.sinks.base import RowsRefused, SinkSpec
from headrace.sinks.batch import TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint

# Addresses: public ones, and internal networks that were allowed by name

ALLOWED_VARIABLE = "HEADRACE_WEBHOOK_INTERNAL"


def allowed_networks(declared: Iterable[str]) -> tuple[Network, ...]:
    """Return the internal networks that may be reached: those declared, and those listed in the
    environment.
    """
    listed = [part.strip() for part in os.environ.get(ALLOWED_VARIABLE, "").split(",")]
    try:
        networks = [*declared, *filter(None, listed)]
        return tuple(ip_network(network, strict=False) for network in networks)
    except ValueError as error:
        raise InputError(
            f"An internal network that webhooks may be sent to is written as 10.1.0.0/16: {error}.",
            fix=f"correct internal=[…] or {ALLOWED_VARIABLE}.",
        ) from None


def resolve(host: str, port: int, allowed: Sequence[Network]) -> list[str]:
    """Return the addresses of a host, all of which may be connected to.

    Raises:
        TargetUnavailable: The name cannot be resolved.
        ConfigurationError: One of the addresses is internal and not allowed.
    """
    try:
        addresses = resolved_addresses(host, port)
    except OSError as error:
        raise TargetUnavailable(
            f"The name {host!r} cannot be resolved: {error}.",
            fix="see that the name is right, and that there is a network.",
        ) from error
    for address in addresses:
        if not is_public(address) and not is_in(address, allowed):
            raise ConfigurationError(
                f"{host!r} is {address}, which is no public address: webhooks are not sent to"
                " internal ones unless that is allowed.",
                fix=(
                    f"allow it, with internal=['{address}'] in hr.sinks.webhook(…), or"
                    f" {ALLOWED_VARIABLE}={address} in the environment; a network is written as"
                    " 10.1.0.0/16."
                ),
            )
    return list(map(str, addresses))


# Requests

SECRET_VARIABLE = "HEADRACE_WEBHOOK_SECRET"  # noqa: S105 - where it is, not what it is
MAX_RESPONSE_BYTES = 64 << 10
REQUEST_ATTEMPTS = 4
"""How often a request is sent to a receiver that has taken others, before the session ends."""
REQUEST_BACKOFF = Backoff(first_s=0.05, longest_s=1.0)
_TEMPORARY = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
_WRONG_ENDPOINT = {
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.METHOD_NOT_ALLOWED,
    HTTPStatus.PROXY_AUTHENTICATION_REQUIRED,
    HTTPStatus.GONE,
}
_RESERVED_HEADERS = {
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


class DeliveryRefused(Exception):
    """The receiver refuses this request for good. The text is the receiver's own."""


@dataclass(frozen=True)
class WebhookEndpoint:
    """Where requests are sent, and how.

    Attributes:
        url: The address, without user and password.
        secret: Where the signing secret is stored: `env:NAME` or `file:PATH`.
        headers: Further headers; values may be `env:NAME` or `file:PATH`.
        timeout_s: The longest time for a whole request.
        internal: Networks that are not public and yet allowed.
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
                f"{self.url!r} is not the address of a webhook.",
                fix=(
                    "write it as https://example.com/hook, with spaces as %20 and letters beyond"
                    " ASCII"
                    " percent-encoded too."
                ),
            )
        if parts.username or parts.password:
            raise InputError(
                "A webhook's URL must not contain user and password.",
                fix="give headers={'Authorization': 'env:NAME'}.",
            )
        if self.secret is not None and not is_named(self.secret):
            raise InputError(
                "A webhook's secret must not be written into a program.",
                fix=f"say where it is: secret='env:{SECRET_VARIABLE}', or secret='file:PATH'.",
            )
        if reserved := sorted(name for name in self.headers if name.lower() in _RESERVED_HEADERS):
            raise InputError(
                f"The header {reserved[0]!r} is set by Headrace itself.", fix="leave it out."
            )
        if self.timeout_s <= 0:
            raise InputError("A webhook's timeout must be longer than 0.")

    @property
    def parts(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def name(self) -> str:
        """The address for messages: without path and query, which may contain a token."""
        return f"{self.parts.scheme}://{self.parts.netloc}"


class WebhookSender(Closeable):
    """Sends requests to one endpoint, one at a time, over a connection that is kept alive."""

    def __init__(self, endpoint: WebhookEndpoint) -> None:
        self.endpoint = endpoint
        parts = endpoint.parts
        self._host = parts.hostname or ""
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._allowed = allowed_networks(endpoint.internal)
        self._signing_key: bytes | None = None
        if endpoint.secret:
            self._signing_key = _signing_key(secret("secret", endpoint.secret))
        self._headers = {
            name: _checked_header(name, secret(name, value))
            for name, value in endpoint.headers.items()
        }
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def send(self, body: bytes, key: str) -> None:
        """Send a request, and return when the receiver has taken it.

        Args:
            body: JSON.
            key: The request's id, the same whenever it is sent.

        Raises:
            TargetUnavailable: The receiver is away; the request may be sent again.
            ConfigurationError: The address or the credentials are wrong.
            DeliveryRefused: The receiver refuses this request for good.
        """
        was_connected = self._connection is not None and self._connection.sock is not None
        try:
            self._check_response(*self._exchange(body, key))
        except (ConnectionError, http.client.HTTPException) as error:
            self.close()
            if not was_connected:
                raise TargetUnavailable(
                    f"{self.endpoint.name} closes the connection, or does not answer in HTTP:"
                    f" {str(error) or type(error).__name__}.",
                    fix="see that the receiver runs.",
                ) from error
            self.send(body, key)  # it had closed the idle connection
        except OSError as error:
            self.close()
            raise TargetUnavailable(
                f"{self.endpoint.name} does not answer: {error}.",
                fix="see that the receiver runs and can be reached.",
            ) from error

    def _exchange(self, body: bytes, key: str) -> tuple[int, http.client.HTTPMessage, str]:
        """Send a request and read the response: its status, headers and text."""
        connection = self._connect()
        is_late = Event()
        deadline = Timer(self.endpoint.timeout_s, _cut, (connection.sock, is_late))
        deadline.daemon = True
        deadline.start()
        try:
            connection.request("POST", self._path, body, self._signed_headers(body, key))
            response = connection.getresponse()
            text = response.read(MAX_RESPONSE_BYTES)
            if not response.isclosed():
                self.close()
        except (OSError, http.client.HTTPException):
            if is_late.is_set():
                raise TimeoutError(
                    f"it took longer than {self.endpoint.timeout_s:g} seconds"
                ) from None
            raise
        finally:
            deadline.cancel()
        return response.status, response.headers, text.decode(errors="replace").strip()

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is not None and self._connection.sock is not None:
            return self._connection
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=self.endpoint.timeout_s
        )
        connection.auto_open = 0  # it would resolve the name by itself
        connection.default_port = 443 if self._is_tls else 80
        connection.sock = self._open_socket()
        self._connection = connection
        return connection

    def _open_socket(self) -> socket.socket:
        failure: OSError = ConnectionError("it has no address")
        for address in resolve(self._host, self._port, self._allowed):
            try:
                plain = socket.create_connection((address, self._port), self.endpoint.timeout_s)
            except OSError as error:
                failure = error
                continue
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._with_tls(plain) if self._is_tls else plain
        raise TargetUnavailable(
            f"{self.endpoint.name} cannot be connected to: {failure}.",
            fix="see that the receiver runs and can be reached.",
        ) from failure

    def _with_tls(self, plain: socket.socket) -> socket.socket:
        try:
            return ssl.create_default_context().wrap_socket(plain, server_hostname=self._host)
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise ConfigurationError(
                f"The certificate of {self.endpoint.name} cannot be trusted:"
                f" {error.verify_message}.",
                fix="renew it; for a certificate authority of your own set SSL_CERT_FILE.",
            ) from error
        except OSError:
            plain.close()
            raise

    def _signed_headers(self, body: bytes, key: str) -> dict[str, str]:
        at_s = str(int(time.time()))
        headers = {
            **self._headers,
            "Content-Type": "application/json",
            "User-Agent": "headrace",
            "Idempotency-Key": key,
            "webhook-id": key,
            "webhook-timestamp": at_s,
        }
        if self._signing_key is not None:
            headers["webhook-signature"] = signature(self._signing_key, key, at_s, body)
        return headers

    def _check_response(self, status: int, headers: http.client.HTTPMessage, text: str) -> None:
        response = f"{self.endpoint.name} answers {status}{': ' + text[:200] if text else ''}"
        if 200 <= status < 300:
            return
        if 300 <= status < 400:
            raise ConfigurationError(
                f"{response}. Redirects are not followed.",
                fix=(
                    f"give the final address: {headers.get('Location', 'the response names none')}."
                ),
            )
        if status in _WRONG_ENDPOINT:
            raise ConfigurationError(
                f"{response}.",
                fix="check the address, the secret and the headers; until then nothing is sent.",
            )
        if status in _TEMPORARY or status >= 500 or status < 200:
            raise TargetUnavailable(
                f"{response}.",
                fix="nothing, if it passes by itself; else look at the receiver.",
                wait_s=retry_after_s(headers.get("Retry-After")),
            )
        raise DeliveryRefused(response)


def _has_port(parts: SplitResult) -> bool:
    """Return whether the port, if there is one, is a valid number."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def _checked_header(name: str, value: str) -> str:
    if not name.isascii() or not value.isascii() or not (name + value).isprintable():
        raise ConfigurationError(
            f"The header {name!r} has a name or a value that is not allowed in HTTP.",
            fix="use printable ASCII, in one line.",
        )
    return value


def signature(key: bytes, request_id: str, at_s: str, body: bytes) -> str:
    """Return the value of `webhook-signature`."""
    digest = hmac.digest(key, f"{request_id}.{at_s}.".encode() + body, "sha256")
    return f"v1,{base64.b64encode(digest).decode()}"


def _signing_key(text: str) -> bytes:
    """Return the key of a secret: `whsec_…` is base64, by the convention; others are the key."""
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
            "The webhook's secret begins with whsec_, but what follows is not base64.",
            fix="copy it again.",
        ) from None


def _cut(connected: socket.socket, is_late: Event) -> None:
    """Shut a socket down when a request has taken too long. The socket's own timeout is not enough:
    a receiver that sends a byte now and then never exceeds it.
    """
    is_late.set()
    with suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


class WebhookTarget(AtLeastOnceTarget):
    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        endpoint: WebhookEndpoint = sink.options["endpoint"]
        digest = hashlib.sha256(endpoint.url.encode()).hexdigest()[:12]
        identity = sink.name or f"{sink.table or shape.topic}.webhook.{digest}"
        super().__init__(sink, shape, identity, request_rows=sink.options["request_rows"])
        self._sender = WebhookSender(endpoint)
        self._has_answered = False
        """Whether the receiver has taken a request since the target was opened."""

    def close(self) -> None:
        self._sender.close()

    def _post(self, rows: pa.Table) -> None:
        outgoing = self._outgoing(rows)
        ids = [row.id for row in outgoing]
        key = ids[0] if len(ids) == 1 else hashlib.sha256(json.dumps(ids).encode()).hexdigest()
        try:
            self._send_request(self._body(outgoing), key)
        except DeliveryRefused as error:
            if rows.num_rows == 1:
                self._record_refused(str(error))
            raise RowsRefused(str(error)) from error
        self._record_taken()

    def _send_request(self, body: bytes, key: str) -> None:
        """Send a request, again after a short pause if the receiver fails. A receiver that has not
        taken any request yet is away: then the session ends, and pauses between sessions grow.
        """
        for attempt in range(1, REQUEST_ATTEMPTS + 1):
            try:
                self._sender.send(body, key)
            except TargetUnavailable as error:
                pause_s = REQUEST_BACKOFF.pause_s(attempt, min_s=error.wait_s)
                is_last = not self._has_answered or attempt == REQUEST_ATTEMPTS
                if is_last or pause_s > REQUEST_BACKOFF.longest_s or self.stopped.wait(pause_s):
                    raise
            else:
                self._has_answered = True
                return

    def _body(self, rows: Sequence[OutgoingRow]) -> bytes:
        """Return the JSON of a request. The rows are JSON already, and are put in as they are."""
        entries = []
        for row in rows:
            attributes = {
                "id": row.id,
                "partition": row.partition,
                "offset": row.offset,
                "change": row.change,
            }
            head = json.dumps(attributes)[:-1].encode()
            entries.append(head + b', "row": ' + row.json + b"}")
        head = json.dumps({"table": self.table, "topic": self.shape.topic})[:-1].encode()
        return head + b', "rows": [' + b", ".join(entries) + b"]}"

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        raise NotSupported(
            "A webhook's receiver cannot be read back, so it cannot be compared with the log.",
            fix="compare at the receiver, by the rows' ids.",
        )
