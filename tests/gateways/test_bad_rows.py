"""Rows that do not fit, of every kind that was found to end a gateway or could: each is answered
with 400 or becomes a dead letter, and the gateway goes on with the next.
"""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.gateways.base import now_us
from headrace.gateways.inbox import (
    ArrowRows,
    Content,
    Fate,
    JsonLines,
    PlainRows,
    Submission,
    UnfitRows,
)
from headrace.gateways.writer import GatewayWriter
from headrace.log import dead_letters as dead
from tests.gateways.conftest import Open, adds_up
from tests.gateways.senders import JSON, post
from tests.servers.kafka_broker import KafkaBroker
from tests.servers.rabbitmq_server import RabbitmqServer
from tests.waits import wait_until

CUSTOMERS = (
    "id BIGINT, name STRING NOT NULL, tier DECIMAL(4,2), seen TIMESTAMP, photo BINARY,"
    " tags MAP<STRING, STRING>, marks ARRAY<INT>, place STRUCT<x: DOUBLE>"
)
GOOD = b'{"id": 7, "name": "Ada"}'
NAMELESS, NAMELESS_SECOND = b'{"id": 1}', b'[{"id": 1, "name": "a"}, {"id": 2}]'
BAD = [
    b'{"id": 1, "name": "a", "_change_type": "updated"}',
    b'{"id": 1, "name": "a", "_change_type": ""}',
    b'{"id": 1, "name": "a", "_change_type": 7}',
    b'{"id": 1, "name": "a", "_change_type": ["insert"]}',
    NAMELESS,
    b'{"id": 1, "name": null, "_change_type": "insert"}',
    NAMELESS_SECOND,
    b'[{"id": 1, "name": "a"}, {"id": 2, "name": "b", "_change_type": "upsert"}]',
    b'{"id": 9223372036854775808, "name": "a"}',
    b'{"id": 1.5, "name": "a"}',
    b'{"id": ' + b"9" * 5_000 + b', "name": "a"}',
    b'{"id": 1e99999999999, "name": "a"}',
    b'{"id": 1, "name": "a", "tier": "123.45"}',
    b'{"id": 1, "name": "a", "tier": "1E+99999999"}',
    b'{"id": 1, "name": "a", "seen": "yesterday"}',
    b'{"id": 1, "name": "a", "seen": "300000-01-01T00:00:00Z"}',
    b'{"id": 1, "name": "a", "photo": "no base64"}',
    b'{"id": 1, "name": "a", "tags": {"x": 1}}',
    b'{"id": 1, "name": "a", "marks": [1, 99999999999]}',
    b'{"id": 1, "name": "a", "place": {"y": 1}}',
    b'{"id": 1, "name": "a", "place": {"x": 1e400}}',
    b'{"id": 1, "name": "\\ud800"}',
    b'{"id": 1, "name": "\xff"}',
    b'{"id": 1, "name": "a", "__proto__": 1}',
    b'{"marks": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"[[1]]",
    b"[null]",
    b"null",
    b"\x00",
    b"\xef\xbb\xbf{}",
]


@pytest.fixture
def tables(log: hr.Log) -> hr.Log:
    log.create_table("customers", CUSTOMERS, key="id", partitions=2)
    log.create_topic("visits", CUSTOMERS.replace("name STRING NOT NULL", "name STRING"), key="id")
    log.create_topic("plain", CUSTOMERS)
    return log


def names(log: hr.Log, topic: str) -> list[str]:
    return [row["name"] for row in log.read(topic).to_pylist()]


def bad_for(topic: str) -> list[bytes]:
    """The bodies that do not fit a topic; `visits` takes rows without a name."""
    taken = {NAMELESS, NAMELESS_SECOND} if topic == "visits" else set()
    return [body for body in BAD if body not in taken]


@pytest.mark.parametrize("topic", ["customers", "visits", "plain"])
def test_no_row_ends_the_http_gateway(tables: hr.Log, opened: Open, topic: str) -> None:
    running = opened(hr.gateways.http(topic, port=0))
    for body in bad_for(topic):
        code, answer = post(running.address, f"/topics/{topic}", body, JSON)
        assert code == 400, (body[:100], answer)
        assert answer["message"]
    assert post(running.address, f"/topics/{topic}", GOOD, JSON)[0] == 200
    assert names(tables, topic) == ["Ada"]
    assert adds_up(running)
    running.check()


@pytest.mark.parametrize("topic", ["customers", "plain"])
def test_no_message_ends_the_zeromq_gateway(tables: hr.Log, opened: Open, topic: str) -> None:
    zmq = pytest.importorskip("zmq")
    running = opened(hr.gateways.zeromq(topic, bind="tcp://127.0.0.1:*", name="pull"))
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(running.address)
        for body in BAD:
            push.send_multipart([b"\xff subject", body])
        push.send(GOOD)
        wait_until(lambda: names(tables, topic) == ["Ada"], describe=running.status)
    assert [letter["payload"] for letter in dead.read_dead_letters(tables, topic)] == BAD
    assert adds_up(running)
    running.check()


class UnreadableHeader:
    """A header that pika cannot read: a time beyond the year 9999."""

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded


MILLISECONDS = 1_700_000_000_000  # where AMQP has seconds
UNREADABLE = [b"T" + at.to_bytes(8, "big") for at in (MILLISECONDS, 10**18)]


def test_no_message_ends_the_amqp_gateway(
    rabbitmq: RabbitmqServer, tables: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    pika: Any = pytest.importorskip("pika")
    encode = pika.data.encode_value

    def encode_any(pieces: list[bytes], value: Any) -> int:
        if isinstance(value, UnreadableHeader):
            pieces.append(value.encoded)
            return len(value.encoded)
        return int(encode(pieces, value))

    monkeypatch.setattr(pika.data, "encode_value", encode_any)
    gateway = hr.gateways.amqp("customers", url=rabbitmq.url, queue="bad-rows", declare=True)
    with gateway.open(tables) as running:
        with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
            channel = connection.channel()
            for number, body in enumerate(BAD):
                properties = pika.BasicProperties(message_id=f"m{number}")
                channel.basic_publish("", "bad-rows", body, properties)
            for number, header in enumerate(UNREADABLE):
                properties = pika.BasicProperties(
                    content_type="application/json",
                    message_id=f"unreadable-{number}",
                    headers={"a": 1, "at": UnreadableHeader(header)},
                )
                for _ in range(2):  # the id is read behind the headers: the repeat is known by it
                    body = b'{"id": 8, "name": "unreadable"}'
                    channel.basic_publish("", "bad-rows", body, properties)
            not_utf8 = pika.BasicProperties(message_id=b"\xff\xfe", headers={b"\xff": b"\xff"})
            channel.basic_publish("", "bad-rows", GOOD, not_utf8)
        wait_until(lambda: "Ada" in names(tables, "customers"), describe=running.status)
        wait_until(lambda: running.status().waiting_rows == 0)
        assert running.status().repeated == 2
        assert running.details()["connections"] == 1
        running.check()
    payloads = [letter["payload"] for letter in dead.read_dead_letters(tables, "customers")]
    assert payloads == BAD
    assert names(tables, "customers") == ["unreadable", "unreadable", "Ada"]


PACKETS = [
    b"a:1e999999999999|c",
    b"a:1e-999999999999|c",
    b"a:" + b"9" * 400 + b"|g",
    b"a:+-1|g",
    b"a:1|c|@0",
    b"a:1|c|@1e-999",
    b"a:1|c|@nan",
    b"a:1|ms|#" + b"," * 100,
    b"\xff:1|c",
    b"a\x00:1|c",
    b"a:\xf0\x9f|s",
    b":|",
    b"|||",
    b"a:1:::2|ms",
    b"a" * 9_000 + b":1|c",
]


@pytest.mark.parametrize("flush", ["200 ms", None])
@pytest.mark.parametrize("topic", ["metrics", "customers", "texts"])
def test_no_packet_ends_the_statsd_gateway(
    tables: hr.Log, opened: Open, topic: str, flush: str | None
) -> None:
    """Nor a topic that such rows do not fit: a table with other columns, or columns of other
    types.
    """
    tables.create_topic("texts", "metric BIGINT NOT NULL, value STRING, count TIMESTAMP")
    running = opened(hr.gateways.statsd(topic, port=0, flush=flush))
    port = int(running.address.rpartition(":")[2])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for packet in PACKETS:
            sender.sendto(packet, ("127.0.0.1", port))
        sender.sendto(b"good:1|c", ("127.0.0.1", port))

    def is_settled() -> bool:
        status = running.status()
        return (status.stored if topic == "metrics" else status.refused) > 0 and adds_up(running)

    wait_until(is_settled, describe=running.status)
    running.check()
    assert not running.inbox.ended.is_set()


# One among many that are appended together


def submission(topic: str, value: bytes) -> Submission:
    return Submission(
        topic=topic,
        content=JsonLines([value]),
        rows=1,
        size=len(value),
        received_us=now_us(),
        payload=value,
    )


def test_one_bad_row_does_not_refuse_those_that_are_appended_with_it(tables: hr.Log) -> None:
    good = [b'{"id": %d, "name": "n%d"}' % (number, number) for number in range(20)]
    for bad in bad_for("customers"):
        values = [*good[:10], bad, *good[10:]]
        writer = GatewayWriter(tables, "door")
        results = writer.write([submission("customers", value) for value in values])
        fates = [result.fate for result in results]
        assert fates == [Fate.stored] * 10 + [Fate.refused] + [Fate.stored] * 10, bad[:100]
    letters = [letter["payload"] for letter in dead.read_dead_letters(tables, "customers")]
    assert letters == BAD
    assert sorted(names(tables, "customers")) == sorted(
        [f"n{number}" for number in range(20)] * len(BAD)
    )


def test_a_message_for_a_topic_that_was_deleted_is_a_dead_letter(tables: hr.Log) -> None:
    writer = GatewayWriter(tables, "door")
    assert writer.write([submission("plain", GOOD)])[0].fate is Fate.stored
    tables.delete_topic("plain")
    (result,) = writer.write([submission("plain", GOOD)])
    assert (result.fate, result.reason) == (Fate.refused, "unknown topic")
    assert [letter["payload"] for letter in dead.read_dead_letters(tables, "plain")] == [GOOD]
    tables.create_topic("plain", CUSTOMERS)
    assert writer.write([submission("plain", GOOD)])[0].fate is Fate.stored


def test_arrow_rows_and_plain_rows_of_other_types_are_refused(tables: hr.Log) -> None:
    writer = GatewayWriter(tables, "door")
    contents: list[Content] = [
        ArrowRows(pa.record_batch({"id": ["x"], "name": ["a"]})),
        ArrowRows(pa.record_batch({"id": [1], "name": pa.array([None], pa.string())})),
        ArrowRows(pa.record_batch({"id": [1], "name": ["a"], "_change_type": ["x"]})),
        PlainRows([{"id": "x", "name": "a"}]),
        PlainRows([{"id": 1, "name": "\ud800"}]),
        PlainRows([{"id": 1, "name": object()}]),
        PlainRows([{"id": 1, "name": "a", "tags": 5}]),
    ]
    for content in contents:
        (result,) = writer.write([Submission("customers", content, 1, 10, now_us())])
        assert (result.fate, result.reason) == (Fate.refused, "does not fit"), content
        assert result.message


# What the log alone finds out


@pytest.fixture
def kafka_log(kafka_broker: KafkaBroker) -> Iterator[hr.Log]:
    with hr.open_log(kafka_broker.address) as opened:
        yield opened


@pytest.mark.kafka
def test_rows_that_kafka_cannot_carry_are_refused_one_by_one(kafka_log: hr.Log) -> None:
    name = f"bad-rows-{now_us()}"
    kafka_log.create_topic(name, "id BIGINT, body STRING", key="id", compact=True)
    bad = [json.dumps({"id": 1, "body": "x" * 2_000_000}).encode(), b'{"body": "no key"}']
    good = [b'{"id": %d}' % number for number in range(6)]
    values = [*good[:3], bad[0], good[3], bad[1], *good[4:]]
    with hr.gateways.zeromq(name, bind="tcp://127.0.0.1:*", name=name).open(kafka_log) as running:
        for value in values:
            running.inbox.submit(submission(name, value), running.stopped)
        wait_until(lambda: running.status().waiting_rows == 0, describe=running.status)
        running.check()
    assert sorted(row["id"] for row in kafka_log.read(name).to_pylist()) == list(range(6))
    *parts, last = dead.read_dead_letters(kafka_log, name)
    assert b"".join(letter["payload"] for letter in parts) == bad[0]
    assert [letter["reason"].partition(".")[0] for letter in parts] == [
        f"Part {i} of 4" for i in range(1, 5)
    ]
    assert last["payload"] == bad[1]


def test_an_append_that_the_log_refuses_is_made_in_smaller_parts(tables: hr.Log) -> None:
    writer = GatewayWriter(tables, "door")
    many = [submission("plain", b'{"id": %d, "name": "a"}' % number) for number in range(4)]
    writer.write(many[:1])
    topic_writer = writer._topics["plain"]
    append = topic_writer._producer.append

    def refusing(batch: pa.RecordBatch, **settings: Any) -> Any:
        if 2 in batch.column("id").to_pylist():
            raise pa.ArrowInvalid("two is not taken")
        return append(batch, **settings)

    topic_writer._producer.append = refusing  # type: ignore[method-assign,assignment]
    with pytest.raises(UnfitRows):
        writer.write(many[1:])
    assert writer.write(many[1:2])[0].fate is Fate.stored
    (result,) = writer.write(many[2:3])
    assert (result.fate, "two is not taken" in result.message) == (Fate.refused, True)
    assert [row["id"] for row in tables.read("plain").to_pylist()] == [0, 1]
