"""Ticks: the pipeline's own time. A tick says up to which offset of each input partition rows belong to it.

The journal of a pipeline's ticks is a topic with one fenced writer. A tick is durable before it is used; replays use it again, and so give the same
rows. Most ticks are stored as what changed since the one before, so that many inputs cost little.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.log.api import Log, Position, Transaction

Ends = Mapping[str, Mapping[int, int]]
_SCHEMA = "tick BIGINT, time_us BIGINT, whole BOOLEAN, ends STRING"
_WHOLE_EVERY = 64


@dataclass(frozen=True)
class Tick:
    """Rows below `ends` and at or above the ends of the tick before belong to it. Its time is the pipeline's processing time."""

    number: int
    time_us: int
    ends: Ends

    def end(self, topic: str, partition: int) -> int:
        return self.ends.get(topic, {}).get(partition, 0)


def beginning(starts: Ends) -> Tick:
    """Tick 0: nothing has been taken in yet."""
    return Tick(0, 0, starts)


class TickJournal:
    """The recorded ticks of a pipeline, oldest first, all of them in memory as differences are small."""

    def __init__(self, log: Log, pipeline: str) -> None:
        self.log, self.topic = log, f"__ticks.{pipeline}"
        log.create_topic(self.topic, _SCHEMA, exist_ok=True)
        self._ticks: list[Tick] = []
        self._offset = 0
        self._unsure = False  # whether something was given to a transaction whose outcome has not been looked at
        self.refresh()

    def refresh(self) -> None:
        """Read what was recorded since."""
        for row in self._rows():
            ends = json.loads(row["ends"])
            numbered = {topic: {int(p): end for p, end in parts.items()} for topic, parts in ends.items()}
            before = self._ticks[-1].ends if self._ticks and not row["whole"] else {}
            self._ticks.append(Tick(row["tick"], row["time_us"], _merged(before, numbered)))
        self._unsure = False

    def took(self, ticks: Sequence[Tick], position: Position) -> None:
        """Ticks that were recorded here, and committed at a position: there is no need to read them."""
        self._ticks += ticks
        self._offset = position.partitions(self.topic)[0].stop
        self._unsure = False

    def _rows(self) -> Iterator[dict[str, Any]]:
        for batch in self.log.read(self.topic, 0, self._offset):
            yield from batch.to_pylist()
            self._offset = batch.column("_offset")[-1].as_py() + 1

    @property
    def first(self) -> Tick | None:
        """Where the pipeline began: tick 0, unless it is a version that was replayed from a later one."""
        return self._ticks[0] if self._ticks else None

    @property
    def last(self) -> Tick | None:
        if self._unsure:  # a commit that failed may have happened nevertheless; to record the same number twice would be worse than to look
            self.refresh()
        return self._ticks[-1] if self._ticks else None

    def between(self, after: int, up_to: int) -> Sequence[Tick]:
        """The ticks (after, up_to]."""
        if not self._ticks:
            return []
        first = self._ticks[0].number
        return self._ticks[max(0, after + 1 - first) : max(0, up_to + 1 - first)]

    def at(self, number: int) -> Tick | None:
        found = self.between(number - 1, number)
        return found[0] if found else None

    def record(self, tx: Transaction, ticks: Sequence[Tick]) -> None:
        """Add ticks to a transaction, which must check that its writer is still the pipeline's runner."""
        rows, before = [], self.last
        for tick in ticks:
            whole = before is None or tick.number % _WHOLE_EVERY == 0
            ends = tick.ends if before is None or whole else _changed(before.ends, tick.ends)
            rows.append({"tick": tick.number, "time_us": tick.time_us, "whole": whole, "ends": json.dumps(ends, separators=(",", ":"))})
            before = tick
        self._unsure = True
        tx.append(self.topic, rows)


def _merged(before: Ends, changed: Ends) -> Ends:
    return {topic: {**before.get(topic, {}), **changed.get(topic, {})} for topic in {**before, **changed}}


def _changed(before: Ends, after: Ends) -> Ends:
    differences = {topic: {p: end for p, end in parts.items() if before.get(topic, {}).get(p) != end} for topic, parts in after.items()}
    return {topic: parts for topic, parts in differences.items() if parts}
