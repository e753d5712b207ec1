"""The embedded log against a real Kafka on loopback, both driven from Python: appending and reading
a million rows.

Kafka's side is given every advantage: values are encoded to JSON before the clock starts, it does
not sync, and its consumer decodes whole polls with Arrow's JSON reader.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.json
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

import headrace as hr
from benchmarks.log_rows import BATCH_ROWS, KEY, PARTITIONS, ROWS, SCHEMA, batches
from benchmarks.report import Result, Unavailable, compare, seconds
from headrace.types.json_codec import encode_rows
from tests.servers.kafka_broker import BrokerUnavailable, KafkaBroker

PARAMS = {"rows": ROWS, "batch_rows": BATCH_ROWS, "partitions": PARTITIONS}


class OurSide:
    def __init__(self, root: Path, rows: list[pa.RecordBatch]) -> None:
        self.log, self.rows = hr.open_log(f"file:{root}/log"), rows
        self.topic = ""

    def append(self) -> float:
        """Rows a second; each append is durable before the next begins."""
        if self.topic:
            self.log.delete_topic(self.topic)
        self.topic = f"t{uuid.uuid4().hex}"
        self.log.create_topic(self.topic, SCHEMA, key=KEY, partitions=PARTITIONS)
        with self.log.producer(self.topic) as producer:
            return ROWS / seconds(lambda: [producer.append(batch) for batch in self.rows])

    def read(self) -> float:
        return ROWS / seconds(
            lambda: _expect_rows(sum(batch.num_rows for batch in self.log.read(self.topic)))
        )


class KafkaSide:
    def __init__(self, broker: KafkaBroker, rows: list[pa.RecordBatch]) -> None:
        self.servers = broker.address.removeprefix("kafka://")
        self.admin = AdminClient({"bootstrap.servers": self.servers})
        self.keys = [str(key).encode() for batch in rows for key in batch.column(KEY).to_pylist()]
        self.values = [value for batch in rows for value in encode_rows(batch)]
        self.topic = ""

    def append(self) -> float:
        """Rows a second; a flush after each 10,000 rows, since our side waits for each append
        too.
        """
        self.topic = f"t{uuid.uuid4().hex}"
        for created in self.admin.create_topics([NewTopic(self.topic, PARTITIONS, 1)]).values():
            created.result()
        settings = {
            "bootstrap.servers": self.servers,
            "acks": "all",
            "partitioner": "murmur2_random",
            "linger.ms": 5,
            "queue.buffering.max.messages": 1_000_000,
        }
        return ROWS / seconds(lambda: self._produce(Producer(settings)))

    def _produce(self, producer: Producer) -> None:
        for first in range(0, ROWS, BATCH_ROWS):
            for key, value in zip(
                self.keys[first : first + BATCH_ROWS],
                self.values[first : first + BATCH_ROWS],
                strict=True,
            ):
                producer.produce(self.topic, value, key)
            producer.poll(0)
        if producer.flush(60):
            raise RuntimeError("Kafka did not take all rows.")

    def read(self) -> float:
        return ROWS / seconds(self._consume)

    def _consume(self) -> None:
        settings = {
            "bootstrap.servers": self.servers,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.max.bytes": 64 << 20,
            "max.partition.fetch.bytes": 16 << 20,
            "queued.max.messages.kbytes": 1 << 20,
        }
        consumer = Consumer(settings)
        consumer.subscribe([self.topic])
        count, tables = 0, []
        while count < ROWS:
            messages = consumer.consume(BATCH_ROWS, timeout=10)
            values = b"\n".join([message.value() or b"" for message in messages])
            tables.append(
                pyarrow.json.read_json(
                    pa.BufferReader(values), pyarrow.json.ReadOptions(block_size=len(values) + 1)
                )
            )
            count += len(messages)
        consumer.close()
        _expect_rows(sum(table.num_rows for table in tables))


def _expect_rows(count: int) -> None:
    if count != ROWS:
        raise RuntimeError(f"{count} rows instead of {ROWS}.")


def results() -> Iterator[Result]:
    root = Path(tempfile.mkdtemp(prefix="bench-log-"))
    rows = batches()
    try:
        with KafkaBroker() as broker:
            ours, theirs = OurSide(root, rows), KafkaSide(broker, rows)
            yield compare(
                "log",
                "append 1 million rows of 100 bytes, batches of 10,000, durable",
                "rows/s",
                ours=ours.append,
                peer="Kafka 4.3 producer, acks=all, not synced",
                theirs=theirs.append,
                bar=2.0,
                better="higher",
                params=PARAMS,
            )
            yield compare(
                "log",
                "read them into Arrow",
                "rows/s",
                ours=ours.read,
                peer="Kafka 4.3 consumer, JSON to Arrow",
                theirs=theirs.read,
                bar=4.0,
                better="higher",
                params=PARAMS,
            )
            ours.log.close()
    except BrokerUnavailable as why:
        raise Unavailable(str(why)) from why
    finally:
        shutil.rmtree(root, ignore_errors=True)
