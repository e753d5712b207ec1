"""What a user may get wrong: the error names the step and the fix, and comes before Spark is
started where that is possible; what rows get wrong stops nothing that it need not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import headrace as hr
from headrace import errors
from headrace.log.dead_letters import read_dead_letters
from headrace.runtime.failures import failure_reason, is_permanent
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.pipeline.stream import Stream

pytestmark = pytest.mark.usefixtures("no_syncs")
SCHEMA = "k BIGINT, v BIGINT, name STRING, at TIMESTAMP"


def orders(pipeline: hr.Pipeline) -> Stream:
    return pipeline.topic("orders", schema=SCHEMA, key="k")


def timed(pipeline: hr.Pipeline) -> Stream:
    return pipeline.topic("orders", schema=SCHEMA, key="k", event_time="at")


def divert(pipeline: hr.Pipeline, topic: str, *others: str) -> None:
    """Windows whose late rows go to some topics, and a plan of them; the second step's rows have
    fewer columns.
    """
    rows = timed(pipeline)
    for number, (source, late) in enumerate(
        zip((rows, rows.select("at")), (topic, *others), strict=False)
    ):
        table = source.window(hr.tumbling("1 minute"), late=hr.late.divert(late)).aggregate(
            n=hr.agg.count()
        )
        (pipeline.view if number else pipeline.write)(f"counts{number}", table)
    pipeline.plan()


def same_name_twice(pipeline: hr.Pipeline) -> None:
    stream = orders(pipeline)
    pipeline.view("first", stream.to_table("k", name="same"))
    pipeline.view("second", stream.group_by("k").aggregate(n=hr.agg.count(), name="same"))
    pipeline.plan()


# What is declared, the error, and what it says: the step or place, and a way out.
DECLARED: dict[
    str, tuple[Callable[[hr.Pipeline], object], type[errors.HeadraceError], list[str]]
] = {
    "a column that is not there": (
        lambda p: orders(p).where("nmae = 'a'"),
        errors.UnknownColumn,
        ["orders.where", "did you mean 'name'"],
    ),
    "in a named step": (
        lambda p: orders(p).with_columns(x="vv + 1", name="labelled"),
        errors.UnknownColumn,
        ["step labelled", "did you mean 'v'"],
    ),
    "a group that is not there": (
        lambda p: orders(p).group_by("kk"),
        errors.UnknownColumn,
        ["orders.group_by", "did you mean 'k'"],
    ),
    "an aggregate of a column that is not there": (
        lambda p: orders(p).group_by("k").aggregate(s=hr.agg.sum("vv"), name="sums"),
        errors.UnknownColumn,
        ["step sums", "'s'", "did you mean 'v'"],
    ),
    "a type that an aggregate cannot take": (
        lambda p: orders(p).group_by("k").aggregate(s=hr.agg.sum("name")),
        errors.UnfitColumn,
        ["'s' of the step orders.aggregate", "'name' is STRING", "sum takes numbers"],
    ),
    "a sketch over a table": (
        lambda p: orders(p).to_table("k").group_by("v").aggregate(a=hr.agg.approx_distinct("name")),
        errors.StreamOnly,
        ["aggregate", "count_distinct"],
    ),
    "an aggregate of one's own that diverts rows of a table": (
        lambda p: (
            orders(p)
            .to_table("k")
            .group_by("v")
            .aggregate(s=hr.agg.custom(Reversible(), "name"), errors="divert", name="longest")
        ),
        errors.StreamOnly,
        ["'s' of the step longest", "is a table", "would be retracted", "where("],
    ),
    "a duration of a step": (
        lambda p: orders(p).dedupe(on="k", within="a fortnight"),
        errors.BadDuration,
        ["orders.dedupe", "'a fortnight'", "30 seconds"],
    ),
    "a duration of an event time": (
        lambda p: p.topic("o", schema=SCHEMA, event_time=hr.EventTime("at", delay="soon")),
        errors.BadDuration,
        ["delay of the event time 'at'", "30 seconds"],
    ),
    "a cycle": (
        lambda p: p.write("orders", orders(p).where("v > 1")),
        errors.CyclicPlan,
        ["'orders'", "write to another topic"],
    ),
    "two steps with one name": (
        same_name_twice,
        errors.DuplicateStep,
        ["'same'", "to_table", "aggregate", "name="],
    ),
    "an expression that cannot be read": (
        lambda p: orders(p).where("v >"),
        errors.BadExpression,
        ["orders.where", "line 1", "Spark SQL"],
    ),
    "a function that is not there": (
        lambda p: orders(p).select("uper(name) AS n"),
        errors.BadExpression,
        ["orders.select", "did you mean 'upper'"],
    ),
    "types that do not fit": (
        lambda p: orders(p).select("v + name AS x"),
        errors.BadExpression,
        ["orders.select", "BIGINT + STRING", "CAST"],
    ),
    "a view of a stream": (
        lambda p: p.view("all", orders(p)),  # type: ignore[arg-type]
        errors.StreamOnly,
        ["'all'", "to_table"],
    ),
    "a key that is not there": (
        lambda p: p.table("people", schema="id BIGINT", key="ident"),
        errors.UnknownColumn,
        ["'people'", "'id'"],
    ),
    "a window without an event time": (
        lambda p: orders(p).window(hr.tumbling("1 minute")),
        errors.PlanError,
        ["orders.window", "no input declares one", "event_time="],
    ),
    "a window behind a select that loses the event time": (
        lambda p: timed(p).select("k").window(hr.tumbling("1 minute")),
        errors.PlanError,
        ["orders.select", "orders has 'at', which is not kept"],
    ),
    "a window behind an aggregate": (
        lambda p: (
            timed(p).group_by("k").aggregate(n=hr.agg.count()).window(hr.tumbling("1 minute"))
        ),
        errors.PlanError,
        ["orders.aggregate has none", "'at'"],
    ),
    "a size of zero": (
        lambda _: hr.tumbling("0 minutes"),
        errors.PlanError,
        ["size of a tumbling window is zero"],
    ),
    "a negative size": (
        lambda _: hr.sliding("-1 minute"),
        errors.BadDuration,
        ["size of a sliding window '-1 minute' is negative"],
    ),
    "a gap of zero": (
        lambda _: hr.session("0 minutes"),
        errors.PlanError,
        ["gap of a session window is zero"],
    ),
    "a negative gap": (lambda _: hr.session("-5 minutes"), errors.BadDuration, ["gap", "negative"]),
    "a hop of zero": (
        lambda _: hr.hopping("5 minutes", every="0 minutes"),
        errors.PlanError,
        ["hop of a hopping window is zero"],
    ),
    "a hop longer than the size": (
        lambda _: hr.hopping("5 minutes", every="6 minutes"),
        errors.PlanError,
        ["leaves out the rows in between", "every= to the size"],
    ),
    "a hop so short that a row is in thousands of windows": (
        lambda _: hr.hopping("10 days", every="1 second"),
        errors.PlanError,
        ["more than 2,000", "hr.sliding"],
    ),
    "a lateness that keeps windows for ever": (
        lambda _: hr.late.correct("1000 weeks"),
        errors.PlanError,
        ["longer than 10 years", "allow at most"],
    ),
    "a negative lateness": (
        lambda _: hr.late.correct("-1 hour"),
        errors.BadDuration,
        ["allowed lateness '-1 hour' is negative"],
    ),
    "a delay that holds windows back for ever": (
        lambda _: hr.EventTime("at", delay="1000 weeks"),
        errors.PlanError,
        ["delay of the event time 'at'", "10 years"],
    ),
    "a producer that is never given up": (
        lambda _: hr.EventTime("at", idle="1000 weeks"),
        errors.PlanError,
        ["idle time of the event time 'at'", "10 years"],
    ),
    "a time that is never absurd": (
        lambda _: hr.EventTime("at", max_ahead="1000 weeks"),
        errors.PlanError,
        ["max_ahead", "10 years"],
    ),
    "a time zone that is not there": (
        lambda _: hr.tumbling("1 day", timezone="Europe/Berln"),
        errors.PlanError,
        ["did you mean 'Europe/Berlin'"],
    ),
    "a time zone over times without one": (
        lambda p: p.topic("o", schema="at TIMESTAMP_NTZ", event_time="at").window(
            hr.tumbling("1 day", timezone="Europe/Berlin")
        ),
        errors.PlanError,
        ["o.window", "TIMESTAMP_NTZ", "leave the time zone out"],
    ),
    "no window": (
        lambda p: timed(p).window("1 minute"),  # type: ignore[arg-type]
        errors.PlanError,
        ["orders.window", "hr.tumbling"],
    ),
    "no late policy": (
        lambda p: timed(p).window(hr.tumbling("1 day"), late="drop"),  # type: ignore[arg-type]
        errors.PlanError,
        ["orders.window", "hr.late.drop()"],
    ),
    "no emit mode": (
        lambda p: timed(p).window(hr.tumbling("1 day"), emit="finl"),
        errors.PlanError,
        ["did you mean 'final'"],
    ),
    "late rows to a topic with an odd name": (
        lambda p: divert(p, "late rows"),
        errors.PlanError,
        ["'late rows'", "letters"],
    ),
    "late rows to a topic of ours": (
        lambda p: divert(p, "__late.shop"),
        errors.PlanError,
        ["orders.window", "Headrace's own"],
    ),
    "late rows to the input": (
        lambda p: divert(p, "orders"),
        errors.PlanError,
        ["'counts0.window'", "come again"],
    ),
    "late rows to an output": (
        lambda p: divert(p, "counts0"),
        errors.PlanError,
        ["'counts0.window'", "which the pipeline writes"],
    ),
    "late rows of two kinds to one topic": (
        lambda p: divert(p, "late", "late"),
        errors.PlanError,
        ["'counts0.window' and 'counts1.window'", "a topic for each"],
    ),
    "a result that is called as a window's bound": (
        lambda p: timed(p).window(hr.tumbling("1 day")).aggregate(window_end=hr.agg.count()),
        errors.PlanError,
        ["orders.window", "'window_end'", "rename"],
    ),
    "a rate without a window": (
        lambda p: timed(p).group_by("k").aggregate(r=hr.agg.rate("v")),
        errors.PlanError,
        ["'r' of the step orders.aggregate", "window(…)"],
    ),
    "nothing that comes out": (
        lambda p: p.plan(),
        errors.PlanError,
        ["'shop' has no output", "view"],
    ),
}


@pytest.mark.parametrize("mistake", DECLARED)
def test_a_mistake_in_a_declaration_is_named_with_its_step_and_a_way_out(mistake: str) -> None:
    declare, error, said = DECLARED[mistake]
    with pytest.raises(error) as raised:
        declare(hr.Pipeline("shop"))
    missing = [text for text in said if text not in str(raised.value)]
    assert missing == [], str(raised.value)


def test_a_hop_need_not_divide_the_size() -> None:
    assert (
        str(hr.hopping("10 minutes", every="3 minutes")) == "hopping(10 minutes, every=3 minutes)"
    )


def test_a_topic_for_late_rows_that_does_not_fit_is_refused_at_the_start(tmp_path: Path) -> None:
    shop = hr.Pipeline("shop")
    divert(shop, "late_orders")
    session: Any = PlainSpark()
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("late_orders", "k STRING")
        with pytest.raises(
            errors.TopicExists,
            match=r"'counts0.window' diverts late rows to the topic 'late_orders'.*k STRING",
        ):
            PipelineTest(shop, tmp_path, session, log=log)


# At the start of a run, without Spark

FILE = """
import headrace as hr
shop = hr.Pipeline("shop", log={log!r})
orders = shop.topic("orders", schema={schema!r}, key="k")
shop.view("counts", orders.group_by("k").aggregate(n=hr.agg.count()))
"""


def run_without_java(
    directory: Path, schema: str, *options: str
) -> subprocess.CompletedProcess[str]:
    file = directory / "shop.py"
    file.write_text(FILE.format(log=f"file:{directory / 'log'}", schema=schema))
    command = [sys.executable, "-m", "headrace.cli", "run", str(file), *options]
    return subprocess.run(
        command,
        env={**os.environ, "JAVA_HOME": str(directory)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_topic_that_does_not_fit_its_declaration_is_refused_before_spark_is_started(
    tmp_path: Path,
) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("orders", "k STRING, v BIGINT", key="k")
    ran = run_without_java(tmp_path, "k BIGINT, v BIGINT", "--until-caught-up")
    assert ran.returncode != 0
    assert (
        "The topic 'orders' is not as it is declared: k STRING is declared as k BIGINT"
        in ran.stderr
    )
    assert "declare it in the pipeline as it is" in ran.stderr
    assert "Java" not in ran.stderr


def test_with_a_sound_declaration_it_is_java_that_is_missing(tmp_path: Path) -> None:
    """Or the test before would prove nothing."""
    ran = run_without_java(tmp_path, "k BIGINT, v BIGINT", "--until-caught-up")
    assert ran.returncode != 0
    assert "Spark needs Java" in ran.stderr


# Rows


def test_a_null_key_is_diverted_and_counted_and_the_others_go_on(tmp_path: Path) -> None:
    spark: Any = PlainSpark()
    pipeline = hr.Pipeline("shop")
    stream = pipeline.topic("orders", schema="k BIGINT, v BIGINT")
    pipeline.view("newest", stream.to_table("k", name="keyed"))
    with PipelineTest(pipeline, tmp_path, spark) as test:
        test.feed("orders", [{"k": 1, "v": 1}, {"k": None, "v": 2}, {"k": 1, "v": 3}])
        test.settle()
        assert test.view("newest") == [{"k": 1, "v": 3}]
        (dead_letter,) = read_dead_letters(test.log, "keyed")
        assert (
            dead_letter["place"],
            dead_letter["source_partition"],
            dead_letter["source_offset"],
            dead_letter["tick"],
        ) == ("step keyed", 0, 1, 1)
        assert dead_letter["reason"] == "its key is null"
        assert '"v":2' in dead_letter["row"]
        assert test.runner.last_result is not None
        assert test.runner.last_result.counts["keyed.diverted"] == 1
        assert test.runner.last_result.counts["keyed.rows_in"] == 2


@pytest.mark.spark
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("step", ["select", "where", "aggregate"])
def test_a_row_on_which_an_expression_fails_stops_the_run_if_asked_to(
    step: str, table: bool, tmp_path: Path, spark: SparkSession
) -> None:
    shop = hr.Pipeline("shop")
    schema = "id BIGINT, v BIGINT"
    items = (shop.table if table else shop.topic)("items", schema=schema, key="id")
    if step == "select":
        result = items.with_columns(x="100 / v", errors="stop", name="quotient")
    elif step == "where":
        result = items.where("100 / v > 1", errors="stop", name="quotient")
    else:
        result = items.group_by("id").aggregate(x=hr.agg.sum("100 / v"), errors="stop")
    shop.view("result", result if isinstance(result, hr.Table) else result.to_table("id"))
    with PipelineTest(shop, tmp_path, spark) as test:
        test.feed("items", [{"id": 1, "v": 5}, {"id": 2, "v": None}])
        test.settle()
        before = test.view("result")
        assert before
        test.feed("items", [{"id": 3, "v": 0}])
        test.cut()
        with pytest.raises(Exception, match="ExpressionFailed") as raised:
            test.step()
        reason = failure_reason(raised.value)
        assert "failed on the row {'id': 3, 'v': 0" in reason
        assert 'errors="divert"' in reason, "the way out"
        assert is_permanent(raised.value)
        assert test.view("result") == before


class Longest(hr.agg.CustomAggregate):
    """Refuses texts with a dot."""

    state_type = pa.string()
    result_type = pa.string()

    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        if pc.any(pc.match_substring(values, ".")).as_py():
            raise ValueError("no dots, please")
        current = states.to_pylist()
        for group, value in zip(groups.to_pylist(), values.to_pylist(), strict=True):
            current[group] = max(current[group] or "", value or "", key=len)
        return pa.array(current, pa.string())

    def result(self, states: pa.Array) -> pa.Array:
        return states


class Reversible(Longest):
    def retract(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        return states


def words(*, divert: bool) -> hr.Pipeline:
    pipeline = hr.Pipeline("words")
    texts = pipeline.topic("texts", schema="k BIGINT, word STRING")
    longest = texts.group_by("k").aggregate(
        longest=hr.agg.custom(Longest(), "word"),
        n=hr.agg.count(),
        name="longest_word",
        errors="divert" if divert else "null",
    )
    pipeline.view("longest", longest)
    return pipeline


WORDS = [{"k": 1, "word": "a"}, {"k": 1, "word": "b.c"}, {"k": 2, "word": "long"}]


def test_a_users_aggregate_that_raises_diverts_the_row_if_asked_to(tmp_path: Path) -> None:
    spark: Any = PlainSpark()
    with PipelineTest(words(divert=True), tmp_path, spark) as test:
        test.feed("texts", WORDS)
        test.settle()
        assert {row["k"]: (row["longest"], row["n"]) for row in test.view("longest")} == {
            1: ("a", 2),
            2: ("long", 1),
        }
        (dead_letter,) = read_dead_letters(test.log, "longest_word")
        assert dead_letter["place"] == "step longest_word"
        assert '"word":"b.c"' in dead_letter["row"]
        assert "no dots, please" in dead_letter["reason"]


def test_a_users_aggregate_that_raises_stops_the_batch_with_step_row_and_traceback(
    tmp_path: Path,
) -> None:
    spark: Any = PlainSpark()
    with PipelineTest(words(divert=False), tmp_path, spark) as test:
        test.feed("texts", WORDS)
        test.cut()
        with pytest.raises(errors.InputError) as raised:
            test.step()
        check_reason(str(raised.value))
        assert test.view("longest") == []


@pytest.mark.spark
def test_on_spark_too(tmp_path: Path, spark: SparkSession) -> None:
    """What a worker raises comes through the JVM as text; what the runner says of it must still be
    all of that, and no more.
    """
    with PipelineTest(words(divert=False), tmp_path, spark) as test:
        test.feed("texts", WORDS)
        test.cut()
        with pytest.raises(Exception, match="no dots, please") as raised:
            test.step()
        reason = failure_reason(raised.value)
        check_reason(reason)
        assert "java" not in reason


def check_reason(text: str) -> None:
    assert (
        "The aggregate 'longest' of the step 'longest_word' failed on the row {'k': 1, 'word':"
        " 'b.c'" in text
    )
    assert "ValueError: no dots, please" in text
    assert 'raise ValueError("no dots, please")' in text, "the traceback of the user's own lines"
    assert 'errors="divert"' in text, "the way out"
