"""The sequence numbers that a producer has stored, kept small enough to travel with its state.

    stored 0, 1, 2      [(0, 2)]
    then 5              [(0, 2), (5, 5)]       3 and 4 were never stored: they are refused
    then 3              refused (`OutOfOrder`): what comes later was stored already

A producer's numbers only rise, so a number is new, stored, or was passed over. Numbers that were
passed over leave gaps, and the oldest ranges are forgotten when there are too many: then the frames
must be asked whether a number was stored.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from headrace.errors import OutOfOrder
from headrace.log.values import OffsetRange

MAX_RANGES = 64
"""How many ranges of numbers of a producer are remembered."""


@dataclass(frozen=True, slots=True)
class StoredSequences:
    """Ranges of stored sequence numbers, as (first, last), in order. Whether numbers below the
    first range were stored is known only if `is_complete`.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    is_complete: bool = True

    @classmethod
    def of(cls, numbers: Iterable[int]) -> StoredSequences:
        """Some numbers that were stored; others below them may have been too."""
        stored = cls(is_complete=False)
        for number in sorted(set(numbers)):
            stored = stored.with_number(number)
        return stored

    def with_number(self, number: int) -> StoredSequences:
        """These, and a number that is larger than all of them."""
        if self.ranges and self.ranges[-1][1] == number - 1:
            ranges = (*self.ranges[:-1], (self.ranges[-1][0], number))
        else:
            ranges = (*self.ranges, (number, number))
        if len(ranges) > MAX_RANGES:
            return StoredSequences(ranges[-MAX_RANGES:], is_complete=False)
        return StoredSequences(ranges, self.is_complete)

    def status(self, number: int) -> bool | None:
        """Whether a number was stored; None if it is not known."""
        index = bisect_right(self.ranges, number, key=lambda first_last: first_last[0]) - 1
        if index >= 0:
            return number <= self.ranges[index][1]
        return False if self.is_complete else None

    def dump(self) -> list[object]:
        return [self.is_complete, [list(first_last) for first_last in self.ranges]]

    @classmethod
    def load(cls, dump: list[object]) -> StoredSequences:
        is_complete, ranges = dump
        assert isinstance(ranges, list)
        return cls(tuple((first, last) for first, last in ranges), bool(is_complete))


def out_of_order(topic: str, id: str | None, sequence: int, newest: int) -> OutOfOrder:
    """The error for a number below the newest one that was not stored, as far as is known."""
    return OutOfOrder(
        f"The producer {id!r} of {topic!r} was given the number {sequence}, which is not known to"
        f" be stored, and has stored {newest} since. The rows were not stored.",
        fix=(
            "give numbers in rising order, from one thread; rows that were passed over can be"
            " appended with a new number, producer.last_sequence + 1."
        ),
    )


MAX_INDEXED_FRAMES = 1_000_000
"""32 bytes each."""


class SequenceIndex:
    """Where the frames of a producer's sequence numbers are, from the number `first` up to, but not
    including, `stop`.
    """

    def __init__(self, first: int) -> None:
        self.first, self.stop = first, 1 << 63
        self._columns = [array("q") for _ in range(4)]
        self._found = np.empty((4, 0), dtype=np.int64)

    def add(self, sequence: int, partition: int, start: int, stop: int) -> None:
        if sequence < self.stop:
            for column, value in zip(
                self._columns, (sequence, partition, start, stop), strict=True
            ):
                column.append(value)
            if len(self._columns[0]) > 2 * MAX_INDEXED_FRAMES:
                self.sort()

    def sort(self) -> None:
        """Order what was added by sequence number, and leave out the largest ones if there are too
        many.
        """
        found = np.array([np.frombuffer(column, dtype=np.int64) for column in self._columns])
        found = found[:, np.argsort(found[0], kind="stable")]
        if found.shape[1] > MAX_INDEXED_FRAMES:
            self.stop = int(found[0, MAX_INDEXED_FRAMES])
            found = found[:, : np.searchsorted(found[0], self.stop)]
        self._found = found
        self._columns = [array("q", column.tobytes()) for column in found]

    def __contains__(self, sequence: int) -> bool:
        """Whether it would be here if it were stored."""
        return self.first <= sequence < self.stop

    def offsets(self, sequence: int) -> dict[int, OffsetRange]:
        """Partition -> the offsets of a number's rows; empty if they are not in the log."""
        begin, end = np.searchsorted(self._found[0], [sequence, sequence + 1])
        offsets: dict[int, OffsetRange] = {}
        for _, partition, start, stop in self._found[:, begin:end].T.tolist():
            known = offsets.get(partition, OffsetRange(start, stop))
            offsets[partition] = OffsetRange(min(known.start, start), max(known.stop, stop))
        return offsets
