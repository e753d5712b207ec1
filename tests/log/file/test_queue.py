"""A queue over damaged rows: they are not lost in silence, and the others are delivered. Queues
whose messages are held for long, and leases when clocks are wrong.
"""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.log import dead_letters as dead
from headrace.log.file import queue as queue_module
from headrace.log.file import state as state_module
from headrace.log.file.state import DoneOffsets, PartitionQueue, QueueState


def test_a_damaged_message_becomes_a_dead_letter_that_says_where_it_was(tmp_path: Path) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("mails", schema="text STRING")
        with log.producer("mails") as producer:
            for number in range(4):
                producer.append({"text": f"mail {number}"})
        log.append_control("mails", 0, b"not a message")
        (segment,) = (tmp_path / "log" / "topics").glob("mails~*/0/*.segment")
        segment.write_bytes(segment.read_bytes().replace(b"mail 2", b"Mail 2"))

        with log.queue("mails", group="g") as queue:
            messages = queue.receive(10)
            assert [message.row["text"] for message in messages] == ["mail 0", "mail 1", "mail 3"]
            queue.ack([message.receipt for message in messages])
            assert queue.receive(10) == []

        (dead_letter,) = dead.read_dead_letters(log, "mails")
        assert (
            dead_letter["place"],
            dead_letter["source_partition"],
            dead_letter["source_offset"],
            dead_letter["row"],
        ) == ("queue g", 0, 2, None)
        assert segment.name in dead_letter["reason"]
        assert [lag.rows for lag in log.lag("g")] == [0]


def test_more_dead_letters_than_one_answer_holds_can_be_replayed(tmp_path: Path) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("mails", schema="text STRING")
        dead_letters = [
            dead.DeadLetter(place="test", reason="", row=f'{{"text": "{number}"}}')
            for number in range(dead._MAX_ROWS_PER_READ + 1)
        ]
        dead.divert(log, "mails", dead_letters)
        assert dead.replay(log, "mails", offsets=[0, dead._MAX_ROWS_PER_READ]).replayed == 2
        assert sorted(row["text"] for row in log.read("mails").to_pylist()) == [
            "0",
            str(dead._MAX_ROWS_PER_READ),
        ]


# Messages that are held


def test_one_held_message_stopped_a_queue_after_many_others(tmp_path: Path) -> None:
    count, chunk = 101_000, 9_999
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("jobs", schema="n BIGINT")
        with log.producer("jobs") as producer:
            producer.append([{"n": n} for n in range(count)])
        with log.queue("jobs", group="g") as queue:
            (held,) = queue.receive(1, visibility="1 hour")
            done = 0
            while messages := queue.receive(chunk, visibility="1 hour"):
                done += len(messages)
                queue.ack([message.receipt for message in messages])
            assert done == count - 1
            assert [lag.rows for lag in log.lag("g")] == [1]
        log.maintain()  # makes a checkpoint
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        assert [lag.rows for lag in log.lag("g")] == [1]
        with log.queue("jobs", group="g") as queue:
            queue.ack([held.receipt])
        assert log.committed("g") == {"jobs": {0: count}}


def test_a_queue_that_has_delivered_all_it_may_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (state_module, queue_module):
        monkeypatch.setattr(module, "MAX_LEASED", 3)
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("jobs", schema="n BIGINT")
        with log.producer("jobs") as producer:
            producer.append([{"n": n} for n in range(5)])
        with log.queue("jobs", group="g") as queue, caplog.at_level(logging.WARNING):
            assert len(queue.receive(10)) == 3
            assert caplog.messages == []
            for _ in range(2):
                assert queue.receive(10) == []
            assert len(caplog.messages) == 1
            assert "neither acknowledged nor due" in caplog.messages[0]


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(0, 31))
def test_ranges_of_done_offsets_are_a_set(offsets: list[int], floor: int) -> None:
    done, expected = DoneOffsets(), set(offsets)
    for offset in offsets:
        done.add(offset)
    assert [offset for offset in range(32) if offset in done] == sorted(expected)
    assert done.count == len(expected)
    ranges = done.ranges()
    assert all(stop < start for (_, stop), (start, _) in pairwise(ranges))
    raised = done.remove_below(floor)
    while floor in expected:
        floor += 1
    assert raised == floor
    assert done.count == len([offset for offset in expected if offset >= floor])


def test_a_queue_of_the_first_checkpoint_format_can_be_loaded() -> None:
    queue = QueueState.load({"0": [3, 9, [4, 5, 8], [[3, 1, 77, "r"], [6, 2, 0, ""]]]})
    assert queue.partitions[0].done.ranges() == [(4, 6), (8, 9)]
    assert queue.partitions[0].waiting(12) == 6
    assert QueueState.load(queue.dump()).dump() == queue.dump()
    queue.apply("done", 0, [3])
    assert queue.partitions[0] == PartitionQueue(
        floor=6, next=9, done=queue.partitions[0].done, leases=queue.partitions[0].leases
    )


# Clocks


@pytest.fixture
def jobs(tmp_path: Path) -> hr.Log:
    log = hr.open_log(f"file:{tmp_path / 'log'}")
    log.create_topic("jobs", schema="n BIGINT")
    with log.producer("jobs") as producer:
        producer.append({"n": 0})
    return log


def set_clock_ahead(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Of the machine that keeps the files."""
    monkeypatch.setattr(
        "headrace.log.file.store.LogClock.now_us",
        lambda _clock: time.time_ns() // 1000 + seconds * 1_000_000,
    )


@pytest.mark.parametrize("clock", ["of this machine", "of another machine"])
def test_an_append_from_a_clock_an_hour_ahead_froze_all_leases(
    jobs: hr.Log, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    with monkeypatch.context() as ahead, jobs.producer("jobs") as producer:
        set_clock_ahead(ahead, 3600)
        producer.append({"n": 1})
    with jobs.queue("jobs", group="g") as taker, jobs.queue("jobs", group="g") as other:
        with monkeypatch.context() as elsewhere:
            if clock == "of another machine":
                elsewhere.setattr(queue_module, "machine_clock", lambda: "elsewhere")
            assert len(taker.receive(2, visibility="400 milliseconds")) == 2
        assert other.receive(2) == []
        time.sleep(0.5)
        assert [message.deliveries for message in other.receive(2)] == [2, 2]
    jobs.close()


def test_a_clock_that_jumped_ended_a_lease_early(
    jobs: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jobs.queue("jobs", group="g") as queue:
        (message,) = queue.receive(1, visibility="1 minute")
        set_clock_ahead(monkeypatch, 3600)
        assert queue.receive(1) == []
        message.renew("1 minute")
        message.nack(delay="1 minute")
        assert queue.receive(1) == []
    jobs.close()


def test_a_clock_that_was_set_back_kept_a_delayed_message(
    jobs: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jobs.queue("jobs", group="g") as queue:
        (message,) = queue.receive(1)
        message.nack(delay="200 milliseconds")
        set_clock_ahead(monkeypatch, -3600)
        assert queue.receive(1) == []
        assert len(queue.receive(1, wait="2 seconds")) == 1
    jobs.close()
