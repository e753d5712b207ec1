"""Avro, Protobuf and JSON Schema with a real registry: topics of others are read, what Headrace
appends is read by others, and what does not fit becomes no row.
"""

import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace import errors
from headrace.log.api import Log
from tests.log.kafka.conftest import ForeignClient
from tests.servers.schema_registry import RegistryUnavailable, SchemaRegistry

pytest.importorskip("fastavro", reason="the extra `registry` is not installed")
pytest.importorskip("authlib", reason="the extra `registry` is not installed")

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, message_factory, timestamp_pb2
from google.protobuf.descriptor_pool import DescriptorPool

pytestmark = pytest.mark.kafka
MakeName = Callable[[str], str]
AT = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
SCHEMA = (
    "id BIGINT NOT NULL, name STRING, amount DECIMAL(9,2), at TIMESTAMP, tags ARRAY<STRING>, place"
    " STRUCT<x: INT, label: STRING>, ratio DOUBLE, data BINARY, day DATE, yes BOOLEAN"
)
OBJECT = '{"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}'
ROWS: list[dict[str, Any]] = [
    {
        "id": 2**62,
        "name": "ünï",
        "amount": Decimal("12.30"),
        "at": AT,
        "tags": ["a", "b"],
        "place": {"x": 1, "label": None},
        "ratio": 0.1,
        "data": b"\x00\xff",
        "day": date(2026, 1, 31),
        "yes": True,
    },
    {
        "id": 0,
        "name": None,
        "amount": None,
        "at": None,
        "tags": [],
        "place": None,
        "ratio": None,
        "data": None,
        "day": None,
        "yes": False,
    },
]


@pytest.fixture(scope="module")
def registry() -> Iterator[SchemaRegistry]:
    """Skips where no registry can be had; with CI=true that is a failure."""
    made = SchemaRegistry()
    try:
        made.start()
    except RegistryUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs a schema registry: {error}")
        pytest.skip(f"no schema registry: {error}")
    yield made
    made.stop()


@pytest.fixture
def client(registry: SchemaRegistry) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": registry.address}) as opened:
        yield opened


def values_of(topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField.VALUE)


def rows_of(log: Log, topic: str) -> list[dict[str, Any]]:
    names = log.topic(topic).columns
    return log.read(topic, columns=names).to_pylist()


@pytest.mark.parametrize("value_format", ["avro", "protobuf", "json-schema"])
def test_rows_survive(
    log: Log, other: Log, registry: SchemaRegistry, name: MakeName, value_format: str
) -> None:
    topic = name("orders")
    made = log.create_topic(topic, SCHEMA, format=value_format, registry=registry.address)
    assert (made.format, made.registry) == (value_format, registry.address)
    with log.producer(topic, id="till") as producer:
        producer.append(ROWS, sequence=0)
        producer.append(ROWS[:1])
    assert rows_of(other, topic) == [*ROWS, ROWS[0]]
    with other.transaction(name("tx")) as tx:
        tx.append(topic, ROWS[1:])
    assert rows_of(log, topic)[-1] == ROWS[1]
    assert log.verify(topic) == []


def test_tables_of_a_registry_have_tombstones(
    log: Log, registry: SchemaRegistry, name: MakeName
) -> None:
    topic = name("customers")
    log.create_table(
        topic, "id BIGINT, name STRING", key="id", format="avro", registry=registry.address
    )
    with log.producer(topic) as producer:
        producer.upsert({"id": 1, "name": "Ada"})
        producer.delete(1)
    assert [(row["name"], row["_change_type"]) for row in rows_of(log, topic)] == [
        ("Ada", "update_postimage"),
        (None, "delete"),
    ]


def test_avro_of_others_is_read_in_every_version(
    log: Log,
    registry: SchemaRegistry,
    client: SchemaRegistryClient,
    foreign_client: ForeignClient,
    name: MakeName,
) -> None:
    topic = name("theirs")
    foreign_client.create(topic, 1)
    fields: list[dict[str, Any]] = [
        {"name": "id", "type": "long"},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "props", "type": {"type": "map", "values": "double"}, "default": {}},
    ]
    at = AT.replace(microsecond=123000)
    row = {"id": 1, "kind": "B", "at": at, "props": {"w": 0.5}}
    added = [*fields, {"name": "coupon", "type": ["null", "string"], "default": None}]
    for extra, columns in (({}, fields), ({"coupon": "x"}, added)):
        schema = json.dumps({"type": "record", "name": "Order", "fields": columns})
        serializer = AvroSerializer(client, schema)
        foreign_client.write(topic, serializer({**row, **extra}, values_of(topic)) or b"")
    foreign_client.write(topic, b"\x00\x00\x0f\xff\xff??", b"plain", b"\x00")
    log.create_topic(
        topic,
        "id BIGINT, kind STRING, `at` TIMESTAMP, props MAP<STRING, DOUBLE>",
        format="avro",
        registry=registry.address,
        exist_ok=True,
    )
    batches = log.read(topic, columns=["id", "kind", "at", "props"])
    assert batches.to_pylist() == [{**row, "props": [("w", 0.5)]}] * 2
    assert (batches.misfits, dict(batches.unknown_fields)) == (3, {"coupon": 1})
    reasons = [finding.message for finding in log.verify(topic)]
    assert "no schema" in reasons[0]
    assert "does not begin with the id of a schema" in reasons[1]
    log.alter_topic(topic, add_columns="coupon STRING")
    assert [row["coupon"] for row in log.read(topic).to_pylist()] == [None, "x"]
    with log.producer(topic) as producer:  # by their newest schema
        producer.append({**row, "coupon": None, "props": {}})
    message = foreign_client.read(topic, 6)[-1]
    theirs = AvroDeserializer(client)(message.value(), values_of(topic))
    assert theirs == {**row, "coupon": None, "props": {}}
    with (
        pytest.raises(errors.BadRows, match="does not fit the schema"),
        log.producer(topic) as producer,
    ):
        producer.append({**row, "kind": "C", "coupon": None, "props": {}})
    log.alter_topic(topic, add_columns="ours STRING")
    with (
        pytest.raises(errors.ConfigurationError, match="has no field 'ours'"),
        log.producer(topic) as producer,
    ):
        producer.append({**row, "coupon": None, "props": {}, "ours": "x"})


def test_json_schema_of_others_is_read_and_written(
    log: Log,
    registry: SchemaRegistry,
    client: SchemaRegistryClient,
    foreign_client: ForeignClient,
    name: MakeName,
) -> None:
    topic = name("theirs")
    foreign_client.create(topic, 1)
    schema = {
        "title": "Order",
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 1}, "name": {"type": "string"}},
    }
    serializer = JSONSerializer(json.dumps(schema), client)
    foreign_client.write(topic, serializer({"id": 1, "name": "a"}, values_of(topic)) or b"")
    foreign_client.write(topic, b'{"id": 2}')
    log.create_topic(
        topic,
        "id BIGINT, name STRING",
        format="json-schema",
        registry=registry.address,
        exist_ok=True,
    )
    batches = log.read(topic, columns=["id", "name"])
    assert (batches.to_pylist(), batches.misfits) == ([{"id": 1, "name": "a"}], 1)
    with log.producer(topic) as producer:
        producer.append({"id": 3, "name": "b"})
        with pytest.raises(errors.BadRows, match="does not fit the schema"):
            producer.append({"id": 0, "name": "b"})
    message = foreign_client.read(topic, 3)[-1]
    read = JSONDeserializer(json.dumps(schema), schema_registry_client=client)
    assert read(message.value(), values_of(topic)) == {"id": 3, "name": "b"}


def test_protobuf_of_others_is_read_and_written(
    log: Log,
    registry: SchemaRegistry,
    client: SchemaRegistryClient,
    foreign_client: ForeignClient,
    name: MakeName,
) -> None:
    topic = name("theirs")
    foreign_client.create(topic, 1)
    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="o.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    file.message_type.add(name="Unused")
    order = file.message_type.add(name="Order")
    order.field.add(name="id", number=1, type=types.TYPE_INT64, label=1)
    order.field.add(
        name="at",
        number=2,
        type=types.TYPE_MESSAGE,
        label=1,
        type_name=".google.protobuf.Timestamp",
    )
    order.field.add(name="tags", number=3, type=types.TYPE_STRING, label=3)
    pool = DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    order_class = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    conf = {"use.deprecated.format": False}
    serializer = ProtobufSerializer(order_class, client, conf)
    message = order_class(id=7, tags=["a"])
    message.at.FromDatetime(AT)
    foreign_client.write(topic, serializer(message, values_of(topic)) or b"", b"\x00\x00\x00\x00")
    log.create_topic(
        topic,
        "id BIGINT, `at` TIMESTAMP, tags ARRAY<STRING>",
        format="protobuf",
        registry=registry.address,
        exist_ok=True,
    )
    batches = log.read(topic, columns=["id", "at", "tags"])
    assert batches.to_pylist() == [{"id": 7, "at": AT, "tags": ["a"]}]
    assert batches.misfits == 1

    ours = name("ours")
    log.create_topic(
        ours, "id BIGINT, `at` TIMESTAMP", format="protobuf", registry=registry.address
    )
    with log.producer(ours) as producer:
        producer.append({"id": 0, "at": AT})
    (record,) = foreign_client.read(ours, 1)
    stored = client.get_latest_version(f"{ours}-value", fmt="serialized").schema
    assert stored.schema_type == "PROTOBUF"
    read = ProtobufDeserializer(order_class, conf, client)(record.value(), values_of(ours))
    assert (read.id, read.at.ToDatetime(tzinfo=UTC)) == (0, AT)


def test_a_registry_that_is_away_is_no_misfit(
    log: Log, registry: SchemaRegistry, foreign_client: ForeignClient, name: MakeName
) -> None:
    topic = name("away")
    away = "http://127.0.0.1:9?max.retries=0"
    log.create_topic(topic, "id BIGINT", format="avro", registry=away)
    foreign_client.write(topic, b"\x00\x00\x00\x00\x01\x02")
    with pytest.raises(errors.RetryError, match="does not answer"):
        log.read(topic).to_pylist()
    with pytest.raises(errors.RetryError, match="does not answer"), log.producer(topic) as producer:
        producer.append({"id": 1})


def test_formats_are_checked_when_a_topic_is_declared(
    log: Log, name: MakeName, tmp_path: Path
) -> None:
    with pytest.raises(errors.InputError, match="did you mean 'avro'"):
        log.create_topic(name("t"), "id BIGINT", format="avr", registry="http://127.0.0.1:9")
    with pytest.raises(errors.InputError, match="address of a registry"):
        log.create_topic(name("t"), "id BIGINT", format="avro")
    with pytest.raises(errors.InputError, match="plain JSON"):
        log.create_topic(name("t"), "id BIGINT", registry="http://127.0.0.1:9")
    with hr.open_log(f"file:{tmp_path}/log") as embedded, pytest.raises(errors.NotSupported):
        embedded.create_topic("t", "id BIGINT", format="avro", registry="http://127.0.0.1:9")


def test_a_subject_of_another_format_is_refused(
    log: Log, registry: SchemaRegistry, client: SchemaRegistryClient, name: MakeName
) -> None:
    topic = name("other")
    client.register_schema(f"{topic}-value", Schema(OBJECT, "JSON"))
    log.create_topic(topic, "id BIGINT", format="avro", registry=registry.address)
    with (
        pytest.raises(errors.ConfigurationError, match="not of the format"),
        log.producer(topic) as producer,
    ):
        producer.append({"id": 1})
