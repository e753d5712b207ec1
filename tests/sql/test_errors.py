"""Errors of SQL: at their place, all at once, with what was expected and the nearest name; and
texts that are hostile.
"""

import re
from contextlib import suppress
from random import Random
from typing import Any

import pytest

import headrace as hr
from headrace.errors import (
    BadExpression,
    BadQuery,
    BadSchema,
    BadSql,
    DuplicateStep,
    HeadraceError,
    PlanError,
    StreamOnly,
    UnknownColumn,
    UnknownTopic,
)

INPUTS = """
CREATE TOPIC orders (order_id BIGINT, customer_id BIGINT, region STRING, amount DOUBLE,
    placed_at TIMESTAMP) WITH (key = 'order_id', event_time = 'placed_at', delay = '10 seconds');
CREATE TOPIC payments (order_id BIGINT, paid DOUBLE, paid_at TIMESTAMP)
    WITH (event_time = 'paid_at');
CREATE TOPIC clicks (user STRING, page STRING);
CREATE TABLE customers (customer_id BIGINT PRIMARY KEY, name STRING, tier STRING);
"""


def shop() -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    pipeline.sql(INPUTS)
    return pipeline


def refused(text: str) -> HeadraceError:
    with pytest.raises(HeadraceError) as error:
        shop().sql(text)
    return error.value


Case = tuple[str, str, type[HeadraceError], str, str]
CASES: list[Case] = [
    # statement, where the caret stands, class, what is said, what to do
    (
        "SELECT amout FROM orders",
        "amout",
        UnknownColumn,
        "no column 'amout': did you mean 'amount'",
        "",
    ),
    ("SELECT amount FROM ordes", "ordes", UnknownTopic, "did you mean 'orders'", "CREATE TOPIC"),
    ("SELECT x.amount FROM orders o", "x", UnknownColumn, "no table 'x' in this query", ""),
    ("SELECT o.amout FROM orders o", "o.amout", UnknownColumn, "did you mean 'amount'", ""),
    (
        (
            "SELECT order_id FROM orders o JOIN payments p ON o.order_id + 1 = p.order_id AND"
            " p.paid_at BETWEEN o.placed_at AND o.placed_at + INTERVAL 1 HOUR"
        ),
        "order_id",
        PlanError,
        "could be several columns: o.order_id, p.order_id",
        "say which",
    ),
    ("SELECT amount FROM orders WHER amount > 3", "WHER", BadQuery, "did you mean 'WHERE'", ""),
    ("SELCT amount FROM orders", "SELCT", BadQuery, "did you mean 'SELECT'", ""),
    ("SELECT amount + FROM orders", "+", BadExpression, "cannot be read", ""),
    ("SELECT amount, FROM orders", "FROM", BadQuery, "A column was expected here", ""),
    ("SELECT amount FROM orders WHERE", "", BadQuery, "a condition was expected", ""),
    ("SELECT (amount FROM orders", "(", BadQuery, "not closed", ""),
    ("SELECT 'amount FROM orders", "'", BadQuery, "string is not closed", ""),
    ("SELECT amount FROM orders /* so", "/*", BadQuery, "comment is not closed", ""),
    ("SELECT amount * 2 FROM orders", "amount * 2", PlanError, "has no name", "AS name"),
    ("SELECT amount, region AS amount FROM orders", "region", PlanError, "are called 'amount'", ""),
    (
        "SELECT region, amount > 'x' AS y FROM orders",
        "amount > 'x'",
        BadExpression,
        "compared with DOUBLE",
        "",
    ),
    ("SELECT region FROM orders WHERE amount", "amount", PlanError, "BOOLEAN", ""),
    # Streams and tables
    ("CREATE VIEW v AS SELECT * FROM orders", "v AS", StreamOnly, "of a stream", "ROW_NUMBER"),
    ("CREATE STREAM v AS SELECT * FROM customers", "v AS", StreamOnly, "a table", "CREATE TABLE"),
    ("CREATE TABLE v AS SELECT * FROM orders", "v AS", StreamOnly, "a stream", "CREATE STREAM"),
    (
        "SELECT name FROM customers",
        "SELECT",
        PlanError,
        "leaves out 'customer_id'",
        "add customer_id",
    ),
    (
        "SELECT region, amount FROM orders GROUP BY region",
        "amount",
        PlanError,
        "neither in GROUP BY",
        "",
    ),
    (
        "SELECT region FROM orders WHERE sum(amount) > 3",
        "sum(",
        PlanError,
        "an aggregate",
        "HAVING",
    ),
    ("SELECT region FROM orders HAVING amount > 3", "amount > 3", PlanError, "no", "WHERE"),
    ("SELECT sum(max(amount)) AS x FROM orders", "max(", PlanError, "inside another aggregate", ""),
    (
        "SELECT mode(amount) AS x FROM orders",
        "mode",
        PlanError,
        "no aggregate 'mode'",
        "heavy_hitters",
    ),
    ("SELECT * FROM orders ORDER BY amount", "amount", PlanError, "no order", "LIMIT"),
    ("SELECT * FROM customers LIMIT 3", "LIMIT", PlanError, "any rows", "ORDER BY"),
    ("SELECT * FROM orders ORDER BY amount LIMIT 3", "LIMIT", StreamOnly, "a stream", "ROW_NUMBER"),
    ("SELECT * FROM customers ORDER BY name LIMIT 3 OFFSET 2", "OFFSET", BadQuery, "OFFSET", ""),
    # Windows
    (
        (
            "SELECT window_start, window_end, count(*) AS n FROM TUMBLE(clicks, user, INTERVAL 1"
            " HOUR) GROUP BY ALL"
        ),
        "user",
        PlanError,
        "clicks has none",
        "event_time",
    ),
    (
        "SELECT count(*) AS n FROM TUMBLE(orders, placed_at, INTERVAL 1 HOUR)",
        "TUMBLE",
        PlanError,
        "GROUP BY has no window",
        "window_start",
    ),
    (
        "SELECT * FROM TUMBLE(orders, placed_at, INTERVAL 1 HOUR)",
        "TUMBLE",
        PlanError,
        "nothing is",
        "",
    ),
    ("SELECT * FROM TUMBLE(orders, placed_at)", ")", BadQuery, ", was expected", "INTERVAL"),
    ("SELECT * FROM TUMBEL(orders, placed_at)", "TUMBEL", BadQuery, "table function", "TUMBLE"),
    ("SELECT * FROM orders EMIT FINAL", "EMIT", PlanError, "for windows", ""),
    ("SELECT * FROM customers LATE DROP", "LATE", PlanError, "for windows", ""),
    ("SELECT * FROM orders EMIT SOON", "SOON", BadQuery, "CHANGES or FINAL was expected", ""),
    # Joins
    (
        "SELECT * FROM orders o JOIN payments p ON o.order_id = p.order_id",
        "JOIN",
        PlanError,
        "without a bound of time",
        "AND p.paid_at BETWEEN o.placed_at - INTERVAL 1 HOUR",
    ),
    (
        (
            "SELECT * FROM orders o JOIN payments p ON o.order_id = p.order_id AND p.paid_at >="
            " o.placed_at"
        ),
        "JOIN",
        PlanError,
        "no latest time",
        "",
    ),
    (
        "SELECT * FROM orders o JOIN customers c ON o.amount > 3",
        "JOIN",
        PlanError,
        "every row would",
        "",
    ),
    (
        "SELECT * FROM orders o JOIN customers c ON o.region = c.customer_id",
        "JOIN",
        PlanError,
        "which is STRING",
        "CAST",
    ),
    (
        "SELECT * FROM customers c LEFT JOIN orders o ON o.customer_id = c.customer_id",
        "LEFT",
        StreamOnly,
        "no time at which they are emitted",
        "begin with the stream",
    ),
    ("SELECT * FROM orders NATURAL JOIN customers", "NATURAL", BadQuery, "NATURAL", "USING"),
    # What has no incremental meaning
    (
        "SELECT * FROM customers INTERSECT SELECT * FROM customers",
        "INTERSECT",
        BadQuery,
        "",
        "EXISTS",
    ),
    (
        "SELECT * FROM customers WHERE customer_id NOT IN (SELECT customer_id FROM orders)",
        "customer_id NOT",
        PlanError,
        "as soon as the query has a null",
        "NOT EXISTS",
    ),
    (
        "SELECT * FROM orders WHERE amount > (SELECT avg(amount) AS a FROM orders)",
        "(SELECT",
        PlanError,
        "inside an expression",
        "JOIN",
    ),
    (
        (
            "SELECT region, sum(amount) OVER (PARTITION BY region ORDER BY amount ROWS BETWEEN"
            " UNBOUNDED PRECEDING AND CURRENT ROW) AS s FROM orders"
        ),
        "amount ROWS",
        PlanError,
        "in the order of their event time",
        "ORDER BY placed_at",
    ),
    (
        "SELECT tier, count(*) AS n FROM customers GROUP BY ROLLUP (tier)",
        "ROLLUP",
        BadQuery,
        "Grouping sets",
        "UNION ALL",
    ),
    ("WITH RECURSIVE r AS (SELECT 1) SELECT * FROM r", "RECURSIVE", BadQuery, "no incremental", ""),
    (
        "SELECT tier, count(*) AS n FROM customers GROUP BY tier HAVING n > (SELECT 1)",
        "(SELECT",
        PlanError,
        "inside an expression",
        "JOIN",
    ),
    # Statements
    ("CREATE TOPIC x (a BIGNT)", "a BIGNT", BadSchema, "expected a type", "BIGINT"),
    ("CREATE TOPIC x (a BIGINT) WITH (keyy = 'a')", "keyy", PlanError, "did you mean 'key'", ""),
    ("CREATE TOPIC orders (a BIGINT)", "orders", DuplicateStep, "already", ""),
    ("CREATE TABLE x (a BIGINT)", "x", PlanError, "no key", "PRIMARY KEY"),
    ("CREATE VEW x AS SELECT 1", "VEW", BadQuery, "did you mean 'VIEW'", ""),
    ("DROP VIEW nothing", "nothing", PlanError, "no view 'nothing'", ""),
    ("DELETE FROM customers", "DELETE", BadQuery, "no statement DELETE", ""),
    ("INSERT INTO orders VALUES (1)", "(1)", PlanError, "1 values", ""),
    ("INSERT INTO clicks VALUES (1, 'a')", "(1", PlanError, "'user' is STRING", ""),
    ("CREATE FUNCTION f AS 'no_such_module:f'", "'no_such", PlanError, "cannot be imported", ""),
    ("CREATE SINK s FROM customers INTO 'nothing:x'", "CREATE", HeadraceError, "nothing", ""),
    (
        "CREATE ALERT a TO 'ftp://x' AS SELECT * FROM orders",
        "'ftp",
        PlanError,
        "cannot be notified",
        "",
    ),
    ("CREATE TOPIC `a b` (x INT)", "`a b`", PlanError, "cannot be a topic name", ""),
    ("CREATE TOPIC __own (x INT)", "CREATE", PlanError, "reserved", ""),
]


@pytest.mark.parametrize(
    ("text", "at", "kind", "says", "fix"), CASES, ids=[case[0][:50] for case in CASES]
)
def test_an_error_says_where_and_what(
    text: str, at: str, kind: type[HeadraceError], says: str, fix: str
) -> None:
    error = refused(text)
    assert isinstance(error, kind), repr(error)
    assert says in str(error)
    assert fix in error.fix
    place = re.match(r"Line 1, position (\d+): ", str(error))
    assert place is not None, str(error)
    position = int(place[1]) - 1
    assert text[position:].startswith(at), f"it points to {text[position:]!r}"
    line, caret = str(error).split("\n")[1:3]
    assert caret.strip() == "^"
    assert line[len(caret) - 1 :].startswith(text[position : position + 1].strip())


def test_all_errors_of_a_text_come_at_once_and_nothing_is_declared() -> None:
    pipeline = shop()
    before = pipeline.declarations()
    text = """CREATE VIEW revenue AS
    SELECT region, sum(amout) AS total FROM orders GROUP BY region;
CREATE VIEW again AS SELECT * FROM revenue;  -- depends on an error: no error of its own
CREATE STREAM large AS SELECT * FROM orders WHERE amount > 'x' AND;
CREATE TOPIC fine (a BIGINT);
CREATE VIEW last AS SELEC * FROM fine"""
    with pytest.raises(BadSql) as error:
        pipeline.sql(text, file="shop.sql")
    problems = error.value.problems
    assert [(each.line, each.position) for each in problems] == [(2, 24), (4, 67), (6, 21)]
    assert "did you mean 'amount'" in problems[0].message
    assert str(error.value).count("shop.sql, line ") == 3
    assert pipeline.declarations() == before
    pipeline.sql("CREATE TOPIC fine (a BIGINT)")


def test_a_bracket_that_is_not_closed_does_not_hide_the_next_statement() -> None:
    error = refused("SELECT (amount FROM orders; SELECT amout FROM orders")
    assert isinstance(error, BadSql)
    assert len(error.problems) == 2


def test_a_semicolon_in_a_string_ends_no_statement() -> None:
    rows = shop().sql("SELECT order_id, ';--' AS text FROM orders WHERE region <> '/* \\' ;'")
    assert rows.schema.names == ["order_id", "text"]


# Hostile texts


def nested(open_: str, close: str, depth: int) -> str:
    return f"SELECT {open_ * depth}amount{close * depth} AS x FROM orders"


HOSTILE: dict[str, Any] = {
    "a megabyte of an expression": "SELECT "
    + " + ".join(["amount"] * 120_000)
    + " AS x FROM orders",
    "a megabyte of a name": f"SELECT {'a' * 1_000_000} FROM orders",
    "a megabyte of a string": f"SELECT '{'a' * 1_000_000}' AS x FROM orders",
    "ten megabytes": "SELECT 1;" * 1_200_000,
    "ten thousand ANDs": "SELECT * FROM orders WHERE " + " AND ".join(["amount > 1"] * 10_000),
    "a thousand ANDs": "SELECT * FROM orders WHERE " + " AND ".join(["amount > 1"] * 1_900),
    "ten thousand ORs": "SELECT * FROM orders WHERE " + " OR ".join(["amount > 1"] * 10_000),
    "deep brackets": nested("(", ")", 90),
    "deeper brackets": nested("(", ")", 5_000),
    "deep calls": nested("abs(", ")", 90),
    "deep CASE": nested("CASE WHEN amount > 1 THEN ", " END", 500),
    "deep NOT": "SELECT * FROM orders WHERE " + "NOT " * 5_000 + "amount > 1",
    "deep minus": "SELECT " + "- " * 5_000 + "amount AS x FROM orders",
    "deep queries": "SELECT * FROM " + "(SELECT * FROM " * 95 + "orders" + ")" * 95,
    "many queries": "SELECT * FROM " + "(SELECT * FROM " * 45 + "orders" + ")" * 45,
    "open comments": "/*" * 100_000,
    "many statements with errors": "SELECT nothing FROM nowhere;" * 2_000,
    "a nul": "SELECT \0 FROM orders",
    "an emoji": "SELECT 🙂 FROM orders",
    "many columns twice": "SELECT " + ", ".join(["amount"] * 20_000) + " FROM orders",
    "many joins": "SELECT * FROM orders" + " JOIN customers USING (customer_id)" * 3_000,
    "many tables": "WITH "
    + ", ".join(
        f"t{n} AS (SELECT * FROM {'orders' if n == 0 else f't{n - 1}'})" for n in range(3_000)
    )
    + " SELECT * FROM nothing",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_refused_clearly(name: str) -> None:
    error = refused(HOSTILE[name])
    assert len(str(error)) < 100_000
    assert str(error).startswith(("Line ", "The SQL has "))


def test_names_and_literals_inject_nothing() -> None:
    pipeline = shop()
    evil = "x') AS y FROM orders; DROP TABLE customers; --"
    rows = pipeline.sql(f"SELECT order_id, \"{evil}\" AS text, 'it\\'s' AS more FROM orders")
    assert rows.schema.names == ["order_id", "text", "more"]
    assert "customers" in pipeline.declared_rows()
    ticked = pipeline.sql("SELECT order_id, amount AS `a`` OR 1 = 1; --` FROM orders")
    assert ticked.schema.names == ["order_id", "a` OR 1 = 1; --"]
    again = pipeline.sql("SELECT `a`` OR 1 = 1; --` + 1 AS b FROM odd", odd=ticked)
    assert again.schema.names == ["b"]


WORDS = [
    "SELECT",
    "FROM",
    "WHERE",
    "GROUP",
    "BY",
    "HAVING",
    "ORDER",
    "LIMIT",
    "UNION",
    "ALL",
    "JOIN",
    "LEFT",
    "ON",
    "USING",
    "(",
    ")",
    ",",
    ".",
    ";",
    "*",
    "=",
    "<",
    ">",
    "orders",
    "customers",
    "payments",
    "amount",
    "region",
    "order_id",
    "name",
    "'a'",
    "1",
    "2.5",
    "INTERVAL",
    "HOUR",
    "AS",
    "x",
    "AND",
    "OR",
    "NOT",
    "IN",
    "BETWEEN",
    "NULL",
    "CASE",
    "WHEN",
    "THEN",
    "END",
    "count(",
    "sum(",
    "OVER",
    "PARTITION",
    "ROW_NUMBER()",
    "TUMBLE(",
    "window_start",
    "CREATE",
    "VIEW",
    "TOPIC",
    "TABLE",
    "STREAM",
    "WITH",
    "INSERT",
    "INTO",
    "VALUES",
    "DROP",
    "SHOW",
    "DESCRIBE",
    "EXPLAIN",
    "EMIT",
    "LATE",
    "CHANGES",
    "OF",
    "MATCH_RECOGNIZE(",
    "PATTERN",
    "DEFINE",
    "SEARCH(",
    "EXISTS",
    "(",
    "SELECT",
    "`b`",
    "--",
    "/*",
    "*/",
    "\\",
    "@",
    "$",
    "?",
    ":",
    "::",
    "QUALIFY",
    "LATERAL",
    "explode(",
    "FOR",
    "SYSTEM_TIME",
    "DISTINCT",
    "EXCEPT",
    "PRIMARY",
    "KEY",
    "BIGINT",
    "STRING",
    "SINK",
    "SOURCE",
]


VALUES = ("1", "-1", "0.5", "1e400", "'x'", "''", "TRUE", "INTERVAL 1 HOUR", "(1, 'a')", "orders")
OPTIONS = {
    "CREATE TOPIC x (a BIGINT, at TIMESTAMP) WITH ({} = {})": (
        "key partitions event_time delay producer idle max_ahead processing_time tombstones"
        " segment_bytes segment_age compression strict format registry retention retention_bytes"
        " compact shed_behind shed_keep shed_priority shed_min_priority name log"
    ),
    "CREATE STREAM x WITH ({} = {}) AS SELECT * FROM orders": "partitions retention name rows key",
    "CREATE VIEW x WITH ({} = {}) AS SELECT * FROM customers": "keep keep_changes name rows",
    "CREATE SINK x INTO 'sqlite:x.db' WITH ({} = {}) AS SELECT * FROM customers": (
        "table mode key create batch_rows commit_interval topic partitions name sink url"
    ),
    "CREATE ALERT x WITH ({} = {}) AS SELECT * FROM customers": "every by for to",
    "CREATE SOURCE x FROM DIRECTORY 'x' INTO orders WITH ({} = {})": "pattern format every topic",
    "CREATE SOURCE x FROM HTTP INTO orders WITH ({} = {})": "port host body_bytes topics name",
    "SELECT count(*, {} => {}) AS n FROM orders": "where max_values column",
    "SELECT max(amount, {} => {}) AS n FROM orders": "where max_values when_full",
    "SELECT * FROM SEARCH(orders, customers, query => name, {} => {})": "text per default suffix",
}


@pytest.mark.parametrize("statement", OPTIONS, ids=[each[:30] for each in OPTIONS])
def test_options_with_any_value_raise_nothing_but_our_own_errors(statement: str) -> None:
    pipeline = shop()
    for option in OPTIONS[statement].split():
        for value in VALUES:
            before = pipeline.declarations()
            text = statement.replace("{}", option, 1).replace("{}", value, 1)
            with suppress(HeadraceError):
                pipeline.sql(text)
            pipeline.restore(before)
            pipeline.sql_session().catalog.declared.pop("x", None)


@pytest.mark.parametrize("seed", range(3))
def test_random_words_raise_nothing_but_our_own_errors(seed: int) -> None:
    draw = Random(seed)
    pipeline = shop()
    for _ in range(400):
        words = [draw.choice(WORDS) for _ in range(draw.randint(1, 30))]
        text = draw.choice(["", "SELECT * FROM orders ", "CREATE VIEW v AS SELECT "]) + " ".join(
            words
        )
        before = pipeline.declarations()
        try:
            pipeline.sql(text)
        except HeadraceError as error:
            refused_with = str(error)
        else:
            continue
        assert pipeline.declarations() == before
        assert "Line " in refused_with or "empty" in refused_with
