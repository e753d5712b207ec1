"""Patterns as they are declared: what is refused and how it is said, what becomes of conditions,
and SQL as a second spelling.
"""

from __future__ import annotations

from typing import Any

import pytest

import headrace as hr
from headrace.errors import (
    BadExpression,
    BadPattern,
    BadQuery,
    PlanError,
    StreamOnly,
    UnfitColumn,
    UnknownColumn,
    UnknownTopic,
)
from headrace.plan.match_steps import MatchStep
from headrace.plan.plan import SelectStep, WhereStep, tree
from headrace.plan.rendering import mermaid

SCHEMA = "card STRING, amount DOUBLE, shop STRING, paid_at TIMESTAMP"
DEFINE = {"small": "amount < 10", "big": "amount > 1000 AND amount > 50 * avg(small.amount)"}


def bank(event_time: Any = None) -> tuple[hr.Pipeline, hr.Stream]:
    pipeline = hr.Pipeline("bank")
    return pipeline, pipeline.topic(
        "payments",
        schema=SCHEMA,
        key="card",
        event_time=event_time or hr.EventTime("paid_at", delay="5 seconds"),
    )


def fraud(payments: hr.Stream, **more: Any) -> hr.Stream:
    asked = {
        "define": DEFINE,
        "measures": {
            "first_at": "first(small.paid_at)",
            "total": "sum(amount)",
            "n": "count(small.*)",
        },
        "within": "10 minutes",
        **more,
    }
    return payments.key_by("card").match("small{3,} big", **asked)


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("a b |", {}, BadPattern, "position 6: a symbol was expected.\n    a b |\n         ^"),
    ("a (b", {}, BadPattern, "this '(' is not closed.\n    a (b\n      ^"),
    ("a{3,1}", {}, BadPattern, "not below the lower one.\n    a{3,1}\n     ^"),
    ("a @ b", {}, BadPattern, "'@' means nothing here.\n    a @ b\n      ^"),
    ("(a?)* b", {}, BadPattern, "repeated for ever"),
    ("(a b)*?", {}, BadPattern, "prefers to match nothing at all"),
    ("a* b?", {"after_match": "no skip"}, BadPattern, "every row would match it"),
    ("a* $", {"within": "1 minute"}, BadPattern, "may be left out, and that ends with an absence"),
    ("a !b", {}, BadPattern, "no time until which it must be absent"),
    ("a $", {}, BadPattern, "no time until which it must be absent"),
    ("a !b c", {}, BadPattern, "write -> before this one"),
    ("!a b", {}, BadPattern, "not before the first"),
    (
        "a b",
        {"define": {"c": "amount > 1"}},
        BadPattern,
        "no symbol of the pattern 'a b': there is 'a', 'b'",
    ),
    (
        "a b",
        {"define": {"a": "amount > b.amount"}},
        BadPattern,
        "no row of that comes before one of 'a'",
    ),
    ("a b", {"define": {"b": "amount > c.amount"}}, BadPattern, "'c' is no symbol of the pattern"),
    ("a b", {"define": {"b": "amont > 1"}}, UnknownColumn, "did you mean 'amount'"),
    ("a b", {"define": {"b": "amont > avg(a.amount)"}}, UnknownColumn, "did you mean 'amount'"),
    ("a b", {"define": {"b": "amount >"}}, BadExpression, "cannot be read"),
    ("a b", {"define": {"b": "amount + 1"}}, UnfitColumn, "not BOOLEAN"),
    ("a b", {"define": {"b": "amount + a.amount"}}, BadExpression, "no condition"),
    ("a b", {"define": {"b": "next(amount) > 1"}}, BadExpression, "rows that come later"),
    ("a b", {"define": {"b": "amount > avg(a.shop)"}}, BadExpression, "cannot compute"),
    (
        "a b",
        {"define": {"b": "a.amount > regexp_count(shop, 'x')"}},
        BadExpression,
        "no function regexp_count",
    ),
    (
        "a !b -> c",
        {"define": {"b": "amount > a.amount"}},
        BadPattern,
        "must be absent, and its condition looks at the rows of a match",
    ),
    ("a b", {"measures": {"x": "sum(c.amount)"}}, BadPattern, "'c' is no symbol"),
    ("a b", {"measures": {"card": "count(*)"}}, PlanError, "two columns named 'card'"),
    ("a b", {"subsets": {"both": ("a", "c")}}, BadPattern, "'c' is not right there"),
    ("a b", {"after_match": "skip past last rows"}, PlanError, "did you mean 'skip past last row'"),
    ("a b", {"after_match": "skip to last c"}, BadPattern, "no symbol of the pattern"),
    ("a b", {"after_match": "skip to first a"}, BadPattern, "it would be found for ever"),
    ("a b", {"rows": "some"}, PlanError, "use 'one' or 'all'"),
    ("a b", {"late": hr.late.correct("1 hour")}, PlanError, "cannot be corrected"),
    ("a b", {"within": "0 seconds"}, PlanError, "is zero"),
    ("a b", {"max_rows": 0}, PlanError, "max_rows=0"),
    ("a{501}", {}, BadPattern, "more than 500 symbols"),
    ("PERMUTE(a, " * 60 + "b" + ")" * 60, {}, BadPattern, "nested more than 50 deep"),
    (
        "a b",
        {"define": {"b": "match_number() < 3"}},
        BadExpression,
        "use match_number() in measures",
    ),
    (
        "a b",
        {"measures": {"x": "classifier(c)"}},
        BadExpression,
        "classifier() takes a symbol, or nothing",
    ),
    (
        "a b",
        {"define": {"b": "amount + a.amount" + " + 1" * 500 + " > 3"}},
        BadExpression,
        "nested more than 100 deep",
    ),
    (
        "a b",
        {"define": {"b": "CAST(paid_at - a.paid_at AS BIGINT) > 3"}},
        BadExpression,
        "an interval is no number",
    ),
    (
        "a b",
        {"define": {"b": "CAST(amount AS STRING) = a.shop"}},
        BadExpression,
        "a cast from double to STRING",
    ),
    ("a b", {"subsets": {"both": "ab"}}, BadPattern, "'ab' is not right there"),
]


@pytest.mark.parametrize(
    ("text", "asked", "error", "says"),
    BAD,
    ids=[f"{text} {list(asked)}" for text, asked, _, _ in BAD],
)
def test_invalid_patterns_are_refused_at_declaration(
    text: str, asked: dict[str, Any], error: type[Exception], says: str
) -> None:
    _, payments = bank()
    with pytest.raises(error) as refused:
        payments.match(text, **asked)
    assert says in str(refused.value)


def test_a_pattern_needs_an_event_time_and_a_stream() -> None:
    pipeline = hr.Pipeline("bank")
    with pytest.raises(PlanError, match="needs an event time"):
        pipeline.topic("payments", schema=SCHEMA, key="card").match("a b")
    with pytest.raises(StreamOnly, match="patterns are sequences of events"):
        pipeline.table(
            "cards", schema="card STRING, at TIMESTAMP", key="card", event_time=hr.EventTime("at")
        ).match("a b")


def test_conditions_of_a_row_alone_are_computed_before_rows_are_sent() -> None:
    _, payments = bank()
    step = fraud(payments).step
    assert isinstance(step, MatchStep)
    assert [text for _, text in step.bits] == ["amount < 10", "amount > 1000"]
    assert isinstance(step.input, SelectStep), (
        "every row is seen where rows must follow each other directly"
    )
    assert step.input.schema.names == [
        "card",
        "amount",
        "paid_at",
        "_fits0",
        "_fits1",
    ], "columns that nobody needs are left out"
    skipping = payments.match(
        "a -> b", define={"a": "shop = 'x'", "b": "shop = 'y'"}, within="1 minute"
    ).step
    assert isinstance(skipping.input, WhereStep), "rows that no symbol can use are left out"
    assert skipping.input.condition == "`_fits0` OR `_fits1`"
    undefined = payments.match("a -> b", define={"a": "shop = 'x'"}, within="1 minute").step
    assert isinstance(undefined.input, SelectStep)


def test_the_result_has_key_measures_and_time() -> None:
    _, payments = bank()
    assert fraud(payments).schema.names == ["card", "first_at", "total", "n", "matched_at"]
    all_rows = fraud(payments, rows="all").schema.names
    assert all_rows == [
        "card",
        "amount",
        "shop",
        "paid_at",
        "classifier",
        "match_number",
        "first_at",
        "total",
        "n",
        "matched_at",
    ]
    counted = (
        fraud(payments).window(hr.tumbling("1 hour")).group_by("card").aggregate(n=hr.agg.count())
    )
    assert counted.schema.names == [
        "card",
        "window_start",
        "window_end",
        "n",
    ], "matches have an event time"


def test_several_patterns_share_their_columns() -> None:
    _, payments = bank()
    step = payments.match(
        {
            "fraud": hr.pattern(
                "small{3,} big",
                define=DEFINE,
                measures={"total": "sum(amount)"},
                within="10 minutes",
            ),
            "twice": hr.pattern(
                "one two",
                define={"two": "shop = one.shop"},
                measures={"total": "sum(amount)", "shop": "last(shop)"},
            ),
        }
    ).step
    assert step.schema.names == ["card", "pattern", "total", "shop", "matched_at"]
    with pytest.raises(PlanError, match="give within= to each"):
        payments.match({"a": hr.pattern("a b")}, within="1 minute")  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="'a b' as the pattern 'a'"):
        payments.match({"a": "a b"})  # type: ignore[dict-item]
    with pytest.raises(PlanError, match="'total' is"):
        payments.match(
            {
                "a": hr.pattern("a b", measures={"total": "sum(amount)"}),
                "b": hr.pattern("a b", measures={"total": "last(shop)"}),
            }
        )


def test_a_pattern_is_a_text_a_dictionary_or_a_table() -> None:
    pipeline, payments = bank()
    rules = pipeline.topic("rules", schema="name STRING, pattern STRING", key="name")
    with pytest.raises(PlanError, match="was given a Stream"):
        payments.match(rules)  # type: ignore[call-overload]


def test_the_plan_draws_the_automaton() -> None:
    pipeline, payments = bank()
    pipeline.write("fraud", fraud(payments))
    assert "small.3 → small.3, big" in tree(pipeline.plan())
    assert "small" in mermaid(pipeline.plan())


# SQL

QUERY = """
SELECT * FROM payments MATCH_RECOGNIZE (
    PARTITION BY card ORDER BY paid_at
    MEASURES first(small.paid_at) AS first_at, sum(amount) AS total, count(small.*) AS n
    ONE ROW PER MATCH
    AFTER MATCH SKIP TO LAST small
    PATTERN (small{3,} big)
    SUBSET both = (small, big)
    WITHIN INTERVAL '10' MINUTE
    DEFINE small AS amount < 10, big AS amount > 1000 AND amount > 50 * avg(small.amount)
) AS m
"""


def test_sql_gives_the_same_plan() -> None:
    pipeline, _ = bank()
    _, payments = bank()
    assert (
        pipeline.sql(QUERY).step
        == fraud(
            payments, after_match="skip to last small", subsets={"both": ("small", "big")}
        ).step
    )
    every = QUERY.replace("ONE ROW", "ALL ROWS").replace("SKIP TO LAST small", "SKIP PAST LAST ROW")
    assert (
        pipeline.sql(every).step
        == fraud(payments, rows="all", subsets={"both": ("small", "big")}).step
    )
    remarked = (
        QUERY.replace("(small{3,} big)", "(small{3,} /* in a row */ big -- the last\n)")
        .replace("PARTITION BY card", "PARTITION BY CARD")
        .replace("small AS", "SMALL AS")
        .replace("LAST small", "LAST Small")
    )
    assert pipeline.sql(remarked).step == pipeline.sql(QUERY).step, (
        "comments, and small and capital letters, make no difference"
    )
    plain = pipeline.sql(
        QUERY.replace("SELECT *", "SELECT m.card, total * 2 AS twice").replace(
            ") AS m", ") AS m WHERE m.total > 5"
        )
    )
    assert plain.schema.names == ["card", "twice"]


def test_sql_orders_rows_of_one_time() -> None:
    pipeline, payments = bank()
    query = QUERY.replace("ORDER BY paid_at", "ORDER BY paid_at, AMOUNT DESC, shop")
    subsets = {"both": ("small", "big")}
    more: dict[str, Any] = {"after_match": "skip to last small", "subsets": subsets}
    ordered = pipeline.sql(query).step
    assert ordered == fraud(payments, order_by=["amount desc", "shop"], **more).step
    assert ordered != fraud(payments, **more).step
    assert "shop" in ordered.input.schema.names
    with pytest.raises(UnknownColumn):
        pipeline.sql(QUERY.replace("ORDER BY paid_at", "ORDER BY paid_at, nope"))
    with pytest.raises(BadQuery, match="no order of a column"):
        pipeline.sql(QUERY.replace("ORDER BY paid_at", "ORDER BY paid_at, amount + 1"))


def test_sql_without_a_partition_is_one_sequence() -> None:
    pipeline = hr.Pipeline("bank")
    events = pipeline.topic(
        "events", schema="v DOUBLE, at TIMESTAMP", event_time=hr.EventTime("at")
    )
    found = pipeline.sql(
        "SELECT * FROM events MATCH_RECOGNIZE (ORDER BY at MEASURES sum(v) AS total PATTERN (a b)"
        " DEFINE b AS v > a.v);"
    )
    assert (
        found.step
        == events.match("a b", define={"b": "v > a.v"}, measures={"total": "sum(v)"}).step
    )


@pytest.mark.parametrize(
    ("query", "error", "says"),
    [
        ("", BadQuery, "empty"),
        ("SELECT 1", BadQuery, "FROM was expected"),
        (QUERY.replace("FROM payments", "FROM paymets"), UnknownTopic, "did you mean 'payments'"),
        (QUERY.replace("ORDER BY paid_at", "ORDER BY amount"), BadQuery, "ORDER BY paid_at"),
        (QUERY.replace("ORDER BY paid_at", ""), BadQuery, "ORDER BY is missing"),
        (QUERY.replace("(small{3,} big)", "(small{3, big)"), BadQuery, "not closed"),
        (QUERY.replace("(small{3,} big)", "(small{3,} | )"), BadPattern, "a symbol was expected"),
        (QUERY.replace("PATTERN (small{3,} big)", "PATTERN small"), BadQuery, "in parentheses"),
        (QUERY.replace("small AS amount", "small amount"), BadQuery, "has no AS"),
        (
            QUERY.replace("ONE ROW PER MATCH", "ALL ROWS PER MATCH WITH UNMATCHED ROWS"),
            BadQuery,
            "is not known",
        ),
        (
            QUERY.replace("ONE ROW PER MATCH", "ONE ROW PER MATCH SHOW TIMEOUT"),
            BadQuery,
            "SHOW TIMEOUT is not known",
        ),
        (
            QUERY.replace("ONE ROW PER MATCH", "ONE ROW PER MATCH ALL ROWS PER MATCH"),
            BadQuery,
            "are both there",
        ),
        (QUERY.replace("AS n\n", "AS total\n"), BadQuery, "'total' is there twice"),
        (
            QUERY.replace("DEFINE small", "DEFINE big AS amount > 1, small"),
            BadQuery,
            "'big' is there twice",
        ),
        (QUERY.replace("AS n\n", "AS n INITIAL\n"), BadQuery, "'n INITIAL' is not a name"),
        (QUERY.replace("PARTITION BY card", ""), BadQuery, "write PARTITION BY card"),
        (QUERY + "; SELECT 1", BadQuery, "FROM was expected"),
        (QUERY + " GROUP BY card", PlanError, "neither in GROUP BY nor in an aggregate"),
        (
            QUERY.replace("PARTITION BY card", "PARTITION BY card, upper(card)"),
            BadQuery,
            "is not a column",
        ),
    ],
)
def test_a_query_that_cannot_be_used_is_refused(
    query: str, error: type[Exception], says: str
) -> None:
    pipeline, _ = bank()
    with pytest.raises(error) as refused:
        pipeline.sql(query)
    assert says in str(refused.value)
