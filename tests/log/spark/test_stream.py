"""Streaming: every row exactly once, whatever is repeated, restarted or lost; and batches of the
requested size.
"""

import pytest
from pyspark.errors import StreamingQueryException

from tests.log.spark.conftest import SparkLog, batch_rows, failing_behind, orders
from tests.waits import wait_until

pytestmark = pytest.mark.spark


def test_available_now_reads_everything_in_batches_of_the_size_asked_for(
    spark_log: SparkLog,
) -> None:
    source, target = spark_log.topic("source"), spark_log.topic("target")
    spark_log.append(source, orders(0, 90), partition=0)
    spark_log.append(source, orders(90, 10), partition=1)
    query = spark_log.copy(source, target, {"maxRowsPerBatch": 40})
    assert batch_rows(query) == [40, 40, 20], "30 + 10, 40 + 0, 20 + 0"
    assert spark_log.numbers(target) == list(range(100))
    ends = [progress["sources"][0]["endOffset"] for progress in query.recentProgress]
    assert '"0": 30' in str(ends[0]).replace("'", '"'), (
        "what one partition does not need, the other gets"
    )


def test_a_restart_goes_on_where_it_stopped(any_spark_log: SparkLog) -> None:
    source, target = any_spark_log.topic("source"), any_spark_log.topic("target")
    any_spark_log.append(source, orders(0, 100))
    any_spark_log.copy(source, target, {"maxRowsPerBatch": 60})
    assert any_spark_log.numbers(target) == list(range(100))
    any_spark_log.append(source, orders(100, 50))
    query = any_spark_log.copy(source, target)
    assert batch_rows(query) == [50]
    assert any_spark_log.numbers(target) == list(range(150))


def test_a_repeated_batch_is_stored_once(any_spark_log: SparkLog) -> None:
    source, target = any_spark_log.topic("source"), any_spark_log.topic("target")
    any_spark_log.append(source, orders(0, 100))
    any_spark_log.copy(source, target)
    any_spark_log.forget_commit(0)
    any_spark_log.append(source, orders(100, 10))
    repeated = any_spark_log.copy(
        source, target, {"splitRows": 7}
    )  # the same rows in other tasks are the same batch
    assert batch_rows(repeated) == [100, 10], "Spark did repeat it"
    assert any_spark_log.numbers(target) == list(range(110))


def test_a_lost_checkpoint_is_refused_not_skipped(any_spark_log: SparkLog) -> None:
    source, target = any_spark_log.topic("source"), any_spark_log.topic("target")
    any_spark_log.append(source, orders(0, 100))
    any_spark_log.copy(source, target, {"maxRowsPerBatch": 50})
    with pytest.raises(
        StreamingQueryException,
        match="BatchConflict: The query writes batch 0 .* but batch \\d is stored already",
    ) as refused:
        any_spark_log.copy(source, target, {"maxRowsPerBatch": 50}, checkpoint="another")
    assert "give it another writer name" in str(refused.value)
    assert any_spark_log.numbers(target) == list(range(100))


def test_the_older_of_two_queries_with_one_writer_is_fenced(spark_log: SparkLog) -> None:
    source, mine, theirs = (
        spark_log.topic("source"),
        spark_log.topic("mine"),
        spark_log.topic("theirs"),
    )
    rows = spark_log.stream(source, columns="order_id,customer_id,note")
    spark_log.append(source, orders(0, 10))
    older = spark_log.start(rows, mine, checkpoint="older", processingTime="100 milliseconds")
    older.processAllAvailable()
    newer = spark_log.start(rows, theirs, checkpoint="newer", processingTime="100 milliseconds")
    try:
        newer.processAllAvailable()
        spark_log.append(source, orders(10, 10))
        with pytest.raises(
            StreamingQueryException, match="TransactionFenced: A newer query writes as"
        ):
            older.processAllAvailable()
        newer.processAllAvailable()
    finally:
        newer.stop()
    assert spark_log.numbers(mine) == list(range(10))
    assert spark_log.numbers(theirs) == list(range(20))


def test_a_streaming_write_needs_a_name(spark_log: SparkLog) -> None:
    source, target = spark_log.topic("source"), spark_log.topic("target")
    query = (
        spark_log.stream(source, columns="order_id,customer_id,note")
        .writeStream.format("headrace")
        .options(
            log=spark_log.address,
            topic=target,
            checkpointLocation=str(spark_log.directory / "checkpoint"),
        )
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(StreamingQueryException, match="needs the option 'writer'"):
        query.awaitTermination(60)


def test_a_stream_that_does_not_fit_is_refused_at_its_start(spark_log: SparkLog) -> None:
    source, target = spark_log.topic("source"), spark_log.topic("target")
    spark_log.append(source, orders(0, 10))
    query = spark_log.start(spark_log.stream(source, columns="order_id,note"), target)
    with pytest.raises(
        StreamingQueryException, match="a column 'customer_id' that the DataFrame lacks"
    ):
        query.awaitTermination(60)
    assert sum(spark_log.log.end_offsets(target).values()) == 0


def test_a_batch_whose_task_fails_leaves_nothing_and_is_repeated(spark_log: SparkLog) -> None:
    source, target, switch = (
        spark_log.topic("source"),
        spark_log.topic("target"),
        spark_log.directory / "broken",
    )
    spark_log.append(source, orders(0, 100))
    switch.touch()
    read = spark_log.stream(source, columns="order_id,customer_id,note")
    rows = read.mapInArrow(failing_behind(spark_log.staging, "order_id", 77, switch), read.schema)
    with pytest.raises(StreamingQueryException, match="broken on purpose"):
        spark_log.start(rows, target).awaitTermination(60)
    assert sum(spark_log.log.end_offsets(target).values()) == 0
    assert spark_log.staged() == []
    switch.unlink()
    spark_log.start(rows, target).awaitTermination(60)
    assert spark_log.numbers(target) == list(range(100))


def test_latest_means_the_same_when_the_first_batch_is_repeated(spark_log: SparkLog) -> None:
    """Spark does not store where a first batch began; asked again after a crash, "latest" would
    skip its rows.
    """
    source, target = spark_log.topic("source"), spark_log.topic("target")
    spark_log.append(source, orders(0, 10))
    rows = spark_log.stream(source, columns="order_id,customer_id,note", startingOffsets="latest")
    query = spark_log.start(rows, target, processingTime="100 milliseconds")
    query.processAllAvailable()
    query.stop()
    assert spark_log.numbers(target) == []
    spark_log.forget_commit(0)
    spark_log.append(source, orders(10, 10))
    spark_log.copy(source, target, {"startingOffsets": "latest"})
    assert spark_log.numbers(target) == list(range(10, 20)), (
        "rows that came between the two runs are not skipped"
    )


def test_a_stream_follows_a_growing_topic(any_spark_log: SparkLog) -> None:
    source, target = any_spark_log.topic("source"), any_spark_log.topic("target")
    query = any_spark_log.start(
        any_spark_log.stream(source, columns="order_id,customer_id,note"),
        target,
        processingTime="100 milliseconds",
    )
    try:
        for first in range(0, 60, 20):
            any_spark_log.append(source, orders(first, 20))
            wait_until(lambda: len(any_spark_log.numbers(target)) == first + 20, 60)  # noqa: B023
    finally:
        query.stop()
    assert any_spark_log.numbers(target) == list(range(60))
