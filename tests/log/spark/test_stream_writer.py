"""The stream writer as Spark drives it, but without a JVM: which batches are stored, skipped and refused, and what is left when a commit fails."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import BatchConflict, ConfigurationError, NewerFormat, RetryError, TransactionFenced
from headrace.log.file.transaction import FileTransaction
from headrace.log.spark.options import write_options
from headrace.log.spark.staging import TaskRows
from headrace.log.spark.stream_writer import TopicStreamWriter
from tests.log.spark.conftest import ORDERS, orders


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_topic("t", ORDERS, partitions=2)
        yield opened


def writer(log: hr.Log, **options: str) -> TopicStreamWriter:
    return TopicStreamWriter(write_options({"log": log.address, "topic": "t", "writer": "w", **options}, home=""))


def task(log: hr.Log, first: int, count: int, *, run: str | None = "run-1") -> TaskRows:
    """What a task of a batch returns."""
    message = writer(log).write(iter(orders(first, count).to_batches()))
    return replace(message, run=run)


def numbers(log: hr.Log) -> list[int]:
    return sorted(log.read("t").to_table()["order_id"].to_pylist())


def staged(log: hr.Log) -> list[Path]:
    return [path for path in (Path(log.address.removeprefix("file:")) / "staging").rglob("*") if path.is_file()]


def test_a_batch_is_one_transaction_with_its_number_and_digest(log: hr.Log) -> None:
    parts = [task(log, 0, 10), task(log, 10, 10)]
    assert numbers(log) == []
    writer(log).commit(parts, 0)
    assert numbers(log) == list(range(20))
    note = json.loads(log.note("spark-writer.w.t") or "")
    assert (note["batch"], note["rows"], note["version"]) == (0, 20, 1)
    assert len(log.read("t").to_table()["_timestamp"].unique()) == 1
    assert staged(log) == []


def test_the_last_batch_again_is_skipped_however_it_was_split(log: hr.Log) -> None:
    writer(log).commit([task(log, 0, 20)], 3)
    writer(log).commit([task(log, 7, 13, run="run-2"), task(log, 0, 7, run="run-2")], 3)
    assert numbers(log) == list(range(20))
    assert staged(log) == []
    writer(log).commit([task(log, 20, 5, run="run-2")], 4)
    assert numbers(log) == list(range(25))


def test_an_empty_batch_counts_too(log: hr.Log) -> None:
    writer(log).commit([task(log, 0, 0)], 0)
    writer(log).commit([task(log, 0, 0)], 0)
    with pytest.raises(BatchConflict):
        writer(log).commit([task(log, 0, 1)], 0)
    assert numbers(log) == []


@pytest.mark.parametrize(("batch", "first"), [(5, 1), (4, 0), (0, 0)])
def test_any_other_number_that_is_not_new_is_refused(log: hr.Log, batch: int, first: int) -> None:
    writer(log).commit([task(log, 0, 10)], 4)
    writer(log).commit([task(log, 10, 10)], 5)
    with pytest.raises(BatchConflict, match="it runs with another checkpoint") as refused:
        writer(log).commit([task(log, first, 10)], batch)
    assert "another writer name" in refused.value.fix
    assert numbers(log) == list(range(20))
    assert staged(log) == []


def test_writers_and_topics_are_apart(log: hr.Log) -> None:
    writer(log).commit([task(log, 0, 10)], 7)
    writer(log, writer="other").commit([task(log, 10, 10)], 0)
    assert numbers(log) == list(range(20))


def test_the_older_run_is_fenced_for_good(log: hr.Log) -> None:
    writer(log).commit([task(log, 0, 1, run="old")], 0)
    writer(log).commit([task(log, 1, 1, run="new")], 1)
    for _ in range(2):
        with pytest.raises(TransactionFenced, match="A newer query writes as 'w'"):
            writer(log).commit([task(log, 2, 1, run="old")], 2)
    writer(log).commit([task(log, 3, 1, run="new")], 2)
    assert numbers(log) == [0, 1, 3]
    assert staged(log) == []


def test_a_commit_that_is_overtaken_stores_nothing(log: hr.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another query commits between our look at the notes and our transaction."""
    ours, theirs, open_transaction = task(log, 0, 1, run="a"), task(log, 1, 1, run="b"), type(log).transaction

    def overtaken(self: Any, *arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        writer(log).commit([theirs], 0)
        return open_transaction(self, *arguments, **options)

    monkeypatch.setattr(type(log), "transaction", overtaken)
    with pytest.raises(TransactionFenced, match="at the same moment"):
        writer(log).commit([ours], 0)
    assert numbers(log) == [1]
    assert staged(log) == []


def test_a_commit_that_failed_yet_happened_is_a_success(log: hr.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = FileTransaction.commit

    def answer_lost(self: FileTransaction) -> Any:
        commit(self)
        raise RetryError("the answer was lost")

    part = task(log, 0, 10)
    monkeypatch.setattr(FileTransaction, "commit", answer_lost)
    writer(log).commit([part], 0)
    monkeypatch.undo()
    assert numbers(log) == list(range(10))


def test_a_commit_that_failed_keeps_what_it_may_need(log: hr.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it happened may show later; staged rows that a commit adopts must then still be there. They are swept in a day."""
    part = task(log, 0, 10)

    def fails(_: FileTransaction) -> Any:
        raise RetryError("no answer")

    monkeypatch.setattr(FileTransaction, "commit", fails)
    with pytest.raises(RetryError, match="no answer"):
        writer(log).commit([part], 0)
    monkeypatch.undo()
    writer(log).abort([part], 0)
    assert len(staged(log)) == 2
    writer(log).commit([part], 0)
    assert numbers(log) == list(range(10))


def test_an_abort_after_a_failed_task_discards_what_the_others_did(log: hr.Log) -> None:
    part = task(log, 0, 10)
    assert len(staged(log)) == 2
    writer(log).abort([part, None], 0)
    assert staged(log) == []
    assert numbers(log) == []


def test_a_task_that_fails_cleans_up_after_itself(log: hr.Log) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield from orders(0, 10).to_batches()
        raise ValueError("upstream")

    with pytest.raises(ValueError, match="upstream"):
        writer(log).write(rows())
    assert staged(log) == []


def test_a_writer_without_a_name_is_refused(log: hr.Log) -> None:
    with pytest.raises(ConfigurationError, match="needs the option 'writer'"):
        writer(log, writer="")


def test_a_note_of_a_newer_version_is_refused(log: hr.Log) -> None:
    with log.transaction("x") as transaction:
        transaction.set_note("spark-writer.w.t", json.dumps({"version": 2, "batch": 9}))
    with pytest.raises(NewerFormat):
        writer(log).commit([task(log, 0, 1)], 10)
    assert numbers(log) == []
