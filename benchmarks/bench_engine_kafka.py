"""From Kafka and to Kafka through Spark, exactly once, against a bare loop over confluent-kafka
that decodes and encodes the same rows and promises nothing.

A stateless pipeline, `topic → with_columns → write`: what is measured is the way in and the way
out. The loop has every advantage: no transaction, no ledger, no order, no shuffle, and instead of
Python's json, which is slower, Arrow's reader and our own writer.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from confluent_kafka import Consumer, Message, Producer, TopicPartition

import headrace as hr
from benchmarks.log_rows import KEY, PARTITIONS, SCHEMA, batches
from benchmarks.report import Result, Unavailable, judged, note, seconds
from headrace.runtime.runner import Runner
from headrace.types.json_codec import encode_rows
from tests.servers.kafka_broker import BrokerUnavailable, KafkaBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 1_000_000
ROUNDS, WARM_UP = 5, 2
POLL = 10_000
SOURCE = "bench-rows"


def fill(log: hr.Log) -> None:
    log.create_topic(SOURCE, SCHEMA, key=KEY, partitions=PARTITIONS)
    with log.producer(SOURCE) as producer:
        for batch in batches(ROWS, 100_000):
            producer.append(batch)


class OurSide:
    """Each round is a pipeline of its own over the same topic, from its cut of a tick to the
    commit.
    """

    def __init__(self, log: hr.Log, spark: SparkSession, root: Path) -> None:
        self.log, self.spark, self.root = log, spark, root
        self.committing: list[float] = []

    def round(self) -> float:
        """Rows a second."""
        name = f"bench-{uuid.uuid4().hex[:8]}"
        pipeline = hr.Pipeline(name)
        orders = pipeline.topic(SOURCE, schema=SCHEMA, key=KEY, partitions=PARTITIONS)
        pipeline.write(
            f"{name}-out", orders.with_columns(tax="amount * 0.2"), partitions=PARTITIONS
        )
        runner = Runner.start(pipeline.plan(), self.log, self.spark, self.root / name)
        self._watch(runner)
        taken = seconds(lambda: self._run(runner))
        runner.close()
        written = sum(batch.num_rows for batch in self.log.read(f"{name}-out", columns=["tax"]))
        if written != ROWS:
            raise RuntimeError(f"{written} rows came out.")
        self.log.delete_topic(f"{name}-out")
        return ROWS / taken

    @staticmethod
    def _run(runner: Runner) -> None:
        runner.cut(max_rows=2 * ROWS)
        while runner.step():
            continue

    def _watch(self, runner: Runner) -> None:
        """Note how long the last commit takes, in which all rows are sent."""
        begin, commit = runner.ledger.transaction, runner.ledger.commit
        begun = [0.0]

        def timed_begin() -> Any:
            begun[0] = time.perf_counter()
            return begin()

        def timed_commit(tx: Any) -> Any:
            position = commit(tx)
            self.committing.append(time.perf_counter() - begun[0])
            return position

        runner.ledger.transaction, runner.ledger.commit = timed_begin, timed_commit  # type: ignore[method-assign]


class BareLoop:
    """What one would write by hand: poll, decode, compute, encode, produce; a flush at the end."""

    def __init__(self, servers: str, log: hr.Log) -> None:
        self.servers = servers
        self.target = log.create_topic(
            "bench-loop", f"{SCHEMA}, tax DOUBLE", key=KEY, partitions=PARTITIONS
        ).name

    def round(self) -> float:
        """Rows a second."""
        return ROWS / seconds(self._run)

    def _run(self) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": uuid.uuid4().hex,
                "enable.auto.commit": False,
            }
        )
        consumer.assign([TopicPartition(SOURCE, partition, 0) for partition in range(PARTITIONS)])
        producer = Producer(
            {
                "bootstrap.servers": self.servers,
                "linger.ms": 5,
                "queue.buffering.max.messages": 10_000_000,
            }
        )
        done = 0
        while done < ROWS:
            messages = [
                message for message in consumer.consume(POLL, 1.0) if message.error() is None
            ]
            for key, value in transformed(messages):
                producer.produce(self.target, value, key)
            producer.poll(0)
            done += len(messages)
        if producer.flush(60):
            raise RuntimeError("Kafka did not take all rows.")
        consumer.close()


def transformed(messages: list[Message]) -> Iterable[tuple[bytes | None, bytes]]:
    if not messages:
        return ()
    joined = b"\n".join([message.value() or b"" for message in messages])
    table = pyarrow.json.read_json(
        pa.BufferReader(joined), pyarrow.json.ReadOptions(block_size=len(joined) + 1)
    )
    table = table.append_column("tax", pc.multiply(table["amount"], 0.2))
    return zip(
        (message.key() for message in messages),
        encode_rows(table.combine_chunks().to_batches()[0]),
        strict=True,
    )


def results() -> Iterator[Result]:
    root = Path(tempfile.mkdtemp(prefix="bench-engine-kafka-"))
    spark = hr.spark("bench", master="local[2]", driver_memory="2g")
    try:
        with KafkaBroker(heap_mb=1000) as broker, hr.open_log(broker.address) as log:
            fill(log)
            yield _measured(OurSide(log, spark, root), broker, log)
    except BrokerUnavailable as why:
        raise Unavailable(str(why)) from why
    finally:
        spark.stop()
        shutil.rmtree(root, ignore_errors=True)


def _measured(ours: OurSide, broker: KafkaBroker, log: hr.Log) -> Result:
    loop = BareLoop(broker.bootstrap, log)
    our_rates, their_rates, shares = [], [], []
    for number in range(ROUNDS + WARM_UP):
        ours.committing.clear()
        rate, peer = ours.round(), loop.round()
        share = ours.committing[-1] * rate / ROWS
        note(
            f"ours {rate:.0f} rows/s, {share:.0%} of the time in the commit; the loop {peer:.0f}"
            " rows/s"
        )
        if number >= WARM_UP:
            our_rates.append(rate)
            their_rates.append(peer)
            shares.append(share)
    rate, share = statistics.median(our_rates), statistics.median(shares)
    return judged(
        "engine_kafka",
        "from Kafka to Kafka through Spark, exactly once, 1 million rows of 100 bytes a batch",
        "rows/s",
        rate,
        "bare confluent-kafka loop, decoding and encoding with Arrow",
        statistics.median(their_rates),
        bar=0.5,
        better="higher",
        params={
            "rows": ROWS,
            "partitions": PARTITIONS,
            "rounds": ROUNDS,
            "rows_in_per_s": round(rate / (1 - share)),
            "rows_out_per_s": round(rate / share),
        },
    )
