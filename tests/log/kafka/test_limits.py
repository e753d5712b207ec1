"""Limits that Kafka has and the embedded log does not, and commits with an unknown outcome."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from headrace import errors
from headrace.log.api import Log
from headrace.log.kafka import producer as producer_module
from headrace.log.kafka import transaction as transaction_module

pytestmark = pytest.mark.kafka
MakeName = Callable[[str], str]


@pytest.fixture
def events(log: Log, name: MakeName) -> str:
    return log.create_topic(name("events"), "n BIGINT, text STRING", partitions=2).name


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"n": n, "text": "x"} for n in numbers]


def found(log: Log, topic: str) -> list[int]:
    return sorted(row["n"] for row in log.read(topic).to_pylist())


def test_a_row_larger_than_a_record_is_refused_before_anything_is_stored(
    log: Log, events: str
) -> None:
    with (
        log.producer(events) as producer,
        pytest.raises(errors.BadRows, match=r"(?s)Row 1.*message\.max\.bytes"),
    ):
        producer.append([*rows(1), {"n": 2, "text": "x" * 1_100_000}])
    assert log.end_offsets(events) == {0: 0, 1: 0}


def test_reserved_headers_are_refused(log: Log, events: str) -> None:
    with log.producer(events) as producer, pytest.raises(errors.BadRows, match="reserved"):
        producer.append(rows(1), headers=[{"headrace.control": b"x"}])


def test_a_compacted_topic_needs_keys(log: Log, name: MakeName) -> None:
    topic = log.create_topic(name("compacted"), "k STRING, v BIGINT", key="k", compact=True).name
    with log.producer(topic) as producer:
        producer.append({"k": "a", "v": 1})
        with pytest.raises(errors.BadRows, match="no key"):
            producer.append([{"k": "b", "v": 1}, {"k": None, "v": 2}])
    log.append_control(topic, 0, b"tick")
    assert [control.payload for control in log.read_control(topic, 0)] == [b"tick"]


def test_settings_that_the_brokers_refuse_are_an_error_with_their_words(
    log: Log, name: MakeName
) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"segment\.bytes"):
        log.create_topic(name("tiny"), "n BIGINT", segment_bytes=1000)
    assert name("tiny") not in log.topics()


def test_timeouts_that_the_brokers_refuse_are_an_error(
    log: Log, events: str, name: MakeName
) -> None:
    with pytest.raises(errors.ConfigurationError, match="session"):
        log.consumer(events, group=name("g"), session_timeout="100 milliseconds")
    with pytest.raises(errors.ConfigurationError, match="timeout"):
        log.transaction(name("job"), timeout="1 day")


def test_threads_share_a_log(log: Log, events: str) -> None:
    def append(worker: int) -> None:
        with log.producer(events) as producer:
            for n in range(20):
                producer.append(rows(worker * 100 + n), partition=n % 2)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(append, range(8)))
    assert found(log, events) == sorted(worker * 100 + n for worker in range(8) for n in range(20))


# Unknown outcomes: the answer to a commit is lost, before or after it happened


def lose_the_answer(monkeypatch: pytest.MonkeyPatch, module: Any, *, after: bool) -> None:
    real = module.commit_transaction

    def commit(client: Any, seconds: float) -> None:
        monkeypatch.setattr(module, "commit_transaction", real)
        if after:
            real(client, seconds)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the answer was lost"))

    monkeypatch.setattr(module, "commit_transaction", commit)


@pytest.mark.parametrize("after", [True, False])
def test_a_lost_answer_to_a_numbered_append_is_looked_up(
    log: Log, events: str, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    with log.producer(events, id="p") as producer:
        producer.append(rows(1, 2), sequence=0)
        lose_the_answer(monkeypatch, producer_module, after=after)
        if after:
            assert not producer.append(rows(3, 4), sequence=1).duplicate
        else:
            with pytest.raises(errors.RetryError, match="nothing was stored"):
                producer.append(rows(3, 4), sequence=1)
            assert producer.last_sequence == 0
            assert found(log, events) == [1, 2]
        assert producer.append(rows(3, 4), sequence=1).duplicate is after
        producer.append(rows(5), sequence=2)
    assert found(log, events) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("after", [True, False])
def test_a_lost_answer_to_a_transaction_is_looked_up(
    log: Log, events: str, name: MakeName, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    transaction = log.transaction(name("job"))
    transaction.append(events, rows(1, 2))
    transaction.set_note(name("n"), "1")
    lose_the_answer(monkeypatch, transaction_module, after=after)
    if after:
        transaction.commit()
    else:
        with pytest.raises(errors.RetryError):
            transaction.commit()
    assert found(log, events) == ([1, 2] if after else [])
    assert log.note(name("n")) == ("1" if after else None)


def test_an_append_without_an_id_says_that_its_outcome_is_unknown(
    log: Log, events: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_answer(monkeypatch, producer_module, after=True)
    with log.producer(events) as producer, pytest.raises(errors.RetryError, match="not known"):
        producer.append(rows(1, 2))


def test_a_large_transaction_is_still_all_or_nothing(
    log: Log, other: Log, events: str, name: MakeName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_module, "MAX_BUFFERED_BYTES", 1000)
    with log.transaction(name("big")) as transaction:
        for n in range(100):
            transaction.append(events, rows(n))
        assert found(other, events) == []
    assert found(other, events) == list(range(100))
    aborted = log.transaction(name("big"))
    for n in range(100, 200):
        aborted.append(events, rows(n))
    aborted.abort()
    assert found(other, events) == list(range(100))


# Queues


def receive(queue: Any, count: int) -> list[Any]:
    messages: list[Any] = []
    deadline = time.monotonic() + 20
    while not messages and time.monotonic() < deadline:
        messages += queue.receive(count, visibility="20 seconds", wait="1 second")
    return messages


def test_a_batch_is_handed_out_piece_by_piece(log: Log, name: MakeName) -> None:
    """Kafka fetches whole batches; one message at a time is given to the receiver, each counted as
    its first delivery.
    """
    topic = log.create_topic(name("jobs"), "n BIGINT, text STRING").name
    with log.producer(topic) as producer:
        producer.append(rows(*range(5)))
    with log.queue(topic, group=name("q")) as queue:
        taken = []
        for _ in range(5):
            (message,) = receive(queue, 1)
            assert message.deliveries == 1
            taken.append(message.row["n"])
            message.ack()
        assert taken == [0, 1, 2, 3, 4]
        assert queue.receive(1) == []


def test_messages_can_be_received_while_others_are_unsettled(log: Log, name: MakeName) -> None:
    topic = log.create_topic(name("jobs"), "n BIGINT, text STRING").name
    with log.queue(topic, group=name("q")) as queue:
        unsettled = []
        for n in range(3):
            with log.producer(topic) as producer:
                producer.append(rows(n))
            unsettled += receive(queue, 1)
        assert [message.row["n"] for message in unsettled] == [0, 1, 2]
        for message in reversed(unsettled):
            message.ack()


def test_messages_can_be_settled_while_another_thread_waits_for_more(
    log: Log, name: MakeName
) -> None:
    topic = log.create_topic(name("jobs"), "n BIGINT, text STRING").name
    with log.producer(topic) as producer:
        producer.append(rows(1))
    with log.queue(topic, group=name("q")) as queue, ThreadPoolExecutor(1) as pool:
        (message,) = receive(queue, 1)
        waiting = pool.submit(queue.receive, 1, visibility="20 seconds", wait="8 seconds")
        time.sleep(0.5)
        message.ack()
        assert not waiting.done()
        assert waiting.result(timeout=20) == []


def test_what_share_groups_cannot_do_is_refused_by_name(
    log: Log, events: str, name: MakeName
) -> None:
    with (
        log.queue(events, group=name("a")) as queue,
        pytest.raises(errors.NotSupported, match=r"visibility of 1 hour.*brokers"),
    ):
        queue.receive(1, visibility="1 hour")
    with (
        log.queue(events, group=name("b"), delivery_limit=1000) as queue,
        pytest.raises(errors.NotSupported, match="delivery limit of 1000"),
    ):
        queue.receive(1)


def test_lag_of_many_groups_is_quick(log: Log, name: MakeName) -> None:
    topic = log.create_topic(name("wide"), "n BIGINT, text STRING", partitions=4).name
    with log.producer(topic) as producer:
        for partition in range(4):
            producer.append(rows(*range(20)), partition=partition)
    for number in range(10):
        log.reset_group(f"{name('g')}.{number}", topic, number)
    mine = [lag for lag in log.lag() if lag.topic == topic]
    assert {(lag.group, lag.partition): lag.rows for lag in mine} == {
        (f"{name('g')}.{number}", partition): 20 - number
        for number in range(10)
        for partition in range(4)
    }
    begun = time.monotonic()
    again = [lag.rows for lag in log.lag() if lag.topic == topic]
    assert again == [lag.rows for lag in mine]
    assert time.monotonic() - begun < 5
