"""The example in the docstring of every public operation is declared as it stands, and every public
operation has one, with its arguments, its result and its errors.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.pipeline.pipeline import Pipeline, shed
from headrace.pipeline.relation import Relation
from headrace.pipeline.stream import FramedRows, GroupedRows, Rows, Stream, Table, WindowedRows
from headrace.pipeline.view import View
from headrace.plan.event_time import EventTime, device_time, processing_time
from headrace.plan.plan import PipelinePlan

CLASSES: tuple[type, ...] = (
    Pipeline,
    Relation,
    Rows,
    Stream,
    Table,
    GroupedRows,
    WindowedRows,
    FramedRows,
    View,
    hr.search.Search,
)
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    hr.pattern,
    shed,
    device_time,
    processing_time,
    hr.search.match,
    hr.tumbling,
    hr.hopping,
    hr.sliding,
    hr.session,
    hr.late.drop,
    hr.late.correct,
    hr.late.divert,
    hr.file_table,
    hr.over.lag,
    hr.over.lead,
    hr.over.row_number,
    hr.over.rank,
    hr.over.dense_rank,
    *(getattr(hr.agg, name) for name in hr.agg.__all__ if name[0].islower()),
)
DOCUMENTED_CLASSES = (Pipeline, Stream, Table, View, EventTime, PipelinePlan, hr.search.Search)
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def methods() -> Iterator[tuple[str, Any]]:
    for kind in CLASSES:
        for name, member in vars(kind).items():
            if name.startswith("_") or not (callable(member) or isinstance(member, property)):
                continue
            if not (inspect.getdoc(member) or "").startswith("Internal:"):
                yield f"{kind.__name__}.{name}", member
    for function in FUNCTIONS:
        yield function.__name__, function


def documented() -> Iterator[tuple[str, str]]:
    for name, member in methods():
        yield name, inspect.getdoc(member) or ""
    for kind in DOCUMENTED_CLASSES:
        yield kind.__name__, inspect.getdoc(kind) or ""


def names() -> dict[str, Any]:
    """What examples may use: a pipeline `shop` with inputs and tables."""
    shop = hr.Pipeline("shop", log="file:data")
    orders = shop.topic(
        "orders",
        schema=(
            "order_id BIGINT, customer_id BIGINT, region STRING, amount DOUBLE, placed_at TIMESTAMP"
        ),
        key="order_id",
        event_time="placed_at",
    )
    return {
        "hr": hr,
        "pa": pa,
        "shop": shop,
        "orders": orders,
        "payments": shop.topic(
            "payments",
            schema="order_id BIGINT, amount DOUBLE, paid_at TIMESTAMP",
            key="order_id",
            event_time="paid_at",
        ),
        "customers": shop.table(
            "customers",
            schema="customer_id BIGINT, name STRING, country STRING, valid_from TIMESTAMP",
            key="customer_id",
            event_time=hr.EventTime("valid_from"),
            history="30 days",
        ),
        "articles": shop.topic("articles", schema="id BIGINT, title STRING, body STRING"),
        "searches": shop.table("searches", schema="owner STRING, query STRING", key="owner"),
        "revenue": orders.group_by("region").aggregate(total=hr.agg.sum("amount")),
        "hourly": orders.window(hr.tumbling("1 hour")).aggregate(n=hr.agg.count()),
    }


EXAMPLES = [(name, text) for name, doc in documented() for text in _BLOCK.findall(doc)]


@pytest.mark.parametrize(("name", "text"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_example_can_be_declared(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(textwrap.dedent(text), name, "exec"), {"__name__": name, **names()})


@pytest.mark.parametrize(("name", "member"), list(methods()), ids=[name for name, _ in methods()])
def test_the_docstring_is_complete(name: str, member: Any) -> None:
    text = inspect.getdoc(member) or ""
    assert text, name
    function: Any = member.fget if isinstance(member, property) else inspect.unwrap(member)
    signature = inspect.signature(function)
    sections = set(re.findall(r"^(\w+):$", text, re.MULTILINE))
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    assert not parameters or "Args" in sections
    for parameter in parameters:
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        assert f"\n    {stars}{parameter.name}: " in text, (
            f"{name} does not document {parameter.name}"
        )
    returns = "None" not in str(signature.return_annotation).split(" | ")[0]
    if returns and not isinstance(member, property):
        assert sections & {"Returns", "Yields"}, name
    assert isinstance(member, property) or "Example" in sections, name
