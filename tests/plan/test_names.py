"""Names of steps: given or derived, and the same after edits elsewhere."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import DuplicateStep, PlanError
from headrace.pipeline.stream import Stream, Table
from tests.pipeline.shop_pipeline import Shop

Edit = Callable[[Shop], object]


def names(declare: Edit) -> list[str]:
    shop = Shop()
    declare(shop)
    return [each.name for each in shop.plan().steps() if each.inputs]


def by_region(stream: Stream, name: str | None = None) -> Table:
    return stream.group_by("region").aggregate(name=name, revenue=hr.agg.sum("amount"))


def test_a_name_is_derived_from_the_output_and_the_operation() -> None:
    assert names(lambda shop: shop.view("revenue", by_region(shop.orders.where("amount > 0")))) == [
        "revenue.where",
        "revenue.aggregate",
    ]


def test_a_given_name_is_kept() -> None:
    assert names(
        lambda shop: shop.view(
            "revenue", by_region(shop.orders.where("amount > 0", name="paid"), "totals")
        )
    ) == ["paid", "totals"]


def test_repeated_operations_are_numbered_from_the_input_on() -> None:
    assert names(
        lambda shop: shop.write(
            "big", shop.orders.where("amount > 0").where("amount > 1").where("amount > 2")
        )
    ) == [
        "big.where",
        "big.where-2",
        "big.where-3",
    ]


def test_naming_one_step_renames_no_other() -> None:
    plain = names(
        lambda shop: shop.write(
            "big", shop.orders.where("amount > 0").where("amount > 1").where("amount > 2")
        )
    )
    named = names(
        lambda shop: shop.write(
            "big",
            shop.orders.where("amount > 0", name="paid").where("amount > 1").where("amount > 2"),
        )
    )
    assert named == ["paid", *plain[1:]]


def test_appending_a_step_renames_no_other() -> None:
    before = names(lambda shop: shop.write("big", shop.orders.where("amount > 0")))
    after = names(
        lambda shop: shop.write(
            "big", shop.orders.where("amount > 0").where("amount > 1").select("amount")
        )
    )
    assert after[: len(before)] == before


def test_a_union_that_is_added_renames_nothing_before_it() -> None:
    before = names(
        lambda shop: shop.write(
            "all", shop.orders.dedupe(on="order_id", within="1 hour").where("amount > 0")
        )
    )
    united = names(
        lambda shop: shop.write(
            "all",
            shop.orders.dedupe(on="order_id", within="1 hour")
            .union(shop.returns.where("amount > 5"))
            .where("amount > 0"),
        )
    )
    assert set(before) <= set(united)
    assert set(united) - set(before) == {"all.union", "all.returns.where"}


def test_branches_from_the_same_topic_are_told_apart() -> None:
    def declare(shop: Shop) -> None:
        low, high = shop.returns.where("amount < 5"), shop.returns.where("amount > 50")
        shop.write("all", shop.orders.union(low, high))

    assert names(declare) == ["all.returns.where", "all.returns-2.where", "all.union"]


def test_a_shared_step_is_named_for_the_first_output_it_feeds() -> None:
    def declare(shop: Shop) -> None:
        paid = shop.orders.where("amount > 0")
        shop.view("revenue", by_region(paid))
        shop.write("paid", paid.select("amount"))

    assert names(declare) == ["revenue.where", "revenue.aggregate", "paid.select"]


def test_an_output_that_is_added_renames_nothing() -> None:
    before = names(lambda shop: shop.view("revenue", by_region(shop.orders)))

    def declare(shop: Shop) -> None:
        table = by_region(shop.orders)
        shop.view("revenue", table)
        shop.write("changes", table.changes())
        shop.write("other", shop.returns.where("amount > 3"))

    assert names(declare)[: len(before)] == before


@given(
    st.lists(st.sampled_from(["where", "select", "dedupe", "key_by"]), max_size=8),
    st.lists(st.sampled_from(["where", "select", "dedupe"]), max_size=4),
)
def test_appending_steps_never_renames_existing_steps(before: list[str], after: list[str]) -> None:
    def chain(operations: list[str]) -> list[str]:
        shop = Shop()
        stream = shop.orders
        for operation in operations:
            stream = apply(stream, operation)
        shop.write("out", stream)
        return [each.name for each in shop.plan().steps() if each.inputs]

    first, both = chain(before), chain([*before, *after])
    assert both[: len(first)] == first
    assert len(set(both)) == len(before) + len(after)


def apply(stream: Stream, operation: str) -> Stream:
    if operation == "where":
        return stream.where("amount > 1")
    if operation == "select":
        return stream.with_columns(amount="amount + 1")
    return (
        stream.dedupe(on="order_id", within="1 hour")
        if operation == "dedupe"
        else stream.key_by("region")
    )


def test_two_steps_with_one_name_are_refused() -> None:
    shop = Shop()
    shop.write("a", shop.orders.where("amount > 0", name="mine"))
    shop.write("b", shop.orders.select("amount", name="mine"))
    with pytest.raises(
        DuplicateStep,
        match=(
            r"Two steps have the name 'mine': where\(amount > 0\) and select\(amount\).*\n.*name="
        ),
    ):
        shop.plan()


def test_a_step_cannot_have_the_name_of_an_input() -> None:
    shop = Shop()
    shop.write("a", shop.returns.where("amount > 0", name="orders"))
    with pytest.raises(DuplicateStep, match="Two steps have the name 'orders'"):
        shop.plan()


def test_a_step_that_is_used_twice_is_one_step() -> None:
    shop = Shop()
    paid = shop.orders.where("amount > 0", name="paid")
    shop.write("a", paid)
    shop.write("b", paid.union(paid))
    assert [each.name for each in shop.plan().steps() if each.inputs] == ["paid", "b.union"]


@pytest.mark.parametrize("name", ["upper(name)", "a b", "", 7, "x/y"])
def test_a_name_that_cannot_be_one_says_how_columns_are_named(name: str) -> None:
    with pytest.raises(PlanError, match=r"cannot be the name of a step.*\n.*AS name"):
        Shop().customers.with_columns(name=name, tier="tier")
