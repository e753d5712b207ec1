"""Search in pipelines: what is checked at declaration, and matches through the whole engine,
without Spark: shards, restarts, deaths, dead letters.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headrace as hr
from headrace.cli import app
from headrace.errors import ConfigurationError, PlanError, StreamOnly, UnknownColumn
from headrace.operators.search.index import clear_index_cache
from headrace.run_status import write_status
from headrace.testing.kernels import KernelTest
from headrace.testing.pipelines import Died, PipelineTest

ARTICLES = "id BIGINT, title STRING, body STRING, language STRING, price DOUBLE"


def declared(**options: Any) -> tuple[hr.Pipeline, hr.Stream]:
    press = hr.Pipeline("press")
    articles = press.topic("articles", schema=ARTICLES, key="id", partitions=2)
    subscriptions = press.table(
        "subscriptions",
        schema="subscription BIGINT, query STRING, reader STRING",
        key="subscription",
        partitions=2,
    )
    return press, articles.search(
        subscriptions,
        **{
            "query": "query",
            "text": ["title", "body"],
            "filters": ["language", "price"],
            **options,
        },
    )


def pipeline(**options: Any) -> hr.Pipeline:
    press, alerts = declared(**options)
    press.write("alerts", alerts)
    return press


def test_the_columns_of_a_match() -> None:
    assert declared()[1].schema.names == [
        "id",
        "title",
        "body",
        "language",
        "price",
        "subscription",
        "query",
        "reader",
        "score",
    ]
    assert declared(highlights=True, explain=True)[1].schema.names[-2:] == [
        "highlights",
        "explanation",
    ]
    assert declared(per="document")[1].schema.names == [
        "id",
        "title",
        "body",
        "language",
        "price",
        "matches",
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"text": ["titel"]}, UnknownColumn, "did you mean 'title'"),
        ({"query": "qeury"}, UnknownColumn, "did you mean 'query'"),
        ({"query": "subscription"}, PlanError, "which is BIGINT"),
        ({"text": ["price"], "filters": []}, PlanError, "which is DOUBLE"),
        ({"text": []}, PlanError, "no text columns"),
        ({"filters": ["title"]}, PlanError, "a column twice"),
        ({"default": "xor"}, PlanError, "default='xor'"),
        ({"per": "query"}, PlanError, "per='query'"),
        ({"language": "englisch"}, ConfigurationError, "did you mean 'english'"),
    ],
)
def test_mistakes_are_refused_at_declaration(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        declared(**options)


def test_columns_that_both_have_need_a_suffix() -> None:
    press = hr.Pipeline("press")
    articles = press.topic("articles", schema="id BIGINT, title STRING", key="id")
    queries = press.table("queries", schema="id BIGINT, query STRING", key="id")
    with pytest.raises(PlanError, match="have a column 'id'"):
        articles.search(queries, query="query", text="title")
    assert articles.search(queries, query="query", text="title", suffix="_query").schema.names == [
        "id",
        "title",
        "id_query",
        "query",
        "score",
    ]


def test_tables_are_no_documents_and_streams_no_queries() -> None:
    _, alerts = declared()
    table = alerts.to_table("id")
    with pytest.raises(StreamOnly, match="is a table"):
        table.search(table, query="query", text="title")
    with pytest.raises(PlanError, match="was given a Stream"):
        alerts.search(alerts, query="query", text="title")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="another pipeline"):
        declared()[1].search(table, query="query", text="title")


def test_a_search_step_alone() -> None:
    test = KernelTest(declared(explain=True)[1])
    query = {
        "subscription": 1,
        "query": "storm AND price:<5",
        "reader": "ada",
        "_change_type": "insert",
    }
    assert test.tick(
        [{"id": 1, "title": "Storm", "price": 9.0}, {"id": 2, "title": "A storm", "price": 4.0}],
        [query],
    ) == [
        {
            "id": 2,
            "title": "A storm",
            "body": None,
            "language": None,
            "price": 4.0,
            "subscription": 1,
            "query": "storm AND price:<5",
            "reader": "ada",
            "score": 2.0,
            "explanation": "storm, price:<5",
        }
    ]


QUERIES = [
    {"subscription": 1, "query": "storm", "reader": "ada"},
    {"subscription": 2, "query": '"heavy rain" language:en', "reader": "ben"},
    {"subscription": 3, "query": "-storm", "reader": "cho"},
    {"subscription": 4, "query": "title:(", "reader": "dee"},
]


def article(id: int, title: str, body: str = "", language: str = "de") -> dict[str, Any]:
    return {"id": id, "title": title, "body": body, "language": language, "price": 1.0}


def drive(test: PipelineTest, max_ticks: int = 1_000) -> None:
    """Queries that come, change and go between documents."""
    test.feed("subscriptions", QUERIES)
    test.feed("articles", [article(1, "Storm"), article(2, "calm", "heavy rain")])
    test.cut()
    test.feed("subscriptions", [{"subscription": 1, "query": "calm", "reader": "ada"}])
    test.feed("articles", [article(3, "storm"), article(4, "calm", language="en")])
    test.cut()
    test.feed(
        "subscriptions",
        [{"subscription": 3, "query": None, "reader": None, "_change_type": "delete"}],
    )
    test.feed("articles", [article(5, "calm sea")])
    test.settle(max_ticks)


MATCHES = {(1, 1), (2, 2), (2, 3), (4, 1), (4, 2), (4, 3), (5, 1)}


def pairs(test: PipelineTest) -> list[tuple[int, int]]:
    return [(row["id"], row["subscription"]) for row in test.log.read("alerts").to_pylist()]


def test_documents_meet_the_queries_of_their_tick(tmp_path: Path) -> None:
    with PipelineTest(pipeline(), tmp_path) as test:
        drive(test)
        assert sorted(pairs(test)) == sorted(MATCHES)
        (dead_letter,) = dead_letters(test)
        assert "title:(" in str(dead_letter)
        assert "never closed (at character 6)" in str(dead_letter)


def dead_letters(test: PipelineTest) -> list[dict[str, Any]]:
    (name,) = [each for each in test.log.topics() if each.endswith(".dead")]
    rows: list[dict[str, Any]] = test.log.read(name).to_pylist()
    return rows


def test_shards_and_batches_do_not_matter(tmp_path: Path) -> None:
    """Also not for the order of a derived topic's rows."""
    emitted = []
    for shards, max_ticks in ((1, 1_000), (2, 1), (5, 1_000), (3, 2)):
        with PipelineTest(pipeline(), tmp_path / f"{shards}-{max_ticks}", shards=shards) as test:
            drive(test, max_ticks)
            emitted.append(test.rows("alerts"))
    assert emitted[0] == emitted[1] == emitted[2] == emitted[3]


@pytest.mark.parametrize(
    ("dies", "loses"),
    [
        ("in the kernel", False),
        ("the store was closed", True),
        ("before the commit", False),
        ("the log was committed", True),
    ],
)
def test_a_runner_that_dies_and_one_with_other_shards_go_on(
    tmp_path: Path, dies: str, loses: bool
) -> None:
    with PipelineTest(pipeline(), tmp_path) as test:
        drive(test)
        test.feed("articles", [article(6, "calm")])
        test.feed(
            "subscriptions", [{"subscription": 5, "query": "calm AND NOT sea", "reader": "eve"}]
        )
        test.cut()
        with pytest.raises(Died):
            test.step(dies=dies)
        if loses:
            clear_index_cache()
        test.restart(shards=3, lose_local_store=loses)
        test.settle()
        assert sorted(pairs(test)) == sorted(MATCHES | {(6, 1), (6, 5)})


def test_digests_have_one_row_per_document(tmp_path: Path) -> None:
    emitted = []
    for shards in (1, 3):
        with PipelineTest(pipeline(per="document"), tmp_path / str(shards), shards=shards) as test:
            drive(test)
            rows = {
                row["id"]: [match["subscription"] for match in row["matches"]]
                for row in test.log.read("alerts").to_pylist()
            }
            assert rows == {1: [1], 2: [2, 3], 4: [1, 2, 3], 5: [1]}
            emitted.append(test.rows("alerts"))
    assert emitted[0] == emitted[1]


def test_figures_of_a_run_and_of_its_last_batch(tmp_path: Path) -> None:
    with PipelineTest(pipeline(name="alerting"), tmp_path) as test:
        drive(test, 1)
        counts = test.runner.leading.entry.counts
        write_status(test.state, status := test.runner.status())
        last = status.queries["main"]["batch_counts"]
        assert counts["alerting.queries_stored"] == 2
        assert (
            counts["alerting.queries_run"] > last["alerting.queries_run"] == 1
        )  # of the last tick's one document
        said = CliRunner().invoke(app, ["status", str(test.state)], env={"COLUMNS": "200"}).output
    assert re.search(r"alerting +\W? *2 +\W? *1 ", said), said
