"""Ticks: the pipeline's own time. A tick says up to which offset of each input partition rows
belong to it.

The journal of a pipeline's ticks is a topic with one fenced writer. A tick is durable before it is
used; replays use it again, and so give the same rows. Most ticks are stored as what changed since
the one before, so that many inputs cost little.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from headrace.durations import from_us
from headrace.errors import NewerFormat, RetryError
from headrace.log.api import Log, Transaction
from headrace.log.values import AppendResult
from headrace.operators.kernel import UNSTARTED, Watermarks

Ends = Mapping[str, Mapping[int, int]]
_SCHEMA = "tick BIGINT, time_us BIGINT, whole BOOLEAN, ends STRING"
_SHED = (  # among the ends, in ticks in which rows are left out; no topic of users has such a name
    "__shed"
)
_WHOLE_EVERY = 64
_NEAR = 256  # offsets; among so many there is a whole tick
MAX_AT_HAND = 10_000


@dataclass(frozen=True)
class Tick:
    """Rows below `ends` and at or above the ends of the tick before belong to it. Its time is the
    pipeline's processing time.
    """

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
    """The recorded ticks of a pipeline, oldest first. The newest ones are at hand; older ones,
    which only a query that is catching up needs, are read when they are asked for.
    """

    def __init__(self, log: Log, pipeline: str) -> None:
        self.log, self.topic = log, f"__ticks.{pipeline}"
        log.create_topic(self.topic, _SCHEMA, exist_ok=True)
        self._ticks: list[Tick] = []
        self._first: Tick | None = None
        self._offset = self._begin_near_the_end()
        # whether something was given to a transaction whose outcome has not been looked at
        self._unsure = False
        self.refresh()

    def _begin_near_the_end(self) -> int:
        """An offset from which on there is a whole tick, and the newest one, without reading all of
        them.
        """
        start, end = self.log.start_offsets(self.topic)[0], self.log.end_offsets(self.topic)[0]
        first = next(self._read(start, min(end, start + _NEAR)), None)
        self._first = None if first is None else _tick(first[1], None)
        return self._whole_before(end, start)

    def _whole_before(self, offset: int, start: int) -> int:
        """The offset of a whole tick at or before this one; there is one every 64 ticks, with
        markers between them on Kafka.
        """
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

    def took(self, ticks: Sequence[Tick], position: AppendResult) -> None:
        """Ticks that were recorded here, and committed at a position: there is no need to read
        them.
        """
        self._keep(ticks)
        self._offset = position.partitions(self.topic)[0].stop
        self._unsure = False

    def _keep(self, ticks: Sequence[Tick]) -> None:
        if self._first is None and ticks:
            self._first = ticks[0]
        self._ticks += ticks
        if len(self._ticks) > 2 * MAX_AT_HAND:
            del self._ticks[:-MAX_AT_HAND]

    def _read(self, start: int, stop: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        for batch in self.log.read(self.topic, 0, start, stop):
            yield from zip(batch.column("_offset").to_pylist(), batch.to_pylist(), strict=True)

    @property
    def first(self) -> Tick | None:
        """Where the pipeline began: tick 0, unless it is a version that was replayed from a later
        one.
        """
        return self._first

    @property
    def last(self) -> Tick | None:
        # a commit that failed may have happened nevertheless; to record the same number twice would
        # be worse than to look
        if self._unsure:
            self.refresh()
        return self._ticks[-1] if self._ticks else None

    def between(self, after: int, up_to: int) -> Sequence[Tick]:
        """The ticks (after, up_to]."""
        if not self._ticks:
            return []
        first = self._ticks[0].number
        at_hand = self._ticks[max(0, after + 1 - first) : max(0, up_to + 1 - first)]
        return (
            at_hand
            if after + 1 >= first
            else [*self._older(after, min(up_to, first - 1)), *at_hand]
        )

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
        """An offset at or before that of a tick: numbers rise with offsets, so it is found by
        halving.
        """
        while high - low > _NEAR:
            middle = (low + high) // 2
            found = next(self._read(middle, min(high, middle + _NEAR)), None)
            low, high = (
                (middle, high)
                if found is not None and found[1]["tick"] <= number
                else (low, middle)
            )
        return low

    def at(self, number: int) -> Tick | None:
        found = self.between(number - 1, number)
        return found[0] if found else None

    def record(self, tx: Transaction, ticks: Sequence[Tick]) -> None:
        """Add ticks to a transaction, which must check that its writer is still the pipeline's
        runner.
        """
        rows, before = [], self.last
        for tick in ticks:
            whole = before is None or tick.number % _WHOLE_EVERY == 0
            ends = tick.ends if before is None or whole else _changed(before.ends, tick.ends)
            told = {**ends, _SHED: dict.fromkeys(sorted(tick.shed), 1)} if tick.shed else ends
            rows.append(
                {
                    "tick": tick.number,
                    "time_us": tick.time_us,
                    "whole": whole,
                    "ends": json.dumps(told, separators=(",", ":")),
                }
            )
            before = tick
        self._unsure = True
        tx.append(self.topic, rows)


def _tick(row: Mapping[str, Any], before: Tick | None) -> Tick:
    """A tick as it was recorded: whole, or what changed since the one before."""
    told = json.loads(row["ends"])
    shed = frozenset(told.pop(_SHED, ()))
    ends = {topic: {int(p): end for p, end in parts.items()} for topic, parts in told.items()}
    return Tick(
        row["tick"],
        row["time_us"],
        ends if row["whole"] or before is None else _merged(before.ends, ends),
        shed,
    )


def _merged(before: Ends, changed: Ends) -> Ends:
    """What did not change is shared, so that many ticks need little room."""
    return {
        **before,
        **{topic: {**before.get(topic, {}), **parts} for topic, parts in changed.items()},
    }


def _changed(before: Ends, after: Ends) -> Ends:
    differences = {
        topic: {p: end for p, end in parts.items() if before.get(topic, {}).get(p) != end}
        for topic, parts in after.items()
    }
    return {topic: parts for topic, parts in differences.items() if parts}


# Cutting ticks: how far the inputs have come, and, for a backlog, where to cut it so that a tick
# stays bounded.
#
# A cut never goes through a transaction of the embedded log: `snapshot` does not, and rows of one
# commit share their append time. Asking a log where it was at a time costs a cluster several
# messages, so a backlog is cut with about two questions a tick.


MAX_ROWS_A_TICK = 1_000_000
MAX_TICKS_AT_ONCE = 1_000  # the rest of a backlog is cut next time
_FIRST_STEP_US = 1_000_000
_STEPS_GROW = 4


@dataclass(frozen=True)
class _Moment:
    """How far the inputs had come by the end of a microsecond."""

    time_us: int
    ends: Ends


def next_ticks(
    log: Log,
    topics: Iterable[str],
    last: Tick,
    now_us: int,
    *,
    max_rows: int = MAX_ROWS_A_TICK,
    forced: bool = False,
) -> list[Tick]:
    """The ticks that are due: none if nothing is new (unless `forced`), several if there is a
    backlog.
    """
    found = log.snapshot(topics)
    _refuse_what_went_back(last, found)
    newest = _Moment(now_us, _merged_ends(last.ends, found))
    rows = rows_between(last.ends, newest.ends)
    if not rows:
        return [Tick(last.number + 1, max(last.time_us, now_us), newest.ends)] if forced else []
    cuts = (
        [newest]
        if rows <= max_rows
        else islice(_cuts(log, last, newest, max_rows), MAX_TICKS_AT_ONCE)
    )
    ticks: list[Tick] = []
    for cut in cuts:
        last = Tick(last.number + 1, max(last.time_us, cut.time_us), cut.ends)
        ticks.append(last)
    return ticks


def _refuse_what_went_back(last: Tick, found: Ends) -> None:
    """Rows below an end that was taken in are never read: if there are others now, that must not go
    unnoticed.
    """
    for topic, parts in found.items():
        for partition, end in parts.items():
            if end < last.end(topic, partition):
                raise RetryError(
                    f"{topic}[{partition}] ends at offset {end}, and rows up to"
                    f" {last.end(topic, partition)} have been taken in: it has lost rows, or was"
                    " made again.",
                    fix=(
                        "restore the topic; or build the pipeline anew from what is there: headrace"
                        " replay FILE --as v2 --retick."
                    ),
                )


def _merged_ends(last: Ends, limit: Ends) -> Ends:
    """An end never goes back."""
    return {
        topic: {p: max(end, last.get(topic, {}).get(p, 0)) for p, end in parts.items()}
        for topic, parts in {**last, **limit}.items()
    }


def rows_between(before: Ends, after: Ends) -> int:
    """How many offsets lie between two moments."""
    return sum(
        end - before.get(topic, {}).get(p, 0)
        for topic, parts in after.items()
        for p, end in parts.items()
    )


# A backlog


def _cuts(log: Log, last: Tick, newest: _Moment, max_rows: int) -> Iterator[_Moment]:
    """Moments at most `max_rows` apart; neighbours that fit into one tick are one."""
    begun, reached = last.ends, last.ends
    waiting: _Moment | None = None
    for low, high in pairwise(_moments(log, last.ends, newest)):
        for moment in _split(log, low, high, max_rows):
            if waiting is not None and rows_between(begun, moment.ends) > max_rows:
                yield waiting
                begun = reached
            waiting, reached = moment, moment.ends
    if waiting is not None:
        yield waiting


def _moments(log: Log, begun: Ends, newest: _Moment) -> list[_Moment]:
    """Back in time in ever longer steps, until there is nothing left to take in before."""
    found, ago_us = [newest], _FIRST_STEP_US
    while rows_between(begun, found[-1].ends) and found[-1].time_us > 0:
        found.append(_moment(log, max(0, newest.time_us - ago_us), begun, found[-1].ends))
        ago_us *= _STEPS_GROW
    return [*([_Moment(-1, begun)] if found[-1].time_us == 0 else []), *reversed(found)]


def _split(log: Log, low: _Moment, high: _Moment, max_rows: int) -> Iterator[_Moment]:
    """Moments after `low`, up to `high`. Where even one microsecond has more rows than the bound,
    they are taken whole.
    """
    rows = rows_between(low.ends, high.ends)
    if rows > max_rows and high.time_us - low.time_us > 1:
        middle = _moment(log, (low.time_us + high.time_us) // 2, low.ends, high.ends)
        yield from _split(log, low, middle, max_rows)
        yield from _split(log, middle, high, max_rows)
    elif rows:
        yield high


def _moment(log: Log, time_us: int, low: Ends, high: Ends) -> _Moment:
    """Where each partition was at a time between two moments."""
    ends = {
        topic: log.offsets_at(topic, from_us(time_us + 1))
        for topic, parts in high.items()
        if parts != low.get(topic)
    }
    within = {
        topic: {p: min(ends.get(topic, parts).get(p, end), end) for p, end in parts.items()}
        for topic, parts in high.items()
    }
    return _Moment(time_us, _merged_ends(low, within))


# What a derived topic carries beside its rows: with each commit, how many rows of which tick a
# partition got, and the clocks of the step that wrote it.
#
# So whoever reads the topic can know where each of the writer's ticks ends, and how far time had
# come then: `carried_ticks`. A pipeline that reads the topic as an input cuts ticks of its own, as
# of any topic. On Kafka what is carried is a record with a reserved header.


VERSION = 1
TickRows = Mapping[int, int]
"""Tick -> rows of it."""


@dataclass(frozen=True)
class ControlTick:
    """Rows of a partition below `end` are of this tick or an earlier one; the clocks are as of the
    end of the tick.
    """

    tick: int
    end: int
    watermark_us: int = UNSTARTED
    horizon_us: int = UNSTARTED


def control_record(rows: TickRows, watermarks: Watermarks) -> bytes:
    """What one partition gets with a commit. Clocks are told where they change."""
    before = np.stack([watermarks.watermark_before, watermarks.horizon_before])
    moved = np.flatnonzero(
        (before != np.stack([watermarks.complete, watermarks.closed])).any(axis=0)
    )
    changes = [
        [int(watermarks.ticks[at]), int(watermarks.complete[at]), int(watermarks.closed[at])]
        for at in moved
    ]
    start = [watermarks.watermark_at_start, watermarks.horizon_at_start]
    content = {
        "version": VERSION,
        "tick": int(watermarks.ticks[-1]),
        "rows": sorted(rows.items()),
        "start": start,
        "clocks": changes,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def read_control_ticks(
    log: Log, topic: str, partition: int, start: int | None = None
) -> Iterator[ControlTick]:
    """The ticks that a partition's rows belong to, oldest first: those that brought rows, those
    that moved a clock, and the last of each commit.
    """
    for control in log.read_control(topic, partition, start):
        content = json.loads(control.payload)
        if content["version"] > VERSION:
            raise NewerFormat(
                f"The topic {topic!r} was written by a newer Headrace.", fix="upgrade Headrace."
            )
        yield from _ticks(content, control.offset)


def _ticks(content: dict[str, Any], end: int) -> Iterator[ControlTick]:
    rows: dict[int, int] = dict(content["rows"])
    watermarks = {
        tick: (watermark_us, horizon_us) for tick, watermark_us, horizon_us in content["clocks"]
    }
    at, now_us = end - sum(rows.values()), tuple(content["start"])
    for tick in sorted({*rows, *watermarks, content["tick"]}):
        at, now_us = at + rows.get(tick, 0), watermarks.get(tick, now_us)
        yield ControlTick(tick, at, *now_us)
