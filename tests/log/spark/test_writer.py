"""The stream writer as Spark drives it, but without a JVM: which batches are stored, skipped and
refused, and what is left when a commit fails.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import (
    BatchConflict,
    ConfigurationError,
    NewerFormat,
    RetryError,
    TransactionFenced,
)
from headrace.log.file.transaction import FileTransaction
from headrace.log.spark.options import write_options
from headrace.log.spark.writer import BATCH_PROPERTY, RUN_PROPERTY, TaskResult, TopicStreamWriter
from tests.log.spark.conftest import ORDERS, orders


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_topic("t", ORDERS, partitions=2)
        yield opened


def writer(log: hr.Log, **options: str) -> TopicStreamWriter:
    return TopicStreamWriter(
        write_options({"log": log.address, "topic": "t", "writer": "w", **options}, home="")
    )


PROPERTIES: dict[str, str] = {}


@pytest.fixture(autouse=True)
def spark_task_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.log.spark.writer.task_property", PROPERTIES.get)


def task(
    log: hr.Log, first: int, count: int, *, batch: int = 0, run: str = "run-1", **options: str
) -> TaskResult:
    """What a task of a batch returns."""
    PROPERTIES.update({BATCH_PROPERTY: str(batch), RUN_PROPERTY: run})
    return writer(log, **options).write(iter(orders(first, count).to_batches()))


def commit(
    log: hr.Log, batch: int, *ranges: tuple[int, int], run: str = "run-1", **options: str
) -> None:
    """A batch of tasks with so many orders each, as (first, count)."""
    parts = [task(log, first, count, batch=batch, run=run, **options) for first, count in ranges]
    try:
        writer(log, **options).commit(parts, batch)
    except BaseException:
        writer(log, **options).abort(parts, batch)
        raise


def numbers(log: hr.Log) -> list[int]:
    return sorted(log.read("t").to_table()["order_id"].to_pylist())


def staged(log: hr.Log) -> list[Path]:
    return [
        path
        for path in (Path(log.address.removeprefix("file:")) / "staging").rglob("*")
        if path.is_file()
    ]


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
    commit(log, 3, (0, 20))
    commit(log, 3, (7, 13), (0, 7), run="run-2")
    assert numbers(log) == list(range(20))
    assert staged(log) == []
    commit(log, 4, (20, 5), run="run-2")
    assert numbers(log) == list(range(25))


def test_an_empty_batch_counts_too(log: hr.Log) -> None:
    commit(log, 0, (0, 0))
    commit(log, 0, (0, 0))
    with pytest.raises(BatchConflict):
        commit(log, 0, (0, 1))
    assert numbers(log) == []


@pytest.mark.parametrize(("batch", "first"), [(5, 1), (4, 0), (0, 0)])
def test_any_other_number_that_is_not_new_is_refused(log: hr.Log, batch: int, first: int) -> None:
    commit(log, 4, (0, 10))
    commit(log, 5, (10, 10))
    with pytest.raises(BatchConflict, match="it runs with another checkpoint") as refused:
        commit(log, batch, (first, 10))
    assert "another writer name" in refused.value.fix
    assert numbers(log) == list(range(20))
    assert staged(log) == []


def test_writers_and_topics_are_apart(log: hr.Log) -> None:
    commit(log, 7, (0, 10))
    commit(log, 0, (10, 10), writer="other")
    assert numbers(log) == list(range(20))


def test_the_older_run_is_fenced_for_good(log: hr.Log) -> None:
    commit(log, 0, (0, 1), run="old")
    commit(log, 1, (1, 1), run="new")
    for _ in range(2):
        with pytest.raises(TransactionFenced, match="A newer query writes as 'w'"):
            commit(log, 2, (2, 1), run="old")
    commit(log, 2, (3, 1), run="new")
    assert numbers(log) == [0, 1, 3]
    assert staged(log) == []


def test_a_commit_that_is_overtaken_stores_nothing(
    log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another query commits between our look at the notes and our transaction."""
    open_transaction = type(log).transaction

    def overtaken(self: Any, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(type(log), "transaction", open_transaction)
        commit(log, 1, (1, 1), run="b")
        return open_transaction(self, *arguments, **options)

    monkeypatch.setattr(type(log), "transaction", overtaken)
    with pytest.raises(TransactionFenced, match="at the same moment"):
        commit(log, 0, (0, 1), run="a")
    assert numbers(log) == [1]
    assert staged(log) == []


def test_a_commit_that_failed_yet_happened_is_a_success(
    log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FileTransaction.commit

    def answer_lost(self: FileTransaction) -> Any:
        real(self)
        raise RetryError("the answer was lost")

    monkeypatch.setattr(FileTransaction, "commit", answer_lost)
    commit(log, 0, (0, 10))
    assert numbers(log) == list(range(10))


def test_a_commit_that_failed_leaves_nothing_and_can_be_repeated(
    log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: FileTransaction) -> Any:
        raise RetryError("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(FileTransaction, "commit", fails)
        with pytest.raises(RetryError, match="no answer"):
            commit(log, 0, (0, 10))
    assert staged(log) == []
    commit(log, 0, (0, 10))
    assert numbers(log) == list(range(10))


def test_an_abort_discards_what_every_task_did_even_one_that_was_killed(log: hr.Log) -> None:
    part, killed = task(log, 0, 10), task(log, 10, 10)
    other = task(log, 20, 10, batch=1)
    assert len(staged(log)) == 6
    assert killed.staged.rows == 10
    writer(log).abort([part, None], 0)
    assert len(staged(log)) == 2, "those of another batch stay"
    writer(log).commit([other], 1)
    assert numbers(log) == list(range(20, 30))


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
        commit(log, 10, (0, 1))
    assert numbers(log) == []
