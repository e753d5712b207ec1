"""How far a capture is: the source's position, and for each table its topic and how far its snapshot is. One note of the log, stored in the transactions that write rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.errors import NewerFormat

VERSION = 1


@dataclass
class SnapshotState:
    """A snapshot under way. `since` are the topic's ends when it began, if the topic had rows before: what it does not meet again is gone."""

    after: Sequence[Any] | None = None
    rows: int = 0
    about: int = 0
    since: dict[str, int] | None = None


@dataclass
class TableState:
    """`columns` are those that the topic was filled with: a table that has others is read again."""

    topic: str
    columns: Sequence[Sequence[str]] = ()
    snapshot: SnapshotState | None = None
    """Nothing, when it is done."""


@dataclass
class CaptureState:
    position: str | None = None
    tables: dict[str, TableState] = field(default_factory=dict)
    handled: str | None = None
    """The last request (of another process, for a snapshot) that was taken up."""

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))

    @property
    def pending(self) -> list[str]:
        """Tables whose snapshot is not done."""
        return [name for name, each in self.tables.items() if each.snapshot is not None]


def note_name(capture: str) -> str:
    return f"cdc.{capture}"


def request_name(capture: str) -> str:
    return f"cdc.{capture}.request"


def read_state(text: str | None, *, capture: str) -> CaptureState:
    if text is None:
        return CaptureState()
    raw = json.loads(text)
    if raw.pop("version") > VERSION:
        raise NewerFormat(f"The state of the capture {capture!r} was written by a newer Headrace.", fix="upgrade Headrace.")
    tables = {name: _table(each) for name, each in raw["tables"].items()}
    return CaptureState(raw["position"], tables, raw["handled"])


def _table(raw: dict[str, Any]) -> TableState:
    return TableState(raw["topic"], raw["columns"], SnapshotState(**raw["snapshot"]) if raw["snapshot"] else None)
