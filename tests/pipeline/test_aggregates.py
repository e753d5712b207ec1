"""Aggregates: the types of their results, what they take, and expressions in them."""

from typing import Any, cast

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import PlanError, StreamOnly, UnfitColumn, UnknownColumn
from headrace.operators.aggregates.specs import KINDS, AggregateSpec, UnfitType, result_type
from headrace.pipeline.stream import Rows
from headrace.plan.meanings import Meaning, output_meaning
from headrace.plan.plan import AggregateStep, SelectStep, ViewOutput
from headrace.types.schema import type_name
from tests.pipeline.shop_pipeline import Shop

WIDE = (
    "k STRING, i INT, b BIGINT, f FLOAT, d DOUBLE, m DECIMAL(10,2), w DECIMAL(38,10), s STRING,"
    " flag BOOLEAN, at TIMESTAMP, day DATE, span INTERVAL DAY TO SECOND, xs ARRAY<INT>, bin BINARY"
)
agg = hr.agg


def wide(*, is_table: bool = False) -> Rows:
    pipeline = hr.Pipeline("p")
    return (
        pipeline.table("t", schema=WIDE, key="k") if is_table else pipeline.topic("t", schema=WIDE)
    )


TYPES: list[tuple[AggregateSpec, str]] = [
    (agg.count(), "BIGINT"),
    (agg.count("s"), "BIGINT"),
    (agg.sum("i"), "BIGINT"),
    (agg.sum("f"), "DOUBLE"),
    (agg.sum("m"), "DECIMAL(20,2)"),
    (agg.sum("w"), "DECIMAL(38,10)"),
    (agg.sum("span"), "INTERVAL DAY TO SECOND"),
    (agg.avg("i"), "DOUBLE"),
    (agg.avg("m"), "DECIMAL(14,6)"),
    (agg.avg("w"), "DECIMAL(38,14)"),
    (agg.min("at"), "TIMESTAMP"),
    (agg.max("s"), "STRING"),
    (agg.first("xs"), "ARRAY<INT>"),
    (agg.last("day", ignore_nulls=True), "DATE"),
    (agg.collect("m"), "ARRAY<DECIMAL(10,2)>"),
    (agg.count_distinct("s"), "BIGINT"),
    (agg.stddev("m"), "DOUBLE"),
    (agg.approx_distinct("at"), "BIGINT"),
    (agg.quantiles("d"), "DOUBLE"),
    (agg.quantiles("i", at=[0.5, 0.99]), "ARRAY<DOUBLE>"),
    (
        agg.heavy_hitters("s"),
        "ARRAY<STRUCT<value: STRING, count: BIGINT, at_least: BIGINT, at_most: BIGINT>>",
    ),
    (agg.bloom("i"), "BINARY"),
    (agg.sum("i * m"), "DECIMAL(31,2)"),
    (agg.max("length(s)"), "INT"),
]


@pytest.mark.parametrize(("spec", "kind"), TYPES, ids=[str(spec) for spec, _ in TYPES])
def test_results_have_the_types_that_spark_gives(spec: AggregateSpec, kind: str) -> None:
    table = wide().group_by("k").aggregate(x=spec)
    assert table.schema.names == ["k", "x"]
    assert type_name(table.schema.field("x").type) == kind
    step = table.step
    assert isinstance(step, AggregateStep)
    assert step.aggregates[0][1].type == table.schema.field("x").type, (
        "kernels read the type from the plan"
    )


UNFIT = [
    (agg.sum("s"), "'s' is STRING.*\\n.*sum takes numbers and INTERVAL"),
    (agg.sum("flag"), "'flag' is BOOLEAN"),
    (agg.avg("at"), "'at' is TIMESTAMP.*\\n.*avg takes numbers"),
    (agg.stddev("s"), "stddev takes numbers"),
    (agg.min("xs"), "'xs' is ARRAY<INT>.*\\n.*min takes plain types"),
    (agg.count_distinct("xs"), "count_distinct takes plain types"),
    (agg.quantiles("s"), "quantiles takes numbers"),
    (agg.approx_distinct("xs"), "approx_distinct takes plain types"),
    (agg.sum("upper(s)"), r"'upper\(s\)' is STRING"),
]


@pytest.mark.parametrize(("spec", "said"), UNFIT, ids=[str(spec) for spec, _ in UNFIT])
def test_a_type_that_does_not_fit_is_named_with_what_does(spec: AggregateSpec, said: str) -> None:
    with pytest.raises(
        UnfitColumn, match=f"(?s)'total' of the step t.aggregate is .*but {said}|{said}"
    ):
        wide().group_by("k").aggregate(total=spec)


@pytest.mark.parametrize(
    "spec",
    [agg.approx_distinct("s"), agg.quantiles("d"), agg.heavy_hitters("s"), agg.bloom("s")],
    ids=lambda spec: spec.kind,
)
def test_sketches_refuse_tables(spec: AggregateSpec) -> None:
    with pytest.raises(
        StreamOnly,
        match=(
            r"(?s)'x' of the step t.aggregate is .*cannot retract rows, and t is a"
            r" table.*count_distinct"
        ),
    ):
        wide(is_table=True).group_by("s").aggregate(x=spec)


@pytest.mark.parametrize(
    "spec",
    [agg.min("d"), agg.first("s"), agg.collect("i"), agg.count_distinct("i"), agg.stddev("d")],
    ids=lambda spec: spec.kind,
)
def test_exact_aggregates_take_tables(spec: AggregateSpec) -> None:
    assert wide(is_table=True).group_by("s").aggregate(x=spec).key == ("s",)


def test_an_expression_is_computed_before_the_aggregate() -> None:
    table = (
        wide()
        .group_by("k")
        .aggregate(
            total=agg.sum("d * 1.2"), most=agg.max("i"), same=agg.min("d * 1.2"), errors="divert"
        )
    )
    step = table.step
    assert isinstance(step, AggregateStep)
    select = step.input
    assert isinstance(select, SelectStep)
    assert select.errors == step.errors == "divert"
    assert select.columns == (
        ("k", "k"),
        ("i", "i"),
        ("total_of", "d * 1.2"),
        ("same_of", "d * 1.2"),
    )
    assert [(name, spec.column) for name, spec in step.aggregates] == [
        ("total", "total_of"),
        ("most", "i"),
        ("same", "same_of"),
    ]


def test_a_computed_column_never_hides_another() -> None:
    pipeline = hr.Pipeline("p")
    stream = pipeline.topic("t", schema="k STRING, x_of INT, v INT")
    table = stream.group_by("k").aggregate(x=agg.sum("v * 2"), y=agg.sum("x_of"))
    assert isinstance(table.step, AggregateStep)
    assert [spec.column for _, spec in table.step.aggregates] == ["x_of_", "x_of"]


def test_a_table_keeps_its_key_on_the_way_to_an_aggregate() -> None:
    table = wide(is_table=True).group_by("s").aggregate(total=agg.sum("d + 1"))
    assert [name for name, _ in table.step.input.describe()["columns"].items()] == [
        "k",
        "s",
        "total_of",
    ]
    assert table.step.input.key == ("k",)


def test_plain_columns_need_no_select() -> None:
    table = wide().group_by("k").aggregate(total=agg.sum("D"), rows=agg.count())
    assert table.step.input.operation == "topic"
    assert isinstance(table.step, AggregateStep)
    assert table.step.aggregates[0][1].column == "d", "under the name that the schema has"


class Mean(agg.CustomAggregate):
    """A user's own aggregate."""

    state_type = pa.struct([("sum", pa.float64()), ("count", pa.int64())])
    result_type = pa.float64()

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        raise NotImplementedError

    def result(self, states: pa.Array) -> pa.Array:
        raise NotImplementedError


class BackMean(Mean):
    """One that can take rows back."""

    def retract(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        raise NotImplementedError


def test_a_users_aggregate_says_its_type_and_whether_it_takes_tables() -> None:
    assert (
        type_name(wide().group_by("k").aggregate(m=agg.custom(Mean(), "d")).schema.field("m").type)
        == "DOUBLE"
    )
    with pytest.raises(StreamOnly, match="cannot retract rows"):
        wide(is_table=True).group_by("s").aggregate(m=agg.custom(Mean(), "d"))
    assert wide(is_table=True).group_by("s").aggregate(m=agg.custom(BackMean(), "d")).key == ("s",)


def test_the_settings_of_a_users_aggregate_are_part_of_the_plan() -> None:
    def plan(weight: float) -> Any:
        rows = wide()
        pipeline = cast("hr.Pipeline", rows.pipeline)
        pipeline.view("v", rows.group_by("k").aggregate(m=agg.custom(Mean(weight), "d")))
        return pipeline.plan()

    assert plan(1.0) == plan(1.0)
    assert plan(1.0) != plan(2.0)
    assert "Mean(weight=2.0)" in str(plan(2.0))


def test_an_edit_of_the_code_of_a_users_aggregate_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def meanings() -> list[Meaning]:
        rows: Any = wide()
        counts = rows.group_by("k").aggregate(m=agg.custom(Mean(), "d"))
        windows = rows.over("k", order_by="_arrival").aggregate(x=agg.custom(Mean(), "d"))
        return [output_meaning(ViewOutput(name="v", input=each.step)) for each in (counts, windows)]

    def edited(self: Any, states: pa.Array) -> pa.Array:
        return states

    before = meanings()
    assert all(now.is_same(then) for now, then in zip(meanings(), before, strict=True))
    monkeypatch.setattr(Mean, "result", edited)
    assert not any(now.is_same(then) for now, then in zip(meanings(), before, strict=True))
    monkeypatch.setattr(Mean, "version", "1")
    versioned = meanings()
    monkeypatch.undo()
    monkeypatch.setattr(Mean, "version", "1")
    assert all(now.is_same(then) for now, then in zip(meanings(), versioned, strict=True))


BAD_OPTIONS = [
    (lambda: agg.custom(Mean, "d"), "given the class Mean, not an instance"),
    (lambda: agg.custom(7, "d"), "given a int"),
    (lambda: agg.min("d", when_full="drop"), "when_full='drop'"),
    (lambda: agg.collect("d", max_values=0), "max_values=0.*\\n.*from 1 to"),
    (lambda: agg.quantiles("d", at=1.5), "at=1.5.*\\n.*from 0 to 1"),
    (lambda: agg.quantiles("d", at=[]), "no fraction"),
    (lambda: agg.approx_distinct("d", error=2), "error=2"),
    (lambda: agg.heavy_hitters("d", max_values=5000, size=100), "max_values=5000"),
    (lambda: agg.bloom("d", expected=True), "expected=True"),
]


@pytest.mark.parametrize(("build", "said"), BAD_OPTIONS)
def test_options_are_checked_when_they_are_given(build: Any, said: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){said}"):
        build()


def test_a_setting_of_a_custom_aggregate_needs_a_stable_repr() -> None:
    with pytest.raises(
        PlanError, match="setting 'weight' of the aggregate Mean has no stable repr"
    ):
        agg.custom(Mean(weight=object()), "d")  # type: ignore[arg-type]


def test_a_custom_aggregate_without_types_is_refused() -> None:
    class Untyped(Mean):
        result_type = None

    with pytest.raises(PlanError, match="has no result_type"):
        agg.custom(Untyped(), "d")


REFUSED = [
    ({}, PlanError, "t.aggregate aggregates nothing"),
    ({"x": "sum(d)"}, PlanError, "'x' of the step t.aggregate is 'sum.d.', not an aggregate"),
    ({"x": agg.sum("amont")}, UnknownColumn, "t.aggregate, aggregate 'x' has no column 'amont'"),
    ({"k": agg.count()}, PlanError, "the column 'k' twice"),
    ({"_tick": agg.count()}, PlanError, "reserved"),
    (
        {"x": agg.first("NULL")},
        UnfitColumn,
        "type of 'NULL' in 'x' of the step t.aggregate is not known",
    ),
]


@pytest.mark.parametrize(
    ("aggregates", "error", "said"), REFUSED, ids=[said for _, _, said in REFUSED]
)
def test_refused(aggregates: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        wide().group_by("k").aggregate(**aggregates)


def test_every_kind_has_a_result_for_some_type() -> None:
    for kind in KINDS:
        spec = (
            agg.custom(Mean(), "d")
            if kind == "custom"
            else AggregateSpec(kind, "d", (("at", 0.5),))
        )
        column_type = pa.bool_() if kind == "count_if" else pa.float64()
        assert isinstance(result_type(spec, column_type), pa.DataType)
    with pytest.raises(UnfitType):
        result_type(AggregateSpec("sum", "s"), pa.string())


def test_aggregates_print_as_they_are_written() -> None:
    assert str(agg.sum("amount * 2")) == "sum(amount * 2)"
    assert str(agg.collect("x", max_values=5)) == "collect(x, most=5, when_full='divert')"


def test_the_shop_adds_up() -> None:
    shop = Shop()
    revenue = shop.orders.group_by("region").aggregate(
        revenue=agg.sum("amount"), buyers=agg.approx_distinct("customer_id")
    )
    assert revenue.schema == pa.schema(
        [("region", pa.string()), ("revenue", pa.float64()), ("buyers", pa.int64())]
    )
