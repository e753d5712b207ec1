"""Real processes, killed again and again while they write, copy, consume and work off a queue.
Nothing is lost, doubled or out of order.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from threading import Event, Thread

import pytest

from headrace.log.file.log import FileLog
from tests.crash.kill_workers import read_diary, rows_of_append, run

pytestmark = pytest.mark.process

WRITERS = 2
CAST = [
    *(("write", who) for who in range(WRITERS)),
    ("copy", 0),
    ("consume", 0),
    ("work", 0),
    ("work", 1),
    ("keep", 0),
]
Seen = dict[tuple[str, int, int], tuple[int, int]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("in", "who INT, n BIGINT", key="who", partitions=2, segment_bytes=20_000)
        log.create_topic(
            "out", "who INT, n BIGINT, source BIGINT", key="who", partitions=2, segment_bytes=20_000
        )
        log.create_topic("jobs", "n BIGINT", partitions=2)
        log.producer("jobs").append([{"n": n} for n in range(2000)])
    return tmp_path / "log"


class Troupe:
    """One process for each role; who is killed is started again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.context = multiprocessing.get_context(
            "forkserver"
        )  # so that no process inherits another one's open files
        self.context.set_forkserver_preload(["tests.crash.kill_workers"])
        self.processes: dict[tuple[str, int], BaseProcess] = {
            part: self.started(part) for part in CAST
        }

    def started(self, part: tuple[str, int]) -> BaseProcess:
        process = self.context.Process(target=run, args=(self.root, *part), daemon=True)
        process.start()
        return process

    def kill(self, part: tuple[str, int]) -> None:
        assert self.processes[part].is_alive(), f"{part} ended by itself"
        self.processes[part].kill()
        self.processes[part].join()
        self.processes[part] = self.started(part)

    def wait_until_all_have_done_something(self) -> None:
        deadline = time.monotonic() + 60
        while not all(
            read_diary(self.root.parent / f"{role}-{number}.diary") for role, number in CAST
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def finish(self) -> None:
        """Let everybody come to an end of their own; the writers first, so that the others find all
        rows there.
        """
        for part, process in self.processes.items():  # in the order of the cast
            (self.root.parent / f"stop-{part[0]}").touch()
            process.join(timeout=60)
            assert process.exitcode == 0, f"{part} ended with {process.exitcode}"

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


class Onlooker:
    """Reads along all the while, each row once."""

    def __init__(self, root: Path) -> None:
        self.log, self.seen = FileLog.open(root), Seen()
        self._places = {("in", 0): 0, ("in", 1): 0, ("out", 0): 0, ("out", 1): 0}
        self._stop = Event()
        self.error: BaseException | None = None
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.01):
                self.look()
        except BaseException as error:
            self.error = error

    def look(self) -> None:
        for (topic, partition), start in self._places.items():
            for row in self.log.read(topic, partition, start).to_pylist():
                position = topic, partition, row["_offset"]
                assert position not in self.seen
                self.seen[position] = row["who"], row["n"]
                self._places[topic, partition] = row["_offset"] + 1

    def stop(self) -> Seen:
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        self.look()
        self.log.close()
        return self.seen


def later(root: Path) -> Seen:
    with FileLog.open(root) as log:
        return {
            (topic, row["_partition"], row["_offset"]): (row["who"], row["n"])
            for topic in ("in", "out")
            for row in log.read(topic).to_pylist()
        }


def check_writers(root: Path, seen: Seen) -> None:
    stored = [row for (topic, *_), row in sorted(seen.items()) if topic == "in"]
    with FileLog.open(root) as log:
        for who in range(WRITERS):
            last = log.producer("in", id=f"writer-{who}").last_sequence
            wanted = [
                (who, row["n"])
                for sequence in range(last + 1)
                for row in rows_of_append(who, sequence)
            ]
            assert [row for row in stored if row[0] == who] == wanted, (
                "rows of a writer are lost, doubled or out of order"
            )
            acknowledged = read_diary(root.parent / f"write-{who}.diary")
            assert acknowledged
            assert max(acknowledged) <= [last]


def check_copy(root: Path, seen: Seen) -> None:
    original = [row for (topic, *_), row in sorted(seen.items()) if topic == "in"]
    copied = [row for (topic, *_), row in sorted(seen.items()) if topic == "out"]
    for who in range(WRITERS):
        assert [row for row in copied if row[0] == who] == [
            row for row in original if row[0] == who
        ], "the copy is another one"
    with FileLog.open(root) as log:
        assert log.note("copied") == str(len(original))


def check_consumer(root: Path, seen: Seen) -> None:
    noted = {
        (partition, offset) for partition, offset in read_diary(root.parent / "consume-0.diary")
    }
    assert noted == {(partition, offset) for topic, partition, offset in seen if topic == "in"}
    with FileLog.open(root) as log:
        assert log.committed("readers")["in"] == log.end_offsets("in")


def check_queue(root: Path) -> None:
    deeds = [
        deed for number in range(2) for deed in read_diary(root.parent / f"work-{number}.diary")
    ]
    acknowledged = Counter(n for kind, n in deeds if kind == 1)
    assert {n for _, n in deeds} == set(range(2000))
    assert max(acknowledged.values()) == 1, "a message was acknowledged twice"
    for number in range(2):  # what one worker acknowledged it never gets again
        done = set()
        for kind, n in read_diary(root.parent / f"work-{number}.diary"):
            assert n not in done
            done |= {n} if kind == 1 else set()
    with FileLog.open(root) as log:
        assert [lag.rows for lag in log.lag("workers")] == [0, 0]


def kill_in_a_row(root: Path, kills: int) -> None:
    chance = Random(kills)
    troupe, onlooker = Troupe(root), Onlooker(root)
    try:
        troupe.wait_until_all_have_done_something()
        for number in range(kills):
            time.sleep(chance.uniform(0.02, 0.4))
            troupe.kill(CAST[number % len(CAST)])
        troupe.finish()
    finally:
        troupe.end()
        seen = onlooker.stop()
    assert seen == later(root), "the concurrent and the later reader saw different rows"
    check_writers(root, seen)
    check_copy(root, seen)
    check_consumer(root, seen)
    check_queue(root)
    with FileLog.open(root) as log:
        assert log.verify() == []


def test_killed_a_few_times_in_a_row(root: Path) -> None:
    kill_in_a_row(root, 9)


@pytest.mark.slow
def test_killed_fifty_times_in_a_row(root: Path) -> None:
    kill_in_a_row(root, 50)
