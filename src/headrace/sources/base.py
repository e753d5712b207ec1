"""What a source of rows is, and how to write one.

A source reads rows from a system that has no changes of tables: files, an API, a message broker.
Subclass `RowSource` and implement `start` and `read`. Everything else is done here, and is the same
as for captures (`cdc.capture`): the loop, retries with pauses, the position in the log in the same
transaction as the rows, one process per name, dead letters, status, the command line.

    class CountSource(RowSource):
        def start(self, position):
            self._next = position or 0

        def read(self, timeout_s):
            if self._next == 1_000:
                return None                                  # nothing more right now
            rows = [{"n": number} for number in range(self._next, self._next + 100)]
            self._next += 100
            return SourceRows(rows, position=self._next)

    Source(kind="count", name="count", reader=CountSource, topic="numbers", schema="n BIGINT").run(
        log="file:data")

The position is any value that JSON has. It is stored with the rows before it, and given back to
`start` by the next session: after a crash at any moment, a source that goes on exactly behind its
position delivers each row once. A system without positions is told by `confirm` which rows are
durable; what it delivers again is stored again.

A source raises `RetryError` for what passes by itself (the loop pauses, and starts a new session)
and `ConfigurationError` for what somebody must fix (the loop ends). The tests that every source
should pass are in `headrace.testing.source_contract`. An entry point of the group
`headrace.sources` makes `headrace capture` know its URLs (`connector.PluginGroup`).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any, ClassVar

from headrace.cdc.base import (
    CaptureSource,
    CaptureSpec,
    ChunkRequest,
    DeadRecords,
    StreamItem,
    StreamPart,
    TableShape,
    TopicRows,
)
from headrace.cdc.capture import CaptureLoop, CaptureStatus
from headrace.cdc.declaration import Capture
from headrace.errors import ConfigurationError, InputError, NewerFormat
from headrace.log import open_log
from headrace.log.api import Closeable, Log
from headrace.log.dead_letters import DeadLetter
from headrace.log.values import TopicInfo
from headrace.sources.decoder import GivenRows, SourceDecoder

VERSION = 1


@dataclass(frozen=True)
class SourceRows:
    """Rows of a source, and where it is behind them.

    Attributes:
        rows: Dicts of Python values; JSON objects as bytes; Arrow data; or `types.text.TextRow`s,
            whose values are texts as in a CSV file. Columns that a row lacks are null. Rows that do
            not fit become dead letters.
        position: A value that JSON has.
        are_json: Whether dicts are parsed JSON, in which times are texts.
        where: What the rows are of, for dead letters, such as a file's name.
        dead_letters: Records that are no rows.
        notes: Rows of topics of the source's own, stored in the same transaction.
    """

    rows: GivenRows
    position: Any
    are_json: bool = False
    where: str = ""
    dead_letters: Sequence[DeadLetter] = ()
    notes: Sequence[TopicRows] = ()


class RowSource(Closeable):
    """Reads rows from another system, in one session."""

    log: Log
    """The log that the rows are written to."""

    def __init__(self, source: Source, topic: TopicInfo) -> None:
        self.source = source
        self.topic = topic

    @abstractmethod
    def start(self, position: Any) -> None:
        """Connect, and go on behind a position.

        Args:
            position: That of the last rows that are in the log; None at the first start.

        Raises:
            RetryError: The system is away.
            ConfigurationError: Somebody must act.
        """

    @abstractmethod
    def read(self, timeout_s: float) -> SourceRows | None:
        """Return the next rows; None if none come in time. A few thousand at a time are best."""

    def is_caught_up(self) -> bool:
        """Whether nothing is missing that was there when `read` last returned None."""
        return True

    def confirm(self, position: Any) -> None:
        """Rows up to a position are durable in the log: the system need not keep them."""

    def status(self) -> dict[str, Any]:
        """Return how the source is doing, for those who watch."""
        return {}

    def close(self) -> None:
        """Disconnect."""


@dataclass(frozen=True, kw_only=True)
class Source(Capture):
    """A declared source of rows for one topic.

    Attributes:
        topic: The topic that gets the rows.
        reader: Makes the endpoint, and imports the packages that it needs.
        schema: The columns of the topic, if it is to be created when it is missing.
        key: The column whose value chooses the partition, of a topic that is created.
    """

    noun: ClassVar[str] = "source"

    topic: str
    reader: Callable[[Source, TopicInfo], RowSource] = field(repr=False, compare=False)
    schema: str | None = None
    key: str | None = None
    opener: Callable[[CaptureSpec], CaptureSource] = field(
        default_factory=lambda: open_declared, repr=False, compare=False
    )

    def run(
        self,
        *,
        log: str | None = None,
        stop: Event | None = None,
        until_caught_up: bool = False,
        start_over: bool = False,
        on_status: Callable[[CaptureStatus], None] | None = None,
    ) -> None:
        """Read in this process.

        Args:
            log: The log's address; by default the declared one.
            stop: Set it to stop. Without it, and without `until_caught_up`, this never returns.
            until_caught_up: Return when everything is written that is there now.
            start_over: Drop the position, and read everything again.
            on_status: Called about once a second with how the source is doing.

        Raises:
            ConfigurationError: The topic or the system lacks what is needed. The message says what
                to do.
            TransactionFenced: Another process runs the same source.

        Example:
            >>> hr.sources.directory("incoming", topic="orders").run(log="file:data")
        """
        with open_log(self.log_address(log)) as opened:
            bound = replace(self, opener=lambda _capture: RowSourceCapture(self, opened))
            loop = CaptureLoop(bound, opened, start_over=start_over, on_status=on_status)
            loop.run(stop=stop, until_caught_up=until_caught_up)

    def remove(self) -> list[str]:
        """Return an empty list: a source creates nothing in the system that it reads.

        Returns:
            Descriptions of what was removed.

        Example:
            >>> hr.sources.directory("incoming", topic="orders").remove()  # doctest: +SKIP
            []
        """
        return []

    def prepare_topic(self, log: Log) -> TopicInfo:
        """Return the topic, which is created if it is missing and its columns are declared.

        Raises:
            ConfigurationError: It is missing.
            InputError: It is one of Headrace's own.
        """
        if self.topic.startswith("__"):
            raise InputError(f"The topic {self.topic!r} is Headrace's own.", fix="choose another.")
        if self.topic not in log.topics():
            if self.schema is None:
                raise ConfigurationError(
                    f"The topic {self.topic!r} of the source {self.name!r} does not exist.",
                    fix="create it, or give its columns with schema='…' (--schema).",
                )
            log.create_topic(
                self.topic,
                self.schema,
                key=self.key,
                partitions=self.partitions,
                exist_ok=True,
            )
        return log.topic(self.topic)


def open_declared(capture: CaptureSpec) -> CaptureSource:
    """Open a declared source with its own log."""
    assert isinstance(capture, Source)
    return RowSourceCapture(capture, open_log(capture.log_address()))


class RowSourceCapture:
    """A source of rows as the loop of captures sees it: a stream without tables."""

    def __init__(self, source: Source, log: Log) -> None:
        self._source = source
        self._log = log
        self._info = source.prepare_topic(log)
        self._place = f"source {source.name}"
        self._decoder = SourceDecoder(self._info, self._place)
        self._endpoint = source.reader(source, self._info)
        self._endpoint.log = log
        self._is_idle = False

    def start(self, position: str | None, *, start_over: bool = False) -> str:
        stored = None if start_over else _parse(position, self._source.name)
        self._endpoint.start(stored)
        return _dump(stored)

    def poll(self, timeout_s: float) -> StreamPart:
        """Return the next rows, and dead letters of those that do not fit, as one part."""
        read = self._endpoint.read(timeout_s)
        self._is_idle = read is None
        if read is None:
            return StreamPart()
        info = self._log.topic(self._info.name)
        if info.schema != self._info.schema:  # columns were added, renamed or dropped
            self._info = info
            self._decoder = SourceDecoder(info, self._place)
        batch, letters = self._decoder.decode(read.rows, where=read.where, are_json=read.are_json)
        letters = [*read.dead_letters, *letters]
        items: list[StreamItem] = list(read.notes)
        if batch is not None:
            items.append(TopicRows(topic=info.name, ddl=None, key="", rows=batch))
        if letters:
            items.append(DeadRecords(info.name, tuple(letters)))
        return StreamPart(items, _dump(read.position), transactions=1, is_idle=False)

    def is_caught_up(self) -> bool:
        return self._is_idle and self._endpoint.is_caught_up()

    def confirm(self, position: str) -> None:
        stored = _parse(position, self._source.name)
        if stored is not None:
            self._endpoint.confirm(stored)

    def status(self) -> dict[str, Any]:
        return self._endpoint.status()

    def close(self) -> None:
        self._endpoint.close()

    def remove(self) -> list[str]:
        return []

    # There are no tables.

    def tables(self) -> list[TableShape]:
        return []

    def request(self, chunk: ChunkRequest) -> None:
        raise ConfigurationError(f"{chunk.table!r} is no table.", fix="use --start-over.")

    def count(self, table: str) -> int:
        raise ConfigurationError(f"{table!r} is no table.", fix="use --start-over.")


def _dump(position: Any) -> str:
    return json.dumps({"version": VERSION, "position": position}, separators=(",", ":"))


def _parse(text: str | None, name: str) -> Any:
    if text is None:
        return None
    try:
        stored = json.loads(text)
        version = stored["version"]
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(
            f"A capture of a database has the name {name!r}, and its position is no source's.",
            fix="give the source another name.",
        ) from None
    if version > VERSION:
        raise NewerFormat(
            f"The position of the source {name!r} was written by a newer Headrace.",
            fix="upgrade Headrace.",
        )
    return stored["position"]
