"""An alert, declared: who is told, how often at most, and under which name. It opens nothing until the pipeline runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headrace.errors import InputError, PlanError
from headrace.secret_values import is_named
from headrace.sinks.declared import Sink


@dataclass(frozen=True)
class Email:
    """Mail through an SMTP server: `smtp://host:587` (STARTTLS where the server has it), or `smtps://host`. The password is named: `env:NAME` or `file:PATH`."""

    url: str
    to: tuple[str, ...]
    sender: str
    password: str | None = field(default=None, repr=False)
    timeout_s: float = 20.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"smtp", "smtps"} or not parts.hostname:
            raise InputError(f"{self.url!r} is no address of a mail server.", fix="write it as smtp://user@mail.example.com:587, or smtps://….")
        if parts.password or (self.password is not None and not is_named(self.password)):
            raise InputError("A mail server's password does not belong into a program's text.", fix="name the place: password='env:NAME', or password='file:PATH'.")
        for address in (*self.to, self.sender):
            if "@" not in address or any(char in address for char in "\r\n,<> "):
                raise InputError(f"{address!r} is no mail address.", fix="write it as name@example.com.")
        if not self.to:
            raise InputError("The mail has no receiver.", fix="give to='name@example.com'.")


def email(url: str, *, to: str | Sequence[str], sender: str = "headrace@localhost", password: str | None = None, timeout_s: float = 20.0) -> Email:
    """Tell by e-mail."""
    return Email(url, (to,) if isinstance(to, str) else tuple(to), sender, password, timeout_s)


Way = Sink | Email


@dataclass(frozen=True)
class Alert:
    """`topic` has the rows: on a table's topic an insert fires and a delete resolves; of any other topic each row fires."""

    name: str
    topic: str
    to: tuple[Way, ...] = ()
    every_us: int = 0
    """At most one message in this time, of each group; what comes meanwhile goes into the next one."""
    by: tuple[str, ...] = ()
    """The columns whose values make a group: each has messages of its own."""

    def __post_init__(self) -> None:
        for way in self.to:
            if getattr(way, "kind", None) != "webhook" and not isinstance(way, Email):
                raise PlanError(f"The alert {self.name!r} cannot be told by {getattr(way, 'kind', type(way).__name__)!r}.", fix="use hr.sinks.webhook(…) or hr.alerts.email(…).")
