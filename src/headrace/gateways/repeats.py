"""Which message ids a topic has already: they stand in a header of the rows themselves, so an id and its rows are stored together or not at all.

The newest ids are kept in memory. After a restart they are read from the topic's end; what others append meanwhile is read before each append.
"""

from __future__ import annotations

from collections import OrderedDict

import pyarrow.compute as pc

from headrace.log.api import HEADERS_COLUMN, Log, Position

ID_HEADER = "message-id"
MOST_IDS = 100_000
"""A repeat that comes after so many other messages is not recognised any more."""


class Repeats:
    def __init__(self, log: Log, topic: str, most: int = MOST_IDS) -> None:
        self._log, self._topic, self._most = log, topic, most
        self._known: OrderedDict[str, None] = OrderedDict()
        self._reached: dict[int, int] | None = None

    def __contains__(self, id: str) -> bool:
        return id in self._known

    def catch_up(self) -> None:
        """Read what has come to the topic since the last time; the first time, its newest rows."""
        ends = self._log.end_offsets(self._topic)
        if self._reached is None:
            starts = self._log.start_offsets(self._topic)
            self._reached = {partition: max(starts.get(partition, 0), end - self._most) for partition, end in ends.items()}
        for partition, end in ends.items():
            start = self._reached.get(partition, 0)
            if start < end:
                self._read(partition, start, end)
            self._reached[partition] = end

    def _read(self, partition: int, start: int, end: int) -> None:
        for batch in self._log.read(self._topic, partition, start, end, columns=[HEADERS_COLUMN], headers=True):
            entries = batch.column(0).flatten()
            ids = entries.filter(pc.equal(entries.field(0), ID_HEADER)).field(1).to_pylist()
            for each in ids:
                self.add((each or b"").decode(errors="replace"))

    def add(self, id: str) -> None:
        self._known[id] = None
        self._known.move_to_end(id)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def appended(self, position: Position) -> None:
        """Our own append: not to be read again, if nobody else's came between."""
        assert self._reached is not None
        for partition, span in position.partitions(self._topic).items():
            if self._reached.get(partition, 0) == span.start:
                self._reached[partition] = span.stop
