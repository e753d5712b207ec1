"""Schemas: Spark's DDL to Arrow and back, adding columns, and the columns of a key."""

import json
import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema, to_arrow_type

from headrace.errors import BadSchema, CorruptionError, UnknownColumn
from headrace.types.schema import (
    check_key,
    declared_schema,
    is_variant,
    parse_schema,
    schema_from_bytes,
    schema_to_bytes,
    table_schema,
    to_ddl,
    to_spark_ddl,
)

# What pyspark says each type is. Written out, because reading DDL with pyspark takes a JVM.
SPARK_TYPES: dict[str, spark.DataType] = {
    "BOOLEAN": spark.BooleanType(),
    "TINYINT": spark.ByteType(),
    "BYTE": spark.ByteType(),
    "SMALLINT": spark.ShortType(),
    "SHORT": spark.ShortType(),
    "INT": spark.IntegerType(),
    "INTEGER": spark.IntegerType(),
    "BIGINT": spark.LongType(),
    "LONG": spark.LongType(),
    "FLOAT": spark.FloatType(),
    "REAL": spark.FloatType(),
    "DOUBLE": spark.DoubleType(),
    "DECIMAL": spark.DecimalType(10, 0),
    "DEC(5)": spark.DecimalType(5, 0),
    "NUMERIC(38, 18)": spark.DecimalType(38, 18),
    "STRING": spark.StringType(),
    "STRING COLLATE UTF8_LCASE": spark.StringType("UTF8_LCASE"),
    "BINARY": spark.BinaryType(),
    "DATE": spark.DateType(),
    "TIMESTAMP": spark.TimestampType(),
    "TIMESTAMP(6)": spark.TimestampType(),
    "TIMESTAMP_LTZ": spark.TimestampType(),
    "TIMESTAMP WITH LOCAL TIME ZONE": spark.TimestampType(),
    "TIMESTAMP_NTZ": spark.TimestampNTZType(),
    "TIMESTAMP WITHOUT TIME ZONE": spark.TimestampNTZType(),
    "TIME": spark.TimeType(),
    "TIME(0)": spark.TimeType(0),
    "TIME(9) WITHOUT TIME ZONE": spark.TimeType(9),
    "INTERVAL DAY TO SECOND": spark.DayTimeIntervalType(),
    "INTERVAL DAY": spark.DayTimeIntervalType(0, 0),
    "INTERVAL HOUR TO MINUTE": spark.DayTimeIntervalType(1, 2),
    "INTERVAL SECOND": spark.DayTimeIntervalType(3, 3),
    "VARIANT": spark.VariantType(),
    "GEOMETRY(4326)": spark.GeometryType(4326),
    "GEOGRAPHY(ANY)": spark.GeographyType("ANY"),
    "ARRAY<STRING>": spark.ArrayType(spark.StringType()),
    "ARRAY<ARRAY<VARIANT>>": spark.ArrayType(spark.ArrayType(spark.VariantType())),
    "MAP<STRING, INT>": spark.MapType(spark.StringType(), spark.IntegerType()),
    "MAP<INT, MAP<DATE, TIMESTAMP_NTZ>>": spark.MapType(
        spark.IntegerType(), spark.MapType(spark.DateType(), spark.TimestampNTZType())
    ),
    "STRUCT<a: INT, b STRING NOT NULL>": spark.StructType(
        [
            spark.StructField("a", spark.IntegerType()),
            spark.StructField("b", spark.StringType(), False),
        ]
    ),
    "STRUCT<>": spark.StructType([]),
    "STRUCT<`x y`: ARRAY<STRUCT<q: DECIMAL(3,1)>>>": spark.StructType(
        [
            spark.StructField(
                "x y",
                spark.ArrayType(
                    spark.StructType([spark.StructField("q", spark.DecimalType(3, 1))])
                ),
            )
        ]
    ),
}


@pytest.mark.parametrize("ddl", SPARK_TYPES)
def test_every_type_is_the_one_that_pyspark_uses(ddl: str) -> None:
    expected = to_arrow_type(SPARK_TYPES[ddl], timezone="UTC")
    for written in (f"x {ddl}", f"x: {ddl.lower()}", f"x {ddl} NOT NULL"):
        field = parse_schema(written).field("x")
        assert field.type.equals(
            expected, check_metadata=ddl in ("VARIANT", "GEOMETRY(4326)", "GEOGRAPHY(ANY)")
        ), written
        assert field.nullable == (not written.endswith("NOT NULL"))


def test_pyspark_recognises_what_arrow_carries_as_marked_structs() -> None:
    read = from_arrow_schema(parse_schema("v VARIANT, g GEOMETRY(3857), h GEOGRAPHY(4326)"))
    assert [field.dataType for field in read] == [
        spark.VariantType(),
        spark.GeometryType(3857),
        spark.GeographyType(4326),
    ]


EVERYTHING = (
    "order_id BIGINT, customer_id BIGINT NOT NULL, `odd name` STRING COMMENT 'x', tags"
    " ARRAY<STRING>, m MAP<STRING, INT>, s STRUCT<a: INT, b: STRING NOT NULL COMMENT 'inner'>, code"
    " CHAR(3), label VARCHAR(20) NOT NULL, amount DECIMAL(12,2), t TIME(3), i INTERVAL DAY TO HOUR,"
    " v VARIANT, g GEOMETRY(ANY), h GEOGRAPHY(4326), c STRING COLLATE UNICODE, n"
    " ARRAY<MAP<VARCHAR(5), TIME(0)>>, at TIMESTAMP, wall TIMESTAMP_NTZ, day DATE, raw BINARY, ok"
    " BOOLEAN, `tick``ed` FLOAT"
)


def test_ddl_comes_back_as_it_was() -> None:
    assert to_ddl(parse_schema(EVERYTHING)) == EVERYTHING


def test_bytes_come_back_as_they_were() -> None:
    schema = parse_schema(EVERYTHING)
    assert schema_from_bytes(schema_to_bytes(schema)).equals(schema, check_metadata=True)


@pytest.mark.parametrize(
    "data", [b"", b"nonsense", schema_to_bytes(pa.schema([("a", pa.int64())]))[:40]]
)
def test_bytes_that_are_no_schema_are_corruption(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="cannot be read"):
        schema_from_bytes(data)


def test_comments_are_kept_where_pyspark_keeps_them() -> None:
    schema = parse_schema("a INT COMMENT 'how many'")
    expected = to_arrow_schema(
        spark.StructType(
            [spark.StructField("a", spark.IntegerType(), metadata={"comment": "how many"})]
        ),
        timezone="UTC",
    )
    assert schema.equals(expected, check_metadata=True)


@pytest.mark.parametrize(
    ("literal", "comment"),
    [
        ("'it''s'", "it's"),
        (r"'it\'s'", "it's"),
        ('"say ""hi"""', 'say "hi"'),
        ("\"it''s\"", "it''s"),
        (r"'a\nb\tc\\d'", "a\nb\tc\\d"),
        (r"'\u00fc \U0001F600 \101 \% \_ \q'", "ü 😀 A \\% \\_ q"),
        ("'two' ' parts'", "two parts"),
        ("'it, has <marks> -- and /* more */'", "it, has <marks> -- and /* more */"),
    ],
)
def test_comments_are_read_as_spark_reads_them(literal: str, comment: str) -> None:
    metadata = parse_schema(f"a INT COMMENT {literal}, b INT").field("a").metadata
    assert json.loads(metadata[b"SPARK::metadata::json"]) == {"comment": comment}


def test_white_space_sql_comments_and_case_do_not_matter() -> None:
    plain = parse_schema("a BIGINT NOT NULL, b ARRAY<INT>")
    assert parse_schema(
        "\n a bigint Not  null, -- the first\n b /* second */ Array < iNt > \n"
    ).equals(plain)


def test_a_whole_struct_is_a_schema_too() -> None:
    assert parse_schema("struct<a: int, b: string>").equals(parse_schema("a INT, b STRING"))
    assert parse_schema("struct STRUCT<a: INT>").names == ["struct"]


def test_words_of_sql_can_be_names() -> None:
    assert parse_schema(
        "select INT, from STRING, date DATE, time TIME, interval INTERVAL DAY, 1a INT"
    ).names[:2] == ["select", "from"]


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("", "no columns"),
        ("  -- nothing", "no columns"),
        ("a", "position 1 .*expected a type, found the end"),
        ("a INT b INT", "position 6: expected ',' or the end of the schema, found 'b'"),
        ("a INT,", "position 6: expected a column name, found the end"),
        (
            "a INTT",
            r"position 2 \(column 'a'\): expected a type, found 'INTT'[\s\S]*did you mean INT\?",
        ),
        ("a TEXT", "found 'TEXT'"),
        ("a STRNG", "did you mean STRING"),
        ("s STRUCT<x: STRUCT<y: TIMESTMP>>", r"column 's\.x\.y'\)[\s\S]*did you mean TIMESTAMP\?"),
        ("a ARRAY<INT", "expected '>', found the end"),
        ("a ARRAY", "expected '<'"),
        ("a ARRAY<INT NOT NULL>", "expected '>', found 'NOT'"),
        ("a MAP<STRING>", "expected ','"),
        ("a MAP<MAP<INT, INT>, INT>", "a key that can be compared"),
        ("a MAP<VARIANT, INT>", "a key that can be compared"),
        ("a DECIMAL(39, 0)", "precision from 1 to 38"),
        ("a DECIMAL(0)", "precision from 1 to 38"),
        ("a DECIMAL(5, 6)", "scale of at most the precision, 5"),
        ("a DECIMAL(5, -2)", "expected a number, found '-'"),
        ("a DECIMAL(5, 2, 1)", r"expected '\)'"),
        ("a CHAR", r"a length, as in CHAR\(20\)"),
        ("a VARCHAR(0)", r"a length, as in VARCHAR\(20\)"),
        ("a TIME(10)", "precision from 0 to 9"),
        ("a TIMESTAMP(9)", "holds microseconds"),
        ("a INTERVAL YEAR TO MONTH", "years and months"),
        ("a INTERVAL MONTH", "years and months"),
        ("a INTERVAL", "DAY, HOUR, MINUTE or SECOND"),
        ("a INTERVAL HOUR TO DAY", "a unit smaller than HOUR"),
        ("a GEOMETRY", r"expected '\('"),
        ("a VOID", "VOID, which cannot be stored"),
        ("a NULL", "NULL, which cannot be stored"),
        ("a INT NULL", "NULL cannot be declared for a topic's column"),
        ("a INT DEFAULT 1", "DEFAULT cannot be declared for a topic's column"),
        ("a INT NOT", "expected 'NULL'"),
        ("a INT COMMENT x", "a comment in quotes"),
        ("a INT COMMENT 'x' NOT NULL", "found 'NOT'"),
        ("1 INT", "expected a column name, found '1'"),
        ("a-b INT", "expected a type, found '-'"),
        ("größe INT", "expected a column name, found 'größe'[\\s\\S]*backquotes"),
        ("`` INT", "a name that is not empty"),
        ("a INT, A STRING", "'A' twice .first as 'a'"),
        ("s STRUCT<x: INT, X: INT>", "The struct 's' has the column 'X' twice"),
        ("_offset BIGINT", "'_offset' is reserved"),
        ("_Change_Type STRING", "'_Change_Type' is reserved"),
        ("a " + "ARRAY<" * 100 + "INT" + ">" * 100, "nested more than 64"),
    ],
)
def test_bad_schemas_are_refused_with_the_place(ddl: str, message: str) -> None:
    with pytest.raises(BadSchema, match=message) as caught:
        parse_schema(ddl)
    assert caught.value.fix


def test_the_error_points_at_the_place() -> None:
    with pytest.raises(BadSchema) as caught:
        parse_schema("first BIGINT,\n  second STRONG, third INT")
    lines = caught.value.message.splitlines()
    assert lines[1].index("STRONG") == lines[2].index("^")


@pytest.mark.parametrize(
    "name", ["_partition", "_offset", "_timestamp", "_headers", "_change_type", "_commit"]
)
def test_reserved_names_are_refused_only_at_the_top(name: str) -> None:
    with pytest.raises(BadSchema, match="reserved"):
        parse_schema(f"a INT, {name} STRING")
    assert parse_schema(f"s STRUCT<{name}: INT>, _mine INT").names == ["s", "_mine"]


def test_spark_sources_see_strings_instead_of_sized_texts() -> None:
    ddl = to_spark_ddl(
        parse_schema(
            "a CHAR(3) NOT NULL COMMENT 'x', b ARRAY<VARCHAR(5)>, m MAP<CHAR(2), STRUCT<t:"
            " VARCHAR(9)>>, t TIME(3), v VARIANT"
        )
    )
    assert (
        ddl == "a STRING NOT NULL COMMENT 'x', b ARRAY<STRING>, m MAP<STRING, STRUCT<t: STRING>>, t"
        " TIME(3), v VARIANT"
    )


def test_arrow_types_without_a_spark_type_have_no_ddl() -> None:
    with pytest.raises(BadSchema, match="uint8"):
        to_ddl(pa.schema([("a", pa.uint8())]))


def test_keys_are_checked() -> None:
    schema = parse_schema("customer_id BIGINT, region STRING, tags ARRAY<STRING>, v VARIANT")
    assert check_key(schema, None, where="orders") == ()
    assert check_key(schema, "customer_id", where="orders") == ("customer_id",)
    assert check_key(schema, ["region", "customer_id"], where="orders") == ("region", "customer_id")
    with pytest.raises(
        UnknownColumn, match="orders has no column 'customer': did you mean 'customer_id'"
    ):
        check_key(schema, "customer", where="orders")
    for nested in ("tags", "v"):
        with pytest.raises(BadSchema, match="cannot be a key"):
            check_key(schema, nested, where="orders")
    with pytest.raises(BadSchema, match="twice"):
        check_key(schema, ["region", "region"], where="orders")


def test_a_table_keeps_its_declaration_beneath_what_it_stores() -> None:
    declared = parse_schema("id BIGINT, name VARCHAR(5) NOT NULL COMMENT 'n', note STRING")
    stored = table_schema(declared, ("id",))
    assert (
        to_ddl(stored)
        == "id BIGINT NOT NULL, name VARCHAR(5) COMMENT 'n', note STRING, _change_type STRING NOT"
        " NULL"
    )
    assert (
        to_ddl(declared_schema(stored))
        == "id BIGINT NOT NULL, name VARCHAR(5) NOT NULL COMMENT 'n', note STRING"
    )
    assert to_ddl(declared_schema(schema_from_bytes(schema_to_bytes(stored)))) == to_ddl(
        declared_schema(stored)
    )


def test_a_struct_that_looks_like_a_variant_is_none() -> None:
    assert is_variant(parse_schema("v VARIANT").field("v").type)
    assert not is_variant(
        parse_schema("v STRUCT<value: BINARY NOT NULL, metadata: BINARY NOT NULL>").field("v").type
    )


def test_no_pyspark_is_needed() -> None:
    code = (
        "import sys; from headrace.types import schema, json_codec; from headrace.log import rows,"
        " partitioning; from headrace import"
        " durations; assert 'pyspark' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


names = st.one_of(
    st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True),
    st.text(min_size=1, max_size=6).filter(lambda name: name.lower() != "_commit"),
)
plain = [
    "BOOLEAN",
    "TINYINT",
    "INT",
    "BIGINT",
    "DOUBLE",
    "DECIMAL(12,3)",
    "STRING",
    "BINARY",
    "DATE",
    "TIMESTAMP",
    "TIMESTAMP_NTZ",
]
named = [
    "VARCHAR(7)",
    "TIME(2)",
    "INTERVAL DAY TO MINUTE",
    "VARIANT",
    "GEOMETRY(4326)",
    "STRING COLLATE UNICODE_CI",
]
scalars = st.sampled_from(plain + named)


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def columns(of: st.SearchStrategy[str], separator: str) -> st.SearchStrategy[str]:
    column = st.tuples(names, of, st.sampled_from(["", " NOT NULL"]))
    unique = st.lists(column, min_size=1, max_size=4, unique_by=lambda each: each[0].lower())
    return unique.map(
        lambda each: ", ".join(
            f"{quoted(name)}{separator}{kind}{null}" for name, kind, null in each
        )
    )


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        inner.map("ARRAY<{}>".format),
        st.tuples(st.sampled_from(["INT", "STRING", "DATE"]), inner).map(
            lambda pair: f"MAP<{pair[0]}, {pair[1]}>"
        ),
        columns(inner, ": ").map("STRUCT<{}>".format),
    )


@given(columns(st.recursive(scalars, nested, max_leaves=6), " "))
def test_any_schema_survives_text_and_bytes(ddl: str) -> None:
    schema = parse_schema(ddl)
    assert parse_schema(to_ddl(schema)).equals(schema, check_metadata=True)
    assert schema_from_bytes(schema_to_bytes(schema)).equals(schema, check_metadata=True)
    assert len(from_arrow_schema(schema)) == len(schema), "pyspark reads every type"


@given(st.text(alphabet="aINT <>(),:`'NOL\n-/*STRUCTARY1", max_size=40))
def test_any_text_is_read_or_refused_as_a_bad_schema(text: str) -> None:
    try:
        schema = parse_schema(text)
    except BadSchema:
        return
    assert parse_schema(to_ddl(schema)).equals(schema, check_metadata=True)
