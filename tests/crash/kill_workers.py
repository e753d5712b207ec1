"""Processes that work on one log until they are killed. What each has done it also writes down in a
file of its own, to be compared later.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from headrace.errors import LeaseLost, MemberFenced
from headrace.log.file.log import FileLog

SESSION = "500 milliseconds"


class Diary:
    """One line a deed, kept by the kernel when the process is killed."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, *words: object) -> None:
        os.write(self._descriptor, (" ".join(map(str, words)) + "\n").encode())


def read_diary(path: Path) -> list[list[int]]:
    return (
        [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def rows_of_append(who: int, sequence: int) -> list[dict[str, int]]:
    """What a writer appends under a number: the same whenever it is asked."""
    return [{"who": who, "n": 10 * sequence + i} for i in range(1 + sequence % 3)]


def write(log: FileLog, diary: Diary, going: Callable[[], bool], who: int) -> None:
    """Numbered appends. After a restart it goes on behind the last number stored; now and then it
    repeats one.
    """
    with log.producer("in", id=f"writer-{who}") as producer:
        while going():
            sequence = producer.last_sequence + (
                0 if producer.last_sequence % 7 == 3 and producer.last_sequence >= 0 else 1
            )
            producer.append(rows_of_append(who, sequence), sequence=sequence)
            if producer.last_sequence % 7 == 3:  # behind the repeat
                producer.append(rows_of_append(who, sequence + 1), sequence=sequence + 1)
            diary.write(producer.last_sequence)


def copy(log: FileLog, diary: Diary, going: Callable[[], bool], _: int) -> None:
    """Exactly once from one topic to another: rows, how far they were read, and a count, all in one
    transaction.
    """
    with log.consumer("in", "copiers", session_timeout=SESSION, max_rows=50) as consumer:
        while going() or _rows_left(log, "copiers"):
            batches = consumer.poll("50 milliseconds")
            rows = [
                {"who": row["who"], "n": row["n"], "source": row["_offset"]}
                for batch in batches
                for row in batch.to_pylist()
            ]
            if rows:
                copied = int(log.note("copied") or 0)
                with (
                    suppress(MemberFenced),
                    log.transaction("copier") as tx,
                ):  # on a busy machine one may seem dead; then nothing is stored
                    tx.append("out", rows)
                    tx.commit_offsets("copiers", consumer.positions())
                    tx.set_note("copied", str(copied + len(rows)), expect=log.note("copied"))
                diary.write(copied + len(rows))


def consume(log: FileLog, diary: Diary, going: Callable[[], bool], _: int) -> None:
    """A plain group: each row is noted, then committed."""
    with log.consumer("in", "readers", session_timeout=SESSION, max_rows=50) as consumer:
        while going() or _rows_left(log, "readers"):
            for batch in consumer.poll("50 milliseconds"):
                for row in batch.select(["_partition", "_offset"]).to_pylist():
                    diary.write(row["_partition"], row["_offset"])
            with suppress(MemberFenced):
                consumer.commit()


def work(log: FileLog, diary: Diary, going: Callable[[], bool], _: int) -> None:
    """A queue: a message is noted with 0 when it comes, and with 1 once it is acknowledged."""
    queue = log.queue("jobs", "workers", delivery_limit=1000)
    while going() or _rows_left(log, "workers"):
        for message in queue.receive(3, visibility="1 second", wait="50 milliseconds"):
            diary.write(0, message.row["n"])
            with suppress(LeaseLost):  # too slow: somebody else has it now
                message.ack()
                diary.write(1, message.row["n"])


def keep(log: FileLog, diary: Diary, going: Callable[[], bool], _: int) -> None:
    """Checkpoints and all the rest of housekeeping, as often as it can."""
    while going():
        log.maintain()
        diary.write(1)


def _rows_left(log: FileLog, group: str) -> bool:
    return any(lag.rows for lag in log.lag(group))


ROLES: dict[str, Callable[[FileLog, Diary, Callable[[], bool], int], Any]] = {
    "write": write,
    "copy": copy,
    "consume": consume,
    "work": work,
    "keep": keep,
}


def run(root: Path, role: str, number: int) -> None:
    """The life of a process. It ends when a file `stop-ROLE` is there and its work is done, unless
    it is killed.
    """
    name = f"{role}-{number}"
    going = _going(root.parent / f"stop-{role}")
    with FileLog.open(root) as log:
        ROLES[role](log, Diary(root.parent / f"{name}.diary"), going, number)


def _going(stop: Path) -> Callable[[], bool]:
    turns = count()
    return lambda: next(turns) % 4 != 0 or not stop.exists()
