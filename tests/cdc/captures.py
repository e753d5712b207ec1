"""Captures that run until they have caught up, and what their topics then contain."""

import sqlite3
from pathlib import Path
from typing import Any

import headrace as hr
from headrace.cdc.declaration import Capture
from headrace.cdc.topics import fold
from tests.cdc.conftest import Postgres


def caught_up(capture: Capture, address: str) -> hr.Log:
    """Run a capture until it has caught up, and open its log."""
    capture.run(log=address, until_caught_up=True)
    return hr.open_log(address)


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
