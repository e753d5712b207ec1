"""Cutting ticks: how far the inputs have come, and, for a backlog, where to cut it so that a tick stays bounded.

A cut never goes through a transaction of the embedded log: `snapshot` does not, and rows of one commit share their append time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.durations import from_us
from headrace.engine.ticks import Ends, Tick
from headrace.log.api import Log

MOST_ROWS_A_TICK = 1_000_000


def next_ticks(log: Log, topics: Iterable[str], last: Tick, now_us: int, *, most_rows: int = MOST_ROWS_A_TICK, forced: bool = False) -> list[Tick]:
    """The ticks that are due: none if nothing is new (unless `forced`), several if there is a backlog."""
    limit = log.snapshot(topics)
    ticks: list[Tick] = []
    while True:
        ends = _merged(last.ends, limit)
        rows = rows_between(last.ends, ends)
        if rows <= most_rows:
            break
        cut_us = _last_time_within(log, last.ends, ends, most_rows, now_us)
        ends = _merged(last.ends, _ends_at(log, ends, cut_us))
        if rows_between(last.ends, ends) == rows:
            break
        last = Tick(last.number + 1, max(last.time_us, min(cut_us, now_us)), ends)
        ticks.append(last)
    if rows or (forced and not ticks):
        ticks.append(Tick(last.number + 1, max(last.time_us, now_us), _merged(last.ends, limit)))
    return ticks


def _merged(last: Ends, limit: Ends) -> Ends:
    """An end never goes back, whatever was deleted."""
    return {topic: {p: max(end, last.get(topic, {}).get(p, 0)) for p, end in parts.items()} for topic, parts in {**last, **limit}.items()}


def rows_between(before: Ends, after: Ends) -> int:
    """How many offsets lie between two moments."""
    return sum(end - before.get(topic, {}).get(p, 0) for topic, parts in after.items() for p, end in parts.items())


def _ends_at(log: Log, limit: Ends, time_us: int) -> Mapping[str, Mapping[int, int]]:
    """Where each partition had come to by the end of a microsecond."""
    return {
        topic: {p: min(end, parts[p]) for p, end in log.offsets_at(topic, from_us(time_us + 1)).items() if p in parts}
        for topic, parts in limit.items()
    }


def _last_time_within(log: Log, before: Ends, limit: Ends, most_rows: int, now_us: int) -> int:
    """The latest append time by which at most `most_rows` rows had come; if the first commit alone is larger, that one."""
    low, high = 0, now_us
    while low < high:
        middle = (low + high + 1) // 2
        within = rows_between(before, _merged(before, _ends_at(log, limit, middle))) <= most_rows
        low, high = (middle, high) if within else (low, middle - 1)
    if rows_between(before, _merged(before, _ends_at(log, limit, low))):
        return low
    return low + 1  # one commit larger than the bound is taken whole
