"""Connections to RabbitMQ, for the gateway that reads a queue (`gateways.amqp_gateway`) and the
sink that publishes to an exchange (`sinks.amqp_target`). A password in the address is never shown.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import ConfigurationError, HeadraceError, InputError, MissingExtra, RetryError
from headrace.secrets import is_named, secret

logger = logging.getLogger("headrace.amqp")
TIMEOUT_S = 10.0
HEARTBEAT_S = 30


def driver() -> Any:
    """Import pika and return it."""
    try:
        import pika
        import pika.exceptions
    except ImportError:
        raise MissingExtra("pika", "amqp") from None
    return pika


def check_url(url: str) -> str:
    """Return a URL such as `amqp://user@host:5672/vhost`, or the name of one (`env:NAME`,
    `file:PATH`), if it is well formed.
    """
    if not is_named(url) and urlsplit(url).scheme not in {"amqp", "amqps"}:
        raise InputError(
            "An address of RabbitMQ begins with amqp:// or amqps://.",
            fix="write amqp://user@host:5672/, or say where it is stored: env:NAME or file:PATH.",
        )
    return url


def shown_address(url: str) -> str:
    """Return an address for messages, without user and password."""
    parts = urlsplit(secret("url", url))
    port = parts.port or (5671 if parts.scheme == "amqps" else 5672)
    return f"{parts.scheme}://{parts.hostname}:{port}"


def connection_parameters(url: str) -> Any:
    """Return pika's parameters for one attempt to connect."""
    parameters = driver().URLParameters(secret("url", check_url(url)))
    parameters.socket_timeout = TIMEOUT_S
    parameters.stack_timeout = TIMEOUT_S
    parameters.blocked_connection_timeout = TIMEOUT_S
    parameters.heartbeat = HEARTBEAT_S
    parameters.retry_delay = 0
    parameters.connection_attempts = 1
    return parameters


def connection_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions with which a connection may fail."""
    from pika.adapters.utils.connection_workflow import AMQPConnectorException

    return (driver().exceptions.AMQPError, AMQPConnectorException, OSError)


def connection_failure(url: str, error: Exception) -> HeadraceError:
    """Return the error to raise when connecting failed: RetryError if the broker is away,
    ConfigurationError if it refuses the user.
    """
    exceptions = driver().exceptions
    refusals = (
        exceptions.ProbableAuthenticationError,
        exceptions.ProbableAccessDeniedError,
        exceptions.AuthenticationError,
    )
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, refusals):
            return ConfigurationError(
                f"{shown_address(url)} refuses the connection: {cause}.",
                fix="check user, password and virtual host.",
            )
    root = causes[-1]
    return RetryError(
        f"{shown_address(url)} cannot be reached: {str(root) or type(root).__name__}.",
        fix="see that RabbitMQ runs, and that the address is right.",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that pika wrapped in it, the innermost last."""
    yield error
    candidates = (
        *getattr(error, "exceptions", ())[-1:],
        getattr(error, "exception", None),
        *error.args[:1],
    )
    inner = next((cause for cause in candidates if isinstance(cause, BaseException)), None)
    if inner is not None:
        yield from _causes(inner)


def connect(url: str) -> Any:
    """Return a blocking connection.

    Raises:
        RetryError: The broker is away.
        ConfigurationError: The broker refuses the user.
    """
    pika = driver()
    try:
        return pika.BlockingConnection(connection_parameters(url), _impl_class=_connection_class())
    except (pika.exceptions.AMQPError, OSError) as error:
        raise connection_failure(url, error) from None


# Messages with headers that pika cannot read


@lru_cache(maxsize=1)
def _connection_class() -> Any:
    """Return pika's connection, but that a message whose headers cannot be read comes without them.

    A header may have a time beyond the year 9999 (milliseconds where AMQP has seconds) or a number
    that is not finite. Pika raises an error for it while it reads from the socket, and the broker
    delivers the message again whenever somebody connects: one such message would stop a queue.
    """
    from pika.adapters.select_connection import SelectConnection
    from pika.connection import Connection

    unreadable = (
        ValueError,
        TypeError,
        ArithmeticError,
        OSError,
        struct.error,
        driver().exceptions.InvalidFieldTypeException,
    )

    read: Callable[[Any], Any] = vars(Connection)["_read_frame"]

    def read_frame(self: Any) -> Any:
        try:
            return read(self)
        except unreadable as error:
            frame = _without_headers(self._frame_buffer)
            if frame is None:
                raise
            logger.warning("The unreadable headers of a message are left out: %s", error)
            return frame

    return type("HeaderTolerantConnection", (SelectConnection,), {"_read_frame": read_frame})


def _without_headers(buffer: bytes) -> tuple[int, Any] | None:
    """Return the size of the frame at the start of a buffer, and the frame without the message's
    headers; None if it is no frame of a message's properties.
    """
    from pika import frame, spec

    kind, channel, size = struct.unpack_from(">BHL", buffer)
    if kind != spec.FRAME_HEADER:
        return None
    stop = spec.FRAME_HEADER_SIZE + size
    content = buffer[spec.FRAME_HEADER_SIZE : stop]
    (body_size,) = struct.unpack_from(">Q", content, 4)
    properties = content[12:]
    (flags,) = struct.unpack_from(">H", properties)
    if not flags & spec.BasicProperties.FLAG_HEADERS:
        return None
    start = 2
    for flag in (
        spec.BasicProperties.FLAG_CONTENT_TYPE,
        spec.BasicProperties.FLAG_CONTENT_ENCODING,
    ):
        if flags & flag:
            start += 1 + properties[start]
    (table_size,) = struct.unpack_from(">I", properties, start)
    remaining = (
        struct.pack(">H", flags & ~spec.BasicProperties.FLAG_HEADERS)
        + properties[2:start]
        + properties[start + 4 + table_size :]
    )
    message = frame.Header(channel, body_size, spec.BasicProperties().decode(remaining))
    return stop + spec.FRAME_END_SIZE, message
