"""The owner of a transaction id on Kafka, where a client that failed is replaced by another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import headrace as hr
from headrace import errors
from headrace.log.kafka import transaction as transactions

pytestmark = pytest.mark.kafka

SCHEMA = "n BIGINT, text STRING"


def numbers(log: hr.Log, topic: str) -> list[int]:
    return [row["n"] for row in log.read(topic).to_pylist()]


def fail(tx: Any, topic: str) -> None:
    """Commit what the broker refuses, after which the client cannot be used any more."""
    tx.append(topic, [{"n": 0, "text": "x" * 5000}])
    with pytest.raises(errors.InputError, match=r"max\.message\.bytes"):
        tx.commit()


@pytest.fixture
def topic(log: hr.Log, name: Callable[[str], str]) -> str:
    created = log.create_topic(name("t"), SCHEMA).name
    internals: Any = log
    internals._connection.admin.configure_topic(created, {"max.message.bytes": "1000"})
    return created


def test_an_older_owner_whose_client_failed_took_the_id_back(
    log: hr.Log, other: hr.Log, topic: str
) -> None:
    older = log.transaction(topic)
    fail(older, topic)
    newer = other.transaction(topic)
    with pytest.raises(errors.TransactionFenced, match="newer owner"):
        older.next()
    newer.append(topic, [{"n": 1, "text": ""}])
    newer.commit()
    with newer.next() as tx:
        tx.append(topic, [{"n": 2, "text": ""}])
    assert numbers(log, topic) == [1, 2]


def test_an_owner_replaces_its_client_that_failed(log: hr.Log, topic: str) -> None:
    first = log.transaction(topic)
    fail(first, topic)
    with first.next() as tx:
        tx.append(topic, [{"n": 1, "text": ""}])
    assert numbers(log, topic) == [1]


def test_a_newer_owner_comes_between_the_check_and_the_new_client(
    log: hr.Log, other: hr.Log, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older owner gives up after all. The newer one is still the owner, and goes on."""
    older = log.transaction(topic)
    fail(older, topic)
    open_client = transactions._open_client
    newer: list[Any] = []

    def open_later(*arguments: Any) -> Any:
        if not newer:
            monkeypatch.setattr(transactions, "_open_client", open_client)
            newer.append(other.transaction(topic))
        return open_client(*arguments)

    monkeypatch.setattr(transactions, "_open_client", open_later)
    with pytest.raises(errors.TransactionFenced):
        older.next()
    newer[0].append(topic, [{"n": 1, "text": ""}])
    with pytest.raises(errors.RetryError, match=r"tx\.next"):
        newer[0].commit()
    with newer[0].next() as tx:
        tx.append(topic, [{"n": 2, "text": ""}])
    assert numbers(log, topic) == [2]
    with pytest.raises(errors.TransactionFenced):
        older.next()


def test_an_older_owner_replaces_its_client_while_a_newer_one_begins(
    log: hr.Log, other: hr.Log, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one claims the id again, as often as it is taken away before it could."""
    older = log.transaction(topic)
    fail(older, topic)
    open_client = transactions._open_client
    replaced: list[Any] = []

    def open_then_lose(*arguments: Any) -> Any:
        client = open_client(*arguments)
        if not replaced:
            monkeypatch.setattr(transactions, "_open_client", open_client)
            replaced.append(older.next())
        return client

    monkeypatch.setattr(transactions, "_open_client", open_then_lose)
    newer = other.transaction(topic)
    replaced[0].append(topic, [{"n": 1, "text": ""}])
    with pytest.raises(errors.TransactionFenced):
        replaced[0].commit()
    newer.append(topic, [{"n": 2, "text": ""}])
    newer.commit()
    assert numbers(log, topic) == [2]
