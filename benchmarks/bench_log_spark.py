"""Spark reads a topic as a stream into a sink that does nothing, against Spark's own stream of the
same rows in Parquet files.

Measured is the micro-batch that has the rows, from the question what is new to the end of its
commit; not the start of the query and its Python process, about a second, which a stream pays once.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

import headrace as hr
from benchmarks.log_rows import KEY, PARTITIONS, ROWS, SCHEMA, batches
from benchmarks.report import Result, Unavailable, compare
from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BAR = 0.35


def make_topic(root: Path, rows: list[pa.RecordBatch]) -> str:
    address = f"file:{root / 'log'}"
    with hr.open_log(address, durability="os") as log:
        log.create_topic("rows", SCHEMA, key=KEY, partitions=PARTITIONS)
        with log.producer("rows") as producer:
            for batch in rows:
                producer.append(batch)
    return address


def make_files(root: Path, rows: list[pa.RecordBatch]) -> str:
    """As many files as the topic has partitions."""
    directory = root / "files"
    directory.mkdir()
    for number in range(PARTITIONS):
        pq.write_table(
            pa.Table.from_batches(rows[number::PARTITIONS]), directory / f"{number}.parquet"
        )
    return str(directory)


def rows_per_second(source: DataFrame, root: Path) -> float:
    """One batch with all rows; a batch with fewer is a mistake of the benchmark's."""
    checkpoint = tempfile.mkdtemp(dir=root)
    query = (
        source.writeStream.format("noop")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    (batch,) = [progress for progress in query.recentProgress if progress["numInputRows"]]
    if batch["numInputRows"] != ROWS:
        raise RuntimeError(f"The batch had {batch['numInputRows']} rows.")
    shutil.rmtree(checkpoint)
    return float(ROWS / (batch["durationMs"]["triggerExecution"] / 1000))


def session() -> SparkSession:
    try:
        return hr.spark("bench", master="local[2]", driver_memory="2g")
    except ConfigurationError as error:
        raise Unavailable(str(error)) from error


def results() -> Iterator[Result]:
    spark = session()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        root, rows = Path(scratch), batches()
        address, files = make_topic(root, rows), make_files(root, rows)
        columns = ",".join(rows[0].schema.names)
        schema = spark.read.parquet(files).schema
        topic = (
            spark.readStream.format("headrace")
            .options(log=address, topic="rows", columns=columns)
            .load()
        )
        parquet = spark.readStream.schema(schema).parquet(files)
        yield compare(
            "log_spark",
            "a topic read as a stream into a no-op sink",
            "rows/s",
            ours=lambda: rows_per_second(topic, root),
            peer="Spark, Parquet files",
            theirs=lambda: rows_per_second(parquet, root),
            bar=BAR,
            better="higher",
            repeats=7,
            warmups=3,
            params={"rows": ROWS, "partitions": PARTITIONS},
        )
        spark.stop()
