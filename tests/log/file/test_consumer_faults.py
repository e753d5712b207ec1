"""A consumer when something is wrong: damage, large rows, a lost membership. What it did not
deliver stays undelivered, and the rest goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import (
    BadPartition,
    CorruptBatch,
    InputError,
    MemberFenced,
    OffsetOutOfRange,
    UnknownTopic,
)
from headrace.log.api import Consumer
from headrace.log.file import consumer as consumer_module


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        yield opened


def fill(log: hr.Log, partitions: int, appends: int) -> None:
    """A batch of one row an append."""
    log.create_topic("texts", schema="text STRING", partitions=partitions)
    with log.producer("texts") as producer:
        for partition in range(partitions):
            for number in range(appends):
                producer.append({"text": f"row {partition}-{number}"}, partition=partition)


def spoil(tmp_path: Path, partition: int, number: int) -> None:
    (segment,) = (tmp_path / "log" / "topics").glob(f"*/{partition}/*.segment")
    data = segment.read_bytes()
    segment.write_bytes(
        data.replace(f"row {partition}-{number}".encode(), f"Row {partition}-{number}".encode())
    )


def rows_of(consumer: Consumer) -> list[tuple[int, int]]:
    batches = consumer.poll(timeout="0 seconds")
    return [
        position
        for batch in batches
        for position in zip(
            batch["_partition"].to_pylist(), batch["_offset"].to_pylist(), strict=True
        )
    ]


def test_damage_in_one_partition_costs_no_row_of_another(log: hr.Log, tmp_path: Path) -> None:
    fill(log, partitions=3, appends=2)
    spoil(tmp_path, partition=1, number=0)
    seen: list[tuple[int, int]] = []
    damage: set[tuple[int, int, int]] = set()
    with log.consumer("texts", group="g") as consumer:
        for _ in range(6):
            try:
                seen += rows_of(consumer)
            except CorruptBatch as error:
                damage.add((error.partition, error.first, error.stop))
        consumer.commit()
    assert damage == {(1, 0, 1)}
    assert sorted(seen) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert log.committed("g") == {"texts": {0: 2, 1: 0, 2: 2}}


def test_sound_rows_before_damaged_ones_are_delivered_and_the_error_says_where_to_go_on(
    log: hr.Log, tmp_path: Path
) -> None:
    fill(log, partitions=1, appends=5)
    spoil(tmp_path, partition=0, number=2)
    with log.consumer("texts", group="g") as consumer:
        assert rows_of(consumer) == [(0, 0), (0, 1)]
        with pytest.raises(CorruptBatch) as caught:
            consumer.poll(timeout="0 seconds")
        consumer.seek(0, caught.value.stop)
        assert rows_of(consumer) == [(0, 3), (0, 4)]


def test_a_poll_takes_no_more_than_it_has_memory_for(log: hr.Log) -> None:
    log.create_topic("texts", schema="text STRING")
    with log.producer("texts") as producer:
        for _ in range(6):
            producer.append({"text": "x" * (2 << 20)})
    seen = []
    with log.consumer("texts", group="g", max_bytes=4 << 20) as consumer:
        while found := rows_of(consumer):
            assert len(found) <= 2
            seen += found
    assert seen == [(0, offset) for offset in range(6)]


def silence(consumer: Consumer) -> None:
    """As if its process had been stopped: no heartbeat for an hour."""
    assert isinstance(consumer, consumer_module.FileConsumer)
    consumer._heartbeat._stop.set()
    consumer._heartbeat._thread.join()
    path = consumer._heartbeat.path
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps(content | {"us": content["us"] - 3600 * 1_000_000}))


def test_a_member_that_was_away_goes_on_where_others_have_committed(log: hr.Log) -> None:
    fill(log, partitions=1, appends=4)
    with log.consumer("texts", group="g") as away:
        away.poll(timeout="0 seconds", max_rows=2)
        silence(away)
        with log.consumer("texts", group="g") as other:
            assert rows_of(other) == [(0, 0), (0, 1), (0, 2), (0, 3)]
            other.commit()
        with pytest.raises(MemberFenced):
            away.commit()
        assert rows_of(away) == []
        assert away.positions() == {"texts": {0: 4}}


def test_a_member_that_was_dead_when_its_group_was_reset_cannot_undo_that(log: hr.Log) -> None:
    fill(log, partitions=1, appends=4)
    with log.consumer("texts", group="g") as away:
        away.poll(timeout="0 seconds")
        silence(away)
        log.reset_group("g", "texts", 1)
        with pytest.raises(MemberFenced):
            away.commit()
        assert log.committed("g") == {"texts": {0: 1}}
        assert rows_of(away) == [(0, 1), (0, 2), (0, 3)]


def test_a_topic_created_again_is_read_from_its_beginning(log: hr.Log) -> None:
    fill(log, partitions=1, appends=3)
    with log.consumer("texts", group="g") as consumer:
        assert len(rows_of(consumer)) == 3
        log.delete_topic("texts")
        fill(log, partitions=1, appends=2)
        assert rows_of(consumer) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    ("positions", "error"),
    [
        ({"texts": {0: 4}}, OffsetOutOfRange),
        ({"texts": {7: 0}}, BadPartition),
        ({"texts": {0: -1}}, InputError),
        ({"texts": {0: "2"}}, InputError),
        ({"texts": 2}, InputError),
        ({"text": {0: 2}}, UnknownTopic),
    ],
)
def test_a_group_cannot_have_read_what_is_not_there(
    log: hr.Log, positions: Any, error: type[Exception]
) -> None:
    fill(log, partitions=1, appends=3)
    log.reset_group("g", "texts", 1)
    with pytest.raises(error), log.transaction("t") as tx:
        tx.commit_offsets("g", positions)
    with log.consumer("texts", group="g") as consumer:
        with pytest.raises(error):
            consumer.commit(positions)
        assert log.committed("g") == {"texts": {0: 1}}
        as_numpy_gives_it: Any = np.int64(3)
        consumer.commit({"texts": {0: as_numpy_gives_it}})
    assert log.committed("g") == {"texts": {0: 3}}


def test_a_note_is_text(log: hr.Log) -> None:
    with pytest.raises(InputError, match="bytes"), log.transaction("t") as tx:
        tx.set_note("n", b"1")  # type: ignore[arg-type]
    assert log.note("n") is None
