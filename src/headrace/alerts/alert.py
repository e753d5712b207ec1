"""An alert, declared: who is told, how often at most, and under which name. It opens nothing until
the pipeline runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from headrace.durations import from_us
from headrace.errors import InputError, PlanError
from headrace.secrets import is_named
from headrace.sinks.declaration import Sink


@dataclass(frozen=True)
class Email:
    """Mail through an SMTP server: `smtp://host:587` (STARTTLS where the server has it), or
    `smtps://host`. The password is named: `env:NAME` or `file:PATH`.
    """

    url: str
    to: tuple[str, ...]
    sender: str
    password: str | None = field(default=None, repr=False)
    timeout_s: float = 20.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"smtp", "smtps"} or not parts.hostname:
            raise InputError(
                f"{self.url!r} is no address of a mail server.",
                fix="write it as smtp://user@mail.example.com:587, or smtps://….",
            )
        if parts.password or (self.password is not None and not is_named(self.password)):
            raise InputError(
                "A mail server's password does not belong into a program's text.",
                fix="name the place: password='env:NAME', or password='file:PATH'.",
            )
        for address in (*self.to, self.sender):
            if "@" not in address or any(char in address for char in "\r\n,<> "):
                raise InputError(
                    f"{address!r} is no mail address.", fix="write it as name@example.com."
                )
        if not self.to:
            raise InputError("The mail has no receiver.", fix="give to='name@example.com'.")


def email(
    url: str,
    *,
    to: str | Sequence[str],
    sender: str = "headrace@localhost",
    password: str | None = None,
    timeout_s: float = 20.0,
) -> Email:
    """Tell by e-mail."""
    return Email(url, (to,) if isinstance(to, str) else tuple(to), sender, password, timeout_s)


Way = Sink | Email


@dataclass(frozen=True)
class Alert:
    """`topic` has the rows: on a table's topic an insert fires and a delete resolves; of any other
    topic each row fires.
    """

    name: str
    topic: str
    to: tuple[Way, ...] = ()
    every_us: int = 0
    """At most one message in this time, of each group; what comes meanwhile goes into the next
    one.
    """
    by: tuple[str, ...] = ()
    """The columns whose values make a group: each has messages of its own."""

    def __post_init__(self) -> None:
        for way in self.to:
            if getattr(way, "kind", None) != "webhook" and not isinstance(way, Email):
                raise PlanError(
                    f"The alert {self.name!r} cannot be told by"
                    f" {getattr(way, 'kind', type(way).__name__)!r}.",
                    fix="use hr.sinks.webhook(…) or hr.alerts.email(…).",
                )


# What is told: one message of an alert, as a row of the topic `alerts`, as JSON for webhooks, and
# as text for people.


TOPIC = "alerts"
SCHEMA = (
    "id STRING, pipeline STRING, alert STRING, state STRING, `at` TIMESTAMP, fired BIGINT, resolved"
    " BIGINT, active BIGINT, is_silenced BOOLEAN, content STRING"
)
FIRING, RESOLVED = "firing", "resolved"
MAX_ROWS = 100
"""So many rows of each kind are in a message; of more only the number."""


@dataclass(frozen=True)
class AlertMessage:
    """`id` is the key by which receivers drop repeats: it belongs to these rows, and no others ever
    get it.
    """

    id: str
    pipeline: str
    alert: str
    state: str
    at: datetime
    fired: int
    resolved: int
    active: int
    is_silenced: bool
    content: str
    """JSON: `fired` and `resolved`, the rows, and of an alert that has groups the `group`, or in
    how many `groups` they are.
    """

    @classmethod
    def of(cls, row: dict[str, Any]) -> AlertMessage:
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})

    def row(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def body(self) -> bytes:
        head = {
            "id": self.id,
            "pipeline": self.pipeline,
            "alert": self.alert,
            "state": self.state,
            "at": self.at.isoformat(),
        }
        return json.dumps(
            {
                **head,
                "counts": {"fired": self.fired, "resolved": self.resolved, "active": self.active},
                **json.loads(self.content),
            }
        ).encode()

    def subject(self) -> str:
        counts = [
            f"{count} {what}"
            for count, what in (
                (self.fired, "new"),
                (self.resolved, "resolved"),
                (self.active, "active"),
            )
            if count
        ]
        of = f", {self.group}" if self.group else ""
        return f"[{self.state}] {self.alert}{of}: {', '.join(counts) or 'nothing'}"

    @property
    def group(self) -> str:
        """For people; empty where the alert has no groups."""
        content = json.loads(self.content)
        return (
            f"{content['groups']:,} groups"
            if "groups" in content
            else ", ".join(f"{name} {value}" for name, value in content.get("group", {}).items())
        )

    def text(self) -> str:
        """For people: a line a row."""
        content = json.loads(self.content)
        lines = [
            self.subject(),
            f"pipeline {self.pipeline}, at {self.at.isoformat(timespec='seconds')}",
            "",
        ]
        for kind in ("fired", "resolved"):
            lines += [
                f"{kind}: {', '.join(f'{name} {value}' for name, value in row.items())}"
                for row in content[kind]
            ]
            if (more := getattr(self, kind) - len(content[kind])) > 0:
                lines.append(f"and {more} more {kind}")
        return "\n".join(lines) + "\n"


def content_of(
    fired: Sequence[str],
    resolved: Sequence[str],
    group: Mapping[str, Any] | None = None,
    groups: int = 0,
) -> str:
    """Rows as JSON objects, the first ones of each; before them the group they have in common, or
    how many they are in.
    """
    named = (
        f'"groups": {groups}, '
        if groups
        else ""
        if group is None
        else f'"group": {json.dumps(group)}, '
    )
    return (
        f'{{{named}"fired": [{", ".join(fired[:MAX_ROWS])}], "resolved":'
        f" [{', '.join(resolved[:MAX_ROWS])}]}}"
    )


def message_of(
    id: str,
    pipeline: str,
    alert: str,
    at_us: int,
    fired: Sequence[str],
    resolved: Sequence[str],
    active: int,
    *,
    is_silenced: bool,
    more: tuple[int, int] = (0, 0),
    group: Mapping[str, Any] | None = None,
    groups: int = 0,
) -> AlertMessage:
    """`more`: rows that fired and were resolved beside those that are given."""
    counts = len(fired) + more[0], len(resolved) + more[1]
    state = FIRING if active or (counts[0] and not counts[1]) else RESOLVED
    return AlertMessage(
        id,
        pipeline,
        alert,
        state,
        from_us(at_us),
        *counts,
        active,
        is_silenced,
        content_of(fired, resolved, group, groups),
    )
