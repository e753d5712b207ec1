"""Sinks that follow topics on Kafka, where a delete is a tombstone and transaction markers take
offsets: still each change once, whatever dies.
"""

import random
import signal
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import SinkFenced
from headrace.log.dead_letters import read_dead_letters
from headrace.sinks.checkpoint import new_owner
from headrace.sinks.sqlite_target import SqliteTarget
from headrace.testing.sink_contract import (
    ACCOUNTS,
    STEPS,
    account,
    caught_up,
    next_batch,
    no_dead_letters,
    rows_of,
)
from headrace.testing.strikes import StrikePoint, Struck, strike, sync_and_die
from tests.cdc.conftest import Postgres
from tests.servers.kafka_broker import KafkaBroker
from tests.sinks.webhook_receiver import WebhookReceiver

pytestmark = pytest.mark.kafka


@pytest.fixture
def log(kafka_broker: KafkaBroker) -> Iterator[hr.Log]:
    with hr.open_log(kafka_broker.address) as log:
        yield log


@pytest.fixture
def accounts(log: hr.Log) -> str:
    return log.create_table(
        f"accounts-{uuid.uuid4().hex[:8]}", ACCOUNTS, key="id", partitions=2
    ).name


def change(log: hr.Log, topic: str, chance: random.Random, amount: int) -> None:
    """A transaction, one that comes to nothing, and a delete."""
    with log.transaction(f"writer.{topic}") as tx:
        tx.upsert(topic, [account(chance.randrange(20), amount) for _ in range(6)])
        tx.delete(topic, [chance.randrange(20)])
    given_up = log.transaction(f"writer.{topic}")
    given_up.upsert(topic, [account(999, amount)])
    given_up.abort()


def assert_equal(sink: hr.sinks.Sink, log: hr.Log, topic: str) -> None:
    compared = sink.check(topic, log=log.address)
    assert compared.is_equal, compared.examples
    assert compared.rows > 0
    assert compared.positions == log.end_offsets(topic)


def test_struck_at_each_step(
    log: hr.Log, accounts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, chance = hr.sinks.sqlite(tmp_path / "target.db", table="accounts"), random.Random(1)
    for number, step in enumerate(STEPS):
        change(log, accounts, chance, number)
        with monkeypatch.context() as patch:
            strike(patch, StrikePoint(SqliteTarget, *step))
            with pytest.raises(Struck):
                caught_up(sink, log, accounts)
        assert sink.check(accounts, log=log.address).is_equal
        caught_up(sink, log, accounts)
        assert_equal(sink, log, accounts)
    assert caught_up(sink, log, accounts).status.rows == 0


def test_an_older_owner_is_refused(log: hr.Log, accounts: str, tmp_path: Path) -> None:
    sink = hr.sinks.sqlite(tmp_path / "target.db", table="accounts")
    change(log, accounts, random.Random(1), 1)
    shape = sink.shape_for(log.topic(accounts))
    with sink.open(shape, log) as older, sink.open(shape, log) as newer:
        older.prepare()
        batch = next_batch(log, older, older.begin(new_owner()))
        newer.begin(new_owner())
        with pytest.raises(SinkFenced):
            older.apply(batch, no_dead_letters)
        assert newer.apply(batch, no_dead_letters)
    assert_equal(sink, log, accounts)


def test_a_stream_and_its_dead_letters(log: hr.Log, tmp_path: Path) -> None:
    """One row a commit; offsets have gaps where transactions ended."""
    topic = log.create_topic(f"payments-{uuid.uuid4().hex[:8]}", ACCOUNTS, key="id").name
    for number in range(3):
        with log.transaction(f"writer.{topic}") as tx:
            tx.append(topic, [account(7, number), {**account(0, number), "id": None}])
    appended = hr.sinks.sqlite(tmp_path / "target.db", table="history", batch_rows=1)
    caught_up(appended, log, topic)
    assert [row["amount"] for row in rows_of(appended, log, topic)] == [0, 0, 1, 1, 2, 2]
    assert_equal(appended, log, topic)
    merged = hr.sinks.sqlite(
        tmp_path / "target.db", table="newest", key="id", name=f"newest-{topic}"
    )
    assert caught_up(merged, log, topic).status.refused == 3
    assert len(read_dead_letters(log, f"newest-{topic}")) == 3
    assert_equal(merged, log, topic)


def test_rows_to_a_webhook(log: hr.Log, accounts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is a note, in a Kafka transaction of its own."""
    receiver, chance = WebhookReceiver(), random.Random(1)
    sink = hr.sinks.webhook(receiver.url, internal="127.0.0.1", request_rows=4, table="accounts")
    change(log, accounts, chance, 1)
    for step in (("_store", "before", 1), ("_store", "after", 1), ("_post", "after", 0)):
        change(log, accounts, chance, 2)
        with monkeypatch.context() as patch:
            from headrace.sinks.webhook_target import WebhookTarget

            strike(patch, StrikePoint(WebhookTarget, *step))
            with pytest.raises(Struck):
                caught_up(sink, log, accounts)
    caught_up(sink, log, accounts)
    expected = {str(row["id"]): row["amount"] for row in hr.cdc.fold(log, accounts).to_pylist()}
    assert {
        key: int(float(row["amount"])) for key, row in receiver.tables["accounts"].items()
    } == expected
    receiver.stop()


@pytest.mark.slow
def test_killed_at_each_step_into_postgres(log: hr.Log, accounts: str, postgres: Postgres) -> None:
    from headrace.sinks.postgres_target import PostgresTarget

    sink, chance = replace(hr.sinks.postgres(postgres.url), table="accounts"), random.Random(2)
    for number, step in enumerate(STEPS):
        change(log, accounts, chance, number)
        point = StrikePoint(PostgresTarget, *step)
        assert sync_and_die(sink, log.address, accounts, point) == -signal.SIGKILL
        assert sink.check(accounts, log=log.address).is_equal
        caught_up(sink, log, accounts)
        assert_equal(sink, log, accounts)
