"""What the evaluator computes for conditions and measures of patterns, with the rows that fail; and
the text of conditions, which is in stored fingerprints.
"""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from headrace.errors import BadExpression, UnknownColumn
from headrace.expressions.expression import parse_expression
from headrace.expressions.parser import parse_sql, to_sql
from headrace.operators.patterns.condition_parser import PatternNames, compile_measure

NAN = math.nan
ROWS = pa.table(
    {
        "a": pa.array([1, 2, None], pa.int32()),
        "b": pa.array([2**63 - 1, 0, 3]),
        "d": pa.array([NAN, 1.5, 0.0]),
        "s": pa.array(["12", " no ", "Abc"]),
        "at": pa.array([0, 1_500_000, None], pa.timestamp("us", "UTC")),
    }
)

COMPUTED: list[tuple[str, pa.DataType, list[Any], list[int]]] = [
    # an expression, its type, its values, and the rows on which it fails
    ("a + 1", pa.int64(), [2, 3, None], []),
    ("a + 1.5", pa.float64(), [2.5, 3.5, None], []),
    ("b + 1", pa.int64(), [None, 1, 4], [0]),
    ("-b - 2", pa.int64(), [None, -2, -5], [0]),
    ("a / b", pa.float64(), [1 / (2**63 - 1), None, None], [1]),
    ("a % b", pa.int64(), [1, None, None], [1]),
    ("d = d", pa.bool_(), [True, True, True], []),
    ("d > 1e300", pa.bool_(), [True, False, False], []),
    ("1 < d AND a = 1", pa.bool_(), [True, False, False], []),
    ("a > 1 OR d = 0", pa.bool_(), [False, True, True], []),
    ("a IN (1, 7)", pa.bool_(), [True, False, None], []),
    ("a NOT BETWEEN 2 AND 3", pa.bool_(), [True, False, None], []),
    ("a IS NULL", pa.bool_(), [False, False, True], []),
    ("(a > 1) IS FALSE", pa.bool_(), [True, False, False], []),
    ("s LIKE '%b_'", pa.bool_(), [False, False, True], []),
    ("lower(s)", pa.string(), ["12", " no ", "abc"], []),
    ("length(s)", pa.int32(), [2, 4, 3], []),
    ("coalesce(a, b)", pa.int64(), [1, 2, 3], []),
    ("greatest(a, b)", pa.int64(), [2**63 - 1, 2, 3], []),
    ("CASE WHEN a = 1 THEN b WHEN a = 2 THEN 5 END", pa.int64(), [2**63 - 1, 5, None], []),
    ("CASE a WHEN 1 THEN 'one' ELSE s END", pa.string(), ["one", " no ", "Abc"], []),
    ("CAST(s AS INT)", pa.int32(), [12, None, None], [1, 2]),
    ("CAST(s AS BOOLEAN)", pa.bool_(), [None, False, None], [0, 2]),
    ("CAST(b AS INT)", pa.int32(), [None, 0, 3], [0]),
    ("CAST(at AS BIGINT)", pa.int64(), [0, 1, None], []),
    ("floor(d)", pa.int64(), [None, 1, 0], [0]),
    ("at + INTERVAL '2' SECONDS > at", pa.bool_(), [True, True, None], []),
    ("1 / 0", pa.float64(), [None, None, None], [0, 1, 2]),
]


@pytest.mark.parametrize(("text", "kind", "values", "failed"), COMPUTED, ids=str)
def test_computed_values(
    text: str, kind: pa.DataType, values: list[Any], failed: list[int]
) -> None:
    measure = compile_measure(text, PatternNames(ROWS.schema, ()), where="test")
    columns = [ROWS[term.column].combine_chunks() for term in measure.terms]
    computed, failures = measure.evaluate(columns, ROWS.num_rows)
    assert (measure.type, computed.type) == (kind, kind)
    assert computed.to_pylist() == values
    assert failures.nonzero()[0].tolist() == failed


REFUSED = [
    ("foo(a)", "no function foo"),
    ("abs(a, b)", "takes 1 argument"),
    ("a IN (SELECT 1)", "list of values"),
    ("s LIKE s", "a text in quotes"),
    ("a ^ b", "is not among what can be computed"),
    ("CAST(a AS DATE)", "cast to DATE"),
    ("a + s", "cannot compute"),
    ("a IS s", "is not IS NULL"),
    (" + ".join(["a"] * 120), "nested more than 100 deep"),
]


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_what_cannot_be_computed_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadExpression, match=said):
        compile_measure(text, PatternNames(ROWS.schema, ()), where="test")


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("substr(s, 1,2) = 'a'", "SUBSTR(s, 1, 2) = 'a'"),
        ("substring(s, 1,2) = 'a'", "SUBSTRING(s, 1, 2) = 'a'"),
        ("position('x' IN s) > 0", "POSITION('x' IN s) > 0"),
        ("position('x', s) > 0", "POSITION('x', s) > 0"),
        ("upper(s) = 'A' and a != 1", "UPPER(s) = 'A' AND a <> 1"),
        ("current_date > day", "current_date > day"),
    ],
)
def test_the_text_of_a_condition_in_fingerprints(text: str, rendered: str) -> None:
    assert to_sql(parse_sql(text, where="test")) == rendered


def test_a_column_may_be_named_as_a_function_without_parentheses() -> None:
    schema = pa.schema([("current_date", pa.date32())])
    assert parse_expression("current_date IS NULL", schema, where="t").columns == ("current_date",)
    with pytest.raises(BadExpression, match="current_date, which is not deterministic"):
        parse_expression("current_date IS NULL", ROWS.schema, where="t")
    with pytest.raises(UnknownColumn):
        parse_expression("current_day IS NULL", ROWS.schema, where="t")
