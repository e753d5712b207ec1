"""Several threads and processes on one log at once: nobody loses rows, sees what is not durable, or
holds anybody else up.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import pytest

from headrace.errors import ConfigurationError, OffsetOutOfRange
from headrace.log.file.disk import Disk, DiskFile
from headrace.log.file.journal import DurableMarker
from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint
from headrace.testing.power_loss import SlowDisk
from tests.log.file.other_processes import (
    SCHEMA,
    append_from_threads,
    append_in_turn,
    poll_and_commit,
    poll_pause_and_commit,
    started,
)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FileLog]:
    with FileLog.open(tmp_path / "log") as opened:
        opened.create_topic("a", SCHEMA, partitions=2)
        yield opened


def in_threads(count: int, action: Callable[[int], None]) -> None:
    """Run an action in several threads; an error in any is an error."""
    errors: list[BaseException] = []

    def careful(number: int) -> None:
        try:
            action(number)
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=careful, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def wait_for(condition: Callable[[], object], timeout_s: float = 20) -> float:
    """Returns how many seconds it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < timeout_s
        time.sleep(0.01)
    return time.monotonic() - begun


@contextmanager
def switching_often() -> Iterator[None]:
    """Let threads interrupt each other at almost every step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


# Writing


def test_processes_and_threads_that_append_at_once(tmp_path: Path) -> None:
    """They also make the log and its topic at once."""
    processes = [
        started(append_from_threads, tmp_path / "log", 2 * number, 2, 40) for number in range(4)
    ]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    with FileLog.open(tmp_path / "log") as log:
        rows = log.read("a").to_pylist()
        assert sorted((row["who"], row["n"]) for row in rows) == [
            (who, n) for who in range(8) for n in range(40)
        ]
        for who in range(8):
            assert [row["n"] for row in rows if row["who"] == who] == list(range(40))
        assert [row["_offset"] for row in rows if row["_partition"] == 1] == list(range(160))


class CountingDisk(SlowDisk):
    """Counts syncs, and takes its time for each."""

    def __init__(self) -> None:
        super().__init__(0.004)
        self.syncs = 0

    def busy(self) -> Any:
        self.syncs += 1
        return super().busy()


def test_many_appends_share_a_sync(tmp_path: Path) -> None:
    disk = CountingDisk()
    with FileLog.open(tmp_path / "log", disk=disk) as log:
        log.create_topic("a", SCHEMA, partitions=2)
        append_in_turn(log, 0, 1)
        append_in_turn(log, 1, 1)
        disk.syncs = 0
        append_in_turn(log, 0, 10)
        assert disk.syncs == 10  # alone, each append has its own
        disk.syncs = 0
        in_threads(8, lambda who: append_in_turn(log, who, 25))
        assert disk.syncs < 100  # of 200 appends
        assert log.read("a").to_table().num_rows == 212


def test_a_producer_shared_by_threads_stores_every_row(log: FileLog) -> None:
    with log.producer("a", id="shared") as producer, switching_often():

        def append(who: int) -> None:
            for n in range(25):
                producer.append({"who": who, "n": n})

        in_threads(4, append)
        assert producer.last_sequence == 99
    assert sorted((row["who"], row["n"]) for row in log.read("a").to_pylist()) == [
        (who, n) for who in range(4) for n in range(25)
    ]


def test_a_log_opened_before_a_fork_is_not_written_by_the_child(log: FileLog) -> None:
    child = os.fork()
    if child == 0:
        try:
            log.producer("a").append({"who": 0, "n": 0})
        except ConfigurationError:
            os._exit(3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    append_in_turn(log, 0, 1)
    assert log.read("a").to_table().num_rows == 1


def test_the_marker_never_goes_back(tmp_path: Path) -> None:
    marker = DurableMarker.open(Disk(), tmp_path / "durable", write=True)

    def publish(number: int) -> None:
        for lsn in range(number, 2000, 4):
            marker.publish(lsn)
            mark = marker.read()
            assert mark is not None
            assert mark.lsn >= lsn

    with switching_often():
        in_threads(4, publish)


# Seeing


class HeldDisk(Disk):
    """The journal's syncs wait until they are let go."""

    class file_type(DiskFile):  # noqa: N801
        disk: HeldDisk

        def sync(self) -> None:
            if self.path.suffix == ".journal":
                self.disk.arrived.set()
                assert self.disk.free.wait(20)
            super().sync()

    def __init__(self) -> None:
        self.free, self.arrived = Event(), Event()
        self.free.set()


WRITES: dict[str, Callable[[FileLog], object]] = {
    "append": lambda log: log.producer("a").append({"who": 0, "n": 1}),
    "large append": lambda log: log.producer("a").append([{"who": 0, "n": n} for n in range(200)]),
    "staged append": (
        lambda log: log.producer("a").append([{"who": 0, "n": n} for n in range(2000)])
    ),
    "control batch": lambda log: log.append_control("a", 0, b"tick"),
    "new topic": lambda log: log.create_topic("b", SCHEMA),
    "another column": lambda log: log.alter_topic("a", add_columns="more INT"),
    "offsets": lambda log: log.reset_group("readers", "a", 0),
}


@pytest.mark.parametrize("what", WRITES)
def test_nothing_is_seen_before_it_is_durable(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.log.file.committer.INLINE_BYTES", 1_000)
    monkeypatch.setattr("headrace.log.file.producer.MAX_COMMIT_BYTES", 10_000)
    monkeypatch.setattr("headrace.log.file.staging.MAX_COPIED_BYTES", 1_000)
    disk = HeldDisk()
    with (
        FileLog.open(tmp_path / "log", disk=disk) as writer,
        FileLog.open(tmp_path / "log") as reader,
    ):
        writer.create_topic("a", SCHEMA)
        writer.producer("a").append({"who": 0, "n": 0})
        disk.free.clear()
        disk.arrived.clear()
        thread = Thread(target=WRITES[what], args=(writer,))
        thread.start()
        assert disk.arrived.wait(20)
        for log in (writer, reader):
            assert [row["n"] for row in log.read("a").to_pylist()] == [0]
            assert (log.end_offsets("a"), log.topics(), log.topic("a").columns, log.groups()) == (
                {0: 1},
                ["a"],
                ["who", "n"],
                [],
            )
        disk.free.set()
        thread.join()
        for log in (writer, reader):
            seen = log.end_offsets("a"), log.topics(), log.topic("a").columns, log.groups()
            assert seen != ({0: 1}, ["a"], ["who", "n"], [])


def test_one_read_never_shows_half_a_transaction(log: FileLog) -> None:
    stop = Event()

    def write(_: int) -> None:
        for n in range(150):
            with log.transaction("job") as tx:
                tx.append("a", {"who": 0, "n": n}, partition=0)
                tx.append("a", {"who": 0, "n": n}, partition=1)
        stop.set()

    def read(_: int) -> None:
        while not stop.is_set():
            rows = log.read("a", columns=["_partition"]).to_table()["_partition"].to_pylist()
            assert rows.count(0) == rows.count(1)

    with switching_often():
        in_threads(3, lambda number: (read if number else write)(number))


def test_looking_at_everything_while_it_changes(log: FileLog) -> None:
    stop = Event()

    def change(_: int) -> None:
        for n in range(40):
            log.create_topic(f"t{n}", SCHEMA)
            log.reset_group(f"g{n}", f"t{n}", "earliest")
            log.queue("a", f"q{n}").receive(1)
            log.producer("a").append({"who": 0, "n": n})
        stop.set()

    def look(_: int) -> None:
        while not stop.is_set():
            log.groups()
            log.lag()
            log.stats()
            for group in log.groups()[:3]:
                log.group(group)
            log.topics()
            log.verify()

    with switching_often():
        in_threads(3, lambda number: (look if number else change)(number))


def test_opening_a_log_whose_checkpoints_come_and_go(log: FileLog, tmp_path: Path) -> None:
    stop = Event()

    def hurry(_: int) -> None:
        for n in range(60):
            append_in_turn(log, n, 1)
            create_checkpoint(log)
        stop.set()

    def open_again(_: int) -> None:
        while not stop.is_set():
            with FileLog.open(tmp_path / "log") as another:
                before = sum(log.end_offsets("a").values())
                assert sum(another.end_offsets("a").values()) >= before

    in_threads(3, lambda number: (open_again if number else hurry)(number))


# Groups


@pytest.fixture
def filled(log: FileLog) -> FileLog:
    for n in range(100):
        log.producer("a").append([{"who": 0, "n": n}, {"who": 1, "n": n}])
    return log


def test_a_killed_members_partitions_are_taken_over_within_its_session(
    filled: FileLog, tmp_path: Path
) -> None:
    victim = started(poll_and_commit, tmp_path / "log", tmp_path / "diary")
    wait_for((tmp_path / "diary").exists)
    with filled.consumer("a", "readers", session_timeout="1 second") as consumer:
        wait_for(
            lambda: (
                consumer.poll("10 milliseconds") is not None
                and len(consumer.assignment().get("a", ())) == 1
            )
        )
        victim.kill()
        victim.join()
        seconds = wait_for(
            lambda: (
                consumer.poll("10 milliseconds") is not None
                and len(consumer.assignment().get("a", ())) == 2
            )
        )
        assert seconds < 10  # a session of one second, on a machine that may be busy
        wait_for(lambda: not consumer.poll("10 milliseconds"))
        consumer.commit()
    assert filled.committed("readers")["a"] == filled.end_offsets("a")


def test_a_stopped_member_comes_back_too_late(filled: FileLog, tmp_path: Path) -> None:
    zombie = started(poll_pause_and_commit, tmp_path / "log", tmp_path / "diary", tmp_path / "go")
    wait_for((tmp_path / "diary").exists)
    assert zombie.pid is not None
    os.kill(zombie.pid, signal.SIGSTOP)
    with filled.consumer("a", "readers", session_timeout="1 second") as consumer:
        wait_for(
            lambda: (
                consumer.poll("10 milliseconds") is not None
                and len(consumer.assignment().get("a", ())) == 2
            )
        )
        wait_for(lambda: not consumer.poll("10 milliseconds"))
        consumer.commit()
        (tmp_path / "go").touch()
        os.kill(zombie.pid, signal.SIGCONT)
        zombie.join(timeout=20)
    assert (tmp_path / "diary").read_text() == "MemberFenced"
    assert filled.committed("readers")["a"] == filled.end_offsets("a")


# Slow readers


def test_a_slow_reader_blocks_nobody_and_gets_an_error_when_retention_overtakes_it(
    tmp_path: Path,
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("a", SCHEMA, segment_bytes=3_000, retention_bytes=8_000)
        append_in_turn(log, 0, 1)
        slow, fast = log.consumer("a", "slow"), log.consumer("a", "fast", on_lost="earliest")
        assert slow.poll("0 seconds", max_rows=1)[0].num_rows == 1
        for _ in range(5):
            log.producer("a").append([{"who": 0, "n": n} for n in range(200)])
            assert sum(batch.num_rows for batch in fast.poll("0 seconds")) in {200, 201}
            log.maintain()
        with pytest.raises(OffsetOutOfRange) as caught:
            slow.poll("0 seconds")
        assert caught.value.earliest == log.start_offsets("a")[0] > 1
        slow.seek(0, caught.value.earliest)
        assert slow.poll("0 seconds")[0]["_offset"][0].as_py() == caught.value.earliest
        slow.commit()
        slow.close()
        fast.close()


def test_a_reader_needs_little_memory_whatever_the_topics_size(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "log", durability="os") as log:
        log.create_topic("a", "data BINARY", segment_bytes=8 << 20)
        rows = pa.table({"data": pa.array([os.urandom(100_000)] * 20, pa.binary())})
        for _ in range(40):
            log.producer("a").append(rows)
        log.cache.close()
        tracemalloc.start()
        before = pa.total_allocated_bytes()
        count = sum(batch.num_rows for batch in log.read("a"))
        peak = tracemalloc.get_traced_memory()[1] + max(0, pa.total_allocated_bytes() - before)
        tracemalloc.stop()
        assert count == 800
        assert peak < 30 << 20  # of 80 MB
