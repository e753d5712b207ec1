"""A queue over damaged rows: they are not lost in silence, and the others are delivered."""

from __future__ import annotations

from pathlib import Path

import headrace as hr
from headrace.log import dead_letters as dead


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
