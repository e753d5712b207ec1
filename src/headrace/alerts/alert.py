"""The declaration of an alert (its name, receivers and rate limit) and the messages it sends.

A declaration opens nothing until the pipeline runs. `decision.py` turns rows into messages,
`delivery.py` sends them.
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
    """A receiver by e-mail, through an SMTP server: `smtp://host:587` (with STARTTLS if the server
    supports it) or `smtps://host`. The password is a reference, `env:NAME` or `file:PATH`.
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
                f"{self.url!r} is not the address of a mail server.",
                fix="write it as smtp://user@mail.example.com:587, or smtps://….",
            )
        if parts.password or (self.password is not None and not is_named(self.password)):
            raise InputError(
                "The password of a mail server is written in the program's text.",
                fix="refer to it instead: password='env:NAME', or password='file:PATH'.",
            )
        for address in (*self.to, self.sender):
            if "@" not in address or any(char in address for char in "\r\n,<> "):
                raise InputError(
                    f"{address!r} is not a mail address.", fix="write it as name@example.com."
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
    """A receiver of alerts by e-mail.

    Args:
        url: The mail server: `smtp://user@host:587` or `smtps://user@host`.
        to: The address, or addresses, of the recipients.
        sender: The address in the From header.
        password: Where the user's password is: `env:NAME` or `file:PATH`.
        timeout_s: How long one attempt may take.

    Returns:
        The receiver, for `Pipeline.alert(to=…)`.

    Raises:
        InputError: An address is malformed, or the password is given in plain text.

    Example:
        ``hr.alerts.email("smtp://mail.example.com", to="ops@example.com")``
    """
    return Email(
        url=url,
        to=(to,) if isinstance(to, str) else tuple(to),
        sender=sender,
        password=password,
        timeout_s=timeout_s,
    )


AlertReceiver = Sink | Email
"""Where an alert is sent: a webhook sink or an e-mail."""


@dataclass(frozen=True)
class Alert:
    """A declared alert. In a table's topic, an insert fires and a delete resolves; in any other
    topic, each row fires.
    """

    name: str
    topic: str
    to: tuple[AlertReceiver, ...] = ()
    every_us: int = 0
    """The shortest time between two messages of a group; rows that come meanwhile go into the next
    message.
    """
    by: tuple[str, ...] = ()
    """The columns whose values form a group. Each group has messages of its own."""

    def __post_init__(self) -> None:
        for receiver in self.to:
            if getattr(receiver, "kind", None) != "webhook" and not isinstance(receiver, Email):
                raise PlanError(
                    f"The alert {self.name!r} cannot be sent to"
                    f" {getattr(receiver, 'kind', type(receiver).__name__)!r}.",
                    fix="use hr.sinks.webhook(…) or hr.alerts.email(…).",
                )


# Messages: rows of the topic `alerts`, JSON for webhooks, and text for people


TOPIC = "alerts"
SCHEMA = (
    "id STRING, pipeline STRING, alert STRING, state STRING, `at` TIMESTAMP, fired BIGINT, resolved"
    " BIGINT, active BIGINT, is_silenced BOOLEAN, content STRING"
)
FIRING, RESOLVED = "firing", "resolved"
MAX_ROWS = 100
"""How many fired and how many resolved rows a message shows; of more it has only the number."""


@dataclass(frozen=True)
class AlertMessage:
    """One message of an alert. Receivers drop repeats by its `id`, which no other rows ever get."""

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
    """JSON: the rows that `fired` and `resolved`, and for an alert with groups the `group`, or the
    number of `groups` if there are several.
    """

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> AlertMessage:
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})

    def row(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def body(self) -> bytes:
        """The body of the webhook request."""
        body = {
            "id": self.id,
            "pipeline": self.pipeline,
            "alert": self.alert,
            "state": self.state,
            "at": self.at.isoformat(),
            "counts": {"fired": self.fired, "resolved": self.resolved, "active": self.active},
            **json.loads(self.content),
        }
        return json.dumps(body).encode()

    def subject(self) -> str:
        """The subject of the mail."""
        counts = {"new": self.fired, "resolved": self.resolved, "active": self.active}
        texts = [f"{count} {name}" for name, count in counts.items() if count]
        group = f", {self.group}" if self.group else ""
        return f"[{self.state}] {self.alert}{group}: {', '.join(texts) or 'nothing'}"

    @property
    def group(self) -> str:
        """The group as text for people; empty if the alert has no groups."""
        content = json.loads(self.content)
        if "groups" in content:
            return f"{content['groups']:,} groups"
        return ", ".join(f"{name} {value}" for name, value in content.get("group", {}).items())

    def text(self) -> str:
        """The text of the mail: one line a row."""
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


def make_message(
    *,
    id: str,
    pipeline: str,
    alert: str,
    at_us: int,
    fired: Sequence[str],
    resolved: Sequence[str],
    active: int,
    is_silenced: bool,
    more_fired: int = 0,
    more_resolved: int = 0,
    group: Mapping[str, Any] | None = None,
    groups: int = 0,
) -> AlertMessage:
    """A message about rows, given as JSON objects. `more_fired` and `more_resolved` count rows that
    are not among them; `group` is the group of the rows, or `groups` the number of groups.
    """
    fired_count, resolved_count = len(fired) + more_fired, len(resolved) + more_resolved
    is_firing = active or (fired_count and not resolved_count)
    if groups:
        group_member = f'"groups": {groups}, '
    else:
        group_member = "" if group is None else f'"group": {json.dumps(group)}, '
    content = (
        f'{{{group_member}"fired": [{", ".join(fired[:MAX_ROWS])}], "resolved":'
        f" [{', '.join(resolved[:MAX_ROWS])}]}}"
    )
    return AlertMessage(
        id=id,
        pipeline=pipeline,
        alert=alert,
        state=FIRING if is_firing else RESOLVED,
        at=from_us(at_us),
        fired=fired_count,
        resolved=resolved_count,
        active=active,
        is_silenced=is_silenced,
        content=content,
    )
