"""`headrace replay` and `headrace rescale`: next to the old version, from a chosen tick, with as
many shards as one says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headrace as hr
from headrace.run_status import read_status
from headrace.runtime.query_assignment import remembered_shards
from headrace.views.reader import ViewReader
from tests.cli.conftest import Run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHOP = """
import headrace as hr

shop = hr.Pipeline("shop")
orders = shop.topic("orders", schema="k BIGINT, v BIGINT", key="k")
totals = orders.group_by("k").aggregate(s=hr.agg.sum("v"))
shop.view("totals", totals)
shop.write("changes", totals)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shop.py"
    path.write_text(SHOP)
    return path


def feed(log: hr.Log, *values: int) -> None:
    with log.producer("orders") as producer:
        producer.append([{"k": 1, "v": value} for value in values])


def total(state: Path, view: str = "totals") -> int:
    with ViewReader(state / "views.db") as views:
        (row,) = views.table(view).to_pylist()
    found: int = row["s"]
    return found


@pytest.mark.spark
def test_a_version_is_built_next_to_the_old_one(
    run: Run, log: hr.Log, file: Path, spark: SparkSession
) -> None:
    log.create_topic("orders", "k BIGINT, v BIGINT", key="k")
    state = file.parent / "shop.state"
    run("rescale", file, "--shards", 3)
    for value in (1, 10, 100):
        feed(log, value)
        run("run", file, "--until-caught-up", "--master", "local[2]")
    assert (total(state), read_status(state).shards) == (111, 3)
    done = run("replay", file, "--as", "v2", "--until-caught-up", "--master", "local[2]")
    assert done.out.splitlines()[0].startswith("Replaying shop as v2; state and views in ")
    assert done.out.splitlines()[-1].startswith("Caught up at tick 3: 3 rows")
    assert total(state / "versions" / "v2", "totals.v2") == 111
    columns = ["k", "s", "_change_type"]
    assert (
        log.read("changes.v2", columns=columns)
        .to_table()
        .equals(log.read("changes", columns=columns).to_table())
    )
    run(
        "replay",
        file,
        "--as",
        "late",
        "--from",
        3,
        "--shards",
        1,
        "--until-caught-up",
        "--master",
        "local[2]",
    )
    late = state / "versions" / "late"
    assert (total(late, "totals.late"), read_status(late).shards) == (100, 1)
    again = run("replay", file, "--as", "late", "--from", 2, code=1)
    assert "was begun at tick 3" in again.err
    assert "--from" in again.err


def test_rescaling_is_remembered(run: Run, log: hr.Log, file: Path) -> None:
    assert run("rescale", file, "--shards", 8).out == "shop will run with 8 shards.\n"
    run("rescale", file, "--shards", 2, "--as", "v2")
    assert (
        remembered_shards(log, "shop"),
        remembered_shards(log, "shop.v2"),
        remembered_shards(log, "other"),
    ) == (8, 2, None)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("replay", "--as", "v2"), 1, "has never run on this log"),
        (("replay", "--as", "v 2"), 1, "cannot be a version"),
        (
            ("replay", "--as", "v2", "--from", "yesterday-ish"),
            2,
            "neither a tick's number nor a time",
        ),
        (("replay",), 2, "--as"),
        (("rescale", "--shards", "129"), 2, "--shards"),
        (("rescale",), 2, "--shards"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_starts(
    run: Run, log: hr.Log, file: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    command, *options = arguments
    done = run(command, file, *options, code=code)
    assert said in re.sub(r"\s+", " ", done.err.replace("│", ""))
    assert not [topic for topic in log.topics() if topic.startswith("__")]


def test_a_log_that_is_not_there_is_not_made(run: Run, file: Path, tmp_path: Path) -> None:
    run("rescale", file, "--shards", 2, "--log", f"file:{tmp_path / 'misspelt'}", code=1)
    assert not (tmp_path / "misspelt").exists()
