"""Users' functions wherever an expression stands: each step gives what it gives with the same
expression in SQL, whatever the batches and shards.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import headrace as hr
from headrace.errors import BadExpression, HeadraceError
from headrace.testing.pipelines import PipelineTest

pytestmark = pytest.mark.usefixtures("no_syncs")
SCHEMA = "id BIGINT NOT NULL, k BIGINT, v BIGINT, w BIGINT, at TIMESTAMP"
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
Text = Callable[[str], str]
"""An expression with calls of functions, or the same one in SQL."""


@hr.udf("BIGINT", name="every_twice")
def twice(n: pa.Array) -> pa.Array:
    return pc.multiply(n, 2)


@hr.udf("BOOLEAN", name="every_odd", each_row=True)
def odd(n: int | None) -> bool | None:
    return None if n is None else n % 2 == 1


@hr.udf("TIMESTAMP", name="every_time", each_row=True)
def same_time(at: datetime) -> datetime:
    return at


CALLS = {
    "every_odd(every_twice(w) + v)": "((w * 2 + v) % 2 = 1)",
    "every_twice(w)": "(w * 2)",
    "every_twice(v + 1)": "((v + 1) * 2)",
    "every_twice(v)": "(v * 2)",
    "every_twice(n.v)": "(n.v * 2)",
    "every_twice(id)": "(id * 2)",
    "every_odd(v)": "(v % 2 = 1)",
    "every_odd(n.v)": "(n.v % 2 = 1)",
    "every_time(at)": "at",
}


def in_sql(text: str) -> str:
    for call, expression in CALLS.items():
        text = text.replace(call, expression)
    return text


STEPS: dict[str, Callable[[Text, Any, Any, Any], Any]] = {
    "aggregates": lambda text, rows, _, __: rows.group_by("k").aggregate(
        s=hr.agg.sum(text("every_twice(v) + 1")),
        c=hr.agg.count(where=text("every_odd(v)")),
        b=hr.agg.max_by(text("every_twice(w)"), by=text("every_twice(id)")),
    ),
    "groups": lambda text, rows, _, __: rows.group_by(
        text("every_twice(v) AS d"), odd=text("every_odd(v)")
    ).aggregate(n=hr.agg.count()),
    "groups of a table": lambda text, _, __, items: items.group_by(
        text("every_odd(v) AS d")
    ).aggregate(n=hr.agg.count(), s=hr.agg.sum(text("every_twice(w)"))),
    "windows": lambda text, rows, _, __: (
        rows.window(hr.tumbling("1 minute"))
        .group_by(text("every_odd(v) AS d"))
        .aggregate(s=hr.agg.sum(text("every_twice(v + 1)")))
    ),
    "frames": lambda text, rows, _, __: (
        rows.over("k")
        .aggregate(p=hr.over.lag(text("every_twice(v)")), s=hr.agg.sum(text("every_twice(w)")))
        .group_by("k")
        .aggregate(p=hr.agg.sum("p"), s=hr.agg.sum("s"))
    ),
    "join with a table": lambda text, rows, _, items: (
        rows.join(
            items, left_on=text("every_twice(v)"), right_on=text("every_twice(id)"), suffix="_r"
        )
        .group_by("k")
        .aggregate(n=hr.agg.count(), s=hr.agg.sum("w_r"))
    ),
    "join of streams": lambda text, rows, others, _: (
        rows.join(
            others,
            left_on=text("every_twice(v)"),
            right_on=text("every_twice(w)"),
            before="1 minute",
            until=text("every_time(at)"),
            suffix="_r",
        )
        .group_by("k")
        .aggregate(n=hr.agg.count())
    ),
    "where": lambda text, _, __, items: items.where(text("every_odd(every_twice(w) + v)")),
    "match": lambda text, rows, _, __: rows.match(
        "m n+",
        define={
            "m": text("every_odd(v)"),
            "n": text("every_twice(n.v) >= m.v AND NOT every_odd(v)"),
        },
        measures={
            "a": text("first(every_twice(v))"),
            "b": text("sum(every_twice(n.v))"),
            "c": text("every_twice(v)"),
        },
        within="2 minutes",
        late=hr.late.divert("late_of_match"),
        timed_out="too_late",
    ).to_table("k", by="_arrival"),
    "match, all rows": lambda text, rows, _, __: rows.match(
        "m n+",
        define={"m": text("every_odd(v)")},
        measures={"c": text("last(every_twice(n.v))")},
        within="2 minutes",
        rows="all",
    ).to_table("k", by="_arrival"),
    "match in SQL": lambda text, rows, _, __: rows.pipeline.sql(
        "SELECT k, c, d FROM clicks MATCH_RECOGNIZE (PARTITION BY k ORDER BY at MEASURES"
        f" {text('first(every_twice(v))')} AS c, {text('final last(every_twice(n.v))')} AS d"
        f" PATTERN (m n+) WITHIN INTERVAL '2' MINUTE DEFINE m AS {text('every_odd(v)')})"
    ).to_table("k", by="_arrival"),
}


def pipeline_of(name: str, text: Text) -> hr.Pipeline:
    pipeline = hr.Pipeline("every")
    time = hr.EventTime("at", delay="1 minute")
    rows = pipeline.topic("clicks", schema=SCHEMA, key="k", event_time=time, partitions=2)
    others = pipeline.topic("others", schema=SCHEMA, key="k", event_time=time)
    items = pipeline.table("items", schema=SCHEMA, key="id")
    pipeline.view("result", STEPS[name](text, rows, others, items))
    return pipeline


def fed(seed: int) -> list[dict[str, list[dict[str, Any]]]]:
    chance = Random(seed)
    return [
        {
            topic: [
                {
                    "id": chance.randrange(4),
                    "k": chance.choice([0, 1]),
                    "v": chance.choice([None, 0, 1, 2, 3]),
                    "w": chance.choice([None, 1, 2, 4]),
                    "at": NOON + timedelta(seconds=30 * tick + chance.randrange(-60, 30)),
                }
                for _ in range(chance.randrange(7))
            ]
            for topic in ("items", "clicks", "others")
        }
        for tick in range(6)
    ]


@pytest.mark.parametrize("name", STEPS)
def test_a_function_gives_what_its_expression_gives(tmp_path: Path, name: str) -> None:
    results = []
    texts: list[tuple[Text, int]] = [(str, 4), (in_sql, 1)]
    for number, (text, max_ticks) in enumerate(texts):
        test = PipelineTest(pipeline_of(name, text), tmp_path / f"{number}", shards=number + 1)
        with test:
            for rows in fed(3):
                for topic, given in rows.items():
                    if given:
                        test.feed(topic, given)
                test.cut(forced=True)
            while test.step(max_ticks):
                continue
            test.settle(final=True)
            sides = [
                sorted(str(row[1:]) for row in test.rows(topic))
                for topic in ("late_of_match", "too_late")
                if topic in test.log.topics()
            ]
            results.append((sorted(map(str, test.view("result"))), sides))
    assert results[0] == results[1]
    assert results[0][0]


@pytest.mark.parametrize(
    ("define", "message"),
    [
        ("every_twice(n.v + m.v) > 1", r"'every_twice\(n\.v \+ m\.v\)', which looks at several"),
        ("every_twice(avg(m.v)) > 1", "call it within first"),
        ("every_twice(m.v, 2) > 1", "takes 1 arguments, and was given 2"),
    ],
)
def test_a_call_over_several_rows_of_a_match_is_refused(define: str, message: str) -> None:
    pipeline = hr.Pipeline("every")
    rows = pipeline.topic("clicks", schema=SCHEMA, key="k", event_time="at")
    with pytest.raises(HeadraceError, match=message):
        rows.match("m n", define={"n": define}, within="1 minute")


def test_errors_show_calls_as_they_are_written() -> None:
    pipeline = hr.Pipeline("every")
    rows = pipeline.topic("clicks", schema=SCHEMA, key="k", event_time="at")
    with pytest.raises(HeadraceError, match=r"The condition 'every_twice\(v\)' .* is BIGINT"):
        rows.where("every_twice(v)")
    with pytest.raises(HeadraceError, match=r"sum\(every_odd\(v\)\), but 'every_odd\(v\)' is BOOL"):
        rows.aggregate(s=hr.agg.sum("every_odd(v)"))
    with pytest.raises(BadExpression, match=r"'every_odd\(every_twice\(v\)\)', which has no name"):
        rows.group_by("every_odd(every_twice(v))")
