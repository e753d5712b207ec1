"""A log that Spark reads and writes: the embedded one, or, where a test takes both, a real Kafka's
too.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import headrace as hr

ORDERS = "order_id BIGINT, customer_id BIGINT, note STRING"


def orders(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "order_id": list(numbers),
            "customer_id": [n % 7 for n in numbers],
            "note": [f"order {n}" for n in numbers],
        }
    )


@dataclass
class SparkLog:
    """A log, a session, and a directory for checkpoints. Topics get names of their own, since a
    broker outlives a test.
    """

    log: hr.Log
    address: str
    spark: SparkSession
    directory: Path
    suffix: str

    def topic(
        self, name: str, schema: str = ORDERS, *, partitions: int = 2, **settings: Any
    ) -> str:
        return self.log.create_topic(
            f"{name}-{self.suffix}", schema, partitions=partitions, **settings
        ).name

    def writer(self, name: str = "copier") -> str:
        return f"{name}-{self.suffix}"

    def append(self, topic: str, rows: Any, **options: Any) -> None:
        with self.log.producer(topic) as producer:
            producer.append(rows, **options)

    def read(self, topic: str, **options: Any) -> DataFrame:
        return (
            self.spark.read.format("headrace")
            .options(log=self.address, topic=topic, **options)
            .load()
        )

    def write(self, rows: DataFrame, topic: str, **options: Any) -> None:
        rows.write.format("headrace").options(log=self.address, topic=topic, **options).mode(
            "append"
        ).save()

    def stream(self, topic: str, **options: Any) -> DataFrame:
        return (
            self.spark.readStream.format("headrace")
            .options(log=self.address, topic=topic, **options)
            .load()
        )

    def start(
        self,
        rows: DataFrame,
        topic: str,
        *,
        checkpoint: str = "checkpoint",
        writer: str | None = None,
        **trigger: Any,
    ) -> StreamingQuery:
        sink = rows.writeStream.format("headrace").options(
            log=self.address, topic=topic, writer=writer or self.writer()
        )
        return (
            sink.option("checkpointLocation", str(self.directory / checkpoint))
            .trigger(**trigger or {"availableNow": True})
            .start()
        )

    def copy(
        self, source: str, target: str, options: Mapping[str, Any] | None = None, **sink: Any
    ) -> StreamingQuery:
        """Stream what there is in one topic into another, to the end."""
        rows = self.stream(source, columns="order_id,customer_id,note", **options or {})
        query = self.start(rows, target, **sink)
        query.awaitTermination(120)
        return query

    def numbers(self, topic: str) -> list[int]:
        """The orders in a topic, sorted; one that is there twice shows."""
        return sorted(self.log.read(topic, columns=["order_id"]).to_table()["order_id"].to_pylist())

    def forget_commit(self, batch: int, checkpoint: str = "checkpoint") -> None:
        """As if Spark had died between the sink's commit and its own."""
        for name in (f"{batch}", f".{batch}.crc"):
            (self.directory / checkpoint / "commits" / name).unlink()

    @property
    def staging(self) -> Path:
        return Path(self.address.removeprefix("file:")) / "staging"

    def staged(self) -> list[Path]:
        """The files that tasks have staged in the embedded log."""
        return [path for path in self.staging.rglob("*") if path.is_file()]


def failing_behind(
    staging: Path, column: str, value: int, switch: Path | None = None
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For mapInArrow: the task that reads a value waits until another task has staged its rows,
    then fails; with a switch file, only if that exists.
    """

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if value in batch[column].to_pylist() and (switch is None or switch.exists()):
                deadline = time.monotonic() + 20
                while not any(staging.rglob("*.segment")) and time.monotonic() < deadline:
                    time.sleep(0.05)
                time.sleep(0.5)
                raise ValueError("broken on purpose")
            yield batch

    return rows


def batch_rows(query: StreamingQuery) -> list[int]:
    return [progress["numInputRows"] for progress in query.recentProgress]


def open_spark_log(address: str, spark: SparkSession, directory: Path) -> Iterator[SparkLog]:
    with hr.open_log(address) as log:
        yield SparkLog(log, address, spark, directory, uuid.uuid4().hex[:8])


@pytest.fixture
def spark_log(spark: SparkSession, tmp_path: Path) -> Iterator[SparkLog]:
    """On the embedded log."""
    yield from open_spark_log(f"file:{tmp_path / 'log'}", spark, tmp_path)


@pytest.fixture(params=["file", pytest.param("kafka", marks=pytest.mark.kafka)])
def any_spark_log(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path
) -> Iterator[SparkLog]:
    """On either backend."""
    address = (
        f"file:{tmp_path / 'log'}"
        if request.param == "file"
        else request.getfixturevalue("kafka_broker").address
    )
    yield from open_spark_log(address, spark, tmp_path)
