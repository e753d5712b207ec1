"""What is told: one message of an alert, as a row of the topic `alerts`, as JSON for webhooks, and as text for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headrace.durations import from_us

TOPIC = "alerts"
SCHEMA = "id STRING, pipeline STRING, alert STRING, state STRING, `at` TIMESTAMP, fired BIGINT, resolved BIGINT, active BIGINT, is_silenced BOOLEAN, content STRING"
FIRING, RESOLVED = "firing", "resolved"
MOST_ROWS = 100
"""So many rows of each kind are in a message; of more only the number."""


@dataclass(frozen=True)
class AlertMessage:
    """`id` is the key by which receivers drop repeats: it belongs to these rows, and no others ever get it."""

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
    """JSON: `fired` and `resolved`, the rows, and of an alert that has groups the `group`, or in how many `groups` they are."""

    @classmethod
    def of(cls, row: dict[str, Any]) -> AlertMessage:
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})

    def row(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def body(self) -> bytes:
        head = {"id": self.id, "pipeline": self.pipeline, "alert": self.alert, "state": self.state, "at": self.at.isoformat()}
        return json.dumps({**head, "counts": {"fired": self.fired, "resolved": self.resolved, "active": self.active}, **json.loads(self.content)}).encode()

    def subject(self) -> str:
        counts = [f"{count} {what}" for count, what in ((self.fired, "new"), (self.resolved, "resolved"), (self.active, "active")) if count]
        of = f", {self.group}" if self.group else ""
        return f"[{self.state}] {self.alert}{of}: {', '.join(counts) or 'nothing'}"

    @property
    def group(self) -> str:
        """For people; empty where the alert has no groups."""
        content = json.loads(self.content)
        return f"{content['groups']:,} groups" if "groups" in content else ", ".join(f"{name} {value}" for name, value in content.get("group", {}).items())

    def text(self) -> str:
        """For people: a line a row."""
        content = json.loads(self.content)
        lines = [self.subject(), f"pipeline {self.pipeline}, at {self.at.isoformat(timespec='seconds')}", ""]
        for kind in ("fired", "resolved"):
            lines += [f"{kind}: {', '.join(f'{name} {value}' for name, value in row.items())}" for row in content[kind]]
            if (more := getattr(self, kind) - len(content[kind])) > 0:
                lines.append(f"and {more} more {kind}")
        return "\n".join(lines) + "\n"


def content_of(fired: Sequence[str], resolved: Sequence[str], group: Mapping[str, Any] | None = None, groups: int = 0) -> str:
    """Rows as JSON objects, the first ones of each; before them the group they have in common, or how many they are in."""
    named = f'"groups": {groups}, ' if groups else "" if group is None else f'"group": {json.dumps(group)}, '
    return f'{{{named}"fired": [{", ".join(fired[:MOST_ROWS])}], "resolved": [{", ".join(resolved[:MOST_ROWS])}]}}'


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
    return AlertMessage(id, pipeline, alert, state, from_us(at_us), *counts, active, is_silenced, content_of(fired, resolved, group, groups))
