"""Cutting ticks: how far the inputs have come, and, for a backlog, where to cut it so that a tick stays bounded.

A cut never goes through a transaction of the embedded log: `snapshot` does not, and rows of one commit share their append time. Asking a log where it was at a
time costs a cluster several messages, so a backlog is cut with about two questions a tick.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

from headrace.durations import from_us
from headrace.engine.ticks import Ends, Tick
from headrace.errors import RetryError
from headrace.log.api import Log

MOST_ROWS_A_TICK = 1_000_000
MOST_TICKS_AT_ONCE = 1_000  # the rest of a backlog is cut next time
_FIRST_STEP_US = 1_000_000
_STEPS_GROW = 4


@dataclass(frozen=True)
class _Moment:
    """How far the inputs had come by the end of a microsecond."""

    time_us: int
    ends: Ends


def next_ticks(log: Log, topics: Iterable[str], last: Tick, now_us: int, *, most_rows: int = MOST_ROWS_A_TICK, forced: bool = False) -> list[Tick]:
    """The ticks that are due: none if nothing is new (unless `forced`), several if there is a backlog."""
    found = log.snapshot(topics)
    _refuse_what_went_back(last, found)
    newest = _Moment(now_us, _merged(last.ends, found))
    rows = rows_between(last.ends, newest.ends)
    if not rows:
        return [Tick(last.number + 1, max(last.time_us, now_us), newest.ends)] if forced else []
    cuts = [newest] if rows <= most_rows else islice(_cuts(log, last, newest, most_rows), MOST_TICKS_AT_ONCE)
    ticks: list[Tick] = []
    for cut in cuts:
        last = Tick(last.number + 1, max(last.time_us, cut.time_us), cut.ends)
        ticks.append(last)
    return ticks


def _refuse_what_went_back(last: Tick, found: Ends) -> None:
    """Rows below an end that was taken in are never read: if there are others now, that must not go unnoticed."""
    for topic, parts in found.items():
        for partition, end in parts.items():
            if end < last.end(topic, partition):
                raise RetryError(
                    f"{topic}[{partition}] ends at offset {end}, and rows up to {last.end(topic, partition)} have been taken in: it has lost rows, or was made again.",
                    fix="restore the topic; or build the pipeline anew from what is there: headrace replay FILE --as v2 --retick.",
                )


def _merged(last: Ends, limit: Ends) -> Ends:
    """An end never goes back."""
    return {topic: {p: max(end, last.get(topic, {}).get(p, 0)) for p, end in parts.items()} for topic, parts in {**last, **limit}.items()}


def rows_between(before: Ends, after: Ends) -> int:
    """How many offsets lie between two moments."""
    return sum(end - before.get(topic, {}).get(p, 0) for topic, parts in after.items() for p, end in parts.items())


# A backlog


def _cuts(log: Log, last: Tick, newest: _Moment, most_rows: int) -> Iterator[_Moment]:
    """Moments at most `most_rows` apart; neighbours that fit into one tick are one."""
    begun, reached = last.ends, last.ends
    waiting: _Moment | None = None
    for low, high in pairwise(_moments(log, last.ends, newest)):
        for moment in _split(log, low, high, most_rows):
            if waiting is not None and rows_between(begun, moment.ends) > most_rows:
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


def _split(log: Log, low: _Moment, high: _Moment, most_rows: int) -> Iterator[_Moment]:
    """Moments after `low`, up to `high`. Where even one microsecond has more rows than the bound, they are taken whole."""
    rows = rows_between(low.ends, high.ends)
    if rows > most_rows and high.time_us - low.time_us > 1:
        middle = _moment(log, (low.time_us + high.time_us) // 2, low.ends, high.ends)
        yield from _split(log, low, middle, most_rows)
        yield from _split(log, middle, high, most_rows)
    elif rows:
        yield high


def _moment(log: Log, time_us: int, low: Ends, high: Ends) -> _Moment:
    """Where each partition was at a time between two moments."""
    ends = {topic: log.offsets_at(topic, from_us(time_us + 1)) for topic, parts in high.items() if parts != low.get(topic)}
    within = {topic: {p: min(ends.get(topic, parts).get(p, end), end) for p, end in parts.items()} for topic, parts in high.items()}
    return _Moment(time_us, _merged(low, within))
