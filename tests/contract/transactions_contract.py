"""Transactions: all or nothing over topics, partitions, offsets and notes; of two owners the newer
wins.
"""

import time
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace import errors
from tests.contract.base import ContractBase, MakeName, append, drain, event, order, rows_of


class TransactionsContract(ContractBase):
    def test_everything_is_seen_at_once(
        self, log: hr.Log, other: hr.Log, orders: str, events: str, name: MakeName
    ) -> None:
        with log.transaction(name("job")) as tx:
            tx.append(orders, [order(n, customer=n) for n in range(10)], headers=[{"h": b"1"}] * 10)
            tx.append(events, event(1))
            tx.append(events, event(2), partition=0)
            assert rows_of(other, orders) == rows_of(other, events) == []
        assert sorted(row["order_id"] for row in rows_of(other, orders)) == list(range(10))
        assert [row["n"] for row in rows_of(other, events)] == [1, 2]
        assert log.read(orders, headers=True).to_pylist()[0]["_headers"] == [
            {"key": "h", "value": b"1"}
        ]

    def test_a_commit_says_where_everything_went(
        self, log: hr.Log, orders: str, events: str, name: MakeName
    ) -> None:
        tx = log.transaction(name("job"))
        tx.append(orders, [order(n, customer=n) for n in range(10)])
        tx.append(events, event(1))
        position = tx.commit()
        assert set(position.offsets) == {orders, events}
        assert sum(map(len, position.partitions(orders).values())) == 10
        span = position.partitions(events)[0]
        assert [row["n"] for row in log.read(events, 0, span.start, span.stop).to_pylist()] == [1]
        assert (position.commit is not None) == self.has_global_order

    def test_an_abort_leaves_nothing(
        self, log: hr.Log, orders: str, events: str, name: MakeName
    ) -> None:
        tx = log.transaction(name("job"))
        tx.append(orders, order(1))
        tx.abort()
        tx.abort()
        with pytest.raises(errors.InputError, match="ended"):
            tx.append(orders, order(2))
        with pytest.raises(errors.InputError, match="ended"):
            tx.commit()
        with pytest.raises(ZeroDivisionError), log.transaction(name("job")) as failing:
            failing.append(events, event(1))
            failing.set_note(name("n"), "x")
            raise ZeroDivisionError
        assert rows_of(log, orders) == rows_of(log, events) == []
        assert log.note(name("n")) is None

    def test_rows_are_checked_before_the_commit(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        with log.transaction(name("job")) as tx:
            tx.append(events, event(1))
            with pytest.raises(errors.BadRows):
                tx.append(events, [event(2), {"n": "three", "text": None}])
            with pytest.raises(errors.UnknownTopic):
                tx.append("no-such-topic", event(1))
            with pytest.raises(errors.BadPartition):
                tx.append(events, event(1), partition=7)
        assert [row["n"] for row in rows_of(log, events)] == [1]

    def test_an_open_transaction_holds_up_nobody(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        with log.transaction(name("slow")) as tx:
            tx.append(events, event(100))
            append(other, events, event(1))
            assert [row["n"] for row in rows_of(log, events)] == [1]
            with other.transaction(name("quick")) as inner:
                inner.append(events, event(2))
            assert [row["n"] for row in rows_of(log, events)] == [1, 2]
        assert [row["n"] for row in rows_of(other, events)] == [1, 2, 100]

    def test_tables_and_control_batches_take_part(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        table = log.create_table(name("t"), "id BIGINT, v STRING", key="id").name
        with log.transaction(name("job")) as tx:
            tx.upsert(table, {"id": 1, "v": "a"})
            tx.delete(table, [2])
            tx.append(events, event(1))
            tx.append_control(events, 0, b"tick")
            tx.append(events, event(2))
        assert [(row["id"], row["_change_type"]) for row in rows_of(log, table)] == [
            (1, "update_postimage"),
            (2, "delete"),
        ]
        (control,) = log.read_control(events, 0)
        assert control.payload == b"tick"
        assert [row["_offset"] for row in log.read(events).to_pylist()] == [
            control.offset - 1,
            control.offset + 1,
        ]

    def test_the_newer_owner_wins(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        older = log.transaction(name("job"))
        older.append(events, event(1))
        newer = other.transaction(name("job"))
        with pytest.raises(errors.TransactionFenced):
            older.commit()
        newer.append(events, event(2))
        newer.commit()
        with log.transaction(name("job")) as tx:
            tx.append(events, event(3))
        assert [row["n"] for row in rows_of(log, events)] == [2, 3]

    def test_an_owner_goes_on_without_taking_over(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        """What a long-lived writer does: it begins once, and its transactions follow each other
        until somebody else takes over.
        """
        first = log.transaction(name("job"))
        first.append(events, event(1))
        first.commit()
        second = first.next()
        second.append(events, event(2))
        third = second.next()  # the second was left open, and is gone
        third.append(events, event(3))
        third.set_note(name("n"), "b", expect="a")
        with pytest.raises(errors.NoteConflict):
            third.commit()
        fourth = third.next()
        fourth.append(events, event(4))
        fourth.commit()
        with other.transaction(name("job")) as newer:
            with pytest.raises(errors.TransactionFenced):
                fifth = fourth.next()
                fifth.append(events, event(5))
                fifth.commit()
            newer.append(events, event(6))
        with newer.next() as again:
            again.append(events, event(7))
        assert [row["n"] for row in rows_of(log, events)] == [1, 4, 6, 7]

    def test_a_transaction_that_takes_too_long_is_given_up(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        tx = log.transaction(name("job"), timeout="200 milliseconds")
        tx.append(events, event(1))
        time.sleep(0.3)
        with pytest.raises(errors.TransactionTimedOut):
            tx.commit()
        assert rows_of(log, events) == []

    def test_a_transaction_learns_of_added_columns(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        with log.transaction(name("job")) as tx:
            tx.append(events, event(1))
            other.alter_topic(events, add_columns="extra BIGINT")
            with log.transaction(name("late")) as late:
                late.append(events, event(2) | {"extra": 7})
        assert sorted(rows_of(log, events), key=lambda row: row["n"]) == [
            event(1) | {"extra": None},
            event(2) | {"extra": 7},
        ]

    # Offsets

    def test_offsets_move_with_the_rows(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        out = log.create_topic(name("out"), "n BIGINT, text STRING").name
        append(log, events, [event(n) for n in range(6)])
        group = name("g")
        with log.consumer(events, group=group) as consumer:
            drain(consumer, 6)
            tx = log.transaction(name("job"))
            tx.append(out, event(6))
            tx.commit_offsets(group, consumer.positions())
            assert group not in other.groups() or other.committed(group) == {}
            tx.commit()
            assert other.committed(group)[events][0] >= 6
            append(log, events, event(7))
            drain(consumer, 1)
            aborted = log.transaction(name("job"))
            aborted.commit_offsets(group, consumer.positions())
            aborted.abort()
        with other.consumer(events, group=group) as consumer:
            assert drain(consumer, 1) == [7]
        assert [row["n"] for row in rows_of(log, out)] == [6]

    def test_offsets_of_a_member_that_lost_its_partition_are_refused(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, [event(n) for n in range(3)])
        group = name("g")
        loser = log.consumer(events, group=group)
        drain(loser, 3)
        positions = loser.positions()
        loser.close()
        with other.consumer(events, group=group) as winner:
            drain(winner, 3)
            tx = log.transaction(name("job"))
            tx.append(events, event(99))
            tx.commit_offsets(group, positions)
            with pytest.raises((errors.MemberFenced, errors.InputError)):
                tx.commit()
            assert other.committed(group).get(events, {}) == {}
        assert 99 not in [row["n"] for row in rows_of(log, events)]

    def test_an_outsider_may_commit_offsets_when_nobody_reads(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, [event(n) for n in range(5)])
        group = name("g")
        with log.transaction(name("job")) as tx:
            tx.commit_offsets(group, {events: {0: 3}})
        assert log.committed(group) == {events: {0: 3}}
        with log.consumer(events, group=group) as consumer:
            assert drain(consumer, 2) == [3, 4]
            tx = log.transaction(name("job"))
            tx.commit_offsets(group, {events: {0: 0}})
            with pytest.raises(errors.MemberFenced):
                tx.commit()
        assert log.committed(group) == {events: {0: 3}}

    # Notes

    def test_notes_are_stored_with_the_transaction(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        note = name("note")
        assert log.note(note) is None
        with log.transaction(name("job")) as tx:
            tx.append(events, event(1))
            tx.set_note(note, "ä 1")
        assert log.note(note) == other.note(note) == "ä 1"
        assert log.notes(note[:-1]) == other.notes(note) == {note: "ä 1"}
        assert log.notes(f"{note} ") == {}
        with other.transaction(name("job")) as tx:
            tx.set_note(note, None)
        assert log.note(note) is None

    def test_a_note_that_is_not_as_expected_fails_the_commit(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        note = name("note")
        with log.transaction(name("a")) as tx:
            tx.set_note(note, "1", expect=None)
        with other.transaction(name("b")) as tx:
            tx.set_note(note, "2", expect="1")
        loser = log.transaction(name("a"))
        loser.append(events, event(1))
        loser.set_note(note, "3", expect="1")
        with pytest.raises(errors.NoteConflict) as conflict:
            loser.commit()
        assert conflict.value.current == "2"
        assert other.note(note) == "2"
        assert rows_of(log, events) == []

    def test_of_two_that_expect_the_same_note_one_wins(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        """Both are begun before either commits, with ids of their own: nothing but the note keeps
        them apart.
        """
        from concurrent.futures import ThreadPoolExecutor

        def take(handle: hr.Log, who: str) -> str:
            tx = handle.transaction(name(who))
            tx.append(events, event(1, who))
            tx.set_note(name("owner"), who, expect=None)
            try:
                tx.commit()
            except errors.NoteConflict:
                return ""
            return who

        with ThreadPoolExecutor(2) as pool:
            won = [
                future.result()
                for future in [pool.submit(take, log, "a"), pool.submit(take, other, "b")]
            ]
        (winner,) = [who for who in won if who]
        assert log.note(name("owner")) == winner
        assert [row["text"] for row in rows_of(log, events)] == [winner]

    # Staged rows

    def test_staged_rows_are_invisible_until_adopted(
        self, log: hr.Log, other: hr.Log, orders: str, name: MakeName
    ) -> None:
        schema = log.topic(orders).arrow_schema
        batches = [
            pa.RecordBatch.from_pylist(
                [order(n, customer=n) for n in range(first, first + 50)], schema=schema
            )
            for first in (0, 50)
        ]
        staged = other.stage(orders, batches)
        assert (staged.topic, staged.rows) == (orders, 100)
        assert sum(rows for _, rows in staged.partitions.values()) == 100
        assert rows_of(log, orders) == []
        with log.transaction(name("job")) as tx:
            tx.adopt(_sent(staged))
            tx.append(orders, order(1000))
        rows = log.read(orders).to_pylist()
        assert sorted(row["order_id"] for row in rows) == [*range(100), 1000]
        append(log, orders, [order(n, customer=n) for n in range(100)])
        by_customer = {row["customer_id"]: row["_partition"] for row in rows}
        assert all(
            by_customer.get(row["customer_id"], row["_partition"]) == row["_partition"]
            for row in log.read(orders).to_pylist()
        )

    def test_staged_rows_can_be_for_one_partition(self, log: hr.Log, name: MakeName) -> None:
        topic = log.create_topic(name("t"), "n BIGINT", partitions=3)
        staged = log.stage(
            topic.name, [pa.RecordBatch.from_pydict({"n": [1, 2, 3, 4]})], partition=1
        )
        with log.transaction(name("job")) as tx:
            tx.adopt(staged)
        assert [(row["_partition"], row["n"]) for row in log.read(topic.name).to_pylist()] == [
            (1, 1),
            (1, 2),
            (1, 3),
            (1, 4),
        ]

    def test_staged_rows_of_an_abort_stay_invisible(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        staged = log.stage(
            events, [pa.RecordBatch.from_pylist([event(1)], schema=log.topic(events).arrow_schema)]
        )
        tx = log.transaction(name("job"))
        tx.adopt(staged)
        tx.abort()
        assert rows_of(log, events) == []


def _sent(staged: Any) -> Any:
    """As Spark sends it from a task to the driver."""
    import pickle

    return pickle.loads(pickle.dumps(staged))
