"""Queues: acknowledged one by one, redelivered, released, and dead-lettered after too many
deliveries.
"""

import time
from collections.abc import Sequence

import pytest

import headrace as hr
from headrace import errors
from headrace.log.dead_letters import read_dead_letters
from tests.contract.base import ContractBase, MakeName, append, event

PATIENCE_SECONDS = 30.0


class QueuesContract(ContractBase):
    def test_messages_are_received_and_acknowledged(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        with log.producer(events) as producer:
            producer.append(event(1, "a"), headers=[{"h": b"1"}])
            producer.append(event(2, "b"))
        with log.queue(events, group=name("q")) as queue:
            messages = _receive(queue, 2)
            first = min(messages, key=lambda message: message.offset)
            assert (first.topic, first.partition, first.offset, first.deliveries) == (
                events,
                0,
                0,
                1,
            )
            assert (first.row, first.headers) == (event(1, "a"), [("h", b"1")])
            assert abs(first.timestamp.timestamp() - time.time()) < 60
            for message in messages:
                message.ack()
            assert queue.receive(10) == []
        with log.queue(events, group=name("q")) as queue:
            assert list(queue.receive(10, wait="1 second")) == [], "what is acknowledged stays so"
        with log.queue(events, group=name("another")) as queue:
            assert len(_receive(queue, 2)) == 2

    def test_a_message_comes_again_when_its_visibility_ends(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, event(1))
        with log.queue(events, group=name("q")) as queue:
            (message,) = _receive(queue, 1, visibility=self.shortest_visibility)
            time.sleep(self.visibility_seconds + 0.3)
            (again,) = _receive(queue, 1, visibility=self.shortest_visibility)
            assert (again.offset, again.deliveries) == (message.offset, 2)
            with pytest.raises(errors.LeaseLost):
                message.ack()
            again.ack()
            with pytest.raises(errors.LeaseLost):
                again.ack()

    def test_a_message_that_is_given_back_comes_at_once(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, event(1))
        with log.queue(events, group=name("q")) as queue:
            (message,) = _receive(queue, 1)
            message.nack()
            (again,) = _receive(queue, 1)
            assert again.deliveries == 2
            with pytest.raises(errors.LeaseLost):
                message.nack()
            again.ack()

    def test_a_message_can_be_given_back_with_a_delay(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, event(1))
        with log.queue(events, group=name("q")) as queue:
            (message,) = _receive(queue, 1)
            given_back = time.monotonic()
            message.nack(delay="1 second")
            (again,) = _receive(queue, 1)
            assert time.monotonic() - given_back >= 0.95
            again.ack()

    def test_a_delay_beyond_the_visibility(self, log: hr.Log, events: str, name: MakeName) -> None:
        append(log, events, event(1))
        with log.queue(events, group=name("q")) as queue:
            (message,) = _receive(queue, 1)
            if self.delays_beyond_visibility:
                message.nack(delay="1 hour")
                assert queue.receive(1) == []
            else:
                with pytest.raises(errors.NotSupported, match="visibility"):
                    message.nack(delay="1 hour")
                message.ack()

    def test_a_lease_can_be_renewed(self, log: hr.Log, events: str, name: MakeName) -> None:
        append(log, events, event(1))
        with log.queue(events, group=name("q")) as queue:
            (message,) = _receive(queue, 1, visibility=self.shortest_visibility)
            if not self.can_renew:
                with pytest.raises(errors.NotSupported, match="renew"):
                    message.renew()
                return
            message.renew("1 minute")
            time.sleep(self.visibility_seconds + 0.2)
            assert queue.receive(1) == []
            message.ack()

    def test_too_many_deliveries_end_in_dead_letters(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, event(7, "poison"))
        append(log, events, event(8, "fine"))
        with log.queue(events, group=name("q"), delivery_limit=2) as queue:
            assert queue.delivery_limit == 2
            deadline = time.monotonic() + PATIENCE_SECONDS
            seen: list[tuple[int, int]] = []
            while (
                f"{events}.dead" not in log.topics()
                or not read_dead_letters(log, events)
                or (8, 1) not in seen  # in whatever order they come
            ):
                assert time.monotonic() < deadline, seen
                for message in queue.receive(1, wait="500 milliseconds"):
                    seen.append((message.row["n"], message.deliveries))
                    if message.row["n"] == 7:
                        message.nack()
                    else:
                        message.ack()
            assert sorted(seen) == [(7, 1), (7, 2), (8, 1)], seen
            (dead_letter,) = read_dead_letters(log, events)
            assert (
                dead_letter["source_partition"],
                dead_letter["source_offset"],
                dead_letter["place"],
            ) == (
                0,
                0,
                f"queue {name('q')}",
            )
            assert "2 times" in dead_letter["reason"]
            assert "poison" in dead_letter["row"]
            assert queue.receive(1) == []

    def test_two_receivers_share_the_messages(
        self, log: hr.Log, other: hr.Log, name: MakeName
    ) -> None:
        topic = log.create_topic(name("jobs"), "n BIGINT, text STRING", partitions=2).name
        with log.queue(topic, group=name("q")) as one, other.queue(topic, group=name("q")) as two:
            found: dict[int, list[int]] = {1: [], 2: []}
            deadline = time.monotonic() + PATIENCE_SECONDS
            sent = 0
            while (
                not found[1] or not found[2] or sum(map(len, found.values())) < sent
            ) and time.monotonic() < deadline:
                if sent < 40:
                    for _ in range(4):
                        append(log, topic, event(sent), partition=sent % 2)
                        sent += 1
                for number, queue in ((1, one), (2, two)):
                    for message in queue.receive(2, wait="100 milliseconds"):
                        found[number].append(message.row["n"])
                        message.ack()
            assert all(found.values())
            assert sorted(found[1] + found[2]) == list(range(sent)), "each once"

    def test_receipts(self, log: hr.Log, other: hr.Log, events: str, name: MakeName) -> None:
        for n in range(3):
            append(log, events, event(n))
        with (
            log.queue(events, group=name("q")) as queue,
            other.queue(events, group=name("q")) as elsewhere,
        ):
            messages = _receive(queue, 3)
            queue.ack([messages[0].receipt])
            with pytest.raises(errors.InputError, match="receipt"):
                queue.ack(["nonsense"])
            if self.receipts_work_anywhere:
                elsewhere.ack([messages[1].receipt])
            else:
                with pytest.raises(errors.NotSupported, match="receiv"):
                    elsewhere.ack([messages[1].receipt])
                queue.ack([messages[1].receipt])
            queue.nack([messages[2].receipt])
            (again,) = _receive(queue, 1)
            assert again.offset == messages[2].offset
            again.ack()

    def test_a_queue_takes_committed_rows_only(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        with log.queue(events, group=name("q")) as queue:
            tx = log.transaction(name("job"))
            tx.append(events, event(1, "aborted"))
            tx.abort()
            with log.transaction(name("job")) as committed:
                committed.append_control(events, 0, b"tick")
                committed.append(events, event(2))
            (message,) = _receive(queue, 1)
            assert message.row == event(2)
            message.ack()

    def test_a_queue_can_be_looked_at_and_purged(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, [event(n) for n in range(5)])
        with log.queue(events, group=name("q")) as queue:
            if not self.shows_queues:
                for refused in (queue.peek, queue.stats, queue.purge, lambda: queue.renew(["r"])):
                    with pytest.raises(errors.NotSupported, match=r"share group"):
                        refused()
                return
            assert [message.status for message in queue.peek()] == ["ready"] * 5
            done, leased, delayed = _receive(queue, 3)
            done.ack()
            delayed.nack(delay="1 hour")
            queue.renew([leased.receipt], "1 hour")
            peeked = queue.peek(3)
            assert [(each.offset, each.status, each.deliveries) for each in peeked] == [
                (1, "leased", 1),
                (2, "delayed", 1),
                (3, "ready", 0),
            ]
            assert peeked[0].row == leased.row
            (stats,) = queue.stats()
            assert (stats.ready, stats.leased, stats.delayed, stats.oldest) == (2, 1, 1, 1)
            assert queue.purge() == 4
            assert (queue.peek(), queue.receive(5), queue.purge()) == ([], [], 0)
            with pytest.raises(errors.LeaseLost):
                leased.ack()
            append(log, events, event(5))
            (message,) = _receive(queue, 1)
            assert message.row == event(5)
            assert [(stats.leased, stats.oldest) for stats in queue.stats()] == [(1, 5)]

    def test_a_queue_is_a_group_of_its_own_kind(
        self, log: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, event(1))
        with log.queue(events, group=name("mailers")) as queue:
            (message,) = _receive(queue, 1)
            assert name("mailers") in log.groups()
            assert log.group(name("mailers")).kind == "queue"
            if self.counts_queue_lag:
                assert [lag.rows for lag in log.lag(name("mailers"))] == [1]
            message.ack()
        if self.shows_queues:
            log.delete_group(name("mailers"))
            assert name("mailers") not in log.groups()
            with log.queue(events, group=name("mailers")) as queue:
                assert len(_receive(queue, 1)) == 1, "it begins anew"
        else:
            with pytest.raises(errors.NotSupported, match="share groups"):
                log.delete_group(name("mailers"))
        with pytest.raises(errors.InputError):
            log.queue(events, group=name("q"), delivery_limit=0)
        with pytest.raises(errors.UnknownTopic):
            log.queue("no-such-topic", group=name("q"))


def _receive(
    queue: hr.Queue, count: int, *, visibility: str = "10 seconds"
) -> Sequence[hr.Message]:
    """So many messages, however many calls it takes."""
    messages: list[hr.Message] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(messages) < count and time.monotonic() < deadline:
        messages += queue.receive(count - len(messages), visibility=visibility, wait="1 second")
    assert len(messages) == count
    return messages
