"""An output never shows rows of two definitions: where an edit changes what it means, a view is
built again behind the rows that readers see, and a topic is refused by name or accepted by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import ChangesGone, ConfigurationError, PlanChanged
from headrace.testing.fault_points import IN_TASKS, ON_THE_DRIVER
from headrace.testing.pipelines import Died, PipelineTest, Undead
from headrace.testing.plain_spark import PlainSpark
from headrace.views.file import VIEWS_FILE
from headrace.views.reader import ViewReader

pytestmark = pytest.mark.usefixtures("no_syncs")
Rows = list[dict[str, Any]]
Declare = Callable[[hr.Pipeline, hr.Stream], object]
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
FED: Rows = [{"k": n % 3, "v": n, "w": -n} for n in range(12)]


def shop(declare: Declare, *, topic: str = "orders") -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    schema = "k BIGINT NOT NULL, v BIGINT, w BIGINT"
    orders = pipeline.topic(topic, schema=schema, key="k", partitions=2)
    declare(pipeline, orders)
    return pipeline


def started(root: Path, declare: Declare) -> PipelineTest:
    spark: Any = PlainSpark()
    return PipelineTest(shop(declare), root, spark)


def edit(test: PipelineTest, declare: Declare, *accepted: str, topic: str = "orders") -> None:
    test.pipeline = shop(declare, topic=topic)
    test.restart(accept_edits=accepted)


def feed(test: PipelineTest, rows: Rows = FED, topic: str = "orders") -> None:
    test.feed(topic, rows)
    test.settle()


def count_where(view: str, condition: str, **names: Any) -> Declare:
    def declare(pipeline: hr.Pipeline, orders: hr.Stream) -> None:
        rows = orders.where(condition) if condition else orders
        pipeline.view(view, rows.group_by("k").aggregate(n=hr.agg.count(), **names))

    return declare


def both(first: Declare, second: Declare) -> Declare:
    def declare(pipeline: hr.Pipeline, orders: hr.Stream) -> None:
        first(pipeline, orders)
        second(pipeline, orders)

    return declare


def counts(test: PipelineTest, view: str) -> dict[int, int]:
    return {row["k"]: row["n"] for row in test.view(view)}


def expected(condition: Callable[[int], bool], times: int = 1) -> dict[int, int]:
    result: dict[int, int] = {}
    for row in FED * times:
        if condition(row["v"]):
            result[row["k"]] = result.get(row["k"], 0) + 1
    return result


# What went wrong


@pytest.mark.parametrize("named", [False, True])
def test_views_whose_names_were_swapped_showed_each_others_rows(
    tmp_path: Path, named: bool
) -> None:
    def views(small: str, large: str) -> Declare:
        names = ({"name": "low"}, {"name": "high"}) if named else ({}, {})
        return both(
            count_where(small, "v < 4", **names[0]), count_where(large, "v >= 4", **names[1])
        )

    with started(tmp_path, views("a", "b")) as test:
        feed(test)
        edit(test, views("b", "a"))
        feed(test)
        assert counts(test, "b") == expected(lambda v: v < 4, 2)
        assert counts(test, "a") == expected(lambda v: v >= 4, 2)
        assert [query.name for query in test.runner.queries] != []
        test.restart(lose_local_store=True)
        feed(test)
        assert counts(test, "a") == expected(lambda v: v >= 4, 3)


def named_totals(low: str, high: str, *, behind: bool = False) -> Declare:
    """Two aggregates of these names, at the end of their views or behind another step."""

    def declare(pipeline: hr.Pipeline, orders: hr.Stream) -> None:
        for view, condition, name in (("a", "v < 4", low), ("b", "v >= 4", high)):
            totals = orders.where(condition).group_by("k").aggregate(n=hr.agg.count(), name=name)
            if behind:
                totals = totals.top(9, by="n", name=f"top_{view}")
            pipeline.view(view, totals)

    return declare


@pytest.mark.parametrize("behind", [False, True])
def test_steps_that_exchanged_names_went_on_with_each_others_state(
    tmp_path: Path, behind: bool
) -> None:
    """The views mean what they meant, but a step finds its state by its name."""
    with started(tmp_path, named_totals("low", "high", behind=behind)) as test:
        feed(test)
        edit(test, named_totals("high", "low", behind=behind))
        feed(test)
        assert counts(test, "a") == expected(lambda v: v < 4, 2)
        assert counts(test, "b") == expected(lambda v: v >= 4, 2)


def test_topics_behind_steps_that_exchanged_names_are_refused(tmp_path: Path) -> None:
    def totals(low: str, high: str) -> Declare:
        def declare(pipeline: hr.Pipeline, orders: hr.Stream) -> None:
            for topic, condition, name in (("a", "v < 4", low), ("b", "v >= 4", high)):
                rows = orders.where(condition).group_by("k")
                pipeline.write(topic, rows.aggregate(n=hr.agg.count(), name=name))

        return declare

    with started(tmp_path, totals("low", "high")) as test:
        feed(test)
        for accepted in ((), ("a", "b")):
            with pytest.raises(PlanChanged, match="behind the topic 'a' have exchanged names"):
                edit(test, totals("high", "low"), *accepted)
        edit(test, totals("low", "high"))
        feed(test)
        folded = test.folded("a", "k")
    assert {k: row["n"] for k, row in folded.items()} == expected(lambda v: v < 4, 2)


def newest(by: str) -> Declare:
    return lambda pipeline, orders: pipeline.view("n", orders.to_table("k", by=by))


def last_of(by: str) -> Declare:
    def declare(pipeline: hr.Pipeline, orders: hr.Stream) -> None:
        last = hr.agg.last("v", by=by)
        pipeline.view("n", orders.group_by("k").aggregate(v=last))

    return declare


@pytest.mark.parametrize("declare", [newest, last_of])
def test_rows_by_arrival_stayed_after_another_order_was_declared(
    tmp_path: Path, declare: Callable[..., Declare]
) -> None:
    """The order of arrival was taken for that of an earlier Headrace, which goes on."""
    with started(tmp_path, declare("_arrival")) as test:
        feed(test)
        assert {row["k"]: row["v"] for row in test.view("n")} == {0: 9, 1: 10, 2: 11}
        edit(test, declare("w"))
        feed(test)
        assert {row["k"]: row["v"] for row in test.view("n")} == {0: 0, 1: 1, 2: 2}


def test_a_view_with_another_views_filter_kept_its_stale_rows(tmp_path: Path) -> None:
    with started(tmp_path, both(count_where("a", "v < 4"), count_where("b", "v >= 4"))) as test:
        feed(test)
        edit(test, both(count_where("a", "v >= 4"), count_where("b", "v >= 4")))
        feed(test)
        assert counts(test, "a") == counts(test, "b") == expected(lambda v: v >= 4, 2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (count_where("n", ""), count_where("n", "v >= 4")),
        (count_where("n", "v < 100"), count_where("n", "v >= 4")),
        (
            lambda p, orders: p.view(
                "n", orders.select("v AS k", "v").group_by("k").aggregate(n=hr.agg.count())
            ),
            lambda p, orders: p.view(
                "n",
                orders.where("v >= 4").select("k", "v").group_by("k").aggregate(n=hr.agg.count()),
            ),
        ),
    ],
)
def test_rows_from_before_a_row_local_edit_stayed_in_the_view(
    tmp_path: Path, before: Declare, after: Declare
) -> None:
    with started(tmp_path, before) as test:
        feed(test)
        edit(test, after)
        feed(test)
        assert counts(test, "n") == expected(lambda v: v >= 4, 2)


def test_a_view_went_on_over_another_input_of_the_same_columns(tmp_path: Path) -> None:
    with started(tmp_path, count_where("n", "", name="n")) as test:
        feed(test)
        edit(test, count_where("n", "", name="n"), topic="returns")
        feed(test, FED[:4], "returns")
        assert counts(test, "n") == {0: 2, 1: 1, 2: 1}


def test_a_table_of_newest_rows_kept_those_that_another_selection_made(tmp_path: Path) -> None:
    def newest(column: str) -> Declare:
        return lambda p, orders: p.view(
            "newest", orders.select("k", f"{column} AS v").to_table("k", name="newest")
        )

    with started(tmp_path, newest("v")) as test:
        feed(test)
        edit(test, newest("w"))
        feed(test, [{"k": 0, "v": 5, "w": 6}])
        assert {row["k"]: row["v"] for row in test.view("newest")} == {0: 6, 1: -10, 2: -11}


def test_windows_kept_what_another_delay_had_made_late(tmp_path: Path) -> None:
    def minutes(delay: str) -> hr.Pipeline:
        pipeline = hr.Pipeline("shop")
        clicks = pipeline.topic(
            "clicks", schema="k BIGINT, at TIMESTAMP", event_time=hr.EventTime("at", delay=delay)
        )
        rows = clicks.window(hr.tumbling("1 minute")).group_by("k").aggregate(n=hr.agg.count())
        pipeline.view("minutes", rows)
        return pipeline

    def at(second: int) -> Rows:
        return [{"k": 1, "at": NOON + timedelta(seconds=second)}]

    spark: Any = PlainSpark()
    with PipelineTest(minutes("0 seconds"), tmp_path, spark) as test:
        for second in (10, 130, 20, 400):
            feed(test, at(second), "clicks")
        assert [row["n"] for row in test.view("minutes")] == [1, 1]
        test.pipeline = minutes("5 minutes")
        test.restart()
        test.settle()
        feed(test, at(1000), "clicks")
        assert [row["n"] for row in test.view("minutes")] == [2, 1, 1]


def test_matches_of_rules_kept_measures_that_were_edited(tmp_path: Path) -> None:
    def matches(measure: str) -> hr.Pipeline:
        pipeline = hr.Pipeline("shop")
        schema = "k BIGINT, v BIGINT, at TIMESTAMP"
        time = hr.EventTime("at")
        clicks = pipeline.topic("clicks", schema=schema, key="k", event_time=time)
        rules = pipeline.table("rules", schema="rule STRING, pattern STRING", key="rule")
        found = clicks.match(rules, measures={"v": measure}, within="1 hour", name="match")
        pipeline.view("found", found.to_table("k", name="found"))
        return pipeline

    clicks = [{"k": 1, "v": n, "at": NOON + timedelta(minutes=n)} for n in range(3)]
    spark: Any = PlainSpark()
    with PipelineTest(matches("first(v)"), tmp_path, spark) as test:
        test.feed("rules", [{"rule": "two", "pattern": "a b"}])
        test.settle()
        feed(test, clicks, "clicks")
        assert [row["v"] for row in test.view("found")] == [0]
        test.pipeline = matches("last(v)")
        test.restart()
        test.settle()
        assert [row["v"] for row in test.view("found")] == [1]


def test_device_times_of_another_column_stood_beside_the_old_ones(tmp_path: Path) -> None:
    def newest(event: str) -> hr.Pipeline:
        pipeline = hr.Pipeline("shop")
        time = hr.device_time(event=event, sent="sent", received="received", device="k")
        readings = pipeline.topic(
            "readings",
            schema="k BIGINT, a TIMESTAMP, b TIMESTAMP, sent TIMESTAMP, received TIMESTAMP",
            event_time=time,
        )
        pipeline.view("newest", readings.to_table("k", by="_arrival", name="newest"))
        return pipeline

    row = {"k": 1, "a": NOON, "b": NOON - timedelta(hours=1), "sent": NOON, "received": NOON}
    spark: Any = PlainSpark()
    with PipelineTest(newest("a"), tmp_path, spark) as test:
        feed(test, [row], "readings")
        assert [row["event_time"] for row in test.view("newest")] == [NOON]
        test.pipeline = newest("b")
        test.restart()
        test.settle()
        assert [row["event_time"] for row in test.view("newest")] == [NOON - timedelta(hours=1)]


# Topics


def written(condition: str, name: str = "big") -> Declare:
    return lambda p, orders: p.write(name, orders.where(condition))


def test_a_topic_went_on_with_rows_of_two_definitions(tmp_path: Path) -> None:
    with started(tmp_path, written("v >= 4")) as test:
        feed(test)
        with pytest.raises(PlanChanged, match=r"'big'(.|\n)*up to tick 1(.|\n)*--accept-edit big"):
            edit(test, written("v >= 8"))
        edit(test, written("v>=4"))
        feed(test)
        assert len(test.rows("big")) == 16
        edit(test, written("v >= 8"), "big")
        feed(test)
        assert len(test.rows("big")) == 20
        test.restart()  # what was accepted is remembered
        feed(test)
        assert len(test.rows("big")) == 24


def test_a_topic_that_was_a_view_lacked_the_rows_from_before(tmp_path: Path) -> None:
    def totals(*, written: bool) -> Declare:
        def declare(pipeline: hr.Pipeline, orders: hr.Stream) -> None:
            table = orders.group_by("k").aggregate(n=hr.agg.count(), name="totals")
            (pipeline.write if written else pipeline.view)("n", table)

        return declare

    with started(tmp_path, totals(written=False)) as test:
        feed(test)
        edit(test, totals(written=True))
        test.settle()
        assert {k: row["n"] for k, row in test.folded("n", "k").items()} == expected(lambda _: True)
        edit(test, totals(written=False))
        feed(test)
        assert counts(test, "n") == expected(lambda _: True, 2)


def test_swapped_topics_cannot_be_accepted(tmp_path: Path) -> None:
    def totals(first: str, second: str) -> Declare:
        def declare(pipeline: hr.Pipeline, orders: hr.Stream) -> None:
            for name, condition in ((first, "v < 4"), (second, "v >= 4")):
                rows = orders.where(condition).group_by("k")
                pipeline.write(
                    name,
                    rows.aggregate(n=hr.agg.count(), name=f"at{condition[-1]}-{len(condition)}"),
                )

        return declare

    with started(tmp_path, totals("a", "b")) as test:
        feed(test)
        with pytest.raises(PlanChanged, match="The topic 'a'"):
            edit(test, totals("b", "a"))
        with pytest.raises(PlanChanged, match="'a' shows the rows of another step"):
            edit(test, totals("b", "a"), "a", "b")


@pytest.mark.parametrize("declared", ["alert", "late rows"])
def test_alerts_and_late_rows_are_topics_too(tmp_path: Path, declared: str) -> None:
    def pipeline(least: int) -> hr.Pipeline:
        made = hr.Pipeline("shop")
        clicks = made.topic(
            "clicks", schema="k BIGINT, at TIMESTAMP", event_time=hr.EventTime("at")
        )
        rows = clicks.where(f"k >= {least}")
        if declared == "alert":
            made.alert("many", rows)
        else:
            minutes = rows.window(hr.tumbling("1 minute"), late=hr.late.divert("late"))
            made.view("minutes", minutes.group_by("k").aggregate(n=hr.agg.count()))
        return made

    name = "alert.many" if declared == "alert" else "late"
    spark: Any = PlainSpark()
    with PipelineTest(pipeline(0), tmp_path, spark) as test:
        for hour in (0, 5, 0):
            feed(test, [{"k": 3, "at": NOON + timedelta(hours=hour)}], "clicks")
        test.pipeline = pipeline(1)
        with pytest.raises(PlanChanged, match=f"The topic '{name}'"):
            test.restart()
        before = len(test.rows(name))
        test.restart(accept_edits=[name])
        feed(test, [{"k": 3, "at": NOON}], "clicks")
        assert len(test.rows(name)) == before + 1


def test_a_view_beside_an_accepted_topic_is_built_again_and_stays_apart(tmp_path: Path) -> None:
    def totals(least: int) -> Declare:
        def declare(pipeline: hr.Pipeline, orders: hr.Stream) -> None:
            rows = orders.where(f"v >= {least}").group_by("k")
            table = rows.aggregate(n=hr.agg.count(), name="totals")
            pipeline.write("changes", table)
            pipeline.view("n", table)

        return declare

    with started(tmp_path, totals(0)) as test:
        feed(test)
        edit(test, totals(4), "changes")
        for _ in range(2):
            feed(test)
            test.restart(lose_local_store=True)
        assert counts(test, "n") == expected(lambda v: v >= 4, 3)
        mixed = expected(lambda _: True, 1)
        for key, count in expected(lambda v: v >= 4, 2).items():
            mixed[key] += count
        assert {k: row["n"] for k, row in test.folded("changes", "k").items()} == mixed


def test_a_view_whose_edit_is_accepted_keeps_its_rows(tmp_path: Path) -> None:
    with started(tmp_path, count_where("n", "v < 4")) as test:
        feed(test)
        edit(test, count_where("n", "v >= 4"), "n")
        feed(test)
        test.restart()
        assert counts(test, "n") == expected(lambda _: True)


def test_an_edit_of_no_output_cannot_be_accepted(tmp_path: Path) -> None:
    with started(tmp_path, count_where("n", "")) as test:
        feed(test)
        with pytest.raises(ConfigurationError, match="no output 'm'"):
            test.restart(accept_edits=["m"])


# What is the same


def with_columns(*columns: str, more: bool = False) -> Declare:
    def declare(pipeline: hr.Pipeline, orders: hr.Stream) -> None:
        rows = orders.with_columns(**{name: name[-1] for name in ("x_v", *columns)})
        totals = rows.where("v >= 4").group_by("k").aggregate(n=hr.agg.count(), name="totals")
        pipeline.view("n", totals)
        pipeline.write("changes", totals)
        if more:
            pipeline.view("more", totals)

    return declare


def test_columns_that_an_output_does_not_use_are_not_its_meaning(tmp_path: Path) -> None:
    with started(tmp_path, with_columns()) as test:
        feed(test)
        for columns in (("double_v",), ("double_v", "double_w"), ()):
            edit(test, with_columns(*columns))
            assert [query.name for query in test.runner.queries] == ["main"]
            feed(test)
        assert counts(test, "n") == expected(lambda v: v >= 4, 4)
        edit(test, with_columns("double_v", more=True))
        feed(test)
        assert [query.name for query in test.runner.queries] == ["main"]
        assert counts(test, "more") == counts(test, "n") == expected(lambda v: v >= 4, 5)


# Readers, while a view is built again


def shown(test: PipelineTest, view: str) -> tuple[int, dict[int, int]]:
    with ViewReader(test.state / VIEWS_FILE) as reader, reader.snapshot() as snap:
        return snap.tick(view), {row["k"]: row["n"] for row in snap.table(view).to_pylist()}


def test_readers_see_the_old_rows_until_the_new_ones_are_complete(tmp_path: Path) -> None:
    with started(tmp_path, count_where("n", "v < 4")) as test:
        for _ in range(4):
            feed(test)
        old = shown(test, "n")
        edit(test, count_where("n", "v >= 4"))
        for done in range(3):
            test.step(1)
            assert shown(test, "n") == old, f"{done + 1} of 4 ticks are built again"
            if done == 1:
                test.restart()
        total = "SELECT sum(n) AS n FROM n"
        with ViewReader(test.state / VIEWS_FILE) as reader:
            assert [info.name for info in reader.views()] == ["n"]
            assert reader.sql(total).to_pylist() == [{"n": sum(old[1].values())}]
            test.step(1)
            assert shown(test, "n") == (old[0], expected(lambda v: v >= 4, 4))
            new = sum(expected(lambda v: v >= 4, 4).values())
            assert reader.sql(total).to_pylist() == [{"n": new}]
        with pytest.raises(ChangesGone):
            test.changes("n", old[0] - 1)
        feed(test)
        assert [tick for tick, _ in test.changes("n", old[0])] == [old[0] + 1]


def test_an_edit_that_is_undone_before_the_view_is_complete(tmp_path: Path) -> None:
    with started(tmp_path, count_where("n", "v < 4")) as test:
        for _ in range(3):
            feed(test)
        edit(test, count_where("n", "v >= 4"))
        test.step(1)
        edit(test, count_where("n", "v < 4"))
        test.settle()
        feed(test)
        assert counts(test, "n") == expected(lambda v: v < 4, 4)


IN_COMMITS = ("in the views' commit", "between views and log", "the log was committed")


@pytest.mark.parametrize(
    "point",
    [
        *IN_COMMITS,
        *(
            pytest.param(point, marks=pytest.mark.slow)
            for point in (*IN_TASKS, *ON_THE_DRIVER)
            if point not in IN_COMMITS
        ),
    ],
)
def test_a_view_that_is_built_again_switches_at_once_through_kills(
    tmp_path: Path, point: str
) -> None:
    declared = {
        old: both(count_where("n", "v < 4" if old else "v >= 4"), written("v >= 0"))
        for old in (True, False)
    }
    with started(tmp_path, declared[True]) as test:
        for _ in range(2):
            feed(test)
        old = shown(test, "n")
        edit(test, declared[False])
        new = (old[0], expected(lambda v: v >= 4, 2))
        for _ in range(8):
            try:
                test.step(1, dies=point)
            except Died:
                assert shown(test, "n") in (old, new)
                test.restart()
            except Undead:
                assert shown(test, "n") in (old, new)
            else:
                raise AssertionError
            test.step(1)
        assert shown(test, "n") == new
        feed(test)
        assert counts(test, "n") == expected(lambda v: v >= 4, 3)
        assert len(test.rows("big")) == 36


# Random pipelines, edited at random


CONDITIONS: dict[str, Callable[[int], bool]] = {
    "v >= 0": lambda v: v >= 0,
    "v < 6": lambda v: v < 6,
    "v <> 3": lambda v: v != 3,
    "v >= 9": lambda v: v >= 9,
}
Definition = tuple[str, str]
"""A condition, and an aggregate."""


def define(views: dict[str, Definition], seed: int, *, named: bool) -> Declare:
    """Views in any order, with any spelling; some share the steps of their definition. Some steps
    have names, if `named`.
    """

    def declare(pipeline: hr.Pipeline, orders: hr.Stream) -> None:
        chance = random.Random(seed)
        shared: dict[Definition, hr.Table] = {}
        names = chance.sample(["p", "q", "r", "s"], 4) if named else []
        for view in chance.sample(sorted(views), len(views)):
            condition, aggregate = views[view]
            spelled = chance.choice([condition, f"({condition})", condition.replace(" ", "  ")])
            if views[view] not in shared or chance.random() < 0.5:
                n = hr.agg.count() if aggregate == "count" else hr.agg.sum("v")
                name = names.pop() if names and chance.random() < 0.8 else None
                rows = orders.where(spelled).group_by("k")
                shared[views[view]] = rows.aggregate(n=n, name=name)
            pipeline.view(view, shared[views[view]])

    return declare


def answer(definition: Definition, fed: Rows) -> dict[int, int]:
    condition, aggregate = definition
    result: dict[int, int] = {}
    for row in fed:
        if CONDITIONS[condition](row["v"]):
            added = 1 if aggregate == "count" else row["v"]
            result[row["k"]] = result.get(row["k"], 0) + added
    return result


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 44))]
)
def test_random_edits_leave_no_view_with_rows_of_another_definition(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)

    def draw() -> dict[str, Definition]:
        names = chance.sample("abcd", chance.randint(1, 4))
        kinds = ("count", "sum")
        return {n: (chance.choice([*CONDITIONS]), chance.choice(kinds)) for n in names}

    named = seed % 2 == 1
    views, fed = draw(), list[dict[str, Any]]()
    declared, refused = define(views, seed, named=named), 0
    with started(tmp_path, declared) as test:
        for number in range(8):
            rows = [
                {"k": chance.randrange(3), "v": chance.randrange(12), "w": 0}
                for _ in range(chance.randint(1, 6))
            ]
            test.feed("orders", rows)
            fed += rows
            test.cut()
            for _ in range(chance.randrange(3)):
                test.step(chance.randint(1, 3))
            if chance.random() < 0.6:
                wanted = draw()
                try:
                    edit(test, define(wanted, number, named=named))
                except PlanChanged:  # a step was edited under its name, or has no state yet
                    refused += 1
                    edit(test, declared)
                else:
                    views, declared = wanted, define(wanted, number, named=named)
            if chance.random() < 0.3:
                test.restart(shards=chance.randint(1, 4), lose_local_store=True)
            test.settle()
            for view, definition in views.items():
                assert counts(test, view) == answer(definition, fed), (view, definition)
    assert named or refused < 6
