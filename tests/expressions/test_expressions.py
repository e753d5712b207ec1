"""Expressions, read without Spark: what is let through, what its type is, what could fail, and what
is refused and why.
"""

import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BadExpression, HeadraceError, UnknownColumn
from headrace.expressions import refusals
from headrace.expressions.expression import (
    Expression,
    failed,
    parse_expression,
    parse_named_expression,
    safe,
)
from headrace.expressions.functions import SPECIAL_NAMES
from headrace.expressions.refusals import NOT_DETERMINISTIC, refusal, suggestion
from headrace.expressions.signatures import function_kinds, signatures
from headrace.types.schema import parse_schema, type_name

SCHEMA = parse_schema(
    "a INT, b BIGINT, t TINYINT, d DOUBLE, f FLOAT, m DECIMAL(10,2), w DECIMAL(38,10), s STRING, at"
    " TIMESTAMP, wall TIMESTAMP_NTZ, day DATE, xs ARRAY<INT>, tags MAP<STRING, INT>, address"
    " STRUCT<city: STRING, `zip code`: INT>, flag BOOLEAN, bin BINARY, span INTERVAL DAY TO SECOND,"
    " `odd name` INT"
)


def of(text: str) -> Expression:
    return parse_expression(text, SCHEMA, where="orders.select")


TYPES = [
    ("a + 1", "INT"),
    ("a + b", "BIGINT"),
    ("t + a", "INT"),
    ("a / b", "DOUBLE"),
    ("m * a", "DECIMAL(21,2)"),
    ("m * 2", "DECIMAL(12,2)"),
    ("m / 3", "DECIMAL(14,6)"),
    ("w * w", "DECIMAL(38,6)"),
    ("f + a", "DOUBLE"),
    ("a DIV b", "BIGINT"),
    ("a > 1 AND s LIKE 'x%'", "BOOLEAN"),
    ("CAST(s AS DECIMAL(5,1))", "DECIMAL(5,1)"),
    ("a::string", "STRING"),
    ("1.50", "DECIMAL(3,2)"),
    ("2147483648", "BIGINT"),
    ("-2147483648", "INT"),
    ("1e3", "DOUBLE"),
    ("'x'", "STRING"),
    ("DATE '2026-01-31'", "DATE"),
    ("at - INTERVAL '1' HOUR", "TIMESTAMP"),
    ("at - at", "INTERVAL DAY TO SECOND"),
    ("day + 1", "DATE"),
    ("day + INTERVAL 1 DAY", "DATE"),
    ("day + INTERVAL 1 HOUR", "TIMESTAMP"),
    ("coalesce(a, m)", "DECIMAL(12,2)"),
    ("CASE WHEN flag THEN a ELSE d END", "DOUBLE"),
    ("if(flag, 1, NULL)", "INT"),
    ("xs[0]", "INT"),
    ("tags['x']", "INT"),
    ("address.city", "STRING"),
    ("address.`zip code`", "INT"),
    ("`odd name` * 2", "INT"),
    ("struct(a, s AS t)", "STRUCT<a: INT, t: STRING>"),
    ("array(a, b)", "ARRAY<BIGINT>"),
    ("from_json(s, 'x INT, y ARRAY<STRING>')", "STRUCT<x: INT, y: ARRAY<STRING>>"),
    ("date_trunc('hour', at)", "TIMESTAMP"),
    ("round(m, 1)", "DECIMAL(10,1)"),
    ("A + `B`", "BIGINT"),
]


@pytest.mark.parametrize(("text", "kind"), TYPES, ids=[text for text, _ in TYPES])
def test_types_are_known_without_spark(text: str, kind: str) -> None:
    found = of(text).type
    assert found is not None
    assert type_name(found) == kind


def test_an_expression_knows_what_it_reads() -> None:
    assert of("b + a * length(s) + B").columns == ("b", "a", "s")
    assert of("address.city").columns == ("address",)
    assert of("1 + 1").columns == ()
    assert (of("A").column, of("(a)").column, of("a + 1").column, of("address.city").column) == (
        "a",
        "a",
        None,
        None,
    )


def test_a_bare_null_has_no_type() -> None:
    assert of("NULL").type is None
    assert of("INTERVAL 2 MONTHS").type is None, "a step on the way, and no column"


def test_names_behind_as() -> None:
    def named(text: str) -> tuple[str | None, str]:
        name, expression = parse_named_expression(text, SCHEMA, where="x")
        return name, expression.text

    assert named("a + 1 AS total") == ("total", "a + 1")
    assert named("a + 1   `the total`") == ("the total", "a + 1")
    assert named("CAST(a AS STRING) as text") == ("text", "CAST(a AS STRING)")
    assert named("'x as y' AS z") == ("z", "'x as y'")
    assert named("A") == ("a", "A")
    assert named("a + 1") == (None, "a + 1")


def test_the_safe_form_tries_and_the_failure_is_told_apart_from_null() -> None:
    assert safe("a / b", SCHEMA) == "try_divide(`a`, `b`)"
    assert (
        failed("a / b", SCHEMA)
        == "(`a` IS NOT NULL AND `b` IS NOT NULL AND try_divide(`a`, `b`) IS NULL)"
    )
    assert of("a / b").sql == "(`a` / `b`)"
    assert safe("CAST(s AS INT)", SCHEMA) == "try_cast(`s` AS INT)"


CANNOT_FAIL = [
    "a",
    "d * f + 1",
    "d / 100",
    "a / 2",
    "a % 7",
    "a DIV 2",
    "a > b",
    "upper(s)",
    "CAST(a AS STRING)",
    "CAST(t AS INT)",
    "CAST(m AS DECIMAL(12,2))",
    "try_divide(a, b)",
    "TRY_CAST(s AS INT)",
    "coalesce(a, 0)",
    "CASE WHEN flag THEN a END",
    "tags['x']",
    "get(xs, 5)",
    "year(day)",
    "s || 'x'",
    "a IN (1, 2)",
    "at > '2026-01-31'",
    "ln(d)",
]


@pytest.mark.parametrize("text", CANNOT_FAIL)
def test_expressions_that_cannot_fail_have_no_guard(text: str) -> None:
    expression = of(text)
    assert expression.failed is None
    assert expression.safe == expression.sql


CAN_FAIL = [
    "a + 1",
    "d / f",
    "d / 0",
    "m / 2",
    "b DIV -1",
    "a % b",
    "-a",
    "abs(b)",
    "CAST(s AS INT)",
    "CAST(d AS INT)",
    "CAST(b AS INT)",
    "CAST(day AS TIMESTAMP)",
    "xs[0]",
    "element_at(xs, 1)",
    "to_date(s)",
    "at + span",
    "floor(d)",
    "make_date(a, 1, 1)",
    "CAST(bin AS STRING)",
    "a DIV b",
    "pmod(a, b)",
    "CASE WHEN flag THEN a + 1 END",
    "flag AND a / b > 1",
    "coalesce(a + 1, 0)",
    "upper(CAST(a + 1 AS STRING))",
    "round(a, -2)",
    "add_months(day, a)",
    "url_decode(s)",
]


@pytest.mark.parametrize("text", CAN_FAIL)
def test_expressions_that_can_fail_have_a_failure_condition(text: str) -> None:
    expression = of(text)
    assert expression.failed is not None
    assert expression.safe != expression.sql


def test_a_failure_counts_only_in_the_branch_that_is_taken() -> None:
    assert (
        failed("CASE WHEN b <> 0 THEN a / b ELSE 0 END", SCHEMA)
        == f"(CASE WHEN (`b` <> 0) THEN {failed('a / b', SCHEMA)} ELSE false END)"
    )
    assert (
        failed("b <> 0 AND a / b > 1", SCHEMA)
        == f"(CASE WHEN coalesce((`b` <> 0), true) THEN {failed('a / b', SCHEMA)} ELSE false END)"
    )
    assert (
        failed("b = 0 OR a / b > 1", SCHEMA)
        == f"(CASE WHEN coalesce((`b` = 0), false) THEN false ELSE {failed('a / b', SCHEMA)} END)"
    )
    assert (
        failed("coalesce(d, a / b)", SCHEMA)
        == f"(CASE WHEN `d` IS NULL THEN {failed('a / b', SCHEMA)} ELSE false END)"
    )
    assert failed("if(a / b > 1, 1, 2)", SCHEMA) == failed("a / b", SCHEMA)


REFUSED = [
    # what is not one row's business
    ("(SELECT 1)", "A subquery is not allowed"),
    ("a IN (SELECT 1)", "IN takes a list of values, not a query"),
    ("EXISTS(SELECT 1)", "A subquery is not allowed"),
    ("sum(a) OVER (PARTITION BY b)", "A window function is not allowed"),
    ("*", "\\* is not allowed"),
    ("a.*", "no column 'a'|has no member|not allowed"),
    ("upper(x -> x)", "upper takes no lambda"),
    ("filter(xs, 1)", "filter takes a lambda, not '1'.*filter\\(items, x -> x > 0\\)"),
    ("filter(xs, x -> x + 1)", "lambda of filter gives INT, not BOOLEAN"),
    ("transform(s, x -> x)", "transform takes an array, not STRING"),
    ("transform(xs, (x, i, j) -> x)", "has the parameters \\(x, i, j\\)"),
    ("transform(xs, x -> y)", "no column 'y'"),
    ("transform(xs, x -> x) || x", "no column 'x'"),
    ("aggregate(xs, 0, (sum, x) -> sum + b)", "makes BIGINT of INT.*CAST\\(0 AS BIGINT\\)"),
    ("map_filter(xs, (k, v) -> true)", "map_filter takes a map, not ARRAY<INT>"),
    ("a AS b", "A name \\(AS\\) is not allowed"),
    ("current_date", "current_date, which is not deterministic"),
    ("CURRENT_TIMESTAMP", "current_timestamp, which is not deterministic"),
    # syntax
    ("a +", "cannot be read at line 1, position 3, near '\\+':\n    a \\+\n      \\^"),
    ("a b c", "cannot be read at line 1, position 5"),
    ("a;b", "more than one expression"),
    ("'abc", "cannot be read"),
    ("", "empty expression"),
    ("a -- rest", None),
    ("(a", "cannot be read"),
    ("'a' 'b'", "Two texts side by side is not allowed"),
    ("array(a, b)[0]", "A bracket behind array.*get\\(array"),
    ("schema.fn(a)", "is no column|call functions by their plain name"),
    # functions
    ("uper(s)", "no function 'uper' for expressions: did you mean 'upper'"),
    ("upper(a)", "upper\\(INT\\) does not fit.*it takes upper\\(STRING\\)"),
    ("substring(s)", "substring\\(STRING\\) does not fit"),
    ("coalesce()", "given 0 arguments"),
    ("input_file_name()", "not deterministic"),
    # literals that would fail on every row
    ("s RLIKE '('", "The pattern '\\(' cannot be read"),
    ("s RLIKE '(?P<x>a)'", "which Spark does not take"),
    ("s RLIKE s", "a pattern that is written out"),
    ("regexp_extract(s, '(a)', 2)", "has 1 groups, and regexp_extract asks for 2"),
    ("regexp_replace(s, 'a', '$1')", "but the pattern has 0 groups"),
    ("s LIKE 'a\\\\b'", "backslash before a plain character"),
    ("to_date(s, 'YYYY-MM-dd')", "format 'YYYY-MM-dd' has 'YYYY'"),
    ("date_format(at, 'yyyy-bb')", "has 'bb'"),
    ("to_timestamp(s, 'EEEE')", "has 'EEEE'"),
    ("date_trunc('hours', at)", "'hours' is no unit"),
    ("date_trunc(s, at)", "must be written out"),
    ("from_utc_timestamp(at, 'Mars')", "no time zone"),
    ("lpad(s, 1000000)", "no length"),
    ("slice(xs, 0, 2)", "no position"),
    ("at > 'yesterday'", "'yesterday' is compared with TIMESTAMP, and cannot be read as such"),
    ("day = '2026-02-30'", "cannot be read as such.*'2026-01-31'"),
    ("a = 'x'", "cannot be read as such"),
    ("DATE '31.1.2026'", "cannot be read as such"),
    ("from_json(s, 'x INTT')", "schema of from_json cannot be read"),
    # types
    ("a + s", "INT \\+ STRING has no meaning"),
    ("s > 1.5 AND s", "STRING > DECIMAL\\(2,1\\) cannot be compared"),
    ("a AND flag", "condition of AND is INT, not BOOLEAN"),
    ("a = NULL", "IS NULL"),
    ("NULL + 1", "NULL \\+ anything is null"),
    ("CASE WHEN flag THEN 1 ELSE 'x' END", "no type in common: INT, STRING"),
    ("coalesce(w, 1e0, 'x')", "no type in common"),
    ("CAST(day AS INT)", "DATE cannot be cast to INT"),
    ("CAST(xs AS ARRAY<TINYINT>)", "nested values can be cast only where no element can fail"),
    ("CAST(s AS VARCHAR(3))", None),
    ("CAST(s AS FOO)", "cannot be read|not known"),
    ("xs[b]", "has no element at a BIGINT"),
    ("tags[1]", "keys are STRING, not INT"),
    ("a.x", "INT has no member 'x'"),
    ("tags = tags", "cannot be compared"),
    ("m DIV 2", "DIV takes whole numbers"),
    ("INTERVAL a DAY", "a number and one unit, written out"),
    ("INTERVAL 1.5 DAYS", "is not whole"),
    # what sqlglot and Spark understand differently
    ("a & b | 3", "two ways"),
    ("s || a + 1", "two ways"),
    ("a = b = flag", "not plain"),
    ("a < b = flag", "not plain"),
]


@pytest.mark.parametrize(
    ("text", "said"),
    [case for case in REFUSED if case[1]],
    ids=[text for text, said in REFUSED if said],
)
def test_refused(text: str, said: str) -> None:
    with pytest.raises(HeadraceError, match=f"(?s){said}") as caught:
        of(text)
    assert isinstance(caught.value, BadExpression | UnknownColumn)
    assert "orders.select" in str(caught.value), "the step is named"


@pytest.mark.parametrize("text", [text for text, said in REFUSED if said is None])
def test_let_through(text: str) -> None:
    assert of(text).type is not None


@pytest.mark.parametrize("name", sorted({*NOT_DETERMINISTIC, *refusals.REFUSED, *function_kinds()}))
def test_functions_that_a_row_cannot_answer_are_refused_by_what_they_are(name: str) -> None:
    if name in SPECIAL_NAMES:
        return
    refused = refusal(name, function_kinds().get(name))
    assert refused is not None, "it has no signature, and nothing says why"
    assert re.search(
        "not deterministic|more than one row|several rows|rows of nothing|not allowed",
        refused.message,
    )
    assert refused.fix.endswith("."), "what to use instead"


def test_what_other_systems_call_a_function_is_suggested_and_nothing_that_does_not_fit() -> None:
    known = {*signatures(), *SPECIAL_NAMES}
    meant = {
        "STRPOS": "instr(text, part)",
        "IFF": "if(condition, a, b)",
        "starts_with": "startswith",
        "sha256": "sha2(text, 256)",
        "list_filter": "filter(items, x -> x > 0)",
        "regexp_extractt": "regexp_extract",
        "msk": None,
        "abz": None,
        "frobnicate": None,
    }
    assert {name: suggestion(name, known) for name in meant} == meant
    assert not {"len", "isnull", "to_char", "nvl2", "mask", "position"} - known


def test_lambdas_are_typed_and_their_failures_counted() -> None:
    kinds = {
        "transform(xs, x -> x / 2)": "ARRAY<DOUBLE>",
        "transform(xs, (x, i) -> named_struct('x', x, 'i', i))": "ARRAY<STRUCT<x: INT, i: INT>>",
        "transform(xs, XS -> XS + 1)": "ARRAY<INT>",
        "transform(xs, x -> transform(xs, y -> x + y))": "ARRAY<ARRAY<INT>>",
        "filter(xs, x -> x > a)": "ARRAY<INT>",
        "exists(xs, x -> x IS NULL)": "BOOLEAN",
        "forall(xs, x -> x > 0)": "BOOLEAN",
        "aggregate(xs, 0, (s, x) -> s + x)": "INT",
        "reduce(xs, 0e0, (s, x) -> s + x, s -> CAST(s AS STRING))": "STRING",
        "zip_with(xs, xs, (x, y) -> x * y)": "ARRAY<INT>",
        "map_filter(tags, (k, v) -> v > 0)": "MAP<STRING, INT>",
        "transform_values(tags, (k, v) -> k)": "MAP<STRING, STRING>",
        "transform_keys(tags, (k, v) -> length(k))": "MAP<INT, INT>",
        "map_zip_with(tags, tags, (k, a, b) -> a > b)": "MAP<STRING, BOOLEAN>",
        "array_sort(xs, (l, r) -> CASE WHEN l < r THEN 1 ELSE -1 END)": "ARRAY<INT>",
    }
    for text, kind in kinds.items():
        found = of(text)
        assert found.type is not None
        assert type_name(found.type) == kind, text
    assert of("filter(xs, x -> x > 0)").failed is None
    assert of("transform(xs, a -> a + 1)").columns == ("xs",), "a parameter hides a column"
    assert "exists(transform(`xs`, `x` -> " in (failed("transform(xs, x -> a / x)", SCHEMA) or "")


def test_unknown_columns_name_the_nearest() -> None:
    with pytest.raises(
        UnknownColumn, match="The step orders.select has no column 'adress': did you mean 'address'"
    ):
        of("adress.city")
    with pytest.raises(UnknownColumn, match="no column 'cty': did you mean 'city'"):
        of("address.cty")


def test_an_error_points_at_its_line() -> None:
    with pytest.raises(
        BadExpression, match=r"line 2, position 5, near '\)':\n    \+ b \)\n        \^"
    ):
        of("a\n+ b )")


@pytest.mark.parametrize(
    "text",
    [
        "abs(" * 400 + "a" + ")" * 400,
        "(" * 2000 + "a" + ")" * 2000,
        "a" + " + a" * 4000,
        "NOT " * 3000 + "flag",
        "b DIV (" * 30 + "b" + ")" * 30,
        "a" * 30_000,
    ],
    ids=["calls", "parentheses", "sum", "not", "repeats its operands", "long"],
)
def test_monsters_are_refused_quickly(text: str) -> None:
    with pytest.raises(BadExpression, match="nested too deeply|30,000 characters"):
        of(text)


def test_other_things_than_text_are_refused() -> None:
    with pytest.raises(BadExpression, match="was given a int, not an expression"):
        parse_expression(7, SCHEMA, where="x")  # type: ignore[arg-type]


def test_braces_and_quotes_are_only_text() -> None:
    assert of("concat(s, '{0} {1}')").safe == "concat(`s`, '{0} {1}')"
    assert of(r"'it\'s'").safe == r"'it\'s'"
    assert of(r"'a\\b'").safe == r"'a\\b'"
    odd = pa.schema(
        [pa.field("a`b", pa.int32()), pa.field("{0}", pa.struct([pa.field("{x}", pa.int32())]))]
    )
    assert (
        parse_expression("`a``b` + `{0}`.`{x}`", odd, where="x").safe
        == "try_add(`a``b`, `{0}`.`{x}`)"
    )


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        expression = of(text)
    except HeadraceError:
        return
    assert expression.text == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_text_can_be_a_literal(text: str) -> None:
    written = "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    assert of(f"concat(s, {written})").safe == f"concat(`s`, {written})"


def test_every_line_of_the_catalogue_can_be_read() -> None:
    for lines in signatures().values():
        for line in lines:
            assert re.fullmatch(r"\w+\(.*\)", str(line))
            assert line.safe is None or "{" in line.safe


def test_every_function_of_spark_is_known_or_refused() -> None:
    known = {*signatures(), *SPECIAL_NAMES}
    for name, kind in function_kinds().items():
        assert name in known or refusal(name, kind) is not None, name
