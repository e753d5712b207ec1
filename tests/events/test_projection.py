"""Views of events: a pipeline over their topic, one added later, one rebuilt next to the old one,
also after an excision; and reading one's own writes from a served view.
"""

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headrace as hr
from headrace.events import Event, Handler, excise, open_store, stream
from headrace.serve.server import start
from headrace.testing.pipelines import PipelineTest
from tests.events.totals import TOTALS
from tests.serve.conftest import QUICK, Client

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def counted(by: str = "entity") -> hr.Pipeline:
    pipeline = hr.Pipeline(f"by-{by}")
    pipeline.view(
        "counts",
        stream(pipeline, "bank")
        .group_by(by)
        .aggregate(n=hr.agg.count(), newest=hr.agg.max("version")),
    )
    return pipeline


def rows(test: PipelineTest, view: str) -> list[tuple[object, ...]]:
    return sorted(tuple(row.values()) for row in test.view(view))


def test_a_view_of_events_is_added_later_and_rebuilt_beside_the_old_one(tmp_path: Path) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log, open_store(log, "bank") as store:
        handler = Handler(store, TOTALS)
        for command in (1, 2, 4):
            handler.handle("a", command)
        with PipelineTest(counted(), tmp_path, log=log) as test:
            handler.handle("b", 1)
            test.settle()
            assert rows(test, "counts") == [("a", 4, 4), ("b", 1, 1)]
            store.append("b", Event("Odd", subject="7"))
            test.settle()
            assert rows(test, "counts") == [("a", 4, 4), ("b", 2, 2)]
            excise(store, "7")
            with test.replay("clean", retick=True) as again:
                again.settle()
                assert rows(again, "counts.clean") == [("a", 4, 4), ("b", 1, 1)]
        with PipelineTest(counted("type"), tmp_path / "later", log=log) as later:
            later.settle()
            assert rows(later, "counts") == [("Added", 5, 4)]


def test_a_command_s_own_writes_are_read_from_a_served_view(tmp_path: Path) -> None:
    with PipelineTest(counted(), tmp_path) as test, open_store(test.log, "bank") as store:
        handler = Handler(store, TOTALS)
        handler.handle("a", 1)
        test.settle()
        (test.state / "status.json").write_text(
            json.dumps(
                {
                    "pipeline": "by-entity",
                    "process": os.getpid(),
                    "tick": 1,
                    "newest_tick": 1,
                    "rows_behind": 0,
                    "batches": 1,
                    "failures": 0,
                    "updated": 1.5,
                }
            )
        )
        server = start(test.state, test.log, limits=QUICK)
        try:
            client = Client(server.port)
            answer = handler.handle("a", 1)
            assert (
                client.get(
                    "/views/counts", key="a", at_least=str(answer.position), wait="50 milliseconds"
                ).status
                == 503
            )
            later = threading.Timer(0.1, test.settle)
            later.start()
            assert client.get("/views/counts", key="a", at_least=str(answer.position)).json[
                "row"
            ] == {"entity": "a", "n": 2, "newest": 2}
            later.join()
        finally:
            server.stop()


@pytest.mark.spark
def test_the_content_of_events_in_a_view(tmp_path: Path, spark: "SparkSession") -> None:
    pipeline = hr.Pipeline("sums")
    amounts = (
        stream(pipeline, "bank")
        .where("type = 'Added'")
        .select("entity", amount="CAST(get_json_object(data, '$.amount') AS BIGINT)")
    )
    pipeline.view("sums", amounts.group_by("entity").aggregate(total=hr.agg.sum("amount")))
    with PipelineTest(pipeline, tmp_path, spark) as test, open_store(test.log, "bank") as store:
        handler = Handler(store, TOTALS)
        for command in (1, 2, 4):
            handler.handle("a", command)
        test.settle()
        assert rows(test, "sums") == [("a", handler.state("a").sum)]


@pytest.mark.spark
def test_rows_that_python_is_not_sure_of_are_spark_s(tmp_path: Path, spark: "SparkSession") -> None:
    pipeline = hr.Pipeline("sums")
    amounts = stream(pipeline, "bank").select(
        "entity",
        amount="CAST(get_json_object(data, '$.amount') AS BIGINT)",
        note="get_json_object(data, '$.note')",
    )
    pipeline.view(
        "sums",
        amounts.group_by("entity").aggregate(total=hr.agg.sum("amount"), note=hr.agg.max("note")),
    )
    with PipelineTest(pipeline, tmp_path, spark) as test, open_store(test.log, "bank") as store:
        store.append(
            "a", [Event("Added", {"amount": 4, "note": "x"}), Event("Added", {"amount": 5})]
        )
        test.settle()
        assert rows(test, "sums") == [("a", 9, "x")]
        store.append(
            "a",
            [Event("Added", {"amount": "many", "note": {"y": 1.5}}), Event("Added", {"amount": 1})],
        )
        test.settle()
        assert rows(test, "sums") == [("a", 10, '{"y":1.5}')]
        assert test.runner.leading.entry.counts["sums.select.errors"] == 1
        store.append("b", [Event("Added", {"amount": 2})])
        test.settle()
        assert rows(test, "sums") == [("a", 10, '{"y":1.5}'), ("b", 2, None)]
