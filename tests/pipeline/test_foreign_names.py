"""Names that people know from PySpark, pandas, Flink and Kafka Streams answer with what to write
here instead.
"""

import copy
import re
from typing import Any

import pytest

import headrace as hr
from headrace.errors import HeadraceError, PlanError, UnknownOperation
from headrace.pipeline.foreign_names import (
    GROUP_REPLACEMENTS,
    REPLACEMENTS,
    TABLE_REPLACEMENTS,
)
from headrace.pipeline.stream import GroupedRows, Stream, Table, WindowedRows
from tests.pipeline.shop_pipeline import Shop


@pytest.fixture
def shop() -> Shop:
    return Shop()


CASES = [
    ("filter", "where("),
    ("withColumn", "with_columns("),
    ("withColumns", "with_columns("),
    ("groupBy", "group_by("),
    ("groupby", "group_by("),
    ("agg", "aggregate("),
    ("map", "with_columns("),
    ("drop", "select("),
    ("orderBy", "top("),
    ("limit", "top("),
    ("distinct", "dedupe("),
    ("merge", "join("),
    ("rolling", "over("),
    ("shift", "hr.over.lag("),
    ("withWatermark", "hr.EventTime("),
    ("writeStream", "pipeline.write("),
    ("show", "pipeline.view("),
    ("collect", "pipeline.view("),
    ("toPandas", "to_pandas()"),
    ("keyBy", "key_by("),
]


@pytest.mark.parametrize(("name", "instead"), CASES)
def test_a_stream_says_what_to_write_instead(shop: Shop, name: str, instead: str) -> None:
    stream: Any = shop.orders
    with pytest.raises(UnknownOperation, match=f"The stream orders has no '{name}'") as error:
        getattr(stream, name)
    assert instead in error.value.fix


@pytest.mark.parametrize(("name", "instead"), [case for case in CASES if case[0] != "distinct"])
def test_a_table_says_what_to_write_instead(shop: Shop, name: str, instead: str) -> None:
    table: Any = shop.customers
    with pytest.raises(UnknownOperation, match=f"The table customers has no '{name}'") as error:
        getattr(table, name)
    assert instead in error.value.fix


def test_groups_and_windows_know_the_names_of_aggregates(shop: Shop) -> None:
    groups: Any = shop.orders.group_by("region")
    with pytest.raises(UnknownOperation, match=r"(?s)The groups of orders.*aggregate\(total="):
        groups.agg(total="sum(amount)")
    pipeline = hr.Pipeline("p")
    topic = pipeline.topic("t", schema="at TIMESTAMP", event_time="at")
    windows: Any = topic.window(hr.tumbling("1 minute"))
    with pytest.raises(UnknownOperation, match=r"(?s)The windows of t.*aggregate\(n="):
        windows.count()


def test_other_names_suggest_the_nearest(shop: Shop) -> None:
    stream: Any = shop.orders
    with pytest.raises(UnknownOperation, match="did you mean 'dedupe'"):
        stream.dedup(on="order_id")
    table: Any = shop.customers
    with pytest.raises(UnknownOperation, match="did you mean 'changes'"):
        table.change()


def test_the_error_is_an_attribute_error_and_one_of_ours(shop: Shop) -> None:
    stream: Any = shop.orders
    for kind in (AttributeError, PlanError, HeadraceError):
        with pytest.raises(kind):
            stream.filter("amount > 1")
    assert not hasattr(stream, "filter")
    assert getattr(stream, "filter", None) is None


def test_private_names_and_copies_are_left_alone(shop: Shop) -> None:
    stream: Any = shop.orders
    with pytest.raises(AttributeError, match="_ipython_canary"):
        stream._ipython_canary_method_should_not_exist_  # noqa: B018
    assert copy.copy(stream).step is stream.step
    with pytest.raises(AttributeError):
        Stream.__new__(Stream).step  # noqa: B018 - as while it is unpickled


@pytest.mark.parametrize(
    ("kinds", "replacements"),
    [
        ((Stream,), REPLACEMENTS),
        ((Table,), TABLE_REPLACEMENTS),
        ((GroupedRows, WindowedRows), GROUP_REPLACEMENTS),
    ],
)
def test_suggested_names_exist(kinds: tuple[type, ...], replacements: dict[str, str]) -> None:
    """Each method that an answer names is one of ours."""
    known = {
        name for kind in (*kinds, Stream, Table, GroupedRows, hr.Pipeline) for name in dir(kind)
    }
    known |= {"EventTime", "sum", "count", "avg", "min", "max", "custom", "correct", "divert"}
    known |= {"tumbling", "print", "coalesce", "to_pandas", "lag"}
    for name, instead in replacements.items():
        called = set(re.findall(r"(\w+)\(", instead)) - known
        assert not called, f"{name}: {called}"
