"""What Python computes over Arrow's columns is what Spark computes, on rows where everything goes
wrong.
"""

from __future__ import annotations

import itertools
import pickle
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from headrace.columnar.columns import ORDER_FIELDS
from headrace.columnar.json_fields import NeedsSpark
from headrace.expressions.evaluator import Constant, Filter, Node, Projection
from headrace.expressions.expression import Expression, parse_expression
from headrace.expressions.spark_subset import compile_to_arrow
from headrace.types.schema import to_spark_ddl
from tests.expressions.edge_case_rows import SCHEMA, comparable, edge_case_rows
from tests.short_forms import examples

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = edge_case_rows()
CORPUS = [
    line
    for line in Path(__file__).with_name("expressions.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
_NUMBERS = ["a", "b", "t", "h", "d", "f", "3", "-1", "2.5", "1e3", "0.1"]
_TEXTS = ["s", "n", "'abc'", "''"]
OURS = [
    *(
        f"{left} {sign} {right}"
        for left, right in itertools.product(_NUMBERS, repeat=2)
        for sign in ("*", "<", ">=", "=")
    ),
    *(
        f"{left} {sign} {right}"
        for left, right in itertools.product(_TEXTS, repeat=2)
        for sign in ("=", "<>", "<", "<=", ">", ">=")
    ),
    *(
        f"({left} - {right}) / 2"
        for left, right in itertools.product(("d", "f", "b"), ("d", "2.5"))
    ),
    "d + d * 2.5 - b / 3",
    "d <> d",
    "d <= 1.5",
    "d > a",
    "f > d",
    "d BETWEEN -1 AND 2.5",
    "a BETWEEN t AND b",
    "NOT (d > 1)",
    "a > 1 AND d > 1",
    "a > 1 OR d > 1 OR flag",
    "flag AND NOT flag",
    "s IS NULL",
    "s IS NOT NULL OR flag",
    "s IN ('abc', '')",
    "a IN (1, 7, 9999999999)",
    "a NOT IN (0)",
    "(a = 1) AND (s = 'abc')",
    "true",
    "'x'",
    "5",
    "99999999999",
    "1e3",
    "A > 1",
    "`b` < 5",
]
OPTIMISTIC = [
    *(
        f"{left} {sign} {right}"
        for left, right in itertools.product(["a", "b", "t", "m", "3", "0.908"], repeat=2)
        for sign in ("+", "-", "*")
    ),
    *(f"{left} % {right}" for left in ("a", "b", "t") for right in ("7", "-3", "1", "123")),
    "mod(b, 123) = 0",
    "a * b > 10 AND b + 1 > a",
    "w > 1.5",
    "m < w",
    "0.908 * b > 1000000 AND 0.908 * b < 50000000",
    "ts < ts",
    "ts >= ntz",
    "dt = dt",
    "flag < NOT flag",
    "CASE WHEN a > 1 THEN 'x' WHEN flag THEN s ELSE n END",
    "CASE a WHEN 1 THEN b WHEN 7 THEN 2 END",
    "CASE WHEN d > 1 THEN 2 ELSE d END",
    "CASE WHEN flag THEN m END",
    "CASE WHEN flag THEN NULL ELSE dt END",
    "CASE WHEN b <> 0 THEN a / b END",
    "if(flag, a, b)",
    "coalesce(a, b, 0)",
    "nvl(s, 'none')",
    "coalesce(d, a)",
    "CAST(a AS BIGINT)",
    "CAST(b AS STRING)",
    "CAST(t AS DOUBLE)",
    "CAST(ts AS DATE)",
    "date(ts)",
    "flag IS TRUE",
    "flag IS NOT FALSE",
    "isnull(s) OR isnotnull(a)",
    "s || '-' || n",
    "concat(s, n)",
    *(f"{name}({kind})" for name in ("lower", "upper", "length", "char_length") for kind in "sn"),
    *(f"{name}(s, 'a')" for name in ("startswith", "endswith", "contains")),
    "substring(s, 2, 3)",
    "substr(n, 1)",
    "substring(s, 4, 0)",
    *(f"split_part(n, '/', {part})" for part in (1, 3, 4, -1, 9, -9)),
    "split_part(s, ',', 2)",
    "replace(n, 'a', 'bc')",
    "replace(n, '/')",
    "replace(s, '1', '')",
    "length(s) - length(replace(s, 'a', ''))",
    *(
        f"regexp_extract({column}, '{pattern}', {group})"
        for column, pattern, groups in (
            ("n", "(&|^)channel_id=([^&]*)", 2),
            ("n", "http://([a-z.]+)/", 1),
            ("n", "q=([0-9]+)", 1),
            ("s", "^([0-9]{4})-([0-9]{2})", 2),
            ("s", "(a|1)(b|2)?", 1),
            ("s", "[^a-z]+", 0),
            ("s", "a*?b", 0),
            ("s", "( ?)12", 1),
        )
        for group in range(groups + 1)
    ),
    *(
        f"date_format(ts, '{pattern}')"
        for pattern in ("yyyy-MM-dd", "HH:mm", "yyyy-MM-dd HH:mm:ss", "dd.MM.yyyy", "yyyy'T'HH")
    ),
    *(f"{name}(ts)" for name in ("year", "quarter", "month", "day", "hour", "minute", "second")),
    *(f"{name}(dt)" for name in ("year", "month", "dayofmonth")),
    "extract(HOUR FROM ts)",
    "CASE WHEN hour(ts) >= 8 AND hour(ts) <= 18 THEN 'day' ELSE 'night' END",
]
"""What is computed optimistically at least in part."""
SPARKS = [
    "m * d",
    "st.x > 1",
    "d % 2",
    "a <=> b",
    "s LIKE 'a%'",
    "- d",
    "m IN (1)",
    "b % a",
    "b % -1",
    "m / 3",
    "w * w",
    "CAST(m AS DOUBLE)",
    "CAST(s AS INT)",
    "CAST(b AS INT)",
    "regexp_extract(s, '.*', 0)",
    "regexp_extract(s, '(a)*', 1)",
    "regexp_extract(s, '\\\\d+', 0)",
    "regexp_extract(s, 'a$', 0)",
    "date_format(ts, 'EEEE')",
    "date_format(ts, 'yy')",
    "substring(s, -2, 1)",
    "replace(s, '', 'a')",
    "replace(s, n, 'a')",
    "hour(ntz)",
]


def parsed(text: str) -> Expression:
    return parse_expression(text, SCHEMA, where="expression")


def usable(text: str) -> Expression | None:
    """Expressions that are no expressions of ours at all (an INT compared with a text) are left
    out.
    """
    try:
        return parsed(text)
    except Exception:
        return None


def computed(expression: Expression) -> pa.Array:
    rows = ROWS.combine_chunks().to_batches()[0]
    node = pickle.loads(pickle.dumps(compile_to_arrow(expression, SCHEMA)))
    values = node.evaluate(rows)
    return pa.repeat(values, rows.num_rows) if isinstance(values, pa.Scalar) else values


@pytest.mark.spark
def test_python_gives_what_spark_gives(spark: SparkSession) -> None:
    found = [
        each
        for each in map(usable, [*OURS, *CORPUS])
        if each is not None and compile_to_arrow(each, SCHEMA) is not None
    ]
    assert len(found) > 300
    frame = spark.createDataFrame(ROWS, schema=f"{to_spark_ddl(SCHEMA)}, id BIGINT").persist()
    assert (
        frame.count() == ROWS.num_rows
    )  # kept, so that Spark computes it as it does a topic's rows
    wrong = []
    for start in range(0, len(found), 60):
        part = found[start : start + 60]
        made = (
            frame.orderBy("id")
            .selectExpr(*(f"{each.safe} AS c{index}" for index, each in enumerate(part)))
            .toArrow()
        )
        for index, each in enumerate(part):
            ours, sparks = (
                comparable(pa.chunked_array([computed(each)])),
                comparable(made.column(index)),
            )
            wrong += [
                f"{each.text}: row {row}: {one!r}, and Spark {other!r}"
                for row, (one, other) in enumerate(zip(ours, sparks, strict=True))
                if one != other
            ]
            if computed(each).type != each.type:
                wrong.append(f"{each.text}: {computed(each).type}, not {each.type}")
    frame.unpersist()
    assert wrong == []


JSON_TEXTS = [
    '{"n":1}',
    '{"n":-17,"m":2.5}',
    '{ "n" : 3 }',
    '{"n":"5"}',
    '{"n":" 6 "}',
    '{"n":"x"}',
    '{"n":""}',
    '{"n":true}',
    '{"n":null}',
    "{}",
    '{"m":{"n":1}}',
    '{"m":[{"n":1}],"n":2}',
    '{"n":"a\\"b"}',
    '{"n":"\\u00fc\\n"}',
    '{"n":"ü€"}',
    '{"n":1.50}',
    '{"n":1e3}',
    '{"n":1E-7}',
    '{"n":123456789012345678}',
    '{"n":1234567890123456789012}',
    '{"n":3000000000}',
    '{"n":-0}',
    '{"n":-0.0}',
    '{"n":{"a":1.50}}',
    '{"n":[1, 2]}',
    '{"n":1,"n":2}',
    '{"\\u006e":4}',
    "{'n':1}",
    '{"n":1',
    '{"n":1}x',
    "[1]",
    "5",
    "",
    "x",
    None,
    '{"N":1}',
    '{"n":"null"}',
    '{"x\\"n":1}',
    '{"x":"\\"n\\":7"}',
]


@pytest.mark.spark
@pytest.mark.parametrize(
    "text",
    [
        "get_json_object(s, '$.n')",
        *(f"CAST(get_json_object(s, '$.n') AS {kind})" for kind in ("BIGINT", "INT", "DOUBLE")),
    ],
)
def test_a_field_of_json_is_spark_s_or_left_to_it(spark: SparkSession, text: str) -> None:
    schema = pa.schema([("s", pa.string())])
    expression = parse_expression(text, schema, where="test")
    assert compile_to_arrow(expression, schema) is None
    node = compile_to_arrow(expression, schema, optimistic=True)
    assert node is not None
    rows = (
        spark.createDataFrame([(each,) for each in JSON_TEXTS], "s STRING")
        .selectExpr(f"{expression.safe} AS v", f"{expression.failed or 'false'} AS failed")
        .collect()
    )
    sure = 0
    for given, (theirs, failed) in zip(JSON_TEXTS, rows, strict=True):
        try:
            (ours,) = node.evaluate(
                pa.record_batch([pa.array([given, None], pa.string())], schema=schema)
            ).to_pylist()[:1]
        except NeedsSpark:
            continue
        sure += 1
        assert (repr(ours), False) == (repr(theirs), failed), given
    assert sure >= 10


@pytest.mark.parametrize("text", SPARKS)
def test_expressions_that_might_differ_from_spark_are_left_to_spark(text: str) -> None:
    assert compile_to_arrow(parsed(text), SCHEMA, optimistic=True) is None


def answered(node: Node, rows: pa.RecordBatch) -> list[tuple[int, object]]:
    """The rows that are computed without Spark, and their values: all of them at once, or else
    those that can be computed one by one.
    """
    try:
        values = node.evaluate(rows)
    except NeedsSpark:
        if rows.num_rows == 1:
            return []
        return [
            (row, value)
            for row in range(rows.num_rows)
            for _, value in answered(node, rows.slice(row, 1))
        ]
    values = pa.repeat(values, rows.num_rows) if isinstance(values, pa.Scalar) else values
    return list(enumerate(comparable(pa.chunked_array([values]))))


@pytest.mark.spark
def test_what_is_computed_optimistically_is_spark_s_or_left_to_it(spark: SparkSession) -> None:
    corpus = random.Random(3).sample(CORPUS, examples(len(CORPUS)))
    found = []
    for text in [*OPTIMISTIC, *corpus]:
        expression = usable(text)
        if expression is not None and expression.column is None:
            node = compile_to_arrow(expression, SCHEMA, optimistic=True)
            if node is not None:
                found.append((expression, node))
    left_out = {*OPTIMISTIC} - {each.text for each, _ in found}
    assert len(left_out) < 12, left_out
    rows = ROWS.combine_chunks().to_batches()[0]
    frame = spark.createDataFrame(ROWS, schema=f"{to_spark_ddl(SCHEMA)}, id BIGINT").persist()
    assert frame.count() == ROWS.num_rows
    wrong, computed_rows = [], 0
    for start in range(0, len(found), 60):
        part = found[start : start + 60]
        columns = [
            text
            for index, (each, _) in enumerate(part)
            for text in (f"{each.safe} AS c{index}", f"{each.failed or 'false'} AS failed{index}")
        ]
        made = frame.orderBy("id").selectExpr(*columns).toArrow()
        for index, (each, node) in enumerate(part):
            theirs = comparable(made.column(f"c{index}"))
            failed = made.column(f"failed{index}").to_pylist()
            for row, ours in answered(pickle.loads(pickle.dumps(node)), rows):
                computed_rows += 1
                if (ours, False) != (theirs[row], failed[row]):
                    wrong.append(f"{each.text}: row {row}: {ours!r}, Spark {theirs[row]!r}")
    frame.unpersist()
    assert wrong == []
    assert computed_rows > 40 * len(found)


def placed(rows: pa.RecordBatch) -> pa.RecordBatch:
    order = [pa.array(range(rows.num_rows), field.type) for field in ORDER_FIELDS]
    return pa.RecordBatch.from_arrays(
        [*rows.columns, *order], schema=pa.schema([*rows.schema, *ORDER_FIELDS])
    )


def test_steps_keep_the_order_of_rows() -> None:
    rows = placed(pa.RecordBatch.from_pydict({"x": [1.0, None, 3.0], "name": ["a", "b", "c"]}))
    schema = pa.schema([("twice", pa.float64()), ("one", pa.int32())])
    double = compile_to_arrow(parse_expression("x * 2.0", rows.schema, where="test"), rows.schema)
    assert double is not None
    made = Projection((("twice", double), ("one", Constant(1, pa.int32()))), schema)(rows)
    assert made.select(["twice", "one", "_offset"]).to_pylist() == [
        {"twice": 2.0, "one": 1, "_offset": 0},
        {"twice": None, "one": 1, "_offset": 1},
        {"twice": 6.0, "one": 1, "_offset": 2},
    ]
    condition = compile_to_arrow(parse_expression("x > 1", rows.schema, where="test"), rows.schema)
    assert condition is not None
    assert Filter(condition)(rows).column("name").to_pylist() == ["c"]
    assert Filter(Constant(False, pa.bool_()))(rows).num_rows == 0
