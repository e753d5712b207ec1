"""The transfers test: money moves between accounts, and whoever looks, whenever, finds as much of
it as there was: in one view, and between views.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest

from headrace.runtime.batch_size import BatchWidth, Width
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from headrace.views.reader import ViewReader
from tests.e2e.bank import bank, check_every_tick, check_moment, opening, transfer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_syncs", "mixed_widths")


@pytest.fixture
def mixed_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch of a run is as wide as chance has it."""
    rng = random.Random(3)

    def choose(_self: BatchWidth, _rows: int, **_options: Any) -> Width:
        return "one" if rng.random() < 0.5 else "wide"

    monkeypatch.setattr(BatchWidth, "choose", choose)


def transfers(test: PipelineTest, stop: Event) -> None:
    """Each is one append."""
    rng = random.Random(7)
    with test.log.producer("moves") as producer:
        while not stop.is_set():
            producer.append(transfer(rng))
            time.sleep(0.002)


@contextmanager
def running(test: PipelineTest) -> Iterator[None]:
    """The pipeline and the transfers, each in a thread of its own."""
    stop, errors = Event(), list[BaseException]()

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [
        Thread(target=guarded, args=(work,))
        for work in (lambda: test.runner.run(stop=stop), lambda: transfers(test, stop))
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


def look_on(views: Path, *, ticks: int) -> None:
    """Look again and again until the pipeline has moved on by so many ticks."""
    seen: set[int] = set()
    deadline = time.monotonic() + 300
    with ViewReader(views) as reader:
        while len(seen) < ticks:
            assert time.monotonic() < deadline
            with reader.snapshot() as snap:
                seen.add(check_moment(snap))


def check_transfers(root: Path, spark: Any, *, ticks: int) -> None:
    with PipelineTest(bank(), root, spark) as test:
        test.feed("moves", opening())
        test.settle()
        with running(test):
            look_on(root / "state" / "views.db", ticks=ticks)
        test.settle()
        check_every_tick(root / "state" / "views.db")


def test_views_never_contradict_each_other_while_money_moves(tmp_path: Path) -> None:
    check_transfers(tmp_path, PlainSpark(), ticks=10)


@pytest.mark.spark
def test_nor_do_they_on_spark(tmp_path: Path, spark: SparkSession) -> None:
    check_transfers(tmp_path, spark, ticks=4)


@pytest.mark.slow
@pytest.mark.spark
def test_nor_do_they_for_a_long_time(tmp_path: Path, spark: SparkSession) -> None:
    check_transfers(tmp_path, spark, ticks=100)
