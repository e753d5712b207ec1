"""What an alert has told, what fires, and what waits for its next message: a note of the log, stored with each message (`deciding`).

It is bounded in bytes, below what a record of Kafka may have: what is over a bound is still counted, and only not shown.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from headrace.alerts.messages import MOST_ROWS
from headrace.errors import ConfigurationError

VERSION = 2
WHOLE = ""
"""The group of an alert that has none."""
MOST_GROUPS = 1_000
"""Groups of which it is remembered when they were told last; of more, those that were told longest ago are forgotten, and may be told sooner."""
ROWS_BYTES = 64 << 10
"""So large are the rows of each kind that one message shows."""
STORED_ROWS_BYTES = 64 << 10
"""So large are the rows that wait, of all groups together, when they are stored; the others are counted."""
STORED_NAMES_BYTES = 64 << 10
"""So large are the names of groups that are stored; when those that wait are larger, they are told early."""


def stored_bytes(text: str) -> int:
    """In JSON."""
    return len(json.dumps(text, ensure_ascii=False).encode())


@dataclass
class Rows:
    """The first rows, which a message shows, and how many more there are."""

    shown: list[str] = field(default_factory=list)
    more: int = 0
    size: int = 0

    def add(self, text: str, most_bytes: int = ROWS_BYTES) -> None:
        size = self.size + stored_bytes(text) if len(self.shown) < MOST_ROWS else most_bytes + 1
        if size <= most_bytes:
            self.shown.append(text)
            self.size = size
        else:
            self.more += 1

    def add_all(self, texts: Iterable[str], more: int) -> None:
        for text in texts:
            self.add(text)
        self.more += more

    def within(self, most_bytes: int) -> Rows:
        """As many of them as fit."""
        if self.size <= most_bytes:
            return self
        fitting = Rows(more=self.more)
        for text in self.shown:
            fitting.add(text, most_bytes)
        return fitting

    @classmethod
    def of(cls, shown: list[str], more: int) -> Rows:
        return cls(shown, more, sum(map(stored_bytes, shown)))

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
        return cls(told_us, is_muted, Rows.of(fired, more_fired), Rows.of(resolved, more_resolved))

    def within(self, most_bytes: int) -> Group:
        fired = self.fired.within(most_bytes)
        return Group(self.told_us, self.is_muted, fired, self.resolved.within(most_bytes - fired.size))


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

    @property
    def waiting_names_bytes(self) -> int:
        return sum(stored_bytes(name) for name, group in self.groups.items() if group.waiting)

    def to_json(self) -> str:
        groups = {name: group.to_json() for name, group in self.groups.items()}
        return json.dumps({"version": VERSION, "positions": sorted(self.positions.items()), "active": self.active, "groups": groups}, ensure_ascii=False)

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

    def told(self, groups: dict[str, Group], active: Collection[str], *, since_us: int) -> AlertState:
        """The state with some groups as they now are; in `active` ones something fires. Groups that have nothing to remember are left out: nothing waits or is to be told after a silence, and
        the last message is older than `since_us`. Of too many, those go first that were told longest ago; what is owed to somebody stays.
        """
        now = {**self.groups, **groups}
        owed = {name for name, group in now.items() if group.waiting or (group.is_muted and name in active)}
        quiet = sorted((name for name, group in now.items() if name not in owed and group.told_us > since_us), key=lambda name: (now[name].is_muted, -now[name].told_us))
        kept = owed | set(_fitting(quiet, MOST_GROUPS - len(owed), STORED_NAMES_BYTES - sum(map(stored_bytes, owed))))
        return AlertState(dict(self.positions), dict(self.active), _within({name: group for name, group in now.items() if name in kept}))


def _fitting(names: list[str], most: int, most_bytes: int) -> list[str]:
    """The first ones."""
    sizes = accumulate(map(stored_bytes, names))
    return [name for name, size in zip(names[: max(0, most)], sizes, strict=False) if size <= most_bytes]


def _within(groups: dict[str, Group]) -> dict[str, Group]:
    """The rows that they show, bounded together."""
    left, bounded = STORED_ROWS_BYTES, {}
    for name, group in groups.items():
        bounded[name] = group.within(left)
        left -= bounded[name].fired.size + bounded[name].resolved.size
    return bounded
