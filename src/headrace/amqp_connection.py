"""Connections to RabbitMQ, for the gateway that reads a queue and the sink that publishes to an exchange. A password in the address is never shown."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from headrace.errors import ConfigurationError, InputError, MissingExtra, RetryError
from headrace.secret_values import is_named, secret

TIMEOUT_S = 10.0
HEARTBEAT_S = 30


def driver() -> Any:
    try:
        import pika
        import pika.exceptions
    except ImportError:
        raise MissingExtra("pika", "amqp") from None
    return pika


def check_url(url: str) -> str:
    """`amqp://user@host:5672/vhost`, or where it is kept: `env:NAME`, `file:PATH`."""
    if not is_named(url) and urlsplit(url).scheme not in {"amqp", "amqps"}:
        raise InputError("An address of RabbitMQ begins with amqp:// or amqps://.", fix="write it as amqp://user@host:5672/, or name its place: env:NAME or file:PATH.")
    return url


def shown(url: str) -> str:
    parts = urlsplit(secret("url", url))
    return f"{parts.scheme}://{parts.hostname}:{parts.port or (5671 if parts.scheme == 'amqps' else 5672)}"


def connected(url: str) -> Any:
    """A blocking connection. RetryError if the broker is away; ConfigurationError if it does not want us."""
    pika = driver()
    parameters = pika.URLParameters(secret("url", check_url(url)))
    parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = TIMEOUT_S
    parameters.heartbeat = HEARTBEAT_S
    parameters.retry_delay, parameters.connection_attempts = 0, 1
    try:
        return pika.BlockingConnection(parameters)
    except (pika.exceptions.ProbableAuthenticationError, pika.exceptions.ProbableAccessDeniedError, pika.exceptions.AuthenticationError) as error:
        raise ConfigurationError(f"{shown(url)} refuses us: {error}.", fix="check user, password and virtual host.") from None
    except (pika.exceptions.AMQPError, OSError) as error:
        raise RetryError(f"{shown(url)} cannot be reached: {str(error) or type(error).__name__}.", fix="see that RabbitMQ runs, and that the address is right.") from None
