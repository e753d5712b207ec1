"""Search through the engine: what every query against every document gives, whatever the batches,
shards, restarts, deaths and replays; without Spark and on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.operators.search.index import clear_index_cache
from headrace.testing.pipelines import Died, PipelineTest
from tests.e2e.searched import ARTICLES, OUTPUTS, check, feed_tick, history, outputs, searched

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_syncs")
TICKS = history(5)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    with PipelineTest(searched("press"), tmp_path_factory.mktemp("calm")) as test:
        for number, given in enumerate(TICKS):
            feed_tick(test, number, given)
        test.settle()
        check(test, TICKS)
        found = outputs(test)
    assert all(found.values()), "every output has something to tell"
    return found


def test_batches_shards_and_restarts_do_not_matter(
    tmp_path: Path, calm: dict[str, list[Any]]
) -> None:
    with PipelineTest(searched("press"), tmp_path, shards=1) as test:
        for number, given in enumerate(TICKS):
            feed_tick(test, number, given)
            test.step(1)
            clear_index_cache()
            test.restart(shards=(3, 2, 5, 1)[number % 4], lose_local_store=number % 2 == 0)
        test.settle(1)
        assert outputs(test) == calm


@pytest.mark.parametrize(
    "point",
    [
        "before the pack",
        "in the kernel",
        "files were written",
        "before the commit",
        "after the commit",
    ],
)
def test_a_death_loses_and_doubles_nothing(
    tmp_path: Path, calm: dict[str, list[Any]], point: str
) -> None:
    with PipelineTest(searched("press"), tmp_path) as test:
        for number, given in enumerate(TICKS):
            feed_tick(test, number, given)
            if number % 2:
                with pytest.raises(Died):
                    test.step(dies=point)
                test.restart()
        test.settle()
        assert outputs(test) == calm


def test_a_replay_gives_equal_matches(tmp_path: Path, calm: dict[str, list[Any]]) -> None:
    with PipelineTest(searched("press"), tmp_path) as test:
        for number, given in enumerate(TICKS):
            feed_tick(test, number, given)
            test.step()
        clear_index_cache()
        with test.replay("again", shards=3) as again:
            again.settle()
            assert {name: test.rows(f"{name}.again") for name in OUTPUTS} == {
                name: calm[name] for name in OUTPUTS
            }


@pytest.mark.spark
def test_matches_on_spark_equal_those_without(
    tmp_path: Path, spark: SparkSession, calm: dict[str, list[Any]]
) -> None:
    """In several batches, with a restart on a machine that has none of the state and with other
    shards.
    """
    with PipelineTest(searched("press"), tmp_path, spark) as test:
        for number, given in enumerate(TICKS):
            feed_tick(test, number, given)
            if number in {0, 3}:
                test.step()
        test.restart(shards=3, lose_local_store=True)
        test.settle()
        check(test, TICKS)
        assert outputs(test) == calm


@pytest.mark.spark
def test_documents_that_spark_computes(tmp_path: Path, spark: SparkSession) -> None:
    pipeline = hr.Pipeline("press")
    articles = pipeline.topic("articles", schema=ARTICLES, key="id", partitions=2)
    queries = pipeline.table("queries", schema="number BIGINT, query STRING", key="number")
    made = articles.with_columns(title="regexp_replace(title, '(o+)r', '$1$1r')")
    pipeline.write("alerts", made.search(queries, query="query", text="title"))
    with PipelineTest(pipeline, tmp_path, spark) as test:
        test.feed("queries", [{"number": 1, "query": "stoorm"}, {"number": 2, "query": "storm"}])
        test.feed(
            "articles",
            [
                {**dict.fromkeys(("body", "language", "price")), "id": at, "title": title}
                for at, title in enumerate(["A storm", "calm"], 1)
            ],
        )
        test.settle()
        assert [
            (row["id"], row["number"], row["title"]) for row in test.log.read("alerts").to_pylist()
        ] == [(1, 1, "A stoorm")]
