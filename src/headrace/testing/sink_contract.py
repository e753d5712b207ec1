"""What every sink promises, as a suite of tests. The package's own sinks pass it, and so should one
that you write:

    class TestJsonFile(SinkContract):
        points = (StrikePoint(JsonFileTarget, "atomic", "before"),)

        @pytest.fixture
        def sink(self, tmp_path):
            return Sink(kind="json", opener=JsonFileTarget, options={"path": tmp_path / "a.json"})

A subclass gives the fixture `sink`, and may name more points at which its process dies. The slow
form of the suite, marked `slow`, kills real processes; the other one raises where they would die.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import InputError, SinkFenced, TargetMismatch, TargetUnavailable
from headrace.log.dead_letters import read_dead_letters
from headrace.sinks.base import Target
from headrace.sinks.batch import SinkBatch, TargetShape, build_batch
from headrace.sinks.checkpoint import SinkCheckpoint, new_owner
from headrace.sinks.sync import SinkLoop
from headrace.sinks.topic_follower import TopicFollower
from headrace.testing.strikes import StrikePoint, Struck, strike, sync_and_die

ACCOUNTS = "id BIGINT, name STRING, amount DECIMAL(12, 2)"
EVERYTHING = (
    "k STRING, flag BOOLEAN, small SMALLINT, whole INT, long BIGINT, single FLOAT, twice DOUBLE,"
    " money DECIMAL(20, 4), words STRING, raw BINARY, day DATE, `at` TIMESTAMP, plain"
    " TIMESTAMP_NTZ, tags ARRAY<STRING>, point STRUCT<x: INT, y: DOUBLE>"
)
AT = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)


# A method, whether just before or just after it, and how often it is passed before that: the ledger
# is first written by the takeover.
STEPS = [
    (name, when, 0)
    for name in ("merge", "write_checkpoint", "apply")
    for when in ("before", "after")
] + [("write_checkpoint", when, 1) for when in ("before", "after")]


def account(number: int, amount: int | str = 1, name: str = "ada") -> dict[str, Any]:
    return {"id": number, "name": name, "amount": Decimal(amount)}


def full_row(key: str, **values: Any) -> dict[str, Any]:
    row = {
        "k": key,
        "flag": True,
        "small": -7,
        "whole": 2**31 - 1,
        "long": -(2**63),
        "single": 0.5,
        "twice": 1e300,
        "money": Decimal("-1234567890123456.7891"),
        "words": 'a "b", \\c\t\n\r\u2028 ü 🦆',
        "raw": b'\x00\xff,"\n',
        "day": AT.date(),
        "at": AT,
        "plain": AT.replace(tzinfo=None),
        "tags": ["x", None, 'q"'],
        "point": {"x": 1, "y": None},
    }
    return {**row, **values}


def rows_of(sink: hr.sinks.Sink, log: hr.Log, topic: str) -> list[dict[str, Any]]:
    """What the target has, by key."""
    shape = sink.shape_for(log.topic(topic))
    with sink.open(shape, log) as target:
        target.prepare()
        listed = read_back(target)
    return sorted(
        listed,
        key=lambda row: [
            repr(row[name]) if not isinstance(row[name], int) else row[name] for name in shape.key
        ],
    )


def read_back(target: Target) -> list[dict[str, Any]]:
    return [row for piece in target.contents()[1] for row in piece.to_pylist()]


def folded(log: hr.Log, topic: str, shape: TargetShape) -> list[dict[str, Any]]:
    """What should be in the target, computed from the log."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in log.read(topic).to_pylist():
        key = tuple(row[name] for name in shape.key)
        if shape.is_merge and row.get("_change_type") == "delete":
            rows.pop(key, None)
        else:
            rows[key] = {name: row[name] for name in shape.schema.names}
    return list(rows.values())


def caught_up(sink: hr.sinks.Sink, log: hr.Log, topic: str, **options: Any) -> SinkLoop:
    syncing = SinkLoop(sink, log, topic, **options)
    syncing.run(until_caught_up=True)
    return syncing


def next_batch(log: hr.Log, target: Target, applied: SinkCheckpoint) -> SinkBatch:
    piece = TopicFollower(log, target.shape.topic, applied).next(1_000_000)
    assert piece is not None
    return build_batch(
        piece.rows,
        target.shape,
        piece.start,
        piece.stop,
        target.lookup,
        new_partitions=piece.new_partitions,
    )


def assert_equal_to_log(sink: hr.sinks.Sink, log: hr.Log, topic: str) -> None:
    compared = sink.check(topic, log=log.address)
    assert compared.is_equal, compared.examples
    assert compared.positions == {
        partition: end for partition, end in log.end_offsets(topic).items() if end
    }
    shape = sink.shape_for(log.topic(topic))
    assert sorted(map(repr, rows_of(sink, log, topic))) == sorted(
        map(repr, folded(log, topic, shape))
    )
    assert compared.rows == len(folded(log, topic, shape))


def no_dead_letters(_refused: Any) -> None:
    raise AssertionError("nothing should have been refused")


class SinkContract:
    """The suite. A subclass gives the fixture `sink`, and may name more points of its own kind at
    which a commit is struck.
    """

    points: tuple[StrikePoint, ...] = ()
    is_atomic = True
    """Whether what was struck is wholly there or not at all; or there in part, until it is sent
    again.
    """

    stores_nan = True
    """Whether NaN and infinities come back as they were. Otherwise such rows are refused."""

    merges = True
    """Whether the target can have one row a key. Otherwise it gets every row of the topic."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[hr.Log]:
        with hr.open_log(f"file:{tmp_path / 'log'}") as log:
            log.create_table("accounts", ACCOUNTS, key="id", partitions=2)
            log.create_topic("payments", ACCOUNTS, key="id")
            yield log

    def test_upserts_and_deletes(self, sink: hr.sinks.Sink, log: hr.Log) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(number) for number in range(10)])
            producer.upsert([account(1, 5, name="eve"), account(2, 7), account(2, 8)])
            producer.delete([3, 4])
            producer.upsert([account(4, 9)])
        status = caught_up(sink, log, "accounts").status
        assert (status.rows, status.refused, status.behind) == (16, 0, 0)
        found = {row["id"]: (row["name"], row["amount"]) for row in rows_of(sink, log, "accounts")}
        expected = {
            **dict.fromkeys((0, 5, 6, 7, 8, 9), ("ada", 1)),
            1: ("eve", 5),
            2: ("ada", 8),
            4: ("ada", 9),
        }
        assert not self.merges or found == expected
        assert_equal_to_log(sink, log, "accounts")

        with log.producer("accounts") as producer:
            producer.delete([0, 1, 77])
            producer.upsert([{"id": 5, "name": None, "amount": None}])
        assert caught_up(sink, log, "accounts").status.rows == 4
        kept = [row["id"] for row in rows_of(sink, log, "accounts")]
        assert not self.merges or kept == [2, 4, 5, 6, 7, 8, 9]
        assert_equal_to_log(sink, log, "accounts")

    def test_every_type_comes_back_as_it_was(self, sink: hr.sinks.Sink, log: hr.Log) -> None:
        log.create_table("everything", EVERYTHING, key="k")
        written = [
            full_row("a"),
            {**dict.fromkeys(full_row("b")), "k": "b"},
            full_row("", words="", raw=b"", tags=[]),
        ]
        not_finite = full_row("nan", twice=float("nan"), single=float("-inf"))
        target = replace(sink, table="everything")
        with log.producer("everything") as producer:
            producer.upsert([*written, not_finite] if self.stores_nan else written)
        assert caught_up(target, log, "everything").status.refused == 0
        assert_equal_to_log(target, log, "everything")
        if self.stores_nan:
            return
        with log.producer("everything") as producer:
            producer.upsert(not_finite)
        assert caught_up(target, log, "everything").status.refused == 1
        compared = target.check("everything", log=log.address)
        assert [(each.kind, each.key) for each in compared.examples] == [("missing", {"k": "nan"})]

    def test_a_batch_again_changes_nothing(self, sink: hr.sinks.Sink, log: hr.Log) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(1), account(2)])
        with sink.open(sink.shape_for(log.topic("accounts")), log) as target:
            target.prepare()
            batch = next_batch(log, target, target.begin(new_owner()))
            assert target.apply(batch, no_dead_letters)
            with log.producer("accounts") as producer:
                producer.upsert([account(1, 50)])
            later = next_batch(log, target, target.begin(new_owner()))
            assert target.apply(later, no_dead_letters)
            assert not target.apply(batch, no_dead_letters)
            assert not target.apply(later, no_dead_letters)
        amounts = sorted(row["amount"] for row in rows_of(sink, log, "accounts"))
        assert amounts == ([1, 50] if self.merges else [1, 1, 50])

    def test_an_older_owner_is_refused(self, sink: hr.sinks.Sink, log: hr.Log) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(1)])
        shape = sink.shape_for(log.topic("accounts"))
        with sink.open(shape, log) as older, sink.open(shape, log) as newer:
            older.prepare()
            first, second = new_owner(), new_owner()
            began = older.begin(first)
            batch = next_batch(log, older, began)
            newer.prepare()
            took_over = newer.begin(second)
            assert took_over.epoch > began.epoch
            with pytest.raises(SinkFenced):
                older.apply(batch, no_dead_letters)
            with pytest.raises(SinkFenced):
                older.begin(first, resume=True)
            assert read_back(newer) == []
            assert newer.apply(batch, no_dead_letters)
            with pytest.raises(SinkFenced):
                older.apply(batch, no_dead_letters)
        assert_equal_to_log(sink, log, "accounts")

    def test_struck_at_each_step_of_a_commit(
        self, sink: hr.sinks.Sink, log: hr.Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kind = type(self._opened(sink, log))
        steps = [StrikePoint(kind, *step) for step in STEPS]
        chance = random.Random(1)
        for number, point in enumerate([*steps, *self.points]):
            with log.producer("accounts") as producer:
                producer.upsert([account(chance.randrange(20), number) for _ in range(8)])
                producer.delete([chance.randrange(20)])
            with monkeypatch.context() as patch:
                calls = strike(patch, point)
                with pytest.raises(Struck):
                    caught_up(sink, log, "accounts")
                assert calls
            if number % 2 and self.is_atomic:
                assert_whole(sink, log)
            caught_up(sink, log, "accounts")
            assert_equal_to_log(sink, log, "accounts")

    @pytest.mark.slow
    def test_killed_at_each_step_of_a_commit(self, sink: hr.sinks.Sink, log: hr.Log) -> None:
        """As above, but a process of its own, which does not get to say anything."""
        kind = type(self._opened(sink, log))
        chance = random.Random(3)
        for number, point in enumerate(
            [*(StrikePoint(kind, *step) for step in STEPS), *self.points]
        ):
            with log.producer("accounts") as producer:
                producer.upsert([account(chance.randrange(20), number) for _ in range(8)])
                producer.delete([chance.randrange(20)])
            assert sync_and_die(sink, log.address, "accounts", point) == -signal.SIGKILL
            if self.is_atomic:
                assert_whole(sink, log)
            caught_up(sink, log, "accounts")
            assert_equal_to_log(sink, log, "accounts")

    def _opened(self, sink: hr.sinks.Sink, log: hr.Log) -> Target:
        with sink.open(sink.shape_for(log.topic("accounts")), log) as target:
            return target

    def test_a_stream_is_appended_row_by_row(self, sink: hr.sinks.Sink, log: hr.Log) -> None:
        for amounts in ([1, 2], [3]):
            with log.producer("payments") as producer:
                producer.append([account(7, amount) for amount in amounts])
            caught_up(replace(sink, batch_rows=1), log, "payments")
        assert [
            (row["_partition"], row["_offset"], row["amount"])
            for row in rows_of(sink, log, "payments")
        ] == [(0, 0, 1), (0, 1, 2), (0, 2, 3)]
        assert_equal_to_log(sink, log, "payments")

    def test_a_stream_can_be_merged_by_a_key_and_rows_without_one_become_dead_letters(
        self, sink: hr.sinks.Sink, log: hr.Log
    ) -> None:
        if not self.merges:
            pytest.skip("every row is written as it is")
        merged = replace(sink, key=("id",), name="newest")
        with log.producer("payments") as producer:
            producer.append([account(7, 1), {**account(0, 2), "id": None}, account(7, 3)])
        assert caught_up(merged, log, "payments").status.refused == 1
        assert [(row["id"], row["amount"]) for row in rows_of(merged, log, "payments")] == [(7, 3)]
        (dead_letter,) = read_dead_letters(log, "newest")
        assert (dead_letter["source_offset"], dead_letter["reason"], dead_letter["place"]) == (
            1,
            "its key is null",
            "sink newest",
        )
        assert '"amount":"2.00"' in dead_letter["row"]

    def test_small_batches_and_many_partitions_come_to_the_same(
        self, sink: hr.sinks.Sink, log: hr.Log
    ) -> None:
        chance = random.Random(2)
        with log.producer("accounts") as producer:
            for number in range(20):
                producer.upsert([account(chance.randrange(30), number) for _ in range(5)])
                producer.delete([chance.randrange(30)])
        syncing = caught_up(replace(sink, batch_rows=17), log, "accounts")
        assert syncing.status.commits >= 120 // 17
        assert_equal_to_log(sink, log, "accounts")

    def test_a_target_of_another_topic_is_not_overwritten(
        self, sink: hr.sinks.Sink, log: hr.Log
    ) -> None:
        one = replace(sink, table="one")
        with log.producer("accounts") as producer:
            producer.upsert([account(1)])
        caught_up(one, log, "accounts")
        log.create_table("others", ACCOUNTS, key="id")
        with log.producer("others") as producer:
            producer.upsert([account(2)])
        with pytest.raises(TargetMismatch, match=r"from the topic 'accounts'[\s\S]*--start-over"):
            caught_up(one, log, "others")
        assert [row["id"] for row in rows_of(one, log, "accounts")] == [1]
        caught_up(one, log, "others", start_over=True)
        assert [row["id"] for row in rows_of(one, log, "others")] == [2]
        assert_equal_to_log(one, log, "others")

    def test_a_batch_that_leaves_a_gap_is_not_applied(
        self, sink: hr.sinks.Sink, log: hr.Log
    ) -> None:
        """As when the target was brought back to an earlier state under the hands of its writer."""
        with log.producer("accounts") as producer:
            producer.upsert([account(1)])
            with sink.open(sink.shape_for(log.topic("accounts")), log) as target:
                target.prepare()
                began = target.begin(new_owner())
                first = next_batch(log, target, began)
                producer.upsert([account(1, 2)])
                second = next_batch(log, target, began.with_offsets(first.stop))
                with pytest.raises(TargetUnavailable, match="at other offsets"):
                    target.apply(second, no_dead_letters)
                assert read_back(target) == []
                assert target.apply(first, no_dead_letters)
                assert target.apply(second, no_dead_letters)
        assert_equal_to_log(sink, log, "accounts")

    def test_starting_over_fills_it_anew(self, sink: hr.sinks.Sink, log: hr.Log) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(1), account(2)])
        caught_up(sink, log, "accounts")
        assert caught_up(sink, log, "accounts").status.rows == 0
        assert caught_up(sink, log, "accounts", start_over=True).status.rows == 2
        assert_equal_to_log(sink, log, "accounts")

    def test_columns_that_the_topic_gains_are_added(self, sink: hr.sinks.Sink, log: hr.Log) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(1)])
        caught_up(sink, log, "accounts")
        log.alter_topic("accounts", add_columns="city STRING")
        with log.producer("accounts") as producer:
            producer.upsert([{**account(2), "city": "Oslo"}])
        caught_up(sink, log, "accounts")
        rows = rows_of(sink, log, "accounts")
        assert sorted((row["id"], row["city"]) for row in rows) == [(1, None), (2, "Oslo")]

    def test_a_topic_without_a_key_cannot_be_merged(self, sink: hr.sinks.Sink, log: hr.Log) -> None:
        log.create_topic("noise", "text STRING")
        with pytest.raises(InputError, match="no key to merge by"):
            caught_up(replace(sink, mode="merge"), log, "noise")


def assert_whole(sink: hr.sinks.Sink, log: hr.Log) -> None:
    """What was struck is either wholly there or not at all: the target equals the log as of the
    place it says.
    """
    assert sink.check("accounts", log=log.address).is_equal
