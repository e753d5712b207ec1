"""Ticks: the logical time of a pipeline.

A tick assigns rows to a moment: for each input partition it has the end offset, below which rows
belong to this tick or an earlier one. This module has three parts:

- `Tick` and `TickJournal`: the recorded ticks of a pipeline, a topic with one fenced writer. A tick
  is durable before it is used, so that a replay over the same ticks gives the same rows. Most ticks
  are stored as the difference to the one before, which keeps many inputs cheap.
- `next_ticks`: cuts the rows that have arrived since the last tick into new ticks.
- Control records: how a derived topic carries the ticks and watermarks of its rows.

`runtime.runner` cuts and records ticks; `reader` turns them into offset ranges to read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Self

import numpy as np

from headrace.durations import from_us
from headrace.errors import NewerFormat, RetryError
from headrace.log.api import Log, Transaction
from headrace.log.values import AppendResult
from headrace.operators.kernel import UNSTARTED, Watermarks

Ends = Mapping[str, Mapping[int, int]]
_SCHEMA = "tick BIGINT, time_us BIGINT, whole BOOLEAN, ends STRING"
_SHED = "__shed"  # reserved name among a tick's ends: the topics that are shed in that tick
_ENDED = "__ended"  # reserved name among a tick's ends: event time has ended
_WHOLE_EVERY = 64  # every so many ticks, one is stored whole
_NEAR = 256  # among so many offsets there is at least one whole tick
MAX_CACHED_TICKS = 10_000


@dataclass(frozen=True)
class Tick:
    """Rows below `ends`, and at or above the ends of the tick before, belong to this tick.
    `time_us` is the pipeline's processing time.
    """

    number: int
    time_us: int
    ends: Ends
    shed: frozenset[str] = frozenset()
    """Topics whose rows are sampled in this tick because the pipeline is too far behind."""
    is_ended: bool = False
    """Whether event time ended with this tick or an earlier one: all that waits for a watermark is
    emitted, and a row of a later tick is late.
    """

    def end(self, topic: str, partition: int) -> int:
        return self.ends.get(topic, {}).get(partition, 0)


def first_tick(starts: Ends) -> Tick:
    """Tick 0: the offsets at which the pipeline starts to read."""
    return Tick(0, 0, starts)


class TickJournal:
    """The recorded ticks of a pipeline, oldest first.

    The newest ticks are cached. Older ones, which only a query that is catching up needs, are read
    from the log. `open` creates the topic and reads the newest ticks.
    """

    def __init__(self, log: Log, pipeline: str) -> None:
        self.log = log
        self.topic = f"__ticks.{pipeline}"
        self._ticks: list[Tick] = []  # the newest ones
        self._first: Tick | None = None
        self._offset = 0  # of the next tick to read
        # Whether ticks were added to a transaction whose outcome is not known yet.
        self._is_unsure = False

    @classmethod
    def open(cls, log: Log, pipeline: str) -> Self:
        """Create the journal's topic if it is missing, and read the newest ticks."""
        journal = cls(log, pipeline)
        log.create_topic(journal.topic, _SCHEMA, exist_ok=True)
        start, end = log.start_offsets(journal.topic)[0], log.end_offsets(journal.topic)[0]
        first = next(journal._read(start, min(end, start + _NEAR)), None)
        journal._first = None if first is None else _read_tick(first[1], None)
        journal._offset = journal._find_whole_tick(end, start)
        journal.refresh()
        return journal

    # Writing

    def record(self, tx: Transaction, ticks: Sequence[Tick]) -> None:
        """Add ticks to a transaction, which must check that its writer is the pipeline's runner."""
        rows, before = [], self.last
        for tick in ticks:
            whole = before is None or tick.number % _WHOLE_EVERY == 0
            ends = tick.ends if before is None or whole else _changed_ends(before.ends, tick.ends)
            stored: dict[str, Any] = dict(ends)
            if tick.shed:
                stored[_SHED] = dict.fromkeys(sorted(tick.shed), 1)
            if tick.is_ended:
                stored[_ENDED] = {}
            rows.append(
                {
                    "tick": tick.number,
                    "time_us": tick.time_us,
                    "whole": whole,
                    "ends": json.dumps(stored, separators=(",", ":")),
                }
            )
            before = tick
        self._is_unsure = True
        tx.append(self.topic, rows)

    def note_commit(self, ticks: Sequence[Tick], result: AppendResult) -> None:
        """Cache ticks that this process recorded and committed, instead of reading them back."""
        self._cache(ticks)
        self._offset = result.partitions(self.topic)[0].stop
        self._is_unsure = False

    def refresh(self) -> None:
        """Read the ticks that were recorded since the last call."""
        for offset, row in self._read(self._offset):
            self._cache([_read_tick(row, self._ticks[-1] if self._ticks else None)])
            self._offset = offset + 1
        self._is_unsure = False

    def _cache(self, ticks: Sequence[Tick]) -> None:
        if self._first is None and ticks:
            self._first = ticks[0]
        self._ticks += ticks
        if len(self._ticks) > 2 * MAX_CACHED_TICKS:
            del self._ticks[:-MAX_CACHED_TICKS]

    # Reading

    @property
    def first(self) -> Tick | None:
        """The oldest tick: 0, or a later one for a version that was replayed from there."""
        return self._first

    @property
    def last(self) -> Tick | None:
        """The newest tick."""
        # A commit that failed may have happened nevertheless. Reading costs less than recording the
        # same number twice.
        if self._is_unsure:
            self.refresh()
        return self._ticks[-1] if self._ticks else None

    def at(self, number: int) -> Tick | None:
        """The tick of a number."""
        ticks = self.between(number - 1, number)
        return ticks[0] if ticks else None

    def between(self, after: int, up_to: int) -> Sequence[Tick]:
        """The ticks (after, up_to]."""
        if not self._ticks:
            return []
        first = self._ticks[0].number
        cached = self._ticks[max(0, after + 1 - first) : max(0, up_to + 1 - first)]
        if after + 1 >= first:
            return cached
        return [*self._read_older(after, min(up_to, first - 1)), *cached]

    def _read_older(self, after: int, up_to: int) -> list[Tick]:
        """The ticks (after, up_to], which are no longer cached."""
        start, end = self.log.start_offsets(self.topic)[0], self._offset
        offset = self._find_whole_tick(self._find_offset(after + 1, start, end), start)
        ticks: list[Tick] = []
        before: Tick | None = None
        for _, row in self._read(offset, end):
            before = _read_tick(row, before)
            if before.number > up_to:
                break
            if before.number > after:
                ticks.append(before)
        return ticks

    def _find_offset(self, number: int, low: int, high: int) -> int:
        """An offset at or before that of a tick, by binary search: numbers rise with offsets."""
        while high - low > _NEAR:
            middle = (low + high) // 2
            next_row = next(self._read(middle, min(high, middle + _NEAR)), None)
            if next_row is not None and next_row[1]["tick"] <= number:
                low = middle
            else:
                high = middle
        return low

    def _find_whole_tick(self, offset: int, start: int) -> int:
        """The offset of a whole tick at or before `offset`. Every 64th tick is whole; on Kafka
        there are transaction markers between ticks.
        """
        while offset > start:
            low = max(start, offset - _NEAR)
            wholes = [position for position, row in self._read(low, offset + 1) if row["whole"]]
            if wholes:
                return wholes[-1]
            offset = low
        return start

    def _read(self, start: int, stop: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        for batch in self.log.read(self.topic, 0, start, stop):
            yield from zip(batch.column("_offset").to_pylist(), batch.to_pylist(), strict=True)


def _read_tick(row: Mapping[str, Any], before: Tick | None) -> Tick:
    """A tick from its row in the journal: whole, or the difference to the one before."""
    stored = json.loads(row["ends"])
    shed = frozenset(stored.pop(_SHED, ()))
    is_ended = stored.pop(_ENDED, None) is not None
    ends: Ends = {
        topic: {int(p): end for p, end in parts.items()} for topic, parts in stored.items()
    }
    if not row["whole"] and before is not None:
        # Ends that did not change are shared between ticks, so that many ticks need little memory.
        changed = {topic: {**before.ends.get(topic, {}), **parts} for topic, parts in ends.items()}
        ends = {**before.ends, **changed}
    return Tick(row["tick"], row["time_us"], ends, shed, is_ended)


def _changed_ends(before: Ends, after: Ends) -> Ends:
    differences = {
        topic: {p: end for p, end in parts.items() if before.get(topic, {}).get(p) != end}
        for topic, parts in after.items()
    }
    return {topic: parts for topic, parts in differences.items() if parts}


# Cutting ticks
#
# One tick takes in everything up to now, unless that is a backlog: then it is cut, by the time at
# which rows were appended, into ticks of bounded size. A cut never splits a transaction of the
# embedded log: a snapshot does not, and rows of one commit share their append time. Looking up
# offsets by time costs a Kafka cluster several messages, so a backlog is cut with about two lookups
# per tick.

MAX_ROWS_A_TICK = 1_000_000
MAX_BYTES_A_TICK = 512 << 20
_FEW_ROWS = 1_000
"""A tick with fewer rows is not cut for their size."""
_SAMPLED_ROWS = 20
MAX_TICKS_AT_ONCE = 1_000  # the rest of a backlog is cut by the next call
_FIRST_STEP_US = 1_000_000
_STEP_FACTOR = 4


@dataclass(frozen=True)
class _Moment:
    """The ends of the input partitions at the end of a microsecond."""

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
    likely_row_bytes: float | None = None,
) -> list[Tick]:
    """The ticks that are due after `last`: none if no row is new (unless `forced`), one, or several
    of at most `max_rows` rows if there is a backlog; of fewer, if rows are large. They are only
    looked at if that is possible: `likely_row_bytes` is how large the last ones were.
    """
    ends = log.snapshot(topics)
    for topic, parts in ends.items():
        for partition, end in parts.items():
            consumed = last.end(topic, partition)
            if end < consumed:
                raise RetryError(
                    f"{topic}[{partition}] ends at offset {end}, but the pipeline has read rows up"
                    f" to offset {consumed}: the topic has lost rows, or was deleted and created"
                    " again.",
                    fix=(
                        "restore the topic; or build the pipeline again from what is there:"
                        " headrace replay FILE --as v2 --retick."
                    ),
                )
    newest = _Moment(now_us, _advanced_ends(last.ends, ends))
    rows = rows_between(last.ends, newest.ends)
    if not rows:
        time_us = max(last.time_us, now_us)
        forced_tick = Tick(last.number + 1, time_us, newest.ends, is_ended=last.is_ended)
        return [forced_tick] if forced else []
    is_small = likely_row_bytes is not None and rows * likely_row_bytes <= MAX_BYTES_A_TICK / 4
    if rows >= _FEW_ROWS and not is_small:
        row_bytes = sample_row_bytes(log, last.ends, newest.ends)
        max_rows = min(max_rows, max(_FEW_ROWS, int(MAX_BYTES_A_TICK / row_bytes)))
    if rows <= max_rows:
        cuts: Iterable[_Moment] = [newest]
    else:
        cuts = islice(_cut_backlog(log, last, newest, max_rows), MAX_TICKS_AT_ONCE)
    ticks: list[Tick] = []
    for cut in cuts:
        time_us = max(last.time_us, cut.time_us)
        last = Tick(last.number + 1, time_us, cut.ends, is_ended=last.is_ended)
        ticks.append(last)
    return ticks


def final_tick(last: Tick, now_us: int) -> Tick:
    """The tick after `last` that ends event time. It has no rows."""
    return Tick(last.number + 1, max(last.time_us, now_us), last.ends, is_ended=True)


def sample_row_bytes(log: Log, before: Ends, after: Ends) -> float:
    """About how many bytes a row between two sets of ends has: the mean of a few at the beginning
    and at the end of each partition.
    """
    total_rows, total_bytes = 0, 0.0
    for topic, partitions in after.items():
        for partition, stop in partitions.items():
            start = before.get(topic, {}).get(partition, 0)
            ranges = {
                (start, min(stop, start + _SAMPLED_ROWS)),
                (max(start, stop - _SAMPLED_ROWS), stop),
            }
            batches = [
                batch
                for first, last in sorted(ranges)
                if first < last
                for batch in log.read(topic, partition, first, last)
            ]
            rows = sum(batch.num_rows for batch in batches)
            if rows:
                total_rows += stop - start
                total_bytes += (stop - start) * sum(batch.nbytes for batch in batches) / rows
    return max(1.0, total_bytes / max(1, total_rows))


def _advanced_ends(last: Ends, limit: Ends) -> Ends:
    """Ends of `limit`, or of `last` where those are higher: an end never goes back."""
    return {
        topic: {p: max(end, last.get(topic, {}).get(p, 0)) for p, end in parts.items()}
        for topic, parts in {**last, **limit}.items()
    }


def rows_between(before: Ends, after: Ends) -> int:
    """The number of offsets between two sets of ends."""
    return sum(
        end - before.get(topic, {}).get(p, 0)
        for topic, parts in after.items()
        for p, end in parts.items()
    )


def _cut_backlog(log: Log, last: Tick, newest: _Moment, max_rows: int) -> Iterator[_Moment]:
    """Moments at most `max_rows` apart; neighbours that fit into one tick are merged."""
    tick_start, reached = last.ends, last.ends
    pending: _Moment | None = None
    for low, high in pairwise(_moments_back(log, last.ends, newest)):
        for moment in _split(log, low, high, max_rows):
            if pending is not None and rows_between(tick_start, moment.ends) > max_rows:
                yield pending
                tick_start = reached
            pending, reached = moment, moment.ends
    if pending is not None:
        yield pending


def _moments_back(log: Log, consumed: Ends, newest: _Moment) -> list[_Moment]:
    """Moments from before the backlog to `newest`, found by going back in time in ever longer steps
    until no row is left.
    """
    moments, ago_us = [newest], _FIRST_STEP_US
    while rows_between(consumed, moments[-1].ends) and moments[-1].time_us > 0:
        time_us = max(0, newest.time_us - ago_us)
        moments.append(_find_moment(log, time_us, consumed, moments[-1].ends))
        ago_us *= _STEP_FACTOR
    if moments[-1].time_us == 0:
        moments.append(_Moment(-1, consumed))
    return moments[::-1]


def _split(log: Log, low: _Moment, high: _Moment, max_rows: int) -> Iterator[_Moment]:
    """Moments after `low`, up to `high`, by bisection. A single microsecond with more rows than the
    bound is not split.
    """
    rows = rows_between(low.ends, high.ends)
    if rows > max_rows and high.time_us - low.time_us > 1:
        middle = _find_moment(log, (low.time_us + high.time_us) // 2, low.ends, high.ends)
        yield from _split(log, low, middle, max_rows)
        yield from _split(log, middle, high, max_rows)
    elif rows:
        yield high


def _find_moment(log: Log, time_us: int, low: Ends, high: Ends) -> _Moment:
    """The ends of the input partitions at a time between two moments."""
    ends = {
        topic: log.offsets_at(topic, from_us(time_us + 1))
        for topic, parts in high.items()
        if parts != low.get(topic)
    }
    within = {
        topic: {p: min(ends.get(topic, parts).get(p, end), end) for p, end in parts.items()}
        for topic, parts in high.items()
    }
    return _Moment(time_us, _advanced_ends(low, within))


# Control records
#
# With each commit, every partition of a derived topic gets a control record: how many of its rows
# belong to which tick, and the watermarks of the step that wrote them. A reader of the topic can so
# tell where each of the writer's ticks ends (`read_control_ticks`). A pipeline that has the topic
# as an input cuts ticks of its own, as for any topic. On Kafka, a control record is a record with a
# reserved header.

VERSION = 1
TickRows = Mapping[int, int]
"""Tick -> number of rows."""


@dataclass(frozen=True)
class ControlTick:
    """Rows of a partition below `end` belong to this tick or an earlier one; the watermark and the
    horizon are those at the end of the tick.
    """

    tick: int
    end: int
    watermark_us: int = UNSTARTED
    horizon_us: int = UNSTARTED


def control_record(rows: TickRows, watermarks: Watermarks) -> bytes:
    """The control record of one partition for one commit. Watermarks are listed where they
    change.
    """
    before = np.stack([watermarks.watermark_before, watermarks.horizon_before])
    after = np.stack([watermarks.watermark, watermarks.horizon])
    changes = [
        [int(watermarks.ticks[index]), int(after[0, index]), int(after[1, index])]
        for index in np.flatnonzero((before != after).any(axis=0))
    ]
    content = {
        "version": VERSION,
        "tick": int(watermarks.ticks[-1]),
        "rows": sorted(rows.items()),
        "start": [watermarks.watermark_at_start, watermarks.horizon_at_start],
        "clocks": changes,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def read_control_ticks(
    log: Log, topic: str, partition: int, start: int | None = None, stop: int | None = None
) -> Iterator[ControlTick]:
    """The ticks in the control records of a partition, oldest first: those with rows, those that
    moved the watermark or the horizon, and the last of each commit.
    """
    for control in log.read_control(topic, partition, start, stop):
        content = json.loads(control.payload)
        if content["version"] > VERSION:
            raise NewerFormat(
                f"The topic {topic!r} was written by a newer Headrace.", fix="upgrade Headrace."
            )
        rows: dict[int, int] = dict(content["rows"])
        watermarks = {
            tick: (watermark_us, horizon_us) for tick, watermark_us, horizon_us in content["clocks"]
        }
        end, now_us = control.offset - sum(rows.values()), tuple(content["start"])
        for tick in sorted({*rows, *watermarks, content["tick"]}):
            end += rows.get(tick, 0)
            now_us = watermarks.get(tick, now_us)
            yield ControlTick(tick, end, *now_us)
