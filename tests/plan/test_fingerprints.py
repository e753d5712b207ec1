"""Edits of a pipeline: which are continued, and under which name a step's state is found; which are
refused, since rows that were emitted would never be retracted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.engine.ledger import MAIN_QUERY, Ledger, LedgerEntry
from headrace.engine.ticks import TickJournal
from headrace.errors import PlanChanged
from headrace.log.api import Log
from headrace.plan.plan import PipelinePlan
from headrace.runtime.query_assignment import (
    Arrangement,
    arrange,
    arrange_query,
    known_names,
    note_name,
)
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

Declared = Callable[[hr.Pipeline], object]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        yield log


def plan_of(declare: Declared) -> PipelinePlan:
    pipeline = hr.Pipeline("shop")
    declare(pipeline)
    return pipeline.plan()


def run_once(log: Log, plan: PipelinePlan) -> None:
    """As if a first batch had been committed."""
    ledger = Ledger.open(log, plan.name)
    ledger.take_over()
    tx = ledger.transaction()
    tx.set_note(note_name(plan.name), Arrangement({MAIN_QUERY: arrange_query(plan)}).to_json())
    ledger.add(tx, LedgerEntry(ledger.epoch, MAIN_QUERY, 1))
    ledger.commit(tx)


def goes_on(log: Log, declare: Declared) -> Arrangement:
    plan = known_names(plan_of(declare), log)
    for output in plan.outputs:
        log.create_topic(output.name, "k BIGINT", exist_ok=True)
    return arrange(
        plan, log, Ledger.open(log, "shop"), TickJournal.open(log, "shop"), lambda _view: 1
    )


def people(pipeline: hr.Pipeline, name: str = "people") -> Any:
    return pipeline.table(name, schema="id BIGINT, city STRING, age BIGINT", key="id")


def over_table(
    condition: str = "age > 20", *, topic: str = "people", errors: str = "null"
) -> dict[str, Declared]:
    """What may stand behind a table with a condition, and be written to a topic: the table itself,
    a step that keeps state, one behind a join of tables.
    """

    def kept(pipeline: hr.Pipeline) -> Any:
        return people(pipeline, topic).where(condition, name="grown", errors=errors)

    def joined(pipeline: hr.Pipeline) -> None:
        cities = pipeline.table("cities", schema="city STRING, size BIGINT", key="city")
        pipeline.write(
            "sizes",
            kept(pipeline).join(cities, on="city").group_by("size").aggregate(n=hr.agg.count()),
        )

    return {
        "The output 'totals'": lambda pipeline: pipeline.write("totals", kept(pipeline)),
        "The step 'counted.aggregate'": lambda pipeline: pipeline.write(
            "counted", kept(pipeline).group_by("city").aggregate(n=hr.agg.count())
        ),
        "The step 'sizes.join'": joined,
    }


@pytest.mark.parametrize("who", list(over_table()))
@pytest.mark.parametrize("edit", [{"condition": "age > 10"}, {"errors": "divert"}])
def test_steps_between_a_table_and_its_consumers_are_fingerprinted(
    log: Log, who: str, edit: dict[str, str]
) -> None:
    run_once(log, plan_of(over_table()[who]))
    assert list(goes_on(log, over_table()[who]).queries) == [MAIN_QUERY]
    with pytest.raises(
        PlanChanged, match=rf"{who} reads a table that is computed differently(.|\n)*grown: age > "
    ):
        goes_on(log, over_table(**edit)[who])


def shown_table(condition: str) -> Declared:
    return lambda pipeline: pipeline.view("shown", people(pipeline).where(condition))


def test_a_view_of_a_table_that_is_computed_differently_is_computed_by_another_query(
    log: Log,
) -> None:
    run_once(log, plan_of(shown_table("age > 20")))
    assert list(goes_on(log, shown_table("(age>20)")).queries) == [MAIN_QUERY]
    assert MAIN_QUERY not in goes_on(log, shown_table("age > 10")).queries


@pytest.mark.parametrize("written", [False, True])
def test_a_different_input_table_is_incompatible(log: Log, written: bool) -> None:
    def two(first: str, second: str) -> Declared:
        def declare(pipeline: hr.Pipeline) -> None:
            tables = {name: people(pipeline, name) for name in ("people", "others")}
            output = pipeline.write if written else pipeline.view
            output("shown", tables[first])
            output("rest", tables[second])

        return declare

    run_once(log, plan_of(two("people", "others")))
    if not written:
        assert MAIN_QUERY not in goes_on(log, two("others", "people")).queries
        return
    with pytest.raises(
        PlanChanged, match="The output 'shown' reads a table that is computed differently"
    ):
        goes_on(log, two("others", "people"))


def counted(condition: str) -> Declared:
    def declare(pipeline: hr.Pipeline) -> None:
        orders = pipeline.topic("orders", schema="k BIGINT, v BIGINT")
        pipeline.view("counted", orders.where(condition).group_by("k").aggregate(n=hr.agg.count()))

    return declare


def test_a_view_whose_stateless_steps_changed_is_computed_by_a_query_of_its_own(log: Log) -> None:
    run_once(log, plan_of(counted("v > 1")))
    assert list(goes_on(log, counted("v > 1")).queries) == [MAIN_QUERY]
    assert MAIN_QUERY not in goes_on(log, counted("v > 2")).queries


@pytest.mark.parametrize("respelled", ["v>1", "(v > 1)", "v  >  1 -- more than one", "\n v > 1 "])
def test_a_formatted_expression_was_another_definition(log: Log, respelled: str) -> None:
    run_once(log, plan_of(counted("v > 1")))
    assert list(goes_on(log, counted(respelled)).queries) == [MAIN_QUERY]
    totals = "The output 'totals'"
    run_once(log, plan_of(over_table()[totals]))
    assert list(goes_on(log, over_table("(age>20)")[totals]).queries) == [MAIN_QUERY]


def without_meanings(arrangement: Arrangement) -> str:
    """The note of an arrangement as version 1 wrote it."""
    stored = json.loads(arrangement.to_json())
    stored["version"] = 1
    for query in stored["queries"].values():
        for name in ("meanings", "parsed_tables", "continued", "output_steps", "former"):
            del query[name]
        for step in query["steps"].values():
            del step["parsed_tables"], step["parsed_lineage"]
    return json.dumps(stored)


def test_a_log_without_meanings_goes_on_unless_a_step_has_something_else_upstream(
    log: Log,
) -> None:
    plan = plan_of(counted("v > 1"))
    run_once(log, plan)
    ledger = Ledger.open(log, plan.name)
    ledger.take_over()
    tx = ledger.transaction()
    note = without_meanings(Arrangement({MAIN_QUERY: arrange_query(plan)}))
    tx.set_note(note_name(plan.name), note)
    ledger.commit(tx)
    assert list(goes_on(log, counted("v > 1")).queries) == [MAIN_QUERY]
    assert MAIN_QUERY not in goes_on(log, counted("v > 2")).queries


# Names


def totals(*views: str, other: str | None = None, name: str | None = None) -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="k BIGINT, v BIGINT")
    counted = orders.group_by("k").aggregate(n=hr.agg.count(), name=name)
    if other is not None:
        pipeline.view(other, orders.group_by("k").aggregate(n=hr.agg.sum("v")))
    for view in views:
        pipeline.view(view, counted)
    return pipeline


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (totals("b"), totals("a", "b")),
        (totals("a", "b"), totals("b")),
        (totals("a", "b"), totals("b", "a")),
        (totals("a", "b"), totals("b", other="c")),
        (totals("b"), totals("a", "b", other="c")),
    ],
)
def test_outputs_that_come_and_go_leave_steps_their_state(
    tmp_path: Path, first: hr.Pipeline, then: hr.Pipeline
) -> None:
    spark: Any = PlainSpark()
    with PipelineTest(first, tmp_path, spark) as test:
        test.feed("orders", [{"k": 0, "v": 1}])
        test.settle()
        test.pipeline = then
        for _ in range(2):
            test.restart()
            test.feed("orders", [{"k": 0, "v": 1}])
            test.settle()
        assert test.view("b") == [{"k": 0, "n": 3}]


def test_an_output_that_returns_changed_does_not_take_the_name_of_a_step_that_stayed(
    tmp_path: Path,
) -> None:
    spark: Any = PlainSpark()
    with PipelineTest(totals("a", "b"), tmp_path, spark) as test:
        for pipeline in (
            totals("a", "b"),
            totals("b"),
            totals("b", other="a"),
            totals("b", other="a"),
        ):
            test.pipeline = pipeline
            test.restart()
            test.feed("orders", [{"k": 0, "v": 5}])
            test.settle()
        assert [step.name for step in test.runner.plan.steps() if step.inputs] == [
            "a.aggregate-2",
            "a.aggregate",
        ]
        assert (test.view("b"), test.view("a")) == ([{"k": 0, "n": 4}], [{"k": 0, "n": 20}])


def test_the_error_after_a_rename_names_the_old_step(tmp_path: Path) -> None:
    spark: Any = PlainSpark()
    with PipelineTest(totals("b"), tmp_path, spark) as test:
        test.feed("orders", [{"k": 0, "v": 1}])
        test.settle()
        test.pipeline = totals("b", name="counted")
        with pytest.raises(
            PlanChanged,
            match=r"'counted' is new(.|\n)*another name \(b\.aggregate\), give it that with name=",
        ):
            test.restart()
        test.pipeline = totals("b", name="b.aggregate")
        test.restart()
        test.settle()
        assert test.view("b") == [{"k": 0, "n": 1}]
