"""The inert plan: order, comparison, description, identity of steps."""

from dataclasses import replace
from typing import Any

import pytest

import headrace as hr
from headrace.errors import CyclicPlan, PlanError
from headrace.plan.plan import (
    AggregateStep,
    PipelinePlan,
    SelectStep,
    Step,
    TopicOutput,
    TopicStep,
    ViewOutput,
    WhereStep,
    topological_order,
)
from tests.pipeline.shop_pipeline import Shop


def declared(minimum: int = 0) -> PipelinePlan:
    shop = Shop()
    paid = shop.orders.where(f"amount > {minimum}").with_columns(tax="amount * 0.2")
    shop.view(
        "revenue",
        paid.group_by("region").aggregate(revenue=hr.agg.sum("amount"), orders=hr.agg.count()),
    )
    shop.write("paid", paid)
    return shop.plan()


def test_steps_come_after_their_inputs() -> None:
    plan = declared()
    assert [each.name for each in plan.steps()] == [
        "orders",
        "returns",
        "customers",
        "revenue.where",
        "revenue.select",
        "revenue.aggregate",
    ]
    indices = {id(step): index for index, step in enumerate(plan.steps())}
    assert all(
        indices[id(given)] < indices[id(step)] for step in plan.steps() for given in step.inputs
    )


def test_a_plan_is_what_was_declared() -> None:
    plan = declared()
    revenue, paid = plan.outputs
    assert (type(revenue), type(paid)) == (ViewOutput, TopicOutput)
    aggregate = revenue.input
    assert isinstance(aggregate, AggregateStep)
    assert (aggregate.by, aggregate.key, aggregate.is_table) == (("region",), ("region",), True)
    assert [(name, str(spec)) for name, spec in aggregate.aggregates] == [
        ("revenue", "sum(amount)"),
        ("orders", "count()"),
    ]
    select = aggregate.input
    assert isinstance(select, SelectStep)
    assert select is paid.input
    assert select.columns[-1] == ("tax", "amount * 0.2")
    assert select.expressions[-1].columns == ("amount",)
    where = select.input
    assert isinstance(where, WhereStep)
    assert where.expression.safe == "(`amount` > 0)"
    assert where.input is plan.step("orders")


def test_plans_compare_by_what_they_do() -> None:
    assert declared() == declared()
    assert declared() != declared(minimum=5)
    assert declared().step("revenue.aggregate") != declared(minimum=5).step("revenue.aggregate"), (
        "what is upstream counts"
    )
    assert declared().step("orders") == declared(minimum=5).step("orders")
    assert hash(declared().step("orders")) == hash(declared().step("orders"))


def test_comparing_shared_steps_takes_no_longer_than_there_are_steps() -> None:
    def doubled() -> PipelinePlan:
        shop = Shop()
        stream = shop.orders
        for _ in range(60):
            stream = stream.union(stream)
        shop.write("much", stream)
        return shop.plan()

    assert doubled() == doubled()
    assert doubled().step("much.union").lineage == doubled().step("much.union").lineage


def test_a_step_of_another_name_is_named() -> None:
    with pytest.raises(PlanError, match="no step 'revenu.where': did you mean 'revenue.where'"):
        declared().step("revenu.where")


def test_consumers_are_the_steps_and_outputs_that_a_step_feeds() -> None:
    plan = declared()
    assert [each.name for each in plan.consumers(plan.step("revenue.select"))] == [
        "revenue.aggregate",
        "paid",
    ]
    assert plan.consumers(plan.step("returns")) == ()


def test_a_cycle_is_refused() -> None:
    plan = declared()
    where = plan.step("revenue.where")
    object.__setattr__(where, "inputs", (plan.step("revenue.select"),))
    with pytest.raises(CyclicPlan, match="needs its own result"):
        topological_order([where])
    with pytest.raises(CyclicPlan):
        PipelinePlan("again", plan.inputs, plan.outputs)


def test_a_plan_of_thousands_of_steps_is_no_reason_to_fail() -> None:
    shop = Shop()
    stream = shop.orders
    for number in range(1200):
        stream = stream.where(f"amount > {number}")
    shop.write("few", stream)
    assert stream.step.path == "orders.….where.where.where.where"
    plan = shop.plan()
    assert len(plan.steps()) == 1203
    assert plan.outputs[0].input.lineage != plan.step("few.where").lineage
    assert str(plan).count("\n") == 1203, (
        "one line a step, one for the pipeline, one for the output, one for what is not used"
    )


def test_the_description_is_plain_values() -> None:
    described = declared().describe()
    assert described["pipeline"] == "shop"
    where = next(each for each in described["steps"] if each["step"] == "revenue.where")
    assert where["inputs"] == ["orders"]
    assert (where["operation"], where["condition"], where["errors"], where["is_table"]) == (
        "where",
        "amount > 0",
        "null",
        False,
    )
    assert {
        "output": "paid",
        "kind": "topic",
        "input": "revenue.select",
        "partitions": 1,
    } in described["outputs"]


def aggregate(shop: Shop, **more: Any) -> Step:
    shop.view(
        "revenue", shop.orders.group_by("region").aggregate(revenue=hr.agg.sum("amount"), **more)
    )
    return shop.plan().step("revenue.aggregate")


def test_the_signature_of_a_step_follows_its_own_work_only() -> None:
    plain = aggregate(Shop())
    assert plain.signature == aggregate(Shop("another")).signature
    assert plain.signature == replace(plain, name="renamed").signature
    assert plain.signature != aggregate(Shop(), orders=hr.agg.count()).signature
    shop = Shop()
    shop.view(
        "revenue",
        shop.orders.where("amount > 0")
        .group_by("region")
        .aggregate(errors="divert", revenue=hr.agg.sum("amount")),
    )
    filtered = shop.plan().step("revenue.aggregate")
    assert filtered.signature == plain.signature, (
        "steps before it, and what becomes of bad rows, do not change the fingerprint"
    )
    assert filtered.lineage != plain.lineage


def test_a_bound_can_be_changed_and_a_type_cannot() -> None:
    def kept(schema: str, max_values: int) -> str:
        pipeline = hr.Pipeline("p")
        pipeline.view(
            "v",
            pipeline.topic("t", schema=schema)
            .group_by("k")
            .aggregate(x=hr.agg.max("v", max_values=max_values), n=hr.agg.count("v")),
        )
        return pipeline.plan().step("v.aggregate").signature

    assert (
        kept("k STRING, v INT", 10)
        == kept("k STRING, v INT", 20)
        == kept("k STRING, v INT, more INT", 10)
    )
    assert kept("k STRING, v INT", 10) != kept("k STRING, v BIGINT", 10)


def test_a_dedupe_keeps_its_signature_when_other_columns_come() -> None:
    def deduped(**columns: str) -> Step:
        shop = Shop()
        shop.write(
            "once",
            shop.orders.with_columns("order_id", **columns).dedupe(on="order_id", within="1 hour"),
        )
        return shop.plan().step("once.dedupe")

    assert deduped().signature == deduped(more="amount * 2").signature
    shop = Shop()
    shop.write("once", shop.orders.dedupe(on="order_id", within="2 hours"))
    assert shop.plan().step("once.dedupe").signature != deduped().signature


def test_inputs_that_are_not_used_are_in_the_plan() -> None:
    assert [each.topic for each in declared().inputs] == ["orders", "returns", "customers"]
    assert all(isinstance(each, TopicStep) for each in declared().inputs)
