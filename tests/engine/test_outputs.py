"""Derived topics without a key: to which partitions rows go, and in which order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest

ROWS = [{"n": number} for number in range(200)]


def copied(*, partitions: int) -> hr.Pipeline:
    pipeline = hr.Pipeline("copy")
    numbers = pipeline.topic("numbers", schema="n BIGINT", partitions=5)
    pipeline.write("all", numbers.select("n AS copy"), partitions=partitions)
    return pipeline


def by_partition(test: PipelineTest, topic: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for partition, number in test.rows(topic):
        found.setdefault(partition, []).append(number)
    return found


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_rows_without_a_key_share_the_partitions_and_keep_the_order_they_were_read_in(
    tmp_path: Path, shards: int
) -> None:
    with PipelineTest(copied(partitions=3), tmp_path, shards=shards) as test:
        for start in range(0, len(ROWS), 20):
            test.feed("numbers", ROWS[start : start + 20])
            test.cut()
        test.settle(max_ticks=3)
        read, written = by_partition(test, "numbers"), by_partition(test, "all")
    assert sorted(written) == [0, 1, 2]
    assert sum(len(numbers) for numbers in written.values()) == len(ROWS)
    for partition, numbers in read.items():
        there = written[partition % 3]
        assert [number for number in there if number in set(numbers)] == numbers


@pytest.mark.parametrize("width", ["one", "wide"])
def test_a_copy_of_partition_to_partition_passes_through_no_shuffle(
    tmp_path: Path, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("rows were packed")

    monkeypatch.setattr("headrace.engine.outputs.pack_by_partition", refuse)
    with PipelineTest(copied(partitions=2), tmp_path, width=width) as test:
        for start in range(0, len(ROWS), 20):
            test.feed("numbers", ROWS[start : start + 20])
            test.cut()
        test.settle(max_ticks=3)
        read, written = by_partition(test, "numbers"), by_partition(test, "all")
    for partition, numbers in written.items():
        sources = [numbers for source, numbers in read.items() if source % 2 == partition]
        assert sorted(numbers) == sorted(number for source in sources for number in source)
        for source in sources:
            assert [number for number in numbers if number in set(source)] == source


def test_copied_rows_are_in_order_of_their_ticks(tmp_path: Path) -> None:
    with PipelineTest(copied(partitions=2), tmp_path) as test:
        for start in range(0, len(ROWS), 20):
            test.feed("numbers", ROWS[start : start + 20])
            test.cut()
        test.settle()  # all ticks in one batch
        written = by_partition(test, "all")
    for numbers in written.values():
        ticks = [number // 20 for number in numbers]
        assert ticks == sorted(ticks)


def test_a_topic_with_one_partition_has_all_rows_without_a_key(tmp_path: Path) -> None:
    with PipelineTest(copied(partitions=1), tmp_path) as test:
        test.feed("numbers", ROWS)
        test.settle()
        assert sorted(by_partition(test, "all")[0]) == list(range(len(ROWS)))


def test_what_streams_without_a_key_joined_to_is_the_same_with_any_number_of_shards(
    tmp_path: Path,
) -> None:
    found = []
    for shards in (1, 3):
        pipeline = hr.Pipeline("pairs")
        schema = "k BIGINT, at TIMESTAMP"
        times = hr.EventTime("at", delay="1 second")
        left, right = (
            pipeline.topic(name, schema=schema, event_time=times, partitions=2)
            for name in ("left", "right")
        )
        joined = left.join(right, on="k", within="1 minute", suffix="_right")
        pipeline.write("pairs", joined.select("k"), partitions=4)
        with PipelineTest(pipeline, tmp_path / str(shards), shards=shards) as test:
            begin = datetime(2026, 1, 1, tzinfo=UTC)
            rows = [{"k": n % 20, "at": begin + timedelta(seconds=n)} for n in range(60)]
            test.feed("left", rows)
            test.feed("right", rows)
            test.settle()
            found.append(by_partition(test, "pairs"))
    assert found[0] == found[1]
    assert len(found[0]) > 1
