"""Functions of texts and times that are computed in Arrow, over values that are known to be hard,
against Spark: row by row the same value, or left to Spark.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from headrace.columnar.json_fields import NeedsSpark
from headrace.expressions.expression import Expression, parse_expression
from headrace.expressions.spark_subset import compile_to_arrow
from headrace.types.schema import parse_schema, to_spark_ddl
from tests.expressions.edge_case_rows import comparable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
SCHEMA = parse_schema("s STRING, ts TIMESTAMP, other TIMESTAMP, ntz TIMESTAMP_NTZ, dt DATE")
_DAY = 86_400_000_000
TEXTS = [
    None, "", ",", ",,", "a,,b", "a,b,", ",a", "aXbXXc", "a.b.c", "a|b|c", "a\nb", "a\r\nb",
    "a\u2028b", "\x00,\x00", "id=17&x=9", "?id=&id=9", "id=", "ü,ö", "ÀÉ", "😀,😀x", "e\u0301,x",
    "İI", "ſs", "ß", "ab" * 200, "((", ".*+?", "\\", "\\d", "[a]", "-5", "abab", "abcabc", "aaa",
    "2026-13-45", " lead", "trail ", "\t", "A,B", "a b c", "$1", "a,b\n,c",
]  # fmt: skip
MICROS = [
    None, 0, 1, -1, 999_999, -999_999, 1_000_000, -1_000_001, _DAY - 1, _DAY, -_DAY, -_DAY - 1,
    951_782_400_000_000,  # 2000-02-29
    -2_203_891_200_000_000,  # 1900-03-01
    -12_219_292_800_000_000,  # 1582-10-15
    -12_219_292_800_000_001,
    -30_610_224_000_000_000,  # 1000-01-01
    -30_610_224_000_000_001,
    -62_135_596_800_000_000,  # 0001-01-01
    -62_135_596_800_000_001,
    253_402_300_799_999_999,  # the end of 9999
    253_402_300_800_000_000,
    1_774_746_000_000_000,  # a change of clocks in Europe
    2**62, -(2**62), 2**63 - 1, 1 - 2**63,
]  # fmt: skip
DAYS = [None, 0, -1, 1, 11_016, -25_509, -141_427, -141_428, -719_162, -719_163, 2_932_896]
DELIMITERS = (",", ",,", "X", ".", "|", "ab", "ü", "😀", "\\\\", "[a]")
PATTERNS = (
    "id=([0-9]*)", "([a-z]+),([a-z]*)", "^a", "^(a|ab)(c|b|x)?", "[^,]+", "a{2,3}", "a{2}?", "ab*?",
    "(a|ab)(c|bcd)?", "([^,]*),", "[a-c]+,?", "(x)?a", "^$|a", "a|", "(|a)b", "[üö]", "[^a]",
    "\\\\.", "\\\\(\\\\(", "([A-Z]),([A-Z])", " +", "[ ]",
)  # fmt: skip
FORMATS = (
    "yyyy-MM-dd", "yyyy", "MM", "dd/MM/yyyy", "HH:mm:ss", "yyyy-MM-dd HH", "mm", "ss.",
    "yyyyMMddHHmmss", "yyyy-MM-dd'T'HH:mm:ss", "'day' dd", "HH, mm", "ddMM",
)  # fmt: skip
COMPARED = ("ts", "other", "dt", "ntz", "timestamp '1582-10-15 00:00:00'", "date '1900-03-01'")


def quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"


def texts() -> Iterator[str]:
    for delimiter in DELIMITERS:
        for part in (1, 2, 3, -1, -2, 100, -100):
            yield f"split_part(s, {quoted(delimiter)}, {part})"
    for pattern in PATTERNS:
        groups = pattern.count("(") - 2 * pattern.count("\\\\(")
        for group in range(groups + 2 * pattern.count("\\\\(") // 2 + 1):
            yield f"regexp_extract(s, {quoted(pattern)}, {group})"
    for start, length in ((1, 0), (1, 1), (2, 3), (5, 100), (400, 5)):
        yield f"substring(s, {start}, {length})"
    yield from ("length(s)", "upper(s)", "lower(s)", "substring(s, 3)", "concat(s, '-', s)")
    yield from (f"{name}(s, 'a')" for name in ("startswith", "endswith", "contains"))
    yield from ("contains(s, '')", "startswith(s, 'ü')", "s < 'a'", "s >= 'ü'", "s = ''")
    yield "CASE WHEN s = '' THEN 'none' WHEN contains(s, ',') THEN split_part(s, ',', 2) END"


def times() -> Iterator[str]:
    for column in ("ts", "dt"):
        yield from (f"date_format({column}, {quoted(text)})" for text in FORMATS)
        fields = ("year", "quarter", "month", "day", "hour", "minute", "second", "to_date")
        yield from (f"{name}({column})" for name in fields)
    for left in COMPARED[:4]:
        for right in COMPARED:
            for sign in ("=", "<", ">=", "<>", "<=>"):
                yield f"{left} {sign} {right}"
    yield from ("ts BETWEEN other AND '9999-12-31'", "dt IN ('1970-01-01', '2000-02-29')")
    yield from ("coalesce(ts, other)", "greatest(ts, other)", "least(ts, other)")
    yield "CASE WHEN ts < other THEN year(ts) ELSE year(other) END"


def table(columns: dict[str, list[Any]]) -> pa.Table:
    count = max(len(values) for values in columns.values())
    arrays = []
    for field in SCHEMA:
        values = columns.get(field.name, [None])
        values = (values * (count // len(values) + 1))[:count]
        plain = {"ts": pa.int64(), "other": pa.int64(), "ntz": pa.int64(), "dt": pa.int32()}
        arrays.append(pa.array(values, plain.get(field.name, field.type)).cast(field.type))
    return pa.table(arrays, schema=SCHEMA).append_column("id", pa.array(range(count)))


def parsed(text: str) -> Expression | None:
    try:
        return parse_expression(text, SCHEMA, where="test")
    except Exception:
        return None


def check(spark: SparkSession, rows: pa.Table, expressions: Iterator[str], at_least: int) -> None:
    """Each value that is computed in Arrow must be Spark's."""
    found = []
    for expression in filter(None, map(parsed, expressions)):
        node = compile_to_arrow(expression, SCHEMA, optimistic=True)
        if node is not None:
            found.append((expression, pickle.loads(pickle.dumps(node))))
    assert len(found) >= at_least
    frame = spark.createDataFrame(rows, schema=f"{to_spark_ddl(SCHEMA)}, id BIGINT").persist()
    assert frame.count() == rows.num_rows
    (batch,) = rows.combine_chunks().to_batches()
    wrong, left_to_spark = [], 0
    for start in range(0, len(found), 60):
        part = found[start : start + 60]
        columns = [f"{each.safe} AS c{number}" for number, (each, _) in enumerate(part)]
        theirs = frame.orderBy("id").selectExpr(*columns).toArrow()
        for number, (each, node) in enumerate(part):
            expected = comparable(theirs.column(number))
            for row in range(batch.num_rows):
                try:
                    value = node.evaluate(batch.slice(row, 1))
                except NeedsSpark:
                    left_to_spark += 1
                    continue
                array = pa.array([value.as_py()], value.type) if is_scalar(value) else value
                (ours,) = comparable(pa.chunked_array([array]))
                if ours != expected[row]:
                    given = batch.slice(row, 1).to_pydict() if "s" in each.columns else row
                    wrong.append(f"{each.text} of {given}: {ours!r}, Spark {expected[row]!r}")
    frame.unpersist()
    assert wrong == []
    assert left_to_spark < batch.num_rows * len(found) // 3


def is_scalar(value: Any) -> bool:
    return isinstance(value, pa.Scalar)


def test_texts_are_sparks(spark: SparkSession) -> None:
    check(spark, table({"s": TEXTS}), texts(), at_least=100)


def test_times_are_sparks(spark: SparkSession) -> None:
    columns: dict[str, list[Any]] = {
        "ts": MICROS,
        "other": MICROS[7:] + MICROS[:7],
        "ntz": MICROS[3:] + MICROS[:3],
        "dt": DAYS,
    }
    check(spark, table(columns), times(), at_least=40)
