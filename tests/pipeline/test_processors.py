"""`process` when it is declared: what is checked, and what an edit of the code does to the plan."""

from __future__ import annotations

from typing import Any

import pytest

import headrace as hr
from headrace.errors import NoFingerprint, PlanError, UnfitColumn, UnknownColumn


def streams() -> tuple[Any, Any]:
    shop = hr.Pipeline("shop")
    carts = shop.topic("carts", schema="cart STRING, items INT, at TIMESTAMP", event_time="at")
    paid = shop.topic("paid", schema="cart STRING, amount DOUBLE")
    return carts, paid


class Totals(hr.Processor, each_key=True):
    output = "cart STRING, total INT, at TIMESTAMP"
    total = hr.state("INT", default=0)
    left = hr.timer()

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    def on_row(self, row: dict[str, Any], ctx: Any) -> dict[str, Any]:
        ctx["total"] += self.factor * row["items"]
        return {"cart": row["cart"], "total": ctx["total"], "at": row["at"]}

    def on_timer(self, key: dict[str, Any], ctx: Any) -> None: ...


def test_a_class_and_an_instance_of_it_are_one_plan() -> None:
    carts, _ = streams()
    by_class, by_instance = (carts.process(each, key="cart") for each in (Totals, Totals()))
    assert by_class.step == by_instance.step
    assert by_class.step != carts.process(Totals(2), key="cart").step
    assert by_class.schema.names == ["cart", "total", "at"]
    assert by_class.key == ("cart",)
    assert "process Totals(factor=1) by cart" in str(declared(by_class))


def declared(stream: Any) -> Any:
    stream.pipeline.write("totals", stream)
    return stream.pipeline.plan()


def test_event_time_goes_on_in_a_column_of_its_name() -> None:
    carts, _ = streams()
    totals = carts.process(Totals, key="cart")
    windows = totals.window(hr.tumbling("1 minute")).group_by("cart")
    assert windows.aggregate(n=hr.agg.count()).key

    class Untimed(Totals):
        output = "cart STRING, total INT"

    with pytest.raises(PlanError, match="event time"):
        carts.process(Untimed, key="cart").window(hr.tumbling("1 minute"))


class Base(hr.Processor):
    output = "cart STRING"

    def on_rows(self, rows: Any, ctx: Any) -> None: ...


def subclass(**members: Any) -> type[hr.Processor]:
    return type("Mine", (Base,), members)


def nothing(self: Any, rows: Any, ctx: Any) -> None:
    """Nothing to do."""


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (3, "was given a int"),
        (dict, "was given a type"),
        (subclass(output=None), "declares no output"),
        (subclass(output="items INT"), "without the key column 'cart'"),
        (subclass(output="cart INT"), "the key column 'cart' as STRING and as INT"),
        (subclass(output="cart STRING, _tick INT"), "reserved"),
        (subclass(odd=hr.side_output("why STRING")), "without the key column 'cart'"),
        (subclass(odd=hr.side_output("cart INT")), "'cart' as STRING in output, and as INT in odd"),
        (subclass(odd=hr.side_output("cart STRING, _tick INT")), "reserved"),
        (subclass(output="cart STRING, n INT", table_key="n"), "lacks 'cart'"),
        (subclass(left=hr.timer()), "has no method on_timer"),
        (subclass(on_timer=nothing), "no timer is declared"),
        (subclass(on_paid=nothing), "method on_paid is never called"),
        (subclass(left=hr.timer(), again=hr.timer(clock="processing"), on_timer=nothing), "both"),
        (subclass(n=hr.state("INT", default="x")), "a default that does not fit INT"),
        (subclass(on_rows=None, on_row=nothing), "each_key=True"),
        (subclass(__init__=lambda self, a: None), "cannot be made without arguments"),
        (subclass(**{f"s{n}": hr.state("INT") for n in range(101)}), "100 are possible"),
    ],
)
def test_what_a_processor_lacks_is_said_when_it_is_declared(processor: Any, message: str) -> None:
    carts, _ = streams()
    with pytest.raises(PlanError, match=message) as caught:
        carts.process(processor, key="cart")
    assert "To fix" in str(caught.value)


def test_a_processor_with_a_key_gives_a_table_and_side_outputs_give_streams() -> None:
    carts, _ = streams()
    odd = hr.side_output("cart STRING, at TIMESTAMP")
    members = {"output": "cart STRING, n INT NOT NULL", "table_key": "cart", "odd": odd}
    table: Any = carts.process(subclass(**members), key="cart", name="mine")
    assert isinstance(table, hr.Table)
    assert (table.key, table.schema.names) == (("cart",), ["cart", "n"])
    side = table.side("odd")
    assert isinstance(side, hr.Stream)
    assert side.key == ("cart",)
    counts = side.window(hr.tumbling("1 minute")).aggregate(n=hr.agg.count())
    assert "n" in counts.schema.names
    plan = carts.pipeline
    plan.view("n", table)
    plan.write("odd", side)
    assert [step.name for step in plan.plan().steps()][-4:] == [
        "mine", "n.output", "n.upserts", "odd.output",
    ]  # fmt: skip
    with pytest.raises(UnknownColumn, match="'item'"):
        carts.process(subclass(table_key="item"), key="cart")
    with pytest.raises(PlanError, match="no side output 'ood': did you mean 'odd'"):
        table.side("ood")
    for other in (carts, side, table.where("n > 1")):
        with pytest.raises(PlanError, match="has no side outputs"):
            other.side("odd")


def test_inputs_and_options_are_checked() -> None:
    carts, paid = streams()
    other, _ = streams()
    with pytest.raises(PlanError, match="has no method on_paid"):
        carts.process(Base, key="cart", paid=paid)
    with_paid = subclass(on_paid=nothing)
    assert len(carts.process(with_paid, key="cart", paid=paid).step.inputs) == 2
    with pytest.raises(PlanError, match="another pipeline"):
        carts.process(with_paid, key="cart", paid=other)
    with pytest.raises(PlanError, match="was given errror='divert'"):
        carts.process(Base, key="cart", errror="divert")
    with pytest.raises(PlanError, match="'null', which is not supported"):
        carts.process(Base, key="cart", errors="null")
    with pytest.raises(PlanError, match="no time at all"):
        carts.process(Base, key="cart", ttl="0 seconds")
    with pytest.raises(UnknownColumn):
        carts.process(Base, key="crat")
    with pytest.raises((UnfitColumn, UnknownColumn)):
        carts.process(subclass(output="items INT", on_paid=nothing), key="items", paid=paid)


def test_code_without_a_fingerprint_needs_a_version() -> None:
    carts, _ = streams()
    lock = __import__("threading").Lock()

    def on_rows(self: Any, rows: Any, ctx: Any) -> None:
        lock.acquire()

    with pytest.raises(NoFingerprint, match="version="):
        carts.process(subclass(on_rows=on_rows), key="cart")
    versioned = carts.process(subclass(on_rows=on_rows, version="2"), key="cart")
    assert versioned.step.code == "version 2"


def test_an_edit_of_the_code_is_an_edit_of_the_step() -> None:
    carts, _ = streams()

    class Edited(Totals):
        def on_row(self, row: dict[str, Any], ctx: Any) -> dict[str, Any]:
            ctx["total"] += 2 * self.factor * row["items"]
            return {"cart": row["cart"], "total": ctx["total"], "at": row["at"]}

    Edited.__qualname__ = Totals.__qualname__
    before, after = (carts.process(each, key="cart").step for each in (Totals, Edited))
    assert before.signature != after.signature

    class Versioned(Totals):
        version = "1"

    class EditedVersioned(Edited):
        version = "1"

    EditedVersioned.__qualname__ = Versioned.__qualname__
    before, after = (carts.process(each, key="cart").step for each in (Versioned, EditedVersioned))
    assert before.signature == after.signature
