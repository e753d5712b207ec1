"""The options of `format("headrace")`, checked before anything is opened; and the logs that Spark's
Python processes open by them. Spark passes options as text, with names in lower case.
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
from headrace.names import check_name

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
_SPARK_OPTIONS = {"checkpointlocation", "path", "queryname"}  # added or used by Spark itself
_T = TypeVar("_T")


@dataclass(frozen=True)
class Address:
    """The address of a log, and the options of its Kafka client."""

    log: str
    client: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ReadOptions:
    """What to read, from which offsets to which, and how much at a time."""

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
    """Where to write, and for a stream the name of the writer."""

    address: Address
    topic: str
    writer: str | None = None
    staging_directory: str | None = None


def read_options(options: Mapping[str, str], *, home: str) -> ReadOptions:
    """The options of a read. A relative `file:` address starts from the directory `home`."""
    parser = _OptionParser(options, READ_OPTIONS)
    return ReadOptions(
        address=parser.address(home),
        topic=parser.required("topic", "the topic to read, as in .option('topic', 'orders')"),
        columns=parser.optional("columns", _names),
        starting=parser.text("startingOffsets", "earliest"),
        ending=parser.text("endingOffsets", "latest"),
        max_rows=parser.optional("maxRowsPerBatch", _count),
        headers=parser.optional("includeHeaders", _flag) or False,
        on_corrupt=parser.choice("onCorrupt", {"fail": "raise", "raise": "raise", "skip": "skip"}),
        on_lost=parser.choice("onLost", {"fail": "fail", "earliest": "earliest"}),
        split_rows=parser.optional("splitRows", _count),
    )


def write_options(options: Mapping[str, str], *, home: str) -> WriteOptions:
    """The options of a write. A relative `file:` address starts from the directory `home`."""
    parser = _OptionParser(options, WRITE_OPTIONS)
    writer = parser.text("writer", "")
    return WriteOptions(
        address=parser.address(home),
        topic=parser.required("topic", "the topic to write, as in .option('topic', 'orders')"),
        writer=check_name(writer, what="writer", error=ConfigurationError) if writer else None,
        staging_directory=parser.text("stagingDirectory", "") or None,
    )


class _OptionParser:
    """Parses and checks options, whose names are case-insensitive."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...]) -> None:
        self.values = {name.lower(): value for name, value in options.items()}
        names = {name.lower() for name in known} | _SPARK_OPTIONS
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

    def required(self, name: str, what: str) -> str:
        value = self.text(name, "")
        if not value:
            raise ConfigurationError(f"The option {name!r} is missing.", fix=f"name {what}.")
        return value

    def optional(self, name: str, parse: Callable[[str], _T]) -> _T | None:
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
        log = self.required("log", "the log's address, as in .option('log', 'file:data')")
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


# Shared logs

MAX_OPEN_LOGS = 8
Identity = tuple[int, int] | None
_open: OrderedDict[Address, tuple[int, Identity, Log]] = OrderedDict()
"""The logs that this process has opened, by address, with the process id and the identity of the
directory. They stay open, since opening one for each task would cost more than a small task.
"""


def shared_log(address: Address) -> Log:
    """The log at an address, opened once per process. A log whose directory was replaced is opened
    anew. A log is never created: a misspelt address is an error.
    """
    entry = _open.get(address)
    if entry is not None and entry[:2] == (os.getpid(), _identity(address)):
        _open.move_to_end(address)
        return entry[2]
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
    """Close the log at an address; the next use opens it again. A failed commit calls this."""
    process, _, log = _open.pop(address, (0, None, None))
    if log is not None and process == os.getpid():  # a fork must not close its parent's log
        log.close()


def _identity(address: Address) -> Identity:
    """Distinguishes the log in a directory from another one that replaced it."""
    if not address.log.startswith("file:"):
        return None
    try:
        about = (Path(address.log.removeprefix("file:")) / "headrace.json").stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns
