"""Stored sequence numbers, against a plain set."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import OutOfOrder
from headrace.log.sequences import MAX_RANGES, SequenceIndex, StoredSequences
from headrace.log.values import OffsetRange


@given(st.sets(st.integers(0, 400), max_size=200), st.integers(0, 420))
def test_what_is_known_of_a_number_is_true(numbers: set[int], asked: int) -> None:
    stored = StoredSequences()
    for number in sorted(numbers):
        stored = stored.with_number(number)
    stored = StoredSequences.load(stored.dump())
    assert len(stored.ranges) <= MAX_RANGES
    assert stored.status(asked) in (asked in numbers, None)
    if stored.is_complete:
        assert stored.status(asked) is (asked in numbers)


def test_numbers_below_the_oldest_known_ones_are_not_known() -> None:
    stored = StoredSequences.of([7, 8, 12])
    assert [stored.status(number) for number in (6, 7, 8, 9, 12, 13)] == [
        None, True, True, False, True, False,
    ]  # fmt: skip


def test_an_index_finds_the_offsets_of_a_number_in_several_frames_and_partitions() -> None:
    index = SequenceIndex(3)
    for sequence, partition, start, stop in [
        (5, 0, 10, 20),
        (3, 1, 0, 4),
        (5, 0, 20, 25),
        (5, 1, 4, 5),
    ]:
        index.add(sequence, partition, start, stop)
    index.sort()
    assert index.offsets(5) == {0: OffsetRange(10, 25), 1: OffsetRange(4, 5)}
    assert index.offsets(4) == {}
    assert 2 not in index
    assert 3 in index


def test_a_number_that_was_stored_since_the_index_was_made_was_refused(tmp_path: Path) -> None:
    with hr.open_log(f"file:{tmp_path}/log") as log:
        log.create_topic("a", "n BIGINT")
        with log.producer("a", id="loader") as producer:
            for number in range(0, 400, 2):
                producer.append([{"n": number}], sequence=number)
            assert producer.append([{"n": 0}], sequence=0).duplicate
            for number in range(400, 800, 2):
                producer.append([{"n": number}], sequence=number)
            assert producer.append([{"n": 402}], sequence=402).duplicate
            with pytest.raises(OutOfOrder):
                producer.append([{"n": 1}], sequence=1)
