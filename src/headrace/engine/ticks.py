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
_SHED = "__shed"  # among the ends, in ticks in which rows are left out; no topic of users has such a name
_WHOLE_EVERY = 64
_NEAR = 256  # offsets; among so many there is a whole tick
MOST_AT_HAND = 10_000


@dataclass(frozen=True)
class Tick:
    """Rows below `ends` and at or above the ends of the tick before belong to it. Its time is the pipeline's processing time."""

    number: int
    time_us: int
    ends: Ends
    shed: frozenset[str] = frozenset()
    """Topics of which rows are left out in this tick (`shedding`)."""

    def end(self, topic: str, partition: int) -> int:
        return self.ends.get(topic, {}).get(partition, 0)


def beginning(starts: Ends) -> Tick:
    """Tick 0: nothing has been taken in yet."""
    return Tick(0, 0, starts)


class TickJournal:
    """The recorded ticks of a pipeline, oldest first. The newest ones are at hand; older ones, which only a query that is catching up needs, are read when they are asked for."""

    def __init__(self, log: Log, pipeline: str) -> None:
        self.log, self.topic = log, f"__ticks.{pipeline}"
        log.create_topic(self.topic, _SCHEMA, exist_ok=True)
        self._ticks: list[Tick] = []
        self._first: Tick | None = None
        self._offset = self._begin_near_the_end()
        self._unsure = False  # whether something was given to a transaction whose outcome has not been looked at
        self.refresh()

    def _begin_near_the_end(self) -> int:
        """An offset from which on there is a whole tick, and the newest one, without reading all of them."""
        start, end = self.log.start_offsets(self.topic)[0], self.log.end_offsets(self.topic)[0]
        first = next(self._read(start, min(end, start + _NEAR)), None)
        self._first = None if first is None else _tick(first[1], None)
        return self._whole_before(end, start)

    def _whole_before(self, offset: int, start: int) -> int:
        """The offset of a whole tick at or before this one; there is one every 64 ticks, with markers between them on Kafka."""
        while offset > start:
            low = max(start, offset - _NEAR)
            wholes = [at for at, row in self._read(low, offset + 1) if row["whole"]]
            if wholes:
                return wholes[-1]
            offset = low
        return start

    def refresh(self) -> None:
        """Read what was recorded since."""
        for at, row in self._read(self._offset):
            self._keep([_tick(row, self._ticks[-1] if self._ticks else None)])
            self._offset = at + 1
        self._unsure = False

    def took(self, ticks: Sequence[Tick], position: Position) -> None:
        """Ticks that were recorded here, and committed at a position: there is no need to read them."""
        self._keep(ticks)
        self._offset = position.partitions(self.topic)[0].stop
        self._unsure = False

    def _keep(self, ticks: Sequence[Tick]) -> None:
        if self._first is None and ticks:
            self._first = ticks[0]
        self._ticks += ticks
        if len(self._ticks) > 2 * MOST_AT_HAND:
            del self._ticks[:-MOST_AT_HAND]

    def _read(self, start: int, stop: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        for batch in self.log.read(self.topic, 0, start, stop):
            yield from zip(batch.column("_offset").to_pylist(), batch.to_pylist(), strict=True)

    @property
    def first(self) -> Tick | None:
        """Where the pipeline began: tick 0, unless it is a version that was replayed from a later one."""
        return self._first

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
        at_hand = self._ticks[max(0, after + 1 - first) : max(0, up_to + 1 - first)]
        return at_hand if after + 1 >= first else [*self._older(after, min(up_to, first - 1)), *at_hand]

    def _older(self, after: int, up_to: int) -> list[Tick]:
        """Ticks (after, up_to] that are no longer at hand."""
        start, end = self.log.start_offsets(self.topic)[0], self._offset
        offset = self._whole_before(self._offset_of(after + 1, start, end), start)
        found: list[Tick] = []
        before: Tick | None = None
        for _, row in self._read(offset, end):
            before = _tick(row, before)
            if before.number > up_to:
                break
            if before.number > after:
                found.append(before)
        return found

    def _offset_of(self, number: int, low: int, high: int) -> int:
        """An offset at or before that of a tick: numbers rise with offsets, so it is found by halving."""
        while high - low > _NEAR:
            middle = (low + high) // 2
            found = next(self._read(middle, min(high, middle + _NEAR)), None)
            low, high = (middle, high) if found is not None and found[1]["tick"] <= number else (low, middle)
        return low

    def at(self, number: int) -> Tick | None:
        found = self.between(number - 1, number)
        return found[0] if found else None

    def record(self, tx: Transaction, ticks: Sequence[Tick]) -> None:
        """Add ticks to a transaction, which must check that its writer is still the pipeline's runner."""
        rows, before = [], self.last
        for tick in ticks:
            whole = before is None or tick.number % _WHOLE_EVERY == 0
            ends = tick.ends if before is None or whole else _changed(before.ends, tick.ends)
            told = {**ends, _SHED: dict.fromkeys(sorted(tick.shed), 1)} if tick.shed else ends
            rows.append({"tick": tick.number, "time_us": tick.time_us, "whole": whole, "ends": json.dumps(told, separators=(",", ":"))})
            before = tick
        self._unsure = True
        tx.append(self.topic, rows)


def _tick(row: Mapping[str, Any], before: Tick | None) -> Tick:
    """A tick as it was recorded: whole, or what changed since the one before."""
    told = json.loads(row["ends"])
    shed = frozenset(told.pop(_SHED, ()))
    ends = {topic: {int(p): end for p, end in parts.items()} for topic, parts in told.items()}
    return Tick(row["tick"], row["time_us"], ends if row["whole"] or before is None else _merged(before.ends, ends), shed)


def _merged(before: Ends, changed: Ends) -> Ends:
    """What did not change is shared, so that many ticks need little room."""
    return {**before, **{topic: {**before.get(topic, {}), **parts} for topic, parts in changed.items()}}


def _changed(before: Ends, after: Ends) -> Ends:
    differences = {topic: {p: end for p, end in parts.items() if before.get(topic, {}).get(p) != end} for topic, parts in after.items()}
    return {topic: parts for topic, parts in differences.items() if parts}
