"""What every source of rows promises, as a suite of tests. The package's own sources pass it, and
so should one that you write:

    class TestCounter(SourceContract):
        @pytest.fixture
        def outside(self, tmp_path):
            return CounterServer(tmp_path)               # has add(rows), and add_bad()

        @pytest.fixture
        def source(self, outside):
            return Source(kind="count", name="count", topic="numbers", schema=ROWS,
                          reader=CountSource, options={"port": outside.port})

A subclass gives the fixtures `source`, for rows of the columns `ROWS`, and `outside`, the system
that it reads from. It says whether the source has positions (`is_exactly_once`), and may name more
points at which its process dies. The slow form of the suite, marked `slow`, kills real processes;
the other one raises where they would die.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

import headrace as hr
from headrace.cdc.writer import CaptureWriter
from headrace.errors import ConfigurationError, TransactionFenced
from headrace.log.dead_letters import read_dead_letters
from headrace.sources.base import RowSourceCapture, Source
from headrace.testing.strikes import StrikePoint, Struck, capture_and_die, strike

ROWS = "id BIGINT, name STRING"
STEPS = tuple(
    StrikePoint(owner, method, when, passes)
    for owner, method, passes in (
        (CaptureWriter, "commit", 1),  # the first one is of the session's beginning
        (RowSourceCapture, "confirm", 0),
        (RowSourceCapture, "poll", 1),
    )
    for when in ("before", "after")
)


class Outside(Protocol):
    """The system that a source reads from."""

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows, behind those that are there."""

    def add_bad(self) -> None:
        """Add a row whose `id` is the text "x"."""


def numbered(start: int, stop: int) -> list[dict[str, Any]]:
    """Rows with ids of a range."""
    return [{"id": number, "name": f"row {number}"} for number in range(start, stop)]


class SourceContract:
    """The suite."""

    points: tuple[StrikePoint, ...] = ()
    is_exactly_once = True
    """Whether each row is stored once. If not, rows that were not confirmed may come again."""
    keeps_order = True
    """Whether rows are stored in the order in which they were added."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[hr.Log]:
        with hr.open_log(f"file:{tmp_path / 'log'}") as log:
            yield log

    def read(self, source: Source, log: hr.Log) -> None:
        """Let the source read what is there."""
        source.run(log=log.address, until_caught_up=True)

    def assert_stored(self, source: Source, log: hr.Log, stop: int) -> None:
        """Check that the rows with the ids from 0 on are in the topic."""
        rows = log.read(source.topic).to_pylist()
        ids = [row["id"] for row in rows]
        assert all(row["name"] == f"row {row['id']}" for row in rows)
        if self.is_exactly_once:
            assert Counter(ids) == Counter(range(stop))
        else:
            assert set(ids) == set(range(stop))
        if self.keeps_order:
            assert list(dict.fromkeys(ids)) == list(range(stop))

    def test_rows_are_stored_once_also_by_the_next_run(
        self, source: Source, outside: Outside, log: hr.Log
    ) -> None:
        outside.add(numbered(0, 10))
        self.read(source, log)
        self.assert_stored(source, log, 10)
        self.read(source, log)
        outside.add(numbered(10, 25))
        self.read(source, log)
        self.assert_stored(source, log, 25)
        assert len(log.read(source.topic).to_pylist()) == 25  # nothing went wrong in between

    def test_rows_that_come_while_it_runs_are_stored(
        self, source: Source, outside: Outside, log: hr.Log
    ) -> None:
        stop = threading.Event()
        running = threading.Thread(target=source.run, kwargs={"log": log.address, "stop": stop})
        running.start()
        try:
            for start in range(0, 30, 10):
                outside.add(numbered(start, start + 10))
                _wait_for_rows(log, source.topic, start + 10)
        finally:
            stop.set()
            running.join(30)
        self.assert_stored(source, log, 30)

    def test_a_row_that_does_not_fit_is_a_dead_letter_and_ends_nothing(
        self, source: Source, outside: Outside, log: hr.Log
    ) -> None:
        outside.add(numbered(0, 5))
        outside.add_bad()
        outside.add(numbered(5, 10))
        self.read(source, log)
        self.assert_stored(source, log, 10)
        letters = read_dead_letters(log, source.topic)
        assert len(letters) == 1
        assert letters[0]["place"] == f"source {source.name}"
        self.read(source, log)
        assert len(read_dead_letters(log, source.topic)) == 1

    def test_struck_at_each_step(
        self, source: Source, outside: Outside, log: hr.Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stop = 0
        for point in (*STEPS, *self.points):
            outside.add(numbered(stop, stop + 5))
            stop += 5
            with monkeypatch.context() as patch:
                calls = strike(patch, point)
                with pytest.raises(Struck):
                    self.read(source, log)
                assert calls
            self.read(source, log)
            self.assert_stored(source, log, stop)

    @pytest.mark.slow
    def test_killed_at_each_step(self, source: Source, outside: Outside, log: hr.Log) -> None:
        """As above, but a process of its own, which does not get to say anything."""
        stop = 0
        for point in (*STEPS, *self.points):
            outside.add(numbered(stop, stop + 5))
            stop += 5
            assert capture_and_die(source, log.address, point) == -signal.SIGKILL
            self.read(source, log)
            self.assert_stored(source, log, stop)

    def test_an_older_process_is_refused(
        self, source: Source, outside: Outside, log: hr.Log
    ) -> None:
        failures: list[BaseException] = []

        def run() -> None:
            try:
                source.run(log=log.address)
            except BaseException as error:
                failures.append(error)

        older = threading.Thread(target=run, daemon=True)
        outside.add(numbered(0, 5))
        older.start()
        _wait_for_rows(log, source.topic, 5)
        self.read(source, log)
        deadline_s = time.monotonic() + 30
        stop = 5
        while older.is_alive() and time.monotonic() < deadline_s:
            outside.add(numbered(stop, stop + 1))
            stop += 1
            older.join(0.3)
        assert not older.is_alive()
        assert isinstance(failures[0], TransactionFenced)
        self.read(source, log)
        self.assert_stored(source, log, stop)

    def test_starting_over_reads_what_is_there_again(
        self, source: Source, outside: Outside, log: hr.Log
    ) -> None:
        if not self.is_exactly_once:
            pytest.skip("what has no positions cannot be read again")
        outside.add(numbered(0, 5))
        self.read(source, log)
        source.run(log=log.address, until_caught_up=True, start_over=True)
        ids = [row["id"] for row in log.read(source.topic).to_pylist()]
        assert sorted(ids) == sorted([*range(5), *range(5)])

    def test_a_topic_that_is_missing_is_created_or_asked_for(
        self, source: Source, outside: Outside, log: hr.Log
    ) -> None:
        outside.add(numbered(0, 2))
        with pytest.raises(ConfigurationError, match="--schema"):
            self.read(replace(source, schema=None), log)
        self.read(source, log)
        self.assert_stored(source, log, 2)


def _wait_for_rows(log: hr.Log, topic: str, count: int) -> None:
    deadline_s = time.monotonic() + 30
    while topic not in log.topics() or sum(log.end_offsets(topic).values()) < count:
        assert time.monotonic() < deadline_s, f"{topic} has no {count} rows"
        time.sleep(0.02)
