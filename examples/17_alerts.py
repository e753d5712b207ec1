"""Alerts: readers store search queries, and each reader is notified of new articles that match.
Queries can be added, changed and removed while articles arrive.

Run it from anywhere: python examples/17_alerts.py. It needs no Spark: the pipeline runs in this
process, with the test kit.
"""

import tempfile
from pathlib import Path

import headrace as hr
from headrace.testing.pipelines import PipelineTest

press = hr.Pipeline("press")
articles = press.topic(
    "articles",
    schema="article BIGINT, title STRING, body STRING, language STRING, words BIGINT",
    key="article",
)
subscriptions = press.table("subscriptions", schema="reader STRING, query STRING", key="reader")
alerts = articles.search(
    subscriptions,
    query="query",
    text=["title", "body"],
    filters=["language", "words"],
    explain=True,
    name="alerting",
)
press.write("alerts", alerts)


def article(number: int, title: str, body: str, words: int) -> dict[str, object]:
    return {"article": number, "title": title, "body": body, "language": "en", "words": words}


def emitted_alerts(test: PipelineTest, since: int) -> list[tuple[int, str, str]]:
    rows = test.log.read("alerts").to_pylist()[since:]
    return sorted((row["article"], row["reader"], row["explanation"]) for row in rows)


def main() -> None:
    with tempfile.TemporaryDirectory() as root, PipelineTest(press, Path(root)) as test:
        queries = {
            "ada": 'storm AND "high tide"~2',
            "ben": "title:budg* -draft",
            "cho": "language:en AND words:>500",
            "dee": "title:(storm",
        }
        test.feed(
            "subscriptions",
            [{"reader": reader, "query": query} for reader, query in queries.items()],
        )
        test.feed(
            "articles",
            [
                article(1, "Storm over the coast", "A high spring tide.", 300),
                article(2, "Budget (draft)", "Long tables.", 900),
            ],
        )
        test.settle()
        first = emitted_alerts(test, 0)
        print("first:", *first, sep="\n  ")
        (dead_letter,) = test.log.read("alerting.dead").to_pylist()
        print("dead letter:", dead_letter["reason"].splitlines()[0])

        test.feed("subscriptions", [{"reader": "ben", "query": "Kaffee OR café"}])
        test.feed("articles", [article(3, "A new CAFE", "Opens on Monday.", 120)])
        test.settle()
        print("then:", *emitted_alerts(test, len(first)))

    past = [article(1, "Storm over the coast", "", 300), article(2, "Calm", "", 200)]
    print(
        "matches among past articles:",
        [row["article"] for row in hr.search.match(past, "storm AND words:<500", text=["title"])],
    )


if __name__ == "__main__":
    main()
