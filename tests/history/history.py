"""A recorded history: what every process asked of a log, when, and what it was answered.

A process appends one JSON line per event to a file of its own. A line is written before a request
is made and another one when its answer is there, so a process that is killed leaves a request
without an answer. Times are those of the machine's monotonic clock, which all processes share and
which no step of the wall clock moves.

    {"process": "mover-0.2", "op": 7, "event": "invoke", "time": 1, "kind": "transaction", …}
    {"process": "mover-0.2", "op": 7, "event": "step", "time": 2, "actions": [["send", …]]}
    {"process": "mover-0.2", "op": 7, "event": "committing", "time": 3}
    {"process": "mover-0.2", "op": 7, "event": "ok", "time": 9, "offsets": [41]}

`History.load` reads the files of all processes; `checker` judges them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

Partition = tuple[str, int]
"""A topic and the number of one of its partitions."""


WORK = "work"
"""Marks the lines of operations that did something: who has none has only waited."""


class Outcome(StrEnum):
    """What is known about an operation: it happened, it did not, or either."""

    OK = "ok"
    FAIL = "fail"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Send:
    """One row that an operation appended. Each value is sent by one operation, or by the repeats of
    one.

    Attributes:
        source: The value of the input row that this row was made from; empty for an original.
        offset: What the log acknowledged; None if it did not say.
    """

    topic: str
    partition: int
    value: str
    key: str = ""
    source: str = ""
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Poll:
    """Rows of one partition that were delivered at a time, as pairs of offset and value."""

    topic: str
    partition: int
    rows: tuple[tuple[int, str], ...]
    time_ns: int = 0


@dataclass(frozen=True, slots=True)
class Assign:
    """A partition was given to a consumer, which is to go on at a position."""

    topic: str
    partition: int
    position: int


Action = Send | Poll | Assign


@dataclass(slots=True)
class Operation:
    """A request with its answer.

    Attributes:
        process: Who made it, such as "writer-1.3": role, number, and how many it was there before.
        kind: One of "open" (of the producer or transaction `id`), "send", "transaction", "poll"
            and "audit".
        committing_ns: When the process asked for the commit; None if it never did. A plain send
            asks for it at once.
        id: The id of the producer or of the transaction; empty without one.
        group: The consumer group whose member polled.
        member: Distinguishes the consumers that one process opened.
        is_repeat: The log said that it had stored the same sequence number before.
        starts: An audit's first offsets.
        ends: An audit's end offsets, all of one moment where the log promises that.
        is_final: An audit that read everything, after all other processes had ended.
        rows_removed: How many rows a run of maintenance compacted away.
    """

    process: str
    kind: str
    outcome: Outcome
    invoked_ns: int
    completed_ns: int | None = None
    number: int = 0
    committing_ns: int | None = None
    id: str = ""
    group: str = ""
    member: str = ""
    is_repeat: bool = False
    actions: list[Action] = field(default_factory=list)
    starts: dict[Partition, int] = field(default_factory=dict)
    ends: dict[Partition, int] = field(default_factory=dict)
    is_final: bool = False
    rows_removed: int = 0
    error: str = ""

    @property
    def sends(self) -> list[Send]:
        return [action for action in self.actions if isinstance(action, Send)]

    @property
    def polls(self) -> list[Poll]:
        return [action for action in self.actions if isinstance(action, Poll)]

    def __str__(self) -> str:
        return f"{self.process}#{self.number} ({self.kind}, {self.outcome})"


# Writing


class Recorder:
    """Writes the history of one process. Lines survive a kill of the process: the kernel has
    them.
    """

    def __init__(self, path: Path, process: str) -> None:
        self.process = process
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._number = 0

    def invoke(self, kind: str, **details: Any) -> RecordedOperation:
        """A request is about to be made."""
        self._number += 1
        operation = RecordedOperation(self, self._number)
        operation.write("invoke", kind=kind, **details)
        return operation

    def write(self, line: Mapping[str, Any]) -> None:
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)


class RecordedOperation:
    """An operation that is being recorded."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self._number = number

    def write(self, event: str, **details: Any) -> None:
        self._recorder.write(
            {
                "process": self._recorder.process,
                "op": self._number,
                "event": event,
                "time": time.monotonic_ns(),
                **details,
            }
        )

    def step(self, actions: Iterable[Action]) -> None:
        """Rows that are about to be sent, or that have just come."""
        self.write("step", actions=[_to_json(action) for action in actions])

    def committing(self) -> None:
        """The commit is about to be requested: from now on its rows may be seen."""
        self.write("committing")

    def ok(
        self, offsets: Sequence[int | None] = (), *, is_work: bool = True, **details: Any
    ) -> None:
        """It happened. `offsets` has one entry per row sent; `is_work` says whether there was
        anything to do.
        """
        self.write("ok", offsets=list(offsets), **({WORK: True} if is_work else {}), **details)

    def fail(self, error: BaseException | str) -> None:
        """It did not happen, and never will."""
        self.write("fail", error=f"{error!r}"[:300])

    def info(self, error: BaseException | str) -> None:
        """It may have happened."""
        self.write("info", error=f"{error!r}"[:300])


def _to_json(action: Action) -> list[Any]:
    if isinstance(action, Send):
        return ["send", action.topic, action.partition, action.value, action.key, action.source]
    if isinstance(action, Poll):
        return ["poll", action.topic, action.partition, action.rows]
    return ["assign", action.topic, action.partition, action.position]


def partitions_to_json(offsets: Mapping[str, Mapping[int, int]]) -> list[list[Any]]:
    """Offsets of partitions as they stand in a history's line."""
    return [
        [topic, partition, offset]
        for topic, partitions in offsets.items()
        for partition, offset in partitions.items()
    ]


# Reading


@dataclass
class History:
    """All operations of all processes, in the order in which they were invoked."""

    operations: list[Operation]

    @classmethod
    def load(cls, directory: Path) -> History:
        """Read the histories of all processes that recorded into a directory."""
        operations = [
            operation
            for path in sorted(directory.glob("*.history"))
            for operation in _read_operations(path)
        ]
        return cls(sorted(operations, key=lambda operation: operation.invoked_ns))


def _read_operations(path: Path) -> list[Operation]:
    operations: dict[int, Operation] = {}
    *lines, _unfinished = path.read_text().split("\n")
    for text in lines:
        line = json.loads(text)
        if line["event"] == "invoke":
            operations[line["op"]] = _invoked(line)
        else:
            _apply(operations[line["op"]], line)
    for operation in operations.values():
        # Without an answer: it may have happened, unless its commit was never requested.
        may_have_happened = operation.committing_ns is not None
        if operation.completed_ns is None and may_have_happened:
            operation.outcome = Outcome.INFO
    return list(operations.values())


def _invoked(line: Mapping[str, Any]) -> Operation:
    commits_at_once = line["kind"] in {"send", "open"}
    return Operation(
        process=line["process"],
        kind=line["kind"],
        outcome=Outcome.FAIL,
        invoked_ns=line["time"],
        number=line["op"],
        committing_ns=line["time"] if commits_at_once else None,
        id=line.get("id", ""),
        group=line.get("group", ""),
        member=line.get("member", ""),
        actions=_actions(line),
    )


def _apply(operation: Operation, line: Mapping[str, Any]) -> None:
    operation.actions += _actions(line)
    if line["event"] == "committing":
        operation.committing_ns = line["time"]
    elif line["event"] != "step":
        operation.outcome = Outcome(line["event"])
        operation.completed_ns = line["time"]
        operation.is_repeat = line.get("repeat", False)
        operation.is_final = line.get("final", False)
        operation.rows_removed = line.get("rows_removed", 0)
        operation.error = line.get("error", "")
        operation.starts = {(topic, number): at for topic, number, at in line.get("starts", ())}
        operation.ends = {(topic, number): at for topic, number, at in line.get("ends", ())}
        if line.get("offsets"):
            operation.actions = _with_offsets(operation.actions, line["offsets"])


def _actions(line: Mapping[str, Any]) -> list[Action]:
    actions: list[Action] = []
    for name, *fields in line.get("actions", ()):
        if name == "send":
            actions.append(Send(*fields))
        elif name == "poll":
            topic, partition, rows = fields
            actions.append(
                Poll(topic, partition, tuple((at, value) for at, value in rows), line["time"])
            )
        else:
            actions.append(Assign(*fields))
    return actions


def _with_offsets(actions: list[Action], offsets: Sequence[int | None]) -> list[Action]:
    left = iter(offsets)
    return [
        Send(
            action.topic,
            action.partition,
            action.value,
            action.key,
            action.source,
            next(left),
        )
        if isinstance(action, Send)
        else action
        for action in actions
    ]
