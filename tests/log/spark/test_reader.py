"""The stream reader as Spark drives it, batch after batch, but without a JVM: what a batch covers,
and what happens when the topic changes underneath.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

import headrace as hr
from headrace.errors import InputError
from headrace.log.spark.options import read_options
from headrace.log.spark.reader import TopicStreamReader
from tests.log.spark.conftest import ORDERS, orders

NUMBERS = StructType.fromJson(
    {"fields": [{"name": "order_id", "type": "long", "nullable": True, "metadata": {}}]}
)
ALL = ReadAllAvailable()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        yield opened


def append(log: hr.Log, topic: str, first: int, count: int, **options: Any) -> None:
    with log.producer(topic) as producer:
        producer.append(orders(first, count), **options)


def reader(log: hr.Log, topic: str, **options: str) -> TopicStreamReader:
    return TopicStreamReader(
        read_options({"log": log.address, "topic": topic, **options}, home=""), NUMBERS
    )


def rows(source: TopicStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    return [
        number
        for piece in source.partitions(start, end)
        for batch in source.read(piece)
        for number in batch["order_id"].to_pylist()
    ]


def test_without_new_rows_the_end_is_the_start(log: hr.Log) -> None:
    log.create_topic("t", ORDERS, partitions=2)
    append(log, "t", 0, 10)
    source = reader(log, "t")
    start = source.initialOffset()
    end = source.latestOffset(start, ALL)
    assert sorted(rows(source, start, end)) == list(range(10))
    assert source.latestOffset(end, ALL) is end
    assert source.reportLatestOffset() == {"0": 5, "1": 5}


def test_a_limit_is_spark_s_to_give(log: hr.Log) -> None:
    log.create_topic("t", ORDERS, partitions=2)
    append(log, "t", 0, 10)
    source = reader(log, "t", maxRowsPerBatch="4")
    start = source.initialOffset()
    assert source.getDefaultReadLimit() == ReadMaxRows(4)
    assert len(rows(source, start, source.latestOffset(start, ReadMaxRows(4)))) == 4
    assert len(rows(source, start, source.latestOffset(start, ALL))) == 10, (
        "Trigger.Once asks for everything"
    )


def test_available_now_ends_where_the_topic_ended(log: hr.Log) -> None:
    log.create_topic("t", ORDERS)
    append(log, "t", 0, 10)
    source = reader(log, "t")
    source.prepareForTriggerAvailableNow()
    append(log, "t", 10, 10)
    start = source.initialOffset()
    end = source.latestOffset(start, ALL)
    assert rows(source, start, end) == list(range(10))
    assert source.latestOffset(end, ALL) is end


def test_the_first_batch_repeated_begins_where_it_began(log: hr.Log) -> None:
    log.create_topic("t", ORDERS)
    append(log, "t", 0, 10)
    source = reader(log, "t", startingOffsets="latest")
    start = source.initialOffset()
    append(log, "t", 10, 10)
    assert source.initialOffset() == start, "asked again"
    end = source.latestOffset(start, ALL)
    restarted = reader(log, "t", startingOffsets="latest")
    append(log, "t", 20, 10)
    assert rows(restarted, restarted.initialOffset(), end) == list(range(10, 20))
    following = restarted.latestOffset(end, ALL)
    assert rows(restarted, end, following) == list(range(20, 30))
    assert "from" not in following


def test_rows_removed_before_they_were_read_are_an_error_or_a_choice(log: hr.Log) -> None:
    log.create_topic("t", ORDERS, retention_bytes=1, segment_bytes=1)
    append(log, "t", 0, 10)
    source = reader(log, "t")
    end = source.latestOffset(source.initialOffset(), ALL)
    for first in range(10, 50, 10):
        append(log, "t", first, 10)
    log.maintain("t")
    earliest = log.start_offsets("t")[0]
    assert earliest > 10
    with pytest.raises(
        InputError, match=f"Offsets 10 to {earliest - 1} of t\\[0\\] were removed by retention"
    ):
        source.latestOffset(end, ALL)
    going_on = reader(log, "t", onLost="earliest")
    assert rows(going_on, end, going_on.latestOffset(end, ALL)) == list(range(earliest, 50))
    assert rows(going_on, end, going_on.latestOffset(end, ReadMaxRows(3))) == list(
        range(earliest, earliest + 3)
    )


def test_a_topic_made_anew_is_not_taken_for_the_old_one(log: hr.Log) -> None:
    log.create_topic("t", ORDERS)
    append(log, "t", 0, 10)
    source = reader(log, "t")
    end = source.latestOffset(source.initialOffset(), ALL)
    log.delete_topic("t")
    log.create_topic("t", ORDERS)
    append(log, "t", 0, 3)
    with pytest.raises(InputError, match="it is another topic than before"):
        source.latestOffset(end, ALL)


def test_partitions_added_later_are_read_from_their_first_row(log: hr.Log) -> None:
    log.create_topic("t", ORDERS)
    append(log, "t", 0, 10)
    source = reader(log, "t", startingOffsets="latest")
    start = source.initialOffset()
    end = source.latestOffset(start, ALL)
    log.alter_topic("t", partitions=3)
    for partition in range(3):
        append(log, "t", 10 + 10 * partition, 10, partition=partition)
    assert rows(source, end, source.latestOffset(end, ALL)) == list(range(10, 40))


def test_a_transaction_is_never_cut_in_two(log: hr.Log) -> None:
    """Pairs go into two partitions in one transaction; each batch must have both of a pair, or
    neither.
    """
    log.create_topic("t", ORDERS, partitions=2)

    def write() -> None:
        for number in range(0, 400, 2):
            with log.transaction("pairs") as transaction:
                transaction.append("t", orders(number, 1), partition=0)
                transaction.append("t", orders(number + 1, 1), partition=1)

    source = reader(log, "t")
    thread = threading.Thread(target=write)
    thread.start()
    batches: list[list[int]] = []
    end = source.initialOffset()
    while sum(map(len, batches)) < 400:
        start, end = end, source.latestOffset(end, ALL)
        batches.append(rows(source, start, end))
    thread.join()
    assert sorted(number for batch in batches for number in batch) == list(range(400))
    assert len(batches) > 5
    assert all({number ^ 1 for number in batch} == set(batch) for batch in batches)


def test_a_stream_goes_on_after_columns_were_renamed_and_widened(log: hr.Log) -> None:
    log.create_topic("wide", "order_id INT, price FLOAT, note STRING")
    options = read_options({"log": log.address, "topic": "wide"}, home="")
    schema = StructType().add("order_id", "integer").add("price", "float").add("note", "string")
    source = TopicStreamReader(options, schema)
    producer = log.producer("wide")
    producer.append({"order_id": 1, "price": 1.5, "note": "a"})
    log.alter_topic("wide", add_columns="coupon STRING", rename_columns={"note": "remark"})
    log.alter_topic("wide", alter_columns="order_id BIGINT, price DOUBLE")
    producer.append({"order_id": 2, "price": 2.5, "remark": "b"})

    def read(start: int, stop: int) -> list[dict[str, Any]]:
        (part,) = source.partitions({"0": start}, {"0": stop})
        return [row for batch in source.read(part) for row in batch.to_pylist()]

    assert read(0, 2) == [
        {"order_id": 1, "price": 1.5, "note": "a"},
        {"order_id": 2, "price": 2.5, "note": "b"},
    ]
    producer.append({"order_id": 1 << 40, "price": 0.1, "note": "c"})
    with pytest.raises(InputError, match="'order_id' was altered since the query started"):
        read(2, 3)
