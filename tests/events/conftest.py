"""An event store in a fresh log."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace as hr
from headrace.events import EventStore, open_store


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}", durability="os") as opened:
        yield opened


@pytest.fixture
def store(log: hr.Log) -> Iterator[EventStore]:
    with open_store(log, "bank") as opened:
        yield opened
