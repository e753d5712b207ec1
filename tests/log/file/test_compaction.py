"""Compaction by Kafka's rules, and what a crash or a reader in the middle of it sees."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.log.file.disk import Disk
from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint, run_maintenance
from headrace.log.file.store import now_us

DAY_US = 24 * 3600 * 1_000_000


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FileLog]:
    with FileLog.open(tmp_path / "log") as log:
        yield log


def table(log: FileLog, **options: Any) -> None:
    log.create_table("t", "k BIGINT, v STRING", key="k", segment_bytes=1500, **options)


def fold(rows: list[dict[str, Any]]) -> dict[int, str]:
    """What a reader who starts at the beginning ends up with."""
    state: dict[int, str] = {}
    for row in rows:
        if row["_change_type"] == "delete":
            state.pop(row["k"], None)
        else:
            state[row["k"]] = row["v"]
    return state


def change(log: FileLog, rng: random.Random, count: int) -> None:
    with log.producer("t") as producer:
        for number in range(count):
            if rng.random() < 0.2:
                producer.delete([rng.randrange(10)])
            else:
                producer.upsert(
                    [
                        {"k": rng.randrange(10), "v": f"v{number}"}
                        for _ in range(rng.randrange(1, 4))
                    ]
                )


def read(log: FileLog) -> list[dict[str, Any]]:
    return log.read("t").to_pylist()


def test_the_newest_row_of_each_key_stays_with_its_offset_and_the_head_is_untouched(
    log: FileLog,
) -> None:
    table(log, history="0 seconds", tombstones="1 day")
    change(log, random.Random(1), 100)
    before = read(log)
    active = log.topic_state("t").partitions[0].segment
    done = log.maintain()
    after = read(log)
    assert done["segments_compacted"] > 0
    assert done["rows_removed"] == len(before) - len(after)
    assert [row for row in before if row["_offset"] >= active] == [
        row for row in after if row["_offset"] >= active
    ]
    assert fold(after) == fold(before)
    by_offset = {row["_offset"]: row for row in before}
    assert all(by_offset[row["_offset"]] == row for row in after)
    sealed = [row["k"] for row in after if row["_offset"] < active]
    assert len(sealed) == len(set(sealed))
    newest = {row["k"]: row["_offset"] for row in before if row["_offset"] < active}
    assert {row["k"]: row["_offset"] for row in after if row["_offset"] < active} == newest
    assert log.verify() == []
    assert log.end_offsets("t")[0] == len(before)


def test_a_second_compaction_changes_nothing(log: FileLog) -> None:
    table(log, history="0 seconds")
    change(log, random.Random(2), 100)
    log.maintain()
    before = read(log)
    assert log.maintain()["rows_removed"] == 0
    assert read(log) == before


def test_compaction_goes_on_over_what_was_compacted_before(log: FileLog) -> None:
    table(log, history="0 seconds")
    rng = random.Random(3)
    for _ in range(4):
        change(log, rng, 60)
        expected = fold(read(log))
        log.maintain()
        assert fold(read(log)) == expected
    assert log.stats("t")[0].rows == len(read(log)) < sum(log.end_offsets("t").values())


def test_tombstones_go_only_after_their_time(log: FileLog, monkeypatch: pytest.MonkeyPatch) -> None:
    table(log, history="0 seconds", tombstones="1 day")
    with log.producer("t") as producer:
        producer.upsert({"k": 1, "v": "x" * 1500})
        producer.delete([1])
        producer.upsert({"k": 2, "v": "x" * 1500})
        producer.upsert({"k": 3, "v": "x" * 1500})
    log.maintain()
    assert [(row["k"], row["_change_type"]) for row in read(log)][:1] == [(1, "delete")]
    later = now_us() + 2 * DAY_US
    monkeypatch.setattr("headrace.log.file.compaction.now_us", lambda: later)
    log.maintain()
    assert [row["k"] for row in read(log)] == [2, 3]


def test_history_is_kept_for_as_long_as_declared(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(log, history="30 days")
    change(log, random.Random(4), 80)
    count = len(read(log))
    assert log.maintain()["rows_removed"] == 0
    later = now_us() + 31 * DAY_US
    monkeypatch.setattr("headrace.log.file.compaction.now_us", lambda: later)
    assert log.maintain()["rows_removed"] > 0
    assert len(read(log)) < count


def test_by_default_a_table_keeps_its_whole_history(log: FileLog) -> None:
    table(log)
    change(log, random.Random(5), 80)
    before = read(log)
    assert log.maintain()["rows_removed"] == 0
    assert read(log) == before


def test_a_plain_keyed_topic_can_be_compacted_too(log: FileLog) -> None:
    log.create_topic("t", "k STRING, v BIGINT", key="k", compact=True, segment_bytes=1000)
    with log.producer("t") as producer:
        for number in range(50):
            producer.append(
                {"k": f"k{number % 3}", "v": number}, headers=[[("n", str(number).encode())]]
            )
    log.append_control("t", 0, b"tick")
    with log.producer("t") as producer:
        for number in range(50, 60):
            producer.append({"k": f"k{number % 3}", "v": number})
    log.maintain()
    after = log.read("t", headers=True).to_pylist()
    assert {row["k"]: row["v"] for row in after} == {"k0": 57, "k1": 58, "k2": 59}
    assert all(
        row["_headers"] in (None, [{"key": "n", "value": str(row["v"]).encode()}]) for row in after
    )
    assert [control.payload for control in log.read_control("t", 0)] == [b"tick"]
    assert log.verify() == []


def test_a_reader_in_the_middle_is_not_disturbed(log: FileLog) -> None:
    table(log, history="0 seconds")
    change(log, random.Random(6), 100)
    reading = iter(log.read("t", columns=["k", "v", "_change_type", "_offset"]))
    first = next(reading).to_pylist()
    expected = fold(read(log))
    log.maintain()
    rest = [row for batch in reading for row in batch.to_pylist()]
    assert fold(first + rest) == expected


def test_reading_from_an_offset_that_compaction_removed_goes_on_behind_it(log: FileLog) -> None:
    table(log, history="0 seconds")
    change(log, random.Random(7), 100)
    log.maintain()
    offsets = [row["_offset"] for row in read(log)]
    for start in range(log.end_offsets("t")[0]):
        found = [row["_offset"] for row in log.read("t", 0, start).to_pylist()]
        assert found == [offset for offset in offsets if offset >= start]


def test_a_repeat_is_recognised_after_its_rows_were_compacted(log: FileLog) -> None:
    table(log, history="0 seconds")
    with log.producer("t", id="p") as producer:
        first = producer.upsert({"k": 1, "v": "first"}, sequence=0)
        for number in range(1, 50):
            producer.upsert({"k": 1, "v": f"v{number}"}, sequence=number)
        log.maintain()
        repeated = producer.upsert({"k": 1, "v": "first"}, sequence=0)
    assert repeated.duplicate
    assert first.partitions("t")[0].start == 0
    assert fold(read(log)) == {1: "v49"}


def test_rows_without_a_key_replace_nothing(log: FileLog) -> None:
    log.create_topic("t", "k STRING, v BIGINT", key="k", compact=True, segment_bytes=1)
    with log.producer("t") as producer:
        for number in range(3):
            producer.append([{"k": None, "v": number}, {"k": "a", "v": number}])
        producer.append({"k": "end", "v": 0})
    log.maintain("t")
    assert [(row["k"], row["v"]) for row in read(log)] == [
        (None, 0),
        (None, 1),
        (None, 2),
        ("a", 2),
        ("end", 0),
    ]


def test_the_background_compacts_what_has_grown_and_a_command_everything(log: FileLog) -> None:
    """Compaction reads a whole partition: not every half minute for a few new rows."""

    def grow(count: int) -> None:
        with log.producer("t") as producer:
            for number in range(count):
                producer.upsert([{"k": number % 3, "v": "x" * 1000}])
        create_checkpoint(log)

    def in_background() -> int:
        return run_maintenance(log, is_due=log.maintenance_thread._is_compaction_due)[
            "rows_removed"
        ]

    table(log, history="0 seconds")
    grow(30)
    assert in_background() > 20
    assert in_background() == 0
    with log.producer("t") as producer:
        producer.upsert([{"k": n, "v": "y" * 1000} for n in range(100, 130)])
    grow(2)  # what is still being written is left alone
    in_background()
    grow(4)
    assert in_background() == 0
    assert log.maintain("t")["rows_removed"] > 0
    grow(60)
    assert in_background() > 50


def test_a_command_waits_for_the_one_who_keeps_house(log: FileLog) -> None:
    table(log, history="0 seconds")
    change(log, random.Random(1), 60)
    lock = Disk().open(log.store.root / "journal" / "housekeeping", create=True)
    with ThreadPoolExecutor(1) as pool:
        with lock.locked():
            assert run_maintenance(log, is_due=lambda _topic, _number: True)["rows_removed"] == 0
            asked = pool.submit(log.maintain, "t")
            time.sleep(0.1)
            assert not asked.done()
        assert asked.result(30)["rows_removed"] > 0
    lock.close()


def test_rows_are_whole_behind_the_last_segment_that_was_compacted(
    log: FileLog, tmp_path: Path
) -> None:
    table(log, history="0 seconds")
    change(log, random.Random(1), 60)
    assert log.whole_from("t") == {0: 0}
    with FileLog.open(tmp_path / "log") as other:  # whose open files are not ours
        other.maintain("t")
    whole = log.whole_from("t")[0]
    offsets = [row["_offset"] for row in read(log)]
    assert [offset for offset in offsets if offset >= whole] == list(
        range(whole, log.end_offsets("t")[0])
    )
    assert (
        len([offset for offset in offsets if offset < whole])
        < whole
        <= log.topic_state("t").partitions[0].segment
    )
