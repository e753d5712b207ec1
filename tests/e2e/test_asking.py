"""Questions to the stream: each meets the table as of its tick; over HTTP the answer comes back to
who asked, or that there was none in time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import PlanError, StreamOnly
from headrace.serve.server import start
from headrace.testing.pipelines import PipelineTest
from tests.serve.conftest import Client

pytestmark = pytest.mark.usefixtures("no_syncs")


def network() -> hr.Pipeline:
    pipeline = hr.Pipeline("network")
    posts = pipeline.table("posts", schema="url STRING, poster STRING", key=["url", "poster"])
    follows = pipeline.table(
        "follows", schema="poster STRING, follower STRING", key=["poster", "follower"]
    )
    seen = posts.join(follows, on="poster")
    reach = seen.group_by("url").aggregate(reach=hr.agg.count_distinct("follower"))
    pipeline.ask("reach", using=reach, question="why STRING")
    return pipeline


def fed(test: PipelineTest) -> None:
    test.feed(
        "posts",
        [{"url": "a", "poster": "p1"}, {"url": "a", "poster": "p2"}, {"url": "b", "poster": "p2"}],
    )
    test.feed(
        "follows",
        [
            {"poster": "p1", "follower": "x"},
            {"poster": "p1", "follower": "y"},
            {"poster": "p2", "follower": "y"},
        ],
    )
    test.settle()


@contextmanager
def running(test: PipelineTest) -> Iterator[None]:
    """The pipeline goes on meanwhile."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            test.settle()
            time.sleep(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def asked(client: Client, question: Any, **query: Any) -> tuple[int, Any]:
    answer = client.ask(
        "POST",
        "/ask/reach",
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
        **query,
    )
    return answer.status, answer.json


def test_a_question_meets_the_table_as_of_its_tick(tmp_path: Path) -> None:
    with PipelineTest(network(), tmp_path) as test:
        fed(test)
        test.feed(
            "ask.reach",
            [{"ask_id": "1", "url": "a", "why": "x"}, {"ask_id": "2", "url": "none", "why": None}],
        )
        test.settle()
        test.feed("follows", [{"poster": "p2", "follower": "z"}])
        test.settle()
        test.feed("ask.reach", [{"ask_id": "3", "url": "a", "why": None}])
        test.settle()
        answers = {
            row["ask_id"]: (row["url"], row["why"], row["reach"], row["found"])
            for row in test.log.read("ask.reach.answers").to_pylist()
        }
        assert answers == {
            "1": ("a", "x", 2, True),
            "2": ("none", None, None, None),
            "3": ("a", None, 3, True),
        }


def test_an_answer_comes_back_to_who_asked(tmp_path: Path) -> None:
    with PipelineTest(network(), tmp_path) as test, start(test.state, test.log, 0) as server:
        fed(test)
        client = Client(server.port)
        with running(test), ThreadPoolExecutor(8) as many:
            urls = ["a", "b", "none"] * 8
            printed = list(
                many.map(lambda url: asked(client, {"url": url, "why": url}, wait="60s"), urls)
            )
            expected = {"a": (2, True), "b": (1, True), "none": (None, None)}
            assert printed == [
                (
                    200,
                    {"url": url, "why": url, "reach": expected[url][0], "found": expected[url][1]},
                )
                for url in urls
            ]
        assert len(test.log.read("ask.reach").to_pylist()) == len(urls), "each question is one row"


def test_invalid_requests_are_answered_with_the_reason(tmp_path: Path) -> None:
    with PipelineTest(network(), tmp_path) as test, start(test.state, test.log, 0) as server:
        fed(test)
        client = Client(server.port)
        status, printed = asked(client, {"url": "a"}, wait="100ms")
        assert (status, "not answered within 0.1 seconds" in printed["message"]) == (
            503,
            True,
        ), "nothing runs"
        assert asked(client, {"uri": "a"})[0] == 400
        status, printed = asked(client, {"why": "no url"}, wait="60s")
        assert (status, "lacks the column 'url'" in printed["message"]) == (400, True)
        assert asked(client, ["a"])[0] == 400
        assert (
            client.ask("POST", "/ask/reach", b"{", {"Content-Type": "application/json"}).status
            == 400
        )
        assert client.ask("POST", "/ask/reach", b"{}", {"Content-Type": "text/plain"}).status == 415
        assert (
            client.ask(
                "POST", "/ask/reach", b" " * 2_000_000, {"Content-Type": "application/json"}
            ).status
            == 413
        )
        unknown = client.ask("POST", "/ask/raech", b"{}", {"Content-Type": "application/json"})
        assert (unknown.status, "did you mean 'reach'" in unknown.json["message"]) == (404, True)
    with PipelineTest(network(), tmp_path / "other") as test, start(test.state, None, 0) as server:
        assert "without a log" in asked(Client(server.port), {"url": "a"})[1]["message"]


def test_invalid_questions_are_refused_at_declaration() -> None:
    pipeline = hr.Pipeline("network")
    stream = pipeline.topic("clicks", schema="url STRING, at TIMESTAMP", key="url")
    table = stream.to_table("url")
    with pytest.raises(StreamOnly, match="to_table"):
        pipeline.ask("clicks", using=stream)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="another pipeline"):
        hr.Pipeline("other").ask("clicks", using=table)
    with pytest.raises(PlanError, match="'at'"):
        pipeline.ask("clicks", using=table, question="at STRING")
    with pytest.raises(PlanError, match="name of a question"):
        pipeline.ask("no spaces", using=table)
    with pytest.raises(PlanError, match="found"):
        pipeline.ask("clicks", using=table.with_columns(found="1"))
