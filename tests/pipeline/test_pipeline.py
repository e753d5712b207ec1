"""Inputs and outputs of a pipeline, and what they refuse."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import headrace as hr
from headrace.errors import (
    BadDuration,
    BadSchema,
    CyclicPlan,
    DuplicateStep,
    InputError,
    PlanError,
    StreamOnly,
    UnknownColumn,
)
from headrace.plan.plan import TopicOutput, TopicStep, ViewOutput
from tests.pipeline.shop_pipeline import CUSTOMERS, ORDERS, Shop


def test_inputs_are_as_declared() -> None:
    pipeline = hr.Pipeline("p", log="file:data")
    times = hr.EventTime(
        "placed_at", delay="10 seconds", producer="device", idle="2 minutes", max_ahead="1 hour"
    )
    pipeline.topic(
        "orders",
        schema=ORDERS,
        key="customer_id",
        event_time=times,
        partitions=4,
        retention="7 days",
    )
    customers = pipeline.table(
        "customers", schema=CUSTOMERS, key=["customer_id"], history="30 days"
    )
    pipeline.view("customers_now", customers)
    orders, table = pipeline.plan().inputs
    assert (orders.topic, orders.key, orders.is_table, orders.partitions) == (
        "orders",
        ("customer_id",),
        False,
        4,
    )
    assert orders.settings == (("retention", "7 days"),)
    assert (orders.event_time, times.delay_us, times.idle_us, times.max_ahead_us) == (
        times,
        10_000_000,
        120_000_000,
        3_600_000_000,
    )
    assert (table.is_table, table.key, table.event_time) == (True, ("customer_id",), None)


def test_event_time_has_defaults_that_keep_time_moving() -> None:
    plain = hr.EventTime("at")
    assert (plain.delay_us, plain.producer, plain.idle_us, plain.max_ahead_us) == (
        0,
        None,
        60_000_000,
        0,
    )
    assert not plain.delay_given
    assert hr.EventTime("at", delay="0 seconds").delay_given
    assert plain == hr.EventTime("at")
    assert plain != hr.EventTime("at", delay="0 seconds"), (
        "a table's clock depends on whether a delay was named"
    )
    assert (
        str(hr.EventTime("at", producer="device"))
        == "at, delay 0 seconds, producer device, idle 1 minute"
    )


def test_the_name_of_a_column_will_do_as_event_time() -> None:
    pipeline = hr.Pipeline("p")
    pipeline.write("out", pipeline.topic("t", schema="at TIMESTAMP", event_time="at"))
    assert pipeline.plan().inputs[0].event_time == hr.EventTime("at")


def test_outputs_keep_the_key_and_settings() -> None:
    shop = Shop()
    shop.write("paid", shop.orders.where("amount > 0"), partitions=3, retention="1 day")
    output = shop.plan().outputs[0]
    assert isinstance(output, TopicOutput)
    assert (output.partitions, output.settings, output.input.key) == (
        3,
        (("retention", "1 day"),),
        ("customer_id",),
    )


@pytest.mark.parametrize("kept", [0, -1, 10**9])
def test_how_many_changes_a_view_keeps(kept: int) -> None:
    pipeline = hr.Pipeline("p")
    customers = pipeline.table("customers", schema=CUSTOMERS, key="customer_id")
    with pytest.raises(PlanError, match="keep from 1 to 100,000,000"):
        pipeline.view("refused", customers, keep_changes=kept)
    pipeline.view("now", customers, keep_changes=500)
    (output,) = pipeline.plan().outputs
    assert isinstance(output, ViewOutput)
    assert output.keep_changes == 500


def test_declaring_opens_no_log_and_loads_no_spark(tmp_path: Any) -> None:
    script = (
        "import sys, headrace as hr\n"
        f"p = hr.Pipeline('p', log='file:{tmp_path}/log')\n"
        "t = p.topic('t', schema='k STRING, v DOUBLE')\n"
        "p.view('v', t.where('v > 1').group_by('k').aggregate(n=hr.agg.count()))\n"
        "print(p.plan())\n"
        "print([name for name in ('pyspark', 'py4j', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert list(tmp_path.iterdir()) == []


def test_ingest_is_declared_and_keeps_the_frame_beside_the_plan() -> None:
    shop, frame = Shop(), object()
    shop.ingest(frame, shop.orders)
    shop.ingest(frame, "returns", name="from_files")
    shop.write("paid", shop.orders)
    assert [(each.name, each.topic) for each in shop.plan().ingests] == [
        ("orders.ingest", "orders"),
        ("from_files", "returns"),
    ]
    assert shop.ingested == {"orders.ingest": frame, "from_files": frame}
    with pytest.raises(DuplicateStep, match="under the name 'orders.ingest' already"):
        shop.ingest(frame, "orders")
    for wrong in ("order", shop.orders.where("amount > 0"), Shop().orders):
        with pytest.raises(PlanError, match="is not an input topic of the pipeline 'shop'"):
            shop.ingest(frame, wrong, name="x")


Declaration = Callable[[Any], Any]
REFUSED: list[tuple[str, Declaration, type[Exception], str]] = [
    (
        "a topic twice",
        lambda shop: shop.topic("orders", schema="a INT"),
        DuplicateStep,
        "'orders' is an input already",
    ),
    (
        "a table like a topic",
        lambda shop: shop.table("orders", schema="a INT", key="a"),
        DuplicateStep,
        "'orders' is an input already",
    ),
    (
        "outputs with one name",
        lambda shop: (shop.write("x", shop.orders), shop.view("x", shop.customers)),
        DuplicateStep,
        "Two outputs have the name 'x': a topic and a view",
    ),
    (
        "an output like an input",
        lambda shop: shop.write("returns", shop.orders),
        PlanError,
        "'returns' has the name of an input topic",
    ),
    (
        "a cycle",
        lambda shop: shop.write("orders", shop.orders.where("amount > 1")),
        CyclicPlan,
        "computed from the input topic 'orders': the plan would be a cycle",
    ),
    (
        "a view called like an input",
        lambda shop: shop.view("customers", shop.customers),
        PlanError,
        "has the name of an input topic.*\\n.*all_customers",
    ),
    (
        "an input like an output",
        lambda shop: (shop.write("x", shop.orders), shop.topic("x", schema="a INT")),
        DuplicateStep,
        "cannot read it too.*use the stream",
    ),
    (
        "a view of a stream",
        lambda shop: shop.view("v", shop.orders),
        StreamOnly,
        "was given the stream orders: without a key.*to_table",
    ),
    (
        "an output of something",
        lambda shop: shop.write("x", "orders"),
        PlanError,
        "'x' was given a str",
    ),
    (
        "an output of another pipeline",
        lambda shop: shop.write("x", Shop("other").orders),
        PlanError,
        "rows of another pipeline, 'other'",
    ),
    (
        "an output's name",
        lambda shop: shop.write("a b", shop.orders),
        PlanError,
        "'a b' cannot be a topic name",
    ),
    (
        "a view's name",
        lambda shop: shop.view("a/b", shop.customers),
        PlanError,
        "'a/b' cannot be a view name",
    ),
    (
        "our own names",
        lambda shop: shop.write("__ticks.x", shop.orders),
        PlanError,
        "'__ticks.x' is reserved",
    ),
    (
        "our own names as input",
        lambda shop: shop.topic("__ledger", schema="a INT"),
        PlanError,
        "'__ledger' is reserved",
    ),
    (
        "an unreadable schema",
        lambda shop: shop.topic("t", schema="a INTT"),
        BadSchema,
        "did you mean INT",
    ),
    (
        "a reserved column",
        lambda shop: shop.topic("t", schema="_tick INT"),
        PlanError,
        "'_tick', a name that is reserved",
    ),
    (
        "a missing key",
        lambda shop: shop.topic("t", schema="a INT", key="b"),
        UnknownColumn,
        "The topic 't' has no column 'b'",
    ),
    (
        "a table without a key",
        lambda shop: shop.table("t", schema="a INT", key=()),
        InputError,
        "needs a primary key",
    ),
    (
        "an unknown setting",
        lambda shop: shop.topic("t", schema="a INT", retension="1 day"),
        InputError,
        "no setting 'retension': did you mean 'retention'",
    ),
    (
        "an unknown setting of an output",
        lambda shop: shop.write("t", shop.customers, histry="1 day"),
        InputError,
        "did you mean 'history'",
    ),
    (
        "a table's setting on a topic",
        lambda shop: shop.topic("t", schema="a INT", history="1 day"),
        PlanError,
        "The topic 't' has no setting 'history'",
    ),
    (
        "a topic's setting on a table",
        lambda shop: shop.write("t", shop.customers, retention="1 day"),
        PlanError,
        "'t' has no setting 'retention'.*history",
    ),
    (
        "an unreadable duration",
        lambda shop: shop.topic("t", schema="a INT", retention="soon"),
        BadDuration,
        "retention 'soon' cannot be read",
    ),
    (
        "too few partitions",
        lambda shop: shop.write("t", shop.orders, partitions=0),
        InputError,
        "cannot have 0 partitions",
    ),
    (
        "a missing time",
        lambda shop: shop.topic("t", schema="a INT", event_time="at"),
        UnknownColumn,
        "The topic 't' has no column 'at'",
    ),
    (
        "a missing producer",
        lambda shop: shop.topic(
            "t", schema="at TIMESTAMP", event_time=hr.EventTime("at", producer="dev")
        ),
        UnknownColumn,
        "no column 'dev'",
    ),
    (
        "a time that is none",
        lambda shop: shop.topic("t", schema="at STRING", event_time="at"),
        PlanError,
        "The topic 't' has the event time 'at', which is STRING and no time",
    ),
]


@pytest.mark.parametrize(
    ("declare", "error", "said"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refused(declare: Declaration, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"(?s){said}"):
        declare(Shop())


@pytest.mark.parametrize("name", ["", "a b", "x" * 300])
def test_a_pipeline_has_a_plain_name(name: str) -> None:
    with pytest.raises(PlanError, match="cannot be a pipeline name"):
        hr.Pipeline(name)


@pytest.mark.parametrize("option", ["delay", "idle", "max_ahead"])
def test_an_event_time_names_the_option_that_cannot_be_read(option: str) -> None:
    with pytest.raises(
        BadDuration, match=f"{option}.*of the event time 'at'|of the event time 'at'.*{option}"
    ):
        hr.EventTime("at", **{option: "10 parsecs"})


def test_a_pipeline_without_outputs_has_no_plan() -> None:
    shop = Shop()
    assert str(shop) == repr(shop) == "<Pipeline 'shop': 3 inputs, 0 outputs>"
    with pytest.raises(PlanError, match="has no output"):
        shop.plan()


def test_a_refused_output_leaves_nothing_behind() -> None:
    shop = Shop()
    with pytest.raises(InputError):
        shop.write("x", shop.orders, partitions=-1)
    with pytest.raises(PlanError):
        shop.write("x y", shop.orders)
    shop.write("x", shop.orders)
    assert [each.name for each in shop.plan().outputs] == ["x"]
    assert isinstance(shop.plan().steps()[0], TopicStep)
