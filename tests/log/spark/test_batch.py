"""Reading and writing topics as DataFrames: types, columns, positions, headers, tables, and what is
refused.
"""

import json
import os
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from tests.log.spark.conftest import ORDERS, SparkLog, failing_behind, orders

pytestmark = pytest.mark.spark

POINT = {"srid": 4326, "wkb": bytes.fromhex("0101000000000000000000f03f0000000000000040")}
SEVEN = {"value": b"\x0c\x07", "metadata": b"\x01\x00\x00"}
# Type, and a value of it; every column also holds a null.
EVERY_TYPE: list[tuple[str, Any]] = [
    ("BOOLEAN", True),
    ("TINYINT", -128),
    ("SMALLINT", 32767),
    ("INT", -7),
    ("BIGINT", 2**62),
    ("FLOAT", 1.5),
    ("DOUBLE", float("-inf")),
    ("DECIMAL(38,10)", Decimal("-1234567890123456789012345678.0123456789")),
    ("DECIMAL(5,2)", Decimal("1.25")),
    ("STRING", "grüße 🌊"),
    ("STRING COLLATE UTF8_LCASE", "Ab"),
    ("VARCHAR(5)", "abc"),
    ("CHAR(3)", "abc"),
    ("BINARY", b"\x00\xff"),
    ("DATE", date(1, 1, 1)),
    ("TIMESTAMP", datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)),
    ("TIMESTAMP_NTZ", datetime(1900, 1, 1, 0, 0, 0, 1)),  # noqa: DTZ001
    ("TIME(6)", time(12, 30, 1, 5)),
    ("TIME(3)", time(12, 30, 1, 5000)),
    ("INTERVAL DAY TO SECOND", timedelta(days=-3, microseconds=5)),
    ("INTERVAL HOUR", timedelta(hours=3)),
    ("ARRAY<INT>", [1, None, 3]),
    ("STRUCT<a: INT NOT NULL, b: ARRAY<STRING>>", {"a": 1, "b": ["x", None]}),
    (
        "MAP<STRING, STRUCT<x: DECIMAL(10,2), y: TIMESTAMP>>",
        [("k", {"x": Decimal("1.10"), "y": datetime(2026, 1, 1, tzinfo=UTC)})],
    ),
    ("VARIANT", SEVEN),
    ("ARRAY<VARIANT>", [SEVEN, None]),
    ("GEOMETRY(4326)", POINT),
]


def test_every_type_survives_unchanged(spark_log: SparkLog) -> None:
    schema = ", ".join(
        ["id INT NOT NULL", *(f"c{number} {kind}" for number, (kind, _) in enumerate(EVERY_TYPE))]
    )
    source, target = (
        spark_log.topic("source", schema, partitions=1),
        spark_log.topic("target", schema, partitions=1),
    )
    values = {f"c{number}": value for number, (_, value) in enumerate(EVERY_TYPE)}
    spark_log.append(source, [{"id": 1, **values}, {"id": 2, **dict.fromkeys(values)}])
    rows = spark_log.read(source).drop("_partition", "_offset", "_timestamp")
    assert [field.dataType.simpleString() for field in rows.schema][-3:] == [
        "variant",
        "array<variant>",
        "geometry(4326)",
    ]
    assert rows.selectExpr("variant_get(c24, '$', 'int')").where("id = 1").first() == (7,)
    spark_log.write(rows, target)
    columns = ["id", *values]
    expected, found = (
        spark_log.log.read(topic, columns=columns).to_table() for topic in (source, target)
    )
    assert found.schema.equals(expected.schema, check_metadata=True)
    assert found.equals(expected)
    assert found.num_rows == 2


def test_rows_go_through_unchanged(any_spark_log: SparkLog) -> None:
    source, target = (
        any_spark_log.topic("source", key="customer_id"),
        any_spark_log.topic("target", key="customer_id"),
    )
    any_spark_log.append(source, orders(0, 500))
    rows = any_spark_log.read(source)
    assert rows.columns == [
        "order_id",
        "customer_id",
        "note",
        "_partition",
        "_offset",
        "_timestamp",
    ]
    any_spark_log.write(rows.select("note", "order_id", "customer_id"), target)  # in any order
    found = any_spark_log.log.read(target).to_table()
    assert (
        found.select(["order_id", "customer_id", "note"]).sort_by("order_id").equals(orders(0, 500))
    )
    before = any_spark_log.log.read(source).to_table()
    assert partition_of(found) == partition_of(before), (
        "the same key, the same partition, whoever writes it"
    )


def partition_of(rows: pa.Table) -> dict[int, int]:
    return dict(zip(rows["order_id"].to_pylist(), rows["_partition"].to_pylist(), strict=True))


def test_a_partition_keeps_its_order_when_it_is_split_into_tasks(spark_log: SparkLog) -> None:
    source, target = (
        spark_log.topic("source", partitions=1),
        spark_log.topic("target", partitions=1),
    )
    spark_log.append(source, orders(0, 1000))
    rows = spark_log.read(source, splitRows=300, columns="order_id,customer_id,note")
    assert rows.rdd.getNumPartitions() == 4
    spark_log.write(rows, target)
    assert spark_log.log.read(target).to_table()["order_id"].to_pylist() == list(range(1000))


def test_a_read_of_an_empty_topic_is_empty_and_an_empty_write_writes_nothing(
    any_spark_log: SparkLog,
) -> None:
    source, target = any_spark_log.topic("source"), any_spark_log.topic("target")
    rows = any_spark_log.read(source)
    assert rows.count() == 0
    any_spark_log.write(rows.select("order_id", "customer_id", "note"), target)
    assert sum(any_spark_log.log.end_offsets(target).values()) == 0


def test_columns_are_chosen(spark_log: SparkLog) -> None:
    topic = spark_log.topic("orders")
    spark_log.append(topic, orders(0, 10))
    chosen = spark_log.read(topic, columns="note, order_id,_offset")
    assert chosen.columns == ["note", "order_id", "_offset"]
    assert chosen.orderBy("order_id").first() == ("order 0", 0, 0)
    by_schema = (
        spark_log.spark.read.format("headrace")
        .options(log=spark_log.address, topic=topic)
        .schema("note STRING")
        .load()
    )
    assert sorted(row.note for row in by_schema.collect()) == sorted(
        f"order {n}" for n in range(10)
    )
    with pytest.raises(PySparkException, match="has no column 'nte': did you mean 'note'"):
        spark_log.read(topic, columns="order_id,nte")
    with pytest.raises(PySparkException, match="has 'note' as int64; the topic has string"):
        spark_log.spark.read.format("headrace").options(log=spark_log.address, topic=topic).schema(
            "note BIGINT"
        ).load().collect()


def test_a_column_added_later_reads_as_null_before(spark_log: SparkLog) -> None:
    topic = spark_log.topic("orders", partitions=1)
    spark_log.append(topic, orders(0, 2))
    spark_log.log.alter_topic(topic, add_columns="coupon STRING")
    spark_log.append(topic, {"order_id": 2, "customer_id": 0, "note": "n", "coupon": "half"})
    assert [row.coupon for row in spark_log.read(topic).orderBy("order_id").collect()] == [
        None,
        None,
        "half",
    ]


def test_headers_are_read_when_asked_for(any_spark_log: SparkLog) -> None:
    topic = any_spark_log.topic("orders", partitions=1)
    any_spark_log.append(
        topic, orders(0, 2).to_pylist(), headers=[[("trace", b"\x07"), ("empty", None)], None]
    )
    rows = any_spark_log.read(topic, includeHeaders="true").orderBy("order_id").collect()
    assert [(header.key, header.value) for header in rows[0]._headers] == [
        ("trace", bytearray(b"\x07")),
        ("empty", None),
    ]
    assert not rows[1]._headers
    assert "_headers" not in any_spark_log.read(topic).columns


def test_positions_in_every_form(any_spark_log: SparkLog) -> None:
    topic = any_spark_log.topic("orders")
    log = any_spark_log.log
    with log.producer(topic) as producer:
        producer.append(orders(0, 10), partition=0)
        producer.append(orders(10, 10), partition=1)
        between = datetime.now(UTC)
        while datetime.now(UTC) - between < timedelta(milliseconds=5):
            pass
        producer.append(orders(20, 10), partition=0)

    def found(**options: str) -> list[int]:
        return sorted(
            row.order_id
            for row in any_spark_log.read(topic, columns="order_id", **options).collect()
        )

    first, second, later = list(range(10)), list(range(10, 20)), list(range(20, 30))
    assert (
        found()
        == found(startingOffsets="earliest", endingOffsets="latest")
        == first + second + later
    )
    assert found(startingOffsets="latest") == []
    assert found(startingOffsets=json.dumps({"0": 15})) == second + later[5:]
    assert found(
        startingOffsets=json.dumps({"0": "latest", "1": 3}), endingOffsets=json.dumps({"1": 5})
    ) == [13, 14]
    assert found(startingOffsets=between.isoformat()) == later
    assert found(endingOffsets=between.isoformat()) == first + second


def test_a_topic_that_does_not_exist_is_named(spark_log: SparkLog) -> None:
    topic = spark_log.topic("orders")
    with pytest.raises(
        PySparkException, match=f"There is no topic '{topic}s': did you mean '{topic}'"
    ):
        spark_log.read(f"{topic}s")
    with pytest.raises(PySparkException, match="There is no log in"):
        spark_log.spark.read.format("headrace").options(
            log=f"file:{spark_log.directory / 'lgo'}", topic=topic
        ).load()
    assert not (spark_log.directory / "lgo").exists()
    with pytest.raises(PySparkException, match="no option 'topik' here: did you mean 'topic'"):
        spark_log.spark.read.format("headrace").options(log=spark_log.address, topik=topic).load()


def test_a_relative_address_starts_where_spark_was_asked_for(
    spark_log: SparkLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.log.spark import register

    topic, started_in = spark_log.topic("orders"), Path.cwd()
    spark_log.append(topic, orders(0, 3))
    monkeypatch.chdir(spark_log.directory)
    register(spark_log.spark)
    try:
        assert (
            spark_log.spark.read.format("headrace")
            .options(log="file:log", topic=topic)
            .load()
            .count()
            == 3
        )
    finally:
        os.chdir(started_in)
        register(spark_log.spark)


# Writing


def test_a_dataframe_that_does_not_fit_is_refused_with_the_column_named(
    spark_log: SparkLog,
) -> None:
    topic = spark_log.topic("orders")
    with pytest.raises(
        PySparkException, match="the column 'note' as STRING; the DataFrame has it as BIGINT"
    ):
        spark_log.write(
            spark_log.spark.range(3).selectExpr(
                "id AS order_id", "id AS customer_id", "id AS note"
            ),
            topic,
        )
    assert sum(spark_log.log.end_offsets(topic).values()) == 0


def test_smaller_types_and_nulls_find_their_place(spark_log: SparkLog) -> None:
    topic = spark_log.topic(
        "wide", "a BIGINT, b DOUBLE, c DECIMAL(20,4), d STRUCT<x: BIGINT, y: STRING>", partitions=1
    )
    spark_log.write(
        spark_log.spark.sql(
            "SELECT 1 AS a, CAST(1.5 AS FLOAT) AS b, CAST(2 AS DECIMAL(5,2)) AS c,"
            " named_struct('y', NULL, 'x', 3S) AS d"
        ),
        topic,
    )
    row = spark_log.log.read(topic, columns=["a", "b", "c", "d"]).to_pylist()[0]
    assert row == {"a": 1, "b": 1.5, "c": Decimal("2.0000"), "d": {"x": 3, "y": None}}


def test_a_null_where_none_may_be_stores_nothing(spark_log: SparkLog) -> None:
    topic = spark_log.topic("strict", "id BIGINT NOT NULL", partitions=1)
    with pytest.raises(
        PySparkException, match="column 'id': it is null, but the column is NOT NULL"
    ):
        spark_log.write(
            spark_log.spark.sql(
                "SELECT CASE WHEN id < 5 THEN id END AS id FROM range(0, 10, 1, 1)"
            ),
            topic,
        )
    assert spark_log.log.end_offsets(topic) == {0: 0}
    assert spark_log.staged() == []


def test_a_write_whose_task_fails_leaves_nothing(spark_log: SparkLog) -> None:
    topic = spark_log.topic("orders")
    rows = spark_log.spark.range(0, 1000, 1, 2).selectExpr(
        "id AS order_id", "id AS customer_id", "'n' AS note"
    )
    broken = rows.mapInArrow(failing_behind(spark_log.staging, "order_id", 900), rows.schema)
    with pytest.raises(PySparkException, match="broken on purpose"):
        spark_log.write(broken, topic)
    assert sum(spark_log.log.end_offsets(topic).values()) == 0
    assert spark_log.staged() == []


def test_a_topic_is_not_overwritten(spark_log: SparkLog) -> None:
    topic = spark_log.topic("orders")
    with pytest.raises(PySparkException, match="it cannot be overwritten"):
        spark_log.read(topic).write.format("headrace").options(
            log=spark_log.address, topic=topic
        ).mode("overwrite").save()


def test_a_table_takes_rows_as_upserts_unless_they_say_what_they_are(
    any_spark_log: SparkLog,
) -> None:
    table = any_spark_log.log.create_table(
        f"customers-{any_spark_log.suffix}",
        "customer_id BIGINT, name STRING",
        key="customer_id",
    ).name
    any_spark_log.write(any_spark_log.spark.sql("SELECT 1 AS customer_id, 'Ada' AS name"), table)
    any_spark_log.write(
        any_spark_log.spark.sql(
            "SELECT 2 AS customer_id, 'Grace' AS name, 'insert' AS _change_type"
        ),
        table,
    )
    any_spark_log.write(
        any_spark_log.spark.sql("SELECT 1 AS customer_id, NULL AS name, 'delete' AS _change_type"),
        table,
    )
    changes = [
        (row.customer_id, row.name, row._change_type)
        for row in any_spark_log.read(table).orderBy("_offset").collect()
    ]
    assert changes == [(1, "Ada", "update_postimage"), (2, "Grace", "insert"), (1, None, "delete")]
    with pytest.raises(PySparkException, match="'upsert' is not a change"):
        any_spark_log.write(
            any_spark_log.spark.sql(
                "SELECT 2 AS customer_id, 'Grace' AS name, 'upsert' AS _change_type"
            ),
            table,
        )


def test_a_log_made_anew_in_the_same_place_is_noticed(spark_log: SparkLog, tmp_path: Path) -> None:
    """Python workers keep logs open between tasks; a deleted log's rows must not come back."""
    import headrace as hr

    address, counts = f"file:{tmp_path / 'short-lived'}", []
    make: Callable[[], hr.Log] = lambda: hr.open_log(address)  # noqa: E731
    for count in (5, 3):
        with make() as log:
            log.create_topic("orders", ORDERS)
            with log.producer("orders") as producer:
                producer.append(orders(0, count))
        counts.append(
            spark_log.spark.read.format("headrace")
            .options(log=address, topic="orders")
            .load()
            .count()
        )
        os.rename(tmp_path / "short-lived", tmp_path / f"gone-{count}")  # noqa: PTH104
    assert counts == [5, 3]


def test_a_written_batch_is_one_transaction(spark_log: SparkLog) -> None:
    topic = spark_log.topic("orders", partitions=4)
    spark_log.write(
        spark_log.spark.range(0, 1000, 1, 4).selectExpr(
            "id AS order_id", "id AS customer_id", "'n' AS note"
        ),
        topic,
    )
    times = spark_log.log.read(topic).to_table()["_timestamp"]
    assert len(times.unique()) == 1
    assert isinstance(times, pa.ChunkedArray)


def test_a_dataframe_of_the_schema_before_a_change_is_written(spark_log: SparkLog) -> None:
    topic = spark_log.topic("orders", partitions=1)
    before = spark_log.spark.createDataFrame(
        [(1, 2, "a")], "order_id BIGINT, customer_id BIGINT, note STRING"
    )
    spark_log.log.alter_topic(topic, add_columns="coupon STRING", rename_columns={"note": "remark"})
    before.write.format("headrace").options(log=spark_log.address, topic=topic).mode(
        "append"
    ).save()
    (row,) = spark_log.read(topic).collect()
    assert (row.order_id, row.remark, row.coupon) == (1, "a", None)
