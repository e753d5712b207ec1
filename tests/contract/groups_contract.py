"""Consumer groups: shared partitions, takeover, fencing, resets, lag."""

import time
from collections.abc import Callable, Mapping
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

    # Exactly once across a rebalance

    def test_rows_of_a_partition_that_moved_between_two_polls_were_stored_twice(
        self, log: hr.Log, other: hr.Log, orders: str, name: MakeName
    ) -> None:
        """Two members read, process and write. One has polled, and polls again before it commits;
        the other one joins in between.
        """
        group, rows = name("g"), 40
        out = log.create_topic(name("out"), ORDERS).name
        append(log, orders, [order(n, customer=n) for n in range(rows)])
        first = log.consumer(orders, group=group)
        held = _collect(rows, first)
        second = other.consumer(orders, group=group)
        processed: list[int] = []

        def process(consumer: hr.Consumer) -> None:
            """One transaction of one poll."""
            found = numbers(consumer.poll(timeout="100 milliseconds"), "order_id")
            try:
                with log.transaction(name(f"t{id(consumer)}")) as tx:
                    tx.append(out, [order(n) for n in found])
                    tx.commit_offsets(group, consumer.positions())
            except errors.MemberFenced:
                return
            processed.extend(found)

        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(_partitions(first, orders)) != 2 or len(_partitions(second, orders)) != 2:
            assert time.monotonic() < deadline
            held += numbers(first.poll(timeout="100 milliseconds"), "order_id")
            process(second)
        for refused in (first.positions, first.commit, first.positions):
            with pytest.raises(errors.MemberFenced, match=r"not committed|no longer"):
                refused()
        with pytest.raises(errors.MemberFenced), log.transaction(name("t")) as tx:
            tx.append(out, [order(n) for n in held])
            tx.commit_offsets(group, first.positions())
        while len(processed) < rows and time.monotonic() < deadline:
            process(first)
            process(second)
        for consumer in (first, second):
            process(consumer)
            consumer.close()
        stored = [row["order_id"] for row in log.read(out).to_pylist()]
        assert sorted(stored) == list(range(rows)), "each once"

    def test_positions_from_before_a_lost_partition_were_committed_after_it(
        self, log: hr.Log, other: hr.Log, orders: str, name: MakeName
    ) -> None:
        group = name("g")
        append(log, orders, [order(n, customer=n) for n in range(40)])
        first = log.consumer(orders, group=group)
        _collect(40, first)
        before = first.positions()
        with other.consumer(orders, group=group) as second:
            _poll_until(lambda: len(_partitions(second, orders)) == 2, first, second)
        with pytest.raises(errors.MemberFenced), log.transaction(name("t")) as tx:
            tx.commit_offsets(group, before)
        _poll_until(lambda: _partitions(first, orders) == {0, 1, 2, 3}, first)
        for _ in range(2):
            with pytest.raises(errors.MemberFenced):
                first.commit(before)
        assert not any(log.committed(group).get(orders, {}).values())
        assert sorted(set(_collect(40, first))) == list(range(40)), "they come again"
        first.commit()
        assert sum(lag.rows for lag in log.lag(group)) == 0
        first.close()

    def test_a_member_without_uncommitted_rows_was_not_fenced(
        self, log: hr.Log, other: hr.Log, orders: str, name: MakeName
    ) -> None:
        group = name("g")
        out = log.create_topic(name("out"), ORDERS).name
        append(log, orders, [order(n, customer=n) for n in range(40)])
        with log.consumer(orders, group=group) as first:
            _collect(40, first)
            with log.transaction(name("t")) as tx:
                tx.append(out, order(1))
                tx.commit_offsets(group, first.positions())
            with other.consumer(orders, group=group) as second:
                _poll_until(lambda: len(_partitions(second, orders)) == 2, first, second)
                first.commit()
                first.commit(first.positions())
                second.commit()
        assert sum(lag.rows for lag in log.lag(group)) == 0

    def test_callbacks_say_what_a_member_gets_and_gives_up(
        self, log: hr.Log, other: hr.Log, orders: str, name: MakeName
    ) -> None:
        group = name("g")
        append(log, orders, [order(n, customer=n) for n in range(40)])
        calls: list[tuple[str, dict[str, tuple[int, ...]]]] = []

        def on_assigned(_consumer: hr.Consumer, partitions: Mapping[str, tuple[int, ...]]) -> None:
            calls.append(("assigned", dict(partitions)))

        def on_revoked(consumer: hr.Consumer, partitions: Mapping[str, tuple[int, ...]]) -> None:
            calls.append(("revoked", dict(partitions)))
            consumer.commit()
            with pytest.raises(errors.InputError, match="callback"):
                consumer.poll()

        first = log.consumer(orders, group=group, on_assigned=on_assigned, on_revoked=on_revoked)
        assert sorted(_collect(40, first)) == list(range(40))
        assert calls == [("assigned", {orders: (0, 1, 2, 3)})]
        with other.consumer(orders, group=group) as second:
            _poll_until(lambda: len(_partitions(second, orders)) == 2, first, second)
            assert calls[1:] == [("revoked", {orders: tuple(sorted(_partitions(second, orders)))})]
            first.commit()
            assert second.poll(timeout="300 milliseconds") == [], "all was committed in time"
        _poll_until(lambda: len(_partitions(first, orders)) == 4, first)
        assert calls[2:] == [("assigned", calls[1][1])]
        first.close()
        assert calls[3:] == [("revoked", {orders: (0, 1, 2, 3)})]
        assert sum(lag.rows for lag in log.lag(group)) == 0

    def test_a_callback_can_seek_in_what_was_assigned(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, [event(n) for n in range(10)])
        with log.consumer(
            events, group=name("g"), on_assigned=lambda consumer, _: consumer.seek(0, 7)
        ) as consumer:
            assert drain(consumer, 3) == [7, 8, 9]

    def test_a_callback_that_fails_is_heard_in_poll(
        self, log: hr.Log, other: hr.Log, orders: str, name: MakeName
    ) -> None:
        group, failures = name("g"), [KeyError("first"), KeyError("second")]

        def on_revoked(_consumer: hr.Consumer, _partitions: Mapping[str, tuple[int, ...]]) -> None:
            if failures:
                raise failures.pop()

        with log.consumer(orders, group=group, on_revoked=on_revoked) as first:
            first.poll(timeout="100 milliseconds")
            with other.consumer(orders, group=group) as second:
                with pytest.raises(KeyError, match="second"):
                    _poll_until(lambda: len(_partitions(second, orders)) == 2, first, second)
                failures.clear()
                _poll_until(lambda: len(_partitions(second, orders)) == 2, first, second)

    def test_a_failing_worker_did_not_commit_in_on_revoked(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, event(1))
        with (
            pytest.raises(KeyError),
            log.consumer(
                events, group=name("g"), on_revoked=lambda consumer, _: consumer.commit()
            ) as consumer,
        ):
            drain(consumer, 1)
            raise KeyError
        with log.consumer(events, group=name("g")) as consumer:
            assert drain(consumer, 1) == [1]

    # Sharing over topics, stuck members, bounds

    def test_ten_topics_of_one_partition_were_all_given_to_one_member(
        self, log: hr.Log, name: MakeName
    ) -> None:
        topics = [log.create_topic(name(f"t{n}"), "n BIGINT").name for n in range(10)]
        members = [log.consumer(topics, group=name("g")) for _ in range(3)]

        def shares() -> list[int]:
            return sorted(sum(map(len, member.assignment().values())) for member in members)

        _poll_until(lambda: shares() == [3, 3, 4], *members)
        members.pop().close()
        _poll_until(lambda: shares() == [5, 5], *members)
        for member in members:
            member.close()

    def test_a_member_that_did_not_poll_kept_its_partitions(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        """Its process lives and sends heartbeats, but it is stuck."""
        append(log, events, [event(n) for n in range(3)])
        with (
            log.consumer(
                events,
                group=name("g"),
                session_timeout="1 second",
                max_poll_interval="1500 milliseconds",
            ) as stuck,
            other.consumer(events, group=name("g"), session_timeout="1 second") as heir,
        ):
            _poll_until(lambda: stuck.assignment() == {events: (0,)}, stuck, heir)
            assert drain(stuck, 3) == [0, 1, 2]
            begun = time.monotonic()
            assert drain(heir, 3) == [0, 1, 2]
            assert time.monotonic() - begun < 15
            heir.commit()
            with pytest.raises(errors.MemberFenced):
                stuck.commit()
            assert stuck.poll(timeout="100 milliseconds") == []
            assert log.committed(name("g")) == {events: {0: 3}}

    def test_the_bound_in_bytes_held_for_each_partition_instead_of_the_poll(
        self, log: hr.Log, name: MakeName
    ) -> None:
        topic = log.create_topic(name("t"), "n BIGINT, text STRING", partitions=6).name
        for n in range(24):
            append(log, topic, event(n, "x" * 600_000), partition=n % 6)
        with log.consumer(topic, group=name("g"), max_bytes=1_500_000) as consumer:
            found: list[int] = []
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(found) < 24 and time.monotonic() < deadline:
                polled = numbers(consumer.poll())
                assert len(polled) <= 4
                found += polled
            assert sorted(found) == list(range(24))

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

    def test_a_group_can_be_shifted_and_a_reset_can_be_tried(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        group = name("g")
        append(log, events, [event(n) for n in range(10)])
        with pytest.raises(errors.UnknownGroup):
            log.reset_group(group, events, shift=1)
        log.reset_group(group, events, 6)
        assert log.reset_group(group, events, shift=-2, dry_run=True) == {events: {0: 4}}
        assert log.reset_group(group, events, "earliest", dry_run=True) == {events: {0: 0}}
        assert log.committed(group) == {events: {0: 6}}, "nothing has moved"
        for shift, offset in ((-2, 4), (-100, 0), (3, 3)):
            assert log.reset_group(group, events, shift=shift) == {events: {0: offset}}
            assert log.committed(group) == {events: {0: offset}}
        for both in (None, 1):
            with pytest.raises(errors.InputError, match="either"):
                log.reset_group(group, events, both, shift=both)
        other = log.create_topic(name("other"), "n BIGINT").name
        with pytest.raises(errors.InputError, match="no committed offset"):
            log.reset_group(group, other, shift=1)

    def test_a_group_could_not_be_deleted(self, log: hr.Log, events: str, name: MakeName) -> None:
        group = name("g")
        append(log, events, event(1))
        with log.consumer(events, group=group) as consumer:
            drain(consumer, 1)
            consumer.commit()
            with pytest.raises(errors.MemberFenced):
                log.delete_group(group)
        log.delete_group(group)
        assert group not in log.groups()
        with pytest.raises(errors.UnknownGroup):
            log.delete_group(group)
        with log.consumer(events, group=group) as consumer:
            assert drain(consumer, 1) == [1], "it begins anew"

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
