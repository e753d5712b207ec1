"""AMQP with a real RabbitMQ: acknowledged there when it is durable here, repeats left out, the
broker restarted, and the sink that publishes.
"""

import json
from collections.abc import Iterable

import pytest

import headrace as hr
from headrace.errors import ConfigurationError, RetryError, TargetUnavailable
from headrace.log import dead_letters as dead
from headrace.retry import Backoff
from headrace.sinks.amqp_target import AmqpMessage, AmqpPublisher
from tests.gateways.conftest import Open, adds_up, order_ids
from tests.servers.rabbitmq_server import RabbitmqServer
from tests.waits import wait_until

pika = pytest.importorskip("pika")


@pytest.fixture
def queue(rabbitmq: RabbitmqServer, request: pytest.FixtureRequest) -> str:
    name = request.node.name
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        connection.channel().queue_declare(name, durable=True)
    return str(name)


def publish(rabbitmq: RabbitmqServer, queue: str, *messages: tuple[bytes, str | None]) -> None:
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for body, identity in messages:
            channel.basic_publish(
                "",
                queue,
                body,
                pika.BasicProperties(message_id=identity, delivery_mode=2),
                mandatory=True,
            )


def messages(numbers: Iterable[int]) -> list[AmqpMessage]:
    return [AmqpMessage(f"m{number}", b'{"order_id": %d}' % number, {}) for number in numbers]


def left(rabbitmq: RabbitmqServer, queue: str) -> int:
    """Messages that are in the queue: ready, since nobody reads it now."""
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        return int(connection.channel().queue_declare(queue, passive=True).method.message_count)


def test_messages_are_stored_once_and_acknowledged(
    rabbitmq: RabbitmqServer, queue: str, log: hr.Log
) -> None:
    publish(
        rabbitmq,
        queue,
        (b'{"order_id": 1}', "a"),
        (b'[{"order_id": 2}, {"order_id": 3}]', "b"),
        (b'{"order_id": 1}', "a"),
        (b"nonsense", "c"),
    )
    with hr.gateways.amqp("orders", url=rabbitmq.url, queue=queue).open(log) as running:
        wait_until(lambda: running.status().received == 5 and running.status().waiting_rows == 0)
    publish(
        rabbitmq, queue, (b'[{"order_id": 2}, {"order_id": 3}]', "b"), (b'{"order_id": 4}', None)
    )
    with hr.gateways.amqp("orders", url=rabbitmq.url, queue=queue).open(log) as running:
        wait_until(lambda: running.status().received == 3 and running.status().waiting_rows == 0)
    assert order_ids(log) == [1, 2, 3, 4]
    assert running.status().repeated == 2
    assert left(rabbitmq, queue) == 0
    assert [dead_letter["payload"] for dead_letter in dead.read_dead_letters(log, "orders")] == [
        b"nonsense"
    ]


def test_a_restarted_broker_is_connected_to_again(
    rabbitmq: RabbitmqServer, queue: str, log: hr.Log, opened: Open
) -> None:
    running = opened(hr.gateways.amqp("orders", url=rabbitmq.url, queue=queue, prefetch=10))
    publish(rabbitmq, queue, *((json.dumps({"order_id": i}).encode(), f"m{i}") for i in range(50)))
    publisher = AmqpPublisher(rabbitmq.url, "")  # of the sink: it is idle meanwhile
    assert publisher.publish(queue, messages(range(50, 55))) == {}
    wait_until(lambda: running.status().stored == 55)
    rabbitmq.stop_process()
    rabbitmq.start_process()
    assert publisher.publish(queue, messages(range(60, 70))) == {}
    publisher.close()
    publish(
        rabbitmq, queue, *((json.dumps({"order_id": i}).encode(), f"m{i}") for i in range(40, 60))
    )
    wait_until(lambda: running.status().stored == 70, timeout_s=60)
    assert order_ids(log) == list(range(70))
    assert adds_up(running)
    assert running.status().error is None


def test_raw_messages_keep_what_they_came_with(
    rabbitmq: RabbitmqServer, queue: str, log: hr.Log, opened: Open
) -> None:
    publish(rabbitmq, queue, (b"\x00\x01", "raw-1"))
    running = opened(hr.gateways.amqp("bodies", url=rabbitmq.url, queue=queue, format="raw"))
    wait_until(lambda: running.status().stored == 1)
    (row,) = log.read("bodies").to_pylist()
    assert (row["body"], row["message_id"], row["routing_key"]) == (b"\x00\x01", "raw-1", queue)


def test_invalid_settings_are_refused_at_once(rabbitmq: RabbitmqServer, log: hr.Log) -> None:
    with (
        pytest.raises(RetryError, match="cannot be read"),
        hr.gateways.amqp("orders", url=rabbitmq.url, queue="no-such-queue").open(log),
    ):
        pass
    wrong = rabbitmq.url.replace("guest:guest", "guest:wrong")
    with (
        pytest.raises(ConfigurationError, match="refuses the connection") as refused,
        hr.gateways.amqp("orders", url=wrong, queue="q").open(log),
    ):
        pass
    assert "wrong" not in str(refused.value)
    with (
        pytest.raises(RetryError, match="cannot be reached"),
        hr.gateways.amqp("orders", url="amqp://127.0.0.1:1/", queue="q").open(log),
    ):
        pass
    for url, exchange, error, said in (
        (
            rabbitmq.url,
            "no-such-exchange",
            TargetUnavailable,
            "The exchange 'no-such-exchange' cannot be used",
        ),
        (wrong, "", ConfigurationError, "refuses the connection"),
        ("amqp://127.0.0.1:1/", "", TargetUnavailable, "cannot be reached"),
    ):
        with pytest.raises(error, match=said):
            AmqpPublisher(url, exchange).open()


def test_the_sink_publishes_with_ids_and_the_gateway_reads_what_it_published(
    rabbitmq: RabbitmqServer, queue: str, log: hr.Log
) -> None:
    with log.producer("orders") as producer:
        producer.append(
            [{"order_id": i, "region": "eu", "amount": 1.5, "received_at": None} for i in range(20)]
        )
    sink = hr.sinks.amqp(rabbitmq.url, routing_key=queue)
    sink.run("orders", log=log.address, until_caught_up=True)
    sink.run("orders", log=log.address, until_caught_up=True)  # it knows its place
    assert left(rabbitmq, queue) == 20
    sink.run(
        "orders", log=log.address, until_caught_up=True, start_over=True
    )  # the same again, under the same ids
    log.create_topic(
        "copies", "order_id BIGINT, region STRING, amount DOUBLE, received_at TIMESTAMP"
    )
    with hr.gateways.amqp("copies", url=rabbitmq.url, queue=queue).open(log) as running:
        wait_until(lambda: running.status().received == 40 and running.status().waiting_rows == 0)
    assert order_ids(log, "copies") == list(range(20))
    assert running.status().repeated == 20


def test_many_are_confirmed_at_a_time_and_each_that_is_not_taken_is_known(
    rabbitmq: RabbitmqServer, queue: str
) -> None:
    publisher = AmqpPublisher(rabbitmq.url, "")
    assert publisher.publish(queue, messages(range(2_000))) == {}
    assert left(rabbitmq, queue) == 2_000
    assert publisher.publish("nobody-listens", messages(range(3))) == dict.fromkeys(
        ("m0", "m1", "m2"), "no queue would get it"
    )
    assert publisher.publish(queue, messages(range(1))) == {}
    publisher.close()


@pytest.fixture
def small_queue(rabbitmq: RabbitmqServer, request: pytest.FixtureRequest) -> str:
    """It says no to what is more than five."""
    name = request.node.name
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        connection.channel().queue_declare(
            name, durable=True, arguments={"x-max-length": 5, "x-overflow": "reject-publish"}
        )
    return str(name)


def taken(rabbitmq: RabbitmqServer, queue: str) -> list[str]:
    """The ids of what is in the queue, which is empty then."""
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel, found = connection.channel(), []
        while (message := channel.basic_get(queue, auto_ack=True))[0] is not None:
            found.append(str(message[1].message_id))
        return found


def test_messages_nacked_by_a_full_queue_are_resent_without_duplicates(
    rabbitmq: RabbitmqServer, small_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sinks.amqp_target.MAX_ATTEMPTS", 3)
    monkeypatch.setattr("headrace.sinks.amqp_target.REJECTED_BACKOFF", Backoff(0.05, 0.05))
    publisher, found = AmqpPublisher(rabbitmq.url, ""), []
    for _ in range(2):
        with pytest.raises(TargetUnavailable, match=r"rejects \d+ of 12 messages"):
            publisher.publish(small_queue, messages(range(12)))
        found += taken(rabbitmq, small_queue)
    assert publisher.publish(small_queue, messages(range(12))) == {}
    found += taken(rabbitmq, small_queue)
    publisher.close()
    assert sorted(found) == sorted(each.id for each in messages(range(12)))


def test_a_queue_that_is_full_for_a_moment_makes_no_dead_letters(
    rabbitmq: RabbitmqServer, small_queue: str, log: hr.Log
) -> None:
    with log.producer("orders") as producer:
        producer.append(
            [{"order_id": i, "region": "eu", "amount": 1.5, "received_at": None} for i in range(20)]
        )
    log.create_topic(
        "copies", "order_id BIGINT, region STRING, amount DOUBLE, received_at TIMESTAMP"
    )
    with hr.gateways.amqp("copies", url=rabbitmq.url, queue=small_queue, prefetch=1).open(log):
        hr.sinks.amqp(rabbitmq.url, routing_key=small_queue).run(
            "orders", log=log.address, until_caught_up=True
        )
        wait_until(lambda: len(order_ids(log, "copies")) == 20)
    assert order_ids(log, "copies") == list(range(20))
    assert "orders.amqp.dead" not in log.topics()


def test_unacknowledged_messages_are_bounded_in_bytes(
    rabbitmq: RabbitmqServer, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sinks.amqp_target.MAX_BYTES_IN_FLIGHT", 100)
    in_flight: list[int] = []

    class Watched(AmqpPublisher):
        def _publish(self, routing_key: str, message: AmqpMessage) -> None:
            super()._publish(routing_key, message)
            in_flight.append(len(self._unconfirmed))

    publisher = Watched(rabbitmq.url, "")
    assert publisher.publish(queue, messages(range(10, 50))) == {}  # 16 bytes each
    publisher.close()
    assert max(in_flight) == 6
    assert left(rabbitmq, queue) == 40


def test_rows_that_no_queue_would_get_are_dead_letters(
    rabbitmq: RabbitmqServer, log: hr.Log
) -> None:
    with log.producer("orders") as producer:
        producer.append([{"order_id": 1, "region": "eu", "amount": 1.5, "received_at": None}])
    hr.sinks.amqp(rabbitmq.url, routing_key="nobody-listens").run(
        "orders", log=log.address, until_caught_up=True
    )
    (dead_letter,) = dead.read_dead_letters(log, "orders.amqp")
    assert "no queue would get it" in dead_letter["reason"]
