"""What an alert has told, what fires, and what waits for its next message: a note of the log, stored with each message (`deciding`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from headrace.alerts.messages import MOST_ROWS
from headrace.errors import ConfigurationError

VERSION = 2
WHOLE = ""
"""The group of an alert that has none."""
MOST_GROUPS = 1_000
"""Groups of which it is remembered when they were told last; of more, those that were told longest ago are forgotten, and may be told sooner."""


@dataclass
class Rows:
    """The first rows, which a message shows, and how many more there are."""

    shown: list[str] = field(default_factory=list)
    more: int = 0

    def add(self, text: str) -> None:
        if len(self.shown) < MOST_ROWS:
            self.shown.append(text)
        else:
            self.more += 1

    def __len__(self) -> int:
        return len(self.shown) + self.more


@dataclass
class Group:
    """Rows that were told together, and those that wait for the next message."""

    told_us: int = 0
    is_muted: bool = False
    """Whether the last message was silenced, and what fires has not been told."""
    fired: Rows = field(default_factory=Rows)
    resolved: Rows = field(default_factory=Rows)

    @property
    def waiting(self) -> int:
        return len(self.fired) + len(self.resolved)

    def to_json(self) -> list[Any]:
        return [self.told_us, self.is_muted, self.fired.shown, self.fired.more, self.resolved.shown, self.resolved.more]

    @classmethod
    def of(cls, stored: list[Any]) -> Group:
        told_us, is_muted, fired, more_fired, resolved, more_resolved = stored
        return cls(told_us, is_muted, Rows(fired, more_fired), Rows(resolved, more_resolved))


@dataclass
class AlertState:
    positions: dict[int, int] = field(default_factory=dict)
    """The place behind the rows that were read."""
    active: dict[str, str] = field(default_factory=dict)
    """Key -> the row that fired."""
    groups: dict[str, Group] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        return sum(group.waiting for group in self.groups.values())

    def to_json(self) -> str:
        groups = {name: group.to_json() for name, group in self.groups.items()}
        return json.dumps({"version": VERSION, "positions": sorted(self.positions.items()), "active": self.active, "groups": groups})

    @classmethod
    def of(cls, text: str | None) -> AlertState:
        if text is None:
            return cls()
        stored = json.loads(text)
        if stored["version"] > VERSION:
            raise ConfigurationError(f"An alert was last told by a newer version of Headrace (its state has version {stored['version']}).", fix="run that version, or a newer one.")
        if stored["version"] == 1:
            return cls(dict(stored["positions"]), stored["active"], {WHOLE: Group(stored["told_us"], stored["is_muted"])})
        return cls(dict(stored["positions"]), stored["active"], {name: Group.of(each) for name, each in stored["groups"].items()})

    def told(self, groups: dict[str, Group], *, since_us: int) -> AlertState:
        """The state with some groups as they now are. Groups that have nothing to remember are left out: nothing waits, and the last message is older than `since_us`."""
        now = {name: group for name, group in {**self.groups, **groups}.items() if group.waiting or group.is_muted or group.told_us > since_us}
        quiet = sorted((name for name, group in now.items() if not group.waiting), key=lambda name: now[name].told_us)
        for name in quiet[: max(0, len(now) - MOST_GROUPS)]:
            del now[name]
        return AlertState(dict(self.positions), dict(self.active), now)
