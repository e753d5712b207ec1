"""The state of a capture, and the requests that other processes make to it.

The state is the source's position, and for each table its topic and the progress of its snapshot.
It is a note of the log, stored in the transactions that write rows:

    note cdc.shop            {"version": 2, "position": "16/B374D848@…", "tables": {"public.orders":
                              {"topic": "orders", "columns": […], "snapshot": null, …}}, …}

Snapshots are requested, paused and resumed by another note, which whoever requests writes and the
capture only reads. The state has the number of the last request that was handled.

    note cdc.shop.request    {"version": 1, "requests": [{"number": 7, "action": "snapshot",
                              "tables": ["public.orders"], "condition": "id < 100"}]}
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.cdc.base import TableStorage
from headrace.errors import ConfigurationError, FencedError, InputError, NewerFormat, nearest
from headrace.log.api import Log

VERSION = 2


@dataclass
class SnapshotState:
    """A snapshot that is not complete."""

    after: Sequence[Any] | None = None
    """The key of the last row that was read."""
    rows: int = 0
    """How many rows were read."""
    about: int = 0
    """About how many rows there are."""
    since: dict[str, int] | None = None
    """The topic's end offsets at the first chunk, if it had rows before. Rows in front of them that
    the snapshot does not read again are deleted at its end.
    """
    has_begun: bool = False
    """Whether the first chunk was written."""
    condition: str | None = None
    """Only rows for which this SQL expression is true are read, and none is deleted at the end."""


@dataclass
class TableState:
    """The state of one table."""

    topic: str
    columns: Sequence[Sequence[str]] = field(default_factory=list)
    """The columns that the topic was filled with. A table that has more is read again."""
    described: Sequence[Sequence[str]] = field(default_factory=list)
    """The columns that were last written to the topic of schema changes."""
    snapshot: SnapshotState | None = None
    """None when it is complete."""
    storage: TableStorage | None = None
    """Where the rows were when the table was last looked at."""
    selection: str = ""
    """Identifies the rules for its columns and rows. When they change, it is read again."""
    conditions: list[str] = field(default_factory=list)
    """Of snapshots that begin when the one before is complete."""
    stopped: str | None = None
    """Why the table is not followed any more; None while it is."""
    is_gone: bool = False
    """Whether it was stopped because it does not exist."""

    def request_rows(self, condition: str) -> None:
        """Read the rows again for which a condition is true, after what is being read."""
        if self.snapshot is None:
            self.snapshot = SnapshotState(condition=condition)
            return
        is_covered = not self.snapshot.has_begun and self.snapshot.condition is None
        if not is_covered and condition not in self.conditions:
            self.conditions.append(condition)


@dataclass
class CaptureState:
    """The state of a capture."""

    position: str | None = None
    tables: dict[str, TableState] = field(default_factory=dict)
    handled: int = 0
    """The number of the last request that was handled."""
    is_paused: bool = False
    """Whether snapshots are paused. Changes are captured all the same."""

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))

    @property
    def pending(self) -> list[str]:
        """Tables whose snapshot is not complete."""
        return [name for name, table in self.tables.items() if table.snapshot is not None]

    @property
    def stopped(self) -> dict[str, str]:
        """Tables that are not followed any more, and why."""
        return {name: table.stopped for name, table in self.tables.items() if table.stopped}


def note_name(capture: str) -> str:
    """Return the name of the note with a capture's state."""
    return f"cdc.{capture}"


def read_state(text: str | None, *, capture: str) -> CaptureState:
    """Return the state that a note holds; an empty one if there is no note."""
    if text is None:
        return CaptureState()
    raw = json.loads(text)
    version = raw.pop("version")
    if version > VERSION:
        raise NewerFormat(
            f"The state of the capture {capture!r} was written by a newer Headrace.",
            fix="upgrade Headrace.",
        )
    if version < 2:
        _upgrade_from_1(raw)
    tables = {}
    for name, table in raw.pop("tables").items():
        snapshot = SnapshotState(**table["snapshot"]) if table["snapshot"] else None
        storage = TableStorage.from_json(table["storage"]) if table["storage"] else None
        tables[name] = TableState(**{**table, "snapshot": snapshot, "storage": storage})
    return CaptureState(tables=tables, **raw)


def _upgrade_from_1(raw: dict[str, Any]) -> None:
    """Version 1 had one request at a time, which was handled within seconds, and `since` was set
    when a snapshot was requested.
    """
    raw["handled"] = 0
    for table in raw["tables"].values():
        table["storage"] = None
        if (snapshot := table["snapshot"]) is not None:
            snapshot["has_begun"] = snapshot["after"] is not None


# Requests

REQUESTS_VERSION = 1
MAX_REQUESTS = 64
SNAPSHOT, PAUSE, RESUME = "snapshot", "pause", "resume"


@dataclass(frozen=True)
class SnapshotRequest:
    """What a capture is to do with its snapshots."""

    number: int
    action: str
    tables: tuple[str, ...] = ()
    condition: str | None = None


def request_name(capture: str) -> str:
    """Return the name of the note with which snapshots are requested."""
    return f"cdc.{capture}.request"


def read_requests(text: str | None, *, after: int) -> list[SnapshotRequest]:
    """Return the requests that a note holds, of those that follow a number."""
    raw = json.loads(text) if text is not None else {}
    if raw.get("version", REQUESTS_VERSION) > REQUESTS_VERSION:
        raise NewerFormat("A request for snapshots is of a newer Headrace.", fix="upgrade it here.")
    requests = [
        SnapshotRequest(**{**request, "tables": tuple(request["tables"])})
        for request in raw.get("requests", ())
    ]
    return [request for request in requests if request.number > after]


def request_snapshot(
    log: Log,
    capture: str,
    tables: Sequence[str] = (),
    *,
    condition: str | None = None,
    action: str = SNAPSHOT,
) -> None:
    """Request that a capture, whether it is running or not, reads tables again, or pauses its
    snapshots.

    Args:
        log: The log that the capture writes to.
        capture: Its name.
        tables: The tables to read.
        condition: Only rows for which this SQL expression of the database is true are read. Rows
            that the table does not have any more stay; without a condition they are deleted.
        action: "snapshot"; or "pause" and "resume", which concern all snapshots of the capture.

    Raises:
        ConfigurationError: No table is named.
        InputError: There is no such action, or a condition is for several tables.

    Example:
        >>> request_snapshot(log, "shop", ["orders"], condition="id < 100")  # doctest: +SKIP
    """
    if action not in {SNAPSHOT, PAUSE, RESUME}:
        raise InputError(
            f"There is no action {action!r}: {nearest(action, (SNAPSHOT, PAUSE, RESUME))}"
        )
    if action == SNAPSHOT and not tables:
        raise ConfigurationError("No table was named.", fix="name the tables to read again.")
    if condition is not None and len(tables) != 1:
        raise InputError(
            f"The condition {condition!r} is given for {len(tables)} tables.",
            fix="request the rows of each table by itself.",
        )
    name = request_name(capture)
    while True:
        stored = log.note(name)
        requests = read_requests(stored, after=0)
        number = max([time.time_ns(), *(request.number + 1 for request in requests)])
        requests.append(SnapshotRequest(number, action, tuple(tables), condition))
        note = {
            "version": REQUESTS_VERSION,
            "requests": [asdict(request) for request in requests[-MAX_REQUESTS:]],
        }
        try:
            with log.transaction(name) as transaction:
                transaction.set_note(name, json.dumps(note), expect=stored)
        except FencedError:
            continue  # somebody else has just made a request
        return
