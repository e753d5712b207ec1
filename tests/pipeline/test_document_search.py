"""One query over documents that are there already: `hr.search.match` and `headrace search-test`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import headrace as hr
from headrace.cli import app
from headrace.errors import BadSearch, InputError, UnknownColumn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = [
    {"id": 1, "title": "Storm at sea", "language": "en", "price": 3.0},
    {"id": 2, "title": "calm", "language": "de", "price": 3.0},
    {"id": 3, "title": "a storm, near", "language": "de", "price": 9.0},
]


def test_arrow_pandas_and_lists_give_what_they_are() -> None:
    found = hr.search.match(pa.Table.from_pylist(ROWS), "storm -language:de", text="title")
    assert found.to_pylist() == [
        {
            **ROWS[0],
            "score": 1.0,
            "highlights": [{"column": "title", "start": 0, "end": 5, "snippet": "Storm at sea"}],
            "explanation": "storm",
        }
    ]
    assert hr.search.match(pd.DataFrame(ROWS), "storm AND price:>5")["id"].tolist() == [3]
    assert [row["id"] for row in hr.search.match(ROWS, "storm~1^2 calm")] == [1, 2, 3]


def test_invalid_searches_are_refused() -> None:
    with pytest.raises(BadSearch, match="did you mean 'title'"):
        hr.search.match(ROWS, "titel:x")
    with pytest.raises(UnknownColumn, match="did you mean 'title'"):
        hr.search.match(ROWS, "x", text="titel")
    with pytest.raises(InputError, match="was given a int"):
        hr.search.match(7, "x")
    with pytest.raises(InputError, match="a column 'score'"):
        hr.search.match([{"title": "x", "score": 1}], "x")


@pytest.mark.spark
def test_a_dataframe_of_spark_gives_one(spark: SparkSession) -> None:
    documents = spark.createDataFrame(
        [(row["id"], row["title"], row["price"]) for row in ROWS],
        "id BIGINT, title STRING, price DOUBLE",
    )
    found = hr.search.match(documents, "storm AND price:<5")
    assert found.columns == ["id", "title", "price", "score", "highlights", "explanation"]
    (row,) = found.collect()
    assert (row["id"], row["score"], row["explanation"], row["highlights"][0]["snippet"]) == (
        1,
        2.0,
        "storm, price:<5",
        "Storm at sea",
    )


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    address = f"file:{tmp_path_factory.mktemp('search') / 'log'}"
    with hr.open_log(address) as log:
        log.create_topic(
            "articles",
            "id BIGINT, title STRING, language STRING, price DOUBLE",
            partitions=2,
            key="id",
        )
        with log.producer("articles") as producer:
            producer.append(ROWS)
    return address


def run(address: str, *arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(
        app, ["search-test", *arguments, "--log", address], env={"COLUMNS": "200"}
    )
    assert done.exit_code == code, done.output
    return done.output


def test_a_topics_history(address: str) -> None:
    said = run(address, "articles", "storm AND price:<5", "--from", "7d")
    assert "1 row of 3 would have been found." in said
    assert "matches storm, price" in said
    lines = run(address, "articles", "storm", "--json", "--max", "1").splitlines()
    assert len(lines) == 2
    assert lines[-1] == '{"rows": 3, "found": 2}'


def test_a_topics_history_from_the_end_has_nothing(address: str) -> None:
    assert "0 rows of 0" in run(address, "articles", "storm", "--from", "latest")


def test_the_installed_command(address: str) -> None:
    command = Path(sys.executable).with_name("headrace")
    done = subprocess.run(
        [command, "search-test", "--log", address, "--", "articles", "-storm"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (
        0,
        "1 row of 3 would have been found.",
    ), done.stderr
    done = subprocess.run(
        [command, "search-test", "articles", "title:(storm", "--log", address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "A parenthesis is never closed (at character 6)" in done.stderr
