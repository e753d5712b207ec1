"""Drawings of a plan: the tree, Mermaid, the layout and the SVG."""

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.plan.plan import PipelinePlan, tree
from headrace.plan.rendering import (
    OUTPUT,
    STATE,
    Graph,
    Node,
    graph,
    layout,
    mermaid,
    shorten,
    svg,
)
from tests.pipeline.shop_pipeline import Shop

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def plan() -> PipelinePlan:
    shop = Shop()
    both = shop.orders.dedupe(on="order_id", within="1 hour").union(
        shop.returns.where("amount < 5 AND region <> '<b>\"x\" & y'")
    )
    shop.view("revenue", both.group_by("region").aggregate(revenue=hr.agg.sum("amount")))
    shop.write("all", both)
    return shop.plan()


def test_the_tree_shows_each_step_once(plan: PipelinePlan) -> None:
    assert (
        tree(plan)
        == str(plan)
        == """\
pipeline shop
├─ view revenue
│  └─ revenue.aggregate  aggregate by region: revenue = sum(amount)  [keeps state]
│     └─ revenue.union  union 2 inputs
│        ├─ revenue.dedupe  dedupe on order_id within 1 hour  [keeps state]
│        │  └─ orders  topic key customer_id; event time placed_at, delay 0 seconds, idle 1 minute
│        └─ revenue.returns.where  where amount < 5 AND region <> '<b>"x" & y'
│           └─ returns  topic key customer_id
├─ topic all
│  └─ revenue.union  (as above)
└─ not used: customers"""
    )


def test_the_graph_has_every_step_and_output(plan: PipelinePlan) -> None:
    drawn = graph(plan)
    kinds = {node.title: node.kind for node in drawn.nodes}
    assert (kinds["revenue.aggregate"], kinds["all"], kinds["customers"]) == (
        STATE,
        OUTPUT,
        "table",
    )
    names = {node.id: node.title for node in drawn.nodes}
    edges = {(names[start], names[end]) for start, end in drawn.edges}
    assert ("revenue.union", "all") in edges
    assert len(edges) == 7


def test_a_step_that_feeds_another_twice_has_one_arrow() -> None:
    shop = Shop()
    shop.write("twice", shop.orders.union(shop.orders))
    assert len(graph(shop.plan()).edges) == 2


def test_mermaid_is_escaped(plan: PipelinePlan) -> None:
    text = mermaid(plan)
    assert text.startswith("flowchart LR\n")
    assert "amount #60; 5 AND region #60;#62; #39;#60;b#62;#34;x#34; #38; y#39;" in text
    nodes = [line for line in text.splitlines() if re.match(r"    [so]\d+[\[(]", line)]
    assert len(nodes) == len(graph(plan).nodes)
    assert all(line.count('"') == 2 for line in nodes)


def test_the_svg_is_sound_and_says_everything(plan: PipelinePlan) -> None:
    root = ET.fromstring(svg(plan))
    assert root.tag == f"{SVG}svg"
    said = {title.text for title in root.iter(f"{SVG}title")}
    assert "revenue.aggregate: aggregate by region: revenue = sum(amount)" in said
    assert any("'<b>\"x\" & y'" in (text or "") for text in said)
    boxes = [each for each in root.iter(f"{SVG}rect") if each.get("x")]
    assert len(boxes) == len(graph(plan).nodes)
    assert len([each for each in root.iter(f"{SVG}path") if each.get("marker-end")]) == len(
        graph(plan).edges
    )


def test_the_svg_leaves_other_pictures_of_its_page_alone(plan: PipelinePlan) -> None:
    root = ET.fromstring(svg(plan))
    rules = (root.findtext(f"{SVG}style") or "").split("}")
    assert len(rules) > 1
    assert [rule for rule in rules if rule and not rule.startswith(f".{root.get('class')} ")] == []


def test_boxes_do_not_overlap_and_lie_inside(plan: PipelinePlan) -> None:
    root = ET.fromstring(svg(plan))
    width, height = (float(root.get(side) or 0) for side in ("width", "height"))
    boxes = [
        tuple(float(each.get(name) or 0) for name in ("x", "y", "width", "height"))
        for each in root.iter(f"{SVG}rect")
        if each.get("x")
    ]
    for x, y, w, h in boxes:
        assert 0 <= x <= width - w
        assert 0 <= y <= height - h
    apart = [
        one[0] + one[2] <= other[0]
        or other[0] + other[2] <= one[0]
        or one[1] + one[3] <= other[1]
        or other[1] + other[3] <= one[1]
        for index, one in enumerate(boxes)
        for other in boxes[:index]
    ]
    assert all(apart)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(1, 12))
    nodes = tuple(Node(f"n{number}", "step", "", "") for number in range(count))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(
        lambda pair: pair[0] < pair[1]
    )
    edges = draw(st.lists(pairs, max_size=20, unique=True)) if count > 1 else []
    return Graph(nodes, tuple((f"n{start}", f"n{end}") for start, end in edges))


@given(graphs())
def test_arrows_only_go_from_a_column_to_the_next(drawn: Graph) -> None:
    placed = layout(drawn)
    column = {name: index for index, names in enumerate(placed.columns) for name in names}
    assert {node.id for node in drawn.nodes} <= set(column)
    assert sum(map(len, placed.columns)) == len(column), "nothing stands in two places"
    for (start, end), route in zip(drawn.edges, placed.routes, strict=True):
        assert (route[0], route[-1]) == (start, end)
        assert [column[name] for name in route] == list(range(column[start], column[end] + 1))


def test_crossing_arrows_are_untangled() -> None:
    nodes = tuple(Node(name, "step", "", "") for name in ("a", "b", "c", "d"))
    placed = layout(Graph(nodes, (("a", "d"), ("b", "c"))))
    assert list(placed.columns[1]) == ["d", "c"]


def test_long_texts_are_cut() -> None:
    assert shorten("a  b\n c") == "a b c"
    assert shorten("x" * 100, 10) == "x" * 9 + "…"
