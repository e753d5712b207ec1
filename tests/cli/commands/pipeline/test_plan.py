"""`headrace plan`: a tree, Mermaid, SVG and JSON of what a file declares."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.cli.conftest import Run

SHOP = """
import headrace as hr
shop = hr.Pipeline("shop", log="file:no/such/place")
orders = shop.topic("orders", schema="region STRING, amount DOUBLE", key="region")
paid = orders.where("amount > 0")
shop.view("revenue", paid.group_by("region").aggregate(revenue=hr.agg.sum("amount")))
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop.py"
    path.write_text(SHOP)
    return path


def test_a_tree(run: Run, shop: Path) -> None:
    out = run("plan", shop).out.splitlines()
    assert out[0] == "pipeline shop"
    assert (
        out[2]
        == "   └─ revenue.aggregate  aggregate by region: revenue = sum(amount)  [keeps state]"
    )


def test_json_lines(run: Run, shop: Path) -> None:
    lines = run("plan", shop, "--json").lines
    assert [each.get("step") or each["output"] for each in lines] == [
        "orders",
        "revenue.where",
        "revenue.aggregate",
        "revenue",
    ]
    assert lines[1]["condition"] == "amount > 0"


def test_mermaid(run: Run, shop: Path) -> None:
    assert run("plan", shop, "--mermaid").out.startswith("flowchart LR\n")


def test_a_picture(run: Run, shop: Path, tmp_path: Path) -> None:
    target = tmp_path / "shop.svg"
    assert f"The graph is in {target}." in run("plan", shop, "--svg", target).out
    assert ET.parse(target).getroot().tag.endswith("svg")
    assert run("plan", shop, "--svg", "-").out == target.read_text()
    assert (
        "cannot be written" in run("plan", shop, "--svg", tmp_path / "no" / "dir.svg", code=2).err
    )


def test_output_formats_are_exclusive(run: Run, shop: Path) -> None:
    assert "Choose one" in run("plan", shop, "--svg", "x.svg", "--json", code=2).err


def test_errors_name_the_file_the_line_and_the_fix(run: Run, shop: Path) -> None:
    shop.write_text(SHOP.replace("amount > 0", "amont > 0"))
    err = run("plan", shop, code=1).err
    assert "has no column 'amont': did you mean 'amount'?" in err
    assert f"in {shop}, line 5" in err
    assert "There is no file" in run("plan", "none.py", code=1).err


def test_planning_starts_and_creates_nothing(run: Run, shop: Path, tmp_path: Path) -> None:
    run("plan", shop)
    assert [each.name for each in tmp_path.iterdir() if each.name != "__pycache__"] == ["shop.py"]


def test_the_automaton_of_a_pattern(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bank.py"
    path.write_text(
        'import headrace as hr\nbank = hr.Pipeline("bank", log="file:no/such/place")\npaid ='
        ' bank.topic("paid", schema="card STRING, amount DOUBLE, at TIMESTAMP", key="card",'
        ' event_time=hr.EventTime("at"))\nbank.write("fraud", paid.match("small{2,} !x -> big",'
        ' define={"small": "amount < 10", "big": "amount > 1000", "x": "amount IS NULL"}, within="1'
        ' hour"))\n'
    )
    out = [line.strip(" │") for line in run("plan", path).out.splitlines()]
    assert "begins with small.1" in out
    assert "small.2 → small.2, big (skip till next, no x between)" in out
    (step,) = [
        each for each in run("plan", path, "--json").lines if each.get("operation") == "match"
    ]
    assert (step["pattern"], step["within"], step["after_match"]) == (
        "small{2,} !x -> big",
        "1 hour",
        "skip past last row",
    )
