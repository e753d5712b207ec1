"""Reading one's own writes, following topics, and figures for Prometheus: against a real log, with
ticks as a runner records them.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace as hr
from headrace.engine.ticks import Tick, TickJournal
from headrace.views.store import ViewStore
from tests.serve.conftest import Client, Start, receive
from tests.views.store_contract import inserts


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_topic("orders", "k BIGINT, n BIGINT", key="k", partitions=2)
        opened.create_topic("other", "k BIGINT")
        yield opened


def write_status(state: Path, **figures: object) -> None:
    printed = {
        "pipeline": "shop",
        "process": os.getpid(),
        "tick": 4,
        "newest_tick": 5,
        "rows_behind": 7,
        "batches": 3,
        "failures": 0,
        "updated": 1.5,
    }
    (state / "status.json").write_text(json.dumps({**printed, **figures}))


@pytest.fixture
def client(serve: Start, store: ViewStore, state: Path, log: hr.Log) -> Client:
    write_status(state)
    TickJournal.open(log, "shop")
    return Client(serve(log).port)


def record(log: hr.Log, number: int) -> None:
    """A tick with everything that is there."""
    with log.transaction("runner") as tx:
        TickJournal.open(log, "shop").record(
            tx, [Tick(number, number * 1_000_000, log.snapshot(["orders"]))]
        )


def append(log: hr.Log, *keys: int) -> str:
    with log.producer("orders") as producer:
        return str(producer.append([{"k": key, "n": 1} for key in keys]))


# Reading one's own writes


def test_a_read_waits_until_the_view_contains_what_was_appended(
    client: Client, store: ViewStore, log: hr.Log
) -> None:
    record(log, 4)
    position = append(log, *range(10, 20))
    assert {part.rpartition(":")[0] for part in position.split(",")} == {"orders:0", "orders:1"}
    soon = client.get("/views/counts", key=1, at_least=position, wait="100 milliseconds")
    assert (soon.status, soon.headers["retry-after"]) == (503, "1")
    assert f"at tick 4, does not contain {position}" in soon.json["message"]

    def run() -> None:
        time.sleep(0.1)
        record(log, 5)
        time.sleep(0.1)
        store.commit(5, 1, {"counts": inserts(5, (11, 1))})

    runner = threading.Thread(target=run)
    runner.start()
    assert client.get("/views/counts", key=11, at_least=position).json == {
        "view": "counts",
        "tick": 5,
        "row": {"k": 11, "n": 1},
    }
    runner.join()
    assert client.sql("SELECT n FROM counts WHERE k = 11", at_least=position).json["rows"] == [
        {"n": 1}
    ]
    assert client.get("/views/counts", key=11, at_least=position, wait="0 seconds").status == 200


def test_a_read_waits_for_a_pipeline_that_has_just_been_started(
    client: Client, store: ViewStore, log: hr.Log, state: Path
) -> None:
    """`headrace run` serves before its first batch, and so before it has reported anything of
    itself.
    """
    (state / "status.json").unlink()
    position = append(log, 11)
    assert (
        "does not contain"
        in client.get("/views/counts", at_least=position, wait="100 milliseconds").json["message"]
    )

    def run() -> None:
        time.sleep(0.1)
        record(log, 5)
        store.commit(5, 1, {"counts": inserts(5, (11, 1))})
        write_status(state)

    runner = threading.Thread(target=run)
    runner.start()
    assert client.get("/views/counts", key=11, at_least=position).json["tick"] == 5
    runner.join()


def test_a_read_waits_only_for_the_first_tick_with_the_write(
    client: Client, store: ViewStore, log: hr.Log
) -> None:
    position = append(log, 1)
    for number in range(1, 30):
        record(log, number)
        append(log, number)
    assert client.get("/views/counts", at_least=position, wait="0 seconds").json["tick"] == 4


REFUSED = [
    ("orders:0", "is not a list of offsets"),
    ("orders:0:1:2", "is not a list of offsets"),
    ("orders:0:99", "is not in this log"),
    ("orders:7:0", "is not in this log"),
    ("ordres:0:1", "did you mean 'orders'"),
    ("other:0:1", "does not read the topic 'other'"),
]


@pytest.mark.parametrize(("position", "reason"), REFUSED)
def test_offsets_that_cannot_come_are_refused_at_once(
    client: Client, log: hr.Log, position: str, reason: str
) -> None:
    append(log, 1)
    with log.producer("other") as producer:
        producer.append({"k": 1})
    record(log, 1)
    refused = client.get("/views/counts", at_least=position)
    assert refused.status in {400, 404}
    assert reason in refused.json["message"]


def test_without_a_log_it_cannot_be_known(serve: Start, store: ViewStore, state: Path) -> None:
    write_status(state)
    client = Client(serve().port)
    for path in ("/views/counts?at_least=orders:0:1", "/topics/orders/tail"):
        refused = client.get(path)
        assert (refused.status, refused.json["fix"]) == (503, "start it with --log ADDRESS.")


# Topics


def rows_of(event: object) -> list[tuple[int, int]]:
    return [(row["_partition"], row["_offset"]) for row in event.data["rows"]]  # type: ignore[attr-defined]


def test_a_topic_is_followed_and_resumed_without_a_gap_or_a_repeat(
    client: Client, log: hr.Log
) -> None:
    append(log, *range(20))
    with client.follow("/topics/orders/tail") as new_only:
        got: list[tuple[int, int]] = []
        subscriber = client.follow("/topics/orders/tail?last=1000")
        for round_number in range(6):
            while len(got) < 20 * (round_number + 1):
                got += rows_of(receive(subscriber))
            subscriber.close()
            append(log, *range(20))
            subscriber = client.follow("/topics/orders/tail", last=subscriber.last)
        subscriber.close()
        fresh: list[tuple[int, int]] = []
        while len(fresh) < 100:
            fresh += rows_of(receive(new_only))
    assert len(got) == len(set(got)) == 120
    assert len(fresh) == len(set(fresh))
    for partition in (0, 1):
        offsets = [offset for place, offset in got if place == partition]
        assert offsets == sorted(offsets)


def test_a_condition_on_a_topic(client: Client, log: hr.Log) -> None:
    append(log, *range(20))
    with client.follow("/topics/orders/tail", where="k >= 18") as subscriber:
        append(log, 17, 19)
        assert [row["k"] for row in receive(subscriber).data["rows"]] == [19]


def test_topics_that_cannot_be_followed(client: Client, log: hr.Log) -> None:
    assert "did you mean 'orders'" in client.get("/topics/order/tail").json["message"]
    for last, status in (("x", 400), ("0:99", 410), ("7:0", 410)):
        assert client.get("/topics/orders/tail", headers={"Last-Event-ID": last}).status == status


# Figures


def test_metrics(client: Client, state: Path) -> None:
    write_status(
        state,
        counts={'late "rows"': 3},
        watermarks={"orders": {"watermark_us": 2_500_000}, "other": {"watermark_us": None}},
    )
    lines = client.get("/metrics").body.decode().splitlines()
    for line in (
        'headrace_tick{pipeline="shop"} 4',
        'headrace_rows_behind{pipeline="shop"} 7',
        'headrace_batches_total{pipeline="shop"} 3',
        'headrace_running{pipeline="shop"} 1.0',
        'headrace_rows_counted_total{pipeline="shop",what="late \\"rows\\""} 3',
        'headrace_watermark_timestamp_seconds{pipeline="shop",input="orders"} 2.5',
        'headrace_view_tick{view="counts"} 4',
        "headrace_subscribers 0",
        "# TYPE headrace_batches_total counter",
    ):
        assert line in lines
    for line in lines:
        assert line.startswith("# ") or len(line.rsplit(" ", 1)) == 2
