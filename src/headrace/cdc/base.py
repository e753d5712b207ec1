"""What change capture asks of a database: the protocol `Source`, and the values it speaks in.
`capturing` drives it; each kind of database implements it.

A source hands out *parts* of its stream, in commit order. Rows are Arrow batches: the table's
columns, then the hidden ones (`HIDDEN`), then `_change_type`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import pyarrow as pa

from headrace.columnar.columns import CHANGE_FIELD, HIDDEN_FIELDS
from headrace.errors import ConfigurationError, InputError
from headrace.log.dead_letters import DeadLetter
from headrace.log.topic_config import check_name
from headrace.types.schema import RESERVED_COLUMNS, parse_schema

logger = logging.getLogger("headrace.cdc")
_TAKEN = {*RESERVED_COLUMNS, *(each.name for each in HIDDEN_FIELDS)}


@dataclass(frozen=True)
class TableShape:
    """A table as the source has it now. `columns` are names and types in Spark's DDL; `key` says by
    which columns a row is known.
    """

    name: str
    columns: tuple[tuple[str, str], ...]
    key: tuple[str, ...]

    def key_in(self, own: Sequence[str]) -> tuple[str, ...]:
        """The key's columns as the source itself calls them; `own` are its names of all columns."""
        names = dict(zip([name for name, _ in self.columns], own, strict=True))
        return tuple(names[name] for name in self.key)

    @property
    def ddl(self) -> str:
        return ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in self.columns)

    @cached_property
    def schema(self) -> pa.Schema:
        return parse_schema(self.ddl)

    @cached_property
    def batch_schema(self) -> pa.Schema:
        return pa.schema([*self.schema, *HIDDEN_FIELDS, CHANGE_FIELD])


def usable_names(names: Sequence[str]) -> list[str]:
    """Column names that a topic can have: what is reserved, or differs from another in case only,
    gets an underscore behind it.
    """
    usable: list[str] = []
    taken = set(_TAKEN)
    for name in names:
        chosen = name or "_"
        while chosen.lower() in taken:
            chosen += "_"
        taken.add(chosen.lower())
        usable.append(chosen)
    return usable


class Skipped:
    """Tables that nobody named and that cannot be captured, such as one without a key: told of
    once, and left out.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, table: str, why: ConfigurationError) -> None:
        if table not in self._told:
            self._told.add(table)
            logger.warning("%s is left out: %s", table, why)


@dataclass(frozen=True)
class Changes:
    """Changes of one table, in the order in which they were made."""

    table: str
    rows: pa.RecordBatch


@dataclass(frozen=True)
class Chunk:
    """Rows of a snapshot, at the place in the stream where they are neither older nor newer than
    what stands around them.
    """

    table: str
    rows: pa.RecordBatch
    after: Sequence[Any] | None
    """The key of the last row, as the source wants it back to go on behind it; nothing if there was
    no row.
    """
    is_last: bool


@dataclass(frozen=True)
class Reshaped:
    """From here on a table has other columns. What rows already in the topic have in new ones is
    read again, in a snapshot beside the stream.

    `missed`: changes of the table may have been missed (somebody took its triggers, or its place in
    the publication): it is read again in any case.
    """

    shape: TableShape
    missed: bool = False


@dataclass(frozen=True)
class Truncated:
    """All rows of a table went at once. `hidden` are the values of the hidden columns."""

    table: str
    hidden: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """Rows for a plain topic: an outbox's events, or logical messages."""

    topic: str
    ddl: str
    key: str
    rows: pa.RecordBatch


@dataclass(frozen=True)
class Aside:
    """Records that cannot be used, for the dead letters of `topic`: committed with everything else,
    and counted.
    """

    topic: str
    letters: tuple[DeadLetter, ...]


Item = Changes | Chunk | Reshaped | Truncated | Event | Aside


@dataclass(frozen=True)
class Part:
    """The next part of the stream. `position` is where to go on behind it: nothing, if it ends
    inside a transaction.
    """

    items: Sequence[Item] = ()
    position: str | None = None
    transactions: int = 0
    is_idle: bool = True
    """Nothing more is waiting in the source right now."""


@dataclass(frozen=True)
class ChunkRequest:
    """Up to `rows` rows of a table, in the order of its key, behind a key (from the beginning, if
    there is none).
    """

    table: str
    after: Sequence[Any] | None
    rows: int


class Source(Protocol):
    """A database that is captured. Everything may raise RetryError (it goes away and comes back) or
    ConfigurationError (somebody must act).
    """

    def start(self, position: str | None, *, afresh: bool = False) -> str:
        """Stream from behind a position on, or from now on. Returns where it starts. What is needed
        in the database is made here; `afresh`, also if it is there.
        """

    def tables(self) -> list[TableShape]:
        """The tables to be captured, as they are now. Asked at the start, and now and then for new
        ones.
        """

    def request(self, chunk: ChunkRequest) -> None:
        """Ask for a chunk; it comes with one of the next parts. One at a time."""

    def count(self, table: str) -> int:
        """About how many rows a table has, for progress."""

    def poll(self, timeout_s: float) -> Part:
        """What comes next; an empty part if nothing came in time."""

    def is_caught_up(self) -> bool:
        """Whether all that was committed before this was first asked has been handed out."""

    def confirm(self, position: str) -> None:
        """Everything up to here is durable in the log: the source need not keep it."""

    def status(self) -> dict[str, Any]:
        """How the source is: what it keeps for us, how far behind we are."""

    def close(self) -> None: ...

    def remove(self) -> list[str]:
        """Take away whatever was made in the database. Returns what it was."""


# The hidden column `_marks`: what a column of the topic cannot hold is null there, and stands here
# as JSON, so that nothing is lost.
#
# {"amount": {"text": "NaN"}}: the source's own text. {"document": {"unchanged": true}}: the source
# did not send the value, because the change left it as it was.


Marks = dict[int, dict[str, Any]]
"""Row -> column -> mark."""
UNCHANGED = {"unchanged": True}


def marks_column(marks: Mapping[int, Mapping[str, Any]], rows: int) -> pa.Array:
    if not marks:
        return pa.nulls(rows, pa.string())
    return pa.array(
        [
            json.dumps(marks[row], ensure_ascii=False) if row in marks else None
            for row in range(rows)
        ],
        pa.string(),
    )


DEFAULT_CHUNK_ROWS = 50_000


@dataclass(frozen=True)
class CaptureSpec:
    """Tables of one database, on their way into the log. `name` identifies it: position and
    progress are kept under it.
    """

    name: str
    kind: str
    opener: Callable[[CaptureSpec], Source] = field(repr=False, compare=False)
    tables: tuple[str, ...] = ()
    log: str | None = None
    prefix: str = ""
    partitions: int = 1
    preimages: bool = False
    snapshot: bool = True
    chunk_rows: int = DEFAULT_CHUNK_ROWS
    outbox: str | None = None
    """A table whose rows are events, for topics named by their `aggregate_type`."""
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_name(self.name, what="capture name")
        if self.chunk_rows < 1 or self.partitions < 1:
            raise InputError("chunk_rows and partitions must be at least 1.")

    def open(self) -> Source:
        """The source, ready to be started."""
        return self.opener(self)

    def log_address(self, given: str | None = None) -> str:
        address = given or self.log
        if address is None:
            raise ConfigurationError(
                f"The capture {self.name!r} has no log.", fix="pass log=… (--log …)."
            )
        return address
