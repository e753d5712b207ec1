"""Consumer groups: shared partitions, takeover, fencing, resets, lag."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import headrace as hr
from headrace import errors
from tests.contract.base import ORDERS, ContractBase, MakeName, append, drain, event, numbers, order

PATIENCE_SECONDS = 40.0


class GroupsContract(ContractBase):
    def test_a_group_goes_on_where_it_committed(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, [event(n) for n in range(10)])
        with log.consumer(events, group=name("g")) as consumer:
            assert drain(consumer, 10) == list(range(10))
            consumer.commit()
            append(log, events, [event(10), event(11)])
            assert drain(consumer, 2) == [10, 11]
        with other.consumer(events, group=name("g")) as consumer:
            assert drain(consumer, 2) == [10, 11], "what was not committed comes again"
        with other.consumer(events, group=name("another")) as consumer:
            assert drain(consumer, 12) == list(range(12)), "groups do not know of each other"

    def test_a_poll_returns_when_rows_come_or_time_is_up(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        with log.consumer(events, group=name("g")) as consumer:
            begun = time.monotonic()
            assert consumer.poll(timeout="300 milliseconds") == []
            assert 0.25 < time.monotonic() - begun < 3
            append(log, events, event(1))
            begun = time.monotonic()
            assert numbers(consumer.poll(timeout="20 seconds")) == [1]
            assert time.monotonic() - begun < 5

    def test_batches_come_by_partition_with_their_places(
        self, log: hr.Log, orders: str, name: MakeName
    ) -> None:
        append(log, orders, [order(n, customer=n) for n in range(40)])
        with log.consumer(orders, group=name("g")) as consumer:
            found: list[dict[str, Any]] = []
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(found) < 40 and time.monotonic() < deadline:
                for batch in consumer.poll():
                    assert len(set(batch.column("_partition").to_pylist())) == 1
                    found += batch.to_pylist()
            assert sorted(row["order_id"] for row in found) == list(range(40))
            assert consumer.assignment() == {orders: (0, 1, 2, 3)}
            positions = consumer.positions()
            for partition in range(4):
                last = max(
                    (row["_offset"] for row in found if row["_partition"] == partition), default=-1
                )
                assert positions[orders][partition] >= last + 1

    def test_max_rows_bounds_a_poll(self, log: hr.Log, events: str, name: MakeName) -> None:
        append(log, events, [event(n) for n in range(25)])
        with log.consumer(events, group=name("g"), max_rows=10) as consumer:
            found: list[int] = []
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(found) < 25 and time.monotonic() < deadline:
                polled = numbers(consumer.poll(max_rows=4 if found else None))
                assert len(polled) <= (4 if found else 10)
                found += polled
            assert found == list(range(25))

    def test_start_latest_skips_what_was_there(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, event(1))
        with log.consumer(events, group=name("g"), start="latest") as consumer:
            append(log, events, event(2))
            assert drain(consumer, 1) == [2]
        with pytest.raises(errors.InputError, match="earliest"):
            log.consumer(events, group=name("g"), start="yesterday")
        with pytest.raises(errors.BadName):
            log.consumer(events, group="not a name")

    def test_several_topics_in_one_group(
        self, log: hr.Log, events: str, orders: str, name: MakeName
    ) -> None:
        append(log, events, event(1))
        append(log, orders, order(2))
        with log.consumer([events, orders], group=name("g"), headers=True) as consumer:
            columns: set[str] = set()
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not {"n", "order_id"} <= columns and time.monotonic() < deadline:
                for batch in consumer.poll():
                    columns |= set(batch.schema.names)
            assert {"n", "order_id", "_headers"} <= columns
            consumer.commit()
        assert set(log.committed(name("g"))) == {events, orders}

    def test_explicit_positions_are_committed(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, [event(n) for n in range(10)])
        with log.consumer(events, group=name("g")) as consumer:
            drain(consumer, 10)
            consumer.commit({events: {0: 4}})
        assert log.committed(name("g")) == {events: {0: 4}}
        with log.consumer(events, group=name("g")) as consumer:
            assert drain(consumer, 6) == [4, 5, 6, 7, 8, 9]

    def test_seek(self, log: hr.Log, events: str, name: MakeName) -> None:
        append(log, events, [event(n) for n in range(10)])
        with log.consumer(events, group=name("g")) as consumer:
            drain(consumer, 10)
            consumer.seek(0, 7)
            assert drain(consumer, 3) == [7, 8, 9]
            consumer.seek(0, 0, topic=events)
            assert drain(consumer, 10) == list(range(10))
            with pytest.raises(errors.OffsetOutOfRange):
                consumer.seek(0, 1000)
            with pytest.raises(errors.BadPartition):
                consumer.seek(3, 0)

    def test_a_closed_consumer_is_refused(self, log: hr.Log, events: str, name: MakeName) -> None:
        consumer = log.consumer(events, group=name("g"))
        consumer.close()
        consumer.close()
        with pytest.raises(errors.InputError, match="closed"):
            consumer.poll()
        with pytest.raises(errors.InputError, match="closed"):
            consumer.commit({events: {0: 0}})

    # Sharing

    def test_members_share_partitions_and_a_lost_one_cannot_be_committed(
        self, log: hr.Log, other: hr.Log, orders: str, name: MakeName
    ) -> None:
        append(log, orders, [order(n, customer=n) for n in range(40)])
        first = log.consumer(orders, group=name("g"))
        drain(first, 40, column="order_id")
        before = first.positions()
        first.commit()
        second = other.consumer(orders, group=name("g"))
        _poll_until(
            lambda: (
                _partitions(first, orders) | _partitions(second, orders) == {0, 1, 2, 3}
                and len(_partitions(second, orders)) == 2
            ),
            first,
            second,
        )
        assert len(_partitions(first, orders)) == 2
        assert not _partitions(first, orders) & _partitions(second, orders)
        with pytest.raises(errors.MemberFenced):
            first.commit(before)
        append(log, orders, [order(n, customer=n) for n in range(40, 80)])
        found = _collect(40, first, second)
        assert sorted(found) == list(range(40, 80))
        info = log.group(name("g"))
        assert (info.kind, len(info.members)) == ("group", 2)
        assert {place for member in info.members for place in member.partitions} == {
            (orders, partition) for partition in range(4)
        }
        first.commit()
        second.commit()
        first.close()
        _poll_until(lambda: _partitions(second, orders) == {0, 1, 2, 3}, second)
        second.close()

    def test_a_silent_member_loses_its_partitions(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        """A real process takes part, reads, and is killed without a word."""
        import signal
        import subprocess
        import sys

        append(log, events, [event(n) for n in range(3)])
        script = (
            "import sys, headrace as hr\nconsumer ="
            f" hr.open_log({log.address!r}).consumer({events!r}, group={name('g')!r},"
            " session_timeout='1 second')\nrows = 0\nwhile rows < 3: rows += sum(batch.num_rows"
            " for batch in consumer.poll())\nprint('read', flush=True)\nsys.stdin.read()\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "read"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with other.consumer(events, group=name("g"), session_timeout="1 second") as heir:
            assert drain(heir, 3) == [0, 1, 2]

    # Retention

    @pytest.mark.parametrize("on_lost", ["raise", "earliest", "latest"])
    def test_a_group_that_falls_behind_retention(
        self, log: hr.Log, name: MakeName, on_lost: str
    ) -> None:
        topic = log.create_topic(
            name("kept"), "n BIGINT, text STRING", segment_bytes=self.smallest_segment_bytes
        ).name
        for n in range(10):
            append(log, topic, event(n))
        log.reset_group(name("g"), topic, 2)
        self.forget_old_rows(log, topic)
        start, end = log.start_offsets(topic)[0], log.end_offsets(topic)[0]
        assert 2 < start < end == 10
        assert numbers(list(log.read(topic))) == list(range(start, end))
        with pytest.raises(errors.OffsetOutOfRange, match="retention"):
            log.read(topic, 0, 2)
        assert [lag.rows for lag in log.lag(name("g"))] == [end - start]
        with log.consumer(topic, group=name("g"), on_lost=on_lost) as consumer:
            if on_lost == "raise":
                with pytest.raises(errors.OffsetOutOfRange) as lost:
                    drain(consumer, 1)
                assert (lost.value.offset, lost.value.earliest, lost.value.end) == (2, start, end)
                consumer.seek(0, start)
            if on_lost == "latest":
                assert consumer.poll(timeout="1 second") == []
                append(log, topic, event(10))
            assert drain(consumer, 1)[0] == (10 if on_lost == "latest" else start)

    # Looking and moving

    def test_unknown_groups_name_the_nearest(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, event(1))
        with log.consumer(events, group=name("billing")) as consumer:
            drain(consumer, 1)
            consumer.commit()
        assert name("billing") in log.groups()
        wrong = name("billing").replace("billing", "biling")
        for use in (log.group, log.committed, log.lag):
            with pytest.raises(errors.UnknownGroup, match=f"did you mean '{name('billing')}'"):
                use(wrong)

    def test_reset_in_all_its_forms(self, log: hr.Log, orders: str, name: MakeName) -> None:
        append(log, orders, [order(n, customer=n) for n in range(40)])
        time.sleep(0.05)
        between = datetime.now(UTC)
        time.sleep(0.05)
        ends = log.end_offsets(orders)
        append(log, orders, [order(n, customer=n) for n in range(40, 80)])
        group = name("g")
        assert log.reset_group(group, orders, "latest") == {orders: log.end_offsets(orders)}
        assert log.committed(group) == {orders: log.end_offsets(orders)}
        assert log.reset_group(group, orders, "earliest") == {orders: dict.fromkeys(range(4), 0)}
        assert log.reset_group(group, orders, 2, partitions=[1, 3]) == {orders: {1: 2, 3: 2}}
        assert log.committed(group) == {orders: {0: 0, 1: 2, 2: 0, 3: 2}}
        assert log.reset_group(group, orders, 10**6, partitions=[0]) == {
            orders: {0: log.end_offsets(orders)[0]}
        }
        for moment in (between, between.isoformat()):
            found = log.reset_group(group, orders, moment)[orders]
            assert found == ends == log.offsets_at(orders, between)
        with log.consumer(orders, group=group) as consumer:
            assert sorted(drain(consumer, 40, column="order_id")) == list(range(40, 80))
            with pytest.raises(errors.MemberFenced):
                log.reset_group(group, orders, "earliest")
        with pytest.raises(errors.BadPartition):
            log.reset_group(group, orders, "latest", partitions=[9])
        with pytest.raises(errors.UnknownTopic):
            log.reset_group(group, "no-such-topic", "latest")

    def test_lag_in_rows_and_seconds(self, log: hr.Log, events: str, name: MakeName) -> None:
        group = name("g")
        append(log, events, [event(n) for n in range(10)])
        with log.consumer(events, group=group) as consumer:
            drain(consumer, 10)
            consumer.commit({events: {0: 4}})
            time.sleep(0.2)
            (lag,) = log.lag(group)
            assert (lag.group, lag.topic, lag.partition, lag.committed, lag.end, lag.rows) == (
                group,
                events,
                0,
                4,
                10,
                6,
            )
            assert 0.2 <= lag.seconds < 60
            consumer.commit()
            (lag,) = log.lag(group)
            assert (lag.committed, lag.rows, lag.seconds) == (10, 0, 0.0)
            append(log, events, event(10))
            (lag,) = [each for each in log.lag() if each.group == group]
            assert lag.rows == 1
            assert 0 <= lag.seconds < 30

    def test_lag_of_rows_in_transactions(self, log: hr.Log, orders: str, name: MakeName) -> None:
        group = name("g")
        append(log, orders, [order(n, customer=n) for n in range(40)])
        log.reset_group(group, orders, "earliest")
        rows = sum(lag.rows for lag in log.lag(group))
        assert 40 <= rows <= 40 + (4 if self.markers_take_offsets else 0)
        with log.consumer(orders, group=group) as consumer:
            drain(consumer, 40, column="order_id")
            consumer.commit()
        assert [(lag.rows, lag.seconds) for lag in log.lag(group)] == [(0, 0.0)] * 4

    def test_lag_before_the_first_commit(self, log: hr.Log, name: MakeName) -> None:
        topic = log.create_topic(name("t"), ORDERS, partitions=2).name
        append(log, topic, order(1), partition=0)
        with log.consumer(topic, group=name("g")) as consumer:
            drain(consumer, 1, column="order_id")
            assert [(lag.partition, lag.committed, lag.rows) for lag in log.lag(name("g"))] == [
                (0, None, 1),
                (1, None, 0),
            ]


def _partitions(consumer: hr.Consumer, topic: str) -> set[int]:
    return set(consumer.assignment().get(topic, ()))


def _poll_until(done: Callable[[], bool], *consumers: hr.Consumer) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline, [consumer.assignment() for consumer in consumers]
        for consumer in consumers:
            consumer.poll(timeout="100 milliseconds")


def _collect(count: int, *consumers: hr.Consumer) -> list[int]:
    found: list[int] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found) < count and time.monotonic() < deadline:
        for consumer in consumers:
            found += numbers(consumer.poll(timeout="100 milliseconds"), "order_id")
    return found
