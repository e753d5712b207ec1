"""The ledger where a commit's outcome is unknown, as it can be on a cluster: it is decided before
anybody looks. And two entries never take the same place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace as hr
from headrace.engine.ledger import MAIN_QUERY, Ledger, LedgerEntry
from headrace.errors import RetryError
from headrace.log.file.transaction import FileTransaction
from headrace.log.values import AppendResult
from headrace.testing.pipelines import PipelineTest


class Unsure:
    """Makes the next commit one that nobody hears of, and that is done only when its owner opens
    another transaction: as a cluster's may be.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_next = False
        self.prepared: FileTransaction | None = None
        self._commit, self._next = FileTransaction.commit, FileTransaction.next
        monkeypatch.setattr(FileTransaction, "commit", lambda tx: self.commit(tx))  # noqa: PLW0108  # a method of the transaction
        monkeypatch.setattr(FileTransaction, "next", lambda tx: self.next(tx))  # noqa: PLW0108

    def commit(self, tx: FileTransaction) -> AppendResult:
        if self.is_next:
            self.is_next, self.prepared = False, tx
            raise RetryError("The outcome is unknown.")
        return self._commit(tx)

    def next(self, tx: FileTransaction) -> FileTransaction:
        if self.prepared is not None:
            self._commit(self.prepared)
            self.prepared = None
        return self._next(tx)


@pytest.fixture
def unsure(monkeypatch: pytest.MonkeyPatch) -> Unsure:
    return Unsure(monkeypatch)


def shop() -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="k BIGINT")
    pipeline.view("shown", orders.group_by("k").aggregate(n=hr.agg.count()))
    return pipeline


def test_a_tick_whose_commit_was_unsure_is_not_recorded_twice(
    tmp_path: Path, unsure: Unsure
) -> None:
    with PipelineTest(shop(), tmp_path) as test:
        test.feed("orders", [{"k": 0}])
        unsure.is_next = True
        with pytest.raises(RetryError, match="unknown"):
            test.cut()
        test.feed("orders", [{"k": 0}])
        test.settle()
        assert [row["tick"] for row in test.log.read("__ticks.shop").to_pylist()] == [0, 1, 2]
        assert test.view("shown") == [{"k": 0, "n": 2}]


def test_a_batch_whose_commit_was_unsure_is_not_done_twice(tmp_path: Path, unsure: Unsure) -> None:
    with PipelineTest(shop(), tmp_path) as test:
        test.feed("orders", [{"k": 0}])
        test.cut()
        unsure.is_next = True
        with pytest.raises(RetryError, match="unknown"):
            test.step()
        assert not test.step(), "it has happened"
        assert len(test.log.read("__ledger.shop").to_table()) == 1
        assert test.view("shown") == [{"k": 0, "n": 1}]


def test_an_entry_is_refused_if_the_newest_is_not_the_one_it_follows(tmp_path: Path) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        ledger = Ledger.open(log, "shop")
        ledger.take_over()
        for tick in (1, 2):
            tx = ledger.transaction()
            ledger.add(tx, LedgerEntry(ledger.epoch, MAIN_QUERY, tick))
            ledger.commit(tx)
        tx = ledger.transaction()
        ledger.add(tx, LedgerEntry(ledger.epoch, MAIN_QUERY, 3))
        with log.transaction("somebody") as other:
            other.set_note("ledger.shop.main", LedgerEntry(ledger.epoch, MAIN_QUERY, 9).to_json())
        with pytest.raises(RetryError, match="was aborted by another runner"):
            ledger.commit(tx)
        found = ledger.last(MAIN_QUERY)
        assert found is not None
        assert found.tick == 9
