"""A pipeline that searches in every way, with queries that come, change, go and cannot be read; and
what it must tell, by every query against every document.

What runs on Spark, is killed, and must give the same.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import headrace as hr
from headrace.errors import BadSearch
from headrace.operators.search.parser import Language
from headrace.operators.search.syntax import Fields
from headrace.testing.pipelines import PipelineTest
from tests.operators.search.oracle import fits, score

ARTICLES = "id BIGINT, title STRING, body STRING, language STRING, price DOUBLE"
FIELDS = Fields(("title", "body"), (("language", "string"), ("price", "float")))
LANGUAGE, ALL_WORDS = Language(FIELDS), Language(FIELDS, default="and")
OUTPUTS = ("alerts", "explained", "digests", "once")
WORDS = ("sea", "storm", "Störme", "wind", "heavy", "rain", "tide", "calm", "harbour", "東京")
QUERIES = (
    "storm",
    '"heavy rain"',
    '"rain heavy"~2',
    "sea -wind",
    "+tide calm",
    "title:(sea AND storm)",
    "(sea storm wind tide)~3",
    "har* OR *orm*",
    "storme~1",
    "price:[1 TO 2}",
    "language:de AND NOT rain",
    "-storm",
    "*:*",
    "language:*",
    "東京 OR harbour^3",
    "title:",
    "titel:sea",
    "(((",
    "*a*",
)
Row = dict[str, Any]
Tick = tuple[list[Row], dict[int, str | None]]


def searched(name: str) -> hr.Pipeline:
    pipeline = hr.Pipeline(name)
    articles = pipeline.topic("articles", schema=ARTICLES, key="id", partitions=2)
    queries = pipeline.table(
        "queries", schema="number BIGINT, query STRING, reader STRING", key="number", partitions=2
    )
    asked: dict[str, Any] = {
        "query": "query",
        "text": ["title", "body"],
        "filters": ["language", "price"],
    }
    alerts = articles.search(queries, **asked, name="alerting")
    pipeline.write("alerts", alerts, partitions=2)
    pipeline.view("readers", alerts.group_by("reader").aggregate(n=hr.agg.count()))
    pipeline.write(
        "explained",
        articles.search(queries, **asked, highlights=True, explain=True, name="explaining"),
    )
    pipeline.write(
        "digests",
        articles.where("price < 2").search(
            queries, **asked, per="document", default="and", name="digesting"
        ),
        partitions=2,
    )
    fresh = articles.dedupe(on="id", within="1 hour")
    pipeline.write("once", fresh.search(queries, **asked, name="once.search"))
    return pipeline


def history(seed: int, ticks: int = 6, rows: int = 12) -> list[Tick]:
    chance = Random(seed)

    def text() -> str | None:
        return chance.choice(
            [
                None,
                "",
                " ".join(chance.choice(WORDS) for _ in range(chance.randrange(1, 7))),
                ", ".join(chance.sample(WORDS, 3)),
            ]
        )

    found: list[Tick] = []
    for tick in range(ticks):
        documents = [
            {
                "id": tick * rows + at,
                "title": text(),
                "body": text(),
                "language": chance.choice(["de", "en", None]),
                "price": chance.choice([0.5, 1.0, 2.0, None]),
            }
            for at in range(rows)
        ]
        changes = {
            chance.randrange(30): chance.choice([None, *QUERIES, *QUERIES])
            for _ in range(25 if tick == 0 else 4)
        }
        found.append((documents, changes))
    return found


def feed_tick(test: PipelineTest, tick: int, given: Tick) -> None:
    documents, changes = given
    test.feed(
        "queries",
        [
            {"number": number, "query": text, "reader": f"r{number}-{tick}"}
            for number, text in changes.items()
            if text is not None
        ],
    )
    gone = [number for number, text in changes.items() if text is None]
    if gone:
        with test.log.producer("queries") as producer:
            producer.delete(gone)
    test.feed("articles", documents)
    test.cut()


def expected(ticks: list[Tick], language: Language = LANGUAGE) -> list[tuple[int, int, str, float]]:
    """Document, query, whose version of it, score."""
    found = []
    now: dict[int, tuple[str, Any]] = {}
    for tick, (documents, changes) in enumerate(ticks):
        for number, text in changes.items():
            now.pop(number, None)
            try:
                if text is not None:
                    now[number] = f"r{number}-{tick}", language.parse(text)
            except BadSearch:
                continue
        found += [
            (document["id"], number, reader, score(node, document, language))
            for document in documents
            for number, (reader, node) in now.items()
            if fits(node, document, language)
        ]
    return sorted(found)


def check(test: PipelineTest, ticks: list[Tick]) -> None:
    """All outputs against the reference."""
    explained = {name: test.log.read(name).to_pylist() for name in OUTPUTS}
    for name in ("alerts", "explained", "once"):
        assert sorted(
            (row["id"], row["number"], row["reader"], row["score"]) for row in explained[name]
        ) == expected(ticks), name
    assert {row["reader"]: row["n"] for row in test.view("readers")} == Counter(
        reader for _, _, reader, _ in expected(ticks)
    )
    lists = [
        (row["id"], match["number"], match["reader"], match["score"])
        for row in explained["digests"]
        for match in row["matches"]
    ]
    cheap = {
        row["id"]
        for documents, _ in ticks
        for row in documents
        if row["price"] is not None and row["price"] < 2
    }
    assert sorted(lists) == [each for each in expected(ticks, ALL_WORDS) if each[0] in cheap]
    assert len({row["id"] for row in explained["digests"]}) == len(explained["digests"])
    for row in explained["explained"]:
        for place in row["highlights"]:
            assert row[place["column"]][place["start"] : place["end"]] in place["snippet"]
        assert row["explanation"]


def outputs(test: PipelineTest) -> dict[str, list[Any]]:
    """Rows in their order; dead letters without the time at which they were written."""
    dead = {
        f"{step}.dead": [
            (row["tick"], row["row"], row["reason"])
            for row in test.log.read(f"{step}.dead").to_pylist()
        ]
        for step in ("alerting", "digesting")
    }
    return {
        **{name: test.rows(name) for name in OUTPUTS},
        **{name: sorted(rows) for name, rows in dead.items()},
    }
