"""Which offsets a batch reads, and in how many pieces."""

from __future__ import annotations

import pytest

from headrace.engine.reader import min_range_rows, topic_ranges
from headrace.engine.ticks import Tick

BEFORE = Tick(4, 0, {"t": {0: 100, 1: 50}})
TICKS = [Tick(5, 10, {"t": {0: 130, 1: 50}}), Tick(6, 20, {"t": {0: 1_100, 1: 90}})]


@pytest.mark.parametrize(
    ("parts", "least", "expected"),
    [
        (1, 1, [(0, 100, 1_100), (1, 50, 90)]),
        (4, 1, [(0, 100, 600), (0, 600, 1_100), (1, 50, 70), (1, 70, 90)]),
        (4, 30, [(0, 100, 600), (0, 600, 1_100), (1, 50, 90)]),
        (8, 300, [(0, 100, 433), (0, 433, 766), (0, 766, 1_100), (1, 50, 90)]),
    ],
)
def test_ranges_are_cut_for_as_many_tasks_as_run_at_once_but_not_too_small(
    parts: int, least: int, expected: list[tuple[int, int, int]]
) -> None:
    found = topic_ranges("t", 0, ["a"], BEFORE, TICKS, parts=parts, min_rows=least)
    assert [(piece.partition, piece.start, piece.stop) for piece in found] == expected
    assert {piece.ends for piece in found if piece.partition == 0} == {(130, 1_100)}
    assert {piece.times_us for piece in found} == {(10, 20)}


def test_a_partition_without_new_rows_is_not_read() -> None:
    assert [
        piece.partition for piece in topic_ranges("t", 0, ["a"], BEFORE, TICKS[:1], parts=2)
    ] == [0]


def test_cutting_a_partition_is_worth_less_on_kafka() -> None:
    assert min_range_rows("kafka://b:1") > min_range_rows("file:data") > 1
