"""What `expressions` says without Spark, held against Spark itself on rows where everything goes
wrong.

Each line of expressions.txt is an expression. Spark must give it the type that was derived; its
safe form must never fail; on rows where `failed` is false the expression itself, as it was written,
must not fail and must give what the safe form gives; where `failed` is true it must fail.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_type

from headrace.expressions.expression import Expression
from headrace.types.schema import to_spark_ddl
from tests.expressions.edge_case_rows import SCHEMA, comparable, edge_case_rows, has_nulls
from tests.expressions.spark_oracle import parsed, wrong_types, wrong_values

pytestmark = pytest.mark.spark

CASES = [
    line
    for line in Path(__file__).with_name("expressions.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
AT_ONCE = 25
QUICK = 6
ROWS = edge_case_rows()
# We count these as failures, and Spark does not: text that is no UTF-8, NaN as a decimal, times at
# the very ends of what Spark holds.
OURS = ("bin as STRING", "as DECIMAL", "date_trunc", "months_between", "utc_timestamp")


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> Iterator[DataFrame]:
    """Kept in memory, so that Spark generates code for them, as it does for a topic's rows, and
    does not fold them away.
    """
    frame = spark.createDataFrame(ROWS, schema=f"{to_spark_ddl(SCHEMA)}, id BIGINT").persist()
    assert frame.count() == ROWS.num_rows
    yield frame
    frame.unpersist()


def batches(cases: list[str]) -> list[Any]:
    """All cases, well mixed; a few batches in every run, the others in the full one."""
    mixed = random.Random(5).sample(cases, len(cases))
    found = [mixed[start : start + AT_ONCE] for start in range(0, len(mixed), AT_ONCE)]
    return [
        pytest.param(batch, id=f"batch {index}", marks=[pytest.mark.slow] if index >= QUICK else [])
        for index, batch in enumerate(found)
    ]


@pytest.mark.parametrize("cases", batches(CASES))
def test_spark_agrees(rows: DataFrame, cases: list[str]) -> None:
    expressions = [parsed(text) for text in cases]
    assert wrong_types(rows, expressions) == []
    assert wrong_values(rows, expressions) == []


def failing_rows(rows: DataFrame, expressions: list[Expression]) -> list[tuple[Expression, int]]:
    """For each expression a row that is said to fail, with nothing null in it: Spark does not look
    at the value stored under a null.
    """
    can_fail = [
        each
        for each in expressions
        if each.failed is not None and not any(word in each.text for word in OURS)
    ]
    made = (
        rows.orderBy("id")
        .selectExpr(*(f"{each.failed} AS failed{index}" for index, each in enumerate(can_fail)))
        .toArrow()
    )
    found = []
    for index, each in enumerate(can_fail):
        fails = [
            row
            for row, failure in enumerate(made.column(f"failed{index}").to_pylist())
            if failure and not has_nulls(ROWS, each.columns, row)
        ]
        found += [(each, row) for row in fails[:1]]
    return found


def false_alarms(rows: DataFrame, cases: list[tuple[Expression, int]]) -> list[str]:
    alarms = []
    for expression, row in cases:
        try:
            got = rows.where(f"id = {row}").selectExpr(f"{expression.sql} AS x").toArrow()
        except Exception:
            continue
        alarms.append(
            f"{expression.text}: row {row} is said to fail, and gives {comparable(got.column(0))}"
        )
    return alarms


def test_rows_predicted_to_fail_fail_on_spark(rows: DataFrame) -> None:
    found = failing_rows(rows, [parsed(text) for text in random.Random(7).sample(CASES, 40)])
    assert len(found) >= 5
    assert false_alarms(rows, found[:8]) == []


@pytest.mark.slow
def test_everything_that_is_said_to_fail_fails(rows: DataFrame) -> None:
    for start in range(0, len(CASES), AT_ONCE):
        assert (
            false_alarms(
                rows, failing_rows(rows, [parsed(text) for text in CASES[start : start + AT_ONCE]])
            )
            == []
        )


def test_guards_hold(rows: DataFrame) -> None:
    """A division behind a guard never fails, whichever way the guard is written."""
    guarded = [
        "CASE WHEN b <> 0 THEN a / b END",
        "CASE WHEN b = 0 THEN 0 WHEN b IS NULL THEN 1 ELSE a / b END",
        "if(b = 0, NULL, a / b)",
        "b <> 0 AND a / b > 1",
        "b = 0 OR a / b > 1",
        "coalesce(if(b = 0, 0D, NULL), a / b)",
        "nvl2(nullif(b, 0), a / b, 0D)",
    ]
    counts = (
        rows.selectExpr(
            *(f"count_if({parsed(text).failed}) AS c{index}" for index, text in enumerate(guarded))
        )
        .toArrow()
        .to_pylist()[0]
    )
    assert set(counts.values()) == {0}
    assert rows.selectExpr(f"count_if({parsed('a / b').failed})").toArrow().to_pylist()[0] != {}


def nested(shuffled: random.Random, kind: str, depth: int) -> str:
    """A random expression of a kind: a number, a text or a truth value."""
    leaves = {
        "number": ["a", "b", "t", "h", "3", "-1", "0", "m"],
        "text": ["s", "n", "'12'", "st.y"],
        "truth": ["flag", "a IS NULL", "b > 0"],
    }
    if depth == 0:
        return shuffled.choice(leaves[kind])

    def part(other: str) -> str:
        return nested(shuffled, other, depth - 1)

    made = {
        "number": lambda: [
            f"({part('number')} {shuffled.choice('+-*%')} {part('number')})",
            f"({part('number')} / {part('number')})",
            f"CASE WHEN {part('truth')} THEN {part('number')} ELSE {part('number')} END",
            f"coalesce({part('number')}, {part('number')})",
            f"CAST({part('text')} AS INT)",
            f"length({part('text')})",
            f"abs({part('number')})",
        ],
        "text": lambda: [
            f"CAST({part('number')} AS STRING)",
            f"({part('text')} || {part('text')})",
            f"if({part('truth')}, {part('text')}, {part('text')})",
        ],
        "truth": lambda: [
            f"({part('truth')} AND {part('truth')})",
            f"({part('truth')} OR {part('truth')})",
            f"(NOT {part('truth')})",
            f"({part('number')} < {part('number')})",
            f"({part('text')} = {part('text')})",
        ],
    }
    return shuffled.choice(made[kind]())


def random_expressions(seed: int, count: int) -> list[Expression]:
    from headrace.errors import HeadraceError

    shuffled = random.Random(seed)
    found: list[Expression] = []
    while len(found) < count:
        try:
            found.append(
                parsed(
                    nested(
                        shuffled,
                        shuffled.choice(["number", "truth", "text"]),
                        shuffled.randint(2, 3),
                    )
                )
            )
        except HeadraceError:  # decimals with more than 38 digits
            continue
    return found


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]
)
def test_spark_agrees_on_nested_expressions(rows: DataFrame, seed: int) -> None:
    expressions = random_expressions(seed, 20)
    assert wrong_types(rows, expressions) == []
    assert wrong_values(rows, expressions) == []


FORMATS = [
    "yyyy-MM-dd HH:mm:ss.SSSSSS",
    "yy/M/d H:m:s",
    "dd MMM yyyy hh:mm a",
    "MMMM d, yyyy",
    "yyyyMMdd'T'HHmmssX",
    "yyyy-MM-dd'x'",
    "HH:mm:ss.SSS xxx",
    "yyyy-MM-dd XX",
]
WRITE_FORMATS = ["EEEE, d MMMM y", "E D", "QQ yyyy", "Q", "ss.SSSSSSSSS", "yyy", "DDD"]
PATTERNS = [
    r"^\d{2,3}$",
    "[^a-z]+",
    "(a|b)*c?",
    r"(?<year>\d+)-(?<rest>.*)",
    "(?i)ABC",
    r"\bx\b",
    "a{2}",
    r"[\w.-]+@[\w.-]+",
    "(?:x)+?",
    r"\x41|\t",
    "(?=a)a",
    r"(a)\1",
]


def quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def test_formats_and_patterns_that_are_let_through_are_known_to_spark(rows: DataFrame) -> None:
    texts = [f"try_to_timestamp(s, {quoted(each)})" for each in FORMATS] + [
        f"date_format(TIMESTAMP '2026-01-31 12:00:00', {quoted(each)})"
        for each in [*FORMATS, *WRITE_FORMATS]
    ]
    texts += [f"s RLIKE {quoted(each)}" for each in PATTERNS] + [
        f"regexp_replace(s, {quoted(each)}, 'x')" for each in PATTERNS
    ]
    made = rows.selectExpr(
        *(f"{parsed(text).safe} AS c{index}" for index, text in enumerate(texts))
    ).toArrow()
    assert made.num_columns == len(texts)
    assert made.column(f"c{len(FORMATS)}")[0].as_py() == "2026-01-31 12:00:00.000000"


def test_literals_mean_what_was_written(rows: DataFrame) -> None:
    texts = [
        "",
        "plain",
        "it's",
        'say "hi"',
        "back\\slash",
        "tab\tnew\nline",
        "ünï😀",
        "{0}",
        "%_",
        "`x`",
        "\\n is two",
        "$1",
    ]
    made: dict[str, Any] = (
        rows.limit(1)
        .selectExpr(
            *(f"{parsed(quoted(text)).safe} AS c{index}" for index, text in enumerate(texts))
        )
        .toArrow()
        .to_pylist()[0]
    )
    assert list(made.values()) == texts


def test_result_types_of_aggregates_are_sparks(rows: DataFrame) -> None:
    from headrace.operators.aggregates import functions as agg
    from headrace.operators.aggregates.specs import result_type

    columns = ["a", "b", "t", "d", "f", "m", "w", "iv"]
    for spec, name in (
        (agg.sum, "sum"),
        (agg.avg, "avg"),
        (agg.min, "min"),
        (agg.stddev, "stddev"),
        (agg.count, "count"),
        (agg.collect, "collect_list"),
    ):
        chosen = [column for column in columns if not (column == "iv" and name == "stddev")]
        found = list(
            rows.selectExpr(*(f"{name}({column}) AS {column}" for column in chosen)).schema
        )
        for field in found:
            ours = from_arrow_type(
                result_type(spec(field.name), SCHEMA.field(field.name).type),
                prefer_timestamp_ntz=True,
            )
            assert ours.simpleString() == field.dataType.simpleString(), f"{name}({field.name})"
    assert pa.types.is_decimal(result_type(agg.avg("m"), SCHEMA.field("m").type))
