"""The engine from Kafka to Kafka: the same promises as on the embedded log, on a real broker."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from confluent_kafka import Producer

import headrace as hr
from headrace.engine.commit import commit_batch
from headrace.engine.ledger import RunnerFenced
from headrace.engine.ticks import first_tick, next_ticks, read_control_ticks, rows_between
from headrace.log.dead_letters import read_dead_letters
from headrace.testing.pipelines import PipelineTest
from tests.servers.kafka_broker import KafkaBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.kafka]
Fed = list[list[dict[str, int]]]


@pytest.fixture
def log(kafka_broker: KafkaBroker) -> Iterator[hr.Log]:
    with hr.open_log(kafka_broker.address) as opened:
        yield opened


@pytest.fixture
def other(kafka_broker: KafkaBroker) -> Iterator[hr.Log]:
    """Another connection to the cluster, as another process has it."""
    with hr.open_log(kafka_broker.address) as opened:
        yield opened


def fresh(stem: str) -> str:
    """A name that no other test uses: the broker outlives a test."""
    return f"{stem}-{uuid.uuid4().hex[:8]}"


class Shop:
    """Orders in, their totals by key out, in a topic and a view; all names are this one's own."""

    def __init__(self) -> None:
        self.name, self.orders, self.totals = fresh("shop"), fresh("orders"), fresh("totals")

    def pipeline(self) -> hr.Pipeline:
        made = hr.Pipeline(self.name)
        orders = made.topic(self.orders, schema="k BIGINT, v BIGINT", key="k", partitions=2)
        table = orders.group_by("k").aggregate(n=hr.agg.count(), s=hr.agg.sum("v"))
        made.write(self.totals, table, partitions=2)
        made.view("by_key", table)
        return made


def ticks_of_rows(ticks: int = 5, rows: int = 40) -> Fed:
    rng = random.Random(3)
    return [
        [{"k": rng.randrange(12), "v": rng.randrange(100)} for _ in range(rng.randrange(1, rows))]
        for _ in range(ticks)
    ]


def expected(fed: Fed) -> dict[int, dict[str, int]]:
    table: dict[int, dict[str, int]] = {}
    for row in (row for tick in fed for row in tick):
        known = table.setdefault(row["k"], {"k": row["k"], "n": 0, "s": 0})
        known["n"] += 1
        known["s"] += row["v"]
    return table


def feed_ticks(test: PipelineTest, topic: str, fed: Fed) -> None:
    for rows in fed:
        test.feed(topic, rows)
        test.cut()


def by_key(test: PipelineTest) -> dict[int, dict[str, Any]]:
    return {row["k"]: row for row in test.view("by_key")}


def test_rows_do_not_depend_on_batches_shards_or_restarts(
    tmp_path: Path, spark: SparkSession, log: hr.Log
) -> None:
    fed = ticks_of_rows()
    answers = []
    for number, (max_ticks, shards) in enumerate([(100, 2), (2, 1)]):
        shop = Shop()
        with PipelineTest(
            shop.pipeline(), tmp_path / str(number), spark, shards=shards, log=log
        ) as test:
            feed_ticks(test, shop.orders, fed)
            test.step(max_ticks)
            test.restart(shards=3 if number else shards, lose_local_store=number == 1)
            while test.step(max_ticks):
                continue
            assert test.folded(shop.totals, "k") == expected(fed) == by_key(test)
            answers.append(sorted(test.rows(shop.totals), key=lambda row: row[0]))
    assert answers[0] == answers[1]


def test_a_replay_gives_the_same_rows_under_the_same_ticks(
    tmp_path: Path, spark: SparkSession, log: hr.Log
) -> None:
    fed, shop = ticks_of_rows(), Shop()
    with PipelineTest(shop.pipeline(), tmp_path, spark, log=log) as test:
        feed_ticks(test, shop.orders, fed)
        while test.step(2):
            continue
        with test.replay("v2", shards=3) as again:
            while again.step():
                continue
            assert again.rows(f"{shop.totals}.v2") == test.rows(shop.totals)
            assert {row["k"]: row for row in again.view("by_key.v2")} == expected(fed)
        for partition in range(2):
            rows = [
                [row["_offset"] for row in log.read(topic, partition).to_pylist()]
                for topic in (shop.totals, f"{shop.totals}.v2")
            ]
            tick_offsets = [
                {tick.tick: tick.end for tick in read_control_ticks(log, topic, partition)}
                for topic in (shop.totals, f"{shop.totals}.v2")
            ]
            ends = [
                [sum(at < found[tick] for at in offsets) for tick in sorted(tick_offsets[0])]
                for offsets, found in zip(rows, tick_offsets, strict=True)
            ]
            assert ends[0] == ends[1], "as many rows up to each tick that both tell of"
            assert ends[0][-1] == len(rows[0])


def test_a_batch_that_fails_between_the_views_and_the_log_is_done_once(
    tmp_path: Path, spark: SparkSession, log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed, shop = ticks_of_rows(3), Shop()
    died: list[str] = []

    def gone() -> Any:
        raise OSError("died here")

    def dies_once(ledger: Any, *rest: Any, **named: Any) -> dict[str, int]:
        with pytest.MonkeyPatch.context() as patch:
            if not died:
                died.append("after the views")
                patch.setattr(ledger, "transaction", gone)
            return commit_batch(ledger, *rest, **named)

    monkeypatch.setattr("headrace.runtime.query.commit_batch", dies_once)
    with PipelineTest(shop.pipeline(), tmp_path, spark, log=log) as test:
        feed_ticks(test, shop.orders, fed)
        with pytest.raises(OSError, match="died here"):
            test.step(1)
        assert by_key(test) == expected(fed[:1]), "the view is ahead of the ledger"
        assert test.rows(shop.totals) == []
        test.restart()
        test.settle(2)
        assert test.folded(shop.totals, "k") == expected(fed) == by_key(test)


def test_the_older_of_two_runners_is_fenced_and_does_not_disturb_the_newer(
    tmp_path: Path, spark: SparkSession, log: hr.Log, other: hr.Log
) -> None:
    shop = Shop()
    with PipelineTest(shop.pipeline(), tmp_path / "older", spark, log=log) as older:
        older.feed(shop.orders, [{"k": 1, "v": 1}])
        older.cut()
        with PipelineTest(shop.pipeline(), tmp_path / "newer", spark, log=other) as newer:
            for _ in range(2):
                with pytest.raises(RunnerFenced, match="newer one goes on"):
                    older.cut(forced=True)
            with pytest.raises(RunnerFenced, match="newer one goes on"):
                older.step()
            newer.feed(shop.orders, [{"k": 1, "v": 2}])
            newer.settle()
            assert by_key(newer) == {1: {"k": 1, "n": 2, "s": 3}}
            assert [row[1:] for row in newer.rows(shop.totals)] == [
                (1, 1, 1, "insert"),
                (1, 1, 1, "update_preimage"),
                (1, 2, 3, "update_postimage"),
            ]


def test_an_open_transaction_of_a_runner_that_is_gone_is_rolled_back(
    tmp_path: Path, spark: SparkSession, log: hr.Log, other: hr.Log
) -> None:
    """Rows that a killed runner had sent already must not hold up readers until the transaction's
    time is up.
    """
    shop = Shop()
    with PipelineTest(shop.pipeline(), tmp_path / "killed", spark, log=log) as killed:
        killed.feed(shop.orders, [{"k": 1, "v": 1}])
        killed.cut()
        tx: Any = killed.runner.ledger.transaction()
        tx.append(shop.totals, [{"k": 9, "n": 9, "s": 9, "_change_type": "insert"}])
        tx._send_buffered()  # as a commit does in its first step; then the process is gone
        with PipelineTest(shop.pipeline(), tmp_path / "next", spark, log=other) as test:
            test.settle()
            assert test.folded(shop.totals, "k") == {1: {"k": 1, "n": 1, "s": 1}}


def test_rows_without_a_key_are_diverted_and_others_derived(
    tmp_path: Path, spark: SparkSession, log: hr.Log
) -> None:
    """Row-local steps and a stage over one topic, dead letters and a derived topic in one
    commit.
    """
    orders, taxed, name = fresh("orders"), fresh("taxed"), fresh("care")
    pipeline = hr.Pipeline(name)
    rows = pipeline.topic(orders, schema="k STRING, v BIGINT")
    pipeline.write(taxed, rows.with_columns(tax="v / 10"))
    pipeline.view("n", rows.to_table("k"))
    with PipelineTest(pipeline, tmp_path, spark, log=log) as test:
        test.feed(orders, [{"k": "a", "v": 10}, {"k": None, "v": 20}, {"k": "a", "v": 30}])
        test.settle()
        assert test.view("n") == [{"k": "a", "v": 30}]
        assert [row[1:] for row in test.rows(taxed)] == [
            ("a", 10, 1.0),
            (None, 20, 2.0),
            ("a", 30, 3.0),
        ]
        (dead_letter,) = read_dead_letters(test.log, "n.to_table")
        assert (dead_letter["reason"], dead_letter["source_offset"]) == ("its key is null", 1)
        ticks = [json.loads(control.payload)["tick"] for control in test.log.read_control(taxed, 0)]
        assert ticks == [test.runner.tick] == [1]


def test_tables_are_correct_under_updates_and_tombstones(
    tmp_path: Path, spark: SparkSession, log: hr.Log, kafka_broker: KafkaBroker
) -> None:
    """Also of somebody who knows only Kafka: a null value is a deletion."""
    people, adults = fresh("people"), fresh("adults")
    pipeline = hr.Pipeline(fresh("people"))
    table = pipeline.table(people, schema="id BIGINT, city STRING, age INT", key="id", partitions=2)
    pipeline.view(
        "cities", table.group_by("city").aggregate(n=hr.agg.count(), oldest=hr.agg.max("age"))
    )
    pipeline.write(adults, table.where("age >= 18"))
    with PipelineTest(pipeline, tmp_path, spark, log=log) as test:
        test.feed(
            people,
            [
                {"id": 1, "city": "Oslo", "age": 40},
                {"id": 2, "city": "Oslo", "age": 17},
                {"id": 3, "city": "Rome", "age": 70},
            ],
        )
        test.settle()
        test.feed(
            people, [{"id": 1, "city": "Rome", "age": 40}, {"id": 2, "city": "Oslo", "age": 18}]
        )
        stranger = Producer(
            {"bootstrap.servers": kafka_broker.bootstrap, "partitioner": "murmur2_random"}
        )
        stranger.produce(people, None, b"3")
        assert stranger.flush(20) == 0
        test.settle()
        assert {row["city"]: (row["n"], row["oldest"]) for row in test.view("cities")} == {
            "Oslo": (1, 18),
            "Rome": (1, 40),
        }
        assert test.folded(adults, "id") == {
            1: {"id": 1, "city": "Rome", "age": 40},
            2: {"id": 2, "city": "Oslo", "age": 18},
        }


def test_markers_of_transactions_take_offsets_and_are_no_rows(
    tmp_path: Path, spark: SparkSession, log: hr.Log
) -> None:
    """Ticks end behind markers, in the middle of aborted rows, and at control records; every row is
    taken in once.
    """
    shop = Shop()
    with PipelineTest(shop.pipeline(), tmp_path, spark, log=log) as test:
        fed: Fed = []
        for number in range(4):
            rows = [{"k": k, "v": number} for k in range(6)]
            with log.transaction(fresh("job")) as tx:
                tx.append(shop.orders, rows)
                tx.append_control(shop.orders, number % 2, b"something")
            aborted: Any = log.transaction(fresh("job"))
            aborted.append(shop.orders, [{"k": 1, "v": 1_000_000}])
            aborted._send_buffered()
            aborted.abort()
            fed.append(rows)
            test.cut()
        test.step(2)
        test.settle(1)
        assert test.folded(shop.totals, "k") == expected(fed) == by_key(test)
        last = test.runner.journal.last
        assert last is not None
        assert rows_between({}, last.ends) > sum(map(len, fed)), (
            "there are offsets that are no rows"
        )


def test_a_backlog_is_cut_by_append_time(log: hr.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ticks of bounded size, in order of time over all partitions and topics, with a bounded
    number of questions to the cluster.
    """
    a, b = fresh("a"), fresh("b")
    log.create_topic(a, "n BIGINT", partitions=2)
    log.create_topic(b, "n BIGINT")
    for number in range(12):
        for topic in (a, b):
            with log.producer(topic) as producer:
                producer.append([{"n": number}] * 20)
        time.sleep(0.01)
    broker: Any = log._connection.admin  # type: ignore[attr-defined]
    asked = Mock(wraps=broker._list_offsets)
    monkeypatch.setattr(broker, "_list_offsets", asked)
    start = first_tick({topic: log.start_offsets(topic) for topic in (a, b)})
    ticks = next_ticks(log, [a, b], start, time.time_ns() // 1000, max_rows=100)
    assert [tick.number for tick in ticks] == list(range(1, len(ticks) + 1))
    assert [tick.time_us for tick in ticks] == sorted(tick.time_us for tick in ticks)
    sizes = [
        rows_between(before.ends, tick.ends)
        for before, tick in zip([start, *ticks], ticks, strict=False)
    ]
    assert sum(sizes) >= 480
    assert max(sizes) <= 110, "at most a marker or two beyond the bound"
    assert 5 <= len(ticks) <= 12
    assert asked.call_count <= 8 * len(ticks) + 40
    for tick in ticks[:-1]:
        seen = {
            topic: {
                row["n"]
                for p, end in tick.ends[topic].items()
                for row in log.read(topic, p, 0, end).to_pylist()
            }
            for topic in (a, b)
        }
        assert abs(len(seen[a]) - len(seen[b])) <= 1, "both topics have come equally far"


def test_a_pipeline_runs_by_its_address(
    tmp_path: Path, spark: SparkSession, kafka_broker: KafkaBroker
) -> None:
    """As `headrace run` does it: the log by its address, until caught up."""
    shop = Shop()
    pipeline = shop.pipeline()
    pipeline.log = kafka_broker.address
    with hr.open_log(kafka_broker.address) as log:
        log.create_topic(shop.orders, "k BIGINT, v BIGINT", key="k", partitions=2)
        with log.producer(shop.orders) as producer:
            producer.append([{"k": 1, "v": 5}, {"k": 2, "v": 6}])
        pipeline.run(state=tmp_path / "state", until_caught_up=True, master="local[2]")
        assert sorted(row["s"] for row in log.read(shop.totals).to_pylist()) == [5, 6]


def test_a_new_field_upstream_emptied_a_pipeline(
    tmp_path: Path, spark: SparkSession, log: hr.Log, kafka_broker: KafkaBroker
) -> None:
    """Unknown fields are counted, and records that do not fit are dead letters once, also when the
    batch is computed again.
    """
    shop = Shop()
    with PipelineTest(shop.pipeline(), tmp_path, spark, log=log) as test:
        test.feed(shop.orders, [{"k": 1, "v": 1}])
        producer = Producer({"bootstrap.servers": kafka_broker.bootstrap})
        for value in (b'{"k":1,"v":2,"coupon":"x"}', b'{"k":2,"v":3,"coupon":"y"}', b"garbage"):
            producer.produce(shop.orders, value, partition=0)
        assert producer.flush(20) == 0
        test.restart()
        test.settle()
        assert by_key(test) == {1: {"k": 1, "n": 2, "s": 3}, 2: {"k": 2, "n": 1, "s": 3}}
        counts = test.runner.status().counts
        assert (counts[f"{shop.orders}.unknown_fields"], counts[f"{shop.orders}.diverted"]) == (
            2,
            1,
        )
        (dead_letter,) = read_dead_letters(test.log, shop.orders)
        assert dead_letter["payload"] == b"garbage"
