"""Secrets that are named and not written down: `env:NAME` and `file:PATH` stand for what is there.
Kafka's options and webhooks are configured so.
"""

from __future__ import annotations

import os
from pathlib import Path

from headrace.errors import ConfigurationError


def secret(name: str, value: str) -> str:
    """The value of an option, fetched from where `env:NAME` or `file:PATH` points; anything else is
    the value itself.
    """
    kind, _, place = value.partition(":")
    if kind == "env":
        if place not in os.environ:
            raise ConfigurationError(
                f"The option {name!r} is {value!r}, but the environment has no {place!r}.",
                fix=f"export {place}=...",
            )
        return os.environ[place]
    if kind == "file":
        try:
            return Path(place).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigurationError(
                f"The option {name!r} is {value!r}, which cannot be read: {error.strerror}.",
                fix="check the path.",
            ) from None
    return value


def is_named(value: str) -> bool:
    """Whether a value only says where it is kept."""
    return value.startswith(("env:", "file:"))
