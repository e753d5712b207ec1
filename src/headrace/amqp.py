"""Connections to RabbitMQ, for the gateway that reads a queue and the sink that publishes to an
exchange. A password in the address is never shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import ConfigurationError, HeadraceError, InputError, MissingExtra, RetryError
from headrace.secrets import is_named, secret

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
        raise InputError(
            "An address of RabbitMQ begins with amqp:// or amqps://.",
            fix="write it as amqp://user@host:5672/, or name its place: env:NAME or file:PATH.",
        )
    return url


def shown(url: str) -> str:
    parts = urlsplit(secret("url", url))
    return f"{parts.scheme}://{parts.hostname}:{parts.port or (5671 if parts.scheme == 'amqps' else 5672)}"


def parameters_of(url: str) -> Any:
    parameters = driver().URLParameters(secret("url", check_url(url)))
    parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = (
        TIMEOUT_S
    )
    parameters.heartbeat = HEARTBEAT_S
    parameters.retry_delay, parameters.connection_attempts = 0, 1
    return parameters


def failures() -> tuple[type[Exception], ...]:
    """What a connection may fail with."""
    from pika.adapters.utils.connection_workflow import AMQPConnectorException

    return (driver().exceptions.AMQPError, AMQPConnectorException, OSError)


def unreachable(url: str, error: Exception) -> HeadraceError:
    """What a connection that could not be made means: RetryError if the broker is away;
    ConfigurationError if it does not want us.
    """
    known, layers = driver().exceptions, list(_layers(error))
    refusals = (
        known.ProbableAuthenticationError,
        known.ProbableAccessDeniedError,
        known.AuthenticationError,
    )
    if (refused := next((each for each in layers if isinstance(each, refusals)), None)) is not None:
        return ConfigurationError(
            f"{shown(url)} refuses us: {refused}.", fix="check user, password and virtual host."
        )
    why = layers[-1]
    return RetryError(
        f"{shown(url)} cannot be reached: {str(why) or type(why).__name__}.",
        fix="see that RabbitMQ runs, and that the address is right.",
    )


def _layers(error: BaseException) -> Iterator[BaseException]:
    """What happened, under what pika was doing then, under what it was asked to do."""
    yield error
    inner = (
        *getattr(error, "exceptions", ())[-1:],
        getattr(error, "exception", None),
        *error.args[:1],
    )
    for each in [one for one in inner if isinstance(one, BaseException)][:1]:
        yield from _layers(each)


def connected(url: str) -> Any:
    """A blocking connection."""
    pika = driver()
    try:
        return pika.BlockingConnection(parameters_of(url))
    except (pika.exceptions.AMQPError, OSError) as error:
        raise unreachable(url, error) from None
