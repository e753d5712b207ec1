"""Captures that run until they have caught up, and what their topics then contain."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import headrace as hr
from headrace.cdc.base import TableShape
from headrace.cdc.capture import CaptureStatus
from headrace.cdc.declaration import Capture
from headrace.cdc.topics import fold
from headrace.cdc.writer import CaptureWriter
from headrace.errors import ConfigurationError, RetryError
from tests.cdc.conftest import Postgres


def caught_up(capture: Capture, address: str) -> hr.Log:
    """Run a capture until it has caught up, and open its log."""
    capture.run(log=address, until_caught_up=True)
    return hr.open_log(address)


@contextmanager
def running(
    capture: Capture, address: str, seen: list[CaptureStatus] | None = None
) -> Iterator[hr.Log]:
    """Run a capture while the body does something. Its status goes to `seen`."""
    stop, failures = Event(), list[BaseException]()

    def run() -> None:
        try:
            capture.run(
                log=address,
                stop=stop,
                on_status=lambda status: (seen if seen is not None else []).append(replace(status)),
            )
        except BaseException as error:
            failures.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        with hr.open_log(address) as log:
            yield log
    finally:
        stop.set()
        thread.join(60)
    assert failures == []


def folded_columns(log: hr.Log, topic: str, *columns: str) -> list[tuple[Any, ...]]:
    """Some columns of the newest rows of a topic, sorted."""
    return sorted(tuple(row[name] for name in columns) for row in fold(log, topic).to_pylist())


# Postgres


def postgres_capture(database: Postgres, **settings: Any) -> Capture:
    return hr.cdc.postgres(database.url, name=database.name, **settings)


# SQLite


def do(path: Path, *statements: str) -> None:
    """Run statements in one transaction of a SQLite database."""
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def table(path: Path, name: str = "items") -> list[tuple[Any, ...]]:
    """The rows of a SQLite table, sorted."""
    with sqlite3.connect(path) as db:
        rows = sorted(db.execute(f"SELECT * FROM {name}").fetchall())
    db.close()
    return rows


def folded(log: hr.Log, topic: str = "items") -> list[tuple[Any, ...]]:
    """The newest rows of a topic, sorted."""
    return sorted(tuple(row.values()) for row in fold(log, topic).to_pylist())


# Owners of topics


def writer(log: hr.Log, capture: str, prefix: str = "") -> CaptureWriter:
    return CaptureWriter(log, capture, prefix=prefix, partitions=1, preimages=False)


def check_two_that_start_at_once(log: hr.Log, prefix: str) -> None:
    """Of two captures that have seen no owner, the second one to commit is refused."""
    shape = TableShape("orders", (("id", "BIGINT"),), ("id",))
    first, second = writer(log, f"{prefix}first", prefix), writer(log, f"{prefix}second", prefix)
    for each in (first, second):
        each.reload()
        each.state.position = "0"
        each.add(shape)
    first.commit()
    with pytest.raises(RetryError, match="has just taken"):
        second.commit()
    second.reload()
    assert second.state.position is None
    with pytest.raises(ConfigurationError, match="belongs to the table orders of the capture"):
        second.add(shape)
    first.commit()
    first.close()
    second.close()
