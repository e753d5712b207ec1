"""Patterns that live in a table, through the engine: rules come, change and go while rows pass;
whatever the batches, shards, restarts and kills. The jobs run in this process.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

import headrace as hr
from headrace.errors import PlanError, UnknownColumn
from headrace.runtime.explain import partial_matches
from headrace.runtime.state_inspector import last_entry
from headrace.testing.pipelines import Died, PipelineTest

pytestmark = pytest.mark.usefixtures("no_syncs")
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
PAYMENTS = "card BIGINT, amount DOUBLE, kind STRING, paid_at TIMESTAMP"
RULES = (
    "name STRING, pattern STRING, define STRING, within STRING, after_match STRING, subsets STRING,"
    " note STRING"
)
Row = dict[str, Any]


def payment(card: int, amount: float | None, seconds: float, kind: str = "a") -> Row:
    return {
        "card": card,
        "amount": amount,
        "kind": kind,
        "paid_at": START + timedelta(seconds=seconds),
    }


def rule(
    name: str,
    pattern: str | None,
    define: dict[str, str] | str | None = None,
    within: str | None = "1 minute",
    after: str | None = None,
    note: str = "",
) -> Row:
    text = json.dumps(define) if isinstance(define, dict) else define
    return {
        "name": name,
        "pattern": pattern,
        "define": text,
        "within": within,
        "after_match": after,
        "subsets": None,
        "note": note,
    }


def bank(partitions: int = 1, **asked: Any) -> hr.Pipeline:
    pipeline = hr.Pipeline("bank")
    payments = pipeline.topic(
        "payments",
        schema=PAYMENTS,
        key="card",
        event_time=hr.EventTime("paid_at", delay="5 seconds", idle="10 minutes"),
        partitions=partitions,
    )
    rules = pipeline.table("rules", schema=RULES, key="name")
    measures = {
        "n": "count(*)",
        "total": "sum(amount)",
        "smalls": "count(small.*)",
        "last_at": "last(paid_at)",
    }
    pipeline.write("alerts", payments.match(rules, measures=measures, **asked))
    return pipeline


SMALL_BIG = rule(
    "small big",
    "small+ big",
    {"small": "amount < 10", "big": "amount > 1000 AND amount > 50 * avg(small.amount)"},
)
STEPS = rule(
    "steps", "a -> b", {"a": "kind = 'a'", "b": "kind LIKE 'b%'"}, after="skip to next row"
)


def delete(test: PipelineTest, *names: str) -> None:
    with test.log.producer("rules") as producer:
        producer.delete([{"name": name} for name in names])


def dead(test: PipelineTest) -> list[tuple[str, str]]:
    """Names of rules that were refused, and why."""
    return [
        (json.loads(each["row"])["name"], each["reason"])
        for each in test.log.read("alerts.match.dead").to_pylist()
    ]


def matches(test: PipelineTest) -> list[tuple[Any, ...]]:
    """Card, rule, rows, total and how many small ones, in order."""
    return sorted(row[1:6] for row in test.rows("alerts"))


def test_rules_come_change_and_go_while_rows_pass(tmp_path: Path) -> None:
    with PipelineTest(bank(), tmp_path, shards=2) as test:
        test.feed("payments", [payment(1, 1.0, 0), payment(1, 2000.0, 1), payment(2, 1.0, 30)])
        test.settle()
        assert matches(test) == [], "there is no rule"
        test.feed("rules", [SMALL_BIG])
        test.feed(
            "payments",
            [
                payment(2, 3000.0, 31),
                payment(1, 1.0, 40),
                payment(1, 2000.0, 41),
                payment(1, 5.0, 60),
            ],
        )
        test.settle()
        assert matches(test) == [
            (1, "small big", 2, 2001.0, 1),
            (2, "small big", 2, 3001.0, 1),
        ], "rows that were not yet certain when the rule came count, earlier ones do not"
        test.feed("rules", [rule("small big", "big", {"big": "amount > 5000"})])
        test.feed("payments", [payment(1, 2000.0, 70), payment(1, 6000.0, 71), payment(1, 1.0, 90)])
        test.settle()
        assert matches(test)[-1] == (2, "small big", 2, 3001.0, 1)
        assert (1, "small big", 1, 6000.0, 0) in matches(test)
        assert len(matches(test)) == 3, "what it was before is no longer in force"
        delete(test, "small big")
        test.feed("payments", [payment(1, 9000.0, 100), payment(1, 1.0, 200)])
        test.settle()
        assert len(matches(test)) == 3


def test_a_change_that_says_nothing_new_leaves_matches_in_the_making(tmp_path: Path) -> None:
    with PipelineTest(bank(), tmp_path) as test:
        test.feed("rules", [STEPS])
        test.feed("payments", [payment(1, 1.0, 0, "a"), payment(1, 1.0, 10, "c")])
        test.settle()
        test.feed("rules", [{**STEPS, "note": "asked for by the night shift"}])
        test.feed("payments", [payment(1, 1.0, 20, "b1"), payment(1, 1.0, 90, "c")])
        test.settle()
        assert [row[:2] for row in matches(test)] == [(1, "steps")]
        test.feed("rules", [{**STEPS, "within": "2 minutes"}])
        test.feed(
            "payments",
            [payment(1, 1.0, 91, "a"), payment(1, 1.0, 200, "b"), payment(1, 1.0, 400, "c")],
        )
        test.settle()
        assert [row[:2] for row in matches(test)] == [(1, "steps")] * 2


def test_a_rule_that_cannot_be_read_is_a_dead_letter_and_others_go_on(tmp_path: Path) -> None:
    bad = [
        rule("open", "a (b"),
        rule("nothing", None),
        rule("empty", "a*"),
        rule("column", "a", {"a": "amuont > 1"}),
        rule("symbol", "a", {"b": "amount > 1"}),
        rule("json", "a", "{amount"),
        rule("later", "a b", {"a": "b.amount > 1"}),
        rule("never ends", "a b", within=None),
        rule("first", "^ a"),
        rule("no condition", "a", {"a": "amount"}),
        rule("duration", "a", within="soon"),
        rule("skip", "a", after="skip to first b"),
        rule("number", "a", {"a": "match_number() > 1"}),
        rule("deep", "a", {"a": "amount" + " + 1" * 3000 + " > 3"}),
        rule("deeper", "PERMUTE(a, " * 800 + "b" + ")" * 800),
        {**rule("members", "a"), "subsets": '{"both": ["a", 1]}'},
    ]
    with PipelineTest(bank(), tmp_path, shards=3) as test:
        test.feed("rules", [*bad, rule("good", "a", {"a": "amount > 100"})])
        test.feed("payments", [payment(1, 500.0, 0), payment(1, 1.0, 100)])
        test.settle()
        assert [row[1] for row in matches(test)] == ["good"]
        dead_letters = dict(dead(test))
        assert set(dead_letters) == {each["name"] for each in bad}
        assert len(dead(test)) == len(bad), "each is emitted once, by one shard"
        assert "^" in dead_letters["open"], "a caret at the place"
        assert "did you mean 'amount'" in dead_letters["column"]
        assert "how long a match may take" in dead_letters["never ends"]
        test.feed("rules", [rule("good", "(a", {"a": "amount > 100"})])
        test.feed("payments", [payment(1, 600.0, 200), payment(1, 1.0, 300)])
        test.settle()
        assert len(matches(test)) == 1, "a rule that became unreadable is not in force"


def test_a_condition_that_fails_on_a_row_is_false_and_counted(tmp_path: Path) -> None:
    with PipelineTest(bank(), tmp_path) as test:
        test.feed(
            "rules",
            [
                rule("number", "a", {"a": "CAST(kind AS INT) > 3"}),
                rule("half", "a", {"a": "floor(kind / 2) = 4"}),
            ],
        )
        test.feed(
            "payments",
            [
                payment(1, 1.0, 0, "2"),
                payment(1, 2.0, 1, "x"),
                payment(1, 3.0, 2, " 8 "),
                payment(1, 1.0, 100, "1"),
            ],
        )
        test.settle()
        assert [row[1:4] for row in matches(test)] == [("half", 1, 3.0), ("number", 1, 3.0)]
        assert last_entry(test.log, "bank").counts["alerts.match.errors"] == 2, (
            "each of the two conditions on one row"
        )


def test_more_rules_than_may_be_are_refused(tmp_path: Path) -> None:
    with PipelineTest(bank(max_rules=2), tmp_path) as test:
        test.feed(
            "rules", [rule(name, "a", {"a": "amount > 0"}) for name in ("one", "two", "three")]
        )
        test.feed("payments", [payment(1, 1.0, 0), payment(1, -1.0, 100)])
        test.settle()
        assert [row[1] for row in matches(test)] == ["one", "two"]
        assert ["2 rules are in force already" in reason for _, reason in dead(test)] == [True]


def history(seed: int) -> list[tuple[list[Row], list[Row], list[str]]]:
    """Ticks: payments, rules that come or change, and rules that go."""
    chance = Random(seed)
    every = [
        SMALL_BIG,
        STEPS,
        {**STEPS, "within": "20 seconds"},
        rule("silent", "a !b", {"a": "kind = 'a'", "b": "kind = 'b'"}, within="20 seconds"),
        rule("bad", "a ("),
    ]
    ticks = []
    for tick in range(8):
        amounts = [chance.choice([1.0, 2.0, 5.0, 50.0, 2000.0]) for _ in range(12)]
        rows = [
            payment(
                chance.randrange(4),
                amount,
                tick * 25 + chance.randrange(-4, 25) - 60 * (chance.random() < 0.05),
                chance.choice("abcd"),
            )
            for amount in amounts
        ]
        ticks.append(
            (
                rows,
                chance.sample(every, chance.randrange(3)) if tick else every[:2],
                [chance.choice(["steps", "small big"])] if chance.random() < 0.3 else [],
            )
        )
    return ticks


def fed(
    test: PipelineTest, ticks: list[tuple[list[Row], list[Row], list[str]]], after_each: Any = None
) -> list[Any]:
    for rows, rules, gone in ticks:
        test.feed("rules", rules)
        delete(test, *gone)
        test.feed("payments", rows)
        test.cut()
        if after_each is not None:
            after_each(test)
    test.settle()
    test.pass_time("1 hour")
    test.settle()
    return sorted(test.rows("alerts"), key=str) + sorted(test.rows("almost"), key=str)


@pytest.mark.parametrize("seed", [1, 2])
def test_matches_do_not_depend_on_batches_shards_restarts_and_kills(
    tmp_path: Path, seed: int
) -> None:
    ticks = history(seed)
    with PipelineTest(bank(2, timed_out="almost"), tmp_path / "whole", shards=2) as test:
        expected = fed(test, ticks)
        assert len(test.rows("alerts")) > 5
        assert len(test.rows("almost")) > 2

    shards, points = (
        iter([3, 1, 2] * 10),
        iter(["in the kernel", "files were written", "before the commit", "after the commit"] * 10),
    )

    def restart(test: PipelineTest) -> None:
        with pytest.raises(Died):
            test.step(1, dies=next(points))
        test.restart(shards=next(shards), lose_local_store=True)

    with PipelineTest(bank(2, timed_out="almost"), tmp_path / "pieces", shards=1) as test:
        assert fed(test, ticks, restart) == expected


def test_partial_matches_of_a_key_can_be_inspected(tmp_path: Path) -> None:
    with PipelineTest(bank(), tmp_path, shards=2) as test:
        test.feed("rules", [STEPS, SMALL_BIG])
        test.feed(
            "payments", [payment(1, 500.0, 0, "a"), payment(1, 500.0, 1, "c"), payment(2, 1.0, 30)]
        )
        test.settle()
        found = partial_matches(
            test.pipeline.plan(), test.log, test.state, "alerts.match", {"card": "1"}
        )
        assert [
            (each.pattern, [row["classifier"] for row in each.rows], each.waits_for)
            for each in found.partial
        ] == [("steps", ["a"], ["b"])]


def test_invalid_rule_tables_are_refused_at_declaration() -> None:
    pipeline = hr.Pipeline("bank")
    payments = pipeline.topic(
        "payments", schema=PAYMENTS, key="card", event_time=hr.EventTime("paid_at")
    )
    rules = pipeline.table("rules", schema=RULES, key="name")
    with pytest.raises(PlanError, match="as columns of the table"):
        payments.match(rules, define={"a": "amount > 1"})  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="kept for ever"):
        payments.match(rules, rows="all")  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="match_number"):
        payments.match(rules, measures={"n": "match_number()"})
    with pytest.raises(PlanError, match="max_rules"):
        payments.match(rules, max_rules=0)
    with pytest.raises(UnknownColumn, match="pattern"):
        payments.match(pipeline.table("other", schema="name STRING, patern STRING", key="name"))
    with pytest.raises(PlanError, match="one STRING column"):
        payments.match(pipeline.table("numbered", schema="id BIGINT, pattern STRING", key="id"))
    with pytest.raises(PlanError, match="MAP<STRING, STRING>"):
        payments.match(
            pipeline.table("wrong", schema="name STRING, pattern STRING, define BIGINT", key="name")
        )
    with pytest.raises(PlanError, match="another pipeline"):
        payments.match(hr.Pipeline("other").table("rules", schema=RULES, key="name"))
