"""Blobs on their way through an RDD's shuffle: inline, or in files where all tasks are on one
machine.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from headrace.engine.shuffle import heartbeat, labels, packed_row
from headrace.engine.shuffle_items import MIN_FILED_BYTES, from_items, to_pairs

SIZES = [0, 1, MIN_FILED_BYTES - 1, MIN_FILED_BYTES, 3 * MIN_FILED_BYTES]
SHARDS = 3


def packed() -> list[pa.RecordBatch]:
    return [
        packed_row(labels(SHARDS)[number % SHARDS], number, pa.py_buffer(bytes([number]) * size))
        for number, size in enumerate(SIZES)
    ]


@pytest.mark.parametrize("is_local", [True, False])
def test_blobs_of_every_size_arrive_as_they_were_sent(tmp_path: Path, is_local: bool) -> None:
    directory = tmp_path / "blobs" if is_local else None
    items = list(to_pairs(SHARDS, directory, packed()))
    assert [int.from_bytes(shard, "big") for shard in items[::2]] == [0, 1, 2, 0, 1]
    if is_local:
        assert sum(map(len, items)) < 2 * MIN_FILED_BYTES
    assert list(from_items(directory, items[1::2])) == packed()


def test_heartbeats_are_left_out_since_every_shard_runs(tmp_path: Path) -> None:
    assert list(to_pairs(SHARDS, tmp_path, [heartbeat(SHARDS)])) == []


def test_a_task_without_large_blobs_makes_no_file(tmp_path: Path) -> None:
    directory = tmp_path / "blobs"
    list(to_pairs(SHARDS, directory, packed()[:3]))
    assert not directory.exists()


def test_a_second_attempt_of_a_task_leaves_the_file_of_the_first_alone(tmp_path: Path) -> None:
    first = list(to_pairs(SHARDS, tmp_path, packed()))
    list(to_pairs(SHARDS, tmp_path, packed()[::-1]))
    assert list(from_items(tmp_path, first[1::2])) == packed()


def test_rows_outlive_the_file_that_they_are_mapped_from(tmp_path: Path) -> None:
    items = list(to_pairs(SHARDS, tmp_path, packed()))
    arrived = list(from_items(tmp_path, items[1::2]))
    for file in tmp_path.iterdir():
        file.unlink()
    assert arrived == packed()
