"""Compaction by Kafka's rules, and what a crash or a reader in the middle of it sees."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import CorruptBatch
from headrace.log.file.disk import Disk
from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import (
    create_checkpoint,
    maintenance_lock,
    run_maintenance,
)
from headrace.log.file.store import now_us
from headrace.testing.power_loss import RebootedDisk

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
    monkeypatch.setattr("headrace.log.file.store.LogClock.now_us", lambda _clock: later)
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
    monkeypatch.setattr("headrace.log.file.store.LogClock.now_us", lambda _clock: later)
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


def segments(log: FileLog) -> list[Path]:
    return sorted((log.store.root / "topics").glob("t~*/0/*.segment"))


def changed_often(log: FileLog) -> dict[int, str]:
    """A table of few keys in many segments, of which none will be written any more."""
    table(log, history="0 seconds")
    change(log, random.Random(8), 200)
    create_checkpoint(log)
    create_checkpoint(log)
    assert len(segments(log)) > 30
    return fold(read(log))


def test_compaction_leaves_one_file_and_not_one_for_each_segment(log: FileLog) -> None:
    expected = changed_often(log)
    log.maintain()
    sealed = segments(log)[:-1]
    assert len(sealed) <= 1 + sum(path.stat().st_size for path in sealed) // 1500
    assert len(segments(log)) < 8
    assert fold(read(log)) == expected
    assert log.verify() == []


def test_a_missing_segment_behind_a_compacted_one_is_noticed(log: FileLog) -> None:
    table(log, history="0 seconds")
    with log.producer("t") as producer:
        for number in range(40):
            producer.upsert([{"k": number // 2, "v": "x" * 300}])
    create_checkpoint(log)
    create_checkpoint(log)
    assert log.maintain()["rows_removed"] > 0
    _, second, third, *_ = segments(log)
    first_lost, behind = int(second.name[:20]), int(third.name[:20])
    second.unlink()
    log.cache.forget(log.topic_state("t").directory, 0)
    with pytest.raises(CorruptBatch) as damage:
        read(log)
    assert (damage.value.first, damage.value.stop) == (first_lost, behind)
    (finding,) = log.verify()
    assert (finding.kind, finding.offset) == ("missing", first_lost)
    assert f"offsets {first_lost} to {behind - 1} are in no segment" in finding.message


def test_compaction_killed_before_it_removes_what_it_merged_loses_and_doubles_nothing(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = changed_often(log)
    count = len(segments(log))
    with monkeypatch.context() as patch:

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("headrace.log.file.compaction.remove_segment", die)
        with pytest.raises(KeyboardInterrupt):
            log.maintain()
    assert len(segments(log)) == count
    log.cache.forget(log.topic_state("t").directory, 0)
    offsets = [row["_offset"] for row in read(log)]
    assert offsets == sorted(set(offsets))
    assert fold(read(log)) == expected
    assert log.verify() == []
    log.maintain()
    assert fold(read(log)) == expected
    assert len(segments(log)) < 8
    assert log.verify() == []


def test_a_reader_elsewhere_that_knew_the_segments_goes_on_after_they_were_merged(
    log: FileLog, tmp_path: Path
) -> None:
    expected = changed_often(log)
    with FileLog.open(tmp_path / "log") as other:
        before = fold(read(other))
        middle = other.read("t").to_pylist()[100]["_offset"]
        log.maintain()
        assert fold(read(other)) == before == expected
        tail = other.read("t", 0, middle).to_pylist()
        assert [row["_offset"] for row in tail] == [
            row["_offset"] for row in read(log) if row["_offset"] >= middle
        ]
        assert other.offsets_at("t", 0) == log.offsets_at("t", 0)


@pytest.mark.parametrize("count", range(1, 12))
def test_a_read_that_began_before_its_open_segment_was_compacted_finds_no_damage(
    log: FileLog, tmp_path: Path, count: int
) -> None:
    """It knew how many bytes of the segment to read, and compaction has written other bytes."""
    table(log, history="0 seconds")
    log.producer("t").upsert({"k": 0, "v": "superseded later"})
    for key in range(1, count + 1):
        log.producer("t").upsert({"k": key, "v": f"first {key}"})
    with FileLog.open(tmp_path / "log") as other:
        reading = other.read("t", columns=["k", "_offset"])
        for key in range(0, 60, 10):
            log.producer("t").upsert([{"k": 100 + key, "v": "x" * 300}, {"k": 0, "v": "newer"}])
        log.maintain()
        assert [row["k"] for row in reading.to_pylist()] == list(range(1, count + 1))
    assert not (tmp_path / "log" / "quarantine").exists()


def test_recovery_from_the_older_checkpoint_does_not_bring_merged_segments_back(
    tmp_path: Path,
) -> None:
    """The journal since then wrote into segments that are gone by now."""
    with FileLog.open(tmp_path / "log", disk=RebootedDisk()) as log:
        table(log, history="0 seconds")
        change(log, random.Random(8), 30)
        create_checkpoint(log)
        change(log, random.Random(9), 100)
        create_checkpoint(log)
        log.maintain()
        rows = read(log)
        assert len(segments(log)) < 8
    newest = max((tmp_path / "log" / "journal").glob("*.checkpoint"))
    newest.write_bytes(b"damaged")
    with FileLog.open(tmp_path / "log", disk=RebootedDisk()) as log:
        assert read(log) == rows
        assert len(segments(log)) < 8
        assert [finding.kind for finding in log.verify()] in ([], ["corrupt"])


def test_a_reader_whose_open_segment_was_merged_away_reported_damage(log: FileLog) -> None:
    table(log, history="0 seconds")
    change(log, random.Random(8), 30)
    reader = log.partition_reader(log.topic_state("t"), 0)
    expected = fold(read(log))
    end = reader.state.end
    change(log, random.Random(9), 100)
    create_checkpoint(log)
    create_checkpoint(log)
    log.maintain()
    frames = list(reader.frames(reader.state.segment, end, on_corrupt="raise"))
    assert all(frame.first < end for frame in frames)
    assert expected


def test_rows_were_counted_wrongly_after_another_handle_merged_segments(
    log: FileLog, tmp_path: Path
) -> None:
    changed_often(log)
    with FileLog.open(tmp_path / "log") as other:
        assert other.stats("t")[0].rows == len(read(other))
        log.maintain()
        assert other.stats("t")[0].rows == len(read(other)) == len(read(log))


def test_trimming_during_a_merge_deleted_rows_that_were_to_stay(log: FileLog) -> None:
    """Whoever keeps house removes the files; nobody else does meanwhile."""
    changed_often(log)
    before = segments(log)
    with maintenance_lock(log, wait=True):
        log.trim_topic("t", int(before[10].name[:20]) + 1)
        assert segments(log) == before
    log.maintain()
    assert read(log)[0]["_offset"] > int(before[10].name[:20])
    assert log.verify() == []


@pytest.mark.parametrize("returned", [slice(None, None, 3), slice(2, None), slice(None, 2)])
def test_merged_segments_that_came_back_after_a_loss_of_power_made_others_seem_missing(
    tmp_path: Path, returned: slice
) -> None:
    """The removal of a name is durable only when its directory is synced, each on its own."""
    with FileLog.open(tmp_path / "log") as log:
        table(log, history="0 seconds")
        change(log, random.Random(3), 60)
        create_checkpoint(log)
        expected = fold(log.read("t").to_pylist())
        before = {path: path.read_bytes() for path in segment_files(log)}
        run_maintenance(log)
        removed = [path for path in before if path not in segment_files(log)]
    assert len(removed) > 5
    for path in removed[returned]:
        path.write_bytes(before[path])
    with FileLog.open(tmp_path / "log", disk=RebootedDisk()) as log:
        assert fold(log.read("t").to_pylist()) == expected
        assert log.verify() == []


def segment_files(log: FileLog) -> list[Path]:
    return sorted((log.store.root / "topics").rglob("*.segment"))
