"""Secrets that are named rather than written down: `env:NAME` and `file:PATH` stand for the content
of an environment variable and of a file. Options of Kafka, webhooks and RabbitMQ use them.
"""

from __future__ import annotations

import os
from pathlib import Path

from headrace.errors import ConfigurationError


def secret(option: str, value: str) -> str:
    """Return the value of an option, fetched from where `env:NAME` or `file:PATH` points. Anything
    else is the value itself.

    Args:
        option: The option's name, for the error.
        value: What the user gave.

    Raises:
        ConfigurationError: The environment variable is not set, or the file cannot be read.

    Example:
        >>> secret("sasl.password", "env:KAFKA_PASSWORD")  # doctest: +SKIP
        'hunter2'
    """
    kind, _, location = value.partition(":")
    if kind == "env":
        if location not in os.environ:
            raise ConfigurationError(
                f"The option {option!r} is {value!r}, but the environment has no {location!r}.",
                fix=f"export {location}=...",
            )
        return os.environ[location]
    if kind == "file":
        try:
            return Path(location).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigurationError(
                f"The option {option!r} is {value!r}, which cannot be read: {error.strerror}.",
                fix="check the path.",
            ) from None
    return value


def is_named(value: str) -> bool:
    """Return whether a value says where the secret is stored, rather than being it."""
    return value.startswith(("env:", "file:"))
