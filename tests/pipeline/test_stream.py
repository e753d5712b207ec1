"""What operations make of schemas and keys, and what they refuse."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import (
    BadDuration,
    BadExpression,
    BadSchema,
    PlanError,
    StreamOnly,
    UnfitColumn,
    UnknownColumn,
)
from headrace.pipeline.stream import Stream, Table
from headrace.types.schema import to_ddl
from tests.pipeline.shop_pipeline import Shop


@pytest.fixture
def shop() -> Shop:
    return Shop()


def columns(rows: Stream | Table) -> str:
    return to_ddl(rows.schema)


def test_select_takes_names_expressions_and_keywords(shop: Shop) -> None:
    chosen = shop.orders.select(
        "order_id", "upper(region) AS region", "price * 2 `twice`", taxed="amount * 1.2"
    )
    assert columns(chosen) == "order_id BIGINT, region STRING, twice DECIMAL(12,2), taxed DOUBLE"
    assert chosen.key == (), "the key's column was left out"


def test_select_star_is_all_columns(shop: Shop) -> None:
    chosen = shop.customers.select("*", loud="upper(name)")
    assert columns(chosen) == "customer_id BIGINT, name STRING, tier STRING, loud STRING"
    assert isinstance(chosen, Table)
    assert chosen.key == ("customer_id",)


def test_columns_are_found_whatever_their_case_and_keep_their_name(shop: Shop) -> None:
    assert shop.orders.select("ORDER_ID", twice="AMOUNT * 2").schema.names == ["order_id", "twice"]


def test_a_column_keeps_its_declared_type_and_comment() -> None:
    pipeline = hr.Pipeline("p")
    stream = pipeline.topic("t", schema="code CHAR(3) NOT NULL COMMENT 'of a country', at TIME(3)")
    assert (
        columns(stream.select("at", "code AS country"))
        == "at TIME(3), country CHAR(3) NOT NULL COMMENT 'of a country'"
    )


def test_with_columns_replaces_where_it_stands_and_adds_behind(shop: Shop) -> None:
    changed = shop.customers.with_columns("tier AS rank", name="loud", tier="upper(tier)")
    assert columns(changed) == "customer_id BIGINT, name STRING, tier STRING, rank STRING"
    assert changed.step.name == "loud", "name= names the step"


def test_a_key_follows_its_columns_when_they_are_renamed(shop: Shop) -> None:
    assert shop.customers.select("customer_id AS id", "name").key == ("id",)
    assert shop.orders.select("customer_id AS id").key == ("id",)


def test_a_table_must_keep_its_key(shop: Shop) -> None:
    with pytest.raises(
        PlanError,
        match="customers.select leaves out or changes 'customer_id' of the table's primary key",
    ):
        shop.customers.select("name")
    with pytest.raises(
        PlanError,
        match="customers.with_columns.*|customers.select leaves out or changes 'customer_id'",
    ):
        shop.customers.with_columns(customer_id="customer_id + 1")


def test_where_keeps_everything(shop: Shop) -> None:
    kept = shop.orders.where("amount > 0 AND region LIKE 'n%'", errors="divert")
    assert (kept.schema, kept.key) == (shop.orders.schema, ("customer_id",))
    assert kept.step.describe()["errors"] == "divert"


def test_keys(shop: Shop) -> None:
    assert shop.orders.key_by("region", "device").key == ("region", "device")
    assert shop.customers.key_by("tier", "customer_id").key == ("tier", "customer_id")


def test_unions_take_columns_in_any_order(shop: Shop) -> None:
    turned = shop.returns.select(*reversed(shop.returns.schema.names))
    united = shop.orders.union(turned)
    assert united.schema.names == shop.orders.schema.names
    assert united.key == ("customer_id",)
    assert shop.orders.union(shop.returns.key_by("region")).key == (), (
        "rows with different keys have none together"
    )


def test_a_union_promises_only_what_all_promise() -> None:
    pipeline = hr.Pipeline("p")
    one = pipeline.topic("one", schema="a INT NOT NULL, b CHAR(3), c INT NOT NULL COMMENT 'x'")
    other = pipeline.topic("other", schema="a INT, b STRING, c INT NOT NULL COMMENT 'x'")
    assert columns(one.union(other)) == "a INT, b STRING, c INT NOT NULL COMMENT 'x'"


def test_columns_may_have_any_name() -> None:
    pipeline = hr.Pipeline("p")
    stream = pipeline.topic(
        "t", schema="`values` INT, `odd name` INT, `true` INT, `current_date` STRING, `case` INT"
    )
    assert stream.with_columns(total="`values` + `odd name`").schema.names == [
        "values",
        "odd name",
        "true",
        "current_date",
        "case",
        "total",
    ]
    assert stream.select("odd name", "true").schema.names == ["odd name", "true"]
    table = stream.group_by("case").aggregate(
        x=hr.agg.sum("odd name"), y=hr.agg.max("`values` + 1")
    )
    assert table.schema.names == ["case", "x", "y"]


def test_to_table_and_back(shop: Shop) -> None:
    table = shop.orders.to_table("order_id")
    assert isinstance(table, Table)
    assert (table.key, table.step.is_table, table.schema) == (
        ("order_id",),
        True,
        shop.orders.schema,
    )
    changes = table.changes()
    assert isinstance(changes, Stream)
    assert changes.schema.names[-1] == "change_type"
    assert (changes.step.is_table, changes.key) == (False, ("order_id",))
    assert table.changes(column="what").schema.names[-1] == "what"


def test_groups_by_expressions(shop: Shop) -> None:
    daily = shop.orders.group_by("region", day="date(placed_at)").aggregate(orders=hr.agg.count())
    assert columns(daily) == "region STRING, day DATE, orders BIGINT"
    assert daily.key == ("region", "day")


def test_dedupe_keeps_a_time_in_microseconds(shop: Shop) -> None:
    step = shop.orders.dedupe(on=["order_id", "device"], within="90 seconds").step
    assert step.describe()["on"] == ["order_id", "device"]
    assert step.describe()["within_us"] == 90_000_000


Operation = Callable[[Any], Any]

REFUSED: list[tuple[str, Operation, type[Exception], str]] = [
    (
        "a column that does not exist",
        lambda shop: shop.orders.where("amont > 1"),
        UnknownColumn,
        "orders.where has no column 'amont': did you mean 'amount'?",
    ),
    (
        "in a select",
        lambda shop: shop.orders.select("regin"),
        UnknownColumn,
        "orders.select has no column 'regin': did you mean 'region'?",
    ),
    (
        "in a named column",
        lambda shop: shop.orders.select(x="regin"),
        UnknownColumn,
        "orders.select, column 'x' has no column 'regin'",
    ),
    (
        "in a key",
        lambda shop: shop.orders.key_by("custmer_id"),
        UnknownColumn,
        "orders.key_by has no column 'custmer_id': did you mean 'customer_id'?",
    ),
    (
        "in a group",
        lambda shop: shop.orders.group_by("regoin"),
        UnknownColumn,
        "orders.group_by has no column 'regoin': did you mean 'region'?",
    ),
    (
        "in a table's key",
        lambda shop: shop.orders.to_table("id"),
        UnknownColumn,
        "orders.to_table has no column 'id'",
    ),
    (
        "in a dedupe",
        lambda shop: shop.orders.dedupe(on="ordr_id", within="1 hour"),
        UnknownColumn,
        "did you mean 'order_id'",
    ),
    (
        "with a given name",
        lambda shop: shop.orders.where("x > 1", name="paid"),
        UnknownColumn,
        "The step paid has no column 'x'",
    ),
    (
        "behind other steps",
        lambda shop: shop.orders.where("amount > 1").select("x"),
        UnknownColumn,
        "orders.where.select has no column 'x'",
    ),
    (
        "no duration",
        lambda shop: shop.orders.dedupe(on="order_id", within="1 fortnight"),
        BadDuration,
        "within of the step orders.dedupe.*unknown unit",
    ),
    (
        "no time at all",
        lambda shop: shop.orders.dedupe(on="order_id", within="0 seconds"),
        PlanError,
        "within no time at all",
    ),
    (
        "a number as a duration",
        lambda shop: shop.orders.dedupe(on="order_id", within=60),
        BadDuration,
        "has no unit",
    ),
    (
        "an unnamed expression",
        lambda shop: shop.orders.select("amount * 2"),
        BadExpression,
        "'amount \\* 2', which has no name.*\\n.*AS total",
    ),
    (
        "no columns",
        lambda shop: shop.orders.select(),
        PlanError,
        "orders.select selects no columns",
    ),
    (
        "two columns of one name",
        lambda shop: shop.orders.select("amount", "price AS AMOUNT"),
        PlanError,
        "has the column 'AMOUNT' twice",
    ),
    (
        "a reserved name",
        lambda shop: shop.orders.select(_tick="amount"),
        PlanError,
        "'_tick', a name that is reserved",
    ),
    (
        "a condition that is none",
        lambda shop: shop.orders.where("amount + 1"),
        UnfitColumn,
        "'amount \\+ 1' of the step orders.where is DOUBLE, not BOOLEAN",
    ),
    (
        "a null column",
        lambda shop: shop.orders.select(x="NULL"),
        UnfitColumn,
        "type of the column 'x' of the step orders.select is not known.*\\n.*CAST",
    ),
    (
        "an unknown policy",
        lambda shop: shop.orders.where("amount > 1", errors="drop"),
        PlanError,
        "errors='drop'.*\\n.*dead letters",
    ),
    (
        "no group",
        lambda shop: shop.orders.group_by(),
        PlanError,
        "names no columns.*\\n.*aggregate\\(n=",
    ),
    (
        "a nested key",
        lambda shop: shop.orders.key_by("tags"),
        BadSchema,
        "'tags' of The step orders.key_by is ARRAY<STRING>, which cannot be a key",
    ),
    (
        "a key twice",
        lambda shop: shop.orders.key_by("region", "region"),
        BadSchema,
        "names the column 'region' twice",
    ),
    ("no key", lambda shop: shop.orders.key_by(), PlanError, "names no key columns"),
    (
        "a dedupe of a table",
        lambda shop: shop.customers.dedupe(on="tier", within="1 hour"),
        StreamOnly,
        "customers is a table, and dedupe is for streams: a table has",
    ),
    (
        "a table made of a table",
        lambda shop: shop.customers.to_table("tier"),
        StreamOnly,
        "customers is a table already, keyed by customer_id",
    ),
    (
        "changes of a stream",
        lambda shop: shop.orders.changes(),
        StreamOnly,
        "orders is a stream: it only inserts",
    ),
    (
        "a union with a table",
        lambda shop: shop.orders.union(shop.orders.to_table("order_id")),
        StreamOnly,
        "unites a stream with the table orders.to_table",
    ),
    (
        "a union of a table with a stream",
        lambda shop: shop.customers.union(shop.customers.changes()),
        StreamOnly,
        "with the table customers",
    ),
    (
        "a union with fewer columns",
        lambda shop: shop.orders.union(shop.returns.select("amount")),
        UnknownColumn,
        "different schemas: returns.select has no column 'order_id'",
    ),
    (
        "a union with more",
        lambda shop: shop.orders.union(shop.returns.with_columns(x="1")),
        UnknownColumn,
        "different schemas: orders has no column 'x'",
    ),
    (
        "a union of types",
        lambda shop: shop.orders.union(shop.returns.with_columns(amount="1")),
        UnfitColumn,
        "'amount' is DOUBLE in orders and INT in .*\\n.*CAST\\(amount AS DOUBLE\\)",
    ),
    ("a union with something", lambda shop: shop.orders.union(7), PlanError, "was given a int"),
    (
        "a union with another pipeline",
        lambda shop: shop.orders.union(Shop("other").orders),
        PlanError,
        "rows of two pipelines, 'shop' and 'other'",
    ),
    (
        "a key that is not unique",
        lambda shop: shop.customers.key_by("tier"),
        PlanError,
        "leaves out 'customer_id' of the primary key.*\\n.*group_by",
    ),
    (
        "a column that is there",
        lambda shop: shop.customers.changes(column="Name"),
        PlanError,
        "has the column 'Name' twice",
    ),
]


@pytest.mark.parametrize(
    ("operation", "error", "said"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_refused(shop: Shop, operation: Operation, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"(?s){said}"):
        operation(shop)


def test_tables_with_different_keys_are_not_united(shop: Shop) -> None:
    with pytest.raises(
        PlanError, match="different primary keys: customer_id and tier, customer_id"
    ):
        shop.customers.union(shop.customers.key_by("tier", "customer_id"))


def test_a_stream_says_what_it_is(shop: Shop) -> None:
    assert (
        repr(shop.customers.select("customer_id"))
        == "<Table customers.select of the pipeline 'shop': customer_id>"
    )


def test_nothing_is_shared_between_steps(shop: Shop) -> None:
    before = shop.orders.schema
    shop.orders.with_columns(amount="1")
    assert shop.orders.schema is before
    assert before.field("amount").type == pa.float64()


def test_a_step_name_is_not_taken_for_a_column() -> None:
    shop = Shop()
    with pytest.raises(PlanError, match=r"name= names the step(.|\n)*'region AS name'"):
        shop.orders.select("order_id", name="region")
    with pytest.raises(PlanError, match=r"name= names the step(.|\n)*'region AS name'"):
        shop.orders.with_columns(name="region", big="amount > 5")
    assert shop.orders.group_by(name="region").aggregate(n=hr.agg.count()).schema.names == [
        "name",
        "n",
    ]
    with pytest.raises(PlanError, match=r"\(count\) cannot be called 'name'(.|\n)*select"):
        shop.orders.group_by("region").aggregate(name=hr.agg.count())  # type: ignore[arg-type]
