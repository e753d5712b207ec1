"""What a user asks of `format("headrace")`: the options, checked before anything is opened. Spark
hands them over as text, names in lower case.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headrace.errors import ConfigurationError, nearest
from headrace.log import open_log
from headrace.log.api import Log
from headrace.log.topic_config import check_name

READ_OPTIONS = (
    "log",
    "topic",
    "columns",
    "startingOffsets",
    "endingOffsets",
    "maxRowsPerBatch",
    "includeHeaders",
    "onCorrupt",
    "onLost",
    "splitRows",
)
WRITE_OPTIONS = ("log", "topic", "writer", "stagingDirectory")
KAFKA_PREFIX = "kafka."
# Spark adds these to what the user wrote, or uses them itself.
_SPARKS_OWN = {"checkpointlocation", "path", "queryname"}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Address:
    """Which log, and with which options of its client."""

    log: str
    client: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ReadOptions:
    """What to read, from where to where, and how much at a time."""

    address: Address
    topic: str
    columns: tuple[str, ...] | None = None
    starting: str = "earliest"
    ending: str = "latest"
    max_rows: int | None = None
    headers: bool = False
    on_corrupt: str = "raise"
    on_lost: str = "fail"
    split_rows: int | None = None


@dataclass(frozen=True)
class WriteOptions:
    """Where to write, and, for a stream, as whom."""

    address: Address
    topic: str
    writer: str | None = None
    staging_directory: str | None = None


def read_options(options: Mapping[str, str], *, home: str) -> ReadOptions:
    given = _Given(options, READ_OPTIONS)
    return ReadOptions(
        address=given.address(home),
        topic=given.needed("topic", "the topic to read, as in .option('topic', 'orders')"),
        columns=given.parsed("columns", _names),
        starting=given.text("startingOffsets", "earliest"),
        ending=given.text("endingOffsets", "latest"),
        max_rows=given.parsed("maxRowsPerBatch", _count),
        headers=given.parsed("includeHeaders", _flag) or False,
        on_corrupt=given.choice("onCorrupt", {"fail": "raise", "raise": "raise", "skip": "skip"}),
        on_lost=given.choice("onLost", {"fail": "fail", "earliest": "earliest"}),
        split_rows=given.parsed("splitRows", _count),
    )


def write_options(options: Mapping[str, str], *, home: str) -> WriteOptions:
    given = _Given(options, WRITE_OPTIONS)
    writer = given.text("writer", "")
    return WriteOptions(
        address=given.address(home),
        topic=given.needed("topic", "the topic to write, as in .option('topic', 'orders')"),
        writer=check_name(writer, what="writer", error=ConfigurationError) if writer else None,
        staging_directory=given.text("stagingDirectory", "") or None,
    )


class _Given:
    """Options as Spark hands them over."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...]) -> None:
        self.values = {name.lower(): value for name, value in options.items()}
        names = {name.lower() for name in known} | _SPARKS_OWN
        for name in self.values:
            if name not in names and not name.startswith((KAFKA_PREFIX, "__")):
                raise ConfigurationError(
                    f"format('headrace') has no option {name!r} here: {nearest(name, known)}",
                    fix=(
                        f"use {', '.join(known)}; options of Kafka's client begin with"
                        f" {KAFKA_PREFIX!r}."
                    ),
                )

    def text(self, name: str, default: str) -> str:
        return self.values.get(name.lower(), default).strip()

    def needed(self, name: str, what: str) -> str:
        value = self.text(name, "")
        if not value:
            raise ConfigurationError(f"The option {name!r} is missing.", fix=f"name {what}.")
        return value

    def parsed(self, name: str, parse: Callable[[str], _T]) -> _T | None:
        value = self.text(name, "")
        if not value:
            return None
        try:
            return parse(value)
        except ValueError as error:
            raise ConfigurationError(
                f"The option {name!r} is {value!r}.", fix=f"give it {error}."
            ) from None

    def choice(self, name: str, choices: Mapping[str, str]) -> str:
        value = self.text(name, next(iter(choices))).lower()
        if value not in choices:
            raise ConfigurationError(f"The option {name!r} is {value!r}: {nearest(value, choices)}")
        return choices[value]

    def address(self, home: str) -> Address:
        log = self.needed("log", "the log's address, as in .option('log', 'file:data')")
        client = {
            name.removeprefix(KAFKA_PREFIX): value
            for name, value in self.values.items()
            if name.startswith(KAFKA_PREFIX)
        }
        if client and not log.startswith("kafka://"):
            raise ConfigurationError(
                f"The log is {log!r}, and options that begin with {KAFKA_PREFIX!r} are for a log on"
                " Kafka.",
                fix="leave them out.",
            )
        if log.startswith("file:"):
            log = "file:" + os.path.join(home, os.path.expanduser(log.removeprefix("file:")))  # noqa: PTH118, PTH111
        return Address(log, tuple(sorted(client.items())))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number from 1 on")
    return int(text)


def _flag(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise ValueError("true or false")
    return text.lower() == "true"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ValueError("column names separated by commas, each once")
    return names


# Logs as Spark's Python processes have them: opened when first needed, then kept, since opening one
# for each task would cost more than a small task itself.
#
# A process keeps a few. A log whose directory was replaced since is opened anew, and so is one that
# failed in a commit (`forget`).


MAX_OPEN_LOGS = 8
Identity = tuple[int, int] | None
_open: OrderedDict[Address, tuple[int, Identity, Log]] = OrderedDict()


def shared_log(address: Address) -> Log:
    """This process's handle of a log. Never makes a new log: a misspelt address is an error."""
    kept = _open.get(address)
    if kept is not None and kept[:2] == (os.getpid(), _identity(address)):
        _open.move_to_end(address)
        return kept[2]
    close_shared_log(address)
    log = (
        open_log(address.log, create=False)
        if address.log.startswith("file:")
        else open_log(address.log, **dict(address.client))
    )
    _open[address] = (os.getpid(), _identity(address), log)
    while len(_open) > MAX_OPEN_LOGS:
        close_shared_log(next(iter(_open)))
    return log


def close_shared_log(address: Address) -> None:
    """Close a log's handle; the next one who needs it opens it again."""
    process, _, log = _open.pop(address, (0, None, None))
    if (
        log is not None and process == os.getpid()
    ):  # a parent's handle, inherited by a fork, is not ours to close
        log.close()


def _identity(address: Address) -> Identity:
    """What tells a directory's log from another one that was made in its place."""
    if not address.log.startswith("file:"):
        return None
    try:
        about = (Path(address.log.removeprefix("file:")) / "headrace.json").stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns
