"""`headrace state`: which steps keep state, what they keep for which key, and whether the files are
sound.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.pipeline.loader import load_pipeline
from headrace.testing.pipelines import PipelineTest
from tests.cli.conftest import Run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SHOP = """
import headrace as hr

shop = hr.Pipeline("shop")
orders = shop.topic("orders", schema="k BIGINT, day DATE, v BIGINT, who STRING", key="k")
shop.view("totals", orders.group_by("k").aggregate(s=hr.agg.sum("v"), all=hr.agg.collect("v")))
shop.view("days", orders.group_by("who", "day").aggregate(n=hr.agg.count()))
once = orders.dedupe(on="who", within="1 hour")
shop.view("once", once.group_by("k").aggregate(n=hr.agg.count()))
shop.view("names", shop.table("people", schema="k BIGINT, name STRING", key="k"))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """A pipeline that has run, and a version of it."""
    root = tmp_path_factory.mktemp("shop")
    (root / "shop.py").write_text(SHOP)
    with PipelineTest(load_pipeline(root / "shop.py"), root, spark) as test:
        test.feed(
            "orders",
            [{"k": n % 5, "day": date(2026, 1, 1), "v": n, "who": f"w{n % 2}"} for n in range(20)],
        )
        test.feed("orders", [{"k": 1, "day": date(2026, 1, 31), "v": 100, "who": "x" * 600}])
        test.feed("people", [{"k": 7, "name": "Ada"}])
        test.settle()
        with test.replay("v2") as version:
            version.settle()
    (root / "state").rename(root / "shop.state")
    return root


@pytest.fixture
def address(root: Path) -> str:
    return f"file:{root / 'log'}"


def test_steps_are_listed(run: Run, root: Path) -> None:
    found = {
        row["step"]: row["keys"] for row in run("state", "list", root / "shop.py", "--json").lines
    }
    assert (found["totals.aggregate"], found["days.aggregate"], found["people"]) == (5, 3, 1)
    by_name = run("state", "list", "shop", "--state", root / "shop.state", "--json").lines
    assert {row["step"]: row["keys"] for row in by_name} == found
    versions = {
        row["step"]: row["keys"]
        for row in run("state", "list", root / "shop.py", "--as", "v2", "--json").lines
    }
    assert versions == {f"{step}.v2": keys for step, keys in found.items()}
    assert "intact" in run("state", "verify", root / "shop.py").out
    (sound,) = run("state", "verify", root / "shop.py", "--json").lines
    assert (sound["damage"], "intact" in sound["message"]) == (None, True)


def test_a_step_is_shown_key_by_key(run: Run, root: Path) -> None:
    found = run("state", "show", root / "shop.py", "totals.aggregate", "--json").lines
    assert {row["k"]: (row["_rows"], row["s"]) for row in found} == {
        k: (4 + (k == 1), 4 * k + 30 + 100 * (k == 1)) for k in range(5)
    }
    assert run("state", "show", root / "shop.py", "people", "--json").lines == [
        {"k": 7, "name": "Ada"}
    ]
    shown = run(
        "state", "show", root / "shop.py", "totals.aggregate", "--limit", 2
    ).out.splitlines()
    assert shown[0] == "totals.aggregate at tick 1"
    assert ["k", "rows", "s", "all"] in [line.split() for line in shown]
    assert shown[-1] == "There are more than 2 keys; --limit shows more."


@pytest.mark.parametrize("key", ["1", '{"k": 1}', '{"k": "1"}'])
def test_one_key_is_shown(run: Run, root: Path, key: str) -> None:
    (row,) = run(
        "state", "show", root / "shop.py", "totals.aggregate", "--key", key, "--json"
    ).lines
    assert row == {"k": 1, "_rows": 5, "s": 134, "all": [1, 6, 11, 16, 100]}
    (row,) = run(
        "state",
        "show",
        root / "shop.py",
        "totals.aggregate.v2",
        "--as",
        "v2",
        "--key",
        key,
        "--json",
    ).lines
    assert row["s"] == 134
    plain = run(
        "state", "show", root / "shop.py", "totals.aggregate", "--as", "v2", "--key", key
    ).out
    assert plain.startswith("totals.aggregate.v2 at tick 1")


def test_a_key_of_several_columns_is_shown(run: Run, root: Path) -> None:
    (row,) = run(
        "state",
        "show",
        root / "shop.py",
        "days.aggregate",
        "--key",
        '{"day": "2026-01-01", "who": "w1"}',
        "--json",
    ).lines
    assert (row["who"], row["day"], row["n"]) == ("w1", "2026-01-01", 10)
    rows = run("state", "show", root / "shop.py", "days.aggregate", "--json").lines
    assert (
        len([row for row in rows if "_key" in row]) == 1
    )  # of a long key only the beginning is kept


def test_undecodable_state_is_shown_as_bytes(run: Run, root: Path) -> None:
    by_name = run(
        "state", "show", "shop", "totals.aggregate", "--state", root / "shop.state", "--json"
    ).lines
    assert [sorted(row) for row in by_name] == [["_bytes", "_key"]] * 5
    timed = run("state", "show", root / "shop.py", "once.dedupe", "--json").lines
    assert timed
    assert all(row["_bytes"] >= 0 for row in timed)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("totals.agregate",), 1, "did you mean 'totals.aggregate'?"),
        (("totals.aggregate", "--key", "99"), 1, "has no state for 99"),
        (("totals.aggregate", "--key", "many"), 2, "'many' is not a whole number"),
        (("totals.aggregate", "--key", '{"kk": 1}'), 2, "there is no 'kk': did you mean 'k'?"),
        (("days.aggregate", "--key", "w1"), 2, "is (who, day): give it as JSON"),
        (("days.aggregate", "--key", '{"who": "w1"}'), 2, "a column is missing"),
        (("once.dedupe", "--key", "w1"), 2, "cannot be read here"),
    ],
)
def test_arguments_that_are_refused(
    run: Run, root: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = run("state", "show", root / "shop.py", *arguments, code=code)
    assert said in " ".join(done.err.replace("│", " ").split())


def test_a_pipeline_that_never_ran_is_named(run: Run, root: Path) -> None:
    assert (
        "did you mean 'shop'?"
        in run("state", "list", "shopp", "--state", root / "shop.state", code=1).err
    )
