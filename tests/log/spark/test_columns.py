"""Whether a DataFrame's columns fit a topic: decided from the types alone, before a query runs."""

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from headrace.errors import BadRows
from headrace.log.spark.columns import check_writable, type_fits
from headrace.log.values import TopicInfo
from headrace.types.schema import parse_schema, table_schema


def info(schema: str, *, is_table: bool = False) -> TopicInfo:
    columns = parse_schema(schema)
    return TopicInfo(
        "orders",
        schema,
        table_schema(columns, (columns.names[0],)) if is_table else columns,
        is_table=is_table,
    )


ORDERS = info("order_id BIGINT, customer_id BIGINT, note STRING")


def frame(**columns: str) -> StructType:
    """A DataFrame's schema; type names as Spark's JSON has them."""
    return StructType.fromJson(
        {
            "fields": [
                {"name": name, "type": kind, "nullable": True, "metadata": {}}
                for name, kind in columns.items()
            ]
        }
    )


GOOD = {"order_id": "long", "customer_id": "integer", "note": "string"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"order_id": "long", "note": "string"}, "a column 'customer_id' that the DataFrame lacks"),
        (
            GOOD | {"nota": "integer"},
            "no column 'nota', and the DataFrame has: did you mean 'note'",
        ),
        (GOOD | {"note": "long"}, "the column 'note' as STRING; the DataFrame has it as BIGINT"),
        (
            GOOD | {"order_id": "decimal(20,0)"},
            "the column 'order_id' as BIGINT; the DataFrame has it as DECIMAL(20,0)",
        ),
        (GOOD | {"note": "interval"}, "the column 'note' as STRING"),
        (GOOD | {"_offset": "long"}, "'_offset', which reading a topic adds"),
        (GOOD | {"_change_type": "string"}, "no column '_change_type'"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(columns: dict[str, str], message: str) -> None:
    with pytest.raises(BadRows) as refused:
        check_writable(frame(**columns), ORDERS)
    assert message in str(refused.value)


def test_a_column_that_is_there_twice_is_refused() -> None:
    twice = StructType([*frame(**GOOD).fields, frame(note="string")["note"]])
    with pytest.raises(BadRows, match="'note' twice"):
        check_writable(twice, ORDERS)


def test_columns_that_fit_are_accepted() -> None:
    check_writable(frame(**GOOD), ORDERS)
    table = info("id BIGINT, name STRING", is_table=True)
    check_writable(frame(id="long", name="string"), table)
    check_writable(frame(_change_type="string", name="string", id="long"), table)


@pytest.mark.parametrize(
    ("given", "wanted", "good"),
    [
        ("TINYINT", "BIGINT", True),
        ("BIGINT", "INT", False),
        ("INT", "DOUBLE", True),
        ("BIGINT", "DOUBLE", False),
        ("FLOAT", "DOUBLE", True),
        ("DOUBLE", "FLOAT", False),
        ("INT", "DECIMAL(10,0)", True),
        ("INT", "DECIMAL(10,2)", False),
        ("DECIMAL(10,2)", "DECIMAL(12,4)", True),
        ("DECIMAL(10,2)", "DECIMAL(11,4)", False),
        ("TIMESTAMP", "TIMESTAMP_NTZ", False),
        ("STRING", "BINARY", False),
        ("ARRAY<INT>", "ARRAY<BIGINT>", True),
        ("MAP<STRING, INT>", "MAP<STRING, BIGINT>", True),
        ("MAP<STRING, INT>", "ARRAY<STRUCT<key: STRING, value: INT>>", False),
        ("STRUCT<a: INT, b: STRING>", "STRUCT<b: STRING, a: BIGINT>", True),
        ("STRUCT<a: INT>", "STRUCT<a: INT, b: STRING>", False),
        ("VARIANT", "STRUCT<value: BINARY, metadata: BINARY>", False),
        ("STRUCT<value: BINARY NOT NULL, metadata: BINARY NOT NULL>", "VARIANT", False),
    ],
)
def test_a_type_fits_if_no_value_can_be_lost(given: str, wanted: str, good: bool) -> None:
    one, other = (parse_schema(f"c {kind}").field("c").type for kind in (given, wanted))
    assert type_fits(one, other) is good
    assert type_fits(pa.null(), other)
