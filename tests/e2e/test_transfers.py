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

import headrace as hr
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from headrace.views.reader import Snapshot, ViewReader
from tests.e2e.everything import folded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_syncs")
ACCOUNTS, EACH = 20, 100
MONEY = ACCOUNTS * EACH


def bank() -> hr.Pipeline:
    """The total over the balances is computed from them, a stage behind; what went in and out is
    counted on its own.
    """
    pipeline = hr.Pipeline("bank")
    moves = pipeline.topic(
        "moves", schema="bank STRING, account BIGINT, amount BIGINT", key="account", partitions=3
    )
    balances = moves.group_by("bank", "account").aggregate(
        balance=hr.agg.sum("amount"), moves=hr.agg.count()
    )
    pipeline.view("balances", balances)
    pipeline.view(
        "totals",
        balances.group_by("bank").aggregate(
            total=hr.agg.sum("balance"), accounts=hr.agg.count(), moves=hr.agg.sum("moves")
        ),
    )
    pipeline.view(
        "turnover", moves.group_by("bank").aggregate(net=hr.agg.sum("amount"), moves=hr.agg.count())
    )
    return pipeline


def move(account: int, amount: int) -> dict[str, Any]:
    return {"bank": "ours", "account": account, "amount": amount}


def transfers(test: PipelineTest, stop: Event) -> None:
    """Each is one append, of two rows that usually lie in two partitions."""
    rng = random.Random(7)
    with test.log.producer("moves") as producer:
        while not stop.is_set():
            payer, payee = rng.sample(range(ACCOUNTS), 2)
            amount = rng.randrange(1, 50)
            producer.append([move(payer, -amount), move(payee, amount)])
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


def check_moment(snap: Snapshot) -> int:
    """Everything that is shown at one moment; returns its tick."""
    balances = snap.table("balances").to_pylist()
    (total,), (turnover,) = snap.table("totals").to_pylist(), snap.table("turnover").to_pylist()
    assert snap.tick("balances") == snap.tick("totals") == snap.tick("turnover")
    assert sum(row["balance"] for row in balances) == total["total"] == turnover["net"] == MONEY
    assert sum(row["moves"] for row in balances) == total["moves"] == turnover["moves"]
    assert len(balances) == total["accounts"] == ACCOUNTS
    return snap.tick("balances")


def look_on(views: Path, *, ticks: int) -> None:
    """Look again and again until the pipeline has moved on by so many ticks."""
    seen: set[int] = set()
    deadline = time.monotonic() + 300
    with ViewReader(views) as reader:
        while len(seen) < ticks:
            assert time.monotonic() < deadline
            with reader.snapshot() as snap:
                seen.add(check_moment(snap))


def check_every_tick(views: Path) -> None:
    """Also those that nobody looked at: the changes of each tick leave the total as it is."""
    with ViewReader(views) as reader:
        by_tick = list(reader.changes_since("balances", 0))
        totals = {
            row["total"]
            for _, rows in reader.changes_since("totals", 0)
            for row in rows.to_pylist()
        }
    assert totals == {MONEY}
    balance = 0
    for _, rows in by_tick:
        sign = {"insert": 1, "update_postimage": 1, "update_preimage": -1, "delete": -1}
        balance += sum(sign[row["_change_type"]] * row["balance"] for row in rows.to_pylist())
        assert balance == MONEY
    assert (
        len(folded([(tick, row) for tick, rows in by_tick for row in rows.to_pylist()], "account"))
        == ACCOUNTS
    )


def check_transfers(root: Path, spark: Any, *, ticks: int) -> None:
    with PipelineTest(bank(), root, spark) as test:
        test.feed("moves", [move(account, EACH) for account in range(ACCOUNTS)])
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
